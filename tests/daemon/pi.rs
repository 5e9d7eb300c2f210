//! The extension for pi, run by Node in pi's place (or by pi's own loader) beside a real daemon: what
//! its model can call and what it is handed, each message once.

use std::collections::VecDeque;
#[cfg(target_os = "linux")]
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::bench::soon;
use crate::daemon::{Daemon, Ports};
use crate::mcp::Harness;

const DRIVER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sdk/pi.mjs");

/// pi, as far as an extension sees it.
struct Pi {
    child: Child,
    stdin: ChildStdin,
    stdout: Lines<BufReader<ChildStdout>>,
    calls: u64,
    /// What was said before what was waited for.
    passed: VecDeque<Value>,
}

/// A session in the project of [`Harness`]es; `None` where there is no Node.
struct Started {
    daemon: Daemon,
    pi: Pi,
    bob: Harness,
}

fn project(daemon: &Daemon) -> PathBuf {
    daemon.home.path().join("work")
}

/// `commsd setup pi`, but that no daemon is started which would outlive the test's own.
async fn set_up(daemon: &Daemon) -> PathBuf {
    let home = daemon.home.path();
    let agent = home.join(".pi/agent");
    let ran = Command::new(env!("CARGO_BIN_EXE_commsd"))
        .args(["setup", "pi", "--home"])
        .arg(home)
        .env_clear()
        .env("HOME", home)
        .output();
    let ran = soon(ran).await.unwrap();
    assert!(ran.status.success(), "{ran:?}");
    let extension = agent.join("extensions/commsd.ts");
    let text = std::fs::read_to_string(&extension).unwrap();
    let patched = text.replacen(r#""--harness","pi""#, r#""--harness","pi","--no-start""#, 1);
    assert_ne!(patched, text);
    std::fs::write(&extension, patched).unwrap();
    agent
}

impl Pi {
    fn node(args: &[&Path]) -> Self {
        let mut child = Command::new("node")
            .arg(DRIVER)
            .args(args)
            .env("COMMSD_NO_BROADCAST", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, stdin, stdout, calls: 0, passed: VecDeque::new() }
    }

    /// Node with the extension as a module of its own kind.
    fn stub(daemon: &Daemon, agent: &Path, change: impl Fn(String) -> String) -> Self {
        let text = std::fs::read_to_string(agent.join("extensions/commsd.ts")).unwrap();
        let module = agent.join("commsd.mjs");
        std::fs::write(&module, change(text)).unwrap();
        std::fs::create_dir_all(project(daemon)).unwrap();
        Self::node(&[&project(daemon), &module])
    }

    async fn send(&mut self, wanted: Value) {
        soon(self.stdin.write_all(format!("{wanted}\n").as_bytes())).await.unwrap();
    }

    /// The next thing said that has the member.
    async fn said(&mut self, member: &str) -> Value {
        let passed = self.passed.iter().position(|said| said.get(member).is_some());
        if let Some(said) = passed.and_then(|at| self.passed.remove(at)) {
            return said;
        }
        loop {
            let line = soon(self.stdout.next_line()).await.unwrap().expect("node has ended");
            let said: Value = serde_json::from_str(&line).expect(&line);
            if said.get(member).is_some() {
                return said;
            }
            self.passed.push_back(said);
        }
    }

    async fn event(&mut self, mut event: Value, name: &str) {
        event["type"] = name.into();
        self.send(json!({"event": event})).await;
        assert_eq!(self.said("handled").await["handled"], name);
    }

    async fn tools(&mut self) -> Vec<Value> {
        self.send(json!({})).await;
        self.said("tools").await["tools"].as_array().unwrap().clone()
    }

    async fn call(&mut self, tool: &str, args: Value) -> u64 {
        self.calls += 1;
        self.send(json!({"call": self.calls, "tool": tool, "args": args})).await;
        self.calls
    }

    async fn answer(&mut self, call: u64) -> Value {
        let answer = self.said("answered").await;
        assert_eq!(answer["answered"], call);
        answer
    }

    /// What the model is told.
    async fn action(&mut self, action: Value) -> String {
        let call = self.call("agent_comms", action).await;
        let answer = self.answer(call).await;
        let blocks = answer["result"]["content"].as_array().unwrap_or_else(|| panic!("{answer}"));
        let texts: Vec<&str> = blocks.iter().map(|block| block["text"].as_str().unwrap()).collect();
        texts.join("\n")
    }

    /// The next message that pi is handed, which the model gets then.
    async fn handed(&mut self, content: &str, way: &str) {
        let message = self.lost(content, way).await;
        self.event(json!({"message": message}), "message_start").await;
    }

    /// The next message that pi is handed, and which its model does not get.
    async fn lost(&mut self, content: &str, way: &str) -> Value {
        let said = self.said("sent").await;
        assert!(said["sent"]["content"].as_str().unwrap().contains(content), "{content}: {said}");
        assert_eq!(said["options"], json!({"deliverAs": way, "triggerTurn": true}));
        said["sent"].clone()
    }

    /// Nothing was handed to pi so far.
    fn quiet(&self) {
        let sent: Vec<&Value> =
            self.passed.iter().filter(|said| said.get("sent").is_some()).collect();
        assert!(sent.is_empty(), "{sent:?}");
    }

    /// The processes that it has started.
    fn children(&self) -> Vec<u32> {
        let pid = self.child.id().unwrap();
        let list = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        list.split_whitespace().map(|id| id.parse().unwrap()).collect()
    }

    /// Ends the session: nothing is left, and nothing was written but what the driver wrote.
    async fn end(mut self) {
        self.event(json!({}), "session_shutdown").await;
        assert_eq!(self.children(), [0; 0]);
        drop(self.stdin);
        assert!(soon(self.child.wait()).await.unwrap().success());
        let mut written = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut written).await.unwrap();
        assert_eq!(written, "");
    }
}

impl Started {
    async fn new() -> Option<Self> {
        if std::process::Command::new("node").arg("--version").output().is_err() {
            crate::limits::skipped("there is no node here");
            return None;
        }
        let daemon = Daemon::start(Ports::free()).await;
        let agent = set_up(&daemon).await;
        let pi = Pi::stub(&daemon, &agent, |text| text);
        Some(Self::with(daemon, pi).await)
    }

    /// The session begins, and bob may write to its agent.
    async fn with(daemon: Daemon, mut pi: Pi) -> Self {
        pi.event(json!({"reason": "startup"}), "session_start").await;
        let named = pi.action(json!({"action": "register", "name": "pia"})).await;
        assert!(named.contains("pia"), "{named}");
        pi.action(json!({"action": "update", "consent": "open"})).await;
        let mut bob = Harness::start(daemon.home.path(), &project(&daemon), "mcp").await;
        bob.action(json!({"action": "register", "name": "bob"})).await;
        Self { daemon, pi, bob }
    }

    async fn dm(&mut self, text: &str, hint: &str) {
        let mut call = json!({"action": "dm", "target": "pia", "content": text});
        if !hint.is_empty() {
            call["streamingBehavior"] = hint.into();
        }
        let answer = self.bob.action(call).await;
        assert!(answer.contains("DM to"), "{answer}");
    }
}

#[tokio::test]
async fn pis_model_has_every_tool_and_gets_each_message_once_in_its_time() {
    let Some(mut session) = Started::new().await else { return };
    // D9: the tools are the server's, with their schemas.
    let listed = session.bob.ask("tools/list", json!({})).await["result"]["tools"].take();
    let mine = session.pi.tools().await;
    assert_eq!(mine.len(), listed.as_array().unwrap().len());
    for (mine, listed) in mine.iter().zip(listed.as_array().unwrap()) {
        assert_eq!(mine["name"], listed["name"]);
        assert_eq!(mine["parameters"], listed["inputSchema"]);
        assert_eq!(mine["description"], listed["description"]);
    }
    assert!(mine.iter().any(|tool| tool["name"] == "acp_delegate_task"));
    let refused = session.pi.call("agent_comms", json!({"action": "join_room"})).await;
    let refused = session.pi.answer(refused).await;
    assert!(refused["error"].as_str().unwrap().contains("missing field `room`"), "{refused}");

    // Idle: what asks for an answer wakes it, twice if it is said twice (D19).
    for _ in 0..2 {
        session.dm("look", "").await;
        session.pi.handed("│ look", "steer").await;
    }
    session.bob.wait_for("was read").await;
    session.dm("in time", "followUp").await;
    session.pi.handed("│ in time", "followUp").await;
    // News does not, and comes with the next result, once.
    session.dm("by the way", "info").await;
    let answer = session.pi.action(json!({"action": "list_rooms"})).await;
    assert!(answer.contains("│ by the way") && !answer.contains("│ look"), "{answer}");
    let answer = session.pi.action(json!({"action": "whoami"})).await;
    assert!(answer.contains("Harness: pi") && !answer.contains("│ "), "{answer}");
    session.pi.quiet();

    // At work: only what is urgent; what can wait for the end comes then.
    session.pi.event(json!({}), "agent_start").await;
    session.dm("now", "steer").await;
    session.pi.handed("│ now", "steer").await;
    session.dm("at the end", "followUp").await;
    session.bob.action(json!({"action": "whoami"})).await;
    session.pi.event(json!({"messages": [{"stopReason": "stop"}]}), "agent_end").await;
    session.pi.quiet();
    session.pi.handed("│ at the end", "followUp").await;

    // The session's end is its agent's.
    session.pi.end().await;
    session.bob.wait_for("is offline").await;
}

#[tokio::test]
async fn who_waits_in_pi_gets_the_message_and_may_give_up() {
    let Some(mut session) = Started::new().await else { return };
    let wait = json!({"timeoutSeconds": 50, "atLeast": "steer"});
    let given_up = session.pi.call("wait_for_messages", wait.clone()).await;
    session.pi.send(json!({"cancel": given_up})).await;
    assert_eq!(session.pi.answer(given_up).await["error"], "cancelled");
    let waits = session.pi.call("wait_for_messages", wait.clone()).await;
    session.dm("for whoever waits", "").await;
    let answer = session.pi.answer(waits).await;
    let text = answer["result"]["content"][0]["text"].as_str().unwrap();
    assert!(text.contains("│ for whoever waits"), "{answer}");
    session.pi.quiet();
    // Who begins to wait for what pi holds already is let go, so that it comes.
    session.dm("on its way", "").await;
    let message = session.pi.lost("│ on its way", "steer").await;
    let waits = session.pi.call("wait_for_messages", wait).await;
    let answer = session.pi.answer(waits).await;
    let text = answer["result"]["content"][0]["text"].as_str().unwrap();
    assert!(text.starts_with("No messages within 0 s"), "{answer}");
    session.pi.event(json!({"message": message}), "message_start").await;
    session.dm("and on", "").await;
    session.pi.handed("│ and on", "steer").await;
    session.pi.end().await;
}

#[tokio::test]
async fn what_pi_forgets_is_handed_to_it_again() {
    let Some(mut session) = Started::new().await else { return };
    session.pi.event(json!({}), "agent_start").await;
    session.dm("remember", "steer").await;
    session.pi.lost("│ remember", "steer").await;
    // Its person stops the model, which empties pi's queue; then it is set to work again.
    for end in ["aborted", "stop"] {
        session.pi.event(json!({"messages": [{"stopReason": end}]}), "agent_end").await;
        session.pi.quiet();
        if end == "aborted" {
            session.pi.event(json!({}), "agent_start").await;
        }
    }
    session.pi.handed("│ remember", "steer").await;
    session.dm("and on", "").await;
    session.pi.handed("│ and on", "steer").await;
    // A session that ends before its model has it leaves it to the next.
    session.dm("still there", "").await;
    session.pi.lost("│ still there", "steer").await;
    session.pi.event(json!({"reason": "new"}), "session_shutdown").await;
    session.pi.event(json!({"reason": "new"}), "session_start").await;
    session.pi.handed("│ still there", "steer").await;
    session.pi.end().await;
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_server_that_dies_is_started_again_and_one_that_is_not_there_is_told() {
    let Some(mut session) = Started::new().await else { return };
    let [server] = session.pi.children()[..] else { panic!("one server") };
    let wait = json!({"timeoutSeconds": 50, "atLeast": "steer"});
    let waits = session.pi.call("wait_for_messages", wait).await;
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(i32::try_from(server).unwrap()).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    let error = session.pi.answer(waits).await["error"].take();
    assert_eq!(error, "commsd mcp: ended (SIGKILL)");
    let told = session.pi.said("told").await;
    assert!(told["told"].as_str().unwrap().contains("started again"), "{told}");
    // The new one is the same agent, and listens.
    session.dm("back", "").await;
    session.pi.handed("│ back", "steer").await;
    assert!(session.pi.action(json!({"action": "whoami"})).await.contains("Name: pia"));
    session.pi.end().await;

    let agent = session.daemon.home.path().join(".pi/agent");
    let hung = agent.join("hung");
    std::fs::write(&hung, "#!/bin/sh\nexec sleep 600\n").unwrap();
    std::fs::set_permissions(&hung, std::fs::Permissions::from_mode(0o755)).unwrap();
    for (program, why) in [
        (hung.to_str().unwrap(), "no answer"),
        ("/nowhere/\\u001b[2Jcommsd", "spawn /nowhere/ [2Jcommsd ENOENT"),
        ("/bin/sleep", "ended (1)"),
    ] {
        let mut without = Pi::stub(&session.daemon, &agent, |text| {
            text.replace(env!("CARGO_BIN_EXE_commsd"), program)
        });
        without.event(json!({"reason": "startup"}), "session_start").await;
        let told = without.said("told").await;
        let text = told["told"].as_str().unwrap();
        assert_eq!(told["kind"], "error");
        assert!(text.starts_with(&format!("commsd mcp: {why}")), "{told}");
        assert_eq!(without.tools().await, [Value::Null; 0]);
        without.end().await;
    }
}

#[tokio::test]
async fn a_call_that_is_never_answered_ends_all_the_same() {
    if std::process::Command::new("node").arg("--version").output().is_err() {
        crate::limits::skipped("there is no node here");
        return;
    }
    let daemon = Daemon::start(Ports::free()).await;
    let agent = set_up(&daemon).await;
    let mute = daemon.home.path().join("mute.mjs");
    std::fs::write(
        &mute,
        "import { createInterface } from 'node:readline';\n\
         for await (const line of createInterface({ input: process.stdin })) {\n\
         const { id, method } = JSON.parse(line);\n\
         const tools = [{ name: 'agent_comms', inputSchema: { type: 'object' } }];\n\
         const result = { initialize: {}, 'tools/list': { tools } }[method];\n\
         if (result) console.log(JSON.stringify({ jsonrpc: '2.0', id, result }));\n}\n",
    )
    .unwrap();
    let mut pi = Pi::stub(&daemon, &agent, |text| {
        let start = text.find("const COMMAND = ").unwrap();
        let end = start + text[start..].find('\n').unwrap();
        let command = format!("const COMMAND = {};", json!(["node", mute]));
        let text = [&text[..start], &command, &text[end..]].concat();
        let soon = text.replace("const CALL_MS = 15 * 60_000;", "const CALL_MS = 2_000;");
        assert_ne!(soon, text);
        soon
    });
    pi.event(json!({"reason": "startup"}), "session_start").await;
    let call = pi.call("agent_comms", json!({"action": "whoami"})).await;
    assert_eq!(pi.answer(call).await["error"], "commsd has not answered in time");
    pi.end().await;
}

/// pi is no crate: where it is installed in a folder, `COMMSD_SDK_PI` names that.
#[tokio::test]
async fn pis_own_loader_takes_the_extension() {
    let Some(folder) = std::env::var_os("COMMSD_SDK_PI") else {
        crate::limits::skipped("COMMSD_SDK_PI does not say where pi is");
        return;
    };
    let scopes = ["@earendil-works", "@mariozechner"];
    let packages = scopes
        .map(|scope| Path::new(&folder).join("node_modules").join(scope).join("pi-coding-agent"));
    let package = packages.iter().find(|package| package.exists()).expect("no pi there");
    let daemon = Daemon::start(Ports::free()).await;
    let agent = set_up(&daemon).await;
    std::fs::create_dir_all(project(&daemon)).unwrap();
    let pi = Pi::node(&[&project(&daemon), &agent, package]);
    let mut session = Started::with(daemon, pi).await;
    session.dm("look", "").await;
    session.pi.handed("│ look", "steer").await;
    session.pi.end().await;
}
