//! A peer that abuses what it may do: rooms of its own, requests without end, stamps and texts at
//! the bounds. What it does to itself is its own affair; nobody else may be hurt.

use commsd::codec::cbor::Value;
use commsd::identity::device::DeviceId;
use commsd::mesh::events::DeliveryEvent;
use commsd::mesh::message::Patch;
use commsd::mesh::node::{Command, MAX_INVITATIONS_OF_OWNER};
use commsd::mesh::records::{AgentStatus, MAX_VERSION, RoomType};
use commsd::mesh::session::SessionId;
use commsd::mesh::wire::capability;
use commsd::mesh::wire::cose::CoseSign1;
use commsd::mesh::wire::room_path::RoomPath;
use commsd::mesh::wire::scope::Scope;
use commsd::mesh::wire::token::{MintRequest, mint};

use super::support::{
    answers, befriend, count, create, formed, join, members, present, record, request, room_record,
    room_verb, state,
};
use super::world::{Ack, HostSpec, World};

/// A raw peer of another user with a data session to a device.
fn intruder(world: &mut World, device: DeviceId) -> (usize, SessionId) {
    let raw = world.raw(HostSpec { user: 1001, ..HostSpec::default() });
    let door = world.door(&device);
    let session = world.raw_dial(raw, door);
    world.run(50);
    (raw, session)
}

/// A token for a room of the raw peer's own.
fn own_token(world: &World, raw: usize, bearer: DeviceId, path: &RoomPath) -> CoseSign1 {
    let now = world.clock(raw).unix;
    let id = vec![9; 16].try_into().unwrap();
    let scope = Scope::room(path);
    let asked = MintRequest::new(id, bearer, capability::ROOM_MEMBER, scope, now.plus(3_600_000));
    mint(&world.host_key(raw), now, asked.delegations(0)).unwrap()
}

fn is_message(event: &DeliveryEvent) -> bool {
    matches!(event, DeliveryEvent::RoomMessage { .. })
}

/// An invitation from the raw peer to one of its rooms.
fn invite(
    world: &mut World,
    raw: usize,
    session: SessionId,
    invitee: DeviceId,
    path: &RoomPath,
) -> u64 {
    let token = own_token(world, raw, invitee, path);
    let params = Value::map([
        ("verb", Value::from("room.invite")),
        ("invitee", Value::Bytes(invitee.0.to_vec())),
        ("token", token.to_value()),
    ]);
    let scope = Scope { kind: "room".into(), path: Some(path.to_string()) };
    request(world, raw, session, "room:member", params, scope, None)
}

#[test]
fn nobody_writes_to_an_agent_by_way_of_a_room_it_is_not_in() {
    let mut world = World::new(601);
    let host = world.daemon();
    let a = world.agent(host, "a");
    world.run(100);
    let (raw, session) = intruder(&mut world, a);
    let me = world.device(raw);
    let path = RoomPath::named(me, "lair").unwrap();
    let token = own_token(&world, raw, me, &path);
    let sent = ["room.send", "room.notify", "room.read"].map(|verb| {
        room_verb(&mut world, raw, session, verb, &path.to_string(), Some(token.clone()))
    });
    world.run(50);
    let given = answers(&mut world, raw);
    assert!(sent.iter().all(|id| given[id] == "not_member"), "{given:?}");
    // An invitation is a question, not yet an answer; nor does the owner's record make it one.
    let asked = invite(&mut world, raw, session, a, &path);
    let record = super::support::room_record(&path, 5, &[(me, 1), (a, 2)]);
    let patch = commsd::mesh::message::Patch::RoomUpsert { room: record };
    super::support::state(&mut world, raw, session, patch);
    let sent = room_verb(&mut world, raw, session, "room.send", &path.to_string(), Some(token));
    world.run(50);
    let given = answers(&mut world, raw);
    assert_eq!((given[&asked].as_str(), given[&sent].as_str()), ("ok", "not_member"));
    assert_eq!(count(&world, &a, is_message), 0);
}

#[test]
fn questions_without_end_leave_room_for_messages() {
    let mut world = World::new(602);
    let host = world.daemon();
    let (a, b) = (world.agent(host, "a"), world.agent(host, "b"));
    befriend(&mut world, a, b);
    world.slots.get_mut(&a).unwrap().ack = Ack::Never;
    let room = create(&mut world, a, "private", RoomType::Private);
    let (raw, session) = intruder(&mut world, a);
    let me = world.device(raw);
    let before = world.node(host).status().inbound;
    let lair = RoomPath::named(me, "lair").unwrap();
    for _ in 0..100 {
        room_verb(&mut world, raw, session, "room.join", &room.to_string(), None);
        room_verb(
            &mut world,
            raw,
            session,
            "room.join",
            &RoomPath::dm(me, a).unwrap().to_string(),
            None,
        );
        invite(&mut world, raw, session, a, &lair);
        world.run(5);
    }
    let asked = world.node(host).status().inbound - before;
    assert_eq!(asked, 3, "each question once");
    // Other rooms, other invitations; there is an end to them, in the mailbox and in the slot file.
    for n in 0..100 {
        let path = RoomPath::named(me, &format!("lair-{n}")).unwrap();
        invite(&mut world, raw, session, a, &path);
    }
    world.run(100);
    let tokens = &world.slots[&a].tokens;
    let invitations = tokens.keys().filter(|path| path.owner() == Some(me)).count();
    assert_eq!(invitations, MAX_INVITATIONS_OF_OWNER);
}

#[test]
fn no_stamp_takes_a_room_from_its_owner() {
    let mut world = World::new(603);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    let room = create(&mut world, a, "square", RoomType::Public);
    join(&mut world, b, &room);
    world.run(100);
    let (raw, at_a) = intruder(&mut world, a);
    let door = world.door(&b);
    let at_b = world.raw_dial(raw, door);
    world.run(50);
    let me = world.device(raw);
    // Coming, going and going without having come, at the top of the range.
    for session in [at_a, at_b] {
        for (join, leave) in [(MAX_VERSION, 0), (0, MAX_VERSION), (MAX_VERSION - 1, MAX_VERSION)] {
            let mut record = room_record(&room, MAX_VERSION, &[(me, join)]);
            record.member_leaves.insert(me, leave);
            state(&mut world, raw, session, Patch::RoomUpsert { room: record });
        }
    }
    // At one member only, a stamp that is believable.
    let version = world.node(hosts[0]).room(&room, None).unwrap().record.version;
    let record = room_record(&room, version, &[(me, version + 1000)]);
    state(&mut world, raw, at_b, Patch::RoomUpsert { room: record });
    world.run(50);
    assert!(members(&world, hosts[1], &room).unwrap().contains(&me));
    // The owner still has the last word: on who comes in, and on who is out.
    let c = world.agent(hosts[0], "c");
    world.run(100);
    join(&mut world, c, &room);
    world.ask(a, Command::Kick { room: room.clone(), agent: me }).unwrap();
    world.run(100);
    for host in hosts {
        assert_eq!(members(&world, host, &room).unwrap(), [a, b, c].into());
    }
}

#[test]
fn another_user_does_not_number_our_records() {
    let mut world = World::new(604);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, _] = agents[..] else { unreachable!() };
    let (raw, session) = intruder(&mut world, a);
    let before = world.node(hosts[0]).own_agent(&a).unwrap().version;
    state(&mut world, raw, session, Patch::AgentUpsert { agent: record(a, 1000, "forged") });
    let mut gone = record(a, MAX_VERSION, "forged");
    gone.status = AgentStatus::Offline;
    state(&mut world, raw, session, Patch::AgentUpsert { agent: gone });
    state(&mut world, raw, session, Patch::AgentOffline { agent_id: a });
    world.run(50);
    assert_eq!(world.node(hosts[0]).own_agent(&a).unwrap().version, before);
    // One of our own user may have seen more of it than we remember, but not the end of numbers.
    let raw = world.raw(HostSpec::default());
    let door = world.door(&a);
    let session = world.raw_dial(raw, door);
    world.run(50);
    state(&mut world, raw, session, Patch::AgentUpsert { agent: record(a, MAX_VERSION, "old") });
    world.run(50);
    let update =
        Command::Update { name: Some("new".into()), status: None, visibility: None, tags: None };
    world.ask(a, update).unwrap();
    world.run(100);
    assert_eq!(present(&world, hosts[1])[&a].0, "new");
}
