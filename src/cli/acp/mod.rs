//! `acp`, and `commsd acp`: the command line of the Agent Collaboration Protocol (design 15). What
//! needs no gateway is done here, in process and without a daemon (decision 53); everything else is
//! handed back to `main` with its arguments.
//!
//! A file that is made is new, and its owner's alone. Results go to stdout, the rest to stderr.

pub mod args;
mod audit;
mod discover;
mod files;
pub mod hosted;
mod local;

use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use self::args::{
    AcpArgs, AcpCommand, ApprovalsCommand, CancelArgs, DelegateArgs, InviteCommand,
    InviteCreateArgs, InviteShowArgs, McpServerArgs, RelayCommand, RelayStartArgs, RevokeArgs,
    TaskArgs, TasksArgs, WorkerCommand, WorkerStartArgs,
};
use self::files::FileError;
use super::{exit, output};
use crate::acp::code::{Code, Error};
use crate::api::types::ApiError;
use crate::runtime::acp_transport::TransportError;

/// The name under which the program is `acp`.
const PROGRAM: &str = "acp";

/// A log whose task goes on (design 15).
const OPEN: u8 = 3;

/// What `main` does about a command.
#[derive(Clone, Debug)]
pub enum Dispatch {
    /// It is done.
    Done(ExitCode),
    /// It needs more than the command line.
    Hosted(Box<Hosted>),
}

/// A command that needs a relay server, a gateway, or the daemon, and what all of them take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hosted {
    /// Configuration file.
    pub config: Option<PathBuf>,
    /// Where tasks are kept.
    pub state_dir: Option<PathBuf>,
    /// How much more is said on stderr.
    pub verbose: u8,
    /// The command.
    pub command: HostedCommand,
}

/// The commands of [`Hosted`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostedCommand {
    /// `relay start`.
    RelayStart(RelayStartArgs),
    /// `worker start`.
    WorkerStart(Box<WorkerStartArgs>),
    /// `delegate`.
    Delegate(Box<DelegateArgs>),
    /// `mcp-server`.
    McpServer(McpServerArgs),
    /// `demo`, with the directory for its logs.
    Demo(Option<PathBuf>),
    /// `invite create`.
    InviteCreate(InviteCreateArgs),
    /// `invite show`.
    InviteShow(InviteShowArgs),
    /// `revoke`.
    Revoke(RevokeArgs),
    /// `tasks`.
    Tasks(TasksArgs),
    /// `task`.
    Task(TaskArgs),
    /// `cancel`.
    Cancel(CancelArgs),
    /// `approvals`.
    Approvals(ApprovalsCommand),
}

/// What did not work, and the exit code for it.
struct Failure {
    error: ApiError,
    exit: u8,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let error = ApiError::new(error.code().as_str(), error.to_string(), error.todo());
        Self { error, exit: exit::FAILED }
    }
}

impl From<FileError> for Failure {
    fn from(error: FileError) -> Self {
        let error = ApiError::new(error.code(), error.to_string(), error.todo());
        Self { error, exit: exit::FAILED }
    }
}

impl From<TransportError> for Failure {
    fn from(error: TransportError) -> Self {
        let exit = match error.code() {
            Code::RelayUnreachable => exit::NO_DAEMON,
            _ => exit::FAILED,
        };
        let code = error.code();
        Self { error: ApiError::new(code.as_str(), error.to_string(), code.todo()), exit }
    }
}

/// For the person, or the program, that has just started a relay.
#[must_use]
pub fn relay_started(address: SocketAddr, tls: bool, json: bool) -> String {
    let url = format!("{}://{address}", if tls { "https" } else { "http" });
    if json {
        return output::json_line(&serde_json::json!({
            "started": true,
            "pid": std::process::id(),
            "address": address.to_string(),
            "url": url,
        }));
    }
    format!("the relay is at {url}. Stop it with Ctrl-C.\n")
}

/// Whether the program was called as `acp`; then its name becomes that of the command.
pub(super) fn as_subcommand(args: &mut [OsString]) -> bool {
    let program = args.first_mut();
    let acp = program.filter(|path| Path::new(path).file_name() == Some(OsStr::new(PROGRAM)));
    let is_acp = acp.is_some();
    if let Some(path) = acp {
        *path = PROGRAM.into();
    }
    is_acp
}

/// Does a command, or says that it is not done here.
#[must_use]
pub fn run(args: AcpArgs, json: bool) -> Dispatch {
    let AcpArgs { config, state_dir, verbose, command } = args;
    let hosted =
        |command| Dispatch::Hosted(Box::new(Hosted { config, state_dir, verbose, command }));
    let done = match command {
        AcpCommand::Keygen { path } => local::keygen(&path, json),
        AcpCommand::Approve(args) => local::approve(&args, json),
        AcpCommand::Validate { kind, file } => local::validate(kind, &file, json),
        AcpCommand::AuditVerify { file, anchor } => audit::verify(&file, anchor.as_deref(), json),
        AcpCommand::AuditCompare { first, second } => audit::compare(&first, &second, json),
        AcpCommand::AuditExport(args) => audit::export(&args, json),
        AcpCommand::Checkpoint { file, out, key } => audit::checkpoint(&file, &out, &key, json),
        AcpCommand::Discover(args) => discover::run(&args, json),
        AcpCommand::Relay(RelayCommand::Start(args)) => {
            return hosted(HostedCommand::RelayStart(args));
        }
        AcpCommand::Worker(WorkerCommand::Start(args)) => {
            return hosted(HostedCommand::WorkerStart(args));
        }
        AcpCommand::Delegate(args) => return hosted(HostedCommand::Delegate(args)),
        AcpCommand::McpServer(args) => return hosted(HostedCommand::McpServer(args)),
        AcpCommand::Demo { audit_dir } => return hosted(HostedCommand::Demo(audit_dir)),
        AcpCommand::Invite(InviteCommand::Create(args)) => {
            return hosted(HostedCommand::InviteCreate(args));
        }
        AcpCommand::Invite(InviteCommand::Show(args)) => {
            return hosted(HostedCommand::InviteShow(args));
        }
        AcpCommand::Revoke(args) => return hosted(HostedCommand::Revoke(args)),
        AcpCommand::Tasks(args) => return hosted(HostedCommand::Tasks(args)),
        AcpCommand::Task(args) => return hosted(HostedCommand::Task(args)),
        AcpCommand::Cancel(args) => return hosted(HostedCommand::Cancel(args)),
        AcpCommand::Approvals(command) => return hosted(HostedCommand::Approvals(command)),
    };
    Dispatch::Done(match done {
        Ok(code) => code,
        Err(Failure { error, exit }) => output::report(&error, json, exit),
    })
}
