//! The Agent Collaboration Protocol through daemons: real ones, with a real relay and a real worker.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use commsd::api::acp::{
    AcpCall, AcpNews, AcpParams, Answer, CreateInvite, DelegateTask, DiscoverWorkers, MAX_WAIT_MS,
    TaskStatus, Work,
};
use commsd::api::client::{self, Client};
use commsd::api::types::ApiError;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;

use crate::bench::soon;
use crate::daemon::{Daemon, Ports};
use crate::mcp::Harness;
use crate::web::Web;

/// The program, as a user whose home is `place`.
fn commsd(place: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_commsd"));
    command
        .args(args)
        .env_clear()
        .env("HOME", place)
        .env("PATH", "/usr/bin:/bin")
        .env("COMMSD_NO_BROADCAST", "1")
        .current_dir(place)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// What a command prints with `--json`; it has to be good.
async fn said(place: &Path, args: &[&str]) -> Value {
    let output = soon(commsd(place, args).arg("--json").output()).await.unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{args:?}: {out}{err}");
    serde_json::from_str(&out).unwrap_or_else(|_| panic!("{args:?}: {out}"))
}

/// Starts a program and reads its first line.
async fn started(mut command: Command) -> (Child, String) {
    let mut child = command.stderr(Stdio::inherit()).spawn().unwrap();
    let mut line = String::new();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    soon(stdout.read_line(&mut line)).await.unwrap();
    (child, line.trim_end().to_owned())
}

/// A relay, and a directory for everybody's files.
struct Place {
    dir: Arc<tempfile::TempDir>,
    relay: String,
    _relay: Child,
}

impl Place {
    async fn new() -> Self {
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let args = ["acp", "--json", "relay", "start", "--port", "0", "--state", "relay"];
        let (relay, line) = started(commsd(dir.path(), &args)).await;
        let started: Value = serde_json::from_str(&line).unwrap();
        let url = started["url"].as_str().unwrap().to_owned();
        Self { dir, relay: url, _relay: relay }
    }

    /// A daemon that listens on the relay, in a home of its own.
    async fn daemon(&self) -> Daemon {
        let home = Arc::new(tempfile::tempdir().unwrap());
        let config = format!("acp-relays = [\"{}\"]\n", self.relay);
        std::fs::write(home.path().join("config.toml"), config).unwrap();
        Daemon::start_with(home, Ports::free(), &[]).await
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A worker of the owner `name`, and its invite.
    async fn worker(&self, name: &str, cmd: &str, more: &[&str]) -> (Child, String) {
        let key = format!("{name}.json");
        if !self.path(&key).exists() {
            said(self.dir.path(), &["acp", "keygen", &key]).await;
        }
        let mut args = vec!["acp", "--state-dir", "state", "worker", "start", "--key", &key];
        args.extend(["--relay", &self.relay, "--adapter", "command", "--cmd", cmd]);
        args.extend(["--isolation", "subprocess", "--max-uses", "9"]);
        args.extend(more);
        let (worker, invite) = started(commsd(self.dir.path(), &args)).await;
        assert!(invite.starts_with("acp-invite:"), "{invite}");
        (worker, invite)
    }

    /// A worker that gives back what it gets.
    async fn echo(&self) -> (Child, String) {
        self.worker("echo", "/bin/cat", &["--auto-accept"]).await
    }
}

fn work(to: &str, auto_approve: bool) -> AcpCall {
    AcpCall::DelegateTask(DelegateTask {
        to: to.to_owned(),
        work: Work {
            relay: None,
            title: "give it back".into(),
            description: String::new(),
            input: json!({ "a": [1, 2] }),
            input_schema: None,
            output_schema: Some(json!({ "type": "object" })),
            deadline_at: None,
            budget: None,
            sandbox_policy: None,
            tools: Vec::new(),
            tool_uses: None,
            redelegation: None,
            parent_task_id: None,
            auto_approve,
            wait_ms: Some(MAX_WAIT_MS),
        },
    })
}

async fn ask(daemon: &Daemon, call: AcpCall) -> Result<Value, ApiError> {
    soon(client::acp::call(&daemon.socket(), "test", call, |_| {})).await
}

/// Orders work, and gives what is told of it.
fn order(daemon: &Daemon, call: AcpCall) -> (Order, mpsc::UnboundedReceiver<AcpNews>) {
    let (tell, told) = mpsc::unbounded_channel();
    let socket = daemon.socket();
    let order = tokio::spawn(async move {
        client::acp::call(&socket, "test", call, |news| drop(tell.send(news))).await
    });
    (order, told)
}

type Order = tokio::task::JoinHandle<Result<Value, ApiError>>;

/// The next news that `wanted` picks.
async fn news<T>(
    told: &mut mpsc::UnboundedReceiver<AcpNews>,
    wanted: impl Fn(AcpNews) -> Option<T>,
) -> T {
    loop {
        let news = soon(told.recv()).await.expect("the call has ended");
        if let Some(found) = wanted(news) {
            return found;
        }
    }
}

/// The question and the task that it is about.
fn question(news: AcpNews) -> Option<(String, String)> {
    match news {
        AcpNews::Asked { id, task_id, gate, .. } => {
            assert_eq!(gate, "final_acceptance");
            Some((id, task_id))
        }
        AcpNews::Moved { .. } | AcpNews::Quiet { .. } => None,
    }
}

/// The writing end of a FIFO, once a run reads from it. A thread of its own: one that waits in vain
/// keeps no runtime from ending.
async fn opened(gate: PathBuf) -> std::fs::File {
    let (tell, told) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || tell.send(std::fs::File::create(gate)));
    soon(told).await.unwrap().unwrap()
}

async fn over(daemon: &Daemon, task_id: &str) -> Value {
    let call = TaskStatus { task_id: task_id.into(), wait_ms: Some(MAX_WAIT_MS) };
    ask(daemon, AcpCall::TaskStatus(call)).await.unwrap()
}

#[tokio::test]
async fn work_is_ordered_through_the_daemon_by_the_command_line() {
    let place = Place::new().await;
    let (_worker, invite) = place.echo().await;
    let daemon = place.daemon().await;
    let home = daemon.home.path().to_str().unwrap();
    let identity = daemon.home.path().join("state/acp/identity.json");
    assert!(!identity.exists(), "made before anybody asked for it");

    let asked =
        ["--home", home, "acp", "delegate", "--to", &invite, "--title", "t", "--auto-approve"];
    let done = said(place.dir.path(), &[&asked[..], &["--input", "{\"a\": 1}"]].concat()).await;
    assert_eq!((&done["status"], &done["deliverable"]), (&json!("SETTLED"), &json!({ "a": 1 })));
    assert_eq!(done["audit"]["status"], "VALID", "{done}");
    let mode = std::fs::metadata(&identity).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    daemon.event("acp_identity_created").await;

    let list = said(place.dir.path(), &["--home", home, "acp", "tasks"]).await;
    assert_eq!(
        (list["tasks"][0]["taskId"].clone(), list["tasks"].as_array().unwrap().len()),
        (done["taskId"].clone(), 1)
    );
    let id = done["taskId"].as_str().unwrap();
    let task = said(place.dir.path(), &["--home", home, "acp", "task", id]).await;
    assert_eq!((&task["status"], &task["deliverable"]), (&json!("SETTLED"), &json!({ "a": 1 })));
    let draft = commsd(place.dir.path(), &["--home", home, "acp", "task", id, "--draft"]).output();
    let draft = String::from_utf8(soon(draft).await.unwrap().stdout).unwrap();
    assert!(draft.starts_with("# t\n") && draft.contains("\n      \"a\": 1\n"), "{draft}");
    // Its log goes into a new file, and is good by itself.
    let audit = ["--home", home, "acp", "task", id, "--audit", "log.json"];
    let written = said(place.dir.path(), &audit).await;
    let report = said(place.dir.path(), &["acp", "audit-verify", "log.json"]).await;
    assert_eq!((&report["status"], &report["head"]), (&json!("VALID"), &done["audit"]["head"]));
    let log = place.path("log.json");
    assert_eq!(written["path"], log.to_string_lossy().as_ref());
    assert_eq!(std::fs::metadata(&log).unwrap().permissions().mode() & 0o777, 0o600);
    let again = commsd(place.dir.path(), &audit).output();
    assert_eq!(soon(again).await.unwrap().status.code(), Some(1), "nothing is overwritten");
    // Its end is known to both sides, so it is too late.
    let late = commsd(place.dir.path(), &["--home", home, "acp", "cancel", id]).output();
    assert_eq!(soon(late).await.unwrap().status.code(), Some(1));
}

#[tokio::test]
async fn an_identity_stays_and_its_office_opens_with_the_daemon() {
    let place = Place::new().await;
    let daemon = place.daemon().await;
    let did = ask(&daemon, AcpCall::Whoami).await.unwrap();
    assert_eq!(did["relays"], json!([place.relay]));
    let home = Arc::clone(&daemon.home);
    let (code, log) = daemon.stop().await;
    assert_eq!(code, Some(0), "{}", log.text());
    let daemon = Daemon::start_with(Arc::clone(&home), Ports::free(), &[]).await;
    let opened = daemon.event("acp_office_opened").await;
    assert_eq!((&opened["did"], &opened["relays"]), (&did["did"], &json!(1)));
    assert_eq!(ask(&daemon, AcpCall::Whoami).await.unwrap(), did);
    assert!(!daemon.log.text().contains("acp_identity_created"));

    // A key that others can read is not used, and said so; mended, it is.
    let (_, _) = daemon.stop().await;
    let identity = home.path().join("state/acp/identity.json");
    let mode = |mode| std::fs::set_permissions(&identity, Permissions::from_mode(mode)).unwrap();
    mode(0o644);
    let daemon = Daemon::start_with(home, Ports::free(), &[]).await;
    let failed = daemon.event("acp_office_failed").await;
    assert_eq!(failed["code"], "acp_key");
    let health = daemon.status().await.health;
    let condition = health.iter().find(|health| health.code == "acp_office").unwrap();
    assert!(condition.text.contains("chmod 600") && condition.todo.is_some(), "{condition:?}");
    assert_eq!(ask(&daemon, AcpCall::Whoami).await.unwrap_err().code, "acp_key");
    mode(0o600);
    daemon.event("acp_office_opened").await;
    assert_eq!(ask(&daemon, AcpCall::Whoami).await.unwrap(), did);
    assert!(daemon.status().await.health.iter().all(|health| health.code != "acp_office"));
}

#[tokio::test]
async fn a_daemon_that_keeps_nothing_has_no_tasks() {
    let home = Arc::new(tempfile::tempdir().unwrap());
    let daemon = Daemon::start_with(home, Ports::free(), &["--ephemeral"]).await;
    let error = ask(&daemon, AcpCall::Whoami).await.unwrap_err();
    assert_eq!(error.code, "acp_ephemeral");
    assert!(error.todo.unwrap().contains("--key"));
    assert!(!daemon.home.path().join("state/acp").exists());
}

#[tokio::test]
async fn the_owner_is_asked_and_answers_by_the_command_line_and_no_agent_can() {
    let place = Place::new().await;
    let (_worker, invite) = place.echo().await;
    let daemon = place.daemon().await;
    let (order, mut told) = order(&daemon, work(&invite, false));
    let (id, task_id) = news(&mut told, question).await;

    let agent = daemon.agent("ann").await;
    let answer = AcpCall::Answer(Answer { id: id.clone(), approve: true, reason: String::new() });
    let call = |call| agent.client.call(AcpParams(Box::new(call)));
    assert_eq!(soon(call(answer)).await.unwrap_err().code, "acp_owner_only");
    // All else is open to agents.
    let waits = soon(call(AcpCall::ListApprovals)).await.unwrap()["approvals"].take();
    assert_eq!((&waits[0]["id"], &waits[0]["taskId"]), (&json!(id), &json!(task_id)));

    let home = daemon.home.path().to_str().unwrap();
    let list = said(place.dir.path(), &["--home", home, "acp", "approvals", "list"]).await;
    assert_eq!(list["approvals"][0]["id"], json!(id));
    said(place.dir.path(), &["--home", home, "acp", "approvals", "approve", &id]).await;
    let done = soon(order).await.unwrap().unwrap();
    assert_eq!((&done["status"], &done["taskId"]), (&json!("SETTLED"), &json!(task_id)));
    // Once is enough.
    let again =
        commsd(place.dir.path(), &["--home", home, "acp", "approvals", "approve", &id]).output();
    assert_eq!(soon(again).await.unwrap().status.code(), Some(1));
}

/// Ctrl-C ends the command alone, and it says so.
#[tokio::test]
async fn who_interrupts_a_delegation_is_told_that_it_goes_on() {
    let place = Place::new().await;
    let (_worker, invite) = place.worker("careful", "/bin/cat", &[]).await;
    let daemon = place.daemon().await;
    let home = daemon.home.path().to_str().unwrap();
    let asked = ["--home", home, "acp", "delegate", "--to", &invite, "--title", "t", "--progress"];
    let mut child = commsd(place.dir.path(), &asked).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap()).lines();
    // The course begins with the task's id.
    let line = soon(stderr.next_line()).await.unwrap().unwrap();
    let id = line.split(' ').next().unwrap().to_owned();
    assert!(id.starts_with("task_"), "{line}");
    let pid = rustix::process::Pid::from_raw(child.id().unwrap().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(soon(child.wait()).await.unwrap().code(), Some(130));
    let mut said = String::new();
    while let Some(line) = soon(stderr.next_line()).await.unwrap() {
        said += &line;
    }
    for word in ["goes on with task_", &format!("acp task {id}"), &format!("acp cancel {id}")] {
        assert!(said.contains(word), "{said}");
    }
    let status = TaskStatus { task_id: id, wait_ms: None };
    let task = ask(&daemon, AcpCall::TaskStatus(status)).await.unwrap();
    assert!(["PROPOSING", "PROPOSED"].map(Value::from).contains(&task["status"]), "{task}");
}

#[tokio::test]
async fn an_invites_issuer_knows_whether_it_was_used_or_taken_back() {
    let place = Place::new().await;
    let (_worker, _) = place.echo().await;
    let for_one = ["acp", "--state-dir", "state", "invite", "create", "--key", "echo.json"];
    let invite = said(place.dir.path(), &for_one).await["invite"].as_str().unwrap().to_owned();
    let daemon = place.daemon().await;
    let home = daemon.home.path().to_str().unwrap();
    let show = |text: &str| {
        commsd(place.dir.path(), &["--home", home, "acp", "invite", "show", text]).output()
    };
    // Another's, of which nothing is known here.
    let shown = String::from_utf8(soon(show(&invite)).await.unwrap().stdout).unwrap();
    assert!(shown.contains("only its issuer can tell"), "{shown}");
    let shown = said(place.dir.path(), &["--home", home, "acp", "invite", "show", &invite]).await;
    assert_eq!((&shown["code"], &shown["uses"]), (&Value::Null, &Value::Null));
    // The worker's office runs, and is asked.
    let at_worker = ["acp", "--state-dir", "state", "invite", "show", &invite];
    let shown = said(place.dir.path(), &at_worker).await;
    assert_eq!((&shown["code"], &shown["uses"]), (&Value::Null, &json!(0)));
    ask(&daemon, work(&invite, true)).await.unwrap();
    let shown = said(place.dir.path(), &at_worker).await;
    assert_eq!((&shown["code"], &shown["uses"]), (&json!("INVITE_EXHAUSTED"), &json!(1)));

    // The daemon's own.
    let made = said(place.dir.path(), &["--home", home, "acp", "invite", "create"]).await;
    let own = made["invite"].as_str().unwrap();
    let shown = String::from_utf8(soon(show(own)).await.unwrap().stdout).unwrap();
    assert!(shown.contains("0 of 1 used") && shown.contains("good\n"), "{shown}");
    let id = made["inviteId"].as_str().unwrap();
    said(place.dir.path(), &["--home", home, "acp", "revoke", "invite", id]).await;
    let shown = String::from_utf8(soon(show(own)).await.unwrap().stdout).unwrap();
    assert!(shown.contains("INVITE_REVOKED"), "{shown}");
}

#[tokio::test]
async fn the_owner_answers_from_the_page() {
    let place = Place::new().await;
    let (_worker, invite) = place.echo().await;
    let daemon = place.daemon().await;
    let web = Web::start(&daemon).await;
    let (order, mut told) = order(&daemon, work(&invite, false));
    let (id, task_id) = news(&mut told, question).await;
    let waits = web.done("operator", "acp", json!({"op": "list_approvals"})).await;
    let waits = &waits["approvals"];
    assert_eq!((&waits[0]["id"], &waits[0]["taskId"]), (&json!(id), &json!(task_id)));
    let yes = json!({"op": "answer", "id": id, "approve": true});
    web.done("operator", "acp", yes).await;
    assert_eq!(soon(order).await.unwrap().unwrap()["status"], "SETTLED");
}

#[tokio::test]
async fn a_task_survives_the_daemons_death_before_and_after_its_delivery() {
    let place = Place::new().await;
    let gate = place.path("gate");
    let fifo = std::process::Command::new("mkfifo").arg(&gate).status().unwrap();
    assert!(fifo.success());
    let cmd = format!("/bin/sh -c '/bin/cat {} >&2; /bin/cat'", gate.display());
    let (_worker, invite) = place.worker("slow", &cmd, &["--auto-accept"]).await;
    let daemon = place.daemon().await;
    let (order, mut told) = order(&daemon, work(&invite, false));
    let task_id = news(&mut told, |news| match news {
        AcpNews::Moved { task_id, status, .. } if status == "IN_PROGRESS" => Some(task_id),
        _ => None,
    })
    .await;
    let gate = opened(gate).await;
    let home = daemon.kill().await;
    assert_eq!(soon(order).await.unwrap().unwrap_err().code, ApiError::DAEMON_STOPPED);
    // The work is done while nobody is there to take it.
    drop(gate);

    let daemon = Daemon::start_with(home, Ports::free(), &[]).await;
    daemon.event("acp_question").await;
    let home = daemon.kill().await;
    let daemon = Daemon::start_with(home, Ports::free(), &[]).await;
    daemon.event("acp_question").await;
    let waits = ask(&daemon, AcpCall::ListApprovals).await.unwrap()["approvals"].take();
    assert_eq!(waits[0]["taskId"], json!(task_id));
    let id = waits[0]["id"].as_str().unwrap().to_owned();
    let answer = AcpCall::Answer(Answer { id, approve: true, reason: "good".into() });
    ask(&daemon, answer).await.unwrap();
    let done = over(&daemon, &task_id).await;
    assert_eq!(
        (&done["status"], &done["deliverable"]),
        (&json!("SETTLED"), &json!({ "a": [1, 2] }))
    );
}

#[tokio::test]
async fn a_task_survives_its_workers_death_and_a_run_does_not() {
    let place = Place::new().await;
    let daemon = place.daemon().await;
    // Before it has accepted: asked again.
    let (mut worker, invite) = place.worker("careful", "/bin/cat", &[]).await;
    let (order_, _told) = order(&daemon, work(&invite, true));
    let waits = ["acp", "--state-dir", "state", "approvals", "list", "--key", "careful.json"];
    let asked = async {
        loop {
            let list = said(place.dir.path(), &waits).await;
            if let Some(id) = list["approvals"][0]["id"].as_str() {
                return id.to_owned();
            }
        }
    };
    let id = soon(asked).await;
    worker.kill().await.unwrap();
    let (_worker, _) = place.worker("careful", "/bin/cat", &[]).await;
    let yes = ["acp", "--state-dir", "state", "approvals", "approve", &id, "--key", "careful.json"];
    said(place.dir.path(), &yes).await;
    let done = soon(order_).await.unwrap().unwrap();
    assert_eq!(done["status"], "SETTLED", "{done}");

    // In its run: that is lost, and both sides know.
    let gate = place.path("gate");
    assert!(std::process::Command::new("mkfifo").arg(&gate).status().unwrap().success());
    let cmd = format!("/bin/cat {}", gate.display());
    let (mut worker, invite) = place.worker("hasty", &cmd, &["--auto-accept"]).await;
    let (order_, _told) = order(&daemon, work(&invite, true));
    let _gate = opened(gate).await;
    worker.kill().await.unwrap();
    let (_worker, _) = place.worker("hasty", &cmd, &["--auto-accept"]).await;
    let done = soon(order_).await.unwrap().unwrap();
    assert_eq!(
        (&done["status"], &done["failure"]["code"]),
        (&json!("FAILED"), &json!("SANDBOX_FAILED"))
    );
}

#[tokio::test]
async fn two_daemons_settle_over_a_relay_though_both_are_killed() {
    let place = Place::new().await;
    let requester = place.daemon().await;
    let home = Arc::new(tempfile::tempdir().unwrap());
    let config = format!(
        "acp-relays = [\"{}\"]\nacp-worker = \"command\"\nacp-worker-cmd = \"/bin/cat\"\n\
         acp-worker-isolation = \"subprocess\"\n",
        place.relay
    );
    std::fs::write(home.path().join("config.toml"), config).unwrap();
    let worker = Daemon::start_with(home, Ports::free(), &[]).await;
    let at = |daemon: &Daemon| daemon.home.path().to_str().unwrap().to_owned();
    let made = said(place.dir.path(), &["--home", &at(&worker), "acp", "invite", "create"]).await;
    let (order, mut told) = order(&requester, work(made["invite"].as_str().unwrap(), true));
    let task_id = news(&mut told, |news| match news {
        AcpNews::Moved { task_id, status, .. } if status == "PROPOSED" => Some(task_id),
        _ => None,
    })
    .await;
    worker.event("acp_question").await;
    let (at_worker, at_requester) = (worker.kill().await, requester.kill().await);
    assert_eq!(soon(order).await.unwrap().unwrap_err().code, ApiError::DAEMON_STOPPED);

    let worker = Daemon::start_with(at_worker, Ports::free(), &[]).await;
    worker.event("acp_question").await;
    let list = ["--home", &at(&worker), "acp", "approvals", "list"];
    let list = said(place.dir.path(), &list).await["approvals"].take();
    let id = list[0]["id"].as_str().unwrap();
    assert_eq!(list[0]["gate"], "contract_acceptance");
    said(place.dir.path(), &["--home", &at(&worker), "acp", "approvals", "approve", id]).await;
    let requester = Daemon::start_with(at_requester, Ports::free(), &[]).await;
    let done = over(&requester, &task_id).await;
    assert_eq!(
        (&done["status"], &done["deliverable"]),
        (&json!("SETTLED"), &json!({ "a": [1, 2] }))
    );
    let done = over(&worker, &task_id).await;
    assert_eq!((&done["status"], &done["role"]), (&json!("SETTLED"), &json!("worker")));
}

#[tokio::test]
async fn calls_end_with_their_clients_and_more_than_fit_are_refused() {
    let place = Place::new().await;
    // Nobody works behind this invite.
    let (mut worker, invite) = place.echo().await;
    worker.kill().await.unwrap();
    let daemon = place.daemon().await;
    let (order, mut told) = order(&daemon, work(&invite, true));
    let task_id = news(&mut told, |news| match news {
        AcpNews::Moved { task_id, .. } => Some(task_id),
        AcpNews::Asked { .. } | AcpNews::Quiet { .. } => None,
    })
    .await;
    order.abort();
    // As many as there are places wait for its end, over three connections.
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(Arc::new(Client::connect(&daemon.socket(), "test").await.unwrap().0));
    }
    let mut waiting = tokio::task::JoinSet::new();
    for n in 0..150 {
        let (client, task_id) = (Arc::clone(&clients[n % 3]), task_id.clone());
        waiting.spawn(async move {
            let call = AcpCall::TaskStatus(TaskStatus { task_id, wait_ms: Some(MAX_WAIT_MS) });
            client.call(AcpParams(Box::new(call))).await
        });
    }
    let refused = soon(waiting.join_next()).await.unwrap().unwrap().unwrap_err();
    assert_eq!(refused.code, "busy");
    // Other requests are served all the same.
    daemon.status().await;
    waiting.shutdown().await;
    drop(clients);
    let served = async {
        // The daemon may see the clients go a moment later.
        while let Err(error) = ask(&daemon, AcpCall::Whoami).await {
            assert_eq!(error.code, "busy");
        }
    };
    soon(served).await;
    let call = TaskStatus { task_id, wait_ms: None };
    let task = ask(&daemon, AcpCall::TaskStatus(call)).await.unwrap();
    assert_eq!(task["status"], "PROPOSING", "a task outlives who ordered it");
}

#[tokio::test]
async fn the_daemon_grants_the_tools_of_its_configuration_and_runs_no_command_that_is_sent() {
    /// Uses a tool, and gives back its answer.
    const PROGRAM: &str = r#"
use strict; use Socket;
my ($port) = $ENV{TASK_TOOLS_URL} =~ m{:(\d+)$};
socket(my $s, PF_INET, SOCK_STREAM, 0) or die;
connect($s, pack_sockaddr_in($port, inet_aton('127.0.0.1'))) or die;
my $body = '{"resource":"mcp:docs/a/b","action":"read","arguments":[7]}';
syswrite $s, "POST /v1/tools/call HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer $ENV{TASK_TOOLS_TOKEN}\r\n" .
    "content-length: " . length($body) . "\r\nconnection: close\r\n\r\n$body";
my $answer = do { local $/; <$s> };
print $answer =~ s/.*\r\n\r\n//sr;
"#;
    let place = Place::new().await;
    std::fs::write(place.path("program.pl"), PROGRAM).unwrap();
    let cmd = format!("perl {}", place.path("program.pl").display());
    let (_worker, invite) = place.worker("perl", &cmd, &["--auto-accept"]).await;
    let home = Arc::new(tempfile::tempdir().unwrap());
    let config = format!(
        "acp-relays = [\"{}\"]\n[acp-tools]\n\"mcp:docs/**:read\" = \"/bin/cat\"\n",
        place.relay
    );
    std::fs::write(home.path().join("config.toml"), &config).unwrap();
    let ports = Ports::free();
    let daemon = Daemon::start_with(home, ports, &[]).await;
    let granting = |tools: &[&str]| {
        let AcpCall::DelegateTask(mut call) = work(&invite, true) else { unreachable!() };
        call.work.tools = tools.iter().map(|tool| (*tool).to_owned()).collect();
        AcpCall::DelegateTask(call)
    };
    for (bad, code) in [("mcp:docs/a:write", "BAD_FIELD"), ("mcp:other:read", "BAD_FIELD")] {
        let error = ask(&daemon, granting(&[bad])).await.unwrap_err();
        assert_eq!(error.code, code);
        assert!(error.todo.as_ref().unwrap().contains("acp-tools"), "{error:?}");
    }
    // A command is the configuration's to name.
    let sent = ask(&daemon, granting(&["mcp:docs/a:read=/bin/cat"])).await.unwrap_err();
    assert_eq!(sent.code, "BAD_FIELD");
    let mut asked = vec!["--home", daemon.home.path().to_str().unwrap(), "acp", "delegate"];
    asked.extend(["--to", &invite, "--title", "t", "--tool", "mcp:docs/a:read=/bin/cat"]);
    let refused = soon(commsd(place.dir.path(), &asked).output()).await.unwrap();
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");

    let (order, mut told) = order(&daemon, granting(&["mcp:docs/a/*:read"]));
    let (id, about) = news(&mut told, |news| match news {
        AcpNews::Asked { id, gate, about, .. } => {
            assert_eq!(gate, "external_send");
            Some((id, about))
        }
        AcpNews::Moved { .. } | AcpNews::Quiet { .. } => None,
    })
    .await;
    assert_eq!(about, ["arguments (3 bytes): [7]"]);
    ask(&daemon, AcpCall::Answer(Answer { id, approve: true, reason: String::new() }))
        .await
        .unwrap();
    let done = soon(order).await.unwrap().unwrap();
    let given = json!({ "resource": "mcp:docs/a/b", "action": "read", "arguments": [7] });
    assert_eq!(done["deliverable"], json!({ "output": given }), "{done}");

    // Where the configuration says so, nobody is asked.
    let home = daemon.kill().await;
    let config = format!("{config}[acp-gates]\nexternal_send = \"auto\"\n");
    std::fs::write(home.path().join("config.toml"), config).unwrap();
    let daemon = Daemon::start_with(home, ports, &[]).await;
    let done = soon(ask(&daemon, granting(&["mcp:docs/a/*:read"]))).await.unwrap();
    assert_eq!(done["deliverable"], json!({ "output": given }), "{done}");
}

#[tokio::test]
async fn mistakes_say_what_to_do() {
    let home = Arc::new(tempfile::tempdir().unwrap());
    let daemon = Daemon::start_with(home, Ports::free(), &[]).await;
    let status = |id: &str| AcpCall::TaskStatus(TaskStatus { task_id: id.into(), wait_ms: None });
    let did = ask(&daemon, AcpCall::Whoami).await.unwrap()["did"].as_str().unwrap().to_owned();
    for (call, code, help) in [
        (status("task_00000000000000000000000000"), "UNKNOWN_TASK", "commsd acp tasks"),
        (status("x"), "BAD_ID", "correct"),
        (work("acp-invite:AAAA", true), "BAD_INVITE", "the whole line"),
        (work("the wroker", true), "BAD_FIELD", "commsd agents"),
        (work(&did, true), "BAD_FIELD", "acp-relays"),
        (AcpCall::CreateInvite(CreateInvite::default()), "BAD_FIELD", "acp-relays"),
        (AcpCall::DiscoverWorkers(DiscoverWorkers::default()), "BAD_FIELD", "acp-relays"),
    ] {
        let error = ask(&daemon, call).await.unwrap_err();
        assert_eq!(error.code, code, "{error:?}");
        assert!(error.todo.as_ref().is_some_and(|todo| todo.contains(help)), "{error:?}");
    }
    // What is no call names its fault, and no word of an input is in the log.
    let (client, _events) = Client::connect(&daemon.socket(), "test").await.unwrap();
    let fine: AcpParams = serde_json::from_value(json!({ "op": "whoami" })).unwrap();
    soon(client.call(fine)).await.unwrap();
    for call in [
        json!({ "op": "explode" }),
        json!({ "op": "delegate_task", "to": "x", "title": "t", "titel": "t" }),
    ] {
        assert!(serde_json::from_value::<AcpParams>(call).is_err());
    }
}

#[tokio::test]
async fn models_order_work_hear_of_its_course_and_the_user_is_asked_over_mcp() {
    let place = Place::new().await;
    let (_worker, invite) = place.echo().await;
    let daemon = place.daemon().await;
    let cwd = daemon.home.path().join("w");
    let mut session = Harness::asking(daemon.home.path(), &cwd).await;
    let tools = session.ask("tools/list", json!({})).await;
    let tools = tools["result"]["tools"].as_array().unwrap().clone();
    assert_eq!(
        tools.iter().filter(|tool| tool["name"].as_str().unwrap().starts_with("acp_")).count(),
        9
    );

    let arguments = json!({ "to": invite, "title": "give it back", "input": { "a": 1 } });
    let call = json!({ "name": "acp_delegate_task", "arguments": arguments,
        "_meta": { "progressToken": "p" } });
    let id = session.request("tools/call", call).await;
    // The user, not the model, is asked.
    let asked = session.asked("elicitation/create").await;
    let text = asked["params"]["message"].as_str().unwrap();
    assert!(text.contains("final_acceptance") && text.contains("give it back"), "{text}");
    let yes = json!({ "action": "accept", "content": { "approve": true } });
    session.send(&json!({ "jsonrpc": "2.0", "id": asked["id"], "result": yes })).await;
    let answer = session.answer(id).await;
    let result = &answer["result"];
    assert_eq!(result["structuredContent"]["status"], "SETTLED", "{answer}");
    assert_eq!(result["structuredContent"]["deliverable"], json!({ "a": 1 }));
    let text = result["content"][0]["text"].as_str().unwrap();
    assert!(
        text.starts_with("acp_delegate_task: SETTLED task_") && text.contains("\n│ {"),
        "{text}"
    );
    let progress: Vec<&Value> =
        session.pushed.iter().filter(|m| m["method"] == "notifications/progress").collect();
    let at: Vec<f64> = progress.iter().map(|m| m["params"]["progress"].as_f64().unwrap()).collect();
    assert!(at.len() >= 3 && at.windows(2).all(|pair| pair[0] < pair[1]), "{at:?}");
    assert!(progress.iter().all(|m| m["params"]["progressToken"] == "p"));
    assert!(progress.iter().any(|m| m["params"]["message"].as_str().unwrap().contains("VERIFIED")));

    // A no is an answer too.
    let call = json!({ "name": "acp_delegate_task", "arguments": arguments });
    let id = session.request("tools/call", call).await;
    let asked = session.asked("elicitation/create").await;
    let no = json!({ "action": "decline" });
    session.send(&json!({ "jsonrpc": "2.0", "id": asked["id"], "result": no })).await;
    let result = &session.answer(id).await["result"]["structuredContent"];
    assert_eq!(
        (&result["status"], &result["failure"]["code"]),
        (&json!("DISPUTED"), &json!("APPROVAL_DENIED"))
    );

    let (text, error) = session.tool("acp_list_tasks", json!({ "state": "SETTLED" })).await;
    assert!(!error && text.contains("give it back"), "{text}");
    let (text, error) = session.tool("acp_cancel_task", json!({ "taskId": "x" })).await;
    assert!(error && text.contains("BAD_ID") && text.contains("correct"), "{text}");
    let (text, error) = session.tool("acp_task_status", json!({ "task": "x" })).await;
    assert!(error && text.contains("`task`"), "{text}");

    // A session without them.
    let mut plain =
        Harness::spawn_with(daemon.home.path(), &cwd, "pi", &["--no-start", "--no-acp"]);
    plain.initialize("2025-06-18").await;
    let tools = plain.ask("tools/list", json!({})).await;
    assert_eq!(tools["result"]["tools"].as_array().unwrap().len(), 3);
    let call = json!({ "name": "acp_list_tasks", "arguments": {} });
    assert_eq!(plain.ask("tools/call", call).await["error"]["code"], -32602);
}

#[tokio::test]
async fn a_cancelled_call_ends_and_its_task_goes_on() {
    let place = Place::new().await;
    let (mut worker, invite) = place.echo().await;
    worker.kill().await.unwrap();
    let daemon = place.daemon().await;
    let mut session = Harness::asking(daemon.home.path(), &daemon.home.path().join("w")).await;
    let call = json!({ "name": "acp_delegate_task", "arguments": { "to": invite, "title": "t" },
        "_meta": { "progressToken": 1 } });
    let id = session.request("tools/call", call).await;
    session.asked("notifications/progress").await;
    let params = json!({ "requestId": id });
    session
        .send(&json!({ "jsonrpc": "2.0", "method": "notifications/cancelled", "params": params }))
        .await;
    let (text, error) = session.tool("acp_list_tasks", json!({})).await;
    assert!(!error && text.contains("PROPOSING"), "{text}");
}

/// `acp mcp-server` in both framings.
struct Server {
    _child: Child,
    stdin: tokio::process::ChildStdin,
    stdout: BufReader<tokio::process::ChildStdout>,
    heads: bool,
}

impl Server {
    fn start(place: &Path, args: &[&str], heads: bool) -> Self {
        let mut command = commsd(place, args);
        let mut child = command.stdin(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { _child: child, stdin, stdout, heads }
    }

    async fn say(&mut self, message: &Value, heads: bool) {
        use tokio::io::AsyncWriteExt as _;
        let body = message.to_string();
        let bytes = match heads {
            true => format!("Content-Length: {}\r\n\r\n{body}", body.len()),
            false => format!("{body}\n"),
        };
        soon(self.stdin.write_all(bytes.as_bytes())).await.unwrap();
    }

    /// The next message, framed as the first one was.
    async fn hear(&mut self) -> Value {
        use tokio::io::AsyncReadExt as _;
        let mut line = String::new();
        soon(self.stdout.read_line(&mut line)).await.unwrap();
        if !self.heads {
            return serde_json::from_str(&line).unwrap();
        }
        let length = line.strip_prefix("Content-Length: ").unwrap_or_else(|| panic!("{line}"));
        let mut body = vec![0; length.trim_end().parse::<usize>().unwrap() + 2];
        soon(self.stdout.read_exact(&mut body)).await.unwrap();
        serde_json::from_slice(body.strip_prefix(b"\r\n").unwrap()).unwrap()
    }

    /// Asks in `heads`' framing; answers come in that of the first message.
    async fn ask(&mut self, method: &str, params: Value, heads: bool) -> Value {
        let message = json!({ "jsonrpc": "2.0", "id": method, "method": method, "params": params });
        self.say(&message, heads).await;
        self.hear().await
    }
}

#[tokio::test]
async fn the_mcp_server_takes_both_framings_mixed_and_every_revision() {
    let place = tempfile::tempdir().unwrap();
    said(place.path(), &["acp", "keygen", "me.json"]).await;
    let args = ["acp", "--state-dir", "state", "mcp-server", "--key", "me.json"];
    for (n, version) in ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"].iter().enumerate()
    {
        let heads = n % 2 == 0;
        let mut server = Server::start(place.path(), &args, heads);
        let params = json!({ "protocolVersion": version, "capabilities": {},
            "clientInfo": { "name": "test", "version": "1" } });
        let answer = server.ask("initialize", params, heads).await;
        assert_eq!(answer["result"]["protocolVersion"], *version, "{answer}");
        let initialized = json!({ "jsonrpc": "2.0", "method": "notifications/initialized" });
        server.say(&initialized, !heads).await;
        let tools = server.ask("tools/list", json!({}), !heads).await;
        assert_eq!(tools["result"]["tools"].as_array().unwrap().len(), 9);
        let call = json!({ "name": "acp_list_tasks", "arguments": {} });
        let listed = server.ask("tools/call", call, heads).await;
        assert_eq!(listed["result"]["structuredContent"], json!({ "tasks": [] }), "{listed}");
        // A store that is in use says so, in the next round it is free.
        drop(server.stdin);
        soon(server._child.wait()).await.unwrap();
    }
    // Without a handshake.
    let mut server = Server::start(place.path(), &args, true);
    let meta = json!({ "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": { "name": "test", "version": "1" },
        "io.modelcontextprotocol/clientCapabilities": {} });
    let found = server.ask("server/discover", json!({ "_meta": meta }), true).await;
    assert!(found["result"]["capabilities"]["tools"].is_object(), "{found}");
    let call = json!({ "name": "acp_create_invite", "_meta": meta,
        "arguments": { "relayUrls": ["https://relay.example"] } });
    let made = server.ask("tools/call", call, false).await;
    let invite = made["result"]["structuredContent"]["invite"].as_str().unwrap();
    assert!(invite.starts_with("acp-invite:"), "{made}");
    let call = json!({ "name": "acp_answer", "arguments": {}, "_meta": meta });
    assert_eq!(server.ask("tools/call", call, true).await["error"]["code"], -32602);
}

#[tokio::test]
async fn the_session_of_a_harness_takes_both_framings_mixed() {
    let place = tempfile::tempdir().unwrap();
    let home = place.path().to_str().unwrap();
    let args = ["--home", home, "mcp", "--no-start", "--harness", "codex"];
    for heads in [true, false] {
        let mut server = Server::start(place.path(), &args, heads);
        let params = json!({ "protocolVersion": "2025-11-25", "capabilities": {},
            "clientInfo": { "name": "test", "version": "1" } });
        server.ask("initialize", params, heads).await;
        let initialized = json!({ "jsonrpc": "2.0", "method": "notifications/initialized" });
        server.say(&initialized, !heads).await;
        for framing in [!heads, heads, !heads] {
            let listed = server.ask("resources/list", json!({}), framing).await;
            assert_eq!(listed["result"]["resources"].as_array().unwrap().len(), 3, "{listed}");
        }
    }
}

#[tokio::test]
async fn the_mcp_server_without_a_key_asks_the_daemon() {
    let place = tempfile::tempdir().unwrap();
    let home = place.path().to_str().unwrap();
    let args = ["--home", home, "acp", "mcp-server"];
    let mut server = Server::start(place.path(), &args, false);
    let params = json!({ "protocolVersion": "2025-06-18", "capabilities": {},
        "clientInfo": { "name": "test", "version": "1" } });
    server.ask("initialize", params, false).await;
    server.say(&json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }), false).await;
    let call = json!({ "name": "acp_list_tasks", "arguments": {} });
    let answer = server.ask("tools/call", call.clone(), false).await;
    let text = answer["result"]["content"][0]["text"].as_str().unwrap();
    assert!(text.contains("no_daemon") && text.contains("commsd run"), "{text}");
    let home = Arc::new(place);
    let _daemon = Daemon::start_with(home, Ports::free(), &[]).await;
    let answer = server.ask("tools/call", call, false).await;
    assert_eq!(answer["result"]["structuredContent"], json!({ "tasks": [] }), "{answer}");
}
