//! The Agent Collaboration Protocol between daemons: who reaches whom by which device, who counts as a
//! peer, and what is too much.

use commsd::codec::cbor::Value;
use commsd::identity::device::DeviceId;
use commsd::mesh::node::{
    AcpAsk, Command, CommandResult, DecisionTarget, MAX_CALLS_OF_DEVICE, MAX_ENVELOPE_BYTES,
    MAX_ENVELOPES_A_MINUTE, OpId, SERVICE_DEADLINE_MS,
};
use commsd::mesh::session::Policy;
use commsd::mesh::wire::scope::Scope;

use super::support::{answers, formed, request, two_machines};
use super::world::{HostSpec, World};

const VERB: &str = "x-commsd-acp:call";

/// The word that a question ends with; `ok` where it was answered.
fn word(world: &mut World, op: OpId) -> String {
    world.run_until(40_000, "an answer", |world| world.replies.contains_key(&op));
    match world.replies[&op].clone() {
        Ok(CommandResult::Served(_)) => "ok".into(),
        Ok(CommandResult::Refused { code, .. }) => code,
        Ok(other) => panic!("{other:?}"),
        Err(error) => error.code.into(),
    }
}

fn asked(world: &mut World, host: usize, to: DeviceId, ask: AcpAsk) -> String {
    let op = world.ask_acp(host, to, ask);
    word(world, op)
}

fn envelope(bytes: usize) -> AcpAsk {
    AcpAsk::Envelope(vec![7; bytes])
}

#[test]
fn daemons_of_one_machine_reach_each_others_agents_with_their_own_devices() {
    let mut world = World::new(31);
    let (hosts, agents) = formed(&mut world, 2);
    assert_eq!(asked(&mut world, hosts[0], agents[1], AcpAsk::Binding), "ok");
    assert_eq!(asked(&mut world, hosts[0], agents[1], envelope(3)), "ok");
    let first = world.device(hosts[0]);
    for (at, ask) in [AcpAsk::Binding, envelope(3)].into_iter().enumerate() {
        let request = &world.acp[at];
        assert_eq!((request.from, request.to, &request.ask), (first, agents[1], &ask));
        assert!(request.is_peer, "it is the same user's");
    }
    // The answer goes to that device, and what follows may go to the other daemon's.
    let second = world.device(hosts[1]);
    assert_eq!(world.node(hosts[0]).daemon_of(&agents[1]), Some(second));
    assert_eq!(asked(&mut world, hosts[1], first, envelope(1)), "ok");
    assert_eq!((world.acp[2].from, world.acp[2].to), (world.device(hosts[1]), first));
    // Its own agents, and one that is gone.
    let own = asked(&mut world, hosts[0], agents[0], AcpAsk::Binding);
    assert_eq!((own.as_str(), world.acp[3].to), ("ok", agents[0]));
    world.crash(hosts[1]);
    world.run(60_000);
    assert_eq!(asked(&mut world, hosts[0], agents[1], envelope(1)), "not_connected");
}

#[test]
fn another_machines_agents_are_reached_through_a_channel_once_both_were_let_in() {
    let mut world = World::new(32);
    let ([near, far], [a, b]) = two_machines(&mut world);
    assert_eq!(asked(&mut world, near, b, AcpAsk::Binding), "not_connected");
    for (agent, host) in [(a, far), (b, near)] {
        let yes = Command::Accept(DecisionTarget::Connection(world.device(host)));
        assert_eq!(world.ask(agent, yes), Ok(CommandResult::Done));
    }
    world.run(30_000);
    assert_eq!(asked(&mut world, near, b, envelope(100_000)), "ok");
    let (from, is_peer) = (world.acp[0].from, world.acp[0].is_peer);
    // Only agents have channels.
    assert_eq!((from, is_peer), (a, true));
    assert_eq!(asked(&mut world, far, from, envelope(1)), "ok");
    assert_eq!(world.acp[1].from, b);
    // Daemons have a session of their own, and need no agent.
    let daemon = world.node(near).daemon_of(&b).unwrap();
    assert_eq!(daemon, world.device(far));
    assert_eq!(asked(&mut world, near, daemon, envelope(1)), "ok");
    let request = &world.acp[2];
    assert_eq!((request.from, request.to, request.is_peer), (world.device(near), daemon, true));
}

#[test]
fn whoever_is_another_users_is_heard_but_is_no_peer_and_whoever_was_not_let_in_is_not_heard() {
    let mut world = World::new(33);
    let (_, agents) = formed(&mut world, 1);
    let stranger = world.raw(HostSpec { user: 1001, ..HostSpec::default() });
    let door = world.door(&agents[0]);
    let session = world.raw_dial(stranger, door);
    world.run(50);
    let ask = |world: &mut World, raw, session, scope: &str, params: &[(&str, Value)]| {
        let params = Value::map(params.iter().cloned());
        let id = request(world, raw, session, VERB, params, Scope::of_kind(scope), None);
        world.run(100);
        answers(world, raw).remove(&id).unwrap_or_else(|| "nothing".into())
    };
    let kind = "x-commsd-acp";
    let binding = [("verb", Value::from("x-commsd-acp.binding"))];
    assert_eq!(ask(&mut world, stranger, session, kind, &binding), "ok");
    assert_eq!(world.acp.len(), 1);
    assert!(!world.acp[0].is_peer);
    // Nothing else is understood.
    let other = [("verb", Value::from("x-commsd-acp.other"))];
    assert_eq!(ask(&mut world, stranger, session, kind, &other), "unsupported_verb");
    let verb = ("verb", Value::from("x-commsd-acp.envelope"));
    let text = [verb.clone(), ("envelope", Value::from("text"))];
    assert_eq!(ask(&mut world, stranger, session, kind, &text), "malformed_params");
    let large = [verb, ("envelope", Value::Bytes(vec![0; MAX_ENVELOPE_BYTES + 1]))];
    assert_eq!(ask(&mut world, stranger, session, kind, &large), "too_large");
    assert_eq!(ask(&mut world, stranger, session, "room", &binding), "unsupported_verb");
    assert_eq!(world.acp.len(), 1);

    // From another machine, before anybody has said yes.
    let host =
        world.host_as(HostSpec { machine: 1, listens: Some(Policy::Full), ..HostSpec::default() });
    world.agent(host, "far");
    world.start(host);
    let outside = world.raw(HostSpec { machine: 2, ..HostSpec::default() });
    let door = world.network_door(host);
    let session = world.raw_dial(outside, door);
    world.run(50);
    ask(&mut world, outside, session, kind, &binding);
    assert_eq!(world.acp.len(), 1, "it is answered like everything then, and not heard");
}

#[test]
fn one_device_has_so_many_requests_under_way_and_so_many_in_a_minute() {
    let mut world = World::new(34);
    let (hosts, agents) = formed(&mut world, 2);
    world.serves_calls = false;
    let ops: Vec<OpId> = (0..=MAX_CALLS_OF_DEVICE)
        .map(|_| world.ask_acp(hosts[0], agents[1], envelope(1)))
        .collect();
    world.run(1_000);
    assert_eq!(word(&mut world, ops[MAX_CALLS_OF_DEVICE]), "busy");
    assert_eq!(world.acp.len(), MAX_CALLS_OF_DEVICE);
    // What is not answered here in time is answered for it, and leaves its place.
    world.run(SERVICE_DEADLINE_MS + 1_000);
    assert_eq!(word(&mut world, ops[0]), "timeout");
    world.serves_calls = true;
    world.run(60_000);
    let mut busy = 0;
    for _ in 0..=MAX_ENVELOPES_A_MINUTE {
        busy += usize::from(asked(&mut world, hosts[0], agents[1], envelope(1)) == "busy");
    }
    let taken = world.acp.len() - MAX_CALLS_OF_DEVICE;
    assert_eq!(taken + busy, MAX_ENVELOPES_A_MINUTE as usize + 1);
    // Later in the same minute for the last of them, unless that has passed meanwhile.
    assert!(taken <= MAX_ENVELOPES_A_MINUTE as usize && busy >= 1, "{busy} busy");
}
