//! The page for this machine's user: `commsd web` as a process beside a daemon, and whatever may
//! connect to it, by HTTP written by hand.

use std::path::Path;
use std::process::Stdio;

use commsd::api::client::Client;
use commsd::api::types::{
    AgentsParams, PendingKind, PermissionStatus, RoomCreateParams, RoomHistoryParams,
    VaultRequestParams, VaultShareParams, WebAnnounceParams, WebUrlParams,
};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use crate::bench::soon;
use crate::daemon::{Agent, Daemon, Ports};

/// The command, for the daemon of a home.
fn command(home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_commsd"));
    command
        .args(["web", "--home"])
        .arg(home)
        .args(args)
        .env_clear()
        .env("HOME", home)
        .current_dir(home)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// What came back.
#[derive(Debug)]
pub struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (found, value) = line.split_once(':')?;
            found.eq_ignore_ascii_case(name).then_some(value.trim())
        })
    }
}

/// A page that is served; ended with the value.
pub struct Web {
    child: Child,
    port: u16,
    token: String,
}

impl Web {
    pub async fn start(daemon: &Daemon) -> Self {
        let mut child = command(daemon.home.path(), &["--print-url"]).spawn().unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        soon(stdout.read_line(&mut line)).await.unwrap();
        let rest = line.trim_end().strip_prefix("http://127.0.0.1:").expect(&line);
        let (port, token) = rest.split_once("/?token=").expect(&line);
        assert!(token.len() == 64 && token.bytes().all(|b| b.is_ascii_hexdigit()), "{line}");
        Self { port: port.parse().unwrap(), token: token.to_owned(), child }
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    fn host(&self) -> String {
        format!("Host: 127.0.0.1:{}", self.port)
    }

    fn origin(&self) -> String {
        format!("Origin: {}", self.url())
    }

    fn cookie(&self) -> String {
        format!("Cookie: commsd_web_{}={}", self.port, self.token)
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(("127.0.0.1", self.port)).await.unwrap()
    }

    /// Exactly this request.
    async fn raw(&self, line: &str, headers: &[String], body: &str) -> Answer {
        let mut stream = self.connect().await;
        let length = if body.is_empty() { String::new() } else { length(body) };
        let request = format!("{line} HTTP/1.1\r\n{}\r\n{length}\r\n{body}", headers.join("\r\n"));
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        // One that is cut off after its answer has answered.
        let _end = soon(stream.read_to_end(&mut answer)).await;
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").expect(&answer);
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer { status, head: head.to_owned(), body: body.to_owned() }
    }

    /// What the page asks, as it does.
    async fn post(&self, body: &str) -> Answer {
        let json = "Content-Type: application/json".to_owned();
        let headers =
            [self.host(), self.origin(), "Sec-Fetch-Site: same-origin".into(), json, self.cookie()];
        self.raw("POST /api", &headers, body).await
    }

    /// `{result}` or `{error}`.
    async fn ask(&self, role: &str, method: &str, params: Value) -> Value {
        let call = json!({"method": method, "params": params, "as": role});
        let answer = self.post(&call.to_string()).await;
        assert_eq!(answer.header("content-type"), Some("application/json"), "{answer:?}");
        serde_json::from_str(&answer.body).unwrap()
    }

    /// What is answered to something that is done.
    pub async fn done(&self, role: &str, method: &str, params: Value) -> Value {
        let mut answer = self.ask(role, method, params).await;
        assert!(answer.get("error").is_none(), "{method}: {answer}");
        answer["result"].take()
    }

    async fn listen(&self) -> Stream {
        let mut stream = self.connect().await;
        let request =
            format!("GET /events HTTP/1.1\r\n{}\r\n{}\r\n\r\n", self.host(), self.cookie());
        stream.write_all(request.as_bytes()).await.unwrap();
        Stream(BufReader::new(stream))
    }

    async fn end(&mut self, signal: rustix::process::Signal) -> Option<i32> {
        let pid = rustix::process::Pid::from_raw(self.child.id().unwrap() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
        soon(self.child.wait()).await.unwrap().code()
    }
}

fn length(body: &str) -> String {
    format!("Content-Length: {}\r\n", body.len())
}

/// Server-sent events.
struct Stream(BufReader<TcpStream>);

impl Stream {
    /// The data of the next event of this kind that `wanted` picks.
    async fn next(&mut self, kind: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let mut current = String::new();
        let search = async {
            loop {
                let mut line = String::new();
                assert!(self.0.read_line(&mut line).await.unwrap() > 0, "the stream has ended");
                if let Some(kind) = line.strip_prefix("event: ") {
                    current = kind.trim_end().to_owned();
                } else if let Some(data) = line.strip_prefix("data: ") {
                    let data: Value = serde_json::from_str(data).unwrap();
                    if current == kind && wanted(&data) {
                        return data;
                    }
                }
            }
        };
        soon(search).await
    }
}

/// Sends an agent's command as its model would.
async fn action(agent: &Agent, name: &str) -> (String, bool) {
    let call = json!({"action": name});
    let Value::Object(call) = call else { unreachable!() };
    let result = agent.client.call(commsd::api::types::ActionParams(call)).await.unwrap();
    (result.content, result.is_error)
}

/// Every event of a mailbox is told in a sentence, and none by its bare name.
#[test]
fn the_page_has_words_for_every_event() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let events = std::fs::read_to_string(root.join("src/mesh/events.rs")).unwrap();
    let page = std::fs::read_to_string(root.join("src/web/page/page.js")).unwrap();
    let (_, body) = events.split_once("pub enum DeliveryEvent {\n").unwrap();
    let (body, _) = body.split_once("\n}\n").unwrap();
    let variants = body.lines().filter_map(|line| line.strip_prefix("    ")?.strip_suffix(" {"));
    let mut names: Vec<String> = Vec::new();
    for variant in variants.filter(|name| name.starts_with(|c: char| c.is_ascii_uppercase())) {
        let mut name = String::new();
        for c in variant.chars() {
            if c.is_ascii_uppercase() && !name.is_empty() {
                name.push('_');
            }
            name.push(c.to_ascii_lowercase());
        }
        names.push(name);
    }
    assert!(names.len() >= 15 && names.contains(&"room_message".to_owned()), "{names:?}");
    names.retain(|name| !page.contains(&format!("case \"{name}\":")));
    assert!(names.is_empty(), "{names:?}");
}

/// The page, run by Node in a browser's place: a conversation goes on when its numbers begin again and
/// when much has come, and whom a typed name means is the daemon's to say.
#[tokio::test]
async fn the_page_follows_a_conversation_and_leaves_names_to_the_daemon() {
    if std::process::Command::new("node").arg("--version").output().is_err() {
        crate::limits::skipped("there is no node here");
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.mjs");
    std::fs::copy(root.join("src/web/page/page.js"), &page).unwrap();
    let ran = Command::new("node").arg(root.join("tests/sdk/page.mjs")).arg(&page).output();
    let ran = soon(ran).await.unwrap();
    let seen: Value = serde_json::from_slice(&ran.stdout).unwrap_or_else(|_| panic!("{ran:?}"));
    for (when, shown) in [
        ("opened", json!([3, "a1", "a3"])),
        ("grown", json!([5, "a1", "a5"])),
        ("many", json!([200, "a701", "a900"])),
        ("again", json!([2, "b1", "b2"])),
        ("past", json!([7, "c1", "c7"])),
        ("empty", json!("No messages yet.")),
    ] {
        assert_eq!(seen[when], shown, "{when}");
    }
    let (typed, id) = ("b".repeat(12), "b".repeat(64));
    let unknown = seen["unknown"].as_str().unwrap();
    assert!(unknown.starts_with(&format!("With {typed}")), "{unknown}");
    assert_eq!(seen["found"], format!("With bob {typed}"));
    assert_eq!(seen["asked"], json!([["dm.send", typed], ["room.history", id]]));
}

/// D3: no other page, no other name of this machine and nobody without the token gets anything.
#[tokio::test]
async fn only_the_users_own_browser_gets_in() {
    let daemon = Daemon::start(Ports::free()).await;
    let alice = daemon.agent("alice").await;
    let web = Web::start(&daemon).await;
    let (host, origin, cookie) = (web.host(), web.origin(), web.cookie());
    let h = |text: &str| text.to_owned();
    let evil = h("Host: evil.example");
    let wrong_port = h("Host: 127.0.0.1:1");
    for (headers, status) in [
        (vec![host.clone()], 401),
        (vec![host.clone(), format!("{}0", cookie)], 401),
        (vec![host.clone(), cookie.to_uppercase()], 401),
        (vec![host.clone(), h("Authorization: Bearer 00")], 401),
        (vec![evil.clone(), cookie.clone()], 403),
        (vec![wrong_port, cookie.clone()], 403),
        (vec![host.clone(), evil, cookie.clone()], 403),
        (vec![host.clone(), cookie.clone(), h("Origin: https://evil.example")], 403),
        (vec![host.clone(), cookie.clone(), h("Origin: null")], 403),
        (vec![host.clone(), cookie.clone(), h("Sec-Fetch-Site: cross-site")], 403),
        (vec![host.clone(), cookie.clone(), h("Sec-Fetch-Site: same-site")], 403),
        (vec![host.clone(), cookie.clone(), h("Sec-Fetch-Site: none")], 200),
        (vec![host.clone(), format!("Authorization: Bearer {}", web.token)], 200),
        (vec![format!("Host: localhost:{}", web.port), cookie.clone()], 200),
    ] {
        for path in ["GET /", "GET /page.js", "GET /page.css"] {
            let answer = web.raw(path, &headers, "").await;
            assert_eq!(answer.status, status, "{path} {headers:?}: {answer:?}");
        }
        if status != 200 {
            for path in ["GET /events", "GET /nothing", "POST /api"] {
                let answer = web.raw(path, &headers, "").await;
                assert!([401, 403].contains(&answer.status), "{path} {headers:?}: {answer:?}");
                assert!(!answer.body.contains("alice"), "{answer:?}");
            }
        }
    }
    // The token in the address is exchanged for a cookie, once it is the right one.
    let wrong = web.raw("GET /?token=00", std::slice::from_ref(&host), "").await;
    assert_eq!((wrong.status, wrong.header("set-cookie")), (401, None));
    let right = format!("GET /?token={}", web.token);
    let elsewhere = web.raw(&right, &[h("Host: evil.example")], "").await;
    assert_eq!((elsewhere.status, elsewhere.header("set-cookie")), (403, None));
    let right = web.raw(&right, std::slice::from_ref(&host), "").await;
    assert_eq!((right.status, right.header("location")), (303, Some("/")));
    let (name, flags) = right.header("set-cookie").unwrap().split_once("; ").unwrap();
    assert_eq!(flags, "HttpOnly; SameSite=Strict; Path=/");
    let page = web.raw("GET /", &[host.clone(), format!("Cookie: other=1; {name}")], "").await;
    assert!(page.status == 200 && page.body.starts_with("<!DOCTYPE html>"), "{page:?}");
    assert_eq!(page.header("content-type"), Some("text/html; charset=utf-8"));
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'none';"), "{policy}");
    // What a page elsewhere could post: a form's types, and no Origin of ours.
    let call = json!({"method": "dm.send", "params": {"agent": "alice", "text": "x"}}).to_string();
    let json = h("Content-Type: application/json");
    for (headers, status) in [
        (vec![h("Content-Type: text/plain"), origin.clone()], 415),
        (vec![h("Content-Type: application/x-www-form-urlencoded"), origin.clone()], 415),
        (vec![origin.clone()], 415),
        (vec![json.clone()], 403),
        (vec![json.clone(), h("Origin: https://evil.example")], 403),
        (vec![json, origin, h("Sec-Fetch-Site: cross-site")], 403),
    ] {
        let headers = [vec![host.clone(), cookie.clone()], headers].concat();
        assert_eq!(web.raw("POST /api", &headers, &call).await.status, status, "{headers:?}");
    }
    assert!(alice.pending(PendingKind::Dm).await.is_empty());
    // The same from the page arrives.
    assert_eq!(web.post(&call).await.status, 200);
    assert_eq!(alice.pending(PendingKind::Dm).await.len(), 1);
}

/// D2, D13: what is no call is answered as such, and nothing is done that is not on the list: nobody
/// is renamed, and the daemon goes on.
#[tokio::test]
async fn what_the_page_may_not_do_is_not_done() {
    let daemon = Daemon::start(Ports::free()).await;
    let alice = daemon.agent("alice").await;
    let web = Web::start(&daemon).await;
    for body in ["{", "[]", "\u{1}", "{\"method\": \"send\", \"agent\": \"alice\"}"] {
        let answer = web.post(body).await;
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
    }
    for (method, params) in [
        ("daemon.stop", json!({})),
        ("update", json!({"name": "mallory"})),
        ("action", json!({"action": "update", "name": "mallory"})),
        ("petname.set", json!({"device": alice.id, "name": "mallory"})),
        ("detach", json!({})),
        ("attach", json!({"harness": "cli", "key": "alice", "cwd": "/", "pid": 1})),
        ("room.kick", json!({"room": "r", "agent": "alice"})),
        ("vault.share", json!({"path": "/", "name": "all"})),
        ("trust.add", json!({"id": alice.id})),
        ("web.announce", json!({"url": "http://127.0.0.1:1"})),
        ("acp", json!({"op": "create_invite"})),
        ("acp", json!({"op": "delegate_task", "to": "x", "title": "t"})),
    ] {
        for role in ["agent", "operator"] {
            let call = json!({"method": method, "params": params, "as": role});
            let answer = web.post(&call.to_string()).await;
            assert_eq!(answer.status, 403, "{method}: {answer:?}");
        }
    }
    // What the daemon does not take is its answer, and the sender is not the page's to say.
    let forged = json!({"agent": "alice", "text": "x", "from": alice.id});
    let refused = web.ask("agent", "dm.send", forged).await;
    assert_eq!(refused["error"]["code"], "invalid_params", "{refused}");
    let names: Vec<String> = {
        let list = alice.client.call(AgentsParams {}).await.unwrap();
        list.agents.into_iter().map(|agent| agent.name).collect()
    };
    assert!(names.contains(&"alice".to_owned()) && !names.contains(&"mallory".to_owned()));
    let snapshot = web.done("agent", "watch", json!({})).await;
    assert_eq!(snapshot["snapshot"]["status"]["agents"], 2);
}

#[tokio::test]
async fn messages_go_both_ways_and_appear_as_they_come() {
    let daemon = Daemon::start(Ports::free()).await;
    let mut alice = daemon.agent("alice").await;
    let web = Web::start(&daemon).await;
    let mut stream = web.listen().await;
    let me = stream.next("state", |state| state["connected"] == true).await;
    assert_eq!(me["name"], "web");
    let me = me["agent"].as_str().unwrap();

    let create = RoomCreateParams { name: "hall".into(), r#type: None, description: None };
    let room = alice.client.call(create).await.unwrap().path;
    let joined = web.done("agent", "room.join", json!({"room": "hall"})).await;
    assert_eq!(joined["path"], room.as_str());
    let bob = daemon.agent("bob").await;
    let change = stream.next("change", |change| change["type"] == "agent_added").await;
    assert!(change["cursor"].is_string() && change["agent"] == bob.id.as_str(), "{change}");

    let text = "<b>hi</b>\nyou";
    web.done("agent", "send", json!({"room": room, "text": text})).await;
    let got = alice.wait_kind("room_message").await;
    assert_eq!(got.body["message"]["content"], text);
    assert_eq!((&got.body["message"]["from"], &got.body["fromName"]), (&json!(me), &json!("web")));

    let sent = commsd::api::types::SendParams {
        room: room.clone(),
        text: "welcome".to_owned().try_into().unwrap(),
        timing: None,
        reply_to: None,
    };
    alice.client.call(sent).await.unwrap();
    let live = stream.next("event", |event| event["type"] == "room_message").await;
    assert_eq!(live["message"]["content"], "welcome");
    let history = web.done("agent", "room.history", json!({"room": room})).await;
    let texts: Vec<&str> = history["messages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| m["text"].as_str().unwrap())
        .collect();
    assert_eq!(texts, [text, "welcome"]);

    // To one agent, who is asked first.
    let asked = web.done("agent", "dm.send", json!({"agent": "alice", "text": "psst"})).await;
    assert_eq!(asked["deliveries"][0]["status"], "awaiting_consent");
    alice.wait_kind("room_join_request").await;
    let pending = alice.pending(PendingKind::Dm).await;
    alice.accept(&pending[0]).await;
    let got = alice.wait_dm("psst").await;
    assert_eq!(got.body["message"]["from"], me);
    // The page's agent is not in a room that is not joined, whoever asks.
    let history = RoomHistoryParams { room, since: None, limit: None };
    assert_eq!(alice.client.call(history).await.unwrap().messages.len(), 2);
    web.done("agent", "room.leave", json!({"room": "hall"})).await;
    let outside = web.ask("agent", "room.history", json!({"room": "hall"})).await;
    assert_eq!(outside["error"]["code"], "not_member", "{outside}");
}

#[tokio::test]
async fn a_yes_of_the_page_is_the_agents_or_the_users() {
    let ports = Ports::free();
    let (daemon, other) = tokio::join!(Daemon::start(ports), Daemon::start(ports));
    let mut bob = other.agent("bob").await;
    let web = Web::start(&daemon).await;
    let mut stream = web.listen().await;
    let state = stream.next("state", |_| true).await;
    let me = state["agent"].as_str().unwrap();
    tokio::join!(daemon.has_met(&bob.id), other.has_met(me));

    // Somebody wants to write to the page's agent.
    let sent = bob.dm(me, "hello page", None).await;
    assert_eq!(sent.deliveries.len(), 1);
    stream.next("event", |event| event["type"] == "room_join_request").await;
    let asks = web.done("agent", "pending.list", json!({})).await;
    let ask = &asks["requests"][0];
    assert_eq!((&ask["kind"], &ask["requester"]), (&json!("dm"), &json!(bob.id)));
    let id = ask["id"].clone();
    // That is not the operator's to decide.
    let refused = web.ask("operator", "accept", json!({"id": id})).await;
    assert!(refused["error"]["code"].is_string(), "{refused}");
    web.done("agent", "accept", json!({"id": id})).await;
    stream.next("event", |event| event["type"] == "dm").await;
    let inbox = web.done("agent", "inbox", json!({})).await;
    let message = inbox["events"].as_array().unwrap().iter().find(|e| e["type"] == "dm").unwrap();
    assert_eq!(message["message"]["content"], "hello page");
    web.done("agent", "events.ack", json!({"seq": message["seq"]})).await;
    bob.wait("a receipt", |e| e.body["delivery"]["status"] == "read").await;
    assert_eq!(web.done("agent", "inbox", json!({})).await["events"], json!([]));

    // Somebody wants to see what this machine's user shares.
    let (operator, _events) = Client::connect(&daemon.socket(), "test").await.unwrap();
    let vault = daemon.home.path().join("project");
    std::fs::create_dir(&vault).unwrap();
    let init = Command::new(env!("CARGO_BIN_EXE_commsd"))
        .args(["vault", "--workspace"])
        .arg(&vault)
        .args(["init"])
        .env("HOME", daemon.home.path())
        .stdin(Stdio::null())
        .output();
    let init = soon(init).await.unwrap();
    assert!(init.status.success(), "{init:?}");
    let path = vault.to_str().unwrap().to_owned();
    operator.call(VaultShareParams { path, name: "notes".into(), mode: None }).await.unwrap();
    let at = format!("{me}/notes");
    let request = VaultRequestParams { at, mode: None, valid_until: None, wait: None };
    let asked = bob.client.call(request.clone()).await.unwrap();
    assert_eq!(asked.status, PermissionStatus::Pending);
    let asks = web.done("operator", "pending.list", json!({})).await;
    let ask = &asks["requests"][0];
    assert_eq!((&ask["kind"], &ask["share"]), (&json!("capability"), &json!("notes")));
    web.done("operator", "accept", json!({"id": ask["id"]})).await;
    bob.wait("the outcome", |e| e.kind() == "capability_outcome" && e.body["accepted"] == true)
        .await;
    assert_eq!(web.done("operator", "pending.list", json!({})).await["requests"], json!([]));
}

/// D24: the dashboard is found by asking, while it is there, and its address holds no secret.
#[tokio::test]
async fn an_agent_is_told_where_the_page_is_as_long_as_it_is_there() {
    let daemon = Daemon::start(Ports::free()).await;
    let alice = daemon.agent("alice").await;
    let (none, is_error) = action(&alice, "web_url").await;
    assert!(
        is_error && none.contains("`commsd web`") && none.contains("web_not_running"),
        "{none}"
    );
    let mut web = Web::start(&daemon).await;
    assert_eq!(action(&alice, "web_url").await, (web.url(), false));
    assert_eq!(alice.client.call(WebUrlParams {}).await.unwrap().url, web.url());
    // Nobody announces anything else.
    for url in ["http://evil.example", &format!("{}/?token={}", web.url(), web.token)] {
        let announced = alice.client.call(WebAnnounceParams { url: url.into() }).await;
        assert_eq!(announced.unwrap_err().code, "invalid_params", "{url}");
    }
    assert_eq!(web.end(rustix::process::Signal::TERM).await, Some(0));
    let gone = async {
        while !action(&alice, "web_url").await.1 {
            tokio::task::yield_now().await;
        }
    };
    soon(gone).await;
}

#[tokio::test]
async fn the_page_outlives_its_daemon() {
    let ports = Ports::free();
    let daemon = Daemon::start(ports).await;
    let web = Web::start(&daemon).await;
    let mut stream = web.listen().await;
    let before = stream.next("state", |state| state["connected"] == true).await;
    let home = daemon.kill().await;
    let gone = stream.next("state", |state| state["connected"] == false).await;
    assert!(gone["error"]["message"].is_string(), "{gone}");
    let refused = web.ask("agent", "watch", json!({})).await;
    let code = refused["error"]["code"].as_str().unwrap();
    assert!(["daemon_stopped", "no_daemon"].contains(&code), "{refused}");
    let daemon = Daemon::start_with(home, ports, &[]).await;
    let after = stream.next("state", |state| state["connected"] == true).await;
    assert_eq!(after["agent"], before["agent"], "it is the same agent");
    assert_eq!(web.done("agent", "whoami", json!({})).await["id"], before["agent"]);
    let alice = daemon.agent("alice").await;
    assert_eq!(action(&alice, "web_url").await, (web.url(), false));
}

#[tokio::test]
async fn slow_and_endless_clients_hold_up_nobody() {
    let daemon = Daemon::start(Ports::free()).await;
    let web = Web::start(&daemon).await;
    let mut held = Vec::new();
    // Strangers that say nothing, or never end what they say.
    for n in 0..150 {
        let mut stream = web.connect().await;
        if n % 2 == 0 {
            stream.write_all(b"POST /api HTTP/1.1\r\nHost: ").await.unwrap();
        }
        held.push(stream);
    }
    // One that is let in, and sends its body slowly; one that listens and does not read.
    let mut slow = web.connect().await;
    let head = format!(
        "POST /api HTTP/1.1\r\n{}\r\n{}\r\nContent-Type: application/json\r\n{}\r\n\
         Content-Length: 100\r\n\r\n{{",
        web.host(),
        web.origin(),
        web.cookie()
    );
    slow.write_all(head.as_bytes()).await.unwrap();
    let _deaf = web.listen().await;
    assert_eq!(web.done("agent", "whoami", json!({})).await["name"], "web");
    // A body without end is refused at its beginning.
    let mut endless = web.connect().await;
    let head = head.replace("Content-Length: 100", "Content-Length: 1048577");
    endless.write_all(head.as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    soon(endless.read_exact(&mut answer)).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 413");
    let mut stream = web.listen().await;
    stream.next("state", |state| state["connected"] == true).await;
}

#[tokio::test]
async fn the_secret_is_printed_once_for_whom_it_is_meant() {
    let daemon = Daemon::start(Ports::free()).await;
    let home = daemon.home.path();
    // To a pipe only when it is asked for.
    let mut child = command(home, &["--as", "ann", "--json"]).spawn().unwrap();
    let mut line = String::new();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    soon(stdout.read_line(&mut line)).await.unwrap();
    let started: Value = serde_json::from_str(&line).unwrap();
    assert_eq!((&started["started"], &started["secretUrl"]), (&json!(true), &Value::Null));
    let port = started["url"].as_str().unwrap().rsplit(':').next().unwrap().to_owned();
    assert!(!line.contains("token"), "{line}");

    // One port, one page.
    let second = soon(command(home, &["--port", &port]).output()).await.unwrap();
    assert_eq!(second.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&second.stderr).contains("--port"), "{second:?}");

    let mut web = Web::start(&daemon).await;
    let pid = web.child.id().unwrap();
    let arguments = std::fs::read(format!("/proc/{pid}/cmdline"));
    if let Ok(arguments) = arguments {
        assert!(!String::from_utf8_lossy(&arguments).contains(&web.token));
    }
    let answer = web.raw("GET /?token=00", &[web.host()], "").await;
    assert!(!answer.head.contains(&web.token) && !answer.body.contains(&web.token));
    assert_eq!(web.end(rustix::process::Signal::INT).await, Some(0));
    let mut said = String::new();
    soon(web.child.stderr.take().unwrap().read_to_string(&mut said)).await.unwrap();
    assert!(said.contains("browser") && !said.contains(&web.token), "{said}");
    assert!(!daemon.log.text().contains(&web.token));
    let mut web = Web::start(&daemon).await;
    assert_eq!(web.end(rustix::process::Signal::HUP).await, Some(0));
}

#[tokio::test]
async fn without_a_daemon_there_is_no_page() {
    let home = tempfile::tempdir().unwrap();
    let ran = soon(command(home.path(), &["--json"]).output()).await.unwrap();
    assert_eq!((ran.status.code(), ran.stdout.len()), (Some(4), 0), "{ran:?}");
    let said: Value = serde_json::from_slice(&ran.stderr).unwrap();
    assert_eq!(said["error"]["code"], "no_daemon");
}
