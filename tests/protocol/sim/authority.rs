//! Who is believed what: strangers, peers of our own user, other users, other machines; lies,
//! replays and floods (decisions 5 to 8; `transport.md` 2.3, `rooms.md` 10 item 25).

use commsd::codec::cbor::Value;
use commsd::identity::device::DeviceId;
use commsd::mesh::directory::MAX_DEVICES;
use commsd::mesh::events::{DeliveryEvent, DeliveryState};
use commsd::mesh::formation::{MAX_DIALS_IN_FLIGHT, MAX_PEERS, PortState};
use commsd::mesh::message::{MeshMessage, Patch, Snapshot};
use commsd::mesh::node::{Command, CommandResult, DecisionTarget, DialTarget, Origination};
use commsd::mesh::records::{AgentStatus, DmMessage, MAX_VERSION, PeerInfo, RoomMessage, RoomType};
use commsd::mesh::replica::{MAX_AGENTS, MAX_ROOMS};
use commsd::mesh::session::{Policy, SessionId};
use commsd::mesh::wire::advert::PeerAdvert;
use commsd::mesh::wire::claim::MAX_TERM;
use commsd::mesh::wire::frame::Frame;
use commsd::mesh::wire::room_path::RoomPath;
use commsd::mesh::wire::scope::Scope;

use super::support::{
    advert, answers, befriend, claim, count, create, dm, formed, has_one_coordinator, join,
    members, present, record, request, room_record, room_verb, say, send, state, to_room, told,
    two_machines,
};
use super::world::{HostSpec, PORT, World, key};

/// A raw peer with a data session to a device.
fn visitor(world: &mut World, spec: HostSpec, device: DeviceId) -> (usize, SessionId) {
    let raw = world.raw(spec);
    let door = world.door(&device);
    let session = world.raw_dial(raw, door);
    world.run(50);
    (raw, session)
}

fn same_user() -> HostSpec {
    HostSpec::default()
}

fn other_user() -> HostSpec {
    HostSpec { user: 1001, ..HostSpec::default() }
}

fn refused(world: &World, host: usize) -> u64 {
    world.node(host).status().counters.refused
}

fn introduce() -> MeshMessage {
    MeshMessage::Introduce { peer_id: "whoever".into(), data_port: Some(9) }
}

#[test]
fn a_stranger_at_the_port_is_not_heard_before_it_introduces_itself() {
    let mut world = World::new(1);
    let host = world.daemon();
    let a = world.agent(host, "a");
    world.run(100);
    let raw = world.raw(same_user());
    let port = DialTarget::Loopback(PORT);
    let session = world.raw_dial(raw, port.clone());
    // Asked too early: a bare ok for room verbs, an answer for version.get, silence for a claim.
    let node = || Scope { kind: "node".into(), path: None };
    let verb = |verb: &str| Value::map([("verb", Value::from(verb))]);
    let early = [
        room_verb(&mut world, raw, session, "room.members", &format!("{a}/x"), None),
        request(&mut world, raw, session, "path:trace", verb("path.trace"), node(), None),
        request(&mut world, raw, session, "version:get", verb("version.get"), node(), None),
    ];
    world.raw_send(
        raw,
        session,
        Frame::Coordinator { term: 9, coordinator: world.device(raw), capacity_hint: None },
    );
    world.run(100);
    let given = answers(&mut world, raw);
    assert!(early.iter().all(|id| given[id] == "ok"), "{given:?}");
    let detailed = world.raw_mut(raw).heard.iter().filter(|(_, frame)| {
        matches!(frame, Frame::ManageResponse(response)
            if format!("{:?}", response.outcome).contains("relayed"))
    });
    assert_eq!(detailed.count(), 0, "nothing but ok");
    assert!(claim(&world, host).is_none());
    // Its advert says nothing of the agent.
    world.run(20_000);
    for (_, frame) in &world.raw_mut(raw).heard {
        if let Frame::Gossip { peers } = frame {
            assert!(peers.iter().all(|peer| peer.extension("agent/self").is_none()));
            assert!(peers.iter().all(|peer| peer.extension("room/hosted").is_none()));
        }
    }
    // Another method than the two closes the session.
    let id = say(&mut world, raw, session, &MeshMessage::PeerList(Vec::new()));
    world.run(50);
    assert_eq!(answers(&mut world, raw)[&id], "not_approved");
    assert_eq!(world.raw_mut(raw).ended.last(), Some(&(session, "not_approved")));
    // One that says nothing is not kept.
    let silent = world.raw_dial(raw, port.clone());
    world.run(31_000);
    assert_eq!(world.raw_mut(raw).ended.last(), Some(&(silent, "quarantine_timeout")));
    // Introduced, it is a peer.
    let session = world.raw_dial(raw, port);
    let id = say(&mut world, raw, session, &introduce());
    let again = say(&mut world, raw, session, &introduce());
    world.run(100);
    assert_eq!(answers(&mut world, raw)[&id], "ok");
    assert_eq!(answers(&mut world, raw)[&again], "ok");
    let told = told(&mut world, raw, session);
    let lists = told.iter().filter(|m| matches!(m, MeshMessage::PeerList(_))).count();
    let joined = told.iter().filter(|m| matches!(m, MeshMessage::PeerJoined(_))).count();
    assert_eq!((lists, joined), (1, 1), "a second introduction is no introduction: {told:?}");
}

#[test]
fn nobody_speaks_for_another() {
    let mut world = World::new(2);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    let (raw, session) = visitor(&mut world, same_user(), a);
    let me = world.device(raw);
    // Its own word is taken.
    state(&mut world, raw, session, Patch::AgentUpsert { agent: record(me, 1, "visitor") });
    world.run(50);
    assert_eq!(present(&world, hosts[0])[&me].0, "visitor");
    // About one that is here: not.
    state(&mut world, raw, session, Patch::AgentUpsert { agent: record(b, 1000, "forged") });
    state(&mut world, raw, session, Patch::AgentUpsert { agent: record(a, 1000, "forged") });
    state(&mut world, raw, session, Patch::AgentOffline { agent_id: b });
    world.run(50);
    let seen = present(&world, hosts[0]);
    assert_eq!((seen[&a].0.as_str(), seen[&b].0.as_str()), ("agent-0", "agent-1"));
    assert_eq!(seen[&b].1, AgentStatus::Active);
    // Our next version is above what was claimed of us.
    let update = Command::Update {
        name: Some("renamed".into()),
        status: None,
        visibility: None,
        tags: None,
        consent: None,
    };
    world.ask(a, update).unwrap();
    world.run(50);
    assert!(world.node(hosts[0]).own_agent(&a).unwrap().version > 1000);
    assert_eq!(present(&world, hosts[1])[&a].0, "renamed");
    // About one nobody knows: hearsay, until it speaks for itself.
    let absent = world.host();
    let absent_id = world.device(absent);
    state(&mut world, raw, session, Patch::AgentUpsert { agent: record(absent_id, 77, "hearsay") });
    world.run(50);
    let known = world.node(hosts[0]).agent_by_id(&absent_id, world.clock(0)).unwrap();
    assert_eq!(
        (known.record.name.as_str(), known.record.status),
        ("hearsay", AgentStatus::Offline)
    );
    // A version that could never be followed.
    let before = refused(&world, hosts[0]);
    let top = record(me, MAX_VERSION + 1, "pinned");
    state(&mut world, raw, session, Patch::AgentUpsert { agent: top });
    world.run(50);
    assert_eq!(present(&world, hosts[0])[&me].0, "visitor");
    assert_eq!(refused(&world, hosts[0]), before + 1);
}

#[test]
fn a_report_that_we_are_offline_is_contradicted_once_a_minute() {
    let mut world = World::new(3);
    let (hosts, agents) = formed(&mut world, 2);
    let (raw, session) = visitor(&mut world, same_user(), agents[0]);
    let upserts = |world: &mut World| {
        let told = told(world, raw, session);
        told.iter()
            .filter(|message| {
                matches!(message, MeshMessage::StateUpdate(patch)
                if matches!(&**patch, Patch::AgentUpsert { agent }
                    if agent.id == agents[0] && agent.status == AgentStatus::Active))
            })
            .count()
    };
    let before = upserts(&mut world);
    for _ in 0..20 {
        state(&mut world, raw, session, Patch::AgentOffline { agent_id: agents[0] });
        world.run(500);
    }
    assert_eq!(upserts(&mut world), before + 1);
    assert!(present(&world, hosts[1]).contains_key(&agents[0]));
    // What came in between is answered once more, when the minute is over.
    world.run(60_000);
    assert_eq!(upserts(&mut world), before + 2);
    world.run(60_000);
    assert_eq!(upserts(&mut world), before + 2);
    let mut dead = record(agents[0], 9000, "agent-0");
    dead.status = AgentStatus::Offline;
    state(&mut world, raw, session, Patch::AgentUpsert { agent: dead });
    world.run(500);
    assert_eq!(upserts(&mut world), before + 3);
    assert!(world.node(hosts[0]).own_agent(&agents[0]).unwrap().version > 9000);
    assert!(present(&world, hosts[1]).contains_key(&agents[0]));
}

#[test]
fn a_room_is_its_owners() {
    let mut world = World::new(4);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    let room = create(&mut world, a, "lounge", RoomType::Public);
    let den = create(&mut world, a, "den", RoomType::Private);
    world.run(50);
    join(&mut world, b, &room);
    send(&mut world, b, to_room(&room, "hello"));
    world.run(50);
    let (raw, session) = visitor(&mut world, same_user(), a);
    let (raw_b, session_b) = visitor(&mut world, same_user(), b);
    let me = world.device(raw);
    // The visitor was given the public room, not the private one, and no history.
    let told_us = format!("{:?}", told(&mut world, raw, session));
    assert!(told_us.contains(&room.to_string()) && !told_us.contains("/den"));
    assert!(!told_us.contains("hello"));
    // Other members, another name: nothing but its own coming is taken.
    let mut forged = room_record(&room, 50, &[(me, 50), (DeviceId([5; 32]), 50)]);
    forged.member_leaves.insert(b, 50);
    forged.description = "forged".into();
    for (raw, session) in [(raw, session), (raw_b, session_b)] {
        state(&mut world, raw, session, Patch::RoomUpsert { room: forged.clone() });
    }
    world.run(50);
    for host in &hosts {
        let held = world.node(*host).room(&room, None).unwrap().record;
        assert_eq!(held.description, "about lounge");
        assert!(held.is_member(&b) && !held.is_member(&DeviceId([5; 32])));
    }
    assert!(world.node(hosts[0]).room(&room, None).unwrap().record.is_member(&me));
    // A private room is not entered so.
    let knock = room_record(&den, 90, &[(me, 90)]);
    state(&mut world, raw, session, Patch::RoomUpsert { room: knock });
    world.run(50);
    assert_eq!(members(&world, hosts[0], &den), Some([a].into()));
    // Nor is a room ended by anybody else.
    state(&mut world, raw, session, Patch::RoomDelete { room_id: room.to_string() });
    world.run(50);
    assert!(members(&world, hosts[0], &room).is_some());
    // A room in our agent's name that it never made: refused, and answered.
    let invented = RoomPath::named(a, "invented").unwrap();
    let claim = room_record(&invented, 3, &[(a, 1), (me, 2)]);
    state(&mut world, raw, session, Patch::RoomUpsert { room: claim });
    world.run(50);
    assert!(members(&world, hosts[0], &invented).is_none());
    let answered = told(&mut world, raw, session).into_iter().any(|message| {
        matches!(message, MeshMessage::StateUpdate(patch)
            if *patch == Patch::RoomDelete { room_id: invented.to_string() })
    });
    assert!(answered);
    // Kicked, it does not come back by its own word.
    world.ask(a, Command::Kick { room: room.clone(), agent: me }).unwrap();
    world.run(50);
    let back = room_record(&room, 200, &[(a, 1), (me, 200)]);
    for (raw, session) in [(raw, session), (raw_b, session_b)] {
        state(&mut world, raw, session, Patch::RoomUpsert { room: back.clone() });
    }
    world.run(50);
    for host in &hosts {
        assert_eq!(members(&world, *host, &room), Some([a, b].into()));
    }
    // Rooms whose path and owner do not fit, or whose versions are out of reach.
    let before = refused(&world, hosts[0]);
    let mut foreign = room_record(&RoomPath::named(me, "mine").unwrap(), 1, &[(me, 1)]);
    foreign.owner = b;
    let mut pinned = room_record(&RoomPath::named(me, "mine").unwrap(), 1, &[(me, 1)]);
    pinned.member_joins.insert(me, MAX_VERSION + 1);
    for room in [foreign, pinned] {
        state(&mut world, raw, session, Patch::RoomUpsert { room });
    }
    world.run(50);
    assert_eq!(refused(&world, hosts[0]), before + 2);
}

#[test]
fn room_verbs_take_a_token_of_the_right_kind() {
    let mut world = World::new(5);
    let (_, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    let room = create(&mut world, a, "lounge", RoomType::Public);
    world.run(50);
    join(&mut world, b, &room);
    let (raw, session) = visitor(&mut world, same_user(), a);
    let me = world.device(raw);
    let stolen = world.slots[&b].tokens[&room].clone();
    let path = room.to_string();
    let between = RoomPath::dm(a, b).unwrap().to_string();
    let cases = [
        (room_verb(&mut world, raw, session, "room.send", &path, None), "unauthorized"),
        (
            room_verb(&mut world, raw, session, "room.send", &path, Some(stolen.clone())),
            "unauthorized",
        ),
        (room_verb(&mut world, raw, session, "room.members", &path, Some(stolen)), "unauthorized"),
        // The reference dies of such a path.
        (
            room_verb(&mut world, raw, session, "room.join", "nonsense", None),
            "malformed_scope_path",
        ),
        (room_verb(&mut world, raw, session, "room.rekey", &path, None), "unsupported_verb"),
        // A third device names a pair that it is not in.
        (room_verb(&mut world, raw, session, "room.join", &between, None), "not_participant"),
        (room_verb(&mut world, raw, session, "room.invite", &path, None), "malformed_params"),
        (room_verb(&mut world, raw, session, "room.join", &format!("{b}/x"), None), "not_owner"),
    ];
    let scope = Scope { kind: "room".into(), path: None };
    let params = Value::map([("verb", Value::from("room.send"))]);
    let id = request(&mut world, raw, session, "room:member", params, scope, None);
    world.run(50);
    let given = answers(&mut world, raw);
    assert_eq!(given[&id], "missing_scope_path");
    for (id, expected) in cases {
        assert_eq!(given[&id], expected);
    }
    // Let in, it may write; put out, it may not, whatever it still holds.
    let joined = room_verb(&mut world, raw, session, "room.join", &path, None);
    world.run(50);
    let token = world
        .raw_mut(raw)
        .heard
        .iter()
        .find_map(|(_, frame)| match frame {
            Frame::ManageResponse(response) if response.request_id == joined => {
                match &response.outcome {
                    commsd::mesh::wire::frame::Outcome::Ok(members) => {
                        members.get("granted-token").cloned()
                    }
                    _ => None,
                }
            }
            _ => None,
        })
        .unwrap();
    let token = commsd::mesh::wire::cose::CoseSign1::from_value(token).unwrap();
    let sent = room_verb(&mut world, raw, session, "room.send", &path, Some(token.clone()));
    world.run(50);
    assert_eq!(answers(&mut world, raw)[&sent], "ok");
    assert!(world.slots[&a].texts().contains(&"raw text".to_owned()));
    world.ask(a, Command::Kick { room: room.clone(), agent: me }).unwrap();
    let sent = room_verb(&mut world, raw, session, "room.send", &path, Some(token));
    world.run(50);
    assert_eq!(answers(&mut world, raw)[&sent], "unauthorized");
    let leaks = format!("{:?}", world.raw_mut(raw).ended);
    assert_eq!(leaks, "[]", "mistakes cost no session");
}

#[test]
fn another_user_of_the_machine_hears_and_says_less() {
    let mut world = World::new(6);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    befriend(&mut world, a, b);
    let room = create(&mut world, a, "lounge", RoomType::Public);
    let den = create(&mut world, a, "den", RoomType::Private);
    world.run(50);
    join(&mut world, b, &room);
    send(&mut world, b, to_room(&room, "between us"));
    let (raw, session) = visitor(&mut world, other_user(), a);
    let me = world.device(raw);
    state(&mut world, raw, session, Patch::AgentUpsert { agent: record(me, 1, "neighbour") });
    world.run(100);
    assert_eq!(present(&world, hosts[0])[&me].0, "neighbour");
    let whose = |device| world.node(hosts[0]).origination(device, world.clock(hosts[0]));
    assert_eq!((whose(&me), whose(&b)), (Origination::OtherUser, Origination::OwnUser));
    // It is told who is there, not what was said.
    let heard = told(&mut world, raw, session);
    assert!(heard.iter().all(|message| !matches!(message, MeshMessage::StateSync(_))));
    let heard = format!("{:?}", world.raw_mut(raw).heard);
    assert!(heard.contains("agent-0") && !heard.contains("between us") && !heard.contains("/den"));
    assert!(!heard.contains("/work/agent-0"), "no directory in its adverts");
    // Statements about others, events for our agents, the port: not from there.
    let before = refused(&world, hosts[0]);
    let absent = DeviceId([6; 32]);
    state(&mut world, raw, session, Patch::AgentUpsert { agent: record(absent, 1, "x") });
    let event = DeliveryEvent::Dm {
        message: DmMessage {
            id: "00".into(),
            from: b,
            to: a,
            content: "forged".into(),
            timestamp: String::new(),
            reply_to: None,
            read_by: Vec::new(),
            streaming_behavior: None,
        },
    };
    state(&mut world, raw, session, Patch::Delivery { agent_id: a, event: event.clone() });
    say(&mut world, raw, session, &MeshMessage::BecomeCoordinator(Vec::new()));
    let stray = room_record(&RoomPath::named(b, "stray").unwrap(), 1, &[(b, 1)]);
    state(&mut world, raw, session, Patch::RoomUpsert { room: stray });
    let mut snapshot = Snapshot::default();
    snapshot.agents.insert(absent.hex(), record(absent, 1, "x"));
    snapshot.delivery_queues.insert(a.hex(), vec![event]);
    say(&mut world, raw, session, &MeshMessage::StateSync(Box::new(snapshot)));
    world.run(100);
    assert!(refused(&world, hosts[0]) >= before + 4);
    assert!(world.node(hosts[0]).agent_by_id(&absent, world.clock(0)).is_none());
    assert!(!world.slots[&a].texts().contains(&"forged".to_owned()));
    // Rooms and conversations by consent work as for everybody.
    let id = room_verb(&mut world, raw, session, "room.join", &room.to_string(), None);
    world.run(50);
    assert_eq!(answers(&mut world, raw)[&id], "ok");
    assert!(members(&world, hosts[0], &room).unwrap().contains(&me));
    assert_eq!(members(&world, hosts[0], &den), Some([a].into()));
    // So does the election.
    let holder = claim(&world, hosts[0]).unwrap();
    world.raw_send(
        raw,
        session,
        Frame::Coordinator { term: holder.term + 1, coordinator: me, capacity_hint: None },
    );
    world.run(50);
    assert_eq!(claim(&world, hosts[1]).unwrap().coordinator, me);
}

#[test]
fn a_successor_is_named_by_a_peer_of_our_own_user_only() {
    for (spec, obeys) in [(same_user(), true), (other_user(), false)] {
        let mut world = World::new(7);
        let blocker = world.host();
        world.occupy_port(blocker);
        let host = world.daemon();
        let a = world.agent(host, "a");
        world.run(100_000);
        let (raw, session) = visitor(&mut world, spec, a);
        world.release_port();
        say(&mut world, raw, session, &MeshMessage::BecomeCoordinator(Vec::new()));
        world.run(50);
        assert_eq!(world.node(host).status().port == PortState::Holding, obeys);
    }
    // A holder that is named has nothing to do, and says nothing is wrong.
    let mut world = World::new(8);
    let host = world.daemon();
    let a = world.agent(host, "a");
    world.run(100);
    let (raw, session) = visitor(&mut world, same_user(), a);
    say(&mut world, raw, session, &MeshMessage::BecomeCoordinator(Vec::new()));
    world.run(5_000);
    assert_eq!(world.node(host).status().port, PortState::Holding);
    assert!(world.hosts[host].log.iter().all(|(_, event)| event.name != "port_unavailable"));
}

#[test]
fn a_machine_that_asks_is_shown_once_until_it_is_answered() {
    let mut world = World::new(9);
    let spec = HostSpec { durable: true, listens: Some(Policy::Full), ..HostSpec::default() };
    let hosts = [0, 1].map(|machine| {
        let host = world.host_as(HostSpec { machine, ..spec });
        world.start(host);
        host
    });
    let a = world.agent(hosts[0], "near");
    world.run(5_000);
    let far = world.device(hosts[1]);
    let shown = |world: &World| {
        count(world, &a, |event| matches!(event, DeliveryEvent::ConnectionRequest { .. }))
    };
    let pending = |world: &World| world.node(hosts[0]).pending_for_anybody().len();
    for asked in [1, 2] {
        world.run_until(300_000, "its request", |world| shown(world) == asked);
        world.run(1_000);
        world.stop(hosts[0]);
        world.run(1_000);
        world.start(hosts[0]);
        world.run_until(300_000, "its request again", |world| pending(world) == 1);
        world.run(5_000);
        assert_eq!(shown(&world), asked, "acknowledged, it is not put again");
        let target = DecisionTarget::Connection(far);
        let no = Command::Reject { target, reason: None };
        assert_eq!(world.ask(a, no), Ok(CommandResult::Done));
        world.run(1_000);
        // Neither remembers who has refused whom: the next one is a new question.
        hosts.iter().for_each(|host| world.stop(*host));
        world.run(1_000);
        hosts.iter().for_each(|host| world.start(*host));
    }
}

#[test]
fn another_machine_is_let_in_by_an_agent_and_then_is_a_peer() {
    let mut world = World::new(9);
    // Both hear each other's broadcast and knock; nobody is let in by itself.
    let ([near, far], [a, b]) = two_machines(&mut world);
    assert!(!present(&world, near).contains_key(&b));
    assert!(world.node(near).status().peers.iter().all(|peer| !peer.admitted));
    let request = world.find(&a, |event| match event {
        DeliveryEvent::ConnectionRequest { peer_id, .. } => Some(*peer_id),
        _ => None,
    });
    assert_eq!(request, Some(world.device(far)));
    let yes = Command::Accept(DecisionTarget::Connection(world.device(far)));
    assert_eq!(world.ask(a, yes), Ok(CommandResult::Done));
    world.run(2_000);
    let peers = world.node(near).status().peers;
    assert!(peers.iter().any(|peer| peer.admitted && !peer.machine_local), "{peers:?}");
    // No election, no snapshot, no port between machines.
    assert!(claim(&world, near) != claim(&world, far) || claim(&world, near).is_none());
    world.run(20_000);
    assert_ne!(claim(&world, near).unwrap().coordinator, claim(&world, far).unwrap().coordinator);
    assert_eq!(world.node(near).status().port, PortState::Holding);
    assert_eq!(world.node(far).status().port, PortState::Holding);
}

#[test]
fn another_machine_that_is_refused_is_left_alone() {
    let mut world = World::new(10);
    let near = world.host_as(HostSpec { listens: Some(Policy::Full), ..HostSpec::default() });
    let a = world.agent(near, "near");
    world.start(near);
    let raw = world.raw(HostSpec { machine: 1, ..HostSpec::default() });
    let door = world.network_door(near);
    let session = world.raw_dial(raw, door.clone());
    // Introducing itself is for the machine's own.
    let id = say(&mut world, raw, session, &introduce());
    world.run(50);
    assert_eq!(answers(&mut world, raw)[&id], "not_approved");
    let session = world.raw_dial(raw, door.clone());
    let knock = MeshMessage::ConnectRequest {
        data_port: 9,
        name: "n".repeat(500),
        fingerprint: String::new(),
    };
    let id = say(&mut world, raw, session, &knock);
    world.run(1_000);
    assert!(!answers(&mut world, raw).contains_key(&id), "held open for a human");
    assert_eq!(world.node(near).pending(&a)[0].kind, "mesh");
    let pending = world.node(near).pending(&a)[0].id.clone();
    let no = Command::Reject { target: DecisionTarget::Id(pending), reason: None };
    world.ask(a, no).unwrap();
    world.run(50);
    assert_eq!(answers(&mut world, raw)[&id], "rejected");
    assert!(world.raw_mut(raw).ended.iter().any(|(ended, _)| *ended == session));
    // A second request asks again; nobody answers: five minutes.
    let session = world.raw_dial(raw, door);
    let id = say(&mut world, raw, session, &knock);
    world.run(301_000);
    assert_eq!(answers(&mut world, raw)[&id], "timeout");
    let asked = world.slots[&a].events().filter(
        |event| matches!(event, DeliveryEvent::ConnectionRequest { name, .. } if name.len() <= 64),
    );
    assert_eq!(asked.count(), 2);
    // The data listeners of a machine are not for other machines: a data session from there waits
    // like any other.
    assert!(world.node(near).status().peers.is_empty());
}

#[test]
fn a_yes_counts_for_the_policy_it_was_given_under() {
    let mut world = World::new(35);
    let observe = HostSpec { listens: Some(Policy::Observe), ..HostSpec::default() };
    let near = world.host_as(observe);
    let a = world.agent(near, "near");
    world.start(near);
    let raw = world.raw(HostSpec { machine: 1, ..HostSpec::default() });
    let me = world.device(raw);
    let door = world.network_door(near);
    let knock = |world: &mut World| {
        let session = world.raw_dial(raw, door.clone());
        let name = "raw".into();
        let knock = MeshMessage::ConnectRequest { data_port: 9, name, fingerprint: String::new() };
        let id = say(world, raw, session, &knock);
        world.run(1_000);
        (session, id)
    };
    // An agent of the other machine speaks for itself.
    let gossip = |world: &mut World, session| {
        world.run(2_000);
        let own = [("name", Value::from("visitor")), ("harness", Value::from("raw"))];
        let advert = advert(world, raw, vec![(Value::from("agent/self"), Value::map(own))]);
        world.raw_send(raw, session, Frame::Gossip { peers: vec![advert] });
        world.run(1_000);
        present(world, near).contains_key(&me)
    };
    let let_in = |world: &mut World| {
        let yes = Command::Accept(DecisionTarget::Connection(me));
        assert_eq!(world.ask(a, yes), Ok(CommandResult::Done));
        world.run(1_000);
    };
    let (session, id) = knock(&mut world);
    let_in(&mut world);
    assert_eq!(answers(&mut world, raw)[&id], "ok");
    assert!(!gossip(&mut world, session), "it may listen, and is not heard of");
    // The same listener takes it again; one by which it may do more asks anew.
    let (_, id) = knock(&mut world);
    assert_eq!(answers(&mut world, raw)[&id], "ok");
    world.hosts[near].spec.listens = Some(Policy::Gateway);
    let (session, id) = knock(&mut world);
    assert!(!answers(&mut world, raw).contains_key(&id), "held open for a human");
    let_in(&mut world);
    assert_eq!(answers(&mut world, raw)[&id], "ok");
    assert!(!gossip(&mut world, session), "nobody trusts it");
    world.hosts[near].spec.listens = Some(Policy::Full);
    let (session, id) = knock(&mut world);
    assert!(!answers(&mut world, raw).contains_key(&id), "held open for a human");
    let_in(&mut world);
    assert_eq!(answers(&mut world, raw)[&id], "ok");
    assert!(gossip(&mut world, session));
    // Whoever may do everything may do less.
    world.hosts[near].spec.listens = Some(Policy::RoomsOnly);
    let (_, id) = knock(&mut world);
    assert_eq!(answers(&mut world, raw)[&id], "ok");
}

#[test]
fn forged_and_replayed_adverts_change_nothing() {
    let mut world = World::new(11);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    let (raw, session) = visitor(&mut world, same_user(), a);
    let text = |text: &str| Value::from(text);
    let presence = |word: &str| vec![(text("presence/status"), text(word))];
    // Its own: taken, the newest counts.
    let busy = advert(&world, raw, presence("busy"));
    let me = world.device(raw);
    state(&mut world, raw, session, Patch::AgentUpsert { agent: record(me, 1, "visitor") });
    world.run(1_500);
    let idle = advert(&world, raw, presence("idle"));
    world.raw_send(raw, session, Frame::Gossip { peers: vec![idle] });
    world.run(50);
    assert_eq!(present(&world, hosts[0])[&me].1, AgentStatus::Idle);
    world.raw_send(raw, session, Frame::Gossip { peers: vec![busy] });
    world.run(50);
    assert_eq!(present(&world, hosts[0])[&me].1, AgentStatus::Idle, "a replay is old");
    // Somebody else's, altered, or in somebody else's name.
    let mut altered = advert(&world, raw, presence("busy"));
    altered.snapshot_seconds += 10;
    let mut foreign = advert(&world, raw, presence("busy"));
    foreign.device = b;
    let real = PeerAdvert::sign(
        &key(20 + 1),
        Vec::new(),
        world.clock(0).unix.seconds() as i64 + 5,
        presence("busy"),
    );
    assert_eq!(real.device, b);
    world.raw_send(raw, session, Frame::Gossip { peers: vec![altered, foreign, real] });
    world.run(50);
    let seen = present(&world, hosts[0]);
    assert_eq!((seen[&me].1, seen[&b].1), (AgentStatus::Idle, AgentStatus::Active));
    // One from the far future would win for ever.
    let before = refused(&world, hosts[0]);
    let future =
        PeerAdvert::sign(&world.host_key(raw), Vec::new(), (1 << 53) - 1, presence("busy"));
    world.raw_send(raw, session, Frame::Gossip { peers: vec![future] });
    world.run(50);
    assert_eq!(refused(&world, hosts[0]), before + 1);
    assert_eq!(present(&world, hosts[0])[&me].1, AgentStatus::Idle);
}

#[test]
fn floods_meet_their_bounds_and_are_counted() {
    let mut world = World::new(12);
    let host = world.daemon();
    let a = world.agent(host, "a");
    world.run(100);
    let (raw, session) = visitor(&mut world, same_user(), a);
    let id = |n: usize| {
        let mut bytes = [0xee; 32];
        bytes[..8].copy_from_slice(&(n as u64).to_be_bytes());
        DeviceId(bytes)
    };
    // Agents and rooms, in snapshots and one by one.
    let mut snapshot = Snapshot::default();
    for n in 0..MAX_AGENTS + 500 {
        snapshot.agents.insert(id(n).hex(), record(id(n), 1, "crowd"));
    }
    for n in 0..MAX_ROOMS + 500 {
        let path = RoomPath::named(id(n), "r").unwrap();
        snapshot.rooms.insert(path.to_string(), room_record(&path, 1, &[(id(n), 1)]));
    }
    let before = refused(&world, host);
    say(&mut world, raw, session, &MeshMessage::StateSync(Box::new(snapshot)));
    world.run(100);
    let node = world.node(host);
    assert!(node.agents(None, world.clock(host)).len() <= MAX_AGENTS);
    assert!(node.rooms(None).len() <= MAX_ROOMS);
    let after = refused(&world, host);
    assert!(after >= before + 1_000, "{} refusals", after - before);
    // The log tells of it without being the flood's second victim.
    let lines = world.hosts[host].log.iter().filter(|(_, e)| e.name == "statement_refused");
    assert!(lines.count() < 60);
    // One record with too much text, one room with too many stamps.
    let mut huge = record(world.device(raw), 5, "huge");
    huge.tags = vec!["x".repeat(1000); 100];
    state(&mut world, raw, session, Patch::AgentUpsert { agent: huge });
    let own = RoomPath::named(world.device(raw), "big").unwrap();
    let crowd: Vec<(DeviceId, u64)> = (0..3000).map(|n| (id(n), 1)).collect();
    state(&mut world, raw, session, Patch::RoomUpsert { room: room_record(&own, 1, &crowd) });
    world.run(50);
    assert_eq!(refused(&world, host), after + 2);
    // Peers: the table is bounded, so are the dials; those that answer nothing are forgotten.
    let peers = (0..5_000)
        .map(|n| PeerInfo { id: id(n), port: 1, started_at: String::new(), host: None })
        .collect();
    say(&mut world, raw, session, &MeshMessage::PeerList(peers));
    world.run(20);
    assert!(world.dials_under_way() <= MAX_DIALS_IN_FLIGHT);
    assert!(refused(&world, host) >= after + (5_000 - MAX_PEERS as u64));
    // Questions to the agent.
    let mut asked = Vec::new();
    for _ in 0..60 {
        let path = RoomPath::dm(a, world.device(raw)).unwrap().to_string();
        asked.push(room_verb(&mut world, raw, session, "room.join", &path, None));
    }
    world.run(100);
    let given = answers(&mut world, raw);
    assert!(
        asked.iter().filter(|id| given.get(id).is_some_and(|code| code == "denied")).count() >= 40
    );
    assert_eq!(world.node(host).pending(&a).len(), 1);
    // A minute later all is as before, and the agent still works.
    world.run(120_000);
    let b = world.agent(host, "b");
    befriend(&mut world, a, b);
    assert!(has_one_coordinator(&world));
}

#[test]
fn a_flood_of_adverts_is_bounded() {
    let mut directory = commsd::mesh::directory::Directory::default();
    let now = commsd::codec::time::UnixMillis(1_800_000_000_000);
    let mut one = PeerAdvert::sign(&key(0), Vec::new(), 1_800_000_000, Vec::new());
    for n in 0..MAX_DEVICES + 100 {
        one.device.0[..8].copy_from_slice(&(n as u64).to_be_bytes());
        directory.take(&one, SessionId(1), now);
    }
    assert_eq!(directory.len(), MAX_DEVICES);
    one.addresses = vec!["x".repeat(1000); 100];
    assert_eq!(directory.take(&one, SessionId(1), now), commsd::mesh::directory::Taken::Refused);
}

#[test]
fn events_and_copies_come_from_those_whose_they_are() {
    let mut world = World::new(13);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    let (raw, session) = visitor(&mut world, same_user(), a);
    let me = world.device(raw);
    let message = |from, to, text: &str| DeliveryEvent::Dm {
        message: DmMessage {
            id: "aa".into(),
            from,
            to,
            content: text.into(),
            timestamp: String::new(),
            reply_to: None,
            read_by: Vec::new(),
            streaming_behavior: None,
        },
    };
    // A message of somebody a never agreed to hear from.
    let before = refused(&world, hosts[0]);
    let patch = Patch::Delivery { agent_id: a, event: message(b, a, "unasked") };
    state(&mut world, raw, session, patch);
    let mut snapshot = Snapshot::default();
    snapshot.delivery_queues.insert(a.hex(), vec![message(me, a, "unasked")]);
    say(&mut world, raw, session, &MeshMessage::StateSync(Box::new(snapshot)));
    world.run(50);
    assert!(world.slots[&a].texts().is_empty());
    assert_eq!(refused(&world, hosts[0]), before + 1);
    // A copy to hold, for an author that did not ask for it.
    let patch = Patch::Delivery { agent_id: DeviceId([3; 32]), event: message(b, a, "copy") };
    state(&mut world, raw, session, patch);
    world.run(50);
    assert_eq!(world.node(hosts[0]).status().copies, 0);
    // Notices inject nothing: not even a member forges another's message.
    let room = create(&mut world, a, "lounge", RoomType::Public);
    world.run(50);
    join(&mut world, b, &room);
    let token = world.slots[&b].tokens[&room].clone();
    let forged = commsd::codec::cbor::to_value(&message(a, b, "notice")).unwrap();
    let params = Value::map([("verb", Value::from("room.notify")), ("event", forged)]);
    let scope = Scope { kind: "room".into(), path: Some(room.to_string()) };
    let id = request(&mut world, raw, session, "room:member", params, scope, Some(token));
    world.run(50);
    assert_eq!(answers(&mut world, raw)[&id], "unauthorized");
}

/// A host whose store outlives it, in a mesh with another one, and an agent on it.
fn lasting(world: &mut World) -> (usize, DeviceId) {
    let host = world.host_as(HostSpec { durable: true, ..HostSpec::default() });
    world.start(host);
    let agent = world.agent(host, "lasting");
    let other = world.daemon();
    world.agent(other, "other");
    world.run_until(20_000, "a mesh", |world| {
        super::support::is_full_mesh(world) && has_one_coordinator(world)
    });
    (host, agent)
}

#[test]
fn nobody_speaks_in_the_name_of_an_agent_that_is_ours() {
    let mut world = World::new(21);
    let (host, a) = lasting(&mut world);
    let b = world.agent(host, "roommate");
    befriend(&mut world, a, b);
    let den = create(&mut world, a, "den", RoomType::Public);
    join(&mut world, b, &den);
    send(&mut world, b, to_room(&den, "really"));
    world.run(100);
    let said = |world: &World| {
        let node = world.node(host);
        let room: Vec<_> = node
            .room_messages(&den, &a)
            .unwrap()
            .map(|(_, message)| message.content.clone())
            .collect();
        let path = RoomPath::dm(a, b).unwrap();
        let dms = node.dm_messages(&path, &a).unwrap().count();
        (world.slots[&a].texts(), room, dms)
    };
    let before = said(&world);
    // A commsd by its own word, of our own user.
    let (raw, session) = visitor(&mut world, same_user(), a);
    let dm = DmMessage {
        id: "aa".into(),
        from: b,
        to: a,
        content: "forged".into(),
        timestamp: String::new(),
        reply_to: None,
        read_by: Vec::new(),
        streaming_behavior: None,
    };
    let message = RoomMessage {
        id: "bb".into(),
        room: den.to_string(),
        from: b,
        content: "forged".into(),
        timestamp: String::new(),
        reply_to: None,
        read_by: Vec::new(),
        streaming_behavior: None,
    };
    let events = vec![
        DeliveryEvent::Dm { message: dm.clone() },
        DeliveryEvent::RoomMessage { message: message.clone() },
    ];
    for event in events.clone() {
        state(&mut world, raw, session, Patch::Delivery { agent_id: a, event });
    }
    let mut snapshot = Snapshot::default();
    snapshot.delivery_queues.insert(a.hex(), events);
    snapshot.messages.insert(den.to_string(), vec![message]);
    snapshot.dms.insert(RoomPath::dm(a, b).unwrap().to_string(), vec![dm]);
    say(&mut world, raw, session, &MeshMessage::StateSync(Box::new(snapshot)));
    world.run(1_000);
    assert_eq!(said(&world), before);
}

#[test]
fn a_stored_room_is_its_owners_after_a_restart() {
    let mut world = World::new(22);
    let (host, a) = lasting(&mut world);
    let den = create(&mut world, a, "den", RoomType::Private);
    world.run(1_000);
    world.crash(host);
    world.start(host);
    world.run(3_000);
    let (raw, session) = visitor(&mut world, same_user(), a);
    let me = world.device(raw);
    let held = world.node(host).room(&den, Some(&a)).unwrap().record;
    for version in [held.version + 1, held.version + 900, 10_000_000] {
        let mut forged = room_record(&den, version, &[(me, version)]);
        forged.created_at = held.created_at.clone();
        forged.member_leaves.insert(a, version);
        forged.description = "forged".into();
        state(&mut world, raw, session, Patch::RoomUpsert { room: forged });
        world.run(100);
    }
    let after = world.node(host).room(&den, Some(&a)).unwrap().record;
    assert_eq!((after.kind, after.description), (RoomType::Private, held.description));
    assert_eq!(after.members, [a]);
    assert_eq!(send(&mut world, a, to_room(&den, "mine")).len(), 0);
}

#[test]
fn a_term_at_the_cap_does_not_pin_the_role() {
    for seed in 0..4 {
        let mut world = World::new(seed);
        let (hosts, agents) = formed(&mut world, 3);
        let (raw, session) = visitor(&mut world, same_user(), agents[0]);
        let (_, other) = {
            let door = world.door(&world.device(hosts[1]));
            let session = world.raw_dial(raw, door);
            world.run(50);
            (raw, session)
        };
        let me = world.device(raw);
        let cap = Frame::Coordinator { term: MAX_TERM, coordinator: me, capacity_hint: None };
        let over = Frame::Coordinator { term: MAX_TERM + 1, coordinator: me, capacity_hint: None };
        world.raw_send(raw, session, over);
        world.run(50);
        assert_ne!(claim(&world, hosts[0]).unwrap().coordinator, me, "above the cap: nothing");
        for session in [session, other] {
            world.raw_send(raw, session, cap.clone());
        }
        world.run(200);
        for host in &hosts[..2] {
            assert_eq!(claim(&world, *host).unwrap().coordinator, me);
        }
        world.raw_close(raw);
        world.run_until(60_000, "the role is free again", |world| {
            has_one_coordinator(world) && claim(world, hosts[0]).is_some_and(|c| c.term < 100)
        });
        world.run(40_000);
        assert!(has_one_coordinator(&world));
    }
}

#[test]
fn a_garbled_frame_ends_its_session_alone() {
    let mut world = World::new(14);
    let (hosts, agents) = formed(&mut world, 2);
    let (raw, session) = visitor(&mut world, same_user(), agents[0]);
    // A frame that nobody knows costs nothing.
    let odd = Value::map([("type", Value::from("sing"))]).encode();
    world.raw_bytes(raw, session, odd);
    let id = room_verb(&mut world, raw, session, "room.join", "x", None);
    world.run(50);
    assert!(answers(&mut world, raw).contains_key(&id));
    world.raw_bytes(raw, session, vec![0xff, 0xff]);
    world.run(50);
    assert_eq!(world.raw_mut(raw).ended.last(), Some(&(session, "not_canonical")));
    assert!(has_one_coordinator(&world));
    assert_eq!(hosts.len(), 2);
    let states = send(&mut world, agents[0], dm(agents[1], "still here"));
    assert!(matches!(states[&agents[1]], None | Some(DeliveryState::Delivered)));
}
