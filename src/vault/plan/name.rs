//! Page names: what a writer accepts, which files on disk are pages, which names collide, how they
//! sort (specification, sections 7.1 and 8).

use super::text::{fold, nfc, strip};

/// Longest page file name in bytes, suffix included: the temporary file beside it has 14 bytes more,
/// and file systems end at 255.
pub const MAX_NAME: usize = 241;

/// Why a page name is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Nothing but white space, or nothing before the suffix.
    #[error("the page name is empty")]
    Empty,
    /// A separator, `..`, a leading dot or NUL.
    #[error("a page name must not contain '/', '\\', '..' or NUL, nor begin with '.'")]
    Unsafe,
    /// Longer than [`MAX_NAME`].
    #[error("the page name has {0} bytes; {MAX_NAME} fit")]
    TooLong(usize),
}

/// The file name of a page that a caller names: trimmed, NFC, with exactly the suffix `.md` added or
/// kept.
///
/// # Errors
/// [`NameError`].
pub fn page_file(name: &str) -> Result<String, NameError> {
    let name = nfc(strip(name));
    let stem = name.strip_suffix(".md").unwrap_or(&name);
    if stem.is_empty() {
        return Err(NameError::Empty);
    }
    if stem.contains(['/', '\\', '\0']) || stem.contains("..") || stem.starts_with('.') {
        return Err(NameError::Unsafe);
    }
    let file = format!("{stem}.md");
    if file.len() > MAX_NAME {
        return Err(NameError::TooLong(file.len()));
    }
    Ok(file)
}

/// Splits a file name at its last dot, as Python's `pathlib` does: a leading or final dot splits
/// nothing.
fn split(file: &str) -> (&str, &str) {
    match file.rfind('.') {
        Some(at) if at > 0 && at + 1 < file.len() => file.split_at(at),
        _ => (file, ""),
    }
}

/// Whether a regular file of this name in the pages folder is a page.
pub fn is_page(file: &str) -> bool {
    let (_, suffix) = split(file);
    suffix == ".md" || fold(suffix) == ".md"
}

/// The stem as stored: the name before its last dot.
pub fn stem(file: &str) -> &str {
    split(file).0
}

/// What the index sorts by: the folded NFC file name, then the NFC file name.
pub fn sort_key(file: &str) -> (String, String) {
    let name = nfc(file);
    (fold(&name).into_owned(), name.into_owned())
}

/// What must differ between any two pages.
fn identity(file: &str) -> String {
    let stem = nfc(stem(file));
    fold(&stem).into_owned()
}

/// The first two of `files`, which are sorted by [`sort_key`], that are one page after NFC and case
/// folding. Such names are neighbours, because every suffix folds to the same.
pub fn collision<'a>(files: impl IntoIterator<Item = &'a str>) -> Option<(&'a str, &'a str)> {
    let mut files = files.into_iter();
    let mut last = files.next()?;
    for file in files {
        let same = if last.is_ascii() && file.is_ascii() {
            stem(last).eq_ignore_ascii_case(stem(file))
        } else {
            identity(last) == identity(file)
        };
        if same {
            return Some((last, file));
        }
        last = file;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_get_one_suffix_and_nfc() {
        for (name, file) in [
            ("a", "a.md"),
            (" a.md ", "a.md"),
            ("x.md.md", "x.md.md"),
            ("X.MD", "X.MD.md"),
            ("a..md", "a..md"),
            ("e\u{301}", "é.md"),
            ("a .md", "a .md"),
        ] {
            assert_eq!(page_file(name).unwrap(), file);
        }
        for name in ["", " \u{2003}", ".md", ".", "..", ".a", "a/b", "a\\b", "a..b", "a\0", "/a"] {
            assert!(page_file(name).is_err(), "{name:?}");
        }
        assert_eq!(page_file(&"a".repeat(238)).unwrap().len(), MAX_NAME);
        assert_eq!(page_file(&"a".repeat(239)), Err(NameError::TooLong(242)));
    }

    #[test]
    fn files_are_pages_by_their_suffix() {
        for file in ["a.md", "a.MD", ".a.md", "..md", "a.b.Md"] {
            assert!(is_page(file), "{file:?}");
        }
        for file in [".md", "a", "a.md.tmp", "a.", "a.mdx"] {
            assert!(!is_page(file), "{file:?}");
        }
        assert_eq!(stem("x.md.md"), "x.md");
    }

    #[test]
    fn collisions_are_found_after_folding() {
        let collide = |names: &[&str]| {
            let mut names = names.to_vec();
            names.sort_by_key(|name| sort_key(name));
            collision(names).is_some()
        };
        assert!(collide(&["A.md", "b.md", "a.MD"]));
        assert!(collide(&["straße.md", "strassf.md", "STRASSE.md"]));
        assert!(collide(&["é.md", "f.md", "e\u{301}.Md", "e.md"]));
        assert!(!collide(&["ı.md", "i.md", "İ.md"]));
    }

    #[test]
    fn the_suffix_takes_part_in_sorting() {
        let mut files = ["a.md", "a-b.md", "B.md", "a b.md"];
        files.sort_by_key(|file| sort_key(file));
        assert_eq!(files, ["a b.md", "a-b.md", "a.md", "B.md"]);
    }
}
