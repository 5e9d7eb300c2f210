//! The ways to others: relays, gateways of the same process, peers of the mesh. Whoever sends by a
//! relay also listens there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use super::mesh::Mesh;
use super::office::Office;
use super::outbox::Failure;
use crate::acp::code::{Code, Error};
use crate::acp::did::{Did, Secret};
use crate::acp::endpoint::EndpointPolicy;
use crate::acp::json::canonical;
use crate::acp::objects::{Envelope, RevocationNotice};
use crate::acp::owner::Route;
use crate::daemon::logging::{emit, event};
use crate::runtime::acp_transport::{Form, RelayClient, TransportError};

/// Relays that one owner listens on. A peer that names more has the rest ignored.
const MAX_RELAYS: usize = 64;

/// Gateways of one process that reach each other without any network.
#[derive(Clone, Default)]
pub struct Local {
    offices: Arc<Mutex<BTreeMap<Did, Office>>>,
}

/// The ways of one owner.
#[derive(Clone)]
pub struct Transports {
    shared: Arc<Shared>,
}

struct Shared {
    key: Arc<Secret>,
    policy: EndpointPolicy,
    form: Form,
    /// The owner's own relays.
    own: Vec<String>,
    clients: Mutex<BTreeMap<String, Arc<RelayClient>>>,
    listening: Mutex<BTreeSet<String>>,
    /// Where mail goes that comes in.
    office: OnceLock<(Office, CancellationToken)>,
    local: Local,
    mesh: Option<Mesh>,
}

impl Transports {
    /// The ways of the owner with `key`, who listens on the relays `own` in `form`.
    ///
    /// # Errors
    /// `ENDPOINT_BLOCKED` for a relay that may not be used.
    pub fn new(
        key: Secret,
        own: Vec<String>,
        policy: EndpointPolicy,
        form: Form,
        local: Local,
        mesh: Option<Mesh>,
    ) -> Result<Self, TransportError> {
        let transports = Self {
            shared: Arc::new(Shared {
                key: Arc::new(key),
                policy,
                form,
                own,
                clients: Mutex::new(BTreeMap::new()),
                listening: Mutex::new(BTreeSet::new()),
                office: OnceLock::new(),
                local,
                mesh,
            }),
        };
        for url in transports.relays() {
            transports.client(&url)?;
        }
        Ok(transports)
    }

    /// The owner's own relays.
    #[must_use]
    pub fn relays(&self) -> Vec<String> {
        self.shared.own.clone()
    }

    /// The mesh, where this owner is on one.
    #[must_use]
    pub fn mesh(&self) -> Option<&Mesh> {
        self.shared.mesh.as_ref()
    }

    /// The client of a relay.
    ///
    /// # Errors
    /// `ENDPOINT_BLOCKED`; `RATE_LIMITED` when too many relays are in use.
    pub fn client(&self, url: &str) -> Result<Arc<RelayClient>, TransportError> {
        let mut clients = self.shared.clients.lock();
        if let Some(client) = clients.get(url) {
            return Ok(Arc::clone(client));
        }
        if clients.len() >= MAX_RELAYS {
            let text = "more relays than one owner may use";
            return Err(TransportError::from(Error::new(Code::RateLimited, text)));
        }
        let client = RelayClient::new(url, self.shared.policy, Arc::clone(&self.shared.key))?;
        let client = Arc::new(client);
        clients.insert(url.to_owned(), Arc::clone(&client));
        Ok(client)
    }

    /// Begins to listen on the owner's relays and in this process.
    pub(super) fn listen(&self, office: &Office, stop: &CancellationToken) {
        self.shared.local.offices.lock().insert(office.did(), office.clone());
        if self.shared.office.set((office.clone(), stop.clone())).is_ok() {
            for url in self.relays() {
                self.listen_on(&url);
            }
        }
    }

    /// Begins to listen on a relay, once.
    pub(super) fn listen_on(&self, url: &str) {
        let Some((office, stop)) = self.shared.office.get() else { return };
        let Ok(client) = self.client(url) else { return };
        if !self.shared.listening.lock().insert(url.to_owned()) {
            return;
        }
        let (office, stop, url) = (office.clone(), stop.clone(), url.to_owned());
        let mut deliveries = Arc::clone(&client).receive(self.shared.form, stop.clone());
        tokio::spawn(async move {
            let via = Route::Relays { urls: vec![url] };
            while let Some(delivery) = deliveries.recv().await {
                if office.mail(delivery.envelope, via.clone()).await.is_err() {
                    return;
                }
                // What is not acknowledged comes again, and is known then.
                if let Err(error) = client.ack(&delivery.cursor).await {
                    emit(&event("acp_ack_failed").with("code", error.code().as_str()));
                }
            }
        });
    }

    pub(super) async fn post(&self, route: &Route, envelope: &Envelope) -> Result<(), Failure> {
        match route {
            Route::Relays { urls } => {
                let mut last = Failure::nowhere();
                for url in urls {
                    match self.post_to(url, envelope).await {
                        Ok(()) => return Ok(()),
                        Err(failure) => last = last.and(failure),
                    }
                }
                Err(last)
            }
            Route::Local => {
                let office = self.shared.local.offices.lock().get(&envelope.to).cloned();
                let office = office.ok_or_else(Failure::nowhere)?;
                office.mail(canonical(envelope)?, Route::Local).await?;
                Ok(())
            }
            Route::Mesh { device } => {
                let mesh = self.shared.mesh.as_ref().ok_or_else(Failure::nowhere)?;
                mesh.post(device, canonical(envelope)?).await?;
                Ok(())
            }
        }
    }

    async fn post_to(&self, url: &str, envelope: &Envelope) -> Result<(), Failure> {
        let client = self.client(url)?;
        // The answer will come by the same relay.
        self.listen_on(url);
        let posted = client.post(envelope).await;
        posted.map(drop).map_err(|error| {
            // Whoever used an invite does not know which relay that was.
            let text = format!("{}: {}", client.origin(), error.message());
            Failure { error: Error::new(error.code(), text), ..error.into() }
        })
    }

    pub(super) async fn publish(
        &self,
        route: &Route,
        notice: &RevocationNotice,
    ) -> Result<(), Failure> {
        let Route::Relays { urls } = route else { return Ok(()) };
        for url in urls {
            self.client(url)?.post_revocation(notice).await?;
        }
        Ok(())
    }
}

impl From<TransportError> for Failure {
    fn from(error: TransportError) -> Self {
        Self {
            retry: error.is_retryable(),
            after: error.retry_after(),
            in_doubt: error.is_in_doubt(),
            error: Error::new(error.code(), error.message()),
        }
    }
}

/// Another gateway that is closed may be open again in a moment.
impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { error, retry: true, after: None, in_doubt: false }
    }
}
