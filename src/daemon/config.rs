//! What the daemon is told before it starts: defaults, then the configuration file, the environment
//! and the command line, each over the one before. Everything is read and checked here; nothing is
//! bound, created or changed. Client commands use it to find the socket.

mod acp;

use std::ffi::OsString;
use std::io::{self, Read as _};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use self::acp::Level;
pub use self::acp::{AcpAdmit, AcpGates, AcpTools, AcpWork, AdapterWord};
use crate::acp::endpoint::{Endpoint, EndpointPolicy};
use crate::mesh::records::ConsentPolicy;
use crate::mesh::replica::HistoryLimits;
use crate::runtime::ws::HubUrl;

/// The well-known TCP port of the mesh.
const DEFAULT_PORT: u16 = 19876;
/// The UDP port of first contact.
const DEFAULT_FIRST_CONTACT_PORT: u16 = 19877;
/// What is logged when nothing is said.
pub const DEFAULT_LOG_FILTER: &str = "info";
/// The port of `commsd hub`.
const DEFAULT_HUB_PORT: u16 = 19878;
/// What is kept of histories, and of everything, when nothing is said. Histories are in memory.
const DEFAULT_HISTORY_MESSAGES: u32 = 1000;
const DEFAULT_HISTORY_MB: u32 = 4;
const DEFAULT_HISTORY_DAYS: u32 = 30;
const DEFAULT_STORE_MB: u32 = 1024;
/// The most that may be said: a hundred thousand messages a room and 64 MiB of texts are more than
/// anybody reads back, ten years and a tebibyte more than anybody means.
const MAX_HISTORY_MESSAGES: u32 = 100_000;
const MAX_HISTORY_MB: u32 = 64;
const MAX_HISTORY_DAYS: u32 = 3660;
const MAX_STORE_MB: u32 = 1024 * 1024;
const MEBIBYTE: usize = 1024 * 1024;
/// Relays of the Agent Collaboration Protocol: as many as an invite can name.
const MAX_ACP_RELAYS: usize = 4;
/// Longest configuration file: there are few keys; anything larger is another file.
const MAX_FILE_BYTES: u64 = 256 * 1024;

/// The configuration cannot be used. `commsd` then exits with 64, before anything is bound.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file that was named cannot be read.
    #[error("cannot read the configuration file {file}: {source}", file = file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file has something that it must not have.
    #[error("{file}, line {line}: {key}{what}", file = file.display(), key = at_key(key))]
    File {
        /// The file.
        file: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The key, where one can be told.
        key: Option<String>,
        /// What is wrong.
        what: String,
    },
    /// A variable or flag has a value that cannot be used.
    #[error("{name}: {what}")]
    Value {
        /// The variable or flag.
        name: String,
        /// What is wrong.
        what: String,
    },
    /// The user has no home directory to keep things in.
    #[error("this user has no home directory")]
    NoHome,
}

fn at_key(key: &Option<String>) -> String {
    key.as_ref().map(|key| format!("`{key}`: ")).unwrap_or_default()
}

impl ConfigError {
    /// Stable name.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Unreadable { .. } => "config_unreadable",
            Self::File { .. } => "config_file",
            Self::Value { .. } => "config_value",
            Self::NoHome => "config_no_home",
        }
    }

    /// What to do about it.
    #[must_use]
    pub const fn todo(&self) -> &'static str {
        match self {
            Self::Unreadable { .. } => "check the path and its permissions, or leave --config out",
            Self::File { .. } => "correct the line; `commsd run --check` tells whether it is right",
            Self::Value { .. } => "correct or unset it; see the command's --help",
            Self::NoHome => "set HOME, or choose a place with --home",
        }
    }
}

/// How events are written to stderr.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

impl std::str::FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err(format!("{text:?} is neither text nor json")),
        }
    }
}

/// An address to listen at beside the loopback, e.g. `192.0.2.1`, `192.0.2.1:7000` or `[::1]:7000`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct ListenAddr {
    /// The address.
    pub ip: IpAddr,
    /// The port; the system chooses without one.
    pub port: Option<u16>,
}

impl std::str::FromStr for ListenAddr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Ok(ip) = text.parse() {
            return Ok(Self { ip, port: None });
        }
        match text.parse::<SocketAddr>() {
            Ok(addr) => Ok(Self { ip: addr.ip(), port: Some(addr.port()) }),
            Err(_) => {
                Err(format!("{text:?} is not an address like 192.0.2.1 or [2001:db8::1]:7000"))
            }
        }
    }
}

impl TryFrom<String> for ListenAddr {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<ListenAddr> for String {
    fn from(addr: ListenAddr) -> Self {
        match addr.port {
            None => addr.ip.to_string(),
            Some(port) => SocketAddr::new(addr.ip, port).to_string(),
        }
    }
}

/// Everything that the daemon is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Config {
    /// The configuration file that was read; none when there is none.
    pub config_file: Option<PathBuf>,
    /// The local socket.
    pub socket: PathBuf,
    /// Where a daemon that was started without the runtime directory has its socket; clients look
    /// there when nobody answers at [`Self::socket`]. None where a socket was chosen.
    #[serde(skip)]
    pub other_socket: Option<PathBuf>,
    /// Identities, petnames, trust: files shared with the reference.
    pub agent_comms_dir: PathBuf,
    /// The daemon's own durable state.
    pub state_dir: PathBuf,
    /// The well-known TCP port on the loopback.
    pub port: u16,
    /// Whether there are beacons and probes at all.
    pub first_contact: bool,
    /// Their UDP port.
    pub first_contact_port: u16,
    /// Whether beacons leave the machine.
    pub broadcast: bool,
    /// An address beside the loopback; strangers there are in quarantine.
    pub listen: Option<ListenAddr>,
    /// The relay hub's URL; none is dialled without one.
    pub hub: Option<String>,
    /// Whether the hub is told the names of agents, of the machine and of public rooms.
    pub hub_names: bool,
    /// Whether the hub may be another machine's without encryption.
    pub hub_plaintext: bool,
    /// No durable state but keys.
    pub ephemeral: bool,
    /// Who may begin conversations with agents that have said nothing of it.
    pub consent: ConsentPolicy,
    /// Messages kept of one room or conversation.
    pub history_messages: u32,
    /// Mebibytes of texts kept of one room or conversation.
    pub history_mb: u32,
    /// Days that a message is kept.
    pub history_days: u32,
    /// Mebibytes that the store may hold.
    pub store_mb: u32,
    /// Relays of the Agent Collaboration Protocol that the daemon's identity listens on.
    pub acp_relays: Vec<String>,
    /// Whether those, and relays that others name, may be another machine's without encryption.
    pub acp_allow_insecure: bool,
    /// Who may propose work to the daemon without an invite.
    pub acp_admit: AcpAdmit,
    /// What the daemon does work with; it takes none without.
    pub acp_work: Option<AcpWork>,
    /// Tools of this owner that the daemon may grant to workers.
    pub acp_tools: AcpTools,
    /// At which gates this owner is not asked.
    pub acp_gates: AcpGates,
    /// How events are written.
    pub log: LogFormat,
    /// Which events are written, in the syntax of `tracing_subscriber`'s `EnvFilter`.
    pub log_filter: String,
}

/// One layer over the defaults: what the environment or the command line says. Switches only switch
/// on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Moves everything.
    pub home: Option<PathBuf>,
    /// The configuration file; it must exist.
    pub config: Option<PathBuf>,
    /// The local socket.
    pub socket: Option<PathBuf>,
    /// Where identities are.
    pub agent_comms_dir: Option<PathBuf>,
    /// The well-known TCP port.
    pub port: Option<u16>,
    /// The UDP port of first contact.
    pub first_contact_port: Option<u16>,
    /// Beacons stay on the loopback.
    pub no_broadcast: bool,
    /// No UDP at all.
    pub no_first_contact: bool,
    /// An address beside the loopback.
    pub listen: Option<ListenAddr>,
    /// The relay hub's URL.
    pub hub: Option<String>,
    /// No durable state but keys.
    pub ephemeral: bool,
    /// Relays of the Agent Collaboration Protocol.
    pub acp_relays: Option<Vec<String>>,
    /// Those may be another machine's without encryption.
    pub acp_allow_insecure: bool,
    /// How events are written.
    pub log: Option<LogFormat>,
    /// Which events are written.
    pub log_filter: Option<String>,
}

impl Settings {
    /// What the environment says; `variable` looks one up. A blank value is the same as none.
    ///
    /// # Errors
    /// [`ConfigError::Value`], naming the variable.
    pub fn from_env(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, ConfigError> {
        let path = |name| -> Option<PathBuf> {
            variable(name)
                .filter(|value| !value.to_string_lossy().trim().is_empty())
                .map(Into::into)
        };
        let text = |name: &str| -> Result<Option<String>, ConfigError> {
            let Some(value) = variable(name) else { return Ok(None) };
            let value = value.into_string().map_err(|_| value_error(name, "is not UTF-8"))?;
            let value = value.trim();
            Ok((!value.is_empty()).then(|| value.to_owned()))
        };
        let switch = |name: &str| match text(name)?.as_deref() {
            None | Some("0" | "false" | "no" | "off") => Ok(false),
            Some("1" | "true" | "yes" | "on") => Ok(true),
            Some(other) => Err(value_error(name, format!("{other:?} is neither 1 nor 0"))),
        };
        Ok(Self {
            home: path("COMMSD_HOME"),
            config: path("COMMSD_CONFIG"),
            socket: path("COMMSD_SOCKET"),
            agent_comms_dir: path("AGENT_COMMS_DATA_DIR"),
            no_broadcast: switch("COMMSD_NO_BROADCAST")?,
            acp_relays: text("COMMSD_ACP_RELAYS")?
                .map(|urls| urls.split(',').map(|url| url.trim().to_owned()).collect()),
            acp_allow_insecure: switch("COMMSD_ACP_ALLOW_INSECURE")?,
            log: flag("COMMSD_LOG", text("COMMSD_LOG")?)?,
            log_filter: match text("COMMSD_LOG_FILTER")? {
                Some(filter) => {
                    check_filter(&filter).map_err(|what| value_error("COMMSD_LOG_FILTER", what))?;
                    Some(filter)
                }
                None => None,
            },
            ..Self::default()
        })
    }
}

/// The value of the flag or variable `name`, read.
///
/// # Errors
/// [`ConfigError::Value`], naming it.
pub fn flag<T: std::str::FromStr<Err = String>>(
    name: &str,
    value: Option<String>,
) -> Result<Option<T>, ConfigError> {
    value.map(|value| value.parse().map_err(|what| value_error(name, what))).transpose()
}

/// Where `commsd hub` listens.
///
/// # Errors
/// [`ConfigError::Value`].
pub fn hub_address(text: &str) -> Result<SocketAddr, ConfigError> {
    let listen: ListenAddr = text.parse().map_err(|what| value_error("--listen", what))?;
    Ok(SocketAddr::new(listen.ip, listen.port.unwrap_or(DEFAULT_HUB_PORT)))
}

/// The filter of the log: directives with commas between them, each a level or `TARGET=LEVEL`. What
/// `EnvFilter` makes of a lone word is a target that shows everything, and of all others nothing, so
/// that a mistyped level would mute the daemon.
fn check_filter(text: &str) -> Result<(), String> {
    const FORMS: &str = "give a level (error, warn, info, debug, trace or off), or with commas \
                         between them levels and TARGET=LEVEL, e.g. info or warn,commsd=debug";
    let is_level = |word: &str| word.parse::<LevelFilter>().is_ok();
    let is_ours = |target: &str| target == "commsd" || target.starts_with("commsd::");
    // Without a level for everything, one for a target of ours must be there.
    let mut heard = false;
    for directive in text.split(',').filter(|part| !part.is_empty()) {
        let is_target = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | ':' | '-');
        match directive.split_once('=') {
            None if is_level(directive) => heard = true,
            None => return Err(format!("{directive:?} is no level; {FORMS}")),
            Some((target, level))
                if is_level(level) && !target.is_empty() && target.chars().all(is_target) =>
            {
                heard |= is_ours(target);
            }
            Some(_) => return Err(format!("{directive:?} is not TARGET=LEVEL; {FORMS}")),
        }
    }
    if !heard {
        return Err(format!("{text:?} names neither a level nor a target of commsd; {FORMS}"));
    }
    EnvFilter::try_new(text).map(drop).map_err(|error| format!("{text:?}: {error}; {FORMS}"))
}

/// A `log-filter` of the file.
#[derive(Debug, Deserialize)]
#[serde(try_from = "String")]
struct Filter(String);

impl TryFrom<String> for Filter {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        check_filter(&text).map(|()| Self(text))
    }
}

/// A path as people write it: `~` and `~/…` are in the home directory.
fn with_home(path: PathBuf, home: &Path) -> Result<PathBuf, String> {
    if !path.as_os_str().as_encoded_bytes().starts_with(b"~") {
        return Ok(path);
    }
    match path.strip_prefix("~") {
        Ok(rest) if rest.as_os_str().is_empty() => Ok(home.to_owned()),
        Ok(rest) => Ok(home.join(rest)),
        Err(_) => Err(format!(
            "{}: only ~/ stands for a home directory, your own; \
             write the path out, or ./~ for a name that begins so",
            path.display()
        )),
    }
}

/// A path of the file, not yet expanded.
#[derive(Debug, Deserialize)]
#[serde(try_from = "PathBuf")]
struct FilePath(PathBuf);

impl TryFrom<PathBuf> for FilePath {
    type Error = String;

    fn try_from(path: PathBuf) -> Result<Self, Self::Error> {
        // Whose home it is does not matter here, where only the line is known.
        with_home(path.clone(), Path::new("/")).map(|_| Self(path))
    }
}

fn value_error(name: impl Into<String>, what: impl Into<String>) -> ConfigError {
    ConfigError::Value { name: name.into(), what: what.into() }
}

/// Where a user's things are when nothing else is said, and how stderr is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// The user's home directory.
    pub home: PathBuf,
    /// For configuration files.
    pub config: PathBuf,
    /// For what outlives the process.
    pub state: PathBuf,
    /// For sockets; not every system has one.
    pub runtime: Option<PathBuf>,
    /// Whether a person reads stderr.
    pub terminal: bool,
}

impl Places {
    /// The places of the user that this process acts as.
    ///
    /// # Errors
    /// [`ConfigError::NoHome`].
    pub fn of_user() -> Result<Self, ConfigError> {
        let dirs = directories::BaseDirs::new().ok_or(ConfigError::NoHome)?;
        Ok(Self {
            home: dirs.home_dir().to_owned(),
            config: dirs.config_dir().to_owned(),
            state: dirs.state_dir().unwrap_or(dirs.data_local_dir()).to_owned(),
            runtime: dirs.runtime_dir().map(Path::to_owned).or_else(login_runtime_dir),
            terminal: io::IsTerminal::is_terminal(&io::stderr()),
        })
    }
}

/// The runtime directory that a login session has on systemd systems. A process started without
/// `XDG_RUNTIME_DIR` (by cron, by `sudo -u`) must find the same socket as one that has it.
fn login_runtime_dir() -> Option<PathBuf> {
    use std::os::unix::fs::MetadataExt as _;
    let uid = crate::runtime::sys::uid();
    let dir = PathBuf::from(format!("/run/user/{uid}"));
    let meta = std::fs::metadata(&dir).ok()?;
    (meta.is_dir() && meta.uid() == uid).then_some(dir)
}

/// The file's keys; they are spelt like the flags.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct FileKeys {
    socket: Option<FilePath>,
    agent_comms_dir: Option<FilePath>,
    port: Option<u16>,
    first_contact_port: Option<u16>,
    broadcast: Option<bool>,
    first_contact: Option<bool>,
    listen: Option<ListenAddr>,
    hub: Option<String>,
    hub_names: Option<bool>,
    hub_plaintext: Option<bool>,
    ephemeral: Option<bool>,
    consent: Option<ConsentPolicy>,
    history_messages: Option<u32>,
    history_mb: Option<u32>,
    history_days: Option<u32>,
    store_mb: Option<u32>,
    acp_relays: Option<Vec<String>>,
    acp_allow_insecure: Option<bool>,
    acp_admit: Option<AcpAdmit>,
    acp_worker: Option<AdapterWord>,
    acp_worker_cmd: Option<String>,
    acp_worker_tool: Option<String>,
    acp_worker_model: Option<String>,
    acp_worker_isolation: Option<Level>,
    acp_worker_auto_accept: Option<bool>,
    acp_tools: Option<AcpTools>,
    acp_gates: Option<AcpGates>,
    log: Option<LogFormat>,
    log_filter: Option<Filter>,
}

impl Config {
    /// Layers defaults, file, `environment` and `flags`.
    ///
    /// A `home` moves the defaults of all paths. One given as a flag also outweighs paths from the
    /// environment, so that a second home never touches what belongs to the first.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn resolve(
        flags: Settings,
        environment: Settings,
        places: &Places,
    ) -> Result<Self, ConfigError> {
        let environment = match &flags.home {
            None => environment,
            Some(_) => Settings {
                home: None,
                config: None,
                socket: None,
                agent_comms_dir: None,
                ..environment
            },
        };
        // A shell has expanded most of what it hands over, but neither `--home=~/x` nor what a unit
        // file or a harness's configuration says.
        let absolute = |path: PathBuf| {
            let shown = path.display().to_string();
            let path = with_home(path, &places.home).map_err(|what| value_error("path", what))?;
            std::path::absolute(path).map_err(|error| value_error(shown, error.to_string()))
        };
        let home = flags.home.or(environment.home).map(absolute).transpose()?;
        let named = flags.config.or(environment.config).map(absolute).transpose()?;
        let (file, keys) = match named {
            Some(file) => {
                let keys = read_file(&file)?;
                (Some(file), keys)
            }
            None => {
                let file = match &home {
                    Some(home) => home.join("config.toml"),
                    None => places.config.join("commsd/config.toml"),
                };
                match read_file(&file) {
                    Ok(keys) => (Some(file), keys),
                    Err(ConfigError::Unreadable { source, .. })
                        if source.kind() == io::ErrorKind::NotFound =>
                    {
                        (None, FileKeys::default())
                    }
                    Err(error) => return Err(error),
                }
            }
        };
        // Paths in the file are relative to it, all others to the working directory.
        let beside_file = |FilePath(path): FilePath| {
            let path = with_home(path, &places.home).map_err(|what| value_error("path", what))?;
            Ok::<_, ConfigError>(match file.as_deref().and_then(Path::parent) {
                Some(dir) => dir.join(path),
                None => path,
            })
        };
        let state_dir = match &home {
            Some(home) => home.join("state"),
            None => places.state.join("commsd"),
        };
        let (default_socket, other_default) = match (&home, &places.runtime) {
            (Some(home), _) => (home.join("run/commsd.sock"), None),
            (None, Some(runtime)) => {
                (runtime.join("commsd/commsd.sock"), Some(state_dir.join("run/commsd.sock")))
            }
            (None, None) => (state_dir.join("run/commsd.sock"), None),
        };
        let default_agent_comms = match &home {
            Some(home) => home.join("agent-comms"),
            None => places.home.join(".agent-comms"),
        };
        let said_socket = match flags.socket.or(environment.socket) {
            Some(path) => Some(absolute(path)?),
            None => keys.socket.map(beside_file).transpose()?,
        };
        let said_agent_comms = match flags.agent_comms_dir.or(environment.agent_comms_dir) {
            Some(path) => Some(absolute(path)?),
            None => keys.agent_comms_dir.map(beside_file).transpose()?,
        };
        let log_default = if places.terminal { LogFormat::Text } else { LogFormat::Json };
        let config = Self {
            other_socket: other_default.filter(|_| said_socket.is_none()),
            socket: said_socket.unwrap_or(default_socket),
            agent_comms_dir: said_agent_comms.unwrap_or(default_agent_comms),
            config_file: file,
            state_dir,
            port: flags.port.or(environment.port).or(keys.port).unwrap_or(DEFAULT_PORT),
            first_contact: keys.first_contact.unwrap_or(true)
                && !environment.no_first_contact
                && !flags.no_first_contact,
            first_contact_port: flags
                .first_contact_port
                .or(environment.first_contact_port)
                .or(keys.first_contact_port)
                .unwrap_or(DEFAULT_FIRST_CONTACT_PORT),
            broadcast: keys.broadcast.unwrap_or(true)
                && !environment.no_broadcast
                && !flags.no_broadcast,
            listen: flags.listen.or(environment.listen).or(keys.listen),
            hub: flags.hub.or(environment.hub).or(keys.hub),
            hub_names: keys.hub_names.unwrap_or(false),
            hub_plaintext: keys.hub_plaintext.unwrap_or(false),
            ephemeral: keys.ephemeral.unwrap_or(false) || environment.ephemeral || flags.ephemeral,
            consent: keys.consent.unwrap_or_default(),
            history_messages: keys.history_messages.unwrap_or(DEFAULT_HISTORY_MESSAGES),
            history_mb: keys.history_mb.unwrap_or(DEFAULT_HISTORY_MB),
            history_days: keys.history_days.unwrap_or(DEFAULT_HISTORY_DAYS),
            store_mb: keys.store_mb.unwrap_or(DEFAULT_STORE_MB),
            acp_relays: flags
                .acp_relays
                .or(environment.acp_relays)
                .or(keys.acp_relays)
                .unwrap_or_default(),
            acp_allow_insecure: keys.acp_allow_insecure.unwrap_or(false)
                || environment.acp_allow_insecure
                || flags.acp_allow_insecure,
            acp_admit: keys.acp_admit.unwrap_or_default(),
            // Only the file says what is run for others.
            acp_tools: keys.acp_tools.unwrap_or_default(),
            acp_gates: keys.acp_gates.unwrap_or_default(),
            acp_work: keys.acp_worker.map(|adapter| AcpWork {
                adapter,
                cmd: keys.acp_worker_cmd,
                tool: keys.acp_worker_tool,
                model: keys.acp_worker_model,
                isolation: keys.acp_worker_isolation.map(|level| level.0),
                auto_accept: keys.acp_worker_auto_accept.unwrap_or(false),
            }),
            log: flags.log.or(environment.log).or(keys.log).unwrap_or(log_default),
            log_filter: flags
                .log_filter
                .or(environment.log_filter)
                .or(keys.log_filter.map(|filter| filter.0))
                .unwrap_or_else(|| DEFAULT_LOG_FILTER.into()),
        };
        config.check()?;
        Ok(config)
    }

    /// What no single layer can tell.
    fn check(&self) -> Result<(), ConfigError> {
        for (name, port) in [("port", self.port), ("first-contact-port", self.first_contact_port)] {
            if port == 0 {
                return Err(value_error(name, "0 is not a port that others could find"));
            }
        }
        for (name, value, most) in [
            ("history-messages", self.history_messages, MAX_HISTORY_MESSAGES),
            ("history-mb", self.history_mb, MAX_HISTORY_MB),
            ("history-days", self.history_days, MAX_HISTORY_DAYS),
            ("store-mb", self.store_mb, MAX_STORE_MB),
        ] {
            if value == 0 || value > most {
                return Err(value_error(name, format!("{value} is not between 1 and {most}")));
            }
        }
        if let Some(url) = &self.hub {
            HubUrl::parse(url, self.hub_plaintext)
                .map_err(|error| value_error("hub", error.to_string()))?;
        }
        if self.acp_relays.len() > MAX_ACP_RELAYS {
            let what = format!("{MAX_ACP_RELAYS} relays at most");
            return Err(value_error("acp-relays", what));
        }
        for url in &self.acp_relays {
            Endpoint::parse(url, self.acp_endpoints())
                .map_err(|error| value_error("acp-relays", format!("{url:?}: {error}")))?;
        }
        if let Some(missing) = self.acp_work.as_ref().and_then(AcpWork::missing) {
            let what = format!("without it there is no acp-worker {:?}", missing.1);
            return Err(value_error(missing.0, what));
        }
        check_filter(&self.log_filter).map_err(|what| value_error("log-filter", what))
    }

    /// Which endpoints the Agent Collaboration Protocol may dial.
    #[must_use]
    pub const fn acp_endpoints(&self) -> EndpointPolicy {
        EndpointPolicy { allow_private: true, allow_insecure: self.acp_allow_insecure }
    }

    /// Where the daemon's identity in the Agent Collaboration Protocol is, and its tasks.
    #[must_use]
    pub fn acp_dir(&self) -> PathBuf {
        self.state_dir.join("acp")
    }

    /// The relay hub; checked when the configuration was read.
    #[must_use]
    pub fn hub_url(&self) -> Option<HubUrl> {
        HubUrl::parse(self.hub.as_deref()?, self.hub_plaintext).ok()
    }

    /// Where the store is.
    #[must_use]
    pub fn store_dir(&self) -> PathBuf {
        self.state_dir.join("store")
    }

    /// Bytes that the store may hold.
    #[must_use]
    pub const fn store_bytes(&self) -> usize {
        self.store_mb as usize * MEBIBYTE
    }

    /// What is kept of histories.
    #[must_use]
    pub fn history(&self) -> HistoryLimits {
        HistoryLimits {
            messages: self.history_messages as usize,
            bytes: self.history_mb as usize * MEBIBYTE,
            age_ms: u64::from(self.history_days) * 24 * 3600 * 1000,
            ..HistoryLimits::default()
        }
    }

    /// The settings by their names in [`Self::report`]'s JSON.
    #[must_use]
    pub fn settings(&self) -> Map<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(settings)) => settings,
            _ => Map::new(),
        }
    }

    /// What would be used: one setting a line, or one JSON object.
    #[must_use]
    pub fn report(&self, json: bool) -> String {
        if json {
            let text = serde_json::to_string(self);
            return text.map_or_else(|error| error.to_string(), |text| text + "\n");
        }
        let optional = |path: &Option<PathBuf>| match path {
            Some(path) => path.display().to_string(),
            None => "none".into(),
        };
        let on = |on| if on { "on" } else { "off" };
        let log = match self.log {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        };
        let consent = match self.consent {
            ConsentPolicy::Ask => "ask",
            ConsentPolicy::SamePrincipal => "same-principal",
            ConsentPolicy::Open => "open",
            ConsentPolicy::Closed => "closed",
        };
        let relays = match self.acp_relays.as_slice() {
            [] => "none".to_owned(),
            relays => relays.join(" "),
        };
        let work = self.acp_work.as_ref().map_or("none", |work| work.adapter.0.as_str());
        let rows = [
            ("config file", optional(&self.config_file)),
            ("socket", self.socket.display().to_string()),
            ("agent-comms directory", self.agent_comms_dir.display().to_string()),
            ("state directory", self.state_dir.display().to_string()),
            ("port", self.port.to_string()),
            ("first contact", on(self.first_contact).into()),
            ("first-contact port", self.first_contact_port.to_string()),
            ("broadcast", on(self.broadcast).into()),
            ("listen", self.listen.map_or_else(|| "none".into(), String::from)),
            ("hub", self.hub.clone().unwrap_or_else(|| "none".into())),
            ("hub names", on(self.hub_names).into()),
            ("hub plaintext", on(self.hub_plaintext).into()),
            ("ephemeral", on(self.ephemeral).into()),
            ("consent", consent.into()),
            ("history messages", self.history_messages.to_string()),
            ("history MiB", self.history_mb.to_string()),
            ("history days", self.history_days.to_string()),
            ("store MiB", self.store_mb.to_string()),
            ("acp relays", relays),
            ("acp insecure", on(self.acp_allow_insecure).into()),
            ("acp admit", self.acp_admit.to_string()),
            ("acp worker", work.into()),
            ("acp tools", self.acp_tools.to_string()),
            ("acp gates", self.acp_gates.to_string()),
            ("log", log.into()),
            ("log filter", self.log_filter.clone()),
        ];
        rows.iter().map(|(name, value)| format!("{name:<21}  {value}\n")).collect()
    }
}

fn read_file(file: &Path) -> Result<FileKeys, ConfigError> {
    let unreadable = |source| ConfigError::Unreadable { file: file.to_owned(), source };
    let mut text = String::new();
    let opened = std::fs::File::open(file).map_err(unreadable)?;
    opened.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).map_err(unreadable)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        let what = format!("longer than {MAX_FILE_BYTES} bytes");
        return Err(unreadable(io::Error::new(io::ErrorKind::InvalidData, what)));
    }
    toml::from_str(&text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        let before = text.get(..at).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        // The key is what stands before the `=` of that line.
        let key = text.lines().nth(line - 1).and_then(|line| line.split_once('='));
        ConfigError::File {
            file: file.to_owned(),
            line,
            key: key.map(|(key, _)| key.trim().to_owned()),
            what: error.message().to_owned(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acp::objects::{Gate, GatePolicy};

    fn places(dir: &Path) -> Places {
        Places {
            home: dir.join("me"),
            config: dir.join("me/.config"),
            state: dir.join("me/.local/state"),
            runtime: Some(dir.join("run")),
            terminal: false,
        }
    }

    fn with_file(text: &str) -> (tempfile::TempDir, Places) {
        let dir = tempfile::tempdir().unwrap();
        let places = places(dir.path());
        std::fs::create_dir_all(places.config.join("commsd")).unwrap();
        std::fs::write(places.config.join("commsd/config.toml"), text).unwrap();
        (dir, places)
    }

    fn env(pairs: &[(&str, &str)]) -> Result<Settings, ConfigError> {
        Settings::from_env(|name| {
            pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn without_anything_said_the_defaults_hold() {
        let dir = tempfile::tempdir().unwrap();
        let places = places(dir.path());
        let config = Config::resolve(Settings::default(), Settings::default(), &places).unwrap();
        let expected = Config {
            config_file: None,
            socket: dir.path().join("run/commsd/commsd.sock"),
            other_socket: Some(dir.path().join("me/.local/state/commsd/run/commsd.sock")),
            agent_comms_dir: dir.path().join("me/.agent-comms"),
            state_dir: dir.path().join("me/.local/state/commsd"),
            port: 19876,
            first_contact: true,
            first_contact_port: 19877,
            broadcast: true,
            listen: None,
            hub: None,
            hub_names: false,
            hub_plaintext: false,
            ephemeral: false,
            consent: ConsentPolicy::Ask,
            history_messages: 1000,
            history_mb: 4,
            history_days: 30,
            store_mb: 1024,
            acp_relays: Vec::new(),
            acp_allow_insecure: false,
            acp_admit: AcpAdmit::default(),
            acp_work: None,
            acp_tools: AcpTools::default(),
            acp_gates: AcpGates::default(),
            log: LogFormat::Json,
            log_filter: "info".into(),
        };
        assert_eq!(config, expected);
        // Without a runtime directory the socket goes to the state.
        let bare = Places { runtime: None, terminal: true, ..places };
        let config = Config::resolve(Settings::default(), Settings::default(), &bare).unwrap();
        assert_eq!(config.socket, dir.path().join("me/.local/state/commsd/run/commsd.sock"));
        assert_eq!((config.other_socket, config.log), (None, LogFormat::Text));
        // A socket that was chosen is the only one.
        let chosen = Settings { socket: Some("/s".into()), ..Settings::default() };
        let config = Config::resolve(chosen, Settings::default(), &bare).unwrap();
        assert_eq!(config.other_socket, None);
    }

    #[test]
    fn a_tilde_is_the_home_directory_in_every_path() {
        let (dir, places) = with_file("socket = \"~/s.sock\"\nagent-comms-dir = \"~/ac\"\n");
        let home = dir.path().join("me");
        let config = Config::resolve(Settings::default(), Settings::default(), &places).unwrap();
        assert_eq!(config.socket, home.join("s.sock"));
        assert_eq!(config.agent_comms_dir, home.join("ac"));
        let environment = env(&[("COMMSD_HOME", "~/other"), ("COMMSD_SOCKET", "~/s")]).unwrap();
        let config = Config::resolve(Settings::default(), environment, &places).unwrap();
        assert_eq!(config.state_dir, home.join("other/state"));
        assert_eq!(config.socket, home.join("s"));
        let flags = Settings { agent_comms_dir: Some("~".into()), ..Settings::default() };
        let config = Config::resolve(flags, Settings::default(), &places).unwrap();
        assert_eq!(config.agent_comms_dir, home);
        // A name that only begins so is one in a directory that is written out.
        let (_dir, places) = with_file("socket = \"./~x/s\"\n");
        let config = Config::resolve(Settings::default(), Settings::default(), &places).unwrap();
        assert!(config.socket.ends_with("~x/s"), "{config:?}");
        for key in ["socket", "agent-comms-dir"] {
            let (_dir, places) = with_file(&format!("\n{key} = \"~ann/x\"\n"));
            let error = Config::resolve(Settings::default(), Settings::default(), &places)
                .unwrap_err()
                .to_string();
            for part in ["line 2", key, "~ann/x", "~/"] {
                assert!(error.contains(part), "{part}: {error}");
            }
        }
        let flags = Settings { home: Some("~ann/x".into()), ..Settings::default() };
        assert!(Config::resolve(flags, Settings::default(), &places).is_err());
    }

    #[test]
    fn a_log_filter_that_would_mute_the_daemon_is_refused_wherever_it_stands() {
        for good in
            ["info", "off", "WARN", "commsd=debug", "warn,commsd::runtime=trace", "debug,h2=off"]
        {
            assert_eq!(check_filter(good), Ok(()), "{good}");
        }
        for bad in [
            "loud",
            "comsd=debug",
            "commsd",
            "commsd=loud",
            "info,loud",
            "=info",
            ",",
            "a=b=c",
            "commsd[x]=info",
        ] {
            let error = check_filter(bad).expect_err(bad);
            for part in ["error, warn, info, debug, trace", "TARGET=LEVEL"] {
                assert!(error.contains(part), "{part}: {error}");
            }
            let error = env(&[("COMMSD_LOG_FILTER", bad)]).unwrap_err();
            assert!(error.to_string().starts_with("COMMSD_LOG_FILTER: "), "{error}");
            let (_dir, places) = with_file(&format!("\nlog-filter = \"{bad}\"\n"));
            let error = Config::resolve(Settings::default(), Settings::default(), &places);
            let error = error.expect_err(bad).to_string();
            assert!(error.contains("line 2") && error.contains("log-filter"), "{error}");
        }
    }

    #[test]
    fn a_home_moves_everything() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().join("other");
        let flags = Settings { home: Some(home.clone()), ..Settings::default() };
        // What the environment says about paths belongs to the first home.
        let environment = env(&[
            ("COMMSD_HOME", "/first"),
            ("COMMSD_SOCKET", "/first/s"),
            ("COMMSD_CONFIG", "/first/c.toml"),
            ("AGENT_COMMS_DATA_DIR", "/first/ids"),
            ("COMMSD_NO_BROADCAST", "1"),
        ])
        .unwrap();
        let config = Config::resolve(flags, environment.clone(), &places(dir.path())).unwrap();
        assert_eq!(config.socket, home.join("run/commsd.sock"));
        assert_eq!(config.agent_comms_dir, home.join("agent-comms"));
        assert_eq!(config.state_dir, home.join("state"));
        assert!(!config.broadcast);

        let environment = Settings { config: None, ..environment };
        let config =
            Config::resolve(Settings::default(), environment, &places(dir.path())).unwrap();
        assert_eq!(config.socket, Path::new("/first/s"));
        assert_eq!(config.agent_comms_dir, Path::new("/first/ids"));
        assert_eq!(config.state_dir, Path::new("/first/state"));
    }

    #[test]
    fn each_layer_outweighs_the_one_before() {
        let (dir, places) = with_file(
            "socket = \"file.sock\"\nport = 1001\nfirst-contact-port = 1002\nlog = \"text\"\n\
             log-filter = \"warn\"\nagent-comms-dir = \"/ids\"\nlisten = \"192.0.2.7\"\n",
        );
        let nothing = Settings::default;
        let file_only = Config::resolve(nothing(), nothing(), &places).unwrap();
        let file = dir.path().join("me/.config/commsd/config.toml");
        assert_eq!(file_only.config_file, Some(file.clone()));
        assert_eq!(file_only.socket, file.with_file_name("file.sock"));
        assert_eq!((file_only.port, file_only.first_contact_port), (1001, 1002));
        assert_eq!(file_only.log, LogFormat::Text);
        assert_eq!(file_only.agent_comms_dir, Path::new("/ids"));
        assert_eq!(file_only.listen.unwrap().port, None);

        let environment = env(&[("COMMSD_SOCKET", "/env.sock"), ("COMMSD_LOG", "json")]).unwrap();
        let flags = Settings {
            port: Some(3001),
            log_filter: Some("commsd=debug".into()),
            ..Settings::default()
        };
        let all = Config::resolve(flags, environment, &places).unwrap();
        assert_eq!((all.port, all.first_contact_port), (3001, 1002));
        assert_eq!(all.socket, Path::new("/env.sock"));
        assert_eq!((all.log, all.log_filter.as_str()), (LogFormat::Json, "commsd=debug"));
    }

    #[test]
    fn relays_are_judged_where_they_are_named() {
        let resolve = |text: &str, pairs: &[(&str, &str)]| {
            let (_dir, places) = with_file(text);
            Config::resolve(Settings::default(), env(pairs).unwrap(), &places)
        };
        let file = "acp-relays = [\"https://a.example\", \"http://127.0.0.1:8787\"]\n";
        let config = resolve(file, &[]).unwrap();
        assert_eq!(config.acp_relays, ["https://a.example", "http://127.0.0.1:8787"]);
        let named = [("COMMSD_ACP_RELAYS", "wss://b.example, https://c.example")];
        let config = resolve(file, &named).unwrap();
        assert_eq!(config.acp_relays, ["wss://b.example", "https://c.example"]);
        let plain = "acp-relays = [\"http://192.0.2.1\"]\n";
        let error = resolve(plain, &[]).unwrap_err().to_string();
        assert!(error.starts_with("acp-relays: ") && error.contains("192.0.2.1"), "{error}");
        resolve(plain, &[("COMMSD_ACP_ALLOW_INSECURE", "1")]).unwrap();
        resolve(&format!("{plain}acp-allow-insecure = true\n"), &[]).unwrap();
        for bad in ["[\"ftp://a\"]", "[\"https://169.254.169.254\"]", "[\"\"]"] {
            assert!(resolve(&format!("acp-relays = {bad}\n"), &[]).is_err(), "{bad}");
        }
        let many = [("COMMSD_ACP_RELAYS", "https://a,https://b,https://c,https://d,https://e")];
        assert!(resolve("", &many).is_err());
    }

    #[test]
    fn work_for_others_is_what_the_file_says() {
        let (_dir, places) = with_file(
            "acp-worker = \"command\"\nacp-worker-cmd = \"cat -u\"\nacp-admit = \"peers\"\n\
             acp-worker-isolation = \"subprocess\"\nacp-worker-auto-accept = true\n",
        );
        let config = Config::resolve(Settings::default(), env(&[]).unwrap(), &places).unwrap();
        assert!(config.acp_admit.peers);
        let work = config.acp_work.unwrap();
        assert_eq!((work.adapter.0.as_str(), work.auto_accept), ("command", true));
        let options = work.options();
        assert_eq!(options.cmd.as_deref(), Some("cat -u"));
        assert_eq!(options.isolation.map(|level| level.as_str()), Some("subprocess"));
        let gates = "[acp-gates]\nexternal_send = \"auto\"\nredelegation = \"deny\"\n";
        let (_dir, places) = with_file(gates);
        let config = Config::resolve(Settings::default(), env(&[]).unwrap(), &places).unwrap();
        assert_eq!(config.acp_gates.with(GatePolicy::Auto), [Gate::ExternalSend]);
        assert_eq!(config.acp_gates.with(GatePolicy::Deny), [Gate::Redelegation]);
        assert_eq!(config.acp_gates.to_string(), "external_send=auto redelegation=deny");
        let (_dir, places) = with_file("[acp-tools]\n\"mcp:docs/**:read\" = \"cat -n 'a b'\"\n");
        let config = Config::resolve(Settings::default(), env(&[]).unwrap(), &places).unwrap();
        assert_eq!(config.acp_tools.to_string(), "mcp:docs/**:read");
        assert_eq!(config.acp_tools.0[0].command, ["cat", "-n", "a b"]);
        for bad in [
            "[acp-tools]\n\"mcp:docs\" = \"cat\"\n",
            "[acp-tools]\n\"mcp:docs:read\" = \"'\"\n",
            "[acp-tools]\n\"mcp:docs:read\" = 3\n",
            "[acp-gates]\nexternal_send = \"yes\"\n",
            "[acp-gates]\nanything = \"auto\"\n",
        ] {
            let (_dir, places) = with_file(bad);
            assert!(
                Config::resolve(Settings::default(), env(&[]).unwrap(), &places).is_err(),
                "{bad}"
            );
        }
        for bad in [
            "acp-worker = \"command\"\n",
            "acp-worker = \"mcp\"\nacp-worker-cmd = \"server\"\n",
            "acp-worker = \"openai\"\n",
            "acp-worker = \"shell\"\n",
            "acp-worker-isolation = \"vm\"\n",
        ] {
            let (_dir, places) = with_file(bad);
            assert!(Config::resolve(Settings::default(), env(&[]).unwrap(), &places).is_err());
        }
    }

    #[test]
    fn switches_only_take_away() {
        let (_dir, places) = with_file("broadcast = false\nfirst-contact = false\n");
        let config = Config::resolve(Settings::default(), Settings::default(), &places).unwrap();
        assert!(!config.broadcast && !config.first_contact && !config.ephemeral);
        let (_dir, places) = with_file("broadcast = true\nephemeral = true\n");
        let flags = Settings { no_first_contact: true, no_broadcast: true, ..Settings::default() };
        let config = Config::resolve(flags, Settings::default(), &places).unwrap();
        assert!(!config.broadcast && !config.first_contact && config.ephemeral);
    }

    #[test]
    fn a_mistake_in_the_file_names_file_line_and_key() {
        for (text, line, key, what) in [
            ("# ports\nprot = 1\n", 2, "prot", "unknown field `prot`"),
            ("port = \"x\"\n", 1, "port", "expected u16"),
            ("\n\nport = 70000\n", 3, "port", "70000"),
            ("listen = \"everywhere\"\n", 1, "listen", "not an address"),
            ("log = \"xml\"\n", 1, "log", "unknown variant `xml`"),
            ("port = 1\nport = 2\n", 2, "port", "duplicate key"),
            ("history-days = -1\n", 1, "history-days", "-1"),
        ] {
            let (_dir, places) = with_file(text);
            let error =
                Config::resolve(Settings::default(), Settings::default(), &places).expect_err(text);
            let shown = error.to_string();
            for part in ["config.toml", &format!("line {line}"), &format!("`{key}`"), what] {
                assert!(shown.contains(part), "{part}: {shown}");
            }
            assert_eq!(error.code(), "config_file");
        }
        // What is no line with a key at all.
        let (_dir, places) = with_file("port\n");
        let error = Config::resolve(Settings::default(), Settings::default(), &places).unwrap_err();
        assert!(error.to_string().contains("line 1"), "{error}");
    }

    #[test]
    fn a_named_file_must_exist_and_be_a_small_text() {
        let dir = tempfile::tempdir().unwrap();
        let flags = |file: &Path| Settings { config: Some(file.to_owned()), ..Settings::default() };
        let file = dir.path().join("c.toml");
        let resolve = || Config::resolve(flags(&file), Settings::default(), &places(dir.path()));
        let error = resolve().unwrap_err();
        assert_eq!(error.code(), "config_unreadable");
        assert!(error.to_string().contains("c.toml"), "{error}");
        std::fs::write(&file, b"log = \"\xff\"").unwrap();
        assert_eq!(resolve().unwrap_err().code(), "config_unreadable");
        std::fs::write(&file, "#".repeat(300_000)).unwrap();
        assert_eq!(resolve().unwrap_err().code(), "config_unreadable");
        std::fs::write(&file, "ephemeral = true").unwrap();
        assert!(resolve().unwrap().ephemeral);
    }

    #[test]
    fn values_that_cannot_be_used_are_named() {
        let cases = [("COMMSD_NO_BROADCAST", "perhaps"), ("COMMSD_LOG", "xml")];
        for (name, value) in cases {
            let error = env(&[(name, value)]).unwrap_err();
            assert!(error.to_string().starts_with(name), "{error}");
        }
        for (name, off) in [("COMMSD_NO_BROADCAST", "0"), ("COMMSD_NO_BROADCAST", " ")] {
            assert_eq!(env(&[(name, off)]).unwrap(), Settings::default());
        }
        let dir = tempfile::tempdir().unwrap();
        let resolve = |flags| Config::resolve(flags, Settings::default(), &places(dir.path()));
        let zero = Settings { port: Some(0), ..Settings::default() };
        assert!(resolve(zero).unwrap_err().to_string().starts_with("port:"));
        let filter = Settings { log_filter: Some("a=b=c".into()), ..Settings::default() };
        assert!(resolve(filter).unwrap_err().to_string().starts_with("log-filter:"));
    }

    #[test]
    fn listen_addresses_have_an_optional_port() {
        for (text, port) in [
            ("192.0.2.1", None),
            ("192.0.2.1:7000", Some(7000)),
            ("2001:db8::1", None),
            ("[2001:db8::1]:7000", Some(7000)),
        ] {
            let addr: ListenAddr = text.parse().unwrap();
            assert_eq!(addr.port, port, "{text}");
            assert_eq!(String::from(addr), text);
        }
        for bad in ["", "localhost", "192.0.2.1:", "192.0.2.1:70000", ":7000"] {
            assert!(bad.parse::<ListenAddr>().is_err(), "{bad}");
        }
    }
}
