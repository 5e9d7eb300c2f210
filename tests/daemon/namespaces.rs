//! Two machines: two network namespaces with a cable between them. Only there is broadcast tested.
//! Skipped, and said so, where namespaces cannot be made.

// A skipped test says so.
#![allow(clippy::print_stdout)]

use std::ffi::OsStr;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use commsd::api::types::{
    DeliveryStatus, PendingKind, RoomCreateParams, RoomJoinParams, RoomsParams,
};
use tempfile::TempDir;
use tokio::process::Command;

use crate::daemon::{Agent, Daemon, Ports};

/// Two namespaces, taken down with the value.
pub struct Machines {
    pub names: [String; 2],
}

impl Machines {
    /// `None` where the system does not let us.
    pub async fn make() -> Option<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let id = std::process::id() * 10 + MADE.fetch_add(1, Ordering::Relaxed);
        let names = [format!("commsd-{id}-a"), format!("commsd-{id}-b")];
        let machines = Self { names };
        let [a, b] = &machines.names;
        // Interface names have at most 15 characters.
        let (va, vb) = (format!("cva{}", id % 1_000_000), format!("cvb{}", id % 1_000_000));
        let steps = [
            format!("netns add {a}"),
            format!("netns add {b}"),
            format!("link add {va} netns {a} type veth peer name {vb} netns {b}"),
            format!("-n {a} addr add 10.77.0.1/24 dev {va}"),
            format!("-n {b} addr add 10.77.0.2/24 dev {vb}"),
            format!("-n {a} link set lo up"),
            format!("-n {b} link set lo up"),
            format!("-n {a} link set {va} up"),
            format!("-n {b} link set {vb} up"),
            // The limited broadcast needs a way out.
            format!("-n {a} route add default via 10.77.0.2"),
            format!("-n {b} route add default via 10.77.0.1"),
        ];
        for step in &steps {
            let output = Command::new("ip").args(step.split(' ')).output().await;
            match output {
                Ok(output) if output.status.success() => {}
                other => {
                    println!("SKIPPED: `ip {step}` failed here ({other:?})");
                    return None;
                }
            }
        }
        Some(machines)
    }

    /// A program on one of the machines.
    pub fn command(&self, machine: usize, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.names[machine]])
            .arg(program)
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    pub async fn daemon(&self, machine: usize, home: Arc<TempDir>, args: &[&str]) -> Daemon {
        let ports = Ports { tcp: 19876, udp: 19877 };
        let mut command = self.command(machine, env!("CARGO_BIN_EXE_commsd"));
        command.args(["run", "--log", "json", "--home"]).arg(home.path()).args(args);
        command.env("HOME", home.path());
        Daemon::spawn(command, home, ports).await
    }

    async fn listening(&self, machine: usize, address: &str) -> Daemon {
        let home = Arc::new(tempfile::tempdir().unwrap());
        self.daemon(machine, home, &["--listen", address]).await
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for name in &self.names {
            // What was not made cannot be removed.
            let _ = std::process::Command::new("ip")
                .args(["netns", "del", name])
                .stderr(Stdio::null())
                .status();
        }
    }
}

async fn let_in(agent: &mut Agent) {
    agent.wait_kind("connection_request").await;
    let pending = agent.pending(PendingKind::Mesh).await;
    agent.accept(&pending[0]).await;
}

#[tokio::test]
async fn two_machines_meet_by_broadcast_and_talk_once_both_have_agreed() {
    let Some(machines) = Machines::make().await else { return };
    let one = machines.listening(0, "10.77.0.1").await;
    let mut alice = one.agent("alice").await;
    let two = machines.listening(1, "10.77.0.2:7000").await;
    let mut bob = two.agent("bob").await;

    // They have found each other and hold a session that is no peer's: no claim, no names.
    alice.wait_kind("connection_request").await;
    let one_id = one.device().await;
    let quarantined = two.status().await;
    let peer = quarantined.peers.iter().find(|peer| peer.device == one_id).expect("a session");
    assert!(!peer.machine_local);
    assert_eq!(quarantined.coordinator.holder, None);
    let listed = bob.client.call(commsd::api::types::AgentsParams {}).await.unwrap().agents;
    assert_eq!(listed.len(), 1, "only bob: {listed:?}");
    assert!(!two.log.text().contains("peer_up"), "{}", two.log.text());

    let pending = alice.pending(PendingKind::Mesh).await;
    alice.accept(&pending[0]).await;
    let_in(&mut bob).await;
    two.log
        .wait(0, "the other machine", |l| l["event"] == "peer_up" && l["origin"] == "network")
        .await;

    let seen = |id: String| {
        move |l: &serde_json::Value| l["event"] == "agent_seen" && l["agent"] == id.as_str()
    };
    one.log.wait(0, "bob by gossip", seen(bob.id.clone())).await;
    two.log.wait(0, "alice by gossip", seen(alice.id.clone())).await;
    alice.befriend(&mut bob).await;
    // Rooms as well, through the same two daemons.
    let room = alice
        .client
        .call(RoomCreateParams { name: "far".into(), r#type: None, description: None })
        .await
        .unwrap();
    let joined = bob.client.call(RoomJoinParams { room: room.path.clone() }).await.unwrap();
    assert_eq!(joined.members.len(), 2);
    let rooms = bob.client.call(RoomsParams {}).await.unwrap().rooms;
    assert!(rooms.iter().any(|listed| listed.path == room.path && listed.joined));
    // The role stays a matter of each machine.
    assert_ne!(one.status().await.coordinator.holder, Some(two.device().await));

    // Gone, it is gone, and what is written meanwhile waits.
    let bob_id = bob.id.clone();
    drop(bob);
    two.kill().await;
    one.log
        .wait(0, "the end", |l| l["event"] == "peer_down" && l["device"] == bob_id.as_str())
        .await;
    let sent = alice.dm(&bob_id, "are you there", None).await;
    assert_eq!(sent.deliveries[0].status, DeliveryStatus::Queued);
}
