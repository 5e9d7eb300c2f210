//! What to do about a command that failed, by its code: the codes are the node's, and some of peers'.

use crate::api::types::ApiError;
use crate::mesh::node::CommandError;

/// What to do about a failed command.
pub(super) fn todo(code: &str) -> Option<&'static str> {
    Some(match code {
        "room_not_found" => {
            "list_rooms, or `commsd rooms`, lists the rooms; a room is named by path, by name, or as OWNER/NAME"
        }
        "room_exists" => "choose another name, or join it",
        "not_member" => "join the room first",
        "not_owner" => "only the owner can do that; the list of rooms names it",
        "agent_not_found" => {
            "list_agents, or `commsd agents`, lists the agents; a hidden one is named by its full id"
        }
        "join_refused" => "ask the owner for an invitation",
        "nobody_to_remove" => "nothing to do; `commsd room members ROOM` lists who is in it",
        "already_member" => "nothing to do; `commsd room members ROOM` lists who is in it",
        "room_full" => "its owner can put somebody out, or make another room",
        "own_room" => "leave_room, or `commsd room leave ROOM`; destroy_room ends it for all",
        "too_many_rooms" => "leave or destroy rooms that are not needed any more",
        "invalid_reply" => {
            "give the id of a message as read_room, or `commsd room history`, shows it; or leave it out"
        }
        "invalid_status" => "give active, idle or busy",
        "not_attached" => "attach again; on the command line give --as NAME",
        "not_connected" => {
            "the other side is not connected; try again when the list of agents shows it"
        }
        "not_pending" => "room_pending, or `commsd pending`, lists what waits",
        "too_large" => "write it to a file and send the path",
        "invalid_name" | "invalid_tags" => "choose another name",
        "store_failed" => {
            "free space or mend the disk (`commsd status`); it need not be asked for again"
        }
        "not_allowed" | "expired" | "revoked" | "unauthorized" => {
            "ask for it: the vault's command request, or `commsd vault request AGENT/SHARE`"
        }
        "not_shared" => "its owner shares a vault with `commsd vault share`",
        "read_only" => "its owner shares it for writing with `commsd vault share --write`",
        "share_not_found" => "`commsd vault shares` lists what is shared",
        "not_granted" => "`commsd vault shares` lists who may use what",
        "share_exists" | "too_many_shares" => {
            "`commsd vault shares` lists what is shared; `commsd vault unshare NAME` ends one"
        }
        "too_many_grants" => "take some back: `commsd vault revoke NAME AGENT`",
        "too_many_requests" => "wait until some are answered, then try again",
        "not_delegable" => {
            "ask the share's owner: `commsd accept ID --delegations N` lets it be passed on"
        }
        "not_narrower" => "give no more than was asked for: leave out `mode`, or give read",
        "invalid_delegations" => "give a smaller number of delegations",
        "invalid_expiry" => "give a time that is still to come",
        "invalid_target" => "name another agent; `commsd agents` lists them",
        "grant_not_for_us" | "grant_rejected" | "delegation_failed" => {
            "ask whoever gave it for another: dm_admit, with this agent's id"
        }
        "no_principal" => "see `commsd doctor`: the user's identity file cannot be used",
        "mint_failed" => "try again; if that does not help, see `commsd doctor` and the clock",
        "malformed" | "malformed_response" => "update commsd there and here",
        "connect_refused" => "nothing to do if that is this machine; else try again later",
        "too_many_connections" => "name fewer machines, or let them come through one hub",
        "too_many_adverts" => "withdraw one first: mesh_unadvertise",
        "connect_failed" => {
            "check name and port, and that it listens there: `commsd run --listen ADDR:PORT`, or mesh_listen"
        }
        "busy" => "try again in a moment",
        "connection_lost" => "look whether it is done before you try again",
        "timeout" | "leave_failed" => "try again later",
        "invite_failed" => "the agent may join by name all the same; tell it another way",
        _ => return None,
    })
}

impl From<CommandError> for ApiError {
    fn from(error: CommandError) -> Self {
        Self {
            code: error.code.to_owned(),
            todo: todo(error.code).map(str::to_owned),
            message: error.message,
        }
    }
}

/// The connection was an agent when it asked, and is none any more.
pub(super) fn detached() -> ApiError {
    ApiError::new(ApiError::NOT_ATTACHED, "the connection has detached", "attach again")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    /// The codes that the sources below `dir` give to a [`CommandError`].
    fn codes(dir: &Path, found: &mut BTreeSet<String>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                codes(&path, found);
            } else {
                let text = fs::read_to_string(&path).unwrap();
                let code = text.split("#[cfg(test)]").next().unwrap();
                found.extend(code.split("CommandError::new(").skip(1).filter_map(|call| {
                    let (code, _) = call.trim_start().strip_prefix('"')?.split_once('"')?;
                    Some(code.to_owned())
                }));
            }
        }
    }

    #[test]
    fn there_is_advice_for_everything_that_can_fail() {
        let mut found = BTreeSet::new();
        for dir in ["src/mesh", "src/daemon"] {
            codes(&Path::new(env!("CARGO_MANIFEST_DIR")).join(dir), &mut found);
        }
        assert!(found.contains("invalid_reply") && found.contains("not_connected"), "{found:?}");
        let without: Vec<_> = found.iter().filter(|code| todo(code).is_none()).collect();
        assert!(without.is_empty(), "{without:?}");
    }
}
