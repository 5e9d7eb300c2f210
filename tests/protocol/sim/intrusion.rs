//! A peer that abuses what it may do: rooms of its own, requests without end, stamps and texts at
//! the bounds. What it does to itself is its own affair; nobody else may be hurt.

use commsd::codec::cbor::Value;
use commsd::identity::device::DeviceId;
use commsd::mesh::events::DeliveryEvent;
use commsd::mesh::node::MAX_INVITATIONS_OF_OWNER;
use commsd::mesh::records::RoomType;
use commsd::mesh::session::SessionId;
use commsd::mesh::wire::capability;
use commsd::mesh::wire::cose::CoseSign1;
use commsd::mesh::wire::room_path::RoomPath;
use commsd::mesh::wire::scope::Scope;
use commsd::mesh::wire::token::{MintRequest, mint};

use super::support::{answers, befriend, count, create, request, room_verb};
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
