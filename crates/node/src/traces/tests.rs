//! Settings, the queue, and requests whose sandboxes say what cannot be.

use super::export::judge;
use super::request::Boots;
use super::*;
use crate::boots::{BootKind, BootRecord, Phases};
use crate::edge::Passage;
use crate::metrics::Metrics;
use hyper::Request;
use std::net::SocketAddr;
use std::time::Duration;

fn read(url: Option<&str>, variables: &[(&str, &str)]) -> Result<Option<TraceSettings>, String> {
    let variable = |name: &str| {
        let found = variables.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    let resolve = |host: &str, port: u16| match host {
        "collector" => Ok(vec![SocketAddr::from(([192, 0, 2, 1], port))]),
        _ => Err(std::io::ErrorKind::NotFound.into()),
    };
    TraceSettings::read(url, &variable, &resolve)
}

fn on(variables: &[(&str, &str)]) -> TraceSettings {
    read(Some("http://127.0.0.1:1"), variables).unwrap().unwrap()
}

#[test]
fn nothing_is_traced_unless_somebody_asks() {
    assert!(read(None, &[]).unwrap().is_none());
    assert!(read(None, &[("OTEL_EXPORTER_OTLP_ENDPOINT", " ")]).unwrap().is_none());
    for off in [("OTEL_SDK_DISABLED", "True"), ("OTEL_TRACES_EXPORTER", "none")] {
        assert!(read(Some("http://127.0.0.1"), &[off]).unwrap().is_none());
    }
}

#[test]
fn endpoints_are_those_of_the_specification() {
    let base = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:9/otlp/");
    let own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://[::1]/my");
    for (url, variables, address, path) in [
        (None, &[base][..], "192.0.2.1:9", "/otlp/v1/traces"),
        (None, &[base, own], "[::1]:4318", "/my"),
        (Some("http://127.0.0.1"), &[base, own], "127.0.0.1:4318", "/v1/traces"),
    ] {
        let settings = read(url, variables).unwrap().unwrap();
        assert_eq!((settings.address.to_string(), &*settings.path), (address.to_owned(), path));
    }
}

#[test]
fn variables_are_read_and_wrong_ones_are_told() {
    let settings = on(&[
        ("OTEL_SERVICE_NAME", "a"),
        ("OTEL_RESOURCE_ATTRIBUTES", "service.name=b,zone=x%20y"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20t"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "7"),
    ]);
    assert_eq!(settings.resource[0], ("service.name".to_owned(), "a".to_owned()));
    assert_eq!(settings.resource[1], ("zone".to_owned(), "x y".to_owned()));
    assert_eq!(settings.headers[0].1, "Bearer t");
    assert!(!format!("{settings:?}").contains("Bearer"));
    assert_eq!((settings.queue_max, settings.batch_max), (7, 7));
    for (name, value, word) in [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip", "none"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "0", "from 1"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "65537", "65536"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a b=secret", "no header"),
        ("OTEL_RESOURCE_ATTRIBUTES", "x", "key=value"),
        ("OTEL_TRACES_SAMPLER", "x", "traceidratio"),
    ] {
        let error = read(Some("http://127.0.0.1"), &[(name, value)]).unwrap_err();
        assert!(error.contains(word) && !error.contains("secret"), "{error}");
    }
    for url in ["https://x", "x:1", "http://u@x", "http://x/?q", "http://", "http://missing"] {
        assert!(read(Some(url), &[]).is_err(), "{url}");
    }
}

#[test]
fn a_full_queue_drops_and_counts() {
    let metrics = Metrics::default();
    let settings = on(&[("OTEL_BSP_MAX_QUEUE_SIZE", "3")]);
    let tracer = Tracer::new(settings, metrics.traces().clone());
    for _ in 0..5 {
        let span = Span::child(RequestId::new(), "x", (1, 2));
        tracer.record(Record::Span(Box::new(span)));
    }
    assert_eq!(metrics.traces().dropped.get(), 2);
    assert_eq!((tracer.take().len(), tracer.take().len()), (3, 0));
}

#[tokio::test]
async fn a_collector_that_is_down_costs_a_batch_and_no_more() {
    let metrics = Metrics::default();
    let tracer = Tracer::new(on(&[]), metrics.traces().clone());
    tracer.record(Record::Span(Box::new(Span::child(RequestId::new(), "x", (1, 2)))));
    tracer.finish(&RecentBoots::default()).await;
    assert_eq!((metrics.traces().failed.get(), metrics.traces().sent.get()), (1, 0));
}

#[test]
fn answers_of_collectors_are_heeded() {
    let wait = Some(Duration::from_secs(3));
    let status = |code: u16| hyper::StatusCode::from_u16(code).unwrap();
    // `partial_success { rejected_spans: 2 }`
    assert_eq!(judge(status(200), None, &[0x0a, 2, 8, 2]), Ok(2));
    assert_eq!(judge(status(200), None, b"\xff\xff"), Ok(0));
    for code in [429, 502, 503, 504] {
        let judged = judge(status(code), wait, b"");
        assert!(matches!(judged, Err(export::Failure::Again(_, found)) if found == wait), "{code}");
    }
    for code in [400, 401, 404, 413, 500, 301] {
        assert!(matches!(judge(status(code), wait, b""), Err(export::Failure::Final(_))), "{code}");
    }
}

#[test]
fn a_sandbox_cannot_say_that_its_boot_was_outside_of_its_request() {
    let hostile = [0, 1, u64::MAX / 2, u64::MAX];
    for received in hostile {
        for (mapped, entered) in [(u64::MAX, 0), (0, u64::MAX), (5, 1)] {
            let spans = spans_with(Phases {
                zygote: 10,
                received: Some(received),
                mapped: Some(mapped),
                first_instruction: Some(entered),
                first_byte: Some(received),
            });
            let root = spans[0].clone();
            assert_eq!(spans.len(), 8, "{spans:?}");
            for span in &spans {
                assert!(span.start_ns <= span.end_ns, "{span:?}");
                assert!(root.start_ns <= span.start_ns && span.end_ns <= root.end_ns, "{span:?}");
            }
        }
    }
}

/// The spans of a request with a boot of these phases.
fn spans_with(phases: Phases) -> Vec<Span> {
    let peer: SocketAddr = "127.0.0.1:9".parse().unwrap();
    let since_ns = thaw_home::clock::monotonic_ns();
    let request = Request::builder().uri("/a?b").header("host", "f:80").body(()).unwrap();
    let came = Came { peer, is_tls: false, since_ns };
    let trace = RequestTrace::new(RequestId::new(), &request, came);
    trace.placed_for_test(7);
    let passage = Passage { status: Some(200), ..Passage::default() };
    let record = trace.finish(&passage);
    let boots = RecentBoots::default();
    boots.add(BootRecord {
        function: "f".parse().unwrap(),
        instance: 7,
        kind: BootKind::Warm,
        peer,
        accepted_ns: since_ns,
        phases,
    });
    let found = Boots::of(std::slice::from_ref(&record), &boots);
    record.into_spans(&found)
}

#[test]
fn what_clients_choose_has_a_bound() {
    let long = "x".repeat(10_000);
    let request = Request::builder()
        .method(&*long)
        .uri(format!("/{long}?q={long}"))
        .header("host", &long)
        .header("user-agent", &long)
        .body(())
        .unwrap();
    let came = Came { peer: "127.0.0.1:9".parse().unwrap(), is_tls: false, since_ns: 1 };
    let record = RequestTrace::new(RequestId::new(), &request, came).finish(&Passage::default());
    let span = record.into_spans(&Boots::of(&[], &RecentBoots::default())).remove(0);
    assert_eq!(span.name, "HTTP");
    assert!(format!("{:?}", span.attributes).len() < 3000);
}
