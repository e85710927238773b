//! Finding control group trees that this process may use (cgroups(7)).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::hierarchy::{Controller, Hierarchy, Missing, Place, Version, make_directory};

/// Prefix of the groups that a process of ours makes, followed by its process
/// id and start time: what is left by a dead one can be told and removed.
const PREFIX: &str = "thaw-";
/// Where this process itself goes in a tree of version 2, which wants every process in
/// a leaf.
const LEAF: &str = "thaw-host";
/// Weight of all sandboxes together against each group beside theirs, in a tree of version 2. That of
/// one process is 100.
const WEIGHT_OF_ALL: u32 = 1000;
/// Depth to which leftovers are looked for.
const SEARCH_DEPTH: usize = 6;

/// A mounted tree of control groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tree {
    pub version: Version,
    pub mount: PathBuf,
    /// The controllers that it could have.
    pub controllers: Vec<Controller>,
}

/// Finds writable trees with the controllers that limits need, removes what dead
/// processes of ours left in them, and makes a group for this process in each.
///
/// To be called before children are made: in a tree of version 2 this process may have
/// to move, and its children with it.
pub fn discover() -> Arc<Hierarchy> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let (mounts, groups) = (read("/proc/self/mountinfo"), read("/proc/self/cgroup"));
    let mut places: Vec<Place> = Vec::new();
    let mut refusals: Vec<(Controller, String)> = Vec::new();
    for tree in trees(&mounts) {
        let is_wanted = |controller: &Controller| {
            !places.iter().any(|place| place.controllers.contains(controller))
        };
        let wanted: Vec<Controller> = tree.controllers.iter().copied().filter(is_wanted).collect();
        if wanted.is_empty() {
            continue;
        }
        let found = tree.place(&wanted, &groups);
        refusals.extend(found.refusals);
        places.extend(found.place);
    }
    let missing = Controller::ALL
        .into_iter()
        .filter(|controller| !places.iter().any(|place| place.controllers.contains(controller)))
        .map(|controller| Missing { controller, reason: reason(controller, &refusals) })
        .collect();
    let hierarchy = Hierarchy::new(places, missing);
    // Prove it now, not at the first zygote.
    match hierarchy.create(0) {
        Ok(_) => hierarchy,
        Err(error) => {
            let missing = Controller::ALL.map(|controller| Missing {
                controller,
                reason: format!("no group can be made: {error}"),
            });
            Hierarchy::new(Vec::new(), missing.into())
        }
    }
}

fn reason(controller: Controller, refusals: &[(Controller, String)]) -> String {
    // Of several trees the one that was looked at last has the controller for certain.
    let refusal = refusals.iter().rev().find(|(refused, _)| *refused == controller);
    refusal.map_or_else(
        || format!("no control group tree with the controller `{}` is mounted", controller.name()),
        |(_, reason)| reason.clone(),
    )
}

/// The mounted trees that may have a controller of interest, version 2 first.
pub(super) fn trees(mountinfo: &str) -> Vec<Tree> {
    let mut found: Vec<Tree> = mountinfo
        .lines()
        .filter_map(|line| {
            let (mount, kind) = line.split_once(" - ")?;
            let mount = PathBuf::from(mount.split(' ').nth(4)?);
            let mut kind = kind.split(' ');
            let (version, controllers) = match kind.next()? {
                "cgroup2" => (Version::V2, Controller::ALL.to_vec()),
                "cgroup" => (Version::V1, controllers_in(kind.nth(1)?, ',')),
                _ => return None,
            };
            (!controllers.is_empty()).then_some(Tree { version, mount, controllers })
        })
        .collect();
    found.sort_by_key(|tree| tree.version == Version::V1);
    found
}

/// The controllers of interest in a list.
fn controllers_in(list: &str, separator: char) -> Vec<Controller> {
    let names: Vec<&str> = list.trim().split(separator).collect();
    Controller::ALL.into_iter().filter(|controller| names.contains(&controller.name())).collect()
}

/// What a tree has for this process.
#[derive(Default)]
struct Found {
    place: Option<Place>,
    refusals: Vec<(Controller, String)>,
}

impl Tree {
    /// Makes a group with as many of the wanted controllers as the tree has.
    fn place(&self, wanted: &[Controller], groups: &str) -> Found {
        remove_leftovers(&self.mount, SEARCH_DEPTH);
        let own = self.own_directory(groups);
        let mut found = Found::default();
        let mut usable = Vec::new();
        match self.version {
            Version::V1 => usable.extend(wanted),
            Version::V2 => {
                let delegation = Unit::of(&own, &self.mount);
                for &controller in wanted {
                    match delegation.check().and_then(|()| enable(controller, &own, &delegation)) {
                        Ok(()) => usable.push(controller),
                        Err(error) => found.refusals.push((controller, describe(&own, &error))),
                    }
                }
            }
        }
        // Every group of version 2 counts CPU time. Alone it is not worth a group.
        if usable.iter().all(|&controller| {
            self.version == Version::V2 && controller == Controller::CpuAccounting
        }) {
            let first = found.refusals.first().map(|(_, reason)| reason.clone());
            let reason = first.unwrap_or_else(|| format!("{}: has no controllers", own.display()));
            found
                .refusals
                .extend(usable.into_iter().map(|controller| (controller, reason.clone())));
            return found;
        }
        match make_group(&own).and_then(|group| hold_sandboxes(group, self.version, &usable)) {
            Ok(directory) => {
                found.place = Some(Place { version: self.version, directory, controllers: usable });
            }
            Err(error) => {
                let refused = |&controller: &Controller| (controller, describe(&own, &error));
                found.refusals.extend(usable.iter().map(refused));
            }
        }
        found
    }

    /// The directory of this process's own group; the mount point itself where that
    /// is not visible, as in a container. Where this process is in the leaf that it has
    /// made for itself, or another process of ours did, the group above.
    pub fn own_directory(&self, groups: &str) -> PathBuf {
        let own = groups.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (number, controllers) = (fields.next()?, fields.next()?);
            let fits = match self.version {
                Version::V2 => number == "0" && controllers.is_empty(),
                Version::V1 => controllers_in(controllers, ',') == self.controllers,
            };
            if fits { fields.next() } else { None }
        });
        let directory = self.mount.join(own.unwrap_or("/").trim_start_matches('/'));
        let directory = if directory.is_dir() { directory } else { self.mount.clone() };
        match (directory.file_name(), directory.parent()) {
            (Some(name), Some(above)) if self.version == Version::V2 && name == LEAF => {
                above.to_owned()
            }
            _ => directory,
        }
    }
}

fn describe(own: &Path, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            format!("{} is not this user's", own.display().to_string().trim_end_matches('/'))
        }
        io::ErrorKind::ReadOnlyFilesystem => format!("{} is mounted read-only", own.display()),
        _ => format!("{}: {error}", own.display()),
    }
}

/// How systemd manages the group of this process, if it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    /// The group, or one above it, was made for whoever runs in it.
    Delegated,
    /// The group is that of a service, in which systemd alone may make groups: it ends
    /// the whole service when a sandbox runs out of memory.
    UndelegatedService,
    /// Something else.
    Unknown,
}

impl Unit {
    fn of(own: &Path, mount: &Path) -> Self {
        let is_unit = |directory: &&Path| {
            let suffix = directory.extension().unwrap_or_default();
            suffix == "service" || suffix == "scope"
        };
        let mut above = own.ancestors().take_while(|directory| directory.starts_with(mount));
        match above.find(is_unit) {
            Some(unit) if is_delegated(unit) => Self::Delegated,
            Some(unit) if unit == own && unit.extension() == Some("service".as_ref()) => {
                match is_delegated_by_user(unit) {
                    true => Self::Delegated,
                    false => Self::UndelegatedService,
                }
            }
            _ => Self::Unknown,
        }
    }

    fn check(self) -> io::Result<()> {
        match self {
            Self::Delegated | Self::Unknown => Ok(()),
            Self::UndelegatedService => Err(io::Error::other(
                "systemd would stop the whole service when a sandbox runs out of memory; \
                 add Delegate=yes to the unit",
            )),
        }
    }
}

/// Whether systemd has marked a group as delegated (systemd.resource-control(5),
/// "Delegate="; the mark of the users' name space exists since version 251).
fn is_delegated(group: &Path) -> bool {
    ["user.delegate", "trusted.delegate"].iter().any(|name| {
        let mut value = [0; 2];
        let length = rustix::fs::getxattr(group, *name, &mut value);
        length.is_ok_and(|length| value[..length] == *b"1")
    })
}

/// Whether the service manager of a user has delegated the group of a service. It marks none,
/// so it is asked (systemctl(1)).
fn is_delegated_by_user(service: &Path) -> bool {
    let is_manager = |directory: &Path| {
        let name = directory.file_name().unwrap_or_default().as_encoded_bytes();
        name.starts_with(b"user@") && name.ends_with(b".service")
    };
    let Some(name) = service.file_name() else { return false };
    if !service.ancestors().skip(1).any(is_manager) {
        return false;
    }
    let question = ["--user", "show", "--property=Delegate", "--value", "--"];
    let mut command = Command::new("systemctl");
    // What the service manager hears comes from this process alone.
    let answer = command.args(question).arg(name).env_remove("NOTIFY_SOCKET").output();
    answer.is_ok_and(|answer| answer.stdout.trim_ascii() == b"yes")
}

/// Makes a controller available in groups below `own`.
fn enable(controller: Controller, own: &Path, unit: &Unit) -> io::Result<()> {
    if controller == Controller::CpuAccounting {
        return Ok(());
    }
    let lists = |file: &str| {
        let list = fs::read_to_string(own.join(file))?;
        Ok::<_, io::Error>(controllers_in(&list, ' ').contains(&controller))
    };
    if !lists("cgroup.controllers")? {
        return Err(io::Error::other(format!("has no controller `{}`", controller.name())));
    }
    if lists("cgroup.subtree_control")? {
        return Ok(());
    }
    // The root of all groups alone may have processes beside groups.
    let is_root = !own.join("cgroup.type").exists();
    if !is_root {
        vacate(own, *unit)?;
    }
    fs::write(own.join("cgroup.subtree_control"), format!("+{}", controller.name()))
}

/// Moves the processes of a group into a leaf of it. Those of others only if the group
/// was made for whoever runs in it.
fn vacate(own: &Path, unit: Unit) -> io::Result<()> {
    let processes = fs::read_to_string(own.join("cgroup.procs"))?;
    let me = std::process::id().to_string();
    if unit != Unit::Delegated && processes.lines().any(|pid| pid != me) {
        return Err(io::Error::other("is shared with processes that are not Thaw's"));
    }
    if processes.is_empty() {
        return Ok(());
    }
    let leaf = own.join(LEAF);
    match fs::create_dir(&leaf) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    for pid in processes.lines() {
        let moved = fs::write(leaf.join("cgroup.procs"), pid);
        // Another process may have ended meanwhile.
        if pid == me {
            moved?;
        }
    }
    Ok(())
}

/// Makes the group that stands for this process. Its name begins those of its sandboxes.
pub(super) fn make_group(own: &Path) -> io::Result<PathBuf> {
    let name = group_name(std::process::id())
        .ok_or_else(|| io::Error::other("cannot read /proc/self/stat"))?;
    // Several in one process: tests, or a pool beside another. No number comes twice, since
    // groups of sandboxes may still be there when the one that they are named after is gone.
    static NEXT: AtomicU64 = AtomicU64::new(0);
    (0..10_000)
        .map(|_| NEXT.fetch_add(1, Ordering::Relaxed))
        .map(|number| own.join(format!("{PREFIX}{name}-{number}")))
        .find_map(|directory| match make_directory(&directory) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => None,
            result => Some(result.map(|()| directory)),
        })
        .unwrap_or_else(|| Err(io::Error::from(io::ErrorKind::AlreadyExists)))
}

/// In a tree of version 2, has a group of this process hold those of its sandboxes, with these
/// controllers.
fn hold_sandboxes(
    group: PathBuf,
    version: Version,
    controllers: &[Controller],
) -> io::Result<PathBuf> {
    let enable = |controller: &Controller| match controller {
        Controller::CpuAccounting => Ok(()),
        _ => fs::write(group.join("cgroup.subtree_control"), format!("+{}", controller.name())),
    };
    let prepare = || {
        if version == Version::V1 {
            return Ok(());
        }
        if controllers.contains(&Controller::Cpu) {
            fs::write(group.join("cpu.weight"), WEIGHT_OF_ALL.to_string())?;
        }
        controllers.iter().try_for_each(enable)
    };
    match prepare() {
        Ok(()) => Ok(group),
        Err(error) => {
            let _ = fs::remove_dir(&group);
            Err(error)
        }
    }
}

/// `PID-STARTTIME` of a live process.
fn group_name(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain anything; fields count from its end.
    let (_, fields) = stat.rsplit_once(')')?;
    let start_time = fields.split_whitespace().nth(19)?;
    Some(format!("{pid}-{start_time}"))
}

/// Removes the groups of processes of ours that no longer live.
fn remove_leftovers(directory: &Path, depth: usize) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let name = entry.file_name();
        match name.to_str().and_then(|name| name.strip_prefix(PREFIX)) {
            Some(owner) if is_leftover(owner) => remove_tree(&entry.path()),
            // The leaf of a process of ours may hold groups of an older version.
            Some(_) if name != LEAF => {}
            _ if depth > 0 => remove_leftovers(&entry.path(), depth - 1),
            _ => {}
        }
    }
}

/// Whether `PID-STARTTIME-NUMBER`, or that with `.SANDBOX`, names a process that has ended.
fn is_leftover(owner: &str) -> bool {
    let Some((process, _)) = owner.rsplit_once('-') else { return false };
    let Some(pid) = process.split('-').next().and_then(|pid| pid.parse().ok()) else {
        return false;
    };
    group_name(pid).as_deref() != Some(process)
}

/// Removes a group and the groups in it, as far as they are empty.
fn remove_tree(directory: &Path) {
    if let Ok(entries) = fs::read_dir(directory) {
        for entry in entries.flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                let _ = fs::remove_dir(entry.path());
            }
        }
    }
    let _ = fs::remove_dir(directory);
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
30 23 0:26 / /sys/fs/cgroup/unified rw,nosuid - cgroup2 cgroup2 rw
31 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct
32 23 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
33 23 0:29 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices
";

    fn tree(version: Version, mount: &str, controllers: &[Controller]) -> Tree {
        Tree { version, mount: PathBuf::from(mount), controllers: controllers.to_vec() }
    }

    #[test]
    fn trees_with_controllers_of_interest_are_found_newest_first() {
        assert_eq!(
            trees(MOUNTS),
            [
                tree(Version::V2, "/sys/fs/cgroup/unified", &Controller::ALL),
                tree(
                    Version::V1,
                    "/sys/fs/cgroup/cpu",
                    &[Controller::Cpu, Controller::CpuAccounting]
                ),
                tree(Version::V1, "/sys/fs/cgroup/memory", &[Controller::Memory]),
            ]
        );
    }

    #[test]
    fn a_group_of_another_namespace_falls_back_to_the_mount() {
        let groups = "4:memory:/nowhere/at/all\n0::/\n";
        for (version, controllers) in
            [(Version::V1, &[Controller::Memory][..]), (Version::V2, &Controller::ALL)]
        {
            let tree = tree(version, "/sys", controllers);
            assert_eq!(tree.own_directory(groups), Path::new("/sys"));
        }
    }

    #[test]
    fn a_process_in_its_leaf_makes_groups_beside_the_leaf() {
        let mount = tempfile::tempdir().unwrap();
        fs::create_dir_all(mount.path().join("a.service/thaw-host")).unwrap();
        let tree = tree(Version::V2, mount.path().to_str().unwrap(), &Controller::ALL);
        let own = tree.own_directory("0::/a.service/thaw-host\n");
        assert_eq!(own, mount.path().join("a.service"));
    }

    #[test]
    fn a_service_that_is_not_delegated_is_left_alone() {
        let mount = Path::new("/sys/fs/cgroup");
        let of = |own| Unit::of(&mount.join(own), mount);
        assert_eq!(of("system.slice/thaw-test-none.service"), Unit::UndelegatedService);
        assert_eq!(of("system.slice/thaw-test-none.service/inner"), Unit::Unknown);
        let of_nobody = "user.slice/user@4294967294.service/app.slice/thaw-test-none.service";
        assert_eq!(of(of_nobody), Unit::UndelegatedService);
        assert_eq!(of("user.slice/session-1.scope"), Unit::Unknown);
        assert_eq!(of(""), Unit::Unknown);
        let refusal = Unit::UndelegatedService.check().unwrap_err().to_string();
        assert!(refusal.contains("Delegate=yes"), "{refusal}");
    }

    #[test]
    fn a_controller_that_is_not_there_is_refused_by_name() {
        let own = tempfile::tempdir().unwrap();
        fs::write(own.path().join("cgroup.controllers"), "memory pids\n").unwrap();
        fs::write(own.path().join("cgroup.subtree_control"), "memory\n").unwrap();
        enable(Controller::Memory, own.path(), &Unit::Unknown).unwrap();
        enable(Controller::Pids, own.path(), &Unit::Unknown).unwrap();
        let enabled = fs::read_to_string(own.path().join("cgroup.subtree_control")).unwrap();
        assert!(enabled.starts_with("+pids"), "{enabled}");
        let error = enable(Controller::Cpu, own.path(), &Unit::Unknown).unwrap_err();
        assert!(error.to_string().contains("`cpu`"), "{error}");
    }

    #[test]
    fn a_group_of_version_2_holds_those_of_sandboxes_with_its_controllers() {
        let own = tempfile::tempdir().unwrap();
        let make = |version, controllers: &[Controller]| {
            let group = own.path().join("group");
            fs::create_dir(&group).unwrap();
            assert_eq!(hold_sandboxes(group.clone(), version, controllers).unwrap(), group);
            let read = |name| fs::read_to_string(group.join(name)).ok();
            let written = (read("cpu.weight"), read("cgroup.subtree_control"));
            fs::remove_dir_all(&group).unwrap();
            written
        };
        assert_eq!(make(Version::V1, &Controller::ALL), (None, None));
        let all = make(Version::V2, &[Controller::Cpu, Controller::CpuAccounting]);
        assert_eq!(all, (Some("1000".to_owned()), Some("+cpu".to_owned())));
        assert_eq!(make(Version::V2, &[Controller::Pids]), (None, Some("+pids".to_owned())));
    }

    #[test]
    fn processes_of_others_are_moved_only_out_of_a_delegated_group() {
        let own = tempfile::tempdir().unwrap();
        fs::write(own.path().join("cgroup.type"), "domain\n").unwrap();
        fs::write(own.path().join("cgroup.procs"), format!("1\n{}\n", std::process::id())).unwrap();
        let error = vacate(own.path(), Unit::Unknown).unwrap_err();
        assert!(error.to_string().contains("shared with processes"), "{error}");
        vacate(own.path(), Unit::Delegated).unwrap();
        let moved = fs::read_to_string(own.path().join("thaw-host/cgroup.procs")).unwrap();
        assert!(!moved.is_empty());
    }

    #[test]
    fn every_controller_that_is_missing_has_a_reason() {
        let refusals = [
            (Controller::Cpu, "/unified: no".to_owned()),
            (Controller::Cpu, "/cpu: no".to_owned()),
            (Controller::Memory, "/c: no".to_owned()),
        ];
        assert_eq!(reason(Controller::Cpu, &refusals), "/cpu: no");
        assert!(reason(Controller::Pids, &refusals).contains("`pids` is mounted"));
    }

    #[test]
    fn only_groups_of_dead_processes_are_leftovers() {
        let live = group_name(std::process::id()).unwrap();
        assert!(!is_leftover(&format!("{live}-0")));
        assert!(!is_leftover(&format!("{live}-0.17")));
        assert!(is_leftover("4000000000-12-0"));
        assert!(is_leftover("4000000000-12-0.17"));
        assert!(is_leftover(&format!("{}-1-0", std::process::id())));
        assert!(!is_leftover("slice"));
        assert!(!is_leftover("host"));
    }

    #[test]
    fn leftovers_are_removed_at_any_depth() {
        let tree = tempfile::tempdir().unwrap();
        let stale = tree.path().join("a/thaw-host/thaw-4000000000-12-0");
        fs::create_dir_all(stale.join("7")).unwrap();
        let live = group_name(std::process::id()).unwrap();
        let live = tree.path().join(format!("a/thaw-{live}-0"));
        fs::create_dir_all(&live).unwrap();
        remove_leftovers(tree.path(), SEARCH_DEPTH);
        assert!(!stale.exists());
        assert!(live.exists());
    }
}
