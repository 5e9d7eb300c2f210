//! Who is told what of agents whose daemon ends and comes back.

use std::sync::Arc;

use commsd::api::types::{
    AgentStatus, AgentsParams, DeliveryStatus, OwnStatus, RoomCreateParams, RoomJoinParams,
    UpdateParams,
};

use crate::daemon::{Agent, Daemon, Ports};

async fn set_status(agent: &Agent, status: OwnStatus) {
    let update = UpdateParams {
        status: Some(status),
        visibility: None,
        name: None,
        tags: None,
        consent: None,
    };
    agent.client.call(update).await.unwrap();
}

/// Waits until an agent is told of a member's presence.
async fn is_told(agent: &mut Agent, member: &str, status: &str) {
    let what = format!("{status} of {member}");
    agent
        .wait(&what, |e| {
            e.kind() == "member_status" && e.body["agent"] == member && e.body["status"] == status
        })
        .await;
}

/// How an agent is listed on a daemon, for one of its agents.
async fn listed(viewer: &Agent, agent: &str) -> AgentStatus {
    let agents = viewer.client.call(AgentsParams {}).await.unwrap().agents;
    agents.into_iter().find(|listed| listed.id == agent).unwrap().status
}

async fn come_back(killed: bool) {
    let ports = Ports::free();
    // The one that stays announces who has gone.
    let two = Daemon::start(ports).await;
    two.event("port_held").await;
    let one = Daemon::start(ports).await;
    let (mut alice, mut carol) = (one.agent("alice").await, one.agent("carol").await);
    let mut bob = two.agent("bob").await;
    for id in [&alice.id, &carol.id] {
        two.has_met(id).await;
    }
    one.has_met(&bob.id).await;
    alice.befriend(&mut bob).await;
    bob.befriend(&mut carol).await;
    let create = RoomCreateParams { name: "den".into(), r#type: None, description: None };
    let room = bob.client.call(create).await.unwrap().path;
    alice.client.call(RoomJoinParams { room }).await.unwrap();
    set_status(&alice, OwnStatus::Busy).await;
    is_told(&mut bob, &alice.id, "busy").await;
    // Carol is in no room, and nothing waits for her.
    bob.dm(&carol.id, "the last", None).await;
    let last = carol.wait_dm("the last").await;
    carol.ack(&last).await;
    let (alice_id, carol_id) = (alice.id.clone(), carol.id.clone());
    drop((alice, carol));
    let mark = two.log.len();
    let home = Arc::clone(&one.home);
    if killed {
        drop(one.kill().await);
    } else {
        one.stop().await;
    }
    is_told(&mut bob, &alice_id, "offline").await;

    // Nobody attaches as either.
    let _one = Daemon::start_with(home, ports, &[]).await;
    is_told(&mut bob, &alice_id, "busy").await;
    two.log
        .wait(mark, "carol again", |l| l["event"] == "peer_up" && l["device"] == carol_id.as_str())
        .await;
    let sent = bob.dm(&carol_id, "are you there", None).await;
    // Bob's own session with her may be younger than his message.
    if sent.deliveries[0].status != DeliveryStatus::Delivered {
        bob.wait("its delivery", |e| {
            e.kind() == "delivery_status"
                && e.body["messageId"] == sent.message_id.as_str()
                && e.body["delivery"]["status"] == "delivered"
        })
        .await;
    }
    assert_eq!(listed(&bob, &carol_id).await, AgentStatus::Active);
}

#[tokio::test]
async fn members_elsewhere_hear_that_agents_are_back_after_their_daemon_has_ended() {
    come_back(false).await;
}

#[tokio::test]
async fn members_elsewhere_hear_that_agents_are_back_after_their_daemon_was_killed() {
    come_back(true).await;
}
