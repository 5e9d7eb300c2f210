//! The command line of `commsd hub` (`docs/hub.md`).

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

use super::exit;
use super::output::{complain, json_line};

/// `commsd hub`: a relay hub, in the foreground.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct HubArgs {
    /// Where to listen [default port: 19878]
    #[arg(long, value_name = "ADDR[:PORT]")]
    pub listen: String,

    /// Certificate chain, PEM, for wss://
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,

    /// Its private key, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,

    /// A name by which it is reached; addresses and localhost always are. Repeat for more
    #[arg(long = "host", value_name = "NAME")]
    pub hosts: Vec<String>,

    /// Believe the last address in X-Forwarded-For: only with a proxy in front that sets it
    #[arg(long)]
    pub behind_proxy: bool,

    /// Links at the same time [default: 1024]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub max_links: Option<u32>,

    /// Links of one address (IPv6: of one /64) at the same time [default: 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub max_links_per_address: Option<u32>,

    /// How to write the log to stderr [env: COMMSD_LOG; filter in COMMSD_LOG_FILTER]
    /// [default: json when not on a terminal]
    #[arg(long, value_name = "FORMAT", value_parser = ["text", "json"])]
    pub log: Option<String>,
}

/// Warns, on stderr, of a server that is open beyond this machine without TLS. A program is told by an
/// event.
pub fn warn_of_plaintext(address: SocketAddr) {
    let text = format!(
        "warning: {address} is open beyond this machine without TLS; whoever is on the way sees who talks \
         to whom, and may claim to be the server\n-> give --tls-cert and --tls-key, or put a proxy that has a \
         certificate in front, and say so with --behind-proxy\n"
    );
    let _ = complain(&text, exit::DONE);
}

/// For the person, or the program, that has just started it.
#[must_use]
pub fn started(address: SocketAddr, tls: bool, json: bool) -> String {
    let (socket, web) = if tls { ("wss", "https") } else { ("ws", "http") };
    let (url, health) = (format!("{socket}://{address}/"), format!("{web}://{address}/health"));
    if json {
        return json_line(&serde_json::json!({
            "started": true,
            "pid": std::process::id(),
            "address": address.to_string(),
            "url": url,
            "health": health,
        }));
    }
    format!("the hub is at {url}, its state at {health}. Stop it with Ctrl-C.\n")
}
