//! What must hold for any bytes that a stranger sends, as plain functions: `fuzz_targets` gives
//! them to libFuzzer, `tests/protocol/corpus.rs` runs them over `corpus` on stable.

use commsd::api::types::rpc::{self, FromDaemon};
use commsd::api::types::{ApiError, MAX_REQUEST_ID_BYTES, RequestId};
use commsd::codec::cbor::decode;
use commsd::codec::time::UnixMillis;
use commsd::mcp::framing::{Decoder, Form};
use commsd::mesh::checked::Checked;
use commsd::mesh::first_contact::{Datagram, MAX_DATAGRAM};
use commsd::mesh::wire::cose::CoseSign1;
use commsd::mesh::wire::frame::Frame;
use commsd::mesh::wire::revocation::RevocationView;
use commsd::mesh::wire::token::{
    MAX_CHAIN_LINKS, ParsedToken, TokenCache, TokenClaims, VerifyContext, verify,
};

/// A target: panics when something does not hold for these bytes.
#[allow(dead_code, reason = "the fuzz targets name theirs")]
pub type Target = fn(&[u8]);

/// All targets by name.
#[allow(dead_code, reason = "each fuzz target uses one of them")]
pub const ALL: [(&str, Target); 5] = [
    ("frame", frame),
    ("token", token),
    ("beacon", beacon),
    ("api_line", api_line),
    ("mcp_frames", mcp_frames),
];

/// One frame of a peer, decoded and checked.
#[allow(dead_code, reason = "each fuzz target uses one of them")]
pub fn frame(bytes: &[u8]) {
    let value = decode(bytes);
    if let Ok(value) = &value {
        // There is one encoding of a value, and this is it.
        assert_eq!(value.encode(), bytes);
    }
    let frame = match Frame::decode(bytes) {
        Ok(frame) => frame,
        Err(error) => {
            // Only what is not canonical ends a connection.
            assert_eq!(error.ends_connection(), value.is_err());
            return;
        }
    };
    // Unknown members are dropped, so the bytes may differ once, but not twice.
    let encoded = frame.encode();
    assert_eq!(Frame::decode(&encoded).unwrap().encode(), encoded);
    let mut tokens = TokenCache::new();
    let first = Checked::check(frame.clone(), &mut tokens);
    if let Checked::Gossip(adverts) = &first {
        for advert in adverts {
            assert_eq!(advert.identity_key.device(), advert.device);
            assert!(advert.identity_key.verify(&advert.signing_input(), &advert.signature));
        }
    }
    if let Checked::Request { token: Some(parsed), raw_token: Some(token), .. } = &first {
        // Seen before is judged as seen first.
        let again = tokens.get_or_parse(token);
        assert_eq!(verdicts(parsed), verdicts(&again));
        token_holds(token);
    }
}

/// A token as bytes, and as the text of a proof.
#[allow(dead_code, reason = "each fuzz target uses one of them")]
pub fn token(bytes: &[u8]) {
    let text = std::str::from_utf8(bytes).ok().and_then(|text| CoseSign1::from_text(text).ok());
    for token in CoseSign1::decode(bytes).into_iter().chain(text) {
        token_holds(&token);
    }
}

/// Moments at which tokens are judged: never, usually, at the end of time.
const MOMENTS: [u64; 3] = [0, 1_800_000_000_000, u64::MAX];

/// Whether a token passes at each of [`MOMENTS`], for its own bearer.
fn verdicts(parsed: &ParsedToken) -> Vec<Result<(), &'static str>> {
    let revocations = RevocationView::new();
    let bearer = parsed.claims().map(|claims| claims.bearer);
    MOMENTS
        .map(|now| {
            let context = VerifyContext { now: UnixMillis(now), bearer, revocations: &revocations };
            verify(parsed, &context).map(|_| ()).map_err(|error| error.code())
        })
        .to_vec()
}

fn token_holds(token: &CoseSign1) {
    // By bytes: a header may hold a NaN, which equals nothing.
    let encoded = token.encode();
    assert_eq!(CoseSign1::decode(&encoded).unwrap().encode(), encoded);
    // The text has no place for an unprotected header's odd values, but for all that is signed.
    let read_back = CoseSign1::from_text(&token.to_text()).unwrap();
    assert_eq!(read_back.protected, token.protected);
    assert_eq!(read_back.payload, token.payload);
    assert_eq!(read_back.signature, token.signature);

    let parsed = ParsedToken::parse(token);
    let revocations = RevocationView::new();
    for now in MOMENTS.map(UnixMillis) {
        let context = VerifyContext { now, bearer: None, revocations: &revocations };
        let Ok(verified) = verify(&parsed, &context) else { continue };
        assert!(verified.depth < MAX_CHAIN_LINKS);
        let claims = TokenClaims::of(token).unwrap();
        assert_eq!(claims.issuer_key.device(), claims.issuer);
        assert!(token.verify(&claims.issuer_key));
        assert!(now < claims.expires && claims.not_before.is_none_or(|from| from <= now));
        for link in [verified.claims, verified.root] {
            assert!(now < link.expires && link.not_before.is_none_or(|from| from <= now));
        }
        // Somebody else's it is not, and not one bit of it can be another.
        let somebody = Some(verified.root.issuer).filter(|issuer| *issuer != claims.bearer);
        if somebody.is_some() {
            let context = VerifyContext { now, bearer: somebody, revocations: &revocations };
            assert_eq!(verify(&parsed, &context).unwrap_err().code(), "bearer_mismatch");
        }
        let mut payload = token.payload.clone().unwrap();
        if let Some(last) = payload.last_mut() {
            *last ^= 1;
        }
        let changed = ParsedToken::parse(&CoseSign1 { payload: Some(payload), ..token.clone() });
        let context = VerifyContext { now, bearer: None, revocations: &revocations };
        assert!(verify(&changed, &context).is_err());
    }
}

/// A datagram of first contact.
#[allow(dead_code, reason = "each fuzz target uses one of them")]
pub fn beacon(bytes: &[u8]) {
    let Some(datagram) = Datagram::parse(bytes) else { return };
    assert!(bytes.len() <= MAX_DATAGRAM);
    let encoded = datagram.encode();
    assert!(encoded.len() <= MAX_DATAGRAM);
    assert_eq!(Datagram::parse(&encoded), Some(datagram));
}

/// A line of the local API, read by either end.
#[allow(dead_code, reason = "each fuzz target uses one of them")]
pub fn api_line(bytes: &[u8]) {
    match rpc::read_request(bytes) {
        Err((id, error)) => refused(id.as_ref(), error),
        Ok(raw) => {
            if let RequestId::Text(text) = &raw.id {
                assert!(text.len() <= MAX_REQUEST_ID_BYTES);
            }
            let line = rpc::request_line(&raw.id, &raw.method, &raw.params).unwrap();
            assert_eq!(rpc::read_request(&line).as_ref(), Ok(&raw));
            let id = raw.id.clone();
            match raw.request() {
                Ok((answered, request)) => {
                    assert_eq!(answered, id);
                    assert!(commsd::api::types::Request::METHODS.contains(&request.method()));
                }
                Err((answered, error)) => {
                    assert_eq!(answered, id);
                    refused(Some(&id), error);
                }
            }
        }
    }
    if let Ok(FromDaemon::Notification { method, params }) = rpc::read_from_daemon(bytes) {
        let mut line = Vec::new();
        assert!(rpc::notification_line(&mut line, &method, &params));
        let again = rpc::read_from_daemon(&line);
        assert_eq!(again, Ok(FromDaemon::Notification { method, params }));
    }
}

/// What an MCP client sends: lines, and bodies with heads.
#[allow(dead_code, reason = "each fuzz target uses one of them")]
pub fn mcp_frames(bytes: &[u8]) {
    let decoded = |bytes: &[u8], size| {
        let (mut decoder, mut out) = (Decoder::default(), Vec::new());
        bytes.chunks(size).for_each(|piece| decoder.feed(piece, &mut out));
        let over = decoder.is_over();
        decoder.finish(&mut out);
        (out, over, decoder.form())
    };
    let whole = decoded(bytes, bytes.len().max(1));
    for size in [1, 3, 4096] {
        assert_eq!(decoded(bytes, size), whole);
    }
    let (out, over, form) = whole;
    // Whatever is said of a head that is refused is short.
    assert!(out.len() <= bytes.len() + 100);
    if !bytes.to_ascii_lowercase().windows(8).any(|eight| eight == b"content-") {
        assert!(out == bytes && !over && form != Some(Form::Heads));
    }
    // A line with a head before it is the same line.
    for line in out.split_inclusive(|byte| *byte == b'\n').filter(|line| line.ends_with(b"\n")) {
        let body = &line[..line.len() - 1];
        if !body.is_empty() && !body.contains(&b'\r') {
            let head = format!("Content-Length: {}\r\n\r\n", body.len());
            let framed = [head.as_bytes(), body].concat();
            assert_eq!(decoded(&framed, 7), (line.to_vec(), false, Some(Form::Heads)));
        }
    }
}

/// An error reaches the client as it is, on one line.
fn refused(id: Option<&RequestId>, error: ApiError) {
    assert!(!error.code.is_empty() && !error.message.is_empty());
    let mut line = Vec::new();
    rpc::error_line(&mut line, id, error.clone());
    assert_eq!(line.iter().position(|byte| *byte == b'\n'), Some(line.len() - 1));
    assert_eq!(rpc::read_from_daemon(&line), Ok(FromDaemon::Answer(id.cloned(), Err(error))));
}
