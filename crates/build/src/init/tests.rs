//! What is found in directories of each kind.

use super::*;
use std::fs;
use tempfile::TempDir;
use thaw_home::config::{FileEntry, RuntimeKind};

/// A directory `shop` with these files.
fn directory(files: &[(&str, &str)]) -> (TempDir, PathBuf) {
    let all = tempfile::tempdir().unwrap();
    let directory = all.path().join("shop");
    fs::create_dir(&directory).unwrap();
    for (name, text) in files {
        let path = directory.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    (all, directory)
}

fn found(files: &[(&str, &str)]) -> Project {
    let (_all, directory) = directory(files);
    detect(&directory, None, None).unwrap()
}

fn refused(files: &[(&str, &str)]) -> String {
    let (_all, directory) = directory(files);
    detect(&directory, None, None).unwrap_err().to_string()
}

fn build(project: &Project) -> String {
    project.build.as_ref().map_or_else(String::new, |build| build.command.join(" "))
}

/// What a build makes of the text that is written.
fn parsed(project: &Project) -> FunctionConfig {
    FunctionConfig::parse(Path::new(CONFIG_FILE), &project.to_toml()).unwrap()
}

#[test]
fn flask_is_served_by_gunicorn_if_it_is_there() {
    let app = ("app.py", "from flask import Flask\napp = Flask(__name__)\napp.run(port=5000)\n");
    let project = found(&[app, ("requirements.txt", "Flask==3.0 # web\ngunicorn>=20\n")]);
    assert_eq!(project.language, Language::Python);
    assert_eq!(
        project.command.join(" "),
        "python3 -m gunicorn --bind 0.0.0.0:8080 --workers 1 app:app"
    );
    let config = parsed(&project);
    let runtime = config.runtime.unwrap();
    assert_eq!(runtime.kind, RuntimeKind::Python3);
    assert_eq!(runtime.requirements.unwrap(), Path::new("requirements.txt"));
    let project = found(&[app, ("requirements.txt", "flask\n")]);
    assert!(project.command.join(" ").starts_with("python3 -m flask --app app:app run"));
    assert!(project.notes[0].contains("gunicorn"), "{:?}", project.notes);
}

/// The command that is written, without what is the same in all.
fn served(files: &[(&str, &str)]) -> String {
    let command = found(files).command.join(" ");
    let command = command.replace("--bind 0.0.0.0:8080 --workers 1 ", "");
    command.replace("--host 0.0.0.0 --port 8080", "…")
}

#[test]
fn what_makes_an_application_is_found() {
    let both = ("requirements.txt", "-r base.txt\n");
    let base = ("base.txt", "flask==3.1.0\ngunicorn\n");
    let factory = "from flask import Flask\ndef create_app():\n    return Flask(__name__)\n";
    let wsgi = ("wsgi.py", "from shop import create_app\n\napp = create_app()\n");
    let package = ("shop/__init__.py", factory);
    assert_eq!(served(&[wsgi, package, both, base]), "python3 -m gunicorn wsgi:app");
    let imports = ("wsgi.py", "from shop import app as application\n");
    assert_eq!(served(&[imports, package, both, base]), "python3 -m gunicorn wsgi:application");
    let app = ("app.py", factory);
    assert_eq!(served(&[app, both, base]), "python3 -m gunicorn app:create_app()");
    let flask = ("requirements.txt", "flask\n");
    assert_eq!(served(&[app, flask]), "python3 -m flask --app app run …");
    assert_eq!(served(&[package, both, base]), "python3 -m gunicorn shop:create_app()");
    assert_eq!(served(&[package, flask]), "python3 -m flask --app shop run …");
    let typed = "def make_app(config: dict | None = None) -> Flask:\n    return Flask('x')\n";
    assert_eq!(served(&[("app.py", typed), both, base]), "python3 -m gunicorn app:make_app()");
    // It cannot be called without arguments.
    let wants = ("app.py", "def create_app(config):\n    return Flask('x')\n");
    assert_eq!(served(&[wants, both, base]), "python3 app.py");
    // Those of tests are none.
    let main = ("main.py", "print(1)\n");
    assert_eq!(served(&[main, ("tests/app.py", factory), both, base]), "python3 main.py");
}

#[test]
fn applications_in_packages_are_found() {
    let all = ("requirements.txt", "fastapi[standard]\n");
    let main = "from fastapi import FastAPI\napp = FastAPI()\n";
    let command = served(&[("app/__init__.py", ""), ("app/main.py", main), all]);
    assert_eq!(command, "python3 -m uvicorn … app.main:app");
    let starts = ("main.py", "import uvicorn\nuvicorn.run('app.main:app', port=9000)\n");
    let project = found(&[starts, ("app/main.py", main), all]);
    assert_eq!((project.command.join(" ").as_str(), project.port), ("python3 main.py", 9000));
    let factory = "def create_app():\n    return FastAPI()\n";
    assert_eq!(
        served(&[("main.py", factory), all]),
        "python3 -m uvicorn … --factory main:create_app"
    );
    let toml = ("pyproject.toml", "[project]\nname = \"x\"\ndependencies = [\"fastapi\"]\n");
    let project = found(&[("src/shop/main.py", main), toml]);
    assert_eq!(project.command.last().unwrap(), "shop.main:app");
    assert_eq!(parsed(&project).env["PYTHONPATH"], "/app/src");
    let error = refused(&[toml, ("src/shop/__init__.py", "")]);
    assert!(error.contains("pyproject.toml: no program is beside it"), "{error}");
    assert!(error.contains("wsgi.py") && error.contains("run.py"), "{error}");
}

#[test]
fn a_procfile_says_what_is_served() {
    let all = ("requirements.txt", "flask\ngunicorn\nuvicorn\n");
    let app = ("shop/web.py", "application = make()\n");
    let by = |line: &str| {
        let text = format!("release: x\nweb: {line}\n");
        served(&[("Procfile", &text), all, app, ("main.py", "")])
    };
    assert_eq!(by("gunicorn --preload shop.web:app"), "python3 -m gunicorn shop.web:app");
    assert_eq!(
        by("A=b gunicorn shop.web --log-file -"),
        "python3 -m gunicorn shop.web:application"
    );
    assert_eq!(
        by("gunicorn -k uvicorn.workers.UvicornWorker -b 0.0.0.0:$PORT shop.web:app"),
        "python3 -m gunicorn --worker-class uvicorn.workers.UvicornWorker shop.web:app"
    );
    assert_eq!(by("gunicorn --name main shop.web"), "python3 -m gunicorn shop.web:application");
    assert_eq!(by("gunicorn -k $WORKER shop.web:app"), "python3 -m gunicorn shop.web:app");
    for line in
        ["gunicorn none:app", "cd x && gunicorn shop.web:app", "waitress-serve shop.web:app"]
    {
        assert_eq!(by(line), "python3 main.py", "{line}");
    }
    let fast = ("requirements.txt", "fastapi\nuvicorn\n");
    let line = ("Procfile", "web: uvicorn shop.web:api --port $PORT\n");
    assert_eq!(served(&[line, fast, app]), "python3 -m uvicorn … shop.web:api");
}

#[test]
fn applications_of_asgi_are_served_by_uvicorn() {
    let main = ("main.py", "import fastapi\napi: fastapi.FastAPI = fastapi.FastAPI()\n");
    let toml = "[project]\nname = \"x\"\ndependencies = [\"fastapi[standard]\"]\n";
    let project = found(&[main, ("pyproject.toml", toml)]);
    assert!(project.command.ends_with(&["main:api".to_owned()]), "{:?}", project.command);
    assert!(project.notes.is_empty(), "{:?}", project.notes);
    let config = parsed(&project);
    assert_eq!(config.runtime.unwrap().requirements.unwrap(), Path::new("pyproject.toml"));
    let toml = "[tool.poetry.dependencies]\npython = \"^3.9\"\n\
                fastapi = {version = \"^0.115\", extras = [\"standard\"]}\n";
    let project = found(&[main, ("pyproject.toml", toml), ("pdm.lock", "")]);
    assert!(project.command.ends_with(&["main:api".to_owned()]), "{:?}", project.command);
    assert!(project.notes.len() == 1 && project.notes[0].contains("pdm export"), "{project:?}");
    let toml = "[tool.poetry.dependencies]\nx = {git = \"https://example.org\"}\n";
    let error = refused(&[main, ("pyproject.toml", toml)]);
    assert!(error.contains("poetry export"), "{error}");
}

/// A lock file is named, and what it locks counts as a dependency.
#[test]
fn a_lock_file_says_what_is_installed() {
    let app = ("app.py", "from flask import Flask\napp = Flask(__name__)\n");
    let toml = ("pyproject.toml", "[project]\nname = \"x\"\ndependencies = [\"gunicorn\"]\n");
    let lock = |index: &str| {
        format!(
            "version = 1\n[[package]]\nname = \"x\"\nsource = {{ virtual = \".\" }}\n\
             dependencies = [{{ name = \"gunicorn\" }}]\nmetadata.requires-dist = [{{ name = \"gunicorn\" }}]\n\
             [[package]]\nname = \"gunicorn\"\nversion = \"23.0.0\"\n\
             source = {{ registry = \"https://{index}/simple\" }}\nsdist = {{ hash = \"sha256:{}\" }}\n",
            "0".repeat(64)
        )
    };
    let project = found(&[app, toml, ("uv.lock", &lock("pypi.org")), ("poetry.lock", "")]);
    assert_eq!(project.command[2], "gunicorn");
    assert!(project.notes.is_empty() && project.build.is_none(), "{project:?}");
    let requirements = parsed(&project).runtime.unwrap().requirements.unwrap();
    assert_eq!(requirements, Path::new("uv.lock"));
    let project = found(&[app, toml, ("uv.lock", &lock("index.example"))]);
    let config = parsed(&project);
    assert_eq!(config.build.unwrap().egress[0].to_string(), "index.example:443");
    assert!(project.to_toml().contains("# Where pip gets the packages. See docs/building.md.\n"));
    let error = refused(&[app, toml, ("poetry.lock", "")]);
    assert!(error.contains("poetry.lock: "), "{error}");
    // A requirements.txt is asked first.
    let project = found(&[app, ("requirements.txt", "flask\n"), toml, ("poetry.lock", "")]);
    assert_eq!(project.found[0], "requirements.txt");
}

#[test]
fn a_plain_program_is_run_where_it_listens() {
    let project = found(&[("serve.py", "HTTPServer(('', 9001), H).serve_forever()\n")]);
    assert_eq!(project.command, ["python3", "serve.py"]);
    assert_eq!((project.port, project.port_from.as_str()), (9001, "found in serve.py"));
    let error = refused(&[("requirements.txt", "x\n"), ("a.py", ""), ("b.py", "")]);
    assert!(error.contains("not a single file"), "{error}");
}

#[test]
fn a_site_of_django_is_found() {
    let files =
        [("manage.py", ""), ("shop/wsgi.py", ""), ("requirements.txt", "django\ngunicorn\n")];
    let project = found(&files);
    assert!(project.command.ends_with(&["shop.wsgi:application".to_owned()]));
}

#[test]
fn a_package_is_started_by_its_script() {
    let json = r#"{"scripts": {"start": "LEVEL=2 node server.js --fast"},
        "dependencies": {"express": "4"}}"#;
    let project = found(&[
        ("package.json", json),
        ("package-lock.json", "{}"),
        ("server.js", "app.listen(3000)"),
    ]);
    assert_eq!(project.command, ["node", "server.js", "--fast"]);
    assert_eq!(project.port, 3000);
    assert!(build(&project).starts_with("npm ci --omit=dev"));
    let config = parsed(&project);
    assert_eq!(config.env["LEVEL"], "2");
    assert_eq!(config.build.unwrap().egress.len(), 1);
}

/// With each lock file the program that has written it installs.
#[test]
fn the_lock_file_says_who_installs_packages() {
    let installed = |manager: &str, files: &[(&str, &str)]| {
        let json = format!(
            r#"{{{manager}"scripts": {{"start": "node a.js"}}, "dependencies": {{"x": "1"}}}}"#
        );
        let all = [&[("package.json", json.as_str()), ("a.js", "")], files].concat();
        build(&found(&all))
    };
    let pnpm = ("pnpm-lock.yaml", "lockfileVersion: '6.0'\n");
    let hoisted = "install --frozen-lockfile --config.node-linker=hoisted --prod";
    assert_eq!(installed("", &[pnpm]), format!("npx --yes pnpm@8 {hoisted}"));
    let named = r#""packageManager": "pnpm@9.1.0+sha512.ab", "#;
    assert_eq!(installed(named, &[pnpm]), format!("npx --yes pnpm@9.1.0 {hoisted}"));
    let classic = ("yarn.lock", "# yarn lockfile v1\n");
    let frozen = "npx --yes yarn@1.22.22 install --frozen-lockfile --non-interactive --production";
    assert_eq!(installed("", &[classic]), frozen);
    let berry = ("yarn.lock", "__metadata:\n  version: 8\n");
    let line =
        "sh -c YARN_NODE_LINKER=node-modules npx --yes @yarnpkg/cli-dist@4.2.1 install --immutable";
    assert_eq!(installed(r#""packageManager": "yarn@4.2.1", "#, &[berry]), line);
    // What is no version is not run.
    for wrong in ["pnpm@9; id", "pnpm@latest", "npm@9", "pnpm"] {
        let named = format!(r#""packageManager": "{wrong}", "#);
        assert_eq!(installed(&named, &[pnpm]), format!("npx --yes pnpm@8 {hoisted}"), "{wrong}");
    }
    let npm = ("package-lock.json", "{}");
    assert!(installed("", &[npm, pnpm]).starts_with("npm ci"));
    let json = r#"{"main": "a.js", "scripts": {"build": "tsc"}}"#;
    let project = found(&[("package.json", json), ("a.js", ""), pnpm]);
    let line = "npx --yes pnpm@8 install --frozen-lockfile --config.node-linker=hoisted && npx --yes pnpm@8 run build";
    assert_eq!(build(&project), format!("sh -c {line}"));
}

/// What starts the program is installed, though it is for development.
#[test]
fn a_tool_of_the_start_script_is_installed() {
    let installed = |start: &str, rest: &str, lock: (&str, &str)| {
        let json = format!(r#"{{"scripts": {{"start": "{start}"}}, {rest}}}"#);
        let project = found(&[("package.json", &json), ("src/index.ts", ""), lock]);
        (build(&project), project.notes.join(" "))
    };
    let npm = ("package-lock.json", "{}");
    let tsx = r#""dependencies": {"x": "1"}, "devDependencies": {"tsx": "4", "vitest": "2"}"#;
    for start in ["tsx src/index.ts", "node --import tsx a.ts", "node --import=tsx/esm a.ts"] {
        let (line, note) = installed(start, tsx, npm);
        assert_eq!(line, "npm ci --no-audit --no-fund", "{start}");
        assert!(note.contains("started by tsx"), "{note}");
    }
    let alone = r#""devDependencies": {"@nestjs/cli": "10"}"#;
    let pnpm = ("pnpm-lock.yaml", "lockfileVersion: '9.0'\n");
    let (line, _) = installed("nest start", alone, pnpm);
    assert_eq!(line, "npx --yes pnpm@9 install --frozen-lockfile --config.node-linker=hoisted");
    let (line, note) = installed("node tsx.js", tsx, npm);
    assert_eq!((line.as_str(), note.as_str()), ("npm ci --omit=dev --no-audit --no-fund", ""));
    let both = r#""dependencies": {"tsx": "1"}, "devDependencies": {"tsx": "4"}"#;
    assert!(installed("tsx src/index.ts", both, npm).0.contains("--omit=dev"));
}

#[test]
fn a_package_without_a_usable_script_has_its_main() {
    let json = r#"{"main": "lib.js", "scripts": {"start": "a && b", "build": "tsc"}}"#;
    let project = found(&[("package.json", json), ("lib.js", "")]);
    assert_eq!(project.command, ["node", "lib.js"]);
    assert!(project.notes[0].contains("needs a shell"));
    assert_eq!(build(&project), "sh -c npm install && npm run build");
    let error = refused(&[("package.json", "{}")]);
    assert!(error.contains("no start script"), "{error}");
    let json = r#"{"scripts": {"start": "deno task serve"}}"#;
    let error = refused(&[("package.json", json)]);
    assert!(error.contains("its start script `deno task serve` needs a shell or"), "{error}");
    let error = refused(&[("package.json", "{")]);
    assert!(error.contains("package.json: "), "{error}");
}

#[test]
fn a_file_that_bun_runs_is_a_program_of_its_own() {
    let json = r#"{"scripts": {"start": "bun run src/index.ts"}, "dependencies": {"hono": "4"}}"#;
    let source = ("src/index.ts", "Bun.serve({ port: 3000, fetch: f });\n");
    let project = found(&[("package.json", json), source, ("bun.lock", "{}")]);
    assert_eq!((project.kind, project.port), ("binary", 3000));
    assert!(project.command[0].contains("bun"), "{:?}", project.command);
    assert_eq!(project.command[1..], ["src/index.ts"]);
    assert!(build(&project).starts_with("npm install"), "{}", build(&project));
}

#[test]
fn modules_of_go_are_compiled() {
    let main = "package main\nfunc main() { http.ListenAndServe(\":9090\", nil) }\n";
    let project = found(&[("go.mod", "module x\nrequire y v1\n"), ("main.go", main)]);
    assert_eq!(build(&project), "env CGO_ENABLED=0 go build -o build/server .");
    assert_eq!(project.port, 9090);
    assert_eq!(project.build.as_ref().unwrap().egress.len(), 2);
    let files = [
        ("go.mod", "module x\n"),
        ("cmd/a/m.go", main),
        ("cmd/b/m.go", main),
        ("x.go", "package x"),
    ];
    let project = found(&files);
    assert!(build(&project).ends_with("./cmd/a"));
    assert!(project.notes[0].contains("./cmd/b"));
    assert!(project.build.unwrap().egress.is_empty());
    assert!(refused(&[("go.mod", "module x\n")]).contains("no `package main`"));
}

#[test]
fn maven_makes_an_archive_and_its_libraries() {
    let pom = "<project><artifactId>a</artifactId><version>1</version></project>";
    let main = "package x.y;\nclass M { public static void main(String[] a) {} }";
    let project = found(&[("pom.xml", pom), ("src/main/java/x/y/M.java", main)]);
    assert_eq!(project.command, ["java", "-cp", "/app/app.jar:/app/lib/*", "x.y.M"]);
    let config = parsed(&project);
    assert_eq!(
        config.files[0],
        FileEntry { from: "target/a-1.jar".into(), to: Some("/app/app.jar".into()) }
    );
    assert!(build(&project).contains("dependency:copy-dependencies"));
    assert!(refused(&[("pom.xml", pom)]).contains("no class below src/main/java"));
}

#[test]
fn gradle_makes_archives() {
    let main = (
        "src/main/java/x/y/M.java",
        "class M { public static void main(String[] a) { s(9090); } }",
    );
    let application = "plugins { id 'application' }\ndependencies { implementation 'a:b:1' }\n";
    let project = found(&[("build.gradle", application), main]);
    assert_eq!(project.command, ["java", "-cp", "/app/lib/*", "x.y.M"]);
    assert_eq!(
        parsed(&project).files[0],
        FileEntry { from: "build/app-lib".into(), to: Some("/app/lib".into()) }
    );
    assert!(build(&project).contains(" gradle --no-daemon --quiet installDist && "), "{project:?}");
    assert_eq!(project.build.as_ref().unwrap().egress, ["repo.maven.apache.org:443"]);
    // As `gradle init` makes it.
    let kotlin = "plugins {\n    application\n    alias(libs.plugins.x)\n}\n\
                  application {\n    mainClass.set(\"a.B\")\n}\n";
    let files = [
        ("settings.gradle.kts", "rootProject.name = \"shop\"\ninclude(\"app\", \"lib\")\n"),
        ("app/build.gradle.kts", kotlin),
        ("lib/build.gradle.kts", "plugins { `java-library` }"),
        ("gradlew", "#!/bin/sh\n"),
    ];
    let project = found(&files);
    assert_eq!(project.command[3], "a.B");
    let line = build(&project);
    assert!(line.contains(" sh ./gradlew --no-daemon --quiet :app:installDist && "), "{line}");
    assert!(line.ends_with("cp -r app/build/install/*/lib build/app-lib"), "{line}");
    let egress = project.build.unwrap().egress;
    assert!(egress.contains(&"services.gradle.org:443".to_owned()), "{egress:?}");
    assert!(egress.contains(&"plugins.gradle.org:443".to_owned()), "{egress:?}");
    let mirror = (
        "gradle/wrapper/gradle-wrapper.properties",
        "distributionUrl=https\\://mirror.example/g.zip\n",
    );
    let egress = found(&[&files[..], &[mirror]].concat()).build.unwrap().egress;
    assert!(egress.contains(&"mirror.example:443".to_owned()), "{egress:?}");
    assert!(!egress.contains(&"services.gradle.org:443".to_owned()), "{egress:?}");
    let boot = "plugins {\n id 'java'\n id 'org.springframework.boot' version '3.4.0'\n}\n";
    let settings = ("src/main/resources/application.properties", "server.port=8085\n");
    let project = found(&[("build.gradle", boot), settings]);
    assert_eq!(project.command, ["java", "-jar", "/app/app.jar", "--server.port=8085"]);
    assert!(
        build(&project)
            .ends_with("bootJar && mkdir -p build && cp -r build/libs/*.jar build/app.jar")
    );
    assert!(project.build.unwrap().egress.contains(&"plugins.gradle.org:443".to_owned()));
    let java = "apply plugin: 'java'\ngroup 'a'\nversion '1'\n";
    let project = found(&[("build.gradle", java), main]);
    assert_eq!(project.build.as_ref().unwrap().egress, ["repo.maven.apache.org:443"]);
    assert_eq!(project.command, ["java", "-cp", "/app/app.jar", "x.y.M"]);
}

#[test]
fn projects_of_gradle_that_do_not_serve_are_said() {
    let error = refused(&[("build.gradle", "plugins { id 'application' }\n")]);
    assert!(error.contains("names no main class"), "{error}");
    let java = "plugins { id 'java' }\ndependencies {\n    implementation 'a:b:1'\n}\n";
    assert!(refused(&[("build.gradle", java)]).contains("add the plugin `application`"));
    let kotlin = "plugins { kotlin(\"jvm\") version \"2.0\"\n }\n";
    assert!(refused(&[("build.gradle.kts", kotlin)]).contains("add the plugin `application`"));
    assert!(refused(&[("build.gradle", "// id 'application'\n")]).contains("applies none of"));
    let application = "plugins { id 'application' }\n";
    let settings = ("settings.gradle", "include 'a', 'b'\n");
    assert!(refused(&[settings]).contains("none of the projects"));
    let two = [settings, ("a/build.gradle", application), ("b/build.gradle", application)];
    assert!(refused(&two).contains("2 of the projects"));
}

#[test]
fn rack_needs_a_server() {
    let project =
        found(&[("config.ru", "run App"), ("Gemfile", "gem 'sinatra'\ngem \"puma\", '~> 6'\n")]);
    assert_eq!(project.command[..2], ["ruby", "vendor/gems/bin/puma"]);
    assert!(build(&project).starts_with("gem install"));
    assert_eq!(parsed(&project).env["GEM_HOME"], "/app/vendor/gems");
    assert!(refused(&[("config.ru", ""), ("Gemfile", "gem 'rack'\n")]).contains("names no puma"));
}

#[test]
fn php_crates_and_programs_are_found() {
    let composer = r#"{"require": {"php": ">=8", "slim/slim": "4"}}"#;
    let project = found(&[("composer.json", composer), ("public/index.php", "<?php")]);
    assert_eq!(project.command.join(" "), "php -S 0.0.0.0:8080 -t public public/index.php");
    assert!(build(&project).starts_with("composer install"));
    // Files beside it are answered as they are.
    let project = found(&[("index.php", "<?php"), ("logo.svg", "<svg/>")]);
    assert_eq!(project.command.join(" "), "php -S 0.0.0.0:8080");
    let cargo = "[package]\nname = \"srv\"\n[dependencies]\naxum = \"0.8\"\n";
    let project = found(&[("Cargo.toml", cargo), ("src/main.rs", "fn main() {}")]);
    assert_eq!(project.files[0].from, "build/release/srv");
    assert!(refused(&[("Cargo.toml", cargo)]).contains("no program"));
    let (_all, place) = directory(&[]);
    fs::copy("/proc/self/exe", place.join("server")).unwrap();
    let project = detect(&place, None, None).unwrap();
    assert_eq!((project.language, &project.command[0][..]), (Language::Binary, "/app/server"));
}

#[test]
fn programs_in_c_and_cpp_are_made_as_they_say() {
    let main = "int main() { a.sin_port = htons(9002); }\n";
    let place = |project: &Project| project.files[0].from.clone();
    let project = found(&[("serve.cc", main)]);
    assert_eq!((project.language, project.port), (Language::Cpp, 9002));
    assert_eq!(build(&project), "c++ -O2 -static -o server serve.cc");
    // Of several files, only one is compiled without somebody who says how.
    assert!(refused(&[("a.c", main), ("b.c", "")]).contains("no CMakeLists.txt or Makefile with"));
    let makefile = ("Makefile", "all: web\nweb: src/a.c src/b.c\n\tcc -o web src/*.c\n");
    let project = found(&[makefile, ("src/a.c", main), ("src/b.c", "")]);
    assert_eq!((project.language, project.port), (Language::C, 9002));
    assert_eq!((build(&project), place(&project)), ("make".to_owned(), "web".to_owned()));
    assert!(project.notes.iter().any(|note| note.contains("web is taken for the server")));
    let project = found(&[("Makefile", "X = 1\n"), ("a.c", main), ("b.cpp", "")]);
    assert_eq!((project.language, place(&project)), (Language::Cpp, "shop".to_owned()));
    assert!(project.notes.iter().any(|note| note.contains("shop is guessed to be the server")));
    let cmake =
        "project(web CXX)\nadd_executable(web_test t.cpp)\nadd_executable(web src/main.cpp)\n";
    let project = found(&[("CMakeLists.txt", cmake), makefile, ("src/main.cpp", main)]);
    assert_eq!((project.language, place(&project)), (Language::Cpp, "build/web".to_owned()));
    assert!(build(&project).contains("cmake --build build"), "{project:?}");
    let config = parsed(&project);
    assert_eq!(config.runtime.unwrap().kind, RuntimeKind::Binary);
    let above = ("CMakeLists.txt", "add_subdirectory(src)\n");
    let inside = ("src/CMakeLists.txt", "add_executable(web main.cpp)\n");
    assert_eq!(place(&found(&[above, inside, ("src/main.cpp", main)])), "build/src/web");
    // A makefile alone may be for anything.
    assert!(refused(&[makefile]).contains("found no program"));
    assert_eq!(found(&[makefile, ("app.py", "")]).language, Language::Python);
}

#[test]
fn a_recipe_of_an_image_alone_has_a_way_on() {
    let error = refused(&[("Containerfile", "FROM debian:12\n"), ("Makefile", "all: image\n")]);
    let way = "docker build -t shop . && docker save -o shop.tar shop && thaw import shop.tar shop";
    assert!(error.contains("but a Containerfile") && error.contains(way), "{error}");
    // What it says to write is enough.
    let text = "name = \"shop\"\n[runtime]\nimage = \"shop\"\n";
    FunctionConfig::parse(Path::new(CONFIG_FILE), text).unwrap();
    for line in text.lines() {
        assert!(error.contains(&format!("`{line}`")), "{error}");
    }
    let project = found(&[("Dockerfile", ""), ("app.js", "")]);
    assert!(project.notes.iter().any(|note| note.contains("there is a Dockerfile, too")));
}

#[test]
fn a_file_name_is_no_line_of_the_configuration() {
    let (_all, place) = directory(&[("package.json", "{\"main\": \"a\\n[x]\\n.js\"}")]);
    fs::write(place.join("a\n[x]\n.js"), "http.createServer(f).listen(3000)").unwrap();
    let text = detect(&place, None, None).unwrap().to_toml();
    assert!(text.contains("port = 3000  # found in a [x] .js\n"), "{text}");
}

#[test]
fn a_start_script_may_say_the_port_and_npm_is_no_package() {
    let script = |start: &str| format!("{{\"scripts\": {{\"start\": \"{start}\"}}}}");
    let package = script("PORT=4000 node app.js");
    let project = found(&[("package.json", &package), ("app.js", "x.listen(3000)")]);
    assert_eq!((project.port, project.command.join(" ")), (4000, "node app.js".to_owned()));
    let package = script("npm run serve");
    let project = found(&[("package.json", &package), ("app.js", "")]);
    assert_eq!(project.command.join(" "), "node app.js");
    assert!(project.notes[0].contains("needs a shell"), "{:?}", project.notes);
}

#[test]
fn two_ports_are_no_answer() {
    let project = found(&[("app.js", "a.listen(3000); b.listen(4000)"), ("package.json", "{}")]);
    assert_eq!(project.port, 8080);
    assert!(project.notes.iter().any(|note| note.contains("3000, 4000")), "{:?}", project.notes);
}

#[test]
fn a_language_can_be_chosen_where_there_are_two() {
    let files = [
        ("go.mod", "module x\n"),
        ("main.go", "package main"),
        ("package.json", "{}"),
        ("app.js", ""),
    ];
    let (_all, place) = directory(&files);
    let project = detect(&place, None, None).unwrap();
    assert_eq!(project.language, Language::Go);
    let says_how = |note: &String| note.contains("thaw init --language node");
    assert!(project.notes.iter().any(says_how), "{:?}", project.notes);
    assert_eq!(detect(&place, Some(Language::Node), None).unwrap().command, ["node", "app.js"]);
}

#[test]
fn nothing_is_replaced_unasked() {
    let (_all, place) = directory(&[("app.js", "")]);
    let project = detect(&place, None, None).unwrap();
    let path = write(&place, &project, Replace::No).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    assert!(matches!(write(&place, &project, Replace::No), Err(InitError::Exists(_))));
    // A link leads nowhere.
    let victim = place.join("victim");
    fs::write(&victim, "mine").unwrap();
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(&victim, &path).unwrap();
    write(&place, &project, Replace::Yes).unwrap();
    assert_eq!(fs::read_to_string(&victim).unwrap(), "mine");
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
    assert_eq!(FunctionConfig::load(&place).unwrap().name.as_str(), "shop");
}

#[test]
fn what_a_directory_says_cannot_leave_its_place_in_the_text() {
    let json = "{\"scripts\": {\"start\": \"node x.js\\u000a[egress]\"}, \"main\": \"x.js\"}";
    let project = found(&[("package.json", json), ("x.js", "")]);
    assert_eq!(parsed(&project).command, ["node", "x.js"]);
    let (_all, place) = directory(&[("ab\"]\nc.py", "")]);
    let project = detect(&place, None, None).unwrap();
    assert_eq!(parsed(&project).command[1], "ab\"]\nc.py");
}

#[test]
fn directories_without_a_program_or_a_name_are_refused() {
    assert!(refused(&[("README", "")]).contains("--template LANGUAGE NAME"));
    assert!(matches!(detect(Path::new("/nowhere"), None, None), Err(InitError::NoDirectory(_))));
    let all = tempfile::tempdir().unwrap();
    let place = all.path().join("___");
    fs::create_dir(&place).unwrap();
    fs::write(place.join("app.js"), "").unwrap();
    assert!(detect(&place, None, None).unwrap_err().to_string().contains("--name"));
    let name = "fine".parse().unwrap();
    assert_eq!(detect(&place, None, Some(&name)).unwrap().name, "fine");
    assert_eq!(name_of(Path::new("/x/My_Shop.2")).unwrap(), "my-shop-2");
}

#[test]
fn every_starter_is_understood() {
    for starter in Starter::ALL {
        let (_all, place) = directory(&[]);
        make_starter(&place, starter).unwrap();
        let project = detect(&place, None, None).unwrap();
        assert_eq!(project.language, starter.language());
        assert_eq!(project.port, 8080, "{project:?}");
        parsed(&project);
        assert!(matches!(make_starter(&place, starter), Err(InitError::NotEmpty(_))));
    }
}

#[test]
fn a_compiled_program_has_the_directories_that_it_reads() {
    let main = ("main.go", "package main\nfunc main() {}\n");
    let module = ("go.mod", "module x\n");
    let project = found(&[main, module, ("templates/a.html", ""), ("internal/b.go", "")]);
    let files: Vec<_> =
        project.files.iter().map(|file| (file.from.as_str(), file.to.as_str())).collect();
    assert_eq!(files, [("build/server", "/app/server"), ("templates", "/app/templates")]);
    assert!(project.notes[0].contains("the program and templates; add"), "{:?}", project.notes);
    parsed(&project);
    let app = ("app.py", "print(1)\n");
    let project = found(&[app, ("templates/a.html", "")]);
    assert!(project.files.is_empty() && project.notes.is_empty(), "{project:?}");
}

#[test]
fn plack_is_served_by_starman_or_plackup() {
    let project = found(&[("app.psgi", "sub {}"), ("lib/Shop.pm", "1;")]);
    assert_eq!(project.language, Language::Perl);
    let command = project.command.join(" ");
    assert!(command.starts_with("perl /") && command.ends_with(" app.psgi"), "{command}");
    assert!(command.contains("starman") || command.contains("plackup"), "{command}");
    let config = parsed(&project);
    assert_eq!(config.env["PERL5LIB"], "/app/lib");
    assert_eq!(config.runtime.unwrap().programs.len(), 1);
}

#[test]
fn programs_of_deno_are_run_as_their_task_says() {
    let main = ("main.ts", "Deno.serve(() => new Response('x'));\n");
    let task = "{\"tasks\": {\"start\": \"deno run --watch --allow-net main.ts\"}}";
    // A package.json beside it is for tools.
    let project = found(&[("deno.json", task), main, ("package.json", "{}")]);
    assert_eq!((project.language, project.port), (Language::Deno, 8000));
    assert_eq!(project.command[1..].join(" "), "run --allow-net main.ts");
    assert_eq!(build(&project), "");
    let hono =
        ("main.ts", "import { Hono } from 'npm:hono@4';\nDeno.serve({ port: 9000 }, app.fetch);\n");
    let project = found(&[("deno.jsonc", "{}"), hono]);
    assert_eq!(project.port, 9000);
    assert!(build(&project).ends_with("--entrypoint main.ts"), "{}", build(&project));
    assert!(project.command.contains(&"--cached-only".to_owned()), "{:?}", project.command);
    assert_eq!(project.build.as_ref().unwrap().egress, ["registry.npmjs.org:443"]);
    let served = found(&[("deno.json", "{}"), ("main.ts", "export default { fetch() {} };\n")]);
    assert_eq!(served.command[1..4].join(" "), "serve --host=0.0.0.0 --port=8080");
    let error = refused(&[("deno.json", "{}")]);
    assert!(error.contains("no task `start`"), "{error}");
}

#[test]
fn projects_of_mix_are_released() {
    let mix = |deps: &str| format!("def project do\n [app: :my_shop, deps: [{deps}]]\nend\n");
    let config =
        ("config/runtime.exs", "port = String.to_integer(System.get_env(\"PORT\") || \"4000\")\n");
    let plain = mix("# {:plug, \"~> 1.0\"}\n");
    let project = found(&[("mix.exs", &plain), config]);
    assert_eq!((project.language, project.port), (Language::Elixir, 8080));
    assert_eq!(project.command, ["/app/bin/my_shop", "start"]);
    assert_eq!(build(&project), "env MIX_ENV=prod mix release --overwrite");
    assert_eq!(parsed(&project).env["ERL_FLAGS"], "+c false");
    let phoenix = mix("{:phoenix, \"~> 1.7\"}");
    let project = found(&[("mix.exs", &phoenix)]);
    assert!(build(&project).contains("mix deps.get --only prod"), "{}", build(&project));
    assert_eq!(parsed(&project).env["PHX_SERVER"], "true");
}

#[test]
fn a_configuration_of_nginx_says_where_it_listens() {
    let conf = ("nginx.conf", "events {}\nhttp { server { listen 8081; root /srv/none; } }\n");
    let project = found(&[conf]);
    assert_eq!((project.language, project.port), (Language::Nginx, 8081));
    assert_eq!(project.command.last().unwrap(), "daemon off; pid /tmp/nginx.pid;");
    assert!(project.notes.iter().any(|note| note.contains("/srv/none")), "{:?}", project.notes);
    let own = ("nginx.conf", "daemon off; pid /x;\nevents {}\n");
    assert_eq!(found(&[own]).command.last().unwrap(), "/app/nginx.conf");
    // One in front of a program is not the program.
    assert_eq!(found(&[conf, ("app.py", "")]).language, Language::Python);
    let error = refused(&[("nginx.conf", "server { listen 80; }")]);
    assert!(error.contains("no block `events`"), "{error}");
}

#[test]
fn what_was_known_before_is_not_taken_by_others() {
    let (_all, directory) = directory(&[("nginx.conf", "events {}\n"), ("server", "\x7fELF")]);
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(directory.join("server"), mode).unwrap();
    assert_eq!(detect(&directory, None, None).unwrap().language, Language::Binary);
    let package = ("package.json", "{\"scripts\": {\"start\": \"node index.js\"}}");
    let index = ("index.js", "require('http').createServer().listen(3000)\n");
    let lint = ("deno.json", "{ // for its formatter\n\"fmt\": {} }");
    assert_eq!(found(&[package, index, lint]).language, Language::Node);
    let imports = ("deno.json", "{\"imports\": {\"a\": \"npm:a\"}}");
    assert_eq!(found(&[package, ("main.ts", ""), imports]).language, Language::Deno);
}

#[test]
fn a_project_of_elixir_fetches_and_reads_what_is_its_own() {
    let mix = "[app: :shop, deps: [{:phoenix, \"~> 1.7\"}, {:a, github: \"x/a\"}, \
        {:b, git: \"https://git.example.org/b.git\"}]]";
    let runtime = "secret = System.fetch_env!(\"SECRET_KEY_BASE\")\n";
    let files =
        [("mix.exs", mix), ("config/runtime.exs", runtime), ("lib/shop/a.ex", "port: 4001")];
    let (all, directory) = directory(&files);
    let project = detect(&directory, None, None).unwrap();
    assert_eq!(project.port, 4001);
    let egress = project.build.unwrap().egress;
    assert_eq!(egress[2..], ["git.example.org:443", "github.com:443"]);
    assert!(project.notes.iter().any(|note| note.contains("SECRET_KEY_BASE:")));
    fs::rename(directory.join("lib"), all.path().join("lib")).unwrap();
    std::os::unix::fs::symlink("../lib", directory.join("lib")).unwrap();
    assert_eq!(detect(&directory, None, None).unwrap().port, PORT_DEFAULT);
}
