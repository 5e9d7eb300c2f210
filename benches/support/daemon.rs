//! Real daemons: processes with homes and ports of their own, ended with the value that holds them.

use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use commsd::api::client::{Client, Notifications};
use commsd::api::types::{Status, StatusParams};
use commsd::codec::time::UnixMillis;
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

/// Nothing that a bench waits for takes this long unless it is broken.
pub const HANG: Duration = Duration::from_secs(50);
/// Between looks at something that is not told of.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// The ports that the daemons of one mesh share.
#[derive(Clone, Copy)]
pub struct Ports {
    tcp: u16,
    udp: u16,
}

impl Ports {
    /// Ports that were free a moment ago.
    pub fn free() -> Self {
        let local = (Ipv4Addr::LOCALHOST, 0);
        let tcp = TcpListener::bind(local).unwrap().local_addr().unwrap().port();
        let udp = UdpSocket::bind(local).unwrap().local_addr().unwrap().port();
        Self { tcp, udp }
    }
}

/// A running daemon.
pub struct Daemon {
    child: Child,
    home: TempDir,
}

impl Daemon {
    /// Where its files are.
    pub fn home(&self) -> &std::path::Path {
        self.home.path()
    }

    /// Starts one; [`Daemon::connect`] waits until it answers.
    pub fn spawn(ports: Ports) -> Self {
        Self::spawn_in(tempfile::tempdir().unwrap(), ports)
    }

    /// Ends it, and starts another one in its home.
    pub fn again(self, ports: Ports) -> Self {
        let mut before = self;
        before.kill();
        let home = std::mem::replace(&mut before.home, tempfile::tempdir().unwrap());
        Self::spawn_in(home, ports)
    }

    fn spawn_in(home: TempDir, ports: Ports) -> Self {
        let log = std::fs::File::create(home.path().join("log")).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_commsd"))
            .args(["run", "--no-broadcast", "--log", "json", "--home"])
            .arg(home.path())
            .args(["--port", &ports.tcp.to_string()])
            .args(["--first-contact-port", &ports.udp.to_string()])
            .env_clear()
            .env("HOME", home.path())
            .env("COMMSD_NO_BROADCAST", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        Self { child, home }
    }

    /// Starts one and waits until it answers.
    pub async fn start(ports: Ports) -> Self {
        let daemon = Self::spawn(ports);
        daemon.connect().await;
        daemon
    }

    pub fn socket(&self) -> PathBuf {
        self.home.path().join("run/commsd.sock")
    }

    /// A connection; waits for the daemon to answer.
    pub async fn connect(&self) -> (Client, Notifications) {
        until("the daemon answers", async || Client::connect(&self.socket(), "bench").await.ok())
            .await
    }

    /// What its log says so far.
    pub fn events(&self) -> Vec<Logged> {
        let log = std::fs::read_to_string(self.home.path().join("log")).unwrap();
        // A line being written is read the next time.
        log.lines().filter_map(|line| serde_json::from_str(line).ok()).map(Logged::of).collect()
    }

    /// Ends it as a crash does.
    pub fn kill(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Its memory.
    pub fn memory(&self) -> Memory {
        Memory::of(self.child.id())
    }

    /// Processor time used so far, ended threads included; in steps of 10 ms.
    pub fn cpu(&self) -> Duration {
        const TICK: Duration = Duration::from_millis(10);
        let stat = std::fs::read_to_string(proc(self.child.id(), "stat")).unwrap();
        // The program's name, in brackets, may hold anything.
        let (_, fields) = stat.rsplit_once(')').unwrap();
        // User and system time are fields 14 and 15; what follows the name begins with field 3.
        let ticks = fields.split_whitespace().skip(11).take(2).map(|t| t.parse::<u32>().unwrap());
        TICK * ticks.sum::<u32>()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A line of a daemon's log.
pub struct Logged {
    pub at: UnixMillis,
    pub name: String,
    /// The device that it is about, if any.
    pub device: String,
}

impl Logged {
    fn of(line: serde_json::Value) -> Self {
        let text = |field: &str| line[field].as_str().unwrap_or_default().to_owned();
        let at = UnixMillis::parse_iso(&text("time")).unwrap();
        Self { at, name: text("event"), device: text("device") }
    }
}

/// In KiB.
#[derive(Clone, Copy)]
pub struct Memory {
    pub resident: f64,
    pub anonymous: f64,
}

impl Memory {
    /// Resident memory of a process: all of it, and the part that is not mapped from files.
    pub fn of(process: u32) -> Self {
        let status = std::fs::read_to_string(proc(process, "status")).unwrap();
        let field = |name: &str| -> f64 {
            let line = status.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().parse().unwrap()
        };
        Self { resident: field("VmRSS:"), anonymous: field("RssAnon:") }
    }
}

fn proc(process: u32, file: &str) -> PathBuf {
    Path::new("/proc").join(process.to_string()).join(file)
}

pub async fn status(client: &Client) -> Status {
    client.call(StatusParams { limits: None, settings: None }).await.unwrap()
}

/// Looks until there is something.
pub async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + HANG;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        sleep(LOOK_EVERY).await;
    }
}
