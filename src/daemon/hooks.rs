//! What the hooks of a harness bring its model (`commsd hook`, decisions 23 and 141): finds the agent
//! of the session that a hook runs in and hands out its waiting events, each once, whether hooks or
//! the answers of tools bring them. Knows nothing of any harness's formats.

use std::collections::VecDeque;

use super::logging::{emit, event};
use super::owner::{Owner, Waiting};
use crate::api::tool::feed::{self, Urgency};
use crate::api::types::{Given, HookMoment, HookTakeParams, HookTaken, Label, RequestId};
use crate::identity::device::DeviceId;
use crate::mesh::node::{Command, Input, OpId};
use crate::runtime::local_socket::ConnId;

/// Bytes of events that one hook brings, as JSON: like a batch that goes with a tool's answer.
const MAX_HOOK_BYTES: usize = feed::MAX_BATCH;
/// Events that one hook brings.
const MAX_HOOK_EVENTS: usize = 50;
/// Events that are looked at for something urgent; reading them takes milliseconds.
const MAX_LOOK: usize = 1_000;
/// How long what a hook took waits for its word that it was printed. Its connection tells of one that
/// died; one that was stopped would hold it for good. Printing takes milliseconds.
const HELD_MS: u64 = 30_000;
/// Sessions whose agent is remembered; a machine has some tens.
const MAX_SESSIONS: usize = 256;

/// How far a model has been given its mailbox.
#[derive(Debug, Default)]
pub(super) struct Handed {
    /// Hooks have asked for it.
    hooked: bool,
    /// By whatever way.
    through: u64,
    /// By hooks: the next one acknowledges it.
    printed: u64,
    /// By a hook that has not said yet that it printed it.
    taken: Option<Taken>,
    /// Behind this an answer was cancelled; its client has not acknowledged more since.
    lost: Option<u64>,
    /// Behind an event that is too large for a hook: the newest that one has said to wait.
    hinted: u64,
}

/// What the hook of a connection took. When the connection ends it was not printed.
#[derive(Debug)]
struct Taken {
    through: u64,
    by: ConnId,
    /// From then on (monotonic ms) another one may have it.
    until: u64,
}

/// Which agent the hooks of a session were for, the newest last.
#[derive(Debug, Default)]
pub(super) struct Sessions(VecDeque<(Label, DeviceId)>);

impl Sessions {
    fn get(&self, session: &Label) -> Option<DeviceId> {
        self.0.iter().find(|(known, _)| known == session).map(|(_, agent)| *agent)
    }

    fn note(&mut self, session: &Label, agent: DeviceId) {
        self.0.retain(|(known, _)| known != session);
        if self.0.len() >= MAX_SESSIONS {
            self.0.pop_front();
        }
        self.0.push_back((session.clone(), agent));
    }
}

impl Owner {
    pub(super) fn hook_take(&mut self, conn: ConnId, id: RequestId, params: HookTakeParams) {
        let agent = match self.agent_of_session(&params) {
            Ok(agent) => agent,
            Err(reason) => {
                emit(
                    &event("hook_unmatched")
                        .with("harness", params.harness.as_str())
                        .with("reason", reason),
                );
                self.answer(conn, &id, Ok(none(None)));
                return;
            }
        };
        if let Some(session) = &params.session {
            self.sessions.note(session, agent);
        }
        if let Some(hosted) = self.hosted.get_mut(&agent) {
            hosted.handed.hooked = true;
        }
        // One in the background runs beside another, which has not been heard to arrive.
        if params.wait.is_none() {
            self.acknowledge_printed(agent);
        }
        let taken = self.take_for_hook(conn, &agent, params.moment);
        let wait = super::requests::wait_ms(params.wait);
        if wait == 0 || taken.more || !taken.events.is_empty() {
            self.answer(conn, &id, Ok(taken));
            return;
        }
        // One waits for an agent; the newest is that of the living session.
        self.no_hook_waits(&agent);
        let until = self.now().mono + wait;
        self.waiting.push(Waiting::Hook { conn, id, agent, moment: params.moment, until });
    }

    /// The one agent whose harness process is the hook's; where no process tells, that of earlier
    /// hooks of the session. (A harness within a harness is nobody's but its own.)
    fn agent_of_session(&self, params: &HookTakeParams) -> Result<DeviceId, &'static str> {
        let of_harness = |hosted: &super::owner::Hosted| {
            hosted.harness == params.harness.as_str() && !hosted.clients.is_empty()
        };
        for process in &params.processes {
            let mut found = self
                .hosted
                .iter()
                .filter(|(_, hosted)| of_harness(hosted) && hosted.harness_pid == Some(*process));
            match (found.next(), found.next()) {
                (Some((agent, _)), None) => return Ok(*agent),
                (Some(_), Some(_)) => return Err("ambiguous"),
                (None, _) => {}
            }
        }
        let session = params.session.as_ref().filter(|_| params.processes.is_empty());
        let agent = session.and_then(|session| self.sessions.get(session));
        agent.filter(|agent| self.hosted.get(agent).is_some_and(of_harness)).ok_or("no_agent")
    }

    /// A later hook of the session shows that what the last one printed has arrived.
    fn acknowledge_printed(&mut self, agent: DeviceId) {
        let (_, acknowledged) = self.node.mailbox_position(&agent).unwrap_or_default();
        let Some(handed) = self.hosted.get(&agent).map(|hosted| &hosted.handed) else { return };
        let through = handed.lost.map_or(handed.printed, |lost| lost.min(handed.printed));
        if through > acknowledged {
            let command = Command::Acknowledge(through);
            self.next_op += 1;
            self.inputs.push_back(Input::Command { op: OpId(self.next_op), agent, command });
            self.turn();
        }
    }

    /// What a hook may bring now; nothing while another one has not ended.
    pub(super) fn take_for_hook(
        &mut self,
        conn: ConnId,
        agent: &DeviceId,
        moment: HookMoment,
    ) -> HookTaken {
        let now = self.now();
        let (_, acknowledged) = self.node.mailbox_position(agent).unwrap_or_default();
        let after = match self.hosted.get(agent).map(|hosted| &hosted.handed) {
            Some(Handed { taken: Some(taken), .. }) if now.mono < taken.until => {
                return none(Some(agent));
            }
            Some(handed) => handed.through.max(acknowledged),
            None => return none(None),
        };
        let mut events = Vec::new();
        let (mut bytes, mut more, mut wanted, mut newest) = (0, false, false, 0);
        for numbered in self.node.inbox(agent, after).take(MAX_LOOK) {
            let event =
                super::owner::api_event(&self.node, agent, numbered.seq, &numbered.event, now);
            let urgent = match (moment, feed::urgency(&event)) {
                (HookMoment::Start, _) | (_, Urgency::Steer) => true,
                (HookMoment::End, urgency) => urgency == Urgency::FollowUp,
                (HookMoment::Step, _) => false,
            };
            newest = if urgent { numbered.seq } else { newest };
            bytes += super::requests::weight(&event);
            more |= bytes > MAX_HOOK_BYTES || events.len() >= MAX_HOOK_EVENTS;
            // What is urgent is not held up by what stands before it: that goes first.
            wanted |= urgent;
            if !more {
                events.push(event);
            }
        }
        let Some(hosted) = self.hosted.get_mut(agent) else { return none(None) };
        // What is too large for a hook, and all behind it, waits for the tool; the model is told of
        // each that it should know of.
        if events.is_empty() && more {
            let told = hosted.handed.hinted >= newest;
            hosted.handed.hinted = hosted.handed.hinted.max(newest);
            return HookTaken { more: !told, ..none(Some(agent)) };
        }
        let Some(last) = events.last().filter(|_| wanted) else { return none(Some(agent)) };
        let through = last.seq;
        hosted.handed.taken = Some(Taken { through, by: conn, until: now.mono + HELD_MS });
        HookTaken { agent: Some(agent.hex()), events, more }
    }

    /// The hook of this connection has printed what it took.
    pub(super) fn hook_shown(&mut self, conn: ConnId) {
        for hosted in self.hosted.values_mut() {
            let handed = &mut hosted.handed;
            if let Some(Taken { through, .. }) = handed.taken.take_if(|taken| taken.by == conn) {
                handed.printed = through;
                handed.through = handed.through.max(through);
            }
        }
    }

    /// The connection has ended: what its hook did not print, another one may.
    pub(super) fn hook_gone(&mut self, conn: ConnId) {
        for hosted in self.hosted.values_mut() {
            hosted.handed.taken.take_if(|taken| taken.by == conn);
        }
    }

    /// An answer brings the model everything up to `seq`. Returns how far it has been given. (What a
    /// hook is printing just now may come twice; it may also never be printed.)
    pub(super) fn given(&mut self, agent: &DeviceId, seq: u64) -> Given {
        let head = self.node.mailbox_position(agent).map_or(0, |(head, _)| head);
        let Some(hosted) = self.hosted.get_mut(agent) else {
            return Given { through: 0, hooks: None };
        };
        hosted.handed.through = hosted.handed.through.max(seq.min(head));
        Given { through: hosted.handed.through, hooks: Some(hosted.handed.hooked) }
    }

    /// An answer that was to bring what stands behind `seq` was cancelled.
    pub(super) fn lost(&mut self, agent: &DeviceId, seq: u64) {
        if let Some(hosted) = self.hosted.get_mut(agent) {
            hosted.handed.lost = Some(hosted.handed.lost.map_or(seq, |lost| lost.min(seq)));
        }
    }

    /// The client knows that everything up to `seq` has arrived, what was lost before included.
    pub(super) fn arrived(&mut self, agent: &DeviceId, seq: u64) {
        if let Some(hosted) = self.hosted.get_mut(agent) {
            hosted.handed.lost.take_if(|lost| *lost < seq);
        }
    }

    /// Whoever waits with a hook for this agent has waited in vain.
    pub(super) fn no_hook_waits(&mut self, agent: &DeviceId) {
        let waiting = std::mem::take(&mut self.waiting);
        for wait in waiting {
            match wait {
                Waiting::Hook { conn, id, agent: of, .. } if of == *agent => {
                    self.answer(conn, &id, Ok(none(Some(agent))));
                }
                wait => self.waiting.push(wait),
            }
        }
    }
}

fn none(agent: Option<&DeviceId>) -> HookTaken {
    HookTaken { agent: agent.map(DeviceId::hex), events: Vec::new(), more: false }
}
