//! Connection codes (`transport.md` 8.5): a device names itself in a line of text that is handed to
//! another user by other means; whoever redeems it trusts that device. The code proves nothing but its
//! age, unless it is signed ([`super::openpgp`]). Nobody is asked over the network: what was issued and
//! redeemed stands in a ledger beside the identity of the slot.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::device::DeviceId;
use super::entropy::{self, Entropy};
use super::files::{BaseDir, Document, FilesError, Secrecy, shown};
use super::names;
use crate::codec::time::UnixMillis;

/// Life of a code without another said.
pub const DEFAULT_LIFE_MS: u64 = 15 * 60 * 1000;
/// Longest life of a code, made here or elsewhere: it is handed over by people, and has to be remembered
/// until it ends so that it is redeemed once.
pub const MAX_LIFE_MS: u64 = 24 * 60 * 60 * 1000;
/// Bytes of a code's whole line: a signature by a large RSA key, armoured, is below 4 KiB.
pub const MAX_LINE: usize = 32 * 1024;
/// Characters of a code.
const CODE_CHARS: usize = 32;
/// Characters of a code that somebody else made.
const MAX_CODE_CHARS: usize = 64;
/// Codes of one slot that can still be redeemed: more in a day are a mistake.
const MAX_ISSUED: usize = 256;
/// Codes that were redeemed and have not ended. The same.
const MAX_REDEEMED: usize = 256;
/// Ledgers that are looked through: one for each slot that ever had a code. With more, none is redeemed.
const MAX_LEDGERS: usize = 4096;

/// Begins a ledger's name.
const PREFIX: &str = "connection-codes-";
const ISSUED: &str = "issued";
const REDEEMED: &str = "redeemed";

/// The ledger of a slot, from the base of its names.
#[must_use]
pub fn ledger_file(base: &str) -> String {
    format!("{PREFIX}{base}.json")
}

/// A code could not be made or redeemed.
#[derive(Debug, thiserror::Error)]
pub enum CodeError {
    /// It is no code.
    #[error("that is no connection code: {0}")]
    Form(&'static str),
    /// Its time is over.
    #[error("the code has expired")]
    Expired,
    /// It would be good for longer than any is.
    #[error("a code lives a day at most, and this one for longer")]
    TooLong,
    /// It was redeemed before.
    #[error("the code has been redeemed already")]
    AlreadyRedeemed,
    /// The ledger is full.
    #[error("there are {0} codes that have not ended; wait until they have")]
    TooMany(usize),
    /// There are too many ledgers to look through.
    #[error(
        "there are more than {MAX_LEDGERS} files {PREFIX}*.json in {path}; move away those of agents that are gone",
        path = shown(.0)
    )]
    TooManyLedgers(PathBuf),
    /// A ledger could not be read, understood or written.
    #[error(transparent)]
    Files(#[from] FilesError),
}

impl CodeError {
    /// Stable code of this error.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Form(_) => "not_a_code",
            Self::Expired => "expired",
            Self::TooLong => "expires_too_late",
            Self::AlreadyRedeemed => "already_redeemed",
            Self::TooMany(_) => "too_many_codes",
            Self::TooManyLedgers(_) => "too_many_ledgers",
            Self::Files(error) => error.code(),
        }
    }
}

/// A code as it is handed on. Its texts stand as their author wrote them: they are what is signed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConnectionCode {
    /// The code itself.
    pub code: String,
    /// When it ends, as ISO-8601 text.
    pub expires_at: String,
    /// Full id of the device to trust.
    pub device_id: String,
    /// Detached, armoured OpenPGP signature of [`ConnectionCode::signed_text`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signature: Option<String>,
}

impl ConnectionCode {
    /// A new code for `device`, unsigned.
    ///
    /// # Errors
    /// [`CodeError::TooLong`], [`CodeError::Expired`] for a life that is none.
    pub fn new(
        device: &DeviceId,
        life_ms: u64,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<Self, CodeError> {
        match life_ms {
            0 => return Err(CodeError::Expired),
            1..=MAX_LIFE_MS => {}
            _ => return Err(CodeError::TooLong),
        }
        Ok(Self {
            code: entropy::draw_id::<CODE_CHARS>(entropy),
            expires_at: now.plus(life_ms).iso(),
            device_id: device.hex(),
            signature: None,
        })
    }

    /// Reads the line of JSON that a code is handed on as.
    ///
    /// # Errors
    /// [`CodeError::Form`].
    pub fn parse(line: &str) -> Result<Self, CodeError> {
        if line.len() > MAX_LINE {
            return Err(CodeError::Form("it is too long"));
        }
        serde_json::from_str(line).map_err(|_| {
            CodeError::Form("its JSON has no `code`, `expiresAt` and `deviceId`, all texts")
        })
    }

    /// What a signature is over.
    #[must_use]
    pub fn signed_text(&self) -> String {
        format!("{}:{}:{}", self.code, self.expires_at, self.device_id)
    }

    /// Whether it has the form of a code and is good now; answers which device it names. Says nothing of
    /// a signature.
    ///
    /// # Errors
    /// [`CodeError`].
    pub fn check(&self, now: UnixMillis) -> Result<DeviceId, CodeError> {
        let plain = |c: u8| c.is_ascii_alphanumeric() || b"_-".contains(&c);
        if !(1..=MAX_CODE_CHARS).contains(&self.code.len()) || !self.code.bytes().all(plain) {
            return Err(CodeError::Form("the code has 1 to 64 letters, digits, _ and -"));
        }
        if self.signature.as_ref().is_some_and(|signature| signature.len() > MAX_LINE) {
            return Err(CodeError::Form("its signature is too long"));
        }
        let device = names::full_id(&self.device_id)
            .map_err(|_| CodeError::Form("the device is named by 64 hexadecimal digits"))?;
        let expires = UnixMillis::parse_iso(&self.expires_at)
            .ok_or(CodeError::Form("when it ends is a time like 2026-01-31T12:00:00Z"))?;
        if expires <= now {
            return Err(CodeError::Expired);
        }
        if expires.since(now) > MAX_LIFE_MS {
            return Err(CodeError::TooLong);
        }
        Ok(device)
    }
}

/// Notes in the ledger of slot `base` that a code was issued.
///
/// # Errors
/// [`CodeError::TooMany`], [`CodeError::Files`].
pub fn note_issued(
    dir: &BaseDir,
    base: &str,
    code: &ConnectionCode,
    now: UnixMillis,
) -> Result<(), CodeError> {
    change(dir, base, now, |ledger| {
        if ledger.entries(ISSUED).count() >= MAX_ISSUED {
            return Err(CodeError::TooMany(MAX_ISSUED));
        }
        let mut entry = json!({"expiresAt": code.expires_at, "deviceId": code.device_id});
        if let Some(signature) = &code.signature {
            entry["signature"] = Value::from(signature.as_str());
        }
        ledger.set_entry(ISSUED, &code.code, Some(entry));
        Ok(())
    })
}

/// Redeems a code, once for all slots of the directory: notes it in the ledger of slot `base`.
///
/// # Errors
/// [`CodeError::AlreadyRedeemed`], [`CodeError::TooMany`]; [`CodeError::TooManyLedgers`] and
/// [`CodeError::Files`], also for a ledger of another slot: it may be the one that names the code.
pub fn redeem(
    dir: &BaseDir,
    base: &str,
    code: &ConnectionCode,
    now: UnixMillis,
) -> Result<(), CodeError> {
    change(dir, base, now, |ledger| {
        let here = ledger.entry(REDEEMED, &code.code).is_some();
        if here || redeemed_elsewhere(dir, &code.code)? {
            return Err(CodeError::AlreadyRedeemed);
        }
        if ledger.entries(REDEEMED).count() >= MAX_REDEEMED {
            return Err(CodeError::TooMany(MAX_REDEEMED));
        }
        ledger.set_entry(REDEEMED, &code.code, Some(Value::from(code.expires_at.as_str())));
        Ok(())
    })
}

/// Whether a ledger of the directory names this code as redeemed.
fn redeemed_elsewhere(dir: &BaseDir, code: &str) -> Result<bool, CodeError> {
    let unread = |source| {
        let path = dir.path().to_owned();
        CodeError::Files(FilesError::Io { action: "look through", path, source })
    };
    let mut ledgers = 0;
    for entry in std::fs::read_dir(dir.path()).map_err(unread)? {
        let name = entry.map_err(unread)?.file_name();
        // Names of our making are plain text.
        let Some(name) = name.to_str().filter(|name| {
            name.starts_with(PREFIX) && Path::new(name).extension().is_some_and(|end| end == "json")
        }) else {
            continue;
        };
        ledgers += 1;
        if ledgers > MAX_LEDGERS {
            return Err(CodeError::TooManyLedgers(dir.path().to_owned()));
        }
        if read_ledger(dir, name)?.entry(REDEEMED, code).is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Reads a ledger; an empty one where there is none.
fn read_ledger(dir: &BaseDir, name: &str) -> Result<Document, CodeError> {
    let read = dir.read_document(name, Secrecy::Plain)?;
    let ledger = read.map(|(ledger, _)| ledger).unwrap_or_default();
    for member in [ISSUED, REDEEMED] {
        if ledger.get(member).is_some_and(|value| !value.is_object()) {
            let reason = format!("its `{member}` is none");
            return Err(FilesError::NotJson { path: dir.file(name), reason }.into());
        }
    }
    Ok(ledger)
}

/// Reads the ledger, forgets what has ended, changes it and writes it. One that cannot be understood is
/// never overwritten.
fn change(
    dir: &BaseDir,
    base: &str,
    now: UnixMillis,
    edit: impl FnOnce(&mut Document) -> Result<(), CodeError>,
) -> Result<(), CodeError> {
    let _guard = dir.guard()?;
    let name = ledger_file(base);
    let mut ledger = read_ledger(dir, &name)?;
    for member in [ISSUED, REDEEMED] {
        if ledger.get(member).is_none() {
            ledger.set(member, json!({}));
        }
        // One that does not say when it ends may not have ended.
        let over = |entry: &Value| {
            let ends = entry.as_str().or_else(|| entry.get("expiresAt")?.as_str());
            ends.and_then(UnixMillis::parse_iso).is_some_and(|ends| ends <= now)
        };
        let ended: Vec<String> = ledger
            .entries(member)
            .filter(|(_, entry)| over(entry))
            .map(|(code, _)| code.to_owned())
            .collect();
        for code in ended {
            ledger.set_entry(member, &code, None);
        }
    }
    edit(&mut ledger)?;
    dir.write_document(&name, &ledger)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::super::entropy::SeededEntropy;
    use super::super::slot::SlotName;
    use super::*;

    const NOW: UnixMillis = UnixMillis(1_795_989_097_991);

    fn code() -> ConnectionCode {
        let device = DeviceId([0xab; 32]);
        ConnectionCode::new(&device, DEFAULT_LIFE_MS, NOW, &mut SeededEntropy::new(1)).unwrap()
    }

    fn base() -> (tempfile::TempDir, BaseDir) {
        let temp = tempfile::tempdir().unwrap();
        let dir = BaseDir::open(&temp.path().join("base")).unwrap();
        (temp, dir)
    }

    fn ledger(dir: &BaseDir, name: &str) -> Value {
        serde_json::from_slice(&std::fs::read(dir.file(name)).unwrap()).unwrap()
    }

    #[test]
    fn a_code_has_the_references_form() {
        let code = code();
        assert_eq!(code.code.len(), 32);
        assert_eq!(code.expires_at, "2026-11-29T22:06:37.991Z");
        let line = serde_json::to_string(&code).unwrap();
        let device = "ab".repeat(32);
        assert_eq!(
            line,
            format!(
                r#"{{"code":"{}","expiresAt":"2026-11-29T22:06:37.991Z","deviceId":"{device}"}}"#,
                code.code
            )
        );
        assert_eq!(ConnectionCode::parse(&line).unwrap(), code);
        assert_eq!(code.signed_text(), format!("{}:2026-11-29T22:06:37.991Z:{device}", code.code));
        assert_eq!(code.check(NOW).unwrap(), DeviceId([0xab; 32]));
    }

    #[test]
    fn what_is_no_code_or_not_good_now_is_refused_by_name() {
        let word = |edit: &dyn Fn(&mut ConnectionCode), now: UnixMillis| {
            let mut code = code();
            edit(&mut code);
            code.check(now).unwrap_err().code()
        };
        let fresh = |_: &mut ConnectionCode| {};
        assert_eq!(word(&fresh, NOW.plus(DEFAULT_LIFE_MS)), "expired");
        let far = NOW.plus(MAX_LIFE_MS + 1).iso();
        assert_eq!(word(&|c| c.expires_at.clone_from(&far), NOW), "expires_too_late");
        assert_eq!(word(&|c| c.expires_at = "tomorrow".into(), NOW), "not_a_code");
        assert_eq!(word(&|c| c.code = String::new(), NOW), "not_a_code");
        assert_eq!(word(&|c| c.code = "a".repeat(65), NOW), "not_a_code");
        assert_eq!(word(&|c| c.code = "a:b".into(), NOW), "not_a_code");
        assert_eq!(word(&|c| c.device_id = "abab".into(), NOW), "not_a_code");
        assert_eq!(word(&|c| c.signature = Some("x".repeat(MAX_LINE + 1)), NOW), "not_a_code");
        for line in ["", "{}", "[]", r#"{"code":1,"expiresAt":"x","deviceId":"y"}"#] {
            assert_eq!(ConnectionCode::parse(line).unwrap_err().code(), "not_a_code", "{line}");
        }
        let mut entropy = SeededEntropy::new(1);
        for (life, code) in [(0, "expired"), (MAX_LIFE_MS + 1, "expires_too_late")] {
            let error = ConnectionCode::new(&DeviceId([1; 32]), life, NOW, &mut entropy);
            assert_eq!(error.unwrap_err().code(), code);
        }
    }

    #[test]
    fn the_ledger_has_the_references_form_and_forgets_what_has_ended() {
        let (_temp, dir) = base();
        let slot = SlotName::new("mcp", "/w").unwrap();
        let file = slot.connection_codes_file();
        let code = code();
        note_issued(&dir, slot.base(), &code, NOW).unwrap();
        let entry = json!({"expiresAt": code.expires_at, "deviceId": code.device_id});
        let expected = json!({"issued": {(&code.code): entry}, "redeemed": {}});
        assert_eq!(ledger(&dir, &file), expected);
        let mode = std::fs::metadata(dir.file(&file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);

        redeem(&dir, slot.base(), &code, NOW).unwrap();
        assert_eq!(ledger(&dir, &file)["redeemed"], json!({(&code.code): code.expires_at}));
        // What has ended goes with the next change; what others have added stays.
        let mut file_text = ledger(&dir, &file);
        file_text["later"] = json!(7);
        std::fs::write(dir.file(&file), file_text.to_string()).unwrap();
        let later = NOW.plus(DEFAULT_LIFE_MS);
        let next = ConnectionCode { code: "next".into(), expires_at: later.plus(1).iso(), ..code };
        redeem(&dir, slot.base(), &next, later).unwrap();
        let expected = json!({"issued": {}, "redeemed": {"next": next.expires_at}, "later": 7});
        assert_eq!(ledger(&dir, &file), expected);
    }

    #[test]
    fn a_code_is_redeemed_once_by_whichever_slot() {
        let (_temp, dir) = base();
        let code = code();
        redeem(&dir, "mcp--_a", &code, NOW).unwrap();
        for slot in ["mcp--_a", "mcp--_b"] {
            let again = redeem(&dir, slot, &code, NOW).unwrap_err();
            assert_eq!(again.code(), "already_redeemed");
        }
        // One's own code can be redeemed by another: that it was issued says nothing.
        let other = ConnectionCode { code: "other".into(), ..code };
        note_issued(&dir, "mcp--_a", &other, NOW).unwrap();
        redeem(&dir, "mcp--_a", &other, NOW).unwrap();
    }

    #[test]
    fn a_ledger_is_bounded_and_one_that_cannot_be_understood_stays() {
        let (_temp, dir) = base();
        let code = code();
        let named = |n: usize| ConnectionCode { code: format!("c{n}"), ..code.clone() };
        for n in 0..MAX_REDEEMED {
            redeem(&dir, "s", &named(n), NOW).unwrap();
        }
        let one_more = redeem(&dir, "s", &named(MAX_REDEEMED), NOW).unwrap_err();
        assert_eq!(one_more.code(), "too_many_codes");
        std::fs::write(dir.file(&ledger_file("t")), "{").unwrap();
        assert_eq!(note_issued(&dir, "t", &code, NOW).unwrap_err().code(), "file_not_json");
        assert_eq!(std::fs::read(dir.file(&ledger_file("t"))).unwrap(), b"{");
    }

    #[test]
    fn a_damaged_ledger_of_whichever_slot_refuses_every_code() {
        let (_temp, dir) = base();
        let code = code();
        let used = ConnectionCode { code: "used".into(), ..code.clone() };
        redeem(&dir, "a", &used, NOW).unwrap();
        let path = dir.file(&ledger_file("a"));
        let whole = std::fs::read_to_string(&path).unwrap();
        for damaged in
            [&whole[..whole.len() - 2], "", r#"{"redeemed":["used"]}"#, r#"{"issued":7}"#]
        {
            std::fs::write(&path, damaged).unwrap();
            for (slot, code) in [("b", &used), ("b", &code), ("a", &used)] {
                let refused = redeem(&dir, slot, code, NOW).unwrap_err();
                assert_eq!(refused.code(), "file_not_json", "{damaged}");
                let told = refused.to_string();
                assert!(
                    told.contains(path.to_str().unwrap()) && told.contains("mend it"),
                    "{told}"
                );
            }
            assert_eq!(std::fs::read_to_string(&path).unwrap(), damaged);
        }
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert_eq!(redeem(&dir, "b", &code, NOW).unwrap_err().code(), "file_wrong_kind");
        std::fs::remove_dir(&path).unwrap();
        // A time that cannot be read does not make a used code good again.
        std::fs::write(&path, r#"{"redeemed":{"used":"soon"}}"#).unwrap();
        for slot in ["a", "b"] {
            assert_eq!(redeem(&dir, slot, &used, NOW).unwrap_err().code(), "already_redeemed");
        }
        redeem(&dir, "b", &code, NOW).unwrap();
    }
}
