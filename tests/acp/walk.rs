//! Two gateways over a link that loses, doubles, reorders and holds messages back, and that crash
//! between storing and sending: a random walk, one per seed.
//!
//! Safety, at every step: what both have committed is one chain, no side ever signs two entries at
//! one place, every log satisfies the audit's rules, no counter is exceeded. Liveness: when the link
//! heals, both logs are sealed, equal, and confirmed, or both know that they ended apart.

use std::collections::BTreeMap;

use commsd::acp::audit::{
    AuditLog, Comparison, JsonlWriter, Status, compare, complete, read_jsonl, verify,
};
use commsd::acp::code::Code;
use commsd::acp::did::Secret;
use commsd::acp::log::rules;
use commsd::acp::log::{Cx, Effect, Outputs, Record, TaskLog, Wish};
use commsd::acp::objects::*;
use commsd::acp::sign::{Role, Signature, Signed as _};
use commsd::acp::steps;
use commsd::acp::value::*;
use commsd::codec::time::UnixMillis;
use commsd::identity::entropy::{SeededEntropy, draw};
use serde_json::{Value, json};

use crate::support::person;

const START: u64 = 1_796_083_200_000;
const OFFER_MS: u64 = 600_000;
const DEADLINE_MS: u64 = 3_600_000;

struct Dice(SeededEntropy);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        u64::from_le_bytes(draw::<8>(&mut self.0)) % n
    }
    fn percent(&mut self, n: u64) -> bool {
        self.below(100) < n
    }
}

/// One side: what it has in memory, what is on its disk.
struct Side {
    key: Secret,
    entropy: SeededEntropy,
    disk: Vec<Record>,
    log: Option<TaskLog>,
    /// Every author signature and countersignature that left this side: place to digest. An ending on
    /// top of an entry that was given up stood on other ground.
    authored: BTreeMap<(u64, Digest), Digest>,
    countersigned: BTreeMap<u64, Digest>,
    /// The clock's error.
    skew: u64,
}

struct Flying {
    to: usize,
    at: u64,
    message: SessionMessage,
}

struct World {
    dice: Dice,
    now: u64,
    sides: [Side; 2],
    link: Vec<Flying>,
    healed: bool,
    diverged: bool,
}

pub fn manifest(cx: &mut Cx<'_>, input: &Value, max_revisions: u64) -> TaskManifest {
    manifest_with(cx, input, max_revisions, |_| {})
}

pub fn manifest_with(
    cx: &mut Cx<'_>,
    input: &Value,
    max_revisions: u64,
    change: impl FnOnce(&mut TaskManifest),
) -> TaskManifest {
    let at = Time::from(cx.now);
    let mut manifest = TaskManifest {
        task_id: TaskId::draw(cx.entropy),
        title: Name::parse("walk").unwrap(),
        description: Prose::default(),
        requester_did: cx.key.did(),
        created_at: at,
        deadline_at: at.plus(DEADLINE_MS),
        verify_within_ms: Count::clamped(600_000),
        input_schema: SchemaText(json!(true)),
        output_schema: SchemaText(json!({ "type": "object" })),
        input_digest: Digest::of(input).unwrap(),
        acceptance_criteria: Seq::default(),
        verification: Verification {
            method: VerificationMethod::Schema,
            checks: Seq::default(),
            mode: VerificationMode::All,
        },
        require_execution_attestation: false,
        budget: steps::unlimited(),
        sandbox_policy: steps::sandbox(Isolation::None),
        redelegation: Redelegation { allowed: false, max_depth: Int::new(0).unwrap() },
        max_revisions: Int::new(max_revisions).unwrap(),
        parent_task_id: None,
        parent_manifest_digest: None,
        metadata: Labels::default(),
        signature: Signature::blank(Role::Requester, cx.key.did()),
    };
    change(&mut manifest);
    manifest.signed(cx.key, cx.now).unwrap()
}

fn no_usage() -> Usage {
    Usage {
        input_tokens: None,
        output_tokens: None,
        total_tokens: None,
        tool_calls: None,
        wall_time_ms: Some(Count::clamped(1)),
        cpu_time_ms: None,
        output_bytes: None,
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let mut dice = Dice(SeededEntropy::new(seed));
        let mut side = |n| Side {
            key: person(n).secret(),
            entropy: SeededEntropy::new(seed.wrapping_mul(31).wrapping_add(u64::from(n))),
            disk: Vec::new(),
            log: None,
            authored: BTreeMap::new(),
            countersigned: BTreeMap::new(),
            skew: dice.below(20_000),
        };
        let sides = [side(1), side(2)];
        let mut world =
            Self { dice, now: START, sides, link: Vec::new(), healed: false, diverged: false };
        let input = json!({ "seed": seed });
        let revisions = world.dice.below(3);
        let (log, out) = world.with(0, |_, cx| {
            let manifest = manifest(cx, &input, revisions);
            let offer = Time::from(cx.now).plus(OFFER_MS);
            let contract =
                steps::contract(cx, manifest, person(2).secret().did(), None, vec![], offer)
                    .unwrap();
            TaskLog::propose(cx, &contract, input.clone(), vec![]).unwrap()
        });
        world.sides[0].log = Some(log);
        world.emit(0, out);
        world
    }

    /// Lends a side its log and a context.
    fn with<T>(
        &mut self,
        who: usize,
        act: impl FnOnce(Option<&mut TaskLog>, &mut Cx<'_>) -> T,
    ) -> T {
        let side = &mut self.sides[who];
        let now = UnixMillis(self.now + side.skew);
        let mut cx = Cx { key: &side.key, now, entropy: &mut side.entropy };
        act(side.log.as_mut(), &mut cx)
    }

    /// Stores, then sends, as a gateway must; it may crash anywhere in between.
    fn emit(&mut self, who: usize, out: Outputs) {
        let total = out.records.len() + out.messages.len();
        let crash = (!self.healed && self.dice.percent(4))
            .then(|| self.dice.below(total as u64 + 1) as usize);
        let stored = crash.unwrap_or(total).min(out.records.len());
        // Records of one output are one transaction.
        if stored == out.records.len() {
            self.sides[who].disk.extend(out.records.iter().cloned());
            let sent = crash.unwrap_or(total) - stored;
            for message in out.messages.into_iter().take(sent) {
                self.post(1 - who, message);
            }
        }
        for effect in &out.effects {
            match effect {
                Effect::Forked { .. } => panic!("an honest peer was called a forger"),
                Effect::Diverged { .. } => self.diverged = true,
                _ => {}
            }
        }
        if crash.is_some() {
            self.restart(who);
        }
    }

    fn restart(&mut self, who: usize) {
        let disk = self.sides[who].disk.clone();
        if disk.is_empty() {
            self.sides[who].log = None;
            return;
        }
        // Through the store's own bytes.
        let bytes = serde_json::to_vec(&disk).unwrap();
        let read: Vec<Record> = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(read, disk);
        self.sides[who].log = Some(TaskLog::restore(read).unwrap());
        let out = self.with(who, |log, cx| log.unwrap().resume(cx).unwrap());
        self.emit(who, out);
    }

    fn post(&mut self, to: usize, message: SessionMessage) {
        let from = &mut self.sides[1 - to];
        for entry in message.entries.iter() {
            let digest = entry.digest().unwrap();
            let before = from.authored.insert((entry.seq.get(), entry.prev), digest);
            assert!(before.is_none_or(|before| before == digest), "two entries at one place");
        }
        for given in message.countersignatures.iter() {
            let before = from.countersigned.insert(given.seq.get(), given.entry_digest);
            assert!(before.is_none_or(|b| b == given.entry_digest), "two signatures at one place");
        }
        if !self.healed && self.dice.percent(25) {
            return;
        }
        let copies = if !self.healed && self.dice.percent(10) { 2 } else { 1 };
        for _ in 0..copies {
            let slow = !self.healed && self.dice.percent(10);
            let delay = self.dice.below(if slow { 400_000 } else { 2000 });
            self.link.push(Flying { to, at: self.now + delay, message: message.clone() });
        }
    }

    fn deliver_due(&mut self) {
        while self.link.iter().any(|flying| flying.at <= self.now) {
            // Any of those that have arrived, not the first sent.
            let due: Vec<usize> =
                (0..self.link.len()).filter(|n| self.link[*n].at <= self.now).collect();
            let pick = due[self.dice.below(due.len() as u64) as usize];
            let Flying { to, message, .. } = self.link.swap_remove(pick);
            // Through bytes, as on the wire.
            let bytes = commsd::acp::json::canonical(&message).unwrap();
            let message: SessionMessage = read_bytes(&bytes, 1 << 20).unwrap();
            let mut opened = Vec::new();
            if self.sides[to].log.is_none() {
                let proposes = message.entries.iter().any(|e| e.event == Event::Propose);
                if !proposes {
                    continue;
                }
                let genesis = AuditGenesis::new(
                    message.task_id.clone(),
                    message.from,
                    self.sides[to].key.did(),
                )
                .unwrap();
                let me = self.sides[to].key.did();
                let (log, record) = TaskLog::open(genesis, me).unwrap();
                self.sides[to].log = Some(log);
                opened.push(record);
            }
            let mut out = self.with(to, |log, cx| log.unwrap().handle(cx, message).unwrap());
            opened.append(&mut out.records);
            out.records = opened;
            self.emit(to, out);
            self.check();
        }
    }

    /// Something that a side may want.
    fn want(&mut self, who: usize) {
        let pick = self.dice.below(100);
        let again = self.dice.percent(70);
        let bad = self.dice.percent(30);
        let out = self.with(who, |log, cx| {
            let log = log?;
            let view = log.view().clone();
            let state = view.state()?;
            let final_usage = |cx: &mut Cx<'_>| {
                let started = Time::from(cx.now);
                steps::usage(
                    cx,
                    &view,
                    no_usage(),
                    UsageSource::Metered,
                    ("command", None),
                    started,
                    true,
                )
            };
            let wish: Wish = match (log.me(), state) {
                (Party::Worker, State::Proposed) => match pick {
                    0..3 => steps::reject(cx, &view, Code::WorkerBusy, "").ok()?,
                    3..60 => {
                        let target = steps::acceptance_target(&view).ok()?;
                        let receipt = steps::approval(
                            cx,
                            view.task_id(),
                            &target,
                            Decision::Approved,
                            None,
                            "",
                        );
                        steps::accept(cx, &view, &receipt.ok()?).ok()?
                    }
                    _ => return None,
                },
                (Party::Requester, State::Proposed) if pick < 3 => steps::withdraw(),
                (Party::Worker, State::Accepted) if pick < 60 => steps::start(),
                (Party::Worker, State::InProgress) => match pick {
                    0..40 => {
                        let none = Metrics {
                            input_tokens: None,
                            output_tokens: None,
                            total_tokens: None,
                            tool_calls: None,
                        };
                        steps::progress(cx, &view, Some(pick), "s", "", none, None).ok()?
                    }
                    40..60 => {
                        let usage = final_usage(cx).ok()?;
                        let output = if bad { json!("wrong") } else { json!({ "n": pick }) };
                        steps::deliver(cx, &view, output, &usage, None).ok()?
                    }
                    60..63 => {
                        let usage = final_usage(cx).ok()?;
                        steps::fail(cx, &view, Code::AdapterFailed, "", &usage).ok()?
                    }
                    _ => return None,
                },
                (Party::Worker, State::Cancelling) if pick < 40 => {
                    let usage = final_usage(cx).ok()?;
                    steps::cancelled(&usage, None).ok()?
                }
                (Party::Requester, State::Accepted | State::InProgress) if pick < 6 => {
                    steps::cancel(cx, &view, "", 5000).ok()?
                }
                (Party::Requester, State::Delivered) if pick < 50 => {
                    let report =
                        commsd::acp::verify::report(&view, 0, cx.key, cx.now, cx.entropy).ok()?;
                    assert_eq!(report.passed, view.deliverable()?.object.output.is_object());
                    steps::verdict(&view, &report, again).ok()?
                }
                (Party::Requester, State::Verified) if pick < 60 => {
                    let target = steps::final_target(&view).ok()?;
                    let decision = if pick < 55 { Decision::Approved } else { Decision::Denied };
                    let receipt =
                        steps::approval(cx, view.task_id(), &target, decision, None, "").ok()?;
                    match decision {
                        Decision::Approved => steps::settle(cx, &view, &receipt).ok()?,
                        Decision::Denied => steps::decline(&receipt).ok()?,
                    }
                }
                (Party::Requester, State::Delivered | State::Verified) if pick > 97 => {
                    steps::supersede(cx, &view, Cause::RaceLost).ok()?
                }
                (me, _) if pick > 90 && !rules::is_terminal(state) => {
                    let contract_digest = view.contract_digest()?;
                    let target = Target::BudgetOverrun {
                        contract_digest,
                        metric: "maxTotalTokens".into(),
                        from: 1,
                        to: 2,
                    };
                    let receipt = steps::approval(
                        cx,
                        view.task_id(),
                        &target,
                        Decision::Approved,
                        None,
                        me.as_str(),
                    )
                    .ok()?;
                    steps::approve(&receipt, &target).ok()?
                }
                _ => return None,
            };
            // A careful caller waits for its own last step; a careless one queues.
            if log.pending().next().is_some() && again {
                return None;
            }
            log.wish(cx, wish).ok()
        });
        if let Some(out) = out {
            self.emit(who, out);
            self.check();
        }
    }

    fn poll(&mut self, who: usize) {
        // As a caller does: when it is time, and not again before the next.
        let polled = self.with(who, |log, cx| {
            let log = log.filter(|log| log.next_poll().is_some_and(|due| due <= cx.now))?;
            let out = log.poll(cx).unwrap();
            assert!(log.next_poll().is_none_or(|due| due > cx.now), "polled for ever");
            Some(out)
        });
        if let Some(out) = polled {
            self.emit(who, out);
            self.check();
        }
    }

    fn check(&self) {
        let [a, b] = [&self.sides[0].log, &self.sides[1].log];
        let (Some(a), Some(b)) = (a, b) else { return };
        for log in [a, b] {
            assert!(log.pending().count() <= 2);
            assert!(log.evidence().iter().all(|(_, code)| *code == Code::DivergedUnilateral));
            // The second signature is there, or the entry may stand alone.
            for (seq, committed) in log.entries().iter().enumerate() {
                if committed.entry.countersignature().is_none() {
                    let last = log.entries().last().unwrap();
                    let from_end = log.entries().len() - seq;
                    assert!(rules::may_be_last_alone(last.entry.event));
                    assert!(
                        from_end == 1 || (from_end == 2 && rules::is_unilateral(last.entry.event))
                    );
                }
            }
        }
        // One chain, up to where both have committed with both signatures.
        for (one, two) in a.entries().iter().zip(b.entries()) {
            let body = |e: &AuditEntry| (e.prev, e.event, e.at, e.actor_role, e.payload_digest);
            let same = body(&one.entry) == body(&two.entry);
            let alone = |c: &commsd::acp::log::Committed| c.entry.countersignature().is_none();
            assert!(
                same || (alone(one) && alone(two)) || a.view().is_sealed() || b.view().is_sealed()
            );
            if !same {
                assert!(alone(one) || alone(two), "two committed chains");
                break;
            }
        }
    }

    fn run(&mut self, steps: u64) {
        for _ in 0..steps {
            let jump = match self.dice.below(100) {
                0..2 => 600_000,
                2..10 => 130_000,
                10..40 => 5000,
                _ => 700,
            };
            self.now += self.dice.below(jump);
            self.deliver_due();
            let who = self.dice.below(2) as usize;
            match self.dice.below(100) {
                0..45 => self.want(who),
                45..48 => self.restart(who),
                _ => self.poll(who),
            }
        }
    }

    /// The link is whole again, nobody crashes, time goes on past every limit.
    fn heal(&mut self) {
        self.healed = true;
        for _ in 0..400 {
            self.now += 20_000;
            for who in [0, 1] {
                self.poll(who);
            }
            self.now += 2500;
            self.deliver_due();
            let sealed = |side: &Side| {
                side.log.as_ref().is_none_or(|log| {
                    log.view().is_sealed() && (log.is_confirmed() || self.diverged)
                })
            };
            if self.sides.iter().all(sealed) && self.link.is_empty() {
                break;
            }
        }
    }

    fn finish(&self, seed: u64) -> Option<State> {
        let [Some(a), Some(b)] = [&self.sides[0].log, &self.sides[1].log] else {
            panic!("seed {seed}: the worker never heard of the task");
        };
        for log in [a, b] {
            let now = UnixMillis(self.now + 60_000);
            let audit = AuditLog::of(log);
            let file = JsonlWriter::whole(&audit, false).unwrap();
            let read = read_jsonl(&file).unwrap();
            assert_eq!(read, audit);
            let report = verify(&read, None, now);
            assert_eq!(report.status, Status::Valid, "seed {seed}: {report:?}");
            let done = complete(&file, log, false).unwrap();
            assert_eq!((done.keep, done.append.len()), (file.len(), 0));
        }
        let state = |log: &TaskLog| log.view().state();
        assert!(
            a.view().is_sealed() && b.view().is_sealed(),
            "seed {seed}: {:?} {:?}",
            state(a),
            state(b)
        );
        if a.view().head() == b.view().head() {
            assert!(a.is_confirmed() && b.is_confirmed(), "seed {seed}: not confirmed");
            assert_eq!(a.entries().len(), b.entries().len());
            for (one, two) in a.entries().iter().zip(b.entries()) {
                assert_eq!(one.entry.signatures.len(), 2);
                assert_eq!(one.entry, two.entry, "seed {seed}");
            }
            assert!(a.evidence().is_empty() || self.diverged);
            assert_eq!(compare(&AuditLog::of(a), &AuditLog::of(b)).unwrap(), Comparison::Equal);
            state(a)
        } else {
            // Both ended alone, apart; both know it.
            assert!(self.diverged, "seed {seed}: apart without knowing");
            assert!(!a.evidence().is_empty() && !b.evidence().is_empty(), "seed {seed}");
            let said = compare(&AuditLog::of(a), &AuditLog::of(b)).unwrap();
            assert!(matches!(said, Comparison::Diverged { .. }), "seed {seed}: {said:?}");
            None
        }
    }
}

fn walk(seed: u64) -> Option<State> {
    let mut world = World::new(seed);
    if world.sides[0].log.is_none() {
        // It crashed before it had stored, so before it had sent.
        assert!(world.link.is_empty());
        return None;
    }
    let steps = 30 + world.dice.below(120);
    world.run(steps);
    world.heal();
    world.finish(seed)
}

/// COMMSD_ACP_SEEDS for more, COMMSD_ACP_SEED for one.
#[test]
fn two_gateways_over_a_bad_link() {
    if let Some(seed) = std::env::var("COMMSD_ACP_SEED").ok().and_then(|s| s.parse().ok()) {
        println!("seed {seed}: {:?}", walk(seed));
        return;
    }
    let seeds = std::env::var("COMMSD_ACP_SEEDS").ok().and_then(|s| s.parse().ok()).unwrap_or(1000);
    let next = std::sync::atomic::AtomicU64::new(0);
    let ends: std::sync::Mutex<BTreeMap<String, u64>> = std::sync::Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    if seed >= seeds {
                        return;
                    }
                    let end = std::panic::catch_unwind(|| walk(seed));
                    let Ok(end) = end else {
                        println!("failing seed: {seed}");
                        panic!("seed {seed}");
                    };
                    let name = end.map_or("diverged".to_owned(), |state| state.to_string());
                    *ends.lock().unwrap().entry(name).or_default() += 1;
                }
            });
        }
    });
    let ends = ends.into_inner().unwrap();
    println!("{ends:?}");
    // A walk that never gets anywhere would show nothing.
    for state in ["SETTLED", "CANCELLED", "EXPIRED", "FAILED", "DISPUTED"] {
        assert!(ends.contains_key(state), "no walk ended {state}: {ends:?}");
    }
}
