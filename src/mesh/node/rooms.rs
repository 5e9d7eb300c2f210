//! Rooms: membership, messages, receipts and notices, from both sides
//! (`rooms.md` 3 and 4, its weak spots closed; decisions 6 and 7).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::events::{DeliveryEvent, DeliveryState, MemberInfo};
use super::super::journal::Record;
use super::super::message::{MeshMessage, Patch};
use super::super::records::{
    AgentStatus, DmMessage, MAX_TEXT_BYTES, Now, RoomMessage, RoomRecord, RoomType,
    StreamingBehavior, Visibility,
};
use super::super::replica::{Owner, Speaker};
use super::super::session::{APPROVAL_GRACE_MS, APPROVAL_WINDOW_MS, REQUEST_TIMEOUT_MS, SessionId};
use super::super::wire::capability;
use super::super::wire::cose::CoseSign1;
use super::super::wire::room_path::{self, RoomPath};
use super::super::wire::scope::Scope;
use super::super::wire::token::ParsedToken;
use super::control::too_many;
use super::requests::{error, ok, ok_with};
use super::{
    Answer, AnswerTo, CommandError, CommandResult, Node, Op, OpId, OutRequest, Outcome, Output,
    Purpose, Saving,
};
use crate::codec::cbor::{self, Value};
use crate::codec::text::{escape_untrusted, truncate_chars};
use crate::codec::time::UnixMillis;
use crate::identity::device::DeviceId;
use crate::identity::names;

/// Bytes of a message id; real ones have 16.
const MAX_MESSAGE_ID_BYTES: usize = 64;
/// Message ids in one receipt; a mailbox that is acknowledged at once may need several.
pub(super) const MAX_RECEIPT_IDS: usize = 1024;
/// Member of a commsd owner's answer to room.join: the room's whole record, which is the owner's
/// word. Others leave it alone.
const ROOM_RECORD: &str = "x-commsd-room";
/// Codes of a `join_outcome` that no join has brought: the agent has been moved to this room, or its
/// owner has given it another name.
const MOVED: &str = "moved";
/// See [`MOVED`].
const RENAMED: &str = "renamed";
/// Code of a `join_outcome`, not accepted, that no join has brought: the room is no more.
const DESTROYED: &str = "destroyed";
/// How long a send waits for its recipients before it is answered "accepted" for those that are
/// silent: many times what a busy one takes, and little enough for whoever waits.
const SEND_PATIENCE_MS: u64 = 2_000;
/// How long a join waits for the owner's answer before the command is answered "pending".
pub(super) const JOIN_PATIENCE_MS: u64 = 1_000;

impl Node {
    // --- the owner's side -----------------------------------------------------------------------------

    pub(super) fn join_asked(
        &mut self,
        local: DeviceId,
        from: DeviceId,
        session: Option<SessionId>,
        to: AnswerTo,
        path: RoomPath,
        token: Option<Arc<ParsedToken>>,
        now: Now,
    ) -> Answer {
        let Some(owner) = path.owner() else {
            return self.conversation_asked(local, from, session, to, path, token, now);
        };
        if owner != local {
            return Answer::Now(error("not_owner"));
        }
        // One that a restart has made us forget is still ours by its token.
        let existed = self.agent(&local).is_some_and(|held| held.tokens.contains_key(&path));
        if self.replica.room(&path).is_none() && !existed {
            return Answer::Now(error("room_not_found"));
        }
        let put_out = self.replica.put_out_by_owner(&path, &from);
        let admitted = self.replica.room(&path).is_some_and(|room| {
            room.is_invited(&from)
                || room.is_member(&from)
                || (room.kind == RoomType::Public && !put_out)
        });
        // Nobody would take the record of a larger room.
        if self.replica.room(&path).is_some_and(|room| room.is_full(&from)) {
            return Answer::Now(error("room_full"));
        }
        if admitted {
            self.admit(local, from, &path, vec![to], None, now);
            return Answer::Later;
        }
        self.ask_agent(local, from, session, to, path, now)
    }

    /// Lets a requester into a room (or conversation) of ours. Nobody is told before the grant is
    /// on disk: a crash must not undo what was said (decision 4).
    pub(super) fn admit(
        &mut self,
        local: DeviceId,
        member: DeviceId,
        path: &RoomPath,
        mut answers: Vec<AnswerTo>,
        op: Option<OpId>,
        now: Now,
    ) {
        // Whatever lets it in answers an earlier request of its own as well.
        answers.append(&mut self.take_question(local, path, &member));
        let Some((token, ticket)) = self.issue_room_token(local, member, path, now) else {
            for to in answers {
                self.release_waiter(to);
                self.answer(to, error("mint_failed"), now);
            }
            if let Some(op) = op {
                self.fail(op, CommandError::new("mint_failed", "the token could not be made"));
            }
            return;
        };
        let outcome = self.let_member_in(local, member, path, &token, now);
        let op = op.map(|op| (op, CommandResult::Done));
        let admitted = Saving { answers, outcome, op };
        match ticket {
            Some(ticket) => {
                self.saving.insert(ticket, admitted);
            }
            None => self.finish_saved(admitted, now),
        }
    }

    /// The record of a new member, and what the others hear; what the member is answered.
    fn let_member_in(
        &mut self,
        local: DeviceId,
        member: DeviceId,
        path: &RoomPath,
        token: &CoseSign1,
        now: Now,
    ) -> Outcome {
        let Some(before) = self.replica.room(path).map(|room| room.members.clone()) else {
            let members = members_value(&[local, member]);
            return ok_with([("granted-token", token.to_value()), ("members", members)]);
        };
        // A member that asks once more changes nothing: it cannot make us tell everybody again.
        let again = before.contains(&member) && !self.replica.put_out_by_owner(path, &member);
        if !again {
            self.replica.note_owner_join(path, &member);
            if let Some(room) = self.replica.room_mut(path) {
                room.record_join(member);
            }
            self.broadcast_room(local, path, now);
            self.members_changed(path, before, local, now);
        }
        let room = self.replica.room(path);
        let members = room.map(|room| members_value(&room.members)).unwrap_or(Value::Null);
        let state = room.map_or(Value::Null, room_state);
        let record = room.and_then(|room| cbor::to_value(room).ok()).unwrap_or(Value::Null);
        let list = self.room_members_event(path, now);
        self.notify(local, path, list, |remote| *remote == member, now);
        if !again {
            let joined = DeliveryEvent::MemberJoined { room: path.to_string(), agent: member };
            self.notify(local, path, joined, |remote| *remote != member, now);
            self.advert_changed(&local, now);
        }
        ok_with([
            ("granted-token", token.to_value()),
            ("members", members),
            ("room-state", state),
            (ROOM_RECORD, record),
        ])
    }

    pub(super) fn members_asked(
        &self,
        _local: DeviceId,
        _from: DeviceId,
        path: &RoomPath,
    ) -> Outcome {
        match path.participants() {
            Some((low, high)) => ok_with([("members", members_value(&[low, high]))]),
            None => match self.replica.room(path) {
                Some(room) => ok_with([
                    ("members", members_value(&room.members)),
                    ("room-state", room_state(room)),
                ]),
                None => ok_with([("members", members_value(&[]))]),
            },
        }
    }

    pub(super) fn leave_heard(
        &mut self,
        local: DeviceId,
        from: DeviceId,
        path: &RoomPath,
        params: &Value,
        now: Now,
    ) -> Outcome {
        let Some(room) = self.replica.room(path).filter(|_| path.owner() == Some(local)) else {
            return error("room_not_found");
        };
        let (member, invited) = (room.is_member(&from), room.is_invited(&from));
        if !member && !invited {
            return ok();
        }
        self.put_out(local, from, path, now);
        if !member {
            let agent_name = self.name_of(&from);
            let reason = params.get("reason").and_then(Value::as_text).unwrap_or_default();
            let reason = truncate_chars(reason, MAX_REASON_CHARS).to_owned();
            self.show(
                local,
                DeliveryEvent::InviteDeclined {
                    room: path.to_string(),
                    agent: from,
                    agent_name,
                    reason,
                },
                now,
            );
        }
        ok()
    }

    /// Ends a membership or invitation at the owner's side.
    fn put_out(&mut self, local: DeviceId, member: DeviceId, path: &RoomPath, now: Now) {
        let before = self.replica.room(path).map(|room| room.members.clone()).unwrap_or_default();
        self.revoke_grant(local, member, path, now);
        if let Some(room) = self.replica.room_mut(path) {
            room.record_leave(member);
        }
        self.broadcast_room(local, path, now);
        // The one put out must hear it too, though it is no member any more.
        if let Some(room) = self.replica.room(path).cloned()
            && let Some(session) = self.route(&local, &member)
            && room.kind != RoomType::Public
        {
            let message = MeshMessage::StateUpdate(Box::new(Patch::RoomUpsert { room }));
            self.tell(session, &message, now);
        }
        let was_member = before.contains(&member);
        self.members_changed(path, before, local, now);
        if was_member {
            let left = DeliveryEvent::MemberLeft { room: path.to_string(), agent: member };
            self.notify(local, path, left, |_| true, now);
        }
        self.advert_changed(&local, now);
    }

    // --- what members hear ------------------------------------------------------------------------------

    /// A room's members changed: our agents in it are told, once each.
    pub(super) fn members_changed(
        &mut self,
        path: &RoomPath,
        before: Vec<DeviceId>,
        speaker: DeviceId,
        now: Now,
    ) {
        let Some(room) = self.replica.room(path) else { return };
        let after = room.members.clone();
        for agent in self.agent_ids() {
            if before.contains(&agent) && !after.contains(&agent) && speaker != agent {
                // Put out by the owner: the token is revoked, and a join has to ask again.
                let leaving = self.agent(&agent).is_some_and(|held| held.leaving.contains(path));
                if leaving {
                    // By its own wish; what else there is to do follows the owner's answer.
                    continue;
                }
                self.give_up_token(agent, path);
                self.unsubscribe(agent, path, now);
                self.show(agent, DeliveryEvent::MemberLeft { room: path.to_string(), agent }, now);
                continue;
            }
            // One that has just come in is told by `room_members`.
            if !after.contains(&agent) || !before.contains(&agent) {
                continue;
            }
            for member in &after {
                if *member != agent && !before.contains(member) {
                    self.show_joined(agent, path, *member, now);
                }
            }
            for member in &before {
                if *member != agent && !after.contains(member) {
                    self.show_left(agent, path, *member, now);
                }
            }
        }
    }

    fn show_joined(&mut self, agent: DeviceId, path: &RoomPath, member: DeviceId, now: Now) {
        let Some(held) = self.agent_mut(&agent) else { return };
        let shown = held.shown.entry(path.clone()).or_default();
        if shown.insert(member, AgentStatus::Active).is_none() {
            let event = DeliveryEvent::MemberJoined { room: path.to_string(), agent: member };
            self.show(agent, event, now);
        }
    }

    fn show_left(&mut self, agent: DeviceId, path: &RoomPath, member: DeviceId, now: Now) {
        let Some(held) = self.agent_mut(&agent) else { return };
        if held.shown.get_mut(path).and_then(|shown| shown.remove(&member)).is_some() {
            let event = DeliveryEvent::MemberLeft { room: path.to_string(), agent: member };
            self.show(agent, event, now);
        }
    }

    /// A room that none of our agents is in any more: what was said there is gone, and of a room
    /// that is not public its record as well.
    pub(super) fn forget_if_outside(&mut self, path: &RoomPath) {
        let Some(room) = self.replica.room(path) else { return };
        if self.is_ours(&room.owner) || room.members.iter().any(|member| self.is_ours(member)) {
            return;
        }
        let public = room.kind == RoomType::Public;
        self.replica.remove_room_history(path);
        if !public {
            self.replica.remove_room(path);
        }
    }

    /// A device's presence changed: our agents that share a room with it are told.
    pub(super) fn show_status(&mut self, device: DeviceId, status: AgentStatus, now: Now) {
        if self.record(&device).is_some_and(|record| record.visibility == Visibility::Ghost) {
            return;
        }
        // Agents of a daemon that stops go, and come back, together: that is no news among them.
        let together = self.shutting_down.is_some() && self.is_hosted(&device);
        let shared: Vec<(RoomPath, Vec<DeviceId>)> = self
            .replica
            .rooms()
            .filter(|(_, room)| room.is_member(&device))
            .map(|(path, room)| (path.clone(), room.members.clone()))
            .collect();
        for (path, members) in shared {
            for agent in members.iter().filter(|member| !together && **member != device) {
                self.show_member_status(*agent, &path, device, status, now);
            }
            let event =
                DeliveryEvent::MemberStatus { room: path.to_string(), agent: device, status };
            if self.is_hosted(&device) {
                self.notify(device, &path, event, |_| true, now);
            }
        }
    }

    fn show_member_status(
        &mut self,
        agent: DeviceId,
        path: &RoomPath,
        member: DeviceId,
        status: AgentStatus,
        now: Now,
    ) {
        let Some(held) = self.agent_mut(&agent) else { return };
        let shown = held.shown.entry(path.clone()).or_default();
        let before = shown.insert(member, status).unwrap_or(AgentStatus::Active);
        if before != status {
            let event =
                DeliveryEvent::MemberStatus { room: path.to_string(), agent: member, status };
            self.show(agent, event, now);
        }
    }

    pub(super) fn show_name(
        &mut self,
        device: DeviceId,
        old_name: String,
        new_name: String,
        now: Now,
    ) {
        if !names::is_clean(&new_name) {
            return;
        }
        let old_name = if names::is_clean(&old_name) { old_name } else { String::new() };
        let mut told: Vec<DeviceId> = Vec::new();
        for (_, room) in self.replica.rooms() {
            if room.is_member(&device) {
                told.extend(room.members.iter().filter(|member| **member != device));
            }
        }
        told.sort_unstable();
        told.dedup();
        for agent in
            told.into_iter().filter(|agent| self.agent(agent).is_some()).collect::<Vec<_>>()
        {
            let event = DeliveryEvent::NameChanged {
                agent: device,
                old_name: old_name.clone(),
                new_name: new_name.clone(),
            };
            self.show(agent, event, now);
        }
    }

    /// Tells reference members what a commsd works out for itself from the records.
    fn notify(
        &mut self,
        local: DeviceId,
        path: &RoomPath,
        event: DeliveryEvent,
        choose: impl Fn(&DeviceId) -> bool,
        now: Now,
    ) {
        let Some(room) = self.replica.room(path) else { return };
        let subject = match &event {
            DeliveryEvent::MemberJoined { agent, .. }
            | DeliveryEvent::MemberLeft { agent, .. }
            | DeliveryEvent::MemberStatus { agent, .. } => Some(*agent),
            _ => None,
        };
        let remotes: Vec<DeviceId> = room
            .members
            .iter()
            .copied()
            .filter(|member| {
                Some(*member) != subject
                    && !self.is_hosted(member)
                    && !self.directory.is_commsd(member)
                    && choose(member)
                    && self.route(&local, member).is_some()
            })
            .collect();
        if remotes.is_empty() || self.agent(&local).is_none_or(|a| !a.tokens.contains_key(path)) {
            return;
        }
        let Ok(event) = cbor::to_value(&event) else { return };
        let params = Value::map([("verb", Value::Text("room.notify".into())), ("event", event)]);
        for remote in remotes {
            let entry = self.entry(local, path.clone(), params.clone(), None, now);
            self.send_entry(local, remote, entry, None, now);
        }
    }

    fn room_members_event(&self, path: &RoomPath, now: Now) -> DeliveryEvent {
        let members = self
            .replica
            .room(path)
            .map(|room| {
                room.members
                    .iter()
                    .filter(|id| self.record(id).is_none_or(|r| r.visibility != Visibility::Ghost))
                    .map(|id| MemberInfo {
                        id: *id,
                        name: self.name_of(id),
                        status: self.effective_status(id, now),
                    })
                    .collect()
            })
            .unwrap_or_default();
        DeliveryEvent::RoomMembers { room: path.to_string(), members }
    }

    /// Shows an agent who is in the room it has just joined.
    fn show_members(&mut self, agent: DeviceId, path: &RoomPath, now: Now) {
        let event = self.room_members_event(path, now);
        if let DeliveryEvent::RoomMembers { members, .. } = &event {
            let shown: BTreeMap<DeviceId, AgentStatus> =
                members.iter().map(|member| (member.id, member.status)).collect();
            if let Some(held) = self.agent_mut(&agent) {
                held.shown.insert(path.clone(), shown);
            }
        }
        self.show(agent, event, now);
    }

    /// A name to show for a device: its own word, or nothing where that breaks the rule for names.
    pub(super) fn name_of(&self, device: &DeviceId) -> String {
        self.record(device)
            .map(|record| record.name.clone())
            .or_else(|| {
                let agent = self.directory.get(device)?.agent.as_ref()?;
                Some(agent.name.clone())
            })
            .filter(|name| names::is_clean(name))
            .unwrap_or_default()
    }

    // --- messages, receipts, notices in --------------------------------------------------------------------

    pub(super) fn message_arrived(
        &mut self,
        local: DeviceId,
        from: DeviceId,
        to: AnswerTo,
        path: RoomPath,
        params: &Value,
        now: Now,
    ) -> Answer {
        let Some(event) = message_event(from, local, &path, params) else {
            return Answer::Now(error("malformed_params"));
        };
        let Some(key) = event.message_key() else {
            return Answer::Now(error("malformed_params"));
        };
        if params.get("text").and_then(Value::as_text).is_some_and(|t| t.len() > MAX_TEXT_BYTES) {
            return Answer::Now(error("too_large"));
        }
        // A retry whose first attempt did arrive.
        if self.agent(&local).is_some_and(|held| held.mailbox.has_seen(&key)) {
            return self.repeated(local, &key, to);
        }
        self.remember(&event);
        match self.push_event(local, event, Some(to), now) {
            Ok(_) => Answer::Later,
            Err(_) => Answer::Now(error("mailbox_full")),
        }
    }

    pub(super) fn receipt_arrived(
        &mut self,
        local: DeviceId,
        from: DeviceId,
        path: &RoomPath,
        params: &Value,
        now: Now,
    ) -> Outcome {
        let Some(Value::Array(ids)) = params.get("messages") else {
            return error("malformed_params");
        };
        if ids.is_empty() || params.get("at").and_then(Value::as_u64).is_none() {
            return error("malformed_params");
        }
        let ids: Option<Vec<String>> = ids
            .iter()
            .take(MAX_RECEIPT_IDS)
            .map(|id| id.as_bytes().map(|id| data_encoding::HEXLOWER.encode(id)))
            .collect();
        let Some(ids) = ids else { return error("malformed_params") };
        // Only messages of ours, and each reader once.
        let mut read = self.replica.mark_read(path, ids, Some(local), from);
        let room = path.owner().map(|_| path.to_string());
        let event = match read.len() {
            0 => return ok(),
            1 => DeliveryEvent::DeliveryStatus {
                message_id: read.remove(0),
                agent: from,
                delivery: DeliveryState::Read,
                room,
            },
            _ => DeliveryEvent::MessagesRead { message_ids: read, agent: from, room },
        };
        self.show(local, event, now);
        ok()
    }

    /// News from a member. Only what the sender can speak of is taken (`rooms.md` 10, item 25b).
    pub(super) fn notice_arrived(
        &mut self,
        local: DeviceId,
        from: DeviceId,
        path: &RoomPath,
        params: &Value,
        now: Now,
    ) -> Outcome {
        let Some(event) =
            params.get("event").and_then(|event| cbor::from_value::<DeliveryEvent>(event).ok())
        else {
            return error("malformed_params");
        };
        if event.room().is_some_and(|room| room != path.to_string()) {
            return error("malformed_params");
        }
        let owner = path.owner() == Some(from);
        match event {
            DeliveryEvent::MemberJoined { agent, .. } if owner || agent == from => {
                self.show_joined(local, path, agent, now);
            }
            DeliveryEvent::MemberLeft { agent, .. } if owner || agent == from => {
                self.show_left(local, path, agent, now);
            }
            DeliveryEvent::MemberStatus { agent, status, .. } if owner || agent == from => {
                self.show_member_status(local, path, agent, status, now);
            }
            DeliveryEvent::NameChanged { agent, .. } if agent == from => {
                // The record of the agent says so too; the event is shown from there.
            }
            DeliveryEvent::RoomMembers { .. } if owner => {
                // Shown when we joined, from the answer.
            }
            DeliveryEvent::RoomMessage { .. } | DeliveryEvent::Dm { .. } => {
                return error("malformed_params");
            }
            _ => {}
        }
        ok()
    }

    /// An invitation for one of our agents: the embedded token is what counts.
    pub(super) fn invited(
        &mut self,
        local: DeviceId,
        path: RoomPath,
        params: &Value,
        now: Now,
    ) -> Outcome {
        let Some(owner) = path.owner() else { return error("malformed_params") };
        let Some(token) =
            params.get("token").and_then(|token| CoseSign1::from_value(token.clone()).ok())
        else {
            return error("malformed_params");
        };
        if params.get("invitee").and_then(Value::as_bytes) != Some(&local.0[..]) {
            return error("malformed_params");
        }
        let parsed = self.tokens.get_or_parse(&token);
        if !self.is_good_room_token(local, local, &path, &parsed, now) {
            return error("unauthorized");
        }
        if let Some(held) = self.agent(&local)
            && !held.tokens.contains_key(&path)
        {
            let of_owner = held.invitations.iter().filter(|p| p.owner() == Some(owner)).count();
            if of_owner >= MAX_INVITATIONS_OF_OWNER || held.invitations.len() >= MAX_INVITATIONS {
                return too_many();
            }
        }
        let text = |map: Option<&Value>, key: &str| {
            let text =
                map.and_then(|map| map.get(key)).and_then(Value::as_text).unwrap_or_default();
            truncate_chars(text, MAX_REASON_CHARS).to_owned()
        };
        let state = params.get("room-state");
        let inviter = params.get("inviter-agent");
        let description = text(state, "description");
        let name = text(inviter, "name");
        let event = DeliveryEvent::RoomInvite {
            room: path.to_string(),
            room_description: description,
            from: owner,
            from_name: if name.is_empty() { owner.hex() } else { name },
            from_cwd: text(inviter, "cwd"),
        };
        if let Some(held) = self.agent_mut(&local)
            && !held.tokens.contains_key(&path)
            && held.invitations.insert(path.clone())
        {
            self.keep(Record::Invited { agent: local, path: path.to_string() });
        }
        self.keep_token(local, &path, token);
        self.show(local, event, now);
        ok()
    }

    // --- our agents' own doing -----------------------------------------------------------------------------

    pub(super) fn create_room(
        &mut self,
        agent: DeviceId,
        name: &str,
        kind: RoomType,
        description: String,
        now: Now,
    ) -> Result<CommandResult, CommandError> {
        let slug = room_path::slug(name).ok_or_else(|| {
            CommandError::new("invalid_name", "a room name needs a letter or digit")
        })?;
        if slug.len() > MAX_ROOM_NAME_BYTES || description.len() > MAX_DESCRIPTION_BYTES {
            return Err(CommandError::new(
                "too_large",
                format!(
                    "a room name has at most {MAX_ROOM_NAME_BYTES} bytes, a description {MAX_DESCRIPTION_BYTES}"
                ),
            ));
        }
        let local_part = if kind == RoomType::Secret { format!("_{slug}") } else { slug.clone() };
        let path = RoomPath::named(agent, &local_part)
            .ok_or_else(|| CommandError::new("invalid_name", "the room name cannot be used"))?;
        if self.replica.room(&path).is_some() {
            return Err(CommandError::new("room_exists", format!("room {path} exists already")));
        }
        let (token, _) = self.issue_room_token(agent, agent, &path, now).ok_or_else(|| {
            CommandError::new("mint_failed", "the room's token could not be made")
        })?;
        let mut room = RoomRecord {
            id: path.to_string(),
            version: 1,
            name: slug,
            kind,
            owner: agent,
            created_at: now.unix.iso(),
            description,
            members: Vec::new(),
            invited: Vec::new(),
            member_joins: BTreeMap::from([(agent, 1)]),
            member_leaves: BTreeMap::new(),
            invited_joins: BTreeMap::new(),
            invited_leaves: BTreeMap::new(),
        };
        // The creator joins it, as the tool does.
        room.record_join(agent);
        if !self.replica.put_room(path.clone(), room) {
            return Err(CommandError::new("too_many_rooms", "no more rooms can be held here"));
        }
        self.keep_token(agent, &path, token);
        self.subscribe(agent, &path, now);
        self.broadcast_room(agent, &path, now);
        self.show_members(agent, &path, now);
        self.advert_changed(&agent, now);
        Ok(CommandResult::Room(path))
    }

    fn subscribe(&mut self, agent: DeviceId, path: &RoomPath, now: Now) {
        let id = path.to_string();
        let missing =
            self.record(&agent).is_some_and(|record| !record.subscribed_rooms.contains(&id));
        if missing {
            if let Some(record) = self.touch_own_record(&agent) {
                record.subscribed_rooms.push(id);
            }
            self.broadcast_own_record(agent, now);
        }
    }

    /// Our agents that are in a room by its record, and hold its token, say so in their own.
    pub(super) fn subscribe_members(&mut self, path: &RoomPath, now: Now) {
        let members: Vec<DeviceId> = match self.replica.room(path) {
            Some(room) => room.members.clone(),
            None => return,
        };
        for member in members {
            let holds = self.agent(&member).is_some_and(|held| held.tokens.contains_key(path));
            if holds && self.takes_part(member, path) {
                self.subscribe(member, path, now);
            }
        }
    }

    fn unsubscribe(&mut self, agent: DeviceId, path: &RoomPath, now: Now) {
        let id = path.to_string();
        if let Some(held) = self.agent_mut(&agent) {
            held.shown.remove(path);
        }
        let present =
            self.record(&agent).is_some_and(|record| record.subscribed_rooms.contains(&id));
        if present {
            if let Some(record) = self.touch_own_record(&agent) {
                record.subscribed_rooms.retain(|room| *room != id);
            }
            self.broadcast_own_record(agent, now);
        }
    }

    pub(super) fn join_room(&mut self, agent: DeviceId, path: RoomPath, op: OpId, now: Now) {
        let Some(owner) = path.owner() else {
            self.fail(op, CommandError::new("room_not_found", "a conversation cannot be joined"));
            return;
        };
        if owner == agent {
            let known = self.replica.room(&path).is_some();
            let result = if known {
                if let Some(room) = self.replica.room_mut(&path) {
                    room.record_join(agent);
                }
                self.subscribe(agent, &path, now);
                self.broadcast_room(agent, &path, now);
                Ok(CommandResult::Room(path))
            } else {
                Err(CommandError::new("room_not_found", "you own no room of that name"))
            };
            self.outputs.push_back(Output::Reply { op, result });
            return;
        }
        let member = self.replica.room(&path).is_some_and(|room| room.is_member(&agent));
        let token = self.has_good_token(agent, &path, now);
        if member && token {
            self.outputs.push_back(Output::Reply { op, result: Ok(CommandResult::Room(path)) });
            return;
        }
        self.ops.insert(op, Op::Join { path: path.clone(), reply_by: now.mono + JOIN_PATIENCE_MS });
        if let Some(held) = self.agent_mut(&agent) {
            held.joining.insert(path.clone());
        }
        let scope = Scope { kind: "room".into(), path: Some(path.to_string()) };
        // Invited by a reference owner: its join would ask a human who has already decided. Its
        // token is enough to learn the members and to say that we are in (decision 7).
        if token && !self.is_hosted(&owner) && !self.directory.is_commsd(&owner) {
            let token = self.agent(&agent).and_then(|held| held.tokens.get(&path)).cloned();
            let request = OutRequest {
                verb: capability::ROOM_MEMBER.into(),
                params: Value::map([("verb", Value::Text("room.members".into()))]),
                scope,
                token,
            };
            let purpose = Purpose::Members { agent, path, op: Some(op) };
            let deadline = Some(now.mono + REQUEST_TIMEOUT_MS);
            self.request(agent, owner, request, purpose, deadline);
            return;
        }
        let request = OutRequest {
            verb: capability::ROOM_MEMBER.into(),
            params: Value::map([("verb", Value::Text("room.join".into()))]),
            scope,
            token: None,
        };
        let purpose = Purpose::Join { agent, path, op: Some(op) };
        let deadline = Some(now.mono + APPROVAL_WINDOW_MS + APPROVAL_GRACE_MS);
        self.request(agent, owner, request, purpose, deadline);
    }

    /// The owner answered our join of a named room.
    pub(super) fn room_join_ended(
        &mut self,
        agent: DeviceId,
        path: RoomPath,
        op: Option<OpId>,
        outcome: Outcome,
        now: Now,
    ) {
        if let Some(held) = self.agent_mut(&agent) {
            held.joining.remove(&path);
        }
        let members = match outcome {
            Outcome::Ok(answer) => answer,
            refused => {
                let (code, message) = refusal(&refused);
                let mut text = format!("the owner did not let you in ({code})");
                if let Some(message) = message {
                    text = format!("{text}: {}", escape_untrusted(&message));
                }
                self.join_failed(
                    agent,
                    &path,
                    op,
                    CommandError::new(code_of_join(&code), text),
                    now,
                );
                return;
            }
        };
        let token = members
            .get("granted-token")
            .and_then(|token| CoseSign1::from_value(token.clone()).ok())
            .filter(|token| {
                let parsed = self.tokens.get_or_parse(token);
                self.is_good_room_token(agent, agent, &path, &parsed, now)
            });
        let Some(token) = token else {
            let what =
                CommandError::new("malformed_response", "the owner's answer holds no good token");
            self.join_failed(agent, &path, op, what, now);
            return;
        };
        self.keep_token(agent, &path, token);
        self.joined(agent, &path, &members, op, now);
    }

    fn join_failed(
        &mut self,
        agent: DeviceId,
        path: &RoomPath,
        op: Option<OpId>,
        error: CommandError,
        now: Now,
    ) {
        let open = op.is_some_and(|op| self.ops.remove(&op).is_some());
        if let (true, Some(op)) = (open, op) {
            self.outputs.push_back(Output::Reply { op, result: Err(error) });
        } else {
            let event = DeliveryEvent::JoinOutcome {
                room: path.to_string(),
                accepted: false,
                code: error.code.to_owned(),
                reason: error.message,
            };
            self.show(agent, event, now);
        }
    }

    pub(super) fn members_ended(
        &mut self,
        agent: DeviceId,
        path: RoomPath,
        op: Option<OpId>,
        outcome: Outcome,
        now: Now,
    ) {
        if let Some(held) = self.agent_mut(&agent) {
            held.joining.remove(&path);
        }
        match outcome {
            Outcome::Ok(answer) => {
                // The owner only knows that it invited us: it hears of it like everybody else.
                self.joined(agent, &path, &answer, op, now);
            }
            refused => {
                let (code, _) = refusal(&refused);
                if code == "unauthorized" {
                    self.give_up_token(agent, &path);
                }
                let text = format!("the owner did not tell the members ({code})");
                self.join_failed(
                    agent,
                    &path,
                    op,
                    CommandError::new(code_of_join(&code), text),
                    now,
                );
            }
        }
    }

    /// We are in: the record, what we show, what others hear.
    fn joined(
        &mut self,
        agent: DeviceId,
        path: &RoomPath,
        answer: &Value,
        op: Option<OpId>,
        now: Now,
    ) {
        let Some(owner) = path.owner() else { return };
        self.forget_invitation(agent, path);
        let before = self.replica.room(path).map(|room| room.members.clone()).unwrap_or_default();
        if !self.is_hosted(&owner) {
            match answer.get(ROOM_RECORD).and_then(|record| cbor::from_value(record).ok()) {
                Some(record) => self.take_joined_record(owner, path, record),
                None => self.make_joined_record(agent, owner, path, answer, now),
            }
        }
        let failed = match self.replica.room(path) {
            None => Some(CommandError::new("too_many_rooms", "no more rooms can be held here")),
            // An answer that was long on its way: we have been put out again since.
            Some(room) if !room.is_member(&agent) => {
                Some(CommandError::new("join_refused", "the owner has put you out meanwhile"))
            }
            Some(_) => None,
        };
        if let Some(error) = failed {
            self.give_up_token(agent, path);
            self.join_failed(agent, path, op, error, now);
            return;
        }
        self.replica.note_owner_join(path, &agent);
        self.subscribe(agent, path, now);
        self.show_members(agent, path, now);
        self.members_changed(path, before, agent, now);
        // A reference owner tells nobody: the members hear it from us.
        if !self.is_hosted(&owner) && !self.directory.is_commsd(&owner) {
            self.broadcast_room(agent, path, now);
        }
        let open = op.is_some_and(|op| self.ops.remove(&op).is_some());
        if let (true, Some(op)) = (open, op) {
            let result = Ok(CommandResult::Room(path.clone()));
            self.outputs.push_back(Output::Reply { op, result });
        } else {
            self.tell_of_room(agent, path, "", String::new(), now);
        }
    }

    /// The record that a commsd owner sent with its answer, as if it had told us itself.
    fn take_joined_record(&mut self, owner: DeviceId, path: &RoomPath, record: RoomRecord) {
        if record.id == path.to_string() {
            let speaker = Speaker { device: owner, same_user: false, commsd: true };
            let _what_it_changed_shows_in_the_record =
                self.replica.merge_room(record, speaker, Owner::Here);
        }
    }

    /// A record from what a reference owner answers: who is in it, and what it is called.
    fn make_joined_record(
        &mut self,
        agent: DeviceId,
        owner: DeviceId,
        path: &RoomPath,
        answer: &Value,
        now: Now,
    ) {
        let mut members: Vec<DeviceId> = match answer.get("members") {
            Some(Value::Array(items)) => items
                .iter()
                .take(super::super::replica::MAX_ROOM_STAMPS)
                .filter_map(|item| item.get("device"))
                .filter_map(|device| device.as_bytes().and_then(DeviceId::from_slice))
                .collect(),
            _ => Vec::new(),
        };
        if !members.contains(&agent) {
            members.push(agent);
        }
        let state = answer.get("room-state");
        let text = |key: &str| {
            state
                .and_then(|state| state.get(key))
                .and_then(Value::as_text)
                .map(|text| truncate_chars(text, MAX_REASON_CHARS).to_owned())
        };
        if self.replica.room(path).is_none() {
            let kind = match text("type").as_deref() {
                Some("private") => RoomType::Private,
                Some("secret") => RoomType::Secret,
                _ => RoomType::Public,
            };
            let record = RoomRecord {
                id: path.to_string(),
                version: 1,
                name: text("name").unwrap_or_else(|| path.local_name().to_owned()),
                kind,
                owner,
                created_at: now.unix.iso(),
                description: text("description").unwrap_or_default(),
                members: Vec::new(),
                invited: Vec::new(),
                member_joins: BTreeMap::new(),
                member_leaves: BTreeMap::new(),
                invited_joins: BTreeMap::new(),
                invited_leaves: BTreeMap::new(),
            };
            if !self.replica.put_room(path.clone(), record) {
                return;
            }
        }
        if let Some(room) = self.replica.room_mut(path) {
            for member in members {
                if !room.is_member(&member) {
                    room.record_join(member);
                }
            }
        }
    }

    pub(super) fn leave_room(
        &mut self,
        agent: DeviceId,
        path: RoomPath,
        reason: Option<String>,
        moved: Option<RoomPath>,
        op: OpId,
        now: Now,
    ) {
        let Some(owner) = path.owner() else {
            self.fail(op, CommandError::new("room_not_found", "a conversation cannot be left"));
            return;
        };
        if owner == agent {
            let Some(room) = self.replica.room(&path) else {
                self.fail(op, CommandError::new("room_not_found", format!("no room {path}")));
                return;
            };
            if room.members.iter().all(|member| *member == agent) {
                let result = self.destroy_room(agent, &path, now);
                self.tell_moved(agent, &path, moved.filter(|_| result.is_ok()), now);
                self.outputs.push_back(Output::Reply { op, result });
                return;
            }
            let before = room.members.clone();
            if let Some(room) = self.replica.room_mut(&path) {
                room.record_leave(agent);
            }
            self.unsubscribe(agent, &path, now);
            self.broadcast_room(agent, &path, now);
            self.members_changed(&path, before, agent, now);
            let left = DeliveryEvent::MemberLeft { room: path.to_string(), agent };
            self.notify(agent, &path, left, |_| true, now);
            self.tell_moved(agent, &path, moved, now);
            self.outputs.push_back(Output::Reply { op, result: Ok(CommandResult::Done) });
            return;
        }
        let Some(token) = self.agent(&agent).and_then(|held| held.tokens.get(&path)).cloned()
        else {
            self.fail(op, CommandError::new("not_member", format!("you are not in room {path}")));
            return;
        };
        let request = OutRequest {
            verb: capability::ROOM_MEMBER.into(),
            params: Value::record([
                ("verb", Some(Value::from("room.leave"))),
                ("reason", reason.map(Value::Text)),
            ]),
            scope: Scope { kind: "room".into(), path: Some(path.to_string()) },
            token: Some(token),
        };
        if let Some(held) = self.agent_mut(&agent) {
            held.leaving.insert(path.clone());
        }
        self.ops.insert(op, Op::Plain { reply_by: now.mono + REQUEST_TIMEOUT_MS + 1_000 });
        let deadline = Some(now.mono + REQUEST_TIMEOUT_MS);
        let purpose = Purpose::Leave { agent, path, moved, op };
        self.request(agent, owner, request, purpose, deadline);
    }

    pub(super) fn leave_ended(
        &mut self,
        agent: DeviceId,
        path: &RoomPath,
        moved: Option<RoomPath>,
        op: OpId,
        outcome: Outcome,
        now: Now,
    ) {
        if let Some(held) = self.agent_mut(&agent) {
            held.leaving.remove(path);
        }
        let result = match outcome {
            Outcome::Ok(_) => {
                self.give_up_token(agent, path);
                self.unsubscribe(agent, path, now);
                let owned = path.owner().is_some_and(|owner| self.is_ours(&owner));
                if let Some(room) = self.replica.room_mut(path).filter(|r| r.is_member(&agent))
                    && !owned
                {
                    room.record_leave(agent);
                }
                self.forget_if_outside(path);
                self.tell_moved(agent, path, moved, now);
                Ok(CommandResult::Done)
            }
            refused => {
                let (code, _) = refusal(&refused);
                Err(CommandError::new("leave_failed", format!("the owner answered {code}")))
            }
        };
        self.reply_if_open(op, result);
    }

    fn tell_moved(&mut self, agent: DeviceId, from: &RoomPath, to: Option<RoomPath>, now: Now) {
        if let Some(to) = to {
            let reason = format!("those who were in {from} meet here now; you have left that room");
            self.tell_of_room(agent, &to, MOVED, reason, now);
        }
    }

    /// The owner calls a room otherwise than before: our agents in it are told.
    pub(super) fn show_room_name(&mut self, path: &RoomPath, before: &str, now: Now) {
        let Some(room) = self.replica.room(path).filter(|room| room.name != before) else { return };
        let quoted = |name: &str| escape_untrusted(truncate_chars(name, MAX_REASON_CHARS));
        let reason = format!(
            "its owner calls it \"{}\" now; it was called \"{}\"",
            quoted(&room.name),
            quoted(before)
        );
        for agent in room.members.clone() {
            if self.agent(&agent).is_some() && self.takes_part(agent, path) {
                self.tell_of_room(agent, path, RENAMED, reason.clone(), now);
            }
        }
    }

    /// An agent is in a room, and something about that is not of its doing.
    fn tell_of_room(
        &mut self,
        agent: DeviceId,
        path: &RoomPath,
        code: &str,
        reason: String,
        now: Now,
    ) {
        let (room, code) = (path.to_string(), code.to_owned());
        self.show(agent, DeliveryEvent::JoinOutcome { room, accepted: true, code, reason }, now);
    }

    /// Answers a command unless its time has run out.
    pub(super) fn reply_if_open(&mut self, op: OpId, result: Result<CommandResult, CommandError>) {
        if self.ops.remove(&op).is_some() {
            self.outputs.push_back(Output::Reply { op, result });
        }
    }

    pub(super) fn invite(
        &mut self,
        agent: DeviceId,
        path: RoomPath,
        invitee: DeviceId,
        op: OpId,
        now: Now,
    ) {
        if let Err(error) = self.own_room(agent, &path) {
            self.fail(op, error);
            return;
        }
        if self.replica.room(&path).is_some_and(|room| room.is_member(&invitee)) {
            self.fail(op, CommandError::new("already_member", "that agent is in the room already"));
            return;
        }
        if self.replica.room(&path).is_some_and(|room| room.is_full(&invitee)) {
            self.fail(op, CommandError::new("room_full", "the room can have no more members"));
            return;
        }
        let Some((token, _)) = self.issue_room_token(agent, invitee, &path, now) else {
            self.fail(op, CommandError::new("mint_failed", "the invitation could not be made"));
            return;
        };
        if let Some(room) = self.replica.room_mut(&path)
            && !room.is_invited(&invitee)
        {
            room.record_invite(invitee);
        }
        self.broadcast_room(agent, &path, now);
        let mut params = vec![
            ("verb", Value::Text("room.invite".into())),
            ("invitee", Value::Bytes(invitee.0.to_vec())),
            ("token", token.to_value()),
        ];
        if let Some(room) = self.replica.room(&path) {
            params.push(("room-state", room_state(room)));
        }
        if let Some(record) = self.record(&agent) {
            // As in records: where our agents work is for our own user's to know.
            let cwd =
                if self.is_of_our_user(&invitee) { record.cwd.clone() } else { String::new() };
            params.push((
                "inviter-agent",
                Value::map([("name", Value::Text(record.name.clone())), ("cwd", Value::Text(cwd))]),
            ));
        }
        let request = OutRequest {
            verb: capability::ROOM_MEMBER.into(),
            params: Value::map(params),
            scope: Scope { kind: "room".into(), path: Some(path.to_string()) },
            token: None,
        };
        self.ops.insert(op, Op::Plain { reply_by: now.mono + REQUEST_TIMEOUT_MS + 1_000 });
        let purpose = Purpose::Invite { agent, path, invitee, op };
        self.request(agent, invitee, request, purpose, Some(now.mono + REQUEST_TIMEOUT_MS));
    }

    pub(super) fn invite_ended(
        &mut self,
        _agent: DeviceId,
        path: &RoomPath,
        _invitee: DeviceId,
        op: OpId,
        outcome: Outcome,
    ) {
        let result = match outcome {
            Outcome::Ok(_) => Ok(CommandResult::Room(path.clone())),
            failed => {
                let (code, _) = refusal(&failed);
                Err(CommandError::new(
                    "invite_failed",
                    format!("the invitation is noted but was not received ({code})"),
                ))
            }
        };
        self.reply_if_open(op, result);
    }

    pub(super) fn kick(
        &mut self,
        agent: DeviceId,
        path: &RoomPath,
        member: DeviceId,
        now: Now,
    ) -> Result<CommandResult, CommandError> {
        self.own_room(agent, path)?;
        if member == agent {
            return Err(CommandError::new("own_room", "leave or destroy your own room instead"));
        }
        let known = self
            .replica
            .room(path)
            .is_some_and(|room| room.is_member(&member) || room.is_invited(&member));
        // Whoever is not in it as we know may be as another member knows, or come by itself.
        self.replica.note_owner_leave(path, member);
        self.put_out(agent, member, path, now);
        if !known {
            return Err(CommandError::new(
                "nobody_to_remove",
                "that agent is not in the room, nor invited to it; should it come, you will be asked",
            ));
        }
        Ok(CommandResult::Room(path.clone()))
    }

    pub(super) fn destroy_room(
        &mut self,
        agent: DeviceId,
        path: &RoomPath,
        now: Now,
    ) -> Result<CommandResult, CommandError> {
        self.own_room(agent, path)?;
        let Some(room) = self.replica.room(path).cloned() else {
            return Err(CommandError::new("room_not_found", format!("no room {path}")));
        };
        for member in room.members.iter().chain(&room.invited).filter(|m| **m != agent) {
            self.revoke_grant(agent, *member, path, now);
        }
        let message =
            MeshMessage::StateUpdate(Box::new(Patch::RoomDelete { room_id: path.to_string() }));
        let public = room.kind == RoomType::Public;
        let told: Vec<DeviceId> = room.members.iter().chain(&room.invited).copied().collect();
        self.broadcast_to(agent, &message, now, |_, remote| public || told.contains(remote));
        self.replica.remove_room(path);
        self.room_gone(path, &room.members, now);
        self.drop_questions_about(agent, path, now);
        self.give_up_token(agent, path);
        self.advert_changed(&agent, now);
        Ok(CommandResult::Done)
    }

    /// A room is no more: our agents lose token, history and subscription, and those who were in it
    /// are told (as the reference does not).
    pub(super) fn room_gone(&mut self, path: &RoomPath, members: &[DeviceId], now: Now) {
        self.replica.remove_room_history(path);
        for agent in self.agent_ids() {
            self.unsubscribe(agent, path, now);
            if path.owner() == Some(agent) {
                continue;
            }
            self.give_up_token(agent, path);
            // One that is just leaving hears what became of that.
            let leaving = self.agent(&agent).is_some_and(|held| held.leaving.contains(path));
            if members.contains(&agent) && !leaving {
                let event = DeliveryEvent::JoinOutcome {
                    room: path.to_string(),
                    accepted: false,
                    code: DESTROYED.to_owned(),
                    reason: "its owner has ended the room".to_owned(),
                };
                self.show(agent, event, now);
            }
        }
    }

    fn own_room(&self, agent: DeviceId, path: &RoomPath) -> Result<(), CommandError> {
        if self.replica.room(path).is_none() {
            return Err(CommandError::new("room_not_found", format!("no room {path}")));
        }
        if path.owner() != Some(agent) {
            return Err(CommandError::new("not_owner", format!("room {path} is not yours")));
        }
        Ok(())
    }

    pub(super) fn send_to_room(
        &mut self,
        agent: DeviceId,
        path: RoomPath,
        draft: Draft,
        op: OpId,
        now: Now,
    ) {
        let members = match self.replica.room(&path) {
            None => {
                self.fail(op, CommandError::new("room_not_found", format!("no room {path}")));
                return;
            }
            Some(room) if !room.is_member(&agent) => {
                self.fail(
                    op,
                    CommandError::new("not_member", format!("you are not in room {path}")),
                );
                return;
            }
            Some(room) => room.members.clone(),
        };
        if path.owner() == Some(agent)
            && !self.has_good_token(agent, &path, now)
            && let Some((token, _)) = self.issue_room_token(agent, agent, &path, now)
        {
            self.keep_token(agent, &path, token);
        }
        if self.agent(&agent).is_none_or(|held| !held.tokens.contains_key(&path)) {
            self.fail(
                op,
                CommandError::new("not_member", "your token for the room is gone; join again"),
            );
            return;
        }
        let Some((params, id)) = self.message_params(draft, now) else {
            self.fail(op, CommandError::new("invalid_reply", "reply-to is no message id"));
            return;
        };
        if let Some(event) = message_event(agent, agent, &path, &params) {
            self.remember(&event);
        }
        let recipients: Vec<DeviceId> =
            members.into_iter().filter(|member| *member != agent).collect();
        self.open_send(agent, op, &id, &recipients, now);
        for recipient in recipients {
            let entry = self.entry(agent, path.clone(), params.clone(), Some(id.clone()), now);
            self.send_entry(agent, recipient, entry, Some(op), now);
        }
    }

    pub(super) fn open_send(
        &mut self,
        agent: DeviceId,
        op: OpId,
        message_id: &str,
        recipients: &[DeviceId],
        now: Now,
    ) {
        self.log_traffic(|| {
            super::LogEvent::new("message_accepted")
                .with("agent", agent)
                .with("message", message_id)
                .with("recipients", recipients.len())
        });
        let deliveries = recipients
            .iter()
            .map(|recipient| super::Delivery { agent: *recipient, state: None })
            .collect();
        let reply_by = now.mono + SEND_PATIENCE_MS;
        self.ops.insert(op, Op::Send { message_id: message_id.to_owned(), deliveries, reply_by });
        if recipients.is_empty() {
            self.reply_send(op);
        }
    }

    /// Params of a new message, and its hex id.
    pub(super) fn message_params(&mut self, draft: Draft, now: Now) -> Option<(Value, String)> {
        let Draft { text, reply_to, behavior } = draft;
        let id = self.random::<16>();
        let mut params = vec![
            ("verb", Value::Text("room.send".into())),
            ("message-id", Value::Bytes(id.to_vec())),
            ("sent-at", Value::Uint(now.unix.0)),
            ("text", Value::Text(text)),
        ];
        if let Some(reply_to) = reply_to {
            let raw = data_encoding::HEXLOWER.decode(reply_to.as_bytes()).ok()?;
            if raw.is_empty() || raw.len() > MAX_MESSAGE_ID_BYTES {
                return None;
            }
            params.push((
                "refs",
                Value::Array(vec![Value::map([
                    ("id", Value::Bytes(raw)),
                    ("relation", Value::Text("reply".into())),
                ])]),
            ));
        }
        if let Some(behavior) = behavior {
            params.push(("streaming-behavior", Value::Text(behavior.as_str().into())));
        }
        Some((Value::map(params), data_encoding::HEXLOWER.encode(&id)))
    }
}

/// A message before it has an id.
pub(super) struct Draft {
    pub text: String,
    /// Hex id of the message answered.
    pub reply_to: Option<String>,
    pub behavior: Option<StreamingBehavior>,
}

/// Invitations of one owner that an agent can leave open, and of all owners together: anybody can
/// send any number, and each is a token in the slot file.
pub const MAX_INVITATIONS_OF_OWNER: usize = 32;
/// See [`MAX_INVITATIONS_OF_OWNER`].
const MAX_INVITATIONS: usize = 1024;
/// Characters of a peer's error code; real ones have about 20.
const MAX_CODE_CHARS: usize = 64;
/// Characters of a reason or description shown in an event.
const MAX_REASON_CHARS: usize = 2_000;
/// Bytes of a room name.
pub const MAX_ROOM_NAME_BYTES: usize = 64;
/// Bytes of a room description.
const MAX_DESCRIPTION_BYTES: usize = 4096;

/// The event that a room.send makes at its recipient; `None` for params of the wrong shape.
pub(super) fn message_event(
    from: DeviceId,
    to: DeviceId,
    path: &RoomPath,
    params: &Value,
) -> Option<DeliveryEvent> {
    if params.get("verb").and_then(Value::as_text) != Some("room.send") {
        return None;
    }
    let id = params.get("message-id")?.as_bytes()?;
    if id.is_empty() || id.len() > MAX_MESSAGE_ID_BYTES {
        return None;
    }
    let id = data_encoding::HEXLOWER.encode(id);
    let timestamp = UnixMillis(params.get("sent-at")?.as_u64()?).iso();
    let content = params.get("text")?.as_text()?.to_owned();
    let streaming_behavior = params
        .get("streaming-behavior")
        .and_then(Value::as_text)
        .and_then(StreamingBehavior::parse);
    let reply_to = match params.get("refs") {
        Some(Value::Array(refs)) => refs
            .iter()
            .find(|r| r.get("relation").and_then(Value::as_text) == Some("reply"))
            .and_then(|r| r.get("id")?.as_bytes())
            .filter(|id| id.len() <= MAX_MESSAGE_ID_BYTES)
            .map(|id| data_encoding::HEXLOWER.encode(id)),
        _ => None,
    };
    Some(match path.owner() {
        None => DeliveryEvent::Dm {
            message: DmMessage {
                id,
                from,
                to,
                content,
                timestamp,
                reply_to,
                read_by: vec![from],
                streaming_behavior,
            },
        },
        Some(_) => DeliveryEvent::RoomMessage {
            message: RoomMessage {
                id,
                from,
                room: path.to_string(),
                content,
                timestamp,
                reply_to,
                read_by: vec![from],
                streaming_behavior,
            },
        },
    })
}

fn members_value(members: &[DeviceId]) -> Value {
    Value::Array(
        members.iter().map(|id| Value::map([("device", Value::Bytes(id.0.to_vec()))])).collect(),
    )
}

fn room_state(room: &RoomRecord) -> Value {
    Value::map([
        ("name", Value::Text(room.name.clone())),
        ("description", Value::Text(room.description.clone())),
        ("type", Value::Text(room.kind.as_str().into())),
    ])
}

/// The code and message of a request that did not succeed.
pub(super) fn refusal(outcome: &Outcome) -> (String, Option<String>) {
    match outcome {
        // Text of a peer, which ends in an event or an answer that has to fit a line.
        Outcome::Error { code, message } => (
            truncate_chars(code, MAX_CODE_CHARS).to_owned(),
            message.as_deref().map(|text| truncate_chars(text, MAX_REASON_CHARS).to_owned()),
        ),
        Outcome::Timeout => ("timeout".into(), None),
        Outcome::NotConnected => ("not_connected".into(), None),
        Outcome::ConnectionLost => ("connection_lost".into(), None),
        Outcome::Ok(_) => ("ok".into(), None),
    }
}

/// Our stable code for a join that failed with a wire code.
fn code_of_join(code: &str) -> &'static str {
    match code {
        "not_connected" | "no_route" | "connection_lost" => "not_connected",
        "timeout" => "timeout",
        "not_owner" | "room_not_found" => "room_not_found",
        _ => "join_refused",
    }
}
