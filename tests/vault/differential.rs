//! Both engines do the same: random pages, names and histories give the same results, the same
//! refusals and the same bytes on disk.
//!
//! Characters are those that Unicode 13 knows, because the tables of binary and Python differ beyond
//! (`docs/decisions.md`, EchoesVault). The portable runtime runs in one process for all cases; the
//! binary is started for every command.

use std::cell::RefCell;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Map, Value, json};

use crate::support::{Answer, Engine, Space, need_python, runtime};

/// Histories that are compared, at some 100 ms each; `COMMSD_VAULT_HISTORIES` sets another number.
const CASES: u32 = 160;
/// What a refusal is described as.
const REFUSED: &str = "refused";
/// Commands of a history.
const STEPS: usize = 8;

/// Blocks to which nothing was added after Unicode 13, with everything that folds, composes or
/// separates in an unusual way.
const BLOCKS: [(u32, u32); 18] = [
    (0x00a0, 0x0377),
    (0x037a, 0x037f),
    (0x0384, 0x052f),
    (0x0900, 0x0977),
    (0x10a0, 0x10c5),
    (0x1100, 0x11ff),
    (0x13a0, 0x13f5),
    (0x1c90, 0x1cba),
    (0x1e00, 0x1fff),
    (0x2000, 0x206f),
    (0x2100, 0x218b),
    (0x2c80, 0x2cf3),
    (0x3000, 0x30ff),
    (0xab70, 0xabbf),
    (0xac00, 0xd7a3),
    (0xf900, 0xfaff),
    (0xfb00, 0xfb06),
    (0x10400, 0x1044f),
];

fn character() -> impl Strategy<Value = char> {
    let block = select(&BLOCKS[..]).prop_flat_map(|(first, last)| first..=last);
    prop_oneof![
        8 => proptest::char::range('a', 'f'),
        3 => proptest::char::range(' ', '~'),
        2 => select(&['\t', '\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1f}', '\u{85}', '\u{a0}', '\u{2028}',
                      '\u{3000}', '\u{feff}', '\u{200b}', '\0', '\u{7f}'][..]),
        2 => select(&['ß', 'ẞ', 'ſ', 'ς', 'Σ', 'İ', 'ı', 'K', 'Å', 'ﬁ', '\u{345}', '\u{301}', '\u{323}', 'é',
                      'Ꭰ', 'ꭰ', '가', 'ᄀ', 'ᅡ'][..]),
        3 => block.prop_filter_map("no character", char::from_u32),
    ]
}

fn text(most: usize) -> impl Strategy<Value = String> {
    proptest::collection::vec(character(), 0..=most).prop_map(String::from_iter)
}

/// Names that often mean the same page, or nearly.
fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        6 => select(&["a", "A", "a.md", "a.MD", "b", "b.md.md", "é", "e\u{301}", "ß", "ss", "K", "k", " a ", "a-b",
                      "İ", "i\u{307}"][..]).prop_map(str::to_owned),
        1 => select(&["", ".md", ".a", "a..b", "a/b", "a\\b", "..", "x]y", "a:b", "con", "a\nb"][..])
            .prop_map(str::to_owned),
        2 => text(6),
    ]
}

fn scalar() -> impl Strategy<Value = String> {
    const KNOWN: &[&str] = &[
        "note",
        "active",
        "deprecated",
        "Deprecated",
        "\"deprecated\"",
        "'it''s'",
        "''",
        "\"\"",
        "[]",
        "",
        "\"a\\u00e9\\n\"",
        "\"open",
        "'",
        "x # y",
        "- [[a]]: row",
        "- [[b]]:",
        "=======",
        "DEPRECATED: x",
    ];
    prop_oneof![6 => select(KNOWN).prop_map(str::to_owned), 2 => text(12), 1 => text(170)]
}

fn front_line() -> impl Strategy<Value = String> {
    const KEYS: &[&str] = &["type", "stack", "status", "summary", "extra", "Type", "a-b_c1"];
    const ODD: &[&str] = &[
        "",
        "  indented",
        "# comment",
        " # comment",
        "\t- x",
        "no key",
        "1x: y",
        "type : y",
        "<<<<<<< HEAD",
        "=======",
        ">>>>>>> x",
        "---",
        "----",
        "...",
    ];
    prop_oneof![
        6 => (select(KEYS), select(&[": ", ":", ":\t", ":  "][..]), scalar())
            .prop_map(|(key, colon, value)| format!("{key}{colon}{value}")),
        2 => select(ODD).prop_map(str::to_owned),
        1 => text(10),
    ]
}

/// A page: mostly valid, with something wrong or odd now and then.
fn page() -> impl Strategy<Value = String> {
    let valid = (scalar(), prop_oneof![Just("[]"), Just("\n  - x"), Just("")], scalar(), scalar())
        .prop_map(|(kind, stack, status, summary)| {
            vec![
                format!("type: {kind}"),
                format!("stack: {stack}"),
                format!("status: {status}"),
                format!("summary: {summary}"),
            ]
        });
    let plain = (text(20), any::<bool>()).prop_map(|(summary, old)| {
        let status = if old { "deprecated" } else { "active" };
        vec![
            "type: note".into(),
            "stack: []".into(),
            format!("status: {status}"),
            format!("summary: s{summary}"),
        ]
    });
    let bare = Just(vec!["type: note".into(), "stack: []".into(), "status: active".into()]);
    let front = prop_oneof![
        6 => plain,
        2 => bare,
        3 => valid,
        1 => proptest::collection::vec(front_line(), 0..6),
    ];
    let more = proptest::collection::vec((any::<Index>(), front_line()), 0..2);
    let around = select(&["", "", "", "\n", " \u{3000}\n", "\u{feff}"][..]);
    let end = select(&["\n", "\n", "\n", "\n", "\r\n", "\r", "\u{2028}", "\u{c}"][..]);
    let odd = prop_oneof![6 => Just(false), 1 => Just(true)];
    (front, more, text(30), around, end, odd).prop_map(
        |(mut front, more, body, around, end, odd)| {
            if odd {
                for (at, line) in more {
                    front.insert(at.index(front.len() + 1), line);
                }
            }
            format!("{around}---{end}{}{end}---{end}{end}# P{end}{body}", front.join(end))
        },
    )
}

fn agent() -> impl Strategy<Value = Option<String>> {
    prop_oneof![Just(None), Just(Some("codex".into())), text(45).prop_map(Some)]
}

/// An agent's name of which something is left. For one of which nothing is, `end` of the portable
/// runtime has already written the pages, as the reference has, and the binary has not.
fn usable_agent() -> impl Strategy<Value = Option<String>> {
    agent().prop_map(|agent| agent.map(|name| format!("x{name}")))
}

/// The hash that comes with a page.
#[derive(Clone, Copy, Debug)]
enum Hash {
    None,
    Current,
    Stale,
}

#[derive(Clone, Debug)]
struct Proposed {
    name: String,
    content: String,
    description: Option<String>,
    hash: Hash,
}

fn proposed() -> impl Strategy<Value = Proposed> {
    let hash = select(&[Hash::None, Hash::Current, Hash::Current, Hash::Current, Hash::Stale][..]);
    let description = prop_oneof![
        4 => Just(None),
        1 => text(20).prop_map(Some),
        1 => select(&["- [[a]]: Row.", "- [[b]]: Row.", "", "d"][..]).prop_map(|text| Some(text.to_owned())),
    ];
    (name(), page(), description, hash).prop_map(|(name, content, description, hash)| Proposed {
        name,
        content,
        description,
        hash,
    })
}

/// One step of a history.
#[derive(Clone, Debug)]
enum Step {
    Append(String, Option<String>),
    Upsert(Proposed),
    End(String, Vec<Proposed>, Option<String>),
    Hash(String),
    Search(String, i32),
    Plain(&'static [&'static str]),
    /// Written by hand, past both engines.
    File(&'static str, Vec<u8>),
    Page(&'static str, String),
    Payload(&'static str, String),
}

fn step() -> impl Strategy<Value = Step> {
    const PLAIN: [&[&str]; 9] = [
        &["inspect"],
        &["status", "--format", "card"],
        &["hydrate"],
        &["rebuild-index"],
        &["start", "--recent", "20"],
        &["--agent", "Óne twö", "--adapter-version", " 1", "start", "--recent= 1_0"],
        &["protocol"],
        &["migrate"],
        &["configure-agents"],
    ];
    let bytes = prop_oneof![
        3 => text(40).prop_map(String::into_bytes),
        1 => proptest::collection::vec(any::<u8>(), 0..20),
        2 => Just(b"- [[a]]: Old a.\n- [[b]]: Old b.\r\n- [[ss]]:\n".to_vec()),
        1 => Just(br#"{"initialized": 1, "session": {"started": [1.0, {}], "saved": 0}, "lastWriter": {"agent": ""}}"#.to_vec()),
        1 => Just(br#"{"schemaVersion": 2, "protocolVersion": "1.0.0"}"#.to_vec()),
    ];
    const FILES: &[&str] = &[
        "EchoesVault/index.md",
        "EchoesVault/daily/2020-02-02.md",
        "EchoesVault/daily/2020-02-02/é.md",
        "EchoesVault/assets/x",
        "EchoesVault/.gitignore",
        ".echoes-vault/state.json",
        ".opencode/echoes-state.json",
        "AGENTS.md",
        ".opencode/commands/echoes-end.md",
        "EchoesVault/.echoes-vault.json",
    ];
    const ON_DISK: &[&str] =
        &["a.md", "A.md", "é.md", "e\u{301}.md", ".h.md", "b.MD", "ß.md", "x]y.md", "c.txt"];
    let queries = prop_oneof![
        text(3),
        select(&["a", "SS", "ﬁ", "type:", "\u{301}", "s"][..]).prop_map(str::to_owned)
    ];
    prop_oneof![
        3 => (text(20), agent()).prop_map(|(entry, agent)| Step::Append(entry, agent)),
        8 => proposed().prop_map(Step::Upsert),
        3 => (text(20), proptest::collection::vec(proposed(), 0..3), usable_agent())
            .prop_map(|(summary, pages, agent)| Step::End(summary, pages, agent)),
        2 => name().prop_map(Step::Hash),
        3 => (queries, -1..600i32).prop_map(|(query, limit)| Step::Search(query, limit)),
        8 => select(&PLAIN[..]).prop_map(Step::Plain),
        2 => (select(FILES), bytes).prop_map(|(path, bytes)| Step::File(path, bytes)),
        3 => (select(ON_DISK), page()).prop_map(|(name, page)| Step::Page(name, page)),
        1 => (select(&["append", "upsert"][..]), select(&["", "{}", "[]", "{\"entry\": \"x\", \"y\": NaN}",
              "{\"entry\": \"x\", \"entry\": 1}", "{\"entry\": \"\\ud800\"}", "{\"entry\": \"x\",}", "\u{feff}{}",
              "{\"filename\": \"p\", \"content\": 3}"][..]))
            .prop_map(|(command, payload)| Step::Payload(command, payload.to_owned())),
    ]
}

/// A way to run a command in a workspace.
type Run<'a> = &'a mut dyn FnMut(&[&str], &str) -> Answer;

fn payload_page(page: &Proposed, run: Run<'_>) -> Value {
    let mut members = Map::new();
    members.insert("filename".into(), json!(page.name));
    members.insert("content".into(), json!(page.content));
    if let Some(description) = &page.description {
        members.insert("indexDescription".into(), json!(description));
    }
    match page.hash {
        Hash::None => {}
        Hash::Stale => drop(members.insert("expectedSha256".into(), json!("0".repeat(64)))),
        // No command line holds a NUL, and no page's name either.
        Hash::Current if page.name.contains('\0') => {}
        Hash::Current => {
            let found = run(&["hash", "--", &page.name], "");
            if found.code == Some(0) {
                members.insert("expectedSha256".into(), found.json()["sha256"].clone());
            }
        }
    }
    Value::Object(members)
}

/// Takes a step in one workspace and returns what is to be the same in the other.
fn take(step: &Step, workspace: &Path, run: Run<'_>) -> String {
    let write = |path: PathBuf, bytes: &[u8]| {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
        String::new()
    };
    let outcome = match step {
        Step::Append(entry, agent) => {
            run(&["append"], &json!({"entry": entry, "agent": agent}).to_string())
        }
        Step::Upsert(page) => {
            let payload = payload_page(page, run).to_string();
            run(&["upsert"], &payload)
        }
        Step::End(summary, pages, agent) => {
            let pages: Vec<Value> = pages.iter().map(|page| payload_page(page, run)).collect();
            let payload = json!({"dailySummary": summary, "pages": pages, "agent": agent});
            run(&["end", "--confirm-explicit-user-end"], &payload.to_string())
        }
        Step::Hash(name) if name.contains('\0') => return String::new(),
        Step::Hash(name) => run(&["hash", "--", name], ""),
        Step::Search(query, _) if query.contains('\0') => return String::new(),
        Step::Search(query, limit) => {
            run(&["search", "--limit", &limit.to_string(), "--", query], "")
        }
        Step::Plain(words) => run(words, ""),
        Step::Payload(command, payload) => run(&[command], payload),
        Step::File(path, bytes) => return write(workspace.join(path), bytes),
        Step::Page(name, page) => {
            return write(workspace.join("EchoesVault/pages").join(name), page.as_bytes());
        }
    };
    describe(&outcome, workspace)
}

/// The result, or that there was a refusal, without what is free: times and messages.
pub fn describe(answer: &Answer, workspace: &Path) -> String {
    if answer.code != Some(0) {
        answer.refusal();
        return REFUSED.into();
    }
    assert_eq!(answer.stderr, "", "{answer:?}");
    let masked = String::from_utf8(mask(answer.stdout.as_bytes(), workspace)).unwrap();
    match serde_json::from_str::<Value>(&masked) {
        Ok(mut value) => {
            hide_messages(&mut value);
            serde_json::to_string_pretty(&value).unwrap()
        }
        Err(_) => masked,
    }
}

fn hide_messages(value: &mut Value) {
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                match member {
                    Value::String(text) if name == "error" => "<MESSAGE>".clone_into(text),
                    Value::Array(list)
                        if name == "indexBuildErrors" || name == "outdatedRuntime" =>
                    {
                        list.fill("<MESSAGE>".into());
                    }
                    other => hide_messages(other),
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(hide_messages),
        _ => {}
    }
}

/// All that is in a workspace, fit for comparing.
pub fn contents(space: &Space) -> Vec<(String, u32, String)> {
    let show = |bytes: &[u8]| mask(bytes, &space.root).escape_ascii().to_string();
    let mut files: Vec<_> = space
        .snapshot()
        .into_iter()
        .map(|(path, (mode, content))| {
            let path =
                path.strip_prefix(&space.root).unwrap().as_os_str().as_encoded_bytes().to_vec();
            (show(&path), mode, show(&content))
        })
        .collect();
    files.sort();
    files
}

/// What is in the first list and not in the second.
fn without<'a, T: PartialEq>(all: &'a [T], others: &[T]) -> Vec<&'a T> {
    all.iter().filter(|one| !others.contains(one)).collect()
}

/// Copies a folder with all that is in it.
pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// `bytes` without what no two runs share: times, the names of fresh entries, the workspace's path.
fn mask(bytes: &[u8], workspace: &Path) -> Vec<u8> {
    let workspace = workspace.to_str().unwrap().as_bytes();
    let mut masked = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some((first, after)) = rest.split_first() {
        let found = [
            (rest.starts_with(workspace).then_some(workspace.len()), &b"<WS>"[..]),
            (fits(rest, b"0000-00-00/00000000T000000000000Z"), b"<DAY>/<UTC>Z"),
            (fits(rest, b"0000-00-00T00:00:00+00:00"), b"<TIME>"),
            (fits(rest, b"-########.md"), b"-<RANDOM>.md"),
        ];
        match found.iter().find_map(|(length, name)| length.map(|length| (length, name))) {
            Some((length, name)) => {
                masked.extend_from_slice(name);
                rest = &rest[length..];
            }
            None => {
                masked.push(*first);
                rest = after;
            }
        }
    }
    masked
}

/// The length of a template that `bytes` start with: `0` is any digit, `#` any hexadecimal one.
fn fits(bytes: &[u8], template: &[u8]) -> Option<usize> {
    let fit = bytes.len() >= template.len()
        && bytes.iter().zip(template).all(|(byte, wanted)| match wanted {
            b'0' => byte.is_ascii_digit(),
            b'#' => byte.is_ascii_digit() || (b'a'..=b'f').contains(byte),
            other => byte == other,
        });
    fit.then_some(template.len())
}

/// One Python process that runs many commands of the portable runtime.
pub struct Driver {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Driver {
    pub fn start(space: &Space) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vault/driver.py");
        let mut command = Command::new("python3");
        space.surround(&mut command);
        command.arg(script).arg(runtime()).stderr(Stdio::inherit());
        let mut child = command.spawn().unwrap();
        let requests = child.stdin.take().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        Self { child, requests, answers }
    }

    /// Runs a command as the workspace's own copy would.
    pub fn run(&mut self, workspace: &Path, words: &[&str], stdin: &str) -> Answer {
        let mut all = vec!["--workspace", workspace.to_str().unwrap()];
        all.extend(words);
        let file = workspace.join(".echoes-vault/echoes_vault.py");
        let request = json!({"words": all, "stdin": stdin, "file": file});
        writeln!(self.requests, "{request}").unwrap();
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        let answer: Value = serde_json::from_str(&line).expect("the driver ended");
        let text = |member: &str| answer[member].as_str().unwrap().to_owned();
        let code = answer["status"].as_i64().and_then(|code| i32::try_from(code).ok());
        Answer { code, stdout: text("out"), stderr: text("err") }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn init_installs_the_same_files() {
    need_python();
    let spaces = [Engine::Native, Engine::Python].map(|engine| {
        let space = Space::empty();
        space.write("AGENTS.md", "# Mine\n\n");
        space.write(".opencode/skills/echoes-search-vault-pages/SKILL.md", "Read-Before-Write");
        space.write(".opencode/skills/echoes-append-to-daily-log/SKILL.md", "mine");
        let answer = space.run_with(engine, &["--agent", "x", "init"], b"");
        (describe(&answer, &space.root), contents(&space))
    });
    assert_eq!(spaces[0], spaces[1]);
}

#[test]
fn histories_end_alike() {
    need_python();
    let fresh = Space::new();
    let driver = RefCell::new(Driver::start(&fresh));
    let asked = std::env::var("COMMSD_VAULT_HISTORIES").ok().and_then(|number| number.parse().ok());
    let config = Config {
        cases: asked.unwrap_or(CASES),
        failure_persistence: None,
        max_shrink_iters: 300,
        ..Config::default()
    };
    let histories = proptest::collection::vec(step(), 1..=STEPS);
    TestRunner::new(config)
        .run(&histories, |history| {
            let [one, other] = [Space::empty(), Space::empty()];
            copy(&fresh.root, &one.root);
            copy(&fresh.root, &other.root);
            for step in &history {
                let native =
                    take(step, &one.root, &mut |words, stdin| one.run(words, stdin.as_bytes()));
                let python = take(step, &other.root, &mut |words, stdin| {
                    driver.borrow_mut().run(&other.root, words, stdin)
                });
                prop_assert_eq!(&native, &python, "{:?}", step);
                if native == REFUSED
                    && matches!(step, Step::Plain(["migrate" | "configure-agents"]))
                {
                    // Here the portable runtime has installed adapters already, as the reference has.
                    return Ok(());
                }
                let (native, python) = (contents(&one), contents(&other));
                let (only_native, only_python) =
                    (without(&native, &python), without(&python, &native));
                prop_assert_eq!(only_native, only_python, "{:?}", step);
            }
            Ok(())
        })
        .unwrap();
}
