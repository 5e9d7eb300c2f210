//! Landlock rules of a run. Every right and scope is required: on a kernel that does not know one
//! (before ABI 6, Linux 6.12), nothing is applied and the level is not there.

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, CompatLevel, Compatible as _, NetPort, PathBeneath,
    PathFd, Ruleset, RulesetAttr as _, RulesetCreated, RulesetCreatedAttr as _, RulesetStatus,
    Scope,
};

use super::confine::Files;

/// The rights that are held back: files as of ABI 5, TCP as of 4, signals and abstract sockets
/// as of 6.
const RIGHTS: ABI = ABI::V6;

/// Restricts this thread, and so the program that it becomes, to `files`.
pub(super) fn apply(files: &Files) -> Result<(), String> {
    let mut rules = rules().map_err(|e| e.to_string())?;
    let read = AccessFs::from_read(RIGHTS);
    let device = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
    let kinds =
        [(&files.read, read), (&files.devices, device), (&files.write, AccessFs::from_all(RIGHTS))];
    for (paths, rights) in kinds {
        for path in paths {
            let Ok(meta) = std::fs::metadata(path) else { continue };
            let rights = if meta.is_dir() { rights } else { rights & AccessFs::from_file(RIGHTS) };
            let beneath = PathBeneath::new(PathFd::new(path).map_err(|e| e.to_string())?, rights);
            rules = rules.add_rule(beneath).map_err(|e| e.to_string())?;
        }
    }
    for port in &files.ports {
        rules = rules
            .add_rule(NetPort::new(*port, AccessNet::ConnectTcp))
            .map_err(|e| e.to_string())?;
    }
    let status = rules.restrict_self().map_err(|e| e.to_string())?;
    match status.ruleset {
        RulesetStatus::FullyEnforced => Ok(()),
        _ => Err("not fully enforced".to_owned()),
    }
}

fn rules() -> Result<RulesetCreated, landlock::RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(RIGHTS))?
        .handle_access(AccessNet::from_all(RIGHTS))?
        .scope(Scope::from_all(RIGHTS))?
        .create()
}
