//! Relay, worker and requester as programs of their own, over loopback: the quick start, what is asked
//! from another terminal, signals, kill -9, a relay that goes away.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// Nothing here takes longer, on a slow machine either.
const PATIENCE: Duration = Duration::from_secs(90);

const INPUT: &str = r#"{"summary":"Hello from Alice","findings":[]}"#;

struct Place {
    dir: tempfile::TempDir,
}

/// A program that is ended with the test.
struct Program {
    child: Child,
    /// Its first line on stdout.
    line: String,
}

impl Program {
    fn id(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.id(), signal).unwrap();
    }

    fn ended(&mut self) -> Option<i32> {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < until, "it does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Place {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_commsd"));
        command
            .arg("acp")
            .args(args)
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("COMMSD_HOME", self.dir.path().join("home"))
            .env("COMMSD_NO_BROADCAST", "1")
            .stdin(Stdio::null());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        let mut child = self.command(args);
        let mut child = Program {
            child: child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap(),
            line: String::new(),
        };
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let mut errors = child.child.stderr.take().unwrap();
        let reader = std::thread::spawn(move || {
            errors.read_to_end(&mut stderr).unwrap();
            stderr
        });
        child.child.stdout.take().unwrap().read_to_end(&mut stdout).unwrap();
        child.ended();
        let status = child.child.wait().unwrap();
        Output { status, stdout, stderr: reader.join().unwrap() }
    }

    fn good(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{args:?}: {output:?} {stderr}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Starts a program whose first line says that it is ready.
    fn start(&self, name: &str, args: &[&str]) -> Program {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.path(&format!("{name}.err")))
            .unwrap();
        let mut child = self.command(args).stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        // Whatever else is printed there has a reader.
        std::thread::spawn(move || std::io::copy(&mut stdout, &mut std::io::sink()));
        let errors = fs::read_to_string(self.path(&format!("{name}.err"))).unwrap();
        assert!(!line.is_empty(), "{name} ended: {errors}");
        Program { child, line: line.trim().to_owned() }
    }

    fn relay(&self, port: &str) -> (Program, String) {
        let state = self.text("relay");
        let args = ["relay", "start", "--port", port, "--state", &state];
        let relay = self.start("relay", &args);
        let url = relay.line.split_whitespace().find(|word| word.starts_with("http://")).unwrap();
        let url = url.trim_end_matches('.').to_owned();
        (relay, url)
    }

    /// A worker with the key `bob.json`, which is made when it is not there.
    fn worker(&self, relay: &str, more: &[&str]) -> Program {
        let key = self.text("bob.json");
        if !Path::new(&key).exists() {
            self.good(&["keygen", &key]);
        }
        let mut args = vec!["worker", "start", "--key", &key, "--relay", relay, "--max-uses", "9"];
        args.extend(more);
        self.start("worker", &args)
    }

    fn delegate<'a>(&self, key: &'a str, to: &'a str) -> Vec<&'a str> {
        if !Path::new(key).exists() {
            self.good(&["keygen", key]);
        }
        let schema = r#"{"type":"object","required":["summary","findings"]}"#;
        vec![
            "delegate",
            "--key",
            key,
            "--to",
            to,
            "--title",
            "JSON report",
            "--input",
            INPUT,
            "--output-schema",
            schema,
            "--auto-approve",
        ]
    }

    /// Waits for the office of a key: asked before, a command would open one itself, and be in its way.
    fn office(&self, key: &str) {
        let seen: Value = serde_json::from_slice(&fs::read(key).unwrap()).unwrap();
        let did = seen["did"].as_str().unwrap().strip_prefix("did:key:").unwrap();
        let socket = self.path("home/state/acp").join(did).join("office.sock");
        self.until("the office", || socket.exists());
    }

    /// Agrees to the next question of `key`, which is of this gate.
    fn agree(&self, key: &str, gate: &str) {
        let mut id = String::new();
        self.until(gate, || {
            let waiting = self.json(&["approvals", "list", "--key", key]);
            let asked =
                waiting["approvals"].as_array().unwrap().iter().find(|asked| asked["gate"] == gate);
            id = asked.map_or_else(String::new, |asked| asked["id"].as_str().unwrap().to_owned());
            !id.is_empty()
        });
        self.good(&["approvals", "approve", &id, "--key", key]);
    }

    fn json(&self, args: &[&str]) -> Value {
        let mut with = args.to_vec();
        with.push("--json");
        serde_json::from_str(&self.good(&with)).unwrap()
    }

    /// Looks again until `is` holds.
    fn until(&self, what: &str, mut is: impl FnMut() -> bool) {
        let until = Instant::now() + PATIENCE;
        while !is() {
            assert!(Instant::now() < until, "{what} does not come");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

pub fn sleeping(mark: &str) -> bool {
    let line = format!("sleep\0{mark}\0").into_bytes();
    fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| fs::read(entry.path().join("cmdline")).ok())
        .any(|found| found.ends_with(&line))
}

#[test]
fn the_quick_start_ends_settled_and_valid_on_both_sides() {
    let place = Place::new();
    let (_relay, url) = place.relay("0");
    let [bobs, alices, report] =
        ["bob-audit.jsonl", "alice-audit.jsonl", "report.json"].map(|name| place.text(name));
    let adapter: &[&str] = if has_node() {
        &["--adapter", "sandbox"]
    } else {
        &["--adapter", "command", "--cmd", "cat"]
    };
    let more = [adapter, &["--name", "Bob Worker", "--auto-accept", "--once", "--audit", &bobs]];
    let mut worker = place.worker(&url, &more.concat());
    assert!(worker.line.starts_with("acp-invite:"), "{}", worker.line);
    let key = place.text("alice.json");
    let invite = worker.line.clone();
    let mut args = place.delegate(&key, &invite);
    args.extend(["--audit", &alices, "--out", &report]);
    let said = place.good(&args);
    assert!(
        said.starts_with("SETTLED task_") && said.contains("\naudit VALID 6 entries"),
        "{said}"
    );
    assert_eq!(worker.ended(), Some(0));
    let report: Value = serde_json::from_str(&fs::read_to_string(report).unwrap()).unwrap();
    assert_eq!(report, serde_json::from_str::<Value>(INPUT).unwrap());
    for log in [&alices, &bobs] {
        assert_eq!(place.json(&["audit-verify", log])["status"], "VALID");
    }
    assert_eq!(place.json(&["audit-compare", &alices, &bobs])["result"], "equal");
    let found = place.json(&["discover", "--relay", &url]);
    assert!(found.to_string().contains("Bob Worker"), "{found}");
    // A key is in its own file and nowhere else.
    let seed: Value = serde_json::from_slice(&fs::read(&key).unwrap()).unwrap();
    let seed = seed["seed"].as_str().unwrap().to_owned();
    assert!(seed.len() > 30);
    let mut searched = 0;
    let mut dirs = vec![place.dir.path().to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.is_file() && path != Path::new(&key) {
                let bytes = fs::read(&path).unwrap();
                searched += 1;
                let found = bytes.windows(seed.len()).any(|part| part == seed.as_bytes());
                assert!(!found, "{}", path.display());
            }
        }
    }
    assert!(searched > 6);
}

fn has_node() -> bool {
    Command::new("node").arg("--version").output().is_ok_and(|output| output.status.success())
}

#[test]
fn the_demo_shows_its_four_scenarios() {
    let place = Place::new();
    let logs = place.text("logs");
    let shown = place.json(&["demo", "--audit-dir", &logs]);
    let scenarios = shown.as_array().unwrap();
    assert_eq!(scenarios.len(), 4);
    for scenario in scenarios {
        for shown in scenario["shown"].as_array().unwrap() {
            assert_eq!(shown["good"], true, "{shown}");
        }
    }
    let anchor = format!("{logs}/trust-anchor.json");
    for who in ["alice", "bob"] {
        let log = format!("{logs}/{who}.jsonl");
        assert_eq!(place.json(&["audit-verify", &log, &anchor])["status"], "VALID");
    }
    // Nothing is overwritten.
    assert_eq!(place.run(&["demo", "--audit-dir", &logs]).status.code(), Some(1));
}

#[test]
fn the_owner_answers_from_another_terminal() {
    let place = Place::new();
    let (_relay, url) = place.relay("0");
    let worker = place.worker(&url, &["--adapter", "command", "--cmd", "cat"]);
    let key = place.text("alice.json");
    let (invite, bob) = (worker.line.clone(), place.text("bob.json"));
    let args = place.delegate(&key, &invite);
    let delegated = std::thread::scope(|scope| {
        let delegated = scope.spawn(|| place.good(&args));
        let mut id = String::new();
        place.until("the question", || {
            let waiting = place.json(&["approvals", "list", "--key", &bob]);
            let first = waiting["approvals"].get(0).map(|question| {
                assert_eq!(question["gate"], "contract_acceptance");
                question["id"].as_str().unwrap().to_owned()
            });
            id = first.unwrap_or_default();
            !id.is_empty()
        });
        let wrong = place.run(&["approvals", "approve", "000000", "--key", &bob]);
        assert_eq!(wrong.status.code(), Some(1));
        place.good(&["approvals", "approve", &id, "--key", &bob]);
        delegated.join().unwrap()
    });
    assert!(delegated.starts_with("SETTLED"), "{delegated}");
    let tasks = place.json(&["tasks", "--key", &bob])["tasks"].take();
    assert_eq!((tasks[0]["role"].as_str(), tasks.as_array().unwrap().len()), (Some("worker"), 1));
    // The requester's office has closed; its tasks are there all the same.
    place.until("the end", || {
        place.json(&["tasks", "--key", &bob, "--state", "SETTLED"])["tasks"][0]["status"]
            == "SETTLED"
    });
    let mine = place.json(&["tasks", "--key", &key]);
    let id = mine["tasks"][0]["taskId"].as_str().unwrap();
    assert_eq!(place.json(&["task", id, "--key", &key])["status"], "SETTLED");
}

#[test]
fn work_uses_a_tool_of_the_requester_who_is_asked_each_time() {
    /// Uses the tool twice, and gives back both answers.
    const PROGRAM: &str = r#"#!/bin/sh
use() {
    curl -s ${TASK_TOOLS_SOCKET:+--unix-socket "$TASK_TOOLS_SOCKET"} \
        -H "Authorization: Bearer $TASK_TOOLS_TOKEN" "$TASK_TOOLS_URL/v1/tools/call" \
        -d '{"resource":"mcp:docs/'$1'","action":"read","arguments":{"page":"'$1'"}}'
}
echo '{"summary":"","findings":['"$(use one),$(use two)"']}'
"#;
    if Command::new("curl").arg("--version").output().is_err() {
        return;
    }
    let place = Place::new();
    let (_relay, url) = place.relay("0");
    let program = place.path("program");
    fs::write(&program, PROGRAM).unwrap();
    let cmd = format!("/bin/sh {}", program.display());
    let at = ["--isolation", "subprocess", "--adapter", "command", "--cmd", &cmd, "--auto-accept"];
    let worker = place.worker(&url, &at);
    let key = place.text("alice.json");
    let mut args = place.delegate(&key, &worker.line);
    let used = place.path("used");
    let tool = format!("mcp:docs/*:read=tee -a '{}'", used.display());
    args.extend(["--isolation", "subprocess", "--tool", &tool, "--tool-uses", "3"]);
    // Who names no command, has none here.
    let mut without = args.clone();
    without.extend(["--tool", "mcp:docs/two:read"]);
    assert_eq!(place.run(&without).status.code(), Some(2));
    let question = |page: &str| {
        let mut found = Value::Null;
        place.until("the question", || {
            let waiting = place.json(&["approvals", "list", "--key", &key]);
            found = waiting["approvals"].get(0).cloned().unwrap_or_default();
            let about = found["about"][0].as_str().unwrap_or_default();
            about.contains(page)
        });
        assert_eq!(found["gate"], "external_send");
        found["id"].as_str().unwrap().to_owned()
    };
    let delegated = std::thread::scope(|scope| {
        let delegated = scope.spawn(|| place.json(&args));
        place.office(&key);
        place.good(&["approvals", "approve", &question("one"), "--key", &key]);
        place.good(&["approvals", "deny", &question("two"), "--key", &key]);
        delegated.join().unwrap()
    });
    let findings = &delegated["deliverable"]["findings"];
    let given =
        json!({ "resource": "mcp:docs/one", "action": "read", "arguments": { "page": "one" } });
    assert_eq!(findings[0]["output"], given, "{delegated}");
    assert_eq!(findings[1]["error"]["code"], "APPROVAL_DENIED");
    // What was not allowed has not run.
    let ran: Value = serde_json::from_str(&fs::read_to_string(used).unwrap()).unwrap();
    assert_eq!(ran, given);
}

#[test]
fn a_program_hands_a_part_of_its_task_on_with_a_tool_of_the_requesters() {
    if Command::new("curl").arg("--version").output().is_err() {
        return;
    }
    let place = Place::new();
    let (_relay, url) = place.relay("0");
    let [alice, bob, carol] =
        ["alice", "bob", "carol"].map(|name| place.text(&format!("{name}.json")));
    // Carol's work uses the tool, and gives back what it answers.
    let uses = r#"printf '{"said":%s}' "$(curl -s -H "Authorization: Bearer $TASK_TOOLS_TOKEN" \
        "$TASK_TOOLS_URL/v1/tools/call" -d '{"resource":"mcp:docs/a","action":"read","arguments":7}')""#;
    fs::write(place.path("carols"), uses).unwrap();
    let cmd = format!("/bin/sh {}", place.path("carols").display());
    place.good(&["keygen", &carol]);
    let mut at = vec!["worker", "start", "--key", &carol, "--relay", &url, "--auto-accept"];
    at.extend(["--adapter", "command", "--isolation", "subprocess", "--cmd", &cmd]);
    let worker = place.start("carol", &at);
    // Bob's hands all of it on, by the command line, and gives back what comes of it.
    let hands_on = format!(
        "printf '{{\"summary\":\"\",\"findings\":[%s]}}' \"$({} acp delegate --json --key {bob} \
         --state-dir {} --parent $TASK_ID --to {} --title part --tool mcp:docs/a:read --auto-approve)\"",
        env!("CARGO_BIN_EXE_commsd"),
        place.path("home/state/acp").display(),
        worker.line,
    );
    fs::write(place.path("bobs"), hands_on).unwrap();
    let cmd = format!("/bin/sh {}", place.path("bobs").display());
    let at = ["--isolation", "none", "--adapter", "command", "--cmd", &cmd, "--auto-accept"];
    let worker = place.worker(&url, &at);
    let mut args = place.delegate(&alice, &worker.line);
    let log = place.text("alice.jsonl");
    args.extend(["--isolation", "none", "--redelegation", "1", "--audit", &log]);
    args.extend(["--tool", "mcp:docs/**:read=cat", "--tool-uses", "2"]);
    let done = std::thread::scope(|scope| {
        let done = scope.spawn(|| place.json(&args));
        place.agree(&bob, "redelegation");
        // Each gateway asks its own owner.
        place.agree(&bob, "external_send");
        place.office(&alice);
        place.agree(&alice, "external_send");
        done.join().unwrap()
    });
    let part = &done["deliverable"]["findings"][0];
    assert_eq!(part["status"], "SETTLED", "{done}");
    let given = json!({ "resource": "mcp:docs/a", "action": "read", "arguments": 7 });
    assert_eq!(part["deliverable"], json!({ "said": { "output": given } }), "{done}");
    assert_eq!(place.json(&["audit-verify", &log])["status"], "VALID");
    assert!(fs::read_to_string(&log).unwrap().contains("\"gate\":\"redelegation\""));
    let task = place.json(&["task", part["taskId"].as_str().unwrap(), "--key", &carol]);
    assert_eq!(task["order"]["parentTaskId"], done["taskId"]);
}

#[test]
fn only_the_workers_owner_sees_what_a_program_that_failed_has_said() {
    let place = Place::new();
    let (_relay, url) = place.relay("0");
    let mark = format!("why-{}", std::process::id());
    let program = place.path("program");
    fs::write(&program, format!("printf '{mark}\\033[2J\\nsecond' >&2; exit 3\n")).unwrap();
    let cmd = format!("/bin/sh {}", program.display());
    let at = ["--isolation", "subprocess", "--adapter", "command", "--cmd", &cmd, "--auto-accept"];
    let worker = place.worker(&url, &at);
    let (key, bob) = (place.text("alice.json"), place.text("bob.json"));
    let mut args = place.delegate(&key, &worker.line);
    let (state, log) = (place.text("alice"), place.text("alice.jsonl"));
    args.extend(["--state-dir", &state, "--audit", &log, "--isolation", "subprocess", "--json"]);
    let failed = place.run(&args);
    assert_eq!(failed.status.code(), Some(1));
    let answer: Value = serde_json::from_slice(&failed.stdout).unwrap();
    assert_eq!(answer["failure"]["code"], "ADAPTER_FAILED");
    // The worker's owner finds it in the task, and has it on the terminal.
    let id = answer["taskId"].as_str().unwrap();
    let task = place.json(&["task", id, "--key", &bob]);
    assert_eq!(task["stderr"], format!("{mark}\u{1b}[2J\nsecond"));
    let text = place.good(&["task", id, "--key", &bob]);
    assert!(text.contains(&format!("\n│ {mark}")) && !text.contains('\u{1b}'), "{text}");
    let shown = || fs::read_to_string(place.path("worker.err")).unwrap();
    place.until("the complaint", || shown().contains("\n│ second"));
    assert!(shown().contains(&format!("│ {mark}")) && !shown().contains('\u{1b}'));
    // Nothing of it has left the worker.
    let found = |bytes: &[u8]| bytes.windows(mark.len()).any(|part| part == mark.as_bytes());
    assert!(!found(&failed.stdout) && !found(&failed.stderr));
    let mut dirs = vec![place.path("alice"), place.path("relay")];
    let mut files = vec![place.path("alice.jsonl")];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).unwrap().flatten() {
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                dirs.push(entry.path())
            } else if kind.is_file() {
                files.push(entry.path())
            }
        }
    }
    assert!(files.len() > 3, "{files:?}");
    for file in files {
        assert!(!found(&fs::read(&file).unwrap()), "{}", file.display());
    }
}

#[test]
fn a_signal_cancels_and_nothing_is_left_running() {
    let place = Place::new();
    let (_relay, url) = place.relay("0");
    let mark = format!("{}", 80_000 + std::process::id() % 9999);
    let sleep = format!("sleep {mark}");
    let mut worker =
        place.worker(&url, &["--adapter", "command", "--cmd", &sleep, "--auto-accept"]);
    let key = place.text("alice.json");
    let args = place.delegate(&key, &worker.line);
    let mut child = place.command(&args);
    let child = child.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut delegate = Program { child, line: String::new() };
    place.until("the run", || sleeping(&mark));
    delegate.signal(Signal::INT);
    assert_eq!(delegate.ended(), Some(130));
    let mut said = String::new();
    delegate.child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.starts_with("CANCELLED"), "{said}");
    assert!(!sleeping(&mark));
    // A worker is a service: asked to end, it ends in order.
    worker.signal(Signal::INT);
    assert_eq!(worker.ended(), Some(0));
}

#[test]
fn a_worker_that_is_killed_leaves_no_run_and_its_task_fails() {
    let place = Place::new();
    let (_relay, url) = place.relay("0");
    let mark = format!("{}", 70_000 + std::process::id() % 9999);
    let sleep = format!("sleep {mark}");
    let more = ["--adapter", "command", "--cmd", &sleep, "--auto-accept"];
    let mut worker = place.worker(&url, &more);
    let key = place.text("alice.json");
    let invite = worker.line.clone();
    let args = place.delegate(&key, &invite);
    let output = std::thread::scope(|scope| {
        let delegated = scope.spawn(|| place.run(&args));
        place.until("the run", || sleeping(&mark));
        worker.signal(Signal::KILL);
        worker.ended();
        place.until("the end of the run", || !sleeping(&mark));
        worker = place.worker(&url, &more);
        delegated.join().unwrap()
    });
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.starts_with("FAILED") && said.contains("SANDBOX_FAILED"), "{said}");
    assert!(!sleeping(&mark), "the work was run again");
}

#[test]
fn a_worker_that_cannot_store_ends_and_says_why() {
    let place = Place::new();
    let (_relay, url) = place.relay("0");
    let more = ["--adapter", "command", "--cmd", "cat", "--auto-accept"];
    let mut worker = place.worker(&url, &more);
    let mut dirs = vec![place.path("home")];
    while let Some(dir) = dirs.pop() {
        for path in fs::read_dir(dir).unwrap().flatten().map(|entry| entry.path()) {
            if path.is_dir() {
                dirs.push(path);
            } else if path.ends_with("owner.redb") {
                fs::rename(&path, path.with_extension("away")).unwrap();
            }
        }
    }
    let key = place.text("alice.json");
    let invite = worker.line.clone();
    let args = place.delegate(&key, &invite);
    let mut child = place.command(&args);
    let child = child.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let _delegate = Program { child, line: String::new() };
    assert_eq!(worker.ended(), Some(1));
    let errors = fs::read_to_string(place.path("worker.err")).unwrap();
    assert!(errors.contains("was removed or replaced"), "{errors}");
}

#[test]
fn a_relay_that_is_killed_and_comes_back_loses_nothing() {
    let place = Place::new();
    let (mut relay, url) = place.relay("0");
    let port = url.rsplit(':').next().unwrap().to_owned();
    let worker = place.worker(&url, &["--adapter", "command", "--cmd", "cat"]);
    let (key, bob) = (place.text("alice.json"), place.text("bob.json"));
    let invite = worker.line.clone();
    let args = place.delegate(&key, &invite);
    let said = std::thread::scope(|scope| {
        let delegated = scope.spawn(|| place.good(&args));
        let mut id = String::new();
        place.until("the question", || {
            let waiting = place.json(&["approvals", "list", "--key", &bob]);
            id = waiting["approvals"][0]["id"].as_str().unwrap_or_default().to_owned();
            !id.is_empty()
        });
        relay.signal(Signal::KILL);
        relay.ended();
        place.good(&["approvals", "approve", &id, "--key", &bob]);
        (relay, _) = place.relay(&port);
        delegated.join().unwrap()
    });
    assert!(said.starts_with("SETTLED"), "{said}");
}

#[test]
fn no_relay_is_exit_code_4_and_bad_words_are_2() {
    let place = Place::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let dead = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let key = place.text("alice.json");
    let bob = place.text("bob.json");
    let did = place.good(&["keygen", &bob]);
    let mut args = place.delegate(&key, did.trim());
    args.extend(["--relay", &dead]);
    let output = place.run(&args);
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    for word in ["RELAY_UNREACHABLE", &dead, "check the relay's URL"] {
        assert!(said.contains(word), "{said}");
    }
    // A name of the mesh is nothing that a key's own office could look up.
    let output = place.run(&place.delegate(&key, "bob"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("BAD_INVITE") && said.contains("without --key"), "{said}");
    let output = place.run(&["task", "task_00000000000000000000000000", "--key", &key]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("UNKNOWN_TASK") && said.contains("commsd acp tasks"), "{said}");
    let code = |change: &[&str]| {
        let mut args = place.delegate(&key, did.trim());
        args.extend(change);
        place.run(&args).status.code()
    };
    assert_eq!(code(&["--relay", &dead, "--budget", "{"]), Some(2));
    assert_eq!(code(&["--to", did.trim(), "--relay", &dead]), Some(2));
    assert_eq!(code(&["--relay", "http://169.254.169.254/"]), Some(2));
    // A worker that is named by its did needs a relay.
    assert_eq!(place.run(&place.delegate(&key, did.trim())).status.code(), Some(2));
    assert_eq!(code(&["--relay", &dead, "--budget", "{\"foo\":1}"]), Some(2));
    assert_eq!(code(&["--relay", &dead, "--output-schema", "@/nonexistent"]), Some(2));
    let open = place.text("open.json");
    fs::copy(&key, &open).unwrap();
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(&open, fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(place.run(&["tasks", "--key", &open]).status.code(), Some(2));
    let tasks = place.json(&["tasks", "--key", &key]);
    assert_eq!(tasks["tasks"].as_array().map(Vec::len), Some(1));
}
