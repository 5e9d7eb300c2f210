//! The command line of `acp` (design 15), as structs for whoever carries a command out. Secrets never
//! stand in it: `--key` is a path.

use std::net::IpAddr;
use std::num::{NonZeroU16, NonZeroU64};
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, Args, Subcommand, ValueEnum};

use crate::acp::code::Error;
use crate::acp::did::Did;
use crate::acp::endpoint::EndpointPolicy;
use crate::acp::multi::MAX_WORKERS;
use crate::acp::objects::{Gate, Isolation, RevocationTarget, State};
use crate::acp::tool::ToolName;
use crate::acp::validate::Kind;
use crate::acp::value::{Name, Prose, TaskId, Word};

/// The longest time that is taken: an invite's (design 12).
const MAX_DURATION: Duration = Duration::from_secs(30 * 24 * 3600);

/// Where help shows what every command takes.
const GLOBAL: &str = "Global options";

/// Everything behind `acp`.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct AcpArgs {
    /// Configuration file
    #[arg(long, value_name = "FILE", global = true, help_heading = GLOBAL)]
    pub config: Option<PathBuf>,

    /// Where tasks, logs and keys of sessions are kept [default: acp in the daemon's state directory]
    #[arg(long, value_name = "DIR", global = true, help_heading = GLOBAL)]
    pub state_dir: Option<PathBuf>,

    /// Say more on stderr; twice for more
    #[arg(short, long, action = ArgAction::Count, global = true, help_heading = GLOBAL)]
    pub verbose: u8,

    /// What to do
    #[command(subcommand)]
    pub command: AcpCommand,
}

/// What to do.
#[derive(Subcommand, Clone, Debug, PartialEq, Eq)]
pub enum AcpCommand {
    /// Make an identity: a key file that only you can read
    ///
    /// Refuses a path where anything is. Prints the did, never the key.
    Keygen {
        /// The file to make
        path: PathBuf,
    },

    /// Carry sealed envelopes between gateways
    #[command(subcommand)]
    Relay(RelayCommand),

    /// Do work for others
    #[command(subcommand)]
    Worker(WorkerCommand),

    /// Have work done
    ///
    /// Sends a signed contract, follows the task, checks what comes back, and settles it once you
    /// have approved it. The result goes to stdout or --out.
    Delegate(Box<DelegateArgs>),

    /// List the workers that a relay knows
    ///
    /// Everything in a card is its worker's own claim. A worker answers only who has an invite of it,
    /// or is admitted by acp-admit in its daemon's configuration.
    Discover(DiscoverArgs),

    /// Verify a task's log: a JSONL file or a bundle
    ///
    /// Exit code 0: VALID; 3: OPEN, the task goes on; 1: anything else. Without an anchor a cut tail
    /// is only seen as a task without an end.
    AuditVerify {
        /// The log
        file: PathBuf,
        /// A trust anchor { taskId, actors, head } or an AuditCheckpoint, got by another way
        anchor: Option<PathBuf>,
    },

    /// Compare two copies of one log
    ///
    /// Exit code 0: equal, or one has more at its end; 1: they differ.
    AuditCompare {
        /// One copy
        first: PathBuf,
        /// The other
        second: PathBuf,
    },

    /// Turn a JSONL log into a signed bundle, or a bundle into JSONL
    AuditExport(AuditExportArgs),

    /// Sign a note of how far a log has come: an AuditCheckpoint
    Checkpoint {
        /// The log
        file: PathBuf,
        /// The file to make
        out: PathBuf,
        /// Key of one of the two sides
        #[arg(long, value_name = "FILE")]
        key: PathBuf,
    },

    /// Sign an owner's answer to one exact action
    Approve(ApproveArgs),

    /// Check one object: form, signatures, what its members are to each other
    #[command(allow_missing_positional = true)]
    Validate {
        /// What it is [default: what its type says, else task-manifest]
        #[arg(value_name = "TYPE", value_parser = word_parser(Kind::ALL, Kind::as_str, Kind::parse))]
        kind: Option<Kind>,
        /// The file
        #[arg(required = true)]
        file: PathBuf,
    },

    /// Serve the acp_* tools over MCP on stdio
    McpServer(McpServerArgs),

    /// Show the protocol at work, offline: four scenarios, each checked
    Demo {
        /// Where the logs go; made when it is not there
        #[arg(long, value_name = "DIR")]
        audit_dir: Option<PathBuf>,
    },

    /// Make or read invites
    #[command(subcommand)]
    Invite(InviteCommand),

    /// Take back an invite, a capability token or a card; there is no way back
    Revoke(RevokeArgs),

    /// List tasks
    Tasks(TasksArgs),

    /// Show one task
    Task(TaskArgs),

    /// Cancel a task
    Cancel(CancelArgs),

    /// Answer what waits for its owner
    #[command(subcommand)]
    Approvals(ApprovalsCommand),
}

/// What to do with a relay.
#[derive(Subcommand, Clone, Debug, PartialEq, Eq)]
pub enum RelayCommand {
    /// Run a relay in the foreground
    ///
    /// It has no key and reads no task; it sees who writes to whom, and may withhold.
    Start(RelayStartArgs),
}

/// `acp relay start`.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct RelayStartArgs {
    /// Where to listen
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1")]
    pub host: IpAddr,

    /// The port; 0 for any
    #[arg(long, value_name = "N", default_value_t = 8787)]
    pub port: u16,

    /// Keep mailboxes, cards and nonces in DIR [default: relay in --state-dir]
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,

    /// The origin by which clients reach it: behind a proxy, and where it listens on all addresses.
    /// Repeat for more
    #[arg(long = "origin", value_name = "URL", num_args = 1)]
    pub origins: Vec<String>,

    /// Certificate chain, PEM, for https and wss
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,

    /// Its private key, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,

    /// Believe the last address in X-Forwarded-For: only with a proxy in front that sets it
    #[arg(long)]
    pub behind_proxy: bool,

    /// Refuse tokens in the query, which end up in the logs of proxies
    #[arg(long)]
    pub no_query_auth: bool,

    /// Bytes of a mailbox [default: 64 MiB]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub max_mailbox_bytes: Option<u64>,

    /// Envelopes, cards and notices a minute of one did [default: 1200]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub per_did: Option<u64>,

    /// The same of one address [default: 6000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub per_address: Option<u64>,

    /// How to write the log to stderr [default: json when not on a terminal]
    #[arg(long, value_name = "FORMAT", value_parser = ["text", "json"])]
    pub log: Option<String>,
}

/// Which relays may be reached.
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelayAccess {
    /// Use a relay at a loopback or private address
    #[arg(long, value_name = "BOOL", default_value_t = true, num_args = 0..=1,
          default_missing_value = "true", require_equals = true, action = ArgAction::Set)]
    pub allow_private_relay: bool,

    /// Use http and ws beyond this machine, too
    #[arg(long)]
    pub allow_insecure: bool,
}

impl RelayAccess {
    /// As the judge of endpoints takes it.
    #[must_use]
    pub const fn policy(self) -> EndpointPolicy {
        EndpointPolicy {
            allow_private: self.allow_private_relay,
            allow_insecure: self.allow_insecure,
        }
    }
}

/// What to do as a worker.
#[derive(Subcommand, Clone, Debug, PartialEq, Eq)]
pub enum WorkerCommand {
    /// Wait for tasks and do them
    ///
    /// Prints one line on stdout: the invite, to be given to whoever may send tasks; it is good for one
    /// task unless --max-uses says more. Asks before it accepts one, unless --auto-accept is given.
    Start(Box<WorkerStartArgs>),
}

/// What does the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Adapter {
    /// A program: input on stdin, output on stdout
    Command,
    /// Claude Code
    Claude,
    /// Codex
    Codex,
    /// A model behind an HTTP API
    Openai,
    /// A tool of an MCP server
    Mcp,
    /// JavaScript in the sandbox
    Sandbox,
}

/// What an HTTP API of a model speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ApiStyle {
    /// Chat completions
    #[default]
    Openai,
    /// Messages
    Anthropic,
}

/// How envelopes are received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ReceiveForm {
    /// Long polls
    Poll,
    /// Server-sent events
    Sse,
    /// A WebSocket
    #[default]
    Websocket,
}

/// `acp worker start`.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct WorkerStartArgs {
    /// Key file; needed. The daemon works for others as acp-worker in its configuration file says
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,

    /// Where tasks come from. Repeat for more
    #[arg(long = "relay", value_name = "URL", required = true, num_args = 1,
          value_parser = relay_url)]
    pub relays: Vec<String>,

    /// What does the work
    #[arg(long, value_name = "A")]
    pub adapter: Adapter,

    /// The program: with the adapters command, claude and codex, or the server of mcp. One
    /// argument; blanks and quotes in it divide arguments, and no shell sees them
    #[arg(long, value_name = "COMMAND")]
    pub cmd: Option<String>,

    /// The tool of the MCP server
    #[arg(long, value_name = "NAME", value_parser = Word::parse)]
    pub tool: Option<Word>,

    /// The model
    #[arg(long, value_name = "NAME", value_parser = Word::parse)]
    pub model: Option<Word>,

    /// Address of the model's API
    #[arg(long, value_name = "URL")]
    pub endpoint: Option<String>,

    /// What that API speaks
    #[arg(long, value_name = "STYLE", default_value = "openai")]
    pub api_style: ApiStyle,

    /// The name in invites and cards
    #[arg(long, value_name = "NAME", value_parser = Name::parse)]
    pub name: Option<Name>,

    /// A skill to be listed with. Repeat for more
    #[arg(long = "skill", value_name = "NAME", value_parser = Word::parse)]
    pub skills: Vec<Word>,

    /// Run at exactly this level [default: what the order asks for, if it can be had]
    #[arg(long, value_name = "LEVEL",
          value_parser = word_parser(Isolation::ALL, Isolation::as_str, Isolation::parse))]
    pub isolation: Option<Isolation>,

    /// How many tasks the invite is good for
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub max_uses: u64,

    /// How long the invite is good, e.g. 90s, 30m, 12h, 7d
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = duration)]
    pub expires_in: Duration,

    /// Accept tasks without asking
    #[arg(long)]
    pub auto_accept: bool,

    /// End after one task
    #[arg(long)]
    pub once: bool,

    /// Write the first task's log to PATH, which must not be there yet; those of later tasks go beside
    /// it, with their ids. A directory takes them all
    #[arg(long, value_name = "PATH")]
    pub audit: Option<PathBuf>,

    /// How to receive
    #[arg(long, value_name = "FORM", default_value = "websocket")]
    pub receive: ReceiveForm,

    /// Which relays
    #[command(flatten)]
    pub access: RelayAccess,
}

/// Several workers on one task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Multi {
    /// The first result that passes wins
    Race,
    /// So many equal results win
    Quorum,
}

/// A tool that work may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantedTool {
    /// What it is called.
    pub name: ToolName,
    /// The command that does it.
    pub command: Option<String>,
}

/// `acp delegate`.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct DelegateArgs {
    /// Key file; without it the daemon's identity, over its socket
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,

    /// The worker: an invite as text, a did with --relay, or, without --key, an agent of the mesh by
    /// name, petname or id. Repeat for more with --multi
    #[arg(long = "to", value_name = "WORKER", required = true, num_args = 1)]
    pub to: Vec<String>,

    /// The relay of a worker that is named by its did
    #[arg(long, value_name = "URL", value_parser = relay_url)]
    pub relay: Option<String>,

    /// What it is about, in a line
    #[arg(long, value_name = "TEXT", value_parser = Name::parse)]
    pub title: Name,

    /// What is to be done
    #[arg(long, value_name = "TEXT", default_value = "", value_parser = Prose::parse)]
    pub description: Prose,

    /// The input: JSON, @FILE, or - for stdin
    #[arg(long, value_name = "JSON", default_value = "null", allow_hyphen_values = true)]
    pub input: String,

    /// JSON Schema of the input: JSON or @FILE
    #[arg(long, value_name = "JSON", default_value = "true")]
    pub input_schema: String,

    /// JSON Schema of the output: JSON or @FILE
    #[arg(long, value_name = "JSON", default_value = "true")]
    pub output_schema: String,

    /// How long the worker may take, e.g. 90s, 30m, 12h, 7d
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = duration)]
    pub deadline: Duration,

    /// Limits of the work: JSON or @FILE with some of maxInputTokens, maxOutputTokens,
    /// maxTotalTokens, maxToolCalls, maxWallTimeMs, maxOutputBytes
    #[arg(long, value_name = "JSON")]
    pub budget: Option<String>,

    /// The box that the work is done in, at least
    #[arg(long, value_name = "LEVEL",
          value_parser = word_parser(Isolation::ALL, Isolation::as_str, Isolation::parse))]
    pub isolation: Option<Isolation>,

    /// Let the work connect to this host and port, e.g. api.example.com:443, by way of a proxy in
    /// HTTPS_PROXY; repeat for more, 32 at most. Taken by workers that have the isolation kernel
    #[arg(long = "allow-host", value_name = "HOST:PORT", num_args = 1)]
    pub allow_hosts: Vec<String>,

    /// Let the work use a tool of yours; you are asked at every use. With --key
    /// RESOURCE:ACTION=COMMAND, e.g. 'mcp:docs/**:read=read-doc --plain': the command runs here as you,
    /// and no shell sees it. Without --key RESOURCE:ACTION, within one of acp-tools in the daemon's
    /// configuration. Repeat for more
    #[arg(long = "tool", value_name = "TOOL", num_args = 1, value_parser = granted_tool)]
    pub tools: Vec<GrantedTool>,

    /// How often the tools may be used, all together [default: 100]
    #[arg(long, value_name = "N", requires = "tools",
          value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub tool_uses: Option<u64>,

    /// Let the worker hand work on to others, so many behind each other
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=4))]
    pub redelegation: Option<u64>,

    /// Hand on a part of this task, which you are the worker of and which is in progress: at most what
    /// was asked of you, with some of the tools that were granted to you, once you have agreed. With
    /// --key the office of that key is asked
    #[arg(long, value_name = "TASKID", conflicts_with_all = ["multi", "audit"],
          value_parser = TaskId::parse)]
    pub parent: Option<TaskId>,

    /// Give the task to all workers
    #[arg(long, value_name = "MODE")]
    pub multi: Option<Multi>,

    /// Equal results that win [default: half of the workers and one]
    #[arg(long, value_name = "N", requires = "multi", value_parser = quorum_size)]
    pub quorum_size: Option<NonZeroU16>,

    /// Settle a result that has passed without asking
    #[arg(long)]
    pub auto_approve: bool,

    /// Show progress on stderr
    #[arg(long)]
    pub progress: bool,

    /// Write the task's log to FILE, which must not be there yet; with --multi the logs of the others
    /// go beside it, with their ids
    #[arg(long, value_name = "FILE")]
    pub audit: Option<PathBuf>,

    /// Write the result to FILE, which must not be there yet
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,

    /// How to receive
    #[arg(long, value_name = "FORM", default_value = "websocket")]
    pub receive: ReceiveForm,

    /// Which relays
    #[command(flatten)]
    pub access: RelayAccess,
}

/// `acp discover`.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct DiscoverArgs {
    /// The relay to ask
    #[arg(long, value_name = "URL", value_parser = relay_url)]
    pub relay: String,

    /// Only workers with this adapter
    #[arg(long, value_name = "NAME", value_parser = Word::parse)]
    pub adapter: Option<Word>,

    /// Only workers with this skill
    #[arg(long, value_name = "NAME", value_parser = Word::parse)]
    pub skill: Option<Word>,

    /// Which relays
    #[command(flatten)]
    pub access: RelayAccess,
}

/// `acp audit-export`.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct AuditExportArgs {
    /// The log, JSONL or a bundle
    pub file: PathBuf,

    /// The file to make, of the other form
    pub out: PathBuf,

    /// Who signs the bundle; needed for one
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,

    /// Leave out input, progress and results
    #[arg(long)]
    pub redact: bool,
}

/// `acp approve`.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct ApproveArgs {
    /// The owner's key file
    pub key: PathBuf,

    /// What the owner is asked
    #[arg(value_parser = word_parser(Gate::ALL, Gate::as_str, Gate::parse))]
    pub gate: Gate,

    /// The task
    #[arg(value_name = "TASKID", value_parser = TaskId::parse)]
    pub task_id: TaskId,

    /// The exact action
    #[arg(value_name = "TARGET.json")]
    pub target: PathBuf,

    /// The receipt to make
    #[arg(value_name = "OUT.json")]
    pub out: PathBuf,

    /// Say no
    #[arg(long)]
    pub deny: bool,

    /// Why
    #[arg(long, value_name = "TEXT", default_value = "", value_parser = Prose::parse)]
    pub reason: Prose,

    /// How long the answer is good, e.g. 90s, 30m, 12h, 7d
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = duration)]
    pub expires_in: Duration,
}

/// `acp mcp-server`.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct McpServerArgs {
    /// Key file; signs the approvals of the tools. Without it the daemon's identity
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,

    /// The relay of workers that are named by their did, and of invites
    #[arg(long, value_name = "URL", value_parser = relay_url)]
    pub relay: Option<String>,

    /// Which relays
    #[command(flatten)]
    pub access: RelayAccess,
}

/// What to do with invites.
#[derive(Subcommand, Clone, Debug, PartialEq, Eq)]
pub enum InviteCommand {
    /// Make an invite to the daemon's identity, or that of --key: for one task, or --max-uses
    Create(InviteCreateArgs),

    /// Read an invite and show what it says; its issuer's machine knows whether it was used or taken
    /// back
    Show(InviteShowArgs),
}

/// `acp invite show`.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct InviteShowArgs {
    /// `acp-invite:…` or `acp://invite?token=…`
    pub text: String,

    /// Key file of its issuer; without it the issuer's office is asked if it runs here
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
}

/// `acp invite create`.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct InviteCreateArgs {
    /// Key file; without it the daemon's identity, over its socket
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,

    /// The name in it
    #[arg(long, value_name = "NAME", value_parser = Name::parse)]
    pub name: Option<Name>,

    /// Where the worker is reached [default: the relays that its owner listens on]. Repeat for more
    #[arg(long = "relay", value_name = "URL", num_args = 1, value_parser = relay_url)]
    pub relays: Vec<String>,

    /// How many tasks it is good for
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub max_uses: u64,

    /// How long it is good, e.g. 90s, 30m, 12h, 7d
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = duration)]
    pub expires_in: Duration,
}

/// `acp revoke`.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct RevokeArgs {
    /// What is taken back
    #[arg(value_name = "KIND", value_parser =
          word_parser(RevocationTarget::ALL, RevocationTarget::as_str, RevocationTarget::parse))]
    pub target_type: RevocationTarget,

    /// Its id
    #[arg(value_name = "ID", value_parser = Name::parse)]
    pub target_id: Name,

    /// Why
    #[arg(long, value_name = "TEXT", default_value = "", value_parser = Prose::parse)]
    pub reason: Prose,

    /// Key file of who issued it; without it the daemon's identity, over its socket
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,

    /// A relay to tell. Repeat for more
    #[arg(long = "relay", value_name = "URL", num_args = 1, value_parser = relay_url)]
    pub relays: Vec<String>,

    /// Which relays
    #[command(flatten)]
    pub access: RelayAccess,
}

/// A side of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Side {
    /// Who ordered it
    Requester,
    /// Who does it
    Worker,
}

/// Whose tasks are meant.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct OwnerArgs {
    /// Key file of the owner; without it the daemon's identity, over its socket
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
}

/// `acp task`.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct TaskArgs {
    /// Its id, or enough of its beginning: task_ and 8 characters or more
    #[arg(value_parser = TaskId::parse)]
    pub id: TaskId,

    /// Print it as a draft for a page of the vault, in Markdown; nothing is written anywhere
    #[arg(long, conflicts_with = "audit")]
    pub draft: bool,

    /// Write its log to a new file, as a signed bundle (acp audit-verify reads it)
    #[arg(long, value_name = "FILE")]
    pub audit: Option<PathBuf>,

    /// Leave input, progress and results out of that file
    #[arg(long, requires = "audit")]
    pub redact: bool,

    /// Whose
    #[command(flatten)]
    pub owner: OwnerArgs,
}

/// `acp cancel`.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct CancelArgs {
    /// Its id, or enough of its beginning: task_ and 8 characters or more
    #[arg(value_parser = TaskId::parse)]
    pub id: TaskId,

    /// Why
    #[arg(long, value_name = "TEXT", default_value = "", value_parser = Prose::parse)]
    pub reason: Prose,

    /// Whose
    #[command(flatten)]
    pub owner: OwnerArgs,
}

/// `acp tasks`.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct TasksArgs {
    /// Only tasks in which we are this side
    #[arg(long, value_name = "SIDE")]
    pub role: Option<Side>,

    /// Only tasks in this state
    #[arg(long, value_name = "STATE", value_parser = word_parser(State::ALL, State::as_str, State::parse))]
    pub state: Option<State>,

    /// Only tasks with this other side
    #[arg(long, value_name = "DID", value_parser = Did::parse)]
    pub peer: Option<Did>,

    /// How many, the newest first
    #[arg(long, value_name = "N", default_value = "50")]
    pub limit: NonZeroU64,

    /// Whose
    #[command(flatten)]
    pub owner: OwnerArgs,
}

/// What to do with questions.
#[derive(Subcommand, Clone, Debug, PartialEq, Eq)]
pub enum ApprovalsCommand {
    /// List what waits for an answer
    List(OwnerArgs),
    /// Say yes
    Approve(AnswerArgs),
    /// Say no
    Deny(AnswerArgs),
}

/// An answer to one question.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct AnswerArgs {
    /// The question's id, as `acp approvals list` shows it
    pub id: String,

    /// Why
    #[arg(long, value_name = "TEXT", default_value = "", value_parser = Prose::parse)]
    pub reason: Prose,

    /// Whose
    #[command(flatten)]
    pub owner: OwnerArgs,
}

/// Reads one of the protocol's words; help lists them.
fn word_parser<T: Copy + Send + Sync + 'static>(
    all: &'static [T],
    text: fn(T) -> &'static str,
    parse: fn(&str) -> Option<T>,
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(all.iter().map(|word| text(*word)))
        .try_map(move |word| parse(&word).ok_or("not one of the words"))
}

/// A relay's address. Whether it may be reached is judged by whoever does.
fn relay_url(text: &str) -> Result<String, &'static str> {
    let scheme = text.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
    match scheme.as_deref() {
        Some("https" | "wss" | "http" | "ws") => Ok(text.to_owned()),
        _ => Err("a relay is named by a URL, e.g. https://relay.example or http://127.0.0.1:8787"),
    }
}

/// Equal results that win: of at most as many workers as take part.
fn quorum_size(text: &str) -> Result<NonZeroU16, String> {
    let size = text.parse().ok().filter(|size: &NonZeroU16| usize::from(size.get()) <= MAX_WORKERS);
    size.ok_or_else(|| format!("a quorum is a number of workers, from 1 to {MAX_WORKERS}"))
}

/// Reads a tool with its command, or without.
fn granted_tool(text: &str) -> Result<GrantedTool, Error> {
    // A resource may hold =, an action not: the command begins behind the first one after the second
    // colon.
    let action_at = text.match_indices(':').nth(1).map_or(text.len(), |(at, _)| at);
    let (resource, rest) = text.split_at(action_at);
    let (action, command) = match rest.split_once('=') {
        Some((action, command)) => (action, Some(command.to_owned())),
        None => (rest, None),
    };
    Ok(GrantedTool { name: ToolName::parse(&format!("{resource}{action}"))?, command })
}

/// Reads a time like 90s, 30m, 12h, 7d; from one second to 30 days.
fn duration(text: &str) -> Result<Duration, &'static str> {
    const FORM: &str = "a time is a number and s, m, h or d, from 1s to 30d";
    let unit = match text.bytes().last() {
        Some(b's') => 1,
        Some(b'm') => 60,
        Some(b'h') => 3600,
        Some(b'd') => 24 * 3600,
        _ => return Err(FORM),
    };
    let number = text.get(..text.len() - 1).filter(|n| n.bytes().all(|b| b.is_ascii_digit()));
    let seconds = number.and_then(|n| n.parse::<u64>().ok()).and_then(|n| n.checked_mul(unit));
    let time = Duration::from_secs(seconds.ok_or(FORM)?);
    if time.is_zero() || time > MAX_DURATION { Err(FORM) } else { Ok(time) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_has_a_resource_an_action_and_perhaps_a_command() {
        let tool = granted_tool("mcp:docs/a=b/**:read=cat -n 'x:y=z'").unwrap();
        assert_eq!(tool.name.to_string(), "mcp:docs/a=b/**:read");
        assert_eq!(tool.command.as_deref(), Some("cat -n 'x:y=z'"));
        let tool = granted_tool("net:api.example.com/443:get").unwrap();
        assert_eq!(
            (tool.name.to_string().as_str(), tool.command),
            ("net:api.example.com/443:get", None)
        );
        for bad in
            ["", "read", "mcp:docs", "mcp:docs:", "mcp:../x:read", "mcp:docs:Read=x", "mcp:docs=x"]
        {
            assert!(granted_tool(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times_have_a_unit_and_an_end() {
        for (text, seconds) in [("1s", 1), ("90m", 5400), ("12h", 43_200), ("30d", 2_592_000)] {
            assert_eq!(duration(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for bad in ["", "s", "0s", "1", "31d", "-1s", "+1s", "1.5h", "1é", "99999999999999999999d"]
        {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
