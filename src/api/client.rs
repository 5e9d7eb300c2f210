//! The client's end of the local API: connects to the daemon's socket, agrees on the version, and
//! turns typed requests into typed answers. It neither starts a daemon nor reconnects; whoever uses
//! it decides about both.

pub mod acp;
pub mod vault;

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::io::{AsyncBufRead, AsyncBufReadExt as _, AsyncReadExt as _};
use tokio::io::{AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use super::acp::AcpNews;
use super::types::rpc::{self, FromDaemon};
use super::types::{
    API_VERSION, AcpTold, ApiError, AttachParams, Attached, Call, Closing, Event, HelloParams,
    HelloResult, Label, MAX_LINE_BYTES, MAX_REQUESTS_IN_FLIGHT, PROGRAM_VERSION, RequestId,
    notification,
};

/// How long connecting and `hello` may take. The daemon answers `hello` without asking anyone, so
/// even a busy one needs a fraction of this.
pub const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// How long an answer may take when nothing was asked to wait: the mesh gives a silent recipient 15 s
/// before its message counts as queued, and the rest is for a busy machine.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Notifications that may wait for [`Notifications::recv`]. When it is full the client stops reading,
/// and the daemon keeps the events. A mailbox holds no more: whoever acknowledges one event after
/// another, and waits for the answer each time, is never kept from it by the events behind.
const NOTIFICATIONS: usize = 10_000;

/// The harness of agents that shells and scripts use.
const HARNESS: &str = "cli";

/// The reason in `closing` of a daemon that goes down.
const SHUTDOWN: &str = "shutdown";

/// Variables by which a sandbox says that it is one, with what to allow there.
const SANDBOXES: [(&str, &str); 3] = [
    (
        "CODEX_SANDBOX_NETWORK_DISABLED",
        "set network_access = true under [sandbox_workspace_write] in Codex's config.toml",
    ),
    ("CODEX_SANDBOX", "run commsd outside Codex's sandbox, or allow it network access"),
    ("SANDBOX_RUNTIME", "add the socket to sandbox.network.allowUnixSockets in Claude's settings"),
];

/// Something that the daemon sends without being asked each time.
#[derive(Clone, Debug, PartialEq)]
pub enum Notification {
    /// An event of the attached agent's mailbox.
    Event(Event),
    /// A change of what `watch` showed.
    Change(Event),
    /// An event of the daemon's log.
    Log(Event),
    /// What happened meanwhile to work that is waited for.
    Acp(AcpNews),
    /// The daemon closes the connection, for this reason.
    Closing(String),
}

/// The stream of notifications; ends when the connection does.
#[derive(Debug)]
pub struct Notifications {
    receiver: mpsc::Receiver<Notification>,
}

impl Notifications {
    /// The next one; `None` when the connection has ended.
    pub async fn recv(&mut self) -> Option<Notification> {
        self.receiver.recv().await
    }
}

type Answer = Result<Value, ApiError>;

#[derive(Debug, Default)]
struct Pending {
    answers: HashMap<i64, oneshot::Sender<Answer>>,
    /// Set once the connection has ended; nothing is added any more.
    ended: Option<ApiError>,
}

/// A connection after `hello`. Calls may run side by side; they reach the daemon in the order in
/// which they were first polled. Dropping it closes the connection.
///
/// Whoever keeps the [`Notifications`] has to keep receiving: answers come behind them on the same
/// connection. Dropping them discards what comes.
#[derive(Debug)]
pub struct Client {
    hello: HelloResult,
    lines: mpsc::Sender<Vec<u8>>,
    pending: Arc<Mutex<Pending>>,
    next_id: AtomicI64,
    _task: AbortOnDropHandle<()>,
}

impl Client {
    /// Connects to the daemon at `socket` as the program `name`.
    ///
    /// # Errors
    /// `no_daemon` when nobody answers; `api_version` when the two do not fit; what the daemon says.
    pub async fn connect(socket: &Path, name: &str) -> Result<(Self, Notifications), ApiError> {
        let greeted = timeout(HELLO_TIMEOUT, greet(socket, name)).await;
        let (reader, writer, hello) = greeted.map_err(|_| {
            ApiError::new(
                ApiError::NO_DAEMON,
                format!(
                    "the daemon at {} did not answer within {} s",
                    socket.display(),
                    HELLO_TIMEOUT.as_secs()
                ),
                "see its log; if it hangs, end the process that `commsd run` names and start it again",
            )
        })??;
        let (lines, to_write) = mpsc::channel(MAX_REQUESTS_IN_FLIGHT);
        let (notify, receiver) = mpsc::channel(NOTIFICATIONS);
        let pending = Arc::new(Mutex::new(Pending::default()));
        let task = tokio::spawn(run(reader, writer, to_write, notify, Arc::clone(&pending)));
        let client = Self {
            hello,
            lines,
            pending,
            next_id: AtomicI64::new(1),
            _task: AbortOnDropHandle::new(task),
        };
        Ok((client, Notifications { receiver }))
    }

    /// What the daemon said of itself.
    #[must_use]
    pub const fn hello(&self) -> &HelloResult {
        &self.hello
    }

    /// Asks, and waits [`CALL_TIMEOUT`] at most.
    ///
    /// # Errors
    /// What the daemon says; `disconnected`; `timeout`.
    pub async fn call<P: Call>(&self, params: P) -> Result<P::Output, ApiError> {
        self.call_waiting(params, Duration::ZERO).await
    }

    /// Asks for something that may itself wait for `wait`.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub async fn call_waiting<P: Call>(
        &self,
        params: P,
        wait: Duration,
    ) -> Result<P::Output, ApiError> {
        let limit = CALL_TIMEOUT.saturating_add(wait);
        from_value(P::METHOD, self.timed_call(P::METHOD, &params, limit).await?)
    }

    /// Makes the connection the agent that shells and scripts call by this name (harness `cli`), which
    /// is created on first use; or fails: acting as somebody else would be worse.
    ///
    /// # Errors
    /// As [`Self::call`]; `cwd`; `agent_in_use`.
    pub async fn act_as(&self, name: &Label) -> Result<Attached, ApiError> {
        let cwd = std::env::current_dir().map_err(|error| {
            let what = format!("cannot tell the working directory: {error}");
            ApiError::new("cwd", what, "change into a directory that exists")
        })?;
        let harness = HARNESS
            .parse()
            .map_err(|what: String| ApiError::invalid_params(AttachParams::METHOD, what))?;
        let params = AttachParams {
            harness,
            cwd: cwd.to_string_lossy().into_owned(),
            pid: std::process::id(),
            key: Some(name.clone()),
            name: Some(name.to_string()),
            ephemeral: None,
            project_room: None,
            harness_pid: None,
        };
        let attached = self.call(params).await?;
        match attached.reason {
            None => Ok(attached),
            Some(reason) => Err(ApiError::new(
                "agent_in_use",
                format!("cannot act as {name}: {reason}"),
                "end the other client, or use another name",
            )),
        }
    }

    /// Asks for somebody whose method and parameters are values, and waits [`CALL_TIMEOUT`] at most.
    /// Whether they fit is the daemon's to say.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub async fn call_value(&self, method: &str, params: &Value) -> Result<Value, ApiError> {
        self.timed_call(method, params, CALL_TIMEOUT).await
    }

    async fn timed_call(&self, method: &str, params: &impl Serialize, limit: Duration) -> Answer {
        let result = timeout(limit, self.raw_call(method, params)).await;
        result.map_err(|_| {
            ApiError::new(
                "timeout",
                format!("{method}: the daemon did not answer within {} s", limit.as_secs()),
                "see `commsd status` and the daemon's log",
            )
        })?
    }

    async fn raw_call(&self, method: &str, params: &impl Serialize) -> Answer {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let line = rpc::request_line(&RequestId::Number(id), method, params)?;
        let (answer, answered) = oneshot::channel();
        {
            let mut pending = self.pending.lock();
            if let Some(error) = &pending.ended {
                return Err(error.clone());
            }
            pending.answers.insert(id, answer);
        }
        // Whether this future ends or is dropped, its place is given up.
        let _place = Place { pending: &self.pending, id };
        // Fails when the connection has ended; `answered` then tells why.
        let _ = self.lines.send(line).await;
        answered.await.unwrap_or_else(|_| Err(disconnected(None)))
    }
}

struct Place<'a> {
    pending: &'a Mutex<Pending>,
    id: i64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.pending.lock().answers.remove(&self.id);
    }
}

type Reader = BufReader<tokio::net::unix::OwnedReadHalf>;
type Writer = tokio::net::unix::OwnedWriteHalf;

async fn greet(socket: &Path, name: &str) -> Result<(Reader, Writer, HelloResult), ApiError> {
    let stream = UnixStream::connect(socket).await.map_err(|e| no_daemon(socket, &e))?;
    let (reader, mut writer) = stream.into_split();
    let mut reader = BufReader::new(reader);
    let label = |text: &str| Label::try_from(text.to_owned());
    let (Ok(client), Ok(version)) = (label(name), label(PROGRAM_VERSION)) else {
        return Err(ApiError::internal("the program's name is no label"));
    };
    let params = HelloParams { client, version, api: API_VERSION };
    let line = rpc::request_line(&RequestId::Number(0), HelloParams::METHOD, &params)?;
    // A daemon that is full says so and closes without reading, so what it said comes first.
    let sent = writer.write_all(&line).await;
    let answer = match (read_line(&mut reader).await, sent) {
        (Ok(Some(line)), _) => rpc::read_from_daemon(&line)?,
        (Err(error), _) | (Ok(None), Err(error)) => return Err(no_daemon(socket, &error)),
        (Ok(None), Ok(())) => {
            let closed = io::Error::from(io::ErrorKind::ConnectionReset);
            return Err(no_daemon(socket, &closed));
        }
    };
    let FromDaemon::Answer(_, answer) = answer else {
        return Err(ApiError::new(
            ApiError::INVALID_REQUEST,
            "what answers at the socket did not answer hello",
            "check that the socket belongs to commsd",
        ));
    };
    let hello: HelloResult = from_value(HelloParams::METHOD, answer?)?;
    if hello.api != API_VERSION {
        return Err(ApiError::new(
            ApiError::API_VERSION,
            format!(
                "this is commsd {PROGRAM_VERSION} with API {API_VERSION}, \
                 the daemon is commsd {} with API {}",
                hello.version, hello.api
            ),
            "restart the older of the two; `commsd stop` ends the daemon, whatever its version",
        ));
    }
    Ok((reader, writer, hello))
}

/// Why there is nobody to talk to, and what to do.
fn no_daemon(socket: &Path, error: &io::Error) -> ApiError {
    const START: &str = "start it with `commsd run`, with the --home or --socket of this command";
    let socket = socket.display();
    let (message, todo) = match error.kind() {
        io::ErrorKind::NotFound => {
            (format!("no daemon: there is no socket {socket}"), START.to_owned())
        }
        io::ErrorKind::ConnectionRefused => {
            (format!("no daemon: nobody listens at {socket}"), START.to_owned())
        }
        io::ErrorKind::PermissionDenied => {
            (format!("the system does not let this process use {socket}"), sandbox_advice())
        }
        _ => (format!("no daemon at {socket}: {error}"), "see `commsd doctor`".into()),
    };
    ApiError::new(ApiError::NO_DAEMON, message, todo)
}

fn sandbox_advice() -> String {
    let sandbox = SANDBOXES.iter().find(|(variable, _)| std::env::var_os(variable).is_some());
    match sandbox {
        Some((variable, advice)) => format!("{variable} says that this is a sandbox: {advice}"),
        None => "run it as the user that runs the daemon, and outside any sandbox".into(),
    }
}

/// Why a connection that was up has ended: `reason` is what the daemon said, if it said anything. A
/// daemon that has stopped is told apart from one that only lets this client go.
#[must_use]
pub fn disconnected(reason: Option<&str>) -> ApiError {
    const START: &str = "start it again with `commsd run`, then repeat the command; \
                         nothing that was not acknowledged is lost";
    match reason {
        Some(SHUTDOWN) => ApiError::new(ApiError::DAEMON_STOPPED, "the daemon has stopped", START),
        // One that lets a client go says why.
        None => ApiError::new(
            ApiError::DAEMON_STOPPED,
            "the daemon is gone: the connection broke off without a word from it",
            START,
        ),
        Some(reason) => ApiError::new(
            ApiError::DISCONNECTED,
            format!("the daemon closed the connection ({reason})"),
            "repeat the command; nothing that was not acknowledged is lost",
        ),
    }
}

/// Reads and writes until either ends.
async fn run(
    reader: Reader,
    writer: Writer,
    to_write: mpsc::Receiver<Vec<u8>>,
    notify: mpsc::Sender<Notification>,
    pending: Arc<Mutex<Pending>>,
) {
    let mut reason = None;
    tokio::select! {
        () = read_all(reader, &notify, &pending, &mut reason) => {}
        () = write_all(writer, to_write) => {}
    }
    let error = disconnected(reason.as_deref());
    let mut pending = pending.lock();
    for (_, answer) in pending.answers.drain() {
        let _ = answer.send(Err(error.clone()));
    }
    pending.ended = Some(error);
}

async fn write_all(mut writer: Writer, mut lines: mpsc::Receiver<Vec<u8>>) {
    while let Some(line) = lines.recv().await {
        if writer.write_all(&line).await.is_err() {
            // What the daemon had to say about it is read before the connection counts as ended.
            std::future::pending::<()>().await;
        }
    }
}

async fn read_all(
    mut reader: Reader,
    notify: &mpsc::Sender<Notification>,
    pending: &Mutex<Pending>,
    reason: &mut Option<String>,
) {
    while let Ok(Some(line)) = read_line(&mut reader).await {
        match rpc::read_from_daemon(&line) {
            Ok(FromDaemon::Answer(Some(RequestId::Number(id)), answer)) => {
                if let Some(waiting) = pending.lock().answers.remove(&id) {
                    let _ = waiting.send(answer);
                }
            }
            Ok(FromDaemon::Notification { method, params }) => {
                let Some(notification) = typed_notification(&method, params) else { continue };
                if let Notification::Closing(why) = &notification {
                    *reason = Some(why.clone());
                }
                // Nobody may be interested.
                let _ = notify.send(notification).await;
            }
            // An answer to nothing that was asked, or not an answer at all: not worth the rest.
            Ok(FromDaemon::Answer(..)) | Err(_) => {}
        }
    }
}

fn typed_notification(method: &str, params: Value) -> Option<Notification> {
    let event = |params| serde_json::from_value::<Event>(params).ok();
    match method {
        notification::EVENT => event(params).map(Notification::Event),
        notification::CHANGE => event(params).map(Notification::Change),
        notification::LOG => event(params).map(Notification::Log),
        notification::ACP => {
            let told: AcpTold = serde_json::from_value(params).ok()?;
            Some(Notification::Acp(told.news))
        }
        notification::CLOSING => {
            let closing: Closing = serde_json::from_value(params).ok()?;
            Some(Notification::Closing(closing.reason))
        }
        _ => None,
    }
}

/// One line without its line feed; `None` at the end.
async fn read_line(reader: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    let limit = MAX_LINE_BYTES as u64 + 1;
    reader.take(limit).read_until(b'\n', &mut line).await?;
    match line.pop() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(line)),
        // The connection ended in a line, or the line does not end: nothing of it can be used.
        Some(_) => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn from_value<T: DeserializeOwned>(method: &str, result: Value) -> Result<T, ApiError> {
    // The place of a fault is only looked for when there is one.
    if let Ok(result) = T::deserialize(&result) {
        return Ok(result);
    }
    serde_path_to_error::deserialize(result).map_err(|error| {
        ApiError::new(
            "unexpected_answer",
            format!("{method}: the daemon's answer does not fit: {error}"),
            "client and daemon may come from different versions; compare `commsd status`",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_missing_and_a_deaf_socket_are_no_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        let error = Client::connect(&path, "test").await.unwrap_err();
        assert_eq!(error.code, ApiError::NO_DAEMON);
        assert!(error.message.contains("there is no socket"), "{}", error.message);
        assert!(error.todo.unwrap().contains("commsd run"));

        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let error = Client::connect(&path, "test").await.unwrap_err();
        assert_eq!(error.code, ApiError::NO_DAEMON);
        assert!(error.message.contains("nobody listens"), "{}", error.message);
    }

    #[tokio::test]
    async fn a_foreign_program_at_the_socket_is_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(b"220 mail.example ESMTP\r\n").await.unwrap();
        });
        let error = Client::connect(&path, "test").await.unwrap_err();
        assert_eq!(error.code, ApiError::PARSE_ERROR);
        server.await.unwrap();
    }

    #[tokio::test]
    async fn a_newer_daemon_that_answers_anyway_is_refused_by_version() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let limits = super::super::types::ApiLimits::CURRENT;
            let answer = HelloResult { version: "9.9.9".into(), api: 7, limits };
            let mut line = Vec::new();
            rpc::answer_line(&mut line, Some(&RequestId::Number(0)), &answer);
            stream.write_all(&line).await.unwrap();
            let mut sink = Vec::new();
            let _ = stream.read_to_end(&mut sink).await;
        });
        let error = Client::connect(&path, "test").await.unwrap_err();
        assert_eq!(error.code, ApiError::API_VERSION);
        for part in ["9.9.9", "API 7", PROGRAM_VERSION, "API 1"] {
            assert!(error.message.contains(part), "{part}: {}", error.message);
        }
        server.await.unwrap();
    }

    #[test]
    fn a_denied_socket_is_explained() {
        let error = no_daemon(Path::new("/x"), &io::ErrorKind::PermissionDenied.into());
        assert_eq!(error.code, ApiError::NO_DAEMON);
        assert!(error.todo.unwrap().contains("sandbox"));
    }
}
