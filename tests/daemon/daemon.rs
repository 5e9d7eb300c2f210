//! Real daemons, each with its own home and ports, watched through their events.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use commsd::api::client::{Client, Notification, Notifications};
use commsd::api::types::{
    AcceptParams, AttachParams, DmParams, Event, EventsAckParams, EventsSubscribeParams,
    PendingKind, PendingParams, PendingRequest, SendResult, Status, StatusParams, WaitSecs,
};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStderr, Command};
use tokio::sync::Notify;

use crate::bench::soon;

/// Ports of one little mesh: the well-known one and the one of first contact.
#[derive(Clone, Copy, Debug)]
pub struct Ports {
    pub tcp: u16,
    pub udp: u16,
}

impl Ports {
    /// Two that are free now.
    pub fn free() -> Self {
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Self { tcp, udp }
    }
}

/// Events that a daemon has written.
#[derive(Default)]
pub struct Log {
    lines: Mutex<Vec<Value>>,
    grown: Notify,
}

impl Log {
    /// Waits for an event at or after position `from` that `wanted` picks; returns the position
    /// behind it and the event.
    pub async fn wait(
        &self,
        from: usize,
        what: &str,
        wanted: impl Fn(&Value) -> bool,
    ) -> (usize, Value) {
        let search = async {
            let mut at = from;
            loop {
                let grown = self.grown.notified();
                {
                    let lines = self.lines.lock();
                    while at < lines.len() {
                        at += 1;
                        if wanted(&lines[at - 1]) {
                            return (at, lines[at - 1].clone());
                        }
                    }
                }
                grown.await;
            }
        };
        match tokio::time::timeout(crate::bench::HANG, search).await {
            Ok(found) => found,
            Err(_) => panic!("no {what}; the log:\n{}", self.text()),
        }
    }

    /// Takes down what a process says.
    pub fn follow(self: &Arc<Self>, stderr: ChildStderr) {
        let sink = Arc::clone(self);
        tokio::spawn(async move {
            let mut lines = BufReader::new(stderr).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                let event = serde_json::from_str(&line).unwrap_or(Value::String(line));
                sink.lines.lock().push(event);
                sink.grown.notify_waiters();
            }
        });
    }

    pub fn len(&self) -> usize {
        self.lines.lock().len()
    }

    pub fn text(&self) -> String {
        self.lines.lock().iter().map(|line| format!("{line}\n")).collect()
    }
}

/// A running daemon; ended with the value.
pub struct Daemon {
    pub home: Arc<tempfile::TempDir>,
    pub ports: Ports,
    pub child: Child,
    pub log: Arc<Log>,
}

/// The command that starts a daemon in `home`.
pub fn command(home: &Path, ports: Ports, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_commsd"));
    command
        .args(["run", "--log", "json", "--no-broadcast", "--home"])
        .arg(home)
        .args(["--port", &ports.tcp.to_string(), "--first-contact-port", &ports.udp.to_string()])
        .args(args)
        .env_clear()
        .env("HOME", home)
        .env("COMMSD_NO_BROADCAST", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

impl Daemon {
    pub async fn start(ports: Ports) -> Self {
        Self::start_with(Arc::new(tempfile::tempdir().unwrap()), ports, &[]).await
    }

    /// Starts in a home that may have been used before; returns once it is ready.
    pub async fn start_with(home: Arc<tempfile::TempDir>, ports: Ports, args: &[&str]) -> Self {
        Self::spawn(command(home.path(), ports, args), home, ports).await
    }

    pub async fn spawn(mut command: Command, home: Arc<tempfile::TempDir>, ports: Ports) -> Self {
        let mut child = command.spawn().unwrap();
        let log = Arc::new(Log::default());
        log.follow(child.stderr.take().unwrap());
        let daemon = Self { home, ports, child, log };
        daemon.event("ready").await;
        daemon
    }

    pub fn socket(&self) -> PathBuf {
        self.home.path().join("run/commsd.sock")
    }

    /// Waits for an event by name, from the beginning.
    pub async fn event(&self, name: &str) -> Value {
        self.log.wait(0, name, |line| line["event"] == name).await.1
    }

    pub async fn status(&self) -> Status {
        let (client, _events) = Client::connect(&self.socket(), "test").await.unwrap();
        client.call(StatusParams { limits: None, settings: None }).await.unwrap()
    }

    /// Its device id.
    pub async fn device(&self) -> String {
        self.status().await.device
    }

    /// Waits until it has a session with a device.
    pub async fn has_met(&self, device: &str) {
        self.log.wait(0, "the peer", |l| l["event"] == "peer_up" && l["device"] == device).await;
    }

    pub async fn kill(mut self) -> Arc<tempfile::TempDir> {
        self.child.kill().await.unwrap();
        Arc::clone(&self.home)
    }

    /// SIGTERM, then its exit code.
    pub async fn stop(mut self) -> (Option<i32>, Arc<Log>) {
        let pid = rustix::process::Pid::from_raw(self.child.id().unwrap() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let status = soon(self.child.wait()).await.unwrap();
        (status.code(), Arc::clone(&self.log))
    }

    pub async fn agent(&self, name: &str) -> Agent {
        Agent::attach(&self.socket(), "cli", Some(name), self.home.path()).await
    }

    /// An agent whose key ends with its connection.
    pub async fn passing_agent(&self, name: &str) -> Agent {
        Agent::attach_as(&self.socket(), "cli", Some(name), self.home.path(), Some(true)).await
    }
}

/// An attached, subscribed client.
pub struct Agent {
    pub id: String,
    pub client: Client,
    events: Notifications,
    seen: Vec<Event>,
}

impl Agent {
    pub async fn attach(socket: &Path, harness: &str, key: Option<&str>, cwd: &Path) -> Self {
        Self::attach_as(socket, harness, key, cwd, None).await
    }

    async fn attach_as(
        socket: &Path,
        harness: &str,
        key: Option<&str>,
        cwd: &Path,
        ephemeral: Option<bool>,
    ) -> Self {
        let (client, events) = Client::connect(socket, "test").await.unwrap();
        let attached = client
            .call(AttachParams {
                harness: harness.to_owned().try_into().unwrap(),
                cwd: cwd.to_string_lossy().into_owned(),
                pid: std::process::id(),
                key: key.map(|key| key.to_owned().try_into().unwrap()),
                name: None,
                ephemeral,
                project_room: None,
                harness_pid: None,
            })
            .await
            .unwrap();
        client.call(EventsSubscribeParams { after: None }).await.unwrap();
        Self { id: attached.agent, client, events, seen: Vec::new() }
    }

    /// Waits for an event that `wanted` picks. Events before it stay to be asked for.
    pub async fn wait(&mut self, what: &str, wanted: impl Fn(&Event) -> bool) -> Event {
        if let Some(at) = self.seen.iter().position(&wanted) {
            return self.seen.remove(at);
        }
        let search = async {
            loop {
                match self.events.recv().await {
                    Some(Notification::Event(event)) if wanted(&event) => return event,
                    Some(Notification::Event(event)) => self.seen.push(event),
                    Some(_) => {}
                    None => panic!("the daemon closed the connection"),
                }
            }
        };
        match tokio::time::timeout(crate::bench::HANG, search).await {
            Ok(event) => event,
            Err(_) => panic!("no {what}; seen: {:?}", self.seen),
        }
    }

    pub async fn wait_kind(&mut self, kind: &str) -> Event {
        self.wait(kind, |event| event.kind() == kind).await
    }

    /// Waits for a direct message with this text.
    pub async fn wait_dm(&mut self, text: &str) -> Event {
        self.wait(text, |event| event.kind() == "dm" && event.body["message"]["content"] == text)
            .await
    }

    /// Everything seen so far that `wanted` picks, and what has arrived without being asked for.
    pub fn count_seen(&self, wanted: impl Fn(&Event) -> bool) -> usize {
        self.seen.iter().filter(|event| wanted(event)).count()
    }

    pub async fn ack(&self, event: &Event) {
        self.client.call(EventsAckParams { seq: event.seq }).await.unwrap();
    }

    pub async fn dm(&self, to: &str, text: &str, wait: Option<u64>) -> SendResult {
        self.client
            .call_waiting(
                DmParams {
                    agent: to.to_owned(),
                    text: text.to_owned().try_into().unwrap(),
                    timing: None,
                    reply_to: None,
                    wait: wait.map(|secs| WaitSecs::try_from(secs).unwrap()),
                },
                std::time::Duration::from_secs(wait.unwrap_or(0)),
            )
            .await
            .unwrap()
    }

    pub async fn pending(&self, kind: PendingKind) -> Vec<PendingRequest> {
        let list = self.client.call(PendingParams {}).await.unwrap();
        list.requests.into_iter().filter(|request| request.kind == kind).collect()
    }

    pub async fn accept(&self, request: &PendingRequest) {
        self.client
            .call(AcceptParams {
                id: Some(request.id.clone()),
                room: None,
                requester: None,
                terms: None,
            })
            .await
            .unwrap();
    }

    /// Opens a conversation: this agent writes, `other` agrees.
    pub async fn befriend(&mut self, other: &mut Self) {
        self.dm(&other.id, "may I", None).await;
        other.wait_kind("room_join_request").await;
        let pending = other.pending(PendingKind::Dm).await;
        other.accept(&pending[0]).await;
        other.wait_dm("may I").await;
        // The other direction finds the conversation open.
        other.dm(&self.id, "you may", Some(10)).await;
        self.wait_dm("you may").await;
    }
}
