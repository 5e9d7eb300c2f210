//! The blind relay, sans-I/O (design 11, decision 49): what it knows and decides. It holds no private
//! key and reads no message. What it is asked comes in parsed and, where that takes a signature,
//! verified; what must outlive a crash goes out as records, and a relay is rebuilt from them.
//!
//! A decision changes the relay at once, its records are stored afterwards, and only then
//! [`Relay::stored`] lets anybody see new envelopes: whoever keeps the records answers nobody before.
//! When storing fails, the relay is thrown away and rebuilt from what was stored.

pub mod auth;
mod contacts;
mod mailbox;
mod nonces;
mod notices;
pub mod rate;
mod record;
mod registry;
pub mod route;

pub use mailbox::{Taken, Waiting};
pub use notices::MAX_NOTICE;
pub use record::{Cursor, IdKey, Parcel, Record, Who, did_of};
pub use registry::{CardFilter, MAX_CARD};

use self::mailbox::Mailboxes;
use self::nonces::Nonces;
use self::notices::Notices;
use self::registry::Registry;
use super::code::{Code, Error, Result};
use super::did::Did;
use super::envelope::MAX_ENVELOPE;
use super::objects::{RelayAuth, RevocationNotice, RevocationTarget, WorkerCard};
use super::sign::Signed as _;
use crate::codec::time::UnixMillis;

/// How often all cards and notices are gone through for some that are over, ms.
const SWEEP_EVERY_MS: u64 = 600_000;

const DAY_MS: u64 = 24 * 3_600_000;

/// The bounds of a relay (design 17, decision 49).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one envelope as it is sent.
    pub envelope_bytes: usize,
    /// Envelopes in one mailbox.
    pub mailbox_envelopes: usize,
    /// Bytes in one mailbox.
    pub mailbox_bytes: u64,
    /// How long an envelope waits at most, ms; its own end may come sooner.
    pub mailbox_ms: u64,
    /// Envelopes of one sender in one mailbox.
    pub sender_envelopes: usize,
    /// Bytes of one sender in one mailbox.
    pub sender_bytes: u64,
    /// Envelopes in all; each takes about 300 bytes of memory.
    pub envelopes: usize,
    /// Bytes of envelopes in all, on disk.
    pub bytes: u64,
    /// Live nonces of one did.
    pub nonces_of_did: usize,
    /// Live nonces in all.
    pub nonces: usize,
    /// Cards in the registry.
    pub cards: usize,
    /// Envelopes, cards and notices a minute of one did.
    pub did_per_minute: u64,
    /// The same of one address.
    pub address_per_minute: u64,
    /// Authenticated reads a minute of one address.
    pub reads_per_minute: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            envelope_bytes: MAX_ENVELOPE,
            mailbox_envelopes: 1_000,
            mailbox_bytes: 64 << 20,
            mailbox_ms: 7 * DAY_MS,
            sender_envelopes: 64,
            sender_bytes: 4 << 20,
            envelopes: 262_144,
            bytes: 16 << 30,
            nonces_of_did: 4_096,
            nonces: 1_000_000,
            cards: 10_000,
            did_per_minute: 1_200,
            address_per_minute: 6_000,
            reads_per_minute: 600,
        }
    }
}

impl Limits {
    /// The highest that each may be set to.
    #[must_use]
    pub fn ceiling() -> Self {
        Self {
            envelope_bytes: 4 << 20,
            mailbox_envelopes: 10_000,
            mailbox_bytes: 1 << 30,
            mailbox_ms: 30 * DAY_MS,
            sender_envelopes: 10_000,
            sender_bytes: 1 << 30,
            envelopes: 4_194_304,
            bytes: 1 << 40,
            nonces_of_did: 65_536,
            nonces: 10_000_000,
            cards: 100_000,
            did_per_minute: 1_000_000,
            address_per_minute: 1_000_000,
            reads_per_minute: 1_000_000,
        }
    }

    /// The name of a bound that is zero or above its ceiling, if there is one.
    #[must_use]
    pub fn fault(&self) -> Option<&'static str> {
        let most = Self::ceiling();
        let size = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        [
            ("envelope_bytes", size(self.envelope_bytes), size(most.envelope_bytes)),
            ("mailbox_envelopes", size(self.mailbox_envelopes), size(most.mailbox_envelopes)),
            ("mailbox_bytes", self.mailbox_bytes, most.mailbox_bytes),
            ("mailbox_ms", self.mailbox_ms, most.mailbox_ms),
            ("sender_envelopes", size(self.sender_envelopes), size(most.sender_envelopes)),
            ("sender_bytes", self.sender_bytes, most.sender_bytes),
            ("envelopes", size(self.envelopes), size(most.envelopes)),
            ("bytes", self.bytes, most.bytes),
            ("nonces_of_did", size(self.nonces_of_did), size(most.nonces_of_did)),
            ("nonces", size(self.nonces), size(most.nonces)),
            ("cards", size(self.cards), size(most.cards)),
            ("did_per_minute", self.did_per_minute, most.did_per_minute),
            ("address_per_minute", self.address_per_minute, most.address_per_minute),
            ("reads_per_minute", self.reads_per_minute, most.reads_per_minute),
        ]
        .into_iter()
        .find_map(|(name, value, most)| (value == 0 || value > most).then_some(name))
    }
}

/// A page of a list: JSON texts in canonical form, and where the next page goes on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// The objects.
    pub items: Vec<Vec<u8>>,
    /// To be given as `after`; none when this was all there is for good.
    pub next: Option<String>,
}

/// What a relay knows.
#[derive(Debug)]
pub struct Relay {
    limits: Limits,
    nonces: Nonces,
    mailboxes: Mailboxes,
    registry: Registry,
    notices: Notices,
    swept_at: UnixMillis,
}

impl Relay {
    /// An empty relay.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            nonces: Nonces::new(limits.nonces_of_did, limits.nonces),
            mailboxes: Mailboxes::default(),
            registry: Registry::default(),
            notices: Notices::default(),
            swept_at: UnixMillis(0),
            limits,
        }
    }

    /// Takes one record back, in any order; it was checked before it was stored.
    ///
    /// # Errors
    /// What is wrong with an object that cannot be read any more.
    pub fn restore(&mut self, record: Record) -> Result<()> {
        match record {
            Record::Nonce { until, who, nonce } => self.nonces.restore(until, who, nonce),
            Record::Card { who, json } => self.registry.restore(who, json)?,
            Record::Notice { cursor, at, json } => self.notices.restore(cursor, at, &json)?,
            record => self.mailboxes.restore(record),
        }
        Ok(())
    }

    /// Makes sure that no cursor below `next` is given out: those of a relay that was thrown away
    /// may have been seen.
    pub fn begin_at(&mut self, next: Cursor) {
        self.mailboxes.begin_at(next.0);
    }

    /// The cursor that is given out next.
    #[must_use]
    pub fn next(&self) -> Cursor {
        Cursor(self.mailboxes.next())
    }

    /// Says that the records of all decisions so far are stored.
    pub fn stored(&mut self) {
        self.mailboxes.stored();
    }

    /// Uses up a token that [`auth::check`] has let pass.
    ///
    /// # Errors
    /// `AUTH_STALE`, `AUTH_REPLAYED`, `AUTH_CACHE_FULL`.
    pub fn admit(
        &mut self,
        auth: &RelayAuth,
        now: UnixMillis,
        out: &mut Vec<Record>,
    ) -> Result<()> {
        // What is over leaves first, so that it does not count against the bound.
        self.nonces.prune(now, out);
        out.push(self.nonces.admit(auth, now)?);
        Ok(())
    }

    /// Takes an envelope into its recipient's mailbox, or says where it was taken before.
    ///
    /// # Errors
    /// `ENVELOPE_ID_REUSED`, `ENVELOPE_EXPIRED`, `MAILBOX_FULL`.
    pub fn accept(
        &mut self,
        parcel: Parcel,
        now: UnixMillis,
        out: &mut Vec<Record>,
    ) -> Result<Taken> {
        self.mailboxes.accept(parcel, &self.limits, now, out)
    }

    /// Deletes what `owner` has got, up to and including `up_to`.
    pub fn acknowledge(
        &mut self,
        owner: Did,
        up_to: Cursor,
        now: UnixMillis,
        out: &mut Vec<Record>,
    ) {
        self.mailboxes.acknowledge(*owner.key(), up_to, now, out);
    }

    /// What waits for `owner` behind `after`, oldest first: at most `limit`, and, after the first,
    /// at most `bytes` together.
    #[must_use]
    pub fn waiting(
        &self,
        owner: Did,
        after: Option<Cursor>,
        limit: usize,
        bytes: u64,
        now: UnixMillis,
    ) -> Vec<Waiting> {
        let mut sum = 0;
        self.mailboxes
            .waiting(*owner.key(), after, now)
            .take(limit)
            .take_while(|waiting| {
                let first = sum == 0;
                sum += waiting.bytes;
                first || sum <= bytes
            })
            .collect()
    }

    /// Lists a worker's card in place of an older one.
    ///
    /// # Errors
    /// The codes of a card ([`super::invite::check_card`]), `TOO_LARGE`, `BAD_TIME` for one that is
    /// not newer than the known one, `RATE_LIMITED` for a full registry.
    pub fn publish(
        &mut self,
        card: WorkerCard,
        now: UnixMillis,
        out: &mut Vec<Record>,
    ) -> Result<()> {
        let registry = &self.notices.registry;
        out.extend(self.registry.publish(card, registry, &self.limits, now)?);
        Ok(())
    }

    /// A worker's card, in canonical form.
    #[must_use]
    pub fn card(&self, did: Did, now: UnixMillis) -> Option<Vec<u8>> {
        self.registry.card(did, &self.notices.registry, now).map(<[u8]>::to_vec)
    }

    /// Cards in the order of their workers' keys, `limit` at most.
    #[must_use]
    pub fn cards(
        &self,
        filter: &CardFilter,
        after: Option<Did>,
        limit: usize,
        now: UnixMillis,
    ) -> Listing {
        self.registry.list(filter, after, limit, &self.notices.registry, now)
    }

    /// Takes a revocation notice in and checks its signature.
    ///
    /// # Errors
    /// As [`super::revocation::RevocationRegistry::add`].
    pub fn revoke(
        &mut self,
        notice: RevocationNotice,
        now: UnixMillis,
        out: &mut Vec<Record>,
    ) -> Result<()> {
        let mut records = Vec::new();
        let cursor = self.mailboxes.take_cursor(&mut records);
        if self.notices.add(notice, cursor, now, &mut records)? {
            out.append(&mut records);
        }
        Ok(())
    }

    /// Notices in the order in which they came, `limit` at most.
    ///
    /// # Errors
    /// None that a stored notice can cause.
    pub fn notices(
        &self,
        issuer: Option<Did>,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Listing> {
        self.notices.list(issuer, after, limit)
    }

    /// Lets go of what is over, some of it at a time.
    pub fn prune(&mut self, now: UnixMillis, out: &mut Vec<Record>) {
        self.nonces.prune(now, out);
        self.mailboxes.prune(now, out);
        if now.since(self.swept_at) >= SWEEP_EVERY_MS {
            self.swept_at = now;
            self.registry.prune(now, out);
            self.notices.prune(now, out);
        }
    }

    /// Envelopes that wait, and their bytes.
    #[must_use]
    pub fn load(&self) -> (usize, u64) {
        self.mailboxes.load()
    }

    /// Its bounds.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }
}

/// Checks a notice that comes to take back `did`'s card.
///
/// # Errors
/// `WRONG_SIGNER` when it is another's; `BAD_FIELD` when it takes back something else; the codes of
/// a signature.
pub fn check_card_notice(notice: &RevocationNotice, did: Did) -> Result<()> {
    if notice.issuer_did != did {
        return Err(Error::new(Code::WrongSigner, "a notice of another issuer"));
    }
    if notice.target_type != RevocationTarget::Card {
        return Err(Error::new(Code::BadField, "not about a card").inside("targetType"));
    }
    notice.verify()
}
