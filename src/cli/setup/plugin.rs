//! The folder that Claude Code installs as a plugin (`surfaces.md` 3): the MCP server, the hooks that
//! bring messages, and slash commands. Written whole and taken back whole; whatever else is in the
//! folder is left alone.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Value, json};

use super::edit::{Entry, NAME};
use super::file::Kept;
use crate::api::types::{ApiError, PROGRAM_VERSION};

/// The plugin's name, and that of the one-plugin marketplace that it is installed from.
const PLUGIN: &str = "commsd";
const MANIFEST: &str = ".claude-plugin/plugin.json";
/// Seconds that the harness gives a hook.
const HOOK_SECS: u64 = 5;
/// How long the hook in the background waits for a message to wake an idle session with, and a little
/// more that the harness gives it.
const WAKE_SECS: u64 = 6 * 3600;
/// Name, what it does, what may follow it, and what the model is told.
const COMMANDS: [(&str, &str, &str, &str); 11] = [
    (
        "agents",
        "Who is there",
        "",
        "Call agent_comms with action list_agents. Show name, harness, status and directory of each.",
    ),
    (
        "dm",
        "Write to one agent",
        "<agent> <text>",
        "Call agent_comms with action dm: target is the first word of \"$ARGUMENTS\", content the rest, streamingBehavior steer. Say what became of it.",
    ),
    (
        "hide",
        "Be seen by nobody",
        "",
        "Call agent_comms with action update and visibility ghost. Say that others cannot see this agent until /commsd:show.",
    ),
    (
        "join",
        "Join a room",
        "<room>",
        "Call agent_comms with action join_room and room \"$ARGUMENTS\".",
    ),
    (
        "leave",
        "Leave a room",
        "<room>",
        "Call agent_comms with action leave_room and room \"$ARGUMENTS\".",
    ),
    (
        "read",
        "Read a room",
        "<room>",
        "Call agent_comms with action read_room and room \"$ARGUMENTS\". Show who said what, and when.",
    ),
    (
        "rooms",
        "Which rooms there are",
        "",
        "Call agent_comms with action list_rooms. Show which of them this agent is in.",
    ),
    (
        "send",
        "Write to a room",
        "<room> <text>",
        "Call agent_comms with action send: target is the first word of \"$ARGUMENTS\", content the rest, streamingBehavior info. Say what became of it.",
    ),
    ("show", "Be seen again", "", "Call agent_comms with action update and visibility visible."),
    (
        "status",
        "Say what you are doing",
        "<active|idle|busy>",
        "Call agent_comms with action update and status \"$ARGUMENTS\".",
    ),
    (
        "whoami",
        "Who this agent is",
        "",
        "Call agent_comms with action whoami and show what it says.",
    ),
];

/// What was done.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    /// Nothing was written.
    dry_run: bool,
    folder: PathBuf,
    /// `written`, `unchanged` or `removed`.
    state: &'static str,
    files: Vec<PathBuf>,
    /// What makes the harness use it.
    next: Vec<String>,
}

impl Report {
    pub(super) fn human(&self) -> String {
        let mut text =
            format!("plugin for Claude Code in {}: {}\n", self.folder.display(), self.state);
        if self.dry_run {
            self.files.iter().for_each(|file| text += &format!("  {}\n", file.display()));
            text += "nothing was changed\n";
        }
        self.next.iter().for_each(|next| text += &format!("-> {next}\n"));
        text
    }
}

/// The files of the plugin, by their place in its folder.
fn files(entry: &Entry, hook: &Entry) -> Vec<(String, String)> {
    let pretty = |value: &Value| format!("{value:#}\n");
    let description = "Agents of this machine find each other, talk and share rooms";
    let command = |extra: &str| {
        let words = std::iter::once(&hook.program).chain(&hook.args);
        let line: Vec<String> = words.map(|word| quoted(word)).collect();
        format!("{}{extra}", line.join(" "))
    };
    let soon = json!({"type": "command", "command": command(""), "timeout": HOOK_SECS});
    let wake = json!({"type": "command", "command": command(&format!(" --wait {WAKE_SECS}")),
        "asyncRewake": true, "timeout": WAKE_SECS + HOOK_SECS});
    let mut files = vec![
        (
            MANIFEST.to_owned(),
            pretty(&json!({"name": PLUGIN, "version": PROGRAM_VERSION, "description": description,
                "mcpServers": {NAME:
                    {"type": "stdio", "command": entry.program, "args": entry.args}}})),
        ),
        (
            ".claude-plugin/marketplace.json".to_owned(),
            pretty(&json!({"name": PLUGIN, "owner": {"name": PLUGIN}, "plugins": [
                {"name": PLUGIN, "source": "./", "description": description}]})),
        ),
        (
            "hooks/hooks.json".to_owned(),
            pretty(&json!({"description": "Brings what other agents write", "hooks": {
                "PostToolUse": [{"matcher": "*", "hooks": [soon]}],
                "SessionStart": [{"hooks": [soon]}],
                "Stop": [{"hooks": [soon, wake]}],
                "UserPromptSubmit": [{"hooks": [soon]}]}})),
        ),
    ];
    for (name, what, hint, prompt) in COMMANDS {
        let hint =
            if hint.is_empty() { String::new() } else { format!("argument-hint: \"{hint}\"\n") };
        let text = format!("---\ndescription: {what}\n{hint}---\n\n{prompt}\n");
        files.push((format!("commands/{name}.md"), text));
    }
    files
}

/// A word of a shell's command line.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Writes the folder, or brings it up to date.
pub(super) fn write(
    folder: &Path,
    entry: &Entry,
    hook: &Entry,
    dry: bool,
) -> Result<Report, ApiError> {
    // It is said to the harness by this name, from wherever.
    let folder = &std::path::absolute(folder).map_err(|error| unusable(folder, &error))?;
    if !is_ours(folder)? {
        return Err(ApiError::new(
            "plugin_foreign",
            format!("{} holds something else", folder.display()),
            "name a folder that is not there yet",
        ));
    }
    let files = files(entry, hook);
    let mut kept = Vec::new();
    for (place, text) in &files {
        let file = Kept::open(&folder.join(place))?;
        file.writable()?;
        kept.push((file, text));
    }
    let changed: Vec<_> =
        kept.iter().filter(|(file, text)| file.text.as_ref() != Some(*text)).collect();
    if !dry {
        // The manifest, by which the folder is known as ours, comes first.
        for (file, text) in &changed {
            file.write(Some(text))?;
        }
    }
    let place = quoted(&folder.display().to_string());
    Ok(Report {
        dry_run: dry,
        folder: folder.clone(),
        state: if changed.is_empty() { "unchanged" } else { "written" },
        files: files.iter().map(|(place, _)| folder.join(place)).collect(),
        next: vec![
            format!("claude plugin marketplace add {place}"),
            format!("claude plugin install {PLUGIN}@{PLUGIN}"),
        ],
    })
}

/// Takes the folder back; files that were changed since stay.
pub(super) fn remove(
    folder: &Path,
    entry: &Entry,
    hook: &Entry,
    dry: bool,
) -> Result<Report, ApiError> {
    let folder = &std::path::absolute(folder).map_err(|error| unusable(folder, &error))?;
    let mut gone = Vec::new();
    for (place, text) in files(entry, hook) {
        let path = folder.join(&place);
        let file = Kept::open(&path)?;
        if file.text.as_ref() == Some(&text) {
            if !dry {
                file.write(None)?;
            }
            gone.push(path);
        }
    }
    if !dry {
        for inner in [".claude-plugin", "hooks", "commands", ""] {
            // Whatever else is in it stays, and so does it.
            let _ = fs::remove_dir(folder.join(inner));
        }
    }
    let state = if gone.is_empty() { "unchanged" } else { "removed" };
    let next = vec![format!("claude plugin uninstall {PLUGIN}@{PLUGIN}")];
    Ok(Report { dry_run: dry, folder: folder.clone(), state, files: gone, next })
}

/// Whether the folder is missing, empty, or was written by a commsd.
fn is_ours(folder: &Path) -> Result<bool, ApiError> {
    match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(unusable(folder, &error)),
        Ok(mut entries) => {
            if entries.next().is_none() {
                return Ok(true);
            }
        }
    }
    let manifest = Kept::open(&folder.join(MANIFEST))?.text.unwrap_or_default();
    let named: Value = serde_json::from_str(&manifest).unwrap_or_default();
    Ok(named["name"] == PLUGIN && named["mcpServers"][NAME].is_object())
}

fn unusable(folder: &Path, error: &io::Error) -> ApiError {
    let what = format!("cannot use {} as a plugin's folder: {error}", folder.display());
    ApiError::new("plugin_folder", what, "name another folder")
}
