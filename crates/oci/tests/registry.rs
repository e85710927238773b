//! Registries that do not mean well, or have other things than one thinks.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use thaw_oci::artifact::{DOCUMENT_VERSION, FunctionDocument, ImagePart, IndexPart, Section};
use thaw_oci::{Limits, OciError, PieceName, Pull, Reference, Registries};
use thaw_store::{ImageId, IndexId, KernelId, Name, Owner};

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

/// How a registry answers a request for the bytes of a blob from this one on.
type Answer = fn(blob: &[u8], from: usize) -> Vec<u8>;

/// Bytes that come over one connection.
const COMES: usize = 10_000;

/// Fetches a piece of so many connections from a registry that answers so. Says what it was asked for,
/// too: the first byte of each request.
fn fetched(connections: usize, answer: Answer) -> (Result<(), OciError>, Vec<usize>) {
    let blob: Vec<u8> = (0..COMES * connections).map(|at| (at / 7 + at / 1000) as u8).collect();
    let hex = thaw_oci::digest(&blob).trim_start_matches("sha256:").to_owned();
    let piece = PieceName { hex, size: blob.len() as u64 };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let (served, noted) = (blob.clone(), asked.clone());
    std::thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            let mut buffer = [0; 4096];
            let read = client.read(&mut buffer).unwrap_or(0);
            let head = String::from_utf8_lossy(&buffer[..read]).to_lowercase();
            let from = head.split_once("range: bytes=").and_then(|(_, rest)| rest.split_once('-'));
            let from = from.map_or(0, |(from, _)| from.parse().unwrap());
            noted.lock().unwrap().push(from);
            let _ = client.write_all(&answer(&served, from));
        }
    });
    let reference: Reference = format!("127.0.0.1:{port}/a:1").parse().unwrap();
    let (registries, directory) = (Registries::default(), tempfile::tempdir().unwrap());
    let pull = Pull {
        reference: &reference,
        registries: &registries,
        directory: directory.path(),
        owner: Owner::Caller,
        limits: Limits::default(),
    };
    let manifest = br#"{"schemaVersion": 2, "config": {"size": 1,
        "mediaType": "application/vnd.thaw.function.config.v1+json", "digest": "sha256:00"},
        "layers": []}"#;
    let manifest = String::from_utf8_lossy(manifest).replace(":00", &format!(":{}", piece.hex));
    let digest = thaw_oci::digest(manifest.as_bytes());
    let known = (document(), digest, false);
    let remote = pull.known_function(reference.registry(), manifest.into_bytes(), known).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let fetched = runtime.block_on(remote.fetch(Section::Image, &piece));
    let fetched = fetched.map(|bytes| assert!(bytes == blob, "its digest is right"));
    let asked = asked.lock().unwrap().clone();
    (fetched, asked)
}

fn document() -> FunctionDocument {
    FunctionDocument {
        version: DOCUMENT_VERSION,
        name: Name::new("shop").unwrap(),
        function: serde_json::Value::Null,
        index: IndexPart { id: IndexId([1; 32]), size: 1, contents: 0, naming: Vec::new() },
        image: ImagePart {
            id: ImageId([2; 32]),
            size: 1,
            kernel: KernelId([3; 32]),
            cpu_features: [0; 8],
        },
        kernel: None,
        run: None,
        pieces: None,
    }
}

/// An answer that promises all from this byte on, and breaks off.
fn part(status: &str, blob: &[u8], from: usize) -> Vec<u8> {
    part_of(COMES, status, blob, from)
}

/// The same after so many bytes.
fn part_of(comes: usize, status: &str, blob: &[u8], from: usize) -> Vec<u8> {
    let left = &blob[from..];
    let head =
        format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", left.len());
    [head.as_bytes(), &left[..left.len().min(comes)]].concat()
}

/// That of a registry that begins where it is told to.
fn status(blob: &[u8], from: usize) -> String {
    match from {
        0 => "200 OK".to_owned(),
        from => format!("206 Part\r\nContent-Range: bytes {from}-{0}/{0}", blob.len()),
    }
}

#[test]
fn a_registry_that_drips_over_many_connections_is_given_up() {
    let (fetched, asked) = fetched(9, |blob, from| part_of(1000, &status(blob, from), blob, from));
    assert!(fetched.unwrap_err().to_string().contains("broke off"));
    assert_eq!(asked, [0, 1000, 2000, 3000]);
}

#[test]
fn a_link_that_breaks_again_and_again_gets_a_piece_all_the_same() {
    let (fetched, asked) = fetched(9, |blob, from| part(&status(blob, from), blob, from));
    fetched.unwrap();
    // Nothing comes twice.
    assert!(asked.into_iter().eq((0..9).map(|number| number * COMES)));
}

#[test]
fn a_registry_that_always_begins_anew_is_given_up() {
    let (fetched, asked) = fetched(9, |blob, _| part("200 OK", blob, 0));
    assert!(fetched.unwrap_err().to_string().contains("broke off"));
    assert!(asked.into_iter().eq((0..4).map(|number| number.min(1) * COMES)));
}

#[test]
fn parts_that_begin_elsewhere_are_not_put_together() {
    let (fetched, asked) = fetched(2, |blob, from| match from {
        0 => part("200 OK", blob, 0),
        _ => part("206 Part\r\nContent-Range: bytes 0-9/10", blob, 0),
    });
    // It is asked for all of it again, of which the first half comes.
    assert!(fetched.unwrap_err().to_string().contains("broke off"));
    assert_eq!(asked, [0, COMES, 0, COMES, 0, COMES, 0]);
}

#[test]
fn a_piece_that_is_not_there_is_asked_for_once() {
    let (fetched, asked) =
        fetched(1, |_, _| b"HTTP/1.1 404 No\r\nConnection: close\r\n\r\n".to_vec());
    assert!(fetched.unwrap_err().to_string().contains("has no such image"));
    assert_eq!(asked, [0]);
}

/// Pieces that were not used for long are removed.
#[test]
fn a_piece_that_is_looked_for_counts_as_used() {
    let directory = tempfile::tempdir().unwrap();
    let piece = PieceName { hex: "00".repeat(32), size: 5 };
    let path = directory.path().join(&piece.hex);
    std::fs::write(&path, b"piece").unwrap();
    let file = std::fs::File::open(&path).unwrap();
    file.set_modified(std::time::UNIX_EPOCH).unwrap();
    assert!(thaw_oci::has_piece(directory.path(), &piece));
    assert!(file.metadata().unwrap().modified().unwrap() > std::time::UNIX_EPOCH);
    assert!(!thaw_oci::has_piece(directory.path(), &PieceName { size: 4, ..piece }));
}
