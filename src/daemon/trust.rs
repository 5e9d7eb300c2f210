//! Whom the user trusts beyond this machine: the file as it changes, for the node; and what agents
//! and operators want changed in it.

use super::health::condition;
use super::owner::Owner;
use crate::api::types::{self, ApiError, Severity};
use crate::identity::device::DeviceId;
use crate::identity::files::BaseDir;
use crate::identity::names;
use crate::identity::trust::{Trust, TrustError, TrustKind};
use crate::mesh::node::{Input, TrustList};

/// Dials of the hub in a row that have come to nothing, after which it is worth a word.
const HUB_FAILURES: u32 = 3;

/// The trust file, read again when it has changed: other bridges of the user change it as well.
pub(super) struct TrustFile {
    base: BaseDir,
    file: Option<Trust>,
    /// What the node was told.
    told: TrustList,
    problem: Option<String>,
}

impl TrustFile {
    pub(super) fn new(base: BaseDir) -> Self {
        Self { base, file: None, told: TrustList::default(), problem: None }
    }

    /// The file as it is now.
    fn fresh(&mut self) -> Result<&mut Trust, TrustError> {
        match self.file.take() {
            Some(mut file) => {
                let read = file.refresh();
                let file = self.file.insert(file);
                read.map(|_| file)
            }
            None => Trust::open(&self.base).map(|file| self.file.insert(file)),
        }
    }

    fn list(&mut self) -> Result<TrustList, TrustError> {
        let file = self.fresh()?;
        Ok(TrustList {
            devices: file.list(TrustKind::Device).clone(),
            principals: file.list(TrustKind::Principal).clone(),
            machines: file.list(TrustKind::Machine).clone(),
        })
    }
}

const fn kind(kind: Option<types::TrustKind>) -> TrustKind {
    match kind {
        None | Some(types::TrustKind::Device) => TrustKind::Device,
        Some(types::TrustKind::Principal) => TrustKind::Principal,
        Some(types::TrustKind::Machine) => TrustKind::Machine,
    }
}

fn trust_error(error: &TrustError) -> ApiError {
    let todo = match error {
        TrustError::Id(_) => {
            "give the full id: 64 hex digits; the other side sees its own with whoami"
        }
        _ => "mend gateway-trust.json, or move it away",
    };
    ApiError::new(error.code(), error.to_string(), todo)
}

impl Owner {
    /// Tells the node when the file has changed. One that cannot be read trusts whom it did before.
    pub(super) fn look_at_trust(&mut self) {
        match self.trust.list() {
            Ok(list) => {
                self.trust.problem = None;
                if list != self.trust.told {
                    self.trust.told = list.clone();
                    self.inputs.push_back(Input::Trusted(list));
                }
            }
            Err(error) => self.trust.problem = Some(error.to_string()),
        }
    }

    pub(super) fn trust_changed(
        &mut self,
        id: &str,
        wanted: Option<types::TrustKind>,
        trusted: bool,
    ) -> Result<types::TrustChanged, ApiError> {
        let named = names::full_id(id).map_err(|error| trust_error(&error.into()))?;
        let wanted = wanted.unwrap_or(types::TrustKind::Device);
        if trusted {
            self.may_be_trusted(&named)?;
        }
        let changed = self.trust.fresh().and_then(|file| match trusted {
            true => file.add(kind(Some(wanted)), id),
            false => file.remove(kind(Some(wanted)), id),
        });
        let changed = changed.map_err(|error| trust_error(&error))?;
        self.look_at_trust();
        Ok(types::TrustChanged { id: named.hex(), kind: wanted, trusted, changed })
    }

    /// That an id is not one of ours.
    pub(super) fn may_be_trusted(&self, id: &DeviceId) -> Result<(), ApiError> {
        if !self.is_own(id) {
            return Ok(());
        }
        Err(ApiError::new(
            "own_device",
            "that is this machine, its user or one of its agents: nobody else's",
            "give an id of the other side",
        ))
    }

    /// Whether an id is one of ours. A user is: its machines trust each other by its proofs only
    /// where it says so, so that is allowed.
    fn is_own(&self, id: &DeviceId) -> bool {
        *id == self.node.daemon()
            || self.hosted.contains_key(id)
            || self.machine.as_ref() == Some(id)
    }

    pub(super) fn trusted(&mut self) -> Result<types::Trusted, ApiError> {
        let list = self.trust.list().map_err(|error| trust_error(&error))?;
        let ids =
            |ids: std::collections::BTreeSet<DeviceId>| ids.iter().map(DeviceId::hex).collect();
        Ok(types::Trusted {
            devices: ids(list.devices),
            principals: ids(list.principals),
            machines: ids(list.machines),
            hub: self.config.hub.clone(),
        })
    }

    pub(super) fn trust_conditions(&self) -> Vec<types::Health> {
        let mut found = Vec::new();
        let file = self.trust.file.as_ref();
        let problem = self.trust.problem.as_deref().or_else(|| file.and_then(Trust::problem));
        if let Some(problem) = problem {
            found.push(condition(
                "trust_unreadable",
                Severity::Warning,
                format!("gateway-trust.json: {problem}"),
                "mend it or move it away; until then nobody new is trusted",
            ));
        }
        if file.is_some_and(Trust::loose) {
            found.push(condition(
                "trust_loose",
                Severity::Warning,
                "gateway-trust.json is open to other users",
                "chmod 600 it",
            ));
        }
        if let Some(hub) = self.node.hub_view()
            && hub.since.is_none()
            && hub.failures >= HUB_FAILURES
        {
            found.push(condition(
                "hub_unreachable",
                Severity::Warning,
                format!("the relay hub {} could not be reached {} times", hub.url, hub.failures),
                "see hub_down in `commsd logs` for the reason; the daemon goes on trying",
            ));
        }
        found
    }
}
