//! Where the page for this machine's user is (`commsd web`): said by the process that serves it, for
//! as long as its connection is there.

use std::collections::BTreeMap;

use super::owner::Owner;
use crate::api::types::{ApiError, RequestId, WebAnnounceParams, WebUrl};
use crate::runtime::local_socket::ConnId;

/// Pages by the connection that has announced each; as many as there may be connections.
#[derive(Debug, Default)]
pub(super) struct Pages(BTreeMap<ConnId, String>);

impl Pages {
    pub(super) fn gone(&mut self, conn: ConnId) {
        self.0.remove(&conn);
    }

    /// The one that has come last.
    fn newest(&self) -> Option<&str> {
        self.0.last_key_value().map(|(_, url)| url.as_str())
    }
}

/// Whether it is a page on this machine, and no more than that: models are told the address, and it
/// must lead nowhere else and hold no secret.
fn is_page_url(url: &str) -> bool {
    let port = url.strip_prefix("http://127.0.0.1:").unwrap_or_default();
    port.parse().is_ok_and(|number: u16| number > 0 && number.to_string() == port)
}

impl Owner {
    pub(super) fn web_announce(&mut self, conn: ConnId, id: &RequestId, params: WebAnnounceParams) {
        let announced = if is_page_url(&params.url) {
            self.pages.0.insert(conn, params.url.clone());
            Ok(WebUrl { url: params.url })
        } else {
            Err(ApiError::invalid_params("web.announce", "`url`: http://127.0.0.1:PORT, no more"))
        };
        self.answer(conn, id, announced);
    }

    pub(super) fn web_url(&mut self, conn: ConnId, id: &RequestId) {
        let url = self.pages.newest().map(|url| WebUrl { url: url.to_owned() });
        let none = || {
            ApiError::new(
                "web_not_running",
                "no page is served for this machine's user",
                "the user starts one with `commsd web`",
            )
        };
        self.answer(conn, id, url.ok_or_else(none));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_bare_address_of_a_page_here_is_taken() {
        assert!(is_page_url("http://127.0.0.1:8080"));
        for url in [
            "",
            "http://127.0.0.1",
            "http://127.0.0.1:0",
            "http://127.0.0.1:08080",
            "http://127.0.0.1:+80",
            "http://127.0.0.1:65536",
            "http://127.0.0.1:8080/",
            "http://127.0.0.1:8080/?token=00",
            "http://127.0.0.1:80@evil.example",
            "https://127.0.0.1:8080",
            "http://localhost:8080",
            "http://evil.example:8080",
        ] {
            assert!(!is_page_url(url), "{url}");
        }
    }

    #[test]
    fn the_newest_page_is_told_and_one_that_is_gone_is_not() {
        let mut pages = Pages::default();
        assert_eq!(pages.newest(), None);
        pages.0.insert(ConnId(1), "one".into());
        pages.0.insert(ConnId(2), "two".into());
        assert_eq!(pages.newest(), Some("two"));
        pages.gone(ConnId(2));
        assert_eq!(pages.newest(), Some("one"));
    }
}
