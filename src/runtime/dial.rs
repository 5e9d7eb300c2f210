//! Dialling another device: TCP, TLS, then who is there; and the relay hub. Whether it is the one that
//! was meant is the node's to judge.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::{TlsConnector, TlsStream};

use super::hub::Context;
use super::listener::tune;
use super::tls::{DeviceTls, MAX_TLS_BUFFER, peer_device};
use super::ws;
use crate::identity::device::DeviceId;
use crate::mesh::node::DialTarget;
use crate::mesh::session::Origin;

/// A dial on this machine, handshake included. A reference peer that is busy starting up answers
/// after about a second.
pub const DIAL_LOOPBACK: Duration = Duration::from_secs(5);
/// A dial of another machine: room for two lost SYNs.
pub const DIAL_NETWORK: Duration = Duration::from_secs(10);

/// A connection to an authenticated device.
pub(super) struct Dialled {
    pub(super) stream: TlsStream<TcpStream>,
    pub(super) remote: DeviceId,
    pub(super) origin: Origin,
}

/// Dials a device; the error is a stable word.
pub(super) async fn dial(
    tls: &DeviceTls,
    target: DialTarget,
    context: &Arc<Context>,
) -> Result<Dialled, &'static str> {
    let limits = &context.limits;
    let (address, network) = match target {
        DialTarget::Loopback(port) => (SocketAddr::from((Ipv4Addr::LOCALHOST, port)), false),
        DialTarget::Network(ip, port) => (SocketAddr::new(ip, port), true),
        DialTarget::Named(host, port) => {
            let connected = async {
                let stream = ws::connect(&host, port).await?;
                shake(tls, stream).await
            };
            let connected = timeout(limits.dial_network, connected).await;
            let (stream, remote) = connected.map_err(|_| "timeout")??;
            return Ok(Dialled { stream, remote, origin: Origin::Network });
        }
        DialTarget::Hub => return Err("no_hub"),
    };
    let within = if network { limits.dial_network } else { limits.dial_loopback };
    let (stream, remote) =
        timeout(within, connect(tls, address, network)).await.map_err(|_| "timeout")??;
    let origin = if network {
        Origin::Network
    } else {
        let local = stream.get_ref().0.local_addr().map_err(|_| "io_error")?;
        context.origins.of(local, address).await
    };
    Ok(Dialled { stream, remote, origin })
}

async fn connect(
    tls: &DeviceTls,
    address: SocketAddr,
    network: bool,
) -> Result<(TlsStream<TcpStream>, DeviceId), &'static str> {
    let stream = TcpStream::connect(address).await.map_err(|error| reason(&error))?;
    tune(&stream, network).map_err(|_| "io_error")?;
    shake(tls, stream).await
}

/// TLS, and who is there. No name is sent: a certificate's names say nothing here.
async fn shake(
    tls: &DeviceTls,
    stream: TcpStream,
) -> Result<(TlsStream<TcpStream>, DeviceId), &'static str> {
    let peer = stream.peer_addr().map_err(|_| "peer_closed")?;
    let name = ServerName::IpAddress(peer.ip().into());
    let stream = TlsConnector::from(tls.client())
        .connect_with(name, stream, |tls| tls.set_buffer_limit(Some(MAX_TLS_BUFFER)))
        .await
        .map_err(|error| handshake_reason(&error))?;
    let remote = peer_device(stream.get_ref().1.peer_certificates()).ok_or("no_certificate")?;
    Ok((TlsStream::from(stream), remote))
}

pub(super) fn reason(error: &io::Error) -> &'static str {
    use io::ErrorKind as Kind;
    match error.kind() {
        Kind::ConnectionRefused => "refused",
        Kind::TimedOut => "timeout",
        Kind::HostUnreachable | Kind::NetworkUnreachable => "unreachable",
        _ => "io_error",
    }
}

/// What is not TLS, and TLS that is not ours, is one thing to whoever reads the reason; a peer that
/// hangs up is another.
fn handshake_reason(error: &io::Error) -> &'static str {
    use io::ErrorKind as Kind;
    match error.kind() {
        Kind::InvalidData => match error.get_ref().and_then(|e| e.downcast_ref()) {
            Some(rustls::Error::NoCertificatesPresented) => "no_certificate",
            _ => "tls_failed",
        },
        Kind::UnexpectedEof | Kind::ConnectionReset | Kind::BrokenPipe => "peer_closed",
        _ => reason(error),
    }
}
