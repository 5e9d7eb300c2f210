//! To whom the owner of a mailbox has itself written: for them half of it is reserved (decision 49).

use std::collections::{BTreeSet, HashMap};

use super::record::{Record, Who};
use crate::codec::time::UnixMillis;

/// Contacts of one owner; beyond it the one not written to for longest is forgotten.
const MAX_OF_OWNER: usize = 1_024;
/// Contacts in all, about 30 MiB; beyond it likewise.
const MAX_CONTACTS: usize = 131_072;
/// How long a contact counts after it was written to, ms.
const KEEP_MS: u64 = 30 * 24 * 3_600_000;
/// A contact is noted anew when this has gone by, ms: not with every envelope.
const RENEW_MS: u64 = 24 * 3_600_000;

#[derive(Debug, Default)]
pub(super) struct Contacts {
    of: HashMap<Who, HashMap<Who, UnixMillis>>,
    by_age: BTreeSet<(UnixMillis, Who, Who)>,
}

impl Contacts {
    /// Whether `owner` has written to `peer`. Everybody is a contact of its own.
    pub(super) fn knows(&self, owner: Who, peer: Who) -> bool {
        owner == peer || self.of.get(&owner).is_some_and(|peers| peers.contains_key(&peer))
    }

    /// Notes that `owner` writes to `peer`.
    pub(super) fn note(&mut self, owner: Who, peer: Who, at: UnixMillis, out: &mut Vec<Record>) {
        let peers = self.of.get(&owner);
        let last = peers.and_then(|peers| peers.get(&peer)).copied();
        if last.is_some_and(|last| at.since(last) < RENEW_MS) {
            return;
        }
        if last.is_none() {
            if let Some(peers) = peers.filter(|peers| peers.len() >= MAX_OF_OWNER)
                && let Some((oldest, _)) = peers.iter().min_by_key(|(_, at)| **at)
            {
                let oldest = *oldest;
                self.forget(owner, oldest, out);
            }
            if self.by_age.len() >= MAX_CONTACTS
                && let Some((_, owner, peer)) = self.by_age.first().copied()
            {
                self.forget(owner, peer, out);
            }
        }
        self.restore(owner, peer, at);
        out.push(Record::Contact { owner, peer, at });
    }

    pub(super) fn restore(&mut self, owner: Who, peer: Who, at: UnixMillis) {
        if let Some(last) = self.of.entry(owner).or_default().insert(peer, at) {
            self.by_age.remove(&(last, owner, peer));
        }
        self.by_age.insert((at, owner, peer));
    }

    fn forget(&mut self, owner: Who, peer: Who, out: &mut Vec<Record>) {
        let Some(peers) = self.of.get_mut(&owner) else { return };
        let Some(at) = peers.remove(&peer) else { return };
        if peers.is_empty() {
            self.of.remove(&owner);
        }
        self.by_age.remove(&(at, owner, peer));
        out.push(Record::ContactGone { owner, peer });
    }

    /// Forgets at most `most` contacts that are too old.
    pub(super) fn prune(&mut self, now: UnixMillis, most: usize, out: &mut Vec<Record>) {
        for _ in 0..most {
            match self.by_age.first().copied() {
                Some((at, owner, peer)) if now.since(at) > KEEP_MS => self.forget(owner, peer, out),
                _ => return,
            }
        }
    }
}
