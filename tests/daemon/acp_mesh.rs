//! Work that one daemon orders from another over the mesh, with no relay anywhere: found by name,
//! admitted or not, through restarts.

use commsd::api::acp::{AcpCall, DelegateTask, ListTasks, Work};
use commsd::api::client::{Client, acp};
use commsd::api::types::{ApiError, PetnameSetParams};
use serde_json::{Value, json};

use crate::daemon::{Agent, Daemon, Ports};
use crate::hub::home_with;

/// The configuration of a daemon that works with a command and asks nobody before it accepts.
pub fn works(cmd: &str, admit: &str) -> String {
    format!(
        "acp-worker = \"command\"\nacp-worker-cmd = {cmd:?}\nacp-worker-auto-accept = true\n\
         acp-worker-isolation = \"subprocess\"\nacp-admit = {admit}\n"
    )
}

pub async fn call(daemon: &Daemon, call: AcpCall) -> Result<Value, ApiError> {
    acp::call(&daemon.socket(), "test", call, |_| {}).await
}

/// An order that asks nobody, waited for so long.
pub fn order(to: &str, wait_ms: u64) -> AcpCall {
    AcpCall::DelegateTask(DelegateTask {
        to: to.into(),
        work: Work {
            relay: None,
            title: "repeat it".into(),
            description: String::new(),
            input: json!({ "n": [1, "ä"] }),
            input_schema: None,
            output_schema: None,
            deadline_at: None,
            budget: None,
            sandbox_policy: Some(json!({ "isolation": "subprocess" })),
            tools: Vec::new(),
            tool_uses: None,
            redelegation: None,
            parent_task_id: None,
            auto_approve: true,
            wait_ms: Some(wait_ms),
        },
    })
}

async fn tasks(daemon: &Daemon) -> Vec<Value> {
    let list = call(daemon, AcpCall::ListTasks(ListTasks::default())).await.unwrap();
    list["tasks"].as_array().unwrap().clone()
}

/// Picks the log's word that a task has got to this state.
fn is_at(state: &str) -> impl Fn(&Value) -> bool {
    move |line| line["event"] == "acp_entry" && line["state"] == state
}

/// A requester and a worker that have met, and the agent that the worker is known by.
struct Pair {
    one: Daemon,
    two: Daemon,
    bob: Agent,
}

impl Pair {
    async fn new(config: &str) -> Self {
        let ports = Ports::free();
        let (one, two) =
            tokio::join!(Daemon::start(ports), Daemon::start_with(home_with(config), ports, &[]));
        let bob = two.agent("bob").await;
        let device = one.device().await;
        tokio::join!(one.has_met(&bob.id), two.has_met(&device));
        two.event("acp_office_opened").await;
        Self { one, two, bob }
    }
}

#[tokio::test]
async fn two_daemons_settle_a_task_by_name_without_a_relay() {
    let Pair { one, two, bob } = Pair::new(&works("cat", "\"peers\"")).await;
    let done = call(&one, order("bob", 15_000)).await.unwrap();
    assert_eq!(done["status"], "SETTLED", "{done}\n{}\n{}", one.log.text(), two.log.text());
    assert_eq!(done["deliverable"], json!({ "n": [1, "ä"] }));
    assert_eq!(done["audit"]["status"], "VALID");
    let worker = call(&two, AcpCall::Whoami).await.unwrap();
    assert_eq!((&done["peer"], &worker["relays"]), (&worker["did"], &json!([])));
    let theirs = tasks(&two).await;
    assert_eq!((&theirs[0]["taskId"], &theirs[0]["head"]), (&done["taskId"], &done["head"]));

    // By a petname, and by an id.
    let (client, _events) = Client::connect(&one.socket(), "test").await.unwrap();
    let named = PetnameSetParams { device: bob.id.clone(), name: "the worker".into() };
    client.call(named).await.unwrap();
    for name in ["the worker", &bob.id, &bob.id[..12], &two.device().await] {
        let done = call(&one, order(name, 15_000)).await.unwrap();
        assert_eq!(done["status"], "SETTLED", "{name}: {done}");
        assert_eq!(done["peer"], worker["did"]);
    }
    // Nobody, and somebody who takes part in no tasks.
    let error = call(&one, order("nobody", 100)).await.unwrap_err();
    assert_eq!(error.code, "BAD_FIELD");
    assert!(error.message.contains("nobody"), "{error:?}");
    assert!(error.todo.unwrap().contains("commsd agents"));
    let error = call(&two, order(&"0".repeat(64), 100)).await.unwrap_err();
    assert_eq!(error.code, "RELAY_UNREACHABLE");
    assert!(error.todo.unwrap().contains("list of agents"));
}

#[tokio::test]
async fn a_peer_without_an_office_is_told_to_open_one() {
    let ports = Ports::free();
    let (one, two) = tokio::join!(Daemon::start(ports), Daemon::start(ports));
    let bob = two.agent("bob").await;
    let device = one.device().await;
    tokio::join!(one.has_met(&bob.id), two.has_met(&device));
    let error = call(&one, order(&bob.id, 5_000)).await.unwrap_err();
    assert_eq!(error.code, "RELAY_UNREACHABLE", "{error:?}");
    assert!(error.todo.as_ref().unwrap().contains("acp-worker"), "{error:?}");
}

#[tokio::test]
async fn a_requester_that_restarts_in_the_middle_gets_its_result() {
    let gate = tempfile::tempdir().unwrap();
    let open = gate.path().join("open");
    let script = format!("sh -c 'until [ -e {} ]; do sleep 0.05; done; cat'", open.display());
    let Pair { one, two, bob: _bob } = Pair::new(&works(&script, "\"peers\"")).await;
    let ports = one.ports;
    let begun = call(&one, order("bob", 1_000)).await.unwrap();
    one.log.wait(0, "the start", is_at("IN_PROGRESS")).await;
    let home = one.kill().await;
    let one = Daemon::start_with(home, ports, &[]).await;
    std::fs::write(&open, "").unwrap();
    one.log.wait(0, "the settlement", is_at("SETTLED")).await;
    two.log.wait(0, "the settlement", is_at("SETTLED")).await;
    let (ours, theirs) = (tasks(&one).await, tasks(&two).await);
    assert_eq!(ours[0]["taskId"], begun["taskId"]);
    assert_eq!((&ours[0]["head"], &ours[0]["status"]), (&theirs[0]["head"], &theirs[0]["status"]));
}

#[tokio::test]
async fn a_strangers_proposal_is_not_answered_until_it_is_admitted() {
    let Pair { one, two, bob: _bob } = Pair::new(&works("cat", "\"none\"")).await;
    let ports = two.ports;
    // The envelope is taken, and nothing comes of it.
    let told = call(&one, order("bob", 1_500)).await.unwrap();
    assert_eq!(told["status"], "PROPOSING");
    assert!(tasks(&two).await.is_empty());
    assert!(!one.log.text().contains("acp_undelivered"), "{}", one.log.text());
    assert!(!two.log.text().contains("acp_envelope_refused"), "{}", two.log.text());

    // Admitted by its did it is: the same proposal, sent again by its log.
    let did = call(&one, AcpCall::Whoami).await.unwrap()["did"].as_str().unwrap().to_owned();
    let home = two.kill().await;
    std::fs::write(home.path().join("config.toml"), works("cat", &format!("[{did:?}]"))).unwrap();
    let two = Daemon::start_with(home, ports, &[]).await;
    one.log.wait(0, "the settlement", is_at("SETTLED")).await;
    assert_eq!(tasks(&two).await[0]["taskId"], told["taskId"]);
}
