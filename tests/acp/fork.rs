//! Single situations of the log that a random walk meets seldom: a forger, a dead worker, an ending on
//! top of a step that lost its place.

use commsd::acp::code::Code;
use commsd::acp::log::{COUNTERSIGN_TIMEOUT_MS, Cx, Effect, Outputs, TaskLog, Wish};
use commsd::acp::objects::*;
use commsd::acp::steps;
use commsd::acp::value::*;
use commsd::codec::time::UnixMillis;
use commsd::identity::entropy::SeededEntropy;
use serde_json::json;

use crate::support::person;
use crate::walk::manifest;

const START: u64 = 1_796_083_200_000;
const DEADLINE: u64 = START + 3_600_000;

struct Two {
    logs: [TaskLog; 2],
    entropy: SeededEntropy,
    now: u64,
}

impl Two {
    /// A task, accepted and begun, both sides up to date.
    fn in_progress() -> Self {
        let mut entropy = SeededEntropy::new(11);
        let (alice, bob) = (person(1).secret(), person(2).secret());
        let mut cx = Cx { key: &alice, now: UnixMillis(START), entropy: &mut entropy };
        let manifest = manifest(&mut cx, &json!(1), 0);
        let offer = Time::from(UnixMillis(START + 600_000));
        let contract = steps::contract(&mut cx, manifest, bob.did(), None, vec![], offer).unwrap();
        let (log, out) = TaskLog::propose(&mut cx, &contract, json!(1), vec![]).unwrap();
        let genesis = log.view().genesis().clone();
        let (other, _) = TaskLog::open(genesis, bob.did()).unwrap();
        let mut two = Self { logs: [log, other], entropy, now: START };
        two.exchange(0, out);
        let out = two.step(1, |log, cx| {
            let target = steps::acceptance_target(log.view()).unwrap();
            let task = log.view().task_id().clone();
            let yes = steps::approval(cx, &task, &target, Decision::Approved, None, "").unwrap();
            let wish = steps::accept(cx, log.view(), &yes).unwrap();
            log.wish(cx, wish).unwrap()
        });
        two.exchange(1, out);
        let out = two.step(1, |log, cx| log.wish(cx, steps::start()).unwrap());
        two.exchange(1, out);
        assert_eq!(two.logs[0].view().state(), Some(State::InProgress));
        assert_eq!(two.logs[1].view().head(), two.logs[0].view().head());
        two
    }

    fn step<T>(&mut self, who: usize, act: impl FnOnce(&mut TaskLog, &mut Cx<'_>) -> T) -> T {
        let key = person(who as u8 + 1).secret();
        let mut cx = Cx { key: &key, now: UnixMillis(self.now), entropy: &mut self.entropy };
        act(&mut self.logs[who], &mut cx)
    }

    fn give(&mut self, to: usize, message: SessionMessage) -> Outputs {
        self.now += 1;
        self.step(to, |log, cx| log.handle(cx, message).unwrap())
    }

    /// Carries everything to and fro until nothing is left.
    fn exchange(&mut self, from: usize, out: Outputs) {
        let mut flying: Vec<_> =
            out.messages.into_iter().map(|message| (1 - from, message)).collect();
        while !flying.is_empty() {
            let (to, message) = flying.remove(0);
            let out = self.give(to, message);
            flying.extend(out.messages.into_iter().map(|message| (1 - to, message)));
        }
    }

    fn cancel(&mut self) -> Outputs {
        self.step(0, |log, cx| {
            let wish = steps::cancel(cx, log.view(), "", 5000).unwrap();
            log.wish(cx, wish).unwrap()
        })
    }

    fn progress(&mut self) -> Outputs {
        self.now += 2000;
        self.step(1, |log, cx| {
            let none = Metrics {
                input_tokens: None,
                output_tokens: None,
                total_tokens: None,
                tool_calls: None,
            };
            let wish = steps::progress(cx, log.view(), None, "", "", none, None).unwrap();
            log.wish(cx, wish).unwrap()
        })
    }

    /// Polls one side alone until `until`.
    fn wait(&mut self, who: usize, until: u64) -> Vec<SessionMessage> {
        let mut sent = Vec::new();
        while self.now < until {
            self.now += 10_000;
            sent.extend(self.step(who, |log, cx| log.poll(cx).unwrap()).messages);
        }
        sent
    }
}

/// Decision 36: the worker died after ACCEPT; CANCEL is never answered, ABANDON ends the task.
#[test]
fn a_dead_worker_does_not_hold_a_task() {
    let mut two = Two::in_progress();
    two.cancel();
    assert_eq!(two.logs[0].view().state(), Some(State::InProgress));
    let soon = two.now + 5000 + 300_000;
    two.wait(0, soon - 10_000);
    assert!(!two.logs[0].view().is_sealed());
    two.wait(0, soon + 20_000 + COUNTERSIGN_TIMEOUT_MS + 80_000);
    let log = &two.logs[0];
    assert_eq!(log.view().state(), Some(State::Cancelled));
    let ends: Vec<_> = log.entries().iter().rev().take(2).collect();
    assert_eq!(ends[0].entry.event, Event::Abandon);
    assert_eq!(ends[1].entry.event, Event::Cancel);
    assert!(ends.iter().all(|c| c.entry.countersignature().is_none()));
    let now = UnixMillis(two.now);
    let report = commsd::acp::audit::verify(&commsd::acp::audit::AuditLog::of(log), None, now);
    assert_eq!(report.status, commsd::acp::audit::Status::Valid);
    assert_eq!(report.unilateral, 2);
    // It comes back: both entries get their second signatures, no digest changes.
    let head = log.view().head();
    let later = two.now + 3_700_000;
    let message = two.wait(0, later).pop().unwrap();
    let out = two.give(1, message);
    two.exchange(1, out);
    assert!(two.logs.iter().all(|log| log.is_confirmed() && log.view().head() == head));
    assert_eq!(two.logs[0].entries(), two.logs[1].entries());
}

/// An ending on top of an entry that lost its place is written anew on other ground; the old one,
/// however late it comes, makes nobody a forger.
#[test]
fn what_stood_on_lost_ground_is_no_forgery() {
    let mut two = Two::in_progress();
    let lost = two.progress();
    assert_eq!(lost.messages.len(), 1);
    let sent = two.wait(1, DEADLINE + 300_000 + 20_000);
    let old = sent.into_iter().find(|m| m.entries.len() == 2).expect("EXPIRE on top of PROGRESS");
    assert!(!two.logs[1].view().is_sealed());
    // Meanwhile the requester wrote CANCEL at the same place, before the deadline by its clock.
    let cancel = two.cancel();
    let out = two.give(1, cancel.messages[0].clone());
    two.exchange(1, out);
    assert_eq!(two.logs[0].view().state(), Some(State::Expired));
    assert_eq!(two.logs[0].view().head(), two.logs[1].view().head());
    let out = two.give(0, old);
    assert!(!two.logs[0].is_forked(), "{:?}", out.effects);
    assert!(two.logs[0].evidence().is_empty());
}

/// Two entries by one hand on the same ground.
#[test]
fn a_forger_is_caught() {
    let mut two = Two::in_progress();
    let before = two.logs[1].clone();
    let out = two.progress();
    two.exchange(1, out);
    // The worker puts its store back and writes something else at the same place.
    two.logs[1] = before;
    two.now += 5000;
    let out = two.progress();
    let forged = out.messages[0].clone();
    let out = two.give(0, forged.clone());
    let seq = forged.entries[0].seq.get();
    assert_eq!(out.effects, [Effect::Forked { seq }]);
    assert!(out.messages.is_empty());
    assert!(two.logs[0].is_forked());
    assert_eq!(two.logs[0].evidence(), [(forged.entries[0].clone(), Code::AuditFork)]);
    let proof = &two.logs[0].entries()[seq as usize].entry;
    assert_ne!(proof.digest().unwrap(), forged.entries[0].digest().unwrap());
    // Nothing is done any more, also after a restart.
    let wish = Wish { event: Event::Cancel, objects: vec![] };
    let refused = two.step(0, |log, cx| log.wish(cx, wish)).unwrap_err();
    assert_eq!(refused.code(), Code::AuditFork);
    assert!(two.give(0, forged).messages.is_empty());
}

/// Resends are answered the same way; what is not signed was not said.
#[test]
fn answers_are_idempotent_and_strangers_unheard() {
    let mut two = Two::in_progress();
    let out = two.progress();
    let message = out.messages[0].clone();
    let first = two.give(0, message.clone());
    let again = two.give(0, message.clone());
    assert!(again.records.is_empty());
    assert_eq!(first.messages[0].countersignatures, again.messages[0].countersignatures);
    // A changed entry keeps nothing of its signature.
    let mut changed = message.clone();
    let entry = AuditEntry { at: changed.entries[0].at.plus(1), ..changed.entries[0].clone() };
    changed.entries = Seq::new(vec![entry]).unwrap();
    let out = two.give(0, changed);
    assert!(out.records.is_empty() && out.effects.is_empty());
    // Not from this peer, or of another task.
    let mut other = message.clone();
    other.from = person(3).secret().did();
    let refused = two.step(0, |log, cx| log.handle(cx, other)).unwrap_err();
    assert_eq!(refused.code(), Code::WrongSigner);
    let mut other = message;
    other.task_id = TaskId::parse("task_example001").unwrap();
    let refused = two.step(0, |log, cx| log.handle(cx, other)).unwrap_err();
    assert_eq!(refused.code(), Code::UnknownTask);
}

/// The rank rule at one place, and a requester's own ending without the worker (decision 35).
#[test]
fn a_delivery_loses_against_a_cancellation_and_is_kept() {
    let mut two = Two::in_progress();
    let deliver = two.step(1, |log, cx| {
        let started = Time::from(cx.now);
        let usage = steps::usage(
            cx,
            log.view(),
            crate::gateways::used(),
            UsageSource::Metered,
            ("x", None),
            started,
            true,
        )
        .unwrap();
        let wish = steps::deliver(cx, log.view(), json!({}), &usage, None).unwrap();
        log.wish(cx, wish).unwrap()
    });
    let cancel = two.cancel();
    let nack = two.give(0, deliver.messages[0].clone());
    let said = nack.messages[0].nack.clone().unwrap();
    assert_eq!(said.code, Code::SeqConflict);
    assert_eq!(nack.messages[0].entries[0].event, Event::Cancel);
    let out = two.give(1, cancel.messages[0].clone());
    assert!(out.effects.iter().any(|e| matches!(e, Effect::GivenUp { event: Event::Deliver, .. })));
    two.exchange(1, out);
    assert_eq!(two.logs[0].view().state(), Some(State::Cancelling));
    assert_eq!(two.logs[0].view().head(), two.logs[1].view().head());
    // The worker still holds what it had delivered.
    let kept = two.logs[1].objects().values().any(|object| object["type"] == "Deliverable");
    assert!(kept, "the evidence of decision 42");
}
