//! The relay hub as a process, and daemons that reach each other through nothing else. What goes
//! over the hub is recorded in between, message by message.

// A skipped test says so.
#![allow(clippy::print_stdout)]

use std::fs::File;
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use commsd::api::client::Client;
use commsd::api::types::{
    AcceptParams, AgentsParams, DeliveryStatus, MeshConnectParams, MeshTraceParams, PendingKind,
    PendingParams, RoomCreateParams, RoomJoinParams, RoomsParams, TrustAddParams, TrustKind,
    TrustListParams, TrustRemoveParams, WhoamiParams,
};
use commsd::mesh::wire::frame::Frame;
use futures_util::{SinkExt as _, StreamExt as _};
use parking_lot::Mutex;
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::sync::broadcast;
use tokio_tungstenite::tungstenite::{Bytes, Message};
use tokio_tungstenite::{accept_async, client_async};

use crate::acp_mesh::{call, order, works};
use crate::bench::soon;
use crate::daemon::{Agent, Daemon, Log, Ports};
use crate::namespaces::Machines;

/// What a hub must not see.
const CANARY: &str = "the-quick-canary-sings-at-dawn";

/// A hub process; ended with the value.
struct Hub {
    child: Child,
    log: Arc<Log>,
    address: SocketAddr,
}

impl Hub {
    async fn start(args: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_commsd"));
        command
            .args(["hub", "--log", "json"])
            .args(args)
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        Self::spawn(command).await
    }

    async fn spawn(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let log = Arc::new(Log::default());
        log.follow(child.stderr.take().unwrap());
        let (_, ready) = log.wait(0, "hub_ready", |l| l["event"] == "hub_ready").await;
        let address = ready["address"].as_str().unwrap().parse().unwrap();
        Self { child, log, address }
    }

    async fn stop(mut self) -> Arc<Log> {
        let pid = rustix::process::Pid::from_raw(self.child.id().unwrap() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert_eq!(soon(self.child.wait()).await.unwrap().code(), Some(0));
        self.log
    }

    async fn health(&self) -> Value {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let request = format!("GET /health HTTP/1.1\r\nHost: {}\r\n\r\n", self.address);
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        soon(stream.read_to_string(&mut answer)).await.unwrap();
        serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap()).unwrap()
    }
}

/// Stands between daemons and a hub and writes down every message that goes through, both ways.
struct Recorder {
    address: SocketAddr,
    links: Arc<AtomicUsize>,
    told: Arc<Mutex<Vec<(bool, Bytes)>>>,
    /// Said to every daemon as if the hub said it.
    lies: broadcast::Sender<Bytes>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Recorder {
    async fn start(hub: SocketAddr) -> Self {
        Self::start_at("127.0.0.1:0", hub, None).await
    }

    /// With a file, what is told is in it before it is passed on.
    async fn start_at(address: &str, hub: SocketAddr, file: Option<File>) -> Self {
        let listener = tokio::net::TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (links, told) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::new())));
        let lies = broadcast::channel(1024).0;
        let recorder = Arc::clone(&told);
        let record = move |by_hub: bool, bytes: &Bytes| {
            let mut told = recorder.lock();
            if let Some(mut file) = file.as_ref() {
                file.write_all(bytes).unwrap();
            }
            told.push((by_hub, bytes.clone()));
        };
        let task =
            tokio::spawn(accept(listener, hub, Arc::clone(&links), Arc::new(record), lies.clone()));
        Self { address, links, told, lies, task }
    }

    fn url(&self) -> String {
        format!("ws://{}/", self.address)
    }

    fn saw(&self, word: &str) -> bool {
        let told = self.told.lock();
        told.iter().any(|(_, bytes)| contains(bytes, word))
    }

    /// Nothing that is anybody's business has gone through, though a good deal has.
    fn saw_only_ciphertext(&self, words: &[&str]) {
        assert!(self.told.lock().len() > 20);
        assert!(self.saw("presence/status") && self.saw("secure-data"), "the right bytes");
        for word in words {
            assert!(!self.saw(word), "{word} went over the hub");
        }
    }
}

fn contains(bytes: &[u8], word: &str) -> bool {
    bytes.windows(word.len()).any(|window| window == word.as_bytes())
}

async fn accept(
    listener: tokio::net::TcpListener,
    hub: SocketAddr,
    links: Arc<AtomicUsize>,
    record: Arc<impl Fn(bool, &Bytes) + Send + Sync + 'static>,
    lies: broadcast::Sender<Bytes>,
) {
    let mut running = tokio::task::JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        links.fetch_add(1, Ordering::Relaxed);
        let (record, mut lies) = (Arc::clone(&record), lies.subscribe());
        running.spawn(async move {
            // The hub may be away.
            let Ok(there) = TcpStream::connect(hub).await else { return };
            let Ok(near) = accept_async(stream).await else { return };
            let Ok((far, _)) = client_async(format!("ws://{hub}/"), there).await else { return };
            let (mut near_out, mut near_in) = near.split();
            let (mut far_out, mut far_in) = far.split();
            loop {
                let (by_hub, message) = tokio::select! {
                    Some(Ok(message)) = near_in.next() => (false, message),
                    Some(Ok(message)) = far_in.next() => (true, message),
                    Ok(lie) = lies.recv() => (true, Message::Binary(lie)),
                    else => return,
                };
                if let Message::Binary(bytes) = &message {
                    record(by_hub, bytes);
                }
                let ends = matches!(message, Message::Close(_));
                let sent = match by_hub {
                    true => near_out.send(message).await,
                    false => far_out.send(message).await,
                };
                if sent.is_err() || ends {
                    return;
                }
            }
        });
    }
}

/// A home whose daemon has this configuration.
pub fn home_with(config: &str) -> Arc<TempDir> {
    let home = Arc::new(tempfile::tempdir().unwrap());
    std::fs::write(home.path().join("config.toml"), config).unwrap();
    home
}

/// A daemon that finds nobody but through the hub: its ports are its own.
async fn daemon(hub: &str) -> Daemon {
    let home = home_with(&format!("hub = \"{hub}\"\n"));
    Daemon::start_with(home, Ports::free(), &[]).await
}

async fn trust(client: &Client, id: &str, kind: Option<TrustKind>) {
    let changed = client.call(TrustAddParams { id: id.to_owned(), kind }).await.unwrap();
    assert!(changed.trusted && changed.changed);
}

/// Both have a session with the hub and have heard of the other's agent.
async fn meet(one: &Daemon, a: &Agent, two: &Daemon, b: &Agent) {
    trust(&a.client, &b.id, None).await;
    trust(&b.client, &a.id, None).await;
    let seen =
        |id: String| move |l: &Value| l["event"] == "agent_seen" && l["agent"] == id.as_str();
    one.log.wait(0, "the other by gossip", seen(b.id.clone())).await;
    two.log.wait(0, "the other by gossip", seen(a.id.clone())).await;
}

async fn up(daemon: &Daemon, from: usize) -> usize {
    daemon.log.wait(from, "the hub", |l| l["event"] == "hub_up").await.0
}

/// Waits until an agent is listed under its own name.
async fn listed(agent: &Agent, name: &str) {
    let search = async {
        loop {
            let agents = agent.client.call(AgentsParams {}).await.unwrap().agents;
            if agents.iter().any(|listed| listed.name == name) {
                return;
            }
        }
    };
    tokio::time::timeout(crate::bench::HANG, search).await.expect("the other's name");
}

#[tokio::test]
async fn two_daemons_talk_through_a_hub_that_sees_only_ciphertext() {
    let hub = Hub::start(&["--listen", "127.0.0.1:0"]).await;
    let recorder = Recorder::start(hub.address).await;
    let one = daemon(&recorder.url()).await;
    let two = daemon(&recorder.url()).await;
    let mut alice = one.agent("alice-in-the-office").await;
    let mut bob = two.agent("bob-at-home").await;
    // Nobody is trusted: the hub is left alone, and the operator can see why.
    let before = one.status().await.hub.unwrap();
    assert!(!before.wanted && before.since.is_none() && before.url == recorder.url());
    assert_eq!(recorder.links.load(Ordering::Relaxed), 0);

    meet(&one, &alice, &two, &bob).await;
    listed(&alice, "bob-at-home").await;
    listed(&bob, "alice-in-the-office").await;
    alice.befriend(&mut bob).await;
    let sent = alice.dm(&bob.id, CANARY, Some(10)).await;
    assert_eq!(sent.deliveries[0].status, DeliveryStatus::Delivered);
    let got = bob.wait_dm(CANARY).await;
    // Another home is another machine, with a key of its own.
    assert!(got.body["fromMachine"].as_str().is_some_and(|name| !name.is_empty()), "{got:?}");
    let sent = bob.dm(&alice.id, CANARY, Some(10)).await;
    assert_eq!(sent.deliveries[0].status, DeliveryStatus::Delivered);
    alice.wait_dm(CANARY).await;
    let room = RoomCreateParams { name: "plans for dawn".into(), r#type: None, description: None };
    let room = alice.client.call(room).await.unwrap();
    let joined = bob.client.call(RoomJoinParams { room: room.path.clone() }).await.unwrap();
    assert_eq!(joined.members.len(), 2);
    let rooms = bob.client.call(RoomsParams {}).await.unwrap().rooms;
    assert!(rooms.iter().any(|listed| listed.path == room.path && listed.joined));
    let trace = MeshTraceParams { target: bob.id.clone(), timeout_ms: None };
    let traced = alice.client.call(trace).await.unwrap();
    assert_eq!((traced.relayed, traced.hub), (Some(true), Some(recorder.url())));

    recorder.saw_only_ciphertext(&[
        CANARY,
        "may I",
        "alice-in-the",
        "bob-at-home",
        "plans-for",
        one.home.path().to_str().unwrap(),
    ]);
    let health = hub.health().await;
    assert_eq!((&health["links"], &health["devices"]), (&2.into(), &2.into()));
    assert!(health["relayed"].as_u64().unwrap() > 10);
    let seen = one.status().await.hub.unwrap();
    assert!(seen.since.is_some() && seen.devices == 1);
    // The hub's own log has neither ids nor names.
    let log = hub.stop().await;
    log.wait(0, "the end", |l| l["event"] == "hub_stopped").await;
    assert!(!log.text().contains(&alice.id) && !log.text().contains("alice"));

    // Trusted no longer, alice is nobody to bob.
    let remove = TrustRemoveParams { id: alice.id.clone(), kind: None };
    assert!(bob.client.call(remove).await.unwrap().changed);
    let left = bob.client.call(TrustListParams {}).await.unwrap();
    assert!(left.devices.is_empty() && left.hub == Some(recorder.url()));
}

#[tokio::test]
async fn work_is_ordered_by_name_through_a_hub() {
    let hub = Hub::start(&["--listen", "127.0.0.1:0"]).await;
    let recorder = Recorder::start(hub.address).await;
    let one = daemon(&recorder.url()).await;
    let config = format!("hub = \"{}\"\n{}", recorder.url(), works("cat", "\"peers\""));
    let two = Daemon::start_with(home_with(&config), Ports::free(), &[]).await;
    let alice = one.agent("alice-in-the-office").await;
    let bob = two.agent("bob-at-home").await;
    meet(&one, &alice, &two, &bob).await;
    listed(&alice, "bob-at-home").await;
    two.event("acp_office_opened").await;
    let done = call(&one, order("bob-at-home", 15_000)).await.unwrap();
    assert_eq!(done["status"], "SETTLED", "{done}\n{}\n{}", one.log.text(), two.log.text());
    // Neither who ordered what from whom nor that it was an order.
    recorder.saw_only_ciphertext(&["did:key", "x-commsd-acp", "envelope"]);
}

#[tokio::test]
async fn a_hub_that_restarts_loses_nothing_that_was_sent() {
    let hub = Hub::start(&["--listen", "127.0.0.1:0"]).await;
    let (address, url) = (hub.address.to_string(), format!("ws://{}/", hub.address));
    let (one, two) = (daemon(&url).await, daemon(&url).await);
    let (mut alice, mut bob) = (one.agent("alice").await, two.agent("bob").await);
    meet(&one, &alice, &two, &bob).await;
    alice.befriend(&mut bob).await;
    let marks = (one.log.len(), two.log.len());
    drop(hub);
    one.log.wait(marks.0, "the end", |l| l["event"] == "hub_down").await;
    let sent = alice.dm(&bob.id, "while the hub was away", None).await;
    assert_ne!(sent.deliveries[0].status, DeliveryStatus::Refused);
    let hub = Hub::start(&["--listen", &address]).await;
    up(&one, marks.0).await;
    up(&two, marks.1).await;
    bob.wait_dm("while the hub was away").await;
    let again = |e: &commsd::api::types::Event| {
        e.kind() == "dm" && e.body["message"]["content"] == "while the hub was away"
    };
    assert_eq!(bob.count_seen(again), 0, "shown once");
    hub.stop().await;
}

#[tokio::test]
async fn replayed_hellos_cause_no_storm() {
    let hub = Hub::start(&["--listen", "127.0.0.1:0"]).await;
    let recorder = Recorder::start(hub.address).await;
    let (one, two) = (daemon(&recorder.url()).await, daemon(&recorder.url()).await);
    let (mut alice, mut bob) = (one.agent("alice").await, two.agent("bob").await);
    meet(&one, &alice, &two, &bob).await;
    alice.befriend(&mut bob).await;
    let is_hello = |bytes: &Bytes| match Frame::decode(bytes) {
        Ok(Frame::RelayData { payload, .. }) => {
            matches!(Frame::decode(&payload), Ok(Frame::SecureHello(_)))
        }
        _ => false,
    };
    let count = |by: bool| {
        recorder.told.lock().iter().filter(|(by_hub, b)| *by_hub == by && is_hello(b)).count()
    };
    let hellos: Vec<Bytes> = {
        let told = recorder.told.lock();
        told.iter().filter(|(by_hub, b)| *by_hub && is_hello(b)).map(|(_, b)| b.clone()).collect()
    };
    assert!(!hellos.is_empty());
    let before = count(false);
    // Every old hello two hundred times, to both. What was read in between says that all were.
    for _ in 0..200 {
        for hello in &hellos {
            recorder.lies.send(hello.clone()).unwrap();
        }
        tokio::task::yield_now().await;
    }
    let text = "after the storm that was none";
    alice.dm(&bob.id, text, None).await;
    bob.wait_dm(text).await;
    let said = count(false) - before;
    // Each side at most once in five seconds, and this takes no longer than twenty and a time-out.
    assert!(said <= 2 * 8, "{said} hellos in answer to {}", 200 * hellos.len());
}

/// A certificate authority of one's own, and a certificate for 127.0.0.1 by it.
fn certificates(dir: &Path) -> [PathBuf; 3] {
    let [authority, chain, key] = ["ca.pem", "chain.pem", "key.pem"].map(|name| dir.join(name));
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca_key = rcgen::KeyPair::generate().unwrap();
    let ca = params.self_signed(&ca_key).unwrap();
    let issuer = rcgen::Issuer::new(params, ca_key);
    let own_key = rcgen::KeyPair::generate().unwrap();
    let own = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let own = own.signed_by(&own_key, &issuer).unwrap();
    std::fs::write(&authority, ca.pem()).unwrap();
    std::fs::write(&chain, own.pem()).unwrap();
    std::fs::write(&key, own_key.serialize_pem()).unwrap();
    [authority, chain, key]
}

#[tokio::test]
async fn a_hub_with_tls_is_believed_only_by_its_certificate() {
    let dir = tempfile::tempdir().unwrap();
    let [authority, chain, key] = certificates(dir.path());
    let (chain, key) = (chain.to_str().unwrap(), key.to_str().unwrap());
    let hub = Hub::start(&["--listen", "127.0.0.1:0", "--tls-cert", chain, "--tls-key", key]).await;
    let url = format!("wss://{}/", hub.address);
    let start = |authority: Option<PathBuf>| {
        let home = home_with(&format!("hub = \"{url}\"\n"));
        let ports = Ports::free();
        let mut command = crate::daemon::command(home.path(), ports, &[]);
        if let Some(authority) = authority {
            command.env("SSL_CERT_FILE", authority);
        }
        Daemon::spawn(command, home, ports)
    };
    let (one, two) = (start(Some(authority.clone())).await, start(Some(authority)).await);
    let (mut alice, mut bob) = (one.agent("alice").await, two.agent("bob").await);
    meet(&one, &alice, &two, &bob).await;
    alice.befriend(&mut bob).await;
    // The system's own authorities do not know it: nothing is said to it.
    let other = dir.path().join("other");
    std::fs::create_dir(&other).unwrap();
    let [stranger, ..] = certificates(&other);
    let doubting = start(Some(stranger)).await;
    let carol = doubting.agent("carol").await;
    trust(&carol.client, &bob.id, None).await;
    let (_, down) = doubting.log.wait(0, "a refusal", |l| l["event"] == "hub_down").await;
    assert_eq!(down["reason"], "untrusted_certificate");
}

#[tokio::test]
async fn users_trust_each_other_and_all_their_agents_meet() {
    let hub = Hub::start(&["--listen", "127.0.0.1:0"]).await;
    let url = format!("ws://{}/", hub.address);
    let (one, two) = (daemon(&url).await, daemon(&url).await);
    let (mut alice, mut bob) = (one.agent("alice").await, two.agent("bob").await);
    let hers = alice.client.call(WhoamiParams {}).await.unwrap().principal.unwrap();
    let his = bob.client.call(WhoamiParams {}).await.unwrap().principal.unwrap();
    trust(&alice.client, &his, Some(TrustKind::Principal)).await;
    trust(&bob.client, &hers, Some(TrustKind::Principal)).await;
    listed(&alice, "bob").await;
    listed(&bob, "alice").await;
    alice.befriend(&mut bob).await;
    // One that comes later is known as well.
    let mut carol = two.agent("carol").await;
    listed(&alice, "carol").await;
    carol.befriend(&mut alice).await;
}

#[tokio::test]
async fn a_hub_that_is_open_to_others_without_tls_says_so() {
    let open = Hub::start(&["--listen", "0.0.0.0:0"]).await;
    open.log.wait(0, "a warning", |l| l["event"] == "hub_plaintext").await;
    let log = open.stop().await;
    assert!(log.text().contains("give --tls-cert and --tls-key"), "{}", log.text());
    // Where nobody else hears it, or a proxy has the certificate, there is nothing to warn of.
    for args in [&["--listen", "127.0.0.1:0"][..], &["--listen", "0.0.0.0:0", "--behind-proxy"]] {
        let log = Hub::start(args).await.stop().await;
        assert!(
            !log.text().contains("plaintext") && !log.text().contains("warning"),
            "{}",
            log.text()
        );
    }
}

#[tokio::test]
async fn what_cannot_be_served_is_said_before_anything_is_bound() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = taken.local_addr().unwrap().to_string();
    for (args, code, word) in [
        (vec!["hub"], 64, "--listen"),
        (vec!["hub", "--listen", "everywhere"], 64, "not an address"),
        (vec!["hub", "--listen", &at], 64, "in use"),
        (vec!["hub", "--listen", "127.0.0.1:0", "--tls-cert", "/x"], 64, "--tls-key"),
        (
            vec!["hub", "--listen", "127.0.0.1:0", "--tls-cert", "/no/x", "--tls-key", "/no/y"],
            64,
            "/no/x",
        ),
    ] {
        let ran = Command::new(env!("CARGO_BIN_EXE_commsd")).args(&args).output().await.unwrap();
        let said = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert_eq!(ran.status.code(), Some(code), "{args:?}\n{said}");
        assert!(said.contains(word), "{args:?}\n{said}");
    }
    // A daemon does not start with a hub that it must not believe.
    for (url, word) in [("ws://192.0.2.1/", "not encrypted"), ("https://x/", "not a URL")] {
        let home = home_with(&format!("hub = \"{url}\"\n"));
        let ran = crate::daemon::command(home.path(), Ports::free(), &["--check"]).output().await;
        let ran = ran.unwrap();
        assert_eq!(ran.status.code(), Some(64));
        assert!(String::from_utf8_lossy(&ran.stderr).contains(word));
    }
}

#[tokio::test]
async fn a_machine_is_connected_to_by_name_once_it_allows_it() {
    let home = Arc::new(tempfile::tempdir().unwrap());
    let one = Daemon::start_with(home, Ports::free(), &["--listen", "127.0.0.1:0"]).await;
    let (_, listening) = one
        .log
        .wait(0, "the listener", |l| l["event"] == "listening" && l["what"] == "network")
        .await;
    let port = listening["address"].as_str().unwrap().parse::<SocketAddr>().unwrap().port();
    let two = Daemon::start(Ports::free()).await;
    let (mut alice, mut bob) = (one.agent("alice").await, two.agent("bob").await);
    let connect = |host: &str, port| MeshConnectParams { host: host.into(), port };
    for (host, port, code) in [
        ("", port, "invalid_params"),
        ("127.0.0.1", 0, "invalid_params"),
        ("ws://127.0.0.1", port, "invalid_params"),
        ("no such host", port, "invalid_params"),
        ("127.0.0.1", 1, "connect_failed"),
    ] {
        let error = bob.client.call(connect(host, port)).await.unwrap_err();
        assert_eq!(error.code, code, "{host}");
    }
    // Itself is nobody to connect to.
    let own = alice.client.call(connect("127.0.0.1", port)).await.unwrap_err();
    assert_eq!(own.code, "connect_refused");

    let connected = bob.client.call(connect("localhost", port)).await.unwrap();
    assert_eq!(connected.device, one.device().await);
    // Until the other side has said yes, it is nobody's peer.
    alice.wait_kind("connection_request").await;
    assert!(!two.log.text().contains("peer_up"), "{}", two.log.text());
    // The operator decides as well, without being an agent.
    let (operator, _events) = Client::connect(&one.socket(), "test").await.unwrap();
    let pending = operator.call(PendingParams {}).await.unwrap().requests;
    assert_eq!(pending[0].kind, PendingKind::Mesh);
    let yes =
        AcceptParams { id: Some(pending[0].id.clone()), room: None, requester: None, terms: None };
    assert!(operator.call(yes.clone()).await.unwrap().accepted);
    assert_eq!(operator.call(yes).await.unwrap_err().code, "not_pending");
    two.log
        .wait(0, "the other machine", |l| l["event"] == "peer_up" && l["origin"] == "network")
        .await;
    // Nobody here is asked again: it was this side's wish.
    assert!(bob.pending(PendingKind::Mesh).await.is_empty());
    listed(&bob, "alice").await;
    listed(&alice, "bob").await;
    alice.befriend(&mut bob).await;
}

/// Not a test of its own: the recorder as a process, on the machine where a test has put it.
#[tokio::test]
#[ignore = "started by the test of two machines"]
async fn recorder_on_its_machine() {
    let variable = |name: &str| std::env::var(name);
    let (Ok(at), Ok(hub), Ok(file)) =
        (variable("RECORD_AT"), variable("RECORD_HUB"), variable("RECORD_FILE"))
    else {
        return;
    };
    let file = File::create_new(file).unwrap();
    let _recorder = Recorder::start_at(&at, hub.parse().unwrap(), Some(file)).await;
    println!("recording");
    // Until the test that has started it ends it.
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn two_machines_talk_through_a_hub_and_a_capture_shows_only_ciphertext() {
    let Some(machines) = Machines::make().await else { return };
    let dir = tempfile::tempdir().unwrap();
    let capture = dir.path().join("capture");
    // The hub and what records it are on the first machine; the second one sees nothing but the
    // recorder's port.
    let mut command = machines.command(0, env!("CARGO_BIN_EXE_commsd"));
    command.args(["hub", "--log", "json", "--listen", "127.0.0.1:0"]);
    let hub = Hub::spawn(command).await;
    let mut command = machines.command(0, std::env::current_exe().unwrap());
    let mut recorder = command
        .args(["--ignored", "--exact", "--nocapture", "hub::recorder_on_its_machine"])
        .env("RECORD_AT", "10.77.0.1:8000")
        .env("RECORD_HUB", hub.address.to_string())
        .env("RECORD_FILE", &capture)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(recorder.stdout.take().unwrap()).lines();
    while soon(lines.next_line()).await.unwrap().expect("it records") != "recording" {}

    let config = "hub = \"ws://10.77.0.1:8000/\"\nhub-plaintext = true\n";
    let args = ["--no-broadcast", "--no-first-contact"];
    let one = machines.daemon(0, home_with(config), &args).await;
    let two = machines.daemon(1, home_with(config), &args).await;
    let mut alice = one.agent("alice-in-the-office").await;
    let mut bob = two.agent("bob-at-home").await;
    meet(&one, &alice, &two, &bob).await;
    listed(&alice, "bob-at-home").await;
    alice.befriend(&mut bob).await;
    let sent = alice.dm(&bob.id, CANARY, Some(10)).await;
    assert_eq!(sent.deliveries[0].status, DeliveryStatus::Delivered);
    bob.wait_dm(CANARY).await;
    bob.dm(&alice.id, CANARY, Some(10)).await;
    alice.wait_dm(CANARY).await;
    // They have no other way to each other.
    assert!(one.status().await.peers.iter().all(|peer| !peer.machine_local));
    assert_eq!(one.status().await.hub.unwrap().devices, 1);

    recorder.kill().await.unwrap();
    let seen = std::fs::read(&capture).unwrap();
    assert!(contains(&seen, "secure-data") && contains(&seen, "presence/status"));
    for word in [CANARY, "may I", "you may", "alice-in-the", "bob-at-home"] {
        assert!(!contains(&seen, word), "{word} went over the hub");
    }
}
