//! Node functions that are built from a runtime template.

use serde_json::json;
use std::path::Path;
use thaw_e2e::mirror::{Mirror, ask, templates};
use thaw_e2e::{Outcome, built_home};

const NODE: Mirror = Mirror {
    language: "node",
    files: &["app.js", "app.mjs", "neighbour.js", "package.json"],
    packages: &[("packages", "/app/node_modules")],
    lines: "",
};

fn build(home: &Path, name: &str, command: &str, template: &str) -> Outcome {
    NODE.build(home, name, command, template)
}

#[test]
fn a_script_sees_what_it_would_see_without_a_template() {
    let home = built_home("templates-node-script", &[]);
    let command = r#"["node", "app.js", "--threads", "ä", "-x"]"#;
    let (daemon, name) = NODE.check(&home, "script", command, "");
    // Threads of worker_threads were started, and came as far as a message.
    let seen = ask(&daemon, &name, "/");
    assert_eq!(seen["threads"]["given"]["environment"], json!({ "ONE": "1" }));
    assert_eq!(ask(&daemon, &name, "/scope"), "neighbour");
}

#[test]
fn an_es_module_sees_what_it_would_see_without_a_template() {
    let home = built_home("templates-node-module", &[]);
    NODE.check(&home, "module", r#"["/usr/bin/node", "./app.mjs", "one"]"#, "");
}

#[test]
fn packages_of_a_template_are_those_that_the_program_would_load() {
    let home = built_home("templates-node-packages", &[]);
    let modules = "modules = [\"heavy\"]\n";
    let (daemon, given) = NODE.check(&home, "packages", r#"["node", "app"]"#, modules);
    let started = "packages-a";
    for path in ["/package", "/scope"] {
        let expected = ask(&daemon, started, path);
        assert_eq!(ask(&daemon, &given, path), expected, "{path}");
        assert!(!expected.to_string().contains("Error"), "{expected}");
    }
    // It was loaded in the template, which knows no variables of the function.
    assert_eq!(ask(&daemon, started, "/who"), json!(["somebody"]));
    assert_eq!(ask(&daemon, &given, "/who"), json!([null]));
    daemon.stop();
    assert_eq!(templates(&home).len(), 2);
}

#[test]
fn functions_share_a_template_and_draw_other_numbers() {
    let home = built_home("templates-node-shared", &[]);
    NODE.check_sharing(&home, r#"["node", "app.js"]"#);
}

#[test]
fn a_program_that_would_notice_is_built_the_ordinary_way_and_says_why() {
    let home = built_home("templates-node-notice", &[]);
    let template = NODE.template();
    let modern = format!("{template}modules = [\"modern\"]\n");
    let nowhere = format!("{template}modules = [\"nowhere\"]\n");
    let script = r#"["node", "app.js"]"#;
    let cases = [
        (
            r#"["node", "--stack-size=900", "app.js"]"#,
            template.as_str(),
            "gets the option --stack-size",
        ),
        (script, modern.as_str(), "modern"),
        (script, nowhere.as_str(), "no module nowhere is in /app/node_modules"),
        (
            r#"["node", "app.js", "--refuse-template"]"#,
            template.as_str(),
            "somebody was here before",
        ),
    ];
    NODE.check_refusals(&home, &cases);
    let options = format!("{template}[env]\nNODE_OPTIONS = \"--no-warnings\"\n");
    let built = NODE.build(&home, "options", script, &options);
    assert!(built.stderr.contains("its environment has NODE_OPTIONS"), "{}", built.stderr);
}

/// An error that nobody catches ends the program as it does natively.
#[test]
fn an_uncaught_error_is_told_and_ends_the_program_alike() {
    let home = built_home("templates-node-error", &[]);
    let command = r#"["node", "app.js", "--fail"]"#;
    let natively = build(&home, "natively", command, "").stderr;
    let given = build(&home, "given", command, &NODE.template()).stderr;
    let told = |text: &str| {
        let from = text.find("with exit code 7").expect("it says how the program ended");
        text[from..].lines().take(13).map(str::trim).collect::<Vec<_>>().join("\n")
    };
    let expected = told(&natively);
    assert!(expected.contains("RangeError: for nobody to catch"), "{expected}");
    assert!(expected.contains("node:internal/main/run_main_module"), "{expected}");
    assert_eq!(told(&given), expected);
}
