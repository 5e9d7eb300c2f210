//! Readiness, watchdog and the end of the daemon, as a service manager sees them.

use std::sync::Arc;

use tokio::net::UnixDatagram;

use crate::bench::soon;
use crate::daemon::{Daemon, Ports, command};

fn signal(daemon: &Daemon, signal: rustix::process::Signal) {
    let pid = i32::try_from(daemon.child.id().unwrap()).unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), signal).unwrap();
}

#[tokio::test]
async fn the_service_manager_hears_ready_watchdog_and_stopping() {
    let home = Arc::new(tempfile::tempdir().unwrap());
    let path = home.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    let ports = Ports::free();
    let mut command = command(home.path(), ports, &[]);
    command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "200000");
    let daemon = Daemon::spawn(command, home, ports).await;
    let heard = async |wanted: &str| loop {
        let mut buffer = [0; 512];
        let length = soon(manager.recv(&mut buffer)).await.unwrap();
        let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
        if text.lines().any(|line| line == wanted) {
            return;
        }
    };
    heard("READY=1").await;
    // The socket answers by then.
    assert!(daemon.status().await.uptime_ms < 60_000);
    heard("WATCHDOG=1").await;
    heard("WATCHDOG=1").await;
    signal(&daemon, rustix::process::Signal::TERM);
    heard("STOPPING=1").await;
    let mut daemon = daemon;
    assert_eq!(soon(daemon.child.wait()).await.unwrap().code(), Some(0));
    assert!(!daemon.socket().exists(), "the socket is gone");
}

#[tokio::test]
async fn a_second_signal_ends_it_at_once() {
    let ports = Ports::free();
    let mut one = Daemon::start(ports).await;
    one.event("port_held").await;
    let two = Daemon::start(ports).await;
    two.event("port_joined").await;
    let two_id = two.device().await;
    one.log
        .wait(0, "the peer", |l| l["event"] == "peer_up" && l["device"] == two_id.as_str())
        .await;
    // A successor that does not answer keeps the leaving daemon waiting.
    signal(&two, rustix::process::Signal::STOP);
    signal(&one, rustix::process::Signal::TERM);
    one.event("port_released").await;
    signal(&one, rustix::process::Signal::TERM);
    assert_eq!(soon(one.child.wait()).await.unwrap().code(), Some(130));
    signal(&two, rustix::process::Signal::CONT);
    two.event("port_held").await;
}

#[tokio::test]
async fn a_stopped_daemon_leaves_its_slots_to_others() {
    let ports = Ports::free();
    let daemon = Daemon::start(ports).await;
    let alice = daemon.agent("alice").await;
    let home = Arc::clone(&daemon.home);
    let lock = home.path().join("agent-comms/identity-cli--alice.lock");
    assert!(lock.exists());
    drop(alice);
    daemon.stop().await;
    assert!(!lock.exists(), "the lock is released");
    assert!(home.path().join("agent-comms/identity-cli--alice.json").exists());
}
