//! Capability tokens: who may do what, where, until when, on whose word.
//!
//! Verification comes in two halves. [`ParsedToken::parse`] decodes a whole chain once and checks
//! its signatures: pure, slow, cacheable ([`TokenCache`]), fit for any thread. [`verify()`] then
//! applies the rules that depend on the time, the bearer and what has been revoked; it is cheap.

mod cache;
mod condition;
mod mint;
mod parsed;
mod verify;

use thiserror::Error;

use super::capability::is_capability_verb;
use super::cose::CoseSign1;
use super::fields::{
    Fields, ShapeError, bytes, device, device_value, identity_key, identity_key_value, text, uint,
};
use super::scope::Scope;
use crate::codec::cbor::{Value, decode};
use crate::codec::time::UnixMillis;
use crate::identity::device::{DeviceId, IdentityKey};

pub use cache::{MAX_CACHED_TOKEN_BYTES, MAX_CACHED_TOKENS, TokenCache};
pub use mint::{MintError, MintRequest, delegate, mint};
pub use parsed::{MAX_CHAIN_LINKS, ParsedToken};
pub use verify::{
    DmRule, MAX_PROOF_TEXT, VerifiedToken, VerifyContext, parse_membership_proof, verify,
    verify_dm_send, verify_membership_proof, verify_room_token, verify_service_token,
};

/// What a token says.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenClaims {
    /// Names the token in revocations; 16 random bytes by custom.
    pub token_id: Vec<u8>,
    /// Who signed.
    pub issuer: DeviceId,
    /// The issuer's key.
    pub issuer_key: IdentityKey,
    /// Who may use it.
    pub bearer: DeviceId,
    /// For what.
    pub capability: String,
    /// Where.
    pub scope: Scope,
    /// Until when; at this very time it no longer counts.
    pub expires: UnixMillis,
    /// From when; at this very time it counts.
    pub not_before: Option<UnixMillis>,
    /// The encoded token that this one was delegated from.
    pub parent: Option<Vec<u8>>,
    /// The encoded `manage:grant` token that allowed issuing this one.
    pub authorised_by: Option<Vec<u8>>,
    /// How many more times it may be delegated; absent means without limit.
    pub delegations_remaining: Option<u64>,
    /// Until when the content counts.
    pub valid_until: Option<UnixMillis>,
    /// Encoded list of conditions.
    pub conditions: Option<Vec<u8>>,
    /// The one capability that a `manage:grant` token lets its bearer grant.
    pub grants_capability: Option<String>,
    /// The one capability that a `manage:request` token lets its bearer ask for.
    pub requests_capability: Option<String>,
    /// Claims unknown here.
    pub extra: Vec<(Value, Value)>,
}

/// Why a token is refused. The variants are in the order in which the checks are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum TokenError {
    /// A proof text of more than [`MAX_PROOF_TEXT`] bytes.
    #[error("the proof text is too long")]
    TooLong,
    /// A proof text that is no token.
    #[error("the proof text is not a token")]
    NotAToken,
    /// No payload, or claims of another shape, or both kinds of link.
    #[error("the token's claims are malformed")]
    Malformed,
    /// More than [`MAX_CHAIN_LINKS`] tokens.
    #[error("the token's chain is too long")]
    ChainTooDeep,
    /// The signature does not verify under the issuer's key.
    #[error("the token's signature does not verify")]
    BadSignature,
    /// The issuer is not the hash of the issuer's key.
    #[error("the token's issuer is not the hash of its key")]
    WrongIssuer,
    /// It has expired.
    #[error("the token has expired")]
    Expired,
    /// Its time has not come.
    #[error("the token is not valid yet")]
    NotYetValid,
    /// Its content has expired.
    #[error("the token's content has expired")]
    ContentExpired,
    /// It was revoked.
    #[error("the token was revoked")]
    Revoked,
    /// Its conditions cannot be read.
    #[error("the token's conditions are malformed")]
    ConditionsInvalid,
    /// Its conditions are not met.
    #[error("the token's conditions are not met")]
    ConditionsNotSatisfied,
    /// The token that it was delegated from is not valid.
    #[error("the token that this one was delegated from is not valid")]
    ParentInvalid,
    /// It allows more than the token that it was delegated from.
    #[error("the token allows more than the one it was delegated from")]
    DelegationExceedsParent,
    /// The token that allowed issuing it is not valid or does not allow it.
    #[error("the token's issuer had no authority to issue it")]
    AuthorisationInvalid,
    /// It was issued to another bearer.
    #[error("the token was issued to another bearer")]
    BearerMismatch,
    /// It is for another capability.
    #[error("the token is for another capability")]
    WrongCapability,
    /// Its scope is of another kind.
    #[error("the token's scope is of another kind")]
    WrongScopeKind,
    /// Its scope is another path.
    #[error("the token's scope is another path")]
    WrongScopePath,
    /// Its chain begins with another issuer.
    #[error("the token's chain does not begin with the issuer that counts here")]
    WrongChainRoot,
    /// It was delegated where only a token without a chain counts.
    #[error("the token was delegated, which does not count here")]
    NotRootLevel,
}

impl TokenError {
    /// The code that peers use for it.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::TooLong => "too_long",
            Self::NotAToken => "not_a_token",
            Self::Malformed => "malformed",
            Self::ChainTooDeep => "chain_too_deep",
            Self::BadSignature => "bad_signature",
            Self::WrongIssuer => "wrong_issuer",
            Self::Expired => "expired",
            Self::NotYetValid => "not_yet_valid",
            Self::ContentExpired => "content_expired",
            Self::Revoked => "revoked",
            Self::ConditionsInvalid => "conditions_invalid",
            Self::ConditionsNotSatisfied => "conditions_not_satisfied",
            Self::ParentInvalid => "parent_invalid",
            Self::DelegationExceedsParent => "delegation_exceeds_parent",
            Self::AuthorisationInvalid => "authorisation_invalid",
            Self::BearerMismatch => "bearer_mismatch",
            Self::WrongCapability => "wrong_capability",
            Self::WrongScopeKind => "wrong_scope_kind",
            Self::WrongScopePath => "wrong_scope_path",
            Self::WrongChainRoot => "wrong_chain_root",
            Self::NotRootLevel => "not_root_level",
        }
    }
}

impl TokenClaims {
    /// The claims of a token, unverified; `None` without a payload or with another shape.
    #[must_use]
    pub fn of(token: &CoseSign1) -> Option<Self> {
        Self::from_value(decode(token.payload.as_deref()?).ok()?).ok()
    }

    /// Reads a claims map.
    ///
    /// # Errors
    /// [`ShapeError`] for another shape.
    pub fn from_value(value: Value) -> Result<Self, ShapeError> {
        let mut fields = Fields::of(value, "token-claims")?;
        let verb = |value| text(value).filter(|verb| is_capability_verb(verb));
        let time = |value| uint(value).map(UnixMillis);
        let scope = |value| Scope::from_value(value).ok();
        Ok(Self {
            token_id: fields.required("token-id", bytes)?,
            issuer: fields.required("issuer", device)?,
            issuer_key: fields.required("issuer-key", identity_key)?,
            bearer: fields.required("bearer", device)?,
            capability: fields.required("capability", verb)?,
            scope: fields.required("scope", scope)?,
            expires: fields.required("expires", time)?,
            not_before: fields.optional("not-before", time)?,
            parent: fields.optional("parent", bytes)?,
            authorised_by: fields.optional("authorised-by", bytes)?,
            delegations_remaining: fields.optional("delegations-remaining", uint)?,
            valid_until: fields.optional("valid-until", time)?,
            conditions: fields.optional("conditions", bytes)?,
            grants_capability: fields.optional("grants-capability", verb)?,
            requests_capability: fields.optional("requests-capability", verb)?,
            extra: fields.rest(),
        })
    }

    /// The claims map.
    #[must_use]
    pub fn to_value(&self) -> Value {
        let byte_string = |bytes: &Option<Vec<u8>>| bytes.as_deref().map(Value::from);
        let verb = |verb: &Option<String>| verb.as_deref().map(Value::from);
        let time = |time: Option<UnixMillis>| time.map(|time| Value::from(time.0));
        let known = [
            ("token-id", Some(Value::from(self.token_id.as_slice()))),
            ("issuer", Some(device_value(&self.issuer))),
            ("issuer-key", Some(identity_key_value(&self.issuer_key))),
            ("bearer", Some(device_value(&self.bearer))),
            ("capability", Some(Value::from(self.capability.as_str()))),
            ("scope", Some(self.scope.to_value())),
            ("expires", Some(Value::from(self.expires.0))),
            ("not-before", time(self.not_before)),
            ("parent", byte_string(&self.parent)),
            ("authorised-by", byte_string(&self.authorised_by)),
            ("delegations-remaining", self.delegations_remaining.map(Value::from)),
            ("valid-until", time(self.valid_until)),
            ("conditions", byte_string(&self.conditions)),
            ("grants-capability", verb(&self.grants_capability)),
            ("requests-capability", verb(&self.requests_capability)),
        ];
        let known = known.into_iter().filter_map(|(key, value)| Some((Value::from(key), value?)));
        Value::map(self.extra.iter().cloned().chain(known))
    }

    /// Whether a token with these claims may be followed by one with `remaining` delegations.
    fn allows_remaining(&self, remaining: Option<u64>) -> bool {
        match (self.delegations_remaining, remaining) {
            (None, _) => true,
            (Some(limit), Some(remaining)) => remaining < limit,
            (Some(_), None) => false,
        }
    }
}
