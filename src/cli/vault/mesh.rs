//! Vaults over the mesh: sharing, asking for permission, and commands on somebody else's vault.
//! Requests to the daemon, unlike everything else of `commsd vault`.

use std::io::{self, IsTerminal as _};
use std::process::ExitCode;

use super::{NotRun, Opt, PAYLOAD, Read, payload_bytes, read, value};
use crate::api::client::Client;
use crate::api::client::vault::MAX_ANSWER;
use crate::api::types::{
    ApiError, Bounded, GrantSecs, Label, MAX_TEXT_BYTES, PermissionStatus, Time, VaultCallParams,
    VaultDelegateParams, VaultMode, VaultOp, VaultPermission, VaultRequestParams,
    VaultRevokeParams, VaultShare, VaultShareParams, VaultShares, VaultSharesParams,
    VaultUnshareParams, WaitSecs,
};
use crate::cli::args::AsAgent;
use crate::cli::client::{Failure, PROGRAM, Session, now};
use crate::cli::output::{self, fields, short, table};
use crate::cli::{Endpoint, drive, exit};
use crate::vault::VaultError;
use crate::vault::plan::search::DEFAULT_LIMIT;
use crate::vault::plan::{json, payload};

/// Bytes of a payload that goes over the mesh; the daemon takes no more.
const MAX_PAYLOAD: usize = 1024 * 1024;
/// Who acts without `--as`.
const OPERATOR: &str = "operator";

pub(super) const AT: Opt = value("--at");
pub(super) const AS: Opt = value("--as");
const NAME: Opt = value("--name");
const WAIT: Opt = value("--wait");
const FOR: Opt = value("--for");
const DELEGATIONS: Opt = value("--delegations");
const READ: Opt = Opt { name: "--read", takes_value: false };
const WRITE: Opt = Opt { name: "--write", takes_value: false };
const JSON: Opt = Opt { name: "--json", takes_value: false };

/// What is asked of the daemon.
#[derive(Debug)]
pub(super) struct Asked {
    agent: Label,
    json: bool,
    what: What,
}

#[derive(Debug)]
enum What {
    Share { path: String, name: String, mode: VaultMode },
    Unshare(String),
    Shares,
    Revoke { name: String, agent: Option<String> },
    Request { at: String, mode: VaultMode, wait: Option<WaitSecs>, lasts: Option<GrantSecs> },
    Delegate { params: VaultDelegateParams, lasts: Option<GrantSecs> },
    Call { params: VaultCallParams, payload: Option<String> },
}

/// Reads what stands behind a command that is one of these; `None` for all others.
pub(super) fn parse(
    globals: &Read,
    command: &str,
    rest: &[String],
) -> Result<Option<Asked>, NotRun> {
    let (at, acting) = (globals.last(AT), globals.last(AS));
    let (options, least, most): (&[Opt], usize, usize) = match command {
        "share" => (&[NAME, READ, WRITE, JSON], 1, 1),
        "unshare" => (&[JSON], 1, 1),
        "shares" => (&[JSON], 0, 0),
        "revoke" => (&[JSON], 1, 2),
        "request" => (&[READ, WRITE, WAIT, FOR, AS, JSON], 1, 1),
        "delegate" => (&[READ, WRITE, FOR, DELEGATIONS, AS, JSON], 2, 2),
        _ if at.is_none() && acting.is_none() => return Ok(None),
        _ if at.is_none() => return Err(usage(format!("--as needs --at with {command}"))),
        "inspect" | "status" => (&[super::FORMAT], 0, 0),
        "index" => (&[], 0, 0),
        "page" | "hash" => (&[], 1, 1),
        "search" => (&[super::LIMIT], 1, 1),
        "append" | "upsert" => (&[PAYLOAD], 0, 0),
        "end" => (&[PAYLOAD, super::CONFIRM], 0, 0),
        other => return Err(usage(format!("there is no command '{other}' with --at"))),
    };
    let options: Vec<Opt> = options.iter().copied().chain([super::HELP_OPTION]).collect();
    let (mut args, _) = read(rest, &options, false)?;
    if args.positional.len() < least {
        let what = if least > 1 { "two arguments" } else { "an argument" };
        return Err(usage(format!("{command} needs {what}")));
    }
    if let Some(extra) = args.positional.get(most) {
        return Err(usage(format!("{command} takes no argument '{extra}'")));
    }
    let said = |option: Opt| args.last(option).is_some();
    let mode = match (said(READ), said(WRITE)) {
        (true, true) => return Err(usage("give --read or --write".into())),
        (_, true) => VaultMode::Write,
        _ => VaultMode::Read,
    };
    let agent = args.last(AS).or(acting).unwrap_or(OPERATOR);
    let agent = agent.parse().map_err(|what: String| usage(format!("--as: {what}")))?;
    let json = said(JSON);
    let positional = std::mem::take(&mut args.positional);
    let first = positional.first().cloned().unwrap_or_default();
    let what = match command {
        "share" => {
            let Some(name) = args.last(NAME).map(str::to_owned) else {
                return Err(usage("share needs --name".into()));
            };
            What::Share { path: first, name, mode }
        }
        "unshare" => What::Unshare(first),
        "shares" => What::Shares,
        "revoke" => What::Revoke { name: first, agent: positional.get(1).cloned() },
        "request" => What::Request {
            at: first,
            mode,
            wait: bounded(&args, WAIT)?,
            lasts: bounded(&args, FOR)?,
        },
        "delegate" => What::Delegate {
            params: VaultDelegateParams {
                at: first,
                agent: positional.get(1).cloned().unwrap_or_default(),
                mode: Some(mode),
                expires: None,
                delegations_remaining: args
                    .last(DELEGATIONS)
                    .map(|text| text.parse())
                    .transpose()
                    .map_err(|_| usage("--delegations needs a whole number".into()))?,
            },
            lasts: bounded(&args, FOR)?,
        },
        _ => call(command, at.unwrap_or_default(), first, &args)?,
    };
    Ok(Some(Asked { agent, json, what }))
}

fn call(command: &str, at: &str, argument: String, args: &Read) -> Result<What, NotRun> {
    let op = match command {
        "status" => VaultOp::Inspect,
        other => other.parse().map_err(usage)?,
    };
    if !matches!(args.last(super::FORMAT), None | Some("json")) {
        return Err(usage("with --at, --format is json".into()));
    }
    let mut params = VaultCallParams {
        at: at.to_owned(),
        op,
        page: None,
        query: None,
        limit: None,
        payload: None,
        payload_file: None,
        confirmed: None,
        offset: None,
    };
    match op {
        VaultOp::Page | VaultOp::Hash => params.page = Some(argument),
        VaultOp::Search => {
            params.query = Some(argument);
            params.limit = Some(super::number(args, super::LIMIT, DEFAULT_LIMIT)?);
        }
        VaultOp::End => params.confirmed = Some(args.last(super::CONFIRM).is_some()),
        VaultOp::Inspect | VaultOp::Index | VaultOp::Append | VaultOp::Upsert => {}
    }
    let payload = op.writes().then(|| args.last(PAYLOAD).unwrap_or("-").to_owned());
    Ok(What::Call { params, payload })
}

fn usage(why: String) -> NotRun {
    NotRun::Usage(why)
}

fn bounded<const MIN: u64, const MAX: u64>(
    args: &Read,
    option: Opt,
) -> Result<Option<Bounded<MIN, MAX>>, NotRun> {
    let wrong = |what: String| usage(format!("{}: {what}", option.name));
    args.last(option).map(|text| text.parse().map_err(wrong)).transpose()
}

/// Carries it out against the daemon at `endpoint`.
pub(super) fn run(asked: Asked, endpoint: &Endpoint, json: bool) -> ExitCode {
    let json = json || asked.json;
    // Everything that needs no daemon comes before it is asked.
    let (what, kept) = match prepared(asked.what) {
        Ok(ready) => ready,
        Err(error) => return refused(&error),
    };
    let done = drive(json, async {
        let (client, _notifications) = Client::connect(&endpoint.socket, PROGRAM).await?;
        let session = Session { client, json };
        match carry_out(&session, &asked.agent, what).await {
            Err(Failure::Api(error)) if error.code.starts_with("vault_") => {
                // A peer may have written it.
                let line = shown(json::error_line(&error.message), io::stderr().is_terminal());
                Ok(output::complain(&line, exit::USAGE))
            }
            done => done.map(Into::into),
        }
    });
    drop(kept);
    done
}

/// JSON of a peer: the very bytes of the local command, but for a terminal.
fn shown(json: String, terminal: bool) -> String {
    if terminal { output::printable(&json) } else { json }
}

/// A refusal as local commands print it.
fn refused(error: &VaultError) -> ExitCode {
    output::complain(&json::error_line(&error.to_string()), exit::USAGE)
}

/// Reads the payload. A long one goes to the daemon in a file, which lasts as long as the command.
fn prepared(what: What) -> Result<(What, Option<tempfile::NamedTempFile>), VaultError> {
    let What::Call { mut params, payload: Some(path) } = what else { return Ok((what, None)) };
    if params.confirmed == Some(false) {
        return Err(VaultError::Unconfirmed);
    }
    let bytes = payload_bytes(&path)?;
    let unusable = |why: String| VaultError::PayloadFile { path: path.clone().into(), why };
    if bytes.len() > MAX_PAYLOAD {
        return Err(unusable(format!("over the mesh it has at most {MAX_PAYLOAD} bytes")));
    }
    payload::parse(bytes.clone())?;
    let text = String::from_utf8(bytes).map_err(|error| unusable(error.to_string()))?;
    let mut kept = None;
    if text.len() <= MAX_TEXT_BYTES {
        params.payload = Some(text);
    } else {
        let failed = |error: std::io::Error| unusable(error.to_string());
        let mut file = tempfile::NamedTempFile::new().map_err(failed)?;
        std::io::Write::write_all(&mut file, text.as_bytes()).map_err(failed)?;
        params.payload_file = Some(file.path().to_string_lossy().into_owned());
        kept = Some(file);
    }
    Ok((What::Call { params, payload: None }, kept))
}

async fn carry_out(session: &Session, agent: &Label, what: What) -> Result<u8, Failure> {
    match what {
        What::Share { path, name, mode } => {
            let path = std::path::absolute(super::expanded(&path)).map_err(|error| {
                ApiError::new(
                    "cwd",
                    format!("cannot tell where {path} is: {error}"),
                    "change to a directory that is still there, or give an absolute path",
                )
            })?;
            let path = path.to_string_lossy().into_owned();
            let params = VaultShareParams { path, name, mode: Some(mode) };
            session.show(params, show_share).await
        }
        What::Unshare(name) => session.show(VaultUnshareParams { name }, show_share).await,
        What::Shares => session.show(VaultSharesParams {}, show_shares).await,
        What::Revoke { name, agent } => {
            session.show(VaultRevokeParams { name, agent }, show_share).await
        }
        What::Request { at, mode, wait, lasts } => {
            session.attach(&AsAgent { name: agent.clone() }).await?;
            let params = VaultRequestParams {
                at,
                mode: Some(mode),
                valid_until: lasts.map(|secs| Time(now().plus(secs.get() * 1000))),
                wait,
            };
            let waiting = std::time::Duration::from_secs(wait.map_or(0, |wait| wait.get()));
            let permission = session.client.call_waiting(params, waiting).await?;
            session.print(&permission, show_permission)?;
            Ok(exit::DONE)
        }
        What::Delegate { mut params, lasts } => {
            session.attach(&AsAgent { name: agent.clone() }).await?;
            params.expires = lasts.map(|secs| Time(now().plus(secs.get() * 1000)));
            let permission = session.client.call(params).await?;
            session.print(&permission, show_permission)?;
            Ok(exit::DONE)
        }
        What::Call { params, .. } => {
            session.attach(&AsAgent { name: agent.clone() }).await?;
            let answer = session.client.vault_answer(&params, MAX_ANSWER).await?;
            // Of another machine: JSON has no raw control characters. (What Python takes for JSON
            // passes as it does from a local vault, so it is not read here.)
            if !answer.starts_with('{') || answer.contains(|c: char| c < ' ' && c != '\n') {
                let what = "the other side's answer is not JSON";
                return Err(ApiError::new("malformed_response", what, "update commsd there").into());
            }
            output::write_out(&shown(answer, io::stdout().is_terminal()))?;
            Ok(exit::DONE)
        }
    }
}

fn show_permission(permission: &VaultPermission) -> String {
    let until = match (permission.status, permission.expires) {
        (PermissionStatus::Granted, Some(expires)) => expires.0.iso(),
        _ => "the owner has to decide; a capability_outcome event will tell".into(),
    };
    fields(&[
        ("share", permission.share.clone()),
        ("owner", permission.agent.clone()),
        ("mode", permission.mode.to_string()),
        ("status", permission.status.to_string()),
        ("until", until),
    ])
}

fn show_share(share: &VaultShare) -> String {
    let now = now();
    let mut out = fields(&[
        ("name", share.name.clone()),
        ("path", share.path.clone()),
        ("mode", share.mode.to_string()),
        ("since", share.at.0.iso()),
    ]);
    let grants: Vec<_> = share
        .grants
        .iter()
        .map(|grant| {
            [
                short(&grant.agent),
                grant.agent_name.clone().unwrap_or_default(),
                grant.mode.to_string(),
                grant.expires.0.iso(),
                grant.delegations_remaining.to_string(),
                match grant.revoked {
                    true => "taken back".into(),
                    false if grant.expires.0 <= now => "over".into(),
                    false => String::new(),
                },
            ]
        })
        .collect();
    if !grants.is_empty() {
        out += "\n";
        out += &table(["AGENT", "NAME", "MODE", "UNTIL", "DELEGATIONS", ""], &grants);
    }
    out
}

fn show_shares(shares: &VaultShares) -> String {
    if shares.shares.is_empty() {
        return "nothing is shared\n".into();
    }
    shares.shares.iter().map(show_share).collect::<Vec<_>>().join("\n")
}
