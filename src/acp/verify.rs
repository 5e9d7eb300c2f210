//! Verification of a deliverable by its requester (design 6.8, S15): the seven fixed checks and the
//! built-in registered ones, as pure functions over what the log holds. The audit runs the same.

use regex::RegexBuilder;
use serde_json::Value;

use super::code::{Code, Error, Result};
use super::log::{Kept, View};
use super::objects::{
    Check, Deliverable, ExecutionAttestation, ExitKind, Isolation, Network, RegisteredCheck,
    SandboxPolicy, TaskManifest, Usage, UsageReceipt, VerificationMethod, VerificationReport,
};
use super::schema::UserSchema;
use super::sign::{Role, Signature, Signed as _};
use super::value::{Count, Digest, Note, ReportId, Seq, Time, Word};
use crate::acp::did::Secret;
use crate::codec::time::UnixMillis;
use crate::identity::entropy::Entropy;

/// The checks that every report has, in this order.
pub const FIXED_CHECKS: [&str; 7] =
    ["signatures", "digests", "contract", "capabilities", "budget", "schema", "attestation"];

/// The checks that a manifest may name.
pub const BUILT_IN_CHECKS: [&str; 7] = [
    "regexMatch",
    "stringLength",
    "arrayLength",
    "fieldExists",
    "exitCode",
    "outputEquals",
    "jsonSchema",
];

/// Compiled size of a check's regular expression.
const MAX_REGEX: usize = 256 * 1024;

/// Names in a `fieldExists`.
const MAX_FIELDS: usize = 100;

/// The registered checks that this manifest's method runs.
fn registered(manifest: &TaskManifest) -> &[RegisteredCheck] {
    match manifest.verification.method {
        VerificationMethod::SchemaAndChecks => &manifest.verification.checks,
        VerificationMethod::Schema | VerificationMethod::Manual => &[],
    }
}

/// The names of a report's checks for `manifest`, in order.
pub fn check_names(manifest: &TaskManifest) -> impl Iterator<Item = &str> {
    FIXED_CHECKS.into_iter().chain(registered(manifest).iter().map(|check| &*check.check_name))
}

/// Whether a manifest can be worked on: its schemas compile, its checks exist and have good
/// parameters, its times are in order.
///
/// # Errors
/// `MANIFEST_INVALID`, `SCHEMA_INVALID`, `TOO_LARGE`.
pub fn check_manifest(manifest: &TaskManifest) -> Result<()> {
    let invalid = |message: &str| Error::new(Code::ManifestInvalid, message);
    UserSchema::compile(&manifest.input_schema.0).map_err(|e| e.inside("inputSchema"))?;
    UserSchema::compile(&manifest.output_schema.0).map_err(|e| e.inside("outputSchema"))?;
    if manifest.deadline_at <= manifest.created_at {
        return Err(invalid("the deadline is before the beginning"));
    }
    if manifest.parent_task_id.is_some() != manifest.parent_manifest_digest.is_some() {
        return Err(invalid("half a parent"));
    }
    if !manifest.redelegation.allowed && manifest.redelegation.max_depth.get() > 0 {
        return Err(invalid("a depth of redelegation without redelegation"));
    }
    for check in manifest.verification.checks.iter() {
        Plan::read(check)?;
    }
    let names = |name: &str| manifest.verification.checks.iter().any(|c| *c.check_name == *name);
    let criteria = manifest.acceptance_criteria.iter();
    for criterion in criteria {
        if criterion.check_name.as_ref().is_some_and(|name| !names(name)) {
            return Err(invalid("a criterion names a check that is not registered"));
        }
    }
    Ok(())
}

/// Whether the input fits the manifest.
///
/// # Errors
/// `DIGEST_MISMATCH`, `INPUT_INVALID`.
pub fn check_input(manifest: &TaskManifest, input: &Value) -> Result<()> {
    if Digest::of(input)? != manifest.input_digest {
        return Err(Error::new(Code::DigestMismatch, "not the input of the manifest"));
    }
    UserSchema::compile(&manifest.input_schema.0)?
        .check(input)
        .map_err(|error| Error::new(Code::InputInvalid, error.message()))
}

/// Whether `child` hands on work of `parent` within its bounds: nothing that the parent's requester
/// laid down is loosened (design 6.1).
///
/// # Errors
/// `ATTENUATION_VIOLATION` naming the member; `DIGEST_MISMATCH` for another parent.
pub fn check_redelegated(parent: &TaskManifest, child: &TaskManifest) -> Result<()> {
    let parent_digest = Digest::of(parent)?;
    if child.parent_task_id.as_ref() != Some(&parent.task_id)
        || child.parent_manifest_digest != Some(parent_digest)
    {
        return Err(Error::new(Code::DigestMismatch, "handed on from another manifest"));
    }
    let (outer, inner) = (&parent.sandbox_policy, &child.sandbox_policy);
    let depth = parent.redelegation.max_depth.get();
    let budgets = [
        (parent.budget.max_input_tokens, child.budget.max_input_tokens),
        (parent.budget.max_output_tokens, child.budget.max_output_tokens),
        (parent.budget.max_total_tokens, child.budget.max_total_tokens),
        (parent.budget.max_tool_calls, child.budget.max_tool_calls),
        (parent.budget.max_wall_time_ms, child.budget.max_wall_time_ms),
        (parent.budget.max_output_bytes, child.budget.max_output_bytes),
    ];
    let within = |(outer, inner): &(Option<Count>, Option<Count>)| match (outer, inner) {
        (None, _) => true,
        (Some(_), None) => false,
        (Some(outer), Some(inner)) => inner <= outer,
    };
    let open = |policy: &SandboxPolicy| policy.network == Network::Allowlist;
    let hosts = inner.allow_hosts.iter().all(|host| outer.allow_hosts.contains(host));
    let rules = [
        ("redelegation", parent.redelegation.allowed),
        ("redelegation/maxDepth", depth > child.redelegation.max_depth.get()),
        ("deadlineAt", child.deadline_at <= parent.deadline_at),
        ("budget", budgets.iter().all(within)),
        (
            "requireExecutionAttestation",
            child.require_execution_attestation || !parent.require_execution_attestation,
        ),
        ("sandboxPolicy/isolation", inner.isolation.is_at_least(outer.isolation)),
        (
            "sandboxPolicy/allowSubprocessFallback",
            outer.allow_subprocess_fallback || !inner.allow_subprocess_fallback,
        ),
        ("sandboxPolicy/network", !open(inner) || (open(outer) && hosts)),
        ("sandboxPolicy/memoryMaxBytes", inner.memory_max_bytes <= outer.memory_max_bytes),
        ("sandboxPolicy/pidsMax", inner.pids_max <= outer.pids_max),
        ("sandboxPolicy/cpuTimeMaxMs", inner.cpu_time_max_ms <= outer.cpu_time_max_ms),
        ("sandboxPolicy/diskMaxBytes", inner.disk_max_bytes <= outer.disk_max_bytes),
    ];
    match rules.iter().find(|(_, kept)| !kept) {
        None => Ok(()),
        Some((member, _)) => Err(Error::new(
            Code::AttenuationViolation,
            "looser than the manifest that it is handed on from",
        )
        .inside(member)),
    }
}

/// A built-in check with its parameters read.
enum Plan {
    Regex { field: Option<String>, pattern: Box<regex::Regex> },
    Length { field: Option<String>, array: bool, min: u64, max: u64 },
    Fields(Vec<String>),
    ExitCode(i64),
    Equals(Value),
    Schema(Box<UserSchema>),
}

impl Plan {
    fn read(check: &RegisteredCheck) -> Result<Self> {
        let name: &str = &check.check_name;
        let invalid = || {
            let text = format!("the parameters of the check do not fit ({name:.32})");
            Error::new(Code::ManifestInvalid, text)
        };
        let params = check.params.as_object().ok_or_else(invalid)?;
        let only = |allowed: &[&str]| {
            let known = params.keys().all(|key| allowed.contains(&key.as_str()));
            if known { Ok(()) } else { Err(invalid()) }
        };
        let text = |name: &str| match params.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(_) => Err(invalid()),
        };
        let count = |name: &str, default: u64| match params.get(name) {
            None => Ok(default),
            Some(value) => value.as_u64().ok_or_else(invalid),
        };
        match name {
            "regexMatch" => {
                only(&["field", "pattern"])?;
                let pattern = text("pattern")?.ok_or_else(invalid)?;
                let pattern = RegexBuilder::new(&pattern)
                    .size_limit(MAX_REGEX)
                    .dfa_size_limit(MAX_REGEX)
                    .build()
                    .map_err(|_| invalid())?;
                Ok(Self::Regex { field: text("field")?, pattern: Box::new(pattern) })
            }
            "stringLength" | "arrayLength" => {
                only(&["field", "min", "max"])?;
                let (min, max) = (count("min", 0)?, count("max", u64::MAX)?);
                let array = name == "arrayLength";
                Ok(Self::Length { field: text("field")?, array, min, max })
            }
            "fieldExists" => {
                only(&["fields"])?;
                let fields = params.get("fields").and_then(Value::as_array).ok_or_else(invalid)?;
                let fields: Option<Vec<String>> =
                    fields.iter().map(|field| field.as_str().map(str::to_owned)).collect();
                let fields = fields.filter(|fields| (1..=MAX_FIELDS).contains(&fields.len()));
                Ok(Self::Fields(fields.ok_or_else(invalid)?))
            }
            "exitCode" => {
                only(&["equals"])?;
                let equals = params.get("equals").map_or(Some(0), Value::as_i64);
                Ok(Self::ExitCode(equals.ok_or_else(invalid)?))
            }
            "outputEquals" => {
                only(&["value"])?;
                Ok(Self::Equals(params.get("value").cloned().ok_or_else(invalid)?))
            }
            "jsonSchema" => {
                only(&["schema"])?;
                let schema = params.get("schema").ok_or_else(invalid)?;
                Ok(Self::Schema(Box::new(UserSchema::compile(schema)?)))
            }
            _ => Err(Error::new(Code::ManifestInvalid, "a check that this gateway does not have")),
        }
    }

    fn run(&self, output: &Value, attestation: Option<&ExecutionAttestation>) -> bool {
        let part = |field: &Option<String>| match field {
            None => Some(output),
            // A member of the output, or a place in it.
            Some(name) if name.starts_with('/') => output.pointer(name),
            Some(name) => output.get(name),
        };
        match self {
            Self::Regex { field, pattern } => {
                part(field).and_then(Value::as_str).is_some_and(|text| pattern.is_match(text))
            }
            Self::Length { field, array, min, max } => {
                let length = match part(field) {
                    Some(Value::Array(items)) if *array => Some(items.len()),
                    Some(Value::String(text)) if !*array => Some(text.chars().count()),
                    _ => None,
                };
                length
                    .and_then(|length| u64::try_from(length).ok())
                    .is_some_and(|length| (*min..=*max).contains(&length))
            }
            Self::Fields(fields) => fields.iter().all(|field| part(&Some(field.clone())).is_some()),
            Self::ExitCode(code) => attestation.is_some_and(|a| a.exit.code == Some(*code)),
            Self::Equals(value) => {
                Digest::of(value).ok().zip(Digest::of(output).ok()).is_some_and(|(a, b)| a == b)
            }
            Self::Schema(schema) => schema.check(output).is_ok(),
        }
    }
}

/// What was delivered.
#[derive(Clone, Copy)]
pub struct Delivery<'a> {
    /// The deliverable.
    pub deliverable: &'a Kept<Deliverable>,
    /// Its final receipt.
    pub usage: &'a Kept<UsageReceipt>,
    /// Its attestation, if there is one.
    pub attestation: Option<&'a Kept<ExecutionAttestation>>,
}

impl<'a> Delivery<'a> {
    /// The newest delivery of a log.
    #[must_use]
    pub fn of(view: &'a View) -> Option<Self> {
        let (deliverable, usage) = (view.deliverable()?, view.usage()?);
        Some(Self { deliverable, usage, attestation: view.attestation() })
    }
}

/// The metrics of a budget: name, limit ordered, what was used.
pub fn metrics<'a>(
    manifest: &'a TaskManifest,
    usage: &'a Usage,
) -> [(&'static str, Option<Count>, Option<Count>); 6] {
    let budget = &manifest.budget;
    [
        ("maxInputTokens", budget.max_input_tokens, usage.input_tokens),
        ("maxOutputTokens", budget.max_output_tokens, usage.output_tokens),
        ("maxTotalTokens", budget.max_total_tokens, usage.total_tokens),
        ("maxToolCalls", budget.max_tool_calls, usage.tool_calls),
        ("maxWallTimeMs", budget.max_wall_time_ms, usage.wall_time_ms),
        ("maxOutputBytes", budget.max_output_bytes, usage.output_bytes),
    ]
}

/// Runs every check over the newest delivery of `view`. `proxied_calls` is the requester's own count
/// of tool calls; the larger one counts.
///
/// # Errors
/// `ILLEGAL_TRANSITION` when nothing was delivered.
pub fn examine(view: &View, proxied_calls: u64) -> Result<Vec<Check>> {
    let nothing = || Error::new(Code::IllegalTransition, "nothing was delivered");
    let delivery = Delivery::of(view).ok_or_else(nothing)?;
    let contract = view.contract().ok_or_else(nothing)?;
    let manifest = &contract.manifest;
    let deliverable = &delivery.deliverable.object;
    let outcomes: [Result<()>; 7] = [
        signatures(&delivery),
        digests(&delivery, manifest),
        in_contract(view, &delivery),
        capabilities(view),
        budget(view, &delivery, manifest, proxied_calls),
        UserSchema::compile(&manifest.output_schema.0)
            .and_then(|schema| schema.check(&deliverable.output)),
        attestation(&delivery, manifest),
    ];
    let mut checks = Vec::new();
    for (name, outcome) in FIXED_CHECKS.into_iter().zip(outcomes) {
        checks.push(check(name, outcome)?);
    }
    for registered in registered(manifest) {
        let run = delivery.attestation.map(|kept| &kept.object);
        let outcome = Plan::read(registered).and_then(|plan| {
            if plan.run(&deliverable.output, run) {
                Ok(())
            } else {
                Err(Error::new(Code::CheckFailed, "the output does not pass"))
            }
        });
        checks.push(check(&registered.check_name, outcome)?);
    }
    Ok(checks)
}

fn check(name: &str, outcome: Result<()>) -> Result<Check> {
    let (code, detail) = match &outcome {
        Ok(()) => (None, Note::default()),
        Err(error) => (Some(error.code()), Note::lossy(error.message())),
    };
    Ok(Check { name: Word::parse(name)?, passed: outcome.is_ok(), code, detail })
}

fn signatures(delivery: &Delivery<'_>) -> Result<()> {
    delivery.deliverable.object.verify()?;
    delivery.usage.object.verify()?;
    delivery.attestation.map_or(Ok(()), |kept| kept.object.verify())
}

fn digests(delivery: &Delivery<'_>, manifest: &TaskManifest) -> Result<()> {
    let deliverable = &delivery.deliverable.object;
    let output = Digest::of(&deliverable.output)?;
    let wrong = |message: &str| Err(Error::new(Code::OutputDigestMismatch, message));
    if output != deliverable.output_digest {
        return wrong("the output is not what its digest says");
    }
    if deliverable.usage_receipt_digest != delivery.usage.digest
        || deliverable.attestation_digest != delivery.attestation.map(|kept| kept.digest)
    {
        return Err(Error::new(Code::DigestMismatch, "not the receipts that it names"));
    }
    let Some(run) = delivery.attestation.map(|kept| &kept.object) else { return Ok(()) };
    if run.input_digest != manifest.input_digest {
        return Err(Error::new(Code::DigestMismatch, "the run had another input"));
    }
    if run.output_digest != Some(output) {
        return wrong("the run had another output");
    }
    Ok(())
}

fn in_contract(view: &View, delivery: &Delivery<'_>) -> Result<()> {
    let contract = view.contract_digest();
    let runs = delivery.attestation.map(|kept| kept.object.contract_digest);
    let all = [
        Some(delivery.deliverable.object.contract_digest),
        Some(delivery.usage.object.contract_digest),
        runs.or(contract),
    ];
    if all.iter().any(|digest| *digest != contract) {
        return Err(Error::new(Code::DigestMismatch, "of another contract"));
    }
    match view.contract().map(|contract| contract.signatures.len()) {
        Some(2) => Ok(()),
        _ => Err(Error::new(Code::ContractNotCountersigned, "the contract has one signature")),
    }
}

fn capabilities(view: &View) -> Result<()> {
    view.grants().iter().try_for_each(|token| token.object.verify())
}

/// Whether usage and output are within what was ordered or raised.
fn budget(
    view: &View,
    delivery: &Delivery<'_>,
    manifest: &TaskManifest,
    proxied_calls: u64,
) -> Result<()> {
    let bytes = super::json::canonical(&delivery.deliverable.object.output)?.len();
    let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
    for (name, ordered, used) in metrics(manifest, &delivery.usage.object.usage) {
        let Some(limit) = view.limit(name, ordered) else { continue };
        let counted = match name {
            "maxToolCalls" => proxied_calls,
            "maxOutputBytes" => bytes,
            _ => 0,
        };
        // What was limited and could not be measured does not pass for nothing.
        let measured = used.map(Count::get);
        if measured.is_none() && counted == 0 && name != "maxToolCalls" && name != "maxOutputBytes"
        {
            let text = format!("{name} is limited, and the receipt does not say what was used");
            return Err(Error::new(Code::BudgetExceeded, text));
        }
        if measured.unwrap_or(0).max(counted) > limit {
            let text = format!("{name} is {limit}, more was used");
            return Err(Error::new(Code::BudgetExceeded, text));
        }
    }
    Ok(())
}

/// The attestation rule (design 10.2, S17).
fn attestation(delivery: &Delivery<'_>, manifest: &TaskManifest) -> Result<()> {
    let policy = &manifest.sandbox_policy;
    let Some(run) = delivery.attestation.map(|kept| &kept.object) else {
        if manifest.require_execution_attestation {
            return Err(Error::new(Code::AttestationMissing, "an attestation was asked for"));
        }
        return Ok(());
    };
    let downgrade = |message: &str| Err(Error::new(Code::IsolationDowngrade, message));
    if run.policy_digest != Digest::of(policy)? || run.requested_isolation != policy.isolation {
        return Err(Error::new(Code::DigestMismatch, "the run had another policy"));
    }
    if run.limits.isolation != run.effective_isolation {
        return downgrade("the limits are not those of the level that was applied");
    }
    if let Some((member, _)) = bounds(policy, &run.limits).iter().find(|(_, kept)| !kept) {
        let text = format!("limits/{member} is wider than the contract's");
        return Err(Error::new(Code::IsolationDowngrade, text));
    }
    if !succeeded(run, delivery, manifest) {
        let text = "the run did not end well, and yet there is an output";
        return Err(Error::new(Code::AdapterFailed, text));
    }
    if !manifest.require_execution_attestation
        || run.effective_isolation.is_at_least(policy.isolation)
    {
        return Ok(());
    }
    if policy.allow_subprocess_fallback
        && run.effective_isolation.is_at_least(Isolation::Subprocess)
    {
        return Ok(());
    }
    downgrade("kept apart less than was asked for")
}

/// What was applied against what the contract says: each bound, and whether it was kept. Level
/// `none` promises no numbers.
fn bounds(policy: &SandboxPolicy, applied: &SandboxPolicy) -> [(&'static str, bool); 6] {
    let listed = |host| policy.allow_hosts.contains(host);
    let within = |ordered: Count, applied_to: Count| {
        applied.isolation == Isolation::None || applied_to <= ordered
    };
    [
        ("network", applied.network == Network::None || policy.network == Network::Allowlist),
        ("allowHosts", applied.allow_hosts.iter().all(listed)),
        ("memoryMaxBytes", within(policy.memory_max_bytes, applied.memory_max_bytes)),
        ("pidsMax", within(policy.pids_max, applied.pids_max)),
        ("cpuTimeMaxMs", within(policy.cpu_time_max_ms, applied.cpu_time_max_ms)),
        ("diskMaxBytes", within(policy.disk_max_bytes, applied.disk_max_bytes)),
    ]
}

/// Whether the run ended as one does that has an output: with exit code 0, or with the code that the
/// manifest's own check judges. A server of adapter `mcp` answers before it ends, so however it is
/// stopped says nothing of its answer; that it ran does.
fn succeeded(run: &ExecutionAttestation, delivery: &Delivery<'_>, manifest: &TaskManifest) -> bool {
    if &*delivery.usage.object.adapter == "mcp" {
        return run.exit.kind != ExitKind::SpawnFailed;
    }
    let judged = registered(manifest).iter().any(|check| &*check.check_name == "exitCode");
    let good = if judged { run.exit.code.is_some() } else { run.exit.code == Some(0) };
    run.exit.kind == ExitKind::Exited && good
}

/// The signed report over the newest delivery of `view`.
///
/// # Errors
/// As [`examine`].
pub fn report(
    view: &View,
    proxied_calls: u64,
    key: &Secret,
    now: UnixMillis,
    entropy: &mut dyn Entropy,
) -> Result<VerificationReport> {
    let checks = examine(view, proxied_calls)?;
    let nothing = || Error::new(Code::IllegalTransition, "nothing was delivered");
    VerificationReport {
        report_id: ReportId::draw(entropy),
        task_id: view.task_id().clone(),
        contract_digest: view.contract_digest().ok_or_else(nothing)?,
        requester_did: key.did(),
        deliverable_digest: view.deliverable().ok_or_else(nothing)?.digest,
        passed: checks.iter().all(|check| check.passed),
        checks: Seq::new(checks)?,
        verified_at: Time::from(now),
        signature: Signature::blank(Role::Requester, key.did()),
    }
    .signed(key, now)
}
