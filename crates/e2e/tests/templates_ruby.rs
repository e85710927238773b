//! Ruby functions that are built from a runtime template.

use serde_json::json;
use std::path::Path;
use thaw_e2e::mirror::{Mirror, ask, templates};
use thaw_e2e::{Daemon, DaemonOptions, Outcome, built_home};

const RUBY: Mirror = Mirror {
    language: "ruby",
    files: &["app.rb", "neighbour.rb"],
    packages: &[("rubylib", "/opt/rubylib")],
    lines: "",
};

fn build(home: &Path, name: &str, command: &str, template: &str) -> Outcome {
    RUBY.build(home, name, command, template)
}

#[test]
fn a_script_sees_what_it_would_see_without_a_template() {
    let home = built_home("templates-ruby-script", &[]);
    RUBY.check(&home, "script", r#"["ruby", "app.rb", "--flag", "ä"]"#, "");
}

#[test]
fn modules_of_a_template_are_those_that_the_program_would_load() {
    let home = built_home("templates-ruby-modules", &[]);
    let modules = "modules = [\"heavy\"]\n[env]\nRUBYLIB = \"/opt/rubylib\"\n";
    let modules = format!("{}{modules}", RUBY.template());
    let given = build(&home, "given", r#"["/usr/bin/ruby", "./app.rb"]"#, &modules);
    assert!(!given.stderr.contains("not built from"), "{}", given.stderr);
    given.success();
    assert_eq!(templates(&home).len(), 2);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let library = "/opt/rubylib/heavy.rb";
    // `require` says that it has been loaded before.
    assert_eq!(ask(&daemon, "given", "/package"), json!(["constant", "heavy", [library]]));
    assert_eq!(ask(&daemon, "given", "/")["started"][0], "./app.rb");
}

#[test]
fn functions_share_a_template_and_draw_other_numbers() {
    let home = built_home("templates-ruby-shared", &[]);
    RUBY.check_sharing(&home, r#"["ruby", "app.rb"]"#);
}

#[test]
fn a_program_that_would_notice_is_built_the_ordinary_way_and_says_why() {
    let home = built_home("templates-ruby-notice", &[]);
    let template = RUBY.template();
    let nowhere = format!("{template}modules = [\"nowhere\"]\n");
    let script = r#"["ruby", "app.rb"]"#;
    let cases = [
        (r#"["ruby", "-W0", "app.rb"]"#, template.as_str(), "gets the option -W0"),
        (script, nowhere.as_str(), "cannot load such file -- nowhere"),
        (
            r#"["ruby", "app.rb", "--refuse-template"]"#,
            template.as_str(),
            "somebody has loaded yaml",
        ),
    ];
    RUBY.check_refusals(&home, &cases);
    let options = format!("{template}[env]\nRUBYOPT = \"-W0\"\n");
    let built = build(&home, "options", script, &options);
    assert!(built.stderr.contains("its environment has RUBYOPT"), "{}", built.stderr);
}

/// An error that nobody catches ends the program as it does natively.
#[test]
fn an_uncaught_error_is_told_and_ends_the_program_alike() {
    let home = built_home("templates-ruby-error", &[]);
    let command = r#"["ruby", "app.rb", "--fail"]"#;
    let natively = build(&home, "natively", command, "").stderr;
    let given = build(&home, "given", command, &RUBY.template()).stderr;
    let from = natively.find("with exit code 7").expect("it says how the program ended");
    let expected = natively[from..].trim_end();
    assert!(expected.contains("in `<main>': for nobody to catch (IndexError)"), "{expected}");
    let note = "it cannot be built from its runtime template";
    assert!(given.contains(note) && given.matches(expected).count() == 2, "{given}");
}
