//! Grants to write to the agents of our user without a question (`rooms.md` 3.12): issued and
//! withdrawn in the name of the user, handed on as text by people, used for one conversation each.

use super::super::records::Now;
use super::super::session::REQUEST_TIMEOUT_MS;
use super::super::wire::capability::{self, DM_SEND};
use super::super::wire::cose::CoseSign1;
use super::super::wire::revocation;
use super::super::wire::room_path::RoomPath;
use super::super::wire::scope::{KIND_USER, Scope};
use super::super::wire::token::{
    self, MintRequest, ParsedToken, TokenError, VerifiedToken, VerifyContext,
};
use super::{
    CommandError, CommandResult, IdentityChange, Node, Op, OpId, OutRequest, Outcome, Purpose,
    Saving,
};
use crate::codec::cbor::Value;
use crate::identity::device::{DeviceId, DeviceKey};

/// Life of a grant (`rooms.md` 3.12).
const DM_GRANT_LIFE_MS: u64 = 30 * 24 * 3600 * 1000;

fn no_user() -> CommandError {
    CommandError::new("no_principal", "this daemon has no user identity to issue grants with")
}

fn not_minted(error: token::MintError) -> CommandError {
    CommandError::new("mint_failed", format!("the grant could not be made: {error}"))
}

impl Node {
    fn user(&self) -> Result<DeviceKey, CommandError> {
        self.config.user.clone().ok_or_else(no_user)
    }

    /// Issues a grant. `known` is the id of an earlier one of that bearer, which it takes over: both
    /// end when either is withdrawn. Answered with the grant once its id is on disk.
    pub(super) fn issue_dm_grant(
        &mut self,
        agent: DeviceId,
        bearer: DeviceId,
        principal: bool,
        known: Option<[u8; 16]>,
        op: OpId,
        now: Now,
    ) {
        let fresh = self.random::<16>();
        let token_id = known.unwrap_or(fresh);
        let minted = self.user().and_then(|user| {
            let scope = Scope { kind: KIND_USER.into(), path: Some(user.id().hex()) };
            let expires = now.unix.plus(DM_GRANT_LIFE_MS);
            // The bearer's user may hand it on to its devices, and no further.
            let request = MintRequest::new(token_id, bearer, DM_SEND, scope, expires)
                .delegations(u64::from(principal));
            token::mint(&user, now.unix, request).map_err(not_minted)
        });
        let grant = match minted {
            Ok(grant) => grant,
            Err(error) => return self.fail(op, error),
        };
        self.save_dm_grant(agent, bearer, Some(token_id), (op, CommandResult::Grant(grant)));
    }

    fn save_dm_grant(
        &mut self,
        agent: DeviceId,
        bearer: DeviceId,
        token_id: Option<[u8; 16]>,
        op: (OpId, CommandResult),
    ) {
        let change = IdentityChange::DmGrant {
            bearer,
            token_id: token_id.map(|token_id| token_id.to_vec()),
        };
        let ticket = self.save_identity(agent, change);
        let nobody =
            Saving { answers: Vec::new(), outcome: Outcome::Ok(Value::Null), op: Some(op) };
        self.saving.insert(ticket, nobody);
    }

    /// Withdraws a grant by its id. A conversation that it has opened stays open.
    pub(super) fn withdraw_dm_grant(
        &mut self,
        agent: DeviceId,
        bearer: DeviceId,
        token_id: [u8; 16],
        op: OpId,
        now: Now,
    ) {
        let user = match self.user() {
            Ok(user) => user,
            Err(error) => return self.fail(op, error),
        };
        let entry = revocation::revoke(&user, &token_id, now.unix);
        self.announce_revocation(agent, entry);
        self.save_dm_grant(agent, bearer, None, (op, CommandResult::Done));
    }

    /// Opens a conversation with a grant that somebody has given to our agent, or to our user.
    pub(super) fn use_dm_grant(
        &mut self,
        agent: DeviceId,
        to: DeviceId,
        grant: CoseSign1,
        op: OpId,
        now: Now,
    ) {
        let Some(path) = RoomPath::dm(agent, to) else {
            self.fail(op, CommandError::new("agent_not_found", "that is no other agent"));
            return;
        };
        let token = match self.grant_for(agent, grant, now) {
            Ok(token) => token,
            Err(error) => return self.fail(op, error),
        };
        let request = OutRequest {
            verb: capability::ROOM_MEMBER.into(),
            params: Value::map([("verb", Value::Text("room.join".into()))]),
            scope: Scope { kind: "room".into(), path: Some(path.to_string()) },
            token: Some(token),
        };
        // What the other side may want of us is agreed to as well.
        self.open(agent, &path, now);
        self.ops.insert(op, Op::Plain { reply_by: now.mono + REQUEST_TIMEOUT_MS + 1_000 });
        let purpose = Purpose::Join { agent, path, op: Some(op) };
        self.request(agent, to, request, purpose, Some(now.mono + REQUEST_TIMEOUT_MS));
    }

    /// The grant as our agent can show it: itself, or one delegated to it from that of its user.
    fn grant_for(
        &mut self,
        agent: DeviceId,
        grant: CoseSign1,
        now: Now,
    ) -> Result<CoseSign1, CommandError> {
        let parsed = self.tokens.get_or_parse(&grant);
        match self.check_grant(&parsed, agent, now) {
            Ok(_) => return Ok(grant),
            Err(TokenError::BearerMismatch) => {}
            Err(error) => return Err(rejected(&error)),
        }
        let user = self.user()?;
        let (scope, expires) = match self.check_grant(&parsed, user.id(), now) {
            Ok(verified) => (verified.claims.scope.clone(), verified.claims.expires),
            Err(TokenError::BearerMismatch) => {
                return Err(CommandError::new(
                    "grant_not_for_us",
                    "the grant is for another agent; ask for one with this agent's id",
                ));
            }
            Err(error) => return Err(rejected(&error)),
        };
        let request = MintRequest {
            parent: Some(&grant),
            ..MintRequest::new(self.random::<16>(), agent, DM_SEND, scope, expires).delegations(0)
        };
        token::mint(&user, now.unix, request).map_err(|error| {
            CommandError::new("delegation_failed", format!("it cannot be handed on: {error}"))
        })
    }

    fn check_grant<'t>(
        &self,
        grant: &'t ParsedToken,
        bearer: DeviceId,
        now: Now,
    ) -> Result<VerifiedToken<'t>, TokenError> {
        let context =
            VerifyContext { now: now.unix, bearer: Some(bearer), revocations: &self.revocations };
        token::verify(grant, &context)
    }
}

fn rejected(error: &TokenError) -> CommandError {
    CommandError::new("grant_rejected", format!("the grant is no good: {error}"))
}
