//! Requests of local clients: names become ids, requests become node commands or views, and
//! views become the API's values. The sender of everything is the connection's agent.

use std::collections::{BTreeSet, HashMap};

use serde_json::Value;
use tokio::sync::oneshot;

use super::advice::{detached, todo};
use super::hygiene::Place;
use super::identities::{OpenError, OpenSlot};
use super::owner::{Client, Opening, Owner, Pushed, Reply, Waiting};
use super::pending::invited_to;
use crate::api::acp::{AcpCall, AcpParams};
use crate::api::tool::Action;
use crate::api::tool::render::{self, Viewer};
use crate::api::types::{self, ApiError, AttachParams, Request, RequestId, Time, WaitSecs};
use crate::codec::text::truncate_chars;
use crate::identity::device::DeviceId;
use crate::identity::names;
use crate::mesh::events::DeliveryState;
use crate::mesh::node::{
    Command, CommandError, CommandResult, DecisionTarget, Delivery, Input, MAX_TRACE_MS, OpId,
    RoomView,
};
use crate::mesh::records::{self, AgentRecord, ConsentPolicy};
use crate::mesh::wire::cose::CoseSign1;
use crate::mesh::wire::room_path::{self, RoomPath};
use crate::runtime::local_socket::ConnId;
use crate::runtime::sys;

/// Hex digits that name an agent at least (decision: `interface.md`).
const MIN_PREFIX: usize = 8;
/// Characters left of a peer's text where a list is too long.
const MAX_SHORT_CHARS: usize = 64;
/// Bytes of a grant's text; a delegated one has 1,500.
const MAX_GRANT_TEXT: usize = 16 * 1024;
/// Candidates listed when a name is ambiguous.
const MAX_CANDIDATES: usize = 8;

/// Whether a text can be the beginning of an id.
fn is_prefix(text: &str) -> bool {
    text.len() >= MIN_PREFIX && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Rough size of an event in an answer.
pub(super) fn weight(event: &types::Event) -> usize {
    serde_json::to_vec(event).map_or(0, |bytes| bytes.len())
}

/// What the slot of an attach is for: a directory, or the name of a shell agent.
pub(super) fn raw_key(params: &AttachParams) -> String {
    params.key.as_ref().map_or(params.cwd.clone(), |key| key.as_str().to_owned())
}

/// The slot an attach asks for, as the base of its file name.
pub(super) fn slot_key(params: &AttachParams) -> String {
    let key = params.key.as_ref().map_or(params.cwd.as_str(), |key| key.as_str());
    crate::identity::slot::SlotName::new(params.harness.as_str(), key)
        .map(|name| name.base().to_owned())
        .unwrap_or_default()
}

/// Whether a path is as the system tells a process its working directory. What names its parts may
/// have is the file system's business.
fn is_real_directory_name(path: &str) -> bool {
    /// Linux's `PATH_MAX`, the longest of any system.
    const MAX_PATH: usize = 4096;
    let Some(rest) = path.strip_prefix('/') else { return false };
    let part = |part: &str| !matches!(part, "" | "." | "..");
    path.len() <= MAX_PATH && !path.contains('\0') && (rest.is_empty() || rest.split('/').all(part))
}

fn room_type(kind: records::RoomType) -> types::RoomType {
    match kind {
        records::RoomType::Public => types::RoomType::Public,
        records::RoomType::Private => types::RoomType::Private,
        records::RoomType::Secret => types::RoomType::Secret,
    }
}

fn status(status: records::AgentStatus) -> types::AgentStatus {
    match status {
        records::AgentStatus::Active => types::AgentStatus::Active,
        records::AgentStatus::Idle => types::AgentStatus::Idle,
        records::AgentStatus::Busy => types::AgentStatus::Busy,
        records::AgentStatus::Offline => types::AgentStatus::Offline,
    }
}

fn visibility(visibility: records::Visibility) -> types::Visibility {
    match visibility {
        records::Visibility::Visible => types::Visibility::Visible,
        records::Visibility::Hidden => types::Visibility::Hidden,
        records::Visibility::Ghost => types::Visibility::Ghost,
    }
}

fn consent(policy: ConsentPolicy) -> types::Consent {
    match policy {
        ConsentPolicy::Ask => types::Consent::Ask,
        ConsentPolicy::SamePrincipal => types::Consent::SamePrincipal,
        ConsentPolicy::Open => types::Consent::Open,
        ConsentPolicy::Closed => types::Consent::Closed,
    }
}

fn behavior(timing: Option<types::Timing>) -> Option<records::StreamingBehavior> {
    timing.map(|timing| match timing {
        types::Timing::Steer => records::StreamingBehavior::Steer,
        types::Timing::FollowUp => records::StreamingBehavior::FollowUp,
        types::Timing::Info => records::StreamingBehavior::Info,
    })
}

pub(super) fn some_text(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

pub(super) fn wait_ms(wait: Option<WaitSecs>) -> u64 {
    wait.map_or(0, |wait| wait.get() * 1000)
}

impl Owner {
    pub(super) fn request(&mut self, conn: ConnId, id: RequestId, request: Request) {
        match request {
            // The socket answers it; a second one is a mistake it reports itself.
            Request::Hello(_) => {}
            Request::Attach(params) => self.attach_asked(conn, id, params),
            Request::Detach(_) => {
                self.release(conn, "detached");
                self.answer(conn, &id, Ok(types::Done {}));
            }
            Request::Status(params) => {
                let mut status = self.status_view(params.limits.unwrap_or(false));
                status.settings = (params.settings == Some(true)).then(|| self.config.settings());
                self.answer(conn, &id, Ok(status));
            }
            Request::DaemonStop(_) => {
                let (pid, version) = (std::process::id(), types::PROGRAM_VERSION.to_owned());
                self.answer(conn, &id, Ok(types::Stopping { pid, version }));
                self.stop.cancel();
            }
            Request::Agents(_) => {
                let agents = self.agents_view(conn);
                self.answer(conn, &id, Ok(types::AgentList { agents }));
            }
            Request::Rooms(_) => {
                let rooms = self.rooms_view(conn);
                self.answer(conn, &id, Ok(types::RoomList { rooms }));
            }
            Request::Logs(params) => {
                let max = params.max.map_or(types::MAX_PAGE, types::PageSize::get);
                let (events, more) = self
                    .ring
                    .read(params.after.unwrap_or(0), usize::try_from(max).unwrap_or(usize::MAX));
                let last = events.last().map_or(params.after.unwrap_or(0), |event| event.seq);
                if params.follow == Some(true) {
                    self.followers.insert(conn, last);
                }
                self.answer(conn, &id, Ok(types::Logs { events, more }));
            }
            Request::Watch(params) => {
                self.watchers.insert(conn);
                let cursor = self.cursor();
                let fits = params.after.as_ref() == Some(&cursor);
                let snapshot = (!fits).then(|| types::Snapshot {
                    status: self.status_view(false),
                    agents: self.agents_view(conn),
                    rooms: self.rooms_view(conn),
                });
                self.answer(conn, &id, Ok(types::Watching { cursor, snapshot }));
            }
            Request::Action(params) => self.action(conn, id, params),
            Request::Petnames(_) => {
                let petnames = self.petname_list();
                self.answer(conn, &id, petnames);
            }
            Request::PetnameSet(params) => {
                let set = self.petname_given(&params, conn);
                self.answer(conn, &id, set);
            }
            Request::PetnameClear(params) => {
                let cleared = self.petname_cleared(&params.device, conn);
                self.answer(conn, &id, cleared);
            }
            Request::MachineName(params) => {
                let name = self.machine_named(params.name);
                self.answer(conn, &id, name);
            }
            Request::MeshListen(params) => {
                let listener = self.listen(&params);
                self.answer(conn, &id, listener);
            }
            Request::MeshUnlisten(params) => {
                let listener = self.unlisten(&params.id);
                self.answer(conn, &id, listener);
            }
            Request::MeshListeners(_) => {
                let listeners = self.listener_list();
                self.answer(conn, &id, Ok(types::MeshListeners { listeners }));
            }
            Request::MeshInterfaces(_) => {
                self.answer(conn, &id, super::listeners::interfaces());
            }
            Request::MeshDiscover(_)
            | Request::MeshAdvertise(_)
            | Request::MeshUnadvertise(_)
            | Request::MeshSetVisibility(_)
            | Request::MeshGetVisibility(_) => self.discovery_request(conn, &id, request),
            Request::TrustAdd(params) => {
                let changed = self.trust_changed(&params.id, params.kind, true);
                self.answer(conn, &id, changed);
            }
            Request::TrustRemove(params) => {
                let changed = self.trust_changed(&params.id, params.kind, false);
                self.answer(conn, &id, changed);
            }
            Request::TrustList(_) => {
                let trusted = self.trusted();
                self.answer(conn, &id, trusted);
            }
            Request::VaultShare(params) => self.vault_share(conn, id, params),
            Request::VaultUnshare(params) => self.vault_unshare(conn, id, params),
            Request::VaultShares(_) => {
                let shares = self.vault_shares();
                self.answer(conn, &id, Ok(types::VaultShares { shares }));
            }
            Request::VaultRevoke(params) => self.vault_revoke(conn, id, params),
            Request::Acp(AcpParams(call)) => self.acp_call(conn, id, *call),
            Request::WebAnnounce(params) => self.web_announce(conn, &id, params),
            Request::WebUrl(_) => self.web_url(conn, &id),
            Request::HookTake(params) => self.hook_take(conn, id, params),
            Request::HookShown(_) => {
                self.hook_shown(conn);
                self.answer(conn, &id, Ok(types::Done {}));
            }
            Request::Pending(_) if self.viewer(conn).is_none() => {
                let requests = self.pending(None);
                self.answer(conn, &id, Ok(types::PendingList { requests }));
            }
            Request::Accept(_) | Request::Reject(_) if self.viewer(conn).is_none() => {
                if let Err(error) = self.operator_decides(conn, &id, &request) {
                    self.refuse(conn, &id, error);
                }
            }
            other => match self.clients.get(&conn).and_then(|client| client.agent) {
                Some(agent) => self.agent_request(conn, id, agent, other),
                None => {
                    let error = ApiError::new(
                        ApiError::NOT_ATTACHED,
                        format!("{} acts as an agent, and none is attached", other.method()),
                        "attach first; on the command line: --as NAME",
                    );
                    self.refuse(conn, &id, error);
                }
            },
        }
    }

    /// Tasks are the user's, not an agent's: nobody needs to be attached. Only the owner's own word is
    /// not for agents to give.
    fn acp_call(&mut self, conn: ConnId, id: RequestId, call: AcpCall) {
        if matches!(call, AcpCall::Answer(_)) && self.viewer(conn).is_some() {
            let error = ApiError::new(
                "acp_owner_only",
                "what a task waits for is answered by its owner, not by an agent",
                "the owner answers with `commsd acp approvals`",
            );
            self.refuse(conn, &id, error);
            return;
        }
        self.acp.call(&self.local, conn, id, call);
    }

    fn agent_request(&mut self, conn: ConnId, id: RequestId, agent: DeviceId, request: Request) {
        if let Err(error) = self.agent_request_or(conn, &id, agent, request) {
            self.refuse(conn, &id, error);
        }
    }

    fn agent_request_or(
        &mut self,
        conn: ConnId,
        id: &RequestId,
        agent: DeviceId,
        request: Request,
    ) -> Result<(), ApiError> {
        let (command, reply) = match request {
            Request::Whoami(_) => {
                let whoami = self.whoami(&agent);
                self.answer(conn, id, whoami);
                return Ok(());
            }
            Request::RoomCreate(p) => (
                Command::CreateRoom {
                    name: p.name,
                    kind: match p.r#type.unwrap_or(types::RoomType::Public) {
                        types::RoomType::Public => records::RoomType::Public,
                        types::RoomType::Private => records::RoomType::Private,
                        types::RoomType::Secret => records::RoomType::Secret,
                    },
                    description: p.description.unwrap_or_default(),
                },
                Reply::Room,
            ),
            Request::RoomJoin(p) => {
                (Command::JoinRoom(self.find_room_to_join(&p.room, &agent)?), Reply::Room)
            }
            Request::RoomLeave(p) => {
                let path = self.find_room(&p.room, &agent)?;
                let mut room = self.room_or_path(&path, &agent);
                let leaver = agent.hex();
                room.members.retain(|member| member.id != leaver);
                let command = Command::LeaveRoom { room: path, reason: p.reason };
                (command, Reply::RoomAfter(Box::new(room)))
            }
            Request::RoomDestroy(p) => {
                let path = self.find_room(&p.room, &agent)?;
                let room = types::Room { members: Vec::new(), ..self.room_or_path(&path, &agent) };
                (Command::DestroyRoom(path), Reply::RoomAfter(Box::new(room)))
            }
            Request::RoomInvite(p) => (
                Command::Invite {
                    room: self.find_room(&p.room, &agent)?,
                    agent: self.find_agent(&p.agent, &agent)?,
                },
                Reply::Room,
            ),
            Request::RoomKick(p) => (
                Command::Kick {
                    room: self.find_room(&p.room, &agent)?,
                    agent: self.find_agent(&p.agent, &agent)?,
                },
                Reply::Room,
            ),
            Request::RoomMembers(p) => {
                let path = self.find_room(&p.room, &agent)?;
                let room = self.room_view(&path, &agent).ok_or_else(|| no_room(&p.room));
                self.answer(conn, id, room);
                return Ok(());
            }
            Request::RoomHistory(p) => {
                let history = self.history(&agent, &p)?;
                self.answer(conn, id, Ok(history));
                return Ok(());
            }
            Request::Send(p) => {
                let room = self.find_room(&p.room, &agent)?;
                let text = p.text.into_string();
                if self.actions.contains_key(&(conn, id.clone())) {
                    self.may_say(agent, Place::Room(room.to_string(), agent), text.len())?;
                }
                let behavior = behavior(p.timing);
                (Command::Send { room, text, reply_to: p.reply_to, behavior }, Reply::Send)
            }
            Request::Dm(p) => {
                let to = self.find_agent(&p.agent, &agent)?;
                let text = p.text.into_string();
                if self.actions.contains_key(&(conn, id.clone())) {
                    self.may_say(agent, Place::pair(agent, to), text.len())?;
                }
                let (behavior, wait_ms) = (behavior(p.timing), wait_ms(p.wait));
                (Command::Dm { to, text, reply_to: p.reply_to, behavior, wait_ms }, Reply::Send)
            }
            Request::MeshVersion(p) => {
                let device = self.find_agent(&p.device, &agent)?;
                (Command::QueryVersion(device), Reply::Insight(device))
            }
            Request::MeshTrace(p) => {
                if p.timeout_ms.is_some_and(|ms| ms == 0 || ms > MAX_TRACE_MS) {
                    return Err(ApiError::invalid_params(
                        "mesh.trace",
                        format!("`timeoutMs`: 1 to {MAX_TRACE_MS}"),
                    ));
                }
                let to = self.find_agent(&p.target, &agent)?;
                (Command::Trace { to, timeout_ms: p.timeout_ms }, Reply::Insight(to))
            }
            Request::MeshConnect(p) => {
                check_host(&p)?;
                let reply = Reply::Connected(p.host.clone(), p.port);
                (Command::Connect { host: p.host, port: p.port }, reply)
            }
            Request::MeshGraph(_) => {
                let graph = self.graph(&agent);
                self.answer(conn, id, Ok(graph));
                return Ok(());
            }
            Request::TrustCodeCreate(p) => return self.code_wanted(conn, id, agent, p),
            Request::TrustCodeRedeem(p) => return self.code_given(conn, id, agent, p),
            Request::DmAdmit(p) => {
                let principal = p.principal == Some(true);
                let bearer = self.grant_bearer(&p.agent, principal, &agent)?;
                let known = self.dm_grant_of(&bearer)?;
                let reply = Reply::Granted { bearer, principal };
                (Command::AdmitDm { bearer, principal, known }, reply)
            }
            Request::DmUseGrant(p) => {
                let to = self.find_agent(&p.agent, &agent)?;
                let grant = CoseSign1::from_text(&p.grant)
                    .ok()
                    .filter(|_| p.grant.len() <= MAX_GRANT_TEXT)
                    .ok_or_else(|| {
                        ApiError::new(
                            "invalid_token",
                            "that is no grant",
                            "copy the whole line that dm_admit printed on the other side",
                        )
                    })?;
                (Command::UseDmGrant { to, grant }, Reply::Opened(to))
            }
            Request::DmRevoke(p) => {
                let bearer = self.grant_bearer(&p.agent, false, &agent)?;
                let Some(token_id) = self.dm_grant_of(&bearer)? else {
                    let none = types::DmRevoked { bearer: bearer.hex(), revoked: false };
                    self.answer(conn, id, Ok(none));
                    return Ok(());
                };
                (Command::RevokeDm { bearer, token_id }, Reply::Revoked(bearer))
            }
            Request::Pending(_) => {
                let requests = self.pending(Some(&agent));
                self.answer(conn, id, Ok(types::PendingList { requests }));
                return Ok(());
            }
            Request::VaultRequest(p) => {
                self.vault_request(conn, id, agent, p)?;
                return Ok(());
            }
            Request::VaultDelegate(p) => {
                self.vault_delegate(conn, id, agent, p)?;
                return Ok(());
            }
            Request::VaultCall(p) => {
                self.vault_call(conn, id, agent, p)?;
                return Ok(());
            }
            Request::Accept(p) => {
                let request = self.find_pending(p.which()?, &agent)?;
                if request.kind == types::PendingKind::Capability {
                    return self.decide_capability(conn, id, request, Ok(p.terms));
                }
                if p.terms.is_some() {
                    return Err(ApiError::invalid_params(
                        "accept",
                        "`terms` belong to a request for a capability",
                    ));
                }
                let command = match invited_to(&request) {
                    Some(room) => Command::JoinRoom(room),
                    None => Command::Accept(DecisionTarget::Id(request.id.clone())),
                };
                (command, Reply::Answered(Box::new(request), true))
            }
            Request::Reject(p) => {
                let request = self.find_pending(p.which()?, &agent)?;
                if request.kind == types::PendingKind::Capability {
                    return self.decide_capability(conn, id, request, Err(p.reason));
                }
                let command = match invited_to(&request) {
                    Some(room) => Command::LeaveRoom { room, reason: p.reason },
                    None => {
                        let target = DecisionTarget::Id(request.id.clone());
                        Command::Reject { target, reason: p.reason }
                    }
                };
                (command, Reply::Answered(Box::new(request), false))
            }
            Request::Inbox(p) => {
                let max = p.max.map_or(types::DEFAULT_PAGE, types::PageSize::get);
                let max = usize::try_from(max).unwrap_or(usize::MAX);
                let inbox = self.inbox(&agent, max);
                let wait = wait_ms(p.wait);
                if inbox.events.is_empty() && wait > 0 {
                    let until = self.now().mono + wait;
                    let id = id.clone();
                    self.waiting.push(Waiting::Inbox { conn, id, agent, max, until });
                } else {
                    self.answer(conn, id, Ok(inbox));
                }
                return Ok(());
            }
            Request::EventsSubscribe(p) => {
                self.subscribe(conn, id, agent, p.after);
                return Ok(());
            }
            Request::EventsGiven(p) => {
                let given = self.given(&agent, p.seq);
                self.answer(conn, id, Ok(given));
                return Ok(());
            }
            Request::EventsLost(p) => {
                self.lost(&agent, p.seq);
                self.answer(conn, id, Ok(types::Done {}));
                return Ok(());
            }
            Request::EventsAck(p) => {
                self.arrived(&agent, p.seq);
                (Command::Acknowledge(p.seq), Reply::Acked)
            }
            Request::Update(p) => (
                Command::Update {
                    name: p.name,
                    status: p.status.map(|status| match status {
                        types::OwnStatus::Active => records::AgentStatus::Active,
                        types::OwnStatus::Idle => records::AgentStatus::Idle,
                        types::OwnStatus::Busy => records::AgentStatus::Busy,
                    }),
                    visibility: p.visibility.map(|visibility| match visibility {
                        types::Visibility::Visible => records::Visibility::Visible,
                        types::Visibility::Hidden => records::Visibility::Hidden,
                        types::Visibility::Ghost => records::Visibility::Ghost,
                    }),
                    tags: p.tags,
                    consent: p.consent.map(|consent| match consent {
                        types::Consent::Ask => ConsentPolicy::Ask,
                        types::Consent::SamePrincipal => ConsentPolicy::SamePrincipal,
                        types::Consent::Open => ConsentPolicy::Open,
                        types::Consent::Closed => ConsentPolicy::Closed,
                    }),
                },
                Reply::Whoami,
            ),
            // Handled before: they need no agent.
            Request::Hello(_)
            | Request::Attach(_)
            | Request::Detach(_)
            | Request::Status(_)
            | Request::DaemonStop(_)
            | Request::Agents(_)
            | Request::Rooms(_)
            | Request::Logs(_)
            | Request::Watch(_)
            | Request::HookTake(_)
            | Request::HookShown(_)
            | Request::Action(_)
            | Request::MeshListen(_)
            | Request::MeshUnlisten(_)
            | Request::MeshListeners(_)
            | Request::MeshInterfaces(_)
            | Request::MeshDiscover(_)
            | Request::MeshAdvertise(_)
            | Request::MeshUnadvertise(_)
            | Request::MeshSetVisibility(_)
            | Request::MeshGetVisibility(_)
            | Request::TrustAdd(_)
            | Request::TrustRemove(_)
            | Request::TrustList(_)
            | Request::VaultShare(_)
            | Request::VaultUnshare(_)
            | Request::VaultShares(_)
            | Request::VaultRevoke(_)
            | Request::Acp(_)
            | Request::Petnames(_)
            | Request::PetnameSet(_)
            | Request::PetnameClear(_)
            | Request::MachineName(_)
            | Request::WebAnnounce(_)
            | Request::WebUrl(_) => return Ok(()),
        };
        self.command(conn, id, agent, command, reply);
        Ok(())
    }

    /// Has the node carry out an agent's command and remembers whom to answer, and how.
    pub(super) fn command(
        &mut self,
        conn: ConnId,
        id: &RequestId,
        agent: DeviceId,
        command: Command,
        reply: Reply,
    ) {
        self.next_op += 1;
        let op = OpId(self.next_op);
        self.replies.insert(op, (conn, id.clone(), reply));
        self.inputs.push_back(Input::Command { op, agent, command });
    }

    pub(super) fn command_answered(
        &mut self,
        op: OpId,
        result: Result<CommandResult, CommandError>,
    ) {
        let Some((conn, id, reply)) = self.replies.remove(&op) else {
            self.mesh_answered(op, result);
            return;
        };
        if let Reply::Attached { agent, reason } = reply {
            // Without the room it is an agent all the same.
            self.attach(conn, &id, agent, reason);
            return;
        }
        let reply = match reply {
            Reply::Operator(reply) => {
                self.operator_answered(conn, &id, reply, result);
                return;
            }
            Reply::Discovery(reply) => {
                self.discovery_answered(conn, &id, reply, result);
                return;
            }
            reply => reply,
        };
        let agent = self.clients.get(&conn).and_then(|client| client.agent);
        let result = match result {
            Ok(result) => result,
            Err(error) => {
                self.refuse(conn, &id, error.into());
                return;
            }
        };
        let Some(agent) = agent else {
            let error = detached();
            self.refuse(conn, &id, error);
            return;
        };
        match (reply, result) {
            (Reply::Room, CommandResult::Room(path)) => {
                let room = self.room_or_path(&path, &agent);
                self.answer(conn, &id, Ok(room));
            }
            (Reply::Room, CommandResult::JoinPending(path)) => {
                // The outcome comes as a `join_outcome` event.
                let room = self.room_or_path(&path, &agent);
                let status = Some(types::DeliveryStatus::AwaitingConsent);
                self.answer(conn, &id, Ok(types::Room { status, ..room }));
            }
            (Reply::RoomAfter(room), _) => self.answer(conn, &id, Ok(*room)),
            (Reply::Send, CommandResult::Sent { message_id, deliveries }) => {
                let deliveries = deliveries
                    .into_iter()
                    .map(|delivery| self.api_delivery(&agent, delivery))
                    .collect();
                self.answer(conn, &id, Ok(types::SendResult { message_id, deliveries }));
            }
            (Reply::Answered(request, accepted), _) => {
                self.answer(conn, &id, Ok(types::Answered { request: *request, accepted }));
            }
            (Reply::Whoami, _) => {
                let whoami = self.whoami(&agent);
                self.answer(conn, &id, whoami);
            }
            (Reply::Acked, _) => {
                let (_, seq) = self.node.mailbox_position(&agent).unwrap_or_default();
                self.answer(conn, &id, Ok(types::Acked { seq }));
            }
            (Reply::Vault(reply), result) => self.vault_answered(conn, &id, reply, result),
            (Reply::Insight(device), CommandResult::Version(version)) => {
                let peers = self.node.status().peers.into_iter();
                let agent_comms = peers.filter(|p| p.device == device).find_map(|p| p.version);
                let found = types::MeshVersion { device: device.hex(), version, agent_comms };
                self.answer(conn, &id, Ok(found));
            }
            (Reply::Insight(device), CommandResult::Traced { rtt_ms, relayed, hub }) => {
                let traced = types::MeshTrace { target: device.hex(), rtt_ms, relayed, hub };
                self.answer(conn, &id, Ok(traced));
            }
            (Reply::Connected(host, port), CommandResult::Connected(device)) => {
                let connected = types::MeshConnected { host, port, device: device.hex() };
                self.answer(conn, &id, Ok(connected));
            }
            (Reply::Granted { bearer, principal }, CommandResult::Grant(grant)) => {
                let admitted = types::DmAdmitted {
                    bearer: bearer.hex(),
                    principal,
                    agent: agent.hex(),
                    grant: grant.to_text(),
                };
                self.answer(conn, &id, Ok(admitted));
            }
            (Reply::Opened(with), _) => {
                self.answer(conn, &id, Ok(types::DmOpened { agent: with.hex() }));
            }
            (Reply::Revoked(bearer), _) => {
                let revoked = types::DmRevoked { bearer: bearer.hex(), revoked: true };
                self.answer(conn, &id, Ok(revoked));
            }
            (
                Reply::Room
                | Reply::Send
                | Reply::Attached { .. }
                | Reply::Granted { .. }
                | Reply::Insight(_)
                | Reply::Connected(..)
                | Reply::Discovery(_)
                | Reply::Operator(_),
                _,
            ) => {
                self.refuse(conn, &id, ApiError::internal("no such result"));
            }
        }
    }

    // --- attach -------------------------------------------------------------------------------------

    pub(super) fn attach_asked(&mut self, conn: ConnId, id: RequestId, params: AttachParams) {
        if self.clients.get(&conn).is_some_and(|client| client.agent.is_some()) {
            let error = ApiError::new(
                "already_attached",
                "this connection is an agent already",
                "detach first, or open another connection",
            );
            self.refuse(conn, &id, error);
            return;
        }
        if let Some(name) = &params.name
            && names::own(name).is_none()
        {
            let error = ApiError::invalid_params(
                "attach",
                "`name`: 1 to 64 characters, something to see and no hidden or control characters",
            );
            self.refuse(conn, &id, error);
            return;
        }
        if !is_real_directory_name(&params.cwd) {
            let error = ApiError::invalid_params(
                "attach",
                "`cwd`: the absolute path of a directory, without . and .. and doubled or last /",
            );
            self.refuse(conn, &id, error);
            return;
        }
        let base = slot_key(&params);
        let ephemeral = params.ephemeral == Some(true);
        let cli = params.harness.as_str() == super::CLI_HARNESS;
        // A shell agent is one agent in however many terminals.
        let same = self.hosted.iter().find(|(_, hosted)| hosted.slot == base);
        if let (true, false, Some((_, hosted))) = (cli, ephemeral, same)
            && hosted.key != raw_key(&params)
        {
            let error = ApiError::new(
                "slot_name_taken",
                format!("{base} is the slot of the agent {:?} already", hosted.key),
                "choose a name that differs in more than / \\ : * ? \" < > | and _",
            );
            self.refuse(conn, &id, error);
            return;
        }
        let same = same.map(|(id, _)| *id);
        if let (true, false, Some(agent)) = (cli, ephemeral, same) {
            self.attach(conn, &id, agent, None);
            return;
        }
        if self.opening_slots.contains(&base) && !ephemeral {
            // Asked again once the slot is open.
            self.attach_later.push((base, conn, id, params));
            return;
        }
        if let Some(error) = self.no_descriptors() {
            self.refuse(conn, &id, error);
            return;
        }
        let key = raw_key(&params);
        let request = super::identities::SlotRequest {
            harness: params.harness.as_str().to_owned(),
            key,
            ephemeral,
            in_use: self.hosted.values().map(|hosted| hosted.slot.clone()).collect(),
        };
        if !ephemeral {
            self.opening_slots.push(base);
        }
        let opened = self.identities.open(request);
        self.open_later(opened, Some((conn, id)), params, None);
    }

    /// Goes on with a slot once it is open.
    pub(super) fn open_later(
        &self,
        opened: oneshot::Receiver<Result<OpenSlot, OpenError>>,
        client: Option<(ConnId, RequestId)>,
        params: AttachParams,
        expected: Option<DeviceId>,
    ) {
        let opening = self.opening.clone();
        tokio::spawn(async move {
            let result = opened.await.unwrap_or_else(|_| {
                Err(OpenError {
                    code: "identities_busy",
                    message: "the daemon is going down".into(),
                })
            });
            // The owner may have ended; then nobody waits for the slot.
            let _ = opening.send(Opening { client, params, expected, result }).await;
        });
    }

    /// Why another agent would not fit beside those that are coming, if it would not: it needs a
    /// listener, its files for a moment, and up to three sessions with each peer (decision 24).
    pub(super) fn no_descriptors(&self) -> Option<ApiError> {
        /// Listener, identity files and what the process needs besides.
        const OWN: u64 = 8;
        const SESSIONS_PER_PEER: u64 = 3;
        let open = sys::open_descriptors()?;
        let limit = sys::descriptor_limit().soft;
        let needs = OWN + SESSIONS_PER_PEER * self.node.peer_count() as u64;
        let coming = needs * self.opening_slots.len() as u64;
        (open + coming + needs > limit).then(|| {
            ApiError::new(
                "limit_descriptors",
                format!("{open} of {limit} descriptors are open, and an agent needs {needs} more"),
                "detach other agents or raise the descriptor limit (LimitNOFILE= or ulimit -n)",
            )
        })
    }

    /// The name of an agent coming into service: asked for, or the one it had, or the harness's.
    pub(super) fn name_for(&self, params: &AttachParams, agent: &DeviceId) -> String {
        let had = self.node.agent_by_id(agent, self.now()).map(|view| view.record.name);
        let asked = params.name.as_deref().and_then(names::own).map(str::to_owned);
        let cli = params.key.as_ref().map(|key| key.as_str().to_owned());
        asked
            .or_else(|| cli.filter(|name| names::is_clean(name)))
            .or_else(|| had.filter(|name| names::is_clean(name)))
            .unwrap_or_else(|| format!("{}-{}", params.harness, &agent.hex()[..4]))
    }

    fn subscribe(&mut self, conn: ConnId, id: &RequestId, agent: DeviceId, after: Option<u64>) {
        let (head, acknowledged) = self.node.mailbox_position(&agent).unwrap_or_default();
        // A number above all that were given is of another store: everything is new to it.
        let after = after.filter(|after| *after <= head).unwrap_or(acknowledged);
        if let Some(client) = self.clients.get_mut(&conn) {
            client.subscribed = true;
        }
        self.answer(conn, id, Ok(types::Subscribed { after, head }));
        let now = self.now();
        for missed in self.node.inbox(&agent, after) {
            let event = Pushed::new(&self.node, &agent, missed.seq, &missed.event, now);
            if self.local.notify(conn, types::notification::EVENT, &event).is_err() {
                return;
            }
        }
    }

    fn api_delivery(&self, sender: &DeviceId, delivery: Delivery) -> types::Delivery {
        let agent = delivery.agent;
        let undecided = if self.node.is_asking(sender, &agent) {
            types::DeliveryStatus::AwaitingConsent
        } else {
            types::DeliveryStatus::Accepted
        };
        let (status, reason, code) = api_state(delivery.state, undecided);
        // Whoever waits should know for how long others have.
        let backlog = match status {
            types::DeliveryStatus::Queued | types::DeliveryStatus::AwaitingConsent => {
                self.node.backlog(sender, &agent)
            }
            _ => None,
        };
        let now = self.now().unix;
        let known = self.node.agent_by_id(&agent, self.now());
        types::Delivery {
            agent: agent.hex(),
            agent_name: known.and_then(|view| some_text(&view.record.name)),
            status,
            reason,
            code,
            waiting: backlog.map(|(waiting, _)| waiting as u64),
            oldest_ms: backlog.map(|(_, oldest)| now.since(oldest)),
        }
    }

    // --- the tool -------------------------------------------------------------------------------------

    /// An action of the tool: one request, whose answer becomes text.
    fn action(&mut self, conn: ConnId, id: RequestId, params: types::ActionParams) {
        let parsed = Action::parse(Value::Object(params.0))
            .and_then(|action| action.request().map(|request| (action, request)));
        match parsed {
            Ok((action, request)) => {
                let viewer = Viewer {
                    id: self.viewer(conn).map(|agent| agent.hex()).unwrap_or_default(),
                    machine: self.machine.map(|machine| machine.hex()),
                    home: std::env::var("HOME").ok(),
                };
                self.actions.insert((conn, id.clone()), (action, viewer));
                self.request(conn, id, request);
            }
            Err(error) => self.local.reply(conn, &id, &render::refusal(&error)),
        }
    }

    // --- names ----------------------------------------------------------------------------------------

    /// The graph, with the names of those that the agent may see listed.
    fn graph(&self, viewer: &DeviceId) -> types::MeshGraph {
        let graph = self.node.graph();
        let names: HashMap<DeviceId, &str> = self.node.listed(Some(viewer)).collect();
        types::MeshGraph {
            nodes: graph
                .nodes
                .iter()
                .map(|id| types::GraphNode {
                    id: id.hex(),
                    name: names.get(id).map(|name| (*name).to_owned()),
                })
                .collect(),
            edges: graph
                .edges
                .iter()
                .map(|(from, to)| types::GraphEdge { from: from.hex(), to: to.hex() })
                .collect(),
        }
    }

    pub(super) fn find_agent(&self, text: &str, viewer: &DeviceId) -> Result<DeviceId, ApiError> {
        self.find_among(text, viewer, &[])
    }

    /// The agent that is meant by an id, the beginning of one, or a name: of those that the viewer
    /// sees listed, and `others`, with their own names.
    pub(super) fn find_among(
        &self,
        text: &str,
        viewer: &DeviceId,
        others: &[(DeviceId, String)],
    ) -> Result<DeviceId, ApiError> {
        if let Some(id) = DeviceId::parse(text) {
            return Ok(id);
        }
        let now = self.now();
        let petnames = self.petnames();
        let named = |wanted: &dyn Fn(&DeviceId, &str) -> bool| -> BTreeSet<DeviceId> {
            let others = others.iter().map(|(id, name)| (*id, name.as_str()));
            let known = self.node.listed(Some(viewer)).chain(others);
            known.filter(|(id, name)| wanted(id, name)).map(|(id, _)| id).collect()
        };
        let by_petname =
            named(&|id, _| petnames.as_ref().and_then(|names| names.get(id)) == Some(text));
        let hex = is_prefix(text);
        let prefix = text.to_ascii_lowercase();
        let by_prefix =
            if hex { named(&|id, _| id.hex().starts_with(&prefix)) } else { BTreeSet::new() };
        let by_name = named(&|_, name| name == text);
        // Who is here goes before who was: a restarted agent with a new id keeps its name.
        let here: BTreeSet<DeviceId> = by_name
            .iter()
            .copied()
            .filter(|id| {
                let view = self.node.agent_by_id(id, now);
                view.is_some_and(|view| view.record.status != records::AgentStatus::Offline)
            })
            .collect();
        for found in [by_petname, by_prefix, here, by_name] {
            match (found.first(), found.len()) {
                (None, _) => {}
                (Some(one), 1) => return Ok(*one),
                (_, many) => {
                    let list: Vec<String> =
                        found.iter().take(MAX_CANDIDATES).map(DeviceId::hex).collect();
                    return Err(ApiError::new(
                        "ambiguous_agent",
                        format!("{many} agents are meant by {text:?}: {}", list.join(", ")),
                        "give the full id",
                    ));
                }
            }
        }
        if hex {
            let mut daemons = self.daemons().filter(|id| id.hex().starts_with(&prefix));
            if let (Some(daemon), None) = (daemons.next(), daemons.next()) {
                return Ok(daemon);
            }
        }
        Err(ApiError::new(
            "agent_not_found",
            format!("no agent is called {text:?}"),
            todo("agent_not_found").unwrap_or_default(),
        ))
    }

    /// The daemons of the mesh that are connected, and this one: they have shares, and no names.
    fn daemons(&self) -> impl Iterator<Item = DeviceId> {
        let peers = self.node.status().peers.into_iter().map(|peer| peer.device);
        // Others' devices are agents, of which some are hidden.
        let daemons = peers.filter(|device| self.node.daemon_of(device) == Some(*device));
        daemons.chain([self.node.daemon()])
    }

    /// Whether a text names this agent. One need not be known any more, or be seen, where the beginning
    /// of its id is given.
    fn is_called(&self, id: &DeviceId, text: &str, viewer: &DeviceId) -> bool {
        let prefix = is_prefix(text) && id.hex().starts_with(&text.to_ascii_lowercase());
        prefix || self.find_agent(text, viewer).is_ok_and(|found| found == *id)
    }

    /// The room that an agent means. Of several, one that it is in: a stranger can give its own
    /// room any name.
    pub(super) fn find_room(&self, text: &str, viewer: &DeviceId) -> Result<RoomPath, ApiError> {
        self.room_called(text, viewer, true)
    }

    /// The room that an agent wants to get into.
    fn find_room_to_join(&self, text: &str, viewer: &DeviceId) -> Result<RoomPath, ApiError> {
        self.room_called(text, viewer, false)
    }

    fn room_called(
        &self,
        text: &str,
        viewer: &DeviceId,
        prefer_joined: bool,
    ) -> Result<RoomPath, ApiError> {
        if let Ok(path) = RoomPath::parse(text) {
            return Ok(path);
        }
        // Rooms are listed by what their names were made into.
        let slug = room_path::slug(text);
        let spells = |name: &str| name == text || Some(name) == slug.as_deref();
        // Or by their owner and that: lists in text show the beginning of its id.
        let of_owner =
            text.split_once('/').map(|(owner, name)| (owner, name, room_path::slug(name)));
        let owned = |name: &str, path: &RoomPath| {
            of_owner.as_ref().is_some_and(|(owner, text, slug)| {
                (name == *text || Some(name) == slug.as_deref())
                    && path.owner().is_some_and(|id| self.is_called(&id, owner, viewer))
            })
        };
        // A conversation has a path and no name, and is nobody's room by none.
        // A secret room's path has a mark before the name, and is what lists show.
        let is_meant = |name: &str, path: &RoomPath| {
            let named = |name: &str| spells(name) || owned(name, path);
            !name.is_empty() && (named(name) || named(path.local_name()))
        };
        let (mut joined, mut others) = (Vec::new(), Vec::new());
        for view in self.node.rooms(Some(viewer)) {
            if let Ok(path) = RoomPath::parse(&view.record.id)
                && is_meant(&view.record.name, &path)
            {
                let list = if prefer_joined && view.joined { &mut joined } else { &mut others };
                list.push(path);
            }
        }
        // Rooms it was invited to are known by their tokens alone.
        for path in self.node.token_paths(viewer) {
            let known = joined.contains(&path) || others.contains(&path);
            if is_meant(path.local_name().trim_start_matches('_'), &path) && !known {
                others.push(path);
            }
        }
        let found = match joined.len() {
            0 => others,
            1 => joined,
            _ => self.settled_of(viewer, &joined).map_or(joined, |one| vec![one]),
        };
        match found.as_slice() {
            [] => Err(no_room(text)),
            [one] => Ok(one.clone()),
            many => {
                let list: Vec<String> =
                    many.iter().take(MAX_CANDIDATES).map(ToString::to_string).collect();
                Err(ApiError::new(
                    "ambiguous_room",
                    format!("{} rooms are called {text:?}: {}", many.len(), list.join(", ")),
                    "give the full path",
                ))
            }
        }
    }

    // --- views ------------------------------------------------------------------------------------------

    fn whoami(&self, agent: &DeviceId) -> Result<types::Whoami, ApiError> {
        let record: &AgentRecord = self.node.own_agent(agent).ok_or_else(detached)?;
        let rooms = self
            .node
            .rooms(Some(agent))
            .into_iter()
            .filter(|view| view.joined)
            .map(|view| view.record.id)
            .collect();
        Ok(types::Whoami {
            id: agent.hex(),
            name: record.name.clone(),
            harness: record.harness.clone(),
            cwd: record.cwd.clone(),
            status: status(record.status),
            visibility: visibility(record.visibility),
            tags: record.tags.clone(),
            consent: consent(self.node.consent(agent)),
            rooms,
            principal: self.principal.map(|id| id.hex()),
            machine: self.machine.map(|id| id.hex()),
            version: types::PROGRAM_VERSION.to_owned(),
        })
    }

    pub(super) fn viewer(&self, conn: ConnId) -> Option<DeviceId> {
        self.clients.get(&conn).and_then(|client: &Client| client.agent)
    }

    fn agents_view(&self, conn: ConnId) -> Vec<types::AgentInfo> {
        let viewer = self.viewer(conn);
        let petnames = self.petnames();
        let agents = self
            .node
            .agents(viewer.as_ref(), self.now())
            .into_iter()
            .map(|view| {
                let record = view.record;
                let petname =
                    petnames.as_ref().and_then(|names| names.get(&record.id)).map(str::to_owned);
                types::AgentInfo {
                    id: record.id.hex(),
                    name: petname.clone().unwrap_or_else(|| record.name.clone()),
                    names: types::Names {
                        petname,
                        own: some_text(&record.name),
                        machine: view.machine_name,
                    },
                    harness: record.harness,
                    cwd: some_text(&record.cwd),
                    status: status(record.status),
                    visibility: visibility(record.visibility),
                    tags: record.tags,
                    rooms: record.subscribed_rooms,
                    local: view.local,
                    machine: view.machine.map(|id| id.hex()),
                }
            })
            .collect();
        fit(
            agents,
            |agent| agent.local || agent.names.petname.is_some(),
            |agent| {
                agent.cwd = None;
                agent.tags.clear();
                agent.rooms.clear();
                agent.harness = truncate_chars(&agent.harness, MAX_SHORT_CHARS).to_owned();
            },
        )
    }

    fn rooms_view(&self, conn: ConnId) -> Vec<types::RoomInfo> {
        let viewer = self.viewer(conn);
        let rooms = self
            .node
            .rooms(viewer.as_ref())
            .into_iter()
            .map(|RoomView { record, joined }| types::RoomInfo {
                path: record.id,
                name: record.name,
                r#type: room_type(record.kind),
                owner: record.owner.hex(),
                description: record.description,
                members: record.members.len() as u64,
                joined,
            })
            .collect();
        fit(
            rooms,
            |room| room.joined,
            |room| {
                room.description.clear();
                room.name = truncate_chars(&room.name, MAX_SHORT_CHARS).to_owned();
            },
        )
    }

    fn room_view(&self, path: &RoomPath, viewer: &DeviceId) -> Option<types::Room> {
        let view = self.node.room(path, Some(viewer))?;
        let now = self.now();
        let members = view
            .record
            .members
            .iter()
            .map(|id| {
                let agent = self.node.agent_by_id(id, now);
                types::Member {
                    id: id.hex(),
                    name: agent.as_ref().and_then(|view| some_text(&view.record.name)),
                    status: agent.map(|view| status(view.record.status)),
                }
            })
            .collect();
        Some(types::Room {
            path: view.record.id,
            name: view.record.name,
            r#type: room_type(view.record.kind),
            owner: view.record.owner.hex(),
            description: view.record.description,
            members,
            status: None,
        })
    }

    /// The room as far as the agent may know it; a room known by its path alone has no more.
    fn room_or_path(&self, path: &RoomPath, viewer: &DeviceId) -> types::Room {
        self.room_view(path, viewer).unwrap_or_else(|| types::Room {
            path: path.to_string(),
            name: path.local_name().trim_start_matches('_').to_owned(),
            r#type: types::RoomType::Private,
            owner: path.owner().map(|owner| owner.hex()).unwrap_or_default(),
            description: String::new(),
            members: Vec::new(),
            status: None,
        })
    }

    fn history(
        &self,
        agent: &DeviceId,
        params: &types::RoomHistoryParams,
    ) -> Result<types::History, ApiError> {
        let limit = params.limit.map_or(types::DEFAULT_PAGE, types::PageSize::get);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let path = match self.find_room(&params.room, agent) {
            Ok(path) => path,
            Err(error) if error.code == "room_not_found" => {
                let other = self.find_agent(&params.room, agent).map_err(|_| error)?;
                RoomPath::dm(*agent, other).ok_or_else(|| no_room(&params.room))?
            }
            Err(error) => return Err(error),
        };
        let now = self.now();
        let message = |seq: u64,
                       id: &str,
                       from: DeviceId,
                       at: &str,
                       text: &str,
                       reply_to: Option<&String>,
                       read_by: &[DeviceId]| {
            types::RoomMessage {
                seq,
                id: id.to_owned(),
                from: from.hex(),
                from_name: self
                    .node
                    .agent_by_id(&from, now)
                    .and_then(|view| some_text(&view.record.name)),
                at: Time(crate::codec::time::UnixMillis::parse_iso(at).unwrap_or_default()),
                text: text.to_owned(),
                reply_to: reply_to.cloned(),
                read_by: read_by.iter().map(DeviceId::hex).collect(),
            }
        };
        let all: Vec<types::RoomMessage> = if path.owner().is_some() {
            let messages = self.node.room_messages(&path, agent).ok_or_else(|| {
                ApiError::from(CommandError::new(
                    "not_member",
                    format!("you are not in room {path}"),
                ))
            })?;
            messages
                .map(|(seq, m)| {
                    message(
                        seq,
                        &m.id,
                        m.from,
                        &m.timestamp,
                        &m.content,
                        m.reply_to.as_ref(),
                        &m.read_by,
                    )
                })
                .collect()
        } else {
            let messages =
                self.node.dm_messages(&path, agent).ok_or_else(|| no_room(&params.room))?;
            messages
                .map(|(seq, m)| {
                    message(
                        seq,
                        &m.id,
                        m.from,
                        &m.timestamp,
                        &m.content,
                        m.reply_to.as_ref(),
                        &m.read_by,
                    )
                })
                .collect()
        };
        Ok(page(all, params.since, limit))
    }
}

/// As many entries as fit an answer. Peers say what is in them: where they are too many, those
/// that are not `ours` lose what they could do without, and then the last ones go.
fn fit<T: serde::Serialize>(
    mut entries: Vec<T>,
    ours: impl Fn(&T) -> bool,
    shorten: impl Fn(&mut T),
) -> Vec<T> {
    let size = |entry: &T| serde_json::to_vec(entry).map_or(0, |bytes| bytes.len());
    if entries.iter().map(size).sum::<usize>() <= super::MAX_ANSWER_BYTES {
        return entries;
    }
    // Ours first, each part in its order.
    entries.sort_by_key(|entry| !ours(entry));
    entries.iter_mut().filter(|entry| !ours(entry)).for_each(shorten);
    let mut bytes = 0;
    entries
        .into_iter()
        .take_while(|entry| {
            bytes += size(entry);
            bytes <= super::MAX_ANSWER_BYTES
        })
        .collect()
}

/// The messages after `since`, or the newest; within the limits of an answer.
fn page(all: Vec<types::RoomMessage>, since: Option<u64>, limit: usize) -> types::History {
    let size = |message: &types::RoomMessage| message.text.len() * 2 + 512;
    let mut bytes = 0;
    let mut fits = |message: &types::RoomMessage| {
        bytes += size(message);
        bytes <= super::MAX_ANSWER_BYTES
    };
    match since {
        Some(since) => {
            let after: Vec<_> = all.into_iter().filter(|m| m.seq > since).collect();
            let total = after.len();
            let mut first = true;
            let messages: Vec<_> = after
                .into_iter()
                .take(limit)
                .take_while(|m| std::mem::take(&mut first) | fits(m))
                .collect();
            types::History { more: messages.len() < total, messages }
        }
        None => {
            let mut newest: Vec<_> = all.into_iter().rev().take(limit).take_while(fits).collect();
            newest.reverse();
            types::History { messages: newest, more: false }
        }
    }
}

/// A host as it can be looked up.
fn check_host(p: &types::MeshConnectParams) -> Result<(), ApiError> {
    /// The longest name that DNS has.
    const MAX_HOST: usize = 253;
    let wrong = |what: &str| Err(ApiError::invalid_params("mesh.connect", what));
    if p.port == 0 {
        return wrong("`port`: 1 to 65535");
    }
    if p.host.contains("://") {
        return wrong("`host`: a name or address; a relay hub is set with `hub` in config.toml");
    }
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
    if p.host.is_empty() || p.host.len() > MAX_HOST || !p.host.chars().all(is_part) {
        return wrong("`host`: a name or an address, IPv6 without brackets");
    }
    Ok(())
}

fn no_room(text: &str) -> ApiError {
    ApiError::new(
        "room_not_found",
        format!("no room is called {text:?}"),
        todo("room_not_found").unwrap_or_default(),
    )
}

/// Status, reason and code of what became of a message.
fn api_state(
    state: Option<DeliveryState>,
    undecided: types::DeliveryStatus,
) -> (types::DeliveryStatus, Option<String>, Option<String>) {
    match state {
        None => (undecided, None, None),
        Some(DeliveryState::Delivered) => (types::DeliveryStatus::Delivered, None, None),
        Some(DeliveryState::Read) => (types::DeliveryStatus::Read, None, None),
        Some(DeliveryState::Queued { reason }) => {
            (types::DeliveryStatus::Queued, Some(reason), None)
        }
        Some(DeliveryState::Refused { code }) => (types::DeliveryStatus::Refused, None, Some(code)),
        Some(DeliveryState::Dropped) => (types::DeliveryStatus::Dropped, None, None),
        Some(DeliveryState::Expired) => (types::DeliveryStatus::Expired, None, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::time::UnixMillis;

    fn message(seq: u64, text: &str) -> types::RoomMessage {
        types::RoomMessage {
            seq,
            id: format!("{seq:032x}"),
            from: String::new(),
            from_name: None,
            at: types::Time(UnixMillis(0)),
            text: text.into(),
            reply_to: None,
            read_by: Vec::new(),
        }
    }

    fn seqs(messages: &[types::RoomMessage]) -> Vec<u64> {
        messages.iter().map(|message| message.seq).collect()
    }

    #[test]
    fn a_list_that_fits_stays_as_it_is() {
        let entries: Vec<String> = ["foreign", "own"].map(str::to_owned).into();
        let kept = fit(entries.clone(), |entry| entry == "own", String::clear);
        assert_eq!(kept, entries);
    }

    #[test]
    fn a_list_that_is_too_long_keeps_what_is_ours() {
        let long = "x".repeat(super::super::MAX_ANSWER_BYTES / 4);
        let mut entries: Vec<String> = (0..4).map(|n| format!("foreign {n} {long}")).collect();
        entries.push("own".into());
        // Shortened, everything fits.
        let kept = fit(entries.clone(), |entry| entry == "own", |entry| entry.truncate(9));
        assert_eq!(kept, ["own", "foreign 0", "foreign 1", "foreign 2", "foreign 3"]);
        // Where that is not enough, the last ones go.
        let kept = fit(entries, |entry| entry == "own", |_| {});
        assert_eq!(kept.len(), 4);
        assert_eq!(kept[0], "own");
        assert!(kept[3].starts_with("foreign 2"));
    }

    #[test]
    fn pages_go_on_where_the_last_one_ended() {
        let all: Vec<_> = (1..=5).map(|seq| message(seq, "t")).collect();
        let first = page(all.clone(), Some(1), 2);
        assert_eq!((seqs(&first.messages), first.more), (vec![2, 3], true));
        let last = page(all.clone(), Some(3), 2);
        assert_eq!((seqs(&last.messages), last.more), (vec![4, 5], false));
        assert_eq!(seqs(&page(all, None, 2).messages), [4, 5]);
    }

    #[test]
    fn a_page_holds_what_an_answer_can() {
        let long = "x".repeat(super::super::MAX_ANSWER_BYTES / 5);
        let all: Vec<_> = (1..=5).map(|seq| message(seq, &long)).collect();
        let first = page(all.clone(), Some(0), 5);
        assert_eq!((seqs(&first.messages), first.more), (vec![1, 2], true));
        assert_eq!(seqs(&page(all, None, 5).messages), [4, 5]);
        // One that is too long by itself is still shown: the next page begins after it.
        let huge = message(1, &long.repeat(5));
        assert_eq!(seqs(&page(vec![huge], Some(0), 5).messages), [1]);
    }
}
