//! Runtime templates: a function that is built from one is the function that was started, and
//! stores what differs.

use serde_json::Value;
use std::fs;
use std::path::Path;
use tempfile::TempDir;
use thaw_e2e::mirror::{ask, image_of, images, see_the_same, templates};
use thaw_e2e::{Daemon, DaemonOptions, Outcome, built_home, repository, run, thaw};

/// Builds the program that says what it sees.
fn build(home: &Path, name: &str, command: &str, template: &str) -> Outcome {
    let directory = source_of(name, command, template);
    run(thaw().env("THAW_HOME", home).arg("build").arg(directory.path()))
}

/// The directory of that program.
fn source_of(name: &str, command: &str, template: &str) -> TempDir {
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
    directory
}

const TEMPLATE: &str = "[template]\nfrom = \"python3\"\n";

fn command(home: &Path, arguments: &[&str]) -> Outcome {
    run(thaw().env("THAW_HOME", home).args(arguments))
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
    see_the_same(&daemon, &started, &given);
    let loaded = |name| ask(&daemon, name, "/loaded");
    let given_loaded = loaded(&given);
    let has = |module: &Value| given_loaded.as_array().expect("names").contains(module);
    assert!(loaded(&started).as_array().expect("names").iter().all(has), "{given_loaded}");
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

/// With `--templates shared`, the second function of a runtime is built from a template that nobody
/// has named; one that does not fit is built the ordinary way and says why; a program of no such
/// language is none of it.
#[test]
fn functions_that_share_a_runtime_get_a_template() {
    let home = built_home("templates-unnamed", &[]);
    let shared = |directory: &Path| {
        let arguments = ["build", "--templates", "shared"];
        let built = run(thaw().env("THAW_HOME", &home).args(arguments).arg(directory));
        assert_eq!(built.code, Some(0), "{}", built.stderr);
        built.stderr
    };
    let first = source_of("first", r#"["python3", "app.py"]"#, "");
    assert!(!shared(first.path()).contains("runtime template"));
    assert!(templates(&home).is_empty());
    build(&home, "ordinary", r#"["python3", "app.py"]"#, "").success();
    assert!(templates(&home).is_empty(), "nobody has asked for one");

    let second = source_of("second", r#"["python3", "app.py"]"#, "");
    let said = shared(second.path());
    assert!(said.contains("shares its runtime with first"), "{said}");
    assert_eq!(templates(&home).len(), 1);
    let unfit = source_of("unfit", r#"["python3", "-X", "dev", "app.py"]"#, "");
    let said = shared(unfit.path());
    assert!(said.contains("not built from a runtime template"), "{said}");
    let compiled = shared(&repository().join("examples/hello-c"));
    assert!(!compiled.contains("template"), "{compiled}");

    let is_whole = |name: &str| image_of(&home, name)["ancestors"] == serde_json::json!([]);
    assert_eq!(["second", "unfit", "ordinary"].map(is_whole), [false, true, true]);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    see_the_same(&daemon, "ordinary", "second");
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
