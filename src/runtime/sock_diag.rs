//! Whose an established TCP connection is, asked of Linux directly (`sock_diag(7)`): one question,
//! one answer, in a few microseconds however many sockets the machine has. Other systems, and
//! sandboxes without netlink, do not answer.

use std::io;
use std::net::SocketAddr;

/// The user that owns the socket which has `own` here and `other` at its far end. `None`: there is
/// no such established connection, or the kernel was built without this.
///
/// # Errors
/// The system does not take the question.
#[cfg(target_os = "linux")]
pub(super) fn uid_of(own: SocketAddr, other: SocketAddr) -> io::Result<Option<u32>> {
    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};

    let (kind, flags) = (SocketType::DGRAM, SocketFlags::CLOEXEC);
    let protocol = Some(netlink::SOCK_DIAG);
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, kind, flags, protocol)?;
    rustix::net::send(&socket, &question(own, other), SendFlags::empty())?;
    // The kernel has answered before `send` returned.
    let mut answer = [0; MAX_ANSWER];
    let (_, length) = rustix::net::recv(&socket, &mut answer, RecvFlags::DONTWAIT)?;
    read_answer(answer.get(..length).unwrap_or_default())
}

/// Nobody to ask.
///
/// # Errors
/// Always.
#[cfg(not(target_os = "linux"))]
pub(super) fn uid_of(_own: SocketAddr, _other: SocketAddr) -> io::Result<Option<u32>> {
    Err(io::ErrorKind::Unsupported.into())
}

/// An answer has 88 bytes and attributes that nobody asked for.
const MAX_ANSWER: usize = 1024;
/// Bytes before a netlink message's content: length, type, flags, sequence, port.
const HEADER: usize = 16;
/// `NLMSG_ERROR`.
const ERROR: u16 = 2;
/// `SOCK_DIAG_BY_FAMILY`.
const BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST`.
const REQUEST: u16 = 1;
/// `TCP_ESTABLISHED`.
const ESTABLISHED: u8 = 1;
/// `IPPROTO_TCP`.
const TCP: u8 = 6;
/// Where the state and the user are in `struct inet_diag_msg`.
const STATE_AT: usize = 1;
const UID_AT: usize = 64;

/// `struct inet_diag_req_v2` in a netlink message.
fn question(own: SocketAddr, other: SocketAddr) -> Vec<u8> {
    /// `AF_INET` and `AF_INET6` of Linux.
    const FAMILIES: (u8, u8) = (2, 10);
    const LENGTH: u32 = 72;
    let family = if own.is_ipv4() { FAMILIES.0 } else { FAMILIES.1 };
    let mut message = Vec::new();
    message.extend(LENGTH.to_ne_bytes());
    message.extend(BY_FAMILY.to_ne_bytes());
    message.extend(REQUEST.to_ne_bytes());
    // Sequence and port: there is one question on this socket.
    message.extend([0; 8]);
    message.extend([family, TCP, 0, 0]);
    message.extend((1_u32 << ESTABLISHED).to_ne_bytes());
    message.extend(own.port().to_be_bytes());
    message.extend(other.port().to_be_bytes());
    for address in [own, other] {
        let mut words = [0; 16];
        match address {
            SocketAddr::V4(v4) => words[..4].copy_from_slice(&v4.ip().octets()),
            SocketAddr::V6(v6) => words.copy_from_slice(&v6.ip().octets()),
        }
        message.extend(words);
    }
    // Any interface, and no cookie.
    message.extend([0; 4]);
    message.extend([0xff; 8]);
    message
}

/// What Linux says, if it is an answer at all.
fn read_answer(answer: &[u8]) -> io::Result<Option<u32>> {
    let odd = || io::Error::from(io::ErrorKind::InvalidData);
    let kind = answer.get(4..6).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
    let content = answer.get(HEADER..).ok_or_else(odd)?;
    match kind {
        Some(BY_FAMILY) => {
            let state = *content.get(STATE_AT).ok_or_else(odd)?;
            let uid = content.get(UID_AT..UID_AT + 4).and_then(|uid| uid.try_into().ok());
            let uid = u32::from_ne_bytes(uid.ok_or_else(odd)?);
            // A listener, or a connection that is over, is not what was asked for.
            Ok((state == ESTABLISHED).then_some(uid))
        }
        Some(ERROR) => {
            let number = content.first_chunk::<4>().ok_or_else(odd)?;
            let error = io::Error::from_raw_os_error(-i32::from_ne_bytes(*number));
            if error.kind() == io::ErrorKind::NotFound { Ok(None) } else { Err(error) }
        }
        _ => Err(odd()),
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_connection_is_its_users_and_a_listener_is_none() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            // Not every machine has IPv6.
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let place = listener.local_addr().unwrap();
            let dialled = TcpStream::connect(place).unwrap();
            let (accepted, own) = listener.accept().unwrap();
            let uid = Some(super::super::sys::uid());
            assert_eq!(uid_of(own, place).unwrap(), uid);
            assert_eq!(uid_of(place, own).unwrap(), uid);
            socket2::SockRef::from(&dialled).set_linger(Some(std::time::Duration::ZERO)).unwrap();
            drop(dialled);
            drop(accepted);
            assert_eq!(uid_of(own, place).unwrap(), None);
            assert_eq!(uid_of(place, own).unwrap(), None);
        }
    }

    #[test]
    fn refusals_and_nonsense_are_errors() {
        let refusal = |number: i32| {
            let mut message = vec![0; HEADER];
            message[4..6].copy_from_slice(&ERROR.to_ne_bytes());
            message.extend((-number).to_ne_bytes());
            read_answer(&message)
        };
        // ENOENT, EPERM.
        assert_eq!(refusal(2).unwrap(), None);
        assert_eq!(refusal(1).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        for length in [0, 5, HEADER, HEADER + UID_AT] {
            let mut message = vec![0; length];
            if let Some(kind) = message.get_mut(4..6) {
                kind.copy_from_slice(&BY_FAMILY.to_ne_bytes());
            }
            assert!(read_answer(&message).is_err(), "{length}");
        }
    }
}
