//! Functions that speak HTTP/2, over instances that are threads of the test: what passes the gateway,
//! and what hostile programs cannot do to it.

#[path = "../common/mod.rs"]
mod common;

mod hostile;

use common::{Guest, Node, PATIENCE, Threads, eventually};
use h2::client::SendRequest;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use hyper::body::Bytes;
use hyper::header::{HeaderMap, HeaderValue};
use hyper::{Request, Response};
use std::collections::BTreeSet;
use std::future::Future;
use std::io::{Read, Write};
use std::net::TcpStream as StdStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use thaw_node::instance::InstanceState;
use thaw_node::service::Service;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

const H2C: &str = "protocol = \"h2c\"\nisolation = \"instance\"\n";

fn of_eight(more: &str) -> String {
    format!("{H2C}{more}[limits]\nconcurrency = 8\ninstances = 4\n")
}

/// A call as a program sees it.
struct Call {
    instance: u32,
    request: Request<RecvStream>,
    respond: SendResponse<Bytes>,
}

impl Call {
    fn path(&self) -> String {
        self.request.uri().path().to_owned()
    }

    /// Answers with a body and trailers.
    fn answer(mut self, body: impl Into<Bytes>, trailers: &[(&'static str, &'static str)]) {
        let Ok(mut stream) = self.respond.send_response(grpc_answer(), false) else { return };
        let _ = stream.send_data(body.into(), false);
        let _ = stream.send_trailers(fields(trailers));
    }
}

fn grpc_answer() -> Response<()> {
    Response::builder().header("content-type", "application/grpc").body(()).unwrap()
}

fn fields(fields: &[(&'static str, &'static str)]) -> HeaderMap {
    let field = |(name, value): &(&'static str, &'static str)| {
        (name.parse().unwrap(), HeaderValue::from_static(value))
    };
    fields.iter().map(field).collect()
}

/// Serves a function whose connections speak HTTP/2, each call in a task of its own.
fn serve<F>(
    node: &Node,
    keys: &str,
    program: impl Fn(Call) -> F + Clone + Send + Sync + 'static,
) -> (Arc<Service>, Arc<Threads>)
where
    F: Future<Output = ()> + 'static,
{
    node.serve("f", keys, move |guest| run_h2(guest, program.clone()))
}

fn run_h2<F: Future<Output = ()> + 'static>(guest: &mut Guest, program: impl Fn(Call) -> F) {
    let instance = guest.instance;
    let socket = guest.socket.get_ref().try_clone().unwrap();
    socket.set_nonblocking(true).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let tasks = tokio::task::LocalSet::new();
    tasks.block_on(&runtime, async {
        let stream = TcpStream::from_std(socket).unwrap();
        let Ok(mut connection) = h2::server::handshake(stream).await else { return };
        while let Some(Ok((request, respond))) = connection.accept().await {
            tokio::task::spawn_local(program(Call { instance, request, respond }));
        }
    });
    guest.socket.get_ref().set_nonblocking(false).unwrap();
}

async fn client(node: &Node) -> SendRequest<Bytes> {
    let stream = TcpStream::connect(node.address).await.unwrap();
    let (sender, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    sender
}

fn grpc(path: &str) -> Request<()> {
    let request = Request::post(format!("http://f{path}"));
    request.header("content-type", "application/grpc").header("te", "trailers").body(()).unwrap()
}

/// An answer to a client.
#[derive(Debug)]
struct Answer {
    status: u16,
    headers: HeaderMap,
    body: Vec<u8>,
    trailers: Option<HeaderMap>,
}

impl Answer {
    /// What became of a call, wherever it is said.
    fn code(&self) -> &str {
        let found =
            self.trailers.iter().chain([&self.headers]).find_map(|all| all.get("grpc-status"));
        found.map_or("none", |code| code.to_str().unwrap())
    }
}

async fn read(response: Response<RecvStream>) -> Result<Answer, h2::Error> {
    let (head, mut stream) = response.into_parts();
    let mut body = Vec::new();
    while let Some(piece) = stream.data().await {
        let piece = piece?;
        stream.flow_control().release_capacity(piece.len())?;
        body.extend_from_slice(&piece);
    }
    let trailers = stream.trailers().await?;
    Ok(Answer { status: head.status.as_u16(), headers: head.headers, body, trailers })
}

async fn ask(
    sender: &SendRequest<Bytes>,
    request: Request<()>,
    body: impl Into<Bytes>,
) -> Result<Answer, h2::Error> {
    let mut sender = timeout(PATIENCE, sender.clone().ready()).await.expect("room")?;
    let (answer, mut stream) = sender.send_request(request, false)?;
    // It may have been answered already.
    let _ = stream.send_data(body.into(), true);
    let answer = async { read(answer.await?).await };
    timeout(PATIENCE, answer).await.expect("an answer in time")
}

/// Reads a body to its end.
async fn body_of(stream: &mut RecvStream) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(Ok(piece)) = stream.data().await {
        let _ = stream.flow_control().release_capacity(piece.len());
        body.extend_from_slice(&piece);
    }
    body
}

async fn echo(mut call: Call) {
    let body = body_of(call.request.body_mut()).await;
    call.answer(body, &[("grpc-status", "0"), ("grpc-message", "well")]);
}

#[test]
fn heads_bodies_and_trailers_pass_in_both_directions() {
    let node = Node::new(4);
    let seen: Arc<Mutex<Vec<Request<()>>>> = Arc::default();
    let noted = seen.clone();
    serve(&node, H2C, move |mut call| {
        let noted = noted.clone();
        async move {
            let mut head = Request::new(());
            (*head.uri_mut(), *head.headers_mut()) =
                (call.request.uri().clone(), call.request.headers().clone());
            let body = body_of(call.request.body_mut()).await;
            let trailers = call.request.body_mut().trailers().await.unwrap().unwrap_or_default();
            head.headers_mut().extend(trailers);
            noted.lock().unwrap().push(head);
            let trailers = [
                ("grpc-status", "0"),
                ("x-late", "1"),
                ("content-length", "7"),
                ("thaw-error", "x"),
                ("thaw-request-id", "y"),
            ];
            call.answer(body, &trailers);
        }
    });
    node.runtime.block_on(async {
        let mut sender = client(&node).await.ready().await.unwrap();
        let mut request = grpc("/s.S/M?q=1");
        request.headers_mut().insert("host", HeaderValue::from_static("g"));
        request.headers_mut().insert("x-own-bin", HeaderValue::from_static("AAE="));
        let (answer, mut stream) = sender.send_request(request, false).unwrap();
        stream.send_data("hello".into(), false).unwrap();
        let sent =
            [("x-trailer", "t"), ("content-length", "9"), ("host", "h"), ("thaw-error", "e")];
        stream.send_trailers(fields(&sent)).unwrap();
        let answer = read(answer.await.unwrap()).await.unwrap();
        assert_eq!((answer.status, &answer.body[..]), (200, &b"hello"[..]));
        let trailers = answer.trailers.unwrap();
        assert_eq!(trailers, fields(&[("grpc-status", "0"), ("x-late", "1")]));
        assert!(answer.headers.contains_key("thaw-request-id"));
    });
    let seen = &seen.lock().unwrap()[0];
    assert_eq!(seen.uri(), "http://f/s.S/M?q=1");
    let headers = seen.headers();
    for (name, value) in [("te", "trailers"), ("x-own-bin", "AAE="), ("x-trailer", "t")] {
        assert_eq!(headers.get_all(name).iter().collect::<Vec<_>>(), [value], "{name}");
    }
    assert!(headers.contains_key("traceparent"));
    for name in ["host", "content-length", "connection", "thaw-error"] {
        assert!(!headers.contains_key(name), "{name}");
    }
}

#[test]
fn clients_of_http1_are_translated_and_nothing_of_theirs_is_taken_for_more() {
    let node = Node::new(4);
    serve(&node, H2C, |mut call| async move {
        let body = body_of(call.request.body_mut()).await;
        let head = format!("{} {}", call.request.method(), call.request.uri());
        let headers = call.request.headers().iter();
        let headers = headers.map(|(name, value)| format!("\n{name}: {}", value.to_str().unwrap()));
        let text = head + &headers.collect::<String>() + "\n\n" + &String::from_utf8_lossy(&body);
        call.answer(text, &[("grpc-status", "5")]);
    });
    let mut wire = node.connect();
    wire.send(
        "POST /p HTTP/1.1\r\nHost: F.example:80\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\n\
         Upgrade: h2c\r\nHTTP2-Settings: AAA\r\nTE: trailers, deflate\r\n\
         Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n5\r\nhello\r\n0\r\nHost: x\r\nX-T: 1\r\n\r\n",
    );
    let seen = wire.response().unwrap().text();
    assert!(seen.starts_with("POST http://F.example:80/p\n"), "{seen}");
    assert!(seen.ends_with("\n\nhello"), "{seen}");
    assert!(seen.contains("\nte: trailers\n"), "{seen}");
    for name in ["x-hop", "connection", "upgrade", "transfer-encoding", "content-length", "host"] {
        assert!(!seen.contains(&format!("\n{name}:")), "{name} in {seen}");
    }
    assert!(node.connect().get("f", "/").text().starts_with("GET http://f/\n"));
    for host in ["u@f", "f g", "f/x", "f?x"] {
        let mut wire = node.connect();
        wire.send(format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        let status = wire.response().map(|response| response.head);
        let is_refused = |head: &String| head.contains(" 400 ") || head.contains(" 404 ");
        assert!(status.as_ref().is_some_and(is_refused), "{host}: {status:?}");
    }
}

#[test]
fn a_stream_goes_both_ways_at_the_same_time() {
    let node = Node::new(4);
    serve(&node, H2C, |mut call| async move {
        let mut stream = call.respond.send_response(grpc_answer(), false).unwrap();
        let body = call.request.body_mut();
        while let Some(Ok(piece)) = body.data().await {
            body.flow_control().release_capacity(piece.len()).unwrap();
            stream.send_data(piece, false).unwrap();
        }
        stream.send_trailers(fields(&[("grpc-status", "0")])).unwrap();
    });
    node.runtime.block_on(async {
        let mut sender = client(&node).await.ready().await.unwrap();
        let (answer, mut stream) = sender.send_request(grpc("/chat"), false).unwrap();
        let mut body = timeout(PATIENCE, answer).await.unwrap().unwrap().into_body();
        for round in 0..100u8 {
            stream.send_data(vec![round; 7].into(), false).unwrap();
            let piece = timeout(PATIENCE, body.data()).await.unwrap().unwrap().unwrap();
            assert_eq!(piece, vec![round; 7]);
            body.flow_control().release_capacity(7).unwrap();
        }
        stream.send_data(Bytes::new(), true).unwrap();
        assert!(body.data().await.is_none());
        assert_eq!(body.trailers().await.unwrap().unwrap()["grpc-status"], "0");
    });
}

#[test]
fn large_bodies_pass_whole() {
    let node = Node::new(4);
    serve(&node, H2C, echo);
    let body: Vec<u8> = (0..4 << 20).map(|at: u32| (at % 251) as u8).collect();
    node.runtime.block_on(async {
        let sender = client(&node).await;
        let calls = (0..4).map(|_| ask(&sender, grpc("/"), body.clone()));
        for call in calls {
            let answer = call.await.unwrap();
            assert!(answer.body == body);
            assert_eq!(answer.code(), "0");
        }
    });
}

#[test]
fn an_instance_has_one_connection_for_as_many_requests_as_it_serves() {
    let node = Node::new(4);
    let (service, threads) = serve(&node, &of_eight(""), |mut call| async move {
        let instance = call.instance;
        body_of(call.request.body_mut()).await;
        if call.path() == "/held" {
            sleep(Duration::from_millis(500)).await;
        }
        call.answer(instance.to_string(), &[("grpc-status", "0")]);
    });
    node.runtime.block_on(async {
        let sender = client(&node).await;
        // Requests that come before the first instance may boot one each.
        assert_eq!(ask(&sender, grpc("/"), "").await.unwrap().body, b"1");
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let sender = sender.clone();
            tasks.spawn(async move { ask(&sender, grpc("/held"), "").await.unwrap().body });
        }
        assert!(tasks.join_all().await.iter().all(|instance| instance == b"1"));
        assert_eq!(threads.connections.load(Ordering::SeqCst), 1);
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..9 {
            let sender = sender.clone();
            tasks.spawn(async move { ask(&sender, grpc("/held"), "").await.unwrap().body });
        }
        let mut instances = tasks.join_all().await;
        instances.sort();
        assert_eq!(instances.last().unwrap(), b"2");
        assert_eq!(instances.iter().filter(|instance| *instance == b"1").count(), 8);
    });
    assert_eq!(threads.connections.load(Ordering::SeqCst), 2);
    eventually(|| service.instances().iter().all(|info| info.state == InstanceState::Idle));
    let served: Vec<u64> = service.instances().iter().map(|info| info.served).collect();
    assert_eq!(served, [17, 1]);
}

#[test]
fn with_an_instance_for_each_request_none_meets_another() {
    let node = Node::new(8);
    let (service, threads) = serve(&node, "protocol = \"h2c\"", |call| async move {
        let instance = call.instance.to_string();
        call.answer(instance, &[("grpc-status", "0")]);
    });
    node.runtime.block_on(async {
        let sender = client(&node).await;
        for expected in ["1", "2", "3"] {
            assert_eq!(ask(&sender, grpc("/"), "x").await.unwrap().body, expected.as_bytes());
        }
    });
    assert_eq!(node.connect().get("f", "/").text(), "4");
    assert_eq!(threads.connections.load(Ordering::SeqCst), 4);
    eventually(|| service.instances().is_empty());
}

/// Waits until a stream is reset, and notes why.
async fn note_reset(mut call: Call, noted: Arc<Mutex<Vec<Reason>>>) {
    let mut stream = call.respond.send_response(grpc_answer(), false).unwrap();
    let _ = stream.send_data("begun".into(), false);
    let reset = std::future::poll_fn(|context| stream.poll_reset(context)).await;
    noted.lock().unwrap().extend(reset);
}

#[test]
fn a_client_that_cancels_or_goes_away_cancels_in_the_function_and_frees_the_place() {
    let node = Node::new(4);
    let resets: Arc<Mutex<Vec<Reason>>> = Arc::default();
    let noted = resets.clone();
    let (service, threads) =
        serve(&node, &of_eight(""), move |call| note_reset(call, noted.clone()));
    node.runtime.block_on(async {
        let mut sender = client(&node).await.ready().await.unwrap();
        // Once with a request that goes on, once with one that is complete.
        for is_complete in [false, true] {
            let (answer, mut stream) = sender.send_request(grpc("/"), is_complete).unwrap();
            let mut body = answer.await.unwrap().into_body();
            assert_eq!(body.data().await.unwrap().unwrap(), "begun");
            stream.send_reset(Reason::CANCEL);
        }
        let gone = client(&node).await.ready().await.unwrap().send_request(grpc("/"), false);
        let (answer, stream) = gone.unwrap();
        let body = answer.await.unwrap().into_body();
        drop((body, stream));
    });
    eventually(|| resets.lock().unwrap().len() == 3);
    assert_eq!(*resets.lock().unwrap(), [Reason::CANCEL; 3]);
    eventually(|| service.instances().iter().all(|info| info.connections == 0));
    assert_eq!(threads.launched.load(Ordering::SeqCst), 1);
}

#[test]
fn a_client_that_cancels_before_the_head_does_so_in_the_function() {
    let node = Node::new(4);
    let resets: Arc<Mutex<Vec<Reason>>> = Arc::default();
    let (noted, arrived) = (resets.clone(), Arc::new(AtomicUsize::new(0)));
    let counted = arrived.clone();
    let (service, _) = serve(&node, &of_eight(""), move |mut call| {
        let noted = noted.clone();
        counted.fetch_add(1, Ordering::SeqCst);
        async move {
            let reset = std::future::poll_fn(|context| call.respond.poll_reset(context)).await;
            noted.lock().unwrap().extend(reset);
        }
    });
    node.runtime.block_on(async {
        let mut sender = client(&node).await.ready().await.unwrap();
        for is_complete in [false, true] {
            let before = arrived.load(Ordering::SeqCst);
            let (answer, mut stream) = sender.send_request(grpc("/"), is_complete).unwrap();
            while arrived.load(Ordering::SeqCst) == before {
                sleep(Duration::from_millis(5)).await;
            }
            stream.send_reset(Reason::CANCEL);
            drop(answer);
        }
    });
    eventually(|| resets.lock().unwrap().len() == 2);
    assert_eq!(*resets.lock().unwrap(), [Reason::CANCEL; 2]);
    eventually(|| service.instances().iter().all(|info| info.connections == 0));
}

#[test]
fn a_stream_that_the_function_resets_ends_with_its_reason() {
    let node = Node::new(4);
    serve(&node, &of_eight(""), |mut call| async move {
        let mut stream = call.respond.send_response(grpc_answer(), false).unwrap();
        let _ = stream.send_data("begun".into(), false);
        sleep(Duration::from_millis(50)).await;
        stream.send_reset(Reason::ENHANCE_YOUR_CALM);
    });
    node.runtime.block_on(async {
        let error = ask(&client(&node).await, grpc("/"), "x").await.unwrap_err();
        assert_eq!(error.reason(), Some(Reason::ENHANCE_YOUR_CALM));
    });
}

/// Servers of gRPC cancel a call at the deadline that its client has set.
#[test]
fn a_call_that_the_function_cancels_at_its_deadline_has_passed_that() {
    let node = Node::new(4);
    serve(&node, &of_eight(""), |mut call| async move {
        match call.path().as_str() {
            "/" => echo(call).await,
            "/begun" => {
                let mut stream = call.respond.send_response(grpc_answer(), false).unwrap();
                let _ = stream.send_data("begun".into(), false);
                sleep(Duration::from_millis(50)).await;
                stream.send_reset(Reason::CANCEL);
            }
            _ => {
                sleep(Duration::from_millis(50)).await;
                call.respond.send_reset(Reason::CANCEL);
            }
        }
    });
    let within = |path: &str, limit: &'static str| {
        let mut request = grpc(path);
        request.headers_mut().insert("grpc-timeout", HeaderValue::from_static(limit));
        request
    };
    node.runtime.block_on(async {
        let sender = client(&node).await;
        let passed = ask(&sender, within("/late", "20m"), "x").await.unwrap();
        assert_eq!(passed.code(), "4", "{passed:?}");
        // It had no reason to, or none that is known.
        for request in [within("/late", "9H"), grpc("/late")] {
            assert_eq!(ask(&sender, request, "x").await.unwrap().code(), "14");
        }
        let error = ask(&sender, within("/begun", "20m"), "x").await.unwrap_err();
        assert_eq!(error.reason(), Some(Reason::CANCEL));
        assert_eq!(ask(&sender, grpc("/"), "on").await.unwrap().body, b"on");
    });
}

#[test]
fn what_the_function_did_not_begin_is_sent_again_a_bounded_number_of_times() {
    let node = Node::new(4);
    let times = Arc::new(AtomicUsize::new(0));
    let counted = times.clone();
    serve(&node, &of_eight(""), move |mut call| {
        let number = counted.fetch_add(1, Ordering::SeqCst);
        async move {
            if call.path() == "/late" {
                // It has had more than the gateway keeps.
                let body = call.request.body_mut();
                let mut len = 0;
                while len < 128 << 10 {
                    let Some(Ok(piece)) = body.data().await else { return };
                    len += piece.len();
                    let _ = body.flow_control().release_capacity(piece.len());
                }
                return call.respond.send_reset(Reason::REFUSED_STREAM);
            }
            if call.path() == "/never" || number.is_multiple_of(2) {
                return call.respond.send_reset(Reason::REFUSED_STREAM);
            }
            echo(call).await;
        }
    });
    node.runtime.block_on(async {
        let sender = client(&node).await;
        assert_eq!(ask(&sender, grpc("/"), "again").await.unwrap().body, b"again");
        assert_eq!(times.swap(0, Ordering::SeqCst), 2);
        let refused = ask(&sender, grpc("/never"), "x").await.unwrap();
        assert_eq!((refused.code(), times.swap(0, Ordering::SeqCst)), ("14", 3));
        // So is a body that is not complete yet.
        times.store(0, Ordering::SeqCst);
        let mut ready = sender.clone().ready().await.unwrap();
        let (answer, mut stream) = ready.send_request(grpc("/"), false).unwrap();
        stream.send_data(Bytes::from_static(b"first"), false).unwrap();
        let until = std::time::Instant::now() + PATIENCE;
        while times.load(Ordering::SeqCst) < 2 {
            assert!(std::time::Instant::now() < until, "it was not sent again");
            sleep(Duration::from_millis(5)).await;
        }
        stream.send_data(Bytes::from_static(b"last"), true).unwrap();
        let answer = read(answer.await.unwrap()).await.unwrap();
        assert_eq!((answer.code(), &answer.body[..]), ("0", &b"firstlast"[..]));
        // What is no longer there cannot be sent again.
        times.store(0, Ordering::SeqCst);
        let large = ask(&sender, grpc("/late"), vec![0; 1 << 20]).await.unwrap();
        assert_eq!((large.code(), times.load(Ordering::SeqCst)), ("14", 1));
    });
}

#[test]
fn the_gateway_refuses_calls_as_their_clients_expect() {
    let node = Node::new(1);
    let directory = tempfile::tempdir().unwrap();
    let rules = "[function.f]\nbody_max = \"1KiB\"\n[function.f.auth]\nbearer = [\"sha256:\
                 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b\"]";
    node.rule(directory.path(), rules);
    serve(&node, H2C, echo);
    let secret = |mut request: Request<()>| {
        request.headers_mut().insert("authorization", HeaderValue::from_static("Bearer secret"));
        request
    };
    node.runtime.block_on(async {
        let sender = client(&node).await;
        let refused = ask(&sender, grpc("/"), "x").await.unwrap();
        assert_eq!((refused.status, refused.code()), (200, "16"));
        assert_eq!(refused.headers["content-type"], "application/grpc");
        assert_eq!(refused.headers["thaw-error"], "unauthorized");
        assert!(refused.headers.contains_key("grpc-message") && refused.body.is_empty());
        assert!(refused.trailers.is_none());
        assert_eq!(ask(&sender, secret(grpc("/")), "x").await.unwrap().code(), "0");
        let large = ask(&sender, secret(grpc("/")), vec![0; 2000]).await.unwrap();
        assert_eq!(large.code(), "8");
        let unknown =
            Request::post("http://nobody/").header("content-type", "application/grpc+proto");
        let unknown = ask(&sender, unknown.body(()).unwrap(), "x").await.unwrap();
        assert_eq!(unknown.code(), "12");
        // Others get what they always got.
        let plain = Request::post("http://f/").body(()).unwrap();
        let plain = ask(&sender, plain, "x").await.unwrap();
        assert_eq!(
            (plain.status, &plain.headers["content-type"]),
            (401, &"application/json".parse().unwrap())
        );
    });
    let text = node.shared.metrics().text(&[], 0);
    assert!(text.contains("thaw_responses_total{function=\"f\",code=\"401\"} 2"), "{text}");
}

#[test]
fn a_call_without_an_answer_ends_alone_or_with_its_instance() {
    let node = Node::new(4);
    let keys = of_eight("").replace("[limits]", "[limits]\ntimeout = \"5s\"");
    let (service, threads) = serve(&node, &keys, |mut call| async move {
        if call.path() == "/never" {
            let _ = std::future::poll_fn(|context| call.respond.poll_reset(context)).await;
        } else if call.path() == "/long" {
            let mut stream = call.respond.send_response(grpc_answer(), false).unwrap();
            // Each piece comes long before its time is over, and all together take longer than one has.
            for _ in 0..8 {
                stream.send_data("x".into(), false).unwrap();
                sleep(Duration::from_secs(1)).await;
            }
            stream.send_trailers(fields(&[("grpc-status", "0")])).unwrap();
        } else {
            let mut stream = call.respond.send_response(grpc_answer(), false).unwrap();
            stream.send_data("begun".into(), false).unwrap();
            let _ = std::future::poll_fn(|context| stream.poll_reset(context)).await;
        }
    });
    node.runtime.block_on(async {
        let sender = client(&node).await;
        let (long, late) = tokio::join!(ask(&sender, grpc("/long"), "x"), async {
            sleep(Duration::from_millis(200)).await;
            ask(&sender, grpc("/never"), "x").await
        });
        assert_eq!(late.unwrap().code(), "4");
        let long = long.unwrap();
        assert_eq!((long.code(), &long.body[..]), ("0", &b"xxxxxxxx"[..]));
        // One that stops in the middle ends alone, too.
        let stalled = ask(&sender, grpc("/stalls"), "x").await.unwrap();
        assert_eq!((stalled.code(), &stalled.body[..]), ("4", &b"begun"[..]));
        assert_eq!(threads.launched.load(Ordering::SeqCst), 1);
        assert!(threads.remarks.lock().unwrap().is_empty());
        assert_eq!(ask(&sender, grpc("/never"), "x").await.unwrap().code(), "4");
    });
    eventually(|| service.instances().is_empty());
    assert_eq!(*threads.remarks.lock().unwrap(), ["no answer within 5 s, ending the instance"]);
}

#[test]
fn an_instance_that_ends_ends_its_calls_and_others_go_on() {
    let node = Node::new(4);
    let begun = Arc::new(AtomicUsize::new(0));
    let counted = begun.clone();
    let (service, _) = serve(&node, &of_eight(""), move |mut call| {
        let counted = counted.clone();
        async move {
            if call.path() == "/" {
                return echo(call).await;
            }
            let mut stream = call.respond.send_response(grpc_answer(), false).unwrap();
            stream.send_data("begun".into(), false).unwrap();
            counted.fetch_add(1, Ordering::SeqCst);
            std::future::pending::<()>().await;
        }
    });
    node.runtime.block_on(async {
        let sender = client(&node).await;
        let ended = ask(&sender, grpc("/held"), "x");
        let kill = async {
            while begun.load(Ordering::SeqCst) == 0 {
                sleep(Duration::from_millis(5)).await;
            }
            // What it has sent is on its way to the client.
            sleep(Duration::from_secs(1)).await;
            service.kill_all();
        };
        let (ended, ()) = tokio::join!(ended, kill);
        let ended = ended.unwrap();
        assert_eq!((ended.code(), &ended.body[..]), ("14", &b"begun"[..]));
        assert_eq!(ask(&sender, grpc("/"), "x").await.unwrap().code(), "0");
    });
}

const HTTP_LIVENESS: &str = "[liveness]\npath = \"/healthz\"\nperiod = \"1s\"\n";
const GRPC_LIVENESS: &str =
    "[liveness]\nkind = \"grpc\"\nservice = \"s.S\"\nperiod = \"1s\"\nfailures = 2\n";

#[test]
fn probes_speak_http2() {
    for (keys, is_grpc) in [(HTTP_LIVENESS, false), (GRPC_LIVENESS, true)] {
        let node = Node::new(4);
        let probes = Arc::new(AtomicUsize::new(0));
        let counted = probes.clone();
        let (service, threads) = serve(&node, &format!("{H2C}{keys}"), move |mut call| {
            let counted = counted.clone();
            async move {
                let body = body_of(call.request.body_mut()).await;
                match call.path().as_str() {
                    "/healthz" => {
                        call.respond.send_response(Response::new(()), true).map(drop).unwrap()
                    }
                    "/grpc.health.v1.Health/Check" => {
                        assert_eq!(body, b"\0\0\0\0\x05\x0a\x03s.S");
                        let number = counted.load(Ordering::SeqCst);
                        let status = if number < 2 { 1 } else { 2 };
                        call.answer(vec![0, 0, 0, 0, 2, 8, status], &[("grpc-status", "0")]);
                    }
                    _ => return call.answer("", &[("grpc-status", "0")]),
                }
                counted.fetch_add(1, Ordering::SeqCst);
            }
        });
        node.runtime.block_on(async {
            ask(&client(&node).await, grpc("/"), "").await.unwrap();
        });
        eventually(|| probes.load(Ordering::SeqCst) >= 2);
        if is_grpc {
            eventually(|| service.instances().is_empty());
            let why = "ended because it failed 2 liveness probes in a row: it says that it does not serve";
            assert_eq!(*threads.remarks.lock().unwrap(), [why]);
        } else {
            assert_eq!(service.instances()[0].served, 1);
            assert!(threads.remarks.lock().unwrap().is_empty());
        }
    }
}

/// A server may send messages that are smaller than their frames' heads for long.
#[test]
fn small_messages_that_nobody_takes_for_a_while_pass() {
    let node = Node::new(4);
    serve(&node, &of_eight(""), |mut call| async move {
        let mut stream = call.respond.send_response(grpc_answer(), false).unwrap();
        for _ in 0..4000 {
            stream.send_data(Bytes::from_static(b"small"), false).unwrap();
        }
        let _ = stream.send_trailers(fields(&[("grpc-status", "0")]));
        sleep(Duration::from_secs(1)).await;
    });
    node.runtime.block_on(async {
        // The client itself bears them.
        let stream = TcpStream::connect(node.address).await.unwrap();
        let mut builder = h2::client::Builder::new();
        builder.data_frame_budget(1 << 30);
        let (sender, connection) = builder.handshake::<_, Bytes>(stream).await.unwrap();
        tokio::spawn(connection);
        let mut sender = sender.ready().await.unwrap();
        let (answer, _) = sender.send_request(grpc("/"), true).unwrap();
        let answer = answer.await.unwrap();
        sleep(Duration::from_millis(500)).await;
        let answer = read(answer).await.unwrap();
        assert_eq!((answer.code(), answer.body.len()), ("0", 20_000));
    });
}

#[test]
fn connections_that_go_away_are_replaced_and_do_not_pile_up() {
    let node = Node::new(4);
    // Each connection answers two calls and goes away.
    let (service, threads) = node.serve("f", &of_eight(""), |guest| {
        let socket = guest.socket.get_ref().try_clone().unwrap();
        socket.set_nonblocking(true).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let stream = TcpStream::from_std(socket).unwrap();
            let Ok(mut connection) = h2::server::handshake(stream).await else { return };
            let mut answered = 0;
            while let Some(Ok((request, respond))) = connection.accept().await {
                let call = Call { instance: 0, request, respond };
                tokio::task::spawn_local(echo(call));
                answered += 1;
                if answered == 2 {
                    connection.graceful_shutdown();
                }
            }
        });
    });
    node.runtime.block_on(async {
        let sender = client(&node).await;
        for round in 0..100 {
            let answer = ask(&sender, grpc("/"), "x").await.unwrap();
            assert_eq!(answer.code(), "0", "{round}: {:?}", answer.headers);
        }
    });
    assert!(threads.connections.load(Ordering::SeqCst) >= 30);
    assert_eq!(service.instances().len(), 1);
    eventually(|| service.instances()[0].connections == 0);
}

/// What was sent of it ahead has failed by the time at which there is a place.
#[test]
fn a_body_that_is_too_large_reaches_nobody_when_it_has_waited_for_a_place() {
    for keys in ["isolation = \"instance\"\n", H2C] {
        let node = Node::new(1);
        let directory = tempfile::tempdir().unwrap();
        node.rule(directory.path(), "[function.f]\nbody_max = \"1KiB\"");
        let seen: Arc<Mutex<Vec<String>>> = Arc::default();
        let noted = seen.clone();
        let hold = |path: &str| path.contains("/held").then(|| Duration::from_secs(4));
        let keys = format!("{keys}limits = {{ instances = 1, queue = \"60s\" }}");
        match keys.contains("h2c") {
            true => drop(serve(&node, &keys, move |call| {
                noted.lock().unwrap().push(call.path());
                async move {
                    sleep(hold(&call.path()).unwrap_or_default()).await;
                    call.answer("", &[]);
                }
            })),
            false => drop(node.serve("f", &keys, move |guest| {
                while let Some(request) = guest.request() {
                    noted.lock().unwrap().push(request.head.clone());
                    std::thread::sleep(hold(&request.head).unwrap_or_default());
                    guest.answer("");
                }
            })),
        }
        let mut held = node.connect();
        held.send("GET /held HTTP/1.1\r\nHost: f\r\n\r\n");
        eventually(|| seen.lock().unwrap().len() == 1);
        let mut large = node.connect();
        let head = "POST /large HTTP/1.1\r\nHost: f\r\nTransfer-Encoding: chunked\r\n\r\n";
        large.send(format!("{head}7d0\r\n{}\r\n0\r\n\r\n", "x".repeat(2000)));
        let answer = large.response().unwrap();
        assert!(answer.head.starts_with("HTTP/1.1 413 "), "{keys}: {}", answer.head);
        assert!(held.response().unwrap().head.starts_with("HTTP/1.1 200 "));
        let seen = seen.lock().unwrap();
        // An instance may have seen its head, but never its end.
        assert!(seen.len() == 1 || keys.contains("h2c"), "{seen:?}");
    }
}
