//! The provider of a model as the host knows it: where it is, how it is asked, and the owner's key,
//! which leaves this process in requests to the provider alone.

use std::fmt;
use std::sync::Arc;

use hyper::header::{HeaderName, HeaderValue};
use zeroize::Zeroizing;

use super::{AdapterError, AdapterKind, AdapterOptions, ApiStyle};
use crate::acp::endpoint::{Endpoint, EndpointPolicy};
use crate::runtime::http_client::{Connector, HttpClient, HttpError};
use crate::runtime::sandbox;

/// The owner named the provider: it may be on this machine or network, but beyond this machine it
/// must be encrypted.
const POLICY: EndpointPolicy = EndpointPolicy { allow_private: true, allow_insecure: false };

type Key = Arc<Zeroizing<String>>;

/// The owner's keys. Erased with the last copy.
#[derive(Clone, Default)]
pub struct HostKeys {
    anthropic: Option<Key>,
    openai: Option<Key>,
}

impl HostKeys {
    /// `ANTHROPIC_API_KEY` and `OPENAI_API_KEY` of this process; with one of them, the process also
    /// hides its memory from others of its user.
    #[must_use]
    pub fn from_env() -> Self {
        let read = |name| std::env::var(name).ok().filter(|key| !key.is_empty());
        let keys = Self::new(read("ANTHROPIC_API_KEY"), read("OPENAI_API_KEY"));
        if keys.anthropic.is_some() || keys.openai.is_some() {
            sandbox::hide_own_memory();
        }
        keys
    }

    /// These keys.
    #[must_use]
    pub fn new(anthropic: Option<String>, openai: Option<String>) -> Self {
        let keep = |key: Option<String>| key.map(|key| Arc::new(Zeroizing::new(key)));
        Self { anthropic: keep(anthropic), openai: keep(openai) }
    }

    fn of(&self, style: ApiStyle) -> Option<&Key> {
        match style {
            ApiStyle::Anthropic => self.anthropic.as_ref(),
            ApiStyle::Openai => self.openai.as_ref(),
        }
    }
}

impl fmt::Debug for HostKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostKeys")
            .field("anthropic", &self.anthropic.is_some())
            .field("openai", &self.openai.is_some())
            .finish()
    }
}

/// One provider, with its connection.
#[derive(Clone, Debug)]
pub(super) struct Provider {
    /// How it is asked.
    pub style: ApiStyle,
    client: Arc<HttpClient>,
    /// Path of the endpoint without the slash at its end.
    base: String,
    keys: HostKeys,
}

impl Provider {
    /// The provider that an adapter's options name; none for an adapter that needs none, or whose
    /// program has no key to be lent.
    pub fn of(options: &AdapterOptions) -> Result<Option<Self>, AdapterError> {
        let style = match options.kind {
            AdapterKind::Claude => ApiStyle::Anthropic,
            AdapterKind::Codex => ApiStyle::Openai,
            AdapterKind::Openai => options.api_style,
            AdapterKind::Command | AdapterKind::Mcp | AdapterKind::Sandbox => return Ok(None),
        };
        // An endpoint of the owner's own, a local one perhaps, may need no key.
        let is_named = options.kind == AdapterKind::Openai || options.endpoint.is_some();
        if !is_named && options.keys.of(style).is_none() {
            return Ok(None);
        }
        let default = match style {
            ApiStyle::Anthropic => "https://api.anthropic.com",
            ApiStyle::Openai => "https://api.openai.com/v1",
        };
        let bad = |why: String| AdapterError::Bad("--endpoint", why);
        let url = options.endpoint.as_deref().unwrap_or(default);
        let endpoint = Endpoint::parse(url, POLICY).map_err(|e| bad(e.to_string()))?;
        if endpoint.websocket || endpoint.path.contains('?') {
            return Err(bad("it is no http or https address without a query".to_owned()));
        }
        let base = endpoint.path.trim_end_matches('/').to_owned();
        let client = HttpClient::new(endpoint, Arc::new(Connector::new(POLICY)));
        let client = Arc::new(client.map_err(|e: HttpError| bad(e.to_string()))?);
        Ok(Some(Self { style, client, base, keys: options.keys.clone() }))
    }

    /// Its connection.
    pub fn client(&self) -> &HttpClient {
        &self.client
    }

    /// Path of its endpoint without the slash at its end.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// Path that every call to it begins with.
    pub fn root(&self) -> String {
        match self.style {
            ApiStyle::Anthropic => format!("{}/v1", self.base),
            ApiStyle::Openai => self.base.clone(),
        }
    }

    /// The header that carries a key.
    pub const fn key_header(&self) -> HeaderName {
        match self.style {
            ApiStyle::Anthropic => HeaderName::from_static("x-api-key"),
            ApiStyle::Openai => hyper::header::AUTHORIZATION,
        }
    }

    /// The owner's key as the value of that header, marked as sensitive.
    pub fn key_value(&self) -> Option<HeaderValue> {
        let key = self.keys.of(self.style)?;
        let text = match self.style {
            ApiStyle::Anthropic => key.clone(),
            ApiStyle::Openai => Arc::new(Zeroizing::new(format!("Bearer {}", key.as_str()))),
        };
        let mut value = HeaderValue::from_str(&text).ok()?;
        value.set_sensitive(true);
        Some(value)
    }
}
