//! `commsd trust`: whom the user trusts beyond this machine, and codes by which that is agreed.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};

use super::args::AsAgent;
use super::client::{Done, Session};
use crate::api::tool::render::{code_line, redeemed, trust_changed, trusted};
use crate::api::types::{
    ApiError, CodeSecs, TrustAddParams, TrustChanged, TrustCode, TrustCodeCreateParams,
    TrustCodeRedeemParams, TrustKind, TrustListParams, TrustRemoveParams,
};
use crate::codec::text::escape_untrusted;
use crate::identity::files::{self, Secrecy};
use crate::identity::openpgp::MAX_KEY;

/// What can be done about trust.
#[derive(Subcommand, Clone, Debug)]
pub enum TrustCommand {
    /// List who is trusted
    List,
    /// Trust a device, a user or a machine
    Add(TrustArgs),
    /// Trust it no longer
    Remove(TrustArgs),
    /// Agree on trust by a line of text that is handed over by other means
    #[command(subcommand)]
    Code(CodeCommand),
}

/// Who is meant.
#[derive(Args, Clone, Debug)]
pub struct TrustArgs {
    /// Full id; the other side sees its own with whoami
    id: String,
    /// What it is the id of: device, principal (a user) or machine
    #[arg(long, value_name = "KIND", default_value = "device")]
    kind: TrustKind,
}

/// What can be done with codes.
#[derive(Subcommand, Clone, Debug)]
pub enum CodeCommand {
    /// Make a code by which another user can trust this agent
    ///
    /// Whoever has it can redeem it, once, until it ends.
    Create {
        /// Whom the code names
        #[command(flatten)]
        agent: AsAgent,
        /// How long it can be redeemed, a day at most; a quarter of an hour without it
        #[arg(long = "for", value_name = "SECS")]
        lasts: Option<CodeSecs>,
        /// Sign it with the armoured OpenPGP private key in FILE, which nobody else may read
        #[arg(long, value_name = "FILE")]
        sign_key: Option<PathBuf>,
        /// The first line of FILE opens that key
        #[arg(long, value_name = "FILE", requires = "sign_key")]
        passphrase_file: Option<PathBuf>,
    },
    /// Trust the agent that a code names
    ///
    /// Unless it is signed, a code shows only its age, and not who has made it.
    Redeem {
        /// For whose user
        #[command(flatten)]
        agent: AsAgent,
        /// The line, as it was handed over; `-` reads it from stdin
        #[arg(value_name = "CODE")]
        code: String,
        /// Check its signature with the armoured OpenPGP public key in FILE
        #[arg(long, value_name = "FILE")]
        public_key: Option<PathBuf>,
        /// The fingerprint that this key has to have
        #[arg(long, value_name = "HEX", requires = "public_key")]
        fingerprint: Option<String>,
    },
}

impl Session {
    /// Carries out one command.
    pub(super) async fn trust(&self, command: TrustCommand) -> Done {
        match command {
            TrustCommand::List => self.show(TrustListParams {}, |list| trusted(list) + "\n").await,
            TrustCommand::Add(TrustArgs { id, kind }) => {
                self.show(TrustAddParams { id, kind: Some(kind) }, show_changed).await
            }
            TrustCommand::Remove(TrustArgs { id, kind }) => {
                self.show(TrustRemoveParams { id, kind: Some(kind) }, show_changed).await
            }
            TrustCommand::Code(CodeCommand::Create { agent, lasts, sign_key, passphrase_file }) => {
                let params = TrustCodeCreateParams {
                    ttl_ms: lasts.map(|secs| secs.get() * 1000),
                    sign_key_file: sign_key.as_deref().map(absolute).transpose()?,
                    sign_passphrase_file: passphrase_file.as_deref().map(absolute).transpose()?,
                };
                self.show_as(&agent, params, show_code).await
            }
            TrustCommand::Code(CodeCommand::Redeem { agent, code, public_key, fingerprint }) => {
                let params = TrustCodeRedeemParams {
                    code,
                    expires_at: None,
                    device: None,
                    signature: None,
                    public_key: public_key.as_deref().map(public_key_in).transpose()?,
                    fingerprint,
                };
                self.show_as(&agent, params, |done| redeemed(done) + "\n").await
            }
        }
    }
}

fn absolute(path: &Path) -> Result<String, ApiError> {
    let whole = std::path::absolute(path).ok();
    whole.and_then(|path| path.into_os_string().into_string().ok()).ok_or_else(|| {
        ApiError::invalid_params("trust code create", "FILE: a path that can be written as text")
    })
}

/// A public key, which is no secret.
fn public_key_in(path: &Path) -> Result<String, ApiError> {
    let wrong = |what: String| ApiError::new("public_key", what, "gpg --armor --export makes one");
    let content = files::read(path, MAX_KEY as u64, Secrecy::Plain)
        .map_err(|error| wrong(error.to_string()))?
        .ok_or_else(|| wrong(format!("there is no file {}", path.display())))?;
    String::from_utf8(content.bytes.to_vec())
        .map_err(|_| wrong(format!("{} is no text", path.display())))
}

fn show_changed(changed: &TrustChanged) -> String {
    trust_changed(changed) + "\n"
}

fn show_code(code: &TrustCode) -> String {
    let until = escape_untrusted(&code.expires_at);
    let line = code_line(code).unwrap_or_default();
    format!("{line}\nUntil {until} this line can be redeemed once: commsd trust code redeem\n")
}
