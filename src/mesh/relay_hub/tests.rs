use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::codec::cbor::Value;
use crate::codec::time::UnixMillis;
use crate::identity::device::DeviceKey;

const BASE: u64 = 1_800_000_000_000;

fn at(seconds: u64) -> Now {
    Now { mono: seconds * 1000, unix: UnixMillis(BASE + seconds * 1000) }
}

/// Two links share an address.
fn source(link: u64) -> IpAddr {
    IpAddr::from([192, 0, 2, u8::try_from(link / 2).unwrap()])
}

fn open_link(hub: &mut RelayHub, link: u64, now: Now) {
    hub.opened(LinkId(link), source(link), now);
}

fn keys(count: usize) -> Vec<DeviceKey> {
    (0..count).map(|_| DeviceKey::generate().unwrap()).collect()
}

fn advert(key: &DeviceKey, seconds: u64) -> PeerAdvert {
    let seconds = i64::try_from(BASE / 1000 + seconds).unwrap();
    PeerAdvert::sign(key, Vec::new(), seconds, Vec::new())
}

fn drain(hub: &mut RelayHub) -> Vec<Outgoing> {
    std::iter::from_fn(|| hub.poll_output()).collect()
}

/// Links 0, 1, …, with a device each.
fn with_devices(keys: &[DeviceKey]) -> RelayHub {
    let mut hub = RelayHub::new(Limits::default());
    for (n, key) in keys.iter().enumerate() {
        let link = LinkId(n as u64);
        open_link(&mut hub, link.0, at(0));
        hub.frame(link, HubFrame::Gossip(vec![advert(key, 0)]), at(0));
    }
    drain(&mut hub);
    hub
}

fn gossip(hub: &mut RelayHub, link: u64, adverts: Vec<PeerAdvert>, now: Now) -> Vec<Outgoing> {
    hub.frame(LinkId(link), HubFrame::Gossip(adverts), now);
    drain(hub)
}

fn connect(
    hub: &mut RelayHub,
    link: u64,
    target: DeviceId,
    source: Option<DeviceId>,
) -> Vec<Outgoing> {
    hub.frame(LinkId(link), HubFrame::Connect { target, source }, at(1));
    drain(hub)
}

fn data(
    hub: &mut RelayHub,
    link: u64,
    to: Option<DeviceId>,
    from: Option<DeviceId>,
) -> Vec<Outgoing> {
    hub.frame(LinkId(link), HubFrame::Data { payload: vec![7], to, from }, at(1));
    drain(hub)
}

#[test]
fn adverts_go_to_all_others_and_the_newcomer_catches_up() {
    let keys = keys(3);
    let mut hub = RelayHub::new(Limits::default());
    for link in 0..3 {
        open_link(&mut hub, link, at(0));
    }
    // A link that has said nothing hears as well; who is alone gets no catch-up.
    let out = gossip(&mut hub, 0, vec![advert(&keys[0], 0)], at(0));
    assert_eq!(out.len(), 1);
    assert_eq!(out[0].to, [LinkId(1), LinkId(2)]);
    let out = gossip(&mut hub, 1, vec![advert(&keys[1], 0)], at(0));
    assert_eq!(out.len(), 2);
    assert_eq!(out[0].to, [LinkId(0), LinkId(2)]);
    assert_eq!(out[1].to, [LinkId(1)]);
    let Frame::Gossip { peers } = &out[1].frame else { panic!() };
    assert_eq!(peers.iter().map(|p| p.device).collect::<Vec<_>>(), [keys[0].id()]);
    // What was not accepted has no effect at all.
    assert!(gossip(&mut hub, 2, vec![advert(&keys[0], 0)], at(0)).is_empty());
    assert!(!hub.is_registered(LinkId(2)));
    // Not again with every gossip: the link has heard of all news since.
    let out = gossip(&mut hub, 1, vec![advert(&keys[1], 1)], at(1));
    assert_eq!(out.len(), 1);
    let later = CATCH_UP_INTERVAL_MS / 1000;
    assert_eq!(gossip(&mut hub, 1, vec![advert(&keys[1], later)], at(later)).len(), 2);
}

#[test]
fn a_device_belongs_to_the_link_with_its_newest_advert() {
    let keys = keys(2);
    let (a, b) = (keys[0].id(), keys[1].id());
    let mut hub = with_devices(&keys);
    open_link(&mut hub, 9, at(1));
    connect(&mut hub, 0, b, None);
    // As old from elsewhere: a replay. As old from the same link: taken.
    assert!(gossip(&mut hub, 9, vec![advert(&keys[1], 0)], at(1)).is_empty());
    assert_eq!(gossip(&mut hub, 1, vec![advert(&keys[1], 0)], at(1)).len(), 1);
    // Newer from elsewhere: the device has moved, and its pairings were the old link's.
    assert!(!gossip(&mut hub, 9, vec![advert(&keys[1], 2)], at(2)).is_empty());
    assert!(!hub.is_registered(LinkId(1)));
    assert!(data(&mut hub, 0, Some(b), None).is_empty());
    assert_eq!(connect(&mut hub, 0, b, None)[0].to, [LinkId(9)]);
    // Times that cannot be meant are not taken.
    for seconds in [3 * 24 * 3600, 0] {
        let now = at(if seconds == 0 { 2 * 24 * 3600 } else { 3 });
        assert!(gossip(&mut hub, 0, vec![advert(&keys[0], seconds)], now).is_empty());
    }
    assert_eq!(hub.stats().over_bounds, 2);
    assert!(hub.is_registered(LinkId(0)) && a != b);
}

#[test]
fn payloads_need_a_pairing_and_say_from_whom() {
    let keys = keys(3);
    let [a, b, c] = [keys[0].id(), keys[1].id(), keys[2].id()];
    let mut hub = with_devices(&keys);
    assert!(data(&mut hub, 0, Some(b), None).is_empty());
    let out = connect(&mut hub, 0, b, None);
    assert_eq!(out[0].frame, Frame::RelayInbound { source_device: a, target_device: Some(b) });
    assert_eq!(out[0].to, [LinkId(1)]);
    let out = data(&mut hub, 0, Some(b), None);
    assert_eq!(out[0].to, [LinkId(1)]);
    let delivered =
        |to, from| Frame::RelayData { payload: vec![7], to_device: to, from_device: Some(from) };
    assert_eq!(out[0].frame, delivered(Some(b), a));
    // The other way round without asking, and without saying to whom: the latest pairing.
    assert_eq!(data(&mut hub, 1, None, None)[0].frame, delivered(None, b));
    connect(&mut hub, 2, b, None);
    assert_eq!(data(&mut hub, 1, None, None)[0].to, [LinkId(2)]);
    assert_eq!(data(&mut hub, 1, Some(a), None)[0].to, [LinkId(0)]);
    // Nobody speaks for a device that is not behind its link.
    assert!(data(&mut hub, 2, Some(b), Some(a)).is_empty());
    assert!(connect(&mut hub, 2, b, Some(a)).is_empty());
    // Unknown, of the same link, or asked for by nobody in particular.
    assert!(connect(&mut hub, 0, DeviceId([9; 32]), None).is_empty());
    assert!(connect(&mut hub, 0, a, None).is_empty());
    open_link(&mut hub, 9, at(1));
    assert!(connect(&mut hub, 9, a, None).is_empty());
    // A link that has ended takes its devices and pairings along.
    hub.closed(LinkId(1));
    assert!(drain(&mut hub).is_empty());
    assert!(data(&mut hub, 0, Some(b), None).is_empty());
    assert_eq!(hub.stats().pairs, 0);
    assert_eq!(c, keys[2].id());
}

#[test]
fn one_link_fronts_many_devices() {
    let keys = keys(4);
    let ids: Vec<DeviceId> = keys.iter().map(DeviceKey::id).collect();
    let mut hub = RelayHub::new(Limits::default());
    open_link(&mut hub, 0, at(0));
    open_link(&mut hub, 1, at(0));
    gossip(&mut hub, 0, vec![advert(&keys[0], 0), advert(&keys[1], 0)], at(0));
    gossip(&mut hub, 1, vec![advert(&keys[2], 0), advert(&keys[3], 0)], at(0));
    connect(&mut hub, 0, ids[2], Some(ids[1]));
    // Without a name the end is the one that is paired, though not the link's own.
    let Frame::RelayData { from_device, .. } = data(&mut hub, 0, Some(ids[2]), None)[0].frame
    else {
        panic!()
    };
    assert_eq!(from_device, Some(ids[1]));
    assert!(data(&mut hub, 0, Some(ids[2]), Some(ids[0])).is_empty());
    assert!(data(&mut hub, 0, Some(ids[3]), Some(ids[1])).is_empty());
}

#[test]
fn pings_are_answered_and_everything_else_swallowed() {
    let mut hub = RelayHub::default();
    open_link(&mut hub, 0, at(0));
    hub.frame(LinkId(0), HubFrame::Ping, at(0));
    assert_eq!(drain(&mut hub)[0].frame, Frame::Pong);
    let key = DeviceKey::generate().unwrap();
    let forged = PeerAdvert { snapshot_seconds: 5, ..advert(&key, 0) };
    let HubFrame::Gossip(verified) = HubFrame::check(Frame::Gossip { peers: vec![forged] }) else {
        panic!()
    };
    assert!(verified.is_empty());
    for frame in [Frame::Pong, Frame::Close { reason: None }] {
        hub.frame(LinkId(0), HubFrame::check(frame), at(0));
    }
    assert!(drain(&mut hub).is_empty());
}

#[test]
fn no_link_has_more_than_its_share() {
    let keys = keys(6);
    let limits = Limits {
        devices_of_link: 2,
        devices: 4,
        advert_bytes: 600,
        pairs_of_link: 1,
        advert_burst: 4,
        advert_every_ms: 500,
        ..Limits::default()
    };
    let mut hub = RelayHub::new(limits);
    for link in 0..3 {
        open_link(&mut hub, link, at(0));
    }
    let all = |keys: &[DeviceKey]| keys.iter().map(|key| advert(key, 0)).collect::<Vec<_>>();
    gossip(&mut hub, 0, all(&keys[..3]), at(0));
    assert_eq!(hub.stats().devices, 2);
    gossip(&mut hub, 1, all(&keys[2..4]), at(0));
    gossip(&mut hub, 2, all(&keys[4..]), at(0));
    assert_eq!((hub.stats().devices, hub.is_registered(LinkId(2))), (4, false));
    let wide = vec![(Value::Text("x/y".into()), Value::Bytes(vec![0; 600]))];
    let seconds = i64::try_from(BASE / 1000 + 1).unwrap();
    let wide = PeerAdvert::sign(&keys[0], Vec::new(), seconds, wide);
    assert!(gossip(&mut hub, 0, vec![wide], at(1)).is_empty());
    // Pairings count for whoever asked.
    assert_eq!(connect(&mut hub, 0, keys[2].id(), None).len(), 1);
    assert!(connect(&mut hub, 0, keys[3].id(), None).is_empty());
    assert_eq!(connect(&mut hub, 1, keys[1].id(), None).len(), 1);
    // Adverts beyond the burst are not even verified until some time has passed.
    let before = hub.stats().over_bounds;
    assert!(hub.may_gossip(LinkId(1), 3, at(1)));
    assert!(!hub.may_gossip(LinkId(1), 2, at(1)));
    assert!(hub.may_gossip(LinkId(1), 1, at(1)) && !hub.may_gossip(LinkId(1), 1, at(1)));
    assert_eq!(hub.stats().over_bounds, before + 2);
    assert!(hub.may_gossip(LinkId(1), 2, at(2)) && !hub.may_gossip(LinkId(1), 1, at(2)));
    assert!(hub.may_gossip(LinkId(0), 4, at(2)), "its own affair");
    assert!(!hub.may_gossip(LinkId(0), 5, at(3600)), "never more than the burst");
}

#[test]
fn many_links_of_one_address_have_no_more_than_its_share() {
    let keys = keys(7);
    let of_one = advert(&keys[0], 0).to_value().encode().len();
    let limits = Limits {
        devices_of_source: 3,
        pairs_of_source: 2,
        advert_bytes_of_source: 3 * of_one + of_one / 2,
        ..Limits::default()
    };
    let mut hub = RelayHub::new(limits);
    // 0 and 1 have one address, 2 another.
    for link in 0..3 {
        open_link(&mut hub, link, at(0));
    }
    let all = |keys: &[DeviceKey]| keys.iter().map(|key| advert(key, 0)).collect::<Vec<_>>();
    gossip(&mut hub, 0, all(&keys[..2]), at(0));
    gossip(&mut hub, 1, all(&keys[2..4]), at(0));
    assert_eq!((hub.stats().devices, hub.stats().over_bounds), (3, 1));
    gossip(&mut hub, 2, all(&keys[4..]), at(0));
    assert_eq!(hub.stats().devices, 6, "another address is not touched by it");
    for (link, target, taken) in [(0, 4, 1), (1, 4, 1), (1, 5, 0), (2, 0, 1)] {
        assert_eq!(connect(&mut hub, link, keys[target].id(), None).len(), taken, "{link}");
    }
    // Within its share a longer advert fits, beyond it does not; what a link gives back is free.
    let wide = vec![(Value::Text("x/y".into()), Value::Bytes(vec![0; of_one]))];
    let seconds = i64::try_from(BASE / 1000 + 1).unwrap();
    let wide = PeerAdvert::sign(&keys[0], Vec::new(), seconds, wide);
    assert!(gossip(&mut hub, 0, vec![wide.clone()], at(1)).is_empty());
    hub.closed(LinkId(1));
    assert!(!gossip(&mut hub, 0, vec![wide], at(1)).is_empty());
    assert_eq!(connect(&mut hub, 0, keys[5].id(), None).len(), 1);
}

#[derive(Clone, Debug)]
enum Step {
    Open(u64),
    Close(u64),
    Gossip(u64, Vec<(usize, u64)>),
    Connect(u64, usize, Option<usize>),
    Data(u64, Option<usize>, Option<usize>),
    Ping(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let (link, device) = (0..5_u64, 0..8_usize);
    let some = || proptest::option::of(0..8_usize);
    let step = prop_oneof![
        2 => link.clone().prop_map(Step::Open),
        1 => link.clone().prop_map(Step::Close),
        4 => (link.clone(), proptest::collection::vec((device.clone(), 0..4_u64), 0..4))
            .prop_map(|(link, adverts)| Step::Gossip(link, adverts)),
        4 => (link.clone(), device, some()).prop_map(|(l, t, s)| Step::Connect(l, t, s)),
        4 => (link.clone(), some(), some()).prop_map(|(l, t, s)| Step::Data(l, t, s)),
        1 => link.prop_map(Step::Ping),
    ];
    proptest::collection::vec(step, 0..60)
}

proptest! {
    /// Whatever links do, in whatever order: the tables agree with each other and with a plain
    /// model of who is where, bounds hold, and a payload reaches only the link of a device that one
    /// of the two ends has asked to be paired with.
    #[test]
    fn the_tables_stay_true(steps in steps()) {
        let keys: Vec<DeviceKey> = (1..9_u8)
            .map(|n| DeviceKey::from_scalar(&[n; 32]).unwrap())
            .collect();
        let ids: Vec<DeviceId> = keys.iter().map(DeviceKey::id).collect();
        let mut adverts = BTreeMap::new();
        for (n, key) in keys.iter().enumerate() {
            for second in 0..4 {
                adverts.insert((n, second), advert(key, second));
            }
        }
        let limits = Limits {
            devices_of_link: 4, devices_of_source: 5, devices: 6,
            pairs_of_link: 3, pairs_of_source: 4, pairs: 6,
            ..Limits::default()
        };
        let mut hub = RelayHub::new(limits.clone());
        // What was asked for and not lost since: (device, device), either way round.
        let mut asked: BTreeSet<(DeviceId, DeviceId)> = BTreeSet::new();
        let mut open: BTreeSet<u64> = BTreeSet::new();
        for step in steps {
            match step {
                Step::Open(link) if open.insert(link) => open_link(&mut hub, link, at(0)),
                Step::Open(_) => {}
                Step::Close(link) => {
                    let gone: Vec<DeviceId> = hub.directory.iter()
                        .filter(|(_, held)| held.link == LinkId(link)).map(|(id, _)| *id).collect();
                    asked.retain(|(a, b)| !gone.contains(a) && !gone.contains(b));
                    open.remove(&link);
                    hub.closed(LinkId(link));
                }
                Step::Gossip(link, list) => {
                    let before: BTreeMap<DeviceId, LinkId> =
                        hub.directory.iter().map(|(id, held)| (*id, held.link)).collect();
                    let list = list.iter().map(|which| adverts[which].clone()).collect();
                    hub.frame(LinkId(link), HubFrame::Gossip(list), at(10));
                    for (device, was) in before {
                        if hub.directory.get(&device).map(|held| held.link) != Some(was) {
                            asked.retain(|(a, b)| *a != device && *b != device);
                        }
                    }
                }
                Step::Connect(link, target, source) => {
                    let own = hub.links.get(&LinkId(link)).and_then(|link| link.own);
                    let source = source.map(|n| ids[n]);
                    hub.frame(LinkId(link), HubFrame::Connect { target: ids[target], source }, at(10));
                    if let Some(source) = source.or(own) {
                        asked.insert((source, ids[target]));
                    }
                }
                Step::Data(link, to, from) => {
                    let frame = HubFrame::Data {
                        payload: vec![1], to: to.map(|n| ids[n]), from: from.map(|n| ids[n]),
                    };
                    hub.frame(LinkId(link), frame, at(10));
                }
                Step::Ping(link) => hub.frame(LinkId(link), HubFrame::Ping, at(10)),
            }
            for out in drain(&mut hub) {
                prop_assert!(out.to.iter().all(|link| open.contains(&link.0)));
                if let Frame::RelayData { from_device, to_device, .. } = &out.frame {
                    let from = from_device.unwrap();
                    prop_assert_eq!(hub.directory[&from].link, out.from);
                    prop_assert!(out.to[0] != out.from);
                    let theirs: Vec<DeviceId> = hub.directory.iter()
                        .filter(|(_, held)| held.link == out.to[0]).map(|(id, _)| *id).collect();
                    if let Some(to) = to_device {
                        prop_assert!(theirs.contains(to));
                    }
                    let mut paired = theirs
                        .iter()
                        .filter(|to| asked.contains(&(from, **to)) || asked.contains(&(**to, from)));
                    prop_assert!(paired.next().is_some());
                }
            }
            let bytes: usize = hub.directory.values().map(|held| held.bytes).sum();
            prop_assert_eq!(bytes, hub.advert_bytes);
            prop_assert!(hub.directory.len() <= limits.devices && hub.pairs.len() / 2 <= limits.pairs);
            for (id, link) in &hub.links {
                prop_assert!(link.devices.len() <= limits.devices_of_link);
                let made = hub.pairs.values().filter(|by| *by == id).count() / 2;
                prop_assert_eq!(made, link.pairs);
                prop_assert!(link.pairs <= limits.pairs_of_link);
                prop_assert_eq!(link.own.is_some(), !link.devices.is_empty());
                prop_assert!(link.devices.iter().all(|d| hub.directory[d].link == *id));
            }
            let addresses: BTreeSet<IpAddr> = open.iter().map(|link| source(*link)).collect();
            prop_assert!(hub.shares.keys().copied().eq(addresses));
            for (address, share) in &hub.shares {
                let of = |link: &LinkId| source(link.0) == *address;
                let held = hub.directory.values().filter(|held| of(&held.link));
                prop_assert_eq!(share.devices, held.clone().count());
                prop_assert_eq!(share.advert_bytes, held.map(|held| held.bytes).sum::<usize>());
                prop_assert_eq!(share.pairs, hub.pairs.values().filter(|by| of(by)).count() / 2);
                prop_assert!(share.devices <= limits.devices_of_source);
                prop_assert!(share.pairs <= limits.pairs_of_source);
            }
            for ((a, b), by) in &hub.pairs {
                prop_assert_eq!(hub.pairs.get(&(*b, *a)), Some(by));
                prop_assert!(hub.directory[a].link != hub.directory[b].link);
            }
        }
    }
}
