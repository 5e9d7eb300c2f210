//! Daemons as processes: they find each other, talk, lose and regain each other.

use std::io::Write as _;
use std::net::TcpListener;
use std::sync::Arc;

use commsd::api::client::Client;
use commsd::api::types::{
    AgentsParams, AttachParams, DeliveryStatus, Health, PendingKind, RoomCreateParams,
    RoomHistoryParams, RoomJoinParams, RoomsParams, SendParams,
};

use crate::daemon::{Agent, Daemon, Ports, command};

#[tokio::test]
async fn two_daemons_meet_and_their_agents_talk() {
    let ports = Ports::free();
    let (one, two) = tokio::join!(Daemon::start(ports), Daemon::start(ports));
    let mut alice = one.agent("alice").await;
    let mut bob = two.agent("bob").await;
    tokio::join!(one.has_met(&bob.id), two.has_met(&alice.id));
    alice.befriend(&mut bob).await;

    let room = alice
        .client
        .call(RoomCreateParams { name: "Common Room".into(), r#type: None, description: None })
        .await
        .unwrap();
    assert_eq!(room.name, "Common-Room");
    // The record is broadcast at once; the directory has it as well.
    let joined = bob.client.call(RoomJoinParams { room: room.path.clone() }).await.unwrap();
    assert_eq!(joined.members.len(), 2);
    alice.wait_kind("member_joined").await;
    bob.wait("who is here", |e| {
        e.kind() == "room_members" && e.body["members"].as_array().is_some_and(|m| m.len() == 2)
    })
    .await;
    let sent = alice
        .client
        .call(SendParams {
            room: room.path.clone(),
            text: "hello".to_owned().try_into().unwrap(),
            timing: None,
            reply_to: None,
        })
        .await
        .unwrap();
    assert_eq!(sent.deliveries[0].status, DeliveryStatus::Delivered);
    let message = bob.wait_kind("room_message").await;
    assert_eq!(message.body["message"]["content"], "hello");
    assert_eq!(message.body["message"]["from"], alice.id.as_str());
    // Reading is acknowledged, and only then.
    bob.ack(&message).await;
    alice
        .wait("a receipt", |e| {
            e.kind() == "delivery_status" && e.body["delivery"]["status"] == "read"
        })
        .await;
    // Exactly one holds the port.
    assert_eq!(
        [one.status().await.port.held, two.status().await.port.held].iter().filter(|h| **h).count(),
        1
    );
}

#[tokio::test]
async fn messages_read_together_are_told_of_together() {
    let daemon = Daemon::start(Ports::free()).await;
    let mut alice = daemon.agent("alice").await;
    let mut bob = daemon.agent("bob").await;
    alice.befriend(&mut bob).await;
    let mut sent = Vec::new();
    let mut last = None;
    for text in ["one", "two", "three"] {
        sent.push(alice.dm(&bob.id, text, None).await.message_id);
        last = Some(bob.wait_dm(text).await);
    }
    bob.ack(&last.unwrap()).await;
    let read = alice.wait_kind("messages_read").await;
    let ids: Vec<&str> =
        read.body["messageIds"].as_array().unwrap().iter().map(|id| id.as_str().unwrap()).collect();
    // Before them the one that asked for the conversation.
    assert_eq!(ids[1..], sent);
    assert_eq!(read.body["agent"], bob.id.as_str());
    assert_eq!(read.body["agentName"], "bob");
    // One alone is told of as the reference does, and none of the three again.
    alice.ack(&read).await;
    let message = bob.dm(&alice.id, "and back", None).await.message_id;
    let came = alice.wait_dm("and back").await;
    alice.ack(&came).await;
    let status = bob
        .wait("a receipt", |e| {
            e.kind() == "delivery_status" && e.body["messageId"] == message.as_str()
        })
        .await;
    assert_eq!(status.body["delivery"]["status"], "read");
    assert_eq!(alice.count_seen(|e| e.kind() == "messages_read"), 0);
}

#[tokio::test]
async fn a_killed_holder_is_followed_and_its_agent_gets_what_it_missed() {
    let ports = Ports::free();
    let one = Daemon::start(ports).await;
    one.event("port_held").await;
    let two = Daemon::start(ports).await;
    two.event("port_joined").await;
    let mut alice = one.agent("alice").await;
    let mut bob = two.agent("bob").await;
    tokio::join!(one.has_met(&bob.id), two.has_met(&alice.id));
    alice.befriend(&mut bob).await;
    let alice_id = alice.id.clone();
    drop(alice);

    let mark = two.log.len();
    let home = one.kill().await;
    two.log.wait(mark, "the port", |l| l["event"] == "port_held").await;
    let (mark, _) = two
        .log
        .wait(mark, "alice's end", |l| {
            l["event"] == "peer_down" && l["device"] == alice_id.as_str()
        })
        .await;
    let sent = bob.dm(&alice_id, "while you were away", None).await;
    assert_eq!(sent.deliveries[0].status, DeliveryStatus::Queued);
    assert_eq!(sent.deliveries[0].reason.as_deref(), Some("not_connected"));

    // Back on other ports with the same identity.
    let one = Daemon::start_with(home, ports, &[]).await;
    one.event("port_joined").await;
    let mut alice = one.agent("alice").await;
    assert_eq!(alice.id, alice_id);
    two.log
        .wait(mark, "alice again", |l| l["event"] == "peer_up" && l["device"] == alice_id.as_str())
        .await;
    alice.wait_dm("while you were away").await;
    bob.wait("the outcome", |e| {
        e.kind() == "delivery_status"
            && e.body["delivery"]["status"] == "delivered"
            && e.body["messageId"] == sent.message_id.as_str()
    })
    .await;
    let again = |e: &commsd::api::types::Event| {
        e.kind() == "dm" && e.body["message"]["content"] == "while you were away"
    };
    assert_eq!(alice.count_seen(again), 0, "shown once");
    // What was shown before, and never acknowledged, has outlived the kill.
    alice.wait_dm("you may").await;
}

#[tokio::test]
async fn a_message_reaches_its_recipient_though_its_sender_is_gone() {
    let ports = Ports::free();
    let one = Daemon::start(ports).await;
    let two = Daemon::start(ports).await;
    let three = Daemon::start(ports).await;
    let mut alice = one.agent("alice").await;
    let mut bob = two.agent("bob").await;
    for (daemon, other) in [(&one, &bob.id), (&three, &bob.id), (&three, &alice.id)] {
        daemon
            .log
            .wait(0, "everybody", |l| l["event"] == "peer_up" && l["device"] == other.as_str())
            .await;
    }
    alice.befriend(&mut bob).await;
    let bob_id = bob.id.clone();
    drop(bob);
    let home = two.kill().await;
    one.log
        .wait(0, "bob's end", |l| l["event"] == "peer_down" && l["device"] == bob_id.as_str())
        .await;
    // The third daemon has told ours that it is one: it takes copies. Debug events tell nothing
    // here, so the copy is what its status counts.
    let sent = alice.dm(&bob_id, "left for you", None).await;
    assert_eq!(sent.deliveries[0].status, DeliveryStatus::Queued);
    one.stop().await;
    let two = Daemon::start_with(home, ports, &[]).await;
    let mut bob = two.agent("bob").await;
    bob.wait_dm("left for you").await;
    three
        .log
        .wait(0, "the hand-over", |l| {
            l["event"] == "copy_handed_over" && l["recipient"] == bob_id.as_str()
        })
        .await;
    let again = |e: &commsd::api::types::Event| e.body["message"]["content"] == "left for you";
    assert_eq!(bob.count_seen(again), 0, "shown once");
}

#[tokio::test]
async fn a_stop_hands_the_port_over_and_says_goodbye() {
    let ports = Ports::free();
    let one = Daemon::start(ports).await;
    one.event("port_held").await;
    let two = Daemon::start(ports).await;
    two.event("port_joined").await;
    let mut alice = one.agent("alice").await;
    let mut bob = two.agent("bob").await;
    tokio::join!(one.has_met(&bob.id), two.has_met(&alice.id));
    // Each has the other's record once messages have gone both ways.
    alice.befriend(&mut bob).await;
    let (code, log) = one.stop().await;
    assert_eq!(code, Some(0), "{}", log.text());
    two.event("port_held").await;
    log.wait(0, "the successor", |l| l["event"] == "port_released").await;
    log.wait(0, "the end", |l| l["event"] == "stopped").await;
    let agents = bob.client.call(AgentsParams {}).await.unwrap().agents;
    let seen = agents.iter().find(|agent| agent.id == alice.id);
    let seen =
        seen.unwrap_or_else(|| panic!("alice is still listed: {agents:?}\n{}", two.log.text()));
    assert_eq!(seen.status.as_str(), "offline");
}

#[tokio::test]
async fn something_silent_at_the_port_keeps_nobody_apart() {
    let ports = Ports::free();
    let silent = TcpListener::bind(("127.0.0.1", ports.tcp)).unwrap();
    let (one, two) = tokio::join!(Daemon::start(ports), Daemon::start(ports));
    let two_id = two.device().await;
    one.log
        .wait(0, "the other", |l| l["event"] == "peer_up" && l["device"] == two_id.as_str())
        .await;
    // Without first contact there is no other way.
    let home = Arc::new(tempfile::tempdir().unwrap());
    let alone = Daemon::start_with(home, ports, &["--no-first-contact"]).await;
    alone.log.wait(0, "a complaint", |l| l["event"] == "port_unavailable").await;
    let todo = |health: &[Health]| {
        let found = health.iter().find(|h| h.code == "port_occupied").unwrap();
        found.todo.clone().unwrap()
    };
    assert!(todo(&alone.status().await.health).contains("no peer is found meanwhile"));
    assert!(todo(&one.status().await.health).contains("found by first contact meanwhile"));
    // Nothing answered at the port, and the operator is told.
    one.log.wait(0, "a complaint", |l| l["event"] == "port_unavailable").await;
    let health = one.status().await.health;
    assert!(health.iter().any(|h| h.code == "port_occupied"), "{health:?}");
    // Freed, it is taken.
    drop(silent);
    tokio::select! {
        _ = one.event("port_held") => {}
        _ = two.event("port_held") => {}
    }
}

#[tokio::test]
async fn without_udp_the_port_is_enough() {
    let ports = Ports::free();
    let _taken = std::net::UdpSocket::bind(("0.0.0.0", ports.udp)).unwrap();
    let (one, two) = tokio::join!(Daemon::start(ports), Daemon::start(ports));
    let two_id = two.device().await;
    one.log
        .wait(0, "the other", |l| l["event"] == "peer_up" && l["device"] == two_id.as_str())
        .await;
    let health = one.status().await.health;
    assert!(health.iter().any(|h| h.code == "first_contact_unavailable"), "{health:?}");
}

#[tokio::test]
async fn a_room_is_meant_by_any_spelling_of_its_name_and_strangers_do_not_make_it_ambiguous() {
    let daemon = Daemon::start(Ports::free()).await;
    let (alice, bob) = (daemon.agent("alice").await, daemon.agent("bob").await);
    let create = || RoomCreateParams { name: "my room".into(), r#type: None, description: None };
    let hers = alice.client.call(create()).await.unwrap();
    let his = bob.client.call(create()).await.unwrap();
    let send = |room: &str| SendParams {
        room: room.into(),
        text: "x".to_owned().try_into().unwrap(),
        timing: None,
        reply_to: None,
    };
    for name in ["my room", "my-room"] {
        alice.client.call(send(name)).await.unwrap();
        // Whoever wants to get in has to say which.
        let join = RoomJoinParams { room: name.into() };
        assert_eq!(alice.client.call(join).await.unwrap_err().code, "ambiguous_room");
    }
    let told = |room: &str| RoomHistoryParams { room: room.into(), since: None, limit: None };
    assert_eq!(alice.client.call(told(&hers.path)).await.unwrap().messages.len(), 2);
    assert_eq!(bob.client.call(told(&his.path)).await.unwrap().messages.len(), 0);
    alice.client.call(RoomJoinParams { room: his.path }).await.unwrap();
    assert_eq!(alice.client.call(send("my room")).await.unwrap_err().code, "ambiguous_room");
}

#[tokio::test]
async fn a_room_is_meant_by_its_owner_and_its_name() {
    let daemon = Daemon::start(Ports::free()).await;
    let (alice, bob, carol) =
        tokio::join!(daemon.agent("alice"), daemon.agent("bob"), daemon.agent("carol"));
    let create = || RoomCreateParams { name: "the tour".into(), r#type: None, description: None };
    let hers = alice.client.call(create()).await.unwrap();
    let his = bob.client.call(create()).await.unwrap();
    let join = async |room: String| carol.client.call(RoomJoinParams { room }).await;
    assert_eq!(join("the tour".into()).await.unwrap_err().code, "ambiguous_room");
    // As lists show it, by the beginning of the id; and by name.
    let joined = join(format!("{}/the-tour", &alice.id[..12])).await.unwrap();
    assert_eq!(joined.path, hers.path);
    let joined = join("bob/the tour".into()).await.unwrap();
    assert_eq!(joined.path, his.path);
    for wrong in [format!("{}/tour", &bob.id[..12]), format!("{}/the-tour", &bob.id[..7])] {
        assert_eq!(join(wrong).await.unwrap_err().code, "room_not_found");
    }
}

#[tokio::test]
async fn a_second_daemon_in_one_home_says_who_runs() {
    let ports = Ports::free();
    let one = Daemon::start(ports).await;
    let output = command(one.home.path(), ports, &[]).output().await.unwrap();
    assert_eq!(output.status.code(), Some(0));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains(&one.child.id().unwrap().to_string()), "{said}");
    assert!(one.status().await.pid > 0, "the first goes on");
}

#[tokio::test]
async fn a_second_client_of_a_directory_gets_a_slot_of_its_own() {
    let one = Daemon::start(Ports::free()).await;
    let first = Agent::attach(&one.socket(), "mcp", None, one.home.path()).await;
    let second = Agent::attach(&one.socket(), "mcp", None, one.home.path()).await;
    assert_ne!(first.id, second.id);
    let (first_id, second_id) = (first.id.clone(), second.id.clone());
    drop((first, second));
    // Both slots are released, and keep their ids.
    for id in [&first_id, &second_id] {
        one.log
            .wait(0, "its end", |l| l["event"] == "agent_removed" && l["agent"] == id.as_str())
            .await;
    }
    let again = Agent::attach(&one.socket(), "mcp", None, one.home.path()).await;
    assert_eq!(again.id, first_id);
    // Two terminals of one shell agent are one agent.
    let (left, right) = tokio::join!(one.agent("dora"), one.agent("dora"));
    assert_eq!(left.id, right.id);
}

#[tokio::test]
async fn directories_with_one_slot_name_are_not_one_agent() {
    let one = Daemon::start(Ports::free()).await;
    let mut ids: Vec<String> = Vec::new();
    // The second time each finds its own again.
    for directory in ["a/b", "a_b", "a/b", "a_b"] {
        let directory = one.home.path().join(directory);
        std::fs::create_dir_all(&directory).unwrap();
        let from = one.log.len();
        let agent = Agent::attach(&one.socket(), "mcp", None, &directory).await;
        ids.push(agent.id.clone());
        drop(agent);
        let id = ids.last().unwrap().as_str();
        one.log.wait(from, "its end", |l| l["event"] == "agent_removed" && l["agent"] == id).await;
    }
    assert_ne!(ids[0], ids[1]);
    assert_eq!(ids[..2], ids[2..]);
}

#[tokio::test]
async fn names_with_one_slot_name_are_not_one_agent() {
    let one = Daemon::start(Ports::free()).await;
    let _first = one.agent("a/b").await;
    let (client, _events) =
        commsd::api::client::Client::connect(&one.socket(), "test").await.unwrap();
    let error = client
        .call(commsd::api::types::AttachParams {
            harness: "cli".to_owned().try_into().unwrap(),
            cwd: "/".into(),
            pid: 1,
            key: Some("a_b".to_owned().try_into().unwrap()),
            name: None,
            ephemeral: None,
            project_room: None,
            harness_pid: None,
        })
        .await
        .unwrap_err();
    assert_eq!(error.code, "slot_name_taken");
}

#[tokio::test]
async fn a_stranger_with_any_certificate_learns_nothing_private() {
    // A daemon of another home is another user as far as files go, but the same uid: what is kept
    // from it is what only members may see.
    let ports = Ports::free();
    let (one, two) = tokio::join!(Daemon::start(ports), Daemon::start(ports));
    let alice = one.agent("alice").await;
    let bob = two.agent("bob").await;
    tokio::join!(one.has_met(&bob.id), two.has_met(&alice.id));
    for (name, kind) in [
        ("open", commsd::api::types::RoomType::Public),
        ("closed", commsd::api::types::RoomType::Private),
        ("hidden", commsd::api::types::RoomType::Secret),
    ] {
        alice
            .client
            .call(RoomCreateParams { name: name.into(), r#type: Some(kind), description: None })
            .await
            .unwrap();
    }
    let mut bob = bob;
    let mut alice = alice;
    // The conversation comes after the rooms on the same sessions, so their records are there.
    alice.befriend(&mut bob).await;
    let rooms = bob.client.call(RoomsParams {}).await.unwrap().rooms;
    let names: Vec<&str> = rooms.iter().map(|room| room.name.as_str()).collect();
    assert!(names.contains(&"open") && !names.contains(&"hidden"), "{names:?}");
    let secret = format!("{}/_hidden", alice.id);
    let asked = bob.client.call(RoomJoinParams { room: secret }).await.unwrap();
    assert_eq!(asked.status, Some(DeliveryStatus::AwaitingConsent), "its owner decides");
    assert_eq!(alice.pending(PendingKind::Room).await.len(), 1);
}

#[tokio::test]
async fn garbage_on_every_door_leaves_the_daemon_serving() {
    let one = Daemon::start(Ports::free()).await;
    one.event("port_held").await;
    let alice = one.agent("alice").await;
    let data_port = one.event("agent_added").await["data_port"].as_u64().unwrap() as u16;
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut garbage = |len: usize| -> Vec<u8> {
        (0..len)
            .map(|_| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                random.to_le_bytes()[0]
            })
            .collect()
    };
    for round in 0..20 {
        for port in [one.ports.tcp, data_port] {
            let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
            // The peer may close while we still write.
            let _ = stream.write_all(&garbage(round * 97));
        }
        let mut stream = std::os::unix::net::UnixStream::connect(one.socket()).unwrap();
        let _ = stream.write_all(&garbage(round * 97));
        let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        udp.send_to(&garbage(round * 97), ("127.0.0.1", one.ports.udp)).unwrap();
    }
    assert!(alice.client.call(AgentsParams {}).await.unwrap().agents.len() == 1);
    assert!(one.status().await.health.is_empty());
}

#[tokio::test]
async fn bad_places_are_errors_that_say_what_to_do() {
    let ports = Ports::free();
    // A file where the home should be.
    let file = tempfile::NamedTempFile::new().unwrap();
    let output = command(file.path(), ports, &[]).output().await.unwrap();
    assert_ne!(output.status.code(), Some(0));
    assert!(!String::from_utf8_lossy(&output.stderr).trim().is_empty());
    // A key file that others can read.
    let home = Arc::new(tempfile::tempdir().unwrap());
    let one = Daemon::start_with(Arc::clone(&home), ports, &[]).await;
    one.stop().await;
    let key = home.path().join("agent-comms/user-identity.json");
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).unwrap();
    let output = command(home.path(), ports, &[]).output().await.unwrap();
    assert_eq!(output.status.code(), Some(64));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("chmod") && said.contains("user-identity.json"), "{said}");
    // A socket path that no system takes.
    let long = format!("/tmp/{}", "x".repeat(200));
    let output = command(home.path(), ports, &["--socket", &long]).output().await.unwrap();
    assert_eq!(output.status.code(), Some(64));
    assert!(String::from_utf8_lossy(&output.stderr).contains("socket path"));
}

#[tokio::test]
async fn a_connection_that_detaches_is_nobody_and_may_become_somebody_else() {
    let one = Daemon::start(Ports::free()).await;
    let alice = one.agent("alice").await;
    let whoami = commsd::api::types::WhoamiParams {};
    alice.client.call(commsd::api::types::DetachParams {}).await.unwrap();
    let error = alice.client.call(whoami).await.unwrap_err();
    assert_eq!(error.code, "not_attached");
    // Again is no mistake; and a shell agent stays in service without a client.
    alice.client.call(commsd::api::types::DetachParams {}).await.unwrap();
    let attach = |name: &str| commsd::api::types::AttachParams {
        harness: "cli".to_owned().try_into().unwrap(),
        cwd: "/".into(),
        pid: 1,
        key: Some(name.to_owned().try_into().unwrap()),
        name: None,
        ephemeral: None,
        project_room: None,
        harness_pid: None,
    };
    let bob = alice.client.call(attach("bob")).await.unwrap();
    assert_ne!(bob.agent, alice.id);
    let agents = alice.client.call(AgentsParams {}).await.unwrap().agents;
    let mut names: Vec<&str> = agents.iter().map(|agent| agent.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["alice", "bob"]);
}

#[tokio::test]
async fn a_directory_is_absolute_and_real_and_what_it_is_called_is_its_own_business() {
    let daemon = Daemon::start(Ports::free()).await;
    let attach = async |cwd: &str, name: Option<&str>| {
        let (client, _) = Client::connect(&daemon.socket(), "test").await.unwrap();
        let params = AttachParams {
            harness: "hx".to_owned().try_into().unwrap(),
            cwd: cwd.into(),
            pid: std::process::id(),
            key: None,
            name: name.map(str::to_owned),
            ephemeral: None,
            project_room: None,
            harness_pid: None,
        };
        client.call(params).await
    };
    let long = format!("/{}", "x/".repeat(3000));
    for cwd in ["", "rel", "./rel", "/a/../b", "/a/./b", "/a//b", "/a/", "//", "/a\0b", &long] {
        let error = attach(cwd, None).await.unwrap_err();
        assert_eq!(error.code, "invalid_params", "{cwd:?}: {error:?}");
    }
    for name in ["\u{202e}", "a\u{200b}b", "\u{200d}"] {
        let error = attach("/srv/named", Some(name)).await.unwrap_err();
        assert_eq!(error.code, "invalid_params", "{name:?}: {error:?}");
    }
    let odd = attach("/srv/\u{202e}\x1b[31m \u{9b}x", None).await.unwrap();
    assert_eq!(odd.slot, "hx--_srv_<202e><1b>[31m <9b>x");
    let files = std::fs::read_dir(daemon.home.path().join("agent-comms")).unwrap();
    for file in files {
        let name = file.unwrap().file_name().into_string().unwrap();
        let hidden = |c: char| c.is_control() || c == '\u{202e}';
        assert!(!name.contains(hidden), "{name:?}");
    }
    assert_eq!(attach("/", None).await.unwrap().slot, "hx--_");
}
