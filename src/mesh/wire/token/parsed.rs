//! The first half of verification: decode a chain and check its signatures.

use super::super::capability::MANAGE_GRANT;
use super::super::cose::CoseSign1;
use super::condition::{self, Condition};
use super::{TokenClaims, TokenError};

/// Most tokens in a chain, the presented one included.
pub const MAX_CHAIN_LINKS: usize = 64;

/// A token and everything that it hangs from, decoded, signatures judged.
///
/// Parsing never fails: what is wrong is remembered and reported by verification when its turn
/// in the order of checks comes. A token is followed by its parent or its authoriser, never both,
/// so a chain is a list; and it contains what it hangs from as bytes, so it cannot be a cycle.
#[derive(Debug)]
pub struct ParsedToken {
    /// From the presented token to the root; empty when already the presented one is unreadable.
    pub(super) links: Vec<Link>,
    /// Why the token after the last link cannot be read, if that is how the chain ends.
    pub(super) broken: Option<TokenError>,
}

/// One token of a chain.
#[derive(Debug)]
pub(super) struct Link {
    /// Without the nested tokens and unknown claims, which would only cost memory here.
    pub claims: TokenClaims,
    pub signature_verifies: bool,
    pub issuer_is_key: bool,
    pub conditions: Conditions,
    pub next: Next,
}

#[derive(Debug)]
pub(super) enum Conditions {
    Unreadable,
    All(Vec<Condition>),
}

/// What a token hangs from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Root,
    Parent,
    Authoriser,
    /// Both, which is refused.
    Both,
}

impl ParsedToken {
    /// Decodes the chain of `token` and checks its signatures, as far as they can matter: what
    /// hangs below a bad signature is not looked at.
    #[must_use]
    pub fn parse(token: &CoseSign1) -> Self {
        let mut parsed = Self { links: Vec::new(), broken: None };
        let mut nested = match parsed.push(token) {
            Ok(nested) => nested,
            Err(error) => return Self { broken: Some(error), ..parsed },
        };
        while let Some(encoded) = nested {
            let next = CoseSign1::decode(&encoded).ok_or(TokenError::Malformed);
            match next.and_then(|token| parsed.push(&token)) {
                Ok(next) => nested = next,
                Err(error) => return Self { broken: Some(error), ..parsed },
            }
        }
        parsed
    }

    /// The claims of the presented token, unverified.
    #[must_use]
    pub fn claims(&self) -> Option<&TokenClaims> {
        self.links.first().map(|link| &link.claims)
    }

    /// Adds a link and returns the encoded token that it hangs from.
    fn push(&mut self, token: &CoseSign1) -> Result<Option<Vec<u8>>, TokenError> {
        if token.payload.is_some() && self.links.len() == MAX_CHAIN_LINKS {
            return Err(TokenError::ChainTooDeep);
        }
        let mut claims = TokenClaims::of(token).ok_or(TokenError::Malformed)?;
        claims.extra = Vec::new();
        let (next, nested) = match (claims.parent.take(), claims.authorised_by.take()) {
            (None, None) => (Next::Root, None),
            (Some(parent), None) => (Next::Parent, Some(parent)),
            (None, Some(authoriser)) => (Next::Authoriser, Some(authoriser)),
            (Some(_), Some(_)) => (Next::Both, None),
        };
        let issuer_is_key = claims.issuer_key.device() == claims.issuer;
        let signature_verifies = token.verify(&claims.issuer_key);
        let conditions = match claims.conditions.take() {
            None => Conditions::All(Vec::new()),
            Some(encoded) => {
                condition::parse(&encoded).map_or(Conditions::Unreadable, Conditions::All)
            }
        };
        let hopeless = !issuer_is_key
            || !signature_verifies
            || (next == Next::Parent && claims.capability == MANAGE_GRANT);
        self.links.push(Link { claims, signature_verifies, issuer_is_key, conditions, next });
        Ok(nested.filter(|_| !hopeless))
    }
}
