//! Writers of both engines at once: nothing written is lost, and no lock or litter stays.
//!
//! `COMMSD_VAULT_STRESS=30` makes them write for that many seconds; by default it is a few.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use serde_json::json;

use crate::engine::{Outcome, run_native, run_portable};

/// Writers of each engine.
const WRITERS: usize = 4;
/// Seconds in an ordinary test run.
const SHORT: u64 = 5;

const FRONT: &str = "---\ntype: note\nstack: []\nstatus: active\nsummary: Everybody's page.\n---\n\n# P\n";
const SHARED: &str = "EchoesVault/pages/shared.md";

type Engine = fn(&Path, &[&str], &str) -> Outcome;

/// What one writer was told it had written.
#[derive(Default)]
struct Told {
    entries: Vec<String>,
    lines: Vec<String>,
    conflicts: usize,
}

fn seconds() -> Duration {
    let asked = std::env::var("COMMSD_VAULT_STRESS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(asked.unwrap_or(SHORT))
}

/// Whether a refusal is one that a writer meets among others; it writes nothing.
fn is_busy(outcome: &Outcome) -> bool {
    let message = outcome.message();
    let busy = message.contains("changed") || message.contains("locked") || message.contains("lock is held");
    assert!(busy, "{message}");
    busy
}

/// Appends entries and adds lines to a shared page until the time is over.
fn write(engine: Engine, root: &Path, name: &str, end: Instant) -> Told {
    let mut told = Told::default();
    let mut number = 0;
    while Instant::now() < end {
        number += 1;
        let note = format!("{name} notes {number}.");
        let outcome = engine(root, &["append"], &json!({"entry": note, "agent": name}).to_string());
        if outcome.status == 0 {
            told.entries.push(note);
        } else {
            is_busy(&outcome);
        }
        let line = format!("{name} line {number}.");
        // Read, then the hash of what was read; whoever writes in between makes the hash stale.
        let page = fs::read_to_string(root.join(SHARED)).unwrap();
        let hash = engine(root, &["hash", "shared"], "").value()["sha256"].clone();
        if fs::read_to_string(root.join(SHARED)).unwrap() != page {
            told.conflicts += 1;
            continue;
        }
        let payload = json!({"filename": "shared", "content": format!("{page}{line}\n"), "expectedSha256": hash});
        let outcome = engine(root, &["upsert"], &payload.to_string());
        if outcome.status == 0 {
            told.lines.push(line);
        } else if is_busy(&outcome) {
            told.conflicts += 1;
        }
    }
    told
}

/// Every daily entry's last line but the newline.
fn entries(root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for day in fs::read_dir(root.join("EchoesVault/daily")).unwrap() {
        for entry in fs::read_dir(day.unwrap().path()).unwrap() {
            let path = entry.unwrap().path();
            assert_eq!(path.extension().unwrap(), "md", "{}", path.display());
            let text = fs::read_to_string(&path).unwrap();
            found.push(text.trim_end().rsplit('\n').next().unwrap().to_owned());
        }
    }
    found
}

fn litter(root: &Path) -> Vec<PathBuf> {
    [".echoes-vault", "EchoesVault", "EchoesVault/pages"]
        .iter()
        .flat_map(|folder| fs::read_dir(root.join(folder)).unwrap())
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.ends_with("lock") || path.extension().is_some_and(|end| end == "tmp"))
        .collect()
}

/// Leaves a lock as a crashed command of another day would have, whenever none is there.
fn abandon_locks(root: &Path, over: &AtomicBool) -> usize {
    let made = root.join("abandoned");
    let mut count = 0;
    while !over.load(Ordering::Relaxed) {
        fs::write(&made, "1-0123456789abcdef\n").unwrap();
        let file = fs::File::options().write(true).open(&made).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(3600)).unwrap();
        count += usize::from(fs::hard_link(&made, root.join(".echoes-vault/lock")).is_ok());
        fs::remove_file(&made).unwrap();
    }
    count
}

fn stress(time: Duration, abandon: bool) {
    let home = tempfile::tempdir().unwrap();
    let root = home.path().canonicalize().unwrap();
    run_native(&root, &["init"], "").value();
    run_native(&root, &["upsert"], &json!({"filename": "shared", "content": FRONT}).to_string()).value();

    let end = Instant::now() + time;
    let over = AtomicBool::new(false);
    let told: Vec<Told> = std::thread::scope(|scope| {
        let engines: [(&str, Engine); 2] = [("native", run_native), ("python", run_portable)];
        let mut writers = Vec::new();
        for (name, engine) in engines {
            for number in 0..WRITERS {
                let root = &root;
                writers.push(scope.spawn(move || write(engine, root, &format!("{name}{number}"), end)));
            }
        }
        let breaker = abandon.then(|| scope.spawn(|| abandon_locks(&root, &over)));
        let told = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        over.store(true, Ordering::Relaxed);
        if let Some(breaker) = breaker {
            assert!(breaker.join().unwrap() > 0, "no lock was abandoned");
        }
        told
    });

    if abandon {
        // The last abandoned lock, if one was left, goes with the next command.
        run_native(&root, &["hydrate"], "").value();
    }
    assert_eq!(litter(&root), Vec::<PathBuf>::new());
    let mut wanted: Vec<String> = told.iter().flat_map(|told| told.entries.clone()).collect();
    let mut found = entries(&root);
    wanted.sort();
    found.sort();
    assert_eq!(found, wanted);

    let page = fs::read_to_string(root.join(SHARED)).unwrap();
    let lines: Vec<&str> = page.strip_prefix(FRONT).unwrap().lines().collect();
    let present: BTreeSet<&str> = lines.iter().copied().collect();
    assert_eq!(present.len(), lines.len(), "a line is there twice");
    let promised: BTreeSet<&str> = told.iter().flat_map(|told| told.lines.iter().map(String::as_str)).collect();
    assert_eq!(present, promised);

    for (engine, writers) in ["native", "python"].iter().zip(told.chunks(WRITERS)) {
        for told in writers {
            assert!(!told.entries.is_empty(), "a {engine} writer never came to write");
        }
    }
    let conflicts: usize = told.iter().map(|told| told.conflicts).sum();
    println!("{} entries, {} lines, {conflicts} conflicts", wanted.len(), lines.len());
    let health = run_native(&root, &["inspect"], "").value()["health"].clone();
    assert_eq!(health["integrity"], "healthy", "{health}");
}

#[test]
fn eight_writers_lose_nothing() {
    stress(seconds(), false);
}

#[test]
fn abandoned_locks_are_taken_over_by_one_writer_at_a_time() {
    stress(seconds().min(Duration::from_secs(10)), true);
}
