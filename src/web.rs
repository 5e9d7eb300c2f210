//! The page for this machine's user (`commsd web`, `docs/web.md`): the daemon's state, rooms and
//! messages, and what waits for a yes or no, in a browser of this machine. A client of the daemon like
//! the command line, in a process of its own: `link` is its connections, `calls` what the page may
//! ask; who may see the page is `runtime::page_server`'s.

mod calls;
mod link;

use std::path::PathBuf;
use std::sync::Arc;

use data_encoding::HEXLOWER;
use tokio_util::sync::CancellationToken;

use self::link::Link;
use crate::api::types::{ApiError, Label};
use crate::identity::entropy::{Entropy as _, OsEntropy};
use crate::runtime::page_server::{Board, PageFile, PageLimits, PageServer};

/// Bytes of the token: nobody guesses 256 bits.
const TOKEN_BYTES: usize = 32;

/// The page.
const FILES: &[PageFile] = &[
    PageFile {
        path: "/",
        kind: "text/html; charset=utf-8",
        text: include_str!("web/page/index.html"),
    },
    PageFile {
        path: "/page.js",
        kind: "text/javascript; charset=utf-8",
        text: include_str!("web/page/page.js"),
    },
    PageFile {
        path: "/page.css",
        kind: "text/css; charset=utf-8",
        text: include_str!("web/page/page.css"),
    },
];

/// What is served, and for whom.
#[derive(Clone, Debug)]
pub struct Options {
    /// The daemon's socket.
    pub socket: PathBuf,
    /// The agent by which the user writes.
    pub agent: Label,
    /// The port; the system chooses where it is 0.
    pub port: u16,
}

/// What whoever has started it is told. No `Debug`: it has the secret.
pub enum News<'a> {
    /// The page is there.
    Ready {
        /// Its address.
        url: &'a str,
        /// The same with the token, for the user alone.
        secret_url: &'a str,
    },
    /// The daemon is gone; the page waits for it.
    Lost(&'a ApiError),
    /// It is back.
    Back,
}

/// Serves the page until `stop` is cancelled.
///
/// # Errors
/// When no daemon answers at the start, the agent cannot be had, or the port.
pub async fn serve(
    options: Options,
    stop: CancellationToken,
    told: impl Fn(News<'_>),
) -> Result<(), ApiError> {
    let mut entropy =
        OsEntropy::open().map_err(|error| ApiError::plain(error.code(), error.to_string()))?;
    let mut token = [0; TOKEN_BYTES];
    entropy.fill(&mut token);
    let server =
        PageServer::bind(options.port, HEXLOWER.encode(&token), FILES, PageLimits::default())
            .map_err(|error| {
                ApiError::new(error.code(), error.to_string(), "choose another with --port")
            })?;
    let (url, secret_url) = (server.url(), server.secret_url());
    let board = Arc::new(Board::default());
    let (link, streams) =
        Link::open(options.socket, options.agent, url.clone(), Arc::clone(&board)).await?;
    let link = Arc::new(link);
    told(News::Ready { url: &url, secret_url: &secret_url });
    drop(secret_url);
    tokio::select! {
        () = server.serve(Arc::clone(&link), board, stop) => {}
        () = link.keep(streams, told) => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing of others becomes markup or program, and nothing comes from elsewhere.
    #[test]
    fn the_page_is_made_of_its_own_files_and_text() {
        for file in FILES {
            for word in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "DOMParser",
                "createContextualFragment",
                "srcdoc",
                "eval(",
                "new Function",
                "import(",
                "://",
                "url(",
                "@import",
                "javascript:",
                "style=",
                "localStorage",
                "setTimeout(\"",
            ] {
                assert!(!file.text.contains(word), "{}: {word}", file.path);
            }
        }
        let html = FILES[0].text;
        assert_eq!(html.matches("<script").count(), 1);
        assert!(html.contains("<script type=\"module\" src=\"/page.js\"></script>"));
        assert!(html.contains("<link rel=\"stylesheet\" href=\"/page.css\">"));
        for handler in [" onclick", " onload", " onerror", " onsubmit"] {
            assert!(!html.contains(handler), "{handler}");
        }
    }

    /// Each element that the program looks for by its id is in the page.
    #[test]
    fn page_and_program_fit() {
        let (html, program) = (FILES[0].text, FILES[1].text);
        let mut asked = 0;
        for part in program.split("$(\"").skip(1) {
            let id = part.split('"').next().unwrap();
            assert!(html.contains(&format!("id=\"{id}\"")), "{id}");
            asked += 1;
        }
        assert!(asked > 10, "{asked}");
        // And every method that it asks for is one that it may.
        for part in program.split("ask(\"").skip(1) {
            let method = part.split('"').next().unwrap();
            assert!(calls::names(method), "{method}");
        }
    }
}
