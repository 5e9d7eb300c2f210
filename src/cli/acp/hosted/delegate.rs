//! `acp delegate`.

use std::collections::BTreeSet;
use std::io::Read as _;
use std::path::Path;
use std::process::ExitCode;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::calls;
use super::terminal::{Terminal, say};
use super::worker::{audit_plan, serve_at};
use super::{Place, Surroundings, form, protocol, stop_signals};
use crate::acp::code::Code;
use crate::acp::json::{canonical, parse};
use crate::acp::objects::Network;
use crate::acp::owner::Order;
use crate::acp::value::{Name, TaskId, Time};
use crate::api::acp::{AcpCall, AcpNews, Combine, DelegateMulti, DelegateTask, Work};
use crate::api::types::ApiError;
use crate::cli::acp::args::{DelegateArgs, GrantedTool, Multi};
use crate::cli::acp::{Failure, files};
use crate::cli::{exit, output};
use crate::codec::text::escape_untrusted;
use crate::daemon::acp::delegation;
use crate::daemon::acp::service::{self, Service};
use crate::daemon::acp::{Office, OfficeError, Tool, orders, owner_dir};
use crate::runtime::clock::unix_now;

/// Bytes of an input or a schema on the command line or in a file.
const MAX_JSON: usize = 2 << 20;

pub(super) fn run(
    args: &DelegateArgs,
    place: &Place,
    around: &Surroundings,
) -> Result<ExitCode, Failure> {
    check(args)?;
    let work = work(args)?;
    if let Some(out) = &args.out
        && out.symlink_metadata().is_ok()
    {
        return Err(files::FileError::Exists { path: out.clone() }.into());
    }
    match &args.key {
        Some(key) if args.parent.is_none() => here(args, work, key, place),
        _ => by_office(args, work, place, around),
    }
}

fn usage(text: impl Into<String>, todo: &str) -> Failure {
    Failure { error: ApiError::new("usage", text, todo), exit: exit::USAGE }
}

fn check(args: &DelegateArgs) -> Result<(), Failure> {
    match (args.multi, args.to.len()) {
        (None, 1) => Ok(()),
        (None, _) => Err(usage(
            "more than one worker, and nothing says how their results are combined",
            "add --multi race or --multi quorum, or name one worker",
        )),
        (Some(_), 2..=16) => Ok(()),
        (Some(_), _) => Err(usage("--multi takes 2 to 16 workers", "repeat --to for each worker")),
    }
}

/// What the arguments name wrongly, which shows only when the order is made, is usage as well.
fn misnamed(error: crate::acp::code::Error) -> Failure {
    let usage = matches!(
        error.code(),
        Code::BadField | Code::UnknownMember | Code::BadDid | Code::BadTime | Code::DuplicateWorker
    );
    let failure = protocol(error);
    Failure { exit: if usage { exit::USAGE } else { failure.exit }, ..failure }
}

/// JSON in place, in a file (`@FILE`), or on stdin (`-`).
fn read_json(name: &str, text: &str) -> Result<Value, Failure> {
    let bytes = match text.strip_prefix('@') {
        Some(path) => files::read(Path::new(path), MAX_JSON)
            .map_err(|error| Failure { exit: exit::USAGE, ..error.into() })?,
        None if text == "-" => {
            let mut bytes = zeroize::Zeroizing::new(Vec::new());
            let limit = u64::try_from(MAX_JSON).unwrap_or(u64::MAX).saturating_add(1);
            let read = std::io::stdin().lock().take(limit).read_to_end(&mut bytes);
            read.map_err(|error| usage(format!("stdin cannot be read: {error}"), "give JSON"))?;
            bytes
        }
        None => text.as_bytes().to_vec().into(),
    };
    parse(&bytes, MAX_JSON).map_err(|error| {
        let text = format!("{name} is no JSON: {error}");
        usage(text, "quote it for the shell, or put it into a file and give @FILE")
    })
}

fn work(args: &DelegateArgs) -> Result<Work, Failure> {
    let deadline = u64::try_from(args.deadline.as_millis()).unwrap_or(u64::MAX);
    let budget = args.budget.as_deref().map(|text| read_json("--budget", text)).transpose()?;
    let work = Work {
        relay: args.relay.clone(),
        title: (*args.title).to_owned(),
        description: (*args.description).to_owned(),
        input: read_json("--input", &args.input)?,
        input_schema: Some(read_json("--input-schema", &args.input_schema)?),
        output_schema: Some(read_json("--output-schema", &args.output_schema)?),
        deadline_at: Some(Time::from(unix_now().plus(deadline)).to_string()),
        budget,
        sandbox_policy: sandbox_policy(args),
        tools: args.tools.iter().map(|tool| tool.name.to_string()).collect(),
        tool_uses: args.tool_uses,
        redelegation: args.redelegation,
        parent_task_id: args.parent.as_ref().map(TaskId::to_string),
        auto_approve: args.auto_approve,
        wait_ms: None,
    };
    if args.multi == Some(Multi::Quorum)
        && work.output_schema.as_ref().is_some_and(orders::has_free_text)
    {
        say(
            "note: the output schema allows free text, which never agrees byte for byte; enums and \
             integers do",
        );
    }
    Ok(work)
}

/// The members that were given; the others have their defaults.
fn sandbox_policy(args: &DelegateArgs) -> Option<Value> {
    let isolation = args.isolation.map(|level| ("isolation", json!(level)));
    let hosts = (!args.allow_hosts.is_empty())
        .then(|| [("network", json!(Network::Allowlist)), ("allowHosts", json!(args.allow_hosts))]);
    let members: serde_json::Map<_, _> = isolation
        .into_iter()
        .chain(hosts.into_iter().flatten())
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    (!members.is_empty()).then_some(Value::Object(members))
}

fn combine(args: &DelegateArgs) -> Option<Combine> {
    args.multi.map(|multi| match multi {
        Multi::Race => Combine::Race,
        Multi::Quorum => Combine::Quorum,
    })
}

/// Through the daemon, or the office of `--key` that has the task of which this is a part. It goes on
/// with the task whatever becomes of this command.
fn by_office(
    args: &DelegateArgs,
    work: Work,
    place: &Place,
    around: &Surroundings,
) -> Result<ExitCode, Failure> {
    if args.audit.is_some() {
        return Err(usage(
            "--audit goes with --key",
            "the daemon keeps its tasks' logs; write one with: commsd acp task ID --audit FILE",
        ));
    }
    if let Some(tool) = args.tools.iter().find(|tool| tool.command.is_some()) {
        return Err(usage(
            format!(
                "--tool {} names a command, and none is run that is sent to an office",
                tool.name
            ),
            "a daemon's tools are in [acp-tools] of its configuration; those of a part of a task are its \
             requester's",
        ));
    }
    let work = Work { wait_ms: Some(crate::api::acp::MAX_WAIT_MS), ..work };
    let call = match combine(args) {
        None => AcpCall::DelegateTask(DelegateTask {
            to: args.to.first().cloned().unwrap_or_default(),
            work,
        }),
        Some(mode) => AcpCall::DelegateMulti(DelegateMulti {
            workers: args.to.clone(),
            mode,
            quorum_size: args.quorum_size.map(|size| u64::from(size.get())),
            work,
        }),
    };
    let answer = match &args.key {
        Some(key) => calls::ask(&calls::Whom::of(Some(key)), call, place, around)?,
        None => {
            let terminal = Terminal::of_daemon(around, args.progress);
            let mut begun = BTreeSet::new();
            let told = |news: AcpNews| {
                if let AcpNews::Moved { task_id, .. } = &news {
                    begun.insert(task_id.clone());
                }
                terminal.told(news);
            };
            match around.ask_until_stopped(call, told)? {
                Some(answer) => answer,
                None => return Err(interrupted(&begun)),
            }
        }
    };
    conclude(args, place, &answer)
}

/// The signal ends this command alone.
fn interrupted(begun: &BTreeSet<String>) -> Failure {
    let ids: Vec<&str> = begun.iter().map(String::as_str).collect();
    let (text, id) = match ids.first() {
        Some(first) => (format!("interrupted; the daemon goes on with {}", ids.join(", ")), *first),
        None => ("interrupted; if the daemon has begun the task, it goes on".to_owned(), "ID"),
    };
    let list = if ids.is_empty() { "`commsd acp tasks` lists it, " } else { "" };
    let todo = format!(
        "{list}`commsd acp task {id}` shows how it stands, `commsd acp cancel {id}` stops it"
    );
    Failure { error: ApiError::new("interrupted", text, todo), exit: exit::INTERRUPTED }
}

fn here(args: &DelegateArgs, work: Work, key: &Path, place: &Place) -> Result<ExitCode, Failure> {
    let mut options = place.office(key)?;
    options.relays = args.relay.iter().cloned().collect();
    options.endpoints = args.access.policy();
    options.form = form(args.receive);
    options.audit = audit_plan(args.audit.clone());
    options.tools = args.tools.iter().map(tool).collect::<Result<_, _>>()?;
    if let Some(path) = &options.audit.file
        && path.symlink_metadata().is_ok()
    {
        return Err(files::FileError::Exists { path: path.clone() }.into());
    }
    place.block_on(async {
        let cancel = stop_signals()?;
        let stop = CancellationToken::new();
        let dir = owner_dir(&place.state_dir, options.key.did());
        let transports = options.transports()?;
        let (office, task) = options.open(transports.clone(), stop.clone()).await?;
        let service =
            Service { office: office.clone(), transports, name: Name::lossy("a requester") };
        serve_at(&dir, service, &stop);
        let terminal = Terminal::new(&office, key, place, args.progress);
        let done = delegate(args, work, &office, &terminal, &cancel).await;
        stop.cancel();
        drop(office);
        let ended = task.await.map_err(OfficeError::from)?;
        let answer = done.map_err(misnamed)?;
        ended?;
        let code = conclude(args, place, &answer)?;
        Ok(if cancel.is_cancelled() { ExitCode::from(exit::INTERRUPTED) } else { code })
    })
}

/// A tool that this process runs.
fn tool(granted: &GrantedTool) -> Result<Tool, Failure> {
    let name = granted.name.clone();
    let todo = "give --tool 'RESOURCE:ACTION=COMMAND'";
    let Some(command) = &granted.command else {
        return Err(usage(format!("--tool {name} has no command"), todo));
    };
    Tool::new(name, command).map_err(|error| usage(error.message(), todo))
}

async fn delegate(
    args: &DelegateArgs,
    work: Work,
    office: &Office,
    terminal: &Terminal,
    cancel: &CancellationToken,
) -> crate::acp::code::Result<Value> {
    let relays: Vec<String> = args.relay.iter().cloned().collect();
    let to = args.to.clone();
    let orders: Vec<Order> = office
        .look(move |owner| {
            let now = unix_now();
            let named = to.iter().map(|to| {
                orders::order(&work, orders::worker(owner, to, &relays, now)?, None, now)
            });
            named.collect()
        })
        .await?;
    let Some(mode) = combine(args) else {
        let Some(order) = orders.into_iter().next() else { return Ok(Value::Null) };
        let standing = delegation::delegate(office, order, terminal, cancel).await?;
        return service::delegated(office, &standing).await;
    };
    let quorum = (mode == Combine::Quorum).then(|| {
        let size = args.quorum_size.map(|size| usize::from(size.get()));
        size.unwrap_or_else(|| delegation::default_quorum(orders.len()))
    });
    let result = delegation::delegate_group(office, orders, quorum, terminal, cancel).await?;
    Ok(service::group(&result, mode))
}

/// Prints what came of it, writes the result, and says by the exit code whether it is good.
fn conclude(args: &DelegateArgs, place: &Place, answer: &Value) -> Result<ExitCode, Failure> {
    let status = answer.get("status").and_then(Value::as_str).unwrap_or_default();
    let settled = status == "SETTLED";
    let deliverable = answer.get("deliverable").filter(|value| !value.is_null());
    if let (Some(out), Some(deliverable), true) = (&args.out, deliverable, settled) {
        let mut bytes = canonical(deliverable).map_err(protocol)?;
        bytes.push(b'\n');
        files::create(out, &bytes)?;
    }
    let said =
        if place.json { output::json_line(answer) } else { text(answer, args.out.is_none()) };
    let good = output::write_out(&said).is_ok() && settled;
    Ok(ExitCode::from(if good { exit::DONE } else { exit::FAILED }))
}

/// What came of it, for people.
fn text(answer: &Value, with_result: bool) -> String {
    let word = |value: &Value, name: &str| {
        escape_untrusted(value.get(name).and_then(Value::as_str).unwrap_or_default())
    };
    let mut lines = vec![format!("{} {}", word(answer, "status"), word(answer, "taskId"))];
    if let Some(failure) = answer.get("failure").filter(|failure| !failure.is_null()) {
        lines.push(format!("{}: {}", word(failure, "code"), word(failure, "message")));
    }
    if let Some(audit) = answer.get("audit").filter(|audit| !audit.is_null()) {
        let entries = audit.get("entries").and_then(Value::as_u64).unwrap_or_default();
        let head = word(audit, "head");
        lines.push(format!("audit {} {entries} entries, head {head}", word(audit, "status")));
    }
    for task in answer.get("receipts").and_then(Value::as_array).into_iter().flatten() {
        let (status, peer) = (word(task, "status"), word(task, "peer"));
        lines.push(format!("  {} {status} {peer}", word(task, "taskId")));
    }
    // What was not taken is no result; the task shows it.
    let with_result = with_result && answer.get("status").is_some_and(|word| word == "SETTLED");
    if let Some(result) = answer.get("deliverable").filter(|value| with_result && !value.is_null())
    {
        // JSON has escapes for control characters of its own; the rest of Unicode is made harmless.
        let result = serde_json::to_string_pretty(result).unwrap_or_default();
        lines.extend(result.lines().map(output::printable));
    }
    lines.iter().map(|line| format!("{}\n", line.trim_end())).collect()
}
