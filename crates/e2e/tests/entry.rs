//! Entry points: what freezes a program, and how requests reach its copies.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::process::Stdio;
use std::time::Duration;
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Language, built_home, free_port, get, post, wait_until,
};

/// A daemon that serves one function of `tests/guest/functions`.
fn serve(name: &'static str) -> Daemon {
    let home = built_home(&format!("entry-{name}"), &[Function::Directory(name)]);
    Daemon::start(&home, &DaemonOptions::default())
}

/// The same for a function with an address of its own.
fn serve_at_own_port(name: &'static str) -> (Daemon, SocketAddr) {
    let port = free_port();
    let home = built_home(&format!("entry-{name}"), &[Function::Listening(name, port)]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    (daemon, (Ipv4Addr::LOCALHOST, port).into())
}

#[test]
fn training_leaves_what_was_learnt_and_no_connection() {
    let daemon = serve("trained");
    for _ in 0..2 {
        let answer = get(daemon.gateway(), "trained", "/").text();
        // Besides the standard streams: the listener, this connection, the directory.
        let expected = "request 7, open 0,1,2,3,4,5, read ['a body', 'a file']\n";
        assert_eq!(answer, expected);
    }
}

#[test]
fn a_wrong_answer_ends_the_training_and_the_build() {
    let work = tempfile::tempdir().expect("a temporary directory");
    let source = thaw_e2e::repository().join("tests/guest/functions/trained");
    for file in ["app.py", "body.txt", "thaw.toml"] {
        fs::copy(source.join(file), work.path().join(file)).expect("a copy");
    }
    let toml = fs::read_to_string(source.join("thaw.toml")).expect("thaw.toml");
    let build = |text: String| {
        fs::write(work.path().join("thaw.toml"), text).expect("thaw.toml");
        let mut thaw = thaw_e2e::thaw();
        thaw.env("THAW_HOME", work.path().join("home")).arg("build").arg(work.path());
        let outcome = thaw_e2e::run(&mut thaw);
        assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
        outcome.stderr
    };
    let said = build(toml.replace("expect = 404", "expect = 200"));
    let reason = "request 2 of [train] (GET /404) was answered with 404, not 200: \"request 4,";
    assert!(said.contains(reason), "{said}");
    let said = build(toml.replace("body.txt", "missing.txt"));
    assert!(said.contains("missing.txt") && said.contains("correct `file` in [train]"), "{said}");
}

#[test]
fn a_signal_freezes_where_it_is_sent() {
    let daemon = serve("signalled");
    for _ in 0..2 {
        let answer = get(daemon.gateway(), "signalled", "/").text();
        assert_eq!(answer, "copy 0 has become copy 1\n");
    }
}

#[test]
fn an_operator_sends_the_signal_to_the_build() {
    let work = tempfile::tempdir().expect("a temporary directory");
    let toml = "name = \"waits\"\ncommand = [\"python3\", \"app.py\"]\nport = 8080\n\
                files = [\"app.py\"]\nentry = { freeze = { signal = \"SIGUSR1\" } }\n\
                [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n";
    let source = thaw_e2e::repository().join("tests/guest/functions/warmed/app.py");
    fs::copy(source, work.path().join("app.py")).expect("a copy");
    fs::write(work.path().join("thaw.toml"), toml).expect("thaw.toml");
    let mut thaw = thaw_e2e::thaw();
    thaw.env("THAW_HOME", work.path().join("home")).arg("build").arg(work.path());
    let mut build = thaw.stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("thaw");
    let mut said = BufReader::new(build.stderr.take().expect("a pipe")).lines();
    let note = said.find_map(|line| line.ok().filter(|line| line.contains("kill -USR1")));
    assert!(note.is_some_and(|note| note.ends_with(&build.id().to_string())));
    // That it waits for clients is no reason to freeze it.
    std::thread::sleep(Duration::from_secs(1));
    assert!(build.try_wait().expect("our child").is_none());
    let pid = rustix::process::Pid::from_child(&build);
    rustix::process::kill_process(pid, rustix::process::Signal::USR1).expect("it runs");
    let rest: Vec<_> = said.map_while(Result::ok).collect();
    let status = build.wait().expect("our child");
    assert!(status.success(), "{rest:?}");
}

#[test]
fn a_program_reads_its_request_from_standard_input() {
    let daemon = serve("words");
    for _ in 0..2 {
        let response = post(daemon.gateway(), "words", "/", b"one two three");
        assert_eq!(response.status, 200, "{}", response.text());
        assert_eq!(response.text(), "3 words in 13 characters, request 1\n");
        assert_eq!(response.header("thaw-exit-code"), Some("0"));
    }
    let nothing = get(daemon.gateway(), "words", "/");
    assert_eq!(nothing.text(), "0 words in 0 characters, request 1\n");
    let failed = post(daemon.gateway(), "words", "/", b"exit 3");
    assert_eq!((failed.status, failed.header("thaw-exit-code")), (500, Some("3")));
    assert_eq!(failed.text(), "2 words in 6 characters, request 1\n");
    let aborted = post(daemon.gateway(), "words", "/", b"abort");
    assert_eq!((aborted.status, aborted.header("thaw-signal")), (500, Some("6")));
    let big = post(daemon.gateway(), "words", "/", b"big");
    assert!(big.text().ends_with("xxx") && big.text().len() > 1_000_000);
    wait_until("its errors are in the log", || {
        daemon.admin("/functions/words/logs").text().contains("to the log")
    });
}

#[test]
fn invoke_gives_data_and_returns_output_and_exit_code() {
    let daemon = serve("words");
    let invoke = |data: &str| {
        let mut thaw = thaw_e2e::thaw();
        thaw.env("THAW_HOME", daemon.home()).args(["invoke", "words", "--data", data]);
        thaw_e2e::run(&mut thaw)
    };
    let outcome = invoke("a b");
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert_eq!(outcome.stdout, "2 words in 3 characters, request 1\n");
    assert_eq!(invoke("exit 7").code, Some(7));
    let mut piped = thaw_e2e::thaw();
    piped.env("THAW_HOME", daemon.home()).args(["invoke", "words"]);
    let outcome = thaw_e2e::run_with_input(&mut piped, b"a b c");
    assert!(outcome.stdout.starts_with("3 words in 5 characters"), "{}", outcome.stdout);
}

#[test]
fn standard_input_can_be_polled_and_is_long() {
    let daemon = serve("reader");
    let body = b"some text, ".repeat(100_000);
    for _ in 0..2 {
        let response = post(daemon.gateway(), "reader", "/", &body);
        assert_eq!(response.status, 200, "{}", response.text());
        assert!(response.text().as_bytes() == body.to_ascii_uppercase());
    }
}

/// Sends a datagram and returns the answer; panics if none comes.
#[track_caller]
fn ask(socket: &UdpSocket, text: &str) -> String {
    socket.send(text.as_bytes()).expect("a datagram is sent");
    let mut answer = vec![0; 65536];
    let count = socket.recv(&mut answer).expect("an answer");
    String::from_utf8_lossy(&answer[..count]).into_owned()
}

#[test]
fn each_client_that_sends_datagrams_has_an_instance() {
    let (daemon, address) = serve_at_own_port("datagrams");
    let client = || {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        socket.connect(address).expect("the function's address");
        let port = socket.local_addr().expect("an address").port();
        (socket, port)
    };
    let ((first, a), (second, b)) = (client(), client());
    assert_eq!(ask(&first, "one"), format!("one: datagram 1 of 1 from port {a}"));
    assert_eq!(ask(&second, "two"), format!("two: datagram 1 of 1 from port {b}"));
    assert_eq!(ask(&first, "three"), format!("three: datagram 2 of 1 from port {a}"));
    assert_eq!(ask(&first, "size").len(), 60000);
    assert_eq!(ask(&first, ""), format!(": datagram 4 of 1 from port {a}"));
    assert_eq!(daemon.instances("datagrams").len(), 2);
    // Who has been silent for `keep_alive` has lost its instance.
    wait_until("both instances have ended", || daemon.instances("datagrams").is_empty());
    assert_eq!(ask(&first, "again"), format!("again: datagram 1 of 1 from port {a}"));
    // And one that has ended by itself is replaced.
    first.send(b"quit").expect("a datagram is sent");
    wait_until("the instance has ended", || daemon.instances("datagrams").is_empty());
    assert_eq!(ask(&first, "anew"), format!("anew: datagram 1 of 1 from port {a}"));
    let refused = get(daemon.gateway(), "datagrams", "/");
    assert_eq!((refused.status, refused.json()["error"].clone()), (421, "misdirected".into()));
}

#[test]
fn a_server_of_another_protocol_may_speak_first() {
    let (_daemon, address) = serve_at_own_port("greeter");
    for name in ["Ada", "Grace"] {
        let mut client = TcpStream::connect(address).expect("a connection");
        client.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        let mut lines = BufReader::new(client.try_clone().expect("a descriptor")).lines();
        assert_eq!(lines.next().expect("a line").expect("a line"), "who are you?");
        client.write_all(format!("{name}\n").as_bytes()).expect("an answer");
        assert_eq!(lines.next().expect("a line").expect("a line"), format!("hello {name}"));
        assert!(lines.next().is_none());
    }
}

/// A socket with `IPV6_V6ONLY` has no clients of IPv4, unless the program has no other one.
#[test]
fn a_client_reaches_the_socket_of_its_family() {
    for (name, keys, expected) in [
        ("both-families", "env = { FAMILIES = \"IPv4 IPv6\" }", "IPv4 from 127.0.0.1\n"),
        ("one-family", "env = { FAMILIES = \"IPv6\" }", "IPv6 from ::ffff:127.0.0.1\n"),
    ] {
        let function = Function::PythonVariant { program: "both", name, keys };
        let home = built_home(&format!("entry-{name}"), &[function]);
        let daemon = Daemon::start(&home, &DaemonOptions::default());
        for _ in 0..2 {
            assert_eq!(get(daemon.gateway(), name, "/").text(), expected);
        }
    }
}

#[test]
fn an_operator_freezes_a_live_instance() {
    let daemon = serve("warmed");
    let freeze = |arguments: &[&str]| {
        let mut thaw = thaw_e2e::thaw();
        thaw.env("THAW_HOME", daemon.home()).args(["freeze", "warmed"]).args(arguments);
        thaw_e2e::run(&mut thaw)
    };
    let early = freeze(&[]);
    assert_eq!(early.code, Some(1));
    assert!(early.stderr.contains("`warmed` has no idle instance to freeze"), "{}", early.stderr);
    // The first generation learns, the second goes on from there, and so does the third.
    let mut expected = 0;
    for generation in 1..4 {
        for _ in 0..3 {
            expected += 1;
            let answer = get(daemon.gateway(), "warmed", "/").text();
            assert_eq!(answer, format!("request {expected} of generation {generation}\n"));
        }
        wait_until("the instance is idle", || {
            daemon.instances("warmed").iter().any(|instance| instance["state"] == "idle")
        });
        let done = freeze(&["--json"]);
        assert_eq!(done.code, Some(0), "{}", done.stderr);
        let done: serde_json::Value = serde_json::from_str(&done.stdout).expect("JSON");
        let detail = daemon.admin("/functions/warmed").json();
        assert_eq!(detail["image"], done["image"]);
    }
    let wrong = freeze(&["--instance", "99999"]);
    assert!(wrong.stderr.contains("no idle instance 99999"), "{}", wrong.stderr);
}

/// The helper of each language says which copy it is in, and calls the hooks.
#[track_caller]
fn helper(language: Language) {
    let home = built_home(&format!("entry-{}", language.name), &[Function::Sdk(language)]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    for _ in 0..2 {
        let answer = get(daemon.gateway(), language.name, "/").text();
        let expected = "copy 1: closed first, closed last, opened in 1, opened last\n";
        assert_eq!(answer, expected);
    }
}

#[test]
fn helper_for_c() {
    helper(Language {
        name: "sdk-c",
        program: "app.c",
        helper: "thaw.h",
        place: "thaw.h",
        keys: "command = [\"/app/app\"]\nfiles = [\"app\"]\n\
               build = { command = [\"cc\", \"-Wall\", \"-Wextra\", \"-Werror\", \"-o\", \"app\", \"app.c\"] }\n\
               [runtime]\nkind = \"binary\"",
    });
}

#[test]
fn helper_for_python() {
    helper(Language {
        name: "sdk-python",
        program: "app.py",
        helper: "thaw.py",
        place: "thaw.py",
        keys: "command = [\"python3\", \"app.py\"]\n\
               [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"",
    });
}

#[test]
#[ignore = "make runtimes"]
fn helper_for_node() {
    helper(Language {
        name: "sdk-node",
        program: "app.js",
        helper: "thaw.js",
        place: "thaw.js",
        keys: "command = [\"node\", \"app.js\"]\n[runtime]\nkind = \"node\"",
    });
}

#[test]
#[ignore = "make runtimes"]
fn helper_for_java() {
    helper(Language {
        name: "sdk-java",
        program: "App.java",
        helper: "Thaw.java",
        place: "Thaw.java",
        keys: "command = [\"java\", \"-cp\", \"/app/classes\", \"App\"]\nfiles = [\"classes\"]\n\
               build = { command = [\"javac\", \"-d\", \"classes\", \"App.java\", \"Thaw.java\"] }\n\
               limits = { memory = \"512MiB\" }\n[runtime]\nkind = \"java\"",
    });
}

#[test]
#[ignore = "make runtimes"]
fn helper_for_go() {
    let build = "rm -f go.mod && go mod init app && CGO_ENABLED=0 go build -o server .";
    let keys = format!(
        "command = [\"/app/server\"]\nfiles = [\"server\"]\n\
         build = {{ command = [\"sh\", \"-c\", \"PATH=$PATH:/usr/local/go/bin; {build}\"] }}\n\
         [runtime]\nkind = \"binary\""
    );
    helper(Language {
        name: "sdk-go",
        program: "app.go",
        helper: "thaw.go",
        place: "thaw/thaw.go",
        keys: keys.leak(),
    });
}

#[test]
#[ignore = "make runtimes"]
fn helper_for_ruby() {
    helper(Language {
        name: "sdk-ruby",
        program: "app.rb",
        helper: "thaw.rb",
        place: "thaw.rb",
        keys: "command = [\"ruby\", \"app.rb\"]\n[runtime]\nkind = \"ruby\"",
    });
}
