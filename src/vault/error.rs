//! Why a vault command is refused or fails. Every one of these is an exit 2 of the command line and
//! leaves what was there before, except where the message names files that were already replaced.

use std::io;
use std::path::{Path, PathBuf};

use super::plan::adapter::BlockError;
use super::plan::marker::MarkerError;
use super::plan::name::NameError;
use super::plan::page::PageError;
use super::plan::payload::PayloadError;
use crate::codec::text::escape_untrusted;

/// A vault command was refused or failed.
#[derive(Debug, thiserror::Error)]
pub enum VaultError {
    /// The workspace cannot be used.
    #[error("cannot use {} as a workspace: {why}", shown(path))]
    Workspace {
        /// What was given.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", escape_untrusted(path))]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file, from the workspace's root.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// A managed path leads out of the workspace.
    #[error(
        "{} leads out of the workspace through a symbolic link; remove the link",
        escape_untrusted(.0)
    )]
    Outside(String),
    /// A symbolic link where a file is to be read or replaced.
    #[error("{} is a symbolic link; put a regular file in its place", escape_untrusted(.0))]
    SymbolicLink(String),
    /// Not a regular file.
    #[error("{} is not a regular file; move it away", escape_untrusted(.0))]
    NotRegular(String),
    /// Larger than what is read.
    #[error("{} is larger than {limit} bytes; split it", escape_untrusted(path))]
    TooLarge {
        /// The file.
        path: String,
        /// The limit.
        limit: u64,
    },
    /// Not UTF-8.
    #[error("{} is not valid UTF-8; correct it or move it away", escape_untrusted(.0))]
    NotUtf8(String),
    /// A file name that is not UTF-8.
    #[error("the name of {} is not valid UTF-8; rename the file", escape_untrusted(.0))]
    NameNotUtf8(String),
    /// Somebody else changed the file or its folder at the same moment.
    #[error("{} was changed by somebody else at the same moment; read it and try again", escape_untrusted(.0))]
    Raced(String),
    /// No vault.
    #[error("there is no EchoesVault in this workspace; make one there with `commsd vault init`")]
    Uninitialized,
    /// A vault of an older tool.
    #[error(
        "there is an EchoesVault without a marker here, as older tools left it; run `commsd vault migrate` there first, or `commsd vault init`"
    )]
    Legacy,
    /// The marker does not let a writer through.
    #[error(transparent)]
    Marker(#[from] MarkerError),
    /// The payload cannot be used.
    #[error(transparent)]
    Payload(#[from] PayloadError),
    /// The payload file cannot be read.
    #[error("cannot read the payload {}: {why}", shown(path))]
    PayloadFile {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// A page's name is refused.
    #[error("{why}: '{}'", escape_untrusted(name))]
    Name {
        /// The name.
        name: String,
        /// Why.
        why: NameError,
    },
    /// A page is refused.
    #[error("page '{}' is invalid: {why}", escape_untrusted(file))]
    Page {
        /// Its file name.
        file: String,
        /// Why.
        why: PageError,
    },
    /// The index cannot be built.
    #[error("the index cannot be built: {}", escape_untrusted(.0))]
    Index(String),
    /// Pages cannot be given summaries.
    #[error("nothing was migrated: {}", escape_untrusted(.0.as_str()))]
    Migration(String),
    /// No such page.
    #[error("there is no page '{}'; the vault's index lists them", escape_untrusted(.0))]
    NoPage(String),
    /// The page exists and no hash was given.
    #[error(
        "page '{}' exists; read it, run hash and send the result as expectedSha256",
        escape_untrusted(.0)
    )]
    HashMissing(String),
    /// The page is not what the caller has read.
    #[error(
        "page '{}' has changed since it was read; read it again, merge, run hash and try again",
        escape_untrusted(.0)
    )]
    HashStale(String),
    /// A page twice in one payload.
    #[error("page '{}' occurs twice in the payload; send it once", escape_untrusted(.0))]
    PageTwice(String),
    /// The final saving was not confirmed.
    #[error("end needs --confirm-explicit-user-end: run it only after the user has asked for it")]
    Unconfirmed,
    /// Nothing usable is left of an agent's name.
    #[error("agent name '{}' has no usable character; use some of a-z, 0-9, '.', '_', '-'", escape_untrusted(.0))]
    Agent(String),
    /// A command from elsewhere that does not fit.
    #[error("{}", escape_untrusted(.0))]
    Request(String),
    /// A blank query.
    #[error("the query is empty; give the text that is looked for")]
    Query,
    /// A user's file where a generated one belongs.
    #[error("{} was not written by EchoesVault; move it away and run the command again", .0)]
    ForeignFile(&'static str),
    /// A broken managed block.
    #[error("{file} cannot be updated: {why}; mend it by hand")]
    Block {
        /// The file.
        file: &'static str,
        /// What is wrong.
        why: BlockError,
    },
    /// Another writer holds the lock.
    #[error(
        "the vault is locked by {holder} since {age} s and did not become free within {waited} s; try again, and if that process is gone, wait until the lock is 60 s old"
    )]
    Locked {
        /// Process id, or what stands there instead.
        holder: String,
        /// Age of the lock in seconds.
        age: u64,
        /// How long was waited.
        waited: u64,
    },
    /// The lock was taken away in the middle of a command.
    #[error(
        "another writer took the lock .echoes-vault/lock away while this command was working; look at the result and try again"
    )]
    LockLost,
    /// Called off.
    #[error(
        "interrupted before everything was written; the lock has been given back; run the command again"
    )]
    Interrupted,
    /// The repository's runtime is newer and must do the work.
    #[error(
        "the project's runtime is engine {0}, which is newer than this one; it has to run this command: python3 .echoes-vault/echoes_vault.py"
    )]
    NewerRuntime(String),
    /// The repository's runtime is older.
    #[error(
        "the project's runtime is engine {0}, which is older than this one; run `commsd vault upgrade` there first"
    )]
    OlderRuntime(String),
    /// The repository's runtime is something else.
    #[error(
        ".echoes-vault/echoes_vault.py cannot be worked with ({0}); move it away and run `commsd vault upgrade`, or use the tool that it belongs to"
    )]
    ForeignRuntime(String),
    /// There is no runtime, and this command installs none.
    #[error("there is no project runtime; run `commsd vault upgrade` there first")]
    NoRuntime,
    /// The newer runtime could not be run.
    #[error("cannot run the project's newer runtime: {0}; install Python 3.9 or later as python3")]
    Python(io::Error),
    /// Some files were replaced before the command failed.
    #[error("{source}; already written: {}", escape_untrusted(&written.join(", ")))]
    Partly {
        /// Files that hold their new content.
        written: Vec<String>,
        /// What stopped the rest.
        source: Box<VaultError>,
    },
}

/// `path` fit for a message.
fn shown(path: &Path) -> String {
    escape_untrusted(&path.to_string_lossy())
}

impl VaultError {
    /// Stable code of this error.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Workspace { .. } => "vault_workspace",
            Self::Io { .. } => "vault_io",
            Self::Outside(_) => "vault_outside",
            Self::SymbolicLink(_) => "vault_symbolic_link",
            Self::NotRegular(_) => "vault_not_regular",
            Self::TooLarge { .. } => "vault_too_large",
            Self::NotUtf8(_) => "vault_not_utf8",
            Self::NameNotUtf8(_) => "vault_name_not_utf8",
            Self::Raced(_) => "vault_raced",
            Self::Uninitialized => "vault_uninitialized",
            Self::Legacy => "vault_legacy",
            Self::Marker(_) => "vault_marker",
            Self::Payload(_) | Self::PayloadFile { .. } => "vault_payload",
            Self::Name { .. } => "vault_name",
            Self::Page { .. } => "vault_page",
            Self::Index(_) => "vault_index",
            Self::Migration(_) => "vault_migration",
            Self::NoPage(_) => "vault_no_page",
            Self::HashMissing(_) => "vault_hash_missing",
            Self::HashStale(_) => "vault_hash_stale",
            Self::PageTwice(_) => "vault_page_twice",
            Self::Unconfirmed => "vault_unconfirmed",
            Self::Agent(_) => "vault_agent",
            Self::Request(_) => "vault_request",
            Self::Query => "vault_query",
            Self::ForeignFile(_) => "vault_foreign_file",
            Self::Block { .. } => "vault_block",
            Self::Locked { .. } => "vault_locked",
            Self::LockLost => "vault_lock_lost",
            Self::Interrupted => "vault_interrupted",
            Self::NewerRuntime(_) => "vault_newer_runtime",
            Self::OlderRuntime(_) => "vault_older_runtime",
            Self::ForeignRuntime(_) => "vault_foreign_runtime",
            Self::NoRuntime => "vault_no_runtime",
            Self::Python(_) => "vault_python",
            Self::Partly { source, .. } => source.code(),
        }
    }
}
