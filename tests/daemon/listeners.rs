//! Listeners for other machines, and what their policies keep whoever comes by them from.

use commsd::api::client::Client;
use commsd::api::types::{
    ListenPolicy, MeshConnectParams, MeshInterfacesParams, MeshListenParams, MeshListener,
    MeshListenersParams, MeshTraceParams, MeshUnlistenParams, PendingKind, TrustAddParams,
    VaultRequestParams, VaultShareParams,
};
use serde_json::Value;
use tokio::process::Command;

use crate::acp_mesh::{call, order, works};
use crate::daemon::{Agent, Daemon, Ports};
use crate::hub::home_with;

async fn listen(client: &Client, policy: ListenPolicy) -> MeshListener {
    let host = "127.0.0.1".to_owned();
    client.call(MeshListenParams { host, port: None, policy: Some(policy) }).await.unwrap()
}

/// Two daemons, the second one let in by a listener of the first with this policy; both know the
/// other's agent as far as the policy lets them.
async fn connected(policy: ListenPolicy) -> (Daemon, Agent, Daemon, Agent) {
    connected_to("", policy).await
}

/// As [`connected`], and this is the configuration of the first.
async fn connected_to(config: &str, policy: ListenPolicy) -> (Daemon, Agent, Daemon, Agent) {
    let one = Daemon::start_with(home_with(config), Ports::free(), &[]).await;
    let two = Daemon::start(Ports::free()).await;
    let (mut alice, bob) = (one.agent("alice").await, two.agent("bob").await);
    let listener = listen(&alice.client, policy).await;
    assert!(!listener.default && listener.policy == policy && listener.port != 0);
    let connect = MeshConnectParams { host: listener.host, port: listener.port };
    bob.client.call(connect).await.unwrap();
    alice.wait_kind("connection_request").await;
    let pending = alice.pending(PendingKind::Mesh).await;
    alice.accept(&pending[0]).await;
    let one_id = one.device().await;
    two.has_met(&one_id).await;
    let alice_id = alice.id.clone();
    let seen = move |l: &Value| l["event"] == "agent_seen" && l["agent"] == alice_id.as_str();
    two.log.wait(0, "alice by gossip", seen).await;
    (one, alice, two, bob)
}

async fn trace(from: &Agent, to: &Agent) -> Result<(), String> {
    let trace = MeshTraceParams { target: to.id.clone(), timeout_ms: Some(2_000) };
    from.client.call(trace).await.map(|_| ()).map_err(|error| error.code)
}

fn has_seen(daemon: &Daemon, agent: &Agent) -> bool {
    let text = daemon.log.text();
    text.lines().any(|line| line.contains("agent_seen") && line.contains(&agent.id))
}

#[tokio::test]
async fn who_may_observe_hears_who_is_here_and_reaches_nobody() {
    let (one, alice, _two, bob) = connected(ListenPolicy::Observe).await;
    assert_eq!(trace(&bob, &alice).await, Err("timeout".into()));
    assert!(!has_seen(&one, &bob), "{}", one.log.text());
    assert!(alice.pending(PendingKind::Dm).await.is_empty());
}

#[tokio::test]
async fn a_gateway_lets_only_those_through_whom_the_user_trusts() {
    let (one, mut alice, two, mut bob) = connected(ListenPolicy::Gateway).await;
    assert_eq!(trace(&bob, &alice).await, Err("timeout".into()));
    assert!(!has_seen(&one, &bob), "{}", one.log.text());
    let refused = call(&two, order(&one.device().await, 100)).await.unwrap_err();
    assert!(refused.message.contains("not_permitted"), "{refused:?}");
    let trust = TrustAddParams { id: bob.id.clone(), kind: None };
    alice.client.call(trust).await.unwrap();
    let bob_id = bob.id.clone();
    let seen = move |l: &Value| l["event"] == "agent_seen" && l["agent"] == bob_id.as_str();
    one.log.wait(0, "bob by gossip", seen).await;
    bob.befriend(&mut alice).await;
}

#[tokio::test]
async fn rooms_only_is_rooms_and_nothing_that_is_shared_beside_them() {
    let (one, mut alice, two, mut bob) = connected(ListenPolicy::RoomsOnly).await;
    bob.befriend(&mut alice).await;
    let vault = one.home.path().join("vault");
    std::fs::create_dir(&vault).unwrap();
    let made = Command::new(env!("CARGO_BIN_EXE_commsd"))
        .args(["vault", "--workspace"])
        .arg(&vault)
        .arg("init")
        .output()
        .await
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    let (operator, _events) = Client::connect(&one.socket(), "test").await.unwrap();
    let share = VaultShareParams {
        path: vault.to_string_lossy().into_owned(),
        name: "notes".into(),
        mode: None,
    };
    operator.call(share).await.unwrap();
    let request = VaultRequestParams {
        at: format!("{}/notes", alice.id),
        mode: None,
        valid_until: None,
        wait: None,
    };
    let refused = bob.client.call(request).await.unwrap_err();
    assert!(refused.message.contains("not_permitted"), "{refused:?}");
    assert!(alice.pending(PendingKind::Capability).await.is_empty());
    let refused = call(&two, order(&alice.id, 100)).await.unwrap_err();
    assert!(refused.message.contains("not_permitted"), "{refused:?}");
}

#[tokio::test]
async fn a_machine_that_was_let_in_may_order_work() {
    let config = works("cat", "\"peers\"");
    let (one, _alice, two, _bob) = connected_to(&config, ListenPolicy::Full).await;
    one.event("acp_office_opened").await;
    let done = call(&two, order("alice", 15_000)).await.unwrap();
    assert_eq!(done["status"], "SETTLED", "{done}\n{}\n{}", one.log.text(), two.log.text());
}

#[tokio::test]
async fn listeners_are_opened_listed_and_closed() {
    let daemon = Daemon::start(Ports::free()).await;
    daemon.event("port_held").await;
    let alice = daemon.agent("alice").await;
    let listener = listen(&alice.client, ListenPolicy::Full).await;
    let list = alice.client.call(MeshListenersParams {}).await.unwrap().listeners;
    assert_eq!(list.iter().map(|l| l.default).collect::<Vec<_>>(), [true, false]);
    assert_eq!(list[1], listener);
    assert_eq!(list[0].port, daemon.ports.tcp);
    // The port is taken until it is closed.
    let taken =
        MeshListenParams { host: listener.host.clone(), port: Some(listener.port), policy: None };
    assert_eq!(alice.client.call(taken.clone()).await.unwrap_err().code, "port_in_use");
    let unlisten = |id: &str| MeshUnlistenParams { id: id.into() };
    for stays in ["default", "nothing"] {
        let error = alice.client.call(unlisten(stays)).await.unwrap_err();
        assert_eq!(error.code, "listener_not_found");
    }
    alice.client.call(unlisten(&listener.id)).await.unwrap();
    assert_eq!(alice.client.call(MeshListenersParams {}).await.unwrap().listeners.len(), 1);
    let connect = MeshConnectParams { host: listener.host.clone(), port: listener.port };
    let closed = async {
        while alice.client.call(connect.clone()).await.unwrap_err().code != "connect_failed" {}
    };
    tokio::time::timeout(crate::bench::HANG, closed).await.expect("the port is free");
    let bad = MeshListenParams { host: "here".into(), port: None, policy: None };
    assert_eq!(alice.client.call(bad).await.unwrap_err().code, "invalid_params");
    for _ in 0..16 {
        listen(&alice.client, ListenPolicy::Observe).await;
    }
    let more = MeshListenParams { host: "127.0.0.1".into(), port: None, policy: None };
    assert_eq!(alice.client.call(more).await.unwrap_err().code, "too_many_listeners");
    let interfaces = alice.client.call(MeshInterfacesParams {}).await.unwrap().interfaces;
    assert!(interfaces.iter().any(|i| i.internal && i.address == "127.0.0.1"));
}
