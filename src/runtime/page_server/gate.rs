//! Who may ask: the user's own browser, from this page and no other, with the token. The checks come
//! in the order in which a stranger could tell them apart: nothing is said of the token to a request
//! that another page has made.

use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
use p256::elliptic_curve::subtle::ConstantTimeEq as _;
use zeroize::Zeroizing;

use super::Refusal;

/// Who has passed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Passed {
    /// Somebody with the token, in a header.
    Known,
    /// Somebody who has the token in the address: it is given as this cookie, out of sight.
    Newly(HeaderValue),
}

/// What a request must show.
pub(super) struct Gate {
    port: u16,
    cookie: String,
    token: Zeroizing<String>,
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate").field("port", &self.port).finish_non_exhaustive()
    }
}

const fn forbidden(why: &'static str) -> Refusal {
    Refusal(StatusCode::FORBIDDEN, why)
}

impl Gate {
    pub(super) fn new(port: u16, token: String) -> Self {
        // Browsers keep cookies of a host whatever the port: two pages must not take each other's.
        Self { port, cookie: format!("commsd_web_{port}"), token: Zeroizing::new(token) }
    }

    pub(super) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub(super) fn secret_url(&self) -> String {
        format!("{}/?token={}", self.url(), *self.token)
    }

    /// Judges a request by its head.
    pub(super) fn judge(&self, head: &Parts) -> Result<Passed, Refusal> {
        let headers = &head.headers;
        // A name that somebody has made point here is none of ours.
        let host = one(headers, header::HOST).unwrap_or_default();
        let port = host.strip_prefix("127.0.0.1:").or_else(|| host.strip_prefix("localhost:"));
        if port != Some(self.port.to_string().as_str()) || head.uri.authority().is_some() {
            return Err(forbidden("this Host is not the page's"));
        }
        let site = headers.get_all("sec-fetch-site");
        if site.iter().any(|site| site != "same-origin" && site != "none") {
            return Err(forbidden("requests that another page has made are not taken"));
        }
        let ours = format!("http://{host}");
        let origins = headers.get_all(header::ORIGIN);
        if origins.iter().any(|origin| origin != ours.as_str()) {
            return Err(forbidden("requests of other pages are not taken"));
        }
        if head.method == Method::POST {
            // A page elsewhere can post without its browser's question only what is no JSON.
            if one(headers, header::ORIGIN).is_none() {
                return Err(forbidden("a request that acts names its Origin"));
            }
            let kind = one(headers, header::CONTENT_TYPE).unwrap_or_default();
            let kind = kind.split(';').next().unwrap_or_default().trim();
            if !kind.eq_ignore_ascii_case("application/json") {
                let why = "only application/json is taken";
                return Err(Refusal(StatusCode::UNSUPPORTED_MEDIA_TYPE, why));
            }
        }
        let unknown = |why| Refusal(StatusCode::UNAUTHORIZED, why);
        if head.method == Method::GET && head.uri.path() == "/" {
            let query = head.uri.query().unwrap_or_default();
            let token = query.split('&').find_map(|part| part.strip_prefix("token="));
            match token.map(|token| self.is_token(token)) {
                Some(true) => return self.set_cookie().map(Passed::Newly),
                Some(false) => return Err(unknown("the address has another token than the page")),
                None => {}
            }
        }
        if self.in_cookies(headers) || self.in_authorization(headers) {
            return Ok(Passed::Known);
        }
        Err(unknown("open the address that `commsd web` has printed"))
    }

    /// In constant time: how long it takes tells nothing of the token.
    fn is_token(&self, shown: &str) -> bool {
        self.token.as_bytes().ct_eq(shown.as_bytes()).into()
    }

    fn set_cookie(&self) -> Result<HeaderValue, Refusal> {
        let cookie = format!("{}={}; HttpOnly; SameSite=Strict; Path=/", self.cookie, *self.token);
        let mut cookie = HeaderValue::try_from(cookie)
            .map_err(|_| Refusal(StatusCode::INTERNAL_SERVER_ERROR, "the token is no text"))?;
        cookie.set_sensitive(true);
        Ok(cookie)
    }

    fn in_cookies(&self, headers: &HeaderMap) -> bool {
        let lists = headers.get_all(header::COOKIE).iter().filter_map(|list| list.to_str().ok());
        let mut cookies = lists.flat_map(|list| list.split(';')).filter_map(|c| c.split_once('='));
        cookies.any(|(name, value)| name.trim() == self.cookie && self.is_token(value.trim()))
    }

    fn in_authorization(&self, headers: &HeaderMap) -> bool {
        let shown = one(headers, header::AUTHORIZATION).and_then(|value| value.split_once(' '));
        shown.is_some_and(|(scheme, token)| {
            scheme.eq_ignore_ascii_case("bearer") && self.is_token(token.trim())
        })
    }
}

/// The text of a header that is there exactly once.
fn one(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (Some(value), None) => value.to_str().ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use hyper::Request;

    use super::*;

    const TOKEN: &str = "0123456789abcdef";

    fn judge(method: &str, uri: &str, headers: &[(&str, &str)]) -> Result<Passed, Refusal> {
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (head, ()) = request.body(()).unwrap().into_parts();
        Gate::new(8080, TOKEN.into()).judge(&head)
    }

    fn status(method: &str, uri: &str, headers: &[(&str, &str)]) -> u16 {
        judge(method, uri, headers).map_or_else(|refusal| refusal.0.as_u16(), |_| 200)
    }

    const HOST: (&str, &str) = ("host", "127.0.0.1:8080");
    const COOKIE: (&str, &str) = ("cookie", "a=b; commsd_web_8080=0123456789abcdef");
    const OURS: (&str, &str) = ("origin", "http://127.0.0.1:8080");
    const JSON: (&str, &str) = ("content-type", "application/json");

    #[test]
    fn the_token_in_the_address_becomes_a_cookie() {
        let Ok(Passed::Newly(cookie)) = judge("GET", "/?token=0123456789abcdef", &[HOST]) else {
            panic!("not let in");
        };
        assert_eq!(
            cookie.to_str().unwrap(),
            "commsd_web_8080=0123456789abcdef; HttpOnly; SameSite=Strict; Path=/"
        );
        assert!(cookie.is_sensitive());
        for wrong in ["", "0", "0123456789abcdeF", "0123456789abcdef0"] {
            let uri = format!("/?token={wrong}");
            assert_eq!(status("GET", &uri, &[HOST, COOKIE]), 401, "{wrong}");
        }
        // Elsewhere an address lets nobody in.
        assert_eq!(status("GET", "/events?token=0123456789abcdef", &[HOST]), 401);
        assert_eq!(status("HEAD", "/?token=0123456789abcdef", &[HOST]), 401);
    }

    #[test]
    fn whoever_shows_the_token_in_a_header_is_known() {
        let bearer = ("authorization", "bearer 0123456789abcdef");
        for shown in [COOKIE, bearer] {
            assert_eq!(judge("GET", "/", &[HOST, shown]), Ok(Passed::Known));
        }
        for not in [
            ("cookie", "commsd_web_8081=0123456789abcdef"),
            ("cookie", "commsd_web_8080="),
            ("authorization", "Basic 0123456789abcdef"),
            ("authorization", "0123456789abcdef"),
            ("x-token", "0123456789abcdef"),
        ] {
            assert_eq!(status("GET", "/", &[HOST, not]), 401, "{not:?}");
        }
    }

    #[test]
    fn only_our_host_exactly() {
        assert_eq!(status("GET", "/", &[("host", "localhost:8080"), COOKIE]), 200);
        for host in [
            "",
            "127.0.0.1",
            "localhost",
            "127.0.0.1:80",
            "127.0.0.1:08080",
            "127.0.0.1:8080.evil.example",
            "127.0.0.2:8080",
            "[::1]:8080",
            "evil.example:8080",
        ] {
            assert_eq!(status("GET", "/", &[("host", host), COOKIE]), 403, "{host}");
        }
        assert_eq!(status("GET", "/", &[COOKIE]), 403);
        assert_eq!(status("GET", "/", &[HOST, HOST, COOKIE]), 403);
        // What is asked for outweighs the header.
        assert_eq!(status("GET", "http://evil.example/", &[HOST, COOKIE]), 403);
    }

    #[test]
    fn only_our_own_page_asks() {
        for site in ["cross-site", "same-site", "", "None"] {
            assert_eq!(
                status("GET", "/", &[HOST, COOKIE, ("sec-fetch-site", site)]),
                403,
                "{site}"
            );
        }
        for site in ["same-origin", "none"] {
            assert_eq!(
                status("GET", "/", &[HOST, COOKIE, ("sec-fetch-site", site)]),
                200,
                "{site}"
            );
        }
        for origin in [
            "null",
            "http://evil.example",
            "https://127.0.0.1:8080",
            "http://127.0.0.1:8081",
            // One of ours, but not the one that was asked.
            "http://localhost:8080",
        ] {
            let headers = [HOST, COOKIE, JSON, ("origin", origin)];
            assert_eq!(status("POST", "/api", &headers), 403, "{origin}");
            assert_eq!(status("GET", "/", &headers), 403, "{origin}");
        }
        assert_eq!(status("POST", "/api", &[HOST, COOKIE, JSON, OURS, OURS]), 403);
    }

    #[test]
    fn what_acts_is_json_and_names_its_origin() {
        assert_eq!(status("POST", "/api", &[HOST, COOKIE, JSON, OURS]), 200);
        let charset = ("content-type", "Application/JSON; charset=utf-8");
        assert_eq!(status("POST", "/api", &[HOST, COOKIE, charset, OURS]), 200);
        assert_eq!(status("POST", "/api", &[HOST, COOKIE, JSON]), 403);
        assert_eq!(status("POST", "/api", &[HOST, COOKIE, OURS]), 415);
        for kind in
            ["text/plain", "application/x-www-form-urlencoded", "text/plain;application/json"]
        {
            let headers = [HOST, COOKIE, OURS, ("content-type", kind)];
            assert_eq!(status("POST", "/api", &headers), 415, "{kind}");
        }
    }
}
