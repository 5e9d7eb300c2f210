//! Reading a vault's files: pages side by side, a bounded number at once, and walks through folders
//! that follow no link.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::error::VaultError;
use super::plan::name;
use super::plan::page;
use super::plan::report::PageFact;
use super::plan::text;
use super::plan::{daily, index};
use super::stop::Stop;
use super::tree::{Dir, Kind, Tree};

/// The vault's folder, and the folders in it.
pub const VAULT: &str = "EchoesVault";
/// Knowledge pages.
pub const PAGES: &str = "EchoesVault/pages";
/// Daily entries.
pub const DAILY: &str = "EchoesVault/daily";

/// Files read at once: enough to keep a disk and a few cores busy, few enough that as many of the
/// largest files fit into memory.
const MAX_READERS: usize = 4;
/// Files that one reader takes in a row; below two of these no second reader pays.
const STRETCH: usize = 32;

/// `work` on every item, side by side; results in the order of the items.
pub fn side_by_side<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let readers = cores.min(MAX_READERS).min(items.len().div_ceil(STRETCH));
    if readers < 2 {
        return items.iter().map(work).collect();
    }
    let stretches: Vec<&[T]> = items.chunks(STRETCH).collect();
    let next = AtomicUsize::new(0);
    let read = || {
        let mut mine = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(stretch) = stretches.get(at) else { return mine };
            mine.push((at, stretch.iter().map(&work).collect::<Vec<R>>()));
        }
    };
    let mut done = std::thread::scope(|scope| {
        let others: Vec<_> = (1..readers).map(|_| scope.spawn(read)).collect();
        let mut done = read();
        for other in others {
            match other.join() {
                Ok(more) => done.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        done
    });
    done.sort_unstable_by_key(|(at, _)| *at);
    done.into_iter().flat_map(|(_, results)| results).collect()
}

/// The pages folder and the names of its pages in the order of the index.
///
/// # Errors
/// [`VaultError`].
pub fn page_names(tree: &Tree) -> Result<(Option<Dir>, Vec<String>), VaultError> {
    let found = match tree.folder(PAGES) {
        // A loop of links; writers have refused it already.
        Err(VaultError::SymbolicLink(_)) => None,
        found => found?,
    };
    let Some(folder) = found else { return Ok((None, Vec::new())) };
    let mut names = Vec::new();
    let mut broken = None;
    folder.each(|entry, kind| {
        if kind != Kind::File {
            return;
        }
        match std::str::from_utf8(entry) {
            Ok(file) if name::is_page(file) => names.push(file.to_owned()),
            Ok(_) => {}
            Err(_) => {
                let file = String::from_utf8_lossy(entry);
                if name::is_page(&file) {
                    broken = Some(format!("{PAGES}/{file}"));
                }
            }
        }
    })?;
    if let Some(path) = broken {
        return Err(VaultError::NameNotUtf8(path));
    }
    index::sort(&mut names, |name| name);
    Ok((Some(folder), names))
}

/// What is known of a page and whether it has conflict markers.
#[derive(Clone, Debug)]
pub struct Looked {
    /// What the index needs.
    pub fact: PageFact,
    /// Whether it is valid but for a missing summary.
    pub wants_summary: bool,
    /// Whether a line is a conflict marker.
    pub conflict: bool,
}

fn look_at_page(folder: &Dir, file: &str) -> Looked {
    let failed = |why: String| Looked {
        fact: PageFact { file: file.to_owned(), meta: Err(why), deprecated: false },
        wants_summary: false,
        conflict: false,
    };
    let bytes = match folder.read(file) {
        Ok(Some(bytes)) => bytes,
        Ok(None) => return failed("it has just been removed".into()),
        Err(error) => return failed(error.to_string()),
    };
    let Some(content) = text::decode(bytes) else { return failed("it is not valid UTF-8".into()) };
    let fact = |meta, deprecated| PageFact { file: file.to_owned(), meta, deprecated };
    match page::meta(&content) {
        Ok(meta) => {
            let deprecated = meta.deprecated;
            Looked { fact: fact(Ok(meta), deprecated), wants_summary: false, conflict: false }
        }
        Err(why) => Looked {
            // Of the text as it stands: trimming, which a page gets, can make a line a marker.
            conflict: why == page::PageError::Conflict && text::has_conflict(&content),
            wants_summary: page::wants_summary(&content) == Ok(true),
            fact: fact(Err(why.to_string()), page::is_deprecated(&content)),
        },
    }
}

/// Looks at all pages, in the order of the index.
///
/// # Errors
/// [`VaultError`], if they cannot be listed or the command is called off.
pub fn pages(tree: &Tree, stop: &Stop) -> Result<Vec<Looked>, VaultError> {
    let (folder, names) = page_names(tree)?;
    let Some(folder) = folder else { return Ok(Vec::new()) };
    side_by_side(&names, |name| stop.check().map(|()| look_at_page(&folder, name)))
        .into_iter()
        .collect()
}

/// What is known of all pages.
///
/// # Errors
/// [`VaultError`], if they cannot be listed or the command is called off.
pub fn facts(tree: &Tree, stop: &Stop) -> Result<Vec<PageFact>, VaultError> {
    Ok(pages(tree, stop)?.into_iter().map(|looked| looked.fact).collect())
}

/// A file that a walk meets.
pub struct Met {
    /// Path from where the walk began, as bytes.
    pub path: Vec<u8>,
    /// What it is.
    pub kind: Kind,
    /// The folder it is in, an index into [`Walk::folders`].
    pub folder: usize,
}

impl Met {
    /// Its name in its folder.
    pub fn name(&self) -> &[u8] {
        self.path.rsplit(|b| *b == b'/').next().unwrap_or_default()
    }
}

/// A path as text. A byte that is no UTF-8 becomes NUL, which no path has, and two hexadecimal digits.
pub fn path_text(path: &[u8]) -> String {
    let mut text = String::with_capacity(path.len());
    for chunk in path.utf8_chunks() {
        text.push_str(chunk.valid());
        for byte in chunk.invalid() {
            text.push_str(&format!("\0{byte:02x}"));
        }
    }
    text
}

/// The path that a text of [`path_text`] stands for.
pub fn path_bytes(text: &str) -> Vec<u8> {
    let mut parts = text.split('\0');
    let mut path = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let (digits, rest) = part.split_at_checked(2).unwrap_or((part, ""));
        path.extend(u8::from_str_radix(digits, 16));
        path.extend_from_slice(rest.as_bytes());
    }
    path
}

/// Whether a text of [`path_text`] is the path itself, so that it can be shown.
pub fn is_utf8(text: &str) -> bool {
    !text.contains('\0')
}

/// All that lies below a folder, links not followed.
#[derive(Default)]
pub struct Walk {
    /// Everything but folders, in no order.
    pub files: Vec<Met>,
    /// Paths of the folders met; the first is where the walk began.
    pub folders: Vec<Vec<u8>>,
    /// Folders that could not be listed.
    pub unreadable: Vec<Vec<u8>>,
}

/// Walks through `top`. Every folder is opened on its own from there, so that the depth is bounded by
/// the longest path that the system takes, and no handle is kept.
///
/// # Errors
/// [`VaultError`], if `top` itself cannot be listed.
pub fn walk(top: &Dir) -> Result<Walk, VaultError> {
    let mut walk = Walk { folders: vec![Vec::new()], ..Walk::default() };
    let mut at = 0;
    while let Some(path) = walk.folders.get(at).cloned() {
        let Walk { files, folders, unreadable } = &mut walk;
        let mut see = |name: &[u8], kind| {
            let mut below = path.clone();
            if !below.is_empty() {
                below.push(b'/');
            }
            below.extend_from_slice(name);
            if kind == Kind::Folder {
                folders.push(below);
            } else {
                files.push(Met { path: below, kind, folder: at });
            }
        };
        if path.is_empty() {
            top.each(see)?;
        } else {
            let listed = match Tree::real_folder(top, &path) {
                Ok(Some(folder)) => folder.each(&mut see),
                // It has just gone.
                Ok(None) => Ok(()),
                Err(error) => Err(error),
            };
            if listed.is_err() {
                unreadable.push(path);
            }
        }
        at += 1;
    }
    Ok(walk)
}

/// The daily entries (paths below the daily folder), in no order.
///
/// # Errors
/// [`VaultError`], if the folder cannot be listed.
pub fn daily(tree: &Tree) -> Result<Vec<Vec<u8>>, VaultError> {
    let Some(folder) = tree.folder(DAILY)? else { return Ok(Vec::new()) };
    let files = walk(&folder)?.files.into_iter();
    Ok(files
        .filter(|met| met.kind == Kind::File && met.path.ends_with(b".md"))
        .map(|met| met.path)
        .collect())
}

/// The newest `count` of daily entries: path and text, newest first.
///
/// # Errors
/// [`VaultError`].
pub fn newest(tree: &Tree, count: usize) -> Result<Vec<(String, String)>, VaultError> {
    if count == 0 {
        return Ok(Vec::new());
    }
    let mut paths = Vec::new();
    for path in daily(tree)? {
        match String::from_utf8(path) {
            Ok(path) => paths.push(path),
            Err(error) => {
                let path = String::from_utf8_lossy(error.as_bytes()).into_owned();
                return Err(VaultError::NameNotUtf8(format!("{DAILY}/{path}")));
            }
        }
    }
    paths.sort_by_cached_key(|path| text::nfc(path).into_owned());
    let mut out = Vec::new();
    for path in paths.into_iter().rev().take(count) {
        if let Some(content) = tree.text(&format!("{DAILY}/{path}"))? {
            out.push((path, content));
        }
    }
    Ok(out)
}

/// Entries of the given dates, by their headings.
pub fn entries_of(tree: &Tree, dates: &[String]) -> usize {
    let count = |path: &[u8]| match tree.read_raw(path) {
        Ok(Some(bytes)) => text::decode(bytes).map_or(0, |content| daily::count_entries(&content)),
        _ => 0,
    };
    let mut total = 0;
    for date in dates {
        total += count(format!("{DAILY}/{date}.md").as_bytes());
        let Ok(Some(folder)) = tree.folder(&format!("{DAILY}/{date}")) else { continue };
        let Ok(walk) = walk(&folder) else { continue };
        for met in walk.files.iter().filter(|met| met.kind == Kind::File) {
            if met.path.ends_with(b".md") {
                total += count(&[format!("{DAILY}/{date}/").as_bytes(), &met.path].concat());
            }
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn results_keep_the_order_of_the_items() {
        let items: Vec<usize> = (0..1000).collect();
        assert_eq!(
            side_by_side(&items, |n| n * 2),
            items.iter().map(|n| n * 2).collect::<Vec<_>>()
        );
        assert_eq!(side_by_side(&items[..3], |n| *n), [0, 1, 2]);
    }

    #[test]
    fn a_marker_that_only_trimming_makes_is_no_conflict_on_disk() {
        let home = tempfile::tempdir().unwrap();
        let root = home.path().canonicalize().unwrap();
        fs::create_dir_all(root.join(PAGES)).unwrap();
        let page = "---\ntype: a\nstack: []\nstatus: b\nsummary: c\n---\n";
        fs::write(root.join(PAGES).join("a.md"), format!("{page}=======\u{a0}\n")).unwrap();
        fs::write(root.join(PAGES).join("b.md"), format!("{page}=======\n")).unwrap();
        let looked = pages(&Tree::open(&root).unwrap(), &Stop::default()).unwrap();
        assert!(looked.iter().all(|page| page.fact.meta.is_err()));
        assert_eq!(looked.iter().map(|page| page.conflict).collect::<Vec<_>>(), [false, true]);
    }

    #[test]
    fn a_walk_follows_no_link() {
        let home = tempfile::tempdir().unwrap();
        let root = home.path().canonicalize().unwrap();
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::write(root.join("a/b/f"), "").unwrap();
        std::os::unix::fs::symlink("..", root.join("a/up")).unwrap();
        let tree = Tree::open(&root).unwrap();
        let walk = walk(&tree.folder("a").unwrap().unwrap()).unwrap();
        let mut met: Vec<_> =
            walk.files.iter().map(|met| (path_text(&met.path), met.kind)).collect();
        met.sort_by(|(one, _), (other, _)| one.cmp(other));
        assert_eq!(met, [("b/f".to_owned(), Kind::File), ("up".to_owned(), Kind::Link)]);
        assert!(walk.unreadable.is_empty());
    }

    #[test]
    fn names_that_are_no_utf8_come_back() {
        for path in [&b"a/\xff\xfeb\xc3"[..], b"", b"\xe9", "\u{e9}/x".as_bytes()] {
            let text = path_text(path);
            assert_eq!(path_bytes(&text), path);
            assert_eq!(is_utf8(&text), std::str::from_utf8(path).is_ok());
        }
    }
}
