//! The coordinator role among peers of one machine: enrolment, claims, duties
//! (`transport.md` 3.2, 3.3 and 9).

use super::super::election::{CLAIM_WAIT_MS, Verdict};
use super::super::log::LogEvent;
use super::super::message::{MeshMessage, Patch};
use super::super::records::{AgentRecord, AgentStatus, Now};
use super::super::session::SessionId;
use super::super::wire::claim::Claim;
use super::super::wire::frame::Frame;
use super::{Node, Output};
use crate::identity::device::DeviceId;

/// Time between probes of process ids by the holder of the role.
pub const STALE_PROBE_MS: u64 = 5_000;
/// An offline record is forgotten this long after its agent started (the reference's rule).
pub const PURGE_AFTER_MS: u64 = 30 * 60 * 1000;
/// Peers whose going is remembered for whoever follows the holder: as many as the table has.
const MAX_DEPARTED: usize = super::super::formation::MAX_PEERS;

impl Node {
    /// Both ends of a new enrolled session tell each other the claim they accept.
    pub(super) fn enrolled(&mut self, session: SessionId) {
        if let Some(claim) = self.election.accepted() {
            self.send_claim(session, claim);
        }
    }

    fn send_claim(&mut self, session: SessionId, claim: Claim) {
        self.outputs.push_back(Output::Send {
            session,
            frame: Frame::Coordinator {
                term: claim.term,
                coordinator: claim.coordinator,
                capacity_hint: None,
            },
        });
    }

    fn send_claim_to_all(&mut self, claim: Claim) {
        let enrolled: Vec<SessionId> =
            self.sessions.values().filter(|s| s.enrolled).map(|s| s.id).collect();
        for session in enrolled {
            self.send_claim(session, claim);
        }
    }

    fn holder_reachable(&self) -> bool {
        self.election.accepted().is_some_and(|claim| self.is_enrolled(&claim.coordinator))
    }

    fn is_enrolled(&self, device: &DeviceId) -> bool {
        self.is_hosted(device) || self.sessions.values().any(|s| s.enrolled && s.remote == *device)
    }

    pub(super) fn claim_heard(&mut self, session: SessionId, claim: Claim, now: Now) {
        if !self.sessions.get(&session).is_some_and(|s| s.enrolled) {
            return;
        }
        let reachable = self.is_enrolled(&claim.coordinator);
        match self.election.incoming(claim, reachable, now.mono) {
            Verdict::Accepted => {
                self.send_claim_to_all(claim);
                self.role_settled(now);
            }
            Verdict::AnswerHeld(held) => self.send_claim(session, held),
            Verdict::Ignored => {}
        }
    }

    /// Starts or ends duties after the accepted claim changed.
    fn role_settled(&mut self, now: Now) {
        let accepted = self.election.accepted();
        let ours = accepted.filter(|claim| self.is_hosted(&claim.coordinator));
        match (self.role, ours) {
            (None, Some(claim)) => {
                self.log(
                    LogEvent::new("role_gained")
                        .with("device", claim.coordinator)
                        .with("term", claim.term),
                );
                self.probe_at = now.mono + STALE_PROBE_MS;
            }
            (Some(was), None) => {
                self.log(
                    LogEvent::new("role_lost")
                        .with("device", was.coordinator)
                        .with("term", was.term),
                );
                self.probe_at = u64::MAX;
            }
            _ => {}
        }
        if let Some(claim) = accepted
            && ours.is_none()
        {
            self.log(
                LogEvent::new("holder_changed")
                    .with("holder", claim.coordinator)
                    .with("term", claim.term),
            );
        }
        self.role = ours;
    }

    pub(super) fn claim_for(&mut self, device: DeviceId, now: Now) {
        if let Some(claim) = self.election.claim(device) {
            self.send_claim_to_all(claim);
            self.role_settled(now);
        }
    }

    /// We hold the port, or stand without it: claim when nobody has (`transport.md` 3.3).
    pub(super) fn claim_if_vacant(&mut self, now: Now) {
        if self.election.accepted().is_some() {
            return;
        }
        if self.config.first_contact {
            self.election.wait_if_vacant(now.mono);
            self.log(LogEvent::new("claim_wait").with("wait_ms", CLAIM_WAIT_MS));
        } else {
            self.claim_for(self.daemon, now);
        }
    }

    pub(super) fn claim_wait_over(&mut self, now: Now) {
        let reachable = self.holder_reachable();
        if !self.election.due(reachable, now.mono) || self.shutting_down.is_some() {
            return;
        }
        let departed = self.election.accepted().map(|claim| claim.coordinator);
        self.claim_for(self.daemon, now);
        // A late successor announces the departure of the one it follows.
        if let Some(departed) = departed.filter(|device| !self.is_reachable(device)) {
            self.announce_offline(departed, now);
        }
    }

    /// The last session with a peer has ended.
    pub(super) fn peer_departed(&mut self, remote: DeviceId, now: Now) {
        if self.departed.len() < MAX_DEPARTED {
            self.departed.insert(remote);
        }
        self.departed_from_role(remote, now);
        self.announce_departed(now);
        self.mesh_decisions.retain(|_, decision| decision.requester != remote);
    }

    /// A device of ours that others still accept as the holder is in service again.
    pub(super) fn device_returned_to_role(&mut self, device: &DeviceId, now: Now) {
        if self.election.accepted().is_some_and(|claim| claim.coordinator == *device) {
            self.role_settled(now);
        }
    }

    /// A device, ours or not, has left: if it held the role, somebody must follow.
    pub(super) fn departed_from_role(&mut self, device: DeviceId, now: Now) {
        if self.shutting_down.is_some()
            || self.election.accepted().is_none_or(|claim| claim.coordinator != device)
        {
            return;
        }
        let enrolled = self.sessions.values().filter(|s| s.enrolled).map(|s| s.remote);
        let lowest = self
            .devices
            .keys()
            .copied()
            .chain(enrolled)
            .filter(|id| *id != device)
            .min()
            .unwrap_or(self.daemon);
        let ours = self.is_hosted(&lowest);
        if let Some(claim) = self.election.holder_departed(lowest, ours, now.mono) {
            self.send_claim_to_all(claim);
        }
        self.role_settled(now);
    }

    /// The holder of the role announces who has gone; also those who went just before the holder
    /// that it follows.
    pub(super) fn announce_departed(&mut self, now: Now) {
        if self.role.is_none() {
            return;
        }
        for device in std::mem::take(&mut self.departed) {
            if !self.is_reachable(&device) {
                self.announce_offline(device, now);
            }
        }
    }

    /// The one announcement of a departure, made by the holder of the role.
    fn announce_offline(&mut self, agent: DeviceId, now: Now) {
        if !self.replica.set_offline(&agent, false) {
            return;
        }
        self.log(LogEvent::new("agent_offline").with("agent", agent));
        let from = self.role.map_or(self.daemon, |claim| claim.coordinator);
        let message = MeshMessage::StateUpdate(Box::new(Patch::AgentOffline { agent_id: agent }));
        self.broadcast(from, &message, now);
        self.show_status(agent, AgentStatus::Offline, now);
    }

    pub(super) fn probe_pids(&mut self, now: Now) {
        self.probe_at = now.mono + STALE_PROBE_MS;
        let stale: Vec<(DeviceId, i64)> = self
            .replica
            .agents()
            .filter(|agent| {
                agent.status != AgentStatus::Offline
                    && agent.pid > 0
                    && !self.is_hosted(&agent.id)
                    && self.is_machine_local(&agent.id)
            })
            .map(|agent| (agent.id, agent.pid))
            .collect();
        if !stale.is_empty() {
            self.outputs.push_back(Output::ProbePids(stale));
        }
    }

    /// Whether an agent's process can be on this machine: not when it is known over the network.
    fn is_machine_local(&self, device: &DeviceId) -> bool {
        !self.sessions.values().any(|s| s.remote == *device && !s.is_machine_local())
            && self.formation.peer(device).is_none_or(|peer| peer.network.is_none())
    }

    pub(super) fn dead_pids(&mut self, dead: &[DeviceId], now: Now) {
        if self.role.is_none() {
            return;
        }
        for agent in dead {
            // Whose session lives is here, whatever process its record names.
            if !self.is_reachable(agent) {
                self.announce_offline(*agent, now);
            }
        }
    }

    /// Makes room in a full table for an agent that is here: records of agents that are not go,
    /// however young, so that whoever invents agents drives out his own.
    pub(super) fn make_room(&mut self, now: Now) {
        if self.make_room_at <= now.mono {
            self.make_room_at = now.mono + STALE_PROBE_MS;
            self.forget_agents(|_| true);
        }
    }

    /// Forgets offline records whose agent started long ago, and what else is known of devices
    /// that are gone.
    pub(super) fn purge(&mut self, now: Now) {
        self.forget_agents(|agent| {
            let started = crate::codec::time::UnixMillis::parse_iso(&agent.started_at);
            agent.status == AgentStatus::Offline
                && started.is_none_or(|at| at > now.unix || now.unix.since(at) > PURGE_AFTER_MS)
        });
        let directory = &self.directory;
        self.machines.retain(|device, _| directory.get(device).is_some());
        let devices = &self.devices;
        self.contradicted.retain(|device, _| devices.contains_key(device));
    }

    /// Forgets those agents that `choose` picks and nobody here has to do with.
    fn forget_agents(&mut self, choose: impl Fn(&AgentRecord) -> bool) {
        let old: Vec<DeviceId> = self
            .replica
            .agents()
            .filter(|agent| {
                choose(agent)
                    && !self.is_reachable(&agent.id)
                    // Somebody still has a message for it: its name is wanted in reports.
                    && !self.is_awaited(&agent.id)
            })
            .map(|agent| agent.id)
            .collect();
        for agent in old {
            let record = self.replica.remove_agent(&agent);
            if let (Some(record), Some(held)) = (record, self.parked.get_mut(&agent)) {
                held.version = record.version;
            }
            self.own_queues.remove(&agent);
            self.directory.remove(&agent);
            self.machines.remove(&agent);
        }
    }
}
