//! Odd values, odd files and odd names: both engines answer alike, with the same bytes on disk.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use serde_json::json;

use crate::differential::{Driver, contents, copy, describe};
use crate::support::{ENGINES, PAGE, Space, finish, need_python};

/// Compares commands on two workspaces that `prepare` has made alike.
struct Pair {
    fresh: Space,
    driver: Driver,
}

impl Pair {
    fn new() -> Self {
        need_python();
        let fresh = Space::new();
        let driver = Driver::start(&fresh);
        Self { fresh, driver }
    }

    /// Runs `words` in both; they are to agree. Returns what they answered.
    fn agree(
        &mut self,
        what: &str,
        prepare: impl Fn(&Space),
        words: &[&str],
        stdin: &str,
    ) -> String {
        let [one, other] = [Space::empty(), Space::empty()];
        for space in [&one, &other] {
            copy(&self.fresh.root, &space.root);
            prepare(space);
        }
        let native = describe(&one.run(words, stdin.as_bytes()), &one.root);
        let python = describe(&self.driver.run(&other.root, words, stdin), &other.root);
        assert_eq!(native, python, "{what}, {words:?}");
        assert_eq!(contents(&one), contents(&other), "{what}, {words:?}");
        native
    }
}

/// Values of JSON, of Python's idea of it, and of neither.
fn values() -> Vec<String> {
    let mut values: Vec<String> = [
        "NaN",
        "[Infinity, -Infinity]",
        "1e400",
        "-1e400",
        "123456789012345678901234567890",
        "1e-400",
        "-0",
        "-0.0",
        "1e5",
        "1e16",
        "1e-5",
        "0.0001",
        "9007199254740993",
        "9007199254740993.0",
        "2.50E+3",
        r#""\ud800""#,
        r#""\udc00\ud800""#,
        r#""\ud83d\ude00""#,
        r#""\ud83d\u0041""#,
        r#"{"\ud800": 1}"#,
        r#"{"a": 1, "a": {"b": []}}"#,
        "01",
        "+1",
        "1.",
        ".5",
        "1e",
        "-",
        "nan",
        "-NaN",
        "NaN1",
        r#""\x""#,
        r#""\u12g4""#,
        "\"\t\"",
        "[1,]",
        "{,}",
        "{1: 1}",
        "tru",
        "\u{b}1",
        "\u{a0}1",
        "'x'",
        "1_0",
        "null",
        "false",
        "[]",
    ]
    .map(str::to_owned)
    .into();
    values.extend([
        "9".repeat(400),
        "9".repeat(4301),
        format!("{}{}", "[".repeat(900), "]".repeat(900)),
        format!("{}1{}", "{\"a\": ".repeat(300), "}".repeat(300)),
        "[".repeat(100_000),
    ]);
    values
}

#[test]
fn values_are_read_alike() {
    let mut pair = Pair::new();
    for value in values() {
        let shown: String = value.chars().take(40).collect();
        let none = |_: &Space| {};
        for member in ["y", "agent"] {
            let payload = format!("{{\"entry\": \"x\", \"{member}\": {value}}}");
            pair.agree(&shown, none, &["append"], &payload);
        }
        let pages = format!(
            "{{\"dailySummary\": \"x\", \"pages\": [{{\"filename\": \"a\", \"content\": {}, \"z\": {value}}}]}}",
            json!(PAGE)
        );
        pair.agree(&shown, none, &["end", "--confirm-explicit-user-end"], &pages);
        let state = |space: &Space| {
            let session = format!("{{\"started\": {value}, \"lastSave\": [{value}]}}");
            space.write(
                ".echoes-vault/state.json",
                format!("{{\"session\": {session}, \"initialized\": {value}}}"),
            );
        };
        pair.agree(&shown, state, &["status", "--format", "card"], "");
        pair.agree(&shown, state, &["hydrate"], "");
        let marker = |space: &Space| {
            let text = space.read("EchoesVault/.echoes-vault.json");
            space.write(
                "EchoesVault/.echoes-vault.json",
                text.replacen('{', &format!("{{\"x\": {value},"), 1),
            );
        };
        pair.agree(&shown, marker, &["protocol"], "");
        pair.agree(&shown, marker, &["append"], "{\"entry\": \"x\"}");
    }
}

#[test]
fn odd_files_are_findings_alike() {
    let mut pair = Pair::new();
    type Make = fn(&Path);
    let kinds: [(&str, Make); 4] = [
        ("folder", |path| fs::create_dir(path).unwrap()),
        ("pipe", |path| {
            assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
        }),
        ("loop", |path| symlink(path.file_name().unwrap(), path).unwrap()),
        ("dangling", |path| symlink("nowhere", path).unwrap()),
    ];
    for (kind, make) in kinds {
        for path in [
            "EchoesVault/index.md",
            ".echoes-vault/state.json",
            "AGENTS.md",
            "EchoesVault/assets/x.md",
        ] {
            let prepare = |space: &Space| {
                let _ = fs::remove_file(space.path(path));
                make(&space.path(path));
            };
            let what = format!("{kind} {path}");
            for words in [&["inspect"][..], &["status", "--format", "card"]] {
                assert_ne!(pair.agree(&what, prepare, words, ""), "refused", "{what}");
            }
        }
    }
}

const END: [&str; 2] = ["end", "--confirm-explicit-user-end"];

#[test]
fn what_is_no_file_is_not_replaced() {
    let mut pair = Pair::new();
    type Put = fn(&Space);
    let odd: [(&str, Put); 3] = [
        ("pipe as index", |space| {
            let path = space.path("EchoesVault/index.md");
            fs::remove_file(&path).unwrap();
            assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
        }),
        ("socket as index", |space| {
            let path = space.path("EchoesVault/index.md");
            fs::remove_file(&path).unwrap();
            drop(UnixListener::bind(path).unwrap());
        }),
        ("blank foreign guide", |space| space.write("EchoesVault/AGENT_PROTOCOL.md", "\n")),
    ];
    let page = json!({"filename": "a", "content": PAGE});
    let end = json!({"dailySummary": "x", "pages": [page]}).to_string();
    for (what, put) in odd {
        assert_eq!(pair.agree(what, put, &["init"], ""), "refused", "{what}");
        if what.ends_with("index") {
            assert_eq!(pair.agree(what, put, &["hydrate"], ""), "refused", "{what}");
            assert_eq!(pair.agree(what, put, &["upsert"], &page.to_string()), "refused", "{what}");
            assert_eq!(pair.agree(what, put, &END, &end), "refused", "{what}");
        }
    }
}

#[test]
fn a_link_to_nowhere_is_no_place_for_a_new_folder() {
    need_python();
    let page = json!({"filename": "a", "content": PAGE}).to_string();
    let entry = "{\"entry\": \"x\", \"dailySummary\": \"x\"}";
    for engine in ENGINES {
        for (link, words, stdin) in [
            ("EchoesVault/pages", &["upsert"][..], &*page),
            ("EchoesVault/pages", &["init"], ""),
            ("EchoesVault/daily", &["append"], entry),
            ("EchoesVault/daily", &END, entry),
            ("EchoesVault/raw", &["init"], ""),
            (".echoes-vault", &["append"], entry),
        ] {
            let space = Space::new();
            fs::remove_dir_all(space.path(link)).unwrap();
            symlink("nowhere", space.path(link)).unwrap();
            let before = space.snapshot();
            space.run_with(engine, words, stdin.as_bytes()).refusal();
            assert_eq!(space.snapshot(), before, "{engine:?} {link} {words:?}");
        }
    }
}

#[test]
fn only_an_engines_own_litter_is_swept() {
    need_python();
    let ours = [
        "EchoesVault/.index.md.abcdefgh.tmp",
        ".echoes-vault/.lock.abcdefgh.tmp",
        "EchoesVault/pages/.a.md.abcdefgh.tmp",
        "EchoesVault/daily/2026-01-02/.e.md.abcdefgh.tmp",
        ".AGENTS.md.abcdefgh.tmp",
    ];
    let others = [
        ".echoes-vault/.user.abcdefgh.tmp",
        "EchoesVault/.a.md.abcdefgh.tmp",
        "EchoesVault/pages/.a.txt.abcdefgh.tmp",
        "EchoesVault/pages/.a.md.ABCDEFGH.tmp",
        "EchoesVault/daily/2026-01-02/.e.abcdefgh.tmp",
        "EchoesVault/assets/.a.md.abcdefgh.tmp",
    ];
    for engine in ENGINES {
        let space = Space::new();
        for path in ours.iter().chain(&others) {
            space.write(path, "x");
            let file = fs::File::options().write(true).open(space.path(path)).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(4000)).unwrap();
        }
        space.run_with(engine, &["append"], b"{\"entry\": \"x\"}").json();
        for path in ours {
            assert!(!space.path(path).exists(), "{engine:?} {path}");
        }
        for path in others {
            assert!(space.path(path).exists(), "{engine:?} {path}");
        }
    }
}

#[test]
fn odd_times_and_zones_are_told_alike() {
    need_python();
    let space = Space::new();
    let last = |engine, zone| {
        let mut command = space.command(engine, &["inspect"]);
        command.env("TZ", zone);
        finish(command, b"").json()["health"]["storage"]["lastModified"].clone()
    };
    let [native, python] = ENGINES.map(|engine| last(engine, "UTC-24"));
    assert!(native.as_str().unwrap().ends_with("+24:00"), "{native}");
    assert_eq!(native, python);
    // Beyond what POSIX allows: each system reads it in its own way, and nobody fails.
    for engine in ENGINES {
        assert!(last(engine, "UTC-25").is_string(), "{engine:?}");
    }
    space.write("EchoesVault/raw/x", "x");
    let file = fs::File::options().write(true).open(space.path("EchoesVault/raw/x")).unwrap();
    let year_11000 = SystemTime::UNIX_EPOCH + Duration::from_secs(285_000_000_000);
    file.set_modified(year_11000).unwrap();
    if file.metadata().unwrap().modified().unwrap() == year_11000 {
        for engine in ENGINES {
            assert_eq!(last(engine, "UTC"), json!(null), "{engine:?}");
        }
    }
}

#[test]
fn odd_names_and_limits_are_treated_alike() {
    let mut pair = Pair::new();
    for path in [&b"assets/b\xff.bin"[..], b"daily/b\xff.md", b"raw/d\xff/x.md", b"pages/x\xff.txt"]
    {
        let prepare = |space: &Space| {
            space.write(Path::new("EchoesVault").join(OsStr::from_bytes(path)), "x");
        };
        let what = path.escape_ascii().to_string();
        let repository = |space: &Space| {
            prepare(space);
            let done = Command::new("git").args(["init", "-q"]).arg(&space.root).status().unwrap();
            assert!(done.success());
        };
        for words in [&["inspect"][..], &["status", "--format", "card"]] {
            assert_ne!(pair.agree(&what, prepare, words, ""), "refused", "{what}");
        }
        // In a repository the file is to be committed, and its name would have to be told.
        assert_eq!(pair.agree(&what, repository, &["inspect"], ""), "refused");
        assert_ne!(pair.agree(&what, repository, &["status", "--format", "card"], ""), "refused");
    }
    for name in ["..md", "...md", ".md", ".a.md", "a..md", "..MD", "a."] {
        let prepare = |space: &Space| space.write(Path::new("EchoesVault/pages").join(name), PAGE);
        for words in [&["inspect"][..], &["search", "p"], &["hydrate"], &["hash", "--", name]] {
            pair.agree(name, prepare, words, "");
        }
    }
    for limit in ["-1", "0", "1", "500", "501"] {
        let prepare = |space: &Space| {
            space.write("EchoesVault/pages/a.md", PAGE.to_owned() + &"p\n".repeat(600))
        };
        let found = pair.agree(limit, prepare, &["search", "--limit", limit, "p"], "");
        let results = serde_json::from_str::<serde_json::Value>(&found).unwrap()["results"]
            .as_array()
            .unwrap()
            .len();
        assert_eq!(results, limit.parse::<i32>().unwrap().clamp(1, 500).unsigned_abs() as usize);
    }
}
