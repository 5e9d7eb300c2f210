//! Two and more nodes with a relay hub between them, by hand: what goes over the hub is kept, and a
//! hub may be as false as it likes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use commsd::codec::time::UnixMillis;
use commsd::identity::device::{DeviceId, DeviceKey};
use commsd::identity::entropy::SeededEntropy;
use commsd::mesh::checked::Checked;
use commsd::mesh::directory::STALE_AFTER_MS;
use commsd::mesh::events::DeliveryEvent;
use commsd::mesh::node::{
    AddDevice, AgentSpec, Command, CommandError, CommandResult, DecisionTarget, DialId, DialTarget,
    HUB_REDIAL_MAX_MS, HubConfig, Input, Node, NodeConfig, OpId, Origination, Output, TrustList,
};
use commsd::mesh::records::{AgentStatus, Now, RoomType, Visibility};
use commsd::mesh::relay_hub::{HubFrame, Limits, LinkId, RelayHub};
use commsd::mesh::session::{Origin, SessionId};
use commsd::mesh::wire::frame::Frame;
use commsd::mesh::wire::room_path::RoomPath;
use commsd::mesh::wire::token::TokenCache;

/// Words that a hub must not see.
const CANARY: &str = "the-quick-canary-sings-at-dawn";
const NAMES: [&str; 3] = ["alice-in-the-office", "bob-at-home", "carol-on-the-train"];
const BASE: u64 = 1_800_000_000_000;

fn key(n: u8) -> DeviceKey {
    DeviceKey::from_scalar(&[n; 32]).unwrap()
}

/// A machine with one agent.
struct Machine {
    node: Node,
    agent: DeviceId,
    user: DeviceId,
    machine: DeviceId,
    session: Option<(SessionId, LinkId)>,
    tokens: TokenCache,
    dialled_at: Vec<u64>,
    events: Vec<DeliveryEvent>,
    replies: BTreeMap<OpId, Result<CommandResult, CommandError>>,
}

struct World {
    now: u64,
    machines: Vec<Machine>,
    hub: RelayHub,
    up: bool,
    next: u64,
    inputs: VecDeque<(usize, Input)>,
    /// Every frame to and from the hub, encoded, with the machine and whether it came from there.
    wire: Vec<(usize, bool, Vec<u8>)>,
}

impl World {
    fn new(count: usize) -> Self {
        Self::with(count, false)
    }

    fn with(count: usize, names: bool) -> Self {
        let mut world = Self {
            now: 0,
            machines: Vec::new(),
            hub: RelayHub::new(Limits::default()),
            up: true,
            next: 1,
            inputs: VecDeque::new(),
            wire: Vec::new(),
        };
        for (n, name) in NAMES.iter().enumerate().take(count) {
            let base = 10 * (u8::try_from(n).unwrap() + 1);
            let (user, machine, agent) = (key(base), key(base + 1), key(base + 2));
            let config = NodeConfig {
                port: 1,
                first_contact: false,
                network_port: None,
                version: "0".into(),
                pid: 1,
                user: Some(user.clone()),
                machine: Some(machine.clone()),
                machine_name: Some(format!("machine-of-{name}")),
                consent: commsd::mesh::records::ConsentPolicy::Ask,
                hub: Some(HubConfig { url: "wss://hub.test/".into(), names }),
            };
            let entropy = Box::new(SeededEntropy::new(u64::from(base)));
            let node = Node::new(config, key(base + 3), 2, entropy, world.clock());
            world.machines.push(Machine {
                node,
                agent: agent.id(),
                user: user.id(),
                machine: machine.id(),
                session: None,
                tokens: TokenCache::new(),
                dialled_at: Vec::new(),
                events: Vec::new(),
                replies: BTreeMap::new(),
            });
            world.inputs.push_back((n, Input::Start));
            let spec = spec_of(name);
            let add = AddDevice { key: agent, data_port: 3, agent: Some(spec) };
            world.inputs.push_back((n, Input::AddDevice(Box::new(add))));
        }
        world.settle();
        world
    }

    fn clock(&self) -> Now {
        Now { mono: self.now, unix: UnixMillis(BASE + self.now) }
    }

    fn id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn give(&mut self, machine: usize, input: Input) {
        self.inputs.push_back((machine, input));
        self.settle();
    }

    fn settle(&mut self) {
        for _ in 0..100_000 {
            let Some((machine, input)) = self.inputs.pop_front() else { return };
            let now = self.clock();
            self.machines[machine].node.handle(input, now);
            while let Some(output) = self.machines[machine].node.poll_output() {
                self.carry_out(machine, output);
            }
        }
        panic!("a storm: the nodes never come to rest");
    }

    fn carry_out(&mut self, at: usize, output: Output) {
        match output {
            Output::Dial { dial, target: DialTarget::Hub, .. } => self.dial_hub(at, dial),
            Output::Dial { dial, .. } => {
                self.inputs.push_back((at, Input::DialFailed { dial, reason: "refused" }));
            }
            Output::Send { session, frame } => {
                let Some((held, link)) = self.machines[at].session else { return };
                assert_eq!(session, held, "there is no other session");
                let bytes = frame.encode();
                self.wire.push((at, false, bytes.clone()));
                self.hub_hears(link, &bytes);
            }
            Output::Close { session, reason }
                if self.machines[at].session.is_some_and(|(held, _)| held == session) =>
            {
                self.cut(at, reason);
            }
            Output::BindPort => self.inputs.push_back((at, Input::PortBound)),
            Output::Commit { ticket, .. } => {
                self.inputs.push_back((at, Input::Committed(ticket)));
            }
            Output::SaveIdentity { ticket, .. } => {
                self.inputs.push_back((at, Input::IdentitySaved(ticket)));
            }
            Output::AgentEvent { event, .. } => {
                self.machines[at].events.push((*event).clone());
            }
            Output::Reply { op, result } => {
                self.machines[at].replies.insert(op, result);
            }
            _ => {}
        }
    }

    fn dial_hub(&mut self, at: usize, dial: DialId) {
        let now = self.now;
        self.machines[at].dialled_at.push(now);
        if !self.up {
            self.inputs.push_back((at, Input::DialFailed { dial, reason: "refused" }));
            return;
        }
        let (session, link) = (SessionId(self.id()), LinkId(self.id()));
        let address = IpAddr::from([192, 0, 2, u8::try_from(at).unwrap()]);
        self.hub.opened(link, address, self.clock());
        self.machines[at].session = Some((session, link));
        let (remote, origin) = (DeviceId([0; 32]), Origin::Network);
        self.inputs.push_back((at, Input::Dialled { dial, session, remote, origin }));
    }

    fn hub_hears(&mut self, link: LinkId, bytes: &[u8]) {
        let frame = Frame::decode(bytes).unwrap();
        if let Frame::Gossip { peers } = &frame
            && !self.hub.may_gossip(link, peers.len(), self.clock())
        {
            return;
        }
        let now = self.clock();
        self.hub.frame(link, HubFrame::check(frame), now);
        while let Some(out) = self.hub.poll_output() {
            for to in out.to {
                let at = self
                    .machines
                    .iter()
                    .position(|m| m.session.is_some_and(|(_, link)| link == to));
                if let Some(at) = at {
                    self.hub_says(at, out.frame.encode());
                }
            }
        }
    }

    /// Something comes from the hub, whether it has a right to it or not.
    fn hub_says(&mut self, at: usize, bytes: Vec<u8>) {
        let (session, _) = self.machines[at].session.expect("a session");
        let frame = Frame::decode(&bytes).unwrap();
        self.wire.push((at, true, bytes));
        let frame = Checked::check(frame, &mut self.machines[at].tokens);
        self.inputs.push_back((at, Input::Frame { session, frame }));
    }

    fn cut(&mut self, at: usize, reason: &'static str) {
        if let Some((session, link)) = self.machines[at].session.take() {
            self.hub.closed(link);
            self.inputs.push_back((at, Input::Closed { session, reason }));
        }
    }

    fn run(&mut self, ms: u64) {
        let until = self.now + ms;
        while self.now < until {
            self.now += 100;
            for at in 0..self.machines.len() {
                if self.machines[at].node.next_deadline() <= self.now {
                    self.inputs.push_back((at, Input::Tick));
                }
            }
            self.settle();
        }
    }

    fn trust(&mut self, at: usize, devices: &[usize]) {
        let devices: BTreeSet<DeviceId> =
            devices.iter().map(|other| self.machines[*other].agent).collect();
        self.give(at, Input::Trusted(TrustList { devices, ..TrustList::default() }));
    }

    fn command(&mut self, at: usize, command: Command) -> OpId {
        let (op, agent) = (OpId(self.id()), self.machines[at].agent);
        self.give(at, Input::Command { op, agent, command });
        op
    }

    fn dm(&mut self, from: usize, to: usize, text: &str) -> OpId {
        let to = self.machines[to].agent;
        let text = text.to_owned();
        let dm = Command::Dm { to, text, reply_to: None, behavior: None, wait_ms: 0 };
        self.command(from, dm)
    }

    fn received(&self, at: usize, text: &str) -> usize {
        let events = self.machines[at].events.iter();
        events
            .filter(
                |event| matches!(event, DeliveryEvent::Dm { message } if message.content == text),
            )
            .count()
    }

    /// Two machines trust each other and their agents have agreed to talk.
    fn befriended() -> Self {
        let mut world = Self::new(2);
        world.trust(0, &[1]);
        world.trust(1, &[0]);
        world.run(3_000);
        world.agree(0, 1);
        world
    }

    fn agree(&mut self, a: usize, b: usize) {
        self.dm(a, b, "may I");
        self.run(1_000);
        let path = RoomPath::dm(self.machines[a].agent, self.machines[b].agent).unwrap();
        let target = DecisionTarget::Pair(path, self.machines[a].agent);
        self.command(b, Command::Accept(target));
        self.run(1_000);
        assert_eq!(self.received(b, "may I"), 1);
    }

    fn names_seen(&self, at: usize) -> Vec<String> {
        let machine = &self.machines[at];
        let views = machine.node.agents(Some(&machine.agent), self.clock());
        views.into_iter().map(|view| view.record.name).collect()
    }

    fn saw(&self, word: &str) -> bool {
        self.wire
            .iter()
            .any(|(_, _, bytes)| bytes.windows(word.len()).any(|window| window == word.as_bytes()))
    }

    /// Hellos that a machine has sent, from a position on.
    fn hellos(&self, at: usize, since: usize) -> usize {
        let sent = self.wire.iter().skip(since).filter(|(from, by_hub, _)| *from == at && !by_hub);
        sent.filter(|(_, _, bytes)| is_hello(bytes)).count()
    }
}

fn spec_of(name: &str) -> AgentSpec {
    AgentSpec {
        name: name.into(),
        harness: format!("harness-of-{name}"),
        cwd: format!("/home/{name}"),
        key: format!("/home/{name}"),
        tokens: Vec::new(),
        services: Vec::new(),
        grants: Vec::new(),
        ephemeral: false,
        resumed: false,
    }
}

fn is_hello(bytes: &[u8]) -> bool {
    let Ok(Frame::RelayData { payload, .. }) = Frame::decode(bytes) else { return false };
    matches!(Frame::decode(&payload), Ok(Frame::SecureHello(_)))
}

#[test]
fn an_agent_that_has_just_come_is_heard_at_once() {
    let mut world = World::befriended();
    let fresh = key(90);
    let devices = BTreeSet::from([world.machines[0].agent, fresh.id()]);
    world.give(1, Input::Trusted(TrustList { devices, ..TrustList::default() }));
    world.run(100);
    let spec = spec_of("fresh");
    let (agent, to) = (fresh.id(), world.machines[1].agent);
    let add = AddDevice { key: fresh, data_port: 4, agent: Some(spec) };
    world.give(0, Input::AddDevice(Box::new(add)));
    let op = OpId(world.id());
    let text = "may I, too".to_owned();
    let command = Command::Dm { to, text, reply_to: None, behavior: None, wait_ms: 0 };
    world.give(0, Input::Command { op, agent, command });
    world.run(1_000);
    let asking = world.machines[1].node.pending(&to);
    assert_eq!(asking.iter().map(|asked| asked.requester).collect::<Vec<_>>(), [agent]);
}

#[test]
fn the_hub_is_left_alone_until_somebody_is_trusted() {
    let mut world = World::new(2);
    world.run(120_000);
    assert!(world.machines.iter().all(|machine| machine.dialled_at.is_empty()));
    assert!(world.wire.is_empty());
    world.trust(0, &[1]);
    world.run(1_000);
    assert!(world.machines[0].session.is_some() && world.machines[1].session.is_none());
    // Nobody trusted any more, no agent, or only one that does not want to exist: no session.
    world.give(0, Input::Trusted(TrustList::default()));
    world.run(1_000);
    assert!(world.machines[0].session.is_none());
    world.trust(0, &[1]);
    world.run(2_000);
    assert!(world.machines[0].session.is_some());
    let ghost = Command::Update {
        name: None,
        status: None,
        visibility: Some(Visibility::Ghost),
        tags: None,
        consent: None,
    };
    world.command(0, ghost);
    world.run(1_000);
    assert!(world.machines[0].session.is_none());
}

#[test]
fn agents_talk_and_the_hub_learns_neither_words_nor_names() {
    let mut world = World::befriended();
    let room = Command::CreateRoom {
        name: "plans-for-the-coup".into(),
        kind: RoomType::Public,
        description: CANARY.into(),
    };
    world.command(0, room);
    let op = world.dm(0, 1, CANARY);
    world.dm(1, 0, CANARY);
    world.run(25_000);
    assert_eq!((world.received(1, CANARY), world.received(0, CANARY)), (1, 1));
    let Some(Ok(CommandResult::Sent { .. })) = world.machines[0].replies.get(&op) else { panic!() };
    // Each knows the other by its name, and the room.
    for at in 0..2 {
        assert!(world.names_seen(at).contains(&NAMES[1 - at].to_owned()), "{at}");
    }
    let rooms = world.machines[1].node.rooms(Some(&world.machines[1].agent));
    let room = rooms.iter().find(|view| view.record.name.starts_with("plans")).expect("the room");
    let path = RoomPath::parse(&room.record.id).unwrap();
    world.command(1, Command::JoinRoom(path.clone()));
    world.run(3_000);
    assert!(world.machines[1].node.is_in_room(&world.machines[1].agent, &path));
    // Nothing of this was to be seen on the way.
    assert!(world.wire.len() > 20);
    for word in NAMES.iter().copied().chain([CANARY, "may I", "plans-for", "harness-of", "/home/"])
    {
        assert!(!world.saw(word), "{word} went over the hub");
    }
    assert!(world.saw("agent/self"), "the check looks at the right bytes");
}

#[test]
fn names_go_over_the_hub_where_the_user_says_so() {
    let mut world = World::with(2, true);
    world.command(
        0,
        Command::CreateRoom {
            name: "open-house".into(),
            kind: RoomType::Public,
            description: CANARY.into(),
        },
    );
    world.trust(0, &[1]);
    world.trust(1, &[0]);
    world.run(3_000);
    assert!(NAMES[..2].iter().all(|name| world.saw(name)) && world.saw("open-house"));
    // And no more than the reference says.
    assert!(!world.saw("/home/") && !world.saw(CANARY));
    // A hidden agent says that it is there, and nothing else.
    let mut world = World::with(2, true);
    let hide = Command::Update {
        name: None,
        status: None,
        visibility: Some(Visibility::Hidden),
        tags: None,
        consent: None,
    };
    world.command(0, hide);
    world.trust(0, &[1]);
    world.trust(1, &[0]);
    world.run(3_000);
    let told: Vec<&Vec<u8>> =
        world.wire.iter().filter(|(at, by_hub, _)| *at == 0 && !by_hub).map(|w| &w.2).collect();
    let has = |word: &str| {
        told.iter().any(|bytes| bytes.windows(word.len()).any(|w| w == word.as_bytes()))
    };
    assert!(has("wire-mesh/version") && !has("presence/status") && !has(NAMES[0]));
}

#[test]
fn who_is_not_trusted_is_neither_listed_nor_heard() {
    let mut world = World::new(3);
    world.trust(0, &[1]);
    world.trust(1, &[0]);
    // Carol trusts the others, who do not know her.
    world.trust(2, &[0, 1]);
    world.run(3_000);
    world.dm(2, 0, "you do not know me");
    world.run(60_000);
    assert_eq!(world.names_seen(0).len(), 2, "{:?}", world.names_seen(0));
    assert!(
        !world.machines[0]
            .events
            .iter()
            .any(|event| { matches!(event, DeliveryEvent::RoomJoinRequest { .. }) })
    );
    // Not a hello in answer.
    let carol = world.machines[2].agent;
    let to_carol = world.wire.iter().filter(|(at, by_hub, bytes)| {
        let Ok(Frame::RelayData { to_device, .. }) = Frame::decode(bytes) else { return false };
        *at < 2 && !by_hub && to_device == Some(carol)
    });
    assert_eq!(to_carol.count(), 0);
    // Trusted, she is heard with her next word; trusted no longer, no more.
    world.trust(0, &[1, 2]);
    world.run(60_000);
    assert!(world.names_seen(0).contains(&NAMES[2].to_owned()));
    assert_eq!(world.machines[0].node.hub_view().unwrap().devices, 2);
    world.agree(2, 0);
    world.trust(0, &[1]);
    world.dm(2, 0, "once more");
    world.run(60_000);
    assert_eq!(world.received(0, "once more"), 0);
    assert_eq!(world.machines[0].node.hub_view().unwrap().devices, 1);
}

#[test]
fn a_user_or_machine_that_is_trusted_brings_its_devices() {
    for by_machine in [false, true] {
        let mut world = World::new(3);
        for at in 0..2 {
            let other = &world.machines[1 - at];
            let mut trust = TrustList::default();
            if by_machine {
                trust.machines.insert(other.machine);
            } else {
                trust.principals.insert(other.user);
            }
            world.give(at, Input::Trusted(trust));
        }
        world.trust(2, &[0, 1]);
        world.run(3_000);
        world.agree(0, 1);
        assert_eq!(world.names_seen(0).len(), 2);
        // For longer than a proof lasts: it is renewed.
        world.run(20 * 60_000);
        world.dm(0, 1, "still here");
        world.run(2_000);
        assert_eq!(world.received(1, "still here"), 1);
        // A proof ends with the trust in who gave it.
        world.give(0, Input::Trusted(TrustList::default()));
        world.trust(0, &[2]);
        world.run(30_000);
        assert!(!world.machines[0].node.is_reachable(&world.machines[1].agent));
    }
}

#[test]
fn a_hub_that_replays_hellos_causes_no_storm() {
    let mut world = World::befriended();
    let hellos: Vec<(usize, Vec<u8>)> = world
        .wire
        .iter()
        .filter(|(_, by_hub, bytes)| *by_hub && is_hello(bytes))
        .map(|(at, _, bytes)| (*at, bytes.clone()))
        .collect();
    assert!(hellos.iter().any(|(at, _)| *at == 0) && hellos.iter().any(|(at, _)| *at == 1));
    world.run(30_000);
    // Once, long after: the channel is made anew, and all goes on.
    let since = world.wire.len();
    for (at, hello) in &hellos {
        world.hub_says(*at, hello.clone());
        world.settle();
    }
    world.run(5_000);
    let said = [world.hellos(0, since), world.hellos(1, since)];
    assert!(said.iter().all(|count| *count <= 4), "{said:?}");
    for round in 0..3 {
        world.dm(0, 1, &format!("after the replay {round}"));
        world.dm(1, 0, &format!("after the replay {round}"));
        // At worst a request is lost with its keys, and sent again once it has timed out.
        world.run(40_000);
    }
    for round in 0..3 {
        let text = format!("after the replay {round}");
        assert_eq!((world.received(1, &text), world.received(0, &text)), (1, 1));
    }
    // Without end, a thousand times a second: answered no oftener than every five seconds.
    let since = world.wire.len();
    for _ in 0..200 {
        for (at, hello) in &hellos {
            for _ in 0..50 {
                world.hub_says(*at, hello.clone());
            }
        }
        world.settle();
        world.run(100);
    }
    let said = [world.hellos(0, since), world.hellos(1, since)];
    let at_most = 4 * 20_000 / 5_000;
    assert!(said.iter().all(|count| *count <= at_most), "{said:?} hellos in 20 s");
    // It ends with the flood.
    world.run(60_000);
    world.dm(0, 1, "after the flood");
    world.run(40_000);
    assert_eq!(world.received(1, "after the flood"), 1);
    let since = world.wire.len();
    world.run(60_000);
    assert!(world.hellos(0, since) + world.hellos(1, since) <= 4);
}

#[test]
fn a_false_hub_can_lose_messages_and_nothing_worse() {
    let mut world = World::befriended();
    let sealed: Vec<(usize, Vec<u8>)> = world
        .wire
        .iter()
        .filter(|(_, by_hub, bytes)| {
            *by_hub && matches!(Frame::decode(bytes), Ok(Frame::RelayData { .. }))
        })
        .map(|(at, _, bytes)| (*at, bytes.clone()))
        .collect();
    let before = world.machines[1].events.len();
    // Old frames, frames for somebody else, frames in others' names, and altered ones.
    for (at, bytes) in &sealed {
        world.hub_says(*at, bytes.clone());
        world.hub_says(1 - at, bytes.clone());
        let Ok(Frame::RelayData { mut payload, to_device, .. }) = Frame::decode(bytes) else {
            panic!()
        };
        let from_device = Some(key(77).id());
        let frame = Frame::RelayData { payload: payload.clone(), to_device, from_device };
        world.hub_says(*at, frame.encode());
        if let Some(last) = payload.last_mut() {
            *last ^= 1;
        }
        let from_device = Some(world.machines[1 - at].agent);
        let frame = Frame::RelayData { payload, to_device: None, from_device };
        world.hub_says(*at, frame.encode());
        // Requests in the clear, as old peers sent them.
        let plain = Frame::RelayData { payload: Frame::Ping.encode(), to_device, from_device };
        world.hub_says(*at, plain.encode());
    }
    world.settle();
    world.run(5_000);
    assert_eq!(world.machines[1].events.len(), before, "{:?}", world.machines[1].events);
    world.dm(0, 1, "still");
    world.run(40_000);
    assert_eq!(world.received(1, "still"), 1);
}

#[test]
fn a_hub_that_is_away_is_dialled_with_patience_and_what_waited_arrives() {
    let mut world = World::befriended();
    world.up = false;
    for at in 0..2 {
        world.cut(at, "peer_closed");
        world.machines[at].dialled_at.clear();
    }
    world.settle();
    world.dm(0, 1, "when you are back");
    world.run(600_000);
    let dialled = &world.machines[0].dialled_at;
    let pauses: Vec<u64> = dialled.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(dialled.len() <= 18, "{dialled:?}");
    assert!(pauses.iter().all(|pause| *pause <= HUB_REDIAL_MAX_MS + 1_000), "{pauses:?}");
    assert!(pauses.last().is_some_and(|pause| *pause >= HUB_REDIAL_MAX_MS * 3 / 4), "{pauses:?}");
    assert_eq!(world.received(1, "when you are back"), 0);
    world.up = true;
    world.run(120_000);
    assert_eq!(world.received(1, "when you are back"), 1);
    // One that takes sessions and ends them at once is no better than one that is away.
    for at in 0..2 {
        world.machines[at].dialled_at.clear();
    }
    for _ in 0..600 {
        for at in 0..2 {
            world.cut(at, "peer_closed");
        }
        world.settle();
        world.run(1_000);
    }
    assert!(world.machines[0].dialled_at.len() <= 20, "{:?}", world.machines[0].dialled_at);
}

#[test]
fn an_agent_beyond_the_hub_is_told_by_the_machine_that_it_proves() {
    for names in [false, true] {
        let mut world = World::with(2, names);
        world.trust(0, &[1]);
        world.trust(1, &[0]);
        world.run(3_000);
        let whose = |device| world.machines[0].node.origination(device, world.clock());
        let [alice, bob] = [&world.machines[0], &world.machines[1]];
        // Its name comes with its advert, which the hub reads; without it there is the id.
        let told = if names { format!("machine-of-{}", NAMES[1]) } else { bob.machine.short() };
        assert_eq!(whose(&bob.agent), Origination::Machine(told));
        assert_eq!(whose(&alice.agent), Origination::OwnUser);
        assert_eq!(whose(&key(99).id()), Origination::Unknown);
    }
}

/// What is known of a machine beyond the hub is as old as its last advert: nobody says that it has gone.
#[test]
fn who_falls_silent_beyond_the_hub_is_offline_after_a_while() {
    let mut world = World::befriended();
    let bob = world.machines[1].agent;
    let status = |world: &World| {
        let viewer = world.machines[0].agent;
        let views = world.machines[0].node.agents(Some(&viewer), world.clock());
        views.into_iter().find(|view| view.record.id == bob).map(|view| view.record.status)
    };
    assert_ne!(status(&world), Some(AgentStatus::Offline));
    // Its cable is pulled, and stays so; the way to the hub is as good as ever for the other.
    let (_, link) = world.machines[1].session.take().unwrap();
    world.hub.closed(link);
    world.up = false;
    world.run(STALE_AFTER_MS + 60_000);
    assert!(world.machines[0].session.is_some());
    assert!(matches!(status(&world), None | Some(AgentStatus::Offline)), "{:?}", status(&world));
}

#[test]
fn messages_to_somebody_who_begins_anew_keep_their_order() {
    let mut world = World::befriended();
    // The other side loses its session, and all channels in it; nobody is told.
    world.cut(1, "peer_closed");
    world.settle();
    world.dm(0, 1, "first");
    world.run(3_000);
    assert_eq!(world.received(1, "first"), 0);
    world.dm(1, 0, "here I am again");
    world.run(500);
    assert_eq!(world.received(0, "here I am again"), 1);
    world.dm(0, 1, "second");
    world.run(40_000);
    let texts: Vec<&str> = world.machines[1]
        .events
        .iter()
        .filter_map(|event| match event {
            DeliveryEvent::Dm { message } => Some(message.content.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(texts[texts.len() - 2..], ["first", "second"]);
    assert_eq!((world.received(1, "first"), world.received(1, "second")), (1, 1));
}

#[test]
fn a_trace_tells_of_the_hub() {
    let mut world = World::befriended();
    let to = world.machines[1].agent;
    let op = world.command(0, Command::Trace { to, timeout_ms: None });
    world.run(1_000);
    let Some(Ok(CommandResult::Traced { relayed, hub, .. })) = world.machines[0].replies.get(&op)
    else {
        panic!("{:?}", world.machines[0].replies.get(&op))
    };
    assert_eq!((*relayed, hub.as_deref()), (Some(true), Some("wss://hub.test/")));
    // The hub is nobody's peer.
    let status = world.machines[0].node.status();
    assert!(status.peers.iter().all(|peer| peer.device != DeviceId([0; 32])));
}
