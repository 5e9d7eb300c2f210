//! `acp worker start`.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use super::terminal::{Terminal, say};
use super::{Place, form, protocol, stop_signals};
use crate::acp::gateway::Admission;
use crate::acp::objects::Gate;
use crate::acp::value::{Name, Prose, UrlText};
use crate::api::types::ApiError;
use crate::cli::acp::Failure;
use crate::cli::acp::args::{Adapter, ApiStyle, WorkerStartArgs};
use crate::cli::{exit, output};
use crate::daemon::acp::OfficeError;
use crate::daemon::acp::service::{self, Service};
use crate::daemon::acp::worker::{self, Introduction};
use crate::daemon::acp::{AuditPlan, socket};
use crate::runtime::adapter::{AdapterKind, AdapterOptions, ApiStyle as Style, HostKeys};

/// Runs at one time.
const MAX_RUNS: usize = 4;

/// JavaScript that gives its input back: what the quick start does.
const ECHO: &str = "return input;";

pub(super) fn run(args: &WorkerStartArgs, place: &Place) -> Result<ExitCode, Failure> {
    let Some(key) = &args.key else { return Err(needs_key("worker start")) };
    let mut options = place.office(key)?;
    options.relays.clone_from(&args.relays);
    options.endpoints = args.access.policy();
    options.form = form(args.receive);
    options.admission = Admission::Invited;
    if args.auto_accept {
        options.auto.push(Gate::ContractAcceptance);
    }
    options.work = Some((adapter(args), MAX_RUNS));
    options.audit = audit_plan(args.audit.clone());
    let name = match &args.name {
        Some(name) => name.clone(),
        None => Name::lossy("a commsd worker"),
    };
    let introduction = Introduction {
        name: name.clone(),
        description: Prose::default(),
        skills: args.skills.clone(),
        relay_urls: args
            .relays
            .iter()
            .map(|url| UrlText::parse(url))
            .collect::<Result<_, _>>()
            .map_err(|error| Failure { exit: exit::USAGE, ..error.into() })?,
        max_uses: args.max_uses,
        life_ms: u64::try_from(args.expires_in.as_millis()).unwrap_or(u64::MAX),
    };
    // It waits for days: that its relay is away is worth a line.
    place.block_on_and_tell("warn", async {
        let stop = stop_signals()?;
        let dir = crate::daemon::acp::owner_dir(&place.state_dir, options.key.did());
        let transports = options.transports()?;
        let (office, task) = options.open(transports.clone(), stop.clone()).await?;
        let service = Service { office: office.clone(), transports: transports.clone(), name };
        serve_at(&dir, service, &stop);
        let (_, text) = worker::invite(&office, &introduction).await.map_err(protocol)?;
        let mut stdout = std::io::stdout();
        let printed = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
        if printed.is_err() {
            stop.cancel();
            let todo = "give stdout somewhere to go: the invite is all that is printed there";
            let error = ApiError::new("output", "the invite cannot be printed", todo);
            return Err(Failure { error, exit: exit::FAILED });
        }
        say(&format!("{} waits for tasks by {}", office.did(), args.relays.join(", ")));
        tokio::spawn(worker::keep_card_up(office.clone(), transports, introduction, stop.clone()));
        let terminal = Terminal::new(&office, key, place, true);
        let mut task = task;
        let followed = tokio::select! {
            followed = worker::follow(&office, args.once, Arc::new(terminal), &stop) => followed,
            // It cannot store any more, and says why.
            ended = &mut task => {
                ended.map_err(OfficeError::from)??;
                return Err(OfficeError::Closed.into());
            }
        };
        let interrupted = stop.is_cancelled();
        stop.cancel();
        drop(office);
        task.await.map_err(OfficeError::from)??;
        match followed.map_err(protocol)? {
            Some(standing) => {
                if place.json {
                    // What was done is done; a reader that has gone changes nothing of it.
                    let _ = output::write_out(&output::json_line(&service::detailed(&standing)));
                }
                Ok(match standing.status() {
                    "SETTLED" => ExitCode::SUCCESS,
                    _ => ExitCode::from(exit::FAILED),
                })
            }
            None if interrupted => Ok(ExitCode::SUCCESS),
            None => Ok(ExitCode::from(exit::FAILED)),
        }
    })
}

/// Lets the owner ask this office from another terminal. Without it the office works all the same.
pub(super) fn serve_at(
    dir: &std::path::Path,
    service: Service,
    stop: &tokio_util::sync::CancellationToken,
) {
    if let Err(error) = socket::serve(dir, service, stop.clone()) {
        say(&format!("tasks cannot be listed or answered from elsewhere: {error}"));
    }
}

pub(super) fn needs_key(command: &str) -> Failure {
    let todo = "give the owner's key with --key FILE (commsd acp keygen FILE makes one)";
    let text = format!("acp {command} needs the owner's key");
    Failure { error: ApiError::new("acp_key", text, todo), exit: exit::USAGE }
}

/// A directory takes a file for each task.
pub(super) fn audit_plan(path: Option<PathBuf>) -> AuditPlan {
    let file = path.map(|path| if path.is_dir() { path.join("audit.jsonl") } else { path });
    AuditPlan { file, redact: false }
}

fn adapter(args: &WorkerStartArgs) -> AdapterOptions {
    let kind = match args.adapter {
        Adapter::Command => AdapterKind::Command,
        Adapter::Claude => AdapterKind::Claude,
        Adapter::Codex => AdapterKind::Codex,
        Adapter::Openai => AdapterKind::Openai,
        Adapter::Mcp => AdapterKind::Mcp,
        Adapter::Sandbox => AdapterKind::Sandbox,
    };
    let echo = (kind == AdapterKind::Sandbox).then(|| ECHO.to_owned());
    AdapterOptions {
        cmd: args.cmd.clone().or(echo),
        tool: args.tool.as_ref().map(|tool| (**tool).to_owned()),
        model: args.model.as_ref().map(|model| (**model).to_owned()),
        endpoint: args.endpoint.clone(),
        api_style: match args.api_style {
            ApiStyle::Openai => Style::Openai,
            ApiStyle::Anthropic => Style::Anthropic,
        },
        isolation: args.isolation,
        keys: HostKeys::from_env(),
        // The office has its own place for runs.
        ..AdapterOptions::new(kind, PathBuf::new())
    }
}
