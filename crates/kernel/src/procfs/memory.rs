//! `/proc/PID/{maps,smaps,smaps_rollup,statm}`.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt::Write;

use crate::errno::Result;
use crate::mm::vma::{Vma, VmaFlags};
use crate::task::{Process, Thread};

const PROT_READ: u32 = 1;
const PROT_WRITE: u32 = 2;
const PROT_EXEC: u32 = 4;

/// Appends one line of `maps`.
pub(super) fn line(text: &mut Vec<u8>, vma: &Vma, name: &[u8]) {
    let flag = |on: bool, letter: char| if on { letter } else { '-' };
    let (device, inode) = vma.file.as_ref().map_or((0, 0), |file| (file.device, file.inode));
    let major = ((device >> 8) & 0xfff) | ((device >> 32) & !0xfff);
    let minor = (device & 0xff) | ((device >> 12) & !0xff);
    let offset = if vma.file.is_some() { vma.offset } else { 0 };
    let mut line = format!(
        "{:08x}-{:08x} {}{}{}{} {offset:08x} {major:02x}:{minor:02x} {inode}",
        vma.start,
        vma.end,
        flag(vma.prot & PROT_READ != 0, 'r'),
        flag(vma.prot & PROT_WRITE != 0, 'w'),
        flag(vma.prot & PROT_EXEC != 0, 'x'),
        if vma.flags.contains(VmaFlags::SHARED) { 's' } else { 'p' },
    );
    line.push(' ');
    if !name.is_empty() {
        // fs/proc/task_mmu.c: names stand in column 73.
        while line.len() < 73 {
            line.push(' ');
        }
    }
    text.extend_from_slice(line.as_bytes());
    for &byte in name {
        match byte {
            b'\n' => text.extend_from_slice(b"\\012"),
            byte => text.push(byte),
        }
    }
    text.push(b'\n');
}

/// `maps`.
pub(super) fn maps(_: &Thread, process: &Process) -> Result<Vec<u8>> {
    let mut text = Vec::new();
    process.mm().for_each_mapping(&mut |view| line(&mut text, view.vma, view.name));
    Ok(text)
}

/// Bytes of a process' memory by kind. Which pages are resident is known to the
/// host alone, so what may be touched counts as resident and what may not does
/// not.
#[derive(Default)]
#[allow(missing_docs)]
pub struct Totals {
    pub size: u64,
    pub resident: u64,
    pub file: u64,
    pub shared: u64,
    pub code: u64,
    pub data: u64,
    pub stack: u64,
    pub locked: u64,
}

impl Totals {
    fn add(&mut self, vma: &Vma) {
        let len = vma.len();
        self.size += len;
        if vma.flags.contains(VmaFlags::LOCKED) {
            self.locked += len;
        }
        if vma.prot == 0 {
            return;
        }
        self.resident += len;
        if vma.file.is_some() {
            self.file += len;
        }
        if vma.flags.contains(VmaFlags::SHARED) {
            self.shared += len;
        } else if vma.prot & PROT_WRITE != 0 {
            self.data += len;
        }
        if vma.prot & PROT_EXEC != 0 {
            self.code += len;
        }
        if vma.flags.contains(VmaFlags::STACK) {
            self.stack += len;
        }
    }

    /// Of a process.
    pub fn of(process: &Process) -> Self {
        let mut totals = Totals::default();
        process.mm().for_each_mapping(&mut |view| totals.add(view.vma));
        totals
    }
}

fn details(text: &mut Vec<u8>, totals: &Totals) {
    let private = totals.resident - totals.shared.min(totals.resident);
    let (dirty, clean) = if totals.data > 0 { (private, 0) } else { (0, private) };
    let mut lines = String::new();
    for (name, bytes) in [
        ("Rss", totals.resident),
        ("Pss", totals.resident),
        ("Shared_Clean", totals.shared),
        ("Shared_Dirty", 0),
        ("Private_Clean", clean),
        ("Private_Dirty", dirty),
        ("Referenced", totals.resident),
        ("Anonymous", totals.resident - totals.file),
        ("LazyFree", 0),
        ("AnonHugePages", 0),
        ("ShmemPmdMapped", 0),
        ("FilePmdMapped", 0),
        ("Shared_Hugetlb", 0),
        ("Private_Hugetlb", 0),
        ("Swap", 0),
        ("SwapPss", 0),
        ("Locked", totals.locked),
    ] {
        // Writing to a string cannot fail.
        let _ = writeln!(lines, "{:<16}{:>8} kB", format!("{name}:"), bytes / 1024);
    }
    text.extend_from_slice(lines.as_bytes());
}

fn vm_flags(vma: &Vma) -> String {
    let mut flags = String::from("VmFlags:");
    for (on, name) in [
        (vma.prot & PROT_READ != 0, "rd"),
        (vma.prot & PROT_WRITE != 0, "wr"),
        (vma.prot & PROT_EXEC != 0, "ex"),
        (vma.flags.contains(VmaFlags::SHARED), "sh"),
        (true, "mr"),
        (true, "mw"),
        (true, "me"),
        (vma.flags.contains(VmaFlags::STACK), "gd"),
        (vma.flags.contains(VmaFlags::WIPE_ON_FORK), "wf"),
        (vma.flags.contains(VmaFlags::DONT_FORK), "dc"),
        (true, "sd"),
    ] {
        if on {
            flags.push(' ');
            flags.push_str(name);
        }
    }
    flags.push_str(" \n");
    flags
}

/// `smaps`.
pub(super) fn smaps(_: &Thread, process: &Process) -> Result<Vec<u8>> {
    let mut text = Vec::new();
    process.mm().for_each_mapping(&mut |view| {
        line(&mut text, view.vma, view.name);
        let mut totals = Totals::default();
        totals.add(view.vma);
        let sizes = format!(
            "Size:           {:>8} kB\nKernelPageSize:        4 kB\nMMUPageSize:           4 kB\n",
            totals.size / 1024
        );
        text.extend_from_slice(sizes.as_bytes());
        details(&mut text, &totals);
        text.extend_from_slice(b"THPeligible:           0\n");
        text.extend_from_slice(vm_flags(view.vma).as_bytes());
    });
    Ok(text)
}

/// `smaps_rollup`.
pub(super) fn smaps_rollup(_: &Thread, process: &Process) -> Result<Vec<u8>> {
    let (mut first, mut last) = (u64::MAX, 0);
    process.mm().for_each_mapping(&mut |view| {
        first = first.min(view.vma.start);
        last = last.max(view.vma.end);
    });
    let mut text = format!("{first:08x}-{last:08x} ---p 00000000 00:00 0 ").into_bytes();
    text.resize(73, b' ');
    text.extend_from_slice(b"[rollup]\n");
    details(&mut text, &Totals::of(process));
    Ok(text)
}

/// `statm`, in pages.
pub(super) fn statm(_: &Thread, process: &Process) -> Result<Vec<u8>> {
    let totals = Totals::of(process);
    let pages = |bytes: u64| bytes / 4096;
    let text = format!(
        "{} {} {} {} 0 {} 0\n",
        pages(totals.size),
        pages(totals.resident),
        pages(totals.file),
        pages(totals.code),
        pages(totals.data)
    );
    Ok(text.into_bytes())
}
