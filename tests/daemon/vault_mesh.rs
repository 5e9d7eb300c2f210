//! A vault of one daemon used through another: sharing, permissions, reading and writing, and what
//! must not be possible, with the real command line on both sides.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use commsd::api::types::{VaultCallParams, VaultOp};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

use crate::bench::{HANG, soon};
use crate::daemon::{Daemon, Ports};

struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ran {
    #[track_caller]
    fn ok(&self) -> Value {
        assert_eq!(self.code, Some(0), "{}\n{}", self.stdout, self.stderr);
        serde_json::from_str(&self.stdout).unwrap_or_else(|_| panic!("{}", self.stdout))
    }

    #[track_caller]
    fn refused(&self, code: i32, says: &str) {
        assert_eq!(self.code, Some(code), "{}\n{}", self.stdout, self.stderr);
        assert!(self.stderr.contains(says), "{:?} in {}", says, self.stderr);
        assert_eq!(self.stdout, "");
    }
}

/// The shell of a daemon's user.
async fn shell(home: &Path, args: &[&str], stdin: &str) -> Ran {
    let mut child = Command::new(env!("CARGO_BIN_EXE_commsd"))
        .arg("--home")
        .arg(home)
        .args(args)
        .env_clear()
        .env("HOME", home)
        .env("COMMSD_NO_BROADCAST", "1")
        .current_dir(home)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let text = stdin.to_owned();
    // A command that refuses before it reads leaves a broken pipe.
    tokio::spawn(async move { input.write_all(text.as_bytes()).await });
    let output = soon(child.wait_with_output()).await.unwrap();
    Ran {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Two daemons that have met; alice's shares a vault, bob wants to use it.
struct Pair {
    one: Daemon,
    two: Daemon,
    project: PathBuf,
}

const PAGE: &str = "---\ntype: decision\nstack: [rust]\nstatus: active\nsummary: Where tokens are \
                    checked.\n---\n\n# Auth\n\nJWT validation occurs at the service boundary.\n";

impl Pair {
    async fn new() -> Self {
        let ports = Ports::free();
        let (one, two) = tokio::join!(Daemon::start(ports), Daemon::start(ports));
        let alice = one.agent("alice").await;
        let bob = two.agent("bob").await;
        tokio::join!(one.has_met(&bob.id), two.has_met(&alice.id));
        let project = one.home.path().join("my project");
        std::fs::create_dir(&project).unwrap();
        let pair = Self { one, two, project };
        pair.here(&["init"], "").await.ok();
        let page = json!({"filename": "auth", "content": PAGE}).to_string();
        pair.here(&["upsert"], &page).await.ok();
        pair
    }

    /// A command on the vault where it is.
    async fn here(&self, args: &[&str], stdin: &str) -> Ran {
        let project = self.project.to_str().unwrap();
        let args: Vec<&str> =
            ["vault", "--workspace", project].iter().chain(args).copied().collect();
        shell(self.one.home.path(), &args, stdin).await
    }

    async fn owner(&self, args: &[&str]) -> Ran {
        shell(self.one.home.path(), args, "").await
    }

    async fn share(&self, mode: &str) -> Value {
        self.owner(&["vault", "share", "my project", "--name", "notes", mode, "--json"]).await.ok()
    }

    /// bob's command on the shared vault.
    async fn there(&self, args: &[&str], stdin: &str) -> Ran {
        let args: Vec<&str> =
            ["vault", "--at", "alice/notes", "--as", "bob"].iter().chain(args).copied().collect();
        shell(self.two.home.path(), &args, stdin).await
    }

    async fn ask(&self, args: &[&str]) -> Ran {
        let args: Vec<&str> = ["vault", "request", "alice/notes", "--as", "bob", "--json"]
            .iter()
            .chain(args)
            .copied()
            .collect();
        shell(self.two.home.path(), &args, "").await
    }

    /// The operator says yes to the one request that waits.
    async fn accept(&self, args: &[&str]) {
        let pending = self.owner(&["pending", "--json"]).await.ok();
        let requests = pending["requests"].as_array().unwrap();
        assert_eq!(requests.len(), 1, "{pending}");
        assert_eq!(
            (&requests[0]["kind"], &requests[0]["share"]),
            (&json!("capability"), &json!("notes"))
        );
        let id = requests[0]["id"].as_str().unwrap();
        let args: Vec<&str> = ["accept", id, "--json"].iter().chain(args).copied().collect();
        assert_eq!(self.owner(&args).await.ok()["accepted"], true);
    }

    /// Asks, has it granted, and waits until bob has heard of it.
    async fn grant(&self, mode: &str, terms: &[&str]) {
        assert_eq!(self.ask(&[mode]).await.ok()["status"], "pending");
        self.accept(terms).await;
        self.hears("capability_outcome").await;
    }

    /// Until an event of this type has come into bob's mailbox.
    async fn hears(&self, kind: &str) -> Value {
        let search = async {
            loop {
                let home = self.two.home.path();
                let inbox =
                    shell(home, &["inbox", "--as", "bob", "--wait", "20", "--json"], "").await;
                let inbox = inbox.ok();
                let events = inbox["events"].as_array().unwrap();
                if let Some(event) = events.iter().find(|event| event["type"] == kind) {
                    return event.clone();
                }
            }
        };
        tokio::time::timeout(HANG, search).await.unwrap()
    }
}

#[tokio::test]
async fn a_vault_is_read_and_written_by_whom_its_operator_lets() {
    let pair = Pair::new().await;
    pair.there(&["search", "jwt"], "").await.refused(1, "vault request");
    let shared = pair.share("--write").await;
    assert_eq!((&shared["name"], &shared["mode"]), (&json!("notes"), &json!("write")));
    assert_eq!(shared["path"], pair.project.to_str().unwrap());

    pair.grant("--read", &[]).await;
    // Shapes are those of the command line there, but for where the vault lies.
    let local = pair.here(&["search", "JWT"], "").await.ok();
    assert_eq!(pair.there(&["search", "JWT"], "").await.ok(), local);
    let hash = pair.there(&["hash", "auth"], "").await.ok();
    assert_eq!(hash["sha256"], pair.here(&["hash", "auth"], "").await.ok()["sha256"]);
    assert_eq!(hash["page"], "notes/EchoesVault/pages/auth.md");
    let page = pair.there(&["page", "auth"], "").await.ok();
    assert_eq!((&page["text"], &page["sha256"]), (&json!(PAGE), &hash["sha256"]));
    let index = pair.there(&["index"], "").await.ok();
    assert!(index["text"].as_str().unwrap().contains("Where tokens are checked."), "{index}");
    let inspected = pair.there(&["inspect"], "").await;
    assert_eq!(inspected.ok()["ok"], true);
    assert!(!inspected.stdout.contains("my project"), "{}", inspected.stdout);

    // Reading is not writing.
    let note = json!({"entry": "- from afar", "agent": "ana"}).to_string();
    pair.there(&["append"], &note).await.refused(1, "no permission to write");
    // The agent that was asked answers with the tool, narrower first.
    assert_eq!(pair.ask(&["--write"]).await.ok()["status"], "pending");
    let action = |call: Value| {
        let home = pair.one.home.path().to_owned();
        async move { shell(&home, &["action", "--as", "alice", &call.to_string()], "").await }
    };
    let pending = action(json!({"action": "capability_pending"})).await;
    assert!(
        pending.stdout.contains("x-commsd-vault:write on the shared vault \"notes\""),
        "{}",
        pending.stdout
    );
    let id = pending.stdout.lines().nth(1).unwrap().split(' ').next().unwrap().to_owned();
    let wrong = json!({"action": "capability_accept", "requestId": id, "expires": 5});
    assert_eq!(action(wrong).await.code, Some(1), "a time that is over");
    let no = json!({"action": "capability_reject", "requestId": id, "reason": "read it first"});
    assert_eq!(action(no).await.code, Some(0));
    let outcome = pair.hears("capability_outcome").await;
    assert_eq!(
        (&outcome["accepted"], &outcome["reason"]),
        (&json!(false), &json!("read it first"))
    );
    pair.grant("--write", &[]).await;

    let appended = pair.there(&["append"], &note).await.ok();
    assert_eq!((&appended["kind"], &appended["agent"]), (&json!("scratchpad"), &json!("bob")));
    assert!(appended["dailyLog"].as_str().unwrap().starts_with("notes/EchoesVault/daily/"));
    // A local writer is in between: the hash says so, and the newer one goes on.
    let replace = |hash: &Value, text: &str| {
        let content = PAGE.replace("# Auth", text);
        json!({"filename": "auth", "content": content, "expectedSha256": hash}).to_string()
    };
    pair.here(&["upsert"], &replace(&hash["sha256"], "# Local")).await.ok();
    let stale = pair.there(&["upsert"], &replace(&hash["sha256"], "# Remote")).await;
    stale.refused(2, "has changed since it was read");
    assert_eq!(serde_json::from_str::<Value>(&stale.stderr).unwrap()["ok"], false);
    let hash = pair.there(&["hash", "auth"], "").await.ok();
    let written = pair.there(&["upsert"], &replace(&hash["sha256"], "# Remote")).await.ok();
    assert_eq!(written["action"], "updated");
    let text = std::fs::read_to_string(pair.project.join("EchoesVault/pages/auth.md")).unwrap();
    assert!(text.contains("# Remote"), "{text}");
    // The end of a session is the user's to ask for.
    let end = json!({"dailySummary": "Did much."}).to_string();
    pair.there(&["end"], &end).await.refused(2, "--confirm-explicit-user-end");
    pair.there(&["end", "--confirm-explicit-user-end"], &end).await.ok();

    // Taken back, it is over at once; the other permissions of others would stand.
    let revoked = pair.owner(&["vault", "revoke", "notes", "bob", "--json"]).await.ok();
    assert!(revoked["grants"].as_array().unwrap().iter().all(|grant| grant["revoked"] == true));
    pair.there(&["index"], "").await.refused(1, "taken back");
    pair.there(&["append"], &note).await.refused(1, "taken back");
    for event in [
        "vault_shared",
        "capability_asked",
        "capability_granted",
        "capability_refused",
        "capability_revoked",
    ] {
        pair.one.event(event).await;
    }
}

#[tokio::test]
async fn a_shares_owner_is_named_by_the_beginning_of_its_id_too() {
    let pair = Pair::new().await;
    pair.share("--read").await;
    // The daemon itself has the share, as its agents do.
    let daemon = pair.one.device().await;
    for owner in [&daemon[..], &daemon[..12]] {
        let at = format!("{owner}/notes");
        let args = ["vault", "request", &at, "--as", "bob", "--json"];
        let asked = shell(pair.two.home.path(), &args, "").await.ok();
        assert_eq!(asked["agent"], daemon, "{asked}");
    }
    let at = format!("{}/notes", &daemon[..7]);
    let args = ["vault", "request", &at, "--as", "bob"];
    shell(pair.two.home.path(), &args, "").await.refused(1, "agents");
}

/// A name stands for a conversation or a room, and a yes to it must not open a vault.
#[tokio::test]
async fn a_permission_is_given_by_its_id_alone_and_told_as_it_was_given() {
    let pair = Pair::new().await;
    pair.share("--write").await;
    assert_eq!(pair.ask(&["--write"]).await.ok()["status"], "pending");
    for words in [&["accept", "bob"][..], &["accept", "--as", "alice", "bob"], &["reject", "bob"]] {
        pair.owner(words).await.refused(1, "by its id alone: capability ");
    }
    let pending = pair.owner(&["pending", "--json"]).await.ok();
    let id = pending["requests"][0]["id"].as_str().unwrap();
    let given = pair.owner(&["accept", id, "--read", "--json"]).await.ok();
    assert_eq!(given["request"]["capability"], "x-commsd-vault:read");
    pair.hears("capability_outcome").await;
    pair.there(&["hash", "auth"], "").await.ok();
}

#[tokio::test]
async fn permissions_end_and_outlive_restarts() {
    let pair = Pair::new().await;
    pair.share("--write").await;
    pair.grant("--write", &["--read", "--for", "100000"]).await;
    pair.there(&["append"], "{\"entry\": \"x\"}").await.refused(1, "no permission to write");
    // Both sides come back.
    let Pair { one, two, project } = pair;
    let ports = one.ports;
    let (one_home, two_home) = (one.home.clone(), two.home.clone());
    one.stop().await;
    two.kill().await;
    let one = Daemon::start_with(one_home, ports, &[]).await;
    let two = Daemon::start_with(two_home, ports, &[]).await;
    let alice = one.agent("alice").await;
    let bob = two.agent("bob").await;
    tokio::join!(one.has_met(&bob.id), two.has_met(&alice.id));
    let pair = Pair { one, two, project };
    let shares = pair.owner(&["vault", "shares", "--json"]).await.ok();
    assert_eq!(shares["shares"][0]["name"], "notes");
    assert_eq!(shares["shares"][0]["grants"][0]["mode"], "read");
    pair.there(&["index"], "").await.ok();
    // A short one ends by itself.
    assert_eq!(pair.ask(&["--write", "--for", "60"]).await.ok()["status"], "pending");
    pair.accept(&["--for", "2"]).await;
    pair.hears("capability_outcome").await;
    let over = async {
        loop {
            let ran = pair.there(&["append"], "{\"entry\": \"x\"}").await;
            if ran.code == Some(1) {
                return ran;
            }
            ran.ok();
        }
    };
    let over = tokio::time::timeout(HANG, over).await.unwrap();
    // Said by whichever side finds it first.
    assert!(
        over.stderr.contains("is over") || over.stderr.contains("has expired"),
        "{}",
        over.stderr
    );
    // Not shared any more: nobody has anything.
    pair.owner(&["vault", "unshare", "notes", "--json"]).await.ok();
    pair.there(&["index"], "").await.refused(1, "taken back");
    assert_eq!(pair.owner(&["vault", "shares", "--json"]).await.ok()["shares"], json!([]));
    // And whoever is gone cannot be asked.
    let gone = pair.one.kill().await;
    let refused = shell(
        pair.two.home.path(),
        &["vault", "request", "alice/notes", "--as", "bob", "--wait", "20"],
        "",
    )
    .await;
    assert_eq!(refused.code, Some(1), "{}", refused.stdout);
    drop(gone);
}

#[tokio::test]
async fn long_answers_come_in_parts_and_names_lead_nowhere_else() {
    let pair = Pair::new().await;
    pair.share("--write").await;
    pair.grant("--write", &[]).await;
    // Longer than one answer, with characters that double in JSON and some of several bytes.
    let line = "\"quoted\" — and \\escaped\\ — ünïcode\n";
    let long = format!("{PAGE}{}", line.repeat(2_600_000 / line.len()));
    std::fs::write(pair.project.join("EchoesVault/pages/long.md"), &long).unwrap();
    assert_eq!(pair.there(&["page", "long"], "").await.ok()["text"], json!(long));
    // A payload that no line of the local API holds, and one that the mesh does not take.
    let content = format!("{PAGE}{}", "x ".repeat(200_000));
    let page = json!({"filename": "wide", "content": content}).to_string();
    pair.there(&["upsert"], &page).await.ok();
    let stored = std::fs::read_to_string(pair.project.join("EchoesVault/pages/wide.md")).unwrap();
    assert_eq!(stored.len(), content.len());
    let page = json!({"filename": "wider", "content": "x".repeat(1_100_000)}).to_string();
    pair.there(&["upsert"], &page).await.refused(2, "at most 1048576 bytes");
    // Outside: by name, by link.
    let secret = pair.one.home.path().join("secret.md");
    std::fs::write(&secret, format!("{PAGE}secret")).unwrap();
    std::os::unix::fs::symlink(&secret, pair.project.join("EchoesVault/pages/link.md")).unwrap();
    for name in [
        "../../../secret",
        "..",
        "/etc/passwd",
        "a/b",
        "link",
        "a\nb",
        "a\u{202e}b",
        "\u{7}",
        "",
        "nowhere",
    ] {
        let ran = pair.there(&["page", "--", name], "").await;
        assert_eq!(ran.code, Some(2), "{name:?}: {} {}", ran.stdout, ran.stderr);
        assert!(
            !ran.stderr.contains("secret\n") && !ran.stderr.contains(['\u{202e}', '\u{7}']),
            "{}",
            ran.stderr
        );
        let page = json!({"filename": name, "content": PAGE}).to_string();
        if name != "nowhere" {
            let ran = pair.there(&["upsert"], &page).await;
            assert_eq!(ran.code, Some(2), "{name:?}: {}", ran.stdout);
        }
    }
    assert_eq!(std::fs::read_to_string(&secret).unwrap(), format!("{PAGE}secret"));
    std::fs::remove_file(pair.project.join("EchoesVault/pages/link.md")).unwrap();
    // What cannot be a share, and what is no vault.
    for name in ["", "a/b", "..", "a\nb", &"x".repeat(65)] {
        let ran = pair.owner(&["vault", "share", "my project", "--name", name]).await;
        assert_eq!(ran.code, Some(1), "{name:?}");
    }
    std::fs::create_dir(pair.one.home.path().join("empty")).unwrap();
    let ran = pair.owner(&["vault", "share", "empty", "--name", "empty"]).await;
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    // Moved away: said without saying where it was.
    std::fs::rename(&pair.project, pair.one.home.path().join("elsewhere")).unwrap();
    let ran = pair.there(&["index"], "").await;
    ran.refused(2, "the shared folder cannot be used");
    assert!(!ran.stderr.contains("my project"), "{}", ran.stderr);
}

#[tokio::test]
async fn a_flood_of_calls_is_answered_and_harms_nobody() {
    let pair = Pair::new().await;
    pair.share("--read").await;
    pair.grant("--read", &[]).await;
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..24 {
        let home = pair.two.home.path().to_owned();
        calls.spawn(async move {
            shell(&home, &["vault", "--at", "alice/notes", "--as", "bob", "inspect"], "").await
        });
    }
    let mut done = 0;
    while let Some(ran) = calls.join_next().await {
        let ran = ran.unwrap();
        match ran.code {
            Some(0) => done += 1,
            _ => ran.refused(1, "too many calls"),
        }
    }
    assert!(done >= 1);
    pair.there(&["inspect"], "").await.ok();
    assert_eq!(pair.owner(&["vault", "shares", "--json"]).await.code, Some(0));
}

#[tokio::test]
async fn agents_of_the_sharing_daemon_ask_and_have_it() {
    let pair = Pair::new().await;
    pair.share("--read").await;
    let home = pair.one.home.path();
    let at = ["vault", "--at", "alice/notes", "--as", "carol"];
    let call: Vec<&str> = at.iter().chain(&["hash", "auth"]).copied().collect();
    shell(home, &call, "").await.refused(1, "vault request");
    let asked =
        shell(home, &["vault", "request", "alice/notes", "--as", "carol", "--json"], "").await;
    assert_eq!(asked.ok()["status"], "granted");
    shell(home, &call, "").await.ok();
    let write = ["vault", "request", "alice/notes", "--as", "carol", "--write"];
    shell(home, &write, "").await.refused(1, "reading only");
}

#[tokio::test]
async fn a_shared_vault_answers_as_a_local_one_byte_for_byte() {
    let pair = Pair::new().await;
    pair.share("--write").await;
    pair.grant("--write", &[]).await;
    let root = pair.project.to_str().unwrap();
    let alike = async |what: &str, args: &[&str], stdin: &str| {
        let here = pair.here(args, stdin).await;
        let there = pair.there(args, stdin).await;
        assert_eq!(there.code, here.code, "{what}: {}", there.stderr);
        let (out, err) = (here.stdout.replace(root, "notes"), here.stderr.replace(root, "notes"));
        assert_eq!(there.stderr, err, "{what}");
        let differs = there.stdout.lines().zip(out.lines()).find(|(there, here)| there != here);
        assert_eq!((there.stdout.len(), differs), (out.len(), None), "{what}");
    };
    // What acts on a terminal, and what JSON must escape.
    let hazards = "\u{202e}right \u{9b}31m \u{85} \u{2028} \u{200b} \u{e0041} \u{7f}\t\u{1} jwt";
    let page = PAGE.replace("# Auth", hazards);
    std::fs::write(pair.project.join("EchoesVault/pages/odd.md"), page).unwrap();
    // Python's idea of JSON, as deep as it goes, in a member that nobody reads.
    let marker = pair.project.join("EchoesVault/.echoes-vault.json");
    let text = std::fs::read_to_string(&marker).unwrap();
    for (what, value) in [
        ("NaN", "NaN".to_owned()),
        ("infinities", "[Infinity, -Infinity, 1e400]".to_owned()),
        ("big", "9".repeat(4_000)),
        ("deep", format!("{}{}", "[".repeat(998), "]".repeat(998))),
        ("twice", r#"1, "x": 2"#.to_owned()),
        ("surrogate", r#""\ud800""#.to_owned()),
        ("hidden", "\"\u{202e}\u{9b}\"".to_owned()),
    ] {
        let text = text.replacen('{', &format!("{{\"x\": {value},"), 1);
        std::fs::write(&marker, text).unwrap();
        alike(what, &["inspect"], "").await;
        alike(what, &["status", "--format", "json"], "").await;
        alike(what, &["search", "JWT", "--limit", "1_0"], "").await;
        alike(what, &["hash", "odd"], "").await;
        for payload in [
            r#"{"entry": NaN}"#,
            r#"{"entry": "\ud800"}"#,
            "[]",
            "{",
            r#"{"filename": "auth", "content": "x"}"#,
        ] {
            alike(what, &["append"], payload).await;
            alike(what, &["upsert"], payload).await;
        }
    }
    std::fs::write(&marker, text).unwrap();
    for refused in [
        &["search", " \u{1c}"][..],
        &["hash", "nowhere"],
        &["hash", "../auth"],
        &["hash", " "],
        &["search", "x", "--limit", "-5"],
        &["search", "x", "--limit", "99999999999999999999"],
        &["search", "x", "--limit", "9999999999999999999"],
    ] {
        alike("refusals", refused, "").await;
    }
    let odd = r#"{"entry": "a", "y": NaN, "agent": 5}"#;
    alike("agent", &["append"], odd).await;
    let ignored = r#"{"entry": "a", "y": [NaN, {"\ud800": 1e400}], "y": 2}"#;
    pair.there(&["append"], ignored).await.ok();
    // Another protocol: read and written by nobody, wherever it is asked.
    std::fs::write(&marker, "{\"protocolVersion\": \"2.0.0\"}").unwrap();
    alike("protocol", &["search", "jwt"], "").await;
    alike("protocol", &["append"], r#"{"entry": "x"}"#).await;
}

#[tokio::test]
async fn a_permission_is_passed_on_and_ends_with_the_one_it_hangs_from() {
    let pair = Pair::new().await;
    let carol = pair.two.agent("carol").await;
    pair.one.has_met(&carol.id).await;
    pair.share("--write").await;
    pair.grant("--write", &["--delegations", "1"]).await;
    let two = pair.two.home.path().to_owned();
    let as_carol = async |args: &[&str], stdin: &str| {
        let args: Vec<&str> =
            ["vault", "--at", "alice/notes", "--as", "carol"].iter().chain(args).copied().collect();
        shell(&two, &args, stdin).await
    };
    let delegate = async |args: &[&str]| {
        let first = ["vault", "delegate", "alice/notes", "--as", "bob", "--json"];
        let args: Vec<&str> = first.iter().chain(args).copied().collect();
        shell(&two, &args, "").await
    };
    as_carol(&["index"], "").await.refused(1, "no permission to read");
    delegate(&["carol", "--delegations", "1"]).await.refused(1, "invalid_delegations");
    delegate(&["nobody"]).await.refused(1, "");
    delegate(&[]).await.refused(2, "two arguments");
    let passed = delegate(&["carol", "--read", "--for", "3600"]).await.ok();
    assert_eq!((&passed["mode"], &passed["status"]), (&json!("read"), &json!("granted")));
    as_carol(&["hash", "auth"], "").await.ok();
    let note = json!({"entry": "- carol was here"}).to_string();
    as_carol(&["append"], &note).await.refused(1, "no permission to write");
    delegate(&["carol", "--write"]).await.ok();
    assert_eq!(as_carol(&["append"], &note).await.ok()["agent"], "carol");
    // Hers cannot be passed on; the owner's list has the one that he gave.
    let again = ["vault", "delegate", "alice/notes", "bob", "--as", "carol", "--write"];
    shell(&two, &again, "").await.refused(1, "cannot be passed on");
    let shares = pair.owner(&["vault", "shares", "--json"]).await.ok();
    assert_eq!(shares["shares"][0]["grants"].as_array().unwrap().len(), 1);
    // It outlives a restart of the holder's daemon, and ends with bob's.
    let Pair { one, two: daemon, project } = pair;
    let ports = daemon.ports;
    let home = daemon.home.clone();
    daemon.kill().await;
    let daemon = Daemon::start_with(home, ports, &[]).await;
    let carol = daemon.agent("carol").await;
    let bob = daemon.agent("bob").await;
    one.has_met(&carol.id).await;
    one.has_met(&bob.id).await;
    let pair = Pair { one, two: daemon, project };
    as_carol(&["hash", "auth"], "").await.ok();
    pair.owner(&["vault", "revoke", "notes", "bob"]).await;
    as_carol(&["hash", "auth"], "").await.refused(1, "taken back");
    as_carol(&["append"], &note).await.refused(1, "taken back");
}

fn call(op: VaultOp) -> VaultCallParams {
    VaultCallParams {
        at: "alice/notes".into(),
        op,
        page: None,
        query: None,
        limit: None,
        payload: None,
        payload_file: None,
        confirmed: None,
        offset: None,
    }
}

fn entries(project: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for day in std::fs::read_dir(project.join("EchoesVault/daily")).unwrap() {
        for entry in std::fs::read_dir(day.unwrap().path()).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|ext| ext == "md") {
                let text = std::fs::read_to_string(path).unwrap();
                found.push(text.lines().last().unwrap().to_owned());
            }
        }
    }
    found.sort();
    found
}

#[tokio::test]
async fn calls_that_mean_no_good_change_nothing() {
    let pair = Pair::new().await;
    pair.share("--write").await;
    pair.grant("--write", &[]).await;
    let bob = pair.two.agent("bob").await;
    let before = entries(&pair.project);
    let note = Some(json!({"entry": "x"}).to_string());
    let end = Some(json!({"dailySummary": "x"}).to_string());
    for (what, params, code) in [
        // It would be written, and answered with "malformed".
        (
            "a part of a writing",
            VaultCallParams { payload: note.clone(), offset: Some(1), ..call(VaultOp::Append) },
            "malformed_params",
        ),
        (
            "an end that nobody asked for",
            VaultCallParams { payload: end.clone(), ..call(VaultOp::End) },
            "vault_unconfirmed",
        ),
        (
            "an end that was refused",
            VaultCallParams { payload: end, confirmed: Some(false), ..call(VaultOp::End) },
            "vault_unconfirmed",
        ),
        (
            "beyond the end",
            VaultCallParams { offset: Some(u64::MAX), ..call(VaultOp::Index) },
            "malformed_params",
        ),
        ("no page", call(VaultOp::Page), "vault_request"),
        ("no payload", call(VaultOp::Upsert), "vault_request"),
        (
            "both payloads",
            VaultCallParams {
                payload: note,
                payload_file: Some("/x".into()),
                ..call(VaultOp::Append)
            },
            "invalid_params",
        ),
        (
            "a payload that is no file",
            VaultCallParams { payload_file: Some("/dev/zero".into()), ..call(VaultOp::Append) },
            "vault_payload",
        ),
    ] {
        let error = bob.client.call(params).await.unwrap_err();
        assert_eq!(error.code, code, "{what}: {}", error.message);
    }
    assert_eq!(entries(&pair.project), before);
}

#[tokio::test]
async fn a_share_is_the_folder_that_was_shared_and_no_link_in_its_place() {
    let pair = Pair::new().await;
    pair.share("--write").await;
    pair.grant("--write", &[]).await;
    let again = ["vault", "share", "my project", "--name", "again", "--write", "--json"];
    pair.owner(&again).await.ok();
    // A permission for one share says nothing about another, though it is the same folder.
    let other = ["vault", "--at", "alice/again", "--as", "bob", "index"];
    shell(pair.two.home.path(), &other, "").await.refused(1, "no permission");
    let home = pair.one.home.path();
    let secret = home.join("secret");
    std::fs::create_dir(&secret).unwrap();
    let root = secret.to_str().unwrap();
    shell(home, &["vault", "--workspace", root, "init"], "").await.ok();
    let away = home.join("away");
    std::fs::rename(&pair.project, &away).unwrap();
    for target in [&secret, &away] {
        std::os::unix::fs::symlink(target, &pair.project).unwrap();
        let note = json!({"entry": "x"}).to_string();
        for (args, stdin) in [(&["index"][..], ""), (&["append"], note.as_str())] {
            let ran = pair.there(args, stdin).await;
            ran.refused(2, "the shared folder cannot be used");
            assert!(!ran.stderr.contains("secret") && !ran.stderr.contains("away"));
        }
        std::fs::remove_file(&pair.project).unwrap();
    }
    assert_eq!(entries(&secret), Vec::<String>::new());
    // A file, a folder without a vault.
    std::fs::write(&pair.project, "").unwrap();
    assert_eq!(pair.there(&["index"], "").await.code, Some(2));
    std::fs::remove_file(&pair.project).unwrap();
    std::fs::create_dir(&pair.project).unwrap();
    assert_eq!(pair.there(&["index"], "").await.code, Some(2));
    std::fs::remove_dir(&pair.project).unwrap();
    std::fs::rename(&away, &pair.project).unwrap();
    pair.there(&["index"], "").await.ok();
    // A link inside that leads out, wherever it stands.
    let daily = pair.project.join("EchoesVault/daily");
    std::fs::remove_dir_all(&daily).unwrap();
    std::os::unix::fs::symlink(&secret, &daily).unwrap();
    let ran = pair.there(&["append"], "{\"entry\": \"x\"}").await;
    assert_eq!(ran.code, Some(2), "{}", ran.stdout);
    assert!(!ran.stderr.contains("secret"), "{}", ran.stderr);
}

#[tokio::test]
async fn nothing_that_was_confirmed_is_lost_when_the_owners_daemon_is_killed() {
    let mut pair = Pair::new().await;
    pair.share("--write").await;
    pair.grant("--write", &[]).await;
    let lock = pair.project.join(".echoes-vault/lock");
    let mut confirmed: Vec<String> = Vec::new();
    for round in 0..3 {
        let over = Arc::new(AtomicBool::new(false));
        let write = |remote: bool, name: String| {
            let over = Arc::clone(&over);
            let home = if remote { pair.two.home.path() } else { pair.one.home.path() }.to_owned();
            let project = pair.project.to_str().unwrap().to_owned();
            tokio::spawn(async move {
                let mut told = Vec::new();
                while !over.load(Ordering::Relaxed) {
                    let entry = format!("{name} {}", told.len());
                    let payload = json!({"entry": entry}).to_string();
                    let args = match remote {
                        true => vec!["vault", "--at", "alice/notes", "--as", "bob", "append"],
                        false => vec!["vault", "--workspace", &project, "append"],
                    };
                    if shell(&home, &args, &payload).await.code != Some(0) {
                        break;
                    }
                    told.push(entry);
                }
                told
            })
        };
        let writers = [
            write(true, format!("bob {round}")),
            write(true, format!("bob' {round}")),
            write(false, format!("local {round}")),
        ];
        let begun = async {
            // A remote writer's second entry shows that its first was confirmed.
            let second = format!(" {round} 1");
            let remote = |entry: &String| entry.starts_with("bob") && entry.ends_with(&second);
            let enough =
                |found: Vec<String>| found.len() >= confirmed.len() + 8 && found.iter().any(remote);
            while !enough(entries(&pair.project)) {
                tokio::time::sleep(std::time::Duration::from_millis(1 + 3 * round)).await;
            }
        };
        tokio::time::timeout(HANG, begun).await.unwrap();
        let Pair { one, two, project } = pair;
        let (ports, home) = (one.ports, one.home.clone());
        one.kill().await;
        over.store(true, Ordering::Relaxed);
        // What a killed daemon leaves behind counts as abandoned after a minute.
        if let Ok(file) = std::fs::File::options().write(true).open(&lock) {
            let past = std::time::SystemTime::now() - std::time::Duration::from_secs(61);
            file.set_modified(past).unwrap();
        }
        for writer in writers {
            confirmed.extend(writer.await.unwrap());
        }
        let one = Daemon::start_with(home, ports, &[]).await;
        let alice = one.agent("alice").await;
        let bob = two.agent("bob").await;
        tokio::join!(one.has_met(&bob.id), two.has_met(&alice.id));
        pair = Pair { one, two, project };
        let found = entries(&pair.project);
        for entry in &confirmed {
            let times = found.iter().filter(|found| *found == entry).count();
            assert_eq!(times, 1, "{entry}");
        }
        assert!(confirmed.iter().any(|entry| entry.starts_with("bob")), "{confirmed:?}");
    }
    pair.there(&["append"], "{\"entry\": \"after\"}").await.ok();
    assert!(!lock.exists());
    assert_eq!(pair.there(&["inspect"], "").await.ok()["health"]["issueCount"], 0);
}

#[tokio::test]
async fn pages_that_no_answer_holds_are_refused_and_long_ones_cost_their_length() {
    let pair = Pair::new().await;
    pair.share("--read").await;
    pair.grant("--read", &[]).await;
    let page = |mb: usize| {
        let line = format!("{}\n", "x".repeat(99));
        let path = pair.project.join("EchoesVault/pages/big.md");
        std::fs::write(path, format!("{PAGE}{}", line.repeat(mb * 10_000))).unwrap();
    };
    page(100);
    pair.there(&["page", "big"], "").await.refused(2, "is larger than 33554432 bytes");
    pair.there(&["hash", "big"], "").await.ok();
    assert_eq!(pair.there(&["search", "jwt"], "").await.ok()["truncated"], false);
    // 80 parts: made anew for each, this would take minutes.
    page(20);
    let begun = std::time::Instant::now();
    let text = pair.there(&["page", "big"], "").await.ok()["text"].as_str().unwrap().len();
    assert!(text > 20_000_000);
    assert!(begun.elapsed() < std::time::Duration::from_secs(15), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn whoever_asks_for_what_is_not_there_waits_like_anybody() {
    let pair = Pair::new().await;
    assert_eq!(pair.ask(&[]).await.ok()["status"], "pending");
    assert_eq!(pair.owner(&["pending", "--json"]).await.ok()["requests"], json!([]));
    pair.share("--read").await;
    pair.accept(&[]).await;
    pair.hears("capability_outcome").await;
    pair.there(&["index"], "").await.ok();
    // Whoever may read is told that there is no more.
    pair.ask(&["--write"]).await.refused(1, "reading only");
}
