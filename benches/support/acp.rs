//! What the benches of the Agent Collaboration Protocol are made on: a long log of one task, and two
//! owners who talk by a relay.

use std::path::Path;

use commsd::acp::audit::AuditLog;
use commsd::acp::did::Secret;
use commsd::acp::gateway::Admission;
use commsd::acp::log::{Cx, Outputs, TaskLog, Wish};
use commsd::acp::objects::{
    Decision, Gate, Isolation, Metrics, Redelegation, SchemaText, TaskManifest, Verification,
    VerificationMethod, VerificationMode,
};
use commsd::acp::sign::{Role, Signature, Signed as _};
use commsd::acp::steps;
use commsd::acp::value::{Count, Digest, Int, Labels, Name, Prose, Seq, TaskId, Time};
use commsd::codec::time::UnixMillis;
use commsd::daemon::acp::{Office, OfficeOptions, OfficeTask};
use commsd::identity::entropy::SeededEntropy;
use commsd::runtime::acp_transport::Form;
use commsd::runtime::adapter::{AdapterKind, AdapterOptions};
use serde_json::json;
use tokio_util::sync::CancellationToken;

/// A task of two, as its requester holds it: offered, taken, begun, then `progress` reports.
pub fn long_log(progress: u64, now: u64) -> AuditLog {
    let mut entropy = SeededEntropy::new(8);
    let keys = [(); 2].map(|()| Secret::draw(&mut entropy).unwrap());
    let mut pair = Pair { keys, now, entropy };
    let input = json!({ "n": 1 });
    let worker = pair.keys[1].did();
    let (mut alice, out) = {
        let mut cx = pair.cx(0);
        let manifest = manifest(&mut cx, Digest::of(&input).unwrap());
        let offer = Time::from(cx.now).plus(600_000);
        let contract = steps::contract(&mut cx, manifest, worker, None, vec![], offer).unwrap();
        TaskLog::propose(&mut cx, &contract, input, vec![]).unwrap()
    };
    let genesis = alice.view().genesis().clone();
    let (mut bob, _) = TaskLog::open(genesis, pair.keys[1].did()).unwrap();
    pair.exchange(&mut alice, &mut bob, out, 0);
    pair.step(&mut alice, &mut bob, |cx, log| {
        let target = steps::acceptance_target(log.view()).unwrap();
        let id = log.view().task_id().clone();
        let yes = steps::approval(cx, &id, &target, Decision::Approved, None, "").unwrap();
        steps::accept(cx, log.view(), &yes).unwrap()
    });
    pair.step(&mut alice, &mut bob, |_, _| steps::start());
    for n in 0..progress {
        pair.now += 1_000;
        pair.step(&mut alice, &mut bob, |cx, log| {
            let metrics = Metrics {
                input_tokens: None,
                output_tokens: None,
                total_tokens: Some(Count::clamped(n)),
                tool_calls: None,
            };
            let message = format!("line {n} of what this work has to say");
            steps::progress(cx, log.view(), Some(n % 100), "work", &message, metrics, None).unwrap()
        });
    }
    assert_eq!(alice.entries().len() as u64, progress + 3);
    AuditLog::of(&alice)
}

struct Pair {
    keys: [Secret; 2],
    now: u64,
    entropy: SeededEntropy,
}

impl Pair {
    fn cx(&mut self, who: usize) -> Cx<'_> {
        Cx { key: &self.keys[who], now: UnixMillis(self.now), entropy: &mut self.entropy }
    }

    /// The worker takes a step, and both sign it.
    fn step(
        &mut self,
        alice: &mut TaskLog,
        bob: &mut TaskLog,
        make: impl FnOnce(&mut Cx<'_>, &TaskLog) -> Wish,
    ) {
        let mut cx = self.cx(1);
        let wish = make(&mut cx, bob);
        let out = bob.wish(&mut cx, wish).unwrap();
        self.exchange(alice, bob, out, 1);
    }

    fn exchange(&mut self, alice: &mut TaskLog, bob: &mut TaskLog, out: Outputs, from: usize) {
        let mut mail: Vec<_> =
            out.messages.into_iter().map(|message| (1 - from, message)).collect();
        while let Some((to, message)) = mail.pop() {
            let mut cx = self.cx(to);
            let log = if to == 0 { &mut *alice } else { &mut *bob };
            let out = log.handle(&mut cx, message).unwrap();
            mail.extend(out.messages.into_iter().map(|message| (1 - to, message)));
        }
    }
}

fn manifest(cx: &mut Cx<'_>, input_digest: Digest) -> TaskManifest {
    let at = Time::from(cx.now);
    TaskManifest {
        task_id: TaskId::draw(cx.entropy),
        title: Name::parse("a long task").unwrap(),
        description: Prose::default(),
        requester_did: cx.key.did(),
        created_at: at,
        deadline_at: at.plus(24 * 3_600_000),
        verify_within_ms: Count::clamped(600_000),
        input_schema: SchemaText(json!(true)),
        output_schema: SchemaText(json!(true)),
        input_digest,
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
        max_revisions: Int::new(0).unwrap(),
        parent_task_id: None,
        parent_manifest_digest: None,
        metadata: Labels::default(),
        signature: Signature::blank(Role::Requester, cx.key.did()),
    }
    .signed(cx.key, cx.now)
    .unwrap()
}

/// An owner's office at a relay; one that works runs `command`.
pub async fn office(
    home: &Path,
    relay: &str,
    command: Option<&str>,
    stop: &CancellationToken,
) -> (Office, OfficeTask) {
    let mut entropy = commsd::identity::entropy::OsEntropy::open().unwrap();
    let mut options = OfficeOptions::new(Secret::draw(&mut entropy).unwrap(), home.to_owned());
    options.relays = vec![relay.to_owned()];
    options.form = Form::WebSocket;
    options.admission = Admission::Anyone;
    if let Some(command) = command {
        options.auto = vec![Gate::ContractAcceptance];
        let mut adapter = AdapterOptions::new(AdapterKind::Command, home.to_owned());
        adapter.cmd = Some(command.to_owned());
        adapter.isolation = Some(Isolation::Subprocess);
        adapter.sandbox.executable = Some(env!("CARGO_BIN_EXE_commsd").into());
        options.work = Some((adapter, 1));
    }
    let transports = options.transports().unwrap();
    options.open(transports, stop.clone()).await.unwrap()
}
