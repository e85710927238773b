//! PHP functions that are built from a runtime template.

use serde_json::json;
use std::fs;
use std::process::Command;
use thaw_e2e::mirror::{Mirror, ask, image_of, templates};
use thaw_e2e::{Daemon, DaemonOptions, built_home, get, repository, run, thaw};

const PHP: Mirror = Mirror { language: "php", files: &[], packages: &[("php", "/app")], lines: "" };
const SITE: &str = r#"["php", "-S", "0.0.0.0:8080"]"#;
const ROUTER: &str = r#"["php", "-S", "0.0.0.0:8080", "index.php"]"#;

#[test]
fn a_site_sees_what_it_would_see_without_a_template() {
    let home = built_home("templates-php-site", &[]);
    let (daemon, name) = PHP.check(&home, "site", SITE, "");
    let seen = ask(&daemon, &name, "/");
    assert_eq!(seen["server"]["DOCUMENT_ROOT"], "/app");
    assert_eq!(seen["environment"][0]["WHO"], "somebody");
    assert_eq!(seen["child"][0][2]["WHO"], "somebody");
    assert_eq!(seen["start"][0], json!(false));
    assert!(!seen.to_string().contains("thaw-template"), "{seen}");
}

#[test]
fn a_router_sees_what_it_would_see_without_a_template() {
    let home = built_home("templates-php-router", &[]);
    let command = r#"["/usr/bin/php", "-d", "mirror.given=1", "-dprecision=5", "-q",
        "-S0.0.0.0:8080", "-t", "./", "./index.php"]"#;
    let (daemon, name) = PHP.check(&home, "router", command, "");
    assert_eq!(ask(&daemon, &name, "/")["given_settings"], json!(["1", "5"]));
}

#[test]
fn a_script_sees_what_it_would_see_without_a_template() {
    let home = built_home("templates-php-script", &[]);
    PHP.check(&home, "script", r#"["php", "app.php"]"#, "");
}

#[test]
fn a_script_has_its_arguments() {
    let home = built_home("templates-php-arguments", &[]);
    let command = r#"["php", "-n", "/app/app.php", "-a", "--", "", "--file=ä"]"#;
    let (daemon, name) = PHP.check(&home, "arguments", command, "");
    let arguments = json!([["/app/app.php", "-a", "--", "", "--file=ä"], 5]);
    assert_eq!(ask(&daemon, &name, "/")["arguments"], arguments);
}

/// What PHP draws, it draws when it is asked: no two copies draw the same.
#[test]
fn functions_share_a_template_and_draw_other_numbers() {
    let home = built_home("templates-php-shared", &[]);
    PHP.check_sharing(&home, ROUTER);
    let long = "x".repeat(8000);
    let more = format!("{}[env]\nLONG = \"{long}\"\nMORE = \"1\"\n", PHP.template());
    let command = r#"["php", "-S", "[::]:8080", "-t", "/app", "./index.php"]"#;
    PHP.build(&home, "third", command, &more).success();
    let auto = PHP.build(&home, "auto", ROUTER, "[template]\nfrom = \"auto\"\n");
    assert!(!auto.stderr.contains("not built from"), "{}", auto.stderr);
    auto.success();
    assert_eq!(templates(&home).len(), 1);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(ask(&daemon, "third", "/")["environment"][0]["LONG"], long.as_str());
    let [first, second] = ["first", "first"].map(|name| ask(&daemon, name, "/drawn"));
    for (what, drawn) in first.as_object().expect("an object") {
        assert_ne!(&second[what], drawn, "{what}");
    }
}

#[test]
fn each_option_and_number_of_arguments_has_a_template() {
    let home = built_home("templates-php-several", &[]);
    for (name, command) in [
        ("site", SITE),
        ("router", ROUTER),
        ("script", r#"["php", "app.php"]"#),
        ("longer", r#"["php", "app.php", "x"]"#),
        ("option", r#"["php", "-d", "a=b", "app.php", "x"]"#),
    ] {
        PHP.build(&home, name, command, &PHP.template()).success();
        assert_eq!(image_of(&home, name)["ancestors"].as_array().map(Vec::len), Some(1), "{name}");
    }
    assert_eq!(templates(&home).len(), 5);
}

#[test]
fn a_program_that_would_notice_is_built_the_ordinary_way_and_says_why() {
    let home = built_home("templates-php-notice", &[]);
    let template = PHP.template();
    let with = |variable: &str| format!("{template}[env]\n{variable}\n");
    let long = with(&format!("LONG = \"{}\"", "x".repeat(8200)));
    let settings = with("PHP_INI_SCAN_DIR = \":/app\"");
    let cases = [
        (r#"["php", "-f", "app.php"]"#, template.as_str(), "gets the option -f"),
        (r#"["php", "-c", "/none", "app.php"]"#, template.as_str(), "gets the option -c"),
        (SITE, long.as_str(), "a variable of its environment has more than 8191 bytes"),
        (SITE, settings.as_str(), "its environment has PHP_INI_SCAN_DIR"),
    ];
    PHP.check_refusals(&home, &cases);
    assert_eq!(templates(&home).len(), 0);
}

/// Settings that PHP reads when it starts, and a template has not seen.
#[test]
fn settings_of_its_own_are_not_passed_over() {
    let home = built_home("templates-php-settings", &[]);
    let asked = Command::new("php").args(["-n", "-r", "echo PHP_CONFIG_FILE_SCAN_DIR;"]).output();
    let asked = asked.expect("an answer").stdout;
    let directory: &'static str = String::from_utf8(asked).expect("a path").leak();
    let packages = Box::leak(Box::new([("php", "/app"), ("php-settings", directory)]));
    let mirror = Mirror { packages, ..PHP };
    let built = mirror.build(&home, "own", SITE, &PHP.template());
    let why = format!("it has settings of its own, {directory}/own.ini");
    assert!(built.stderr.contains(&why), "{}", built.stderr);
    built.success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(ask(&daemon, "own", "/")["given_settings"][0], "own");
}

/// A web server with several processes makes them after it has found its program.
#[test]
fn workers_are_made_in_the_copy() {
    let home = built_home("templates-php-workers", &[]);
    let workers = "[env]\nPHP_CLI_SERVER_WORKERS = \"2\"\n";
    PHP.build(&home, "workers-a", ROUTER, workers).success();
    let given = PHP.build(&home, "workers-b", ROUTER, &format!("{}{workers}", PHP.template()));
    assert!(!given.stderr.contains("built from"), "{}", given.stderr);
    given.success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    for function in ["workers-a", "workers-b"] {
        assert_eq!(ask(&daemon, function, "/import"), "neighbour", "{function}");
        // The server and its workers.
        assert_eq!(ask(&daemon, function, "/processes"), 3, "{function}");
    }
}

/// What the interpreter says of a program that is not there is the same, and how it ends.
#[test]
fn a_program_that_is_not_there_is_told_alike() {
    let home = built_home("templates-php-none", &[]);
    for (name, command, said) in [
        ("none", r#"["php", "none.php"]"#, "Could not open input file: none.php"),
        (
            "nowhere",
            r#"["php", "-S", "0.0.0.0:8080", "-t", "none"]"#,
            "Directory none does not exist",
        ),
        ("address", r#"["php", "-S", "nonsense", "index.php"]"#, "Invalid address: nonsense"),
    ] {
        let natively = PHP.build(&home, name, command, "").stderr;
        let given = PHP.build(&home, name, command, &PHP.template()).stderr;
        let how = "with exit code 1 ";
        assert!(natively.contains(said) && natively.contains(how), "{natively}");
        // In a copy first, and then the ordinary way.
        assert!(given.matches(said).count() > natively.matches(said).count(), "{given}");
        assert!(given.matches(how).count() > natively.matches(how).count(), "{given}");
    }
}

/// An error that nobody catches ends the program as it does natively.
#[test]
fn an_uncaught_error_is_told_and_ends_the_program_alike() {
    let home = built_home("templates-php-error", &[]);
    let command = r#"["php", "app.php", "--fail"]"#;
    let natively = PHP.build(&home, "natively", command, "").stderr;
    let given = PHP.build(&home, "given", command, &PHP.template()).stderr;
    let from = natively.find("with exit code 255").expect("it says how the program ended");
    let expected = natively[from..].trim_end();
    assert!(expected.contains("LogicException: for nobody to catch"), "{expected}");
    let note = "it cannot be built from its runtime template";
    assert!(given.contains(note) && given.matches(expected).count() == 2, "{given}");
}

#[test]
fn the_example_is_built_from_a_template() {
    let home = built_home("templates-php-example", &[]);
    let example = repository().join("examples/hello-php");
    let directory = tempfile::tempdir().expect("a directory");
    fs::copy(example.join("index.php"), directory.path().join("index.php")).expect("a program");
    let text = fs::read_to_string(example.join("thaw.toml")).expect("thaw.toml");
    let text = format!("{text}\n[template]\nfrom = \"auto\"\n");
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    let built = run(thaw().env("THAW_HOME", &home).arg("build").arg(directory.path()));
    assert!(!built.stderr.contains("built from"), "{}", built.stderr);
    built.success();
    assert_eq!(image_of(&home, "hello-php")["ancestors"].as_array().map(Vec::len), Some(1));
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let answer = get(daemon.gateway(), "hello-php", "/?name=Ada");
    assert!(answer.text().contains("Nice to meet Ada"), "{}", answer.text());
}
