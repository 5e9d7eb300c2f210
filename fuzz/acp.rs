//! What must hold in the Agent Collaboration Protocol for any bytes that a stranger sends:
//! `fuzz_targets` gives these functions to libFuzzer, `tests/acp/corpus.rs` runs them over `corpus`
//! on stable.

use commsd::acp::audit::{JsonlWriter, read_jsonl, verify};
use commsd::acp::did::Did;
use commsd::acp::endpoint::{Endpoint, EndpointPolicy};
use commsd::acp::envelope::MAX_ENVELOPE;
use commsd::acp::invite::{invite_text, read_invite};
use commsd::acp::json::{MAX_DEPTH, MAX_SAFE_INTEGER, canonical, parse};
use commsd::acp::objects::{self, Envelope, Resource};
use commsd::acp::relay::{Cursor, auth, route};
use commsd::acp::sign::Signed as _;
use commsd::acp::value::{Digest, Read, read_bytes};
use commsd::codec::time::UnixMillis;
use serde_json::Value;

/// A target: panics when something does not hold for these bytes.
#[allow(dead_code, reason = "the fuzz targets name theirs")]
pub type Target = fn(&[u8]);

/// All targets by name.
#[allow(dead_code, reason = "each fuzz target uses one of them")]
pub const ALL: [(&str, Target); 7] = [
    ("acp_json", acp_json),
    ("acp_did", acp_did),
    ("acp_resource", acp_resource),
    ("acp_object", acp_object),
    ("acp_jsonl", acp_jsonl),
    ("acp_text", acp_text),
    ("acp_relay", acp_relay),
];

const MAX: usize = 1 << 20;

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(members) => 1 + members.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

fn numbers_are_safe(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.iter().all(numbers_are_safe),
        Value::Object(members) => members.values().all(numbers_are_safe),
        Value::Number(number) => {
            number.as_f64().is_some_and(|n| n.is_finite() && n.abs() <= MAX_SAFE_INTEGER as f64)
        }
        _ => true,
    }
}

/// The strict reader.
#[allow(dead_code, reason = "each fuzz target uses one of them")]
pub fn acp_json(bytes: &[u8]) {
    let theirs = serde_json::from_slice::<Value>(bytes);
    match parse(bytes, MAX) {
        Ok(value) => {
            assert!(depth(&value) <= MAX_DEPTH && numbers_are_safe(&value));
            let text = canonical(&value).unwrap();
            assert_eq!(parse(&text, MAX).unwrap(), value);
            assert_eq!(canonical(&value).unwrap(), text);
            // What we take, another reader takes as the same.
            assert_eq!(canonical(&theirs.unwrap()).unwrap(), text);
        }
        Err(error) => {
            // Only what is no JSON at all is called so.
            if error.code().as_str() == "BAD_JSON" {
                assert!(theirs.is_err());
            }
        }
    }
}

/// Identities.
#[allow(dead_code, reason = "each fuzz target uses one of them")]
pub fn acp_did(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok(did) = Did::parse(text)
    {
        assert_eq!(did.to_string(), text);
        assert_ne!(did.encryption_key().0, [0; 32]);
    }
    if let Ok(key) = <[u8; 32]>::try_from(bytes)
        && let Ok(did) = Did::from_key(key)
    {
        assert_eq!(Did::parse(&did.to_string()).unwrap(), did);
    }
}

/// Containment, the slow way: which of a pattern's prefixes a path may have.
fn slow(inner: &str, outer: &str) -> bool {
    let (Some((one, inner)), Some((two, outer))) = (inner.split_once(':'), outer.split_once(':'))
    else {
        return false;
    };
    if one != two {
        return false;
    }
    let (inner, outer): (Vec<&str>, Vec<&str>) =
        (inner.split('/').collect(), outer.split('/').collect());
    let Some((tail, front)) = outer.split_last() else { return false };
    match *tail {
        "**" => inner == outer || (inner.len() >= front.len() && inner[..front.len()] == *front),
        "*" => {
            inner.len() == outer.len()
                && inner[..front.len()] == *front
                && inner[front.len()] != "**"
        }
        _ => inner == outer,
    }
}

/// Resources, and containment of one in the other: two texts with a line feed between.
#[allow(dead_code, reason = "each fuzz target uses one of them")]
pub fn acp_resource(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Some((inner, outer)) = text.split_once('\n') else { return };
    let (Ok(a), Ok(b)) = (Resource::parse(inner), Resource::parse(outer)) else { return };
    assert_eq!(a.to_string(), inner);
    assert_eq!(a.is_within(&b), slow(inner, outer), "{inner} in {outer}");
    assert!(a.is_within(&a) && b.is_within(&b));
}

/// Reads bytes as `T`; what is read is written as it was.
fn same<T: Read + serde::Serialize>(value: &Value) -> bool {
    let Ok(object) = T::read(value.clone()) else { return false };
    assert_eq!(canonical(&object).unwrap(), canonical(value).unwrap());
    true
}

/// Every object of the wire, the envelope to its end.
#[allow(dead_code, reason = "each fuzz target uses one of them")]
pub fn acp_object(bytes: &[u8]) {
    let Ok(value) = parse(bytes, MAX_ENVELOPE) else { return };
    let kinds = [
        same::<objects::TaskManifest>(&value),
        same::<objects::TaskContract>(&value),
        same::<objects::CapabilityToken>(&value),
        same::<objects::ApprovalReceipt>(&value),
        same::<objects::UsageReceipt>(&value),
        same::<objects::ExecutionAttestation>(&value),
        same::<objects::Deliverable>(&value),
        same::<objects::VerificationReport>(&value),
        same::<objects::SettlementReceipt>(&value),
        same::<objects::RevocationNotice>(&value),
        same::<objects::ProgressUpdate>(&value),
        same::<objects::SessionMessage>(&value),
        same::<objects::ToolCall>(&value),
        same::<objects::ToolResult>(&value),
        same::<objects::AuditEntry>(&value),
        same::<objects::AuditCheckpoint>(&value),
        same::<objects::Invite>(&value),
        same::<objects::WorkerCard>(&value),
        same::<objects::RelayAuth>(&value),
        same::<objects::Envelope>(&value),
    ];
    // Its type is inside, so it is one of them at most.
    assert!(kinds.iter().filter(|yes| **yes).count() <= 1);
    if let Ok(envelope) = read_bytes::<Envelope>(bytes, MAX_ENVELOPE) {
        let _key = envelope.key_ref();
        let _opened = envelope.open(&[7; 32]);
        let _signed = envelope.verify();
    }
}

/// Audit files.
#[allow(dead_code, reason = "each fuzz target uses one of them")]
pub fn acp_jsonl(bytes: &[u8]) {
    let Ok(log) = read_jsonl(bytes) else { return };
    let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
    assert_eq!(log.torn, whole < bytes.len());
    for (digest, object) in &log.objects {
        assert_eq!(Digest::of(object).unwrap(), *digest);
    }
    let report = verify(&log, None, UnixMillis(1_800_000_000_000));
    assert_eq!(report.entries, log.entries.len());
    // Countersignatures and checkpoints are lines of their own; else the file is the log's.
    if log.checkpoints.is_empty() && !bytes.windows(16).any(|w| w == b"countersignature") {
        assert_eq!(JsonlWriter::whole(&log, false).unwrap(), &bytes[..whole]);
    }
}

/// Texts that people paste: invites and addresses.
#[allow(dead_code, reason = "each fuzz target uses one of them")]
pub fn acp_text(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(invite) = read_invite(text) {
        assert_eq!(read_invite(&invite_text(&invite).unwrap()).unwrap(), invite);
    }
    let strict = EndpointPolicy::default();
    let lax = EndpointPolicy { allow_private: true, allow_insecure: true };
    if let Ok(endpoint) = Endpoint::parse(text, strict) {
        // What is good enough for the strict is good enough for the lax; an origin is its own.
        assert_eq!(Endpoint::parse(text, lax).unwrap(), endpoint);
        let origin = Endpoint::parse(&endpoint.origin(), lax).unwrap();
        assert_eq!((origin.host, origin.port), (endpoint.host, endpoint.port));
    }
}

/// What a relay reads of a stranger's request: method, path, query and token, a line each.
#[allow(dead_code, reason = "each fuzz target uses one of them")]
pub fn acp_relay(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let mut lines = text.splitn(4, '\n');
    let mut line = || lines.next().unwrap_or_default();
    let (method, path, query, token) = (line(), line(), line(), line());
    if let Ok(target) = route::find(method, path, query) {
        let known = ["GET", "POST", "PUT", "DELETE"];
        assert!(known.contains(&method) && path.starts_with("/v1/"), "{method} {path}");
        // Only mailboxes take a token, and limits hold whatever is asked for.
        assert!(target.auth.is_none() || path.starts_with("/v1/mailboxes/"));
        if let route::Route::Receive { limit, wait_ms, .. } = target.route {
            assert!((1..=route::MAX_PAGE).contains(&limit) && wait_ms <= route::MAX_WAIT_MS);
        }
    }
    if let Ok(cursor) = Cursor::parse(query) {
        assert_eq!(cursor.to_string(), query);
    }
    if let Ok(read) = auth::parse(token) {
        // One text only is a token.
        let json = canonical(&read).unwrap();
        assert_eq!(data_encoding::BASE64URL_NOPAD.encode(&json), token);
        let now = read.issued_at.millis();
        let audiences = [read.audience.to_string()];
        let _checked = auth::check(token, read.did, read.action, &audiences, now);
        let late = UnixMillis(now.0 + auth::WINDOW_MS + 1);
        assert!(auth::check(token, read.did, read.action, &audiences, late).is_err());
    }
}
