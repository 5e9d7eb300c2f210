//! The one entry of ours in a configuration file: found, put in, taken out, with every other byte left
//! where it is. Text in, text out; the two formats are [`super::jsonc`] and [`super::toml`].

use std::path::Path;

use super::{jsonc, toml};

/// The name that the server has in every harness.
pub(super) const NAME: &str = "agent-comms";
/// How the program is called, wherever it is.
pub(super) const PROGRAM_NAME: &str = "commsd";

/// Why a text is left as it is.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum EditError {
    /// It is not in the format, as its harness would say too.
    #[error("it cannot be read as {format}: {why}")]
    Unreadable { format: &'static str, why: String },
    /// It is in the format, but written in a way that cannot be edited safely.
    #[error("{0}")]
    Unusual(String),
}

/// How a harness writes down a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// `"mcpServers": {NAME: {"type": "stdio", "command": PROGRAM, "args": […]}}`
    McpServers,
    /// `"mcp": {NAME: {"type": "local", "command": [PROGRAM, …], "enabled": true}}`
    OpenCode,
    /// `[mcp_servers.NAME]` with `command` and `args`
    Codex,
}

/// What a server is started with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    /// The program.
    pub program: String,
    /// Its arguments.
    pub args: Vec<String>,
}

impl Entry {
    /// Whether it starts commsd's MCP server, whichever commsd and whoever wrote it.
    pub(super) fn is_ours(&self) -> bool {
        let name = Path::new(&self.program).file_name();
        name.is_some_and(|name| name == PROGRAM_NAME) && self.args.iter().any(|arg| arg == "mcp")
    }

    /// What the hooks of the same session are started with: the server's arguments but for the command.
    pub(super) fn hook(&self) -> Self {
        let args = std::iter::once("hook".to_owned()).chain(self.args.iter().skip(1).cloned());
        Self { args: args.collect(), ..self.clone() }
    }
}

impl Format {
    /// The entry, if there is one; one that starts no program (a remote server) has no program.
    pub(super) fn find(self, text: &str) -> Result<Option<Entry>, EditError> {
        match self {
            Self::Codex => toml::find(text),
            _ => jsonc::find(self, text),
        }
    }

    /// The entry as it stands in the text: what [`Self::insert`] and [`Self::put`] take.
    pub(super) fn piece(self, text: &str) -> Result<Option<String>, EditError> {
        match self {
            Self::Codex => toml::piece(text),
            _ => jsonc::piece(self, text),
        }
    }

    /// An entry as it would stand in the text.
    pub(super) fn render(self, text: &str, entry: &Entry) -> String {
        match self {
            Self::Codex => toml::render(text, entry),
            _ => jsonc::render(self, entry),
        }
    }

    /// The text with an entry more.
    pub(super) fn insert(self, text: &str, piece: &str) -> Result<String, EditError> {
        match self {
            Self::Codex => toml::insert(text, piece),
            _ => jsonc::insert(self, text, piece),
        }
    }

    /// The text with another entry in the place of the one that it has.
    pub(super) fn put(self, text: &str, piece: &str) -> Result<String, EditError> {
        match self {
            Self::Codex => toml::put(text, piece),
            _ => jsonc::put(self, text, piece),
        }
    }

    /// The text with another program in its entry, and all else of the entry as it is.
    pub(super) fn set_program(self, text: &str, program: &str) -> Result<String, EditError> {
        match self {
            Self::Codex => toml::set_program(text, program),
            _ => jsonc::set_program(self, text, program),
        }
    }

    /// The text without the entry. What held it stays, also when nothing is left in it, unless it is
    /// told that the text had none before.
    fn remove(self, text: &str, with_container: bool) -> Result<String, EditError> {
        match self {
            Self::Codex => toml::remove(text),
            _ => jsonc::remove(self, text, with_container),
        }
    }

    fn has_container(self, text: &str) -> Result<bool, EditError> {
        match self {
            Self::Codex => Ok(true),
            _ => jsonc::has_container(self, text),
        }
    }

    /// Takes back what was done to `before` (`None`: there was no file), whatever else has been done to
    /// the text since. `None`: nothing is left that was not ours.
    pub(super) fn undo(
        self,
        text: &str,
        before: Option<&str>,
    ) -> Result<Option<String>, EditError> {
        let Some(piece) = self.piece(text)? else { return Ok(Some(text.to_owned())) };
        let Some(before) = before else {
            if self.insert("", &piece)? == text {
                return Ok(None);
            }
            return self.remove(text, true).map(Some);
        };
        let Some(old) = self.find(before)? else {
            if self.insert(before, &piece)? == text {
                return Ok(Some(before.to_owned()));
            }
            return self.remove(text, !self.has_container(before)?).map(Some);
        };
        // An entry that was commsd's before is not wanted either.
        if old.is_ours() {
            return self.remove(text, false).map(Some);
        }
        if self.put(before, &piece)? == text {
            return Ok(Some(before.to_owned()));
        }
        let old = self.piece(before)?.unwrap_or_default();
        self.put(text, &old).map(Some)
    }
}

/// The byte order mark, which stays where it is, and the rest.
pub(super) fn split_bom(text: &str) -> (&str, &str) {
    const BOM: char = '\u{feff}';
    let rest = text.strip_prefix(BOM).unwrap_or(text);
    text.split_at(text.len() - rest.len())
}

/// How the text ends its lines.
pub(super) fn newline(text: &str) -> &'static str {
    match text.find('\n') {
        Some(at) if text[..at].ends_with('\r') => "\r\n",
        _ => "\n",
    }
}

/// The text with `new` in the place of the bytes of `range`, which lies on character boundaries.
pub(super) fn spliced(text: &str, range: std::ops::Range<usize>, new: &str) -> String {
    [&text[..range.start], new, &text[range.end..]].concat()
}
