//! What outlives the daemon: messages on their way, mail, acknowledgements, rooms, histories and
//! questions, through `kill -9` at any moment; and what a store that is no good does to a start.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use commsd::api::client::{Client, Notification, Notifications};
use commsd::api::types::{
    AgentsParams, AttachParams, DeliveryStatus, DmParams, Event, EventsAckParams,
    EventsSubscribeParams, PendingKind, RoomCreateParams, RoomHistoryParams, RoomJoinParams,
    RoomKickParams, SendParams, UpdateParams, Visibility, WhoamiParams,
};
use commsd::identity::entropy::{Entropy as _, SeededEntropy};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::process::Command;
use tokio::sync::watch;

use crate::bench::soon;
use crate::daemon::{Agent, Daemon, Log, Ports, command};

fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}: {text}")),
        Err(_) => default,
    }
}

async fn room(agent: &Agent, name: &str) -> String {
    let create = RoomCreateParams { name: name.into(), r#type: None, description: None };
    agent.client.call(create).await.unwrap().path
}

async fn join(agent: &Agent, room: &str) {
    agent.client.call(RoomJoinParams { room: room.into() }).await.unwrap();
}

async fn post(agent: &Agent, room: &str, text: &str) -> Vec<DeliveryStatus> {
    let send = SendParams {
        room: room.into(),
        text: text.to_owned().try_into().unwrap(),
        timing: None,
        reply_to: None,
    };
    let sent = agent.client.call(send).await.unwrap();
    sent.deliveries.iter().map(|delivery| delivery.status).collect()
}

async fn texts(agent: &Agent, room: &str) -> Vec<String> {
    let history = RoomHistoryParams { room: room.into(), since: None, limit: None };
    let history = agent.client.call(history).await.unwrap();
    history.messages.into_iter().map(|message| message.text).collect()
}

/// The text of the message that an event carries; empty without one.
fn content(event: &Event) -> &str {
    event.body.get("message").and_then(|message| message["content"].as_str()).unwrap_or_default()
}

#[tokio::test]
async fn mail_and_acknowledgements_outlive_the_daemon() {
    let daemon = Daemon::start(Ports::free()).await;
    let ports = daemon.ports;
    let (mut alice, mut bob) = (daemon.agent("alice").await, daemon.agent("bob").await);
    alice.befriend(&mut bob).await;
    for n in 0..6 {
        alice.dm(&bob.id, &format!("mail {n}"), None).await;
    }
    let third = bob.wait_dm("mail 2").await;
    let last = bob.wait_dm("mail 5").await;
    bob.ack(&third).await;
    // One of a harness, which is not in service between its sessions.
    let eve = Agent::attach(&daemon.socket(), "mcp", Some("eve"), daemon.home.path()).await;
    let eve_id = eve.id.clone();
    // Answered once it is on disk.
    let tagged = UpdateParams {
        status: None,
        visibility: None,
        name: None,
        tags: Some(vec!["away".into()]),
        consent: None,
    };
    eve.client.call(tagged).await.unwrap();
    drop((alice, bob, eve));
    let home = daemon.kill().await;

    let daemon = Daemon::start_with(home, ports, &[]).await;
    let mut bob = daemon.agent("bob").await;
    let agents = bob.client.call(AgentsParams {}).await.unwrap().agents;
    let eve = agents.iter().find(|agent| agent.id == eve_id).unwrap();
    let own = agents.iter().find(|agent| agent.id == bob.id).unwrap();
    assert!(eve.local && eve.machine == own.machine, "of this daemon, though away: {eve:?}");
    let mut seqs = Vec::new();
    for n in 3..6 {
        seqs.push(bob.wait_dm(&format!("mail {n}")).await.seq);
    }
    assert!(seqs.is_sorted() && seqs[2] == last.seq, "in order, by the same numbers: {seqs:?}");
    // What had been acknowledged does not come again, and new numbers are above all others.
    let alice = daemon.agent("alice").await;
    alice.dm(&bob.id, "new", None).await;
    let new = bob.wait_dm("new").await;
    assert!(new.seq > last.seq);
    assert_eq!(bob.count_seen(|e| e.kind() == "dm"), 0);
    bob.ack(&new).await;
    // A client whose number is of another store misses nothing.
    alice.dm(&bob.id, "newer", None).await;
    bob.wait_dm("newer").await;
    let subscribe = EventsSubscribeParams { after: Some(new.seq + 5_000_000) };
    assert_eq!(bob.client.call(subscribe).await.unwrap().after, new.seq);
    bob.wait_dm("newer").await;
}

#[tokio::test]
async fn shell_agents_are_in_service_again_before_anybody_asks_for_them() {
    let daemon = Daemon::start(Ports::free()).await;
    let ports = daemon.ports;
    let (mut alice, mut bob) = (daemon.agent("alice").await, daemon.agent("bob").await);
    alice.befriend(&mut bob).await;
    let hidden = UpdateParams {
        status: None,
        visibility: Some(Visibility::Hidden),
        name: None,
        tags: Some(vec!["night".into()]),
        consent: None,
    };
    alice.client.call(hidden).await.unwrap();
    let alice_id = alice.id.clone();
    drop((alice, bob));
    let home = daemon.kill().await;

    let daemon = Daemon::start_with(home, ports, &[]).await;
    let back = |id: &str| {
        let id = id.to_owned();
        move |l: &Value| l["event"] == "slot_restored" && l["agent"] == id.as_str()
    };
    daemon.log.wait(0, "alice's slot", back(&alice_id)).await;
    // Whoever wrote once from a shell, and is gone, can be answered.
    let mut bob = daemon.agent("bob").await;
    let answer = bob.dm(&alice_id, "an answer", None).await;
    assert_eq!(answer.deliveries[0].status, DeliveryStatus::Delivered);
    let mut alice = daemon.agent("alice").await;
    alice.wait_dm("an answer").await;
    let whoami = alice.client.call(WhoamiParams {}).await.unwrap();
    assert_eq!((whoami.visibility, whoami.tags), (Visibility::Hidden, vec!["night".to_owned()]));
    bob.wait_dm("may I").await;
}

#[tokio::test]
async fn a_message_waits_on_disk_for_a_recipient_that_is_away() {
    let (ports, home) = (Ports::free(), Arc::new(tempfile::tempdir().unwrap()));
    let one = Daemon::start_with(home, ports, &[]).await;
    let two = Daemon::start(ports).await;
    let (mut alice, mut bob) = (one.agent("alice").await, two.agent("bob").await);
    tokio::join!(one.has_met(&bob.id), two.has_met(&alice.id));
    alice.befriend(&mut bob).await;
    let bob_id = bob.id.clone();
    drop(bob);
    let mark = one.log.len();
    let away = two.kill().await;
    one.log
        .wait(mark, "bob's end", |l| l["event"] == "peer_down" && l["device"] == bob_id.as_str())
        .await;
    let sent = alice.dm(&bob_id, "kept", None).await;
    let delivery = &sent.deliveries[0];
    assert_eq!(delivery.status, DeliveryStatus::Queued);
    assert_eq!(delivery.reason.as_deref(), Some("not_connected"));
    assert_eq!(delivery.waiting, Some(1));
    assert!(delivery.oldest_ms.is_some_and(|age| age < 20_000));
    let queues = one.status().await.queues;
    assert_eq!(queues.outgoing, 1);
    assert!(queues.oldest_ms.is_some());
    drop(alice);
    let home = one.kill().await;

    // Nobody attaches as alice: her message goes out all the same, and its fate is kept for her.
    let one = Daemon::start_with(home, ports, &[]).await;
    let two = Daemon::start_with(away, ports, &[]).await;
    let mut bob = two.agent("bob").await;
    bob.wait_dm("kept").await;
    let mut alice = one.agent("alice").await;
    alice
        .wait("the outcome", |e| {
            e.kind() == "delivery_status"
                && e.body["messageId"] == sent.message_id.as_str()
                && e.body["delivery"]["status"] == "delivered"
        })
        .await;
}

#[tokio::test]
async fn a_question_waits_on_disk_for_its_answer() {
    let ports = Ports::free();
    let one = Daemon::start(ports).await;
    let two = Daemon::start(ports).await;
    let (alice, mut bob) = (one.agent("alice").await, two.agent("bob").await);
    tokio::join!(one.has_met(&bob.id), two.has_met(&alice.id));
    let sent = alice.dm(&bob.id, "may I", None).await;
    // Queued where alice's own session with bob is not there yet; he is asked all the same.
    let status = sent.deliveries[0].status;
    assert!(matches!(status, DeliveryStatus::AwaitingConsent | DeliveryStatus::Queued));
    bob.wait_kind("room_join_request").await;
    let asked = bob.pending(PendingKind::Dm).await;
    drop((alice, bob));
    let (first, second) = (one.kill().await, two.kill().await);

    // Both sides have forgotten nothing: the question is there, and what waits for the answer.
    let two = Daemon::start_with(second, ports, &[]).await;
    let mut bob = two.agent("bob").await;
    let pending = bob.pending(PendingKind::Dm).await;
    assert_eq!(pending.iter().map(|p| &p.id).collect::<Vec<_>>(), vec![&asked[0].id]);
    bob.accept(&pending[0]).await;
    assert!(bob.pending(PendingKind::Dm).await.is_empty());
    let _one = Daemon::start_with(first, ports, &[]).await;
    bob.wait_dm("may I").await;
    assert!(bob.pending(PendingKind::Dm).await.is_empty(), "nobody was asked twice");
}

#[tokio::test]
async fn rooms_histories_and_kicks_outlive_the_daemon() {
    let daemon = Daemon::start(Ports::free()).await;
    let ports = daemon.ports;
    let mut agents = Vec::new();
    for name in ["alice", "bob", "carol"] {
        agents.push(daemon.agent(name).await);
    }
    let path = room(&agents[0], "r").await;
    for agent in &agents[1..] {
        join(agent, &path).await;
    }
    post(&agents[1], &path, "one").await;
    post(&agents[0], &path, "two").await;
    let kick = RoomKickParams { room: path.clone(), agent: agents[2].id.clone() };
    agents[0].client.call(kick).await.unwrap();
    let ids: Vec<String> = agents.iter().map(|agent| agent.id.clone()).collect();
    drop(agents);
    let home = daemon.kill().await;

    let daemon = Daemon::start_with(home, ports, &[]).await;
    let mut bob = daemon.agent("bob").await;
    let alice = daemon.agent("alice").await;
    assert_eq!(alice.id, ids[0]);
    assert_eq!(texts(&bob, &path).await, ["one", "two"]);
    assert_eq!(post(&alice, &path, "three").await, [DeliveryStatus::Delivered]);
    bob.wait("the third", |e| content(e) == "three").await;
    assert_eq!(texts(&alice, &path).await, ["one", "two", "three"]);
    let carol = daemon.agent("carol").await;
    let rooms = carol.client.call(WhoamiParams {}).await.unwrap().rooms;
    assert!(rooms.is_empty(), "put out is put out: {rooms:?}");
}

#[tokio::test]
async fn an_ephemeral_daemon_writes_no_state() {
    let home = Arc::new(tempfile::tempdir().unwrap());
    let daemon = Daemon::start_with(Arc::clone(&home), Ports::free(), &["--ephemeral"]).await;
    let (mut alice, mut bob) = (daemon.agent("alice").await, daemon.agent("bob").await);
    alice.befriend(&mut bob).await;
    daemon.stop().await;
    assert!(!home.path().join("state/store").exists());
}

#[tokio::test]
async fn nothing_is_stored_of_what_concerns_passing_agents_only() {
    let daemon = Daemon::start(Ports::free()).await;
    let mut alice = daemon.passing_agent("alice").await;
    let mut bob = daemon.passing_agent("bob").await;
    alice.befriend(&mut bob).await;
    alice.dm(&bob.id, "said between two who pass", None).await;
    let (den, hall) = (room(&alice, "den").await, room(&alice, "hall").await);
    for path in [&den, &hall] {
        join(&bob, path).await;
    }
    post(&alice, &den, "said in the den").await;
    post(&alice, &hall, "said in the hall").await;
    // From here on the hall concerns somebody who stays, with all that was said there before.
    let mut carol = daemon.agent("carol").await;
    join(&carol, &hall).await;
    post(&alice, &hall, "heard in the hall").await;
    carol.wait("the message", |e| content(e) == "heard in the hall").await;
    alice.befriend(&mut carol).await;
    alice.dm(&carol.id, "said to one who stays", None).await;
    carol.wait_dm("said to one who stays").await;
    let home = Arc::clone(&daemon.home);
    daemon.stop().await;

    let file = std::fs::read(home.path().join("state/store/store.redb")).unwrap();
    let stored = |text: &str| file.windows(text.len()).any(|part| part == text.as_bytes());
    for text in ["said in the hall", "heard in the hall", "said to one who stays"] {
        assert!(stored(text), "{text}");
    }
    for text in ["said between two who pass", "said in the den", den.as_str()] {
        assert!(!stored(text), "{text}");
    }
    let daemon = Daemon::start_with(home, Ports::free(), &[]).await;
    let carol = daemon.agent("carol").await;
    assert_eq!(texts(&carol, &hall).await, ["said in the hall", "heard in the hall"]);
}

/// What a daemon that cannot start says, and its exit code.
async fn refused(home: &Path, args: &[&str]) -> (Option<i32>, String) {
    let mut command = command(home, Ports::free(), args);
    let output = soon(command.stderr(std::process::Stdio::piped()).output()).await.unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[tokio::test]
async fn a_store_that_is_no_good_is_refused_with_what_to_do_and_left_alone() {
    let home = Arc::new(tempfile::tempdir().unwrap());
    let daemon = Daemon::start_with(Arc::clone(&home), Ports::free(), &[]).await;
    let (mut alice, mut bob) = (daemon.agent("alice").await, daemon.agent("bob").await);
    alice.befriend(&mut bob).await;

    // Another daemon with the same state, by another socket.
    let socket = home.path().join("other/commsd.sock");
    let (code, said) = refused(home.path(), &["--socket", &socket.to_string_lossy()]).await;
    assert_eq!(code, Some(64), "{said}");
    assert!(said.contains("in use by another process") && said.contains("--home"), "{said}");
    daemon.stop().await;

    let file = home.path().join("state/store/store.redb");
    let whole = std::fs::read(&file).unwrap();
    let mut flipped = whole.clone();
    flipped[64] ^= 0x10;
    for (bytes, what) in
        [(&whole[..whole.len() / 2], "cut short"), (&flipped, "flipped"), (&[][..], "empty")]
    {
        std::fs::write(&file, bytes).unwrap();
        let (code, said) = refused(home.path(), &[]).await;
        // Damage is no matter of configuration.
        assert_eq!(code, Some(1), "{what}: {said}");
        assert!(said.contains("cannot be read") && said.contains("put back a copy"), "{said}");
        assert!(std::fs::metadata(&file).unwrap().len() <= whole.len() as u64, "{what}");
        // It can be gone without meanwhile.
        let without = Daemon::start_with(Arc::clone(&home), Ports::free(), &["--ephemeral"]).await;
        without.stop().await;
    }
    std::fs::write(&file, &whole).unwrap();
    let daemon = Daemon::start_with(Arc::clone(&home), Ports::free(), &[]).await;
    daemon.agent("bob").await.wait_dm("may I").await;
    daemon.stop().await;
}

#[tokio::test]
async fn a_store_that_is_taken_away_while_the_daemon_runs_is_noticed() {
    let home = Arc::new(tempfile::tempdir().unwrap());
    let daemon = Daemon::start_with(Arc::clone(&home), Ports::free(), &[]).await;
    daemon.log.wait(0, "a new store", |l| l["event"] == "store_created").await;
    let alice = daemon.agent("alice").await;
    let health = async || -> Vec<String> {
        daemon.status().await.health.into_iter().map(|health| health.code).collect()
    };
    assert!(!health().await.contains(&"store_gone".to_owned()));
    let store = home.path().join("state/store");
    let away = home.path().join("state/away");
    std::fs::rename(&store, &away).unwrap();
    assert!(health().await.contains(&"store_gone".to_owned()));
    daemon
        .log
        .wait(0, "the condition", |l| l["event"] == "health_raised" && l["code"] == "store_gone")
        .await;
    // What is not on disk is not said to be.
    let create = RoomCreateParams { name: "den".into(), r#type: None, description: None };
    let error = alice.client.call(create).await.unwrap_err();
    assert_eq!(error.code, "store_failed", "{error:?}");
    // Back again, it is written.
    std::fs::rename(&away, &store).unwrap();
    let gone = |l: &serde_json::Value| l["event"] == "health_cleared" && l["code"] == "store_gone";
    assert!(!health().await.contains(&"store_gone".to_owned()));
    daemon.log.wait(0, "the end of the condition", gone).await;
    daemon.stop().await;
    // A mark alone is the mark of something.
    std::fs::rename(store.join("store.redb"), home.path().join("kept")).unwrap();
    let (code, said) = refused(home.path(), &[]).await;
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("is missing") && said.contains("store.mark"), "{said}");
    std::fs::rename(home.path().join("kept"), store.join("store.redb")).unwrap();
    std::fs::write(store.join("store.mark"), "").unwrap();
    let daemon = Daemon::start_with(Arc::clone(&home), Ports::free(), &[]).await;
    let unmarked =
        |l: &serde_json::Value| l["event"] == "health_raised" && l["code"] == "store_unmarked";
    daemon.log.wait(0, "the doubt", unmarked).await;
    daemon.stop().await;
}

#[allow(clippy::print_stdout)]
fn say(what: &str) {
    println!("{what}");
}

// --- killed at any moment -------------------------------------------------------------------------

/// A daemon that is killed and started again; clients are told when.
struct Victim {
    home: Arc<tempfile::TempDir>,
    ports: Ports,
    /// How often it has been started; its clients wait for the next time.
    up: watch::Sender<u64>,
    daemon: Option<Daemon>,
    /// Of each life.
    logs: Vec<Arc<Log>>,
}

impl Victim {
    async fn start(ports: Ports) -> Self {
        let home = Arc::new(tempfile::tempdir().unwrap());
        let daemon = Daemon::start_with(Arc::clone(&home), ports, &[]).await;
        let logs = vec![Arc::clone(&daemon.log)];
        Self { home, ports, up: watch::Sender::new(1), daemon: Some(daemon), logs }
    }

    fn socket(&self) -> PathBuf {
        self.home.path().join("run/commsd.sock")
    }

    async fn kill(&mut self) {
        self.daemon.take().unwrap().kill().await;
        let daemon = Daemon::start_with(Arc::clone(&self.home), self.ports, &[]).await;
        self.logs.push(Arc::clone(&daemon.log));
        self.daemon = Some(daemon);
        self.up.send_modify(|times| *times += 1);
    }
}

async fn attach(socket: &Path, name: &str) -> Option<(Client, Notifications)> {
    let (client, events) = Client::connect(socket, "test").await.ok()?;
    let attach = AttachParams {
        harness: "cli".to_owned().try_into().unwrap(),
        cwd: "/".into(),
        pid: std::process::id(),
        key: Some(name.to_owned().try_into().unwrap()),
        name: None,
        ephemeral: None,
        project_room: None,
        harness_pid: None,
    };
    client.call(attach).await.ok()?;
    Some((client, events))
}

/// How many messages each text was promised to arrive as, by what its sender was told.
#[derive(Default)]
struct Told {
    /// With the message's id and state.
    promised: BTreeMap<String, (String, DeliveryStatus)>,
    unknown: BTreeSet<String>,
    refused: Vec<String>,
}

/// Pause of a writer between two messages.
const PACE: Duration = Duration::from_millis(5);

/// Sends texts, through whatever happens to its daemon.
async fn send_all(
    socket: PathBuf,
    mut up: watch::Receiver<u64>,
    to: (String, String),
    texts: Vec<String>,
    told: Arc<Mutex<Told>>,
) {
    let mut texts = texts.into_iter().peekable();
    while texts.peek().is_some() {
        let life = *up.borrow_and_update();
        if let Some((client, _events)) = attach(&socket, "alice").await {
            while let Some(text) = texts.peek().cloned() {
                // Time enough to be killed in.
                tokio::time::sleep(PACE).await;
                let body = text.clone().try_into().unwrap();
                let (timing, reply_to) = (None, None);
                let answer = if text.ends_with('r') {
                    let room = to.1.clone();
                    client.call(SendParams { room, text: body, timing, reply_to }).await
                } else {
                    let agent = to.0.clone();
                    let dm = DmParams { agent, text: body, timing, reply_to, wait: None };
                    client.call(dm).await
                };
                let mut told = told.lock();
                match answer {
                    Ok(sent) => match sent.deliveries[0].status {
                        status @ (DeliveryStatus::Delivered
                        | DeliveryStatus::Queued
                        | DeliveryStatus::Accepted
                        | DeliveryStatus::AwaitingConsent
                        | DeliveryStatus::Read) => {
                            told.promised.insert(text, (sent.message_id, status));
                        }
                        other => told.refused.push(format!("{text}: {other:?}")),
                    },
                    // Whether it was taken nobody knows; it is not sent again.
                    Err(error) if error.code == "disconnected" || error.code == "daemon_gone" => {
                        told.unknown.insert(text);
                        texts.next();
                        break;
                    }
                    Err(error) => {
                        // The daemon has just come back and does not know everything again yet.
                        told.unknown.insert(text);
                        drop(told);
                        assert_ne!(error.code, "invalid_params", "{error:?}");
                        texts.next();
                        break;
                    }
                }
                texts.next();
            }
        }
        if texts.peek().is_some() && *up.borrow() == life {
            // Gone: until it is there again. (Alive, it is asked again at once.)
            let _ = tokio::time::timeout(Duration::from_millis(500), up.changed()).await;
        }
    }
}

/// What the recipient has been shown.
#[derive(Default)]
struct Shown {
    /// Texts in the order in which they came first.
    order: Vec<String>,
    /// Those whose acknowledgement has been answered.
    taken: BTreeSet<String>,
    /// In which life of the daemon each came last.
    lives: BTreeMap<String, u64>,
    faults: Vec<String>,
}

/// Takes everything that comes for the recipient, one by one.
async fn take_all(
    socket: PathBuf,
    mut up: watch::Receiver<u64>,
    shown: Arc<Mutex<Shown>>,
    count: watch::Sender<usize>,
) {
    loop {
        let life = *up.borrow_and_update();
        if let Some((client, mut events)) = attach(&socket, "bob").await
            && client.call(EventsSubscribeParams { after: None }).await.is_ok()
        {
            while let Some(notification) = events.recv().await {
                let Notification::Event(event) = notification else { continue };
                let text = content(&event).to_owned();
                if !text.is_empty() {
                    let mut shown = shown.lock();
                    match shown.lives.insert(text.clone(), life) {
                        None => shown.order.push(text.clone()),
                        Some(before) if before == life => {
                            shown.faults.push(format!("{text}: twice in one life"));
                        }
                        Some(_) if shown.taken.contains(&text) => {
                            shown.faults.push(format!("{text}: again though acknowledged"));
                        }
                        Some(_) => {}
                    }
                }
                count.send_replace(shown.lock().order.len());
                // Should the answer be lost, it may come again, or not.
                if client.call(EventsAckParams { seq: event.seq }).await.is_err() {
                    break;
                }
                if !text.is_empty() {
                    shown.lock().taken.insert(text);
                }
            }
        }
        if *up.borrow() == life {
            let _ = tokio::time::timeout(Duration::from_millis(500), up.changed()).await;
        }
    }
}

/// `COMMSD_KILL_MESSAGES` messages (1,000 by hand) from one daemon to another, or within one,
/// while `kill -9` strikes at random moments: each that was taken arrives, in order, and none comes
/// again once its acknowledgement has been answered.
#[tokio::test]
async fn killed_at_random_moments_nothing_is_lost_and_nothing_is_shown_twice() {
    let messages = number("COMMSD_KILL_MESSAGES", 240) as usize;
    let seed = number("COMMSD_KILL_SEED", u64::from(std::process::id()));
    say(&format!("COMMSD_KILL_SEED={seed}"));
    let mut entropy = SeededEntropy::new(seed);
    let mut below = move |bound: u64| {
        let mut bytes = [0; 8];
        entropy.fill(&mut bytes);
        u64::from_be_bytes(bytes) % bound
    };
    for apart in [false, true] {
        let ports = Ports::free();
        let mut victims = vec![Victim::start(ports).await];
        if apart {
            victims.push(Victim::start(ports).await);
        }
        let (one, two) = (&victims[0], &victims[victims.len() - 1]);
        let mut alice = Agent::attach(&one.socket(), "cli", Some("alice"), Path::new("/")).await;
        let mut bob = Agent::attach(&two.socket(), "cli", Some("bob"), Path::new("/")).await;
        if apart {
            one.daemon.as_ref().unwrap().has_met(&bob.id).await;
            two.daemon.as_ref().unwrap().has_met(&alice.id).await;
        }
        alice.befriend(&mut bob).await;
        let path = room(&alice, "r").await;
        join(&bob, &path).await;
        let to = (bob.id.clone(), path);
        drop((alice, bob));

        let told = Arc::new(Mutex::new(Told::default()));
        let shown = Arc::new(Mutex::new(Shown::default()));
        let (count, mut counted) = watch::channel(0);
        let taker =
            tokio::spawn(take_all(two.socket(), two.up.subscribe(), Arc::clone(&shown), count));
        // Several writers, so that commits come in groups.
        let writers: Vec<_> = (0..4)
            .map(|writer| {
                let texts = (0..messages / 4)
                    .map(|n| format!("{writer}-{n:05}{}", if n % 3 == 0 { "r" } else { "" }))
                    .collect();
                let (socket, up) = (one.socket(), one.up.subscribe());
                tokio::spawn(send_all(socket, up, to.clone(), texts, Arc::clone(&told)))
            })
            .collect();
        while !writers.iter().all(tokio::task::JoinHandle::is_finished) {
            tokio::time::sleep(Duration::from_millis(below(60))).await;
            let victim = below(victims.len() as u64) as usize;
            victims[victim].kill().await;
        }
        for writer in writers {
            writer.await.unwrap();
        }
        let promised = told.lock().promised.clone();
        let all_there = counted.wait_for(|_| {
            let shown = shown.lock();
            !shown.faults.is_empty() || promised.keys().all(|text| shown.lives.contains_key(text))
        });
        let there = tokio::time::timeout(Duration::from_secs(60), all_there).await.is_ok();
        taker.abort();
        let (told, shown) = (told.lock(), shown.lock());
        let missing: Vec<_> =
            promised.iter().filter(|(text, _)| !shown.lives.contains_key(*text)).collect();
        for (text, (id, _)) in &missing {
            for (n, victim) in victims.iter().enumerate() {
                for (life, log) in victim.logs.iter().enumerate() {
                    for line in log.text().lines().filter(|line| line.contains(id.as_str())) {
                        say(&format!("{text} daemon {n}, life {life}: {line}"));
                    }
                }
            }
        }
        assert!(
            there && shown.faults.is_empty() && missing.is_empty(),
            "seed {seed}, apart {apart}: missing {missing:?}, faults {:?}, refused {:?}",
            shown.faults,
            told.refused
        );
        assert!(told.refused.is_empty(), "{:?}", told.refused);
        // Each writer's messages come in the order in which it wrote them, in the conversation and
        // in the room. (Between daemons a copy that the other one holds may overtake the queue.)
        for writer in 0..4 {
            for in_room in [false, true].into_iter().filter(|_| !apart) {
                let of: Vec<&String> = shown
                    .order
                    .iter()
                    .filter(|text| {
                        text.starts_with(&format!("{writer}-")) && text.ends_with('r') == in_room
                    })
                    .collect();
                assert!(of.is_sorted(), "seed {seed}, apart {apart}: {of:?}");
            }
        }
        say(&format!(
            "apart {apart}: {} promised, {} unknown, {} lives",
            promised.len(),
            told.unknown.len(),
            victims.iter().map(|victim| victim.logs.len()).sum::<usize>()
        ));
        assert!(promised.len() > messages / 4, "too few were taken to mean anything");
    }
}

#[tokio::test]
async fn a_kill_of_a_shell_command_takes_nothing_with_it() {
    let daemon = Daemon::start(Ports::free()).await;
    let mut bob = daemon.agent("bob").await;
    let alice = daemon.agent("alice").await;
    let path = room(&alice, "r").await;
    join(&bob, &path).await;
    drop(alice);
    let mut send = Command::new(env!("CARGO_BIN_EXE_commsd"));
    send.args(["send", "--as", "alice", &path, "once", "--home"])
        .arg(daemon.home.path())
        .env_clear()
        .env("HOME", daemon.home.path());
    let output = soon(send.output()).await.unwrap();
    assert!(output.status.success(), "{output:?}");
    bob.wait("the message", |e| content(e) == "once").await;
    // Its sender is one that can be answered.
    assert_eq!(post(&bob, &path, "back").await, [DeliveryStatus::Delivered]);
}
