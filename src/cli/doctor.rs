//! `commsd doctor`: looks at what can be seen from outside, asks the daemon for the rest, and says
//! for each finding what to do. Changes nothing.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use serde::{Serialize, Serializer};

use super::client::{Failure, PROGRAM};
use super::output::{duration, json_line, table, write_out};
use super::{Endpoint, exit, setup};
use crate::api::client::Client;
use crate::api::endpoint::directory_fault;
use crate::api::types::{
    ApiError, PROGRAM_VERSION, PeerStatus, QueueStatus, Severity, Status, StatusParams,
};
use crate::codec::text::escape_untrusted;

/// Descriptors that a daemon with many agents needs; each agent is a device with sessions of its own.
const WANTED_DESCRIPTORS: u64 = 1024;

/// Files in the identity directory that are looked at; a user has a few for each agent.
const MAX_FILES: usize = 10_000;
/// A message that waits for so long waits for somebody who may not come.
const OLD_MESSAGE_MS: u64 = 3_600_000;

/// One thing looked at.
#[derive(Debug, Serialize)]
struct Finding {
    code: String,
    /// None when all is well, which reads `ok`.
    #[serde(serialize_with = "ok_or_severity")]
    severity: Option<Severity>,
    text: String,
    todo: Option<String>,
}

fn result(severity: Option<Severity>) -> &'static str {
    severity.map_or("ok", Severity::as_str)
}

fn ok_or_severity<S: Serializer>(severity: &Option<Severity>, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(result(*severity))
}

#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    findings: Vec<Finding>,
}

fn good(code: &str, text: impl Into<String>) -> Finding {
    Finding { code: code.into(), severity: None, text: text.into(), todo: None }
}

fn bad(
    code: &str,
    severity: Severity,
    text: impl Into<String>,
    todo: impl Into<String>,
) -> Finding {
    let (code, text) = (code.into(), text.into());
    Finding { code, severity: Some(severity), text, todo: Some(todo.into()) }
}

/// Looks, prints, and fails when something is an error.
pub(super) async fn run(endpoint: &Endpoint, json: bool) -> Result<u8, Failure> {
    let uid = rustix::process::geteuid().as_raw();
    let mut findings = vec![
        directory("socket_directory", endpoint.socket.parent().unwrap_or(Path::new(".")), uid),
        directory("agent_comms_directory", &endpoint.agent_comms_dir, uid),
        key_files(&endpoint.agent_comms_dir),
        descriptors(rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum),
    ];
    findings.extend(endpoint.instead_of.as_deref().map(|default| elsewhere(endpoint, default)));
    findings.extend(setup::standing().into_iter().map(harness));
    match ask(&endpoint.socket).await {
        Err(error) => findings.push(unreachable(error)),
        Ok((version, status)) => findings.extend(daemon(&version, &status)),
    }
    let failed = findings.iter().any(|finding| finding.severity == Some(Severity::Error));
    let report = Report { version: PROGRAM_VERSION, findings };
    let text = if json { json_line(&report) } else { human(&report) };
    write_out(&text)?;
    Ok(if failed { exit::FAILED } else { exit::DONE })
}

async fn ask(socket: &Path) -> Result<(String, Status), ApiError> {
    let (client, _) = Client::connect(socket, PROGRAM).await?;
    let status = client.call(StatusParams { limits: None, settings: None }).await?;
    Ok((client.hello().version.clone(), status))
}

/// A harness's configuration. A harness without commsd is as well as one with it.
fn harness((_, text, error): (&str, String, Option<ApiError>)) -> Finding {
    const CODE: &str = "harness";
    match error {
        None => good(CODE, text),
        Some(error) => bad(CODE, Severity::Warning, error.message, error.todo.unwrap_or_default()),
    }
}

/// What waits for recipients for long.
fn backlog(queues: &QueueStatus) -> Finding {
    const CODE: &str = "backlog";
    let waiting = queues.outgoing + queues.inbound;
    let oldest = queues.oldest_ms.unwrap_or(0);
    if waiting == 0 {
        return good(CODE, "no message waits");
    }
    let text = format!("{waiting} messages wait, the oldest for {}", duration(oldest));
    if oldest < OLD_MESSAGE_MS {
        return good(CODE, text);
    }
    let todo = "`commsd agents` shows who is there; messages are given up after a day";
    bad(CODE, Severity::Warning, text, todo)
}

/// Which versions the peers speak.
fn versions(peers: &[PeerStatus]) -> Finding {
    let mut versions: BTreeMap<&str, usize> = BTreeMap::new();
    for peer in peers {
        *versions.entry(peer.version.as_deref().unwrap_or("unknown")).or_default() += 1;
    }
    let list: Vec<String> =
        versions.iter().map(|(version, count)| format!("{count} of {version}")).collect();
    let list = if list.is_empty() { "none".to_owned() } else { list.join(", ") };
    good("peers", format!("peers by the version of agent-comms: {}", escape_untrusted(&list)))
}

fn unreachable(error: ApiError) -> Finding {
    Finding {
        code: error.code,
        severity: Some(Severity::Error),
        text: error.message,
        todo: error.todo,
    }
}

/// The daemon is found, and programs that know only one place do not find it.
fn elsewhere(endpoint: &Endpoint, default: &Path) -> Finding {
    bad(
        "socket_elsewhere",
        Severity::Warning,
        format!(
            "nobody answers at {}; the daemon was started without XDG_RUNTIME_DIR and is asked at {}",
            default.display(),
            endpoint.socket.display()
        ),
        "nothing must be done; `commsd stop` and `commsd run` from here move it",
    )
}

/// What the daemon says of itself.
fn daemon(version: &str, status: &Status) -> Vec<Finding> {
    let running = format!("commsd {version} runs as process {}", status.pid);
    let mut findings = vec![if version == PROGRAM_VERSION {
        good("daemon", running)
    } else {
        bad(
            "daemon_version",
            Severity::Warning,
            format!("{running}, but this is commsd {PROGRAM_VERSION}"),
            "restart the daemon, or use the commsd that it was started from",
        )
    }];
    let number = status.port.number;
    findings.push(if status.port.held {
        good("port", format!("port {number} is held by this daemon"))
    } else {
        // Another agent's bridge may hold it just as well; a foreign program is a health condition.
        good("port", format!("port {number} is not held by this daemon"))
    });
    findings.push(versions(&status.peers));
    findings.push(backlog(&status.queues));
    findings.extend(status.health.iter().map(|health| Finding {
        code: health.code.clone(),
        severity: Some(health.severity),
        text: health.text.clone(),
        todo: health.todo.clone(),
    }));
    findings
}

fn directory(code: &str, dir: &Path, uid: u32) -> Finding {
    let shown = dir.display();
    match fs::metadata(dir) {
        Ok(meta) if meta.is_dir() => match directory_fault(meta.uid(), meta.mode(), uid) {
            None => good(code, format!("{shown} is closed to others")),
            Some(fault) => {
                let todo = format!("make it yours alone: chmod 700 {shown}");
                bad(code, Severity::Error, format!("{shown} {fault}"), todo)
            }
        },
        Ok(_) => {
            let todo = "remove it, or choose another directory";
            bad(code, Severity::Error, format!("{shown} is not a directory"), todo)
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            good(code, format!("{shown} does not exist yet; it is created when needed"))
        }
        Err(error) => {
            let todo = "check its permissions and those above it";
            bad(code, Severity::Error, format!("cannot look at {shown}: {error}"), todo)
        }
    }
}

/// Keys that others can read.
fn key_files(dir: &Path) -> Finding {
    const CODE: &str = "key_files";
    let entries = fs::read_dir(dir).into_iter().flatten().flatten().take(MAX_FILES);
    let loose: Vec<_> = entries
        .filter(|entry| entry.file_name().as_encoded_bytes().ends_with(b".json"))
        .filter(|entry| entry.metadata().is_ok_and(|meta| meta.mode() & 0o077 != 0))
        .map(|entry| entry.path())
        .collect();
    match loose.first() {
        None => good(CODE, "no identity file is open to others"),
        Some(first) => bad(
            CODE,
            Severity::Error,
            format!("{} identity files are open to others, e.g. {}", loose.len(), first.display()),
            format!("chmod 600 {}/*.json", dir.display()),
        ),
    }
}

/// `maximum` is how far the daemon could raise its limit if it were started from here.
fn descriptors(maximum: Option<u64>) -> Finding {
    const CODE: &str = "descriptors";
    match maximum {
        Some(maximum) if maximum < WANTED_DESCRIPTORS => bad(
            CODE,
            Severity::Warning,
            format!("a daemon started here can open {maximum} files; many agents need more"),
            format!("raise the hard limit to {WANTED_DESCRIPTORS} or more (ulimit -Hn)"),
        ),
        Some(maximum) => good(CODE, format!("a daemon started here can open {maximum} files")),
        None => good(CODE, "a daemon started here can open any number of files"),
    }
}

/// A line for each finding, and below it what to do.
fn human(report: &Report) -> String {
    let mut rows = Vec::new();
    for Finding { code, severity, text, todo } in &report.findings {
        rows.push([result(*severity).into(), code.clone(), text.clone()]);
        rows.extend(todo.iter().map(|todo| [String::new(), String::new(), format!("-> {todo}")]));
    }
    table(["RESULT", "CHECK", "WHAT"], &rows)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::api::types::Time;
    use crate::codec::time::UnixMillis;

    #[test]
    fn directories_and_keys_open_to_others_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let uid = rustix::process::geteuid().as_raw();
        let mode = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        mode(dir.path(), 0o700);
        assert_eq!(directory("d", dir.path(), uid).severity, None);
        assert_eq!(directory("d", &dir.path().join("later"), uid).severity, None);
        assert_eq!(directory("d", dir.path(), uid + 1).severity, Some(Severity::Error));
        let key = dir.path().join("identity-mcp--_srv.json");
        fs::write(&key, "{}").unwrap();
        mode(&key, 0o600);
        assert_eq!(key_files(dir.path()).severity, None);
        mode(&key, 0o640);
        let finding = key_files(dir.path());
        assert_eq!(finding.severity, Some(Severity::Error));
        assert!(finding.text.contains("identity-mcp--_srv.json"), "{}", finding.text);
        assert_eq!(directory("d", &key, uid).severity, Some(Severity::Error));
        mode(dir.path(), 0o755);
        let finding = directory("d", dir.path(), uid);
        assert_eq!(finding.severity, Some(Severity::Error));
        assert!(finding.todo.unwrap().contains("chmod 700"));
    }

    #[test]
    fn what_waits_for_long_is_a_warning_and_versions_are_counted() {
        let queues = |outgoing, oldest_ms| QueueStatus { outgoing, inbound: 0, oldest_ms };
        assert_eq!(backlog(&queues(0, None)).severity, None);
        assert_eq!(backlog(&queues(3, Some(60_000))).severity, None);
        let old = backlog(&queues(3, Some(7_200_000)));
        assert_eq!(old.severity, Some(Severity::Warning));
        assert!(old.text.contains("3 messages") && old.text.contains("2 h"), "{}", old.text);
        let peer = |version: Option<&str>| PeerStatus {
            device: String::new(),
            address: String::new(),
            sessions: 1,
            machine_local: true,
            since: Time(UnixMillis(0)),
            version: version.map(str::to_owned),
        };
        let peers = [peer(Some("8.6.0")), peer(None), peer(Some("8.6.0")), peer(Some("\u{1b}x"))];
        let text = versions(&peers).text;
        assert!(text.contains("2 of 8.6.0") && text.contains("1 of unknown"), "{text}");
        assert!(!text.contains('\u{1b}'));
    }

    #[test]
    fn few_descriptors_are_a_warning() {
        assert_eq!(descriptors(Some(256)).severity, Some(Severity::Warning));
        assert_eq!(descriptors(Some(4096)).severity, None);
        assert_eq!(descriptors(None).severity, None);
    }
}
