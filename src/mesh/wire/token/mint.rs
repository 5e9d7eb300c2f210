//! Issuing tokens.

use thiserror::Error;

use super::super::capability::MANAGE_GRANT;
use super::super::cose::CoseSign1;
use super::super::scope::Scope;
use super::TokenClaims;
use super::condition::{self, Subject};
use crate::codec::time::UnixMillis;
use crate::identity::device::{DeviceId, DeviceKey};

/// What a token is to say.
#[derive(Clone, Debug)]
pub struct MintRequest<'a> {
    /// 16 random bytes.
    pub token_id: [u8; 16],
    /// Who may use it.
    pub bearer: DeviceId,
    /// For what.
    pub capability: &'a str,
    /// Where.
    pub scope: Scope,
    /// Until when.
    pub expires: UnixMillis,
    /// From when.
    pub not_before: Option<UnixMillis>,
    /// How many more times it may be delegated.
    pub delegations_remaining: Option<u64>,
    /// Encoded list of conditions.
    pub conditions: Option<Vec<u8>>,
    /// For `manage:grant`: the one capability that may be granted.
    pub grants_capability: Option<String>,
    /// For `manage:request`: the one capability that may be asked for.
    pub requests_capability: Option<String>,
    /// The token that it is delegated from.
    pub parent: Option<&'a CoseSign1>,
    /// The `manage:grant` token that allows issuing it.
    pub authorised_by: Option<&'a CoseSign1>,
}

/// Why a token was not issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the token cannot be issued: {}", self.code())]
pub enum MintError {
    /// It would have expired already.
    AlreadyExpired,
    /// Both a parent and an authoriser.
    LinksExclusive,
    /// A `manage:grant` token with a parent, or an authoriser that has one.
    AuthorisationParentForbidden,
    /// The parent cannot be read.
    ParentMalformed,
    /// The parent was issued to somebody else.
    ParentBearerMismatch,
    /// It would outlive its parent.
    ExpiresExceedsParent,
    /// Its scope is not within its parent's.
    ScopeDoesNotNarrow,
    /// Its parent is for another capability.
    CapabilityMismatch,
    /// It would allow as many delegations as its parent.
    DelegationExceedsParent,
    /// The authoriser or its conditions cannot be read.
    AuthorisationMalformed,
    /// The authoriser was issued to somebody else.
    AuthorisationBearerMismatch,
    /// The authoriser does not let this capability be granted.
    AuthorisationCapabilityMismatch,
    /// Its scope is not within its authoriser's.
    AuthorisationScopeDoesNotNarrow,
    /// It would outlive its authoriser.
    AuthorisationExceedsAuthoriser,
    /// It would allow as many delegations as its authoriser.
    AuthorisationDelegationExceeds,
    /// The authoriser's conditions are not met.
    AuthorisationConditionsNotSatisfied,
}

impl MintError {
    /// The code that peers use for it.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::AlreadyExpired => "already_expired",
            Self::LinksExclusive => "links_exclusive",
            Self::AuthorisationParentForbidden => "authorisation_parent_forbidden",
            Self::ParentMalformed => "parent_malformed",
            Self::ParentBearerMismatch => "parent_bearer_mismatch",
            Self::ExpiresExceedsParent => "expires_exceeds_parent",
            Self::ScopeDoesNotNarrow => "scope_does_not_narrow",
            Self::CapabilityMismatch => "capability_mismatch",
            Self::DelegationExceedsParent => "delegation_exceeds_parent",
            Self::AuthorisationMalformed => "authorisation_malformed",
            Self::AuthorisationBearerMismatch => "authorisation_bearer_mismatch",
            Self::AuthorisationCapabilityMismatch => "authorisation_capability_mismatch",
            Self::AuthorisationScopeDoesNotNarrow => "authorisation_scope_does_not_narrow",
            Self::AuthorisationExceedsAuthoriser => "authorisation_exceeds_authoriser",
            Self::AuthorisationDelegationExceeds => "authorisation_delegation_exceeds",
            Self::AuthorisationConditionsNotSatisfied => "authorisation_conditions_not_satisfied",
        }
    }
}

impl<'a> MintRequest<'a> {
    /// A root token without anything optional.
    #[must_use]
    pub fn new(
        token_id: [u8; 16],
        bearer: DeviceId,
        capability: &'a str,
        scope: Scope,
        expires: UnixMillis,
    ) -> Self {
        Self {
            token_id,
            bearer,
            capability,
            scope,
            expires,
            not_before: None,
            delegations_remaining: None,
            conditions: None,
            grants_capability: None,
            requests_capability: None,
            parent: None,
            authorised_by: None,
        }
    }

    /// The same with a limit on delegations.
    #[must_use]
    pub fn delegations(self, remaining: u64) -> Self {
        Self { delegations_remaining: Some(remaining), ..self }
    }

    fn check_parent(&self, issuer: &DeviceId, parent: &CoseSign1) -> Result<(), MintError> {
        let parent = TokenClaims::of(parent).ok_or(MintError::ParentMalformed)?;
        refuse(parent.bearer != *issuer, MintError::ParentBearerMismatch)?;
        refuse(self.expires > parent.expires, MintError::ExpiresExceedsParent)?;
        refuse(!parent.scope.covers(&self.scope), MintError::ScopeDoesNotNarrow)?;
        refuse(parent.capability != self.capability, MintError::CapabilityMismatch)?;
        refuse(
            !parent.allows_remaining(self.delegations_remaining),
            MintError::DelegationExceedsParent,
        )
    }

    fn check_authoriser(&self, issuer: &DeviceId, token: &CoseSign1) -> Result<(), MintError> {
        let authoriser = TokenClaims::of(token).ok_or(MintError::AuthorisationMalformed)?;
        refuse(authoriser.parent.is_some(), MintError::AuthorisationParentForbidden)?;
        refuse(authoriser.bearer != *issuer, MintError::AuthorisationBearerMismatch)?;
        let grants = authoriser.capability == MANAGE_GRANT
            && authoriser.grants_capability.as_deref().is_none_or(|verb| verb == self.capability);
        refuse(!grants, MintError::AuthorisationCapabilityMismatch)?;
        refuse(!authoriser.scope.covers(&self.scope), MintError::AuthorisationScopeDoesNotNarrow)?;
        refuse(self.expires > authoriser.expires, MintError::AuthorisationExceedsAuthoriser)?;
        refuse(
            !authoriser.allows_remaining(self.delegations_remaining),
            MintError::AuthorisationDelegationExceeds,
        )?;
        let Some(conditions) = &authoriser.conditions else { return Ok(()) };
        let conditions = condition::parse(conditions).ok_or(MintError::AuthorisationMalformed)?;
        let subject = Subject { bearer: self.bearer, capability: self.capability };
        refuse(
            !condition::all_hold(&conditions, Some(&subject)),
            MintError::AuthorisationConditionsNotSatisfied,
        )
    }
}

fn refuse(refused: bool, error: MintError) -> Result<(), MintError> {
    if refused { Err(error) } else { Ok(()) }
}

/// Issues a token signed by `key`. A parent or authoriser is held to the rules of its link, but
/// its signature, times and revocation are not looked at: whoever verifies will.
///
/// # Errors
/// [`MintError`] for the first rule that is broken.
pub fn mint(
    key: &DeviceKey,
    now: UnixMillis,
    request: MintRequest<'_>,
) -> Result<CoseSign1, MintError> {
    refuse(request.expires <= now, MintError::AlreadyExpired)?;
    refuse(request.parent.is_some() && request.authorised_by.is_some(), MintError::LinksExclusive)?;
    refuse(
        request.parent.is_some() && request.capability == MANAGE_GRANT,
        MintError::AuthorisationParentForbidden,
    )?;
    if let Some(parent) = request.parent {
        request.check_parent(&key.id(), parent)?;
    }
    if let Some(authoriser) = request.authorised_by {
        request.check_authoriser(&key.id(), authoriser)?;
    }
    let claims = TokenClaims {
        token_id: request.token_id.to_vec(),
        issuer: key.id(),
        issuer_key: key.identity_key(),
        bearer: request.bearer,
        capability: request.capability.to_owned(),
        scope: request.scope,
        expires: request.expires,
        not_before: request.not_before,
        parent: request.parent.map(CoseSign1::encode),
        authorised_by: request.authorised_by.map(CoseSign1::encode),
        delegations_remaining: request.delegations_remaining,
        valid_until: None,
        conditions: request.conditions,
        grants_capability: request.grants_capability,
        requests_capability: request.requests_capability,
        extra: Vec::new(),
    };
    Ok(CoseSign1::sign(key, claims.to_value().encode()))
}

/// Passes `parent` on to `bearer` unchanged but for further delegation, which ends here.
///
/// # Errors
/// [`MintError`] as [`mint`].
pub fn delegate(
    key: &DeviceKey,
    now: UnixMillis,
    parent: &CoseSign1,
    token_id: [u8; 16],
    bearer: DeviceId,
) -> Result<CoseSign1, MintError> {
    let claims = TokenClaims::of(parent).ok_or(MintError::ParentMalformed)?;
    let request =
        MintRequest::new(token_id, bearer, &claims.capability, claims.scope, claims.expires)
            .delegations(0);
    mint(key, now, MintRequest { parent: Some(parent), ..request })
}
