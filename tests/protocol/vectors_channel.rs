//! The secure channel, the coordinator election and machine-name claims against what the
//! reference really did.

use commsd::codec::time::UnixMillis;
use commsd::identity::device::{DeviceId, DeviceKey};
use commsd::mesh::wire::claim::{Claim, Evaluation};
use commsd::mesh::wire::frame::{Frame, SecureHello};
use commsd::mesh::wire::name_claim::NameClaim;
use commsd::mesh::wire::secure_channel::{Channel, ChannelError, Ephemeral};
use serde_json::Value as Json;

use crate::support::{hex, lab, list, text};

struct End {
    key: DeviceKey,
    ephemeral: Ephemeral,
    hello: SecureHello,
}

fn pkcs8(json: &Json, member: &str) -> DeviceKey {
    let body = data_encoding::BASE64.encode(&hex(json, member));
    let lines: Vec<&str> =
        body.as_bytes().chunks(64).map(|line| std::str::from_utf8(line).unwrap()).collect();
    let pem =
        format!("-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n", lines.join("\n"));
    DeviceKey::from_pkcs8_pem(&pem).unwrap()
}

fn end(json: &Json) -> End {
    let key = pkcs8(json, "identity_pkcs8");
    assert_eq!(key.id().hex(), text(json, "device"));
    let Ok(Frame::SecureHello(hello)) = Frame::decode(&hex(json, "hello_hex")) else {
        panic!("no hello")
    };
    let ephemeral = Ephemeral { key: pkcs8(json, "ephemeral_pkcs8"), nonce: hello.nonce };
    assert_eq!(*ephemeral.key.public_key(), hello.ephemeral_key);
    End { key, ephemeral, hello }
}

#[test]
fn secure_channel() {
    let cases = list(&lab("secure-channel.json"), "cases");
    assert_eq!(cases.len(), 4);
    for case in cases {
        let (a, b) = (end(&case["A"]), end(&case["B"]));
        let verdicts = &case["verdicts"];
        assert_eq!(a.hello.verify(&b.key.id()), Ok(a.key.id()));
        assert_eq!(b.hello.verify(&a.key.id()), Ok(b.key.id()));
        let third = DeviceId([1; 32]);
        let wrong = a.hello.verify(&third).unwrap_err().code();
        assert_eq!(verdicts["A_hello_at_third"], wrong);
        let mut changed = a.hello.clone();
        changed.nonce[0] ^= 1;
        let wrong = changed.verify(&b.key.id()).unwrap_err().code();
        assert_eq!(verdicts["A_hello_with_changed_nonce"], wrong);

        let secret = a.ephemeral.key.ecdh(&b.hello.ephemeral_key).unwrap();
        assert_eq!(secret.as_slice(), hex(&case, "ecdh_secret_hex"));
        let mut at_a = Channel::new(a.key.id(), &a.ephemeral, b.key.id(), &b.hello).unwrap();
        let mut at_b = Channel::new(b.key.id(), &b.ephemeral, a.key.id(), &a.hello).unwrap();
        // Sealing is deterministic, so equal ciphertexts prove equal keys, nonces and data.
        for sealed in list(&case, "sealed") {
            let (from, to) = match text(&sealed, "from") {
                "A" => (&mut at_a, &mut at_b),
                _ => (&mut at_b, &mut at_a),
            };
            let plaintext = hex(&sealed, "plaintext_hex");
            let frame = from.seal(&plaintext).unwrap();
            assert_eq!(frame.encode(), hex(&sealed, "frame_hex"));
            let Ok(Frame::SecureData { counter, ciphertext }) = Frame::decode(&frame.encode())
            else {
                panic!("not secure-data")
            };
            assert_eq!(counter, sealed["counter"].as_u64().unwrap());
            let changed = to.open(counter + 1, &ciphertext);
            assert_eq!(changed, Err(ChannelError::DoesNotOpen));
            assert_eq!(verdicts["changed_counter_opens"], false);
            assert_eq!(to.open(counter, &ciphertext), Ok(plaintext));
            assert_eq!(to.open(counter, &ciphertext), Err(ChannelError::OldCounter));
            assert_eq!(verdicts["replayed_counter_opens"], false);
        }
    }
}

#[test]
fn coordinator_election() {
    let claim = |json: &Json, hint: &str| {
        Some(Claim {
            term: json["term"].as_u64()?,
            coordinator: DeviceId::parse(text(json, "coordinator")).unwrap(),
            capacity_hint: json[hint].as_u64(),
        })
    };
    let vectors = list(&lab("coordinator-election.json"), "vectors");
    assert_eq!(vectors.len(), 13);
    let mut odd_terms = 0;
    for vector in vectors {
        let name = text(&vector, "name");
        let own = DeviceId::parse(text(&vector, "own_device")).unwrap();
        let mut incumbent: Option<Claim> = None;
        for step in list(&vector, "steps") {
            if step["op"] == "claim" {
                let raised = Claim::raised_by(own, incumbent.as_ref());
                assert_eq!(raised, claim(&step["frame"], "capacity-hint"), "{name}");
                assert_eq!(raised.is_none(), step["throws"].is_string(), "{name}");
                incumbent = raised.or(incumbent);
            } else if let Some(incoming) = claim(&step["frame"], "capacity-hint") {
                let outcome = incoming.evaluate(incumbent.as_ref());
                let outcome_text = match outcome {
                    Evaluation::Accepted => "accepted",
                    Evaluation::Retained => "retained",
                    Evaluation::Rejected => "rejected",
                };
                assert_eq!(step["outcome"], outcome_text, "{name}");
                if outcome == Evaluation::Accepted {
                    incumbent = Some(incoming);
                }
            } else {
                // Negative and fractional terms never become a frame here.
                assert_eq!(step["outcome"], "rejected", "{name}");
                odd_terms += 1;
            }
            assert_eq!(incumbent, claim(&step["incumbent"], "capacity_hint"), "{name}");
            let is_self = incumbent.is_some_and(|claim| claim.coordinator == own);
            assert_eq!(step["is_self"], is_self, "{name}");
        }
    }
    assert_eq!(odd_terms, 2);
}

#[test]
fn name_claims() {
    let cases = list(&lab("tokens-p256.json"), "name_claims");
    assert_eq!(cases.len(), 14);
    for case in cases {
        let name = text(&case, "name");
        let subject = DeviceId::parse(&text(&case, "expected_subject").to_lowercase()).unwrap();
        let now = UnixMillis(case["verify_at_ms"].as_u64().unwrap());
        match NameClaim::verify(text(&case, "claim"), &subject, now) {
            Ok(claim) => {
                assert_eq!(case["expected"]["name"], claim.name, "{name}");
                let expires = case["expected"]["expires"].as_f64().unwrap();
                assert_eq!(claim.expires.0, expires as u64, "{name}");
            }
            Err(error) => assert_eq!(case["expected"]["reason"], error.code(), "{name}"),
        }
    }
}

/// Our claim and the reference's differ in nothing but the signature's random part.
#[test]
fn own_name_claims_have_the_reference_form() {
    let file = lab("tokens-p256.json");
    let case = list(&file, "name_claims").into_iter().find(|c| c["name"] == "claim-ok").unwrap();
    let key = DeviceKey::from_pkcs8_pem(text(&file["keys"]["M"], "private_key_pkcs8_pem")).unwrap();
    let expires = UnixMillis(case["expected"]["expires"].as_u64().unwrap());
    let ours = NameClaim::sign(&key, "build box", expires).unwrap();
    let readable = |claim: &str| {
        let json = data_encoding::BASE64URL_NOPAD.decode(claim.as_bytes()).unwrap();
        let json = String::from_utf8(json).unwrap();
        json.split_once("\"signature\"").unwrap().0.to_owned()
    };
    assert_eq!(readable(&ours), readable(text(&case, "claim")));
}
