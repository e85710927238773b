//! Programs that speak HTTP/2 badly: what they cannot make the gateway keep or do.

use super::*;

const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let [_, high, middle, low] = (payload.len() as u32).to_be_bytes();
    let mut frame = vec![high, middle, low, kind, flags];
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// `:status: 200`, by the static table (RFC 7541, appendix A).
const STATUS_200: &[u8] = &[0x88];

/// A program that waits for a request and then sends these bytes for as long as somebody takes them.
fn serve_raw(
    node: &Node,
    keys: &str,
    first: Vec<u8>,
    (pause, again): (Duration, Vec<u8>),
) -> (Arc<Service>, Arc<Threads>, Arc<AtomicUsize>) {
    let sent = Arc::new(AtomicUsize::new(0));
    let counted = sent.clone();
    let (service, threads) = node.serve("f", keys, move |guest| {
        let socket: &mut StdStream = guest.socket.get_mut();
        // The preface, and the first request behind it.
        let mut read = [0; 1024];
        if !socket.read(&mut read).is_ok_and(|count| count > 0) {
            return;
        }
        let mut reader = socket.try_clone().unwrap();
        std::thread::spawn(
            move || while reader.read(&mut [0; 4096]).is_ok_and(|count| count > 0) {},
        );
        std::thread::sleep(Duration::from_millis(50));
        let _ = socket.write_all(SETTINGS).and_then(|()| socket.write_all(&first));
        std::thread::sleep(pause);
        let many = again.repeat((32 << 10) / again.len().max(1));
        while !again.is_empty() && socket.write_all(&many).is_ok() {
            counted.fetch_add(many.len(), Ordering::SeqCst);
        }
        while socket.peek(&mut [0]).is_ok_and(|count| count > 0) {
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    (service, threads, sent)
}

/// Asks a program that answers badly: what the client is told, and how much the gateway has read.
fn ask_raw(first: Vec<u8>, again: Vec<u8>) -> (Result<Answer, h2::Error>, usize) {
    let node = Node::new(4);
    let keys = of_eight("").replace("[limits]", "[limits]\ntimeout = \"3s\"");
    let (_, _, sent) = serve_raw(&node, &keys, first, (Duration::ZERO, again));
    let answer = node.runtime.block_on(async { ask(&client(&node).await, grpc("/"), "x").await });
    (answer, sent.load(Ordering::SeqCst))
}

#[test]
fn floods_of_frames_end_the_connection_and_the_client_is_told() {
    let head = frame(1, 4, 1, STATUS_200);
    for (name, first, again) in [
        ("PING", vec![], frame(6, 0, 0, &[0; 8])),
        ("PING beside an answer", head.clone(), frame(6, 0, 0, &[0; 8])),
        ("SETTINGS", vec![], SETTINGS.to_vec()),
        ("WINDOW_UPDATE", vec![], frame(8, 0, 1, &[0, 0, 0, 1])),
        ("PRIORITY", vec![], frame(2, 0, 1, &[0, 0, 0, 0, 1])),
        ("frames of no known type", vec![], frame(99, 0, 0, b"x")),
        ("empty DATA", head.clone(), frame(0, 0, 1, b"")),
        ("padding", head.clone(), frame(0, 8, 1, &[3, 0, 0, 0])),
        ("interim answers", vec![], frame(1, 4, 1, &[0x08, 3, b'1', b'0', b'3'])),
        ("GOAWAY", vec![], frame(7, 0, 0, &[0, 0, 0, 1, 0, 0, 0, 0])),
    ] {
        let (answer, read) = ask_raw(first, again);
        let told = answer.as_ref().map(Answer::code);
        assert!(matches!(told, Ok("14") | Err(_)), "{name}: {answer:?}");
        // A bound, the socket's buffers, and three placements.
        assert!(read < 8 << 20, "{name}: {read}");
    }
}

#[test]
fn breaches_of_the_protocol_end_the_connection_and_the_client_is_told() {
    let head = frame(1, 4, 1, STATUS_200);
    let beyond: Vec<u8> = frame(0, 0, 1, &[7; 16 << 10]).repeat(100);
    let mut push = 2u32.to_be_bytes().to_vec();
    push.extend([0x82, 0x84, 0x86, 0x41, 1, b'f']);
    // A field of 60 KiB, twice: a literal with a new name (RFC 7541 §6.2.2, §5.1).
    let mut large = vec![0x88];
    for _ in 0..2 {
        large.extend([0, 1, b'x', 0x7f, 0xe1, 0xd3, 0x03]);
        large.extend(vec![b'y'; 60_000]);
    }
    let mut heads = frame(1, 0, 1, &large[..16_000]);
    large[16_000..].chunks(16_000).for_each(|part| heads.extend(frame(9, 0, 1, part)));
    heads.extend(frame(9, 4, 1, b""));
    for (name, first, again) in [
        ("a push", frame(5, 4, 1, &push), vec![]),
        ("data beyond the window", [head.clone(), beyond].concat(), vec![]),
        ("a large head", heads, vec![]),
        ("a head without an end", frame(1, 0, 1, STATUS_200), frame(9, 0, 1, b"")),
        (
            "trailers without an end",
            [head.clone(), frame(1, 1, 1, b"")].concat(),
            frame(9, 0, 1, b""),
        ),
        (
            "trailers twice",
            [head.clone(), frame(1, 5, 1, b""), frame(1, 5, 1, b"")].concat(),
            vec![],
        ),
        ("an answer to nobody", frame(1, 4, 9, STATUS_200), vec![]),
        ("something else than HTTP/2", b"HTTP/1.1 200 OK\r\n\r\n".to_vec(), vec![]),
        ("switching protocols", frame(1, 5, 1, &[0x08, 3, b'1', b'0', b'1']), vec![]),
        ("no answer", vec![], vec![]),
    ] {
        let (answer, read) = ask_raw(first, again);
        let told = answer.as_ref().map(Answer::code);
        let is_told = matches!(told, Ok("14" | "4") | Err(_)) || name == "trailers twice";
        assert!(is_told, "{name}: {answer:?}");
        assert!(read < 4 << 20, "{name}: {read}");
    }
}

#[test]
fn data_on_streams_that_nobody_reads_has_an_end() {
    let node = Node::new(4);
    // The stream is reset by the client, and the program sends on.
    let first = [frame(1, 4, 1, STATUS_200), frame(0, 0, 1, b"begun")].concat();
    let again = (Duration::from_secs(1), frame(0, 0, 1, &[7; 16 << 10]));
    let (_, _, sent) = serve_raw(&node, &of_eight(""), first, again);
    node.runtime.block_on(async {
        let mut sender = client(&node).await.ready().await.unwrap();
        let (answer, mut stream) = sender.send_request(grpc("/"), false).unwrap();
        let body = answer.await.unwrap().into_body();
        stream.send_reset(Reason::CANCEL);
        drop(body);
        let mut before = 0;
        let until = std::time::Instant::now() + PATIENCE;
        while sent.load(Ordering::SeqCst) == 0 {
            assert!(std::time::Instant::now() < until, "it never began");
            sleep(Duration::from_millis(50)).await;
        }
        loop {
            sleep(Duration::from_millis(300)).await;
            let now = sent.load(Ordering::SeqCst);
            if now == before {
                break;
            }
            before = now;
            assert!(std::time::Instant::now() < until, "it never ended");
        }
        assert!(before < 8 << 20, "{before}");
    });
}

#[test]
fn an_instance_that_reads_nothing_does_not_make_what_was_given_up_pile_up() {
    let node = Node::new(4);
    let (_, threads) = node.serve("f", &of_eight(""), |guest| {
        // It says that it takes any number of streams, and reads nothing any more.
        let socket = guest.socket.get_mut();
        let _ = socket.write_all(SETTINGS);
        while socket.peek(&mut [0]).is_ok_and(|count| count > 0) {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    node.runtime.block_on(async {
        // The first ones of a connection have a head of 8 KiB, so that the socket is full soon.
        let cancelled = |is_large: bool| {
            let mut request = grpc("/");
            if is_large {
                let value = HeaderValue::try_from("y".repeat(8 << 10)).unwrap();
                request.headers_mut().insert("x-large", value);
            }
            request
        };
        let mut sender = client(&node).await;
        let until = std::time::Instant::now() + 2 * PATIENCE;
        let (mut connections, mut requests) = (0, 0);
        while connections < 3 {
            assert!(std::time::Instant::now() < until, "{connections}");
            let now = threads.connections.load(Ordering::SeqCst);
            if now != connections {
                (connections, requests) = (now, 0);
            }
            let mut ready = match timeout(PATIENCE, sender.clone().ready()).await.unwrap() {
                Ok(ready) => ready,
                Err(_) => {
                    sender = client(&node).await;
                    continue;
                }
            };
            let Ok((answer, mut stream)) = ready.send_request(cancelled(requests < 64), false)
            else {
                continue;
            };
            requests += 1;
            sleep(Duration::from_millis(2)).await;
            stream.send_reset(Reason::CANCEL);
            drop(answer);
        }
    });
}

/// A program that speaks HTTP/2, answers each request at once, and takes nothing of its body.
fn answer_unread(node: &Node, keys: &str, settings: &'static [u8]) -> (Arc<Service>, Arc<Threads>) {
    node.serve("f", keys, move |guest| {
        let socket: &mut StdStream = guest.socket.get_mut();
        let _ = socket.write_all(settings);
        let mut bytes = Vec::new();
        let mut read = [0; 4096];
        let mut at = 24;
        while let Ok(count @ 1..) = socket.read(&mut read) {
            bytes.extend(&read[..count]);
            while bytes.len() >= at + 9 {
                let head = &bytes[at..at + 9];
                let len = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
                let (kind, stream) = (head[3], u32::from_be_bytes(head[5..9].try_into().unwrap()));
                at += 9 + len;
                if kind == 1 && socket.write_all(&frame(1, 5, stream, STATUS_200)).is_err() {
                    return;
                }
            }
        }
    })
}

/// The windows of its streams are closed, so that hyper keeps the body of each request.
#[test]
fn bodies_that_an_instance_does_not_take_do_not_pile_up() {
    let node = Node::new(4);
    let no_window = &[0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0];
    let (_, threads) = answer_unread(&node, &of_eight(""), no_window);
    node.runtime.block_on(async {
        let sender = client(&node).await;
        let until = std::time::Instant::now() + PATIENCE;
        // The bound is one for each connection: 8 and 64.
        let mut asked = 0;
        while threads.connections.load(Ordering::SeqCst) < 3 {
            assert!(std::time::Instant::now() < until, "{asked} {:?}", threads.connections);
            let _ = timeout(PATIENCE, ask(&sender, grpc("/"), vec![7; 32 << 10])).await;
            asked += 1;
        }
        assert!((73..600).contains(&asked), "{asked}");
    });
}

/// A server that answers, says that it goes away, and never closes its end.
#[test]
fn an_instance_that_closes_none_of_its_connections_ends() {
    let node = Node::new(4);
    let (service, threads) = node.serve("f", &of_eight(""), |guest| {
        let socket: &mut StdStream = guest.socket.get_mut();
        let mut read = [0; 4096];
        if !socket.read(&mut read).is_ok_and(|count| count > 0) {
            return;
        }
        let answer =
            [SETTINGS, &frame(1, 5, 1, STATUS_200), &frame(7, 0, 0, &[0, 0, 0, 1, 0, 0, 0, 0])];
        let _ = socket.write_all(&answer.concat());
        // For as long as the instance lives.
        std::thread::sleep(PATIENCE);
    });
    let first = || service.instances().first().map(|instance| instance.id);
    node.runtime.block_on(async {
        let sender = client(&node).await;
        let mut instances = BTreeSet::new();
        let until = std::time::Instant::now() + PATIENCE;
        while instances.len() < 2 {
            assert!(std::time::Instant::now() < until, "{:?}", threads.connections);
            let _ = ask(&sender, grpc("/"), "x").await;
            instances.extend(first());
        }
    });
    assert!(threads.connections.load(Ordering::SeqCst) > 72);
}
