//! A worker as a program of its own: introduces itself by an invite and by cards at its relays, works
//! until it is stopped, or for one task.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::broadcast::error::RecvError;
use tokio_util::sync::CancellationToken;

use super::delegation::{Standing, Watcher};
use super::office::{Office, Told};
use super::transports::Transports;
use super::{OfficeError, complain};
use crate::acp::code::{Code, Error, Result};
use crate::acp::invite::{MAX_CARD_LIFE_MS, invite_text};
use crate::acp::objects::{Invite, Party};
use crate::acp::owner::{CardTerms, InviteTerms, Owner};
use crate::acp::value::{CardId, Name, Prose, UrlText, Word};
use crate::runtime::clock::unix_now;

/// A card is put up again after a third of its life, so that two failures do not take it down.
const RENEW: Duration = Duration::from_millis(MAX_CARD_LIFE_MS / 3);

/// How long after a failure to put a card up it is tried again.
const RETRY: Duration = Duration::from_secs(60);

/// How long a program that is to do one task waits for its peer to confirm the end.
const CONFIRM: Duration = Duration::from_secs(30);

/// How a worker introduces itself.
#[derive(Clone, Debug)]
pub struct Introduction {
    /// Its name.
    pub name: Name,
    /// What it is.
    pub description: Prose,
    /// What it can do.
    pub skills: Vec<Word>,
    /// Where it is reached.
    pub relay_urls: Vec<UrlText>,
    /// How often its invite may be used.
    pub max_uses: u64,
    /// How long its invite is good, ms.
    pub life_ms: u64,
}

/// Issues an invite.
///
/// # Errors
/// `BAD_FIELD` for an introduction out of bounds.
pub async fn invite(office: &Office, introduction: &Introduction) -> Result<(Invite, String)> {
    let terms = InviteTerms {
        name: introduction.name.clone(),
        relay_urls: introduction.relay_urls.clone(),
        encryption_key: None,
        skills: introduction.skills.clone(),
        max_uses: introduction.max_uses,
        life_ms: introduction.life_ms,
    };
    let invite = office.act(move |owner, now, entropy| owner.invite(terms, now, entropy)).await?;
    let text = invite_text(&invite)?;
    Ok((invite, text))
}

/// Keeps a card up at every relay of the owner's until `stop`. It stays there until it is over
/// (decision 53).
pub async fn keep_card_up(
    office: Office,
    transports: Transports,
    introduction: Introduction,
    stop: CancellationToken,
) {
    let id = office
        .act(|_, _, entropy| Ok((CardId::draw(entropy), crate::acp::owner::Outcome::default())))
        .await;
    let Ok(card_id) = id else { return };
    let terms = CardTerms {
        card_id,
        name: introduction.name,
        description: introduction.description,
        relay_urls: introduction.relay_urls,
        encryption_key: None,
        skills: introduction.skills,
    };
    loop {
        let again = match put_up(&office, &transports, terms.clone()).await {
            Ok(()) => RENEW,
            Err(error) => {
                complain(&error);
                RETRY
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(again) => {}
        }
    }
}

async fn put_up(
    office: &Office,
    transports: &Transports,
    terms: CardTerms,
) -> std::result::Result<(), OfficeError> {
    let card = office.look(move |owner| owner.card(terms, unix_now())).await?;
    for url in transports.relays() {
        let refused = |error: crate::runtime::acp_transport::TransportError| {
            Error::new(error.code(), error.message())
        };
        let client = transports.client(&url).map_err(refused)?;
        client.put_card(&card).await.map_err(refused)?;
    }
    Ok(())
}

/// Follows an office until `stop`, or, with `once`, until one task of its work is over and both sides
/// know. Returns how that task ended.
///
/// # Errors
/// `RELAY_UNREACHABLE` when the office has ended.
pub async fn follow(
    office: &Office,
    once: bool,
    watcher: Arc<dyn Watcher>,
    stop: &CancellationToken,
) -> Result<Option<Standing>> {
    let mut told = office.watch();
    for question in office.look(|owner| Ok(owner.questions().cloned().collect::<Vec<_>>())).await? {
        watcher.asked(&question);
    }
    loop {
        let event = tokio::select! {
            () = stop.cancelled() => return Ok(None),
            event = told.recv() => event,
        };
        match event {
            Ok(Told::Question(question)) => watcher.asked(&question),
            Ok(Told::Note(note)) => {
                let task = note.task;
                let standing = office.look(move |owner| Standing::of(owner, &task)).await?;
                watcher.moved(&standing);
                if once && standing.me == Party::Worker && standing.over {
                    return confirmed(office, standing, stop).await.map(Some);
                }
            }
            Ok(Told::Undelivered { .. }) | Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => {
                let error = Error::new(Code::RelayUnreachable, "the worker has ended");
                return Err(error.with_todo("see what it said before, and start it again"));
            }
        }
    }
}

/// Waits until the other side knows of the end, for a while.
async fn confirmed(
    office: &Office,
    mut standing: Standing,
    stop: &CancellationToken,
) -> Result<Standing> {
    let mut told = office.watch();
    let until = tokio::time::Instant::now() + CONFIRM;
    let task = standing.task;
    loop {
        standing = office.look(move |owner: &Owner| Standing::of(owner, &task)).await?;
        office.flushed().await;
        if standing.confirmed {
            return Ok(standing);
        }
        tokio::select! {
            () = stop.cancelled() => return Ok(standing),
            () = tokio::time::sleep_until(until) => return Ok(standing),
            _ = told.recv() => {}
        }
    }
}
