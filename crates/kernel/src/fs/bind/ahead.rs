//! Paths in a bound directory or a volume that are about to be looked up, name by name: the host is asked once for
//! what all of their names stand for.

use alloc::vec::Vec;

use thaw_abi::bind::{BIND_WALK, Walked};
use thaw_abi::control::FileAttributes;

use super::{Bind, Moment};
use crate::errno::{Errno, Result};
use crate::fs::path::join;
use crate::fs::walk::{NAME_MAX, PATH_MAX};

/// Most names that the host is asked for at once.
const NAMES_MAX: usize = 32;

/// What the host has said of the names of a path.
#[derive(Default)]
pub struct Ahead {
    since: Option<Moment>,
    /// The host could not say anything.
    has_failed: bool,
    /// Paths below the bound directory, and what they lead to.
    found: Vec<(Vec<u8>, Result<FileAttributes>)>,
}

impl Ahead {
    fn has_failed_since(&self, now: Moment) -> bool {
        self.has_failed && self.since == Some(now)
    }

    fn get(&self, path: &[u8], now: Moment) -> Option<Result<FileAttributes>> {
        let known = self.since == Some(now);
        let mut found = self.found.iter().filter(|_| known);
        found.find(|(known, _)| known == path).map(|(_, found)| *found)
    }
}

impl Bind {
    /// What the host has said of a path in this system call, if it was asked ahead.
    pub(super) fn told_ahead(&self, path: &[u8]) -> Option<Result<FileAttributes>> {
        let now = self.moment();
        self.ahead.borrow_mut().get(path, now)
    }

    /// Asks for the names of `path` from the directory `base` on, if there are several to be looked up.
    pub(super) fn ask_ahead(&self, base: Vec<u8>, path: &[u8]) {
        if self.ahead.borrow_mut().has_failed_since(self.moment()) {
            return;
        }
        let names = names_to_look_up(path, base.len());
        let [first, _, ..] = &names[..] else { return };
        let next = join(&base, first);
        if self.told_ahead(&next).is_some() {
            return;
        }
        let whole = names.iter().fold(base.clone(), |path, name| join(&path, name));
        let skip = base.split(|&byte| byte == b'/').filter(|name| !name.is_empty()).count();
        let reply = self.ask(BIND_WALK, [skip as u64, 0, 0], &whole);
        let found = match &reply {
            Ok(reply) => told(reply, base, &names, |found| self.give_owner(found)),
            // A file system does not answer: nobody asks it for each name of the path.
            Err(Errno::ETIMEDOUT) => Some(alloc::vec![(next, Err(Errno::ETIMEDOUT))]),
            Err(_) => None,
        };
        let (since, has_failed) = (Some(self.moment()), found.is_none());
        *self.ahead.borrow_mut() = Ahead { since, has_failed, found: found.unwrap_or_default() };
    }
}

/// The names of a path up to the first one that goes elsewhere, as many as the host takes behind a path
/// of `before` bytes.
fn names_to_look_up(path: &[u8], before: usize) -> Vec<&[u8]> {
    let names = path.split(|&byte| byte == b'/').filter(|name| !name.is_empty());
    let mut len = before;
    let fits = |name: &&[u8]| {
        len += 1 + name.len();
        name.len() <= NAME_MAX && len < PATH_MAX
    };
    let forward = names.take_while(|name| !matches!(*name, b"." | b"..")).take_while(fits);
    forward.take(NAMES_MAX).collect()
}

/// What a reply says of each path, with the owners that `give_owner` sets; `None`: it says nothing that
/// can be relied upon.
fn told(
    reply: &[u8],
    base: Vec<u8>,
    names: &[&[u8]],
    give_owner: impl Fn(&mut FileAttributes),
) -> Option<Vec<(Vec<u8>, Result<FileAttributes>)>> {
    let (head, found) = reply.split_at_checked(size_of::<Walked>())?;
    let head: Walked = bytemuck::pod_read_unaligned(head);
    let mut found = found.chunks_exact(size_of::<FileAttributes>());
    let mut path = base;
    let mut told = Vec::new();
    for name in names {
        path = join(&path, name);
        let mut attributes =
            found.next().map(bytemuck::pod_read_unaligned).ok_or(Errno(head.errno));
        attributes.iter_mut().for_each(&give_owner);
        let is_end = attributes.is_err();
        if is_end && head.errno == 0 {
            break;
        }
        told.push((path.clone(), attributes));
        if is_end {
            break;
        }
    }
    Some(told)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use bytemuck::Zeroable;

    fn reply(errno: i32, inodes: &[u64]) -> Vec<u8> {
        let mut bytes = bytemuck::bytes_of(&Walked { errno, reserved: 0 }).to_vec();
        for &inode in inodes {
            let attributes = FileAttributes { inode, ..FileAttributes::zeroed() };
            bytes.extend_from_slice(bytemuck::bytes_of(&attributes));
        }
        bytes
    }

    #[test]
    fn names_are_looked_up_until_the_path_turns_back() {
        let names = |path| names_to_look_up(path, 0);
        assert_eq!(names(b"a//b/"), [b"a", b"b"]);
        assert_eq!(names(b"a/b/../c"), [b"a", b"b"]);
        assert_eq!(names(b"./a"), [b""; 0]);
        assert_eq!(names(&b"x/".repeat(100)).len(), NAMES_MAX);
    }

    /// What is behind a link may be longer than any path.
    #[test]
    fn no_request_is_longer_than_a_path() {
        let name = [b'x'; NAME_MAX];
        let long = [&name[..], b"/"].concat().repeat(16);
        assert_eq!(names_to_look_up(&long, 0).len(), 15);
        assert_eq!(names_to_look_up(&long, PATH_MAX - 300).len(), 1);
        assert!(names_to_look_up(&[b'x'; NAME_MAX + 1], 0).is_empty());
        assert_eq!(names_to_look_up(&[b"a/", &[b'x'; 8000][..]].concat(), 0), [b"a"]);
    }

    #[test]
    fn a_reply_tells_of_each_path_and_of_the_first_that_is_missing() {
        let told = |reply: Vec<u8>| {
            let found = told(&reply, b"base".to_vec(), &[b"a", b"b", b"c"], |_| ()).unwrap();
            found
                .into_iter()
                .map(|(path, found)| (path, found.map(|found| found.inode)))
                .collect::<Vec<_>>()
        };
        let path = |path: &str| path.as_bytes().to_vec();
        let missing = Err(Errno::ENOENT);
        assert_eq!(
            told(reply(Errno::ENOENT.0, &[7])),
            [(path("base/a"), Ok(7)), (path("base/a/b"), missing)]
        );
        assert_eq!(told(reply(0, &[7])), [(path("base/a"), Ok(7))]);
        let all = [(path("base/a"), Ok(1)), (path("base/a/b"), Ok(2)), (path("base/a/b/c"), Ok(3))];
        assert_eq!(told(reply(0, &[1, 2, 3])), all);
        // A host that says more than it was asked for.
        assert_eq!(told(reply(0, &[1, 2, 3, 4])), all);
        let owned = super::told(&reply(0, &[1]), vec![], &[b"a"], |found| found.uid = 7).unwrap();
        assert_eq!(owned[0].1.map(|found| found.uid), Ok(7));
        assert!(super::told(&[0; 7], Vec::new(), &[], |_| ()).is_none());
        assert_eq!(super::told(&[0; 20], Vec::new(), &[b"a"], |_| ()), Some(vec![]));
    }
}
