//! `commsd service`: the daemon as a service of this user, by a systemd user unit or a launchd agent. The
//! files are those of `contrib`, with this program's path; one that is not ours, or was changed since, is
//! left alone. What the service manager does not answer in time is left to the user, and said.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read as _, Seek as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::Subcommand;
use data_encoding::HEXLOWER;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::client::{Failure, PROGRAM};
use super::output::{fields, json_line, write_out};
use super::setup::file::{self, Access, FileError};
use super::setup::{home, own_program};
use super::{Endpoint, exit};
use crate::api::client::Client;
use crate::api::types::{ApiError, StatusParams};

/// How long the service manager may take to answer a question: it does at once, or not at all.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// How long it may take to start or stop the daemon: more than the unit allows for either.
const CHANGE_WITHIN: Duration = Duration::from_secs(45);
/// The pause between two looks whether it has answered.
const POLL: Duration = Duration::from_millis(10);
/// What is read of what it says; answers are a few lines.
const MAX_ANSWER: u64 = 64 * 1024;
/// The mode of service files, in which nothing is secret.
const MODE: u32 = 0o644;
/// Stands in the last line, before the hash of all lines above it.
const MARKER: &str = "commsd-service: sha256 ";

const UNIT: &str = include_str!("../../contrib/systemd/commsd.service");
const AGENT: &str = include_str!("../../contrib/launchd/local.commsd.plist");
/// What the files of `contrib` have in the place of this program's path.
const UNIT_PROGRAM: &str = "%h/.cargo/bin/commsd";
const AGENT_PROGRAM: &str = "/usr/local/bin/commsd";

/// What to do with the service.
#[derive(Subcommand, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceCommand {
    /// Install it, have it started with your session, and start it
    ///
    /// The flags --home and --socket are the service's too; the environment of this shell is not.
    Install,
    /// Stop it and remove it
    Uninstall,
    /// Tell whether it is installed, enabled and active, and whether it is the daemon that answers
    Status,
}

/// Who starts services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manager {
    Systemd,
    Launchd,
}

/// Whose a service file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Whose {
    /// There is none.
    None,
    /// Ours, as it was written.
    Ours,
    /// Ours, and changed by hand.
    Changed,
    /// Not ours.
    Foreign,
}

/// What the service manager knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    enabled: bool,
    active: bool,
    pid: Option<u32>,
}

/// Why a service file cannot be written or removed.
#[derive(Debug, thiserror::Error)]
enum ServiceError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{} was changed by hand, and is kept", path.display())]
    Changed { path: PathBuf },
    #[error("{} is not of `commsd service`, and is kept", path.display())]
    Foreign { path: PathBuf },
    #[error(
        "a service cannot name {}: it has quotes, $, a backslash or control characters",
        shown(argument)
    )]
    Unnameable { argument: OsString },
    #[error("`{command}` failed: {why}")]
    Manager { command: String, why: String },
}

fn shown(argument: &OsStr) -> String {
    argument.to_string_lossy().into_owned()
}

impl From<ServiceError> for ApiError {
    fn from(error: ServiceError) -> Self {
        let text = error.to_string();
        match error {
            ServiceError::File(error) => error.into(),
            ServiceError::Changed { .. } => {
                Self::new("service_changed", text, "move it away or remove it, then try again")
            }
            ServiceError::Foreign { .. } => {
                Self::new("service_foreign", text, "move it away or remove it, then try again")
            }
            ServiceError::Unnameable { .. } => {
                Self::new("service_path", text, "install commsd at another path")
            }
            ServiceError::Manager { .. } => {
                Self::new("service_manager", text, "see what it says of the unit, then try again")
            }
        }
    }
}

/// The daemon that answers.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Daemon {
    pid: u32,
    version: String,
    /// Whether it is the service's.
    of_service: bool,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    path: PathBuf,
    installed: bool,
    file: Whose,
    /// Whether the service manager answers; without it nothing is known of the next three.
    manager: bool,
    enabled: Option<bool>,
    active: Option<bool>,
    pid: Option<u32>,
    daemon: Option<Daemon>,
    /// Commands that are left to be run.
    todo: Vec<String>,
    /// Why there are some, or what to know of what was done.
    #[serde(skip)]
    hint: Option<&'static str>,
}

/// The service of this user.
struct Service {
    manager: Manager,
    path: PathBuf,
}

/// Carries it out; `flags` are global ones that the daemon is to be started with too.
pub(super) async fn run(
    command: ServiceCommand,
    endpoint: &Endpoint,
    flags: &[OsString],
    json: bool,
) -> Result<u8, Failure> {
    let manager = if cfg!(target_os = "macos") { Manager::Launchd } else { Manager::Systemd };
    let service = Service { manager, path: manager.path(&home()?) };
    let mut daemon = ask(&endpoint.socket).await;
    let todo = match command {
        ServiceCommand::Install => {
            let text = manager.render(&own_program()?, flags).map_err(ApiError::from)?;
            let todo = service.install(&text, daemon.as_ref()).map_err(ApiError::from)?;
            daemon = ask(&endpoint.socket).await;
            todo
        }
        ServiceCommand::Uninstall => {
            let todo = service.uninstall().map_err(ApiError::from)?;
            daemon = ask(&endpoint.socket).await;
            todo
        }
        ServiceCommand::Status => Vec::new(),
    };
    let mut report = service.report(daemon, todo).map_err(ApiError::from)?;
    if command == ServiceCommand::Install {
        report.hint = Some(manager.hint(&report));
    }
    write_out(&if json { json_line(&report) } else { human(&report) })?;
    Ok(exit::DONE)
}

/// The daemon that answers, if one does.
async fn ask(socket: &Path) -> Option<Daemon> {
    let asked = async {
        let (client, _) = Client::connect(socket, PROGRAM).await.ok()?;
        let status = client.call(StatusParams { limits: None, settings: None }).await.ok()?;
        let version = client.hello().version.clone();
        Some(Daemon { pid: status.pid, version, of_service: false })
    };
    tokio::time::timeout(ANSWER_WITHIN, asked).await.ok().flatten()
}

impl Service {
    /// Writes the file, and has the service started now and with every session; what is left to do.
    fn install(&self, text: &str, daemon: Option<&Daemon>) -> Result<Vec<String>, ServiceError> {
        let before = self.read()?;
        self.must_be_ours(whose(before.as_deref()))?;
        let changed = before.as_deref() != Some(text);
        if changed {
            file::replace(&self.path, text, Access::Mode(MODE))?;
        }
        if self.manager.reload().is_err() {
            return Ok(self.manager.by_hand(&self.path));
        }
        let known = self.manager.known();
        let is_its_own = |daemon: &Daemon| known.and_then(|known| known.pid) == Some(daemon.pid);
        let foreign = daemon.filter(|daemon| !is_its_own(daemon));
        self.manager.enable(&self.path, foreign.is_none())?;
        let mut todo = Vec::new();
        if foreign.is_some() {
            // Two do not run side by side; the one that runs has its clients.
            todo.push("commsd stop".into());
            todo.push(self.manager.start_command());
        } else if changed && known.is_some_and(|known| known.active) {
            todo.push(self.manager.restart_command());
        }
        Ok(todo)
    }

    /// Stops the service and removes its file.
    fn uninstall(&self) -> Result<Vec<String>, ServiceError> {
        let whose = whose(self.read()?.as_deref());
        self.must_be_ours(whose)?;
        if whose == Whose::None {
            return Ok(Vec::new());
        }
        let answers = self.manager.known().is_some();
        if answers {
            self.manager.disable()?;
        }
        fs::remove_file(&self.path).map_err(|source| FileError::Io {
            action: "remove",
            path: self.path.clone(),
            source,
        })?;
        // What the manager, had it answered, would have removed.
        let wants = self.path.with_file_name("default.target.wants").join("commsd.service");
        if fs::read_link(&wants).is_ok_and(|target| target == self.path) {
            let _ = fs::remove_file(&wants);
        }
        if answers {
            let _ = self.manager.reload();
        }
        Ok(Vec::new())
    }

    fn must_be_ours(&self, whose: Whose) -> Result<(), ServiceError> {
        let path = self.path.clone();
        match whose {
            Whose::None | Whose::Ours => Ok(()),
            Whose::Changed => Err(ServiceError::Changed { path }),
            Whose::Foreign => Err(ServiceError::Foreign { path }),
        }
    }

    /// What the file says. A link is somebody's own arrangement, and reads as nothing of ours.
    fn read(&self) -> Result<Option<String>, FileError> {
        let failed = |source| FileError::Io { action: "read", path: self.path.clone(), source };
        match fs::symlink_metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(error)),
            Ok(meta) if !meta.is_file() => Ok(Some(String::new())),
            Ok(_) => {
                let mut bytes = Vec::new();
                let file = fs::File::open(&self.path).map_err(failed)?;
                file.take(MAX_ANSWER).read_to_end(&mut bytes).map_err(failed)?;
                Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
            }
        }
    }

    fn report(&self, daemon: Option<Daemon>, todo: Vec<String>) -> Result<Report, ServiceError> {
        let file = whose(self.read()?.as_deref());
        let known = self.manager.known();
        let pid = known.and_then(|known| known.pid);
        Ok(Report {
            path: self.path.clone(),
            installed: file != Whose::None,
            file,
            manager: known.is_some(),
            enabled: known.map(|known| known.enabled),
            active: known.map(|known| known.active),
            pid,
            daemon: daemon.map(|daemon| Daemon { of_service: pid == Some(daemon.pid), ..daemon }),
            todo,
            hint: None,
        })
    }
}

impl Manager {
    /// Where the service file is.
    fn path(self, home: &Path) -> PathBuf {
        match self {
            Self::Systemd => {
                let config = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
                let config = config.filter(|dir| dir.is_absolute());
                let config = config.unwrap_or_else(|| home.join(".config"));
                config.join("systemd/user/commsd.service")
            }
            Self::Launchd => home.join("Library/LaunchAgents/local.commsd.plist"),
        }
    }

    /// The service file, marked as ours.
    fn render(self, program: &Path, flags: &[OsString]) -> Result<String, ServiceError> {
        let command: Vec<&str> = std::iter::once(program.as_os_str())
            .chain(flags.iter().map(OsString::as_os_str))
            .map(nameable)
            .collect::<Result<_, _>>()?;
        let (program, flags) = command.split_first().unwrap_or((&"", &[]));
        let (text, comment) = match self {
            Self::Systemd => {
                let quoted = |word: &str| {
                    let word = word.replace('%', "%%");
                    if word.contains(char::is_whitespace) { format!("\"{word}\"") } else { word }
                };
                // How to install it is said in the first lines.
                let body = UNIT.split_once("\n\n").map_or(UNIT, |(_, body)| body);
                let flags: String = flags.iter().map(|flag| format!(" {}", quoted(flag))).collect();
                let line = format!("{UNIT_PROGRAM} run --log json");
                let new = format!("{} run --log json{flags}", quoted(program));
                (body.replace(&line, &new), ["# ", ""])
            }
            Self::Launchd => {
                let escaped = |word: &str| {
                    word.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
                };
                let (head, rest) = AGENT.split_once("<!--").unwrap_or((AGENT, ""));
                let rest = rest.split_once("-->\n").map_or(rest, |(_, rest)| rest);
                let last = "<string>json</string>\n";
                let flags: String = flags
                    .iter()
                    .map(|flag| format!("    <string>{}</string>\n", escaped(flag)))
                    .collect();
                let body = format!("{head}{rest}")
                    .replace(AGENT_PROGRAM, &escaped(program))
                    .replace(last, &format!("{last}{flags}"));
                (body, ["<!-- ", " -->"])
            }
        };
        let [open, close] = comment;
        let hash = HEXLOWER.encode(&Sha256::digest(&text));
        Ok(format!("{text}{open}{MARKER}{hash}{close}\n"))
    }

    /// The manager is told that its files have changed; an error when it does not answer.
    fn reload(self) -> Result<(), ServiceError> {
        match self {
            Self::Systemd => systemctl(&["daemon-reload"], ANSWER_WITHIN).map(drop),
            Self::Launchd => launchctl(&["print", &domain()], ANSWER_WITHIN).map(drop),
        }
    }

    /// What it knows of the service; none when it does not answer.
    fn known(self) -> Option<Known> {
        match self {
            Self::Systemd => {
                let properties = "--property=UnitFileState,ActiveState,MainPID";
                let told =
                    systemctl(&["show", "commsd.service", properties], ANSWER_WITHIN).ok()?;
                let value = |name: &str| {
                    told.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
                };
                let state = value("ActiveState").unwrap_or_default();
                Some(Known {
                    enabled: value("UnitFileState") == Some("enabled"),
                    active: matches!(state, "active" | "activating" | "reloading"),
                    pid: value("MainPID").and_then(|pid| pid.parse().ok()).filter(|pid| *pid != 0),
                })
            }
            Self::Launchd => {
                launchctl(&["print", &domain()], ANSWER_WITHIN).ok()?;
                let told = launchctl(&["print", &label()], ANSWER_WITHIN).ok();
                let pid = told.as_deref().and_then(|told| {
                    let mut lines = told.lines().map(str::trim);
                    lines.find_map(|line| line.strip_prefix("pid = ")?.parse().ok())
                });
                Some(Known { enabled: told.is_some(), active: pid.is_some(), pid })
            }
        }
    }

    fn enable(self, path: &Path, start: bool) -> Result<(), ServiceError> {
        match self {
            Self::Systemd if start => {
                systemctl(&["enable", "--now", "commsd.service"], CHANGE_WITHIN).map(drop)
            }
            Self::Systemd => systemctl(&["enable", "commsd.service"], CHANGE_WITHIN).map(drop),
            Self::Launchd => {
                // Loaded already: it is loaded anew, as its file may be another.
                let _ = launchctl(&["bootout", &label()], CHANGE_WITHIN);
                let path = path.to_string_lossy();
                launchctl(&["bootstrap", &domain(), &path], CHANGE_WITHIN).map(drop)
            }
        }
    }

    fn disable(self) -> Result<(), ServiceError> {
        match self {
            Self::Systemd => {
                systemctl(&["disable", "--now", "commsd.service"], CHANGE_WITHIN).map(drop)
            }
            Self::Launchd => match launchctl(&["print", &label()], ANSWER_WITHIN) {
                Err(_) => Ok(()),
                Ok(_) => launchctl(&["bootout", &label()], CHANGE_WITHIN).map(drop),
            },
        }
    }

    fn start_command(self) -> String {
        match self {
            Self::Systemd => "systemctl --user start commsd.service".into(),
            Self::Launchd => format!("launchctl kickstart {}", label()),
        }
    }

    fn restart_command(self) -> String {
        match self {
            Self::Systemd => "systemctl --user restart commsd.service".into(),
            Self::Launchd => format!("launchctl kickstart -k {}", label()),
        }
    }

    /// What somebody who has just installed it has to know.
    fn hint(self, report: &Report) -> &'static str {
        match (report.todo.is_empty(), report.manager, self) {
            (true, _, Self::Systemd) => {
                "it runs from your first login to the end of your last session; to have it run always: \
                 loginctl enable-linger"
            }
            (true, _, Self::Launchd) => "it runs as long as you are logged in",
            (false, true, _) => {
                "what runs now is not what is installed, which is started with your next session. To change \
                 over now, run:"
            }
            (false, false, _) => {
                "no service manager answers here, so it does not run yet. In a session that has one (a \
                 login at the machine or by ssh), run:"
            }
        }
    }

    /// What is to be run where no manager answers: in a session that has one.
    fn by_hand(self, path: &Path) -> Vec<String> {
        match self {
            Self::Systemd => vec![
                "systemctl --user daemon-reload".into(),
                "systemctl --user enable --now commsd.service".into(),
            ],
            Self::Launchd => vec![format!("launchctl bootstrap {} {}", domain(), path.display())],
        }
    }
}

/// launchd's name for what it runs in this user's session, and for the service in it.
fn domain() -> String {
    format!("gui/{}", rustix::process::getuid().as_raw())
}

fn label() -> String {
    format!("{}/local.commsd", domain())
}

/// A word of a command line that both managers read as it is.
fn nameable(word: &OsStr) -> Result<&str, ServiceError> {
    let odd = |c: char| c.is_control() || matches!(c, '"' | '\'' | '\\' | '$');
    let word_text = word.to_str().filter(|text| !text.contains(odd));
    word_text.ok_or_else(|| ServiceError::Unnameable { argument: word.to_owned() })
}

fn whose(text: Option<&str>) -> Whose {
    let Some(text) = text else { return Whose::None };
    if !text.contains(MARKER) {
        return Whose::Foreign;
    }
    let whole = text.strip_suffix('\n').unwrap_or_default();
    let start = whole.rfind('\n').map_or(0, |nl| nl + 1);
    let (above, last) = whole.split_at(start);
    let hash = HEXLOWER.encode(&Sha256::digest(above));
    let told = last.split_once(MARKER).map(|(_, told)| told.trim_end_matches(" -->"));
    if told == Some(hash.as_str()) { Whose::Ours } else { Whose::Changed }
}

fn systemctl(args: &[&str], within: Duration) -> Result<String, ServiceError> {
    let args: Vec<&str> = std::iter::once("--user").chain(args.iter().copied()).collect();
    call("systemctl", &args, within)
}

fn launchctl(args: &[&str], within: Duration) -> Result<String, ServiceError> {
    call("launchctl", args, within)
}

/// Runs a program of the service manager, and ends it when it takes too long.
fn call(program: &str, args: &[&str], within: Duration) -> Result<String, ServiceError> {
    let failed = |why: String| ServiceError::Manager {
        command: format!("{program} {}", args.join(" ")),
        why,
    };
    let io = |error: io::Error| failed(error.to_string());
    // Files, because a full pipe would hold it up.
    let (mut out, mut err) = (tempfile::tempfile().map_err(io)?, tempfile::tempfile().map_err(io)?);
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(out.try_clone().map_err(io)?)
        .stderr(err.try_clone().map_err(io)?)
        .spawn()
        .map_err(io)?;
    let deadline = Instant::now() + within;
    let status = loop {
        match child.try_wait().map_err(io)? {
            Some(status) => break status,
            None if Instant::now() >= deadline => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(failed(format!("no answer within {} s", within.as_secs())));
            }
            None => std::thread::sleep(POLL),
        }
    };
    let read = |file: &mut fs::File| {
        let mut bytes = Vec::new();
        let _ = file.rewind().and_then(|()| file.take(MAX_ANSWER).read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).trim_end().to_owned()
    };
    if status.success() { Ok(read(&mut out)) } else { Err(failed(read(&mut err))) }
}

fn human(report: &Report) -> String {
    let yes = |value: Option<bool>| match value {
        None => "unknown, no service manager answers".to_owned(),
        Some(true) => "yes".to_owned(),
        Some(false) => "no".to_owned(),
    };
    let installed = match report.file {
        Whose::None => "no",
        Whose::Ours => "yes",
        Whose::Changed => "yes, changed by hand",
        Whose::Foreign => "yes, not by commsd service",
    };
    let daemon = report.daemon.as_ref().map_or_else(
        || "none answers".to_owned(),
        |Daemon { pid, version, of_service }| {
            let whose = if *of_service { "the service's" } else { "not the service's" };
            format!("commsd {version}, process {pid}, {whose}")
        },
    );
    let mut text = fields(&[
        ("file", report.path.display().to_string()),
        ("installed", installed.into()),
        ("enabled", yes(report.enabled)),
        ("active", yes(report.active)),
        ("daemon", daemon),
    ]);
    if let Some(hint) = report.hint {
        text += &format!("{hint}\n");
    }
    for todo in &report.todo {
        text += &format!("-> {}\n", crate::codec::text::escape_untrusted(todo));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_name_this_program_and_are_known_again() {
        let flags = ["--home", "/a b/100%"].map(OsString::from);
        let unit = Manager::Systemd.render(Path::new("/opt/my tools/commsd"), &flags).unwrap();
        assert!(unit.contains(
            "\nExecStart=\"/opt/my tools/commsd\" run --log json --home \"/a b/100%%\"\n"
        ));
        assert!(!unit.contains(".cargo") && unit.starts_with("[Unit]\n"), "{unit}");
        let agent = Manager::Launchd.render(Path::new("/opt/a&b/commsd"), &flags).unwrap();
        assert!(agent.starts_with("<?xml ") && !agent.contains("copy to"), "{agent}");
        let read = plist::Value::from_reader_xml(agent.as_bytes()).unwrap();
        let arguments = read.as_dictionary().and_then(|agent| agent.get("ProgramArguments"));
        let arguments: Vec<_> =
            arguments.and_then(plist::Value::as_array).unwrap().iter().collect();
        let arguments: Vec<_> = arguments.iter().map(|a| a.as_string().unwrap()).collect();
        assert_eq!(arguments, ["/opt/a&b/commsd", "run", "--log", "json", "--home", "/a b/100%"]);
        for text in [unit, agent] {
            assert_eq!(whose(Some(&text)), Whose::Ours);
            for changed in
                [text.replace("run", "run "), format!("{text}# mine\n"), text.trim_end().to_owned()]
            {
                assert_eq!(whose(Some(&changed)), Whose::Changed);
            }
        }
        assert_eq!(whose(Some(UNIT)), Whose::Foreign);
        assert_eq!(whose(Some("")), Whose::Foreign);
        assert_eq!(whose(None), Whose::None);
    }

    #[test]
    fn a_path_that_a_unit_would_read_otherwise_is_refused() {
        for path in ["/a\"b", "/a$b", "/a\\b", "/a\nExecStart=/bin/x", "/a'b"] {
            let refused = Manager::Systemd.render(Path::new(path), &[]);
            assert!(matches!(refused, Err(ServiceError::Unnameable { .. })), "{path}");
        }
    }

    #[test]
    fn a_manager_that_hangs_or_is_not_there_is_not_waited_for() {
        let begun = Instant::now();
        assert!(call("sleep", &["60"], Duration::from_millis(50)).is_err());
        assert!(begun.elapsed() < Duration::from_secs(30));
        assert!(call("no-such-program-here", &[], ANSWER_WITHIN).is_err());
        assert_eq!(call("echo", &["hi"], ANSWER_WITHIN).unwrap(), "hi");
    }
}
