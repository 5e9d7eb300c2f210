//! What is answered when something is not done: a status, and the error body of design 11.1.

use hyper::StatusCode;
use serde_json::{Value, json};

use crate::acp::code::{Code, Error};
use crate::acp::relay::route::NoRoute;
use crate::store::StoreError;

/// When to come back with what was too much at the moment, ms.
const RETRY_SOON_MS: u64 = 1_000;
/// When to come back with what has to wait for others, ms.
const RETRY_LATER_MS: u64 = 60_000;

/// Why something is not done.
#[derive(Clone, Debug)]
pub(super) enum Fault {
    /// The protocol says no.
    Refused(Error),
    /// It could not be stored or read.
    Store(StoreError),
    /// HTTP says no.
    Http(StatusCode, Error),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

impl From<NoRoute> for Fault {
    fn from(none: NoRoute) -> Self {
        match none {
            NoRoute::Malformed(error) => Self::Refused(error),
            NoRoute::Unknown => Self::http(StatusCode::NOT_FOUND, "there is nothing at this path"),
            NoRoute::Method => Self::http(StatusCode::METHOD_NOT_ALLOWED, "not for this method"),
        }
    }
}

impl Fault {
    pub(super) fn http(status: StatusCode, message: &str) -> Self {
        Self::Http(status, Error::new(Code::BadField, message))
    }

    pub(super) fn forbidden(message: &str) -> Self {
        Self::Http(StatusCode::FORBIDDEN, Error::new(Code::EndpointBlocked, message))
    }

    pub(super) fn busy(message: &str) -> Self {
        Self::Http(StatusCode::SERVICE_UNAVAILABLE, Error::new(Code::RateLimited, message))
    }

    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::Refused(error) => status_of(error.code()),
            Self::Store(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Http(status, _) => *status,
        }
    }

    /// The member `error` of the body.
    pub(super) fn body(&self) -> Value {
        let (code, message) = match self {
            Self::Refused(error) | Self::Http(_, error) => (error.code(), error.to_string()),
            // Where the relay's files are is its operator's business.
            Self::Store(error) => {
                (Code::RelayUnreachable, format!("the relay cannot store now ({})", error.code()))
            }
        };
        let retry = match (self, code) {
            (Self::Refused(_), Code::MailboxFull | Code::AuthCacheFull) => Some(RETRY_LATER_MS),
            _ => matches!(
                self.status(),
                StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
            )
            .then_some(RETRY_SOON_MS),
        };
        json!({ "code": code, "message": message, "retryAfterMs": retry })
    }
}

fn status_of(code: Code) -> StatusCode {
    match code {
        Code::AuthMissing
        | Code::AuthStale
        | Code::AuthReplayed
        | Code::AuthBadSignature
        | Code::AuthWrongAction
        | Code::AuthWrongAudience
        | Code::BadSignature => StatusCode::UNAUTHORIZED,
        Code::AuthWrongMailbox | Code::WrongSigner | Code::WrongRole => StatusCode::FORBIDDEN,
        Code::EnvelopeIdReused | Code::InviteRevoked => StatusCode::CONFLICT,
        Code::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        Code::AuthCacheFull | Code::MailboxFull | Code::RateLimited => {
            StatusCode::TOO_MANY_REQUESTS
        }
        _ => StatusCode::BAD_REQUEST,
    }
}
