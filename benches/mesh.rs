//! How fast the daemon is, in real processes, each figure beside a floor taken in the same run:
//! the same bytes over the same transport with nothing done to them. Floor and figure take turns,
//! so that whatever else the machine does meanwhile falls on both.
//!
//! `cargo bench` runs everything, `cargo bench -- NAME` one of [`NAMES`]. Nothing here fails for
//! being slow; `docs/performance.md` says what the figures mean.

// Clippy's leave for tests does not reach benches.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::collections::HashMap;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use commsd::api::client::Client;
use commsd::api::types::{
    EventsAckParams, RoomCreateParams, RoomJoinParams, SendParams, WhoamiParams,
};
use commsd::codec::cbor::Value;
use commsd::codec::time::UnixMillis;
use commsd::identity::device::DeviceKey;
use commsd::mesh::checked::Checked;
use commsd::mesh::wire::advert::PeerAdvert;
use commsd::mesh::wire::frame::{Command as Verb, Frame, ManageRequest};
use commsd::mesh::wire::room_path::RoomPath;
use commsd::mesh::wire::scope::Scope;
use commsd::mesh::wire::token::{MintRequest, TokenCache, mint};
use commsd::runtime::clock::unix_now;
use tokio::time::sleep;

use support::agent::{Agent, Ask as _, Lines, Told, dm, introduce, line, text};
use support::daemon::{Daemon, Memory, Ports, status, until};
use support::floor::{self, Spread};
use support::shim::Shim;
use support::stats::{self, Samples, figures, heading, latency, micros, rate};

const NAMES: [&str; 11] = [
    "request",
    "dm",
    "dm-remote",
    "fan-out",
    "sustained",
    "enqueue",
    "verify",
    "formation",
    "memory",
    "start",
    "idle",
];

/// Floor and figure take turns so many times.
const ROUNDS: usize = 5;
/// Latency samples in one turn.
const SAMPLES: usize = 400;
/// Taken before anything counts.
const WARM_UP: usize = 200;
/// Text of a message whose latency is measured.
const TEXT: usize = 200;
/// What a line or frame with such a text has, about: the size of the floor's messages.
const LINE: usize = 512;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    floor::serve_if_asked().await;
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    if let Some(unknown) = wanted.iter().find(|name| !NAMES.contains(&name.as_str())) {
        println!("no bench is called {unknown}; there are {}", NAMES.join(", "));
        return ExitCode::FAILURE;
    }
    println!("machine: {}", machine());
    let all = async {
        for name in NAMES {
            if wanted.is_empty() || wanted.iter().any(|wanted| wanted == name) {
                run(name).await;
            }
        }
    };
    tokio::select! {
        () = all => ExitCode::SUCCESS,
        // Dropping what runs ends its daemons.
        _ = tokio::signal::ctrl_c() => ExitCode::FAILURE,
    }
}

async fn run(name: &str) {
    match name {
        "request" => request().await,
        "dm" => dm_here().await,
        "dm-remote" => dm_remote().await,
        "enqueue" => enqueue().await,
        "fan-out" => fan_out().await,
        "sustained" => sustained().await,
        "verify" => verify(),
        "formation" => formation().await,
        "memory" => memory().await,
        "start" => start().await,
        _ => idle().await,
    }
}

fn machine() -> String {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let cpu = read("/proc/cpuinfo");
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    format!(
        "{} cores{}, Linux {}",
        std::thread::available_parallelism().map_or(1, usize::from),
        model.replace("\t:", ","),
        read("/proc/sys/kernel/osrelease").trim()
    )
}

// --- latency -------------------------------------------------------------------------------------

async fn request() {
    let daemon = Daemon::start(Ports::free()).await;
    let mut agent = Agent::attach(&daemon, "asker").await;
    let mut echo = floor::unix().await;
    let (mut floor, mut figure) = (Samples::default(), Samples::default());
    echo.round_trips(LINE, WARM_UP, &mut Samples::default()).await;
    for _ in 0..WARM_UP {
        agent.ask(WhoamiParams {}).await;
    }
    for _ in 0..ROUNDS {
        echo.round_trips(LINE, SAMPLES, &mut floor).await;
        for _ in 0..SAMPLES {
            let begun = Instant::now();
            agent.ask(WhoamiParams {}).await;
            figure.push(begun.elapsed());
        }
    }
    heading("request: one after another", "p50", "p99");
    latency("floor: Unix socket echo", &floor, None, "");
    latency("whoami and its answer", &figure, Some(&floor), "");
}

/// One message from the call to the event at the other agent's client, and to the call's answer.
async fn send_one(from: &Client, to: &mut Agent, answered: &mut Samples, arrived: &mut Samples) {
    let message = dm(&to.name, text(TEXT));
    let begun = Instant::now();
    let call = async {
        from.call(message).await.unwrap();
        begun.elapsed()
    };
    let event = async { (to.event("dm").await, begun.elapsed()) };
    let (answer, (event, arrival)) = tokio::join!(call, event);
    answered.push(answer);
    arrived.push(arrival);
    // What follows an acknowledgement, the receipt, belongs to the time between messages.
    to.ask(EventsAckParams { seq: event.seq }).await;
}

/// Latencies of direct messages while `floors` take turns with them.
async fn send_many(
    from: &Agent,
    to: &mut Agent,
    mut floors: impl AsyncFnMut(usize),
) -> (Samples, Samples) {
    let (mut answered, mut arrived) = (Samples::default(), Samples::default());
    floors(WARM_UP).await;
    // That of the introduction.
    to.event("dm").await;
    for _ in 0..WARM_UP {
        let (mut a, mut b) = (Samples::default(), Samples::default());
        send_one(&from.client, to, &mut a, &mut b).await;
    }
    for _ in 0..ROUNDS {
        floors(SAMPLES).await;
        for _ in 0..SAMPLES {
            send_one(&from.client, to, &mut answered, &mut arrived).await;
        }
    }
    (answered, arrived)
}

async fn dm_here() {
    let daemon = Daemon::start(Ports::free()).await;
    let mut from = Agent::attach(&daemon, "from").await;
    let mut to = Agent::attach(&daemon, "to").await;
    introduce(&mut from, &mut to).await;
    let mut echo = floor::unix().await;
    let mut floor = Samples::default();
    let (answered, arrived) = send_many(&from, &mut to, async |count| {
        echo.round_trips(LINE, count, &mut floor).await;
    })
    .await;
    heading("dm: agent, daemon, agent", "p50", "p99");
    latency("floor: Unix socket echo", &floor, None, "");
    latency("call to event at the other agent", &arrived, Some(&floor), "<= 4");
    latency("call to answer (delivered)", &answered, Some(&floor), "");
}

/// Writers of durable messages, recipients that acknowledge none of them, and messages a writer.
/// A mailbox has room for what its writers send.
const WRITERS: usize = 64;
const RECIPIENTS: usize = 8;
const EACH: usize = 400;

/// Messages that are on disk before they are answered, each writer waiting for its answer.
async fn enqueue() {
    let daemon = Daemon::start(Ports::free()).await;
    let mut from = Agent::attach_lasting(&daemon, "from").await;
    let mut recipients = Vec::new();
    for n in 0..RECIPIENTS {
        let mut to = Agent::attach_lasting(&daemon, &format!("to-{n}")).await;
        introduce(&mut from, &mut to).await;
        recipients.push(to.ask(WhoamiParams {}).await.id);
    }
    let floor = floor::synced_appends(daemon.home(), WRITERS, LINE);
    let mut writers = Vec::new();
    for n in 0..WRITERS {
        let agent = Agent::attach_lasting(&daemon, "from").await;
        writers.push((agent, recipients[n % RECIPIENTS].clone()));
    }
    let begun = Instant::now();
    let tasks: Vec<_> = writers
        .into_iter()
        .map(|(mut agent, to)| {
            tokio::spawn(async move {
                for _ in 0..EACH {
                    agent.ask(dm(&to, text(TEXT))).await;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let figure = (WRITERS * EACH) as f64 / begun.elapsed().as_secs_f64();
    heading("enqueue: 64 writers, answered when on disk", "per s", "");
    rate("floor: 64 records of 512 B appended, then fdatasync", floor, None, "");
    rate("direct messages to mailboxes", figure, Some(floor), ">= 10,000/s");
}

async fn dm_remote() {
    let ports = Ports::free();
    let (here, there) = (Daemon::start(ports).await, Daemon::start(ports).await);
    let mut from = Agent::attach(&here, "from").await;
    let mut to = Agent::attach(&there, "to").await;
    introduce(&mut from, &mut to).await;
    let (mut unix, mut tls) = (floor::unix().await, floor::tls().await);
    let (mut unix_floor, mut tls_floor) = (Samples::default(), Samples::default());
    let (answered, arrived) = send_many(&from, &mut to, async |count| {
        unix.round_trips(LINE, count, &mut unix_floor).await;
        tls.round_trips(LINE, count, &mut tls_floor).await;
    })
    .await;
    heading("dm-remote: agent, daemon, TLS, daemon, agent", "p50", "p99");
    latency("floor: Unix socket echo", &unix_floor, None, "");
    latency("floor: mutual TLS echo over loopback", &tls_floor, None, "");
    let goal = 4.0 * micros(tls_floor.median()) + micros(unix_floor.median());
    let goal = format!("<= {goal:.0} us (4 TLS + Unix)");
    latency("call to event at the other agent", &arrived, Some(&tls_floor), &goal);
    latency("call to answer (delivered)", &answered, Some(&tls_floor), "");
}

/// Everything up to the newest event.
const ALL: EventsAckParams = EventsAckParams { seq: u64::MAX };

async fn fan_out() {
    const MEMBERS: usize = 50;
    const MESSAGES: usize = 40;
    let daemon = Daemon::start(Ports::free()).await;
    let (mut owner, _) = Lines::attach(&daemon, "owner").await;
    let name = "bench".to_owned();
    let room = owner.ask(RoomCreateParams { name, r#type: None, description: None }).await.path;
    let mut members = Vec::new();
    for number in 0..MEMBERS {
        let (mut member, _) = Lines::attach(&daemon, &format!("member-{number}")).await;
        member.ask(RoomJoinParams { room: room.clone() }).await;
        members.push(member);
    }
    let message = SendParams { room, text: text(TEXT), timing: None, reply_to: None };
    let message = line(0, &message);
    let mut spread = Spread::to(MEMBERS).await;
    let (mut floor, mut figure) = (Samples::default(), Samples::default());
    let before = daemon.cpu();
    for round in 0..=ROUNDS {
        let mut warm_up = Samples::default();
        let floor = if round == 0 { &mut warm_up } else { &mut floor };
        spread.send(LINE, MESSAGES, floor).await;
        for _ in 0..MESSAGES {
            // Nothing of what came before is on its way any more.
            for agent in members.iter_mut().chain([&mut owner]) {
                agent.ask(ALL).await;
            }
            let begun = Instant::now();
            owner.write(&message).await;
            for member in &mut members {
                member.read(|line| assert!(matches!(Told::of(line), Told::Event(_)))).await;
            }
            if round > 0 {
                figure.push(begun.elapsed());
            }
            let mut answered = false;
            while !answered {
                owner.read(|line| answered |= matches!(Told::of(line), Told::Answer(_))).await;
            }
        }
    }
    let spent = micros(daemon.cpu() - before) / ((ROUNDS + 1) * MESSAGES) as f64;
    heading(&format!("fan-out: a room of {MEMBERS} members"), "p50", "p99");
    latency("floor: one Unix socket to all others", &floor, None, "");
    latency("send to event at the last member", &figure, Some(&floor), "p99 <= 2 ms");
    let what = "the daemon's processor time for one, receipts included";
    figures(what, &format!("{spent:.0} us"), "", "");
}

// --- throughput ----------------------------------------------------------------------------------

async fn sustained() {
    const BYTES: usize = 1024;
    const MESSAGES: usize = 20_000;
    /// What a client may have under way.
    const WINDOW: usize = 64;
    let daemon = Daemon::start(Ports::free()).await;
    let (mut from, _) = Lines::attach(&daemon, "from").await;
    let (mut to, recipient) = Lines::attach(&daemon, "to").await;
    introduce(&mut from, &mut to).await;
    let mut echo = floor::unix().await;
    let (mut floors, mut rates) = (Vec::new(), Vec::new());
    let before = daemon.cpu();
    for round in 0..=ROUNDS {
        let floor = echo.pipelined(BYTES, WINDOW, MESSAGES).await;
        let figure = pipeline(&mut from, &mut to, &recipient, BYTES, WINDOW, MESSAGES).await;
        if round > 0 {
            floors.push(floor);
            rates.push(figure);
        }
    }
    let spent = micros(daemon.cpu() - before) / ((ROUNDS + 1) * MESSAGES) as f64;
    let (floor, figure) = (stats::median(floors), stats::median(rates));
    heading("sustained: 1 KiB messages, 64 under way", "rate", "each");
    rate("floor: Unix socket echo, one write a message", floor, None, "");
    rate("direct messages, answered and acknowledged", figure, Some(floor), ">= 0.25");
    figures("the daemon's processor time for one", "", &format!("{spent:.2} us"), "");
}

/// `count` messages of `bytes`, `window` of them under way at any time; per second. Both ends take
/// their events and acknowledge them.
async fn pipeline(
    from: &mut Lines,
    to: &mut Lines,
    recipient: &str,
    bytes: usize,
    window: usize,
    count: usize,
) -> f64 {
    // A connection has at most `window` requests open: one of them is for acknowledgements.
    let messages: Vec<Vec<u8>> =
        (1..window as u64).map(|id| line(id, &dm(recipient, text(bytes)))).collect();
    to.ask(ALL).await;
    from.ask(ALL).await;
    let begun = Instant::now();
    tokio::join!(send(from, &messages, count), take(to, count));
    count as f64 / begun.elapsed().as_secs_f64()
}

/// Sends until `count` messages have been answered.
async fn send(from: &mut Lines, messages: &[Vec<u8>], count: usize) {
    from.write(&messages.concat()).await;
    let mut sent = messages.len();
    let mut answered = 0;
    let mut news = Acknowledging::default();
    let mut next = Vec::new();
    while answered < count {
        next.clear();
        from.read(|line| match Told::of(line) {
            Told::Answer(0) => news.under_way = false,
            Told::Answer(id) => {
                // One that did not arrive would be waited for in vain.
                assert!(delivered(line), "{}", String::from_utf8_lossy(line));
                answered += 1;
                if sent < count {
                    sent += 1;
                    next.extend_from_slice(&messages[id as usize - 1]);
                }
            }
            Told::Event(seq) => news.seen = seq,
        })
        .await;
        news.acknowledge(&mut next);
        from.write(&next).await;
    }
    news.end(from).await;
}

fn delivered(answer: &[u8]) -> bool {
    const WORD: &[u8] = br#""delivered""#;
    answer.windows(WORD.len()).any(|window| window == WORD)
}

/// Takes and acknowledges until `count` messages have come.
async fn take(to: &mut Lines, count: usize) {
    let mut came = 0;
    let mut news = Acknowledging::default();
    let mut next = Vec::new();
    while came < count {
        next.clear();
        to.read(|line| match Told::of(line) {
            Told::Answer(_) => news.under_way = false,
            Told::Event(seq) => {
                news.seen = seq;
                came += 1;
            }
        })
        .await;
        news.acknowledge(&mut next);
        to.write(&next).await;
    }
    news.end(to).await;
}

/// Acknowledges events, many at a time and one request after another.
#[derive(Default)]
struct Acknowledging {
    seen: u64,
    acknowledged: u64,
    under_way: bool,
}

impl Acknowledging {
    const MANY: u64 = 64;

    fn acknowledge(&mut self, out: &mut Vec<u8>) {
        if !self.under_way && self.seen >= self.acknowledged + Self::MANY {
            self.acknowledged = self.seen;
            self.under_way = true;
            out.extend_from_slice(&line(0, &EventsAckParams { seq: self.seen }));
        }
    }

    async fn end(mut self, agent: &mut Lines) {
        while self.under_way {
            agent.read(|line| self.under_way &= !matches!(Told::of(line), Told::Answer(_))).await;
        }
    }
}

// --- frames --------------------------------------------------------------------------------------

fn verify() {
    let key = DeviceKey::generate().unwrap();
    let extension = (Value::from("agent-comms/version"), Value::from("8.6.0"));
    let now = unix_now();
    let seconds = i64::try_from(now.0 / 1000).unwrap();
    let advert = PeerAdvert::sign(&key, vec!["127.0.0.1:40000".into()], seconds, vec![extension]);
    let input = advert.signing_input();
    let gossip = Frame::Gossip { peers: vec![advert.clone()] }.encode();
    let other = DeviceKey::generate().unwrap().id();
    let path = RoomPath::dm(key.id(), other).unwrap();
    let expires = UnixMillis(now.0 + 1_000_000);
    let claims = MintRequest::new([7; 16], other, "room:member", Scope::room(&path), expires);
    let token = mint(&key, now, claims).unwrap();
    let request = Frame::ManageRequest(ManageRequest {
        request_id: 1,
        command: Verb {
            verb: "room:member".into(),
            params: Value::map([
                ("verb", Value::from("room.send")),
                ("message-id", Value::Bytes(vec![1; 16])),
                ("sent-at", Value::Uint(now.0)),
                ("text", Value::from("x".repeat(TEXT))),
            ]),
        },
        scope: Scope::room(&path),
        token: Some(token),
    })
    .encode();
    let mut known = TokenCache::new();
    let check = |bytes: &[u8], tokens: &mut TokenCache| {
        Checked::check(Frame::decode(bytes).unwrap(), tokens)
    };
    let (mut signature, mut advert_rate, mut first, mut again) = (vec![], vec![], vec![], vec![]);
    for _ in 0..ROUNDS {
        signature
            .push(per_second(|| assert!(advert.identity_key.verify(&input, &advert.signature))));
        advert_rate.push(per_second(|| {
            let Checked::Gossip(adverts) = check(&gossip, &mut known) else { panic!("no gossip") };
            assert_eq!(adverts.len(), 1);
        }));
        first.push(per_second(|| {
            let checked = check(&request, &mut TokenCache::new());
            assert!(matches!(checked, Checked::Request { token: Some(_), .. }));
        }));
        again.push(per_second(|| {
            let checked = check(&request, &mut known);
            assert!(matches!(checked, Checked::Request { token: Some(_), .. }));
        }));
    }
    let floor = stats::median(signature);
    heading("verify: frames decoded and checked, one thread", "rate", "each");
    rate("floor: one P-256 signature", floor, None, "");
    rate("gossip with one advert", stats::median(advert_rate), Some(floor), "");
    rate("request with a token seen first", stats::median(first), Some(floor), "");
    rate("request with a token seen before", stats::median(again), Some(floor), "");
}

fn per_second(mut once: impl FnMut()) -> f64 {
    const TURN: Duration = Duration::from_millis(200);
    let begun = Instant::now();
    let mut count = 0_u32;
    while begun.elapsed() < TURN {
        for _ in 0..16 {
            once();
        }
        count += 16;
    }
    f64::from(count) / begun.elapsed().as_secs_f64()
}

// --- the mesh as a whole -------------------------------------------------------------------------

/// Starts daemons all at once and waits until each has a session with every other. What happened
/// when is read from their logs, so that nobody asks them anything meanwhile.
async fn form(count: usize) -> (Vec<Daemon>, UnixMillis) {
    let ports = Ports::free();
    let begun = unix_now();
    let daemons: Vec<Daemon> = (0..count).map(|_| Daemon::spawn(ports)).collect();
    until("the mesh is full", async || {
        sleep(Duration::from_millis(50)).await;
        daemons.iter().all(|daemon| peers(daemon) == count - 1).then_some(())
    })
    .await;
    (daemons, begun)
}

/// Peers that a daemon has.
fn peers(daemon: &Daemon) -> usize {
    let mut peers = HashMap::new();
    for event in daemon.events() {
        match event.name.as_str() {
            "peer_up" => peers.insert(event.device, true),
            "peer_down" => peers.insert(event.device, false),
            _ => None,
        };
    }
    peers.into_values().filter(|up| *up).count()
}

/// When something last happened at a daemon.
fn last(daemon: &Daemon, name: &str) -> Option<UnixMillis> {
    daemon.events().iter().rev().find(|event| event.name == name).map(|event| event.at)
}

async fn formation() {
    const DAEMONS: usize = 25;
    let (mut daemons, begun) = form(DAEMONS).await;
    let newest = |name| daemons.iter().filter_map(|daemon| last(daemon, name)).max().unwrap();
    let since = |at: UnixMillis, begun| format!("{} ms", at.since(begun));
    heading("formation: 25 processes started at once", "time", "");
    figures("all ready", &since(newest("ready"), begun), "", "");
    figures("full mesh (300 pairs)", &since(newest("peer_up"), begun), "", "<= 2000 ms");
    // Whoever holds the port first waits for word of a holder of the role before it claims.
    until("somebody has the role", async || {
        sleep(Duration::from_millis(100)).await;
        daemons.iter().any(|daemon| last(daemon, "role_gained").is_some()).then_some(())
    })
    .await;
    // Until everybody has heard of it.
    sleep(Duration::from_millis(500)).await;
    let holder = daemons.iter().position(|daemon| last(daemon, "port_held").is_some()).unwrap();
    let had_role = last(&daemons[holder], "role_gained").is_some();
    assert!(had_role, "the holder of the port is the first to claim the role");
    let mut holder = daemons.remove(holder);
    let killed = unix_now();
    holder.kill();
    let after = |name: &'static str| {
        let daemons = &daemons;
        async move {
            until(name, async || {
                sleep(Duration::from_millis(20)).await;
                daemons
                    .iter()
                    .filter_map(|daemon| last(daemon, name))
                    .filter(|at| *at >= killed)
                    .min()
            })
            .await
        }
    };
    let port = after("port_held").await;
    let role = after("role_gained").await;
    figures("kill -9 of the holder: port held again", &since(port, killed), "", "<= 50 ms");
    figures("kill -9 of the holder: role held again", &since(role, killed), "", "<= 1000 ms");
}

// --- what it takes to be there -------------------------------------------------------------------

/// Until a daemon that has had something to do is idle again.
const SETTLE: Duration = Duration::from_millis(1500);

async fn memory() {
    const AGENTS: usize = 200;
    const PEERS: usize = 100;
    heading("memory: resident", "all", "anonymous");
    let mib = |kib: f64| format!("{:.1} MiB", kib / 1024.0);
    let each = |kib: f64, count: f64| format!("{:.1} KiB", kib / count);
    {
        let daemon = Daemon::start(Ports::free()).await;
        sleep(SETTLE).await;
        let idle = daemon.memory();
        figures("idle daemon", &mib(idle.resident), &mib(idle.anonymous), "<= 16 MiB");
        // The first brings in what all of them need of the program.
        let mut agents = vec![Lines::attach(&daemon, "first").await];
        sleep(SETTLE).await;
        let idle = daemon.memory();
        for number in 0..AGENTS {
            agents.push(Lines::attach(&daemon, &format!("agent-{number}")).await);
        }
        sleep(SETTLE).await;
        let full = daemon.memory();
        figures(
            "each of 200 idle agents, attached and subscribed",
            &each(full.resident - idle.resident, AGENTS as f64),
            &each(full.anonymous - idle.anonymous, AGENTS as f64),
            "<= 24 KiB",
        );
    }
    let ports = Ports::free();
    let (daemon, other) = (Daemon::start(ports).await, Daemon::start(ports).await);
    let (client, _events) = daemon.connect().await;
    let sessions =
        async || status(&client).await.peers.iter().map(|peer| peer.sessions).sum::<u64>();
    until("the daemons meet", async || (sessions().await > 0).then_some(())).await;
    sleep(SETTLE).await;
    let (before, open_before) = (daemon.memory(), sessions().await);
    let mut agents = Vec::new();
    for number in 0..PEERS {
        agents.push(Lines::attach(&other, &format!("agent-{number}")).await);
    }
    until("all agents have sessions", async || {
        (status(&client).await.peers.len() > PEERS).then_some(())
    })
    .await;
    sleep(SETTLE).await;
    let (after, open_after) = (daemon.memory(), sessions().await);
    let opened = (open_after - open_before) as f64;
    figures(
        &format!("each of {opened} idle sessions with {PEERS} peers"),
        &each(after.resident - before.resident, opened),
        &each(after.anonymous - before.anonymous, opened),
        "<= 64 KiB",
    );
}

/// How soon a daemon is ready in a home that it knows, and a harness session is answered; what a
/// session takes.
async fn start() {
    const STARTS: usize = 20;
    let ports = Ports::free();
    let (mut floor, mut ready) = (Samples::default(), Samples::default());
    let (mut shims, mut most) = (Samples::default(), Memory { resident: 0.0, anonymous: 0.0 });
    let mut rests = most;
    let mut daemon = Daemon::start(ports).await;
    for number in 1..=STARTS {
        let begun = Instant::now();
        let version = Command::new(env!("CARGO_BIN_EXE_commsd")).arg("--version").output();
        assert!(version.unwrap().status.success());
        floor.push(begun.elapsed());
        let begun = unix_now();
        daemon = daemon.again(ports);
        let at = until("the daemon is ready", async || {
            daemon.events().into_iter().find(|event| event.name == "ready")
        })
        .await
        .at;
        ready.push(Duration::from_millis(at.since(begun)));
        let shim = Shim::start(&daemon);
        shims.push(shim.answered);
        if shim.memory.resident > most.resident {
            most = shim.memory;
        }
        if number == STARTS {
            sleep(SETTLE).await;
            rests = shim.memory_now();
        }
    }
    heading("start", "p50", "p99");
    latency("floor: commsd --version, a whole process", &floor, None, "");
    latency("daemon, in a home it knows: spawned to ready", &ready, Some(&floor), "<= 80 ms");
    latency("commsd mcp: spawned to its answer to initialize", &shims, Some(&floor), "<= 30 ms");
    let kib = |kib: f64| format!("{kib} KiB");
    let (all, own) = (kib(most.resident), kib(most.anonymous));
    figures("commsd mcp: resident right after a call, all and its own", &all, &own, "");
    let (all, own) = (kib(rests.resident), kib(rests.anonymous));
    figures("commsd mcp: resident when idle, all and its own", &all, &own, "<= 6 MiB");
}

async fn idle() {
    const PEERS: usize = 10;
    const WATCHED: Duration = Duration::from_secs(20);
    let (daemons, _) = form(PEERS + 1).await;
    sleep(SETTLE).await;
    let before: Vec<Duration> = daemons.iter().map(Daemon::cpu).collect();
    sleep(WATCHED).await;
    let shares: Vec<f64> = daemons
        .iter()
        .zip(before)
        .map(|(daemon, before)| {
            (daemon.cpu() - before).as_secs_f64() / WATCHED.as_secs_f64() * 100.0
        })
        .collect();
    let most = shares.iter().copied().fold(0.0, f64::max);
    heading("idle: processor time over 20 s, of one core", "mean", "most");
    figures(
        &format!("each of {} daemons with {PEERS} peers", PEERS + 1),
        &format!("{:.3} %", shares.iter().sum::<f64>() / shares.len() as f64),
        &format!("{most:.3} %"),
        "<= 0.1 %",
    );
}
