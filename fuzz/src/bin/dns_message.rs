//! Fuzzes the DNS messages of a guest.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| thaw_sandbox::fuzzing::dns_message(bytes));
