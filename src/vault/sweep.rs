//! Temporary files that a writer left behind when it was killed. They are removed by the next writer,
//! under the lock, once they are old enough to belong to nobody (`docs/decisions.md`, Vault).

use std::time::{Duration, UNIX_EPOCH};

use super::clock::Clock;
use super::lock;
use super::plan::name;
use super::scan::{DAILY, PAGES, VAULT};
use super::tree::{Dir, Kind, Tree, modified, temporary_of};

/// Age from which a temporary file belongs to nobody: no write takes an hour.
const ABANDONED: Duration = Duration::from_secs(3600);

/// Whether a temporary file for `target` in this folder is an engine's.
type Ours = fn(target: &str) -> bool;

const FOLDERS: [(&str, Ours); 4] = [
    (VAULT, |target| {
        matches!(target, "index.md" | ".echoes-vault.json" | ".gitignore" | "AGENT_PROTOCOL.md")
    }),
    (lock::FOLDER, |target| {
        matches!(target, "state.json" | "echoes_vault.py" | ".gitignore" | lock::NAME)
    }),
    (PAGES, name::is_page),
    ("", |target| matches!(target, "AGENTS.md" | "CLAUDE.md")),
];

/// Removes abandoned temporary files. What cannot be looked at or removed stays: they do no harm.
pub fn temporary_files(tree: &Tree, clock: &dyn Clock) {
    for (path, ours) in FOLDERS {
        if let Ok(Some(folder)) = tree.folder(path) {
            sweep(&folder, ours, clock);
        }
    }
    // Entries are never rewritten, so only folders of dates can have some; the newest few are enough,
    // because the writer that was killed wrote into one of those.
    let Ok(Some(daily)) = tree.folder(DAILY) else { return };
    let mut dates: Vec<String> = Vec::new();
    let listed = daily.each(|name, kind| {
        if kind == Kind::Folder
            && let Ok(name) = std::str::from_utf8(name)
        {
            dates.push(name.to_owned());
        }
    });
    if listed.is_err() {
        return;
    }
    dates.sort_unstable();
    for date in dates.iter().rev().take(NEWEST_DATES) {
        if let Ok(Some(folder)) = Tree::real_folder(&daily, date.as_bytes()) {
            sweep(&folder, |target| target.ends_with(".md"), clock);
        }
    }
}

/// Folders of dates that are looked into.
const NEWEST_DATES: usize = 7;

fn sweep(folder: &Dir, ours: Ours, clock: &dyn Clock) {
    let mut temporary: Vec<String> = Vec::new();
    let listed = folder.each(|name, kind| {
        // Most names are told apart by their first byte.
        if kind == Kind::File
            && name.first() == Some(&b'.')
            && let Ok(name) = std::str::from_utf8(name)
            && temporary_of(name).is_some_and(ours)
        {
            temporary.push(name.to_owned());
        }
    });
    if listed.is_err() {
        return;
    }
    for name in temporary {
        let Ok(Some(stat)) = folder.stat(&name) else { continue };
        let (seconds, _) = modified(&stat);
        let written = UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
        if clock.now().duration_since(written).is_ok_and(|age| age > ABANDONED) {
            // It does no harm; the next writer tries again.
            let _ = folder.remove(&name);
        }
    }
}
