//! Requests that peers make of us, and the ends of requests we made: who is heard before it is
//! let in, and which verb goes to which room (`wire.md` "Manage requests", `rooms.md` 3).

use std::sync::Arc;

use super::super::message::{FRAME_VERB, MeshMessage};
use super::super::records::Now;
use super::super::session::{Admission, Policy, SessionId, SessionKind};
use super::super::wire::room_path::RoomPath;
use super::super::wire::token::ParsedToken;
use super::control::ConnectionCard;
use super::gossip::WIRE_MESH_VERSION;
use super::{Answer, AnswerTo, Node, OutRequest, Outcome, Purpose, acp, services};
use crate::codec::cbor::Value;
use crate::identity::device::DeviceId;

pub(super) fn ok() -> Outcome {
    ok_with([])
}

pub(super) fn ok_with<const N: usize>(members: [(&str, Value); N]) -> Outcome {
    let mut all = vec![("result".to_owned(), Value::Text("ok".into()))];
    all.extend(members.into_iter().map(|(key, value)| (key.to_owned(), value)));
    Outcome::Ok(Value::map(all))
}

pub(super) fn error(code: &str) -> Outcome {
    Outcome::Error { code: code.to_owned(), message: None }
}

impl Node {
    pub(super) fn inbound_request(
        &mut self,
        session: SessionId,
        local: DeviceId,
        remote: DeviceId,
        to: AnswerTo,
        request: &OutRequest,
        token: Option<Arc<ParsedToken>>,
        now: Now,
    ) -> Answer {
        let Some((admission, kind)) = self.sessions.get(&session).map(|s| (s.admission, s.kind))
        else {
            return Answer::Now(error("not_approved"));
        };
        let inner = request.params.get("verb").and_then(Value::as_text).unwrap_or_default();
        if request.verb != FRAME_VERB && inner == "version.get" {
            return Answer::Now(ok_with([("version", Value::Text(WIRE_MESH_VERSION.into()))]));
        }
        match admission {
            Admission::Admitted => {}
            Admission::Quarantined if request.verb == FRAME_VERB => {
                return self.quarantined_frame(session, kind, to, &request.params, now);
            }
            // As the reference: not refused, not heard.
            _ => return Answer::Now(ok()),
        }
        if !self.permits(session, request) {
            return Answer::Now(error("not_permitted"));
        }
        if request.verb == FRAME_VERB {
            return self.mesh_message(session, to, MeshMessage::parse(&request.params), now);
        }
        match inner {
            "path.trace" => Answer::Now(self.traced(session, kind)),
            "topology.get" => {
                let direct = self
                    .routes
                    .range((local, DeviceId([0; 32]))..=(local, DeviceId([255; 32])))
                    .map(|((_, remote), _)| Value::Bytes(remote.0.to_vec()))
                    .collect();
                let peers = Value::map([
                    ("direct", Value::Array(direct)),
                    ("relayed", Value::Array(Vec::new())),
                ]);
                Answer::Now(ok_with([("peers", peers)]))
            }
            _ => self.room_request(local, remote, Some(session), to, request, token, now),
        }
    }

    /// Whether the listener that a session came by allows this.
    fn permits(&self, session: SessionId, request: &OutRequest) -> bool {
        let inner = request.params.get("verb").and_then(Value::as_text).unwrap_or_default();
        match self.policy_of(session) {
            Policy::Full => true,
            // The sessions of daemons themselves are not told from those of whom they bring.
            Policy::Gateway => {
                let remote = self.sessions.get(&session).map(|session| session.remote);
                !acp::is_acp(request) || remote.is_some_and(|remote| self.is_trusted(&remote))
            }
            Policy::RoomsOnly => !services::is_service(request) && !acp::is_acp(request),
            Policy::Observe => {
                request.verb != FRAME_VERB && matches!(inner, "path.trace" | "topology.get")
            }
        }
    }

    /// Which way a request has come.
    fn traced(&self, session: SessionId, kind: SessionKind) -> Outcome {
        let relayed = ("relayed", Value::Bool(kind == SessionKind::Relayed));
        match self.config.hub.as_ref().filter(|_| self.is_through_hub(session)) {
            Some(hub) => ok_with([relayed, ("hub-address", Value::Text(hub.url.clone()))]),
            None => ok_with([relayed]),
        }
    }

    /// The first word of a session that has to be let in (`transport.md` 2.3).
    fn quarantined_frame(
        &mut self,
        session: SessionId,
        kind: SessionKind,
        to: AnswerTo,
        params: &Value,
        now: Now,
    ) -> Answer {
        match MeshMessage::parse(params) {
            MeshMessage::Introduce { data_port, .. } if kind == SessionKind::PortAccepted => {
                self.introduced(session, data_port, now);
                Answer::Now(ok())
            }
            MeshMessage::ConnectRequest { data_port, name, fingerprint } => {
                let card = ConnectionCard { data_port, name, fingerprint };
                self.connection_requested(session, to, card, now)
            }
            // No message at all is not heard; one with another method is a wrong first word.
            MeshMessage::Unknown
                if params
                    .get("message")
                    .and_then(|message| message.get("method"))
                    .and_then(Value::as_text)
                    .is_none() =>
            {
                Answer::Now(ok())
            }
            _ => {
                self.answer(to, error("not_approved"), now);
                self.close(session, "not_approved", now);
                Answer::Later
            }
        }
    }

    /// Answered at once, whatever it says; only a message for one of our agents that comes by a
    /// third party is answered when it is stored.
    fn mesh_message(
        &mut self,
        session: SessionId,
        to: AnswerTo,
        message: MeshMessage,
        now: Now,
    ) -> Answer {
        match message {
            MeshMessage::PeerList(peers) => self.peers_named(session, peers, now),
            MeshMessage::PeerJoined(peer) => self.peers_named(session, vec![peer], now),
            MeshMessage::BecomeCoordinator(peers) => self.named_successor(session, peers, now),
            MeshMessage::StateSync(snapshot) => self.snapshot(session, *snapshot, now),
            MeshMessage::StateUpdate(patch) => return self.patch(session, to, *patch, now),
            MeshMessage::Release { agent, messages } => {
                self.released(session, agent, messages, now);
            }
            MeshMessage::Introduce { .. }
            | MeshMessage::ConnectRequest { .. }
            | MeshMessage::Unknown => {}
        }
        Answer::Now(ok())
    }

    /// A room verb, a service's or one of the Agent Collaboration Protocol, from a session or from a device of ours.
    pub(super) fn room_request(
        &mut self,
        local: DeviceId,
        from: DeviceId,
        session: Option<SessionId>,
        to: AnswerTo,
        request: &OutRequest,
        token: Option<Arc<ParsedToken>>,
        now: Now,
    ) -> Answer {
        if services::is_service(request) {
            return self.service_request(local, from, session, to, request, token, now);
        }
        if acp::is_acp(request) {
            return self.acp_requested(local, from, session, to, request, now);
        }
        let inner = request.params.get("verb").and_then(Value::as_text).unwrap_or_default();
        let known = matches!(
            inner,
            "room.join"
                | "room.send"
                | "room.read"
                | "room.members"
                | "room.leave"
                | "room.invite"
                | "room.notify"
        );
        if !known || self.agent(&local).is_none() {
            return Answer::Now(error("unsupported_verb"));
        }
        let Some(path) = request.scope.path.as_deref() else {
            return Answer::Now(error("missing_scope_path"));
        };
        // The reference dies of such a path; it gets an answer like any other mistake.
        let Ok(path) = RoomPath::parse(path) else {
            return Answer::Now(error("malformed_scope_path"));
        };
        match inner {
            "room.join" => return self.join_asked(local, from, session, to, path, token, now),
            "room.invite" => return Answer::Now(self.invited(local, path, &request.params, now)),
            _ => {}
        }
        if !self.is_authorised(local, from, &path, token.as_deref(), now) {
            return Answer::Now(error("unauthorized"));
        }
        // A token proves what its room's owner allows the sender, not that we are there: anybody
        // can own a room.
        if matches!(inner, "room.send" | "room.notify" | "room.read")
            && !self.takes_part(local, &path)
        {
            return Answer::Now(error("not_member"));
        }
        match inner {
            "room.send" => self.message_arrived(local, from, to, path, &request.params, now),
            "room.read" => {
                Answer::Now(self.receipt_arrived(local, from, &path, &request.params, now))
            }
            "room.members" => Answer::Now(self.members_asked(local, from, &path)),
            "room.leave" => Answer::Now(self.leave_heard(local, from, &path, &request.params, now)),
            _ => Answer::Now(self.notice_arrived(local, from, &path, &request.params, now)),
        }
    }

    /// What a request of ours has come to.
    pub(super) fn outcome(
        &mut self,
        purpose: Purpose,
        local: DeviceId,
        remote: DeviceId,
        session: Option<SessionId>,
        outcome: Outcome,
        now: Now,
    ) {
        match purpose {
            Purpose::Heard => {
                if !matches!(outcome, Outcome::Ok(_) | Outcome::Error { .. }) {
                    self.unheard.insert((local, remote));
                }
            }
            Purpose::Introduce => {
                // The holder does not answer: whatever has the port is no use as a holder.
                if !matches!(outcome, Outcome::Ok(_))
                    && let Some(session) = session
                {
                    self.close(session, "introduction_failed", now);
                }
            }
            Purpose::ConnectRequest => self.let_in(session, remote, &outcome, now),
            Purpose::Probe => {
                if matches!(outcome, Outcome::Timeout)
                    && let Some(session) = session
                {
                    self.close(session, "keepalive_timeout", now);
                }
            }
            Purpose::BecomeCoordinator => self.shutdown_ready(),
            Purpose::Message(message) => self.message_ended(*message, outcome, now),
            Purpose::Join { agent, path, op } => {
                self.join_ended(agent, remote, path, op, outcome, now);
            }
            Purpose::Members { agent, path, op } => {
                self.members_ended(agent, path, op, outcome, now);
            }
            Purpose::Invite { agent, path, invitee, op } => {
                self.invite_ended(agent, &path, invitee, op, outcome);
            }
            Purpose::Leave { agent, path, moved, op } => {
                self.leave_ended(agent, &path, moved, op, outcome, now);
            }
            Purpose::Ask { agent, key, op } => self.ask_ended(agent, key, op, outcome, now),
            Purpose::HandOn { op, write, expires } => {
                self.hand_on_ended(op, write, expires, outcome);
            }
            Purpose::Call { op } => self.call_ended(op, outcome),
            Purpose::Insight { question, op, begun } => {
                self.insight_ended(question, op, begun, &outcome, now);
            }
            Purpose::Given => {}
            Purpose::HandOver { recipient, key } => {
                self.hand_over_ended(recipient, &key, &outcome, now);
            }
        }
    }
}
