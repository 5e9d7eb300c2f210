//! Adverts of our devices: what they say to whom, and what is taken from others
//! (`transport.md` 6 and 7, `rooms.md` 4).

use std::sync::Arc;

use super::super::directory::{self, AgentSelf, GOSSIP_INTERVAL_MS, HostedRoom, Taken, key};
use super::super::log::LogEvent;
use super::super::records::{AgentStatus, Now, RoomType, Visibility};
use super::super::session::{Policy, Session, SessionId, SessionKind};
use super::super::wire::advert::PeerAdvert;
use super::super::wire::capability::GROUP_MEMBER;
use super::super::wire::frame::Frame;
use super::super::wire::name_claim::NameClaim;
use super::super::wire::room_path::RoomPath;
use super::super::wire::scope::{KIND_GROUP, Scope};
use super::super::wire::token::{self, MintRequest};
use super::{Node, Output, OwnAdvert};
use crate::codec::cbor::{self, Value};
use crate::codec::time::UnixMillis;
use crate::identity::device::{DeviceId, DeviceKey};

/// agent-comms release whose behaviour we have (decision 16).
pub const AGENT_COMMS_VERSION: &str = "8.6.0";
/// wire-mesh release likewise.
pub const WIRE_MESH_VERSION: &str = "3.9.0";
/// Life of a membership proof and of a name claim.
const PROOF_LIFE_MS: u64 = 900_000;
/// Age at which they are made anew.
const PROOF_REFRESH_MS: u64 = 300_000;
/// Least time between adverts sent because something changed: a burst of changes goes out once.
const CHANGE_PAUSE_MS: u64 = 100;

/// How much an advert says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Detail {
    /// Before a session is let in: the device and nothing else.
    Plain,
    /// To a relay hub: proofs and presence, and no name of anything.
    Nameless,
    /// To other users and machines: name and proofs, public rooms.
    Reduced,
    /// To peers of our own user.
    Full,
}

/// Adverts and proofs held ready.
#[derive(Default)]
pub(super) struct Adverts {
    ready: [Option<OwnAdvert>; 4],
    membership: Option<String>,
    machine: Option<String>,
    machine_name: Option<String>,
    minted_at: Option<u64>,
}

/// A machine that a device has proved to be on.
pub(super) struct Machine {
    proof: String,
    claim: Option<String>,
    machine: DeviceId,
    name: Option<String>,
    expires: UnixMillis,
}

impl Node {
    /// Our advert for a session, made anew at most once a second.
    pub(super) fn advert_for(
        &mut self,
        local: DeviceId,
        detail: Detail,
        now: Now,
    ) -> Option<OwnAdvert> {
        self.refresh_proofs(local, now);
        let seconds = i64::try_from(now.unix.seconds()).unwrap_or(i64::MAX);
        let device = self.devices.get(&local)?;
        if let Some(ready) = &device.adverts.ready[detail as usize]
            && ready.snapshot_seconds == seconds
        {
            return Some(Arc::clone(ready));
        }
        let extensions = self.extensions(local, detail);
        let device = self.devices.get_mut(&local)?;
        let advert = Arc::new(PeerAdvert::sign(&device.key, Vec::new(), seconds, extensions));
        device.adverts.ready[detail as usize] = Some(Arc::clone(&advert));
        Some(advert)
    }

    /// What changed must be in the next advert.
    pub(super) fn advert_changed(&mut self, local: &DeviceId, now: Now) {
        if let Some(device) = self.devices.get_mut(local) {
            device.adverts.ready = [None, None, None, None];
        }
        if self.shutting_down.is_none() {
            self.gossip_at = self.gossip_at.min(now.mono + CHANGE_PAUSE_MS);
        }
    }

    /// The machine has another name: every agent here says so with its next advert.
    pub(super) fn machine_named(&mut self, name: Option<String>, now: Now) {
        self.config.machine_name = name;
        let devices: Vec<DeviceId> = self.devices.keys().copied().collect();
        for device in devices {
            if let Some(held) = self.devices.get_mut(&device) {
                held.adverts.minted_at = None;
            }
            self.advert_changed(&device, now);
        }
    }

    fn extensions(&self, local: DeviceId, detail: Detail) -> Vec<(Value, Value)> {
        // Who else is here is for our own user only.
        let direct: Vec<Value> = self
            .routes
            .range((local, DeviceId([0; 32]))..=(local, DeviceId([255; 32])))
            .filter(|_| detail == Detail::Full)
            .map(|((_, remote), _)| Value::Bytes(remote.0.to_vec()))
            .collect();
        let text = |text: &str| Value::Text(text.to_owned());
        let mut out = vec![
            (key::WIRE_VERSION.to_owned(), text(WIRE_MESH_VERSION)),
            (
                key::TOPOLOGY.to_owned(),
                Value::map([
                    ("direct", Value::Array(direct)),
                    ("relayed", Value::Array(Vec::new())),
                ]),
            ),
        ];
        if detail == Detail::Plain {
            return out.into_iter().map(|(key, value)| (Value::Text(key), value)).collect();
        }
        out.push((
            key::VERSION.to_owned(),
            Value::map([("agentComms", text(AGENT_COMMS_VERSION))]),
        ));
        out.push((
            key::COMMSD.to_owned(),
            Value::map([
                ("version", text(&self.config.version)),
                ("daemon", text(&self.daemon.hex())),
            ]),
        ));
        let named = detail != Detail::Nameless;
        if named {
            out.push((key::ROOMS.to_owned(), self.hosted_rooms(local, detail)));
        }
        if let Some(record) = self.record(&local).filter(|_| self.agent(&local).is_some()) {
            out.push((key::PRESENCE.to_owned(), text(record.status.as_str())));
            if record.visibility == Visibility::Visible {
                let full = detail == Detail::Full;
                let adverts = self.devices.get(&local).map(|device| &device.adverts);
                // The rooms an agent is in are nobody's business where they are secret.
                let rooms = record
                    .subscribed_rooms
                    .iter()
                    .filter(|room| {
                        RoomPath::parse(room).is_ok_and(|path| {
                            self.replica.room(&path).is_some_and(|r| r.kind == RoomType::Public)
                        })
                    })
                    .cloned()
                    .collect();
                let short = local.hex().get(..8).unwrap_or_default().to_owned();
                let agent = AgentSelf {
                    // Peers want something in their place.
                    name: if named { record.name.clone() } else { format!("agent-{short}") },
                    harness: if named { record.harness.clone() } else { "commsd".into() },
                    cwd: full.then(|| record.cwd.clone()),
                    pid: full.then_some(record.pid),
                    started_at: full.then(|| record.started_at.clone()),
                    tags: full.then(|| record.tags.clone()),
                    subscribed_rooms: full.then_some(rooms),
                    membership: adverts.and_then(|a| a.membership.clone()),
                    machine: adverts.and_then(|a| a.machine.clone()),
                    machine_name: adverts.and_then(|a| a.machine_name.clone()).filter(|_| named),
                };
                if let Ok(value) = cbor::to_value(&agent) {
                    out.push((key::SELF.to_owned(), value));
                }
            }
        }
        out.into_iter().map(|(key, value)| (Value::Text(key), value)).collect()
    }

    fn hosted_rooms(&self, local: DeviceId, detail: Detail) -> Value {
        let rooms: Vec<HostedRoom> = self
            .replica
            .rooms()
            .filter(|(path, room)| {
                path.owner() == Some(local)
                    && match room.kind {
                        RoomType::Public => true,
                        RoomType::Private => detail == Detail::Full,
                        RoomType::Secret => false,
                    }
            })
            .take(directory::MAX_HOSTED_ROOMS)
            .map(|(path, room)| HostedRoom {
                path: path.to_string(),
                name: room.name.clone(),
                kind: room.kind,
                description: (detail == Detail::Full).then(|| room.description.clone()),
            })
            .collect();
        cbor::to_value(&rooms).unwrap_or(Value::Array(Vec::new()))
    }

    fn refresh_proofs(&mut self, local: DeviceId, now: Now) {
        let fresh = self
            .devices
            .get(&local)
            .and_then(|device| device.adverts.minted_at)
            .is_some_and(|at| now.mono < at + PROOF_REFRESH_MS);
        if fresh || self.agent(&local).is_none() {
            return;
        }
        let expires = now.unix.plus(PROOF_LIFE_MS);
        let (user, machine) = (self.config.user.clone(), self.config.machine.clone());
        let mut mint = |issuer: Option<DeviceKey>| {
            let issuer = issuer?;
            let scope = Scope::new(KIND_GROUP, issuer.id().hex());
            let id = self.random::<16>();
            let request = MintRequest::new(id, local, GROUP_MEMBER, scope, expires).delegations(0);
            token::mint(&issuer, now.unix, request).ok().map(|token| token.to_text())
        };
        let membership = mint(user);
        let machine = mint(machine);
        let machine_name = self.config.machine.as_ref().and_then(|key| {
            let name = self.config.machine_name.as_deref()?;
            NameClaim::sign(key, name, expires)
        });
        if let Some(device) = self.devices.get_mut(&local) {
            device.adverts.membership = membership;
            device.adverts.machine = machine;
            device.adverts.machine_name = machine_name;
            device.adverts.minted_at = Some(now.mono);
            device.adverts.ready = [None, None, None, None];
        }
    }

    fn detail_for(session: &Session<super::Purpose>) -> Detail {
        match (session.is_admitted(), session.is_same_user()) {
            (false, _) => Detail::Plain,
            (true, false) => Detail::Reduced,
            (true, true) => Detail::Full,
        }
    }

    /// What both sides send as soon as a session is open.
    pub(super) fn send_opening_advert(&mut self, id: SessionId, now: Now) {
        let Some(session) = self.sessions.get(&id) else { return };
        if session.kind == SessionKind::Hub {
            return self.send_hub_adverts(id, now);
        }
        let (local, detail) = (session.local, Self::detail_for(session));
        let machine = session.is_admitted() && !session.is_machine_local();
        self.send_advert(id, local, detail, now);
        // Another machine hears of our agents through the daemon that fronts them.
        for agent in if machine { self.fronted() } else { Vec::new() } {
            self.send_advert(id, agent, detail, now);
        }
    }

    /// A session that was let in later learns the rest at once.
    pub(super) fn send_full_advert(&mut self, id: SessionId, now: Now) {
        self.send_opening_advert(id, now);
    }

    fn send_advert(&mut self, session: SessionId, local: DeviceId, detail: Detail, now: Now) {
        if let Some(advert) = self.advert_for(local, detail, now) {
            self.outputs.push_back(Output::Send {
                session,
                frame: Frame::Gossip { peers: vec![(*advert).clone()] },
            });
        }
    }

    /// Everybody hears from each of our devices.
    pub(super) fn gossip_tick(&mut self, now: Now) {
        self.gossip_at = now.mono + GOSSIP_INTERVAL_MS;
        self.purge(now);
        let sessions: Vec<SessionId> = self
            .sessions
            .values()
            .filter(|session| session.kind != SessionKind::Relayed)
            .map(|session| session.id)
            .collect();
        for session in sessions {
            self.send_opening_advert(session, now);
        }
    }

    /// Verified adverts from a session.
    pub(super) fn gossip(&mut self, id: SessionId, adverts: Vec<PeerAdvert>, now: Now) {
        let Some(session) = self.sessions.get(&id) else { return };
        let remote = session.remote;
        let fronts = session.is_admitted() && !session.is_machine_local();
        if session.policy() == Policy::Observe {
            return;
        }
        for advert in adverts {
            let device = advert.device;
            if self.is_hosted(&device) {
                continue;
            }
            // Every peer speaks for itself; only another machine's daemon, once let in, fronts
            // others, and none that are here.
            if device != remote && (!fronts || self.is_here(&device)) {
                continue;
            }
            if self.needs_trust(id) && !self.takes_from_hub(id, &advert, now) {
                continue;
            }
            let known = self.directory.get(&device).is_some_and(|entry| entry.agent.is_some());
            let taken = self.directory.take(&advert, id, now.unix);
            if !known && self.directory.get(&device).is_some_and(|entry| entry.agent.is_some()) {
                self.log(LogEvent::new("agent_seen").with("agent", device));
            }
            if matches!(taken, Taken::Fresh | Taken::PresenceChanged) {
                self.judge_machine(device, now);
            }
            match taken {
                Taken::PresenceChanged if device == remote => self.presence_heard(device, now),
                Taken::PresenceChanged | Taken::Fresh if device != remote => {
                    self.presence_heard(device, now);
                    if self.is_hub(id) {
                        self.meet_through_hub(device, now);
                    }
                    self.relay_opened(device, now);
                }
                Taken::Refused => self.refuse(remote, "advert", "out_of_bounds"),
                _ => {}
            }
        }
    }

    /// Whether a device has a session on this machine: then nobody else tells us of it.
    pub(super) fn is_here(&self, device: &DeviceId) -> bool {
        self.remotes.contains_key(device)
            && self.sessions.values().any(|s| s.remote == *device && s.is_machine_local())
    }

    /// Which machine a device proves to be on, and what that machine calls itself. Judged when the
    /// advert came; a proof or claim that has run out since says nothing.
    pub(super) fn machine_of(
        &self,
        device: &DeviceId,
        now: Now,
    ) -> (Option<DeviceId>, Option<&str>) {
        match self.machines.get(device) {
            Some(held) if held.expires > now.unix => (Some(held.machine), held.name.as_deref()),
            _ => (None, None),
        }
    }

    fn judge_machine(&mut self, device: DeviceId, now: Now) {
        let agent = self.directory.get(&device).and_then(|entry| entry.agent.as_ref());
        let Some(proof) = agent.and_then(|agent| agent.machine.clone()) else {
            self.machines.remove(&device);
            return;
        };
        let claim = agent.and_then(|agent| agent.machine_name.clone());
        if self.machines.get(&device).is_some_and(|held| held.proof == proof && held.claim == claim)
        {
            return;
        }
        self.machines.remove(&device);
        let Ok(token) = token::parse_membership_proof(&proof) else { return };
        let context = token::VerifyContext {
            now: now.unix,
            bearer: Some(device),
            revocations: &self.revocations,
        };
        // The proof names its issuer, and its path must be the signer: nobody need be known.
        let Some(machine) = token.claims().map(|claims| claims.issuer) else { return };
        let Ok(verified) = token::verify_membership_proof(&token, &context, &machine) else {
            return;
        };
        let expires = verified.claims.expires;
        let name = claim
            .as_deref()
            .and_then(|claim| NameClaim::verify(claim, &machine, now.unix).ok())
            .map(|claim| claim.name);
        if self.machines.len() < directory::MAX_DEVICES {
            self.machines.insert(device, Machine { proof, claim, machine, name, expires });
        }
    }

    /// A peer's own advert states another presence than before.
    fn presence_heard(&mut self, device: DeviceId, now: Now) {
        let Some(presence) = self.directory.get(&device).and_then(|entry| entry.presence) else {
            return;
        };
        let Some(record) = self.replica.agent_mut(&device) else { return };
        if record.status == presence {
            return;
        }
        record.status = presence;
        record.version += 1;
        self.show_status(device, presence, now);
    }

    /// Presence as shown: a device that is neither here nor recently heard of is offline, whatever
    /// its record says.
    pub(super) fn effective_status(&self, device: &DeviceId, now: Now) -> AgentStatus {
        let stated = self.record(device).map(|record| record.status);
        if self.is_reachable(device) {
            return stated
                .or_else(|| self.directory.get(device).and_then(|entry| entry.presence))
                .unwrap_or(AgentStatus::Active);
        }
        match self.directory.get(device) {
            Some(entry)
                if !entry.is_stale(now.unix)
                    && (stated.is_none() || self.relay_for(device).is_some()) =>
            {
                entry.presence.unwrap_or(AgentStatus::Active)
            }
            _ => AgentStatus::Offline,
        }
    }

    /// Counts and reports a statement that was not taken.
    pub(super) fn refuse(&mut self, device: DeviceId, what: &'static str, reason: &'static str) {
        self.stats.refused += 1;
        // One line per doubling: a flood is visible and does not flood the log.
        if self.stats.refused.is_power_of_two() || self.stats.refused < 32 {
            self.log(
                LogEvent::new("statement_refused")
                    .with("device", device)
                    .with("what", what)
                    .with("reason", reason),
            );
        }
    }
}
