//! Answers of shared vaults, put together from their parts.

use std::time::Duration;

use sha2::{Digest as _, Sha256};

use super::Client;
use crate::api::types::{ApiError, VaultAnswer, VaultCallParams};

/// Bytes of a whole answer: more than any page that people write.
pub const MAX_ANSWER: u64 = 64 * 1024 * 1024;
/// Bytes of a part that is not the last: whoever sends crumbs keeps us for ever.
const MIN_PART: usize = 16 * 1024;
/// How often reading begins again when the vault changes meanwhile.
const TRIES: usize = 3;
/// How long the other side may take with one part (`mesh::node::services`).
const WAIT: Duration = Duration::from_secs(35);

impl Client {
    /// A command on a share: its whole answer as JSON text. A writing command is sent once.
    ///
    /// # Errors
    /// What the daemon or the other side says; `vault_changed` when the vault does not keep still;
    /// `answer_too_large` for one above `max` bytes; `malformed_response`.
    pub async fn vault_answer(
        &self,
        params: &VaultCallParams,
        max: u64,
    ) -> Result<String, ApiError> {
        for _ in 0..TRIES {
            if let Some(answer) = self.vault_parts(params, max).await? {
                return Ok(answer);
            }
        }
        Err(ApiError::new(
            "vault_changed",
            "the shared vault kept changing while it was read",
            "try again",
        ))
    }

    /// `None`: two parts are not of one answer.
    async fn vault_parts(
        &self,
        params: &VaultCallParams,
        max: u64,
    ) -> Result<Option<String>, ApiError> {
        let malformed = || {
            ApiError::new(
                "malformed_response",
                "the other side's answer cannot be put together",
                "update commsd there and here",
            )
        };
        let VaultAnswer { mut answer, offset, total, sha256 } =
            self.call_waiting(params.clone(), WAIT).await?;
        if total > max.min(MAX_ANSWER) {
            return Err(ApiError::new(
                "answer_too_large",
                format!("the answer has {total} bytes; at most {} are taken", max.min(MAX_ANSWER)),
                "ask for less: one page, or a narrower search",
            ));
        }
        let complete = answer.len() as u64 == total;
        if offset != 0 || (params.op.writes() && !complete) {
            return Err(malformed());
        }
        while (answer.len() as u64) < total {
            let at = answer.len() as u64;
            let next = VaultCallParams { offset: Some(at), ..params.clone() };
            let part = match self.call_waiting(next, WAIT).await {
                Ok(part) => part,
                // It has become shorter than what we have.
                Err(error) if error.code == "malformed_params" => return Ok(None),
                Err(error) => return Err(error),
            };
            if part.sha256 != sha256 || part.total != total {
                return Ok(None);
            }
            let last = at + part.answer.len() as u64 == total;
            if part.offset != at || (part.answer.len() < MIN_PART && !last) {
                return Err(malformed());
            }
            answer.push_str(&part.answer);
        }
        let whole = data_encoding::HEXLOWER.encode(&Sha256::digest(answer.as_bytes()));
        if answer.len() as u64 != total || whole != sha256 {
            return Err(malformed());
        }
        Ok(Some(answer))
    }
}
