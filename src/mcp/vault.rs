//! `echoes_vault`: on the project's own vault in this process, as `commsd vault` does it; on a shared
//! one through the daemon.

use std::path::PathBuf;

use jiff::Timestamp;

use super::link::Link;
use crate::api::tool::ToolResult;
use crate::api::tool::render::refusal;
use crate::api::tool::vault::{VaultTool, answered, asked, delegated};
use crate::api::types::{ApiError, Time, VaultCallParams, VaultDelegateParams};
use crate::codec::time::UnixMillis;
use crate::vault::{Asked, Options, Request, VaultError, Workspace};

/// Bytes of a whole answer of a shared vault: a model is shown little of it at a time.
const MAX_ANSWER: u64 = 8 * 1024 * 1024;

/// Carries out a call; `cwd` is in the project, `harness` writes entries.
pub(super) async fn call(
    link: &Link,
    cwd: &str,
    harness: &str,
    arguments: serde_json::Map<String, serde_json::Value>,
) -> ToolResult {
    match VaultTool::parse(arguments) {
        Ok(VaultTool::Request(params)) => asked(&link.call(params).await),
        Ok(VaultTool::Delegate(params, lasts)) => {
            let now = UnixMillis(u64::try_from(Timestamp::now().as_millisecond()).unwrap_or(0));
            let expires = lasts.map(|secs| Time(now.plus(secs.get() * 1000)));
            let to = params.agent.clone();
            delegated(&to, &link.call(VaultDelegateParams { expires, ..params }).await)
        }
        Ok(VaultTool::Command { at: Some(at), call, offset }) => {
            let answer = match link.connected().await {
                Ok(connected) => connected.client.vault_answer(&call, MAX_ANSWER).await,
                Err(error) => Err(error),
            };
            answered(Some(&at), &call, &answer, offset)
        }
        Ok(VaultTool::Command { at: None, call, offset }) => {
            let (place, agent, own) = (PathBuf::from(cwd), harness.to_owned(), call.clone());
            let work = tokio::task::spawn_blocking(move || here(place, agent, *own));
            let answer = match work.await {
                Ok(answer) => answer,
                Err(_) => Err(ApiError::internal("the command did not end")),
            };
            answered(None, &call, &answer, offset)
        }
        Err(error) => refusal(&error),
    }
}

/// A command on the vault that `place` lies in.
fn here(place: PathBuf, agent: String, call: VaultCallParams) -> Result<String, ApiError> {
    let failed = |error: VaultError| ApiError::plain(error.code(), error.to_string());
    let asked = Asked {
        op: call.op.as_str().to_owned(),
        page: call.page,
        query: call.query,
        limit: call.limit,
        payload: call.payload,
        confirmed: call.confirmed,
    };
    let request = Request::read(&asked).map_err(failed)?;
    let options =
        Options::system().map_err(|error| ApiError::plain(error.code(), error.to_string()))?;
    let options = Options { agent: Some(agent), ..options };
    let workspace = Workspace::open(&place, options).map_err(failed)?;
    request.carry_out(&workspace).map_err(failed)
}
