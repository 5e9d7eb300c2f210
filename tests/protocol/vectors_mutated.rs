//! Real bytes, damaged: nothing panics, and whatever still passes is stable.

use std::sync::LazyLock;

use commsd::codec::cbor::decode;
use commsd::codec::time::UnixMillis;
use commsd::identity::device::DeviceId;
use commsd::mesh::wire::cose::CoseSign1;
use commsd::mesh::wire::frame::Frame;
use commsd::mesh::wire::name_claim::NameClaim;
use commsd::mesh::wire::notice::ParsedNotice;
use commsd::mesh::wire::revocation::{RevocationEntry, RevocationView};
use commsd::mesh::wire::room_path::{RoomPath, slug};
use commsd::mesh::wire::token::{ParsedToken, VerifyContext, parse_membership_proof, verify};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::support::{hex, lab, list, recordings, text};

static FRAMES: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let recorded = recordings().into_iter().flat_map(|(_, recording)| {
        let frames = recording["frames"].as_array().cloned().unwrap_or_default();
        frames.iter().map(|frame| hex(frame, "hex")).collect::<Vec<_>>()
    });
    let channels = list(&lab("secure-channel.json"), "cases");
    recorded.chain(channels.iter().map(|case| hex(&case["A"], "hello_hex"))).collect()
});

static TOKENS: LazyLock<Vec<(Vec<u8>, String)>> = LazyLock::new(|| {
    list(&lab("tokens-p256.json"), "tokens")
        .iter()
        .map(|token| (hex(token, "token_cbor_hex"), text(token, "token_text").to_owned()))
        .collect()
});

/// Bytes to write, to insert and to remove, anywhere.
type Edits = Vec<(Index, u8, u8)>;

fn edits() -> impl Strategy<Value = Edits> {
    prop::collection::vec((any::<Index>(), any::<u8>(), 0u8..4), 0..4)
}

fn damage(mut bytes: Vec<u8>, edits: &Edits) -> Vec<u8> {
    for (at, byte, how) in edits {
        if bytes.is_empty() {
            break;
        }
        let at = at.index(bytes.len());
        match how {
            0 | 1 => bytes[at] = *byte,
            2 => bytes.insert(at, *byte),
            _ => {
                bytes.remove(at);
            }
        }
    }
    bytes
}

/// Judges whatever was read; only that it comes back matters.
fn exercise(token: &CoseSign1) {
    let view = RevocationView::new();
    let context =
        VerifyContext { now: UnixMillis(1_800_000_000_000), bearer: None, revocations: &view };
    let _ = verify(&ParsedToken::parse(token), &context);
    let _ = RevocationEntry::parse(token);
    let _ = ParsedNotice::parse(token);
    assert_eq!(CoseSign1::from_text(&token.to_text()).unwrap().payload, token.payload);
}

proptest! {
    #[test]
    fn damaged_frames(which in any::<Index>(), edits in edits()) {
        let bytes = damage(which.get(&FRAMES).clone(), &edits);
        if let Ok(value) = decode(&bytes) {
            prop_assert_eq!(value.encode(), &bytes[..]);
        }
        if let Ok(frame) = Frame::decode(&bytes) {
            let encoded = frame.encode();
            // Unknown members are dropped, so the bytes may differ once, but not twice.
            prop_assert_eq!(Frame::decode(&encoded).unwrap().encode(), encoded);
            match frame {
                Frame::Gossip { peers } => {
                    for advert in peers {
                        let _ = advert.verify();
                    }
                }
                Frame::RevocationAnnounce { entries } => entries.iter().for_each(exercise),
                Frame::ManageRequest(request) => {
                    let _ = request.scope.path.as_deref().map(RoomPath::parse);
                    request.token.iter().for_each(exercise);
                }
                Frame::SecureHello(hello) => {
                    let _ = hello.verify(&hello.to_device);
                }
                _ => {}
            }
        }
    }

    #[test]
    fn damaged_tokens(which in any::<Index>(), edits in edits()) {
        let (encoded, text) = which.get(&TOKENS);
        if let Some(token) = CoseSign1::decode(&damage(encoded.clone(), &edits)) {
            exercise(&token);
        }
        let text = String::from_utf8_lossy(&damage(text.clone().into_bytes(), &edits)).into_owned();
        let _ = parse_membership_proof(&text);
        let _ = NameClaim::verify(&text, &DeviceId([0; 32]), UnixMillis(0));
    }

    #[test]
    fn any_text(text in ".{0,200}") {
        let _ = RoomPath::parse(&text);
        let _ = parse_membership_proof(&text);
        let _ = NameClaim::verify(&text, &DeviceId([0; 32]), UnixMillis(0));
        if let Some(name) = slug(&text) {
            prop_assert!(RoomPath::named(DeviceId([0; 32]), &name).is_some());
        }
    }
}
