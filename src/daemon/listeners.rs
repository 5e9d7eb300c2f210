//! Listeners for other machines that agents and operators open and close, beside the daemon's own.

use std::net::{IpAddr, SocketAddr};

use tokio_util::sync::CancellationToken;

use super::logging::{emit, event};
use super::owner::Owner;
use crate::api::types::{self, ApiError, ListenPolicy};
use crate::identity::entropy::{self, OsEntropy};
use crate::mesh::session::Policy;

/// Listeners beside the daemon's own: more are a mistake.
const MAX_LISTENERS: usize = 16;

/// One that somebody has opened.
pub(super) struct Listener {
    id: String,
    address: SocketAddr,
    policy: ListenPolicy,
    closed: CancellationToken,
}

fn shown(
    id: &str,
    address: SocketAddr,
    policy: ListenPolicy,
    default: bool,
) -> types::MeshListener {
    types::MeshListener {
        id: id.to_owned(),
        host: address.ip().to_string(),
        port: address.port(),
        policy,
        default,
    }
}

impl Owner {
    pub(super) fn listen(
        &mut self,
        p: &types::MeshListenParams,
    ) -> Result<types::MeshListener, ApiError> {
        let ip: IpAddr = p.host.parse().map_err(|_| {
            ApiError::new(
                ApiError::INVALID_PARAMS,
                "mesh.listen: `host`: an address of this machine",
                "mesh_interfaces lists them",
            )
        })?;
        if self.listeners.len() >= MAX_LISTENERS {
            return Err(ApiError::new(
                "too_many_listeners",
                format!("at most {MAX_LISTENERS} listeners can be opened"),
                "close one with mesh_unlisten",
            ));
        }
        let wanted = p.policy.unwrap_or(ListenPolicy::Full);
        let policy = match wanted {
            ListenPolicy::Full => Policy::Full,
            ListenPolicy::Observe => Policy::Observe,
            ListenPolicy::RoomsOnly => Policy::RoomsOnly,
            ListenPolicy::Gateway => Policy::Gateway,
        };
        let mut entropy =
            OsEntropy::open().map_err(|error| ApiError::plain("entropy", error.to_string()))?;
        let id = data_encoding::HEXLOWER.encode(&entropy::draw::<4>(&mut entropy));
        let address = SocketAddr::new(ip, p.port.unwrap_or(0));
        let (address, closed) = self.hub.listen(address, policy).map_err(|error| {
            ApiError::new(error.code(), error.to_string(), "choose another address or port")
        })?;
        emit(&event("listening").with("what", "network").with("address", address));
        let listener = Listener { id: id.clone(), address, policy: wanted, closed };
        self.listeners.push(listener);
        Ok(shown(&id, address, wanted, false))
    }

    pub(super) fn unlisten(&mut self, id: &str) -> Result<types::MeshListener, ApiError> {
        let Some(at) = self.listeners.iter().position(|listener| listener.id == id) else {
            return Err(ApiError::new(
                "listener_not_found",
                "no listener that can be closed has this id",
                "mesh_listeners lists them; the daemon's own stay",
            ));
        };
        let Listener { id, address, policy, closed } = self.listeners.remove(at);
        closed.cancel();
        Ok(shown(&id, address, policy, false))
    }

    pub(super) fn listener_list(&self) -> Vec<types::MeshListener> {
        let well_known = SocketAddr::from(([127, 0, 0, 1], self.config.port));
        let held = self.node.status().port == crate::mesh::formation::PortState::Holding;
        let full = ListenPolicy::Full;
        let own = held.then(|| shown("default", well_known, full, true));
        let configured = self.network_listener.map(|at| shown("configured", at, full, true));
        let opened = self.listeners.iter().map(|l| shown(&l.id, l.address, l.policy, false));
        own.into_iter().chain(configured).chain(opened).collect()
    }
}

/// The machine's addresses.
pub(super) fn interfaces() -> Result<types::MeshInterfaces, ApiError> {
    let found = if_addrs::get_if_addrs().map_err(|error| {
        ApiError::new(
            "interfaces_unknown",
            format!("the system does not list its addresses: {error}"),
            "look at them another way (ip address); mesh_listen takes any of this machine",
        )
    })?;
    let interfaces = found
        .into_iter()
        .map(|interface| types::MeshInterface {
            internal: interface.is_loopback(),
            address: interface.ip().to_string(),
            family: if interface.ip().is_ipv4() { "IPv4" } else { "IPv6" }.to_owned(),
            name: interface.name,
        })
        .collect();
    Ok(types::MeshInterfaces { interfaces })
}
