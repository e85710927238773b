//! Functions whose instances are threads of the test, each connection served by a
//! closure.

#![allow(dead_code)] // Every test program uses a part of it.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll};
use std::thread;
use std::time::{Duration, Instant};
use thaw_home::config::{FunctionConfig, StopSignal};
use thaw_node::boots::BootKind;
use thaw_node::edge::Addresses;
use thaw_node::gateway::{Gateway, GatewayConfig};
use thaw_node::instance::{
    Client, Connector, End, FrozenInstance, Instance, LaunchError, Launched, Launcher, Report,
};
use thaw_node::node::NodeState;
use thaw_node::remote::RemoteChannel;
use thaw_node::service::{Service, Services};
use thaw_sandbox::{BootTimes, GuestExit, RemoteMessage, Twin};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

/// How long anything may take before it is taken for lost.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// What a connection of an instance does.
pub type Program = dyn Fn(&mut Guest) + Send + Sync;

/// One connection of an instance.
pub struct Guest {
    pub socket: BufReader<TcpStream>,
    pub instance: u32,
    reports: mpsc::UnboundedSender<Report>,
}

/// A request as an instance sees it.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub head: String,
    pub body: Vec<u8>,
}

impl Guest {
    /// The next request; none if there is no other.
    pub fn request(&mut self) -> Option<Seen> {
        let head = self.head()?;
        let field = |name: &str| field(&head, name);
        let body = match (field("transfer-encoding"), field("content-length")) {
            (Some(coding), None) if coding == "chunked" => self.chunks()?,
            (None, length) => {
                let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
                self.socket.read_exact(&mut body).ok()?;
                body
            }
            both => panic!("an ambiguous request reached an instance: {both:?}"),
        };
        Some(Seen { head, body })
    }

    /// Whether something else comes; does not read it.
    pub fn has_more(&mut self) -> bool {
        !self.socket.buffer().is_empty()
            || self.socket.get_ref().peek(&mut [0]).is_ok_and(|read| read > 0)
    }

    /// The next head, without its body.
    pub fn head(&mut self) -> Option<String> {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if self.socket.read_line(&mut head).ok()? == 0 {
                return None;
            }
        }
        Some(head)
    }

    fn chunks(&mut self) -> Option<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let mut line = String::new();
            self.socket.read_line(&mut line).ok()?;
            let len = usize::from_str_radix(line.trim_end(), 16).unwrap();
            let mut chunk = vec![0; len];
            self.socket.read_exact(&mut chunk).ok()?;
            body.extend_from_slice(&chunk);
            self.socket.read_line(&mut line).ok()?;
            if len == 0 {
                return Some(body);
            }
        }
    }

    /// Sends bytes; whoever is gone misses them.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = self.socket.get_mut().write_all(bytes.as_ref());
    }

    /// Answers, and says that more may follow.
    pub fn answer(&mut self, body: impl AsRef<[u8]>) {
        let body = body.as_ref();
        self.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len()));
        self.send(body);
    }

    /// The instance ends.
    pub fn exit(&mut self, exit: GuestExit) {
        let _ = self.reports.send(Report::Gone(End::Exited(exit)));
    }
}

/// A field's value in a head.
pub fn field(head: &str, name: &str) -> Option<String> {
    head.lines().find_map(|line| {
        let (found, value) = line.split_once(':')?;
        found.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
    })
}

/// Boots threads.
pub struct Threads {
    program: Arc<Program>,
    pub launched: AtomicU32,
    pub connections: Arc<AtomicU32>,
    /// Remarks of the node's on instances.
    pub remarks: Arc<Mutex<Vec<String>>>,
    /// By which the instances say what happens to them, in the order of their boots.
    pub reports: Mutex<Vec<mpsc::UnboundedSender<Report>>>,
    /// Which instances got which stop signals, in the order of these.
    pub signals: Arc<Mutex<Vec<(u32, String)>>>,
    /// Whether instances go on after a stop signal.
    pub ignores_signals: Arc<AtomicBool>,
    /// Whether instances say that they are booted only when [`Threads::report_boots`] has them do so.
    pub boots_in_silence: AtomicBool,
}

impl Threads {
    /// All instances say that they are booted.
    pub fn report_boots(&self) {
        for reports in self.reports.lock().unwrap().iter() {
            // It may have ended.
            let _ = reports.send(Report::Booted(TIMES));
        }
    }
}

const TIMES: BootTimes =
    BootTimes { received_ns: 1, mapped_ns: 2, first_instruction_ns: 3, first_byte_ns: 4 };

struct Thread {
    number: u32,
    program: Arc<Program>,
    sender: mpsc::UnboundedSender<Report>,
    sockets: Arc<Mutex<HashMap<u64, TcpStream>>>,
    connections: Arc<AtomicU32>,
    remarks: Arc<Mutex<Vec<String>>>,
    signals: Arc<Mutex<Vec<(u32, String)>>>,
    ignores_signals: Arc<AtomicBool>,
}

struct ThreadInstance {
    reports: mpsc::UnboundedReceiver<Report>,
    thread: Arc<Thread>,
}

impl Launcher for Threads {
    fn launch(&self, client: Option<&Client>) -> Result<Launched, LaunchError> {
        let number = self.launched.fetch_add(1, Ordering::SeqCst) + 1;
        let (sender, reports) = mpsc::unbounded_channel();
        let thread = Arc::new(Thread {
            number,
            program: self.program.clone(),
            sender,
            sockets: Arc::default(),
            connections: self.connections.clone(),
            remarks: self.remarks.clone(),
            signals: self.signals.clone(),
            ignores_signals: self.ignores_signals.clone(),
        });
        self.reports.lock().unwrap().push(thread.sender.clone());
        if let Some(client) = client {
            thread.connect(client).unwrap();
        }
        if !self.boots_in_silence.load(Ordering::SeqCst) {
            thread.sender.send(Report::Booted(TIMES)).unwrap();
        }
        Ok(Launched {
            kind: BootKind::Warm,
            instance: Box::new(ThreadInstance { reports, thread }),
            zygote_ns: 0,
            execs: None,
        })
    }

    fn is_ready(&self) -> bool {
        true
    }
}

impl Connector for Thread {
    fn connect(&self, client: &Client) -> io::Result<()> {
        self.connections.fetch_add(1, Ordering::SeqCst);
        let socket = TcpStream::from(client.socket.try_clone()?);
        // Guests have no event loop.
        socket.set_nonblocking(false)?;
        self.sockets.lock().unwrap().insert(client.id, socket.try_clone()?);
        let (id, sockets, reports) = (client.id, self.sockets.clone(), self.sender.clone());
        let program = self.program.clone();
        let socket = BufReader::new(socket);
        let mut guest = Guest { socket, instance: self.number, reports: self.sender.clone() };
        thread::spawn(move || {
            program(&mut guest);
            // As the guest's kernel does: the gateway may still hold the socket.
            let _ = guest.socket.get_ref().shutdown(Shutdown::Both);
            sockets.lock().unwrap().remove(&id);
            drop(guest);
            let _ = reports.send(Report::ConnectionClosed(id));
        });
        Ok(())
    }
}

impl RemoteChannel for Thread {
    /// All that a test's node says so is that it connects to the program's port.
    fn send_remote(&self, _: RemoteMessage, sockets: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut socket = TcpStream::from(sockets[0].try_clone_to_owned()?);
        socket.set_nonblocking(false)?;
        socket.write_all(&0i32.to_le_bytes())?;
        let (number, reports) = (self.number, self.sender.clone());
        let mut guest = Guest { socket: BufReader::new(socket), instance: number, reports };
        let program = self.program.clone();
        thread::spawn(move || {
            program(&mut guest);
            let _ = guest.socket.get_ref().shutdown(Shutdown::Both);
        });
        Ok(())
    }
}

impl Instance for ThreadInstance {
    fn pid(&self) -> u32 {
        self.thread.number
    }

    fn connector(&self) -> Arc<dyn Connector> {
        self.thread.clone()
    }

    fn ring_if_unread(&mut self) {}

    fn remark(&self, text: &str) {
        self.thread.remarks.lock().unwrap().push(text.to_owned());
    }

    fn terminate(&mut self, signal: StopSignal) -> io::Result<()> {
        self.thread.signals.lock().unwrap().push((self.thread.number, signal.to_string()));
        if !self.thread.ignores_signals.load(Ordering::SeqCst) {
            let _ = self.thread.sender.send(Report::Gone(End::Exited(GuestExit::Code(0))));
        }
        Ok(())
    }

    fn kill(&mut self) {
        for (_, socket) in self.thread.sockets.lock().unwrap().drain() {
            let _ = socket.shutdown(Shutdown::Both);
        }
        let _ = self.thread.sender.send(Report::Gone(End::Killed(Some(9))));
    }

    fn poll_report(&mut self, context: &mut Context<'_>) -> Poll<Report> {
        self.reports.poll_recv(context).map(|report| report.expect("a sender is kept"))
    }

    fn request_rest(&mut self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// It hears that, and never comes to rest.
    fn request_checkpoint(&mut self, _: Twin) -> io::Result<()> {
        Ok(())
    }

    fn freeze(&mut self, _: thaw_abi::control::EntryPoint) -> Result<FrozenInstance, String> {
        Err("a thread of a test has no image".to_owned())
    }

    fn first_request_done(&mut self) {}
}

/// A node behind a real listener.
pub struct Node {
    pub runtime: Runtime,
    pub shared: Arc<NodeState>,
    pub services: Arc<Services>,
    pub address: SocketAddr,
    gateway: Gateway,
}

impl Node {
    /// A node that runs at most so many instances.
    pub fn new(instances: usize) -> Self {
        Self::over(NodeState::new(instances), Duration::from_secs(5))
    }

    pub fn over(shared: Arc<NodeState>, head_timeout: Duration) -> Self {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(2).enable_all().build().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let services = Services::new(shared.clone());
        let gateway = Gateway::new(services.clone(), Weak::new(), GatewayConfig { head_timeout });
        runtime.spawn(gateway.clone().listen(listener, None));
        Self { runtime, shared, services, address, gateway }
    }

    /// Serves a function; `keys` are of its `thaw.toml`.
    pub fn serve(
        &self,
        name: &str,
        keys: &str,
        program: impl Fn(&mut Guest) + Send + Sync + 'static,
    ) -> (Arc<Service>, Arc<Threads>) {
        let port = if keys.contains("stdin") { "" } else { "port = 80\n" };
        let text =
            format!("name = \"{name}\"\ncommand = [\"x\"]\nrootfs = \"./r\"\n{port}{keys}\n");
        let config = FunctionConfig::parse("thaw.toml".as_ref(), &text).unwrap();
        let launcher = Arc::new(Threads {
            program: Arc::new(program),
            launched: AtomicU32::new(0),
            connections: Arc::default(),
            remarks: Arc::default(),
            reports: Mutex::default(),
            signals: Arc::default(),
            ignores_signals: Arc::default(),
            boots_in_silence: AtomicBool::new(false),
        });
        let service = Service::new(config, "image".into(), launcher.clone(), self.services.clone());
        self.services.install(service.clone());
        (service, launcher)
    }

    /// A listener of a function's own.
    pub fn listen_for(&self, name: &str) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        self.runtime.spawn(self.gateway.clone().listen(listener, Some(name.to_owned())));
        address
    }

    /// A listener of a function's own that speaks something else than HTTP.
    pub fn listen_raw_for(&self, name: &str) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        self.runtime.spawn(self.gateway.clone().listen_raw(listener, name.to_owned()));
        address
    }

    /// A listener for clients that speak TLS.
    pub fn listen_tls(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        self.runtime.spawn(self.gateway.clone().listen_tls(listener));
        address
    }

    /// Goes by the text of a `gateway.toml` in a directory.
    pub fn rule(&self, directory: &std::path::Path, text: &str) {
        let rules = thaw_node::edge::Rules::parse(&directory.join("gateway.toml"), text);
        self.shared.edge().set(rules.unwrap());
    }

    /// A socket for datagrams of a function.
    pub fn receive_for(&self, name: &str) -> SocketAddr {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        self.runtime.spawn(self.gateway.clone().receive(socket, name.to_owned()));
        address
    }

    pub fn connect(&self) -> Wire {
        Wire::connect(self.address)
    }

    /// A client that is the admin API's, and is told what went wrong.
    pub fn operator(&self) -> Wire {
        let wire = self.connect();
        std::mem::forget(self.shared.edge().operators().trust(wire.addresses()));
        wire
    }
}

/// Waits until something becomes true, however long the machine takes.
#[track_caller]
pub fn eventually(condition: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < until, "it never became true");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A client's connection on which the bytes are one's own.
pub struct Wire {
    pub stream: TcpStream,
    received: Vec<u8>,
}

/// An answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Response {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn error(&self) -> String {
        let body: serde_json::Value = serde_json::from_slice(&self.body).unwrap();
        assert!(!body["reason"].as_str().unwrap().is_empty());
        body["error"].as_str().unwrap().to_owned()
    }
}

impl Wire {
    /// Both ends.
    pub fn addresses(&self) -> Addresses {
        let client = self.stream.local_addr().unwrap();
        Addresses { client, gateway: self.stream.peer_addr().unwrap() }
    }

    pub fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, received: Vec::new() }
    }

    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> &mut Self {
        let _ = self.stream.write_all(bytes.as_ref());
        self
    }

    pub fn get(&mut self, host: &str, path: &str) -> Response {
        self.send(format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        self.response().expect("an answer")
    }

    /// Reads a head; none if the connection ends first.
    pub fn head(&mut self) -> Option<String> {
        loop {
            let end = self.received.windows(4).position(|window| window == b"\r\n\r\n");
            if let Some(end) = end {
                let head: Vec<u8> = self.received.drain(..end + 4).collect();
                return Some(String::from_utf8(head).unwrap());
            }
            self.more()?;
        }
    }

    /// Reads a response with a body whose length is known, or in chunks; none if the
    /// connection ends first.
    pub fn response(&mut self) -> Option<Response> {
        let head = self.head()?;
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let body = match (field(&head, "content-length"), field(&head, "transfer-encoding")) {
            (Some(length), None) => self.exactly(length.parse().unwrap())?,
            (None, Some(_)) => {
                let mut body = Vec::new();
                loop {
                    let line = self.line()?;
                    let len = usize::from_str_radix(line.trim_end(), 16).unwrap();
                    body.extend(self.exactly(len)?);
                    if len == 0 {
                        while self.line()? != "\r\n" {}
                        break body;
                    }
                    assert_eq!(self.line()?, "\r\n");
                }
            }
            (None, None) => Vec::new(),
            both => panic!("an ambiguous answer reached a client: {both:?}"),
        };
        Some(Response { status, head, body })
    }

    pub fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return Some(String::from_utf8(line).unwrap());
            }
            self.more()?;
        }
    }

    pub fn exactly(&mut self, count: usize) -> Option<Vec<u8>> {
        while self.received.len() < count {
            self.more()?;
        }
        Some(self.received.drain(..count).collect())
    }

    /// Everything to the end; a reset counts as that.
    pub fn rest(&mut self) -> Vec<u8> {
        while self.more().is_some() {}
        std::mem::take(&mut self.received)
    }

    fn more(&mut self) -> Option<()> {
        let mut piece = [0; 64 << 10];
        match self.stream.read(&mut piece) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                panic!("nothing comes; so far: {:?}", String::from_utf8_lossy(&self.received))
            }
            Ok(0) | Err(_) => None,
            Ok(count) => {
                self.received.extend_from_slice(&piece[..count]);
                Some(())
            }
        }
    }
}
