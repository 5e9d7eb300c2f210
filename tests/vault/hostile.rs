//! Files and payloads as they should not be, and places where nothing can be written.

use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use serde_json::json;

use crate::support::{Answer, BINARY, ENGINES, Engine, NOBODY, PAGE, Space, finish, need_python};

#[test]
fn sessions_begin_without_side_effects() {
    let space = Space::new();
    space.write("EchoesVault/pages/a.md", PAGE);
    fs::remove_file(space.path(".echoes-vault/state.json")).unwrap();
    let before = space.snapshot();
    for args in [
        &["inspect"][..],
        &["status"],
        &["status", "--format", "card"],
        &["protocol"],
        &["search", "p"],
        &["hash", "a"],
    ] {
        assert_eq!(space.run(args, b"").code, Some(0));
    }
    assert_eq!(space.snapshot(), before);
    let empty = Space::empty();
    for args in [&["inspect"][..], &["protocol"]] {
        assert_eq!(empty.run(args, b"").code, Some(0));
    }
    empty.run(&["hydrate"], b"").refusal();
    empty.run(&["append"], b"{\"entry\": \"x\"}").refusal();
    assert!(empty.snapshot().is_empty());
}

#[test]
fn files_of_other_systems_are_read() {
    let space = Space::new();
    let crlf = PAGE.replace('\n', "\r\n");
    space.write("EchoesVault/pages/crlf.md", crlf.trim_end());
    space.write("EchoesVault/pages/cr.md", PAGE.replace('\n', "\r"));
    space.run(&["hydrate"], b"").json();
    assert_eq!(space.read("EchoesVault/pages/crlf.md"), crlf.trim_end());
    let hash = |page: &str| space.run(&["hash", page], b"").json()["sha256"].clone();
    assert_ne!(hash("crlf"), hash("cr"), "one has no final newline");
    space.write("EchoesVault/pages/bom.md", format!("\u{feff}{PAGE}"));
    let refusal = space.run(&["hydrate"], b"").refusal();
    assert!(refusal.contains("bom.md"), "{refusal}");
    let report = space.run(&["inspect"], b"").json();
    assert_eq!(report["health"]["invalidFrontmatter"], json!(["bom"]));
}

#[test]
fn content_that_is_not_utf8_is_refused_cleanly() {
    let space = Space::new();
    space.write("EchoesVault/pages/bad.md", b"\xff");
    let before = space.snapshot();
    for (args, stdin) in [
        (&["hash", "bad"][..], &b""[..]),
        (&["search", "x"], b""),
        (&["hydrate"], b""),
        (&["upsert"], b"{\"filename\": \"bad\", \"content\": \"x\", \"expectedSha256\": \"x\"}"),
        (&["append"], b"{\"entry\": \"\xff\"}"),
    ] {
        space.run(args, stdin).refusal();
    }
    assert_eq!(space.snapshot(), before);
    fs::remove_file(space.path("EchoesVault/pages/bad.md")).unwrap();
    space.write("EchoesVault/index.md", b"\xff");
    space.run(&["inspect"], b"").refusal();
    space.run(&["start"], b"").refusal();
}

#[test]
fn names_that_are_not_utf8_are_refused_cleanly() {
    let space = Space::new();
    let name = std::ffi::OsStr::from_bytes(b"b\xffd.md");
    space.write(std::path::Path::new("EchoesVault/pages").join(name), PAGE);
    for args in [&["inspect"][..], &["search", "x"], &["start"], &["rebuild-index"]] {
        let refusal = space.run(args, b"").refusal();
        assert!(refusal.contains("not valid UTF-8"), "{refusal}");
    }
    fs::remove_file(space.path("EchoesVault/pages").join(name)).unwrap();
    // Elsewhere in the repository such names are nobody's business here.
    let git = |args: &[&str]| {
        let done = Command::new("git").arg("-C").arg(&space.root).args(args).output().unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    git(&["init", "-q"]);
    fs::write(space.root.join(name), "x").unwrap();
    assert_eq!(space.run(&["inspect"], b"").json()["health"]["git"]["available"], json!(true));
    space.run(&["append"], b"{\"entry\": \"x\"}").json();
}

#[test]
fn payloads_of_every_wrong_kind_are_refused() {
    let space = Space::new();
    space.write("folder/x", "");
    let before = space.snapshot();
    for args in [
        &["append", "--payload", "/nowhere/at/all"][..],
        &["append", "--payload", space.path("folder").to_str().unwrap()],
        &["append", "--payload", ""],
    ] {
        space.run(args, b"").refusal();
    }
    for payload in [
        json!({"filename": 1, "content": PAGE}),
        json!({"filename": "a", "content": null}),
        json!({"filename": "a", "content": PAGE, "indexDescription": 3}),
        json!({"filename": "../a", "content": PAGE}),
        json!({"filename": "a\u{0}b", "content": PAGE}),
    ] {
        space.send(&["upsert"], &payload).refusal();
    }
    space.run(&["append"], b"{\"entry\": \"\\ud800\"}").refusal();
    let deep =
        format!("{{\"entry\": \"x\", \"y\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    space.run(&["append"], deep.as_bytes()).refusal();
    assert_eq!(space.snapshot(), before);
    space.run(&["append"], b"{\"entry\": \"x\", \"n\": [NaN, -Infinity]}").json();
}

#[test]
fn a_payload_of_64_mb_and_a_page_of_100_mb_are_taken() {
    let space = Space::new();
    let line = "Only ordinary prose, again and again.\n";
    let body = line.repeat(64 * 1024 * 1024 / line.len());
    space.send(&["append"], &json!({ "entry": body })).json();
    let made = space
        .send(&["upsert"], &json!({"filename": "big", "content": format!("{PAGE}{body}")}))
        .json();
    let page = format!("{PAGE}{}", line.repeat(100 * 1024 * 1024 / line.len()));
    space.write("EchoesVault/pages/big.md", &page);
    let hash = space.run(&["hash", "big"], b"").json()["sha256"].clone();
    assert_ne!(hash, made["sha256"]);
    let found = space.run(&["search", "ORDINARY", "--limit", "2"], b"").json();
    assert_eq!(found["results"].as_array().unwrap().len(), 2);
    let stale = json!({"filename": "big", "content": PAGE, "expectedSha256": made["sha256"]});
    space.send(&["upsert"], &stale).refusal();
    let update = json!({"filename": "big", "content": PAGE, "expectedSha256": hash});
    assert_eq!(space.send(&["upsert"], &update).json()["action"], "updated");
    assert_eq!(space.read("EchoesVault/pages/big.md"), PAGE);
}

#[test]
fn fifty_thousand_entries_are_counted() {
    let space = Space::new();
    for day in 0..50 {
        let folder = space.path(format!("EchoesVault/daily/2026-01-{day:02}"));
        fs::create_dir(&folder).unwrap();
        for entry in 0..1000 {
            fs::write(folder.join(format!("{entry:04}.md")), "x\n").unwrap();
        }
    }
    space.run(&["append"], b"{\"entry\": \"x\"}").json();
    let started = space.run(&["start", "--recent", "2"], b"");
    assert!(started.stdout.contains("## Recent session entries (2)"), "{started:?}");
    assert!(started.stdout.contains("### 2026-01-49/0999.md"), "{started:?}");
    let report = space.run(&["inspect"], b"").json();
    assert_eq!(report["health"]["totalDailyLogs"], 50_001);
}

#[test]
fn folders_may_be_nested_as_deep_as_the_system_can() {
    let space = Space::new();
    let deep = "d/".repeat(600);
    space.write(format!("EchoesVault/assets/{deep}x.md"), "=======\n");
    let report = space.run(&["inspect"], b"").json();
    let conflicts = report["health"]["conflictMarkers"].as_array().unwrap();
    assert_eq!(conflicts, &[json!(format!("assets/{deep}x.md"))]);
}

#[test]
fn links_out_of_the_workspace_are_refused_everywhere() {
    let space = Space::new();
    space.write("EchoesVault/pages/a.md", PAGE);
    fs::write(space.outside.join("x.md"), PAGE).unwrap();
    symlink(space.outside.join("x.md"), space.path("EchoesVault/pages/x.md")).unwrap();
    space.run(&["hash", "x"], b"").refusal();
    space.send(&["upsert"], &json!({"filename": "x", "content": PAGE})).refusal();
    fs::remove_file(space.path("EchoesVault/pages/x.md")).unwrap();
    let today = space.run(&["append"], b"{\"entry\": \"x\"}").json()["dailyLog"].clone();
    let today = std::path::Path::new(today.as_str().unwrap()).parent().unwrap();
    fs::remove_dir_all(today).unwrap();
    symlink(&space.outside, today).unwrap();
    space.run(&["append"], b"{\"entry\": \"x\"}").refusal();
    space.send(&["end", "--confirm-explicit-user-end"], &json!({"dailySummary": "x"})).refusal();
    assert_eq!(fs::read_dir(&space.outside).unwrap().count(), 1);
    assert_eq!(fs::read_to_string(space.outside.join("x.md")).unwrap(), PAGE);
}

#[test]
fn a_read_only_checkout_can_be_read_and_says_why_it_cannot_be_written() {
    let space = Space::new();
    space.write("EchoesVault/pages/a.md", PAGE);
    space.run(&["hydrate"], b"").json();
    // A copy, because another user may not reach where the binary was built.
    let binary = space.outside.join("commsd");
    fs::copy(BINARY, &binary).unwrap();
    fs::set_permissions(space.root.parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
    for (path, (mode, _)) in space.snapshot() {
        let mode = if mode & 0o170_000 == 0o040_000 { 0o555 } else { 0o444 };
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    fs::set_permissions(&space.root, fs::Permissions::from_mode(0o555)).unwrap();
    let probe = space.outside.join("probe");
    fs::write(&probe, "").unwrap();
    let is_root = chown(&probe, Some(NOBODY), None).is_ok();
    let run = |args: &[&str], stdin: &[u8]| {
        let mut command = Command::new(&binary);
        command.arg("vault").arg("--workspace").arg(&space.root).args(args);
        space.surround(&mut command);
        if is_root {
            command.uid(NOBODY).gid(NOBODY);
        }
        finish(command, stdin)
    };
    let before = space.snapshot();
    for args in [&["inspect"][..], &["protocol"], &["search", "p"], &["hash", "a"]] {
        run(args, b"").json();
    }
    for (args, stdin) in [
        (&["append"][..], &b"{\"entry\": \"x\"}"[..]),
        (&["hydrate"], b""),
        (&["init"], b""),
        (&["start"], b""),
    ] {
        let refusal = run(args, stdin).refusal();
        assert!(refusal.contains("ermission denied") && refusal.contains("lock"), "{refusal}");
    }
    assert_eq!(space.snapshot(), before);
    for (path, (mode, _)) in before {
        if mode & 0o170_000 == 0o040_000 {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        }
    }
    fs::set_permissions(&space.root, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Runs a command that may write files of at most 64 KiB, as on a disk that is full from there on.
fn on_a_full_disk(space: &Space, engine: Engine, args: &[&str], stdin: &[u8]) -> Answer {
    let real = space.command(engine, args);
    let mut command = Command::new("bash");
    // Ignored, the signal becomes an error of the write, as a full disk is one.
    command.args(["-c", "trap '' XFSZ; ulimit -f 64; exec \"$@\"", "bash"]);
    command.arg(real.get_program()).args(real.get_args());
    space.surround(&mut command);
    finish(command, stdin)
}

#[test]
fn a_disk_that_fills_up_in_end_leaves_whole_files_and_names_them() {
    need_python();
    ENGINES.into_iter().for_each(fill_up_in_end);
}

fn fill_up_in_end(engine: Engine) {
    let space = Space::new();
    space.send(&["upsert"], &json!({"filename": "big", "content": PAGE})).json();
    let hash = space.run(&["hash", "big"], b"").json()["sha256"].clone();
    let index = space.read("EchoesVault/index.md");
    let big = format!("{PAGE}{}", "x".repeat(300_000));
    let payload = json!({"dailySummary": "- done", "pages": [
        {"filename": "small", "content": PAGE},
        {"filename": "big", "content": big, "expectedSha256": hash},
        {"filename": "after", "content": PAGE},
    ]});
    let args = ["end", "--confirm-explicit-user-end"];
    let refusal = on_a_full_disk(&space, engine, &args, payload.to_string().as_bytes()).refusal();
    assert!(refusal.contains("EchoesVault/pages/small.md"), "{refusal}");
    assert!(refusal.contains("big.md") && !refusal.contains("after.md"), "{refusal}");
    assert_eq!(space.read("EchoesVault/pages/small.md"), PAGE);
    assert_eq!(space.read("EchoesVault/pages/big.md"), PAGE);
    assert!(!space.path("EchoesVault/pages/after.md").exists());
    assert_eq!(space.read("EchoesVault/index.md"), index);
    assert_eq!(space.temporary("EchoesVault/pages"), Vec::<String>::new());
    assert!(!space.path(".echoes-vault/lock").exists());
    // With room again, the next command goes on from there.
    let rebuilt = space.run(&["rebuild-index"], b"").json();
    assert_eq!(rebuilt["pageCount"], 2);
}

#[test]
fn workspaces_are_found_in_repositories_worktrees_and_odd_places() {
    let space = Space::empty();
    let git = |folder: &std::path::Path, args: &[&str]| {
        let mut command = Command::new("git");
        space.surround(&mut command);
        command.arg("-C").arg(folder).args([
            "-c",
            "user.name=T",
            "-c",
            "user.email=t@example.invalid",
        ]);
        command.args(["-c", "protocol.file.allow=always"]).args(args);
        let done = command.output().unwrap();
        assert!(done.status.success(), "{args:?}: {}", String::from_utf8_lossy(&done.stderr));
    };
    let main = space.path("häuptling mit leer zeichen");
    fs::create_dir_all(main.join("src/deep")).unwrap();
    git(&main, &["init", "-q"]);
    fs::write(main.join("src/deep/f"), "x").unwrap();
    git(&main, &["add", "-A"]);
    git(&main, &["commit", "-q", "-m", "x"]);
    let tree = space.path("worktree");
    git(&main, &["worktree", "add", "-q", tree.to_str().unwrap()]);
    let outer = space.path("outer");
    fs::create_dir(&outer).unwrap();
    git(&outer, &["init", "-q"]);
    git(&outer, &["submodule", "--quiet", "add", main.to_str().unwrap(), "sub"]);
    let root = |start: &std::path::Path| {
        let start = start.to_str().unwrap();
        let answer = space.run(&["--workspace", start, "inspect"], b"");
        answer.json()["workspace"].as_str().unwrap().to_owned()
    };
    for (start, top) in [
        (main.join("src/deep"), &main),
        (tree.join("src"), &tree),
        (outer.join("sub/src"), &outer.join("sub")),
        (outer.clone(), &outer),
        // Inside .git there is no work tree; the folder itself is taken.
        (main.join(".git"), &main.join(".git")),
    ] {
        assert_eq!(root(&start), top.to_str().unwrap());
    }
    let start = main.join("src/deep");
    space.run(&["--workspace", start.to_str().unwrap(), "init"], b"").json();
    assert!(main.join("EchoesVault/pages").is_dir());
    space
        .run_with(
            Engine::Native,
            &["--workspace", start.to_str().unwrap(), "append"],
            b"{\"entry\": \"x\"}",
        )
        .json();
}
