//! `thaw key`: keys of E2B's API with roles and rates, and a daemon that sees each change at once.

use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use thaw_e2e::{Daemon, DaemonOptions, Outcome, built_home, run, thaw};

const BOX: &str = "name = \"box\"\nisolation = \"instance\"\n[entry]\nkind = \"sandbox\"\n\
                   [runtime]\nkind = \"python3\"\nprograms = [\"bash\"]\n";

fn key(home: &Path, arguments: &[&str]) -> Outcome {
    run(thaw().arg("key").args(arguments).env("THAW_HOME", home))
}

fn made(home: &Path, arguments: &[&str]) -> String {
    let printed = key(home, &[&["create"], arguments].concat()).success();
    printed.trim().to_owned()
}

struct Api(String);

impl Api {
    fn of(daemon: &Daemon) -> Self {
        let announced = fs::read(daemon.home().join("daemon.json")).unwrap();
        let announced: Value = serde_json::from_slice(&announced).unwrap();
        Self(announced["e2b"].as_str().expect("an address").to_owned())
    }

    /// Status, head and JSON of an answer.
    fn ask(&self, key: &str, line: &str, body: &Value) -> (u16, String, Value) {
        let body = body.to_string();
        let mut stream = TcpStream::connect(&self.0).unwrap();
        let request = format!(
            "{line} HTTP/1.1\r\nHost: api\r\nX-API-Key: {key}\r\nConnection: close\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, head.to_lowercase(), serde_json::from_str(body).unwrap_or_default())
    }

    fn status(&self, key: &str, line: &str) -> u16 {
        self.ask(key, line, &json!({"templateID": "box"})).0
    }
}

#[test]
fn keys_have_roles_and_rates_and_are_revoked_at_once() {
    let home = built_home("keys", &[]);
    let directory = home.with_extension("box");
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("thaw.toml"), BOX).unwrap();
    run(thaw().arg("build").arg(&directory).env("THAW_HOME", &home)).success();
    // No e2b.toml: keys are all that has to be said.
    let user = made(&home, &["team"]);
    let looker = made(&home, &["team", "--role", "read-only"]);
    let options = DaemonOptions { arguments: ["--e2b", "127.0.0.1:0"].map(str::to_owned).into() };
    let daemon = Daemon::start(&home, &options);
    let api = Api::of(&daemon);

    let (status, _, sandbox) = api.ask(&user, "POST /v2/sandboxes", &json!({"templateID": "box"}));
    assert_eq!(status, 201, "{sandbox}");
    let id = sandbox["sandboxID"].as_str().unwrap();
    let (status, _, shown) = api.ask(&looker, &format!("GET /sandboxes/{id}"), &Value::Null);
    assert_eq!((status, shown.get("envdAccessToken")), (200, None), "{shown}");
    assert_eq!(api.status(&looker, "POST /v2/sandboxes"), 403);
    assert_eq!(api.status(&looker, &format!("DELETE /sandboxes/{id}")), 403);

    // Keys that are made while it serves count at once.
    let other = made(&home, &["other", "--rate", "2 per 1h", "--sandboxes", "0"]);
    let admin = made(&home, &["boss", "--role", "admin"]);
    assert_eq!(api.status(&other, &format!("GET /sandboxes/{id}")), 404);
    assert_eq!(api.status(&other, "POST /v2/sandboxes"), 429);
    let (status, head, _) = api.ask(&other, "GET /v2/sandboxes", &Value::Null);
    assert!(status == 429 && head.contains("retry-after: "), "{head}");
    assert_eq!(api.status(&admin, &format!("GET /sandboxes/{id}")), 200);

    // Neither the file nor the list has a key in it.
    let file = home.join("e2b-keys.toml");
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let listed = key(&home, &["list", "--json"]).success();
    for secret in [&user, &looker, &other, &admin] {
        assert!(!fs::read_to_string(&file).unwrap().contains(secret.trim_start_matches("e2b_")));
        assert!(!listed.contains(secret.trim_start_matches("e2b_")));
    }
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed[2]["rate"], "2 per 1h");
    for one in listed.as_array().unwrap() {
        key(&home, &["revoke", one["id"].as_str().unwrap()]).success();
    }
    for secret in [&user, &looker, &other, &admin] {
        assert_eq!(api.status(secret, "GET /v2/sandboxes"), 401);
    }
    let none = key(&home, &["revoke", "00000000"]);
    assert!(none.code == Some(1) && none.stderr.contains("thaw key list"), "{none:?}");
    for wrong in [&["a b"][..], &["x", "--rate", "fast"], &["x", "--role", "root"]] {
        assert_ne!(key(&home, &[&["create"], wrong].concat()).code, Some(0), "{wrong:?}");
    }
}
