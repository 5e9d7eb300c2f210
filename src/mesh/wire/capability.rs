//! Capability verbs and domain ids: the names used here and the grammar of all.

/// Outer verb and capability of all room verbs.
pub const ROOM_MEMBER: &str = "room:member";
/// Capability to open a direct message without being asked.
pub const DM_SEND: &str = "dm:send";
/// Capability in membership proofs.
pub const GROUP_MEMBER: &str = "group:member";
/// Capability to authorise tokens of others.
pub const MANAGE_GRANT: &str = "manage:grant";
/// Capability to revoke tokens of others.
pub const MANAGE_REVOKE: &str = "manage:revoke";
/// Capability to read a shared vault (decision 32).
pub const VAULT_READ: &str = "x-commsd-vault:read";
/// Capability to write to a shared vault, which includes reading it (decisions 32, 84).
pub const VAULT_WRITE: &str = "x-commsd-vault:write";
/// Outer verb of the Agent Collaboration Protocol between daemons.
pub const ACP_CALL: &str = "x-commsd-acp:call";
/// Outer verb of `path.trace`.
pub const PATH_TRACE: &str = "path:trace";
/// Outer verb of `topology.get`.
pub const TOPOLOGY_GET: &str = "topology:get";
/// Outer verb of `version.get`.
pub const VERSION_GET: &str = "version:get";
/// Outer verb of agent-comms mesh messages.
pub const AGENT_COMMS_FRAME: &str = "exadev.io/agent-comms-v1:frame";
/// The one domain that agent-comms peers announce.
pub const DOMAIN_AGENT_COMMS: &str = "exadev.io/agent-comms-v1";
/// A retired domain: never announced, never agreed on.
pub const DOMAIN_FEDERATION: &str = "core/federation";

/// The parts after `core/` that exist.
const CORE_DOMAINS: [&str; 8] =
    ["management", "exec", "data", "webrtc", "room", "bulk", "version", "federation"];

/// Lower-case letters, digits and hyphens, not empty and no hyphen at the ends.
fn is_word(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// `registrant.tld/name` or `x-name`.
fn is_registered(text: &str) -> bool {
    match text.split_once('/') {
        Some((registrant, name)) => {
            registrant.contains('.') && registrant.split('.').all(is_word) && is_word(name)
        }
        None => text.strip_prefix("x-").is_some_and(is_word),
    }
}

/// Whether `text` is a domain id: `core/…`, `registrant.tld/name` or `x-name`.
#[must_use]
pub fn is_domain_id(text: &str) -> bool {
    match text.strip_prefix("core/") {
        Some(name) => CORE_DOMAINS.contains(&name),
        None => is_registered(text),
    }
}

/// Whether `text` is a capability verb: `subsystem:action`, `registrant.tld/name:action` or
/// `x-name:action`.
#[must_use]
pub fn is_capability_verb(text: &str) -> bool {
    text.split_once(':').is_some_and(|(subsystem, action)| {
        is_word(action) && (is_word(subsystem) || is_registered(subsystem))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grammar() {
        for verb in [ROOM_MEMBER, AGENT_COMMS_FRAME, "x-commsd-vault:read", "a:b", "exec:pty"] {
            assert!(is_capability_verb(verb), "{verb}");
        }
        for verb in
            ["introduce", "Room:Member", " room:member", "room:member ", "a:", ":b", "a:b:c"]
        {
            assert!(!is_capability_verb(verb), "{verb}");
        }
        for domain in [DOMAIN_AGENT_COMMS, DOMAIN_FEDERATION, "core/data", "a.b/x", "x-thing"] {
            assert!(is_domain_id(domain), "{domain}");
        }
        for domain in ["foo/bar", "core/unknown", "Exadev.io/x", " exadev.io/agent-comms-v1 ", ""] {
            assert!(!is_domain_id(domain), "{domain}");
        }
    }
}
