//! Registries that do not mean well, or have other things than one thinks.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use thaw_oci::{Limits, OciError, Pull, Reference, Registries};
use thaw_store::Owner;

/// Answers everything with `head` and then `body` again and again until it is `len` bytes long, and
/// counts what it got rid of.
fn server(head: &'static str, len: u64) -> (u16, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let sent = Arc::new(AtomicU64::new(0));
    let count = sent.clone();
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let count = count.clone();
            std::thread::spawn(move || answer(client, head, len, &count));
        }
    });
    (port, sent)
}

fn answer(mut client: TcpStream, head: &str, len: u64, sent: &AtomicU64) {
    let mut buffer = [0; 4096];
    let read = client.read(&mut buffer).unwrap_or(0);
    // Whether it needs a login is asked first.
    if buffer[..read].starts_with(b"GET /v2/ ") {
        let _ =
            client.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        return;
    }
    let _ = client.write_all(head.as_bytes());
    let piece = [b' '; 64 << 10];
    let mut left = len;
    while left > 0 {
        let now = left.min(piece.len() as u64) as usize;
        if client.write_all(&piece[..now]).is_err() {
            return;
        }
        sent.fetch_add(now as u64, Ordering::Relaxed);
        left -= now as u64;
    }
}

fn pull(port: u16) -> OciError {
    let directory = tempfile::tempdir().unwrap();
    let reference: Reference = format!("127.0.0.1:{port}/a:1").parse().unwrap();
    let (registries, owner, limits) = (Registries::default(), Owner::Caller, Limits::default());
    let (reference, registries, directory) = (&reference, &registries, directory.path());
    let pull = Pull { reference, registries, directory, owner, limits };
    pull.run(None, &mut |_| {}).unwrap_err()
}

/// The length is bounded while it comes, whether it is announced or not.
#[test]
fn a_manifest_without_end_is_not_read_to_its_end() {
    const MUCH: u64 = 1 << 30;
    for head in [
        "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n",
    ] {
        let (port, sent) = server(head, MUCH);
        let message = pull(port).to_string();
        assert!(message.contains("longer than 4 MiB"), "{message}");
        // What lies in the buffers of the connection is all that is sent besides.
        assert!(sent.load(Ordering::Relaxed) < MUCH / 8, "{}", sent.load(Ordering::Relaxed));
    }
}

#[test]
fn answers_that_are_errors_are_repeated_in_part() {
    let head = "HTTP/1.1 500 Oh\r\nConnection: close\r\n\r\n\x1b[2Jbroken";
    let (port, sent) = server(head, 1 << 30);
    let message = pull(port).to_string();
    assert!(message.contains("500") && !message.contains('\x1b'), "{message}");
    assert!(message.len() < 2000 && sent.load(Ordering::Relaxed) < 1 << 27, "{message}");
    let (port, _) = server("HTTP/1.1 404 No\r\nConnection: close\r\n\r\n", 0);
    assert!(pull(port).to_string().contains("has no such image"));
    let (port, _) = server("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", 100);
    assert!(pull(port).to_string().contains("makes no sense"));
}
