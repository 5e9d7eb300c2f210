//! Agents on a daemon: with the program's own client where latency is measured, and as bare lines
//! where the client must not be what limits.

use commsd::api::client::{Client, Notification, Notifications};
use commsd::api::types::{
    API_VERSION, AcceptParams, AgentsParams, AttachParams, Call, DmParams, Event,
    EventsSubscribeParams, HelloParams, PendingParams, Text, WhoamiParams,
};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

use super::daemon::{Daemon, until};

fn attach(name: &str) -> AttachParams {
    AttachParams {
        harness: "bench".parse().unwrap(),
        cwd: "/".into(),
        pid: std::process::id(),
        key: Some(name.parse().unwrap()),
        name: Some(name.into()),
        ephemeral: Some(true),
        project_room: None,
        harness_pid: None,
    }
}

pub fn text(bytes: usize) -> Text {
    "x".repeat(bytes).try_into().unwrap()
}

pub fn dm(to: &str, text: Text) -> DmParams {
    DmParams { agent: to.into(), text, timing: None, reply_to: None, wait: None }
}

/// Asks the daemon; nothing may be refused.
pub trait Ask {
    async fn ask<P: Call>(&mut self, params: P) -> P::Output;
}

/// An agent that gets its events pushed.
pub struct Agent {
    pub client: Client,
    pub name: String,
    events: Notifications,
}

impl Agent {
    pub async fn attach(daemon: &Daemon, name: &str) -> Self {
        let (client, events) = daemon.connect().await;
        client.call(attach(name)).await.unwrap();
        client.call(EventsSubscribeParams { after: None }).await.unwrap();
        Self { client, name: name.to_owned(), events }
    }

    /// An agent of the shell, whose mail is on disk.
    pub async fn attach_lasting(daemon: &Daemon, name: &str) -> Self {
        let (client, events) = daemon.connect().await;
        let params =
            AttachParams { harness: "cli".parse().unwrap(), ephemeral: None, ..attach(name) };
        client.call(params).await.unwrap();
        Self { client, name: name.to_owned(), events }
    }

    /// The next event of this kind; others are passed over.
    pub async fn event(&mut self, kind: &str) -> Event {
        loop {
            match self.events.recv().await {
                Some(Notification::Event(event)) if event.kind() == kind => return event,
                Some(_) => {}
                None => panic!("the daemon closed the connection"),
            }
        }
    }
}

impl Ask for Agent {
    async fn ask<P: Call>(&mut self, params: P) -> P::Output {
        self.client.call(params).await.unwrap()
    }
}

/// The first message from one agent to another, and the consent that it takes.
pub async fn introduce(from: &mut impl Ask, to: &mut impl Ask) {
    let id = to.ask(WhoamiParams {}).await.id;
    until("the agents know each other", async || {
        let agents = from.ask(AgentsParams {}).await.agents;
        agents.iter().any(|agent| agent.id == id).then_some(())
    })
    .await;
    from.ask(dm(&id, text(1))).await;
    let request = until("the recipient is asked", async || {
        to.ask(PendingParams {}).await.requests.into_iter().next()
    })
    .await;
    to.ask(AcceptParams { id: Some(request.id), room: None, requester: None, terms: None }).await;
}

/// A connection as bare lines.
pub struct Lines {
    stream: UnixStream,
    buffer: Vec<u8>,
}

/// What a line of the daemon says, as far as it takes to go on.
pub enum Told {
    /// The request with this id has been done.
    Answer(u64),
    /// The mailbox event with this number.
    Event(u64),
}

impl Told {
    /// Reads the lines of this daemon and no other's: a full parse would be what is measured.
    pub fn of(line: &[u8]) -> Self {
        let shown = || String::from_utf8_lossy(line).into_owned();
        if let Some(rest) = line.strip_prefix(br#"{"jsonrpc":"2.0","id":"#) {
            let (id, rest) = number(rest);
            assert!(rest.starts_with(br#","result":"#), "{}", shown());
            return Self::Answer(id);
        }
        let event = line.strip_prefix(br#"{"jsonrpc":"2.0","method":"event","params":{"seq":"#);
        Self::Event(number(event.unwrap_or_else(|| panic!("{}", shown()))).0)
    }
}

fn number(bytes: &[u8]) -> (u64, &[u8]) {
    let digits = bytes.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (digits, rest) = bytes.split_at(digits);
    (std::str::from_utf8(digits).unwrap().parse().unwrap(), rest)
}

/// A request with the id `id`. It can be written again once it has been answered.
pub fn line<P: Call>(id: u64, params: &P) -> Vec<u8> {
    let request = json!({"jsonrpc": "2.0", "id": id, "method": P::METHOD, "params": params});
    let mut line = serde_json::to_vec(&request).unwrap();
    line.push(b'\n');
    line
}

impl Lines {
    pub async fn connect(daemon: &Daemon) -> Self {
        let stream = UnixStream::connect(daemon.socket()).await.unwrap();
        let mut lines = Self { stream, buffer: Vec::new() };
        lines
            .ask(HelloParams {
                client: "bench".parse().unwrap(),
                version: "0".parse().unwrap(),
                api: API_VERSION,
            })
            .await;
        lines
    }

    /// An agent that gets its events pushed; and its id.
    pub async fn attach(daemon: &Daemon, name: &str) -> (Self, String) {
        let mut lines = Self::connect(daemon).await;
        let attached = lines.ask(attach(name)).await;
        lines.ask(EventsSubscribeParams { after: None }).await;
        (lines, attached.agent)
    }

    pub async fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    /// Waits for more and shows every complete line.
    pub async fn read(&mut self, mut show: impl FnMut(&[u8])) {
        self.buffer.reserve(64 * 1024);
        let read = self.stream.read_buf(&mut self.buffer).await.unwrap();
        assert!(read > 0, "the daemon closed the connection");
        let mut rest = self.buffer.as_slice();
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            show(&rest[..end]);
            rest = &rest[end + 1..];
        }
        let taken = self.buffer.len() - rest.len();
        self.buffer.drain(..taken);
    }
}

impl Ask for Lines {
    /// Passes over events that come before the answer. Only while nothing else is under way.
    async fn ask<P: Call>(&mut self, params: P) -> P::Output {
        self.write(&line(0, &params)).await;
        let mut answer: Option<Value> = None;
        while answer.is_none() {
            self.read(|line| {
                if let Told::Answer(_) = Told::of(line) {
                    answer = Some(serde_json::from_slice(line).unwrap());
                }
            })
            .await;
        }
        serde_json::from_value(answer.unwrap()["result"].take()).unwrap()
    }
}
