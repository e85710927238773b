//! Runtime templates: a function that is built from one is the function that was started, and
//! stores what differs.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use thaw_e2e::{Daemon, DaemonOptions, Outcome, built_home, get, repository, run, thaw};

/// Builds the program that says what it sees.
fn build(home: &Path, name: &str, command: &str, template: &str) -> Outcome {
    let directory = tempfile::tempdir().expect("a directory");
    let source = repository().join("tests/guest/functions/mirror");
    for file in ["app.py", "neighbour.py"] {
        fs::copy(source.join(file), directory.path().join(file)).expect("a program");
    }
    fs::create_dir(directory.path().join("site")).expect("a directory");
    let packages = directory.path().join("site/heavy.py");
    fs::copy(source.join("site/heavy.py"), &packages).expect("a module");
    // Equal files are those with equal times.
    let long_ago = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1 << 30);
    for path in [&packages, &directory.path().join("site")] {
        let file = fs::File::open(path).expect("a file");
        file.set_modified(long_ago).expect("a time");
    }
    let text = format!(
        "name = \"{name}\"\ncommand = {command}\nport = 8080\n\
         files = [\"app.py\", \"neighbour.py\", {{ from = \"site\", to = \"/opt/site\" }}]\n\
         [env]\nPYTHONPATH = \"/opt/site:/none\"\nWHO = \"somebody\"\n\
         [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n{template}",
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    run(thaw().env("THAW_HOME", home).arg("build").arg(directory.path()))
}

const TEMPLATE: &str = "[template]\nfrom = \"python3\"\n";

fn command(home: &Path, arguments: &[&str]) -> Outcome {
    run(thaw().env("THAW_HOME", home).args(arguments))
}

fn images(home: &Path) -> Value {
    let said = command(home, &["images", "--json"]).success();
    serde_json::from_str(&said).expect("JSON")
}

/// The image of a function, as `thaw images` shows it.
#[track_caller]
fn image_of(home: &Path, function: &str) -> Value {
    let all = images(home);
    let is_of_it = |image: &&Value| image["functions"] == serde_json::json!([function]);
    all.as_array().expect("a list").iter().find(is_of_it).expect("an image").clone()
}

#[track_caller]
fn ask(daemon: &Daemon, function: &str, path: &str) -> Value {
    let answer = get(daemon.gateway(), function, path);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

/// Takes the eight digits away that are behind a function's name in its revision.
fn without_revisions(text: &str, name: &str) -> String {
    let mark = format!("{name}-");
    let mut parts = text.split(&mark);
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |done, part| {
        let is_hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_revision = part.get(..8).is_some_and(is_hex);
        done + name + if is_revision { &part[8..] } else { part }
    })
}

/// Built both ways, a program sees the same.
#[track_caller]
fn check_sees_the_same(home: &Path, name: &str, how: &str) {
    let (started, given) = (format!("{name}-a"), format!("{name}-b"));
    build(home, &started, how, "").success();
    let outcome = build(home, &given, how, TEMPLATE);
    assert!(!outcome.stderr.contains("not built from"), "{}", outcome.stderr);
    assert!(!outcome.stderr.contains("cannot be built from"), "{}", outcome.stderr);
    outcome.success();
    let daemon = Daemon::start(home, &DaemonOptions::default());
    // The name of the function is that of the host, and its revision is that of its thaw.toml.
    let [expected, seen] = [&started, &given].map(|name| {
        let text = without_revisions(&ask(&daemon, name, "/").to_string(), name);
        serde_json::from_str::<Value>(&text.replace(&started, &given)).expect("JSON")
    });
    for (what, expected) in expected.as_object().expect("an object") {
        assert_eq!(&seen[what], expected, "{what}");
    }
    let loaded = |name| ask(&daemon, name, "/loaded");
    let given_loaded = loaded(&given);
    let has = |module: &Value| given_loaded.as_array().expect("names").contains(module);
    assert!(loaded(&started).as_array().expect("names").iter().all(has), "{given_loaded}");
    assert_eq!(ask(&daemon, &given, "/import"), "neighbour");
    assert_eq!(ask(&daemon, &given, "/thaws")[0], "1\n");
}

#[test]
fn a_script_sees_what_it_would_see_without_a_template() {
    let home = built_home("templates-script", &[]);
    check_sees_the_same(&home, "script", r#"["python3", "app.py", "--flag", "ä"]"#);
}

#[test]
fn a_module_sees_what_it_would_see_without_a_template() {
    let home = built_home("templates-module", &[]);
    check_sees_the_same(&home, "module", r#"["python3", "-m", "app", "-x"]"#);
}

#[test]
fn a_command_sees_what_it_would_see_without_a_template() {
    let home = built_home("templates-command", &[]);
    let code = "import runpy, sys; sys.argv[1:] or 1/0; exec(open('app.py').read())";
    check_sees_the_same(&home, "command", &format!(r#"["python3", "-c", "{code}", "more"]"#));
}

/// The templates of a store, by what its directory has.
fn templates(home: &Path) -> Vec<PathBuf> {
    let all = fs::read_dir(home.join("store/templates")).expect("a directory");
    all.map(|entry| entry.expect("an entry").path()).collect()
}

#[test]
fn functions_share_templates_which_go_with_the_last_of_them() {
    let home = built_home("templates-shared", &[]);
    let modules = format!("{TEMPLATE}modules = [\"heavy\"]\n");
    let script = r#"["python3", "app.py"]"#;
    let first = build(&home, "first", script, &modules);
    assert_eq!(first.stderr.matches("making the runtime template").count(), 2, "{}", first.stderr);
    first.success();
    for (name, template) in [("second", modules.as_str()), ("third", TEMPLATE)] {
        let next = build(&home, name, script, template);
        assert!(!next.stderr.contains("making the runtime template"), "{}", next.stderr);
        next.success();
    }
    assert_eq!(templates(&home).len(), 2);
    build(&home, "whole", script, "").success();
    command(&home, &["pack"]).success();
    let stored = |name| image_of(&home, name)["allocated"].as_u64().expect("bytes");
    assert!(stored("second") < stored("whole") / 3, "{}", images(&home));

    let daemon = Daemon::start(&home, &DaemonOptions::default());
    // What was drawn from a generator that the template had seeded is drawn anew.
    assert_ne!(ask(&daemon, "first", "/drawn"), ask(&daemon, "second", "/drawn"));
    let loaded = ask(&daemon, "first", "/loaded");
    assert!(loaded.as_array().expect("names").contains(&"heavy".into()), "{loaded}");
    daemon.stop();

    for (function, left) in [("first", 2), ("second", 1), ("third", 0)] {
        command(&home, &["remove", function]).success();
        command(&home, &["gc"]).success();
        assert_eq!(templates(&home).len(), left, "{function}");
        if left > 0 {
            let daemon = Daemon::start(&home, &DaemonOptions::default());
            assert_eq!(ask(&daemon, "third", "/import"), "neighbour");
            daemon.stop();
        }
    }
    assert_eq!(images(&home).to_string().matches("\"whole\"").count(), 1);
}

#[test]
fn a_program_that_would_notice_is_built_the_ordinary_way_and_says_why() {
    let home = built_home("templates-notice", &[]);
    let cases = [
        (r#"["python3", "-u", "app.py"]"#, "gets the option -u"),
        (r#"["/app/other", "app.py"]"#, "is not the interpreter"),
        (r#"["python3", "app.py", "--refuse-template"]"#, "somebody has loaded asyncio"),
    ];
    for (number, (how, why)) in cases.into_iter().enumerate() {
        let name = format!("case-{number}");
        let built = build(&home, &name, how, TEMPLATE);
        assert!(built.stderr.contains(why), "{how}: {}", built.stderr);
        if number == 1 {
            continue;
        }
        built.success();
        let image = image_of(&home, &name);
        assert_eq!(image["ancestors"], serde_json::json!([]), "{image}");
    }
}

/// A function that has another file in the place of one of the language's.
#[test]
fn a_function_with_another_library_is_built_the_ordinary_way() {
    let home = built_home("templates-library", &[]);
    let script = r#"["python3", "app.py"]"#;
    build(&home, "plain", script, TEMPLATE).success();
    let directory = tempfile::tempdir().expect("a directory");
    let source = repository().join("tests/guest/functions/mirror");
    fs::copy(source.join("app.py"), directory.path().join("app.py")).expect("a program");
    fs::write(directory.path().join("hosts"), "127.0.0.1 localhost other\n").expect("a file");
    let text = format!(
        "name = \"other\"\ncommand = {script}\nport = 8080\n\
         files = [\"app.py\", {{ from = \"hosts\", to = \"/etc/hosts\" }}]\n\
         [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n{TEMPLATE}",
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    let built = run(thaw().env("THAW_HOME", &home).arg("build").arg(directory.path()));
    assert!(built.stderr.contains("it has another /etc/hosts"), "{}", built.stderr);
    built.success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert!(ask(&daemon, "other", "/")["hosts"][0].to_string().contains("localhost other"));
}
