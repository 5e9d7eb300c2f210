//! Connection codes: made for the agent that asks, redeemed for its user. Files, keys and signatures are
//! worked on off the owner's task; trusting the device is `trust`'s matter.

use std::path::Path;

use zeroize::Zeroizing;

use super::owner::Owner;
use super::vaults::Done;
use crate::api::types::{
    ApiError, RequestId, TrustCode, TrustCodeCreateParams, TrustCodeRedeemParams, TrustCodeRedeemed,
};
use crate::codec::time::UnixMillis;
use crate::identity::connection_code::{
    self, CodeError, ConnectionCode, DEFAULT_LIFE_MS, MAX_LIFE_MS,
};
use crate::identity::device::DeviceId;
use crate::identity::entropy::OsEntropy;
use crate::identity::files::{self, BaseDir, Secrecy};
use crate::identity::openpgp::{self, MAX_KEY, MAX_PASSPHRASE, OpenPgpError};
use crate::runtime::local_socket::ConnId;

/// A code that is to be redeemed, with what its signature is checked by.
struct Given {
    code: ConnectionCode,
    /// Armoured public key and the fingerprint that it has to have.
    key: Option<(String, Option<String>)>,
}

fn code_error(error: &CodeError) -> ApiError {
    let todo = match error {
        CodeError::Form(_) => "give the whole line of JSON as `code`",
        CodeError::Expired | CodeError::TooLong => "ask for a new code",
        CodeError::AlreadyRedeemed => {
            "gateway_list_trusted shows who is trusted; ask for a new code"
        }
        CodeError::TooMany(_) => "try again when some have ended",
        CodeError::TooManyLedgers(_) => "move them away, and try again",
        CodeError::Files(_) => "see `commsd doctor`",
    };
    ApiError::new(error.code(), error.to_string(), todo)
}

fn pgp_error(error: &OpenPgpError) -> ApiError {
    ApiError::new(error.code(), error.to_string(), error.todo())
}

fn invalid(method: &str, what: &str) -> ApiError {
    ApiError::invalid_params(method, what)
}

/// Text from a private file of the user's.
fn private_text(path: &str, what: &str, limit: usize) -> Result<Zeroizing<String>, ApiError> {
    let method = "trust.code.create";
    let path = Path::new(path);
    if !path.is_absolute() {
        return Err(invalid(method, &format!("`{what}`: the absolute path of a file")));
    }
    let read = files::read(path, limit as u64, Secrecy::Private)
        .map_err(|error| ApiError::plain(error.code(), error.to_string()))?;
    let content =
        read.ok_or_else(|| invalid(method, &format!("`{what}`: there is no such file")))?;
    let text = std::str::from_utf8(&content.bytes)
        .map_err(|_| invalid(method, &format!("`{what}`: the file is no text")))?;
    Ok(Zeroizing::new(text.to_owned()))
}

/// Makes a code for a device, signs it where that is wanted, and notes it.
fn made(
    dir: &BaseDir,
    slot: &str,
    device: &DeviceId,
    p: &TrustCodeCreateParams,
    now: UnixMillis,
) -> Result<TrustCode, ApiError> {
    let mut entropy =
        OsEntropy::open().map_err(|error| ApiError::plain("entropy", error.to_string()))?;
    let life = p.ttl_ms.unwrap_or(DEFAULT_LIFE_MS);
    let mut code = ConnectionCode::new(device, life, now, &mut entropy)
        .map_err(|_| invalid("trust.code.create", &format!("`ttlMs`: 1 to {MAX_LIFE_MS}")))?;
    if let Some(key) = &p.sign_key_file {
        let key = private_text(key, "signKeyFile", MAX_KEY)?;
        let passphrase = match &p.sign_passphrase_file {
            Some(file) => Some(private_text(file, "signPassphraseFile", MAX_PASSPHRASE)?),
            None => None,
        };
        let passphrase = passphrase.as_ref().map(|text| text.lines().next().unwrap_or_default());
        let signature = openpgp::sign(&key, passphrase, &code.signed_text(), now);
        code.signature = Some(signature.map_err(|error| pgp_error(&error))?);
    } else if p.sign_passphrase_file.is_some() {
        return Err(invalid(
            "trust.code.create",
            "`signPassphraseFile` belongs to a `signKeyFile`",
        ));
    }
    connection_code::note_issued(dir, slot, &code, now).map_err(|error| code_error(&error))?;
    let ConnectionCode { code, expires_at, device_id, signature } = code;
    Ok(TrustCode { code, expires_at, device_id, signature })
}

/// What was given, with a signature and its key or with neither: a key without a signature means that
/// somebody may have taken that away.
fn given(p: TrustCodeRedeemParams) -> Result<Given, ApiError> {
    let wrong = |what: &str| Err(invalid("trust.code.redeem", what));
    let line = p.code.trim_start().starts_with('{');
    let code = match (line, p.expires_at, p.device, p.signature) {
        (true, None, None, None) => {
            ConnectionCode::parse(&p.code).map_err(|error| code_error(&error))?
        }
        (true, ..) => {
            return wrong("`expiresAt`, `device` and `signature` stand in the line that `code` is");
        }
        (false, Some(expires_at), Some(device_id), signature) => {
            ConnectionCode { code: p.code, expires_at, device_id, signature }
        }
        (false, ..) => {
            return wrong("`expiresAt` and `device` are needed, or the whole line as `code`");
        }
    };
    let required = |what: &str, todo: &str| Err(ApiError::new("signature_required", what, todo));
    let key = match (&code.signature, p.public_key, p.fingerprint) {
        (None, None, None) => None,
        (Some(_), Some(key), pin) => Some((key, pin)),
        (Some(_), None, _) => {
            return required(
                "the code is signed, and there is no key to check that with",
                "give the signer's public key as `publicKey`; or leave the signature out, and the code \
                 counts as unsigned",
            );
        }
        (None, ..) => {
            return required(
                "a signature was to be checked, and the code has none",
                "ask for a signed code; or leave `publicKey` and `fingerprint` out",
            );
        }
    };
    Ok(Given { code, key })
}

/// Checks the signature, where there is one, and uses the code up; answers the signer's fingerprint.
fn checked(
    dir: &BaseDir,
    slot: &str,
    given: &Given,
    now: UnixMillis,
) -> Result<Option<String>, ApiError> {
    let code = &given.code;
    let mut signer = None;
    if let (Some(signature), Some((key, pin))) = (&code.signature, &given.key) {
        let found = openpgp::verify(signature, key, &code.signed_text(), now)
            .and_then(|found| match pin {
                Some(wanted) => openpgp::pin(&found, wanted).map(|()| found),
                None => Ok(found),
            })
            .map_err(|error| pgp_error(&error))?;
        signer = Some(found);
    }
    connection_code::redeem(dir, slot, code, now).map_err(|error| code_error(&error))?;
    Ok(signer)
}

impl Owner {
    /// The slot whose ledger an agent's codes stand in.
    fn code_slot(&self, agent: &DeviceId) -> Result<String, ApiError> {
        let hosted = self.hosted.get(agent).filter(|hosted| !hosted.ephemeral);
        hosted.map(|hosted| hosted.slot.clone()).ok_or_else(|| {
            ApiError::new(
                "ephemeral_agent",
                "this agent's key ends with its session, and with it whatever trusts or is trusted by it",
                "use an agent that lasts; on the command line: --as NAME",
            )
        })
    }

    pub(super) fn code_wanted(
        &self,
        conn: ConnId,
        id: &RequestId,
        agent: DeviceId,
        p: TrustCodeCreateParams,
    ) -> Result<(), ApiError> {
        let (dir, slot, now) = (self.base.clone(), self.code_slot(&agent)?, self.now().unix);
        let id = id.clone();
        self.desk.code_work(
            move || made(&dir, &slot, &agent, &p, now),
            move |code| Done::CodeMade(conn, id, code),
        );
        Ok(())
    }

    pub(super) fn code_given(
        &self,
        conn: ConnId,
        id: &RequestId,
        agent: DeviceId,
        p: TrustCodeRedeemParams,
    ) -> Result<(), ApiError> {
        let (dir, slot, now) = (self.base.clone(), self.code_slot(&agent)?, self.now().unix);
        let given = given(p)?;
        let device = given.code.check(now).map_err(|error| code_error(&error))?;
        self.may_be_trusted(&device)?;
        let id = id.clone();
        self.desk.code_work(
            move || checked(&dir, &slot, &given, now),
            move |signer| Done::CodeChecked(conn, id, signer.map(|signer| (device, signer))),
        );
        Ok(())
    }

    /// The code is good and used up: its device is trusted.
    pub(super) fn code_checked(
        &mut self,
        conn: ConnId,
        id: &RequestId,
        checked: Result<(DeviceId, Option<String>), ApiError>,
    ) {
        let redeemed = checked.and_then(|(device, fingerprint)| {
            let trusted = self.trust_changed(&device.hex(), None, true)?;
            Ok(TrustCodeRedeemed { device: trusted.id, changed: trusted.changed, fingerprint })
        });
        self.answer(conn, id, redeemed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(code: &str) -> TrustCodeRedeemParams {
        TrustCodeRedeemParams {
            code: code.into(),
            expires_at: None,
            device: None,
            signature: None,
            public_key: None,
            fingerprint: None,
        }
    }

    fn word(p: TrustCodeRedeemParams) -> String {
        given(p).err().unwrap().code
    }

    const LINE: &str = r#"{"code":"c","expiresAt":"t","deviceId":"d"}"#;
    const SIGNED: &str = r#"{"code":"c","expiresAt":"t","deviceId":"d","signature":"s"}"#;

    #[test]
    fn a_code_is_given_as_a_line_or_in_its_parts() {
        let parts = TrustCodeRedeemParams {
            expires_at: Some("t".into()),
            device: Some("d".into()),
            ..params("c")
        };
        assert_eq!(given(params(LINE)).unwrap().code, given(parts).unwrap().code);
        assert_eq!(word(params("c")), ApiError::INVALID_PARAMS);
        let both = TrustCodeRedeemParams { device: Some("d".into()), ..params(LINE) };
        assert_eq!(word(both), ApiError::INVALID_PARAMS);
        assert_eq!(word(params("{}")), "not_a_code");
    }

    #[test]
    fn a_signature_and_its_key_come_together_or_not_at_all() {
        let key = || Some("k".to_owned());
        assert_eq!(word(params(SIGNED)), "signature_required");
        let stripped = TrustCodeRedeemParams { public_key: key(), ..params(LINE) };
        assert_eq!(word(stripped), "signature_required");
        let pinned = TrustCodeRedeemParams { fingerprint: key(), ..params(LINE) };
        assert_eq!(word(pinned), "signature_required");
        let whole =
            TrustCodeRedeemParams { public_key: key(), fingerprint: key(), ..params(SIGNED) };
        let Given { code, key: found } = given(whole).unwrap();
        assert_eq!(code.signature.as_deref(), Some("s"));
        assert_eq!(found, Some(("k".to_owned(), key())));
    }
}
