//! The binary and the portable runtime give the same answers and the same bytes.

use std::fs;

use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};

use crate::support::{Engine, Space, need_python};

/// Pages compared in one run of both engines; a Python process for each would take hours.
const PAGES: usize = 400;

/// Text made of what page parsers trip over. All code points are older than Unicode 13, because tables
/// differ later.
fn odd_text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        "[a-zA-Z ]{0,6}",
        prop::sample::select(vec![
            "---",
            "--- ",
            "----",
            "\n",
            "\r\n",
            "\r",
            "\u{2028}",
            "\u{85}",
            "\u{c}",
            "\u{1c}",
            "\u{1f}",
            "\u{a0}",
            "\u{feff}",
            "\u{200b}",
            ":",
            "#",
            "'",
            "''",
            "\"",
            "\\",
            "\\u00e9",
            "\\n",
            "\t",
            "[",
            "]",
            "- [[a]]: x",
            "<<<<<<<",
            "=======",
            ">>>>>>> b",
            "|||||||",
            "ß",
            "ς",
            "İ",
            "ſ",
            "ﬁ",
            "é",
            "e\u{301}",
            "👍",
            "deprecated",
            "DEPRECATED",
            "type",
            "stack",
            "status",
            "summary",
        ])
        .prop_map(str::to_owned),
    ];
    prop::collection::vec(piece, 0..6).prop_map(|pieces| pieces.concat())
}

/// A page that is nearly right.
fn page() -> impl Strategy<Value = String> {
    let value = prop_oneof![
        3 => "[a-z]{1,8}".prop_map(|text| format!(" {text}")),
        1 => odd_text(),
        1 => odd_text().prop_map(|text| format!(" \"{text}\"")),
        1 => odd_text().prop_map(|text| format!(" '{text}'")),
        1 => Just("\n  indented".to_owned()),
        1 => Just(" deprecated".to_owned()),
        1 => (158_usize..163).prop_map(|n| format!(" {}", "é".repeat(n))),
    ];
    let line = |key: &'static str| value.clone().prop_map(move |value| format!("{key}:{value}\n"));
    let lines = (
        line("type"),
        line("stack"),
        line("status"),
        line("summary"),
        prop_oneof![3 => Just(String::new()), 1 => odd_text().prop_map(|text| format!("{text}\n"))],
    );
    let ends = prop_oneof![4 => Just("\n"), 1 => Just("\r\n")];
    (lines, ends, odd_text(), prop::bool::weighted(0.1)).prop_map(
        |((a, b, c, d, extra), end, body, drop)| {
            let front =
                if drop { format!("{a}{b}{c}{extra}") } else { format!("{a}{b}{extra}{c}{d}") };
            format!("---\n{front}---\n\n{body}\n").replace('\n', end)
        },
    )
}

fn sample<T: std::fmt::Debug>(strategy: &impl Strategy<Value = T>, count: usize) -> Vec<T> {
    let mut runner = TestRunner::new(Config { failure_persistence: None, ..Config::default() });
    (0..count).map(|_| strategy.new_tree(&mut runner).unwrap().current()).collect()
}

fn both(space: &Space, args: &[&str], stdin: &[u8]) -> (Value, Value) {
    let run = |engine| {
        let answer = space.run_with(engine, args, stdin);
        match answer.code {
            Some(0) => answer.json(),
            _ => {
                answer.refusal();
                json!("refused")
            }
        }
    };
    (run(Engine::Native), run(Engine::Python))
}

/// Removes what is worded freely.
fn without_words(mut report: Value) -> Value {
    let health = &mut report["health"];
    for list in ["indexBuildErrors", "outdatedRuntime"] {
        health[list] = health[list].as_array().unwrap().len().into();
    }
    for part in ["stateFile", "marker", "projectRuntime"] {
        health[part]["error"] = health[part]["error"].is_null().into();
    }
    report
}

#[test]
fn random_pages_are_judged_alike() {
    need_python();
    let space = Space::new();
    let pages = sample(&page(), PAGES);
    for (at, text) in pages.iter().enumerate() {
        space.write(format!("EchoesVault/pages/p{at:04}.md"), text);
    }
    let (ours, theirs) = both(&space, &["inspect"], b"");
    assert_eq!(without_words(ours.clone()), without_words(theirs));
    let invalid: Vec<&str> = ours["health"]["invalidFrontmatter"]
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_str().unwrap())
        .collect();
    let valid = PAGES - invalid.len();
    assert!(valid > PAGES / 20 && invalid.len() > PAGES / 20, "{valid} valid pages say little");
    // What is left makes one index, whoever builds it.
    for stem in invalid {
        fs::remove_file(space.path(format!("EchoesVault/pages/{stem}.md"))).unwrap();
    }
    let ours = space.run_with(Engine::Native, &["rebuild-index"], b"").json();
    let index = fs::read(space.path("EchoesVault/index.md")).unwrap();
    fs::remove_file(space.path("EchoesVault/index.md")).unwrap();
    let theirs = space.run_with(Engine::Python, &["rebuild-index"], b"").json();
    assert_eq!(ours["sha256"], theirs["sha256"]);
    assert_eq!(fs::read(space.path("EchoesVault/index.md")).unwrap(), index);
    for query in ["e", "SS", "s", "ı", "=", "\u{e9}", "fi", "a b"] {
        let (ours, theirs) = both(&space, &["search", query, "--limit", "500"], b"");
        assert_eq!(ours, theirs, "{query:?}");
    }
    for at in (0..PAGES).step_by(100) {
        let (ours, theirs) = both(&space, &["hash", &format!("p{at:04}")], b"");
        assert_eq!(ours, theirs);
    }
}

#[test]
fn random_names_sort_and_collide_alike() {
    need_python();
    let letters = "[a-cA-CäÄßſsK\u{212a}ﬁfİıiΣςσéÉ가ᄀ\u{1161}Ａａ._ -]{1,6}";
    for round in 0..4 {
        let space = Space::new();
        let names = sample(&letters.prop_map(|name: String| name), 12 + 6 * round);
        for name in &names {
            let file = format!("EchoesVault/pages/{name}.md");
            space.write(file, crate::support::PAGE);
        }
        let (ours, theirs) = both(&space, &["inspect"], b"");
        assert_eq!(without_words(ours), without_words(theirs), "{names:?}");
        // One of each colliding pair, so that there is an index.
        let space = Space::new();
        for name in names.iter().take(10) {
            let payload = json!({"filename": name, "content": crate::support::PAGE}).to_string();
            let engine = if round % 2 == 0 { Engine::Native } else { Engine::Python };
            space.run_with(engine, &["upsert"], payload.as_bytes());
        }
        let (ours, theirs) = both(&space, &["inspect"], b"");
        assert_eq!(without_words(ours), without_words(theirs), "{names:?}");
    }
}

/// A step of a history.
fn step() -> impl Strategy<Value = (Vec<&'static str>, Value)> {
    let text = || prop_oneof![1 => page(), 1 => Just(crate::support::PAGE.to_owned())];
    let name =
        || prop::sample::select(vec!["a", "A", "b.md", "ß", "ss", "é", ".x", "", "c/d", "x.md.md"]);
    let one = || {
        (name(), text(), prop::option::of(odd_text())).prop_map(|(name, text, description)| {
            let mut page = json!({"filename": name, "content": text});
            if let Some(description) = description {
                page["indexDescription"] = description.into();
            }
            page
        })
    };
    let agent = || {
        prop::sample::select(vec![json!(null), json!("Ana B"), json!("é"), json!(5), json!(false)])
    };
    prop_oneof![
        3 => one().prop_map(|page| (vec!["upsert"], page)),
        1 => (odd_text(), agent()).prop_map(|(entry, agent)| {
            (vec!["append"], json!({"entry": entry, "agent": agent}))
        }),
        1 => (odd_text(), prop::collection::vec(one(), 0..3), agent()).prop_map(|(text, pages, agent)| {
            (
                vec!["end", "--confirm-explicit-user-end"],
                json!({"dailySummary": text, "pages": pages, "agent": agent}),
            )
        }),
        1 => Just((vec!["hydrate"], Value::Null)),
        1 => Just((vec!["configure-agents"], Value::Null)),
        1 => Just((vec!["upgrade"], Value::Null)),
    ]
}

/// Everything in a workspace that both engines must have made alike: entries' times and random parts
/// are cut off, and the state's times.
fn comparable(space: &Space) -> Vec<(String, String)> {
    let mut files: Vec<(String, String)> = space
        .snapshot()
        .into_iter()
        .map(|(path, (mode, content))| {
            let path = path.strip_prefix(&space.root).unwrap().to_str().unwrap().to_owned();
            let content = String::from_utf8(content).unwrap();
            match path.strip_prefix("EchoesVault/daily/") {
                Some(entry) if entry.contains('/') => {
                    let kind = entry.split_once("Z-").unwrap().1;
                    let kind = &kind[..kind.len() - "-00000000.md".len()];
                    let (heading, rest) = content.split_once(" — ").unwrap();
                    (format!("daily {kind}"), format!("{mode:o} {heading}{}", &rest[25..]))
                }
                _ if path == ".echoes-vault/state.json" => {
                    let mut state: Value = serde_json::from_str(&content).unwrap();
                    for time in ["lastStart", "lastSave"] {
                        state["session"][time] = state["session"][time].is_null().into();
                    }
                    (path, format!("{mode:o} {state}"))
                }
                _ => (path, format!("{mode:o} {content}")),
            }
        })
        .collect();
    files.sort();
    files
}

#[test]
fn random_histories_make_the_same_vault() {
    need_python();
    for _ in 0..3 {
        let history = sample(&step(), 10);
        let vaults = [Engine::Native, Engine::Python].map(|engine| {
            let space = Space::empty();
            space.run_with(engine, &["init"], b"").json();
            (engine, space)
        });
        for (args, payload) in &history {
            let codes = vaults.each_ref().map(|(engine, space)| {
                let mut payload = payload.clone();
                // The hash that an update needs, as a caller would have read it.
                let pages = match payload.get_mut("pages") {
                    Some(pages) => pages.as_array_mut().unwrap().iter_mut().collect(),
                    None => vec![&mut payload],
                };
                for page in pages.into_iter().filter(|page| page["filename"].is_string()) {
                    let name = page["filename"].as_str().unwrap().to_owned();
                    let hash = space.run_with(Engine::Native, &["hash", "--", &name], b"");
                    if hash.code == Some(0) {
                        page["expectedSha256"] = hash.json()["sha256"].clone();
                    }
                }
                let stdin = payload.to_string();
                space.run_with(*engine, args, stdin.as_bytes()).code
            });
            assert_eq!(codes[0], codes[1], "{args:?} {payload}");
            let [ours, theirs] = vaults.each_ref().map(|(_, space)| comparable(space));
            assert_eq!(ours, theirs, "after {args:?} {payload}");
        }
    }
}
