//! Secrets: values that copies get when they are thawed, and that are in no image. And what of a
//! function's directory is left out because it may hold some.

use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};
use thaw_e2e::{
    Daemon, DaemonOptions, Outcome, built_home, get, repository, run, run_with_input, thaw,
};

/// Found nowhere by chance.
const VALUE: &str = "hunter2-5b1f0c6e-in-no-image";

/// Builds the server that tells its secrets.
fn build(home: &Path, name: &str, keys: &str) -> Outcome {
    build_with(home, name, keys, "")
}

/// The same with an argument.
fn build_with(home: &Path, name: &str, keys: &str, argument: &str) -> Outcome {
    build_of(home, name, keys, argument, "\"database\", \"api-key\"")
}

/// The same with these secrets.
fn build_of(home: &Path, name: &str, keys: &str, argument: &str, names: &str) -> Outcome {
    let directory = tempfile::tempdir().expect("a directory");
    let program = repository().join("tests/guest/functions/secretive.py");
    fs::copy(program, directory.path().join("app.py")).expect("a copy");
    let text = format!(
        "name = \"{name}\"\ncommand = [\"python3\", \"app.py\"{argument}]\nport = 8080\n\
         files = [\"app.py\"]\n{keys}\n[secrets]\nnames = [{names}]\n\
         [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n"
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    let mut build = thaw();
    build.env("THAW_HOME", home).args(["build", "--weak-limits"]);
    run(build.arg(directory.path()))
}

fn command(home: &Path, arguments: &[&str]) -> Outcome {
    run(thaw().env("THAW_HOME", home).args(arguments))
}

#[track_caller]
fn set(home: &Path, function: &str, name: &str, value: &str) {
    let mut setting = thaw();
    setting.env("THAW_HOME", home).args(["secret", "set", function, name]);
    run_with_input(&mut setting, value.as_bytes()).success();
}

#[track_caller]
fn ask(daemon: &Daemon, function: &str, path: &str) -> Value {
    let response = get(daemon.gateway(), function, path);
    assert_eq!(response.status, 200, "{}", response.text());
    response.json()
}

/// A copy that is thawed now has these values, and had none when it was frozen.
#[track_caller]
fn has(daemon: &Daemon, function: &str, database: &str, api_key: &str) {
    let expected = json!({ "now": { "database": database, "api-key": api_key }, "at_start": {} });
    assert_eq!(ask(daemon, function, "/"), expected);
}

#[test]
fn each_copy_has_the_values_of_the_moment() {
    let home = built_home("secrets-values", &[]);
    for (name, keys) in [("warm", ""), ("ready", "ready = 2"), ("forked", "template = true")] {
        let built = build(&home, name, keys);
        let note = format!(
            "note: secret `api-key` of `{name}` is not set; `thaw secret set {name} api-key` sets it"
        );
        assert!(built.stderr.contains(&note), "{}", built.stderr);
        built.success();
    }
    for (name, keys) in [("workers", ""), ("readyworkers", "ready = 2")] {
        build_with(&home, name, keys, ", \"worker\"").success();
    }
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let refused = get(daemon.gateway(), "warm", "/");
    assert_eq!(refused.status, 503);
    let why = "secret `api-key` of `warm` is not set; `thaw secret set warm api-key` sets it";
    let explained = daemon.explain(&refused);
    assert!(explained.contains(why), "{explained}");
    let functions = daemon.admin("/functions").json();
    let warm = functions.as_array().unwrap().iter().find(|found| found["name"] == "warm").unwrap();
    assert_eq!(warm["problem"], why);
    for function in ["warm", "ready", "forked", "workers", "readyworkers"] {
        set(&home, function, "database", "one\n");
        set(&home, function, "api-key", "");
        has(&daemon, function, "one", "");
        set(&home, function, "database", "two");
        set(&home, function, "api-key", "line\nline\n");
        for _ in 0..4 {
            has(&daemon, function, "two", "line\nline");
        }
    }
    let facts = ask(&daemon, "warm", "/facts");
    let (rofs, noent) = (libc_errno("EROFS"), libc_errno("ENOENT"));
    assert_eq!(
        facts,
        json!({ "sizes": [9, 3], "rest": "ne\n", "write": rofs, "create": rofs,
                "missing": noent, "mode": "0o444" })
    );
    command(&home, &["secret", "remove", "warm", "database"]).success();
    assert_eq!(get(daemon.gateway(), "warm", "/").status, 503);
}

fn libc_errno(name: &str) -> i32 {
    match name {
        "EROFS" => 30,
        _ => 2,
    }
}

#[test]
fn values_come_from_the_environment_files_and_commands() {
    let home = built_home("secrets-places", &[]);
    build(&home, "f", "").success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let file = home.join("value");
    fs::write(&file, "of a file\n").unwrap();
    let file = file.to_str().unwrap();
    command(&home, &["secret", "set", "f", "api-key", "--file", file]).success();
    let mut of_environment = thaw();
    of_environment.env("THAW_HOME", &home).env("SOME_VALUE", "of the environment");
    run(of_environment.args(["secret", "set", "f", "database", "--env", "SOME_VALUE"])).success();
    has(&daemon, "f", "of the environment", "of a file\n");
    command(&home, &["secret", "set", "f", "database", "--", "echo", "of a command"]).success();
    has(&daemon, "f", "of a command", "of a file\n");
    // One that fails changes nothing.
    let failed = command(&home, &["secret", "set", "f", "database", "--", "false"]);
    assert!(failed.code != Some(0) && failed.stderr.contains("stays what it was"), "{failed:?}");
    let unset = command(&home, &["secret", "set", "f", "database", "--env", "NOT_SET_ANYWHERE"]);
    assert!(unset.code != Some(0) && unset.stderr.contains("is not set"), "{unset:?}");
    has(&daemon, "f", "of a command", "of a file\n");
    let mut large = thaw();
    large.env("THAW_HOME", &home).args(["secret", "set", "f", "database"]);
    let large = run_with_input(&mut large, &vec![b'x'; 33 << 10]);
    assert!(large.code != Some(0) && large.stderr.contains("32768 at most"), "{large:?}");
    let listed = command(&home, &["secret", "list", "f", "--json"]).success();
    assert!(listed.contains("database") && !listed.contains("of a"), "{listed}");
    // Another function of its name gets none of them.
    command(&home, &["remove", "f"]).success();
    assert_eq!(command(&home, &["secret", "list", "f", "--json"]).success().trim(), "[]");
}

/// Files below a directory that contain a text.
fn files_with(directory: &Path, text: &str) -> Vec<PathBuf> {
    let found = run(std::process::Command::new("grep").arg("-rlaF").arg(text).arg(directory));
    found.stdout.lines().map(PathBuf::from).collect()
}

#[test]
fn no_image_and_nothing_that_is_shown_has_a_value() {
    let home = built_home("secrets-nowhere", &[]);
    build(
        &home,
        "stays",
        "isolation = \"instance\"\n[limits]\nsleep_after = \"10m\"\nkeep_alive = \"1h\"",
    )
    .success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    set(&home, "stays", "database", VALUE);
    set(&home, "stays", "api-key", "other");
    ask(&daemon, "stays", "/quiet");
    let instance = daemon.first_instance("stays")["id"].to_string();
    // It has the value, and has not read it.
    command(&home, &["checkpoint", &instance, "before"]).success();
    command(&home, &["sleep", "stays"]).success();
    let places = ["store", "asleep", "logs"].map(|place| home.join(place));
    for place in &places {
        assert_eq!(files_with(place, VALUE), Vec::<PathBuf>::new());
    }
    // The copy that wakes has the value of that moment, and so has one that is restored.
    set(&home, "stays", "api-key", "newer");
    has(&daemon, "stays", VALUE, "newer");
    for said in [
        command(&home, &["inspect", "stays", "--json"]).success(),
        daemon.admin("/functions/stays").text(),
        daemon.admin("/functions").text(),
        daemon.log(),
    ] {
        assert!(!said.contains(VALUE), "{said}");
    }
    assert_eq!(files_with(&home.join("store"), VALUE), Vec::<PathBuf>::new());
    command(&home, &["restore", "before"]).success();
    let instances = daemon.instances("stays");
    let newest = instances.iter().filter_map(|found| found["id"].as_u64()).max().unwrap();
    let newest = newest.to_string();
    let said = command(&home, &["invoke", "stays", "--instance", &newest]).success();
    let said: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(said["now"]["api-key"], "newer");
    // A program's own memory is in its images: this one has read the value by now.
    command(&home, &["checkpoint", &newest, "after"]).success();
    assert!(!files_with(&home.join("store"), VALUE).is_empty());
}

#[test]
fn files_that_may_hold_secrets_are_left_out() {
    let home = built_home("secrets-ignored", &[]);
    let directory = tempfile::tempdir().expect("a directory");
    let program = "import http.server, os\n\
        class Handler(http.server.BaseHTTPRequestHandler):\n\
        \x20   def do_GET(self):\n\
        \x20       self.send_response(200)\n\
        \x20       self.end_headers()\n\
        \x20       paths = [os.path.join(at, name) for at, _, names in os.walk('/app') for name in names]\n\
        \x20       self.wfile.write('\\n'.join(sorted(paths)).encode())\n\
        http.server.HTTPServer(('', 8080), Handler).serve_forever()\n";
    let files = [
        ("app.py", program),
        (".env", "PASSWORD=x"),
        ("tls.key", "x"),
        (".git/config", "x"),
        ("data/note.txt", "x"),
        ("data/scratch.tmp", "x"),
        ("data/keep.tmp", "x"),
        ("public.key", "x"),
        (".thawignore", "*.tmp\n!keep.tmp\n!public.key\n"),
        (
            "thaw.toml",
            "name = \"tidy\"\ncommand = [\"python3\", \"app.py\"]\nport = 8080\n\
             [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n",
        ),
    ];
    for (path, text) in files {
        let path = directory.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let mut build = thaw();
    build.env("THAW_HOME", &home).args(["build", "--weak-limits"]).arg(directory.path());
    let outcome = run(&mut build);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    let note = "left out .env, .git, tls.key, which may hold secrets";
    assert!(outcome.stderr.contains(note), "{}", outcome.stderr);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let found = get(daemon.gateway(), "tidy", "/").text();
    let found: Vec<_> = found.lines().filter_map(|path| path.strip_prefix("/app/")).collect();
    let expected =
        [".thawignore", "app.py", "data/keep.tmp", "data/note.txt", "public.key", "thaw.toml"];
    assert_eq!(found, expected);
}

/// The numbers of all instances of a function.
fn ids_of(daemon: &Daemon, function: &str) -> BTreeSet<u64> {
    daemon.instances(function).iter().filter_map(|one| one["id"].as_u64()).collect()
}

#[test]
fn a_restart_gives_new_values_and_refuses_nobody() {
    let home = built_home("secrets-restart", &[]);
    build(&home, "kept", "isolation = \"instance\"\nlimits.keep_alive = \"10m\"").success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    set(&home, "kept", "api-key", "k");
    set(&home, "kept", "database", "first");
    has(&daemon, "kept", "first", "k");
    set(&home, "kept", "database", "second");
    has(&daemon, "kept", "first", "k");
    let is_over = AtomicBool::new(false);
    // They end also if something else fails.
    let until = Instant::now() + Duration::from_secs(120);
    std::thread::scope(|threads| {
        let clients: Vec<_> = (0..3)
            .map(|_| {
                threads.spawn(|| {
                    let mut count = 0;
                    while !is_over.load(SeqCst) && Instant::now() < until {
                        let response = get(daemon.gateway(), "kept", "/quiet");
                        assert_eq!(response.status, 200, "{}", response.text());
                        count += 1;
                    }
                    count
                })
            })
            .collect();
        for number in 0..4 {
            set(&home, "kept", "database", &format!("value {number}"));
            let before = ids_of(&daemon, "kept");
            let said = command(&home, &["restart", "kept", "--wait"]).success();
            assert!(said.starts_with("kept: "), "{said}");
            assert!(ids_of(&daemon, "kept").is_disjoint(&before), "it has waited for their end");
            has(&daemon, "kept", &format!("value {number}"), "k");
        }
        is_over.store(true, SeqCst);
        let counts = clients.into_iter().map(|client| client.join().expect("all were served"));
        assert!(counts.min() > Some(0));
    });
    // Without a value, those that have the old one go on.
    command(&home, &["secret", "remove", "kept", "database"]).success();
    let refused = command(&home, &["restart", "kept"]);
    assert!(refused.code != Some(0) && refused.stderr.contains("goes on as it was"), "{refused:?}");
    has(&daemon, "kept", "value 3", "k");
    let unknown = command(&home, &["restart", "nobody"]);
    assert!(unknown.code != Some(0) && unknown.stderr.contains("`nobody`"), "{unknown:?}");
}

#[test]
fn a_restart_changes_nothing_unless_the_same_versions_can_be_served() {
    let home = built_home("secrets-versions", &[]);
    let keys = "isolation = \"instance\"";
    let names = "\"database\", \"api-key\", \"old\"";
    build_of(&home, "kept", keys, "", names).success();
    build(&home, "kept", keys).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    for name in ["database", "api-key", "old"] {
        set(&home, "kept", name, name);
    }
    let record = home.join("store/functions/kept/record.json");
    let whole = fs::read(&record).expect("a record");
    command(&home, &["split", "kept", "1", "--percent", "50"]).success();
    command(&home, &["restart", "kept"]).success();
    // A secret of the version that gets a share only.
    command(&home, &["secret", "remove", "kept", "old"]).success();
    let refused = command(&home, &["restart", "kept"]);
    assert!(refused.code != Some(0) && refused.stderr.contains("`old`"), "{refused:?}");
    set(&home, "kept", "old", "again");
    command(&home, &["restart", "kept"]).success();
    // The store has other shares, and nobody has told the daemon.
    fs::write(&record, whole).expect("root may write it");
    let refused = command(&home, &["restart", "kept"]);
    assert!(refused.code != Some(0) && refused.stderr.contains("SIGHUP"), "{refused:?}");
    daemon.signal(rustix::process::Signal::HUP);
    thaw_e2e::wait_until("it is served", || command(&home, &["restart", "kept"]).code == Some(0));
}
