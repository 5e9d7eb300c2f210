//! Vaults over the mesh: the operator's shares, what agents ask of others' shares, and the desk that
//! does what peers may ask of ours, off the owner's task. Whether they may is decided in
//! `mesh::node::services`; here a command is only matched with what the permission says.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use tokio::sync::{Semaphore, mpsc};

use super::advice::{detached, todo};
use super::owner::{Owner, Reply};
use super::pending::not_pending;
use super::requests::wait_ms;
use crate::api::types::{
    self, ApiError, GrantTerms, PendingRef, PermissionStatus, Request, RequestId, Time,
    VaultAnswer, VaultCallParams, VaultDelegateParams, VaultGrant, VaultMode, VaultPermission,
    VaultRequestParams, VaultRevokeParams, VaultShareParams, VaultUnshareParams,
};
use crate::codec::cbor::{self, Value};
use crate::identity::device::DeviceId;
use crate::mesh::node::{
    self, CallId, Command, CommandError, CommandResult, Input, MAX_CALLS, OpId, OperatorCommand,
    ServiceCall, ServiceOutcome, ShareView, is_share_name,
};
use crate::mesh::wire::capability;
use crate::runtime::local_socket::ConnId;
use crate::vault::{self, Asked, Options, Stop, VaultError, Workspace};

/// Commands of peers that run at a time: each reads or writes files, and two cores serve everything.
const RUNNING: usize = 4;
/// Within what a command has to end, before the node's own deadline: a writer waits up to 8 s for a
/// vault's lock.
const COMMAND_DEADLINE: Duration = Duration::from_millis(node::SERVICE_DEADLINE_MS - 3_000);
/// Results that wait for the owner: one for each call, and those of our own clients.
const DONE_QUEUE: usize = MAX_CALLS * 2;
/// Long answers that are kept, and how long after their last part was fetched.
const MAX_KEPT: usize = 2;
const KEPT_FOR: Duration = Duration::from_secs(20);
/// Bytes of one answer to a peer (decision 32).
const MAX_ANSWER: usize = 1024 * 1024;
/// Bytes of an answer that one line of the local API takes: JSON inside of JSON at most doubles.
const LOCAL_ANSWER: u64 = 256 * 1024;
/// Bytes of a payload that goes to a peer: with its frame below what a session takes in one piece.
const MAX_PAYLOAD: u64 = 1024 * 1024;
/// Characters of a peer's word for an error.
const MAX_CODE: usize = 64;

/// What has been done off the owner's task.
pub(super) enum Done {
    /// A call of a peer.
    Served(CallId, ServiceOutcome),
    /// A look at the vault that is to be shared: its root.
    Looked(ConnId, RequestId, VaultShareParams, Result<String, ApiError>),
    /// A connection code was made.
    CodeMade(ConnId, RequestId, Result<types::TrustCode, ApiError>),
    /// One was judged: which device it names, and who has signed it.
    CodeChecked(ConnId, RequestId, Result<(DeviceId, Option<String>), ApiError>),
    /// A payload was read.
    Payload(ConnId, RequestId, DeviceId, Box<VaultCallParams>, Result<String, ApiError>),
}

/// Runs commands of peers, so many at a time.
pub(super) struct Desk {
    running: Arc<Semaphore>,
    done: mpsc::Sender<Done>,
    kept: Arc<Kept>,
}

/// Long answers, until their last part has been fetched: made anew for every part, the whole would
/// cost the square of its length.
#[derive(Default)]
struct Kept(Mutex<Vec<(Instant, Wanted, Arc<Whole>)>>);

/// Whose answer to what.
#[derive(Clone, PartialEq)]
struct Wanted {
    from: DeviceId,
    share: String,
    place: String,
    asked: Asked,
}

/// An answer and its hash.
struct Whole {
    text: String,
    sha256: String,
}

impl Whole {
    fn new(text: String) -> Self {
        let sha256 = data_encoding::HEXLOWER.encode(&Sha256::digest(text.as_bytes()));
        Self { text, sha256 }
    }
}

impl Kept {
    fn keep(&self, wanted: Wanted, whole: &Arc<Whole>) {
        let mut kept = self.0.lock();
        kept.retain(|(_, other, _)| *other != wanted);
        if kept.len() >= MAX_KEPT {
            kept.remove(0);
        }
        kept.push((Instant::now(), wanted, Arc::clone(whole)));
    }

    fn find(&self, wanted: &Wanted) -> Option<Arc<Whole>> {
        let mut kept = self.0.lock();
        let (at, _, whole) = kept.iter_mut().find(|(_, other, _)| other == wanted)?;
        *at = Instant::now();
        Some(Arc::clone(whole))
    }

    fn forget(&self, wanted: &Wanted) {
        self.0.lock().retain(|(_, other, _)| other != wanted);
    }

    /// Forgets what nobody goes on with.
    fn tidy(&self) {
        self.0.lock().retain(|(at, ..)| at.elapsed() < KEPT_FOR);
    }
}

/// How the answer to an agent's command becomes the answer to a client.
pub(super) enum VaultReply {
    /// A permission was asked for.
    Permission(DeviceId, String, VaultMode),
    /// A command.
    Call,
}

/// The same for an operator's.
pub(super) enum OperatorReply {
    /// The share as it is now.
    Share(String),
    /// The share as it was.
    Was(Box<types::VaultShare>),
    /// A decision on this request.
    Answered(Box<types::PendingRequest>, bool),
}

impl Desk {
    pub fn new() -> (Self, mpsc::Receiver<Done>) {
        let (done, results) = mpsc::channel(DONE_QUEUE);
        let running = Arc::new(Semaphore::new(RUNNING));
        (Self { running, done, kept: Arc::default() }, results)
    }

    /// Carries out a call; the outcome comes back as [`Done::Served`]. As many wait here as the node
    /// lets be under way.
    pub fn serve(&self, call: ServiceCall) {
        let (running, done) = (Arc::clone(&self.running), self.done.clone());
        let kept = Arc::clone(&self.kept);
        tokio::spawn(async move {
            let id = call.call;
            let Ok(permit) = running.acquire_owned().await else { return };
            let stop = Stop::default();
            let called_off = stop.clone();
            let answers = Arc::clone(&kept);
            let work = tokio::task::spawn_blocking(move || {
                let outcome = serve(&call, called_off, &answers);
                // Held until the thread is free again, whoever has stopped waiting for it.
                drop(permit);
                outcome
            });
            let outcome = match tokio::time::timeout(COMMAND_DEADLINE, work).await {
                Ok(Ok(outcome)) => outcome,
                Ok(Err(_)) => Err(("internal".to_owned(), "the command did not end".to_owned())),
                Err(_) => {
                    // A writer ends before its next file and gives the lock back.
                    stop.request();
                    let what = "this took too long; what was to be written may be written";
                    Err(("timeout".to_owned(), what.to_owned()))
                }
            };
            // An owner that has ended waits for nothing.
            let _ = done.send(Done::Served(id, outcome)).await;
            if !kept.0.lock().is_empty() {
                tokio::time::sleep(KEPT_FOR).await;
                kept.tidy();
            }
        });
    }

    /// Works on a connection code. Should a library fail on what a stranger has written, that is an
    /// answer as well.
    pub fn code_work<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
        told: impl FnOnce(Result<T, ApiError>) -> Done + Send + 'static,
    ) {
        let done = self.done.clone();
        tokio::spawn(async move {
            let failed = || Err(ApiError::internal("the code could not be worked on"));
            let result = tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| failed());
            // An owner that has ended waits for nothing.
            let _ = done.send(told(result)).await;
        });
    }

    fn off_task(&self, work: impl FnOnce() -> Done + Send + 'static) {
        let done = self.done.clone();
        tokio::spawn(async move {
            if let Ok(result) = tokio::task::spawn_blocking(work).await {
                // An owner that has ended waits for nothing.
                let _ = done.send(result).await;
            }
        });
    }
}

/// One call of a peer, from the first check to the part of the answer that is wanted.
fn serve(call: &ServiceCall, stop: Stop, kept: &Kept) -> ServiceOutcome {
    let malformed = || ("malformed_params".to_owned(), "the call cannot be read".to_owned());
    let asked: Asked = cbor::from_value(&call.params).map_err(|_| malformed())?;
    let number = |member| match call.params.get(member) {
        None => Ok(None),
        Some(value) => value.as_u64().map(Some).ok_or_else(malformed),
    };
    let offset = number("offset")?.unwrap_or(0);
    let max = number("max")?.unwrap_or(MAX_ANSWER as u64).clamp(1, MAX_ANSWER as u64);
    let writes = vault::Request::writes(&asked.op);
    if writes && offset > 0 {
        // What has been written is not to be answered with "malformed".
        return Err(malformed());
    }
    let wanted = Wanted {
        from: call.from,
        share: call.share.clone(),
        place: call.place.clone(),
        asked: asked.clone(),
    };
    let before = if offset > 0 { kept.find(&wanted) } else { None };
    let whole = match before {
        Some(whole) => whole,
        None => Arc::new(Whole::new(rendered(call, &asked, writes, stop)?)),
    };
    let found = part(&whole, offset, max).ok_or_else(malformed);
    let ends = offset.saturating_add(max) >= whole.text.len() as u64;
    match (ends, offset) {
        (false, 0) => kept.keep(wanted, &whole),
        (true, 1..) => kept.forget(&wanted),
        _ => {}
    }
    found
}

/// The whole answer, or the refusal in words that say nothing of this machine.
fn rendered(
    call: &ServiceCall,
    asked: &Asked,
    writes: bool,
    stop: Stop,
) -> Result<String, (String, String)> {
    let answer = command(call, asked, writes, stop).map_err(|error| match error {
        // Where it is on this machine is nobody's business.
        VaultError::Workspace { .. } => {
            (error.code().to_owned(), "the shared folder cannot be used as a vault".to_owned())
        }
        error => (error.code().to_owned(), error.to_string()),
    });
    answer?
}

/// The whole answer, or the refusal that the wire knows.
fn command(
    call: &ServiceCall,
    asked: &Asked,
    writes: bool,
    stop: Stop,
) -> Result<Result<String, (String, String)>, VaultError> {
    if writes && !call.may_write {
        let what = "this permission is for reading only, or the vault is not shared for writing";
        return Ok(Err(("read_only".to_owned(), what.to_owned())));
    }
    let request = vault::Request::read(asked)?.unnamed();
    let place = PathBuf::from(&call.place);
    let options = Options::system()
        .map_err(|error| VaultError::Workspace { path: place.clone(), why: error.to_string() })?;
    // Entries say which of our peers wrote them, not what the peer says.
    let name = match call.from_name.bytes().any(|b| b.is_ascii_alphanumeric()) {
        true => call.from_name.clone(),
        false => call.from.short(),
    };
    let options = Options { agent: Some(name), stop, ..options };
    let workspace = Workspace::open_root(place.clone(), options)?;
    if workspace.root() != place {
        // What was shared was no link then: somebody has put one in its place.
        let why = "it has been replaced by a link".to_owned();
        return Err(VaultError::Workspace { path: place, why });
    }
    let workspace = workspace.shown_as(call.share.clone());
    request.carry_out(&workspace).map(Ok)
}

/// The part of an answer from `offset` on, within `max` bytes of text; `None` where there is none.
fn part(whole: &Whole, offset: u64, max: u64) -> Option<Vec<(String, Value)>> {
    let start = usize::try_from(offset).ok()?;
    let rest = whole.text.get(start..)?;
    if rest.is_empty() && start > 0 {
        return None;
    }
    let wanted = rest.len().min(usize::try_from(max).unwrap_or(usize::MAX));
    // At least one character, or it would never end.
    let end = match rest.floor_char_boundary(wanted) {
        0 => rest.ceil_char_boundary(wanted),
        end => end,
    };
    let text = rest.get(..end)?;
    Some(vec![
        ("answer".to_owned(), Value::Text(text.to_owned())),
        ("offset".to_owned(), Value::from(offset)),
        ("total".to_owned(), Value::from(whole.text.len() as u64)),
        ("sha256".to_owned(), Value::Text(whole.sha256.clone())),
    ])
}

/// The root of the vault that a path lies in.
fn look(path: &str) -> Result<String, ApiError> {
    let failed = |error: VaultError| {
        let todo = "name a folder in a project that has a vault (`commsd vault init` makes one)";
        ApiError::new(error.code(), error.to_string(), todo)
    };
    let options =
        Options::system().map_err(|error| ApiError::plain("entropy", error.to_string()))?;
    let workspace = Workspace::open(Path::new(path), options).map_err(failed)?;
    workspace.may_read().map_err(failed)?;
    Ok(workspace.root().to_string_lossy().into_owned())
}

/// A payload from a file of the client's.
fn read_payload(path: &str) -> Result<String, ApiError> {
    let failed = |why: String| {
        let todo = "give a regular file of UTF-8 text by its absolute path";
        ApiError::new("vault_payload", format!("cannot read the payload {path}: {why}"), todo)
    };
    let path = Path::new(path);
    if !path.is_absolute() || !path.is_file() {
        return Err(failed("it is no regular file with an absolute path".into()));
    }
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_PAYLOAD + 1).read_to_end(&mut bytes))
        .map_err(|error| failed(error.to_string()))?;
    if bytes.len() as u64 > MAX_PAYLOAD {
        return Err(failed(format!("over the mesh it has at most {MAX_PAYLOAD} bytes")));
    }
    String::from_utf8(bytes).map_err(|_| failed("it is not valid UTF-8".into()))
}

const fn mode(write: bool) -> VaultMode {
    if write { VaultMode::Write } else { VaultMode::Read }
}

/// A peer's word for what went wrong, if it is a word.
pub(super) fn word(code: String) -> String {
    let is_word = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
    match (1..=MAX_CODE).contains(&code.len()) && code.bytes().all(is_word) {
        true => code,
        false => "refused".to_owned(),
    }
}

fn refusal(code: String, message: String) -> ApiError {
    let code = word(code);
    let message = match (message.is_empty(), code.as_str()) {
        (false, "denied") => format!("the owner said no: {message}"),
        (true, "denied") => "the owner said no".to_owned(),
        (true, "not_connected") => "there is no connection to the other side".to_owned(),
        (true, _) => format!("the other side refused ({code})"),
        (false, _) => message,
    };
    ApiError { todo: todo(&code).map(str::to_owned), code, message }
}

fn unusable() -> ApiError {
    ApiError::new(
        "malformed_response",
        "the other side's answer cannot be used",
        "update commsd there and here",
    )
}

impl Owner {
    /// `AGENT/SHARE`.
    fn find_share(&self, at: &str, viewer: &DeviceId) -> Result<(DeviceId, String), ApiError> {
        let wrong = || ApiError::invalid_params("vault", "`at`: name a share as AGENT/SHARE");
        let (agent, share) = at.rsplit_once('/').ok_or_else(wrong)?;
        if !is_share_name(share) {
            return Err(wrong());
        }
        Ok((self.find_agent(agent, viewer)?, share.to_owned()))
    }

    // --- the operator ---------------------------------------------------------------------------------

    pub(super) fn vault_share(&mut self, conn: ConnId, id: RequestId, params: VaultShareParams) {
        if !Path::new(&params.path).is_absolute() {
            let error = ApiError::invalid_params("vault.share", "`path`: give an absolute path");
            self.refuse(conn, &id, error);
            return;
        }
        self.desk.off_task(move || {
            let root = look(&params.path);
            Done::Looked(conn, id, params, root)
        });
    }

    pub(super) fn vault_unshare(
        &mut self,
        conn: ConnId,
        id: RequestId,
        params: VaultUnshareParams,
    ) {
        match self.vault_shares().into_iter().find(|share| share.name == params.name) {
            Some(was) => {
                let reply = OperatorReply::Was(Box::new(was));
                self.operator(conn, &id, OperatorCommand::Unshare(params.name), reply);
            }
            None => {
                let what = format!("nothing is shared as {:?}", params.name);
                let error = CommandError::new("share_not_found", what);
                self.refuse(conn, &id, error.into());
            }
        }
    }

    pub(super) fn vault_revoke(&mut self, conn: ConnId, id: RequestId, params: VaultRevokeParams) {
        let daemon = self.node.daemon();
        let bearer = match params.agent.map(|agent| self.find_holder(&params.name, &agent, &daemon))
        {
            None => None,
            Some(Ok(bearer)) => Some(bearer),
            Some(Err(error)) => {
                self.refuse(conn, &id, error);
                return;
            }
        };
        let command = OperatorCommand::Revoke { share: params.name.clone(), bearer };
        self.operator(conn, &id, command, OperatorReply::Share(params.name));
    }

    /// Somebody who holds a permission: also one that is not seen any more, by the beginning of its
    /// id.
    fn find_holder(
        &self,
        share: &str,
        agent: &str,
        viewer: &DeviceId,
    ) -> Result<DeviceId, ApiError> {
        self.find_agent(agent, viewer).or_else(|error| {
            let shares = self.node.shares();
            let grants = shares.iter().filter(|view| view.name == share).flat_map(|s| &s.grants);
            let mut found: Vec<DeviceId> = grants
                .map(|grant| grant.bearer)
                .filter(|bearer| agent.len() >= 8 && bearer.hex().starts_with(agent))
                .collect();
            found.dedup();
            match found.as_slice() {
                [one] => Ok(*one),
                _ => Err(error),
            }
        })
    }

    pub(super) fn vault_shares(&self) -> Vec<types::VaultShare> {
        self.node.shares().into_iter().map(|view| self.share_view(view)).collect()
    }

    fn share_view(&self, view: ShareView) -> types::VaultShare {
        let grants = view
            .grants
            .into_iter()
            .map(|grant| VaultGrant {
                agent: grant.bearer.hex(),
                agent_name: self.node.shown_name(&grant.bearer),
                mode: mode(grant.write),
                at: Time(grant.at),
                expires: Time(grant.expires),
                delegations_remaining: grant.delegations,
                revoked: grant.revoked,
            })
            .collect();
        types::VaultShare {
            name: view.name,
            path: view.place,
            mode: mode(view.write),
            at: Time(view.at),
            grants,
        }
    }

    fn operator(
        &mut self,
        conn: ConnId,
        id: &RequestId,
        command: OperatorCommand,
        reply: OperatorReply,
    ) {
        self.next_op += 1;
        let op = OpId(self.next_op);
        self.replies.insert(op, (conn, id.clone(), Reply::Operator(reply)));
        self.inputs.push_back(Input::Operator { op, command });
    }

    /// Yes or no to a request for a capability: with the terms of a yes, or the reason of a no.
    pub(super) fn decide_capability(
        &mut self,
        conn: ConnId,
        id: &RequestId,
        mut request: types::PendingRequest,
        decision: Result<Option<GrantTerms>, Option<String>>,
    ) -> Result<(), ApiError> {
        let accept = decision.is_ok();
        let mode = decision.as_ref().ok().and_then(|terms| terms.as_ref()?.mode);
        if mode == Some(VaultMode::Read) {
            // Told is what was given, not what was asked for.
            request.capability = Some(capability::VAULT_READ.to_owned());
        }
        let ask = request.id.clone();
        let command = match decision {
            Ok(terms) => {
                let terms =
                    terms.map_or_else(node::GrantTerms::default, |terms| node::GrantTerms {
                        expires: terms.expires.map(|time| time.0),
                        delegations: terms.delegations_remaining,
                        write: terms.mode.map(|mode| mode == VaultMode::Write),
                    });
                OperatorCommand::Grant { id: ask, terms }
            }
            Err(reason) => OperatorCommand::Refuse { id: ask, reason },
        };
        self.operator(conn, id, command, OperatorReply::Answered(Box::new(request), accept));
        Ok(())
    }

    /// `accept` and `reject` of a connection that is no agent: requests for capabilities.
    pub(super) fn operator_decides(
        &mut self,
        conn: ConnId,
        id: &RequestId,
        request: &Request,
    ) -> Result<(), ApiError> {
        let (which, decision) = match request {
            Request::Accept(params) => (params.which()?, Ok(params.terms.clone())),
            Request::Reject(params) => (params.which()?, Err(params.reason.clone())),
            _ => return Ok(()),
        };
        let PendingRef::Id(wanted) = which else { return Err(not_pending(None)) };
        let found = self.pending_named(wanted, None)?;
        if found.kind == types::PendingKind::Mesh {
            let (ask, accepted) = (found.id.clone(), decision.is_ok());
            let decision = decision.map(|_| ());
            let reply = OperatorReply::Answered(Box::new(found), accepted);
            self.operator(conn, id, OperatorCommand::Machine { id: ask, decision }, reply);
            return Ok(());
        }
        if found.kind != types::PendingKind::Capability {
            return Err(ApiError::new(
                ApiError::NOT_ATTACHED,
                "the agent that is asked decides on that",
                "answer as that agent; on the command line: --as NAME",
            ));
        }
        self.decide_capability(conn, id, found, decision)
    }

    pub(super) fn operator_answered(
        &mut self,
        conn: ConnId,
        id: &RequestId,
        reply: OperatorReply,
        result: Result<CommandResult, CommandError>,
    ) {
        if let Err(error) = result {
            self.refuse(conn, id, error.into());
            return;
        }
        match reply {
            OperatorReply::Share(name) => {
                let share = self.vault_shares().into_iter().find(|share| share.name == name);
                let gone =
                    || CommandError::new("share_not_found", "it is not shared any more").into();
                self.answer(conn, id, share.ok_or_else(gone));
            }
            OperatorReply::Was(share) => self.answer(conn, id, Ok(*share)),
            OperatorReply::Answered(request, accepted) => {
                self.answer(conn, id, Ok(types::Answered { request: *request, accepted }));
            }
        }
    }

    // --- agents ---------------------------------------------------------------------------------------

    pub(super) fn vault_request(
        &mut self,
        conn: ConnId,
        id: &RequestId,
        agent: DeviceId,
        params: VaultRequestParams,
    ) -> Result<(), ApiError> {
        let (owner, share) = self.find_share(&params.at, &agent)?;
        let wanted = params.mode.unwrap_or(VaultMode::Read);
        let command = Command::AskCapability {
            owner,
            share: share.clone(),
            write: wanted == VaultMode::Write,
            valid_until: params.valid_until.map(|time| time.0),
            wait_ms: wait_ms(params.wait),
        };
        let reply = Reply::Vault(VaultReply::Permission(owner, share, wanted));
        self.command(conn, id, agent, command, reply);
        Ok(())
    }

    pub(super) fn vault_delegate(
        &mut self,
        conn: ConnId,
        id: &RequestId,
        agent: DeviceId,
        params: VaultDelegateParams,
    ) -> Result<(), ApiError> {
        let (owner, share) = self.find_share(&params.at, &agent)?;
        let to = self.find_agent(&params.agent, &agent)?;
        let mode = params.mode.unwrap_or(VaultMode::Read);
        let terms = node::GrantTerms {
            expires: params.expires.map(|time| time.0),
            delegations: params.delegations_remaining,
            write: Some(mode == VaultMode::Write),
        };
        let command = Command::HandOn { owner, share: share.clone(), to, terms };
        let reply = Reply::Vault(VaultReply::Permission(owner, share, mode));
        self.command(conn, id, agent, command, reply);
        Ok(())
    }

    pub(super) fn vault_call(
        &mut self,
        conn: ConnId,
        id: &RequestId,
        agent: DeviceId,
        params: VaultCallParams,
    ) -> Result<(), ApiError> {
        self.find_share(&params.at, &agent)?;
        match (&params.payload, &params.payload_file) {
            (Some(_), Some(_)) => Err(ApiError::invalid_params(
                "vault.call",
                "give either `payload` or `payloadFile`",
            )),
            (None, Some(path)) => {
                let (id, path) = (id.clone(), path.clone());
                self.desk.off_task(move || {
                    let payload = read_payload(&path);
                    Done::Payload(conn, id, agent, Box::new(params), payload)
                });
                Ok(())
            }
            (_, None) => self.vault_call_with(conn, id, agent, params),
        }
    }

    fn vault_call_with(
        &mut self,
        conn: ConnId,
        id: &RequestId,
        agent: DeviceId,
        params: VaultCallParams,
    ) -> Result<(), ApiError> {
        let (owner, share) = self.find_share(&params.at, &agent)?;
        let asked = Asked {
            op: params.op.as_str().to_owned(),
            page: params.page,
            query: params.query,
            limit: params.limit,
            payload: params.payload,
            confirmed: params.confirmed,
        };
        let internal = || ApiError::internal("the call cannot be written");
        let Ok(Value::Map(members)) = cbor::to_value(&asked) else { return Err(internal()) };
        let mut members: Vec<(String, Value)> = members
            .into_iter()
            .filter_map(|(key, value)| Some((key.as_text()?.to_owned(), value)))
            .collect();
        members.push(("max".to_owned(), Value::from(LOCAL_ANSWER)));
        if let Some(offset) = params.offset {
            members.push(("offset".to_owned(), Value::from(offset)));
        }
        let write = params.op.writes();
        let command = Command::CallService { owner, share, write, params: members };
        self.command(conn, id, agent, command, Reply::Vault(VaultReply::Call));
        Ok(())
    }

    pub(super) fn vault_answered(
        &mut self,
        conn: ConnId,
        id: &RequestId,
        reply: VaultReply,
        result: CommandResult,
    ) {
        if let CommandResult::Refused { code, message } = result {
            self.refuse(conn, id, refusal(code, message));
            return;
        }
        match reply {
            VaultReply::Permission(owner, share, wanted) => {
                let (status, mode, expires) = match result {
                    CommandResult::Granted { write, expires } => {
                        (PermissionStatus::Granted, mode(write), Some(Time(expires)))
                    }
                    _ => (PermissionStatus::Pending, wanted, None),
                };
                let agent = owner.hex();
                let permission = VaultPermission { agent, share, mode, status, expires };
                self.answer(conn, id, Ok(permission));
            }
            VaultReply::Call => {
                let answer = match &result {
                    CommandResult::Served(answer) => local_answer(answer),
                    _ => None,
                };
                self.answer(conn, id, answer.ok_or_else(unusable));
            }
        }
    }

    pub(super) fn vault_done(&mut self, done: Done) {
        match done {
            Done::Served(call, outcome) => {
                self.inputs.push_back(Input::ServiceAnswered { call, outcome });
            }
            Done::CodeMade(conn, id, code) => self.answer(conn, &id, code),
            Done::CodeChecked(conn, id, checked) => self.code_checked(conn, &id, checked),
            Done::Looked(conn, id, params, Ok(place)) => {
                let write = params.mode == Some(VaultMode::Write);
                let reply = OperatorReply::Share(params.name.clone());
                let command = OperatorCommand::Share { name: params.name, place, write };
                self.operator(conn, &id, command, reply);
            }
            Done::Payload(conn, id, agent, params, Ok(payload)) => {
                let params = VaultCallParams { payload: Some(payload), ..*params };
                // The connection may have become another agent's, or nobody's.
                let here = self.viewer(conn) == Some(agent);
                let called = match here {
                    true => self.vault_call_with(conn, &id, agent, params),
                    false => Err(detached()),
                };
                if let Err(error) = called {
                    self.refuse(conn, &id, error);
                }
            }
            Done::Looked(conn, id, _, Err(error)) | Done::Payload(conn, id, _, _, Err(error)) => {
                self.refuse(conn, &id, error);
            }
        }
    }
}

/// A peer's answer as clients see it; `None` where it is none, or more than was asked for.
fn local_answer(answer: &Value) -> Option<VaultAnswer> {
    let text = answer.get("answer")?.as_text()?;
    let number = |member: &str| answer.get(member)?.as_u64();
    let sha256 = answer.get("sha256")?.as_text()?;
    let is_hash = sha256.len() == 64 && sha256.bytes().all(|b| b.is_ascii_hexdigit());
    (text.len() as u64 <= LOCAL_ANSWER && is_hash).then_some(())?;
    Some(VaultAnswer {
        answer: text.to_owned(),
        offset: number("offset")?,
        total: number("total")?,
        sha256: sha256.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(part: &[(String, Value)]) -> &str {
        part.iter().find(|(key, _)| key == "answer").and_then(|(_, v)| v.as_text()).unwrap()
    }

    #[test]
    fn an_answer_comes_in_parts_that_make_the_whole() {
        let whole = "añb€".repeat(1000);
        let answer = Whole::new(whole.clone());
        let (mut got, mut parts) = (String::new(), 0);
        while got.len() < whole.len() {
            let part = part(&answer, got.len() as u64, 100).unwrap();
            assert!(text(&part).len() <= 100);
            got.push_str(text(&part));
            parts += 1;
        }
        assert_eq!(got, whole);
        assert!(parts >= whole.len() / 100);
    }

    #[test]
    fn a_part_that_is_not_there_is_refused() {
        for (offset, max) in [(4, 10), (5, 10), (2, 10), (u64::MAX, 1)] {
            assert!(part(&Whole::new("a€".into()), offset, max).is_none(), "{offset}");
        }
        let euro = Whole::new("a€".into());
        assert_eq!(text(&part(&euro, 1, 1).unwrap()), "€", "never less than a character");
        assert_eq!(text(&part(&Whole::new(String::new()), 0, 1).unwrap()), "");
    }

    #[test]
    fn few_answers_are_kept_and_each_for_its_asker() {
        let kept = Kept::default();
        let wanted = |n: u8| Wanted {
            from: DeviceId([n; 32]),
            share: "notes".into(),
            place: "/p".into(),
            asked: Asked { op: "page".into(), page: Some("a".into()), ..Asked::default() },
        };
        for n in 0..4 {
            kept.keep(wanted(n), &Arc::new(Whole::new(n.to_string())));
        }
        assert!(kept.find(&wanted(1)).is_none());
        assert_eq!(kept.find(&wanted(3)).unwrap().text, "3");
        kept.tidy();
        kept.forget(&wanted(3));
        assert!(kept.find(&wanted(3)).is_none());
        assert_eq!(kept.find(&wanted(2)).unwrap().text, "2");
    }

    #[test]
    fn words_of_peers_are_words() {
        assert_eq!(word("vault_hash_stale".into()), "vault_hash_stale");
        for code in ["", "No", "a b", "a\u{1b}", &"x".repeat(65)] {
            assert_eq!(word(code.into()), "refused", "{code:?}");
        }
    }
}
