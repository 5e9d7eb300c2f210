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

/// At most [`MAX_CACHED_TOKENS`] parsed tokens; the one added first makes room for the next.
#[derive(Debug, Default)]
pub struct TokenCache {
    parsed: HashMap<[u8; 32], Arc<ParsedToken>>,
    order: VecDeque<[u8; 32]>,
    /// The one asked for last: most are presented many times in a row, and comparing takes a tenth
    /// of the time that hashing takes.
    last: Option<(CoseSign1, Arc<ParsedToken>)>,
}

impl TokenCache {
    /// An empty cache.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The parsed form of `token`, parsing it if it is not known.
    pub fn get_or_parse(&mut self, token: &CoseSign1) -> Arc<ParsedToken> {
        if let Some((last, parsed)) = &self.last
            && last == token
        {
            return Arc::clone(parsed);
        }
        let encoded = token.encode();
        let digest = Sha256::digest(&encoded).into();
        let parsed = match self.parsed.get(&digest) {
            Some(parsed) => Arc::clone(parsed),
            None => Arc::new(ParsedToken::parse(token)),
        };
        if encoded.len() <= MAX_CACHED_TOKEN_BYTES {
            self.keep(digest, &parsed);
            self.last = Some((token.clone(), Arc::clone(&parsed)));
        }
        parsed
    }

    fn keep(&mut self, digest: [u8; 32], parsed: &Arc<ParsedToken>) {
        if self.parsed.insert(digest, Arc::clone(parsed)).is_some() {
            return;
        }
        self.order.push_back(digest);
        if self.order.len() > MAX_CACHED_TOKENS
            && let Some(oldest) = self.order.pop_front()
        {
            self.parsed.remove(&oldest);
        }
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

    fn knows(cache: &TokenCache, token: &CoseSign1) -> bool {
        let digest: [u8; 32] = Sha256::digest(token.encode()).into();
        cache.parsed.contains_key(&digest)
    }

    #[test]
    fn the_oldest_makes_room_and_long_tokens_are_not_kept() {
        let mut cache = TokenCache::new();
        for n in 0..=MAX_CACHED_TOKENS {
            let first = cache.get_or_parse(&token(n, 1));
            assert!(Arc::ptr_eq(&first, &cache.get_or_parse(&token(n, 1))));
        }
        assert!(!knows(&cache, &token(0, 1)) && knows(&cache, &token(1, 1)));
        assert_eq!((cache.parsed.len(), cache.order.len()), (MAX_CACHED_TOKENS, MAX_CACHED_TOKENS));
        let known = cache.get_or_parse(&token(1, 1));
        assert!(Arc::ptr_eq(&known, &cache.get_or_parse(&token(1, 1))));
        cache.get_or_parse(&token(0, MAX_CACHED_TOKEN_BYTES));
        assert!(!knows(&cache, &token(0, MAX_CACHED_TOKEN_BYTES)));
        assert_eq!(cache.last.as_ref().map(|(last, _)| last), Some(&token(1, 1)));
    }

    #[test]
    fn tokens_that_differ_anywhere_are_not_the_same() {
        let mut cache = TokenCache::new();
        let base = token(1, 4);
        let parsed = cache.get_or_parse(&base);
        for other in [
            CoseSign1 { protected: vec![9], ..base.clone() },
            CoseSign1 { unprotected: Value::map([("a", Value::Null)]), ..base.clone() },
            CoseSign1 { payload: Some(vec![1; 4]), ..base.clone() },
            CoseSign1 { payload: None, ..base.clone() },
            CoseSign1 { signature: vec![0], ..base.clone() },
        ] {
            assert!(!Arc::ptr_eq(&parsed, &cache.get_or_parse(&other)));
            assert!(Arc::ptr_eq(&parsed, &cache.get_or_parse(&base)));
        }
    }
}
