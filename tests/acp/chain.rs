//! The audit against a file that somebody changed (design 20 A and C): every leaf, line and swap of
//! the golden file, and logs with a forged, cut, forked or single-signed end.

use commsd::acp::audit::{
    Anchor, AuditLog, Comparison, JsonlWriter, Status, compare, from_bundle, read_anchor,
    read_jsonl, to_bundle, verify,
};
use commsd::acp::code::Code;
use commsd::acp::json::parse;
use commsd::acp::objects::AuditBundle;
use commsd::acp::value::{Digest, Read};
use commsd::codec::time::UnixMillis;
use serde_json::{Value, json};

use crate::support::*;

/// Shortly after the golden task.
const NOW: UnixMillis = UnixMillis(1_796_083_300_000);
const HEAD: &str = "sha256:49ed1ebee12b608ef5ec493a1a49391aa74b76c2834971718fc64a7c97815c7c";

fn file() -> Vec<u8> {
    golden("acp-audit-settled.v1.jsonl")
}

fn lines() -> Vec<Value> {
    file()
        .split(|b| *b == b'\n')
        .filter(|l| !l.is_empty())
        .map(|l| serde_json::from_slice(l).unwrap())
        .collect()
}

fn write(lines: &[Value]) -> Vec<u8> {
    lines.iter().flat_map(|line| [jcs(line), vec![b'\n']].concat()).collect()
}

/// Status and first code of a file, reading included.
fn judge(bytes: &[u8], anchor: Option<&Anchor>) -> (Status, Option<Code>, usize) {
    match read_jsonl(bytes) {
        Err(error) => (Status::Invalid, Some(error.code()), 0),
        Ok(log) => {
            let report = verify(&log, anchor, NOW);
            let code = report.failures.first().map(|failure| failure.code);
            (report.status, code, report.objects_missing)
        }
    }
}

#[test]
fn the_golden_file_is_valid() {
    let log = read_jsonl(&file()).unwrap();
    let report = verify(&log, None, NOW);
    assert_eq!(report.status, Status::Valid, "{report:?}");
    assert_eq!(report.entries, 7);
    assert_eq!(report.head.unwrap().to_string(), HEAD);
    assert_eq!((report.unilateral, report.objects_missing), (0, 0));
    assert_eq!(report.state.unwrap().as_str(), "SETTLED");
    // Written anew, byte for byte.
    assert_eq!(JsonlWriter::whole(&log, false).unwrap(), file());
    let shown = serde_json::to_value(&report).unwrap();
    assert_eq!(shown["status"], "VALID");
    assert_eq!(shown["failures"], json!([]));
}

#[test]
fn the_golden_bundle_is_the_same_log() {
    let value = parse(&golden("acp-bundle-settled.v1.json"), 1 << 20).unwrap();
    let bundle = AuditBundle::read(value).unwrap();
    let log = from_bundle(bundle.clone()).unwrap();
    assert_eq!(log, read_jsonl(&file()).unwrap());
    // Exported again by the same key at the same time: the same bytes.
    let again = to_bundle(&log, &person(1).secret(), bundle.exported_at.millis()).unwrap();
    assert_eq!(again, bundle);
}

#[test]
fn every_changed_leaf_is_found() {
    let lines = lines();
    let mut changes = 0;
    for (n, line) in lines.iter().enumerate() {
        for leaf in leaves(line) {
            let mut changed = lines.clone();
            let place = changed[n].pointer_mut(&leaf).unwrap();
            *place = nearby(place);
            let (status, code, _) = judge(&write(&changed), None);
            assert_eq!(status, Status::Invalid, "line {n} {leaf}");
            assert!(code.is_some());
            changes += 1;
        }
    }
    assert!(changes > 500, "{changes}");
}

/// A leaf changed together with every digest that names it: only signatures are left to object.
#[test]
fn a_changed_object_with_new_digests_is_found() {
    let lines = lines();
    for (n, line) in lines.iter().enumerate().filter(|(_, line)| line["kind"] == "object") {
        for leaf in leaves(&line["object"]) {
            let mut object = line["object"].clone();
            let place = object.pointer_mut(&leaf).unwrap();
            *place = nearby(place);
            let (old, new) = (digest(&line["object"]), digest(&object));
            let mut changed = lines.clone();
            changed[n]["object"] = object;
            let text = String::from_utf8(write(&changed)).unwrap().replace(&old, &new);
            assert_eq!(judge(text.as_bytes(), None).0, Status::Invalid, "line {n} {leaf}");
        }
    }
}

#[test]
fn every_line_left_out_or_swapped_is_found() {
    let lines = lines();
    for n in 0..lines.len() {
        let mut without = lines.clone();
        without.remove(n);
        let (status, _, missing) = judge(&write(&without), None);
        let line = &lines[n];
        let input = line["object"].get("type").is_none() && line["kind"] == "object";
        let user =
            input || ["ProgressUpdate", "Deliverable"].iter().any(|t| line["object"]["type"] == *t);
        if user {
            // A redacted copy says that it is one.
            assert_eq!((status, missing), (Status::Valid, 1), "line {n}");
        } else if n + 1 == lines.len() {
            // A cut tail is seen only as a task without an end.
            assert_eq!(status, Status::Invalid, "its objects are left over");
        } else {
            assert_eq!(status, Status::Invalid, "line {n}");
        }
        for m in n + 1..lines.len() {
            let mut swapped = lines.clone();
            swapped.swap(n, m);
            assert_eq!(judge(&write(&swapped), None).0, Status::Invalid, "lines {n} and {m}");
        }
        let mut twice = lines.clone();
        twice.insert(n, lines[n].clone());
        assert_eq!(judge(&write(&twice), None).0, Status::Invalid, "line {n} twice");
    }
}

#[test]
fn bytes_are_strict() {
    let text = String::from_utf8(file()).unwrap();
    for changed in [
        text.replacen("{\"format\"", "{ \"format\"", 1),
        text.replacen('\n', "\r\n", 1),
        text.replacen('\n', "\n\n", 1),
        format!("\u{feff}{text}"),
        text.replacen("\"kind\":\"header\"", "\"kind\":\"header\",\"kind\":\"header\"", 1),
        String::new(),
        "\n".to_owned(),
        text.replacen("\"kind\":\"entry\"", "\"extra\":1,\"kind\":\"entry\"", 1),
    ] {
        assert_eq!(judge(changed.as_bytes(), None).0, Status::Invalid);
    }
    let torn = format!("{text}{{\"kind\":\"ent");
    let log = read_jsonl(torn.as_bytes()).unwrap();
    assert!(log.torn);
    assert_eq!(verify(&log, None, NOW).status, Status::Valid);
    // A whole line cut in the middle of the last one: the task is open again.
    let cut = &file()[..file().len() - 100];
    let log = read_jsonl(cut);
    assert!(log.is_err(), "the objects of the torn entry are left over");
}

/// The log up to and with entry `n`.
fn cut(n: usize) -> Vec<u8> {
    let lines = lines();
    let end = lines.iter().enumerate().filter(|(_, l)| l["kind"] == "entry").nth(n).unwrap().0;
    write(&lines[..=end])
}

fn anchor(value: &Value) -> Anchor {
    read_anchor(&jcs(value)).unwrap()
}

fn entry_digest(n: usize) -> String {
    let lines = lines();
    lines.iter().filter(|l| l["kind"] == "entry").nth(n).unwrap()["digest"]
        .as_str()
        .unwrap()
        .to_owned()
}

fn checkpoint(by: u8, seq: u64, head: &str) -> Value {
    let body = json!({
        "type": "AuditCheckpoint", "version": "1.0", "taskId": "task_example001",
        "actors": [person(1).did, person(2).did], "seq": seq, "head": head,
        "at": "2026-12-01T00:00:12.000Z",
    });
    person(by).sign(body, "audit-checkpoint", "owner")
}

#[test]
fn a_cut_tail_needs_an_anchor() {
    for n in 0..6 {
        assert_eq!(judge(&cut(n), None).0, Status::Open, "{n}");
    }
    let trust = json!({ "taskId": "task_example001", "actors": [person(1).did, person(2).did], "head": HEAD });
    assert_eq!(judge(&file(), Some(&anchor(&trust))).0, Status::Valid);
    // An earlier head is in the chain too.
    let mut earlier = trust.clone();
    earlier["head"] = json!(entry_digest(2));
    assert_eq!(judge(&file(), Some(&anchor(&earlier))).0, Status::Valid);
    let (status, code, _) = judge(&cut(3), Some(&anchor(&trust)));
    assert_eq!((status, code), (Status::Invalid, Some(Code::AnchorMismatch)));
    for (member, value) in [
        ("taskId", json!("task_example002")),
        ("actors", json!([person(2).did, person(1).did])),
        ("actors", json!([person(1).did, person(3).did])),
    ] {
        let mut other = trust.clone();
        other[member] = value;
        let (status, code, _) = judge(&file(), Some(&anchor(&other)));
        assert_eq!((status, code), (Status::Invalid, Some(Code::AnchorMismatch)));
    }

    let last = anchor(&checkpoint(1, 6, HEAD));
    assert_eq!(judge(&file(), Some(&last)).0, Status::Valid);
    assert_eq!(judge(&cut(5), Some(&last)).0, Status::Truncated);
    let fork = anchor(&checkpoint(2, 5, HEAD));
    assert_eq!(judge(&file(), Some(&fork)).0, Status::Forked);
    let stranger = anchor(&checkpoint(3, 6, HEAD));
    assert_eq!(judge(&file(), Some(&stranger)).1, Some(Code::AnchorMismatch));
    let mut forged = checkpoint(1, 6, HEAD);
    forged["signature"]["signerDid"] = json!(person(2).did);
    assert_eq!(judge(&file(), Some(&anchor(&forged))).1, Some(Code::BadSignature));

    // Checkpoints in the file count the same.
    let mut with = lines();
    with.push(json!({ "kind": "checkpoint", "checkpoint": checkpoint(1, 6, HEAD) }));
    assert_eq!(judge(&write(&with), None).0, Status::Valid);
    let mut cut_with: Vec<Value> = with.clone();
    let end = cut_with.iter().enumerate().filter(|(_, l)| l["kind"] == "entry").nth(5).unwrap().0;
    cut_with.drain(end + 1..with.len() - 1);
    assert_eq!(judge(&write(&cut_with), None).0, Status::Truncated);
}

/// Entries made by hand, on top of the golden log's first `keep`.
struct Forge {
    lines: Vec<Value>,
    prev: String,
    seq: u64,
    state: Value,
}

impl Forge {
    fn after(keep: usize) -> Self {
        let mut all = lines();
        let end = all.iter().enumerate().filter(|(_, l)| l["kind"] == "entry").nth(keep).unwrap().0;
        all.truncate(end + 1);
        let last = all[end].clone();
        Self {
            lines: all,
            prev: last["digest"].as_str().unwrap().to_owned(),
            seq: keep as u64 + 1,
            state: last["entry"]["toState"].clone(),
        }
    }

    fn add(
        &mut self,
        event: &str,
        to: &str,
        role: &str,
        at: &str,
        unilateral: bool,
        objects: Vec<Value>,
        both: bool,
    ) {
        let payload: Vec<String> = objects.iter().map(digest).collect();
        let (author, other) = if role == "requester" { (1, 2) } else { (2, 1) };
        let body = json!({
            "type": "AuditEntry", "version": "1.0", "taskId": "task_example001", "seq": self.seq,
            "prev": self.prev, "event": event, "fromState": self.state, "toState": to,
            "actorDid": person(author).did, "actorRole": role, "at": at,
            "payloadDigest": digest(&json!(payload)), "unilateral": unilateral,
        });
        let mut entry = body.clone();
        let mut signatures = vec![person(author).signature(&body, "audit-entry", role, at)];
        if both {
            let role = if role == "requester" { "worker" } else { "requester" };
            signatures.push(person(other).signature(&body, "audit-entry", role, at));
        }
        entry["signatures"] = json!(signatures);
        for object in objects {
            self.lines
                .push(json!({ "kind": "object", "digest": digest(&object), "object": object }));
        }
        self.prev = digest(&body);
        self.lines.push(
            json!({ "kind": "entry", "digest": self.prev, "payload": payload, "entry": entry }),
        );
        self.seq += 1;
        self.state = json!(to);
    }

    fn judge(&self) -> (Status, Option<Code>) {
        let late = UnixMillis(NOW.0 + 86_400_000);
        match read_jsonl(&write(&self.lines)) {
            Err(error) => (Status::Invalid, Some(error.code())),
            Ok(log) => {
                let report = verify(&log, None, late);
                (report.status, report.failures.first().map(|f| f.code))
            }
        }
    }

    fn log(&self) -> AuditLog {
        read_jsonl(&write(&self.lines)).unwrap()
    }
}

fn evidence(cause: &str, at: &str) -> Value {
    json!({ "type": "EvidenceNotice", "version": "1.0", "taskId": "task_example001", "cause": cause, "at": at })
}

fn cancel(at: &str) -> Value {
    json!({ "type": "CancelNotice", "version": "1.0", "taskId": "task_example001", "reason": "", "requestedAt": at, "graceMs": 5000 })
}

#[test]
fn what_stands_alone() {
    let soon = "2026-12-01T00:01:00.000Z";
    let later = "2026-12-01T00:10:00.000Z";
    let after = "2026-12-01T01:05:00.000Z";
    // CANCEL that a dead worker never saw, then ABANDON (decision 36).
    let mut forge = Forge::after(2);
    forge.add("CANCEL", "CANCELLING", "requester", soon, false, vec![cancel(soon)], false);
    assert_eq!(forge.judge(), (Status::Invalid, Some(Code::BadSignature)));
    forge.add(
        "ABANDON",
        "CANCELLED",
        "requester",
        later,
        true,
        vec![evidence("CANCEL_GRACE", later)],
        false,
    );
    assert_eq!(forge.judge(), (Status::Valid, None));
    assert_eq!(verify(&forge.log(), None, NOW).status, Status::Invalid, "not yet in its future");

    // Too early an ABANDON; by the wrong side; with the wrong flag.
    for (event, to, role, at, flag, cause, code) in [
        (
            "ABANDON",
            "CANCELLED",
            "requester",
            "2026-12-01T00:06:04.999Z",
            true,
            "CANCEL_GRACE",
            Code::IllegalTransition,
        ),
        ("ABANDON", "CANCELLED", "worker", later, true, "CANCEL_GRACE", Code::IllegalTransition),
        ("ABANDON", "CANCELLED", "requester", later, false, "CANCEL_GRACE", Code::BadField),
        ("ABANDON", "CANCELLED", "requester", later, true, "DEADLINE", Code::BadField),
        ("EXPIRE", "EXPIRED", "worker", later, true, "DEADLINE", Code::IllegalTransition),
        ("ABANDON", "EXPIRED", "requester", later, true, "CANCEL_GRACE", Code::IllegalTransition),
    ] {
        let mut forge = Forge::after(2);
        forge.add("CANCEL", "CANCELLING", "requester", soon, false, vec![cancel(soon)], true);
        forge.add(event, to, role, at, flag, vec![evidence(cause, at)], true);
        assert_eq!(forge.judge(), (Status::Invalid, Some(code)), "{event} {role} {at}");
    }
    // Exactly at the boundary it is good.
    let mut forge = Forge::after(2);
    forge.add("CANCEL", "CANCELLING", "requester", soon, false, vec![cancel(soon)], true);
    let edge = "2026-12-01T00:06:05.000Z";
    forge.add(
        "ABANDON",
        "CANCELLED",
        "requester",
        edge,
        true,
        vec![evidence("CANCEL_GRACE", edge)],
        false,
    );
    assert_eq!(forge.judge(), (Status::Valid, None));

    // Two single-signed entries below an ending, or one of the other side's: no.
    let mut forge = Forge::after(2);
    forge.add("CANCEL", "CANCELLING", "requester", soon, false, vec![cancel(soon)], false);
    forge.add("EXPIRE", "EXPIRED", "worker", after, true, vec![evidence("DEADLINE", after)], false);
    assert_eq!(forge.judge(), (Status::Invalid, Some(Code::BadSignature)));
    let mut forge = Forge::after(1);
    forge.add("START", "IN_PROGRESS", "worker", soon, false, vec![], false);
    forge.add("CANCEL", "CANCELLING", "requester", soon, false, vec![cancel(soon)], false);
    forge.add(
        "ABANDON",
        "CANCELLED",
        "requester",
        later,
        true,
        vec![evidence("CANCEL_GRACE", later)],
        false,
    );
    assert_eq!(forge.judge(), (Status::Invalid, Some(Code::BadSignature)));

    // SUPERSEDE as the last entry may stand alone (decision 35), VERIFY_PASS may not.
    let mut forge = Forge::after(4);
    forge.add(
        "SUPERSEDE",
        "SUPERSEDED",
        "requester",
        soon,
        false,
        vec![evidence("RACE_LOST", soon)],
        false,
    );
    assert_eq!(forge.judge(), (Status::Valid, None));
    // Nothing follows the end.
    forge.add("EXPIRE", "EXPIRED", "worker", after, true, vec![evidence("DEADLINE", after)], true);
    assert_eq!(forge.judge().0, Status::Invalid);

    // A late second signature fills the place, and is checked.
    let mut forge = Forge::after(4);
    forge.add(
        "SUPERSEDE",
        "SUPERSEDED",
        "requester",
        soon,
        false,
        vec![evidence("RACE_LOST", soon)],
        false,
    );
    let body = crate::support::body(&forge.lines.last().unwrap()["entry"]);
    for (who, role, good) in [(2, "worker", true), (1, "worker", false), (2, "requester", false)] {
        let mut with = forge.lines.clone();
        let second = person(who).signature(&body, "audit-entry", role, later);
        with.push(json!({ "kind": "countersignature", "seq": 5, "signature": second }));
        let log = read_jsonl(&write(&with)).unwrap();
        let report = verify(&log, None, NOW);
        assert_eq!(report.status == Status::Valid, good, "{who} {role}");
        assert!(!good || report.unilateral == 0);
        with.push(with.last().unwrap().clone());
        assert!(read_jsonl(&write(&with)).is_err(), "a third signature");
    }
}

#[test]
fn copies_are_compared() {
    let full = read_jsonl(&file()).unwrap();
    assert_eq!(compare(&full, &full).unwrap(), Comparison::Equal);
    let short = read_jsonl(&cut(3)).unwrap();
    let prefix = Comparison::Prefix { first_is_shorter: true, common: 4 };
    assert_eq!(compare(&short, &full).unwrap(), prefix);

    let (soon, after) = ("2026-12-01T00:01:00.000Z", "2026-12-01T01:05:00.000Z");
    let mut one = Forge::after(2);
    one.add(
        "EXPIRE",
        "EXPIRED",
        "requester",
        after,
        true,
        vec![evidence("DEADLINE", after)],
        false,
    );
    let mut two = Forge::after(2);
    two.add("EXPIRE", "EXPIRED", "worker", after, true, vec![evidence("DEADLINE", after)], false);
    let said = compare(&one.log(), &two.log()).unwrap();
    assert_eq!(said, Comparison::Diverged { seq: 3 });
    assert_eq!(said.code(), Some(Code::DivergedUnilateral));
    // The requester signed both: no accident.
    let mut three = Forge::after(2);
    three.add("CANCEL", "CANCELLING", "requester", soon, false, vec![cancel(soon)], true);
    let said = compare(&one.log(), &three.log()).unwrap();
    assert_eq!(said.code(), Some(Code::AuditFork));

    let mut other = full.clone();
    other.genesis.task_id = commsd::acp::value::TaskId::parse("task_example002").unwrap();
    assert_eq!(compare(&full, &other).unwrap_err().code(), Code::UnknownTask);
}

#[test]
fn a_redacted_copy_hides_user_data_only() {
    let log = read_jsonl(&file()).unwrap();
    let redacted = JsonlWriter::whole(&log, true).unwrap();
    let text = String::from_utf8(redacted.clone()).unwrap();
    assert!(!text.contains("Hello from Alice") && !text.contains("half way"));
    let report = verify(&read_jsonl(&redacted).unwrap(), None, NOW);
    assert_eq!((report.status, report.objects_missing), (Status::Valid, 3));
    assert_eq!(report.head.unwrap(), Digest::parse(HEAD).unwrap());
}
