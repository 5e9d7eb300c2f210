//! Logs as files: verified, compared, turned from one form into the other, noted.

use std::path::Path;
use std::process::ExitCode;

use serde_json::{Value, json};

use super::args::AuditExportArgs;
use super::{Failure, OPEN, files};
use crate::acp::audit::{
    self, AuditLog, Comparison, JsonlWriter, MAX_AUDIT_FILE, Report, Status, checkpoint_of,
    from_bundle, read_anchor, read_jsonl, to_bundle,
};
use crate::acp::code::{Code, Error};
use crate::acp::json::canonical;
use crate::acp::objects::AuditBundle;
use crate::acp::value::read_bytes;
use crate::api::types::ApiError;
use crate::cli::exit;
use crate::cli::output::{fields, json_line, print};
use crate::runtime::clock::unix_now;

/// Bytes of an anchor or checkpoint.
const MAX_ANCHOR: usize = 64 * 1024;

/// The two forms of a log.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Jsonl,
    Bundle,
}

/// Whether these are the bytes of a JSONL log: its first line is an object with a `kind`.
pub(super) fn is_jsonl(bytes: &[u8]) -> bool {
    let first = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    serde_json::from_slice::<Value>(first).is_ok_and(|header| header.get("kind").is_some())
}

/// Reads a log of either form.
fn read_log(bytes: &[u8]) -> Result<(AuditLog, Form), Error> {
    if bytes.is_empty() || is_jsonl(bytes) {
        return Ok((read_jsonl(bytes)?, Form::Jsonl));
    }
    let bundle: AuditBundle = read_bytes(bytes, MAX_AUDIT_FILE).map_err(|error| {
        if error.code() == Code::BadJson {
            Error::new(Code::BadJson, format!("not a log, JSONL or bundle: {}", error.message()))
        } else {
            error
        }
    })?;
    Ok((from_bundle(bundle)?, Form::Bundle))
}

/// What is wrong with a file; `detail` begins with the code.
fn bad_file(path: &Path, code: Code, detail: &str) -> Failure {
    let text = format!("{}: {detail}", path.display());
    Failure { error: ApiError::new(code.as_str(), text, code.todo()), exit: exit::FAILED }
}

/// Reads a log that nothing is wrong with.
fn load_good(path: &Path) -> Result<(AuditLog, Form), Failure> {
    let read = read_log(&files::read(path, MAX_AUDIT_FILE)?);
    let (log, form) = read.map_err(|error| bad_file(path, error.code(), &error.to_string()))?;
    let report = audit::verify(&log, None, unix_now());
    match (report.status, report.failures.into_iter().next()) {
        (Status::Valid | Status::Open, _) => Ok((log, form)),
        (_, Some(failure)) => Err(bad_file(path, failure.code, &failure.detail)),
        (_, None) => Err(bad_file(path, Code::AuditInvalid, "the log does not verify")),
    }
}

pub(super) fn verify(file: &Path, anchor: Option<&Path>, json: bool) -> Result<ExitCode, Failure> {
    let anchor = match anchor {
        Some(path) => {
            let read = read_anchor(&files::read(path, MAX_ANCHOR)?);
            Some(read.map_err(|error| bad_file(path, error.code(), &error.to_string()))?)
        }
        None => None,
    };
    let log = match read_log(&files::read(file, MAX_AUDIT_FILE)?) {
        Ok((log, _)) => log,
        Err(error) => return Ok(invalid(file, &error, json)),
    };
    let report = audit::verify(&log, anchor.as_ref(), unix_now());
    let code = match report.status {
        Status::Valid => exit::DONE,
        Status::Open => OPEN,
        Status::Truncated | Status::Forked | Status::Invalid => exit::FAILED,
    };
    let printed = print(&if json { json_line(&report) } else { describe(&report) });
    Ok(if code == exit::DONE { printed } else { code.into() })
}

/// Tells of a log that is too broken to be read: the failure is all that is known of it.
fn invalid(file: &Path, error: &Error, json: bool) -> ExitCode {
    let (status, detail) = (Status::Invalid, format!("{}: {error}", file.display()));
    let failure = audit::Failure { seq: None, code: error.code(), detail };
    // The exit code says it, whether or not there is a reader.
    let _ = print(&if json {
        json_line(&json!({ "status": status, "failures": [failure] }))
    } else {
        fields(&[("status", word(status)), ("failure", failure.detail)])
    });
    exit::FAILED.into()
}

/// A status as it is written.
fn word(status: Status) -> String {
    json!(status).as_str().unwrap_or_default().to_owned()
}

/// A report for people.
fn describe(report: &Report) -> String {
    let mut rows = vec![
        ("status", word(report.status)),
        ("task", report.task_id.to_string()),
        ("state", report.state.map_or_else(|| "-".into(), |state| state.to_string())),
        ("entries", report.entries.to_string()),
        ("head", report.head.map_or_else(|| "-".into(), |head| head.to_string())),
    ];
    if report.unilateral > 0 {
        rows.push(("one-signed", report.unilateral.to_string()));
    }
    if report.objects_missing > 0 {
        rows.push(("left out", report.objects_missing.to_string()));
    }
    if report.torn {
        rows.push(("torn", "a last line without its end was passed over".into()));
    }
    for failure in &report.failures {
        let place = failure.seq.map_or_else(String::new, |seq| format!("entry {seq}: "));
        rows.push(("failure", format!("{place}{}", failure.detail)));
    }
    fields(&rows)
}

pub(super) fn compare(first: &Path, second: &Path, json: bool) -> Result<ExitCode, Failure> {
    let ((one, _), (two, _)) = (load_good(first)?, load_good(second)?);
    let comparison = audit::compare(&one, &two)?;
    let (result, text) = match comparison {
        Comparison::Equal => ("equal", "the copies are equal".to_owned()),
        Comparison::Prefix { first_is_shorter, common } => {
            let shorter = if first_is_shorter { "first" } else { "second" };
            ("prefix", format!("equal up to {common} entries; the {shorter} copy ends there"))
        }
        Comparison::Diverged { seq } => {
            ("diverged", format!("each side has ended the task alone at entry {seq}"))
        }
        Comparison::Forked { seq } => ("forked", format!("two entries at one place, {seq}")),
    };
    let code = comparison.code();
    if let Some(code) = code
        && !json
    {
        return Err(Error::new(code, text).into());
    }
    let printed = print(&if json {
        let seq = match comparison {
            Comparison::Diverged { seq } | Comparison::Forked { seq } => Some(seq),
            Comparison::Equal | Comparison::Prefix { .. } => None,
        };
        json_line(&json!({ "result": result, "code": code, "seq": seq,
                           "entries": [one.entries.len(), two.entries.len()] }))
    } else {
        format!("{text}\n")
    });
    Ok(if code.is_some() { exit::FAILED.into() } else { printed })
}

pub(super) fn export(args: &AuditExportArgs, json: bool) -> Result<ExitCode, Failure> {
    let (mut log, form) = load_good(&args.file)?;
    if args.redact {
        // Writing leaves user data out; reading back gives the log without it.
        log = read_jsonl(&JsonlWriter::whole(&log, true)?)?;
    }
    let bytes = match form {
        Form::Bundle => JsonlWriter::whole(&log, false)?,
        Form::Jsonl => {
            let key = args.key.as_deref().ok_or_else(|| Failure {
                error: ApiError::new(
                    "key_needed",
                    "a bundle is signed by who exports it",
                    "name a key file with --key",
                ),
                exit: exit::USAGE,
            })?;
            let mut bundle = canonical(&to_bundle(&log, &files::read_key(key)?, unix_now())?)?;
            bundle.push(b'\n');
            bundle
        }
    };
    if bytes.len() > MAX_AUDIT_FILE {
        return Err(Error::new(Code::TooLarge, "the other form has more than 256 MiB").into());
    }
    files::create(&args.out, &bytes)?;
    let form = if form == Form::Bundle { "jsonl" } else { "bundle" };
    Ok(print(&if json {
        let head = log.head()?;
        json_line(&json!({ "form": form, "entries": log.entries.len(), "head": head }))
    } else {
        format!("{form} of {} entries written to {}\n", log.entries.len(), shown(&args.out))
    }))
}

pub(super) fn checkpoint(
    file: &Path,
    out: &Path,
    key: &Path,
    json: bool,
) -> Result<ExitCode, Failure> {
    let key = files::read_key(key)?;
    let (log, _) = load_good(file)?;
    let point = checkpoint_of(&log, &key, unix_now())?;
    let mut bytes = canonical(&point)?;
    bytes.push(b'\n');
    files::create(out, &bytes)?;
    Ok(print(&if json {
        json_line(&point)
    } else {
        let (seq, head) = (point.seq.get(), point.head);
        fields(&[
            ("task", point.task_id.to_string()),
            ("entry", seq.to_string()),
            ("head", head.to_string()),
        ])
    }))
}

fn shown(path: &Path) -> String {
    crate::codec::text::escape_untrusted(&path.to_string_lossy())
}
