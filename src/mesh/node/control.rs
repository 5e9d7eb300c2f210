//! Devices into and out of service, and decisions that agents and operators take: who may join,
//! who may write, which machines are let in (`transport.md` 2.6, `rooms.md` 3.3).

use std::collections::BTreeSet;

use super::super::events::DeliveryEvent;
use super::super::journal::Record;
use super::super::log::LogEvent;
use super::super::message::MeshMessage;
use super::super::records::{AgentRecord, AgentStatus, Now, PeerInfo, Visibility};
use super::super::session::{
    APPROVAL_WINDOW_MS, Admission, MAX_WAITING_FOR_DECISION, Policy, Session, SessionId,
    SessionKind,
};
use super::super::wire::room_path::RoomPath;
use super::requests::{error, ok};
use super::{
    AddDevice, Agent, Answer, AnswerTo, CommandError, CommandResult, Decision, Device, MAX_PARKED,
    MAX_PENDING_DECISIONS, Node, Op, OpId, Outcome, Output, Purpose, durable,
};
use crate::codec::text::truncate_chars;
use crate::identity::device::DeviceId;

/// Pause before another machine that did not let us in is asked again.
pub(super) const APPROVAL_RETRY_MS: u64 = 60_000;
/// Other machines that wait to be let in.
const MAX_MESH_DECISIONS: usize = 64;
/// Requests of one pair that are answered by the same decision.
const MAX_WAITERS: usize = 4;
/// Other machines let in by this run of the daemon.
const MAX_APPROVED: usize = 1024;
/// Characters of a name that a stranger gives itself.
const MAX_NAME_CHARS: usize = 64;
/// Characters of a fingerprint: SHA-256 as hex pairs with colons has 95.
const MAX_FINGERPRINT_CHARS: usize = 128;

/// Bytes of a request's id, which people type.
pub(super) const DECISION_ID_BYTES: usize = 4;

/// What a device says of itself when it asks to be let in.
#[derive(Default)]
pub(super) struct ConnectionCard {
    pub data_port: u16,
    pub name: String,
    pub fingerprint: String,
}

/// The answer to a decision on nothing.
pub(super) fn not_pending() -> CommandError {
    CommandError::new("not_pending", "nothing like that is waiting; see what is pending")
}

impl Node {
    // --- devices ------------------------------------------------------------------------------------

    pub(super) fn add_device(&mut self, add: AddDevice, now: Now) {
        let id = add.key.id();
        if self.is_hosted(&id) {
            return;
        }
        let mut presence = AgentStatus::Active;
        let agent = add.agent.map(|spec| {
            let parked = self.parked.remove(&id);
            // Whoever was hidden stays so, whatever ended its service.
            let before = self.record(&id).filter(|_| parked.is_some());
            let visibility = before.map_or(Visibility::Visible, |record| record.visibility);
            let tags = before.map(|record| record.tags.clone()).unwrap_or_default();
            let mut agent = parked.unwrap_or_else(|| Agent::new(self.seq_floor()));
            agent.ephemeral = spec.ephemeral;
            agent.key = spec.key;
            if !spec.resumed {
                agent.presence = AgentStatus::Active;
            }
            presence = agent.presence;
            // The slot file is the truth about tokens: a Node bridge may have served the slot.
            agent.tokens = spec.tokens.into_iter().collect();
            agent.services = spec.services.into_iter().collect();
            agent.grants =
                spec.grants.into_iter().map(|(path, member, id)| ((path, member), id)).collect();
            let seen = self.record(&id).map_or(0, |record| record.version);
            let seen = seen.max(agent.version).max(self.version_floor());
            let subscribed = agent
                .tokens
                .keys()
                .filter(|path| self.replica.room(path).is_some_and(|room| room.is_member(&id)))
                .map(ToString::to_string)
                .collect();
            self.replica.put_own_agent(AgentRecord {
                id,
                version: seen + 1,
                name: spec.name,
                harness: spec.harness,
                cwd: spec.cwd,
                pid: i64::from(self.config.pid),
                started_at: now.unix.iso(),
                visibility,
                status: presence,
                tags,
                subscribed_rooms: subscribed,
            });
            agent
        });
        self.keep_agent(id);
        self.log(LogEvent::new("agent_added").with("agent", id).with("data_port", add.data_port));
        self.formation.forget(&id);
        self.directory.remove(&id);
        let held: BTreeSet<&RoomPath> =
            agent.as_ref().map(|agent| agent.tokens.keys().collect()).unwrap_or_default();
        let own: BTreeSet<&RoomPath> =
            held.into_iter().filter(|path| path.owner() == Some(id)).collect();
        let restored = self.replica.restore_rooms(&own);
        self.devices.insert(id, Device::new(add.key, add.data_port, agent, now));
        for path in restored {
            self.broadcast_room(id, &path, now);
        }
        self.announce_device(id, now);
        self.device_returned_to_role(&id, now);
        self.agent_returned(id, now);
        self.show_status(id, presence, now);
        // Machines that already wait are any agent's to decide on, also one that comes later.
        let waiting: Vec<DeliveryEvent> =
            self.mesh_decisions.values().filter_map(|decision| decision.event.clone()).collect();
        for event in waiting {
            self.show(id, event, now);
        }
    }

    pub(super) fn remove_device(&mut self, id: DeviceId, now: Now) {
        if id == self.daemon || !self.is_hosted(&id) {
            return;
        }
        self.say_offline(id, now);
        let sessions: Vec<SessionId> =
            self.sessions.values().filter(|s| s.local == id).map(|s| s.id).collect();
        for session in sessions {
            self.close(session, "agent_detached", now);
        }
        // Its own requests end while it is still here, so that its messages queue.
        let internal: Vec<u64> = self
            .internal_open
            .iter()
            .filter(|(_, (from, ..))| *from == id)
            .map(|(request, _)| *request)
            .collect();
        for request in internal {
            self.answer(AnswerTo::Internal(request), Outcome::NotConnected, now);
        }
        self.end_ways_of(id);
        self.settle(now);
        self.formation.forget_local(&id);
        let dials: Vec<_> = self
            .dials
            .iter()
            .filter(|(_, dial)| match dial {
                super::DialFor::Peer(plan) => plan.local == id,
                super::DialFor::Port(local) => *local == id,
                super::DialFor::Hub | super::DialFor::Wish(_) => false,
            })
            .map(|(dial, _)| *dial)
            .collect();
        for dial in dials {
            self.dials.remove(&dial);
        }
        let Some(device) = self.devices.remove(&id) else { return };
        if let Some(mut agent) = device.agent {
            for (decision_id, decision) in std::mem::take(&mut agent.decisions) {
                // A daemon that stops takes up again what its agents have been asked.
                if !agent.ephemeral && self.shutting_down.is_none() {
                    self.keep(Record::AskedDone { agent: id, id: decision_id });
                }
                for to in decision.waiters {
                    self.answer(to, error("not_connected"), now);
                }
            }
            let queued: Vec<_> =
                agent.outgoing.iter().map(|(to, entry)| (*to, entry.clone())).collect();
            self.leave_copies(id, queued, now);
            agent.outgoing.clear();
            agent.leaving.clear();
            agent.joining.clear();
            if !agent.ephemeral && self.parked.len() < MAX_PARKED {
                self.parked.insert(id, agent);
            } else if !agent.ephemeral {
                self.keep(Record::AgentGone { agent: id });
            }
        }
        self.log(LogEvent::new("agent_removed").with("agent", id));
        self.departed_from_role(id, now);
    }

    // --- decisions of agents ----------------------------------------------------------------------------

    /// Puts a request before the agent. A repeated request waits for the same decision, and is not
    /// shown anew: the first one is in the mailbox, or has been acknowledged.
    pub(super) fn ask_agent(
        &mut self,
        local: DeviceId,
        from: DeviceId,
        session: Option<SessionId>,
        to: AnswerTo,
        path: RoomPath,
        now: Now,
    ) -> Answer {
        let waiting = session
            .and_then(|session| self.sessions.get(&session))
            .map_or(0, |held| held.waiting_for_decision);
        if waiting >= MAX_WAITING_FOR_DECISION {
            return Answer::Now(too_many());
        }
        let fresh = self.decision_id();
        let Some(agent) = self.agent_mut(&local) else { return Answer::Now(error("denied")) };
        let known = agent
            .decisions
            .values()
            .find(|d| d.requester == from && d.path.as_ref() == Some(&path))
            .map(|d| d.id.clone());
        if known.is_none() && agent.decisions.len() >= MAX_PENDING_DECISIONS {
            return Answer::Now(too_many());
        }
        let id = known.unwrap_or(fresh);
        if let Some(held) = session.and_then(|session| self.sessions.get_mut(&session)) {
            held.waiting_for_decision += 1;
        }
        let event = DeliveryEvent::RoomJoinRequest { room: path.to_string(), requester_id: from };
        let Some(agent) = self.agent_mut(&local) else { return Answer::Now(error("denied")) };
        let new = !agent.decisions.contains_key(&id);
        let decision = agent.decisions.entry(id.clone()).or_insert_with(|| Decision {
            id,
            event: Some(event.clone()),
            path: Some(path.clone()),
            requester: from,
            at: now.unix,
            deadline: 0,
            waiters: Vec::new(),
            session,
        });
        decision.deadline = now.mono + APPROVAL_WINDOW_MS;
        decision.waiters.push(to);
        let over = (decision.waiters.len() > MAX_WAITERS).then(|| decision.waiters.remove(0));
        let stored = if new { durable::asked(local, decision) } else { None };
        if let Some(stored) = stored {
            self.keep(stored);
        }
        if let Some(over) = over {
            self.release_waiter(over);
            self.answer(over, too_many(), now);
        }
        if new {
            self.show(local, event, now);
        }
        Answer::Later
    }

    pub(super) fn decision_id(&mut self) -> String {
        data_encoding::HEXLOWER.encode(&self.random::<DECISION_ID_BYTES>())
    }

    pub(super) fn release_waiter(&mut self, to: AnswerTo) {
        if let AnswerTo::Session { session, .. } = to
            && let Some(held) = self.sessions.get_mut(&session)
        {
            held.waiting_for_decision = held.waiting_for_decision.saturating_sub(1);
        }
    }

    /// Answers a waiting request, named by its id or by room and requester. `None`: the command is
    /// answered once the grant is on disk.
    pub(super) fn decide(
        &mut self,
        agent: DeviceId,
        target: &super::commands::DecisionTarget,
        accept: bool,
        reason: Option<String>,
        op: OpId,
        now: Now,
    ) -> Option<Result<CommandResult, CommandError>> {
        let not_pending = Err(not_pending());
        if let Some(id) = target.mesh_id(&self.mesh_decisions) {
            return Some(self.decide_mesh(&id, accept, reason, now).map_or(not_pending, Ok));
        }
        let id = self.agent(&agent).and_then(|held| target.agent_id(&held.decisions));
        let decision = id.and_then(|id| self.end_question(agent, &id));
        let Some((decision, path)) = decision.and_then(|d| d.path.clone().map(|path| (d, path)))
        else {
            return Some(not_pending);
        };
        if !accept {
            let outcome = Outcome::Error { code: "denied".into(), message: reason };
            for to in decision.waiters {
                self.release_waiter(to);
                self.answer(to, outcome.clone(), now);
            }
        } else if decision.waiters.is_empty() {
            // Nobody waits any more: the consent stands, and the next request finds it.
            self.note_consent(agent, decision.requester, &path, now);
        } else {
            self.admit(agent, decision.requester, &path, decision.waiters, Some(op), now);
            return None;
        }
        Some(Ok(CommandResult::Done))
    }

    /// Takes back a question to an agent that has answered itself; who waits for it is to be
    /// answered.
    pub(super) fn take_question(
        &mut self,
        agent: DeviceId,
        path: &RoomPath,
        requester: &DeviceId,
    ) -> Vec<AnswerTo> {
        let asked = self.agent(&agent).and_then(|held| {
            let mut decisions = held.decisions.values();
            decisions.find(|d| d.requester == *requester && d.path.as_ref() == Some(path))
        });
        let Some(id) = asked.map(|decision| decision.id.clone()) else { return Vec::new() };
        self.end_question(agent, &id).map(|decision| decision.waiters).unwrap_or_default()
    }

    /// Nobody waits for answers about this room any more, because there is no such room.
    pub(super) fn drop_questions_about(&mut self, agent: DeviceId, path: &RoomPath, now: Now) {
        let decisions = self.agent(&agent).into_iter().flat_map(|held| held.decisions.values());
        let about: Vec<String> = decisions
            .filter(|decision| decision.path.as_ref() == Some(path))
            .map(|decision| decision.id.clone())
            .collect();
        for id in about {
            let Some(decision) = self.end_question(agent, &id) else { continue };
            for to in decision.waiters {
                self.release_waiter(to);
                self.answer(to, error("room_not_found"), now);
            }
        }
    }

    /// A question is over: it is neither pending nor in the mailbox any more.
    pub(super) fn end_question(&mut self, agent: DeviceId, id: &str) -> Option<Decision> {
        let held = self.agent_mut(&agent)?;
        let decision = held.decisions.remove(id)?;
        // Asked again, it is another question, whether or not this one is acknowledged.
        if let Some(event) = &decision.event {
            held.mailbox.withdraw(event);
        }
        self.keep(Record::AskedDone { agent, id: decision.id.clone() });
        self.keep_losses(agent);
        Some(decision)
    }

    pub(super) fn note_consent(
        &mut self,
        agent: DeviceId,
        requester: DeviceId,
        path: &RoomPath,
        now: Now,
    ) {
        if path.owner().is_some() {
            if let Some(room) = self.replica.room_mut(path) {
                room.record_invite(requester);
            }
            self.broadcast_room(agent, path, now);
        } else {
            self.open(agent, path, now);
        }
    }

    pub(super) fn decisions_upkeep(&mut self, now: Now) {
        let (mut late, mut over) = (Vec::new(), Vec::new());
        for (id, device) in &mut self.devices {
            let Some(agent) = device.agent.as_mut() else { continue };
            agent.decisions.retain(|_, decision| {
                let live = decision.deadline > now.mono;
                if !live {
                    late.append(&mut decision.waiters);
                    over.push((*id, decision.id.clone()));
                }
                live
            });
        }
        for (agent, id) in over {
            self.keep(Record::AskedDone { agent, id });
        }
        for to in late {
            self.release_waiter(to);
            self.answer(to, error("timeout"), now);
        }
        let late: Vec<String> = self
            .mesh_decisions
            .values()
            .filter(|decision| decision.deadline <= now.mono)
            .map(|decision| decision.id.clone())
            .collect();
        for id in late {
            if let Some(decision) = self.mesh_decisions.remove(&id) {
                for to in decision.waiters {
                    self.answer(to, error("timeout"), now);
                }
                if let Some(session) = decision.session {
                    self.close(session, "approval_timeout", now);
                }
            }
        }
    }

    /// The requests of a closed session cannot be answered any more; the questions stay.
    pub(super) fn drop_decisions_of_session(&mut self, session: SessionId) {
        let of_session =
            |to: &AnswerTo| matches!(to, AnswerTo::Session { session: s, .. } if *s == session);
        for device in self.devices.values_mut() {
            if let Some(agent) = device.agent.as_mut() {
                for decision in agent.decisions.values_mut() {
                    decision.waiters.retain(|to| !of_session(to));
                }
            }
        }
        self.mesh_decisions.retain(|_, decision| decision.session != Some(session));
        for stored in self.stored.values_mut() {
            stored.answers.retain(|to| !of_session(to));
        }
        self.drop_asks_of_session(of_session);
    }

    // --- other machines -----------------------------------------------------------------------------------

    pub(super) fn connection_requested(
        &mut self,
        session: SessionId,
        to: AnswerTo,
        card: ConnectionCard,
        now: Now,
    ) -> Answer {
        let Some(held) = self.sessions.get_mut(&session) else { return Answer::Later };
        held.admission = Admission::AwaitingApproval;
        let (remote, policy) = (held.remote, held.policy());
        if self.is_approved(remote, policy) {
            self.answer(to, ok(), now);
            self.admitted(session, now);
            return Answer::Later;
        }
        if !self.ask_about_machine(session, remote, Some(to), card, now) {
            return Answer::Now(too_many());
        }
        Answer::Later
    }

    /// Puts another machine before our agents: it asks to be let in, or has let us in. One question
    /// per device; a later one takes the place of an earlier. False when too many wait.
    fn ask_about_machine(
        &mut self,
        session: SessionId,
        remote: DeviceId,
        to: Option<AnswerTo>,
        card: ConnectionCard,
        now: Now,
    ) -> bool {
        self.mesh_decisions.retain(|_, decision| decision.requester != remote);
        if self.mesh_decisions.len() >= MAX_MESH_DECISIONS {
            return false;
        }
        let id = self.decision_id();
        let event = DeliveryEvent::ConnectionRequest {
            connection_id: remote.hex(),
            peer_id: remote,
            data_port: card.data_port,
            name: truncate_chars(&card.name, MAX_NAME_CHARS).to_owned(),
            fingerprint: truncate_chars(&card.fingerprint, MAX_FINGERPRINT_CHARS).to_owned(),
        };
        let decision = Decision {
            id: id.clone(),
            event: Some(event.clone()),
            path: None,
            requester: remote,
            at: now.unix,
            deadline: now.mono + APPROVAL_WINDOW_MS,
            waiters: to.into_iter().collect(),
            session: Some(session),
        };
        self.mesh_decisions.insert(id, decision);
        self.log(LogEvent::new("connection_requested").with("device", remote));
        for agent in self.agent_ids() {
            self.show(agent, event.clone(), now);
        }
        true
    }

    pub(super) fn decide_mesh(
        &mut self,
        id: &str,
        accept: bool,
        reason: Option<String>,
        now: Now,
    ) -> Option<CommandResult> {
        let decision = self.mesh_decisions.remove(id)?;
        let remote = decision.requester;
        self.forget_question(&DeliveryEvent::connection_key(remote));
        for to in decision.waiters {
            let outcome = if accept {
                ok()
            } else {
                Outcome::Error { code: "rejected".into(), message: reason.clone() }
            };
            self.answer(to, outcome, now);
        }
        if accept {
            let asked = decision.session.and_then(|session| self.sessions.get(&session));
            let policy = asked.map(Session::policy).unwrap_or_default();
            self.approve(remote, policy);
            // Those it opened, and those of ours that it has answered already.
            let waiting: Vec<SessionId> = self
                .sessions
                .values()
                .filter(|s| s.remote == remote && s.admission == Admission::AwaitingApproval)
                .filter(|s| s.kind != SessionKind::NetworkDialled || s.let_in)
                .filter(|s| policy.covers(s.policy()))
                .map(|s| s.id)
                .collect();
            for session in waiting {
                self.admitted(session, now);
                // One of this machine that came by the port is introduced like any other.
                self.send_peer_list(session, now);
            }
        } else {
            self.leave_alone(remote, now);
            let refused: Vec<SessionId> = self
                .sessions
                .values()
                .filter(|s| s.remote == remote && !s.is_machine_local())
                .map(|s| s.id)
                .collect();
            for session in refused {
                self.close(session, "rejected", now);
            }
        }
        Some(CommandResult::Done)
    }

    /// Whether another machine was let in, under this policy or without limits.
    pub(super) fn is_approved(&self, remote: DeviceId, policy: Policy) -> bool {
        self.approved_remotes.iter().any(|(device, by)| *device == remote && by.covers(policy))
    }

    /// Lets another machine in for this run of the daemon: everywhere, or by listeners with this
    /// policy.
    pub(super) fn approve(&mut self, remote: DeviceId, policy: Policy) {
        if self.is_approved(remote, policy) {
            return;
        }
        self.approved_remotes
            .retain(|(device, before)| *device != remote || !policy.covers(*before));
        if self.approved_remotes.len() >= MAX_APPROVED {
            self.approved_remotes.pop_front();
        }
        self.approved_remotes.push_back((remote, policy));
    }

    /// Our first word to another machine.
    pub(super) fn ask_to_be_let_in(&mut self, session: SessionId, _now: Now) {
        let data_port = self.config.network_port.unwrap_or(0);
        let message = MeshMessage::ConnectRequest {
            data_port,
            name: format!("commsd-{}", self.daemon.short()),
            fingerprint: String::new(),
        };
        // No deadline here: the other side's window decides.
        let request = Self::frame_request(&message);
        self.request_on(session, request, Purpose::ConnectRequest, None);
    }

    /// Another machine has answered our request. Its yes lets us in there; whether it is let in here
    /// is for our own side to say.
    pub(super) fn let_in(
        &mut self,
        session: Option<SessionId>,
        remote: DeviceId,
        outcome: &Outcome,
        now: Now,
    ) {
        let Some(session) = session else { return };
        match outcome {
            Outcome::Ok(_) => {
                let Some(held) = self.sessions.get_mut(&session) else { return };
                held.let_in = true;
                if self.is_approved(remote, Policy::Full) {
                    self.admitted(session, now);
                } else if !self.mesh_decisions.values().any(|d| d.requester == remote)
                    && !self.ask_about_machine(
                        session,
                        remote,
                        None,
                        ConnectionCard::default(),
                        now,
                    )
                {
                    self.close(session, "too_many_requests", now);
                }
            }
            Outcome::ConnectionLost => {}
            _ => {
                self.leave_alone(remote, now);
                self.close(session, "not_let_in", now);
            }
        }
    }

    // --- open commands ------------------------------------------------------------------------------------

    pub(super) fn fail(&mut self, op: OpId, error: CommandError) {
        self.ops.remove(&op);
        self.outputs.push_back(Output::Reply { op, result: Err(error) });
    }

    pub(super) fn ops_upkeep(&mut self, now: Now) {
        let due: Vec<OpId> = self
            .ops
            .iter()
            .filter(|(_, op)| match op {
                Op::Send { reply_by, .. }
                | Op::Join { reply_by, .. }
                | Op::Ask { reply_by }
                | Op::HandOn { reply_by, .. }
                | Op::Plain { reply_by } => *reply_by <= now.mono,
            })
            .map(|(id, _)| *id)
            .collect();
        for op in due {
            match self.ops.remove(&op) {
                Some(Op::Send { message_id, deliveries, .. }) => {
                    self.keep_under_way(op);
                    self.outputs.push_back(Output::Reply {
                        op,
                        result: Ok(CommandResult::Sent { message_id, deliveries }),
                    });
                }
                Some(Op::Join { path, .. }) => {
                    self.outputs.push_back(Output::Reply {
                        op,
                        result: Ok(CommandResult::JoinPending(path)),
                    });
                }
                Some(Op::Ask { .. }) => {
                    let result = Ok(CommandResult::AskPending);
                    self.outputs.push_back(Output::Reply { op, result });
                }
                Some(Op::Plain { .. } | Op::HandOn { .. }) => {
                    self.outputs.push_back(Output::Reply {
                        op,
                        result: Err(CommandError::new(
                            "timeout",
                            "the owner did not answer in time",
                        )),
                    })
                }
                None => {}
            }
        }
    }

    /// Where a peer is in the table, for status.
    pub(super) fn peer_address(&self, device: &DeviceId) -> Option<PeerInfo> {
        self.formation.peer(device).map(|peer| peer.info.clone())
    }
}

pub(super) fn too_many() -> Outcome {
    Outcome::Error { code: "denied".into(), message: Some("too many requests are waiting".into()) }
}
