//! The command line: arguments in, requests to the local API, text or JSON out. It knows the API and
//! nothing else of commsd; only [`run`] describes the daemon's own flags, for `main` to act on.
//!
//! Results go to stdout, everything said about them to stderr. No colour is used.

pub mod acp;
mod args;
mod client;
mod doctor;
mod hook;
pub mod hub;
mod output;
pub mod run;
mod service;
mod setup;
mod stop;
mod trust;
pub mod vault;
pub mod web;

use std::ffi::OsString;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args as _, CommandFactory as _, FromArgMatches as _};

pub use args::{ClientCommand, Command, Globals, Invocation};
pub use output::{print, report};
pub use service::ServiceCommand;
pub use setup::SetupArgs;

use crate::api::endpoint::directory_fault;
use crate::api::types::{ApiError, Label, WaitSecs};

/// Exit codes (`docs/interface.md`).
pub mod exit {
    /// Done; queued and waiting for consent are done.
    pub const DONE: u8 = 0;
    /// Refused or failed.
    pub const FAILED: u8 = 1;
    /// The command line cannot be used.
    pub const USAGE: u8 = 2;
    /// No daemon answers.
    pub const NO_DAEMON: u8 = 4;
    /// The configuration, or the daemon's command line, cannot be used.
    pub const CONFIG: u8 = 64;
    /// Interrupted from the terminal.
    pub const INTERRUPTED: u8 = 130;
}

/// Where the daemon and its files are, as the configuration says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Its socket.
    pub socket: PathBuf,
    /// The default place, where nobody answers, when the socket is in the other one.
    pub instead_of: Option<PathBuf>,
    /// Its identities.
    pub agent_comms_dir: PathBuf,
}

impl Endpoint {
    /// Where to ask: at `socket`, or, when nobody answers there, at `other`. A daemon that was started
    /// without `XDG_RUNTIME_DIR` (by cron, ssh, su) has its socket in the other default place. Only a
    /// socket of our own in a directory that nobody else can enter is looked at.
    #[must_use]
    pub fn find(socket: PathBuf, other: Option<PathBuf>, agent_comms_dir: PathBuf) -> Self {
        let uid = rustix::process::geteuid().as_raw();
        let answers = |path: &Path| UnixStream::connect(path).is_ok();
        match other.filter(|other| is_safe_socket(other, uid)) {
            Some(other) if !answers(&socket) && answers(&other) => {
                Self { socket: other, instead_of: Some(socket), agent_comms_dir }
            }
            _ => Self { socket, instead_of: None, agent_comms_dir },
        }
    }
}

fn is_safe_socket(path: &Path, uid: u32) -> bool {
    let safe_directory = |dir: &Path| {
        let meta = std::fs::metadata(dir);
        meta.is_ok_and(|meta| directory_fault(meta.uid(), meta.mode(), uid).is_none())
    };
    std::fs::symlink_metadata(path)
        .is_ok_and(|meta| meta.file_type().is_socket() && meta.uid() == uid)
        && path.parent().is_some_and(safe_directory)
}

/// Reads the command line. Help and usage errors are printed here; what is left is the exit code.
///
/// # Errors
/// The exit code, when there is nothing to do or the command line cannot be used.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Invocation, ExitCode> {
    let mut args: Vec<OsString> = args.into_iter().collect();
    let acp = acp::as_subcommand(&mut args);
    if !acp
        && let Some(behind) = split_vault(&mut args)
        && let Ok(globals) = before_vault(&args)
    {
        return Ok(Invocation { globals, command: Command::Vault { args: behind } });
    }
    let command = || match Invocation::command() {
        // The program is the command: without a name before it, its help does not show one.
        command if acp => command.name("").no_binary_name(true),
        command => command,
    };
    let parsed = command().try_get_matches_from(&args);
    let error = match parsed.and_then(|matches| Invocation::from_arg_matches(&matches)) {
        Ok(invocation) => return Ok(invocation),
        Err(error) => error,
    };
    let text = error.to_string();
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        return Err(print(&text));
    }
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let code = match meant(command(), &args).as_deref() {
        Some("run" | "hub") => exit::CONFIG,
        // To a harness the other code says that the model should go on, with what stands on stderr.
        Some("hook") => exit::FAILED,
        _ => exit::USAGE,
    };
    let json = args.iter().any(|arg| arg == "--json");
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand && !json {
        return Err(output::complain(text, code));
    }
    if json {
        let (message, todo) = text.split_once("\n\n").unwrap_or((text, "see --help"));
        return Err(report(&ApiError::new("usage", message, todo.trim_end()), true, code));
    }
    Err(output::report_usage(text, code))
}

/// Takes off what follows the command `vault`, if it is that: its arguments are read elsewhere, in
/// their own way.
fn split_vault(args: &mut Vec<OsString>) -> Option<Vec<OsString>> {
    let mut at = 1;
    loop {
        at += match args.get(at)?.to_str()? {
            "--home" | "--socket" => 2,
            "vault" => return Some(args.split_off(at + 1)),
            option if option.starts_with("--") => 1,
            _ => return None,
        };
    }
}

/// What stands before the command `vault`, the last of `args`. A description of the whole command line
/// would take longer to make than most commands of a vault take.
fn before_vault(args: &[OsString]) -> Result<Globals, clap::Error> {
    let vault = clap::Command::new("vault").disable_help_flag(true);
    let command = Globals::augment_args(clap::Command::new("commsd").subcommand(vault));
    Globals::from_arg_matches(&command.try_get_matches_from(args)?)
}

/// The command that a command line was for that cannot be used.
fn meant(command: clap::Command, args: &[OsString]) -> Option<String> {
    let lenient = command.ignore_errors(true).try_get_matches_from(args).ok()?;
    lenient.subcommand_name().map(str::to_owned)
}

/// The completion script for a shell.
#[must_use]
pub fn completions(shell: clap_complete::Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Invocation::command(), "commsd", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Registers commsd with harnesses, or takes that back. The server is started with `flags` too.
#[must_use]
pub fn set_up(args: &SetupArgs, flags: &[OsString], json: bool) -> ExitCode {
    setup::run(args, flags, json)
}

/// Brings a harness session what has come for its agent.
#[must_use]
pub fn hook(harness: Label, wait: Option<WaitSecs>, endpoint: &Endpoint) -> ExitCode {
    hook::run(harness, wait, endpoint)
}

/// Installs the daemon as a service, or takes that back. It is started with `flags` too.
#[must_use]
pub fn service(
    command: ServiceCommand,
    endpoint: &Endpoint,
    flags: &[OsString],
    json: bool,
) -> ExitCode {
    drive(json, async { service::run(command, endpoint, flags, json).await.map(Into::into) })
}

/// Carries out a command against the daemon at `endpoint`.
pub fn execute(command: ClientCommand, endpoint: &Endpoint, json: bool) -> ExitCode {
    let command = match client::with_stdin(command, std::io::stdin().lock()) {
        Ok(command) => command,
        Err(error) => {
            let wrong = error.code == ApiError::INVALID_PARAMS;
            return report(&error, json, if wrong { exit::USAGE } else { exit::FAILED });
        }
    };
    drive(json, async { client::execute(command, endpoint, json).await.map(Into::into) })
}

/// Runs a command that asks the daemon, until it is done or interrupted; says what went wrong.
fn drive(json: bool, work: impl Future<Output = Result<ExitCode, client::Failure>>) -> ExitCode {
    block_on(json, async {
        tokio::select! {
            done = work => done,
            _ = tokio::signal::ctrl_c() => Ok(exit::INTERRUPTED.into()),
        }
    })
}

/// Runs something that asks the daemon to its end; says what went wrong.
fn block_on(json: bool, work: impl Future<Output = Result<ExitCode, client::Failure>>) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let error = ApiError::no_runtime(&error);
            return report(&error, json, exit::FAILED);
        }
    };
    match runtime.block_on(work) {
        Ok(code) => code,
        Err(client::Failure::Api(error)) => {
            let code = match error.code.as_str() {
                ApiError::NO_DAEMON | ApiError::DAEMON_STOPPED => exit::NO_DAEMON,
                _ => exit::FAILED,
            };
            report(&error, json, code)
        }
        // Who reads our output has had enough of it.
        Err(client::Failure::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            exit::DONE.into()
        }
        Err(client::Failure::Output(error)) => {
            let error = ApiError::new(
                "output",
                format!("cannot write to stdout: {error}"),
                "give stdout somewhere to go, with space",
            );
            report(&error, json, exit::FAILED)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &[&str]) -> Result<Invocation, ExitCode> {
        parse(line.iter().map(OsString::from))
    }

    #[test]
    fn what_stands_before_vault_is_read_as_before_any_command() {
        let seen = |Globals { home, socket, json }: Globals| (home, socket, json);
        for globals in [
            &[][..],
            &["--json"],
            &["--home", "vault", "--socket=/s"],
            &["--home=/h", "--json", "--socket=--json"],
            &["--socket", "/a b/\u{e9}"],
        ] {
            let line = |rest: &[&'static str]| [&["commsd"], globals, rest].concat();
            let vault = parsed(&line(&["vault", "--json", "append"])).unwrap();
            let Command::Vault { args } = vault.command else { panic!("{:?}", vault.command) };
            assert_eq!(args, ["--json", "append"]);
            let other = parsed(&line(&["status"])).unwrap();
            assert_eq!(seen(vault.globals), seen(other.globals), "{globals:?}");
        }
    }

    #[test]
    fn vault_is_a_command_of_commsd_alone_and_comes_first() {
        for wrong in [
            &["acp", "vault", "protocol"][..],
            &["commsd", "--home", "vault"],
            &["commsd", "--jsom", "vault", "protocol"],
            &["commsd", "--json=yes", "vault", "protocol"],
        ] {
            assert!(parsed(wrong).is_err(), "{wrong:?}");
        }
        let sent = parsed(&["commsd", "send", "vault", "--as", "a", "--", "vault"]).unwrap();
        assert!(matches!(sent.command, Command::Client(_)), "{:?}", sent.command);
    }
}
