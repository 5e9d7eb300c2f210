//! Locks that crashed commands left behind, again and again, while writers of both engines work: only
//! one writer at a time takes them over, and nothing that was written is lost.
//!
//! `COMMSD_STRESS_SECS` sets how long they write.

use std::collections::BTreeSet;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use serde_json::json;

use crate::support::{Answer, Engine, PAGE, Space, need_python};

/// Writers of each engine.
const WRITERS: usize = 4;
/// Seconds in an ordinary test run.
const SHORT: u64 = 5;
const SHARED: &str = "EchoesVault/pages/shared.md";

/// What one writer was told it had written.
#[derive(Default)]
struct Told {
    entries: Vec<String>,
    lines: Vec<String>,
}

/// Another writer was faster, or had the lock for too long: nothing was written. Anything else fails.
fn met_another(answer: &Answer) {
    let refusal = answer.refusal();
    let met =
        ["changed", "is locked", "holds the lock"].iter().any(|words| refusal.contains(words));
    assert!(met && !refusal.contains("away"), "{refusal}");
}

/// Appends entries and adds lines to the shared page until the time is over.
fn write(space: &Space, engine: Engine, name: &str, end: Instant) -> Told {
    let mut told = Told::default();
    let mut number = 0;
    while Instant::now() < end {
        number += 1;
        let note = format!("{name} notes {number}.");
        let payload = json!({"entry": note, "agent": name}).to_string();
        let answer = space.run_with(engine, &["append"], payload.as_bytes());
        if answer.code == Some(0) {
            told.entries.push(note);
        } else {
            met_another(&answer);
        }
        let page = space.read(SHARED);
        let hash = space.run_with(engine, &["hash", "shared"], b"").json()["sha256"].clone();
        if space.read(SHARED) != page {
            continue;
        }
        let line = format!("{name} line {number}.");
        let content = format!("{page}{line}\n");
        let payload = json!({"filename": "shared", "content": content, "expectedSha256": hash});
        let answer = space.run_with(engine, &["upsert"], payload.to_string().as_bytes());
        if answer.code == Some(0) {
            told.lines.push(line);
        } else {
            met_another(&answer);
        }
    }
    told
}

/// Leaves a lock as a command that crashed an hour ago would have, whenever none is there.
fn abandon_locks(space: &Space, over: &AtomicBool) -> usize {
    let made = space.outside.join("lock");
    let mut count = 0;
    while !over.load(Ordering::Relaxed) {
        fs::write(&made, "1-0123456789abcdef\n").unwrap();
        let file = fs::File::options().write(true).open(&made).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(3600)).unwrap();
        count += usize::from(fs::hard_link(&made, space.path(".echoes-vault/lock")).is_ok());
        fs::remove_file(&made).unwrap();
    }
    count
}

#[test]
fn abandoned_locks_are_taken_over_by_one_writer_at_a_time() {
    need_python();
    let space = Space::new();
    space.write(SHARED, PAGE);
    let asked = std::env::var("COMMSD_STRESS_SECS").ok().and_then(|secs| secs.parse().ok());
    let end = Instant::now() + Duration::from_secs(asked.unwrap_or(SHORT));
    let over = AtomicBool::new(false);
    let told: Vec<Told> = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..2 * WRITERS)
            .map(|number| {
                let engine = if number % 2 == 0 { Engine::Native } else { Engine::Python };
                let space = &space;
                scope.spawn(move || write(space, engine, &format!("writer{number}"), end))
            })
            .collect();
        let breaker = scope.spawn(|| abandon_locks(&space, &over));
        let told = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        over.store(true, Ordering::Relaxed);
        assert!(breaker.join().unwrap() > 0, "no lock was abandoned");
        told
    });
    // The last abandoned lock goes with the next command.
    space.run(&["hydrate"], b"").json();
    assert!(!space.path(".echoes-vault/lock").exists());
    for folder in ["EchoesVault/pages", "EchoesVault", ".echoes-vault"] {
        assert_eq!(space.temporary(folder), Vec::<String>::new());
    }

    let mut wanted: Vec<&String> = told.iter().flat_map(|told| &told.entries).collect();
    let mut found = Vec::new();
    for day in fs::read_dir(space.path("EchoesVault/daily")).unwrap() {
        for entry in fs::read_dir(day.unwrap().path()).unwrap() {
            let text = fs::read_to_string(entry.unwrap().path()).unwrap();
            found.push(text.lines().last().unwrap().to_owned());
        }
    }
    wanted.sort();
    found.sort();
    assert_eq!(found.iter().collect::<Vec<_>>(), wanted);

    let page = space.read(SHARED);
    let present: Vec<&str> = page.strip_prefix(PAGE).unwrap().lines().collect();
    let promised: BTreeSet<&str> =
        told.iter().flat_map(|told| told.lines.iter().map(String::as_str)).collect();
    assert_eq!(present.iter().copied().collect::<BTreeSet<_>>(), promised);
    assert_eq!(present.len(), promised.len(), "a line is there twice");
    assert!(told.iter().all(|told| !told.entries.is_empty()), "a writer never came to write");
    assert_eq!(space.run(&["inspect"], b"").json()["health"]["issueCount"], 0);
}
