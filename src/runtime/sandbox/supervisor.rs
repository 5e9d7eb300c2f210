//! The supervisor of one run: a process of this executable between the daemon and the command. It
//! starts the command, carries its streams, watches its limits, and ends it with every process that
//! descends from it. It knows of no task and holds no secret.
//!
//! Its stdin and stdout carry the frames of [`super::frame`]. When its stdin ends the daemon is gone,
//! and the run is killed. It is a child subreaper: a process that leaves its parents falls to it,
//! and so cannot outlive the run.

use std::fs::File;
use std::io;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use futures_util::{SinkExt as _, StreamExt as _};
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, kill_process_group};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::pipe;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::codec::{FramedRead, FramedWrite};

use super::frame::{CHUNK, Cause, Order, Report, Start, Told, Watch, codec, decode, encode};
use super::leftovers::Record;
use super::{STDERR_END, STDERR_MAX, tree};

/// How often limits are looked at (decision 50).
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Looking may take one part in so many of the time: a machine with many processes is looked at
/// less often.
const LOOK_SHARE: u32 = 10;
/// From SIGTERM to SIGKILL (design 10.3).
const GRACE: Duration = Duration::from_millis(5_000);
/// How long processes may need to vanish after SIGKILL; only the kernel can make it longer.
const VANISH: Duration = Duration::from_secs(10);
/// How long streams may stay open when every process of the run is gone.
const DRAIN: Duration = Duration::from_secs(2);
/// How long a container engine may take for an order.
const ENGINE: Duration = Duration::from_secs(20);
/// Frames that wait for the daemon; when it does not read, the command's output waits.
const QUEUE: usize = 8;
/// Chunks of stdin, 4 MiB in all, that wait for the command: inputs are at most 2 MiB, and a
/// conversation with a server sends one message at a time.
const INPUT_WAITING: usize = 64;
/// Longest line of progress; the rest of a longer one is dropped.
const PROGRESS_LINE: usize = 4 << 10;

/// Runs the stage.
pub(super) fn main() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.and_then(|runtime| runtime.block_on(supervise())) {
        Ok(()) => ExitCode::SUCCESS,
        // The daemon sees a stream without its last frame, and reports that.
        Err(_) => ExitCode::FAILURE,
    }
}

async fn supervise() -> io::Result<()> {
    let input = std::os::fd::AsFd::as_fd(&io::stdin()).try_clone_to_owned()?;
    let output = std::os::fd::AsFd::as_fd(&io::stdout()).try_clone_to_owned()?;
    let mut orders = FramedRead::new(pipe::Receiver::from_owned_fd(input)?, codec());
    let (told, queue) = mpsc::channel(QUEUE);
    let writer = tokio::spawn(write(pipe::Sender::from_owned_fd(output)?, queue));
    let Some(first) = orders.next().await else { return Ok(()) };
    let Order::Start(start) = decode(&first?)? else {
        return Err(io::Error::other("the first order is not to start"));
    };
    // Away from the daemon's terminal and its signals: the daemon says when to stop.
    rustix::process::setsid()?;
    #[cfg(target_os = "linux")]
    rustix::process::set_child_subreaper(Some(getpid()))?;
    let report = match Run::start(&start, &told) {
        Ok(run) => run.watch(&mut orders).await?,
        Err(error) => Report { not_started: Some(error.to_string()), ..Report::default() },
    };
    let _the_daemon_is_gone = told.send(Told::Ended(report)).await;
    drop(told);
    let _the_daemon_is_gone = writer.await;
    Ok(())
}

/// Writes what is told, in order.
async fn write(output: pipe::Sender, mut queue: mpsc::Receiver<Told>) {
    let mut frames = FramedWrite::new(output, codec());
    while let Some(told) = queue.recv().await {
        let Ok(bytes) = encode(&told) else { return };
        if frames.send(bytes).await.is_err() {
            return;
        }
    }
}

/// How far the ending of a run is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    /// SIGTERM was sent; SIGKILL at the time.
    Ending(Instant),
}

struct Run {
    child: Pid,
    limits: Watch,
    disk: std::path::PathBuf,
    container: Option<(String, String)>,
    /// The environment that a container engine is called with.
    env: Vec<(String, String)>,
    input: Option<mpsc::Sender<Vec<u8>>>,
    overflow: mpsc::Receiver<()>,
    streams: Vec<JoinHandle<()>>,
    progress: JoinHandle<()>,
    started: Instant,
    /// Since when it is held, and for how long it was held before.
    held: Option<Instant>,
    held_before: Duration,
    phase: Phase,
    report: Report,
}

impl Run {
    fn start(start: &Start, told: &mpsc::Sender<Told>) -> io::Result<Self> {
        let (program, arguments) =
            start.argv.split_first().ok_or_else(|| io::Error::other("no program"))?;
        // Opened for both, so that it never ends while writers come and go.
        let progress = File::options().read(true).write(true).open(&start.progress)?;
        let progress = pipe::Receiver::from_file(progress)?;
        let mut record = Record::of_supervisor();
        record.container = start.container.clone();
        record.write(&start.record)?;
        let mut child = Command::new(program)
            .args(arguments)
            .env_clear()
            .envs(start.env.iter().map(|(name, value)| (name, value)))
            .current_dir(&start.cwd)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let pid = Pid::from_child(&child);
        record.add(pid);
        // The supervisor's record alone is enough to find the run again.
        let _found_by_its_parent = record.write(&start.record);
        let streams = child.stdin.take().zip(child.stdout.take()).zip(child.stderr.take());
        let ((stdin, stdout), stderr) = streams.ok_or_else(|| io::Error::other("no streams"))?;
        let (input, bytes) = mpsc::channel(INPUT_WAITING);
        tokio::spawn(feed(pipe::Sender::from_owned_fd(stdin.into())?, bytes));
        let (over, overflow) = mpsc::channel(1);
        let stdout = pipe::Receiver::from_owned_fd(stdout.into())?;
        let stderr = pipe::Receiver::from_owned_fd(stderr.into())?;
        let limit = start.watch.output_bytes;
        Ok(Self {
            child: pid,
            limits: start.watch,
            disk: start.disk.clone(),
            container: start.container.clone(),
            env: start.env.clone(),
            input: Some(input),
            overflow,
            streams: vec![
                tokio::spawn(carry(stdout, limit, over, told.clone())),
                tokio::spawn(carry_stderr(stderr, told.clone())),
            ],
            progress: tokio::spawn(carry_lines(progress, told.clone())),
            started: Instant::now(),
            held: None,
            held_before: Duration::ZERO,
            phase: Phase::Running,
            report: Report::default(),
        })
    }

    /// Watches until no process of the run is left.
    async fn watch(
        mut self,
        orders: &mut FramedRead<pipe::Receiver, tokio_util::codec::LengthDelimitedCodec>,
    ) -> io::Result<Report> {
        let mut children = signal(SignalKind::child())?;
        let mut look = tokio::time::Instant::now() + LOOK_EVERY;
        let mut ordered = true;
        while !self.reap() {
            tokio::select! {
                order = orders.next(), if ordered => match order {
                    Some(Ok(bytes)) => self.obey(decode(&bytes)?),
                    // The daemon is gone, or speaks another language.
                    Some(Err(_)) | None => {
                        ordered = false;
                        self.kill(Cause::Stopped);
                    }
                },
                _ = children.recv() => {}
                Some(()) = self.overflow.recv() => self.kill(Cause::Output),
                () = tokio::time::sleep_until(look) => {
                    let took = self.look();
                    look = tokio::time::Instant::now() + LOOK_EVERY.max(took * LOOK_SHARE);
                }
            }
        }
        self.end().await;
        Ok(self.report)
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Start(_) => {}
            Order::Input(bytes) => {
                let full = self.input.as_ref().is_some_and(|input| input.try_send(bytes).is_err());
                if full {
                    // It has closed its stdin, or does not read it: what it was to read is lost.
                    self.input = None;
                }
            }
            Order::EndInput => self.input = None,
            Order::Hold(true) => {
                self.held.get_or_insert_with(Instant::now);
                self.pause(true);
            }
            Order::Hold(false) => self.release(),
            Order::Stop => self.terminate(Cause::Stopped),
        }
    }

    /// Looks at the limits; returns how long that took.
    fn look(&mut self) -> Duration {
        let began = Instant::now();
        if let Phase::Ending(at) = self.phase {
            if began >= at {
                self.kill_now();
            }
            return began.elapsed();
        }
        if self.held.is_some() {
            // One that was born while the others were stopped.
            self.pause(true);
            return began.elapsed();
        }
        let running = self.started.elapsed().saturating_sub(self.held_before);
        if running >= Duration::from_millis(self.limits.wall_ms) {
            self.terminate(Cause::Wall);
            return began.elapsed();
        }
        let me = getpid();
        let found = tree::descendants(me);
        let used = tree::usage(me, &found);
        self.report.cpu_ms = self.report.cpu_ms.max(used.cpu_ms);
        let over = |used: u64, limit: Option<u64>| limit.is_some_and(|limit| used > limit);
        if over(used.processes, self.limits.pids) {
            self.kill(Cause::Processes);
        } else if over(used.memory_bytes, self.limits.memory_bytes) {
            self.kill(Cause::Memory);
        } else if over(used.cpu_ms, self.limits.cpu_ms) {
            self.kill(Cause::Cpu);
        } else if self.limits.disk_bytes.is_some()
            && over(tree::disk_bytes(&self.disk), self.limits.disk_bytes)
        {
            self.kill(Cause::Disk);
        }
        began.elapsed()
    }

    fn pause(&mut self, stop: bool) {
        if let Some((engine, name)) = &self.container {
            let order = if stop { "pause" } else { "unpause" };
            let _said_once_is_enough = engine_order(engine, &[order, name], &self.env);
        }
        let signal = if stop { Signal::STOP } else { Signal::CONT };
        for process in tree::descendants(getpid()) {
            process.signal(signal);
        }
        // Where processes cannot be seen, the group is all there is.
        let _gone = kill_process_group(self.child, signal);
    }

    fn release(&mut self) {
        if let Some(since) = self.held.take() {
            self.held_before += since.elapsed();
            self.pause(false);
        }
    }

    /// Asks the command to end; it is killed when it takes too long.
    fn terminate(&mut self, cause: Cause) {
        if self.phase == Phase::Running {
            self.phase = Phase::Ending(Instant::now() + GRACE);
            self.report.cause.get_or_insert(cause);
            if kill_process_group(self.child, Signal::TERM).is_err() {
                // It has no group of its own yet.
                let _gone = kill_process(self.child, Signal::TERM);
            }
            self.release();
        }
    }

    fn kill(&mut self, cause: Cause) {
        self.report.cause.get_or_insert(cause);
        self.phase = Phase::Ending(Instant::now() + GRACE);
        self.kill_now();
    }

    /// Kills every process of the run. Stopped first, a process cannot start another one meanwhile.
    fn kill_now(&mut self) {
        let _gone = kill_process_group(self.child, Signal::KILL);
        let found = tree::descendants(getpid());
        for signal in [Signal::STOP, Signal::KILL] {
            for process in &found {
                process.signal(signal);
            }
        }
    }

    /// Takes the exit codes of those who have ended; whether the command is among them.
    fn reap(&mut self) -> bool {
        let mut ended = false;
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            if pid == self.child {
                ended = true;
                self.report.code = status.exit_status();
                self.report.signal = status.terminating_signal();
            }
        }
        ended
    }

    /// The command has ended: kills who is left of it, and waits for its streams.
    async fn end(&mut self) {
        let late = Instant::now() + VANISH;
        loop {
            self.kill_now();
            self.reap();
            if tree::descendants(getpid()).is_empty() || Instant::now() >= late {
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        if let Some((engine, name)) = &self.container {
            remove_container(engine, name, &self.env).await;
        }
        let now = Instant::now();
        let held = self.held_before + self.held.map_or(Duration::ZERO, |since| now - since);
        self.report.held_ms = u64::try_from(held.as_millis()).unwrap_or(u64::MAX);
        // A process namespace that is killed takes what it used with it, so what was seen counts too.
        self.report.cpu_ms = self.report.cpu_ms.max(tree::usage(getpid(), &[]).cpu_ms);
        let drained = async {
            for stream in &mut self.streams {
                let _ended = stream.await;
            }
        };
        let _a_stranger_holds_it = tokio::time::timeout(DRAIN, drained).await;
        // What a command wrote just before it ended counts like all else.
        if self.overflow.try_recv().is_ok() {
            self.report.cause.get_or_insert(Cause::Output);
        }
        self.streams.iter().for_each(JoinHandle::abort);
        self.progress.abort();
    }
}

/// An order to a container engine, not waited for.
fn engine_order(
    engine: &str,
    arguments: &[&str],
    env: &[(String, String)],
) -> io::Result<std::process::Child> {
    Command::new(engine)
        .args(arguments)
        .env_clear()
        .envs(env.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
}

/// Removes the container, which does not end with the engine's client.
async fn remove_container(engine: &str, name: &str, env: &[(String, String)]) {
    let Ok(mut child) = engine_order(engine, &["rm", "--force", name], env) else { return };
    let late = Instant::now() + ENGINE;
    while Instant::now() < late && matches!(child.try_wait(), Ok(None)) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let _ended_already = child.kill();
    let _reaped = child.wait();
}

/// Writes to the command's stdin; closes it at the end.
async fn feed(mut stdin: pipe::Sender, mut bytes: mpsc::Receiver<Vec<u8>>) {
    while let Some(bytes) = bytes.recv().await {
        if stdin.write_all(&bytes).await.is_err() {
            return;
        }
    }
}

/// Carries a stream of the command to the daemon, `limit` bytes of it; the rest is read and dropped,
/// and `over` hears of it.
async fn carry(
    mut stream: pipe::Receiver,
    limit: u64,
    over: mpsc::Sender<()>,
    told: mpsc::Sender<Told>,
) {
    let mut left = usize::try_from(limit).unwrap_or(usize::MAX);
    let mut buffer = vec![0; CHUNK];
    while let Ok(count) = stream.read(&mut buffer).await {
        let Some(bytes) = buffer.get(..count.min(left)).filter(|_| count > 0) else { return };
        if count > left {
            let _said_already = over.try_send(());
        }
        left -= bytes.len();
        if !bytes.is_empty() && told.send(Told::Output(bytes.to_vec())).await.is_err() {
            return;
        }
    }
}

/// Carries the beginning of stderr, and when it ends the end of the rest.
async fn carry_stderr(mut stream: pipe::Receiver, told: mpsc::Sender<Told>) {
    let mut left = usize::try_from(STDERR_MAX).unwrap_or(usize::MAX);
    let mut end = Vec::new();
    let mut buffer = vec![0; CHUNK];
    while let Ok(count @ 1..) = stream.read(&mut buffer).await {
        let (first, rest) = buffer.get(..count).unwrap_or_default().split_at(count.min(left));
        left -= first.len();
        end.extend_from_slice(rest);
        end.drain(..end.len().saturating_sub(STDERR_END));
        if !first.is_empty() && told.send(Told::Stderr(first.to_vec())).await.is_err() {
            return;
        }
    }
    if !end.is_empty() {
        // Nobody may be there any more.
        let _unheard = told.send(Told::StderrEnd(end)).await;
    }
}

/// Carries lines of progress; when the daemon is slow, they are dropped.
async fn carry_lines(mut stream: pipe::Receiver, told: mpsc::Sender<Told>) {
    let mut line = Vec::new();
    let mut buffer = vec![0; PROGRESS_LINE];
    while let Ok(count) = stream.read(&mut buffer).await {
        for byte in buffer.iter().take(count) {
            if *byte == b'\n' {
                // Output and the end must always find a place.
                if told.capacity() > QUEUE / 2 {
                    let _dropped = told.try_send(Told::Progress(std::mem::take(&mut line)));
                }
                line.clear();
            } else if line.len() < PROGRESS_LINE {
                line.push(*byte);
            }
        }
    }
}
