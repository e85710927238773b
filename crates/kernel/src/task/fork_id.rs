//! Random number generators of libraries that tell a copy of themselves by its
//! process id.
//!
//! OpenSSL, GnuTLS and libgcrypt keep a generator in memory and seed it anew when
//! getpid(2) returns something else than before: they have been forked. A thawed
//! copy has the id of the original, so that copies would draw the same keys. To
//! these libraries, and to nobody else, getpid(2) therefore returns a number that
//! changes with every thaw. Who asks is seen from where the C library's getpid(),
//! which does nothing but the system call, returns to: into one of their files, or
//! into the function of OpenSSL that a program has linked in and exports, as
//! Node.js does.

use alloc::sync::Arc;

use super::process::{PID_MAX, Process};
use crate::mm::AddressSpace;
use crate::mm::backing::FileBacking;
use crate::mm::elf_symbols::Symbols;
use crate::mm::vma::Vma;
use crate::platform::user::UserAddress;

/// How the names of their files begin.
const LIBRARIES: [&[u8]; 3] = [b"libcrypto.so", b"libgnutls.so", b"libgcrypt.so"];

/// Functions of OpenSSL 3 and 1.1.1 that look at the process id, or that compilers
/// put such functions into.
const FUNCTIONS: [&[u8]; 5] = [
    b"ossl_prov_drbg_generate",
    b"ossl_drbg_get_seed",
    b"ossl_rand_drbg_new",
    b"RAND_DRBG_generate",
    b"openssl_get_fork_id",
];

/// How many thaws in a row are told apart: ids stay positive.
const GENERATIONS: u64 = 256;

/// The id of a process as the code sees it that called with this stack pointer, in
/// a copy that has been thawed `generation` times.
pub fn process_id(process: &Process, generation: u64, stack: UserAddress) -> u64 {
    let pid = u64::from(process.pid.number_in(&process.pid_namespace));
    if generation == 0 || !is_asked_by_generator(&process.mm(), stack) {
        return pid;
    }
    pid + generation % GENERATIONS * u64::from(PID_MAX)
}

fn is_asked_by_generator(mm: &AddressSpace, stack: UserAddress) -> bool {
    let Ok(caller) = stack.read::<u64>() else { return false };
    if let Some(known) = mm.generator_callers.get(caller) {
        return known;
    }
    let is_generator = is_generator(mm, caller).unwrap_or(false);
    mm.generator_callers.add(caller, is_generator);
    is_generator
}

/// Whether code at an address is that of a generator; `None` for code of no file.
fn is_generator(mm: &AddressSpace, address: u64) -> Option<bool> {
    let file = mm.find(address)?.file?;
    if is_library(&file.path) {
        return Some(true);
    }
    let symbols = Symbols::of_file_at(start_of(mm, &file)?)?;
    let mut functions = FUNCTIONS.iter().filter_map(|name| symbols.find(name));
    Some(functions.any(|function| function.contains(&address)))
}

/// Where the first byte of a file is mapped.
fn start_of(mm: &AddressSpace, file: &Arc<FileBacking>) -> Option<u64> {
    let shows_start = |area: &Vma| {
        area.offset == 0 && area.file.as_ref().is_some_and(|other| other.path == file.path)
    };
    mm.areas().into_iter().find(shows_start).map(|area| area.start)
}

fn is_library(path: &[u8]) -> bool {
    let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
    LIBRARIES.iter().any(|library| name.starts_with(library))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_known_by_name() {
        assert!(is_library(b"/usr/lib/x86_64-linux-gnu/libcrypto.so.3"));
        assert!(is_library(b"libgcrypt.so"));
        assert!(!is_library(b"/usr/lib/x86_64-linux-gnu/libc.so.6"));
        assert!(!is_library(b"/libcrypto.so/program"));
    }

    #[test]
    fn ids_stay_positive() {
        assert!(i32::try_from(GENERATIONS * u64::from(PID_MAX) - 1).is_ok());
    }
}
