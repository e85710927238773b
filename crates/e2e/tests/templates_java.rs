//! Java functions that are built from a runtime template.

use serde_json::json;
use thaw_e2e::mirror::{Mirror, ask, see_the_same, templates};
use thaw_e2e::{Daemon, DaemonOptions, built_home};

const JAVA: Mirror = Mirror {
    language: "java",
    files: &[],
    packages: &[("java", "/app")],
    lines: "[build]\ncommand = [\"make\", \"-C\", \"java\"]\n",
};
const COMMAND: &str = r#"["java", "-XX:+UseSerialGC", "-cp", "classes:none", "mirror.App"]"#;

#[test]
fn a_main_class_sees_what_it_would_see_without_a_template() {
    let home = built_home("templates-java-class", &[]);
    let command = r#"["java", "-XX:+UseSerialGC", "-Djdk.attach.allowAttachSelf=true", "-ea", "--add-opens",
        "java.base/java.lang=ALL-UNNAMED", "-cp", "classes", "mirror.App", "--flag", "", "ä"]"#;
    let (daemon, name) = JAVA.check(&home, "class", command, "");
    let seen = ask(&daemon, &name, "/");
    assert_eq!(seen["assertions"], json!(true));
    assert!(seen["child"].as_str().expect("text").contains("WHO=somebody"), "{}", seen["child"]);
    for function in ["class-a", "class-b"] {
        assert_eq!(ask(&daemon, function, "/agent"), json!("loaded by app"), "{function}");
    }
}

#[test]
fn an_archive_sees_what_it_would_see_without_a_template() {
    let home = built_home("templates-java-archive", &[]);
    JAVA.check(&home, "archive", r#"["java", "-jar", "-XX:+UseG1GC", "app.jar", "-x"]"#, "");
}

#[test]
fn class_paths_are_those_of_the_launcher() {
    let home = built_home("templates-java-paths", &[]);
    JAVA.check(&home, "wild", r#"["java", "-cp", "none:lib/*::*", "mirror/App"]"#, "");
    let variable = "[env]\nCLASSPATH = \"none:classes\"\n";
    let command = r#"["java", "mirror.App"]"#;
    JAVA.build(&home, "path-a", command, variable).success();
    let given = JAVA.build(&home, "path-b", command, &format!("{}{variable}", JAVA.template()));
    assert!(!given.stderr.contains("built from"), "{}", given.stderr);
    given.success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    see_the_same(&daemon, "path-a", "path-b");
}

#[test]
fn functions_share_a_template_and_draw_other_numbers() {
    let home = built_home("templates-java-shared", &[]);
    JAVA.check_sharing(&home, COMMAND);
}

#[test]
fn each_number_of_arguments_and_each_limit_has_a_template() {
    let home = built_home("templates-java-several", &[]);
    let with = |lines: &str| format!("{}{lines}", JAVA.template());
    let more = COMMAND.replace("\"]", "\", \"more\"]");
    for (name, command, lines) in [
        ("one", COMMAND, ""),
        ("two", more.as_str(), ""),
        ("three", COMMAND, "[limits]\nmemory = \"300MiB\"\n"),
        ("four", COMMAND, "[limits]\ncpu = 2\n"),
        ("five", COMMAND, "[limits]\ntimeout = \"20s\"\n"),
    ] {
        JAVA.build(&home, name, command, &with(lines)).success();
    }
    let auto = JAVA.build(&home, "six", COMMAND, "[template]\nfrom = \"auto\"\n");
    assert!(!auto.stderr.contains("not built from"), "{}", auto.stderr);
    auto.success();
    assert_eq!(templates(&home).len(), 4);
}

#[test]
fn a_program_that_would_notice_is_built_the_ordinary_way_and_says_why() {
    let home = built_home("templates-java-notice", &[]);
    let template = JAVA.template();
    let cases = [
        (
            r#"["java", "-Xlog:disable", "-cp", "classes", "mirror.App"]"#,
            template.as_str(),
            "gets the option -Xlog:disable",
        ),
        (
            r#"["java", "-cp", "classes", "mirror.App", "--refuse-template"]"#,
            template.as_str(),
            "somebody was here before",
        ),
    ];
    JAVA.check_refusals(&home, &cases);
    let options = format!("{template}[env]\nJAVA_TOOL_OPTIONS = \"-Xint\"\n");
    let built = JAVA.build(&home, "options", COMMAND, &options);
    assert!(built.stderr.contains("its environment has JAVA_TOOL_OPTIONS"), "{}", built.stderr);
}

/// An error that nobody catches ends the program as it does natively.
#[test]
fn an_uncaught_error_is_told_and_ends_the_program_alike() {
    let home = built_home("templates-java-error", &[]);
    let command = r#"["java", "-cp", "classes", "mirror.App", "--fail"]"#;
    let natively = JAVA.build(&home, "natively", command, "").stderr;
    let given = JAVA.build(&home, "given", command, &JAVA.template()).stderr;
    let told = |text: &str| {
        let from = text.find("with exit code 1").expect("it says how the program ended");
        let said = text[from..].lines().take(3).map(str::trim).collect::<Vec<_>>().join("\n");
        said.split("); it is started from nothing").next().expect("a part").to_owned()
    };
    let expected = told(&natively);
    assert!(expected.contains("IllegalArgumentException: for nobody to catch"), "{expected}");
    assert_eq!(told(&given), expected);
}
