//! The command line of `commsd web` (`docs/web.md`).

use std::io::{self, IsTerminal as _};
use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::output::{complain, json_line, write_out};
use super::{Endpoint, block_on, exit};
use crate::api::types::{ApiError, Label};
use crate::codec::text::escape_untrusted;
use crate::web::{News, Options, serve};

const OPEN_IT: &str =
    "commsd: open this address in your browser, and keep it to yourself. Stop with Ctrl-C.\n";
const NO_TERMINAL: &str =
    "commsd: stdout is no terminal; --print-url prints the address that lets you in\n";

/// `commsd web`: the page, in the foreground.
#[derive(Args, Clone, Debug)]
pub struct WebArgs {
    /// Port on 127.0.0.1; without it the system chooses one
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub port: u16,

    /// Write as the agent of this name; it is created on first use and kept
    #[arg(id = "as", long, value_name = "NAME", default_value = "web")]
    pub agent: Label,

    /// Print the address with its secret even where stdout is no terminal
    #[arg(long)]
    pub print_url: bool,
}

/// Serves the page until a signal comes.
#[must_use]
pub fn run(args: WebArgs, endpoint: &Endpoint, json: bool) -> ExitCode {
    let options = Options { socket: endpoint.socket.clone(), agent: args.agent, port: args.port };
    // Logs and pipes are read by others than the user.
    let show_secret = args.print_url || io::stdout().is_terminal();
    block_on(json, async {
        let stop = CancellationToken::new();
        let stopping = stop.clone();
        tokio::spawn(async move {
            crate::mcp::stopped().await;
            stopping.cancel();
        });
        serve(options, stop, |news| tell(&news, show_secret, json)).await?;
        Ok(exit::DONE.into())
    })
}

/// The address goes to stdout, everything else to stderr.
fn tell(news: &News<'_>, show_secret: bool, json: bool) {
    let note = |text: String| {
        complain(&text, exit::DONE);
    };
    match news {
        News::Ready { url, secret_url } => {
            let secret_url = show_secret.then_some(*secret_url);
            let text = if json {
                json_line(&json!({
                    "started": true,
                    "pid": std::process::id(),
                    "url": url,
                    "secretUrl": secret_url,
                }))
            } else {
                format!("{}\n", secret_url.unwrap_or(url))
            };
            // A closed terminal is no reason to stop.
            let _ = write_out(&text);
            if !json {
                note(if show_secret { OPEN_IT.into() } else { NO_TERMINAL.into() });
            }
        }
        News::Lost(error) if json => {
            note(json_line(&json!({ "connected": false, "error": error })));
        }
        News::Back if json => note(json_line(&json!({ "connected": true }))),
        News::Lost(ApiError { message, .. }) => {
            note(format!("commsd: {}; the page waits for it\n", escape_untrusted(message)));
        }
        News::Back => note("commsd: the daemon is back\n".into()),
    }
}
