//! `thaw sandbox cp`: files and directories, to a sandbox and from it.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::{Failure, Outcome};
use crate::output;
use crate::verbs::exec::instance_of;
use clap::Args;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use thaw_node::sandboxes::files::{FileInfo, FileKind};

/// Copy files to a sandbox, or from it.
///
/// Directories are copied with all that is in them: files, directories and symbolic links, with
/// their permissions and times. A directory from a sandbox goes where nothing is yet. Paths of a
/// sandbox are `NAME:PATH`; its own kernel resolves them, with the rights of `--user`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw sandbox cp ./src box:/work\n  \
    thaw sandbox cp box:/var/log/app.log .\n  \
    thaw sandbox cp --user app file box:file")]
pub struct Arguments {
    /// What: a path here, or NAME:PATH.
    from: String,
    /// Where to: NAME:PATH, or a path here.
    to: String,
    /// Whose rights count in the sandbox.
    #[arg(short, long, value_name = "USER", default_value = "")]
    user: String,
    #[command(flatten)]
    daemon: DaemonArguments,
}

/// The files of one sandbox.
struct Files {
    daemon: Daemon,
    instance: u64,
    user: String,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let daemon = Daemon::find(&arguments.daemon)?;
    let user = arguments.user.clone();
    let (from, to) = (remote(&arguments.from), remote(&arguments.to));
    match (from, to) {
        (None, Some((name, path))) => {
            let files = Files { instance: instance_of(&daemon, name)?, daemon, user };
            let from = Path::new(&arguments.from);
            let target = files.target(path, from)?;
            files.upload(from, &target)?;
        }
        (Some((name, path)), None) => {
            let files = Files { instance: instance_of(&daemon, name)?, daemon, user };
            let mut to = PathBuf::from(&arguments.to);
            let last = path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
            if to.is_dir() && !["", ".", ".."].contains(&last) {
                to.push(last);
            }
            files.download(path, &to)?;
        }
        _ => {
            return Err(Failure::misused(
                "one of the two is a path here, the other one NAME:PATH in a sandbox",
            ));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The sandbox and the path in it, if a text names one. One with a slash before the colon is a
/// path here.
fn remote(text: &str) -> Option<(&str, &str)> {
    let (name, path) = text.split_once(':')?;
    (!name.contains('/') && !path.is_empty()).then_some((name, path))
}

impl Files {
    fn url(&self, action: &str, path: &str, more: &str) -> String {
        let (path, user) = (output::escape(path), output::escape(&self.user));
        format!("/instances/{}/files{action}?path={path}&user={user}{more}", self.instance)
    }

    /// Where a file goes: into a directory that is there, under its own name.
    fn target(&self, path: &str, from: &Path) -> Result<String, Failure> {
        let is_directory = |info: FileInfo| info.kind == FileKind::Directory;
        let is_there = self.daemon.get::<FileInfo>(&self.url("/stat", path, ""));
        let name = from.file_name().and_then(|name| name.to_str());
        Ok(match (is_there.is_ok_and(is_directory), name) {
            (true, Some(name)) => format!("{}/{name}", path.trim_end_matches('/')),
            _ => path.to_owned(),
        })
    }

    fn upload(&self, from: &Path, to: &str) -> Result<(), Failure> {
        let told = |error: io::Error| Failure::failed(format!("{}: {error}", from.display()));
        let found = from.symlink_metadata().map_err(told)?;
        let more = format!("&mode={}", found.mode() & 0o7777);
        if found.is_symlink() {
            let target = fs::read_link(from).map_err(told)?;
            let target = output::escape(&target.to_string_lossy());
            let path = self.url("/link", to, &format!("&to={target}"));
            return self.daemon.post::<()>(&path);
        }
        if found.is_dir() {
            self.daemon.post::<()>(&self.url("/directory", to, &more))?;
            for entry in fs::read_dir(from).map_err(told)? {
                let entry = entry.map_err(told)?;
                let name = entry.file_name();
                let Some(name) = name.to_str() else {
                    let shown = entry.path().display().to_string();
                    return Err(Failure::failed(format!("{shown}: its name is not UTF-8")));
                };
                self.upload(&entry.path(), &format!("{to}/{name}"))?;
            }
            return Ok(());
        }
        if !found.is_file() {
            return Err(Failure::failed(format!("{} is no file or directory", from.display())));
        }
        let file = File::open(from).map_err(told)?;
        let path = self.url("", to, &format!("{more}&mtime={}", found.mtime()));
        self.daemon.put_file::<FileInfo>(&path, file).map(drop)
    }

    fn download(&self, from: &str, to: &Path) -> Result<(), Failure> {
        let info: FileInfo = self.daemon.get(&self.url("/stat", from, "&no_follow=true"))?;
        self.take(&info, from, to, true)
    }

    /// What the sandbox says decides nothing but what is in the files: each name is one name, and
    /// a directory is one that was made here just now.
    fn take(&self, info: &FileInfo, from: &str, to: &Path, is_top: bool) -> Result<(), Failure> {
        let told = |error: io::Error| Failure::failed(format!("{}: {error}", to.display()));
        let mode = fs::Permissions::from_mode(info.mode & 0o777);
        match info.kind {
            FileKind::Directory => {
                fs::create_dir(to).map_err(told)?;
                let entries: Vec<FileInfo> = self.daemon.get(&self.url("/list", from, ""))?;
                for entry in entries {
                    if entry.name.contains('/') || ["", ".", ".."].contains(&entry.name.as_str()) {
                        return Err(Failure::failed("the sandbox lists what is no name of a file"));
                    }
                    let path = format!("{}/{}", from.trim_end_matches('/'), entry.name);
                    self.take(&entry, &path, &to.join(&entry.name), false)?;
                }
            }
            FileKind::Link => {
                let target: String = self.daemon.get(&self.url("/link", from, ""))?;
                symlink(target, to).map_err(told)?;
                return Ok(());
            }
            FileKind::File => {
                let mut answer = self.daemon.stream(&self.url("", from, ""))?;
                let mut file = create(to, is_top).map_err(told)?;
                io::copy(&mut answer.body_mut().as_reader(), &mut file).map_err(told)?;
                // Not what would give rights to whoever runs it.
                return file.set_permissions(mode).map_err(told);
            }
            FileKind::Other => {
                eprintln!("thaw: {} is no file or directory, and left out", to.display());
                return Ok(());
            }
        }
        fs::set_permissions(to, mode).map_err(told)
    }
}

/// A file for what is copied. Below the top, where all is new, one that is there is none of this
/// copy's: the sandbox has listed a name twice, and the first may be a link to anywhere.
fn create(to: &Path, is_top: bool) -> io::Result<File> {
    let mut options = File::options();
    match is_top {
        true => options.create(true).truncate(true),
        false => options.create_new(true),
    };
    options.write(true).open(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_colon_behind_a_name_means_a_sandbox() {
        assert_eq!(remote("box:/tmp/a"), Some(("box", "/tmp/a")));
        assert_eq!(remote("17:a:b"), Some(("17", "a:b")));
        for here in ["./a:b", "/a:b", "plain", "box:"] {
            assert_eq!(remote(here), None);
        }
    }
}
