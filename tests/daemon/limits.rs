//! What happens at the edges: descriptors run out, names are odd, texts are long, disks are full.

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use commsd::api::client::Client;
use commsd::api::types::{
    AgentsParams, AttachParams, RoomCreateParams, SendParams, Status, UpdateParams, WhoamiParams,
};
use tokio::process::Command;

use crate::daemon::{Agent, Daemon, Ports, command};

#[tokio::test]
async fn without_descriptors_new_agents_are_refused_and_others_go_on() {
    let daemon = limited_to(48).await;
    let alice = daemon.agent("alice").await;
    let mut kept = Vec::new();
    let mut refusal = None;
    // One client attaches many agents, one after another: each needs a listener.
    for n in 0..64 {
        let Ok((client, _events)) = Client::connect(&daemon.socket(), "test").await else { break };
        let attached = client.call(shell_agent(&format!("agent{n}"))).await;
        match attached {
            Ok(_) => kept.push(client),
            Err(error) => {
                refusal = Some(error);
                break;
            }
        }
    }
    let error = refusal.expect("the limit was never felt");
    assert_eq!(error.code, "limit_descriptors", "{error:?}");
    let listed = alice.client.call(AgentsParams {}).await.unwrap();
    assert!(!listed.agents.is_empty(), "the first agent is still served");
}

/// A daemon whose process may have so many files open.
async fn limited_to(files: u32) -> Daemon {
    let ports = Ports::free();
    let home = Arc::new(tempfile::tempdir().unwrap());
    let inner = command(home.path(), ports, &[]);
    let inner = inner.as_std();
    let mut limited = Command::new("/bin/sh");
    limited
        .args(["-c", &format!("ulimit -n {files} && exec \"$0\" \"$@\"")])
        .arg(inner.get_program())
        .args(inner.get_args())
        .env_clear()
        .env("HOME", home.path())
        .env("COMMSD_NO_BROADCAST", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    Daemon::spawn(limited, home, ports).await
}

/// Three hundred harness sessions, each with an agent, on the usual limit (issue 3, decision 24).
#[tokio::test]
async fn three_hundred_sessions_fit_the_usual_limit_of_descriptors() {
    let daemon = limited_to(1024).await;
    let mut sessions = Vec::new();
    for n in 0..300 {
        let (client, _events) = Client::connect(&daemon.socket(), "test").await.unwrap();
        let attach = AttachParams {
            harness: "mcp".to_owned().try_into().unwrap(),
            cwd: format!("/session/{n}"),
            key: None,
            ..shell_agent("x")
        };
        let attached = client.call(attach).await;
        assert!(attached.is_ok(), "session {n}: {attached:?}");
        sessions.push(client);
    }
    assert_eq!(daemon.status().await.agents, 300);
}

#[tokio::test]
async fn odd_names_and_long_texts_are_refused_by_name() {
    let daemon = Daemon::start(Ports::free()).await;
    let alice = daemon.agent("alice").await;
    for name in ["", "  ", "a\u{0}b", "a\u{1b}[31mb", "\u{85}", &"x".repeat(65)] {
        let update = UpdateParams {
            status: None,
            visibility: None,
            name: Some(name.into()),
            tags: None,
            consent: None,
        };
        let error = alice.client.call(update).await.unwrap_err();
        assert_eq!(error.code, "invalid_name", "{name:?}");
    }
    for name in ["", "///", "\u{202e}", "💥"] {
        let create = RoomCreateParams { name: name.into(), r#type: None, description: None };
        let error = alice.client.call(create).await.unwrap_err();
        assert_eq!(error.code, "invalid_name", "{name:?}");
    }
    let long = RoomCreateParams { name: "x".repeat(65), r#type: None, description: None };
    assert_eq!(alice.client.call(long).await.unwrap_err().code, "too_large");
    // Sixty-four kibibytes of a name never get as far as the node.
    let huge = RoomCreateParams { name: "x".repeat(65_536), r#type: None, description: None };
    assert_eq!(alice.client.call(huge).await.unwrap_err().code, "too_large");
    let room = RoomCreateParams { name: "r".into(), r#type: None, description: None };
    let room = alice.client.call(room).await.unwrap();
    // Every byte that needs escaping, at the limit: taken, and shown whole.
    let text = "\u{1}".repeat(commsd::api::types::MAX_TEXT_BYTES);
    let mut bob = daemon.agent("bob").await;
    bob.client.call(commsd::api::types::RoomJoinParams { room: room.path.clone() }).await.unwrap();
    alice
        .client
        .call(SendParams {
            room: room.path.clone(),
            text: text.clone().try_into().unwrap(),
            timing: None,
            reply_to: None,
        })
        .await
        .unwrap();
    let shown = bob.wait_kind("room_message").await;
    assert_eq!(shown.body["message"]["content"], text.as_str());
}

#[tokio::test]
async fn names_that_play_with_direction_are_shown_escaped() {
    let daemon = Daemon::start(Ports::free()).await;
    // A directory may be called anything; an agent of ours may not call itself so.
    let name = "evil\u{202e}txt.exe";
    let agent = Agent::attach(&daemon.socket(), "mcp", None, &Path::new("/srv").join(name)).await;
    let update = UpdateParams {
        status: None,
        visibility: None,
        name: Some(name.into()),
        tags: None,
        consent: None,
    };
    let error = agent.client.call(update).await.unwrap_err();
    assert_eq!(error.code, "invalid_name");
    let output = Command::new(env!("CARGO_BIN_EXE_commsd"))
        .args(["agents", "--home"])
        .arg(daemon.home.path())
        .env_clear()
        .env("HOME", daemon.home.path())
        .output()
        .await
        .unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(shown.contains("evil") && !shown.contains('\u{202e}'), "{shown}");
    assert!(!daemon.log.text().contains('\u{202e}'));
}

fn ran(program: &str, args: &[&str], home: &Path) -> bool {
    std::process::Command::new(program)
        .args(args)
        .arg(home)
        .status()
        .is_ok_and(|status| status.success())
}

#[allow(clippy::print_stdout)]
pub fn skipped(why: &str) {
    println!("SKIPPED: {why}");
}

/// Runs a test with its home on a file system of its own.
async fn on_own_disk<F: Future<Output = ()> + Send + 'static>(
    options: &str,
    test: impl FnOnce(Arc<tempfile::TempDir>) -> F,
) {
    let home = Arc::new(tempfile::tempdir().unwrap());
    if !ran("mount", &["-t", "tmpfs", "-o", options, "commsd-test"], home.path()) {
        skipped("a small file system cannot be mounted here");
        return;
    }
    let result = tokio::spawn(test(Arc::clone(&home))).await;
    let unmounted = ran("umount", &["-l"], home.path());
    result.unwrap();
    assert!(unmounted);
}

fn shell_agent(name: &str) -> AttachParams {
    AttachParams {
        harness: "cli".to_owned().try_into().unwrap(),
        cwd: "/".into(),
        pid: 1,
        key: Some(name.to_owned().try_into().unwrap()),
        name: None,
        ephemeral: None,
        project_room: None,
        harness_pid: None,
    }
}

#[tokio::test]
async fn a_full_disk_loses_no_key_and_no_agent() {
    on_own_disk("size=512k,mode=0700", full_disk).await;
}

#[tokio::test]
async fn a_home_that_becomes_read_only_stops_nothing_but_writing() {
    on_own_disk("size=16m,mode=0700", read_only_home).await;
}

async fn read_only_home(home: Arc<tempfile::TempDir>) {
    let daemon = Daemon::start_with(Arc::clone(&home), Ports::free(), &[]).await;
    let (mut alice, mut bob) = (daemon.agent("alice").await, daemon.agent("bob").await);
    alice.befriend(&mut bob).await;
    // The daemon has files open for writing, so the file system itself cannot become read-only:
    // its place in the tree does.
    let place = home.path().to_str().unwrap().to_owned();
    assert!(ran("mount", &["--bind", &place], home.path()));
    assert!(ran("mount", &["-o", "remount,bind,ro"], home.path()));
    // A new identity cannot be made, and the answer says why.
    let (client, _events) = Client::connect(&daemon.socket(), "test").await.unwrap();
    let error = client.call(shell_agent("carol")).await.unwrap_err();
    assert!(error.message.to_lowercase().contains("read-only"), "{error:?}");
    // Those who are here are served.
    alice.dm("bob", "still here", None).await;
    bob.wait_dm("still here").await;
    assert!(ran("umount", &[], home.path()));
    daemon.agent("carol").await;
}

#[tokio::test]
async fn half_a_handshake_at_every_door_keeps_nobody_out() {
    let ports = Ports::free();
    let one = Daemon::start(ports).await;
    one.event("port_held").await;
    let alice = one.agent("alice").await;
    let data_port = one.event("agent_added").await["data_port"].as_u64().unwrap() as u16;
    // The head of a TLS record that promises a ClientHello, and no more.
    let mut open = Vec::new();
    for _ in 0..100 {
        for port in [ports.tcp, data_port] {
            let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
            stream.write_all(&[0x16, 3, 1, 2, 0]).unwrap();
            open.push(stream);
        }
    }
    let two = Daemon::start(ports).await;
    two.has_met(&alice.id).await;
    // Each is closed when its time is up.
    for mut stream in open {
        stream.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
        // A reset ends it as well as an orderly close.
        if let Err(error) = stream.read_to_end(&mut Vec::new()) {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "a door was left open");
        }
    }
}

async fn full_disk(home: Arc<tempfile::TempDir>) {
    let daemon = Daemon::start_with(Arc::clone(&home), Ports::free(), &[]).await;
    let alice = daemon.agent("alice").await;
    let filler = home.path().join("filler");
    let mut written = 0;
    while std::fs::write(&filler, vec![0_u8; written + 4096]).is_ok() && written < 1 << 20 {
        written += 4096;
    }
    // A new identity cannot be stored: refused, and nothing half made is left.
    let (client, _events) = Client::connect(&daemon.socket(), "test").await.unwrap();
    let error = client.call(shell_agent("bob")).await.unwrap_err();
    assert!(error.message.to_lowercase().contains("space"), "{error:?}");
    assert!(!home.path().join("agent-comms/identity-cli--bob.json").exists());
    // Who is here goes on; what cannot be kept is told.
    let room = |name: &str| RoomCreateParams {
        name: name.into(),
        r#type: None,
        description: Some("x".repeat(4000)),
    };
    let mut error = None;
    for n in 0..64 {
        // Until the store has used up what it had of room.
        if let Err(refused) = alice.client.call(room(&format!("r{n}"))).await {
            error = Some(refused);
            break;
        }
    }
    let error = error.expect("the full disk was never felt");
    assert_eq!(error.code, "store_failed", "{error:?}");
    daemon.log.wait(0, "the failed write", |l| l["event"] == "identity_write_failed").await;
    let (_, event) =
        daemon.log.wait(0, "the failed commit", |l| l["event"] == "store_unwritable").await;
    assert_eq!(event["code"], "store_no_space");
    let ill = |status: &Status| status.health.iter().any(|h| h.code == "store_unwritable");
    assert!(ill(&daemon.status().await));
    std::fs::remove_file(&filler).unwrap();
    // It goes on by itself, and nothing that was said before is forgotten.
    let bob = daemon.agent("bob").await;
    assert_ne!(bob.id, alice.id);
    alice.client.call(room("after")).await.unwrap();
    assert!(!ill(&daemon.status().await));
    let id = alice.id.clone();
    daemon.stop().await;
    let daemon = Daemon::start_with(home, Ports::free(), &[]).await;
    let alice = daemon.agent("alice").await;
    assert_eq!(alice.id, id, "the key was never lost");
    let rooms = alice.client.call(WhoamiParams {}).await.unwrap().rooms;
    assert!(rooms.iter().any(|room| room.ends_with("/after")), "{rooms:?}");
}
