//! The place where the two ends of the local API meet: rules for the socket's path and directory
//! that the daemon keeps and `doctor` checks. Opens nothing.

/// Longest socket path in bytes: `sun_path` has 108 bytes on Linux and 104 elsewhere, one of them for
/// the final NUL.
pub const MAX_SOCKET_PATH: usize = if cfg!(target_os = "linux") { 107 } else { 103 };

/// Why a directory with this owner and mode does not keep others out; `None` when it is `uid`'s alone.
#[must_use]
pub fn directory_fault(owner: u32, mode: u32, uid: u32) -> Option<String> {
    if owner != uid {
        return Some(format!("belongs to user {owner}, not to {uid}"));
    }
    let open = mode & 0o077;
    (open != 0).then(|| format!("has mode {:04o}, so that others can enter it", mode & 0o7777))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_must_be_ours_alone() {
        assert_eq!(directory_fault(1000, 0o040_700, 1000), None);
        assert_eq!(directory_fault(1000, 0o040_500, 1000), None);
        assert!(directory_fault(0, 0o040_700, 1000).unwrap().contains("user 0"));
        for mode in [0o040_701, 0o040_710, 0o040_770, 0o041_777] {
            assert!(directory_fault(1000, mode, 1000).is_some(), "{mode:o}");
        }
    }
}
