//! Discovery by beacons as values (`transport.md` 4): who was heard lately, and how far this machine
//! makes itself known. Sends nothing itself; nothing that is heard here is proven.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use serde::{Deserialize, Serialize};

use super::first_contact::{BEACON_INTERVAL_MS, Datagram, beacon_name};
use crate::identity::device::DeviceId;

/// How long somebody counts as heard: three beacons, of which two may be lost.
pub const HEARD_FOR_MS: u64 = 3 * BEACON_INTERVAL_MS;
/// Whoever is remembered; the one that was heard least lately makes room.
pub const MAX_HEARD: usize = 256;
/// Those of one other machine, so that one cannot drive all the others out. (An address is easily
/// forged: this keeps mistakes apart, not attackers.)
pub const MAX_HEARD_OF_HOST: usize = 32;

/// How far this machine makes itself known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Visibility {
    /// It announces itself.
    #[default]
    Discoverable,
    /// It answers who asks.
    Quiet,
    /// Neither; and it follows no beacon, which would show it to whoever has sent that.
    Dark,
}

/// Where datagrams go to and come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// This machine's programs, by the group on loopback.
    Loopback,
    /// The networks that it is in, by broadcast.
    Network,
}

/// One thing for each side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sides<T> {
    /// For this machine's programs.
    pub loopback: T,
    /// For the networks.
    pub network: T,
}

impl<T: Copy> Sides<T> {
    /// That of one side.
    pub fn of(&self, side: Side) -> T {
        match side {
            Side::Loopback => self.loopback,
            Side::Network => self.network,
        }
    }

    /// Sets that of one side, or both.
    pub fn set(&mut self, side: Option<Side>, value: T) {
        if side != Some(Side::Network) {
            self.loopback = value;
        }
        if side != Some(Side::Loopback) {
            self.network = value;
        }
    }
}

/// Somebody who was heard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Where the beacon came from; loopback for this machine.
    pub host: IpAddr,
    /// The port that it names.
    pub port: u16,
    /// The name in it, where there is one that can be shown.
    pub name: Option<String>,
    /// The device that it names.
    pub device: Option<DeviceId>,
    /// How long ago it came.
    pub ago_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    Device(DeviceId),
    Advert(u16, String),
}

/// Who was heard lately.
#[derive(Debug, Default)]
pub struct Heard(BTreeMap<(IpAddr, Who), (u16, u64)>);

impl Heard {
    /// Takes note of a datagram from `host` (none: this machine) at a monotonic time. A port of 0, which
    /// tells of presence alone, leads nowhere and is left out.
    pub fn note(&mut self, host: Option<IpAddr>, datagram: &Datagram, now: u64) {
        let (who, port) = match datagram {
            Datagram::Beacon { peer, port } => (Who::Device(*peer), *port),
            Datagram::Advert { name, port } => (Who::Advert(*port, name.clone()), *port),
            Datagram::Probe => return,
        };
        if port == 0 {
            return;
        }
        self.forget(now);
        let key = (host.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)), who);
        if !self.0.contains_key(&key) {
            let of_host = self.0.keys().filter(|(of, _)| *of == key.0).count();
            if host.is_some() && of_host >= MAX_HEARD_OF_HOST {
                self.make_room(|of| *of == key.0);
            } else if self.0.len() >= MAX_HEARD {
                self.make_room(|_| true);
            }
        }
        self.0.insert(key, (port, now));
    }

    /// Those who were, the newest first.
    pub fn list(&mut self, now: u64) -> Vec<Found> {
        self.forget(now);
        let mut list: Vec<Found> = self
            .0
            .iter()
            .map(|((host, who), (port, at))| {
                let (name, device) = match who {
                    Who::Device(device) => (Some(beacon_name(device)), Some(*device)),
                    Who::Advert(_, name) => ((!name.is_empty()).then(|| name.clone()), None),
                };
                let ago_ms = now.saturating_sub(*at);
                Found { host: *host, port: *port, name, device, ago_ms }
            })
            .collect();
        list.sort_by_key(|found| found.ago_ms);
        list
    }

    fn forget(&mut self, now: u64) {
        self.0.retain(|_, (_, at)| now.saturating_sub(*at) < HEARD_FOR_MS);
    }

    fn make_room(&mut self, among: impl Fn(&IpAddr) -> bool) {
        let candidates = self.0.iter().filter(|((host, _), _)| among(host));
        let oldest = candidates.min_by_key(|(_, (_, at))| *at).map(|(key, _)| key.clone());
        if let Some(key) = oldest {
            self.0.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn advert(name: &str, port: u16) -> Datagram {
        Datagram::Advert { name: name.into(), port }
    }

    fn beacon(n: u8, port: u16) -> Datagram {
        Datagram::Beacon { peer: DeviceId([n; 32]), port }
    }

    fn host(n: u8) -> Option<IpAddr> {
        Some(IpAddr::from([192, 0, 2, n]))
    }

    #[test]
    fn beacons_and_advertisements_are_heard_until_they_have_stopped() {
        let mut heard = Heard::default();
        heard.note(None, &beacon(0xab, 1000), 0);
        heard.note(host(1), &advert("shop", 19876), 10);
        heard.note(host(1), &advert("", 7), 20);
        heard.note(host(1), &Datagram::Probe, 30);
        heard.note(host(1), &beacon(2, 0), 30);
        // Restarted on another port it is the same.
        heard.note(None, &beacon(0xab, 2000), 40);
        let list = heard.list(50);
        let seen: Vec<_> = list.iter().map(|f| (f.host.to_string(), f.port, f.ago_ms)).collect();
        let expected = [("127.0.0.1", 2000, 10), ("192.0.2.1", 7, 30), ("192.0.2.1", 19876, 40)];
        assert_eq!(seen, expected.map(|(host, port, ago)| (host.to_owned(), port, ago)));
        assert_eq!(list[0].name.as_deref(), Some("agent-comms-abababab"));
        assert_eq!(list[0].device, Some(DeviceId([0xab; 32])));
        assert_eq!((list[1].name.as_deref(), list[1].device), (None, None));
        assert_eq!(list[2].name.as_deref(), Some("shop"));
        assert_eq!(heard.list(10 + HEARD_FOR_MS).len(), 2);
        assert_eq!(heard.list(40 + HEARD_FOR_MS), []);
    }

    #[test]
    fn one_machine_does_not_drive_the_others_out_and_all_have_a_bound() {
        let mut heard = Heard::default();
        heard.note(host(1), &advert("first", 1), 0);
        for port in 1..=1000 {
            heard.note(host(2), &advert("flood", port), u64::from(port));
        }
        let list = heard.list(1000);
        assert_eq!(list.len(), MAX_HEARD_OF_HOST + 1);
        assert_eq!(list[0].port, 1000);
        assert!(list.iter().any(|found| found.name.as_deref() == Some("first")));
        for n in 0..=255 {
            for port in 1..=4 {
                heard.note(host(n), &advert("all", port), 2000);
            }
        }
        assert_eq!(heard.list(2000).len(), MAX_HEARD);
        // What was heard least lately made room.
        assert!(heard.list(2000).iter().all(|found| found.name.as_deref() == Some("all")));
    }
}
