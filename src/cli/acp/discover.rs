//! `acp discover`: the cards of a relay's registry, as far as they are good.

use std::process::ExitCode;
use std::sync::Arc;

use serde_json::json;

use super::Failure;
use super::args::DiscoverArgs;
use super::local::entropy;
use crate::acp::did::Secret;
use crate::acp::invite::check_card;
use crate::acp::objects::WorkerCard;
use crate::acp::revocation::RevocationRegistry;
use crate::acp::value::Word;
use crate::api::types::ApiError;
use crate::cli::exit;
use crate::cli::output::{json_line, print, table};
use crate::runtime::acp_transport::{CardFilter, RelayClient, TransportError};
use crate::runtime::clock::unix_now;

/// Cards that are listed: more than anybody reads.
const MAX_CARDS: usize = 2_000;
/// Pages that are asked for; of a filtered list many may be empty.
const MAX_PAGES: usize = 400;

/// What a relay lists.
struct Found {
    cards: Vec<WorkerCard>,
    /// Cards with a bad signature, or that are over.
    refused: usize,
    /// Whether there may be more.
    more: bool,
}

pub(super) fn run(args: &DiscoverArgs, json: bool) -> Result<ExitCode, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime
        .map_err(|error| Failure { error: ApiError::no_runtime(&error), exit: exit::FAILED })?;
    // Nothing here is signed: the client is nobody in particular.
    let nobody = Arc::new(Secret::draw(&mut entropy()?)?);
    let client = RelayClient::new(&args.relay, args.access.policy(), nobody)?;
    let filter = CardFilter { adapter: args.adapter.clone(), skill: args.skill.clone() };
    let found = runtime.block_on(collect(&client, &filter))?;
    // A name that is still being looked up holds nothing up.
    runtime.shutdown_background();
    if json {
        let Found { cards, refused, more } = found;
        return Ok(print(&json_line(&json!({ "cards": cards, "refused": refused, "more": more }))));
    }
    let rows: Vec<[String; 6]> = found.cards.iter().map(row).collect();
    let mut text = table(["NAME", "DID", "ADAPTERS", "SKILLS", "ISOLATION", "EXPIRES"], &rows);
    if rows.is_empty() {
        text.push_str("no worker is listed\n");
    }
    if found.refused > 0 {
        text.push_str(&format!("{} cards are not good and were left out\n", found.refused));
    }
    if found.more {
        text.push_str("there are more; use --adapter or --skill\n");
    }
    Ok(print(&text))
}

async fn collect(client: &RelayClient, filter: &CardFilter) -> Result<Found, TransportError> {
    let mut found = Found { cards: Vec::new(), refused: 0, more: false };
    let (revocations, now) = (RevocationRegistry::new(), unix_now());
    let mut after: Option<String> = None;
    for _ in 0..MAX_PAGES {
        let page = client.cards(filter, after.as_deref()).await?;
        found.refused += page.refused;
        for card in page.cards {
            if check_card(&card, &revocations, now).is_ok() {
                found.cards.push(card);
            } else {
                found.refused += 1;
            }
        }
        after = page.next;
        found.more = after.is_some();
        if !found.more || found.cards.len() + found.refused >= MAX_CARDS {
            break;
        }
    }
    Ok(found)
}

fn row(card: &WorkerCard) -> [String; 6] {
    let words = |words: &[Word]| words.iter().map(|word| &**word).collect::<Vec<_>>().join(", ");
    let levels: Vec<&str> = card.isolation.iter().map(|level| level.as_str()).collect();
    [
        card.name.to_string(),
        card.did.to_string(),
        words(&card.adapters),
        words(&card.skills),
        levels.join(", "),
        card.expires_at.to_string(),
    ]
}
