//! The dashboard, in Debian's Chromium and by hand-made requests. Pictures of the pages are kept
//! below target/tests/screenshots.

use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;
use thaw_e2e::{
    Browser, Daemon, DaemonOptions, Function, Screen, built_home, get, run, thaw, wait_until,
};

/// A function without a program, with some programs of this host.
const BOX: &str = r#"
name = "box"
isolation = "instance"
[entry]
kind = "sandbox"
[runtime]
kind = "python3"
programs = ["bash", "sh", "cat", "sleep", "ls", "id", "stty", "mkdir", "tr"]
[limits]
instances = 50
"#;

const DESK: Screen = Screen { width: 1360, height: 900, is_dark: false };
const DARK: Screen = Screen { is_dark: true, ..DESK };
const PHONE: Screen = Screen { width: 390, height: 844, is_dark: false };

fn home(label: &str) -> PathBuf {
    let noisy = Function::Variant {
        example: "hello-python",
        name: "hello",
        keys: "ready = 1".into(),
        limits: "",
    };
    let home = built_home(label, &[noisy]);
    let directory = home.with_extension("box");
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("thaw.toml"), BOX).unwrap();
    run(thaw().arg("build").arg(&directory).env("THAW_HOME", &home)).success();
    home
}

fn start(home: &Path) -> (Daemon, SocketAddr, String) {
    let arguments = ["--dashboard", "127.0.0.1:0"].map(str::to_owned).into();
    let daemon = Daemon::start(home, &DaemonOptions { arguments });
    let announced = fs::read(home.join("daemon.json")).unwrap();
    let announced: Value = serde_json::from_slice(&announced).unwrap();
    let address = announced["dashboard"].as_str().unwrap().parse().unwrap();
    let token = fs::read_to_string(home.join("admin.token")).unwrap().trim().to_owned();
    (daemon, address, token)
}

fn call(home: &Path, arguments: &[&str]) -> String {
    run(thaw().args(arguments).env("THAW_HOME", home)).success()
}

/// A browser that is logged in.
fn logged_in(address: SocketAddr, token: &str) -> Option<Browser> {
    let browser = Browser::start()?;
    browser.show_on(DESK);
    browser.open(&format!("http://{address}/functions"));
    assert!(browser.address().ends_with("/login"), "{}", browser.address());
    browser.keep_picture("login");
    browser.type_into("#token", "nonsense-nonsense-nonsense");
    browser.click("button[type=submit]");
    browser.wait_for_text("not the token");
    browser.type_into("#token", token);
    browser.click("button[type=submit]");
    browser.wait_for_text("Busiest functions");
    // Of the wrong token the browser says that it was refused.
    browser.complaints();
    Some(browser)
}

#[test]
fn every_page_is_shown_and_a_sandbox_is_used_and_forked() {
    let home = home("dashboard-pages");
    let (daemon, address, token) = start(&home);
    for _ in 0..30 {
        assert_eq!(get(daemon.gateway(), "hello", "/").status, 200);
    }
    assert_eq!(get(daemon.gateway(), "nobody", "/").status, 404);
    call(&home, &["sandbox", "create", "box", "--name", "one"]);
    call(
        &home,
        &["exec", "one", "--", "sh", "-c", "mkdir -p /tmp/d && echo '<b>bold</b>' > /tmp/d/x.html"],
    );
    let Some(browser) = logged_in(address, &token) else { return };
    let base = format!("http://{address}");

    // Some samples of requests that are under way.
    for _ in 0..8 {
        for _ in 0..20 {
            assert_eq!(get(daemon.gateway(), "hello", "/").status, 200);
        }
        std::thread::sleep(Duration::from_millis(1500));
    }
    visit_all(&browser, &base);
    browse_files(&browser, &base);
    type_into_terminal(&browser, &base);
    fork_and_kill(&browser, &base, &home);
    follow_log(&browser, &base, &daemon);
    browser.open(&base);
    browser.click("form[action='/logout'] button");
    browser.wait_for("#token");
    browser.open(&format!("{base}/store"));
    assert!(browser.address().ends_with("/login"), "{}", browser.address());
}

/// Opens every page on a desk, in the dark and on a phone; none complains, and none is wider than
/// its screen.
fn visit_all(browser: &Browser, base: &str) {
    let pages = [
        ("overview", "/", "Busiest functions"),
        ("functions", "/functions", "hello"),
        ("function", "/functions/hello", "Last boots"),
        ("sandboxes", "/sandboxes", "one"),
        ("sandbox", "/sandboxes/one", "Processes"),
        ("logs", "/logs?function=hello", "lines in memory"),
        ("events", "/events", "logged in"),
        ("store", "/store", "Working sets"),
        ("network", "/network", "Outgoing connections"),
        ("metrics", "/metrics", "thaw_boot_phase_seconds"),
        ("api", "/api", "openapi.json"),
    ];
    for (screen, suffix) in [(DESK, ""), (DARK, "-dark"), (PHONE, "-phone")] {
        browser.show_on(screen);
        for (name, path, shows) in pages {
            browser.open(&format!("{base}{path}"));
            browser.wait_for_text(shows);
            if path == "/" || name == "function" {
                browser.wait_for("html[data-charts=drawn]");
                let lines = browser.run("return document.querySelectorAll('.plot canvas').length");
                assert!(lines.as_u64() >= Some(4), "{name}: {lines} charts");
            }
            browser.keep_picture(&format!("{name}{suffix}"));
            let wide = browser.run("return document.documentElement.scrollWidth - innerWidth");
            assert!(wide.as_i64() <= Some(0), "{name}{suffix} is {wide} pixels too wide");
            let complaints = browser.complaints();
            assert!(complaints.is_empty(), "{name}{suffix}: {complaints:?}");
        }
    }
    browser.show_on(DESK);
    // What is live is fetched again, and nothing else.
    browser.open(base);
    browser.run("for (const id of ['live', 'more']) document.getElementById(id).old = true");
    wait_until("both parts are new", || {
        browser.run(
            "return !document.getElementById('live').old && !document.getElementById('more').old",
        ) == Value::Bool(true)
    });
    let charts = browser.run("return document.querySelectorAll('.plot canvas').length");
    assert!(charts.as_u64() >= Some(4), "{charts} charts");
    let ids = browser.run("return document.querySelectorAll('#live, #more').length");
    assert_eq!(ids, 2);
    // Every figure leads to its metric.
    browser.open(&format!("{base}/functions/hello"));
    let lost = browser.run(
        "return fetch('/metrics').then(r => r.text()).then(t => { \
         const page = new DOMParser().parseFromString(t, 'text/html'); \
         return [...document.querySelectorAll('a[href^=\"/metrics#\"]')].map(a => a.hash.slice(1)) \
         .filter(id => !page.getElementById(id)); })",
    );
    assert_eq!(lost, serde_json::json!([]));
    // All of it is reached by the keyboard, beginning with the content.
    browser.type_into("body", "\u{e004}");
    let first = browser.run("return document.activeElement.textContent");
    assert_eq!(first, "Skip to the content");
}

fn browse_files(browser: &Browser, base: &str) {
    browser.open(&format!("{base}/sandboxes/one"));
    browser.wait_for_text("Inside");
    browser.click("a[href$='files?path=/']");
    browser.wait_for_text("tmp/");
    browser.keep_picture("files");
    browser.open(&format!("{base}/sandboxes/one/files?path=/tmp/d"));
    browser.click("table.files tbody a");
    browser.wait_for("pre.contents");
    // What a guest wrote is text.
    assert_eq!(browser.run("return document.querySelector('pre.contents b')"), Value::Null);
    browser.wait_for_text("<b>bold</b>");
    let downloaded = browser.run(
        "return fetch('/sandboxes/one/download?path=/tmp/d/x.html').then(r => r.text().then(t => \
         [t, r.headers.get('content-type'), r.headers.get('content-disposition')]))",
    );
    assert_eq!(downloaded[0], "<b>bold</b>\n");
    assert_eq!(downloaded[1], "application/octet-stream");
    assert_eq!(downloaded[2], "attachment; filename*=UTF-8''x.html");
}

fn type_into_terminal(browser: &Browser, base: &str) {
    browser.open(&format!("{base}/sandboxes/one/terminal"));
    browser.wait_for("#terminal-state[data-state=open]");
    let shown = || {
        let rows = "return [...document.querySelectorAll('.xterm-rows > div')].map(r => r.textContent).join('\\n')";
        browser.run(rows).as_str().unwrap_or_default().to_owned()
    };
    browser
        .type_into(".xterm-helper-textarea", "echo $((6*7))-typed; stty size; ls /tmp/d\u{e007}");
    wait_until("the terminal shows what was typed", || {
        let shown = shown();
        shown.contains("42-typed") && shown.contains("x.html")
    });
    browser.keep_picture("terminal");
    browser.show_on(DARK);
    browser.keep_picture("terminal-dark");
    browser.show_on(DESK);
    let complaints = browser.complaints();
    assert!(complaints.is_empty(), "{complaints:?}");
    browser.type_into(".xterm-helper-textarea", "exit 3\u{e007}");
    browser.wait_for_text("the shell has ended with 3");
}

fn fork_and_kill(browser: &Browser, base: &str, home: &Path) {
    let names = || -> Vec<String> {
        let all: Value = serde_json::from_str(&call(home, &["sandbox", "list", "--json"])).unwrap();
        all.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
    };
    browser.open(&format!("{base}/sandboxes/one"));
    browser.click("form[action='/sandboxes/one/fork'] button");
    wait_until("there is a copy", || names().len() == 2);
    browser.wait_for_text("Copy of");
    let copy = names().into_iter().find(|name| name != "one").unwrap();
    browser.open(&format!("{base}/sandboxes"));
    browser.wait_for_text("fork of one");
    browser.keep_picture("forks");
    browser.click(&format!("form[action='/sandboxes/{copy}/pause'] button"));
    browser.wait_for_text("hibernated");
    browser.click(&format!("form[action='/sandboxes/{copy}/resume'] button"));
    wait_until("it runs", || !browser.text().contains("hibernated"));
    browser.open(&format!("{base}/sandboxes"));
    browser.click(&format!("form[action='/sandboxes/{copy}/kill'] button"));
    browser.wait_for("dialog[open]");
    browser.keep_picture("question");
    browser.click("dialog [data-answer=no]");
    assert_eq!(names().len(), 2);
    browser.click(&format!("form[action='/sandboxes/{copy}/kill'] button"));
    browser.click("dialog [data-answer=yes]");
    wait_until("it is gone", || names() == ["one"]);
    browser.open(&format!("{base}/events?only=operator"));
    browser.wait_for_text("killed");
}

fn follow_log(browser: &Browser, base: &str, daemon: &Daemon) {
    browser.open(&format!("{base}/logs?function=hello"));
    browser.wait_for("#log");
    let lines =
        || browser.run("return document.querySelectorAll('#log .line').length").as_u64().unwrap();
    let before = lines();
    get(daemon.gateway(), "hello", "/a-new-line");
    wait_until("the page shows a line that is new", || lines() > before);
    browser.open(&format!("{base}/logs?function=hello&q=A-NEW-LINE"));
    browser.wait_for_text("a-new-line");
}

/// Answers of a connection that is kept.
struct Client {
    stream: TcpStream,
    host: String,
}

impl Client {
    fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self { stream, host: address.to_string() }
    }

    /// Sends a request with `Connection: close`; head and body of the answer.
    fn ask(
        mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> (u16, String) {
        let has_host = headers.iter().any(|(name, _)| *name == "Host");
        let mut text = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
        if !has_host {
            text += &format!("Host: {}\r\n", self.host);
        }
        for (name, value) in headers {
            text += &format!("{name}: {value}\r\n");
        }
        if !body.is_empty() {
            text += &format!(
                "Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {}\r\n",
                body.len()
            );
        }
        self.stream.write_all(format!("{text}\r\n{body}").as_bytes()).unwrap();
        let mut answer = Vec::new();
        self.stream.read_to_end(&mut answer).unwrap();
        let answer = String::from_utf8_lossy(&answer).into_owned();
        (answer.split(' ').nth(1).unwrap().parse().unwrap(), answer)
    }
}

/// Logs in; the cookie.
fn log_in(address: SocketAddr, token: &str) -> String {
    let origin = format!("http://{address}");
    let form = format!("token={token}");
    let (status, answer) =
        Client::connect(address).ask("POST", "/login", &[("Origin", &origin)], &form);
    assert_eq!(status, 303, "{answer}");
    let cookie = answer.lines().find_map(|line| line.strip_prefix("set-cookie: ")).unwrap();
    assert!(cookie.contains("HttpOnly") && cookie.contains("SameSite=Strict"), "{cookie}");
    cookie.split(';').next().unwrap().to_owned()
}

#[test]
fn nobody_else_gets_in_and_no_other_page_acts() {
    let home = home("dashboard-guard");
    let (_daemon, address, token) = start(&home);
    call(&home, &["sandbox", "create", "box", "--name", "one"]);
    let ask = |method: &str, path: &str, headers: &[(&str, &str)], body: &str| {
        Client::connect(address).ask(method, path, headers, body)
    };
    let origin = format!("http://{address}");
    for path in [
        "/",
        "/functions",
        "/sandboxes/one/download?path=/etc/passwd",
        "/openapi.json",
        "/logs/stream?function=box",
    ] {
        let (status, answer) = ask("GET", path, &[], "");
        assert_eq!(status, 401, "{path}: {answer}");
        let (status, answer) = ask("GET", path, &[("Accept", "text/html")], "");
        assert_eq!(status, 303, "{path}: {answer}");
    }
    // DNS rebinding, a wrong token, and a login from another page.
    assert_eq!(ask("GET", "/login", &[("Host", "evil.example")], "").0, 403);
    assert_eq!(ask("POST", "/login", &[("Origin", &origin)], "token=wrong").0, 401);
    let other = ("Origin", "http://evil.example");
    assert_eq!(ask("POST", "/login", &[other], &format!("token={token}")).0, 403);

    let cookie = log_in(address, &token);
    let cookie = ("Cookie", cookie.as_str());
    let (status, page) = ask("GET", "/sandboxes/one", &[cookie], "");
    assert_eq!(status, 200, "{page}");
    for header in [
        "content-security-policy: default-src 'none'",
        "x-frame-options: DENY",
        "referrer-policy: same-origin",
        "cache-control: no-store",
    ] {
        assert!(page.contains(header), "{header} is missing in {page}");
    }
    assert!(
        !page.contains("unsafe-inline")
            && !page.contains(" style=\"")
            && !page.contains(" onclick")
    );
    let form = page.split("name=\"form\" value=\"").nth(1).unwrap().split('"').next().unwrap();
    let form = format!("form={form}");
    let kill = "/sandboxes/one/kill";
    let own = ("Origin", origin.as_str());
    for (headers, body, why) in [
        (vec![cookie, own], "", "no secret"),
        (vec![cookie, own], "form=0000", "a wrong secret"),
        (vec![cookie], form.as_str(), "no origin"),
        (vec![cookie, other], form.as_str(), "another origin"),
        (vec![cookie, ("Origin", "null")], form.as_str(), "an opaque origin"),
    ] {
        let (status, answer) = ask("POST", kill, &headers, body);
        assert_eq!(status, 403, "{why}: {answer}");
    }
    let same_site = ("Sec-Fetch-Site", "same-site");
    assert_eq!(ask("GET", "/", &[cookie, same_site], "").0, 401, "a page of another port");
    let long = format!("{form}&x={}", "x".repeat(20_000));
    assert_eq!(ask("POST", kill, &[cookie, own], &long).0, 413);
    let upgrade = [
        cookie,
        other,
        ("Connection", "Upgrade"),
        ("Upgrade", "websocket"),
        ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ];
    assert_eq!(ask("GET", "/sandboxes/one/terminal/stream?rows=9&columns=9", &upgrade, "").0, 403);
    assert!(call(&home, &["sandbox", "list"]).contains("one"));
    assert_eq!(ask("POST", kill, &[cookie, own], &form).0, 303);
    assert!(!call(&home, &["sandbox", "list"]).contains("one"));

    assert_eq!(ask("POST", "/logout", &[cookie, own], &form).0, 303);
    assert_eq!(ask("GET", "/", &[cookie], "").0, 401);
}

#[test]
fn streams_and_terminals_are_bounded_and_end_with_their_session() {
    let home = home("dashboard-bounds");
    let (_daemon, address, token) = start(&home);
    call(&home, &["sandbox", "create", "box", "--name", "one"]);
    let cookie = log_in(address, &token);
    let begin = |request: String| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut head = [0; 64];
        let count = stream.read(&mut head).unwrap();
        let head = String::from_utf8_lossy(&head[..count]).into_owned();
        (head.split(' ').nth(1).unwrap().parse::<u16>().unwrap(), stream)
    };
    let log = || {
        begin(format!(
            "GET /logs/stream?function=hello HTTP/1.1\r\nHost: {address}\r\nCookie: {cookie}\r\n\r\n"
        ))
    };
    let terminal = || {
        begin(format!(
            "GET /sandboxes/one/terminal/stream?rows=9&columns=9 HTTP/1.1\r\nHost: {address}\r\nCookie: {cookie}\r\n\
             Origin: http://{address}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        ))
    };
    // The log may be silent, so that its head is all that comes.
    let mut logs: Vec<_> = (0..16).map(|_| log()).collect();
    assert!(logs.iter().all(|(status, _)| *status == 200));
    assert_eq!(log().0, 429);
    let terminals: Vec<_> = (0..8).map(|_| terminal()).collect();
    assert!(terminals.iter().all(|(status, _)| *status == 101));
    assert_eq!(terminal().0, 429);
    // One that goes makes room.
    logs.pop();
    wait_until("there is room for another log", || log().0 == 200);

    let (_, page) = Client::connect(address).ask("GET", "/", &[("Cookie", &cookie)], "");
    let form = page.split("name=\"form\" value=\"").nth(1).unwrap().split('"').next().unwrap();
    let origin = format!("http://{address}");
    let headers = [("Cookie", cookie.as_str()), ("Origin", origin.as_str())];
    let (status, _) =
        Client::connect(address).ask("POST", "/logout", &headers, &format!("form={form}"));
    assert_eq!(status, 303);
    for (_, mut stream) in logs.into_iter().chain(terminals) {
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).expect("it ends with its session");
    }
    wait_until("no shell is left", || {
        let execs = call(&home, &["sandbox", "show", "one", "--json"]);
        !execs.is_empty() && {
            let shown = call(
                &home,
                &[
                    "exec",
                    "one",
                    "--",
                    "sh",
                    "-c",
                    "cat /proc/[0-9]*/cmdline | tr -d '\\0' || true",
                ],
            );
            !shown.contains("/bin/bash")
        }
    });
}

#[test]
fn so_many_connections_are_served_and_others_wait() {
    let home = home("dashboard-connections");
    let (_daemon, address, _) = start(&home);
    // Each is in the middle of the head of a request, for which it has ten seconds.
    let held: Vec<_> = (0..64)
        .map(|_| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(b"GET /login HTTP/1.1\r\n").unwrap();
            stream
        })
        .collect();
    let mut waiting = TcpStream::connect(address).unwrap();
    waiting
        .write_all(format!("GET /login HTTP/1.1\r\nHost: {address}\r\n\r\n").as_bytes())
        .unwrap();
    waiting.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let mut head = [0; 12];
    assert!(waiting.read_exact(&mut head).is_err(), "it was served beside 64 others");
    drop(held);
    waiting.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    waiting.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"HTTP/1.1 200");
}

#[test]
fn top_and_the_api_say_what_the_node_does() {
    let home = home("dashboard-top");
    let (daemon, _, _) = start(&home);
    wait_until("a sample has the requests", || {
        for _ in 0..5 {
            assert_eq!(get(daemon.gateway(), "hello", "/").status, 200);
        }
        std::thread::sleep(Duration::from_millis(300));
        let stats: Value = serde_json::from_str(&call(&home, &["top", "--json"])).unwrap();
        stats["node"]["requests"].as_f64() > Some(0.0)
    });
    let text = call(&home, &["top", "--once"]);
    assert!(text.contains("FUNCTION") && text.contains("hello"), "{text}");
    let series = daemon.admin("/stats/series?function=hello").json();
    let requests = series["columns"].as_array().unwrap().iter().position(|name| name == "requests");
    let values = series["values"][requests.unwrap()].as_array().unwrap();
    assert!(values.iter().any(|value| value.as_f64() > Some(0.0)), "{values:?}");
    assert_eq!(daemon.admin("/stats/series?function=nobody").status, 404);
    assert_eq!(daemon.admin("/openapi.json").json()["openapi"], "3.1.0");
    // What is described of the functions is what is answered.
    let functions = daemon.admin("/functions").json();
    let schema = &daemon.admin("/openapi.json").json()["components"]["schemas"]["FunctionInfo"];
    for name in schema["required"].as_array().unwrap() {
        assert!(!functions[0][name.as_str().unwrap()].is_null() || name == "listen", "{name}");
    }
}
