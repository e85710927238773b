//! Who may use the admin API, and what it keeps to itself.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Raw, Response, built_home, copy_home, descendants, get,
    listening_ports, request_local, run, thaw, wait_until,
};

/// What nobody is to see.
const SECRET: &str = "hush-hush-5179";

fn home() -> &'static PathBuf {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    HOME.get_or_init(|| {
        let keys = format!("env.API_KEY = \"{SECRET}\"");
        let secretive =
            Function::Variant { example: "hello-c", name: "secretive", keys, limits: "" };
        built_home("admin", &[secretive])
    })
}

fn tcp_options() -> DaemonOptions {
    DaemonOptions { arguments: vec!["--admin=127.0.0.1:0".to_owned()] }
}

/// Sends a request with these header lines over TCP.
fn ask(address: SocketAddr, path: &str, headers: &[&str]) -> Response {
    let lines: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
    let head = format!("GET {path} HTTP/1.1\r\nConnection: close\r\n{lines}\r\n");
    Raw::connect(address).send(head).response().expect("an answer")
}

#[test]
fn it_listens_on_a_socket_of_the_owners_and_nowhere_else() {
    let home = copy_home(home(), "admin-socket");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let socket = daemon.admin_socket();
    assert_eq!(socket, home.canonicalize().expect("a home").join("admin.sock"));
    let file = socket.metadata().expect("a file");
    assert!(file.file_type().is_socket());
    assert_eq!(file.mode() & 0o777, 0o600);
    assert_eq!(daemon.admin_tcp(), None);
    let mut processes = vec![daemon.main_pid()];
    processes.extend(descendants(daemon.main_pid()).iter().map(|process| process.pid));
    assert_eq!(listening_ports(&processes), BTreeSet::from([daemon.gateway().port()]));
    let ps = run(thaw().env("THAW_HOME", &home).arg("ps"));
    assert!(ps.success().contains("FUNCTION"));
    let address = format!("unix:{}", socket.display());
    let named = run(thaw().env_remove("THAW_HOME").args(["ps", "--admin", &address]));
    assert!(named.success().contains("FUNCTION"));
    let invoked = run(thaw().env("THAW_HOME", &home).args(["invoke", "secretive"]));
    assert!(invoked.success().contains("Hello from C"));
    let socket = socket.to_owned();
    assert_eq!(daemon.stop(), Some(0));
    assert!(!socket.exists());
}

#[test]
fn another_user_is_turned_away_even_where_the_socket_is_open() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not checked: becoming another user takes root");
        return;
    }
    // Where another user can get at it.
    let place = tempfile::tempdir().expect("a temporary directory");
    let home = place.path().join("home");
    run(Command::new("cp").arg("-a").arg(self::home()).arg(&home)).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let script = "import socket, sys\n\
        s = socket.socket(socket.AF_UNIX)\n\
        s.connect(sys.argv[1])\n\
        s.sendall(b'GET /functions HTTP/1.0\\r\\n\\r\\n')\n\
        print('got', s.recv(100))";
    let as_nobody = || {
        let mut python = Command::new("setpriv");
        python.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        python.args(["/usr/bin/python3", "-c", script]).arg(daemon.admin_socket());
        run(&mut python)
    };
    for directory in [place.path(), &home] {
        fs::set_permissions(directory, Permissions::from_mode(0o755)).expect("our directory");
    }
    let outcome = as_nobody();
    assert!(outcome.stderr.contains("Permission denied"), "{}", outcome.stderr);
    fs::set_permissions(daemon.admin_socket(), Permissions::from_mode(0o666)).expect("our socket");
    let outcome = as_nobody();
    let is_empty = outcome.stdout.contains("got b''");
    assert!(is_empty || outcome.stderr.contains("Broken pipe") || outcome.stderr.contains("reset"));
    assert!(!outcome.stdout.contains("secretive"), "{}", outcome.stdout);
    wait_until("the daemon says so", || daemon.log().contains("it is of another user"));
    assert_eq!(daemon.admin("/healthz").status, 200);
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn a_home_of_any_length_will_do() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let home = place.path().join("a-long-name".repeat(15)).join("home");
    fs::create_dir_all(home.parent().expect("a parent")).expect("a directory");
    run(Command::new("cp").arg("-a").arg(self::home()).arg(&home)).success();
    let daemon = Plain::start(&home);
    let ps = run(thaw().env("THAW_HOME", &home).arg("ps"));
    assert!(ps.success().contains("FUNCTION"));
    drop(daemon);
}

/// A daemon that is asked by `thaw` only.
struct Plain(Child);

impl Plain {
    fn start(home: &Path) -> Self {
        let mut serve = thaw();
        serve.env("THAW_HOME", home).args(["serve", "--listen=127.0.0.1:0"]);
        let daemon = Self(serve.stdout(Stdio::null()).spawn().expect("thaw"));
        wait_until("the daemon is there", || home.join("daemon.json").exists());
        daemon
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn over_tcp_it_wants_the_token_and_its_own_name() {
    let home = copy_home(home(), "admin-tcp");
    let daemon = Daemon::start(&home, &tcp_options());
    let address = daemon.admin_tcp().expect("it listens");
    let token_file = home.join("admin.token");
    assert_eq!(token_file.metadata().expect("a file").mode() & 0o777, 0o600);
    let token = fs::read_to_string(&token_file).expect("a token");
    let right = format!("Authorization: Bearer {}", token.trim());
    let host = format!("Host: {address}");
    for path in ["/functions", "/metrics", "/healthz", "/nowhere"] {
        let refused = ask(address, path, &[&host]);
        assert_eq!(refused.status, 401, "{path}");
        assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
        assert!(refused.json()["reason"].as_str().is_some_and(|reason| reason.contains("token")));
    }
    let wrong = format!("Authorization: Bearer {}", "0".repeat(token.trim().len()));
    assert_eq!(ask(address, "/functions", &[&host, &wrong]).status, 401);
    assert_eq!(ask(address, "/functions", &[&host, &right]).status, 200);
    // A page that has its name point here, and one that just sends.
    for rebound in ["Host: evil.example", "Host: 127.0.0.1.evil.example"] {
        assert_eq!(ask(address, "/functions", &[rebound, &right]).status, 403);
    }
    let page = "Origin: http://evil.example";
    assert_eq!(ask(address, "/functions", &[&host, &right, page]).status, 403);
    assert_eq!(ask(address, "/functions", &["Host: localhost", &right]).status, 200);

    let admin = address.to_string();
    let cli = |more: &[&str]| {
        run(thaw().env("THAW_HOME", &home).args(["ps", "--admin", &admin]).args(more))
    };
    assert_eq!(cli(&[]).code, Some(0));
    let file = token_file.to_str().expect("UTF-8");
    assert_eq!(cli(&["--token-file", file]).code, Some(0));
    let other = home.join("other.token");
    fs::write(&other, "another-token-of-some-length").expect("a file");
    fs::set_permissions(&other, Permissions::from_mode(0o644)).expect("our file");
    let open = cli(&["--token-file", other.to_str().expect("UTF-8")]);
    assert!(open.stderr.contains("chmod 600"), "{}", open.stderr);
    fs::set_permissions(&other, Permissions::from_mode(0o600)).expect("our file");
    let refused = cli(&["--token-file", other.to_str().expect("UTF-8")]);
    assert!(refused.code == Some(1) && refused.stderr.contains("token"), "{}", refused.stderr);
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn values_of_the_environment_are_never_shown() {
    let home = copy_home(home(), "admin-secrets");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(get(daemon.gateway(), "secretive", "/").status, 200);
    for path in ["/functions", "/functions/secretive", "/images", "/instances", "/metrics"] {
        assert!(!daemon.admin(path).text().contains(SECRET), "{path}");
    }
    let detail = daemon.admin("/functions/secretive").json();
    assert_eq!(detail["config"]["env"]["API_KEY"], "***");
    for verb in [
        &["inspect", "secretive"][..],
        &["inspect", "secretive", "--json"],
        &["images", "--json"],
        &["ps", "--json"],
    ] {
        let shown = run(thaw().env("THAW_HOME", &home).args(verb)).success();
        assert!(!shown.contains(SECRET), "{verb:?}");
    }
    let inspected = run(thaw().env("THAW_HOME", &home).args(["inspect", "secretive"])).success();
    assert!(inspected.contains("API_KEY"), "{inspected}");
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn a_request_that_makes_no_sense_is_refused_in_json() {
    let home = copy_home(home(), "admin-malformed");
    let daemon = Daemon::start(&home, &tcp_options());
    let address = daemon.admin_tcp().expect("it listens");
    let token = fs::read_to_string(home.join("admin.token")).expect("a token");
    let ask = |request: &str, kind: &str, body: &str| {
        let head = format!(
            "{request} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {}\r\nConnection: close\r\n\
             Content-Type: {kind}\r\nContent-Length: {}\r\n\r\n{body}",
            token.trim(),
            body.len()
        );
        Raw::connect(address).send(head).response().expect("an answer")
    };
    let json = "application/json";
    for (request, kind, body, status, error) in [
        ("POST /sandboxes", json, "{", 400, "bad_body"),
        ("POST /sandboxes", json, "{\"nme\": \"a\"}", 422, "bad_body"),
        ("POST /sandboxes", json, "{\"name\": 1}", 422, "bad_body"),
        ("POST /sandboxes", "text/plain", "{}", 415, "bad_body"),
        ("PUT /sandboxes/a/limits", json, "[", 400, "bad_body"),
        ("POST /sandboxes/a/timeout?seconds=x", json, "", 400, "bad_query"),
        ("POST /instances/x/fork", json, "", 400, "bad_path"),
        ("POST /pulls", json, "{", 400, "wrong_pull"),
        ("DELETE /functions", json, "", 405, "wrong_method"),
    ] {
        let refused = ask(request, kind, body);
        assert_eq!(refused.status, status, "{request} {body}: {}", refused.text());
        assert_eq!(refused.header("content-type"), Some(json), "{request} {body}");
        assert_eq!(refused.json()["error"], error, "{request} {body}");
        assert!(refused.json()["reason"].as_str().is_some_and(|reason| !reason.is_empty()));
    }
    assert!(ask("DELETE /functions", json, "").header("allow").is_some());
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn slow_clients_are_few_and_leave() {
    let home = copy_home(home(), "admin-slow");
    let daemon = Daemon::start(&home, &tcp_options());
    let address = daemon.admin_tcp().expect("it listens");
    let descriptors = || fs::read_dir(format!("/proc/{}/fd", daemon.pid())).expect("/proc").count();
    let before = descriptors();
    // A head that never ends, a connection that says nothing, and one that stays idle.
    let mut slow: Vec<TcpStream> = (0..300)
        .map(|number| {
            let mut stream = TcpStream::connect(address).expect("a connection");
            let begun =
                if number % 2 == 0 { &b"GET /functions HTTP/1.1\r\nHost: x"[..] } else { b"" };
            std::io::Write::write_all(&mut stream, begun).expect("room");
            stream
        })
        .collect();
    std::thread::sleep(Duration::from_millis(500));
    // The zygotes that are being made take some, too.
    assert!(descriptors() < before + 200, "{} more", descriptors() - before);
    // The socket's clients have places of their own.
    assert_eq!(request_local(daemon.admin_socket(), "/functions").expect("an answer").status, 200);
    // Places are free again when the slow ones had their time.
    let mut first = slow.swap_remove(0);
    first.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    let mut rest = Vec::new();
    let _ = first.read_to_end(&mut rest);
    drop(slow);
    let host = format!("Host: {address}");
    assert_eq!(ask(address, "/functions", &[&host]).status, 401);
    // A head beyond all measure is refused.
    let large = format!("X-Large: {}", "x".repeat(100 << 10));
    let refused = ask(address, "/functions", &[&host, &large]);
    assert_eq!(refused.status, 431);
    assert_eq!(daemon.stop(), Some(0));
}
