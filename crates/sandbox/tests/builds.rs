//! Zygotes of older kernel builds.

mod common;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::config;
use thaw_abi::protocol::ProtocolNote;
use thaw_sandbox::{
    BuildError, BuildPools, KERNEL_ELF, Kernel, KernelError, OLDER_BUILDS_MAX, PoolConfig,
    ZygoteConfig, ZygotePool,
};

/// How long something that has to happen may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// An older build: its ELF file, with another linker's name, and its build id.
fn older(number: u8) -> (Vec<u8>, [u8; 32]) {
    let mut elf = KERNEL_ELF.to_vec();
    let owner = b"\x03\0\0\0GNU\0";
    let at = elf.windows(owner.len()).position(|window| window == owner).unwrap() + owner.len();
    elf[at] ^= number;
    elf[at + 1] = !elf[at + 1];
    let build = *blake3::hash(&elf).as_bytes();
    (elf, build)
}

fn pools(idle_after: Duration) -> BuildPools {
    let zygotes = ZygoteConfig { kernel: Kernel::embedded().unwrap(), ..config() };
    let present = ZygotePool::new(PoolConfig { size: 1, zygotes }).unwrap();
    BuildPools::with_idle_after(Arc::new(present), idle_after)
}

fn never_read() -> Result<Vec<u8>, Infallible> {
    panic!("it is there already")
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn zygotes_of_an_older_build_run_that_build() {
    let pools = pools(Duration::from_secs(60));
    let present = Kernel::embedded().unwrap().build_id();
    assert!(pools.is_present(present));
    assert!(Arc::ptr_eq(&pools.of(present, never_read).unwrap(), pools.present()));

    let (elf, build) = older(1);
    let pool = pools.of(build, || Ok::<_, Infallible>(elf.clone())).unwrap();
    assert!(!pool.has_parent(), "nothing runs before it is wanted");
    let zygote = pool.take().unwrap();
    let program = std::fs::read(format!("/proc/{}/exe", zygote.pid())).unwrap();
    assert_eq!(program, elf[..program.len()]);
    assert_ne!(program, KERNEL_ELF[..program.len()]);
    assert_eq!(pool.parent().unwrap().kernel_build_id(), build);
    // It keeps none ready for the next.
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!((pool.stats().ready, pool.stats().target), (0, 0));
    // All who ask while it lives have the same.
    assert!(Arc::ptr_eq(&pools.of(build, never_read).unwrap(), &pool));
    assert_eq!(pools.older_count(), 1);
    drop((pool, zygote));
    assert_eq!(pools.older_count(), 0);
}

#[test]
fn an_older_parent_ends_when_it_is_idle_and_its_sandboxes_live_on() {
    let pools = pools(Duration::from_millis(100));
    let (elf, build) = older(1);
    let pool = pools.of(build, || Ok::<_, Infallible>(elf)).unwrap();
    let zygote = pool.take().unwrap();
    let first = pool.parent().unwrap().pid();
    wait_until("the idle parent is let go", || !pool.has_parent());
    assert!(!zygote.has_ended());
    zygote.verify().unwrap();
    // The next is one of another parent.
    let next = pool.take().unwrap();
    assert_ne!(pool.parent().unwrap().pid(), first);
    drop(zygote);
    let is_gone = || !std::path::Path::new(&format!("/proc/{first}")).exists();
    wait_until("the parent ends with the last that it has made", is_gone);
    assert!(!next.has_ended());
    assert!(pools.present().has_parent(), "that of the present build stays");
}

#[test]
fn only_so_many_older_builds_have_zygotes_at_a_time() {
    let pools = pools(Duration::from_secs(60));
    let of = |number: usize| {
        let (elf, build) = older(number as u8);
        pools.of(build, || Ok::<_, Infallible>(elf))
    };
    let mut held: Vec<_> = (0..OLDER_BUILDS_MAX).map(|number| of(number).unwrap()).collect();
    let refused = of(OLDER_BUILDS_MAX).unwrap_err();
    assert!(matches!(refused, BuildError::TooMany), "{refused}");
    // Those that are known can be had.
    of(0).unwrap();
    // One that nobody holds any more makes room.
    held.pop();
    of(OLDER_BUILDS_MAX).unwrap();
}

#[test]
fn a_kernel_that_cannot_be_used_makes_no_pool() {
    let pools = pools(Duration::from_secs(60));
    let (elf, build) = older(1);
    let missing = pools.of(build, || Err("it is not there")).unwrap_err();
    assert_eq!(missing.to_string(), "it is not there");
    let (other, _) = older(2);
    let wrong = pools.of(build, || Ok::<_, Infallible>(other)).unwrap_err();
    assert!(matches!(wrong, BuildError::Kernel(KernelError::NotThatBuild)), "{wrong}");
    let mut silent = elf;
    let note = bytemuck::bytes_of(&ProtocolNote::OWN);
    let at = silent.windows(note.len()).position(|window| window == note).unwrap();
    silent[at + note.len() - 4] = 99;
    let build = *blake3::hash(&silent).as_bytes();
    let refused = pools.of(build, || Ok::<_, Infallible>(silent)).unwrap_err();
    let expected = KernelError::Protocol { build, version: Some(99) };
    assert!(matches!(refused, BuildError::Kernel(error) if error == expected));
    assert_eq!(pools.older_count(), 0);
}
