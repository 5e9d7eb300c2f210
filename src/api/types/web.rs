//! The page for this machine's user (`commsd web`): where it is.

use serde::{Deserialize, Serialize};

params! {
    /// `web.announce`: the page is there for as long as the connection is.
    WebAnnounceParams {
        /// `http://127.0.0.1:PORT`, without the secret.
        url: String,
        ;
    }

    /// `web.url`.
    WebUrlParams { ; }
}

results! {
    /// `web.announce`, `web.url`.
    WebUrl {
        /// `http://127.0.0.1:PORT`, without the secret.
        url: String,
    }
}
