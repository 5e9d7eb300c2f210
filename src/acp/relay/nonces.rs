//! Nonces of RelayAuth tokens that were used (design 11.2, decision 49). One is kept for as long as
//! its token could pass: until `issuedAt` plus the window, inclusive. Nothing is pushed out before;
//! when there is no place, a new token is refused and an old one stays used.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::auth::{WINDOW_MS, check_fresh};
use super::record::{Record, Who};
use crate::acp::code::{Code, Error, Result};
use crate::acp::objects::RelayAuth;
use crate::codec::time::UnixMillis;

/// Nonces forgotten in one go: an idle relay's leftovers must not hold up a group of writers.
const MAX_PRUNE: usize = 4_096;

/// The nonces that are not forgotten yet.
#[derive(Debug)]
pub(super) struct Nonces {
    per_did: usize,
    in_all: usize,
    live: BTreeSet<(UnixMillis, Who, [u8; 16])>,
    of: HashMap<Who, HashSet<[u8; 16]>>,
    /// What ended before this was forgotten. Should the clock go back, its tokens still do not pass.
    forgotten: UnixMillis,
}

impl Nonces {
    pub(super) fn new(per_did: usize, in_all: usize) -> Self {
        let (live, of) = (BTreeSet::new(), HashMap::new());
        Self { per_did, in_all, live, of, forgotten: UnixMillis(0) }
    }

    /// Uses a token up. Its freshness is judged here once more: this is the last moment before.
    ///
    /// # Errors
    /// `AUTH_STALE`, `AUTH_REPLAYED`, `AUTH_CACHE_FULL`.
    pub(super) fn admit(&mut self, auth: &RelayAuth, now: UnixMillis) -> Result<Record> {
        check_fresh(auth, now)?;
        let until = auth.issued_at.plus(WINDOW_MS).millis();
        if until < self.forgotten {
            return Err(Error::new(Code::AuthStale, "the token is older than what is remembered"));
        }
        let (who, nonce) = (*auth.did.key(), auth.nonce.0);
        let of = self.of.get(&who);
        if of.is_some_and(|of| of.contains(&nonce)) {
            return Err(Error::new(Code::AuthReplayed, "the token was used before"));
        }
        if self.live.len() >= self.in_all || of.is_some_and(|of| of.len() >= self.per_did) {
            return Err(Error::new(Code::AuthCacheFull, "too many tokens in five minutes"));
        }
        self.restore(until, who, nonce);
        Ok(Record::Nonce { until, who, nonce })
    }

    pub(super) fn restore(&mut self, until: UnixMillis, who: Who, nonce: [u8; 16]) {
        self.live.insert((until, who, nonce));
        self.of.entry(who).or_default().insert(nonce);
    }

    /// Forgets nonces whose tokens cannot pass any more.
    pub(super) fn prune(&mut self, now: UnixMillis, records: &mut Vec<Record>) {
        for _ in 0..MAX_PRUNE {
            let Some(first) = self.live.first().filter(|(until, ..)| *until < now).copied() else {
                return;
            };
            self.live.remove(&first);
            let (until, who, nonce) = first;
            self.forgotten = self.forgotten.max(UnixMillis(until.0 + 1));
            if let Some(of) = self.of.get_mut(&who) {
                of.remove(&nonce);
                if of.is_empty() {
                    self.of.remove(&who);
                }
            }
            records.push(Record::NonceGone { until, who, nonce });
        }
    }
}
