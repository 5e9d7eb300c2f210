//! Formation: the well-known port, introductions, peer lists, first contact, hand-over
//! (`transport.md` 2, 3.4, 3.5, 4; decisions 9, 14).

use std::net::IpAddr;

use super::super::discovery::Side;
use super::super::first_contact::{BEACON_INTERVAL_MS, Datagram};
use super::super::formation::{MISBEHAVED_PAUSE_MS, Noted, PortState};
use super::super::log::LogEvent;
use super::super::message::MeshMessage;
use super::super::records::{Now, PeerInfo};
use super::super::session::{Origin, REQUEST_TIMEOUT_MS, Session, SessionId, SessionKind};
use super::{Node, Output, Purpose};
use crate::identity::device::DeviceId;

/// How long a named successor keeps trying to bind: the old holder closes its listener only after
/// our answer has reached it, which takes a reference peer about 50 ms.
const HAND_OVER_MS: u64 = 1_000;
/// Pause between bind attempts of a hand-over (the reference's).
const BIND_PAUSE_MS: u64 = 30;
/// Least time between beacons sent in answer to probes, so that a flood of probes is no amplifier.
const BEACON_ANSWER_MS: u64 = 200;
/// How long a leaving daemon waits for its successor's answer.
const SUCCESSOR_ANSWER_MS: u64 = 1_000;
/// Failed rounds at the port after which it is called unavailable.
const ROUNDS_BEFORE_COMPLAINT: u32 = 2;

impl Node {
    pub(super) fn start(&mut self, now: Now) {
        self.go_for_port();
        if self.config.first_contact {
            self.send_beacon(now);
            self.ask_for_beacons();
        }
    }

    /// One attempt at a time: a second one would find the first one's listener in its way.
    fn go_for_port(&mut self) {
        if self.shutting_down.is_none() && self.formation.port() != PortState::Binding {
            self.formation.set_port(PortState::Binding);
            self.outputs.push_back(Output::BindPort);
        }
    }

    pub(super) fn port_deadline(&self) -> Option<u64> {
        match self.formation.port() {
            PortState::Waiting { until } => Some(until),
            _ => None,
        }
    }

    pub(super) fn port_again(&mut self) {
        self.go_for_port();
    }

    pub(super) fn port_bound(&mut self, now: Now) {
        if self.shutting_down.is_some() {
            self.outputs.push_back(Output::ReleasePort);
            return;
        }
        self.formation.set_port(PortState::Holding);
        self.hand_over_until = 0;
        self.log(LogEvent::new("port_held"));
        self.claim_if_vacant(now);
    }

    pub(super) fn port_bind_failed(&mut self, in_use: bool, now: Now) {
        if self.formation.port() != PortState::Binding {
            return;
        }
        if !in_use {
            self.port_unavailable("bind_failed", now);
        } else if now.mono < self.hand_over_until {
            self.formation.set_port(PortState::Waiting { until: now.mono + BIND_PAUSE_MS });
        } else {
            self.formation.set_port(PortState::Dialling);
            self.port_dial(self.daemon);
        }
    }

    pub(super) fn port_dialled(
        &mut self,
        local: DeviceId,
        session: SessionId,
        remote: DeviceId,
        origin: Origin,
        now: Now,
    ) {
        let Some(device) = self.devices.get_mut(&local) else {
            self.outputs.push_back(Output::Close { session, reason: "not_in_service" });
            return;
        };
        device.port_dial = None;
        device.port_session = Some(session);
        self.session_opened(session, local, remote, SessionKind::PortDialled, origin, now);
        if !self.sessions.contains_key(&session) {
            if local == self.daemon {
                self.port_unavailable("own_device", now);
            }
            return;
        }
        if local == self.daemon {
            self.formation.set_port(PortState::Joined { holder: remote });
            self.log(LogEvent::new("port_joined").with("holder", remote));
            self.port_sessions_upkeep();
        }
    }

    /// First word on a session to the port: the introduction is written before the session counts
    /// as a peer's, since a claim that came ahead of it would be dropped.
    pub(super) fn introduce(&mut self, session: SessionId, now: Now) {
        let Some(local) = self.sessions.get(&session).map(|s| s.local) else { return };
        let data_port = self.devices.get(&local).map(|device| device.data_port);
        let message = MeshMessage::Introduce { peer_id: local.hex(), data_port };
        let request = Self::frame_request(&message);
        self.request_on(session, request, Purpose::Introduce, Some(now.mono + REQUEST_TIMEOUT_MS));
        self.admitted(session, now);
        self.send_own_record(session, now);
    }

    pub(super) fn port_dial_failed(&mut self, local: DeviceId, reason: &'static str, now: Now) {
        if let Some(device) = self.devices.get_mut(&local) {
            device.port_dial = None;
        }
        if local != self.daemon || self.formation.port() != PortState::Dialling {
            return;
        }
        // The holder went between our two attempts: bind at once, the first time.
        if reason == "refused" && self.formation.port_failures() == 0 {
            self.formation.port_failed(now.mono);
            self.go_for_port();
            return;
        }
        self.port_unavailable(reason, now);
    }

    fn port_unavailable(&mut self, reason: &'static str, now: Now) {
        let pause = self.formation.port_failed(now.mono);
        if self.formation.port_failures() >= ROUNDS_BEFORE_COMPLAINT {
            self.log(
                LogEvent::new("port_unavailable").with("retry_ms", pause).with("reason", reason),
            );
        }
        // Nobody to be told by: the ordinary claim rule (`transport.md` 3.3).
        self.claim_if_vacant(now);
    }

    /// While somebody else holds the port, each device of ours is introduced to them.
    pub(super) fn port_sessions_upkeep(&mut self) {
        if !matches!(self.formation.port(), PortState::Joined { .. })
            || self.shutting_down.is_some()
        {
            return;
        }
        let missing: Vec<DeviceId> = self
            .devices
            .iter()
            .filter(|(_, device)| device.port_session.is_none() && device.port_dial.is_none())
            .map(|(id, _)| *id)
            .collect();
        for device in missing {
            self.port_dial(device);
        }
    }

    pub(super) fn port_session_closed(
        &mut self,
        id: SessionId,
        local: DeviceId,
        remote: DeviceId,
        kind: SessionKind,
        _now: Now,
    ) {
        if kind != SessionKind::PortDialled {
            return;
        }
        if let Some(device) = self.devices.get_mut(&local)
            && device.port_session == Some(id)
        {
            device.port_session = None;
        }
        // The holder is gone, or has closed the door: everybody races for the port.
        if local == self.daemon && self.formation.port() == (PortState::Joined { holder: remote }) {
            self.go_for_port();
        }
    }

    // --- introductions at our port --------------------------------------------------------------

    pub(super) fn introduced(&mut self, session: SessionId, data_port: Option<u16>, now: Now) {
        let Some((local, remote)) = self.sessions.get(&session).map(|s| (s.local, s.remote)) else {
            return;
        };
        if let Some(port) = data_port {
            let info = PeerInfo { id: remote, port, started_at: now.unix.iso(), host: None };
            self.note_peer(info, None, now);
            self.formation.said_by_itself(&remote);
        }
        self.admitted(session, now);
        self.send_peer_list(session, now);
        if let Some(peer) = self.formation.peer(&remote).map(|peer| peer.info.clone()) {
            let message = MeshMessage::PeerJoined(peer);
            self.broadcast_to(local, &message, now, |s, _| s.is_machine_local());
        }
        self.pump_dials(now);
    }

    fn note_peer(&mut self, info: PeerInfo, host: Option<IpAddr>, _now: Now) -> Noted {
        let (device, port) = (info.id, info.port);
        let noted = self.formation.note(info, host);
        match noted {
            Noted::Moved => {
                self.log(LogEvent::new("peer_moved").with("device", device).with("port", port));
            }
            Noted::Refused => self.refuse(device, "peer", "table_full_or_unusable"),
            Noted::New | Noted::Known => {}
        }
        noted
    }

    fn own_info(&self, device: &DeviceId) -> Option<PeerInfo> {
        let held = self.devices.get(device)?;
        Some(PeerInfo {
            id: *device,
            port: held.data_port,
            started_at: held.started_at.iso(),
            host: None,
        })
    }

    /// Tells a peer of this machine where our device at this end listens.
    pub(super) fn send_own_door(&mut self, session: SessionId, now: Now) {
        let Some(local) =
            self.sessions.get(&session).filter(|s| s.is_machine_local()).map(|s| s.local)
        else {
            return;
        };
        if let Some(info) = self.own_info(&local) {
            self.tell(session, &MeshMessage::PeerJoined(info), now);
        }
    }

    /// The peers of this machine, ourselves included, for a peer on this machine.
    fn peer_list(&self) -> Vec<PeerInfo> {
        let own = self.devices.keys().filter_map(|id| self.own_info(id));
        let others =
            self.formation.peers().filter(|peer| peer.network.is_none()).map(|p| p.info.clone());
        own.chain(others).collect()
    }

    pub(super) fn send_peer_list(&mut self, session: SessionId, now: Now) {
        if !self.sessions.get(&session).is_some_and(Session::is_machine_local) {
            return;
        }
        let message = MeshMessage::PeerList(self.peer_list());
        self.tell(session, &message, now);
    }

    /// Another device of ours came into service: the others learn where to dial it.
    pub(super) fn announce_device(&mut self, device: DeviceId, now: Now) {
        match self.formation.port() {
            PortState::Joined { .. } => self.port_sessions_upkeep(),
            _ => {
                let Some(info) = self.own_info(&device) else { return };
                let message = MeshMessage::PeerJoined(info);
                self.broadcast_to(self.daemon, &message, now, |s, _| s.is_machine_local());
            }
        }
        self.pump_dials(now);
    }

    /// Peers named by a peer of this machine. Their hosts are not believed: a loopback dial to
    /// the port finds the device or nobody, and addresses of other machines come from first
    /// contact alone.
    pub(super) fn peers_named(&mut self, session: SessionId, peers: Vec<PeerInfo>, now: Now) {
        let Some(speaker) =
            self.sessions.get(&session).filter(|s| s.is_machine_local()).map(|s| s.remote)
        else {
            return;
        };
        for info in peers {
            let host: Option<IpAddr> = info.host.as_deref().and_then(|host| host.parse().ok());
            if self.is_hosted(&info.id) || self.formation.network_host(host).is_some() {
                continue;
            }
            let device = info.id;
            if device != speaker && self.formation.is_settled(&device) {
                continue;
            }
            self.note_peer(info, None, now);
            if device == speaker {
                self.formation.said_by_itself(&device);
            }
        }
        self.pump_dials(now);
    }

    /// The holder is leaving and names us. Obeyed from our own user only (decision 5).
    pub(super) fn named_successor(&mut self, session: SessionId, peers: Vec<PeerInfo>, now: Now) {
        let Some((remote, same_user)) =
            self.sessions.get(&session).map(|s| (s.remote, s.is_same_user()))
        else {
            return;
        };
        if !same_user {
            self.refuse(remote, "become_coordinator", "not_authorised");
            return;
        }
        self.peers_named(session, peers, now);
        if self.formation.port() != PortState::Holding {
            self.hand_over_until = now.mono + HAND_OVER_MS;
            self.go_for_port();
        }
    }

    // --- first contact ----------------------------------------------------------------------------

    pub(super) fn send_beacon(&mut self, now: Now) {
        let Some(device) = self.devices.get(&self.daemon) else { return };
        let beacon = |port| Datagram::Beacon { peer: self.daemon, port }.encode();
        let group = beacon(device.data_port);
        let broadcast = beacon(self.config.network_port.unwrap_or(device.data_port));
        self.beacon_to(group, broadcast);
        self.beacon_at = now.mono + BEACON_INTERVAL_MS;
        self.beacon_sent_at = now.mono;
    }

    pub(super) fn datagram(&mut self, from: IpAddr, bytes: &[u8], now: Now) {
        let Some(datagram) = Datagram::parse(bytes) else { return };
        let side = self.side_of(from);
        if !matches!(&datagram, Datagram::Beacon { peer, .. } if self.is_hosted(peer)) {
            self.note_heard(from, &datagram, now);
        }
        if self.is_dark(side) {
            return;
        }
        match datagram {
            Datagram::Probe if self.config.first_contact && self.shutting_down.is_none() => {
                self.beacons_asked_for(side);
                self.beacon_at = self.beacon_at.min(self.beacon_sent_at + BEACON_ANSWER_MS);
            }
            Datagram::Beacon { peer, port } => {
                if self.is_hosted(&peer) || self.shutting_down.is_some() {
                    return;
                }
                // Other machines are dialled only where the operator has opened this one.
                let network = side == Side::Network;
                if network && self.config.network_port.is_none() {
                    return;
                }
                // Anybody on this machine can send one, and a peer that has gone is noticed at once.
                if !network && self.formation.is_settled(&peer) {
                    return;
                }
                let info = PeerInfo { id: peer, port, started_at: now.unix.iso(), host: None };
                self.note_peer(info, Some(from), now);
                self.pump_dials(now);
            }
            _ => {}
        }
    }

    /// A network peer that cannot be had is left alone for a while.
    pub(super) fn leave_alone(&mut self, device: DeviceId, now: Now) {
        self.forget_connection(&device);
        self.refused_remotes.retain(|_, until| *until > now.mono);
        if self.refused_remotes.len() < super::super::formation::MAX_PEERS {
            self.refused_remotes.insert(device, now.mono + MISBEHAVED_PAUSE_MS);
        }
    }

    // --- leaving ------------------------------------------------------------------------------------

    pub(super) fn shutdown(&mut self, now: Now) {
        if self.shutting_down.is_some() {
            return;
        }
        self.shutting_down = Some(now.mono + SUCCESSOR_ANSWER_MS);
        for agent in self.agent_ids() {
            self.say_offline(agent, now);
        }
        let successor = match self.formation.port() {
            PortState::Holding => {
                // The listener goes first, so that the successor finds the port free.
                self.outputs.push_back(Output::ReleasePort);
                let reachable = |device: &DeviceId| {
                    self.route(&self.daemon, device)
                        .and_then(|id| self.sessions.get(&id))
                        .is_some_and(Session::is_same_user)
                };
                self.formation.successor(reachable)
            }
            _ => None,
        };
        self.formation.set_port(PortState::Off);
        self.beacon_at = u64::MAX;
        self.gossip_at = u64::MAX;
        match successor {
            Some((device, others)) => {
                self.log(LogEvent::new("port_released").with("successor", device));
                let request = Self::frame_request(&MeshMessage::BecomeCoordinator(others));
                let deadline = Some(now.mono + SUCCESSOR_ANSWER_MS);
                self.request(self.daemon, device, request, Purpose::BecomeCoordinator, deadline);
            }
            None => self.shutdown_ready(),
        }
    }

    pub(super) fn shutdown_upkeep(&mut self, now: Now) {
        if self.shutting_down.is_some_and(|until| until <= now.mono) {
            self.shutdown_ready();
        }
    }

    pub(super) fn shutdown_ready(&mut self) {
        if !std::mem::replace(&mut self.shutdown_said, true) {
            self.outputs.push_back(Output::ShutdownReady);
        }
    }
}
