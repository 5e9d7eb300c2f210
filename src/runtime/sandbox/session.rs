//! The daemon's side of a run: makes its directory, starts the supervisor, passes input and orders
//! to it and what it tells on, and sees to it that nothing is left.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use data_encoding::BASE32_NOPAD;
use futures_util::{SinkExt as _, StreamExt as _};
use tokio::net::UnixListener;
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio_util::codec::{FramedRead, FramedWrite, LengthDelimitedCodec};

use super::boxes::{Boxed, Places, in_box, seen};
use super::frame::{CHUNK, Cause, Order, Report, Start, Told, Watch, codec, decode, encode};
use super::leftovers::{self, RECORD, RUN_VARIABLE};
use super::{FIRST_ARGUMENT, PREFIX, STDERR_END, STDERR_MAX, Sandbox, SandboxError, confine};
use crate::acp::objects::{Isolation, SandboxPolicy};
use crate::acp::value::TaskId;

/// How long the supervisor, which only waits, may take to accept an order.
const ORDER: Duration = Duration::from_secs(10);
/// The socket of a run's directory.
const SOCKET: &str = "tools.sock";
/// Programs are looked for in these directories, whatever the daemon's own environment says.
const PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// A run to be started.
#[derive(Debug)]
pub struct Launch {
    /// The task.
    pub task_id: TaskId,
    /// Program (a path, or a name on the fixed path) and arguments; never through a shell.
    pub argv: Vec<String>,
    /// Variables besides those that every run has; they may hold a secret of the run.
    pub env: BTreeMap<String, String>,
    /// The input, as JSON.
    pub input: Vec<u8>,
    /// The level.
    pub isolation: Isolation,
    /// Limits, already those that are applied.
    pub policy: SandboxPolicy,
    /// Wall time without the time held, ms.
    pub max_wall_ms: u64,
    /// Bytes of stdout, after which the run is killed.
    pub max_stdout_bytes: u64,
    /// The TCP ports that may be connected to where the level judges that.
    pub ports: Vec<u16>,
    /// Whether a box shows a socket of this process ([`Session::socket`]); for a level that is one.
    pub socket: bool,
}

/// Something that a run did.
#[derive(Debug)]
pub enum Event {
    /// Bytes of stdout.
    Output(Vec<u8>),
    /// A line of progress, as the command wrote it.
    Progress(Vec<u8>),
    /// It is over, and nothing of it is left.
    Ended(End),
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// Exit code of the command.
    pub code: Option<i32>,
    /// Signal that ended it.
    pub signal: Option<i32>,
    /// Why it was ended, if it did not end by itself.
    pub cause: Option<Cause>,
    /// Processor time, ms.
    pub cpu_ms: u64,
    /// Time held, ms.
    pub held_ms: u64,
    /// What was kept of stderr.
    pub stderr: Vec<u8>,
    /// Its end, [`STDERR_END`] bytes at most.
    pub stderr_end: Vec<u8>,
}

/// A run that goes on. Dropped before its end, it is killed by its supervisor.
#[derive(Debug)]
pub struct Session {
    told: FramedRead<ChildStdout, LengthDelimitedCodec>,
    /// None when the supervisor no longer takes orders.
    orders: Option<FramedWrite<ChildStdin, LengthDelimitedCodec>>,
    supervisor: Child,
    dir: PathBuf,
    socket: Option<UnixListener>,
    stderr: Vec<u8>,
    /// What followed after it, as far as it was the end.
    stderr_end: Vec<u8>,
    /// The last that was told, until it is passed on.
    report: Option<Report>,
    ended: bool,
}

impl Sandbox {
    /// Starts a run.
    ///
    /// # Errors
    /// [`SandboxError`]; then nothing runs.
    pub async fn start(&self, launch: Launch) -> Result<Session, SandboxError> {
        let run = run_id().map_err(SandboxError::Directory)?;
        let dir = self.settings.work_dir.join(&run);
        let session = match make_directory(&dir, &launch) {
            Ok((places, socket)) => {
                let started = self.start_in(&launch, &run, &dir, &places).await;
                started.map(|mut session| {
                    session.socket = socket;
                    session
                })
            }
            Err(error) => Err(SandboxError::Directory(error)),
        };
        if session.is_err() {
            leftovers::reap(&dir);
        }
        session
    }

    async fn start_in(
        &self,
        launch: &Launch,
        run: &str,
        dir: &Path,
        places: &Places,
    ) -> Result<Session, SandboxError> {
        let isolation = launch.isolation;
        let unavailable = |why| SandboxError::Unavailable(isolation.as_str(), why);
        let mut argv = launch.argv.clone();
        let mut read = self.settings.read_paths.clone();
        if let Some(program) = argv.first_mut().filter(|_| isolation != Isolation::Oci) {
            let found = find_program(program);
            *program =
                found.ok_or_else(|| unavailable(format!("there is no program {program}")))?;
            read.push(program.as_str().into());
        }
        let env = environment(launch, run, places);
        let container = format!("commsd-{run}");
        let boxed = Boxed {
            isolation,
            argv: &argv,
            env: &env,
            lent: &launch.env,
            policy: &launch.policy,
            places,
            read: &read,
            ports: &launch.ports,
            container: &container,
        };
        let confinement = boxed.confinement(self)?;
        let text = serde_json::to_string(&confinement).map_err(|e| unavailable(e.to_string()))?;
        let executable = self.executable.to_str();
        let executable = executable.ok_or_else(|| unavailable("its path is not UTF-8".into()))?;
        let engine = self.engine.as_ref().filter(|_| isolation == Isolation::Oci);
        // The engine's client needs to find its daemon and its storage; the command gets its own
        // variables from the engine.
        let env = if engine.is_some() { client_environment(run, &launch.env) } else { env };
        let start = Start {
            argv: [executable, FIRST_ARGUMENT, "confine", &text].map(str::to_owned).into(),
            env,
            cwd: places.work.clone(),
            record: dir.join(RECORD),
            progress: places.progress.clone(),
            disk: places.work.clone(),
            container: engine.map(|engine| (engine.program.clone(), container.clone())),
            watch: watch(launch),
        };
        let mut supervisor = Command::new(&self.executable)
            .args([FIRST_ARGUMENT, "supervise"])
            .env_clear()
            .env(RUN_VARIABLE, run)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(SandboxError::Supervisor)?;
        let streams = supervisor.stdin.take().zip(supervisor.stdout.take());
        let (stdin, stdout) = streams
            .ok_or_else(|| SandboxError::Supervisor(io::Error::other("it has no streams")))?;
        let mut session = Session {
            told: FramedRead::new(stdout, codec()),
            orders: Some(FramedWrite::new(stdin, codec())),
            supervisor,
            dir: dir.to_owned(),
            socket: None,
            stderr: Vec::new(),
            stderr_end: Vec::new(),
            report: None,
            ended: false,
        };
        session.order(&Order::Start(Box::new(start))).await;
        Ok(session)
    }
}

impl Session {
    /// The socket that the command can connect to, once.
    pub fn socket(&mut self) -> Option<UnixListener> {
        self.socket.take()
    }

    /// Passes bytes to the command's stdin. A command that does not read them loses them.
    pub async fn send(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(CHUNK) {
            self.order(&Order::Input(chunk.to_owned())).await;
        }
    }

    /// Closes the command's stdin.
    pub async fn end_input(&mut self) {
        self.order(&Order::EndInput).await;
    }

    /// Stops every process of the run where it is, or lets them go on (decision 46).
    pub async fn hold(&mut self, hold: bool) {
        self.order(&Order::Hold(hold)).await;
    }

    /// Ends the run: SIGTERM to its group, SIGKILL to every process 5,000 ms later.
    pub async fn stop(&mut self) {
        self.order(&Order::Stop).await;
    }

    /// An order that is not taken in time shows in the end of what is told.
    async fn order(&mut self, order: &Order) {
        let Some(orders) = &mut self.orders else { return };
        let Ok(bytes) = encode(order) else { return };
        let sent = tokio::time::timeout(ORDER, orders.send(bytes)).await;
        if !matches!(sent, Ok(Ok(()))) {
            self.orders = None;
        }
    }

    /// What the run did next. Cancel safe. After [`Event::Ended`] or an error there is no more.
    ///
    /// # Errors
    /// [`SandboxError::NotStarted`] when a stage refused, [`SandboxError::Lost`].
    pub async fn next(&mut self) -> Result<Event, SandboxError> {
        loop {
            if self.report.is_some() {
                let _reaped = self.supervisor.wait().await;
            }
            if let Some(report) = self.report.take() {
                return self.end(report);
            }
            let told = match self.told.next().await {
                Some(Ok(bytes)) => decode(&bytes).ok(),
                _ => None,
            };
            match told {
                Some(Told::Output(bytes)) => return Ok(Event::Output(bytes)),
                Some(Told::Progress(line)) => return Ok(Event::Progress(line)),
                Some(Told::Stderr(bytes)) => self.keep(&bytes),
                Some(Told::StderrEnd(bytes)) => self.stderr_end = bytes,
                Some(Told::Ended(report)) => self.report = Some(report),
                None => {
                    self.abandon();
                    return Err(SandboxError::Lost);
                }
            }
        }
    }

    fn keep(&mut self, bytes: &[u8]) {
        let most = usize::try_from(STDERR_MAX).unwrap_or(usize::MAX);
        let room = most.saturating_sub(self.stderr.len());
        self.stderr.extend_from_slice(bytes.get(..bytes.len().min(room)).unwrap_or_default());
    }

    fn end(&mut self, report: Report) -> Result<Event, SandboxError> {
        self.ended = true;
        self.orders = None;
        remove(&self.dir);
        if let Some(why) = report.not_started {
            return Err(SandboxError::NotStarted(why));
        }
        let stderr = std::mem::take(&mut self.stderr);
        let complaint = String::from_utf8_lossy(&stderr);
        if report.code == Some(i32::from(confine::NOT_STARTED))
            && let Some(why) = complaint.strip_prefix(confine::COMPLAINT)
        {
            let why = why.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect();
            return Err(SandboxError::NotStarted(why));
        }
        let Report { code, signal, cause, cpu_ms, held_ms, .. } = report;
        let mut stderr_end = [&stderr[..], &self.stderr_end].concat();
        stderr_end.drain(..stderr_end.len().saturating_sub(STDERR_END));
        Ok(Event::Ended(End { code, signal, cause, cpu_ms, held_ms, stderr, stderr_end }))
    }

    /// Kills a supervisor that does not do its work, and everything of the run. Blocking for the
    /// moment that the kernel needs.
    pub fn abandon(&mut self) {
        if !self.ended {
            self.ended = true;
            self.orders = None;
            leftovers::reap(&self.dir);
            let _ended_already = self.supervisor.start_kill();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.abandon();
    }
}

/// What the supervisor watches: what neither the kernel nor an engine keeps.
fn watch(launch: &Launch) -> Watch {
    let policy = &launch.policy;
    let watched = matches!(
        launch.isolation,
        Isolation::Namespace | Isolation::Kernel | Isolation::Subprocess
    );
    let when = |watched: bool, limit: u64| watched.then_some(limit);
    // The box and the stages before it are processes of the run as well.
    let stages = if in_box(launch.isolation) { 3 } else { 0 };
    Watch {
        wall_ms: launch.max_wall_ms,
        output_bytes: launch.max_stdout_bytes,
        cpu_ms: when(watched, policy.cpu_time_max_ms.get()),
        memory_bytes: when(watched, policy.memory_max_bytes.get()),
        pids: when(watched, policy.pids_max.get().saturating_add(stages)),
        // A box has a file system of that size.
        disk_bytes: when(watched && !in_box(launch.isolation), policy.disk_max_bytes.get()),
    }
}

/// A new run's name: [`PREFIX`] and 128 random bits.
fn run_id() -> io::Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(format!("{PREFIX}{}", BASE32_NOPAD.encode(&bytes).to_ascii_lowercase()))
}

/// Makes a run's directory. A container's user is another one, so it may read the input and write its
/// progress; the directory itself, which the container does not see, keeps all others out.
fn make_directory(dir: &Path, launch: &Launch) -> io::Result<(Places, Option<UnixListener>)> {
    let places = Places {
        work: dir.join("work"),
        input: dir.join("input.json"),
        progress: dir.join("progress"),
        socket: launch.socket.then(|| dir.join(SOCKET)),
    };
    for dir in [dir, &places.work] {
        DirBuilder::new().mode(0o700).create(dir)?;
    }
    // Read only for the run, whatever its level; the daemon does not write it again.
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o400)
        .open(&places.input)?
        .write_all(&launch.input)?;
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, &places.progress, mode)?;
    let socket = launch.socket.then(|| bind_in(dir)).transpose()?;
    if launch.isolation == Isolation::Oci {
        let socket = places.socket.as_ref().map(|socket| (socket, 0o622));
        for (path, mode) in
            [(&places.input, 0o444), (&places.progress, 0o622)].into_iter().chain(socket)
        {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
        }
    }
    Ok((places, socket))
}

/// Binds [`SOCKET`] in `dir`. A socket's address is shorter than a path can be, so on Linux the
/// directory is named by its descriptor.
fn bind_in(dir: &Path) -> io::Result<UnixListener> {
    let opened = std::fs::File::open(dir)?;
    let place = if cfg!(target_os = "linux") {
        PathBuf::from(format!("/proc/self/fd/{}", opened.as_raw_fd()))
    } else {
        dir.to_owned()
    };
    UnixListener::bind(place.join(SOCKET))
}

/// What a container engine's client is given of this process's environment, and what it is to pass on.
fn client_environment(run: &str, lent: &BTreeMap<String, String>) -> Vec<(String, String)> {
    let names = ["CONTAINER_HOST", "DOCKER_CONTEXT", "DOCKER_HOST", "HOME", "XDG_RUNTIME_DIR"];
    let given = names.into_iter().filter_map(|name| Some((name, std::env::var(name).ok()?)));
    let own = [("PATH", PATH.to_owned()), (RUN_VARIABLE, run.to_owned())];
    let own = given.chain(own).map(|(name, value)| (name.to_owned(), value));
    own.chain(lent.iter().map(|(name, value)| (name.clone(), value.clone()))).collect()
}

/// Removes a run's directory, also where the command took rights from itself.
fn remove(dir: &Path) {
    if std::fs::remove_dir_all(dir).is_ok() {
        return;
    }
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        let _tried_again_at_the_start =
            std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o700));
        let entries = std::fs::read_dir(&dir).into_iter().flatten().flatten();
        dirs.extend(
            entries.filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir())).map(|e| e.path()),
        );
    }
    let _tried_again_at_the_start = std::fs::remove_dir_all(dir);
}

/// The whole environment of a run: nothing is inherited.
fn environment(launch: &Launch, run: &str, places: &Places) -> Vec<(String, String)> {
    let [work, input, progress] = seen(launch.isolation, places)
        .map(|path| path.into_os_string().into_string().unwrap_or_default());
    let mut env = launch.env.clone();
    // TMPDIR is the working directory itself: a box's is empty at the start.
    for (name, value) in [
        ("HOME", work.as_str()),
        ("LANG", "C.UTF-8"),
        ("PATH", PATH),
        ("TASK_ID", launch.task_id.as_str()),
        ("TASK_INPUT_FILE", &input),
        ("TASK_PROGRESS_FILE", &progress),
        ("TMPDIR", &work),
        (RUN_VARIABLE, run),
    ] {
        env.insert(name.to_owned(), value.to_owned());
    }
    env.into_iter().collect()
}

/// The path of a program: itself if it is one, else where the fixed path has it.
pub(in crate::runtime) fn find_program(name: &str) -> Option<String> {
    let is_program = |path: &Path| {
        path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    if name.contains('/') {
        let path = std::path::absolute(name).ok()?;
        return path.to_str().filter(|_| is_program(&path)).map(str::to_owned);
    }
    PATH.split(':')
        .map(|dir| Path::new(dir).join(name))
        .find(|path| is_program(path))?
        .to_str()
        .map(str::to_owned)
}
