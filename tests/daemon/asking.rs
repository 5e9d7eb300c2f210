//! What waits for an agent's yes or no, and by what names rooms, agents and requests are meant.

use commsd::api::client::Client;
use commsd::api::types::{
    AcceptParams, ActionParams, AgentsParams, DeliveryStatus, PendingKind, PetnameClearParams,
    PetnameSetParams, RejectParams, RoomCreateParams, RoomHistoryParams, RoomInviteParams,
    RoomType, WhoamiParams,
};
use serde_json::{Value, json};

use crate::daemon::{Agent, Daemon, Ports};

/// A private or secret room.
async fn create(agent: &Agent, name: &str, kind: RoomType) -> String {
    let create = RoomCreateParams { name: name.into(), r#type: Some(kind), description: None };
    agent.client.call(create).await.unwrap().path
}

async fn invite(agent: &Agent, room: &str, whom: &Agent) {
    let invite = RoomInviteParams { room: room.into(), agent: whom.id.clone() };
    agent.client.call(invite).await.unwrap();
}

async fn act(agent: &Agent, action: Value) -> (String, bool) {
    let Value::Object(action) = action else { panic!("{action}") };
    let result = agent.client.call(ActionParams(action)).await.unwrap();
    (result.content, result.is_error)
}

fn yes(id: &str) -> AcceptParams {
    AcceptParams { id: Some(id.into()), room: None, requester: None, terms: None }
}

async fn rooms_of(agent: &Agent) -> Vec<String> {
    agent.client.call(WhoamiParams {}).await.unwrap().rooms
}

#[tokio::test]
async fn invitations_are_listed_until_they_are_answered() {
    let daemon = Daemon::start(Ports::free()).await;
    let ports = daemon.ports;
    let (alice, bob) = (daemon.agent("alice").await, daemon.agent("bob").await);
    let den = create(&alice, "den", RoomType::Private).await;
    let attic = create(&alice, "attic", RoomType::Secret).await;
    let cellar = create(&alice, "cellar", RoomType::Private).await;
    for room in [&den, &attic, &cellar] {
        invite(&alice, room, &bob).await;
    }
    // Also after a restart: they are kept.
    let alice_id = alice.id.clone();
    drop((alice, bob));
    let home = daemon.kill().await;
    let daemon = Daemon::start_with(home, ports, &[]).await;
    let mut alice = daemon.agent("alice").await;
    let bob = daemon.agent("bob").await;
    let listed = bob.pending(PendingKind::Invite).await;
    let ids: Vec<&str> = listed.iter().map(|asked| asked.id.as_str()).collect();
    assert_eq!(ids.len(), 3, "{listed:?}");
    for asked in &listed {
        assert_eq!(asked.room.as_ref(), Some(&asked.id));
        assert_eq!((&asked.requester, asked.requester_name.as_deref()), (&alice_id, Some("alice")));
    }
    let (text, _) = act(&bob, json!({"action": "room_pending"})).await;
    for room in [&den, &attic, &cellar] {
        assert!(text.contains(&format!("invites you to {room}")), "{text}");
    }
    // A yes by the id, one by room and owner as models say it, and a no.
    bob.client.call(yes(&den)).await.unwrap();
    let (text, failed) =
        act(&bob, json!({"action": "room_accept", "room": "attic", "requesterId": "alice"})).await;
    assert!(!failed, "{text}");
    let no = RejectParams {
        id: Some(cellar.clone()),
        room: None,
        requester: None,
        reason: Some("too dark".into()),
    };
    bob.client.call(no).await.unwrap();
    let declined = alice.wait_kind("invite_declined").await;
    assert_eq!(
        (&declined.body["room"], &declined.body["reason"]),
        (&json!(cellar), &json!("too dark"))
    );
    assert!(bob.pending(PendingKind::Invite).await.is_empty());
    let mut rooms = rooms_of(&bob).await;
    rooms.sort_unstable();
    let mut joined = vec![den, attic];
    joined.sort_unstable();
    assert_eq!(rooms, joined);
    assert_eq!(bob.client.call(yes(&cellar)).await.unwrap_err().code, "not_pending");
}

#[tokio::test]
async fn what_a_name_of_a_room_has_become_is_said() {
    let daemon = Daemon::start(Ports::free()).await;
    let alice = daemon.agent("alice").await;
    let create = json!({"action": "create_room", "room": "The  Den!"});
    let (text, _) = act(&alice, create).await;
    assert!(text.contains("\"The-Den\"") && text.contains("what \"The  Den!\" became"), "{text}");
    let (text, _) = act(&alice, json!({"action": "create_room", "room": "plain"})).await;
    assert!(!text.contains("became"), "{text}");
}

#[tokio::test]
async fn a_secret_room_is_meant_by_the_name_in_its_path() {
    let daemon = Daemon::start(Ports::free()).await;
    let (alice, bob) = (daemon.agent("alice").await, daemon.agent("bob").await);
    let secret = create(&alice, "my den", RoomType::Secret).await;
    assert!(secret.ends_with("/_my-den"), "{secret}");
    let history = |room: &str| RoomHistoryParams { room: room.into(), since: None, limit: None };
    for name in ["_my-den", "my-den", "my den", "_my den"] {
        alice.client.call(history(name)).await.unwrap();
    }
    // Where two rooms have it, neither is meant.
    let other = create(&bob, "_my-den", RoomType::Public).await;
    bob.client.call(history("_my-den")).await.unwrap();
    let join = json!({"action": "join_room", "room": "_my-den"});
    let (text, failed) = act(&alice, join).await;
    assert!(failed && text.contains(&other) && text.contains(&secret), "{text}");
}

#[tokio::test]
async fn who_asks_names_the_request() {
    let daemon = Daemon::start(Ports::free()).await;
    let mut alice = daemon.agent("alice").await;
    let (bob, carol, dora) =
        (daemon.agent("bob").await, daemon.agent("carol").await, daemon.agent("dora").await);
    for asking in [&bob, &carol, &dora] {
        let sent = asking.dm(&alice.id, "may I", None).await;
        assert_eq!(sent.deliveries[0].status, DeliveryStatus::AwaitingConsent);
        alice.wait_kind("room_join_request").await;
    }
    let private = create(&alice, "den", RoomType::Private).await;
    act(&dora, json!({"action": "join_room", "room": private})).await;
    assert_eq!(alice.pending(PendingKind::Dm).await.len(), 3);
    // By name, by the beginning of the id, and as models say it.
    let answered = alice.client.call(yes("bob")).await.unwrap();
    assert_eq!(answered.request.requester, bob.id);
    let answered = alice.client.call(yes(&carol.id[..8])).await.unwrap();
    assert_eq!(answered.request.requester, carol.id);
    assert_eq!(alice.client.call(yes("bob")).await.unwrap_err().code, "not_pending");
    assert_eq!(alice.client.call(yes("nobody")).await.unwrap_err().code, "not_pending");
    // She asks for two things.
    assert_eq!(alice.client.call(yes("dora")).await.unwrap_err().code, "ambiguous_request");
    let (text, failed) =
        act(&alice, json!({"action": "room_accept", "room": "dora", "requesterId": "dora"})).await;
    assert!(!failed, "{text}");
    assert!(alice.pending(PendingKind::Dm).await.is_empty());
    assert_eq!(alice.pending(PendingKind::Room).await.len(), 1, "the other still waits");
    // The room stands for what is asked of it.
    let answered = alice.client.call(yes("den")).await.unwrap();
    assert_eq!(answered.request.requester, dora.id);
    alice.wait_dm("may I").await;
    // And for an invitation; the word dm, with the other end, for a conversation.
    let attic = create(&alice, "attic", RoomType::Secret).await;
    invite(&alice, &attic, &bob).await;
    bob.client.call(yes("attic")).await.unwrap();
    assert!(rooms_of(&bob).await.contains(&attic));
    let eve = daemon.agent("eve").await;
    eve.dm(&alice.id, "may I too", None).await;
    alice.wait_kind("room_join_request").await;
    let (room, requester) = (Some("dm".into()), Some("eve".into()));
    let answer = AcceptParams { id: None, room, requester, terms: None };
    assert_eq!(alice.client.call(answer).await.unwrap().request.requester, eve.id);
    // Who is not in a secret room does not read of it beside its members either.
    let rooms = async |viewer: &Agent| {
        let agents = viewer.client.call(AgentsParams {}).await.unwrap().agents;
        agents.into_iter().find(|agent| agent.id == alice.id).unwrap().rooms
    };
    assert!(rooms(&bob).await.contains(&attic));
    assert!(!rooms(&eve).await.contains(&attic));
}

#[tokio::test]
async fn without_an_agent_the_answer_is_the_users_and_that_is_said() {
    let daemon = Daemon::start(Ports::free()).await;
    let mut alice = daemon.agent("alice").await;
    daemon.agent("bob").await.dm(&alice.id, "may I", None).await;
    alice.wait_kind("room_join_request").await;
    let (client, _) = Client::connect(&daemon.socket(), "test").await.unwrap();
    let error = client.call(yes("bob")).await.unwrap_err();
    assert_eq!(error.code, "not_pending");
    assert!(error.todo.as_ref().is_some_and(|todo| todo.contains("--as NAME")), "{error:?}");
}

#[tokio::test]
async fn nobody_takes_a_name_that_reads_as_an_id() {
    let daemon = Daemon::start(Ports::free()).await;
    let (alice, bob) = (daemon.agent("alice").await, daemon.agent("bob").await);
    for name in [&bob.id, &bob.id[..12], "DEADBEEF"] {
        let (said, refused) = act(&alice, json!({"action": "update", "name": name})).await;
        assert!(refused && said.contains("does not read as an id"), "{said}");
        assert!(refused && said.contains("choose another name"), "{said}");
    }
    // A shell agent is another one's key, not its name.
    let other = daemon.agent("deadbeef").await;
    let names: Vec<String> = {
        let list = alice.client.call(AgentsParams {}).await.unwrap();
        list.agents.into_iter().map(|agent| agent.name).collect()
    };
    let named = format!("cli-{}", &other.id[..4]);
    assert!(names.contains(&"alice".to_owned()) && names.contains(&named), "{names:?}");
    let dm = |to: &str| json!({"action": "dm", "agent": to, "content": "x"});
    let (said, refused) = act(&alice, dm("deadbeef")).await;
    assert!(refused && said.contains("agent_not_found"), "{said}");
    let (said, refused) = act(&alice, dm(&other.id[..8].to_uppercase())).await;
    assert!(!refused, "{said}");
    // Nor is a room of such a name somebody's conversation.
    let trap = create(&alice, &bob.id, RoomType::Private).await;
    act(&alice, json!({"action": "send", "room": trap, "content": "bait"})).await;
    let history = async |room: &str| {
        let params = RoomHistoryParams { room: room.into(), since: None, limit: None };
        alice.client.call(params).await.unwrap().messages.len()
    };
    assert_eq!((history(&trap).await, history(&bob.id).await), (1, 0));
}

#[tokio::test]
async fn petnames_are_given_and_taken_by_names_and_beginnings_of_ids() {
    let daemon = Daemon::start(Ports::free()).await;
    let (alice, bob) = (daemon.agent("alice").await, daemon.agent("bob").await);
    let set = async |device: &str, name: &str| {
        alice.client.call(PetnameSetParams { device: device.into(), name: name.into() }).await
    };
    assert_eq!(set("bob", "robert").await.unwrap().device, bob.id);
    assert_eq!(set(&bob.id[..10], "bobby").await.unwrap().device, bob.id);
    assert_eq!(set("bobby", "the builder").await.unwrap().device, bob.id);
    let twin = Agent::attach(&daemon.socket(), "mcp", None, daemon.home.path()).await;
    let update = json!({"action": "update", "name": "bob"});
    act(&twin, update).await;
    assert_eq!(set("bob", "which").await.unwrap_err().code, "ambiguous_agent");
    assert_eq!(set("nobody", "x").await.unwrap_err().code, "agent_not_found");
    let clear = |device: &str| PetnameClearParams { device: device.into() };
    let cleared = alice.client.call(clear("the builder")).await.unwrap();
    assert_eq!((cleared.device, cleared.name.as_str()), (bob.id.clone(), "the builder"));
    // Of somebody who was never seen: in full, and then by the name.
    let away = "ab".repeat(32);
    assert_eq!(set(&away, "old friend").await.unwrap().device, away);
    assert_eq!(alice.client.call(clear("old friend")).await.unwrap().device, away);
}
