//! Many writers of both engines at once: nothing is lost, and no lock stays.

use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Engine, PAGE, Space, need_python};

/// How long the writers work; `COMMSD_STRESS_SECS` sets another time.
fn duration() -> Duration {
    let secs = std::env::var("COMMSD_STRESS_SECS").ok().and_then(|secs| secs.parse().ok());
    Duration::from_secs(secs.unwrap_or(5))
}

/// Writers of each engine.
const WRITERS: u64 = 4;

fn counter(text: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix("count: ")).unwrap();
    line.parse().unwrap()
}

/// Adds one to the shared page unless somebody else does at the same moment; whether it did.
fn count_up(space: &Space, engine: Engine) -> bool {
    let hash = space.run_with(engine, &["hash", "shared"], b"").json()["sha256"].clone();
    let text = space.read("EchoesVault/pages/shared.md");
    let next = counter(&text) + 1;
    let content = format!("{PAGE}count: {next}\n");
    let payload = json!({"filename": "shared", "content": content, "expectedSha256": hash});
    let done = space.run_with(engine, &["upsert"], payload.to_string().as_bytes());
    if done.code == Some(0) {
        return true;
    }
    let refusal = done.refusal();
    assert!(!refusal.contains("lock"), "{refusal}");
    false
}

#[test]
fn writers_of_both_engines_lose_nothing() {
    need_python();
    let space = Space::new();
    space.write("EchoesVault/pages/shared.md", format!("{PAGE}count: 0\n"));
    let counted = AtomicU64::new(0);
    let appended = AtomicU64::new(0);
    let deadline = Instant::now() + duration();
    std::thread::scope(|scope| {
        for writer in 0..2 * WRITERS {
            let (space, counted, appended) = (&space, &counted, &appended);
            let engine = if writer % 2 == 0 { Engine::Native } else { Engine::Python };
            scope.spawn(move || {
                let mut round = 0;
                while Instant::now() < deadline {
                    round += 1;
                    let entry = json!({"entry": format!("- {writer}:{round}"), "agent": "x"});
                    let entry = entry.to_string();
                    space.run_with(engine, &["append"], entry.as_bytes()).json();
                    appended.fetch_add(1, Ordering::Relaxed);
                    counted.fetch_add(u64::from(count_up(space, engine)), Ordering::Relaxed);
                }
            });
        }
    });
    let mut seen: BTreeMap<String, u32> = BTreeMap::new();
    for date in fs::read_dir(space.path("EchoesVault/daily")).unwrap() {
        for entry in fs::read_dir(date.unwrap().path()).unwrap() {
            let text = fs::read_to_string(entry.unwrap().path()).unwrap();
            *seen.entry(text.lines().last().unwrap().to_owned()).or_default() += 1;
        }
    }
    assert!(seen.values().all(|times| *times == 1));
    assert_eq!(seen.len() as u64, appended.into_inner());
    let counted = counted.into_inner();
    assert_eq!(counter(&space.read("EchoesVault/pages/shared.md")), counted);
    assert!(counted > 0);
    assert!(!space.path(".echoes-vault/lock").exists());
    for folder in ["EchoesVault/pages", "EchoesVault", ".echoes-vault"] {
        assert_eq!(space.temporary(folder), Vec::<String>::new());
    }
    let state: Value = serde_json::from_str(&space.read(".echoes-vault/state.json")).unwrap();
    assert_eq!(state["stats"]["totalDailyLogs"], seen.len());
    assert_eq!(space.run(&["inspect"], b"").json()["health"]["issueCount"], 0);
}

#[test]
fn one_abandoned_lock_is_taken_by_one_writer_at_a_time() {
    need_python();
    let space = Space::new();
    for round in 0..6 {
        space.write(".echoes-vault/lock", "1-0123456789abcdef\n");
        let lock =
            fs::OpenOptions::new().write(true).open(space.path(".echoes-vault/lock")).unwrap();
        lock.set_modified(std::time::SystemTime::now() - Duration::from_secs(90)).unwrap();
        drop(lock);
        std::thread::scope(|scope| {
            for writer in 0..6 {
                let space = &space;
                let engine = if writer % 3 == 2 { Engine::Python } else { Engine::Native };
                scope.spawn(move || {
                    space.run_with(engine, &["append"], b"{\"entry\": \"x\"}").json()
                });
            }
        });
        let state: Value = serde_json::from_str(&space.read(".echoes-vault/state.json")).unwrap();
        // Every writer counted all entries before it, so none of them worked beside another one.
        assert_eq!(state["stats"]["totalDailyLogs"], 6 * (round + 1));
        assert!(!space.path(".echoes-vault/lock").exists());
    }
}
