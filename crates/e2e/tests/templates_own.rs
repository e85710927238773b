//! What a program has of its own goes before what a runtime template has: it is built the ordinary
//! way then. And programs that run as other users are built from templates, too.

use serde_json::json;
use std::fs;
use std::path::Path;
use thaw_e2e::mirror::{Mirror, ask, image_of, see_the_same, templates};
use thaw_e2e::{Daemon, DaemonOptions, Outcome, built_home, repository, run, thaw};

const RUBY: Mirror = Mirror {
    language: "ruby",
    files: &["app.rb", "neighbour.rb"],
    packages: &[("gems", "/opt/gems"), ("newer", "/opt/newer"), ("hiding", "/opt/hiding")],
    lines: "",
};

#[test]
fn gems_that_no_template_has_seen_are_found() {
    let home = built_home("templates-own-gems", &[]);
    let gems = format!("{}[env]\nGEM_HOME = \"/opt/gems\"\n", RUBY.template());
    let built = RUBY.build(&home, "given", r#"["ruby", "app.rb"]"#, &gems);
    assert!(!built.stderr.contains("built from"), "{}", built.stderr);
    built.success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let library = "/opt/gems/gems/heavy-1.0.0/lib/heavy.rb";
    assert_eq!(ask(&daemon, "given", "/package"), json!([true, "heavy", [library]]));
}

#[test]
fn a_newer_gem_or_a_file_that_goes_before_is_not_passed_over() {
    let home = built_home("templates-own-newer", &[]);
    let with = |variable: &str| format!("{}[env]\n{variable}\n", RUBY.template());
    let (newer, hiding) = (with("GEM_HOME = \"/opt/newer\""), with("RUBYLIB = \"/opt/hiding\""));
    let script = r#"["ruby", "app.rb"]"#;
    let cases = [
        (script, newer.as_str(), "there is 99.0.0"),
        (script, hiding.as_str(), "there is /opt/hiding/singleton.rb"),
    ];
    RUBY.check_refusals(&home, &cases);
}

/// Builds a Python program of some files.
fn build_python(home: &Path, name: &str, files: &[(&str, &str)], more: &str) -> Outcome {
    let directory = tempfile::tempdir().expect("a directory");
    for (file, text) in files {
        fs::write(directory.path().join(file), text).expect("a file");
    }
    let names: Vec<_> = files.iter().map(|(file, _)| format!("{file:?}")).collect();
    let text = format!(
        "name = \"{name}\"\ncommand = [\"python3\", \"app.py\"]\nport = 8080\nfiles = [{}]\n\
         [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n\
         [template]\nfrom = \"python3\"\n{more}",
        names.join(", ")
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    run(thaw().env("THAW_HOME", home).arg("build").arg(directory.path()))
}

#[test]
fn a_module_beside_the_program_is_not_passed_over() {
    let home = built_home("templates-own-module", &[]);
    let app = "import http.server, json, uuid\n\
               class Handler(http.server.BaseHTTPRequestHandler):\n\
               \x20   def do_GET(self):\n\
               \x20       self.send_response(200)\n\
               \x20       self.end_headers()\n\
               \x20       self.wfile.write(json.dumps(uuid.__file__).encode())\n\
               http.server.HTTPServer((\"\", 8080), Handler).serve_forever()\n";
    let own = ("uuid.py", "# In the place of Python's own.\n");
    // A directory that is no package hides nothing (PEP 420), and data are no module.
    let data = ("logging.txt", "no module\n");
    build_python(&home, "plain", &[("app.py", app), data], "").success();
    assert_eq!(image_of(&home, "plain")["ancestors"].as_array().map(Vec::len), Some(1));
    let built = build_python(&home, "own", &[("app.py", app), own], "");
    let why = "has loaded the module uuid of /usr/lib/python3";
    assert!(built.stderr.contains(why) && built.stderr.contains("one in /app"), "{}", built.stderr);
    built.success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(ask(&daemon, "own", "/"), "/app/uuid.py");
    assert!(ask(&daemon, "plain", "/").as_str().expect("a path").starts_with("/usr/lib/python3"));
}

/// An interpreter of the function's own that goes before the language's.
#[test]
fn the_first_interpreter_in_the_path_is_the_one_that_counts() {
    let home = built_home("templates-own-first", &[]);
    let app = fs::read_to_string(repository().join("tests/guest/functions/mirror/app.py"));
    let app = app.expect("a program");
    let neighbour = ("neighbour.py", "NAME = \"neighbour\"\n");
    let wrapper = ("python3", "#!/bin/sh\nWRAPPED=yes exec /usr/bin/python3 \"$@\"\n");
    let path = "[env]\nPATH = \"/app:/usr/bin:/bin\"\n";
    let files = [("app.py", app.as_str()), neighbour];
    let built = build_python(&home, "without", &files, path);
    assert!(!built.stderr.contains("built from"), "{}", built.stderr);
    built.success();
    // A file that may not be executed is passed over; one that may be is not.
    let built = build_python(&home, "data", &[files[0], files[1], wrapper], path);
    assert!(!built.stderr.contains("built from"), "{}", built.stderr);
    built.success();
    let directory = tempfile::tempdir().expect("a directory");
    let program = directory.path().join("python3");
    fs::write(&program, wrapper.1).expect("a program");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&program, mode).expect("permissions");
    fs::write(directory.path().join("app.py"), &app).expect("a program");
    fs::write(directory.path().join("neighbour.py"), neighbour.1).expect("a module");
    let text = format!(
        "name = \"first\"\ncommand = [\"python3\", \"app.py\"]\nport = 8080\n\
         files = [\"app.py\", \"neighbour.py\", \"python3\"]\n\
         [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\nprograms = [\"sh\"]\n\
         [template]\nfrom = \"python3\"\n{path}"
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    let built = run(thaw().env("THAW_HOME", &home).arg("build").arg(directory.path()));
    assert!(built.stderr.contains("`python3` is not the interpreter"), "{}", built.stderr);
    built.success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(ask(&daemon, "first", "/")["environment"]["WRAPPED"], "yes");
}

/// Builds a program of one language both ways, as `nobody`: it sees the same, and nothing of the
/// bootstrap is left that it may not see.
#[track_caller]
fn check_nobody(home: &Path, mirror: &Mirror, runtime: &str, command: &str) {
    mirror.build(home, "started", command, runtime).success();
    let built = mirror.build(home, "given", command, &format!("{runtime}{}", mirror.template()));
    assert!(!built.stderr.contains("built from"), "{}", built.stderr);
    built.success();
    assert_eq!(templates(home).len(), 1);
    assert_eq!(image_of(home, "given")["ancestors"].as_array().map(Vec::len), Some(1));
    let daemon = Daemon::start(home, &DaemonOptions::default());
    see_the_same(&daemon, "started", "given");
    let ids = ask(&daemon, "given", "/")["ids"].to_string();
    assert!(ids.contains("65534"), "{ids}");
}

const NOBODY: &str = "user = \"nobody\"\n";

#[test]
fn python_runs_as_another_user() {
    let home = built_home("templates-own-python", &[]);
    let python = Mirror {
        language: "python3",
        files: &["app.py", "neighbour.py"],
        packages: &[],
        lines: NOBODY,
    };
    let runtime = "interpreter = \"/usr/bin/python3\"\n";
    check_nobody(&home, &python, runtime, r#"["python3", "app.py"]"#);
}

#[test]
fn ruby_runs_as_another_user() {
    let home = built_home("templates-own-ruby", &[]);
    let ruby = Mirror { packages: &[], lines: NOBODY, ..RUBY };
    check_nobody(&home, &ruby, "", r#"["ruby", "app.rb"]"#);
}

#[test]
fn node_runs_as_another_user() {
    let home = built_home("templates-own-node", &[]);
    let files = &["app.js", "neighbour.js", "package.json"];
    let node = Mirror {
        language: "node",
        files,
        packages: &[("packages", "/app/node_modules")],
        lines: NOBODY,
    };
    check_nobody(&home, &node, "", r#"["node", "app.js", "--threads"]"#);
}

#[test]
fn java_runs_as_another_user() {
    let home = built_home("templates-own-java", &[]);
    let java = Mirror {
        language: "java",
        files: &[],
        packages: &[("java", "/app")],
        lines: "user = \"nobody\"\n[build]\ncommand = [\"make\", \"-C\", \"java\"]\n",
    };
    check_nobody(&home, &java, "", r#"["java", "-cp", "classes", "mirror.App"]"#);
}

#[test]
fn php_runs_as_another_user() {
    let home = built_home("templates-own-php", &[]);
    let php = Mirror { language: "php", files: &[], packages: &[("php", "/app")], lines: NOBODY };
    check_nobody(&home, &php, "", r#"["php", "-S", "0.0.0.0:8080"]"#);
}
