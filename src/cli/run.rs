//! The flags of `commsd run`. What they mean together with file and environment is decided by the
//! daemon's configuration.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use serde_json::{Map, Value};

use super::client::PROGRAM;
use super::output::{json_line, print};
use super::{exit, output};
use crate::api::client::Client;
use crate::api::types::{PROGRAM_VERSION, StatusParams};
use crate::codec::text::escape_untrusted;

/// What `run --json` says, once: of the daemon that it has become, or of the one that runs already.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Running {
    /// Whether this call has started it.
    pub started: bool,
    /// Its process, where known.
    pub pid: Option<u32>,
    /// Its program version, where known.
    pub version: Option<String>,
    /// Its socket.
    pub socket: PathBuf,
    /// Flags of this call that it does not run with.
    pub differs: Vec<Differs>,
}

/// A flag that the running daemon was not started with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Differs {
    /// The flag.
    pub flag: &'static str,
    /// What was asked for.
    pub asked: Value,
    /// What the daemon has.
    pub running: Value,
}

/// How the flag `--X` is called among the settings that `status` tells.
const SETTINGS: [(&str, &str); 8] = [
    ("--agent-comms-dir", "agentCommsDir"),
    ("--port", "port"),
    ("--first-contact-port", "firstContactPort"),
    ("--no-broadcast", "broadcast"),
    ("--no-first-contact", "firstContact"),
    ("--listen", "listen"),
    ("--hub", "hub"),
    ("--ephemeral", "ephemeral"),
];

/// Whether a flag was given.
fn given(options: &RunOptions, flag: &str) -> bool {
    match flag {
        "--agent-comms-dir" => options.agent_comms_dir.is_some(),
        "--port" => options.port.is_some(),
        "--first-contact-port" => options.first_contact_port.is_some(),
        "--no-broadcast" => options.no_broadcast,
        "--no-first-contact" => options.no_first_contact,
        "--listen" => options.listen.is_some(),
        "--hub" => options.hub.is_some(),
        _ => options.ephemeral,
    }
}

/// What of the flags that were given is not so in the running daemon. `wanted` are the settings as
/// they would be, `running` as they are.
fn differing(
    options: &RunOptions,
    wanted: &Map<String, Value>,
    running: &Map<String, Value>,
) -> Vec<Differs> {
    let row = |(flag, name): (&'static str, &str)| {
        let (asked, running) = (wanted.get(name)?.clone(), running.get(name)?.clone());
        (given(options, flag) && asked != running).then_some(Differs { flag, asked, running })
    };
    SETTINGS.into_iter().filter_map(row).collect()
}

/// The settings of the daemon at `socket`; none when it does not tell (it may still be starting).
fn settings(socket: &Path) -> Option<Map<String, Value>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    runtime.block_on(async {
        let (client, _) = Client::connect(socket, PROGRAM).await.ok()?;
        let params = StatusParams { limits: None, settings: Some(true) };
        client.call(params).await.ok()?.settings
    })
}

/// For the person who has just started it by hand, or for the program that has.
#[must_use]
pub fn started(socket: &Path, flags: &[OsString], json: bool) -> String {
    if json {
        return json_line(&Running {
            started: true,
            pid: Some(std::process::id()),
            version: Some(PROGRAM_VERSION.into()),
            socket: socket.to_owned(),
            differs: Vec::new(),
        });
    }
    // What is pasted from here reaches this daemon.
    let words = flags.iter().map(|flag| flag.to_string_lossy());
    let words: Vec<_> = std::iter::once("commsd".into()).chain(words).collect();
    let quoted = shlex::try_join(words.iter().map(|word| &**word));
    let commsd = escape_untrusted(&quoted.unwrap_or_else(|_| "commsd".into()));
    format!(
        "commsd {PROGRAM_VERSION} is running (socket {}). From a second terminal:\n\
         \x20 {commsd} status\n\
         \x20 {commsd} whoami --as bob\n\
         \x20 {commsd} room create tour --as alice\n\
         \x20 {commsd} dm --as alice bob 'hello'\n\
         \x20 {commsd} inbox --as bob --wait 60\n\
         Stop it with Ctrl-C, or with `{commsd} stop`.\n",
        socket.display()
    )
}

/// Says which daemon runs instead of the one that was asked for, and which of the flags it does not
/// run with. It is done all the same: a daemon runs. `sentence` names it for people.
#[must_use]
pub fn already_running(
    mut running: Running,
    sentence: &str,
    options: &RunOptions,
    wanted: &Map<String, Value>,
    json: bool,
) -> ExitCode {
    let mut text = format!("{}\n", escape_untrusted(sentence));
    if SETTINGS.iter().any(|(flag, _)| given(options, flag)) {
        match settings(&running.socket) {
            Some(told) => running.differs = differing(options, wanted, &told),
            None => text += "it does not tell yet whether it runs with the flags given\n",
        }
    }
    for Differs { flag, asked, running } in &running.differs {
        let line = match running {
            Value::Bool(_) => format!("it runs without {flag}"),
            _ => format!("it runs with {running}, not with {flag} {asked}"),
        };
        text += &format!("{}\n", escape_untrusted(&line));
    }
    if !running.differs.is_empty() {
        text += "end it first: commsd stop\n";
    }
    if json {
        return print(&json_line(&running));
    }
    output::complain(&text, exit::DONE)
}

/// `commsd run`: the daemon, in the foreground.
///
/// Defaults are overridden by the configuration file, then by the environment, then by flags.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct RunOptions {
    /// Configuration file [env: COMMSD_CONFIG] [default: commsd/config.toml in the user's
    /// configuration directory]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Where identities are kept [env: AGENT_COMMS_DATA_DIR] [default: ~/.agent-comms]
    #[arg(long, value_name = "DIR")]
    pub agent_comms_dir: Option<PathBuf>,

    /// Well-known TCP port [default: 19876]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub port: Option<u16>,

    /// UDP port of first contact [default: 19877]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub first_contact_port: Option<u16>,

    /// Send beacons only to the loopback, so that nothing leaves the machine
    /// [env: COMMSD_NO_BROADCAST=1]
    #[arg(long)]
    pub no_broadcast: bool,

    /// Use no UDP at all
    #[arg(long)]
    pub no_first_contact: bool,

    /// Listen at one more address, for other machines; strangers are held in quarantine
    #[arg(long, value_name = "ADDR[:PORT]")]
    pub listen: Option<String>,

    /// Reach trusted peers through this relay hub; dialled once somebody is trusted
    #[arg(long, value_name = "URL")]
    pub hub: Option<String>,

    /// Keep no durable state but keys
    #[arg(long)]
    pub ephemeral: bool,

    /// How to write the log to stderr [env: COMMSD_LOG; filter in COMMSD_LOG_FILTER]
    /// [default: json when not on a terminal]
    #[arg(long, value_name = "FORMAT", value_parser = ["text", "json"])]
    pub log: Option<String>,

    /// Read the configuration, print what would be used, and bind nothing
    #[arg(long)]
    pub check: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_to_try_next_makes_an_agent_before_it_is_written_to() {
        let text = started(Path::new("/s"), &[], false);
        let at = |part: &str| text.find(part).unwrap();
        assert!(at("whoami --as bob") < at("dm --as alice bob"));
        let flags = ["--home", "/tmp/a b"].map(OsString::from);
        let text = started(Path::new("/s"), &flags, false);
        assert!(text.contains("\n  commsd --home '/tmp/a b' status\n"), "{text}");
        let json: Value = serde_json::from_str(&started(Path::new("/s"), &[], true)).unwrap();
        assert_eq!((&json["started"], &json["socket"]), (&Value::Bool(true), &Value::from("/s")));
    }

    #[test]
    fn only_flags_that_were_given_can_differ() {
        let settings = |port: u16, ephemeral: bool| match serde_json::json!({
            "port": port, "ephemeral": ephemeral, "listen": null, "broadcast": true
        }) {
            Value::Object(settings) => settings,
            other => panic!("{other}"),
        };
        let options = RunOptions { port: Some(2), no_broadcast: true, ..RunOptions::default() };
        let wanted = Map::from_iter(settings(2, true).into_iter().map(|(name, value)| {
            let value = if name == "broadcast" { Value::Bool(false) } else { value };
            (name, value)
        }));
        let flags = |running| -> Vec<&str> {
            differing(&options, &wanted, &running).iter().map(|differs| differs.flag).collect()
        };
        assert_eq!(flags(settings(1, false)), ["--port", "--no-broadcast"]);
        assert_eq!(flags(settings(2, false)), ["--no-broadcast"]);
    }
}
