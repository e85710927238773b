//! Headers with secrets that the node adds, and that no sandbox sees: unmodified clients in a
//! sandbox, and a TLS server on this host that writes down what it is asked.

use serde_json::Value;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use thaw_e2e::{
    Daemon, DaemonOptions, Outcome, built_home, python, python_with, repository, run,
    run_with_input, run_within, skip, thaw, use_e2b, wait_until, write_e2b_settings,
};

/// Found nowhere by chance.
const VALUE: &str = "sk-7d1e90c4-never-in-a-sandbox";
/// The name under which the server is reached, on the loopback of this host.
const HOST: &str = "host.thaw.internal";

/// An authority of the tests, and certificates by it and by nobody.
struct Keys(PathBuf);

impl Keys {
    fn make(home: &Path) -> Self {
        let directory = home.with_extension("keys");
        fs::create_dir_all(&directory).unwrap();
        let keys = Self(directory);
        let curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"];
        let subject = format!("subjectAltName=DNS:{HOST}");
        let request = |name: &str, more: &[&str]| {
            let (key, certificate) = (format!("{name}.key"), format!("{name}.pem"));
            let mut command = Command::new("openssl");
            command.args(["req", "-x509", "-days", "2"]).args(curve).args(more);
            command.args(["-keyout", &key, "-out", &certificate]).current_dir(&keys.0);
            run(&mut command).success();
        };
        request("authority", &["-subj", "/CN=test authority"]);
        let by = ["-CA", "authority.pem", "-CAkey", "authority.key"];
        let usual = [
            "-subj",
            "/CN=test",
            "-addext",
            &subject,
            "-addext",
            "basicConstraints=critical,CA:FALSE",
        ];
        request("server", &[&usual[..], &by].concat());
        request("stranger", &usual);
        keys
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

/// A server; it ends with the test.
struct Server {
    process: Child,
    port: u16,
    record: PathBuf,
}

impl Server {
    fn start(keys: &Keys, certificate: &str) -> Self {
        let record = keys.path(&format!("{certificate}.record"));
        fs::write(&record, "").unwrap();
        let mut process = Command::new(python())
            .arg(repository().join("tests/guest/inject/server.py"))
            .args([".pem", ".key"].map(|kind| keys.path(&format!("{certificate}{kind}"))))
            .arg(&record)
            .stdout(Stdio::piped())
            .spawn()
            .expect("python");
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Self { process, port: line.trim().parse().expect("a port"), record }
    }

    /// What it was asked.
    fn seen(&self) -> Vec<Value> {
        let text = fs::read_to_string(&self.record).unwrap();
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    /// What it was asked last, and the values of a header in it.
    fn last(&self, header: &str) -> (Value, Vec<String>) {
        let last = self.seen().pop().expect("a request");
        let values = last["headers"].as_array().unwrap().iter();
        let values = values.filter(|pair| pair[0] == header);
        let values = values.map(|pair| pair[1].as_str().unwrap().to_owned()).collect();
        (last, values)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A home with a box whose requests to the server get a header, a daemon, and a sandbox `one`.
struct Node {
    home: PathBuf,
    daemon: Daemon,
    server: Server,
    keys: Keys,
}

impl Node {
    fn start(label: &str, more: impl FnOnce(&Keys, u16) -> String) -> Self {
        Self::start_with(label, more, DaemonOptions::default())
    }

    fn start_with(
        label: &str,
        more: impl FnOnce(&Keys, u16) -> String,
        options: DaemonOptions,
    ) -> Self {
        let home = built_home(label, &[]);
        let keys = Keys::make(&home);
        let server = Server::start(&keys, "server");
        let directory = home.with_extension("box");
        fs::create_dir_all(&directory).unwrap();
        let port = server.port;
        let text = format!(
            "name = \"box\"\nisolation = \"instance\"\nenv = {{ MARK = \"mark-of-the-sandbox\" }}\n\
             [limits]\nmemory = \"1GiB\"\n[entry]\nkind = \"sandbox\"\n[runtime]\nkind = \"python3\"\n\
             interpreter = \"/usr/bin/python3\"\n\
             programs = [\"bash\", \"cat\", \"env\", \"sleep\"{}]\n\
             [[egress.inject]]\nhost = \"{HOST}:{port}\"\nheader = \"Authorization\"\n\
             value = \"Bearer ${{api-key}}\"\n{}",
            ["curl", "node"]
                .map(|name| if has(name) { format!(", {name:?}") } else { String::new() })
                .concat(),
            more(&keys, port)
        );
        fs::write(directory.join("thaw.toml"), text).unwrap();
        run(thaw().args(["build", "--weak-limits"]).arg(&directory).env("THAW_HOME", &home))
            .success();
        let roots = format!("SSL_CERT_FILE={}", keys.path("authority.pem").display());
        write_e2b_settings(&home, "base = \"box\"\nplain = \"plain\"");
        let daemon = Daemon::start_by(&["env".to_owned(), roots], &home, &options);
        let node = Self { home, daemon, server, keys };
        node.ok(&["sandbox", "create", "box", "--name", "one"]);
        node
    }

    fn call(&self, arguments: &[&str]) -> Outcome {
        run(thaw().args(arguments).env("THAW_HOME", &self.home))
    }

    fn ok(&self, arguments: &[&str]) -> String {
        self.call(arguments).success()
    }

    fn set(&self, name: &str, value: &str) {
        let mut thaw = thaw();
        thaw.args(["secret", "set", "box", name]).env("THAW_HOME", &self.home);
        run_with_input(&mut thaw, value.as_bytes()).success();
    }

    /// Runs a Python program in the sandbox, which knows the server as `url` and has `ask`.
    fn python(&self, program: &str) -> String {
        let url = format!("https://{HOST}:{}", self.server.port);
        let text =
            format!("url = {url:?}\nhost, port = {HOST:?}, {}\n{ASK}{program}", self.server.port);
        self.ok(&["exec", "one", "--", "python3", "-c", &text])
    }
}

const ASK: &str = r"
import http.client, ssl, urllib.error, urllib.request
def ask(to, **more):
    try:
        with urllib.request.urlopen(urllib.request.Request(to, **more), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)
";

fn has(program: &str) -> bool {
    run(Command::new("sh").args(["-c", &format!("command -v {program}")])).code == Some(0)
}

/// How often a text is in the memory of a process: in pages that are there, since looking at the
/// others would make them.
fn count_in_memory(pid: u32, text: &str) -> usize {
    let open = |name: &str| File::open(format!("/proc/{pid}/{name}"));
    // One that has ended meanwhile has no memory.
    let (Ok(maps), Ok(memory), Ok(pagemap)) = (open("maps"), open("mem"), open("pagemap")) else {
        return 0;
    };
    let mut count = 0;
    for line in BufReader::new(maps).lines().map_while(Result::ok) {
        let (range, rest) = line.split_once(' ').expect("a range");
        if !rest.starts_with('r') || rest.ends_with("[vvar]") {
            continue;
        }
        let (from, to) = range.split_once('-').expect("two addresses");
        let [from, to] = [from, to].map(|text| u64::from_str_radix(text, 16).expect("hex"));
        for run in present(&pagemap, from / PAGE, to / PAGE) {
            let mut bytes = vec![0; ((run.end - run.start) * PAGE) as usize];
            if memory.read_exact_at(&mut bytes, run.start * PAGE).is_ok() {
                count += bytes.windows(text.len()).filter(|at| *at == text.as_bytes()).count();
            }
        }
    }
    count
}

/// Bytes of a page.
const PAGE: u64 = 4096;

/// The runs of pages that are there (proc_pid_pagemap(5)).
fn present(pagemap: &File, from: u64, to: u64) -> Vec<Range<u64>> {
    /// Present, or in swap.
    const THERE: u64 = 3 << 62;
    let mut runs: Vec<Range<u64>> = Vec::new();
    let mut at = from;
    while at < to {
        let mut entries = vec![0; ((to - at).min(1 << 16) * 8) as usize];
        if pagemap.read_exact_at(&mut entries, at * 8).is_err() {
            break;
        }
        for entry in entries.chunks_exact(8) {
            if u64::from_ne_bytes(entry.try_into().unwrap()) & THERE != 0 {
                match runs.last_mut() {
                    Some(run) if run.end == at => run.end += 1,
                    _ => runs.push(at..at + 1),
                }
            }
            at += 1;
        }
    }
    runs
}

/// Files below a directory that contain a text.
fn files_with(directory: &Path, text: &str) -> String {
    run(Command::new("grep").arg("-rlaF").arg(text).arg(directory)).stdout
}

#[test]
fn unmodified_clients_send_a_secret_that_the_sandbox_does_not_have() {
    let node = Node::start("inject-clients", |_, _| String::new());
    node.set("api-key", VALUE);
    let bearer = format!("Bearer {VALUE}");
    let said = node.python("print(ask(url + '/a?b', headers={'Authorization': 'Bearer mine'}))");
    assert_eq!(said, "(200, 'seen\\n')\n");
    let (request, values) = node.server.last("authorization");
    assert_eq!(values, [bearer.as_str()], "the program's own is replaced");
    assert_eq!(request["path"], "/a?b");
    let (_, hosts) = node.server.last("host");
    assert_eq!(hosts, [format!("{HOST}:{}", node.server.port)]);
    // The proxy's connection to the server is the sandbox's: a handshake and a request.
    let shown: Value =
        serde_json::from_str(&node.ok(&["sandbox", "show", "one", "--json"])).expect("JSON");
    if !node.daemon.log().contains("bytes of outgoing connections are not counted") {
        let sent = shown["network"]["sent_bytes"].as_u64();
        assert!(sent.is_some_and(|sent| (200..20_000).contains(&sent)), "{shown}");
    }
    let url = format!("https://{HOST}:{}/other", node.server.port);
    if has("curl") {
        let said = node.ok(&[
            "exec",
            "one",
            "--",
            "curl",
            "-sS",
            "-H",
            "Authorization: x",
            "-H",
            "authorization: y",
            &url,
        ]);
        assert_eq!(said, "seen\n");
        assert_eq!(node.server.last("authorization").1, [bearer.as_str()]);
    }
    if has("node") {
        let program = format!(
            "require('https').get('{url}', answer => {{ console.log(answer.statusCode); answer.resume() }})"
        );
        assert_eq!(node.ok(&["exec", "one", "--", "node", "-e", &program]), "200\n");
        assert_eq!(node.server.last("authorization").1, [bearer.as_str()]);
    } else {
        skip("there is no node");
    }
    // A program that keeps what it has heard, while its memory is looked at.
    let holds = "import sys, os; print(ask(url)); sys.stdout.flush(); import time; time.sleep(600)";
    let text = format!("url = {:?}\n{ASK}{holds}", format!("https://{HOST}:{}", node.server.port));
    let before = node.server.seen().len();
    node.ok(&["exec", "-d", "one", "--", "python3", "-c", &text]);
    thaw_e2e::wait_until("it has asked", || node.server.seen().len() > before);
    let pids: Vec<u32> = node.daemon.sandboxes().iter().map(|process| process.pid).collect();
    let found = |text: &str| pids.iter().map(|&pid| count_in_memory(pid, text)).sum::<usize>();
    assert!(found("mark-of-the-sandbox") > 0, "the search finds what is there");
    assert_eq!(found(VALUE), 0, "the secret is in the memory of a sandbox");
    node.ok(&["sandbox", "checkpoint", "one", "after"]);
    for place in ["store", "logs"].map(|place| node.home.join(place)) {
        assert_eq!(files_with(&place, VALUE), "");
    }
    assert!(!files_with(&node.home.join("secrets"), VALUE).is_empty());
    for said in [
        node.ok(&["inspect", "box", "--json"]),
        node.ok(&["sandbox", "show", "one", "--json"]),
        node.daemon.admin("/functions/box").text(),
        node.ok(&["exec", "one", "--", "env"]),
        node.daemon.log(),
    ] {
        assert!(!said.contains(VALUE), "{said}");
    }
}

#[test]
fn bodies_streams_and_other_protocols_go_through() {
    let node = Node::start("inject-streams", |_, _| String::new());
    node.set("api-key", VALUE);
    let said = node.python(
        r"
import hashlib, socket, time
body = bytes(range(256)) * 20000
assert ask(url, data=body)[1].split() == [str(len(body)), hashlib.sha256(body).hexdigest()]
# In chunks, and several requests on one connection.
line = http.client.HTTPSConnection(host, port, timeout=60)
for path in ('/', '/close', '/', '/'):
    line.request('POST' if path == '/' else 'GET', path, body=iter([b'one', b'two']) if path == '/' else None)
    answer = line.getresponse()
    print(answer.status, answer.read().split()[0], answer.getheader('Alt-Svc'))
    # The server ends its connection after the answer. What is on its way at that moment is lost, as with
    # any proxy (RFC 9112, 9.3.1), and nobody here sees that moment.
    if path == '/close': time.sleep(5)
# The first event is here before there is a second one.
events = urllib.request.urlopen(url + '/events', timeout=60)
print(events.readline(), events.readline())
ask(url + '/go-on')
print(events.read())
# Another protocol.
raw = ssl.create_default_context().wrap_socket(socket.create_connection((host, port)), server_hostname=host)
raw.sendall(f'GET /ws HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n'
            'Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n'.encode())
stream = raw.makefile('rb')
print(stream.readline().split()[1])
while stream.readline().strip(): pass
for word in (b'hello\n', b'world\n'):
    raw.sendall(word)
    print(stream.readline())
",
    );
    let expected = "200 b'6' None\n200 b'seen' None\n200 b'6' None\n200 b'6' None\n\
        b'data: one\\n' b'\\n'\nb'data: two\\n\\n'\nb'101'\nb'HELLO\\n'\nb'WORLD\\n'\n";
    assert_eq!(said, expected);
    let seen = node.server.seen();
    assert!(seen.iter().all(|request| {
        let headers = request["headers"].to_string();
        headers.contains(VALUE)
    }));
    // The connection to the server is used again, until the server ends it.
    let ports: Vec<_> = seen[1..5].iter().map(|request| &request["connection"]).collect();
    assert!(ports[0] == ports[1] && ports[1] != ports[2] && ports[2] == ports[3], "{ports:?}");
}

#[test]
fn nobody_else_gets_the_header_and_nothing_is_sent_to_a_stranger() {
    let mut stranger = None;
    let node = Node::start("inject-strangers", |keys, _| {
        let server = Server::start(keys, "stranger");
        let port = server.port;
        stranger = Some(server);
        format!(
            "[[egress.inject]]\nhost = \"{HOST}:{port}\"\nheader = \"X-Key\"\nvalue = \"${{api-key}}\"\n\
             [[egress.inject]]\nhost = \"localtest.invalid\"\nheader = \"X-Key\"\nvalue = \"${{api-key}}\"\n"
        )
    });
    let stranger = stranger.unwrap();
    node.set("api-key", VALUE);
    let program = format!(
        r"
stranger = 'https://{HOST}:{}'
print('stranger', ask(stranger))
print('no such name', ask('https://localtest.invalid/'))
print('plain', ask('http://localtest.invalid/'))
print('host', ask(url, headers={{'Host': 'localtest.invalid'}}))
print('other host', ask(url, headers={{'Host': 'other.example'}}))
print('trace', ask(url, method='TRACE'))
print('not a rule', ask('https://other.example/'))
bad = ssl.create_default_context()
import socket
def shake(name):
    try: bad.wrap_socket(socket.create_connection((host, port)), server_hostname=name); return 'trusted'
    except OSError as error: return 'alert' in str(error).lower() and 'refused'
print('sni', shake('other.example'))
two = http.client.HTTPSConnection(host, port, timeout=60)
two.putrequest('GET', '/', skip_host=True); two.putheader('Host', f'{{host}}:{{port}}'); two.putheader('Host', 'other.example'); two.endheaders()
print('two hosts', two.getresponse().status)
",
        stranger.port
    );
    let said = node.python(&program);
    let line = |start: &str| {
        let found = said.lines().find(|line| line.starts_with(&format!("{start} ")));
        found.unwrap_or_else(|| panic!("{start}: {said}")).to_owned()
    };
    assert!(line("stranger").contains("502") && line("stranger").contains("not trusted"), "{said}");
    assert!(line("no such name").contains("502"), "{said}");
    assert!(line("no such name").contains("there is no such name"), "{said}");
    assert!(line("plain").contains("no such name"), "{said}");
    assert!(line("host").contains("421") && line("other host").contains("421"), "{said}");
    assert!(line("trace").contains("405"), "{said}");
    assert!(line("not a rule").starts_with("not a rule (0, "), "{said}");
    assert_eq!(line("sni"), "sni refused");
    assert_eq!(line("two hosts"), "two hosts 400");
    assert_eq!((node.server.seen().len(), stranger.seen().len()), (0, 0));
    assert!(!said.contains(VALUE) && !node.daemon.log().contains(VALUE));
    wait_until("it is said", || node.daemon.log().contains("[[egress.inject]]: cannot ask"));
    // Another authority of this host is believed by nobody here.
    assert!(node.keys.path("authority.pem").exists());
}

#[test]
fn values_are_those_of_the_moment_and_conditions_hold() {
    let node = Node::start("inject-values", |_, port| {
        format!(
            "[[egress.inject]]\nhost = \"{HOST}:{port}\"\nheader = \"X-Key\"\nvalue = \"${{other}}\"\n\
             methods = [\"PUT\"]\npaths = [\"/v1/*\"]\n"
        )
    });
    let unset = node.python("print(ask(url))");
    let why = "secret `api-key` of `box` is not set; `thaw secret set box api-key` sets it";
    assert!(unset.contains("502") && unset.contains(why), "{unset}");
    node.set("api-key", "one");
    node.set("other", "two");
    node.python("ask(url)");
    assert_eq!(node.server.last("authorization").1, ["Bearer one"]);
    node.set("api-key", "three");
    node.python("ask(url)");
    assert_eq!(node.server.last("authorization").1, ["Bearer three"]);
    for (path, values) in [("/v1/x", &["two"][..]), ("/v2", &[]), ("/v1/%2e%2e/x", &[])] {
        node.python(&format!("ask(url + {path:?}, method='PUT', data=b'')"));
        let (request, found) = node.server.last("x-key");
        assert_eq!(
            (request["path"].as_str(), found.as_slice()),
            (Some(path), &values.iter().map(|text| text.to_string()).collect::<Vec<_>>()[..])
        );
    }
    node.set("api-key", "line\r\nX-Evil: 1");
    let refused = node.python("print(ask(url))");
    assert!(refused.contains("502") && refused.contains("no header may have"), "{refused}");
    assert!(!refused.contains("Evil"), "{refused}");
    // A copy of the sandbox has its own connections.
    node.set("api-key", "four");
    node.ok(&["sandbox", "fork", "one", "--name", "two"]);
    let url = format!("https://{HOST}:{}/", node.server.port);
    let text = format!("{ASK}print(ask({url:?})[0])");
    assert_eq!(node.ok(&["exec", "two", "--", "python3", "-c", &text]), "200\n");
    assert_eq!(node.server.last("authorization").1, ["Bearer four"]);
    // Rules of the sandbox hold for the proxy at once, also on a connection that is there.
    let talk = format!(
        "{ASK}import os, time
line = http.client.HTTPSConnection({HOST:?}, {})
def again():
    line.request('GET', '/')
    answer = line.getresponse()
    return answer.status, answer.read().decode()
print(again()[0])
open('/tmp/asked', 'w').close()
while not os.path.exists('/tmp/shut'): time.sleep(0.05)
print(again())
",
        node.server.port
    );
    std::thread::scope(|scope| {
        let talking = scope.spawn(|| node.ok(&["exec", "two", "--", "python3", "-c", &talk]));
        let asked = || node.call(&["exec", "two", "--", "cat", "/tmp/asked"]).code == Some(0);
        wait_until("the sandbox has a connection", asked);
        node.ok(&["sandbox", "egress", "two", "--none"]);
        node.ok(&["exec", "two", "--", "python3", "-c", "open('/tmp/shut', 'w')"]);
        let said = talking.join().expect("it does not panic");
        assert!(
            said.starts_with("200\n(502, ") && said.contains("the rules of the sandbox"),
            "{said}"
        );
    });
    let shown = node.ok(&["sandbox", "egress", "two", "--log"]);
    assert!(shown.contains("denied"), "{shown}");
}

#[test]
fn connections_to_the_proxy_are_bounded() {
    let node = Node::start("inject-bounds", |_, _| String::new());
    node.set("api-key", "one");
    let said = node.python(
        r"
import errno, socket
held = []
try:
    for _ in range(100): held.append(socket.create_connection((host, port)))
except OSError as error: print(len(held), errno.errorcode[error.errno])
held.pop().close()
import time
for _ in range(600):
    time.sleep(0.1)
    if ask(url)[0] == 200: break
else: print('no room again')
# Heads have a bound.
raw = ssl.create_default_context().wrap_socket(held.pop(), server_hostname=host)
raw.sendall(b'GET / HTTP/1.1\r\nHost: ' + host.encode() + b'\r\nX: ')
try:
    for _ in range(64): raw.sendall(b'x' * 65536)
    print(raw.recv(12))
except OSError: print('cut off')
",
    );
    let (first, rest) = said.split_once('\n').unwrap();
    assert_eq!(first, "64 EADDRNOTAVAIL");
    assert!(rest == "cut off\n" || rest == "b'HTTP/1.1 431'\n", "{said}");
    assert!(node.server.seen().len() == 1, "{:?}", node.server.seen());
}

/// Keys of a function whose programs trust the node for all hosts, and which reaches this host.
const TRUSTING: &str = "[egress]\nauthority = true\nallow = [\"host.thaw.internal:*\"]\n";

#[test]
fn a_sandbox_has_headers_of_its_own_that_change_while_it_runs() {
    let mut node = Node::start("inject-own", |_, _| TRUSTING.to_owned());
    let other = Server::start(&node.keys, "server");
    node.set("api-key", "of-the-function");
    node.set("other", VALUE);
    let at = format!("{HOST}:{}", other.port);
    let ask = |node: &Node, name: &str| {
        let text = format!("{ASK}print(ask('https://{at}'))");
        node.ok(&["exec", name, "--", "python3", "-c", &text])
    };
    // The server's authority is none that the program knows.
    assert!(ask(&node, "one").starts_with("(0, "));
    let rule = format!("{at}: X-Key: key ${{other}}");
    let said = node.ok(&["sandbox", "inject", "one", &rule]);
    assert!(said.contains(&format!("adds x-key to requests to {at}\n")), "{said}");
    assert_eq!(ask(&node, "one"), "(200, 'seen\\n')\n");
    assert_eq!(other.last("x-key").1, [format!("key {VALUE}")]);
    // Those of the function stay.
    node.python("ask(url)");
    assert_eq!(node.server.last("authorization").1, ["Bearer of-the-function"]);
    node.ok(&["sandbox", "fork", "one", "--name", "two"]);
    let none = node.ok(&["sandbox", "inject", "one", "--none"]);
    assert!(!none.contains("adds"), "{none}");
    assert!(ask(&node, "one").starts_with("(0, "));
    assert!(ask(&node, "two").starts_with("(200, "), "a copy has its own");
    // They allow nothing.
    node.ok(&["sandbox", "egress", "two", "--none"]);
    assert!(ask(&node, "two").starts_with("(502, "));
    node.ok(&["sandbox", "egress", "two", "--allow", "host.thaw.internal:*"]);
    node.daemon.wait_until_kept("box");
    node.daemon.kill_and_await_next();
    assert!(ask(&node, "two").starts_with("(200, "), "{}", node.daemon.log());
    for text in [rule.as_str(), "*: X-Key: ${other}", "a.example: Host: ${other}"] {
        let one = node.call(&["sandbox", "inject", "one", text, "--json"]);
        assert_eq!(one.code == Some(0), text == rule, "{one:?}");
    }
    let said = node.ok(&["sandbox", "show", "one", "--json"]);
    assert!(said.contains("x-key") && !said.contains(VALUE), "{said}");
}

/// E2B's SDK from PyPI, not changed.
#[test]
fn e2bs_sdk_adds_headers_to_requests_of_a_sandbox() {
    let Some(python) = python_with(&["e2b==2.63.0"]) else { return };
    let arguments = ["--e2b", "127.0.0.1:0"].map(str::to_owned).into();
    let node = Node::start_with(
        "inject-e2b",
        |keys, _| {
            // One without the key.
            let directory = keys.0.with_extension("plain");
            fs::create_dir_all(&directory).unwrap();
            let text = "name = \"plain\"\nisolation = \"instance\"\n[entry]\n\
                        kind = \"sandbox\"\n[runtime]\nkind = \"python3\"\n\
                        programs = [\"bash\"]\n";
            fs::write(directory.join("thaw.toml"), text).unwrap();
            let home = keys.0.with_extension("");
            run(thaw().args(["build", "--weak-limits"]).arg(&directory).env("THAW_HOME", home))
                .success();
            TRUSTING.to_owned()
        },
        DaemonOptions { arguments },
    );
    node.set("api-key", "of-the-function");
    let other = Server::start(&node.keys, "server");
    let mut program = Command::new(python);
    program.arg(repository().join("tests/e2b/inject.py"));
    program.args([format!("{HOST}:{}", other.port), VALUE.to_owned()]);
    use_e2b(&mut program, &node.daemon);
    let printed = run_within(std::time::Duration::from_secs(200), &mut program, b"").success();
    assert_eq!(
        printed,
        "added 200 [[{'transform': {'headers': {'x-key': '***'}}}]]\nfork 200\nupdated 200\n\
         told False\ndenied 502\nnone refused\n\
         plain 501 True\nbase 400 False\n"
    );
    let seen = other.seen();
    let keys: Vec<_> = seen
        .iter()
        .flat_map(|request| request["headers"].as_array().unwrap())
        .filter(|pair| pair[0] == "x-key")
        .map(|pair| pair[1].as_str().unwrap())
        .collect();
    assert_eq!(keys, [VALUE, VALUE, "other"]);
    assert!(!node.daemon.log().contains(VALUE), "{}", node.daemon.log());
    for place in ["store", "logs"].map(|place| node.home.join(place)) {
        assert_eq!(files_with(&place, VALUE), "");
    }
}
