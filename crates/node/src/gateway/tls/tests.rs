use super::inbox::{HEADER, Inbox, RECORD_MAX};
use super::keys::{Cipher, Keys, Kind, PLAIN_MAX, Version};
use super::*;
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::crypto::ring::{ALL_CIPHER_SUITES, default_provider};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore, ServerConfig, SupportedCipherSuite};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex, split};
use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};
use tokio_rustls::{TlsAcceptor, TlsConnector, client};

const PATIENCE: Duration = Duration::from_secs(60);

type Client = client::TlsStream<TcpStream>;

fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|byte| (byte % 251) as u8).collect()
}

// A server of rustls whose connections are taken apart, and a client of rustls.

fn suites() -> impl Iterator<Item = SupportedCipherSuite> {
    // The key of the tests is no RSA key.
    ALL_CIPHER_SUITES.iter().copied().filter(|suite| !format!("{suite:?}").contains("_RSA_"))
}

fn suite(name: &str) -> SupportedCipherSuite {
    suites().find(|suite| format!("{suite:?}").ends_with(name)).expect("there is such a suite")
}

/// Both ends of a connection with this suite.
async fn connected(suite: SupportedCipherSuite) -> (Client, Tls) {
    let CertifiedKey { cert, signing_key } =
        generate_simple_self_signed(["a.example".to_owned()]).unwrap();
    let mut provider = default_provider();
    provider.cipher_suites = vec![suite];
    let provider = Arc::new(provider);
    let versions = [suite.version()];
    let server = ServerConfig::builder_with_provider(provider.clone());
    let server = server.with_protocol_versions(&versions).unwrap().with_no_client_auth();
    let key = signing_key.serialize_der().try_into().unwrap();
    let mut server = server.with_single_cert(vec![cert.der().clone()], key).unwrap();
    server.enable_secret_extraction = true;
    let mut roots = RootCertStore::empty();
    roots.add(cert.der().clone()).unwrap();
    let client = ClientConfig::builder_with_provider(provider).with_protocol_versions(&versions);
    let client = client.unwrap().with_root_certificates(roots).with_no_client_auth();

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let name = ServerName::try_from("a.example").unwrap();
    let (accepted, _) = listener.accept().await.unwrap();
    let connecting = TlsConnector::from(Arc::new(client)).connect(name, stream);
    let accepting = TlsAcceptor::from(Arc::new(server)).accept(Records::new(accepted));
    let (client, server) = tokio::join!(connecting, accepting);
    (client.unwrap(), Tls::agreed(server.unwrap()))
}

/// Another daemon goes on with a connection.
fn next(server: Tls) -> Tls {
    let state = State::from_bytes(&server.state().expect("it is settled").to_bytes()).unwrap();
    let socket = server.socket().unwrap().try_clone_to_owned().unwrap();
    drop(server);
    Tls::inherited(TcpStream::from_std(socket.into()).unwrap(), state)
}

/// The same, where nothing is left to read.
fn taken_over(mut server: Tls) -> Tls {
    assert_eq!(server.settle().unwrap(), b"");
    next(server)
}

/// The records of a text, for the test to send them piece by piece.
fn sealed(client: &mut Client, text: &[u8]) -> Vec<u8> {
    let tls = client.get_mut().1;
    tls.set_buffer_limit(None);
    tls.writer().write_all(text).unwrap();
    let mut records = Vec::new();
    while tls.wants_write() {
        tls.write_tls(&mut records).unwrap();
    }
    records
}

async fn send(client: &mut Client, bytes: &[u8]) {
    client.get_mut().0.write_all(bytes).await.unwrap();
    // It is there with one read, most likely.
    sleep(Duration::from_millis(30)).await;
}

async fn read(stream: &mut (impl AsyncRead + Unpin), count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    timeout(PATIENCE, stream.read_exact(&mut bytes)).await.expect("it comes").unwrap();
    bytes
}

fn poll_once<T>(poll: impl FnOnce(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
    poll(&mut Context::from_waker(Waker::noop()))
}

/// Writes until the socket takes nothing more; how much was taken.
async fn fill(server: &mut Tls) -> usize {
    let (all, mut taken) = (bytes(32 << 20), 0);
    loop {
        let rest = &all[taken..];
        let write = poll_fn(|context| Pin::new(&mut *server).poll_write(context, rest));
        match timeout(Duration::from_millis(300), write).await {
            Ok(count) => taken += count.unwrap(),
            Err(_) => return taken,
        }
    }
}

#[tokio::test]
async fn connections_of_every_suite_go_on_from_the_midst() {
    for suite in suites() {
        let (mut client, mut server) = connected(suite).await;
        client.write_all(b"before").await.unwrap();
        assert_eq!(read(&mut server, 6).await, b"before");
        // Half a record is under way, another one is decrypted and not read, and others are not sent.
        let (first, second) = (sealed(&mut client, &bytes(10_000)), sealed(&mut client, b"second"));
        let (half, rest) = second.split_at(20);
        send(&mut client, &[&first, half].concat()).await;
        assert_eq!(read(&mut server, 100).await, bytes(100));
        let taken = fill(&mut server).await;
        assert_eq!(server.settle().unwrap(), bytes(10_000)[100..], "{suite:?}");
        let state = server.state().unwrap();
        assert_eq!(state.inbox.held(), half);
        assert!(!state.unsent.is_empty());
        let mut server = next(server);
        let (heard, flushed) = tokio::join!(read(&mut client, taken), server.flush());
        flushed.unwrap();
        assert!(heard == bytes(taken), "{suite:?}");
        send(&mut client, rest).await;
        assert_eq!(read(&mut server, 6).await, b"second");
        exchange(client, server).await;
    }
}

/// Megabytes there and back, with restarts all the time, to the end of both sides.
async fn exchange(client: Client, mut server: Tls) {
    let echoed = tokio::spawn(async move {
        let (mut buffer, mut reads) = (vec![0; 5000], 0);
        loop {
            let count = server.read(&mut buffer).await.unwrap();
            if count == 0 {
                break;
            }
            server.write_all(&buffer[..count]).await.unwrap();
            reads += 1;
            // A record takes four reads, so that now and then a part of one is not read.
            if reads % 19 == 0 {
                let unread = server.settle().unwrap();
                server = next(server);
                server.write_all(&unread).await.unwrap();
            }
            server.flush().await.unwrap();
        }
        // Both ends are told again to whoever comes.
        server = taken_over(server);
        assert_eq!(server.read(&mut buffer).await.unwrap(), 0);
        server.shutdown().await.unwrap();
        server = taken_over(server);
        server.shutdown().await.unwrap();
        let sequence = server.state().unwrap().write.sequence;
        server.write_all(b"late").await.unwrap_err();
        assert_eq!(server.state().unwrap().write.sequence, sequence);
    });
    let (mut from, mut to) = split(client);
    let all = bytes(2 << 20);
    let sent = async {
        to.write_all(&all).await.unwrap();
        to.shutdown().await.unwrap();
    };
    let mut heard = Vec::new();
    let (_, end) = tokio::join!(sent, timeout(PATIENCE, from.read_to_end(&mut heard)));
    end.unwrap().expect("it is told that nothing more comes");
    assert!(heard == all);
    echoed.await.unwrap();
}

/// Wherever a record is cut, rustls has nothing of it.
#[tokio::test]
async fn a_record_may_be_cut_at_each_byte() {
    for name in ["TLS13_AES_128_GCM_SHA256", "ECDSA_WITH_AES_128_GCM_SHA256"] {
        for cut in 0.. {
            let (mut client, mut server) = connected(suite(name)).await;
            let record = sealed(&mut client, b"text");
            send(&mut client, &record[..cut]).await;
            let mut buffer = [0; 100];
            let mut buffer = ReadBuf::new(&mut buffer);
            let read_now = poll_fn(|context| Pin::new(&mut server).poll_read(context, &mut buffer));
            let was_whole = timeout(Duration::from_millis(30), read_now).await.is_ok();
            assert_eq!(was_whole, cut == record.len());
            let mut server = taken_over(server);
            if was_whole {
                break;
            }
            send(&mut client, &record[cut..]).await;
            assert_eq!(read(&mut server, 4).await, b"text", "{name}, {cut}");
        }
    }
}

/// The client does not need to see it, so that only the bytes show that no nonce comes twice.
#[tokio::test]
async fn nonces_go_on_where_rustls_has_ended() {
    for name in ["ECDSA_WITH_AES_128_GCM_SHA256", "ECDSA_WITH_AES_256_GCM_SHA384"] {
        let (client, mut server) = connected(suite(name)).await;
        let mut starts = Vec::new();
        let mut socket = client.into_inner().0;
        for number in 1..9_u64 {
            server.write_all(b"text").await.unwrap();
            server.flush().await.unwrap();
            if number % 2 == 0 {
                server = taken_over(server);
            }
            // Its header, the nonce, the text and the tag.
            let record = read(&mut socket, HEADER + 8 + 4 + 16).await;
            let nonce = u64::from_be_bytes(record[HEADER..][..8].try_into().unwrap());
            starts.push(nonce ^ number);
        }
        starts.dedup();
        assert_eq!(starts.len(), 1, "{name}");
    }
}

#[tokio::test]
async fn a_client_that_only_listens_and_one_that_only_speaks_go_on() {
    let (mut client, mut server) = connected(suite("TLS13_AES_256_GCM_SHA384")).await;
    server.shutdown().await.unwrap();
    let mut server = taken_over(server);
    assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
    client.write_all(b"after the end").await.unwrap();
    assert_eq!(read(&mut server, 13).await, b"after the end");
    server.shutdown().await.unwrap();
    server.write_all(b"late").await.unwrap_err();
    // Nor is it told why something fails afterwards.
    let mut record = sealed(&mut client, b"text");
    *record.last_mut().unwrap() ^= 1;
    send(&mut client, &record).await;
    server.read(&mut [0]).await.unwrap_err();
    assert_eq!(server.state().unwrap().unsent, b"");
    fails(&mut server, "changed on its way").await;

    let (mut client, mut server) = connected(suite("TLS13_AES_256_GCM_SHA384")).await;
    client.shutdown().await.unwrap();
    assert_eq!(server.read(&mut [0]).await.unwrap(), 0);
    let mut server = taken_over(server);
    assert_eq!(server.read(&mut [0]).await.unwrap(), 0);
    server.write_all(b"after the end").await.unwrap();
    server.flush().await.unwrap();
    assert_eq!(read(&mut client, 13).await, b"after the end");
}

/// What a client hears when a connection has failed.
async fn told(client: &mut Client) -> String {
    let error = timeout(PATIENCE, client.read(&mut [0; 9])).await.unwrap().unwrap_err();
    error.to_string()
}

async fn fails(server: &mut Tls, why: &str) {
    for _ in 0..2 {
        let error = timeout(PATIENCE, server.read(&mut [0; 100])).await.unwrap().unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
    server.write_all(b"x").await.unwrap_err();
    server.settle().unwrap_err();
}

#[tokio::test]
async fn bytes_that_were_changed_are_refused() {
    for suite in suites() {
        for place in [HEADER, HEADER + 9, HEADER + 25] {
            let (mut client, server) = connected(suite).await;
            let mut server = taken_over(server);
            let mut record = sealed(&mut client, b"transfer 1 coin");
            record[place] ^= 1;
            send(&mut client, &record).await;
            fails(&mut server, "changed on its way").await;
            assert!(told(&mut client).await.contains("BadRecordMac"), "{suite:?}");
        }
    }
}

#[tokio::test]
async fn a_record_that_comes_twice_is_refused() {
    for suite in suites() {
        let (mut client, server) = connected(suite).await;
        let mut server = taken_over(server);
        let record = sealed(&mut client, b"once");
        send(&mut client, &[&record[..], &record].concat()).await;
        assert_eq!(read(&mut server, 4).await, b"once");
        fails(&mut server, "changed on its way").await;
    }
}

#[tokio::test]
async fn new_keys_are_agreed_on_before_and_end_the_connection_afterwards() {
    let (mut client, mut server) = connected(suite("TLS13_AES_128_GCM_SHA256")).await;
    client.get_mut().1.refresh_traffic_keys().unwrap();
    client.write_all(b"new").await.unwrap();
    assert_eq!(read(&mut server, 3).await, b"new");
    // The answer to them is still to be sent.
    let mut server = taken_over(server);
    server.write_all(b"newer").await.unwrap();
    server.flush().await.unwrap();
    assert_eq!(read(&mut client, 5).await, b"newer");
    client.get_mut().1.refresh_traffic_keys().unwrap();
    client.write_all(b"newest").await.unwrap();
    fails(&mut server, "wants new keys").await;
    assert!(told(&mut client).await.contains("InternalError"));
}

#[tokio::test]
async fn new_keys_are_not_answered_after_the_end() {
    let (mut client, mut server) = connected(suite("TLS13_AES_128_GCM_SHA256")).await;
    server.shutdown().await.unwrap();
    client.get_mut().1.refresh_traffic_keys().unwrap();
    client.write_all(b"new").await.unwrap();
    assert_eq!(read(&mut server, 3).await, b"new");
    let mut server = taken_over(server);
    assert_eq!(server.state().unwrap().unsent, b"");
    // The socket takes nothing more, either.
    server.flush().await.unwrap();
    server.shutdown().await.unwrap();
    client.write_all(b"newer").await.unwrap();
    assert_eq!(read(&mut server, 5).await, b"newer");
}

#[tokio::test]
async fn a_connection_that_has_failed_is_not_left() {
    let (mut client, mut server) = connected(suite("TLS13_AES_128_GCM_SHA256")).await;
    let mut record = sealed(&mut client, b"text");
    *record.last_mut().unwrap() ^= 1;
    send(&mut client, &record).await;
    server.read(&mut [0]).await.unwrap_err();
    server.settle().unwrap_err();
    assert!(server.socket().is_none() && server.state().is_none());
}

#[tokio::test]
async fn an_end_that_nobody_has_told_is_an_error() {
    let (mut client, server) = connected(suite("TLS13_AES_128_GCM_SHA256")).await;
    let mut server = taken_over(server);
    let record = sealed(&mut client, b"text");
    send(&mut client, &record[..record.len() - 1]).await;
    client.get_mut().0.shutdown().await.unwrap();
    let error = server.read(&mut [0]).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
}

// The record layer alone.

fn keys(kind: (Version, Cipher), sequence: u64) -> Keys {
    Keys::new(kind, &vec![3; kind.1.key_len()], &[5; 12], sequence).unwrap()
}

/// A session whose keys begin with these records, and what its client seals.
fn session(kind: (Version, Cipher), room: usize) -> (Session<DuplexStream>, DuplexStream, Keys) {
    let (near, far) = duplex(room);
    let state = State {
        read: keys(kind, 0),
        write: keys(kind, 0),
        inbox: Inbox::default(),
        unsent: Vec::new(),
        has_ended: false,
        peer_has_ended: false,
    };
    (Session::new(near, state), far, keys(kind, 0))
}

const TLS13: (Version, Cipher) = (Version::Tls13, Cipher::Aes128Gcm);
const TLS12: (Version, Cipher) = (Version::Tls12, Cipher::Aes128Gcm);

/// What is read of a client that sends these records, or why nothing is.
async fn heard(version: (Version, Cipher), records: &[(Kind, &[u8])]) -> Result<Vec<u8>, String> {
    let (mut session, mut client, mut keys) = session(version, 1 << 20);
    let mut all = Vec::new();
    for (kind, content) in records {
        keys.seal(*kind, content, &mut all).unwrap();
    }
    client.write_all(&all).await.unwrap();
    let mut heard = Vec::new();
    let read = timeout(PATIENCE, session.read_to_end(&mut heard)).await.unwrap();
    read.map(|_| heard).map_err(|error| error.to_string())
}

const END: (Kind, &[u8]) = (Kind::ALERT, &[1, 0]);

#[tokio::test]
async fn records_say_what_they_are() {
    for version in [TLS12, TLS13] {
        let heard = async |records: &[(Kind, &[u8])]| heard(version, records).await;
        let (text, nothing) = ((Kind::DATA, &b"text"[..]), (Kind::DATA, &b""[..]));
        assert_eq!(heard(&[text, nothing, text, END]).await.unwrap(), b"texttext");
        let canceled: (Kind, &[u8]) = (Kind::ALERT, &[1, 90]);
        assert_eq!(heard(&[text, canceled, END, text]).await.unwrap(), b"text");
        for nothing in [nothing, canceled] {
            let error = heard(&[nothing; 33]).await.unwrap_err();
            assert_eq!(error, broken::Broken::Empty.to_string());
        }
        let often: Vec<_> = [&[nothing; 32][..], &[text], &[nothing; 32], &[END]].concat();
        assert_eq!(heard(&often).await.unwrap(), b"text");
        let alert: (Kind, &[u8]) = (Kind::ALERT, &[2, 40]);
        assert!(heard(&[text, alert]).await.unwrap_err().contains("alert 40"));
        let hello: (Kind, &[u8]) = (Kind::HANDSHAKE, &[1, 0, 0, 0]);
        assert!(heard(&[hello]).await.unwrap_err().contains("new keys"));
        for content in [&b""[..], &[1], &[1, 0, 0]] {
            let error = heard(&[(Kind::ALERT, content)]).await.unwrap_err();
            assert!(error.contains("cannot come after the handshake"), "{error}");
        }
        let error = heard(&[(Kind(20), &[1])]).await.unwrap_err();
        assert!(error.contains("cannot come after the handshake"), "{error}");
    }
    // Zeros behind the kind fill a record up.
    assert_eq!(heard(TLS13, &[(Kind(0), b"text\x17\0\0"), END]).await.unwrap(), b"text");
    let error = heard(TLS13, &[(Kind(0), b"\0\0")]).await.unwrap_err();
    assert!(error.contains("cannot come after the handshake"), "{error}");
}

#[tokio::test]
async fn bytes_that_are_no_record_are_refused() {
    for (sent, why) in [
        (&b"GET / HTTP/1.1\r\n"[..], "no record of TLS"),
        (&[23, 2], "no record of TLS"),
        (&[23, 3, 3, 0x48, 1], "longer than any may be"),
        (&[23, 3, 3, 0, 0], "changed on its way"),
        (&[23, 3, 3, 0, 2, 1, 1], "changed on its way"),
        (&[20, 3, 3, 0, 1, 1], "cannot come after the handshake"),
    ] {
        let (mut session, mut client, _) = session(TLS13, 1 << 10);
        client.write_all(sent).await.unwrap();
        let error = session.read(&mut [0]).await.unwrap_err().to_string();
        assert!(error.contains(why), "{sent:?}: {error}");
    }
}

#[tokio::test]
async fn a_record_holds_no_more_than_it_may() {
    for kind in [TLS12, TLS13, (Version::Tls13, Cipher::ChaCha20Poly1305)] {
        let (mut session, mut client, mut theirs) = session(kind, 1 << 20);
        let (full, mut record) = (bytes(PLAIN_MAX), Vec::new());
        theirs.seal(Kind::DATA, &full, &mut record).unwrap();
        client.write_all(&record).await.unwrap();
        assert_eq!(read(&mut session, PLAIN_MAX).await, full);
        // Each of ours holds as much, and the rest is written later.
        let long = bytes(PLAIN_MAX + 1);
        let taken = session.write(&long).await.unwrap();
        assert_eq!(taken, PLAIN_MAX);
        let mut record = read(&mut client, record.len()).await;
        let (kind, place) = keys(kind, 0).open(&mut record).unwrap();
        assert!(kind == Kind::DATA && record[place] == full);
    }
}

#[test]
fn more_than_a_record_may_hold_is_refused_within_one_that_is_short_enough() {
    // As of a client that keeps to the rules of TLS 1.2 for what is sealed only.
    let mut record = vec![23, 3, 3, 0, 0];
    let content = [&bytes(PLAIN_MAX + 1)[..], &[23]].concat();
    let length = content.len() + 16;
    record[3..].copy_from_slice(&u16::try_from(length).unwrap().to_be_bytes());
    let key = ring::aead::UnboundKey::new(&ring::aead::AES_128_GCM, &[3; 16]).unwrap();
    let (nonce, mut content) = (ring::aead::Nonce::assume_unique_for_key([5; 12]), content);
    let aad = ring::aead::Aad::from(record.clone());
    let sealing = ring::aead::LessSafeKey::new(key);
    sealing.seal_in_place_append_tag(nonce, aad, &mut content).unwrap();
    record.extend(content);
    assert_eq!(keys(TLS13, 0).open(&mut record), Err(broken::Broken::TooLong));
}

#[tokio::test]
async fn a_record_is_sealed_once_however_often_it_is_sent() {
    let (mut session, mut client, _) = session(TLS13, 100);
    let text = bytes(1000);
    assert_eq!(session.write(&text).await.unwrap(), 1000);
    assert_eq!(session.state().write.sequence, 1);
    // Nothing more is taken before it is sent.
    for _ in 0..3 {
        let written = poll_once(|context| Pin::new(&mut session).poll_write(context, b"more"));
        assert!(written.is_pending());
        assert!(poll_once(|context| Pin::new(&mut session).poll_flush(context)).is_pending());
    }
    assert_eq!(session.state().write.sequence, 1);
    assert_eq!(session.state().unsent.len(), HEADER + 1000 + 1 + 16 - 100);
    let sent = tokio::spawn(async move { session.write_all(b"more").await.map(|()| session) });
    let mut records = read(&mut client, HEADER + 1000 + 1 + 16 + HEADER + 4 + 1 + 16).await;
    let (first, second) = records.split_at_mut(HEADER + 1000 + 1 + 16);
    let mut keys = keys(TLS13, 0);
    let (_, place) = keys.open(first).unwrap();
    assert_eq!(first[place], text);
    let (_, place) = keys.open(second).unwrap();
    assert_eq!(second[place], *b"more");
    sent.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_session_on_which_nothing_moves_needs_no_memory() {
    let (mut session, mut client, mut theirs) = session(TLS13, 1 << 20);
    let (text, mut record) = (bytes(PLAIN_MAX), Vec::new());
    theirs.seal(Kind::DATA, &text, &mut record).unwrap();
    client.write_all(&record).await.unwrap();
    assert_eq!(read(&mut session, PLAIN_MAX).await, text);
    assert!(poll_once(|context| session.poll_open(context)).is_pending());
    session.write_all(&text).await.unwrap();
    session.flush().await.unwrap();
    let unsent = session.state.unsent.capacity();
    assert_eq!((unsent, session.plain.capacity(), session.state.inbox.capacity()), (0, 0, 0));
}

#[tokio::test]
async fn keys_seal_no_more_than_they_may() {
    for (kind, max) in
        [(TLS12, 1 << 24), (TLS13, 1 << 24), ((Version::Tls13, Cipher::ChaCha20Poly1305), u64::MAX)]
    {
        let (mut session, mut client, _) = session(kind, 1 << 10);
        session.state.write = keys(kind, max - 2);
        session.write_all(b"last").await.unwrap();
        let error = session.write_all(b"more").await.unwrap_err().to_string();
        assert!(error.contains("as many records as they may"), "{error}");
        session.shutdown().await.unwrap();
        drop(session);
        let mut theirs = keys(kind, max - 2);
        let mut sent = Vec::new();
        client.read_to_end(&mut sent).await.unwrap();
        let mut records = Inbox::with(&sent).unwrap();
        for (kind, content) in [(Kind::DATA, &b"last"[..]), (Kind::ALERT, &[2, 80])] {
            let length = records.first().unwrap().expect("it is whole");
            let record = records.peek_mut(length);
            let (found, place) = theirs.open(record).unwrap();
            assert_eq!((found, &record[place]), (kind, content));
            records.consume(length);
        }
        assert_eq!(records.held(), b"");
        keys(kind, max).seal(Kind::ALERT, &[2, 80], &mut Vec::new()).unwrap_err();
        // There is no number for another record of the client's, either.
        let opened = keys(kind, u64::MAX).open(&mut [23, 3, 3, 0, 0]);
        assert_eq!(opened, Err(broken::Broken::WornOut));
    }
}

// What rustls reads of.

/// A stream of which each read has one piece; an empty one is nothing for now.
struct Pieces(VecDeque<Vec<u8>>);

impl AsyncRead for Pieces {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.0.pop_front() {
            Some(piece) if piece.is_empty() => Poll::Pending,
            Some(piece) => {
                buffer.put_slice(&piece);
                Poll::Ready(Ok(()))
            }
            None => Poll::Ready(Ok(())),
        }
    }
}

fn records_of(pieces: &[&[u8]]) -> Records<Pieces> {
    Records::new(Pieces(pieces.iter().map(|piece| piece.to_vec()).collect()))
}

/// One read with that much room; `None`: there is nothing for now.
fn read_one(records: &mut Records<Pieces>, room: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; room];
    let mut buffer = ReadBuf::new(&mut bytes);
    let read = poll_once(|context| Pin::new(records).poll_read(context, &mut buffer));
    let count = buffer.filled().len();
    match read {
        Poll::Ready(read) => read.map(|()| bytes[..count].to_vec()).ok(),
        Poll::Pending => None,
    }
}

fn record(length: u16) -> Vec<u8> {
    let [high, low] = length.to_be_bytes();
    let body = bytes(usize::from(length));
    [&[23, 3, 3, high, low][..], &body].concat()
}

#[test]
fn records_are_whole_wherever_they_are_cut() {
    let (first, second) = (record(20), record(30));
    let both = [&first[..], &second].concat();
    for cut in 1..both.len() {
        let mut records = records_of(&[&both[..cut], b"", &both[cut..], b""]);
        let mut read = Vec::new();
        let mut waits = 0;
        while waits < 2 {
            match read_one(&mut records, 100) {
                Some(bytes) => read.push(bytes),
                None => waits += 1,
            }
        }
        assert_eq!(read, [first.clone(), second.clone()], "{cut}");
    }
}

#[test]
fn a_read_has_bytes_of_one_record_only() {
    let (first, second) = (record(20), record(30));
    let mut records = records_of(&[&[&first[..], &second[..9]].concat(), b""]);
    let mut read = Vec::new();
    while read.len() < first.len() {
        read.extend(read_one(&mut records, 7).unwrap());
    }
    assert_eq!(read, first);
    assert_eq!(read_one(&mut records, 7), None);
    let (_, inbox) = records.into_parts().unwrap();
    assert_eq!(inbox.held(), &second[..9]);
    // A reader that has begun with one cannot give it back.
    let mut records = records_of(&[&first]);
    read_one(&mut records, 7).unwrap();
    assert!(records.into_parts().is_err());
}

#[test]
fn the_end_within_a_record_is_the_end() {
    for cut in 0..record(20).len() {
        let mut records = records_of(&[&record(10), &record(20)[..cut]]);
        assert_eq!(read_one(&mut records, 100).unwrap(), record(10));
        if cut > 0 {
            assert_eq!(read_one(&mut records, 100).unwrap(), b"", "{cut}");
        }
    }
}

#[test]
fn bytes_that_are_no_record_are_given_on_at_once() {
    for sent in [&b"G"[..], b"GET / HTTP/1.1", &[22, 9], &[23, 3, 3, 0x48, 1, 9]] {
        let mut records = records_of(&[&record(10), sent, b"more"]);
        assert_eq!(read_one(&mut records, 100).unwrap(), record(10));
        assert_eq!(read_one(&mut records, 100).unwrap(), sent);
        assert_eq!(read_one(&mut records, 100).unwrap(), b"more");
        assert!(records.into_parts().is_err());
    }
    // The longest one of TLS 1.2 is one.
    let long = record(u16::try_from(RECORD_MAX - HEADER).unwrap());
    let mut records = records_of(&[&long[..9000], b"", &long[9000..]]);
    assert_eq!(read_one(&mut records, RECORD_MAX), None);
    assert_eq!(read_one(&mut records, RECORD_MAX).unwrap(), long);
}
