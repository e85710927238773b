//! Tests of the file systems as a whole, on a tree with a small lower layer.

mod content;
mod descriptors;
mod directories;
mod extended;
mod mounting;
mod names;
mod walking;

use std::collections::BTreeMap;
use std::string::{String, ToString};
use std::vec::Vec;

use alloc::sync::Arc;

use thaw_abi::rootfs::{
    INDEX_MAGIC, INDEX_VERSION, INDEX_VERSION_EXTENDED, Index, IndexAttribute, IndexBlob,
    IndexDirent, IndexExtension, IndexHeader, IndexInode, NO_BLOB,
};

use super::context::Context;
use super::file::{File, OpenFile, OpenFlags};
use super::lower::index::IndexLower;
use super::namespace::{self, Removal, RenameKind};
use super::open::{How, open};
use super::path::Path;
use super::permission::Identity;
use super::walk::{Follow, Resolve, walk};
use super::{FileSystems, LowerLayer};
use crate::errno::{Errno, Result};
use crate::io::{Sink, Source};
use crate::state::kernel;
use crate::task::Credentials;
use crate::testing::Sandbox;

/// A file to put into an index.
#[derive(Clone)]
pub enum Lower {
    Directory(u32),
    File(&'static str, u32),
    Link(&'static str),
    /// Another name for the file at this path.
    Same(&'static str),
}

/// The lower layer that most tests use.
pub fn sample() -> Vec<(&'static str, Lower)> {
    use Lower::{Directory, File, Link, Same};
    std::vec![
        ("bin", Directory(0o755)),
        ("bin/tool", File("#!tool", 0o755)),
        ("etc", Directory(0o755)),
        ("etc/hosts", File("127.0.0.1 localhost\n", 0o644)),
        ("etc/motd", File("hello", 0o644)),
        ("etc/secret", File("hush", 0o600)),
        ("etc/twin", Same("etc/motd")),
        ("lib", Link("usr/lib")),
        ("loop", Link("loop")),
        ("usr", Directory(0o755)),
        ("usr/lib", Directory(0o755)),
        ("usr/lib/a.so", File("AAAA", 0o644)),
        ("usr/lib/deep", Directory(0o755)),
        ("usr/lib/deep/leaf", File("leaf", 0o644)),
        ("usr/up", Link("../etc/motd")),
        ("usr/absolute", Link("/etc/motd")),
    ]
}

/// An extended attribute of a file: its path, name and value.
pub type Attribute<'a> = (&'a str, &'a [u8], &'a [u8]);

/// Builds an index by hand and parses it; also returns the blobs that it names.
pub fn index(
    files: &[(&'static str, Lower)],
    attributes: &[Attribute<'_>],
) -> (Index<'static>, Vec<Vec<u8>>) {
    let mut blobs = Vec::new();
    let mut tree: BTreeMap<String, Vec<(String, Lower)>> = BTreeMap::new();
    tree.insert(String::new(), Vec::new());
    for (path, file) in files {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        tree.entry(parent.to_string()).or_default().push((name.to_string(), file.clone()));
        if matches!(file, Lower::Directory(_)) {
            tree.entry(path.to_string()).or_default();
        }
    }
    // Numbers first: the root, then every file in order.
    let mut numbers: BTreeMap<String, u32> = BTreeMap::new();
    numbers.insert(String::new(), 0);
    let mut names: BTreeMap<u32, u32> = BTreeMap::new();
    for (path, file) in files {
        let number = match file {
            Lower::Same(other) => numbers[*other],
            _ => numbers.values().max().unwrap() + 1,
        };
        numbers.insert(path.to_string(), number);
        *names.entry(number).or_default() += 1;
    }
    let count = numbers.values().max().unwrap() + 1;
    let mut inodes = std::vec![bytemuck::Zeroable::zeroed(); count as usize];
    let mut dirents: Vec<IndexDirent> = Vec::new();
    let mut strings: Vec<u8> = Vec::new();
    let base = |mode: u32, nlink: u32| IndexInode {
        mode,
        uid: 0,
        gid: 0,
        nlink,
        size: 0,
        mtime_sec: 1_600_000_000,
        mtime_nsec: 0,
        rdev: 0,
        a: 0,
        b: 0,
    };
    for (path, number) in &numbers {
        let file = files.iter().find(|(other, _)| other == path).map(|(_, file)| file);
        let nlink = *names.get(number).unwrap_or(&1);
        inodes[*number as usize] = match file {
            None | Some(Lower::Directory(_)) => {
                let mode = if let Some(Lower::Directory(mode)) = file { *mode } else { 0o755 };
                let mut entries = tree[path].clone();
                entries.sort_by(|a, b| a.0.as_bytes().cmp(b.0.as_bytes()));
                let first = dirents.len() as u32;
                for (name, kind) in &entries {
                    let full =
                        if path.is_empty() { name.clone() } else { std::format!("{path}/{name}") };
                    dirents.push(IndexDirent {
                        name_offset: strings.len() as u32,
                        name_len: name.len() as u16,
                        file_type: match kind {
                            Lower::Directory(_) => 4,
                            Lower::Link(_) => 10,
                            _ => 8,
                        },
                        reserved: 0,
                        inode: numbers[&full],
                    });
                    strings.extend_from_slice(name.as_bytes());
                }
                let subdirectories =
                    entries.iter().filter(|e| matches!(e.1, Lower::Directory(_))).count();
                let inode = base(0o040000 | mode, 2 + subdirectories as u32);
                IndexInode { a: first, b: entries.len() as u32, ..inode }
            }
            Some(Lower::File(content, mode)) => {
                let a = if content.is_empty() { NO_BLOB } else { blobs.len() as u32 };
                blobs.push(content.as_bytes().to_vec());
                IndexInode { size: content.len() as u64, a, ..base(0o100000 | mode, nlink) }
            }
            Some(Lower::Link(target)) => {
                let a = strings.len() as u32;
                strings.extend_from_slice(target.as_bytes());
                let b = target.len() as u32;
                IndexInode { size: target.len() as u64, a, b, ..base(0o120777, 1) }
            }
            Some(Lower::Same(_)) => continue,
        };
    }
    let mut add = |bytes: &[u8]| {
        strings.extend_from_slice(bytes);
        (strings.len() - bytes.len()) as u32
    };
    let mut extended: Vec<_> = attributes
        .iter()
        .map(|(path, name, value)| IndexAttribute {
            inode: numbers[*path],
            name_offset: add(name),
            name_len: name.len() as u32,
            value_offset: add(value),
            value_len: value.len() as u32,
        })
        .collect();
    extended.sort_by_key(|attribute| attribute.inode);
    (assemble(&inodes, &dirents, &extended, &strings), blobs)
}

fn assemble(
    inodes: &[IndexInode],
    dirents: &[IndexDirent],
    extended: &[IndexAttribute],
    strings: &[u8],
) -> Index<'static> {
    let mut bytes = std::vec![0u8; size_of::<IndexHeader>() + size_of::<IndexExtension>()];
    let mut table = |content: &[u8]| {
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        let offset = bytes.len() as u64;
        bytes.extend_from_slice(content);
        offset
    };
    let inodes_offset = table(bytemuck::cast_slice(inodes));
    let dirents_offset = table(bytemuck::cast_slice(dirents));
    let blobs_offset = table(bytemuck::cast_slice::<IndexBlob, u8>(&[]));
    let extension = IndexExtension {
        attributes_offset: table(bytemuck::cast_slice(extended)),
        attribute_count: extended.len() as u32,
        reserved: 0,
    };
    let strings_offset = table(strings);
    let header = IndexHeader {
        magic: INDEX_MAGIC,
        version: if extended.is_empty() { INDEX_VERSION } else { INDEX_VERSION_EXTENDED },
        inode_count: inodes.len() as u32,
        dirent_count: dirents.len() as u32,
        blob_count: 0,
        total_len: bytes.len() as u64,
        inodes_offset,
        dirents_offset,
        blobs_offset,
        strings_offset,
        strings_len: strings.len() as u64,
        checksum: [0; 32],
    };
    let heads = [bytemuck::bytes_of(&header), bytemuck::bytes_of(&extension)].concat();
    bytes[..heads.len()].copy_from_slice(&heads);
    // Leaked, and aligned: an index lives as long as the sandbox.
    let mut words = std::vec![0u64; bytes.len().div_ceil(8)];
    bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..bytes.len()].copy_from_slice(&bytes);
    let leaked: &'static [u64] = words.leak();
    Index::parse(&bytemuck::cast_slice(leaked)[..bytes.len()]).unwrap()
}

/// A tree and somebody who uses it.
pub struct World {
    pub fs: &'static FileSystems,
    pub context: Context,
    pub sandbox: Sandbox,
}

impl World {
    pub fn new() -> Self {
        Self::over(&sample())
    }

    pub fn over(files: &[(&'static str, Lower)]) -> Self {
        Self::with_attributes(files, &[])
    }

    pub fn with_attributes(files: &[(&'static str, Lower)], attributes: &[Attribute<'_>]) -> Self {
        let (index, blobs) = index(files, attributes);
        let lower = LowerLayer(Arc::new(IndexLower::new(index)));
        let sandbox = Sandbox::over(lower, blobs, Credentials::of_user(0, 0));
        Self { fs: &kernel().fs, context: Context::current(), sandbox }
    }

    /// The same tree as an ordinary user sees it.
    pub fn become_user(&mut self, uid: u32) {
        self.context.identity = Identity::effective(&Credentials::of_user(uid, uid));
    }

    pub fn walk(&self, path: &str) -> Result<Path> {
        walk(&self.context, &self.context.cwd, path.as_bytes(), Follow::Yes)
    }

    pub fn walk_nofollow(&self, path: &str) -> Result<Path> {
        walk(&self.context, &self.context.cwd, path.as_bytes(), Follow::No)
    }

    pub fn open(&self, path: &str, flags: OpenFlags) -> Result<Arc<OpenFile>> {
        let how = How { flags, permissions: 0o644, resolve: Resolve::empty() };
        open(&self.context, &self.context.cwd, path.as_bytes(), how)
    }

    pub fn read(&self, path: &str) -> Result<String> {
        read_all(&*self.open(path, OpenFlags::empty())?)
    }

    pub fn write(&self, path: &str, text: &str) -> Result<()> {
        let open = self.open(path, OpenFlags::CREAT | OpenFlags::WRONLY | OpenFlags::TRUNC)?;
        assert_eq!(open.write(&mut Source::kernel(text.as_bytes()))?, text.len());
        Ok(())
    }

    pub fn create(&self, path: &str, kind: super::inode::NewKind) -> Result<Path> {
        namespace::create(&self.context, &self.context.cwd, path.as_bytes(), kind, 0o777)
    }

    pub fn mkdir(&self, path: &str) -> Result<Path> {
        self.create(path, super::inode::NewKind::Directory)
    }

    pub fn unlink(&self, path: &str) -> Result<()> {
        namespace::remove(&self.context, &self.context.cwd, path.as_bytes(), Removal::File)
    }

    pub fn rmdir(&self, path: &str) -> Result<()> {
        namespace::remove(&self.context, &self.context.cwd, path.as_bytes(), Removal::Directory)
    }

    pub fn rename_as(&self, old: &str, new: &str, kind: RenameKind) -> Result<()> {
        let cwd = &self.context.cwd;
        namespace::rename(&self.context, (cwd, old.as_bytes()), (cwd, new.as_bytes()), kind)
    }

    pub fn rename(&self, old: &str, new: &str) -> Result<()> {
        self.rename_as(old, new, RenameKind::Replace)
    }

    pub fn link(&self, old: &str, new: &str) -> Result<()> {
        let target = self.walk_nofollow(old)?;
        namespace::link(&self.context, &target, &self.context.cwd, new.as_bytes())
    }

    /// Names in a directory, sorted.
    pub fn list(&self, path: &str) -> Vec<String> {
        let mut names = Vec::new();
        let directory = self.walk(path).unwrap();
        directory
            .inode()
            .list(&mut |name, _, _| names.push(String::from_utf8(name.to_vec()).unwrap()))
            .unwrap();
        names.sort();
        names
    }

    pub fn nlink(&self, path: &str) -> u32 {
        self.walk_nofollow(path).unwrap().inode().attributes().nlink
    }

    pub fn name_of(&self, path: &Path) -> String {
        String::from_utf8(path.absolute_name(&self.context.root).display()).unwrap()
    }
}

/// The whole content, from the beginning.
pub fn read_all(open: &OpenFile) -> Result<String> {
    let mut bytes = std::vec![0; 1 << 16];
    let mut done = 0;
    loop {
        match open.file.read(&mut Sink::kernel(&mut bytes[done..]), done as u64)? {
            0 => break,
            count => done += count,
        }
    }
    Ok(String::from_utf8(bytes[..done].to_vec()).unwrap())
}

/// The error of something that must fail.
pub fn error<T>(result: Result<T>) -> Errno {
    match result {
        Ok(_) => panic!("succeeded"),
        Err(error) => error,
    }
}
