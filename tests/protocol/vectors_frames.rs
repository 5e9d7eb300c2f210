//! Frames: upstream vectors, the reference's verdicts on odd frames, and everything that real
//! peers said in the recordings.

use commsd::mesh::wire::frame::{Frame, FrameError};
use commsd::mesh::wire::handshake::Handshake;
use serde_json::Value as Json;

use crate::support::{hex, lab, list, recordings, text, to_json, unhex, wire_mesh};

#[test]
fn upstream_frames_round_trip() {
    for (file, count) in [("frames.v1.json", 60), ("handshake.v1.json", 2)] {
        let Some(vectors) = wire_mesh(file) else { return };
        assert_eq!(vectors.len(), count);
        for vector in vectors {
            let name = text(&vector, "name");
            let bytes = hex(&vector, "wire_hex");
            let frame = Frame::decode(&bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(to_json(&frame.to_value()), vector["message"], "{name}");
            assert_eq!(frame.encode(), bytes, "{name}");
        }
    }
}

/// Frames that the reference takes and we do not, because no peer sends them: whole numbers as
/// floats (not canonical), and names that its unanchored patterns let through.
const STRICTER: [&str; 3] =
    ["version as float 1.0", "domain upper case", "domain with junk around"];

#[test]
fn odd_frames_meet_their_verdict() {
    let cases = list(&lab("cbor-negative.json"), "frames");
    assert_eq!(cases.len(), 77);
    for case in cases {
        let reason = text(&case, "reason");
        let effect = text(&case, "effect");
        let result = Frame::decode(&hex(&case, "hex"));
        if STRICTER.contains(&reason) {
            assert!(result.is_err() && effect == "accepted", "{reason}");
            continue;
        }
        match effect {
            "accepted" => {
                let frame = result.unwrap_or_else(|e| panic!("{reason}: {e}"));
                assert_eq!(frame.kind(), text(&case["seen_as"], "type"), "{reason}");
                if !reason.contains("undefined") && !reason.contains("integer-keyed") {
                    assert_eq!(to_json(&frame.to_value()), case["seen_as"], "{reason}");
                }
            }
            "dropped, connection goes on" => {
                let error = result.expect_err(reason);
                assert!(!error.ends_connection(), "{reason}: {error}");
            }
            "connection destroyed" => {
                assert!(matches!(result, Err(FrameError::NotCanonical(_))), "{reason}");
            }
            other => panic!("{reason}: what is {other}?"),
        }
    }
}

#[test]
fn recorded_frames_are_reproduced() {
    let mut seen = 0;
    for (file, recording) in recordings() {
        for frame in recording["frames"].as_array().into_iter().flatten() {
            reproduce(&file, frame, &hex(frame, "hex"));
            seen += 1;
        }
    }
    assert!(seen > 2_500, "{seen} frames only");
}

/// Recording 23: what the reference answered to strangers, and what well-formed things they said.
#[test]
fn frames_with_strangers_are_reproduced() {
    let recording = lab("23-stranger.json");
    let mut seen = 0;
    let mut odd = 0;
    for case in list(&recording, "cases") {
        for frame in case["received"].as_array().into_iter().flatten() {
            let Some(digits) = frame["hex"].as_str() else { continue };
            reproduce("23-stranger.json", frame, &unhex(digits));
            seen += 1;
        }
        for frame in case["sent"].as_array().into_iter().flatten() {
            let Some(digits) = frame["bytes_hex"].as_str() else { continue };
            for body in bodies(&unhex(digits)) {
                match Frame::decode(&body) {
                    Ok(frame) => {
                        assert_eq!(frame.encode(), body);
                        seen += 1;
                    }
                    Err(_) => odd += 1,
                }
            }
        }
    }
    assert!(seen > 150, "{seen} frames only");
    assert!((1..10).contains(&odd), "{odd} odd frames");
}

/// The whole bodies in a run of length-prefixed frames.
fn bodies(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut bodies = Vec::new();
    while let Some((prefix, rest)) = bytes.split_first_chunk::<4>() {
        let length = u32::from_be_bytes(*prefix) as usize;
        let Some((body, rest)) = rest.split_at_checked(length) else { break };
        bodies.push(body.to_vec());
        bytes = rest;
    }
    bodies
}

fn reproduce(file: &str, recorded: &Json, bytes: &[u8]) {
    let frame = Frame::decode(bytes).unwrap_or_else(|e| panic!("{file}: {e}: {recorded}"));
    assert_eq!(frame.encode(), bytes, "{file}: {recorded}");
    if recorded["decoded"].is_object() {
        assert_eq!(to_json(&frame.to_value()), recorded["decoded"], "{file}");
    }
}

#[test]
fn negotiation() {
    let cases = list(&lab("cbor-negative.json"), "negotiation");
    assert_eq!(cases.len(), 8);
    for case in cases {
        let side = |json: &Json| Handshake {
            version: json["version"].as_u64().unwrap(),
            domains: list(json, "domains").iter().map(|d| d.as_str().unwrap().to_owned()).collect(),
            params: None,
        };
        let agreed = side(&case["local"]).negotiate(&side(&case["remote"]));
        let expected = &case["result"];
        assert_eq!(Json::from(agreed.succeeded()), expected["ok"], "{case}");
        assert_eq!(Json::from(agreed.version), expected["version"], "{case}");
        assert_eq!(Json::from(agreed.shared_domains), expected["sharedDomains"], "{case}");
    }
}
