//! Meshes of three to nine daemons through random trouble: loss, reordering, partitions, freezes,
//! crashes, clock jumps, failing storage, agents that come and go, while they found rooms and
//! write to each other. Once all is well again, and within a bounded time:
//!
//! * exactly one coordinator, accepted by all, and one holder of the port,
//! * one view of agents and of rooms with their members,
//! * nothing waits any more, and every message that a surviving daemon acknowledged or held has
//!   been shown to its recipient, or its author has been told why not. A durable daemon survives
//!   its crashes: it loses only what it had not said that it holds,
//! * nothing was ever shown twice to one incarnation of an agent, nor to any of them once its
//!   acknowledgement had been answered (the world watches that).
//!
//! `COMMSD_SIM_SEEDS=n` runs n seeds, `COMMSD_SIM_SEED=n` one of them.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use commsd::identity::device::DeviceId;
use commsd::mesh::events::{DeliveryEvent, DeliveryState};
use commsd::mesh::formation::PortState;
use commsd::mesh::node::{Command, CommandResult, OpId};
use commsd::mesh::records::{AgentStatus, RoomType};
use commsd::mesh::wire::room_path::RoomPath;
use commsd::store::Faults;

use super::rng::Rng;
use super::support::{all_see_all, dm, has_one_coordinator, is_full_mesh, to_room};
use super::world::{HostSpec, World, line};

/// Seeds run by default; the gate runs ten times as many.
const SEEDS: u64 = 200;
/// Seeds beyond them that have found a fault.
const FOUND: [u64; 1] = [1648];
/// The longest that trouble lasts.
const TROUBLE_MS: u64 = 90_000;
/// Everything has to be in order this long after the last trouble: a claim wait, a keepalive and
/// the longest pauses between dials and retries fit in.
const HEALING_MS: u64 = 180_000;

/// A message and what its author was told.
struct Sent {
    op: OpId,
    author: DeviceId,
    host: usize,
    life: u64,
    text: String,
    room: Option<RoomPath>,
}

/// One run.
struct Run {
    world: World,
    rng: Rng,
    sent: Vec<Sent>,
    /// Rooms in which membership was taken back, by whom it concerns.
    parted: BTreeSet<(RoomPath, DeviceId)>,
    ended: BTreeSet<RoomPath>,
    count: usize,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed.wrapping_mul(7919));
        let mut world = World::new(seed);
        world.answers_by_itself = true;
        world.net.latency = (1, rng.between(2, 30));
        world.net.datagram_loss = rng.between(0, 300);
        world.net.datagram_copies = rng.between(0, 200);
        world.net.datagram_jitter = rng.between(1, 60);
        // Small meshes are as instructive as large ones, and cheaper.
        let hosts = *rng.pick(&[3, 3, 3, 3, 4, 4, 4, 5, 5, 6, 7, 9]);
        let first_contact = rng.per_mille(850);
        // Those that store nothing lose everything in a crash, as the reference does.
        let durable_share = *rng.pick(&[0, 500, 1000, 1000]);
        for n in 0..hosts {
            let durable = rng.per_mille(durable_share);
            let host = world.host_as(HostSpec { first_contact, durable, ..HostSpec::default() });
            let agents = if rng.per_mille(200) { 2 } else { 1 };
            for m in 0..agents {
                world.agent(host, &format!("agent-{n}-{m}"));
            }
            let wait = rng.between(0, 3_000);
            world.at(wait, move |world| world.start(host));
        }
        Self {
            world,
            rng,
            sent: Vec::new(),
            parted: BTreeSet::new(),
            ended: BTreeSet::new(),
            count: 0,
        }
    }

    fn go(&mut self) {
        self.world.run(self.rng.between(1_000, 20_000));
        // A fixed trouble stays for a while.
        let faults = Faults {
            failing_per_mille: *self.rng.pick(&[0, 0, 50, 400]),
            slowest_ms: *self.rng.pick(&[0, 5, 200, 3_000]),
        };
        for host in 0..self.world.hosts.len() {
            self.world.set_faults(host, faults);
        }
        let end = self.world.now + self.rng.between(10_000, TROUBLE_MS);
        while self.world.now < end {
            let wait = self.rng.between(0, 2_000);
            self.world.run(wait);
            for _ in 0..self.rng.between(0, 3) {
                self.speak();
            }
            if self.rng.per_mille(350) {
                self.trouble();
            }
        }
        self.heal();
        self.converge();
        self.judge_messages();
    }

    /// Everything that happened, for one seed run by itself.
    fn dump(&self) {
        let mut lines: Vec<(u64, String)> = Vec::new();
        for (index, host) in self.world.hosts.iter().enumerate() {
            for (at, event) in &host.log {
                lines.push((*at, format!("{at:>9} h{index} {}", line(event))));
            }
        }
        lines.sort();
        for (_, line) in lines {
            println!("{line}");
        }
    }

    fn agents_up(&self) -> Vec<DeviceId> {
        let world = &self.world;
        let serves = |host: usize| world.is_up(host) && !world.is_leaving(host);
        world
            .slots
            .iter()
            .filter(|(_, slot)| slot.in_service && serves(slot.host))
            .map(|(id, _)| *id)
            .collect()
    }

    /// Somebody wants something.
    fn speak(&mut self) {
        let agents = self.agents_up();
        if agents.is_empty() {
            return;
        }
        let agent = *self.rng.pick(&agents);
        let everybody: Vec<DeviceId> = self.world.slots.keys().copied().collect();
        let other = *self.rng.pick(&everybody);
        let views = self.world.node_of(&agent).rooms(Some(&agent));
        let rooms: Vec<(RoomPath, bool)> = views
            .into_iter()
            .filter(|view| view.record.version > 0)
            .map(|view| (RoomPath::parse(&view.record.id).unwrap(), view.joined))
            .collect();
        let some_room = (!rooms.is_empty()).then(|| self.rng.pick(&rooms).clone());
        self.count += 1;
        let text = format!("{} of {}", self.count, agent.short());
        match (self.rng.below(12), some_room) {
            (0..=4, _) if other != agent => self.send(agent, dm(other, &text), text, None),
            (5, room) if room.is_none() || self.rng.per_mille(200) => {
                let kind = *self.rng.pick(&[RoomType::Public, RoomType::Public, RoomType::Private]);
                let name = format!("room-{}", self.rng.below(3));
                self.world
                    .command(agent, Command::CreateRoom { name, kind, description: String::new() });
            }
            (6..=8, Some((room, true))) => {
                self.send(agent, to_room(&room, &text), text, Some(room));
            }
            (6..=8, Some((room, false))) => {
                self.world.command(agent, Command::JoinRoom(room));
            }
            (9, Some((room, _))) => {
                self.world.command(agent, Command::Invite { room, agent: other });
            }
            (10, Some((room, _))) if self.rng.per_mille(500) => {
                self.parted.insert((room.clone(), other));
                self.world.command(agent, Command::Kick { room, agent: other });
            }
            (10, Some((room, _))) => {
                self.parted.insert((room.clone(), agent));
                self.world.command(agent, Command::LeaveRoom { room, reason: None });
            }
            (11, Some((room, _))) if self.rng.per_mille(200) => {
                self.ended.insert(room.clone());
                self.world.command(agent, Command::DestroyRoom(room));
            }
            _ => {
                let status = *self.rng.pick(&[AgentStatus::Busy, AgentStatus::Active]);
                let command = Command::Update {
                    name: None,
                    status: Some(status),
                    visibility: None,
                    tags: None,
                    consent: None,
                };
                self.world.command(agent, command);
            }
        }
    }

    fn send(&mut self, author: DeviceId, command: Command, text: String, room: Option<RoomPath>) {
        let host = self.world.slots[&author].host;
        let life = self.world.hosts[host].life;
        let op = self.world.command(author, command);
        self.sent.push(Sent { op, author, host, life, text, room });
    }

    /// Something breaks, for a while.
    fn trouble(&mut self) {
        let hosts = self.world.hosts.len();
        let host = self.rng.below(hosts);
        let up = self.world.is_up(host) && !self.world.is_leaving(host);
        let while_ms = self.rng.between(200, 40_000);
        match self.rng.below(9) {
            0 | 1 if up => {
                self.world.crash(host);
                self.world.at(while_ms, move |world| bring_up(world, host));
            }
            2 if up => {
                self.world.leave(host);
                self.world.at(while_ms + 3_000, move |world| bring_up(world, host));
            }
            3 => {
                let (mut left, mut right) = (Vec::new(), Vec::new());
                for host in 0..hosts {
                    if self.rng.per_mille(500) { left.push(host) } else { right.push(host) }
                }
                self.world.partition(&left, &right);
                let share = *self.rng.pick(&[0, 300, 1000]);
                self.world.break_cut_links(while_ms.min(20_000), share);
                self.world.at(while_ms, World::heal);
            }
            4 => {
                let other = self.rng.below(hosts);
                self.world.cut(host, other);
                self.world.at(while_ms, World::heal);
            }
            5 if up => self.world.pause(host, self.rng.between(100, 80_000)),
            6 => {
                let ms = self.rng.between(0, 6 * 3_600_000) as i64;
                let sign = if self.rng.per_mille(500) { 1 } else { -1 };
                self.world.jump_clock(host, sign * ms);
            }
            7 => {
                for _ in 0..self.rng.between(1, 4) {
                    self.world.break_some_link();
                }
            }
            8 => {
                let agents: Vec<DeviceId> = self.world.slots.keys().copied().collect();
                let agent = *self.rng.pick(&agents);
                let slot = &self.world.slots[&agent];
                if slot.in_service && !self.world.is_paused(slot.host) {
                    self.world.detach(agent);
                    self.world.at(while_ms, move |world| world.attach(agent));
                }
            }
            _ => {}
        }
    }

    /// All trouble ends.
    fn heal(&mut self) {
        self.world.heal();
        for host in 0..self.world.hosts.len() {
            self.world.set_faults(host, Faults::default());
            self.world.unpause(host);
        }
        self.world.net.datagram_loss = 0;
        // What was scheduled to come back does so within this time; the rest is brought up.
        self.world.run(5_000);
        self.world.run_until(60_000, "all that leave have left", |world| {
            (0..world.hosts.len()).all(|host| !world.is_up(host) || !world.is_leaving(host))
        });
        for host in 0..self.world.hosts.len() {
            bring_up(&mut self.world, host);
        }
        let away: Vec<DeviceId> =
            self.world.slots.iter().filter(|(_, s)| !s.in_service).map(|(id, _)| *id).collect();
        for agent in away {
            self.world.attach(agent);
        }
    }

    fn converge(&mut self) {
        let holds = |world: &World| {
            is_full_mesh(world)
                && all_see_all(world)
                && has_one_coordinator(world)
                && one_holder_of_the_port(world)
                && rooms_agree(world).is_ok()
                && nothing_waits(world)
        };
        let end = self.world.now + HEALING_MS;
        while self.world.now < end {
            // Looking closely costs more than the simulation itself.
            self.world.run(500);
            if holds(&self.world) {
                // And it stays so.
                self.world.run(20_000);
                if holds(&self.world) {
                    return;
                }
            }
        }
        let world = &self.world;
        let waiting: Vec<_> = world
            .running()
            .iter()
            .map(|host| {
                let status = world.node(*host).status();
                let claim = status.claim.map(|claim| (claim.term, claim.coordinator.short()));
                (status.outgoing, status.copies, claim, status.role_held, status.port)
            })
            .collect();
        panic!(
            "seed {}: no agreement: full mesh {}, all see all {}, one coordinator {}, port {}, \
             rooms {:?}, waiting {waiting:?}\n{}{}",
            world.seed,
            is_full_mesh(world),
            all_see_all(world),
            has_one_coordinator(world),
            one_holder_of_the_port(world),
            rooms_agree(world),
            views(world),
            world.tail()
        );
    }

    fn judge_messages(&self) {
        let world = &self.world;
        for sent in &self.sent {
            let Some(Ok(CommandResult::Sent { message_id, deliveries })) =
                world.replies.get(&sent.op)
            else {
                continue;
            };
            let reported: BTreeMap<DeviceId, Vec<&DeliveryState>> =
                world.slots[&sent.author]
                    .events()
                    .filter_map(|event| match event {
                        DeliveryEvent::DeliveryStatus {
                            message_id: id, agent, delivery, ..
                        } if id == message_id => Some((*agent, delivery)),
                        DeliveryEvent::MessagesRead { message_ids, agent, .. }
                            if message_ids.contains(message_id) =>
                        {
                            Some((*agent, &DeliveryState::Read))
                        }
                        _ => None,
                    })
                    .fold(BTreeMap::new(), |mut all, (agent, state)| {
                        all.entry(agent).or_insert_with(Vec::new).push(state);
                        all
                    });
            for delivery in deliveries {
                let recipient = delivery.agent;
                let mut states: Vec<&DeliveryState> = delivery.state.iter().collect();
                states.extend(reported.get(&recipient).into_iter().flatten());
                let shown = world.slots[&recipient].texts().contains(&sent.text);
                let delivered = states
                    .iter()
                    .any(|state| matches!(state, DeliveryState::Delivered | DeliveryState::Read));
                let given_up = states.iter().any(|state| {
                    matches!(
                        state,
                        DeliveryState::Refused { .. }
                            | DeliveryState::Dropped
                            | DeliveryState::Expired
                    )
                });
                let context = || {
                    format!(
                        "seed {}: {:?} to {recipient:?} ({message_id}): {states:?}\n{}",
                        world.seed,
                        sent.text,
                        world.about(message_id)
                    )
                };
                assert!(!delivered || shown, "acknowledged and not shown: {}", context());
                // The author's memory of it has survived, or somebody held a copy and has.
                let author_lives =
                    world.hosts[sent.host].life == sent.life || world.hosts[sent.host].spec.durable;
                let queued =
                    states.iter().any(|state| matches!(state, DeliveryState::Queued { .. }));
                let holder_lives = queued && self.is_held(&recipient, message_id);
                let parted = sent.room.as_ref().is_some_and(|room| {
                    self.ended.contains(room)
                        || self.parted.contains(&(room.clone(), recipient))
                        || self.parted.contains(&(room.clone(), sent.author))
                });
                assert!(
                    shown || given_up || parted || !(author_lives || holder_lives),
                    "lost: {}",
                    context()
                );
            }
        }
    }

    /// Whether a daemon that has not died since said that it holds a copy.
    fn is_held(&self, recipient: &DeviceId, message_id: &str) -> bool {
        self.world.hosts.iter().any(|host| {
            host.log.iter().any(|(at, event)| {
                event.name == "copy_held"
                    && *at >= host.started
                    && event.fields[0].1 == recipient.hex()
                    && event.fields[2].1 == message_id
            })
        })
    }
}

fn bring_up(world: &mut World, host: usize) {
    if !world.is_up(host) {
        world.start(host);
    }
}

fn one_holder_of_the_port(world: &World) -> bool {
    let states: Vec<PortState> =
        world.running().iter().map(|host| world.node(*host).status().port).collect();
    states.iter().filter(|state| **state == PortState::Holding).count() == 1
        && states.iter().all(|state| matches!(state, PortState::Holding | PortState::Joined { .. }))
}

/// Whether every daemon has the same public rooms with the same members, and of a private room
/// what its owner has.
fn rooms_agree(world: &World) -> Result<(), String> {
    let mut by_room: BTreeMap<String, BTreeMap<usize, (RoomType, BTreeSet<DeviceId>)>> =
        BTreeMap::new();
    for host in world.running() {
        for view in world.node(host).rooms(None) {
            if view.record.version > 0 {
                by_room
                    .entry(view.record.id.clone())
                    .or_default()
                    .insert(host, (view.record.kind, view.record.members.into_iter().collect()));
            }
        }
    }
    for (room, hosts) in by_room {
        let owner = RoomPath::parse(&room).unwrap().owner().unwrap();
        let at = world.slots[&owner].host;
        let short =
            |members: &BTreeSet<DeviceId>| members.iter().map(DeviceId::short).collect::<Vec<_>>();
        let tail = &room[64..];
        let Some((kind, members)) = hosts.get(&at) else {
            return Err(format!("h{at} has no {tail}, which {:?} have", hosts.keys()));
        };
        for (host, (_, theirs)) in &hosts {
            if theirs != members {
                return Err(format!(
                    "{tail} of h{at}: {:?}, at h{host}: {:?}",
                    short(members),
                    short(theirs)
                ));
            }
        }
        if *kind == RoomType::Public && hosts.len() != world.running().len() {
            return Err(format!("{tail} of h{at} is known to {:?} only", hosts.keys()));
        }
    }
    Ok(())
}

/// What each host has of agents and rooms, for a failure.
fn views(world: &World) -> String {
    let mut lines = String::new();
    for host in world.running() {
        for view in world.node(host).agents(None, world.clock(host)) {
            let record = view.record;
            lines += &format!(
                "h{host}: {} {} v{} {:?} {}\n",
                record.id.short(),
                record.name,
                record.version,
                record.status,
                record.started_at
            );
        }
    }
    for host in world.running() {
        for view in world.node(host).rooms(None) {
            let record = view.record;
            let stamps = |map: &BTreeMap<DeviceId, u64>| {
                map.iter().map(|(id, n)| format!("{}:{n}", &id.hex()[..4])).collect::<Vec<_>>()
            };
            lines += &format!(
                "h{host}: {}{} v{} {} joins {:?} leaves {:?}\n",
                record.owner.short(),
                &record.id[64..],
                record.version,
                record.created_at,
                stamps(&record.member_joins),
                stamps(&record.member_leaves)
            );
        }
    }
    for agent in super::support::in_service(world) {
        let asked: Vec<_> = world
            .node_of(&agent)
            .pending(&agent)
            .into_iter()
            .map(|pending| (pending.kind, pending.requester.short(), pending.at))
            .collect();
        if !asked.is_empty() {
            lines += &format!("{} is asked {asked:?}\n", agent.short());
        }
    }
    lines
}

fn nothing_waits(world: &World) -> bool {
    world.running().iter().all(|host| {
        let status = world.node(*host).status();
        status.outgoing == 0 && status.copies == 0
    })
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}: {text}")))
}

#[test]
fn every_seed_comes_to_rest() {
    if let Some(seed) = number("COMMSD_SIM_SEED") {
        let mut run = Run::new(seed);
        let result = catch_unwind(AssertUnwindSafe(|| run.go()));
        run.dump();
        if let Err(panic) = result {
            resume_unwind(panic);
        }
        return;
    }
    let seeds = number("COMMSD_SIM_SEEDS").unwrap_or(SEEDS);
    let seeds: Vec<u64> =
        (0..seeds).chain(FOUND.into_iter().filter(|found| *found >= seeds)).collect();
    let next = AtomicUsize::new(0);
    let failed: Mutex<Vec<u64>> = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let Some(seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)).copied()
                    else {
                        return;
                    };
                    if failed.lock().unwrap().len() >= 5 {
                        return;
                    }
                    if catch_unwind(AssertUnwindSafe(|| Run::new(seed).go())).is_err() {
                        println!(
                            "seed {seed} failed; again with: COMMSD_SIM_SEED={seed} cargo test \
                             --test protocol every_seed_comes_to_rest"
                        );
                        failed.lock().unwrap().push(seed);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "seeds that failed: {failed:?}");
}
