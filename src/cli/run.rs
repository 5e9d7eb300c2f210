//! The flags of `commsd run`. What they mean together with file and environment is decided by the
//! daemon's configuration.

use std::path::PathBuf;

use clap::Args;

/// `commsd run`: the daemon, in the foreground.
///
/// Defaults are overridden by the configuration file, then by the environment, then by flags.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct RunOptions {
    /// Configuration file [env: COMMSD_CONFIG] [default: commsd/config.toml in the user's
    /// configuration directory]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Where identities are kept [env: AGENT_COMMS_DATA_DIR] [default: ~/.agent-comms]
    #[arg(long, value_name = "DIR")]
    pub agent_comms_dir: Option<PathBuf>,

    /// Well-known TCP port [default: 19876]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub port: Option<u16>,

    /// UDP port of first contact [default: 19877]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub first_contact_port: Option<u16>,

    /// Send beacons only to the loopback, so that nothing leaves the machine
    /// [env: COMMSD_NO_BROADCAST=1]
    #[arg(long)]
    pub no_broadcast: bool,

    /// Use no UDP at all
    #[arg(long)]
    pub no_first_contact: bool,

    /// Listen at one more address, for other machines; strangers are held in quarantine
    #[arg(long, value_name = "ADDR[:PORT]")]
    pub listen: Option<String>,

    /// Keep no durable state but keys
    #[arg(long)]
    pub ephemeral: bool,

    /// How to write the log to stderr [env: COMMSD_LOG; filter in COMMSD_LOG_FILTER]
    /// [default: json when not on a terminal]
    #[arg(long, value_name = "FORMAT", value_parser = ["text", "json"])]
    pub log: Option<String>,

    /// Read the configuration, print what would be used, and bind nothing
    #[arg(long)]
    pub check: bool,
}
