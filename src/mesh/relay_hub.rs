//! The relay hub, sans-I/O: which device is behind which link, who is paired with whom, and what
//! goes where (`wire.md` "Relay hub"). It forwards adverts and sealed payloads and understands
//! neither; it has no identity and never answers but to a ping. Optional parts of the reference's
//! hub that are not here: mailboxes, uplinks, a gate, a policy on extensions.
//!
//! The reference's hub has no bounds; ours has one on everything, and what is over one is not taken,
//! silently as the protocol is. No link, and no address by opening many links, can use up what
//! others have.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use super::records::Now;
use super::wire::advert::PeerAdvert;
use super::wire::frame::Frame;
use crate::identity::device::DeviceId;

/// Least time between two adverts held for all others, sent to one link. The reference sends them
/// after every gossip; a peer that has been told once hears of all news anyway.
pub const CATCH_UP_INTERVAL_MS: u64 = 60_000;
/// How far an advert's time may be from ours. One far ahead could never be replaced from another
/// link, and an old one may be a recording.
pub const MAX_ADVERT_SKEW_MS: u64 = 24 * 3600 * 1000;
/// Bytes of adverts in one frame to a link.
const MAX_GOSSIP_BYTES: usize = 256 * 1024;

/// Names a link for the lifetime of the hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u64);

/// The bounds of the tables.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Devices of one link: a daemon fronts all its agents by one.
    pub devices_of_link: usize,
    /// Devices of all links of one address: a team behind one router. A quarter of all.
    pub devices_of_source: usize,
    /// Devices in all.
    pub devices: usize,
    /// Encoded bytes of one advert; real ones are about 2 kB.
    pub advert_bytes: usize,
    /// Encoded bytes of the adverts of one address. A quarter of all.
    pub advert_bytes_of_source: usize,
    /// Encoded bytes of all adverts held.
    pub advert_bytes_total: usize,
    /// Pairings that one link has asked for and that hold.
    pub pairs_of_link: usize,
    /// Of these, all that links of one address have asked for. A quarter of all.
    pub pairs_of_source: usize,
    /// Pairings in all.
    pub pairs: usize,
    /// Adverts of one link taken at once, before [`Limits::advert_every_ms`] counts.
    pub advert_burst: u64,
    /// Time in which a link may send one more. A device gossips every 20 s, and when something
    /// changes; each costs a signature check and goes to every other link.
    pub advert_every_ms: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            devices_of_link: 256,
            devices_of_source: 1_024,
            devices: 4_096,
            advert_bytes: 8 * 1024,
            advert_bytes_of_source: 1024 * 1024,
            advert_bytes_total: 4 * 1024 * 1024,
            // Each agent behind the link with 16 others.
            pairs_of_link: 4_096,
            pairs_of_source: 65_536,
            pairs: 262_144,
            advert_burst: 512,
            // A link full of devices, each gossiping in its turn.
            advert_every_ms: 60,
        }
    }
}

/// A frame as far as a hub reads it, its adverts verified.
#[derive(Clone, Debug)]
pub enum HubFrame {
    /// Adverts that verify.
    Gossip(Vec<PeerAdvert>),
    /// Asks for a pairing.
    Connect {
        /// With whom.
        target: DeviceId,
        /// On behalf of whom.
        source: Option<DeviceId>,
    },
    /// Something for a paired device.
    Data {
        /// Not for us to read.
        payload: Vec<u8>,
        /// For whom; without, the latest pairing.
        to: Option<DeviceId>,
        /// On behalf of whom.
        from: Option<DeviceId>,
    },
    /// A sign of life is wanted.
    Ping,
    /// Everything else, which a hub swallows.
    Other,
}

impl HubFrame {
    /// Reads a frame and verifies the adverts in it; this costs a signature check each.
    #[must_use]
    pub fn check(frame: Frame) -> Self {
        match frame {
            Frame::Gossip { peers } => {
                Self::Gossip(peers.into_iter().filter(|advert| advert.verify().is_ok()).collect())
            }
            Frame::RelayConnect { target_device, source_device } => {
                Self::Connect { target: target_device, source: source_device }
            }
            Frame::RelayData { payload, to_device, from_device } => {
                Self::Data { payload, to: to_device, from: from_device }
            }
            Frame::Ping => Self::Ping,
            _ => Self::Other,
        }
    }
}

/// A frame for links.
#[derive(Clone, Debug)]
pub struct Outgoing {
    /// Where.
    pub to: Vec<LinkId>,
    /// What.
    pub frame: Frame,
    /// The link that it comes from, whose share of the receiver's queue it takes.
    pub from: LinkId,
}

/// Numbers for the operator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Open links.
    pub links: usize,
    /// Devices behind them.
    pub devices: usize,
    /// Pairings.
    pub pairs: usize,
    /// Payloads passed on.
    pub relayed: u64,
    /// Adverts, pairings and payloads not taken because of a bound.
    pub over_bounds: u64,
    /// Payloads for nobody: no pairing, or its other end has gone.
    pub undeliverable: u64,
}

struct Held {
    advert: PeerAdvert,
    bytes: usize,
    link: LinkId,
    /// Position in the directory, kept while the device is in it.
    order: u64,
}

/// What the links of one address hold together.
#[derive(Default)]
struct Share {
    links: usize,
    devices: usize,
    advert_bytes: usize,
    pairs: usize,
}

struct Link {
    source: IpAddr,
    devices: BTreeSet<DeviceId>,
    own: Option<DeviceId>,
    /// Our end and the other of the newest pairing.
    latest: Option<(DeviceId, DeviceId)>,
    /// Pairings that this link has asked for.
    pairs: usize,
    /// Adverts it may send, and since when that number holds (monotonic ms).
    allowance: u64,
    allowance_at: u64,
    caught_up_at: Option<u64>,
}

/// The hub.
#[derive(Default)]
pub struct RelayHub {
    limits: Limits,
    links: BTreeMap<LinkId, Link>,
    shares: BTreeMap<IpAddr, Share>,
    directory: BTreeMap<DeviceId, Held>,
    /// Both ways round, with the link that asked.
    pairs: BTreeMap<(DeviceId, DeviceId), LinkId>,
    advert_bytes: usize,
    next_order: u64,
    outputs: VecDeque<Outgoing>,
    stats: Stats,
}

impl RelayHub {
    /// A hub without links.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// A link is there, from this address (IPv6: its /64).
    pub fn opened(&mut self, link: LinkId, source: IpAddr, now: Now) {
        let fresh = Link {
            source,
            devices: BTreeSet::new(),
            own: None,
            latest: None,
            pairs: 0,
            allowance: self.limits.advert_burst,
            allowance_at: now.mono,
            caught_up_at: None,
        };
        self.links.insert(link, fresh);
        self.shares.entry(source).or_default().links += 1;
    }

    /// A link has ended: its devices and pairings go with it, and nobody is told.
    pub fn closed(&mut self, link: LinkId) {
        let Some(ended) = self.links.get(&link) else { return };
        let (source, devices) = (ended.source, ended.devices.clone());
        for device in devices {
            self.forget(&device);
        }
        self.links.remove(&link);
        if let Some(share) = self.shares.get_mut(&source) {
            share.links -= 1;
            if share.links == 0 {
                self.shares.remove(&source);
            }
        }
    }

    /// Whether a device is behind this link.
    #[must_use]
    pub fn is_registered(&self, link: LinkId) -> bool {
        self.links.get(&link).is_some_and(|link| link.own.is_some())
    }

    /// Whether a link may send so many adverts now. To be asked before they are verified, which is
    /// what costs.
    pub fn may_gossip(&mut self, id: LinkId, adverts: usize, now: Now) -> bool {
        let Limits { advert_burst, advert_every_ms, .. } = self.limits;
        let Some(link) = self.links.get_mut(&id) else { return false };
        let gained = now.mono.saturating_sub(link.allowance_at) / advert_every_ms.max(1);
        link.allowance_at += gained * advert_every_ms;
        link.allowance = link.allowance.saturating_add(gained).min(advert_burst);
        match link.allowance.checked_sub(adverts as u64) {
            Some(left) => {
                link.allowance = left;
                true
            }
            None => {
                self.stats.over_bounds += 1;
                false
            }
        }
    }

    /// A frame from a link; for gossip after [`Self::may_gossip`].
    pub fn frame(&mut self, link: LinkId, frame: HubFrame, now: Now) {
        if !self.links.contains_key(&link) {
            return;
        }
        match frame {
            HubFrame::Gossip(adverts) => self.gossip(link, adverts, now),
            HubFrame::Connect { target, source } => self.connect(link, target, source),
            HubFrame::Data { payload, to, from } => self.data(link, payload, to, from),
            HubFrame::Ping => {
                self.outputs.push_back(Outgoing { to: vec![link], frame: Frame::Pong, from: link });
            }
            HubFrame::Other => {}
        }
    }

    /// The next frame to send, oldest first.
    #[must_use]
    pub fn poll_output(&mut self) -> Option<Outgoing> {
        self.outputs.pop_front()
    }

    /// Numbers as they are now.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats {
            links: self.links.len(),
            devices: self.directory.len(),
            pairs: self.pairs.len() / 2,
            ..self.stats
        }
    }

    // --- adverts ------------------------------------------------------------------------------

    fn gossip(&mut self, id: LinkId, adverts: Vec<PeerAdvert>, now: Now) {
        let accepted: Vec<PeerAdvert> =
            adverts.into_iter().filter(|advert| self.take(id, advert, now)).collect();
        if accepted.is_empty() {
            return;
        }
        self.name_own(id);
        let others: Vec<LinkId> = self.links.keys().copied().filter(|link| *link != id).collect();
        if !others.is_empty() {
            self.tell(&others, accepted, id);
        }
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.caught_up_at.is_some_and(|at| now.mono < at + CATCH_UP_INTERVAL_MS) {
            return;
        }
        link.caught_up_at = Some(now.mono);
        let mut held: Vec<&Held> = self.directory.values().filter(|h| h.link != id).collect();
        held.sort_by_key(|held| held.order);
        let adverts: Vec<PeerAdvert> = held.into_iter().map(|held| held.advert.clone()).collect();
        self.tell(&[id], adverts, id);
    }

    /// Whether an advert is taken: as new as the one held where the link holds the device, newer
    /// where another does.
    fn take(&mut self, id: LinkId, advert: &PeerAdvert, now: Now) -> bool {
        let bytes = advert.to_value().encode().len();
        let at = i128::from(advert.snapshot_seconds) * 1000;
        let skew = (at - i128::from(now.unix.0)).unsigned_abs();
        if bytes > self.limits.advert_bytes || skew > u128::from(MAX_ADVERT_SKEW_MS) {
            self.stats.over_bounds += 1;
            return false;
        }
        let held = self.directory.get(&advert.device);
        let before = held.map(|held| (held.link, held.order, held.bytes));
        let newer = held.is_none_or(|held| {
            advert.snapshot_seconds > held.advert.snapshot_seconds
                || (held.link == id && advert.snapshot_seconds == held.advert.snapshot_seconds)
        });
        if !newer {
            return false;
        }
        let freed = before.map_or(0, |(.., bytes)| bytes);
        let joins = before.is_none_or(|(link, ..)| link != id);
        let Some(link) = self.links.get(&id) else { return false };
        let Some(share) = self.shares.get(&link.source) else { return false };
        // What another link of the same address gives up counts as taken until it has moved.
        let own = if joins { 0 } else { freed };
        let crowded = link.devices.len() >= self.limits.devices_of_link
            || share.devices >= self.limits.devices_of_source;
        if (joins && crowded)
            || (before.is_none() && self.directory.len() >= self.limits.devices)
            || share.advert_bytes - own + bytes > self.limits.advert_bytes_of_source
            || self.advert_bytes - freed + bytes > self.limits.advert_bytes_total
        {
            self.stats.over_bounds += 1;
            return false;
        }
        if joins && before.is_some() {
            self.forget(&advert.device);
        }
        self.advert_bytes = self.advert_bytes - own + bytes;
        if let Some(share) = self.share(id) {
            share.devices += usize::from(joins);
            share.advert_bytes = share.advert_bytes - own + bytes;
        }
        let order = before.map_or_else(
            || {
                self.next_order += 1;
                self.next_order
            },
            |(_, order, _)| order,
        );
        let held = Held { advert: advert.clone(), bytes, link: id, order };
        self.directory.insert(advert.device, held);
        if let Some(link) = self.links.get_mut(&id) {
            link.devices.insert(advert.device);
        }
        true
    }

    /// What the address of a link holds.
    fn share(&mut self, link: LinkId) -> Option<&mut Share> {
        self.shares.get_mut(&self.links.get(&link)?.source)
    }

    /// The link's own device is the one of its devices that is longest in the directory.
    fn name_own(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(&id) else { return };
        link.own = link
            .devices
            .iter()
            .filter_map(|device| Some((self.directory.get(device)?.order, *device)))
            .min()
            .map(|(_, device)| device);
    }

    fn tell(&mut self, to: &[LinkId], adverts: Vec<PeerAdvert>, from: LinkId) {
        let (mut part, mut bytes) = (Vec::new(), 0);
        let mut parts = Vec::new();
        for advert in adverts {
            let size = self.directory.get(&advert.device).map_or(0, |held| held.bytes);
            if bytes + size > MAX_GOSSIP_BYTES && !part.is_empty() {
                parts.push(std::mem::take(&mut part));
                bytes = 0;
            }
            bytes += size;
            part.push(advert);
        }
        if !part.is_empty() {
            parts.push(part);
        }
        for peers in parts {
            let frame = Frame::Gossip { peers };
            self.outputs.push_back(Outgoing { to: to.to_vec(), frame, from });
        }
    }

    /// Takes a device out of the directory, with its pairings.
    fn forget(&mut self, device: &DeviceId) {
        let Some(held) = self.directory.remove(device) else { return };
        self.advert_bytes -= held.bytes;
        if let Some(share) = self.share(held.link) {
            share.devices -= 1;
            share.advert_bytes -= held.bytes;
        }
        if let Some(link) = self.links.get_mut(&held.link) {
            link.devices.remove(device);
            if link.own == Some(*device) {
                link.own = None;
            }
        }
        self.name_own(held.link);
        let range = (*device, DeviceId([0; 32]))..=(*device, DeviceId([255; 32]));
        let of_device: Vec<_> = self.pairs.range(range).map(|(pair, by)| (*pair, *by)).collect();
        for ((ours, theirs), by) in of_device {
            self.pairs.remove(&(ours, theirs));
            self.pairs.remove(&(theirs, ours));
            if let Some(link) = self.links.get_mut(&by) {
                link.pairs -= 1;
            }
            if let Some(share) = self.share(by) {
                share.pairs -= 1;
            }
        }
    }

    // --- pairings and payloads ------------------------------------------------------------------

    fn connect(&mut self, id: LinkId, target: DeviceId, source: Option<DeviceId>) {
        let Some(link) = self.links.get(&id) else { return };
        let source = source.or(link.own);
        let there = self.directory.get(&target).map(|held| held.link);
        let (Some(source), Some(there)) = (source, there) else { return };
        if there == id || !link.devices.contains(&source) {
            return;
        }
        if !self.pairs.contains_key(&(source, target)) {
            let of_source = self.shares.get(&link.source).map_or(usize::MAX, |share| share.pairs);
            if link.pairs >= self.limits.pairs_of_link
                || of_source >= self.limits.pairs_of_source
                || self.pairs.len() / 2 >= self.limits.pairs
            {
                self.stats.over_bounds += 1;
                return;
            }
            self.pairs.insert((source, target), id);
            self.pairs.insert((target, source), id);
            if let Some(link) = self.links.get_mut(&id) {
                link.pairs += 1;
            }
            if let Some(share) = self.share(id) {
                share.pairs += 1;
            }
        }
        for (link, ends) in [(id, (source, target)), (there, (target, source))] {
            if let Some(link) = self.links.get_mut(&link) {
                link.latest = Some(ends);
            }
        }
        let frame = Frame::RelayInbound { source_device: source, target_device: Some(target) };
        self.outputs.push_back(Outgoing { to: vec![there], frame, from: id });
    }

    fn data(&mut self, id: LinkId, payload: Vec<u8>, to: Option<DeviceId>, from: Option<DeviceId>) {
        let ends = self.pairing(id, to, from);
        let there = ends.and_then(|(_, theirs)| self.directory.get(&theirs)).map(|held| held.link);
        let (Some((ours, _)), Some(there)) = (ends, there) else {
            self.stats.undeliverable += 1;
            return;
        };
        self.stats.relayed += 1;
        let frame = Frame::RelayData { payload, to_device: to, from_device: Some(ours) };
        self.outputs.push_back(Outgoing { to: vec![there], frame, from: id });
    }

    /// The pairing that a payload is for: our end and the other.
    fn pairing(
        &self,
        id: LinkId,
        to: Option<DeviceId>,
        from: Option<DeviceId>,
    ) -> Option<(DeviceId, DeviceId)> {
        let link = self.links.get(&id)?;
        let theirs = match to {
            Some(to) => to,
            None => link.latest?.1,
        };
        let paired = |ours: &DeviceId| {
            link.devices.contains(ours) && self.pairs.contains_key(&(*ours, theirs))
        };
        let latest = link.latest.filter(|(_, to)| *to == theirs).map(|(ours, _)| ours);
        let ours = match from {
            Some(from) => Some(from).filter(|from| paired(from)),
            None => latest
                .filter(&paired)
                .or(link.own.filter(&paired))
                .or_else(|| link.devices.iter().copied().find(&paired)),
        };
        ours.map(|ours| (ours, theirs))
    }
}

#[cfg(test)]
mod tests;
