//! Formats that programs parse.

use std::string::String;
use std::vec::Vec;

use alloc::sync::Arc;

use super::{cpu, memory, settings, status, system, zombie};
use crate::errno::Errno;
use crate::mm::backing::FileBacking;
use crate::mm::backing::MmapSource;
use crate::mm::vma::{Vma, VmaFlags};
use crate::task::current_process;
use crate::task::process::{ExitStatus, Life, Remains};
use crate::testing::Sandbox;
use core::sync::atomic::Ordering::Relaxed;

fn line(vma: &Vma, name: &str) -> String {
    let mut text = Vec::new();
    memory::line(&mut text, vma, name.as_bytes());
    String::from_utf8(text).unwrap()
}

#[test]
fn maps_has_the_columns_of_linux() {
    let file = FileBacking {
        source: MmapSource::Blob(1),
        path: Arc::from(&b"/usr/lib/libc.so.6"[..]),
        device: 0x103,
        inode: 1234,
        writable: false,
        holder: None,
    };
    let mut vma = Vma {
        start: 0x7f5c_8d20_0000,
        end: 0x7f5c_8d22_6000,
        prot: 1,
        flags: VmaFlags::empty(),
        file: Some(Arc::new(file)),
        offset: 0x2000,
    };
    assert_eq!(
        line(&vma, "/usr/lib/libc.so.6"),
        "7f5c8d200000-7f5c8d226000 r--p 00002000 01:03 1234                       /usr/lib/libc.so.6\n"
    );
    vma.file = None;
    vma.prot = 7;
    vma.flags = VmaFlags::SHARED;
    vma.start = 0x40_0000;
    vma.end = 0x40_1000;
    assert_eq!(line(&vma, ""), "00400000-00401000 rwxs 00000000 00:00 0 \n");
    assert_eq!(line(&vma, "a\nb").trim_end().rsplit(' ').next(), Some("a\\012b"));
}

#[test]
fn a_uuid_says_that_it_is_random() {
    let text = String::from_utf8(settings::uuid([0xff; 16])).unwrap();
    assert_eq!(text, "ffffffff-ffff-4fff-bfff-ffffffffffff\n");
    assert_eq!(settings::uuid([0; 16]), b"00000000-0000-4000-8000-000000000000\n");
}

#[test]
fn cpuinfo_describes_this_machine() {
    let text = cpu::describe(2);
    let host = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        String::from(line.split_once(": ").unwrap().1)
    };
    for name in ["vendor_id", "cpu family", "model\t", "model name", "stepping"] {
        assert_eq!(field(&text, name), field(&host, name), "{name}");
    }
    // The host adds flags of its own making, and may hide some.
    let known: Vec<String> = field(&text, "flags").split(' ').map(String::from).collect();
    let theirs: Vec<String> = field(&host, "flags").split(' ').map(String::from).collect();
    for flag in ["sse2", "avx", "avx2", "fsgsbase", "xsavec", "syscall", "nx", "lm", "rdtscp"] {
        assert_eq!(known.iter().any(|f| f == flag), theirs.iter().any(|f| f == flag), "{flag}");
    }
    assert_eq!(text.matches("processor\t: ").count(), 2);
    assert_eq!(cpu::cpu_list(0b1), "0");
    assert_eq!(cpu::cpu_list(0b1111), "0-3");
    assert_eq!(cpu::cpu_list(0b1011_0110), "1-2,4-5,7");
    assert_eq!(cpu::cpu_list(u64::MAX), "0-63");
    assert_eq!(cpu::cpu_mask(0b11), "00000003");
    assert_eq!(cpu::cpu_mask(1 << 33), "00000002,00000000");
}

#[test]
fn a_zombie_keeps_its_name_its_owner_and_its_cpu_time() {
    let _sandbox = Sandbox::new();
    let process = current_process();
    process.threads.borrow_mut().clear();
    let mut name = [0; 16];
    name[..6].copy_from_slice(b"foo.sh");
    process.remains.set(Remains { name, ..Default::default() });
    process.ended_cpu_ns.store(2_340_000_000, Relaxed);
    process.life.set(Life::Zombie(ExitStatus::Exited(7)));
    let text = |file: &[u8]| {
        String::from_utf8(zombie::content(file, &process, &Default::default()).unwrap()).unwrap()
    };
    let stat = text(b"stat");
    assert_eq!(stat.split(' ').count(), 52, "{stat}");
    assert!(stat.starts_with("1 (foo.sh) Z 0 "), "{stat}");
    assert_eq!((stat.split(' ').nth(13), stat.split(' ').nth(51)), (Some("234"), Some("1792\n")));
    let status = text(b"status");
    for line in ["Name:\tfoo.sh\n", "Uid:\t", "FDSize:\t0\n", "nonvoluntary_ctxt_switches:"] {
        assert!(status.contains(line), "{line} in {status}");
    }
    assert!(!status.contains("VmSize") && !status.contains("Umask"), "{status}");
    assert_eq!(text(b"limits").into_bytes(), status::limits(&process).unwrap());
    assert!(text(b"io").contains("read_bytes: 0") && text(b"maps").is_empty());
    assert_eq!(zombie::check(b"smaps_rollup"), Err(Errno::ESRCH));
    assert_eq!(zombie::content(b"mounts", &process, &Default::default()), Err(Errno::EINVAL));
    assert_eq!(zombie::name_line(&process), b"foo.sh\n");
}

#[test]
fn stat_and_loadavg_tell_of_cpu_time_that_was_used() {
    let _sandbox = Sandbox::new();
    let read =
        |file: fn() -> crate::errno::Result<Vec<u8>>| String::from_utf8(file().unwrap()).unwrap();
    let user = || read(system::stat)["cpu  ".len()..].split(' ').next().unwrap().parse::<u64>();
    let before = user().unwrap();
    // As of a child that has ended.
    crate::task::thread::current_arc().count(7_000_000_000);
    assert!(user().unwrap() >= before + 700);
    let text = read(system::stat);
    for line in ["cpu0 ", "ctxt ", "processes ", "procs_running 1"] {
        assert!(text.contains(line), "{line} in {text}");
    }
    let loads = read(system::loadavg);
    assert_eq!((loads.split(' ').count(), loads.split(' ').nth(3)), (5, Some("1/1")), "{loads}");
    assert_eq!(read(system::uptime).matches('.').count(), 2);
    assert_eq!(["0.50", "12.00"], [1024, 12 * 2048].map(system::shown_load));
}
