//! The command line: the real binary against a fake daemon, or against none.

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Stdio;

use commsd::api::types::{
    AcceptParams, AgentsParams, ApiError, AttachParams, Call, DmParams, EventsAckParams,
    EventsSubscribeParams, InboxParams, LogsParams, OwnStatus, PROGRAM_VERSION, RejectParams,
    Request, RoomCreateParams, RoomDestroyParams, RoomHistoryParams, RoomInviteParams,
    RoomJoinParams, RoomKickParams, RoomLeaveParams, RoomMembersParams, RoomType, RoomsParams,
    SendParams, StatusParams, Timing, UpdateParams, Visibility, WhoamiParams,
};
use commsd::runtime::local_socket::{CloseReason, ConnId, LocalInput, SocketLimits};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, Command};

use crate::bench::{Bench, ours, soon};
use crate::daemon::{Daemon, Ports};

/// What a command left behind.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
    /// What it asked, `attach` included.
    requests: Vec<Request>,
}

impl Ran {
    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).expect(&self.stdout)
    }

    /// The error that `--json` puts on stderr; stdout is empty then.
    fn error(&self) -> Value {
        assert_eq!(self.stdout, "");
        let line: Value = serde_json::from_str(&self.stderr).expect(&self.stderr);
        line["error"].clone()
    }
}

/// The binary in an environment that knows nothing but `place`, so that it cannot find a real daemon.
fn commsd(place: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_commsd"));
    command
        .args(args)
        .env_clear()
        .env("HOME", place)
        .env("XDG_RUNTIME_DIR", place)
        .env("COMMSD_NO_BROADCAST", "1")
        .current_dir(place)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

async fn finish(child: Child) -> Ran {
    let output = soon(child.wait_with_output()).await.unwrap();
    Ran {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
        requests: Vec::new(),
    }
}

/// Runs without any daemon.
async fn alone(place: &Path, args: &[&str]) -> Ran {
    finish(commsd(place, args).spawn().unwrap()).await
}

fn start(bench: &Bench, args: &[&str]) -> Child {
    let place = bench.path.parent().unwrap();
    commsd(place, args).env("COMMSD_SOCKET", &bench.path).spawn().unwrap()
}

/// Runs against a daemon that answers with what `answer` says, and grants every `attach`.
async fn served(
    bench: &mut Bench,
    args: &[&str],
    answer: impl Fn(&Request) -> Result<Value, ApiError>,
) -> Ran {
    let running = finish(start(bench, args));
    serve(bench, running, answer).await
}

async fn serve(
    bench: &mut Bench,
    running: impl Future<Output = Ran>,
    answer: impl Fn(&Request) -> Result<Value, ApiError>,
) -> Ran {
    let mut requests = Vec::new();
    let mut running = std::pin::pin!(running);
    let mut ran = None;
    let mut open = 0;
    // To the last input, so that the next run finds none of this one's.
    while ran.is_none() || open > 0 {
        let input = tokio::select! {
            done = &mut running, if ran.is_none() => {
                ran = Some(done);
                continue;
            }
            input = bench.input() => input,
        };
        match input {
            LocalInput::Connected { .. } => open += 1,
            LocalInput::Disconnected { .. } => open -= 1,
            LocalInput::Request { conn, id, request } => {
                let answer = match &request {
                    Request::Attach(_) => Ok(attached(Value::Null)),
                    other => answer(other),
                };
                requests.push(request);
                match answer {
                    Ok(answer) => bench.server.handle.reply(conn, &id, &answer),
                    Err(error) => bench.server.handle.refuse(conn, &id, error),
                }
            }
        }
    }
    Ran { requests, ..ran.unwrap() }
}

fn attached(reason: Value) -> Value {
    json!({"agent": "ab".repeat(32), "name": "ann", "slot": "cli/ann", "seq": 0,
           "ephemeral": false, "reason": reason})
}

fn whoami() -> Value {
    json!({"id": "ab".repeat(32), "name": "ann", "harness": "cli", "cwd": "/srv",
           "status": "active", "visibility": "visible", "tags": ["x"], "consent": "ask", "rooms": [],
           "principal": null, "machine": null, "version": "0.1.0"})
}

fn room() -> Value {
    json!({"path": "ab/general", "name": "general", "type": "public", "owner": "ab",
           "description": "talk", "members": [{"id": "ab", "name": null, "status": null}]})
}

fn sent(status: &str) -> Value {
    json!({"messageId": "0f", "deliveries": [{"agent": "cd".repeat(32), "status": status}]})
}

fn status(health: Value) -> Value {
    json!({"version": PROGRAM_VERSION, "pid": 7, "uptimeMs": 61_000, "device": "ee".repeat(32),
           "port": {"number": 19876, "held": true},
           "coordinator": {"holder": null, "term": 0, "held": false},
           "peers": [{"device": "cd".repeat(32), "address": "127.0.0.1:4000", "sessions": 1,
                      "machineLocal": true, "since": "2026-11-29T21:51:37.991Z",
                      "version": null}],
           "agents": 1, "queues": {"outgoing": 2, "inbound": 0, "oldestMs": 5_000},
           "health": health})
}

fn events(numbers: &[u64]) -> Value {
    let event = |seq: &u64| json!({"seq": seq, "type": "dm", "message": {"id": "1", "from": "cd", "content": "hi"}});
    json!({"events": numbers.iter().map(event).collect::<Vec<_>>(), "more": false})
}

fn label<T: std::str::FromStr<Err = String>>(text: &str) -> T {
    text.parse().unwrap()
}

/// What a command does, by its arguments: the request behind `attach` and the answer to it.
type Case = (&'static [&'static str], Request, Value);

fn cases() -> Vec<Case> {
    let text = |text: &str| String::from(text).try_into().unwrap();
    let s = String::from;
    let pending = json!({"id": "9", "kind": "room", "room": "ab/general", "capability": null,
                         "share": null, "requester": "cd", "requesterName": "eve", "fromMachine": null, "fromUser": "other", "at": "2026-11-29T21:51:37.991Z"});
    vec![
        (&["whoami", "--as", "ann"], WhoamiParams {}.into(), whoami()),
        (&["agents", "--as", "ann"], AgentsParams {}.into(), json!({"agents": []})),
        (
            &["rooms", "--as", "ann"],
            RoomsParams {}.into(),
            json!({"rooms": [{"path": "ab/general", "name": "general", "type": "secret",
                              "owner": "ab", "description": "", "members": 3, "joined": true}]}),
        ),
        (
            &[
                "room",
                "create",
                "--as",
                "ann",
                "general",
                "--type",
                "private",
                "--description",
                "t",
            ],
            RoomCreateParams {
                name: s("general"),
                r#type: Some(RoomType::Private),
                description: Some(s("t")),
            }
            .into(),
            room(),
        ),
        (
            &["room", "join", "--as", "ann", "general"],
            RoomJoinParams { room: s("general") }.into(),
            room(),
        ),
        (
            &["room", "leave", "general", "--as", "ann"],
            RoomLeaveParams { room: s("general"), reason: None }.into(),
            room(),
        ),
        (
            &["room", "members", "--as", "ann", "general"],
            RoomMembersParams { room: s("general") }.into(),
            room(),
        ),
        (
            &["room", "destroy", "--as", "ann", "general"],
            RoomDestroyParams { room: s("general") }.into(),
            room(),
        ),
        (
            &["room", "invite", "--as", "ann", "general", "bob"],
            RoomInviteParams { room: s("general"), agent: s("bob") }.into(),
            room(),
        ),
        (
            &["room", "kick", "--as", "ann", "general", "bob"],
            RoomKickParams { room: s("general"), agent: s("bob") }.into(),
            room(),
        ),
        (
            &["room", "history", "--as", "ann", "general", "--since", "4", "--limit", "10"],
            RoomHistoryParams { room: s("general"), since: Some(4), limit: Some(label("10")) }
                .into(),
            json!({"messages": [{"seq": 5, "id": "1", "from": "cd", "fromName": "eve",
                "at": "2026-11-29T21:51:37.991Z", "text": "hi", "replyTo": null, "readBy": []}],
                "more": true}),
        ),
        (
            &["send", "--as", "ann", "general", "hello all", "--timing", "followUp"],
            SendParams {
                room: s("general"),
                text: text("hello all"),
                timing: Some(Timing::FollowUp),
                reply_to: None,
            }
            .into(),
            sent("queued"),
        ),
        (
            &["dm", "--as", "ann", "bob", "psst", "--reply-to", "0e", "--wait", "3"],
            DmParams {
                agent: s("bob"),
                text: text("psst"),
                timing: None,
                reply_to: Some(s("0e")),
                wait: Some(label("3")),
            }
            .into(),
            sent("awaiting_consent"),
        ),
        (
            &["pending", "--as", "ann"],
            Request::parse("pending.list", None).unwrap(),
            json!({"requests": [pending]}),
        ),
        (
            &["accept", "--as", "ann", "9"],
            AcceptParams { id: Some(s("9")), room: None, requester: None, terms: None }.into(),
            json!({"request": pending, "accepted": true}),
        ),
        (
            &["reject", "--as", "ann", "ab/general", "cd", "--reason", "no"],
            RejectParams {
                id: None,
                room: Some(s("ab/general")),
                requester: Some(s("cd")),
                reason: Some(s("no")),
            }
            .into(),
            json!({"request": pending, "accepted": false}),
        ),
        (
            &["inbox", "--as", "ann", "--wait", "2", "--max", "5", "--peek"],
            InboxParams { wait: Some(label("2")), max: Some(label("5")), peek: Some(true) }.into(),
            events(&[3, 4]),
        ),
        (
            &["update", "--as", "ann", "--status", "busy", "--visibility", "hidden"],
            UpdateParams {
                status: Some(OwnStatus::Busy),
                visibility: Some(Visibility::Hidden),
                name: None,
                tags: None,
                consent: None,
            }
            .into(),
            whoami(),
        ),
    ]
}

#[tokio::test]
async fn every_command_attaches_asks_and_prints_the_answer() {
    let mut bench = Bench::start(SocketLimits::default());
    for (args, request, answer) in cases() {
        let json_args = [args, &["--json"]].concat();
        let ran = served(&mut bench, &json_args, |_| Ok(answer.clone())).await;
        assert_eq!(ran.code, Some(0), "{args:?} {ran:?}");
        assert_eq!(ran.json(), answer, "{args:?}");
        assert_eq!(ran.stdout.lines().count(), 1, "{args:?}");
        assert_eq!(ran.stderr, "", "{args:?}");
        let [Request::Attach(attach), asked] = ran.requests.as_slice() else {
            panic!("{args:?} {ran:?}");
        };
        assert_eq!(asked, &request, "{args:?}");
        let AttachParams { harness, key, name, cwd, ephemeral, .. } = attach;
        assert_eq!(harness.as_str(), "cli");
        assert_eq!(key.as_ref().unwrap().as_str(), "ann");
        assert_eq!((name.as_deref(), ephemeral), (Some("ann"), &None));
        assert_eq!(Path::new(cwd), bench.path.parent().unwrap().canonicalize().unwrap());

        // For people: something, and neither colour nor anything else that acts on a terminal.
        let ran = served(&mut bench, args, |_| Ok(answer.clone())).await;
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{args:?}");
        assert!(ran.stdout.ends_with('\n'), "{args:?}");
        assert!(!ran.stdout.chars().any(|c| c.is_control() && c != '\n'), "{args:?}");
    }
}

#[tokio::test]
async fn operators_ask_without_attaching() {
    let mut bench = Bench::start(SocketLimits::default());
    let limits = json!([{"name": "line", "value": 5, "unit": "bytes", "text": "a line"}]);
    let mut answer = status(json!([]));
    answer["limits"] = limits;
    let ran = served(&mut bench, &["status", "--limits", "--json"], |_| Ok(answer.clone())).await;
    assert_eq!(ran.requests, [StatusParams { limits: Some(true), settings: None }.into()]);
    assert_eq!(ran.json(), answer);
    let ran = served(&mut bench, &["status"], |_| Ok(answer.clone())).await;
    assert_eq!(ran.requests, [StatusParams { limits: None, settings: None }.into()]);
    for part in ["1 min 1 s", "19876, held by this daemon", "oldest 5 s", "healthy"] {
        assert!(ran.stdout.contains(part), "{part}: {}", ran.stdout);
    }

    let agents = json!({"agents": [{"id": "cd".repeat(32), "name": "eve",
        "names": {"petname": null, "self": "eve", "machine": null}, "harness": "pi", "cwd": null,
        "status": "idle", "visibility": "visible", "tags": [], "rooms": [], "local": false,
        "machine": null}]});
    let ran = served(&mut bench, &["agents", "--json"], |_| Ok(agents.clone())).await;
    assert_eq!(ran.json(), agents);
    let ran = served(&mut bench, &["agents"], |_| Ok(agents.clone())).await;
    assert!(ran.stdout.contains("not proven") && ran.stdout.contains("not shared"));
    let ran = served(&mut bench, &["rooms"], |_| Ok(json!({"rooms": []}))).await;
    assert_eq!((ran.stdout.as_str(), ran.requests.len()), ("no rooms\n", 1));
}

#[tokio::test]
async fn a_message_that_is_lost_fails_and_one_that_waits_does_not() {
    let mut bench = Bench::start(SocketLimits::default());
    for (status, code) in [
        ("delivered", 0),
        ("queued", 0),
        ("awaiting_consent", 0),
        ("refused", 1),
        ("dropped", 1),
        ("expired", 1),
    ] {
        let args = ["send", "--as", "ann", "general", "hi", "--json"];
        let ran = served(&mut bench, &args, |_| Ok(sent(status))).await;
        assert_eq!(ran.code, Some(code), "{status}");
        // The result is a result all the same.
        assert_eq!(ran.json(), sent(status));
    }
}

#[tokio::test]
async fn what_the_daemon_refuses_is_told_with_what_to_do() {
    let mut bench = Bench::start(SocketLimits::default());
    let refuse = |_: &Request| {
        let message = "2 agents are called \"bo\u{1b}[2Jb\": 01, 02\ncommsd: all is well";
        Err(ApiError::new("ambiguous_agent", message, "use an id"))
    };
    let args = ["dm", "--as", "ann", "bob", "hi"];
    let ran = served(&mut bench, &args, refuse).await;
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""));
    assert_eq!(
        ran.stderr,
        "commsd: 2 agents are called \"bo\\u{1b}[2Jb\": 01, 02\\u{a}commsd: all is well\nuse an id\n"
    );
    let ran = served(&mut bench, &[&args[..], &["--json"]].concat(), refuse).await;
    assert_eq!(ran.code, Some(1));
    assert_eq!(ran.error()["code"], "ambiguous_agent");
    assert_eq!(ran.error()["todo"], "use an id");
}

#[tokio::test]
async fn nobody_acts_as_somebody_else() {
    let mut bench = Bench::start(SocketLimits::default());
    let running = finish(start(&bench, &["whoami", "--as", "ann", "--json"]));
    let daemon = async {
        bench.connected().await;
        let (conn, id, _) = bench.request().await;
        let answer = attached(json!("another client has it; you are ann-2"));
        bench.server.handle.reply(conn, &id, &answer);
        // Nothing is asked in the wrong name.
        bench.disconnected().await;
    };
    let (ran, ()) = tokio::join!(running, daemon);
    assert_eq!(ran.code, Some(1));
    assert_eq!(ran.error()["code"], "agent_in_use");
    assert!(ran.error()["message"].as_str().unwrap().contains("you are ann-2"));
}

#[tokio::test]
async fn text_from_strangers_is_inert() {
    let mut bench = Bench::start(SocketLimits::default());
    let evil = "x\u{1b}]0;owned\u{7}\u{9b}31m\u{202e}\ny";
    let mut answer = room();
    answer["description"] = json!(evil);
    answer["members"][0]["name"] = json!(evil);
    let ran =
        served(&mut bench, &["room", "members", "--as", "a", "r"], |_| Ok(answer.clone())).await;
    assert_eq!(ran.stdout.matches("owned").count(), 3);
    assert!(!ran.stdout.contains(['\u{1b}', '\u{7}', '\u{9b}', '\u{202e}']));
    assert!(!ran.stdout.contains("\ny"));
    let args = ["room", "members", "--as", "a", "r", "--json"];
    let ran = served(&mut bench, &args, |_| Ok(answer.clone())).await;
    assert!(!ran.stdout.trim_end().contains(|c: char| c.is_control() || c == '\u{202e}'));
    assert_eq!(ran.json(), answer);
}

// ---------------------------------------------------------------------------------------------
// Events

#[tokio::test]
async fn the_inbox_acknowledges_what_it_has_printed() {
    let mut bench = Bench::start(SocketLimits::default());
    let answer = |request: &Request| match request {
        Request::Inbox(_) => Ok(events(&[3, 7])),
        Request::EventsAck(ack) => Ok(json!({"seq": ack.seq})),
        other => panic!("{other:?}"),
    };
    let ran = served(&mut bench, &["inbox", "--as", "ann"], answer).await;
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "3  DM cd: hi\n7  DM cd: hi\n"));
    assert_eq!(ran.requests[2], EventsAckParams { seq: 7 }.into());

    let ran = served(&mut bench, &["inbox", "--as", "ann", "--peek"], answer).await;
    assert_eq!(ran.requests.len(), 2);
    // When the time is up without events there is nothing to acknowledge, and nothing is wrong.
    let ran =
        served(&mut bench, &["inbox", "--as", "ann", "--wait", "1", "--json"], |_| Ok(events(&[])))
            .await;
    assert_eq!((ran.code, ran.requests.len()), (Some(0), 2));
    assert_eq!(ran.json(), events(&[]));
}

#[tokio::test]
async fn what_could_not_be_printed_is_not_acknowledged_and_a_closed_pipe_is_quiet() {
    let mut bench = Bench::start(SocketLimits::default());
    let mut child = start(&bench, &["inbox", "--as", "ann", "--json"]);
    drop(child.stdout.take());
    let ran = serve(&mut bench, finish(child), |_| Ok(events(&[3]))).await;
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
    assert!(!ran.requests.iter().any(|request| request.method() == EventsAckParams::METHOD));
}

#[tokio::test]
async fn without_a_stdout_nothing_is_fetched_and_nothing_acknowledged() {
    let bench = Bench::start(SocketLimits::default());
    let ran = async |command: &str| {
        let output = Command::new("sh")
            .args(["-c", command, env!("CARGO_BIN_EXE_commsd")])
            .arg(&bench.path)
            .env_clear()
            .env("HOME", bench.path.parent().unwrap())
            .stdin(Stdio::null())
            .output();
        let output = soon(output).await.unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for closed in [">&-", "1</dev/null"] {
        for command in ["inbox", "listen"] {
            // Nobody serves the socket: what asked it would wait.
            let (code, said) =
                ran(&format!(r#""$0" --socket "$1" {command} --as ann {closed}"#)).await;
            assert_eq!(code, Some(1), "{command} {closed}: {said}");
            assert!(said.contains("stdout is closed"), "{command} {closed}: {said}");
        }
    }
    let (code, said) = ran(r#""$0" --socket "$1" inbox --as ann >&- 2>&-"#).await;
    assert_eq!((code, said.as_str()), (Some(1), ""));
}

#[tokio::test]
async fn who_sends_stdout_to_dev_null_has_seen_it() {
    let mut bench = Bench::start(SocketLimits::default());
    let mut command = Command::new("sh");
    command
        .args(["-c", r#"exec "$0" --socket "$1" inbox --as ann > /dev/null"#])
        .arg(env!("CARGO_BIN_EXE_commsd"))
        .arg(&bench.path)
        .env_clear()
        .env("HOME", bench.path.parent().unwrap())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let child = command.spawn().unwrap();
    let ran = serve(&mut bench, finish(child), |request| {
        Ok(if request.method() == InboxParams::METHOD { events(&[3]) } else { json!({"seq": 3}) })
    })
    .await;
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
    assert!(ran.requests.iter().any(|request| request.method() == EventsAckParams::METHOD));
}

/// A `listen` whose subscription is up.
async fn listening(bench: &mut Bench) -> (Child, ConnId) {
    let child = start(bench, &["listen", "--as", "ann"]);
    let conn = bench.connected().await;
    let (_, id, _) = bench.request().await;
    bench.server.handle.reply(conn, &id, &attached(Value::Null));
    let (_, id, request) = bench.request().await;
    assert_eq!(request, EventsSubscribeParams { after: None }.into());
    bench.server.handle.reply(conn, &id, &json!({"after": 0, "head": 0}));
    (child, conn)
}

#[tokio::test]
async fn listening_prints_lines_and_acknowledges_behind_them() {
    let mut bench = Bench::start(SocketLimits::default());
    let (mut child, conn) = listening(&mut bench).await;
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    // More than the client buffers, while the acknowledgement is not answered.
    for seq in 1..=200 {
        let event = json!({"seq": seq, "type": "dm", "message": {"content": "a\nb"}});
        bench.server.handle.notify(conn, "event", &event).unwrap();
    }
    let (_, first, request) = bench.request().await;
    let Request::EventsAck(EventsAckParams { seq: acked }) = request else {
        panic!("{request:?}");
    };
    for seq in 1..=200 {
        let line: Value =
            serde_json::from_str(&soon(lines.next_line()).await.unwrap().unwrap()).unwrap();
        assert_eq!(line["seq"], seq);
        assert_eq!(line["message"]["content"], "a\nb");
    }
    bench.server.handle.reply(conn, &first, &json!({"seq": acked}));
    let mut last = acked;
    while last < 200 {
        let (_, id, request) = bench.request().await;
        let Request::EventsAck(ack) = request else { panic!("{request:?}") };
        assert!(ack.seq > last);
        last = ack.seq;
        bench.server.handle.reply(conn, &id, &json!({"seq": last}));
    }
    assert_eq!(last, 200);

    bench.server.handle.close(conn, CloseReason("replaced"));
    let ran = finish(child).await;
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("(replaced)"), "{}", ran.stderr);
}

#[tokio::test]
async fn an_interrupt_ends_with_130() {
    let mut bench = Bench::start(SocketLimits::default());
    let (child, conn) = listening(&mut bench).await;
    let pid = i32::try_from(child.id().unwrap()).unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(bench.disconnected().await, (conn, CloseReason::CLIENT));
    let output = soon(child.wait_with_output()).await.unwrap();
    assert_eq!((output.status.code(), output.status.signal()), (Some(130), None));
}

#[tokio::test]
async fn logs_come_page_by_page_and_then_as_they_happen() {
    let mut bench = Bench::start(SocketLimits::default());
    let event = |seq: u64| json!({"seq": seq, "event": "x"});
    let ran = served(&mut bench, &["logs"], |request| match request {
        Request::Logs(LogsParams { after: None, follow: None, .. }) => {
            Ok(json!({"events": [event(4), event(5)], "more": true}))
        }
        Request::Logs(LogsParams { after: Some(5), follow: None, .. }) => {
            Ok(json!({"events": [event(6)], "more": false}))
        }
        other => panic!("{other:?}"),
    })
    .await;
    let numbers = |text: &str| -> Vec<u64> {
        let read = |line: &str| serde_json::from_str::<Value>(line).unwrap()["seq"].as_u64();
        text.lines().map(|line| read(line).unwrap()).collect()
    };
    assert_eq!((ran.code, numbers(&ran.stdout)), (Some(0), vec![4, 5, 6]));

    let running = finish(start(&bench, &["logs", "-f"]));
    let daemon = async {
        let conn = bench.connected().await;
        let (_, id, request) = bench.request().await;
        assert_eq!(request, LogsParams { follow: Some(true), after: None, max: None }.into());
        let handle = &bench.server.handle;
        handle.reply(conn, &id, &json!({"events": [event(4)], "more": true}));
        handle.notify(conn, "log", &event(5)).unwrap();
        handle.close(conn, CloseReason::SHUTDOWN);
    };
    let (ran, ()) = tokio::join!(running, daemon);
    assert_eq!((ran.code, numbers(&ran.stdout)), (Some(4), vec![4, 5]));
    assert!(ran.stderr.contains("the daemon has stopped"), "{}", ran.stderr);
}

#[tokio::test]
async fn a_dash_sends_what_stdin_says() {
    let mut bench = Bench::start(SocketLimits::default());
    let place = bench.path.parent().unwrap().to_owned();
    let mut child = commsd(&place, &["send", "--as", "ann", "general", "-", "--json"])
        .env("COMMSD_SOCKET", &bench.path)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    soon(stdin.write_all("first\n\u{1b}second\n".as_bytes())).await.unwrap();
    drop(stdin);
    let ran = serve(&mut bench, finish(child), |_| Ok(sent("delivered"))).await;
    assert_eq!(ran.code, Some(0));
    let Request::Send(send) = &ran.requests[1] else { panic!("{ran:?}") };
    assert_eq!(send.text.as_str(), "first\n\u{1b}second");

    // Endless input is not read to its end.
    let mut child = commsd(&place, &["send", "--as", "ann", "general", "-", "--json"])
        .env("COMMSD_SOCKET", &bench.path)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let feeding = async move { while stdin.write_all(&[b'x'; 65_536]).await.is_ok() {} };
    let (ran, ()) = tokio::join!(finish(child), feeding);
    assert_eq!(ran.code, Some(2));
    assert!(ran.error()["message"].as_str().unwrap().contains("131072"), "{ran:?}");
}

// ---------------------------------------------------------------------------------------------
// Without a daemon

#[tokio::test]
async fn exit_codes_tell_usage_configuration_and_no_daemon_apart() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("bad.toml"), "# mine\nport = 1\nprot = 2\n").unwrap();
    for (args, code) in [
        (&["--version"][..], 0),
        (&["--help"], 0),
        (&["room", "--help"], 0),
        (&["completions", "fish"], 0),
        (&[], 2),
        (&["burn"], 2),
        (&["send", "--as", "ann", "general"], 2),
        (&["send", "general", "hi"], 2),
        (&["inbox", "--as", "ann", "--wait", "soon"], 2),
        (&["update", "--as", "ann"], 2),
        (&["send", "--as", "ann", "general", ""], 2),
        (&["dm", "--as", "ann", "bob", ""], 2),
        (&["action", "--as", "ann", "whoami"], 2),
        (&["vault"], 2),
        (&["status"], 4),
        (&["stop"], 4),
        (&["whoami", "--as", "ann"], 4),
        (&["doctor"], 1),
        (&["run", "--check"], 0),
        (&["run", "--prot", "1"], 64),
        (&["--home", "x", "run", "--port", "0"], 64),
        (&["run", "--listen", "everywhere"], 64),
        (&["run", "--config", "absent.toml"], 64),
        (&["run", "--config", "bad.toml"], 64),
    ] {
        let ran = alone(dir.path(), args).await;
        assert_eq!(ran.code, Some(code), "{args:?} {ran:?}");
        // Results on stdout, talk on stderr.
        let talk = code != 0 && args != ["doctor"];
        assert_eq!(ran.stdout.is_empty(), talk, "{args:?} {ran:?}");
        assert_eq!(!ran.stderr.is_empty(), talk, "{args:?} {ran:?}");
    }
    let ran = alone(dir.path(), &["run", "--config", "bad.toml", "--json"]).await;
    let message = ran.error()["message"].to_string();
    for part in ["bad.toml", "line 3", "prot"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let ran = alone(dir.path(), &["status", "--json"]).await;
    assert_eq!(ran.error()["code"], "no_daemon");
    assert!(ran.error()["todo"].as_str().unwrap().contains("commsd run"));
    let ran = alone(dir.path(), &["send", "--json"]).await;
    assert_eq!(ran.error()["code"], "usage");
    let ran = alone(dir.path(), &["vault"]).await;
    assert!(ran.stderr.contains("`commsd vault --help`"), "{ran:?}");
    // A filter that would mute the daemon is no configuration.
    let mut muted = commsd(dir.path(), &["run", "--check"]);
    let ran = finish(muted.env("COMMSD_LOG_FILTER", "loud").spawn().unwrap()).await;
    assert_eq!(ran.code, Some(64));
    assert!(ran.stderr.contains("COMMSD_LOG_FILTER") && ran.stderr.contains("TARGET=LEVEL"));
}

#[tokio::test]
async fn a_check_prints_what_would_be_used_and_makes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["run", "--check", "--json", "--home", "h", "--port", "4000"];
    let ran = alone(dir.path(), &args).await;
    let config = ran.json();
    let home = dir.path().canonicalize().unwrap().join("h");
    assert_eq!(config["socket"], home.join("run/commsd.sock").to_str().unwrap());
    assert_eq!(config["agentCommsDir"], home.join("agent-comms").to_str().unwrap());
    assert_eq!((&config["port"], &config["firstContactPort"]), (&json!(4000), &json!(19877)));
    assert_eq!(config["broadcast"], false);
    assert_eq!(config["log"], "json");
    let ran = alone(dir.path(), &args[..2]).await;
    assert!(ran.stdout.contains("19876"), "{}", ran.stdout);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_second_daemon_says_who_runs_and_is_done() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().canonicalize().unwrap().join("run/commsd.sock");
    let _running = ours(&socket);
    let ran = alone(dir.path(), &["run", "--home", "."]).await;
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), ""), "{ran:?}");
    for part in [&std::process::id().to_string(), PROGRAM_VERSION, socket.to_str().unwrap()] {
        assert!(ran.stderr.contains(part), "{part}: {}", ran.stderr);
    }
    let ran = alone(dir.path(), &["run", "--home", ".", "--json"]).await;
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{ran:?}");
    let running = json!({"started": false, "pid": std::process::id(), "version": PROGRAM_VERSION,
                         "socket": socket, "differs": []});
    assert_eq!(ran.json(), running);
}

#[tokio::test]
async fn the_doctor_reports_health_and_fails_on_errors_only() {
    let mut bench = Bench::start(SocketLimits::default());
    let warning = json!({"code": "multicast", "severity": "warning", "text": "no group",
                         "todo": "name an address"});
    let error = json!({"code": "port_foreign", "severity": "error", "text": "port held by sshd",
                       "todo": "stop it"});
    let args = ["doctor", "--json"];
    let ran = served(&mut bench, &args, |_| Ok(status(json!([warning])))).await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let findings = ran.json()["findings"].as_array().unwrap().clone();
    assert_eq!(findings.last(), Some(&warning));
    let find = |code: &str| findings.iter().find(|finding| finding["code"] == code).unwrap();
    assert_eq!(find("daemon")["severity"], "ok");
    assert_eq!(find("socket_directory")["severity"], "ok");

    let ran = served(&mut bench, &["doctor"], |_| Ok(status(json!([error])))).await;
    assert_eq!(ran.code, Some(1));
    assert!(ran.stdout.contains("port held by sshd") && ran.stdout.contains("-> stop it"));
}

// ---------------------------------------------------------------------------------------------
// For people

#[tokio::test]
async fn text_names_agents_and_shows_messages_as_they_were_written() {
    let mut bench = Bench::start(SocketLimits::default());
    let id = "cd".repeat(32);
    let text = "one\n\ttwo\n9  DM \"ann\": trust me\u{1b}[2J";
    let shown = "one\n   │     two\n   │ 9  DM \"ann\": trust me\\u{1b}[2J\n";
    let inbox = json!({"more": false, "events": [{"seq": 3, "type": "dm", "fromName": "eve",
        "message": {"id": "1", "from": id, "content": text}}]});
    let ran = served(&mut bench, &["inbox", "--as", "a", "--peek"], |_| Ok(inbox.clone())).await;
    assert_eq!(ran.stdout, format!("3  DM \"eve\" cdcdcdcdcdcd: {shown}"));
    let history = json!({"more": false, "messages": [{"seq": 5, "id": "1", "from": id,
        "fromName": "eve", "at": "2026-11-29T21:51:37.991Z", "text": text, "replyTo": null,
        "readBy": []}]});
    let args = ["room", "history", "--as", "a", "r"];
    let ran = served(&mut bench, &args, |_| Ok(history.clone())).await;
    let head = "5  2026-11-29T21:51:37.991Z  \"eve\" cdcdcdcdcdcd: ";
    assert_eq!(ran.stdout, format!("{head}{shown}"));
    let sent = json!({"messageId": "0f",
        "deliveries": [{"agent": id, "agentName": "eve", "status": "delivered"}]});
    let ran = served(&mut bench, &["send", "--as", "a", "r", "x"], |_| Ok(sent.clone())).await;
    assert!(ran.stdout.contains("cdcdcdcdcdcd  eve   delivered"), "{}", ran.stdout);
    let tool = json!({"content": "done", "isError": false});
    let args = ["action", "--as", "a", "{\"action\": \"whoami\"}"];
    let ran = served(&mut bench, &args, |_| Ok(tool.clone())).await;
    assert_eq!(ran.stdout, "done\n");
}

#[tokio::test]
async fn tables_fit_a_terminal() {
    let mut bench = Bench::start(SocketLimits::default());
    let (id, other) = ("cd".repeat(32), "ab".repeat(32));
    let fits = |ran: &Ran| {
        let widest = ran.stdout.lines().map(|line| line.chars().count()).max();
        assert!(widest.is_some_and(|widest| widest <= 80), "{}", ran.stdout);
    };
    let request = json!({"id": "7d7ae838", "kind": "dm", "room": format!("{other}+{id}"),
        "requester": id, "requesterName": "eve", "fromMachine": null, "fromUser": null, "at": "2026-11-29T21:51:37.991Z"});
    let pending = json!({"requests": [request]});
    let ran = served(&mut bench, &["pending", "--as", "a"], |_| Ok(pending.clone())).await;
    fits(&ran);
    for part in ["7d7ae838", "cdcdcdcdcdcd", "DM with eve"] {
        assert!(ran.stdout.contains(part), "{part}: {}", ran.stdout);
    }
    let answered = json!({"request": request, "accepted": true});
    let ran = served(&mut bench, &["accept", "--as", "a", "7"], |_| Ok(answered.clone())).await;
    fits(&ran);
    assert!(!ran.stdout.contains("until"), "{}", ran.stdout);
    let machine = json!({"id": "8", "kind": "mesh", "requester": id, "requesterName": "far",
        "at": "2026-11-29T21:51:37.991Z"});
    for (accepted, verb) in [(true, "accept"), (false, "reject")] {
        let answered = json!({"request": machine, "accepted": accepted});
        let ran = served(&mut bench, &[verb, "8"], |_| Ok(answered.clone())).await;
        fits(&ran);
        assert_eq!(ran.stdout.contains("this daemon ends"), accepted, "{}", ran.stdout);
    }
    let path = format!("{id}/general");
    let rooms = json!({"rooms": [{"path": path, "name": "general", "type": "secret", "owner": id,
        "description": "x".repeat(200), "members": 3, "joined": true}]});
    let ran = served(&mut bench, &["rooms"], |_| Ok(rooms.clone())).await;
    fits(&ran);
    assert!(!ran.stdout.contains(&path));
    let ran = served(&mut bench, &["rooms", "--long"], |_| Ok(rooms.clone())).await;
    assert!(ran.stdout.contains(&path), "{}", ran.stdout);
    let mut answer = status(json!([]));
    answer["coordinator"] = json!({"holder": id, "term": 3, "held": false});
    let ran = served(&mut bench, &["status"], |_| Ok(answer.clone())).await;
    fits(&ran);
    let mut known = room();
    known["path"] = json!(path);
    known["owner"] = json!(id);
    known["members"] = json!([{"id": id, "name": "eve", "status": "active"}]);
    let ran = served(&mut bench, &["room", "join", "--as", "a", "r"], |_| Ok(known.clone())).await;
    fits(&ran);
    assert!(ran.stdout.contains("\"eve\" cdcdcdcdcdcd"), "{}", ran.stdout);
}

#[tokio::test]
async fn who_waits_when_the_daemon_stops_is_told_so() {
    let mut bench = Bench::start(SocketLimits::default());
    let (child, conn) = listening(&mut bench).await;
    bench.server.handle.close(conn, CloseReason::SHUTDOWN);
    let ran = finish(child).await;
    assert_eq!(ran.code, Some(4));
    for part in ["the daemon has stopped", "`commsd run`"] {
        assert!(ran.stderr.contains(part), "{part}: {}", ran.stderr);
    }
    assert_eq!(bench.disconnected().await.0, conn);
    let child = start(&bench, &["inbox", "--as", "ann", "--wait", "60", "--json"]);
    let conn = bench.connected().await;
    let (_, id, _) = bench.request().await;
    bench.server.handle.reply(conn, &id, &attached(Value::Null));
    bench.request().await;
    bench.server.handle.close(conn, CloseReason::SHUTDOWN);
    let ran = finish(child).await;
    assert_eq!((ran.code, ran.error()["code"].as_str()), (Some(4), Some("daemon_stopped")));
}

#[tokio::test]
async fn a_daemon_in_the_other_default_place_is_found_unless_others_can_enter_it() {
    use std::os::unix::fs::PermissionsExt as _;
    let mut bench = Bench::start(SocketLimits::default());
    let dir = tempfile::tempdir().unwrap();
    // As a daemon that was started without a runtime directory.
    let run = bench.path.parent().unwrap().to_owned();
    std::fs::create_dir_all(dir.path().join(".local/state/commsd")).unwrap();
    std::os::unix::fs::symlink(&run, dir.path().join(".local/state/commsd/run")).unwrap();
    let asking = finish(commsd(dir.path(), &["doctor", "--json"]).spawn().unwrap());
    let ran = serve(&mut bench, asking, |_| Ok(status(json!([])))).await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let findings = ran.json()["findings"].clone();
    let moved = findings.as_array().unwrap().iter().find(|f| f["code"] == "socket_elsewhere");
    assert_eq!(moved.unwrap()["severity"], "warning", "{findings}");
    let asking = finish(commsd(dir.path(), &["status", "--json"]).spawn().unwrap());
    let ran = serve(&mut bench, asking, |_| Ok(status(json!([])))).await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    // Nor does a second one start beside it.
    let ran = alone(dir.path(), &["run"]).await;
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), ""), "{ran:?}");
    assert!(ran.stderr.contains(&format!("process {}", std::process::id())), "{ran:?}");
    std::fs::set_permissions(&run, std::fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(alone(dir.path(), &["status"]).await.code, Some(4));
}

// ---------------------------------------------------------------------------------------------
// With a real daemon

/// Runs against a real daemon, by its home.
async fn asked(daemon: &Daemon, args: &[&str]) -> Ran {
    let home = daemon.home.path();
    finish(commsd(home, args).env("COMMSD_HOME", home).spawn().unwrap()).await
}

#[tokio::test]
async fn leaving_and_destroying_tell_how_the_room_is_afterwards() {
    let daemon = Daemon::start(Ports::free()).await;
    asked(&daemon, &["room", "create", "--as", "ann", "one"]).await;
    let ran = asked(&daemon, &["room", "join", "--as", "bob", "one", "--json"]).await;
    assert_eq!(ran.json()["members"].as_array().unwrap().len(), 2);
    let ran = asked(&daemon, &["room", "leave", "--as", "bob", "one", "--json"]).await;
    let members = ran.json()["members"].clone();
    assert_eq!(members.as_array().unwrap().len(), 1, "{members}");
    assert_eq!(members[0]["name"], "ann");
    asked(&daemon, &["room", "join", "--as", "bob", "one"]).await;
    let ran = asked(&daemon, &["room", "leave", "--as", "bob", "one"]).await;
    assert_eq!(ran.stdout, "left one\n");
    let ran = asked(&daemon, &["room", "leave", "--as", "ann", "one"]).await;
    assert!(ran.stdout.starts_with("left one\n") && ran.stdout.contains("ended"), "{ran:?}");
    assert_eq!(asked(&daemon, &["rooms"]).await.stdout, "no rooms\n");
    // A room that its owner leaves goes on while others are in it.
    asked(&daemon, &["room", "create", "--as", "ann", "two"]).await;
    let ran = asked(&daemon, &["room", "invite", "--as", "ann", "two", "bob"]).await;
    assert!(ran.stdout.starts_with("invited bob\n\nname "), "{ran:?}");
    asked(&daemon, &["room", "join", "--as", "bob", "two"]).await;
    let ran = asked(&daemon, &["room", "kick", "--as", "ann", "two", "bob"]).await;
    assert!(ran.stdout.starts_with("removed bob\n\nname "), "{ran:?}");
    asked(&daemon, &["room", "invite", "--as", "ann", "two", "bob"]).await;
    asked(&daemon, &["room", "join", "--as", "bob", "two"]).await;
    let ran = asked(&daemon, &["room", "leave", "--as", "ann", "two"]).await;
    assert!(ran.stdout.contains("still yours"), "{ran:?}");
    assert!(asked(&daemon, &["rooms"]).await.stdout.contains("two"));
    let ran = asked(&daemon, &["room", "destroy", "--as", "ann", "two"]).await;
    assert_eq!(ran.stdout, "destroyed two\n");
    asked(&daemon, &["room", "create", "--as", "ann", "three"]).await;
    let ran = asked(&daemon, &["room", "destroy", "--as", "ann", "three", "--json"]).await;
    assert_eq!(ran.json()["members"], json!([]));
}

#[tokio::test]
async fn the_limits_listed_are_those_in_force() {
    let home = std::sync::Arc::new(tempfile::tempdir().unwrap());
    let file = home.path().join("config.toml");
    let text = "history-messages = 3\nhistory-mb = 2\nhistory-days = 5\nstore-mb = 64\n";
    std::fs::write(file, text).unwrap();
    let daemon = Daemon::start_with(home, Ports::free(), &[]).await;
    let ran = asked(&daemon, &["status", "--limits", "--json"]).await;
    let limits = ran.json()["limits"].as_array().unwrap().clone();
    for (name, value) in [
        ("mesh.history", 3),
        ("mesh.history_bytes", 2 << 20),
        ("mesh.history_age", 5 * 24 * 3_600_000),
        ("mesh.histories_bytes", 64 << 20),
        ("store.bytes", 64 << 20),
        ("peer.frame", 64 << 20),
        ("peer.frame_quarantined", 64 << 10),
    ] {
        let listed: Vec<_> = limits.iter().filter(|limit| limit["name"] == name).collect();
        assert_eq!(listed.len(), 1, "{name}");
        assert_eq!(listed[0]["value"], value, "{name}");
    }
}

#[tokio::test]
async fn a_second_daemon_says_which_flags_the_running_one_does_not_have() {
    let daemon = Daemon::start(Ports::free()).await;
    let port = daemon.ports.tcp.to_string();
    let other = Ports::free().tcp;
    let asks = ["run", "--port", &other.to_string(), "--ephemeral"];
    let ran = asked(&daemon, &asks).await;
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), ""), "{ran:?}");
    let differing = format!("it runs with {port}, not with --port {other}\n");
    for part in [differing.as_str(), "it runs without --ephemeral\n", "commsd stop"] {
        assert!(ran.stderr.contains(part), "{part}: {}", ran.stderr);
    }
    let ran = asked(&daemon, &[&asks[..], &["--json"]].concat()).await;
    assert_eq!(ran.json()["differs"][0]["flag"], "--port");
    assert_eq!(ran.json()["differs"][0]["running"], daemon.ports.tcp);
    // What is as it was asked for is not worth a word.
    let ran = asked(&daemon, &["run", "--port", &port]).await;
    assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
}

#[tokio::test]
async fn stopping_waits_for_the_end_and_a_new_daemon_can_start() {
    let ports = Ports::free();
    let mut daemon = Daemon::start(ports).await;
    let home = std::sync::Arc::clone(&daemon.home);
    let pid = daemon.child.id().unwrap();
    // Nobody else takes note of its end: a process that is gone but not waited for has ended.
    let ran = asked(&daemon, &["stop", "--json"]).await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(ran.json(), json!({"pid": pid, "version": PROGRAM_VERSION}));
    assert!(daemon.child.try_wait().unwrap().is_some(), "it has ended by now");
    assert_eq!(daemon.log.wait(0, "the end", |l| l["event"] == "stopped").await.1["level"], "info");
    let ran = asked(&daemon, &["stop"]).await;
    assert_eq!(ran.code, Some(4), "{ran:?}");
    let daemon = Daemon::start_with(home, ports, &[]).await;
    let ran = asked(&daemon, &["stop"]).await;
    assert!(ran.stdout.contains("has stopped"), "{ran:?}");
}

const CHILD_SOCKET: &str = "COMMSD_TEST_CHILD_SOCKET";

/// A daemon whose local API is of another version, in a process of its own because it is to be ended.
#[tokio::test]
#[ignore = "started by a_daemon_of_another_version_is_ended_all_the_same"]
async fn child_of_another_version() {
    let path = std::env::var_os(CHILD_SOCKET).expect("not started by its parent");
    let listener = tokio::net::UnixListener::bind(path).unwrap();
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        let answer = json!({"jsonrpc": "2.0", "id": 0, "result": {
            "version": "9.9.9", "api": 7, "limits": commsd::api::types::ApiLimits::CURRENT,
        }});
        // One that only looks who is here has gone by then.
        let _ = stream.write_all(format!("{answer}\n").as_bytes()).await;
    }
}

#[tokio::test]
async fn a_daemon_of_another_version_is_ended_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "cli::child_of_another_version", "--ignored", "--nocapture"])
        .env(CHILD_SOCKET, &path)
        .stdout(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let pid = child.id().unwrap();
    soon(async {
        while tokio::net::UnixStream::connect(&path).await.is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let asked = async |words: &[&str]| {
        finish(commsd(dir.path(), words).env("COMMSD_SOCKET", &path).spawn().unwrap()).await
    };
    // Any other command names both versions and this way out.
    let ran = asked(&["status"]).await;
    assert_eq!(ran.code, Some(1), "{ran:?}");
    for part in ["9.9.9", PROGRAM_VERSION, "`commsd stop`"] {
        assert!(ran.stderr.contains(part), "{part}: {ran:?}");
    }
    let (ran, ended) = tokio::join!(asked(&["stop", "--json"]), child.wait_with_output());
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(ran.json(), json!({"pid": pid, "version": null}));
    // By the signal that it can heed, not by one that it cannot.
    assert_eq!(ended.unwrap().status.signal(), Some(15));
}

/// One command of the README's tour with what it printed.
struct Shown {
    command: String,
    output: String,
}

const TOUR: (&str, &str) = ("<!-- tour -->\n", "<!-- /tour -->");

/// The tour's commands; a blank line within an output stays, the one before a command does not count.
fn tour(readme: &str) -> Vec<Shown> {
    let (_, rest) = readme.split_once(TOUR.0).unwrap();
    let (text, _) = rest.split_once(TOUR.1).unwrap();
    let mut all: Vec<Shown> = Vec::new();
    for line in text.lines() {
        let line = line.strip_prefix("    ").unwrap_or(line);
        match (line.strip_prefix("$ "), all.last_mut()) {
            (Some(command), _) => {
                all.push(Shown { command: command.into(), output: String::new() })
            }
            (None, Some(last)) => last.output += &format!("{line}\n"),
            (None, None) => {}
        }
    }
    for shown in &mut all {
        shown.output.truncate(shown.output.trim_end().len());
    }
    all
}

/// What differs from run to run as `#`: times, and the numbers of processes, log events and
/// connections.
fn without_numbers(line: &str) -> String {
    if line.starts_with("coordinator ") {
        // Whoever looks later sees one.
        return "#".to_owned();
    }
    let varies = ["pid ", "up ", "queues ", "{"];
    let varies = varies.iter().any(|start| line.starts_with(start));
    let time = |word: &str| word.len() == 24 && word.ends_with('Z') && word.contains('T');
    let word = |word: &str| match word {
        word if time(word) => "#".to_owned(),
        word if varies => {
            let mut out = String::new();
            for part in word.split(|c: char| c.is_ascii_digit()) {
                if !out.is_empty() && !out.ends_with('#') && part.is_empty() {
                    out.push('#');
                }
                out += part;
            }
            out
        }
        word => word.to_owned(),
    };
    line.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

/// Tokens of eight or more hex digits, which may be ids, and what is between them.
fn tokens(text: &str) -> Vec<&str> {
    let mut out = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let hex = |c: char| c.is_ascii_hexdigit() && !c.is_ascii_uppercase();
        let run = rest.find(|c| !hex(c)).unwrap_or(rest.len());
        let end = match run {
            0 => rest.find(hex).unwrap_or(rest.len()),
            run => run,
        };
        let (token, behind) = rest.split_at(end);
        out.push(token);
        rest = behind;
    }
    out
}

fn is_id(token: &str) -> bool {
    matches!(token.len(), 8 | 12 | 32 | 64) && token.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Ids of the README and of this run, by their first eight digits.
#[derive(Default)]
struct Ids(std::collections::BTreeMap<String, String>);

impl Ids {
    /// `actual` with its ids as the README knows them, learning those that stand in the same place.
    fn as_recorded(&mut self, recorded: &str, actual: &str) -> String {
        let (old, new) = (tokens(recorded), tokens(actual));
        let mut out = String::new();
        for (at, token) in new.iter().enumerate() {
            if !is_id(token) {
                out += token;
                continue;
            }
            let before = old.get(at).filter(|old| is_id(old) && old.len() == token.len());
            match before {
                Some(before) => {
                    let known =
                        self.0.entry(before[..8].into()).or_insert_with(|| token[..8].into());
                    out += if *known == token[..8] { before } else { token };
                }
                None => out += token,
            }
        }
        out
    }

    /// A command of the README with the ids of this run.
    fn as_here(&self, command: &str) -> String {
        let token = |token: &str| match self.0.get(token.get(..8).unwrap_or_default()) {
            Some(here) if is_id(token) && token.len() == 8 => here.clone(),
            _ => token.to_owned(),
        };
        tokens(command).into_iter().map(token).collect()
    }
}

/// Every command of the README's tour says what the README says it does. `COMMSD_RECORD=1` writes
/// down what it says now.
#[tokio::test]
async fn the_readme_shows_what_the_program_does() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let readme = std::fs::read_to_string(&file).unwrap();
    let daemon = Daemon::start(Ports::free()).await;
    daemon.event("port_held").await;
    let home = daemon.home.path().canonicalize().unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_commsd")).parent().unwrap();
    let path = format!("{}:/usr/bin:/bin", program.display());
    let (mut ids, mut wrong, mut record) = (Ids::default(), Vec::new(), Vec::new());
    for Shown { command, output } in tour(&readme) {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", &ids.as_here(&command)]).env_clear().env("PATH", &path);
        shell.env("HOME", &home).env("COMMSD_HOME", &home).current_dir(&home);
        shell.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let ran = finish(shell.kill_on_drop(true).spawn().unwrap()).await;
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{command}: {ran:?}");
        let actual = ran.stdout.replace(home.to_str().unwrap(), "/home/you");
        let actual =
            actual.replace(&format!("port         {}", daemon.ports.tcp), "port         19876");
        let actual = actual.trim_end();
        let compared: Vec<String> = actual
            .lines()
            .zip(output.lines().chain(std::iter::repeat("")))
            .map(|(now, then)| without_numbers(&ids.as_recorded(then, now)))
            .collect();
        let expected: Vec<String> = output.lines().map(without_numbers).collect();
        if compared != expected {
            wrong.push(format!("$ {command}\n{actual}\n--- the README says\n{output}\n"));
        }
        if !record.is_empty() && !command.starts_with("commsd whoami") {
            record.push(String::new());
        }
        let shown = std::iter::once(format!("$ {}", ids.as_here(&command)))
            .chain(actual.lines().map(str::to_owned));
        record.extend(shown.map(|line| if line.is_empty() { line } else { format!("    {line}") }));
    }
    if std::env::var_os("COMMSD_RECORD").is_some() {
        let (before, rest) = readme.split_once(TOUR.0).unwrap();
        let (_, after) = rest.split_once(TOUR.1).unwrap();
        let text = format!("{before}{}{}\n{}{after}", TOUR.0, record.join("\n"), TOUR.1);
        std::fs::write(&file, text).unwrap();
        return;
    }
    assert!(wrong.is_empty(), "record anew with COMMSD_RECORD=1\n{}", wrong.join("\n"));
}

/// Documents name only documents that a clone has.
#[test]
fn documents_point_to_what_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut missing = Vec::new();
    for document in [
        "README.md",
        "docs/interface.md",
        "docs/events.md",
        "docs/hub.md",
        "docs/mcp.md",
        "docs/performance.md",
        "docs/web.md",
        "tests/daemon/help.txt",
        "tests/daemon/help-acp.txt",
    ] {
        let text = std::fs::read_to_string(root.join(document)).unwrap();
        let names = text.split(|c: char| !(c.is_alphanumeric() || "/._-".contains(c)));
        for name in names.map(|name| name.trim_end_matches('.')).filter(|n| n.ends_with(".md")) {
            let here = root.join(document).with_file_name(name);
            if !here.exists() && !root.join(name).exists() {
                missing.push(format!("{document}: {name}"));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:?}");
}

/// The help texts are what people hold on to; a change shows here.
#[tokio::test]
async fn help_texts_are_as_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let [mut all, mut acp] = [String::new(), String::new()];
    for command in [
        "",
        "run",
        "hub",
        "web",
        "completions",
        "status",
        "whoami",
        "agents",
        "rooms",
        "room",
        "room create",
        "room join",
        "room leave",
        "room members",
        "room history",
        "room destroy",
        "room invite",
        "room kick",
        "send",
        "dm",
        "pending",
        "accept",
        "reject",
        "inbox",
        "listen",
        "update",
        "trust",
        "trust add",
        "trust code create",
        "trust code redeem",
        "logs",
        "doctor",
        "stop",
        "setup",
        "service",
        "service install",
        "acp",
        "acp keygen",
        "acp relay start",
        "acp worker start",
        "acp delegate",
        "acp discover",
        "acp audit-verify",
        "acp audit-compare",
        "acp audit-export",
        "acp checkpoint",
        "acp approve",
        "acp validate",
        "acp mcp-server",
        "acp demo",
        "acp invite create",
        "acp invite show",
        "acp revoke",
        "acp tasks",
        "acp task",
        "acp cancel",
        "acp approvals",
    ] {
        let args: Vec<&str> = command.split_whitespace().chain(["--help"]).collect();
        let ran = alone(dir.path(), &args).await;
        let part = if command.starts_with("acp") { &mut acp } else { &mut all };
        *part += &format!("$ commsd {}\n{}\n", args.join(" "), ran.stdout);
    }
    for (file, text) in [("tests/daemon/help.txt", all), ("tests/daemon/help-acp.txt", acp)] {
        let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        if std::env::var_os("COMMSD_RECORD").is_some() {
            std::fs::write(&recorded, &text).unwrap();
        }
        let expected = std::fs::read_to_string(&recorded).unwrap();
        assert!(text == expected, "{file} differs; record anew with COMMSD_RECORD=1\n{text}");
    }
}
