//! The shape of the command line (`docs/interface.md`).

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;

use super::acp::args::AcpArgs;
use super::hub::HubArgs;
use super::run::RunOptions;
use super::service::ServiceCommand;
use super::setup::SetupArgs;
use super::trust::TrustCommand;
use super::web::WebArgs;
use crate::api::types::{
    Consent, GrantSecs, GrantTerms, Label, OwnStatus, PageSize, RoomType, Time, Timing, VaultMode,
    Visibility, WaitSecs,
};
use crate::codec::time::UnixMillis;

/// Where help shows what every command takes.
const GLOBAL: &str = "Global options";

/// A per-machine daemon through which agents find each other and talk.
#[derive(Parser, Clone, Debug)]
#[command(name = "commsd", version, max_term_width = 100, propagate_version = true)]
pub struct Invocation {
    /// What every command takes
    #[command(flatten)]
    pub globals: Globals,

    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// What every command takes.
#[derive(Args, Clone, Debug)]
pub struct Globals {
    /// Keep everything under DIR, apart from other daemons [env: COMMSD_HOME]
    #[arg(long, value_name = "DIR", global = true, help_heading = GLOBAL)]
    pub home: Option<PathBuf>,

    /// The daemon's socket [env: COMMSD_SOCKET] [default: commsd/commsd.sock in the user's runtime
    /// directory, or commsd/run/commsd.sock in the state directory]
    #[arg(long, value_name = "PATH", global = true, help_heading = GLOBAL)]
    pub socket: Option<PathBuf>,

    /// Print the result as JSON, errors too (after `vault` options are its own; help, --version and
    /// completions stay text)
    #[arg(long, global = true, help_heading = GLOBAL)]
    pub json: bool,
}

/// What to do.
#[derive(Subcommand, Clone, Debug)]
pub enum Command {
    /// Run the daemon in the foreground
    Run(RunOptions),

    /// Run a relay hub, by which daemons on different networks reach each other
    ///
    /// It passes sealed messages between daemons that cannot reach each other, and reads none. It
    /// needs no daemon, keeps nothing on disk and holds no key but that of its TLS certificate.
    /// Without one it speaks plain HTTP, for a proxy in front of it that has the certificate.
    Hub(HubArgs),

    /// Serve MCP on stdio for a harness; starts the daemon if none answers
    Mcp {
        /// The harness, half of the agent's identity: claude-code, codex, opencode, pi, mcp …
        #[arg(long, value_name = "H", default_value = "mcp")]
        harness: Label,
        /// The agent's name
        #[arg(long, value_name = "N")]
        name: Option<String>,
        /// Do not start a daemon; wait for one that something else starts
        #[arg(long)]
        no_start: bool,
        /// Leave out the tools acp_*, which fill a model's context
        #[arg(long)]
        no_acp: bool,
    },

    /// Serve a page for this machine's user: who is here, rooms, messages, what waits
    ///
    /// On 127.0.0.1 alone, until a signal comes. Only whoever has the address that is printed at the
    /// start can open it.
    Web(WebArgs),

    /// Bring a harness session what has come for its agent; for the harness's hooks
    ///
    /// Reads what the harness says of its hook on stdin. Ends at once and without a word when no
    /// daemon answers.
    Hook {
        /// The harness, as `commsd mcp` was told
        #[arg(long, value_name = "H", default_value = "claude-code")]
        harness: Label,
        /// Wait so long for something that asks for the model, then end with exit code 2 and the
        /// text on stderr, which wakes a session from a hook in the background
        #[arg(long, value_name = "SECS")]
        wait: Option<WaitSecs>,
    },

    /// Register `commsd mcp` with the harnesses of this user
    Setup(SetupArgs),

    /// Have the daemon started with your session (systemd or launchd)
    #[command(subcommand)]
    Service(ServiceCommand),

    /// Print a completion script
    Completions {
        /// The shell that it is for
        shell: Shell,
    },

    /// Keep a project's memory in its repository (EchoesVault); only sharing needs the daemon
    #[command(disable_help_flag = true)]
    Vault {
        /// See `commsd vault --help`
        #[arg(value_name = "COMMAND", trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },

    /// Delegate work to others and do theirs (Agent Collaboration Protocol); also the program `acp`
    ///
    /// Signed contracts, a log that both sides sign, results that are checked before they are taken.
    /// Exit codes: 0 good; 1 refused or failed; 2 usage; 3 a log whose task goes on; 4 no relay or
    /// daemon answers; 130 interrupted.
    Acp(AcpArgs),

    /// Ask the daemon
    #[command(flatten)]
    Client(ClientCommand),
}

/// Commands that the daemon answers.
#[derive(Subcommand, Clone, Debug)]
pub enum ClientCommand {
    /// Show the daemon's state and health
    Status {
        /// List the limits too
        #[arg(long)]
        limits: bool,
    },

    /// Show the agent
    Whoami {
        /// Who acts
        #[command(flatten)]
        agent: AsAgent,
    },

    /// List agents
    Agents(SeenBy),

    /// List rooms
    Rooms {
        /// Whose view
        #[command(flatten)]
        agent: SeenBy,
        /// Show whole paths, which tell rooms of one name apart
        #[arg(long)]
        long: bool,
    },

    /// Create, join, read and run a room
    #[command(subcommand)]
    Room(RoomCommand),

    /// Send a message to a room
    Send {
        /// Who acts
        #[command(flatten)]
        agent: AsAgent,
        /// Path, or unambiguous name
        room: String,
        /// What is said
        #[command(flatten)]
        message: MessageArgs,
    },

    /// Send a message to an agent
    ///
    /// A stranger is asked first; the outcome comes as an event.
    Dm {
        /// Who acts
        #[command(flatten)]
        agent: AsAgent,
        /// Id, its first 8 or more digits, or unambiguous name
        #[arg(value_name = "AGENT")]
        to: String,
        /// What is said
        #[command(flatten)]
        message: MessageArgs,
        /// Wait so long for a stranger's consent
        #[arg(long, value_name = "SECS")]
        wait: Option<WaitSecs>,
    },

    /// List what waits for the agent's yes or no
    Pending {
        /// Who decides
        #[command(flatten)]
        agent: DecidesAs,
    },

    /// Say yes to a waiting request
    Accept {
        /// Who decides
        #[command(flatten)]
        agent: DecidesAs,
        /// What is answered
        #[command(flatten)]
        which: WhichRequest,
        /// How far a permission goes
        #[command(flatten)]
        terms: TermArgs,
    },

    /// Say no to a waiting request
    Reject {
        /// Who decides
        #[command(flatten)]
        agent: DecidesAs,
        /// What is answered
        #[command(flatten)]
        which: WhichRequest,
        /// What to tell who asked
        #[arg(long, value_name = "TEXT")]
        reason: Option<String>,
    },

    /// Print the agent's events and acknowledge them
    Inbox {
        /// Who acts
        #[command(flatten)]
        agent: AsAgent,
        /// Wait so long for the first event
        #[arg(long, value_name = "SECS")]
        wait: Option<WaitSecs>,
        /// Print at most so many
        #[arg(long, value_name = "N")]
        max: Option<PageSize>,
        /// Do not acknowledge
        #[arg(long)]
        peek: bool,
    },

    /// Print events as they come, one JSON object a line, and acknowledge them
    Listen {
        /// Who acts
        #[command(flatten)]
        agent: AsAgent,
    },

    /// Change what others see of the agent
    Update {
        /// Who acts
        #[command(flatten)]
        agent: AsAgent,
        /// What changes
        #[command(flatten)]
        change: ChangeArgs,
    },

    /// Call the tool agent_comms as a model does
    Action {
        /// Who acts
        #[command(flatten)]
        agent: AsAgent,
        /// {"action": …, its parameters}; `-` reads it from stdin
        #[arg(value_name = "JSON")]
        call: String,
    },

    /// Say whom this user trusts beyond this machine
    #[command(subcommand)]
    Trust(TrustCommand),

    /// Print the daemon's newest log events
    Logs {
        /// Go on as they come
        #[arg(short, long)]
        follow: bool,
    },

    /// Check the installation and say what to do
    Doctor,

    /// End the daemon in order, and wait until it has ended
    ///
    /// A running `commsd mcp` starts it again; end the harness first, or give it --no-start.
    Stop,
}

/// What can be done with one room.
#[derive(Subcommand, Clone, Debug)]
pub enum RoomCommand {
    /// Create a room
    Create {
        /// Who acts
        #[command(flatten)]
        agent: AsAgent,
        /// Its name
        name: String,
        /// Who finds and joins it: public (everybody), private (everybody finds it; the invited
        /// join, and whom the owner lets in) or secret (only members and the invited know it)
        #[arg(long = "type", value_name = "TYPE")]
        kind: Option<RoomType>,
        /// What it is for
        #[arg(long, value_name = "TEXT")]
        description: Option<String>,
    },
    /// Join a room
    Join(RoomArgs),
    /// Leave a room, or decline an invitation
    ///
    /// A room that its owner leaves as the last one ends; while others are in it, it stays and is
    /// still the owner's.
    Leave(RoomArgs),
    /// Show a room with its members
    Members(RoomArgs),
    /// Show messages
    History {
        /// Where
        #[command(flatten)]
        room: RoomArgs,
        /// Only what follows the message with this number
        #[arg(long, value_name = "SEQ")]
        since: Option<u64>,
        /// At most so many
        #[arg(long, value_name = "N")]
        limit: Option<PageSize>,
    },
    /// End a room
    Destroy(RoomArgs),
    /// Invite an agent
    Invite(RoomAgentArgs),
    /// Remove an agent
    Kick(RoomAgentArgs),
}

/// The agent that a command acts as.
#[derive(Args, Clone, Debug)]
pub struct AsAgent {
    /// Act as the agent of this name; it is created on first use and kept
    #[arg(id = "as", long, value_name = "NAME")]
    pub name: Label,
}

/// Who decides.
#[derive(Args, Clone, Debug)]
pub struct DecidesAs {
    /// Act as the agent of this name; without it as the operator, who decides on shared vaults
    #[arg(id = "as", long, value_name = "NAME")]
    pub name: Option<Label>,
}

/// How far a yes to a request for a permission goes.
#[derive(Args, Clone, Debug, Default)]
pub struct TermArgs {
    /// For a permission: it lasts so long, 30 days without it
    #[arg(long = "for", value_name = "SECS")]
    pub lasts: Option<GrantSecs>,
    /// For a permission: it may be passed on so often
    #[arg(long, value_name = "N")]
    pub delegations: Option<u64>,
    /// For a permission: to read only, whatever was asked for
    #[arg(long, conflicts_with = "write")]
    pub read: bool,
    /// For a permission: to write as well, if that was asked for
    #[arg(long)]
    pub write: bool,
}

impl TermArgs {
    /// The API's form; nothing for nothing said.
    #[must_use]
    pub fn terms(&self, now: UnixMillis) -> Option<GrantTerms> {
        let terms = GrantTerms {
            expires: self.lasts.map(|secs| Time(now.plus(secs.get() * 1000))),
            delegations_remaining: self.delegations,
            mode: match (self.read, self.write) {
                (true, _) => Some(VaultMode::Read),
                (false, true) => Some(VaultMode::Write),
                (false, false) => None,
            },
        };
        let said = terms.expires.is_some()
            || terms.delegations_remaining.is_some()
            || terms.mode.is_some();
        said.then_some(terms)
    }
}

/// The agent whose view is shown.
#[derive(Args, Clone, Debug)]
pub struct SeenBy {
    /// Show what the agent of this name sees; it is created on first use and kept
    #[arg(id = "as", long, value_name = "NAME")]
    pub name: Option<Label>,
}

/// One room.
#[derive(Args, Clone, Debug)]
pub struct RoomArgs {
    /// The agent.
    #[command(flatten)]
    pub agent: AsAgent,
    /// Path, or unambiguous name
    pub room: String,
}

/// One room and another agent.
#[derive(Args, Clone, Debug)]
pub struct RoomAgentArgs {
    /// The room.
    #[command(flatten)]
    pub room: RoomArgs,
    /// Id, its first 8 or more digits, or unambiguous name
    #[arg(value_name = "AGENT")]
    pub target: String,
}

/// What is sent.
#[derive(Args, Clone, Debug)]
pub struct MessageArgs {
    /// The message; `-` reads it from stdin
    #[arg(allow_hyphen_values = true)]
    pub text: String,
    /// When to react: steer (at once), followUp (after the running task) or info (whenever)
    #[arg(long)]
    pub timing: Option<Timing>,
    /// Id of the message that this answers
    #[arg(long, value_name = "ID")]
    pub reply_to: Option<String>,
}

/// A waiting request.
#[derive(Args, Clone, Debug)]
pub struct WhichRequest {
    /// The request's id from `pending`, or who asks; or the room or DM, with who asks after it
    #[arg(value_name = "ID|AGENT|ROOM")]
    pub id_or_room: String,
    /// Who asks, after a room
    pub requester: Option<String>,
}

/// What an agent changes of itself.
#[derive(Args, Clone, Debug)]
#[group(required = true, multiple = true)]
pub struct ChangeArgs {
    /// What the agent is doing: active, idle or busy
    #[arg(long)]
    pub status: Option<OwnStatus>,
    /// Who may see the agent: visible (everybody), hidden (its rooms) or ghost (nobody)
    #[arg(long)]
    pub visibility: Option<Visibility>,
    /// Who may begin a conversation with it: ask (whom it says yes to), same-principal (agents of the
    /// same user without a question), open (everybody) or closed (nobody)
    #[arg(long)]
    pub consent: Option<Consent>,
}
