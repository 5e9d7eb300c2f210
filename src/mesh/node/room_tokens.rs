//! Tokens of rooms and conversations: whose are good here, issuing, keeping and withdrawing them
//! (`rooms.md` 3.1; decision 4). What they let their bearers do is the matter of `rooms` and `dms`.

use super::super::journal::Record;
use super::super::records::Now;
use super::super::wire::capability;
use super::super::wire::cose::CoseSign1;
use super::super::wire::frame::Frame;
use super::super::wire::revocation::{self, RevocationEntry};
use super::super::wire::room_path::RoomPath;
use super::super::wire::scope::Scope;
use super::super::wire::token::{self, MintRequest, ParsedToken, TokenClaims, VerifyContext};
use super::{IdentityChange, Node, Output, Saving, Ticket};
use crate::codec::time::UnixMillis;
use crate::identity::device::DeviceId;

/// Life of a room token (`rooms.md` 3.1).
const ROOM_TOKEN_LIFE_MS: u64 = 30 * 24 * 3600 * 1000;

impl Node {
    /// Whether `from` holds a good token of ours (or of the room's owner) for this room.
    pub(super) fn is_authorised(
        &self,
        local: DeviceId,
        from: DeviceId,
        path: &RoomPath,
        token: Option<&ParsedToken>,
        now: Now,
    ) -> bool {
        // A revocation can be missed (a restart, a session that does not read it); the owner's
        // record says the same.
        if self.replica.put_out_by_owner(path, &from)
            && !self.replica.room(path).is_some_and(|room| room.is_invited(&from))
        {
            return false;
        }
        token.is_some_and(|token| self.is_good_room_token(local, from, path, token, now))
    }

    /// Whether `token` lets `bearer` into this room, as `local` would judge it.
    pub(super) fn is_good_room_token(
        &self,
        local: DeviceId,
        bearer: DeviceId,
        path: &RoomPath,
        token: &ParsedToken,
        now: Now,
    ) -> bool {
        let context =
            VerifyContext { now: now.unix, bearer: Some(bearer), revocations: &self.revocations };
        token::verify_room_token(token, &context, path, &local, token::DmRule::Verifier).is_ok()
    }

    /// Whether an agent of ours is in a room by its own will, or asks to be. The record does not
    /// count: whose room it is may write anybody into it. A conversation is consented to by token.
    pub(super) fn takes_part(&self, agent: DeviceId, path: &RoomPath) -> bool {
        path.owner().is_none()
            || self.agent(&agent).is_some_and(|held| {
                held.joining.contains(path)
                    || (held.tokens.contains_key(path) && !held.invitations.contains(path))
            })
    }

    /// Mints a room token for `bearer` and remembers its id. The ticket is that of the file which
    /// has to be written first; none where it holds the id already.
    pub(super) fn issue_room_token(
        &mut self,
        local: DeviceId,
        bearer: DeviceId,
        path: &RoomPath,
        now: Now,
    ) -> Option<(CoseSign1, Option<Ticket>)> {
        let fresh = self.random::<16>();
        let all_saved = self.saving.is_empty();
        let device = self.devices.get_mut(&local)?;
        // One id for all tokens of a bearer: withdrawing it withdraws each of them.
        let known = device
            .agent
            .as_ref()
            .and_then(|agent| agent.grants.get(&(path.clone(), bearer)))
            .and_then(|known| <[u8; 16]>::try_from(known.as_slice()).ok());
        let token_id = known.unwrap_or(fresh);
        let expires = now.unix.plus(ROOM_TOKEN_LIFE_MS);
        let scope = Scope::room(path);
        let request = MintRequest::new(token_id, bearer, capability::ROOM_MEMBER, scope, expires)
            .delegations(0);
        let token = token::mint(&device.key, now.unix, request).ok()?;
        if bearer == local || (known.is_some() && all_saved) {
            return Some((token, None));
        }
        let token_id = token_id.to_vec();
        if let Some(agent) = device.agent.as_mut() {
            agent.grants.insert((path.clone(), bearer), token_id.clone());
        }
        let ticket = self.save_identity(
            local,
            IdentityChange::IssuedGrant {
                path: path.clone(),
                member: bearer,
                token_id: Some(token_id),
            },
        );
        Some((token, Some(ticket)))
    }

    /// Asks for a change of an identity file; the ticket comes back once it is on disk.
    pub(super) fn save_identity(&mut self, device: DeviceId, change: IdentityChange) -> Ticket {
        let ticket = Ticket(self.id());
        self.save_begun(ticket);
        self.outputs.push_back(Output::SaveIdentity { ticket, device, change });
        ticket
    }

    /// A change of an identity file is on disk, or reported as failed: what waited for it goes on.
    pub(super) fn identity_saved(&mut self, ticket: Ticket, now: Now) {
        self.save_ended(ticket);
        if let Some(held) = self.saving.remove(&ticket) {
            self.finish_saved(held, now);
        }
    }

    pub(super) fn finish_saved(&mut self, held: Saving, now: Now) {
        for to in held.answers {
            self.release_waiter(to);
            self.answer(to, held.outcome.clone(), now);
        }
        if let Some((op, result)) = held.op {
            self.outputs.push_back(Output::Reply { op, result: Ok(result) });
        }
    }

    /// Withdraws what was issued to a member, and tells everybody.
    pub(super) fn revoke_grant(
        &mut self,
        local: DeviceId,
        member: DeviceId,
        path: &RoomPath,
        now: Now,
    ) {
        let Some(device) = self.devices.get_mut(&local) else { return };
        let Some(token_id) =
            device.agent.as_mut().and_then(|agent| agent.grants.remove(&(path.clone(), member)))
        else {
            return;
        };
        let entry = revocation::revoke(&device.key, &token_id, now.unix);
        self.save_identity(
            local,
            IdentityChange::IssuedGrant { path: path.clone(), member, token_id: None },
        );
        self.announce_revocation(local, entry);
    }

    /// Takes note of a revocation of our own, and tells everybody.
    pub(super) fn announce_revocation(&mut self, local: DeviceId, entry: CoseSign1) {
        let remotes: Vec<DeviceId> = self
            .routes
            .range((local, DeviceId([0; 32]))..=(local, DeviceId([255; 32])))
            .map(|((_, remote), _)| *remote)
            .collect();
        for remote in remotes {
            if let Some(session) = self.route(&local, &remote) {
                self.send(session, Frame::RevocationAnnounce { entries: vec![entry.clone()] });
            }
        }
        if let Ok(entry) = RevocationEntry::parse(&entry) {
            self.revoked(local, entry);
        }
    }

    /// Somebody (or we) has revoked a token.
    pub(super) fn revoked(&mut self, source: DeviceId, entry: RevocationEntry) {
        let (token, issuer) = entry.key();
        let signed = entry.signed().encode();
        if self.revocations.insert(source, entry) {
            self.keep(Record::Revocation { token, issuer, source, entry: signed });
        }
    }

    /// When an agent was invited to a room, as far as its token tells: none where that is over.
    pub(super) fn invited_at(&self, agent: &DeviceId, path: &RoomPath) -> Option<UnixMillis> {
        let token = self.agent(agent)?.tokens.get(path)?;
        let expires = TokenClaims::of(token)?.expires;
        let now = self.last_now.unwrap_or_default().unix;
        // Both kinds of peers give such a token one life.
        let at = UnixMillis(expires.0.saturating_sub(ROOM_TOKEN_LIFE_MS)).min(now);
        (expires > now).then_some(at)
    }

    pub(super) fn forget_invitation(&mut self, agent: DeviceId, path: &RoomPath) {
        if self.agent_mut(&agent).is_some_and(|held| held.invitations.remove(path)) {
            self.keep(Record::InvitedDone { agent, path: path.to_string() });
        }
    }

    pub(super) fn keep_token(&mut self, agent: DeviceId, path: &RoomPath, token: CoseSign1) {
        if let Some(held) = self.agent_mut(&agent) {
            held.tokens.insert(path.clone(), token.clone());
        }
        let change = IdentityChange::RoomToken { path: path.clone(), token: Some(token) };
        self.save_identity(agent, change);
    }

    pub(super) fn give_up_token(&mut self, agent: DeviceId, path: &RoomPath) {
        self.forget_invitation(agent, path);
        let had = self.agent_mut(&agent).is_some_and(|held| held.tokens.remove(path).is_some());
        if had {
            let change = IdentityChange::RoomToken { path: path.clone(), token: None };
            self.save_identity(agent, change);
        }
    }

    /// Whether a token we hold for a path would still be honoured, as far as we can tell.
    pub(super) fn has_good_token(&mut self, agent: DeviceId, path: &RoomPath, now: Now) -> bool {
        let Some(token) = self.agent(&agent).and_then(|held| held.tokens.get(path)).cloned() else {
            return false;
        };
        let parsed = self.tokens.get_or_parse(&token);
        let context =
            VerifyContext { now: now.unix, bearer: Some(agent), revocations: &self.revocations };
        token::verify(&parsed, &context).is_ok()
    }
}
