//! Round trips over many odd files: only our entry changes, and taking it out gives the bytes back.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::Value;

use super::edit::{EditError, Entry, Format};
use super::*;

fn entry(harness: &str) -> Entry {
    super::entry(Path::new("/opt/comm sd/commsd"), harness, &[]).unwrap()
}

fn inserted(format: Format, text: &str) -> String {
    format.insert(text, &format.render(text, &entry("x"))).unwrap()
}

/// What is in `new` and not in `old`, when that is one run of bytes or a comma and one.
fn is_old_with_additions(old: &str, new: &str) -> bool {
    let mut old = old.bytes().peekable();
    for byte in new.bytes() {
        if old.peek() == Some(&byte) {
            old.next();
        }
    }
    old.next().is_none()
}

const JSON: &[&str] = &[
    "",
    "\u{feff}",
    "\n",
    "// nothing yet",
    "{}",
    "{ }",
    "{\n}\n",
    "{/* a */}",
    "{\r\n}\r\n",
    "{\"a\": 1}",
    "{\"a\":1,\"b\":[1,2,],}",
    "\u{feff}{\r\n\t\"a\": 1 // one\r\n}",
    "{\n  // servers\n  \"mcpServers\": {\n    \"x\": {\"command\": \"y\"}, // last,\n  },\n  \"z\": 12345678901234567890123,\n}\n",
    "{\n  \"mcpServers\": {\n    \"x\": {\"command\": \"y\"} /* , */\n    // end\n  }\n}",
    "{\"mcpServers\": {}, \"mcp\": {}}",
    "{\n  \"mcpServers\": {\n  },\n  \"mcp\": { /* none */ }\n}\n",
    "{\n    \"projects\": {\"/p\": {\"mcpServers\": {\"agent-comms\": {\"command\": \"npx\"}}, \"mcp\": {\"agent-comms\": 1}}},\n    \"n\": 1e400, \"s\": \"\\u007b\\\"agent-comms\\\": }\"\n}\n",
    "{\"mcpServers\": {\"a\": {\"command\": \"b\"}}, \"mcp\": {\"a\": {\"command\": [\"b\"]}}}",
    "{\"a\": 1\n}\n",
    "{\n\t\"a\": {\n\t\t\"b\": true\n\t}\n}\n",
];

const TOML: &[&str] = &[
    "",
    "\u{feff}",
    "\n",
    "\n\n",
    "\r\n",
    "# agent-comms is not here",
    "model = \"o3\"",
    "model = \"o3\" # best\n",
    "model = \"o3\"\r\n\r\n[mcp_servers.x]\r\ncommand = \"npx\"\r\nargs = [\"agent-comms\", # why\r\n  ]\r\n",
    "[mcp_servers.x]\ncommand = \"y\"\n\n[mcp_servers.x.env]\nA = \"1\"\n\n\n",
    "[mcp_servers]\nx = { command = \"y\" }\n",
    "[mcp_servers]\nx.command = \"y\"\n\n[[other]]\nn = 9223372036854775807\n  # end",
    "\u{feff}[profiles.agent-comms]\nmcp_servers.agent-comms = 1\n",
    "text = \"\"\"\n[mcp_servers.agent-comms]\n\"\"\"\n",
];

fn samples() -> impl Iterator<Item = (Format, &'static str)> {
    let json = [Format::McpServers, Format::OpenCode].into_iter();
    json.flat_map(|format| JSON.iter().map(move |text| (format, *text)))
        .chain(TOML.iter().map(|text| (Format::Codex, *text)))
}

#[test]
fn round_trips_are_byte_identical() {
    for (format, text) in samples() {
        let new = inserted(format, text);
        assert_eq!(format.find(&new).unwrap(), Some(entry("x")), "{text}");
        assert!(is_old_with_additions(text, &new), "{text:?} -> {new:?}");
        assert_eq!(format.undo(&new, Some(text)).unwrap().as_deref(), Some(text), "{text:?}");
        if text.contains("\r\n") {
            assert_eq!(new.matches('\n').count(), new.matches("\r\n").count(), "{new:?}");
        }
    }
    for format in [Format::McpServers, Format::OpenCode, Format::Codex] {
        assert_eq!(format.undo(&inserted(format, ""), None).unwrap(), None);
    }
}

#[test]
fn what_others_write_in_between_stays() {
    let json = "{\n  \"a\": 1, // one\n  \"mcpServers\": {\n    \"x\": {}\n  }\n}\n";
    let changed =
        |text: &str| text.replace("// one", "/* two */").replace("\"x\": {}", "\"x\": []");
    let new = changed(&inserted(Format::McpServers, json));
    let undone = Format::McpServers.undo(&new, Some(json)).unwrap().unwrap();
    assert_eq!(undone, changed(json));
    // The container goes if there was none before, and stays if there was.
    let new = inserted(Format::McpServers, "{\n  \"a\": 1\n}\n").replace("\"a\": 1", "\"a\": 2");
    let undone = Format::McpServers.undo(&new, Some("{\n  \"a\": 1\n}\n")).unwrap().unwrap();
    assert_eq!(undone, "{\n  \"a\": 2\n}\n");
    let before = "{\"mcpServers\": {}, \"a\": 1}";
    let new = inserted(Format::McpServers, before).replace("\"a\": 1", "\"a\": 2");
    let undone = Format::McpServers.undo(&new, Some(before)).unwrap().unwrap();
    assert_eq!(undone, "{\"mcpServers\": {}, \"a\": 2}");
    // First and middle members.
    for (text, left) in [
        ("{\"mcpServers\": {\"agent-comms\": {}, \"x\": 1}}", "{\"mcpServers\": { \"x\": 1}}"),
        (
            "{\"mcpServers\": {\"w\": 0, \"agent-comms\": {}, \"x\": 1}}",
            "{\"mcpServers\": {\"w\": 0, \"x\": 1}}",
        ),
        ("{\"mcpServers\": {\"w\": 0, \"agent-comms\": {}}}", "{\"mcpServers\": {\"w\": 0}}"),
    ] {
        let undone = Format::McpServers.undo(text, Some("{\"mcpServers\": {}}")).unwrap().unwrap();
        assert_eq!(undone, left);
    }

    let toml = "a = 1\n\n[mcp_servers.x]\ncommand = \"y\"\n";
    let new = inserted(Format::Codex, toml).replace("a = 1", "a = 2 # two")
        + "startup_timeout_sec = 5 # ours\n\n# theirs\n[mcp_servers.agent-comms.env]\nA = \"1\"\n\n[z]\nb = 3\n";
    let undone = Format::Codex.undo(&new, Some(toml)).unwrap().unwrap();
    assert_eq!(
        undone,
        format!("{}\n# theirs\n\n[z]\nb = 3\n", toml.replace("a = 1", "a = 2 # two"))
    );
}

#[test]
fn another_server_of_the_name_comes_back() {
    for (format, text) in [
        (
            Format::McpServers,
            "{\"mcpServers\": {\"agent-comms\": {\"command\": \"npx\", \"env\": {\"A\": \"1\"}}}, \"a\": 1}",
        ),
        (
            Format::OpenCode,
            "{\"mcp\": {\"agent-comms\": {\"type\": \"remote\", \"url\": \"http://x\"}, }, \"a\": 1}\n",
        ),
        (
            Format::Codex,
            "a = 1\n[mcp_servers.agent-comms] # npm\ncommand = 'npx'\n\n[mcp_servers.agent-comms.env]\nA = \"1\"\n# end\n",
        ),
        (
            Format::Codex,
            "a = 1\n[mcp_servers]\nagent-comms = { command = 'npx', args = [\"agent-comms\"] }\n",
        ),
    ] {
        assert!(!format.find(text).unwrap().unwrap().is_ours());
        let new = format.put(text, &format.render(text, &entry("x"))).unwrap();
        assert_eq!(format.find(&new).unwrap(), Some(entry("x")), "{new}");
        assert_eq!(format.undo(&new, Some(text)).unwrap().as_deref(), Some(text));
        // Also when something else has changed.
        let other = |text: &str| text.replacen("a", "the_a", 1).replace("the_agent", "agent");
        let undone = format.undo(&other(&new), Some(text)).unwrap().unwrap();
        assert_eq!(format.find(&undone).unwrap(), format.find(text).unwrap());
        assert!(undone.contains("npx") || undone.contains("remote"));
    }
}

#[test]
fn only_the_program_is_set_anew() {
    let text = "{\"mcpServers\": {\"agent-comms\": {\"env\": {}, \"command\": \"commsd\", /*!*/ \"args\": [\"mcp\", \"--name\", \"ann\"]}}}";
    assert!(Format::McpServers.find(text).unwrap().unwrap().is_ours());
    assert_eq!(
        Format::McpServers.set_program(text, "/b/commsd").unwrap(),
        text.replace("\"commsd\"", "\"/b/commsd\"")
    );
    let text = "[mcp_servers.agent-comms]\nargs = ['mcp']\ncommand = 'commsd' # here\n";
    assert_eq!(
        Format::Codex.set_program(text, "/b/commsd").unwrap(),
        text.replace("'commsd'", "\"/b/commsd\"")
    );
    let text = "{\"mcp\": {\"agent-comms\": {\"command\": [ \"x/commsd\", \"mcp\"]}}}";
    assert_eq!(
        Format::OpenCode.set_program(text, "/b/commsd").unwrap(),
        text.replace("x/commsd", "/b/commsd")
    );
}

#[test]
fn what_cannot_be_read_or_edited_is_refused() {
    let deep = format!("{}{}", "{\"a\":".repeat(100_000), "}".repeat(100_000));
    for text in
        ["{", "[]", "1", "{\"a\": }", "{'a': 1}", "{a: 1}", "{} {}", "{\"a\" 1}", "nonsense", &deep]
    {
        let error = Format::McpServers.find(text).unwrap_err();
        assert!(matches!(error, EditError::Unreadable { .. }), "{text:.20}");
    }
    for text in [
        "{\"mcpServers\": []}",
        "{\"mcpServers\": null}",
        "{\"mcpServers\": {}, \"mcpServers\": {}}",
        "{\"mcpServers\": {\"agent-comms\": 1, \"agent\\u002dcomms\": 2}}",
    ] {
        let error = Format::McpServers.find(text).unwrap_err();
        assert!(matches!(error, EditError::Unusual(_)), "{text}");
    }
    let deep = format!("a = {}", "[".repeat(100_000));
    for text in ["a", "[a]\n[a]\n", "a = 1\na = 2\n", "a = 'x", &deep] {
        let error = Format::Codex.find(text).unwrap_err();
        assert!(matches!(error, EditError::Unreadable { .. }), "{text:.20}");
    }
    for text in ["mcp_servers = {}", "mcp_servers = 1", "[[mcp_servers]]"] {
        assert!(matches!(Format::Codex.find(text).unwrap_err(), EditError::Unusual(_)), "{text}");
    }
    let dotted =
        "mcp_servers.agent-comms.command = 'commsd'\nmcp_servers.agent-comms.args = ['mcp']\n";
    assert!(matches!(Format::Codex.undo(dotted, None).unwrap_err(), EditError::Unusual(_)));
}

#[test]
fn large_files_are_edited_in_place() {
    let many: Vec<String> = (0..50_000).map(|n| format!("    \"k{n}\": [{n}, \"é\"]")).collect();
    let text = format!("{{\n  \"history\": {{\n{}\n  }}\n}}\n", many.join(",\n"));
    let new = inserted(Format::McpServers, &text);
    assert_eq!(Format::McpServers.undo(&new, Some(&text)).unwrap().as_deref(), Some(&*text));
    assert!(new.len() - text.len() < 300);
}

/// JSON with blanks and comments between its tokens.
fn jsonc() -> impl Strategy<Value = String> {
    let gap =
        prop::sample::select(vec!["", " ", "\n", "\r\n", "\t", " // c {\n", "/* , } */", "\n    "]);
    let scalar = prop::sample::select(vec![
        "1",
        "-0.10e5",
        "99999999999999999999",
        "\"a\\\"b\"",
        "null",
        "\"agent-comms\"",
        "[]",
    ]);
    let leaf =
        (gap.clone(), scalar, gap.clone()).prop_map(|(a, value, b)| format!("{a}{value}{b}"));
    leaf.prop_recursive(4, 24, 4, move |inner| {
        let key = prop::sample::select(vec!["a", "b", "mcpServers", "mcp", "x", "é"]);
        let members = prop::collection::btree_map(key, inner, 0..4);
        (members, gap.clone(), gap.clone(), any::<bool>()).prop_map(|(members, a, b, trailing)| {
            let mut all: Vec<_> =
                members.iter().map(|(k, v)| format!("{a}\"{k}\"{b}:{v}")).collect();
            if trailing && !all.is_empty() {
                all.push(b.to_owned());
            }
            format!("{{{}{a}}}", all.join(","))
        })
    })
}

/// What the text says to a reader of JSON with comments.
fn said(text: &str) -> Value {
    fn value(ast: jsonc_parser::ast::Value<'_>) -> Value {
        use jsonc_parser::ast::Value as Ast;
        match ast {
            Ast::StringLit(lit) => Value::String(lit.value.into_owned()),
            Ast::NumberLit(lit) => Value::String(format!("#{}", lit.value)),
            Ast::BooleanLit(lit) => Value::Bool(lit.value),
            Ast::NullKeyword(_) => Value::Null,
            Ast::Array(array) => array.elements.into_iter().map(value).collect(),
            Ast::Object(object) => {
                let members = object.properties.into_iter();
                members.map(|member| (member.name.into_string(), value(member.value))).collect()
            }
        }
    }
    let parsed = jsonc_parser::parse_to_ast(text, &Default::default(), &Default::default());
    value(parsed.unwrap().value.unwrap())
}

/// Takes the entry out of what a text says.
fn without_entry(mut said: Value, drop_container: bool) -> Value {
    let root = said.as_object_mut().unwrap();
    let servers = root.get_mut("mcpServers").unwrap().as_object_mut().unwrap();
    servers.shift_remove("agent-comms").unwrap();
    if drop_container {
        assert!(servers.is_empty());
        root.shift_remove("mcpServers");
    }
    said
}

proptest! {
    #[test]
    fn in_any_json_only_the_entry_changes(text in jsonc(), touched in any::<bool>()) {
        let format = Format::McpServers;
        let Ok(found) = format.find(&text) else { return Ok(()) };
        prop_assume!(found.is_none());
        let new = inserted(format, &text);
        let had = said(&text);
        let drop_container = had.get("mcpServers").is_none();
        prop_assert_eq!(without_entry(said(&new), drop_container), had.clone());
        prop_assert!(is_old_with_additions(&text, &new));
        let back = format.undo(&new, Some(&text)).unwrap();
        prop_assert_eq!(back.as_deref(), Some(&*text));
        if touched {
            // Another program has written something at the end: the copy is not what is wanted.
            let touched = format!("{new}// touched");
            let back = format.undo(&touched, Some(&text)).unwrap().unwrap();
            prop_assert!(back.ends_with("// touched"));
            prop_assert_eq!(said(&back), had);
            prop_assert!(is_old_with_additions(&back, &touched));
        }
    }

    #[test]
    fn in_any_toml_only_the_entry_changes(
        lines in prop::collection::vec(prop::sample::select(vec![
            "", "# c", "  ", "[mcp_servers.x]", "[mcp_servers]", "[a.b]", "[[t]]", "k = 1",
            "k2 = \"\"\"\n[x]\n\"\"\"", "[mcp_servers.x.env]", "\"agent-comms\" = 2 # d", "d.e = [\n 1,\n]",
        ]), 0..10),
        crlf in any::<bool>(),
        ended in any::<bool>(),
    ) {
        let nl = if crlf { "\r\n" } else { "\n" };
        let mut text = lines.join("\n").replace('\n', nl);
        if ended { text += nl }
        let Ok(None) = Format::Codex.find(&text) else { return Ok(()) };
        let new = inserted(Format::Codex, &text);
        prop_assert!(new.starts_with(&text));
        let back = Format::Codex.undo(&new, Some(&text)).unwrap();
        prop_assert_eq!(back.as_deref(), Some(&*text));
        // Without the help of the copy too.
        let touched = format!("# touched{nl}{new}");
        let back = Format::Codex.undo(&touched, Some(&text)).unwrap().unwrap();
        prop_assert_eq!(back, format!("# touched{nl}{text}"));
    }
}

#[test]
fn places_follow_the_environment() {
    let home = tempfile::tempdir().unwrap();
    let files = |env: &BTreeMap<&str, &str>| -> Vec<PathBuf> {
        let all = harnesses(home.path(), |name| env.get(name).map(OsString::from));
        all.iter().filter_map(|harness| harness.file().cloned()).collect()
    };
    let at = |path: &str| home.path().join(path);
    let plain = [
        ".claude.json",
        ".codex/config.toml",
        ".config/opencode/opencode.json",
        ".pi/agent/extensions/commsd.ts",
    ]
    .map(at);
    assert_eq!(files(&BTreeMap::new()), plain);
    let env = BTreeMap::from([
        ("CLAUDE_CONFIG_DIR", "/c"),
        ("CODEX_HOME", "/x"),
        ("XDG_CONFIG_HOME", "/g"),
        ("PI_CODING_AGENT_DIR", "/p"),
    ]);
    let elsewhere = [
        "/c/.claude.json",
        "/x/config.toml",
        "/g/opencode/opencode.json",
        "/p/extensions/commsd.ts",
    ];
    assert_eq!(files(&env), elsewhere.map(PathBuf::from));
    let below_home = BTreeMap::from([("PI_CODING_AGENT_DIR", "~/p")]);
    assert_eq!(files(&below_home)[3], at("p/extensions/commsd.ts"));
    // Of two files of OpenCode, that which has the entry, or the one with comments.
    std::fs::create_dir_all(at(".config/opencode")).unwrap();
    std::fs::write(at(".config/opencode/opencode.jsonc"), "{}").unwrap();
    assert_eq!(files(&BTreeMap::new())[2], at(".config/opencode/opencode.jsonc"));
    std::fs::write(at(".config/opencode/opencode.json"), "{\"mcp\": {\"agent-comms\": {}}}")
        .unwrap();
    assert_eq!(files(&BTreeMap::new())[2], at(".config/opencode/opencode.json"));
}
