//! TLS, HTTP/2, routes and the access log, with curl as the client and functions in sandboxes.

use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use thaw_e2e::{Daemon, DaemonOptions, Function, built_home, certify, free_port, get, wait_until};

/// `printf %s sesame | sha256sum`
const SESAME: &str = "sha256:d0c04f4b1951e4aeaaec8223ed2039e542f3aae805a6fa7f6d794e5afff5d272";

/// A home with two functions and a certificate for them, served at an address of its own.
struct Secure {
    daemon: Daemon,
    address: SocketAddr,
    certificate: PathBuf,
}

impl Secure {
    fn start(name: &str) -> Self {
        Self::start_at(name, SocketAddr::from(([127, 0, 0, 1], free_port())))
    }

    fn start_at(name: &str, address: SocketAddr) -> Self {
        let functions = [Function::Example("hello-c"), Function::Example("hello-python")];
        let home = built_home(name, &functions);
        let keys = home.join("tls");
        fs::create_dir_all(&keys).expect("a directory");
        certify(&keys, &["one.example", "two.example"]);
        let text = format!(
            "[access_log]\nformat = \"json\"\n[tls]\nlisten = [\"{address}\"]
             [[tls.certificate]]\nchain = \"tls/node.pem\"\nkey = \"tls/node.key\"
             [[route]]\nhost = \"one.example\"\nfunction = \"hello-c\"
             [[route]]\nhost = \"two.example\"\nfunction = \"hello-python\"
             [[route]]\nhost = \"two.example\"\nscheme = \"http\"\nredirect = \"https://{{host}}{{path}}\"
             [function.hello-python]\nauth.bearer = [\"{SESAME}\"]"
        );
        fs::write(home.join("gateway.toml"), text).expect("our home");
        // As the operator of a daemon that is another user does.
        let given = Command::new("chown")
            .arg("-R")
            .arg(format!("--reference={}", home.display()))
            .arg(&keys)
            .status()
            .expect("chown");
        assert!(given.success());
        let certificate = home.with_extension("ca.pem");
        fs::copy(keys.join("node.pem"), &certificate).expect("a copy");
        let daemon = Daemon::start(&home, &DaemonOptions::default());
        Self { daemon, address, certificate }
    }

    /// What curl prints, and then the version of HTTP and the status.
    fn curl(&self, host: &str, path: &str, more: &[&str]) -> (String, String) {
        let port = self.address.port();
        let output = Command::new("curl")
            .args([
                "--silent",
                "--show-error",
                "--max-time",
                "60",
                "--write-out",
                "\n%{http_version} %{http_code}",
            ])
            .args(["--resolve", &format!("{host}:{port}:127.0.0.1"), "--cacert"])
            .arg(&self.certificate)
            .args(more)
            .arg(format!("https://{host}:{port}{path}"))
            .output()
            .expect("curl");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        let (body, summary) = text.rsplit_once('\n').expect("a summary");
        (body.to_owned(), summary.to_owned())
    }
}

#[test]
fn an_address_that_somebody_has_is_tried_again() {
    // Nobody else gets it when it is free again.
    let taken = TcpListener::bind(("127.0.0.1", free_port())).expect("a port");
    let secure = Secure::start_at("tls-taken", taken.local_addr().expect("an address"));
    let said = || secure.daemon.log().matches("cannot listen on").count();
    wait_until("the log says so", || said() == 1);
    std::thread::sleep(std::time::Duration::from_secs(7));
    assert_eq!(said(), 1, "once is enough");
    drop(taken);
    wait_until("it is had", || TcpStream::connect(secure.address).is_ok());
    let (_, summary) = secure.curl("one.example", "/", &["--http1.1"]);
    assert_eq!(summary, "1.1 200");
}

#[test]
fn curl_speaks_tls_and_http2_with_functions() {
    let secure = Secure::start("tls-curl");
    let answer = "Hello from C! You asked for /x?y.\n";
    for (option, version) in [("--http2", "2"), ("--http1.1", "1.1")] {
        let (body, summary) = secure.curl("one.example", "/x?y", &[option]);
        assert_eq!((body.as_str(), summary), (answer, format!("{version} 200")));
    }
    // Twenty requests at once on one connection.
    let (body, _) = secure.curl("one.example", "/[1-20]", &["--http2", "--parallel"]);
    assert_eq!(body.matches("Hello from C!").count(), 20, "{body}");

    let (refused, summary) = secure.curl("two.example", "/", &["--http2"]);
    assert_eq!(summary, "2 401", "{refused}");
    let (_, summary) =
        secure.curl("two.example", "/", &["--http2", "-H", "Authorization: Bearer sesame"]);
    assert_eq!(summary, "2 200");
    // Who may use the admin API may call it.
    let invoked = thaw_e2e::run(
        thaw_e2e::thaw().env("THAW_HOME", secure.daemon.home()).args(["invoke", "hello-python"]),
    );
    assert_eq!(invoked.code, Some(0), "{invoked:?}");

    let moved = no_redirect(secure.daemon.gateway(), "two.example", "/a?b");
    assert_eq!(moved, (308, Some("https://two.example/a?b".to_owned())));
    // Without TLS the same routes hold.
    assert_eq!(get(secure.daemon.gateway(), "one.example", "/x?y").text(), answer);
    let line = |target: &str| {
        let path = secure.daemon.home().join("logs/access_.log");
        let text = fs::read_to_string(path).unwrap_or_default();
        // The last one may be half there.
        let lines =
            text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        lines.into_iter().find(|line| line["target"] == target && line["tls"] == true)
    };
    wait_until("the last one is logged", || line("/20").is_some());
    let line = line("/20").expect("it is there");
    assert_eq!((&line["version"], &line["status"]), (&"HTTP/2.0".into(), &200.into()), "{line}");
    assert_eq!(
        (&line["function"], &line["host"].as_str().map(|host| host.starts_with("one.example"))),
        (&"hello-c".into(), &Some(true))
    );
}

/// Status and place of a redirect, which is not followed.
fn no_redirect(gateway: SocketAddr, host: &str, path: &str) -> (u16, Option<String>) {
    let mut raw = thaw_e2e::Raw::connect(gateway);
    raw.send(format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    let response = raw.response().expect("an answer");
    (response.status, response.header("location").map(str::to_owned))
}

/// Has a daemon read its files again; what it answers.
fn reload(daemon: &Daemon) -> serde_json::Value {
    let asked = Command::new("curl")
        .args(["--silent", "--request", "POST", "http://localhost/reload", "--unix-socket"])
        .arg(daemon.admin_socket())
        .output()
        .expect("curl");
    serde_json::from_slice(&asked.stdout).expect("JSON")
}

#[test]
fn functions_that_do_not_exist_are_named_with_their_line() {
    let home = built_home("tls-nobody", &[Function::Example("hello-c")]);
    let file = home.join("gateway.toml");
    let text = "[[route]]\npath = \"/c\"\nfunction = \"hello-c\"\n\
                [[route]]\npath = \"/later\"\nfunction = \"later\"\n";
    fs::write(&file, text).expect("our home");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let why = "line 6: the route leads to `later`, and there is no function of that name yet";
    let said = || daemon.log().matches(why).count();
    assert_eq!(said(), 1, "{}", daemon.log());
    let reloaded = reload(&daemon);
    assert_eq!(reloaded["unknown"].as_array().map(Vec::len), Some(1), "{reloaded}");
    assert!(reloaded["unknown"][0].as_str().is_some_and(|one| one.starts_with(why)), "{reloaded}");
    assert_eq!(said(), 1, "it is said once");
    fs::write(&file, text.replace("later", "hello-c")).expect("our home");
    assert_eq!(reload(&daemon).get("unknown"), None);
}

#[test]
fn a_wrong_file_keeps_the_daemon_from_starting_and_the_old_rules_in_force() {
    let secure = Secure::start("tls-wrong");
    let file = secure.daemon.home().join("gateway.toml");
    let text = fs::read_to_string(&file).expect("our file");
    fs::write(&file, format!("{text}\nratee = 1")).expect("our file");
    let reloaded = reload(&secure.daemon);
    assert!(reloaded["gateway"].as_str().is_some_and(|why| why.contains("ratee")), "{reloaded}");
    assert_eq!(secure.curl("one.example", "/", &["--http2"]).1, "2 200");
    let home = secure.daemon.home().to_owned();
    drop(secure);
    let start = || Daemon::try_start(&home, &DaemonOptions::default()).expect_err("it is wrong");
    // What the first one has started may have the home for a moment longer.
    wait_until("the home is free", || !start().contains("another daemon already serves"));
    let said = start();
    assert!(said.contains("gateway.toml") && said.contains("ratee"), "{said}");
}

#[test]
fn the_daemons_log_is_json_if_that_is_asked_for() {
    let home = built_home("tls-json-log", &[]);
    let program = ["/usr/bin/env".to_owned(), "THAW_LOG_FORMAT=json".to_owned()];
    let daemon = Daemon::start_by(&program, &home, &DaemonOptions::default());
    let refused = get(daemon.gateway(), "nobody", "/");
    let line = daemon.explain(&refused);
    let line: serde_json::Value = serde_json::from_str(&line).expect("JSON");
    assert_eq!(line["request"], refused.json()["request_id"]);
    assert_eq!(line["error"], "unknown_function");
    assert!(line["message"].as_str().is_some_and(|text| text.contains("`nobody`")), "{line}");
}
