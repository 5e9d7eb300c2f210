//! Direct messages: consent, delivery, retry, copies for the absent, receipts, storage that fails
//! (`rooms.md` 1.9, 1.10, 3.11 and 6; decisions 1 to 3 and 21).

use std::collections::BTreeSet;

use commsd::identity::device::DeviceId;
use commsd::mesh::events::{DeliveryEvent, DeliveryState};
use commsd::mesh::node::{Command, CommandResult, DecisionTarget};
use commsd::mesh::records::{ConsentPolicy, RoomType, Visibility};
use commsd::mesh::wire::room_path::RoomPath;
use commsd::store::{Faults, Store as _};

use super::support::{
    accept, all_see_all, befriend, count, create, dm, formed, is_full_mesh, join, reject, reported,
    send, to_room,
};
use super::world::{Ack, HostSpec, World};

fn asked(world: &World, agent: &DeviceId) -> usize {
    count(world, agent, |event| matches!(event, DeliveryEvent::RoomJoinRequest { .. }))
}

#[test]
fn writing_to_who_asks_is_a_yes() {
    for same_daemon in [false, true] {
        let mut world = World::new(9);
        let (hosts, agents) = formed(&mut world, 2);
        let a = agents[0];
        let b = if same_daemon { world.agent(hosts[0], "roommate") } else { agents[1] };
        world.run(100);
        assert_eq!(send(&mut world, a, dm(b, "may I"))[&b], None, "consent is awaited");
        assert_eq!(world.node_of(&b).pending(&b).len(), 1);
        let answer = send(&mut world, b, dm(a, "of course"));
        assert_eq!(answer[&a], Some(DeliveryState::Delivered));
        assert!(world.node_of(&b).pending(&b).is_empty(), "no question is left");
        world.run(1_000);
        assert_eq!(world.slots[&b].texts(), ["may I"]);
        assert_eq!(reported(&world, &a, &b)[..1], [DeliveryState::Delivered]);
        assert_eq!(send(&mut world, a, dm(b, "thanks"))[&b], Some(DeliveryState::Delivered));
        assert_eq!(asked(&world, &b), 1);
        assert_eq!(asked(&world, &a), 0);
    }
}

fn queued(reason: &str) -> Option<DeliveryState> {
    Some(DeliveryState::Queued { reason: reason.into() })
}

#[test]
fn the_first_message_waits_for_consent_in_each_direction_once() {
    for same_daemon in [false, true] {
        let mut world = World::new(1);
        let (hosts, agents) = formed(&mut world, 2);
        let a = agents[0];
        let b = if same_daemon { world.agent(hosts[0], "roommate") } else { agents[1] };
        world.run(100);
        let states = send(&mut world, a, dm(b, "first"));
        assert_eq!(states[&b], None, "consent is awaited");
        // More of them wait behind the first and ask nothing again.
        let states = send(&mut world, a, dm(b, "second"));
        assert_eq!(states[&b], None);
        assert_eq!(asked(&world, &b), 1);
        assert!(world.slots[&b].texts().is_empty());
        let pending = world.node_of(&b).pending(&b);
        let path = RoomPath::dm(a, b).unwrap();
        assert_eq!(pending[0].requester, a);
        assert_eq!(pending[0].requester_name, "agent-0");
        assert_eq!(pending[0].room, Some(path.to_string()));
        // By pair instead of id.
        let yes = Command::Accept(DecisionTarget::Pair(path.clone(), a));
        assert_eq!(world.ask(b, yes), Ok(CommandResult::Done));
        world.run(100);
        assert_eq!(world.slots[&b].texts(), ["first", "second"]);
        // The recipient has nothing yet that lets it write: for its receipts it asks, and nobody
        // is asked in turn.
        use DeliveryState::{Delivered, Read};
        assert_eq!(reported(&world, &a, &b), [Delivered, Delivered, Read, Read]);
        assert_eq!(asked(&world, &a), 0);
        // The answer needs no consent, and then each is acknowledged.
        let states = send(&mut world, b, dm(a, "answer"));
        assert_eq!(states[&a], Some(DeliveryState::Delivered));
        assert_eq!(asked(&world, &a), 0);
        let states = send(&mut world, a, dm(b, "third"));
        assert_eq!(states[&b], Some(DeliveryState::Delivered));
        world.run(100);
        assert_eq!(world.slots[&a].texts(), ["answer"]);
        assert_eq!(reported(&world, &b, &a), [DeliveryState::Read]);
        assert_eq!(reported(&world, &a, &b).last(), Some(&DeliveryState::Read));
        for agent in [a, b] {
            let node = world.node_of(&agent);
            assert_eq!(node.dm_messages(&path, &agent).unwrap().count(), 4);
        }
    }
}

#[test]
fn a_refusal_is_reported_and_a_repeated_request_asks_again() {
    let mut world = World::new(2);
    let (_, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    for round in 1..=3 {
        send(&mut world, a, dm(b, "please"));
        assert_eq!(asked(&world, &b), round);
        reject(&mut world, b);
        world.run(100);
        let refused = DeliveryState::Refused { code: "denied: not today".into() };
        assert_eq!(reported(&world, &a, &b), vec![refused; round]);
    }
    // Waiting for the answer says the same in the result.
    let op = world.command(
        a,
        Command::Dm { to: b, text: "x".into(), reply_to: None, behavior: None, wait_ms: 60_000 },
    );
    world.run(20_000);
    assert!(!world.replies.contains_key(&op));
    accept(&mut world, b);
    world.run(100);
    match &world.replies[&op] {
        Ok(CommandResult::Sent { deliveries, .. }) => {
            assert_eq!(deliveries[0].state, Some(DeliveryState::Delivered));
        }
        other => panic!("{other:?}"),
    }
    // The refused agent is open to the other: its own request was consent.
    let states = send(&mut world, b, dm(a, "after all"));
    assert_eq!(states[&a], Some(DeliveryState::Delivered));
}

#[test]
fn an_agent_says_who_may_begin_conversations_with_it() {
    let mut world = World::new(2);
    let (hosts, agents) = formed(&mut world, 2);
    let other_user = world.host_as(HostSpec { user: 1002, ..HostSpec::default() });
    world.start(other_user);
    let [a, b] = agents[..] else { unreachable!() };
    let delivered = Some(DeliveryState::Delivered);
    let denied = Some(DeliveryState::Refused { code: "denied".into() });
    // (policy, one of the same user, another user's); each conversation is a first one.
    let cases = [
        (ConsentPolicy::Ask, None, None),
        (ConsentPolicy::SamePrincipal, delivered.clone(), None),
        (ConsentPolicy::Open, delivered.clone(), delivered),
        (ConsentPolicy::Closed, denied.clone(), denied),
    ];
    for (n, (policy, same, other)) in cases.into_iter().enumerate() {
        let asker = world.agent(hosts[0], &format!("asker-{n}"));
        let outsider = world.agent(other_user, &format!("outsider-{n}"));
        let met = |world: &World| is_full_mesh(world) && all_see_all(world);
        world.run_until(20_000, "everybody", met);
        let before = asked(&world, &b);
        let command = Command::Update {
            name: None,
            status: None,
            visibility: None,
            tags: None,
            consent: Some(policy),
        };
        assert_eq!(world.ask(b, command), Ok(CommandResult::Done));
        assert_eq!(send(&mut world, asker, dm(b, "hello"))[&b], same, "{policy:?}");
        assert_eq!(send(&mut world, outsider, dm(b, "hello"))[&b], other, "{policy:?}");
        world.run(100);
        let questions = [&same, &other].iter().filter(|state| state.is_none()).count();
        assert_eq!(asked(&world, &b) - before, questions, "{policy:?}");
        // Who waited already is let in by a policy that lets it in.
        let waiting = world.node_of(&b).pending(&b).len();
        let expected = match policy {
            ConsentPolicy::Ask => 2,
            ConsentPolicy::SamePrincipal => 2,
            ConsentPolicy::Open | ConsentPolicy::Closed => 0,
        };
        assert_eq!(waiting, expected, "{policy:?}");
        if policy == ConsentPolicy::Open {
            world.run(200);
            assert_eq!(world.slots[&b].texts().len(), 6, "everybody's first message");
        }
    }
    // What it has begun itself is open.
    befriend_as(&mut world, b, a);
    assert_eq!(send(&mut world, a, dm(b, "back"))[&b], Some(DeliveryState::Delivered));
}

/// `from` writes first, and `to` says yes.
fn befriend_as(world: &mut World, from: DeviceId, to: DeviceId) {
    let op = world.command(from, dm(to, "hello"));
    world.run_until(5_000, "a request", |world| !world.node_of(&to).pending(&to).is_empty());
    accept(world, to);
    world.run_until(5_000, "consent", |world| world.replies.contains_key(&op));
}

#[test]
fn consent_is_asked_of_an_absent_agent_when_it_returns() {
    let mut world = World::new(3);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    world.crash(hosts[1]);
    world.run(1_000);
    let states = send(&mut world, a, dm(b, "when you are back"));
    assert_eq!(states[&b], queued("not_connected"));
    world.start(hosts[1]);
    world.run_until(20_000, "a request", |world| asked(world, &b) == 1);
    // The recipient dies while it is being asked; the question comes again.
    world.crash(hosts[1]);
    world.run(1_000);
    world.start(hosts[1]);
    world.run_until(20_000, "another request", |world| !world.node_of(&b).pending(&b).is_empty());
    accept(&mut world, b);
    world.run_until(1_000, "the message", |world| world.slots[&b].texts() == ["when you are back"]);
    world.run(100);
    assert_eq!(reported(&world, &a, &b), [DeliveryState::Delivered, DeliveryState::Read]);
}

#[test]
fn what_waits_is_delivered_in_order_and_once_on_return() {
    for seed in 0..5 {
        let mut world = World::new(seed);
        let (hosts, agents) = formed(&mut world, 3);
        let [a, b, _] = agents[..] else { unreachable!() };
        befriend(&mut world, a, b);
        world.crash(hosts[1]);
        world.run(1_000);
        for n in 0..10 {
            let states = send(&mut world, a, dm(b, &format!("{n}")));
            assert_eq!(states[&b], queued("not_connected"));
        }
        world.start(hosts[1]);
        let expected: Vec<String> = (0..10).map(|n| n.to_string()).collect();
        world.run_until(20_000, "ten messages", |world| {
            world.slots[&b].texts().iter().skip(1).eq(&expected)
        });
        world.run(60_000);
        assert_eq!(world.slots[&b].texts().len(), 11);
        let states = reported(&world, &a, &b);
        assert_eq!(states.iter().filter(|s| **s == DeliveryState::Delivered).count(), 10);
        // Nobody holds anything any more.
        for host in hosts {
            let status = world.node(host).status();
            assert_eq!((status.copies, status.outgoing), (0, 0));
        }
    }
}

#[test]
fn messages_sent_while_the_recipient_comes_back_arrive_in_order() {
    for seed in 0..12 {
        let mut world = World::new(seed);
        let (hosts, agents) = formed(&mut world, 2);
        let [a, b] = agents[..] else { unreachable!() };
        befriend(&mut world, a, b);
        let mut sent = 0;
        for _ in 0..3 {
            world.crash(hosts[1]);
            for tick in 0..120 {
                if tick == 20 {
                    world.start(hosts[1]);
                }
                world.command(a, dm(b, &format!("{sent}")));
                sent += 1;
                world.run(25);
            }
            let has = |world: &World, n: usize| {
                world.slots[&b].texts().iter().any(|text| *text == format!("{n}"))
            };
            world.run_until(60_000, "the last", |world| has(world, sent - 1));
        }
        world.run(30_000);
        let texts = world.slots[&b].texts();
        // What a crash came upon before it was acknowledged may come again.
        let mut known = BTreeSet::new();
        let numbers: Vec<usize> = texts
            .iter()
            .filter_map(|text| text.parse().ok())
            .filter(|number| known.insert(*number))
            .collect();
        assert!(numbers.iter().copied().eq(0..sent), "seed {seed}: {numbers:?}");
    }
}

#[test]
fn a_silent_recipient_holds_no_send_up_and_what_was_accepted_is_kept() {
    let mut world = World::new(3);
    let hosts = [0, 1].map(|_| {
        let host = world.host_as(HostSpec { durable: true, ..HostSpec::default() });
        world.start(host);
        host
    });
    let [a, b] = hosts.map(|host| world.agent(host, &format!("agent-{host}")));
    world.run_until(20_000, "a mesh", is_full_mesh);
    befriend(&mut world, a, b);
    world.run(1_000);
    world.pause(hosts[1], 60_000);
    let before = world.now;
    let states = send(&mut world, a, dm(b, "to one that is stopped"));
    assert_eq!(states[&b], None, "accepted, without an outcome");
    assert!(world.now - before < 5_000, "{} ms", world.now - before);
    world.crash(hosts[0]);
    world.run(1_000);
    world.start(hosts[0]);
    world.run_until(120_000, "the message", |world| {
        world.slots[&b].texts().contains(&"to one that is stopped".to_owned())
    });
}

#[test]
fn a_question_that_was_acknowledged_is_not_put_again_by_a_restart() {
    for (seed, ack) in [(5, Ack::Within(5)), (6, Ack::Never)] {
        let mut world = World::new(seed);
        let hosts = [0, 1].map(|_| {
            let host = world.host_as(HostSpec { durable: true, ..HostSpec::default() });
            world.start(host);
            host
        });
        let [a, b] = hosts.map(|host| world.agent(host, &format!("agent-{host}")));
        world.slots.get_mut(&a).unwrap().ack = ack;
        world.run_until(20_000, "a mesh", is_full_mesh);
        assert_eq!(send(&mut world, b, dm(a, "may I"))[&a], None, "consent is awaited");
        world.run(1_000);
        assert_eq!(asked(&world, &a), 1);
        world.stop(hosts[0]);
        world.run(1_000);
        world.start(hosts[0]);
        world.run_until(60_000, "its return", is_full_mesh);
        world.run(10_000);
        // What was not acknowledged is shown again, by its number; nothing is asked anew.
        let again = usize::from(matches!(ack, Ack::Never));
        assert_eq!(asked(&world, &a), 1 + again, "{ack:?}");
        let asks = |world: &World| {
            let shown = world.slots[&a].shown.iter();
            let asks =
                shown.filter(|shown| matches!(*shown.event, DeliveryEvent::RoomJoinRequest { .. }));
            asks.map(|shown| shown.seq).collect::<BTreeSet<_>>()
        };
        assert_eq!(asks(&world).len(), 1, "{ack:?}");
        // It still stands, and whoever asked hears of the answer.
        assert_eq!(world.node(hosts[0]).pending(&a).len(), 1);
        accept(&mut world, a);
        world.run_until(10_000, "the message", |world| {
            world.slots[&a].texts().contains(&"may I".to_owned())
        });
    }
}

#[test]
fn a_clock_that_jumps_and_comes_back_costs_nothing() {
    let mut world = World::new(4);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    befriend(&mut world, a, b);
    let room = create(&mut world, a, "lounge", RoomType::Private);
    assert!(world.ask(a, Command::Invite { room: room.clone(), agent: b }).is_ok());
    world.run(100);
    join(&mut world, b, &room);
    send(&mut world, a, to_room(&room, "before"));
    world.run(100);
    const YEARS: i64 = 800 * 24 * 3600 * 1000;
    world.jump_clock(hosts[0], YEARS);
    world.run(5_000);
    // By its clock every token has run out: its own it renews.
    send(&mut world, a, to_room(&room, "meanwhile"));
    send(&mut world, a, dm(b, "meanwhile"));
    world.run(5_000);
    world.jump_clock(hosts[0], -YEARS);
    world.run(30_000);
    for _ in 0..2 {
        assert_eq!(
            send(&mut world, a, to_room(&room, "after"))[&b],
            Some(DeliveryState::Delivered)
        );
        assert_eq!(send(&mut world, a, dm(b, "after"))[&b], Some(DeliveryState::Delivered));
        assert_eq!(send(&mut world, b, to_room(&room, "yes"))[&a], Some(DeliveryState::Delivered));
        world.run(1_000);
    }
    let history = world.node(hosts[0]).room_messages(&room, &a).unwrap();
    assert!(history.count() >= 5, "nothing was thrown away for its age");
}

#[test]
fn a_holder_hands_over_what_a_sender_that_is_gone_left() {
    for seed in 0..8 {
        let mut world = World::new(seed);
        let (hosts, agents) = formed(&mut world, 4);
        let [a, b, ..] = agents[..] else { unreachable!() };
        befriend(&mut world, a, b);
        let room = create(&mut world, b, "lounge", RoomType::Public);
        world.run(50);
        join(&mut world, a, &room);
        world.run(50);
        world.crash(hosts[1]);
        world.run(1_000);
        send(&mut world, a, dm(b, "testament"));
        send(&mut world, a, to_room(&room, "to all"));
        world.run(100);
        assert_eq!(world.node(hosts[2]).status().copies, 2);
        assert_eq!(world.node(hosts[3]).status().copies, 2);
        world.crash(hosts[0]);
        world.run(30_000);
        world.start(hosts[1]);
        world.run_until(40_000, "the testament", |world| {
            world.slots[&b].texts().contains(&"testament".to_owned())
                && world.slots[&b].texts().contains(&"to all".to_owned())
        });
        world.run(30_000);
        let handed: usize = hosts[2..]
            .iter()
            .map(|host| {
                let log = &world.hosts[*host].log;
                log.iter().filter(|(_, event)| event.name == "copy_handed_over").count()
            })
            .sum();
        assert_eq!(handed, 2, "one holder hands over each, once");
        assert!(hosts[1..].iter().all(|host| world.node(*host).status().copies == 0));
        // The sender comes back without its memory; nothing comes twice.
        world.start(hosts[0]);
        world.run(60_000);
        assert_eq!(world.slots[&b].texts().len(), 3);
    }
}

#[test]
fn a_sender_that_is_back_without_its_memory_does_not_keep_its_messages_back() {
    let mut world = World::new(9);
    let (hosts, agents) = formed(&mut world, 3);
    let [a, b, _] = agents[..] else { unreachable!() };
    befriend(&mut world, a, b);
    world.crash(hosts[1]);
    world.run(1_000);
    send(&mut world, a, dm(b, "before the crash"));
    world.run(100);
    world.crash(hosts[0]);
    world.run(1_000);
    world.start(hosts[0]);
    world.run_until(20_000, "the sender's return", is_full_mesh);
    world.start(hosts[1]);
    world.run_until(60_000, "the message", |world| {
        world.slots[&b].texts().contains(&"before the crash".to_owned())
    });
}

#[test]
fn an_agent_that_detaches_leaves_its_messages_with_its_daemon() {
    let mut world = World::new(10);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    befriend(&mut world, a, b);
    world.detach(b);
    world.run(100);
    let states = send(&mut world, a, dm(b, "for later"));
    assert_eq!(states[&b], queued("not_connected"));
    world.detach(a);
    world.run(10_000);
    world.attach(b);
    world.run_until(10_000, "the message", |world| {
        world.slots[&b].texts().contains(&"for later".to_owned())
    });
    // Its mailbox was kept: nothing of before is shown again.
    world.attach(a);
    world.run(60_000);
    assert_eq!(world.slots[&b].texts(), ["hello", "for later"]);
    assert_eq!(world.node(hosts[0]).status().copies, 0);
}

#[test]
fn two_agents_of_one_daemon_miss_nothing_while_one_is_away() {
    let mut world = World::new(11);
    let host = world.daemon();
    let (a, b) = (world.agent(host, "a"), world.agent(host, "b"));
    world.run(100);
    befriend(&mut world, a, b);
    world.detach(b);
    let states = send(&mut world, a, dm(b, "one"));
    assert_eq!(states[&b], queued("not_connected"));
    world.attach(b);
    world.run_until(1_000, "the message", |world| world.slots[&b].texts() == ["hello", "one"]);
    world.run(1_000);
    assert!(reported(&world, &a, &b).contains(&DeliveryState::Delivered));
}

#[test]
fn an_agent_gets_its_undelivered_events_back_from_peers() {
    let mut world = World::new(12);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    befriend(&mut world, a, b);
    world.slots.get_mut(&b).unwrap().ack = Ack::Never;
    let states = send(&mut world, a, dm(b, "taken but not acknowledged"));
    assert_eq!(states[&b], Some(DeliveryState::Delivered));
    // A peer that connects now gets b's queue for safe keeping.
    let late = world.daemon();
    world.run_until(5_000, "a third daemon", is_full_mesh);
    world.run(1_000);
    world.crash(hosts[1]);
    world.run(1_000);
    world.slots.get_mut(&b).unwrap().ack = Ack::Within(5);
    world.start(hosts[1]);
    world.run_until(20_000, "what was not acknowledged", |world| {
        let texts = world.slots[&b].texts();
        texts.iter().filter(|text| **text == "taken but not acknowledged").count() == 2
    });
    world.run(30_000);
    assert!(world.is_up(late));
}

#[test]
fn storage_that_fails_loses_nothing_and_shows_nothing_twice() {
    for seed in 0..5 {
        let mut world = World::new(seed);
        let (hosts, agents) = formed(&mut world, 2);
        let [a, b] = agents[..] else { unreachable!() };
        befriend(&mut world, a, b);
        world.slots.get_mut(&b).unwrap().ack = Ack::Never;
        world.set_faults(hosts[1], Faults { failing_per_mille: 1000, slowest_ms: 50 });
        let states = send(&mut world, a, dm(b, "hard to keep"));
        assert_eq!(states[&b], queued("timeout"), "not acknowledged before it is stored");
        world.run(20_000);
        assert!(!reported(&world, &a, &b).contains(&DeliveryState::Delivered));
        world.set_faults(hosts[1], Faults { failing_per_mille: 0, slowest_ms: 50 });
        world.run_until(10_000, "delivery after all", |world| {
            reported(world, &a, &b).contains(&DeliveryState::Delivered)
        });
        assert_eq!(world.slots[&b].texts(), ["hello", "hard to keep"]);
        let stored = world.hosts[hosts[1]].store().live().unwrap();
        assert!(stored.iter().any(|record| {
            matches!(record, commsd::mesh::journal::Record::Mailbox { agent, .. } if *agent == b)
        }));
        // A client that has taken it needs no store.
        world.set_faults(hosts[1], Faults { failing_per_mille: 1000, slowest_ms: 5_000 });
        world.slots.get_mut(&b).unwrap().ack = Ack::Within(5);
        let states = send(&mut world, a, dm(b, "taken at once"));
        assert_eq!(states[&b], Some(DeliveryState::Delivered));
    }
}

#[test]
fn a_retry_over_another_session_waits_for_the_same_store() {
    let mut world = World::new(13);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    befriend(&mut world, a, b);
    world.slots.get_mut(&b).unwrap().ack = Ack::Never;
    world.set_faults(hosts[1], Faults { failing_per_mille: 0, slowest_ms: 600_000 });
    let op = world.command(a, dm(b, "slow"));
    world.run(100);
    // The answer is still owed when every session breaks; the retry comes over a new one.
    world.break_links(hosts[0], hosts[1]);
    world.run_until(5_000, "new sessions", is_full_mesh);
    world.run(8_000);
    assert!(!reported(&world, &a, &b).contains(&DeliveryState::Delivered));
    world.run_until(610_000, "delivery", |world| {
        reported(world, &a, &b).contains(&DeliveryState::Delivered)
    });
    assert!(world.replies.contains_key(&op));
    assert_eq!(world.slots[&b].texts(), ["hello", "slow"]);
}

#[test]
fn hidden_agents_are_written_to_by_id_and_ghosts_by_nobody() {
    let mut world = World::new(14);
    let (hosts, agents) = formed(&mut world, 3);
    let [a, b, c] = agents[..] else { unreachable!() };
    let show = |visibility| Command::Update {
        name: None,
        status: None,
        visibility: Some(visibility),
        tags: None,
        consent: None,
    };
    world.ask(b, show(Visibility::Hidden)).unwrap();
    world.ask(c, show(Visibility::Ghost)).unwrap();
    world.run(500);
    let listed = |world: &World, host: usize, viewer: Option<&DeviceId>| {
        let views = world.node(host).agents(viewer, world.clock(host));
        views.into_iter().map(|view| view.record.id).collect::<Vec<_>>()
    };
    assert_eq!(listed(&world, hosts[0], Some(&a)), [a]);
    assert!(listed(&world, hosts[1], Some(&b)).contains(&b), "its own listing shows it");
    assert!(listed(&world, hosts[2], Some(&c)).contains(&c));
    assert!(world.node(hosts[0]).agent_by_id(&b, world.clock(0)).is_some());
    assert!(world.node(hosts[0]).agent_by_id(&c, world.clock(0)).is_none());
    befriend(&mut world, a, b);
    assert_eq!(world.ask(a, dm(c, "boo")).unwrap_err().code, "agent_not_found");
    assert_eq!(asked(&world, &c), 0);
    // No advert names them.
    world.watch = true;
    world.run(25_000);
    for seen in &world.seen {
        if let commsd::mesh::wire::frame::Frame::Gossip { peers } = &seen.frame {
            for advert in peers.iter().filter(|advert| advert.device == b || advert.device == c) {
                assert!(advert.extension("agent/self").is_none());
            }
        }
    }
    // Back in the light.
    world.ask(c, show(Visibility::Visible)).unwrap();
    world.run(500);
    assert!(listed(&world, hosts[0], Some(&a)).contains(&c));
}

#[test]
fn a_message_to_oneself_arrives_at_once() {
    let mut world = World::new(15);
    let host = world.daemon();
    let a = world.agent(host, "a");
    world.run(10);
    let states = send(&mut world, a, dm(a, "note to self"));
    assert_eq!(states[&a], Some(DeliveryState::Delivered));
    assert_eq!(world.slots[&a].texts(), ["note to self"]);
    assert_eq!(world.ask(a, dm(DeviceId([7; 32]), "who?")).unwrap_err().code, "agent_not_found");
}

#[test]
fn replies_and_timing_hints_travel() {
    let mut world = World::new(16);
    let (_, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    let room = create(&mut world, a, "lounge", RoomType::Public);
    world.run(50);
    join(&mut world, b, &room);
    let command = Command::Send {
        room: room.clone(),
        text: "look".into(),
        reply_to: Some("00ff".into()),
        behavior: Some(commsd::mesh::records::StreamingBehavior::Steer),
    };
    send(&mut world, a, command);
    let message = world
        .find(&b, |event| match event {
            DeliveryEvent::RoomMessage { message } => Some(message.clone()),
            _ => None,
        })
        .unwrap();
    assert_eq!(message.reply_to.as_deref(), Some("00ff"));
    assert_eq!(message.streaming_behavior, Some(commsd::mesh::records::StreamingBehavior::Steer));
    assert_eq!(message.read_by, [a]);
    let bad =
        Command::Send { room, text: "x".into(), reply_to: Some("not hex".into()), behavior: None };
    assert_eq!(world.ask(a, bad).unwrap_err().code, "invalid_reply");
}

#[test]
fn what_waits_too_long_expires_and_too_much_is_dropped() {
    let mut world = World::new(17);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    befriend(&mut world, a, b);
    world.crash(hosts[1]);
    world.run(1_000);
    for n in 0..commsd::mesh::delivery::MAX_QUEUED + 3 {
        send(&mut world, a, dm(b, &format!("{n}")));
    }
    let states = reported(&world, &a, &b);
    assert_eq!(states.iter().filter(|s| **s == DeliveryState::Dropped).count(), 3);
    world.jump_clock(hosts[0], 25 * 3600 * 1000);
    world.run(2_000);
    let states = reported(&world, &a, &b);
    assert_eq!(
        states.iter().filter(|s| **s == DeliveryState::Expired).count(),
        commsd::mesh::delivery::MAX_QUEUED
    );
}

#[test]
fn a_request_after_a_refusal_is_put_again_though_the_first_is_not_acknowledged() {
    let mut world = World::new(18);
    let (_, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    world.slots.get_mut(&b).unwrap().ack = Ack::Never;
    for round in 1..=3 {
        send(&mut world, a, dm(b, "please"));
        // Repeated while it waits, the question is the same one.
        send(&mut world, a, dm(b, "pretty please"));
        assert_eq!(asked(&world, &b), round);
        reject(&mut world, b);
        world.run(100);
    }
    assert_eq!(reported(&world, &a, &b).len(), 6);
}

#[test]
fn a_message_an_hour_is_shown_for_a_day() {
    let mut world = World::new(24);
    let (hosts, agents) = formed(&mut world, 2);
    let [teller, first] = agents[..] else { unreachable!() };
    let mut listeners = vec![first];
    listeners.extend((1..5).map(|n| world.agent(hosts[1], &format!("listener-{n}"))));
    let met = |world: &World| is_full_mesh(world) && all_see_all(world);
    world.run_until(60_000, "everybody", met);
    for listener in &listeners {
        befriend(&mut world, teller, *listener);
    }
    let hours: Vec<String> = (1..=24).map(|hour| format!("hour {hour}")).collect();
    for hour in &hours {
        world.run(3_600_000);
        for listener in &listeners {
            let states = send(&mut world, teller, dm(*listener, hour));
            assert_eq!(states[listener], Some(DeliveryState::Delivered), "{hour}");
        }
    }
    world.run(1_000);
    for listener in &listeners {
        assert_eq!(world.slots[listener].texts()[1..], hours);
    }
}
