//! The portable runtime by itself: its golden cases, what it carries, how it behaves where the golden
//! cases do not reach.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use crate::engine::{Outcome, portable, python, repository, run, run_native, run_portable, tree};

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

#[test]
fn the_runtime_carries_the_texts_that_the_binary_installs() {
    let source = fs::read_to_string(portable()).unwrap();
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
    let source = fs::read_to_string(portable()).unwrap();
    let lines: Vec<&str> = source.lines().filter(|line| line.starts_with("ENGINE_VERSION")).collect();
    assert_eq!(lines, ["ENGINE_VERSION = \"1.1.1\""]);
    let lines: Vec<&str> = source.lines().filter(|line| line.starts_with("PROTOCOL_VERSION")).collect();
    assert_eq!(lines, ["PROTOCOL_VERSION = \"1.0.0\""]);
    assert!(!source.contains("PLUGIN_VERSION ="));
}

fn golden(options: &[&str], cases: u32) {
    let mut command = python();
    command.arg(repository("tests/vectors/echoes/run_golden.py")).args(options);
    command.args(["--", "python3", "-S"]).arg(portable());
    let done = run(command, "");
    assert!(done.out.ends_with(&format!("{cases} passed, 0 failed\n")), "{}{}", done.out, done.err);
}

#[test]
fn golden_cases_pass_to_the_letter() {
    golden(&["--skip-tag", "unsafe", "--skip-tag", "crash"], 746);
}

#[test]
fn where_the_reference_crashes_the_runtime_refuses() {
    golden(&["--lenient", "--only-tag", "crash"], 14);
}

fn vault() -> (tempfile::TempDir, std::path::PathBuf) {
    let home = tempfile::tempdir().unwrap();
    let root = home.path().canonicalize().unwrap();
    run_native(&root, &["init"], "").value();
    (home, root)
}

const PAGE: &str = r"---\ntype: note\nstack: []\nstatus: active\nsummary: S.\n---\n\n# P\n";

fn upsert(root: &Path, name: &str) -> Outcome {
    let payload = format!("{{\"filename\": \"{name}\", \"content\": \"{PAGE}\"}}");
    run_portable(root, &["upsert"], &payload)
}

#[test]
fn a_folder_of_the_day_that_leads_outside_is_refused() {
    let (_home, root) = vault();
    let outside = tempfile::tempdir().unwrap();
    let days = Path::new("EchoesVault/daily");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() as i64;
    for day in [now, now + 86_400] {
        let date = jiff::Timestamp::from_second(day).unwrap().strftime("%Y-%m-%d").to_string();
        std::os::unix::fs::symlink(outside.path(), root.join(days).join(date)).unwrap();
    }
    let before = tree(&root.join("EchoesVault/pages"));
    let message = run_portable(&root, &["append"], r#"{"entry": "x"}"#).message();
    assert!(message.contains("leads out"), "{message}");
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    assert_eq!(tree(&root.join("EchoesVault/pages")), before);
    assert!(!root.join(".echoes-vault/lock").exists());
}

#[test]
fn a_page_that_is_a_link_to_the_outside_is_not_read() {
    let (_home, root) = vault();
    let outside = tempfile::NamedTempFile::new().unwrap();
    std::os::unix::fs::symlink(outside.path(), root.join("EchoesVault/pages/p.md")).unwrap();
    assert!(run_portable(&root, &["hash", "p"], "").message().contains("leads out"));
    assert!(upsert(&root, "p").message().contains("symbolic link"));
}

#[test]
fn a_signal_leaves_no_lock() {
    let (_home, root) = vault();
    for name in ["TERM", "HUP"] {
        // A page that takes some seconds to read keeps the command under its lock.
        let fifo = root.join("slow");
        let _ = fs::remove_file(&fifo);
        let script = format!(
            "import os, signal, sys\n\
             sys.argv = ['x']\n\
             import importlib.util as u\n\
             s = u.spec_from_file_location('e', {runtime:?})\n\
             e = u.module_from_spec(s)\n\
             s.loader.exec_module(e)\n\
             e.prepare_writing = lambda workspace: os.kill(os.getpid(), signal.SIG{name})\n\
             e.__file__ = {copy:?}\n\
             sys.exit(e.main(['--workspace', {root:?}, 'hydrate']))\n",
            runtime = portable().to_str().unwrap(),
            copy = root.join(".echoes-vault/echoes_vault.py").to_str().unwrap(),
            root = root.to_str().unwrap(),
        );
        let mut command = python();
        command.args(["-B", "-c", &script]);
        let done = run(command, "");
        assert!(done.status > 128, "{done:?}");
        assert!(!root.join(".echoes-vault/lock").exists(), "{name}");
    }
}

#[test]
fn a_huge_page_needs_little_more_memory_than_its_size() {
    let (_home, root) = vault();
    let size = 100 * 1024 * 1024;
    let mut text = String::from("---\ntype: n\nstack: []\nstatus: s\nsummary: Huge.\n---\n");
    text.push_str(&"x\n".repeat(size / 2));
    fs::write(root.join("EchoesVault/pages/huge.md"), text).unwrap();
    let script = format!(
        "import resource, runpy, sys\n\
         sys.argv = [{copy:?}, '--workspace', {root:?}, 'hydrate']\n\
         try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n\
         except SystemExit as stop:\n    assert stop.code == 0\n\
         print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n",
        copy = root.join(".echoes-vault/echoes_vault.py").to_str().unwrap(),
        root = root.to_str().unwrap(),
    );
    let mut command = python();
    command.args(["-B", "-c", &script]);
    let done = run(command, "");
    let peak: usize = done.out.lines().last().unwrap().parse().expect(&done.err);
    assert!(peak < 6 * size / 1024, "{peak} KiB");
}

#[test]
fn an_old_lock_of_a_living_holder_is_respected() {
    let (_home, root) = vault();
    let script = format!(
        "import importlib.util as u, os, sys\n\
         s = u.spec_from_file_location('e', {runtime:?})\n\
         e = u.module_from_spec(s)\n\
         s.loader.exec_module(e)\n\
         with e.Lock(e.Workspace({root:?})):\n    \
             os.utime({lock:?}, (1, 1))\n    print('held', flush=True)\n    sys.stdin.read()\n",
        runtime = portable().to_str().unwrap(),
        root = root.to_str().unwrap(),
        lock = root.join(".echoes-vault/lock").to_str().unwrap(),
    );
    use std::io::{BufRead as _, BufReader};
    use std::process::Stdio;
    let mut command = python();
    command.args(["-B", "-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut holder = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "held\n");
    let begin = Instant::now();
    let (one, other) = std::thread::scope(|scope| {
        let one = scope.spawn(|| upsert(&root, "one"));
        let payload = r#"{"entry": "x"}"#;
        let other = scope.spawn(|| run_native(&root, &["append"], payload));
        (one.join().unwrap(), other.join().unwrap())
    });
    assert!(begin.elapsed() > Duration::from_secs(7));
    for refused in [one, other] {
        let message = refused.message();
        assert!(message.contains(&format!("process {}", holder.id())), "{message}");
    }
    assert!(root.join(".echoes-vault/lock").exists());
    drop(holder.stdin.take());
    assert!(holder.wait().unwrap().success());
    upsert(&root, "one").value();
}
