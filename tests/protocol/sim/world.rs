//! The simulated machine room: virtual time, loopback connections, UDP, the well-known port,
//! clients of agents, storage, and everything that can go wrong with them.
//!
//! Every frame is encoded, decoded and checked on its way, so the wire is exercised as well.

use std::cmp::Reverse;
use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, VecDeque};
use std::hash::{Hash as _, Hasher as _};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, OnceLock};

use commsd::codec::cbor::Value;
use commsd::codec::time::UnixMillis;
use commsd::identity::device::{DeviceId, DeviceKey};
use commsd::identity::entropy::SeededEntropy;
use commsd::mesh::checked::Checked;
use commsd::mesh::events::DeliveryEvent;
use commsd::mesh::journal::{Record, Ticket};
use commsd::mesh::log::LogEvent;
use commsd::mesh::node::{
    AcpAsk, AcpRequest, AddDevice, AgentSpec, Command, CommandError, CommandResult, DecisionTarget,
    DialId, DialTarget, IdentityChange, Input, Node, NodeConfig, OpId, OperatorCommand, Output,
    ServiceCall, TokenKey,
};
use commsd::mesh::records::{ConsentPolicy, Now};
use commsd::mesh::session::{Origin, Policy, SessionId, SessionKind};
use commsd::mesh::wire::cose::CoseSign1;
use commsd::mesh::wire::frame::Frame;
use commsd::mesh::wire::room_path::RoomPath;
use commsd::mesh::wire::token::TokenCache;
use commsd::store::{Faults, FaultyStore, Store as _};

use super::rng::Rng;

/// Monotonic time at the start; not zero, so that nothing passes by being zero.
const BEGINNING: u64 = 1_000_000;
/// Wall clock at the start.
const WALL: u64 = 1_800_000_000_000;
/// The well-known port.
pub const PORT: u16 = 19876;
/// How long a dial to somebody who cannot be reached takes to fail.
const DIAL_TIMEOUT_MS: u64 = 5_000;
/// Ticks of one host in one virtual second that no deadline explains.
const MAX_TICKS_A_SECOND: u32 = 200;

/// Keys are the slow part of P-256: one pool for all tests.
pub fn key(n: usize) -> DeviceKey {
    static POOL: OnceLock<Vec<DeviceKey>> = OnceLock::new();
    let pool = POOL.get_or_init(|| {
        (0..96u8)
            .map(|n| {
                let mut scalar = [0x17; 32];
                scalar[0] = n + 1;
                scalar[31] = n.wrapping_mul(37);
                DeviceKey::from_scalar(&scalar).unwrap()
            })
            .collect()
    });
    pool[n].clone()
}

/// How the network behaves.
#[derive(Clone, Copy, Debug)]
pub struct Net {
    /// Least and most one-way time, milliseconds.
    pub latency: (u64, u64),
    /// Of a thousand datagrams this many are lost for each receiver.
    pub datagram_loss: u64,
    /// This many arrive twice.
    pub datagram_copies: u64,
    /// The latest a datagram arrives; later than another one sent after it.
    pub datagram_jitter: u64,
}

impl Default for Net {
    fn default() -> Self {
        Self { latency: (1, 3), datagram_loss: 0, datagram_copies: 0, datagram_jitter: 3 }
    }
}

/// A process to come.
#[derive(Clone, Copy, Debug)]
pub struct HostSpec {
    /// Which machine it runs on; loopback, port and multicast group are a machine's own.
    pub machine: usize,
    /// Whose process it is.
    pub user: u32,
    /// UDP first contact.
    pub first_contact: bool,
    /// Listens on the network (`--listen`), and what those may do who come by that.
    pub listens: Option<Policy>,
    /// What it has stored outlives its crash.
    pub durable: bool,
}

impl Default for HostSpec {
    fn default() -> Self {
        Self { machine: 0, user: 1000, first_contact: true, listens: None, durable: false }
    }
}

/// What an agent's client does with events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ack {
    /// Takes each after at most so many milliseconds.
    Within(u64),
    /// Takes nothing by itself.
    Never,
}

/// An event as an agent's client got it.
#[derive(Clone, Debug)]
pub struct Shown {
    pub seq: u64,
    pub event: Arc<DeliveryEvent>,
    pub life: u64,
}

impl Host {
    /// What the host has stored.
    pub fn store(&self) -> &FaultyStore {
        &self.store
    }
}

/// An agent's place: its key, what its slot file holds, and its client's memory.
pub struct Slot {
    pub host: usize,
    pub key: usize,
    pub name: String,
    pub in_service: bool,
    pub ack: Ack,
    pub tokens: BTreeMap<RoomPath, CoseSign1>,
    pub services: BTreeMap<TokenKey, CoseSign1>,
    pub grants: BTreeMap<(RoomPath, DeviceId), Vec<u8>>,
    pub shown: Vec<Shown>,
    /// Messages shown to this incarnation; where its daemon is durable, to all of them.
    known: BTreeSet<(DeviceId, String)>,
    /// Those of them whose acknowledgement has been answered.
    taken: BTreeSet<(DeviceId, String)>,
    /// Messages shown again after a crash.
    pub again: usize,
    ack_due: u64,
    /// The client is there.
    connected: bool,
    /// The newest event it has had, and in which life of its daemon.
    position: (u64, u64),
}

impl Slot {
    /// Events of this incarnation and the ones before, oldest first.
    pub fn events(&self) -> impl Iterator<Item = &DeliveryEvent> {
        self.shown.iter().map(|shown| &*shown.event)
    }

    /// Texts of the messages shown, oldest first.
    pub fn texts(&self) -> Vec<String> {
        self.events()
            .filter_map(|event| match event {
                DeliveryEvent::RoomMessage { message } => Some(message.content.clone()),
                DeliveryEvent::Dm { message } => Some(message.content.clone()),
                _ => None,
            })
            .collect()
    }
}

/// A peer that is no node: the test says what it does.
#[derive(Default)]
pub struct Raw {
    /// Frames it got, by session.
    pub heard: Vec<(SessionId, Frame)>,
    /// Sessions that are open: the other end's device, and how it came to be.
    pub sessions: BTreeMap<SessionId, (DeviceId, &'static str)>,
    /// Sessions that ended, with the reason.
    pub ended: Vec<(SessionId, &'static str)>,
    /// Answers every request ok.
    pub polite: bool,
}

enum Brain {
    Down,
    Node(Box<Node>),
    Raw(Raw),
}

/// A process.
pub struct Host {
    pub spec: HostSpec,
    key: usize,
    brain: Brain,
    /// Counts its starts.
    pub life: u64,
    /// When it started last.
    pub started: u64,
    /// Milliseconds that its wall clock is ahead of the world's.
    pub wall_offset: i64,
    /// Does nothing until then.
    paused_until: u64,
    held: Vec<Input>,
    store: FaultyStore,
    store_due: u64,
    tick_at: Option<u64>,
    ticks: (u64, u32),
    pub log: Vec<(u64, LogEvent)>,
    pub ready_to_leave: bool,
    leaving: bool,
}

struct End {
    host: usize,
    life: u64,
    session: SessionId,
    open: bool,
    /// Nothing will come to this end any more.
    done: bool,
    queue: VecDeque<Item>,
    /// Deliveries held back by a cut or a pause.
    held: usize,
    due: u64,
    tokens: TokenCache,
}

enum Item {
    Open(Box<Input>, Opened),
    Frame(Vec<u8>),
    End(&'static str),
}

/// What a raw peer is told of a session.
#[derive(Clone, Copy)]
struct Opened {
    device: DeviceId,
    how: &'static str,
}

struct Link {
    ends: [End; 2],
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Listener {
    Data { machine: usize, port: u16 },
    Well { machine: usize },
    Network { ip: IpAddr, port: u16 },
}

enum Event {
    Deliver { link: u64, side: usize },
    Input { host: usize, life: u64, input: Box<Input> },
    Dial { host: usize, life: u64, dial: DialId, local: DeviceId, target: DialTarget },
    Tick { host: usize, life: u64 },
    CommitEnds { host: usize, life: u64, ticket: Ticket, number: u64 },
    Acknowledge { agent: DeviceId, host: usize, life: u64 },
    Break { link: u64 },
    Script(usize),
}

struct Due {
    at: u64,
    order: u64,
    event: Event,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for Due {}
impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// A frame seen on its way.
#[derive(Clone, Debug)]
pub struct Seen {
    pub from: usize,
    pub to: usize,
    pub frame: Frame,
}

/// The room.
pub struct World {
    pub seed: u64,
    pub now: u64,
    pub rng: Rng,
    pub net: Net,
    pub hosts: Vec<Host>,
    pub slots: BTreeMap<DeviceId, Slot>,
    /// By user and bearer: ids of grants, as in the users' files.
    pub dm_grants: BTreeMap<(u32, DeviceId), Option<Vec<u8>>>,
    pub replies: BTreeMap<OpId, Result<CommandResult, CommandError>>,
    /// Frames seen, once `watch` is set.
    pub seen: Vec<Seen>,
    pub watch: bool,
    /// Agents answer requests by themselves, mostly with yes.
    pub answers_by_itself: bool,
    /// Calls of services, in their order.
    pub calls: Vec<ServiceCall>,
    /// What was asked of hosts' sides of the Agent Collaboration Protocol, in its order.
    pub acp: Vec<AcpRequest>,
    /// Calls and such requests are answered by themselves.
    pub serves_calls: bool,
    queue: BinaryHeap<Reverse<Due>>,
    order: u64,
    links: BTreeMap<u64, Link>,
    sessions: HashMap<(usize, SessionId), (u64, usize)>,
    listeners: BTreeMap<Listener, (usize, u64, DeviceId)>,
    cuts: BTreeSet<(usize, usize)>,
    next: u64,
    next_port: u16,
    next_op: u64,
    /// Acknowledgements that are not answered yet.
    acks: BTreeMap<OpId, (DeviceId, u64)>,
    gossip: HashMap<u64, Checked>,
    scripts: Vec<Option<Script>>,
    /// Frames carried, for the measurements.
    pub carried: u64,
}

/// Something to do at its time.
pub type Script = Box<dyn FnOnce(&mut World)>;

impl World {
    /// An empty room.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            now: BEGINNING,
            rng: Rng::new(seed),
            net: Net::default(),
            hosts: Vec::new(),
            slots: BTreeMap::new(),
            dm_grants: BTreeMap::new(),
            replies: BTreeMap::new(),
            seen: Vec::new(),
            watch: false,
            answers_by_itself: false,
            calls: Vec::new(),
            acp: Vec::new(),
            serves_calls: true,
            queue: BinaryHeap::new(),
            order: 0,
            links: BTreeMap::new(),
            sessions: HashMap::new(),
            listeners: BTreeMap::new(),
            cuts: BTreeSet::new(),
            next: 0,
            next_port: 40_000,
            next_op: 0,
            acks: BTreeMap::new(),
            gossip: HashMap::new(),
            scripts: Vec::new(),
            carried: 0,
        }
    }

    // --- hosts and agents ---------------------------------------------------------------------

    /// A host with the defaults, not started.
    pub fn host(&mut self) -> usize {
        self.host_as(HostSpec::default())
    }

    /// A host, not started.
    pub fn host_as(&mut self, spec: HostSpec) -> usize {
        let index = self.hosts.len();
        self.hosts.push(Host {
            spec,
            key: index,
            brain: Brain::Down,
            life: 0,
            started: 0,
            wall_offset: 0,
            paused_until: 0,
            held: Vec::new(),
            store: FaultyStore::new(self.seed ^ (index as u64) << 32, Faults::default()),
            store_due: 0,
            tick_at: None,
            ticks: (0, 0),
            log: Vec::new(),
            ready_to_leave: false,
            leaving: false,
        });
        index
    }

    /// The device of a host's daemon (or of a raw peer).
    pub fn device(&self, host: usize) -> DeviceId {
        key(self.hosts[host].key).id()
    }

    /// The key of a host's daemon (or of a raw peer).
    pub fn host_key(&self, host: usize) -> DeviceKey {
        key(self.hosts[host].key)
    }

    /// Address of a machine on the network.
    pub fn ip(machine: usize) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(192, 0, 2, machine as u8 + 1))
    }

    fn listen_data(&mut self, host: usize, device: DeviceId) -> u16 {
        self.next_port += 1;
        let port = self.next_port;
        let machine = self.hosts[host].spec.machine;
        let life = self.hosts[host].life;
        self.listeners.insert(Listener::Data { machine, port }, (host, life, device));
        port
    }

    /// Starts a daemon; its agents, if it had any, come into service again.
    pub fn start(&mut self, host: usize) {
        assert!(matches!(self.hosts[host].brain, Brain::Down), "host {host} runs already");
        self.hosts[host].life += 1;
        self.hosts[host].started = self.now;
        self.hosts[host].ready_to_leave = false;
        self.hosts[host].leaving = false;
        let life = self.hosts[host].life;
        let device = self.device(host);
        let port = self.listen_data(host, device);
        let spec = self.hosts[host].spec;
        let network_port = spec.listens.map(|_| {
            self.next_port += 1;
            let listener = Listener::Network { ip: Self::ip(spec.machine), port: self.next_port };
            self.listeners.insert(listener, (host, life, device));
            self.next_port
        });
        let config = NodeConfig {
            port: PORT,
            first_contact: spec.first_contact,
            network_port,
            version: "0.0.0-sim".into(),
            pid: 1000 + host as u32,
            user: Some(key(90 + (spec.user % 3) as usize)),
            machine: Some(key(93 + spec.machine % 3)),
            machine_name: None,
            consent: ConsentPolicy::Ask,
            hub: None,
        };
        let entropy = SeededEntropy::new(self.rng.next());
        let now = self.clock(host);
        let mut node = Node::new(config, key(self.hosts[host].key), port, Box::new(entropy), now);
        if spec.durable {
            let store = &mut self.hosts[host].store;
            let live = store.live().unwrap();
            node.recover(store.begin(live).unwrap(), now).unwrap();
        }
        self.hosts[host].brain = Brain::Node(Box::new(node));
        self.hosts[host].tick_at = None;
        self.hosts[host].store_due = 0;
        let own = BTreeSet::from([Self::ip(spec.machine), IpAddr::V4(Ipv4Addr::LOCALHOST)]);
        self.input(host, Input::LocalAddresses(own));
        self.input(host, Input::Start);
        let mine: Vec<DeviceId> = self
            .slots
            .iter()
            .filter(|(_, slot)| slot.host == host && slot.in_service)
            .map(|(id, _)| *id)
            .collect();
        for agent in mine {
            self.take_into_service(agent);
        }
    }

    /// What a host that does not run yet finds in its store.
    pub fn remember(&mut self, host: usize, records: &[Record]) {
        self.hosts[host].store.commit(records).unwrap();
    }

    /// A host with a daemon that runs.
    pub fn daemon(&mut self) -> usize {
        let host = self.host();
        self.start(host);
        host
    }

    /// A peer whose every word the test writes.
    pub fn raw(&mut self, spec: HostSpec) -> usize {
        let host = self.host_as(spec);
        let device = self.device(host);
        self.hosts[host].life = 1;
        self.hosts[host].brain = Brain::Raw(Raw { polite: true, ..Raw::default() });
        self.listen_data(host, device);
        host
    }

    /// What a raw peer has seen.
    pub fn raw_mut(&mut self, host: usize) -> &mut Raw {
        match &mut self.hosts[host].brain {
            Brain::Raw(raw) => raw,
            _ => panic!("host {host} is no raw peer"),
        }
    }

    /// Where a device listens on its machine.
    pub fn door(&self, device: &DeviceId) -> DialTarget {
        let port = self.listeners.iter().find_map(|(listener, (_, _, at))| match listener {
            Listener::Data { port, .. } if at == device => Some(*port),
            _ => None,
        });
        DialTarget::Loopback(port.expect("the device listens"))
    }

    /// Where a host listens on the network.
    pub fn network_door(&self, host: usize) -> DialTarget {
        let door = self.listeners.iter().find_map(|(listener, (at, ..))| match listener {
            Listener::Network { ip, port } if *at == host => Some((*ip, *port)),
            _ => None,
        });
        let (ip, port) = door.expect("the host listens on the network");
        DialTarget::Network(ip, port)
    }

    /// An agent, in service at a host.
    pub fn agent(&mut self, host: usize, name: &str) -> DeviceId {
        let n = 20 + self.slots.len();
        assert!(n < 90, "the pool of keys is used up");
        let id = key(n).id();
        self.slots.insert(
            id,
            Slot {
                host,
                key: n,
                name: name.to_owned(),
                in_service: true,
                ack: Ack::Within(5),
                tokens: BTreeMap::new(),
                services: BTreeMap::new(),
                grants: BTreeMap::new(),
                shown: Vec::new(),
                known: BTreeSet::new(),
                taken: BTreeSet::new(),
                again: 0,
                ack_due: 0,
                connected: false,
                position: (0, 0),
            },
        );
        if self.is_up(host) {
            self.take_into_service(id);
        }
        id
    }

    /// Puts an agent out of service.
    pub fn detach(&mut self, agent: DeviceId) {
        let host = self.slots[&agent].host;
        let slot = self.slots.get_mut(&agent).unwrap();
        slot.in_service = false;
        slot.connected = false;
        self.listeners.retain(|_, (at, _, device)| !(*at == host && *device == agent));
        if self.is_up(host) {
            assert!(self.hosts[host].paused_until <= self.now, "the host is frozen");
            self.input(host, Input::RemoveDevice(agent));
        }
    }

    /// Puts an agent back into service.
    pub fn attach(&mut self, agent: DeviceId) {
        let host = self.slots[&agent].host;
        if self.slots[&agent].in_service {
            return;
        }
        if self.hosts[host].paused_until > self.now {
            let wait = self.hosts[host].paused_until - self.now;
            self.at(wait, move |world| world.attach(agent));
            return;
        }
        self.slots.get_mut(&agent).unwrap().in_service = true;
        if self.is_up(host) {
            self.take_into_service(agent);
        }
    }

    fn take_into_service(&mut self, agent: DeviceId) {
        let host = self.slots[&agent].host;
        let data_port = self.listen_data(host, agent);
        let slot = &self.slots[&agent];
        let spec = AgentSpec {
            name: slot.name.clone(),
            harness: "sim".into(),
            cwd: format!("/work/{}", slot.name),
            key: format!("/work/{}", slot.name),
            tokens: slot.tokens.iter().map(|(path, token)| (path.clone(), token.clone())).collect(),
            services: slot.services.iter().map(|(key, t)| (key.clone(), t.clone())).collect(),
            grants: slot
                .grants
                .iter()
                .map(|((path, member), id)| (path.clone(), *member, id.clone()))
                .collect(),
            ephemeral: false,
            resumed: false,
        };
        let add = AddDevice { key: key(slot.key), data_port, agent: Some(spec) };
        self.input(host, Input::AddDevice(Box::new(add)));
        // The client connects: first what it has not acknowledged, in order, then what comes.
        let life = self.hosts[host].life;
        let slot = self.slots.get_mut(&agent).unwrap();
        slot.connected = true;
        if slot.position.0 != life {
            slot.position = (life, 0);
        }
        let had = slot.position.1;
        let waiting: Vec<(u64, Arc<DeliveryEvent>)> =
            self.node(host).inbox(&agent, 0).map(|e| (e.seq, Arc::clone(&e.event))).collect();
        for (seq, event) in waiting {
            if seq > had {
                self.show(host, agent, seq, event);
            } else {
                // It knows by the number that it has had this one.
                self.react(host, agent, &event);
            }
        }
        // What it has acknowledged and not answered is pending, and not shown again.
        if self.answers_by_itself {
            let pending = self.node(host).pending(&agent);
            for request in pending.into_iter().filter(|p| matches!(p.kind, "dm" | "room")) {
                let room = RoomPath::parse(&request.room.unwrap()).unwrap();
                self.answer_later(agent, DecisionTarget::Pair(room, request.requester));
            }
        }
    }

    /// Whether a daemon runs.
    pub fn is_up(&self, host: usize) -> bool {
        matches!(self.hosts[host].brain, Brain::Node(_))
    }

    /// The node of a daemon that runs.
    pub fn node(&self, host: usize) -> &Node {
        match &self.hosts[host].brain {
            Brain::Node(node) => node,
            _ => panic!("host {host} runs no node"),
        }
    }

    /// Hosts that run a node.
    pub fn running(&self) -> Vec<usize> {
        (0..self.hosts.len()).filter(|host| self.is_up(*host)).collect()
    }

    /// The node that serves an agent.
    pub fn node_of(&self, agent: &DeviceId) -> &Node {
        self.node(self.slots[agent].host)
    }

    /// Time as a host sees it.
    pub fn clock(&self, host: usize) -> Now {
        let wall = (WALL + self.now) as i64 + self.hosts[host].wall_offset;
        Now { mono: self.now, unix: UnixMillis(wall as u64) }
    }

    /// A host's wall clock jumps.
    pub fn jump_clock(&mut self, host: usize, ms: i64) {
        self.hosts[host].wall_offset += ms;
    }

    /// A host stops for a while without anybody being told.
    pub fn pause(&mut self, host: usize, ms: u64) {
        self.hosts[host].paused_until = self.now + ms;
        self.at(ms, move |world| world.release_held());
    }

    /// Whether a host does nothing for now.
    pub fn is_paused(&self, host: usize) -> bool {
        self.hosts[host].paused_until > self.now
    }

    /// It goes on.
    pub fn unpause(&mut self, host: usize) {
        self.hosts[host].paused_until = 0;
        self.release_held();
    }

    /// Makes a host's storage bad.
    pub fn set_faults(&mut self, host: usize, faults: Faults) {
        self.hosts[host].store.set_faults(faults);
    }

    /// The process dies: memory, sessions, listeners and the port are gone.
    pub fn crash(&mut self, host: usize) {
        assert!(self.is_up(host));
        self.hosts[host].store.crash();
        self.vanish(host);
        self.forget_shown(host);
    }

    /// The agents of a host that comes back are new incarnations, unless it remembers them.
    fn forget_shown(&mut self, host: usize) {
        let durable = self.hosts[host].spec.durable;
        for slot in self.slots.values_mut().filter(|slot| slot.host == host) {
            if !durable {
                slot.known.clear();
            }
            slot.connected = false;
        }
        self.acks.retain(|_, (agent, _)| self.slots[agent].host != host);
    }

    /// The process has ended: its sessions end as the operating system ends them.
    fn vanish(&mut self, host: usize) {
        self.hosts[host].brain = Brain::Down;
        self.hosts[host].paused_until = 0;
        self.hosts[host].held.clear();
        self.listeners.retain(|_, (at, ..)| *at != host);
        let links: Vec<u64> = self
            .links
            .iter()
            .filter(|(_, link)| link.ends.iter().any(|end| end.host == host))
            .map(|(id, _)| *id)
            .collect();
        for id in links {
            for side in 0..2 {
                let Some(end) = self.links.get(&id).map(|link| &link.ends[side]) else { continue };
                if end.host == host {
                    self.finish(id, side);
                } else if !end.done {
                    self.lose_tail(id, side);
                    self.send_item(id, side, Item::End("connection_lost"));
                }
            }
        }
    }

    /// Asks a daemon to leave; it ends when it has said what it has to.
    pub fn leave(&mut self, host: usize) {
        self.hosts[host].leaving = true;
        self.input_unless_paused(host, Input::Shutdown);
    }

    /// Asks a daemon to leave and waits until it has.
    pub fn stop(&mut self, host: usize) {
        self.leave(host);
        self.run_until(5_000, "shutdown", |world| !world.is_up(host));
    }

    /// Whether a daemon has been asked to leave.
    pub fn is_leaving(&self, host: usize) -> bool {
        self.hosts[host].leaving
    }

    // --- the network ---------------------------------------------------------------------------

    /// Something that is no peer takes the well-known port.
    pub fn occupy_port(&mut self, host: usize) {
        let machine = self.hosts[host].spec.machine;
        let device = self.device(host);
        self.listeners.insert(Listener::Well { machine }, (host, u64::MAX, device));
    }

    /// It lets go of it again.
    pub fn release_port(&mut self) {
        self.listeners.retain(|_, (_, life, _)| *life != u64::MAX);
    }

    fn is_cut(&self, a: usize, b: usize) -> bool {
        self.cuts.contains(&(a.min(b), a.max(b)))
    }

    /// Nothing passes between two hosts until they are joined again: sessions freeze.
    pub fn cut(&mut self, a: usize, b: usize) {
        if a != b {
            self.cuts.insert((a.min(b), a.max(b)));
        }
    }

    /// Separates two groups of hosts.
    pub fn partition(&mut self, left: &[usize], right: &[usize]) {
        for a in left {
            for b in right {
                self.cut(*a, *b);
            }
        }
    }

    /// Joins everybody again.
    pub fn heal(&mut self) {
        self.cuts.clear();
        self.release_held();
    }

    /// Breaks the links that cross a cut, each at some moment within `ms`.
    pub fn break_cut_links(&mut self, ms: u64, per_mille: u64) {
        let crossing: Vec<u64> = self
            .links
            .iter()
            .filter(|(_, link)| self.is_cut(link.ends[0].host, link.ends[1].host))
            .map(|(id, _)| *id)
            .collect();
        for link in crossing {
            if self.rng.per_mille(per_mille) {
                let at = self.rng.between(0, ms);
                self.schedule(at, Event::Break { link });
            }
        }
    }

    /// Breaks every link between two hosts.
    pub fn break_links(&mut self, a: usize, b: usize) {
        let between: Vec<u64> = self
            .links
            .iter()
            .filter(|(_, link)| {
                let hosts = [link.ends[0].host, link.ends[1].host];
                hosts == [a, b] || hosts == [b, a]
            })
            .map(|(id, _)| *id)
            .collect();
        for link in between {
            self.break_link(link);
        }
    }

    /// Breaks one link somewhere.
    pub fn break_some_link(&mut self) {
        let ids: Vec<u64> = self.links.keys().copied().collect();
        if !ids.is_empty() {
            let id = *self.rng.pick(&ids);
            self.break_link(id);
        }
    }

    fn break_link(&mut self, id: u64) {
        for side in 0..2 {
            let Some(end) = self.links.get(&id).map(|link| &link.ends[side]) else { continue };
            if end.open {
                // Each end notices by itself, cut or not.
                let (host, life, session) = (end.host, end.life, end.session);
                self.finish(id, side);
                let wait = self.rng.between(0, 5);
                let input = Input::Closed { session, reason: "connection_lost" };
                self.schedule(wait, Event::Input { host, life, input: Box::new(input) });
            } else if !end.done {
                self.lose_tail(id, side);
                self.send_item(id, side, Item::End("connection_lost"));
            }
        }
    }

    /// Of what is on its way to one end, some of the newest is lost.
    fn lose_tail(&mut self, id: u64, side: usize) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let queued = link.ends[side].queue.len();
        let kept = self.rng.below(queued + 1);
        let end = &mut link.ends[side];
        while end.queue.len() > kept {
            // The end must learn of a session before it learns of its end.
            if matches!(end.queue.back(), Some(Item::Open(..))) {
                break;
            }
            end.queue.pop_back();
        }
    }

    /// One end of a link is no more; with the other one the link goes.
    fn finish(&mut self, id: u64, side: usize) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let end = &mut link.ends[side];
        (end.open, end.done) = (false, true);
        end.queue.clear();
        self.sessions.remove(&(end.host, end.session));
        if link.ends.iter().all(|end| end.done) {
            self.links.remove(&id);
        }
    }

    fn release_held(&mut self) {
        for host in 0..self.hosts.len() {
            if self.hosts[host].paused_until <= self.now {
                for input in std::mem::take(&mut self.hosts[host].held) {
                    self.input_later(host, 0, input);
                }
            }
        }
        let ids: Vec<u64> = self.links.keys().copied().collect();
        for link in ids {
            for side in 0..2 {
                let hosts = self.links.get(&link).map(|l| [l.ends[0].host, l.ends[1].host]);
                let Some([a, b]) = hosts else { continue };
                if self.is_cut(a, b) {
                    continue;
                }
                let Some(held) = self.links.get_mut(&link) else { continue };
                let count = std::mem::take(&mut held.ends[side].held);
                for _ in 0..count {
                    self.schedule(1, Event::Deliver { link, side });
                }
            }
        }
    }

    fn latency(&mut self) -> u64 {
        let (low, high) = self.net.latency;
        self.rng.between(low, high)
    }

    fn send_item(&mut self, link: u64, side: usize, item: Item) {
        let wait = self.latency();
        let now = self.now;
        let Some(held) = self.links.get_mut(&link) else { return };
        let end = &mut held.ends[side];
        end.queue.push_back(item);
        end.due = end.due.max(now + wait);
        let wait = end.due - now;
        self.schedule(wait, Event::Deliver { link, side });
    }

    fn schedule(&mut self, wait: u64, event: Event) {
        self.order += 1;
        self.queue.push(Reverse(Due { at: self.now + wait, order: self.order, event }));
    }

    /// Does something later.
    pub fn at(&mut self, wait: u64, script: impl FnOnce(&mut World) + 'static) {
        self.scripts.push(Some(Box::new(script)));
        let index = self.scripts.len() - 1;
        self.schedule(wait, Event::Script(index));
    }

    // --- time ------------------------------------------------------------------------------------

    /// Lets virtual time pass.
    pub fn run(&mut self, ms: u64) {
        let end = self.now + ms;
        while self.queue.peek().is_some_and(|Reverse(due)| due.at <= end) {
            self.step();
        }
        self.now = end;
    }

    /// Lets time pass until something holds, at most `limit` ms.
    pub fn run_until(&mut self, limit: u64, what: &str, holds: impl Fn(&World) -> bool) {
        assert!(
            self.runs_until(limit, holds),
            "seed {}: not within {limit} ms: {what}\n{}",
            self.seed,
            self.tail()
        );
    }

    /// As [`World::run_until`], saying whether it came to hold.
    pub fn runs_until(&mut self, limit: u64, holds: impl Fn(&World) -> bool) -> bool {
        let end = self.now + limit;
        while !holds(self) {
            match self.queue.peek() {
                Some(Reverse(due)) if due.at <= end => self.step(),
                _ => {
                    self.now = end;
                    return holds(self);
                }
            }
        }
        true
    }

    /// The last log lines of every host, for a failure.
    pub fn tail(&self) -> String {
        let mut lines: Vec<(u64, String)> = Vec::new();
        for (index, host) in self.hosts.iter().enumerate() {
            let from = host.log.len().saturating_sub(25);
            for (at, event) in &host.log[from..] {
                lines.push((*at, format!("{:>9} h{index} {}", at - BEGINNING, line(event))));
            }
        }
        lines.sort();
        lines.into_iter().map(|(_, line)| line + "\n").collect()
    }

    /// Log lines of all hosts that name something.
    pub fn about(&self, what: &str) -> String {
        let mut lines: Vec<(u64, String)> = Vec::new();
        for (index, host) in self.hosts.iter().enumerate() {
            for (at, event) in &host.log {
                if event.fields.iter().any(|(_, value)| value == what) {
                    lines.push((*at, format!("{:>9} h{index} {}", at - BEGINNING, line(event))));
                }
            }
        }
        lines.sort();
        lines.into_iter().map(|(_, line)| line + "\n").collect()
    }

    fn step(&mut self) {
        let Some(Reverse(due)) = self.queue.pop() else { return };
        self.now = self.now.max(due.at);
        match due.event {
            Event::Deliver { link, side } => self.deliver(link, side),
            Event::Input { host, life, input } => {
                if self.hosts[host].life != life || matches!(self.hosts[host].brain, Brain::Down) {
                    return;
                }
                if self.hosts[host].paused_until > self.now {
                    self.hosts[host].held.push(*input);
                } else {
                    self.input(host, *input);
                }
            }
            Event::Dial { host, life, dial, local, target } => {
                self.dial_arrives(host, life, dial, local, target);
            }
            Event::Tick { host, life } => {
                if self.hosts[host].life != life || self.hosts[host].tick_at != Some(self.now) {
                    return;
                }
                self.hosts[host].tick_at = None;
                if self.hosts[host].paused_until > self.now {
                    self.hosts[host].held.push(Input::Tick);
                    return;
                }
                self.input(host, Input::Tick);
            }
            Event::CommitEnds { host, life, ticket, number } => {
                if self.hosts[host].life == life && self.is_up(host) {
                    let input = match self.hosts[host].store.finish(number) {
                        Ok(()) => Input::Committed(ticket),
                        Err((_, records)) => Input::CommitFailed { ticket, records },
                    };
                    self.input(host, input);
                }
            }
            Event::Acknowledge { agent, host, life } => {
                if self.hosts[host].life == life
                    && self.is_up(host)
                    && self.slots[&agent].in_service
                {
                    let last = self.slots[&agent]
                        .shown
                        .iter()
                        .filter(|shown| shown.life == life)
                        .map(|shown| shown.seq)
                        .max();
                    if let Some(seq) = last {
                        self.acknowledge(agent, seq);
                    }
                }
            }
            Event::Break { link } => self.break_link(link),
            Event::Script(index) => {
                if let Some(script) = self.scripts[index].take() {
                    script(self);
                }
            }
        }
    }

    fn deliver(&mut self, id: u64, side: usize) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let hosts = [link.ends[0].host, link.ends[1].host];
        let cut = hosts[0] != hosts[1]
            && self.cuts.contains(&(hosts[0].min(hosts[1]), hosts[0].max(hosts[1])));
        let end = &mut link.ends[side];
        let host = end.host;
        if cut || self.hosts[host].paused_until > self.now {
            end.held += 1;
            return;
        }
        let Some(item) = end.queue.pop_front() else { return };
        let (life, session) = (end.life, end.session);
        if life != self.hosts[host].life || matches!(self.hosts[host].brain, Brain::Down) {
            return;
        }
        match item {
            Item::Open(input, opened) => {
                end.open = true;
                self.sessions.insert((host, session), (id, side));
                match &mut self.hosts[host].brain {
                    Brain::Raw(raw) => {
                        raw.sessions.insert(session, (opened.device, opened.how));
                    }
                    _ => self.input(host, *input),
                }
            }
            Item::Frame(bytes) if end.open => self.frame_arrives(id, side, session, &bytes),
            Item::Frame(_) => {}
            Item::End(reason) => {
                let was_open = end.open;
                self.finish(id, side);
                if was_open {
                    match &mut self.hosts[host].brain {
                        Brain::Raw(raw) => {
                            raw.sessions.remove(&session);
                            raw.ended.push((session, reason));
                        }
                        _ => self.input(host, Input::Closed { session, reason }),
                    }
                }
            }
        }
    }

    fn frame_arrives(&mut self, id: u64, side: usize, session: SessionId, bytes: &[u8]) {
        self.carried += 1;
        let Some(link) = self.links.get_mut(&id) else { return };
        let host = link.ends[side].host;
        let from = link.ends[1 - side].host;
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        let digest = hasher.finish();
        let raw = matches!(self.hosts[host].brain, Brain::Raw(_));
        if !self.watch
            && !raw
            && let Some(known) = self.gossip.get(&digest)
        {
            let frame = known.clone();
            self.input(host, Input::Frame { session, frame });
            return;
        }
        let frame = match Frame::decode(bytes) {
            Ok(frame) => frame,
            Err(error) => {
                assert!(
                    matches!(self.hosts[from].brain, Brain::Raw(_)),
                    "a node sent a frame that cannot be read: {error}"
                );
                if error.ends_connection() {
                    self.close_end(host, session, "not_canonical");
                    self.input(host, Input::Closed { session, reason: "not_canonical" });
                }
                return;
            }
        };
        if self.watch {
            self.seen.push(Seen { from, to: host, frame: frame.clone() });
        }
        if let Brain::Raw(raw) = &mut self.hosts[host].brain {
            let answer = match &frame {
                Frame::ManageRequest(request) if raw.polite => Some(request.request_id),
                _ => None,
            };
            raw.heard.push((session, frame));
            if let Some(request_id) = answer {
                self.raw_send(host, session, super::support::ok_response(request_id));
            }
            return;
        }
        let is_gossip = matches!(frame, Frame::Gossip { .. });
        let Some(link) = self.links.get_mut(&id) else { return };
        let checked = Checked::check(frame, &mut link.ends[side].tokens);
        if is_gossip {
            self.gossip.insert(digest, checked.clone());
        }
        self.input(host, Input::Frame { session, frame: checked });
    }

    fn dial_arrives(
        &mut self,
        host: usize,
        life: u64,
        dial: DialId,
        local: DeviceId,
        target: DialTarget,
    ) {
        if self.hosts[host].life != life || matches!(self.hosts[host].brain, Brain::Down) {
            return;
        }
        let machine = self.hosts[host].spec.machine;
        let listener = match target {
            DialTarget::Loopback(PORT) => Listener::Well { machine },
            DialTarget::Loopback(port) => Listener::Data { machine, port },
            DialTarget::Network(ip, port) => Listener::Network { ip, port },
            DialTarget::Named(..) | DialTarget::Hub => panic!("nobody here asks for that"),
        };
        let fails = |world: &mut Self, wait, reason| {
            let input = Box::new(Input::DialFailed { dial, reason });
            world.schedule(wait, Event::Input { host, life, input });
        };
        let Some((there, their_life, device)) = self.listeners.get(&listener).copied() else {
            let wait = self.latency();
            fails(self, wait, "refused");
            return;
        };
        if their_life == u64::MAX {
            fails(self, 1, "tls");
            return;
        }
        if self.is_cut(host, there) || self.hosts[there].paused_until > self.now {
            fails(self, DIAL_TIMEOUT_MS, "timeout");
            return;
        }
        let kind = match listener {
            Listener::Data { .. } => SessionKind::DataAccepted,
            Listener::Well { .. } => SessionKind::PortAccepted,
            Listener::Network { .. } => {
                let policy = self.hosts[there].spec.listens.unwrap_or_default();
                SessionKind::NetworkAccepted(policy)
            }
        };
        let origin = self.origin(host, there);
        let (mine, theirs) = (self.session_id(), self.session_id());
        let dialled = Input::Dialled { dial, session: mine, remote: device, origin };
        let accepted =
            Input::Accepted { session: theirs, local: device, remote: local, kind, origin };
        let open = |host, life, session| End {
            host,
            life,
            session,
            open: false,
            done: false,
            queue: VecDeque::new(),
            held: 0,
            due: 0,
            tokens: TokenCache::default(),
        };
        self.next += 1;
        let link = self.next;
        let ends = [open(host, life, mine), open(there, their_life, theirs)];
        self.links.insert(link, Link { ends });
        let how = |how| move |device| Opened { device, how };
        self.send_item(link, 0, Item::Open(Box::new(dialled), how("dialled")(device)));
        self.send_item(link, 1, Item::Open(Box::new(accepted), how(kind.as_str())(local)));
    }

    fn origin(&self, a: usize, b: usize) -> Origin {
        let (a, b) = (self.hosts[a].spec, self.hosts[b].spec);
        if a.machine != b.machine {
            Origin::Network
        } else if a.user != b.user {
            Origin::OtherUser
        } else {
            Origin::SameUser
        }
    }

    fn session_id(&mut self) -> SessionId {
        SessionId(self.number())
    }

    /// A number not used before.
    pub fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn close_end(&mut self, host: usize, session: SessionId, reason: &'static str) {
        let Some((id, side)) = self.sessions.get(&(host, session)).copied() else { return };
        self.finish(id, side);
        if self.links.get(&id).is_some_and(|link| !link.ends[1 - side].done) {
            self.send_item(id, 1 - side, Item::End(reason));
        }
    }

    // --- raw peers ---------------------------------------------------------------------------------

    /// A raw peer dials; the session shows among its sessions.
    pub fn raw_dial(&mut self, host: usize, target: DialTarget) -> SessionId {
        let before: BTreeSet<SessionId> = self.raw_mut(host).sessions.keys().copied().collect();
        let device = self.device(host);
        self.next += 1;
        let dial = DialId(self.next);
        let life = self.hosts[host].life;
        self.schedule(0, Event::Dial { host, life, dial, local: device, target });
        let fresh = |world: &World| match &world.hosts[host].brain {
            Brain::Raw(raw) => raw
                .sessions
                .iter()
                .find(|(id, (_, how))| !before.contains(id) && *how == "dialled")
                .map(|(id, _)| *id),
            _ => None,
        };
        self.run_until(1_000, "a raw dial", |world| fresh(world).is_some());
        fresh(self).unwrap()
    }

    /// A raw peer says something.
    pub fn raw_send(&mut self, host: usize, session: SessionId, frame: Frame) {
        self.raw_bytes(host, session, frame.encode());
    }

    /// A raw peer sends bytes.
    pub fn raw_bytes(&mut self, host: usize, session: SessionId, bytes: Vec<u8>) {
        if let Some((link, side)) = self.sessions.get(&(host, session)).copied() {
            self.send_item(link, 1 - side, Item::Frame(bytes));
        }
    }

    /// A raw peer ends all its sessions.
    pub fn raw_close(&mut self, host: usize) {
        let open: Vec<SessionId> = self.raw_mut(host).sessions.keys().copied().collect();
        self.raw_mut(host).sessions.clear();
        for session in open {
            self.close_end(host, session, "closed");
        }
    }

    /// Dials that have no outcome yet.
    pub fn dials_under_way(&self) -> usize {
        let dial = |Reverse(due): &Reverse<Due>| match &due.event {
            Event::Dial { .. } => true,
            Event::Input { input, .. } => matches!(**input, Input::DialFailed { .. }),
            _ => false,
        };
        self.queue.iter().filter(|due| dial(due)).count()
    }

    // --- nodes --------------------------------------------------------------------------------------

    /// Gives a node an input and carries out what it wants.
    pub fn input(&mut self, host: usize, input: Input) {
        let now = self.clock(host);
        let tick = matches!(input, Input::Tick);
        let Brain::Node(node) = &mut self.hosts[host].brain else { return };
        node.handle(input, now);
        let mut outputs = Vec::new();
        while let Some(output) = node.poll_output() {
            outputs.push(output);
        }
        let deadline = node.next_deadline();
        if tick {
            assert!(deadline > self.now, "seed {}: a tick changes nothing: h{host}", self.seed);
            let second = self.now / 1000;
            let (at, count) = &mut self.hosts[host].ticks;
            if *at != second {
                (*at, *count) = (second, 0);
            }
            *count += 1;
            assert!(*count < MAX_TICKS_A_SECOND, "seed {}: h{host} spins", self.seed);
        }
        for output in outputs {
            self.carry_out(host, output);
        }
        let life = self.hosts[host].life;
        let at = deadline.max(self.now + 1);
        if deadline != u64::MAX && self.hosts[host].tick_at.is_none_or(|known| known > at) {
            self.hosts[host].tick_at = Some(at);
            self.schedule(at - self.now, Event::Tick { host, life });
        }
    }

    /// Something that reaches a host which may be frozen.
    fn input_unless_paused(&mut self, host: usize, input: Input) {
        if self.hosts[host].paused_until > self.now {
            self.hosts[host].held.push(input);
        } else {
            self.input(host, input);
        }
    }

    fn input_later(&mut self, host: usize, wait: u64, input: Input) {
        let life = self.hosts[host].life;
        self.schedule(wait, Event::Input { host, life, input: Box::new(input) });
    }

    fn carry_out(&mut self, host: usize, output: Output) {
        let life = self.hosts[host].life;
        let machine = self.hosts[host].spec.machine;
        match output {
            Output::Dial { dial, local, target, .. } => {
                let wait = self.latency();
                self.schedule(wait, Event::Dial { host, life, dial, local, target });
            }
            Output::Send { session, frame } => {
                if let Some((link, side)) = self.sessions.get(&(host, session)).copied() {
                    let bytes = frame.encode();
                    self.send_item(link, 1 - side, Item::Frame(bytes));
                }
            }
            Output::Close { session, reason } => self.close_end(host, session, reason),
            // Frame limits are the transport's.
            Output::Admitted { .. } => {}
            Output::BindPort => {
                let listener = Listener::Well { machine };
                let taken = self.listeners.contains_key(&listener);
                if !taken {
                    let device = self.device(host);
                    self.listeners.insert(listener, (host, life, device));
                }
                let wait = self.rng.between(0, 2);
                let input =
                    if taken { Input::PortBindFailed { in_use: true } } else { Input::PortBound };
                self.input_later(host, wait, input);
            }
            Output::ReleasePort => {
                let listener = Listener::Well { machine };
                if self.listeners.get(&listener).is_some_and(|(at, ..)| *at == host) {
                    self.listeners.remove(&listener);
                }
            }
            Output::Datagram { group, broadcast } => self.datagram(host, &group, &broadcast),
            Output::Commit { ticket, records } => {
                let submission = self.hosts[host].store.submit(records);
                let number = submission.number;
                let event = Event::CommitEnds { host, life, ticket, number };
                // The store takes one after another.
                let due = self.hosts[host].store_due.max(self.now + submission.takes_ms);
                self.hosts[host].store_due = due;
                self.schedule(due - self.now, event);
            }
            Output::SaveIdentity { ticket, device, change } => {
                self.input_later(host, 1, Input::IdentitySaved(ticket));
                if let IdentityChange::DmGrant { bearer, token_id } = &change {
                    let user = self.hosts[host].spec.user;
                    self.dm_grants.insert((user, *bearer), token_id.clone());
                    return;
                }
                let Some(slot) = self.slots.get_mut(&device) else { return };
                assert!(slot.in_service, "seed {}: wrote to a slot given up", self.seed);
                match change {
                    IdentityChange::RoomToken { path, token: Some(token) } => {
                        slot.tokens.insert(path, token);
                    }
                    IdentityChange::ServiceToken { key, token: Some(token) } => {
                        slot.services.insert(key, token);
                    }
                    IdentityChange::ServiceToken { key, token: None } => {
                        slot.services.remove(&key);
                    }
                    IdentityChange::RoomToken { path, token: None } => {
                        slot.tokens.remove(&path);
                    }
                    IdentityChange::IssuedGrant { path, member, token_id: Some(id) } => {
                        slot.grants.insert((path, member), id);
                    }
                    IdentityChange::IssuedGrant { path, member, token_id: None } => {
                        slot.grants.remove(&(path, member));
                    }
                    IdentityChange::DmGrant { .. } => unreachable!(),
                }
            }
            Output::AgentEvent { agent, seq, event } => self.show(host, agent, seq, event),
            Output::Reply { op, result } => {
                if let Some((agent, seq)) = self.acks.remove(&op)
                    && result.is_ok()
                {
                    let slot = self.slots.get_mut(&agent).unwrap();
                    let of_now = |shown: &&Shown| shown.life == life && shown.seq <= seq;
                    let shown = slot.shown.iter().filter(of_now);
                    slot.taken.extend(shown.filter_map(|shown| shown.event.message_key()));
                }
                let twice = self.replies.insert(op, result).is_some();
                assert!(!twice, "seed {}: {op:?} was answered twice", self.seed);
            }
            Output::Service(call) => {
                if self.serves_calls {
                    let place = ("place".to_owned(), Value::from(call.place.as_str()));
                    let input =
                        Input::ServiceAnswered { call: call.call, outcome: Ok(vec![place]) };
                    self.input_later(host, 1, input);
                }
                self.calls.push(*call);
            }
            Output::Acp(request) => {
                if self.serves_calls {
                    let outcome = Ok(vec![("told".to_owned(), Value::from(host as u64))]);
                    self.input_later(
                        host,
                        1,
                        Input::ServiceAnswered { call: request.call, outcome },
                    );
                }
                self.acp.push(*request);
            }
            Output::ProbePids(agents) => {
                let dead: Vec<DeviceId> = agents
                    .into_iter()
                    .filter(|(_, pid)| {
                        let owner = (*pid - 1000) as usize;
                        owner >= self.hosts.len() || !self.is_up(owner)
                    })
                    .map(|(agent, _)| agent)
                    .collect();
                if !dead.is_empty() {
                    self.input_later(host, 1, Input::DeadPids(dead));
                }
            }
            Output::ShutdownReady => {
                self.hosts[host].ready_to_leave = true;
                // What was said is sent before the process ends.
                self.at(20, move |world| {
                    if world.hosts[host].life == life && world.is_up(host) {
                        world.hosts[host].store.drain();
                        world.vanish(host);
                        world.forget_shown(host);
                    }
                });
            }
            Output::Log(event) => {
                assert!(event.is_catalogued(), "not in the catalogue: {event:?}");
                let at = self.now;
                self.hosts[host].log.push((at, event));
            }
        }
    }

    fn datagram(&mut self, host: usize, group: &[u8], broadcast: &[u8]) {
        let machine = self.hosts[host].spec.machine;
        for to in 0..self.hosts.len() {
            if !self.is_up(to) || self.is_cut(host, to) || !self.hosts[to].spec.first_contact {
                continue;
            }
            let mut copies: Vec<(IpAddr, Vec<u8>)> = Vec::new();
            if self.hosts[to].spec.machine == machine {
                copies.push((IpAddr::V4(Ipv4Addr::LOCALHOST), group.to_vec()));
            }
            copies.push((Self::ip(machine), broadcast.to_vec()));
            for (from, bytes) in copies {
                let times = if self.rng.per_mille(self.net.datagram_loss) {
                    0
                } else if self.rng.per_mille(self.net.datagram_copies) {
                    2
                } else {
                    1
                };
                for _ in 0..times {
                    let wait = self.rng.between(0, self.net.datagram_jitter);
                    self.input_later(to, wait, Input::Datagram { from, bytes: bytes.clone() });
                }
            }
        }
    }

    fn show(&mut self, host: usize, agent: DeviceId, seq: u64, event: Arc<DeliveryEvent>) {
        let life = self.hosts[host].life;
        let seed = self.seed;
        let slot = self.slots.get_mut(&agent).expect("an event for no agent");
        assert_eq!(slot.host, host, "an event at the wrong host");
        if !slot.connected {
            return;
        }
        assert!(slot.position < (life, seq), "seed {seed}: events out of order");
        slot.position = (life, seq);
        if let Some(key) = event.message_key()
            && !slot.known.insert(key.clone())
        {
            // Only what the daemon could not know to have been taken comes again, after a crash.
            let before =
                slot.shown.iter().rfind(|shown| shown.event.message_key().as_ref() == Some(&key));
            let crashed = before.is_some_and(|shown| shown.life != life);
            assert!(
                crashed && !slot.taken.contains(&key),
                "seed {seed}: shown twice: {key:?} to {}, crashed {crashed}, before {:?}, now {life} {seq}",
                agent.short(),
                before.map(|shown| (shown.life, shown.seq))
            );
            slot.again += 1;
        }
        if self.hosts[host].spec.durable {
            let other = slot.shown.iter().find(|shown| shown.seq == seq);
            assert!(
                other.is_none_or(|shown| shown.event == event),
                "seed {seed}: one number for two events"
            );
        }
        slot.shown.push(Shown { seq, event: Arc::clone(&event), life });
        self.react(host, agent, &event);
    }

    /// What an agent's client does about an event.
    fn react(&mut self, host: usize, agent: DeviceId, event: &DeliveryEvent) {
        let life = self.hosts[host].life;
        let at = self.now;
        if self.answers_by_itself
            && let DeliveryEvent::RoomJoinRequest { room, requester_id } = event
        {
            let target = DecisionTarget::Pair(RoomPath::parse(room).unwrap(), *requester_id);
            self.answer_later(agent, target);
        }
        let slot = self.slots.get_mut(&agent).unwrap();
        if let Ack::Within(ms) = slot.ack {
            let ms = self.rng.between(0, ms);
            let slot = self.slots.get_mut(&agent).unwrap();
            // A client takes events in order.
            slot.ack_due = slot.ack_due.max(at + ms);
            let wait = slot.ack_due - at;
            self.schedule(wait, Event::Acknowledge { agent, host, life });
        }
    }

    /// An agent makes up its mind.
    fn answer_later(&mut self, agent: DeviceId, target: DecisionTarget) {
        let wait = self.rng.between(1, 4_000);
        let yes = self.rng.per_mille(800);
        let host = self.slots[&agent].host;
        let life = self.hosts[host].life;
        self.at(wait, move |world| {
            if world.is_up(host) && world.hosts[host].life == life && world.slots[&agent].in_service
            {
                let command = if yes {
                    Command::Accept(target)
                } else {
                    Command::Reject { target, reason: None }
                };
                world.command(agent, command);
            }
        });
    }

    // --- commands ------------------------------------------------------------------------------------

    /// An agent asks for something.
    pub fn command(&mut self, agent: DeviceId, command: Command) -> OpId {
        self.next_op += 1;
        let op = OpId(self.next_op);
        let host = self.slots[&agent].host;
        self.input_unless_paused(host, Input::Command { op, agent, command });
        op
    }

    /// The operator of a host asks for something and waits for the answer.
    pub fn operate(
        &mut self,
        host: usize,
        command: OperatorCommand,
    ) -> Result<CommandResult, CommandError> {
        self.next_op += 1;
        let op = OpId(self.next_op);
        self.input(host, Input::Operator { op, command });
        self.run_until(10_000, "the operator's answer", |world| world.replies.contains_key(&op));
        self.replies[&op].clone()
    }

    /// A host's side of the Agent Collaboration Protocol asks something of a device; the answer will be
    /// in [`Self::replies`].
    pub fn ask_acp(&mut self, host: usize, to: DeviceId, ask: AcpAsk) -> OpId {
        self.next_op += 1;
        let op = OpId(self.next_op);
        self.input(host, Input::Acp { op, to, ask });
        op
    }

    /// An agent's client has everything up to a number.
    pub fn acknowledge(&mut self, agent: DeviceId, seq: u64) {
        let op = OpId(self.next_op + 1);
        self.acks.insert(op, (agent, seq));
        assert_eq!(self.command(agent, Command::Acknowledge(seq)), op);
    }

    /// An agent asks for something and waits for the answer.
    pub fn ask(
        &mut self,
        agent: DeviceId,
        command: Command,
    ) -> Result<CommandResult, CommandError> {
        let shown = format!("an answer to {command:?}");
        let op = self.command(agent, command);
        self.run_until(320_000, &shown, |world| world.replies.contains_key(&op));
        self.replies[&op].clone()
    }

    /// The first event of an agent that `choose` picks.
    pub fn find<T>(
        &self,
        agent: &DeviceId,
        choose: impl Fn(&DeliveryEvent) -> Option<T>,
    ) -> Option<T> {
        self.slots[agent].events().find_map(choose)
    }
}

/// A log event as one line.
pub fn line(event: &LogEvent) -> String {
    let mut line = event.name.to_owned();
    for (name, value) in &event.fields {
        line += &format!(" {name}={}", &value[..value.len().min(12)]);
    }
    line
}
