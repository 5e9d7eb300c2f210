//! Calls of the Agent Collaboration Protocol.

use std::path::Path;

use serde_json::Value;

use super::{Client, Notification};
use crate::api::acp::{AcpCall, AcpNews, AcpParams};
use crate::api::types::ApiError;

/// Asks the daemon at `socket` as the program `name`, over a connection of this call's own: it ends
/// with the future, and a call that is waited for ends with it; a task that was ordered goes on.
/// `told` hears what happens meanwhile.
///
/// # Errors
/// As [`Client::connect`]; what the daemon says, with the protocol's codes; `disconnected`; `timeout`.
pub async fn call(
    socket: &Path,
    name: &str,
    call: AcpCall,
    mut told: impl FnMut(AcpNews),
) -> Result<Value, ApiError> {
    let (client, mut notifications) = Client::connect(socket, name).await?;
    let wait = call.wait();
    let answer = client.call_waiting(AcpParams(Box::new(call)), wait);
    tokio::pin!(answer);
    loop {
        tokio::select! {
            // What came before the answer is told before it.
            biased;
            Some(notification) = notifications.recv() => {
                if let Notification::Acp(news) = notification {
                    told(news);
                }
            }
            answer = &mut answer => return answer,
        }
    }
}
