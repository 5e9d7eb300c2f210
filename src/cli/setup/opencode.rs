//! The plugin file for OpenCode (`surfaces.md` 4): a small program of ours that OpenCode runs in its own
//! process, and that asks `commsd hook` what has come. One file, known as ours by its first line; one
//! that was changed since is left where it is.

use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use super::edit::Entry;
use super::file::{FileError, Kept};

const TEXT: &str = include_str!("opencode.js");
/// Where it stands in OpenCode's configuration directory, which every version looks into.
const PLACE: &str = "plugin/commsd.js";
/// Begins its first line; the hash of all that follows that line ends it.
const MARK: &str = "// Written by commsd setup; sha256 ";

/// The file, for a configuration directory of OpenCode.
pub(super) fn place(config: &Path) -> PathBuf {
    config.join(PLACE)
}

/// What the file says when it runs `hook`.
pub(super) fn text(hook: &Entry) -> String {
    let words: Vec<&String> = std::iter::once(&hook.program).chain(&hook.args).collect();
    let command = serde_json::to_string(&words).unwrap_or_default();
    let text = TEXT.replacen("__COMMAND__", &command, 1);
    format!("{MARK}{}\n{text}", hash(&text))
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

/// How it stands.
pub(super) fn look(path: &Path) -> Result<Found, FileError> {
    Ok(found(Kept::open(path)?.text.as_deref()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hook(program: &str) -> Entry {
        Entry {
            program: program.into(),
            args: vec!["hook".into(), "--harness".into(), "o\"x".into()],
        }
    }

    #[test]
    fn it_is_written_brought_up_to_date_and_taken_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = place(dir.path());
        let (old, new) = (text(&hook("/old/commsd")), text(&hook("/new/commsd")));
        assert!(old.contains(r#"const COMMAND = ["/old/commsd","hook","--harness","o\"x"];"#));
        assert_eq!(write(&path, &old, true).unwrap(), (Found::Nothing, true));
        assert!(!path.exists());
        assert_eq!(write(&path, &old, false).unwrap(), (Found::Nothing, true));
        assert_eq!(write(&path, &old, false).unwrap(), (Found::Ours, false));
        assert_eq!(write(&path, &new, false).unwrap(), (Found::Ours, true));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), new);
        assert_eq!(remove(&path, false).unwrap(), Found::Ours);
        assert!(!path.exists() && !dir.path().join("plugin").exists());
        assert_eq!(remove(&path, false).unwrap(), Found::Nothing);
    }

    #[test]
    fn what_somebody_has_changed_or_written_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = place(dir.path());
        std::fs::create_dir(dir.path().join("plugin")).unwrap();
        let ours = text(&hook("/commsd"));
        for theirs in [ours.replace("6 * 3600", "60"), "export const X = 1\n".to_owned()] {
            std::fs::write(&path, &theirs).unwrap();
            assert_eq!(write(&path, &ours, false).unwrap(), (Found::Changed, false));
            assert_eq!(remove(&path, false).unwrap(), Found::Changed);
            assert_eq!(look(&path).unwrap(), Found::Changed);
            assert_eq!(std::fs::read_to_string(&path).unwrap(), theirs);
        }
    }
}
