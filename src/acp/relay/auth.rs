//! RelayAuth tokens (design 11.2): how a client makes one, and what a relay checks before it looks
//! at the nonce. Whether a nonce was seen is the relay's business; where a token travels is
//! the server's.

use data_encoding::BASE64URL_NOPAD;

use crate::acp::code::{Code, Error, Result};
use crate::acp::did::{Did, Secret};
use crate::acp::json::canonical;
use crate::acp::objects::{RelayAction, RelayAuth};
use crate::acp::sign::{Role, Signature, Signed as _};
use crate::acp::value::{Nonce, Time, UrlText, read_bytes};
use crate::codec::time::UnixMillis;
use crate::identity::entropy::Entropy;

/// Bytes of a token as text; real ones have about 650.
pub const MAX_TOKEN: usize = 2 * 1024;

/// How far `issuedAt` may be from the relay's clock on either side, ms.
pub const WINDOW_MS: u64 = 300_000;

/// A token that is good once, at one relay, for one action on the mailbox of `key`'s identity.
///
/// `audience` is the relay's origin, as [`crate::acp::endpoint::Endpoint::origin`] writes it.
///
/// # Errors
/// `BAD_FIELD` for an audience that is no line of 1 to 2,048 characters.
pub fn token(
    key: &Secret,
    action: RelayAction,
    audience: &str,
    now: UnixMillis,
    entropy: &mut dyn Entropy,
) -> Result<String> {
    let auth = RelayAuth {
        did: key.did(),
        action,
        audience: UrlText::parse(audience).map_err(|e| e.inside("audience"))?,
        issued_at: Time::from(now),
        nonce: Nonce::draw(entropy),
        signature: Signature::blank(Role::Recipient, key.did()),
    };
    Ok(BASE64URL_NOPAD.encode(&canonical(&auth.signed(key, now)?)?))
}

/// Reads a token; nothing in it is believed yet.
///
/// # Errors
/// `TOO_LARGE` beyond 2 KiB, `BAD_FIELD` for what is not base64url of canonical JSON, and the codes
/// of a closed object.
pub fn parse(token: &str) -> Result<RelayAuth> {
    if token.len() > MAX_TOKEN {
        return Err(Error::new(Code::TooLarge, "a RelayAuth token of more than 2 KiB"));
    }
    let bytes = BASE64URL_NOPAD
        .decode(token.as_bytes())
        .map_err(|_| Error::new(Code::BadField, "a RelayAuth token that is not base64url"))?;
    let auth: RelayAuth = read_bytes(&bytes, MAX_TOKEN)?;
    if canonical(&auth)? != bytes {
        return Err(Error::new(Code::BadField, "a RelayAuth token that is not canonical JSON"));
    }
    Ok(auth)
}

/// Checks everything but the nonce, in the order of design 11.2: mailbox, action, audience,
/// freshness, signature. `audiences` are the relay's own origins.
///
/// # Errors
/// As [`parse`]; then `AUTH_WRONG_MAILBOX`, `AUTH_WRONG_ACTION`, `AUTH_WRONG_AUDIENCE`,
/// `AUTH_STALE`, `AUTH_BAD_SIGNATURE`.
pub fn check(
    token: &str,
    mailbox: Did,
    action: RelayAction,
    audiences: &[String],
    now: UnixMillis,
) -> Result<RelayAuth> {
    let auth = parse(token)?;
    if auth.did != mailbox {
        return Err(Error::new(Code::AuthWrongMailbox, "the token is for another mailbox"));
    }
    if auth.action != action {
        let text = format!("the token is for {}, this takes one for {action}", auth.action);
        return Err(Error::new(Code::AuthWrongAction, text));
    }
    if !audiences.iter().any(|audience| **audience == *auth.audience) {
        return Err(Error::new(Code::AuthWrongAudience, "the token is for another relay"));
    }
    check_fresh(&auth, now)?;
    auth.verify().map_err(|_| {
        Error::new(Code::AuthBadSignature, "the token's signature is not its identity's")
    })?;
    Ok(auth)
}

/// Whether the token is of now, both ends of the window included. Judged again once the whole
/// request has been read.
///
/// # Errors
/// `AUTH_STALE`.
pub fn check_fresh(auth: &RelayAuth, now: UnixMillis) -> Result<()> {
    let issued = auth.issued_at.millis();
    if now.since(issued) > WINDOW_MS || issued.since(now) > WINDOW_MS {
        let text = "the token was issued more than 5 minutes from this relay's time";
        return Err(Error::new(Code::AuthStale, text));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::entropy::SeededEntropy;

    const NOW: UnixMillis = UnixMillis(1_796_083_200_000);
    const HERE: &str = "http://127.0.0.1:8787";

    fn judge(token: &str, mailbox: Did, action: RelayAction, at: u64) -> Option<Code> {
        let here = [HERE.to_owned()];
        check(token, mailbox, action, &here, UnixMillis(at)).err().map(|e| e.code())
    }

    #[test]
    fn what_is_wrong_first_is_said_first() {
        let mut entropy = SeededEntropy::new(3);
        let (bob, eve) = (Secret::draw(&mut entropy).unwrap(), Secret::draw(&mut entropy).unwrap());
        let good = token(&bob, RelayAction::Receive, HERE, NOW, &mut entropy).unwrap();
        assert!(good.len() < MAX_TOKEN);
        let (did, receive) = (bob.did(), RelayAction::Receive);
        assert_eq!(judge(&good, did, receive, NOW.0), None);
        // Both ends of the window, and one beyond each.
        assert_eq!(judge(&good, did, receive, NOW.0 + WINDOW_MS), None);
        assert_eq!(judge(&good, did, receive, NOW.0 - WINDOW_MS), None);
        for stale in [NOW.0 + WINDOW_MS + 1, NOW.0 - WINDOW_MS - 1] {
            assert_eq!(judge(&good, did, receive, stale), Some(Code::AuthStale));
        }
        // All of it wrong, then less and less.
        let elsewhere =
            token(&bob, RelayAction::Stream, "https://relay.example", NOW, &mut entropy).unwrap();
        let mut forged = parse(&elsewhere).unwrap();
        forged.signature.value.0[5] ^= 1;
        let text = |auth: &RelayAuth| BASE64URL_NOPAD.encode(&canonical(auth).unwrap());
        assert_eq!(judge(&text(&forged), eve.did(), receive, 0), Some(Code::AuthWrongMailbox));
        assert_eq!(judge(&text(&forged), did, receive, 0), Some(Code::AuthWrongAction));
        forged.action = receive;
        assert_eq!(judge(&text(&forged), did, receive, 0), Some(Code::AuthWrongAudience));
        forged.audience = UrlText::parse(HERE).unwrap();
        assert_eq!(judge(&text(&forged), did, receive, 0), Some(Code::AuthStale));
        assert_eq!(judge(&text(&forged), did, receive, NOW.0), Some(Code::AuthBadSignature));
        // Another's signature is a bad one, whatever it calls itself.
        let stolen = RelayAuth { did: eve.did(), ..parse(&good).unwrap() };
        let code = judge(&text(&stolen), eve.did(), receive, NOW.0);
        assert_eq!(code, Some(Code::AuthBadSignature));
    }

    #[test]
    fn only_one_text_is_a_token() {
        let mut entropy = SeededEntropy::new(4);
        let bob = Secret::draw(&mut entropy).unwrap();
        let good = token(&bob, RelayAction::Subscribe, HERE, NOW, &mut entropy).unwrap();
        let json = BASE64URL_NOPAD.decode(good.as_bytes()).unwrap();
        let spaced = [b" ".as_slice(), &json].concat();
        for (bad, code) in [
            (String::new(), Code::BadJson),
            ("!".into(), Code::BadField),
            (format!("{good}="), Code::BadField),
            (BASE64URL_NOPAD.encode(&spaced), Code::BadField),
            (BASE64URL_NOPAD.encode(b"{}"), Code::MissingMember),
            ("A".repeat(MAX_TOKEN + 1), Code::TooLarge),
        ] {
            assert_eq!(parse(&bad).unwrap_err().code(), code, "{bad}");
        }
        assert!(token(&bob, RelayAction::Receive, "", NOW, &mut entropy).is_err());
    }
}
