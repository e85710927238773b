//! The example functions of every runtime, frozen and thawed, answer as they do
//! when they are not. What takes long to build is ignored by `make test` and run
//! by `make runtimes`.

use serde_json::json;
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Raw, Response, built_home, get, post, repository, run,
};
use tungstenite::Message;

/// A daemon that serves one example, built into a home of its own.
fn serve(example: &'static str) -> Daemon {
    let label = format!("functions-{}", example.replace('/', "-"));
    let home = built_home(&label, &[Function::Example(example)]);
    Daemon::start(&home, &DaemonOptions::default())
}

#[track_caller]
fn text(response: &Response) -> String {
    assert_eq!(response.status, 200, "{}", response.text());
    response.text()
}

/// A hello example: each request is served by a copy of its own.
#[track_caller]
fn greets(example: &'static str, greeting: &str) {
    let daemon = serve(example);
    for name in ["Ada", "Grace", "Edsger"] {
        let response = get(daemon.gateway(), example, &format!("/?name={name}"));
        let expected = greeting.replace("NAME", name);
        let answer = text(&response);
        assert!(answer.starts_with(&expected), "{answer:?} for {expected:?}");
        // Copies have no memory of each other's requests, only of the training.
        if answer.contains("request ") {
            let trained = match example {
                "hello-java" => 500,
                "hello-node" => 200,
                "hello-ruby" => 100,
                _ => 0,
            };
            let first = trained + 1;
            assert!(answer.ends_with(&format!("request {first}.\n")), "{answer:?}");
        }
    }
}

/// A program that may have one process keeps its threads and is told, where it tries to
/// make another process, that there are too many.
#[test]
fn one_process_has_threads() {
    let keys = "limits = { processes = 1 }";
    let function = Function::PythonVariant { program: "alone", name: "alone", keys };
    let home = built_home("functions-alone", &[function]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    for _ in 0..3 {
        let answer = text(&get(daemon.gateway(), "alone", "/"));
        assert_eq!(answer, "fork EAGAIN, spawn EAGAIN, threads 4\n");
    }
}

#[test]
fn hello_node() {
    greets("hello-node", "Hello from Node");
}

#[test]
fn hello_java() {
    greets("hello-java", "Hello from Java");
}

#[test]
fn hello_go() {
    greets("hello-go", "Hello from Go! Nice to meet NAME");
}

#[test]
fn hello_ruby() {
    greets("hello-ruby", "Hello from Ruby! Nice to meet NAME");
}

#[test]
fn hello_php() {
    greets("hello-php", "Hello from PHP");
}

#[test]
fn words_perl() {
    let daemon = serve("words-perl");
    for _ in 0..3 {
        let response = post(daemon.gateway(), "words-perl", "/", b"the fox and the dog");
        assert_eq!(text(&response), "2 the\n1 and\n1 dog\n1 fox\n");
    }
}

/// Memory for files comes from blocks of which an image holds the used pages.
#[test]
fn copies_write_files_beside_those_of_the_image() {
    let home = built_home("functions-files", &[Function::Python("files")]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    for _ in 0..3 {
        let response = get(daemon.gateway(), "files", "/");
        assert_eq!(text(&response), "before 5000, after 9000000, rewritten True\n");
    }
}

#[test]
#[ignore = "make runtimes"]
fn go_computes_on_several_processors() {
    let daemon = serve("hello-go");
    for _ in 0..5 {
        assert_eq!(text(&get(daemon.gateway(), "hello-go", "/sum")), "199999990000000\n");
    }
}

#[test]
#[ignore = "make runtimes"]
fn hello_nginx() {
    let daemon = serve("hello-nginx");
    for _ in 0..5 {
        let response = get(daemon.gateway(), "hello-nginx", "/");
        assert_eq!(text(&response), "<h1>Hello from nginx!</h1>\n");
        assert!(text(&get(daemon.gateway(), "hello-nginx", "/time")).contains("worker"));
    }
}

#[test]
#[ignore = "make runtimes"]
fn flask() {
    let daemon = serve("flask-python");
    for _ in 0..3 {
        let response = get(daemon.gateway(), "flask-python", "/?name=Ada");
        assert_eq!(text(&response), "<h1>Hello from Flask, Ada!</h1>");
        let body = b"the quick fox and the slow fox and the end";
        let words = post(daemon.gateway(), "flask-python", "/words", body).json();
        assert_eq!(words, json!({"total": 10, "top": [["the", 3], ["fox", 2], ["and", 2]]}));
    }
}

#[test]
#[ignore = "make runtimes"]
fn grpc_example() {
    let daemon = serve("grpc-python");
    let example = repository().join("examples/grpc-python");
    for _ in 0..2 {
        let mut client = Command::new("/usr/bin/python3");
        client.env("PYTHONPATH", example.join("build/site")).arg(example.join("client.py"));
        let printed = run(client.arg(daemon.gateway().to_string())).success();
        assert_eq!(printed, "Hello, Ada!\n0 1 2\nHello, Ada! Hello, Grace!\n");
    }
}

#[test]
#[ignore = "make runtimes"]
fn fastapi() {
    let daemon = serve("fastapi-python");
    for _ in 0..3 {
        let response = get(daemon.gateway(), "fastapi-python", "/?name=Ada");
        assert_eq!(response.json(), json!({"greeting": "Hello from FastAPI, Ada!"}));
        let numbers =
            post_json(&daemon, "fastapi-python", "/statistics", r#"{"values": [1, 2, 6]}"#);
        assert_eq!(numbers.json()["median"], json!(2.0));
        let wrong = post_json(&daemon, "fastapi-python", "/statistics", r#"{"values": ["x"]}"#);
        assert_eq!(wrong.status, 422, "{}", wrong.text());
    }
}

/// Posts JSON and says so.
fn post_json(daemon: &Daemon, function: &str, path: &str, body: &str) -> Response {
    let mut connection = Raw::connect(daemon.gateway());
    connection.send(format!(
        "POST {path} HTTP/1.1\r\nHost: {function}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    ));
    connection.response().expect("an answer")
}

#[test]
#[ignore = "make runtimes"]
fn express() {
    let daemon = serve("express-node");
    for _ in 0..3 {
        let response = get(daemon.gateway(), "express-node", "/?name=Ada");
        assert_eq!(text(&response), "Hello from Express, Ada!\n");
        let table = post(daemon.gateway(), "express-node", "/tables", b"a,b\n1,2\n3,4").json();
        assert_eq!(table["sums"], json!({"a": 4, "b": 6}));
        assert_eq!(table["kept"], json!(true));
        let primes = get(daemon.gateway(), "express-node", "/primes/1000000").json();
        assert_eq!(primes["count"], json!(78498));
        echoes_over_a_websocket(&daemon, "express-node");
    }
}

/// Texts of all three sizes that a frame's header knows come back.
#[track_caller]
fn echoes_over_a_websocket(daemon: &Daemon, function: &str) {
    let stream = TcpStream::connect(daemon.gateway()).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    let address = format!("ws://{function}/echo");
    let (mut socket, _) = tungstenite::client(address, stream).expect("a WebSocket");
    for text in ["hello".to_owned(), "x".repeat(1000), "y".repeat(65_000)] {
        socket.send(Message::text(text.as_str())).expect("a message is sent");
        let answer = socket.read().expect("an answer");
        assert_eq!(answer, Message::text(format!("echo: {text}")));
    }
    socket.close(None).expect("a close is sent");
    assert!(matches!(socket.read(), Ok(Message::Close(_))));
}

/// Many processes, thousands of mappings; each answer from a browser of its own.
#[test]
#[ignore = "make runtimes"]
fn browser() {
    let daemon = serve("browser-node");
    for number in 1..4 {
        let page = format!("<p id=a>{number}<script>document.write(6 * 7)</script></p>");
        let shown = post(daemon.gateway(), "browser-node", "/", page.as_bytes());
        assert_eq!(text(&shown), format!("{number}42\n"));
        let picture = post(daemon.gateway(), "browser-node", "/picture", page.as_bytes());
        assert_eq!((picture.status, &picture.body[..8]), (200, &b"\x89PNG\r\n\x1a\n"[..]));
    }
    let printed = get(daemon.gateway(), "browser-node", "/pdf");
    assert_eq!((printed.status, &printed.body[..5]), (200, &b"%PDF-"[..]));
}

#[test]
#[ignore = "make runtimes"]
fn sinatra() {
    let daemon = serve("sinatra-ruby");
    for _ in 0..3 {
        let response = get(daemon.gateway(), "sinatra-ruby", "/?name=Ada");
        assert_eq!(text(&response), "Hello from Sinatra, Ada!\n");
        let words = post(daemon.gateway(), "sinatra-ruby", "/texts", b"some words to count").json();
        assert_eq!(words["words"], json!(4));
    }
}

#[test]
#[ignore = "make runtimes"]
fn spring() {
    let daemon = serve("spring-java");
    for _ in 0..3 {
        let response = get(daemon.gateway(), "spring-java", "/?name=Ada");
        assert_eq!(response.json(), json!({"greeting": "Hello from Spring, Ada!"}));
    }
    let words = post(daemon.gateway(), "spring-java", "/words", b"b a b").json();
    assert_eq!(words, json!([{"word": "b", "times": 2}, {"word": "a", "times": 1}]));
}

#[test]
#[ignore = "make runtimes"]
fn javalin() {
    let daemon = serve("javalin-java");
    for _ in 0..3 {
        let response = get(daemon.gateway(), "javalin-java", "/?name=Ada");
        assert_eq!(response.json(), json!({"greeting": "Hello from Javalin, Ada!"}));
        let numbers = post_json(&daemon, "javalin-java", "/statistics", "[1, 2, 6]").json();
        assert_eq!(numbers, json!({"count": 3, "minimum": 1.0, "maximum": 6.0, "mean": 3.0}));
        echoes_over_a_websocket(&daemon, "javalin-java");
        // An instance keeps what it wrote.
        let mut connection = Raw::connect(daemon.gateway());
        let note = "PUT /notes/a HTTP/1.1\r\nHost: javalin-java\r\nContent-Length: 4\r\n\r\nnote";
        assert_eq!(connection.send(note).response().expect("an answer").status, 201);
        let read = "GET /notes/a HTTP/1.1\r\nHost: javalin-java\r\n\r\n";
        assert_eq!(text(&connection.send(read).response().expect("an answer")), "note");
    }
}

/// Debian's server and its own clients, through the function's own address.
#[test]
#[ignore = "make runtimes"]
fn redis() {
    let _daemon = serve("redis");
    let client = |program: &str, arguments: &[&str]| {
        let outcome = run(Command::new(program).args(["-p", "6380"]).args(arguments));
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        outcome.stdout
    };
    assert_eq!(client("redis-cli", &["set", "greeting", "hello"]), "OK\n");
    let rates = client("redis-benchmark", &["-t", "set,get,lpush", "-n", "5000", "--csv"]);
    assert_eq!(rates.lines().count(), 4, "{rates}");
    assert_eq!(client("redis-cli", &["get", "greeting"]), "hello\n");
}

/// Every connection has a cluster of its own.
#[test]
#[ignore = "make runtimes"]
fn postgresql() {
    let _daemon = serve("postgresql");
    for _ in 0..3 {
        let mut psql = Command::new("psql");
        psql.args(["-h", "127.0.0.1", "-p", "5433", "-U", "postgres", "-AtXq"]);
        psql.args(["-c", "create table item(a int)"]);
        psql.args(["-c", "insert into item select generate_series(1, 1000)"]);
        let outcome = run(psql.args(["-c", "select count(*), sum(a) from item"]));
        assert_eq!(outcome.success(), "1000|500500\n");
    }
}

/// The workloads whose answers do not depend on the packages' versions.
#[test]
#[ignore = "make runtimes"]
fn functionbench() {
    let linpack = json!({"unknowns": 200, "solved": true});
    let aes = "e00309caac7a5d2ce22a8cb062a8fc408dd9072f68ac933ac3fcdd93a641aa42";
    for (example, function, query, result) in [
        ("functionbench/float", "functionbench-float", "?n=1000", json!(21066.795808)),
        ("functionbench/matmul", "functionbench-matmul", "?n=10", json!(24.11868)),
        ("functionbench/linpack", "functionbench-linpack", "?n=200", linpack),
        ("functionbench/pyaes", "functionbench-pyaes", "", json!(aes)),
        ("functionbench/json", "functionbench-json", "", json!({"bytes": 259800, "items": 2000})),
        ("functionbench/model", "functionbench-model", "", json!({"reviews": 50, "right": 50})),
    ] {
        let daemon = serve(example);
        for _ in 0..2 {
            let answer = get(daemon.gateway(), function, &format!("/{query}")).json();
            assert_eq!(answer["result"], result, "{function}");
        }
    }
    for (example, function, key, value) in [
        ("functionbench/chameleon", "functionbench-chameleon", "bytes", json!(36590)),
        ("functionbench/image", "functionbench-image", "small", json!([128, 96])),
        ("functionbench/video", "functionbench-video", "frames", json!(60)),
    ] {
        let daemon = serve(example);
        let answer = get(daemon.gateway(), function, "/").json();
        let mut found = answer["result"][key].clone();
        // The last number is the size of what was encoded.
        if let Some(numbers) = found.as_array_mut() {
            numbers.truncate(2);
        }
        assert_eq!(found, value, "{function}");
    }
}
