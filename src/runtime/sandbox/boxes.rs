//! What each level runs a command with: the confinement of this executable, a bubblewrap command
//! line, a container engine's. Values only; the trials of [`super::level`] use the same ones.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::confine::{Confinement, Files, Limits, Sockets};
use super::level::{greeting_argv, run_briefly};
use super::session::find_program;
use super::{FIRST_ARGUMENT, Sandbox, SandboxError, Settings};
use crate::acp::objects::{Isolation, SandboxPolicy};
use crate::acp::value::Digest;

/// Where a run's things are inside a box of its own.
const WORK_INSIDE: &str = "/work";
const INPUT_INSIDE: &str = "/run/input.json";
const PROGRESS_INSIDE: &str = "/run/progress";
/// Where a socket of this process is inside a box of its own.
pub(in crate::runtime) const SOCKET_INSIDE: &str = "/run/tools.sock";
const EXECUTABLE_INSIDE: &str = "/run/commsd";

/// Programs and libraries.
const SYSTEM: &[&str] = &["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt"];
/// Settings that libraries read, none of them secret.
const SETTINGS: &[&str] = &[
    "/etc/alternatives",
    "/etc/ca-certificates",
    "/etc/group",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/pki/tls/certs",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
];
/// What runtimes ask `/proc` about the machine and themselves; nothing of other processes.
const PROC: &[&str] = &["/proc/cpuinfo", "/proc/meminfo", "/proc/self", "/proc/stat"];
const SYS: &str = "/sys/devices/system/cpu";
/// Devices that hold nothing.
const DEVICES: &[&str] = &["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];

/// A run's things outside of any box.
#[derive(Debug)]
pub(super) struct Places {
    /// The command's working directory.
    pub work: PathBuf,
    /// The input.
    pub input: PathBuf,
    /// The FIFO for progress.
    pub progress: PathBuf,
    /// A socket of this process, where the command gets one.
    pub socket: Option<PathBuf>,
}

/// Paths as the command sees them: working directory, input, progress.
pub(super) fn seen(isolation: Isolation, places: &Places) -> [PathBuf; 3] {
    if in_box(isolation) {
        [WORK_INSIDE, INPUT_INSIDE, PROGRESS_INSIDE].map(PathBuf::from)
    } else {
        [places.work.clone(), places.input.clone(), places.progress.clone()]
    }
}

/// Whether the level has a file system of its own.
pub(in crate::runtime) const fn in_box(isolation: Isolation) -> bool {
    matches!(isolation, Isolation::Oci | Isolation::Namespace)
}

/// A run to be put into a level.
pub(super) struct Boxed<'a> {
    pub isolation: Isolation,
    pub argv: &'a [String],
    /// Variables, for an engine that passes on only what it is told.
    pub env: &'a [(String, String)],
    /// Those of them that may hold a secret: an engine finds them in its own environment, since a list of
    /// arguments is everybody's to read.
    pub lent: &'a BTreeMap<String, String>,
    pub policy: &'a SandboxPolicy,
    pub places: &'a Places,
    /// Paths that may be read besides the system's.
    pub read: &'a [PathBuf],
    /// TCP ports that may be connected to.
    pub ports: &'a [u16],
    /// Name of a container.
    pub container: &'a str,
}

impl Boxed<'_> {
    /// The confinement that runs it.
    pub fn confinement(&self, sandbox: &Sandbox) -> Result<Confinement, SandboxError> {
        let unavailable =
            |why: &str| SandboxError::Unavailable(self.isolation.as_str(), why.to_owned());
        if !self.ports.is_empty() && in_box(self.isolation) {
            return Err(unavailable("a port of this machine cannot be reached from within"));
        }
        let argv = self.argv.to_vec();
        let limits = Some(limits(self.policy));
        let plain = Confinement { argv, session: true, ..Confinement::default() };
        Ok(match self.isolation {
            Isolation::None => plain,
            Isolation::Subprocess => Confinement { unprivileged: true, limits, ..plain },
            Isolation::Kernel => Confinement {
                unprivileged: true,
                limits,
                files: Some(self.files()),
                calls: Some(if self.ports.is_empty() { Sockets::None } else { Sockets::Tcp }),
                ..plain
            },
            Isolation::Namespace => {
                let inner = Confinement {
                    unprivileged: true,
                    session: false,
                    limits: limits.map(|limits| Limits {
                        processes: Some(self.policy.pids_max.get()),
                        ..limits
                    }),
                    calls: Some(Sockets::Any),
                    ..plain.clone()
                };
                let argv = self.bubblewrap(&sandbox.executable, &inner);
                Confinement { argv: argv.map_err(|why| unavailable(&why))?, ..plain }
            }
            Isolation::Oci => {
                let engine = sandbox.engine.as_ref().ok_or_else(|| unavailable("no engine"))?;
                Confinement { argv: self.container(engine), ..plain }
            }
        })
    }

    fn files(&self) -> Files {
        let Places { work, input, progress, .. } = self.places;
        let mut files = base_files();
        files.read.extend(self.read.iter().cloned());
        files.read.push(input.clone());
        files.devices.push(progress.clone());
        files.write.push(work.clone());
        files.ports.extend(self.ports);
        files
    }

    fn bubblewrap(&self, executable: &Path, inner: &Confinement) -> Result<Vec<String>, String> {
        let mut argv = words(&["bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]);
        for path in SYSTEM.iter().chain(SETTINGS) {
            argv.extend(words(&["--ro-bind-try", path, path]));
        }
        for path in self.read {
            let path = text(path)?;
            argv.extend(words(&["--ro-bind-try", path, path]));
        }
        let (input, progress) = (text(&self.places.input)?, text(&self.places.progress)?);
        let size = self.policy.disk_max_bytes.get().max(1).to_string();
        argv.extend(words(&["--ro-bind", text(executable)?, EXECUTABLE_INSIDE]));
        argv.extend(words(&[
            "--ro-bind",
            input,
            INPUT_INSIDE,
            "--bind",
            progress,
            PROGRESS_INSIDE,
        ]));
        if let Some(socket) = &self.places.socket {
            argv.extend(words(&["--bind", text(socket)?, SOCKET_INSIDE]));
        }
        argv.extend(words(&["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]));
        argv.extend(words(&["--perms", "0700", "--size", &size, "--tmpfs", WORK_INSIDE]));
        argv.extend(words(&["--remount-ro", "/", "--chdir", WORK_INSIDE, "--", EXECUTABLE_INSIDE]));
        let inner = serde_json::to_string(inner).map_err(|e| e.to_string())?;
        argv.extend(words(&[FIRST_ARGUMENT, "confine", &inner]));
        Ok(argv)
    }

    fn container(&self, engine: &Engine) -> Vec<String> {
        let policy = self.policy;
        let (memory, size) = (policy.memory_max_bytes.get(), policy.disk_max_bytes.get());
        let (pids, cpu_s) = (policy.pids_max.get(), seconds(policy));
        let mut argv = words(&[&engine.program, "run", "--rm", "--interactive", "--pull=never"]);
        argv.extend(words(&["--name", self.container, "--network=none", "--read-only"]));
        argv.extend(words(&["--cap-drop=ALL", "--security-opt=no-new-privileges"]));
        argv.extend(words(&["--user=65534:65534", "--workdir", WORK_INSIDE, "--cpus=1"]));
        argv.push(format!("--memory={memory}"));
        argv.push(format!("--memory-swap={memory}"));
        argv.push(format!("--pids-limit={pids}"));
        argv.push(format!("--ulimit=cpu={cpu_s}:{cpu_s}"));
        argv.extend(words(&["--ulimit=core=0:0", "--tmpfs"]));
        argv.push(format!("{WORK_INSIDE}:rw,mode=1777,size={size}"));
        let Places { input, progress, socket, .. } = self.places;
        let mount = |from: &Path, to: &str, how: &str| {
            words(&["--mount", &format!("type=bind,source={},target={to}{how}", from.display())])
        };
        argv.extend(mount(input, INPUT_INSIDE, ",readonly"));
        argv.extend(mount(progress, PROGRESS_INSIDE, ""));
        argv.extend(socket.iter().flat_map(|socket| mount(socket, SOCKET_INSIDE, "")));
        for (name, value) in self.env.iter().filter(|(name, _)| name != "PATH") {
            let lent = self.lent.contains_key(name);
            let given = if lent { name.clone() } else { format!("{name}={value}") };
            argv.extend(words(&["--env", &given]));
        }
        argv.extend(words(&["--entrypoint", self.argv.first().map_or("", String::as_str)]));
        argv.push(engine.image.clone());
        argv.extend(self.argv.iter().skip(1).cloned());
        argv
    }
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

fn text(path: &Path) -> Result<&str, String> {
    path.to_str().ok_or_else(|| format!("{} is not UTF-8", path.display()))
}

/// Seconds of processor time of one process, rounded up.
fn seconds(policy: &SandboxPolicy) -> u64 {
    policy.cpu_time_max_ms.get().div_ceil(1000)
}

fn limits(policy: &SandboxPolicy) -> Limits {
    Limits {
        memory_bytes: policy.memory_max_bytes.get(),
        cpu_s: seconds(policy),
        file_bytes: policy.disk_max_bytes.get(),
        processes: None,
    }
}

fn base_files() -> Files {
    let paths = |list: &[&str]| list.iter().map(PathBuf::from).collect::<Vec<_>>();
    let mut read = paths(SYSTEM);
    read.extend(paths(SETTINGS));
    read.extend(paths(PROC));
    read.push(SYS.into());
    Files { read, devices: paths(DEVICES), write: Vec::new(), ports: Vec::new() }
}

/// What the level `kernel` is tried with.
pub(super) fn kernel_trial(executable: &Path) -> Confinement {
    let mut files = base_files();
    files.read.push(executable.to_owned());
    Confinement {
        unprivileged: true,
        files: Some(files),
        calls: Some(Sockets::None),
        ..Confinement::default()
    }
}

/// What the level `namespace` is tried with.
pub(super) fn namespace_trial(executable: &Path) -> Result<Vec<String>, String> {
    let policy = super::most();
    let null = PathBuf::from("/dev/null");
    let places = Places { work: PathBuf::new(), input: null.clone(), progress: null, socket: None };
    let argv = greeting_argv(Path::new(EXECUTABLE_INSIDE))?;
    let inner = Confinement {
        argv,
        unprivileged: true,
        limits: Some(limits(&policy)),
        calls: Some(Sockets::Any),
        ..Confinement::default()
    };
    let boxed = Boxed {
        isolation: Isolation::Namespace,
        argv: &[],
        env: &[],
        lent: &BTreeMap::new(),
        policy: &policy,
        places: &places,
        read: &[],
        ports: &[],
        container: "",
    };
    boxed.bubblewrap(executable, &inner)
}

/// A container engine that has the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Engine {
    /// Its path.
    pub program: String,
    /// Its name.
    pub name: String,
    /// The image asked for.
    pub image: String,
    /// Its digest, where the engine tells.
    pub digest: Option<Digest>,
}

impl Engine {
    /// The first engine that answers and has the image. Nothing is ever pulled.
    pub fn find(settings: &Settings) -> Result<Self, String> {
        let known = ["podman".to_owned(), "docker".to_owned()];
        let wanted = match &settings.engine {
            Some(path) => vec![path.to_string_lossy().into_owned()],
            None => known.into(),
        };
        let mut missing = Vec::new();
        for name in wanted {
            match Self::try_one(&name, &settings.image) {
                Ok(engine) => return Ok(engine),
                Err(why) => missing.push(format!("{name}: {why}")),
            }
        }
        Err(missing.join("; "))
    }

    fn try_one(wanted: &str, image: &str) -> Result<Self, String> {
        let program = find_program(wanted).ok_or("not installed")?;
        let mut command = Command::new(&program);
        command.args(["image", "inspect", "--format", "{{.Id}}", image]);
        let (id, complaint) = run_briefly(command)?;
        let id = id.trim();
        if id.is_empty() {
            return Err(complaint);
        }
        let digest = Digest::parse(id).or_else(|_| Digest::parse(&format!("sha256:{id}")));
        let name = Path::new(&program).file_name().unwrap_or_default();
        let name = name.to_string_lossy().into_owned();
        Ok(Self { program, name, image: image.to_owned(), digest: digest.ok() })
    }
}
