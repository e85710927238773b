//! What a program has written: files of the overlay that are not as the lower layer has them, and
//! new directories.
//!
//! Copies begin with them, and what a copy changes there dies with it: a build tells people.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;

use thaw_abi::control::{WRITTEN_PATHS_MAX, Written};

use super::FIRST_OWN_INO;
use super::directory::Entry;
use super::node::{Body, Node};

/// Most bytes of a path that is named; longer ones are counted only.
const PATH_LEN_MAX: usize = 512;
/// Most names that are looked at: a program may have made any number.
const LOOKED_AT_MAX: usize = 1 << 16;
/// Directories for what nobody expects to stay.
const PASSING: [&[u8]; 5] = [b"/tmp", b"/var/tmp", b"/run", b"/var/run", b"/var/cache"];
/// The kernel's own (`net::resolver_files`).
const PROVIDED: [&[u8]; 2] = [b"/etc/hosts", b"/etc/resolv.conf"];
/// Caches, wherever they are.
const CACHES: [&[u8]; 2] = [b"__pycache__", b".cache"];

/// What was written, in numbers, and the first paths, each with a NUL behind it; directories end
/// with a slash.
#[derive(Default)]
pub struct Found {
    /// The numbers.
    pub numbers: Written,
    /// The paths.
    pub paths: Vec<u8>,
    named: usize,
}

impl Node {
    /// What was written below this root directory. `is_mount_point` tells which directories
    /// others lie over.
    pub fn written(self: &Arc<Self>, is_mount_point: &dyn Fn(&Arc<Node>) -> bool) -> Found {
        let mut found = Found::default();
        let mut left = LOOKED_AT_MAX;
        let mut path: Vec<u8> = Vec::new();
        // A stack of its own, since a program may nest directories as deep as it likes: names with
        // the length of the path before them.
        let mut waiting = alloc::vec![(0, Box::<[u8]>::default(), self.clone())];
        while let Some((above, name, node)) = waiting.pop() {
            path.truncate(above);
            if !name.is_empty() {
                path.push(b'/');
                path.extend_from_slice(&name);
            }
            if is_mount_point(&node) || is_passing(&path) {
                continue;
            }
            let Body::Directory(entries) = &node.body else {
                if node.is_written_file() {
                    found.numbers.files += 1;
                    found.name(&path, b"");
                }
                continue;
            };
            let entries = entries.borrow_mut();
            if node.ino >= FIRST_OWN_INO && entries.changed.is_empty() {
                found.numbers.directories += 1;
                found.name(&path, b"/");
            }
            for (name, entry) in entries.changed.iter().rev() {
                let Entry::Node(below) = entry else { continue };
                if left == 0 {
                    found.numbers.is_partial = 1;
                    return found;
                }
                left -= 1;
                waiting.push((path.len(), name.clone(), below.clone()));
            }
        }
        found
    }

    fn is_written_file(&self) -> bool {
        match &self.body {
            Body::Regular(content) => content.borrow_mut().untouched().is_none(),
            _ => false,
        }
    }
}

impl Found {
    fn name(&mut self, path: &[u8], end: &[u8]) {
        if path.len() <= PATH_LEN_MAX && self.named < WRITTEN_PATHS_MAX {
            self.named += 1;
            self.paths.extend_from_slice(path);
            self.paths.extend_from_slice(end);
            self.paths.push(0);
        }
    }
}

fn is_passing(path: &[u8]) -> bool {
    let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    PASSING.contains(&path) || PROVIDED.contains(&path) || CACHES.contains(&name)
}
