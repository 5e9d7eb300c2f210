//! `acp invite`: made by an office, read by anybody. Whether one was used or taken back only its issuer
//! knows, who is asked where that is possible.

use std::process::ExitCode;

use serde_json::{Value, json};

use super::calls::{Whom, ask, finish, millis, word};
use super::{Place, Surroundings};
use crate::acp::code::Code;
use crate::acp::invite::{check_invite, read_invite};
use crate::acp::objects::Invite;
use crate::acp::revocation::RevocationRegistry;
use crate::acp::value::Word;
use crate::api::acp::{AcpCall, CreateInvite, InviteStatus};
use crate::cli::acp::Failure;
use crate::cli::acp::args::{InviteCreateArgs, InviteShowArgs};
use crate::cli::exit;
use crate::cli::output::{fields, json_line, print};
use crate::daemon::acp::{owner_dir, socket};
use crate::runtime::clock::unix_now;

pub(super) fn create(
    args: &InviteCreateArgs,
    place: &Place,
    around: &Surroundings,
) -> Result<ExitCode, Failure> {
    let call = AcpCall::CreateInvite(CreateInvite {
        name: args.name.as_ref().map(|name| (**name).to_owned()),
        relay_urls: args.relays.clone(),
        expires_in_ms: Some(millis(args.expires_in)),
        max_uses: Some(args.max_uses),
    });
    let asked = ask(&Whom::of(args.key.as_deref()), call, place, around);
    let answer = asked.map_err(|failure| {
        // All else that could be out of bounds, the command line has checked.
        let usage = args.relays.is_empty() && failure.error.code == Code::BadField.as_str();
        Failure { exit: if usage { exit::USAGE } else { failure.exit }, ..failure }
    })?;
    Ok(finish(place, &answer, |answer| format!("{}\n", word(answer, "invite"))))
}

pub(super) fn show(
    args: &InviteShowArgs,
    place: &Place,
    around: &Surroundings,
) -> Result<ExitCode, Failure> {
    let invite = read_invite(&args.text)?;
    let known = match &args.key {
        Some(key) => Some(ask(&Whom::of(Some(key)), call(&invite), place, around)?),
        None => of_issuer(&invite, place, around),
    };
    let known = known.filter(|known| known.get("issued") == Some(&Value::Bool(true)));
    // What it says of itself is over for everybody.
    let over = check_invite(&invite, &RevocationRegistry::new(), unix_now()).err();
    let of_known = |name| known.as_ref().map_or(Value::Null, |known| known[name].clone());
    if place.json {
        let code = over.map_or_else(|| of_known("code"), |error| json!(error.code()));
        let uses = of_known("uses");
        return Ok(print(&json_line(&json!({ "invite": invite, "code": code, "uses": uses }))));
    }
    let max = invite.max_uses.get();
    let uses = of_known("uses").as_u64();
    let state = match (over, &known) {
        (Some(error), _) => error.to_string(),
        (None, Some(known)) if !known["code"].is_null() => {
            format!("{}: {}", word(known, "code"), word(known, "message"))
        }
        (None, Some(_)) => "good".to_owned(),
        (None, None) => {
            "good as far as it says; only its issuer can tell whether it was used or taken \
                         back (`commsd acp invite show` there)"
                .to_owned()
        }
    };
    let list = |words: &[Word]| words.iter().map(|word| &**word).collect::<Vec<_>>().join(", ");
    let urls: Vec<&str> = invite.relay_urls.iter().map(|url| &**url).collect();
    Ok(print(&fields(&[
        ("invite", invite.invite_id.to_string()),
        ("worker", invite.issuer_did.to_string()),
        ("name", invite.name.to_string()),
        ("relays", urls.join(" ")),
        ("adapters", list(&invite.adapters)),
        ("skills", list(&invite.skills)),
        ("uses", uses.map_or_else(|| max.to_string(), |uses| format!("{uses} of {max} used"))),
        ("issued", invite.issued_at.to_string()),
        ("expires", invite.expires_at.to_string()),
        ("state", state),
    ])))
}

fn call(invite: &Invite) -> AcpCall {
    AcpCall::InviteStatus(InviteStatus { invite_id: invite.invite_id.to_string() })
}

/// What the issuer's office says of an invite, if it is one of this machine's and runs: that of a key,
/// or the daemon's. Nobody else is asked, since that would make the daemon an identity.
fn of_issuer(invite: &Invite, place: &Place, around: &Surroundings) -> Option<Value> {
    let dir = owner_dir(&place.state_dir, invite.issuer_did);
    if !dir.is_dir() {
        return None;
    }
    let of_key = place.block_on(async { Ok(socket::ask(&dir, &call(invite)).await?) });
    // One that does not answer knows nothing.
    of_key.ok().flatten().or_else(|| around.ask(call(invite), |_| {}).ok())
}
