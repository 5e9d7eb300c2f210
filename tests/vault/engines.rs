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
        let letters = letters
            .prop_filter("what a suffix of dots alone is, is nobody's business", |name| {
                !name.starts_with('.') || name.contains(|c| c != '.')
            });
        let names = sample(&letters, 12 + 6 * round);
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
