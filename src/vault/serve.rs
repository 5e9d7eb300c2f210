//! Commands that somebody else asks for: a peer of a shared vault, or a model through its tool. The
//! same engine as on the command line, with less trust in names. Words to values, and a command to its
//! answer; who may ask is decided before.

use serde::{Deserialize, Serialize};

use super::error::VaultError;
use super::plan::name::NameError;
use super::plan::page::PageError;
use super::plan::payload::{AppendInput, EndInput, PageInput};
use super::plan::search::DEFAULT_LIMIT;
use super::plan::text::{decode, has_conflict, strip};
use super::plan::{json, payload};
use super::workspace::Workspace;
use crate::codec::text::{hides_something, truncate_chars};

/// Characters of a refused word shown in an error.
const SHOWN_CHARS: usize = 80;

/// A command in words.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Asked {
    /// Its name.
    pub op: String,
    /// For `page` and `hash`: which page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<String>,
    /// For `search`: the text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub query: Option<String>,
    /// For `search`: at most so many lines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<i64>,
    /// For `append`, `upsert` and `end`: a JSON object, as on the command line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub payload: Option<String>,
    /// For `end`: the user has asked for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confirmed: Option<bool>,
}

/// A command that fits.
#[derive(Debug)]
pub enum Request {
    /// The condition of the vault.
    Inspect,
    /// The index as the pages make it.
    Index,
    /// A page's text and hash.
    Page(String),
    /// Lines of pages.
    Search {
        /// The text.
        query: String,
        /// At most so many.
        limit: i64,
    },
    /// A page's hash.
    Hash(String),
    /// A note.
    Append(AppendInput),
    /// A page.
    Upsert(PageInput),
    /// The end of a session.
    End(EndInput),
}

/// Refuses names that could look like others: the reference takes them from its own user.
fn plain(name: &str) -> Result<(), VaultError> {
    if hides_something(name) {
        return Err(VaultError::Name { name: name.to_owned(), why: NameError::Unsafe });
    }
    Ok(())
}

/// Refuses what the reference takes from its own user: a name that could look like another, and a page
/// with a conflict marker behind a CR, which only counts once it is on disk, where it stops every
/// command that needs the index.
fn harmless(page: &PageInput) -> Result<(), VaultError> {
    plain(&page.filename)?;
    let on_disk = decode(page.content.clone().into_bytes()).unwrap_or_default();
    if has_conflict(strip(&on_disk)) {
        let file = page.filename.clone();
        return Err(VaultError::Page { file, why: PageError::Conflict });
    }
    Ok(())
}

impl Request {
    /// Reads a command. Whether `end` is confirmed is looked at before its payload.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn read(asked: &Asked) -> Result<Self, VaultError> {
        let wants = |what: &str| VaultError::Request(format!("{} needs {what}", asked.op));
        let page = || {
            let page = asked.page.clone().ok_or_else(|| wants("a page"))?;
            plain(&page)?;
            Ok::<_, VaultError>(page)
        };
        let value = || {
            let text = asked.payload.clone().ok_or_else(|| wants("a payload"))?;
            Ok::<_, VaultError>(payload::parse(text.into_bytes())?)
        };
        Ok(match asked.op.as_str() {
            "inspect" | "status" => Self::Inspect,
            "index" => Self::Index,
            "page" => Self::Page(page()?),
            "search" => Self::Search {
                query: asked.query.clone().ok_or_else(|| wants("a query"))?,
                limit: asked.limit.unwrap_or(DEFAULT_LIMIT),
            },
            "hash" => Self::Hash(page()?),
            "append" => Self::Append(payload::append(&value()?)?),
            "upsert" => {
                let input = payload::page(&value()?)?;
                harmless(&input)?;
                Self::Upsert(input)
            }
            "end" if asked.confirmed != Some(true) => return Err(VaultError::Unconfirmed),
            "end" => {
                let input = payload::end(&value()?)?;
                input.pages.iter().try_for_each(harmless)?;
                Self::End(input)
            }
            other => {
                let other = truncate_chars(other, SHOWN_CHARS);
                return Err(VaultError::Request(format!("there is no command '{other}'")));
            }
        })
    }

    /// The same as from one that cannot say under which name it writes: entries bear that of the
    /// workspace's options.
    #[must_use]
    pub fn unnamed(mut self) -> Self {
        match &mut self {
            Self::Append(input) => input.agent = None,
            Self::End(input) => input.agent = None,
            _ => {}
        }
        self
    }

    /// Whether a command of this name changes the vault; what is unknown counts as if it did.
    #[must_use]
    pub fn writes(op: &str) -> bool {
        !matches!(op, "inspect" | "status" | "index" | "page" | "search" | "hash")
    }

    /// Carries it out; the answer as the command line prints it.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn carry_out(&self, workspace: &Workspace) -> Result<String, VaultError> {
        Ok(match self {
            Self::Inspect => json::pretty(&workspace.inspect()?),
            Self::Index => json::pretty(&workspace.index()?),
            Self::Page(page) => json::pretty(&workspace.page(page)?),
            Self::Search { query, limit } => json::pretty(&workspace.search(query, *limit)?),
            Self::Hash(page) => json::pretty(&workspace.hash(page)?),
            Self::Append(input) => json::pretty(&workspace.append(input)?),
            Self::Upsert(input) => json::pretty(&workspace.upsert(input)?),
            Self::End(input) => json::pretty(&workspace.end(input, true)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(op: &str) -> Asked {
        Asked { op: op.into(), ..Asked::default() }
    }

    fn code(asked: &Asked) -> &'static str {
        Request::read(asked).unwrap_err().code()
    }

    #[test]
    fn what_does_not_fit_is_refused_before_anything_is_opened() {
        for op in ["init", "upgrade", "", "../search", "Search", "protocol\n"] {
            assert_eq!(code(&asked(op)), "vault_request", "{op:?}");
            assert!(Request::writes(op), "{op:?}");
        }
        for op in ["page", "search", "hash", "append", "upsert"] {
            assert_eq!(code(&asked(op)), "vault_request", "{op} without its argument");
        }
        for name in ["a\nb", "a\u{202e}b", "a\u{200b}", "\u{7}"] {
            let page = Asked { page: Some(name.into()), ..asked("page") };
            assert_eq!(code(&page), "vault_name", "{name:?}");
            let payload = serde_json::json!({"filename": name, "content": "x"}).to_string();
            let upsert = Asked { payload: Some(payload), ..asked("upsert") };
            assert_eq!(code(&upsert), "vault_name", "{name:?}");
        }
    }

    #[test]
    fn conflict_markers_behind_any_line_end_are_refused() {
        for text in ["a\n=======\nb", "a\r\n=======\r\nb", "a\r<<<<<<< x\rb", "a\r>>>>>>>\u{a0}"] {
            let page = serde_json::json!({"filename": "p", "content": text});
            let upsert = Asked { payload: Some(page.to_string()), ..asked("upsert") };
            assert_eq!(code(&upsert), "vault_page", "{text:?}");
            let end = serde_json::json!({"dailySummary": "x", "pages": [page]}).to_string();
            let end = Asked { confirmed: Some(true), payload: Some(end), ..asked("end") };
            assert_eq!(code(&end), "vault_page", "{text:?}");
        }
        let page = serde_json::json!({"filename": "p", "content": "a\r======= \rb"}).to_string();
        Request::read(&Asked { payload: Some(page), ..asked("upsert") }).unwrap();
    }

    #[test]
    fn an_end_needs_its_confirmation_first() {
        assert_eq!(code(&asked("end")), "vault_unconfirmed");
        let denied = Asked { confirmed: Some(false), payload: Some("{}".into()), ..asked("end") };
        assert_eq!(code(&denied), "vault_unconfirmed");
        let confirmed = Asked { confirmed: Some(true), payload: Some("{}".into()), ..asked("end") };
        assert_eq!(code(&confirmed), "vault_payload");
    }
}
