//! Where commsd meets the operating system: tokio tasks, sockets, timers, processes.
//! It carries values in and out and knows no protocol.

pub mod acp_relay;
pub mod acp_transport;
pub mod adapter;
pub mod clock;
pub mod dial;
pub mod http;
pub mod http_client;
pub mod hub;
pub mod link;
pub mod listener;
pub mod local_socket;
pub mod memory;
pub mod origin;
pub mod page_server;
pub mod relay_server;
pub mod sandbox;
mod sock_diag;
mod stall;
pub mod sys;
pub mod tls;
pub mod udp;
pub mod ws;

use crate::mesh::log::{Level, Spec};

/// Every event that the transport emits: name, level, fields, meaning.
pub const CATALOGUE: &[Spec] = &[
    ("multicast_unavailable", Level::Warn, &["error"], "the loopback group cannot be joined"),
    ("broadcast_unavailable", Level::Warn, &["error"], "the socket may not broadcast"),
    ("datagram_not_sent", Level::Debug, &["to", "error"], "a beacon or probe was not sent"),
    ("datagram_not_received", Level::Debug, &["error"], "a datagram was not read"),
    ("addresses_unknown", Level::Debug, &["error"], "this machine's addresses cannot be listed"),
    (
        "accept_paused",
        Level::Warn,
        &["kind", "error"],
        "no descriptors for new peers; sessions go on",
    ),
    ("accept_resumed", Level::Info, &["kind"], "new peers are accepted again"),
    (
        "connection_refused",
        Level::Debug,
        &["kind", "reason"],
        "a connection did not become a session",
    ),
    (
        "origin_unknown",
        Level::Warn,
        &["message"],
        "the system does not tell whose a local connection is",
    ),
    (
        "frame_not_sent",
        Level::Warn,
        &["session", "bytes", "message"],
        "a frame of ours was over the limit",
    ),
    (
        "frame_dropped",
        Level::Debug,
        &["session", "reason"],
        "a frame of unknown type or shape was ignored",
    ),
    (
        "hub_frame_not_sent",
        Level::Warn,
        &["bytes"],
        "a frame of ours was longer than what is sent to a relay hub",
    ),
    ("hub_link_opened", Level::Debug, &["link", "source"], "a client of the relay hub is there"),
    (
        "hub_link_closed",
        Level::Info,
        &["link", "source", "reason", "frames", "bytes"],
        "a client of the relay hub has gone",
    ),
    (
        "hub_connection_refused",
        Level::Warn,
        &["source", "reason", "count"],
        "a connection did not become a link of the relay hub; told at each doubling of the count",
    ),
    (
        "hub_accept_failed",
        Level::Warn,
        &["error"],
        "the relay hub's listener was out of descriptors or memory for a moment",
    ),
    ("acp_relay_up", Level::Info, &["relay", "form"], "receiving from a relay works"),
    (
        "acp_relay_lost",
        Level::Warn,
        &["relay", "code", "retry_ms"],
        "receiving from a relay has ended, in good order where there is no code; tried again",
    ),
    (
        "acp_relay_request",
        Level::Debug,
        &["source", "route", "status"],
        "a request to the ACP relay was answered; never its path, query or token",
    ),
    (
        "acp_relay_connection_refused",
        Level::Warn,
        &["source", "reason", "count"],
        "a connection to the ACP relay was not served; told at each doubling of the count",
    ),
    (
        "acp_relay_accept_failed",
        Level::Warn,
        &["error"],
        "the ACP relay's listener was out of descriptors or memory for a moment",
    ),
    (
        "acp_relay_store_failed",
        Level::Error,
        &["code", "error"],
        "the ACP relay cannot store: everything that would have to be stored is answered 503",
    ),
    ("acp_relay_store_back", Level::Info, &["envelopes"], "the ACP relay stores again"),
];
