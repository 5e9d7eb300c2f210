//! Names and grants that stand in the user's files: petnames, this machine's name, and who may write to
//! the user's agents without a question.

use data_encoding::BASE64;
use serde_json::Value;

use super::owner::Owner;
use crate::api::types::{self, ApiError};
use crate::identity::device::DeviceId;
use crate::identity::entropy::OsEntropy;
use crate::identity::issuer::{IssuerError, IssuerFile, IssuerKind, IssuerTable};
use crate::identity::petnames::{self, Petnames, PetnamesError};
use crate::mesh::node::Input;
use crate::runtime::local_socket::ConnId;

fn petname_error(error: PetnamesError) -> ApiError {
    ApiError::plain(error.code(), error.to_string())
}

impl Owner {
    pub(super) fn petname_list(&self) -> Result<types::Petnames, ApiError> {
        let petnames = Petnames::read(&self.base).map_err(petname_error)?;
        let petnames = petnames
            .iter()
            .map(|(device, name)| types::Petname { device: device.hex(), name: name.to_owned() })
            .collect();
        Ok(types::Petnames { petnames })
    }

    /// Of somebody who is not seen any more the name itself tells whose it is.
    pub(super) fn petname_cleared(
        &self,
        device: &str,
        conn: ConnId,
    ) -> Result<types::Petname, ApiError> {
        let had = Petnames::read(&self.base).map_err(petname_error)?;
        let mut called = had.iter().filter(|(_, name)| *name == device);
        let id = match (called.next(), called.next()) {
            (Some((id, _)), None) => *id,
            _ => self.device_meant(device, conn)?,
        };
        let name = had.get(&id).unwrap_or_default().to_owned();
        petnames::clear(&self.base, &id.hex()).map_err(petname_error)?;
        Ok(types::Petname { device: id.hex(), name })
    }

    fn device_meant(&self, text: &str, conn: ConnId) -> Result<DeviceId, ApiError> {
        let viewer = self.viewer(conn).unwrap_or(self.node.daemon());
        self.find_agent(text, &viewer)
    }

    pub(super) fn petname_given(
        &self,
        params: &types::PetnameSetParams,
        conn: ConnId,
    ) -> Result<types::Petname, ApiError> {
        let device = self.device_meant(&params.device, conn)?.hex();
        let set = petnames::set(&self.base, &device, &params.name);
        set.map(|(device, name)| types::Petname { device: device.hex(), name })
            .map_err(petname_error)
    }

    /// Whom a grant is for. A user is no agent, so it has to be named in full.
    pub(super) fn grant_bearer(
        &self,
        text: &str,
        principal: bool,
        viewer: &DeviceId,
    ) -> Result<DeviceId, ApiError> {
        if principal && DeviceId::parse(text).is_none() {
            return Err(ApiError::new(
                "invalid_device",
                "a user is named by its full id",
                "its agents see it with whoami, as Principal",
            ));
        }
        self.find_agent(text, viewer)
    }

    /// The id of the grant that a device or user has from our user, whichever program issued it.
    pub(super) fn dm_grant_of(&self, bearer: &DeviceId) -> Result<Option<[u8; 16]>, ApiError> {
        let mut entropy =
            OsEntropy::open().map_err(|error| ApiError::plain("entropy", error.to_string()))?;
        let now = self.now().unix;
        let (user, _) = IssuerFile::open(&self.base, IssuerKind::User, now, &mut entropy)
            .map_err(|error| ApiError::plain(error.code(), error.to_string()))?;
        let id = user.entry(IssuerTable::IssuedDmGrants, &bearer.hex());
        let id = id.and_then(Value::as_str).and_then(|id| BASE64.decode(id.as_bytes()).ok());
        Ok(id.and_then(|id| id.try_into().ok()))
    }

    /// Changes the name of this machine for all its bridges, and in what our agents say.
    pub(super) fn machine_named(
        &mut self,
        name: Option<String>,
    ) -> Result<types::MachineName, ApiError> {
        let failed = |error: IssuerError| ApiError::plain(error.code(), error.to_string());
        let mut entropy =
            OsEntropy::open().map_err(|error| ApiError::plain("entropy", error.to_string()))?;
        let now = self.now();
        let (mut machine, _) =
            IssuerFile::open(&self.base, IssuerKind::Machine, now.unix, &mut entropy)
                .map_err(failed)?;
        machine.set_display_name(name.as_deref()).map_err(failed)?;
        let name = machine.display_name().map(str::to_owned);
        self.inputs.push_back(Input::MachineNamed(name.clone()));
        Ok(types::MachineName { name })
    }

    pub(super) fn petnames(&self) -> Option<Petnames> {
        Petnames::read(&self.base).ok()
    }
}
