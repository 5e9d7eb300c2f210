//! The registry of worker cards (design 11.1, 12, decision 49): the newest card of each worker, until
//! it is over. A card that was taken back is not shown, and stays known, so that an older one cannot
//! come back in its place.

use std::collections::BTreeMap;

use super::record::{Record, Who};
use super::{Limits, Listing};
use crate::acp::code::{Code, Error, Result};
use crate::acp::did::Did;
use crate::acp::invite::{MAX_CARD_LIFE_MS, check_card};
use crate::acp::json::canonical;
use crate::acp::objects::{RevocationTarget, WorkerCard};
use crate::acp::revocation::RevocationRegistry;
use crate::acp::value::{SKEW_MS, read_bytes};
use crate::codec::time::UnixMillis;

/// Bytes of one card in canonical form; real ones have about 1 KiB.
pub const MAX_CARD: usize = 16 * 1024;
/// Bytes of all cards.
const MAX_CARD_BYTES: usize = 64 * 1024 * 1024;
/// Cards looked at for one page of a filtered list; the next page goes on behind them.
const MAX_LOOK: usize = 10_000;

#[derive(Debug)]
struct Listed {
    card: WorkerCard,
    json: Vec<u8>,
}

impl Listed {
    /// When no older card of the worker can be good any more.
    fn until(&self) -> UnixMillis {
        self.card.issued_at.plus(MAX_CARD_LIFE_MS + SKEW_MS).millis()
    }

    fn is_shown(&self, revocations: &RevocationRegistry, now: UnixMillis) -> bool {
        let (kind, id) = (RevocationTarget::Card, self.card.card_id.as_str());
        !self.card.expires_at.is_over(now) && !revocations.is_revoked(self.card.did, kind, id, now)
    }
}

#[derive(Debug, Default)]
pub(super) struct Registry {
    cards: BTreeMap<Who, Listed>,
    bytes: usize,
}

/// What cards are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CardFilter {
    /// Those with this adapter.
    pub adapter: Option<String>,
    /// Those with this skill.
    pub skill: Option<String>,
}

impl CardFilter {
    fn takes(&self, card: &WorkerCard) -> bool {
        let has = |wanted: &Option<String>, words: &[crate::acp::value::Word]| {
            wanted.as_ref().is_none_or(|wanted| words.iter().any(|word| **word == **wanted))
        };
        has(&self.adapter, &card.adapters) && has(&self.skill, &card.skills)
    }
}

impl Registry {
    pub(super) fn publish(
        &mut self,
        card: WorkerCard,
        revocations: &RevocationRegistry,
        limits: &Limits,
        now: UnixMillis,
    ) -> Result<Option<Record>> {
        check_card(&card, revocations, now)?;
        let json = canonical(&card)?;
        if json.len() > MAX_CARD {
            return Err(Error::new(Code::TooLarge, "a worker card of more than 16 KiB"));
        }
        let who = *card.did.key();
        let before = self.cards.get(&who);
        if let Some(before) = before {
            if before.json == json {
                return Ok(None);
            }
            if card.issued_at <= before.card.issued_at {
                let text = "not issued after the card that is known of this worker";
                return Err(Error::new(Code::BadTime, text).inside("issuedAt"));
            }
        }
        let bytes = self.bytes + json.len() - before.map_or(0, |before| before.json.len());
        if (before.is_none() && self.cards.len() >= limits.cards) || bytes > MAX_CARD_BYTES {
            return Err(Error::new(Code::RateLimited, "the registry is full"));
        }
        self.insert(who, Listed { card, json: json.clone() });
        Ok(Some(Record::Card { who, json }))
    }

    fn insert(&mut self, who: Who, listed: Listed) {
        self.bytes += listed.json.len();
        if let Some(before) = self.cards.insert(who, listed) {
            self.bytes -= before.json.len();
        }
    }

    pub(super) fn restore(&mut self, who: Who, json: Vec<u8>) -> Result<()> {
        let card = read_bytes(&json, MAX_CARD)?;
        self.insert(who, Listed { card, json });
        Ok(())
    }

    pub(super) fn card(
        &self,
        did: Did,
        revocations: &RevocationRegistry,
        now: UnixMillis,
    ) -> Option<&[u8]> {
        let listed = self.cards.get(did.key())?;
        listed.is_shown(revocations, now).then_some(listed.json.as_slice())
    }

    pub(super) fn list(
        &self,
        filter: &CardFilter,
        after: Option<Did>,
        limit: usize,
        revocations: &RevocationRegistry,
        now: UnixMillis,
    ) -> Listing {
        use std::ops::Bound::{Excluded, Unbounded};
        let first = after.map_or(Unbounded, |after| Excluded(*after.key()));
        let mut listing = Listing::default();
        for (looked, listed) in (1..).zip(self.cards.range((first, Unbounded)).map(|(_, l)| l)) {
            if filter.takes(&listed.card) && listed.is_shown(revocations, now) {
                listing.items.push(listed.json.clone());
            }
            if listing.items.len() >= limit || looked >= MAX_LOOK {
                listing.next = Some(listed.card.did.to_string());
                break;
            }
        }
        listing
    }

    /// Forgets cards that no older one can come after. Goes through all of them: not for every request.
    pub(super) fn prune(&mut self, now: UnixMillis, out: &mut Vec<Record>) {
        let bytes = &mut self.bytes;
        self.cards.retain(|who, listed| {
            let kept = now < listed.until();
            if !kept {
                *bytes -= listed.json.len();
                out.push(Record::CardGone { who: *who });
            }
            kept
        });
    }
}
