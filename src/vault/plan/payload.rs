//! What a caller hands over: typed inputs, and how they are read from a JSON payload
//! (specification, sections 12.8 to 12.11).

use super::json::{self, Json};
use super::text::strip;

/// A page that a caller proposes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageInput {
    /// Its name, with or without `.md`.
    pub filename: String,
    /// Its whole text.
    pub content: String,
    /// Summary for a page that has none (older callers).
    pub index_description: Option<String>,
    /// The hash of the page as the caller read it; needed if the page exists.
    pub expected_sha256: Option<String>,
}

/// An intermediate note.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AppendInput {
    /// Markdown; not blank.
    pub entry: String,
    /// Who notes it; without one, the workspace's writer.
    pub agent: Option<String>,
}

/// The end of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndInput {
    /// Markdown; not blank.
    pub daily_summary: String,
    /// Pages to write with it.
    pub pages: Vec<PageInput>,
    /// Who ends it; without one, the workspace's writer.
    pub agent: Option<String>,
}

/// Why a payload is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PayloadError {
    /// Not UTF-8.
    #[error("the payload is not valid UTF-8")]
    NotUtf8,
    /// Not JSON.
    #[error("the payload cannot be read: {0}")]
    NotJson(String),
    /// Another JSON value than an object.
    #[error("the payload must be a JSON object")]
    NotObject,
    /// A member that must be a string with something in it, and without lone surrogates.
    #[error("'{0}' must be a non-empty string")]
    Text(&'static str),
    /// A member that must be a string, if it is there.
    #[error("'{0}' must be a string")]
    NotText(&'static str),
    /// `pages` is something else.
    #[error("'pages' must be a list of objects")]
    Pages,
    /// The index is generated and cannot be updated by hand.
    #[error("'indexUpdates' is not accepted: the index is generated from the pages")]
    IndexUpdates,
}

/// Reads a payload's text as one JSON object.
///
/// # Errors
/// [`PayloadError`].
pub fn parse(bytes: Vec<u8>) -> Result<Json, PayloadError> {
    let text = super::text::decode(bytes).ok_or(PayloadError::NotUtf8)?;
    let value = json::parse(&text).map_err(PayloadError::NotJson)?;
    if value.is_object() { Ok(value) } else { Err(PayloadError::NotObject) }
}

fn wanted(value: &Json, member: &'static str) -> Result<String, PayloadError> {
    match value.get(member).and_then(Json::as_str) {
        Some(text) if !strip(text).is_empty() => Ok(text.to_owned()),
        _ => Err(PayloadError::Text(member)),
    }
}

/// An agent's name. Whatever counts as false in Python is as absent.
fn agent(value: &Json) -> Result<Option<String>, PayloadError> {
    match value.get("agent") {
        Some(agent) if json::truthy(agent) => match agent.lossy() {
            // Whatever is no letter, digit, dot or line of ASCII becomes a dash, lone surrogates too.
            Some(name) => Ok(Some(name.to_owned())),
            None => Err(PayloadError::NotText("agent")),
        },
        _ => Ok(None),
    }
}

/// The input of `append`.
///
/// # Errors
/// [`PayloadError`].
pub fn append(value: &Json) -> Result<AppendInput, PayloadError> {
    Ok(AppendInput { entry: wanted(value, "entry")?, agent: agent(value)? })
}

/// The input of `upsert`, or one page of `end`.
///
/// # Errors
/// [`PayloadError`].
pub fn page(value: &Json) -> Result<PageInput, PayloadError> {
    let index_description = match value.get("indexDescription") {
        None | Some(Json::Null) => None,
        Some(other) => {
            let text = other.as_str().ok_or(PayloadError::NotText("indexDescription"))?;
            Some(text.to_owned())
        }
    };
    Ok(PageInput {
        filename: wanted(value, "filename")?,
        content: wanted(value, "content")?,
        index_description,
        // Anything else is as absent: a new page needs none, an existing one is refused without.
        expected_sha256: value.get("expectedSha256").and_then(Json::as_str).map(str::to_owned),
    })
}

/// The input of `end`.
///
/// # Errors
/// [`PayloadError`].
pub fn end(value: &Json) -> Result<EndInput, PayloadError> {
    let daily_summary = wanted(value, "dailySummary")?;
    let pages = match value.get("pages") {
        Some(pages) => pages.as_list().ok_or(PayloadError::Pages)?,
        None => &[],
    };
    if !pages.iter().all(Json::is_object) {
        return Err(PayloadError::Pages);
    }
    match value.get("indexUpdates") {
        None | Some(Json::Null) => {}
        Some(Json::List(updates)) if updates.is_empty() => {}
        Some(_) => return Err(PayloadError::IndexUpdates),
    }
    let pages = pages.iter().map(page).collect::<Result<_, _>>()?;
    Ok(EndInput { daily_summary, pages, agent: agent(value)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn append(value: &Value) -> Result<AppendInput, PayloadError> {
        super::append(&value.clone().into())
    }

    fn end(value: &Value) -> Result<EndInput, PayloadError> {
        super::end(&value.clone().into())
    }

    #[test]
    fn payloads_are_single_objects() {
        for bytes in [&b""[..], b"[]", b"{} x", b"\xef\xbb\xbf{}", b"{,}", b"\xff"] {
            assert!(parse(bytes.to_vec()).is_err(), "{bytes:?}");
        }
        assert_eq!(
            parse(b" {\"entry\":\r\n\"x\"} ".to_vec()).unwrap(),
            json!({"entry": "x"}).into()
        );
    }

    #[test]
    fn falsy_agents_are_as_absent() {
        for agent in [json!(null), json!(""), json!(0), json!(false), json!([])] {
            let input = append(&json!({"entry": "x", "agent": agent})).unwrap();
            assert_eq!(input.agent, None);
        }
        for agent in [json!(5), json!(true), json!(["x"])] {
            assert!(append(&json!({"entry": "x", "agent": agent})).is_err());
        }
    }

    #[test]
    fn end_takes_a_list_of_objects_only() {
        for pages in [json!(null), json!({}), json!("x"), json!([1]), json!([{}, 1])] {
            assert!(end(&json!({"dailySummary": "x", "pages": pages})).is_err(), "{pages}");
        }
        assert!(end(&json!({"dailySummary": "x", "indexUpdates": []})).is_ok());
        assert_eq!(
            end(&json!({"dailySummary": "x", "indexUpdates": 0})),
            Err(PayloadError::IndexUpdates)
        );
    }

    #[test]
    fn only_what_is_used_must_be_writable() {
        let read = |text: &str| super::append(&parse(text.into()).unwrap());
        let odd = format!("1e400, [{}], \"\\udc00\", {{\"\\ud800\": NaN}}", "9".repeat(400));
        let entry =
            read(&format!("{{\"entry\": \"x\", \"y\": [{odd}], \"agent\": \"a\\ud800b\"}}"));
        assert_eq!(entry.unwrap().agent.as_deref(), Some("a\u{fffd}b"));
        assert_eq!(read("{\"entry\": \"x\\ud800\"}"), Err(PayloadError::Text("entry")));
        assert_eq!(read("{\"entry\": NaN}"), Err(PayloadError::Text("entry")));
    }
}
