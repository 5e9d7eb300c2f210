//! Work in progress at the requester: tool calls once and only once, quotas, and what verification
//! says of good and bad deliveries.

use commsd::acp::capability::UseCounters;
use commsd::acp::code::Code;
use commsd::acp::gateway::Admission;
use commsd::acp::log::{Cx, View, Wish};
use commsd::acp::objects::*;
use commsd::acp::quota::{Alarm, QuotaMeter};
use commsd::acp::revocation::RevocationRegistry;
use commsd::acp::sign::{Role, Signature, Signed as _};
use commsd::acp::tool::{Admission as Entry, CallRecord, Desk, ToolDesk, answer};
use commsd::acp::value::*;
use commsd::acp::{steps, verify};
use commsd::codec::time::UnixMillis;
use serde_json::{Value, json};

use crate::gateways::{Pair, accept, used};
use crate::support::{digest, person};

fn in_progress(change: impl FnOnce(&mut TaskManifest)) -> Pair {
    let mut pair = Pair::with(Admission::Anyone, change);
    pair.settle_down();
    pair.act(1, accept);
    pair.settle_down();
    pair.act(1, |_, _| steps::start());
    pair.settle_down();
    pair
}

/// A call by hand, with a chain of one token by hand.
fn call(view: &View, id: &str, change: impl FnOnce(&mut Value)) -> ToolCall {
    let task = view.task_id().to_string();
    let token = json!({
        "type": "CapabilityToken", "version": "1.0", "tokenId": "cap_handmade001",
        "issuerDid": person(1).did, "audienceDid": person(2).did, "taskId": task,
        "parentDigest": null, "depth": 0,
        "capabilities": [{ "resource": "mcp:docs/**", "actions": ["read"], "argsSchemas": [], "maxBytesPerUse": null }],
        "limits": { "notBefore": "2026-12-01T00:00:00.000Z", "expiresAt": "2026-12-01T01:00:00.000Z",
            "maxUses": 2, "maxDepth": 0 },
        "issuedAt": "2026-12-01T00:00:00.000Z", "nonce": "AAAAAAAAAAAAAAAAAAAAAA",
    });
    let mut body = json!({
        "type": "ToolCall", "version": "1.0", "callId": id, "taskId": task,
        "contractDigest": view.contract_digest().unwrap().to_string(), "callerDid": person(2).did,
        "chain": [person(1).sign(token, "capability-token", "issuer")], "resource": "mcp:docs/a",
        "action": "read", "arguments": { "q": 1 }, "issuedAt": "2026-12-01T00:00:00.000Z",
        "expiresAt": "2026-12-01T00:10:00.000Z", "nonce": "AAAAAAAAAAAAAAAAAAAAAA",
    });
    change(&mut body);
    ToolCall::read(person(2).sign(body, "tool-call", "worker")).unwrap()
}

#[test]
fn a_call_runs_once() {
    let pair = in_progress(|_| {});
    let view = pair.view(0);
    let revocations = RevocationRegistry::new();
    let mut counters = UseCounters::new();
    let mut tools = ToolDesk::new();
    let worker = person(2).secret().did();
    let admit = |tools: &mut ToolDesk, counters: &mut UseCounters, call: &ToolCall, sender| {
        let mut desk = Desk {
            view: &view,
            counters,
            revocations: &revocations,
            sender,
            now: UnixMillis(pair.now),
        };
        tools.admit(call, &mut desk).map_err(|e| e.code())
    };
    let one = call(&view, "call_handmade001", |_| {});
    let Ok(Entry::Run(started)) = admit(&mut tools, &mut counters, &one, worker) else { panic!() };
    assert_eq!(admit(&mut tools, &mut counters, &one, worker), Ok(Entry::Running));
    let result =
        answer(&one, Ok(json!({ "a": 1 })), &person(1).secret(), UnixMillis(pair.now)).unwrap();
    result.verify().unwrap();
    assert_eq!(result.call_digest.to_string(), digest(&serde_json::to_value(&one).unwrap()));
    let done = tools.done(result.clone()).unwrap();
    assert_eq!(
        admit(&mut tools, &mut counters, &one, worker),
        Ok(Entry::Again(Box::new(result.clone())))
    );
    assert_eq!(tools.done(result.clone()).unwrap_err().code(), Code::CallIdReused);
    // The same id with other arguments.
    let other = call(&view, "call_handmade001", |c| c["arguments"] = json!({ "q": 2 }));
    assert_eq!(admit(&mut tools, &mut counters, &other, worker), Err(Code::CallIdReused));
    // Two uses are two calls.
    let two = call(&view, "call_handmade002", |_| {});
    assert!(matches!(admit(&mut tools, &mut counters, &two, worker), Ok(Entry::Run(_))));
    let three = call(&view, "call_handmade003", |_| {});
    assert_eq!(admit(&mut tools, &mut counters, &three, worker), Err(Code::UsesExhausted));

    // After a restart: the answered one is answered, the other is not run again.
    let (mut tools, mut counters) = (ToolDesk::new(), UseCounters::new());
    for record in [started.clone(), done] {
        let stored: CallRecord =
            serde_json::from_slice(&serde_json::to_vec(&record).unwrap()).unwrap();
        assert_eq!(stored, record);
        tools.restore(stored, &mut counters);
    }
    assert_eq!(admit(&mut tools, &mut counters, &one, worker), Ok(Entry::Again(Box::new(result))));
    let mut tools = ToolDesk::new();
    tools.restore(started, &mut counters);
    assert_eq!(admit(&mut tools, &mut counters, &one, worker), Err(Code::CallOutcomeUnknown));
    assert!(matches!(admit(&mut tools, &mut counters, &two, worker), Ok(Entry::Run(_))));
    assert_eq!(admit(&mut tools, &mut counters, &three, worker), Err(Code::UsesExhausted));
}

#[test]
fn calls_that_are_refused() {
    let pair = in_progress(|_| {});
    let view = pair.view(0);
    let early = pair.gateways[0].task(&pair.task).unwrap().view().clone();
    assert_eq!(early.state(), Some(State::InProgress));
    let revocations = RevocationRegistry::new();
    let (worker, stranger) = (person(2).secret().did(), person(3).secret().did());
    let judge = |change: &dyn Fn(&mut Value), sender, at: u64| {
        let call = call(&view, "call_handmade001", change);
        let mut counters = UseCounters::new();
        let now = UnixMillis(at);
        let mut desk =
            Desk { view: &view, counters: &mut counters, revocations: &revocations, sender, now };
        ToolDesk::new().admit(&call, &mut desk).map(drop).map_err(|e| e.code())
    };
    let now = pair.now;
    assert_eq!(judge(&|_| {}, worker, now), Ok(()));
    assert_eq!(judge(&|_| {}, stranger, now), Err(Code::WrongSigner));
    assert_eq!(
        judge(&|c| c["callerDid"] = json!(person(3).did), worker, now),
        Err(Code::WrongSigner)
    );
    assert_eq!(
        judge(&|c| c["taskId"] = json!("task_example001"), worker, now),
        Err(Code::DigestMismatch)
    );
    let zero = format!("sha256:{}", "0".repeat(64));
    assert_eq!(
        judge(&|c| c["contractDigest"] = json!(zero), worker, now),
        Err(Code::DigestMismatch)
    );
    assert_eq!(
        judge(&|c| c["action"] = json!("write"), worker, now),
        Err(Code::CapabilityNotGranted)
    );
    assert_eq!(
        judge(&|c| c["resource"] = json!("mcp:docs/**"), worker, now),
        Err(Code::CapabilityNotGranted)
    );
    assert_eq!(
        judge(&|c| c["expiresAt"] = json!("2026-12-01T00:10:00.001Z"), worker, now),
        Err(Code::TokenExpired)
    );
    let end = 1_796_083_800_000;
    assert_eq!(judge(&|_| {}, worker, end + 59_999), Ok(()));
    assert_eq!(judge(&|_| {}, worker, end + 60_000), Err(Code::TokenExpired));

    // Before the work began there are no tools.
    let mut pair = Pair::with(Admission::Anyone, |_| {});
    pair.settle_down();
    let view = pair.view(0);
    let call = call(&view, "call_handmade001", |_| {});
    let mut counters = UseCounters::new();
    let mut desk = Desk {
        view: &view,
        counters: &mut counters,
        revocations: &revocations,
        sender: worker,
        now: UnixMillis(pair.now),
    };
    let refused = ToolDesk::new().admit(&call, &mut desk).unwrap_err();
    assert_eq!(refused.code(), Code::IllegalTransition);
}

fn tokens(total: u64) -> Usage {
    Usage { total_tokens: Some(Count::clamped(total)), ..used() }
}

fn deliver(cx: &mut Cx<'_>, view: &View, output: Value, usage: Usage) -> Wish {
    let started = Time::from(cx.now);
    let receipt =
        steps::usage(cx, view, usage, UsageSource::Metered, ("command", None), started, true)
            .unwrap();
    steps::deliver(cx, view, output, &receipt, None).unwrap()
}

fn raise(pair: &mut Pair, who: usize, from: u64, to: u64) {
    pair.act(who, |cx, view| {
        let contract_digest = view.contract_digest().unwrap();
        let target =
            Target::BudgetOverrun { contract_digest, metric: "maxTotalTokens".into(), from, to };
        let yes =
            steps::approval(cx, view.task_id(), &target, Decision::Approved, None, "").unwrap();
        steps::approve(&yes, &target).unwrap()
    });
    pair.settle_down();
}

#[test]
fn budgets_are_raised_by_both_owners_only() {
    let limited = |m: &mut TaskManifest| m.budget.max_total_tokens = Some(Count::clamped(100));
    let mut pair = in_progress(limited);
    let mut meter = QuotaMeter::new();
    let progress = |total| Metrics {
        input_tokens: None,
        output_tokens: None,
        total_tokens: Some(Count::clamped(total)),
        tool_calls: None,
    };
    let alarm = |alarms: Vec<Alarm>| alarms.first().copied();
    meter.progress(&progress(79));
    assert_eq!(alarm(meter.alarms(&pair.view(0))), None);
    meter.progress(&progress(80));
    let warning = Alarm::Warning { metric: "maxTotalTokens", used: 80, limit: 100 };
    assert_eq!(alarm(meter.alarms(&pair.view(0))), Some(warning));
    assert_eq!(alarm(meter.alarms(&pair.view(0))), None, "told once");
    // A smaller report takes nothing back.
    meter.progress(&progress(10));
    meter.receipt(&tokens(100));
    let exceeded = |limit| Alarm::Exceeded { metric: "maxTotalTokens", used: 100, limit };
    assert_eq!(alarm(meter.alarms(&pair.view(0))), Some(exceeded(100)));
    raise(&mut pair, 0, 100, 200);
    assert_eq!(alarm(meter.alarms(&pair.view(0))), Some(exceeded(100)), "one owner is not enough");
    raise(&mut pair, 1, 100, 150);
    assert_eq!(alarm(meter.alarms(&pair.view(0))), Some(exceeded(100)), "not for the same raise");
    raise(&mut pair, 1, 100, 200);
    assert_eq!(alarm(meter.alarms(&pair.view(0))), None);

    // A delivery within the raised limit passes, beyond it fails.
    pair.act(1, |cx, view| deliver(cx, view, json!({}), tokens(200)));
    pair.settle_down();
    assert!(verify::examine(&pair.view(0), 0).unwrap().iter().all(|check| check.passed));
    let mut pair = in_progress(limited);
    pair.act(1, |cx, view| deliver(cx, view, json!({}), tokens(101)));
    pair.settle_down();
    let failed: Vec<_> = verify::examine(&pair.view(0), 0)
        .unwrap()
        .into_iter()
        .filter(|check| !check.passed)
        .map(|check| (check.name.to_string(), check.code))
        .collect();
    assert_eq!(failed, [("budget".to_owned(), Some(Code::BudgetExceeded))]);
    // The requester cannot call that passed: its own log would be invalid, and is.
    let report = {
        let (key, now) = (person(1).secret(), UnixMillis(pair.now));
        let view = pair.gateways[0].task(&pair.task).unwrap().view();
        verify::report(view, 0, &key, now, &mut pair.entropy).unwrap()
    };
    assert!(!report.passed);
    pair.act(0, |_, view| steps::verdict(view, &report, false).unwrap());
    pair.settle_down();
    assert_eq!(pair.view(1).state(), Some(State::Disputed));
    let log = commsd::acp::audit::AuditLog::of(pair.gateways[1].task(&pair.task).unwrap());
    let audit = commsd::acp::audit::verify(&log, None, UnixMillis(pair.now));
    assert_eq!(
        audit.status,
        commsd::acp::audit::Status::Valid,
        "a dispute is a good record: {audit:?}"
    );
}

#[test]
fn the_requester_counts_too() {
    let mut pair = in_progress(|m| {
        m.budget.max_tool_calls = Some(Count::clamped(2));
        m.budget.max_output_bytes = Some(Count::clamped(10));
    });
    let mut meter = QuotaMeter::new();
    for _ in 0..3 {
        meter.tool_call();
    }
    meter.output_bytes(11);
    assert_eq!(meter.proxied_calls(), 3);
    assert_eq!(meter.alarms(&pair.view(0)).len(), 2);
    pair.act(1, |cx, view| {
        let modest = Usage {
            tool_calls: Some(Count::clamped(1)),
            output_bytes: Some(Count::clamped(1)),
            ..used()
        };
        deliver(cx, view, json!({ "a": 1 }), modest)
    });
    pair.settle_down();
    let passes = |calls| {
        let checks = verify::examine(&pair.view(0), calls).unwrap();
        checks.iter().find(|check| &*check.name == "budget").unwrap().passed
    };
    assert!(passes(2) && !passes(3));
}

/// Names of failed checks and their codes, for an output under a manifest.
fn failures(
    output: Value,
    change: impl FnOnce(&mut TaskManifest),
    attest: Option<&dyn Fn(&mut ExecutionAttestation)>,
) -> Vec<(String, &'static str)> {
    failures_of("sandbox", output, change, attest)
}

/// As [`failures`], by the receipt of this adapter.
fn failures_of(
    adapter: &str,
    output: Value,
    change: impl FnOnce(&mut TaskManifest),
    attest: Option<&dyn Fn(&mut ExecutionAttestation)>,
) -> Vec<(String, &'static str)> {
    let mut pair = in_progress(change);
    pair.act(1, |cx, view| {
        let started = Time::from(cx.now);
        let usage =
            steps::usage(cx, view, used(), UsageSource::Metered, (adapter, None), started, true)
                .unwrap();
        let manifest = &view.contract().unwrap().manifest;
        let attestation = attest.map(|change| {
            let mut attestation = ExecutionAttestation {
                attestation_id: AttestationId::draw(cx.entropy),
                task_id: view.task_id().clone(),
                contract_digest: view.contract_digest().unwrap(),
                worker_did: cx.key.did(),
                requested_isolation: manifest.sandbox_policy.isolation,
                effective_isolation: manifest.sandbox_policy.isolation,
                runtime: Runtime {
                    name: Name::parse("x").unwrap(),
                    version: Name::parse("1").unwrap(),
                    image_digest: None,
                },
                policy_digest: Digest::of(&manifest.sandbox_policy).unwrap(),
                limits: manifest.sandbox_policy.clone(),
                started_at: started,
                ended_at: started,
                exit: Exit { kind: ExitKind::Exited, code: Some(0), signal: None },
                input_digest: manifest.input_digest,
                output_digest: Some(Digest::of(&output).unwrap()),
                stderr_digest: None,
                denials: Seq::default(),
                signature: Signature::blank(Role::Worker, cx.key.did()),
            };
            change(&mut attestation);
            attestation.signed(cx.key, cx.now).unwrap()
        });
        steps::deliver(cx, view, output.clone(), &usage, attestation.as_ref()).unwrap()
    });
    pair.settle_down();
    let checks = verify::examine(&pair.view(0), 0).unwrap();
    assert!(checks.iter().take(7).map(|c| &*c.name).eq(verify::FIXED_CHECKS));
    checks
        .iter()
        .filter(|check| !check.passed)
        .map(|check| (check.name.to_string(), check.code.unwrap().as_str()))
        .collect()
}

fn registered(name: &'static str, params: Value) -> impl FnOnce(&mut TaskManifest) {
    move |m: &mut TaskManifest| {
        m.verification.method = VerificationMethod::SchemaAndChecks;
        let check_name = Word::parse(name).unwrap();
        m.verification.checks = Seq::new(vec![RegisteredCheck { check_name, params }]).unwrap();
    }
}

#[test]
fn built_in_checks() {
    for (name, params, good, bad) in [
        (
            "regexMatch",
            json!({ "field": "s", "pattern": "^a+$" }),
            json!({ "s": "aa" }),
            json!({ "s": "ab" }),
        ),
        (
            "regexMatch",
            json!({ "field": "s", "pattern": "a" }),
            json!({ "s": "a" }),
            json!({ "s": 1 }),
        ),
        (
            "stringLength",
            json!({ "field": "s", "min": 2, "max": 3 }),
            json!({ "s": "äö" }),
            json!({ "s": "ä" }),
        ),
        (
            "arrayLength",
            json!({ "field": "/a/b", "max": 1 }),
            json!({ "a": { "b": [1] } }),
            json!({ "a": { "b": [1, 2] } }),
        ),
        (
            "fieldExists",
            json!({ "fields": ["a", "/b/0"] }),
            json!({ "a": null, "b": [1] }),
            json!({ "a": 1, "b": [] }),
        ),
        ("outputEquals", json!({ "value": { "a": 1.0 } }), json!({ "a": 1 }), json!({ "a": 1.5 })),
        (
            "jsonSchema",
            json!({ "schema": { "required": ["a"] } }),
            json!({ "a": 1 }),
            json!({ "b": 1 }),
        ),
    ] {
        assert_eq!(failures(good, registered(name, params.clone()), None), [], "{name}");
        let failed = failures(bad, registered(name, params), None);
        assert_eq!(failed, [(name.to_owned(), "CHECK_FAILED")], "{name}");
    }
    let zero: &dyn Fn(&mut ExecutionAttestation) = &|_| {};
    let one: &dyn Fn(&mut ExecutionAttestation) = &|a| a.exit.code = Some(1);
    assert_eq!(failures(json!({}), registered("exitCode", json!({ "equals": 0 })), Some(zero)), []);
    let failed = failures(json!({}), registered("exitCode", json!({ "equals": 0 })), Some(one));
    assert_eq!(failed, [("exitCode".to_owned(), "CHECK_FAILED")]);
    // Bad parameters are a bad manifest, and fail as one.
    for (name, params) in [
        ("regexMatch", json!({})),
        ("regexMatch", json!({ "pattern": "(" })),
        ("regexMatch", json!({ "pattern": "a", "extra": 1 })),
        ("stringLength", json!({ "min": -1 })),
        ("fieldExists", json!({ "fields": [] })),
        ("shell", json!({ "command": "true" })),
    ] {
        let failed = failures(json!({}), registered(name, params), None);
        assert_eq!(failed, [(name.to_owned(), "MANIFEST_INVALID")]);
    }
}

#[test]
fn schema_and_attestation() {
    assert_eq!(failures(json!([]), |_| {}, None), [("schema".to_owned(), "SCHEMA_MISMATCH")]);
    let required = |isolation, fallback| {
        move |m: &mut TaskManifest| {
            m.require_execution_attestation = true;
            m.sandbox_policy = steps::sandbox(isolation);
            m.sandbox_policy.allow_subprocess_fallback = fallback;
        }
    };
    let at = |effective: Isolation| {
        move |a: &mut ExecutionAttestation| {
            a.effective_isolation = effective;
            a.limits.isolation = effective;
        }
    };
    let code = |isolation, fallback, effective| {
        failures(json!({}), required(isolation, fallback), Some(&at(effective)))
            .first()
            .map(|(name, code)| (name.clone(), *code))
    };
    let downgrade = Some(("attestation".to_owned(), "ISOLATION_DOWNGRADE"));
    assert_eq!(
        failures(json!({}), required(Isolation::Kernel, true), None),
        [("attestation".to_owned(), "ATTESTATION_MISSING")]
    );
    assert_eq!(code(Isolation::Kernel, false, Isolation::Kernel), None);
    assert_eq!(code(Isolation::Kernel, false, Isolation::Oci), None);
    assert_eq!(code(Isolation::Oci, false, Isolation::Subprocess), downgrade);
    assert_eq!(code(Isolation::Oci, true, Isolation::Subprocess), None);
    assert_eq!(code(Isolation::Oci, true, Isolation::None), downgrade);
    // The level that was claimed is not the one that was applied.
    let lying: &dyn Fn(&mut ExecutionAttestation) = &|a| a.limits.isolation = Isolation::None;
    let failed = failures(json!({}), required(Isolation::Kernel, false), Some(lying));
    assert_eq!(failed, [("attestation".to_owned(), "ISOLATION_DOWNGRADE")]);
    let other: &dyn Fn(&mut ExecutionAttestation) = &|a| a.output_digest = Some(a.input_digest);
    let failed = failures(json!({ "n": 1 }), required(Isolation::Kernel, false), Some(other));
    assert_eq!(failed, [("digests".to_owned(), "OUTPUT_DIGEST_MISMATCH")]);
    let policy: &dyn Fn(&mut ExecutionAttestation) = &|a| a.policy_digest = a.input_digest;
    let failed = failures(json!({}), required(Isolation::Kernel, false), Some(policy));
    assert_eq!(failed, [("attestation".to_owned(), "DIGEST_MISMATCH")]);
}

/// The code of check `attestation` of a run at `effective`, where `kernel` was ordered with one host.
fn attested(
    effective: Isolation,
    adapter: &'static str,
    change: &dyn Fn(&mut ExecutionAttestation),
) -> Option<&'static str> {
    let ordered = |m: &mut TaskManifest| {
        m.require_execution_attestation = true;
        m.sandbox_policy = steps::sandbox(Isolation::Kernel);
        m.sandbox_policy.allow_subprocess_fallback = true;
        m.sandbox_policy.network = Network::Allowlist;
        m.sandbox_policy.allow_hosts = hosts(&["a.example:443"]);
    };
    let run = |a: &mut ExecutionAttestation| {
        a.effective_isolation = effective;
        a.limits.isolation = effective;
        change(a);
    };
    let failed = failures_of(adapter, json!({}), ordered, Some(&run));
    assert!(failed.iter().all(|(name, _)| name == "attestation"), "{failed:?}");
    failed.first().map(|(_, code)| *code)
}

fn hosts(names: &[&str]) -> Seq<Name, 0, 32> {
    Seq::new(names.iter().map(|name| Name::parse(name).unwrap()).collect()).unwrap()
}

#[test]
fn attestations_that_contradict_the_contract_fail() {
    type Change = fn(&mut ExecutionAttestation);
    let none = |a: &mut ExecutionAttestation| {
        a.limits.network = Network::None;
        a.limits.allow_hosts = hosts(&[]);
    };
    // As it was ordered, and as `sandbox::applied` makes it where no host can be let out, or the
    // machine's own limits are lower.
    for level in [Isolation::Oci, Isolation::Kernel, Isolation::Subprocess] {
        assert_eq!(attested(level, "command", &|_| {}), None);
        let lower = |a: &mut ExecutionAttestation| {
            none(a);
            a.limits.memory_max_bytes = Count::clamped(1 << 20);
            a.limits.pids_max = Count::clamped(1);
        };
        assert_eq!(attested(level, "command", &lower), None);
    }
    let wider: [Change; 6] = [
        |a| a.limits.allow_hosts = hosts(&["a.example:443", "b.example:443"]),
        |a| a.limits.allow_hosts = hosts(&["b.example:443"]),
        |a| a.limits.memory_max_bytes = Count::clamped((512 << 20) + 1),
        |a| a.limits.pids_max = Count::clamped(129),
        |a| a.limits.cpu_time_max_ms = Count::clamped(300_001),
        |a| a.limits.disk_max_bytes = Count::clamped(u64::MAX),
    ];
    for change in wider {
        for level in [Isolation::Oci, Isolation::Kernel, Isolation::Subprocess] {
            assert_eq!(attested(level, "command", &change), Some("ISOLATION_DOWNGRADE"));
        }
    }
    // Where no attestation is asked for one may be at level `none`, which promises no numbers; a
    // network that the contract does not open stays a contradiction.
    let at_none = |change: &dyn Fn(&mut ExecutionAttestation)| {
        let unlimited = |a: &mut ExecutionAttestation| {
            a.limits.memory_max_bytes = Count::clamped(u64::MAX);
            a.limits.pids_max = Count::clamped(u64::MAX);
            a.limits.cpu_time_max_ms = Count::clamped(u64::MAX);
            a.limits.disk_max_bytes = Count::clamped(u64::MAX);
            change(a);
        };
        failures(json!({}), |_| {}, Some(&unlimited))
    };
    assert_eq!(at_none(&|_| {}), []);
    let open = at_none(&|a| a.limits.network = Network::Allowlist);
    assert_eq!(open, [("attestation".to_owned(), "ISOLATION_DOWNGRADE")]);

    let ends: [(Change, Option<&str>, Option<&str>); 4] = [
        (|a| a.exit.code = Some(1), Some("ADAPTER_FAILED"), None),
        (
            |a| a.exit = Exit { kind: ExitKind::Signalled, code: None, signal: Some(9) },
            Some("ADAPTER_FAILED"),
            None,
        ),
        // A server that is stopped after its answer.
        (
            |a| a.exit = Exit { kind: ExitKind::Cancelled, code: None, signal: Some(15) },
            Some("ADAPTER_FAILED"),
            None,
        ),
        (
            |a| a.exit = Exit { kind: ExitKind::SpawnFailed, code: None, signal: None },
            Some("ADAPTER_FAILED"),
            Some("ADAPTER_FAILED"),
        ),
    ];
    for (end, program, server) in ends {
        assert_eq!(attested(Isolation::Kernel, "command", &end), program);
        assert_eq!(attested(Isolation::Kernel, "mcp", &end), server);
    }
}

#[test]
fn manifests_are_judged_before_work() {
    let mut entropy = commsd::identity::entropy::SeededEntropy::new(9);
    let key = person(1).secret();
    let mut judge = |change: &dyn Fn(&mut TaskManifest)| {
        let mut cx = Cx { key: &key, now: UnixMillis(1_796_083_200_000), entropy: &mut entropy };
        let manifest = crate::walk::manifest_with(&mut cx, &json!({}), 0, change);
        verify::check_manifest(&manifest).map_err(|e| e.code())
    };
    assert_eq!(judge(&|_| {}), Ok(()));
    assert_eq!(judge(&|m| m.deadline_at = m.created_at), Err(Code::ManifestInvalid));
    assert_eq!(
        judge(&|m| m.output_schema = SchemaText(json!({ "type": 7 }))),
        Err(Code::SchemaInvalid)
    );
    assert_eq!(
        judge(&|m| m.input_schema = SchemaText(json!({ "$ref": "http://127.0.0.1/" }))),
        Err(Code::SchemaInvalid)
    );
    assert_eq!(
        judge(&|m| m.redelegation.max_depth = Int::new(1).unwrap()),
        Err(Code::ManifestInvalid)
    );
    assert_eq!(judge(&|m| m.parent_task_id = Some(m.task_id.clone())), Err(Code::ManifestInvalid));
    assert_eq!(judge(&|m| registered("shell", json!({}))(m)), Err(Code::ManifestInvalid));
    let mut cx = Cx { key: &key, now: UnixMillis(1_796_083_200_000), entropy: &mut entropy };
    let schema = json!({ "required": ["q"] });
    let manifest = |cx: &mut Cx<'_>, input: &Value| {
        crate::walk::manifest_with(cx, input, 0, |m| m.input_schema = SchemaText(schema.clone()))
    };
    let (good, bad) = (json!({ "q": 1 }), json!({}));
    assert!(verify::check_input(&manifest(&mut cx, &good), &good).is_ok());
    let code = |m: &TaskManifest, input: &Value| verify::check_input(m, input).unwrap_err().code();
    assert_eq!(code(&manifest(&mut cx, &bad), &bad), Code::InputInvalid);
    assert_eq!(code(&manifest(&mut cx, &good), &bad), Code::DigestMismatch);
}

#[test]
fn what_is_handed_on_is_not_loosened() {
    let mut entropy = commsd::identity::entropy::SeededEntropy::new(9);
    let key = person(1).secret();
    let mut cx = Cx { key: &key, now: UnixMillis(1_796_083_200_000), entropy: &mut entropy };
    let parent = crate::walk::manifest_with(&mut cx, &json!({}), 0, |m| {
        m.redelegation = Redelegation { allowed: true, max_depth: Int::new(2).unwrap() };
        m.budget.max_total_tokens = Some(Count::clamped(100));
        m.sandbox_policy = steps::sandbox(Isolation::Kernel);
        m.require_execution_attestation = true;
    });
    let digest = Digest::of(&parent).unwrap();
    let mut judge = |change: &dyn Fn(&mut TaskManifest)| {
        let child = crate::walk::manifest_with(&mut cx, &json!({}), 0, |m| {
            *m = TaskManifest { task_id: m.task_id.clone(), ..parent.clone() };
            m.redelegation.max_depth = Int::new(1).unwrap();
            m.parent_task_id = Some(parent.task_id.clone());
            m.parent_manifest_digest = Some(digest);
            change(m);
        });
        verify::check_redelegated(&parent, &child).map_err(|e| (e.code(), e.path().to_owned()))
    };
    assert_eq!(judge(&|_| {}), Ok(()));
    assert_eq!(judge(&|m| m.budget.max_total_tokens = Some(Count::clamped(99))), Ok(()));
    assert_eq!(judge(&|m| m.sandbox_policy.isolation = Isolation::Oci), Ok(()));
    assert_eq!(judge(&|m| m.parent_manifest_digest = None).unwrap_err().0, Code::DigestMismatch);
    type Change<'a> = &'a dyn Fn(&mut TaskManifest);
    let loose: [(&str, Change<'_>); 12] = [
        ("redelegation/maxDepth", &|m| m.redelegation.max_depth = Int::new(2).unwrap()),
        ("deadlineAt", &|m| m.deadline_at = m.deadline_at.plus(1)),
        ("budget", &|m| m.budget.max_total_tokens = None),
        ("budget", &|m| m.budget.max_total_tokens = Some(Count::clamped(101))),
        ("requireExecutionAttestation", &|m| m.require_execution_attestation = false),
        ("sandboxPolicy/isolation", &|m| m.sandbox_policy.isolation = Isolation::Subprocess),
        ("sandboxPolicy/allowSubprocessFallback", &|m| {
            m.sandbox_policy.allow_subprocess_fallback = true
        }),
        ("sandboxPolicy/network", &|m| m.sandbox_policy.network = Network::Allowlist),
        ("sandboxPolicy/memoryMaxBytes", &|m| {
            m.sandbox_policy.memory_max_bytes = Count::clamped(1 << 40)
        }),
        ("sandboxPolicy/pidsMax", &|m| m.sandbox_policy.pids_max = Count::clamped(129)),
        ("sandboxPolicy/cpuTimeMaxMs", &|m| {
            m.sandbox_policy.cpu_time_max_ms = Count::clamped(300_001)
        }),
        ("sandboxPolicy/diskMaxBytes", &|m| {
            m.sandbox_policy.disk_max_bytes = Count::clamped(1 << 40)
        }),
    ];
    for (member, change) in loose {
        assert_eq!(judge(change), Err((Code::AttenuationViolation, format!("/{member}"))));
    }
}

/// What could not be sent is not begun.
#[test]
fn too_much_for_an_envelope() {
    let pair = in_progress(|_| {});
    let view = pair.view(1);
    let (mut gateways, mut entropy) = (pair.gateways, pair.entropy);
    let key = person(2).secret();
    let now = UnixMillis(pair.now + 1000);
    let mut try_with = |bytes: usize| {
        let mut cx = Cx { key: &key, now, entropy: &mut entropy };
        let wish = deliver(&mut cx, &view, json!({ "s": "x".repeat(bytes) }), used());
        gateways[1].act(&pair.task, wish, now, &mut entropy).map_err(|e| e.code())
    };
    assert_eq!(try_with(720 * 1024).unwrap_err(), Code::TooLarge);
    let out = try_with(512 * 1024).unwrap();
    let envelope = commsd::acp::json::canonical(&out.envelopes[0]).unwrap();
    assert!(envelope.len() < commsd::acp::envelope::MAX_ENVELOPE);
    assert!(gateways[0].receive(&envelope, now, &mut entropy).unwrap().is_some());
    assert_eq!(gateways[0].task(&pair.task).unwrap().view().state(), Some(State::Delivered));
}
