//! Writers that are killed: what they were writing is whole, and the next command knows what to do.

use std::fs;
use std::process::Child;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use crate::support::{Engine, PAGE, Space};

/// Rounds of killing. Together they hit every part of a command.
const ROUNDS: u64 = 60;

/// Makes an abandoned lock old enough to be taken over.
fn abandon(space: &Space) -> bool {
    match fs::OpenOptions::new().write(true).open(space.path(".echoes-vault/lock")) {
        Ok(lock) => {
            lock.set_modified(SystemTime::now() - Duration::from_secs(61)).unwrap();
            true
        }
        Err(_) => false,
    }
}

fn spawn(space: &Space, args: &[&str], payload: &Value) -> Child {
    use std::io::Write as _;
    let mut child = space.command(Engine::Native, args).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(payload.to_string().as_bytes()).unwrap();
    child
}

#[test]
fn killed_writers_leave_whole_files() {
    let space = Space::new();
    let text = |letter: char| {
        let body: String = std::iter::repeat_n(letter, 400_000).collect();
        format!("{}{body}\n", PAGE.replace("S.", &format!("Page of {letter}.")))
    };
    let pages = ['a', 'b'].map(text);
    space.send(&["upsert"], &json!({"filename": "p", "content": pages[0]})).json();
    let (mut killed, mut locked) = (0, 0);
    for round in 0..ROUNDS {
        let hash = space.run(&["hash", "p"], b"").json()["sha256"].clone();
        let old = space.read("EchoesVault/pages/p.md");
        let new = pages.iter().find(|page| **page != old).unwrap();
        let page = json!({"filename": "p", "content": new, "expectedSha256": hash});
        let (args, payload) = if round % 2 == 0 {
            (&["upsert"][..], page)
        } else {
            (
                &["end", "--confirm-explicit-user-end"][..],
                json!({"dailySummary": "- x", "pages": [page]}),
            )
        };
        let mut child = spawn(&space, args, &payload);
        // Not a wait for anything: a moment to be killed in, another one in every round.
        std::thread::sleep(Duration::from_micros(round * round * 7919 % 40_000));
        child.kill().unwrap();
        killed += u32::from(!child.wait().unwrap().success());
        locked += u32::from(abandon(&space));
        let now = space.read("EchoesVault/pages/p.md");
        assert!(now == old || now == *new, "half a page after {} bytes", now.len());
        let index = space.read("EchoesVault/index.md");
        assert!(
            index.ends_with("- [[p]]: Page of a.\n") || index.ends_with("- [[p]]: Page of b.\n")
        );
        serde_json::from_str::<Value>(&space.read(".echoes-vault/state.json")).unwrap();
        for entry in fs::read_dir(space.path("EchoesVault/daily")).unwrap() {
            for file in fs::read_dir(entry.unwrap().path()).unwrap() {
                let path = file.unwrap().path();
                if path.extension().is_some_and(|ext| ext == "md") {
                    let text = fs::read_to_string(path).unwrap();
                    assert!(
                        text.starts_with("### Session") && text.ends_with("\n\n- x\n"),
                        "{text:?}"
                    );
                }
            }
        }
        space.run(&["rebuild-index"], b"").json();
        assert!(!space.path(".echoes-vault/lock").exists());
    }
    assert!(killed > 0 && locked > 0, "{killed} killed, {locked} with the lock");
}

#[test]
fn a_killed_writers_lock_is_honoured_for_a_minute() {
    let space = Space::new();
    space.write(".echoes-vault/lock", "4242-0123456789abcdef\n");
    let before = space.snapshot();
    let start = std::time::Instant::now();
    let refusal = space.run(&["append"], b"{\"entry\": \"x\"}").refusal();
    assert!(start.elapsed() >= Duration::from_secs(8));
    assert!(refusal.contains("4242") && refusal.contains(" s"), "{refusal}");
    assert_eq!(space.snapshot(), before);
    assert!(abandon(&space));
    space.run(&["append"], b"{\"entry\": \"x\"}").json();
    assert!(!space.path(".echoes-vault/lock").exists());
}

#[test]
fn an_interrupted_writer_gives_its_lock_back() {
    let space = Space::new();
    // So much to read that there is time to interrupt it.
    let body = "Only ordinary prose, again and again.\n".repeat(400_000);
    for at in 0..8 {
        space.write(format!("EchoesVault/pages/big{at}.md"), format!("{PAGE}{body}"));
    }
    let lock = space.path(".echoes-vault/lock");
    let before = space.snapshot();
    for signal in ["INT", "TERM", "HUP"] {
        let child = spawn(&space, &["append"], &json!({"entry": "x"}));
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while !lock.exists() {
            assert!(std::time::Instant::now() < deadline, "never locked");
            std::thread::yield_now();
        }
        let pid = child.id().to_string();
        let sent = std::process::Command::new("kill").args(["-s", signal, &pid]).status();
        assert!(sent.unwrap().success());
        let status = child.wait_with_output().unwrap().status;
        assert!(matches!(status.code(), Some(130 | 2)), "{status:?}");
        assert!(!lock.exists(), "{signal}");
        assert!(space.snapshot() == before, "{signal}");
    }
}
