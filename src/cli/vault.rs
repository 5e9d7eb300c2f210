//! `commsd vault`: the reference engine's command line, argument for argument, over the engine in
//! [`crate::vault`], in process and without a daemon; only what has to do with vaults over the mesh
//! (`mesh`) asks one.
//!
//! The arguments are read here and not by `clap`, because callers rely on how the reference reads them:
//! unique prefixes of options, negative numbers as values, the last of two equal options. Answers go to
//! stdout; a refusal is one line of JSON on stderr and exit 2, a wrong command line is text and exit 2.

mod mesh;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::{Endpoint, exit, output};
use crate::vault::plan::search::DEFAULT_LIMIT;
use crate::vault::plan::text::integer;
use crate::vault::plan::{json, payload};
use crate::vault::{DEFAULT_RECENT, Options, Setup, Standing, Stop, VaultError, Workspace};

/// Largest payload: far more than any text that people write, and it fits into memory several times.
const MAX_PAYLOAD: u64 = 512 * 1024 * 1024;
/// How long an interrupted command may take to finish the file that it is at, and the pause between two
/// looks at that.
const GRACE: Duration = Duration::from_secs(5);
const GRACE_POLL: Duration = Duration::from_millis(5);
/// Exit code added to the number of the signal that ended a delegated command, as shells do.
const SIGNALLED: i32 = 128;

const USAGE: &str = "\
usage: commsd vault [--workspace DIR] [--agent NAME] [--adapter-version VERSION] COMMAND ...
       commsd vault [--at AGENT/SHARE] [--as NAME] COMMAND ...
";
/// Where a wrong command line is sent.
const SEE_HELP: &str = "`commsd vault --help` lists the commands and their options\n";
const HELP: &str = "
Keeps a project's memory as Markdown in the repository (EchoesVault Protocol 1.0.0).

commands:
  init                    create a vault, or repair one
  migrate                 take over the vault of an older tool
  upgrade                 renew runtime, guides, skills and commands
  protocol                show versions, paths and commands
  configure-agents        renew guides, skills, commands and ignore rules
  inspect, status         show the vault's condition [--format json|card]
  hydrate                 renew the generated index and the local state
  start                   begin a session: print index and newest entries [--recent N]
  search QUERY            find text in pages [--limit N]
  append                  note something down [--payload FILE]
  hash PAGE               print the hash that an update of the page needs
  upsert                  write a page [--payload FILE]
  end                     save the session [--payload FILE] --confirm-explicit-user-end
  rebuild-index           rebuild the generated index

over the mesh, through the daemon:
  share DIR --name N      let peers ask for the vault in DIR [--read|--write]
  unshare N               share it no longer; permissions end
  shares                  show what is shared, and with whom [--json]
  revoke N [AGENT]        take permissions back
  request AGENT/N         ask for permission [--read|--write] [--for SECS] [--wait SECS]
  delegate AGENT/N AGENT  pass one's permission on [--read|--write] [--for SECS] [--delegations N]
  --at AGENT/N COMMAND    inspect, index, page NAME, search, hash, append, upsert, end there
  --as NAME               act as this agent (default: operator)

options:
  --workspace DIR         a folder in the project (default: the current one)
  --agent NAME            who asks
  --adapter-version V     version of the tool that asks
  --payload FILE          JSON object; - reads stdin (default)
  -h, --help              show this
";

/// An option that a command takes.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Opt {
    name: &'static str,
    takes_value: bool,
}

const fn value(name: &'static str) -> Opt {
    Opt { name, takes_value: true }
}

const HELP_OPTION: Opt = Opt { name: "--help", takes_value: false };
const CONFIRM: Opt = Opt { name: "--confirm-explicit-user-end", takes_value: false };
const WORKSPACE: Opt = value("--workspace");
const AGENT: Opt = value("--agent");
const ADAPTER: Opt = value("--adapter-version");
const FORMAT: Opt = value("--format");
const RECENT: Opt = value("--recent");
const LIMIT: Opt = value("--limit");
const PAYLOAD: Opt = value("--payload");

/// Why the command line is not carried out.
enum NotRun {
    /// Help is wanted.
    Help,
    /// It cannot be used.
    Usage(String),
}

/// What a list of arguments says.
#[derive(Default)]
struct Read {
    /// Options in their order, with their values.
    options: Vec<(Opt, String)>,
    /// The rest.
    positional: Vec<String>,
}

impl Read {
    /// The last value of an option.
    fn last(&self, option: Opt) -> Option<&str> {
        self.options.iter().rev().find(|(o, _)| *o == option).map(|(_, value)| value.as_str())
    }
}

/// What one argument is.
enum Looks {
    Positional,
    Option(Opt, Option<String>),
    Unknown,
}

/// Whether Python's parser would take `arg` for a negative number.
fn is_negative_number(arg: &str) -> bool {
    let Some(digits) = arg.strip_prefix('-') else { return false };
    let all_digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    match digits.split_once('.') {
        Some((whole, part)) => all_digits(whole) && !part.is_empty() && all_digits(part),
        None => !digits.is_empty() && all_digits(digits),
    }
}

fn look(arg: &str, options: &[Opt]) -> Result<Looks, NotRun> {
    if !arg.starts_with('-') || arg == "-" {
        return Ok(Looks::Positional);
    }
    if arg.starts_with("-h") {
        return Err(NotRun::Help);
    }
    let (name, value) = match arg.split_once('=') {
        Some((name, value)) => (name, Some(value.to_owned())),
        None => (arg, None),
    };
    if let Some(option) = options.iter().find(|option| option.name == name) {
        return Ok(Looks::Option(*option, value));
    }
    let fits: Vec<&Opt> = options
        .iter()
        .filter(|option| name.starts_with("--") && option.name.starts_with(name))
        .collect();
    match fits.as_slice() {
        [option] => Ok(Looks::Option(**option, value)),
        [] if is_negative_number(arg) || arg.contains(' ') => Ok(Looks::Positional),
        [] => Ok(Looks::Unknown),
        _ => Err(NotRun::Usage(format!("{name} could mean several options"))),
    }
}

/// Reads `args`; stops after the first positional one if `until_positional`. Answers what is left.
fn read<'a>(
    mut args: &'a [String],
    options: &[Opt],
    until_positional: bool,
) -> Result<(Read, &'a [String]), NotRun> {
    let mut out = Read::default();
    while let Some((arg, rest)) = args.split_first() {
        args = rest;
        if arg == "--" {
            if !until_positional {
                out.positional.extend(args.iter().cloned());
                args = &[];
            }
            continue;
        }
        match look(arg, options)? {
            Looks::Positional => {
                out.positional.push(arg.clone());
                if until_positional {
                    break;
                }
            }
            Looks::Unknown => return Err(NotRun::Usage(format!("there is no option {arg}"))),
            Looks::Option(option, _) if option == HELP_OPTION => return Err(NotRun::Help),
            Looks::Option(option, Some(_)) if !option.takes_value => {
                return Err(NotRun::Usage(format!("{} takes no value", option.name)));
            }
            Looks::Option(option, Some(value)) => out.options.push((option, value)),
            Looks::Option(option, None) if !option.takes_value => {
                out.options.push((option, String::new()));
            }
            Looks::Option(option, None) => {
                let value = match args.split_first() {
                    Some((value, rest)) if matches!(look(value, options)?, Looks::Positional) => {
                        args = rest;
                        value.clone()
                    }
                    _ => return Err(NotRun::Usage(format!("{} needs a value", option.name))),
                };
                out.options.push((option, value));
            }
        }
    }
    Ok((out, args))
}

/// A command.
enum Action {
    SetUp(Setup),
    Protocol,
    ConfigureAgents,
    Inspect { card: bool },
    Hydrate,
    Start { recent: i64 },
    Search { query: String, limit: i64 },
    Append { payload: String },
    Hash { page: String },
    Upsert { payload: String },
    End { payload: String, confirmed: bool },
    RebuildIndex,
}

struct Invocation {
    workspace: Option<String>,
    agent: Option<String>,
    adapter_version: Option<String>,
    action: Action,
}

fn number(read: &Read, option: Opt, default: i64) -> Result<i64, NotRun> {
    match read.last(option) {
        Some(text) => integer(text).ok_or_else(|| {
            NotRun::Usage(format!("{} needs a whole number, not '{text}'", option.name))
        }),
        None => Ok(default),
    }
}

/// What a command line asks for.
enum Wanted {
    /// Of the engine.
    Here(Invocation),
    /// Of the daemon.
    Mesh(mesh::Asked),
}

fn parse(args: &[OsString]) -> Result<Wanted, NotRun> {
    let args: Vec<String> = args
        .iter()
        .map(|arg| arg.clone().into_string())
        .collect::<Result<_, _>>()
        .map_err(|_| NotRun::Usage("the arguments are not valid UTF-8".into()))?;
    let global = [HELP_OPTION, WORKSPACE, AGENT, ADAPTER, mesh::AT, mesh::AS];
    let (globals, rest) = read(&args, &global, true)?;
    let Some(command) = globals.positional.first() else {
        return Err(NotRun::Usage("a command is needed".into()));
    };
    if let Some(asked) = mesh::parse(&globals, command, rest)? {
        return Ok(Wanted::Mesh(asked));
    }
    let (own, wanted): (&[Opt], usize) = match command.as_str() {
        "inspect" | "status" => (&[FORMAT], 0),
        "start" => (&[RECENT], 0),
        "search" => (&[LIMIT], 1),
        "append" | "upsert" => (&[PAYLOAD], 0),
        "end" => (&[PAYLOAD, CONFIRM], 0),
        "hash" => (&[], 1),
        "init" | "migrate" | "upgrade" | "protocol" | "configure-agents" | "hydrate"
        | "rebuild-index" => (&[], 0),
        other => return Err(NotRun::Usage(format!("there is no command '{other}'"))),
    };
    let options: Vec<Opt> = own.iter().copied().chain([HELP_OPTION]).collect();
    let (mut read, _) = read(rest, &options, false)?;
    if read.positional.len() < wanted {
        let what = if command == "search" { "a query" } else { "a page" };
        return Err(NotRun::Usage(format!("{command} needs {what}")));
    }
    if let Some(extra) = read.positional.get(wanted) {
        return Err(NotRun::Usage(format!("{command} takes no argument '{extra}'")));
    }
    let payload = read.last(PAYLOAD).unwrap_or("-").to_owned();
    let argument = read.positional.pop().unwrap_or_default();
    let action = match command.as_str() {
        "init" => Action::SetUp(Setup::Init),
        "migrate" => Action::SetUp(Setup::Migrate),
        "upgrade" => Action::SetUp(Setup::Upgrade),
        "protocol" => Action::Protocol,
        "configure-agents" => Action::ConfigureAgents,
        "hydrate" => Action::Hydrate,
        "start" => Action::Start { recent: number(&read, RECENT, DEFAULT_RECENT)? },
        "search" => Action::Search { query: argument, limit: number(&read, LIMIT, DEFAULT_LIMIT)? },
        "append" => Action::Append { payload },
        "upsert" => Action::Upsert { payload },
        "end" => Action::End { payload, confirmed: read.last(CONFIRM).is_some() },
        "hash" => Action::Hash { page: argument },
        "rebuild-index" => Action::RebuildIndex,
        _ => match read.last(FORMAT) {
            None | Some("json") => Action::Inspect { card: false },
            Some("card") => Action::Inspect { card: true },
            Some(other) => {
                return Err(NotRun::Usage(format!("--format is json or card, not '{other}'")));
            }
        },
    };
    let last = |option| globals.last(option).map(str::to_owned);
    Ok(Wanted::Here(Invocation {
        workspace: last(WORKSPACE),
        agent: last(AGENT),
        adapter_version: last(ADAPTER),
        action,
    }))
}

/// `path` with a leading `~` replaced by the home folder.
fn expanded(path: &str) -> PathBuf {
    let home = || std::env::var_os("HOME").map(PathBuf::from);
    match path.strip_prefix('~') {
        Some("") => home().unwrap_or_else(|| path.into()),
        Some(rest) => match rest.strip_prefix('/') {
            Some(rest) => home().map_or_else(|| path.into(), |home| home.join(rest)),
            None => path.into(),
        },
        None => path.into(),
    }
}

/// The bytes of a payload: a file's, or for `-` stdin's.
fn payload_bytes(path: &str) -> Result<Vec<u8>, VaultError> {
    let shown = if path == "-" { PathBuf::from("from stdin") } else { expanded(path) };
    let failed = |why: String| VaultError::PayloadFile { path: shown.clone(), why };
    let mut bytes = Vec::new();
    let read = |source: &mut dyn io::Read, bytes: &mut Vec<u8>| {
        source.take(MAX_PAYLOAD + 1).read_to_end(bytes)
    };
    if path == "-" {
        read(&mut io::stdin().lock(), &mut bytes)
    } else {
        File::open(&shown).and_then(|mut file| read(&mut file, &mut bytes))
    }
    .map_err(|error| failed(error.to_string()))?;
    if bytes.len() as u64 > MAX_PAYLOAD {
        return Err(failed(format!("it is larger than {MAX_PAYLOAD} bytes")));
    }
    Ok(bytes)
}

fn answer(value: Result<impl Serialize, VaultError>) -> Result<String, VaultError> {
    value.map(|value| json::pretty(&value))
}

/// Carries a command out; answers what goes to stdout.
fn carry_out(workspace: &Workspace, action: &Action) -> Result<String, VaultError> {
    // A refusal that does not depend on the payload must not wait for it.
    let payload = |path: &str| {
        workspace.may_write()?;
        Ok::<_, VaultError>(payload::parse(payload_bytes(path)?)?)
    };
    match action {
        Action::SetUp(setup) => answer(workspace.set_up(*setup)),
        Action::Protocol => answer(workspace.protocol()),
        Action::ConfigureAgents => answer(workspace.configure_agents()),
        Action::Inspect { card: true } => workspace.card(),
        Action::Inspect { card: false } => answer(workspace.inspect()),
        Action::Hydrate => answer(workspace.hydrate()),
        Action::Start { recent } => workspace.start(*recent),
        Action::Search { query, limit } => answer(workspace.search(query, *limit)),
        Action::Hash { page } => answer(workspace.hash(page)),
        Action::RebuildIndex => answer(workspace.rebuild_index()),
        Action::Append { payload: path } => {
            answer(workspace.append(&payload::append(&payload(path)?)?))
        }
        Action::Upsert { payload: path } => {
            answer(workspace.upsert(&payload::page(&payload(path)?)?))
        }
        Action::End { confirmed: false, .. } => Err(VaultError::Unconfirmed),
        Action::End { payload: path, confirmed } => {
            answer(workspace.end(&payload::end(&payload(path)?)?, *confirmed))
        }
    }
}

impl Action {
    fn writes(&self) -> bool {
        !matches!(
            self,
            Self::Protocol | Self::Inspect { .. } | Self::Search { .. } | Self::Hash { .. }
        )
    }
}

/// From now on an interruption lets a writer finish the file that it is at and give its lock back;
/// otherwise it ends the process as ever.
fn end_gently(stop: Stop) {
    let (watching, watched) = mpsc::channel();
    std::thread::spawn(move || {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
            return;
        };
        if !runtime.block_on(interrupted(&watching)) {
            return;
        }
        stop.request();
        let end = Instant::now() + GRACE;
        while stop.is_working() && Instant::now() < end {
            std::thread::sleep(GRACE_POLL);
        }
        std::process::exit(exit::INTERRUPTED.into());
    });
    // An error says that signals cannot be watched; then they act as ever.
    let _ = watched.recv();
}

/// Says when it watches, then waits for a signal that ends processes; `false` if signals cannot be
/// watched.
async fn interrupted(watching: &mpsc::Sender<()>) -> bool {
    use tokio::signal::unix::{SignalKind, signal};
    let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
    let [Ok(mut interrupt), Ok(mut terminate), Ok(mut hangup)] = kinds.map(signal) else {
        return false;
    };
    if watching.send(()).is_err() {
        return false;
    }
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
    }
    true
}

fn open(invocation: &Invocation, stop: Stop) -> Result<Workspace, VaultError> {
    let start = match invocation.workspace.as_deref() {
        None | Some("") => PathBuf::from("."),
        Some(path) => expanded(path),
    };
    let options = Options::system().map_err(|error| VaultError::Workspace {
        path: Path::new(".").into(),
        why: error.to_string(),
    })?;
    let options = Options {
        agent: invocation.agent.clone(),
        adapter_version: invocation.adapter_version.clone(),
        stop,
        ..options
    };
    Workspace::open(&start, options)
}

/// Runs `commsd vault` with the arguments behind `vault`. `endpoint` says where the daemon is, and is
/// asked only by a command that needs it; `json` is what stood before `vault`.
#[must_use]
pub fn run(
    args: &[OsString],
    endpoint: impl FnOnce() -> Result<Endpoint, ExitCode>,
    json: bool,
) -> ExitCode {
    let invocation = match parse(args) {
        Ok(Wanted::Here(invocation)) => invocation,
        Ok(Wanted::Mesh(asked)) => {
            return match endpoint() {
                Ok(endpoint) => mesh::run(asked, &endpoint, json),
                Err(code) => code,
            };
        }
        Err(NotRun::Help) => return output::print(&format!("{USAGE}{HELP}")),
        Err(NotRun::Usage(why)) => {
            return output::report_usage(&format!("{why}\n{USAGE}{SEE_HELP}"), exit::USAGE);
        }
    };
    let stop = Stop::default();
    let done = open(&invocation, stop.clone()).and_then(|workspace| match workspace.runtime()?.1 {
        Standing::Newer => {
            let status = crate::vault::run_project_runtime(&workspace, args)?;
            Ok(Err(ended(status)))
        }
        _ => {
            if invocation.action.writes() {
                end_gently(stop);
            }
            carry_out(&workspace, &invocation.action).map(Ok)
        }
    });
    match done {
        Ok(Ok(text)) => output::print(&text),
        Ok(Err(code)) => code,
        Err(error) => output::complain(&json::error_line(&error.to_string()), exit::USAGE),
    }
}

/// The exit code of a delegated command, passed on.
fn ended(status: std::process::ExitStatus) -> ExitCode {
    use std::os::unix::process::ExitStatusExt as _;
    let code = status.code().unwrap_or_else(|| SIGNALLED + status.signal().unwrap_or_default());
    u8::try_from(code).unwrap_or(exit::FAILED).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(args: &[&str]) -> Result<Invocation, NotRun> {
        match parse(&args.iter().map(OsString::from).collect::<Vec<_>>())? {
            Wanted::Here(invocation) => Ok(invocation),
            Wanted::Mesh(asked) => panic!("{asked:?}"),
        }
    }

    fn is_usage(args: &[&str]) -> bool {
        matches!(parsed(args), Err(NotRun::Usage(_)))
    }

    #[test]
    fn options_are_read_as_the_reference_reads_them() {
        let read = parsed(&["--work", "a", "--workspace=b", "--ag", "x", "hydrate"]).ok().unwrap();
        assert_eq!(read.workspace.as_deref(), Some("b"));
        assert_eq!(read.agent.as_deref(), Some("x"));
        for recent in [&["--recent", "-5"][..], &["--recent=-5"], &["--rec", " -0_5 "]] {
            let args: Vec<&str> = ["start"].iter().chain(recent).copied().collect();
            let Action::Start { recent } = parsed(&args).ok().unwrap().action else { panic!() };
            assert_eq!(recent, -5);
        }
        let Action::Search { query, .. } =
            parsed(&["search", "--limit", "3", "--", "-x"]).ok().unwrap().action
        else {
            panic!()
        };
        assert_eq!(query, "-x");
        for query in ["-x y", "-5", ""] {
            assert!(parsed(&["search", query]).is_ok(), "{query}");
        }
    }

    #[test]
    fn what_has_to_do_with_the_mesh_goes_there() {
        for args in [
            &["share", ".", "--name", "n", "--write"][..],
            &["unshare", "n", "--json"],
            &["shares"],
            &["revoke", "n", "bob"],
            &["request", "a/n", "--as", "bob", "--write", "--for", "60", "--wait", "5"],
            &["--at", "a/n", "index"],
            &["--at", "a/n", "--as", "bob", "search", "--limit", "3", "--", "-x"],
            &["--at=a/n", "end", "--payload", "f", "--confirm-explicit-user-end"],
        ] {
            let args: Vec<OsString> = args.iter().map(OsString::from).collect();
            assert!(matches!(parse(&args), Ok(Wanted::Mesh(_))), "{args:?}");
        }
    }

    #[test]
    fn wrong_command_lines_are_told_apart_from_help() {
        for args in [
            &[][..],
            &["nope"],
            &["--nope", "init"],
            &["init", "x"],
            &["init", "--agent", "x"],
            &["--workspace"],
            &["--a", "x", "init"],
            &["hash"],
            &["search", "-x"],
            &["start", "--recent", "2.5"],
            &["start", "--recent"],
            &["append", "--payload", "--x"],
            &["inspect", "--format", "xml"],
            &["end", "--confirm-explicit-user-end=1"],
            &["share", "."],
            &["share", "--name", "n"],
            &["share", ".", "--name", "n", "--read", "--write"],
            &["unshare"],
            &["shares", "x"],
            &["revoke", "n", "a", "b"],
            &["request"],
            &["request", "a/n", "--wait", "x"],
            &["request", "a/n", "--for", "0"],
            &["--as", "x", "search", "q"],
            &["--at", "a/n", "init"],
            &["--at", "a/n", "page"],
            &["--at", "a/n", "inspect", "--format", "card"],
            &["page", "x"],
            &["index"],
        ] {
            assert!(is_usage(args), "{args:?}");
        }
        for args in [&["-h"][..], &["--help"], &["--he"], &["append", "--help"]] {
            assert!(matches!(parsed(args), Err(NotRun::Help)), "{args:?}");
        }
    }
}
