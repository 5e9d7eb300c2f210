//! Vaults that are shared over the mesh: what is shared, permissions, and calls.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Bounded, Time, WaitSecs};

/// How long a permission lasts, in seconds: at most a year and a day.
pub type GrantSecs = Bounded<1, 31_622_400>;

words! {
    /// What may be done with a shared vault.
    VaultMode {
        /// Look at it.
        Read = "read",
        /// Look at it and write to it.
        Write = "write",
    }

    /// A command on a shared vault.
    VaultOp {
        /// Its condition.
        Inspect = "inspect",
        /// The index of its pages.
        Index = "index",
        /// A page's text and hash.
        Page = "page",
        /// Lines of pages.
        Search = "search",
        /// A page's hash.
        Hash = "hash",
        /// Write a note.
        Append = "append",
        /// Write a page.
        Upsert = "upsert",
        /// Save a session.
        End = "end",
    }

    /// What has become of a request for a permission.
    PermissionStatus {
        /// It is given.
        Granted = "granted",
        /// Its owner has to decide; the outcome comes as an event.
        Pending = "pending",
    }
}

impl VaultOp {
    /// Whether it needs the permission to write.
    #[must_use]
    pub const fn writes(self) -> bool {
        matches!(self, Self::Append | Self::Upsert | Self::End)
    }
}

params! {
    /// How far a yes to a request for a capability goes.
    GrantTerms {
        ;
        /// Until when; 30 days from now without it.
        expires: Time,
        /// How often the permission may be passed on; not at all without it.
        delegations_remaining: u64,
        /// Less than was asked for.
        mode: VaultMode,
    }

    /// `vault.share`: lets peers ask for a vault of this machine.
    VaultShareParams {
        /// A folder in the project, absolute.
        path: String,
        /// What peers call it.
        name: String,
        ;
        /// What can be granted; `read` without it.
        mode: VaultMode,
    }

    /// `vault.unshare`: what was granted is taken back.
    VaultUnshareParams {
        /// Its name.
        name: String,
        ;
    }

    /// `vault.shares`.
    VaultSharesParams { ; }

    /// `vault.revoke`: takes back what was granted.
    VaultRevokeParams {
        /// The share's name.
        name: String,
        ;
        /// From whom; from everybody without it.
        agent: String,
    }

    /// `vault.request`: asks the owner of a share for permission.
    VaultRequestParams {
        /// `AGENT/SHARE`.
        at: String,
        ;
        /// What for; `read` without it.
        mode: VaultMode,
        /// Until when it is needed at most.
        valid_until: Time,
        /// Wait so long for the decision.
        wait: WaitSecs,
    }

    /// `vault.delegate`: hands a permission on to another agent.
    VaultDelegateParams {
        /// `AGENT/SHARE` that this agent may use.
        at: String,
        /// Who is to have it.
        agent: String,
        ;
        /// What for; `read` without it.
        mode: VaultMode,
        /// Until when; as long as one's own without it.
        expires: Time,
        /// How often it may be passed on again; not at all without it.
        delegations_remaining: u64,
    }

    /// `vault.call`: a command on a share.
    VaultCallParams {
        /// `AGENT/SHARE`.
        at: String,
        /// The command.
        op: VaultOp,
        ;
        /// `page`, `hash`: which one.
        page: String,
        /// `search`: the text.
        query: String,
        /// `search`: at most so many lines.
        limit: i64,
        /// `append`, `upsert`, `end`: a JSON object as text, if it is short.
        payload: String,
        /// The same in a file: its absolute path.
        payload_file: String,
        /// `end`: the user has asked for it.
        confirmed: bool,
        /// Go on with an answer behind so many bytes.
        offset: u64,
    }
}

results! {
    /// A permission that was granted.
    VaultGrant {
        /// Who has it.
        agent: String,
        /// Its name where known.
        agent_name: Option<String>,
        /// What for.
        mode: VaultMode,
        /// Since when.
        at: Time,
        /// Until when.
        expires: Time,
        /// How often it may be passed on.
        delegations_remaining: u64,
        /// It was taken back.
        revoked: bool,
    }

    /// A shared vault.
    VaultShare {
        /// What peers call it.
        name: String,
        /// The workspace.
        path: String,
        /// What can be granted.
        mode: VaultMode,
        /// Since when.
        at: Time,
        /// Who may use it, or might.
        grants: Vec<VaultGrant>,
    }

    /// `vault.shares`.
    VaultShares {
        /// By name.
        shares: Vec<VaultShare>,
    }

    /// `vault.request`.
    VaultPermission {
        /// Id of the owner's device.
        agent: String,
        /// The share.
        share: String,
        /// What for: what was asked, or what was granted of it.
        mode: VaultMode,
        /// What has become of it.
        status: PermissionStatus,
        /// Until when.
        expires: Option<Time>,
    }

    /// `vault.call`: a part of the answer.
    VaultAnswer {
        /// JSON text, from `offset`.
        answer: String,
        /// Bytes of the whole text before this part.
        offset: u64,
        /// Bytes of the whole text.
        total: u64,
        /// SHA-256 of the whole text, hex: parts with different ones do not belong together.
        sha256: String,
    }
}
