//! The second half of verification: the rules about time, bearer, revocation and chain, in the
//! order of `wire.md` ("Token verification"), and the rules of the uses that tokens are put to.

use super::super::capability::{DM_SEND, GROUP_MEMBER, MANAGE_GRANT, ROOM_MEMBER};
use super::super::cose::CoseSign1;
use super::super::revocation::RevocationView;
use super::super::room_path::RoomPath;
use super::super::scope::{KIND_GROUP, KIND_ROOM, KIND_USER};
use super::condition::{self, Subject};
use super::parsed::{Conditions, Link, Next, ParsedToken};
use super::{TokenClaims, TokenError};
use crate::codec::time::UnixMillis;
use crate::identity::device::DeviceId;

/// Longest membership-proof text that is looked at, in bytes.
pub const MAX_PROOF_TEXT: usize = 4096;

/// Against what a token is verified.
#[derive(Clone, Copy)]
pub struct VerifyContext<'a> {
    /// The time.
    pub now: UnixMillis,
    /// Who presents it; `None` leaves the bearer unchecked.
    pub bearer: Option<DeviceId>,
    /// What has been revoked.
    pub revocations: &'a RevocationView,
}

/// A token that passed.
#[derive(Clone, Copy, Debug)]
pub struct VerifiedToken<'t> {
    /// The presented token's claims, without the nested tokens, conditions and unknown claims.
    pub claims: &'t TokenClaims,
    /// The claims of the last token in its chain; its issuer is whose word all rests on.
    pub root: &'t TokenClaims,
    /// How many tokens the presented one hangs from.
    pub depth: usize,
}

/// Who may be at the root of a token for a direct message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmRule {
    /// The verifier only: a message is let in by its receiver.
    Verifier,
    /// Either of the two: for reading the own log.
    EitherParticipant,
}

/// Applies all checks in order.
///
/// # Errors
/// [`TokenError`] for the first check that fails.
pub fn verify<'t>(
    token: &'t ParsedToken,
    context: &VerifyContext<'_>,
) -> Result<VerifiedToken<'t>, TokenError> {
    let VerifyContext { now, bearer, revocations } = *context;
    token.verify(now, bearer, &|claims| revocations.revokes(claims, now))
}

/// Verifies a token presented for a room: all general checks, then capability, scope kind, scope
/// path, and that the chain begins with the room's owner (named room) or as `rule` says (direct
/// message). `verifier` is the device that is asked.
///
/// # Errors
/// [`TokenError`] for the first check that fails.
pub fn verify_room_token<'t>(
    token: &'t ParsedToken,
    context: &VerifyContext<'_>,
    room: &RoomPath,
    verifier: &DeviceId,
    rule: DmRule,
) -> Result<VerifiedToken<'t>, TokenError> {
    let verified = verify(token, context)?;
    verified.is_for(ROOM_MEMBER, KIND_ROOM, &room.to_string())?;
    let root = &verified.root.issuer;
    let rooted = match (room, rule) {
        (RoomPath::Named { owner, .. }, _) => root == owner,
        (RoomPath::Dm { .. }, DmRule::Verifier) => root == verifier,
        (RoomPath::Dm { .. }, DmRule::EitherParticipant) => room.has_participant(root),
    };
    if rooted { Ok(verified) } else { Err(TokenError::WrongChainRoot) }
}

/// Verifies a grant to open a direct message with a device of `principal`.
///
/// # Errors
/// [`TokenError`] for the first check that fails.
pub fn verify_dm_send<'t>(
    token: &'t ParsedToken,
    context: &VerifyContext<'_>,
    principal: &DeviceId,
) -> Result<VerifiedToken<'t>, TokenError> {
    let verified = verify(token, context)?;
    verified.is_for(DM_SEND, KIND_USER, &principal.hex())?;
    verified.is_rooted_at(principal)
}

/// Reads the text of a membership proof.
///
/// # Errors
/// [`TokenError::TooLong`] or [`TokenError::NotAToken`].
pub fn parse_membership_proof(text: &str) -> Result<ParsedToken, TokenError> {
    if text.len() > MAX_PROOF_TEXT {
        return Err(TokenError::TooLong);
    }
    let token = CoseSign1::from_text(text).map_err(|_| TokenError::NotAToken)?;
    Ok(ParsedToken::parse(&token))
}

/// Verifies that `issuer` (a user principal or a machine) calls the bearer one of its own.
///
/// # Errors
/// [`TokenError`] for the first check that fails.
pub fn verify_membership_proof<'t>(
    token: &'t ParsedToken,
    context: &VerifyContext<'_>,
    issuer: &DeviceId,
) -> Result<VerifiedToken<'t>, TokenError> {
    let verified = verify(token, context)?;
    verified.is_for(GROUP_MEMBER, KIND_GROUP, &issuer.hex())?;
    let verified = verified.is_rooted_at(issuer)?;
    if verified.depth == 0 { Ok(verified) } else { Err(TokenError::NotRootLevel) }
}

/// Verifies a token for one of our services: all general checks, then capability, scope, and that
/// the chain begins with `issuer`.
///
/// # Errors
/// [`TokenError`] for the first check that fails.
pub fn verify_service_token<'t>(
    token: &'t ParsedToken,
    context: &VerifyContext<'_>,
    capability: &str,
    (kind, path): (&str, &str),
    issuer: &DeviceId,
) -> Result<VerifiedToken<'t>, TokenError> {
    let verified = verify(token, context)?;
    verified.is_for(capability, kind, path)?;
    verified.is_rooted_at(issuer)
}

impl VerifiedToken<'_> {
    fn is_for(&self, capability: &str, kind: &str, path: &str) -> Result<(), TokenError> {
        if self.claims.capability != capability {
            return Err(TokenError::WrongCapability);
        }
        if self.claims.scope.kind != kind {
            return Err(TokenError::WrongScopeKind);
        }
        if self.claims.scope.path.as_deref() != Some(path) {
            return Err(TokenError::WrongScopePath);
        }
        Ok(())
    }

    fn is_rooted_at(self, issuer: &DeviceId) -> Result<Self, TokenError> {
        if self.root.issuer == *issuer { Ok(self) } else { Err(TokenError::WrongChainRoot) }
    }
}

impl ParsedToken {
    pub(in super::super) fn verify(
        &self,
        now: UnixMillis,
        bearer: Option<DeviceId>,
        revoked: &dyn Fn(&TokenClaims) -> bool,
    ) -> Result<VerifiedToken<'_>, TokenError> {
        // Each token's own checks come before those of the token that it hangs from …
        let mut authorised: Option<&Link> = None;
        for (depth, link) in self.links.iter().enumerate() {
            let subject = authorised.map(|link| Subject {
                bearer: link.claims.bearer,
                capability: &link.claims.capability,
            });
            link.check(now, subject.as_ref(), revoked)
                .map_err(|error| self.as_seen_from_the_leaf(depth, error))?;
            authorised = (link.next == Next::Authoriser).then_some(link);
        }
        if let Some(error) = self.broken {
            return Err(self.as_seen_from_the_leaf(self.links.len(), error));
        }
        // … and what a token may pass on is judged on the way back.
        for (depth, pair) in self.links.windows(2).enumerate().rev() {
            if let [child, ancestor] = pair {
                child
                    .is_within(ancestor)
                    .map_err(|error| self.as_seen_from_the_leaf(depth, error))?;
            }
        }
        let (Some(leaf), Some(root)) = (self.links.first(), self.links.last()) else {
            return Err(TokenError::Malformed);
        };
        if bearer.is_some_and(|bearer| bearer != leaf.claims.bearer) {
            return Err(TokenError::BearerMismatch);
        }
        Ok(VerifiedToken { claims: &leaf.claims, root: &root.claims, depth: self.links.len() - 1 })
    }

    /// A failure below the presented token shows as a failure of its link, whatever it was;
    /// only the length of the chain speaks for itself.
    fn as_seen_from_the_leaf(&self, depth: usize, error: TokenError) -> TokenError {
        match self.links.first() {
            Some(leaf) if depth > 0 && error != TokenError::ChainTooDeep => match leaf.next {
                Next::Authoriser => TokenError::AuthorisationInvalid,
                _ => TokenError::ParentInvalid,
            },
            _ => error,
        }
    }
}

impl Link {
    fn check(
        &self,
        now: UnixMillis,
        subject: Option<&Subject<'_>>,
        revoked: &dyn Fn(&TokenClaims) -> bool,
    ) -> Result<(), TokenError> {
        let claims = &self.claims;
        let refuse = |refused: bool, error| if refused { Err(error) } else { Ok(()) };
        refuse(!self.signature_verifies, TokenError::BadSignature)?;
        refuse(!self.issuer_is_key, TokenError::WrongIssuer)?;
        refuse(claims.expires <= now, TokenError::Expired)?;
        refuse(claims.not_before.is_some_and(|from| from > now), TokenError::NotYetValid)?;
        refuse(claims.valid_until.is_some_and(|until| until <= now), TokenError::ContentExpired)?;
        refuse(revoked(claims), TokenError::Revoked)?;
        match &self.conditions {
            Conditions::Unreadable => return Err(TokenError::ConditionsInvalid),
            Conditions::All(conditions) => refuse(
                !condition::all_hold(conditions, subject),
                TokenError::ConditionsNotSatisfied,
            )?,
        }
        let has_parent = matches!(self.next, Next::Parent | Next::Both);
        refuse(has_parent && claims.capability == MANAGE_GRANT, TokenError::AuthorisationInvalid)?;
        refuse(self.next == Next::Both, TokenError::Malformed)
    }

    /// Whether this token stays within what `ancestor`, the token it hangs from, lets pass on.
    fn is_within(&self, ancestor: &Self) -> Result<(), TokenError> {
        let (child, ancestor) = (&self.claims, &ancestor.claims);
        let attenuates = ancestor.bearer == child.issuer
            && child.expires <= ancestor.expires
            && ancestor.scope.covers(&child.scope)
            && ancestor.allows_remaining(child.delegations_remaining);
        if self.next == Next::Authoriser {
            let grants = ancestor.capability == MANAGE_GRANT
                && ancestor.grants_capability.as_ref().is_none_or(|verb| *verb == child.capability);
            if attenuates && grants { Ok(()) } else { Err(TokenError::AuthorisationInvalid) }
        } else if attenuates && ancestor.capability == child.capability {
            Ok(())
        } else {
            Err(TokenError::DelegationExceedsParent)
        }
    }
}
