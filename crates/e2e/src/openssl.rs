//! Certificates and clients of OpenSSL: TLS that is none of the product's own.

use std::fs;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Writes a certificate for these hosts and its key into a directory: `node.pem` and `node.key`.
///
/// # Panics
/// There is no `openssl`, or it cannot.
pub fn certify(directory: &Path, hosts: &[&str]) {
    let names: Vec<_> = hosts.iter().map(|host| format!("DNS:{host}")).collect();
    let subject = format!("subjectAltName={}", names.join(","));
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"])
        .args(["-subj", &format!("/CN={}", hosts[0]), "-addext", &subject, "-days", "2"])
        .args(["-keyout", "node.key", "-out", "node.pem"])
        .current_dir(directory)
        .output()
        .expect("openssl");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let private = fs::Permissions::from_mode(0o600);
    fs::set_permissions(directory.join("node.key"), private).expect("our file");
}

/// A connection of `openssl s_client`, which ends with it.
#[derive(Debug)]
pub struct TlsClient {
    client: Child,
    /// Where it reads what it sends.
    pub stdin: ChildStdin,
    /// Where it writes what it hears.
    pub stdout: ChildStdout,
}

impl TlsClient {
    /// Connects with options such as `-tls1_2`. Ten minutes later it ends.
    ///
    /// # Panics
    /// It cannot be started.
    pub fn connect(address: SocketAddr, host: &str, authority: &Path, options: &[&str]) -> Self {
        let mut client = Command::new("timeout")
            .args(["600", "openssl", "s_client", "-quiet", "-verify_return_error"])
            .args(["-connect", &address.to_string(), "-servername", host, "-CAfile"])
            .arg(authority)
            .args(options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("openssl");
        let stdin = client.stdin.take().expect("a pipe");
        let stdout = client.stdout.take().expect("a pipe");
        Self { client, stdin, stdout }
    }
}

impl Read for TlsClient {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stdout.read(buffer)
    }
}

impl Write for TlsClient {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stdin.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stdin.flush()
    }
}

impl Drop for TlsClient {
    fn drop(&mut self) {
        // `timeout` passes SIGTERM on.
        let pid = rustix::process::Pid::from_child(&self.client);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.client.wait();
    }
}
