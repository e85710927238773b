//! What helps a program that could not be started, or has failed, in its sandbox.

use super::rights::{self, Start};
use super::{Arguments, mounts};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use thaw_build::lacking::Lacking;
use thaw_home::home::Home;
use thaw_home::rootfs;

/// What helps a program that could not be started.
pub struct Advice {
    /// The program, as it was named.
    program: String,
    lacking: Lacking,
    /// What it is started with, if root runs it and files are opened under the rights of `nobody`.
    rights: Option<Start>,
    /// Where this host has the program, if the sandbox does not look for it there.
    elsewhere: Option<String>,
    /// A directory that is mounted to be written to, and that `nobody` may not write to.
    unwritable: Option<String>,
}

impl Advice {
    /// That for a program with this environment and working directory.
    pub fn of(arguments: &Arguments, argv: &[OsString], env: &[OsString], cwd: &OsStr) -> Self {
        let directory = arguments.rootfs.as_deref().filter(|name| rootfs::is_directory_name(name));
        let lacking = match (&arguments.image, &arguments.rootfs) {
            (Some(image), _) => Lacking::Image(image.clone()),
            (None, Some(name)) if !directory.is_some_and(is_root) => {
                Lacking::Directory(name.clone())
            }
            (None, _) => Lacking::Host,
        };
        let is_judged = !arguments.as_root && rustix::process::geteuid().is_root();
        let rights = is_judged.then(|| {
            let root = directory.map(|directory| (directory.into(), "/".into()));
            let path = env.iter().find_map(|it| it.as_bytes().strip_prefix(b"PATH="));
            Start {
                mounts: root.into_iter().chain(mounted_directories(arguments)).collect(),
                hidden: Home::candidates(),
                program: argv.first().cloned().unwrap_or_default(),
                cwd: cwd.into(),
                search: path.map_or_else(OsString::new, |path| OsStr::from_bytes(path).into()),
            }
        });
        let unwritable = mounted_to_be_written(arguments)
            .filter(|_| is_judged)
            .find(|host| rights::is_roots_alone_to_write(Path::new(host)));
        let program = argv.first().filter(|_| lacking == Lacking::Host);
        let search = env.iter().find_map(|it| it.as_bytes().strip_prefix(b"PATH="));
        let search = OsStr::from_bytes(search.unwrap_or_default());
        let elsewhere = program.and_then(|program| elsewhere(program, search, rights.as_ref()));
        let program = argv.first().cloned().unwrap_or_default();
        let program = program.to_string_lossy().into_owned();
        Self { program, lacking, rights, elsewhere, unwritable }
    }

    /// What may have made the program fail.
    pub fn on_failure(&self) -> Option<String> {
        let directory = thaw_sandbox::escape(self.unwritable.as_ref()?.as_bytes());
        Some(format!(
            "if it was to write in {directory}: files are opened under the rights of nobody, who may not write there; \
             have the directory be one of nobody's, or open files under root's rights with --as-root"
        ))
    }

    /// What the kernel has said, with what helps here.
    pub fn on(&self, reason: &str) -> String {
        if self.rights.as_ref().is_some_and(Start::is_roots_alone) {
            // Whether it is there or not: for root it is.
            let said = Lacking::said(reason);
            return format!(
                "{said}; files are opened under the rights of nobody, and only root may use this one: --as-root opens \
                 them under root's"
            );
        }
        // It may also be the working directory that is not there.
        let rest = reason.strip_prefix(&self.program).unwrap_or_default().trim_start();
        if let Some(elsewhere) = self.elsewhere.as_ref().filter(|_| rest.starts_with(NOT_THERE)) {
            return format!("{}; {elsewhere}", Lacking::said(reason));
        }
        self.lacking.explain(reason).unwrap_or_else(|| reason.to_owned())
    }
}

/// What the kernel says of a program that it does not find.
const NOT_THERE: &str = "does not exist in the sandbox";

/// Where this host has a program that was named without a path: its `PATH` is not that of the sandbox.
fn elsewhere(program: &OsStr, looked_at: &OsStr, rights: Option<&Start>) -> Option<String> {
    if program.as_bytes().contains(&b'/') {
        return None;
    }
    let search = std::env::var_os("PATH")?;
    let path = std::env::split_paths(&search)
        .filter(|directory| std::env::split_paths(looked_at).all(|other| other != *directory))
        .map(|directory| directory.join(program))
        .find(|path| path.is_absolute() && path.is_file())?;
    let is_roots = rights.is_some_and(|start| {
        Start { program: path.clone().into(), ..start.clone() }.is_roots_alone()
    });
    let more = if is_roots { ", and --as-root, since only root may use it" } else { "" };
    Some(format!(
        "this host has it as {}, where the sandbox does not look: give that path, or the PATH of this host with \
         `-e PATH`{more}",
        thaw_sandbox::escape(path.as_os_str().as_bytes())
    ))
}

/// Whether the root of the sandbox is that of this host.
fn is_root(directory: &str) -> bool {
    std::fs::canonicalize(directory).is_ok_and(|path| path == Path::new("/"))
}

/// Directories of this host that options mount to be written to.
fn mounted_to_be_written(arguments: &Arguments) -> impl Iterator<Item = String> {
    let volumes = arguments.volume.iter().filter(|text| !mounts::names_volume(text));
    let volumes = volumes.map(|text| mounts::writable(text));
    let all = arguments.bind.iter().cloned().chain(volumes);
    all.filter_map(|text| Some(text.strip_suffix(":rw")?.split(':').next()?.to_owned()))
}

/// Directories of this host that options mount, and where.
fn mounted_directories(arguments: &Arguments) -> impl Iterator<Item = (PathBuf, PathBuf)> {
    let volumes = arguments.volume.iter().filter(|text| !mounts::names_volume(text));
    arguments.bind.iter().chain(volumes).filter_map(|text| {
        let mut parts = text.split(':');
        Some((parts.next()?.into(), parts.next()?.into()))
    })
}
