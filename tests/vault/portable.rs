//! The portable runtime by itself: its golden cases, what it carries, how it behaves where the golden
//! cases do not reach.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant, SystemTime};

use serde_json::json;

use crate::support::{Answer, Engine, PAGE, Space, finish, need_python, runtime};

/// Files of `src/vault/texts` and the constants that hold them.
const TEXTS: [(&str, &str); 12] = [
    ("AGENT_PROTOCOL", "AGENT_PROTOCOL.md"),
    ("GUIDE_BLOCK", "guide-block.md"),
    ("SKILL", "skill.md"),
    ("COMMAND_INIT", "echoes-init.md"),
    ("COMMAND_START", "echoes-start.md"),
    ("COMMAND_STATUS", "echoes-status.md"),
    ("COMMAND_END", "echoes-end.md"),
    ("LEGACY_APPEND", "legacy-append.md"),
    ("LEGACY_SEARCH", "legacy-search.md"),
    ("LEGACY_UPSERT", "legacy-upsert.md"),
    ("VAULT_IGNORE", "vault.gitignore"),
    ("RUNTIME_IGNORE", "runtime.gitignore"),
];

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

#[test]
fn the_runtime_carries_the_texts_that_the_binary_installs() {
    let source = fs::read_to_string(runtime()).unwrap();
    for (constant, file) in TEXTS {
        let text = fs::read_to_string(repository("src/vault/texts").join(file)).unwrap();
        assert!(!text.contains('\\') && !text.contains("\"\"\""), "{file}");
        let wanted = format!("\n{constant} = \"\"\"\\\n{text}\"\"\"\n");
        assert!(source.contains(&wanted), "{file}: run src/vault/portable/embed_texts.py");
    }
    let files = fs::read_dir(repository("src/vault/texts")).unwrap().count();
    assert_eq!(files, TEXTS.len() + 1, "all texts and their README");
}

#[test]
fn other_engines_recognise_the_runtime() {
    let source = fs::read_to_string(runtime()).unwrap();
    let lines: Vec<&str> =
        source.lines().filter(|line| line.starts_with("ENGINE_VERSION")).collect();
    assert_eq!(lines, ["ENGINE_VERSION = \"1.1.1\""]);
    let lines: Vec<&str> =
        source.lines().filter(|line| line.starts_with("PROTOCOL_VERSION")).collect();
    assert_eq!(lines, ["PROTOCOL_VERSION = \"1.0.0\""]);
    assert!(!source.contains("PLUGIN_VERSION ="));
}

/// Replays golden cases against the runtime; so many of them must pass.
fn golden(options: &[&str], cases: u32) {
    need_python();
    let mut command = Command::new("python3");
    command.arg(repository("tests/vectors/echoes/run_golden.py")).args(options);
    // Without site packages Python starts sooner.
    command.args(["--jobs", "8", "--", "python3", "-S"]).arg(runtime());
    let output = command.output().unwrap();
    let report = String::from_utf8(output.stdout).unwrap();
    assert!(report.ends_with(&format!("{cases} passed, 0 failed\n")), "{report}");
}

/// Areas that say what comparing histories with the binary does not: whose runtime does the work, locks,
/// links, old vaults.
const OWN_AREAS: [&str; 8] =
    ["--area", "gating", "--area", "lock", "--area", "symlinks", "--area", "migration"];

/// All 746 take minutes, most of them for starting Python; `COMMSD_GOLDEN_ALL=1` asks for them.
#[test]
fn golden_cases_pass_to_the_letter() {
    let strictly = ["--skip-tag", "unsafe", "--skip-tag", "crash"];
    if std::env::var_os("COMMSD_GOLDEN_ALL").is_some() {
        golden(&strictly, 746);
    } else {
        golden(&[&strictly[..], &OWN_AREAS].concat(), 182);
    }
}

#[test]
fn where_the_reference_crashes_the_runtime_refuses() {
    golden(&["--lenient", "--only-tag", "crash"], 14);
}

/// A command of the workspace's own copy.
fn own(space: &Space, args: &[&str], stdin: &str) -> Answer {
    let mut command = Command::new("python3");
    command
        .arg(space.path(".echoes-vault/echoes_vault.py"))
        .arg("--workspace")
        .arg(&space.root)
        .args(args);
    space.surround(&mut command);
    finish(command, stdin.as_bytes())
}

fn upsert(space: &Space, name: &str) -> Answer {
    own(space, &["upsert"], &json!({"filename": name, "content": PAGE}).to_string())
}

/// A Python script with the runtime loaded as `e`, which takes the workspace's copy for itself.
fn script(space: &Space, text: &str) -> Command {
    let copy = space.path(".echoes-vault/echoes_vault.py");
    let load = "import importlib.util as u, os, signal, sys\n\
                s = u.spec_from_file_location('e', sys.argv[1])\n\
                e = u.module_from_spec(s)\n\
                s.loader.exec_module(e)\n\
                root = sys.argv[2]\n";
    let mut command = Command::new("python3");
    command.args(["-B", "-c", &format!("{load}{text}")]).arg(copy).arg(&space.root);
    space.surround(&mut command);
    command
}

#[test]
fn a_folder_of_the_day_that_leads_outside_is_refused() {
    let space = Space::new();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    // Today's folder, and tomorrow's if the day ends right now.
    for day in [now, now + 86_400] {
        let day = jiff::Timestamp::from_second(i64::try_from(day).unwrap()).unwrap();
        let name = format!("EchoesVault/daily/{}", day.strftime("%Y-%m-%d"));
        std::os::unix::fs::symlink(&space.outside, space.path(name)).unwrap();
    }
    let before = space.snapshot();
    let refusal = own(&space, &["append"], r#"{"entry": "x"}"#).refusal();
    assert!(refusal.contains("leads out"), "{refusal}");
    assert_eq!(fs::read_dir(&space.outside).unwrap().count(), 0);
    assert_eq!(space.snapshot(), before);
}

#[test]
fn a_page_that_is_a_link_to_the_outside_is_not_read() {
    let space = Space::new();
    let secret = space.outside.join("secret");
    fs::write(&secret, PAGE).unwrap();
    std::os::unix::fs::symlink(&secret, space.path("EchoesVault/pages/p.md")).unwrap();
    assert!(own(&space, &["hash", "p"], "").refusal().contains("leads out"));
    assert!(upsert(&space, "p").refusal().contains("symbolic link"));
}

#[test]
fn a_folder_swapped_for_a_link_is_not_entered() {
    let space = Space::new();
    // The check has passed; then the folder of pages becomes a link to the outside.
    let swap = "real = e.os.path.realpath\n\
                def swapped(path, **more):\n    \
                    answer = real(path, **more)\n    \
                    if path.endswith('pages') and not os.path.islink(path):\n        \
                        os.rename(path, path + '.old')\n        \
                        os.symlink(sys.argv[3], path)\n    \
                    return answer\n\
                w = e.Workspace(root)\n\
                e.os.path.realpath = swapped\n\
                try:\n    w.write('EchoesVault/pages/p.md', 'x')\n\
                except OSError as problem:\n    print('refused')\n";
    let mut command = script(&space, swap);
    command.arg(&space.outside);
    assert_eq!(finish(command, b"").stdout, "refused\n");
    assert_eq!(fs::read_dir(&space.outside).unwrap().count(), 0);
}

#[test]
fn a_signal_leaves_no_lock() {
    let space = Space::new();
    for signal in ["SIGTERM", "SIGHUP"] {
        let text = format!(
            "e.prepare_writing = lambda workspace: os.kill(os.getpid(), signal.{signal})\n\
             sys.exit(e.main(['--workspace', root, 'hydrate']))\n"
        );
        let answer = finish(script(&space, &text), b"");
        assert!(answer.code.is_some_and(|code| code > 128), "{answer:?}");
        assert!(!space.path(".echoes-vault/lock").exists(), "{signal}");
    }
}

#[test]
fn a_huge_page_needs_a_bounded_multiple_of_its_size() {
    const SIZE: usize = 100 * 1024 * 1024;
    let space = Space::new();
    let mut text = PAGE.to_owned();
    text.push_str(&"x\n".repeat(SIZE / 2));
    space.write("EchoesVault/pages/huge.md", text);
    let text = "import resource\n\
                e.main(['--workspace', root, 'hydrate'])\n\
                sys.stdout.flush()\n\
                print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n";
    let answer = finish(script(&space, text), b"");
    let kilobytes: usize = answer.stdout.lines().last().unwrap().parse().expect(&answer.stderr);
    // Bytes, text, and the text with its outer white space cut; a list of lines would take twenty times more.
    assert!(kilobytes < 5 * SIZE / 1024, "{kilobytes} KiB");
}

/// Starts a process that holds the lock until its standard input ends, and makes the lock look old.
fn hold_an_old_lock(space: &Space) -> Child {
    let text = "with e.Lock(e.Workspace(root)):\n    \
                    os.utime(os.path.join(root, '.echoes-vault/lock'), (1, 1))\n    \
                    print('held', flush=True)\n    \
                    sys.stdin.read()\n";
    let mut holder = script(space, text).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(holder.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "held\n");
    holder
}

#[test]
fn an_old_lock_of_a_living_holder_is_respected() {
    let space = Space::new();
    let mut holder = hold_an_old_lock(&space);
    let begin = Instant::now();
    let refusals = std::thread::scope(|scope| {
        let writers = [Engine::Native, Engine::Python].map(|engine| {
            let space = &space;
            scope.spawn(move || space.run_with(engine, &["append"], br#"{"entry": "x"}"#).refusal())
        });
        writers.map(|writer| writer.join().unwrap())
    });
    assert!(begin.elapsed() > Duration::from_secs(7));
    for refusal in refusals {
        assert!(refusal.contains(&format!("process {}", holder.id())), "{refusal}");
    }
    drop(holder.stdin.take());
    assert!(holder.wait().unwrap().success());
    assert!(!space.path(".echoes-vault/lock").exists());
    upsert(&space, "one").json();
}
