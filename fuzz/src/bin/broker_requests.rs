//! Fuzzes the broker of a host directory, which is mounted to be written to.
#![no_main]

use std::cell::RefCell;
use std::path::Path;

use thaw_sandbox::fuzzing::BrokerRequests;

/// What the requests act on; it is made anew from time to time.
struct Scratch {
    directory: tempfile::TempDir,
    broker: BrokerRequests,
    runs: u32,
}

impl Scratch {
    fn new() -> Self {
        // In memory, where there is room.
        let parent = Path::new("/dev/shm");
        let parent = if parent.is_dir() { parent } else { Path::new("/tmp") };
        let directory = tempfile::Builder::new().prefix("thaw-fuzz-").tempdir_in(parent).unwrap();
        let served = directory.path().join("served");
        std::fs::create_dir_all(served.join("sub/deep")).unwrap();
        std::fs::write(served.join("file"), "content").unwrap();
        std::fs::write(directory.path().join("secret"), "secret").unwrap();
        std::os::unix::fs::symlink("../secret", served.join("out")).unwrap();
        std::os::unix::fs::symlink("file", served.join("link")).unwrap();
        let broker = BrokerRequests::new(&served).unwrap();
        Self { directory, broker, runs: 0 }
    }

    /// Nothing outside the served directory may have changed.
    fn check(&self) {
        let secret = self.directory.path().join("secret");
        assert_eq!(std::fs::read_to_string(secret).unwrap(), "secret");
        assert_eq!(std::fs::read_dir(self.directory.path()).unwrap().count(), 2);
    }
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::new());
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| SCRATCH.with_borrow_mut(|scratch| {
    scratch.broker.serve(bytes);
    scratch.check();
    scratch.runs += 1;
    if scratch.runs == 1000 {
        *scratch = Scratch::new();
    }
}));
