//! Why a relay did not do what was asked: a code of the closed list, whether to come again, and when.

use std::time::Duration;

use crate::acp::code::{Code, Error};
use crate::runtime::http_client::HttpError;

/// A request to a relay that came to nothing. The message is ours, never the relay's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub struct TransportError {
    code: Code,
    message: String,
    retry_after: Option<Duration>,
}

impl TransportError {
    pub(super) fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), retry_after: None }
    }

    pub(super) fn unreachable(message: impl Into<String>) -> Self {
        Self::new(Code::RelayUnreachable, message)
    }

    pub(super) fn blocked(message: impl Into<String>) -> Self {
        Self::new(Code::EndpointBlocked, message)
    }

    pub(super) fn after(mut self, retry_after: Option<Duration>) -> Self {
        self.retry_after = retry_after;
        self
    }

    /// Its code.
    #[must_use]
    pub const fn code(&self) -> Code {
        self.code
    }

    /// The sentence for people.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Whether the same request may well succeed later.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        matches!(
            self.code,
            Code::RelayUnreachable
                | Code::RateLimited
                | Code::MailboxFull
                | Code::AuthCacheFull
                // The token was not the relay's to refuse; the next one is another.
                | Code::AuthReplayed
        )
    }

    /// How long the relay asks to be left alone, at most an hour.
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }
}

impl From<Error> for TransportError {
    fn from(error: Error) -> Self {
        Self::new(error.code(), error.message())
    }
}

impl From<HttpError> for TransportError {
    fn from(error: HttpError) -> Self {
        match error {
            HttpError::Blocked(error) => error.into(),
            HttpError::Redirected(_) | HttpError::Request => Self::blocked(error.to_string()),
            HttpError::TooLarge(_) => Self::new(Code::TooLarge, error.to_string()),
            _ => Self::unreachable(error.to_string()),
        }
    }
}
