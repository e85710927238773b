//! Fuzzes the freeze report of a sandbox's kernel.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| thaw_sandbox::fuzzing::freeze_report(bytes));
