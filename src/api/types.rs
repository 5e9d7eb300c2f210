//! The local API's values: every request with its parameters, every result, errors and limits
//! (`docs/interface.md`, "Local API"). Pure data; [`rpc`] holds the JSON-RPC 2.0 lines around them.
//! No socket, no clock and no meaning: what a request does is the daemon's business.
//!
//! Rules that hold for all of them: command `X Y` is method `x.y`, its flags are camelCase members,
//! and the result is what the command prints with `--json`. Times are ISO-8601 UTC with
//! milliseconds, durations integers named `…Ms`, unknown is `null`.

use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::acp::{AcpNews, AcpParams};
use super::tool::ToolResult;
use crate::codec::time::UnixMillis;

pub mod rpc;

/// Version of this API, exchanged by `hello`.
///
/// Both sides must name the same number. It is raised when something existing changes or goes away;
/// new methods, new optional parameters and new members of a result do not raise it, so a reader
/// ignores members that it does not know. An older side never replaces or stops a newer one.
pub const API_VERSION: u32 = 1;

/// Version of this program, as named in `hello` and `status`.
pub const PROGRAM_VERSION: &str = env!("CARGO_PKG_VERSION");

/// Longest line without its line feed, in bytes: bounds what one connection can make the daemon
/// hold. Larger values travel by file path.
pub const MAX_LINE_BYTES: usize = 1024 * 1024;

/// Longest message text in bytes of UTF-8. JSON may escape one byte into six, so a message with all
/// its members always fits into one line; it is also more than a model takes in at once.
pub const MAX_TEXT_BYTES: usize = 128 * 1024;

/// Requests of one connection that may be unanswered at the same time: enough for a client that
/// waits, listens and sends side by side; one more is refused with `too_many_requests`.
pub const MAX_REQUESTS_IN_FLIGHT: usize = 64;

/// Longest request id in bytes when it is text; it is kept and echoed.
pub const MAX_REQUEST_ID_BYTES: usize = 128;

/// Longest `wait` in seconds: a day. Who waits longer subscribes.
pub const MAX_WAIT_SECS: u64 = 86_400;

/// Entries in one answer when the request names no number: what a person or model reads at once.
pub const DEFAULT_PAGE: u64 = 100;

/// Most entries in one answer; the rest follows under `more`.
pub const MAX_PAGE: u64 = 1_000;

/// Longest [`Label`] in bytes: names of programs, harnesses and slots are short.
pub const MAX_LABEL_BYTES: usize = 128;

/// The limits above as `hello` names them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ApiLimits {
    /// [`MAX_LINE_BYTES`].
    pub line_bytes: u64,
    /// [`MAX_TEXT_BYTES`].
    pub text_bytes: u64,
    /// [`MAX_REQUESTS_IN_FLIGHT`].
    pub requests_in_flight: u64,
    /// [`MAX_WAIT_SECS`].
    pub wait_secs: u64,
    /// [`MAX_PAGE`].
    pub page: u64,
}

impl ApiLimits {
    /// The limits of this build.
    pub const CURRENT: Self = Self {
        line_bytes: MAX_LINE_BYTES as u64,
        text_bytes: MAX_TEXT_BYTES as u64,
        requests_in_flight: MAX_REQUESTS_IN_FLIGHT as u64,
        wait_secs: MAX_WAIT_SECS,
        page: MAX_PAGE,
    };
}

// ---------------------------------------------------------------------------------------------
// Errors

/// What went wrong, for a program (`code`) and for a person (`message`, `todo`).
///
/// On the wire: `{code: -32000, message, data: {code, todo}}`; the standard JSON-RPC numbers are used
/// for the four faults that JSON-RPC itself defines ([`ApiError::rpc_number`]).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Stable name, e.g. `room_not_found` or, where the protocol names it, `ROOM_NOT_FOUND`.
    pub code: String,
    /// What happened and where.
    pub message: String,
    /// What to do about it.
    pub todo: Option<String>,
}

impl ApiError {
    /// The line is not JSON in UTF-8.
    pub const PARSE_ERROR: &str = "parse_error";
    /// JSON, but not a JSON-RPC 2.0 request.
    pub const INVALID_REQUEST: &str = "invalid_request";
    /// No such method.
    pub const METHOD_NOT_FOUND: &str = "method_not_found";
    /// A parameter is missing, unknown or of the wrong shape; the message names it.
    pub const INVALID_PARAMS: &str = "invalid_params";
    /// Something other than `hello` came first.
    pub const HELLO_REQUIRED: &str = "hello_required";
    /// The two ends speak different versions of this API.
    pub const API_VERSION: &str = "api_version";
    /// A line is longer than [`MAX_LINE_BYTES`].
    pub const LINE_TOO_LONG: &str = "line_too_long";
    /// An answer would be longer than [`MAX_LINE_BYTES`].
    pub const RESULT_TOO_LARGE: &str = "result_too_large";
    /// More than [`MAX_REQUESTS_IN_FLIGHT`] requests are unanswered.
    pub const TOO_MANY_REQUESTS: &str = "too_many_requests";
    /// The daemon serves as many connections as it can.
    pub const TOO_MANY_CONNECTIONS: &str = "too_many_connections";
    /// The daemon is going down.
    pub const SHUTTING_DOWN: &str = "shutting_down";
    /// Nobody answers at the socket.
    pub const NO_DAEMON: &str = "no_daemon";
    /// The connection ended before the answer came.
    pub const DISCONNECTED: &str = "disconnected";
    /// The daemon ended while the client was connected (client side).
    pub const DAEMON_STOPPED: &str = "daemon_stopped";
    /// The request acts as an agent, and the connection has not attached one.
    pub const NOT_ATTACHED: &str = "not_attached";

    /// An error with what to do about it.
    pub fn new(
        code: impl Into<String>,
        message: impl Into<String>,
        todo: impl Into<String>,
    ) -> Self {
        Self { code: code.into(), message: message.into(), todo: Some(todo.into()) }
    }

    /// Something that cannot be, as far as commsd knows itself.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(
            "internal",
            message,
            "this is a fault of commsd's: please report it, with `commsd logs` and what you did",
        )
    }

    /// The system gives a program no threads or descriptors to work with.
    pub fn no_runtime(error: &std::io::Error) -> Self {
        Self::new(
            "start_io",
            format!("cannot start a runtime: {error}"),
            "check the limits of this user's processes and descriptors (ulimit -a)",
        )
    }

    /// An error whose message says by itself what to do.
    pub fn plain(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: code.into(), message: message.into(), todo: None }
    }

    /// Parameters of `method` that cannot be used; `what` names the field.
    pub fn invalid_params(method: &str, what: impl fmt::Display) -> Self {
        Self::new(
            Self::INVALID_PARAMS,
            format!("{method}: {what}"),
            "correct it; `commsd COMMAND --help` says what a command takes",
        )
    }

    /// The number in JSON-RPC's `error.code`.
    #[must_use]
    pub fn rpc_number(&self) -> i64 {
        match self.code.as_str() {
            Self::PARSE_ERROR => -32700,
            Self::INVALID_REQUEST => -32600,
            Self::METHOD_NOT_FOUND => -32601,
            Self::INVALID_PARAMS => -32602,
            _ => -32000,
        }
    }
}

// ---------------------------------------------------------------------------------------------
// Values that check themselves

/// The number or text by which a client finds the answer to its request.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum RequestId {
    /// An integer; fractions are refused.
    Number(i64),
    /// Text of at most [`MAX_REQUEST_ID_BYTES`].
    Text(String),
}

/// A time, written as ISO-8601 UTC with milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Time(pub UnixMillis);

impl From<Time> for String {
    fn from(time: Time) -> Self {
        time.0.iso()
    }
}

impl TryFrom<String> for Time {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        UnixMillis::parse_iso(&text).map(Self).ok_or("not an ISO-8601 time")
    }
}

/// What an agent says: at most [`MAX_TEXT_BYTES`], not empty. Its `Debug` shows the length only, so
/// that no log can hold it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Text(String);

impl Text {
    /// The words.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The words, taken out.
    #[must_use]
    pub fn into_string(self) -> String {
        self.0
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Text({} bytes)", self.0.len())
    }
}

impl From<Text> for String {
    fn from(text: Text) -> Self {
        text.0
    }
}

impl TryFrom<String> for Text {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        match text.len() {
            0 => Err("the text is empty".into()),
            n if n > MAX_TEXT_BYTES => Err(format!(
                "the text has {n} bytes, at most {MAX_TEXT_BYTES} are taken; \
                 write it to a file and send the path"
            )),
            _ => Ok(Self(text)),
        }
    }
}

/// A short name on one line: 1 to [`MAX_LABEL_BYTES`] bytes without control, bidirectional
/// or invisible characters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Label(String);

impl Label {
    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<Label> for String {
    fn from(label: Label) -> Self {
        label.0
    }
}

impl TryFrom<String> for Label {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        if text.is_empty() || text.len() > MAX_LABEL_BYTES {
            return Err(format!(
                "{} bytes, but a label has 1 to {MAX_LABEL_BYTES} bytes",
                text.len()
            ));
        }
        if crate::codec::text::hides_something(&text) {
            return Err("a label has no control, bidirectional or invisible characters".into());
        }
        Ok(Self(text))
    }
}

impl std::str::FromStr for Label {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.to_owned().try_into()
    }
}

/// An integer from `MIN` to `MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "u64", try_from = "u64")]
pub struct Bounded<const MIN: u64, const MAX: u64>(u64);

impl<const MIN: u64, const MAX: u64> Bounded<MIN, MAX> {
    /// The number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl<const MIN: u64, const MAX: u64> From<Bounded<MIN, MAX>> for u64 {
    fn from(value: Bounded<MIN, MAX>) -> Self {
        value.0
    }
}

impl<const MIN: u64, const MAX: u64> TryFrom<u64> for Bounded<MIN, MAX> {
    type Error = String;

    fn try_from(value: u64) -> Result<Self, Self::Error> {
        if (MIN..=MAX).contains(&value) {
            Ok(Self(value))
        } else {
            Err(format!("{value} is not from {MIN} to {MAX}"))
        }
    }
}

impl<const MIN: u64, const MAX: u64> std::str::FromStr for Bounded<MIN, MAX> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse::<u64>().map_err(|e| e.to_string())?.try_into()
    }
}

/// How many seconds a request may wait.
pub type WaitSecs = Bounded<0, MAX_WAIT_SECS>;
/// How many entries an answer may have.
pub type PageSize = Bounded<1, MAX_PAGE>;

// ---------------------------------------------------------------------------------------------
// Requests

/// Parameters that belong to one method and tell the type of its result.
pub trait Call: Serialize + DeserializeOwned {
    /// The method's canonical name.
    const METHOD: &'static str;
    /// What a good answer holds.
    type Output: Serialize + DeserializeOwned;
}

/// The one table of methods: variant, parameters, canonical name, other accepted names, result.
macro_rules! methods {
    ($(
        $(#[$doc:meta])*
        $variant:ident($params:ident) = $name:literal $(| $alias:literal)* => $output:ty;
    )*) => {
        /// One request with its checked parameters.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Request {
            $( $(#[$doc])* $variant($params), )*
        }

        impl Request {
            /// Canonical names of all methods.
            pub const METHODS: &'static [&'static str] = &[$($name),*];

            /// Reads the parameters of `method`. `None` is the same as an empty object.
            ///
            /// # Errors
            /// `method_not_found`; `invalid_params`, naming the field.
            pub fn parse(method: &str, params: Option<Value>) -> Result<Self, ApiError> {
                match method {
                    $( $name $(| $alias)* => read_params($name, params).map(Self::$variant), )*
                    _ => Err(ApiError::new(
                        ApiError::METHOD_NOT_FOUND,
                        format!("there is no method {method:?}"),
                        format!("this version has {}", Self::METHODS.join(", ")),
                    )),
                }
            }

            /// The method's canonical name.
            #[must_use]
            pub const fn method(&self) -> &'static str {
                match self {
                    $( Self::$variant(_) => $name, )*
                }
            }
        }

        $(
            impl Call for $params {
                const METHOD: &'static str = $name;
                type Output = $output;
            }

            impl From<$params> for Request {
                fn from(params: $params) -> Self {
                    Self::$variant(params)
                }
            }
        )*
    };
}

methods! {
    /// Exchanges versions; first on every connection.
    Hello(HelloParams) = "hello" => HelloResult;
    /// Makes the connection an agent.
    Attach(AttachParams) = "attach" => Attached;
    /// Gives the agent up; the connection stays, as an operator's.
    Detach(DetachParams) = "detach" => Done;
    /// State and health of the daemon.
    Status(StatusParams) = "status.get" | "status" => Status;
    /// Ends the daemon in order. The answer comes first, the end of the connection later.
    DaemonStop(DaemonStopParams) = "daemon.stop" => Stopping;
    /// The attached agent.
    Whoami(WhoamiParams) = "whoami" => Whoami;
    /// Agents that the caller may see.
    Agents(AgentsParams) = "agents.list" | "agents" => AgentList;
    /// Rooms that the caller may see.
    Rooms(RoomsParams) = "rooms.list" | "rooms" => RoomList;
    /// Creates a room owned by the attached agent.
    RoomCreate(RoomCreateParams) = "room.create" | "rooms.create" => Room;
    /// Joins a room.
    RoomJoin(RoomJoinParams) = "room.join" | "rooms.join" => Room;
    /// Leaves a room, or declines an invite.
    RoomLeave(RoomLeaveParams) = "room.leave" | "rooms.leave" => Room;
    /// The room with its members.
    RoomMembers(RoomMembersParams) = "room.members" | "rooms.members" => Room;
    /// Messages of a room.
    RoomHistory(RoomHistoryParams) = "room.history" | "rooms.history" => History;
    /// Ends a room that the attached agent owns.
    RoomDestroy(RoomDestroyParams) = "room.destroy" | "rooms.destroy" => Room;
    /// Invites an agent into an own room.
    RoomInvite(RoomInviteParams) = "room.invite" | "rooms.invite" => Room;
    /// Removes an agent from an own room.
    RoomKick(RoomKickParams) = "room.kick" | "rooms.kick" => Room;
    /// A message to a room.
    Send(SendParams) = "send" => SendResult;
    /// A direct message.
    Dm(DmParams) = "dm.send" | "dm" => SendResult;
    /// Asks a device for its version.
    MeshVersion(MeshVersionParams) = "mesh.version" => MeshVersion;
    /// The way to a device, and how long it takes.
    MeshTrace(MeshTraceParams) = "mesh.trace" => MeshTrace;
    /// Who is connected with whom.
    MeshGraph(MeshGraphParams) = "mesh.graph" => MeshGraph;
    /// Connects to another machine, which its side has to allow.
    MeshConnect(MeshConnectParams) = "mesh.connect" => MeshConnected;
    /// Listens for other machines at one more address.
    MeshListen(MeshListenParams) = "mesh.listen" => MeshListener;
    /// Listens there no longer.
    MeshUnlisten(MeshUnlistenParams) = "mesh.unlisten" => MeshListener;
    /// Where the daemon listens.
    MeshListeners(MeshListenersParams) = "mesh.listeners" => MeshListeners;
    /// The machine's addresses.
    MeshInterfaces(MeshInterfacesParams) = "mesh.interfaces" => MeshInterfaces;
    /// Listens for beacons, and tells whose were heard.
    MeshDiscover(MeshDiscoverParams) = "mesh.discover" => MeshDiscovered;
    /// Announces a name and a port by beacons.
    MeshAdvertise(MeshAdvertiseParams) = "mesh.advertise" => MeshAdvertised;
    /// Announces it no longer.
    MeshUnadvertise(MeshUnadvertiseParams) = "mesh.unadvertise" => MeshUnadvertised;
    /// How far this machine makes itself known by beacons.
    MeshSetVisibility(MeshSetVisibilityParams) = "mesh.set_visibility" => MeshVisibilities;
    /// How far it does.
    MeshGetVisibility(MeshGetVisibilityParams) = "mesh.get_visibility" => MeshVisibilities;
    /// Trusts a device, user or machine beyond this machine.
    TrustAdd(TrustAddParams) = "trust.add" => TrustChanged;
    /// Trusts it no longer.
    TrustRemove(TrustRemoveParams) = "trust.remove" => TrustChanged;
    /// Who is trusted.
    TrustList(TrustListParams) = "trust.list" => Trusted;
    /// A code by which another user trusts the attached agent's device.
    TrustCodeCreate(TrustCodeCreateParams) = "trust.code.create" => TrustCode;
    /// Trusts the device that a code names.
    TrustCodeRedeem(TrustCodeRedeemParams) = "trust.code.redeem" => TrustCodeRedeemed;
    /// Lets somebody write to this user's agents without a question.
    DmAdmit(DmAdmitParams) = "dm.admit" => DmAdmitted;
    /// Opens a conversation with a grant that was given to this agent or its user.
    DmUseGrant(DmUseGrantParams) = "dm.use_grant" => DmOpened;
    /// Withdraws such a grant.
    DmRevoke(DmRevokeParams) = "dm.revoke" => DmRevoked;
    /// What waits for this agent's yes or no.
    Pending(PendingParams) = "pending.list" | "pending" => PendingList;
    /// Yes to a waiting request.
    Accept(AcceptParams) = "accept" => Answered;
    /// No to a waiting request.
    Reject(RejectParams) = "reject" => Answered;
    /// Reads events from the mailbox.
    Inbox(InboxParams) = "inbox" => Inbox;
    /// Streams the mailbox as `event` notifications.
    EventsSubscribe(EventsSubscribeParams) = "events.subscribe" => Subscribed;
    /// Acknowledges events up to a number.
    EventsAck(EventsAckParams) = "events.ack" => Acked;
    /// What was put into an answer that the model will see; hooks do not bring it again.
    EventsGiven(EventsGivenParams) = "events.given" => Given;
    /// What was given in an answer that the client does not want: hooks do not take it for seen.
    EventsLost(EventsLostParams) = "events.lost" => Done;
    /// What waits for the agent of the harness session that a hook runs in.
    HookTake(HookTakeParams) = "hook.take" => HookTaken;
    /// The hook has printed it.
    HookShown(HookShownParams) = "hook.shown" => Done;
    /// Changes the attached agent's own record.
    Update(UpdateParams) = "update" => Whoami;
    /// The daemon's newest log events.
    Logs(LogsParams) = "logs.get" | "logs" => Logs;
    /// Snapshot, then numbered changes as `change` notifications.
    Watch(WatchParams) = "watch" => Watching;
    /// The tool `agent_comms`, as a model calls it.
    Action(ActionParams) = "action" => ToolResult;
    /// This user's own names for devices.
    Petnames(PetnamesParams) = "petnames.list" | "petnames" => Petnames;
    /// Gives a device a name.
    PetnameSet(PetnameSetParams) = "petname.set" => Petname;
    /// Takes a device's name away.
    PetnameClear(PetnameClearParams) = "petname.clear" => Petname;
    /// Shares a vault.
    VaultShare(VaultShareParams) = "vault.share" => VaultShare;
    /// Shares it no longer.
    VaultUnshare(VaultUnshareParams) = "vault.unshare" => VaultShare;
    /// What is shared, and with whom.
    VaultShares(VaultSharesParams) = "vault.shares" => VaultShares;
    /// Takes permissions back.
    VaultRevoke(VaultRevokeParams) = "vault.revoke" => VaultShare;
    /// Asks for a permission.
    VaultRequest(VaultRequestParams) = "vault.request" => VaultPermission;
    /// Hands a permission on.
    VaultDelegate(VaultDelegateParams) = "vault.delegate" => VaultPermission;
    /// Carries out a command on a share.
    VaultCall(VaultCallParams) = "vault.call" => VaultAnswer;
    /// The Agent Collaboration Protocol, as this machine's user: one call.
    Acp(AcpParams) = "acp" => Value;
    /// The name that this machine gives itself.
    MachineName(MachineNameParams) = "machine.name" => MachineName;
    /// A page for this machine's user is served.
    WebAnnounce(WebAnnounceParams) = "web.announce" => WebUrl;
    /// Where that page is.
    WebUrl(WebUrlParams) = "web.url" => WebUrl;
}

/// Parameters from JSON, with the name of a field that does not fit in the error.
fn read_params<T: DeserializeOwned>(method: &str, params: Option<Value>) -> Result<T, ApiError> {
    let value = match params {
        None => Value::Object(Map::new()),
        Some(object @ Value::Object(_)) => object,
        Some(_) => {
            return Err(ApiError::invalid_params(method, "params must be an object"));
        }
    };
    // The place of a fault is only looked for when there is one: it costs as much as the rest.
    if let Ok(params) = T::deserialize(&value) {
        return Ok(params);
    }
    serde_path_to_error::deserialize(value).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        match path.as_str() {
            // serde's own text names a missing or unknown field.
            "." => ApiError::invalid_params(method, inner),
            field => ApiError::invalid_params(method, format!("`{field}`: {inner}")),
        }
    })
}

/// Parameter objects: camelCase members, unknown ones refused; those after the `;` may be left out.
macro_rules! params {
    ($(
        $(#[$doc:meta])*
        $name:ident {
            $( $(#[$rdoc:meta])* $required:ident: $rty:ty, )*
            ;
            $( $(#[$odoc:meta])* $optional:ident: $oty:ty, )*
        }
    )*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "camelCase", deny_unknown_fields)]
        pub struct $name {
            $( $(#[$rdoc])* pub $required: $rty, )*
            $(
                $(#[$odoc])*
                #[serde(default, skip_serializing_if = "Option::is_none")]
                pub $optional: Option<$oty>,
            )*
        }
    )*};
}

params! {
    /// `hello`.
    HelloParams {
        /// Which program connects, e.g. `commsd-cli`.
        client: Label,
        /// Its version.
        version: Label,
        /// The [`API_VERSION`] that it speaks.
        api: u32,
        ;
    }

    /// `attach`: which agent this connection is.
    AttachParams {
        /// The harness, half of the slot's name: `claude-code`, `pi`, `codex`, `mcp`, `cli` …
        harness: Label,
        /// The agent's real working directory, absolute.
        cwd: String,
        /// The client's process.
        pid: u32,
        ;
        /// The slot's other half where it is not `cwd`: for `cli`, the agent's name.
        key: Label,
        /// The name asked for; without one the agent keeps the name that it has.
        name: String,
        /// Ask for an identity that ends with the connection.
        ephemeral: bool,
        /// Put the agent into the room of its directory, which agents of one directory share.
        project_room: bool,
        /// The process of the harness session, by which its hooks are known.
        harness_pid: u32,
    }

    /// `petnames.list`.
    PetnamesParams { ; }

    /// `petname.set`.
    PetnameSetParams {
        /// Full id of the device.
        device: String,
        /// Its name, 1 to 64 characters.
        name: String,
        ;
    }

    /// `petname.clear`.
    PetnameClearParams {
        /// Full id of the device.
        device: String,
        ;
    }

    /// `machine.name`.
    MachineNameParams {
        ;
        /// The name, 1 to 64 characters; none without it.
        name: String,
    }

    /// `detach`.
    DetachParams { ; }

    /// `status.get`.
    StatusParams {
        ;
        /// List the limits too.
        limits: bool,
        /// Say what the daemon was told, too.
        settings: bool,
    }

    /// `daemon.stop`.
    DaemonStopParams { ; }

    /// `whoami`.
    WhoamiParams { ; }

    /// `agents.list`.
    AgentsParams { ; }

    /// `rooms.list`.
    RoomsParams { ; }

    /// `room.create`.
    RoomCreateParams {
        /// The room's name; it becomes the local part of the path.
        name: String,
        ;
        /// Public without it.
        r#type: RoomType,
        /// What the room is for; empty without it.
        description: String,
    }

    /// `room.join`.
    RoomJoinParams {
        /// Path, or unambiguous name.
        room: String,
        ;
    }

    /// `room.leave`.
    RoomLeaveParams {
        /// Path, or unambiguous name.
        room: String,
        ;
        /// What the owner is told; of use when an invitation is declined.
        reason: String,
    }

    /// `room.members`.
    RoomMembersParams {
        /// Path, or unambiguous name.
        room: String,
        ;
    }

    /// `room.history`: the newest messages, or with `since` the ones that follow it.
    RoomHistoryParams {
        /// Path, or unambiguous name.
        room: String,
        ;
        /// Only messages with a larger `seq`, oldest first.
        since: u64,
        /// At most so many; [`DEFAULT_PAGE`] without it.
        limit: PageSize,
    }

    /// `room.destroy`.
    RoomDestroyParams {
        /// Path, or unambiguous name.
        room: String,
        ;
    }

    /// `room.invite`.
    RoomInviteParams {
        /// Path, or unambiguous name.
        room: String,
        /// Id, unambiguous prefix of it, or unambiguous name.
        agent: String,
        ;
    }

    /// `room.kick`.
    RoomKickParams {
        /// Path, or unambiguous name.
        room: String,
        /// Id, unambiguous prefix of it, or unambiguous name.
        agent: String,
        ;
    }

    /// `send`.
    SendParams {
        /// Path, or unambiguous name.
        room: String,
        /// The message.
        text: Text,
        ;
        /// When the reader should react.
        timing: Timing,
        /// Id of the message that this answers.
        reply_to: String,
    }

    /// `dm.send`.
    DmParams {
        /// Id, unambiguous prefix of it, or unambiguous name.
        agent: String,
        /// The message.
        text: Text,
        ;
        /// When the reader should react.
        timing: Timing,
        /// Id of the message that this answers.
        reply_to: String,
        /// How long to wait for a stranger's consent; not at all without it.
        wait: WaitSecs,
    }

    /// `dm.admit`.
    DmAdmitParams {
        /// Id, unambiguous prefix of it, or unambiguous name; of a user the full id.
        agent: String,
        ;
        /// The id is a user's, who may hand the grant on to its devices.
        principal: bool,
    }

    /// `dm.use_grant`.
    DmUseGrantParams {
        /// Id, unambiguous prefix of it, or unambiguous name.
        agent: String,
        /// The grant's text.
        grant: String,
        ;
    }

    /// `dm.revoke`.
    DmRevokeParams {
        /// Id, unambiguous prefix of it, or unambiguous name; of a user the full id.
        agent: String,
        ;
    }

    /// `pending.list`.
    PendingParams { ; }

    /// `accept`: an `id` from `pending.list`, or `room` and `requester`.
    AcceptParams {
        ;
        /// For a capability: how far the yes goes.
        terms: GrantTerms,
        /// The request's id.
        id: String,
        /// The room's or DM's path.
        room: String,
        /// Who asks.
        requester: String,
    }

    /// `reject`: an `id` from `pending.list`, or `room` and `requester`.
    RejectParams {
        ;
        /// The request's id.
        id: String,
        /// The room's or DM's path.
        room: String,
        /// Who asks.
        requester: String,
        /// What the requester is told.
        reason: String,
    }

    /// `inbox`. It acknowledges nothing; the reader does so with `events.ack` once it has used them.
    InboxParams {
        ;
        /// Answer at the first event or after so many seconds; at once without it.
        wait: WaitSecs,
        /// At most so many events; [`DEFAULT_PAGE`] without it.
        max: PageSize,
        /// Only look: an event shown this way does not count as seen.
        peek: bool,
    }

    /// `events.subscribe`.
    EventsSubscribeParams {
        ;
        /// Start behind this number; behind the last acknowledged one without it.
        after: u64,
    }

    /// `events.ack`.
    EventsAckParams {
        /// Everything up to and including this number has been used.
        seq: u64,
        ;
    }

    /// `events.given`.
    EventsGivenParams {
        /// Everything up to and including this number has been given.
        seq: u64,
        ;
    }

    /// `events.lost`. Until the client acknowledges more than this, hooks acknowledge no more.
    EventsLostParams {
        /// Everything up to and including this number is in no doubt.
        seq: u64,
        ;
    }

    /// `hook.take`. What it takes is acknowledged by the next hook of the session, if
    /// `hook.shown` followed on the same connection; else it comes again.
    HookTakeParams {
        /// The harness.
        harness: Label,
        /// What the harness is doing.
        moment: HookMoment,
        /// The hook's ancestors, the nearest first.
        processes: Vec<u32>,
        ;
        /// What the harness calls its session: stands in where no process tells.
        session: Label,
        /// Answer when something has come that the moment is for, or after so many seconds.
        wait: WaitSecs,
    }

    /// `hook.shown`.
    HookShownParams { ; }

    /// `update`: what is given changes, the rest stays.
    UpdateParams {
        ;
        /// What the agent is doing.
        status: OwnStatus,
        /// Who may see the agent.
        visibility: Visibility,
        /// The agent's new name.
        name: String,
        /// The agent's new tags, all of them.
        tags: Vec<String>,
        /// Who may begin a conversation with the agent from now on.
        consent: Consent,
    }

    /// `logs.get`.
    LogsParams {
        ;
        /// Go on with `log` notifications, behind the last event of the answer.
        follow: bool,
        /// Only events with a larger `seq`; the oldest kept ones without it.
        after: u64,
        /// At most so many; [`MAX_PAGE`] without it.
        max: PageSize,
    }

    /// `watch`.
    WatchParams {
        ;
        /// The cursor of the last change seen; an unknown one brings a new snapshot.
        after: String,
    }
}

/// `action`: `{action, …}`. What is in it is checked by [`super::tool::Action::parse`], which names
/// the field.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ActionParams(pub Map<String, Value>);

/// Which waiting request `accept` or `reject` means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PendingRef<'a> {
    /// By its id, or by who asks.
    Id(&'a str),
    /// By the room or DM and who asks.
    Asked {
        /// The path, a room's name, or of a DM who asks once more.
        room: &'a str,
        /// The requester.
        requester: &'a str,
    },
}

impl<'a> PendingRef<'a> {
    fn of(
        method: &str,
        id: Option<&'a str>,
        room: Option<&'a str>,
        requester: Option<&'a str>,
    ) -> Result<Self, ApiError> {
        match (id, room, requester) {
            (Some(id), None, None) => Ok(Self::Id(id)),
            (None, Some(room), Some(requester)) => Ok(Self::Asked { room, requester }),
            _ => {
                Err(ApiError::invalid_params(method, "give either `id`, or `room` and `requester`"))
            }
        }
    }
}

impl AcceptParams {
    /// The request that is meant.
    ///
    /// # Errors
    /// `invalid_params` when neither or both ways of naming it are used.
    pub fn which(&self) -> Result<PendingRef<'_>, ApiError> {
        PendingRef::of(
            Self::METHOD,
            self.id.as_deref(),
            self.room.as_deref(),
            self.requester.as_deref(),
        )
    }
}

impl RejectParams {
    /// The request that is meant.
    ///
    /// # Errors
    /// `invalid_params` when neither or both ways of naming it are used.
    pub fn which(&self) -> Result<PendingRef<'_>, ApiError> {
        PendingRef::of(
            Self::METHOD,
            self.id.as_deref(),
            self.room.as_deref(),
            self.requester.as_deref(),
        )
    }
}

// ---------------------------------------------------------------------------------------------
// Words that requests and results share

/// Declares enums of plain words with their spelling on the wire.
macro_rules! words {
    ($(
        $(#[$doc:meta])*
        $name:ident { $( $(#[$vdoc:meta])* $variant:ident = $word:literal, )* }
    )*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum $name {
            $( $(#[$vdoc])* #[serde(rename = $word)] $variant, )*
        }

        impl $name {
            /// The word on the wire.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $( Self::$variant => $word, )* }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text {
                    $( $word => Ok(Self::$variant), )*
                    _ => Err(format!("{text:?} is none of {}", [$( $word ),*].join(", "))),
                }
            }
        }
    )*};
}

words! {
    /// Who can find and join a room.
    RoomType {
        /// Everybody.
        Public = "public",
        /// Everybody finds it, the invited join.
        Private = "private",
        /// Only members know it.
        Secret = "secret",
    }

    /// When a reader should react to a message.
    Timing {
        /// At its next decision point.
        Steer = "steer",
        /// When its running task is done.
        FollowUp = "followUp",
        /// At any convenient moment.
        Info = "info",
    }

    /// What an agent is doing.
    AgentStatus {
        /// At work.
        Active = "active",
        /// Waiting for something to do.
        Idle = "idle",
        /// Not to be disturbed.
        Busy = "busy",
        /// Not there.
        Offline = "offline",
    }

    /// When a harness runs a hook.
    HookMoment {
        /// Between two steps of the model: brings what is urgent, and all else with it.
        Step = "step",
        /// The model is about to end its turn, or has ended it: brings what asks for something.
        End = "end",
        /// A person has written, or a session begins: brings whatever waits.
        Start = "start",
    }

    /// What an agent may say of itself.
    OwnStatus {
        /// At work.
        Active = "active",
        /// Waiting for something to do.
        Idle = "idle",
        /// Not to be disturbed.
        Busy = "busy",
    }

    /// Who may see an agent.
    Visibility {
        /// Everybody.
        Visible = "visible",
        /// Those who share a room with it.
        Hidden = "hidden",
        /// Nobody.
        Ghost = "ghost",
    }

    /// Who may begin a conversation with an agent.
    Consent {
        /// Whoever the agent, or its user, says yes to.
        Ask = "ask",
        /// Agents of the same user without a question; others ask.
        SamePrincipal = "same-principal",
        /// Everybody.
        Open = "open",
        /// Nobody.
        Closed = "closed",
    }

    /// What became of a message for one recipient.
    DeliveryStatus {
        /// Taken, and its way to this recipient has not ended yet; the outcome comes as an event.
        Accepted = "accepted",
        /// The recipient's side has it.
        Delivered = "delivered",
        /// The recipient's client consumed it.
        Read = "read",
        /// Safely held here until the recipient can be reached.
        Queued = "queued",
        /// The recipient's answer was no; trying again changes nothing.
        Refused = "refused",
        /// Pushed out of a full queue, or the right to send is gone.
        Dropped = "dropped",
        /// Never delivered within a day.
        Expired = "expired",
        /// Waits until a stranger allows it; the outcome comes as an event.
        AwaitingConsent = "awaiting_consent",
    }

    /// What somebody asks this agent for.
    PendingKind {
        /// To send direct messages.
        Dm = "dm",
        /// To join a room.
        Room = "room",
        /// Not for anything of this agent's: it is invited to a room.
        Invite = "invite",
        /// For a capability.
        Capability = "capability",
        /// To connect to this machine.
        Mesh = "mesh",
    }

    /// How much a health condition matters.
    Severity {
        /// Worth knowing.
        Info = "info",
        /// Works, but not as it should.
        Warning = "warning",
        /// Something does not work.
        Error = "error",
    }
}

// ---------------------------------------------------------------------------------------------
// Results. They are read leniently: a newer daemon may say more.

/// A numbered event of an agent's mailbox, of the log, or a change: `{seq, type, …}`. What the other
/// members are is told by `type` (`protocol/rooms.md` 1.6 for a mailbox).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Its number, growing by one or more.
    pub seq: u64,
    /// All other members.
    #[serde(flatten)]
    pub body: Map<String, Value>,
}

impl Event {
    /// The `type` member; empty when there is none.
    #[must_use]
    pub fn kind(&self) -> &str {
        self.body.get("type").and_then(Value::as_str).unwrap_or_default()
    }
}

/// Methods of notifications that the daemon sends.
pub mod notification {
    /// An [`super::Event`] of the attached agent's mailbox, after `events.subscribe`.
    pub const EVENT: &str = "event";
    /// An [`super::Event`] with a `cursor` member, after `watch`.
    pub const CHANGE: &str = "change";
    /// An [`super::Event`] of the log, after `logs.get` with `follow`.
    pub const LOG: &str = "log";
    /// An [`super::AcpTold`], while a delegation is waited for.
    pub const ACP: &str = "acp";
    /// The daemon closes the connection: a [`super::Closing`].
    pub const CLOSING: &str = "closing";
}

/// Declares results: camelCase members, unknown ones ignored.
macro_rules! results {
    ($(
        $(#[$doc:meta])*
        $name:ident { $( $(#[$fdoc:meta])* $field:ident: $ty:ty, )* }
    )*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "camelCase")]
        pub struct $name { $( $(#[$fdoc])* pub $field: $ty, )* }
    )*};
}

mod mesh;
mod trust;
mod vault;
mod web;

pub use mesh::*;
pub use trust::*;
pub use vault::*;
pub use web::*;

results! {
    /// The answer to a request that has nothing to tell.
    Done {}

    /// What happened meanwhile to work that is waited for.
    AcpTold {
        /// The request that waits.
        request: RequestId,
        /// What happened.
        news: AcpNews,
    }

    /// Why the daemon closes a connection.
    Closing {
        /// Stable name, e.g. `slow_consumer`.
        reason: String,
    }

    /// `hello`.
    HelloResult {
        /// The daemon's program version.
        version: String,
        /// The [`API_VERSION`] that it speaks.
        api: u32,
        /// What it takes.
        limits: ApiLimits,
    }

    /// `attach`.
    Attached {
        /// The agent's id.
        agent: String,
        /// Its name.
        name: String,
        /// The slot that it lives in, as `status` and the logs name it.
        slot: String,
        /// The last acknowledged event; what follows is unread.
        seq: u64,
        /// Whether the identity ends with the connection.
        ephemeral: bool,
        /// Why it is not the slot that was asked for.
        reason: Option<String>,
    }

    /// `status.get`.
    Status {
        /// Program version of the daemon.
        version: String,
        /// Its process.
        pid: u32,
        /// How long it has run.
        uptime_ms: u64,
        /// The id of its own device.
        device: String,
        /// The well-known port.
        port: PortStatus,
        /// The coordinator role.
        coordinator: CoordinatorStatus,
        /// Devices with a session.
        peers: Vec<PeerStatus>,
        /// How many agents the daemon hosts.
        agents: u64,
        /// What waits.
        queues: QueueStatus,
        /// What is not as it should be.
        health: Vec<Health>,
        /// The relay hub, when one is configured.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        hub: Option<HubStatus>,
        /// With `limits` only.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limits: Option<Vec<LimitInfo>>,
        /// With `settings` only: what `run --check --json` shows.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        settings: Option<Map<String, Value>>,
    }

    /// `daemon.stop`.
    Stopping {
        /// The daemon's process.
        pid: u32,
        /// Its program version.
        version: String,
    }

    /// The well-known port.
    PortStatus {
        /// Its number.
        number: u16,
        /// Whether this daemon listens there.
        held: bool,
    }

    /// The coordinator role.
    CoordinatorStatus {
        /// The device that has it.
        holder: Option<String>,
        /// Its term.
        term: u64,
        /// Whether a device of this daemon has it.
        held: bool,
    }

    /// A device with a session.
    PeerStatus {
        /// Its id.
        device: String,
        /// Where it is.
        address: String,
        /// Sessions with devices of this daemon.
        sessions: u64,
        /// Whether it runs on this machine.
        machine_local: bool,
        /// Since when the oldest session has been up.
        since: Time,
        /// The agent-comms version that it tells.
        version: Option<String>,
    }

    /// The relay hub.
    HubStatus {
        /// Its URL.
        url: String,
        /// Whether anybody is trusted, so that it is dialled.
        wanted: bool,
        /// Since when there is a session; none when there is none.
        since: Option<Time>,
        /// Trusted devices heard of through it.
        devices: u64,
        /// Dials in a row that have come to nothing.
        failures: u64,
    }

    /// What waits.
    QueueStatus {
        /// Messages for recipients elsewhere.
        outgoing: u64,
        /// Events that agents here have not acknowledged.
        inbound: u64,
        /// Age of the oldest of both.
        oldest_ms: Option<u64>,
    }

    /// One health condition.
    Health {
        /// Stable name.
        code: String,
        /// How much it matters.
        severity: Severity,
        /// What it is.
        text: String,
        /// What to do.
        todo: Option<String>,
    }

    /// One limit.
    LimitInfo {
        /// Stable name.
        name: String,
        /// Its value.
        value: u64,
        /// What it counts: `bytes`, `ms`, `entries` …
        unit: String,
        /// What it bounds and why.
        text: String,
    }

    /// `whoami`.
    Whoami {
        /// Device id of the agent.
        id: String,
        /// Its name.
        name: String,
        /// Its harness.
        harness: String,
        /// Its working directory.
        cwd: String,
        /// What it is doing.
        status: AgentStatus,
        /// Who may see it.
        visibility: Visibility,
        /// Its tags.
        tags: Vec<String>,
        /// Who may begin a conversation with it.
        consent: Consent,
        /// Paths of its rooms.
        rooms: Vec<String>,
        /// Id of the user.
        principal: Option<String>,
        /// Id of the machine.
        machine: Option<String>,
        /// Program version of the daemon.
        version: String,
    }

    /// `agents.list`.
    AgentList {
        /// The agents.
        agents: Vec<AgentInfo>,
    }

    /// One agent.
    AgentInfo {
        /// Device id.
        id: String,
        /// The name to call it by: petname, else the name that it gives itself.
        name: String,
        /// All names.
        names: Names,
        /// Its harness.
        harness: String,
        /// Its working directory where shared.
        cwd: Option<String>,
        /// What it is doing.
        status: AgentStatus,
        /// Who may see it.
        visibility: Visibility,
        /// Its tags.
        tags: Vec<String>,
        /// Paths of its rooms where shared.
        rooms: Vec<String>,
        /// Whether this daemon hosts it.
        local: bool,
        /// Id of its machine where proven.
        machine: Option<String>,
    }

    /// `rooms.list`.
    RoomList {
        /// The rooms.
        rooms: Vec<RoomInfo>,
    }

    /// One room of many.
    RoomInfo {
        /// `<owner>/<local part>`.
        path: String,
        /// Its name.
        name: String,
        /// Who can find and join it.
        r#type: RoomType,
        /// Device id of the owner.
        owner: String,
        /// What it is for.
        description: String,
        /// How many are in it.
        members: u64,
        /// Whether the attached agent is in it.
        joined: bool,
    }

    /// One room with its members.
    Room {
        /// `<owner>/<local part>`.
        path: String,
        /// Its name.
        name: String,
        /// Who can find and join it.
        r#type: RoomType,
        /// Device id of the owner.
        owner: String,
        /// What it is for.
        description: String,
        /// Who is in it.
        members: Vec<Member>,
        /// `awaiting_consent` while the owner decides on a join; the outcome comes as an event.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        status: Option<DeliveryStatus>,
    }

    /// Somebody in a room.
    Member {
        /// Device id.
        id: String,
        /// The name to call it by.
        name: Option<String>,
        /// What it is doing, where known.
        status: Option<AgentStatus>,
    }

    /// `room.history`.
    History {
        /// Oldest first.
        messages: Vec<RoomMessage>,
        /// Whether messages with a larger `seq` follow.
        more: bool,
    }

    /// One message of a room.
    RoomMessage {
        /// Its place in this daemon's copy of the history; the cursor for `since`.
        seq: u64,
        /// Message id.
        id: String,
        /// Device id of the author, as authenticated.
        from: String,
        /// The author's name where known.
        from_name: Option<String>,
        /// When it was sent.
        at: Time,
        /// What it says.
        text: String,
        /// Id of the message that it answers.
        reply_to: Option<String>,
        /// Device ids of those who read it.
        read_by: Vec<String>,
    }

    /// `send`, `dm.send`.
    SendResult {
        /// Message id.
        message_id: String,
        /// One entry for each recipient.
        deliveries: Vec<Delivery>,
    }

    /// What became of a message for one recipient.
    Delivery {
        /// Device id.
        agent: String,
        /// The recipient's name where known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        agent_name: Option<String>,
        /// How far it is.
        status: DeliveryStatus,
        /// Why it is queued: `timeout`, `not_connected`, `connection_lost`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
        /// The recipient's code when it refused.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        code: Option<String>,
        /// Messages that wait for this recipient, this one among them, where it has to wait.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        waiting: Option<u64>,
        /// Age of the oldest of them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        oldest_ms: Option<u64>,
    }

    /// `pending.list`.
    PendingList {
        /// Oldest first.
        requests: Vec<PendingRequest>,
    }

    /// What somebody asks this agent for.
    PendingRequest {
        /// Names it in `accept` and `reject`.
        id: String,
        /// What is asked for.
        kind: PendingKind,
        /// Path of the room or DM.
        room: Option<String>,
        /// The capability asked for.
        capability: Option<String>,
        /// The share that it is for.
        share: Option<String>,
        /// Device id of who asks.
        requester: String,
        /// Its name where known.
        requester_name: Option<String>,
        /// The machine that it proves to be on, when that is another one.
        from_machine: Option<String>,
        /// `other`: another user's of this machine; `unknown`: nothing proves whose it is.
        from_user: Option<String>,
        /// Since when it waits.
        at: Time,
    }

    /// `accept`, `reject`.
    Answered {
        /// What was asked for.
        request: PendingRequest,
        /// The answer.
        accepted: bool,
    }

    /// `inbox`.
    Inbox {
        /// Oldest first.
        events: Vec<Event>,
        /// Whether more wait.
        more: bool,
    }

    /// `events.given`.
    Given {
        /// Everything up to this number has been given, by hooks too.
        through: u64,
        /// Hooks of the agent's harness session ask for what has come.
        hooks: Option<bool>,
    }

    /// `hook.take`.
    HookTaken {
        /// The agent; none when no session is found, or more than one.
        agent: Option<String>,
        /// Oldest first; whole events, as many as a hook may bring.
        events: Vec<Event>,
        /// Whether more wait; without events, one that is too large for a hook.
        more: bool,
    }

    /// `events.subscribe`.
    Subscribed {
        /// Events with a larger number follow as notifications.
        after: u64,
        /// The newest number so far.
        head: u64,
    }

    /// `events.ack`.
    Acked {
        /// Everything up to here is acknowledged.
        seq: u64,
    }

    /// `logs.get`.
    Logs {
        /// Oldest first.
        events: Vec<Event>,
        /// Whether more are kept behind these; ask with `after` = the last `seq`.
        more: bool,
    }

    /// `petnames.list`.
    Petnames {
        /// Ordered by device.
        petnames: Vec<Petname>,
    }

    /// `dm.admit`.
    DmAdmitted {
        /// Full id of the device or user that is admitted.
        bearer: String,
        /// It is a user.
        principal: bool,
        /// Full id of the agent that can be written to.
        agent: String,
        /// What the other side needs, in one line.
        grant: String,
    }

    /// `dm.use_grant`.
    DmOpened {
        /// Full id of the agent that can be written to now.
        agent: String,
    }

    /// `dm.revoke`.
    DmRevoked {
        /// Full id of the device or user.
        bearer: String,
        /// Whether there was a grant.
        revoked: bool,
    }

    /// `petname.set`, `petname.clear`.
    Petname {
        /// Full id of the device.
        device: String,
        /// What it is called, or was before its name was taken away; empty when it had none.
        name: String,
    }

    /// `machine.name`.
    MachineName {
        /// What this machine calls itself.
        name: Option<String>,
    }

    /// `watch`.
    Watching {
        /// Where the stream of changes starts.
        cursor: String,
        /// The state there; absent when the changes go on from `after` without a gap.
        snapshot: Option<Snapshot>,
    }

    /// The state that changes build on.
    Snapshot {
        /// As `status.get`.
        status: Status,
        /// As `agents.list`.
        agents: Vec<AgentInfo>,
        /// As `rooms.list`.
        rooms: Vec<RoomInfo>,
    }
}

/// What an agent is called.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Names {
    /// By this user.
    pub petname: Option<String>,
    /// By itself.
    #[serde(rename = "self")]
    pub own: Option<String>,
    /// Its machine's proven name.
    pub machine: Option<String>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_label_hides_nothing() {
        for good in ["alice", "Grüße", "❤\u{fe0f} 👩\u{200d}💻"] {
            assert!(good.parse::<Label>().is_ok(), "{good:?}");
        }
        for bad in ["", "a\nb", "a\0", "a\u{202e}b", "a\u{2067}b", "a\u{200b}", "a\u{2028}b"] {
            assert!(bad.parse::<Label>().is_err(), "{bad:?}");
        }
        assert!("x".repeat(MAX_LABEL_BYTES + 1).parse::<Label>().is_err());
    }

    #[test]
    fn both_spellings_of_a_method_are_one_request() {
        let params = json!({"room": "r"});
        let canonical = Request::parse("room.join", Some(params.clone())).unwrap();
        assert_eq!(canonical, Request::RoomJoin(RoomJoinParams { room: "r".into() }));
        assert_eq!(Request::parse("rooms.join", Some(params)).unwrap(), canonical);
        assert_eq!(canonical.method(), "room.join");
        for (alias, name) in
            [("status", "status.get"), ("agents", "agents.list"), ("pending", "pending.list")]
        {
            assert_eq!(Request::parse(alias, None).unwrap().method(), name);
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let cases = [
            ("room.join", json!({}), "missing field `room`"),
            ("room.join", json!({"room": "r", "rom": 1}), "unknown field `rom`"),
            ("room.join", json!({"room": 5}), "`room`: invalid type: integer `5`"),
            ("send", json!({"room": "r", "text": ""}), "`text`: the text is empty"),
            ("send", json!({"room": "r", "text": "x", "timing": "now"}), "`timing`: unknown"),
            ("inbox", json!({"wait": 86_401}), "`wait`: 86401 is not from 0 to 86400"),
            ("inbox", json!({"max": 0}), "`max`: 0 is not from 1 to 1000"),
            ("inbox", json!({"wait": -1}), "`wait`: invalid value"),
            ("update", json!({"status": "offline"}), "`status`: unknown variant `offline`"),
            ("update", json!({"tags": ["a", 1]}), "`tags[1]`: invalid type"),
            ("whoami", json!([]), "params must be an object"),
            ("hello", json!({"client": "a\u{1b}b", "version": "1", "api": 1}), "`client`: a label"),
            ("hello", json!({"client": "", "version": "1", "api": 1}), "`client`: 0 bytes"),
        ];
        for (method, params, expected) in cases {
            let error = Request::parse(method, Some(params)).unwrap_err();
            assert_eq!(error.code, ApiError::INVALID_PARAMS, "{method}");
            assert!(error.message.starts_with(method), "{}", error.message);
            assert!(error.message.contains(expected), "{} / {expected}", error.message);
        }
        let error = Request::parse("room.explode", None).unwrap_err();
        assert_eq!(error.code, ApiError::METHOD_NOT_FOUND);
        assert_eq!(error.rpc_number(), -32601);
        assert!(error.todo.unwrap().contains("room.join"));
    }

    #[test]
    fn accept_takes_exactly_one_way_of_naming() {
        let parse = |params: Value| match Request::parse("accept", Some(params)).unwrap() {
            Request::Accept(accept) => accept,
            other => panic!("{other:?}"),
        };
        assert_eq!(parse(json!({"id": "7"})).which().unwrap(), PendingRef::Id("7"));
        assert_eq!(
            parse(json!({"room": "a/b", "requester": "c"})).which().unwrap(),
            PendingRef::Asked { room: "a/b", requester: "c" }
        );
        for bad in [json!({}), json!({"room": "a"}), json!({"id": "1", "room": "a"})] {
            assert_eq!(parse(bad).which().unwrap_err().code, ApiError::INVALID_PARAMS);
        }
        assert!(Request::parse("accept", Some(json!({"id": "7", "reason": "no"}))).is_err());
    }

    #[test]
    fn a_message_never_shows_in_debug_output() {
        let request = Request::parse("dm", Some(json!({"agent": "a", "text": "hush"}))).unwrap();
        let shown = format!("{request:?}");
        assert!(!shown.contains("hush") && shown.contains("Text(4 bytes)"), "{shown}");
    }

    #[test]
    fn text_is_bounded_in_bytes() {
        assert!(Text::try_from("é".repeat(MAX_TEXT_BYTES / 2)).is_ok());
        let error = Text::try_from("é".repeat(MAX_TEXT_BYTES / 2 + 1)).unwrap_err();
        assert!(error.contains("131074 bytes"), "{error}");
    }

    #[test]
    fn results_have_the_documented_members() {
        let room = Room {
            path: "o/general".into(),
            name: "general".into(),
            r#type: RoomType::Public,
            owner: "o".into(),
            description: String::new(),
            members: vec![Member { id: "m".into(), name: None, status: Some(AgentStatus::Idle) }],
            status: None,
        };
        assert_eq!(
            serde_json::to_value(&room).unwrap(),
            json!({"path": "o/general", "name": "general", "type": "public", "owner": "o",
                   "description": "", "members": [{"id": "m", "name": null, "status": "idle"}]})
        );
        let message = json!({"seq": 3, "id": "ab", "from": "f", "fromName": null,
            "at": "2026-11-29T21:51:37.991Z", "text": "hi", "replyTo": null, "readBy": []});
        let read: RoomMessage = serde_json::from_value(message.clone()).unwrap();
        assert_eq!(serde_json::to_value(read).unwrap(), message);
        let sent = SendResult {
            message_id: "1".into(),
            deliveries: vec![Delivery {
                agent: "a".into(),
                agent_name: None,
                status: DeliveryStatus::AwaitingConsent,
                reason: None,
                code: None,
                waiting: None,
                oldest_ms: None,
            }],
        };
        assert_eq!(
            serde_json::to_value(sent).unwrap(),
            json!({"messageId": "1", "deliveries": [{"agent": "a", "status": "awaiting_consent"}]})
        );
        let names = Names { own: Some("x".into()), ..Names::default() };
        assert_eq!(
            serde_json::to_value(names).unwrap(),
            json!({"petname": null, "self": "x", "machine": null})
        );
    }

    #[test]
    fn events_keep_their_members() {
        let json = json!({"seq": 9, "type": "dm", "message": {"id": "1", "content": "hi"}});
        let event: Event = serde_json::from_value(json.clone()).unwrap();
        assert_eq!((event.seq, event.kind()), (9, "dm"));
        assert_eq!(serde_json::to_value(event).unwrap(), json);
    }

    #[test]
    fn absent_parameters_are_not_written() {
        let params = InboxParams { wait: None, max: None, peek: Some(true) };
        assert_eq!(serde_json::to_value(params).unwrap(), json!({"peek": true}));
    }
}
