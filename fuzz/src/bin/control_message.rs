//! Fuzzes the messages that a sandbox sends on its control socket.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| thaw_sandbox::fuzzing::control_message(bytes));
