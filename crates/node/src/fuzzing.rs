//! The parsers of bytes of clients and function owners, one function each, for the
//! fuzzers of `fuzz/` and for the tests below. It exists in tests and with the
//! feature `fuzzing` only.

use std::path::Path;

use crate::config::FunctionConfig;
use crate::http::head;

/// The first bytes of a connection of a client.
pub fn http_head(bytes: &[u8]) {
    let Ok(head::Progress::Complete(found)) = head::parse(bytes) else { return };
    if let Some(function) = found.function() {
        assert!(!function.contains('.'), "{function}");
    }
    // Bytes that follow do not change where a request goes.
    let longer = [bytes, b"\r\nHost: other\r\n\r\n"].concat();
    assert_eq!(head::parse(&longer), Ok(head::Progress::Complete(found)));
}

/// The text of a `thaw.toml`.
pub fn function_config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match FunctionConfig::parse(Path::new("thaw.toml"), text) {
        Ok(config) => {
            // It is kept as JSON in the record of the function.
            let json = serde_json::to_value(&config).expect("a configuration can be written");
            let again: FunctionConfig = serde_json::from_value(json).expect("and read again");
            assert_eq!(again, config);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_mutate::survive;

    #[test]
    fn heads_are_survived() {
        let seeds: [&[u8]; 4] = [
            b"GET / HTTP/1.1\r\nHost: hello\r\nConnection: close\r\n\r\n",
            b"POST http://u:p@hello.example:80/x?y HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
            b"HEAD /x HTTP/1.0\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: [::1]:8080\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        ];
        survive("http_head", &seeds, 100_000, http_head);
    }

    #[test]
    fn configurations_are_survived() {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples");
        let mut seeds = Vec::new();
        for entry in std::fs::read_dir(directory).unwrap() {
            seeds.extend(std::fs::read(entry.unwrap().path().join("thaw.toml")));
        }
        assert!(seeds.len() > 5);
        let seeds: Vec<&[u8]> = seeds.iter().map(Vec::as_slice).collect();
        survive("function_config", &seeds, 20_000, function_config);
    }
}
