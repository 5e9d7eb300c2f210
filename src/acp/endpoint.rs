//! Which addresses of relays and other endpoints may be connected to (design 12): pure judgement
//! over a URL and the addresses that its host was resolved to. Resolving, and connecting to exactly
//! a judged address without a second look-up or a redirect, is the caller's.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::code::{Code, Error, Result};

/// What an endpoint may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndpointPolicy {
    /// Whether loopback and private addresses may be used.
    pub allow_private: bool,
    /// Whether http and ws may be used beyond loopback.
    pub allow_insecure: bool,
}

/// A URL that was taken apart and may be resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Whether the scheme is https or wss.
    pub secure: bool,
    /// Whether the scheme is wss or ws.
    pub websocket: bool,
    /// The name to resolve, lower-case, or the address that it is.
    pub host: Host,
    /// The port.
    pub port: u16,
    /// Path and query, beginning with `/`.
    pub path: String,
}

/// Where an endpoint is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    /// A name, to be resolved once.
    Name(String),
    /// An address.
    Address(IpAddr),
}

/// Names that are the machine's own metadata services or itself.
const METADATA_NAMES: [&str; 3] = ["metadata", "metadata.google.internal", "instance-data"];

fn blocked(message: &str) -> Error {
    Error::new(Code::EndpointBlocked, message)
}

impl Endpoint {
    /// Takes a URL apart and judges all that can be judged before it is resolved.
    ///
    /// # Errors
    /// `ENDPOINT_BLOCKED`.
    pub fn parse(url: &str, policy: EndpointPolicy) -> Result<Self> {
        if !url.bytes().all(|b| b.is_ascii_graphic()) || url.contains('\\') {
            return Err(blocked("a URL is printable ASCII without backslashes"));
        }
        if url.contains('#') {
            return Err(blocked("a URL with a fragment"));
        }
        let (scheme, rest) = url.split_once("://").ok_or_else(|| blocked("no scheme"))?;
        let (secure, websocket) = match scheme.to_ascii_lowercase().as_str() {
            "https" => (true, false),
            "wss" => (true, true),
            "http" => (false, false),
            "ws" => (false, true),
            _ => return Err(blocked("a scheme other than https, http, wss and ws")),
        };
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at_checked(end).unwrap_or((rest, ""));
        if authority.contains('@') {
            return Err(blocked("a URL with user information"));
        }
        let (host, port) = split_port(authority)?;
        let port = match port {
            Some(port) => port,
            None if secure => 443,
            None => 80,
        };
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        let endpoint = Self { secure, websocket, host: parse_host(host)?, port, path };
        endpoint.check_host(policy)?;
        Ok(endpoint)
    }

    fn check_host(&self, policy: EndpointPolicy) -> Result<()> {
        match &self.host {
            Host::Address(address) => {
                check_address(*address, policy)?;
                self.check_scheme(&[*address], policy)
            }
            Host::Name(name) => {
                let bare = name.trim_end_matches('.');
                if METADATA_NAMES.contains(&bare) {
                    return Err(blocked("a metadata service"));
                }
                let local = bare == "localhost" || bare.ends_with(".localhost");
                if local && !policy.allow_private {
                    return Err(blocked("this machine"));
                }
                Ok(())
            }
        }
    }

    /// Judges **every** address that the host resolved to, and returns those that may be connected
    /// to: all of them, or none.
    ///
    /// # Errors
    /// `ENDPOINT_BLOCKED` when one of them is blocked, or there is none.
    pub fn check_resolved(
        &self,
        addresses: &[IpAddr],
        policy: EndpointPolicy,
    ) -> Result<Vec<IpAddr>> {
        if addresses.is_empty() {
            return Err(blocked("the name has no address"));
        }
        if let Host::Address(own) = &self.host
            && addresses.iter().any(|address| address != own)
        {
            return Err(blocked("an address that is not the URL's"));
        }
        addresses.iter().try_for_each(|address| check_address(*address, policy))?;
        self.check_scheme(addresses, policy)?;
        Ok(addresses.to_vec())
    }

    fn check_scheme(&self, addresses: &[IpAddr], policy: EndpointPolicy) -> Result<()> {
        let loopback = |address: &IpAddr| plain(*address).is_loopback();
        if self.secure || policy.allow_insecure || addresses.iter().all(loopback) {
            return Ok(());
        }
        Err(blocked("http and ws are for loopback only, unless insecure endpoints are allowed"))
    }

    /// The origin, as the audience of a RelayAuth names it: http or https, lower-case, the port
    /// where it is not the scheme's own.
    #[must_use]
    pub fn origin(&self) -> String {
        let scheme = if self.secure { "https" } else { "http" };
        let host = match &self.host {
            Host::Name(name) => name.clone(),
            Host::Address(IpAddr::V4(address)) => address.to_string(),
            Host::Address(IpAddr::V6(address)) => format!("[{address}]"),
        };
        let usual = if self.secure { 443 } else { 80 };
        if self.port == usual {
            format!("{scheme}://{host}")
        } else {
            format!("{scheme}://{host}:{}", self.port)
        }
    }
}

fn split_port(authority: &str) -> Result<(&str, Option<u16>)> {
    let port = |text: &str| {
        let good = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let port = good.then(|| text.parse().ok()).flatten().filter(|port| *port != 0);
        port.ok_or_else(|| blocked("no port"))
    };
    if let Some(rest) = authority.strip_prefix('[') {
        let (host, behind) = rest.split_once(']').ok_or_else(|| blocked("half an IPv6 address"))?;
        let host_with = authority.get(..host.len() + 2).ok_or_else(|| blocked("no host"))?;
        return match behind.strip_prefix(':') {
            Some(text) => Ok((host_with, Some(port(text)?))),
            None if behind.is_empty() => Ok((host_with, None)),
            None => Err(blocked("something after the address")),
        };
    }
    match authority.split_once(':') {
        Some((host, text)) => Ok((host, Some(port(text)?))),
        None => Ok((authority, None)),
    }
}

/// A host as the connector would read it: also decimal, octal, hexadecimal and short IPv4 forms.
fn parse_host(host: &str) -> Result<Host> {
    if let Some(inner) = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        // A zone is a way to another link.
        let address: Ipv6Addr = inner.parse().map_err(|_| blocked("no IPv6 address"))?;
        return Ok(Host::Address(IpAddr::V6(address)));
    }
    let name = host.to_ascii_lowercase();
    if name.contains('%') {
        return Err(blocked("a host with percent escapes"));
    }
    let labels: Vec<&str> = name.trim_end_matches('.').split('.').collect();
    let numeric = |label: &&str| {
        label.strip_prefix("0x").is_some_and(|hex| hex.bytes().all(|b| b.is_ascii_hexdigit()))
            || (!label.is_empty() && label.bytes().all(|b| b.is_ascii_digit()))
    };
    if labels.last().is_some_and(numeric) {
        // A name whose last label is a number is an address or nothing (WHATWG URL).
        let address = odd_ipv4(&labels).ok_or_else(|| blocked("no IPv4 address"))?;
        return Ok(Host::Address(IpAddr::V4(address)));
    }
    let good = name.len() <= 253
        && labels.iter().all(|label| {
            (1..=63).contains(&label.len())
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
        });
    if good { Ok(Host::Name(name)) } else { Err(blocked("no host name")) }
}

/// One to four numbers, the last of which fills what is left; decimal, `0` octal, `0x` hexadecimal.
fn odd_ipv4(labels: &[&str]) -> Option<Ipv4Addr> {
    let number = |label: &&str| {
        if let Some(hex) = label.strip_prefix("0x") {
            let hex = if hex.is_empty() { "0" } else { hex };
            u64::from_str_radix(hex, 16).ok()
        } else if label.len() > 1 && label.starts_with('0') {
            u64::from_str_radix(label, 8).ok()
        } else {
            label.parse().ok()
        }
    };
    let numbers = labels.iter().map(number).collect::<Option<Vec<u64>>>()?;
    let (last, front) = numbers.split_last()?;
    if front.len() > 3 || front.iter().any(|n| *n > 255) {
        return None;
    }
    let left = 4 - u32::try_from(front.len()).ok()?;
    if *last >= 1 << (8 * left) {
        return None;
    }
    let high = front.iter().fold(0_u64, |sum, n| sum * 256 + n);
    u32::try_from((high << (8 * left)) | last).ok().map(Ipv4Addr::from)
}

/// An IPv6 address that stands for an IPv4 one, as that: mapped, compatible, NAT64, 6to4.
fn plain(address: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = address else { return address };
    let bytes = v6.octets();
    let tail = |at: usize| {
        let four: Option<[u8; 4]> = bytes.get(at..at + 4).and_then(|four| four.try_into().ok());
        four.map(Ipv4Addr::from).map(IpAddr::V4)
    };
    let zero = |range: std::ops::Range<usize>| {
        bytes.get(range).is_some_and(|part| part.iter().all(|byte| *byte == 0))
    };
    let embedded = match bytes {
        [0x00, 0x64, 0xff, 0x9b, ..] if zero(4..12) => tail(12),
        // The local-use prefix of NAT64 (RFC 8215), at its usual length.
        [0x00, 0x64, 0xff, 0x9b, 0x00, 0x01, ..] => tail(12),
        [0x20, 0x02, ..] => tail(2),
        _ if zero(0..10) && bytes.get(10..12) == Some(&[0xff, 0xff]) => tail(12),
        // ::ffff:0:a.b.c.d (RFC 2765).
        _ if zero(0..8) && bytes.get(8..12) == Some(&[0xff, 0xff, 0, 0]) => tail(12),
        _ if zero(0..12) && !v6.is_unspecified() && !v6.is_loopback() => tail(12),
        _ => None,
    };
    embedded.unwrap_or(address)
}

/// Judges one address.
///
/// # Errors
/// `ENDPOINT_BLOCKED`.
pub fn check_address(address: IpAddr, policy: EndpointPolicy) -> Result<()> {
    let (always, private) = match plain(address) {
        IpAddr::V4(v4) => judge_v4(v4),
        IpAddr::V6(v6) => judge_v6(v6),
    };
    if always {
        return Err(blocked("an unspecified, link-local, metadata, multicast or reserved address"));
    }
    if private && !policy.allow_private {
        return Err(blocked("a loopback or private address"));
    }
    Ok(())
}

/// Whether an address is always blocked; whether it is private.
const fn judge_v4(address: Ipv4Addr) -> (bool, bool) {
    let [a, b, c, d] = address.octets();
    let metadata = matches!([a, b, c, d], [100, 100, 100, 200] | [192, 0, 0, 192]);
    let always = a == 0 || (a == 169 && b == 254) || metadata || a >= 224;
    let private = a == 127
        || a == 10
        || (a == 172 && b >= 16 && b <= 31)
        || (a == 192 && b == 168)
        || (a == 100 && b >= 64 && b <= 127);
    (always, private)
}

/// As [`judge_v4`].
const fn judge_v6(address: Ipv6Addr) -> (bool, bool) {
    let segments = address.segments();
    let first = segments[0];
    let metadata = matches!(segments, [0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254]);
    let always = address.is_unspecified()
        || (first & 0xffc0) == 0xfe80
        || (first & 0xffc0) == 0xfec0
        || (first & 0xff00) == 0xff00
        || metadata;
    let private = address.is_loopback() || (first & 0xfe00) == 0xfc00;
    (always, private)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRIVATE: EndpointPolicy = EndpointPolicy { allow_private: true, allow_insecure: false };
    const PUBLIC: EndpointPolicy = EndpointPolicy { allow_private: false, allow_insecure: false };
    const LAX: EndpointPolicy = EndpointPolicy { allow_private: true, allow_insecure: true };

    fn judge(url: &str, policy: EndpointPolicy) -> bool {
        match Endpoint::parse(url, policy) {
            Ok(_) => true,
            Err(error) => {
                assert_eq!(error.code(), Code::EndpointBlocked);
                false
            }
        }
    }

    /// Blocked whatever the policy: every spelling of design 12.
    #[test]
    fn always_blocked() {
        for host in [
            "0.0.0.0",
            "0",
            "0x0",
            "0.0.0.1",
            "169.254.169.254",
            "169.254.0.1",
            "2852039166",
            "0xa9fea9fe",
            "0251.0376.0251.0376",
            "0xa9.0xfe.0xa9.0xfe",
            "169.254.43518",
            "169.16689662",
            "169.254.169.254.",
            "100.100.100.200",
            "224.0.0.1",
            "239.255.255.250",
            "255.255.255.255",
            "240.0.0.1",
            "[::]",
            "[fe80::1]",
            "[febf::1]",
            "[fd00:ec2::254]",
            "[ff02::1]",
            "[::ffff:169.254.169.254]",
            "[::ffff:a9fe:a9fe]",
            "[::169.254.169.254]",
            "[64:ff9b::169.254.169.254]",
            "[64:ff9b::a9fe:a9fe]",
            "[64:ff9b:1::a9fe:a9fe]",
            "[2002:a9fe:a9fe::1]",
            "[::ffff:0:169.254.169.254]",
            "[::ffff:0.0.0.0]",
            "[fec0::1]",
            "metadata",
            "METADATA",
            "metadata.google.internal",
            "Metadata.Google.Internal.",
            "instance-data",
            "192.0.0.192",
        ] {
            for policy in [PRIVATE, PUBLIC, LAX] {
                assert!(!judge(&format!("https://{host}/x"), policy), "{host}");
                assert!(!judge(&format!("https://{host}:8443"), policy), "{host}");
            }
        }
    }

    /// Blocked unless private endpoints are allowed.
    #[test]
    fn private_by_choice() {
        for host in [
            "127.0.0.1",
            "127.1",
            "2130706433",
            "0x7f000001",
            "0177.0.0.1",
            "127.255.255.254",
            "10.0.0.1",
            "10.1",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "192.168.257",
            "100.64.0.1",
            "100.127.255.255",
            "[::1]",
            "[fc00::1]",
            "[fdff::1]",
            "[::ffff:127.0.0.1]",
            "[::127.0.0.1]",
            "[64:ff9b::10.0.0.1]",
            "[2002:7f00:1::]",
            "localhost",
            "LOCALHOST",
            "localhost.",
            "a.localhost",
        ] {
            let url = format!("https://{host}/");
            assert!(judge(&url, PRIVATE), "{host}");
            assert!(!judge(&url, PUBLIC), "{host}");
        }
        for host in [
            "8.8.8.8",
            "172.15.255.255",
            "172.32.0.1",
            "192.167.1.1",
            "100.63.255.255",
            "100.128.0.1",
            "126.255.255.255",
            "128.0.0.1",
            "11.0.0.1",
            "[2606:4700::1111]",
            "[::ffff:8.8.8.8]",
            "[64:ff9b::8.8.8.8]",
            "[2002:808:808::]",
            "example.com",
            "relay.example.com.",
            "a-b_c.example",
            "metadata.example.com",
            "xn--bcher-kva.example",
            "223.255.255.255",
        ] {
            assert!(judge(&format!("wss://{host}/"), PUBLIC), "{host}");
        }
    }

    #[test]
    fn odd_urls() {
        for url in [
            "",
            "https://",
            "https:///x",
            "ftp://example.com",
            "file:///etc/passwd",
            "example.com",
            "javascript:alert(1)",
            "https://user@example.com",
            "https://user:pw@example.com",
            "https://example.com@127.0.0.1/",
            "https://example.com#f",
            "https://exam ple.com",
            "https://example.com\\@x",
            "https://ex\u{e4}mple.com",
            "https://example.com:0",
            "https://example.com:65536",
            "https://example.com:",
            "https://example.com:80x",
            "https://example.com:80:80",
            "https://[::1",
            "https://[::1]x",
            "https://[fe80::1%25eth0]",
            "https://[::1%lo]",
            "https://%31%32%37.0.0.1",
            "https://1.2.3.4.5",
            "https://256.1.1.1",
            "https://1.2.3.256",
            "https://09.1.1.1",
            "https://0x1g.1",
            "https://a..b",
            "https://.a",
            "https://4294967296",
            "https://\u{ff11}27.0.0.1",
            "https://127.0.0.1\n.example.com",
            "https://a.b.0x",
        ] {
            // `0x` alone is zero for some connectors: then it is 0.0.0.0, and blocked as that.
            assert!(!judge(url, LAX), "{url}");
        }
        let endpoint = Endpoint::parse("WSS://Relay.Example.com:8443/v1?a=b", PUBLIC).unwrap();
        assert_eq!(endpoint.origin(), "https://relay.example.com:8443");
        assert!(endpoint.secure && endpoint.websocket);
        assert_eq!(endpoint.path, "/v1?a=b");
        for (url, origin) in [
            ("http://127.0.0.1:8787", "http://127.0.0.1:8787"),
            ("https://[::1]:443/x", "https://[::1]"),
            ("ws://127.1/", "http://127.0.0.1"),
            ("https://example.com?x", "https://example.com"),
        ] {
            assert_eq!(Endpoint::parse(url, PRIVATE).unwrap().origin(), origin);
        }
    }

    #[test]
    fn plain_http_is_for_loopback() {
        assert!(judge("http://127.0.0.1:1", PRIVATE) && judge("ws://[::1]:1", PRIVATE));
        assert!(judge("http://[::ffff:127.0.0.1]:1", PRIVATE));
        assert!(!judge("http://10.0.0.1", PRIVATE) && judge("http://10.0.0.1", LAX));
        assert!(!judge("http://8.8.8.8", PRIVATE) && judge("http://8.8.8.8", LAX));
        let named = Endpoint::parse("http://relay.example.com", PRIVATE).unwrap();
        let at = |text: &str| vec![text.parse::<IpAddr>().unwrap()];
        assert!(named.check_resolved(&at("127.0.0.1"), PRIVATE).is_ok());
        assert!(named.check_resolved(&at("93.184.216.34"), PRIVATE).is_err());
        assert!(named.check_resolved(&at("93.184.216.34"), LAX).is_ok());
    }

    /// One bad answer among good ones blocks all; a look-up that changes is judged each time.
    #[test]
    fn every_answer_counts() {
        let endpoint = Endpoint::parse("https://relay.example.com", PUBLIC).unwrap();
        let good: IpAddr = "93.184.216.34".parse().unwrap();
        let bad: IpAddr = "169.254.169.254".parse().unwrap();
        let private: IpAddr = "fd12::1".parse().unwrap();
        assert_eq!(endpoint.check_resolved(&[good], PUBLIC).unwrap(), [good]);
        for answers in [vec![good, bad], vec![bad, good], vec![good, private], vec![]] {
            let error = endpoint.check_resolved(&answers, PUBLIC).unwrap_err();
            assert_eq!(error.code(), Code::EndpointBlocked);
        }
        assert!(endpoint.check_resolved(&[good, private], PRIVATE).is_ok());
        let fixed = Endpoint::parse("https://93.184.216.34", PUBLIC).unwrap();
        assert!(fixed.check_resolved(&["8.8.8.8".parse().unwrap()], PUBLIC).is_err());
    }
}
