//! What happens between check and write: markers, links, locks and files that change at the worst
//! moment, and writers that die there.

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::symlink;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::tz::TimeZone;

use super::plan::marker;
use super::tree::hook::{self, Point};
use super::tree::{Kind, Place, Tree, temporary_of};
use super::*;
use crate::identity::entropy::SeededEntropy;

/// A clock that tests set; seconds since 1970.
struct Set(AtomicI64);

impl Clock for Set {
    fn now(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(self.0.load(Ordering::SeqCst).unsigned_abs())
    }
    fn elapsed(&self) -> Duration {
        Duration::ZERO
    }
    fn sleep(&self, _: Duration) {
        panic!("nothing to wait for");
    }
    fn zone(&self) -> TimeZone {
        TimeZone::UTC
    }
}

struct Vault {
    _home: tempfile::TempDir,
    root: PathBuf,
    outside: PathBuf,
    clock: Arc<Set>,
    vault: Workspace,
}

const PAGE: &str = "---\ntype: note\nstack: []\nstatus: active\nsummary: S.\n---\n\n# P\n";

fn options(clock: Arc<Set>, seed: u64) -> Options {
    Options {
        agent: None,
        adapter_version: None,
        clock,
        entropy: Box::new(SeededEntropy::new(seed)),
        stop: Stop::default(),
    }
}

/// An initialised vault beside an empty folder.
fn place() -> Vault {
    let home = tempfile::tempdir().unwrap();
    let home_path = home.path().canonicalize().unwrap();
    let (root, outside) = (home_path.join("ws"), home_path.join("out"));
    fs::create_dir(&root).unwrap();
    fs::create_dir(&outside).unwrap();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let clock = Arc::new(Set(AtomicI64::new(i64::try_from(now).unwrap())));
    let vault = Workspace::open_root(root.clone(), options(clock.clone(), 1)).unwrap();
    vault.set_up(Setup::Init).unwrap();
    Vault { _home: home, root, outside, clock, vault }
}

impl Vault {
    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }
    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.path(path)).unwrap()
    }
    fn write(&self, path: &str, text: &str) {
        fs::write(self.path(path), text).unwrap();
    }
    /// Every file and link below the root with its content.
    fn all(&self) -> Vec<(PathBuf, String)> {
        let mut found = Vec::new();
        let mut folders = vec![self.root.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let entry = entry.unwrap();
                if entry.file_type().unwrap().is_dir() {
                    folders.push(entry.path());
                } else {
                    let text = fs::read_to_string(entry.path()).unwrap_or_default();
                    found.push((entry.path(), text));
                }
            }
        }
        found.sort();
        found
    }
    fn is_outside_empty(&self) -> bool {
        fs::read_dir(&self.outside).unwrap().next().is_none()
    }
}

fn page(name: &str, text: &str) -> PageInput {
    PageInput { filename: name.into(), content: text.into(), ..PageInput::default() }
}

fn changed(name: &str, text: &str, hash: String) -> PageInput {
    PageInput { expected_sha256: Some(hash), ..page(name, text) }
}

/// Runs `action` at the first time that this thread's next replacement reaches `point`.
fn at_first(point: Point, action: impl Fn() + 'static) {
    let done = Cell::new(false);
    hook::set(move |reached| {
        if reached == point && !done.replace(true) {
            action();
        }
    });
}

#[test]
fn a_marker_that_changes_between_check_and_write_stops_the_write() {
    let place = place();
    let marker = place.path("EchoesVault/.echoes-vault.json");
    let before = place.all();
    let other = place.read("EchoesVault/.echoes-vault.json").replace("1.0.0", "1.0.1");
    at_first(Point::Synced, {
        let marker = marker.clone();
        move || fs::write(&marker, &other).unwrap()
    });
    let error = place.vault.upsert(&page("a", PAGE)).unwrap_err();
    assert_eq!(error.code(), "vault_marker");
    place.write("EchoesVault/.echoes-vault.json", &super::plan::json::pretty(&marker::canonical()));
    assert_eq!(place.all(), before);
}

#[test]
fn a_marker_that_goes_stops_the_rest_and_the_error_names_what_was_written() {
    let place = place();
    let marker = place.path("EchoesVault/.echoes-vault.json");
    at_first(Point::Renamed, move || fs::remove_file(&marker).unwrap());
    let error = place.vault.upsert(&page("a", PAGE)).unwrap_err();
    assert!(error.to_string().contains("EchoesVault/pages/a.md"), "{error}");
    assert_eq!(place.read("EchoesVault/pages/a.md"), PAGE);
    assert!(!place.read("EchoesVault/index.md").contains("[[a]]"));
}

#[test]
fn a_link_swapped_in_for_the_page_is_refused() {
    let place = place();
    let (target, link) = (place.outside.join("x.md"), place.path("EchoesVault/pages/a.md"));
    fs::write(&target, "theirs").unwrap();
    at_first(Point::Synced, {
        let target = target.clone();
        move || symlink(&target, &link).unwrap()
    });
    let error = place.vault.upsert(&page("a", PAGE)).unwrap_err();
    assert_eq!(error.code(), "vault_symbolic_link");
    assert_eq!(fs::read_to_string(target).unwrap(), "theirs");
}

#[test]
fn a_folder_swapped_for_a_link_is_refused() {
    let place = place();
    let (pages, outside) = (place.path("EchoesVault/pages"), place.outside.clone());
    at_first(Point::Synced, move || {
        fs::rename(&pages, pages.with_file_name("old")).unwrap();
        symlink(&outside, &pages).unwrap();
    });
    let error = place.vault.upsert(&page("a", PAGE)).unwrap_err();
    assert_eq!(error.code(), "vault_outside");
    assert!(place.is_outside_empty());
    assert!(fs::read_dir(place.path("EchoesVault/old")).unwrap().next().is_none());
}

#[test]
fn a_folder_swapped_for_another_one_is_refused() {
    let place = place();
    let pages = place.path("EchoesVault/pages");
    at_first(Point::Synced, move || {
        fs::rename(&pages, pages.with_file_name("old")).unwrap();
        fs::create_dir(&pages).unwrap();
    });
    let error = place.vault.upsert(&page("a", PAGE)).unwrap_err();
    assert_eq!(error.code(), "vault_raced");
    assert!(!place.path("EchoesVault/pages/a.md").exists());
}

#[test]
fn an_editors_change_after_the_hash_check_is_kept() {
    let place = place();
    place.vault.upsert(&page("a", PAGE)).unwrap();
    let hash = place.vault.hash("a").unwrap().sha256;
    let path = place.path("EchoesVault/pages/a.md");
    let edited = PAGE.replace("# P", "# Edited");
    at_first(Point::Synced, {
        let edited = edited.clone();
        move || fs::write(&path, &edited).unwrap()
    });
    let error = place.vault.upsert(&changed("a", &PAGE.replace("# P", "# Q"), hash)).unwrap_err();
    assert_eq!(error.code(), "vault_hash_stale");
    assert_eq!(place.read("EchoesVault/pages/a.md"), edited);
}

#[test]
fn a_page_created_at_the_same_moment_is_kept() {
    let place = place();
    let path = place.path("EchoesVault/pages/a.md");
    at_first(Point::Synced, move || fs::write(&path, "theirs").unwrap());
    let error = place.vault.upsert(&page("a", PAGE)).unwrap_err();
    assert_eq!(error.code(), "vault_raced");
    assert_eq!(place.read("EchoesVault/pages/a.md"), "theirs");
}

#[test]
fn a_lock_taken_away_stops_the_write() {
    let place = place();
    let lock = place.path(lock::PATH);
    at_first(Point::Synced, move || fs::write(&lock, "1-theirs\n").unwrap());
    let error = place.vault.upsert(&page("a", PAGE)).unwrap_err();
    assert_eq!(error.code(), "vault_lock_lost");
    assert!(!place.path("EchoesVault/pages/a.md").exists());
    assert_eq!(place.read(lock::PATH), "1-theirs\n");
}

#[test]
fn a_writer_that_is_called_off_gives_its_lock_back() {
    let vault = place();
    let stop = Stop::default();
    let options = Options { stop: stop.clone(), ..options(vault.clock.clone(), 2) };
    let workspace = Workspace::open_root(vault.root.clone(), options).unwrap();
    at_first(Point::Synced, {
        let stop = stop.clone();
        move || {
            assert!(stop.is_working());
            stop.request();
        }
    });
    assert_eq!(workspace.upsert(&page("a", PAGE)).unwrap_err().code(), "vault_interrupted");
    assert!(!stop.is_working());
    assert!(!vault.path("EchoesVault/pages/a.md").exists());
    assert!(!vault.path(lock::PATH).exists());
    assert!(fs::read_dir(vault.path("EchoesVault/pages")).unwrap().next().is_none());
}

#[test]
fn a_workspace_may_be_shared_between_threads() {
    fn shared<T: Send + Sync>(_: &T) {}
    shared(&place().vault);
}

#[test]
fn nothing_is_written_through_a_days_folder_that_leads_out() {
    let place = place();
    let now = jiff::Timestamp::now().to_string();
    let date = now.split('T').next().unwrap().to_owned();
    symlink(&place.outside, place.path(&format!("EchoesVault/daily/{date}"))).unwrap();
    let input = AppendInput { entry: "- x".into(), agent: None };
    assert_eq!(place.vault.append(&input).unwrap_err().code(), "vault_outside");
    assert!(place.is_outside_empty());
    assert!(!place.path(lock::PATH).exists());
}

#[test]
fn a_page_that_is_a_link_out_is_not_read() {
    let place = place();
    fs::write(place.outside.join("x.md"), PAGE).unwrap();
    for target in ["../../../out/x.md", place.outside.join("x.md").to_str().unwrap()] {
        let link = place.path("EchoesVault/pages/x.md");
        symlink(target, &link).unwrap();
        assert_eq!(place.vault.hash("x").unwrap_err().code(), "vault_outside");
        assert_eq!(place.vault.page("x").unwrap_err().code(), "vault_outside");
        let error = place.vault.upsert(&page("x", PAGE)).unwrap_err();
        assert_eq!(error.code(), "vault_symbolic_link");
        fs::remove_file(link).unwrap();
    }
}

#[test]
fn commands_can_be_called_without_a_command_line() {
    let place = place();
    let made = place.vault.upsert(&page("Über uns", PAGE)).unwrap();
    assert_eq!(made.action, "created");
    let read = place.vault.page("Über uns.md").unwrap();
    assert_eq!((read.text.as_str(), read.sha256), (PAGE, made.sha256.clone()));
    assert_eq!(place.vault.index().unwrap().page_count, 1);
    let found = place.vault.search("# p", 10).unwrap();
    assert_eq!(found.results.len(), 1);
    let new = PAGE.replace("S.", "T.");
    let stale = place.vault.upsert(&changed("Über uns", &new, "0".repeat(64))).unwrap_err();
    assert_eq!(stale.code(), "vault_hash_stale");
    let input = EndInput {
        daily_summary: "- done".into(),
        pages: vec![changed("Über uns", &new, made.sha256)],
        agent: Some("Ana".into()),
    };
    assert_eq!(place.vault.end(&input, false).unwrap_err().code(), "vault_unconfirmed");
    assert_eq!(place.vault.end(&input, true).unwrap().agent.as_deref(), Some("ana"));
    assert_eq!(place.vault.inspect().unwrap().health.issue_count, 0);
}

#[test]
fn a_writer_that_dies_leaves_the_old_or_the_new_file() {
    for point in [Point::Written, Point::Synced, Point::Renamed] {
        let place = place();
        place.vault.upsert(&page("a", PAGE)).unwrap();
        let hash = place.vault.hash("a").unwrap().sha256;
        let new = PAGE.replace("# P", "# Q");
        hook::set(move |reached| assert_ne!(reached, point, "dies here"));
        let died = catch_unwind(AssertUnwindSafe(|| place.vault.upsert(&changed("a", &new, hash))));
        assert!(died.is_err());
        hook::set(|_| ());
        let wanted = if point == Point::Renamed { new.as_str() } else { PAGE };
        assert_eq!(place.read("EchoesVault/pages/a.md"), wanted);
        // What is left beside it disturbs nobody and goes after an hour.
        assert_eq!(place.vault.index().unwrap().page_count, 1);
        let temporary = || {
            let names = fs::read_dir(place.path("EchoesVault/pages")).unwrap();
            names
                .filter(|e| {
                    temporary_of(e.as_ref().unwrap().file_name().to_str().unwrap()).is_some()
                })
                .count()
        };
        assert_eq!(temporary(), usize::from(point != Point::Renamed));
        place.vault.rebuild_index().unwrap();
        assert_eq!(temporary(), usize::from(point != Point::Renamed));
        place.clock.0.fetch_add(3700, Ordering::SeqCst);
        place.vault.rebuild_index().unwrap();
        assert_eq!(temporary(), 0);
    }
}

#[test]
fn only_temporary_files_of_the_engines_pattern_are_swept() {
    let place = place();
    let keep = [
        "EchoesVault/pages/.a.md.short.tmp",
        "EchoesVault/pages/.a.txt.abcdefgh.tmp",
        "EchoesVault/pages/a.md.abcdefgh.tmp",
        "EchoesVault/.other.abcdefgh.tmp",
        ".echoes-vault/.x.abcdefgh.tmp",
        ".README.md.abcdefgh.tmp",
    ];
    let go = [
        "EchoesVault/pages/.a.md.abcd_f0h.tmp",
        "EchoesVault/.index.md.abcdefgh.tmp",
        ".echoes-vault/.lock.abcdefgh.tmp",
        ".AGENTS.md.abcdefgh.tmp",
    ];
    for path in keep.iter().chain(&go) {
        place.write(path, "x");
    }
    place.clock.0.fetch_add(3700, Ordering::SeqCst);
    place.vault.rebuild_index().unwrap();
    for path in keep {
        assert!(place.path(path).exists(), "{path}");
    }
    for path in go {
        assert!(!place.path(path).exists(), "{path}");
    }
}

#[test]
fn a_clock_set_back_costs_nothing() {
    let place = place();
    let input = AppendInput { entry: "- x".into(), agent: None };
    let first = place.vault.append(&input).unwrap().daily_log;
    place.clock.0.fetch_sub(3 * 86_400, Ordering::SeqCst);
    let second = place.vault.append(&input).unwrap().daily_log;
    assert!(Path::new(&first).exists() && Path::new(&second).exists());
    assert!(second < first, "the name tells the time that the clock showed");
    assert_eq!(scan::daily(&place.vault.tree).unwrap().len(), 2);
    // The same moment and the same random bytes do not overwrite an entry.
    let again = Workspace::open_root(place.root.clone(), options(place.clock.clone(), 1)).unwrap();
    let twin = Workspace::open_root(place.root.clone(), options(place.clock.clone(), 1)).unwrap();
    let one = again.append(&AppendInput { entry: "- one".into(), agent: None }).unwrap().daily_log;
    let two = twin.append(&AppendInput { entry: "- two".into(), agent: None }).unwrap().daily_log;
    assert_ne!(one, two);
    assert!(fs::read_to_string(one).unwrap().contains("- one"));
}

#[test]
fn both_ways_to_resolve_a_path_agree() {
    use rustix::fs::OFlags;
    let place = place();
    let link = |target: &Path, path: &str| symlink(target, place.path(path)).unwrap();
    link(Path::new("EchoesVault/pages"), "in");
    link(Path::new("../out"), "out");
    link(Path::new("EchoesVault/../EchoesVault/pages"), "round");
    link(Path::new("loop"), "loop");
    link(Path::new("nowhere/at/all"), "dangling");
    link(&place.path("EchoesVault/pages"), "absolute");
    link(&place.outside, "absolute-out");
    place.write("EchoesVault/pages/a.md", PAGE);
    let tree = Tree::open(&place.root).unwrap();
    for (path, found) in [
        ("in/a.md", Some(Kind::File)),
        ("round/a.md", Some(Kind::File)),
        ("absolute/a.md", Some(Kind::File)),
        ("EchoesVault/pages/../pages/a.md", Some(Kind::File)),
        ("in", Some(Kind::Folder)),
        ("", Some(Kind::Folder)),
        ("dangling", None),
        ("in/none.md", None),
        ("AGENTS.md/x", None),
    ] {
        assert_eq!(tree.kind(path).unwrap(), found, "{path:?}");
        let walked =
            tree.walk(path.as_bytes(), OFlags::RDONLY | OFlags::CLOEXEC, tree::Links::Inside);
        assert_eq!(walked.is_ok(), found.is_some(), "{path:?}");
    }
    for path in ["out", "out/x", "absolute-out/x", "..", "in/../../..", "loop"] {
        assert!(tree.confine(path).is_err(), "{path:?}");
        let walked =
            tree.walk(path.as_bytes(), OFlags::RDONLY | OFlags::CLOEXEC, tree::Links::Inside);
        assert!(walked.is_err(), "{path:?}");
    }
}

#[test]
fn a_link_or_folder_is_never_replaced() {
    let place = place();
    place.write("target", "x");
    symlink("target", place.path("link")).unwrap();
    let put = |path: &str| {
        place.vault.tree.replace(path, b"new", Place::Any, &mut SeededEntropy::new(3), &|| Ok(()))
    };
    assert_eq!(put("link").unwrap_err().code(), "vault_symbolic_link");
    assert_eq!(put("EchoesVault").unwrap_err().code(), "vault_not_regular");
    assert_eq!(place.read("target"), "x");
    put("new/folder/file").unwrap();
    assert_eq!(place.read("new/folder/file"), "new");
    use std::os::unix::fs::PermissionsExt as _;
    let mode = fs::metadata(place.path("new/folder/file")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}
