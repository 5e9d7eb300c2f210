//! Room notices: signed messages that can be checked long after they were posted, by anybody who
//! reads the room's log.

use thiserror::Error;

use super::cose::CoseSign1;
use super::fields::{
    Fields, ShapeError, array, bytes, device, device_value, identity_key, identity_key_value, text,
    uint,
};
use super::revocation::RevocationView;
use super::room_path::RoomPath;
use super::token::{DmRule, ParsedToken, TokenError, VerifyContext, verify_room_token};
use crate::codec::cbor::{Value, decode};
use crate::codec::time::UnixMillis;
use crate::identity::device::{DeviceId, DeviceKey, IdentityKey};

/// Content types that end so are encrypted and name a key epoch; others do not.
const ENCRYPTED_SUFFIX: &str = "+aes256gcm";

/// What a notice says.
#[derive(Clone, Debug, PartialEq)]
pub struct NoticeClaims {
    /// The room.
    pub room: RoomPath,
    /// Who posted it.
    pub poster: DeviceId,
    /// The poster's key.
    pub poster_key: IdentityKey,
    /// By what right.
    pub token: CoseSign1,
    /// 16 random bytes by custom.
    pub notice_id: Vec<u8>,
    /// For display and order, never compared with the time.
    pub posted_at: UnixMillis,
    /// Media type of the content.
    pub content_type: String,
    /// The content.
    pub content: Vec<u8>,
    /// What it refers to.
    pub refs: Option<Vec<MessageRef>>,
    /// Until when it counts.
    pub valid_until: Option<UnixMillis>,
    /// Which of the room's keys the content is encrypted with.
    pub key_epoch: Option<u64>,
    /// Claims unknown here.
    pub extra: Vec<(Value, Value)>,
}

/// A reference from one message to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageRef {
    /// The other message.
    pub id: Vec<u8>,
    /// How they are related, e.g. `reply`.
    pub relation: String,
}

impl MessageRef {
    /// Reads `{ id, relation }`; other members are dropped.
    ///
    /// # Errors
    /// [`ShapeError`] for another shape.
    pub fn from_value(value: Value) -> Result<Self, ShapeError> {
        let mut fields = Fields::of(value, "ref")?;
        Ok(Self { id: fields.required("id", bytes)?, relation: fields.required("relation", text)? })
    }

    /// The wire form.
    #[must_use]
    pub fn to_value(&self) -> Value {
        Value::map([
            ("id", Value::from(self.id.as_slice())),
            ("relation", Value::from(self.relation.as_str())),
        ])
    }
}

/// Why a notice does not count. The variants are in the order of the checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NoticeError {
    /// No payload or another shape.
    #[error("the notice is malformed")]
    Malformed,
    /// Posted to another room than the one asked about.
    #[error("the notice was posted to another room")]
    WrongRoom,
    /// The signature does not verify under the poster's key.
    #[error("the notice's signature does not verify")]
    BadSignature,
    /// The poster is not the hash of the poster's key.
    #[error("the notice's poster is not the hash of its key")]
    WrongPoster,
    /// It no longer counts.
    #[error("the notice has expired")]
    ContentExpired,
    /// A key epoch without encryption, or encryption without one.
    #[error("the notice's key epoch does not go with its content type")]
    KeyEpochMismatch,
    /// The poster's token was no good.
    #[error(transparent)]
    Token(#[from] TokenError),
}

impl NoticeError {
    /// The code that peers use for it.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::WrongRoom => "wrong_room",
            Self::BadSignature => "bad_signature",
            Self::WrongPoster => "wrong_poster",
            Self::ContentExpired => "content_expired",
            Self::KeyEpochMismatch => "key_epoch_mismatch",
            Self::Token(error) => error.code(),
        }
    }
}

impl NoticeClaims {
    /// Signs the notice as `key`'s device, which has to be the poster.
    #[must_use]
    pub fn sign(&self, key: &DeviceKey) -> CoseSign1 {
        CoseSign1::sign(key, self.to_value().encode())
    }

    /// Where notices stand in a room: by time, poster, id.
    #[must_use]
    pub fn display_order(&self) -> (UnixMillis, DeviceId, &[u8]) {
        (self.posted_at, self.poster, &self.notice_id)
    }

    /// Reads a claims map.
    ///
    /// # Errors
    /// [`ShapeError`] for another shape.
    pub fn from_value(value: Value) -> Result<Self, ShapeError> {
        let mut fields = Fields::of(value, "room-notice-claims")?;
        let room = |value| RoomPath::parse(&text(value)?).ok();
        let reference = |value| MessageRef::from_value(value).ok();
        Ok(Self {
            room: fields.required("room", room)?,
            poster: fields.required("poster", device)?,
            poster_key: fields.required("poster-key", identity_key)?,
            token: fields.required("token", |value| CoseSign1::from_value(value).ok())?,
            notice_id: fields.required("notice-id", bytes)?,
            posted_at: fields.required("posted-at", uint).map(UnixMillis)?,
            content_type: fields.required("content-type", text)?,
            content: fields.required("content", bytes)?,
            refs: fields.optional("refs", |value| array(value, reference))?,
            valid_until: fields.optional("valid-until", uint)?.map(UnixMillis),
            key_epoch: fields.optional("key-epoch", uint)?,
            extra: fields.rest(),
        })
    }

    /// The claims map.
    #[must_use]
    pub fn to_value(&self) -> Value {
        let refs = self.refs.as_ref();
        let refs = refs.map(|refs| Value::Array(refs.iter().map(MessageRef::to_value).collect()));
        let known = [
            ("room", Some(Value::from(self.room.to_string()))),
            ("poster", Some(device_value(&self.poster))),
            ("poster-key", Some(identity_key_value(&self.poster_key))),
            ("token", Some(self.token.to_value())),
            ("notice-id", Some(Value::from(self.notice_id.as_slice()))),
            ("posted-at", Some(Value::from(self.posted_at.0))),
            ("content-type", Some(Value::from(self.content_type.as_str()))),
            ("content", Some(Value::from(self.content.as_slice()))),
            ("refs", refs),
            ("valid-until", self.valid_until.map(|time| Value::from(time.0))),
            ("key-epoch", self.key_epoch.map(Value::from)),
        ];
        let known = known.into_iter().filter_map(|(key, value)| Some((Value::from(key), value?)));
        Value::map(self.extra.iter().cloned().chain(known))
    }
}

/// A decoded notice with its signatures judged; like a token's, the second half of verification
/// depends on the time and on revocations.
#[derive(Debug)]
pub struct ParsedNotice {
    claims: NoticeClaims,
    token: ParsedToken,
    signature_verifies: bool,
}

/// Against what a notice is verified.
#[derive(Clone, Copy)]
pub struct NoticeContext<'a> {
    /// The time.
    pub now: UnixMillis,
    /// The room that is read, if it is one.
    pub room: Option<&'a RoomPath>,
    /// Who verifies.
    pub verifier: DeviceId,
    /// Who may be at the root of a direct message's token.
    pub rule: DmRule,
    /// What has been revoked.
    pub revocations: &'a RevocationView,
}

impl ParsedNotice {
    /// Decodes a notice and checks its signatures.
    ///
    /// # Errors
    /// [`NoticeError::Malformed`].
    pub fn parse(notice: &CoseSign1) -> Result<Self, NoticeError> {
        let payload = notice.payload.as_deref().ok_or(NoticeError::Malformed)?;
        let value = decode(payload).map_err(|_| NoticeError::Malformed)?;
        let claims = NoticeClaims::from_value(value).map_err(|_| NoticeError::Malformed)?;
        Ok(Self {
            token: ParsedToken::parse(&claims.token),
            signature_verifies: notice.verify(&claims.poster_key),
            claims,
        })
    }

    /// Applies all checks in order.
    ///
    /// # Errors
    /// [`NoticeError`] for the first check that fails.
    pub fn verify(&self, context: &NoticeContext<'_>) -> Result<&NoticeClaims, NoticeError> {
        let claims = &self.claims;
        if context.room.is_some_and(|room| *room != claims.room) {
            return Err(NoticeError::WrongRoom);
        }
        if !self.signature_verifies {
            return Err(NoticeError::BadSignature);
        }
        if claims.poster_key.device() != claims.poster {
            return Err(NoticeError::WrongPoster);
        }
        if claims.valid_until.is_some_and(|until| until <= context.now) {
            return Err(NoticeError::ContentExpired);
        }
        if claims.content_type.ends_with(ENCRYPTED_SUFFIX) != claims.key_epoch.is_some() {
            return Err(NoticeError::KeyEpochMismatch);
        }
        let token_context = VerifyContext {
            now: context.now,
            bearer: Some(claims.poster),
            revocations: context.revocations,
        };
        let (verifier, rule) = (&context.verifier, context.rule);
        verify_room_token(&self.token, &token_context, &claims.room, verifier, rule)?;
        Ok(claims)
    }
}

#[cfg(test)]
mod tests {
    use super::super::scope::Scope;
    use super::super::token::{MintRequest, mint};
    use super::*;

    const NOW: UnixMillis = UnixMillis(1_800_000_000_000);

    #[test]
    fn checks_come_in_order() {
        let owner = DeviceKey::from_scalar(&[1; 32]).unwrap();
        let poster = DeviceKey::from_scalar(&[2; 32]).unwrap();
        let room = RoomPath::named(owner.id(), "general").unwrap();
        let request =
            MintRequest::new([1; 16], poster.id(), "room:member", Scope::room(&room), NOW.plus(10));
        let good = NoticeClaims {
            room: room.clone(),
            poster: poster.id(),
            poster_key: poster.identity_key(),
            token: mint(&owner, NOW, request).unwrap(),
            notice_id: vec![7; 16],
            posted_at: UnixMillis(u64::MAX >> 11),
            content_type: "text/plain".into(),
            content: b"hello".to_vec(),
            refs: Some(vec![MessageRef { id: vec![1], relation: "reply".into() }]),
            valid_until: None,
            key_epoch: None,
            extra: vec![("x".into(), 1u64.into())],
        };
        let revocations = RevocationView::new();
        let verdict = |claims: &NoticeClaims, signer: &DeviceKey, room: Option<&RoomPath>| {
            let context = NoticeContext {
                now: NOW,
                room,
                verifier: owner.id(),
                rule: DmRule::Verifier,
                revocations: &revocations,
            };
            let notice = ParsedNotice::parse(&claims.sign(signer))?;
            assert_eq!(&notice.claims, claims);
            notice.verify(&context).map(|_| ())
        };
        assert_eq!(verdict(&good, &poster, Some(&room)), Ok(()));
        assert_eq!(verdict(&good, &poster, None), Ok(()));
        let other = RoomPath::named(owner.id(), "other").unwrap();
        assert_eq!(verdict(&good, &owner, Some(&other)), Err(NoticeError::WrongRoom));
        assert_eq!(verdict(&good, &owner, None), Err(NoticeError::BadSignature));
        let claims = NoticeClaims { poster: owner.id(), ..good.clone() };
        assert_eq!(verdict(&claims, &poster, None), Err(NoticeError::WrongPoster));
        let claims = NoticeClaims { valid_until: Some(NOW), key_epoch: Some(1), ..good.clone() };
        assert_eq!(verdict(&claims, &poster, None), Err(NoticeError::ContentExpired));
        let claims = NoticeClaims { key_epoch: Some(1), room: other, ..good.clone() };
        assert_eq!(verdict(&claims, &poster, None), Err(NoticeError::KeyEpochMismatch));
        let claims = NoticeClaims { key_epoch: None, ..claims };
        let wrong_path = Err(NoticeError::Token(TokenError::WrongScopePath));
        assert_eq!(verdict(&claims, &poster, None), wrong_path);
        let claims = NoticeClaims {
            poster: owner.id(),
            poster_key: owner.identity_key(),
            content_type: "text/plain+aes256gcm".into(),
            key_epoch: Some(1),
            ..good
        };
        let wrong_bearer = Err(NoticeError::Token(TokenError::BearerMismatch));
        assert_eq!(verdict(&claims, &owner, None), wrong_bearer);
    }
}
