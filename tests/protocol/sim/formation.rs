//! Daemons find each other, hold the port one at a time, and agree on one coordinator
//! (`transport.md` 2 to 4 and 9).

use commsd::identity::device::DeviceId;
use commsd::mesh::formation::PortState;
use commsd::mesh::node::{Command, CommandResult};
use commsd::mesh::wire::frame::Frame;

use super::support::{
    all_see_all, claim, formed, has_one_coordinator, is_full_mesh, peer_devices, present, serves,
    words,
};
use super::world::{HostSpec, World};

fn holders(world: &World) -> Vec<usize> {
    world
        .running()
        .into_iter()
        .filter(|host| world.node(*host).status().port == PortState::Holding)
        .collect()
}

/// Somebody holds the port and everybody else is introduced to that one.
fn port_is_settled(world: &World) -> bool {
    let holders = holders(world);
    holders.len() == 1
        && world.running().iter().filter(|host| **host != holders[0]).all(|host| {
            world.node(*host).status().port
                == PortState::Joined { holder: world.device(holders[0]) }
        })
}

#[test]
fn two_daemons_meet_at_the_port() {
    let mut world = World::new(1);
    world.watch = true;
    let spec = HostSpec { first_contact: false, ..HostSpec::default() };
    let (a, b) = (world.host_as(spec), world.host_as(spec));
    let alice = world.agent(a, "alice");
    let bob = world.agent(b, "bob");
    world.start(a);
    world.run(100);
    assert_eq!(holders(&world), [a]);
    world.start(b);
    world.run_until(2_000, "a mesh of two", |world| is_full_mesh(world) && all_see_all(world));
    world.run(100);
    assert!(port_is_settled(&world));
    // Without first contact the holder of the port claims at once.
    assert!(has_one_coordinator(&world));
    assert_eq!(claim(&world, b).unwrap().coordinator, world.device(a));
    // The newcomer introduces itself first; the holder answers with its table, then announces it.
    assert_eq!(words(&world, b, a)[0], "introduce");
    let from_holder = words(&world, a, b);
    let at = |word| from_holder.iter().position(|w| *w == word).unwrap();
    assert!(at("peer_list") < at("peer_joined"), "{from_holder:?}");
    // Both ends of a fresh data session say what the reference says: the acceptor its state.
    assert!(from_holder.contains(&"state_sync") && words(&world, b, a).contains(&"state_sync"));
    assert_eq!(present(&world, a)[&bob].0, "bob");
    assert_eq!(present(&world, b)[&alice].0, "alice");
    // Every pair of devices has a session each way.
    for (host, device) in [(a, world.device(b)), (a, bob), (b, world.device(a)), (b, alice)] {
        let status = world.node(host).status();
        let peer = status.peers.iter().find(|peer| peer.device == device).unwrap();
        assert!(peer.sessions >= 4, "{} sessions", peer.sessions);
        assert!(peer.admitted && peer.machine_local);
    }
    // The first frames of every session are handshake and advert.
    assert!(matches!(world.seen[0].frame, Frame::Handshake(_)));
    assert!(world.seen.iter().any(|seen| matches!(seen.frame, Frame::Gossip { .. })));
}

#[test]
fn nine_daemons_form_one_mesh_however_they_start() {
    for (seed, pause) in [(1, 0), (2, 0), (3, 7), (4, 900)] {
        let mut world = World::new(seed);
        for n in 0..9 {
            let host = world.daemon();
            world.agent(host, &format!("agent-{n}"));
            world.run(pause);
        }
        world.run_until(20_000, "a mesh of nine", |world| {
            is_full_mesh(world) && all_see_all(world) && port_is_settled(world)
        });
        world.run_until(20_000, "one coordinator", has_one_coordinator);
    }
}

#[test]
fn a_mesh_forms_by_first_contact_where_the_port_is_dead() {
    let mut world = World::new(5);
    // Something that is no peer sits on the port: dials to it fail, binding it as well.
    let blocker = world.host();
    world.occupy_port(blocker);
    let (a, b, c) = (world.daemon(), world.daemon(), world.daemon());
    for host in [a, b, c] {
        world.agent(host, "agent");
    }
    world.run_until(3_000, "a mesh by first contact", |world| {
        is_full_mesh(world) && all_see_all(world)
    });
    assert!(holders(&world).is_empty());
    world.run_until(20_000, "one coordinator", has_one_coordinator);
    assert!(world.hosts[a].log.iter().any(|(_, event)| event.name == "port_unavailable"));
    // The port comes free: somebody takes it without being told.
    world.release_port();
    world.run_until(20_000, "the port is held", port_is_settled);
}

#[test]
fn first_contact_survives_loss_and_repetition() {
    let mut world = World::new(6);
    world.net.datagram_loss = 500;
    world.net.datagram_copies = 500;
    world.net.datagram_jitter = 40;
    let blocker = world.host();
    world.occupy_port(blocker);
    for _ in 0..4 {
        let host = world.daemon();
        world.agent(host, "agent");
    }
    world.run_until(150_000, "a mesh in spite of loss", |world| {
        is_full_mesh(world) && all_see_all(world) && has_one_coordinator(world)
    });
}

#[test]
fn exactly_one_claims_after_the_wait() {
    let mut world = World::new(7);
    let hosts: Vec<usize> = (0..3).map(|_| world.daemon()).collect();
    world.run(14_000);
    assert!(hosts.iter().all(|host| claim(&world, *host).is_none()));
    world.run(2_000);
    assert!(has_one_coordinator(&world));
    let gained: usize = hosts
        .iter()
        .map(|host| world.hosts[*host].log.iter().filter(|(_, e)| e.name == "role_gained").count())
        .sum();
    assert_eq!(gained, 1);
    assert_eq!(claim(&world, hosts[0]).unwrap().term, 0);
}

#[test]
fn the_role_moves_when_its_holder_dies() {
    for seed in 0..6 {
        let mut world = World::new(seed);
        let (hosts, agents) = formed(&mut world, 4);
        let holder = *hosts.iter().find(|host| world.node(**host).status().role_held).unwrap();
        let term = claim(&world, holder).unwrap().term;
        world.crash(holder);
        world.run_until(17_000, "a new coordinator", |world| {
            has_one_coordinator(world) && all_see_all(world)
        });
        let survivor = *hosts.iter().find(|host| **host != holder).unwrap();
        assert!(claim(&world, survivor).unwrap().term > term);
        world.run_until(2_000, "the port", port_is_settled);
        // The dead agent is offline everywhere, not gone.
        let dead = agents[holder];
        for host in hosts.iter().filter(|host| **host != holder) {
            let view = world.node(*host).agent_by_id(&dead, world.clock(*host)).unwrap();
            assert_eq!(view.record.status.as_str(), "offline");
        }
        // It comes back with its old key and no memory.
        world.start(holder);
        world.run_until(20_000, "its return", |world| {
            is_full_mesh(world) && all_see_all(world) && has_one_coordinator(world)
        });
    }
}

#[test]
fn a_graceful_stop_hands_over_port_and_role_at_once() {
    for seed in 0..6 {
        let mut world = World::new(seed);
        let (hosts, _) = formed(&mut world, 4);
        world.watch = true;
        let holder = holders(&world)[0];
        let before = world.now;
        world.stop(holder);
        world.run_until(1_000, "the port is held again", |world| {
            port_is_settled(world) && holders(world)[0] != holder
        });
        assert!(world.now - before < 1_000, "took {} ms", world.now - before);
        world.run_until(16_000, "a coordinator", |world| {
            has_one_coordinator(world) && all_see_all(world)
        });
        let named = world.hosts[holder]
            .log
            .iter()
            .find(|(_, event)| event.name == "port_released")
            .map(|(_, event)| event.fields[0].1.clone())
            .unwrap();
        // The daemon of the longest known peer has it.
        let named = DeviceId::parse(&named).unwrap();
        assert!(serves(&world, holders(&world)[0], &named));
        assert_eq!(hosts.len(), 4);
    }
}

#[test]
fn the_last_daemon_leaves_without_waiting() {
    let mut world = World::new(3);
    let host = world.daemon();
    world.agent(host, "alone");
    world.run(20_000);
    let before = world.now;
    world.stop(host);
    assert!(world.now - before < 50);
    assert_eq!(world.hosts[host].life, 1);
}

#[test]
fn an_agent_added_later_reaches_everybody_and_leaves_again() {
    let mut world = World::new(4);
    let (hosts, _) = formed(&mut world, 3);
    for host in &hosts {
        let late = world.agent(*host, "late");
        world.run_until(1_000, "a late agent", |world| is_full_mesh(world) && all_see_all(world));
        for other in hosts.iter().filter(|other| *other != host) {
            assert!(peer_devices(&world, *other).contains(&late));
        }
        world.detach(late);
        world.run_until(1_000, "its departure", all_see_all);
        world.attach(late);
        world.run_until(1_000, "its return", |world| is_full_mesh(world) && all_see_all(world));
    }
}

#[test]
fn a_frozen_coordinator_is_overtaken_and_agrees_when_it_wakes() {
    for seed in 0..4 {
        let mut world = World::new(seed);
        let (hosts, _) = formed(&mut world, 4);
        let holder = *hosts.iter().find(|host| world.node(**host).status().role_held).unwrap();
        world.pause(holder, 100_000);
        world.run(95_000);
        let others: Vec<_> = hosts.iter().filter(|host| **host != holder).collect();
        assert!(others.iter().all(|host| {
            claim(&world, **host).is_some_and(|claim| claim.coordinator != world.device(holder))
        }));
        world.run(5_000);
        world.run_until(60_000, "agreement after the thaw", |world| {
            has_one_coordinator(world) && all_see_all(world) && is_full_mesh(world)
        });
    }
}

#[test]
fn both_halves_of_a_partition_agree_again() {
    for seed in 0..4 {
        let mut world = World::new(seed);
        let (hosts, _) = formed(&mut world, 5);
        world.partition(&hosts[..2], &hosts[2..]);
        world.break_cut_links(2_000, 500);
        world.run(120_000);
        world.heal();
        world.run_until(60_000, "agreement after healing", |world| {
            has_one_coordinator(world)
                && all_see_all(world)
                && is_full_mesh(world)
                && port_is_settled(world)
        });
    }
}

#[test]
fn what_changed_while_a_peer_was_away_reaches_it_on_its_return() {
    let mut world = World::new(5);
    let (hosts, agents) = formed(&mut world, 3);
    world.partition(&hosts[..2], &hosts[2..]);
    world.break_cut_links(2_000, 500);
    world.run(10_000);
    let rename = Command::Update {
        name: Some("renamed".into()),
        status: None,
        visibility: None,
        tags: None,
        consent: None,
    };
    assert_eq!(world.ask(agents[0], rename), Ok(CommandResult::Done));
    world.run(60_000);
    world.heal();
    world.run_until(60_000, "one view of everybody", |world| {
        is_full_mesh(world) && all_see_all(world)
    });
    for host in hosts {
        assert_eq!(present(&world, host)[&agents[0]].0, "renamed");
    }
}

#[test]
fn a_clock_that_jumps_costs_no_session() {
    let mut world = World::new(9);
    let (hosts, _) = formed(&mut world, 3);
    let opened = |world: &World| {
        world.hosts.iter().flat_map(|h| &h.log).filter(|(_, e)| e.name == "session_opened").count()
    };
    let before = opened(&world);
    for ms in [3_600_000, -7_200_000, 90_000] {
        world.jump_clock(hosts[1], ms);
        world.run(30_000);
        assert!(all_see_all(&world) && has_one_coordinator(&world));
    }
    assert_eq!(opened(&world), before);
    assert!(world.hosts[hosts[1]].log.iter().any(|(_, event)| event.name == "clock_jumped"));
}
