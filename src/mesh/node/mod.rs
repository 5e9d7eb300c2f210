//! The peer itself: all devices that one daemon hosts, composed from the other rooms of `mesh`.
//! `handle(input, now)` then [`Node::poll_output`] until it is empty; time comes in, nothing is
//! read or sent here.
//!
//! One message's way through: a [`Command`] or a request frame comes in (`commands`, `requests`),
//! membership and tokens are judged (`rooms`, `dms`), a mailbox takes the event (`mailboxes`), the
//! store is asked to keep it, and the answer goes out once it has.

mod acp;
mod commands;
mod connect;
mod control;
mod discovery;
mod dms;
mod durable;
mod gossip;
mod grants;
mod hub;
mod insight;
mod links;
mod mailboxes;
mod port;
mod queries;
mod relay;
mod requests;
mod roles;
mod room_tokens;
mod rooms;
mod services;
mod sync;
mod ways;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

pub use acp::{AcpAsk, AcpRequest, MAX_ENVELOPE_BYTES, MAX_ENVELOPES_A_MINUTE};
pub use commands::{Command, CommandError, CommandResult, DecisionTarget, Delivery};
pub use discovery::{DiscoveryCommand, LOOK_MS, MAX_ADVERTS, MAX_LOOKING};
pub use durable::{RecoverError, Restorable};
pub use hub::{HUB_REDIAL_FIRST_MS, HUB_REDIAL_MAX_MS, HubConfig, HubView, TrustList};
pub use insight::{MAX_TRACE_MS, MeshGraph, Question};
pub use links::MAX_SESSIONS;
pub use queries::{AgentView, NodeStatus, Origination, PeerView, PendingView, RoomView};
pub use rooms::{MAX_INVITATIONS_OF_OWNER, MAX_ROOM_NAME_BYTES};
pub use services::{
    CallId, GrantTerms, GrantView, MAX_ASKS, MAX_CALLS, MAX_CALLS_OF_DEVICE, MAX_GRANTS,
    MAX_SHARES, OperatorCommand, SERVICE_DEADLINE_MS, ServiceCall, ServiceOutcome, ShareView,
    TokenKey, is_share_name,
};

use super::checked::Checked;
use super::delivery::{Copies, Mailbox, Outgoing, Queued};
use super::directory::Directory;
use super::election::Election;
use super::events::DeliveryEvent;
use super::formation::{DialPlan, Formation};
use super::journal::{Record, Ticket};
use super::log::LogEvent;
use super::records::{AgentRecord, AgentStatus, ConsentPolicy, Now};
use super::replica::Replica;
use super::session::{Origin, Policy, Session, SessionId, SessionKind};
use super::wire::advert::PeerAdvert;
use super::wire::cose::CoseSign1;
use super::wire::frame::Frame;
use super::wire::revocation::RevocationView;
use super::wire::room_path::RoomPath;
use super::wire::token::TokenCache;
use crate::codec::cbor::Value;
use crate::codec::time::UnixMillis;
use crate::identity::device::{DeviceId, DeviceKey};
use crate::identity::entropy::Entropy;

/// Pause between rounds of upkeep (deadlines, liveness, expiry). Nothing here needs a finer clock.
pub const UPKEEP_INTERVAL_MS: u64 = 500;
/// Pause between retries over a session that stays open.
pub const RETRY_EVERY_MS: u64 = 5_000;
/// Requests between our own devices handled in one turn; more would mean a loop between agents.
const MAX_INTERNAL_TURNS: usize = 100_000;
/// Agents whose mailbox is kept while they are out of service.
pub const MAX_PARKED: usize = 1024;
/// Decisions an agent can have open at the same time; more are answered at once.
pub const MAX_PENDING_DECISIONS: usize = 256;

/// Names a command of an agent until it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u64);

/// Names a dial until it has succeeded or failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DialId(pub u64);

/// Fixed facts about this daemon.
#[derive(Clone)]
pub struct NodeConfig {
    /// Well-known TCP port.
    pub port: u16,
    /// Whether UDP first contact runs (then a fresh holder waits before it claims).
    pub first_contact: bool,
    /// Port of the `--listen` listener, named in broadcast beacons.
    pub network_port: Option<u16>,
    /// commsd version, advertised.
    pub version: String,
    /// Process id, in agent records.
    pub pid: u32,
    /// The user principal, which vouches for our devices.
    pub user: Option<DeviceKey>,
    /// The machine, which does as well.
    pub machine: Option<DeviceKey>,
    /// Name the machine gives itself.
    pub machine_name: Option<String>,
    /// Who may begin conversations with agents that have said nothing of it.
    pub consent: ConsentPolicy,
    /// The relay hub; without one none is dialled.
    pub hub: Option<HubConfig>,
}

/// A device to take into service.
pub struct AddDevice {
    /// Its key.
    pub key: DeviceKey,
    /// Port of its data listener.
    pub data_port: u16,
    /// Its agent; `None` for the daemon's own device.
    pub agent: Option<AgentSpec>,
}

/// The agent behind a device.
pub struct AgentSpec {
    /// Name asked for.
    pub name: String,
    /// Harness.
    pub harness: String,
    /// Working directory.
    pub cwd: String,
    /// Directory or name behind its slot.
    pub key: String,
    /// Room tokens kept in its slot file.
    pub tokens: Vec<(RoomPath, CoseSign1)>,
    /// Tokens for others' services kept in its slot file.
    pub services: Vec<(TokenKey, CoseSign1)>,
    /// Token ids it has issued: (room, member) to id.
    pub grants: Vec<(RoomPath, DeviceId, Vec<u8>)>,
    /// Whether its key ends with its service: nobody comes back for what it leaves.
    pub ephemeral: bool,
    /// Whether its presence is as it was before: nobody has begun anew with it.
    pub resumed: bool,
}

/// A change to an identity file; to be written at once (decision 4).
#[derive(Clone, Debug, PartialEq)]
pub enum IdentityChange {
    /// A room token was received (`None`: given up).
    RoomToken {
        /// Room.
        path: RoomPath,
        /// The token.
        token: Option<CoseSign1>,
    },
    /// A token for somebody's service was received (`None`: given up).
    ServiceToken {
        /// What it is for.
        key: TokenKey,
        /// The token.
        token: Option<CoseSign1>,
    },
    /// A token was issued to a member (`None`: revoked).
    IssuedGrant {
        /// Room.
        path: RoomPath,
        /// Member.
        member: DeviceId,
        /// Token id.
        token_id: Option<Vec<u8>>,
    },
    /// A grant to write to our user's agents was issued (`None`: withdrawn).
    DmGrant {
        /// To whom.
        bearer: DeviceId,
        /// Token id.
        token_id: Option<Vec<u8>>,
    },
}

/// What happens to the node.
pub enum Input {
    /// Begin: go for the port, announce.
    Start,
    /// A connection was accepted and authenticated.
    Accepted {
        /// Its name.
        session: SessionId,
        /// Our device at this end.
        local: DeviceId,
        /// The device at the other.
        remote: DeviceId,
        /// Which listener.
        kind: SessionKind,
        /// Who is there.
        origin: Origin,
    },
    /// A dial succeeded.
    Dialled {
        /// Which.
        dial: DialId,
        /// Name of the session.
        session: SessionId,
        /// The device at the other end.
        remote: DeviceId,
        /// Who is there.
        origin: Origin,
    },
    /// A dial failed.
    DialFailed {
        /// Which.
        dial: DialId,
        /// A stable word.
        reason: &'static str,
    },
    /// A frame, decoded and its signatures checked.
    Frame {
        /// From where.
        session: SessionId,
        /// What.
        frame: Checked,
    },
    /// A session ended.
    Closed {
        /// Which.
        session: SessionId,
        /// A stable word.
        reason: &'static str,
    },
    /// The well-known port is bound.
    PortBound,
    /// It could not be bound.
    PortBindFailed {
        /// Because somebody has it.
        in_use: bool,
    },
    /// A UDP datagram.
    Datagram {
        /// From where.
        from: IpAddr,
        /// What.
        bytes: Vec<u8>,
    },
    /// The machine's addresses (at start and when they change).
    LocalAddresses(BTreeSet<IpAddr>),
    /// A device comes into service.
    AddDevice(Box<AddDevice>),
    /// A device leaves service.
    RemoveDevice(DeviceId),
    /// An agent wants something.
    Command {
        /// Name for the answer.
        op: OpId,
        /// Stamped by the daemon from the connection.
        agent: DeviceId,
        /// What.
        command: Command,
    },
    /// An operator wants something.
    Operator {
        /// Name for the answer.
        op: OpId,
        /// What.
        command: OperatorCommand,
    },
    /// Somebody asks about discovery, or has a say in it.
    Discovery {
        /// Name for the answer.
        op: OpId,
        /// What.
        command: DiscoveryCommand,
    },
    /// This daemon's side of the Agent Collaboration Protocol asks something of a device; what it
    /// answers comes as [`Output::Reply`].
    Acp {
        /// Name for the answer.
        op: OpId,
        /// Whom.
        to: DeviceId,
        /// What.
        ask: AcpAsk,
    },
    /// What came of [`Output::Service`] or [`Output::Acp`].
    ServiceAnswered {
        /// Which.
        call: CallId,
        /// The answer.
        outcome: ServiceOutcome,
    },
    /// A batch is stored.
    Committed(Ticket),
    /// A batch could not be stored, and comes back.
    CommitFailed {
        /// Which.
        ticket: Ticket,
        /// What was in it.
        records: Vec<Record>,
    },
    /// A change of an identity file is on disk, or has failed and been reported.
    IdentitySaved(Ticket),
    /// Result of [`Output::ProbePids`].
    DeadPids(Vec<DeviceId>),
    /// Time has passed.
    Tick,
    /// Leave: tell peers, hand over the port.
    Shutdown,
    /// This machine has another name, or none any more.
    MachineNamed(Option<String>),
    /// The user trusts these beyond this machine (at start and when it changes).
    Trusted(TrustList),
}

/// Where a dial goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DialTarget {
    /// 127.0.0.1 at this port.
    Loopback(u16),
    /// Another machine.
    Network(IpAddr, u16),
    /// Another machine, by name or address as somebody gave it.
    Named(String, u16),
    /// The relay hub that is configured.
    Hub,
}

/// What the node wants done.
#[derive(Debug)]
pub enum Output {
    /// Connect and authenticate; `expect` must be the device found there.
    Dial {
        /// Name for the outcome.
        dial: DialId,
        /// Our device.
        local: DeviceId,
        /// Where.
        target: DialTarget,
        /// Who should be there.
        expect: Option<DeviceId>,
    },
    /// Send a frame.
    Send {
        /// Where.
        session: SessionId,
        /// What.
        frame: Frame,
    },
    /// Close once everything before it is sent.
    Close {
        /// Which.
        session: SessionId,
        /// A stable word.
        reason: &'static str,
    },
    /// The peer has been let in and may send long frames.
    Admitted {
        /// Which.
        session: SessionId,
    },
    /// Bind the well-known port.
    BindPort,
    /// Close the listener on it.
    ReleasePort,
    /// Send a datagram to the loopback group, and to the broadcast address unless that is off. An empty
    /// one is none.
    Datagram {
        /// For the loopback group.
        group: Vec<u8>,
        /// For the network, which may name another port.
        broadcast: Vec<u8>,
    },
    /// Keep these records; report by ticket.
    Commit {
        /// Name for the report.
        ticket: Ticket,
        /// All or nothing.
        records: Vec<Record>,
    },
    /// Write to an identity file at once.
    SaveIdentity {
        /// Name for the report.
        ticket: Ticket,
        /// Whose slot.
        device: DeviceId,
        /// What.
        change: IdentityChange,
    },
    /// An event entered an agent's mailbox.
    AgentEvent {
        /// Whose.
        agent: DeviceId,
        /// Its number.
        seq: u64,
        /// The event.
        event: Arc<DeliveryEvent>,
    },
    /// A command is answered.
    Reply {
        /// Which.
        op: OpId,
        /// The answer.
        result: Result<CommandResult, CommandError>,
    },
    /// A peer calls a service and may: do it, and tell by [`Input::ServiceAnswered`].
    Service(Box<ServiceCall>),
    /// A peer asks something of this daemon's side of the Agent Collaboration Protocol: do it, and tell
    /// by [`Input::ServiceAnswered`].
    Acp(Box<AcpRequest>),
    /// Which of these processes are gone?
    ProbePids(Vec<(DeviceId, i64)>),
    /// Everything that had to be said before leaving has been handed over.
    ShutdownReady,
    /// Tell the operator.
    Log(LogEvent),
}

/// What the answer to a request is for.
#[derive(Debug)]
pub(super) enum Purpose {
    /// That the peer has heard what we told it.
    Heard,
    /// Our introduction at the port.
    Introduce,
    /// Our request to be let in by another machine.
    ConnectRequest,
    /// A sign of life.
    Probe,
    /// Our request to a successor to take the port.
    BecomeCoordinator,
    /// A message, receipt or notice.
    Message(Box<MessageRequest>),
    /// Our request to join a room or to open a conversation.
    Join { agent: DeviceId, path: RoomPath, op: Option<OpId> },
    /// Our request for the members of a room we were invited to.
    Members { agent: DeviceId, path: RoomPath, op: Option<OpId> },
    /// Our invitation.
    Invite { agent: DeviceId, path: RoomPath, invitee: DeviceId, op: OpId },
    /// Our leaving; where the agent has been moved to.
    Leave { agent: DeviceId, path: RoomPath, moved: Option<RoomPath>, op: OpId },
    /// Our request for a capability.
    Ask { agent: DeviceId, key: TokenKey, op: Option<OpId> },
    /// A permission that we hand on.
    HandOn { op: OpId, write: bool, expires: UnixMillis },
    /// A call of ours to somebody's service.
    Call { op: OpId },
    /// A question of an agent's about a device.
    Insight { question: insight::Question, op: OpId, begun: u64 },
    /// A token that we send after its request has ended.
    Given,
    /// A copy on its way to its recipient.
    HandOver { recipient: DeviceId, key: (DeviceId, String) },
}

/// A queued request under way.
#[derive(Debug)]
pub(super) struct MessageRequest {
    pub agent: DeviceId,
    pub recipient: DeviceId,
    pub entry: Queued,
    pub retry: bool,
    pub op: Option<OpId>,
}

/// How a request ended.
#[derive(Clone, Debug)]
pub(super) enum Outcome {
    Ok(Value),
    Error { code: String, message: Option<String> },
    Timeout,
    NotConnected,
    ConnectionLost,
}

/// A request between two of our own devices.
struct Internal {
    from: DeviceId,
    to: DeviceId,
    request: OutRequest,
    id: u64,
}

/// A request of ours before it has a session.
#[derive(Clone, Debug)]
pub(super) struct OutRequest {
    pub verb: String,
    pub params: Value,
    pub scope: super::wire::scope::Scope,
    pub token: Option<CoseSign1>,
}

/// Where an answer goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnswerTo {
    Session { session: SessionId, request: u64 },
    Internal(u64),
}

/// Whether a request is answered now or when somebody has decided.
pub(super) enum Answer {
    Now(Outcome),
    Later,
}

/// A decision somebody waits for.
struct Decision {
    pub id: String,
    /// What agents are shown of it, those that come later as well.
    pub event: Option<DeliveryEvent>,
    pub path: Option<RoomPath>,
    pub requester: DeviceId,
    pub at: UnixMillis,
    pub deadline: u64,
    pub waiters: Vec<AnswerTo>,
    pub session: Option<SessionId>,
}

/// A conversation that waits for the other side's consent.
#[derive(Default)]
struct Consent {
    pub asking: bool,
    pub held: Vec<(Queued, Option<OpId>)>,
}

/// The agent behind a hosted device.
struct Agent {
    pub ephemeral: bool,
    /// Directory or name behind its slot.
    pub key: String,
    /// Version of its record when that was forgotten.
    pub version: u64,
    /// What it last said of itself while in service.
    pub presence: AgentStatus,
    pub mailbox: Mailbox,
    pub outgoing: Outgoing,
    pub tokens: BTreeMap<RoomPath, CoseSign1>,
    pub grants: BTreeMap<(RoomPath, DeviceId), Vec<u8>>,
    pub opened: BTreeSet<RoomPath>,
    /// Who may begin conversations, where it has said so.
    pub consent: Option<ConsentPolicy>,
    pub consents: BTreeMap<DeviceId, Consent>,
    pub decisions: BTreeMap<String, Decision>,
    pub shown: BTreeMap<RoomPath, BTreeMap<DeviceId, AgentStatus>>,
    /// Events that were shown but could not be stored: their senders keep them.
    pub unstored: BTreeSet<u64>,
    /// Rooms whose owner has been told that we leave.
    pub leaving: BTreeSet<RoomPath>,
    /// Rooms whose owner has been asked to let us in: other members may hear of it before we do.
    pub joining: BTreeSet<RoomPath>,
    /// Rooms that we hold a token for because somebody invited us, and that we have not joined.
    pub invitations: BTreeSet<RoomPath>,
    /// Tokens for others' services.
    pub services: BTreeMap<TokenKey, CoseSign1>,
    /// Capabilities it has asked for.
    pub asked: BTreeMap<TokenKey, services::Sought>,
    /// By author: receipts that wait for the token of the conversation.
    pub receipts: BTreeMap<DeviceId, Vec<Queued>>,
}

/// A device of ours in service.
struct Device {
    pub key: DeviceKey,
    pub data_port: u16,
    pub started_at: UnixMillis,
    pub agent: Option<Agent>,
    pub port_session: Option<SessionId>,
    pub port_dial: Option<DialId>,
    /// The session with the hub over which it has been heard of.
    pub told_hub: Option<SessionId>,
    pub adverts: gossip::Adverts,
}

/// What a dial is for.
enum DialFor {
    Peer(DialPlan),
    Port(DeviceId),
    Hub,
    /// Somebody's wish to connect.
    Wish(connect::Wish),
}

/// A command that is not answered yet.
enum Op {
    Send { message_id: String, deliveries: Vec<Delivery>, reply_by: u64 },
    Join { path: RoomPath, reply_by: u64 },
    Ask { reply_by: u64 },
    HandOn { what: Box<services::HandOn>, reply_by: u64 },
    Plain { reply_by: u64 },
}

/// Waits for the store (or the client's acknowledgement) before requests are answered ok: the
/// first attempt of a sender and those that repeat it.
struct Stored {
    agent: DeviceId,
    seq: u64,
    answers: Vec<AnswerTo>,
}

/// When copies are handed over to a recipient that is back (monotonic ms).
#[derive(Clone, Copy)]
struct HandOver {
    at: u64,
    /// Until then their authors come first, where they are here.
    author_until: u64,
}

/// Waits for an identity file before anybody is told.
struct Saving {
    answers: Vec<AnswerTo>,
    outcome: Outcome,
    op: Option<(OpId, CommandResult)>,
}

/// The mesh peer of one daemon.
pub struct Node {
    config: NodeConfig,
    entropy: Box<dyn Entropy + Send>,
    daemon: DeviceId,
    devices: BTreeMap<DeviceId, Device>,
    parked: BTreeMap<DeviceId, Agent>,
    sessions: BTreeMap<SessionId, Session<Purpose>>,
    routes: BTreeMap<(DeviceId, DeviceId), Vec<SessionId>>,
    channels: BTreeMap<SessionId, relay::Relayed>,
    remotes: BTreeMap<DeviceId, usize>,
    formation: Formation,
    election: Election,
    role: Option<super::wire::claim::Claim>,
    /// Peers that have gone while somebody else held the role.
    departed: BTreeSet<DeviceId>,
    directory: Directory,
    machines: BTreeMap<DeviceId, gossip::Machine>,
    replica: Replica,
    revocations: RevocationView,
    tokens: TokenCache,
    copies: Copies,
    durable: durable::Durable,
    hand_overs: BTreeMap<DeviceId, HandOver>,
    own_queues: BTreeMap<DeviceId, Vec<DeliveryEvent>>,
    contradicted: BTreeMap<DeviceId, u64>,
    contradict_later: BTreeSet<DeviceId>,
    unheard: BTreeSet<(DeviceId, DeviceId)>,
    mesh_decisions: BTreeMap<String, Decision>,
    services: services::Services,
    hub: hub::HubState,
    connections: connect::Connections,
    discovery: discovery::Discovery,
    /// In the order of their approval.
    approved_remotes: VecDeque<(DeviceId, Policy)>,
    refused_remotes: BTreeMap<DeviceId, u64>,
    dials: BTreeMap<DialId, DialFor>,
    ops: BTreeMap<OpId, Op>,
    stored: BTreeMap<Ticket, Stored>,
    saving: BTreeMap<Ticket, Saving>,
    internal: VecDeque<Internal>,
    /// Until then the wall clock has jumped too lately for anything to be thrown away for its age.
    doubted_until: u64,
    internal_open: BTreeMap<u64, (DeviceId, DeviceId, Purpose, Option<u64>)>,
    /// Requests that wait for a session with their recipient.
    awaiting: Vec<ways::Awaiting>,
    deferred: VecDeque<(Purpose, DeviceId, DeviceId, Option<SessionId>, Outcome)>,
    outputs: VecDeque<Output>,
    next_id: u64,
    gossip_at: u64,
    beacon_at: u64,
    upkeep_at: u64,
    probe_at: u64,
    make_room_at: u64,
    dial_at: Option<u64>,
    last_now: Option<Now>,
    hand_over_until: u64,
    retry_at: u64,
    beacon_sent_at: u64,
    shutting_down: Option<u64>,
    shutdown_said: bool,
    stats: Counters,
    traffic_shown: bool,
}

/// Counters for status.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Statements refused.
    pub refused: u64,
    /// Frames handled.
    pub frames: u64,
}

impl Node {
    /// A node with the daemon's own device and nothing else.
    #[must_use]
    pub fn new(
        config: NodeConfig,
        daemon: DeviceKey,
        data_port: u16,
        entropy: Box<dyn Entropy + Send>,
        now: Now,
    ) -> Self {
        let id = daemon.id();
        let device = Device::new(daemon, data_port, None, now);
        Self {
            config,
            entropy,
            daemon: id,
            devices: BTreeMap::from([(id, device)]),
            parked: BTreeMap::new(),
            sessions: BTreeMap::new(),
            routes: BTreeMap::new(),
            channels: BTreeMap::new(),
            remotes: BTreeMap::new(),
            formation: Formation::default(),
            election: Election::default(),
            role: None,
            departed: BTreeSet::new(),
            directory: Directory::default(),
            machines: BTreeMap::new(),
            replica: Replica::default(),
            revocations: RevocationView::default(),
            tokens: TokenCache::default(),
            copies: Copies::default(),
            durable: durable::Durable::default(),
            hand_overs: BTreeMap::new(),
            own_queues: BTreeMap::new(),
            contradicted: BTreeMap::new(),
            contradict_later: BTreeSet::new(),
            unheard: BTreeSet::new(),
            mesh_decisions: BTreeMap::new(),
            services: services::Services::default(),
            hub: hub::HubState::default(),
            connections: connect::Connections::default(),
            discovery: discovery::Discovery::default(),
            approved_remotes: VecDeque::new(),
            refused_remotes: BTreeMap::new(),
            dials: BTreeMap::new(),
            ops: BTreeMap::new(),
            stored: BTreeMap::new(),
            saving: BTreeMap::new(),
            internal: VecDeque::new(),
            doubted_until: 0,
            internal_open: BTreeMap::new(),
            awaiting: Vec::new(),
            deferred: VecDeque::new(),
            outputs: VecDeque::new(),
            next_id: 0,
            gossip_at: now.mono + super::directory::GOSSIP_INTERVAL_MS,
            beacon_at: u64::MAX,
            upkeep_at: now.mono + UPKEEP_INTERVAL_MS,
            probe_at: u64::MAX,
            make_room_at: 0,
            dial_at: None,
            last_now: None,
            hand_over_until: 0,
            retry_at: 0,
            beacon_sent_at: 0,
            shutting_down: None,
            shutdown_said: false,
            stats: Counters::default(),
            traffic_shown: true,
        }
    }

    /// The daemon's own device.
    #[must_use]
    pub fn daemon(&self) -> DeviceId {
        self.daemon
    }

    /// Takes an input. Then poll the outputs until there are none.
    pub fn handle(&mut self, input: Input, now: Now) {
        self.note_time(now);
        match input {
            Input::Start => self.start(now),
            Input::Accepted { session, local, remote, kind, origin } => {
                self.session_opened(session, local, remote, kind, origin, now);
            }
            Input::Dialled { dial, session, remote, origin } => {
                self.dialled(dial, session, remote, origin, now);
            }
            Input::DialFailed { dial, reason } => self.dial_failed(dial, reason, now),
            Input::Frame { session, frame } => self.frame(session, frame, now),
            Input::Closed { session, reason } => self.session_closed(session, reason, now),
            Input::PortBound => self.port_bound(now),
            Input::PortBindFailed { in_use } => self.port_bind_failed(in_use, now),
            Input::Datagram { from, bytes } => self.datagram(from, &bytes, now),
            Input::LocalAddresses(addresses) => self.formation.set_local_addresses(addresses),
            Input::AddDevice(device) => self.add_device(*device, now),
            Input::RemoveDevice(device) => self.remove_device(device, now),
            Input::Command { op, agent, command } => self.command(op, agent, command, now),
            Input::Operator { op, command } => self.operator_command(op, command, now),
            Input::Discovery { op, command } => self.discovery_command(op, command, now),
            Input::Acp { op, to, ask } => self.ask_acp(op, to, ask, now),
            Input::ServiceAnswered { call, outcome } => self.service_answered(call, outcome, now),
            Input::Committed(ticket) => self.committed(ticket, true),
            Input::CommitFailed { ticket, records } => {
                self.committed(ticket, false);
                self.write_anew(records, now);
            }
            Input::IdentitySaved(ticket) => self.identity_saved(ticket, now),
            Input::DeadPids(dead) => self.dead_pids(&dead, now),
            Input::Tick => {}
            Input::Shutdown => self.shutdown(now),
            Input::MachineNamed(name) => self.machine_named(name, now),
            Input::Trusted(trust) => self.trust_changed(trust, now),
        }
        self.settle(now);
        self.upkeep(now);
        self.settle(now);
        self.keep_changes(now);
    }

    /// The next thing to do, oldest first.
    #[must_use]
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When [`Input::Tick`] is due at the latest (monotonic ms).
    #[must_use]
    pub fn next_deadline(&self) -> u64 {
        [
            self.upkeep_at,
            self.gossip_at,
            self.beacon_at,
            self.probe_at,
            self.dial_at.unwrap_or(u64::MAX),
            self.election.deadline().unwrap_or(u64::MAX),
            self.port_deadline().unwrap_or(u64::MAX),
            self.discovery.deadline(),
        ]
        .into_iter()
        .min()
        .unwrap_or(u64::MAX)
    }

    /// Runs requests between our own devices and outcomes that came without a session until
    /// nothing is left.
    fn settle(&mut self, now: Now) {
        for _ in 0..MAX_INTERNAL_TURNS {
            if let Some((purpose, local, remote, session, outcome)) = self.deferred.pop_front() {
                self.outcome(purpose, local, remote, session, outcome, now);
            } else if let Some(internal) = self.internal.pop_front() {
                self.internal_request(internal, now);
            } else {
                return;
            }
        }
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn random<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.entropy.fill(&mut bytes);
        bytes
    }

    fn log(&mut self, event: LogEvent) {
        self.outputs.push_back(Output::Log(event));
    }

    /// An event of traffic, which is only made when somebody sees it.
    fn log_traffic(&mut self, event: impl FnOnce() -> LogEvent) {
        if self.traffic_shown {
            self.log(event());
        }
    }

    /// Whether events of messages on their way are wanted; they are at first.
    pub fn show_traffic(&mut self, wanted: bool) {
        self.traffic_shown = wanted;
    }

    /// The key of a device of ours in service.
    #[must_use]
    pub fn device_key(&self, device: &DeviceId) -> Option<&DeviceKey> {
        self.devices.get(device).map(|device| &device.key)
    }

    fn is_hosted(&self, device: &DeviceId) -> bool {
        self.devices.contains_key(device)
    }

    /// One of our devices, in service or not.
    fn is_ours(&self, device: &DeviceId) -> bool {
        self.is_hosted(device) || self.parked.contains_key(device)
    }

    fn hosted_ids(&self) -> Vec<DeviceId> {
        self.devices.keys().copied().collect()
    }

    fn agent_ids(&self) -> Vec<DeviceId> {
        self.devices.iter().filter(|(_, d)| d.agent.is_some()).map(|(id, _)| *id).collect()
    }

    fn agent(&self, id: &DeviceId) -> Option<&Agent> {
        self.devices.get(id)?.agent.as_ref()
    }

    fn agent_mut(&mut self, id: &DeviceId) -> Option<&mut Agent> {
        self.devices.get_mut(id)?.agent.as_mut()
    }

    /// An agent of ours, in service or not.
    fn kept_agent_mut(&mut self, id: &DeviceId) -> Option<&mut Agent> {
        match self.devices.get_mut(id).and_then(|device| device.agent.as_mut()) {
            Some(agent) => Some(agent),
            None => self.parked.get_mut(id),
        }
    }

    fn record(&self, id: &DeviceId) -> Option<&AgentRecord> {
        self.replica.agent(id)
    }

    /// Whether any session with this device is open and let in, or it is one of ours.
    #[must_use]
    pub fn is_reachable(&self, device: &DeviceId) -> bool {
        self.is_hosted(device) || self.remotes.contains_key(device)
    }

    /// Whether the wall clock has jumped lately.
    fn doubts_clock(&self, now: Now) -> bool {
        now.mono < self.doubted_until
    }

    /// A wall clock that jumps means a suspend (or a set clock): links may have died unnoticed.
    fn note_time(&mut self, now: Now) {
        /// Drift that no scheduling delay explains.
        const JUMP_MS: u64 = 60_000;
        /// How long a clock that has jumped is doubted: whoever sets it back does so within minutes.
        const DOUBT_MS: u64 = 10 * 60_000;
        if let Some(before) = self.last_now.replace(now) {
            let mono = now.mono.saturating_sub(before.mono);
            let wall = now.unix.since(before.unix).max(before.unix.since(now.unix));
            if wall.abs_diff(mono) > JUMP_MS {
                self.doubted_until = now.mono + DOUBT_MS;
                self.log(LogEvent::new("clock_jumped").with("ms", wall.abs_diff(mono)));
                for session in self.sessions.values_mut() {
                    session.doubt(now.mono);
                }
                self.gossip_at = now.mono;
            }
        }
    }
}

impl Device {
    fn new(key: DeviceKey, data_port: u16, agent: Option<Agent>, now: Now) -> Self {
        Self {
            key,
            data_port,
            started_at: now.unix,
            agent,
            port_session: None,
            port_dial: None,
            told_hub: None,
            adverts: gossip::Adverts::default(),
        }
    }
}

impl Agent {
    /// `floor`: events are numbered above it.
    fn new(floor: u64) -> Self {
        Self {
            ephemeral: false,
            key: String::new(),
            version: 0,
            presence: AgentStatus::Active,
            mailbox: Mailbox::above(floor),
            outgoing: Outgoing::default(),
            tokens: BTreeMap::new(),
            grants: BTreeMap::new(),
            opened: BTreeSet::new(),
            consent: None,
            consents: BTreeMap::new(),
            decisions: BTreeMap::new(),
            shown: BTreeMap::new(),
            unstored: BTreeSet::new(),
            leaving: BTreeSet::new(),
            joining: BTreeSet::new(),
            invitations: BTreeSet::new(),
            services: BTreeMap::new(),
            asked: BTreeMap::new(),
            receipts: BTreeMap::new(),
        }
    }
}

/// Adverts held ready for sending.
pub(super) type OwnAdvert = Arc<PeerAdvert>;
