//! Options of file systems: the text that mount(2) is given (tmpfs(5), devpts in the kernel's
//! Documentation/filesystems).

use alloc::format;
use alloc::string::String;

use crate::errno::{Errno, Result};
use crate::state::kernel;

/// Permissions of a tmpfs if none are said.
pub(super) const TMPFS_MODE: u32 = 0o1777;

/// Options that each kind knows.
pub(super) const TMPFS: &[&str] =
    &["size", "nr_blocks", "nr_inodes", "mode", "uid", "gid", "huge", "inode32", "inode64"];
pub(super) const RAMFS: &[&str] = &["mode"];
pub(super) const DEVPTS: &[&str] = &["newinstance", "ptmxmode", "mode", "gid", "uid", "max"];
pub(super) const NONE: &[&str] = &[];

/// What options say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Options {
    /// Most pages of files; 0: any number.
    pub pages: Option<u64>,
    /// Most files; 0: any number.
    pub inodes: Option<u64>,
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    /// Permissions of `ptmx` in devpts.
    pub ptmx_mode: Option<u32>,
}

/// Reads options that are separated by commas; `EINVAL` for one that is not known.
pub(super) fn parse(text: &[u8], known: &[&str]) -> Result<Options> {
    let text = core::str::from_utf8(text).map_err(|_| Errno::EINVAL)?;
    let mut options = Options::default();
    for option in text.split(',').filter(|option| !option.is_empty()) {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        if !known.contains(&name) {
            return Err(Errno::EINVAL);
        }
        options.take(name, value)?;
    }
    Ok(options)
}

impl Options {
    fn take(&mut self, name: &str, value: &str) -> Result<()> {
        match name {
            "size" => self.pages = Some(size(value)?.div_ceil(PAGE)),
            "nr_blocks" => self.pages = Some(bytes(value)?),
            "nr_inodes" => self.inodes = Some(bytes(value)?),
            "mode" => self.mode = Some(octal(value)? & 0o7777),
            "ptmxmode" => self.ptmx_mode = Some(octal(value)? & 0o7777),
            "uid" => self.uid = Some(id(value)?),
            "gid" => self.gid = Some(id(value)?),
            // Pages are of one size, and so are inode numbers.
            "huge" if value == "never" => {}
            "inode32" | "inode64" | "newinstance" if value.is_empty() => {}
            _ => return Err(Errno::EINVAL),
        }
        Ok(())
    }

    /// As `/proc/mounts` shows those of a tmpfs (`shmem_show_options`, mm/shmem.c).
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        if let Some(pages) = self.pages {
            text += &format!(",size={}k", pages * (PAGE / 1024));
        }
        if let Some(inodes) = self.inodes {
            text += &format!(",nr_inodes={inodes}");
        }
        if let Some(mode) = self.mode.filter(|&mode| mode != TMPFS_MODE) {
            text += &format!(",mode={mode:03o}");
        }
        text + &ids(self.uid.filter(|&id| id != 0), self.gid.filter(|&id| id != 0))
    }

    /// As `/proc/mounts` shows those of devpts (`devpts_show_options`, fs/devpts/inode.c).
    pub(super) fn text_of_terminals(&self) -> String {
        let (mode, ptmx_mode) = (self.mode.unwrap_or(0o600), self.ptmx_mode.unwrap_or(0));
        ids(self.uid, self.gid) + &format!(",mode={mode:03o},ptmxmode={ptmx_mode:03o}")
    }
}

const PAGE: u64 = 4096;

fn ids(uid: Option<u32>, gid: Option<u32>) -> String {
    let text = |name: &str, id: Option<u32>| id.map(|id| format!(",{name}={id}"));
    text("uid", uid).unwrap_or_default() + &text("gid", gid).unwrap_or_default()
}

fn octal(value: &str) -> Result<u32> {
    u32::from_str_radix(value, 8).map_err(|_| Errno::EINVAL)
}

fn id(value: &str) -> Result<u32> {
    value.parse().ok().filter(|&id| id != u32::MAX).ok_or(Errno::EINVAL)
}

/// A size in bytes, or a share of all memory.
fn size(value: &str) -> Result<u64> {
    let Some(percent) = value.strip_suffix('%') else { return bytes(value) };
    let percent: u64 = percent.parse().map_err(|_| Errno::EINVAL)?;
    let total = kernel().memory_total();
    (total / 100).checked_mul(percent).ok_or(Errno::EINVAL)
}

/// A number with a unit (`memparse`, lib/cmdline.c).
fn bytes(value: &str) -> Result<u64> {
    let units = ["k", "m", "g", "t"];
    let lower = value.to_ascii_lowercase();
    let unit = units.iter().position(|unit| lower.ends_with(unit));
    let (number, shift) = match unit {
        Some(unit) => (&lower[..lower.len() - 1], 10 * (unit as u32 + 1)),
        None => (&lower[..], 0),
    };
    let number: u64 = number.parse().map_err(|_| Errno::EINVAL)?;
    let number = number.checked_mul(1 << shift).ok_or(Errno::EINVAL)?;
    // What is shown is a number of bytes, too.
    if number > i64::MAX as u64 { Err(Errno::EINVAL) } else { Ok(number) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_a_tmpfs() {
        let options = parse(b"size=1m,mode=0700,uid=7,,nr_inodes=2k", TMPFS).unwrap();
        assert_eq!(options.pages, Some(256));
        assert_eq!(options.text(), ",size=1024k,nr_inodes=2048,mode=700,uid=7");
        assert_eq!(parse(b"", TMPFS).unwrap().text(), "");
        assert_eq!(parse(b"mode=1777,uid=0", TMPFS).unwrap().text(), "");
        for wrong in
            ["size", "size=x", "size=-1", "mode=9", "uid=4294967295", "else=1", "size=99999999t"]
        {
            assert_eq!(parse(wrong.as_bytes(), TMPFS), Err(Errno::EINVAL), "{wrong}");
        }
    }

    #[test]
    fn options_of_terminals() {
        let options = parse(b"newinstance,ptmxmode=0666,mode=620", DEVPTS).unwrap();
        assert_eq!(options.text_of_terminals(), ",mode=620,ptmxmode=666");
        assert_eq!(parse(b"size=1", DEVPTS), Err(Errno::EINVAL));
    }
}
