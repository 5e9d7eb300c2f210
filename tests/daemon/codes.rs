//! Connection codes between the users of two daemons: made and redeemed by the tool and by the command
//! line.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Output;

use commsd::api::types::{
    TrustCodeCreateParams, TrustCodeRedeemParams, TrustCodeRedeemed, TrustListParams,
};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::daemon::{Agent, Daemon, Ports};

async fn commsd(home: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_commsd"))
        .arg("--home")
        .arg(home)
        .args(args)
        .current_dir(home)
        .output()
        .await
        .unwrap()
}

async fn redeem(agent: &Agent, line: &str) -> Result<TrustCodeRedeemed, String> {
    let params = TrustCodeRedeemParams {
        code: line.to_owned(),
        expires_at: None,
        device: None,
        signature: None,
        public_key: None,
        fingerprint: None,
    };
    agent.client.call(params).await.map_err(|error| error.code)
}

async fn tool(agent: &Agent, call: Value) -> (String, bool) {
    let Value::Object(call) = call else { unreachable!() };
    let result = agent.client.call(commsd::api::types::ActionParams(call)).await.unwrap();
    (result.content, result.is_error)
}

fn ledger(daemon: &Daemon, agent: &str) -> Value {
    let file = daemon.home.path().join(format!("agent-comms/connection-codes-cli--{agent}.json"));
    let mode = std::fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

#[tokio::test]
async fn a_code_makes_the_device_that_it_names_trusted_once() {
    let (here, there) = tokio::join!(Daemon::start(Ports::free()), Daemon::start(Ports::free()));
    let (ann, bob, carl) =
        (here.agent("ann").await, there.agent("bob").await, there.agent("carl").await);
    let (text, error) =
        tool(&ann, json!({"action": "gateway_generate_connection_code", "ttlMs": 60_000})).await;
    assert!(!error && text.starts_with("Unsigned code"), "{text}");
    let line = text.lines().last().unwrap();
    let code: Value = serde_json::from_str(line).unwrap();
    let members: Vec<_> = code.as_object().unwrap().keys().collect();
    assert_eq!(members, ["code", "expiresAt", "deviceId"]);
    assert_eq!(code["deviceId"], ann.id.as_str());
    let nonce = code["code"].as_str().unwrap();
    let issued = json!({"expiresAt": code["expiresAt"], "deviceId": ann.id});
    assert_eq!(ledger(&here, "ann"), json!({"issued": {nonce: issued}, "redeemed": {}}));

    // In its parts, as the tool of agent-comms takes it.
    let parts = json!({
        "action": "gateway_redeem_connection_code",
        "code": nonce, "expiresAt": code["expiresAt"], "device": code["deviceId"],
    });
    let (text, error) = tool(&bob, parts).await;
    assert!(!error && text.contains(&ann.id) && text.contains("not signed"), "{text}");
    assert_eq!(ledger(&there, "bob")["redeemed"], json!({nonce: code["expiresAt"]}));
    let trusted = bob.client.call(TrustListParams {}).await.unwrap();
    assert_eq!(trusted.devices, [ann.id.as_str()]);
    // Once, whoever of the user's agents it is.
    for agent in [&bob, &carl] {
        assert_eq!(redeem(agent, line).await.unwrap_err(), "already_redeemed");
    }
    // One's own is nobody else's.
    assert_eq!(redeem(&ann, line).await.unwrap_err(), "own_device");
    let changed = |member: &str, value: &str| {
        let mut other = code.clone();
        other[member] = value.into();
        other.to_string()
    };
    for (line, word) in [
        (changed("expiresAt", "2020-01-01T00:00:00.000Z"), "expired"),
        (changed("expiresAt", "2999-01-01T00:00:00.000Z"), "expires_too_late"),
        (changed("deviceId", "abc"), "not_a_code"),
        ("{}".to_owned(), "not_a_code"),
    ] {
        assert_eq!(redeem(&carl, &line).await.unwrap_err(), word, "{line}");
    }
    let long = TrustCodeCreateParams {
        ttl_ms: Some(24 * 3600 * 1000 + 1),
        sign_key_file: None,
        sign_passphrase_file: None,
    };
    let error = ann.client.call(long).await.unwrap_err();
    assert!(error.message.contains("ttlMs"), "{error:?}");
    // An agent whose key ends with its session has nothing to be trusted by.
    let passing = here.passing_agent("dora").await;
    let (text, error) = tool(&passing, json!({"action": "gateway_generate_connection_code"})).await;
    assert!(error && text.contains("(ephemeral_agent)"), "{text}");
}

#[tokio::test]
async fn the_command_line_makes_and_redeems_codes() {
    let (here, there) = tokio::join!(Daemon::start(Ports::free()), Daemon::start(Ports::free()));
    let made =
        commsd(here.home.path(), &["trust", "code", "create", "--as", "ann", "--for", "60"]).await;
    assert_eq!(made.status.code(), Some(0), "{made:?}");
    let line = String::from_utf8(made.stdout).unwrap().lines().next().unwrap().to_owned();
    let code: Value = serde_json::from_str(&line).unwrap();
    let redeemed =
        commsd(there.home.path(), &["trust", "code", "redeem", "--as", "bob", &line, "--json"])
            .await;
    let answer: Value = serde_json::from_slice(&redeemed.stdout).unwrap();
    assert_eq!(answer, json!({"device": code["deviceId"], "changed": true, "fingerprint": null}));
    let list = commsd(there.home.path(), &["trust", "list"]).await;
    let id = code["deviceId"].as_str().unwrap();
    assert!(String::from_utf8(list.stdout).unwrap().contains(id));
    let again = commsd(there.home.path(), &["trust", "code", "redeem", "--as", "bob", &line]).await;
    assert_eq!(again.status.code(), Some(1));
    assert!(String::from_utf8(again.stderr).unwrap().contains("redeemed already"));
    let removed = commsd(there.home.path(), &["trust", "remove", id]).await;
    assert_eq!(removed.status.code(), Some(0));
    let list = commsd(there.home.path(), &["trust", "list", "--json"]).await;
    assert_eq!(serde_json::from_slice::<Value>(&list.stdout).unwrap()["devices"], json!([]));
}

#[tokio::test]
async fn a_key_comes_from_a_closed_file_and_a_signature_is_checked_or_refused() {
    let (here, there) = tokio::join!(Daemon::start(Ports::free()), Daemon::start(Ports::free()));
    let (ann, bob) = (here.agent("ann").await, there.agent("bob").await);
    let vectors = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/openpgp");
    let key = here.home.path().join("key");
    std::fs::copy(vectors.join("locked.secret"), &key).unwrap();
    let passphrase = here.home.path().join("passphrase");
    std::fs::write(&passphrase, "correct horse\n").unwrap();
    let closed = |mode| {
        for file in [&key, &passphrase] {
            std::fs::set_permissions(file, std::fs::Permissions::from_mode(mode)).unwrap();
        }
    };
    let create = json!({
        "action": "gateway_generate_connection_code",
        "signKeyFile": key, "signPassphraseFile": passphrase,
    });
    closed(0o644);
    let (text, error) = tool(&ann, create.clone()).await;
    assert!(error && text.contains("(file_loose)"), "{text}");
    closed(0o600);
    let relative = json!({"action": "gateway_generate_connection_code", "signKeyFile": "key"});
    let (text, error) = tool(&ann, relative).await;
    assert!(error && text.contains("`signKeyFile`"), "{text}");
    let public = std::fs::read_to_string(vectors.join("locked.key")).unwrap();
    let (text, error) = tool(&ann, create).await;
    assert!(!text.contains("correct horse") && !text.contains("PRIVATE"), "{text}");

    if cfg!(not(feature = "openpgp")) {
        assert!(error && text.contains("(openpgp_missing)"), "{text}");
        // Nothing was issued, and a signed code from elsewhere is refused for the same reason.
        assert!(!here.home.path().join("agent-comms/connection-codes-cli--ann.json").exists());
        let (text, _) = tool(&ann, json!({"action": "gateway_generate_connection_code"})).await;
        let mut code: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        code["signature"] = "-----BEGIN PGP SIGNATURE-----".into();
        let signed = json!({
            "action": "gateway_redeem_connection_code", "code": code.to_string(), "publicKey": public,
        });
        let (text, error) = tool(&bob, signed.clone()).await;
        assert!(
            error && text.contains("(openpgp_missing)") && text.contains("feature `openpgp`"),
            "{text}"
        );
        // It was not used up by that: without the signature it counts as unsigned.
        code.as_object_mut().unwrap().remove("signature");
        redeem(&bob, &code.to_string()).await.unwrap();
        return;
    }
    assert!(!error && text.starts_with("Signed code"), "{text}");
    let line = text.lines().last().unwrap();
    assert_eq!(redeem(&bob, line).await.unwrap_err(), "signature_required");
    let with = |code: &str, pin: &str| {
        json!({
            "action": "gateway_redeem_connection_code",
            "code": code, "publicKey": public, "fingerprint": pin,
        })
    };
    let (text, error) = tool(&bob, with(line, "0123")).await;
    assert!(error && text.contains("(fingerprint_mismatch)"), "{text}");
    let found = text.split([' ', ',']).find(|word| word.len() == 40).unwrap().to_owned();
    let mut other: Value = serde_json::from_str(line).unwrap();
    other["deviceId"] = "ab".repeat(32).into();
    let (text, error) = tool(&bob, with(&other.to_string(), &found)).await;
    assert!(error && text.contains("(signature_invalid)"), "{text}");
    let (text, error) = tool(&bob, with(line, &found.to_lowercase())).await;
    assert!(!error && text.contains(&ann.id) && text.contains(&found), "{text}");
}
