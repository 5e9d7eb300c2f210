//! The protocol at work, offline, in four scenarios, each checked (`acp demo`): an honest task; a
//! tampered result; work that goes over its bounds or uses what was taken back; a weaker box than was
//! ordered. Owners, stores, runs and files are the real ones; only the network is missing.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::delegation::{self, Standing, Watcher};
use super::{AuditPlan, Local, Office, OfficeError, OfficeOptions, OfficeTask, orders};
use crate::acp::audit::{Anchor, Status, read_jsonl, verify};
use crate::acp::code::{Code, Error, Result};
use crate::acp::did::Secret;
use crate::acp::gateway::Admission;
use crate::acp::json::canonical;
use crate::acp::objects::{
    Action as Verb, Capability, Exit, ExitKind, Gate, Isolation, Resource, RevocationTarget,
    Runtime, State, TrustAnchor, Usage, UsageSource,
};
use crate::acp::owner::{
    Action, Grant, Order, Outcome, Owner, Profile, Question, Route, ToolRequest, ask_policy,
};
use crate::acp::run::{Ended, Ran, RunFacts};
use crate::acp::value::{Digest, Name, Seq, Word};
use crate::api::acp::Work;
use crate::identity::entropy::OsEntropy;
use crate::runtime::adapter::{AdapterKind, AdapterOptions};
use crate::runtime::clock::unix_now;

/// What a scenario showed.
#[derive(Clone, Debug)]
pub struct Shown {
    /// What was tried.
    pub what: &'static str,
    /// What was to come of it.
    pub expected: &'static str,
    /// What came of it.
    pub found: String,
}

impl Shown {
    /// Whether it came as expected.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.found == self.expected
    }
}

/// One scenario.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Its title.
    pub title: &'static str,
    /// What it showed.
    pub shown: Vec<Shown>,
}

struct Unwatched;

impl Watcher for Unwatched {
    fn moved(&self, _: &Standing) {}
    fn asked(&self, _: &Question) {}
}

/// An office that is closed in order.
struct Open {
    office: Office,
    task: OfficeTask,
    stop: CancellationToken,
}

impl Open {
    async fn new(options: OfficeOptions) -> std::result::Result<Self, OfficeError> {
        let stop = CancellationToken::new();
        let transports = options.transports()?;
        let (office, task) = options.open(transports, stop.clone()).await?;
        Ok(Self { office, task, stop })
    }

    async fn close(self) -> std::result::Result<(), OfficeError> {
        self.office.flushed().await;
        self.stop.cancel();
        drop(self.office);
        self.task.await?
    }
}

/// Everybody in the demo.
struct Stage<'a> {
    state_dir: &'a Path,
    audit_dir: &'a Path,
    executable: Option<PathBuf>,
    local: Local,
    entropy: OsEntropy,
}

impl Stage<'_> {
    fn requester(&mut self, audit: Option<&str>) -> Result<OfficeOptions> {
        let key = Secret::draw(&mut self.entropy)?;
        let mut options = OfficeOptions::new(key, self.state_dir.to_owned());
        options.local = self.local.clone();
        options.audit =
            AuditPlan { file: audit.map(|name| self.audit_dir.join(name)), redact: false };
        Ok(options)
    }

    /// A worker that accepts everything and runs `cmd`.
    fn worker(&mut self, cmd: &str, audit: Option<&str>) -> Result<OfficeOptions> {
        let mut options = self.requester(audit)?;
        options.auto = vec![Gate::ContractAcceptance];
        options.admission = Admission::Anyone;
        let mut adapter = AdapterOptions::new(AdapterKind::Command, PathBuf::new());
        adapter.cmd = Some(cmd.to_owned());
        adapter.isolation = Some(Isolation::Subprocess);
        adapter.sandbox.executable.clone_from(&self.executable);
        options.work = Some((adapter, 1));
        Ok(options)
    }
}

fn work() -> Work {
    Work {
        relay: None,
        title: "JSON report".into(),
        description: "Return the supplied JSON report".into(),
        input: json!({ "summary": "Hello from Alice", "findings": [] }),
        input_schema: None,
        output_schema: Some(json!({ "type": "object", "required": ["summary", "findings"] })),
        deadline_at: None,
        budget: None,
        sandbox_policy: Some(json!({ "isolation": "subprocess" })),
        tools: Vec::new(),
        tool_uses: None,
        redelegation: None,
        parent_task_id: None,
        auto_approve: true,
        wait_ms: None,
    }
}

fn order(worker: &Office, work: &Work) -> Result<Order> {
    let worker = orders::Worker { did: worker.did(), key: None, invite: None, route: Route::Local };
    orders::order(work, worker, None, unix_now())
}

async fn delegate(from: &Office, order: Order) -> Result<Standing> {
    delegation::delegate(from, order, &Unwatched, &CancellationToken::new()).await
}

/// The state, and why where it is a bad one.
fn told(standing: &Standing) -> String {
    match &standing.failure {
        Some((code, _)) => format!("{} {}", standing.status(), code.as_str()),
        None => standing.status().to_owned(),
    }
}

/// Runs the four scenarios. `state_dir` is thrown away afterwards; alice.jsonl, bob.jsonl and
/// trust-anchor.json of the first one stay in `audit_dir` (decision 53). `executable` is the program
/// that supervises runs, this one by default.
///
/// # Errors
/// What keeps a scenario from being tried; what goes otherwise than it should is in its [`Shown`].
pub async fn run(
    state_dir: &Path,
    audit_dir: &Path,
    executable: Option<PathBuf>,
) -> std::result::Result<Vec<Scenario>, OfficeError> {
    let entropy = OsEntropy::open()?;
    let local = Local::default();
    let mut stage = Stage { state_dir, audit_dir, executable, local, entropy };
    Ok(vec![
        honest(&mut stage).await?,
        tampered(&mut stage).await?,
        out_of_bounds(&mut stage).await?,
        downgraded(&mut stage).await?,
    ])
}

fn status_of(path: &Path, anchor: Option<&Anchor>) -> std::result::Result<String, OfficeError> {
    let bytes = std::fs::read(path)
        .map_err(|error| OfficeError::Audit { path: path.to_owned(), reason: error.to_string() })?;
    Ok(match read_jsonl(&bytes) {
        Ok(log) => status(verify(&log, anchor, unix_now()).status),
        Err(error) => format!("INVALID {}", error.code().as_str()),
    })
}

fn status(status: Status) -> String {
    let word = serde_json::to_value(status).unwrap_or_default();
    word.as_str().unwrap_or_default().to_owned()
}

async fn honest(stage: &mut Stage<'_>) -> std::result::Result<Scenario, OfficeError> {
    let bob = Open::new(stage.worker("cat", Some("bob.jsonl"))?).await?;
    let alice = Open::new(stage.requester(Some("alice.jsonl"))?).await?;
    let standing = delegate(&alice.office, order(&bob.office, &work())?).await?;
    let task = standing.task;
    let anchor = alice
        .office
        .look(move |owner| {
            let log = owner.task(&task);
            let view = log.ok_or_else(|| Error::new(Code::UnknownTask, "no task"))?.view();
            Ok(TrustAnchor {
                task_id: view.task_id().clone(),
                actors: view.genesis().actors,
                head: view.head(),
            })
        })
        .await?;
    alice.close().await?;
    bob.close().await?;
    let path = stage.audit_dir.join("trust-anchor.json");
    let mut text = canonical(&anchor)?;
    text.push(b'\n');
    std::fs::write(&path, text)
        .map_err(|error| OfficeError::Audit { path, reason: error.to_string() })?;
    let anchor = Anchor::Trust(anchor);
    let [alices, bobs] = ["alice.jsonl", "bob.jsonl"].map(|name| stage.audit_dir.join(name));
    Ok(Scenario {
        title: "an honest task is settled, and both sides hold the same log",
        shown: vec![
            Shown { what: "the task", expected: "SETTLED", found: told(&standing) },
            Shown {
                what: "Alice's log, against the anchor",
                expected: "VALID",
                found: status_of(&alices, Some(&anchor))?,
            },
            Shown {
                what: "Bob's log, against the anchor",
                expected: "VALID",
                found: status_of(&bobs, Some(&anchor))?,
            },
        ],
    })
}

async fn tampered(stage: &mut Stage<'_>) -> std::result::Result<Scenario, OfficeError> {
    let path = stage.audit_dir.join("alice.jsonl");
    let log = std::fs::read_to_string(&path)
        .map_err(|error| OfficeError::Audit { path, reason: error.to_string() })?;
    let changed = log.replace("Hello from Alice", "Hello from Malice");
    let found = match read_jsonl(changed.as_bytes()) {
        Ok(log) => status(verify(&log, None, unix_now()).status),
        Err(error) => format!("INVALID {}", error.code().as_str()),
    };
    let file =
        Shown { what: "one word of the log changed", expected: "INVALID DIGEST_MISMATCH", found };

    let mut pair = Pair::new(stage)?;
    let flipped = pair.flipped_envelope(&work())?;
    let mallory = Open::new(stage.worker("echo '{\"findings\":[]}'", None)?).await?;
    let alice = Open::new(stage.requester(None)?).await?;
    let standing = delegate(&alice.office, order(&mallory.office, &work())?).await?;
    alice.close().await?;
    mallory.close().await?;
    Ok(Scenario {
        title: "a tampered result is refused",
        shown: vec![
            file,
            Shown {
                what: "one byte of an envelope changed on its way",
                expected: "BAD_SIGNATURE",
                found: flipped,
            },
            Shown {
                what: "a result that is not what was ordered",
                expected: "DISPUTED SCHEMA_MISMATCH",
                found: told(&standing),
            },
        ],
    })
}

async fn out_of_bounds(stage: &mut Stage<'_>) -> std::result::Result<Scenario, OfficeError> {
    let bob = Open::new(stage.worker("cat", None)?).await?;
    let alice = Open::new(stage.requester(None)?).await?;
    let small = Work { budget: Some(json!({ "maxOutputBytes": 16 })), ..work() };
    let over = delegate(&alice.office, order(&bob.office, &small)?).await?;

    let terms = crate::acp::owner::InviteTerms {
        name: Name::lossy("Bob"),
        relay_urls: vec![crate::acp::value::UrlText::parse("http://127.0.0.1:8787")?],
        encryption_key: None,
        skills: Vec::new(),
        max_uses: 1,
        life_ms: 3_600_000,
    };
    let invite = bob.office.act(move |o, now, entropy| o.invite(terms, now, entropy)).await?;
    let id = invite.invite_id.to_string();
    bob.office
        .act(move |o, now, entropy| o.revoke(RevocationTarget::Invite, &id, "", now, entropy))
        .await?;
    let invited = Order { invite: Some(invite.invite_id), ..order(&bob.office, &work())? };
    let uninvited = delegate(&alice.office, invited).await?;
    bob.close().await?;

    alice.close().await?;

    let bob = Open::new(stage.worker("sleep 60", None)?).await?;
    // This owner lets its tools be used without being asked each time: the token is what is wrong.
    let mut options = stage.requester(None)?;
    options.auto = vec![Gate::ExternalSend];
    let alice = Open::new(options).await?;
    let (code, cancelled) = revoked_token(&alice.office, &bob.office).await?;
    alice.close().await?;
    bob.close().await?;
    Ok(Scenario {
        title: "what goes over its bounds, or uses what was taken back, is refused",
        shown: vec![
            Shown {
                what: "a result larger than the budget",
                expected: "FAILED OUTPUT_TOO_LARGE",
                found: told(&over),
            },
            Shown {
                what: "an invite that was taken back",
                expected: "REJECTED INVITE_REVOKED",
                found: told(&uninvited),
            },
            Shown {
                what: "a tool with a token that was taken back",
                expected: "TOKEN_REVOKED",
                found: code,
            },
            Shown {
                what: "the task, cancelled while its work runs",
                expected: "CANCELLED CANCELLED",
                found: cancelled,
            },
        ],
    })
}

/// A worker asks for a tool whose token its requester has taken back; the task is then cancelled.
async fn revoked_token(alice: &Office, bob: &Office) -> Result<(String, String)> {
    let capability = Capability {
        resource: Resource::parse("mcp:docs/**")?,
        actions: Seq::new(vec![Verb::parse("read")?])?,
        args_schemas: Seq::default(),
        max_bytes_per_use: None,
    };
    let grant = Grant { capabilities: vec![capability], max_uses: 5, max_depth: 0 };
    let granted = Order { grants: vec![grant], ..order(bob, &work())? };
    let mut told = bob.watch();
    let (task, token) = alice
        .act(move |owner, now, entropy| {
            let (task, _, out) = owner.order(granted, now, entropy)?;
            let log = owner.task(&task);
            let tokens = log.map(|log| log.objects().values()).into_iter().flatten();
            let mut ids = tokens.filter_map(|object| object.get("tokenId")?.as_str());
            let id = ids.next().unwrap_or_default().to_owned();
            Ok(((task, id), out))
        })
        .await?;
    loop {
        let state = bob.look(move |o| Ok(o.task(&task).and_then(|log| log.view().state()))).await?;
        if state == Some(State::InProgress) {
            break;
        }
        // Every step is told; a told thing that was missed is found by looking.
        let _ = told.recv().await;
    }
    alice
        .act(move |o, now, entropy| {
            o.revoke(RevocationTarget::Capability, &token, "", now, entropy)
        })
        .await?;
    let request = ToolRequest {
        call_id: None,
        resource: Resource::parse("mcp:docs/a")?,
        action: Verb::parse("read")?,
        arguments: json!({}),
    };
    let code = match bob.use_tool(task, request).await {
        Ok(_) => "allowed".to_owned(),
        Err(error) => error.code().as_str().to_owned(),
    };
    let cancel = move |o: &mut Owner, now, entropy: &mut dyn crate::identity::entropy::Entropy| {
        o.cancel(&task, "the demo is over", now, entropy).map(|out| ((), out))
    };
    alice.act(cancel).await?;
    let mut told = alice.watch();
    loop {
        let standing = alice.look(move |owner| Standing::of(owner, &task)).await?;
        if standing.over {
            return Ok((code, self::told(&standing)));
        }
        let _ = told.recv().await;
    }
}

async fn downgraded(stage: &mut Stage<'_>) -> std::result::Result<Scenario, OfficeError> {
    let bob = Open::new(stage.worker("cat", None)?).await?;
    let alice = Open::new(stage.requester(None)?).await?;
    let strict = Work { sandbox_policy: Some(json!({ "isolation": "oci" })), ..work() };
    let honest = delegate(&alice.office, order(&bob.office, &strict)?).await?;
    alice.close().await?;
    bob.close().await?;
    let lied = Pair::new(stage)?.lies_about_its_box(&strict)?;
    Ok(Scenario {
        title: "a weaker box than was ordered is refused",
        shown: vec![
            Shown {
                what: "a worker without containers",
                expected: "REJECTED ISOLATION_UNAVAILABLE",
                found: told(&honest),
            },
            Shown {
                what: "a worker that promises a container and uses none",
                expected: "DISPUTED ISOLATION_DOWNGRADE",
                found: lied,
            },
        ],
    })
}

/// Two owners without offices: for what no office would do.
struct Pair {
    owners: [Owner; 2],
    entropy: OsEntropy,
}

impl Pair {
    fn new(stage: &mut Stage<'_>) -> std::result::Result<Self, OfficeError> {
        let profile = Profile {
            adapter: Word::parse("command")?,
            levels: vec![Isolation::Oci],
            levels_with_hosts: Vec::new(),
            foreign_code: false,
            max_runs: 1,
        };
        let mut owner = |auto: &[Gate], profile| -> Result<Owner> {
            let key = Secret::draw(&mut stage.entropy)?;
            let policy = ask_policy(key.did(), auto, &[], unix_now());
            Ok(Owner::new(key, None, policy, profile))
        };
        let alice = owner(&[], None)?;
        let mut mallory = owner(&[Gate::ContractAcceptance], Some(profile))?;
        mallory.admit(Admission::Anyone);
        Ok(Self { owners: [alice, mallory], entropy: OsEntropy::open()? })
    }

    fn order(&mut self, work: &Work) -> Result<(Digest, Outcome)> {
        let [alice, mallory] = &mut self.owners;
        let worker =
            orders::Worker { did: mallory.did(), key: None, invite: None, route: Route::Local };
        let now = unix_now();
        let order = orders::order(work, worker, None, now)?;
        let (task, _, out) = alice.order(order, now, &mut self.entropy)?;
        Ok((task, out))
    }

    fn flipped_envelope(&mut self, work: &Work) -> Result<String> {
        let (_, out) = self.order(work)?;
        let [_, mallory] = &mut self.owners;
        let Some(send) = out.sends.into_iter().next() else { return Ok("no envelope".into()) };
        let mut envelope = send.envelope;
        if let Some(byte) = envelope.ciphertext.0.first_mut() {
            *byte ^= 1;
        }
        let bytes = canonical(&envelope)?;
        Ok(match mallory.receive(&bytes, &Route::Local, unix_now(), &mut self.entropy) {
            Ok(_) => "accepted".to_owned(),
            Err(error) => error.code().as_str().to_owned(),
        })
    }

    /// Mallory's run has a weaker box than it promised; its attestation says so, or nothing would be
    /// attested.
    fn lies_about_its_box(&mut self, work: &Work) -> Result<String> {
        let (task, out) = self.order(work)?;
        let mut mail: std::collections::VecDeque<_> = out.sends.into();
        while let Some(send) = mail.pop_front() {
            let bytes = canonical(&send.envelope)?;
            let to = usize::from(send.envelope.to != self.owners[0].did());
            let now = unix_now();
            let owner = &mut self.owners[to];
            let mut out = owner.receive(&bytes, &Route::Local, now, &mut self.entropy)?;
            for action in std::mem::take(&mut out.actions) {
                if let Action::Run { task, job } = action {
                    let limits = crate::acp::objects::SandboxPolicy {
                        isolation: Isolation::Subprocess,
                        ..job.policy.clone()
                    };
                    let run = RunFacts {
                        effective: Isolation::Subprocess,
                        runtime: Runtime {
                            name: Name::lossy("commsd"),
                            version: Name::lossy("demo"),
                            image_digest: None,
                        },
                        limits,
                        exit: Exit { kind: ExitKind::Exited, code: Some(0), signal: None },
                        stderr_digest: None,
                        denials: Vec::new(),
                    };
                    let ran = Ran {
                        complaint: None,
                        ended: Ended::Output(job.input.clone()),
                        usage: Usage::unmeasured(),
                        source: UsageSource::Metered,
                        model: None,
                        started_at: now,
                        ended_at: now,
                        run,
                    };
                    out.append(owner.run_ended(&task, ran, now, &mut self.entropy)?);
                }
            }
            mail.extend(out.sends);
        }
        Standing::of(&self.owners[0], &task).map(|standing| told(&standing))
    }
}

/// The result of the demo for programs.
#[must_use]
pub fn as_json(scenarios: &[Scenario]) -> Value {
    let shown = |shown: &Shown| {
        json!({
            "what": shown.what, "expected": shown.expected, "found": shown.found,
            "good": shown.is_good(),
        })
    };
    Value::Array(
        scenarios
            .iter()
            .map(|scenario| {
                json!({
                    "title": scenario.title,
                    "shown": scenario.shown.iter().map(shown).collect::<Vec<_>>(),
                })
            })
            .collect(),
    )
}
