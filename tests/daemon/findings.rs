//! What was found in comparable programs (`docs/findings.md`), where no other test shows it yet.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use commsd::api::client::{Client, Notification};
use commsd::api::types::{UpdateParams, WatchParams};
use serde_json::json;

use crate::bench::soon;
use crate::daemon::{Daemon, Ports};
use crate::mcp::{Harness, friends};

/// D3: no web site reaches the daemon. Its doors speak no HTTP; what a browser can send ends
/// the connection, and nothing else.
#[tokio::test]
async fn a_browser_gets_nowhere_at_any_door() {
    let daemon = Daemon::start(Ports::free()).await;
    let alice = daemon.agent("alice").await;
    let body = json!({"action": "dm", "target": "alice", "content": "x"}).to_string();
    let post = format!(
        "POST /api/action HTTP/1.1\r\nHost: evil.example\r\nOrigin: https://evil.example\r\n\
         Content-Type: text/plain\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let socket = daemon.socket();
    let port = daemon.status().await.port.number;
    let answers = tokio::task::spawn_blocking(move || {
        let mut unix = UnixStream::connect(socket).unwrap();
        let mut tcp = TcpStream::connect(("127.0.0.1", port)).unwrap();
        unix.write_all(post.as_bytes()).unwrap();
        tcp.write_all(post.as_bytes()).unwrap();
        let (mut local, mut mesh) = (Vec::new(), Vec::new());
        let _closed = unix.read_to_end(&mut local);
        let _closed = tcp.read_to_end(&mut mesh);
        [local, mesh]
    });
    for answer in soon(answers).await.unwrap() {
        let text = String::from_utf8_lossy(&answer);
        assert!(!text.contains("HTTP/") && !text.contains("alice"), "{text}");
    }
    assert_eq!(alice.count_seen(|_| true), 0);
    assert_eq!(daemon.status().await.agents, 1, "it serves on");
}

/// D5: a room is addressed by its path in either spelling.
#[tokio::test]
async fn a_rooms_path_is_understood_with_its_slash_and_without() {
    let daemon = Daemon::start(Ports::free()).await;
    let (mut ann, mut bob) = friends(&daemon).await;
    bob.action(json!({"action": "send", "room": "work", "content": "look"})).await;
    let path = bob.room().await;
    for spelling in [path.clone(), path.replace('/', "%2F"), path.replace('/', "%2f")] {
        let uri = format!("commsd://rooms/{spelling}");
        let room = ann.ask("resources/read", json!({"uri": uri})).await;
        assert!(room.to_string().contains("look"), "{uri}: {room}");
    }
}

/// D19: two messages with the same words are two messages.
#[tokio::test]
async fn the_same_words_twice_are_two_messages() {
    let daemon = Daemon::start(Ports::free()).await;
    let mut alice = daemon.agent("alice").await;
    let mut bob = daemon.agent("bob").await;
    alice.befriend(&mut bob).await;
    let first = alice.dm(&bob.id, "ok", None).await.message_id;
    let second = alice.dm(&bob.id, "ok", None).await.message_id;
    assert_ne!(first, second);
    for id in [first, second] {
        bob.wait(&id, |e| e.kind() == "dm" && e.body["message"]["id"] == id.as_str()).await;
    }
}

/// D23: whoever watches has a snapshot and every change after it; an unknown cursor gets another
/// snapshot, a good one none.
#[tokio::test]
async fn a_watch_has_no_gap() {
    let daemon = Daemon::start(Ports::free()).await;
    let alice = daemon.agent("alice").await;
    let (client, mut changes) = Client::connect(&daemon.socket(), "test").await.unwrap();
    let watching = client.call(WatchParams { after: None }).await.unwrap();
    let snapshot = watching.snapshot.expect("the first has a snapshot");
    assert_eq!(snapshot.agents.len(), 1);
    let renamed = UpdateParams {
        status: None,
        visibility: None,
        name: Some("alice the second".into()),
        tags: None,
        consent: None,
    };
    alice.client.call(renamed).await.unwrap();
    let _late = daemon.agent("bob").await;
    let told = soon(async {
        while let Some(notification) = changes.recv().await {
            if let Notification::Change(change) = notification {
                return change;
            }
        }
        panic!("the connection ended");
    })
    .await;
    assert!(told.seq > 0);
    for unknown in ["", "0", "99999999", "nonsense"] {
        let again = client.call(WatchParams { after: Some(unknown.into()) }).await.unwrap();
        assert!(again.snapshot.is_some(), "{unknown:?}");
        assert_eq!(again.snapshot.unwrap().agents.len(), 2);
        let good = client.call(WatchParams { after: Some(again.cursor.clone()) }).await.unwrap();
        assert!(good.snapshot.is_none() || good.cursor != again.cursor);
    }
}

/// D31: a session that is killed is offline at once, for everybody.
#[tokio::test]
async fn a_killed_session_is_offline_at_once() {
    let daemon = Daemon::start(Ports::free()).await;
    let cwd = daemon.home.path().join("work");
    let mut ann = Harness::start(daemon.home.path(), &cwd, "codex").await;
    let id = ann.id().await;
    let watcher = daemon.agent("watcher").await;
    ann.kill().await;
    soon(async {
        loop {
            let list = watcher.client.call(commsd::api::types::AgentsParams {}).await.unwrap();
            let here = list.agents.iter().find(|agent| agent.id == id);
            if here.is_none_or(|agent| agent.status == commsd::api::types::AgentStatus::Offline) {
                return;
            }
            tokio::task::yield_now().await;
        }
    })
    .await;
}
