//! The peer table, who to dial and when, and the state of the well-known port
//! (`transport.md` 2 and 3.4). Decides; dials nothing itself.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::records::PeerInfo;
use crate::identity::device::DeviceId;

/// Peers in the table. A peer announced beyond it is refused until another has gone.
pub const MAX_PEERS: usize = 1024;
/// Dials in flight at the same time, so that a long peer list does not take every descriptor.
pub const MAX_DIALS_IN_FLIGHT: usize = 64;
/// First pause after a failed dial; doubles up to [`REDIAL_MAX_MS`].
pub const REDIAL_FIRST_MS: u64 = 500;
/// Longest pause between dials to one peer.
pub const REDIAL_MAX_MS: u64 = 30_000;
/// Failed dials in a row after which a peer without any session is forgotten; a beacon or a peer
/// list brings it back.
pub const DIALS_BEFORE_FORGETTING: u32 = 6;
/// Pause before a peer that answered with too large a frame is dialled again (decision 15).
pub const MISBEHAVED_PAUSE_MS: u64 = 600_000;
/// Pause between attempts at the well-known port while nothing answers there and it cannot be bound.
pub const PORT_RETRY_FIRST_MS: u64 = 200;
/// Longest such pause.
pub const PORT_RETRY_MAX_MS: u64 = 15_000;

/// Dialling state of one pair (device of ours, peer).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct DialState {
    in_flight: bool,
    open: bool,
    failures: u32,
    not_before: u64,
}

/// One peer.
#[derive(Clone, Debug)]
pub struct Peer {
    /// What is known of it.
    pub info: PeerInfo,
    /// Where to dial: `None` host is loopback.
    pub network: Option<IpAddr>,
    /// It has itself said so, over a session that is still open.
    by_itself: bool,
    dials: BTreeMap<DeviceId, DialState>,
}

/// Where our daemon stands with the well-known port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// Not begun, or shut down.
    Off,
    /// A bind attempt is under way.
    Binding,
    /// Taken by somebody; dialling them.
    Dialling,
    /// Ours.
    Holding,
    /// Somebody else's, and we are introduced to them.
    Joined {
        /// The holder.
        holder: DeviceId,
    },
    /// Occupied by something that does not answer as a peer; trying again later.
    Waiting {
        /// Monotonic ms.
        until: u64,
    },
}

/// A dial to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DialPlan {
    /// Our device.
    pub local: DeviceId,
    /// The peer expected there.
    pub peer: DeviceId,
    /// `None` is 127.0.0.1.
    pub host: Option<IpAddr>,
    /// TCP port.
    pub port: u16,
}

/// What noting a peer did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Noted {
    /// A new peer.
    New,
    /// A known one on another port or address: it has restarted.
    Moved,
    /// Nothing new.
    Known,
    /// No room, or unusable.
    Refused,
}

/// The peer table and the port.
#[derive(Debug)]
pub struct Formation {
    peers: BTreeMap<DeviceId, Peer>,
    port: PortState,
    port_failures: u32,
    in_flight: usize,
    local_addresses: BTreeSet<IpAddr>,
}

impl Default for Formation {
    fn default() -> Self {
        Self {
            peers: BTreeMap::new(),
            port: PortState::Off,
            port_failures: 0,
            in_flight: 0,
            local_addresses: BTreeSet::new(),
        }
    }
}

impl Formation {
    /// The addresses of this machine, by which a peer heard on the network is known to be local.
    pub fn set_local_addresses(&mut self, addresses: BTreeSet<IpAddr>) {
        self.local_addresses = addresses;
    }

    /// The address to dial for a peer heard from `host`: `None` (loopback) when that is us.
    #[must_use]
    pub fn network_host(&self, host: Option<IpAddr>) -> Option<IpAddr> {
        host.filter(|ip| !ip.is_loopback() && !self.local_addresses.contains(ip))
    }

    /// Notes where a peer can be dialled. `info.host` is replaced by what was really seen.
    pub fn note(&mut self, info: PeerInfo, host: Option<IpAddr>) -> Noted {
        let network = self.network_host(host);
        if info.port == 0 {
            return Noted::Refused;
        }
        if let Some(peer) = self.peers.get_mut(&info.id) {
            // A loopback way is never given up for one over the network.
            if peer.network.is_none() && network.is_some() {
                return Noted::Known;
            }
            let moved = peer.info.port != info.port || peer.network != network;
            peer.info = PeerInfo { host: network.map(|ip| ip.to_string()), ..info };
            peer.network = network;
            if moved {
                for dial in peer.dials.values_mut() {
                    dial.failures = 0;
                    dial.not_before = 0;
                    // An open dial to the old port will end by itself; the new one is wanted now.
                    dial.open = false;
                }
                return Noted::Moved;
            }
            return Noted::Known;
        }
        if self.peers.len() >= MAX_PEERS {
            return Noted::Refused;
        }
        let info = PeerInfo { host: network.map(|ip| ip.to_string()), ..info };
        self.peers
            .insert(info.id, Peer { info, network, by_itself: false, dials: BTreeMap::new() });
        Noted::New
    }

    /// The table, ordered by device.
    pub fn peers(&self) -> impl Iterator<Item = &Peer> {
        self.peers.values()
    }

    /// One peer.
    #[must_use]
    pub fn peer(&self, id: &DeviceId) -> Option<&Peer> {
        self.peers.get(id)
    }

    /// A peer has itself said where it listens: while a session with it lives, nobody else's word
    /// counts, which may be older.
    pub fn said_by_itself(&mut self, id: &DeviceId) {
        if let Some(peer) = self.peers.get_mut(id) {
            peer.by_itself = true;
        }
    }

    /// The last session with a peer has ended: it may come back elsewhere.
    pub fn gone(&mut self, id: &DeviceId) {
        if let Some(peer) = self.peers.get_mut(id) {
            peer.by_itself = false;
        }
    }

    /// Whether what somebody else says of a peer's port cannot be news: we have reached the port, or
    /// the peer has told us itself.
    #[must_use]
    pub fn is_settled(&self, id: &DeviceId) -> bool {
        self.peers
            .get(id)
            .is_some_and(|peer| peer.by_itself || peer.dials.values().any(|dial| dial.open))
    }

    /// Whether a device of ours has yet to try to reach a peer of this machine, or is at its first try.
    #[must_use]
    pub fn is_first_dial(&self, local: &DeviceId, id: &DeviceId) -> bool {
        let first = |dial: &DialState| dial.in_flight && dial.failures == 0;
        self.peers
            .get(id)
            .is_some_and(|peer| peer.network.is_none() && peer.dials.get(local).is_none_or(first))
    }

    /// Takes a peer out.
    pub fn forget(&mut self, id: &DeviceId) {
        if let Some(peer) = self.peers.remove(id) {
            self.in_flight -= peer.dials.values().filter(|dial| dial.in_flight).count();
        }
    }

    /// Forgets the dialling state of one of our devices.
    pub fn forget_local(&mut self, local: &DeviceId) {
        for peer in self.peers.values_mut() {
            if peer.dials.remove(local).is_some_and(|dial| dial.in_flight) {
                self.in_flight -= 1;
            }
        }
    }

    /// Dials due now for the given devices of ours; each is counted as in flight.
    pub fn take_due_dials(&mut self, locals: &[DeviceId], now: u64) -> Vec<DialPlan> {
        let mut plans = Vec::new();
        for peer in self.peers.values_mut() {
            if locals.contains(&peer.info.id) {
                continue;
            }
            for local in locals {
                if self.in_flight >= MAX_DIALS_IN_FLIGHT {
                    return plans;
                }
                let dial = peer.dials.entry(*local).or_default();
                if dial.open || dial.in_flight || dial.not_before > now {
                    continue;
                }
                dial.in_flight = true;
                self.in_flight += 1;
                plans.push(DialPlan {
                    local: *local,
                    peer: peer.info.id,
                    host: peer.network,
                    port: peer.info.port,
                });
            }
        }
        plans
    }

    /// When the next dial is due, if any waits for time to pass.
    #[must_use]
    pub fn next_dial(&self, locals: &[DeviceId]) -> Option<u64> {
        if self.in_flight >= MAX_DIALS_IN_FLIGHT {
            return None;
        }
        self.peers
            .values()
            .filter(|peer| !locals.contains(&peer.info.id))
            .flat_map(|peer| locals.iter().map(move |local| peer.dials.get(local)))
            .filter_map(|dial| match dial {
                None => Some(0),
                Some(dial) if dial.open || dial.in_flight => None,
                Some(dial) => Some(dial.not_before),
            })
            .min()
    }

    /// A dial has become a session.
    pub fn dialled(&mut self, local: &DeviceId, peer: &DeviceId) {
        if let Some(dial) = self.dial(local, peer) {
            let was = std::mem::replace(dial, DialState { open: true, ..DialState::default() });
            self.in_flight -= usize::from(was.in_flight);
        }
    }

    /// A dial failed. True when the peer should be forgotten: the caller does so if no session
    /// with it is left.
    pub fn dial_failed(&mut self, local: &DeviceId, peer: &DeviceId, now: u64) -> bool {
        let Some(dial) = self.dial(local, peer) else { return false };
        let was = dial.in_flight;
        dial.in_flight = false;
        dial.failures += 1;
        let pause = REDIAL_FIRST_MS << dial.failures.saturating_sub(1).min(10);
        dial.not_before = now + pause.min(REDIAL_MAX_MS);
        let hopeless = dial.failures >= DIALS_BEFORE_FORGETTING;
        self.in_flight -= usize::from(was);
        hopeless
    }

    /// A dialled session ended; dial again after `pause`.
    pub fn dial_ended(&mut self, local: &DeviceId, peer: &DeviceId, now: u64, pause: u64) {
        if let Some(dial) = self.dial(local, peer) {
            dial.open = false;
            dial.not_before = now + pause;
        }
    }

    fn dial(&mut self, local: &DeviceId, peer: &DeviceId) -> Option<&mut DialState> {
        self.peers.get_mut(peer)?.dials.get_mut(local)
    }

    // --- the well-known port ------------------------------------------------------------------

    /// Where we stand.
    #[must_use]
    pub fn port(&self) -> PortState {
        self.port
    }

    /// Moves to another state; success forgets earlier failures.
    pub fn set_port(&mut self, state: PortState) {
        if matches!(state, PortState::Holding | PortState::Joined { .. }) {
            self.port_failures = 0;
        }
        self.port = state;
    }

    /// Neither bound nor joined: wait, longer each time.
    pub fn port_failed(&mut self, now: u64) -> u64 {
        let pause = (PORT_RETRY_FIRST_MS << self.port_failures.min(10)).min(PORT_RETRY_MAX_MS);
        self.port_failures = self.port_failures.saturating_add(1);
        self.port = PortState::Waiting { until: now + pause };
        pause
    }

    /// How often in a row the port could be neither bound nor joined.
    #[must_use]
    pub fn port_failures(&self) -> u32 {
        self.port_failures
    }

    /// Whom to name as successor at the port: the peer first met, and the other peers
    /// (`transport.md` 3.4). Only peers on this machine can bind its port.
    #[must_use]
    pub fn successor(
        &self,
        reachable: impl Fn(&DeviceId) -> bool,
    ) -> Option<(DeviceId, Vec<PeerInfo>)> {
        let first = self
            .peers
            .values()
            .filter(|peer| peer.network.is_none() && reachable(&peer.info.id))
            .min_by(|a, b| (&a.info.started_at, a.info.id).cmp(&(&b.info.started_at, b.info.id)))?
            .info
            .id;
        let others =
            self.peers.values().filter(|p| p.info.id != first).map(|p| p.info.clone()).collect();
        Some((first, others))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u8) -> DeviceId {
        DeviceId([n; 32])
    }

    fn info(n: u8, port: u16) -> PeerInfo {
        PeerInfo { id: id(n), port, started_at: format!("2026-01-{n:02}"), host: None }
    }

    #[test]
    fn each_of_our_devices_dials_each_peer_once() {
        let mut f = Formation::default();
        f.note(info(9, 100), None);
        let plans = f.take_due_dials(&[id(1), id(2)], 0);
        assert_eq!(plans.len(), 2);
        assert!(f.take_due_dials(&[id(1), id(2)], 0).is_empty());
        f.dialled(&id(1), &id(9));
        f.dial_failed(&id(2), &id(9), 0);
        assert!(f.take_due_dials(&[id(1), id(2)], REDIAL_FIRST_MS - 1).is_empty());
        assert_eq!(f.next_dial(&[id(1), id(2)]), Some(REDIAL_FIRST_MS));
        assert_eq!(f.take_due_dials(&[id(1), id(2)], REDIAL_FIRST_MS)[0].local, id(2));
    }

    #[test]
    fn a_peer_on_a_new_port_is_dialled_at_once() {
        let mut f = Formation::default();
        f.note(info(9, 100), None);
        f.take_due_dials(&[id(1)], 0);
        f.dialled(&id(1), &id(9));
        assert_eq!(f.note(info(9, 100), None), Noted::Known);
        assert!(f.take_due_dials(&[id(1)], 1).is_empty());
        assert_eq!(f.note(info(9, 200), None), Noted::Moved);
        assert_eq!(f.take_due_dials(&[id(1)], 1)[0].port, 200);
    }

    #[test]
    fn a_port_is_settled_by_the_peers_word_or_by_reaching_it() {
        let mut f = Formation::default();
        f.note(info(9, 100), None);
        assert!(!f.is_settled(&id(9)) && !f.is_settled(&id(8)));
        f.said_by_itself(&id(9));
        assert!(f.is_settled(&id(9)));
        f.gone(&id(9));
        assert!(!f.is_settled(&id(9)));
        f.take_due_dials(&[id(1)], 0);
        f.dialled(&id(1), &id(9));
        assert!(f.is_settled(&id(9)));
        f.dial_ended(&id(1), &id(9), 0, 1);
        assert!(!f.is_settled(&id(9)));
    }

    #[test]
    fn our_own_addresses_are_dialled_over_loopback() {
        let mut f = Formation::default();
        let lan: IpAddr = "192.0.2.7".parse().unwrap();
        let other: IpAddr = "192.0.2.8".parse().unwrap();
        f.set_local_addresses(BTreeSet::from([lan]));
        f.note(info(9, 100), Some(lan));
        assert_eq!(f.take_due_dials(&[id(1)], 0)[0].host, None);
        // A broadcast copy of a local peer's beacon does not move it to the network.
        assert_eq!(f.note(info(9, 100), Some(other)), Noted::Known);
        f.note(info(8, 100), Some(other));
        assert_eq!(f.take_due_dials(&[id(1)], 0)[0].host, Some(other));
    }

    #[test]
    fn dials_in_flight_are_bounded() {
        let mut f = Formation::default();
        let locals: Vec<_> =
            (0..MAX_DIALS_IN_FLIGHT as u8 + 9).map(|n| DeviceId([n; 32])).collect();
        f.note(info(200, 1), None);
        assert_eq!(f.take_due_dials(&locals, 0).len(), MAX_DIALS_IN_FLIGHT);
        f.dialled(&locals[0], &id(200));
        assert_eq!(f.take_due_dials(&locals, 0).len(), 1);
    }

    #[test]
    fn the_table_is_bounded() {
        let mut f = Formation::default();
        for n in 0..MAX_PEERS {
            let mut bytes = [7; 32];
            bytes[..8].copy_from_slice(&(n as u64).to_be_bytes());
            let peer =
                PeerInfo { id: DeviceId(bytes), port: 1, started_at: String::new(), host: None };
            assert_eq!(f.note(peer, None), Noted::New);
        }
        assert_eq!(f.note(info(1, 1), None), Noted::Refused);
    }

    #[test]
    fn the_longest_known_peer_succeeds() {
        let mut f = Formation::default();
        f.note(info(3, 1), None);
        f.note(info(2, 1), None);
        f.note(info(1, 1), None);
        let (first, others) = f.successor(|peer| *peer != id(1)).unwrap();
        assert_eq!(first, id(2));
        assert_eq!(others.len(), 2);
    }
}
