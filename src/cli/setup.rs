//! `commsd setup`: registers `commsd mcp` with the harnesses of this user, takes that back, and tells how
//! it stands. Only the one entry in their files is ever touched. Needs no daemon.

mod edit;
pub(super) mod file;
mod jsonc;
mod plugin;
mod program;
#[cfg(test)]
mod tests;
mod toml;

use std::env;
use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use self::edit::{EditError, Entry, Format, NAME, PROGRAM_NAME};
use self::file::{FileError, Kept};
use self::program::{Found, Program};
use super::output::{json_line, print, table};
use super::{exit, report};
use crate::api::types::{ApiError, Label};

/// Times that a file is looked at anew when its harness has written it meanwhile.
const TRIES: u32 = 3;
/// Codes of a harness named in vain.
const UNKNOWN: &str = "harness_unknown";
const KNOWN: &str = "harness_known";
/// The harness that takes plugins.
const CLAUDE_CODE: &str = "claude-code";

/// Register `commsd mcp` with the harnesses of this user
///
/// Claude Code, Codex and OpenCode are set up in their own files, where only the entry `agent-comms`
/// is changed; OpenCode gets a plugin file as well, which brings messages. pi gets an extension, which
/// does all of it. For any other harness --by-hand prints the lines to put in.
#[derive(Args, Clone, Debug)]
pub struct SetupArgs {
    /// claude-code, codex, opencode or pi; any other with --by-hand [default: those that are found]
    harness: Option<Label>,
    /// Print the lines that another harness takes in its MCP configuration, and change nothing
    #[arg(long, requires = "harness", conflicts_with_all = ["what", "print", "plugin", "project", "replace"])]
    by_hand: bool,
    /// Take it back
    #[arg(long, group = "what")]
    remove: bool,
    /// Tell how it stands
    #[arg(long, group = "what")]
    status: bool,
    /// Show what would be done, and change nothing
    #[arg(long, visible_alias = "dry-run", conflicts_with = "status")]
    print: bool,
    /// Write a plugin for Claude Code into DIR instead: the server, hooks that bring messages and wake
    /// an idle session, and slash commands
    #[arg(long, value_name = "DIR", conflicts_with_all = ["status", "replace", "harness", "project"])]
    plugin: Option<PathBuf>,
    /// Do it in the files of the project in DIR (.mcp.json, .codex/config.toml, opencode.json), for
    /// whoever works on it
    #[arg(long, value_name = "DIR")]
    project: Option<PathBuf>,
    /// Put it in the place of another server of the name (`--remove` puts that back)
    #[arg(long, conflicts_with = "what")]
    replace: bool,
}

/// A harness whose files are known.
struct Harness {
    name: &'static str,
    /// Where it keeps things; it is installed if one of them is there.
    traces: Vec<PathBuf>,
    /// Its configuration, where that names servers.
    config: Option<Config>,
    /// The program of ours that it runs, where it takes one, and that program's file.
    program: Option<(Program, PathBuf)>,
}

/// A configuration file that names servers.
struct Config {
    file: PathBuf,
    format: Format,
    /// Whose project it is in, if it is in one.
    project: Option<PathBuf>,
}

impl Harness {
    /// The same in a project's files. What stands there is for everybody who works on it, so it has no
    /// program of ours in it.
    fn in_project(self, dir: &Path) -> Option<Self> {
        let format = self.config?.format;
        let file = match format {
            Format::McpServers => dir.join(".mcp.json"),
            Format::Codex => dir.join(".codex/config.toml"),
            Format::OpenCode => opencode_file(dir),
        };
        let config = Config { file, format, project: Some(dir.to_owned()) };
        Some(Self { config: Some(config), program: None, ..self })
    }

    /// The file that makes it start commsd.
    fn file(&self) -> Option<&PathBuf> {
        let program = || self.program.as_ref().map(|(_, file)| file);
        self.config.as_ref().map(|config| &config.file).or_else(program)
    }
}

/// OpenCode's configuration file in a directory. It reads both; the entry stays where it is.
fn opencode_file(dir: &Path) -> PathBuf {
    let [jsonc, json] = ["opencode.jsonc", "opencode.json"].map(|name| dir.join(name));
    let has = |path: &Path| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        matches!(Format::OpenCode.find(&text), Ok(Some(_)))
    };
    if has(&json) || !jsonc.exists() { json } else { jsonc }
}

/// The harnesses, with the places of `home` unless the environment says otherwise.
fn harnesses(home: &Path, env: impl Fn(&str) -> Option<OsString>) -> Vec<Harness> {
    let dir = |name| env(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let claude = dir("CLAUDE_CONFIG_DIR");
    let claude_file = claude.as_deref().unwrap_or(home).join(".claude.json");
    let codex = dir("CODEX_HOME").unwrap_or_else(|| home.join(".codex"));
    let config = dir("XDG_CONFIG_HOME").filter(|dir| dir.is_absolute());
    let opencode = config.unwrap_or_else(|| home.join(".config")).join("opencode");
    let pi = dir("PI_CODING_AGENT_DIR").unwrap_or_else(|| home.join(".pi/agent"));
    // pi writes the home directory so.
    let pi = pi.strip_prefix("~").map(|rest| home.join(rest)).unwrap_or(pi);
    vec![
        Harness {
            name: CLAUDE_CODE,
            traces: vec![claude.unwrap_or_else(|| home.join(".claude")), claude_file.clone()],
            config: Some(Config::of_user(claude_file, Format::McpServers)),
            program: None,
        },
        Harness {
            name: "codex",
            config: Some(Config::of_user(codex.join("config.toml"), Format::Codex)),
            program: None,
            traces: vec![codex],
        },
        Harness {
            name: "opencode",
            config: Some(Config::of_user(opencode_file(&opencode), Format::OpenCode)),
            program: Some((Program::OpenCode, Program::OpenCode.place(&opencode))),
            traces: vec![opencode],
        },
        Harness {
            name: "pi",
            config: None,
            program: Some((Program::Pi, Program::Pi.place(&pi))),
            traces: vec![pi],
        },
    ]
}

/// How it stands with a harness after the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    /// commsd is its server.
    SetUp,
    /// It had been before.
    Unchanged,
    /// It had been, at another place.
    Updated,
    /// It is in the place of another one.
    Replaced,
    /// There is no such server.
    NotSetUp,
    /// It is not its server any more.
    Removed,
    /// Another server has the name.
    Foreign,
    /// The program of ours was changed, or is somebody else's.
    Changed,
    /// commsd does not know its files.
    ByHand,
    /// Its file is left as it is.
    Refused,
}

impl State {
    const fn as_str(self) -> &'static str {
        match self {
            Self::SetUp => "set up",
            Self::Unchanged => "set up before",
            Self::Updated => "updated",
            Self::Replaced => "replaced",
            Self::NotSetUp => "not set up",
            Self::Removed => "removed",
            Self::Foreign => "another server",
            Self::Changed => "changed",
            Self::ByHand => "by hand",
            Self::Refused => "refused",
        }
    }

    /// The same where nothing is done yet.
    const fn said(self, dry: bool) -> &'static str {
        match self {
            Self::SetUp if dry => "to be set up",
            Self::Updated if dry => "to be updated",
            Self::Replaced if dry => "to be replaced",
            Self::Removed if dry => "to be removed",
            state => state.as_str(),
        }
    }
}

/// What is said of a harness.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    harness: String,
    /// Whether it is installed, where known.
    installed: Option<bool>,
    state: State,
    file: Option<PathBuf>,
    /// The file as it was.
    backup: Option<PathBuf>,
    /// What is, or would be, in the file.
    entry: Option<String>,
    /// The program that the harness starts, and whether there is one.
    program: Option<String>,
    program_exists: Option<bool>,
    /// The file of its own that brings messages.
    plugin: Option<PathBuf>,
    error: Option<ApiError>,
}

impl Line {
    fn new(harness: &str, installed: Option<bool>, file: Option<PathBuf>) -> Self {
        Self {
            harness: harness.into(),
            installed,
            state: State::Refused,
            file,
            backup: None,
            entry: None,
            program: None,
            program_exists: None,
            plugin: None,
            error: None,
        }
    }

    /// What the harness starts, and whether that is there.
    fn starts(&mut self, program: String) {
        let exists = executable(&program);
        if !exists {
            self.error = Some(ApiError::new(
                "no_program",
                format!("{} starts {program}, which is not there", self.harness),
                format!("commsd setup {}", self.harness),
            ));
        }
        self.program = Some(program);
        self.program_exists = Some(exists);
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    /// Nothing was written.
    dry_run: bool,
    harnesses: Vec<Line>,
    #[serde(skip)]
    what: What,
}

/// Why a harness is left as it is.
#[derive(Debug, thiserror::Error)]
enum SetupError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{}: {source}", path.display())]
    Edit { path: PathBuf, source: EditError },
    #[error("{} has another server \"{NAME}\": {command}", path.display())]
    Foreign { path: PathBuf, command: String },
    #[error("{} was changed, or is somebody else's", path.display())]
    Plugin { path: PathBuf },
}

impl From<SetupError> for ApiError {
    fn from(error: SetupError) -> Self {
        let text = error.to_string();
        match error {
            SetupError::File(error) => error.into(),
            SetupError::Edit { source: EditError::Unreadable { .. }, .. } => {
                Self::new("config_unreadable", text, "mend it; it was left as it is")
            }
            SetupError::Edit { .. } => {
                let todo = "it was left as it is; put the server in by hand (docs/mcp.md)";
                Self::new("config_unusual", text, todo)
            }
            SetupError::Foreign { .. } => {
                let todo = "--replace puts commsd in its place, and --remove brings it back";
                Self::new("config_foreign", text, todo)
            }
            SetupError::Plugin { .. } => {
                let todo = "it was left as it is; remove it, or move it away, and try again";
                Self::new("plugin_changed", text, todo)
            }
        }
    }
}

/// What is to be done with each harness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    SetUp { replace: bool },
    Remove,
    Status,
}

/// Carries it out. `flags` are global ones that the server is to be started with too.
pub(super) fn run(args: &SetupArgs, flags: &[OsString], json: bool) -> ExitCode {
    if let Some(folder) = &args.plugin {
        return match plug_in(folder, args, flags) {
            Ok(report) => print(&if json { json_line(&report) } else { report.human() }),
            Err(error) => report(&error, json, exit::FAILED),
        };
    }
    match carry_out(args, flags) {
        Ok(report) => {
            let failed = report.harnesses.iter().any(|line| line.error.is_some());
            let text = if json { json_line(&report) } else { human(&report) };
            let printed = print(&text);
            if failed { exit::FAILED.into() } else { printed }
        }
        Err(error) => {
            let usage = matches!(error.code.as_str(), UNKNOWN | KNOWN);
            report(&error, json, if usage { exit::USAGE } else { exit::FAILED })
        }
    }
}

/// Writes the plugin, or takes it back.
fn plug_in(
    folder: &Path,
    args: &SetupArgs,
    flags: &[OsString],
) -> Result<plugin::Report, ApiError> {
    let program = own_program()?;
    let server = entry(&program, CLAUDE_CODE, flags)?;
    let hook = server.hook();
    if args.remove {
        return plugin::remove(folder, &server, &hook, args.print);
    }
    // Two servers in one session are two agents, and its hooks are neither's.
    let known = harnesses(&home()?, |name| env::var_os(name));
    let claude = known.iter().find(|harness| harness.name == CLAUDE_CODE);
    let entered = claude.and_then(|harness| harness.config.as_ref()).map(|config| {
        let text = Kept::open(&config.file)?.text.unwrap_or_default();
        config.of(config.format.find(&text))
    });
    if let Some(Some(_)) = entered.transpose()? {
        return Err(ApiError::new(
            "config_both",
            format!("Claude Code has a server \"{NAME}\" in its own file already"),
            format!("take that back first: commsd setup {CLAUDE_CODE} --remove"),
        ));
    }
    plugin::write(folder, &server, &hook, args.print)
}

fn carry_out(args: &SetupArgs, flags: &[OsString]) -> Result<Report, ApiError> {
    let what = match (args.remove, args.status) {
        (true, _) => What::Remove,
        (_, true) => What::Status,
        _ => What::SetUp { replace: args.replace },
    };
    let mut known = harnesses(&home()?, |name| env::var_os(name));
    let mut program = own_program()?;
    if let Some(project) = &args.project {
        let dir =
            std::path::absolute(project).ok().filter(|dir| dir.is_dir()).ok_or_else(|| {
                let what = format!("there is no directory {}", project.display());
                ApiError::new("no_project", what, "name the folder of a project")
            })?;
        known = known.into_iter().filter_map(|harness| harness.in_project(&dir)).collect();
        // Where it is on this machine is not for the others.
        if on_path().any(|found| found == program) {
            program = PROGRAM_NAME.into();
        }
    }
    let entry = |harness: &str| entry(&program, harness, flags);
    let named = args.harness.as_ref().map(|name| match name.as_str() {
        "claude" => CLAUDE_CODE,
        name => name,
    });
    if let Some(other) = named.filter(|_| args.by_hand) {
        if known.iter().any(|harness| harness.name == other) {
            let todo = format!("commsd setup {other} --print shows what goes where");
            let text = format!("{other} takes other lines than most, and setup knows them");
            return Err(ApiError::new(KNOWN, text, todo));
        }
        let line = by_hand(other, &entry(other)?);
        return Ok(Report { dry_run: false, harnesses: vec![line], what });
    }
    let mut lines = Vec::new();
    for harness in &known {
        let installed = harness.traces.iter().any(|trace| trace.exists());
        let wanted = match named {
            Some(named) => named == harness.name,
            // What is set up can be taken back also where the rest of a harness is gone.
            None => installed || what != What::SetUp { replace: args.replace },
        };
        if wanted {
            lines.push(one(harness, installed, &entry(harness.name)?, what, args.print));
        }
    }
    if let Some(other) = named.filter(|_| lines.is_empty()) {
        return Err(unknown(other, args.project.is_some()));
    }
    if lines.is_empty() {
        return Err(ApiError::new(
            "no_harness",
            "neither Claude Code nor Codex nor OpenCode nor pi is found",
            "name the harness: `commsd setup claude-code`; for any other, `commsd setup NAME --by-hand` \
             prints the lines to put in",
        ));
    }
    Ok(Report { dry_run: args.print, harnesses: lines, what })
}

/// How it stands with each harness that is installed or set up, for `commsd doctor`: its name, a
/// sentence, and what is wrong.
pub(super) fn standing() -> Vec<(&'static str, String, Option<ApiError>)> {
    let Ok(home) = home() else { return Vec::new() };
    harnesses(&home, |name| env::var_os(name))
        .iter()
        .filter_map(|harness| {
            let installed = harness.traces.iter().any(|trace| trace.exists());
            let line = one(harness, installed, &Entry::default(), What::Status, true);
            let known = installed || line.state != State::NotSetUp;
            known.then(|| {
                let text = format!("{}: {}", harness.name, line.state.as_str());
                (harness.name, text, line.error)
            })
        })
        .collect()
}

/// The home directory of this user.
pub(super) fn home() -> Result<PathBuf, ApiError> {
    let home = directories::BaseDirs::new().map(|dirs| dirs.home_dir().to_owned());
    home.ok_or_else(|| ApiError::new("no_home", "there is no home directory", "set HOME"))
}

/// The path of this program that lasts: the one on PATH, if that is it, because it may be a link that
/// moves on when commsd is updated.
pub(super) fn own_program() -> Result<PathBuf, ApiError> {
    let failed = |why: std::io::Error| {
        let what = format!("cannot tell where this program is: {why}");
        ApiError::new("no_program", what, "install commsd, and start it from there")
    };
    let this = env::current_exe().and_then(std::fs::canonicalize).map_err(failed)?;
    Ok(on_path().find(|path| same_file(path, &this)).unwrap_or(this))
}

/// Where PATH looks for this program.
fn on_path() -> impl Iterator<Item = PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let dirs: Vec<PathBuf> = env::split_paths(&path).filter(|dir| dir.is_absolute()).collect();
    dirs.into_iter().map(|dir| dir.join(PROGRAM_NAME))
}

fn same_file(path: &Path, canonical: &Path) -> bool {
    std::fs::canonicalize(path).is_ok_and(|path| path == canonical)
}

/// The entry for a harness.
fn entry(program: &Path, harness: &str, flags: &[OsString]) -> Result<Entry, ApiError> {
    let text = |value: &std::ffi::OsStr| {
        value.to_str().map(str::to_owned).ok_or_else(|| {
            let what = format!("{} is not UTF-8, as configuration files are", value.display());
            ApiError::new("not_utf8", what, "move it to another path")
        })
    };
    let mut args: Vec<String> = ["mcp", "--harness", harness].map(str::to_owned).into();
    for flag in flags {
        args.push(text(flag)?);
    }
    Ok(Entry { program: text(program.as_os_str())?, args })
}

/// For the name of a harness whose files are not known, or that has none in a project.
fn unknown(name: &str, in_project: bool) -> ApiError {
    let names = "claude-code, codex, opencode and pi";
    if in_project {
        let text = format!("setup does not know a project's file for {name}");
        let todo = "the known ones are claude-code, codex and opencode; pi's extension is the user's own: \
                    commsd setup pi";
        return ApiError::new(UNKNOWN, text, todo);
    }
    let todo = format!(
        "the known ones are {names}; for another one, `commsd setup {name} --by-hand` prints the lines to \
         put in"
    );
    ApiError::new(UNKNOWN, format!("setup does not know the harness {name}"), todo)
}

/// For a harness whose files are not known.
fn by_hand(harness: &str, entry: &Entry) -> Line {
    let piece = Format::McpServers.render("", entry);
    Line {
        state: State::ByHand,
        entry: Some(format!("{{\"mcpServers\": {{\"{NAME}\": {piece}}}}}")),
        program: Some(entry.program.clone()),
        ..Line::new(harness, None, None)
    }
}

/// Does it with one harness.
fn one(harness: &Harness, installed: bool, entry: &Entry, what: What, dry: bool) -> Line {
    let mut line = Line::new(harness.name, Some(installed), harness.file().cloned());
    for attempt in 1.. {
        let done = match (&harness.config, what) {
            (None, _) => Ok(None),
            (Some(config), What::Status) => status(config, &mut line).map(Some),
            (Some(config), What::SetUp { replace }) => {
                set_up(config, entry, replace, dry, &mut line).map(Some)
            }
            (Some(config), What::Remove) => remove(config, dry, &mut line).map(Some),
        };
        let done = done.and_then(|state| program_too(harness, entry, what, dry, state, &mut line));
        match done {
            Ok(state) => line.state = state,
            Err(SetupError::File(FileError::Changed { .. })) if attempt < TRIES => continue,
            Err(error) => {
                if matches!(error, SetupError::Foreign { .. }) {
                    line.state = State::Foreign;
                }
                line.error = Some(error.into());
            }
        }
        break;
    }
    line
}

/// Does it with the program of ours that a harness takes: beside its configuration, with which it
/// stands as `entered` says, or instead of that.
fn program_too(
    harness: &Harness,
    entry: &Entry,
    what: What,
    dry: bool,
    entered: Option<State>,
    line: &mut Line,
) -> Result<State, SetupError> {
    let Some((program, path)) = &harness.program else {
        return Ok(entered.unwrap_or(State::NotSetUp));
    };
    let (found, changed, starts) = match what {
        What::Status => {
            let (found, starts) = program::look(path)?;
            (found, false, starts)
        }
        What::Remove => (program::remove(path, dry)?, true, None),
        What::SetUp { .. } => {
            let (found, changed) = program::write(path, &program.text(entry), dry)?;
            (found, changed, Some(entry.clone()))
        }
    };
    let state = match (what, found) {
        (_, Found::Changed) => State::Changed,
        (What::Status, Found::Ours) | (What::SetUp { .. }, Found::Nothing) => State::SetUp,
        (What::Status | What::Remove, Found::Nothing) => State::NotSetUp,
        (What::Remove, Found::Ours) => State::Removed,
        (What::SetUp { .. }, Found::Ours) if changed => State::Updated,
        (What::SetUp { .. }, Found::Ours) => State::Unchanged,
    };
    let refused = state == State::Changed && what != What::Status;
    let there = state != State::NotSetUp && !refused;
    let state = match entered {
        // Both are one thing to whoever asks.
        Some(State::Unchanged) if changed => State::Updated,
        Some(State::NotSetUp) if state == State::Removed => State::Removed,
        Some(entered) => entered,
        None => state,
    };
    if refused {
        line.state = state;
        return Err(SetupError::Plugin { path: path.clone() });
    }
    if entered.is_some() {
        line.plugin = there.then(|| path.clone());
    } else if let Some(starts) = starts {
        line.entry = Some(program::words(&starts));
        line.starts(starts.program);
    }
    Ok(state)
}

impl Config {
    fn of_user(file: PathBuf, format: Format) -> Self {
        Self { file, format, project: None }
    }

    fn open(&self) -> Result<Kept, FileError> {
        // Somebody else's repository says what its links are.
        match &self.project {
            Some(dir) => Kept::open_within(dir, &self.file),
            None => Kept::open(&self.file),
        }
    }

    /// Takes away the folder of a file that was made here and is gone, if nothing else is in it: in a
    /// project, which is not the harness's own, it was made for that file.
    fn tidy(&self) {
        let folder = self.file.parent();
        if let Some(folder) =
            folder.filter(|folder| self.project.as_deref().is_some_and(|dir| dir != *folder))
        {
            let _ = std::fs::remove_dir(folder);
        }
    }

    /// For an error about what the file says.
    fn of<T>(&self, result: Result<T, EditError>) -> Result<T, SetupError> {
        result.map_err(|source| SetupError::Edit { path: self.file.clone(), source })
    }
}

fn status(config: &Config, line: &mut Line) -> Result<State, SetupError> {
    let kept = config.open()?;
    line.backup = kept.backup()?.map(|_| kept.backup_path());
    let text = kept.text.unwrap_or_default();
    let Some(found) = config.of(config.format.find(&text))? else { return Ok(State::NotSetUp) };
    line.entry = config.of(config.format.piece(&text))?;
    if !found.is_ours() {
        return Ok(State::Foreign);
    }
    line.starts(found.program);
    Ok(State::SetUp)
}

/// Whether a harness that starts this would start something.
fn executable(program: &str) -> bool {
    let is = |path: &Path| {
        std::fs::metadata(path)
            .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    if program.contains('/') {
        return is(Path::new(program));
    }
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|dir| is(&dir.join(program)))
}

fn set_up(
    config: &Config,
    entry: &Entry,
    replace: bool,
    dry: bool,
    line: &mut Line,
) -> Result<State, SetupError> {
    let kept = config.open()?;
    let format = config.format;
    let text = kept.text.as_deref().unwrap_or_default();
    let found = config.of(format.find(text))?;
    let (state, new) = match &found {
        None => {
            let piece = format.render(text, entry);
            (State::SetUp, config.of(format.insert(text, &piece))?)
        }
        Some(found) if found.is_ours() => {
            if found.program == entry.program {
                (State::Unchanged, text.to_owned())
            } else {
                // What else the entry says (a name, variables) is its owner's.
                (State::Updated, config.of(format.set_program(text, &entry.program))?)
            }
        }
        Some(_) if replace => {
            let piece = format.render(text, entry);
            (State::Replaced, config.of(format.put(text, &piece))?)
        }
        Some(found) => {
            let command = if found.program.is_empty() {
                "a remote one".to_owned()
            } else {
                std::iter::once(&found.program)
                    .chain(&found.args)
                    .cloned()
                    .collect::<Vec<_>>()
                    .join(" ")
            };
            return Err(SetupError::Foreign { path: config.file.clone(), command });
        }
    };
    line.entry = config.of(format.piece(&new))?;
    line.starts(entry.program.clone());
    if state == State::Unchanged {
        return Ok(state);
    }
    kept.writable()?;
    if !dry {
        // The copy is of the file without us, or of one that was written by hand.
        line.backup = if state == State::Updated && kept.backup()?.is_some() {
            Some(kept.backup_path())
        } else {
            kept.back_up()?
        };
        kept.write(Some(&new))?;
    }
    Ok(state)
}

fn remove(config: &Config, dry: bool, line: &mut Line) -> Result<State, SetupError> {
    let kept = config.open()?;
    let format = config.format;
    let Some(text) = kept.text.as_deref() else { return Ok(State::NotSetUp) };
    match config.of(format.find(text))? {
        None => return Ok(State::NotSetUp),
        // Somebody else's is nothing to remove.
        Some(found) if !found.is_ours() => return Ok(State::Foreign),
        Some(_) => {}
    }
    line.entry = config.of(format.piece(text))?;
    let before = kept.backup()?;
    // A copy that cannot be read as its format is no help; only the entry goes.
    let usable = before.as_deref().filter(|before| format.find(before).is_ok());
    let new = config.of(format.undo(text, usable))?;
    kept.writable()?;
    if !dry {
        kept.write(new.as_deref())?;
        if new.is_none() {
            config.tidy();
        }
        if before.is_some() && new == before {
            kept.drop_backup()?;
        } else {
            line.backup = before.map(|_| kept.backup_path());
        }
    }
    Ok(State::Removed)
}

/// A line for each harness, and below it what it is about.
fn human(report: &Report) -> String {
    let mut rows = Vec::new();
    for line in &report.harnesses {
        let installed = if line.installed == Some(false) { " (not found)" } else { "" };
        let file = line.file.as_deref().map(|file| file.display().to_string());
        rows.push([
            format!("{}{installed}", line.harness),
            line.state.said(report.dry_run).to_owned(),
            file.unwrap_or_else(|| "put this into its MCP configuration:".into()),
        ]);
        let mut below = |text: String| rows.push([String::new(), String::new(), text]);
        let shown = report.dry_run || line.state == State::ByHand;
        if let Some(entry) = line.entry.as_deref().filter(|_| shown) {
            entry.lines().for_each(|line| below(format!("  {line}")));
        }
        if let Some(program) = line.program.as_deref().filter(|_| !shown) {
            below(format!("starts {program}"));
        }
        if let Some(plugin) = &line.plugin {
            let what = match (line.state, report.dry_run) {
                (State::Removed, true) => "its plugin file would go too",
                (State::Removed, false) => "its plugin file is gone too",
                (_, true) => "messages would be brought by",
                (_, false) => "messages are brought by",
            };
            below(format!("{what}: {}", plugin.display()));
        }
        if let Some(backup) = &line.backup {
            below(format!("as it was before: {}", backup.display()));
        }
        if let Some(error) = &line.error {
            below(error.message.clone());
            error.todo.iter().for_each(|todo| below(format!("-> {todo}")));
        }
    }
    let mut text = table(["HARNESS", "STATE", "FILE"], &rows);
    if report.dry_run {
        text += "nothing was changed\n";
    }
    let news = |line: &Line| matches!(line.state, State::SetUp | State::Updated | State::Replaced);
    let done = report.what != What::Status && !report.dry_run;
    if done && report.harnesses.iter().any(news) {
        text += "sessions that are started from now on have it\n";
    }
    text
}
