//! Clients that speak TLS and HTTP/2, over instances that are threads of the test.

mod common;

use common::{Guest, Node, PATIENCE, field};
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::Bytes;
use hyper::client::conn::{http1, http2};
use hyper::{Request, Response, StatusCode, Version};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::io::Write;
use std::net::{SocketAddr, TcpStream as StdStream};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use tempfile::TempDir;
use thaw_node::edge::Rules;
use thaw_node::node::NodeState;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

const SHARED: &str = "isolation = \"instance\"";

/// A node with certificates, and what its clients trust.
struct Secure {
    node: Node,
    address: SocketAddr,
    directory: TempDir,
    roots: RootCertStore,
}

fn write(path: &Path, text: &str) {
    let _ = std::fs::remove_file(path);
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(path).unwrap();
    file.write_all(text.as_bytes()).unwrap();
}

/// Writes a certificate for these hosts.
fn certify(directory: &Path, name: &str, hosts: &[&str]) -> CertificateDer<'static> {
    let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(hosts).unwrap();
    write(&directory.join(format!("{name}.pem")), &cert.pem());
    write(&directory.join(format!("{name}.key")), &signing_key.serialize_pem());
    cert.der().clone()
}

fn rules(more: &str) -> String {
    format!(
        "{more}\n[tls]\nlisten = [\"127.0.0.1:0\"]
         [[tls.certificate]]\nchain = \"a.pem\"\nkey = \"a.key\"
         [[tls.certificate]]\nchain = \"b.pem\"\nkey = \"b.key\""
    )
}

impl Secure {
    fn over(node: Node, more: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut roots = RootCertStore::empty();
        for (name, hosts) in [("a", &["a.example", "f.example"][..]), ("b", &["*.b.example"])] {
            roots.add(certify(directory.path(), name, hosts)).unwrap();
        }
        node.rule(directory.path(), &rules(more));
        let address = node.listen_tls();
        Self { node, address, directory, roots }
    }

    fn new() -> Self {
        Self::over(Node::new(10), "")
    }

    /// Agrees on TLS with the node.
    async fn shake_hands(
        &self,
        name: &str,
        protocol: &str,
    ) -> std::io::Result<TlsStream<TcpStream>> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider);
        let builder = builder.with_safe_default_protocol_versions().unwrap();
        let mut config = builder.with_root_certificates(self.roots.clone()).with_no_client_auth();
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let stream = TcpStream::connect(self.address).await?;
        TlsConnector::from(Arc::new(config)).connect(name, stream).await
    }

    async fn http2(&self, name: &str) -> http2::SendRequest<Full<Bytes>> {
        let stream = self.shake_hands(name, "h2").await.unwrap();
        let builder = http2::Builder::new(TokioExecutor::new());
        let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        sender
    }

    /// One request with HTTP/1.1.
    async fn get(&self, name: &str, host: &str) -> std::io::Result<(StatusCode, String)> {
        let stream = self.shake_hands(name, "http/1.1").await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let request = Request::get("/x").header("host", host).body(Empty::<Bytes>::new()).unwrap();
        Ok(read(sender.send_request(request).await.unwrap()).await)
    }
}

async fn read(response: Response<hyper::body::Incoming>) -> (StatusCode, String) {
    let status = response.status();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8_lossy(&body).into_owned())
}

fn ask(url: &str) -> Request<Full<Bytes>> {
    Request::get(url).body(Full::default()).unwrap()
}

fn serve_heads(node: &Node, name: &str, keys: &str) {
    node.serve(name, keys, |guest: &mut Guest| {
        while let Some(request) = guest.request() {
            guest.answer(&request.head);
        }
    });
}

#[test]
fn each_host_has_its_certificate_and_its_function() {
    let secure = Secure::new();
    serve_heads(&secure.node, "f", SHARED);
    serve_heads(&secure.node, "a", "");
    secure.node.runtime.block_on(async {
        let (status, seen) = secure.get("f.example", "f.example").await.unwrap();
        assert_eq!(status, 200);
        assert_eq!(field(&seen, "x-forwarded-proto").as_deref(), Some("https"));
        // A last request is answered through the gateway, too: nobody else has the keys.
        assert_eq!(secure.get("a.example", "a.example").await.unwrap().0, 200);
        assert_eq!(secure.get("f.example", "a.example").await.unwrap().0, 200, "one certificate");
        let (status, told) = secure.get("f.example", "f.b.example").await.unwrap();
        assert_eq!(status, 421, "another certificate: {told}");
        assert_eq!(secure.get("f.b.example", "f.b.example").await.unwrap().0, 200);
        assert!(secure.get("c.example", "f.example").await.is_err(), "no certificate");
        assert!(secure.get("x.f.b.example", "f.b.example").await.is_err(), "no certificate");
    });
}

#[test]
fn requests_of_http2_are_routed_one_by_one() {
    let secure = Secure::new();
    serve_heads(&secure.node, "f", "");
    secure.node.serve("a", SHARED, |guest| {
        while let Some(request) = guest.request() {
            guest.answer(&request.body);
        }
    });
    secure.node.runtime.block_on(async {
        let mut sender = secure.http2("f.example").await;
        let mut request = ask("https://f.example/x?y");
        for cookie in ["a=1", "b=2"] {
            request.headers_mut().append("cookie", cookie.parse().unwrap());
        }
        let response = sender.send_request(request).await.unwrap();
        assert_eq!(response.version(), Version::HTTP_2);
        let (status, head) = read(response).await;
        assert_eq!(status, 200);
        assert!(head.starts_with("GET /x?y HTTP/1.1\r\n"), "{head}");
        assert_eq!(field(&head, "host").as_deref(), Some("f.example"));
        assert_eq!(field(&head, "cookie").as_deref(), Some("a=1; b=2"));
        let body = vec![b'x'; 300_000];
        let request = Request::post("https://a.example/").body(Full::from(body.clone())).unwrap();
        let (_, echoed) = read(sender.send_request(request).await.unwrap()).await;
        assert_eq!(echoed.len(), body.len());
        let (status, told) =
            read(sender.send_request(ask("https://nobody.b.example/")).await.unwrap()).await;
        assert_eq!(status, 421, "{told}");
    });
}

#[test]
fn requests_of_one_connection_are_under_way_at_once() {
    let secure = Secure::new();
    let barrier = Arc::new(std::sync::Barrier::new(5));
    let met = barrier.clone();
    secure.node.serve("f", "", move |guest| {
        guest.request();
        met.wait();
        guest.answer("together");
    });
    secure.node.runtime.block_on(async {
        let sender = secure.http2("f.example").await;
        let asked: Vec<_> = (0..5)
            .map(|_| {
                let mut sender = sender.clone();
                tokio::spawn(async move {
                    read(sender.send_request(ask("https://f.example/")).await.unwrap()).await
                })
            })
            .collect();
        for answer in asked {
            assert_eq!(timeout(PATIENCE, answer).await.unwrap().unwrap().1, "together");
        }
    });
}

#[test]
fn http2_without_tls_is_spoken_with_those_who_know() {
    let node = Node::new(10);
    serve_heads(&node, "f", SHARED);
    node.runtime.block_on(async {
        let stream = TcpStream::connect(node.address).await.unwrap();
        let builder = http2::Builder::new(TokioExecutor::new());
        let (mut sender, connection) = builder.handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let (status, head) = read(sender.send_request(ask("http://f/x")).await.unwrap()).await;
        assert_eq!(status, 200);
        assert!(head.starts_with("GET /x HTTP/1.1\r\n"), "{head}");
        assert_eq!(field(&head, "x-forwarded-proto"), None);
    });
}

#[test]
fn streams_count_as_clients_of_the_node() {
    let shared = NodeState::with_clients(100, 16);
    let secure = Secure::over(Node::over(shared, Duration::from_secs(5)), "");
    secure.node.serve("f", "", |guest| {
        guest.request();
        thread::sleep(PATIENCE);
    });
    secure.node.runtime.block_on(async {
        let sender = secure.http2("f.example").await;
        let (answered, mut answers) = tokio::sync::mpsc::unbounded_channel();
        for _ in 0..40 {
            let (mut sender, answered) = (sender.clone(), answered.clone());
            tokio::spawn(async move {
                let answer = sender.send_request(ask("https://f.example/")).await.unwrap();
                let _ = answered.send(read(answer).await);
            });
        }
        for _ in 0..40 - 16 {
            let (status, told) = timeout(PATIENCE, answers.recv()).await.unwrap().unwrap();
            assert_eq!(status, 503, "{told}");
        }
        // Those for which there is room wait for their instances.
        timeout(Duration::from_millis(500), answers.recv()).await.unwrap_err();
    });
}

#[test]
fn silent_clients_of_tls_make_room_and_end() {
    let shared = NodeState::with_clients(100, 16);
    let secure = Secure::over(Node::over(shared, Duration::from_secs(10)), "");
    serve_heads(&secure.node, "f", SHARED);
    // Each begins a handshake and says no more.
    let silent: Vec<_> = (0..60)
        .map(|_| {
            let mut stream = StdStream::connect(secure.address).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.write_all(b"\x16\x03\x01\x02\x00").unwrap();
            stream
        })
        .collect();
    secure.node.runtime.block_on(async {
        let answered = timeout(PATIENCE, secure.get("f.example", "f.example")).await;
        assert_eq!(answered.unwrap().unwrap().0, 200);
    });
    for mut stream in silent {
        // Those that did not have to make room have had their time.
        assert!(matches!(std::io::Read::read(&mut stream, &mut [0]), Ok(0) | Err(_)));
    }
}

#[test]
fn a_client_of_http2_that_takes_nothing_is_let_go() {
    let secure = Secure::new();
    let (service, _) = secure.node.serve("f", "[limits]\ntimeout = \"5s\"", |guest| {
        guest.request();
        guest.answer(vec![b'x'; 8 << 20]);
    });
    secure.node.runtime.block_on(async {
        let mut sender = secure.http2("f.example").await;
        let response = sender.send_request(ask("https://f.example/")).await.unwrap();
        assert_eq!(response.status(), 200);
        // Its body is not read: the windows of the stream are soon full.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let gone = async {
            while service.instance_count() > 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(PATIENCE, gone).await.expect("the instance ends");
        assert!(response.into_body().collect().await.is_err());
    });
}

#[test]
fn each_answer_of_a_connection_may_be_left_unread_as_long_as_its_function_says() {
    let secure = Secure::new();
    secure.node.serve("f", "[limits]\ntimeout = \"60s\"", |guest| {
        guest.request();
        guest.answer(vec![b'x'; 1 << 20]);
    });
    secure.node.serve("a", "[limits]\ntimeout = \"5s\"", |guest| {
        guest.request();
        guest.answer("at once");
    });
    secure.node.runtime.block_on(async {
        let mut sender = secure.http2("f.example").await;
        let unread = sender.send_request(ask("https://f.example/")).await.unwrap();
        let (_, hasty) = read(sender.send_request(ask("https://a.example/")).await.unwrap()).await;
        assert_eq!(hasty, "at once");
        tokio::time::sleep(Duration::from_secs(7)).await;
        assert_eq!(read(unread).await.1.len(), 1 << 20);
    });
}

#[test]
fn certificates_are_read_again() {
    let secure = Secure::new();
    serve_heads(&secure.node, "f", SHARED);
    let path = secure.directory.path().join("gateway.toml");
    write(&path, &rules(""));
    secure.node.shared.edge().read_from(path).unwrap();
    secure.node.runtime.block_on(async {
        assert_eq!(secure.get("f.example", "f.example").await.unwrap().0, 200);
    });
    certify(secure.directory.path(), "a", &["a.example", "f.example"]);
    // Until then, the old one is shown.
    secure.node.runtime.block_on(async {
        assert_eq!(secure.get("f.example", "f.example").await.unwrap().0, 200);
    });
    secure.node.shared.edge().reload().unwrap();
    secure.node.runtime.block_on(async {
        let error = secure.get("f.example", "f.example").await.unwrap_err();
        assert!(error.to_string().contains("certificate"), "{error}");
    });
    // A key that does not fit changes nothing.
    certify(secure.directory.path(), "other", &["x"]);
    std::fs::copy(secure.directory.path().join("other.key"), secure.directory.path().join("a.key"))
        .unwrap();
    let error = secure.node.shared.edge().reload().unwrap_err().to_string();
    assert!(error.contains("a.pem") && error.contains("does not fit"), "{error}");
    secure.node.runtime.block_on(async {
        assert_eq!(secure.get("f.b.example", "f.b.example").await.unwrap().0, 200);
    });
}

#[test]
fn keys_that_others_can_read_are_refused() {
    use std::os::unix::fs::PermissionsExt;
    let secure = Secure::new();
    let directory = secure.directory.path();
    let open = std::fs::Permissions::from_mode(0o644);
    std::fs::set_permissions(directory.join("a.key"), open).unwrap();
    let error = Rules::parse(&directory.join("gateway.toml"), &rules("")).unwrap_err();
    assert!(error.to_string().contains("chmod 600"), "{error}");
}

#[test]
fn plain_clients_of_the_tls_address_end() {
    let secure = Secure::new();
    serve_heads(&secure.node, "f", SHARED);
    let mut plain = common::Wire::connect(secure.address);
    plain.send("GET / HTTP/1.1\r\nHost: f\r\n\r\n");
    assert!(!String::from_utf8_lossy(&plain.rest()).contains("HTTP/1.1 200"));
}
