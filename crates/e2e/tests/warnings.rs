//! What a build warns of: generators that draw the same in two copies, times that were read before
//! the freeze and are kept, connections that were open at the freeze, files that were written.

use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;
use thaw_e2e::{Daemon, DaemonOptions, Outcome, get, repository, run, thaw};

/// A server in Python that answers with what an expression gives.
const PYTHON: &str = "import http.server\nIMPORTS\nclass Handler(http.server.BaseHTTPRequestHandler):\n    \
    def do_GET(self):\n        BEFORE\n        self.send_response(200)\n        self.end_headers()\n        \
    self.wfile.write(str(DRAWN).encode())\n    def log_message(self, *_): pass\n\
    http.server.HTTPServer(('', 8080), Handler).serve_forever()\n";

const NODE: &str =
    "require('http').createServer((q, a) => a.end(String(Math.random()))).listen(8080);\n";

const RUBY: &str =
    "require 'socket'\nSEED\nserver = TCPServer.new(8080)\nloop { server.accept.close }\n";

fn python(imports: &str, before: &str, drawn: &str) -> String {
    PYTHON.replace("IMPORTS", imports).replace("BEFORE", before).replace("DRAWN", drawn)
}

/// A home, and a function's directory in it.
struct Place {
    all: TempDir,
}

impl Place {
    /// A function `f` of one file, with further keys of its thaw.toml.
    fn new(file: &str, text: &str, keys: &str) -> Self {
        let place = Self::empty();
        let directory = place.path("f");
        fs::write(directory.join(file), text).expect("a file");
        let outcome = run(thaw().arg("init").arg(&directory));
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        let toml = directory.join("thaw.toml");
        let own = fs::read_to_string(&toml).expect("a file");
        fs::write(&toml, own + keys).expect("a file");
        place
    }

    /// The directory of a function `f` that has no file.
    fn empty() -> Self {
        let place = Self { all: tempfile::tempdir().expect("a directory") };
        fs::create_dir(place.path("f")).expect("a directory");
        fs::create_dir(place.path("home")).expect("a directory");
        place
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.all.path().join(name)
    }

    fn thaw(&self, arguments: &[&str]) -> Outcome {
        run(thaw().env("THAW_HOME", self.path("home")).args(arguments))
    }

    /// The warnings of a build; the same as `thaw inspect` shows afterwards.
    fn warnings(&self, options: &[&str]) -> Vec<Value> {
        let directory = self.path("f");
        let build = ["build", "--weak-limits", "--json", directory.to_str().expect("text")];
        let outcome = self.thaw(&[&build, options].concat());
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        let built: Value = serde_json::from_str(&outcome.stdout).expect("JSON");
        let warnings = built["warnings"].as_array().expect("an array").clone();
        for warning in &warnings {
            let line = format!("thaw: warning: {}", warning["text"].as_str().expect("text"));
            assert!(outcome.stderr.contains(&line), "{}", outcome.stderr);
        }
        let inspected: Value =
            serde_json::from_str(&self.thaw(&["inspect", "f", "--json"]).stdout).expect("JSON");
        assert_eq!(inspected["warnings"].as_array().expect("an array"), &warnings);
        assert!(!outcome.stderr.contains("could not be compared"), "{}", outcome.stderr);
        warnings
    }

    /// The names of generators that the build found; none: there was no warning.
    fn generators(&self) -> Option<String> {
        let warnings = self.warnings(&[]);
        let [only] = &warnings[..] else {
            assert!(warnings.is_empty(), "{warnings:?}");
            return None;
        };
        assert_eq!(only["kind"], "generator");
        Some(names(only, "two copies drew the same numbers from ", ", seeded before"))
    }

    /// The names of variables with times that the build found; none: there was no warning.
    fn times(&self) -> Option<String> {
        let warnings = self.warnings(&[]);
        let found = warnings.iter().find(|warning| warning["kind"] == "time")?;
        Some(names(found, "", " keep"))
    }

    /// What a build says beside its warnings.
    fn notes(&self) -> String {
        let directory = self.path("f");
        let outcome = self.thaw(&["build", "--weak-limits", directory.to_str().expect("text")]);
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        outcome.stderr
    }

    /// What two copies answer.
    fn answers(&self) -> [String; 2] {
        let daemon = Daemon::start(&self.path("home"), &DaemonOptions::default());
        [(); 2].map(|()| {
            let response = get(daemon.gateway(), "f", "/");
            assert_eq!(response.status, 200, "{}\n{}", response.text(), daemon.log());
            response.text()
        })
    }
}

/// The names that a warning has between two texts.
fn names(warning: &Value, before: &str, behind: &str) -> String {
    let text = warning["text"].as_str().expect("text");
    let names = text.strip_prefix(before).expect(text);
    names.split(behind).next().expect("names").to_owned()
}

fn copy_helper(place: &Place, helper: &str) {
    let from = repository().join("sdk/entrypoint").join(helper);
    fs::copy(from, place.path("f").join(helper)).expect("a copy");
}

#[test]
fn pythons_generators_are_named_and_the_helper_seeds_them() {
    let place = Place::new("app.py", &python("import random", "pass", "random.random()"), "");
    assert_eq!(place.generators().as_deref(), Some("the module random"));
    let [one, other] = place.answers();
    assert_eq!(one, other, "the warning was right");
    assert_eq!(place.warnings(&["--no-compare"]), Vec::<Value>::new());

    let text = python("import random, thaw", "thaw.reseed()", "random.random()");
    let place = Place::new("app.py", &text, "");
    copy_helper(&place, "thaw.py");
    assert_eq!(place.generators().as_deref(), Some("the module random"));
    let [one, other] = place.answers();
    assert_ne!(one, other);
}

#[test]
fn a_generator_that_only_the_standard_library_has_loaded_is_not_named() {
    let loaded = "import sys\nassert 'random' in sys.modules";
    let drawn = |imports: &str, before: &str| {
        Place::new("app.py", &python(&format!("{loaded}\n{imports}"), before, "1"), "")
            .generators()
            .is_some()
    };
    assert!(!drawn("pass", "pass"));
    // Wherever the program names it.
    assert!(drawn("from random import choice as chosen", "pass"));
    assert!(drawn("pass", "import random"));
    assert!(drawn("made = [lambda: __import__('os') or (lambda: random.random())]", "pass"));
    // What the collector of garbage does not show is not looked at.
    assert!(drawn("import gc\ngc.freeze()", "pass"));
}

#[test]
fn own_generators_of_python_are_named() {
    let imports = "import random\nown = random.Random(7)\nsafe = random.SystemRandom()";
    let place = Place::new("app.py", &python(imports, "pass", "own.random()"), "");
    let expected = "the module random, an object random.Random (1)";
    assert_eq!(place.generators().as_deref(), Some(expected));
}

#[test]
fn a_program_sees_its_own_python_path() {
    let text = python("import random\nimport os", "pass", "os.environ.get('PYTHONPATH')");
    // Without the probe's directory, or it would not have come to its entry point.
    let check = text.replace(
        "import os",
        "import os\nassert os.environ['PYTHONPATH'] == '/app/lib', os.environ",
    );
    let place = Place::new("app.py", &check, "\n[env]\nPYTHONPATH = \"/app/lib\"\n");
    assert!(place.generators().is_some());
    assert_eq!(place.answers()[0], "/app/lib");
}

#[test]
fn math_random_is_named_and_can_be_replaced() {
    let place = Place::new("app.js", NODE, "");
    assert_eq!(place.generators().as_deref(), Some("Math.random"));
    let [one, other] = place.answers();
    assert_eq!(one, other, "the warning was right");
    // What it drew ahead is in the image.
    let text = format!("require('crypto').randomUUID();\n{NODE}");
    let place = Place::new("app.js", &text, "");
    assert_eq!(place.generators().as_deref(), Some("Math.random, crypto.randomUUID"));

    // A program that does not name it cannot draw from it.
    let without = NODE.replace("Math.random()", "q.url");
    assert_eq!(Place::new("app.js", &without, "").generators(), None);
    let text = format!("const {{ random }} = Math;\n{without}");
    assert_eq!(Place::new("app.js", &text, "").generators().as_deref(), Some("Math.random"));

    let text = format!("require('./thaw-random');\nrequire('crypto').randomUUID();\n{NODE}");
    let place = Place::new("app.js", &text, "");
    copy_helper(&place, "thaw-random.js");
    assert_eq!(place.generators(), None);
    let [one, other] = place.answers();
    assert_ne!(one, other);
    assert!((0.0..1.0).contains(&one.parse::<f64>().expect("a number")));
}

#[test]
fn rubys_generator_is_named_once_it_has_drawn() {
    let place = Place::new("app.rb", &RUBY.replace("SEED", "rand"), "");
    assert_eq!(place.generators().as_deref(), Some("Kernel.rand"));
    let place = Place::new("app.rb", &RUBY.replace("SEED", "$own = Random.new(7)"), "");
    assert_eq!(place.generators().as_deref(), Some("an object Random (1)"));
    // It seeds itself when it first draws.
    let place = Place::new("app.rb", &RUBY.replace("SEED", ""), "");
    assert_eq!(place.generators(), None);
}

/// Accepts connections and keeps them until the other end closes them.
fn keeper() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let port = listener.local_addr().expect("an address").port();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || stream.read(&mut [0]));
        }
    });
    port
}

#[test]
fn connections_that_are_open_at_the_freeze_are_named() {
    let port = keeper();
    let connect = format!("socket.create_connection(('host.thaw.internal', {port}))");
    let program = |imports: &str| python(&format!("import socket\n{imports}"), "pass", "1");
    let allow = format!("\n[egress]\nallow = [\"host.thaw.internal:{port}\"]\n");
    let warnings =
        Place::new("app.py", &program(&format!("kept = {connect}")), &allow).warnings(&[]);
    let [only] = &warnings[..] else { panic!("{warnings:?}") };
    assert_eq!(only["kind"], "connection");
    let text = only["text"].as_str().expect("text");
    assert!(text.starts_with(&format!("a connection to 10.0.2.2:{port} was open")), "{text}");
    let two = program(&format!("kept = [{connect}, {connect}]"));
    let warnings = Place::new("app.py", &two, &allow).warnings(&[]);
    let text = warnings[0]["text"].as_str().expect("text");
    assert!(text.starts_with("2 connections, the first of them to 10.0.2.2:"), "{text}");
    // Neither one that was closed before, nor one that copies make again.
    let closed = program(&format!("{connect}.close()"));
    assert!(Place::new("app.py", &closed, &allow).warnings(&[]).is_empty());
    let again = format!("\n[egress]\nreconnect = [\"host.thaw.internal:{port}\"]\n");
    let kept = program(&format!("kept = {connect}"));
    assert!(Place::new("app.py", &kept, &again).warnings(&[]).is_empty());
}

#[test]
fn sockets_of_datagrams_that_are_connected_at_the_freeze_are_named() {
    let peer = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    peer.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
    let port = peer.local_addr().expect("an address").port();
    let allow = format!("\n[egress]\nallow = [\"host.thaw.internal:{port}/udp\"]\n");
    let place = |then: &str| {
        let imports = format!(
            "import socket\nkept = socket.socket(type=socket.SOCK_DGRAM)\n\
             kept.connect(('host.thaw.internal', {port}))\n{then}"
        );
        Place::new("app.py", &python(&imports, "pass", "kept.send(b'from a copy')"), &allow)
    };
    let sends = place("kept.send(b'from the build')");
    let warnings = sends.warnings(&[]);
    let [only] = &warnings[..] else { panic!("{warnings:?}") };
    assert_eq!(only["kind"], "connection");
    let text = only["text"].as_str().expect("text");
    assert!(text.starts_with(&format!("a UDP socket was connected to 10.0.2.2:{port}")), "{text}");
    // The warning is right: it works on, from another port.
    assert_eq!(sends.answers(), ["11", "11"]);
    let ports: BTreeSet<u16> =
        (0..3).map(|_| peer.recv_from(&mut [0; 64]).expect("a datagram").1.port()).collect();
    assert_eq!(ports.len(), 3);
    // Neither one that was closed before, nor one that has sent nothing.
    assert!(place("kept.send(b'x')\nkept.close()").warnings(&[]).is_empty());
    assert!(place("").warnings(&[]).is_empty());
}

#[test]
fn a_program_that_cannot_be_asked_is_built_all_the_same() {
    let imports = "import os, signal\nsignal.signal(signal.SIGPWR, signal.SIG_IGN)";
    let place = Place::new("app.py", &python(imports, "pass", "1"), "");
    let notes = place.notes();
    assert!(notes.contains("could not be compared"), "{notes}");
    assert!(!notes.contains("warning"), "{notes}");
}

#[test]
fn a_comparison_leaves_no_image() {
    let place = Place::new("app.py", &python("import random", "pass", "random.random()"), "");
    assert!(place.generators().is_some());
    let images: Value =
        serde_json::from_str(&place.thaw(&["images", "--json"]).stdout).expect("JSON");
    assert_eq!(images.as_array().map(Vec::len), Some(1), "{images}");
}

#[test]
fn a_build_says_why_it_compares_nothing() {
    let text = python("import random", "pass", "random.random()");
    let volume = "\n[[volumes]]\nname = \"data\"\npath = \"/data\"\n";
    let place = Place::new("app.py", &text, volume);
    let create = ["volume", "create", "data", "--size", "8MiB", "--function", "f"];
    assert_eq!(place.thaw(&create).code, Some(0));
    let written = fs::File::create(place.path("home/volumes/data/files/log")).expect("a file");
    let notes = place.notes();
    assert!(notes.contains("were not compared") && !notes.contains("warning"), "{notes}");
    assert!(notes.contains("volume `data` cannot be copied"), "{notes}");
    drop(written);
    // Values of secrets come with each copy, so that a program without them is the program.
    let secrets = "\n[secrets]\nnames = [\"key\"]\n";
    let place = Place::new("app.py", &text, secrets);
    assert_eq!(place.generators().as_deref(), Some("the module random"));
}

/// A second start has no connections, and copies of the volumes.
#[test]
fn functions_that_act_outside_are_compared_and_do_not_act_twice() {
    let text = python("import random", "pass", "random.random()");
    let drawn = |text: &str, keys: &str| Place::new("app.py", text, keys).generators();
    let egress = "\n[egress]\nallow = [\"192.0.2.1:443\"]\n";
    assert_eq!(drawn(&text, egress).as_deref(), Some("the module random"));
    let freeze = "import random\nopen('/dev/thaw', 'w').write('freeze')";
    let keys = "\n[entry]\nfreeze = \"program\"\n";
    let program = python(freeze, "pass", "1");
    assert_eq!(drawn(&program, keys).as_deref(), Some("the module random"));
    let volume = "\n[[volumes]]\nname = \"data\"\npath = \"/data\"\nsize = \"8MiB\"\n";
    let writes = "import random\nopen('/data/starts', 'a').write('x')\n\
        started = len(open('/data/starts').read())";
    let place = Place::new("app.py", &python(writes, "pass", "started"), volume);
    assert_eq!(place.generators().as_deref(), Some("the module random"));
    let starts = place.path("home/volumes/data/files/starts");
    assert_eq!(fs::read_to_string(starts).expect("a file"), "x");
    // One that needs its connections is built, and the note says why nothing is compared.
    let connects = "import random, socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
        s.connect(('192.0.2.1', 443))";
    let place = Place::new("app.py", &python(connects, "pass", "1"), egress_of_udp());
    let notes = place.notes();
    assert!(
        notes.contains("were not compared") && notes.contains("without connections"),
        "{notes}"
    );
}

fn egress_of_udp() -> &'static str {
    "\n[egress]\nallow = [\"192.0.2.1:443/udp\"]\n"
}

#[test]
fn times_that_python_keeps_are_named() {
    let imports = "import datetime, time\nSTART = time.time()\nEND = START + 3600\nSMALL = 42\n\
        class Config:\n    loaded = datetime.datetime.now()\n    \
        def __init__(self): self.made = time.time_ns()\n\
        config = Config()\nSTATE = {'began': int(START)}\nDAY = datetime.date.today()\n\
        log = time.gmtime";
    let place = Place::new("app.py", &python(imports, "pass", "START"), "");
    let expected = "app.START, app.Config.loaded, app.config.made, app.STATE['began'], app.DAY";
    assert_eq!(place.times().as_deref(), Some(expected));
    let [one, other] = place.answers();
    assert_eq!(one, other, "the warning was right");
    // It was read, and nothing is left of it.
    let read = "import logging, time\nassert time.time() > 0\nlogging.getLogger()";
    assert_eq!(Place::new("app.py", &python(read, "pass", "1"), "").times(), None);
}

#[test]
fn times_that_node_keeps_are_named() {
    let text = "const START = Date.now();\nconst state = { began: new Date(), n: 1 };\n\
        class Config { static loaded = Math.floor(START / 1000); }\n\
        globalThis.first = Date.now();\nexports.second = new Date();\nlet last;\n\
        require('http').createServer((q, a) => {\n  last = Date.now();\n  \
        a.end(String(START) + state.n + Config.loaded);\n}).listen(8080);\n";
    let place = Place::new("app.js", text, "");
    let times = place.times().expect("a warning");
    let expected = [
        "globalThis.first",
        "exports.second in /app/app.js",
        "START in /app/app.js",
        "state in /app/app.js.began",
        "Config in /app/app.js.loaded",
    ];
    assert_eq!(times.split(", ").collect::<BTreeSet<_>>(), BTreeSet::from(expected));
    let [one, other] = place.answers();
    assert_eq!(one, other, "the warning was right");
    let read = format!("if (Date.now() < 0) process.exit(1);\n{NODE}");
    assert_eq!(Place::new("app.js", &read, "").times(), None);
}

/// Nothing of uvicorn is there but the object in which it keeps the header.
#[test]
fn a_date_that_uvicorn_keeps_is_named() {
    let state = |headers: &str| {
        let imports = format!(
            "import sys, types\nsys.modules['uvicorn.server'] = types.ModuleType('uvicorn.server')\n\
             class ServerState: pass\nServerState.__module__ = 'uvicorn.server'\n\
             state = ServerState()\nstate.default_headers = [{headers}]"
        );
        Place::new("app.py", &python(&imports, "pass", "1"), "").warnings(&[])
    };
    let warnings = state("(b'date', b'Thu, 01 Jan 1970 00:00:00 GMT'), (b'server', b'uvicorn')");
    let [only] = &warnings[..] else { panic!("{warnings:?}") };
    let text = only["text"].as_str().expect("text");
    assert!(text.starts_with("uvicorn keeps the `Date` of its answers "), "{text}");
    assert!(text.contains("`--no-date-header`"), "{text}");
    assert!(state("(b'server', b'uvicorn')").is_empty());
}

#[test]
fn a_date_that_node_keeps_after_training_is_named() {
    let train = "\n[[train.requests]]\npath = \"/\"\n";
    let server = |before: &str| {
        format!(
            "require('http').createServer((q, a) => {{ {before} a.end('1'); }}).listen(8080);\n"
        )
    };
    let warnings = Place::new("app.js", &server(""), train).warnings(&[]);
    let [only] = &warnings[..] else { panic!("{warnings:?}") };
    let text = only["text"].as_str().expect("text");
    assert!(text.starts_with("Node.js keeps the `Date` of its answers "), "{text}");
    assert!(text.contains("`response.sendDate = false`"), "{text}");
    let without = server("a.sendDate = false;");
    assert!(Place::new("app.js", &without, train).warnings(&[]).is_empty());
    assert!(Place::new("app.js", &server(""), "").warnings(&[]).is_empty());
}

#[test]
fn times_that_ruby_keeps_are_named() {
    let kept = "START = Time.now\nclass Config\n  @loaded = START.to_i\n  \
        MADE = Process.clock_gettime(Process::CLOCK_REALTIME, :nanosecond)\nend\n\
        $began = START.to_f\nstate = { began: Time.now, n: 1 }\n";
    let times = Place::new("app.rb", &RUBY.replace("SEED", kept), "").times().expect("a warning");
    let expected = ["START", "Config.@loaded", "Config::MADE", "$began", "state[:began]"];
    assert_eq!(times.split(", ").collect::<BTreeSet<_>>(), BTreeSet::from(expected));
    let read = RUBY.replace("SEED", "exit(1) if Time.now.to_i.zero?");
    assert_eq!(Place::new("app.rb", &read, "").times(), None);
}

/// A server in Java that answers with what an expression gives.
const JAVA: &str = "import com.sun.net.httpserver.HttpServer;\nimport java.net.InetSocketAddress;\n\
    import java.util.Random;\nimport java.util.concurrent.ThreadLocalRandom;\n\
    public class App {\n    FIELDS\n    public static void main(String[] a) throws Exception {\n        \
    BEFORE\n        HttpServer server = HttpServer.create(new InetSocketAddress(8080), 0);\n        \
    server.createContext(\"/\", exchange -> {\n            SEED\n            \
    byte[] body = (\"\" + DRAWN).getBytes();\n            \
    exchange.sendResponseHeaders(200, body.length);\n            \
    exchange.getResponseBody().write(body);\n            exchange.close();\n        });\n        \
    server.start();\n    }\n}\n";

fn java(fields: &str, before: &str, seed: &str, drawn: &str) -> String {
    let text = JAVA.replace("FIELDS", fields).replace("BEFORE", before);
    text.replace("SEED", seed).replace("DRAWN", drawn)
}

#[test]
fn javas_generators_are_named_and_the_helper_seeds_them() {
    let fields = "static final Random OWN = new Random(7);\n    \
        static final java.security.SecureRandom SAFE = new java.security.SecureRandom();\n    \
        static final Holder HOLDER = new Holder();\n    \
        static class Holder { final java.util.SplittableRandom held = new java.util.SplittableRandom(); }\n";
    let drawn =
        "OWN.nextLong() + \" \" + Math.random() + \" \" + ThreadLocalRandom.current().nextLong()";
    let before = "Math.random(); ThreadLocalRandom.current();";
    let place = Place::new("App.java", &java(fields, before, "", drawn), "");
    let expected =
        "Math.random, ThreadLocalRandom, Random in App.OWN, SplittableRandom in App.HOLDER.held";
    assert_eq!(place.generators().as_deref(), Some(expected));
    let [one, other] = place.answers();
    assert_eq!(one, other, "the warning was right");

    let drawn = "OWN.nextLong() + \" \" + Math.random() + \" \" + SAFE.nextLong()";
    let text = java(fields, "Math.random();", "Thaw.reseed(OWN);", drawn);
    let place = Place::new("App.java", &text, "");
    copy_helper(&place, "Thaw.java");
    let toml = place.path("f/thaw.toml");
    let text = fs::read_to_string(&toml).expect("a file");
    let opened = "\"java\", \"--add-opens\", \"java.base/java.lang=ALL-UNNAMED\", ";
    fs::write(&toml, text.replace("\"java\", \"-cp\"", &format!("{opened}\"-cp\"")))
        .expect("a file");
    place.warnings(&["--no-compare"]);
    let [one, other] = place.answers();
    for (one, other) in one.split(' ').zip(other.split(' ')) {
        assert_ne!(one, other);
    }
}

#[test]
fn java_is_told_of_no_generator_that_is_not_seeded() {
    let fields = "static final java.security.SecureRandom SAFE = new java.security.SecureRandom();";
    let place = Place::new("App.java", &java(fields, "", "", "Math.random()"), "");
    assert_eq!(place.generators(), None);
    let [one, other] = place.answers();
    assert_ne!(one, other, "it was right that there was no warning");
}

#[test]
fn times_that_java_keeps_are_named() {
    let fields = "static final long START = System.currentTimeMillis();\n    \
        static final long END = START + 3_600_000;\n    static final int SMALL = 42;\n    \
        static final State STATE = new State();\n    \
        static class State { final java.time.Instant began = java.time.Instant.now(); }\n";
    let place = Place::new("App.java", &java(fields, "", "", "START"), "");
    assert_eq!(place.times().as_deref(), Some("App.START, App.STATE.began"));
    let [one, other] = place.answers();
    assert_eq!(one, other, "the warning was right");
}

/// A server in Go that answers with what an expression gives.
const GO: &str = "package main\n\nimport (\n\t\"fmt\"\n\t\"net/http\"\nIMPORTS)\n\nvar _ = fmt.Sprint()\n\n\
    func answer(w http.ResponseWriter, _ *http.Request) {\n\tSEED\n\tfmt.Fprint(w, DRAWN)\n}\n\n\
    func main() {\n\thttp.ListenAndServe(\":8080\", http.HandlerFunc(answer))\n}\n";

/// A function of a program in Go, which is compiled on the host; in a sandbox, that takes minutes.
fn go(imports: &str, seed: &str, drawn: &str) -> Place {
    let text = GO.replace("IMPORTS", imports).replace("SEED", seed).replace("DRAWN", drawn);
    go_linked(&text, "-ldflags=-s -w")
}

/// A function of a program in Go that is linked with these options.
fn go_linked(text: &str, options: &str) -> Place {
    let place = Place::empty();
    let source = place.path("source");
    fs::create_dir_all(source.join("thaw")).expect("a directory");
    let helper = repository().join("sdk/entrypoint/thaw.go");
    fs::copy(helper, source.join("thaw/thaw.go")).expect("a copy");
    fs::write(source.join("main.go"), text).expect("a file");
    fs::write(source.join("go.mod"), "module f\n\ngo 1.19\n").expect("a file");
    let server = place.path("f/server");
    let mut build = std::process::Command::new("go");
    build.current_dir(&source).env("CGO_ENABLED", "0").args(["build", options, "-o"]);
    let outcome = run(build.arg(server).arg("."));
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let toml = "name = \"f\"\ncommand = [\"/app/server\"]\nport = 8080\nfiles = [\"server\"]\n\n\
        [runtime]\nkind = \"binary\"\n";
    fs::write(place.path("f/thaw.toml"), toml).expect("a file");
    place
}

#[test]
fn functions_of_go_that_draw_are_named_and_the_helper_gives_others() {
    let place = go("\t\"math/rand\"\n", "", "rand.Intn(1 << 60)");
    let warnings = place.warnings(&[]);
    let [only] = &warnings[..] else { panic!("{warnings:?}") };
    assert_eq!(only["kind"], "generator");
    assert_eq!(names(only, "", " draw"), "main.answer");
    let [one, other] = place.answers();
    assert_eq!(one, other, "the warning was right");

    let drawn = "rand.New(thaw.Source{}).Int63(), \" \", rand.Int63()";
    let place = go("\t\"f/thaw\"\n\t\"math/rand\"\n", "thaw.Reseed()", drawn);
    place.warnings(&[]);
    let [one, other] = place.answers();
    for (one, other) in one.split(' ').zip(other.split(' ')) {
        assert_ne!(one, other);
    }
    let place =
        go("\t\"f/thaw\"\n\t\"math/rand\"\n", "thaw.Reseed()", "rand.New(thaw.Source{}).Int63()");
    assert!(place.warnings(&[]).is_empty());
}

#[test]
fn times_that_go_keeps_are_named() {
    let program = |variables: &str, answer: &str| {
        let text = format!(
            "package main\n\nimport (\n\t\"fmt\"\n\t\"net/http\"\n\t\"time\"\n)\n\n{variables}\n\n\
             func main() {{\n\thttp.ListenAndServe(\":8080\", http.HandlerFunc(answer))\n}}\n\n\
             func answer(w http.ResponseWriter, _ *http.Request) {{\n\tfmt.Fprint(w, {answer})\n}}\n"
        );
        go_linked(&text, "-ldflags=-w")
    };
    let variables = "var START = time.Now()\nvar millis = time.Now().UnixMilli()\n\
        var utc = time.Now().UTC().Round(0)\nvar later = START.Add(time.Hour)\nvar small int64 = 42";
    let place = program(variables, "START.UnixNano(), millis, utc, later, small");
    assert_eq!(place.times().as_deref(), Some("main.START, main.millis, main.utc"));
    let [one, other] = place.answers();
    assert_eq!(one, other, "the warning was right");
    assert_eq!(program("var began time.Time", "time.Now(), began").times(), None);
}

/// A shop with a database and a directory for uploads, which is trained.
const SHOP: &str = "import http.server, os, sqlite3\n\
    os.makedirs('/data/uploads', exist_ok=True)\n\
    open('/tmp/passing', 'w').write('x')\n\
    os.makedirs('/app/__pycache__', exist_ok=True)\n\
    open('/app/__pycache__/x.pyc', 'w').write('x')\n\
    open('/app/gone', 'w').write('x'); os.remove('/app/gone')\n\
    db = sqlite3.connect('/data/shop.db')\n\
    db.execute('CREATE TABLE IF NOT EXISTS t (a)'); db.commit()\n\
    class Handler(http.server.BaseHTTPRequestHandler):\n    \
    def do_GET(self):\n        \
    open('/app/visits.log', 'a').write('visit\\n')\n        \
    self.send_response(200)\n        self.end_headers()\n    def log_message(self, *_): pass\n\
    http.server.HTTPServer(('', 8080), Handler).serve_forever()\n";

#[test]
fn files_that_are_written_outside_of_volumes_are_named() {
    let train = "\n[[train.requests]]\npath = \"/\"\n";
    let warnings = Place::new("app.py", SHOP, train).warnings(&["--no-compare"]);
    let [only] = &warnings[..] else { panic!("{warnings:?}") };
    assert_eq!(only["kind"], "file");
    let text = only["text"].as_str().expect("text");
    let paths = "a new empty directory outside of volumes (/app/visits.log, /data/shop.db, /data/uploads/): ";
    assert!(text.contains("wrote 2 files and ") && text.contains(paths), "{text}");
    assert!(text.contains("`[[volumes]]`"), "{text}");
    // With its data in a volume, it is told of the rest.
    let volume = "\n[[volumes]]\nname = \"data\"\npath = \"/data\"\nsize = \"8MiB\"\n";
    let place = Place::new("app.py", SHOP, &[train, volume].concat());
    let warnings = place.warnings(&["--no-compare"]);
    let text = warnings[0]["text"].as_str().expect("text");
    assert!(text.contains(" wrote a file outside of volumes (/app/visits.log): "), "{text}");
    // And of nothing if that is not trained.
    assert!(Place::new("app.py", SHOP, volume).warnings(&["--no-compare"]).is_empty());
}

/// There is no program of which anything could be said.
#[test]
fn nothing_is_said_of_a_sandbox_without_a_program() {
    let place = Place::empty();
    let text = "name = \"f\"\nisolation = \"instance\"\n[entry]\nkind = \"sandbox\"\n[runtime]\nkind = \"python3\"\n\
                interpreter = \"/usr/bin/python3\"\n";
    fs::write(place.path("f/thaw.toml"), text).expect("a file");
    let said = place.notes();
    assert!(!said.contains("compared") && !said.contains("note: "), "{said}");
}

#[test]
fn erlang_that_counts_by_the_monotonic_clock_is_named() {
    if !std::path::Path::new("/usr/lib/erlang/bin/erl").exists() {
        thaw_e2e::skip("there is no Erlang");
        return;
    }
    let listens = "{ok, S} = gen_tcp:listen(8080, [{reuseaddr, true}]), (fun F() -> {ok, C} = gen_tcp:accept(S), \
                   gen_tcp:close(C), F() end)().";
    let toml = |options: &str| {
        format!(
            "name = \"f\"\nport = 8080\ncommand = [\"/usr/lib/erlang/bin/erl\", {options}\"-noshell\", \
             \"-eval\", {listens:?}]\n[runtime]\nkind = \"binary\"\ninclude = [\"/usr/lib/erlang\"]\n\
             programs = [\"sh\", \"sed\", \"dirname\", \"basename\", \"readlink\"]\n\
             [env]\nROOTDIR = \"/usr/lib/erlang\"\n[limits]\nmemory = \"512MiB\"\n"
        )
    };
    let place = Place::empty();
    let warned = |options: &str| {
        fs::write(place.path("f/thaw.toml"), toml(options)).expect("a file");
        place.warnings(&[])
    };
    let warnings = warned("");
    let time = warnings.iter().find(|warning| warning["kind"] == "time").expect("a warning");
    assert!(time["text"].as_str().expect("text").contains("start it with `+c false`"), "{time}");
    let corrected = warned("\"+c\", \"false\", ");
    assert!(corrected.iter().all(|warning| warning["kind"] != "time"), "{corrected:?}");
}
