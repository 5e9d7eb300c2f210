//! Revocations: signed entries that end a token before its time, and the set of those known.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use thiserror::Error;

use super::capability::MANAGE_REVOKE;
use super::cose::CoseSign1;
use super::fields::{
    Fields, ShapeError, bytes, device, device_value, identity_key, identity_key_value, uint,
};
use super::token::{ParsedToken, TokenClaims};
use crate::codec::cbor::{Value, decode};
use crate::codec::time::UnixMillis;
use crate::identity::device::{DeviceId, DeviceKey, IdentityKey};

/// Most entries known at a time. Tokens live 30 days and each takes one entry at most, so this is
/// hundreds of revocations a day.
pub const MAX_REVOCATIONS: usize = 16_384;

/// Most delegated entries looked at for one token, each of which costs verifying a chain.
const MAX_DELEGATED_PER_TOKEN: usize = 8;

/// What a revocation says.
#[derive(Clone, Debug, PartialEq)]
pub struct RevocationClaims {
    /// The token that is revoked.
    pub token_id: Vec<u8>,
    /// Who revokes it.
    pub issuer: DeviceId,
    /// The issuer's key.
    pub issuer_key: IdentityKey,
    /// When; for display, never compared with anything.
    pub revoked_at: UnixMillis,
    /// An encoded `manage:revoke` token, where the issuer of the revocation did not issue the
    /// token itself.
    pub authorization: Option<Vec<u8>>,
}

/// Why an entry is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RevocationError {
    /// No payload or another shape.
    #[error("the revocation is malformed")]
    Malformed,
    /// The signature does not verify under the issuer's key.
    #[error("the revocation's signature does not verify")]
    BadSignature,
    /// The issuer is not the hash of the issuer's key.
    #[error("the revocation's issuer is not the hash of its key")]
    WrongIssuer,
}

impl RevocationError {
    /// The code that peers use for it.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::BadSignature => "bad_signature",
            Self::WrongIssuer => "wrong_issuer",
        }
    }
}

impl RevocationClaims {
    /// Reads a claims map.
    ///
    /// # Errors
    /// [`ShapeError`] for another shape.
    pub fn from_value(value: Value) -> Result<Self, ShapeError> {
        let mut fields = Fields::of(value, "revocation-claims")?;
        Ok(Self {
            token_id: fields.required("token-id", bytes)?,
            issuer: fields.required("issuer", device)?,
            issuer_key: fields.required("issuer-key", identity_key)?,
            revoked_at: fields.required("revoked-at", uint).map(UnixMillis)?,
            authorization: fields.optional("authorization", bytes)?,
        })
    }

    /// The claims map.
    #[must_use]
    pub fn to_value(&self) -> Value {
        Value::record([
            ("token-id", Some(Value::from(self.token_id.as_slice()))),
            ("issuer", Some(device_value(&self.issuer))),
            ("issuer-key", Some(identity_key_value(&self.issuer_key))),
            ("revoked-at", Some(Value::from(self.revoked_at.0))),
            ("authorization", self.authorization.as_deref().map(Value::from)),
        ])
    }
}

/// Signs the revocation of a token that `key` issued.
#[must_use]
pub fn revoke(key: &DeviceKey, token_id: &[u8], revoked_at: UnixMillis) -> CoseSign1 {
    let claims = RevocationClaims {
        token_id: token_id.to_vec(),
        issuer: key.id(),
        issuer_key: key.identity_key(),
        revoked_at,
        authorization: None,
    };
    CoseSign1::sign(key, claims.to_value().encode())
}

/// A revocation whose shape and signature are good.
#[derive(Clone, Debug)]
pub struct RevocationEntry {
    /// What it says, the authorization taken out.
    claims: RevocationClaims,
    authorization: Option<Arc<ParsedToken>>,
    /// As it was signed.
    signed: CoseSign1,
}

impl RevocationEntry {
    /// Reads an entry and checks its signature.
    ///
    /// # Errors
    /// [`RevocationError`] for the first check that fails.
    pub fn parse(entry: &CoseSign1) -> Result<Self, RevocationError> {
        let payload = entry.payload.as_deref().ok_or(RevocationError::Malformed)?;
        let value = decode(payload).map_err(|_| RevocationError::Malformed)?;
        let mut claims =
            RevocationClaims::from_value(value).map_err(|_| RevocationError::Malformed)?;
        if !entry.verify(&claims.issuer_key) {
            return Err(RevocationError::BadSignature);
        }
        if claims.issuer_key.device() != claims.issuer {
            return Err(RevocationError::WrongIssuer);
        }
        let authorization = claims
            .authorization
            .take()
            .and_then(|encoded| CoseSign1::decode(&encoded))
            .map(|token| Arc::new(ParsedToken::parse(&token)));
        Ok(Self { claims, authorization, signed: entry.clone() })
    }

    /// What it is found by: digest of the token's id, and who revokes.
    #[must_use]
    pub fn key(&self) -> (TokenDigest, DeviceId) {
        (Sha256::digest(&self.claims.token_id).into(), self.claims.issuer)
    }

    /// The entry as it was signed.
    #[must_use]
    pub fn signed(&self) -> &CoseSign1 {
        &self.signed
    }

    /// The token that it is about.
    #[must_use]
    pub fn token_id(&self) -> &[u8] {
        &self.claims.token_id
    }

    /// Who revokes.
    #[must_use]
    pub fn issuer(&self) -> DeviceId {
        self.claims.issuer
    }
}

/// SHA-256 of a token id: ids may be of any length, their digests cost the same.
pub type TokenDigest = [u8; 32];

/// The revocations known, at most [`MAX_REVOCATIONS`].
///
/// Anybody can sign entries without end, so each is accounted to the device that it was heard
/// from; when there is no more room, the device with the most entries loses its oldest one. A
/// peer that floods thus only drives out its own.
#[derive(Debug, Default)]
pub struct RevocationView {
    by_issuer: HashSet<(TokenDigest, DeviceId)>,
    delegated: HashMap<TokenDigest, VecDeque<Delegated>>,
    heard_from: HashMap<DeviceId, VecDeque<(TokenDigest, DeviceId)>>,
    driven_out: Vec<(TokenDigest, DeviceId)>,
}

#[derive(Debug)]
struct Delegated {
    issuer: DeviceId,
    authorization: Arc<ParsedToken>,
}

impl RevocationView {
    /// Nothing revoked.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// How many entries are known.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_issuer.len()
    }

    /// Whether nothing is revoked.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_issuer.is_empty()
    }

    /// Adds an entry heard from `source` (for our own: our device). Whether it was new.
    pub fn insert(&mut self, source: DeviceId, entry: RevocationEntry) -> bool {
        let key = entry.key();
        let new = self.by_issuer.insert(key);
        if let Some(authorization) = entry.authorization {
            let delegated = self.delegated.entry(key.0).or_default();
            delegated.retain(|known| known.issuer != key.1);
            delegated.push_back(Delegated { issuer: key.1, authorization });
            if delegated.len() > MAX_DELEGATED_PER_TOKEN {
                delegated.pop_front();
            }
        }
        if new {
            self.heard_from.entry(source).or_default().push_back(key);
            if self.by_issuer.len() > MAX_REVOCATIONS {
                self.make_room();
            }
        }
        new
    }

    /// Entries that had to make room since this was asked last.
    pub fn take_driven_out(&mut self) -> Vec<(TokenDigest, DeviceId)> {
        std::mem::take(&mut self.driven_out)
    }

    fn make_room(&mut self) {
        let Some((source, queue)) = self.heard_from.iter_mut().max_by_key(|(_, q)| q.len()) else {
            return;
        };
        let source = *source;
        let oldest = queue.pop_front();
        if queue.is_empty() {
            self.heard_from.remove(&source);
        }
        let Some(key) = oldest else { return };
        self.by_issuer.remove(&key);
        self.driven_out.push(key);
        if let Some(delegated) = self.delegated.get_mut(&key.0) {
            delegated.retain(|known| known.issuer != key.1);
            if delegated.is_empty() {
                self.delegated.remove(&key.0);
            }
        }
    }

    /// Whether a token with these claims is revoked: by its own issuer, or by the bearer of a
    /// valid `manage:revoke` token that covers its scope and goes back to its issuer.
    ///
    /// The last point is stricter than the reference, where anybody could issue such a token to
    /// himself. Authorizations themselves can be revoked by their issuers only, which keeps the
    /// work bounded.
    #[must_use]
    pub fn revokes(&self, claims: &TokenClaims, now: UnixMillis) -> bool {
        let token = Sha256::digest(&claims.token_id).into();
        if self.by_issuer.contains(&(token, claims.issuer)) {
            return true;
        }
        let direct = |claims: &TokenClaims| {
            self.by_issuer.contains(&(Sha256::digest(&claims.token_id).into(), claims.issuer))
        };
        self.delegated.get(&token).into_iter().flatten().any(|entry| {
            entry.authorization.verify(now, Some(entry.issuer), &direct).is_ok_and(|verified| {
                verified.claims.capability == MANAGE_REVOKE
                    && verified.claims.scope.covers(&claims.scope)
                    && verified.root.issuer == claims.issuer
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::scope::Scope;
    use super::super::token::{MintRequest, VerifyContext, mint, verify};
    use super::*;

    const NOW: UnixMillis = UnixMillis(1_800_000_000_000);

    fn key(n: u8) -> DeviceKey {
        DeviceKey::from_scalar(&[n; 32]).unwrap()
    }

    fn entry(claims: &RevocationClaims, key: &DeviceKey) -> RevocationEntry {
        RevocationEntry::parse(&CoseSign1::sign(key, claims.to_value().encode())).unwrap()
    }

    fn delegated_by(authority: &DeviceKey, moderator: &DeviceKey, scope: Scope) -> RevocationEntry {
        let request =
            MintRequest::new([9; 16], moderator.id(), MANAGE_REVOKE, scope, NOW.plus(1000));
        let authorization = mint(authority, NOW, request).unwrap();
        let claims = RevocationClaims {
            token_id: vec![1; 16],
            issuer: moderator.id(),
            issuer_key: moderator.identity_key(),
            revoked_at: NOW,
            authorization: Some(authorization.encode()),
        };
        entry(&claims, moderator)
    }

    #[test]
    fn a_delegated_revocation_counts_only_on_the_issuers_word() {
        let (owner, moderator, member, stranger) = (key(1), key(2), key(3), key(4));
        let scope = Scope::new("room", "r/x");
        let request =
            MintRequest::new([1; 16], member.id(), "room:member", scope.clone(), NOW.plus(9));
        let token = ParsedToken::parse(&mint(&owner, NOW, request).unwrap());
        let code = |view: &RevocationView| {
            let context = VerifyContext { now: NOW, bearer: Some(member.id()), revocations: view };
            verify(&token, &context).map(|_| ()).map_err(|e| e.code())
        };
        let of = |entry| {
            let mut view = RevocationView::new();
            assert!(view.insert(stranger.id(), entry));
            view
        };
        assert_eq!(code(&RevocationView::new()), Ok(()));
        let good = delegated_by(&owner, &moderator, scope.clone());
        assert_eq!(code(&of(good.clone())), Err("revoked"));
        let self_made = delegated_by(&stranger, &stranger, scope);
        assert_eq!(code(&of(self_made)), Ok(()));
        let elsewhere = delegated_by(&owner, &moderator, Scope::new("room", "r/y"));
        assert_eq!(code(&of(elsewhere)), Ok(()));

        let mut view = of(good.clone());
        assert!(!view.insert(stranger.id(), good));
        let authorization_revoked = RevocationEntry::parse(&revoke(&owner, &[9; 16], NOW)).unwrap();
        assert!(view.insert(owner.id(), authorization_revoked));
        assert_eq!(code(&view), Ok(()));
    }

    #[test]
    fn a_flood_only_drives_out_its_own() {
        let (owner, flooder) = (key(1), key(2));
        let template = RevocationEntry::parse(&revoke(&owner, b"real", NOW)).unwrap();
        let mut view = RevocationView::new();
        view.insert(owner.id(), template.clone());
        for n in 0..MAX_REVOCATIONS + 10 {
            let mut junk = template.clone();
            junk.claims.token_id = n.to_be_bytes().to_vec();
            view.insert(flooder.id(), junk);
        }
        assert_eq!(view.len(), MAX_REVOCATIONS);
        assert_eq!(view.heard_from[&owner.id()].len(), 1);
        assert!(view.by_issuer.contains(&(Sha256::digest(b"real").into(), owner.id())));
    }
}
