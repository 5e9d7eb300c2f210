//! Agents of two machines: their daemons have one approved session, or each one with the same
//! relay hub, and each pair of agents a secure channel through it (`wire.md` "Sessions through a
//! relay", "Secure channel"). A channel is a session of its own to the rest of the node; only its
//! frames are sealed and wrapped here. Whoever is in between sees who talks to whom, and nothing
//! else.

use std::collections::BTreeSet;

use super::super::checked::Checked;
use super::super::records::{Now, Visibility};
use super::super::session::{Origin, Policy, Session, SessionId, SessionKind};
use super::super::wire::frame::Frame;
use super::super::wire::secure_channel::{Ephemeral, SecurePeer};
use super::{Node, Output};
use crate::identity::device::DeviceId;
use crate::identity::entropy;

/// Frames that wait for a channel to open; requests beyond it fail as if unanswered.
const MAX_WAITING_FRAMES: usize = 128;
/// Channels of this daemon.
const MAX_CHANNELS: usize = 4096;
/// Names of channels among the sessions: the transport counts from the other end.
const FIRST_CHANNEL_ID: u64 = 1 << 63;

/// A channel between an agent of ours and a device beyond another daemon.
pub(super) struct Relayed {
    via: SessionId,
    peer: SecurePeer,
    waiting: Vec<Frame>,
}

impl Node {
    /// The session by which a device on another machine can be had: the approved one, or the hub's,
    /// over which its newest advert came.
    pub(super) fn relay_for(&self, device: &DeviceId) -> Option<SessionId> {
        let via = self.directory.get(device)?.via;
        let session = self.sessions.get(&via)?;
        (session.is_admitted()
            && !session.is_machine_local()
            && session.remote != *device
            && session.policy() != Policy::Observe
            && (!self.needs_trust(via) || self.is_trusted(device)))
        .then_some(via)
    }

    /// Opens a channel from our device to one on another machine. Frames sent before it is open
    /// wait for it.
    pub(super) fn open_channel(
        &mut self,
        local: DeviceId,
        remote: DeviceId,
        now: Now,
    ) -> Option<SessionId> {
        let via = self.relay_for(&remote)?;
        let id = self.new_channel(local, remote, via, now)?;
        if self.is_hub(via) {
            self.introduce_to_hub(via, local, now);
        }
        let connect = Frame::RelayConnect { target_device: remote, source_device: Some(local) };
        self.outputs.push_back(Output::Send { session: via, frame: connect });
        self.say_hello(id, now);
        self.admitted(id, now);
        Some(id)
    }

    fn new_channel(
        &mut self,
        local: DeviceId,
        remote: DeviceId,
        via: SessionId,
        now: Now,
    ) -> Option<SessionId> {
        if self.channels.len() >= MAX_CHANNELS || self.agent(&local).is_none() {
            return None;
        }
        let id = SessionId(FIRST_CHANNEL_ID + self.id());
        let session = Session::new(id, local, remote, SessionKind::Relayed, Origin::Network, now);
        self.sessions.insert(id, session);
        let peer = SecurePeer::new(remote);
        self.channels.insert(id, Relayed { via, peer, waiting: Vec::new() });
        Some(id)
    }

    fn fresh(&mut self) -> Option<Ephemeral> {
        let key = entropy::draw_key(&mut *self.entropy).ok()?;
        Some(Ephemeral { key, nonce: self.random::<16>() })
    }

    fn say_hello(&mut self, id: SessionId, now: Now) {
        let Some(fresh) = self.fresh() else { return };
        let Some((local, remote)) = self.sessions.get(&id).map(|s| (s.local, s.remote)) else {
            return;
        };
        let (Some(device), Some(channel)) = (self.devices.get(&local), self.channels.get_mut(&id))
        else {
            return;
        };
        let hello = channel.peer.start(&device.key, fresh, now.unix);
        let via = channel.via;
        self.wrap(via, local, remote, &Frame::SecureHello(hello));
    }

    fn wrap(&mut self, via: SessionId, from: DeviceId, to: DeviceId, frame: &Frame) {
        let frame = Frame::RelayData {
            payload: frame.encode(),
            to_device: Some(to),
            from_device: Some(from),
        };
        self.outputs.push_back(Output::Send { session: via, frame });
    }

    /// Sends a frame, sealed when the session is a channel.
    pub(super) fn send(&mut self, session: SessionId, frame: Frame) {
        if self.channels.contains_key(&session) {
            self.send_sealed(session, frame);
        } else {
            self.outputs.push_back(Output::Send { session, frame });
        }
    }

    fn send_sealed(&mut self, id: SessionId, frame: Frame) {
        let Some((local, remote)) = self.sessions.get(&id).map(|s| (s.local, s.remote)) else {
            return;
        };
        let Some(channel) = self.channels.get_mut(&id) else { return };
        if !channel.peer.is_open() {
            // Over the bound the request's own deadline reports the loss.
            if channel.waiting.len() < MAX_WAITING_FRAMES {
                channel.waiting.push(frame);
            }
            return;
        }
        if let Ok(sealed) = channel.peer.seal(&frame) {
            let via = channel.via;
            self.wrap(via, local, remote, &sealed);
        }
    }

    /// A nested frame through another machine's daemon. Who sent it is what its hello proves; the
    /// wrapping only says which channel to try.
    pub(super) fn relayed(
        &mut self,
        via: SessionId,
        from: Option<DeviceId>,
        to: Option<DeviceId>,
        payload: &[u8],
        now: Now,
    ) {
        let through_network = self.sessions.get(&via).is_some_and(|s| {
            s.is_admitted()
                && s.kind != SessionKind::Relayed
                && s.policy() != Policy::Observe
                && !s.is_machine_local()
        });
        let (Some(from), true) = (from, through_network) else { return };
        // A hub is anybody's: beyond it only whom the user trusts is heard.
        let by_hub = self.needs_trust(via);
        if self.is_hosted(&from) || (by_hub && !self.is_trusted(&from)) {
            return;
        }
        let decoded = Frame::decode(payload);
        // Not every sender says for whom it is where its relay knows.
        let to = to.or_else(|| match &decoded {
            Ok(Frame::SecureHello(hello)) => Some(hello.to_device),
            _ => self.only_channel_with(from, via),
        });
        let Some(to) = to.filter(|to| self.agent(to).is_some()) else { return };
        let id = self
            .routes
            .get(&(to, from))
            .into_iter()
            .flatten()
            .copied()
            .find(|id| self.channels.get(id).is_some_and(|channel| channel.via == via));
        match decoded {
            Ok(Frame::SecureHello(hello)) => {
                if by_hub && !self.may_check_for_hub(now) {
                    return;
                }
                // Only a hello that proves its sender makes a channel.
                if hello.verify(&to) != Ok(from) {
                    return;
                }
                let known = id.is_some();
                let Some(id) = id.or_else(|| self.new_channel(to, from, via, now)) else { return };
                let Some(fresh) = self.fresh() else { return };
                let (Some(device), Some(channel)) =
                    (self.devices.get(&to), self.channels.get_mut(&id))
                else {
                    return;
                };
                let was_open = channel.peer.is_open();
                let answer =
                    match channel.peer.receive_hello(&device.key, &hello, now.unix, || fresh) {
                        Ok(answer) => answer,
                        Err(_) => return,
                    };
                if let Some(answer) = answer {
                    self.wrap(via, to, from, &Frame::SecureHello(answer));
                    // Whoever begins anew has forgotten what it was asked, and counts its own
                    // requests anew: nothing of either may go on in the new channel.
                    if was_open {
                        self.exchange_lost(id);
                    }
                }
                if !known {
                    self.admitted(id, now);
                }
                let waiting = self
                    .channels
                    .get_mut(&id)
                    .map(|channel| std::mem::take(&mut channel.waiting))
                    .unwrap_or_default();
                for frame in waiting {
                    self.send_sealed(id, frame);
                }
            }
            Ok(Frame::SecureData { counter, ciphertext }) => {
                let Some(channel) = id.and_then(|id| self.channels.get_mut(&id)) else { return };
                let Ok(opened) = channel.peer.open(counter, &ciphertext) else { return };
                let Ok(frame) = Frame::decode(&opened) else { return };
                let checked = Checked::check(frame, &mut self.tokens);
                // Gossip, claims and nested relays have no place in a channel.
                if let (
                    Some(id),
                    Checked::Request { .. } | Checked::Response { .. } | Checked::Revocations(_),
                ) = (id, &checked)
                {
                    self.frame(id, checked, now);
                }
            }
            _ => {}
        }
    }

    /// Whether only whom the user trusts is heard of, and heard, over this session.
    pub(super) fn needs_trust(&self, session: SessionId) -> bool {
        let policy = self.sessions.get(&session).map(Session::policy);
        self.is_hub(session) || policy == Some(Policy::Gateway)
    }

    /// What the other end of a session may do: of a channel, what the session that it goes through
    /// allows.
    pub(super) fn policy_of(&self, session: SessionId) -> Policy {
        self.sessions.get(&self.carrier_of(session)).map(Session::policy).unwrap_or_default()
    }

    /// The session that carries this one: of a channel, the one that it goes through.
    pub(super) fn carrier_of(&self, session: SessionId) -> SessionId {
        self.channels.get(&session).map_or(session, |channel| channel.via)
    }

    /// Whether a session is a channel through the hub.
    pub(super) fn is_through_hub(&self, session: SessionId) -> bool {
        self.channels.get(&session).is_some_and(|channel| self.is_hub(channel.via))
    }

    /// All of them.
    pub(super) fn channels_through_hub(&self) -> BTreeSet<SessionId> {
        let through = self.channels.iter().filter(|(_, channel)| self.is_hub(channel.via));
        through.map(|(id, _)| *id).collect()
    }

    /// For which of ours a device sends over this session, when it has one channel through it.
    fn only_channel_with(&self, from: DeviceId, via: SessionId) -> Option<DeviceId> {
        let mut locals =
            self.channels.iter().filter(|(_, channel)| channel.via == via).filter_map(|(id, _)| {
                self.sessions.get(id).filter(|s| s.remote == from).map(|s| s.local)
            });
        let only = locals.next()?;
        locals.next().is_none().then_some(only)
    }

    /// Ends the channels with a device through a session.
    pub(super) fn close_channels_with(
        &mut self,
        device: DeviceId,
        via: SessionId,
        reason: &'static str,
        now: Now,
    ) {
        let with: Vec<SessionId> = self
            .channels
            .iter()
            .filter(|(id, channel)| {
                channel.via == via && self.sessions.get(id).is_some_and(|s| s.remote == device)
            })
            .map(|(id, _)| *id)
            .collect();
        for id in with {
            self.close(id, reason, now);
        }
    }

    /// A session has ended: the channels through it have as well.
    pub(super) fn close_channels_via(&mut self, via: SessionId, now: Now) {
        let through: Vec<SessionId> = self
            .channels
            .iter()
            .filter(|(_, channel)| channel.via == via)
            .map(|(id, _)| *id)
            .collect();
        for id in through {
            self.channels.remove(&id);
            self.session_closed(id, "relay_closed", now);
        }
    }

    /// A device on another machine has been heard of: what waits for it can go.
    pub(super) fn relay_opened(&mut self, device: DeviceId, now: Now) {
        for agent in self.agent_ids() {
            self.flush(agent, device, now);
            self.ask_again(agent, device, now);
        }
    }

    /// Our agents that another machine may hear of: ghosts have no existence there.
    pub(super) fn fronted(&self) -> Vec<DeviceId> {
        self.agent_ids()
            .into_iter()
            .filter(|id| {
                self.record(id).is_some_and(|record| record.visibility != Visibility::Ghost)
            })
            .collect()
    }
}
