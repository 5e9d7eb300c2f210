//! The local socket: what it lets through, what it refuses, whom it lets go; its name; its client.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use commsd::api::client::{Client, Notification};
use commsd::api::endpoint::MAX_SOCKET_PATH;
use commsd::api::types::{
    ApiError, AttachParams, Attached, EventsAckParams, HelloParams, Label, MAX_LINE_BYTES,
    PROGRAM_VERSION, Request, RequestId, WhoamiParams,
};
use commsd::runtime::local_socket::{
    Claim, CloseReason, ConnId, LocalInput, NotifyError, SocketError, SocketLimits, claim,
};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::bench::{Bench, ours, soon};

/// A deadline that a test waits for.
const SHORT: Duration = Duration::from_millis(200);

impl Bench {
    /// A client that has said hello.
    async fn greeted(&mut self) -> (Raw, ConnId) {
        let mut client = Raw::connect(&self.path).await;
        client.send(HELLO).await;
        assert_eq!(client.recv().await["id"], 0);
        let conn = self.connected().await;
        (client, conn)
    }

    /// Proves that a connection works.
    async fn serves(&mut self, client: &mut Raw, conn: ConnId) {
        client.send(r#"{"jsonrpc":"2.0","id":"ping","method":"whoami"}"#).await;
        let (from, id, request) = self.request().await;
        assert_eq!((from, request.method()), (conn, "whoami"));
        self.server.handle.reply(conn, &id, &json!("pong"));
        assert_eq!(client.recv().await, json!({"jsonrpc": "2.0", "id": "ping", "result": "pong"}));
    }
}

const HELLO: &str =
    r#"{"jsonrpc":"2.0","id":0,"method":"hello","params":{"client":"t","version":"1","api":1}}"#;

/// A client that sends what it is told, right or wrong.
struct Raw {
    stream: BufReader<UnixStream>,
}

impl Raw {
    async fn connect(path: &Path) -> Self {
        Self { stream: BufReader::new(soon(UnixStream::connect(path)).await.unwrap()) }
    }

    async fn send(&mut self, line: &str) {
        self.send_bytes(format!("{line}\n").as_bytes()).await;
    }

    async fn send_bytes(&mut self, bytes: &[u8]) {
        soon(self.stream.write_all(bytes)).await.unwrap();
    }

    async fn recv(&mut self) -> Value {
        let mut line = String::new();
        soon(self.stream.read_line(&mut line)).await.unwrap();
        assert!(line.ends_with('\n'), "the connection ended: {line:?}");
        serde_json::from_str(&line).unwrap()
    }

    /// The next line is an error with this code.
    async fn error(&mut self, code: &str) -> Value {
        let line = self.recv().await;
        assert_eq!(line["error"]["data"]["code"], code, "{line}");
        line
    }

    /// The daemon says why it closes, and closes.
    async fn closed(&mut self, reason: &str) {
        let line = self.recv().await;
        assert_eq!(line["method"], "closing", "{line}");
        assert_eq!(line["params"]["reason"], reason, "{line}");
        self.ended().await;
    }

    async fn ended(&mut self) {
        let mut rest = Vec::new();
        // A reset is an end too: it tells that the daemon left unread what was sent.
        let _ = soon(self.stream.read_to_end(&mut rest)).await;
        assert_eq!(String::from_utf8_lossy(&rest), "");
    }
}

#[tokio::test]
async fn hello_comes_first_and_tells_versions_and_limits() {
    let mut bench = Bench::start(SocketLimits::default());
    let mut client = Raw::connect(&bench.path).await;
    client.send(HELLO).await;
    let answer = client.recv().await;
    assert_eq!(answer["result"]["version"], PROGRAM_VERSION);
    assert_eq!(answer["result"]["api"], 1);
    assert_eq!(answer["result"]["limits"]["lineBytes"], 1_048_576);
    let LocalInput::Connected { uid, pid, hello, .. } = bench.input().await else {
        panic!("not connected");
    };
    assert_eq!(uid, std::fs::metadata(&bench.path).unwrap().uid());
    assert_eq!(pid, Some(std::process::id()));
    let label = |text: &str| Label::try_from(text.to_owned()).unwrap();
    assert_eq!(hello, HelloParams { client: label("t"), version: label("1"), api: 1 });

    // Twice is once too often, but no reason to part.
    client.send(&HELLO.replace(":0", ":7")).await;
    assert_eq!(client.error("invalid_request").await["id"], 7);
}

#[tokio::test]
async fn anything_before_hello_is_refused_and_never_seen_by_the_daemon() {
    let mut bench = Bench::start(SocketLimits::default());
    for first in [
        r#"{"jsonrpc":"2.0","id":1,"method":"whoami"}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"hello","params":{"client":"t","version":"1"}}"#,
        "GET / HTTP/1.1",
    ] {
        let mut client = Raw::connect(&bench.path).await;
        client.send(first).await;
        assert!(client.recv().await["error"]["message"].is_string());
        client.closed("hello").await;
    }
    let (mut client, conn) = bench.greeted().await;
    bench.serves(&mut client, conn).await;
}

#[tokio::test]
async fn versions_that_do_not_fit_are_both_named() {
    let bench = Bench::start(SocketLimits::default());
    for (api, todo) in [(2, "restart the daemon"), (0, "upgrade the client")] {
        let mut client = Raw::connect(&bench.path).await;
        client
            .send(
                &format!(
                    r#"{{"jsonrpc":"2.0","id":1,"method":"hello",
                   "params":{{"client":"old-shim","version":"0.0.7","api":{api}}}}}"#
                )
                .replace('\n', " "),
            )
            .await;
        let line = client.error("api_version").await;
        let message = line["error"]["message"].as_str().unwrap();
        for part in [PROGRAM_VERSION, "API 1", "old-shim", "0.0.7", &format!("API {api}")] {
            assert!(message.contains(part), "{part}: {message}");
        }
        assert!(line["error"]["data"]["todo"].as_str().unwrap().contains(todo));
        client.closed("hello").await;
    }
}

#[tokio::test]
async fn a_line_over_a_mebibyte_ends_the_connection_and_one_of_exactly_that_does_not() {
    let mut bench = Bench::start(SocketLimits::default());
    let (mut client, conn) = bench.greeted().await;
    let mut line = br#"{"jsonrpc":"2.0","id":1,"method":"whoami"}"#.to_vec();
    line.resize(MAX_LINE_BYTES, b' ');
    line.push(b'\n');
    client.send_bytes(&line).await;
    let (_, id, _) = bench.request().await;
    bench.server.handle.reply(conn, &id, &json!(1));
    assert_eq!(client.recv().await["result"], 1);

    line.insert(0, b' ');
    client.send_bytes(&line).await;
    client.error("line_too_long").await;
    client.closed("line_too_long").await;
    assert_eq!(bench.disconnected().await, (conn, CloseReason::LINE_TOO_LONG));
}

#[tokio::test]
async fn a_client_that_goes_on_sending_hears_why_it_was_closed() {
    let mut bench = Bench::start(SocketLimits::default());
    for extra in [200_000, MAX_LINE_BYTES, 3 * MAX_LINE_BYTES + 1] {
        for _ in 0..10 {
            let (mut client, conn) = bench.greeted().await;
            client.send_bytes(&vec![b'a'; MAX_LINE_BYTES + extra]).await;
            client.error("line_too_long").await;
            client.closed("line_too_long").await;
            assert_eq!(bench.disconnected().await, (conn, CloseReason::LINE_TOO_LONG));
        }
    }
    // Before hello as well.
    let mut client = Raw::connect(&bench.path).await;
    client.send_bytes(&vec![b'a'; 2 * MAX_LINE_BYTES]).await;
    client.error("line_too_long").await;
}

#[tokio::test]
async fn a_line_without_end_is_cut_off_in_time_and_a_quiet_client_is_not() {
    let limits = SocketLimits { line_timeout: SHORT, ..SocketLimits::default() };
    let mut bench = Bench::start(limits);
    let (mut quiet, quiet_conn) = bench.greeted().await;
    let (mut slow, slow_conn) = bench.greeted().await;
    // Complete lines before the half one do not help it.
    slow.send_bytes(b"\n\n{\"jsonrpc\":").await;
    slow.error("line_timeout").await;
    slow.closed("line_timeout").await;
    assert_eq!(bench.disconnected().await, (slow_conn, CloseReason::LINE_TIMEOUT));
    // By now the other one has been quiet for longer than a line may take.
    bench.serves(&mut quiet, quiet_conn).await;
}

#[tokio::test]
async fn who_says_nothing_or_only_half_a_hello_is_let_go() {
    let limits = SocketLimits { hello_timeout: SHORT, ..SocketLimits::default() };
    let bench = Bench::start(limits);
    for first in [&b""[..], &HELLO.as_bytes()[..20], b"\n"] {
        let mut client = Raw::connect(&bench.path).await;
        client.send_bytes(first).await;
        client.error("hello_required").await;
        client.closed("hello").await;
    }
}

#[tokio::test]
async fn garbage_is_answered_and_the_connection_goes_on() {
    let mut bench = Bench::start(SocketLimits::default());
    let (mut client, conn) = bench.greeted().await;
    client.send_bytes(b"\r\n{nonsense\n\xff\xfe\n[]\n").await;
    client.error("parse_error").await;
    client.error("parse_error").await;
    client.error("invalid_request").await;
    client.send(r#"[{"jsonrpc":"2.0","id":1,"method":"whoami"}]"#).await;
    let batch = client.error("invalid_request").await;
    assert!(batch["error"]["message"].as_str().unwrap().contains("batch"), "{batch}");
    client.send(r#"{"jsonrpc":"2.0","id":4,"method":"room.join","params":{"rom":"x"}}"#).await;
    let line = client.error("invalid_params").await;
    assert_eq!((&line["id"], &line["error"]["code"]), (&json!(4), &json!(-32602)));
    client.send(r#"{"jsonrpc":"2.0","id":5,"method":"room.burn"}"#).await;
    assert_eq!(client.error("method_not_found").await["error"]["code"], -32601);
    bench.serves(&mut client, conn).await;
}

#[tokio::test]
async fn requests_of_one_connection_are_answered_in_any_order() {
    let mut bench = Bench::start(SocketLimits::default());
    let (mut client, conn) = bench.greeted().await;
    // In one piece, cut in the middle of the second.
    client
        .send_bytes(
            b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"inbox\"}\n{\"jsonrpc\":\"2.0\",\"id\"",
        )
        .await;
    let (_, first, _) = bench.request().await;
    client.send_bytes(b":\"two\",\"method\":\"agents\"}\n").await;
    let (_, second, request) = bench.request().await;
    assert_eq!(request.method(), "agents.list");
    let handle = bench.server.handle.clone();
    handle.reply(conn, &second, &json!(2));
    handle.refuse(conn, &first, ApiError::new("nothing", "no mail", "wait"));
    // Answered once is answered.
    handle.reply(conn, &first, &json!("again"));
    assert_eq!(client.recv().await["id"], "two");
    assert_eq!(client.error("nothing").await["id"], 1);
    bench.serves(&mut client, conn).await;
}

#[tokio::test]
async fn too_many_unanswered_requests_and_an_id_in_use_are_refused() {
    let limits = SocketLimits { requests_in_flight: 2, ..SocketLimits::default() };
    let mut bench = Bench::start(limits);
    let (mut client, conn) = bench.greeted().await;
    for id in [1, 1, 2, 3] {
        client.send(&format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"whoami"}}"#)).await;
    }
    assert_eq!(client.error("invalid_request").await["id"], Value::Null);
    assert_eq!(client.error("too_many_requests").await["id"], 3);
    let (_, one, _) = bench.request().await;
    let (_, two, _) = bench.request().await;
    assert_eq!((&one, &two), (&RequestId::Number(1), &RequestId::Number(2)));
    bench.server.handle.reply(conn, &one, &json!(1));
    assert_eq!(client.recv().await["id"], 1);
    bench.serves(&mut client, conn).await;
}

#[tokio::test]
async fn three_hundred_clients_at_a_limit_of_twenty_are_refused_politely() {
    let limits = SocketLimits { connections: 20, ..SocketLimits::default() };
    let mut bench = Bench::start(limits);
    let mut served = Vec::new();
    for _ in 0..20 {
        served.push(bench.greeted().await);
    }
    for _ in 0..280 {
        let mut client = Raw::connect(&bench.path).await;
        let line = client.error("too_many_connections").await;
        assert!(line["error"]["message"].as_str().unwrap().contains("20 connections"), "{line}");
        client.ended().await;
    }
    // The library's client hears it too, although its hello was never read.
    let error = Client::connect(&bench.path, "test").await.unwrap_err();
    assert_eq!(error.code, ApiError::TOO_MANY_CONNECTIONS);
    let stats = bench.server.handle.stats();
    assert_eq!((stats.connections, stats.refused), (20, 281));

    for (client, conn) in &mut served {
        bench.serves(client, *conn).await;
    }
    // One goes, one may come.
    let (gone, gone_conn) = served.pop().unwrap();
    drop(gone);
    assert_eq!(bench.disconnected().await, (gone_conn, CloseReason::CLIENT));
    let (mut late, late_conn) = bench.greeted().await;
    bench.serves(&mut late, late_conn).await;
}

#[tokio::test]
async fn who_does_not_read_is_cut_off_and_others_are_not() {
    let limits = SocketLimits { outbound_bytes: 100_000, ..SocketLimits::default() };
    let mut bench = Bench::start(limits);
    let (mut good, good_conn) = bench.greeted().await;
    let (mut lazy, lazy_conn) = bench.greeted().await;
    let handle = bench.server.handle.clone();
    let event = json!({"seq": 1, "type": "dm", "pad": "x".repeat(1_000)});
    let mut sent = 0;
    while handle.notify(lazy_conn, "event", &event).is_ok() {
        sent += 1;
        assert!(sent < 10_000, "ten megabytes were queued for a client that does not read");
        tokio::task::yield_now().await;
    }
    assert_eq!(bench.disconnected().await, (lazy_conn, CloseReason::SLOW_CONSUMER));
    assert_eq!(handle.notify(lazy_conn, "event", &event), Err(NotifyError::Closed));
    assert_eq!(handle.stats().slow_consumers, 1);
    // It finds whole events only, whatever it reads later.
    let mut rest = String::new();
    soon(lazy.stream.read_to_string(&mut rest)).await.unwrap();
    let complete = rest.rfind('\n').map_or("", |end| &rest[..end]);
    assert!(complete.lines().count() > 50);
    assert!(complete.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()));
    bench.serves(&mut good, good_conn).await;
}

#[tokio::test]
async fn a_write_that_makes_no_headway_is_given_up() {
    let limits =
        SocketLimits { write_timeout: SHORT, drain_timeout: SHORT, ..SocketLimits::default() };
    let mut bench = Bench::start(limits);
    let (_stopped, conn) = bench.greeted().await;
    // Far below the outbound limit, but more than a socket buffer takes.
    let event = json!({"seq": 1, "type": "dm", "pad": "x".repeat(900_000)});
    for _ in 0..3 {
        bench.server.handle.notify(conn, "event", &event).unwrap();
    }
    assert_eq!(bench.disconnected().await, (conn, CloseReason::SLOW_CONSUMER));
}

#[tokio::test]
async fn what_does_not_fit_a_line_is_an_error_and_not_a_longer_line() {
    let mut bench = Bench::start(SocketLimits::default());
    let (mut client, conn) = bench.greeted().await;
    let big = json!("x".repeat(MAX_LINE_BYTES));
    let handle = bench.server.handle.clone();
    assert_eq!(handle.notify(conn, "event", &big), Err(NotifyError::TooLarge));
    client.send(r#"{"jsonrpc":"2.0","id":1,"method":"agents.list"}"#).await;
    let (_, id, _) = bench.request().await;
    handle.reply(conn, &id, &big);
    client.error("result_too_large").await;
    bench.serves(&mut client, conn).await;
}

#[tokio::test]
async fn the_daemon_can_close_and_what_is_queued_arrives_first() {
    let mut bench = Bench::start(SocketLimits::default());
    let (mut client, conn) = bench.greeted().await;
    let handle = bench.server.handle.clone();
    handle.notify(conn, "event", &json!({"seq": 1})).unwrap();
    handle.close(conn, CloseReason("replaced"));
    assert_eq!(handle.notify(conn, "event", &json!({"seq": 2})), Err(NotifyError::Closed));
    assert_eq!(client.recv().await["params"]["seq"], 1);
    client.closed("replaced").await;
    assert_eq!(bench.disconnected().await, (conn, CloseReason("replaced")));
}

#[tokio::test]
async fn stopping_tells_clients_removes_the_name_and_frees_the_lock() {
    let mut bench = Bench::start(SocketLimits::default());
    let (mut client, conn) = bench.greeted().await;
    let mut early = Raw::connect(&bench.path).await;
    early.send_bytes(b"{").await;
    let handle = bench.server.handle.clone();
    soon(async {
        while handle.stats().connections < 2 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    bench.stop.cancel();
    client.closed("shutdown").await;
    early.closed("shutdown").await;
    assert_eq!(bench.disconnected().await, (conn, CloseReason::SHUTDOWN));
    soon(&mut bench.server.task).await.unwrap();
    assert!(!bench.path.exists());
    drop(ours(&bench.path).bind().unwrap());
}

#[tokio::test]
async fn a_daemon_that_no_longer_listens_to_its_clients_still_stops() {
    let limits = SocketLimits { drain_timeout: SHORT, ..SocketLimits::default() };
    let mut bench = Bench::start(limits);
    let (mut client, _) = bench.greeted().await;
    for id in 0..30 {
        client.send(&format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"whoami"}}"#)).await;
    }
    bench.stop.cancel();
    soon(&mut bench.server.task).await.unwrap();
    assert!(!bench.path.exists());
}

// ---------------------------------------------------------------------------------------------
// The name

#[tokio::test]
async fn socket_lock_and_directory_have_their_final_modes() {
    let bench = Bench::start(SocketLimits::default());
    let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o7777;
    assert_eq!(mode(&bench.path), 0o600);
    assert_eq!(mode(&bench.path.with_extension("sock.lock")), 0o600);
    assert_eq!(mode(bench.path.parent().unwrap()), 0o700);
}

#[tokio::test]
async fn a_second_daemon_learns_who_runs_also_when_that_one_is_busy() {
    let mut bench = Bench::start(SocketLimits::default());
    // Busy: its inputs are full and nobody takes them.
    let (mut client, _) = bench.greeted().await;
    for id in 0..30 {
        client.send(&format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"whoami"}}"#)).await;
    }
    let Claim::Theirs(holder) = claim(&bench.path).unwrap() else {
        panic!("two daemons own one socket");
    };
    assert_eq!(holder.pid, Some(std::process::id()));
    assert_eq!(holder.version.as_deref(), Some(PROGRAM_VERSION));
    assert_eq!(holder.socket, bench.path);
    let shown = holder.to_string();
    for part in [PROGRAM_VERSION, &std::process::id().to_string(), bench.path.to_str().unwrap()] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert!(bench.path.exists());
}

#[test]
fn an_owner_whose_words_cannot_be_read_is_an_owner() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run/s");
    let _claim = ours(&path);
    std::fs::write(dir.path().join("run/s.lock"), "\u{1}??").unwrap();
    let Claim::Theirs(holder) = claim(&path).unwrap() else { panic!("taken over") };
    assert_eq!((holder.pid, holder.version), (None, None));
}

#[tokio::test]
async fn a_socket_left_behind_is_replaced_and_another_kind_of_file_is_not() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let path = dir.path().join("s");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let listener = ours(&path).bind().unwrap();
    let _client = Raw::connect(&path).await;
    drop(listener);

    std::fs::write(&path, "notes").unwrap();
    let error = ours(&path).bind().unwrap_err();
    assert_eq!(error.code(), "socket_name_taken");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "notes");
}

#[tokio::test]
async fn a_socket_that_somebody_replaced_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run/s");
    let listener = ours(&path).bind().unwrap();
    std::fs::remove_file(&path).unwrap();
    let _other = std::os::unix::net::UnixListener::bind(&path).unwrap();
    drop(listener);
    assert!(path.exists());
}

#[test]
fn a_directory_open_to_others_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o750)).unwrap();
    let error = claim(&dir.path().join("s")).unwrap_err();
    assert_eq!(error.code(), "socket_directory");
    assert!(error.to_string().contains("mode 0750"), "{error}");
    assert!(error.todo().contains("chmod 700"), "{}", error.todo());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_path_that_is_too_long_is_refused_before_anything_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let room = MAX_SOCKET_PATH - dir.path().as_os_str().len() - "/run/".len();
    let longest = dir.path().join("run").join("s".repeat(room));
    let too_long = dir.path().join("run").join("s".repeat(room + 1));
    let error = claim(&too_long).unwrap_err();
    assert!(matches!(error, SocketError::PathTooLong { len, .. } if len == MAX_SOCKET_PATH + 1));
    assert!(error.to_string().contains(&format!("at most {MAX_SOCKET_PATH}")), "{error}");
    assert!(!dir.path().join("run").exists());

    let _listener = ours(&longest).bind().unwrap();
    let _client = Raw::connect(&longest).await;
}

// ---------------------------------------------------------------------------------------------
// The library's client

#[tokio::test]
async fn the_client_gets_typed_answers_and_notifications() {
    let mut bench = Bench::start(SocketLimits::default());
    let handle = bench.server.handle.clone();
    let (client, mut notifications) = soon(Client::connect(&bench.path, "test")).await.unwrap();
    assert_eq!(client.hello().version, PROGRAM_VERSION);
    let conn = bench.connected().await;

    let attach = AttachParams {
        harness: Label::try_from("cli".to_owned()).unwrap(),
        cwd: "/srv".into(),
        pid: 4,
        key: Some(Label::try_from("ann".to_owned()).unwrap()),
        name: None,
        ephemeral: None,
        project_room: None,
        harness_pid: None,
    };
    let daemon = async {
        let (_, id, request) = bench.request().await;
        assert_eq!(request, Request::Attach(attach.clone()));
        let answer = json!({"agent": "ab", "name": "ann", "slot": "cli/ann", "seq": 4,
            "ephemeral": false, "reason": null, "newerMember": 1});
        handle.notify(conn, "event", &json!({"seq": 5, "type": "dm"})).unwrap();
        handle.notify(conn, "future", &json!({})).unwrap();
        handle.reply(conn, &id, &answer);
    };
    let (attached, ()) = tokio::join!(client.call(attach.clone()), daemon);
    let Attached { name, seq, .. } = attached.unwrap();
    assert_eq!((name.as_str(), seq), ("ann", 4));
    let Some(Notification::Event(event)) = soon(notifications.recv()).await else {
        panic!("no event");
    };
    assert_eq!((event.seq, event.kind()), (5, "dm"));

    // An answer that does not fit names the member; one that never comes ends with the connection.
    let daemon = async {
        let (_, id, _) = bench.request().await;
        handle.reply(conn, &id, &json!({"seq": "five"}));
    };
    let (acked, ()) = tokio::join!(client.call(EventsAckParams { seq: 5 }), daemon);
    let error = acked.unwrap_err();
    assert_eq!(error.code, "unexpected_answer");
    assert!(error.message.contains("seq"), "{}", error.message);
    let daemon = async {
        bench.request().await;
        handle.close(conn, CloseReason("replaced"));
    };
    let (answer, ()) = tokio::join!(client.call(WhoamiParams {}), daemon);
    let error = answer.unwrap_err();
    assert_eq!(error.code, ApiError::DISCONNECTED);
    assert!(error.message.contains("replaced"), "{}", error.message);
    assert_eq!(soon(notifications.recv()).await, Some(Notification::Closing("replaced".into())));
    assert_eq!(soon(notifications.recv()).await, None);
    let error = soon(client.call(WhoamiParams {})).await.unwrap_err();
    assert_eq!(error.code, ApiError::DISCONNECTED);
}

#[tokio::test]
async fn dropping_the_client_ends_the_connection() {
    let mut bench = Bench::start(SocketLimits::default());
    let (client, notifications) = soon(Client::connect(&bench.path, "test")).await.unwrap();
    let conn = bench.connected().await;
    drop(notifications);
    drop(client);
    assert_eq!(bench.disconnected().await, (conn, CloseReason::CLIENT));
}

// ---------------------------------------------------------------------------------------------
// Out of descriptors

/// Where the child process of the next test listens.
const CHILD_SOCKET: &str = "COMMSD_TEST_CHILD_SOCKET";

/// The server of [`running_out_of_descriptors_pauses_accepting_and_nothing_else`], in a process of
/// its own because the limit is the process's.
#[tokio::test]
#[ignore = "started by running_out_of_descriptors_pauses_accepting_and_nothing_else"]
async fn child_with_few_descriptors() {
    let path = PathBuf::from(std::env::var_os(CHILD_SOCKET).expect("not started by its parent"));
    let limit = rustix::process::Rlimit { current: Some(64), maximum: Some(64) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    let (sender, mut inputs) = mpsc::channel(16);
    let stop = CancellationToken::new();
    let server = ours(&path).bind().unwrap().serve(SocketLimits::default(), sender, stop);
    let mut first = None;
    while let Some(input) = inputs.recv().await {
        match input {
            LocalInput::Connected { conn, .. } => {
                first.get_or_insert(conn);
            }
            LocalInput::Request { conn, id, .. } => {
                let paused = server.handle.stats().accept_paused;
                server.handle.reply(conn, &id, &json!({"paused": paused}));
            }
            LocalInput::Disconnected { conn, .. } if Some(conn) == first => break,
            LocalInput::Disconnected { .. } => {}
        }
    }
}

#[tokio::test]
async fn running_out_of_descriptors_pauses_accepting_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run/s");
    let mut child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "local_socket::child_with_few_descriptors", "--ignored", "--nocapture"])
        .env(CHILD_SOCKET, &path)
        .stdout(std::process::Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let first = soon(async {
        loop {
            match UnixStream::connect(&path).await {
                Ok(stream) => break stream,
                Err(_) => tokio::task::yield_now().await,
            }
        }
    });
    let mut first = Raw { stream: BufReader::new(first.await) };
    first.send(HELLO).await;
    assert_eq!(first.recv().await["id"], 0);
    // More than it can have: the system takes them into the backlog.
    let mut others = Vec::new();
    for _ in 0..90 {
        let mut other = Raw::connect(&path).await;
        other.send(HELLO).await;
        others.push(other);
    }
    let ask = r#"{"jsonrpc":"2.0","id":1,"method":"status.get"}"#;
    loop {
        first.send(ask).await;
        if first.recv().await["result"]["paused"] == true {
            break;
        }
    }
    // The last one is served as soon as others have gone.
    let mut last = others.pop().unwrap();
    drop(others);
    assert_eq!(last.recv().await["id"], 0);
    first.send(ask).await;
    assert_eq!(first.recv().await["result"]["paused"], false);
    drop(first);
    assert!(soon(child.wait()).await.unwrap().success());
}
