//! Gossip as held: the newest advert of each device, what it says of agents and rooms, and when
//! it counts as stale (`transport.md` 6, `rooms.md` 1.2). Takes verified adverts only.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::records::{AgentRecord, AgentStatus, RoomType, Visibility};
use super::session::SessionId;
use super::wire::advert::PeerAdvert;
use crate::codec::cbor::{self, Value};
use crate::codec::time::UnixMillis;
use crate::identity::device::DeviceId;

/// Time between gossip ticks.
pub const GOSSIP_INTERVAL_MS: u64 = 20_000;
/// An advert older than three ticks says nothing about presence any more.
pub const STALE_AFTER_MS: u64 = 60_000;
/// Adverts further ahead of our clock than this are not taken: they would win over every later
/// one of the device.
pub const MAX_FUTURE_MS: u64 = 24 * 3600 * 1000;
/// Devices remembered; the one refreshed longest ago makes room.
pub const MAX_DEVICES: usize = 2048;
/// Encoded bytes of one advert that are worth remembering; real ones are about 2 kB.
pub const MAX_ADVERT_BYTES: usize = 64 * 1024;
/// Rooms taken from one advert.
pub const MAX_HOSTED_ROOMS: usize = 256;

/// Extension keys of agent-comms.
pub mod key {
    /// active, idle, busy or offline.
    pub const PRESENCE: &str = "presence/status";
    /// Rooms the device owns.
    pub const ROOMS: &str = "room/hosted";
    /// The agent itself.
    pub const SELF: &str = "agent/self";
    /// Versions of agent-comms (and its cc-peer).
    pub const VERSION: &str = "agent-comms/version";
    /// Version of wire-mesh.
    pub const WIRE_VERSION: &str = "wire-mesh/version";
    /// Who the device is connected to.
    pub const TOPOLOGY: &str = "topology/peers";
    /// Ours: the version of commsd.
    pub const COMMSD: &str = "commsd/version";
}

/// `agent/self` as advertised. Only name and harness are required.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentSelf {
    /// Name (untrusted).
    pub name: String,
    /// Harness.
    pub harness: String,
    /// Working directory, when shared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Process id, when shared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i64>,
    /// Start time, when shared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<String>,
    /// Labels, when shared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tags: Option<Vec<String>>,
    /// Rooms, when shared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subscribed_rooms: Option<Vec<String>>,
    /// Proof of the user principal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub membership: Option<String>,
    /// Proof of the machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// Signed display name of the machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_name: Option<String>,
}

/// One entry of `room/hosted`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostedRoom {
    /// Room path.
    pub path: String,
    /// Name.
    pub name: String,
    /// Public or private; secret rooms are in no advert.
    #[serde(rename = "type", default)]
    pub kind: RoomType,
    /// What it is for, when shared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
}

/// What is held of one device.
#[derive(Clone, Debug)]
pub struct Entry {
    /// `snapshot-seconds`.
    pub seconds: i64,
    /// Session it last came over.
    pub via: SessionId,
    /// Presence it states.
    pub presence: Option<AgentStatus>,
    /// Agent it states.
    pub agent: Option<AgentSelf>,
    /// Rooms it states.
    pub rooms: Vec<HostedRoom>,
    /// agent-comms version.
    pub version: Option<String>,
    /// For a device of a commsd, the device of its daemon.
    pub daemon: Option<DeviceId>,
    /// Direct peers it states.
    pub direct: Vec<DeviceId>,
    /// Monotonic order of refreshes, for eviction.
    refreshed: u64,
}

impl Entry {
    /// Whether the advert is too old to tell presence.
    #[must_use]
    pub fn is_stale(&self, now: UnixMillis) -> bool {
        let at = u64::try_from(self.seconds).unwrap_or(0).saturating_mul(1000);
        now.since(UnixMillis(at)) > STALE_AFTER_MS
    }

    /// The agent as a record of version 0, if the device advertises one.
    #[must_use]
    pub fn agent_record(&self, id: DeviceId, now: UnixMillis) -> Option<AgentRecord> {
        let agent = self.agent.as_ref()?;
        let status = if self.is_stale(now) {
            AgentStatus::Offline
        } else {
            self.presence.unwrap_or(AgentStatus::Active)
        };
        Some(AgentRecord {
            id,
            version: 0,
            name: agent.name.clone(),
            harness: agent.harness.clone(),
            cwd: agent.cwd.clone().unwrap_or_default(),
            pid: agent.pid.unwrap_or(0),
            started_at: agent.started_at.clone().unwrap_or_default(),
            visibility: Visibility::Visible,
            status,
            tags: agent.tags.clone().unwrap_or_default(),
            subscribed_rooms: agent.subscribed_rooms.clone().unwrap_or_default(),
        })
    }
}

/// What taking an advert did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// Newer than what was held, and presence differs from what was held.
    PresenceChanged,
    /// Newer or as new.
    Fresh,
    /// Older than what is held: a replay or a detour.
    Old,
    /// Out of bounds.
    Refused,
}

/// Newest advert per device.
#[derive(Debug, Default)]
pub struct Directory {
    entries: BTreeMap<DeviceId, Entry>,
    counter: u64,
}

impl Directory {
    /// Takes a verified advert heard over `via`.
    pub fn take(&mut self, advert: &PeerAdvert, via: SessionId, now: UnixMillis) -> Taken {
        let future = i64::try_from(now.plus(MAX_FUTURE_MS).seconds()).unwrap_or(i64::MAX);
        if advert.snapshot_seconds > future || advert.to_value().encode().len() > MAX_ADVERT_BYTES {
            return Taken::Refused;
        }
        let held = self.entries.get(&advert.device);
        if held.is_some_and(|held| held.seconds > advert.snapshot_seconds) {
            return Taken::Old;
        }
        let before = held.map(|held| held.presence);
        if held.is_none() && self.entries.len() >= MAX_DEVICES {
            self.make_room();
        }
        self.counter += 1;
        let mut entry = read(advert, via, self.counter);
        // The plain advert at the start of a session carries no extensions: it refreshes the
        // time but does not take back what the device said of itself.
        let plain =
            advert.extension(key::PRESENCE).is_none() && advert.extension(key::VERSION).is_none();
        if let Some(held) = self.entries.get(&advert.device).filter(|_| plain) {
            let direct = std::mem::take(&mut entry.direct);
            entry = Entry {
                seconds: entry.seconds,
                via,
                refreshed: self.counter,
                direct,
                ..held.clone()
            };
        }
        let changed =
            before.is_none_or(|before| before != entry.presence) && entry.presence.is_some();
        self.entries.insert(advert.device, entry);
        if changed { Taken::PresenceChanged } else { Taken::Fresh }
    }

    /// Forgets the oldest of what came over the session that most came over: a peer that invents
    /// devices pushes out its own, not what others said.
    fn make_room(&mut self) {
        let mut from: BTreeMap<SessionId, usize> = BTreeMap::new();
        for entry in self.entries.values() {
            *from.entry(entry.via).or_default() += 1;
        }
        let Some((loudest, _)) = from.into_iter().max_by_key(|(_, count)| *count) else { return };
        let of_loudest = self.entries.iter().filter(|(_, entry)| entry.via == loudest);
        if let Some(oldest) = of_loudest.min_by_key(|(_, e)| e.refreshed).map(|(id, _)| *id) {
            self.entries.remove(&oldest);
        }
    }

    /// What is held of a device.
    #[must_use]
    pub fn get(&self, device: &DeviceId) -> Option<&Entry> {
        self.entries.get(device)
    }

    /// Everything held.
    pub fn iter(&self) -> impl Iterator<Item = (&DeviceId, &Entry)> {
        self.entries.iter()
    }

    /// Number of devices.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Forgets a device.
    pub fn remove(&mut self, device: &DeviceId) {
        self.entries.remove(device);
    }

    /// Whether a device says it is a commsd.
    #[must_use]
    pub fn is_commsd(&self, device: &DeviceId) -> bool {
        self.entries.get(device).is_some_and(|entry| entry.daemon.is_some())
    }
}

fn read(advert: &PeerAdvert, via: SessionId, refreshed: u64) -> Entry {
    let agent: Option<AgentSelf> =
        advert.extension(key::SELF).and_then(|value| cbor::from_value(value).ok());
    let rooms = match advert.extension(key::ROOMS) {
        Some(Value::Array(items)) => items
            .iter()
            .take(MAX_HOSTED_ROOMS)
            .filter_map(|item| cbor::from_value::<HostedRoom>(item).ok())
            .filter(|room| room.kind != RoomType::Secret)
            .collect(),
        _ => Vec::new(),
    };
    let direct = match advert.extension(key::TOPOLOGY).and_then(|value| value.get("direct")) {
        Some(Value::Array(items)) => items
            .iter()
            .take(MAX_HOSTED_ROOMS)
            .filter_map(|item| item.as_bytes().and_then(DeviceId::from_slice))
            .collect(),
        _ => Vec::new(),
    };
    Entry {
        seconds: advert.snapshot_seconds,
        via,
        presence: advert
            .extension(key::PRESENCE)
            .and_then(Value::as_text)
            .and_then(AgentStatus::parse),
        agent,
        rooms,
        version: advert
            .extension(key::VERSION)
            .and_then(|value| value.get("agentComms"))
            .and_then(Value::as_text)
            .map(str::to_owned),
        daemon: advert
            .extension(key::COMMSD)
            .and_then(|value| value.get("daemon"))
            .and_then(Value::as_text)
            .and_then(DeviceId::parse),
        direct,
        refreshed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::device::DeviceKey;

    #[test]
    fn who_invents_devices_pushes_out_its_own() {
        let template = PeerAdvert::sign(&DeviceKey::generate().unwrap(), Vec::new(), 1, Vec::new());
        // The directory takes what has been verified before: ids are enough here.
        let advert = |n: u64| {
            let mut id = [0; 32];
            id[..8].copy_from_slice(&n.to_be_bytes());
            PeerAdvert { device: DeviceId(id), ..template.clone() }
        };
        let mut directory = Directory::default();
        let now = UnixMillis(1_000);
        for n in 0..10 {
            directory.take(&advert(n), SessionId(n), now);
        }
        for n in 10..(2 * MAX_DEVICES as u64) {
            directory.take(&advert(n), SessionId(99), now);
        }
        assert_eq!(directory.len(), MAX_DEVICES);
        assert!((0..10).all(|n| directory.get(&advert(n).device).is_some()));
        assert!(directory.get(&advert(10).device).is_none());
    }
}
