//! Registries of container images, and bad connections to them.

use crate::daemon::wait_until;
use crate::ports::free_port;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The line of htpasswd(1) of user `thaw` with password `thaw-test`.
const PASSWORDS: &str = "thaw:$2b$04$YjD8LzqrnjNlsUgLz66x1eOkPdxuc1PoC8jTrwRopR0Fmr5LLnfLG\n";
/// Debian's `docker-registry`.
#[derive(Debug)]
pub struct Registry {
    child: Child,
    port: u16,
}

impl Registry {
    /// Starts one that keeps its images below `directory`, and lets everybody in, or user `thaw` with
    /// password `thaw-test` only.
    ///
    /// # Panics
    /// It cannot be started.
    pub fn start(directory: &Path, with_passwords: bool) -> Self {
        let port = free_port();
        let storage = directory.join("registry");
        let mut text = format!(
            "version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: 127.0.0.1:{port}\n",
            storage.display()
        );
        if with_passwords {
            let passwords = directory.join("passwords");
            fs::write(&passwords, PASSWORDS).expect("passwords");
            text += &format!(
                "auth:\n  htpasswd:\n    realm: thaw\n    path: {}\n",
                passwords.display()
            );
        }
        let config = directory.join(format!("registry-{port}.yml"));
        fs::write(&config, text).expect("a configuration");
        let mut command = Command::new("docker-registry");
        command.arg("serve").arg(&config).stdout(Stdio::null()).stderr(Stdio::null());
        let registry = Self { child: command.spawn().expect("docker-registry"), port };
        wait_until("the registry listens", || TcpStream::connect(registry.address()).is_ok());
        registry
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        ([127, 0, 0, 1], self.port).into()
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The reference of something in it.
    pub fn image(&self, name: &str) -> String {
        format!("localhost:{}/{name}", self.port)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How connections to a registry are cut.
#[derive(Clone, Copy, Debug)]
pub enum Cut {
    /// The first ones, after so many bytes of answers.
    Some {
        /// How many.
        times: usize,
        /// Bytes.
        after: usize,
    },
    /// Each one that asks for a blob.
    Blobs,
}

/// Passes what is asked on, unless it is to be cut.
fn pass_requests(mut from: TcpStream, mut to: TcpStream, cut: Cut) {
    let mut buffer = vec![0; 16 << 10];
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        let asks_for_blob = buffer[..read].windows(7).any(|part| part == b"/blobs/");
        if matches!(cut, Cut::Blobs) && asks_for_blob || to.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Both);
    let _ = from.shutdown(std::net::Shutdown::Both);
}

/// Passes connections on to a registry, and cuts some of them. Counts the bytes of answers.
///
/// # Panics
/// There is no port.
pub fn cutting_proxy(to: SocketAddr, how: Cut) -> (SocketAddr, Arc<AtomicUsize>) {
    let (cuts, after) = match how {
        Cut::Some { times, after } => (times, after),
        Cut::Blobs => (0, 0),
    };
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let passed = Arc::new(AtomicUsize::new(0));
    let count = passed.clone();
    std::thread::spawn(move || {
        let cut = AtomicUsize::new(0);
        let cut = Arc::new(cut);
        for client in listener.incoming().flatten() {
            let (cut, count) = (cut.clone(), count.clone());
            std::thread::spawn(move || {
                let server = TcpStream::connect(to).expect("the registry");
                let up = (client.try_clone().expect("a copy"), server.try_clone().expect("a copy"));
                std::thread::spawn(move || pass_requests(up.0, up.1, how));
                let (mut from, mut to) = (server, client);
                let (mut buffer, mut bytes) = (vec![0; 16 << 10], 0);
                while let Ok(read @ 1..) = from.read(&mut buffer) {
                    if to.write_all(&buffer[..read]).is_err() {
                        break;
                    }
                    bytes += read;
                    count.fetch_add(read, Ordering::Relaxed);
                    if bytes > after && cut.fetch_add(1, Ordering::Relaxed) < cuts {
                        break;
                    }
                }
                let _ = to.shutdown(std::net::Shutdown::Both);
                let _ = from.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    (address, passed)
}
