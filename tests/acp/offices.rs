//! Offices: owners with their stores, files and runs, in one process. The sandbox's supervisor is the
//! real program.

use std::path::{Path, PathBuf};
use std::time::Duration;

use commsd::acp::audit::{Status, read_jsonl, verify};
use commsd::acp::code::Code;
use commsd::acp::did::Secret;
use commsd::acp::gateway::Admission;
use commsd::acp::objects::*;
use commsd::acp::owner::{Given, MAX_REFUSED, Order, Outcome, Owner, Question, Route};
use commsd::daemon::acp::delegation::{self, Standing, Watcher};
use commsd::daemon::acp::{
    AuditPlan, Local, Office, OfficeError, OfficeOptions, OfficeTask, owner_dir,
};
use commsd::runtime::adapter::{AdapterKind, AdapterOptions};
use commsd::runtime::clock::unix_now;
use commsd::store::OwnerStore;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::support::person;

/// Nothing here takes longer, on a slow machine either.
const PATIENCE: Duration = Duration::from_secs(60);

pub fn key(n: u8) -> Secret {
    person(n).secret()
}

pub fn command(cmd: &str, isolation: Option<Isolation>) -> AdapterOptions {
    let mut options = AdapterOptions::new(AdapterKind::Command, PathBuf::new());
    options.cmd = Some(cmd.into());
    options.isolation = isolation;
    options.sandbox.executable = Some(env!("CARGO_BIN_EXE_commsd").into());
    options
}

pub struct Silent;

impl Watcher for Silent {
    fn moved(&self, _: &Standing) {}
    fn asked(&self, _: &Question) {}
}

/// As owners order in simulation, by the real clock.
pub fn order(worker: u8, input: Value) -> Order {
    Order {
        input,
        output_schema: SchemaText(json!({ "type": "object" })),
        deadline: unix_now().plus(600_000),
        ..crate::owners::order(worker)
    }
}

/// An office and how to end it.
pub struct Open {
    pub office: Office,
    task: OfficeTask,
    stop: CancellationToken,
}

impl Open {
    pub async fn new(options: OfficeOptions) -> Result<Self, OfficeError> {
        let stop = CancellationToken::new();
        let transports = options.transports()?;
        let (office, task) = options.open(transports, stop.clone()).await?;
        Ok(Self { office, task, stop })
    }

    pub async fn close(self) {
        self.stop.cancel();
        drop(self.office);
        self.task.await.unwrap().unwrap();
    }
}

pub fn alice(dir: &Path, local: &Local) -> OfficeOptions {
    let mut options = OfficeOptions::new(key(1), dir.join("state"));
    options.local = local.clone();
    options.audit = AuditPlan { file: Some(dir.join("alice.jsonl")), redact: false };
    options
}

pub fn bob(dir: &Path, local: &Local, cmd: &str) -> OfficeOptions {
    let mut options = OfficeOptions::new(key(2), dir.join("state"));
    options.local = local.clone();
    options.audit = AuditPlan { file: Some(dir.join("bob.jsonl")), redact: false };
    options.work = Some((command(cmd, Some(Isolation::Subprocess)), 2));
    options.auto = vec![Gate::ContractAcceptance];
    options.admission = Admission::Anyone;
    options
}

pub async fn patiently<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("it takes too long")
}

fn audited(path: &Path) -> Status {
    let log = read_jsonl(&std::fs::read(path).unwrap()).unwrap();
    verify(&log, None, unix_now()).status
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_does_the_work_and_both_files_are_valid() {
    let dir = tempfile::tempdir().unwrap();
    let local = Local::default();
    let bob = Open::new(bob(dir.path(), &local, "cat")).await.unwrap();
    let alice = Open::new(alice(dir.path(), &local)).await.unwrap();
    let never = CancellationToken::new();
    let order = order(2, json!({ "summary": "hello" }));
    let done = delegation::delegate(&alice.office, order, &Silent, &never);
    let standing = patiently(done).await.unwrap();
    assert_eq!(standing.status(), "SETTLED", "{standing:?}");
    assert_eq!(standing.output, Some(json!({ "summary": "hello" })));
    alice.close().await;
    bob.close().await;
    for who in ["alice", "bob"] {
        let path = dir.path().join(format!("{who}.jsonl"));
        assert_eq!(audited(&path), Status::Valid, "{who}");
    }
    // Nothing of the run is left.
    let runs = dir.path().join("state").join(key(2).did().to_string().replace("did:key:", ""));
    assert_eq!(std::fs::read_dir(runs.join("runs")).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_programs_cannot_be_one_owner_and_a_strange_audit_file_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let local = Local::default();
    let first = Open::new(alice(dir.path(), &local)).await.unwrap();
    let second = Open::new(alice(dir.path(), &local)).await.err().unwrap();
    assert_eq!(second.code(), "store_locked");
    first.close().await;
    let path = dir.path().join("alice.jsonl");
    for strange in ["x", "hello\n", "{\"kind\":\"header\"}\n"] {
        std::fs::write(&path, strange).unwrap();
        let error = Open::new(alice(dir.path(), &local)).await.err().unwrap();
        assert_eq!(error.code(), "acp_audit_file");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), strange);
    }
    // What a crash has left before the first line is no log.
    for left in ["", "{\"format\":\"acp-aud"] {
        std::fs::write(&path, left).unwrap();
        Open::new(alice(dir.path(), &local)).await.unwrap().close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_of_all_tasks_are_completed_at_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    let local = Local::default();
    let bob = || bob(dir.path(), &local, "cat");
    let working = Open::new(bob()).await.unwrap();
    let ordering = Open::new(alice(dir.path(), &local)).await.unwrap();
    let never = CancellationToken::new();
    for n in 0..3 {
        let done =
            delegation::delegate(&ordering.office, order(2, json!({ "n": n })), &Silent, &never);
        assert_eq!(patiently(done).await.unwrap().status(), "SETTLED");
    }
    ordering.close().await;
    working.close().await;
    let logs = || {
        let files = std::fs::read_dir(dir.path()).unwrap().flatten().map(|entry| entry.path());
        files.filter(|path| path.to_string_lossy().contains("/bob")).collect::<Vec<PathBuf>>()
    };
    assert_eq!(logs().len(), 3);
    for (n, path) in logs().iter().enumerate() {
        let bytes = std::fs::read(path).unwrap();
        std::fs::write(path, &bytes[..bytes.len() / (n + 2)]).unwrap();
    }
    Open::new(bob()).await.unwrap().close().await;
    for path in logs() {
        assert_eq!(audited(&path), Status::Valid, "{}", path.display());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_goes_on_in_another_process_and_its_file_is_completed() {
    let dir = tempfile::tempdir().unwrap();
    let local = Local::default();
    let waiting = {
        let mut options = bob(dir.path(), &local, "cat");
        options.auto.clear();
        Open::new(options).await.unwrap()
    };
    let ordering = Open::new(alice(dir.path(), &local)).await.unwrap();
    let mut asked = waiting.office.watch();
    let order = order(2, json!({ "n": 1 }));
    let (task, _) = ordering
        .office
        .act(move |owner, now, entropy| {
            let (task, id, out) = owner.order(order, now, entropy)?;
            Ok(((task, id), out))
        })
        .await
        .unwrap();
    let question = patiently(async {
        loop {
            if let commsd::daemon::acp::Told::Question(question) = asked.recv().await.unwrap() {
                break question;
            }
        }
    })
    .await;
    ordering.close().await;
    waiting.close().await;
    // The last line was only half written.
    let path = dir.path().join("bob.jsonl");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.truncate(bytes.len() - 10);
    std::fs::write(&path, &bytes).unwrap();

    let local = Local::default();
    let working = Open::new(bob(dir.path(), &local, "cat")).await.unwrap();
    assert_eq!(question.task, task);
    let ordering = Open::new(alice(dir.path(), &local)).await.unwrap();
    let settled = async {
        loop {
            let standing =
                ordering.office.look(move |owner| Standing::of(owner, &task)).await.unwrap();
            if standing.over {
                break standing;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    assert_eq!(patiently(settled).await.status(), "SETTLED");
    ordering.office.flushed().await;
    ordering.close().await;
    working.close().await;
    assert_eq!(audited(&path), Status::Valid);
    assert_eq!(audited(&dir.path().join("alice.jsonl")), Status::Valid);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_run_is_gone_before_cancelled_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let local = Local::default();
    let mark = format!("{}", 90_000 + std::process::id() % 9999);
    let bob = Open::new(bob(dir.path(), &local, &format!("sleep {mark}"))).await.unwrap();
    let alice = Open::new(alice(dir.path(), &local)).await.unwrap();
    let cancel = CancellationToken::new();
    let order = order(2, json!({}));
    let (office, wish) = (alice.office.clone(), cancel.clone());
    let delegated =
        tokio::spawn(async move { delegation::delegate(&office, order, &Silent, &wish).await });
    let sleeps = || {
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let of = |entry: std::fs::DirEntry| std::fs::read(entry.path().join("cmdline")).ok();
        let line = format!("sleep\0{mark}\0").into_bytes();
        processes.filter_map(of).any(|found| found.ends_with(&line))
    };
    patiently(async {
        while !sleeps() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    cancel.cancel();
    let standing = patiently(delegated).await.unwrap().unwrap();
    assert_eq!(standing.status(), "CANCELLED");
    assert!(!sleeps());
    alice.close().await;
    bob.close().await;
    assert_eq!(audited(&dir.path().join("bob.jsonl")), Status::Valid);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_answers_and_what_fails_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let local = Local::default();
    let bob = Open::new(bob(dir.path(), &local, "cat /nonexistent")).await.unwrap();
    let alice = Open::new(alice(dir.path(), &local)).await.unwrap();
    let never = CancellationToken::new();
    let failed = delegation::delegate(&alice.office, order(2, json!({})), &Silent, &never);
    let standing = patiently(failed).await.unwrap();
    assert_eq!(standing.status(), "FAILED");
    assert_eq!(standing.failure.map(|(code, _)| code), Some(Code::AdapterFailed));
    bob.close().await;

    struct Says(Office);
    impl Watcher for Says {
        fn moved(&self, _: &Standing) {}
        fn asked(&self, question: &Question) {
            assert_eq!(question.gate(), Gate::FinalAcceptance);
            let (office, id) = (self.0.clone(), question.id());
            tokio::spawn(async move {
                let no = Given::Word(Decision::Denied, "not what I meant".into());
                let said = office.act(move |owner, now, entropy| {
                    owner.answer(&id, no, now, entropy).map(|out| ((), out))
                });
                said.await.unwrap();
            });
        }
    }
    let mut options = super::offices::bob(dir.path(), &local, "cat");
    options.audit = AuditPlan::default();
    let bob = Open::new(options).await.unwrap();
    let asking = Order { auto_approve: false, ..order(2, json!({})) };
    let watcher = Says(alice.office.clone());
    let denied = delegation::delegate(&alice.office, asking, &watcher, &never);
    let standing = patiently(denied).await.unwrap();
    assert_eq!(standing.status(), "DISPUTED");
    assert_eq!(standing.failure.map(|(code, _)| code), Some(Code::ApprovalDenied));
    // Of two tasks, the second's file stands beside the first's.
    let beside = format!("alice-{}.jsonl", standing.task_id);
    assert_eq!(audited(&dir.path().join(beside)), Status::Valid);
    alice.close().await;
    bob.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quorum_of_three_workers() {
    let dir = tempfile::tempdir().unwrap();
    let local = Local::default();
    let mut workers = Vec::new();
    for (n, cmd) in [(2, "cat"), (3, "cat"), (4, "echo '{\"other\":1}'")] {
        let mut options = bob(dir.path(), &local, cmd);
        options.key = key(n);
        options.audit = AuditPlan::default();
        workers.push(Open::new(options).await.unwrap());
    }
    let alice = Open::new(alice(dir.path(), &local)).await.unwrap();
    let never = CancellationToken::new();
    let orders = |n: &[u8]| n.iter().map(|n| order(*n, json!({ "n": 1 }))).collect::<Vec<_>>();
    let group =
        delegation::delegate_group(&alice.office, orders(&[2, 3, 4]), Some(2), &Silent, &never);
    let result = patiently(group).await.unwrap();
    assert_eq!(result.output(), Some(&json!({ "n": 1 })), "{result:?}");
    let group =
        delegation::delegate_group(&alice.office, orders(&[2, 4]), Some(2), &Silent, &never);
    let (code, _, detail) = patiently(group).await.unwrap().failure().unwrap();
    assert_eq!(code, Code::QuorumNotReached);
    assert_eq!(detail["votes"].as_array().map(Vec::len), Some(2));
    let twice = delegation::delegate_group(&alice.office, orders(&[2, 2]), None, &Silent, &never);
    assert_eq!(twice.await.unwrap_err().code(), Code::DuplicateWorker);
    alice.close().await;
    for worker in workers {
        worker.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_there_is_said_and_the_offer_is_withdrawn() {
    let dir = tempfile::tempdir().unwrap();
    let alice = Open::new(alice(dir.path(), &Local::default())).await.unwrap();
    let never = CancellationToken::new();
    let error = delegation::delegate(&alice.office, order(2, json!({})), &Silent, &never);
    assert_eq!(patiently(error).await.unwrap_err().code(), Code::RelayUnreachable);
    let all = alice.office.look(|owner| Ok(owner.gateway().tasks().count())).await.unwrap();
    assert_eq!(all, 1);
    alice.close().await;
}

/// Answers every request with a redirect; what was posted, in order.
async fn astray() -> (String, mpsc::UnboundedReceiver<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (told, posted) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let told = told.clone();
            tokio::spawn(async move {
                let mut stream = BufReader::new(stream);
                let (mut head, mut length) = (String::new(), 0);
                while stream.read_line(&mut head).await.unwrap_or(0) > 2 {
                    let last = head.lines().last().unwrap_or_default().to_lowercase();
                    if let Some(number) = last.strip_prefix("content-length: ") {
                        length = number.parse().unwrap();
                    }
                }
                let mut body = vec![0; length];
                if stream.read_exact(&mut body).await.is_ok()
                    && head.starts_with("POST /v1/envelopes ")
                {
                    told.send(body).unwrap();
                }
                let away = b"HTTP/1.1 307 So\r\nLocation: http://127.0.0.1:1/\r\n\
                    Content-Length: 0\r\nConnection: close\r\n\r\n";
                let _ = stream.write_all(away).await;
            });
        }
    });
    (url, posted)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_of_no_relay_is_tried_again_and_its_doubt_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let (url, mut posted) = astray().await;
    let alice = Open::new(alice(dir.path(), &Local::default())).await.unwrap();
    let never = CancellationToken::new();
    let astray = Order { route: Route::Relays { urls: vec![url] }, ..order(2, json!({})) };
    let error = delegation::delegate(&alice.office, astray, &Silent, &never);
    let error = patiently(error).await.unwrap_err();
    assert_eq!(error.code(), Code::RelayUnreachable);
    let (told, doubt) = (error.message(), "not known whether the worker saw the offer");
    assert!(told.contains("307") && told.contains(doubt), "{told}");
    let mut sent = Vec::new();
    for _ in 0..5 {
        sent.push(patiently(posted.recv()).await.unwrap());
    }
    sent.dedup();
    assert_eq!(sent.len(), 1, "the offer alone, five times");
    // Whoever has seen it is told that it is taken back.
    assert_ne!(patiently(posted.recv()).await.unwrap(), sent[0]);
    alice.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_proposals_leaves_so_much_in_memory_and_on_disk_and_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let local = Local::default();
    let mut options = OfficeOptions::new(key(2), dir.path().join("state"));
    options.local = local.clone();
    options.admission = Admission::Anyone;
    // It takes no work, so every proposal is refused at once.
    let bob = Open::new(options).await.unwrap();
    let alice =
        Open::new(OfficeOptions { audit: AuditPlan::default(), ..alice(dir.path(), &local) })
            .await
            .unwrap();
    let open =
        |owner: &Owner| owner.gateway().tasks().filter(|(_, log)| !log.view().is_sealed()).count();
    let all = MAX_REFUSED + 160;
    for _ in 0..all / 16 {
        let ordered = alice.office.act(|owner, now, entropy| {
            let mut all = Outcome::default();
            for n in 0..16 {
                all.append(owner.order(order(2, json!({ "n": n })), now, entropy)?.2);
            }
            Ok(((), all))
        });
        ordered.await.unwrap();
        let mut told = alice.office.watch();
        while alice.office.look(move |owner| Ok(open(owner))).await.unwrap() > 0 {
            let _ = tokio::time::timeout(Duration::from_secs(1), told.recv()).await;
        }
    }
    let in_memory = bob.office.look(|owner| Ok(owner.gateway().tasks().count())).await.unwrap();
    bob.close().await;
    alice.close().await;
    let state = |n: u8| owner_dir(&dir.path().join("state"), key(n).did());
    let (_, stored) = OwnerStore::open(&state(2)).unwrap();
    let tasks: std::collections::BTreeSet<_> =
        stored.records.iter().filter_map(|stored| stored.task).collect();
    // It may have looked once more before its end.
    let kept = tasks.len();
    assert!((MAX_REFUSED..=in_memory).contains(&kept) && in_memory < all, "{kept} {in_memory}");
    assert_eq!(stored.forgotten.len(), all - kept);
    assert_eq!(std::fs::metadata(state(2).join("checkpoints.jsonl")).unwrap().len(), 0);
    // The requester made them itself, and keeps them.
    let (_, stored) = OwnerStore::open(&state(1)).unwrap();
    let tasks: std::collections::BTreeSet<_> =
        stored.records.iter().filter_map(|stored| stored.task).collect();
    assert_eq!(tasks.len(), all);
}
