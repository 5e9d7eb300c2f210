//! Parsed tokens by digest: peers present the same token with every request, and its signatures
//! never change.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::super::cose::CoseSign1;
use super::ParsedToken;

/// Most tokens kept: a few for each of the rooms and conversations of a busy machine.
pub const MAX_CACHED_TOKENS: usize = 1024;

/// Longest encoded token that is kept. Real ones have half a kilobyte, with one delegation one
/// kilobyte; longer chains are parsed every time, so that a peer cannot make the cache large.
pub const MAX_CACHED_TOKEN_BYTES: usize = 8 * 1024;

/// SHA-256 of the encoded token: its key in a [`TokenCache`].
#[must_use]
pub fn token_digest(token: &CoseSign1) -> [u8; 32] {
    Sha256::digest(token.encode()).into()
}

/// At most [`MAX_CACHED_TOKENS`] parsed tokens; the one added first makes room for the next.
#[derive(Debug, Default)]
pub struct TokenCache {
    parsed: HashMap<[u8; 32], Arc<ParsedToken>>,
    order: VecDeque<[u8; 32]>,
}

impl TokenCache {
    /// An empty cache.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The parsed token under `digest` ([`token_digest`]).
    #[must_use]
    pub fn get(&self, digest: &[u8; 32]) -> Option<Arc<ParsedToken>> {
        self.parsed.get(digest).cloned()
    }

    /// Keeps what `token` was parsed to.
    pub fn insert(&mut self, token: &CoseSign1, parsed: Arc<ParsedToken>) {
        let encoded = token.encode();
        if encoded.len() > MAX_CACHED_TOKEN_BYTES {
            return;
        }
        let digest: [u8; 32] = Sha256::digest(encoded).into();
        if self.parsed.insert(digest, parsed).is_some() {
            return;
        }
        self.order.push_back(digest);
        if self.order.len() > MAX_CACHED_TOKENS
            && let Some(oldest) = self.order.pop_front()
        {
            self.parsed.remove(&oldest);
        }
    }

    /// The parsed form of `token`, parsing it if it is not known.
    pub fn get_or_parse(&mut self, token: &CoseSign1) -> Arc<ParsedToken> {
        if let Some(parsed) = self.get(&token_digest(token)) {
            return parsed;
        }
        let parsed = Arc::new(ParsedToken::parse(token));
        self.insert(token, Arc::clone(&parsed));
        parsed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::cbor::Value;

    fn token(n: usize, payload: usize) -> CoseSign1 {
        CoseSign1 {
            protected: n.to_be_bytes().to_vec(),
            unprotected: Value::Map(Vec::new()),
            payload: Some(vec![0; payload]),
            signature: Vec::new(),
        }
    }

    #[test]
    fn the_oldest_makes_room_and_long_tokens_are_not_kept() {
        let mut cache = TokenCache::new();
        for n in 0..=MAX_CACHED_TOKENS {
            cache.get_or_parse(&token(n, 1));
            cache.get_or_parse(&token(n, 1));
        }
        assert!(cache.get(&token_digest(&token(0, 1))).is_none());
        assert!(cache.get(&token_digest(&token(1, 1))).is_some());
        assert_eq!(cache.parsed.len(), MAX_CACHED_TOKENS);
        cache.get_or_parse(&token(0, MAX_CACHED_TOKEN_BYTES));
        assert!(cache.get(&token_digest(&token(0, MAX_CACHED_TOKEN_BYTES))).is_none());
    }
}
