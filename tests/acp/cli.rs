//! The command line: the real binary, in a directory of its own and without a daemon.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use commsd::acp::audit::{AuditLog, JsonlWriter, to_bundle};
use commsd::acp::did::Secret;
use commsd::acp::value::Digest;
use commsd::codec::time::UnixMillis;
use serde_json::{Value, json};

use crate::gateways;
use crate::support::{digest, golden, jcs, person};

/// Where a command runs.
struct Place {
    dir: tempfile::TempDir,
}

/// What it left behind.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ran {
    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).expect(&self.stdout)
    }

    /// The code of an error with `--json`; nothing is on stdout then.
    fn refused(&self) -> String {
        assert_eq!((self.code, self.stdout.as_str()), (Some(1), ""), "{self:?}");
        let error: Value = serde_json::from_str(&self.stderr).expect(&self.stderr);
        error["error"]["code"].as_str().unwrap().to_owned()
    }
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let Output { status, stdout, stderr } = output;
        Self { code: status.code(), stdout: text(stdout), stderr: text(stderr) }
    }
}

impl Place {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path(name), bytes).unwrap();
    }

    /// The binary with nothing in its environment but this place, and proxies that nobody may use.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env_clear()
            .env("HOME", self.dir.path())
            .env("XDG_RUNTIME_DIR", self.dir.path())
            .env("COMMSD_NO_BROADCAST", "1")
            .env("http_proxy", "http://127.0.0.1:1")
            .env("ALL_PROXY", "http://127.0.0.1:1")
            .current_dir(self.dir.path())
            .stdin(Stdio::null());
        command
    }

    fn acp<S: AsRef<OsStr>>(&self, args: &[S]) -> Ran {
        let mut command = self.command(Path::new(env!("CARGO_BIN_EXE_commsd")));
        command.arg("acp").args(args).output().unwrap().into()
    }

    /// A key of the vectors as a file: 1 is the requester of the golden log, 2 its worker.
    fn key(&self, n: u8, name: &str) {
        let file = person(n).secret().to_key_file(UnixMillis(0));
        self.write(name, &file);
    }
}

/// A settled log of the past, by Alice and Bob; the golden one may be in the future of this clock.
fn settled() -> AuditLog {
    let pair = gateways::settled(1_750_000_000_000);
    AuditLog::of(pair.gateways[0].task(&pair.task).unwrap())
}

/// The same as a file.
fn jsonl(log: &AuditLog) -> Vec<u8> {
    JsonlWriter::whole(log, false).unwrap()
}

/// The same as a bundle that Bob has exported.
fn bundle(log: &AuditLog) -> Vec<u8> {
    jcs(&json!(to_bundle(log, &person(2).secret(), UnixMillis(1_760_000_000_000)).unwrap()))
}

/// An entry less, so that the task is still going on.
fn open(mut log: AuditLog) -> AuditLog {
    let last = log.entries.pop().unwrap();
    // What only it has named goes with it.
    let named = |d: &Digest| log.entries.iter().any(|entry| entry.payload.contains(d));
    let gone: Vec<Digest> = last.payload.into_iter().filter(|digest| !named(digest)).collect();
    gone.iter().for_each(|digest| drop(log.objects.remove(digest)));
    log
}

#[test]
fn keys_are_made_once_and_for_their_owner_alone() {
    let place = Place::new();
    let ran = place.acp(&["keygen", "key"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
    let bytes = fs::read(place.path("key")).unwrap();
    let secret = Secret::from_key_file(&bytes).unwrap();
    assert_eq!(ran.stdout, format!("{}\n", secret.did()));
    let seed = serde_json::from_slice::<Value>(&bytes).unwrap()["seed"].clone();
    assert!(!ran.stdout.contains(seed.as_str().unwrap()));
    let meta = fs::metadata(place.path("key")).unwrap();
    assert_eq!(meta.mode() & 0o777, 0o600);

    // Nothing is overwritten: a file, a directory, a link to nowhere.
    fs::create_dir(place.path("dir")).unwrap();
    symlink(place.path("nowhere"), place.path("link")).unwrap();
    for name in ["key", "dir", "link"] {
        assert_eq!(place.acp(&["keygen", name, "--json"]).refused(), "file_exists", "{name}");
    }
    assert_eq!(fs::read(place.path("key")).unwrap(), bytes);
    assert!(!place.path("nowhere").exists());
    assert_eq!(place.acp(&["keygen", "none/key", "--json"]).refused(), "file_not_written");

    // Names that are no text, or look like options or like control sequences.
    let raw = OsString::from(OsStr::from_bytes(b"k\xff\x1b[2J"));
    for name in [raw, "-k".into(), "ключ 🔑\n".into()] {
        let args = [OsStr::new("keygen"), OsStr::new("--"), &name];
        assert_eq!(place.acp(&args).code, Some(0), "{name:?}");
        let again = place.acp(&args);
        assert_eq!((again.code, again.stdout.as_str()), (Some(1), ""));
        assert!(!again.stderr.contains('\u{1b}'), "{again:?}");
        assert!(place.path(&name).exists());
    }
    let made = place.acp(&["--json", "keygen", "other"]).json();
    assert_eq!(made["path"], "other");
    assert_ne!(made["did"], json!(secret.did()));
}

#[test]
fn the_program_is_also_called_acp() {
    let place = Place::new();
    let program = place.path("acp");
    symlink(env!("CARGO_BIN_EXE_commsd"), &program).unwrap();
    let ran: Ran = place.command(&program).args(["keygen", "key"]).output().unwrap().into();
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.stdout.starts_with("did:key:z6Mk"));
    let help: Ran = place.command(&program).arg("--help").output().unwrap().into();
    assert_eq!(help.code, Some(0));
    assert!(help.stdout.contains("delegate") && !help.stdout.contains("room"), "{help:?}");
    assert!(help.stdout.contains("\nUsage: acp [OPTIONS] <COMMAND>\n"), "{help:?}");
    for args in [&["keygen"][..], &["run"], &["vault"]] {
        let usage: Ran = place.command(&program).args(args).output().unwrap().into();
        assert_eq!(usage.code, Some(2), "{args:?}");
        let line = usage.stderr.lines().find(|line| line.starts_with("Usage: ")).unwrap();
        assert!(line.starts_with("Usage: acp ") && !line.contains("acp acp"), "{line}");
    }
    let version: Ran = place.command(&program).arg("--version").output().unwrap().into();
    assert!(version.stdout.starts_with("acp "), "{version:?}");
    assert!(place.acp(&["--help"]).stdout.contains("\nUsage: commsd acp [OPTIONS] <COMMAND>\n"));
}

#[test]
fn a_group_without_a_command_shows_its_help() {
    let place = Place::new();
    for group in ["relay", "worker", "invite", "approvals"] {
        let help = place.acp(&[group, "--help"]);
        let ran = place.acp(&[group]);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{ran:?}");
        let first = |text: &str| text.lines().next().map(str::to_owned);
        assert_eq!(first(&ran.stderr), first(&help.stdout));
    }
}

#[test]
fn wrong_command_lines_are_usage() {
    let place = Place::new();
    for args in [
        &[][..],
        &["nonsense"],
        &["keygen"],
        &["keygen", "a", "b"],
        &["validate"],
        &["validate", "nonsense", "x"],
        &["approve", "key", "nonsense", "task_example001", "t", "o"],
        &["approve", "key", "external_send", "short", "t", "o"],
        &["relay", "start", "--port", "99999"],
        &["relay", "start", "--max-mailbox-bytes", "0"],
        &["worker", "start", "--relay", "http://127.0.0.1:1"],
        &["worker", "start", "--relay", "http://127.0.0.1:1", "--adapter", "nonsense"],
        &[
            "worker",
            "start",
            "--relay",
            "http://127.0.0.1:1",
            "--adapter",
            "command",
            "--expires-in",
            "31d",
        ],
        &["delegate", "--to", "x"],
        &["delegate", "--to", "x", "--title", "t", "--quorum-size", "2"],
        &["delegate", "--to", "x", "--title", "t", "--multi", "quorum", "--quorum-size", "0"],
        &["delegate", "--to", "x", "--title", "t", "--multi", "quorum", "--quorum-size", "17"],
        &["task", "short"],
        &["tasks", "--state", "NONSENSE"],
        &["approvals", "approve"],
        &["discover"],
        &["discover", "--relay", "127.0.0.1:8787"],
        &["mcp-server", "--allow-private-relay=perhaps"],
    ] {
        assert_eq!(place.acp(args).code, Some(2), "{args:?}");
    }
}

#[test]
fn logs_are_verified_and_the_exit_code_tells() {
    let place = Place::new();
    let log = settled();
    place.write("log.jsonl", &jsonl(&log));
    place.write("bundle.json", &bundle(&log));
    place.write("open.jsonl", &jsonl(&open(log.clone())));
    let mut torn = jsonl(&log);
    torn.extend_from_slice(b"{\"digest\":");
    place.write("torn.jsonl", &torn);
    for name in ["log.jsonl", "bundle.json", "torn.jsonl"] {
        let ran = place.acp(&["audit-verify", name, "--json"]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        let report = ran.json();
        assert_eq!((&report["status"], &report["state"]), (&json!("VALID"), &json!("SETTLED")));
        assert_eq!(report["torn"], name == "torn.jsonl");
        let text = place.acp(&["audit-verify", name]);
        assert!(text.stdout.starts_with("status") && text.stdout.contains("VALID"), "{text:?}");
    }
    let open = place.acp(&["audit-verify", "open.jsonl", "--json"]);
    assert_eq!((open.code, &open.json()["status"]), (Some(3), &json!("OPEN")));

    // An anchor that fits, one of another head, and a checkpoint that knows more.
    let report = place.acp(&["audit-verify", "log.jsonl", "--json"]).json();
    let mut anchor = json!({ "taskId": report["taskId"], "actors": log.genesis.actors,
                             "head": report["head"] });
    place.write("anchor.json", &jcs(&anchor));
    assert_eq!(place.acp(&["audit-verify", "log.jsonl", "anchor.json"]).code, Some(0));
    anchor["head"] = digest(&json!(1)).into();
    place.write("other.json", &jcs(&anchor));
    let other = place.acp(&["audit-verify", "log.jsonl", "other.json", "--json"]);
    assert_eq!(other.code, Some(1));
    assert_eq!(other.json()["failures"][0]["code"], "ANCHOR_MISMATCH");
    place.key(1, "alice");
    let made = place.acp(&["checkpoint", "log.jsonl", "point.json", "--key", "alice", "--json"]);
    assert_eq!((made.code, &made.json()["head"]), (Some(0), &report["head"]));
    assert_eq!(place.acp(&["audit-verify", "log.jsonl", "point.json"]).code, Some(0));
    let cut = place.acp(&["audit-verify", "open.jsonl", "point.json", "--json"]);
    assert_eq!((cut.code, &cut.json()["status"]), (Some(1), &json!("TRUNCATED")));
    place.key(9, "eve");
    let strange = ["checkpoint", "log.jsonl", "eve.json", "--key", "eve", "--json"];
    assert_eq!(place.acp(&strange).refused(), "WRONG_SIGNER");
    assert!(!place.path("eve.json").exists());

    // What is no log, and what is no file.
    let text = String::from_utf8(jsonl(&log)).unwrap();
    place.write("bent.jsonl", text.replacen("SETTLE", "SETTLÉ", 1).as_bytes());
    place.write("empty", b"");
    place.write("junk", b"hello\nthere\n");
    place.write("object", b"{}");
    fs::create_dir(place.path("dir")).unwrap();
    for (name, code) in [
        ("bent.jsonl", "BAD_FIELD"),
        ("empty", "AUDIT_INVALID"),
        ("junk", "BAD_JSON"),
        ("object", "MISSING_MEMBER"),
    ] {
        let ran = place.acp(&["audit-verify", name, "--json"]);
        let report = ran.json();
        assert_eq!((ran.code, &report["status"]), (Some(1), &json!("INVALID")), "{name}");
        let failure = &report["failures"][0];
        assert_eq!((&failure["seq"], &failure["code"]), (&Value::Null, &json!(code)), "{name}");
        let detail = failure["detail"].as_str().unwrap();
        assert!(detail.starts_with(&format!("{name}: {code}")), "{detail}");
        assert_eq!(detail.contains("/line "), name == "bent.jsonl", "{detail}");
        // Where only good logs are of use, it is an error that names the file.
        let compared = place.acp(&["audit-compare", "log.jsonl", name]);
        assert_eq!((compared.code, compared.stdout.as_str()), (Some(1), ""));
        assert!(compared.stderr.contains(detail), "{compared:?}");
    }
    let text = place.acp(&["audit-verify", "junk"]);
    assert_eq!((text.code, text.stderr.as_str()), (Some(1), ""));
    assert!(
        text.stdout.starts_with("status   INVALID\nfailure  junk: BAD_JSON: not a log"),
        "{text:?}"
    );
    for name in ["dir", "missing"] {
        let ran = place.acp(&["audit-verify", name, "--json"]);
        assert_eq!(ran.refused(), "file_unreadable", "{name}");
    }
}

#[test]
fn copies_are_compared() {
    let place = Place::new();
    let log = settled();
    place.write("log.jsonl", &jsonl(&log));
    place.write("bundle.json", &bundle(&log));
    place.write("open.jsonl", &jsonl(&open(log.clone())));
    for (first, second, result) in [
        ("log.jsonl", "bundle.json", "equal"),
        ("log.jsonl", "open.jsonl", "prefix"),
        ("open.jsonl", "log.jsonl", "prefix"),
    ] {
        let ran = place.acp(&["audit-compare", first, second, "--json"]);
        assert_eq!((ran.code, &ran.json()["result"]), (Some(0), &json!(result)), "{ran:?}");
    }
    let text = place.acp(&["audit-compare", "open.jsonl", "log.jsonl"]);
    assert!(text.stdout.contains("the first copy ends there"), "{text:?}");
}

#[test]
fn logs_change_their_form_and_nothing_else() {
    let place = Place::new();
    let whole = jsonl(&settled());
    place.write("log.jsonl", &whole);
    place.key(2, "bob");
    let needs_key = place.acp(&["audit-export", "log.jsonl", "bundle.json", "--json"]);
    assert_eq!((needs_key.code, needs_key.stdout.as_str()), (Some(2), ""));
    let there = place.acp(&["audit-export", "log.jsonl", "bundle.json", "--key", "bob", "--json"]);
    assert_eq!((there.code, &there.json()["form"]), (Some(0), &json!("bundle")), "{there:?}");
    assert_eq!(fs::metadata(place.path("bundle.json")).unwrap().mode() & 0o777, 0o600);
    assert_eq!(place.acp(&["validate", "audit-bundle", "bundle.json"]).code, Some(0));
    assert_eq!(place.acp(&["audit-export", "bundle.json", "back.jsonl"]).code, Some(0));
    assert_eq!(fs::read(place.path("back.jsonl")).unwrap(), whole);
    let over = place.acp(&["audit-export", "bundle.json", "log.jsonl", "--json"]);
    assert_eq!(over.refused(), "file_exists");
    assert_eq!(fs::read(place.path("log.jsonl")).unwrap(), whole);

    // A redacted copy verifies, and has no user data.
    let args = ["audit-export", "log.jsonl", "short.json", "--key", "bob", "--redact"];
    assert_eq!(place.acp(&args).code, Some(0));
    let report = place.acp(&["audit-verify", "short.json", "--json"]).json();
    assert_eq!(report["status"], "VALID");
    assert!(report["objectsMissing"].as_u64().unwrap() > 0);
    let size = |name: &str| fs::metadata(place.path(name)).unwrap().len();
    assert!(size("short.json") < size("bundle.json"));
}

#[test]
fn approvals_are_signed_for_one_exact_action() {
    let place = Place::new();
    place.key(1, "alice");
    let contract = digest(&json!("contract"));
    let target = json!({ "gate": "contract_acceptance", "contractDigest": contract });
    place.write("target.json", format!("{target:#}").as_bytes());
    let approve = |gate: &str, target: &str, out: &str, more: &[&str]| {
        let args = ["approve", "alice", gate, "task_example001", target, out, "--json"];
        place.acp(&[&args[..], more].concat())
    };
    let more = ["--reason", "fine", "--expires-in", "5m"];
    let ran = approve("contract_acceptance", "target.json", "yes.json", &more);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let receipt: Value =
        serde_json::from_slice(&fs::read(place.path("yes.json")).unwrap()).unwrap();
    assert_eq!(receipt["targetDigest"], digest(&target));
    assert_eq!(
        [&receipt["decision"], &receipt["mode"], &receipt["reason"], &receipt["approverDid"]],
        [&json!("approved"), &json!("human"), &json!("fine"), &json!(person(1).did)]
    );
    let time = |name: &str| commsd::acp::value::Time::parse(receipt[name].as_str().unwrap());
    assert_eq!(time("expiresAt").unwrap(), time("issuedAt").unwrap().plus(300_000));
    let valid = place.acp(&["validate", "approval-receipt", "yes.json", "--json"]);
    assert_eq!((valid.code, &valid.json()["type"]), (Some(0), &json!("ApprovalReceipt")));

    let no = approve("contract_acceptance", "target.json", "no.json", &["--deny"]);
    assert_eq!(no.json()["decision"], "denied");
    let again = approve("contract_acceptance", "target.json", "yes.json", &[]);
    assert_eq!(again.refused(), "file_exists");
    let other = approve("final_acceptance", "target.json", "other.json", &[]);
    assert_eq!(other.refused(), "APPROVAL_MISMATCH");
    for (name, text, code) in [
        (
            "more.json",
            json!({ "gate": "contract_acceptance", "contractDigest": contract, "x": 1 }),
            "BAD_FIELD",
        ),
        ("less.json", json!({ "gate": "contract_acceptance" }), "BAD_FIELD"),
        ("none.json", json!({ "gate": "nonsense" }), "BAD_FIELD"),
    ] {
        place.write(name, &jcs(&text));
        assert_eq!(approve("contract_acceptance", name, "out.json", &[]).refused(), code);
    }
    place.write(
        "twice.json",
        b"{\"gate\":\"contract_acceptance\",\"gate\":\"contract_acceptance\"}",
    );
    let twice = approve("contract_acceptance", "twice.json", "out.json", &[]);
    assert_eq!(twice.refused(), "DUPLICATE_MEMBER");
    place.write("huge.json", &vec![b' '; 64 * 1024 + 1]);
    let huge = approve("contract_acceptance", "huge.json", "out.json", &[]);
    assert_eq!(huge.refused(), "file_too_large");
    place.write("alice", &vec![b' '; 4097]);
    let huge = approve("contract_acceptance", "target.json", "out.json", &[]);
    assert_eq!(huge.refused(), "file_too_large");
    assert!(!place.path("out.json").exists());
}

#[test]
fn objects_are_validated_by_type() {
    let place = Place::new();
    let bundle: Value = serde_json::from_slice(&golden("acp-bundle-settled.v1.json")).unwrap();
    let objects = bundle["objects"].as_object().unwrap();
    let contract = objects.values().find(|object| object["type"] == "TaskContract").unwrap();
    place.write("manifest", &jcs(&contract["manifest"]));
    place.write("contract", &jcs(contract));
    // A file may be called what a type is called.
    place.write("invite", &jcs(&contract["manifest"]));
    for args in [
        &["validate", "manifest"][..],
        &["validate", "task-manifest", "manifest"],
        &["validate", "task-contract", "contract"],
        &["validate", "contract"],
        &["validate", "invite"],
    ] {
        assert_eq!(place.acp(args).code, Some(0), "{args:?}");
    }
    let mut changed = contract["manifest"].clone();
    changed["title"] = "\u{1b}[2J".into();
    place.write("changed", &jcs(&changed));
    assert_eq!(place.acp(&["validate", "changed", "--json"]).refused(), "BAD_FIELD");
    place.write("log.jsonl", &jsonl(&settled()));
    let log = place.acp(&["validate", "log.jsonl"]);
    assert_eq!((log.code, log.stdout.as_str()), (Some(2), ""));
    assert!(log.stderr.contains("audit-verify"), "{log:?}");
    let text = place.acp(&["validate", "task-contract", "manifest"]);
    assert_eq!((text.code, text.stdout.as_str()), (Some(1), ""));
    assert!(text.stderr.contains("BAD_FIELD at /type"), "{text:?}");

    if !rustix_is_root() {
        place.write("closed", b"{}");
        let closed = fs::Permissions::from_mode(0o000);
        fs::set_permissions(place.path("closed"), closed).unwrap();
        let refused = place.acp(&["validate", "closed", "--json"]);
        assert_eq!(refused.refused(), "file_unreadable");
    }
}

/// Root reads everything.
fn rustix_is_root() -> bool {
    let own = tempfile::tempfile().unwrap();
    own.metadata().unwrap().uid() == 0
}

#[test]
fn invites_are_shown_and_what_they_say_stays_text() {
    let place = Place::new();
    let bob = person(2);
    let mut invite = json!({
        "type": "Invite", "version": "1.0", "inviteId": "inv_example001", "issuerDid": bob.did,
        "name": "bob\u{202e}\u{200b}", "relayUrls": ["https://relay.example"],
        "encryptionKey": null, "adapters": ["command"], "skills": [], "maxUses": 1,
        "issuedAt": "2020-01-01T00:00:00.000Z", "expiresAt": "2020-01-02T00:00:00.000Z",
        "nonce": "AAAAAAAAAAAAAAAAAAAAAA",
    });
    invite = bob.sign(invite, "invite", "issuer");
    let token = data_encoding::BASE64URL_NOPAD.encode(&jcs(&invite));
    for text in [format!("acp-invite:{token}"), format!(" acp://invite?token={token}\n")] {
        let shown = place.acp(&["invite", "show", &text]);
        assert_eq!(shown.code, Some(0), "{shown:?}");
        assert!(shown.stdout.contains("bob\\u{202e}\\u{200b}"), "{shown:?}");
        assert!(shown.stdout.contains("INVITE_EXPIRED") && shown.stdout.contains(&bob.did));
        let json = place.acp(&["invite", "show", &text, "--json"]);
        assert_eq!(json.json()["code"], "INVITE_EXPIRED");
        assert_eq!(json.json()["invite"], invite);
        assert!(!json.stdout.contains('\u{202e}'));
        place.write("file", text.as_bytes());
        assert_eq!(place.acp(&["validate", "invite", "file"]).code, Some(0));
    }
    for bad in ["", "acp-invite:", "acp://invite?token=a&b=c", &token] {
        assert_eq!(place.acp(&["invite", "show", bad, "--json"]).refused(), "BAD_INVITE");
    }
}

/// A relay that answers one request; the request's first line.
fn relay(answer: &str) -> (String, std::thread::JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let answer = format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{answer}",
        answer.len()
    );
    let serving = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut head = Vec::new();
        let mut byte = [0; 1];
        while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() == 1 {
            head.push(byte[0]);
        }
        stream.write_all(answer.as_bytes()).unwrap();
        String::from_utf8(head).unwrap().lines().next().unwrap().to_owned()
    });
    (url, serving)
}

#[test]
fn workers_are_discovered() {
    let place = Place::new();
    let (bob, now) = (person(2), commsd::runtime::clock::unix_now());
    let time = |ms: u64| commsd::acp::value::Time::from(now.plus(ms)).to_string();
    let card = |expires: String| {
        let card = json!({
            "type": "WorkerCard", "version": "1.0", "cardId": "card_example001", "did": bob.did,
            "name": "b\u{200b}ob", "description": "", "adapters": ["command"], "skills": ["x y"],
            "isolation": ["kernel"], "relayUrls": ["https://relay.example"],
            "encryptionKey": null, "issuedAt": time(0), "expiresAt": expires,
        });
        bob.sign(card, "worker-card", "worker")
    };
    let mut forged = card(time(3_600_000));
    forged["name"] = "eve".into();
    let list =
        json!({ "cards": [card(time(3_600_000)), forged, card(time(90_000_000))], "next": null });
    let (url, asked) = relay(&list.to_string());
    let ran = place.acp(&["discover", "--relay", &url, "--skill", "x y"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(asked.join().unwrap(), "GET /v1/registry?limit=50&skill=x%20y HTTP/1.1");
    assert!(ran.stdout.contains("b\\u{200b}ob") && ran.stdout.contains(&bob.did), "{ran:?}");
    assert!(!ran.stdout.contains("eve") && ran.stdout.contains("2 cards are not good"), "{ran:?}");
    let (url, _asked) = relay(&list.to_string());
    let ran = place.acp(&["discover", "--relay", &url, "--json"]);
    assert_eq!(
        (ran.json()["cards"].as_array().unwrap().len(), &ran.json()["refused"]),
        (1, &json!(2))
    );

    // Nobody there, and where nobody may go.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{free}");
    let ran = place.acp(&["discover", "--relay", &url]);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(4), ""), "{ran:?}");
    assert!(ran.stderr.contains("RELAY_UNREACHABLE"));
    assert!(ran.stderr.contains("check the relay's URL"), "{ran:?}");
    for args in [
        &["--relay", "http://169.254.169.254/"][..],
        &["--relay", &url, "--allow-private-relay=false"],
        &["--relay", "http://192.0.2.1/"],
    ] {
        let ran = place.acp(&[&["discover", "--json"], args].concat());
        assert_eq!(ran.refused(), "ENDPOINT_BLOCKED", "{args:?}");
    }
}

#[test]
fn a_reader_that_has_gone_is_no_failure() {
    let place = Place::new();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = place.command(Path::new(env!("CARGO_BIN_EXE_commsd")));
    let status = command.args(["acp", "keygen", "key"]).stdout(writer).status().unwrap();
    assert_eq!(status.code(), Some(0));
    assert!(place.path("key").exists());
}

/// The relay as a process, and a command that asks it.
#[test]
fn a_relay_is_started_asked_and_stopped() {
    let place = Place::new();
    let mut command = place.command(Path::new(env!("CARGO_BIN_EXE_commsd")));
    command.args(["acp", "--json", "relay", "start", "--port", "0", "--state", "relay"]);
    let mut relay = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    let stdout = relay.stdout.take().unwrap();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line).unwrap();
    let started: Value = serde_json::from_str(&line).unwrap();
    let url = started["url"].as_str().unwrap();
    assert_eq!(started["pid"], relay.id());
    let ran = place.acp(&["discover", "--relay", url]);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "no worker is listed\n"), "{ran:?}");
    // Its store is its own.
    let second = place.acp(&["relay", "start", "--port", "0", "--state", "relay", "--json"]);
    assert_eq!((second.code == Some(0), second.stdout.as_str()), (false, ""), "{second:?}");
    let pid = rustix::process::Pid::from_child(&relay);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(relay.wait().unwrap().code(), Some(0));
    assert_eq!(place.acp(&["discover", "--relay", url]).code, Some(4));

    // Everywhere is no place that a token can name.
    let args = ["relay", "start", "--host", "0.0.0.0", "--port", "0", "--state", "other"];
    let ran = place.acp(&args);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{ran:?}");

    // Open to others without TLS: whoever starts it is told.
    let mut command = place.command(Path::new(env!("CARGO_BIN_EXE_commsd")));
    command.args(["acp"]).args(args).args(["--origin", "http://relay.example", "--log", "json"]);
    let mut relay = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = std::io::BufReader::new(relay.stderr.take().unwrap());
    let mut said = String::new();
    while !said.contains("--behind-proxy") {
        let read = std::io::BufRead::read_line(&mut stderr, &mut said).unwrap();
        assert_ne!(read, 0, "{said}");
    }
    assert!(said.contains("acp_relay_plaintext"), "{said}");
    let pid = rustix::process::Pid::from_child(&relay);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    relay.wait().unwrap();
}

/// The office of a key, opened for the moment: it knows no relay.
#[test]
fn an_invite_needs_a_relay() {
    let place = Place::new();
    assert_eq!(place.acp(&["keygen", "bob"]).code, Some(0));
    let without = ["invite", "create", "--key", "bob", "--state-dir", "state"];
    let ran = place.acp(&without);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{ran:?}");
    assert!(ran.stderr.contains("--relay URL"), "{ran:?}");
    let ran = place.acp(&[&without[..], &["--relay", "http://127.0.0.1:1"]].concat());
    assert!(ran.code == Some(0) && ran.stdout.starts_with("acp-invite:"), "{ran:?}");
}
