//! Arguments in, exit code out; nothing else.

use std::ffi::OsString;
use std::process::ExitCode;

use commsd::acp::objects::GatePolicy;
use commsd::acp::relay::Limits;
use commsd::api::types::{ApiError, PROGRAM_VERSION};
use commsd::cli::acp::args::{AcpArgs, RelayStartArgs};
use commsd::cli::acp::hosted::{self, Surroundings};
use commsd::cli::acp::{Dispatch, Hosted, HostedCommand};
use commsd::cli::hub::HubArgs;
use commsd::cli::run::{self, RunOptions, Running};
use commsd::cli::{self, ClientCommand, Command, Endpoint, Invocation, exit};
use commsd::daemon::Ran;
use commsd::daemon::acp_relay::{self, RelayOptions};
use commsd::daemon::config::{self, Config, ConfigError, LogFormat, Places, Settings};
use commsd::daemon::relay_hub::{self, HubOptions};
use commsd::mcp;
use commsd::runtime::memory;
use commsd::runtime::relay_server::ServerOptions;
use commsd::runtime::sandbox;
use commsd::runtime::sys;

fn main() -> ExitCode {
    // The stages of a sandbox are this executable, run again.
    if let Some(code) = sandbox::shim(std::env::args_os()) {
        return code;
    }
    let invocation = match cli::parse(std::env::args_os()) {
        Ok(invocation) => invocation,
        Err(code) => return code,
    };
    let json = invocation.globals.json;
    match &invocation.command {
        Command::Completions { shell } => return cli::print(&cli::completions(*shell)),
        Command::Vault { args } => {
            let endpoint = || match resolve(&invocation) {
                Ok(Config { socket, other_socket, agent_comms_dir, .. }) => {
                    Ok(Endpoint::find(socket, other_socket, agent_comms_dir))
                }
                Err(error) => Err(unusable(&error, json)),
            };
            return cli::vault::run(args, endpoint, json);
        }
        Command::Setup(args) => return cli::set_up(args, &global_flags(&invocation), json),
        Command::Hub(args) => return hub(args, json),
        Command::Acp(args) => return acp(args, &invocation),
        Command::Run(_)
        | Command::Mcp { .. }
        | Command::Web(_)
        | Command::Hook { .. }
        | Command::Service(_)
        | Command::Client(_) => {}
    }
    let config = match resolve(&invocation) {
        Ok(config) => config,
        Err(error) => return unusable(&error, json),
    };
    let flags = global_flags(&invocation);
    match invocation.command {
        Command::Run(RunOptions { check: true, .. }) => cli::print(&config.report(json)),
        Command::Run(options) => {
            // One that has its socket in the other default place is the daemon of this user all the same.
            let Config { socket, other_socket, agent_comms_dir, .. } = config.clone();
            let Endpoint { socket, .. } = Endpoint::find(socket, other_socket, agent_comms_dir);
            let config = Config { socket, ..config };
            memory::stay_small();
            let ran = commsd::daemon::run(&config, move |config| {
                // A closed terminal is no reason to stop.
                let _ = cli::print(&run::started(&config.socket, &flags, json));
            });
            match ran {
                Ok(Ran::Stopped) => ExitCode::SUCCESS,
                Ok(Ran::AlreadyRunning(holder)) => {
                    let sentence = holder.to_string();
                    let running = Running {
                        started: false,
                        pid: holder.pid,
                        version: holder.version,
                        socket: holder.socket,
                        differs: Vec::new(),
                    };
                    run::already_running(running, &sentence, &options, &config.settings(), json)
                }
                Err(error) => {
                    let code = if error.is_configuration() { exit::CONFIG } else { exit::FAILED };
                    cli::report(&error.into(), json, code)
                }
            }
        }
        Command::Mcp { harness, name, no_start, no_acp } => {
            let start = if no_start { None } else { start(flags) };
            let Config { socket, other_socket, agent_comms_dir, .. } = config;
            let Endpoint { socket, .. } = Endpoint::find(socket, other_socket, agent_comms_dir);
            let options = mcp::Options { socket, start, harness, name, acp: !no_acp };
            memory::stay_small();
            match mcp::run(options) {
                Ok(code) => code,
                Err(error) => cli::report(&error, json, exit::FAILED),
            }
        }
        Command::Web(args) => {
            let Config { socket, other_socket, agent_comms_dir, .. } = config;
            memory::stay_small();
            cli::web::run(args, &Endpoint::find(socket, other_socket, agent_comms_dir), json)
        }
        Command::Hook { harness, wait } => {
            // What it says counts as shown, and it says so where nobody hears it too.
            let open = if wait.is_some() { sys::stderr_is_open() } else { sys::stdout_is_open() };
            if !open {
                return exit::DONE.into();
            }
            let Config { socket, other_socket, agent_comms_dir, .. } = config;
            cli::hook(harness, wait, &Endpoint::find(socket, other_socket, agent_comms_dir))
        }
        Command::Service(command) => {
            let Config { socket, other_socket, agent_comms_dir, .. } = config;
            let endpoint = Endpoint::find(socket, other_socket, agent_comms_dir);
            cli::service(command, &endpoint, &flags, json)
        }
        Command::Client(command) => {
            // What is printed counts as seen; the standard library drops it without a word.
            let acknowledges = match &command {
                ClientCommand::Inbox { peek, .. } => !peek,
                ClientCommand::Listen { .. } => true,
                _ => false,
            };
            if acknowledges && !sys::stdout_is_open() {
                let error = ApiError::new(
                    "output",
                    "stdout is closed: nothing was fetched, and nothing acknowledged",
                    "give stdout somewhere to go; to drop the events, > /dev/null",
                );
                return cli::report(&error, json, exit::FAILED);
            }
            let Config { socket, other_socket, agent_comms_dir, .. } = config;
            cli::execute(command, &Endpoint::find(socket, other_socket, agent_comms_dir), json)
        }
        Command::Completions { .. }
        | Command::Setup(_)
        | Command::Vault { .. }
        | Command::Acp(_)
        | Command::Hub(_) => ExitCode::SUCCESS,
    }
}

/// The Agent Collaboration Protocol: what the command line alone can do, and what needs more.
fn acp(args: &AcpArgs, invocation: &Invocation) -> ExitCode {
    let json = invocation.globals.json;
    let hosted = match cli::acp::run(args.clone(), json) {
        Dispatch::Done(code) => return code,
        Dispatch::Hosted(hosted) => hosted,
    };
    if let HostedCommand::RelayStart(args) = &hosted.command {
        return acp_relay(args, &hosted, invocation);
    }
    let config = match resolve(invocation) {
        Ok(config) => config,
        Err(error) => return unusable(&error, json),
    };
    let state_dir = config.acp_dir();
    let gates = [GatePolicy::Auto, GatePolicy::Deny].map(|policy| config.acp_gates.with(policy));
    let Config { socket, other_socket, agent_comms_dir, .. } = config;
    let Endpoint { socket, .. } = Endpoint::find(socket, other_socket, agent_comms_dir);
    let around = Surroundings { state_dir, socket, gates };
    hosted::run(*hosted, &around, json)
}

/// The relay of the Agent Collaboration Protocol, in the foreground.
fn acp_relay(args: &RelayStartArgs, hosted: &Hosted, invocation: &Invocation) -> ExitCode {
    let json = invocation.globals.json;
    let options = match acp_relay_options(args, hosted, invocation) {
        Ok(options) => options,
        Err(error) => {
            let error = ApiError::new(error.code(), error.to_string(), error.todo());
            return cli::report(&error, json, exit::USAGE);
        }
    };
    let tls = options.tls.is_some();
    memory::stay_small();
    let ran = acp_relay::run(options, |address, plaintext| {
        // A closed terminal is no reason to stop.
        let _ = cli::print(&cli::acp::relay_started(address, tls, json));
        if plaintext && !json {
            cli::hub::warn_of_plaintext(address);
        }
    });
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let code = if error.is_configuration() { exit::USAGE } else { exit::FAILED };
            cli::report(&error.into(), json, code)
        }
    }
}

fn acp_relay_options(
    args: &RelayStartArgs,
    hosted: &Hosted,
    invocation: &Invocation,
) -> Result<RelayOptions, ConfigError> {
    let state = match (&args.state, &hosted.state_dir) {
        (Some(state), _) => state.clone(),
        (None, Some(dir)) => dir.join("relay"),
        (None, None) => resolve(invocation)?.state_dir.join("acp").join("relay"),
    };
    let (log, log_filter) = log_options(args.log.clone(), hosted.verbose)?;
    let defaults = Limits::default();
    let limits = Limits {
        did_per_minute: args.per_did.unwrap_or(defaults.did_per_minute),
        address_per_minute: args.per_address.unwrap_or(defaults.address_per_minute),
        ..defaults
    };
    Ok(RelayOptions {
        host: args.host,
        port: args.port,
        state,
        query_auth: !args.no_query_auth,
        max_mailbox_bytes: args.max_mailbox_bytes,
        origins: args.origins.clone(),
        behind_proxy: args.behind_proxy,
        limits,
        per_source: None,
        tls: args.tls_cert.clone().zip(args.tls_key.clone()),
        log,
        log_filter,
    })
}

/// How a process that is no daemon logs: as its flags say, or the environment.
fn log_options(flag: Option<String>, verbose: u8) -> Result<(LogFormat, String), ConfigError> {
    let environment = Settings::from_env(|name| std::env::var_os(name))?;
    let terminal = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let log_default = if terminal { LogFormat::Text } else { LogFormat::Json };
    let log = config::flag("--log", flag)?.or(environment.log).unwrap_or(log_default);
    let filter = match verbose {
        0 => config::DEFAULT_LOG_FILTER,
        1 => "info,commsd=debug",
        _ => "debug,commsd=trace",
    };
    Ok((log, environment.log_filter.unwrap_or_else(|| filter.into())))
}

/// The relay hub, which needs nothing of the daemon's configuration but how to log.
fn hub(args: &HubArgs, json: bool) -> ExitCode {
    let options = match hub_options(args) {
        Ok(options) => options,
        Err(error) => return unusable(&error, json),
    };
    let tls = options.server.tls.is_some();
    memory::stay_small();
    let ran = relay_hub::run(options, |address, plaintext| {
        // A closed terminal is no reason to stop.
        let _ = cli::print(&cli::hub::started(address, tls, json));
        if plaintext && !json {
            cli::hub::warn_of_plaintext(address);
        }
    });
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let code = if error.is_configuration() { exit::CONFIG } else { exit::FAILED };
            cli::report(&error.into(), json, code)
        }
    }
}

fn hub_options(args: &HubArgs) -> Result<HubOptions, ConfigError> {
    let (log, log_filter) = log_options(args.log.clone(), 0)?;
    let mut server = ServerOptions {
        tls: args.tls_cert.clone().zip(args.tls_key.clone()),
        hosts: args.hosts.clone(),
        behind_proxy: args.behind_proxy,
        version: PROGRAM_VERSION,
        ..ServerOptions::default()
    };
    let number = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
    if let Some(links) = args.max_links {
        server.limits.links = number(links);
    }
    if let Some(links) = args.max_links_per_address {
        server.limits.per_source = number(links);
    }
    Ok(HubOptions { listen: config::hub_address(&args.listen)?, server, log, log_filter })
}

fn unusable(error: &ConfigError, json: bool) -> ExitCode {
    let error = ApiError::new(error.code(), error.to_string(), error.todo());
    cli::report(&error, json, exit::CONFIG)
}

/// The command that runs the daemon of the same flags; what the environment says, it inherits.
fn start(flags: Vec<OsString>) -> Option<mcp::Start> {
    let args = std::iter::once(OsString::from("run")).chain(flags).collect();
    Some(mcp::Start { program: std::env::current_exe().ok()?, args })
}

/// The flags that say which daemon, for a process that runs elsewhere: paths are absolute.
fn global_flags(invocation: &Invocation) -> Vec<OsString> {
    let mut flags = Vec::new();
    for (flag, value) in
        [("--home", &invocation.globals.home), ("--socket", &invocation.globals.socket)]
    {
        if let Some(value) = value {
            let value = std::path::absolute(value).unwrap_or_else(|_| value.clone());
            flags.extend([flag.into(), value.into_os_string()]);
        }
    }
    flags
}

/// What file, environment and flags say together.
fn resolve(invocation: &Invocation) -> Result<Config, ConfigError> {
    let run = match &invocation.command {
        Command::Run(run) => run.clone(),
        Command::Acp(acp) => RunOptions { config: acp.config.clone(), ..RunOptions::default() },
        _ => RunOptions::default(),
    };
    let flags = Settings {
        home: invocation.globals.home.clone(),
        config: run.config,
        socket: invocation.globals.socket.clone(),
        agent_comms_dir: run.agent_comms_dir,
        port: run.port,
        first_contact_port: run.first_contact_port,
        no_broadcast: run.no_broadcast,
        no_first_contact: run.no_first_contact,
        listen: config::flag("--listen", run.listen)?,
        hub: run.hub,
        ephemeral: run.ephemeral,
        acp_relays: None,
        acp_allow_insecure: false,
        log: config::flag("--log", run.log)?,
        log_filter: None,
    };
    Config::resolve(flags, Settings::from_env(|name| std::env::var_os(name))?, &Places::of_user()?)
}
