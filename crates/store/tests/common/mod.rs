//! What the tests share.

#![allow(dead_code)] // Every test program uses a part of it.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;
use thaw_abi::rootfs::{Index, IndexInode, NO_BLOB, ROOT_INODE};
use thaw_store::{BlobHash, OpenIndex, Store};

/// An empty store in a directory that vanishes with the test.
pub fn empty_store() -> (TempDir, Store) {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(&directory.path().join("home")).unwrap();
    (directory, store)
}

/// Whether the test runs as root; if not, says what it leaves out on standard error
/// itself, which the test harness does not hold back as it does `eprintln!`.
pub fn is_root(what: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        #[allow(clippy::explicit_write)] // The suggestion is what must not be.
        writeln!(std::io::stderr(), "SKIPPED: {what} needs root").unwrap();
    }
    root
}

/// What a test compares of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    pub mode: u32,
    pub owner: (u32, u32),
    pub links: u64,
    pub modified: (i64, i64),
    pub content: Vec<u8>,
    pub device: u64,
}

/// Everything below a directory of the host, by relative path.
pub fn describe_directory(root: &Path) -> BTreeMap<PathBuf, Description> {
    fn visit(root: &Path, path: &Path, found: &mut BTreeMap<PathBuf, Description>) {
        let metadata = fs::symlink_metadata(path).unwrap();
        let kind = metadata.file_type();
        let content = if kind.is_symlink() {
            fs::read_link(path).unwrap().as_os_str().as_bytes().to_vec()
        } else if kind.is_file() {
            fs::read(path).unwrap()
        } else {
            Vec::new()
        };
        let is_device = kind.is_char_device() || kind.is_block_device();
        let description = Description {
            mode: metadata.mode(),
            owner: (metadata.uid(), metadata.gid()),
            // Some file systems count a directory's links otherwise.
            links: if kind.is_dir() { 0 } else { metadata.nlink() },
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            content,
            device: if is_device { metadata.rdev() } else { 0 },
        };
        found.insert(path.strip_prefix(root).unwrap().to_owned(), description);
        if kind.is_dir() {
            for entry in fs::read_dir(path).unwrap() {
                visit(root, &entry.unwrap().path(), found);
            }
        }
    }
    let mut found = BTreeMap::new();
    visit(root, root, &mut found);
    found
}

/// Everything in an index, by path, contents read from the store.
pub fn describe_index(store: &Store, index: &OpenIndex) -> BTreeMap<PathBuf, Description> {
    let mut found = BTreeMap::new();
    for_each(&index.index(), &mut |path, inode| {
        let content = content(store, &index.index(), inode);
        let description = Description {
            mode: inode.mode,
            owner: (inode.uid, inode.gid),
            links: if kind(inode) == 0o04 { 0 } else { inode.nlink.into() },
            modified: (inode.mtime_sec, inode.mtime_nsec.into()),
            content,
            device: inode.rdev.into(),
        };
        found.insert(path.to_owned(), description);
    });
    found
}

/// Makes the directories, regular files and links of an index on the host.
pub fn export(store: &Store, index: &OpenIndex, to: &Path) {
    for_each(&index.index(), &mut |path, inode| {
        let path = to.join(path);
        let content = content(store, &index.index(), inode);
        match kind(inode) {
            0o04 => fs::create_dir_all(&path).unwrap(),
            0o10 => fs::write(&path, content).unwrap(),
            0o12 => symlink(std::ffi::OsStr::from_bytes(&content), &path).unwrap(),
            other => panic!("{} has type {other:o}", path.display()),
        }
        if kind(inode) != 0o12 {
            let permissions = fs::Permissions::from_mode(inode.mode & 0o7777);
            fs::set_permissions(&path, permissions).unwrap();
        }
    });
}

fn kind(inode: &IndexInode) -> u32 {
    inode.mode >> 12
}

fn content(store: &Store, index: &Index<'_>, inode: &IndexInode) -> Vec<u8> {
    match kind(inode) {
        0o12 => index.link_target(inode).to_vec(),
        0o10 if inode.a != NO_BLOB => {
            let hash = BlobHash(index.blobs()[inode.a as usize].hash);
            fs::read(store.blob_path(hash)).unwrap()
        }
        _ => Vec::new(),
    }
}

/// Visits every name of an index, directories before what is in them.
fn for_each<'a>(index: &Index<'a>, visit: &mut dyn FnMut(&Path, &'a IndexInode)) {
    let mut ahead = vec![(PathBuf::new(), ROOT_INODE)];
    while let Some((path, number)) = ahead.pop() {
        let inode = index.inode(number).unwrap();
        visit(&path, inode);
        for entry in index.entries(inode) {
            let name = std::ffi::OsStr::from_bytes(index.name(entry));
            ahead.push((path.join(name), entry.inode));
        }
    }
}

/// A small file system that is unmounted when dropped.
pub struct SmallDisk(pub TempDir);

impl SmallDisk {
    /// One of so many MiB.
    pub fn mount(mebibytes: u32) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let size = format!("size={mebibytes}m");
        let arguments = ["-t", "tmpfs", "-o", &size, "tmpfs"];
        let status = Command::new("mount").args(arguments).arg(directory.path()).status().unwrap();
        assert!(status.success());
        Self(directory)
    }
}

impl SmallDisk {
    /// Fills it up, but for so many bytes; until the file is dropped with [`Filler::remove`].
    pub fn fill_but_for(&self, bytes: u64) -> Filler {
        let path = self.0.path().join("filler");
        let mut file = fs::File::create(&path).unwrap();
        while file.write_all(&[1; 4096]).is_ok() {}
        file.set_len(file.metadata().unwrap().len() - bytes).unwrap();
        Filler(path)
    }
}

/// What fills a disk.
pub struct Filler(PathBuf);

impl Filler {
    pub fn remove(self) {
        fs::remove_file(self.0).unwrap();
    }
}

/// Starts the ignored test `victim` of this test program as a process that is to be killed, with
/// these variables, and waits until it says that it is ready.
pub fn start_victim(variables: &[(&str, &Path)]) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["victim", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
        .envs(variables.iter().copied())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.ends_with("ready\n") {
        assert_ne!(output.read_line(&mut line).unwrap(), 0, "the victim ended: {line}");
    }
    child
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let status = Command::new("umount").arg(self.0.path()).status();
        if !status.is_ok_and(|status| status.success()) {
            eprintln!("{} stays mounted", self.0.path().display());
        }
    }
}
