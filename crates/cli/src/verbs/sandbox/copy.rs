//! `thaw sandbox cp`: files and directories, to a sandbox and from it.

use super::download;
use super::upload::Upload;
use crate::client::{Daemon, DaemonArguments};
use crate::failure::{Failure, Outcome};
use crate::output;
use crate::verbs::exec::instance_of;
use clap::Args;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use thaw_node::remote::files::{FileInfo, FileKind};
use thaw_node::remote::untree::TreeReport;
use thaw_sandbox::escape;

/// Copy files to a sandbox, or from it.
///
/// Directories are copied with all that is in them, as one stream: files, directories and symbolic
/// links, with their permissions and times. A directory from a sandbox goes where nothing is yet.
/// Paths of a sandbox are `NAME:PATH`; its own kernel resolves them, with the rights of `--user`.
/// `-` is standard output or input, for one file; a file here that has this name is `./-`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw sandbox cp ./src box:/work\n  \
    thaw sandbox cp box:/var/log/app.log .\n  \
    thaw sandbox cp box:/etc/os-release - | grep VERSION\n  \
    date | thaw sandbox cp - box:/tmp/date\n  \
    thaw sandbox cp --user app file box:file")]
pub struct Arguments {
    /// What: a path here, - for standard input, or NAME:PATH.
    from: String,
    /// Where to: NAME:PATH, a path here, or - for standard output.
    to: String,
    /// Whose rights count in the sandbox.
    #[arg(short, long, value_name = "USER", default_value = "")]
    user: String,
    /// Copy directories, as cp(1) has it: they are copied without this, too.
    #[arg(short, long)]
    recursive: bool,
    #[command(flatten)]
    daemon: DaemonArguments,
}

/// Standard input or output in the place of a path here.
const STANDARD: &str = "-";
/// Bytes of a file that are written at a time.
const PIECE: usize = 256 << 10;

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
            if arguments.from == STANDARD {
                files.write_input(path)?;
                return Ok(ExitCode::SUCCESS);
            }
            let from = Path::new(&arguments.from);
            let target = files.target(path, from)?;
            files.upload(from, &target)?;
        }
        (Some((name, path)), None) => {
            let files = Files { instance: instance_of(&daemon, name)?, daemon, user };
            if arguments.to == STANDARD {
                files.print(path)?;
                return Ok(ExitCode::SUCCESS);
            }
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
        match (is_there.is_ok_and(is_directory), name) {
            (true, Some(name)) => Ok(format!("{}/{name}", path.trim_end_matches('/'))),
            // A directory is copied to the name itself, which it is then.
            (false, _) if path.ends_with('/') && !from.is_dir() => Err(no_directory(path)),
            _ => Ok(path.to_owned()),
        }
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
            let mut stream = Upload::of(from.to_owned())?;
            let sent =
                self.daemon.put_stream::<TreeReport>(&self.url("/tree", to, ""), &mut stream);
            // Why it was broken off says more than that it was.
            return stream.failure().map_or(sent, Err).map(drop);
        }
        if !found.is_file() {
            return Err(Failure::failed(format!("{} is no file or directory", from.display())));
        }
        let file = File::open(from).map_err(told)?;
        let path = self.url("", to, &format!("{more}&mtime={}", found.mtime()));
        self.daemon.put_file::<FileInfo>(&path, file).map(drop)
    }

    /// Writes standard input to a file.
    fn write_input(&self, to: &str) -> Result<(), Failure> {
        let mut input = io::stdin().lock();
        self.daemon.put_stream::<FileInfo>(&self.url("", to, ""), &mut input).map(drop)
    }

    /// Writes a file to standard output.
    fn print(&self, from: &str) -> Result<(), Failure> {
        let info: FileInfo = self.daemon.get(&self.url("/stat", from, ""))?;
        if info.kind != FileKind::File {
            let shown = escape(from.as_bytes());
            return Err(Failure::failed(format!(
                "{shown} is no file, and only files go to standard output; name a path to copy it to"
            )));
        }
        let mut answer = self.daemon.stream(&self.url("", from, ""))?;
        let mut output = BufWriter::with_capacity(PIECE, io::stdout().lock());
        io::copy(&mut answer.body_mut().as_reader(), &mut output)?;
        output.flush()?;
        Ok(())
    }

    fn download(&self, from: &str, to: &Path) -> Result<(), Failure> {
        let shown = to.to_string_lossy();
        let told = |error: io::Error| Failure::failed(format!("{}: {error}", to.display()));
        let info: FileInfo = self.daemon.get(&self.url("/stat", from, "&no_follow=true"))?;
        match info.kind {
            FileKind::Link | FileKind::File if shown.ends_with('/') => Err(no_directory(&shown)),
            FileKind::Directory => {
                if to.symlink_metadata().is_ok() {
                    return Err(told(io::ErrorKind::AlreadyExists.into()));
                }
                let mut answer = self.daemon.stream(&self.url("/tree", from, ""))?;
                download::unpack(answer.body_mut().as_reader(), to)
            }
            FileKind::Link => {
                let target: String = self.daemon.get(&self.url("/link", from, ""))?;
                symlink(target, to).map_err(told)
            }
            FileKind::File => {
                let mut answer = self.daemon.stream(&self.url("", from, ""))?;
                let file = File::create(to).map_err(told)?;
                let mut pieces = BufWriter::with_capacity(PIECE, file);
                io::copy(&mut answer.body_mut().as_reader(), &mut pieces).map_err(told)?;
                let file = pieces.into_inner().map_err(|error| told(error.into_error()))?;
                // Not what would give rights to whoever runs it.
                file.set_permissions(fs::Permissions::from_mode(info.mode & 0o777)).map_err(told)
            }
            FileKind::Other => {
                Err(Failure::failed(format!("{} is no file or directory", escape(from.as_bytes()))))
            }
        }
    }
}

/// There is none of a name that ends with a slash, and so names one.
fn no_directory(path: &str) -> Failure {
    let path = escape(path.trim_end_matches('/').as_bytes());
    Failure::failed(format!("there is no directory {path}; make it first"))
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
