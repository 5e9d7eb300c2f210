//! Grants to write without a question (`rooms.md` 3.12).

use commsd::identity::device::DeviceId;
use commsd::mesh::events::{DeliveryEvent, DeliveryState};
use commsd::mesh::node::{Command, CommandResult};
use commsd::mesh::wire::cose::CoseSign1;

use super::support::{all_see_all, count, dm, is_full_mesh, send};
use super::world::{HostSpec, World, key};

/// Two daemons of one user and one of another, each with an agent.
fn neighbours(seed: u64) -> (World, [DeviceId; 3]) {
    let mut world = World::new(seed);
    let agents = [1000, 1000, 1001].map(|user| {
        let host = world.host_as(HostSpec { user, ..HostSpec::default() });
        world.start(host);
        world.agent(host, &format!("agent-{host}"))
    });
    world.run_until(20_000, "a mesh", |world| is_full_mesh(world) && all_see_all(world));
    (world, agents)
}

fn admit(world: &mut World, agent: DeviceId, bearer: DeviceId, principal: bool) -> CoseSign1 {
    match world.ask(agent, Command::AdmitDm { bearer, principal, known: None }) {
        Ok(CommandResult::Grant(grant)) => grant,
        other => panic!("not admitted: {other:?}"),
    }
}

fn asked(world: &World, agents: &[DeviceId]) -> usize {
    let asks = |event: &DeliveryEvent| matches!(event, DeliveryEvent::RoomJoinRequest { .. });
    agents.iter().map(|agent| count(world, agent, asks)).sum()
}

fn use_grant(
    world: &mut World,
    agent: DeviceId,
    to: DeviceId,
    grant: &CoseSign1,
) -> Result<(), &'static str> {
    // As people hand it on.
    let grant = CoseSign1::from_text(&format!(" {}\n", grant.to_text())).unwrap();
    let result = world.ask(agent, Command::UseDmGrant { to, grant });
    result.map(|result| assert_eq!(result, CommandResult::Done)).map_err(|error| error.code)
}

#[test]
fn a_grant_opens_conversations_with_its_users_agents_and_asks_nobody() {
    let (mut world, [a, a2, b]) = neighbours(1);
    let grant = admit(&mut world, a, b, false);
    assert!(world.dm_grants[&(1000, b)].is_some(), "answered when it was on disk");
    // With the agent that issued it, and with another one of its user's.
    for to in [a, a2] {
        assert_eq!(use_grant(&mut world, b, to, &grant), Ok(()));
        assert_eq!(send(&mut world, b, dm(to, "hello"))[&to], Some(DeliveryState::Delivered));
        // The answer needs no consent either.
        assert_eq!(send(&mut world, to, dm(b, "yes"))[&b], Some(DeliveryState::Delivered));
    }
    assert_eq!(asked(&world, &[a, a2, b]), 0);
}

#[test]
fn a_grant_to_a_user_is_for_each_of_its_agents_and_for_nobody_else() {
    let (mut world, [a, a2, b]) = neighbours(2);
    // Keys 90 + n % 3 are the users' (see `World::start`).
    let principal = key(90 + 1000 % 3).id();
    let grant = admit(&mut world, b, principal, true);
    for from in [a, a2] {
        assert_eq!(use_grant(&mut world, from, b, &grant), Ok(()));
        assert_eq!(send(&mut world, from, dm(b, "hello"))[&b], Some(DeliveryState::Delivered));
    }
    // Somebody else's own, and one that is not for this user.
    let other = admit(&mut world, a, a2, false);
    assert_eq!(use_grant(&mut world, b, a, &other), Err("grant_not_for_us"));
    // A grant of one user says nothing about another user's agents.
    let for_b = admit(&mut world, a, b, false);
    let host = world.host_as(HostSpec { user: 1002, ..HostSpec::default() });
    world.start(host);
    let c = world.agent(host, "third");
    world.run_until(20_000, "a mesh", |world| is_full_mesh(world) && all_see_all(world));
    assert_eq!(use_grant(&mut world, b, c, &for_b), Err("join_refused"));
    assert_eq!(asked(&world, &[a, a2, b, c]), 0);
}

#[test]
fn a_grant_that_is_withdrawn_or_has_run_out_opens_nothing() {
    let (mut world, [a, a2, b]) = neighbours(3);
    let grant = admit(&mut world, a, b, false);
    let id: [u8; 16] = world.dm_grants[&(1000, b)].clone().unwrap().try_into().unwrap();
    // Issued again it has the same id: both end together.
    let known = Some(id);
    let again = Command::AdmitDm { bearer: b, principal: false, known };
    let Ok(CommandResult::Grant(again)) = world.ask(a, again) else { panic!("no grant") };
    let revoke = Command::RevokeDm { bearer: b, token_id: id };
    assert_eq!(world.ask(a, revoke), Ok(CommandResult::Done));
    assert_eq!(world.dm_grants[&(1000, b)], None);
    world.run(100);
    for grant in [&grant, &again] {
        // Its holder has heard of it; and so has the user's other daemon.
        assert_eq!(use_grant(&mut world, b, a2, grant), Err("grant_rejected"));
    }
    // The question is still open to it.
    assert_eq!(send(&mut world, b, dm(a, "may I"))[&a], None);
    assert_eq!(asked(&world, &[a]), 1);
    // Thirty days.
    let grant = admit(&mut world, a2, b, false);
    world.run(100);
    assert_eq!(use_grant(&mut world, b, a2, &grant), Ok(()));
    for host in 0..3 {
        world.jump_clock(host, 31 * 24 * 3600 * 1000);
    }
    assert_eq!(use_grant(&mut world, b, a2, &grant), Err("grant_rejected"));
}
