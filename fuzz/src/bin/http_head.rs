//! Fuzzes the first bytes of a client's connection.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| thaw_http::fuzzing::http_head(bytes));
