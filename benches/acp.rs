//! How fast the Agent Collaboration Protocol is: its audit, a whole delegation, and the relay, as a
//! process of its own, beside floors taken in the same run.
//!
//! `cargo bench --bench acp` runs everything, `-- NAME` one of [`NAMES`]. Nothing here fails for
//! being slow; `docs/performance.md` says what the figures mean.

// Clippy's leave for tests does not reach benches.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

#[allow(dead_code, reason = "each bench uses what it needs of it")]
mod support;

#[path = "support/acp.rs"]
mod made;

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use commsd::acp::did::Secret;
use commsd::acp::envelope::KeyRef;
use commsd::acp::json::canonical;
use commsd::acp::objects::{Envelope, RelayAction};
use commsd::acp::owner::{Question, Route};
use commsd::acp::relay::{Limits, auth};
use commsd::api::acp::Work;
use commsd::daemon::acp::delegation::{self, Standing, Watcher};
use commsd::daemon::acp::orders;
use commsd::daemon::acp_relay::{RelayOptions, run};
use commsd::daemon::config::LogFormat;
use commsd::identity::entropy::SeededEntropy;
use commsd::runtime::clock::unix_now;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use support::daemon::Memory;
use support::floor;
use support::stats::{Samples, figures, heading, latency, rate};

const NAMES: [&str; 4] = ["verify", "settle", "send", "subscribers"];

/// Tells this program, started again, that it is the relay, and where its store is.
const STATE: &str = "COMMSD_BENCH_RELAY_STATE";

const SENDERS: usize = 64;
const MAILBOXES: usize = 8;
/// Envelopes of each sender.
const EACH: usize = 150;
/// Bytes of plaintext in an envelope; as JSON it has about 1.4 KiB.
const TEXT: usize = 512;
const SUBSCRIBERS: usize = 1_000;
/// Until an idle process has let go of what it does not need.
const SETTLE: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    if let Some(state) = std::env::var_os(STATE) {
        serve(state.into());
        return ExitCode::SUCCESS;
    }
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    if let Some(unknown) = wanted.iter().find(|name| !NAMES.contains(&name.as_str())) {
        println!("no bench is called {unknown}; there are {}", NAMES.join(", "));
        return ExitCode::FAILURE;
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        for name in NAMES {
            if wanted.is_empty() || wanted.iter().any(|wanted| wanted == name) {
                match name {
                    "verify" => verify(),
                    "settle" => settle().await,
                    "send" => send().await,
                    _ => subscribers().await,
                }
            }
        }
    });
    ExitCode::SUCCESS
}

/// The relay, with the limits raised that one machine's senders would meet.
fn serve(state: std::path::PathBuf) {
    let limits = Limits {
        mailbox_envelopes: 10_000,
        sender_envelopes: 10_000,
        sender_bytes: 1 << 30,
        mailbox_bytes: 1 << 30,
        did_per_minute: 1_000_000,
        address_per_minute: 1_000_000,
        reads_per_minute: 1_000_000,
        ..Limits::default()
    };
    let options = RelayOptions {
        host: "127.0.0.1".parse().unwrap(),
        port: 0,
        state,
        query_auth: false,
        max_mailbox_bytes: None,
        origins: Vec::new(),
        behind_proxy: false,
        limits,
        per_source: Some(2 * SUBSCRIBERS),
        tls: None,
        log: LogFormat::Json,
        log_filter: "info".into(),
    };
    run(options, |address, _| {
        println!("{address}");
        std::io::stdout().flush().unwrap();
    })
    .unwrap();
}

struct Relay {
    child: Child,
    address: SocketAddr,
    home: TempDir,
}

impl Relay {
    fn start() -> Self {
        let home = tempfile::tempdir().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(STATE, home.path().join("relay"))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Self { child, address: line.trim().parse().unwrap(), home }
    }

    async fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Requests of one sender, made before the clock runs.
fn requests(from: &Secret, to: &Secret, entropy: &mut SeededEntropy) -> Vec<Vec<u8>> {
    let key = (&KeyRef::Identity, to.did().encryption_key());
    let text = [7; TEXT];
    (0..EACH)
        .map(|_| {
            let now = unix_now();
            let sealed =
                Envelope::seal(from, to.did(), key, &text, now, 3_600_000, entropy).unwrap();
            let body = canonical(&sealed).unwrap();
            let head = format!(
                "POST /v1/envelopes HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n",
                body.len()
            );
            [head.as_bytes(), &body].concat()
        })
        .collect()
}

/// Sends them one after the other, each answered before the next.
async fn send_all(mut stream: TcpStream, requests: Vec<Vec<u8>>) -> Vec<Duration> {
    let mut times = Vec::new();
    let mut answer = vec![0; 4_096];
    for request in requests {
        let begun = Instant::now();
        stream.write_all(&request).await.unwrap();
        // An answer is one small write.
        let read = stream.read(&mut answer).await.unwrap();
        assert!(answer[..read].starts_with(b"HTTP/1.1 202"), "{}", text(&answer[..read]));
        times.push(begun.elapsed());
    }
    times
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Envelopes that are on disk before they are answered, each sender waiting for its answer.
async fn send() {
    let relay = Relay::start();
    let mut entropy = SeededEntropy::new(1);
    let mailboxes: Vec<Secret> =
        (0..MAILBOXES).map(|_| Secret::draw(&mut entropy).unwrap()).collect();
    let mut senders = Vec::new();
    for n in 0..SENDERS {
        let from = Secret::draw(&mut entropy).unwrap();
        let requests = requests(&from, &mailboxes[n % MAILBOXES], &mut entropy);
        senders.push((relay.connect().await, requests));
    }
    let bytes = senders[0].1[0].len();
    let (mut syncs, mut all) = (Samples::default(), Samples::default());
    for _ in 0..100 {
        let begun = Instant::now();
        sync_one(relay.home.path(), bytes);
        syncs.push(begun.elapsed());
    }
    let floor = floor::synced_appends(relay.home.path(), SENDERS, bytes);
    let begun = Instant::now();
    let tasks: Vec<_> = senders
        .into_iter()
        .map(|(stream, requests)| tokio::spawn(send_all(stream, requests)))
        .collect();
    for task in tasks {
        task.await.unwrap().into_iter().for_each(|time| all.push(time));
    }
    let figure = (SENDERS * EACH) as f64 / begun.elapsed().as_secs_f64();
    heading("relay: 64 senders, answered when on disk", "p50 / per s", "p99");
    latency("floor: one record appended, then fdatasync", &syncs, None, "");
    latency("an envelope from request to answer", &all, Some(&syncs), "");
    rate(&format!("floor: 64 records of {bytes} B, then fdatasync"), floor, None, "");
    rate("envelopes accepted", figure, Some(floor), ">= 2,000/s");
}

/// Verifying the logs of two tasks, 10,000 entries in all (a task reports its progress 5,000 times at
/// most), beside the bare verification of as many signatures.
fn verify() {
    const PROGRESS: u64 = 4_997;
    let now = unix_now().0 - 2 * 3_600_000;
    let logs = [(); 2].map(|()| made::long_log(PROGRESS, now));
    let entries: usize = logs.iter().map(|log| log.entries.len()).sum();
    let signatures: usize =
        logs.iter().flat_map(|log| &log.entries).map(|c| c.entry.signatures.len()).sum();
    let key = Secret::draw(&mut SeededEntropy::new(2)).unwrap();
    let message = [7; 600];
    let signature = key.sign_bytes(&message);
    let threads = std::thread::available_parallelism().unwrap().get();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                for _ in 0..signatures / threads {
                    assert!(key.did().verifies(&message, &signature));
                }
            });
        }
    });
    let floor = signatures as f64 / begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    for log in &logs {
        let report = commsd::acp::audit::verify(log, None, unix_now());
        assert_eq!(report.failures, []);
    }
    let figure = signatures as f64 / begun.elapsed().as_secs_f64();
    heading(&format!("audit: {entries} entries with {signatures} signatures"), "per s", "");
    rate("floor: strict Ed25519 of as many, all cores", floor, None, "");
    rate("signatures of the log, with all its checks", figure, Some(floor), ">= 0.70");
}

/// A delegation of a command that gives its input back, over a relay, from order to SETTLED.
async fn settle() {
    const RUNS: usize = 20;
    let relay = Relay::start();
    let url = format!("http://{}", relay.address);
    let (home, stop) = (tempfile::tempdir().unwrap(), CancellationToken::new());
    let (bob, bobs) = made::office(home.path(), &url, Some("cat"), &stop).await;
    let (alice, alices) = made::office(home.path(), &url, None, &stop).await;
    let (mut syncs, mut all, mut command) =
        (Samples::default(), Samples::default(), Samples::default());
    for n in 0..=RUNS {
        let begun = Instant::now();
        let work = Work {
            relay: None,
            title: "echo".into(),
            description: String::new(),
            input: serde_json::json!({ "n": n }),
            input_schema: None,
            output_schema: None,
            deadline_at: None,
            budget: None,
            sandbox_policy: Some(serde_json::json!({ "isolation": "subprocess" })),
            tools: Vec::new(),
            tool_uses: None,
            redelegation: None,
            parent_task_id: None,
            auto_approve: true,
            wait_ms: None,
        };
        let (did, urls) = (bob.did(), vec![url.clone()]);
        let route = Route::Relays { urls };
        let worker = orders::Worker { did, key: None, invite: None, route };
        let order = orders::order(&work, worker, None, unix_now()).unwrap();
        let never = CancellationToken::new();
        let standing = delegation::delegate(&alice, order, &Unwatched, &never).await.unwrap();
        let took = begun.elapsed();
        assert_eq!(standing.status(), "SETTLED");
        // The first one also connects and probes.
        if n > 0 {
            all.push(took);
            let task = standing.task;
            let ran = alice
                .look(move |owner| {
                    let view = owner.task(&task).unwrap().view();
                    let run = &view.attestation().unwrap().object;
                    Ok(run.ended_at.millis().0 - run.started_at.millis().0)
                })
                .await
                .unwrap();
            command.push(Duration::from_millis(ran));
            for _ in 0..5 {
                let begun = Instant::now();
                sync_one(relay.home.path(), 2_000);
                syncs.push(begun.elapsed());
            }
        }
    }
    stop.cancel();
    drop((alice, bob));
    alices.await.unwrap().unwrap();
    bobs.await.unwrap().unwrap();
    let sync = syncs.median();
    let goal = Duration::from_millis(100) + 45 * sync;
    heading("a delegation of `cat` over a relay on loopback", "p50", "p99");
    latency("floor: one record appended, then fdatasync", &syncs, None, "");
    latency("the command by itself, in its box", &command, None, "");
    let beyond = all.median().saturating_sub(command.median());
    latency("from order to SETTLED", &all, None, "");
    figures(
        "beyond the command",
        &format!("{} ms", beyond.as_millis()),
        "",
        &format!("<= {} ms", goal.as_millis()),
    );
}

struct Unwatched;

impl Watcher for Unwatched {
    fn moved(&self, _: &Standing) {}
    fn asked(&self, _: &Question) {}
}

fn sync_one(dir: &std::path::Path, bytes: usize) {
    let path = dir.join("sync");
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
    file.write_all(&vec![7; bytes]).unwrap();
    file.sync_data().unwrap();
}

/// What subscribers that hear nothing cost the relay.
async fn subscribers() {
    let relay = Relay::start();
    let mut entropy = SeededEntropy::new(2);
    let mut open = Vec::new();
    // The first shows what the relay takes once, for anybody.
    open.push(subscribe(&relay, &mut entropy).await);
    tokio::time::sleep(SETTLE).await;
    let before = Memory::of(relay.child.id());
    for _ in 0..SUBSCRIBERS {
        open.push(subscribe(&relay, &mut entropy).await);
    }
    tokio::time::sleep(SETTLE).await;
    let after = Memory::of(relay.child.id());
    let mib = |kib: f64| format!("{:.1} MiB", kib / 1024.0);
    heading("relay: 1,000 idle subscribers by server-sent events", "resident", "anonymous");
    figures("the relay with one", &mib(before.resident), &mib(before.anonymous), "");
    let (resident, anonymous) =
        (after.resident - before.resident, after.anonymous - before.anonymous);
    figures("growth by 1,000", &mib(resident), &mib(anonymous), "<= 64 MiB");
}

async fn subscribe(relay: &Relay, entropy: &mut SeededEntropy) -> TcpStream {
    let key = Secret::draw(entropy).unwrap();
    let origin = format!("http://{}", relay.address);
    let token = auth::token(&key, RelayAction::Stream, &origin, unix_now(), entropy).unwrap();
    let mut stream = relay.connect().await;
    let request = format!(
        "GET /v1/mailboxes/{}/stream HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n",
        key.did()
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // The head and the first comment.
    while !answer.ends_with(b":\n\n\r\n") {
        assert!(stream.read_buf(&mut answer).await.unwrap() > 0, "{}", text(&answer));
    }
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", text(&answer));
    stream
}
