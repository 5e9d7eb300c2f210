//! Other runtimes in the repository: which of them work, which are worked beside, which stop us.

use std::fs;

use serde_json::json;

use crate::support::{PAGE, Space, finish, need_python};

const RUNTIME: &str = ".echoes-vault/echoes_vault.py";

fn versions(engine: &str, protocol: &str) -> String {
    format!("ENGINE_VERSION = \"{engine}\"\nPROTOCOL_VERSION = \"{protocol}\"\n")
}

#[test]
fn init_installs_the_portable_runtime_and_it_works() {
    need_python();
    let space = Space::new();
    let installed = fs::read(space.path(RUNTIME)).unwrap();
    assert_eq!(installed, fs::read(crate::support::runtime()).unwrap());
    let mut command = std::process::Command::new("python3");
    command.arg(space.path(RUNTIME)).arg("--workspace").arg(&space.root).arg("inspect");
    space.surround(&mut command);
    let theirs = finish(command, b"").json();
    assert_eq!(theirs["health"]["integrity"], "healthy");
    assert_eq!(theirs, space.run(&["inspect"], b"").json());
}

#[test]
fn a_newer_runtime_does_the_work() {
    need_python();
    let space = Space::new();
    let script = "import sys\nsys.stdout.write('|'.join(sys.argv[1:]) + '>' + sys.stdin.read())\n\
                  sys.stderr.write('told')\nsys.exit(7)\n";
    let newer = format!("{}{script}", versions("1.2.0", "1.0.0"));
    space.write(RUNTIME, &newer);
    let before = space.snapshot();
    let odd = "a b; $(touch x) 'é'";
    for args in [&["--agent", odd, "append"][..], &["inspect"], &["upgrade"], &["search", odd]] {
        let answer = space.run(args, b"{\"entry\": \"x\"}");
        assert_eq!(answer.code, Some(7));
        let all = format!("--workspace|{}|{}", space.root.display(), args.join("|"));
        assert_eq!(answer.stdout, format!("{all}>{{\"entry\": \"x\"}}"));
        assert_eq!(answer.stderr, "told");
    }
    assert_eq!(space.snapshot(), before);
    // Without Python nobody can do it.
    let mut command = space.command(crate::support::Engine::Native, &["append"]);
    command.env("PATH", &space.outside);
    let refusal = finish(command, b"{\"entry\": \"x\"}").refusal();
    assert!(refusal.contains("python3"), "{refusal}");
    assert_eq!(space.snapshot(), before);
}

#[test]
fn older_and_foreign_runtimes_stop_everything_but_reports() {
    let space = Space::new();
    space.write("EchoesVault/pages/a.md", PAGE);
    let page = json!({"filename": "b", "content": PAGE}).to_string();
    for (runtime, word) in [
        (versions("1.1.0", "1.0.0"), "older"),
        (versions("1.1.1", "2.0.0"), "protocol 2.0.0"),
        (versions("1.1.1-rc1", "1.0.0"), "which engine"),
        ("print('mine')\n".to_owned(), "which engine"),
    ] {
        space.write(RUNTIME, &runtime);
        let before = space.snapshot();
        for (args, stdin) in [
            (&["append"][..], "{\"entry\": \"x\"}"),
            (&["upsert"], &page),
            (&["end", "--confirm-explicit-user-end"], "{\"dailySummary\": \"x\"}"),
            (&["hydrate"], ""),
            (&["start"], ""),
            (&["search", "p"], ""),
            (&["hash", "a"], ""),
            (&["configure-agents"], ""),
            (&["rebuild-index"], ""),
        ] {
            let refusal = space.run(args, stdin.as_bytes()).refusal();
            assert!(refusal.contains(word), "{args:?}: {refusal}");
        }
        let report = space.run(&["inspect"], b"").json();
        assert_eq!(report["health"]["projectRuntime"]["current"], false);
        space.run(&["protocol"], b"").json();
        assert_eq!(space.snapshot(), before);
        if word != "older" {
            for setup in ["init", "migrate", "upgrade"] {
                space.run(&[setup], b"").refusal();
            }
            assert_eq!(space.snapshot(), before);
        }
    }
    space.write(RUNTIME, versions("1.1.0", "1.0.0"));
    space.run(&["upgrade"], b"").json();
    assert_eq!(space.read(RUNTIME), fs::read_to_string(crate::support::runtime()).unwrap());
}

#[test]
fn a_runtime_of_the_same_version_is_left_alone_and_a_missing_one_comes_back() {
    let space = Space::new();
    let edited = format!("{}# edited\n", versions("1.1.1", "1.0.0"));
    space.write(RUNTIME, &edited);
    space.run(&["upgrade"], b"").json();
    space.run(&["append"], b"{\"entry\": \"x\"}").json();
    assert_eq!(space.read(RUNTIME), edited);
    fs::remove_file(space.path(RUNTIME)).unwrap();
    // Readers bring nothing back, and hydrate says what is missing.
    space.run(&["search", "x"], b"").json();
    space.run(&["hydrate"], b"").refusal();
    assert!(!space.path(RUNTIME).exists());
    space.run(&["append"], b"{\"entry\": \"x\"}").json();
    assert_eq!(space.read(RUNTIME), fs::read_to_string(crate::support::runtime()).unwrap());
}
