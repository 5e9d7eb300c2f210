//! Owners with each other, by envelopes, with what they store: whole tasks, gates, budgets, tools,
//! groups, and what a crash at any point leaves.

use std::collections::BTreeMap;

use commsd::acp::audit::{AuditLog, Status, verify, verify_journal};
use commsd::acp::code::Code;
use commsd::acp::forgotten::Row;
use commsd::acp::gateway::{Admission, Gateway, StoreSecret};
use commsd::acp::json::canonical;
use commsd::acp::log::{Effect, View};
use commsd::acp::objects::{Action as Verb, *};
use commsd::acp::owner::{
    Action, Given, Grant, Group, InviteTerms, KEEP_MS, MAX_REFUSED, Note, Noted, Order, Outcome,
    Owner, OwnerRecord, Profile, Question, Route, Stored, ToolRequest, ask_policy, choose_level,
};
use commsd::acp::run::{Ended, Job, Progress, Ran, RunFacts};
use commsd::acp::sign::{Role, Signature, Signed as _};
use commsd::acp::tool::ToolName;
use commsd::acp::value::*;
use commsd::acp::{sign, steps};
use commsd::codec::time::UnixMillis;
use commsd::identity::entropy::SeededEntropy;
use serde_json::{Value, json};

use crate::support::person;

mod tools;

const START: u64 = 1_796_083_200_000;

/// An owner with its disk.
struct Side {
    n: u8,
    owner: Owner,
    disk: Vec<Stored>,
    /// What is kept of forgotten tasks.
    rows: BTreeMap<Option<Digest>, Row>,
    keys: Vec<StoreSecret>,
    auto: Vec<Gate>,
    actions: Vec<Action>,
    notes: Vec<Note>,
}

impl Side {
    fn new(n: u8, auto: &[Gate]) -> Self {
        let mut side = Self {
            n,
            owner: Self::fresh(n, auto),
            disk: Vec::new(),
            rows: BTreeMap::new(),
            keys: Vec::new(),
            auto: auto.to_vec(),
            actions: Vec::new(),
            notes: Vec::new(),
        };
        side.owner.admit(Admission::Anyone);
        side
    }

    fn fresh(n: u8, auto: &[Gate]) -> Owner {
        let key = person(n).secret();
        let policy = ask_policy(key.did(), auto, &[], UnixMillis(START));
        let levels = vec![Isolation::Kernel, Isolation::Subprocess];
        let adapter = Word::parse("sandbox").unwrap();
        let levels_with_hosts = Vec::new();
        let profile =
            Profile { adapter, levels, levels_with_hosts, foreign_code: false, max_runs: 2 };
        Owner::new(key, None, policy, Some(profile))
    }
}

/// All of them, and the envelopes between them.
struct Town {
    sides: BTreeMap<Did, Side>,
    mail: Vec<(Did, Vec<u8>)>,
    entropy: SeededEntropy,
    now: u64,
}

use commsd::acp::did::Did;

impl Town {
    fn new(people: &[(u8, &[Gate])]) -> Self {
        let sides = people.iter().map(|(n, auto)| (did(*n), Side::new(*n, auto))).collect();
        Self { sides, mail: Vec::new(), entropy: SeededEntropy::new(11), now: START }
    }

    fn side(&mut self, n: u8) -> &mut Side {
        self.sides.get_mut(&did(n)).unwrap()
    }

    fn owner(&self, n: u8) -> &Owner {
        &self.sides[&did(n)].owner
    }

    fn emit(&mut self, n: u8, out: Outcome) {
        let side = self.side(n);
        side.keys.extend(out.secrets);
        // What is on disk is bytes.
        side.disk.extend(out.records.into_iter().map(|stored| {
            let bytes = serde_json::to_vec(&stored.record).unwrap();
            let record: OwnerRecord = serde_json::from_slice(&bytes).unwrap();
            assert_eq!(record, stored.record);
            Stored { task: stored.task, record }
        }));
        side.disk.retain(|stored| stored.task.is_none_or(|task| !out.forgotten.contains(&task)));
        side.rows.extend(out.rows.into_iter().map(|row| (row.0, row)));
        side.rows.retain(|_, row| row.1.is_some());
        side.actions.extend(out.actions);
        side.notes.extend(out.notes);
        for send in out.sends {
            self.mail.push((send.envelope.to, canonical(&send.envelope).unwrap()));
        }
    }

    /// Lets `n` do something.
    fn with<T>(
        &mut self,
        n: u8,
        act: impl FnOnce(&mut Owner, UnixMillis, &mut SeededEntropy) -> (T, Outcome),
    ) -> T {
        let now = UnixMillis(self.now);
        let side = self.sides.get_mut(&did(n)).unwrap();
        let (result, out) = act(&mut side.owner, now, &mut self.entropy);
        self.emit(n, out);
        result
    }

    /// Delivers everything, and runs what is to be run, until nothing is left.
    fn settle_down(&mut self, work: &mut dyn FnMut(u8, &Job) -> Option<Ended>) {
        loop {
            self.now += 20;
            if !self.mail.is_empty() {
                let (to, bytes) = self.mail.remove(0);
                let n = self.sides[&to].n;
                self.with(n, |owner, now, entropy| {
                    ((), owner.receive(&bytes, &Route::Local, now, entropy).unwrap())
                });
                continue;
            }
            let Some((n, task, job)) = self.next_run() else { return };
            if let Some(ended) = work(n, &job) {
                let ran = ran(&job, ended, self.now);
                self.with(n, |owner, now, entropy| {
                    ((), owner.run_ended(&task, ran, now, entropy).unwrap())
                });
            }
        }
    }

    fn next_run(&mut self) -> Option<(u8, Digest, Job)> {
        for side in self.sides.values_mut() {
            let at = side.actions.iter().position(|action| matches!(action, Action::Run { .. }));
            if let Some(at) = at
                && let Action::Run { task, job } = side.actions.remove(at)
            {
                return Some((side.n, task, *job));
            }
        }
        None
    }

    /// Everything in memory is gone.
    fn restart(&mut self, n: u8) {
        let now = UnixMillis(self.now);
        let side = self.side(n);
        side.owner = Side::fresh(n, &side.auto);
        side.owner.admit(Admission::Anyone);
        side.actions.clear();
        side.owner.restore(side.disk.clone(), side.keys.clone(), now).unwrap();
        side.owner.restore_forgotten(side.rows.values().copied().collect());
        self.with(n, |owner, now, entropy| ((), owner.resume(now, entropy).unwrap()));
    }

    fn poll(&mut self, n: u8) {
        self.with(n, |owner, now, entropy| ((), owner.poll(now, entropy).unwrap()));
    }

    fn order(&mut self, n: u8, order: Order) -> Digest {
        self.with(n, |owner, now, entropy| {
            let (task, _, out) = owner.order(order, now, entropy).unwrap();
            (task, out)
        })
    }

    fn view(&self, n: u8, task: &Digest) -> View {
        self.owner(n).task(task).unwrap().view().clone()
    }

    fn state(&self, n: u8, task: &Digest) -> State {
        self.view(n, task).state().unwrap()
    }

    /// Both logs are equal and verify.
    fn check(&self, people: [u8; 2], task: &Digest, status: Status) {
        let logs = people.map(|n| AuditLog::of(self.owner(n).task(task).unwrap()));
        assert_eq!(logs[0].entries, logs[1].entries);
        for log in logs {
            let report = verify(&log, None, UnixMillis(self.now));
            assert_eq!(report.status, status, "{report:?}");
        }
    }

    fn question(&self, n: u8) -> (String, Gate) {
        let mut questions = self.owner(n).questions();
        let question = questions.next().unwrap();
        assert!(questions.next().is_none());
        (question.id(), question.gate())
    }

    fn answer(&mut self, n: u8, decision: Decision) {
        let (id, _) = self.question(n);
        self.with(n, |owner, now, entropy| {
            let given = Given::Word(decision, "said so".into());
            ((), owner.answer(&id, given, now, entropy).unwrap())
        });
    }

    fn trouble(&self, n: u8) -> Vec<Code> {
        let codes = self.sides[&did(n)].notes.iter().filter_map(|note| match &note.what {
            Noted::Trouble { error, .. } => Some(error.code()),
            _ => None,
        });
        codes.collect()
    }
}

fn did(n: u8) -> Did {
    person(n).secret().did()
}

fn usage(tokens: Option<u64>) -> Usage {
    Usage {
        input_tokens: None,
        output_tokens: None,
        total_tokens: tokens.map(Count::clamped),
        tool_calls: None,
        wall_time_ms: Some(Count::clamped(5)),
        cpu_time_ms: None,
        output_bytes: None,
    }
}

fn ran(job: &Job, ended: Ended, now: u64) -> Ran {
    let kind = if ended == Ended::Cancelled { ExitKind::Cancelled } else { ExitKind::Exited };
    Ran {
        complaint: None,
        ended,
        usage: usage(Some(7)),
        source: UsageSource::Metered,
        model: None,
        started_at: UnixMillis(now - 10),
        ended_at: UnixMillis(now),
        run: RunFacts {
            effective: job.isolation,
            runtime: Runtime {
                name: Name::parse("node").unwrap(),
                version: Name::parse("22").unwrap(),
                image_digest: None,
            },
            limits: job.policy.clone(),
            exit: Exit { kind, code: Some(0), signal: None },
            stderr_digest: None,
            denials: Vec::new(),
        },
    }
}

pub fn order(worker: u8) -> Order {
    Order {
        worker: did(worker),
        worker_key: None,
        invite: None,
        route: Route::Local,
        title: Name::parse("a report").unwrap(),
        description: Prose::default(),
        input: json!({ "n": 1 }),
        input_schema: SchemaText(json!(true)),
        output_schema: SchemaText(json!({ "type": "object", "required": ["n"] })),
        deadline: UnixMillis(START + 3_600_000),
        verify_within_ms: 600_000,
        verification: Verification {
            method: VerificationMethod::Schema,
            checks: Seq::default(),
            mode: VerificationMode::All,
        },
        budget: steps::unlimited(),
        sandbox: steps::sandbox(Isolation::Subprocess),
        attested: true,
        max_revisions: 0,
        grants: Vec::new(),
        redelegation: 0,
        parent: None,
        auto_approve: true,
        group: None,
        labels: Labels::default(),
    }
}

fn bobs_terms(max_uses: u64) -> InviteTerms {
    InviteTerms {
        name: Name::parse("Bob").unwrap(),
        relay_urls: vec![UrlText::parse("http://127.0.0.1:8787").unwrap()],
        encryption_key: None,
        skills: Vec::new(),
        max_uses,
        life_ms: 3_600_000,
    }
}

const ACCEPT: &[Gate] = &[Gate::ContractAcceptance];

fn echo(_: u8, job: &Job) -> Option<Ended> {
    Some(Ended::Output(job.input.clone()))
}

#[test]
fn a_task_settles_without_a_person_where_policies_say_so() {
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT)]);
    let task = town.order(1, order(2));
    town.settle_down(&mut echo);
    assert_eq!(town.state(1, &task), State::Settled);
    town.check([1, 2], &task, Status::Valid);
    let view = town.view(1, &task);
    assert_eq!(view.deliverable().unwrap().object.output, json!({ "n": 1 }));
    assert_eq!(view.attestation().unwrap().object.effective_isolation, Isolation::Subprocess);
    assert_eq!(view.usage().unwrap().object.usage.total_tokens, Some(Count::clamped(7)));
    assert_eq!((town.trouble(1), town.trouble(2)), (vec![], vec![]));
    assert_eq!(town.owner(1).questions().count() + town.owner(2).questions().count(), 0);
}

#[test]
fn an_offer_that_nobody_answered_is_known_to_be_taken_back() {
    for (gates, end) in [(ACCEPT, State::Cancelled), (&[][..], State::Withdrawn)] {
        let mut town = Town::new(&[(1, &[]), (2, gates)]);
        let task = town.order(1, order(2));
        town.mail.clear();
        assert!(!town.owner(1).task(&task).unwrap().is_taken_back());
        town.with(1, |owner, now, entropy| ((), owner.cancel(&task, "", now, entropy).unwrap()));
        assert!(town.owner(1).task(&task).unwrap().is_taken_back());
        // The worker was away, and hears of it when it is sent again. What was sealed before its key for
        // the task was known is refused, and sent once more.
        town.mail.clear();
        for _ in 0..4 {
            town.now += 20_000;
            town.poll(1);
            town.poll(2);
            while let Some((to, bytes)) = town.mail.pop() {
                let n = town.sides[&to].n;
                town.with(n, |owner, now, entropy| {
                    ((), owner.receive(&bytes, &Route::Local, now, entropy).unwrap_or_default())
                });
            }
        }
        assert!(!town.owner(1).task(&task).unwrap().is_taken_back());
        assert_eq!(town.state(1, &task), end, "{:?}", town.trouble(1));
    }
}

#[test]
fn a_worker_that_signs_two_things_at_one_place_stops_its_task() {
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT)]);
    let task = town.order(1, Order { auto_approve: false, ..order(2) });
    let mut job = None;
    town.settle_down(&mut |_, started| {
        job = Some(started.clone());
        None
    });
    let (disk, keys) = (town.side(2).disk.clone(), town.side(2).keys.clone());
    let ran = ran(&job.unwrap(), Ended::Output(json!({ "n": 1 })), town.now);
    town.with(2, |owner, now, entropy| ((), owner.run_ended(&task, ran, now, entropy).unwrap()));
    town.settle_down(&mut |_, _| None);
    assert_eq!(town.question(1).1, Gate::FinalAcceptance);
    // It puts its store back, and says at the same place that it has failed.
    (town.side(2).disk, town.side(2).keys) = (disk, keys);
    town.restart(2);
    town.settle_down(&mut |_, _| None);
    assert_eq!(town.trouble(1), [Code::AuditFork]);
    let log = town.owner(1).task(&task).unwrap();
    assert!(log.is_forked() && log.is_over() && !log.view().is_sealed());
    assert_eq!(town.owner(1).questions().count(), 0, "there is nothing to be decided any more");
    let refused = town.with(1, |owner, now, entropy| {
        (owner.cancel(&task, "", now, entropy).map(drop), Outcome::default())
    });
    assert_eq!(refused.unwrap_err().code(), Code::AuditFork);
    // Kept as the proof that it is, and not for ever.
    town.now += KEEP_MS - 3_600_000;
    town.poll(1);
    assert!(town.owner(1).task(&task).is_some());
    town.now += 2 * 3_600_000;
    town.poll(1);
    assert!(town.owner(1).task(&task).is_none());
}

#[test]
fn proposals_that_were_signed_twice_take_no_place_of_others() {
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT), (3, &[])]);
    // More than the worker has places for runs.
    for _ in 0..3 {
        let before = (town.entropy.clone(), town.now, town.side(1).disk.clone());
        let mut started = None;
        let task = town.order(1, order(2));
        town.settle_down(&mut |_, job| {
            started = Some(job.clone());
            None
        });
        // The same task again, with something else in it.
        let (entropy, now, disk) = before;
        (town.now, town.side(1).disk) = (now, disk);
        town.restart(1);
        (town.entropy, town.mail) = (entropy, Vec::new());
        let again = town.order(1, Order { input: json!({ "n": 2 }), ..order(2) });
        assert_eq!(again, task);
        // Sent again it is another envelope.
        town.mail.clear();
        town.entropy = SeededEntropy::new(town.now);
        town.now += 60_000;
        town.poll(1);
        town.settle_down(&mut |_, _| None);
        assert!(town.owner(2).task(&task).unwrap().is_forked());
        // The run is stopped, and its place is free.
        let stop = town.side(2).actions.iter().any(|a| matches!(a, Action::Stop { .. }));
        assert!(stop);
        town.side(2).actions.clear();
        let ran = ran(&started.unwrap(), Ended::Cancelled, town.now);
        town.with(2, |owner, now, entropy| {
            ((), owner.run_ended(&task, ran, now, entropy).unwrap())
        });
    }
    let honest = town.order(3, order(2));
    town.settle_down(&mut echo);
    assert_eq!(town.state(3, &honest), State::Settled);
}

#[test]
fn a_quorum_does_not_wait_for_a_worker_that_was_stopped() {
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT), (3, ACCEPT)]);
    let group = Group { id: "g".into(), workers: 2, quorum: Some(2) };
    let of_group = |worker| Order { group: Some(group.clone()), ..order(worker) };
    let tasks = [town.order(1, of_group(2)), town.order(1, of_group(3))];
    let mut jobs = Vec::new();
    town.settle_down(&mut |n, job| {
        jobs.push((n, job.clone()));
        None
    });
    let (disk, keys) = (town.side(2).disk.clone(), town.side(2).keys.clone());
    let (_, job) = jobs.iter().find(|(n, _)| *n == 2).unwrap();
    let ran = ran(job, Ended::Output(json!({ "n": 1 })), town.now);
    town.with(2, |owner, now, entropy| {
        ((), owner.run_ended(&tasks[0], ran, now, entropy).unwrap())
    });
    town.settle_down(&mut |_, _| None);
    assert!(town.owner(1).group_outcome(&group).is_none());
    (town.side(2).disk, town.side(2).keys) = (disk, keys);
    town.restart(2);
    town.settle_down(&mut |_, _| None);
    assert!(town.owner(1).task(&tasks[0]).unwrap().is_forked());
    assert!(town.owner(1).group_outcome(&group).is_some(), "two can no more agree");
}

#[test]
fn every_gate_asks_its_owner_and_a_no_ends_the_task() {
    let mut town = Town::new(&[(1, &[]), (2, &[])]);
    let asked = || Order { auto_approve: false, ..order(2) };
    let task = town.order(1, asked());
    town.settle_down(&mut echo);
    assert_eq!(town.question(2).1, Gate::ContractAcceptance);
    // The question is the same after a restart.
    let before = town.question(2).0;
    town.restart(2);
    town.settle_down(&mut echo);
    assert_eq!(town.question(2).0, before);
    town.answer(2, Decision::Approved);
    town.settle_down(&mut echo);
    assert_eq!(town.question(1).1, Gate::FinalAcceptance);
    assert_eq!(town.state(1, &task), State::Verified);
    town.answer(1, Decision::Approved);
    town.settle_down(&mut echo);
    assert_eq!(town.state(2, &task), State::Settled);
    town.check([1, 2], &task, Status::Valid);

    let task = town.order(1, asked());
    town.settle_down(&mut echo);
    town.answer(2, Decision::Denied);
    town.settle_down(&mut echo);
    assert_eq!(town.state(1, &task), State::Rejected);
    town.check([1, 2], &task, Status::Valid);

    let task = town.order(1, asked());
    town.settle_down(&mut echo);
    town.answer(2, Decision::Approved);
    town.settle_down(&mut echo);
    town.answer(1, Decision::Denied);
    town.settle_down(&mut echo);
    assert_eq!(town.state(2, &task), State::Disputed);
    town.check([1, 2], &task, Status::Valid);
}

#[test]
fn nobody_answers_in_ten_minutes_and_that_is_a_no() {
    let mut town = Town::new(&[(1, &[]), (2, &[])]);
    let task = town.order(1, order(2));
    town.settle_down(&mut echo);
    town.now = START + 599_000;
    town.poll(2);
    town.settle_down(&mut echo);
    assert_eq!(town.state(1, &task), State::Proposed);
    assert!(town.owner(2).next_poll().unwrap().0 <= START + 601_000);
    town.now = START + 601_000;
    town.poll(2);
    town.settle_down(&mut echo);
    assert_eq!(town.state(1, &task), State::Rejected);
}

#[test]
fn a_receipt_signed_elsewhere_counts_for_its_action_only() {
    let mut town = Town::new(&[(1, &[]), (2, &[])]);
    let task = town.order(1, order(2));
    town.settle_down(&mut echo);
    let receipt = |view: &View, signer: u8, target: &Target| {
        let key = person(signer).secret();
        let mut entropy = SeededEntropy::new(77);
        let mut cx = commsd::acp::log::Cx {
            key: &key,
            now: UnixMillis(START + 1000),
            entropy: &mut entropy,
        };
        steps::approval(&mut cx, view.task_id(), target, Decision::Approved, None, "").unwrap()
    };
    let view = town.view(2, &task);
    let other = Target::ContractAcceptance { contract_digest: Digest::of(&1).unwrap() };
    let target = steps::acceptance_target(&view).unwrap();
    let cases = [
        (receipt(&view, 3, &target), Some(Code::WrongSigner)),
        (receipt(&view, 2, &other), Some(Code::ApprovalMismatch)),
        (receipt(&view, 2, &target), None),
    ];
    for (receipt, code) in cases {
        let (id, _) = town.question(2);
        let before = town.trouble(2).len();
        town.with(2, |owner, now, entropy| {
            let given = Given::Receipt(Box::new(receipt));
            ((), owner.answer(&id, given, now, entropy).unwrap())
        });
        assert_eq!(town.trouble(2).get(before).copied(), code);
        if code.is_some() {
            // The question stands; it is put again.
            assert_eq!(town.state(2, &task), State::Proposed);
            town.poll(2);
        }
    }
    town.settle_down(&mut echo);
    assert_eq!(town.state(1, &task), State::Settled);
}

#[test]
fn what_a_worker_cannot_do_is_refused_before_anybody_is_asked() {
    let mut town = Town::new(&[(1, &[]), (2, &[])]);
    let mut strict = order(2);
    strict.sandbox = steps::sandbox(Isolation::Oci);
    let task = town.order(1, strict);
    town.settle_down(&mut echo);
    assert_eq!(town.state(1, &task), State::Rejected);
    let entry = town.owner(1).task(&task).unwrap().entries().last().unwrap().clone();
    let notice = town.owner(1).task(&task).unwrap().object(&entry.payload[0]).unwrap().clone();
    assert_eq!(notice["code"], "ISOLATION_UNAVAILABLE");
    assert_eq!(town.owner(2).questions().count(), 0);
}

#[test]
fn levels_are_chosen_as_the_manifest_allows() {
    use Isolation as I;
    let policy = |isolation, fallback| SandboxPolicy {
        allow_subprocess_fallback: fallback,
        ..steps::sandbox(isolation)
    };
    let profile = |levels: &[I], foreign_code| Profile {
        adapter: Word::parse("x").unwrap(),
        levels: levels.to_vec(),
        levels_with_hosts: vec![I::Kernel],
        foreign_code,
        max_runs: 1,
    };
    let choose = |levels: &[I], asked, fallback, required| {
        let profile = profile(levels, false);
        choose_level(&profile, &policy(asked, fallback), required).map_err(|e| e.code())
    };
    let here = [I::Kernel, I::Subprocess];
    assert_eq!(choose(&here, I::Kernel, false, true), Ok(I::Kernel));
    assert_eq!(choose(&here, I::Subprocess, false, true), Ok(I::Subprocess));
    assert_eq!(choose(&[I::Kernel], I::Subprocess, false, true), Ok(I::Kernel));
    assert_eq!(choose(&here, I::Oci, false, true), Err(Code::IsolationUnavailable));
    assert_eq!(choose(&here, I::Oci, true, true), Ok(I::Kernel));
    assert_eq!(choose(&here, I::Oci, false, false), Ok(I::Kernel));
    assert_eq!(choose(&[I::None], I::Oci, true, false), Err(Code::IsolationUnavailable));
    assert_eq!(choose(&[I::None], I::None, false, true), Ok(I::None));
    assert_eq!(choose(&[], I::None, true, false), Err(Code::IsolationUnavailable));
    // Listed hosts are reached at the levels that have a way to them, and never without one.
    let open = |asked, fallback| {
        let open = SandboxPolicy { network: Network::Allowlist, ..policy(asked, fallback) };
        choose_level(&profile(&here, false), &open, false).map_err(|e| e.code())
    };
    assert_eq!(open(I::Subprocess, false), Ok(I::Kernel));
    let shut = Profile { levels_with_hosts: Vec::new(), ..profile(&here, false) };
    let wanted = SandboxPolicy { network: Network::Allowlist, ..policy(I::Subprocess, true) };
    assert_eq!(
        choose_level(&shut, &wanted, false).map_err(|e| e.code()),
        Err(Code::IsolationUnavailable)
    );
    // The requester's own code.
    let foreign = |levels: &[I], asked, fallback| {
        let profile = profile(levels, true);
        choose_level(&profile, &policy(asked, fallback), false).map_err(|e| e.code())
    };
    assert_eq!(foreign(&here, I::None, false), Ok(I::Kernel));
    assert_eq!(foreign(&here, I::None, true), Ok(I::Subprocess));
    assert_eq!(foreign(&[I::Subprocess], I::None, false), Err(Code::IsolationUnavailable));
    assert_eq!(foreign(&[I::None], I::None, true), Err(Code::IsolationUnavailable));
}

#[test]
fn invites_admit_are_counted_and_can_be_taken_back() {
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT)]);
    town.side(2).owner.admit(Admission::Invited);
    let invite =
        town.with(2, |owner, now, entropy| owner.invite(bobs_terms(1), now, entropy).unwrap());
    let task = town.order(1, order(2));
    town.settle_down(&mut echo);
    assert_eq!(town.view(1, &task).state(), None, "a stranger gets no answer");
    assert!(town.owner(2).task(&task).is_none());
    let by = |invite: &Invite| Order { invite: Some(invite.invite_id.clone()), ..order(2) };
    let task = town.order(1, by(&invite));
    town.settle_down(&mut echo);
    assert_eq!(town.state(1, &task), State::Settled);
    town.restart(2);
    town.side(2).owner.admit(Admission::Anyone);
    let task = town.order(1, by(&invite));
    town.settle_down(&mut echo);
    assert_eq!(town.state(1, &task), State::Rejected, "used as often as it may be");

    let task = town.with(2, |owner, now, entropy| {
        let kind = RevocationTarget::Invite;
        let id = invite.invite_id.to_string();
        owner.revoke(kind, &id, "", now, entropy).unwrap()
    });
    assert_eq!(task.target_id.to_string(), invite.invite_id.to_string());
    assert!(matches!(town.side(2).actions.last(), Some(Action::Publish(_))));
    town.restart(2);
    let task = town.order(1, by(&invite));
    town.settle_down(&mut echo);
    let log = town.owner(1).task(&task).unwrap();
    let notice = log.object(&log.entries().last().unwrap().payload[0]).unwrap();
    assert_eq!(notice["code"], "INVITE_REVOKED");
}

#[test]
fn a_schema_that_asks_for_more_steps_than_there_is_time_is_refused() {
    let mut defs = serde_json::Map::new();
    for n in 0..40 {
        let next = json!({ "$ref": format!("#/$defs/d{}", n + 1) });
        defs.insert(format!("d{n}"), json!({ "allOf": [next, next] }));
    }
    defs.insert("d40".into(), json!({ "type": "object" }));
    let doubling = json!({ "$defs": defs, "$ref": "#/$defs/d0" });
    let list = json!({ "type": "array", "items": { "$ref": "#/$defs/n" } });
    let growing = json!({ "$defs": { "n": { "anyOf": [list, list, list, list, list] } },
        "$ref": "#/$defs/n" });
    let deep = (0..9).fold(json!(1), |inner, _| json!([inner]));
    // The same rule refuses to order such work and to take it.
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT)]);
    for (schema, input) in [(doubling, json!({ "x": 1 })), (growing, deep)] {
        let now = UnixMillis(town.now);
        let Town { sides, entropy, .. } = &mut town;
        let alice = &mut sides.get_mut(&did(1)).unwrap().owner;
        let order =
            Order { input: input.clone(), input_schema: SchemaText(schema.clone()), ..order(2) };
        assert_eq!(alice.order(order, now, entropy).unwrap_err().code(), Code::InputInvalid);
    }
}

#[test]
fn what_was_accepted_runs_after_a_crash_although_its_invite_is_used_up() {
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT)]);
    let invite =
        town.with(2, |owner, now, entropy| owner.invite(bobs_terms(3), now, entropy).unwrap());
    // Two places, three tasks: the third waits for one.
    let by = || Order { invite: Some(invite.invite_id.clone()), ..order(2) };
    let tasks: Vec<Digest> = (0..3).map(|_| town.order(1, by())).collect();
    town.settle_down(&mut |_, _| None);
    let accepted: Vec<&Digest> =
        tasks.iter().filter(|task| town.state(2, task) == State::Accepted).collect();
    let [waiting] = accepted[..] else { panic!("{accepted:?}") };
    let waiting = *waiting;
    town.restart(2);
    town.settle_down(&mut echo);
    assert_eq!(town.state(1, &waiting), State::Settled);
    assert_eq!(tasks.iter().filter(|task| town.state(1, task) == State::Failed).count(), 2);
}

/// A task whose work has begun and goes on.
fn working(town: &mut Town, change: impl FnOnce(&mut Order)) -> (Digest, Job) {
    let mut wanted = order(2);
    change(&mut wanted);
    let task = town.order(1, wanted);
    let mut job = None;
    town.settle_down(&mut |_, begun| {
        job = Some(begun.clone());
        None
    });
    assert_eq!(town.state(1, &task), State::InProgress);
    (task, job.unwrap())
}

fn end(town: &mut Town, task: &Digest, job: &Job, ended: Ended) {
    let ran = ran(job, ended, town.now);
    town.with(2, |owner, now, entropy| ((), owner.run_ended(task, ran, now, entropy).unwrap()));
    town.settle_down(&mut echo);
}

#[test]
fn cancelled_is_written_after_the_run_is_gone() {
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT)]);
    let (task, job) = working(&mut town, |_| {});
    town.with(1, |owner, now, entropy| {
        ((), owner.cancel(&task, "changed my mind", now, entropy).unwrap())
    });
    town.settle_down(&mut echo);
    assert_eq!(town.state(2, &task), State::Cancelling);
    let stops = |town: &mut Town| {
        let stop = |action: &&Action| matches!(action, Action::Stop { .. });
        town.side(2).actions.iter().filter(stop).count()
    };
    assert_eq!(stops(&mut town), 1);
    town.poll(2);
    assert_eq!(stops(&mut town), 1, "told once");
    end(&mut town, &task, &job, Ended::Cancelled);
    assert_eq!(town.state(1, &task), State::Cancelled);
    town.check([1, 2], &task, Status::Valid);
    // An offer is taken back, not cancelled.
    let mut town = Town::new(&[(1, &[]), (2, &[])]);
    let task = town.order(1, order(2));
    town.settle_down(&mut echo);
    town.with(1, |owner, now, entropy| ((), owner.cancel(&task, "", now, entropy).unwrap()));
    town.settle_down(&mut echo);
    assert_eq!(town.state(2, &task), State::Withdrawn);
    assert_eq!(town.owner(2).questions().count(), 0, "nobody is asked about it any more");
}

#[test]
fn a_run_of_a_program_that_died_is_a_failure() {
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT)]);
    let (task, _) = working(&mut town, |_| {});
    town.restart(2);
    town.settle_down(&mut |_, _| panic!("the work was run again"));
    assert_eq!(town.state(1, &task), State::Failed);
    town.check([1, 2], &task, Status::Valid);
}

#[test]
fn progress_is_told_once_a_second_and_the_newest_counts() {
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT)]);
    let (task, job) = working(&mut town, |_| {});
    let tell = |town: &mut Town, percent| {
        let metrics = Metrics {
            input_tokens: None,
            output_tokens: None,
            total_tokens: Some(Count::clamped(u64::from(percent))),
            tool_calls: None,
        };
        let progress = Progress {
            percent: Some(percent),
            step: "s".into(),
            message: "m\u{7}".into(),
            metrics,
        };
        town.with(2, |owner, now, entropy| {
            ((), owner.run_progress(&task, progress, now, entropy).unwrap())
        });
        town.settle_down(&mut echo);
    };
    for percent in [10, 20, 30] {
        tell(&mut town, percent);
    }
    let shown = |town: &Town| town.view(1, &task).last_progress().unwrap().percent;
    assert_eq!(shown(&town).map(|p| p.get()), Some(10));
    let due = town.owner(2).next_poll().unwrap();
    assert!(due.0 > town.now && due.0 <= town.now + 1000);
    town.now = due.0;
    town.poll(2);
    town.settle_down(&mut echo);
    assert_eq!(shown(&town).map(|p| p.get()), Some(30));
    end(&mut town, &task, &job, Ended::Output(json!({ "n": 2 })));
    assert_eq!(town.state(1, &task), State::Settled);
    town.check([1, 2], &task, Status::Valid);
}

fn spend(town: &mut Town, task: &Digest, tokens: u64) {
    let metrics = Metrics {
        input_tokens: None,
        output_tokens: None,
        total_tokens: Some(Count::clamped(tokens)),
        tool_calls: None,
    };
    let progress = Progress { percent: None, step: String::new(), message: String::new(), metrics };
    town.now += 1500;
    town.with(2, |owner, now, entropy| {
        ((), owner.run_progress(task, progress, now, entropy).unwrap())
    });
    town.settle_down(&mut echo);
}

#[test]
fn a_budget_is_raised_by_both_owners_or_the_work_fails() {
    let limited = |order: &mut Order| order.budget.max_total_tokens = Some(Count::clamped(100));
    let holds = |town: &mut Town| {
        let held = town.side(2).actions.iter().filter_map(|action| match action {
            Action::Hold { held, .. } => Some(*held),
            _ => None,
        });
        held.collect::<Vec<_>>()
    };
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT)]);
    let (task, job) = working(&mut town, limited);
    spend(&mut town, &task, 90);
    assert!(holds(&mut town).is_empty());
    spend(&mut town, &task, 100);
    assert_eq!(holds(&mut town), [true]);
    // The worker's own question first: what it has not approved, nobody needs to be asked about.
    assert_eq!(town.question(2).1, Gate::BudgetOverrun);
    town.answer(2, Decision::Approved);
    town.settle_down(&mut echo);
    // The metric has reached the requester as well.
    town.now += 1500;
    town.poll(2);
    town.settle_down(&mut echo);
    assert_eq!(town.question(1).1, Gate::BudgetOverrun);
    assert_eq!(holds(&mut town), [true]);
    town.answer(1, Decision::Approved);
    town.settle_down(&mut echo);
    assert_eq!(holds(&mut town), [true, false]);
    end(&mut town, &task, &job, Ended::Output(json!({ "n": 2 })));
    assert_eq!(town.state(1, &task), State::Settled);
    town.check([1, 2], &task, Status::Valid);

    let mut town = Town::new(&[(1, &[]), (2, ACCEPT)]);
    let (task, job) = working(&mut town, limited);
    spend(&mut town, &task, 120);
    town.answer(2, Decision::Denied);
    assert!(matches!(town.side(2).actions.last(), Some(Action::Stop { .. })));
    end(&mut town, &task, &job, Ended::Cancelled);
    assert_eq!(town.state(1, &task), State::Failed);
    let log = town.owner(1).task(&task).unwrap();
    let notice = log.object(&log.entries().last().unwrap().payload[0]).unwrap();
    assert_eq!(notice["code"], "BUDGET_EXCEEDED");
}

fn gates(town: &Town, n: u8) -> BTreeMap<&'static str, usize> {
    let mut gates = BTreeMap::new();
    for question in town.owner(n).questions() {
        *gates.entry(question.gate().as_str()).or_default() += 1;
    }
    gates
}

/// Says yes to every question at this gate.
fn approve(town: &mut Town, n: u8, gate: Gate) {
    let asked = town.owner(n).questions().filter(|question| question.gate() == gate);
    for id in asked.map(Question::id).collect::<Vec<_>>() {
        town.with(n, |owner, now, entropy| {
            let yes = Given::Word(Decision::Approved, String::new());
            ((), owner.answer(&id, yes, now, entropy).unwrap())
        });
    }
}

#[test]
fn more_work_than_places_waits_for_one() {
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT)]);
    let tasks: Vec<Digest> = (0..5).map(|_| town.order(1, order(2))).collect();
    let mut running = Vec::new();
    town.settle_down(&mut |_, job| {
        running.push(job.clone());
        None
    });
    assert_eq!((running.len(), town.owner(2).running()), (2, 2));
    let job = running[0].clone();
    let first = tasks.iter().find(|task| *town.view(2, task).task_id() == job.task_id).unwrap();
    end(&mut town, first, &job, Ended::Output(json!({ "n": 2 })));
    // Each place that becomes free is taken; `end` runs them all.
    let settled = tasks.iter().filter(|task| town.state(1, task) == State::Settled).count();
    assert_eq!(settled, 4);
}

#[test]
fn the_first_of_a_race_is_taken_and_a_quorum_agrees() {
    let start = |town: &mut Town, quorum| {
        let group = Group { id: "multi_1".into(), workers: 3, quorum };
        let grouped = |n| Order { group: Some(group.clone()), ..order(n) };
        ([2, 3, 4].map(|n| town.order(1, grouped(n))), group)
    };
    let people: &[(u8, &[Gate])] = &[(1, &[]), (2, ACCEPT), (3, ACCEPT), (4, ACCEPT)];

    let mut town = Town::new(people);
    let (tasks, group) = start(&mut town, None);
    town.settle_down(&mut |n, job| (n == 3).then(|| Ended::Output(job.input.clone())));
    assert_eq!(town.state(1, &tasks[1]), State::Settled);
    for (n, task) in [(2, tasks[0]), (4, tasks[2])] {
        assert_eq!(town.state(1, &task), State::Cancelling);
        let stop = |action: &Action| matches!(action, Action::Stop { .. });
        assert!(town.side(n).actions.iter().any(stop));
    }
    let won = town.owner(1).group_outcome(&group);
    town.restart(1);
    town.settle_down(&mut |_, _| None);
    assert_eq!(town.owner(1).group_outcome(&group), won);

    let mut town = Town::new(people);
    let (tasks, _) = start(&mut town, Some(2));
    town.settle_down(&mut |n, _| {
        Some(Ended::Output(if n == 2 { json!({ "n": 5 }) } else { json!({ "n": 6.0 }) }))
    });
    let states = tasks.map(|task| town.state(1, &task));
    assert_eq!(states, [State::Superseded, State::Settled, State::Settled]);

    let mut town = Town::new(people);
    let (tasks, group) = start(&mut town, Some(3));
    town.settle_down(&mut |n, _| Some(Ended::Output(json!({ "n": n }))));
    let code = town.owner(1).group_outcome(&group).unwrap().code();
    assert_eq!(code, Some(Code::QuorumNotReached));
    // Two that differ decide it; the third may have been stopped before it was done.
    let over = [State::Superseded, State::Cancelled];
    assert!(tasks.iter().all(|task| over.contains(&town.state(1, task))));
}

#[test]
fn a_result_that_fails_its_checks_goes_back_once_and_is_then_disputed() {
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT)]);
    let task = town.order(1, Order { max_revisions: 1, ..order(2) });
    let mut runs = 0;
    town.settle_down(&mut |_, _| {
        runs += 1;
        Some(Ended::Output(json!({ "wrong": true })))
    });
    assert_eq!((runs, town.state(2, &task)), (2, State::Disputed));
    town.check([1, 2], &task, Status::Valid);
    let task = town.order(1, Order { max_revisions: 1, ..order(2) });
    let mut runs = 0;
    town.settle_down(&mut |_, job| {
        runs += 1;
        Some(Ended::Output(if runs == 1 { json!([]) } else { job.input.clone() }))
    });
    assert_eq!((runs, town.state(2, &task)), (2, State::Settled));
}

#[test]
fn a_crash_anywhere_leaves_a_task_that_ends() {
    // Both programs die after so many deliveries; the work itself is lost only while it runs.
    for after in 0..14 {
        for who in [1, 2] {
            let mut town = Town::new(&[(1, &[]), (2, ACCEPT)]);
            let task = town.order(1, order(2));
            for _ in 0..after {
                town.now += 20;
                if town.mail.is_empty() {
                    let Some((n, task, job)) = town.next_run() else { break };
                    let ran = ran(&job, Ended::Output(job.input.clone()), town.now);
                    town.with(n, |owner, now, entropy| {
                        ((), owner.run_ended(&task, ran, now, entropy).unwrap())
                    });
                    continue;
                }
                let (to, bytes) = town.mail.remove(0);
                let n = town.sides[&to].n;
                town.with(n, |owner, now, entropy| {
                    ((), owner.receive(&bytes, &Route::Local, now, entropy).unwrap())
                });
            }
            town.mail.clear();
            town.restart(who);
            for _ in 0..40 {
                town.settle_down(&mut echo);
                town.now += 1000;
                town.poll(1);
                town.poll(2);
            }
            let state = town.state(1, &task);
            let ended = matches!(state, State::Settled | State::Failed);
            assert!(ended, "after {after}, {who}: {state:?}");
            town.check([1, 2], &task, Status::Valid);
        }
    }
}

/// What the owner with this disk sends when it starts again: its proposals, in new envelopes.
fn proposed_again(town: &mut Town, disk: &[Stored], keys: &[StoreSecret]) -> Vec<Vec<u8>> {
    let mut old = Side::fresh(1, &[]);
    let now = UnixMillis(town.now);
    old.restore(disk.to_vec(), keys.to_vec(), now).unwrap();
    let out = old.resume(now, &mut town.entropy).unwrap();
    out.sends.iter().map(|send| canonical(&send.envelope).unwrap()).collect()
}

/// Hands envelopes to the worker, who does nothing with them.
fn nothing_comes_of(town: &mut Town, envelopes: Vec<Vec<u8>>) {
    assert!(!envelopes.is_empty());
    for bytes in envelopes {
        let now = UnixMillis(town.now);
        let Town { sides, entropy, .. } = town;
        let bob = &mut sides.get_mut(&did(2)).unwrap().owner;
        let out = bob.receive(&bytes, &Route::Local, now, entropy).unwrap();
        assert!(out.is_empty(), "{out:?}");
    }
}

#[test]
fn refused_proposals_are_forgotten_and_none_is_taken_again() {
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT)]);
    let mut first = None;
    for n in 0..MAX_REFUSED + 80 {
        let mut strict = order(2);
        strict.sandbox = steps::sandbox(Isolation::Oci);
        let task = town.order(1, strict);
        let alice = town.side(1);
        first.get_or_insert_with(|| (task, alice.disk.clone(), alice.keys.clone()));
        town.settle_down(&mut echo);
        assert_eq!(town.state(2, &task), State::Rejected, "{n}");
        if n % 20 == 0 {
            town.poll(2);
        }
    }
    town.poll(2);
    let kept = town.owner(2).gateway().tasks().count();
    assert!((MAX_REFUSED..MAX_REFUSED + 80).contains(&kept), "{kept}");
    // What is on disk is of these tasks, and of no others.
    let stored: std::collections::BTreeSet<Digest> =
        town.side(2).disk.iter().filter_map(|stored| stored.task).collect();
    assert_eq!(stored.len(), kept);
    assert_eq!(town.side(2).rows.len(), MAX_REFUSED + 80 - kept);
    let (task, disk, keys) = first.unwrap();
    assert!(town.owner(2).task(&task).is_none() && town.owner(1).task(&task).is_some());
    for restarted in [false, true] {
        if restarted {
            town.restart(2);
            town.mail.clear();
        }
        let again = proposed_again(&mut town, &disk, &keys);
        nothing_comes_of(&mut town, again);
    }
    // When their offers are over for everybody, nothing is left of them; what was kept goes, too.
    let again = proposed_again(&mut town, &disk, &keys);
    town.now += 3_700_000;
    town.poll(2);
    assert_eq!((town.side(2).rows.len(), town.owner(2).gateway().tasks().count()), (0, 0));
    nothing_comes_of(&mut town, again);
}

#[test]
fn what_has_ended_is_forgotten_after_a_month_on_both_sides() {
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT)]);
    let task = town.order(1, order(2));
    let (disk, keys) = (town.side(1).disk.clone(), town.side(1).keys.clone());
    town.settle_down(&mut echo);
    assert_eq!(town.state(2, &task), State::Settled);
    // A task that is not over stays, however old it is.
    let mut long = order(2);
    long.deadline = UnixMillis(START + 3 * KEEP_MS);
    long.auto_approve = false;
    long.verify_within_ms = 3 * KEEP_MS;
    let open = town.order(1, long);
    town.settle_down(&mut echo);
    assert_eq!(town.state(1, &open), State::Verified);
    town.now += KEEP_MS - 60_000;
    for n in [1, 2] {
        town.poll(n);
        assert!(town.owner(n).task(&task).is_some());
    }
    town.now += 600_000;
    for n in [1, 2] {
        town.poll(n);
        assert!(town.owner(n).task(&task).is_none(), "{n}");
        assert!(town.owner(n).task(&open).is_some(), "{n}");
        assert!(town.side(n).disk.iter().all(|stored| stored.task != Some(task)), "{n}");
        assert!(town.side(n).rows.is_empty(), "{n}: its offer is over");
    }
    let again = proposed_again(&mut town, &disk, &keys);
    nothing_comes_of(&mut town, again);
    town.restart(2);
    assert!(town.owner(2).task(&task).is_none());
    assert_eq!(town.owner(2).running(), 0);
}

type Change<'a> = &'a dyn Fn(&mut Order);

/// A part of `parent`, handed on to the third.
fn part(parent: Digest) -> Order {
    Order { parent: Some(parent), ..order(3) }
}

fn hand_on(town: &mut Town, part: Order) -> Result<Digest, (Code, String)> {
    let now = UnixMillis(town.now);
    let Town { sides, entropy, .. } = town;
    let bob = &mut sides.get_mut(&did(2)).unwrap().owner;
    let done = bob.hand_on(part, now, entropy);
    let (child, out) = done.map_err(|error| (error.code(), error.path().to_owned()))?;
    town.emit(2, out);
    Ok(child)
}

#[test]
fn a_worker_hands_a_part_on_within_its_bounds_and_once_its_owner_has_agreed() {
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT), (3, ACCEPT)]);
    let capability = |name: &str| ToolName::parse(name).unwrap().capability().unwrap();
    let grant = |name: &str, max_uses| Grant {
        capabilities: vec![capability(name)],
        max_uses,
        max_depth: 0,
    };
    let (parent, job) = working(&mut town, |order| {
        order.redelegation = 1;
        order.grants = vec![grant("mcp:docs/**:read", 4)];
        order.budget.max_tool_calls = Some(Count::clamped(9));
    });
    let within = |part: &mut Order| part.budget.max_tool_calls = Some(Count::clamped(9));
    let refused: [(Change<'_>, &str); 6] = [
        (&|part| part.budget.max_tool_calls = None, "/budget"),
        (&|part| part.deadline = UnixMillis(START + 3_600_001), "/deadlineAt"),
        (&|part| part.redelegation = 1, "/redelegation/maxDepth"),
        (&|part| part.attested = false, "/requireExecutionAttestation"),
        (&|part| part.grants = vec![grant("mcp:docs/a:write", 1)], ""),
        (&|part| part.grants = vec![grant("mcp:docs-secret/a:read", 1)], ""),
    ];
    for (change, member) in refused {
        let mut loose = part(parent);
        within(&mut loose);
        change(&mut loose);
        let (code, path) = hand_on(&mut town, loose).unwrap_err();
        assert_eq!((code, path.as_str()), (Code::AttenuationViolation, member));
    }
    assert_eq!(town.owner(2).questions().count(), 0);

    let mut first = part(parent);
    within(&mut first);
    first.grants = vec![grant("mcp:docs/a/*:read", 100)];
    let denied = hand_on(&mut town, first.clone()).unwrap();
    assert_eq!(town.question(2).1, Gate::Redelegation);
    let about = town.owner(2).questions().next().unwrap().about.clone();
    assert_eq!(about[0], format!("to {}: a report", did(3)));
    assert_eq!(about[2], "input (7 bytes): {\"n\":1}");
    // What the third may use of it: no more uses than the parent has.
    assert_eq!(about[4..], ["with these tools, 4 uses in all:", "read on mcp:docs/a/*"]);
    town.settle_down(&mut echo);
    assert_eq!(town.owner(3).gateway().tasks().count(), 0, "nobody has agreed yet");
    town.answer(2, Decision::Denied);
    let fate = town.owner(2).handed_on(&parent, &denied).map_err(|error| error.code());
    assert_eq!(fate, Err(Code::ApprovalDenied));

    let agreed = hand_on(&mut town, first).unwrap();
    assert_eq!(town.owner(2).handed_on(&parent, &agreed), Ok(None));
    town.answer(2, Decision::Approved);
    let child = town.owner(2).handed_on(&parent, &agreed).unwrap().unwrap();
    town.settle_down(&mut |n, job| (n == 3).then(|| Ended::Output(job.input.clone())));
    assert_eq!(town.state(3, &child), State::Settled);
    let contract = town.view(3, &child).contract().unwrap().clone();
    assert_eq!(contract.manifest.parent_task_id.as_ref(), Some(town.view(1, &parent).task_id()));
    let outer = town.view(1, &parent).contract().unwrap().manifest.clone();
    assert_eq!(contract.manifest.parent_manifest_digest, Some(Digest::of(&outer).unwrap()));
    assert_eq!(sign::body_digest(&contract).unwrap(), agreed, "what was agreed to was offered");
    // No more uses than the parent has.
    assert_eq!(town.view(3, &child).grants()[0].object.limits.max_uses.get(), 4);
    town.check([2, 3], &child, Status::Valid);
    // The owner's word stands in the parent's log, on both sides.
    end(&mut town, &parent, &job, Ended::Output(json!({ "n": 2 })));
    town.check([1, 2], &parent, Status::Valid);
    let approvals = town.view(1, &parent);
    assert_eq!(approvals.state(), Some(State::Settled));
    let log = town.owner(1).task(&parent).unwrap();
    let receipts = log.entries().iter().filter(|c| c.entry.event == Event::Approval);
    let receipts: Vec<_> = receipts.map(|c| log.object(&c.payload[0]).unwrap().clone()).collect();
    assert_eq!(receipts.len(), 1);
    assert_eq!(
        (&receipts[0]["gate"], &receipts[0]["approverDid"]),
        (&json!("redelegation"), &json!(did(2)))
    );
    // Over is over, and what was not allowed is not.
    assert_eq!(hand_on(&mut town, part(parent)).unwrap_err().0, Code::IllegalTransition);
    let (plain, _) = working(&mut town, |_| {});
    let (code, member) = hand_on(&mut town, part(plain)).unwrap_err();
    assert_eq!((code, member.as_str()), (Code::AttenuationViolation, "/redelegation"));
}

#[test]
fn a_part_that_waits_is_not_offered_when_the_whole_is_over() {
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT), (3, ACCEPT)]);
    let (parent, job) = working(&mut town, |order| order.redelegation = 1);
    let child = hand_on(&mut town, part(parent)).unwrap();
    end(&mut town, &parent, &job, Ended::Output(json!({ "n": 2 })));
    assert_eq!(town.owner(2).questions().count(), 0);
    let fate = town.owner(2).handed_on(&parent, &child).map_err(|error| error.code());
    assert_eq!(fate, Err(Code::IllegalTransition));
    assert_eq!(town.owner(3).gateway().tasks().count(), 0);
}
