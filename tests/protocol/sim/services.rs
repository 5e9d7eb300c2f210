//! Shares over the mesh: asking, granting, calling, taking back, from both sides and from peers that
//! mean no good (decisions 32, 84, 85).

use std::collections::BTreeMap;

use commsd::codec::cbor::Value;
use commsd::codec::time::UnixMillis;
use commsd::identity::device::{DeviceId, DeviceKey};
use commsd::mesh::events::DeliveryEvent;
use commsd::mesh::journal::Record;
use commsd::mesh::node::{
    Command, CommandResult, DecisionTarget, GrantTerms, MAX_ASKS, MAX_CALLS, MAX_CALLS_OF_DEVICE,
    MAX_GRANTS, MAX_SHARES, OperatorCommand, SERVICE_DEADLINE_MS,
};
use commsd::mesh::session::SessionId;
use commsd::mesh::wire::capability::{VAULT_READ, VAULT_WRITE};
use commsd::mesh::wire::cose::CoseSign1;
use commsd::mesh::wire::frame::Frame;
use commsd::mesh::wire::frame::{ManageResponse, Outcome};
use commsd::mesh::wire::scope::Scope;
use commsd::mesh::wire::token::{self, MintRequest};

use super::support::{all_see_all, answers, count, formed, is_full_mesh, request, two_machines};
use super::world::{HostSpec, World};

const KIND: &str = "x-commsd-vault";
const DAY_MS: u64 = 24 * 3600 * 1000;

fn share(world: &mut World, host: usize, name: &str, write: bool) {
    let place = format!("/work/{name}");
    let command = OperatorCommand::Share { name: name.into(), place, write };
    assert_eq!(world.operate(host, command), Ok(CommandResult::Done));
}

fn asks(owner: DeviceId, share: &str, write: bool) -> Command {
    let share = share.to_owned();
    Command::AskCapability { owner, share, write, valid_until: None, wait_ms: 0 }
}

fn calls(owner: DeviceId, share: &str, write: bool) -> Command {
    let params = vec![("op".to_owned(), Value::from("inspect"))];
    Command::CallService { owner, share: share.into(), write, params }
}

fn grant(world: &mut World, host: usize, terms: GrantTerms) {
    let id = world.node(host).pending_for_anybody()[0].id.clone();
    let command = OperatorCommand::Grant { id, terms };
    assert_eq!(world.operate(host, command), Ok(CommandResult::Done));
}

/// The word that a call ends with; `ok` where it was done.
fn called(world: &mut World, agent: DeviceId, command: Command) -> String {
    match world.ask(agent, command) {
        Ok(CommandResult::Served(_)) => "ok".into(),
        Ok(CommandResult::Refused { code, .. }) => code,
        Ok(other) => panic!("{other:?}"),
        Err(error) => error.code.into(),
    }
}

fn outcomes(world: &World, agent: &DeviceId) -> Vec<(bool, String)> {
    world.slots[agent]
        .events()
        .filter_map(|event| match event {
            DeliveryEvent::CapabilityOutcome { accepted, code, .. } => {
                Some((*accepted, code.clone()))
            }
            _ => None,
        })
        .collect()
}

#[test]
fn a_share_is_used_once_its_owner_has_said_yes_and_no_longer_than_that() {
    let mut world = World::new(1);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    share(&mut world, hosts[0], "notes", true);
    assert_eq!(called(&mut world, b, calls(a, "notes", false)), "not_allowed");
    // A person decides, so the answer comes later.
    assert_eq!(world.ask(b, asks(a, "notes", false)), Ok(CommandResult::AskPending));
    let asked = |event: &DeliveryEvent| matches!(event, DeliveryEvent::CapabilityRequest { .. });
    assert_eq!(count(&world, &a, asked), 1);
    let pending = world.node(hosts[0]).pending(&a);
    assert_eq!((pending[0].kind, pending[0].requester), ("capability", b));
    assert_eq!(pending[0].share, Some(("notes".into(), false)));
    grant(&mut world, hosts[0], GrantTerms::default());
    world.run(100);
    assert_eq!(outcomes(&world, &b), [(true, String::new())]);
    assert!(world.node(hosts[0]).pending(&a).is_empty());
    // Reading is granted, writing is not.
    assert_eq!(called(&mut world, b, calls(a, "notes", false)), "ok");
    let call = world.calls.pop().unwrap();
    assert_eq!((call.from, call.share.as_str(), call.may_write), (b, "notes", false));
    assert_eq!(call.place, "/work/notes");
    assert_eq!(called(&mut world, b, calls(a, "notes", true)), "not_allowed");
    world.ask(b, asks(a, "notes", true)).unwrap();
    grant(&mut world, hosts[0], GrantTerms::default());
    world.run(100);
    assert_eq!(called(&mut world, b, calls(a, "notes", true)), "ok");
    assert!(world.calls.pop().unwrap().may_write);
    // Shared for reading only from now on: the token alone is not enough.
    share(&mut world, hosts[0], "notes", false);
    assert_eq!(called(&mut world, b, calls(a, "notes", true)), "ok");
    assert!(!world.calls.pop().unwrap().may_write, "the share does not let it");
    // Taken back: both, at once, and the holder has heard of it.
    let revoke = OperatorCommand::Revoke { share: "notes".into(), bearer: Some(b) };
    assert_eq!(world.operate(hosts[0], revoke.clone()), Ok(CommandResult::Done));
    assert_eq!(world.operate(hosts[0], revoke).unwrap_err().code, "not_granted");
    world.run(100);
    assert_eq!(called(&mut world, b, calls(a, "notes", false)), "revoked");
    assert!(world.calls.is_empty());
}

#[test]
fn a_no_is_told_with_its_reason() {
    let mut world = World::new(2);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    share(&mut world, hosts[0], "notes", false);
    // Whoever waits long enough hears it as the answer.
    let wait = Command::AskCapability {
        owner: a,
        share: "notes".into(),
        write: false,
        valid_until: None,
        wait_ms: 60_000,
    };
    let op = world.command(b, wait);
    world.run_until(5_000, "a question", |w| !w.node(hosts[0]).pending_for_anybody().is_empty());
    let id = world.node(hosts[0]).pending_for_anybody()[0].id.clone();
    let no = OperatorCommand::Refuse { id, reason: Some("not today".into()) };
    world.operate(hosts[0], no.clone()).unwrap();
    assert_eq!(world.operate(hosts[0], no).unwrap_err().code, "not_pending");
    world.run_until(5_000, "the no", |world| world.replies.contains_key(&op));
    assert!(matches!(
        &world.replies[&op],
        Ok(CommandResult::Refused { code, message }) if code == "denied" && message == "not today"
    ));
    assert!(outcomes(&world, &b).is_empty());
}

#[test]
fn a_yes_that_comes_after_the_request_has_ended_arrives_all_the_same() {
    let mut world = World::new(3);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    share(&mut world, hosts[0], "notes", true);
    world.ask(b, asks(a, "notes", true)).unwrap();
    world.run(330_000);
    assert!(outcomes(&world, &b).is_empty(), "nobody has decided");
    assert_eq!(world.node(hosts[0]).pending_for_anybody().len(), 1);
    // Asked again it is the same question.
    assert_eq!(world.ask(b, asks(a, "notes", true)), Ok(CommandResult::AskPending));
    world.run(330_000);
    assert_eq!(world.node(hosts[0]).pending_for_anybody().len(), 1);
    let terms = GrantTerms { write: Some(false), ..GrantTerms::default() };
    grant(&mut world, hosts[0], terms);
    world.run(100);
    assert_eq!(outcomes(&world, &b), [(true, String::new())]);
    assert_eq!(called(&mut world, b, calls(a, "notes", false)), "ok");
    assert_eq!(called(&mut world, b, calls(a, "notes", true)), "not_allowed", "reading is less");
    // The question of a day is over, on both sides.
    world.ask(b, asks(a, "notes", true)).unwrap();
    world.run(DAY_MS + 5_000);
    assert!(world.node(hosts[0]).pending_for_anybody().is_empty());
    assert_eq!(outcomes(&world, &b).last(), Some(&(false, "timeout".to_owned())));
    world.run(400_000);
    assert!(world.node(hosts[0]).pending_for_anybody().is_empty(), "not asked again by itself");
}

#[test]
fn a_no_that_comes_hours_later_is_told() {
    let mut world = World::new(13);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    share(&mut world, hosts[0], "notes", true);
    world.ask(b, asks(a, "notes", true)).unwrap();
    world.run(3 * 3600 * 1000);
    let asked = |event: &DeliveryEvent| matches!(event, DeliveryEvent::CapabilityRequest { .. });
    assert_eq!(count(&world, &a, asked), 1, "shown once, however often it is made");
    let id = world.node(hosts[0]).pending_for_anybody()[0].id.clone();
    let no = OperatorCommand::Refuse { id, reason: Some("not today".into()) };
    world.operate(hosts[0], no).unwrap();
    world.run(120_000);
    assert_eq!(outcomes(&world, &b), [(false, "denied".to_owned())]);
    world.run(3600 * 1000);
    assert!(world.node(hosts[0]).pending_for_anybody().is_empty());
}

#[test]
fn a_question_outlives_a_restart_of_either_side() {
    let mut world = World::new(14);
    let durable = HostSpec { durable: true, ..HostSpec::default() };
    let hosts = [world.host_as(durable), world.host_as(durable)];
    hosts.iter().for_each(|host| world.start(*host));
    let a = world.agent(hosts[0], "a");
    let b = world.agent(hosts[1], "b");
    world.run_until(20_000, "a mesh", |world| is_full_mesh(world) && all_see_all(world));
    world.run(5_000);
    share(&mut world, hosts[0], "notes", true);
    assert_eq!(world.ask(b, asks(a, "notes", false)), Ok(CommandResult::AskPending));
    world.run(2_000);
    let id = world.node(hosts[0]).pending_for_anybody()[0].id.clone();
    for host in hosts {
        world.crash(host);
        world.start(host);
        world.run(120_000);
        let pending = world.node(hosts[0]).pending_for_anybody();
        assert_eq!(pending.len(), 1, "after a restart of host {host}");
        assert_eq!((&pending[0].id, pending[0].requester), (&id, b), "the same question");
    }
    let shown = |world: &World| {
        count(world, &a, |event| matches!(event, DeliveryEvent::CapabilityRequest { .. }))
    };
    assert_eq!(shown(&world), 1, "acknowledged, it is not put again");
    assert_eq!(outcomes(&world, &b), [], "nothing has been decided");
    grant(&mut world, hosts[0], GrantTerms::default());
    world.run(1_000);
    assert_eq!(outcomes(&world, &b), [(true, String::new())]);
    assert_eq!(called(&mut world, b, calls(a, "notes", false)), "ok");
    // What is decided is not asked for again.
    world.crash(hosts[1]);
    world.start(hosts[1]);
    world.run(120_000);
    assert!(world.node(hosts[0]).pending_for_anybody().is_empty());
    assert_eq!(outcomes(&world, &b), [(true, String::new())]);
    // After a no it is another question, though it has the same id.
    for asked in [2, 3] {
        assert_eq!(world.ask(b, asks(a, "notes", true)), Ok(CommandResult::AskPending));
        world.run(2_000);
        assert_eq!(shown(&world), asked);
        world.crash(hosts[0]);
        world.start(hosts[0]);
        world.run(120_000);
        assert_eq!(shown(&world), asked, "acknowledged, it is not put again");
        let id = world.node(hosts[0]).pending_for_anybody()[0].id.clone();
        let no = OperatorCommand::Refuse { id, reason: None };
        world.operate(hosts[0], no).unwrap();
        world.run(1_000);
        world.crash(hosts[0]);
        world.start(hosts[0]);
        world.run(60_000);
    }
}

#[test]
fn who_may_not_use_a_share_cannot_tell_it_from_one_that_is_not_there() {
    let mut world = World::new(15);
    let (hosts, agents) = formed(&mut world, 1);
    let a = agents[0];
    share(&mut world, hosts[0], "read", false);
    share(&mut world, hosts[0], "was", true);
    let peers: Vec<Visitor> = (0..4).map(|_| Visitor::new(&mut world, a)).collect();
    let names = ["read", "was", "never", "\u{1f5dd} never"];
    // Asked for, unshared meanwhile, and waited for until nobody has decided.
    let mut told = BTreeMap::new();
    for (peer, name) in peers.iter().zip(names) {
        let ids = [false, true].map(|write| peer.ask(&mut world, write, name, &[]));
        told.insert(name, ids);
    }
    world.run(1_000);
    world.operate(hosts[0], OperatorCommand::Unshare("was".into())).unwrap();
    world.run(1_000);
    for peer in &peers {
        assert_eq!(answers(&mut world, peer.raw), BTreeMap::new());
    }
    // The operator is shown what can be decided on.
    let pending = world.node(hosts[0]).pending_for_anybody();
    assert!(pending.iter().all(|p| p.share.as_ref().is_some_and(|(name, _)| name == "read")));
    assert_eq!(pending.len(), 2);
    world.run(310_000);
    for (peer, name) in peers.iter().zip(names) {
        let answers = answers(&mut world, peer.raw);
        let words: Vec<&str> = told[name].iter().map(|id| answers[id].as_str()).collect();
        assert_eq!(words, ["pending", "pending"], "{name}");
        for verb in [VAULT_READ, VAULT_WRITE] {
            assert_eq!(peer.word(&mut world, verb, name, None), "unauthorized", "{name}");
            let own = MintRequest::new(
                [7; 16],
                peer.key.id(),
                verb,
                scope(name),
                world.clock(hosts[0]).unix.plus(DAY_MS),
            );
            let own = token::mint(&peer.key, world.clock(hosts[0]).unix, own).unwrap();
            let word = peer.word(&mut world, verb, name, Some(&own));
            assert_eq!(word, "wrong_chain_root", "{name}");
        }
    }
    // Shared after it was asked for, it can be decided on.
    share(&mut world, hosts[0], "never", false);
    let pending = world.node(hosts[0]).pending(&a);
    assert!(pending.iter().any(|p| p.share == Some(("never".into(), false))), "{pending:?}");
    let asked = |event: &DeliveryEvent| matches!(event, DeliveryEvent::CapabilityRequest { scope_path: Some(path), .. } if path == "never");
    assert_eq!(count(&world, &a, asked), 2);
    // Names that nothing can have are not kept.
    for name in ["", "a/b", "..", &"n".repeat(65), &"n".repeat(64 * 1024), "a\u{202e}b"] {
        let id = peers[0].ask(&mut world, false, name, &[]);
        world.run(100);
        assert_eq!(answers(&mut world, peers[0].raw)[&id], "malformed");
    }
}

#[test]
fn what_nobody_can_decide_on_makes_room_for_what_somebody_can() {
    let mut world = World::new(16);
    let (hosts, agents) = formed(&mut world, 1);
    let a = agents[0];
    share(&mut world, hosts[0], "notes", false);
    for n in 0..MAX_ASKS / 4 {
        let peer = Visitor::new(&mut world, a);
        for k in 0..4 {
            peer.ask(&mut world, false, &format!("no {n} {k}"), &[]);
        }
    }
    world.run(1_000);
    assert!(world.node(hosts[0]).pending_for_anybody().is_empty());
    let peer = Visitor::new(&mut world, a);
    peer.ask(&mut world, false, "notes", &[]);
    world.run(1_000);
    assert_eq!(world.node(hosts[0]).pending_for_anybody().len(), 1);
}

#[test]
fn grants_that_are_over_go_and_those_taken_back_make_room() {
    let mut world = World::new(17);
    let (hosts, agents) = formed(&mut world, 1);
    let a = agents[0];
    let roommate = world.agent(hosts[0], "roommate");
    share(&mut world, hosts[0], "notes", true);
    let grants = |world: &World| world.node(hosts[0]).shares()[0].grants.clone();
    let peer = Visitor::new(&mut world, a);
    peer.ask(&mut world, false, "notes", &[]);
    world.run(100);
    let now = world.clock(hosts[0]).unix;
    grant(
        &mut world,
        hosts[0],
        GrantTerms { expires: Some(now.plus(60_000)), ..GrantTerms::default() },
    );
    assert_eq!(grants(&world).len(), 1);
    world.run(70_000);
    assert_eq!(grants(&world).len(), 0);
    // One of our own agents is not let in again because its time is over.
    let soon = world.clock(hosts[0]).unix.plus(60_000);
    let short = Command::AskCapability {
        owner: a,
        share: "notes".into(),
        write: false,
        valid_until: Some(soon),
        wait_ms: 0,
    };
    world.ask(roommate, short).unwrap();
    let back = OperatorCommand::Revoke { share: "notes".into(), bearer: Some(roommate) };
    world.operate(hosts[0], back).unwrap();
    world.run(70_000);
    assert_eq!(grants(&world).len(), 1);
    assert_eq!(world.ask(roommate, asks(a, "notes", false)), Ok(CommandResult::AskPending));
}

#[test]
fn those_taken_back_make_room() {
    let mut world = World::new(19);
    let durable = HostSpec { durable: true, ..HostSpec::default() };
    let at = UnixMillis(1);
    let grants = |name: &str, revoked: bool| -> Vec<Record> {
        let grant = |n: usize| Record::ShareGrant {
            name: name.into(),
            token: (n as u128).to_be_bytes(),
            bearer: DeviceId([n as u8; 32]),
            write: false,
            at: UnixMillis(n as u64),
            expires: UnixMillis(u64::MAX),
            delegations: 0,
            revoked,
        };
        let share = Record::Share { name: name.into(), place: "/work".into(), write: false, at };
        std::iter::once(share).chain((0..MAX_GRANTS).map(grant)).collect()
    };
    let host = world.host_as(durable);
    world.remember(host, &grants("revoked", true));
    world.remember(host, &grants("full", false));
    world.start(host);
    let a = world.agent(host, "a");
    world.run(1_000);
    let peer = Visitor::new(&mut world, a);
    for name in ["full", "revoked"] {
        peer.ask(&mut world, false, name, &[]);
        world.run(100);
        let id = world.node(host).pending_for_anybody()[0].id.clone();
        let yes = OperatorCommand::Grant { id: id.clone(), terms: GrantTerms::default() };
        let done = world.operate(host, yes);
        if name == "full" {
            assert_eq!(done.unwrap_err().code, "too_many_grants");
            let no = OperatorCommand::Refuse { id, reason: None };
            world.operate(host, no).unwrap();
        } else {
            assert_eq!(done, Ok(CommandResult::Done));
        }
    }
    for share in world.node(host).shares() {
        assert_eq!(share.grants.len(), MAX_GRANTS, "{}", share.name);
    }
}

fn hands_on(owner: DeviceId, to: DeviceId, write: bool, terms: GrantTerms) -> Command {
    let terms = GrantTerms { write: Some(write), ..terms };
    Command::HandOn { owner, share: "notes".into(), to, terms }
}

#[test]
fn a_permission_is_handed_on_with_less_than_its_holder_has() {
    let mut world = World::new(18);
    let (hosts, agents) = formed(&mut world, 4);
    let [a, b, c, d] = agents[..] else { unreachable!() };
    share(&mut world, hosts[0], "notes", true);
    let none = GrantTerms::default();
    let code = |world: &mut World, agent, command| match world.ask(agent, command) {
        Ok(CommandResult::Granted { write, .. }) => format!("granted {write}"),
        Ok(CommandResult::Refused { code, .. }) => code,
        Ok(other) => panic!("{other:?}"),
        Err(error) => error.code.into(),
    };
    assert_eq!(code(&mut world, b, hands_on(a, c, false, none)), "not_allowed");
    // One that cannot be passed on.
    world.ask(b, asks(a, "notes", false)).unwrap();
    grant(&mut world, hosts[0], GrantTerms::default());
    world.run(100);
    assert_eq!(code(&mut world, b, hands_on(a, c, false, none)), "not_delegable");
    assert_eq!(code(&mut world, b, hands_on(a, c, true, none)), "not_allowed");
    let revoke = OperatorCommand::Revoke { share: "notes".into(), bearer: None };
    world.operate(hosts[0], revoke.clone()).unwrap();
    // Writing, to be passed on twice.
    world.ask(b, asks(a, "notes", true)).unwrap();
    grant(&mut world, hosts[0], GrantTerms { delegations: Some(2), ..none });
    world.run(100);
    let more = GrantTerms { delegations: Some(2), ..none };
    assert_eq!(code(&mut world, b, hands_on(a, c, true, more)), "invalid_delegations");
    let past = GrantTerms { expires: Some(UnixMillis(1)), ..none };
    assert_eq!(code(&mut world, b, hands_on(a, c, true, past)), "invalid_expiry");
    assert_eq!(code(&mut world, b, hands_on(a, b, true, none)), "invalid_target");
    // Reading of writing, for a minute and once more.
    let now = world.clock(hosts[1]).unix;
    let minute = GrantTerms { expires: Some(now.plus(60_000)), delegations: Some(1), ..none };
    assert_eq!(code(&mut world, b, hands_on(a, c, false, minute)), "granted false");
    assert_eq!(outcomes(&world, &c), [(true, String::new())]);
    assert_eq!(called(&mut world, c, calls(a, "notes", false)), "ok");
    let call = world.calls.pop().unwrap();
    assert_eq!((call.from, call.may_write), (c, false));
    assert_eq!(called(&mut world, c, calls(a, "notes", true)), "not_allowed");
    // And on, no longer than that.
    let long = GrantTerms { expires: Some(now.plus(DAY_MS)), ..none };
    let on = world.ask(c, hands_on(a, d, false, long)).unwrap();
    assert!(
        matches!(on, CommandResult::Granted { expires, .. } if expires == now.plus(60_000)),
        "{on:?}"
    );
    assert_eq!(called(&mut world, d, calls(a, "notes", false)), "ok");
    assert_eq!(code(&mut world, d, hands_on(a, b, false, none)), "not_delegable");
    world.run(61_000);
    assert_eq!(called(&mut world, c, calls(a, "notes", false)), "expired");
    assert_eq!(called(&mut world, d, calls(a, "notes", false)), "expired");
    // Writing; what ends for the one ends for the other.
    assert_eq!(code(&mut world, b, hands_on(a, c, true, none)), "granted true");
    world.calls.clear();
    assert_eq!(called(&mut world, c, calls(a, "notes", true)), "ok");
    assert!(world.calls[0].may_write);
    assert_eq!(world.node(hosts[0]).shares()[0].grants.iter().filter(|g| !g.revoked).count(), 1);
    world.operate(hosts[0], revoke).unwrap();
    world.run(100);
    assert_eq!(called(&mut world, c, calls(a, "notes", true)), "revoked");
    assert_eq!(world.calls.len(), 1);
}

#[test]
fn a_grant_ends_at_its_time_and_never_later_than_was_asked_for() {
    let mut world = World::new(4);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    share(&mut world, hosts[0], "notes", true);
    let now = world.clock(hosts[0]).unix;
    let ask = |until: u64| Command::AskCapability {
        owner: a,
        share: "notes".into(),
        write: false,
        valid_until: Some(UnixMillis(until)),
        wait_ms: 0,
    };
    assert!(matches!(
        world.ask(b, ask(now.0)),
        Ok(CommandResult::Refused { code, .. }) if code == "expired"
    ));
    world.ask(b, ask(now.0 + 60_000)).unwrap();
    let past = GrantTerms { expires: Some(now), ..GrantTerms::default() };
    let id = world.node(hosts[0]).pending_for_anybody()[0].id.clone();
    let grant_past = OperatorCommand::Grant { id: id.clone(), terms: past };
    assert_eq!(world.operate(hosts[0], grant_past).unwrap_err().code, "invalid_expiry");
    let more = GrantTerms { write: Some(true), ..GrantTerms::default() };
    let grant_more = OperatorCommand::Grant { id: id.clone(), terms: more };
    assert_eq!(world.operate(hosts[0], grant_more).unwrap_err().code, "not_narrower");
    let deep = GrantTerms { delegations: Some(9), ..GrantTerms::default() };
    let grant_deep = OperatorCommand::Grant { id, terms: deep };
    assert_eq!(world.operate(hosts[0], grant_deep).unwrap_err().code, "invalid_delegations");
    let long = GrantTerms { expires: Some(now.plus(DAY_MS)), ..GrantTerms::default() };
    grant(&mut world, hosts[0], long);
    world.run(100);
    assert_eq!(called(&mut world, b, calls(a, "notes", false)), "ok");
    world.run(60_000);
    assert_eq!(called(&mut world, b, calls(a, "notes", false)), "expired");
    assert_eq!(world.calls.len(), 1);
}

#[test]
fn agents_of_the_sharing_daemon_need_the_share_but_no_decision() {
    let mut world = World::new(5);
    let (hosts, agents) = formed(&mut world, 1);
    let a = agents[0];
    let b = world.agent(hosts[0], "roommate");
    world.run(100);
    assert_eq!(called(&mut world, b, calls(a, "notes", false)), "not_allowed");
    share(&mut world, hosts[0], "notes", false);
    assert!(matches!(
        world.ask(b, asks(a, "notes", true)),
        Ok(CommandResult::Refused { code, .. }) if code == "read_only"
    ));
    assert!(matches!(
        world.ask(b, asks(a, "notes", false)),
        Ok(CommandResult::Granted { write: false, .. })
    ));
    assert_eq!(called(&mut world, b, calls(a, "notes", false)), "ok");
    // What was taken back is asked for like anybody's.
    let revoke = OperatorCommand::Revoke { share: "notes".into(), bearer: None };
    world.operate(hosts[0], revoke).unwrap();
    assert_eq!(called(&mut world, b, calls(a, "notes", false)), "revoked");
    assert_eq!(world.ask(b, asks(a, "notes", false)), Ok(CommandResult::AskPending));
    grant(&mut world, hosts[0], GrantTerms::default());
    world.run(100);
    assert_eq!(called(&mut world, b, calls(a, "notes", false)), "ok");
}

#[test]
fn what_is_shared_no_longer_is_nobodys() {
    let mut world = World::new(6);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    share(&mut world, hosts[0], "notes", false);
    world.ask(b, asks(a, "notes", false)).unwrap();
    grant(&mut world, hosts[0], GrantTerms::default());
    world.run(100);
    world.operate(hosts[0], OperatorCommand::Unshare("notes".into())).unwrap();
    world.run(100);
    assert_eq!(called(&mut world, b, calls(a, "notes", false)), "revoked");
    // Under the same name again, it is another share.
    share(&mut world, hosts[0], "notes", true);
    assert_eq!(called(&mut world, b, calls(a, "notes", false)), "revoked");
    let other = OperatorCommand::Share {
        name: "notes".into(),
        place: "/work/elsewhere".into(),
        write: false,
    };
    assert_eq!(world.operate(hosts[0], other).unwrap_err().code, "share_exists");
    let gone = OperatorCommand::Unshare("other".into());
    assert_eq!(world.operate(hosts[0], gone).unwrap_err().code, "share_not_found");
    assert_eq!(world.calls.len(), 0);
}

#[test]
fn shares_grants_and_tokens_outlive_a_crash() {
    let mut world = World::new(7);
    let durable = HostSpec { durable: true, ..HostSpec::default() };
    let hosts = [world.host_as(durable), world.host_as(durable)];
    hosts.iter().for_each(|host| world.start(*host));
    let a = world.agent(hosts[0], "a");
    let b = world.agent(hosts[1], "b");
    world.run_until(20_000, "a mesh", |world| is_full_mesh(world) && all_see_all(world));
    share(&mut world, hosts[0], "notes", true);
    share(&mut world, hosts[0], "other", false);
    world.operate(hosts[0], OperatorCommand::Unshare("other".into())).unwrap();
    for write in [false, true] {
        world.ask(b, asks(a, "notes", write)).unwrap();
        grant(&mut world, hosts[0], GrantTerms::default());
    }
    world.run(1_000);
    for host in hosts {
        world.crash(host);
        world.start(host);
        world.run(20_000);
    }
    let shares = world.node(hosts[0]).shares();
    assert_eq!(shares.len(), 1);
    assert_eq!(
        (shares[0].name.as_str(), shares[0].write, shares[0].grants.len()),
        ("notes", true, 2)
    );
    assert_eq!(called(&mut world, b, calls(a, "notes", true)), "ok");
    world
        .operate(hosts[0], OperatorCommand::Revoke { share: "notes".into(), bearer: None })
        .unwrap();
    world.run(1_000);
    world.crash(hosts[0]);
    world.start(hosts[0]);
    world.run(20_000);
    assert!(world.node(hosts[0]).shares()[0].grants.iter().all(|grant| grant.revoked));
    assert_eq!(called(&mut world, b, calls(a, "notes", false)), "revoked");
}

#[test]
fn agents_of_another_machine_ask_and_call_through_their_channel() {
    let mut world = World::new(12);
    let ([near, far], [a, b]) = two_machines(&mut world);
    for (agent, host) in [(a, far), (b, near)] {
        let yes = Command::Accept(DecisionTarget::Connection(world.device(host)));
        assert_eq!(world.ask(agent, yes), Ok(CommandResult::Done));
    }
    // Until each has heard of the other's agent.
    world.run(30_000);
    share(&mut world, near, "notes", true);
    assert_eq!(world.ask(b, asks(a, "notes", true)), Ok(CommandResult::AskPending));
    grant(&mut world, near, GrantTerms::default());
    world.run(1_000);
    assert_eq!(outcomes(&world, &b), [(true, String::new())]);
    assert_eq!(called(&mut world, b, calls(a, "notes", true)), "ok");
    assert_eq!(world.calls[0].from, b);
    let revoke = OperatorCommand::Revoke { share: "notes".into(), bearer: None };
    world.operate(near, revoke).unwrap();
    world.run(1_000);
    assert_eq!(called(&mut world, b, calls(a, "notes", false)), "revoked");
    assert_eq!(world.calls.len(), 1);
}

#[test]
fn names_that_could_mislead_are_refused() {
    let mut world = World::new(8);
    let (hosts, _) = formed(&mut world, 1);
    for name in ["", " a", "a ", "a/b", "..", ".", "a\\b", "a\nb", "a\u{202e}b", "a\u{200b}"] {
        let command =
            OperatorCommand::Share { name: name.into(), place: "/work".into(), write: false };
        assert_eq!(world.operate(hosts[0], command).unwrap_err().code, "invalid_name", "{name:?}");
    }
    let long = "n".repeat(65);
    let command = OperatorCommand::Share { name: long, place: "/work".into(), write: false };
    assert_eq!(world.operate(hosts[0], command).unwrap_err().code, "invalid_name");
    for n in 0..MAX_SHARES {
        share(&mut world, hosts[0], &format!("notes {n}"), false);
    }
    let command =
        OperatorCommand::Share { name: "one more".into(), place: "/work".into(), write: false };
    assert_eq!(world.operate(hosts[0], command).unwrap_err().code, "too_many_shares");
}

// --- peers that are not commsd ------------------------------------------------------------------------

struct Visitor {
    raw: usize,
    session: SessionId,
    key: DeviceKey,
}

impl Visitor {
    fn new(world: &mut World, device: DeviceId) -> Self {
        let raw = world.raw(HostSpec::default());
        let door = world.door(&device);
        let session = world.raw_dial(raw, door);
        world.run(50);
        let key = world.host_key(raw);
        Self { raw, session, key }
    }

    fn ask(&self, world: &mut World, write: bool, share: &str, extra: &[(&str, Value)]) -> u64 {
        let verb = if write { VAULT_WRITE } else { VAULT_READ };
        let params = [("verb", Value::from("capability.request")), ("capability", verb.into())]
            .into_iter()
            .chain(extra.iter().cloned());
        request(world, self.raw, self.session, verb, Value::map(params), scope(share), None)
    }

    fn call(&self, world: &mut World, verb: &str, share: &str, token: Option<CoseSign1>) -> u64 {
        let params = [("verb", Value::from("x-commsd-vault.call")), ("op", "inspect".into())];
        request(world, self.raw, self.session, verb, Value::map(params), scope(share), token)
    }

    /// Makes a call and waits for its word.
    fn word(
        &self,
        world: &mut World,
        verb: &str,
        share: &str,
        token: Option<&CoseSign1>,
    ) -> String {
        let id = self.call(world, verb, share, token.cloned());
        world.run(100);
        answers(world, self.raw).remove(&id).unwrap_or_else(|| "nothing".into())
    }

    fn token(&self, world: &mut World, request: u64) -> Option<CoseSign1> {
        world.raw_mut(self.raw).heard.iter().find_map(|(_, frame)| match frame {
            Frame::ManageResponse(ManageResponse { request_id, outcome: Outcome::Ok(answer) })
                if *request_id == request =>
            {
                CoseSign1::from_value(answer.get("granted-token")?.clone()).ok()
            }
            _ => None,
        })
    }
}

fn scope(share: &str) -> Scope {
    Scope::new(KIND, share)
}

#[test]
fn only_the_owners_own_word_for_the_caller_counts() {
    let mut world = World::new(9);
    let (hosts, agents) = formed(&mut world, 1);
    let a = agents[0];
    share(&mut world, hosts[0], "notes", true);
    share(&mut world, hosts[0], "other", true);
    let peer = Visitor::new(&mut world, a);
    let thief = Visitor::new(&mut world, a);
    assert_eq!(peer.word(&mut world, VAULT_READ, "notes", None), "unauthorized");
    let asked = peer.ask(&mut world, false, "notes", &[]);
    world.run(100);
    grant(&mut world, hosts[0], GrantTerms { delegations: Some(1), ..GrantTerms::default() });
    world.run(100);
    let good = peer.token(&mut world, asked).expect("a token");
    assert_eq!(peer.word(&mut world, VAULT_READ, "notes", Some(&good)), "ok");
    // Another capability, share or bearer.
    for (who, verb, share, word) in [
        (&peer, VAULT_WRITE, "notes", "wrong_capability"),
        (&peer, VAULT_READ, "other", "wrong_scope_path"),
        (&peer, VAULT_READ, "notes/..", "wrong_scope_path"),
        (&peer, VAULT_READ, "", "wrong_scope_path"),
        (&thief, VAULT_READ, "notes", "bearer_mismatch"),
    ] {
        assert_eq!(who.word(&mut world, verb, share, Some(&good)), word, "{verb} {share}");
    }
    // A token of one's own making, of the addressed agent's key even, and a bent one.
    let now = world.clock(hosts[0]).unix;
    let forge = |key: &DeviceKey, bearer: DeviceId| {
        let expires = now.plus(DAY_MS);
        let request = MintRequest::new([7; 16], bearer, VAULT_READ, scope("notes"), expires);
        token::mint(key, now, request).unwrap()
    };
    let own = forge(&peer.key, peer.key.id());
    assert_eq!(peer.word(&mut world, VAULT_READ, "notes", Some(&own)), "wrong_chain_root");
    let unknown = forge(&world.host_key(hosts[0]), peer.key.id());
    assert_eq!(peer.word(&mut world, VAULT_READ, "notes", Some(&unknown)), "revoked");
    let mut bent = good.clone();
    bent.signature[0] ^= 1;
    assert_eq!(peer.word(&mut world, VAULT_READ, "notes", Some(&bent)), "bad_signature");
    // Passed on once, as the grant lets it, and not a second time.
    let child = token::delegate(&peer.key, now, &good, [8; 16], thief.key.id()).unwrap();
    assert_eq!(thief.word(&mut world, VAULT_READ, "notes", Some(&child)), "ok");
    let revoke = OperatorCommand::Revoke { share: "notes".into(), bearer: Some(peer.key.id()) };
    world.operate(hosts[0], revoke).unwrap();
    assert_eq!(peer.word(&mut world, VAULT_READ, "notes", Some(&good)), "revoked");
    assert_eq!(thief.word(&mut world, VAULT_READ, "notes", Some(&child)), "parent_invalid");
    assert_eq!(world.calls.len(), 2);
    // Verbs that are not there, scopes that do not fit.
    let odd = |world: &mut World, verb: &str, inner: &str, scope: Scope| {
        let params = Value::map([("verb", Value::from(inner))]);
        let id = request(world, peer.raw, peer.session, verb, params, scope, None);
        world.run(100);
        answers(world, peer.raw)[&id].clone()
    };
    assert_eq!(odd(&mut world, VAULT_READ, "vault.wipe", scope("notes")), "unsupported_verb");
    assert_eq!(
        odd(&mut world, "x-other:read", "capability.request", scope("notes")),
        "unsupported_verb"
    );
    assert_eq!(
        odd(&mut world, VAULT_READ, "capability.request", Scope::of_kind(KIND)),
        "missing_scope_path"
    );
    assert_eq!(odd(&mut world, VAULT_READ, "capability.request", scope("notes")), "malformed");
    // A token that nobody asked for.
    let params = Value::map([
        ("verb", Value::from("capability.grant")),
        ("granted-token", forge(&peer.key, a).to_value()),
    ]);
    let id = request(&mut world, peer.raw, peer.session, VAULT_READ, params, scope("mine"), None);
    world.run(100);
    assert_eq!(answers(&mut world, peer.raw)[&id], "unauthorized");
    assert!(world.slots[&a].services.is_empty());
    // Nor one that somebody says he hands on: of his own making, of somebody else's, for others.
    let peer_root = forge(&peer.key, thief.key.id());
    let own = token::delegate(&thief.key, now, &peer_root, [9; 16], a).unwrap();
    for (owner, token, word) in [
        (peer.key.id(), &own, "unknown_owner"),
        (a, &own, "wrong_chain_root"),
        (world.device(hosts[0]), &child, "parent_invalid"),
    ] {
        let params = Value::map([
            ("verb", Value::from("capability.grant")),
            ("granted-token", token.to_value()),
            ("x-commsd-owner", Value::Bytes(owner.0.to_vec())),
        ]);
        let scope = scope("notes");
        let id = request(&mut world, thief.raw, thief.session, VAULT_READ, params, scope, None);
        world.run(100);
        assert_eq!(answers(&mut world, thief.raw)[&id], word);
    }
    assert!(world.slots[&a].services.is_empty());
}

#[test]
fn a_token_is_good_for_its_time_and_its_owner() {
    let mut world = World::new(20);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    for host in &hosts {
        share(&mut world, *host, "notes", true);
    }
    let peer = Visitor::new(&mut world, a);
    let asked = peer.ask(&mut world, false, "notes", &[]);
    world.run(100);
    let expires = Some(world.clock(hosts[0]).unix.plus(60_000));
    grant(&mut world, hosts[0], GrantTerms { expires, ..GrantTerms::default() });
    world.run(100);
    let good = peer.token(&mut world, asked).expect("a token");
    assert_eq!(peer.word(&mut world, VAULT_READ, "notes", Some(&good)), "ok");
    // The share of the same name of somebody else.
    let door = world.door(&b);
    let session = world.raw_dial(peer.raw, door);
    world.run(50);
    let there = Visitor { raw: peer.raw, session, key: world.host_key(peer.raw) };
    assert_eq!(there.word(&mut world, VAULT_READ, "notes", Some(&good)), "wrong_chain_root");
    world.run(60_000);
    assert_eq!(peer.word(&mut world, VAULT_READ, "notes", Some(&good)), "expired");
    assert_eq!(world.calls.len(), 1);
}

#[test]
fn floods_of_requests_and_calls_are_bounded() {
    let mut world = World::new(10);
    let (hosts, agents) = formed(&mut world, 1);
    let a = agents[0];
    for n in 0..8 {
        share(&mut world, hosts[0], &format!("notes{n}"), true);
    }
    let peer = Visitor::new(&mut world, a);
    let asked = peer.ask(&mut world, false, "notes0", &[]);
    world.run(100);
    grant(&mut world, hosts[0], GrantTerms::default());
    world.run(100);
    let good = peer.token(&mut world, asked).unwrap();
    // Questions.
    let ids: Vec<u64> = (0..40)
        .map(|n| peer.ask(&mut world, n % 2 == 0, &format!("notes{}", 1 + n % 7), &[]))
        .collect();
    world.run(500);
    assert_eq!(world.node(hosts[0]).pending_for_anybody().len(), 4);
    let told = answers(&mut world, peer.raw);
    assert!(ids.iter().filter(|id| told.contains_key(id)).count() >= 24);
    assert!(ids.iter().filter_map(|id| told.get(id)).all(|word| word == "denied"));
    // Calls.
    world.serves_calls = false;
    let ids: Vec<u64> =
        (0..20).map(|_| peer.call(&mut world, VAULT_READ, "notes0", Some(good.clone()))).collect();
    world.run(500);
    let told = answers(&mut world, peer.raw);
    assert_eq!(world.calls.len(), MAX_CALLS_OF_DEVICE);
    assert_eq!(
        ids.iter().filter(|id| told.get(id).is_some_and(|word| word == "busy")).count(),
        20 - MAX_CALLS_OF_DEVICE
    );
    const { assert!(MAX_CALLS_OF_DEVICE < MAX_CALLS) }
    // Whoever does not answer is answered for, and makes room.
    world.run(SERVICE_DEADLINE_MS + 1_000);
    let told = answers(&mut world, peer.raw);
    let timeouts = ids.iter().filter(|id| told.get(id).is_some_and(|word| word == "timeout"));
    assert_eq!(timeouts.count(), MAX_CALLS_OF_DEVICE);
    world.serves_calls = true;
    assert_eq!(peer.word(&mut world, VAULT_READ, "notes0", Some(&good)), "ok");
}

#[test]
fn a_caller_hears_when_the_other_side_goes_away() {
    let mut world = World::new(11);
    let (hosts, agents) = formed(&mut world, 2);
    let [a, b] = agents[..] else { unreachable!() };
    share(&mut world, hosts[0], "notes", false);
    world.ask(b, asks(a, "notes", false)).unwrap();
    grant(&mut world, hosts[0], GrantTerms::default());
    world.run(100);
    world.serves_calls = false;
    let op = world.command(b, calls(a, "notes", false));
    world.run(50);
    world.crash(hosts[0]);
    world.run_until(60_000, "an end", |world| world.replies.contains_key(&op));
    let code = world.replies[&op].clone().unwrap_err().code;
    assert!(matches!(code, "connection_lost" | "timeout"), "{code}");
    world.run(60_000);
    assert_eq!(called(&mut world, b, calls(a, "notes", false)), "not_connected");
}
