//! Rooms between daemons: membership, messages, receipts, and what happens to them when daemons
//! come and go (`rooms.md` 3 and 4; decisions 6 and 7).

use std::collections::BTreeSet;

use commsd::identity::device::DeviceId;
use commsd::mesh::events::{DeliveryEvent, DeliveryState};
use commsd::mesh::node::{Command, CommandResult};
use commsd::mesh::records::{AgentStatus, RoomType};
use commsd::mesh::wire::frame::Frame;
use commsd::mesh::wire::room_path::RoomPath;

use super::support::{
    accept, all_see_all, count, create, formed, is_full_mesh, join, members, reject, reported,
    send, to_room,
};
use super::world::{HostSpec, World};

fn joined(event: &DeliveryEvent, who: &DeviceId) -> bool {
    matches!(event, DeliveryEvent::MemberJoined { agent, .. } if agent == who)
}

fn left(event: &DeliveryEvent, who: &DeviceId) -> bool {
    matches!(event, DeliveryEvent::MemberLeft { agent, .. } if agent == who)
}

fn all_members(world: &World, path: &RoomPath, expected: &[DeviceId]) -> bool {
    let expected: BTreeSet<DeviceId> = expected.iter().copied().collect();
    world.running().iter().all(|host| members(world, *host, path).as_ref() == Some(&expected))
}

#[test]
fn a_public_room_from_beginning_to_end() {
    let mut world = World::new(1);
    let (_, agents) = formed(&mut world, 3);
    let [a, b, c] = agents[..] else { unreachable!() };
    // A fourth agent shares a daemon with the owner.
    let d = world.agent(0, "d");
    world.run(100);
    let room = create(&mut world, a, "lounge", RoomType::Public);
    assert_eq!(room.to_string(), format!("{a}/lounge"));
    world.run_until(1_000, "the room everywhere", |world| all_members(world, &room, &[a]));
    join(&mut world, b, &room);
    join(&mut world, d, &room);
    join(&mut world, c, &room);
    world.run_until(1_000, "all members", |world| all_members(world, &room, &[a, b, c, d]));
    // Members learn of those who come later, each once; the newcomer sees who is there.
    for member in [a, b, d] {
        assert_eq!(count(&world, &member, |event| joined(event, &c)), 1);
    }
    let there = world.find(&c, |event| match event {
        DeliveryEvent::RoomMembers { members, .. } => Some(members.len()),
        _ => None,
    });
    assert_eq!(there, Some(4));
    // A message reaches everybody once, whoever sends it.
    for (n, sender) in [a, b, c, d].into_iter().enumerate() {
        let text = format!("word {n}");
        let states = send(&mut world, sender, to_room(&room, &text));
        assert_eq!(states.len(), 3);
        assert!(states.values().all(|state| *state == Some(DeliveryState::Delivered)));
        world.run(100);
        for member in [a, b, c, d].into_iter().filter(|member| *member != sender) {
            assert_eq!(world.slots[&member].texts().iter().filter(|t| **t == text).count(), 1);
        }
        // Whoever takes a message acknowledges it.
        for member in [a, b, c, d].into_iter().filter(|member| *member != sender) {
            assert_eq!(reported(&world, &sender, &member), [DeliveryState::Read]);
        }
    }
    for member in [a, b, c, d] {
        let node = world.node_of(&member);
        assert_eq!(node.room_messages(&room, &member).unwrap().count(), 4);
    }
    // One leaves.
    assert_eq!(
        world.ask(b, Command::LeaveRoom { room: room.clone(), reason: None }),
        Ok(CommandResult::Done)
    );
    world.run_until(1_000, "b is out", |world| all_members(world, &room, &[a, c, d]));
    for member in [a, c, d] {
        assert_eq!(count(&world, &member, |event| left(event, &b)), 1);
    }
    assert_eq!(count(&world, &b, |event| left(event, &b)), 0, "b knows that it left");
    assert_eq!(world.ask(b, to_room(&room, "x")).unwrap_err().code, "not_member");
    assert!(!world.slots[&b].tokens.contains_key(&room));
    assert!(world.node_of(&b).room_messages(&room, &b).is_none());
    // The end.
    assert_eq!(world.ask(c, Command::DestroyRoom(room.clone())).unwrap_err().code, "not_owner");
    assert_eq!(world.ask(a, Command::DestroyRoom(room.clone())), Ok(CommandResult::Done));
    world.run(100);
    for (agent, told) in [(a, 0), (b, 0), (c, 1), (d, 1)] {
        let ended = |event: &DeliveryEvent| {
            matches!(event, DeliveryEvent::JoinOutcome { room: ended, accepted: false, code, .. }
                if *ended == room.to_string() && code == "destroyed")
        };
        assert_eq!(count(&world, &agent, ended), told, "members hear of the end");
    }
    for host in world.running() {
        assert_eq!(members(&world, host, &room), None);
    }
    assert!(world.slots.values().all(|slot| slot.tokens.is_empty() && slot.grants.is_empty()));
    for agent in [a, b, c, d] {
        let record = world.node_of(&agent).own_agent(&agent).unwrap();
        assert!(record.subscribed_rooms.is_empty());
    }
    // The name is free again.
    let again = create(&mut world, a, "lounge", RoomType::Public);
    assert_eq!(again, room);
    world.run_until(1_000, "the new room", |world| all_members(world, &room, &[a]));
}

#[test]
fn a_private_room_is_entered_by_invitation_or_by_the_owners_word() {
    let mut world = World::new(2);
    let (_, agents) = formed(&mut world, 4);
    let [a, b, c, d] = agents[..] else { unreachable!() };
    let room = create(&mut world, a, "den", RoomType::Private);
    world.run(100);
    // Nobody else has the record, though the room is known from gossip.
    for host in 1..4 {
        let view = world.node(host).room(&room, None);
        assert!(view.is_none_or(|view| view.record.version == 0 && view.record.members.is_empty()));
    }
    // Invited: told, and let in without a question.
    let invite = Command::Invite { room: room.clone(), agent: b };
    assert_eq!(world.ask(a, invite), Ok(CommandResult::Room(room.clone())));
    world.run(100);
    let told = world.find(&b, |event| match event {
        DeliveryEvent::RoomInvite { room, from, from_name, room_description, .. } => {
            Some((room.clone(), *from, from_name.clone(), room_description.clone()))
        }
        _ => None,
    });
    assert_eq!(told, Some((room.to_string(), a, "agent-0".into(), "about den".into())));
    assert_eq!(world.node_of(&b).token_paths(&b), std::slice::from_ref(&room));
    join(&mut world, b, &room);
    world.run(100);
    assert_eq!(members(&world, 1, &room), Some(BTreeSet::from([a, b])));
    assert_eq!(members(&world, 0, &room), Some(BTreeSet::from([a, b])));
    // Declined: the owner is told.
    let invite = Command::Invite { room: room.clone(), agent: c };
    assert_eq!(world.ask(a, invite), Ok(CommandResult::Room(room.clone())));
    assert_eq!(
        world.ask(c, Command::LeaveRoom { room: room.clone(), reason: None }),
        Ok(CommandResult::Done)
    );
    world.run(100);
    assert_eq!(
        count(&world, &a, |event| {
            matches!(event, DeliveryEvent::InviteDeclined { agent, .. } if *agent == c)
        }),
        1
    );
    // Invited while its own question waits: the question is answered by that.
    let op = world.command(d, Command::JoinRoom(room.clone()));
    world.run(100);
    assert_eq!(world.node(0).pending(&a).len(), 1);
    let invite = Command::Invite { room: room.clone(), agent: d };
    assert_eq!(world.ask(a, invite), Ok(CommandResult::Room(room.clone())));
    join(&mut world, d, &room);
    world.run(100);
    assert_eq!(world.node(0).pending(&a).len(), 0);
    assert_eq!(world.replies[&op], Ok(CommandResult::Room(room.clone())));
    let kick = Command::Kick { room: room.clone(), agent: d };
    assert_eq!(world.ask(a, kick), Ok(CommandResult::Room(room.clone())));
    world.run(100);
    // Asked about a room that ends before the answer: there is nothing to be let into.
    let annexe = create(&mut world, a, "annexe", RoomType::Private);
    world.run(100);
    let op = world.command(d, Command::JoinRoom(annexe.clone()));
    world.run(100);
    assert_eq!(world.node(0).pending(&a).len(), 1);
    assert_eq!(world.ask(a, Command::DestroyRoom(annexe)), Ok(CommandResult::Done));
    assert_eq!(world.node(0).pending(&a).len(), 0);
    world.run(100);
    let ended = world.replies[&op].clone().unwrap_err();
    assert!(ended.message.contains("room_not_found"), "{ended:?}");
    // Uninvited: the owner decides. No:
    let op = world.command(d, Command::JoinRoom(room.clone()));
    world.run(500);
    reject(&mut world, a);
    world.run(100);
    assert_eq!(world.replies[&op].clone().unwrap_err().code, "join_refused");
    // Asked again, and the owner takes its time: yes.
    let op = world.command(d, Command::JoinRoom(room.clone()));
    world.run(60_000);
    assert_eq!(world.replies[&op], Ok(CommandResult::JoinPending(room.clone())));
    assert_eq!(
        count(&world, &a, |event| matches!(event, DeliveryEvent::RoomJoinRequest { .. })),
        4
    );
    accept(&mut world, a);
    world.run(100);
    let outcome = world.find(&d, |event| match event {
        DeliveryEvent::JoinOutcome { accepted, .. } => Some(*accepted),
        _ => None,
    });
    assert_eq!(outcome, Some(true));
    for host in [0, 1, 3] {
        assert_eq!(members(&world, host, &room), Some(BTreeSet::from([a, b, d])));
    }
    // The earlier member writes to the later one.
    let states = send(&mut world, b, to_room(&room, "welcome"));
    assert_eq!(states.keys().copied().collect::<BTreeSet<_>>(), BTreeSet::from([a, d]));
    assert!(states.values().all(|state| *state == Some(DeliveryState::Delivered)));
    // Nobody decides: the request times out at the owner's side.
    let op = world.command(c, Command::JoinRoom(room.clone()));
    world.run(310_000);
    assert_eq!(world.replies[&op], Ok(CommandResult::JoinPending(room.clone())));
    let outcome = world.find(&c, |event| match event {
        DeliveryEvent::JoinOutcome { accepted: false, code, .. } => Some(code.clone()),
        _ => None,
    });
    assert_eq!(outcome.as_deref(), Some("timeout"));
    assert!(world.node_of(&a).pending(&a).is_empty());
}

#[test]
fn a_kicked_agent_stays_outside() {
    let mut world = World::new(3);
    let (_, agents) = formed(&mut world, 3);
    let [a, b, c] = agents[..] else { unreachable!() };
    let room = create(&mut world, a, "lounge", RoomType::Public);
    world.run(50);
    join(&mut world, b, &room);
    join(&mut world, c, &room);
    world.run(50);
    let stolen = world.slots[&b].tokens[&room].clone();
    let kick = Command::Kick { room: room.clone(), agent: b };
    assert_eq!(world.ask(a, kick), Ok(CommandResult::Room(room.clone())));
    world.run_until(1_000, "b is out", |world| all_members(world, &room, &[a, c]));
    assert_eq!(count(&world, &b, |event| left(event, &b)), 1, "b is told");
    assert_eq!(count(&world, &c, |event| left(event, &b)), 1);
    assert_eq!(world.ask(b, to_room(&room, "x")).unwrap_err().code, "not_member");
    // Coming back takes the owner's word, public or not.
    let op = world.command(b, Command::JoinRoom(room.clone()));
    world.run(2_000);
    assert_eq!(world.replies[&op], Ok(CommandResult::JoinPending(room.clone())));
    assert!(all_members(&world, &room, &[a, c]));
    reject(&mut world, a);
    world.run(100);
    // Not even with the token it was let in by, after everybody has forgotten the revocation.
    for host in [0, 2] {
        world.crash(host);
        world.run(3_000);
        world.start(host);
        world.run_until(20_000, "its return", is_full_mesh);
    }
    world.slots.get_mut(&b).unwrap().tokens.insert(room.clone(), stolen);
    world.detach(b);
    world.attach(b);
    world.run(5_000);
    assert!(world.ask(b, to_room(&room, "let me in")).is_err());
    assert!(all_members(&world, &room, &[a, c]));
    let states = send(&mut world, a, to_room(&room, "without b"));
    assert_eq!(states.keys().copied().collect::<Vec<_>>(), [c]);
    // The owner may change its mind.
    world.command(b, Command::JoinRoom(room.clone()));
    world.run(2_000);
    accept(&mut world, a);
    world.run_until(1_000, "b is back", |world| all_members(world, &room, &[a, b, c]));
}

#[test]
fn a_secret_room_is_in_no_advert_and_in_no_record_of_outsiders() {
    let mut world = World::new(4);
    let (_, agents) = formed(&mut world, 3);
    let [a, b, c] = agents[..] else { unreachable!() };
    world.watch = true;
    let room = create(&mut world, a, "cellar", RoomType::Secret);
    assert_eq!(room.to_string(), format!("{a}/_cellar"));
    let invite = Command::Invite { room: room.clone(), agent: b };
    assert_eq!(world.ask(a, invite), Ok(CommandResult::Room(room.clone())));
    join(&mut world, b, &room);
    let states = send(&mut world, b, to_room(&room, "psst"));
    assert_eq!(states[&a], Some(DeliveryState::Delivered));
    // A newcomer gets everybody's state, and gossip goes on for a while.
    let late = world.daemon();
    let d = world.agent(late, "late");
    world.run(45_000);
    for seen in &world.seen {
        let outsider = seen.to == 2 || seen.to == late;
        let text = format!("{:?}", seen.frame);
        if outsider || matches!(seen.frame, Frame::Gossip { .. }) {
            assert!(!text.contains("_cellar"), "leaked to h{}: {text}", seen.to);
        }
    }
    for outsider in [c, d] {
        let node = world.node_of(&outsider);
        assert!(node.rooms(Some(&outsider)).iter().all(|view| view.record.id != room.to_string()));
        assert!(node.room_messages(&room, &outsider).is_none());
    }
    assert_eq!(world.node(1).rooms(Some(&b)).len(), 1);
    assert_eq!(world.node(1).rooms(None).len(), 0, "an operator is no member");
}

#[test]
fn a_room_survives_its_owners_restart() {
    for seed in 0..5 {
        let mut world = World::new(seed);
        let (_, agents) = formed(&mut world, 3);
        let [a, b, c] = agents[..] else { unreachable!() };
        let room = create(&mut world, a, "lounge", RoomType::Public);
        let den = create(&mut world, a, "den", RoomType::Private);
        let gone = create(&mut world, a, "gone", RoomType::Public);
        world.run(50);
        join(&mut world, b, &room);
        join(&mut world, c, &room);
        let invite = Command::Invite { room: den.clone(), agent: b };
        world.ask(a, invite).unwrap();
        join(&mut world, b, &den);
        // One peer misses a kick and the end of a room.
        world.partition(&[2], &[0, 1]);
        world.command(a, Command::DestroyRoom(gone.clone()));
        world.command(a, Command::Kick { room: room.clone(), agent: c });
        world.run(90_000);
        world.crash(0);
        world.run(1_000);
        world.heal();
        world.run(5_000);
        world.start(0);
        world.run_until(60_000, "everybody is back", is_full_mesh);
        world.run_until(5_000, "the rooms are as the owner left them", |world| {
            all_members(world, &room, &[a, b])
                && members(world, 0, &den) == Some(BTreeSet::from([a, b]))
                && members(world, 1, &den) == Some(BTreeSet::from([a, b]))
                && (0..3).all(|host| members(world, host, &gone).is_none())
        });
        // The owner is the owner again.
        let states = send(&mut world, b, to_room(&den, "still here"));
        assert_eq!(states[&a], Some(DeliveryState::Delivered));
        assert!(world.ask(a, Command::Kick { room: den.clone(), agent: b }).is_ok());
        world.run(100);
        assert_eq!(members(&world, 0, &den), Some(BTreeSet::from([a])));
        assert!(world.ask(b, to_room(&den, "x")).is_err());
    }
}

#[test]
fn a_room_message_waits_for_an_absent_member() {
    let mut world = World::new(5);
    let (_, agents) = formed(&mut world, 3);
    let [a, b, c] = agents[..] else { unreachable!() };
    let room = create(&mut world, a, "lounge", RoomType::Public);
    world.run(50);
    join(&mut world, b, &room);
    join(&mut world, c, &room);
    world.crash(2);
    world.run(2_000);
    let states = send(&mut world, b, to_room(&room, "for the absent"));
    assert_eq!(states[&a], Some(DeliveryState::Delivered));
    assert_eq!(states[&c], Some(DeliveryState::Queued { reason: "not_connected".into() }));
    world.start(2);
    world.run_until(20_000, "the message", |world| {
        world.slots[&c].texts() == ["for the absent"]
            && reported(world, &b, &c).contains(&DeliveryState::Delivered)
    });
    world.run(60_000);
    assert_eq!(world.slots[&c].texts().len(), 1);
    assert_eq!(reported(&world, &b, &c), [DeliveryState::Delivered, DeliveryState::Read]);
}

#[test]
fn owners_leave_and_empty_rooms_end() {
    let mut world = World::new(6);
    let (_, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    let room = create(&mut world, a, "lounge", RoomType::Public);
    world.run(50);
    join(&mut world, b, &room);
    assert_eq!(
        world.ask(a, Command::LeaveRoom { room: room.clone(), reason: None }),
        Ok(CommandResult::Done)
    );
    world.run_until(1_000, "the owner is out", |world| all_members(world, &room, &[b]));
    assert_eq!(count(&world, &b, |event| left(event, &a)), 1);
    join(&mut world, a, &room);
    world.run_until(1_000, "and in again", |world| all_members(world, &room, &[a, b]));
    assert_eq!(
        world.ask(b, Command::LeaveRoom { room: room.clone(), reason: None }),
        Ok(CommandResult::Done)
    );
    world.run(100);
    assert_eq!(
        world.ask(a, Command::LeaveRoom { room: room.clone(), reason: None }),
        Ok(CommandResult::Done)
    );
    // Gossip may show it a moment longer.
    world.run(500);
    assert_eq!(members(&world, 1, &room), None);
}

#[test]
fn what_cannot_be_done_to_a_room_says_why() {
    let mut world = World::new(7);
    let (_, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    let room = create(&mut world, a, "lounge", RoomType::Public);
    world.run(50);
    let code = |world: &mut World, agent, command| world.ask(agent, command).unwrap_err().code;
    let nowhere = RoomPath::named(b, "nowhere").unwrap();
    let create = |name: &str| Command::CreateRoom {
        name: name.into(),
        kind: RoomType::Public,
        description: String::new(),
    };
    assert_eq!(code(&mut world, a, create("lounge")), "room_exists");
    assert_eq!(code(&mut world, a, create("...")), "invalid_name");
    assert_eq!(code(&mut world, a, create(&"n".repeat(200))), "too_large");
    assert_eq!(code(&mut world, a, to_room(&nowhere, "x")), "room_not_found");
    assert_eq!(code(&mut world, b, to_room(&room, "x")), "not_member");
    assert_eq!(
        code(&mut world, b, Command::LeaveRoom { room: room.clone(), reason: None }),
        "not_member"
    );
    assert_eq!(code(&mut world, b, Command::Kick { room: room.clone(), agent: a }), "not_owner");
    assert_eq!(code(&mut world, b, Command::Invite { room: room.clone(), agent: a }), "not_owner");
    assert_eq!(code(&mut world, a, Command::Kick { room: room.clone(), agent: a }), "own_room");
    let kick = Command::Kick { room: room.clone(), agent: b };
    assert_eq!(code(&mut world, a, kick), "nobody_to_remove");
    assert_eq!(code(&mut world, a, Command::DestroyRoom(nowhere.clone())), "room_not_found");
    let stranger = RoomPath::named(DeviceId([9; 32]), "far").unwrap();
    assert_eq!(code(&mut world, a, Command::JoinRoom(stranger)), "not_connected");
    assert_eq!(code(&mut world, a, Command::JoinRoom(nowhere)), "room_not_found");
    assert_eq!(code(&mut world, a, to_room(&room, &"x".repeat(300_000))), "too_large");
}

#[test]
fn agents_of_a_daemon_that_stops_do_not_hear_of_each_others_absence() {
    let mut world = World::new(6);
    let durable = HostSpec { durable: true, ..HostSpec::default() };
    let hosts = [0, 1].map(|_| {
        let host = world.host_as(durable);
        world.start(host);
        host
    });
    let [a, c] = hosts.map(|host| world.agent(host, &format!("agent-{host}")));
    let b = world.agent(hosts[0], "roommate");
    world.run_until(20_000, "a mesh", is_full_mesh);
    let room = create(&mut world, a, "lounge", RoomType::Public);
    world.run(100);
    join(&mut world, b, &room);
    join(&mut world, c, &room);
    world.run(100);
    world.stop(hosts[0]);
    world.run(1_000);
    world.start(hosts[0]);
    world.run_until(60_000, "its return", |world| is_full_mesh(world) && all_see_all(world));
    let news = |world: &World, agent: &DeviceId, about: &DeviceId| -> Vec<AgentStatus> {
        let events = world.slots[agent].events();
        events
            .filter_map(|event| match event {
                DeliveryEvent::MemberStatus { agent, status, .. } if agent == about => {
                    Some(*status)
                }
                _ => None,
            })
            .collect()
    };
    assert_eq!(news(&world, &a, &b), []);
    assert_eq!(news(&world, &b, &a), []);
    // To others it is news, both times.
    for about in [a, b] {
        assert_eq!(news(&world, &c, &about), [AgentStatus::Offline, AgentStatus::Active]);
    }
}

#[test]
fn only_our_own_user_is_told_where_an_agent_that_invites_works() {
    let mut world = World::new(7);
    let (_, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    let other_user = world.host_as(HostSpec { user: 1002, ..HostSpec::default() });
    world.start(other_user);
    let outsider = world.agent(other_user, "outsider");
    world.run_until(20_000, "everybody", |world| is_full_mesh(world) && all_see_all(world));
    let room = create(&mut world, a, "den", RoomType::Private);
    for (invitee, cwd) in [(b, "/work/agent-0"), (outsider, "")] {
        let invite = Command::Invite { room: room.clone(), agent: invitee };
        assert_eq!(world.ask(a, invite), Ok(CommandResult::Room(room.clone())));
        world.run(100);
        let told = world.find(&invitee, |event| match event {
            DeliveryEvent::RoomInvite { from_name, from_cwd, .. } => {
                Some((from_name.clone(), from_cwd.clone()))
            }
            _ => None,
        });
        assert_eq!(told, Some(("agent-0".to_owned(), cwd.to_owned())));
    }
}
