//! Traces: what a collector gets, decoded by OpenTelemetry's own types.

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Kind;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread;
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Raw, Response, built_home, command, get, thaw, wait_until,
};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// A collector that takes everything.
struct Collector {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<(Span, String)>>>,
}

impl Collector {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let seen = Arc::<Mutex<Vec<_>>>::default();
        let into = seen.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = BufReader::new(stream.expect("a connection"));
                let body = body(&mut stream);
                let batch = ExportTraceServiceRequest::decode(&*body).expect("a batch");
                for of_resource in batch.resource_spans {
                    let resource = of_resource.resource.expect("a resource");
                    let name = resource.attributes.iter().find(|pair| pair.key == "service.name");
                    let name =
                        text(name.expect("a name").value.as_ref().expect("a value").value.clone());
                    let spans = of_resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
                    into.lock().unwrap().extend(spans.map(|span| (span, name.clone())));
                }
                let answer = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
                stream.get_mut().write_all(answer.as_bytes()).expect("written");
            }
        });
        Self { address, seen }
    }

    /// The spans of a trace.
    fn trace(&self, id: &[u8]) -> Vec<Span> {
        let seen = self.seen.lock().unwrap();
        seen.iter().filter(|(span, _)| span.trace_id == id).map(|(span, _)| span.clone()).collect()
    }

    fn named(&self, name: &str) -> Vec<Span> {
        let seen = self.seen.lock().unwrap();
        seen.iter().filter(|(span, _)| span.name == name).map(|(span, _)| span.clone()).collect()
    }

    /// Waits for a span of this name.
    #[track_caller]
    fn wait_for(&self, name: &str) -> Span {
        wait_until(&format!("the span `{name}` came"), || !self.named(name).is_empty());
        self.named(name).remove(0)
    }
}

fn body(stream: &mut impl BufRead) -> Vec<u8> {
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).expect("a line");
        if line == "\r\n" {
            break;
        }
        head.push(line.to_lowercase());
    }
    assert!(head[0].starts_with("post /v1/traces "), "{head:?}");
    assert!(head.iter().any(|line| line == "content-type: application/x-protobuf\r\n"), "{head:?}");
    assert!(head.iter().any(|line| line == "x-key: a b\r\n"), "{head:?}");
    let len = head.iter().find_map(|line| line.strip_prefix("content-length:")).expect("a length");
    let mut body = vec![0; len.trim().parse().expect("a number")];
    stream.read_exact(&mut body).expect("a body");
    body
}

fn text(value: Option<Kind>) -> String {
    match value {
        Some(Kind::StringValue(text)) => text,
        Some(Kind::IntValue(number)) => number.to_string(),
        Some(Kind::BoolValue(truth)) => truth.to_string(),
        other => panic!("{other:?}"),
    }
}

/// An attribute as text.
fn attribute(span: &Span, key: &str) -> Option<String> {
    let pair = span.attributes.iter().find(|pair| pair.key == key)?;
    Some(text(pair.value.clone()?.value))
}

fn child<'a>(spans: &'a [Span], of: &Span, name: &str) -> &'a Span {
    let mut found =
        spans.iter().filter(|span| span.name == name && span.parent_span_id == of.span_id);
    let (one, other) = (found.next(), found.next());
    assert!(other.is_none(), "two are named {name}");
    let one = one.unwrap_or_else(|| panic!("no {name} below {} in {spans:#?}", of.name));
    let (start, end) = (one.start_time_unix_nano, one.end_time_unix_nano);
    let within = of.start_time_unix_nano..=of.end_time_unix_nano;
    assert!(within.contains(&start) && within.contains(&end) && start <= end, "{name}");
    one
}

fn bytes(hex: &str) -> Vec<u8> {
    let pairs = (0..hex.len()).step_by(2);
    pairs.map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal")).collect()
}

fn home(label: &str) -> PathBuf {
    let keys = "async = { backoff = \"100ms\", backoff_max = \"200ms\" }";
    built_home(label, &[Function::PythonVariant { program: "receiver", name: "receiver", keys }])
}

fn serve(home: &std::path::Path, collector: SocketAddr, variables: &[&str]) -> Daemon {
    let mut program = vec!["env".to_owned()];
    let usual = [
        // On a busy machine a boot may be noted a moment after its request has ended.
        "OTEL_BSP_SCHEDULE_DELAY=1000",
        "OTEL_SERVICE_NAME=node-1",
        "OTEL_EXPORTER_OTLP_HEADERS=x-key=a%20b",
    ];
    program.extend(usual.iter().chain(variables).map(|text| (*text).to_owned()));
    let arguments = vec!["--otlp".to_owned(), format!("http://{collector}")];
    Daemon::start_by(&program, home, &DaemonOptions { arguments })
}

fn ask(daemon: &Daemon, path: &str, fields: &str) -> Response {
    let mut client = Raw::connect(daemon.gateway());
    client.send(format!("GET {path} HTTP/1.1\r\nHost: receiver\r\n{fields}\r\n"));
    client.response().expect("an answer")
}

#[test]
fn a_request_is_a_span_with_its_boot_and_the_parent_that_its_client_names() {
    let collector = Collector::start();
    let home = home("traces-request");
    let daemon = serve(&home, collector.address, &[]);
    // It would be handed over if nobody wanted traces.
    let fields = format!("Connection: close\r\ntraceparent: 00-{TRACE}-{PARENT}-01\r\n");
    assert_eq!(ask(&daemon, "/a?secret=1", &fields).status, 200);
    let root = collector.wait_for("GET receiver");
    let spans = collector.trace(&bytes(TRACE));
    assert_eq!((&root.trace_id, &root.parent_span_id), (&bytes(TRACE), &bytes(PARENT)));
    assert_eq!(root.kind, 2, "a server's");
    for (key, value) in [
        ("http.request.method", "GET"),
        ("url.path", "/a"),
        ("url.scheme", "http"),
        ("server.address", "receiver"),
        ("http.response.status_code", "200"),
        ("faas.name", "receiver"),
        ("faas.version", "1"),
        ("faas.coldstart", "true"),
    ] {
        assert_eq!(attribute(&root, key).as_deref(), Some(value), "{key} of {root:?}");
    }
    assert!(!format!("{spans:?}").contains("secret"));
    let boot = child(&spans, &root, "boot");
    let mut end = boot.start_time_unix_nano;
    for name in ["commanded", "mapped", "entered"] {
        let phase = child(&spans, boot, name);
        assert_eq!(phase.start_time_unix_nano, end, "{name}");
        end = phase.end_time_unix_nano;
    }
    let (queue, execution) = (child(&spans, &root, "queue"), child(&spans, &root, "execution"));
    assert_eq!(queue.end_time_unix_nano, boot.start_time_unix_nano);
    assert_eq!(boot.end_time_unix_nano, execution.start_time_unix_nano);
    assert_eq!(execution.end_time_unix_nano, root.end_time_unix_nano);
    assert!(collector.seen.lock().unwrap().iter().all(|(_, name)| name == "node-1"));

    // A client that does not record gets no spans; the function hears the same.
    let other = TRACE.replace('0', "1");
    assert_eq!(ask(&daemon, "/b", &format!("traceparent: 00-{other}-{PARENT}-00\r\n")).status, 200);
    assert_eq!(get(daemon.gateway(), "nobody", "/c").status, 404);
    let refused = collector.wait_for("GET");
    assert_eq!(attribute(&refused, "error.type").as_deref(), Some("unknown_function"));
    assert_eq!(collector.trace(&bytes(&other)), []);
    let metrics = daemon.admin("/metrics").text();
    assert!(metrics.contains("thaw_trace_spans_total{outcome=\"sent\"}"), "{metrics}");
    assert!(metrics.contains("thaw_trace_spans_total{outcome=\"dropped\"} 0"), "{metrics}");
}

#[test]
fn an_invocation_in_the_queue_is_one_trace_with_all_its_attempts() {
    let collector = Collector::start();
    let home = home("traces-queue");
    let daemon = serve(&home, collector.address, &[]);
    let fields = format!("Prefer: respond-async\r\ntraceparent: 00-{TRACE}-{PARENT}-01\r\n");
    assert_eq!(ask(&daemon, "/fail", &fields).status, 202);
    wait_until("three attempts came", || collector.named("process receiver").len() == 3);
    let spans = || collector.trace(&bytes(TRACE));
    let of_attempts = || {
        let is_it =
            |span: &&Span| attribute(span, "http.response.status_code").as_deref() == Some("500");
        spans().iter().filter(is_it).cloned().collect::<Vec<_>>()
    };
    wait_until("their requests came", || of_attempts().len() == 3);
    let producers = collector.named("send receiver");
    assert_eq!((producers.len(), producers[0].kind), (1, 4));
    let all = spans();
    let parent = all.iter().find(|span| span.span_id == producers[0].parent_span_id);
    assert_eq!(parent.map(|span| span.parent_span_id.clone()), Some(bytes(PARENT)));
    for (attempt, number) in collector.named("process receiver").iter().zip(1..) {
        assert_eq!((attempt.kind, &attempt.parent_span_id), (5, &producers[0].span_id));
        assert_eq!(attempt.links[0].span_id, producers[0].span_id);
        assert_eq!(attribute(attempt, "thaw.attempt"), Some(number.to_string()));
        let of_attempt = of_attempts();
        let served = of_attempt.iter().filter(|span| span.parent_span_id == attempt.span_id);
        assert_eq!(served.count(), 1);
    }
    // What operators do is recorded, and what the gateway does for them belongs to it.
    command(&daemon, &["invoke", "receiver", "--path", "/op"]).success();
    let admin = collector.wait_for("POST /functions/{name}/invoke");
    let is_its = |span: &Span| span.parent_span_id == admin.span_id && span.name == "GET receiver";
    wait_until("its request came", || collector.named("GET receiver").iter().any(is_its));
}

#[test]
fn a_collector_that_never_answers_holds_nobody_up_and_drops_are_counted() {
    // Its backlog takes connections, and nobody reads.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = silent.local_addr().expect("an address");
    let home = home("traces-silent");
    let daemon = serve(&home, address, &["OTEL_BSP_MAX_QUEUE_SIZE=2"]);
    for number in 0..12 {
        assert_eq!(ask(&daemon, &format!("/{number}"), "").status, 200);
    }
    let dropped = |line: &str| {
        line.strip_prefix("thaw_trace_spans_total{outcome=\"dropped\"} ")?.parse::<u64>().ok()
    };
    wait_until("drops are counted", || {
        daemon.admin("/metrics").text().lines().find_map(dropped) > Some(0)
    });
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn an_endpoint_that_makes_no_sense_is_refused_with_a_way_out() {
    let home = home("traces-wrong");
    for (url, word) in [
        ("https://collector.example", "TLS"),
        ("collector:4318", "http://"),
        ("http://no-such-name.invalid:4318", "no address"),
    ] {
        let mut serve = thaw();
        serve.env("THAW_HOME", &home).args(["serve", "--listen", "127.0.0.1:0", "--otlp", url]);
        let said = thaw_e2e::run(&mut serve);
        let text = format!("{}{}", said.stdout, said.stderr);
        assert!(said.code != Some(0) && text.contains(word), "{url}: {text}");
    }
}
