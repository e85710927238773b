//! Users by name, as /etc/passwd and /etc/group of the sandbox have them.

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::errno::{Errno, Result};
use crate::fs::Context;
use crate::fs::file::{OpenFile, OpenFlags};
use crate::fs::open::{How, open};
use crate::fs::walk::Resolve;
use crate::io::Sink;
use crate::task::Credentials;

/// Most bytes of such a file that are looked at.
const FILE_MAX: usize = 1 << 20;
/// Most supplementary groups of a user.
const GROUPS_MAX: usize = 256;

/// A user as the files know it.
struct Entry {
    uid: u32,
    gid: u32,
    name: Vec<u8>,
    home: Vec<u8>,
}

/// Somebody to act as.
pub struct User {
    /// Ids.
    pub credentials: Credentials,
    /// `HOME` and `USER`, if the files have them.
    pub environment: Vec<Vec<u8>>,
}

/// Who `user` is: a name or a number, perhaps with `:` and a group.
///
/// # Errors
/// `ENOENT`: the files do not know the name; others as for reading them.
pub fn find(context: &Context, user: &[u8]) -> Result<User> {
    let mut parts = user.splitn(2, |&byte| byte == b':');
    let (name, group) = (parts.next().unwrap_or_default(), parts.next());
    let entry = match (entry_of(context, name)?, number(name)) {
        (Some(entry), _) => entry,
        (None, Some(uid)) => Entry { uid, gid: 0, name: Vec::new(), home: Vec::new() },
        (None, None) => return Err(Errno::ENOENT),
    };
    let gid = match group {
        Some(group) => group_id(context, group)?.or(number(group)).ok_or(Errno::ENOENT)?,
        None => entry.gid,
    };
    let mut credentials = Credentials::of_user(entry.uid, gid);
    if group.is_none() && !entry.name.is_empty() {
        credentials.groups = groups_of(context, &entry.name)?;
    }
    let variable = |name: &[u8], value: &[u8]| [name, b"=", value].concat();
    let environment = match entry.name.is_empty() {
        true => Vec::new(),
        false => [variable(b"HOME", &entry.home), variable(b"USER", &entry.name)].to_vec(),
    };
    Ok(User { credentials, environment })
}

fn entry_of(context: &Context, user: &[u8]) -> Result<Option<Entry>> {
    let file = contents(context, b"/etc/passwd")?;
    let uid = number(user);
    Ok(lines(&file).find_map(|fields| {
        let [name, _, id, gid, _, home, ..] = fields[..] else { return None };
        let (id, gid) = (number(id)?, number(gid)?);
        let found = name == user || uid == Some(id);
        found.then(|| Entry { uid: id, gid, name: name.to_vec(), home: home.to_vec() })
    }))
}

fn group_id(context: &Context, group: &[u8]) -> Result<Option<u32>> {
    let file = contents(context, b"/etc/group")?;
    Ok(lines(&file).find_map(|fields| match fields[..] {
        [name, _, id, ..] if name == group => number(id),
        _ => None,
    }))
}

fn groups_of(context: &Context, user: &[u8]) -> Result<Vec<u32>> {
    let file = contents(context, b"/etc/group")?;
    let of_user = |fields: Vec<&[u8]>| match fields[..] {
        [_, _, id, members, ..] if members.split(|&byte| byte == b',').any(|one| one == user) => {
            number(id)
        }
        _ => None,
    };
    Ok(lines(&file).filter_map(of_user).take(GROUPS_MAX).collect())
}

/// Lines of fields with colons between them.
fn lines(file: &[u8]) -> impl Iterator<Item = Vec<&[u8]>> {
    file.split(|&byte| byte == b'\n').map(|line| line.split(|&byte| byte == b':').collect())
}

fn number(text: &[u8]) -> Option<u32> {
    let text = core::str::from_utf8(text).ok().filter(|text| !text.starts_with('+'))?;
    // The highest means "leave it" where ids are changed (chown(2)).
    text.parse().ok().filter(|&id| id != u32::MAX)
}

/// What a file has, up to a bound; nothing if there is none.
fn contents(context: &Context, path: &[u8]) -> Result<Vec<u8>> {
    let flags = OpenFlags::NONBLOCK;
    let how = How { flags, permissions: 0, resolve: Resolve::empty() };
    let file: Arc<OpenFile> = match open(context, &context.root, path, how) {
        Ok(file) => file,
        Err(Errno::ENOENT | Errno::ENOTDIR | Errno::EACCES) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    let mut chunk = alloc::vec![0; 4096];
    while bytes.len() < FILE_MAX {
        match file.read(&mut Sink::kernel(&mut chunk))? {
            0 => break,
            count => bytes.extend_from_slice(&chunk[..count]),
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_plain_numbers() {
        assert_eq!(number(b"1000"), Some(1000));
        for wrong in [&b"+5"[..], b"", b"-1", b"4294967295", b"4294967296", b"root", b"\xff"] {
            assert_eq!(number(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn fields_lie_between_colons() {
        let file = b"root:x:0:0:root:/root:/bin/sh\nbroken\n";
        let all: Vec<_> = lines(file).collect();
        assert_eq!(all[0][5], b"/root");
        assert_eq!(all[1], [&b"broken"[..]]);
    }
}
