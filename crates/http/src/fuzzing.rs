//! The parser of bytes of clients, for the fuzzers of `fuzz/` and for the test below. It exists
//! in tests and with the feature `fuzzing` only.

use crate::head;

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
}
