//! What a request's method, path and query ask for (design 11.1). Knows nothing of HTTP but these.

use percent_encoding::percent_decode_str;

use super::record::Cursor;
use super::registry::CardFilter;
use crate::acp::code::{Code, Error, Result};
use crate::acp::did::Did;
use crate::acp::value::Word;

/// The longest long poll, ms.
pub const MAX_WAIT_MS: u64 = 30_000;
/// The most objects in one answer; also how many when the request does not say.
pub const MAX_PAGE: usize = 100;
/// Bytes of a query: a token of 2 KiB and filters fit.
const MAX_QUERY: usize = 8 * 1024;

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "members are those of the table of design 11.1")]
pub enum Route {
    /// `POST /v1/envelopes`.
    Send,
    /// `GET /v1/mailboxes/{did}/envelopes`.
    Receive { did: Did, after: Option<Cursor>, limit: usize, wait_ms: u64 },
    /// `POST /v1/mailboxes/{did}/ack`.
    Acknowledge { did: Did },
    /// `GET /v1/mailboxes/{did}/stream`.
    Stream { did: Did },
    /// `GET /v1/mailboxes/{did}/subscribe`.
    Subscribe { did: Did },
    /// `PUT /v1/registry/{did}`.
    Publish { did: Did },
    /// `DELETE /v1/registry/{did}`.
    TakeBack { did: Did },
    /// `GET /v1/registry/{did}`.
    Card { did: Did },
    /// `GET /v1/registry`.
    Cards { filter: CardFilter, after: Option<Did>, limit: usize },
    /// `POST /v1/revocations`.
    Revoke,
    /// `GET /v1/revocations`.
    Notices { issuer: Option<Did>, after: Option<Cursor>, limit: usize },
    /// `GET /v1/health`.
    Health,
    /// `GET /v1/info`.
    Info,
}

impl Route {
    /// A stable word for logs.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Receive { .. } => "receive",
            Self::Acknowledge { .. } => "ack",
            Self::Stream { .. } => "stream",
            Self::Subscribe { .. } => "subscribe",
            Self::Publish { .. } => "publish",
            Self::TakeBack { .. } => "take_back",
            Self::Card { .. } => "card",
            Self::Cards { .. } => "cards",
            Self::Revoke => "revoke",
            Self::Notices { .. } => "notices",
            Self::Health => "health",
            Self::Info => "info",
        }
    }
}

/// Why a request leads nowhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoRoute {
    /// There is nothing at this path.
    Unknown,
    /// There is, but not for this method.
    Method,
    /// A part of it is not in its grammar.
    Malformed(Error),
}

impl From<Error> for NoRoute {
    fn from(error: Error) -> Self {
        Self::Malformed(error)
    }
}

/// A route, and the token that came in the query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// What is asked for.
    pub route: Route,
    /// `auth` of the query.
    pub auth: Option<String>,
}

fn decoded(text: &str) -> Result<String> {
    let bad = || Error::new(Code::BadField, "a percent escape that is no UTF-8");
    percent_decode_str(text).decode_utf8().map(std::borrow::Cow::into_owned).map_err(|_| bad())
}

/// The parameters of a query that a route knows, each at most once.
struct Query(Vec<(String, String)>);

impl Query {
    fn read(query: &str) -> Result<Self> {
        if query.len() > MAX_QUERY {
            return Err(Error::new(Code::TooLarge, "a query of more than 8 KiB"));
        }
        let mut all: Vec<(String, String)> = Vec::new();
        for part in query.split('&').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let (name, value) = (decoded(name)?, decoded(value)?);
            match all.iter().find(|(known, _)| *known == name) {
                None => all.push((name, value)),
                Some((_, known)) if *known == value => {}
                Some(_) => {
                    let text = "a query with two values for one name";
                    return Err(Error::new(Code::BadField, text));
                }
            }
        }
        Ok(Self(all))
    }

    fn take(&mut self, name: &str) -> Option<String> {
        let at = self.0.iter().position(|(known, _)| known == name)?;
        Some(self.0.swap_remove(at).1)
    }

    fn take_as<T>(
        &mut self,
        name: &str,
        read: impl FnOnce(&str) -> Result<T>,
    ) -> Result<Option<T>> {
        self.take(name).map(|text| read(&text).map_err(|e| e.inside(name))).transpose()
    }

    fn limit(&mut self) -> Result<usize> {
        let limit = self.take_as("limit", number)?;
        match limit.map(usize::try_from) {
            None => Ok(MAX_PAGE),
            Some(Ok(limit)) if (1..=MAX_PAGE).contains(&limit) => Ok(limit),
            Some(_) => Err(Error::new(Code::BadField, "not 1 to 100").inside("limit")),
        }
    }

    fn end(self) -> Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        Err(Error::new(Code::UnknownMember, "a query parameter that means nothing here"))
    }
}

fn number(text: &str) -> Result<u64> {
    let digits = (1..=9).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
    let number = digits.then(|| text.parse().ok()).flatten();
    number.ok_or_else(|| Error::new(Code::BadField, "not a number of one to nine digits"))
}

fn word(text: &str) -> Result<String> {
    Word::parse(text).map(|word| word.to_string())
}

/// Finds what is asked for.
///
/// # Errors
/// [`NoRoute`].
pub fn find(method: &str, path: &str, query: &str) -> Result<Target, NoRoute> {
    let rest = path.strip_prefix("/v1/").ok_or(NoRoute::Unknown)?;
    let parts: Vec<&str> = rest.splitn(4, '/').collect();
    let did = |text: &str| -> Result<Did, NoRoute> { Ok(Did::parse(&decoded(text)?)?) };
    // What is there is found before the method is judged, and both before anything is parsed.
    let allowed: &[&str] = match parts.as_slice() {
        ["envelopes"] | ["mailboxes", _, "ack"] => &["POST"],
        ["mailboxes", _, "envelopes" | "stream" | "subscribe"] => &["GET"],
        ["registry"] | ["health"] | ["info"] => &["GET"],
        ["registry", _] => &["GET", "PUT", "DELETE"],
        ["revocations"] => &["GET", "POST"],
        _ => return Err(NoRoute::Unknown),
    };
    if !allowed.contains(&method) {
        return Err(NoRoute::Method);
    }
    let mut query = Query::read(query)?;
    let mut auth = None;
    let route = match (method, parts.as_slice()) {
        (_, ["envelopes"]) => Route::Send,
        (_, ["mailboxes", whose, what]) => {
            auth = query.take("auth");
            let did = did(whose)?;
            match *what {
                "ack" => Route::Acknowledge { did },
                "stream" => Route::Stream { did },
                "subscribe" => Route::Subscribe { did },
                _ => {
                    let after = query.take_as("after", Cursor::parse)?;
                    let wait_ms = query.take_as("waitMs", number)?.unwrap_or(0);
                    if wait_ms > MAX_WAIT_MS {
                        let error = Error::new(Code::BadField, "more than 30,000");
                        return Err(error.inside("waitMs").into());
                    }
                    Route::Receive { did, after, limit: query.limit()?, wait_ms }
                }
            }
        }
        ("GET", ["registry"]) => {
            let filter = CardFilter {
                adapter: query.take_as("adapter", word)?,
                skill: query.take_as("skill", word)?,
            };
            let after = query.take_as("after", Did::parse)?;
            Route::Cards { filter, after, limit: query.limit()? }
        }
        ("PUT", ["registry", whose]) => Route::Publish { did: did(whose)? },
        ("DELETE", ["registry", whose]) => Route::TakeBack { did: did(whose)? },
        (_, ["registry", whose]) => Route::Card { did: did(whose)? },
        ("POST", ["revocations"]) => Route::Revoke,
        (_, ["revocations"]) => {
            let issuer = query.take_as("issuerDid", Did::parse)?;
            let after = query.take_as("after", Cursor::parse)?;
            Route::Notices { issuer, after, limit: query.limit()? }
        }
        (_, ["info"]) => Route::Info,
        _ => Route::Health,
    };
    query.end()?;
    Ok(Target { route, auth })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOB: &str = "did:key:z6MknGc3ocHs3zdPiJbnaaqDi58NGb4pk1Sp9WxWufuXSdxf";

    #[test]
    fn every_row_of_the_table_is_found() {
        let escaped = BOB.replace(':', "%3A");
        let cursor = "00000000000000ff";
        for (method, path, query, name) in [
            ("POST", "/v1/envelopes".to_owned(), String::new(), "send"),
            (
                "GET",
                format!("/v1/mailboxes/{escaped}/envelopes"),
                format!("after={cursor}&limit=7&waitMs=30000&auth=x"),
                "receive",
            ),
            ("POST", format!("/v1/mailboxes/{BOB}/ack"), String::new(), "ack"),
            ("GET", format!("/v1/mailboxes/{BOB}/stream"), "auth=abc".into(), "stream"),
            ("GET", format!("/v1/mailboxes/{BOB}/subscribe"), String::new(), "subscribe"),
            ("PUT", format!("/v1/registry/{BOB}"), String::new(), "publish"),
            ("DELETE", format!("/v1/registry/{BOB}"), String::new(), "take_back"),
            ("GET", format!("/v1/registry/{BOB}"), String::new(), "card"),
            ("GET", "/v1/registry".into(), "adapter=a%20b&skill=s".into(), "cards"),
            ("POST", "/v1/revocations".into(), String::new(), "revoke"),
            ("GET", "/v1/revocations".into(), format!("issuerDid={escaped}"), "notices"),
            ("GET", "/v1/health".into(), String::new(), "health"),
            ("GET", "/v1/info".into(), String::new(), "info"),
        ] {
            let target = find(method, &path, &query).unwrap();
            assert_eq!(target.route.name(), name);
            assert_eq!(target.auth.is_some(), query.contains("auth="));
        }
        let target =
            find("GET", &format!("/v1/mailboxes/{BOB}/envelopes"), "after=00000000000000ff");
        let did = Did::parse(BOB).unwrap();
        let route = Route::Receive { did, after: Some(Cursor(255)), limit: 100, wait_ms: 0 };
        assert_eq!(target.unwrap().route, route);
    }

    #[test]
    fn odd_requests_lead_nowhere_and_say_why() {
        let code = |method, path: &str, query| match find(method, path, query).unwrap_err() {
            NoRoute::Unknown => "404",
            NoRoute::Method => "405",
            NoRoute::Malformed(error) => error.code().as_str(),
        };
        for path in ["", "/", "/v1", "/v2/health", "/v1/health/", "/v1//envelopes", "/v1/mailboxes"]
        {
            assert_eq!(code("GET", path, ""), "404", "{path}");
        }
        assert_eq!(code("GET", &format!("/v1/mailboxes/{BOB}/ack/x"), ""), "404");
        assert_eq!(code("GET", "/v1/envelopes", ""), "405");
        assert_eq!(code("POST", &format!("/v1/mailboxes/{BOB}/stream"), ""), "405");
        for did in ["", "did:key:", "did:web:example.com", "..", "%ff", "%2e%2e%2f", "z6Mk"] {
            let expected = if did == "%ff" { "BAD_FIELD" } else { "BAD_DID" };
            assert_eq!(code("GET", &format!("/v1/registry/{did}"), ""), expected, "{did}");
        }
        // Small order, and a key that is no Ed25519 key.
        let weak = "did:key:z6MkeTG3bFFSLYVU7VqhgZxqr6YzpaGrQtFMh1uvqGy1vDnP";
        assert_eq!(code("GET", &format!("/v1/registry/{weak}"), ""), "BAD_DID");
        let mailbox = format!("/v1/mailboxes/{BOB}/envelopes");
        for (query, expected) in [
            ("limit=0", "BAD_FIELD"),
            ("limit=101", "BAD_FIELD"),
            ("limit=-1", "BAD_FIELD"),
            ("waitMs=30001", "BAD_FIELD"),
            ("after=1", "BAD_FIELD"),
            ("after=00000000000000FF", "BAD_FIELD"),
            ("a=1", "UNKNOWN_MEMBER"),
            ("auth=a&auth=b", "BAD_FIELD"),
            ("limit=%zz", "BAD_FIELD"),
        ] {
            assert_eq!(code("GET", &mailbox, query), expected, "{query}");
        }
        assert!(find("GET", &mailbox, "auth=a&auth=a&&").is_ok());
        assert_eq!(code("GET", "/v1/health", "auth=a"), "UNKNOWN_MEMBER");
        assert_eq!(
            code("GET", "/v1/registry", &format!("skill={}", "a".repeat(9000))),
            "TOO_LARGE"
        );
    }
}
