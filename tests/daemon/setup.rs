//! `commsd setup` and `commsd service` in a home of their own: what they write, that they take back
//! exactly that, and what they leave alone.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::daemon::{Daemon, Ports};

const PROGRAM: &str = env!("CARGO_BIN_EXE_commsd");

/// A home directory, and nothing of the machine's environment.
struct Home {
    dir: tempfile::TempDir,
    path: String,
}

struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ran {
    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).expect(&self.stderr)
    }

    /// What is said of the only harness.
    fn line(&self) -> Value {
        let lines = self.json()["harnesses"].take();
        assert_eq!(lines.as_array().unwrap().len(), 1, "{lines}");
        lines[0].clone()
    }
}

impl Home {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = format!("{}/bin", dir.path().display());
        Self { dir, path }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    fn write(&self, path: &str, text: &str) -> PathBuf {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    fn run(&self, args: &[&str]) -> Ran {
        let output = Command::new(PROGRAM)
            .args(args)
            .env_clear()
            .env("HOME", self.dir.path())
            .env("XDG_RUNTIME_DIR", self.dir.path())
            .env("PATH", &self.path)
            .env("COMMSD_NO_BROADCAST", "1")
            .current_dir(self.dir.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Ran { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// Every file and link with what it says and its mode.
    fn snapshot(&self) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
        let mut all = BTreeMap::new();
        let mut dirs = vec![self.dir.path().to_owned()];
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                let meta = fs::symlink_metadata(&path).unwrap();
                let said = if meta.is_dir() {
                    dirs.push(path.clone());
                    continue;
                } else if meta.is_symlink() {
                    fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()
                } else {
                    fs::read(&path).unwrap()
                };
                all.insert(path, (meta.permissions().mode(), said));
            }
        }
        all
    }
}

/// D7: every harness, with files as people have them: setup, again, remove; and as it was.
#[test]
fn setup_and_remove_leave_every_byte_as_it_was() {
    let home = Home::new();
    let claude = "\u{feff}{\r\n  \"n\": 12345678901234567890123, // huge\r\n  \"projects\": {\"/p\": {\"mcpServers\": {}}},\r\n}";
    home.write("dotfiles/claude.json", claude);
    symlink("dotfiles/claude.json", home.at(".claude.json")).unwrap();
    let codex = home.write(
        ".codex/config.toml",
        "# mine\nmodel = \"o3\"\n\n[mcp_servers.npm]\ncommand = \"npx\" # agent-comms\n[z]\na = 1",
    );
    fs::set_permissions(&codex, fs::Permissions::from_mode(0o640)).unwrap();
    let opencode = home.write(
        ".config/opencode/opencode.jsonc",
        "{\n\t\"mcp\": {\n\t\t// others\n\t\t\"x\": {\"type\": \"remote\", \"url\": \"u\"},\n\t},\n}\n",
    );
    home.write(".pi/agent/settings.json", "{\"theme\": \"dark\"}");
    home.write(".pi/agent/extensions/mine.ts", "export default () => {};\n");
    let before = home.snapshot();

    let shown = home.run(&["setup", "--print"]);
    assert_eq!(shown.code, Some(0), "{}", shown.stderr);
    assert!(shown.stdout.contains("[mcp_servers.agent-comms]") && shown.stdout.contains(PROGRAM));
    assert_eq!(home.snapshot(), before);

    let ran = home.run(&["setup", "--json"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stdout);
    let lines = ran.json()["harnesses"].take();
    let states: Vec<_> = lines.as_array().unwrap().iter().map(|l| &l["state"]).collect();
    assert_eq!(states, ["set_up"; 4]);
    let text = fs::read_to_string(home.at(".claude.json")).unwrap();
    assert!(fs::symlink_metadata(home.at(".claude.json")).unwrap().is_symlink());
    assert!(text.starts_with("\u{feff}{\r\n  \"n\": 12345678901234567890123, // huge\r\n"));
    assert!(text.contains(&format!(
        "\"agent-comms\": {{\"type\":\"stdio\",\"command\":\"{PROGRAM}\",\"args\":[\"mcp\",\"--harness\",\"claude-code\"]}}"
    )));
    let text: toml::Table = fs::read_to_string(&codex).unwrap().parse().unwrap();
    let entry = &text["mcp_servers"]["agent-comms"];
    assert_eq!(entry["command"].as_str(), Some(PROGRAM));
    assert_eq!(entry["args"].as_array().unwrap().len(), 3);
    assert_eq!(text["mcp_servers"]["npm"]["command"].as_str(), Some("npx"));
    assert_eq!(fs::metadata(&codex).unwrap().permissions().mode() & 0o777, 0o640);
    let text = fs::read_to_string(&opencode).unwrap();
    assert!(text.contains(&format!(
        "\t\t\"agent-comms\": {{\"type\":\"local\",\"command\":[\"{PROGRAM}\",\"mcp\",\"--harness\",\"opencode\"],\"enabled\":true}},\n\t}},\n}}\n"
    )), "{text}");
    // OpenCode has a file that brings messages, too.
    let plugin = home.at(".config/opencode/plugin/commsd.js");
    assert_eq!(lines[2]["plugin"], plugin.display().to_string());
    let text = fs::read_to_string(&plugin).unwrap();
    let command = format!("[\"{PROGRAM}\",\"hook\",\"--harness\",\"opencode\"]");
    assert!(text.contains(&command), "{text}");
    // pi has nothing else.
    let extension = home.at(".pi/agent/extensions/commsd.ts");
    assert_eq!(lines[3]["file"], extension.display().to_string());
    let text = fs::read_to_string(&extension).unwrap();
    assert!(text.contains(&format!("[\"{PROGRAM}\",\"mcp\",\"--harness\",\"pi\"]")), "{text}");
    // The copies are what was there.
    let copies = home.snapshot();
    for (file, backup) in [
        ("dotfiles/claude.json", "dotfiles/claude.json.before-commsd"),
        (".codex/config.toml", ".codex/config.toml.before-commsd"),
    ] {
        assert_eq!(copies[&home.at(backup)], before[&home.at(file)], "{backup}");
    }

    // Twice is once (D8: the target is there).
    let ran = home.run(&["setup", "--json"]);
    assert_eq!(ran.json()["harnesses"][1]["state"], "unchanged");
    assert_eq!(home.snapshot(), copies);
    let status = home.run(&["setup", "--status", "--json"]);
    assert_eq!(status.code, Some(0));
    for line in status.json()["harnesses"].as_array().unwrap() {
        assert_eq!((&line["state"], &line["programExists"]), (&json!("set_up"), &json!(true)));
    }

    let ran = home.run(&["setup", "--remove"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stdout);
    assert_eq!(home.snapshot(), before);
    assert_eq!(home.run(&["setup", "--remove", "codex", "--json"]).line()["state"], "not_set_up");
}

#[test]
fn a_projects_files_are_set_up_for_everybody_and_taken_back() {
    let home = Home::new();
    for dir in [".claude", ".codex", ".config/opencode", ".pi/agent", "bin", "p"] {
        fs::create_dir_all(home.at(dir)).unwrap();
    }
    // What the umask of whoever runs this makes of a new file.
    fs::write(home.at("new"), "").unwrap();
    let usual = fs::metadata(home.at("new")).unwrap().permissions().mode() & 0o777;
    symlink(PROGRAM, home.at("bin/commsd")).unwrap();
    let claude =
        home.write("p/.mcp.json", "{\n  \"mcpServers\": {\"x\": {\"command\": \"y\"}}\n}\n");
    let before = home.snapshot();
    let missing = home.run(&["setup", "--project", "nowhere", "--json"]);
    assert_eq!(missing.code, Some(1));
    assert!(missing.stderr.contains("no_project"), "{}", missing.stderr);

    let ran = home.run(&["setup", "--project", "p", "--json"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stdout);
    let lines = ran.json()["harnesses"].take();
    let files: Vec<_> =
        lines.as_array().unwrap().iter().map(|l| l["file"].as_str().unwrap()).collect();
    let expected = ["p/.mcp.json", "p/.codex/config.toml", "p/opencode.json"];
    assert_eq!(files, expected.map(|file| home.at(file).display().to_string()));
    // The program is found by its name on every machine; nothing of this one is in there.
    for file in expected {
        let text = fs::read_to_string(home.at(file)).unwrap();
        assert!(text.contains("\"commsd\"") && !text.contains(PROGRAM), "{text}");
        assert_eq!(fs::metadata(home.at(file)).unwrap().permissions().mode() & 0o777, usual);
    }
    // So is the folder, as this test has made the project's.
    let folder = |path| fs::metadata(home.at(path)).unwrap().permissions().mode();
    assert_eq!(folder("p/.codex"), folder("p"));
    assert!(fs::read_to_string(&claude).unwrap().contains("{\"command\": \"y\"}"));
    assert!(!home.at("p/.opencode").exists());
    assert!(!home.at(".claude.json").exists() && !home.at(".config/opencode/plugin").exists());
    let again = home.run(&["setup", "--project", "p", "codex", "--json"]);
    assert_eq!(again.line()["state"], "unchanged");
    let status = home.run(&["setup", "--project", "p", "--status", "claude-code", "--json"]);
    assert_eq!(status.line()["programExists"], true);

    assert_eq!(home.run(&["setup", "--project", "p", "--remove"]).code, Some(0));
    assert_eq!(home.snapshot(), before);
    assert!(!home.at("p/.codex").exists(), "a folder is left over");
    // One that has something else in it stays, and so does the project's own.
    home.write("p/.codex/notes", "mine");
    fs::create_dir(home.at("q")).unwrap();
    for dir in ["p", "q"] {
        assert_eq!(home.run(&["setup", "--project", dir]).code, Some(0));
        assert_eq!(home.run(&["setup", "--project", dir, "--remove"]).code, Some(0));
    }
    assert!(home.at("p/.codex/notes").exists());
    assert_eq!(fs::read_dir(home.at("q")).unwrap().count(), 0);
    // Not on PATH, it is named by where it is.
    fs::remove_file(home.at("bin/commsd")).unwrap();
    home.run(&["setup", "--project", "p", "codex"]);
    assert!(fs::read_to_string(home.at("p/.codex/config.toml")).unwrap().contains(PROGRAM));
}

#[test]
fn pis_extension_is_all_that_pi_gets_and_status_tells_how_it_stands() {
    let home = Home::new();
    let at_socket = |args: &[&str]| home.run(&[&["--socket", "/run/x.sock"], args].concat());
    let state = |ran: &Ran| ran.line()["state"].as_str().unwrap().to_owned();
    assert_eq!(state(&home.run(&["setup", "pi", "--status", "--json"])), "not_set_up");
    let shown = at_socket(&["setup", "pi", "--print", "--json"]);
    let command = json!([PROGRAM, "mcp", "--harness", "pi", "--socket", "/run/x.sock"]);
    assert_eq!(shown.line()["entry"], command.to_string());
    assert_eq!(home.snapshot(), BTreeMap::new());

    assert_eq!(state(&at_socket(&["setup", "pi", "--json"])), "set_up");
    let file = home.at(".pi/agent/extensions/commsd.ts");
    assert_eq!(home.snapshot().keys().collect::<Vec<_>>(), [&file]);
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains(&format!("const COMMAND = {command};")), "{text}");
    assert_eq!(state(&at_socket(&["setup", "pi", "--json"])), "unchanged");
    assert_eq!(state(&home.run(&["setup", "pi", "--json"])), "updated");
    let line = home.run(&["setup", "pi", "--status", "--json"]).line();
    assert_eq!((&line["state"], &line["programExists"]), (&json!("set_up"), &json!(true)));
    assert_eq!((&line["installed"], &line["program"]), (&json!(true), &json!(PROGRAM)));

    // What somebody has changed stays, and is told; so is a program that is gone (D8).
    let changed = fs::read_to_string(&file).unwrap().replace(PROGRAM, "/gone/commsd");
    fs::write(&file, &changed).unwrap();
    let ran = home.run(&["setup", "pi", "--status", "--json"]);
    assert_eq!((ran.code, state(&ran)), (Some(1), "changed".to_owned()));
    assert_eq!(ran.line()["programExists"], false);
    for args in [&["setup", "--json"][..], &["setup", "--remove", "pi", "--json"]] {
        let ran = home.run(args);
        assert_eq!((ran.code, state(&ran)), (Some(1), "changed".to_owned()));
        assert_eq!(ran.line()["error"]["code"], "plugin_changed");
        assert_eq!(fs::read_to_string(&file).unwrap(), changed);
    }
    fs::write(&file, text).unwrap();
    assert_eq!(state(&home.run(&["setup", "pi", "--remove", "--json"])), "removed");
    assert_eq!(home.snapshot(), BTreeMap::new());
    // A program of ours in a project would be everybody's: there it is for its owner to put in.
    fs::create_dir(home.at("p")).unwrap();
    let refused = home.run(&["setup", "--project", "p", "pi", "--json"]);
    assert_eq!(refused.code, Some(2));
    assert!(
        refused.stderr.contains("harness_unknown") && refused.stderr.contains("commsd setup pi")
    );
    assert_eq!(home.snapshot(), BTreeMap::new());
}

#[test]
fn a_plugin_file_that_somebody_has_changed_stays_and_is_told() {
    let home = Home::new();
    fs::create_dir_all(home.at(".config/opencode")).unwrap();
    assert_eq!(home.run(&["setup"]).code, Some(0));
    let plugin = home.at(".config/opencode/plugin/commsd.js");
    let changed = fs::read_to_string(&plugin).unwrap() + "// mine\n";
    fs::write(&plugin, &changed).unwrap();
    for args in [&["setup", "--json"][..], &["setup", "--remove", "opencode", "--json"]] {
        let ran = home.run(args);
        assert_eq!((ran.code, &ran.line()["error"]["code"]), (Some(1), &json!("plugin_changed")));
        assert_eq!(fs::read_to_string(&plugin).unwrap(), changed);
    }
    assert!(!home.at(".config/opencode/opencode.json").exists(), "the entry has gone all the same");
}

/// The file for OpenCode, run by Node in OpenCode's place with a hook of which all is known.
#[test]
fn opencodes_plugin_brings_what_the_hook_has_and_wakes_a_session() {
    if Command::new("node").arg("--version").output().is_err() {
        crate::limits::skipped("there is no node here");
        return;
    }
    let home = Home::new();
    fs::create_dir_all(home.at(".config/opencode")).unwrap();
    home.run(&["setup"]);
    let stub = home.write(
        "stub",
        concat!(
            "#!/bin/sh\n",
            "read -r told\n",
            "echo \"$* $told\" >> \"$0.log\"\n",
            "case \"$* $told\" in\n",
            "*--wait*) echo '📬 a message' >&2; exit 2;;\n",
            "*PostToolUse*) echo '{\"decision\": \"block\", \"reason\": \"urgent\"}';;\n",
            "*'\"stop_hook_active\":false'*) echo '{\"decision\": \"block\", \"reason\": \"go on\"}';;\n",
            "esac\n",
        ),
    );
    fs::set_permissions(&stub, fs::Permissions::from_mode(0o755)).unwrap();
    let text = fs::read_to_string(home.at(".config/opencode/plugin/commsd.js")).unwrap();
    let stubbed = text.replace(PROGRAM, &stub.display().to_string());
    let plugin = home.write("plugin.mjs", &stubbed);
    let driver = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sdk/opencode.mjs");
    let output = Command::new("node").arg(driver).arg(&plugin).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let seen: Value = serde_json::from_slice(&output.stdout).expect(&said);
    let part = |text: &str| json!([{"type": "text", "text": text}]);
    assert_eq!(
        seen,
        json!({
            "exports": 1,
            "text": {"title": "t", "output": "done\n\nurgent", "metadata": {}},
            "parts": {"content": [part("done")[0], part("urgent")[0]]},
            "helper": {"output": "done"},
            "prompts": [["main", part("go on")], ["main", part("📬 a message")]],
        })
    );
    let log = fs::read_to_string(home.at("stub.log")).unwrap();
    let calls: Vec<_> = log.lines().collect();
    assert_eq!(calls.len(), 5, "{log}");
    assert!(calls.iter().all(|call| call.starts_with("hook --harness opencode")), "{log}");
    assert!(calls[3].contains("\"stop_hook_active\":true"), "{log}");
}

/// A command that fails as a usage error does has brought nothing, and is not asked for ever.
#[test]
fn opencodes_plugin_takes_no_failure_for_a_message() {
    if Command::new("node").arg("--version").output().is_err() {
        crate::limits::skipped("there is no node here");
        return;
    }
    let home = Home::new();
    fs::create_dir_all(home.at(".config/opencode")).unwrap();
    home.run(&["setup"]);
    let stub = home
        .write("stub", "#!/bin/sh\necho \"$*\" >> \"$0.log\"\necho 'usage: wrong' >&2\nexit 2\n");
    fs::set_permissions(&stub, fs::Permissions::from_mode(0o755)).unwrap();
    let text = fs::read_to_string(home.at(".config/opencode/plugin/commsd.js")).unwrap();
    let stubbed = text
        .replace(PROGRAM, &stub.display().to_string())
        .replace("const PAUSE_MS = 5_000;", "const PAUSE_MS = 1;");
    assert!(stubbed.contains("PAUSE_MS = 1;"));
    let plugin = home.write("plugin.mjs", &stubbed);
    let driver = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sdk/opencode.mjs");
    let log = home.at("stub.log");
    let output = Command::new("node").arg(driver).arg(&plugin).arg(&log).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let seen: Value = serde_json::from_slice(&output.stdout).expect(&said);
    assert_eq!(seen, json!({"prompts": []}));
    let log = fs::read_to_string(log).unwrap();
    let waits = log.lines().filter(|call| call.contains("--wait")).count();
    assert_eq!((waits, log.lines().count()), (5, 9), "{log}");
}

/// What a repository's links lead to is not part of it.
#[test]
fn a_projects_link_to_elsewhere_is_refused() {
    let home = Home::new();
    for dir in [".claude", "p"] {
        fs::create_dir_all(home.at(dir)).unwrap();
    }
    home.write("elsewhere.json", "{}\n");
    symlink("../elsewhere.json", home.at("p/.mcp.json")).unwrap();
    let before = home.snapshot();
    for what in [&[][..], &["--remove"], &["--status"]] {
        let ran = home.run(&[&["setup", "--project", "p", "claude-code", "--json"], what].concat());
        assert_eq!(ran.code, Some(1), "{what:?}: {}", ran.stdout);
        let error = ran.line()["error"].take();
        assert_eq!(error["code"], "file_outside", "{error}");
        assert!(error["todo"].as_str().unwrap().contains("in the place of the link"), "{error}");
    }
    assert_eq!(home.snapshot(), before);
}

/// Claude Code keeps what was typed in its file, also half an emoji.
#[test]
fn half_a_character_is_no_reason_to_leave_a_file() {
    let home = Home::new();
    fs::create_dir_all(home.at(".claude")).unwrap();
    let history =
        r#"{"history": ["\ud800", "\\ud800", "\ud83d\ude00", "\udc00\ud83d x"], "a\ud83d": 1}"#;
    let file = home.write(".claude.json", history);
    let before = home.snapshot();
    let ran = home.run(&["setup", "claude-code", "--json"]);
    assert_eq!((ran.code, &ran.line()["state"]), (Some(0), &json!("set_up")), "{}", ran.stdout);
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.starts_with(history.strip_suffix('}').unwrap()), "{text}");
    assert!(text.contains("\"agent-comms\""), "{text}");
    assert_eq!(home.run(&["setup", "claude-code", "--remove"]).code, Some(0));
    assert_eq!(home.snapshot(), before);
}

#[test]
fn files_that_were_not_there_are_gone_again() {
    let home = Home::new();
    assert_eq!(home.run(&["setup"]).code, Some(1));
    fs::create_dir_all(home.at(".codex")).unwrap();
    let ran = home.run(&["setup", "--json"]);
    assert_eq!((ran.code, ran.line()["harness"].clone()), (Some(0), json!("codex")));
    assert_eq!(home.run(&["setup", "claude"]).code, Some(0));
    assert_eq!(home.run(&["setup", "opencode"]).code, Some(0));
    let written = home.snapshot();
    assert_eq!(written.len(), 4);
    assert!(written.values().all(|(mode, _)| mode & 0o777 == 0o600));
    assert_eq!(home.run(&["setup", "--remove"]).code, Some(0));
    assert_eq!(home.snapshot(), BTreeMap::new());
}

#[test]
fn the_plugin_for_claude_code_is_written_and_taken_back_whole() {
    let home = Home::new();
    let plugin = home.at("it's a plugin");
    let dir = plugin.to_str().unwrap();
    let shown = home.run(&["setup", "--plugin", dir, "--dry-run"]);
    assert_eq!(shown.code, Some(0), "{}", shown.stderr);
    assert!(home.snapshot().is_empty(), "nothing is written");
    let ran = home.run(&["setup", "--plugin", dir, "--json"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert_eq!(ran.json()["state"], "written");
    let read = |place: &str| -> Value {
        serde_json::from_slice(&fs::read(plugin.join(place)).unwrap()).unwrap()
    };
    let manifest = read(".claude-plugin/plugin.json");
    let server = &manifest["mcpServers"]["agent-comms"];
    assert_eq!(server["command"], PROGRAM);
    assert_eq!(server["args"], json!(["mcp", "--harness", "claude-code"]));
    assert_eq!(read(".claude-plugin/marketplace.json")["plugins"][0]["source"], "./");
    let hooks = read("hooks/hooks.json")["hooks"].take();
    for name in ["PostToolUse", "SessionStart", "Stop", "UserPromptSubmit"] {
        let hook = &hooks[name][0]["hooks"][0];
        assert_eq!(hook["command"], format!("{PROGRAM} hook --harness claude-code"), "{name}");
    }
    // One waits in the background, and may take as long as it waits.
    let wake = &hooks["Stop"][0]["hooks"][1];
    assert_eq!(wake["asyncRewake"], true);
    let secs = wake["command"].as_str().unwrap().rsplit(' ').next().unwrap();
    assert!(wake["timeout"].as_u64().unwrap() > secs.parse().unwrap());
    // What the hooks run is a command line that this program takes.
    let words = hooks["Stop"][0]["hooks"][1]["command"].as_str().unwrap().split(' ');
    let args: Vec<&str> = words.skip(1).collect();
    assert_eq!(home.run(&args).code, Some(0));
    assert_eq!(fs::read_dir(plugin.join("commands")).unwrap().count(), 11);

    assert_eq!(home.run(&["setup", "--plugin", dir, "--json"]).json()["state"], "unchanged");
    fs::write(plugin.join("commands/mine.md"), "mine").unwrap();
    fs::write(plugin.join("commands/dm.md"), "changed").unwrap();
    let ran = home.run(&["setup", "--plugin", dir, "--remove", "--json"]);
    assert_eq!((ran.code, ran.json()["state"].clone()), (Some(0), json!("removed")));
    let left: Vec<PathBuf> = home.snapshot().into_keys().collect();
    assert_eq!(left, [plugin.join("commands/dm.md"), plugin.join("commands/mine.md")]);
    // A folder with other things in it is not ours; nor are two servers for one session.
    let ran = home.run(&["setup", "--plugin", dir, "--json"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("plugin_foreign"), "{}", ran.stderr);
    assert_eq!(home.run(&["setup", "claude"]).code, Some(0));
    let ran = home.run(&["setup", "--plugin", home.at("p").to_str().unwrap(), "--json"]);
    assert!(ran.stderr.contains("config_both"), "{}", ran.stderr);
    assert!(!home.at("p").exists());
}

/// D6: what cannot be parsed is never overwritten.
#[test]
fn what_cannot_be_parsed_is_refused_and_the_others_are_done() {
    let home = Home::new();
    home.write(".claude.json", "{\"mcpServers\": {\"x\": ");
    home.write(".codex/config.toml", "a = 1\n");
    let claude = fs::read(home.at(".claude.json")).unwrap();
    let ran = home.run(&["setup", "--json"]);
    assert_eq!(ran.code, Some(1));
    let lines = ran.json()["harnesses"].take();
    assert_eq!((&lines[0]["state"], &lines[1]["state"]), (&json!("refused"), &json!("set_up")));
    assert_eq!(lines[0]["error"]["code"], "config_unreadable");
    assert_eq!(fs::read(home.at(".claude.json")).unwrap(), claude);
    assert!(!home.at(".claude.json.before-commsd").exists());
    // Read-only is meant so, for root too.
    home.write(".codex/config.toml", "a = 2\n");
    fs::set_permissions(home.at(".codex/config.toml"), fs::Permissions::from_mode(0o444)).unwrap();
    let before = home.snapshot();
    let line = home.run(&["setup", "codex", "--json"]).line();
    assert_eq!(line["error"]["code"], "file_read_only");
    assert_eq!(home.snapshot(), before);
}

#[test]
fn another_server_of_the_name_is_replaced_only_when_asked_and_comes_back() {
    let home = Home::new();
    let text = "[mcp_servers.agent-comms]\ncommand = \"npx\"\nargs = [\"agent-comms\", \"bridge\", \"codex\"]\n";
    let file = home.write(".codex/config.toml", text);
    let before = home.snapshot();
    let ran = home.run(&["setup", "codex", "--json"]);
    assert_eq!(ran.code, Some(1));
    assert_eq!(ran.line()["error"]["code"], "config_foreign");
    // It is not commsd's to remove either.
    assert_eq!(home.run(&["setup", "--remove", "codex", "--json"]).line()["state"], "foreign");
    assert_eq!(home.snapshot(), before);
    assert_eq!(home.run(&["setup", "codex", "--replace", "--json"]).line()["state"], "replaced");
    assert!(!fs::read_to_string(&file).unwrap().contains("npx"));
    let changed = format!("model = \"o4\"\n{}", fs::read_to_string(&file).unwrap());
    fs::write(&file, &changed).unwrap();
    assert_eq!(home.run(&["setup", "--remove", "codex"]).code, Some(0));
    assert_eq!(fs::read_to_string(&file).unwrap(), format!("model = \"o4\"\n{text}"));
}

/// D8: an entry whose program is gone is told, and mended with all that its owner added.
#[test]
fn an_entry_for_a_program_that_is_gone_is_told_and_mended() {
    let home = Home::new();
    let text = "[mcp_servers.agent-comms]\ncommand = \"/gone/commsd\"\nargs = [\"mcp\", \"--name\", \"ann\"]\nenv = { A = \"1\" }\n";
    let file = home.write(".codex/config.toml", text);
    let ran = home.run(&["setup", "--status", "codex", "--json"]);
    assert_eq!((ran.code, &ran.line()["programExists"]), (Some(1), &json!(false)));
    // The program is named by the link on PATH, which lasts.
    fs::create_dir(home.at("bin")).unwrap();
    symlink(PROGRAM, home.at("bin/commsd")).unwrap();
    assert_eq!(home.run(&["setup", "codex", "--json"]).line()["state"], "updated");
    let link = home.at("bin/commsd").display().to_string();
    assert_eq!(fs::read_to_string(&file).unwrap(), text.replace("/gone/commsd", &link));
}

/// D9: whatever the harness, it gets the server with the whole tool.
#[test]
fn any_other_harness_gets_the_lines_to_put_in() {
    let home = Home::new();
    let ran = home.run(&["--home", "elsewhere", "setup", "zed", "--by-hand", "--json"]);
    assert_eq!(ran.code, Some(0));
    let line = ran.line();
    let entry: Value = serde_json::from_str(line["entry"].as_str().unwrap()).unwrap();
    let server = &entry["mcpServers"]["agent-comms"];
    assert_eq!(server["command"], PROGRAM);
    let elsewhere = fs::canonicalize(home.dir.path()).unwrap().join("elsewhere");
    assert_eq!(server["args"], json!(["mcp", "--harness", "zed", "--home", elsewhere]));
    // A name that is only misspelt gets no such lines.
    for args in [
        &["setup", "claud-code"][..],
        &["setup", "opncode", "--print"],
        &["setup", "cdx", "--remove"],
    ] {
        let ran = home.run(args);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{}", ran.stderr);
        for word in ["claude-code, codex, opencode and pi", "--by-hand"] {
            assert!(ran.stderr.contains(word), "{}", ran.stderr);
        }
    }
    assert_eq!(home.run(&["setup", "codex", "--by-hand"]).code, Some(2));
    assert_eq!(home.snapshot(), BTreeMap::new());
}

#[test]
fn what_is_said_fits_what_was_asked() {
    let home = Home::new();
    fs::create_dir_all(home.at(".config/opencode")).unwrap();
    let said = |args: &[&str]| home.run(&[&["setup", "opencode"], args].concat()).stdout;
    let (later, brings) = ("sessions that are started from now on", "messages are brought by");
    let text = said(&["--print"]);
    assert!(
        text.contains("to be set up") && text.contains("messages would be brought by"),
        "{text}"
    );
    assert!(said(&[]).contains(later));
    let text = said(&["--status"]);
    assert!(text.contains(brings) && !text.contains(later), "{text}");
    let text = said(&["--remove", "--print"]);
    assert!(text.contains("to be removed") && text.contains("would go too"), "{text}");
    let text = said(&["--remove"]);
    assert!(text.contains("its plugin file is gone too") && !text.contains(brings), "{text}");
}

/// A service manager that notes what it is asked, and tells what `state` says.
fn stub_systemctl(home: &Home) {
    let stub = home.write(
        "bin/systemctl",
        "#!/bin/sh\necho \"$*\" >> \"$HOME/asked\"\ncase \"$2\" in show) cat \"$HOME/state\";; esac\n",
    );
    fs::set_permissions(stub, fs::Permissions::from_mode(0o755)).unwrap();
    tell(home, "disabled", "inactive", 0);
}

fn tell(home: &Home, enabled: &str, active: &str, pid: u32) {
    home.write("state", &format!("UnitFileState={enabled}\nActiveState={active}\nMainPID={pid}\n"));
}

/// What the manager was asked to change since the last look.
fn asked(home: &Home) -> Vec<String> {
    let text = fs::read_to_string(home.at("asked")).unwrap_or_default();
    fs::write(home.at("asked"), "").unwrap();
    text.lines().filter(|line| !line.contains(" show ")).map(str::to_owned).collect()
}

const UNIT: &str = ".config/systemd/user/commsd.service";

fn with_cat(home: &mut Home) {
    home.path += ":/usr/bin:/bin";
}

#[cfg(target_os = "linux")]
#[test]
fn a_service_is_installed_and_taken_away_exactly() {
    let mut home = Home::new();
    stub_systemctl(&home);
    with_cat(&mut home);
    assert_eq!(home.run(&["service", "status", "--json"]).json()["installed"], false);
    let ran = home.run(&["service", "install", "--json"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert_eq!(asked(&home), ["--user daemon-reload", "--user enable --now commsd.service"]);
    let unit = fs::read_to_string(home.at(UNIT)).unwrap();
    assert!(unit.contains(&format!("\nExecStart={PROGRAM} run --log json\n")), "{unit}");
    assert_eq!(fs::metadata(home.at(UNIT)).unwrap().permissions().mode() & 0o777, 0o644);
    tell(&home, "enabled", "active", 4_000_000);
    let status = home.run(&["service", "status", "--json"]).json();
    for (key, value) in [
        ("installed", json!(true)),
        ("file", json!("ours")),
        ("enabled", json!(true)),
        ("active", json!(true)),
        ("pid", json!(4_000_000)),
        ("daemon", json!(null)),
        ("path", json!(home.at(UNIT))),
    ] {
        assert_eq!(status[key], value, "{key}");
    }
    // Twice is once.
    let said = home.run(&["service", "install"]).stdout;
    assert!(said.contains("loginctl enable-linger"), "{said}");
    let ran = home.run(&["service", "install", "--json"]);
    assert_eq!((ran.code, &ran.json()["todo"]), (Some(0), &json!([])));
    asked(&home);
    assert_eq!(home.run(&["service", "uninstall"]).code, Some(0));
    assert_eq!(asked(&home), ["--user disable --now commsd.service", "--user daemon-reload"]);
    assert_eq!(fs::read_dir(home.at(UNIT).parent().unwrap()).unwrap().count(), 0);
    assert_eq!(home.run(&["service", "uninstall"]).code, Some(0));
}

#[cfg(target_os = "linux")]
#[test]
fn a_unit_that_is_not_ours_or_was_changed_is_kept() {
    let mut home = Home::new();
    stub_systemctl(&home);
    with_cat(&mut home);
    let of_contrib = include_str!("../../contrib/systemd/commsd.service");
    home.write(UNIT, of_contrib);
    for command in ["install", "uninstall"] {
        let ran = home.run(&["service", command]);
        assert_eq!(ran.code, Some(1));
        assert!(ran.stderr.contains(UNIT), "{}", ran.stderr);
        assert_eq!(fs::read_to_string(home.at(UNIT)).unwrap(), of_contrib);
    }
    fs::remove_file(home.at(UNIT)).unwrap();
    assert_eq!(home.run(&["service", "install"]).code, Some(0));
    let changed = fs::read_to_string(home.at(UNIT)).unwrap() + "# mine\n";
    fs::write(home.at(UNIT), &changed).unwrap();
    asked(&home);
    for command in ["install", "uninstall"] {
        let ran = home.run(&["service", command]);
        assert_eq!(ran.code, Some(1));
        assert!(ran.stderr.contains("changed by hand") && ran.stderr.contains(UNIT));
        assert_eq!(fs::read_to_string(home.at(UNIT)).unwrap(), changed);
    }
    assert_eq!(asked(&home), <Vec<String>>::new());
    assert_eq!(home.run(&["service", "status", "--json"]).json()["file"], "changed");
}

#[cfg(target_os = "linux")]
#[test]
fn without_a_service_manager_the_commands_are_told() {
    let home = Home::new();
    let ran = home.run(&["service", "install", "--json"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let report = ran.json();
    assert_eq!((&report["manager"], &report["enabled"]), (&json!(false), &json!(null)));
    let todo = ["systemctl --user daemon-reload", "systemctl --user enable --now commsd.service"];
    assert_eq!(report["todo"], json!(todo));
    let said = home.run(&["service", "install"]).stdout;
    assert!(said.contains("no service manager answers here") && said.contains(todo[1]), "{said}");
    // Somebody has done that elsewhere.
    let wants = home.at(".config/systemd/user/default.target.wants");
    fs::create_dir(&wants).unwrap();
    symlink(home.at(UNIT), wants.join("commsd.service")).unwrap();
    assert_eq!(home.run(&["service", "uninstall"]).code, Some(0));
    assert!(!home.at(UNIT).exists() && fs::read_dir(wants).unwrap().next().is_none());
}

/// Two daemons do not run side by side: the one that runs is left, and named.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_runs_already_is_not_disturbed() {
    let mut home = Home::new();
    stub_systemctl(&home);
    with_cat(&mut home);
    let daemon = Daemon::start(Ports::free()).await;
    let pid = daemon.child.id().unwrap();
    let socket = daemon.socket().display().to_string();
    let ran = tokio::task::block_in_place(|| {
        home.run(&["--socket", &socket, "service", "install", "--json"])
    });
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert_eq!(asked(&home), ["--user daemon-reload", "--user enable commsd.service"]);
    let report = ran.json();
    assert_eq!(
        (&report["daemon"]["pid"], &report["daemon"]["ofService"]),
        (&json!(pid), &json!(false))
    );
    assert_eq!(report["todo"][0], "commsd stop");
    assert!(fs::read_to_string(home.at(UNIT)).unwrap().contains(&format!(" --socket {socket}\n")));
    // The same daemon, as the manager's own.
    tell(&home, "enabled", "active", pid);
    let status = tokio::task::block_in_place(|| {
        home.run(&["--socket", &socket, "service", "status", "--json"])
    });
    assert_eq!(status.json()["daemon"]["ofService"], true);
}
