//! Keys, approvals and single objects: what takes a file or two and nothing else.

use std::path::Path;
use std::process::ExitCode;

use serde_json::json;

use super::args::ApproveArgs;
use super::{Failure, audit, files};
use crate::acp::code::{Code, Error};
use crate::acp::did::Secret;
use crate::acp::json::canonical;
use crate::acp::log::Cx;
use crate::acp::objects::{ApprovalReceipt, Decision, Target};
use crate::acp::sign::Signed as _;
use crate::acp::steps;
use crate::acp::validate::{self, Kind};
use crate::api::types::ApiError;
use crate::cli::exit;
use crate::cli::output::{fields, json_line, print};
use crate::identity::entropy::OsEntropy;
use crate::runtime::clock::unix_now;

/// Bytes of an object or a bundle, whatever its kind; each kind has its own bound.
const MAX_OBJECT: usize = crate::acp::audit::MAX_AUDIT_FILE;
/// Bytes of a target.
const MAX_TARGET: usize = 64 * 1024;

/// The system's randomness.
pub(super) fn entropy() -> Result<OsEntropy, Failure> {
    OsEntropy::open().map_err(|error| Failure {
        error: ApiError::plain(error.code(), error.to_string()),
        exit: exit::FAILED,
    })
}

pub(super) fn keygen(path: &Path, json: bool) -> Result<ExitCode, Failure> {
    let secret = Secret::draw(&mut entropy()?)?;
    files::create(path, &secret.to_key_file(unix_now()))?;
    let did = secret.did();
    Ok(print(&if json {
        json_line(&json!({ "did": did, "path": path.to_string_lossy() }))
    } else {
        format!("{did}\n")
    }))
}

pub(super) fn approve(args: &ApproveArgs, json: bool) -> Result<ExitCode, Failure> {
    let key = files::read_key(&args.key)?;
    let target = Target::read_text(&files::read(&args.target, MAX_TARGET)?)?;
    if target.gate() != args.gate {
        let text = format!("the target is one of {}", target.gate());
        return Err(Error::new(Code::ApprovalMismatch, text).into());
    }
    let now = unix_now();
    let decision = if args.deny { Decision::Denied } else { Decision::Approved };
    let mut entropy = entropy()?;
    let mut cx = Cx { key: &key, now, entropy: &mut entropy };
    let usual = steps::approval(&mut cx, &args.task_id, &target, decision, None, &args.reason)?;
    let life = u64::try_from(args.expires_in.as_millis()).unwrap_or(u64::MAX);
    let receipt = ApprovalReceipt { expires_at: usual.issued_at.plus(life), ..usual };
    let receipt = receipt.signed(&key, now)?;
    let mut bytes = canonical(&receipt)?;
    bytes.push(b'\n');
    files::create(&args.out, &bytes)?;
    Ok(print(&if json {
        json_line(&receipt)
    } else {
        fields(&[
            ("receipt", receipt.receipt_id.to_string()),
            ("task", receipt.task_id.to_string()),
            ("gate", receipt.gate.to_string()),
            ("decision", receipt.decision.to_string()),
            ("target", receipt.target_digest.to_string()),
            ("until", receipt.expires_at.to_string()),
        ])
    }))
}

pub(super) fn validate(kind: Option<Kind>, file: &Path, json: bool) -> Result<ExitCode, Failure> {
    let bytes = files::read(file, MAX_OBJECT)?;
    if audit::is_jsonl(&bytes) {
        let todo = "verify it with: commsd acp audit-verify FILE";
        let error = ApiError::new("usage", "this is a JSONL log, and no single object", todo);
        return Err(Failure { error, exit: exit::USAGE });
    }
    let kind = kind.or_else(|| Kind::of(&bytes)).unwrap_or(Kind::TaskManifest);
    let good = validate::validate(kind, &bytes)?;
    Ok(print(&if json {
        json_line(&good)
    } else {
        fields(&[
            ("valid", good.r#type.to_owned()),
            ("object", good.object_digest.to_string()),
            ("body", good.body_digest.to_string()),
            ("signatures", good.signatures.to_string()),
        ])
    }))
}
