//! Requests of local clients: names become ids, requests become node commands or views, and
//! views become the API's values. The sender of everything is the connection's agent.

use serde_json::Value;
use tokio::sync::oneshot;

use super::advice::detached;
use super::hygiene::Place;
use super::identities::{OpenError, OpenSlot};
use super::lookup::no_room;
use super::owner::{Opening, Owner, Pushed, Reply, Waiting};
use super::pending::invited_to;
use crate::api::acp::{AcpCall, AcpParams};
use crate::api::tool::Action;
use crate::api::tool::render::{self, Viewer};
use crate::api::types::{self, ApiError, AttachParams, Request, RequestId, WaitSecs};
use crate::identity::device::DeviceId;
use crate::identity::names;
use crate::mesh::events::DeliveryState;
use crate::mesh::node::{
    Command, CommandError, CommandResult, DecisionTarget, Delivery, Input, MAX_TRACE_MS, OpId,
};
use crate::mesh::records::{self, ConsentPolicy};
use crate::mesh::wire::cose::CoseSign1;
use crate::runtime::local_socket::ConnId;
use crate::runtime::sys;

/// Bytes of a grant's text; a delegated one has 1,500.
const MAX_GRANT_TEXT: usize = 16 * 1024;
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
            && names::of_agent(name).is_none()
        {
            let error = ApiError::invalid_params(
                "attach",
                "`name`: 1 to 64 characters, something to see and no hidden or control characters, \
                 not 8 hex digits or more alone, which read as an id",
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
        let asked = params.name.as_deref().and_then(names::of_agent).map(str::to_owned);
        let cli = params.key.as_ref().map(|key| key.as_str().to_owned());
        let fits = |name: &String| names::is_clean(name) && !names::is_id_or_prefix(name);
        asked
            .or_else(|| cli.filter(fits))
            .or_else(|| had.filter(fits))
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
