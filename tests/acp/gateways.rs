//! Two gateways by envelopes: a whole task, keys of tasks, tool calls, refusals before the log.

use commsd::acp::audit::{AuditLog, Status, verify};
use commsd::acp::code::Code;
use commsd::acp::did::Secret;
use commsd::acp::envelope::KeyRef;
use commsd::acp::gateway::{Admission, Gateway, MAX_VOUCHED, Output, StoreSecret, TaskRecord};
use commsd::acp::json::canonical;
use commsd::acp::log::{Cx, Effect, View, Wish};
use commsd::acp::objects::*;
use commsd::acp::value::*;
use commsd::acp::{steps, verify as checks};
use commsd::codec::time::UnixMillis;
use commsd::identity::entropy::SeededEntropy;
use serde_json::{Value, json};

use crate::support::person;
use crate::walk::manifest_with;

const START: u64 = 1_796_083_200_000;

pub struct Pair {
    pub gateways: [Gateway; 2],
    pub entropy: SeededEntropy,
    pub now: u64,
    pub task: Digest,
    /// All that was stored and sent, by side.
    records: [Vec<TaskRecord>; 2],
    secrets: [Vec<StoreSecret>; 2],
    sent: Vec<(usize, Envelope)>,
    pub effects: Vec<Effect>,
}

impl Pair {
    fn new(admission: Admission) -> Self {
        Self::with(admission, |_| {})
    }

    pub fn with(admission: Admission, change: impl FnOnce(&mut TaskManifest)) -> Self {
        Self::starting(START, admission, change)
    }

    fn starting(start: u64, admission: Admission, change: impl FnOnce(&mut TaskManifest)) -> Self {
        let mut entropy = SeededEntropy::new(5);
        let [mut alice, mut bob] = [1, 2].map(|n| Gateway::new(person(n).secret(), None));
        bob.admission = admission;
        let key = person(1).secret();
        let mut cx = Cx { key: &key, now: UnixMillis(start), entropy: &mut entropy };
        let input = json!({ "q": 1 });
        let manifest = manifest_with(&mut cx, &input, 0, change);
        let offer = Time::from(UnixMillis(start + 600_000));
        let contract = steps::contract(&mut cx, manifest, bob.did(), None, vec![], offer).unwrap();
        let out =
            alice.propose(&contract, input, vec![], None, UnixMillis(start), &mut entropy).unwrap();
        let mut pair = Self {
            gateways: [alice, bob],
            entropy,
            now: start,
            task: out.task,
            records: Default::default(),
            secrets: Default::default(),
            sent: Vec::new(),
            effects: Vec::new(),
        };
        pair.emit(0, out);
        pair
    }

    fn emit(&mut self, who: usize, out: Output) {
        self.records[who].extend(out.records);
        self.secrets[who].extend(out.secrets);
        self.effects.extend(out.effects);
        self.sent.extend(out.envelopes.into_iter().map(|envelope| (1 - who, envelope)));
    }

    /// Delivers everything until nothing is under way.
    pub fn settle_down(&mut self) {
        while !self.sent.is_empty() {
            let (to, envelope) = self.sent.remove(0);
            self.now += 10;
            let bytes = canonical(&envelope).unwrap();
            let out =
                self.gateways[to].receive(&bytes, UnixMillis(self.now), &mut self.entropy).unwrap();
            if let Some(out) = out {
                self.emit(to, out);
            }
            // The same envelope again is no message.
            let again = self.gateways[to].receive(&bytes, UnixMillis(self.now), &mut self.entropy);
            assert!(again.unwrap().is_none());
        }
    }

    pub fn view(&self, who: usize) -> View {
        self.gateways[who].task(&self.task).unwrap().view().clone()
    }

    pub fn act(&mut self, who: usize, make: impl FnOnce(&mut Cx<'_>, &View) -> Wish) {
        let view = self.view(who);
        self.now += 1000;
        let key = person(who as u8 + 1).secret();
        let mut cx = Cx { key: &key, now: UnixMillis(self.now), entropy: &mut self.entropy };
        let wish = make(&mut cx, &view);
        let out = self.gateways[who]
            .act(&self.task, wish, UnixMillis(self.now), &mut self.entropy)
            .unwrap();
        self.emit(who, out);
    }
}

pub fn accept(cx: &mut Cx<'_>, view: &View) -> Wish {
    let target = steps::acceptance_target(view).unwrap();
    let receipt =
        steps::approval(cx, view.task_id(), &target, Decision::Approved, None, "").unwrap();
    steps::accept(cx, view, &receipt).unwrap()
}

pub const fn used() -> Usage {
    Usage::unmeasured()
}

fn deliver(cx: &mut Cx<'_>, view: &View) -> Wish {
    let started = Time::from(cx.now);
    let usage =
        steps::usage(cx, view, used(), UsageSource::Metered, ("command", None), started, true);
    steps::deliver(cx, view, json!({ "a": 2 }), &usage.unwrap(), None).unwrap()
}

/// A task from its order, made at `start`, to its settlement.
pub fn settled(start: u64) -> Pair {
    let mut pair = Pair::starting(start, Admission::Anyone, |_| {});
    pair.settle_down();
    pair.act(1, accept);
    pair.settle_down();
    pair.act(1, |_, _| steps::start());
    pair.settle_down();
    pair.act(1, deliver);
    pair.settle_down();
    pair.act(0, |cx, view| {
        let report = checks::report(view, 0, cx.key, cx.now, cx.entropy).unwrap();
        assert!(report.passed);
        steps::verdict(view, &report, false).unwrap()
    });
    pair.settle_down();
    pair.act(0, |cx, view| {
        let target = steps::final_target(view).unwrap();
        let yes =
            steps::approval(cx, view.task_id(), &target, Decision::Approved, None, "").unwrap();
        steps::settle(cx, view, &yes).unwrap()
    });
    pair.settle_down();
    pair
}

#[test]
fn a_whole_task_by_envelopes() {
    let mut pair = settled(START);
    for who in [0, 1] {
        let log = pair.gateways[who].task(&pair.task).unwrap();
        assert_eq!(log.view().state(), Some(State::Settled));
        assert!(log.is_confirmed());
        let report = verify(&AuditLog::of(log), None, UnixMillis(pair.now));
        assert_eq!(report.status, Status::Valid);
        // Read back from what was stored: the same log.
        let mut again = Gateway::new(person(who as u8 + 1).secret(), None);
        let records = serde_json::to_vec(&pair.records[who]).unwrap();
        let records: Vec<TaskRecord> = serde_json::from_slice(&records).unwrap();
        again.restore_task(records, pair.secrets[who].clone()).unwrap();
        assert_eq!(again.task(&pair.task).unwrap().entries(), log.entries());
    }
    // Keys are spent a day after the end, not before.
    let day = 24 * 3_600_000;
    for gateway in &mut pair.gateways {
        assert!(gateway.spent_keys(UnixMillis(pair.now + day - 60_000)).is_empty());
        assert_eq!(gateway.spent_keys(UnixMillis(pair.now + day)).len(), 1);
        assert!(gateway.spent_keys(UnixMillis(pair.now + day)).is_empty());
        let now = UnixMillis(pair.now + day);
        assert!(gateway.forget(&pair.task, now).is_some() && gateway.task(&pair.task).is_none());
    }
}

#[test]
fn later_messages_need_the_key_of_the_task() {
    let mut pair = Pair::new(Admission::Anyone);
    assert_eq!(pair.sent[0].1.key_ref().unwrap(), KeyRef::Identity);
    pair.settle_down();
    pair.act(1, accept);
    assert!(matches!(pair.sent[0].1.key_ref().unwrap(), KeyRef::Session(_)));
    pair.settle_down();
    pair.act(0, |cx, view| steps::cancel(cx, view, "", 1).unwrap());
    let (_, envelope) = pair.sent[0].clone();
    assert!(matches!(envelope.key_ref().unwrap(), KeyRef::Session(_)));
    // The same message, encrypted to the did instead.
    let KeyRef::Session(id) = envelope.key_ref().unwrap() else { panic!() };
    let secret = pair.secrets[1].iter().find(|kept| kept.id == id).unwrap();
    let plain = envelope.open(&secret.secret).unwrap();
    let (alice, bob) = (person(1).secret(), person(2).secret());
    let key = (&KeyRef::Identity, bob.did().encryption_key());
    let now = UnixMillis(pair.now);
    let weak =
        Envelope::seal(&alice, bob.did(), key, &plain, now, 60_000, &mut pair.entropy).unwrap();
    let refused = pair.gateways[1].receive(&canonical(&weak).unwrap(), now, &mut pair.entropy);
    assert_eq!(refused.unwrap_err().code(), Code::StaleKey);
    // Somebody else's envelope around it.
    let mallory = person(3).secret();
    let key = (&envelope.key_ref().unwrap(), {
        let view = serde_json::from_slice::<Value>(&plain).unwrap();
        assert_eq!(view["from"], alice.did().to_string());
        match pair.records[1].iter().find_map(|r| match r {
            TaskRecord::OwnKey { key } => Some(key.public_key),
            _ => None,
        }) {
            Some(key) => key,
            None => panic!("the worker announced no key"),
        }
    });
    let stolen =
        Envelope::seal(&mallory, bob.did(), key, &plain, now, 60_000, &mut pair.entropy).unwrap();
    let refused = pair.gateways[1].receive(&canonical(&stolen).unwrap(), now, &mut pair.entropy);
    assert_eq!(refused.unwrap_err().code(), Code::WrongSigner);
    // The real one is still good.
    pair.settle_down();
    assert_eq!(pair.view(1).state(), Some(State::Cancelling));
    assert!(pair.gateways[1].spent_keys(UnixMillis(pair.now)).is_empty(), "the task goes on");
}

#[test]
fn strangers_get_no_answer() {
    for admission in [Admission::Invited, Admission::Known(vec![person(3).secret().did()])] {
        let mut pair = Pair::new(admission);
        let (_, envelope) = pair.sent.remove(0);
        let bytes = canonical(&envelope).unwrap();
        let out = pair.gateways[1].receive(&bytes, UnixMillis(START), &mut pair.entropy).unwrap();
        assert!(out.is_none());
        assert_eq!(pair.gateways[1].tasks().count(), 0);
    }
    let mut pair = Pair::new(Admission::Known(vec![person(1).secret().did()]));
    pair.settle_down();
    assert_eq!(pair.view(1).state(), Some(State::Proposed));
}

#[test]
fn whoever_is_vouched_for_proposes_until_then() {
    let proposed = |vouched: u8, until: u64| {
        let mut pair = Pair::new(Admission::Invited);
        let did = person(vouched).secret().did();
        pair.gateways[1].vouch(did, UnixMillis(until), UnixMillis(START));
        pair.settle_down();
        pair.gateways[1].tasks().count()
    };
    // The proposal arrives ten milliseconds after the start.
    assert_eq!(proposed(1, START + 11), 1);
    assert_eq!(proposed(1, START + 10), 0);
    assert_eq!(proposed(3, START + 1_000), 0);
    // So many at one time, and a place that has become free is there for the next.
    let in_a_crowd = |at: u64| {
        let mut pair = Pair::new(Admission::Invited);
        for _ in 0..MAX_VOUCHED {
            let did = Secret::draw(&mut pair.entropy).unwrap().did();
            pair.gateways[1].vouch(did, UnixMillis(START + 5), UnixMillis(START));
        }
        let did = person(1).secret().did();
        pair.gateways[1].vouch(did, UnixMillis(START + 1_000), UnixMillis(at));
        pair.settle_down();
        pair.gateways[1].tasks().count()
    };
    assert_eq!(in_a_crowd(START + 4), 0);
    assert_eq!(in_a_crowd(START + 5), 1);
}

#[test]
fn an_envelope_for_somebody_else_is_refused() {
    let mut pair = Pair::new(Admission::Anyone);
    let (_, envelope) = pair.sent.remove(0);
    let bytes = canonical(&envelope).unwrap();
    let mut carol = Gateway::new(person(3).secret(), None);
    let refused = carol.receive(&bytes, UnixMillis(START), &mut pair.entropy);
    assert_eq!(refused.unwrap_err().code(), Code::WrongAudience);
    let late = UnixMillis(START + 7 * 24 * 3_600_000 + 60_000);
    let refused = pair.gateways[1].receive(&bytes, late, &mut pair.entropy);
    assert_eq!(refused.unwrap_err().code(), Code::EnvelopeExpired);
}
