//! Connecting to a machine that an agent names (`mesh_connect`): a dial by name or address, then
//! the approval of the other side as for every machine (`control`). Whoever answers there is taken
//! for the one that was meant, which is this side's approval; it is dialled again when the link
//! breaks, for as long as the daemon runs and nobody has said no.

use std::collections::BTreeMap;

use super::super::records::Now;
use super::super::session::{Origin, Policy, SessionId, SessionKind};
use super::{CommandError, CommandResult, DialFor, DialId, DialTarget, Node, OpId, Output};
use crate::identity::device::DeviceId;

/// Machines that are connected to by name.
pub const MAX_CONNECTIONS: usize = 64;
/// Pause before one is dialled again, at first and at most.
const REDIAL_FIRST_MS: u64 = 5_000;
/// See [`REDIAL_FIRST_MS`].
const REDIAL_MAX_MS: u64 = 300_000;

/// A dial on somebody's word.
pub(super) struct Wish {
    /// Where.
    pub host: String,
    /// See `host`.
    pub port: u16,
    /// The command that is answered; none where a link is made again.
    pub op: Option<OpId>,
    /// Who was there before.
    pub device: Option<DeviceId>,
}

/// A machine that is connected to by name.
struct Connection {
    host: String,
    port: u16,
    failures: u32,
    /// When it is dialled if there is no session; none while a dial or session is there.
    dial_at: Option<u64>,
}

/// Those that are.
#[derive(Default)]
pub(super) struct Connections(BTreeMap<DeviceId, Connection>);

impl Node {
    pub(super) fn connect_to(&mut self, host: String, port: u16, op: OpId) {
        let dialling = self.dials.values().filter(|d| matches!(d, DialFor::Wish(_))).count();
        if self.connections.0.len() + dialling >= MAX_CONNECTIONS {
            let text = format!("at most {MAX_CONNECTIONS} machines are connected to by name");
            return self.fail(op, CommandError::new("too_many_connections", text));
        }
        self.dial_wish(Wish { host, port, op: Some(op), device: None });
    }

    fn dial_wish(&mut self, wish: Wish) {
        let dial = DialId(self.id());
        let target = DialTarget::Named(wish.host.clone(), wish.port);
        let expect = wish.device;
        self.dials.insert(dial, DialFor::Wish(wish));
        self.outputs.push_back(Output::Dial { dial, local: self.daemon, target, expect });
    }

    pub(super) fn wish_dialled(
        &mut self,
        wish: Wish,
        session: SessionId,
        remote: DeviceId,
        origin: Origin,
        now: Now,
    ) {
        let Wish { host, port, op, device } = wish;
        if device.is_some_and(|device| device != remote) {
            self.outputs.push_back(Output::Close { session, reason: "wrong_device" });
            return self.connection_failed(device, now);
        }
        // Asked for anew, an earlier no of ours or theirs does not count.
        if op.is_some() && !self.is_hosted(&remote) {
            self.refused_remotes.remove(&remote);
            self.approve(remote, Policy::Full);
        }
        self.session_opened(session, self.daemon, remote, SessionKind::NetworkDialled, origin, now);
        if !self.sessions.contains_key(&session) {
            if let Some(op) = op {
                let text = "this daemon is there itself, or has too many sessions with it";
                self.fail(op, CommandError::new("connect_refused", text));
            }
            return self.connection_failed(device, now);
        }
        let connection = Connection { host, port, failures: 0, dial_at: None };
        self.connections.0.insert(remote, connection);
        if let Some(op) = op {
            let result = Ok(CommandResult::Connected(remote));
            self.outputs.push_back(Output::Reply { op, result });
        }
    }

    pub(super) fn wish_failed(&mut self, wish: &Wish, reason: &'static str, now: Now) {
        if let Some(op) = wish.op {
            let text = format!("there is no mesh peer to be had at that address ({reason})");
            self.fail(op, CommandError::new("connect_failed", text));
        }
        self.connection_failed(wish.device, now);
    }

    fn connection_failed(&mut self, device: Option<DeviceId>, now: Now) {
        let Some(connection) = device.and_then(|device| self.connections.0.get_mut(&device)) else {
            return;
        };
        let pause = (REDIAL_FIRST_MS << connection.failures.min(16)).min(REDIAL_MAX_MS);
        connection.failures += 1;
        connection.dial_at = Some(now.mono + pause);
    }

    /// A session of the daemon's with another machine has ended.
    pub(super) fn connection_lost(&mut self, remote: DeviceId, now: Now) {
        self.connection_failed(Some(remote), now);
    }

    /// Somebody has said no: the machine is not dialled again.
    pub(super) fn forget_connection(&mut self, remote: &DeviceId) {
        self.connections.0.remove(remote);
    }

    /// Dials again what has been lost.
    pub(super) fn connections_upkeep(&mut self, now: Now) {
        if self.shutting_down.is_some() {
            return;
        }
        let mut due = Vec::new();
        for (device, connection) in &mut self.connections.0 {
            let here = self.routes.contains_key(&(self.daemon, *device));
            if connection.dial_at.is_some_and(|at| at <= now.mono) {
                connection.dial_at = None;
                if !here {
                    due.push(Wish {
                        host: connection.host.clone(),
                        port: connection.port,
                        op: None,
                        device: Some(*device),
                    });
                }
            }
        }
        for wish in due {
            self.dial_wish(wish);
        }
    }
}
