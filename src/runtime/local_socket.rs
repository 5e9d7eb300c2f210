//! The daemon's end of the local API: owns the Unix socket, reads and writes its lines, and keeps
//! every connection within its limits. Requests go to the daemon as [`LocalInput`]s, answers and
//! notifications come back through a [`LocalHandle`]. What a request means is not known here; only
//! `hello`, the agreement on a version, is answered on the spot.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, mpsc};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::sys;
use crate::api::endpoint::{MAX_SOCKET_PATH, directory_fault};
use crate::api::types::rpc::{self, RawRequest};
use crate::api::types::{
    API_VERSION, ApiError, ApiLimits, Closing, HelloParams, HelloResult, LimitInfo, MAX_LINE_BYTES,
    MAX_PAGE, MAX_REQUESTS_IN_FLIGHT, MAX_TEXT_BYTES, MAX_WAIT_SECS, PROGRAM_VERSION, Request,
    RequestId, notification,
};
use crate::mesh::log::{Level, Spec};

/// Connections waiting to be accepted; the usual system maximum on small machines.
const LISTEN_BACKLOG: i32 = 128;

/// How long accepting rests when the system is out of descriptors or memory: long enough not to spin,
/// short enough that nobody notices once something has been closed.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// Bytes read at once; most lines fit.
const READ_CHUNK: usize = 4 * 1024;

/// A connection's read buffer goes back to the system when it has grown beyond this, so that many
/// idle connections stay cheap.
const KEPT_READ_BUFFER: usize = 16 * 1024;

/// Small lines are written together up to this size, to save system calls.
const WRITE_CHUNK: usize = 64 * 1024;

/// Room that a chunk begins with; most lines fit.
const FIRST_LINE: usize = 512;

/// What a client goes on sending after the last line to it was written is read and dropped for so
/// long: were it left unread, the system would tell the client of an error instead of that line.
const LINGER: Duration = Duration::from_millis(1000);

/// At most so much of it; more than the longest line and the requests behind it.
const LINGER_BYTES: usize = 16 * MAX_LINE_BYTES;

/// Refused connections that linger at the same time; further ones are dropped at once.
const LINGERING: usize = 32;

/// A newcomer reads the lock's content again so many times, 10 ms apart, in case its owner has only
/// just taken it and not yet written who it is.
const HOLDER_READS: u32 = 20;

/// Every event that the local socket emits: name, level, fields, meaning.
pub const CATALOGUE: &[Spec] = &[
    (
        "local_accept_paused",
        Level::Warn,
        &["error"],
        "no descriptors or memory for new clients; open connections go on",
    ),
    ("local_accept_resumed", Level::Info, &[], "new clients are accepted again"),
    ("local_foreign_user", Level::Warn, &["uid"], "another user's connection was refused"),
    (
        "local_peer_unknown",
        Level::Warn,
        &["error"],
        "the system does not tell whose a connection is",
    ),
    (
        "local_closed",
        Level::Info,
        &["conn", "pid", "reason"],
        "a client was let go for what it did or did not do",
    ),
    (
        "local_answer_unasked",
        Level::Debug,
        &["conn"],
        "an answer without its request was dropped; a fault of the daemon",
    ),
];

// ---------------------------------------------------------------------------------------------
// Ownership of the socket

/// The local socket cannot be owned or bound.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Longer than `sun_path`.
    #[error(
        "the socket path has {len} bytes but this system takes at most {MAX_SOCKET_PATH}: {path}",
        path = path.display()
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        len: usize,
    },
    /// The directory cannot protect the socket.
    #[error("the socket's directory {dir} {what}", dir = dir.display())]
    Directory {
        /// The directory.
        dir: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// Something that is not a socket has the name.
    #[error("{path} exists and is not a socket", path = path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The system refused.
    #[error("cannot {what} {path}: {source}", path = path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl SocketError {
    /// Stable name.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::PathTooLong { .. } => "socket_path_too_long",
            Self::Directory { .. } => "socket_directory",
            Self::NotASocket { .. } => "socket_name_taken",
            Self::Io { .. } => "socket_io",
        }
    }

    /// What to do about it.
    #[must_use]
    pub fn todo(&self) -> String {
        match self {
            Self::PathTooLong { .. } => "choose a shorter one with --socket or --home".into(),
            Self::Directory { dir, .. } => {
                format!("use a directory that only you can enter, e.g. chmod 700 {}", dir.display())
            }
            Self::NotASocket { .. } => "remove it, or choose another one with --socket".into(),
            Self::Io { .. } => "check the path and its permissions".into(),
        }
    }

    fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, path: path.to_owned(), source }
    }
}

/// Who owns a socket. Nothing is known of an owner that has only just started; it is an owner all the
/// same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its process.
    pub pid: Option<u32>,
    /// Its program version.
    pub version: Option<String>,
    /// The socket.
    pub socket: PathBuf,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let socket = self.socket.display();
        match (self.pid, &self.version) {
            (Some(pid), Some(version)) => {
                write!(f, "commsd {version} runs as process {pid} at {socket}")
            }
            _ => write!(f, "another commsd, not yet known by name, runs at {socket}"),
        }
    }
}

/// What the owner writes into the lock file.
#[derive(Serialize, Deserialize)]
struct LockText {
    pid: u32,
    version: String,
    /// For people who look at the file.
    socket: String,
}

/// The outcome of [`claim`].
#[derive(Debug)]
pub enum Claim {
    /// The socket is ours until the value is dropped.
    Ours(SocketClaim),
    /// Another daemon has it.
    Theirs(Holder),
}

/// The right to bind a socket: a lock that the system ends with the process, however it ends.
#[derive(Debug)]
pub struct SocketClaim {
    socket: PathBuf,
    lock: File,
}

/// Takes the lock `<socket>.lock`. Whether the owner answers is never asked: a busy daemon is still
/// the owner.
///
/// # Errors
/// [`SocketError`] for a path that is too long, or a directory that is not ours alone.
pub fn claim(socket: &Path) -> Result<Claim, SocketError> {
    let len = socket.as_os_str().len();
    if len > MAX_SOCKET_PATH {
        return Err(SocketError::PathTooLong { path: socket.to_owned(), len });
    }
    prepare_directory(socket.parent().unwrap_or(Path::new(".")))?;

    let mut name = socket.as_os_str().to_owned();
    name.push(".lock");
    let path = PathBuf::from(name);
    let mut lock = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(SocketError::io("open", &path))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(fs::TryLockError::WouldBlock) => return Ok(Claim::Theirs(read_holder(lock, socket))),
        Err(fs::TryLockError::Error(e)) => return Err(SocketError::io("lock", &path)(e)),
    }
    let text = LockText {
        pid: std::process::id(),
        version: PROGRAM_VERSION.into(),
        socket: socket.to_string_lossy().into_owned(),
    };
    let text = serde_json::to_vec(&text).map_err(io::Error::from);
    text.and_then(|text| lock.set_len(0).and_then(|()| lock.write_all(&text)))
        .map_err(SocketError::io("write", &path))?;
    Ok(Claim::Ours(SocketClaim { socket: socket.to_owned(), lock }))
}

/// Creates the directory with mode 0700, or checks that an existing one is ours and closed to others.
fn prepare_directory(dir: &Path) -> Result<(), SocketError> {
    // An empty parent means the working directory.
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(SocketError::io("create", dir))?;
    let meta = fs::metadata(dir).map_err(SocketError::io("look at", dir))?;
    match directory_fault(meta.uid(), meta.mode(), sys::uid()) {
        None => Ok(()),
        Some(what) => Err(SocketError::Directory { dir: dir.to_owned(), what }),
    }
}

/// What the owner wrote into the lock.
fn read_holder(mut lock: File, socket: &Path) -> Holder {
    for _ in 0..HOLDER_READS {
        let mut text = String::new();
        let read = lock.rewind().and_then(|()| lock.read_to_string(&mut text));
        if let (Ok(_), Ok(LockText { pid, version, .. })) = (read, serde_json::from_str(&text)) {
            let socket = socket.to_owned();
            return Holder { pid: Some(pid), version: Some(version), socket };
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Holder { pid: None, version: None, socket: socket.to_owned() }
}

impl SocketClaim {
    /// Binds and listens. A socket file left behind by a dead daemon is replaced.
    ///
    /// The socket has its final mode before anyone can connect, without touching the process's umask:
    /// the mode is set on the descriptor before `bind` creates the name (Linux takes it over), and
    /// checked on the name before `listen`, until which connecting is refused. Systems that ignore a
    /// socket's mode are protected by the directory.
    ///
    /// Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn bind(self) -> Result<LocalListener, SocketError> {
        let path = self.socket.as_path();
        match fs::symlink_metadata(path) {
            Ok(meta) if meta.file_type().is_socket() => {
                fs::remove_file(path).map_err(SocketError::io("remove the old socket", path))?;
            }
            Ok(_) => return Err(SocketError::NotASocket { path: path.to_owned() }),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(SocketError::io("look at", path)(e)),
        }
        let listener = listen_at(path).map_err(SocketError::io("listen at", path))?;
        let meta = fs::symlink_metadata(path).map_err(SocketError::io("look at", path))?;
        Ok(LocalListener { listener, file: (meta.dev(), meta.ino()), claim: self })
    }
}

impl Drop for SocketClaim {
    fn drop(&mut self) {
        // Whoever comes next must not read our name. The file stays: removing a lock file lets two
        // processes lock two files of the same name.
        let _ = self.lock.set_len(0);
    }
}

fn listen_at(path: &Path) -> io::Result<UnixListener> {
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    // Only Linux has a mode on an unbound socket; the check below covers the others.
    let _ = rustix::fs::fchmod(&socket, mode);
    socket.bind(&socket2::SockAddr::unix(path)?)?;
    if fs::symlink_metadata(path)?.mode() & 0o7777 != 0o600 {
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    }
    socket.listen(LISTEN_BACKLOG)?;
    UnixListener::from_std(OwnedFd::from(socket).into())
}

/// A bound socket. Dropping it removes the socket's name, then releases the lock.
#[derive(Debug)]
pub struct LocalListener {
    listener: UnixListener,
    /// Device and inode of the socket file, so that only our own is ever removed.
    file: (u64, u64),
    claim: SocketClaim,
}

impl LocalListener {
    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.claim.socket
    }

    fn remove_name(&self) {
        let path = self.path();
        if fs::symlink_metadata(path).is_ok_and(|meta| (meta.dev(), meta.ino()) == self.file) {
            let _ = fs::remove_file(path);
        }
    }
}

impl Drop for LocalListener {
    fn drop(&mut self) {
        self.remove_name();
    }
}

// ---------------------------------------------------------------------------------------------
// What the daemon sees

/// Names a connection; never used twice by one daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(pub u64);

/// Stable name of why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CloseReason(pub &'static str);

impl CloseReason {
    /// The client closed it.
    pub const CLIENT: Self = Self("client");
    /// The client did not read what it was sent.
    pub const SLOW_CONSUMER: Self = Self("slow_consumer");
    /// The client sent a line that is too long.
    pub const LINE_TOO_LONG: Self = Self("line_too_long");
    /// The client began a line and did not finish it in time.
    pub const LINE_TIMEOUT: Self = Self("line_timeout");
    /// The client did not say a fitting `hello` first.
    pub const HELLO: Self = Self("hello");
    /// Reading or writing failed.
    pub const IO: Self = Self("io");
    /// The daemon goes down.
    pub const SHUTDOWN: Self = Self("shutdown");
}

/// What happens on the connections, in order for each of them: `Connected`, any number of `Request`s,
/// `Disconnected`. A connection without a proper `hello` never shows up.
#[derive(Debug)]
pub enum LocalInput {
    /// A client has said `hello`.
    Connected {
        /// The new connection.
        conn: ConnId,
        /// The client's user, as the system says: always the daemon's own.
        uid: u32,
        /// The client's process, where the system tells.
        pid: Option<u32>,
        /// What the client says it is.
        hello: HelloParams,
    },
    /// A client asks; answer with [`LocalHandle::reply`], in any order.
    Request {
        /// Who.
        conn: ConnId,
        /// For the answer.
        id: RequestId,
        /// What; never `hello`.
        request: Request,
    },
    /// A connection is gone. Requests not yet answered are forgotten.
    Disconnected {
        /// Which.
        conn: ConnId,
        /// Why.
        reason: CloseReason,
    },
}

/// Something could not be sent to a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotifyError {
    /// The connection is gone or about to be; `Disconnected` tells why.
    #[error("the connection is closed")]
    Closed,
    /// It does not fit into a line.
    #[error("the notification does not fit into {MAX_LINE_BYTES} bytes")]
    TooLarge,
}

/// Counters for `status` and `doctor`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LocalStats {
    /// Open connections, those without `hello` included.
    pub connections: u64,
    /// Connections refused because there were too many.
    pub refused: u64,
    /// Connections closed as [`CloseReason::SLOW_CONSUMER`].
    pub slow_consumers: u64,
    /// Whether accepting rests because the system is out of descriptors or memory.
    pub accept_paused: bool,
}

/// What a connection, and all of them together, may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketLimits {
    /// Connections at the same time; one more is told `too_many_connections` and closed.
    pub connections: usize,
    /// Unanswered requests of one connection.
    pub requests_in_flight: usize,
    /// Bytes that may wait for a client that does not read; eight of the longest lines. Its events
    /// are kept elsewhere, so cutting it off loses nothing.
    pub outbound_bytes: usize,
    /// From accept to a complete `hello`: a client sends it at once.
    pub hello_timeout: Duration,
    /// From the first byte of a line to its last. A quiet connection is fine, a half line is not.
    pub line_timeout: Duration,
    /// How long one write may make no headway; a stopped process is cut off, not waited for.
    pub write_timeout: Duration,
    /// How long a closing connection may take to send what is queued.
    pub drain_timeout: Duration,
}

impl Default for SocketLimits {
    fn default() -> Self {
        Self {
            connections: 1024,
            requests_in_flight: MAX_REQUESTS_IN_FLIGHT,
            outbound_bytes: 8 * MAX_LINE_BYTES,
            hello_timeout: Duration::from_secs(5),
            line_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(30),
            drain_timeout: Duration::from_secs(2),
        }
    }
}

impl SocketLimits {
    /// The defaults, with connections kept to half of `descriptors`: the other half is for the mesh
    /// and the store, which must go on when clients are many.
    #[must_use]
    pub fn with_descriptors(descriptors: u64) -> Self {
        let half = usize::try_from(descriptors / 2).unwrap_or(usize::MAX);
        let default = Self::default();
        Self { connections: default.connections.min(half), ..default }
    }

    /// These limits and those of the API itself, for `status` with `limits`.
    #[must_use]
    pub fn list(&self) -> Vec<LimitInfo> {
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let rows = [
            ("local_connections", self.connections as u64, "connections", "clients at a time"),
            (
                "local_requests_in_flight",
                self.requests_in_flight as u64,
                "requests",
                "unanswered requests of a client",
            ),
            (
                "local_outbound",
                self.outbound_bytes as u64,
                "bytes",
                "what waits for a client that does not read",
            ),
            ("local_line", MAX_LINE_BYTES as u64, "bytes", "a line of the local API"),
            ("local_text", MAX_TEXT_BYTES as u64, "bytes", "the text of a message"),
            ("local_wait", MAX_WAIT_SECS * 1_000, "ms", "how long a request may wait"),
            ("local_page", MAX_PAGE, "entries", "entries in one answer"),
            ("local_hello", ms(self.hello_timeout), "ms", "from connecting to a complete hello"),
            (
                "local_line_time",
                ms(self.line_timeout),
                "ms",
                "from a line's first byte to its last",
            ),
            ("local_write", ms(self.write_timeout), "ms", "how long a client may not read"),
            ("local_drain", ms(self.drain_timeout), "ms", "for what is queued when closing"),
        ];
        rows.into_iter()
            .map(|(name, value, unit, text)| LimitInfo {
                name: name.into(),
                value,
                unit: unit.into(),
                text: text.into(),
            })
            .collect()
    }
}

/// Sends to clients. Cheap to clone; never waits.
#[derive(Clone, Debug)]
pub struct LocalHandle {
    shared: Arc<Shared>,
}

impl LocalHandle {
    /// Answers a request. Without effect when the connection is gone or has no such request.
    pub fn reply(&self, conn: ConnId, id: &RequestId, result: &impl Serialize) {
        self.answer(conn, id, |out| rpc::answer_line(out, Some(id), result));
    }

    /// Answers a request that was not done, as [`Self::reply`].
    pub fn refuse(&self, conn: ConnId, id: &RequestId, error: ApiError) {
        self.answer(conn, id, |out| rpc::error_line(out, Some(id), error));
    }

    fn answer(&self, conn: ConnId, id: &RequestId, write: impl FnOnce(&mut Vec<u8>)) {
        let Some(conn) = self.shared.find(conn) else { return };
        if conn.in_flight.lock().remove(id) {
            conn.outbound.push(write);
        } else {
            tracing::debug!(event = "local_answer_unasked", conn = conn.id.0);
        }
    }

    /// Sends a notification.
    ///
    /// # Errors
    /// [`NotifyError`]; nothing was sent then.
    pub fn notify(
        &self,
        conn: ConnId,
        method: &str,
        params: &impl Serialize,
    ) -> Result<(), NotifyError> {
        let conn = self.shared.find(conn).ok_or(NotifyError::Closed)?;
        let mut fits = true;
        let queued = conn.outbound.push(|out| fits = rpc::notification_line(out, method, params));
        match (queued, fits) {
            (_, false) => Err(NotifyError::TooLarge),
            (false, _) => Err(NotifyError::Closed),
            _ => Ok(()),
        }
    }

    /// Tells the client why and closes, once what is queued is written or the deadline is over.
    pub fn close(&self, conn: ConnId, reason: CloseReason) {
        if let Some(conn) = self.shared.find(conn) {
            conn.outbound.close(reason);
        }
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> LocalStats {
        let shared = &self.shared;
        LocalStats {
            connections: shared.open.load(Ordering::Relaxed),
            refused: shared.refused.load(Ordering::Relaxed),
            slow_consumers: shared.slow_consumers.load(Ordering::Relaxed),
            accept_paused: shared.accept_paused.load(Ordering::Relaxed),
        }
    }
}

// ---------------------------------------------------------------------------------------------
// Accepting

#[derive(Debug)]
struct Shared {
    limits: SocketLimits,
    /// Connections after `hello`.
    conns: Mutex<HashMap<ConnId, Arc<Conn>>>,
    open: AtomicU64,
    refused: AtomicU64,
    slow_consumers: AtomicU64,
    accept_paused: AtomicBool,
}

impl Shared {
    fn find(&self, conn: ConnId) -> Option<Arc<Conn>> {
        self.conns.lock().get(&conn).cloned()
    }
}

/// A running server.
#[derive(Debug)]
pub struct LocalServer {
    /// Sends to its clients.
    pub handle: LocalHandle,
    /// Ends when the server has stopped: the socket's name is gone, every connection is closed and the
    /// lock is released.
    pub task: JoinHandle<()>,
}

impl LocalListener {
    /// Serves clients until `stop` is cancelled; then nobody new is accepted, and open connections
    /// are told `shutdown` and closed within the drain deadline.
    #[must_use]
    pub fn serve(
        self,
        limits: SocketLimits,
        inputs: mpsc::Sender<LocalInput>,
        stop: CancellationToken,
    ) -> LocalServer {
        let shared = Arc::new(Shared {
            limits,
            conns: Mutex::new(HashMap::new()),
            open: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            slow_consumers: AtomicU64::new(0),
            accept_paused: AtomicBool::new(false),
        });
        let handle = LocalHandle { shared: Arc::clone(&shared) };
        let task = tokio::spawn(async move {
            let mut conns = JoinSet::new();
            tokio::select! {
                () = accept(&self.listener, &shared, &inputs, &stop, &mut conns) => {}
                () = stop.cancelled() => {}
            }
            // Nobody connects any more, but the lock is kept until the last connection is closed.
            self.remove_name();
            let drained = async { while conns.join_next().await.is_some() {} };
            // Twice the drain deadline: once for the connection, once for the daemon to take note.
            if timeout(limits.drain_timeout * 2, drained).await.is_err() {
                conns.shutdown().await;
            }
            drop(self);
        });
        LocalServer { handle, task }
    }
}

/// Accepts for ever; `conns` are the tasks of open connections.
async fn accept(
    listener: &UnixListener,
    shared: &Arc<Shared>,
    inputs: &mpsc::Sender<LocalInput>,
    stop: &CancellationToken,
    conns: &mut JoinSet<()>,
) {
    let own_uid = sys::uid();
    let mut next = 0;
    let mut lingering = JoinSet::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) if has_gone(&error) => continue,
            Err(error) => {
                if !shared.accept_paused.swap(true, Ordering::Relaxed) {
                    tracing::warn!(event = "local_accept_paused", %error);
                }
                sleep(ACCEPT_BACKOFF).await;
                continue;
            }
        };
        if shared.accept_paused.swap(false, Ordering::Relaxed) {
            tracing::info!(event = "local_accept_resumed");
        }
        let pid = match stream.peer_cred() {
            Ok(cred) if may_connect(cred.uid(), own_uid) => {
                cred.pid().and_then(|pid| u32::try_from(pid).ok())
            }
            Ok(cred) => {
                tracing::warn!(event = "local_foreign_user", uid = cred.uid());
                continue;
            }
            Err(error) => {
                tracing::warn!(event = "local_peer_unknown", %error);
                continue;
            }
        };
        // What has ended meanwhile makes room.
        while conns.try_join_next().is_some() {}
        if conns.len() >= shared.limits.connections {
            shared.refused.fetch_add(1, Ordering::Relaxed);
            let refused = refuse(stream, shared.limits.connections);
            while lingering.try_join_next().is_some() {}
            if let Some(stream) = refused
                && lingering.len() < LINGERING
            {
                lingering.spawn(linger(stream, LINGER));
            }
            continue;
        }
        next += 1;
        let conn = Conn {
            id: ConnId(next),
            uid: own_uid,
            pid,
            in_flight: Mutex::new(HashSet::new()),
            outbound: Outbound::new(shared.limits.outbound_bytes),
        };
        let (shared, inputs, stop) = (Arc::clone(shared), inputs.clone(), stop.clone());
        conns.spawn(async move {
            shared.open.fetch_add(1, Ordering::Relaxed);
            serve_connection(stream, Arc::new(conn), &shared, &inputs, &stop).await;
            shared.open.fetch_sub(1, Ordering::Relaxed);
        });
    }
}

/// Whether something failed only because the client has gone away, e.g. with answers unread.
fn has_gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
    )
}

/// Only the user that the daemon runs as; not root either, which has its own daemon.
fn may_connect(peer_uid: u32, own_uid: u32) -> bool {
    peer_uid == own_uid
}

/// Says why before the connection is dropped. A fresh socket takes so short a line at once.
fn refuse(stream: UnixStream, limit: usize) -> Option<UnixStream> {
    let error = ApiError::new(
        ApiError::TOO_MANY_CONNECTIONS,
        format!("the daemon already serves {limit} connections"),
        "close clients that are no longer used, or raise the descriptor limit (ulimit -n)",
    );
    let mut line = Vec::new();
    rpc::error_line(&mut line, None, error);
    // Not through tokio, which has not yet heard that the socket is writable.
    let mut stream = stream.into_std().ok()?;
    stream.write_all(&line).ok()?;
    UnixStream::from_std(stream).ok()
}

// ---------------------------------------------------------------------------------------------
// One connection

#[derive(Debug)]
struct Conn {
    id: ConnId,
    uid: u32,
    pid: Option<u32>,
    in_flight: Mutex<HashSet<RequestId>>,
    outbound: Outbound,
}

async fn serve_connection(
    mut stream: UnixStream,
    conn: Arc<Conn>,
    shared: &Shared,
    inputs: &mpsc::Sender<LocalInput>,
    stop: &CancellationToken,
) {
    let mut connected = false;
    let (reason, told) = {
        let (reader, writer) = stream.split();
        let mut writing = pin!(write_lines(writer, &conn.outbound, shared.limits.write_timeout));
        let mut written = false;
        let reason = tokio::select! {
            reason = read_requests(reader, &conn, shared, inputs, &mut connected) => reason,
            fault = &mut writing => {
                written = true;
                fault.err().unwrap_or(CloseReason::CLIENT)
            }
            reason = conn.outbound.closing() => reason,
            () = stop.cancelled() => CloseReason::SHUTDOWN,
        };
        let reason = conn.outbound.close(reason);
        // The client may have gone, or not be reading; then there is nobody to tell.
        let told =
            !written && matches!(timeout(shared.limits.drain_timeout, writing).await, Ok(Ok(())));
        (reason, told)
    };
    if reason == CloseReason::SLOW_CONSUMER {
        shared.slow_consumers.fetch_add(1, Ordering::Relaxed);
    }
    if reason != CloseReason::CLIENT && reason != CloseReason::SHUTDOWN {
        tracing::info!(event = "local_closed", conn = conn.id.0, pid = conn.pid, reason = reason.0);
    }
    if connected {
        shared.conns.lock().remove(&conn.id);
        // Fails only when the daemon has already stopped listening.
        let _ = inputs.send(LocalInput::Disconnected { conn: conn.id, reason }).await;
    }
    if told && reason != CloseReason::CLIENT {
        // At the end of the daemon, nobody is waited for.
        let time = if reason == CloseReason::SHUTDOWN { Duration::ZERO } else { LINGER };
        linger(stream, time).await;
    }
}

/// Says that no more comes, and drops what the client has sent or sends, until it closes, within
/// bounds; then what it was told reaches it.
async fn linger(mut stream: UnixStream, time: Duration) {
    let _ = stream.shutdown().await;
    let drained = async {
        let mut dropped = 0;
        let mut chunk = vec![0; KEPT_READ_BUFFER];
        while dropped < LINGER_BYTES {
            match stream.read(&mut chunk).await {
                Ok(0) | Err(_) => return,
                Ok(read) => dropped += read,
            }
        }
    };
    let _ = timeout(time, drained).await;
}

/// Reads until the connection ends; returns why.
async fn read_requests(
    reader: impl AsyncRead + Unpin,
    conn: &Arc<Conn>,
    shared: &Shared,
    inputs: &mpsc::Sender<LocalInput>,
    connected: &mut bool,
) -> CloseReason {
    let limits = &shared.limits;
    let mut lines = Lines::new(reader, limits.line_timeout);
    match timeout(limits.hello_timeout, lines.next()).await {
        Err(_) => return refuse_hello(conn, hello_late(limits.hello_timeout)),
        Ok(Err(end)) => return report_end(conn, end, limits),
        Ok(Ok(line)) => match read_hello(line) {
            Err((id, error)) => {
                conn.outbound.push(|out| rpc::error_line(out, id.as_ref(), error));
                return CloseReason::HELLO;
            }
            Ok((id, hello)) => {
                let answer = HelloResult {
                    version: PROGRAM_VERSION.into(),
                    api: API_VERSION,
                    limits: ApiLimits::CURRENT,
                };
                conn.outbound.push(|out| rpc::answer_line(out, Some(&id), &answer));
                shared.conns.lock().insert(conn.id, Arc::clone(conn));
                *connected = true;
                let input =
                    LocalInput::Connected { conn: conn.id, uid: conn.uid, pid: conn.pid, hello };
                if inputs.send(input).await.is_err() {
                    return CloseReason::SHUTDOWN;
                }
            }
        },
    }
    loop {
        let line = match lines.next().await {
            Ok(line) => line,
            Err(end) => return report_end(conn, end, limits),
        };
        match read_request(line, conn, limits) {
            Err((id, error)) => {
                conn.outbound.push(|out| rpc::error_line(out, id.as_ref(), error));
            }
            Ok((id, request)) => {
                let input = LocalInput::Request { conn: conn.id, id, request };
                if inputs.send(input).await.is_err() {
                    return CloseReason::SHUTDOWN;
                }
            }
        }
    }
}

type Fault = (Option<RequestId>, ApiError);

/// The first line: a `hello` for this version of the API.
fn read_hello(line: &[u8]) -> Result<(RequestId, HelloParams), Fault> {
    let (id, request) = typed(rpc::read_request(line)?)?;
    let Request::Hello(hello) = request else {
        let error = ApiError::new(
            ApiError::HELLO_REQUIRED,
            format!("{} came before hello", request.method()),
            "send hello {client, version, api} first",
        );
        return Err((Some(id), error));
    };
    if hello.api == API_VERSION {
        return Ok((id, hello));
    }
    let todo = if hello.api > API_VERSION {
        "restart the daemon with the newer commsd; `commsd stop` ends it, whatever its version"
    } else {
        "upgrade the client, or restart it from the commsd that the daemon runs"
    };
    let error = ApiError::new(
        ApiError::API_VERSION,
        format!(
            "the daemon is commsd {PROGRAM_VERSION} with API {API_VERSION}, \
             the client is {} {} with API {}",
            hello.client, hello.version, hello.api
        ),
        todo,
    );
    Err((Some(id), error))
}

/// Any later line; the request is then in flight.
fn read_request(
    line: &[u8],
    conn: &Conn,
    limits: &SocketLimits,
) -> Result<(RequestId, Request), Fault> {
    let raw = rpc::read_request(line)?;
    // Before the parameters are read: an id in use must not be answered twice. Only this task adds.
    let (in_flight, in_use) = {
        let in_flight = conn.in_flight.lock();
        (in_flight.len(), in_flight.contains(&raw.id))
    };
    if in_use {
        let error = ApiError::new(
            ApiError::INVALID_REQUEST,
            "a request with this id is not answered yet",
            "give every request its own id",
        );
        return Err((None, error));
    }
    if in_flight >= limits.requests_in_flight {
        let error = ApiError::new(
            ApiError::TOO_MANY_REQUESTS,
            format!("{in_flight} requests of this connection are not answered yet"),
            "wait for answers, or use another connection",
        );
        return Err((Some(raw.id), error));
    }
    let (id, request) = typed(raw)?;
    if matches!(request, Request::Hello(_)) {
        let error = ApiError::new(
            ApiError::INVALID_REQUEST,
            "hello has already been said",
            "send it once, as the first request of a connection",
        );
        return Err((Some(id), error));
    }
    conn.in_flight.lock().insert(id.clone());
    Ok((id, request))
}

fn typed(raw: RawRequest) -> Result<(RequestId, Request), Fault> {
    raw.request().map_err(|(id, error)| (Some(id), error))
}

fn hello_late(limit: Duration) -> ApiError {
    ApiError::new(
        ApiError::HELLO_REQUIRED,
        format!("no hello came within {} ms", limit.as_millis()),
        "send hello {client, version, api} first",
    )
}

fn refuse_hello(conn: &Conn, error: ApiError) -> CloseReason {
    conn.outbound.push(|out| rpc::error_line(out, None, error));
    CloseReason::HELLO
}

/// Tells the client what ended its input, where it is its own doing.
fn report_end(conn: &Conn, end: End, limits: &SocketLimits) -> CloseReason {
    let (reason, message) = match end {
        End::Closed => return CloseReason::CLIENT,
        End::Failed => return CloseReason::IO,
        End::TooLong => {
            (CloseReason::LINE_TOO_LONG, format!("the line is longer than {MAX_LINE_BYTES} bytes"))
        }
        End::TooSlow => (
            CloseReason::LINE_TIMEOUT,
            format!("the line was not complete after {} ms", limits.line_timeout.as_millis()),
        ),
    };
    let todo = "send one request a line; write large values to a file and send its path";
    let error = ApiError::new(reason.0, message, todo);
    conn.outbound.push(|out| rpc::error_line(out, None, error));
    reason
}

// ---------------------------------------------------------------------------------------------
// Lines in

/// Why no further line comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Closed,
    Failed,
    TooLong,
    TooSlow,
}

/// Lines of at most [`MAX_LINE_BYTES`], each complete within a deadline from its first byte.
struct Lines<R> {
    reader: R,
    line_timeout: Duration,
    buffer: Vec<u8>,
    /// Where the next line starts.
    start: usize,
    /// Up to where a line feed has been looked for.
    searched: usize,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    fn new(reader: R, line_timeout: Duration) -> Self {
        Self { reader, line_timeout, buffer: Vec::new(), start: 0, searched: 0 }
    }

    /// The next line that is not blank, without its line feed.
    async fn next(&mut self) -> Result<&[u8], End> {
        let mut deadline = None;
        loop {
            if let Some(line) = self.take_line() {
                if line.len() > MAX_LINE_BYTES {
                    return Err(End::TooLong);
                }
                deadline = None;
                if self.bytes(&line).iter().all(u8::is_ascii_whitespace) {
                    continue;
                }
                return Ok(self.bytes(&line));
            }
            self.make_room();
            if self.buffer.len() > MAX_LINE_BYTES {
                return Err(End::TooLong);
            }
            if !self.buffer.is_empty() && deadline.is_none() {
                deadline = Some(Instant::now() + self.line_timeout);
            }
            let reading = self.reader.read_buf(&mut self.buffer);
            let read = match deadline {
                Some(at) => timeout_at(at, reading).await.map_err(|_| End::TooSlow)?,
                None => reading.await,
            };
            match read {
                Ok(0) => return Err(End::Closed),
                Ok(_) => {}
                Err(error) if has_gone(&error) => return Err(End::Closed),
                Err(_) => return Err(End::Failed),
            }
        }
    }

    /// Takes a complete line out of the buffer.
    fn take_line(&mut self) -> Option<Range<usize>> {
        let fresh = self.buffer.get(self.searched..).unwrap_or_default();
        let Some(at) = fresh.iter().position(|byte| *byte == b'\n') else {
            self.searched = self.buffer.len();
            return None;
        };
        let line = self.start..self.searched + at;
        self.start = line.end + 1;
        self.searched = self.start;
        Some(line)
    }

    fn bytes(&self, range: &Range<usize>) -> &[u8] {
        self.buffer.get(range.clone()).unwrap_or_default()
    }

    /// Forgets the lines taken and makes room for more bytes. The buffer then holds only the
    /// beginning of one line.
    fn make_room(&mut self) {
        self.buffer.drain(..self.start);
        self.searched -= self.start;
        self.start = 0;
        if self.buffer.is_empty() && self.buffer.capacity() > KEPT_READ_BUFFER {
            self.buffer = Vec::new();
        }
        self.buffer.reserve(READ_CHUNK);
    }
}

// ---------------------------------------------------------------------------------------------
// Lines out

/// What waits to be written to one client, bounded in bytes.
#[derive(Debug)]
struct Outbound {
    state: Mutex<OutboundState>,
    /// Wakes the writer.
    filled: Notify,
    /// Wakes the connection.
    closed: Notify,
    max_bytes: usize,
}

#[derive(Debug, Default)]
struct OutboundState {
    /// Whole lines; every chunk but the last has at least [`WRITE_CHUNK`] bytes.
    chunks: VecDeque<Vec<u8>>,
    /// Bytes of `chunks` and of what the writer has taken and not yet written.
    bytes: usize,
    /// Part of `bytes` that the writer has.
    writing: usize,
    closing: Option<CloseReason>,
}

impl OutboundState {
    /// Has lines written at the end of what waits.
    fn append(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        if self.chunks.back().is_none_or(|last| last.len() >= WRITE_CHUNK) {
            self.chunks.push_back(Vec::with_capacity(FIRST_LINE));
        }
        if let Some(last) = self.chunks.back_mut() {
            let before = last.len();
            write(last);
            self.bytes += last.len() - before;
            if last.is_empty() {
                self.chunks.pop_back();
            }
        }
    }
}

impl Outbound {
    fn new(max_bytes: usize) -> Self {
        Self { state: Mutex::default(), filled: Notify::new(), closed: Notify::new(), max_bytes }
    }

    /// Has a line written at the end of what waits; `false` when the connection is closing, or now
    /// closes because the client does not read.
    fn push(&self, write: impl FnOnce(&mut Vec<u8>)) -> bool {
        {
            let mut state = self.state.lock();
            if state.closing.is_some() {
                return false;
            }
            state.append(write);
            if state.bytes <= self.max_bytes {
                drop(state);
                self.filled.notify_one();
                return true;
            }
        }
        self.close(CloseReason::SLOW_CONSUMER);
        false
    }

    /// Takes no more lines and ends with a `closing` notification. A client that does not read loses
    /// what it has not read. Only the first call counts; returns its reason.
    fn close(&self, reason: CloseReason) -> CloseReason {
        let mut state = self.state.lock();
        if let Some(first) = state.closing {
            return first;
        }
        state.closing = Some(reason);
        if reason == CloseReason::SLOW_CONSUMER {
            state.chunks.clear();
        }
        if reason != CloseReason::CLIENT {
            let closing = Closing { reason: reason.0.into() };
            state.append(|out| {
                // A word of a few bytes always fits.
                let _ = rpc::notification_line(out, notification::CLOSING, &closing);
            });
        }
        drop(state);
        self.filled.notify_one();
        self.closed.notify_one();
        reason
    }

    /// Waits until somebody closes; returns why. For one waiter.
    async fn closing(&self) -> CloseReason {
        loop {
            if let Some(reason) = self.state.lock().closing {
                return reason;
            }
            self.closed.notified().await;
        }
    }

    /// The next bytes to write, or `None` once closing and empty. For one writer.
    async fn next(&self) -> Option<Vec<u8>> {
        loop {
            {
                let mut state = self.state.lock();
                state.bytes = state.bytes.saturating_sub(state.writing);
                state.writing = 0;
                if let Some(chunk) = state.chunks.pop_front() {
                    state.writing = chunk.len();
                    return Some(chunk);
                }
                if state.closing.is_some() {
                    return None;
                }
            }
            self.filled.notified().await;
        }
    }
}

/// Writes until everything is written that was queued before the connection closed.
async fn write_lines(
    mut writer: impl AsyncWrite + Unpin,
    outbound: &Outbound,
    write_timeout: Duration,
) -> Result<(), CloseReason> {
    while let Some(chunk) = outbound.next().await {
        let mut rest = chunk.as_slice();
        while !rest.is_empty() {
            match timeout(write_timeout, writer.write(rest)).await {
                Err(_) => return Err(CloseReason::SLOW_CONSUMER),
                Ok(Err(error)) if has_gone(&error) => return Err(CloseReason::CLIENT),
                Ok(Err(_) | Ok(0)) => return Err(CloseReason::IO),
                Ok(Ok(written)) => rest = rest.get(written..).unwrap_or_default(),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use proptest::prelude::*;
    use tokio::io::ReadBuf;

    use super::*;

    /// Gives out its chunks one at a time.
    struct Chunks(VecDeque<Vec<u8>>);

    impl AsyncRead for Chunks {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            out: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            if let Some(mut chunk) = self.0.pop_front() {
                let rest = chunk.split_off(chunk.len().min(out.remaining()));
                out.put_slice(&chunk);
                if !rest.is_empty() {
                    self.0.push_front(rest);
                }
            }
            Poll::Ready(Ok(()))
        }
    }

    /// All lines of a stream, and what ended it.
    fn lines_of(chunks: Vec<Vec<u8>>) -> (Vec<Vec<u8>>, End) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let chunks = chunks.into_iter().filter(|chunk| !chunk.is_empty()).collect();
        runtime.block_on(async {
            let mut lines = Lines::new(Chunks(chunks), Duration::from_secs(60));
            let mut all = Vec::new();
            loop {
                match lines.next().await {
                    Ok(line) => all.push(line.to_vec()),
                    Err(end) => return (all, end),
                }
            }
        })
    }

    proptest! {
        #[test]
        fn lines_do_not_depend_on_how_they_arrive(
            text in prop::collection::vec(prop::sample::select(b"ab\n\n \r\xff".to_vec()), 0..200),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
        ) {
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
            at.extend([0, text.len()]);
            at.sort_unstable();
            let chunks = at.windows(2).map(|pair| text[pair[0]..pair[1]].to_vec()).collect();
            let mut expected: Vec<_> = text.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
            // What has no line feed is no line; blank ones are passed over.
            expected.pop();
            expected.retain(|line| !line.trim_ascii().is_empty());
            prop_assert_eq!(lines_of(chunks), (expected, End::Closed));
        }
    }

    #[test]
    fn a_line_may_have_the_maximum_and_not_a_byte_more() {
        let longest = vec![b'x'; MAX_LINE_BYTES];
        let (lines, end) = lines_of(vec![b"a\n".to_vec(), longest.clone(), b"\nb\n".to_vec()]);
        assert_eq!((lines.len(), lines[1].len(), end), (3, MAX_LINE_BYTES, End::Closed));
        let (lines, end) = lines_of(vec![b"a\n".to_vec(), longest, b"x\nb\n".to_vec()]);
        assert_eq!((lines.len(), end), (1, End::TooLong));
        // Without any line feed it is not read to its end.
        let (lines, end) = lines_of(vec![vec![b'x'; 1000]; 1_100]);
        assert_eq!((lines.len(), end), (0, End::TooLong));
    }

    #[test]
    fn every_event_is_in_the_catalogue() {
        // Levels and names as the macro calls above say them.
        let source = include_str!("local_socket.rs").replace(char::is_whitespace, "");
        let mut emitted: Vec<_> = source
            .split("tracing::")
            .filter_map(|rest| {
                let (level, rest) = rest.split_once("!(event=\"")?;
                Some((rest.split('"').next()?.to_owned(), level.to_owned()))
            })
            .collect();
        emitted.sort();
        let mut listed: Vec<_> = CATALOGUE
            .iter()
            .map(|(name, level, ..)| ((*name).to_owned(), format!("{level:?}").to_lowercase()))
            .collect();
        listed.sort();
        assert_eq!(emitted, listed);
    }

    #[test]
    fn every_limit_is_listed_once() {
        let list = SocketLimits::default().list();
        let names: HashSet<_> = list.iter().map(|limit| limit.name.as_str()).collect();
        assert_eq!(names.len(), list.len());
        assert!(list.iter().all(|limit| limit.value > 0 && !limit.text.is_empty()));
    }

    #[test]
    fn only_the_own_user_may_connect() {
        assert!(may_connect(1000, 1000));
        assert!(!may_connect(1001, 1000));
        assert!(!may_connect(0, 1000));
    }

    #[test]
    fn connections_leave_half_of_the_descriptors_to_others() {
        assert_eq!(SocketLimits::with_descriptors(256).connections, 128);
        assert_eq!(SocketLimits::with_descriptors(u64::MAX).connections, 1024);
    }
}
