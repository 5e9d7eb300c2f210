//! Revocation notices as a relay passes them on (design 9.3, 11.1): what the registry of revocations
//! takes in, in the order in which it came, so that who has read up to a cursor asks for the rest.

use std::collections::{BTreeMap, HashMap};

use super::Listing;
use super::record::{Cursor, Record};
use crate::acp::code::Result;
use crate::acp::did::Did;
use crate::acp::json::canonical;
use crate::acp::objects::RevocationNotice;
use crate::acp::revocation::{Key, RevocationRegistry, key_of};
use crate::acp::value::read_bytes;
use crate::codec::time::UnixMillis;

/// Bytes of one notice: the reason may have 4,000 characters of four bytes.
pub const MAX_NOTICE: usize = 32 * 1024;
/// Notices looked at for one page of one issuer's; the next page goes on behind them.
const MAX_LOOK: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct Notices {
    pub(super) registry: RevocationRegistry,
    list: BTreeMap<u64, Key>,
    places: HashMap<Key, u64>,
}

impl Notices {
    /// Takes a notice in at the place `cursor`. `false`: nothing new, and the place stays free.
    pub(super) fn add(
        &mut self,
        notice: RevocationNotice,
        cursor: u64,
        now: UnixMillis,
        out: &mut Vec<Record>,
    ) -> Result<bool> {
        let (key, json) = (key_of(&notice), canonical(&notice)?);
        if !self.registry.add(notice, now)? {
            return Ok(false);
        }
        out.push(Record::Notice { cursor, at: now, json });
        if let Some(replaced) = self.place(key, cursor) {
            out.push(Record::NoticeGone { cursor: replaced });
        }
        Ok(true)
    }

    fn place(&mut self, key: Key, cursor: u64) -> Option<u64> {
        self.list.insert(cursor, key.clone());
        let replaced = self.places.insert(key, cursor)?;
        self.list.remove(&replaced);
        Some(replaced)
    }

    pub(super) fn restore(&mut self, cursor: u64, at: UnixMillis, json: &[u8]) -> Result<()> {
        let notice: RevocationNotice = read_bytes(json, MAX_NOTICE)?;
        self.place(key_of(&notice), cursor);
        self.registry.restore(notice, at);
        Ok(())
    }

    pub(super) fn list(
        &self,
        issuer: Option<Did>,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Listing> {
        let first = after.map_or(0, |after| after.0.saturating_add(1));
        let mut listing = Listing { items: Vec::new(), next: after.map(|c| c.to_string()) };
        for (looked, (cursor, key)) in (1..).zip(self.list.range(first..)) {
            if issuer.is_none_or(|issuer| issuer == key.0)
                && let Some(notice) = self.registry.get(key)
            {
                listing.items.push(canonical(notice)?);
            }
            listing.next = Some(Cursor(*cursor).to_string());
            if listing.items.len() >= limit || looked >= MAX_LOOK {
                break;
            }
        }
        Ok(listing)
    }

    /// Forgets notices that cannot matter any more. Goes through all of them: not for every request.
    pub(super) fn prune(&mut self, now: UnixMillis, out: &mut Vec<Record>) {
        self.registry.prune(now);
        let (registry, places) = (&self.registry, &mut self.places);
        self.list.retain(|cursor, key| {
            let kept = registry.get(key).is_some();
            if !kept {
                places.remove(key);
                out.push(Record::NoticeGone { cursor: *cursor });
            }
            kept
        });
    }
}
