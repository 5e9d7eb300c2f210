//! Worker runs kept apart from the machine (design 10): five levels of isolation, what each takes,
//! and the life of one run. What runs, and what its output means, is [`super::adapter`]'s.
//!
//! The stages are processes of this executable, run again with `__sandbox`:
//! daemon -> supervisor (`supervisor`: streams, limits, the end of every descendant) -> confine
//! (`confine`: restricts itself) -> the command; with a box (`boxes`) between the last two at the
//! levels `namespace` and `oci`. `docs/sandbox.md` says what each level really enforces.

mod boxes;
#[cfg(target_os = "linux")]
mod calls;
mod confine;
mod frame;
#[cfg(target_os = "linux")]
mod landlock;
mod leftovers;
mod level;
mod session;
mod supervisor;
mod tree;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

pub(in crate::runtime) use boxes::{SOCKET_INSIDE, in_box};
pub use frame::Cause;
pub use leftovers::reap_leftovers;
pub use level::Level;
pub(in crate::runtime) use session::find_program;
pub use session::{End, Event, Launch, Session};

use crate::acp::objects::{Isolation, Network, Runtime, SandboxPolicy};
use crate::acp::value::{Count, Name, Seq};

/// First argument of this executable as a stage of a sandbox.
const FIRST_ARGUMENT: &str = "__sandbox";
/// What every run's directory begins with.
const PREFIX: &str = "run-";
/// Bytes of stderr that are kept (design 10.3).
pub const STDERR_MAX: u64 = 64 << 10;
/// Bytes of the end of stderr that are kept besides, for whoever asks why a run failed.
pub const STDERR_END: usize = 2 << 10;
/// The image of containers (the public description's).
const IMAGE: &str = "node:22-bookworm-slim";

/// Upper limits of a run (design 17): bytes of memory, processes, ms of processor time, bytes on
/// disk. A manifest may ask for less.
const MOST: [u64; 4] = [512 << 20, 128, 300_000, 256 << 20];
/// Upper limit of a run's wall time, ms (design 17).
pub const WALL_MAX_MS: u64 = 600_000;

/// Why nothing ran, or why it is not known how it ended.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// A directory or file of the run could not be made.
    #[error("the run's directory cannot be made ({0}); check the work directory and its space")]
    Directory(std::io::Error),
    /// The supervisor could not be started or spoken to.
    #[error("the run's supervisor cannot be used ({0})")]
    Supervisor(std::io::Error),
    /// A stage refused to go on.
    #[error("the sandbox did not start: {0}")]
    NotStarted(String),
    /// The supervisor ended without its report; the run's processes were killed.
    #[error("the run's supervisor ended before the run; what was left of it was killed")]
    Lost,
    /// The level is not there, or cannot do what is asked of it.
    #[error("isolation {0} cannot be used for this run: {1}")]
    Unavailable(&'static str, String),
}

impl SandboxError {
    /// Stable code of this error.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Directory(_) => "sandbox_directory",
            Self::Supervisor(_) => "sandbox_supervisor",
            Self::NotStarted(_) => "sandbox_not_started",
            Self::Lost => "sandbox_lost",
            Self::Unavailable(..) => "sandbox_unavailable",
        }
    }
}

/// Runs a stage of a sandbox if `arguments` ask for one; for the first line of `main`.
#[must_use]
pub fn shim(arguments: impl IntoIterator<Item = OsString>) -> Option<ExitCode> {
    let mut arguments = arguments.into_iter().skip(1);
    if arguments.next()? != FIRST_ARGUMENT {
        return None;
    }
    let stage = arguments.next();
    Some(match stage.as_ref().and_then(|stage| stage.to_str()) {
        Some("supervise") => supervisor::main(),
        Some("confine") => confine::main(&arguments.next().unwrap_or_default()),
        Some("hello") => level::hello(),
        _ => ExitCode::from(confine::NOT_STARTED),
    })
}

/// Makes the memory and the environment of this process unreadable for other processes of its user,
/// as far as the system can (Linux: not dumpable); for a process that holds a provider's key.
pub fn hide_own_memory() {
    #[cfg(target_os = "linux")]
    let _older_kernels_stay_readable =
        rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable);
}

/// How sandboxes are made here.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Directory below which every run has its own.
    pub work_dir: PathBuf,
    /// This executable; for tests, whose own is another.
    pub executable: Option<PathBuf>,
    /// Image of containers.
    pub image: String,
    /// Container engine; podman, else docker, by default.
    pub engine: Option<PathBuf>,
    /// Paths that runs may read and run files of, besides the system's programs and libraries.
    pub read_paths: Vec<PathBuf>,
}

impl Settings {
    /// With this work directory, and everything else by default.
    #[must_use]
    pub fn new(work_dir: PathBuf) -> Self {
        let image = IMAGE.to_owned();
        Self { work_dir, executable: None, image, engine: None, read_paths: Vec::new() }
    }
}

/// What runs can be started with: the levels that were found to work.
#[derive(Clone, Debug)]
pub struct Sandbox {
    settings: Settings,
    executable: PathBuf,
    levels: Vec<Level>,
    engine: Option<boxes::Engine>,
}

impl Sandbox {
    /// Tries every level once. Blocking, up to some seconds where a container engine is slow.
    ///
    /// # Errors
    /// [`SandboxError::Directory`], [`SandboxError::Supervisor`] when the own executable is unknown.
    pub fn new(settings: Settings) -> Result<Self, SandboxError> {
        use std::os::unix::fs::DirBuilderExt as _;
        let made =
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&settings.work_dir);
        made.map_err(SandboxError::Directory)?;
        let executable = match &settings.executable {
            Some(path) => path.clone(),
            None => std::env::current_exe().map_err(SandboxError::Supervisor)?,
        };
        let engine = boxes::Engine::find(&settings);
        let mut sandbox = Self { settings, executable, levels: Vec::new(), engine: None };
        sandbox.levels = level::probe(&sandbox, &engine);
        sandbox.engine = engine.ok();
        Ok(sandbox)
    }

    /// Every level, strongest first, and why those that cannot be used cannot.
    #[must_use]
    pub fn levels(&self) -> &[Level] {
        &self.levels
    }

    /// What runs a command at `isolation`, with what the level enforces and what is only watched.
    /// `has_ports`: ports of this machine may be connected to, of which Landlock knows the numbers.
    #[must_use]
    pub fn runtime(&self, isolation: Isolation, has_ports: bool) -> Runtime {
        let engine = self.engine.as_ref().filter(|_| isolation == Isolation::Oci);
        let (name, kept) = match isolation {
            Isolation::Oci => (
                engine.map_or("container engine", |engine| engine.name.as_str()),
                "enforced: files network memory pids disk output time, cpu by process; watched: none",
            ),
            Isolation::Namespace => (
                "commsd with bubblewrap",
                "enforced: files network disk output time, memory and cpu by process; \
                 watched: memory cpu pids",
            ),
            Isolation::Kernel if has_ports => (
                "commsd with Landlock and seccomp",
                "enforced: files output time, memory and cpu by process, network by port number; \
                 watched: memory cpu pids disk",
            ),
            Isolation::Kernel => (
                "commsd with Landlock and seccomp",
                "enforced: files network output time, memory and cpu by process; \
                 watched: memory cpu pids disk",
            ),
            Isolation::Subprocess => (
                "commsd",
                "enforced: output time, memory and cpu by process; watched: memory cpu pids disk",
            ),
            Isolation::None => ("commsd", "enforced: output time; watched: none"),
        };
        let version = format!("{}; {kept}", env!("CARGO_PKG_VERSION"));
        Runtime {
            name: Name::lossy(name),
            version: Name::lossy(&version),
            image_digest: engine.and_then(|engine| engine.digest),
        }
    }

    /// The levels that can be used, strongest first.
    #[must_use]
    pub fn available(&self) -> Vec<Isolation> {
        let usable = self.levels.iter().filter(|level| level.missing.is_none());
        usable.map(|level| level.isolation).collect()
    }
}

/// The limits here as a policy.
fn most() -> SandboxPolicy {
    let [memory_max_bytes, pids_max, cpu_time_max_ms, disk_max_bytes] = MOST.map(Count::clamped);
    SandboxPolicy {
        isolation: Isolation::Oci,
        allow_subprocess_fallback: false,
        network: Network::None,
        allow_hosts: Seq::default(),
        memory_max_bytes,
        pids_max,
        cpu_time_max_ms,
        disk_max_bytes,
    }
}

/// Whether a run at this level can be let out to listed hosts: where it may connect to single ports
/// of this machine, and the kernel keeps it from everything else.
#[must_use]
pub fn may_list_hosts(isolation: Isolation) -> bool {
    isolation.is_at_least(Isolation::Kernel) && !in_box(isolation)
}

/// `policy` as it is applied at `isolation`: never above the limits here, and without limits (the
/// largest numbers) at `none`. Hosts are listed only where nothing else can be reached.
#[must_use]
pub fn applied(policy: &SandboxPolicy, isolation: Isolation) -> SandboxPolicy {
    let most = most();
    if isolation == Isolation::None {
        let unlimited = Count::clamped(u64::MAX);
        return SandboxPolicy {
            isolation,
            allow_subprocess_fallback: policy.allow_subprocess_fallback,
            memory_max_bytes: unlimited,
            pids_max: unlimited,
            cpu_time_max_ms: unlimited,
            disk_max_bytes: unlimited,
            ..most
        };
    }
    let (network, allow_hosts) = if may_list_hosts(isolation) {
        (policy.network, policy.allow_hosts.clone())
    } else {
        (most.network, most.allow_hosts)
    };
    SandboxPolicy {
        isolation,
        allow_subprocess_fallback: policy.allow_subprocess_fallback,
        network,
        allow_hosts,
        memory_max_bytes: policy.memory_max_bytes.min(most.memory_max_bytes),
        pids_max: policy.pids_max.min(most.pids_max),
        cpu_time_max_ms: policy.cpu_time_max_ms.min(most.cpu_time_max_ms),
        disk_max_bytes: policy.disk_max_bytes.min(most.disk_max_bytes),
    }
}
