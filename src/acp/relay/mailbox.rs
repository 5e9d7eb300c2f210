//! Mailboxes (design 11.1, decision 49): envelopes in the order in which they came, until they are
//! acknowledged or their time is over, within bounds for the relay, a mailbox, and a sender in it.
//! Holds the index; the bytes are in the store.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::Limits;
use super::contacts::Contacts;
use super::record::{Cursor, IdKey, Parcel, Record, Who};
use crate::acp::code::{Code, Error, Result};
use crate::acp::value::Digest;
use crate::codec::time::UnixMillis;

/// Envelopes and ids that leave in one go, so that a pause does not become one long step.
const MAX_PRUNE: usize = 4_096;
/// Ids kept of envelopes that have left, about 30 MiB. Beyond it those that are over soonest are
/// forgotten: sent again, such an envelope would be delivered again, and its receiver drops it.
const MAX_SPENT: usize = 262_144;

#[derive(Debug)]
struct Held {
    to: Who,
    from: Who,
    id: IdKey,
    bytes: u64,
    until: UnixMillis,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    digest: Digest,
    cursor: u64,
    until: UnixMillis,
}

#[derive(Clone, Copy, Debug, Default)]
struct Share {
    count: usize,
    bytes: u64,
}

#[derive(Debug, Default)]
struct Mailbox {
    cursors: BTreeSet<u64>,
    bytes: u64,
    senders: HashMap<Who, Share>,
}

/// An envelope that waits in a mailbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Its place.
    pub cursor: Cursor,
    /// Bytes of its canonical form.
    pub bytes: u64,
}

/// What became of an envelope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Its place in the mailbox.
    pub cursor: Cursor,
    /// Whether it is new here; otherwise it was taken before.
    pub fresh: bool,
}

#[derive(Debug, Default)]
pub(super) struct Mailboxes {
    next: u64,
    /// Cursors below this are in the store, and may be shown.
    stored: u64,
    held: BTreeMap<u64, Held>,
    of: HashMap<Who, Mailbox>,
    ending: BTreeSet<(UnixMillis, u64)>,
    bytes: u64,
    known: HashMap<IdKey, Known>,
    /// Of `known`, those that are in no mailbox.
    spent: BTreeSet<(UnixMillis, IdKey)>,
    contacts: Contacts,
}

fn full(what: &str) -> Error {
    Error::new(Code::MailboxFull, format!("{what}; try again when some were fetched"))
}

impl Mailboxes {
    pub(super) fn accept(
        &mut self,
        parcel: Parcel,
        limits: &Limits,
        now: UnixMillis,
        out: &mut Vec<Record>,
    ) -> Result<Taken> {
        let id = parcel.key();
        if let Some(known) = self.known.get(&id) {
            if known.digest != parcel.digest {
                let text = "another envelope of this sender had this id";
                return Err(Error::new(Code::EnvelopeIdReused, text));
            }
            return Ok(Taken { cursor: Cursor(known.cursor), fresh: false });
        }
        let Parcel { to, from, digest, until: known_until, json, .. } = parcel;
        if now >= known_until {
            return Err(Error::new(Code::EnvelopeExpired, "the envelope is too old"));
        }
        let bytes = u64::try_from(json.len()).unwrap_or(u64::MAX);
        self.check_room(to, from, bytes, limits)?;
        let cursor = self.take_cursor(out);
        let until = known_until.min(now.plus(limits.mailbox_ms));
        self.hold(cursor, Held { to, from, id, bytes, until });
        self.known.insert(id, Known { digest, cursor, until: known_until });
        self.contacts.note(from, to, now, out);
        out.push(Record::Envelope {
            cursor,
            to,
            from,
            id,
            digest,
            bytes,
            until,
            known_until,
            json,
        });
        Ok(Taken { cursor: Cursor(cursor), fresh: true })
    }

    /// Gives out the next cursor. None is given out twice, also after a restart.
    pub(super) fn take_cursor(&mut self, out: &mut Vec<Record>) -> u64 {
        let cursor = self.next;
        self.next += 1;
        out.push(Record::Next { cursor: self.next });
        cursor
    }

    fn check_room(&self, to: Who, from: Who, bytes: u64, limits: &Limits) -> Result<()> {
        if self.held.len() >= limits.envelopes || self.bytes + bytes > limits.bytes {
            return Err(full("the relay is full"));
        }
        let Some(mailbox) = self.of.get(&to) else { return Ok(()) };
        let share = mailbox.senders.get(&from).copied().unwrap_or_default();
        if share.count >= limits.sender_envelopes || share.bytes + bytes > limits.sender_bytes {
            return Err(full("too much of this sender waits in the mailbox"));
        }
        let (count, all) = (mailbox.cursors.len() + 1, mailbox.bytes + bytes);
        if count > limits.mailbox_envelopes || all > limits.mailbox_bytes {
            return Err(full("the mailbox is full"));
        }
        let half = (limits.mailbox_envelopes / 2, limits.mailbox_bytes / 2);
        if (count <= half.0 && all <= half.1) || self.contacts.knows(to, from) {
            return Ok(());
        }
        let strangers = mailbox.senders.iter().filter(|(who, _)| !self.contacts.knows(to, **who));
        let (count, all) = strangers
            .fold((1, bytes), |(count, all), (_, share)| (count + share.count, all + share.bytes));
        if count > half.0 || all > half.1 {
            let text = "the half of the mailbox that is open to everybody is full";
            return Err(full(text));
        }
        Ok(())
    }

    fn hold(&mut self, cursor: u64, held: Held) {
        let mailbox = self.of.entry(held.to).or_default();
        mailbox.cursors.insert(cursor);
        mailbox.bytes += held.bytes;
        let share = mailbox.senders.entry(held.from).or_default();
        share.count += 1;
        share.bytes += held.bytes;
        self.bytes += held.bytes;
        self.ending.insert((held.until, cursor));
        self.held.insert(cursor, held);
    }

    /// Ends an envelope's stay; its id stays known while it could be sent again.
    fn release(&mut self, cursor: u64, now: UnixMillis, out: &mut Vec<Record>) {
        let Some(held) = self.held.remove(&cursor) else { return };
        self.ending.remove(&(held.until, cursor));
        self.bytes -= held.bytes;
        if let Some(mailbox) = self.of.get_mut(&held.to) {
            mailbox.cursors.remove(&cursor);
            mailbox.bytes -= held.bytes;
            if let Some(share) = mailbox.senders.get_mut(&held.from) {
                share.count -= 1;
                share.bytes -= held.bytes;
                if share.count == 0 {
                    mailbox.senders.remove(&held.from);
                }
            }
            if mailbox.cursors.is_empty() {
                self.of.remove(&held.to);
            }
        }
        out.push(Record::EnvelopeGone { cursor });
        let Some(known) = self.known.get(&held.id).copied() else { return };
        if now >= known.until {
            self.known.remove(&held.id);
            return;
        }
        let Known { digest, cursor, until } = known;
        self.spent.insert((until, held.id));
        out.push(Record::Known { id: held.id, digest, cursor, until });
        if self.spent.len() > MAX_SPENT {
            self.forget_first(out);
        }
    }

    fn forget_first(&mut self, out: &mut Vec<Record>) {
        if let Some((_, id)) = self.spent.pop_first() {
            self.known.remove(&id);
            out.push(Record::KnownGone { id });
        }
    }

    /// Deletes everything of `owner` up to and including `up_to` that may have been shown.
    pub(super) fn acknowledge(
        &mut self,
        owner: Who,
        up_to: Cursor,
        now: UnixMillis,
        out: &mut Vec<Record>,
    ) {
        let Some(mailbox) = self.of.get(&owner) else { return };
        let shown = mailbox.cursors.range(..self.stored).take_while(|cursor| **cursor <= up_to.0);
        for cursor in shown.copied().collect::<Vec<_>>() {
            self.release(cursor, now, out);
        }
    }

    /// What waits for `owner` behind `after`, oldest first, as far as it is stored.
    pub(super) fn waiting(
        &self,
        owner: Who,
        after: Option<Cursor>,
        now: UnixMillis,
    ) -> impl Iterator<Item = Waiting> {
        let first = after.map_or(0, |after| after.0.saturating_add(1));
        let cursors = self.of.get(&owner).into_iter().flat_map(move |mailbox| {
            mailbox.cursors.range(first..).take_while(|cursor| **cursor < self.stored)
        });
        cursors.filter_map(move |cursor| {
            let held = self.held.get(cursor).filter(|held| now < held.until)?;
            Some(Waiting { cursor: Cursor(*cursor), bytes: held.bytes })
        })
    }

    /// Everything given out so far is in the store.
    pub(super) fn stored(&mut self) {
        self.stored = self.next;
    }

    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Never gives out a cursor below `next`.
    pub(super) fn begin_at(&mut self, next: u64) {
        self.next = self.next.max(next);
        self.stored();
    }

    pub(super) fn prune(&mut self, now: UnixMillis, out: &mut Vec<Record>) {
        for _ in 0..MAX_PRUNE {
            match self.ending.first().copied() {
                Some((until, cursor)) if now >= until => self.release(cursor, now, out),
                _ => break,
            }
        }
        for _ in 0..MAX_PRUNE {
            match self.spent.first() {
                Some((until, _)) if now >= *until => self.forget_first(out),
                _ => break,
            }
        }
        self.contacts.prune(now, MAX_PRUNE, out);
    }

    /// Envelopes held and their bytes.
    pub(super) fn load(&self) -> (usize, u64) {
        (self.held.len(), self.bytes)
    }

    /// Takes one of its records back.
    pub(super) fn restore(&mut self, record: Record) {
        match record {
            Record::Next { cursor } => self.begin_at(cursor),
            Record::Envelope {
                cursor, to, from, id, digest, bytes, until, known_until, ..
            } => {
                self.hold(cursor, Held { to, from, id, bytes, until });
                self.known.insert(id, Known { digest, cursor, until: known_until });
                self.begin_at(cursor.saturating_add(1));
            }
            Record::Known { id, digest, cursor, until } => {
                self.known.insert(id, Known { digest, cursor, until });
                self.spent.insert((until, id));
            }
            Record::Contact { owner, peer, at } => self.contacts.restore(owner, peer, at),
            _ => {}
        }
    }
}
