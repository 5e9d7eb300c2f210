//! Discovery by beacons, as clients ask for it: who can be heard, what is announced, and how far this
//! machine makes itself known. When datagrams go out is `mesh::node`'s matter.

use super::health::condition;
use super::owner::{Owner, Reply};
use crate::api::types::{
    self, ApiError, MeshAdapter, MeshVisibility, Request, RequestId, Severity,
};
use crate::mesh::discovery::{Found, Side, Sides, Visibility};
use crate::mesh::node::{CommandError, CommandResult, DiscoveryCommand, Input, OpId};
use crate::runtime::local_socket::ConnId;

/// How the answer to a discovery command becomes the answer to a client.
pub(super) enum DiscoveryReply {
    /// Whoever was heard.
    Found,
    /// What is announced now; its id is yet to come.
    Advertised(Box<types::MeshAdvertised>),
    /// The advertisement with this id.
    Withdrawn(String),
    /// How far this machine is known now.
    Visibility,
}

const fn visibility(visibility: MeshVisibility) -> Visibility {
    match visibility {
        MeshVisibility::Discoverable => Visibility::Discoverable,
        MeshVisibility::Quiet => Visibility::Quiet,
        MeshVisibility::Dark => Visibility::Dark,
    }
}

const fn shown(visibility: Visibility) -> MeshVisibility {
    match visibility {
        Visibility::Discoverable => MeshVisibility::Discoverable,
        Visibility::Quiet => MeshVisibility::Quiet,
        Visibility::Dark => MeshVisibility::Dark,
    }
}

const fn side(adapter: MeshAdapter) -> Side {
    match adapter {
        MeshAdapter::Loopback => Side::Loopback,
        MeshAdapter::Network => Side::Network,
    }
}

fn found(found: Found) -> types::MeshFound {
    types::MeshFound {
        host: found.host.to_string(),
        port: found.port,
        name: found.name,
        device: found.device.map(|device| device.hex()),
        ago_ms: found.ago_ms,
    }
}

impl Owner {
    pub(super) fn discovery_request(&mut self, conn: ConnId, id: &RequestId, request: Request) {
        match self.discovery_command(request) {
            Ok(Some((command, reply))) => {
                self.next_op += 1;
                let op = OpId(self.next_op);
                self.replies.insert(op, (conn, id.clone(), Reply::Discovery(reply)));
                self.inputs.push_back(Input::Discovery { op, command });
            }
            Ok(None) => self.answer(conn, id, Ok(self.mesh_visibilities())),
            Err(error) => self.refuse(conn, id, error),
        }
    }

    /// What the node is asked; nothing where the answer is known here.
    fn discovery_command(
        &self,
        request: Request,
    ) -> Result<Option<(DiscoveryCommand, DiscoveryReply)>, ApiError> {
        Ok(Some(match request {
            Request::MeshDiscover(_) => {
                self.needs_beacons()?;
                (DiscoveryCommand::Look, DiscoveryReply::Found)
            }
            Request::MeshAdvertise(p) => self.advertisement(p)?,
            Request::MeshUnadvertise(p) => {
                (DiscoveryCommand::Withdraw(p.id.clone()), DiscoveryReply::Withdrawn(p.id))
            }
            Request::MeshSetVisibility(p) => {
                let (visibility, side) = (visibility(p.visibility), p.adapter.map(side));
                let command = DiscoveryCommand::SetVisibility { visibility, side };
                (command, DiscoveryReply::Visibility)
            }
            _ => return Ok(None),
        }))
    }

    fn needs_beacons(&self) -> Result<(), ApiError> {
        if self.hub.status().first_contact {
            return Ok(());
        }
        Err(ApiError::new(
            "no_discovery",
            "beacons are neither sent nor heard: first contact is off, or its port cannot be bound",
            "see `commsd status`; `first-contact = false` in config.toml turns it off",
        ))
    }

    /// What is to be announced, to whom it can go now.
    fn advertisement(
        &self,
        p: types::MeshAdvertiseParams,
    ) -> Result<(DiscoveryCommand, DiscoveryReply), ApiError> {
        self.needs_beacons()?;
        let port = p
            .port
            .or_else(|| self.network_listener.map(|at| at.port()))
            .unwrap_or(self.config.port);
        if port == 0 {
            return Err(ApiError::invalid_params("mesh.advertise", "`port`: 1 to 65535"));
        }
        let known = self.node.mesh_visibility();
        let goes = |adapter: &MeshAdapter| {
            p.adapter.is_none_or(|wanted| wanted == *adapter)
                && known.of(side(*adapter)) == Visibility::Discoverable
                && (self.config.broadcast || *adapter == MeshAdapter::Loopback)
        };
        let adapters: Vec<MeshAdapter> =
            [MeshAdapter::Loopback, MeshAdapter::Network].into_iter().filter(goes).collect();
        if adapters.is_empty() {
            return Err(ApiError::new(
                "not_announced",
                "nothing is announced there: this machine is quiet or dark, or broadcasts are off",
                "see mesh_get_visibility; `no-broadcast` is set where the daemon is started",
            ));
        }
        let command =
            DiscoveryCommand::Advertise { name: p.name.clone(), port, side: p.adapter.map(side) };
        let made = types::MeshAdvertised {
            id: String::new(),
            name: p.name,
            method: p.method,
            port,
            adapters,
        };
        Ok((command, DiscoveryReply::Advertised(Box::new(made))))
    }

    fn mesh_visibilities(&self) -> types::MeshVisibilities {
        let Sides { loopback, network } = self.node.mesh_visibility();
        types::MeshVisibilities {
            loopback: shown(loopback),
            network: shown(network),
            broadcast: self.config.broadcast,
        }
    }

    pub(super) fn discovery_answered(
        &mut self,
        conn: ConnId,
        id: &RequestId,
        reply: DiscoveryReply,
        result: Result<CommandResult, CommandError>,
    ) {
        match (reply, result) {
            (_, Err(error)) => self.refuse(conn, id, error.into()),
            (DiscoveryReply::Found, Ok(CommandResult::Discovered(list))) => {
                let list = list.into_iter().map(found).collect();
                self.answer(conn, id, Ok(types::MeshDiscovered { found: list }));
            }
            (DiscoveryReply::Advertised(made), Ok(CommandResult::Advertised(advert))) => {
                self.answer(conn, id, Ok(types::MeshAdvertised { id: advert, ..*made }));
            }
            (DiscoveryReply::Withdrawn(advert), Ok(CommandResult::Withdrawn(withdrawn))) => {
                self.answer(conn, id, Ok(types::MeshUnadvertised { id: advert, withdrawn }));
            }
            (DiscoveryReply::Visibility, Ok(_)) => {
                let known = self.mesh_visibilities();
                self.answer(conn, id, Ok(known));
            }
            _ => self.refuse(conn, id, ApiError::internal("no such result")),
        }
    }

    /// A machine that does not make itself known is easily forgotten to be so.
    pub(super) fn discovery_condition(&self) -> Option<types::Health> {
        let Sides { loopback, network } = self.node.mesh_visibility();
        if [loopback, network] == [Visibility::Discoverable; 2] {
            return None;
        }
        let text = format!(
            "beacons: {} on this machine, {} on the network",
            shown(loopback),
            shown(network)
        );
        let todo = "nothing, if that is meant; mesh_set_visibility discoverable undoes it";
        Some(condition("mesh_not_discoverable", Severity::Info, text, todo))
    }
}
