//! Agents that ask somebody elsewhere at once, before their devices have met.

use commsd::codec::cbor::Value;
use commsd::identity::device::DeviceId;
use commsd::mesh::events::DeliveryState;
use commsd::mesh::node::{
    AcpAsk, Command, CommandError, CommandResult, GrantTerms, OperatorCommand,
};
use commsd::mesh::records::RoomType;

use super::support::{accept, create, dm, formed, peer_devices, send};
use super::world::World;

fn share(world: &mut World, host: usize) {
    let (name, place) = ("notes".to_owned(), "/work/notes".to_owned());
    let command = OperatorCommand::Share { name, place, write: false };
    assert_eq!(world.operate(host, command), Ok(CommandResult::Done));
}

fn asks(owner: DeviceId) -> Command {
    let share = "notes".to_owned();
    Command::AskCapability { owner, share, write: false, valid_until: None, wait_ms: 0 }
}

fn calls(owner: DeviceId) -> Command {
    let params = vec![("op".to_owned(), Value::from("inspect"))];
    Command::CallService { owner, share: "notes".into(), write: false, params }
}

/// An agent of a host that has met nobody yet.
fn fresh(world: &mut World, host: usize, name: &str, other: usize) -> DeviceId {
    let agent = world.agent(host, name);
    assert!(!peer_devices(world, other).contains(&agent), "they have met already");
    agent
}

#[test]
fn what_a_fresh_agent_asks_waits_for_the_connection() {
    let mut world = World::new(41);
    let (hosts, agents) = formed(&mut world, 2);
    let a = agents[0];
    share(&mut world, hosts[0]);
    // A capability, and its use once the agent comes back into service.
    let b = fresh(&mut world, hosts[1], "asking", hosts[0]);
    assert_eq!(world.ask(b, asks(a)), Ok(CommandResult::AskPending));
    let id = world.node(hosts[0]).pending_for_anybody()[0].id.clone();
    let command = OperatorCommand::Grant { id, terms: GrantTerms::default() };
    assert_eq!(world.operate(hosts[0], command), Ok(CommandResult::Done));
    world.run(100);
    world.detach(b);
    world.run(1_000);
    world.attach(b);
    let answer = world.ask(b, calls(a));
    assert!(matches!(answer, Ok(CommandResult::Served(_))), "{answer:?}");
    // A message, whose recipient is asked rather than said to be away.
    let c = fresh(&mut world, hosts[1], "writing", hosts[0]);
    assert_eq!(send(&mut world, c, dm(a, "hello"))[&a], None, "consent is awaited");
    accept(&mut world, a);
    // A room.
    let room = create(&mut world, a, "open", RoomType::Public);
    let d = fresh(&mut world, hosts[1], "joining", hosts[0]);
    let joined = world.ask(d, Command::JoinRoom(room.clone()));
    assert_eq!(joined, Ok(CommandResult::Room(room)));
    // And an agent that is fresh is asked by the other daemon.
    let e = fresh(&mut world, hosts[1], "asked", hosts[0]);
    world.run_until(1_000, "its record", |world| {
        world.node(hosts[0]).agent_by_id(&e, world.clock(hosts[0])).is_some()
    });
    let op = world.ask_acp(hosts[0], e, AcpAsk::Binding);
    world.run_until(5_000, "an answer", |world| world.replies.contains_key(&op));
    assert!(matches!(world.replies[&op], Ok(CommandResult::Served(_))), "{:?}", world.replies[&op]);
}

#[test]
fn who_cannot_be_reached_is_not_waited_for() {
    let mut world = World::new(42);
    let (hosts, agents) = formed(&mut world, 2);
    let (a, b) = (agents[0], agents[1]);
    let not_connected = |result: Result<CommandResult, CommandError>| match result {
        Ok(CommandResult::Refused { code, .. }) => code == "not_connected",
        _ => false,
    };
    // Nobody's device: at once.
    let begun = world.clock(hosts[1]).mono;
    let nobody = super::world::key(95).id();
    let answer = world.ask(b, asks(nobody));
    assert!(not_connected(answer));
    assert!(world.clock(hosts[1]).mono - begun < 10);
    // One that is said to be here and cannot be reached: after a while, and once.
    world.cut(hosts[0], hosts[1]);
    let c = fresh(&mut world, hosts[1], "cut off", hosts[0]);
    let states = send(&mut world, c, dm(a, "hello"));
    assert!(states[&a].is_none() || matches!(states[&a], Some(DeliveryState::Queued { .. })));
    world.heal();
    world.run_until(60_000, "the question", |world| !world.node_of(&a).pending(&a).is_empty());
    // Gone: as soon as that is known.
    world.crash(hosts[0]);
    world.run(60_000);
    let d = world.agent(hosts[1], "late");
    let begun = world.clock(hosts[1]).mono;
    assert!(not_connected(world.ask(d, asks(a))));
    assert!(world.clock(hosts[1]).mono - begun < 10);
}
