//! The way out of a run whose manifest lists hosts (`network: allowlist`, design 6): an HTTP proxy on
//! a loopback port, the one thing that the run can connect to, which makes tunnels (`CONNECT`) to the
//! listed hosts and ports and to nothing else. Names are resolved here, once, and every address of
//! them is judged. What goes through a tunnel is the program's.

use std::sync::Arc;

use data_encoding::BASE64;
use hyper::body::Incoming;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

use super::local_http::{self, Answer, Handler, Token, whole};
use crate::acp::endpoint::{Endpoint, EndpointPolicy};
use crate::acp::objects::{Network, SandboxPolicy};
use crate::runtime::http_client::{Connector, HttpError, Resolve};

/// Tunnels of one run at one time: a program with a pool of connections has fewer.
const TUNNELS: usize = 32;
/// The name that goes with the token, which means nothing.
const USER: &str = "run";
/// Variables by which programs find a proxy for what is encrypted, or for anything.
const VARIABLES: [&str; 4] = ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"];

/// The proxy of one run; with all its tunnels no longer there when this is dropped.
#[derive(Debug)]
pub(super) struct Proxy {
    /// The port on 127.0.0.1.
    pub port: u16,
    gate: Arc<Gate>,
    _listening: AbortOnDropHandle<()>,
}

#[derive(Debug)]
struct Gate {
    token: Token,
    /// What may be connected to.
    hosts: Vec<Endpoint>,
    connector: Connector,
    policy: EndpointPolicy,
    tunnels: Mutex<JoinSet<()>>,
}

impl Proxy {
    /// The proxy for `policy`, as it is applied; none where no hosts are listed. `allow_private` lets
    /// the list name addresses that are not public.
    pub async fn open(
        policy: &SandboxPolicy,
        allow_private: bool,
        resolver: Box<dyn Resolve>,
    ) -> std::io::Result<Option<Self>> {
        if policy.network == Network::None {
            return Ok(None);
        }
        // Whether what goes through is encrypted is not seen here.
        let judged = EndpointPolicy { allow_private, allow_insecure: true };
        let gate = Arc::new(Gate {
            token: Token::draw()?,
            hosts: policy.allow_hosts.iter().filter_map(|host| listed(host, judged)).collect(),
            connector: Connector::with(judged, resolver, None),
            policy: judged,
            tunnels: Mutex::default(),
        });
        let listener = TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).await?;
        let port = listener.local_addr()?.port();
        let listening = local_http::serve(listener, Arc::clone(&gate));
        Ok(Some(Self { port, gate, _listening: listening }))
    }

    /// Variables that lead the program here.
    pub fn environment(&self) -> Vec<(String, String)> {
        let url = format!("http://{USER}:{}@127.0.0.1:{}", self.gate.token.text(), self.port);
        let names = VARIABLES.iter().map(|name| ((*name).to_owned(), url.clone()));
        // Node looks at them only where it is told to.
        names.chain([("NODE_USE_ENV_PROXY".to_owned(), "1".to_owned())]).collect()
    }
}

/// `host:port` as it is resolved and judged; `None` for what is no such thing, or may not be
/// connected to by anybody.
fn listed(text: &str, policy: EndpointPolicy) -> Option<Endpoint> {
    let (_, port) = text.rsplit_once(':')?;
    // Without a port the scheme's own would be meant.
    port.parse::<u16>().ok().filter(|port| *port != 0)?;
    Endpoint::parse(&format!("http://{text}/"), policy).ok().filter(|endpoint| endpoint.path == "/")
}

fn plain(status: StatusCode, text: &str) -> Answer {
    let mut answer = Response::new(whole(format!("{text}\n")));
    *answer.status_mut() = status;
    answer
}

impl Handler for Gate {
    async fn answer(&self, request: Request<Incoming>) -> Answer {
        match self.tunnel(request).await {
            Ok(()) => Response::new(whole("")),
            Err(answer) => *answer,
        }
    }
}

impl Gate {
    async fn tunnel(&self, mut request: Request<Incoming>) -> Result<(), Box<Answer>> {
        let no = |status, text: &str| Err(Box::new(plain(status, text)));
        if !self.knows_token(request.headers()) {
            let status = StatusCode::PROXY_AUTHENTICATION_REQUIRED;
            let mut answer = plain(status, "show the user and password of HTTPS_PROXY");
            let basic = HeaderValue::from_static("Basic realm=\"run\"");
            answer.headers_mut().insert(header::PROXY_AUTHENTICATE, basic);
            return Err(Box::new(answer));
        }
        if request.method() != Method::CONNECT {
            return no(StatusCode::METHOD_NOT_ALLOWED, "this proxy makes tunnels only (CONNECT)");
        }
        let wanted = request.uri().authority().map(|authority| authority.as_str());
        let wanted = wanted.and_then(|wanted| listed(wanted, self.policy));
        let Some(endpoint) = wanted.filter(|wanted| self.hosts.contains(wanted)) else {
            return no(StatusCode::FORBIDDEN, "the order does not list this host and port");
        };
        if self.live_tunnels() >= TUNNELS {
            return no(StatusCode::SERVICE_UNAVAILABLE, "too many tunnels are open");
        }
        let mut there = match self.connector.connect(&endpoint).await {
            Ok(there) => there,
            Err(HttpError::Blocked(error)) => return no(StatusCode::FORBIDDEN, error.message()),
            Err(error) => return no(StatusCode::BAD_GATEWAY, &error.to_string()),
        };
        let upgrade = hyper::upgrade::on(&mut request);
        self.tunnels.lock().spawn(async move {
            let Ok(here) = upgrade.await else { return };
            // How it ends is the program's business, and the other end's.
            let _ = tokio::io::copy_bidirectional(&mut TokioIo::new(here), &mut there).await;
        });
        Ok(())
    }

    fn live_tunnels(&self) -> usize {
        let mut tunnels = self.tunnels.lock();
        while tunnels.try_join_next().is_some() {}
        tunnels.len()
    }

    fn knows_token(&self, headers: &HeaderMap) -> bool {
        let shown = headers
            .get(header::PROXY_AUTHORIZATION)
            .and_then(|value| value.as_bytes().strip_prefix(b"Basic "))
            .and_then(|encoded| BASE64.decode(encoded).ok());
        let token = shown.as_deref().and_then(|shown| {
            shown.strip_prefix(USER.as_bytes()).and_then(|rest| rest.strip_prefix(b":"))
        });
        token.is_some_and(|token| self.token.is(token))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_names_hosts_with_ports() {
        let public = EndpointPolicy { allow_private: false, allow_insecure: true };
        let same = |one: &str, other: &str| {
            let (one, other) = (listed(one, public), listed(other, public));
            one.is_some() && one == other
        };
        assert!(same("api.example.com:443", "API.example.COM:443"));
        assert!(!same("api.example.com:443", "api.example.com:80"));
        assert!(!same("api.example.com:443", "api.example.com.evil.test:443"));
        for bad in [
            "api.example.com",
            "api.example.com:0",
            "api.example.com:https",
            "api.example.com:443/path",
            "user@api.example.com:443",
            "https://api.example.com:443",
            "127.0.0.1:80",
            "localhost:80",
            "169.254.169.254:80",
            "metadata.google.internal:80",
            ":443",
            "",
        ] {
            assert_eq!(listed(bad, public), None, "{bad}");
        }
    }
}
