//! Sessions as the node sees them: opening, admission, requests out, frames in, closing, upkeep.

use super::super::checked::Checked;
use super::super::formation::MISBEHAVED_PAUSE_MS;
use super::super::log::LogEvent;
use super::super::message::{FRAME_SCOPE_KIND, FRAME_VERB, MeshMessage};
use super::super::records::Now;
use super::super::session::{
    Admission, Origin, REQUEST_TIMEOUT_MS, Session, SessionId, SessionKind,
};
use super::super::wire::frame::{self, Frame};
use super::super::wire::handshake::Handshake;
use super::super::wire::scope::Scope;
use super::{
    Answer, AnswerTo, DialFor, DialId, DialTarget, Internal, Node, OutRequest, Outcome, Output,
    Purpose, UPKEEP_INTERVAL_MS,
};
use crate::codec::cbor::Value;
use crate::identity::device::DeviceId;

/// Sessions this daemon keeps. Each agent has up to three per peer; at the bound new ones are
/// refused and existing ones go on.
pub const MAX_SESSIONS: usize = 16_384;
/// Sessions between one of our devices and one peer. The reference needs three.
pub const MAX_SESSIONS_PER_PAIR: usize = 6;

impl Node {
    pub(super) fn session_opened(
        &mut self,
        id: SessionId,
        local: DeviceId,
        remote: DeviceId,
        kind: SessionKind,
        origin: Origin,
        now: Now,
    ) {
        let pair =
            self.sessions.values().filter(|s| s.local == local && s.remote == remote).count();
        let refused = if !self.is_hosted(&local) || self.shutting_down.is_some() {
            Some("not_in_service")
        } else if self.is_hosted(&remote) {
            // A peer with one of our own keys is ourselves, or somebody who has copied one.
            Some("own_device")
        } else if self.sessions.len() >= MAX_SESSIONS {
            Some("too_many_sessions")
        } else if pair >= MAX_SESSIONS_PER_PAIR {
            Some("too_many_sessions_of_pair")
        } else {
            None
        };
        if let Some(reason) = refused {
            self.log(
                LogEvent::new("session_refused").with("device", remote).with("reason", reason),
            );
            self.outputs.push_back(Output::Close { session: id, reason });
            return;
        }
        let mut session = Session::new(id, local, remote, kind, origin, now);
        // From another machine only an approved device is a peer; quarantine says so already.
        if kind == SessionKind::DataAccepted && origin == Origin::Network {
            session.admission = Admission::Quarantined;
        }
        self.log(
            LogEvent::new("session_opened")
                .with("session", id.0)
                .with("device", remote)
                .with("local", local)
                .with("kind", kind.as_str())
                .with("origin", origin_word(origin)),
        );
        self.sessions.insert(id, session);
        self.outputs.push_back(Output::Send {
            session: id,
            frame: Frame::Handshake(Handshake::agent_comms()),
        });
        self.send_opening_advert(id, now);
        match kind {
            SessionKind::PortDialled => self.introduce(id, now),
            SessionKind::NetworkDialled => self.ask_to_be_let_in(id, now),
            SessionKind::DataAccepted | SessionKind::DataDialled
                if self.sessions.get(&id).is_some_and(Session::is_admitted) =>
            {
                self.admitted(id, now);
            }
            _ => {}
        }
    }

    /// A session becomes a peer's: routes, election, and what either end sends on a fresh one.
    pub(super) fn admitted(&mut self, id: SessionId, now: Now) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.admission = Admission::Admitted;
        session.heard(now.mono);
        let (local, remote, kind, origin) =
            (session.local, session.remote, session.kind, session.origin);
        // Claims are a matter of one machine, whoever runs the process.
        session.enrolled = session.is_machine_local()
            && !matches!(kind, SessionKind::NetworkAccepted(_) | SessionKind::NetworkDialled);
        let enrolled = session.enrolled;
        self.outputs.push_back(Output::Admitted { session: id });
        self.routes.entry((local, remote)).or_default().push(id);
        let count = self.remotes.entry(remote).or_insert(0);
        *count += 1;
        if *count == 1 {
            self.log(
                LogEvent::new("peer_up")
                    .with("device", remote)
                    .with("kind", kind.as_str())
                    .with("origin", origin_word(origin)),
            );
        }
        if enrolled {
            self.enrolled(id);
        }
        match kind {
            SessionKind::DataAccepted => {
                self.send_state_sync(id, now);
                self.send_peer_list(id, now);
            }
            SessionKind::DataDialled => {
                // So that the peer, which may have missed where we listen, dials back and, as the
                // side that accepts, gets our state.
                self.send_own_door(id, now);
                self.send_own_record(id, now);
            }
            SessionKind::NetworkAccepted(_) | SessionKind::NetworkDialled => {
                self.send_own_record(id, now);
                self.send_full_advert(id, now);
            }
            SessionKind::Relayed => {
                self.send_own_record(id, now);
                self.send_public_rooms(id, now);
            }
            SessionKind::PortAccepted | SessionKind::PortDialled | SessionKind::Hub => {}
        }
        self.peer_returned(local, remote, now);
    }

    pub(super) fn dialled(
        &mut self,
        dial: DialId,
        session: SessionId,
        remote: DeviceId,
        origin: Origin,
        now: Now,
    ) {
        match self.dials.remove(&dial) {
            Some(DialFor::Peer(plan)) => {
                if plan.peer != remote {
                    self.outputs.push_back(Output::Close { session, reason: "wrong_device" });
                    self.peer_dial_failed(plan.local, plan.peer, "wrong_device", now);
                    return;
                }
                self.formation.dialled(&plan.local, &plan.peer);
                let kind = if plan.host.is_some() {
                    SessionKind::NetworkDialled
                } else {
                    SessionKind::DataDialled
                };
                self.session_opened(session, plan.local, remote, kind, origin, now);
                if !self.sessions.contains_key(&session) {
                    self.formation.dial_ended(
                        &plan.local,
                        &plan.peer,
                        now.mono,
                        MISBEHAVED_PAUSE_MS,
                    );
                }
            }
            Some(DialFor::Port(local)) => {
                self.port_dialled(local, session, remote, origin, now);
            }
            Some(DialFor::Hub) => self.hub_dialled(session, now),
            Some(DialFor::Wish(wish)) => self.wish_dialled(wish, session, remote, origin, now),
            None => self.outputs.push_back(Output::Close { session, reason: "not_in_service" }),
        }
        self.pump_dials(now);
    }

    pub(super) fn dial_failed(&mut self, dial: DialId, reason: &'static str, now: Now) {
        match self.dials.remove(&dial) {
            Some(DialFor::Peer(plan)) => {
                self.peer_dial_failed(plan.local, plan.peer, reason, now);
            }
            Some(DialFor::Port(local)) => self.port_dial_failed(local, reason, now),
            Some(DialFor::Hub) => self.hub_dial_failed(reason, now),
            Some(DialFor::Wish(wish)) => self.wish_failed(&wish, reason, now),
            None => {}
        }
        self.pump_dials(now);
    }

    fn peer_dial_failed(
        &mut self,
        local: DeviceId,
        peer: DeviceId,
        reason: &'static str,
        now: Now,
    ) {
        self.log(
            LogEvent::new("dial_failed")
                .with("device", peer)
                .with("local", local)
                .with("reason", reason),
        );
        let hopeless = self.formation.dial_failed(&local, &peer, now.mono);
        if hopeless && !self.remotes.contains_key(&peer) {
            self.formation.forget(&peer);
        }
    }

    /// Starts every dial that is due.
    pub(super) fn pump_dials(&mut self, now: Now) {
        if self.shutting_down.is_some() {
            self.dial_at = None;
            return;
        }
        let locals = self.hosted_ids();
        for plan in self.formation.take_due_dials(&locals, now.mono) {
            // Beyond the machine only the daemon's own device speaks, and not to one that has
            // refused us.
            let refused_until = self.refused_remotes.get(&plan.peer).copied().unwrap_or(0);
            if plan.host.is_some() && (plan.local != self.daemon || refused_until > now.mono) {
                self.formation.dialled(&plan.local, &plan.peer);
                continue;
            }
            let dial = DialId(self.id());
            let target = match plan.host {
                Some(host) => DialTarget::Network(host, plan.port),
                None => DialTarget::Loopback(plan.port),
            };
            self.outputs.push_back(Output::Dial {
                dial,
                local: plan.local,
                target,
                expect: Some(plan.peer),
            });
            self.dials.insert(dial, DialFor::Peer(plan));
        }
        self.dial_at = self.formation.next_dial(&locals);
    }

    pub(super) fn port_dial(&mut self, local: DeviceId) {
        let dial = DialId(self.id());
        if let Some(device) = self.devices.get_mut(&local) {
            device.port_dial = Some(dial);
        }
        self.dials.insert(dial, DialFor::Port(local));
        let target = DialTarget::Loopback(self.config.port);
        self.outputs.push_back(Output::Dial { dial, local, target, expect: None });
    }

    // --- requests out -------------------------------------------------------------------------

    /// The session by which our device reaches a peer: data sessions first (a reference peer does
    /// not read revocations on others), then the oldest, so that order is kept while it lives.
    pub(super) fn route(&self, local: &DeviceId, remote: &DeviceId) -> Option<SessionId> {
        let ids = self.routes.get(&(*local, *remote))?;
        ids.iter()
            .filter_map(|id| self.sessions.get(id))
            .min_by_key(|s| {
                let port = matches!(s.kind, SessionKind::PortAccepted | SessionKind::PortDialled);
                (port, s.id)
            })
            .map(|s| s.id)
    }

    /// Sends a request to a device, wherever it is. Its end comes back as an outcome.
    pub(super) fn request(
        &mut self,
        local: DeviceId,
        remote: DeviceId,
        request: OutRequest,
        purpose: Purpose,
        deadline: Option<u64>,
    ) {
        if self.is_hosted(&remote) {
            let id = self.id();
            self.internal_open.insert(id, (local, remote, purpose, deadline));
            self.internal.push_back(Internal { from: local, to: remote, request, id });
            return;
        }
        let now = self.last_now.unwrap_or_default();
        let route = self.route(&local, &remote).or_else(|| self.open_channel(local, remote, now));
        match route {
            Some(session) => self.request_on(session, request, purpose, deadline),
            None => self.await_way(local, remote, request, purpose, deadline, now),
        }
    }

    /// Sends a request on a certain session.
    pub(super) fn request_on(
        &mut self,
        session: SessionId,
        request: OutRequest,
        purpose: Purpose,
        deadline: Option<u64>,
    ) {
        let Some(held) = self.sessions.get_mut(&session) else { return };
        let (local, remote) = (held.local, held.remote);
        match held.open_request(purpose, deadline) {
            Ok(request_id) => self.send(
                session,
                Frame::ManageRequest(frame::ManageRequest {
                    request_id,
                    command: frame::Command { verb: request.verb, params: request.params },
                    scope: request.scope,
                    token: request.token,
                }),
            ),
            Err(purpose) => {
                self.deferred.push_back((purpose, local, remote, Some(session), Outcome::Timeout));
            }
        }
    }

    /// An agent-comms message as a request.
    pub(super) fn frame_request(message: &MeshMessage) -> OutRequest {
        OutRequest {
            verb: FRAME_VERB.to_owned(),
            params: message.to_params(),
            scope: Scope { kind: FRAME_SCOPE_KIND.to_owned(), path: None },
            token: None,
        }
    }

    /// Sends an agent-comms message on a session. What is not answered is told again
    /// ([`Node::tell_unheard`]).
    pub(super) fn tell(&mut self, session: SessionId, message: &MeshMessage, now: Now) {
        let request = Self::frame_request(message);
        let deadline = Some(now.mono + REQUEST_TIMEOUT_MS);
        self.request_on(session, request, Purpose::Heard, deadline);
    }

    /// Tells every peer of one of our devices, once each.
    pub(super) fn broadcast(&mut self, local: DeviceId, message: &MeshMessage, now: Now) {
        self.broadcast_to(local, message, now, |_, _| true);
    }

    /// Tells those peers of one of our devices that `choose` picks.
    pub(super) fn broadcast_to(
        &mut self,
        local: DeviceId,
        message: &MeshMessage,
        now: Now,
        choose: impl Fn(&Session<Purpose>, &DeviceId) -> bool,
    ) {
        let remotes: Vec<DeviceId> = self
            .routes
            .range((local, DeviceId([0; 32]))..=(local, DeviceId([255; 32])))
            .map(|((_, remote), _)| *remote)
            .collect();
        for remote in remotes {
            let Some(session) = self.route(&local, &remote) else { continue };
            if self.sessions.get(&session).is_some_and(|s| choose(s, &remote)) {
                self.tell(session, message, now);
            }
        }
    }

    pub(super) fn answer(&mut self, to: AnswerTo, outcome: Outcome, now: Now) {
        match to {
            AnswerTo::Session { session, request } => {
                if !self.sessions.contains_key(&session) {
                    return;
                }
                let outcome = match outcome {
                    Outcome::Ok(members) => frame::Outcome::Ok(members),
                    Outcome::Error { code, message } => frame::Outcome::Error { code, message },
                    Outcome::Timeout | Outcome::NotConnected | Outcome::ConnectionLost => {
                        frame::Outcome::Error { code: "timeout".into(), message: None }
                    }
                };
                let response = frame::ManageResponse { request_id: request, outcome };
                self.send(session, Frame::ManageResponse(response));
            }
            AnswerTo::Internal(id) => {
                if let Some((local, remote, purpose, _)) = self.internal_open.remove(&id) {
                    self.outcome(purpose, local, remote, None, outcome, now);
                }
            }
        }
    }

    pub(super) fn internal_request(&mut self, internal: Internal, now: Now) {
        let Internal { from, to, request, id } = internal;
        if !self.is_hosted(&to) {
            self.answer(AnswerTo::Internal(id), Outcome::NotConnected, now);
            return;
        }
        let answer_to = AnswerTo::Internal(id);
        let token = request.token.as_ref().map(|token| self.tokens.get_or_parse(token));
        let answer = self.room_request(to, from, None, answer_to, &request, token, now);
        if let Answer::Now(outcome) = answer {
            self.answer(answer_to, outcome, now);
        }
    }

    // --- frames in ----------------------------------------------------------------------------

    pub(super) fn frame(&mut self, id: SessionId, frame: Checked, now: Now) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.heard(now.mono);
        self.stats.frames += 1;
        let (local, remote) = (session.local, session.remote);
        match frame {
            Checked::Gossip(adverts) => self.gossip(id, adverts, now),
            Checked::Request { id: request, verb, params, scope, token, raw_token } => {
                let to = AnswerTo::Session { session: id, request };
                let request = OutRequest { verb, params, scope, token: raw_token };
                if let Answer::Now(outcome) =
                    self.inbound_request(id, local, remote, to, &request, token, now)
                {
                    self.answer(to, outcome, now);
                }
            }
            Checked::Response { id: request, outcome } => {
                let Some(purpose) =
                    self.sessions.get_mut(&id).and_then(|session| session.close_request(request))
                else {
                    return;
                };
                let outcome = match outcome {
                    frame::Outcome::Ok(members) => Outcome::Ok(members),
                    frame::Outcome::Error { code, message } => Outcome::Error { code, message },
                };
                self.outcome(purpose, local, remote, Some(id), outcome, now);
            }
            Checked::Claim(claim) => self.claim_heard(id, claim, now),
            Checked::Revocations(entries) => {
                if self.sessions.get(&id).is_some_and(Session::is_admitted) {
                    for entry in entries {
                        self.revoked(remote, entry);
                    }
                }
            }
            Checked::Relay { payload, to, from } => self.relayed(id, from, to, &payload, now),
            Checked::Ping => self.send(id, Frame::Pong),
            Checked::Ignored => {}
        }
    }

    // --- the end of sessions --------------------------------------------------------------------

    /// What was asked over a session, by either end, gets no answer any more.
    pub(super) fn exchange_lost(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let (local, remote) = (session.local, session.remote);
        for purpose in session.drain_requests() {
            self.deferred.push_back((purpose, local, remote, Some(id), Outcome::ConnectionLost));
        }
        self.drop_decisions_of_session(id);
    }

    pub(super) fn session_closed(&mut self, id: SessionId, reason: &'static str, now: Now) {
        self.exchange_lost(id);
        let Some(session) = self.sessions.remove(&id) else { return };
        let (local, remote, kind) = (session.local, session.remote, session.kind);
        self.channels.remove(&id);
        self.close_channels_via(id, now);
        self.log(
            LogEvent::new("session_closed")
                .with("session", id.0)
                .with("device", remote)
                .with("local", local)
                .with("kind", kind.as_str())
                .with("reason", reason),
        );
        let misbehaved = matches!(reason, "frame_too_large" | "not_canonical");
        if matches!(kind, SessionKind::DataDialled | SessionKind::NetworkDialled) {
            let pause = if misbehaved {
                MISBEHAVED_PAUSE_MS
            } else if kind == SessionKind::NetworkDialled {
                super::control::APPROVAL_RETRY_MS
            } else {
                super::super::formation::REDIAL_FIRST_MS
            };
            self.formation.dial_ended(&local, &remote, now.mono, pause);
        }
        if session.is_admitted() {
            if let Some(ids) = self.routes.get_mut(&(local, remote)) {
                ids.retain(|held| *held != id);
                if ids.is_empty() {
                    self.routes.remove(&(local, remote));
                }
            }
            let gone = match self.remotes.get_mut(&remote) {
                Some(count) if *count > 1 => {
                    *count -= 1;
                    false
                }
                Some(_) => {
                    self.remotes.remove(&remote);
                    true
                }
                None => false,
            };
            if gone {
                self.formation.gone(&remote);
                self.log(LogEvent::new("peer_down").with("device", remote));
                self.peer_departed(remote, now);
            }
        }
        self.port_session_closed(id, local, remote, kind, now);
        self.hub_closed(&session, reason, now);
        if kind == SessionKind::NetworkDialled {
            self.connection_lost(remote, now);
        }
        self.pump_dials(now);
    }

    pub(super) fn close(&mut self, id: SessionId, reason: &'static str, now: Now) {
        if self.sessions.contains_key(&id) {
            if self.channels.remove(&id).is_none() {
                self.outputs.push_back(Output::Close { session: id, reason });
            }
            self.session_closed(id, reason, now);
        }
    }

    // --- time -----------------------------------------------------------------------------------

    pub(super) fn upkeep(&mut self, now: Now) {
        if !self.awaiting.is_empty() {
            self.give_up_ways(now);
        }
        if self.election.deadline().is_some_and(|at| at <= now.mono) {
            self.claim_wait_over(now);
        }
        if self.port_deadline().is_some_and(|at| at <= now.mono) {
            self.port_again();
        }
        if self.dial_at.is_some_and(|at| at <= now.mono) {
            self.pump_dials(now);
        }
        if self.gossip_at <= now.mono {
            self.gossip_tick(now);
        }
        if self.beacon_at <= now.mono {
            self.send_beacon(now);
        }
        self.discovery_upkeep(now);
        if self.probe_at <= now.mono {
            self.probe_pids(now);
        }
        if self.upkeep_at > now.mono {
            return;
        }
        self.upkeep_at = now.mono + UPKEEP_INTERVAL_MS;
        let mut expired = Vec::new();
        let mut probes = Vec::new();
        let mut overdue = Vec::new();
        for session in self.sessions.values_mut() {
            for purpose in session.expired_requests(now.mono) {
                expired.push((purpose, session.local, session.remote, session.id));
            }
            if session.wants_probe(now.mono) {
                probes.push(session.id);
            }
            if let Some(reason) = session.overdue(now.mono) {
                overdue.push((session.id, reason));
            }
        }
        for (purpose, local, remote, session) in expired {
            self.deferred.push_back((purpose, local, remote, Some(session), Outcome::Timeout));
            // The other end may have lost the channel: the next request opens another.
            if self.channels.contains_key(&session) {
                overdue.push((session, "relay_timeout"));
            }
        }
        for session in probes {
            self.send_probe(session, now);
        }
        for (session, reason) in overdue {
            self.close(session, reason, now);
        }
        let late: Vec<u64> = self
            .internal_open
            .iter()
            .filter(|(_, (_, _, _, deadline))| deadline.is_some_and(|at| at <= now.mono))
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            self.answer(AnswerTo::Internal(id), Outcome::Timeout, now);
        }
        self.announce_departed(now);
        self.hub_upkeep(now);
        self.connections_upkeep(now);
        self.tell_unheard(now);
        self.contradict_upkeep(now);
        self.decisions_upkeep(now);
        self.services_upkeep(now);
        self.ops_upkeep(now);
        self.delivery_upkeep(now);
        self.durable_upkeep(now);
        self.port_sessions_upkeep();
        self.shutdown_upkeep(now);
    }

    /// A request that every wire-mesh session answers by itself: a sign of life.
    fn send_probe(&mut self, session: SessionId, now: Now) {
        if self.is_hub(session) {
            // It answers nothing else.
            return self.send(session, Frame::Ping);
        }
        let request = OutRequest {
            verb: "version:get".into(),
            params: Value::map([("verb", Value::Text("version.get".into()))]),
            scope: Scope { kind: "node".into(), path: None },
            token: None,
        };
        self.request_on(session, request, Purpose::Probe, Some(now.mono + REQUEST_TIMEOUT_MS));
    }
}

pub(super) const fn origin_word(origin: Origin) -> &'static str {
    match origin {
        Origin::SameUser => "same_user",
        Origin::OtherUser => "other_user",
        Origin::Network => "network",
    }
}
