//! A peer that abuses what it may do: rooms of its own, requests without end, stamps and texts at
//! the bounds. What it does to itself is its own affair; nobody else may be hurt.

use commsd::codec::cbor::Value;
use commsd::identity::device::{DeviceId, DeviceKey};
use commsd::mesh::delivery::event_bytes;
use commsd::mesh::events::DeliveryEvent;
use commsd::mesh::message::{MeshMessage, Patch, Snapshot};
use commsd::mesh::node::{
    AddDevice, AgentSpec, Command, CommandResult, Input, MAX_INVITATIONS_OF_OWNER, MAX_PARKED,
};
use commsd::mesh::records::{AgentStatus, MAX_VERSION, RoomMessage, RoomType};
use commsd::mesh::replica::{MAX_AGENTS, MAX_ROOMS};
use commsd::mesh::session::SessionId;
use commsd::mesh::wire::capability;
use commsd::mesh::wire::cose::CoseSign1;
use commsd::mesh::wire::frame::{Frame, ManageResponse, Outcome};
use commsd::mesh::wire::revocation::RevocationEntry;
use commsd::mesh::wire::room_path::RoomPath;
use commsd::mesh::wire::scope::Scope;
use commsd::mesh::wire::token::{MintRequest, TokenClaims, mint};

use super::support::{
    answers, befriend, count, create, dm, formed, join, members, present, record, request,
    room_record, room_verb, say, state,
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
fn a_room_that_its_owner_renames_tells_its_members_so() {
    let mut world = World::new(609);
    let host = world.daemon();
    let a = world.agent(host, "a");
    world.run(100);
    let (raw, session) = intruder(&mut world, a);
    world.raw_mut(raw).polite = true;
    let path = RoomPath::named(world.device(raw), "lair").unwrap();
    invite(&mut world, raw, session, a, &path);
    world.run(50);
    let joined = world.ask(a, Command::JoinRoom(path.clone()));
    assert_eq!(joined, Ok(CommandResult::Room(path.clone())));
    let me = world.device(raw);
    let told = |world: &World| {
        world.slots[&a]
            .events()
            .filter_map(|event| match event {
                DeliveryEvent::JoinOutcome { room, accepted: true, code, reason } => {
                    assert_eq!((room, code.as_str()), (&path.to_string(), "renamed"));
                    Some(reason.clone())
                }
                _ => None,
            })
            .collect::<Vec<_>>()
    };
    for (version, name) in [(5, "lair"), (6, "General\u{202e}"), (7, "General\u{202e}")] {
        let mut room = room_record(&path, version, &[(me, 1), (a, 2)]);
        room.name = name.into();
        state(&mut world, raw, session, Patch::RoomUpsert { room });
        world.run(50);
    }
    let [reason] = &told(&world)[..] else { panic!("{:?}", told(&world)) };
    assert!(reason.contains("\"General\\u{202e}\" now") && reason.contains("\"lair\""), "{reason}");
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
    // As the owner knows it was never in, and it is put out all the same.
    let kick = Command::Kick { room: room.clone(), agent: me };
    assert_eq!(world.ask(a, kick).unwrap_err().code, "nobody_to_remove");
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
    let update = Command::Update {
        name: Some("new".into()),
        status: None,
        visibility: None,
        tags: None,
        consent: None,
    };
    world.ask(a, update).unwrap();
    world.run(100);
    assert_eq!(present(&world, hosts[1])[&a].0, "new");
}

/// Bytes of a line of the local API.
const LINE: usize = 1024 * 1024;

#[test]
fn no_text_of_a_peer_makes_an_event_that_does_not_fit_a_line() {
    let mut world = World::new(605);
    let host = world.daemon();
    let (a, b) = (world.agent(host, "a"), world.agent(host, "b"));
    befriend(&mut world, a, b);
    let room = create(&mut world, a, "square", RoomType::Public);
    join(&mut world, b, &room);
    let shown = world.slots[&a].shown.len();
    // A friend's process of our own user, with names, paths, answers and messages beyond reason.
    let raw = world.raw(HostSpec::default());
    let door = world.door(&a);
    let session = world.raw_dial(raw, door);
    world.run(50);
    let me = world.device(raw);
    let long = "x".repeat(2 * LINE);
    let name = "n".repeat(60 * 1024);
    state(&mut world, raw, session, Patch::AgentUpsert { agent: record(me, 1, &name) });
    room_verb(&mut world, raw, session, "room.join", &room.to_string(), None);
    world.run(50);
    state(&mut world, raw, session, Patch::AgentUpsert { agent: record(me, 2, &name[1..]) });
    // `named` would not make such a path.
    let path = format!("{me}/{long}");
    let mut far = room_record(&RoomPath::named(me, "far").unwrap(), 1, &[(me, 1)]);
    far.id.clone_from(&path);
    state(&mut world, raw, session, Patch::RoomUpsert { room: far });
    // In the name of one whose messages `a` takes.
    let forged = |text: &str, id: &str| RoomMessage {
        id: id.into(),
        from: b,
        room: room.to_string(),
        content: text.into(),
        timestamp: "2027-01-15T08:00:00.000Z".into(),
        reply_to: None,
        read_by: vec![b],
        streaming_behavior: None,
    };
    let messages = vec![forged(&long, "aa"), forged("short", &long)];
    for message in messages.clone() {
        let event = DeliveryEvent::RoomMessage { message };
        state(&mut world, raw, session, Patch::Delivery { agent_id: a, event: event.clone() });
        let snapshot = Snapshot {
            delivery_queues: [(a.hex(), vec![event])].into(),
            messages: [(room.to_string(), messages.clone())].into(),
            ..Snapshot::default()
        };
        say(&mut world, raw, session, &MeshMessage::StateSync(Box::new(snapshot)));
    }
    // And as the owner of a room that `a` asks to be let into.
    let op = world.command(a, Command::JoinRoom(RoomPath::named(me, "gate").unwrap()));
    world.run(50);
    let asked = world.raw_mut(raw).heard.iter().rev().find_map(|(at, frame)| match frame {
        Frame::ManageRequest(request) if request.command.verb == "room:member" => {
            Some((*at, request.request_id))
        }
        _ => None,
    });
    let (at, request_id) = asked.unwrap();
    let outcome = Outcome::Error { code: long.clone(), message: Some(long.clone()) };
    world.raw_send(raw, at, Frame::ManageResponse(ManageResponse { request_id, outcome }));
    world.run(50);
    let refused = world.replies[&op].clone().unwrap_err();
    assert!(refused.message.len() < LINE / 8);
    let events: Vec<_> = world.slots[&a].shown[shown..].to_vec();
    assert!(!events.is_empty());
    for event in events {
        assert!(event_bytes(&event.event).len() < LINE / 8);
    }
    assert!(world.node(host).rooms(None).iter().all(|view| view.record.id.len() < 1000));
    let history = world.node(host).room_messages(&room, &a).unwrap();
    assert_eq!(history.count(), 0);
}

#[test]
fn who_has_gone_takes_no_place_of_those_who_are_here() {
    let mut world = World::new(606);
    // The other one holds the role, and with it the duty to clean up.
    let first = world.daemon();
    world.agent(first, "a");
    world.run(100);
    let host = world.daemon();
    let b = world.agent(host, "b");
    world.run(3_000);
    assert!(!world.node(host).status().role_held);
    // Many agents that never come back.
    for n in 0..=MAX_PARKED {
        let mut scalar = [1u8; 32];
        scalar[..8].copy_from_slice(&(n as u64 + 1_000).to_be_bytes());
        let key = DeviceKey::from_scalar(&scalar).unwrap();
        let id = key.id();
        let agent = AgentSpec {
            name: "fly".into(),
            harness: "sim".into(),
            cwd: "/".into(),
            key: "/".into(),
            tokens: Vec::new(),
            services: Vec::new(),
            grants: Vec::new(),
            ephemeral: true,
            resumed: false,
        };
        let add = AddDevice { key, data_port: 9, agent: Some(agent) };
        world.input(host, Input::AddDevice(Box::new(add)));
        world.input(host, Input::RemoveDevice(id));
    }
    // One that does still finds its mail.
    world.slots.get_mut(&b).unwrap().ack = Ack::Never;
    world.ask(b, dm(b, "a note")).unwrap();
    world.detach(b);
    world.run(50);
    world.attach(b);
    assert_eq!(world.node(host).inbox(&b, 0).count(), 1);
    // Nor do records stay for ever, whoever has the role.
    world.run(31 * 60 * 1_000);
    let known = world.node(host).agents(None, world.clock(host)).len();
    assert!(known < 5, "{known}");
    // A full table makes room for an agent that is here.
    let raw = world.raw(HostSpec::default());
    let door = world.door(&b);
    let session = world.raw_dial(raw, door);
    world.run(50);
    for n in 0..=MAX_AGENTS {
        let mut id = [0xee; 32];
        id[..8].copy_from_slice(&(n as u64).to_be_bytes());
        let agent = record(DeviceId(id), 1, "invented");
        state(&mut world, raw, session, Patch::AgentUpsert { agent });
    }
    world.run(6_000);
    let me = world.device(raw);
    state(&mut world, raw, session, Patch::AgentUpsert { agent: record(me, 1, "visitor") });
    // Nor does a crowd of rooms keep an agent from its own.
    for n in 0..=MAX_ROOMS {
        let path = RoomPath::named(me, &format!("r{n}")).unwrap();
        let room = room_record(&path, 1, &[(me, 1)]);
        state(&mut world, raw, session, Patch::RoomUpsert { room });
    }
    world.run(50);
    assert_eq!(present(&world, host)[&me].0, "visitor");
    create(&mut world, b, "mine", RoomType::Public);
}

#[test]
fn a_kick_withdraws_every_token_of_a_member() {
    let mut world = World::new(607);
    let host = world.daemon();
    let a = world.agent(host, "a");
    world.run(100);
    let room = create(&mut world, a, "square", RoomType::Public);
    let (raw, session) = intruder(&mut world, a);
    let me = world.device(raw);
    for _ in 0..3 {
        room_verb(&mut world, raw, session, "room.join", &room.to_string(), None);
        world.run(50);
    }
    world.ask(a, Command::Kick { room: room.clone(), agent: me }).unwrap();
    world.run(50);
    let heard = &world.raw_mut(raw).heard;
    let mut granted = Vec::new();
    let mut revoked = Vec::new();
    for (_, frame) in heard {
        match frame {
            Frame::ManageResponse(ManageResponse { outcome: Outcome::Ok(members), .. }) => {
                let token = members.get("granted-token").cloned();
                let token = token.and_then(|token| CoseSign1::from_value(token).ok());
                granted.extend(token.and_then(|token| TokenClaims::of(&token)));
            }
            Frame::RevocationAnnounce { entries } => {
                revoked.extend(entries.iter().map(|entry| RevocationEntry::parse(entry).unwrap()));
            }
            _ => {}
        }
    }
    assert_eq!(granted.len(), 3);
    for claims in granted {
        assert!(revoked.iter().any(|entry| entry.token_id() == claims.token_id));
    }
}

#[test]
fn a_member_that_asks_again_changes_nothing() {
    let mut world = World::new(608);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    let room = create(&mut world, a, "square", RoomType::Public);
    join(&mut world, b, &room);
    let (raw, session) = intruder(&mut world, a);
    let me = world.device(raw);
    let ask =
        |world: &mut World| room_verb(world, raw, session, "room.join", &room.to_string(), None);
    ask(&mut world);
    world.run(100);
    let version = |world: &World| world.node(hosts[0]).room(&room, None).unwrap().record.version;
    let before = version(&world);
    assert!(members(&world, hosts[1], &room).unwrap().contains(&me));
    let asked: Vec<u64> = (0..50).map(|_| ask(&mut world)).collect();
    world.run(100);
    let given = answers(&mut world, raw);
    assert!(asked.iter().all(|id| given[id] == "ok"), "{given:?}");
    assert_eq!(version(&world), before);
    // Put out, it has to be let in: the shortcut is a member's.
    world.ask(a, Command::Kick { room: room.clone(), agent: me }).unwrap();
    world.run(100);
    let late = ask(&mut world);
    world.run(100);
    assert!(!answers(&mut world, raw).contains_key(&late));
    assert!(!members(&world, hosts[0], &room).unwrap().contains(&me));
}
