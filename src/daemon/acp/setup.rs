//! An office made ready: the owner's key, its state directory, its relays, its adapter.

use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use tokio_util::sync::CancellationToken;

use super::audit::{AuditFiles, AuditPlan};
use super::mesh::Mesh;
use super::office::{Furnishing, Office, open};
use super::tools::{Tool, Toolbox};
use super::transports::{Local, Transports};
use super::{OfficeError, OfficeTask};
use crate::acp::code::Error;
use crate::acp::did::{Did, Secret};
use crate::acp::endpoint::EndpointPolicy;
use crate::acp::gateway::Admission;
use crate::acp::objects::Gate;
use crate::acp::owner::{Owner, ask_policy};
use crate::runtime::acp_transport::Form;
use crate::runtime::adapter::{Adapter, AdapterOptions};
use crate::runtime::clock::unix_now;
use crate::store::OwnerStore;

/// Bytes of a key file; one has below 300.
const MAX_KEY_FILE: u64 = 4096;

/// Where runs have their directories, below an owner's state directory.
const RUNS: &str = "runs";

/// What an office is made of.
pub struct OfficeOptions {
    /// The owner's key.
    pub key: Secret,
    /// Below it every owner has a directory of its own.
    pub state_dir: PathBuf,
    /// Relays that the owner listens on.
    pub relays: Vec<String>,
    /// Which endpoints may be dialled.
    pub endpoints: EndpointPolicy,
    /// How mail is fetched.
    pub form: Form,
    /// Gates that are open by policy.
    pub auto: Vec<Gate>,
    /// Who may propose without an invite.
    pub admission: Admission,
    /// What runs the work, and how many runs there are at one time; `None` takes no work.
    pub work: Option<(AdapterOptions, usize)>,
    /// Tools that may be granted to workers.
    pub tools: Vec<Tool>,
    /// Audit files.
    pub audit: AuditPlan,
    /// Other owners in this process.
    pub local: Local,
    /// Peers of the mesh.
    pub mesh: Option<Mesh>,
}

/// Reads a key file, which nobody else may read.
///
/// # Errors
/// [`OfficeError::Key`].
pub fn read_key(path: &Path) -> Result<Secret, OfficeError> {
    use std::io::Read as _;
    let failed = |reason: String| OfficeError::Key { path: path.to_owned(), reason };
    // Looked at first: opening a pipe would wait for its other end.
    if !std::fs::metadata(path).map_err(|error| failed(error.to_string()))?.is_file() {
        return Err(failed("it is no file".into()));
    }
    let file = std::fs::File::open(path).map_err(|error| failed(error.to_string()))?;
    let meta = file.metadata().map_err(|error| failed(error.to_string()))?;
    if meta.permissions().mode() & 0o077 != 0 {
        return Err(failed("others can read it; make it private with chmod 600".into()));
    }
    let mut bytes = zeroize::Zeroizing::new(Vec::new());
    file.take(MAX_KEY_FILE + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| failed(error.to_string()))?;
    Secret::from_key_file(&bytes).map_err(|error| failed(error.to_string()))
}

/// The state directory of one owner.
#[must_use]
pub fn owner_dir(state_dir: &Path, did: Did) -> PathBuf {
    let text = did.to_string();
    state_dir.join(text.strip_prefix("did:key:").unwrap_or(&text))
}

impl OfficeOptions {
    /// Options of an owner that asks at every gate, takes no work and knows nobody.
    #[must_use]
    pub fn new(key: Secret, state_dir: PathBuf) -> Self {
        Self {
            key,
            // Runs work in directories of their own, and are told paths below it.
            state_dir: std::path::absolute(&state_dir).unwrap_or(state_dir),
            relays: Vec::new(),
            endpoints: EndpointPolicy { allow_private: true, allow_insecure: false },
            form: Form::Sse,
            auto: Vec::new(),
            admission: Admission::Invited,
            work: None,
            tools: Vec::new(),
            audit: AuditPlan::default(),
            local: Local::default(),
            mesh: None,
        }
    }

    /// The ways to others that these options name.
    ///
    /// # Errors
    /// `ENDPOINT_BLOCKED` for a relay that may not be used.
    pub fn transports(&self) -> Result<Transports, OfficeError> {
        let transports = Transports::new(
            self.key.clone(),
            self.relays.clone(),
            self.endpoints,
            self.form,
            self.local.clone(),
            self.mesh.clone(),
        );
        Ok(transports.map_err(|error| Error::new(error.code(), error.message()))?)
    }

    /// Makes the office and opens it.
    ///
    /// # Errors
    /// [`OfficeError`]; nothing is left open then.
    pub async fn open(
        self,
        transports: Transports,
        stop: CancellationToken,
    ) -> Result<(Office, OfficeTask), OfficeError> {
        let furnish = move || self.furnish(transports);
        open(tokio::task::spawn_blocking(furnish).await??, stop)
    }

    fn furnish(self, transports: Transports) -> Result<Furnishing, OfficeError> {
        let dir = owner_dir(&self.state_dir, self.key.did());
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir);
        made.map_err(|error| OfficeError::State { path: dir.clone(), reason: error.to_string() })?;
        let work_dir = dir.join(RUNS);
        let (adapter, profile) = match self.work {
            None => (None, None),
            Some((mut options, max_runs)) => {
                options.sandbox.work_dir.clone_from(&work_dir);
                let adapter = Adapter::from_options(options)?;
                let profile = adapter.profile(max_runs);
                (Some(adapter), Some(profile))
            }
        };
        let (store, kept) = OwnerStore::open(&dir)?;
        let now = unix_now();
        let policy = ask_policy(self.key.did(), &self.auto, now);
        let mut owner = Owner::new(self.key.clone(), None, policy, profile);
        owner.admit(self.admission);
        owner.restore(kept.records, kept.secrets, now)?;
        owner.restore_forgotten(kept.forgotten);
        let audit = AuditFiles::open(self.audit, &dir, self.key, &owner)?;
        let tools = Toolbox::new(self.tools)?;
        Ok(Furnishing { owner, store, adapter, work_dir, transports, tools, audit })
    }
}
