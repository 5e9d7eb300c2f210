//! What a relay keeps: the records that rebuild it, and the small values in them. A record stands
//! for one entry of the store, by what it is about; a `…Gone` ends that entry.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::acp::code::{Code, Error, Result};
use crate::acp::did::Did;
use crate::acp::envelope::MAX_ENVELOPE_LIFE_MS;
use crate::acp::json::{canonical, sha256};
use crate::acp::objects::Envelope;
use crate::acp::value::{Digest, EnvelopeId, SKEW_MS};
use crate::codec::time::UnixMillis;

/// Somebody, by the 32 bytes of the public key: dids were checked when they came in.
pub type Who = [u8; 32];

/// An envelope's sender and id, as one hash: what a relay knows an envelope by.
pub type IdKey = [u8; 32];

/// A place in a mailbox, or in the list of revocations: grows, and is never given out twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Cursor(pub u64);

impl Cursor {
    /// Reads the text form.
    ///
    /// # Errors
    /// `BAD_FIELD`.
    pub fn parse(text: &str) -> Result<Self> {
        let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        Some(text)
            .filter(|text| text.len() == 16 && text.bytes().all(hex))
            .and_then(|text| u64::from_str_radix(text, 16).ok())
            .map(Self)
            .ok_or_else(|| Error::new(Code::BadField, "no cursor of this relay"))
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A verified envelope, as a relay sees it.
#[derive(Clone, Debug)]
pub struct Parcel {
    /// Whose mailbox it is for.
    pub to: Who,
    /// Who has signed it.
    pub from: Who,
    /// Its id.
    pub id: EnvelopeId,
    /// Its object digest.
    pub digest: Digest,
    /// When it is over, skew included.
    pub until: UnixMillis,
    /// Its canonical form, which is what recipients get.
    pub json: Vec<u8>,
}

impl Parcel {
    /// Reads an envelope and checks shape, size, times and signature.
    ///
    /// # Errors
    /// As [`Envelope::read_checked`].
    pub fn read(bytes: &[u8], max_bytes: usize, now: UnixMillis) -> Result<Self> {
        let envelope = Envelope::read_checked(bytes, max_bytes, now)?;
        let json = canonical(&envelope)?;
        let until = envelope.expires_at.plus(SKEW_MS).millis();
        Ok(Self {
            to: *envelope.to.key(),
            from: *envelope.from.key(),
            digest: Digest::of_canonical(&json),
            id: envelope.envelope_id,
            // A clock that was ahead when it was sent does not lengthen its life here.
            until: until.min(now.plus(MAX_ENVELOPE_LIFE_MS + SKEW_MS)),
            json,
        })
    }

    /// What it is known by.
    #[must_use]
    pub fn key(&self) -> IdKey {
        sha256(&[self.from.as_slice(), self.id.as_str().as_bytes()].concat())
    }
}

/// The did of somebody.
///
/// # Errors
/// `BAD_DID` for bytes that never were one.
pub fn did_of(who: Who) -> Result<Did> {
    Did::from_key(who)
}

/// One entry of the store, or its end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "members are those of the tables of `relay`")]
pub enum Record {
    /// The cursor that is given out next; none below is ever given out again.
    Next { cursor: u64 },
    /// An envelope in a mailbox. Its bytes are stored apart and not read back with the record.
    Envelope {
        cursor: u64,
        to: Who,
        from: Who,
        id: IdKey,
        digest: Digest,
        bytes: u64,
        /// When it leaves the mailbox.
        until: UnixMillis,
        /// When its id may be forgotten.
        known_until: UnixMillis,
        #[serde(skip)]
        json: Vec<u8>,
    },
    /// It was acknowledged, or its time is over.
    EnvelopeGone { cursor: u64 },
    /// The id of an envelope that is in no mailbox any more.
    Known { id: IdKey, digest: Digest, cursor: u64, until: UnixMillis },
    /// That id is forgotten.
    KnownGone { id: IdKey },
    /// A nonce that was used, until its token can pass no more.
    Nonce { until: UnixMillis, who: Who, nonce: [u8; 16] },
    /// That time has come.
    NonceGone { until: UnixMillis, who: Who, nonce: [u8; 16] },
    /// The owner of a mailbox has written to somebody.
    Contact { owner: Who, peer: Who, at: UnixMillis },
    /// That was long ago.
    ContactGone { owner: Who, peer: Who },
    /// The newest card of a worker, in canonical form.
    Card {
        who: Who,
        #[serde(with = "serde_bytes")]
        json: Vec<u8>,
    },
    /// That card is over.
    CardGone { who: Who },
    /// A revocation notice in canonical form, when it came, its place in the list.
    Notice {
        cursor: u64,
        at: UnixMillis,
        #[serde(with = "serde_bytes")]
        json: Vec<u8>,
    },
    /// That notice cannot matter any more, or another says it better.
    NoticeGone { cursor: u64 },
}
