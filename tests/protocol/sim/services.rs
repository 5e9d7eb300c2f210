//! Shares over the mesh: asking, granting, calling, taking back, from both sides and from peers that
//! mean no good (decisions 32, 84, 85).

use commsd::codec::cbor::Value;
use commsd::codec::time::UnixMillis;
use commsd::identity::device::{DeviceId, DeviceKey};
use commsd::mesh::events::DeliveryEvent;
use commsd::mesh::node::{
    Command, CommandResult, DecisionTarget, GrantTerms, MAX_CALLS, MAX_CALLS_OF_DEVICE, MAX_SHARES,
    OperatorCommand, SERVICE_DEADLINE_MS,
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
    assert!(matches!(
        world.ask(b, asks(a, "notes", false)),
        Ok(CommandResult::Refused { code, .. }) if code == "not_shared"
    ));
    share(&mut world, hosts[0], "notes", false);
    assert!(matches!(
        world.ask(b, asks(a, "notes", true)),
        Ok(CommandResult::Refused { code, .. }) if code == "read_only"
    ));
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
    // The question of a day is over.
    world.ask(b, asks(a, "notes", true)).unwrap();
    world.run(DAY_MS + 1_000);
    assert!(world.node(hosts[0]).pending_for_anybody().is_empty());
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
