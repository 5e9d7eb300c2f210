//! The mesh itself: devices and the ways to them, listeners, beacons.

use std::fmt;

use serde::{Deserialize, Serialize};

words! {
    /// What those may do who come in by a listener, once they are let in.
    ListenPolicy {
        /// Whatever another machine may.
        Full = "full",
        /// Hear who is here, and no more.
        Observe = "observe",
        /// Rooms and conversations, and nothing that is shared beside them.
        RoomsOnly = "rooms-only",
        /// Only whom the user trusts is heard of, and heard.
        Gateway = "gateway",
    }

    /// How far a machine makes itself known by beacons.
    MeshVisibility {
        /// By itself, and to whoever asks.
        Discoverable = "discoverable",
        /// Only to whoever asks.
        Quiet = "quiet",
        /// To nobody; and beacons of others lead to nothing.
        Dark = "dark",
    }

    /// Where beacons go.
    MeshAdapter {
        /// The programs of this machine.
        Loopback = "loopback",
        /// The networks that it is in.
        Network = "network",
    }

    /// How peers are discovered.
    DiscoveryMethod {
        /// By beacons on the port of first contact, which agent-comms calls so.
        Mdns = "mdns",
    }
}

params! {
    /// `mesh.version`.
    MeshVersionParams {
        /// Id, unambiguous prefix of it, or unambiguous name.
        device: String,
        ;
    }

    /// `mesh.trace`.
    MeshTraceParams {
        /// Id, unambiguous prefix of it, or unambiguous name.
        target: String,
        ;
        /// How long it may take, in milliseconds; at most a minute.
        timeout_ms: u64,
    }

    /// `mesh.graph`.
    MeshGraphParams { ; }

    /// `mesh.connect`.
    MeshConnectParams {
        /// Name or address.
        host: String,
        /// Port of its network listener.
        port: u16,
        ;
    }

    /// `mesh.listen`.
    MeshListenParams {
        /// Address of this machine.
        host: String,
        ;
        /// Port; the system chooses without one.
        port: u16,
        /// What those may do who come in there; full without it.
        policy: ListenPolicy,
    }

    /// `mesh.unlisten`.
    MeshUnlistenParams {
        /// Its id.
        id: String,
        ;
    }

    /// `mesh.listeners`.
    MeshListenersParams { ; }

    /// `mesh.interfaces`.
    MeshInterfacesParams { ; }

    /// `mesh.discover`.
    MeshDiscoverParams {
        ;
        /// How; by beacons without it.
        method: DiscoveryMethod,
    }

    /// `mesh.advertise`.
    MeshAdvertiseParams {
        /// What others see, 1 to 64 characters.
        name: String,
        /// How.
        method: DiscoveryMethod,
        ;
        /// Which port others may connect to; that of `--listen`, or else the well-known one.
        port: u16,
        /// To whom; to both without it.
        adapter: MeshAdapter,
    }

    /// `mesh.unadvertise`.
    MeshUnadvertiseParams {
        /// Its id.
        id: String,
        ;
    }

    /// `mesh.set_visibility`.
    MeshSetVisibilityParams {
        /// How far.
        visibility: MeshVisibility,
        ;
        /// Towards whom; towards both without it.
        adapter: MeshAdapter,
    }

    /// `mesh.get_visibility`.
    MeshGetVisibilityParams { ; }
}

results! {
    /// `mesh.version`.
    MeshVersion {
        /// Full id.
        device: String,
        /// Of the mesh protocol's core (wire-mesh), as the device says.
        version: String,
        /// The version of agent-comms that it announces, where it is a peer.
        agent_comms: Option<String>,
    }

    /// `mesh.trace`.
    MeshTrace {
        /// Full id.
        target: String,
        /// There and back.
        rtt_ms: u64,
        /// Whether a hub passes messages on, as the device says.
        relayed: Option<bool>,
        /// That hub.
        hub: Option<String>,
    }

    /// `mesh.graph`.
    MeshGraph {
        /// Everybody named in adverts.
        nodes: Vec<GraphNode>,
        /// Direct connections, each once.
        edges: Vec<GraphEdge>,
    }

    /// One device of the graph.
    GraphNode {
        /// Full id.
        id: String,
        /// What it calls itself, where that is known.
        name: Option<String>,
    }

    /// One connection of the graph.
    GraphEdge {
        /// Full id.
        from: String,
        /// Full id.
        to: String,
    }

    /// `mesh.connect`.
    MeshConnected {
        /// As asked for.
        host: String,
        /// As asked for.
        port: u16,
        /// Full id of the device that is there.
        device: String,
    }

    /// `mesh.listen`, `mesh.unlisten`.
    MeshListener {
        /// Its id.
        id: String,
        /// The address.
        host: String,
        /// The port.
        port: u16,
        /// What those may do who come in there.
        policy: ListenPolicy,
        /// Whether it belongs to the daemon and stays.
        default: bool,
    }

    /// `mesh.listeners`.
    MeshListeners {
        /// The daemon's own first.
        listeners: Vec<MeshListener>,
    }

    /// `mesh.interfaces`.
    MeshInterfaces {
        /// As the system lists them.
        interfaces: Vec<MeshInterface>,
    }

    /// One address of the machine.
    MeshInterface {
        /// The interface.
        name: String,
        /// `IPv4` or `IPv6`.
        family: String,
        /// The address.
        address: String,
        /// Whether it leads nowhere else.
        internal: bool,
    }

    /// `mesh.discover`.
    MeshDiscovered {
        /// Whoever was heard lately, the newest first.
        found: Vec<MeshFound>,
    }

    /// Somebody whose beacon was heard. Nothing of it is proven.
    MeshFound {
        /// Where the beacon came from.
        host: String,
        /// The port that it names.
        port: u16,
        /// The name that it gives itself, where it can be shown.
        name: Option<String>,
        /// Full id of the device, where the beacon names one.
        device: Option<String>,
        /// How long ago it was heard last.
        ago_ms: u64,
    }

    /// `mesh.advertise`.
    MeshAdvertised {
        /// Its id.
        id: String,
        /// As it is announced.
        name: String,
        /// As asked for.
        method: DiscoveryMethod,
        /// The port.
        port: u16,
        /// Where the beacons go.
        adapters: Vec<MeshAdapter>,
    }

    /// `mesh.unadvertise`.
    MeshUnadvertised {
        /// Its id.
        id: String,
        /// Whether there was one.
        withdrawn: bool,
    }

    /// `mesh.set_visibility`, `mesh.get_visibility`.
    MeshVisibilities {
        /// Towards the programs of this machine.
        loopback: MeshVisibility,
        /// Towards the networks that it is in.
        network: MeshVisibility,
        /// Whether anything goes to the networks at all: not with `no-broadcast`.
        broadcast: bool,
    }
}
