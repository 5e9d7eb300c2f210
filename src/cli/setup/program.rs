//! The files that some harnesses take instead of an entry, or beside one: small programs of ours that
//! they run in their own process. OpenCode's asks `commsd hook` what has come (`surfaces.md` 4), pi's runs
//! `commsd mcp`. Each is one file, known as ours by its first line; one that was changed since is left
//! where it is.

use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use super::edit::Entry;
use super::file::{FileError, Kept};

/// Begins its first line; the hash of all that follows that line ends it.
const MARK: &str = "// Written by commsd setup; sha256 ";
/// Stands in the source for what it starts.
const COMMAND: &str = "__COMMAND__";
/// Before that, and after it.
const ASSIGNED: (&str, &str) = ("\nconst COMMAND = ", ";\n");

/// Whose program it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Program {
    OpenCode,
    Pi,
}

impl Program {
    /// The file, in a configuration directory of the harness: where every version looks.
    pub(super) fn place(self, config: &Path) -> PathBuf {
        config.join(match self {
            Self::OpenCode => "plugin/commsd.js",
            Self::Pi => "extensions/commsd.ts",
        })
    }

    /// What the file says, for a server that is started so.
    pub(super) fn text(self, server: &Entry) -> String {
        let (source, starts) = match self {
            Self::OpenCode => (include_str!("opencode.js"), server.hook()),
            Self::Pi => (include_str!("pi.ts"), server.clone()),
        };
        let text = source.replacen(COMMAND, &words(&starts), 1);
        format!("{MARK}{}\n{text}", hash(&text))
    }
}

/// What is started, as the file has it.
pub(super) fn words(entry: &Entry) -> String {
    let words: Vec<&String> = std::iter::once(&entry.program).chain(&entry.args).collect();
    serde_json::to_string(&words).unwrap_or_default()
}

/// What a file starts, if it is one of these.
fn starts(text: &str) -> Option<Entry> {
    let (_, rest) = text.split_once(ASSIGNED.0)?;
    let (words, _) = rest.split_once(ASSIGNED.1)?;
    let mut words: Vec<String> = serde_json::from_str(words).ok()?;
    (!words.is_empty()).then(|| Entry { program: words.remove(0), args: words })
}

fn hash(text: &str) -> String {
    data_encoding::HEXLOWER.encode(&Sha256::digest(text.as_bytes()))
}

/// What there is at its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Nothing.
    Nothing,
    /// Ours, as some commsd has written it.
    Ours,
    /// Ours, and somebody has changed it; or somebody else's.
    Changed,
}

fn found(text: Option<&str>) -> Found {
    let Some(text) = text else { return Found::Nothing };
    match text.strip_prefix(MARK).and_then(|rest| rest.split_once('\n')) {
        Some((hashed, rest)) if hashed == hash(rest) => Found::Ours,
        _ => Found::Changed,
    }
}

/// Writes it, or brings it up to date; answers what was there, and whether anything was to be done.
pub(super) fn write(path: &Path, text: &str, dry: bool) -> Result<(Found, bool), FileError> {
    let kept = Kept::open(path)?;
    let was = found(kept.text.as_deref());
    let change = was != Found::Changed && kept.text.as_deref() != Some(text);
    if change {
        kept.writable()?;
        if !dry {
            kept.write(Some(text))?;
        }
    }
    Ok((was, change))
}

/// Takes it back.
pub(super) fn remove(path: &Path, dry: bool) -> Result<Found, FileError> {
    let kept = Kept::open(path)?;
    let was = found(kept.text.as_deref());
    if was == Found::Ours {
        kept.writable()?;
        if !dry {
            kept.write(None)?;
            // Whatever else is in the folder stays, and so does it.
            let _ = path.parent().map(std::fs::remove_dir);
        }
    }
    Ok(was)
}

/// How it stands, and what it starts.
pub(super) fn look(path: &Path) -> Result<(Found, Option<Entry>), FileError> {
    let text = Kept::open(path)?.text;
    Ok((found(text.as_deref()), text.as_deref().and_then(starts)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(program: &str) -> Entry {
        Entry {
            program: program.into(),
            args: vec!["mcp".into(), "--harness".into(), "o\"x".into()],
        }
    }

    #[test]
    fn it_is_written_brought_up_to_date_and_taken_back() {
        for (program, runs) in [(Program::OpenCode, "hook"), (Program::Pi, "mcp")] {
            let dir = tempfile::tempdir().unwrap();
            let path = program.place(dir.path());
            let [old, new] = ["/old/commsd", "/new/commsd"].map(|at| program.text(&server(at)));
            let command =
                format!(r#"const COMMAND = ["/old/commsd","{runs}","--harness","o\"x"];"#);
            assert!(old.contains(&command), "{old}");
            assert_eq!(write(&path, &old, true).unwrap(), (Found::Nothing, true));
            assert!(!path.exists());
            assert_eq!(write(&path, &old, false).unwrap(), (Found::Nothing, true));
            assert_eq!(write(&path, &old, false).unwrap(), (Found::Ours, false));
            assert_eq!(write(&path, &new, false).unwrap(), (Found::Ours, true));
            assert_eq!(std::fs::read_to_string(&path).unwrap(), new);
            let (found, starts) = look(&path).unwrap();
            let starts = starts.unwrap();
            assert_eq!((found, starts.program.as_str()), (Found::Ours, "/new/commsd"));
            assert_eq!(starts.args, [runs, "--harness", "o\"x"]);
            assert_eq!(remove(&path, false).unwrap(), Found::Ours);
            assert!(!path.exists() && !path.parent().unwrap().exists());
            assert_eq!(remove(&path, false).unwrap(), Found::Nothing);
        }
    }

    #[test]
    fn what_somebody_has_changed_or_written_stays() {
        for program in [Program::OpenCode, Program::Pi] {
            let dir = tempfile::tempdir().unwrap();
            let path = program.place(dir.path());
            std::fs::create_dir(path.parent().unwrap()).unwrap();
            let ours = program.text(&server("/commsd"));
            for theirs in [ours.replace("5_000", "60"), "export const X = 1\n".to_owned()] {
                assert_ne!(theirs, ours);
                std::fs::write(&path, &theirs).unwrap();
                assert_eq!(write(&path, &ours, false).unwrap(), (Found::Changed, false));
                assert_eq!(remove(&path, false).unwrap(), Found::Changed);
                assert_eq!(look(&path).unwrap().0, Found::Changed);
                assert_eq!(std::fs::read_to_string(&path).unwrap(), theirs);
            }
        }
    }
}
