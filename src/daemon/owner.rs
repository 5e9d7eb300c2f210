//! The one task that owns the node: it takes inputs from the mesh, from local clients and from
//! time, and carries the node's outputs to the transport, the store, the identity files and the
//! clients. No protocol here and no waiting: everything slow happens in other tasks.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Map, Value};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::acp::mesh::{MeshAsk, Open};
use super::acp::resident::Resident;
use super::config::Config;
use super::discovery::DiscoveryReply;
use super::health::Health;
use super::hooks::{Handed, Sessions};
use super::hygiene::{Damped, Hygiene, Place};
use super::identities::{Identities, OpenError, OpenSlot};
use super::keeping::Keeper;
use super::listeners::Listener;
use super::logging::{self, Ring, emit, event};
use super::pages::Pages;
use super::project_rooms::{Project, SETTLE_EVERY};
use super::trust::TrustFile;
use super::vaults::{Desk, Done, OperatorReply, VaultReply};
use crate::api::tool::Action;
use crate::api::tool::render::{self, Viewer};
use crate::api::types::{self, ApiError, RequestId, notification};
use crate::identity::device::DeviceId;
use crate::identity::files::BaseDir;
use crate::identity::process::{Liveness, Processes as _, SystemProcesses};
use crate::mesh::events::DeliveryEvent;
use crate::mesh::journal::Ticket;
use crate::mesh::node::{AddDevice, AgentSpec, Input, Node, OpId, Origination, Output};
use crate::mesh::records::Now;
use crate::runtime::clock::Clock;
use crate::runtime::hub::{AddDeviceError, Hub};
use crate::runtime::link::Inputs;
use crate::runtime::listener::BindError;
use crate::runtime::local_socket::{CloseReason, ConnId, LocalHandle, LocalInput};
use crate::store::{Report, StoreError};

/// Inputs handled before the outputs are looked at again: bounds how long a flood on one side
/// keeps the others waiting.
const MAX_BATCH: usize = 128;
/// How long the daemon waits for peers to take note of its leaving.
const DRAIN_MS: u64 = 2_000;
/// How often conditions are looked at when nobody asks.
/// How often the trust file is looked at, as the reference does.
const TRUST_EVERY: Duration = Duration::from_secs(5);
const HEALTH_EVERY: Duration = Duration::from_secs(30);
/// How long links may take to write what is queued.
const CLOSE_WITHIN: Duration = Duration::from_secs(1);

/// What a connection is.
#[derive(Default)]
pub(super) struct Client {
    /// The agent it acts as.
    pub agent: Option<DeviceId>,
    /// Gets mailbox events.
    pub subscribed: bool,
}

/// A hosted agent.
pub(super) struct Hosted {
    pub slot: String,
    /// Directory or name behind the slot: two that differ may have one slot name.
    pub key: String,
    pub harness: String,
    pub ephemeral: bool,
    pub clients: Vec<ConnId>,
    /// Its place in the room of its directory, if it wants one.
    pub project: Option<Project>,
    /// The harness session that it belongs to.
    pub harness_pid: Option<u32>,
    /// How far its model has been given its mailbox.
    pub handed: Handed,
}

/// A request to be answered when something has happened.
pub(super) enum Waiting {
    /// At the next event, or when the time is up.
    Inbox { conn: ConnId, id: RequestId, agent: DeviceId, max: usize, until: u64 },
    /// At the next event that the hook is for, or when the time is up.
    Hook { conn: ConnId, id: RequestId, agent: DeviceId, moment: types::HookMoment, until: u64 },
}

impl Waiting {
    pub(super) fn conn(&self) -> ConnId {
        match self {
            Self::Inbox { conn, .. } | Self::Hook { conn, .. } => *conn,
        }
    }

    fn until(&self) -> u64 {
        match self {
            Self::Inbox { until, .. } | Self::Hook { until, .. } => *until,
        }
    }

    pub(super) fn agent(&self) -> DeviceId {
        match self {
            Self::Inbox { agent, .. } | Self::Hook { agent, .. } => *agent,
        }
    }
}

/// How the answer to a node command becomes the answer to a client.
pub(super) enum Reply {
    /// The room it was about.
    Room,
    /// The room as it is after the agent, or the room itself, has gone.
    RoomAfter(Box<types::Room>),
    /// What became of a message.
    Send,
    /// A decision on this request.
    Answered(Box<types::PendingRequest>, bool),
    /// A grant for a device or a user.
    Granted { bearer: DeviceId, principal: bool },
    /// What was found out about a device.
    Insight(DeviceId),
    /// A machine that was connected to: host and port.
    Connected(String, u16),
    /// A conversation opened with a grant.
    Opened(DeviceId),
    /// A grant withdrawn.
    Revoked(DeviceId),
    /// The agent's own record.
    Whoami,
    /// How far the mailbox is acknowledged.
    Acked,
    /// What a vault elsewhere answered.
    Vault(VaultReply),
    /// What discovery was asked for.
    Discovery(DiscoveryReply),
    /// What the operator asked for.
    Operator(OperatorReply),
    /// The attach, which waited for the room of the agent's directory.
    Attached {
        /// The agent.
        agent: DeviceId,
        /// Why it is not the slot that was asked for.
        reason: Option<String>,
    },
}

/// An attach whose slot is being opened.
pub(super) struct Opening {
    /// Who asked; nobody where the daemon itself brings an agent back.
    pub client: Option<(ConnId, RequestId)>,
    pub params: types::AttachParams,
    /// The agent that is brought back.
    pub expected: Option<DeviceId>,
    pub result: Result<OpenSlot, OpenError>,
}

pub(super) struct Owner {
    pub(super) config: Arc<Config>,
    /// Ends the daemon in order when cancelled.
    pub(super) stop: CancellationToken,
    pub(super) node: Node,
    pub(super) hub: Hub,
    pub(super) store: Keeper,
    /// What is wrong with the store.
    pub(super) store_error: Option<StoreError>,
    pub(super) identities: Identities,
    pub(super) base: BaseDir,
    pub(super) trust: TrustFile,
    /// Opened beside the daemon's own.
    pub(super) listeners: Vec<Listener>,
    /// What `--listen` has bound.
    pub(super) network_listener: Option<SocketAddr>,
    pub(super) local: LocalHandle,
    pub(super) ring: Ring,
    pub(super) clock: Clock,
    pub(super) health: Health,
    pub(super) clients: HashMap<ConnId, Client>,
    /// Clients that get log events, above these numbers.
    pub(super) followers: BTreeMap<ConnId, u64>,
    /// Clients that get changes.
    pub(super) watchers: BTreeSet<ConnId>,
    /// Where the page for this machine's user is.
    pub(super) pages: Pages,
    pub(super) hosted: BTreeMap<DeviceId, Hosted>,
    pub(super) opening: mpsc::Sender<Opening>,
    pub(super) opening_slots: Vec<String>,
    /// Attaches that wait for a slot which another client is just opening; at most one a
    /// connection, as its requests are bounded by the socket.
    pub(super) attach_later: Vec<(String, ConnId, RequestId, types::AttachParams)>,
    pub(super) replies: HashMap<OpId, (ConnId, RequestId, Reply)>,
    /// Requests that came as actions of the tool and are answered with its text; as many as the
    /// socket lets be unanswered.
    pub(super) actions: HashMap<(ConnId, RequestId), (Action, Viewer)>,
    pub(super) waiting: Vec<Waiting>,
    /// The agents of harness sessions, for their hooks.
    pub(super) sessions: Sessions,
    /// How much models write where.
    pub(super) hygiene: Hygiene,
    /// Agents whose mailbox has got something since the waits were last looked at.
    pub(super) news: BTreeSet<DeviceId>,
    pub(super) desk: Desk,
    /// This machine's side of the Agent Collaboration Protocol.
    pub(super) acp: Resident,
    /// What it has asked of peers.
    pub(super) acp_asks: Open,
    pub(super) next_op: u64,
    pub(super) change_seq: u64,
    pub(super) inputs: VecDeque<Input>,
    pub(super) shutdown_ready: bool,
    pub(super) machine: Option<DeviceId>,
    pub(super) principal: Option<DeviceId>,
}

/// Where inputs come from.
pub(super) struct Sources {
    pub mesh: Inputs,
    pub local: mpsc::Receiver<LocalInput>,
    pub opened: mpsc::Receiver<Opening>,
    pub saved: mpsc::Receiver<Ticket>,
    pub stored: mpsc::Receiver<Vec<Report>>,
    pub vaults: mpsc::Receiver<Done>,
    pub acp: mpsc::Receiver<MeshAsk>,
    pub stop: CancellationToken,
}

impl Owner {
    /// Runs until `stop` is cancelled and peers have been told.
    pub(super) async fn run(mut self, mut sources: Sources) -> Self {
        let mut drain_until: Option<u64> = None;
        let mut watchdog = super::watchdog();
        let mut look_at_health = tokio::time::interval(HEALTH_EVERY);
        let mut look_at_trust = tokio::time::interval(TRUST_EVERY);
        let mut settle_projects = tokio::time::interval(SETTLE_EVERY);
        self.restore_slots();
        loop {
            let now = self.clock.now();
            if self.shutdown_ready || drain_until.is_some_and(|until| until <= now.mono) {
                return self;
            }
            let deadline = self.deadline().min(drain_until.unwrap_or(u64::MAX));
            let wake = self.clock.instant(deadline);
            // Fair: no source can keep the others waiting.
            tokio::select! {
                () = sources.stop.cancelled(), if drain_until.is_none() => {
                    drain_until = Some(self.clock.now().mono + DRAIN_MS);
                    self.inputs.push_back(Input::Shutdown);
                }
                Some(input) = sources.mesh.recv() => {
                    // Asking for the next one says that this one has been dealt with: its link
                    // reads on only then.
                    self.feed(input);
                    for _ in 1..MAX_BATCH {
                        let Some(input) = sources.mesh.try_recv() else { break };
                        self.feed(input);
                    }
                }
                Some(input) = sources.local.recv() => {
                    self.local_input(input);
                    for _ in 1..MAX_BATCH {
                        let Ok(input) = sources.local.try_recv() else { break };
                        self.local_input(input);
                    }
                }
                Some(opening) = sources.opened.recv() => self.opened(opening),
                Some(done) = sources.vaults.recv() => self.vault_done(done),
                Some(ask) = sources.acp.recv() => self.mesh_asked(ask),
                Some(reports) = sources.stored.recv() => self.stored(reports),
                Some(ticket) = sources.saved.recv() => {
                    self.inputs.push_back(Input::IdentitySaved(ticket));
                }
                () = self.ring.grown() => {}
                () = watchdog.due() => {}
                _ = settle_projects.tick() => self.settle_project_rooms(),
                _ = look_at_trust.tick() => self.look_at_trust(),
                _ = look_at_health.tick() => drop(self.look_at_health()),
                () = tokio::time::sleep_until(wake) => self.inputs.push_back(Input::Tick),
            }
            self.turn();
            self.answer_waiting();
            self.push_logs();
        }
    }

    fn deadline(&self) -> u64 {
        let waiting = self.waiting.iter().map(Waiting::until).min().unwrap_or(u64::MAX);
        self.node.next_deadline().min(waiting)
    }

    fn feed(&mut self, input: Input) {
        self.inputs.push_back(input);
        self.turn();
    }

    /// Feeds the node and carries out what it wants until it is quiet.
    pub(super) fn turn(&mut self) {
        self.node.show_traffic(logging::shows_traffic() || !self.watchers.is_empty());
        while let Some(input) = self.inputs.pop_front() {
            self.node.handle(input, self.clock.now());
            while let Some(output) = self.node.poll_output() {
                self.carry_out(output);
            }
        }
    }

    fn carry_out(&mut self, output: Output) {
        match output {
            Output::Commit { ticket, records } => self.commit(ticket, records),
            Output::SaveIdentity { ticket, device, change } => {
                if !self.identities.save(ticket, device, change) {
                    self.inputs.push_back(Input::IdentitySaved(ticket));
                }
            }
            Output::AgentEvent { agent, seq, event } => self.agent_event(agent, seq, &event),
            Output::Service(call) => self.desk.serve(*call),
            Output::Acp(request) => self.mesh_serves(*request),
            Output::Reply { op, result } => self.command_answered(op, result),
            Output::ProbePids(agents) => {
                let dead = agents
                    .into_iter()
                    .filter(|(_, pid)| {
                        u32::try_from(*pid)
                            .is_ok_and(|pid| SystemProcesses.probe(pid) == Liveness::Dead)
                    })
                    .map(|(agent, _)| agent)
                    .collect();
                self.inputs.push_back(Input::DeadPids(dead));
            }
            Output::ShutdownReady => self.shutdown_ready = true,
            Output::Log(event) => {
                emit(&event);
                self.changed(&event);
            }
            transport => {
                // Everything that is left concerns the network.
                let _ = self.hub.execute(transport);
            }
        }
    }

    // --- clients ------------------------------------------------------------------------------------

    fn local_input(&mut self, input: LocalInput) {
        match input {
            LocalInput::Connected { conn, .. } => {
                self.clients.insert(conn, Client::default());
            }
            LocalInput::Request { conn, id, request } => self.request(conn, id, request),
            LocalInput::Disconnected { conn, reason } => self.disconnected(conn, reason),
        }
        self.turn();
    }

    fn disconnected(&mut self, conn: ConnId, reason: CloseReason) {
        self.release(conn, reason.0);
        self.hook_gone(conn);
        self.acp.gone(conn);
        self.clients.remove(&conn);
        self.followers.remove(&conn);
        self.watchers.remove(&conn);
        self.pages.gone(conn);
        self.actions.retain(|(of, _), _| *of != conn);
        self.waiting.retain(|waiting| waiting.conn() != conn);
    }

    /// The connection stops acting as its agent; the last client of a slot takes it out of service.
    pub(super) fn release(&mut self, conn: ConnId, reason: &'static str) {
        let Some(agent) = self.clients.get_mut(&conn).and_then(|client| client.agent.take()) else {
            return;
        };
        if let Some(client) = self.clients.get_mut(&conn) {
            client.subscribed = false;
        }
        emit(
            &event("client_detached")
                .with("conn", conn.0)
                .with("agent", agent)
                .with("reason", reason),
        );
        let Some(hosted) = self.hosted.get_mut(&agent) else { return };
        hosted.clients.retain(|held| *held != conn);
        // Shell agents come and go with every command and stay in service between them.
        let gone =
            hosted.clients.is_empty() && (hosted.harness != super::CLI_HARNESS || hosted.ephemeral);
        if gone {
            self.no_hook_waits(&agent);
            self.hosted.remove(&agent);
            self.inputs.push_back(Input::RemoveDevice(agent));
            self.turn();
            self.hub.remove_device(&agent);
            // Completes by itself; a Node bridge waiting for the lock finds it free.
            drop(self.identities.close(agent));
        }
    }

    fn opened(&mut self, opening: Opening) {
        if opening.params.ephemeral == Some(true) {
            // It kept nobody waiting, and is not the one that others wait for.
            self.serve_slot(opening);
            return;
        }
        let asked = super::requests::slot_key(&opening.params);
        self.opening_slots.retain(|slot| *slot != asked);
        self.serve_slot(opening);
        let waiting = std::mem::take(&mut self.attach_later);
        let (now, later) = waiting.into_iter().partition(|(slot, ..)| *slot == asked);
        self.attach_later = later;
        let now: Vec<_> = now;
        for (_, conn, id, params) in now {
            if self.clients.contains_key(&conn) {
                self.attach_asked(conn, id, params);
            }
        }
    }

    fn serve_slot(&mut self, opening: Opening) {
        if opening.client.is_none() && !self.may_restore(&opening) {
            return;
        }
        let Opening { client, params, result, .. } = opening;
        let slot = match result {
            Ok(slot) => slot,
            Err(error) => {
                let error = ApiError::new(error.code, error.message, "see `commsd doctor`");
                self.not_opened(client, &params, error);
                return;
            }
        };
        let agent = slot.key.id();
        let here = client.as_ref().is_some_and(|(conn, _)| self.clients.contains_key(conn));
        if !here && slot.ephemeral {
            return;
        }
        let project = params.project_room == Some(true);
        let data_port = match self.hub.add_device(&slot.key, &slot.certificate) {
            Ok(port) => port,
            Err(error) => {
                drop(self.identities.close(agent));
                let error = ApiError::new(
                    listener_code(&error),
                    format!("no data listener for the agent: {error}"),
                    "detach other agents or raise the descriptor limit (ulimit -n)",
                );
                self.not_opened(client, &params, error);
                return;
            }
        };
        let name = self.name_for(&params, &agent);
        self.hosted.insert(
            agent,
            Hosted {
                slot: slot.slot.clone(),
                key: super::requests::raw_key(&params),
                harness: params.harness.as_str().to_owned(),
                ephemeral: slot.ephemeral,
                clients: Vec::new(),
                project: project.then(|| Project::of(&params.cwd)),
                harness_pid: params.harness_pid,
                handed: Handed::default(),
            },
        );
        self.inputs.push_back(Input::AddDevice(Box::new(AddDevice {
            key: slot.key,
            data_port,
            agent: Some(AgentSpec {
                name,
                harness: params.harness.as_str().to_owned(),
                cwd: params.cwd.clone(),
                key: super::requests::raw_key(&params),
                tokens: slot.tokens,
                services: slot.services,
                grants: slot.grants,
                ephemeral: slot.ephemeral,
                // A shell agent goes on, whoever calls for it.
                resumed: params.harness.as_str() == super::CLI_HARNESS,
            }),
        })));
        self.turn();
        let Some((conn, id)) = client else { return };
        if project {
            self.enter_project_room(agent, (conn, id, slot.reason));
        } else {
            self.attach(conn, &id, agent, slot.reason);
        }
    }

    /// A slot cannot be served: who asked for it is told, or the log.
    fn not_opened(
        &mut self,
        client: Option<(ConnId, RequestId)>,
        params: &types::AttachParams,
        error: ApiError,
    ) {
        match client {
            Some((conn, id)) => self.refuse(conn, &id, error),
            None => emit(
                &event("slot_not_restored")
                    .with("slot", super::requests::slot_key(params))
                    .with("reason", &error.message),
            ),
        }
    }

    /// Makes a connection a client of an agent in service and answers its attach.
    pub(super) fn attach(
        &mut self,
        conn: ConnId,
        id: &RequestId,
        agent: DeviceId,
        reason: Option<String>,
    ) {
        let Some(client) = self.clients.get_mut(&conn) else {
            // Gone while the slot was opened: as if it had attached and left.
            if self.hosted.get(&agent).is_some_and(|hosted| hosted.clients.is_empty()) {
                self.clients.insert(conn, Client { agent: Some(agent), ..Client::default() });
                self.release(conn, CloseReason::CLIENT.0);
                self.clients.remove(&conn);
            }
            return;
        };
        client.agent = Some(agent);
        let Some(hosted) = self.hosted.get_mut(&agent) else { return };
        hosted.clients.push(conn);
        emit(
            &event("client_attached")
                .with("conn", conn.0)
                .with("agent", agent)
                .with("slot", &hosted.slot)
                .with("ephemeral", hosted.ephemeral),
        );
        let (_, seq) = self.node.mailbox_position(&agent).unwrap_or_default();
        let attached = types::Attached {
            agent: agent.hex(),
            name: self.node.own_agent(&agent).map(|record| record.name.clone()).unwrap_or_default(),
            slot: hosted.slot.clone(),
            seq,
            ephemeral: hosted.ephemeral,
            reason,
        };
        self.answer(conn, id, Ok(attached));
    }

    /// Answers a request with a typed result; one that came as an action of the tool, with its text.
    pub(super) fn answer<T: Serialize>(
        &mut self,
        conn: ConnId,
        id: &RequestId,
        result: Result<T, ApiError>,
    ) {
        if !self.actions.is_empty()
            && let Some((action, viewer)) = self.actions.remove(&(conn, id.clone()))
        {
            let value = result.and_then(|result| {
                serde_json::to_value(result).map_err(|error| ApiError::internal(error.to_string()))
            });
            self.local.reply(conn, id, &render::result(&action, &viewer, value));
            return;
        }
        match result {
            Ok(result) => self.local.reply(conn, id, &result),
            Err(error) => self.local.refuse(conn, id, error),
        }
    }

    /// A request that is not done.
    pub(super) fn refuse(&mut self, conn: ConnId, id: &RequestId, error: ApiError) {
        self.answer::<()>(conn, id, Err(error));
    }

    fn agent_event(&mut self, agent: DeviceId, seq: u64, event: &DeliveryEvent) {
        self.note_said(agent, event);
        if !self.waiting.is_empty() {
            self.news.insert(agent);
        }
        let subscribed: Vec<ConnId> = self
            .hosted
            .get(&agent)
            .into_iter()
            .flat_map(|hosted| &hosted.clients)
            .filter(|conn| self.clients.get(conn).is_some_and(|client| client.subscribed))
            .copied()
            .collect();
        if subscribed.is_empty() {
            return;
        }
        let pushed = Pushed::new(&self.node, &agent, seq, event, self.now());
        for conn in subscribed {
            // A client that is gone or too slow finds the event in its mailbox.
            let _ = self.local.notify(conn, notification::EVENT, &pushed);
        }
    }

    /// What somebody wrote to one of our agents.
    fn note_said(&mut self, agent: DeviceId, event: &DeliveryEvent) {
        let now = self.clock.now().mono;
        // What a model here writes was noted when it wrote it; scripts are free.
        if let DeliveryEvent::Dm { message } = event
            && !self.hosted.contains_key(&message.from)
        {
            let place = Place::pair(message.from, agent);
            self.hygiene.note(place, message.from, message.content.len(), now);
        }
    }

    /// Whether a model may write to a place now; it has written then.
    pub(super) fn may_say(
        &mut self,
        agent: DeviceId,
        place: Place,
        bytes: usize,
    ) -> Result<(), Damped> {
        let now = self.clock.now().mono;
        let judged = self.hygiene.judge(&place, agent, bytes, now);
        match judged {
            Ok(()) => {
                self.hygiene.note(place, agent, bytes, now);
            }
            Err(damped) => {
                emit(&event("message_damped").with("agent", agent).with("code", damped.code()));
            }
        }
        judged
    }

    /// Answers the waits that have something to tell, or whose time is up.
    fn answer_waiting(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let now = self.clock.now();
        let news = std::mem::take(&mut self.news);
        let waiting = std::mem::take(&mut self.waiting);
        for wait in waiting {
            let due = wait.until() <= now.mono;
            if !due && !news.contains(&wait.agent()) {
                self.waiting.push(wait);
                continue;
            }
            match wait {
                Waiting::Inbox { conn, id, agent, max, until } => {
                    let inbox = self.inbox(&agent, max);
                    if due || !inbox.events.is_empty() {
                        self.answer(conn, &id, Ok(inbox));
                    } else {
                        self.waiting.push(Waiting::Inbox { conn, id, agent, max, until });
                    }
                }
                Waiting::Hook { conn, id, agent, moment, until } => {
                    let taken = self.take_for_hook(conn, &agent, moment);
                    if due || taken.more || !taken.events.is_empty() {
                        self.answer(conn, &id, Ok(taken));
                    } else {
                        self.waiting.push(Waiting::Hook { conn, id, agent, moment, until });
                    }
                }
            }
        }
    }

    pub(super) fn inbox(&self, agent: &DeviceId, max: usize) -> types::Inbox {
        let (_, acknowledged) = self.node.mailbox_position(agent).unwrap_or_default();
        let mut events: Vec<types::Event> = Vec::new();
        let now = self.now();
        let mut bytes = 0;
        let mut more = false;
        for numbered in self.node.inbox(agent, acknowledged) {
            let event = api_event(&self.node, agent, numbered.seq, &numbered.event, now);
            bytes += super::requests::weight(&event);
            if events.len() >= max || (bytes > super::MAX_ANSWER_BYTES && !events.is_empty()) {
                more = true;
                break;
            }
            events.push(event);
        }
        types::Inbox { events, more }
    }

    fn push_logs(&mut self) {
        for (conn, after) in &mut self.followers {
            let (events, _) = self.ring.read(*after, MAX_BATCH);
            for event in events {
                *after = event.seq;
                // Whoever is gone is taken off the list when that has been reported.
                let _ = self.local.notify(*conn, notification::LOG, &event);
            }
        }
    }

    /// Tells watchers that something about agents, rooms or peers may have changed.
    fn changed(&mut self, event: &crate::mesh::log::LogEvent) {
        self.change_seq += 1;
        if self.watchers.is_empty() {
            return;
        }
        let mut body = Map::new();
        body.insert("type".into(), Value::String(event.name.to_owned()));
        body.insert("cursor".into(), Value::String(self.cursor()));
        for (field, value) in &event.fields {
            body.insert((*field).to_owned(), Value::String(value.clone()));
        }
        let change = types::Event { seq: self.change_seq, body };
        for conn in &self.watchers {
            let _ = self.local.notify(*conn, notification::CHANGE, &change);
        }
    }

    /// Where the stream of changes stands: this daemon's start and the number.
    pub(super) fn cursor(&self) -> String {
        format!("{}.{}", self.node.daemon().short(), self.change_seq)
    }

    pub(super) fn now(&self) -> Now {
        self.clock.now()
    }

    /// Everything that has to end in order.
    pub(super) async fn finish(mut self, uptime_ms: u64) {
        self.acp.close().await;
        self.hub.shutdown(CLOSE_WITHIN).await;
        self.store.finish().await;
        for (agent, hosted) in std::mem::take(&mut self.hosted) {
            if !hosted.ephemeral {
                // The thread releases what is left when it ends.
                let _ = self.identities.close(agent).await;
            }
        }
        emit(&logging::event("stopped").with("uptime_ms", uptime_ms));
    }
}

/// Running out of descriptors has a code of its own: it can be mended.
fn listener_code(error: &AddDeviceError) -> &'static str {
    match error {
        AddDeviceError::Bind(BindError::Failed { error, .. })
            if super::is_descriptor_error(error) =>
        {
            "limit_descriptors"
        }
        error => error.code(),
    }
}

/// Whose the agent is that writes or asks; nothing for one of our own user's on this machine.
#[derive(Serialize, Default)]
#[serde(rename_all = "camelCase")]
pub(super) struct Origin {
    /// The machine that it proves to be on, when that is another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) from_machine: Option<String>,
    /// That it is another user's of this machine, or nothing is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) from_user: Option<&'static str>,
}

impl Origin {
    pub(super) fn of(node: &Node, device: &DeviceId, now: Now) -> Self {
        let from_user = |user| Self { from_user: Some(user), ..Self::default() };
        match node.origination(device, now) {
            Origination::OwnUser => Self::default(),
            Origination::OtherUser => from_user("other"),
            Origination::Machine(machine) => {
                Self { from_machine: Some(machine), ..Self::default() }
            }
            Origination::Unknown => from_user("unknown"),
        }
    }
}

/// A mailbox event as clients see it: with the name of whom it is about, where that is known.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Pushed<'a> {
    seq: u64,
    #[serde(flatten)]
    event: &'a DeliveryEvent,
    #[serde(skip_serializing_if = "Option::is_none")]
    from_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    agent_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    requester_name: Option<String>,
    #[serde(flatten)]
    origin: Origin,
    /// A room's message that speaks to this agent.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    addressed: bool,
    /// About the agent itself: its message to itself, or that it is in a room no more.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    own: bool,
}

impl<'a> Pushed<'a> {
    pub(super) fn new(
        node: &Node,
        agent: &DeviceId,
        seq: u64,
        event: &'a DeliveryEvent,
        now: Now,
    ) -> Self {
        let mut pushed = Self {
            seq,
            event,
            from_name: None,
            agent_name: None,
            requester_name: None,
            origin: Origin::default(),
            addressed: false,
            own: false,
        };
        let origin = |device| Origin::of(node, device, now);
        match event {
            DeliveryEvent::Dm { message } => {
                pushed.from_name = node.shown_name(&message.from);
                pushed.origin = origin(&message.from);
                pushed.own = message.from == *agent;
            }
            DeliveryEvent::RoomMessage { message } => {
                pushed.from_name = node.shown_name(&message.from);
                pushed.origin = origin(&message.from);
                pushed.addressed = node.is_addressed(agent, message);
            }
            DeliveryEvent::MemberLeft { agent: who, .. } => {
                pushed.agent_name = node.shown_name(who);
                pushed.own = who == agent;
            }
            DeliveryEvent::MemberJoined { agent, .. }
            | DeliveryEvent::MemberStatus { agent, .. }
            | DeliveryEvent::DeliveryStatus { agent, .. }
            | DeliveryEvent::MessagesRead { agent, .. } => {
                pushed.agent_name = node.shown_name(agent);
            }
            DeliveryEvent::RoomJoinRequest { requester_id, .. } => {
                pushed.requester_name = node.shown_name(requester_id);
                pushed.origin = origin(requester_id);
            }
            DeliveryEvent::CapabilityRequest { requester_device, .. } => {
                pushed.requester_name = node.shown_name(requester_device);
                pushed.origin = origin(requester_device);
            }
            DeliveryEvent::RoomInvite { from, .. } => pushed.origin = origin(from),
            // These carry their names, or none is of use.
            DeliveryEvent::RoomMembers { .. }
            | DeliveryEvent::InviteDeclined { .. }
            | DeliveryEvent::NameChanged { .. }
            | DeliveryEvent::ConnectionRequest { .. }
            | DeliveryEvent::JoinOutcome { .. }
            | DeliveryEvent::CapabilityOutcome { .. } => {}
        }
        pushed
    }
}

/// A mailbox event as clients see it, as a value.
pub(super) fn api_event(
    node: &Node,
    agent: &DeviceId,
    seq: u64,
    event: &DeliveryEvent,
    now: Now,
) -> types::Event {
    let body = match serde_json::to_value(Pushed::new(node, agent, seq, event, now)) {
        Ok(Value::Object(mut body)) => {
            body.remove("seq");
            body
        }
        _ => Map::new(),
    };
    types::Event { seq, body }
}
