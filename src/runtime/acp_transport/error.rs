//! Why a relay did not do what was asked: a code of the closed list, whether to come again, and when.

use std::time::Duration;

use crate::acp::code::{Code, Error};
use crate::runtime::http_client::HttpError;

/// The longest time that a relay may ask to be left alone; it would hold up all mail that goes its way.
const LONGEST_ASKED: Duration = Duration::from_secs(600);

/// A request to a relay that came to nothing. The message is ours, never the relay's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub struct TransportError {
    code: Code,
    message: String,
    retry_after: Option<Duration>,
    in_doubt: bool,
}

impl TransportError {
    pub(super) fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), retry_after: None, in_doubt: false }
    }

    pub(super) fn unreachable(message: impl Into<String>) -> Self {
        Self::new(Code::RelayUnreachable, message)
    }

    pub(super) fn blocked(message: impl Into<String>) -> Self {
        Self::new(Code::EndpointBlocked, message)
    }

    pub(super) fn after(mut self, retry_after: Option<Duration>) -> Self {
        self.retry_after = retry_after.map(|wait| wait.min(LONGEST_ASKED));
        self
    }

    /// As an error of a request that the relay may have done all the same.
    pub(super) const fn in_doubt(mut self) -> Self {
        self.in_doubt = true;
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

    /// Whether the relay may have done what was asked all the same: what came back, if anything did, is
    /// no answer of a relay, so it says neither.
    #[must_use]
    pub const fn is_in_doubt(&self) -> bool {
        self.in_doubt
    }

    /// Whether the same request may well succeed later.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        self.in_doubt
            || matches!(
                self.code,
                Code::RelayUnreachable
                | Code::RateLimited
                | Code::MailboxFull
                | Code::AuthCacheFull
                // The token was not the relay's to refuse; the next one is another.
                | Code::AuthReplayed
            )
    }

    /// How long the relay asks to be left alone, ten minutes at most.
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
            HttpError::Request => Self::blocked(error.to_string()),
            HttpError::Redirected(_) => Self::blocked(error.to_string()).in_doubt(),
            HttpError::TooLarge(_) => Self::new(Code::TooLarge, error.to_string()).in_doubt(),
            HttpError::Unresolved | HttpError::Unreachable(_) | HttpError::Tls(_) => {
                Self::unreachable(error.to_string())
            }
            HttpError::Timeout | HttpError::Closed | HttpError::NotHttp => {
                Self::unreachable(error.to_string()).in_doubt()
            }
        }
    }
}
