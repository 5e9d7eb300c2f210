//! The commands that need an office: with `--key` in this process (decision 53), without it through
//! the daemon's local API. What an office does is `daemon::acp`'s; here are arguments, questions to
//! the person at the terminal, and what is printed.

mod calls;
mod delegate;
mod demo;
mod draft;
mod invite;
mod mcp_server;
mod terminal;
mod worker;

use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::Value;

use super::{Failure, Hosted, HostedCommand};
use crate::acp::code::{Code, Error};
use crate::acp::objects::Gate;
use crate::api::acp::{AcpCall, AcpNews};
use crate::api::client;
use crate::api::types::ApiError;
use crate::cli::client::PROGRAM;
use crate::cli::{exit, output};
use crate::daemon::acp::program::{self, stop_signals};
use crate::daemon::acp::{OfficeError, OfficeOptions, StartError, read_key};
use crate::runtime::acp_transport::Form;

use super::args::ReceiveForm;

/// Where things are.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// Where owners have their directories, unless `--state-dir` says otherwise.
    pub state_dir: PathBuf,
    /// The daemon's socket.
    pub socket: PathBuf,
    /// Gates that the user's configuration opens, and those that it closes.
    pub gates: [Vec<Gate>; 2],
}

impl Surroundings {
    /// Asks the daemon, as its user. `told` hears what happens meanwhile.
    fn ask(&self, call: AcpCall, told: impl FnMut(AcpNews)) -> Result<Value, Failure> {
        drive(client::acp::call(&self.socket, PROGRAM, call, told))
    }

    /// As [`Self::ask`], until the first signal: then `None`, and the daemon goes on with what it has
    /// begun.
    fn ask_until_stopped(
        &self,
        call: AcpCall,
        told: impl FnMut(AcpNews),
    ) -> Result<Option<Value>, Failure> {
        drive(async {
            let stop = stop_signals()?;
            tokio::select! {
                answer = client::acp::call(&self.socket, PROGRAM, call, told) => answer.map(Some),
                () = stop.cancelled() => Ok(None),
            }
        })
    }
}

/// Asks the daemon, in a runtime of this call's own.
fn drive<T>(asked: impl Future<Output = Result<T, ApiError>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| no_runtime(&error))?;
    runtime.block_on(asked).map_err(|error| {
        let exit = match error.code.as_str() {
            ApiError::NO_DAEMON | ApiError::DAEMON_STOPPED => exit::NO_DAEMON,
            code if code == Code::RelayUnreachable.as_str() => exit::NO_DAEMON,
            _ => exit::FAILED,
        };
        Failure { error, exit }
    })
}

fn no_runtime(error: &std::io::Error) -> Failure {
    Failure { error: ApiError::no_runtime(error), exit: exit::FAILED }
}

/// Does a hosted command. `relay start` is `main`'s.
#[must_use]
pub fn run(hosted: Hosted, around: &Surroundings, json: bool) -> ExitCode {
    let state_dir = hosted.state_dir.clone().unwrap_or_else(|| around.state_dir.clone());
    let place = Place { state_dir, gates: around.gates.clone(), verbose: hosted.verbose, json };
    let done = match hosted.command {
        HostedCommand::RelayStart(_) => Ok(ExitCode::SUCCESS),
        HostedCommand::WorkerStart(args) => worker::run(&args, &place),
        HostedCommand::Delegate(args) => delegate::run(&args, &place, around),
        HostedCommand::Demo(audit_dir) => demo::run(audit_dir.as_deref(), &place),
        HostedCommand::McpServer(args) => mcp_server::run(&args, &place, around),
        HostedCommand::InviteCreate(args) => invite::create(&args, &place, around),
        HostedCommand::InviteShow(args) => invite::show(&args, &place, around),
        HostedCommand::Revoke(args) => calls::revoke(&args, &place, around),
        HostedCommand::Tasks(args) => calls::tasks(&args, &place, around),
        HostedCommand::Task(args) => calls::task(&args, &place, around),
        HostedCommand::Cancel(args) => calls::cancel(&args, &place, around),
        HostedCommand::Approvals(command) => calls::approvals(&command, &place, around),
    };
    match done {
        Ok(code) => code,
        Err(Failure { error, exit }) => output::report(&error, json, exit),
    }
}

/// Where and how a command works.
struct Place {
    state_dir: PathBuf,
    gates: [Vec<Gate>; 2],
    verbose: u8,
    json: bool,
}

impl Place {
    /// Options of the office of `key`.
    fn office(&self, key: &Path) -> Result<OfficeOptions, Failure> {
        let mut options = OfficeOptions::new(read_key(key)?, self.state_dir.clone());
        [options.auto, options.deny] = self.gates.clone();
        Ok(options)
    }

    /// Runs an office's life in this process. Its events go to stderr: what is wrong, or with `-v`
    /// everything.
    fn block_on<T>(&self, work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        self.block_on_and_tell("error", work)
    }

    /// As [`Self::block_on`]; without `-v` events of the level `least` and worse are told.
    fn block_on_and_tell<T>(
        &self,
        least: &'static str,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let filter = match self.verbose {
            0 => least,
            1 => "info",
            _ => "debug",
        };
        program::block_on(filter, work)?
    }
}

impl From<StartError> for Failure {
    fn from(error: StartError) -> Self {
        let error = ApiError::new(error.code(), error.to_string(), error.todo());
        Self { error, exit: exit::FAILED }
    }
}

impl From<OfficeError> for Failure {
    fn from(error: OfficeError) -> Self {
        let exit = if error.is_usage() { exit::USAGE } else { exit::FAILED };
        Self { error: error.into(), exit }
    }
}

/// A failure with the exit code that its code has (design 15).
fn protocol(error: Error) -> Failure {
    let exit = match error.code() {
        Code::RelayUnreachable => exit::NO_DAEMON,
        _ => exit::FAILED,
    };
    Failure { exit, ..Failure::from(error) }
}

fn form(form: ReceiveForm) -> Form {
    match form {
        ReceiveForm::Poll => Form::Poll,
        ReceiveForm::Sse => Form::Sse,
        ReceiveForm::Websocket => Form::WebSocket,
    }
}
