//! The gateway with real clients and sockets, over instances that are threads
//! of the test.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll};
use std::thread;
use std::time::{Duration, Instant};
use thaw_home::config::FunctionConfig;
use thaw_node::boots::BootKind;
use thaw_node::edge::Addresses;
use thaw_node::gateway::{Gateway, GatewayConfig};
use thaw_node::instance::{
    Client, Connector, End, FrozenInstance, Instance, LaunchError, Launched, Launcher, NotNow,
    Report,
};
use thaw_node::node::NodeState;
use thaw_node::remote::RemoteChannel;
use thaw_node::service::{InstanceInfo, Service, Services};
use thaw_sandbox::{BootTimes, GuestExit};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

/// What a fake function does with a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Behaviour {
    /// Answers and closes, once for every connection.
    Answer,
    /// Dies with the request read and nothing answered.
    Die,
    /// Answers half and dies.
    DieInTheMiddle,
    /// Never answers.
    Hang,
    /// Cannot be booted.
    NoBoot,
    /// Answers the first connection, and dies untouched when it gets a second.
    DieWhenReused,
    /// Answers the first connection, and cannot be given a second.
    TakeNoSecond,
    /// Dies untouched if it was booted ahead, as all are until they are given up.
    DieReady,
    /// The first so many zygotes are killed before their guests run.
    DieInBoot(u32),
    /// Its zygote is killed, and the request was read all the same.
    ReadAndDieInBoot,
    /// Others have just taken what is ready, and so many boots end only together.
    BootTogether(u32),
}

struct FakeLauncher {
    behaviour: Behaviour,
    ready: AtomicBool,
    launched: AtomicU32,
    given_up: AtomicBool,
}

struct FakeInstance {
    reports: mpsc::UnboundedReceiver<Report>,
    guest: Arc<FakeGuest>,
}

struct FakeGuest {
    number: u32,
    behaviour: Behaviour,
    sender: mpsc::UnboundedSender<Report>,
    /// The guest's descriptors by connection, which vanish with it.
    sockets: Arc<Mutex<HashMap<u64, TcpStream>>>,
    connections: AtomicU32,
}

impl FakeLauncher {
    fn new(behaviour: Behaviour) -> Arc<Self> {
        Arc::new(Self {
            behaviour,
            ready: AtomicBool::new(true),
            launched: AtomicU32::new(0),
            given_up: AtomicBool::new(false),
        })
    }
}

impl Launcher for FakeLauncher {
    fn launch(&self, client: Option<&Client>) -> Result<Launched, LaunchError> {
        if self.behaviour == Behaviour::NoBoot {
            return Err(LaunchError::Failed("there is no image".to_owned()));
        }
        let number = self.launched.fetch_add(1, Ordering::SeqCst) + 1;
        if let Behaviour::BootTogether(count) = self.behaviour {
            let began = Instant::now();
            while self.launched.load(Ordering::SeqCst) < count {
                if began.elapsed() > Duration::from_secs(60) {
                    return Err(LaunchError::Failed("it has waited for itself".to_owned()));
                }
                thread::sleep(Duration::from_millis(1));
            }
        }
        let (sender, reports) = mpsc::unbounded_channel();
        let guest = Arc::new(FakeGuest {
            number,
            behaviour: self.behaviour,
            sender,
            sockets: Arc::default(),
            connections: AtomicU32::new(0),
        });
        let is_dying =
            self.behaviour == Behaviour::DieReady && !self.given_up.load(Ordering::SeqCst);
        let dies_in_boot = match self.behaviour {
            Behaviour::DieInBoot(count) => number <= count,
            Behaviour::ReadAndDieInBoot => {
                let client = client.expect("all boots here are for clients");
                let _ = read_head(&mut TcpStream::from(client.socket.try_clone().unwrap()));
                true
            }
            _ => false,
        };
        if is_dying || dies_in_boot {
            guest.sender.send(Report::Gone(End::Killed(Some(9)))).unwrap();
        } else {
            if let Some(client) = client {
                guest.connect(client).unwrap();
            }
            guest.sender.send(Report::Booted(times(0))).unwrap();
        }
        let instance = FakeInstance { reports, guest };
        Ok(Launched {
            kind: if is_dying { BootKind::Ready } else { BootKind::Warm },
            instance: Box::new(instance),
            zygote_ns: client.map_or(0, |c| c.accepted_ns),
            execs: None,
        })
    }

    fn launch_now(&self, client: Option<&Client>) -> Result<Launched, NotNow> {
        match self.behaviour {
            Behaviour::BootTogether(_) => Err(NotNow::WouldWait),
            _ if !self.is_ready() => Err(NotNow::WouldWait),
            _ => Ok(self.launch(client)?),
        }
    }

    fn is_ready(&self) -> bool {
        self.ready.load(Ordering::SeqCst)
    }

    fn give_up_ready(&self) {
        self.given_up.store(true, Ordering::SeqCst);
    }
}

impl Connector for FakeGuest {
    fn connect(&self, client: &Client) -> io::Result<()> {
        let connections = self.connections.fetch_add(1, Ordering::SeqCst) + 1;
        if connections == 2 {
            match self.behaviour {
                Behaviour::DieWhenReused => {
                    let _ = self.sender.send(Report::Gone(End::Exited(GuestExit::Code(0))));
                    return Ok(());
                }
                Behaviour::TakeNoSecond => return Err(io::ErrorKind::BrokenPipe.into()),
                _ => {}
            }
        }
        let socket = TcpStream::from(client.socket.try_clone()?);
        let (id, number, behaviour) = (client.id, self.number, self.behaviour);
        let (sender, sockets) = (self.sender.clone(), self.sockets.clone());
        sockets.lock().unwrap().insert(id, socket.try_clone()?);
        thread::spawn(move || serve(socket, id, number, behaviour, &sender, &sockets));
        Ok(())
    }
}

impl RemoteChannel for FakeGuest {}

impl Instance for FakeInstance {
    fn pid(&self) -> u32 {
        self.guest.number
    }

    fn connector(&self) -> Arc<dyn Connector> {
        self.guest.clone()
    }

    fn ring_if_unread(&mut self) {}

    fn end_unreachable(&mut self) {
        // How it has ended is in its last report.
        let _ = self.guest.sender.send(Report::Gone(End::Exited(GuestExit::Signal(11))));
    }

    fn kill(&mut self) {
        self.guest.sockets.lock().unwrap().clear();
        let _ = self.guest.sender.send(Report::Gone(End::Killed(Some(9))));
    }

    fn poll_report(&mut self, context: &mut Context<'_>) -> Poll<Report> {
        self.reports.poll_recv(context).map(|report| report.expect("a sender is kept"))
    }

    fn request_rest(&mut self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn freeze(&mut self, _: thaw_abi::control::EntryPoint) -> Result<FrozenInstance, String> {
        Err("a thread of a test has no image".to_owned())
    }

    fn first_request_done(&mut self) {}
}

/// Like a guest that has waited for something before it answered, if it has.
fn times(first_byte_ns: u64) -> BootTimes {
    BootTimes { received_ns: 1, mapped_ns: 2, first_instruction_ns: 3, first_byte_ns }
}

fn serve(
    mut socket: TcpStream,
    id: u64,
    number: u32,
    behaviour: Behaviour,
    reports: &mpsc::UnboundedSender<Report>,
    sockets: &Mutex<HashMap<u64, TcpStream>>,
) {
    if behaviour == Behaviour::Hang {
        return;
    }
    let request = read_head(&mut socket);
    if behaviour == Behaviour::Die {
        sockets.lock().unwrap().clear();
        drop(socket);
        let _ = reports.send(Report::Gone(End::Exited(GuestExit::Signal(11))));
        return;
    }
    let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
    let body = format!("instance {number} {path}");
    let response = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    if behaviour == Behaviour::DieInTheMiddle {
        write_all(&mut socket, &response.as_bytes()[..10]);
        sockets.lock().unwrap().clear();
        drop(socket);
        let _ = reports.send(Report::Gone(End::Exited(GuestExit::Code(3))));
        return;
    }
    write_all(&mut socket, response.as_bytes());
    let _ = reports.send(Report::Booted(times(u64::MAX)));
    sockets.lock().unwrap().remove(&id);
    drop(socket);
    let _ = reports.send(Report::ConnectionClosed(id));
}

/// Sockets of guests are non-blocking; these guests have no event loop.
fn retry<T>(mut action: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match action() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                thread::sleep(Duration::from_millis(1));
            }
            other => return other,
        }
    }
}

fn read_head(socket: &mut TcpStream) -> String {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        match retry(|| socket.read(&mut byte)) {
            Ok(1) => head.push(byte[0]),
            _ => break,
        }
    }
    String::from_utf8_lossy(&head).into_owned()
}

fn write_all(socket: &mut TcpStream, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match retry(|| socket.write(bytes)) {
            Ok(count) => bytes = &bytes[count..],
            Err(_) => return,
        }
    }
}

/// A node with one function, `f`, behind a real listener.
struct Fixture {
    runtime: Runtime,
    shared: Arc<NodeState>,
    services: Arc<Services>,
    launcher: Arc<FakeLauncher>,
    service: Arc<Service>,
    address: SocketAddr,
}

const USUAL: &str = "timeout = \"30s\"\nqueue = \"30s\"";

fn fixture(behaviour: Behaviour, limits: &str, isolation: &str) -> Fixture {
    fixture_of(behaviour, limits, isolation, 100, Duration::from_secs(30))
}

fn fixture_of(
    behaviour: Behaviour,
    limits: &str,
    isolation: &str,
    instances: usize,
    head_timeout: Duration,
) -> Fixture {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let text = format!(
        "name = \"f\"\ncommand = [\"x\"]\nport = 80\nrootfs = \"./r\"\nisolation = \"{isolation}\"\n[limits]\n{limits}\n"
    );
    let config = FunctionConfig::parse("thaw.toml".as_ref(), &text).unwrap();
    let shared = NodeState::new(instances);
    let services = Services::new(shared.clone());
    let launcher = FakeLauncher::new(behaviour);
    let service = Service::new(config, "image".into(), launcher.clone(), services.clone());
    services.install(service.clone());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let gateway = Gateway::new(services.clone(), Weak::new(), GatewayConfig { head_timeout });
    runtime.spawn(gateway.listen(listener, None));
    Fixture { runtime, shared, services, launcher, service, address }
}

impl Fixture {
    fn connect(&self) -> TcpStream {
        let client = TcpStream::connect(self.address).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        client
    }

    fn exchange(&self, request: &[u8]) -> Response {
        let mut client = self.connect();
        client.write_all(request).unwrap();
        Response::read(client)
    }

    fn get(&self, path: &str) -> Response {
        let head = format!("GET {path} HTTP/1.1\r\nHost: f\r\nConnection: close\r\n\r\n");
        self.exchange(head.as_bytes())
    }

    /// A request on a connection on which more could follow.
    fn get_routed(&self, path: &str) -> Response {
        self.exchange(format!("GET {path} HTTP/1.1\r\nHost: f\r\n\r\n").as_bytes())
    }

    /// The same by the admin API, which is told what went wrong.
    fn get_both_as_operator(&self, path: &str) -> [Response; 2] {
        ["close", "keep-alive"].map(|connection| {
            let mut client = self.connect();
            let addresses =
                Addresses { client: client.local_addr().unwrap(), gateway: self.address };
            let _trust = self.shared.edge().operators().trust(addresses);
            let head =
                format!("GET {path} HTTP/1.1\r\nHost: f\r\nConnection: {connection}\r\n\r\n");
            client.write_all(head.as_bytes()).unwrap();
            Response::read(client)
        })
    }

    /// The request in both ways.
    fn get_both(&self, path: &str) -> [Response; 2] {
        [self.get(path), self.get_routed(path)]
    }

    /// Waits until something becomes true, however long the machine takes.
    fn eventually(&self, condition: impl Fn() -> bool) {
        let until = Instant::now() + Duration::from_secs(60);
        while !condition() {
            assert!(Instant::now() < until, "it never became true");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

#[derive(Debug)]
struct Response {
    status: u16,
    head: String,
    body: String,
}

impl Response {
    /// Reads to the end of the connection, or of a body whose length is known.
    fn read(mut client: TcpStream) -> Self {
        let mut bytes = Vec::new();
        let mut piece = [0; 4096];
        loop {
            let text = String::from_utf8_lossy(&bytes).into_owned();
            if let Some((head, body)) = text.split_once("\r\n\r\n") {
                let length = head.lines().find_map(|line| {
                    let (name, value) = line.split_once(": ")?;
                    name.eq_ignore_ascii_case("content-length").then(|| value.parse().unwrap())
                });
                if length.is_some_and(|length: usize| body.len() >= length) {
                    break;
                }
            }
            match client.read(&mut piece).unwrap() {
                0 => break,
                count => bytes.extend_from_slice(&piece[..count]),
            }
        }
        let text = String::from_utf8(bytes).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        Self { status, head: head.to_owned(), body: body.to_owned() }
    }

    /// The error of a refusal, whose reason must not be empty.
    fn error(&self) -> String {
        let body: serde_json::Value = serde_json::from_str(&self.body).unwrap();
        assert!(!body["reason"].as_str().unwrap().is_empty());
        body["error"].as_str().unwrap().to_owned()
    }
}

#[test]
fn every_connection_gets_a_fresh_instance_by_default() {
    let fixture = fixture(Behaviour::Answer, USUAL, "request");
    let bodies: HashSet<_> = (0..5)
        .flat_map(|_| fixture.get_both("/x"))
        .map(|response| {
            assert_eq!(response.status, 200);
            response.body
        })
        .collect();
    assert_eq!(bodies.len(), 10, "{bodies:?}");
    fixture.eventually(|| fixture.service.instance_count() == 0);
    assert_eq!(fixture.shared.boots().of("f", 20).len(), 10);
}

#[test]
fn an_instance_serves_one_connection_after_the_other() {
    let fixture = fixture(Behaviour::Answer, USUAL, "instance");
    for _ in 0..5 {
        assert_eq!(fixture.get("/").body, "instance 1 /");
        fixture
            .eventually(|| fixture.service.instances().first().is_some_and(|i| i.connections == 0));
    }
    assert_eq!(fixture.launcher.launched.load(Ordering::SeqCst), 1);
}

#[test]
fn a_boot_that_is_reported_before_its_first_byte_is_completed() {
    let fixture = fixture(Behaviour::Answer, USUAL, "instance");
    for _ in 0..2 {
        assert_eq!(fixture.get("/").status, 200);
    }
    let boots = || fixture.shared.boots().of("f", 10);
    fixture.eventually(|| boots().iter().any(|boot| boot.phases.first_byte.is_some()));
    fixture.eventually(|| boots().len() as u64 == fixture.shared.boots().count(BootKind::Warm));
}

#[test]
fn free_places_are_found_again() {
    let limits = format!("{USUAL}\nconcurrency = 2\ninstances = 3");
    let fixture = fixture(Behaviour::Answer, &limits, "instance");
    for _ in 0..5 {
        thread::scope(|scope| {
            let all: Vec<_> = (0..12).map(|_| scope.spawn(|| fixture.get("/").status)).collect();
            assert!(all.into_iter().all(|client| client.join().unwrap() == 200));
        });
    }
    let idle = |instance: &InstanceInfo| instance.connections == 0;
    fixture.eventually(|| fixture.service.instances().iter().all(idle));
    let launched = fixture.launcher.launched.load(Ordering::SeqCst);
    assert!(launched <= 3, "{launched} instances");
    for instance in fixture.service.instances() {
        fixture.service.kill(instance.id);
    }
    fixture.eventually(|| fixture.service.instance_count() == 0);
    assert_eq!(fixture.get("/").body, format!("instance {} /", launched + 1));
}

#[test]
fn an_idle_instance_ends_after_keep_alive() {
    let fixture = fixture(Behaviour::Answer, "keep_alive = \"50ms\"", "instance");
    assert_eq!(fixture.get("/").status, 200);
    fixture.eventually(|| fixture.service.instance_count() == 0);
}

#[test]
fn heads_arrive_in_pieces_and_with_more_behind_them() {
    let fixture = fixture(Behaviour::Answer, USUAL, "request");
    let mut client = fixture.connect();
    for piece in b"GET /slow HTTP/1.1\r\nHost: f\r\n\r\n".chunks(3) {
        client.write_all(piece).unwrap();
        thread::sleep(Duration::from_millis(5));
    }
    assert!(Response::read(client).body.ends_with(" /slow"));
    let two = b"GET /1 HTTP/1.1\r\nHost: f\r\n\r\nGET /2 HTTP/1.1\r\nHost: g\r\n\r\n";
    let mut client = fixture.connect();
    client.write_all(two).unwrap();
    let mut buffer = [0; 15];
    client.read_exact(&mut buffer).unwrap();
    assert_eq!(&buffer, b"HTTP/1.1 200 OK");
}

#[test]
fn unknown_functions_are_404() {
    let fixture = fixture(Behaviour::Answer, USUAL, "request");
    for host in ["g", "127.0.0.1:80", ""] {
        let response =
            fixture.exchange(format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes());
        assert_eq!((response.status, response.error().as_str()), (404, "not_found"));
    }
    for connection in ["close", "keep-alive"] {
        let request = format!("GET / HTTP/1.1\r\nHost: g\r\nConnection: {connection}\r\n\r\n");
        let head = fixture.exchange(request.as_bytes()).head;
        assert!(head.contains("Content-Type: application/json"), "{head}");
    }
}

#[test]
fn unreadable_heads_are_400() {
    let fixture = fixture(Behaviour::Answer, USUAL, "request");
    for head in [
        &b"\x16\x03\x01\x00\xa5\x01\x00\x00"[..],
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: f\r\nHost: g\r\n\r\n",
    ] {
        let response = fixture.exchange(head);
        assert_eq!((response.status, response.error().as_str()), (400, "bad_request"));
    }
    let mut client = fixture.connect();
    client.write_all(b"GET / HTTP/1.1\r\nHo").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(Response::read(client).status, 400);
}

#[test]
fn huge_heads_are_431() {
    let fixture = fixture(Behaviour::Answer, USUAL, "request");
    let head = format!("GET / HTTP/1.1\r\nHost: f\r\nX: {}\r\n\r\n", "x".repeat(100_000));
    let response = fixture.exchange(head.as_bytes());
    assert_eq!((response.status, response.error().as_str()), (431, "head_too_large"));
}

#[test]
fn slow_heads_are_408_and_silent_clients_are_let_go() {
    let limit = Duration::from_secs(2);
    let fixture = fixture_of(Behaviour::Answer, USUAL, "request", 10, limit);
    let response = fixture.exchange(b"GET / HTTP/1.1\r\n");
    assert_eq!((response.status, response.error().as_str()), (408, "head_too_slow"));
    assert_eq!(Response::read(fixture.connect()).status, 408);
    drop(fixture.connect());
    assert_eq!(fixture.get("/").status, 200);
}

#[test]
fn an_instance_that_dies_before_its_answer_is_502() {
    let fixture = fixture(Behaviour::Die, USUAL, "request");
    for response in fixture.get_both("/") {
        assert_eq!((response.status, response.error().as_str()), (502, "bad_gateway"));
        assert!(!response.body.contains("signal"), "{}", response.body);
    }
    for response in fixture.get_both_as_operator("/") {
        assert_eq!((response.status, response.error().as_str()), (502, "instance_died"));
        assert!(response.body.contains("by signal 11"), "{}", response.body);
    }
    let head = b"HEAD / HTTP/1.1\r\nHost: f\r\nConnection: close\r\n\r\n";
    let response = fixture.exchange(head);
    assert_eq!((response.status, response.body.as_str()), (502, ""));
}

#[test]
fn an_instance_that_dies_in_its_answer_leaves_it_cut_short_where_it_was_handed_the_client() {
    let fixture = fixture(Behaviour::DieInTheMiddle, USUAL, "request");
    let mut client = fixture.connect();
    client.write_all(b"GET / HTTP/1.1\r\nHost: f\r\nConnection: close\r\n\r\n").unwrap();
    let mut bytes = Vec::new();
    client.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, b"HTTP/1.1 2");
    // The gateway can tell where it routes.
    assert_eq!(fixture.get_routed("/").error(), "bad_gateway");
}

#[test]
fn an_image_that_does_not_boot_is_502() {
    let fixture = fixture(Behaviour::NoBoot, USUAL, "request");
    for response in fixture.get_both_as_operator("/") {
        assert_eq!(response.status, 502);
        assert!(response.body.contains("there is no image"), "{}", response.body);
    }
}

/// The first instance answers one request; the next one goes to a second instance.
fn check_second_instance_answers(behaviour: Behaviour) {
    let fixture = fixture(behaviour, USUAL, "instance");
    assert_eq!(fixture.get("/").body, "instance 1 /");
    fixture.eventually(|| fixture.service.instances().first().is_some_and(|i| i.connections == 0));
    assert_eq!(fixture.get("/").body, "instance 2 /");
    fixture.eventually(|| fixture.service.instance_count() == 1);
    // Both ways find this out.
    let fixture = fixture_of(behaviour, USUAL, "instance", 100, Duration::from_secs(5));
    assert_eq!(fixture.get_routed("/").body, "instance 1 /");
    fixture.eventually(|| fixture.service.instances().first().is_some_and(|i| i.connections == 0));
    assert_eq!(fixture.get_routed("/").body, "instance 2 /");
    fixture.eventually(|| fixture.service.instance_count() == 1);
}

#[test]
fn a_connection_that_a_dying_instance_did_not_touch_is_placed_anew() {
    check_second_instance_answers(Behaviour::DieWhenReused);
}

#[test]
fn one_instance_that_dies_ready_is_enough_to_use_no_other() {
    let fixture = fixture(Behaviour::DieReady, USUAL, "request");
    assert_eq!(fixture.get("/").body, "instance 2 /");
    fixture.eventually(|| fixture.service.instance_count() == 0);
    let fixture = fixture_of(Behaviour::DieReady, USUAL, "request", 100, Duration::from_secs(5));
    assert_eq!(fixture.get_routed("/").body, "instance 2 /");
}

#[test]
fn a_connection_whose_zygote_was_killed_before_its_guest_ran_is_placed_anew() {
    for isolation in ["request", "instance"] {
        let fixture = fixture(Behaviour::DieInBoot(2), USUAL, isolation);
        assert_eq!(fixture.get("/").body, "instance 3 /");
    }
}

#[test]
fn a_connection_whose_zygotes_are_always_killed_is_502() {
    let fixture = fixture(Behaviour::DieInBoot(u32::MAX), USUAL, "request");
    let response = fixture.get("/");
    assert_eq!((response.status, response.error().as_str()), (502, "bad_gateway"));
    assert_eq!(fixture.launcher.launched.load(Ordering::SeqCst), 3);
}

#[test]
fn a_request_that_was_read_is_not_given_to_another_instance() {
    let fixture = fixture(Behaviour::ReadAndDieInBoot, USUAL, "request");
    assert_eq!(fixture.get("/").status, 502);
    assert_eq!(fixture.launcher.launched.load(Ordering::SeqCst), 1);
}

#[test]
fn an_instance_that_takes_no_connection_is_replaced() {
    check_second_instance_answers(Behaviour::TakeNoSecond);
}

#[test]
fn the_end_of_one_that_was_found_dead_by_a_connection_is_not_taken_for_a_wanted_one() {
    let limits = format!("{USUAL}\ncrashes = 1");
    let fixture = fixture(Behaviour::TakeNoSecond, &limits, "instance");
    assert_eq!(fixture.get("/").body, "instance 1 /");
    fixture.eventually(|| fixture.service.instances().first().is_some_and(|i| i.connections == 0));
    // It crashed, which counts.
    fixture.eventually(|| {
        let response = fixture.get("/");
        response.status == 503 && response.error() == "unavailable"
    });
    let metrics = fixture.shared.metrics().text(&[], 0);
    // Those of further rounds are found dead, too.
    let ended = "thaw_instances_ended_total{function=\"f\",expected=\"no\"} ";
    assert!(metrics.contains(ended), "{metrics}");
    assert!(!metrics.contains("thaw_instances_ended_total{function=\"f\",expected=\"yes\"}"));
}

#[test]
fn too_many_connections_are_503_with_retry_after() {
    let limits = "instances = 1\nqueue = \"50ms\"\ntimeout = \"60s\"";
    let fixture = fixture(Behaviour::Hang, limits, "request");
    let mut hanging = fixture.connect();
    hanging.write_all(b"GET / HTTP/1.1\r\nHost: f\r\n\r\n").unwrap();
    fixture.eventually(|| fixture.service.instance_count() == 1);
    for response in fixture.get_both("/") {
        assert_eq!((response.status, response.error().as_str()), (503, "unavailable"));
        assert!(response.head.contains("Retry-After: 1"), "{}", response.head);
    }
}

#[test]
fn connections_wait_for_an_instance_in_turn() {
    let fixture = fixture(Behaviour::Answer, "instances = 1\nqueue = \"60s\"", "request");
    let clients: Vec<_> = (0..10)
        .map(|_| {
            let mut client = fixture.connect();
            client.write_all(b"GET / HTTP/1.1\r\nHost: f\r\n\r\n").unwrap();
            client
        })
        .collect();
    for client in clients {
        assert_eq!(Response::read(client).status, 200);
    }
}

#[test]
fn a_full_node_ends_an_idle_instance_to_make_room() {
    let fixture = fixture_of(Behaviour::Answer, USUAL, "instance", 1, Duration::from_secs(5));
    let text = "name = \"g\"\ncommand = [\"x\"]\nport = 80\nrootfs = \"./r\"\n";
    let config = FunctionConfig::parse("thaw.toml".as_ref(), text).unwrap();
    let launcher = FakeLauncher::new(Behaviour::Answer);
    let other = Service::new(config, "image".into(), launcher, fixture.services.clone());
    fixture.services.install(other);
    assert_eq!(fixture.get("/").status, 200);
    fixture.eventually(|| fixture.service.instances().first().is_some_and(|i| i.connections == 0));
    let response = fixture.exchange(b"GET / HTTP/1.1\r\nHost: g\r\n\r\n");
    assert_eq!(response.status, 200);
}

#[test]
fn a_zygote_that_is_not_ready_is_waited_for() {
    let fixture = fixture(Behaviour::Answer, USUAL, "request");
    fixture.launcher.ready.store(false, Ordering::SeqCst);
    assert!(fixture.get_both("/").iter().all(|response| response.status == 200));
}

/// More boots wait at a time than the runtime has threads that serve clients.
#[test]
fn boots_that_wait_hold_up_no_thread_that_serves_clients() {
    let count = 4;
    let fixture = fixture(Behaviour::BootTogether(count), USUAL, "request");
    let clients: Vec<_> = (0..count)
        .map(|_| {
            let mut client = fixture.connect();
            client.write_all(b"GET / HTTP/1.1\r\nHost: f\r\n\r\n").unwrap();
            client
        })
        .collect();
    for client in clients {
        assert_eq!(Response::read(client).status, 200);
    }
}

#[test]
fn a_function_that_never_answers_is_504_and_its_instance_ends() {
    let fixture = fixture(Behaviour::Hang, "timeout = \"100ms\"", "request");
    for response in fixture.get_both("/") {
        assert_eq!((response.status, response.error().as_str()), (504, "timeout"));
    }
    fixture.eventually(|| fixture.service.instance_count() == 0);
}

#[test]
fn a_draining_node_answers_503_and_finishes_its_work() {
    let fixture = fixture(Behaviour::Hang, "timeout = \"60s\"", "request");
    let mut hanging = fixture.connect();
    hanging.write_all(b"GET / HTTP/1.1\r\nHost: f\r\n\r\n").unwrap();
    fixture.eventually(|| fixture.service.instance_count() == 1);
    let services = fixture.services.clone();
    fixture.runtime.spawn(async move { services.drain(Duration::from_millis(200)).await });
    fixture.eventually(|| fixture.shared.is_draining());
    for response in fixture.get_both("/") {
        assert_eq!((response.status, response.error().as_str()), (503, "unavailable"));
    }
    fixture.eventually(|| fixture.service.instance_count() == 0);
    assert_eq!(Response::read(hanging).status, 502);
}

#[test]
fn a_replaced_function_serves_its_new_version() {
    let fixture = fixture(Behaviour::Answer, USUAL, "instance");
    assert_eq!(fixture.get("/").body, "instance 1 /");
    fixture.eventually(|| fixture.service.instances().first().is_some_and(|i| i.connections == 0));
    let text = "name = \"f\"\ncommand = [\"x\"]\nport = 80\nrootfs = \"./r\"\n";
    let config = FunctionConfig::parse("thaw.toml".as_ref(), text).unwrap();
    let launcher = FakeLauncher::new(Behaviour::Answer);
    launcher.launched.store(10, Ordering::SeqCst);
    let newer = Service::new(config, "newer".into(), launcher, fixture.services.clone());
    fixture.services.install(newer);
    assert_eq!(fixture.get("/").body, "instance 11 /");
    fixture.eventually(|| fixture.service.instance_count() == 0);
}
