//! A page's text: its frontmatter, its summary, and what makes it unfit to be written or indexed
//! (specification, section 7).

use serde_json::Value;

use super::index;
use super::json;
use super::text::{collapse, fold, has_conflict, is_space, lines, strip};

/// Most characters (Unicode scalar values) of a summary.
pub const MAX_SUMMARY: usize = 160;
/// The fence around the frontmatter.
const FENCE: &str = "---";
/// What a page must say of itself.
pub const REQUIRED: [&str; 4] = ["type", "stack", "status", "summary"];

/// Why a page's text is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    /// A line is a conflict marker.
    #[error("it contains an unresolved Git conflict marker")]
    Conflict,
    /// No `---` line first.
    #[error("it does not begin with a '---' frontmatter line")]
    NoFrontmatter,
    /// No closing `---`.
    #[error("its frontmatter has no closing '---' line")]
    Unclosed,
    /// Nothing between the fences.
    #[error("its frontmatter is empty")]
    Empty,
    /// A top-level key twice.
    #[error("frontmatter key '{0}' occurs twice")]
    Duplicate(String),
    /// A required key without a value.
    #[error("frontmatter key '{0}' is missing or has no value")]
    Missing(&'static str),
    /// Not a scalar on the key's own line.
    #[error("frontmatter key '{0}' needs one inline value")]
    NotInline(&'static str),
    /// A broken double-quoted value.
    #[error("the double-quoted value of frontmatter key '{0}' is not a JSON string")]
    Quoted(&'static str),
    /// The summary breaks a rule.
    #[error("its {0}")]
    Summary(#[from] SummaryError),
    /// `summary` and `indexDescription` differ.
    #[error("summary and indexDescription say different things; send one of them")]
    TwoSummaries,
    /// `indexDescription` is not a string.
    #[error("indexDescription must be a string")]
    DescriptionType,
}

/// Why a summary is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SummaryError {
    /// Nothing but white space.
    #[error("summary is empty")]
    Empty,
    /// More than one line.
    #[error("summary does not fit on one line")]
    Lines,
    /// Too long.
    #[error("summary has {0} characters; {MAX_SUMMARY} are allowed")]
    Long(usize),
    /// A conflict marker.
    #[error("summary is a Git conflict marker")]
    Conflict,
    /// An index row of another page.
    #[error("description is an index row of another page")]
    OtherPage,
}

/// What the index needs to know of a valid page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meta {
    /// The summary, white space collapsed.
    pub summary: String,
    /// Whether its status is `deprecated`.
    pub deprecated: bool,
}

/// A page that may be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Its text, trimmed, with one final LF.
    pub text: String,
    /// What the index needs.
    pub meta: Meta,
}

/// One line of index text from what a writer said: trimmed, unwrapped if it is written as an index
/// row (of `slug`, if one is given), white space collapsed.
///
/// # Errors
/// [`SummaryError`].
pub fn summary(value: &str, slug: Option<&str>) -> Result<String, SummaryError> {
    let mut value = strip(value);
    if let Some((row_slug, text)) = index::row(value) {
        if slug.is_some_and(|slug| slug != row_slug) {
            return Err(SummaryError::OtherPage);
        }
        value = strip(text);
    }
    if value.is_empty() {
        return Err(SummaryError::Empty);
    }
    if value.contains(['\n', '\r']) {
        return Err(SummaryError::Lines);
    }
    let value = collapse(value);
    let length = value.chars().count();
    if length > MAX_SUMMARY {
        return Err(SummaryError::Long(length));
    }
    if has_conflict(&value) {
        return Err(SummaryError::Conflict);
    }
    Ok(value)
}

/// The scalar that the rest of a key's line writes.
fn scalar(key: &'static str, rest: &str) -> Result<String, PageError> {
    let rest = strip(rest);
    if rest.is_empty() {
        return Err(PageError::NotInline(key));
    }
    if rest.starts_with('"') {
        let value = json::parse(rest).map_err(|_| PageError::Quoted(key))?;
        // A summary is shown, so it must be fit for that.
        let text = if key == "summary" { value.as_str() } else { value.lossy() };
        return text.map(str::to_owned).ok_or(PageError::Quoted(key));
    }
    if let Some(inner) = rest.strip_prefix('\'').and_then(|rest| rest.strip_suffix('\'')) {
        return Ok(inner.replace("''", "'"));
    }
    Ok(rest.to_owned())
}

/// Key and rest of a line that sets a top-level key.
fn key_line(line: &str) -> Option<(&str, &str)> {
    let (key, rest) = line.split_once(':')?;
    let mut chars = key.chars();
    let first = chars.next()?;
    let fits = first.is_ascii_alphabetic()
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    fits.then_some((key, rest))
}

/// Whether a frontmatter line says nothing: blank, or a comment.
fn is_mute(line: &str) -> bool {
    let line = strip(line);
    line.is_empty() || line.starts_with('#')
}

/// Frontmatter of a text, scanned but not judged.
struct Frontmatter<'a> {
    /// Required keys in the order of [`REQUIRED`]: rest of the line, and whether there is a value.
    required: [Option<(&'a str, bool)>; 4],
    /// Line number (from zero) of the closing fence.
    closing: usize,
}

fn scan(text: &str) -> Result<Frontmatter<'_>, PageError> {
    if has_conflict(text) {
        return Err(PageError::Conflict);
    }
    let mut rest = lines(text);
    if rest.next() != Some(FENCE) {
        return Err(PageError::NoFrontmatter);
    }
    let mut block = Vec::new();
    loop {
        match rest.next() {
            Some(FENCE) => break,
            Some(line) => block.push(line),
            None => return Err(PageError::Unclosed),
        }
    }
    if block.is_empty() {
        return Err(PageError::Empty);
    }
    let mut required = [None; 4];
    let mut seen: Vec<&str> = Vec::new();
    for (at, line) in block.iter().enumerate() {
        if is_mute(line) || line.starts_with(is_space) {
            continue;
        }
        let Some((key, value)) = key_line(line) else { continue };
        seen.push(key);
        if let Some(slot) = REQUIRED.iter().position(|name| *name == key) {
            let below = block.iter().skip(at + 1).find(|line| !is_mute(line));
            let valued =
                !strip(value).is_empty() || below.is_some_and(|line| line.starts_with(is_space));
            if let Some(slot) = required.get_mut(slot) {
                *slot = Some((value, valued));
            }
        }
    }
    let closing = block.len() + 1;
    seen.sort_unstable();
    if let Some(twice) = seen.windows(2).find(|pair| pair.first() == pair.last()) {
        return Err(PageError::Duplicate(
            twice.first().map(|key| (*key).to_owned()).unwrap_or_default(),
        ));
    }
    Ok(Frontmatter { required, closing })
}

impl Frontmatter<'_> {
    fn valued(&self, slot: usize) -> Option<&str> {
        match self.required.get(slot) {
            Some(Some((rest, true))) => Some(rest),
            _ => None,
        }
    }

    /// The page's status and, if it has one, its summary.
    fn judge(&self) -> Result<(String, Option<String>), PageError> {
        for (slot, key) in REQUIRED.iter().enumerate().take(3) {
            if self.valued(slot).is_none() {
                return Err(PageError::Missing(key));
            }
        }
        scalar("type", self.valued(0).unwrap_or_default())?;
        let status = scalar("status", self.valued(2).unwrap_or_default())?;
        let text = match self.valued(3) {
            Some(rest) => Some(summary(&scalar("summary", rest)?, None)?),
            None => None,
        };
        Ok((status, text))
    }
}

/// What the index needs of a page's text; the text may have white space around it.
///
/// # Errors
/// [`PageError`].
pub fn meta(text: &str) -> Result<Meta, PageError> {
    let (status, summary) = scan(strip(text))?.judge()?;
    let summary = summary.ok_or(PageError::Missing("summary"))?;
    Ok(Meta { summary, deprecated: fold(&status) == "deprecated" })
}

/// Whether a page lacks only a summary, so that a migration may give it one.
///
/// # Errors
/// [`PageError`], for any other fault.
pub fn wants_summary(text: &str) -> Result<bool, PageError> {
    let (_, summary) = scan(strip(text))?.judge()?;
    Ok(summary.is_none())
}

/// Whether the page's status is `deprecated`, as far as its frontmatter can be read.
pub fn is_deprecated(text: &str) -> bool {
    scan(strip(text))
        .and_then(|front| front.judge())
        .is_ok_and(|(status, _)| fold(&status) == "deprecated")
}

/// `text` with a summary line put before the closing fence; every line end becomes LF.
///
/// # Errors
/// [`PageError`], if the text has no frontmatter.
pub fn with_summary(text: &str, summary: &str) -> Result<String, PageError> {
    let text = strip(text);
    let closing = scan(text)?.closing;
    let mut out = String::with_capacity(text.len() + summary.len() + 16);
    for (at, line) in lines(text).enumerate() {
        if at == closing {
            out.push_str("summary: ");
            out.push_str(&Value::from(summary).to_string());
            out.push('\n');
        }
        out.push_str(line);
        out.push('\n');
    }
    Ok(out)
}

/// A page as a writer proposes it. `description` is its `indexDescription`, `slug` the stem of its
/// file name.
///
/// # Errors
/// [`PageError`].
pub fn proposed(content: &str, description: Option<&str>, slug: &str) -> Result<Page, PageError> {
    let mut text = format!("{}\n", strip(content));
    let (_, own) = scan(&text)?.judge()?;
    if let Some(description) = description {
        let description = summary(description, Some(slug))?;
        match own {
            Some(own) if own != description => return Err(PageError::TwoSummaries),
            Some(_) => {}
            None => text = with_summary(&text, &description)?,
        }
    }
    let meta = meta(&text)?;
    Ok(Page { text, meta })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(front: &str) -> String {
        format!("---\n{front}\n---\n\n# P\n")
    }

    fn full(summary: &str) -> String {
        page(&format!("type: note\nstack: []\nstatus: active\nsummary: {summary}"))
    }

    #[test]
    fn a_plain_page_is_read() {
        let meta = meta(&format!("\n\n{}  \n", full("A  b\tc."))).unwrap();
        assert_eq!(meta, Meta { summary: "A b c.".into(), deprecated: false });
        assert!(
            super::meta(&page("type: n\nstack:\n\n # c\n  - x\nstatus: 'Deprecated'\nsummary: s"))
                .unwrap()
                .deprecated
        );
    }

    #[test]
    fn faults_are_told_apart() {
        let bad = |front: &str| meta(&page(front)).unwrap_err();
        assert_eq!(meta("# x\n"), Err(PageError::NoFrontmatter));
        assert_eq!(meta("---\na: b\n"), Err(PageError::Unclosed));
        assert_eq!(meta("---\n---\n"), Err(PageError::Empty));
        assert_eq!(bad("type: a\nstack: []\nstatus: b"), PageError::Missing("summary"));
        assert_eq!(
            bad("type:\n  a\nstack: []\nstatus: b\nsummary: c"),
            PageError::NotInline("type")
        );
        assert_eq!(bad("x:\ny: 1\nx:"), PageError::Duplicate("x".into()));
        assert_eq!(bad("type: a\nstack:\nstatus: b\nsummary: c"), PageError::Missing("stack"));
        assert_eq!(
            bad("type: a\nstack: []\nstatus: b\nsummary: \"x\" # c"),
            PageError::Quoted("summary")
        );
        assert_eq!(meta(&full(&"x".repeat(161))), Err(SummaryError::Long(161).into()));
        assert_eq!(meta(&full("\"a\\nb\"")), Err(SummaryError::Lines.into()));
        assert!(meta(&full(&"x".repeat(160))).is_ok());
    }

    #[test]
    fn scalars_are_decoded() {
        let read = |text| scalar("summary", text);
        assert_eq!(read(" 'it''s' ").unwrap(), "it's");
        assert_eq!(read("'").unwrap(), "'");
        assert_eq!(read("''").unwrap(), "");
        assert_eq!(read("\"a\\u00e9\"").unwrap(), "aé");
        assert_eq!(read("x # y").unwrap(), "x # y");
        assert!(read("\"a\tb\"").is_err());
        assert!(read("\"\\ud800\"").is_err());
        assert!(scalar("type", "\"\\ud800\"").is_ok());
    }

    #[test]
    fn a_description_becomes_the_summary() {
        let text = page("type: a\nstack: []\nstatus: b");
        let page = proposed(&text, Some("- [[p]]:  Über  x"), "p").unwrap();
        assert!(page.text.contains("status: b\nsummary: \"Über x\"\n---\n"));
        assert_eq!(page.meta.summary, "Über x");
        assert!(proposed(&text, Some("- [[q]]: x"), "p").is_err());
        assert!(proposed(&full("x"), Some(" x "), "p").is_ok());
        assert_eq!(proposed(&full("x"), Some("y"), "p"), Err(PageError::TwoSummaries));
        let empty = super::tests::page("type: a\nstack: []\nstatus: b\nsummary:");
        assert_eq!(proposed(&empty, Some("y"), "p"), Err(PageError::Duplicate("summary".into())));
    }
}
