//! Discovery by beacons between real daemons, and with another program on their port.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use commsd::api::types::{
    ActionParams, DiscoveryMethod, MeshAdapter, MeshAdvertiseParams, MeshDiscoverParams,
    MeshGetVisibilityParams, MeshSetVisibilityParams, MeshUnadvertiseParams, MeshVisibility,
    StatusParams,
};
use serde_json::{Value, json};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::UdpSocket;

use crate::bench::soon;
use crate::daemon::{Agent, Daemon, Ports};

const GROUP: Ipv4Addr = Ipv4Addr::new(239, 255, 19, 77);

/// Another program that shares the port, as a bridge of agent-comms does.
struct Other {
    socket: UdpSocket,
    port: u16,
}

impl Other {
    /// None where the machine has no multicast on its loopback, which is said.
    fn new(port: u16) -> Option<Self> {
        let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP)).unwrap();
        socket.set_reuse_address(true).unwrap();
        socket.set_nonblocking(true).unwrap();
        socket.set_multicast_if_v4(&Ipv4Addr::LOCALHOST).unwrap();
        socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)).into()).unwrap();
        if let Err(error) = socket.join_multicast_v4(&GROUP, &Ipv4Addr::LOCALHOST) {
            crate::limits::skipped(&format!("no multicast on loopback here ({error})"));
            return None;
        }
        Some(Self { socket: UdpSocket::from_std(socket.into()).unwrap(), port })
    }

    async fn say(&self, text: &str) {
        self.socket.send_to(text.as_bytes(), (GROUP, self.port)).await.unwrap();
    }

    /// The next datagram that holds `part`.
    async fn hear(&self, part: &str) -> String {
        let mut buffer = [0; 2048];
        soon(async {
            loop {
                let length = self.socket.recv(&mut buffer).await.unwrap();
                let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                if text.contains(part) {
                    return text;
                }
            }
        })
        .await
    }

    /// What has come by now and holds `part`.
    fn heard(&self, part: &str) -> usize {
        let mut buffer = [0; 2048];
        let mut count = 0;
        while let Ok(length) = self.socket.try_recv(&mut buffer) {
            count += usize::from(String::from_utf8_lossy(&buffer[..length]).contains(part));
        }
        count
    }
}

async fn tool(agent: &Agent, call: Value) -> (String, bool) {
    let Value::Object(call) = call else { unreachable!() };
    let result = agent.client.call(ActionParams(call)).await.unwrap();
    (result.content, result.is_error)
}

#[tokio::test]
async fn what_is_announced_is_heard_in_the_references_form_and_listed_with_care() {
    let ports = Ports::free();
    let (one, two) = tokio::join!(Daemon::start(ports), Daemon::start(ports));
    let Some(other) = Other::new(ports.udp) else { return };
    let (alice, bob) = (one.agent("alice").await, two.agent("bob").await);
    let call = json!({
        "action": "mesh_advertise", "name": "The \"shop\"", "method": "mdns", "port": 4711,
    });
    let (text, error) = tool(&alice, call).await;
    // Broadcasts are off: nothing is said of the network.
    assert!(
        !error
            && text.starts_with(
                "Announcing \"The \\\"shop\\\"\" (mdns) at port 4711 to this machine, id "
            ),
        "{text}"
    );
    assert_eq!(
        other.hear("shop").await,
        r#"{"type":"agent-comms-beacon","name":"The \"shop\"","port":4711,"policies":["full"]}"#
    );
    // What others say of themselves is data, and what cannot be shown is left out.
    for name in [r"\u202eevil", r"\u001b[31mred", r"a\nb"] {
        let beacon =
            r#"{"type":"agent-comms-beacon","name":"NAME","port":7,"policies":["name-only"]}"#;
        other.say(&beacon.replace("NAME", name)).await;
    }
    let (text, error) = tool(&bob, json!({"action": "mesh_discover", "method": "mdns"})).await;
    assert!(!error, "{text}");
    assert!(text.contains("127.0.0.1:4711  \"The \\\"shop\\\"\"  "), "{text}");
    assert!(text.contains("127.0.0.1:7  \"\\u{202e}evil\"  "), "{text}");
    assert_eq!(text.lines().filter(|line| line.contains(":7  ")).count(), 2, "{text}");
    assert!(!text.contains(['\u{202e}', '\u{1b}']) && !text.contains("red"), "{text}");
    // A beacon of first contact is an entry as well; one's own is none.
    let found = bob.client.call(MeshDiscoverParams { method: None }).await.unwrap().found;
    let device = |id: &str| found.iter().filter(|f| f.device.as_deref() == Some(id)).count();
    assert_eq!((device(&one.device().await), device(&two.device().await)), (1, 0), "{found:?}");

    let network = MeshAdvertiseParams {
        name: "shop".into(),
        method: DiscoveryMethod::Mdns,
        port: None,
        adapter: Some(MeshAdapter::Network),
    };
    assert_eq!(alice.client.call(network).await.unwrap_err().code, "not_announced");
    let made = alice
        .client
        .call(MeshAdvertiseParams {
            name: "second".into(),
            method: DiscoveryMethod::Mdns,
            port: None,
            adapter: None,
        })
        .await
        .unwrap();
    assert_eq!((made.port, made.adapters), (ports.tcp, vec![MeshAdapter::Loopback]));
    for there in [true, false] {
        let id = made.id.clone();
        let gone = bob.client.call(MeshUnadvertiseParams { id: id.clone() }).await.unwrap();
        assert!(!gone.withdrawn, "it is another daemon's");
        let gone = alice.client.call(MeshUnadvertiseParams { id }).await.unwrap();
        assert_eq!(gone.withdrawn, there);
    }
}

#[tokio::test]
async fn a_dark_machine_is_silent_also_after_a_restart_until_it_is_discoverable_again() {
    let ports = Ports::free();
    let one = Daemon::start(ports).await;
    let Some(other) = Other::new(ports.udp) else { return };
    let alice = one.agent("alice").await;
    let id = one.device().await;
    let set = |visibility, adapter| MeshSetVisibilityParams { visibility, adapter };
    other.say(r#"{"type":"agent-comms-probe"}"#).await;
    other.hear(&id).await;
    let now = alice.client.call(set(MeshVisibility::Quiet, None)).await.unwrap();
    assert_eq!(
        (now.loopback, now.network, now.broadcast),
        (MeshVisibility::Quiet, MeshVisibility::Quiet, false)
    );
    // Quiet: it answers.
    other.say(r#"{"type":"agent-comms-probe"}"#).await;
    other.hear(&id).await;
    let (text, _) = tool(
        &alice,
        json!({"action": "mesh_set_visibility", "meshVisibility": "dark", "adapter": "loopback"}),
    )
    .await;
    assert!(
        text.contains("dark on this machine") && text.contains("quiet on the network"),
        "{text}"
    );
    let (text, error) = tool(
        &alice,
        json!({"action": "mesh_advertise", "name": "shop", "method": "mdns", "adapter": "loopback"}),
    )
    .await;
    assert!(error && text.contains("not_announced"), "{text}");
    other.heard("");
    let silent = async |agent: &Agent| {
        other.say(r#"{"type":"agent-comms-probe"}"#).await;
        // Five seconds, in which an answer would have come.
        agent.client.call(MeshDiscoverParams { method: None }).await.unwrap();
        assert_eq!(other.heard(&id), 0);
    };
    silent(&alice).await;
    drop(alice);
    let home = Arc::clone(&one.home);
    one.stop().await;

    let one = Daemon::start_with(home, ports, &[]).await;
    let alice = one.agent("alice").await;
    let kept = alice.client.call(MeshGetVisibilityParams {}).await.unwrap();
    assert_eq!((kept.loopback, kept.network), (MeshVisibility::Dark, MeshVisibility::Quiet));
    silent(&alice).await;
    let status = alice.client.call(StatusParams { limits: None, settings: None }).await.unwrap();
    assert!(status.health.iter().any(|health| health.code == "mesh_not_discoverable"));
    alice.client.call(set(MeshVisibility::Discoverable, None)).await.unwrap();
    other.hear(&id).await;
}

#[tokio::test]
async fn without_first_contact_there_is_no_discovery_and_that_is_said() {
    let home = Arc::new(tempfile::tempdir().unwrap());
    let daemon = Daemon::start_with(home, Ports::free(), &["--no-first-contact"]).await;
    let ann = daemon.agent("ann").await;
    for call in [
        json!({"action": "mesh_discover"}),
        json!({"action": "mesh_advertise", "name": "shop", "method": "mdns"}),
    ] {
        let (text, error) = tool(&ann, call).await;
        assert!(error && text.contains("(no_discovery)"), "{text}");
    }
    let call = json!({"action": "mesh_advertise", "name": "shop", "method": "pigeon"});
    let (text, error) = tool(&ann, call).await;
    assert!(error && text.contains("`method`"), "{text}");
}
