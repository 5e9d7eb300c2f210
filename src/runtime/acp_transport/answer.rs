//! What a relay answers, read strictly: pages, errors, what it says of itself. Objects of others
//! are verified; what does not verify is counted and left out.

use std::time::Duration;

use hyper::StatusCode;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::TransportError;
use crate::acp::code::{Code, Error};
use crate::acp::did::Did;
use crate::acp::json;
use crate::acp::objects::{RevocationNotice, WorkerCard};
use crate::acp::sign::Signed as _;
use crate::acp::value::EnvelopeId;

/// Characters of a cursor (design 11.1).
pub(super) const MAX_CURSOR: usize = 64;

/// What a relay took.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Posted {
    /// Its id.
    pub envelope_id: EnvelopeId,
    /// Its place in the recipient's mailbox.
    pub cursor: String,
    /// Whether the relay had it before.
    #[serde(skip)]
    pub repeated: bool,
}

/// What a relay says of itself. It may say more.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RelayInfo {
    /// Where it believes to be; tokens name the origin that the client connects to.
    pub relay_origin: String,
    /// Its bounds, by name.
    #[serde(default)]
    pub limits: Map<String, Value>,
    /// What it can do beyond the protocol.
    #[serde(default)]
    pub features: Vec<String>,
}

/// A page of cards, all signed by whom they name.
#[derive(Clone, Debug, PartialEq)]
pub struct CardPage {
    /// The cards.
    pub cards: Vec<WorkerCard>,
    /// How many more the relay listed that are no good cards.
    pub refused: usize,
    /// Where the next page begins; `None` at the end.
    pub next: Option<String>,
}

/// A page of revocations, all signed by the issuer that was asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct NoticePage {
    /// The notices.
    pub notices: Vec<RevocationNotice>,
    /// How many more the relay listed that are no such notices.
    pub refused: usize,
    /// Where the next page begins; `None` at the end.
    pub next: Option<String>,
}

/// A page whose items nobody has looked at.
pub(super) struct Page<T = Value> {
    pub(super) items: Vec<T>,
    refused: usize,
    pub(super) next: Option<String>,
}

impl Page {
    /// Reads a page of at most `limit` items, which are its member `member`.
    pub(super) fn read(
        bytes: &[u8],
        member: &str,
        max: usize,
        limit: usize,
    ) -> Result<Self, TransportError> {
        let mut value = json::parse(bytes, max).map_err(|_| unreadable())?;
        let items = match value.get_mut(member).map(Value::take) {
            Some(Value::Array(items)) if items.len() <= limit => items,
            _ => return Err(unreadable()),
        };
        let next = match value.get("next") {
            None | Some(Value::Null) => None,
            Some(next) => Some(cursor(next)?),
        };
        Ok(Self { items, refused: 0, next })
    }

    /// The items that `check` takes.
    pub(super) fn verified<T>(self, check: impl Fn(Value) -> Result<T, Error>) -> Page<T> {
        let all = self.items.len();
        let items: Vec<T> = self.items.into_iter().filter_map(|item| check(item).ok()).collect();
        Page { refused: all - items.len(), items, next: self.next }
    }
}

impl From<Page<WorkerCard>> for CardPage {
    fn from(Page { items: cards, refused, next }: Page<WorkerCard>) -> Self {
        Self { cards, refused, next }
    }
}

impl From<Page<RevocationNotice>> for NoticePage {
    fn from(Page { items: notices, refused, next }: Page<RevocationNotice>) -> Self {
        Self { notices, refused, next }
    }
}

/// A card that is signed by its worker.
pub(super) fn card(value: Value) -> Result<WorkerCard, Error> {
    WorkerCard::read_verified(value)
}

/// A notice that is signed by `issuer`.
pub(super) fn notice(value: Value, issuer: Did) -> Result<RevocationNotice, Error> {
    let notice = RevocationNotice::read_verified(value)?;
    if notice.issuer_did != issuer {
        return Err(Error::new(Code::WrongSigner, "another issuer's notice"));
    }
    Ok(notice)
}

/// A cursor as a relay gives it.
pub(super) fn cursor(value: &Value) -> Result<String, TransportError> {
    match value.as_str() {
        Some(text) if is_cursor(text) => Ok(text.to_owned()),
        _ => Err(unreadable()),
    }
}

/// Whether `text` may be a cursor: it goes into a header and a query.
pub(super) fn is_cursor(text: &str) -> bool {
    (1..=MAX_CURSOR).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Reads an answer of ours to expect; members that are not known here are passed over.
pub(super) fn read<T: DeserializeOwned>(bytes: &[u8], max: usize) -> Result<T, TransportError> {
    let value = json::parse(bytes, max).map_err(|_| unreadable())?;
    serde_json::from_value(value).map_err(|_| unreadable())
}

pub(super) fn unreadable() -> TransportError {
    TransportError::unreachable("the relay's answer is not one of this protocol").in_doubt()
}

/// The error of an answer that is no success: by its code, or by its status where it has none that
/// is known.
pub(super) fn failure(status: StatusCode, body: &[u8]) -> TransportError {
    #[derive(Deserialize)]
    struct Body {
        error: Inner,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Inner {
        code: Code,
        #[serde(default)]
        retry_after_ms: Option<u64>,
    }
    let told: Option<Inner> = read::<Body>(body, super::MAX_SMALL).ok().map(|body| body.error);
    let code = told.as_ref().map_or_else(|| code_of(status), |inner| inner.code);
    let refused =
        TransportError::new(code, format!("the relay refused with status {}", status.as_u16()));
    match told {
        Some(told) => refused.after(told.retry_after_ms.map(Duration::from_millis)),
        None if code == Code::RelayUnreachable => refused.in_doubt(),
        None => refused,
    }
}

fn code_of(status: StatusCode) -> Code {
    match status {
        StatusCode::BAD_REQUEST => Code::BadField,
        StatusCode::UNAUTHORIZED => Code::AuthMissing,
        StatusCode::FORBIDDEN => Code::WrongSigner,
        StatusCode::CONFLICT => Code::EnvelopeIdReused,
        StatusCode::PAYLOAD_TOO_LARGE => Code::TooLarge,
        StatusCode::TOO_MANY_REQUESTS => Code::RateLimited,
        // Whatever is there is no relay, or not one that works.
        _ => Code::RelayUnreachable,
    }
}
