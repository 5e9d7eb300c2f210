//! `commsd hook` as a harness runs it: what came for the session's agent, once, and never in the way.

use std::path::Path;
use std::process::{Output, Stdio};

use commsd::api::client::Client;
use commsd::api::types::{HookMoment, HookTakeParams};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, Command};

use crate::bench::soon;
use crate::daemon::{Daemon, Ports};
use crate::mcp::{Harness, friends, friends_in};

/// A hook of this process, which is the harness of every session it starts.
async fn started(home: &Path, harness: &str, args: &[&str], input: &str) -> Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_commsd"))
        .args(["hook", "--harness", harness, "--home"])
        .arg(home)
        .args(args)
        .env_clear()
        .env("HOME", home)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // One that does not want to know may have ended before.
    let _ = stdin.write_all(input.as_bytes()).await;
    child
}

async fn hook(home: &Path, harness: &str, input: &Value) -> Output {
    let child = started(home, harness, &[], &input.to_string()).await;
    soon(child.wait_with_output()).await.unwrap()
}

fn event(name: &str) -> Value {
    json!({"session_id": "s1", "cwd": "/", "hook_event_name": name, "tool_response": {"x": [1, 2]}})
}

/// What a hook says to the model; it ended well.
async fn said(home: &Path, harness: &str, name: &str) -> Option<Value> {
    let output = hook(home, harness, &event(name)).await;
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
    (!output.stdout.is_empty()).then(|| serde_json::from_slice(&output.stdout).unwrap())
}

async fn dm(from: &mut Harness, to: &str, text: &str, hint: Option<&str>) {
    let mut call = json!({"action": "dm", "target": to, "content": text});
    if let Some(hint) = hint {
        call["streamingBehavior"] = hint.into();
    }
    let answer = from.action(call).await;
    assert!(answer.contains("DM to"), "{answer}");
}

#[tokio::test]
async fn a_hook_brings_what_came_once_and_tools_do_not_bring_it_again() {
    let daemon = Daemon::start(Ports::free()).await;
    let home = daemon.home.path();
    let (mut ann, mut bob) = friends(&daemon).await;
    assert_eq!(said(home, "codex", "PostToolUse").await, None);
    dm(&mut bob, "ann", "look", None).await;
    let brought = said(home, "codex", "PostToolUse").await.unwrap();
    assert_eq!(brought["decision"], "block");
    let reason = brought["reason"].as_str().unwrap();
    assert!(reason.starts_with("📬 Incoming messages:\n📬 DM from") && reason.ends_with("│ look"));
    // The next one has nothing, and shows that the first one's text arrived.
    assert_eq!(said(home, "codex", "Stop").await, None);
    let heard = bob.wait_for("was read").await;
    assert!(!heard.contains("look"), "{heard}");
    let answer = ann.action(json!({"action": "whoami"})).await;
    assert!(!answer.contains("look"), "{answer}");
    // And what a tool brings, the hook that runs after it does not.
    dm(&mut bob, "ann", "again", None).await;
    assert!(ann.action(json!({"action": "whoami"})).await.contains("│ again"));
    assert_eq!(said(home, "codex", "PostToolUse").await, None);
    // A hook that is killed before it printed has brought nothing.
    dm(&mut bob, "ann", "still here", None).await;
    {
        let (client, _events) = Client::connect(&daemon.socket(), "test").await.unwrap();
        let taken = client.call(take("codex")).await.unwrap();
        assert_eq!(taken.events.len(), 1);
        assert_eq!(said(home, "codex", "PostToolUse").await, None, "it may be printed any moment");
    }
    let brought = soon(async {
        loop {
            if let Some(brought) = said(home, "codex", "PostToolUse").await {
                return brought;
            }
        }
    })
    .await;
    assert!(brought["reason"].as_str().unwrap().ends_with("│ still here"));
    // Nor is it lost when a tool is called while a hook has it, and that hook is killed.
    dm(&mut bob, "ann", "half printed", None).await;
    {
        let (client, _events) = Client::connect(&daemon.socket(), "test").await.unwrap();
        assert_eq!(client.call(take("codex")).await.unwrap().events.len(), 1);
        assert!(ann.action(json!({"action": "whoami"})).await.contains("│ half printed"));
    }
    assert_eq!(said(home, "codex", "PostToolUse").await, None);
    // The hook of another process, such as a harness within this one, gets nothing, whatever it calls
    // its session; where no process tells, the session does.
    dm(&mut bob, "ann", "for ann alone", None).await;
    let (client, _events) = Client::connect(&daemon.socket(), "test").await.unwrap();
    let session = Some("s1".to_owned().try_into().unwrap());
    let inner = HookTakeParams { processes: vec![1], session: session.clone(), ..take("codex") };
    assert_eq!(client.call(inner).await.unwrap().agent, None);
    let untold = HookTakeParams { processes: Vec::new(), session, ..take("codex") };
    assert_eq!(client.call(untold).await.unwrap().events.len(), 1);
}

#[tokio::test]
async fn what_nobody_can_have_heard_is_not_taken_for_shown() {
    let daemon = Daemon::start(Ports::free()).await;
    let home = daemon.home.path();
    let (_ann, mut bob) = friends(&daemon).await;
    dm(&mut bob, "ann", "hello", None).await;
    for closed in ["exec \"$@\" >&-", "exec \"$@\" --wait 5 2>&-"] {
        let mut child = Command::new("/bin/sh")
            .args(["-c", closed, "sh", env!("CARGO_BIN_EXE_commsd"), "hook", "--harness", "codex"])
            .arg("--home")
            .arg(home)
            .env_clear()
            .env("HOME", home)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        // It may have ended without a look.
        let _ = child.stdin.take().unwrap().write_all(event("Stop").to_string().as_bytes()).await;
        assert_eq!(soon(child.wait()).await.unwrap().code(), Some(0), "{closed}");
    }
    let brought = said(home, "codex", "Stop").await.unwrap();
    assert!(brought["reason"].as_str().unwrap().ends_with("│ hello"), "{brought}");
    // Nor does a wrong command line speak as one that has something to say.
    let wrong = started(home, "codex", &["--frobnicate"], "").await;
    assert_eq!(soon(wrong.wait_with_output()).await.unwrap().status.code(), Some(1));
}

#[tokio::test]
async fn what_hooks_bring_is_no_notification_beside() {
    const CLAUDE: &str = "claude-code";
    let daemon = Daemon::start(Ports::free()).await;
    let home = daemon.home.path();
    let (mut ann, mut bob) = friends_in(&daemon, CLAUDE).await;
    let told = |ann: &Harness, text: &str| ann.pushed.iter().any(|m| m.to_string().contains(text));
    // Before a hook has run there may be none.
    dm(&mut bob, "ann", "by both", None).await;
    while !told(&ann, "by both") {
        ann.action(json!({"action": "whoami"})).await;
    }
    said(home, CLAUDE, "UserPromptSubmit").await;
    for text in ["first", "second"] {
        dm(&mut bob, "ann", text, None).await;
        let brought = said(home, CLAUDE, "PostToolUse").await.unwrap();
        assert!(brought["reason"].as_str().unwrap().ends_with(text), "{brought}");
        let answer = ann.action(json!({"action": "list_rooms"})).await;
        assert!(!answer.contains(text), "{answer}");
        assert!(!told(&ann, text), "{:?}", ann.pushed);
    }
}

fn take(harness: &str) -> HookTakeParams {
    HookTakeParams {
        harness: harness.to_owned().try_into().unwrap(),
        moment: HookMoment::Step,
        processes: vec![std::process::id()],
        session: None,
        wait: None,
    }
}

#[tokio::test]
async fn what_a_cancelled_answer_brought_is_not_acknowledged_by_the_hooks_that_follow() {
    let daemon = Daemon::start(Ports::free()).await;
    let home = daemon.home.path();
    let (mut ann, mut bob) = friends(&daemon).await;
    dm(&mut bob, "ann", "precious", None).await;
    let call = json!({"name": "agent_comms", "arguments": {"action": "list_rooms"}});
    let id = ann.request("tools/call", call).await;
    let answer = ann.answer(id).await.to_string();
    assert!(answer.contains("precious"), "{answer}");
    let cancelled = json!({"jsonrpc": "2.0", "method": "notifications/cancelled",
        "params": {"requestId": id, "reason": "user"}});
    ann.send(&cancelled).await;
    // By the same way to the daemon, and no call of a tool.
    ann.ask("resources/read", json!({"uri": "commsd://rooms"})).await;
    dm(&mut bob, "ann", "later", None).await;
    let brought = said(home, "codex", "PostToolUse").await.unwrap();
    assert!(brought["reason"].as_str().unwrap().ends_with("│ later"));
    assert_eq!(said(home, "codex", "PostToolUse").await, None);
    // The session ends without another call: the next one is given both.
    ann.kill().await;
    let mut ann = Harness::start(home, &home.join("work"), "codex").await;
    let again = ann.action(json!({"action": "whoami"})).await;
    assert!(again.contains("│ precious") && again.contains("│ later"), "{again}");
    // Once it has said that they arrived, hooks acknowledge again.
    ann.action(json!({"action": "whoami"})).await;
    bob.wait_for("read 2 of your messages").await;
    dm(&mut bob, "ann", "at last", None).await;
    assert!(said(home, "codex", "PostToolUse").await.is_some());
    assert_eq!(said(home, "codex", "PostToolUse").await, None);
    bob.wait_for("was read").await;
}

#[tokio::test]
async fn each_message_waits_for_its_moment() {
    let daemon = Daemon::start(Ports::free()).await;
    let home = daemon.home.path();
    let (_ann, mut bob) = friends(&daemon).await;
    dm(&mut bob, "ann", "when done", Some("followUp")).await;
    assert_eq!(said(home, "codex", "PostToolUse").await, None);
    let mut again = event("Stop");
    again["stop_hook_active"] = true.into();
    assert!(hook(home, "codex", &again).await.stdout.is_empty(), "no loop");
    let stopped = said(home, "codex", "Stop").await.unwrap();
    assert_eq!(stopped["decision"], "block");
    assert!(stopped["reason"].as_str().unwrap().ends_with("│ when done"));
    dm(&mut bob, "ann", "by the way", Some("info")).await;
    assert_eq!(said(home, "codex", "PostToolUse").await, None);
    assert_eq!(said(home, "codex", "Stop").await, None);
    let prompt = said(home, "codex", "UserPromptSubmit").await.unwrap();
    let context = &prompt["hookSpecificOutput"];
    assert_eq!(context["hookEventName"], "UserPromptSubmit");
    assert!(context["additionalContext"].as_str().unwrap().ends_with("│ by the way"));
    // Room posts inform; who is spoken to is woken.
    let room = bob.room().await;
    for (text, wakes) in [("for all", false), ("@Ann, for you", true)] {
        bob.action(json!({"action": "send", "room": room, "content": text})).await;
        let step = said(home, "codex", "PostToolUse").await;
        assert_eq!(step.is_some(), wakes, "{text}: {step:?}");
    }
    // Much news before something urgent: it all goes, in as many hooks as it takes.
    for _ in 0..9 {
        dm(&mut bob, "ann", &"news ".repeat(400), Some("info")).await;
    }
    assert_eq!(said(home, "codex", "PostToolUse").await, None);
    dm(&mut bob, "ann", "now this", Some("steer")).await;
    let first = said(home, "codex", "PostToolUse").await.unwrap();
    assert!(!first["reason"].as_str().unwrap().contains("now this"));
    let then = said(home, "codex", "PostToolUse").await.unwrap();
    assert!(then["reason"].as_str().unwrap().ends_with("│ now this"));
    // What is too long is pointed at, once.
    dm(&mut bob, "ann", &"long ".repeat(5_000), None).await;
    let hint = said(home, "codex", "PostToolUse").await.unwrap();
    assert!(hint["reason"].as_str().unwrap().contains("wait_for_messages"));
    assert_eq!(said(home, "codex", "PostToolUse").await, None);
    // Behind it: news is no reason for another word, what is urgent is.
    dm(&mut bob, "ann", "fyi", Some("info")).await;
    assert_eq!(said(home, "codex", "PostToolUse").await, None);
    dm(&mut bob, "ann", "urgent", Some("steer")).await;
    let hint = said(home, "codex", "PostToolUse").await.unwrap();
    assert!(hint["reason"].as_str().unwrap().contains("wait_for_messages"));
}

#[tokio::test]
async fn a_hook_that_waits_wakes_the_session_and_only_the_newest_waits() {
    let daemon = Daemon::start(Ports::free()).await;
    let home = daemon.home.path();
    let (_ann, mut bob) = friends(&daemon).await;
    let waits = ["--wait", "60"];
    let older = started(home, "codex", &waits, &event("Stop").to_string()).await;
    // It is known to wait when the next one ends it, and not before.
    let newer = started(home, "codex", &waits, &event("Stop").to_string()).await;
    let (older, newer) = (older.wait_with_output(), newer.wait_with_output());
    tokio::pin!(older, newer);
    let (ended, other) = soon(async {
        tokio::select! {
            ended = &mut older => (ended, newer),
            ended = &mut newer => (ended, older),
        }
    })
    .await;
    let ended = ended.unwrap();
    assert_eq!(ended.status.code(), Some(0));
    assert!(ended.stderr.is_empty() && ended.stdout.is_empty());
    dm(&mut bob, "ann", "wake up", None).await;
    let woken = soon(other).await.unwrap();
    assert_eq!(woken.status.code(), Some(2));
    assert!(woken.stdout.is_empty());
    assert!(String::from_utf8(woken.stderr).unwrap().ends_with("│ wake up\n"));
}

#[tokio::test]
async fn a_hook_is_never_in_the_way() {
    let home = tempfile::tempdir().unwrap();
    for input in [event("Stop").to_string(), String::new(), "no JSON".into()] {
        let child = started(home.path(), "claude-code", &[], &input).await;
        let output = soon(child.wait_with_output()).await.unwrap();
        assert_eq!(output.status.code(), Some(0), "without a daemon: {output:?}");
        assert!(output.stdout.is_empty() && output.stderr.is_empty(), "{output:?}");
    }
    // With one: no session of this harness, then two that nothing tells apart.
    let daemon = Daemon::start(Ports::free()).await;
    let home = daemon.home.path();
    assert_eq!(said(home, "claude-code", "Stop").await, None);
    assert_eq!(daemon.event("hook_unmatched").await["reason"], "no_agent");
    let mut one = Harness::start(home, &home.join("a"), "claude-code").await;
    let mut two = Harness::start(home, &home.join("b"), "claude-code").await;
    for session in [&mut one, &mut two] {
        session.action(json!({"action": "whoami"})).await;
    }
    assert_eq!(said(home, "claude-code", "Stop").await, None);
    let ambiguous =
        |line: &Value| line["event"] == "hook_unmatched" && line["reason"] == "ambiguous";
    daemon.log.wait(0, "an ambiguous hook", ambiguous).await;
}
