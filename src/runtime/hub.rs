//! The transport of the daemon: every listener, dial, link and datagram of all hosted devices. The
//! node's outputs that concern the network go in by [`Hub::execute`], which never waits; what
//! happens comes out of [`Inputs`]. Knows no message.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::dial::{DIAL_LOOPBACK, DIAL_NETWORK, dial};
use super::link::{self, ClosedReason, InputSender, Inputs, Link, LinkLimits, LinkShared};
use super::listener::{BindError, Door, Handshakes, Prompt, SourceGuard, Sources, accept, bind};
use super::origin::Origins;
use super::tls::{DeviceTls, TlsError};
use super::udp::{FirstContact, UdpError, watch_addresses};
use super::ws::{HubDialler, HubUrl};
use crate::identity::certificate::Certificate;
use crate::identity::device::{DeviceId, DeviceKey};
use crate::mesh::node::{DialId, DialTarget, Input, Output};
use crate::mesh::session::{Origin, Policy, SessionId, SessionKind};

/// Open links. The node keeps 16,384 sessions; as many again may be about to be refused by it.
pub const MAX_LINKS: usize = 32_768;

/// Of those, links to others than our own user. Three sessions for each pair of devices: enough for
/// twenty agents of ours and sixty of everybody else's.
pub const MAX_LINKS_OTHERS: usize = 4_096;

/// The bounds of the transport. The defaults are for use, others for tests.
#[derive(Clone, Debug)]
pub struct TransportLimits {
    /// Bounds of each link.
    pub link: LinkLimits,
    /// Inputs that wait for the node.
    pub inputs: usize,
    /// Open links; beyond them nothing is accepted.
    pub links: usize,
    /// Of those, links to others than our own user; beyond them only our own user is accepted.
    pub links_others: usize,
    /// An accepted connection's TLS handshake.
    pub handshake: Duration,
    /// Handshakes under way on loopback listeners.
    pub local_handshakes: usize,
    /// Handshakes under way on the network's listener.
    pub network_handshakes: usize,
    /// A handshake older than this makes room when all places are taken.
    pub handshake_own_time: Duration,
    /// Connections of one other machine, open or in their handshake.
    pub per_source: usize,
    /// A dial on this machine, handshake included.
    pub dial_loopback: Duration,
    /// A dial of another machine.
    pub dial_network: Duration,
}

impl Default for TransportLimits {
    fn default() -> Self {
        Self::with_descriptors(u64::MAX)
    }
}

impl TransportLimits {
    /// The bounds of a process that may have so many descriptors open: sessions and handshakes take
    /// at most half of them, and others than our own user at most a quarter of the sessions.
    #[must_use]
    pub fn with_descriptors(descriptors: u64) -> Self {
        let descriptors = usize::try_from(descriptors).unwrap_or(usize::MAX);
        let links = (descriptors / 8 * 3).min(MAX_LINKS);
        Self {
            link: LinkLimits::default(),
            // A frame of 64 KiB takes up to 2 MiB when it has been decoded, so half a gigabyte at
            // worst; larger frames are counted by themselves.
            inputs: 256,
            links,
            links_others: (links / 4).min(MAX_LINKS_OTHERS),
            handshake: Duration::from_secs(10),
            // A few milliseconds of work each.
            local_handshakes: (descriptors / 16).clamp(1, 256),
            network_handshakes: (descriptors / 32).clamp(1, 64),
            // Ten times what a busy reference peer needs.
            handshake_own_time: Duration::from_secs(1),
            // One machine's daemon has one device that dials, with up to three sessions.
            per_source: 16,
            dial_loopback: DIAL_LOOPBACK,
            dial_network: DIAL_NETWORK,
        }
    }
}

/// What the hub is told at its start.
#[derive(Clone, Debug)]
pub struct HubOptions {
    /// The daemon's own device, which the well-known port presents.
    pub daemon: DeviceId,
    /// The well-known port.
    pub port: u16,
    /// The relay hub, when there is one to be dialled.
    pub relay: Option<HubUrl>,
    /// Bounds.
    pub limits: TransportLimits,
}

/// A device cannot be taken into service.
#[derive(Debug, thiserror::Error)]
pub enum AddDeviceError {
    /// TLS.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Its listener.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// It is in service.
    #[error("the device is in service already")]
    Known,
    /// A listener was asked for by a device that is not in service.
    #[error("the device is not in service")]
    Unknown,
}

impl AddDeviceError {
    /// Stable code of this error.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Tls(error) => error.code(),
            Self::Bind(error) => error.code(),
            Self::Known => "device_in_service",
            Self::Unknown => "device_not_in_service",
        }
    }
}

/// Numbers for status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransportStatus {
    /// Devices with a listener.
    pub devices: usize,
    /// Open links.
    pub links: usize,
    /// Accepted connections whose handshake has not ended.
    pub handshakes: usize,
    /// Accepted connections that did not become links.
    pub refused: u64,
    /// Frames ignored because of their type or shape.
    pub frames_dropped: u64,
    /// Memory of frames that wait to be written, in bytes.
    pub queued_bytes: usize,
    /// Whether first contact runs.
    pub first_contact: bool,
    /// Whether its multicast group is joined.
    pub multicast: bool,
    /// The system does not tell who owns a local connection: all count as our own user's.
    pub origin_blind: bool,
}

/// What the tasks of the transport share.
pub(super) struct Context {
    pub(super) limits: TransportLimits,
    pub(super) inputs: InputSender,
    pub(super) tracker: TaskTracker,
    pub(super) origins: Origins,
    pub(super) local_handshakes: Arc<Handshakes>,
    pub(super) network_handshakes: Arc<Handshakes>,
    pub(super) sources: Arc<Sources>,
    links: Mutex<HashMap<SessionId, Arc<Link>>>,
    shared: Arc<LinkShared>,
    next_session: AtomicU64,
    refused: AtomicU64,
    /// Ends listeners, dials and datagrams.
    stop: CancellationToken,
    /// Ends links without a word.
    abort: CancellationToken,
}

impl Context {
    pub(super) fn has_room(&self) -> bool {
        self.links.lock().len() < self.limits.links
    }

    pub(super) fn has_room_for_others(&self) -> bool {
        let links = self.links.lock();
        let others = links.values().filter(|link| !link.is_same_user()).count();
        others < self.limits.links_others
    }

    pub(super) fn refused(&self, kind: SessionKind, reason: &'static str) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(event = "connection_refused", kind = kind.as_str(), reason);
    }

    /// Makes a link of an authenticated connection, tells the node, and at its end again.
    pub(super) fn open(
        self: &Arc<Self>,
        stream: TlsStream<TcpStream>,
        origin: Origin,
        source: Option<SourceGuard>,
        announce: impl FnOnce(SessionId) -> Input,
    ) {
        self.open_with(|link| Prompt::new(stream, link), origin, source, announce);
    }

    fn open_with<S>(
        self: &Arc<Self>,
        stream: impl FnOnce(Arc<Link>) -> S,
        origin: Origin,
        source: Option<SourceGuard>,
        announce: impl FnOnce(SessionId) -> Input,
    ) where
        S: AsyncRead + AsyncWrite + Send + 'static,
    {
        let id = SessionId(self.next_session.fetch_add(1, Ordering::Relaxed));
        let link = Arc::new(Link::new(id, origin == Origin::SameUser, &self.shared));
        self.links.lock().insert(id, Arc::clone(&link));
        let announce = announce(id);
        let stream = stream(Arc::clone(&link));
        let context = Arc::clone(self);
        self.tracker.spawn(async move {
            let reason = tokio::select! {
                reason = link::run(stream, &link, announce, &context.inputs) => reason,
                () = context.abort.cancelled() => ClosedReason::Shutdown,
            };
            context.links.lock().remove(&id);
            link.close(reason);
            drop((link, source));
            let closed = Input::Closed { session: id, reason: reason.as_str() };
            tokio::select! {
                _ = context.inputs.send(closed) => {}
                () = context.abort.cancelled() => {}
            }
        });
    }

    fn link(&self, session: SessionId) -> Option<Arc<Link>> {
        self.links.lock().get(&session).cloned()
    }

    /// Hands an input to the node without waiting for room here.
    fn tell(self: &Arc<Self>, input: Input) {
        let inputs = self.inputs.clone();
        self.tracker.spawn(async move { inputs.send(input).await });
    }
}

/// A device in service.
struct Device {
    tls: DeviceTls,
    port: u16,
    /// Ends its listeners and dials.
    closed: CancellationToken,
}

/// The well-known port's listener, or an attempt at it.
struct Port {
    closed: CancellationToken,
    held: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

/// The transport. Dropping it ends everything; [`Hub::shutdown`] does so politely.
pub struct Hub {
    context: Arc<Context>,
    daemon: DeviceId,
    well_known: u16,
    relay: Option<Arc<HubDialler>>,
    devices: Mutex<HashMap<DeviceId, Device>>,
    port: Mutex<Option<Port>>,
    first_contact: Mutex<Option<Arc<FirstContact>>>,
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.context.stop.cancel();
        self.context.abort.cancel();
    }
}

impl Hub {
    /// A transport without devices, and the queue that the node's owner reads.
    #[must_use]
    pub fn new(options: HubOptions) -> (Self, Inputs) {
        let HubOptions { daemon, port, relay, limits } = options;
        let (sender, inputs) = link::inputs(limits.inputs);
        let context = Context {
            inputs: sender,
            tracker: TaskTracker::new(),
            origins: Origins::default(),
            local_handshakes: Handshakes::new(limits.local_handshakes, limits.handshake_own_time),
            network_handshakes: Handshakes::new(
                limits.network_handshakes,
                limits.handshake_own_time,
            ),
            sources: Sources::new(limits.per_source),
            links: Mutex::default(),
            shared: Arc::new(LinkShared::new(limits.link.clone())),
            next_session: AtomicU64::new(1),
            refused: AtomicU64::new(0),
            stop: CancellationToken::new(),
            abort: CancellationToken::new(),
            limits,
        };
        let hub = Self {
            context: Arc::new(context),
            daemon,
            well_known: port,
            relay: relay.map(|url| Arc::new(HubDialler::new(url))),
            devices: Mutex::default(),
            port: Mutex::default(),
            first_contact: Mutex::default(),
        };
        (hub, inputs)
    }

    /// Another way into the node's queue, for whoever has inputs of their own.
    #[must_use]
    pub fn sender(&self) -> InputSender {
        self.context.inputs.clone()
    }

    /// Takes a device into service: binds its data listener on loopback and returns the port. The
    /// node should hear of the device before it reads further inputs.
    ///
    /// # Errors
    /// [`AddDeviceError`].
    pub fn add_device(
        &self,
        key: &DeviceKey,
        certificate: &Certificate,
    ) -> Result<u16, AddDeviceError> {
        let tls = DeviceTls::new(key, certificate)?;
        let mut devices = self.devices.lock();
        if devices.contains_key(&key.id()) {
            return Err(AddDeviceError::Known);
        }
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let closed = self.context.stop.child_token();
        let bound =
            self.open_door(address, tls.clone(), SessionKind::DataAccepted, closed.clone())?;
        let port = bound.port();
        devices.insert(key.id(), Device { tls, port, closed });
        Ok(port)
    }

    /// Closes a device's listeners and gives up its dials. Its links are closed by the node.
    pub fn remove_device(&self, device: &DeviceId) {
        if let Some(device) = self.devices.lock().remove(device) {
            device.closed.cancel();
        }
    }

    /// The data port of a device in service.
    #[must_use]
    pub fn data_port(&self, device: &DeviceId) -> Option<u16> {
        self.devices.lock().get(device).map(|device| device.port)
    }

    /// Opens the `--listen` listener, for the daemon's device (decision 14), and returns what was
    /// bound.
    ///
    /// # Errors
    /// [`AddDeviceError::Bind`], [`AddDeviceError::Unknown`].
    pub fn listen_network(&self, address: SocketAddr) -> Result<SocketAddr, AddDeviceError> {
        self.listen(address, Policy::Full).map(|(bound, _)| bound)
    }

    /// Opens a further listener for other machines, and returns what was bound and what closes it.
    /// Sessions that it has accepted go on.
    ///
    /// # Errors
    /// As [`Self::listen_network`].
    pub fn listen(
        &self,
        address: SocketAddr,
        policy: Policy,
    ) -> Result<(SocketAddr, CancellationToken), AddDeviceError> {
        let (tls, closed) = self.device(&self.daemon).ok_or(AddDeviceError::Unknown)?;
        let closed = closed.child_token();
        let kind = SessionKind::NetworkAccepted(policy);
        let bound = self.open_door(address, tls, kind, closed.clone())?;
        Ok((bound, closed))
    }

    /// Starts first contact on UDP `port`, and tells the node the machine's addresses from now on.
    /// Without the socket the daemon goes on. `broadcast: false`: nothing leaves the machine.
    ///
    /// # Errors
    /// [`UdpError`].
    pub fn start_first_contact(&self, port: u16, broadcast: bool) -> Result<u16, UdpError> {
        let Context { tracker, inputs, stop, .. } = &*self.context;
        tracker.spawn(watch_addresses(inputs.clone(), stop.clone()));
        let socket = Arc::new(FirstContact::bind(port, broadcast)?);
        tracker.spawn(Arc::clone(&socket).receive(inputs.clone(), stop.clone()));
        let port = socket.port();
        *self.first_contact.lock() = Some(socket);
        Ok(port)
    }

    /// Carries out what concerns the network, without waiting; hands back what does not.
    pub fn execute(&self, output: Output) -> Option<Output> {
        match output {
            Output::Send { session, frame } => {
                if let Some(link) = self.context.link(session) {
                    link.send(frame);
                }
            }
            Output::Close { session, reason } => {
                if let Some(link) = self.context.link(session) {
                    link.close(ClosedReason::Requested(reason));
                }
            }
            Output::Admitted { session } => {
                if let Some(link) = self.context.link(session) {
                    link.admit();
                }
            }
            Output::Dial { dial, local, target, expect: _ } => self.dial(dial, local, target),
            Output::BindPort => self.bind_port(),
            Output::ReleasePort => self.release_port(),
            Output::Datagram { group, broadcast } => {
                if let Some(socket) = &*self.first_contact.lock() {
                    socket.send(&group, &broadcast);
                }
            }
            other => return Some(other),
        }
        None
    }

    /// Numbers for status.
    #[must_use]
    pub fn status(&self) -> TransportStatus {
        let context = &self.context;
        let multicast = self.first_contact.lock().as_ref().map(|socket| socket.group);
        TransportStatus {
            devices: self.devices.lock().len(),
            links: context.links.lock().len(),
            handshakes: context.local_handshakes.running() + context.network_handshakes.running(),
            refused: context.refused.load(Ordering::Relaxed),
            frames_dropped: context.shared.frames_dropped(),
            queued_bytes: context.shared.queued_bytes(),
            first_contact: multicast.is_some(),
            multicast: multicast.unwrap_or(false),
            origin_blind: context.origins.is_blind(),
        }
    }

    /// Ends everything: listeners and dials at once, links when what is queued has been written. What
    /// is left after `within` is cut off. Somebody should go on reading [`Inputs`] meanwhile.
    pub async fn shutdown(&self, within: Duration) {
        let context = &self.context;
        context.stop.cancel();
        let links: Vec<_> = context.links.lock().values().cloned().collect();
        for link in links {
            link.close(ClosedReason::Shutdown);
        }
        context.tracker.close();
        if timeout(within, context.tracker.wait()).await.is_err() {
            context.abort.cancel();
            context.tracker.wait().await;
        }
    }

    fn device(&self, device: &DeviceId) -> Option<(DeviceTls, CancellationToken)> {
        let devices = self.devices.lock();
        devices.get(device).map(|device| (device.tls.clone(), device.closed.clone()))
    }

    fn open_door(
        &self,
        address: SocketAddr,
        tls: DeviceTls,
        kind: SessionKind,
        closed: CancellationToken,
    ) -> Result<SocketAddr, BindError> {
        let listener = bind(address)?;
        let bound = listener.local_addr().map_err(|error| BindError::Failed { address, error })?;
        let door = Door { listener, tls, kind, closed };
        self.context.tracker.spawn(accept(door, Arc::clone(&self.context)));
        Ok(bound)
    }

    fn dial(&self, id: DialId, local: DeviceId, target: DialTarget) {
        let context = Arc::clone(&self.context);
        if target == DialTarget::Hub
            && let Some(relay) = &self.relay
        {
            let (context, relay) = (Arc::clone(&context), Arc::clone(relay));
            let tracker = context.tracker.clone();
            tracker.spawn(async move { dial_relay(id, &relay, &context).await });
            return;
        }
        let Some((tls, closed)) = self.device(&local) else {
            context.tell(Input::DialFailed { dial: id, reason: "not_in_service" });
            return;
        };
        let tracker = context.tracker.clone();
        tracker.spawn(async move {
            let dialled = tokio::select! {
                () = closed.cancelled() => Err("not_in_service"),
                dialled = dial(&tls, target, &context) => dialled,
            };
            match dialled {
                Ok(dialled) => {
                    let (remote, origin) = (dialled.remote, dialled.origin);
                    context.open(dialled.stream, origin, None, |session| Input::Dialled {
                        dial: id,
                        session,
                        remote,
                        origin,
                    });
                }
                Err(reason) => {
                    context.inputs.send(Input::DialFailed { dial: id, reason }).await;
                }
            }
        });
    }

    fn bind_port(&self) {
        let context = &self.context;
        let mut port = self.port.lock();
        let before = match port.take() {
            Some(current) if !current.closed.is_cancelled() => {
                // An attempt under way answers by itself.
                if current.held.load(Ordering::Acquire) {
                    context.tell(Input::PortBound);
                }
                *port = Some(current);
                return;
            }
            before => before,
        };
        let Some((tls, closed)) = self.device(&self.daemon) else {
            context.tell(Input::PortBindFailed { in_use: false });
            return;
        };
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.well_known));
        let closed = closed.child_token();
        let held = Arc::new(AtomicBool::new(false));
        let task = {
            let (context, closed, held) = (Arc::clone(context), closed.clone(), Arc::clone(&held));
            async move {
                // Our own listener of a moment ago would be in the way.
                if let Some(before) = before {
                    let _ = before.task.await;
                }
                match bind(address) {
                    Ok(listener) => {
                        held.store(true, Ordering::Release);
                        context.inputs.send(Input::PortBound).await;
                        let kind = SessionKind::PortAccepted;
                        accept(Door { listener, tls, kind, closed }, context).await;
                    }
                    Err(error) => {
                        closed.cancel();
                        let in_use = error.is_in_use();
                        context.inputs.send(Input::PortBindFailed { in_use }).await;
                    }
                }
            }
        };
        *port = Some(Port { closed, held, task: context.tracker.spawn(task) });
    }

    fn release_port(&self) {
        if let Some(port) = &*self.port.lock() {
            port.closed.cancel();
        }
    }
}

/// Dials the relay hub, and makes a link of it. It has no identity: whose the adverts and payloads
/// are that come over it, they say themselves.
async fn dial_relay(dial: DialId, relay: &HubDialler, context: &Arc<Context>) {
    let dialled = tokio::select! {
        () = context.stop.cancelled() => Err("shutdown"),
        dialled = timeout(context.limits.dial_network, relay.dial()) => {
            dialled.unwrap_or(Err("timeout"))
        }
    };
    match dialled {
        Ok((stream, carrying)) => {
            context.tracker.spawn(carrying);
            let (remote, origin) = (DeviceId([0; 32]), Origin::Network);
            context.open_with(
                |_| stream,
                origin,
                None,
                |session| Input::Dialled { dial, session, remote, origin },
            );
        }
        Err(reason) => {
            context.inputs.send(Input::DialFailed { dial, reason }).await;
        }
    }
}

#[cfg(test)]
mod tests;
