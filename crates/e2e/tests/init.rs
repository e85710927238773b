//! `thaw init`: what it writes builds and serves, with packages of each language's registry.

use serde_json::Value;
use std::fs;
use std::net::{TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;
use thaw_e2e::{Daemon, DaemonOptions, Outcome, get, run_within, skip, thaw};

/// How long a build may take, which may install packages.
const PATIENCE: Duration = Duration::from_secs(600);

/// A program with Flask that repeats what it is asked.
const FLASK: &str = "import flask\napp = flask.Flask(__name__)\n@app.get('/')\ndef hello():\n    \
                     return 'flask ' + flask.request.args['q']\n";
/// The files of one with Express.
const EXPRESS: [(&str, &str); 2] = [
    (
        "app.js",
        "const app = require('express')();\n\
         app.get('/', (request, response) => response.send('express ' + request.query.q));\n\
         app.listen(3000);\n",
    ),
    (
        "package.json",
        r#"{"name": "x", "scripts": {"start": "node app.js"}, "dependencies": {"express": "4.21.2"}}"#,
    ),
];

/// A server in Java with a library.
const GSON: &str = "package app;\nimport com.google.gson.Gson;\nimport com.sun.net.httpserver.HttpServer;\n\
        public class Main { public static void main(String[] a) throws Exception {\n\
        var server = HttpServer.create(new java.net.InetSocketAddress(8080), 0);\n\
        server.createContext(\"/\", e -> { byte[] b = new Gson().toJson(java.util.List.of(1, 2)).getBytes();\n\
        e.sendResponseHeaders(200, b.length); e.getResponseBody().write(b); e.close(); });\n\
        server.start(); } }\n";

/// A home and a directory for functions.
struct Place {
    all: TempDir,
}

impl Place {
    fn new() -> Self {
        let all = tempfile::tempdir().expect("a directory");
        fs::create_dir(all.path().join("home")).expect("a directory");
        Self { all }
    }

    fn home(&self) -> PathBuf {
        self.all.path().join("home")
    }

    fn directory(&self, name: &str, files: &[(&str, &str)]) -> PathBuf {
        let directory = self.all.path().join(name);
        for (name, text) in files {
            let path = directory.join(name);
            fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
            fs::write(path, text).expect("a file");
        }
        directory
    }

    fn thaw(&self, arguments: &[&str]) -> Outcome {
        let mut command = thaw();
        command.env("THAW_HOME", self.home()).current_dir(self.all.path()).args(arguments);
        run_within(PATIENCE, &mut command, b"")
    }

    fn init(&self, directory: &Path, arguments: &[&str]) -> Value {
        let directory = directory.to_str().expect("text");
        let outcome = self.thaw(&[&["init", "--json", directory], arguments].concat());
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        serde_json::from_str(&outcome.stdout).expect("JSON")
    }

    fn build(&self, directory: &Path) {
        self.build_with(directory, &[]);
    }

    /// Builds it; what that says.
    fn build_with(&self, directory: &Path, arguments: &[&str]) -> String {
        let directory = directory.to_str().expect("text");
        let tools = toolchain();
        let shown: Vec<_> = tools.iter().flat_map(|path| ["--tools", path]).collect();
        let all = [&["build", "--weak-limits", directory], &shown[..], arguments].concat();
        let outcome = self.thaw(&all);
        assert_eq!(outcome.code, Some(0), "{directory}\n{}", outcome.stderr);
        outcome.stderr
    }

    /// Builds a directory for which `thaw init` has written the thaw.toml, and asks it.
    fn answer(&self, directory: &Path, path: &str) -> String {
        self.build(directory);
        let daemon = Daemon::start(&self.home(), &DaemonOptions::default());
        let name = directory.file_name().expect("a name").to_str().expect("text");
        let response = get(daemon.gateway(), name, path);
        assert_eq!(response.status, 200, "{}\n{}", response.text(), daemon.log());
        response.text()
    }
}

/// Directories of a toolchain of Rust in a home directory, which builds see if they are shown.
fn toolchain() -> Vec<String> {
    let home = std::env::var("HOME").unwrap_or_default();
    let all = [".cargo", ".rustup"].map(|name| format!("{home}/{name}"));
    all.into_iter().filter(|path| Path::new(path).is_dir()).collect()
}

/// Whether a program of a language is here.
fn has(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output();
    let found = found.is_ok_and(|output| output.status.success());
    if !found {
        skip(&format!("there is no {program}"));
    }
    found
}

/// Whether a registry can be reached: builds need its own name and port.
fn reaches(host: &str) -> bool {
    let address = (host, 443).to_socket_addrs().ok().and_then(|mut all| all.next());
    let patience = Duration::from_secs(30);
    let reached = address.is_some_and(|to| TcpStream::connect_timeout(&to, patience).is_ok());
    if !reached {
        skip(&format!("{host} cannot be reached"));
    }
    reached
}

#[test]
fn every_template_is_built_and_answers() {
    let place = Place::new();
    let all = [
        ("python", "python3"),
        ("node", "node"),
        ("go", "go"),
        ("java", "javac"),
        ("ruby", "ruby"),
        ("php", "php"),
        ("perl", "perl"),
        ("rust", "cargo"),
        ("c", "cc"),
    ];
    let made: Vec<PathBuf> = all
        .into_iter()
        .filter(|(_, program)| has(program))
        .map(|(language, _)| {
            let directory = place.all.path().join(format!("hello-{language}"));
            let report = place.init(&directory, &["--template", language]);
            assert_eq!(report["project"]["language"], language);
            place.build(&directory);
            directory
        })
        .collect();
    let daemon = Daemon::start(&place.home(), &DaemonOptions::default());
    for directory in made {
        let name = directory.file_name().expect("a name").to_str().expect("text");
        let response = get(daemon.gateway(), name, "/?name=you");
        assert_eq!(response.status, 200, "{name}: {}\n{}", response.text(), daemon.log());
        assert!(response.text().contains("Nice to meet you."), "{name}: {}", response.text());
    }
}

#[test]
fn packages_of_a_requirements_file_and_of_a_project_are_installed() {
    if !has("python3") || !reaches("pypi.org") {
        return;
    }
    let place = Place::new();
    let wsgi = "from shop import create_app\napp = create_app()\n";
    let factory =
        FLASK.replace("import flask\n", "import flask\ndef create_app():\n    return app\n");
    let flask = place.directory(
        "flask",
        &[
            ("wsgi.py", wsgi),
            ("shop/__init__.py", &factory),
            ("requirements.txt", "flask==3.1.0\ngunicorn>=23\n"),
        ],
    );
    let report = place.init(&flask, &[]);
    assert_eq!(report["project"]["found"][1], "Flask");
    assert_eq!(place.answer(&flask, "/?q=1"), "flask 1");
    // A change of the program alone has nothing installed.
    fs::write(flask.join("shop/__init__.py"), factory.replace("'flask '", "'changed '"))
        .expect("a file");
    let again = |arguments: &[&str]| {
        let said = place.build_with(&flask, arguments);
        let is_kept = said.contains("keeping the Python packages of the build before");
        assert_ne!(is_kept, said.contains("pip | "), "{said}");
        (is_kept, said.contains("--fresh-packages` installs"))
    };
    assert_eq!(again(&[]), (true, true));
    assert_eq!(place.answer(&flask, "/?q=1"), "changed 1");
    assert_eq!(again(&["--fresh-packages"]), (false, false));
    fs::write(flask.join("requirements.txt"), "flask==3.1.0\ngunicorn==23.0.0\n").expect("a file");
    assert_eq!(again(&[]), (false, false));
    assert_eq!(again(&[]), (true, false));
    let main = "import fastapi\napi = fastapi.FastAPI()\n@api.get('/')\ndef hello(q: int):\n    \
                return {'twice': 2 * q}\n";
    let project = "[project]\nname = \"x\"\nversion = \"1\"\n\
                   dependencies = [\"fastapi==0.115.6\", \"uvicorn==0.34.0\"]\n";
    let fastapi = place.directory("fast", &[("main.py", main), ("pyproject.toml", project)]);
    place.init(&fastapi, &[]);
    assert_eq!(place.answer(&fastapi, "/?q=21"), "{\"twice\":42}");
}

#[test]
fn packages_of_npm_are_installed() {
    if !has("npm") || !reaches("registry.npmjs.org") {
        return;
    }
    let place = Place::new();
    let directory = place.directory("express", &EXPRESS);
    let report = place.init(&directory, &[]);
    assert_eq!(report["project"]["port"], 3000);
    assert_eq!(place.answer(&directory, "/?q=1"), "express 1");
}

#[test]
fn packages_of_npm_are_kept_where_the_lock_file_is_the_same() {
    if !has("npm") || !reaches("registry.npmjs.org") {
        return;
    }
    let place = Place::new();
    let directory = place.directory("kept", &EXPRESS);
    let mut locking = Command::new("npm");
    locking.args(["install", "--package-lock-only", "--no-audit", "--no-fund"]);
    locking.current_dir(&directory).env("HOME", place.all.path());
    let outcome = run_within(PATIENCE, &mut locking, b"");
    assert_eq!(outcome.code, Some(0), "{}{}", outcome.stdout, outcome.stderr);
    place.init(&directory, &[]);
    let is_kept = |arguments: &[&str]| {
        let said = place.build_with(&directory, arguments);
        let is_kept = said.contains("keeping the Node.js packages of the build before");
        assert_ne!(is_kept, said.contains("running npm ci --omit=dev --no-audit"), "{said}");
        assert!(!said.contains("at every build"), "{said}");
        is_kept
    };
    assert!(!is_kept(&[]));
    assert!(is_kept(&[]));
    // A change of the program alone has nothing installed.
    fs::write(directory.join("app.js"), EXPRESS[0].1.replace("'express '", "'changed '"))
        .expect("a file");
    assert!(is_kept(&[]));
    assert_eq!(place.answer(&directory, "/?q=1"), "changed 1");
    assert!(!is_kept(&["--fresh-packages"]));
    fs::remove_dir_all(directory.join("node_modules/express")).expect("it is installed");
    assert!(!is_kept(&[]));
    assert!(is_kept(&[]));
    let script = EXPRESS[1].1.replace("\"start\":", "\"postinstall\": \"true\", \"start\":");
    fs::write(directory.join("package.json"), script).expect("a file");
    for _ in 0..2 {
        let said = place.build_with(&directory, &[]);
        assert!(said.contains("since `the script postinstall` may change"), "{said}");
    }
}

/// Has a program write a lock file as its users do, and builds what `thaw init` makes of it.
#[test]
fn packages_of_pnpm_and_yarn_are_installed_by_their_lock_files() {
    if !has("npm") || !reaches("registry.npmjs.org") || !reaches("registry.yarnpkg.com") {
        return;
    }
    let place = Place::new();
    let berry = "YARN_NODE_LINKER=node-modules npx --yes @yarnpkg/cli-dist@4.5.3 install --mode update-lockfile";
    for (name, lock, command) in [
        ("pnpm", "pnpm-lock.yaml", "npx --yes pnpm@9 install --lockfile-only"),
        ("classic", "yarn.lock", "npx --yes yarn@1.22.22 install --ignore-scripts"),
        ("berry", "yarn.lock", berry),
    ] {
        let directory = place.directory(name, &EXPRESS);
        if name == "berry" {
            // Without one, yarn takes the directory for part of a project above it.
            fs::write(directory.join(lock), "").expect("a file");
        }
        let mut locking = Command::new("sh");
        locking.args(["-c", command]).current_dir(&directory).env("HOME", place.all.path());
        let outcome = run_within(PATIENCE, &mut locking, b"");
        assert_eq!(outcome.code, Some(0), "{name}: {}{}", outcome.stdout, outcome.stderr);
        let _ = fs::remove_dir_all(directory.join("node_modules"));
        let report = place.init(&directory, &[]);
        let found = report["project"]["found"].as_array().expect("a list");
        assert!(found.iter().any(|found| found == lock), "{report}");
        assert_eq!(place.answer(&directory, &format!("/?q={name}")), format!("express {name}"));
    }
}

#[test]
fn packages_of_poetry_are_installed() {
    if !has("python3") || !reaches("pypi.org") {
        return;
    }
    let place = Place::new();
    let project = "[tool.poetry]\nname = \"x\"\nversion = \"1\"\n[tool.poetry.dependencies]\n\
                   python = \"^3.9\"\nflask = \"~3.1.0\"\n\
                   gunicorn = { version = \"^23\", python = \"<4\" }\n\
                   pywin32 = { version = \"*\", platform = \"win32\" }\n";
    let directory = place.directory("poet", &[("app.py", FLASK), ("pyproject.toml", project)]);
    place.init(&directory, &[]);
    assert_eq!(place.answer(&directory, "/?q=1"), "flask 1");
}

/// Says which versions of packages it has.
const VERSIONS: &str = r"import http.server, importlib.metadata, urllib.parse
import httpx

def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return 'none'

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        names = urllib.parse.urlparse(self.path).query.split(',')
        self.send_response(200)
        self.end_headers()
        self.wfile.write(' '.join(version(name) for name in names).encode())

http.server.HTTPServer(('', 8080), Handler).serve_forever()
";

/// How the hashes of socksio begin in the lock file of uv.
const HASHES_OF_SOCKSIO: [&str; 2] = ["sha256:f88beb3d", "sha256:95dc1f15"];

/// A project that was locked, with a program.
fn locked(place: &Place, name: &str, lock: &str) -> PathBuf {
    let directory = place.directory(name, &[("app.py", VERSIONS)]);
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/lock-files");
    for file in ["pyproject.toml", lock] {
        fs::copy(fixtures.join(name).join(file), directory.join(file)).expect("a file");
    }
    directory
}

#[test]
fn packages_of_uv_and_poetry_have_the_locked_versions() {
    if !has("python3") || !reaches("pypi.org") {
        return;
    }
    let place = Place::new();
    for (name, lock) in [("uv", "uv.lock"), ("poetry", "poetry.lock"), ("poetry-1", "poetry.lock")]
    {
        let directory = locked(&place, name, lock);
        let report = place.init(&directory, &[]);
        let found = report["project"]["found"].as_array().expect("a list");
        assert!(found.iter().any(|found| found == lock), "{report}");
        // The last two are of an extra of the project and of a group.
        let answer = place.answer(&directory, "/?httpx,click,socksio,bottle,iniconfig");
        assert_eq!(answer, "0.27.2 8.1.7 1.0.0 none none", "{name}");
    }
}

#[test]
fn a_lock_file_has_the_last_word() {
    if !has("python3") || !reaches("pypi.org") {
        return;
    }
    let place = Place::new();
    let directory = locked(&place, "uv", "uv.lock");
    place.init(&directory, &[]);
    let refused = |why: &str| {
        let outcome = place.thaw(&["build", "--weak-limits", directory.to_str().expect("text")]);
        assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
        assert!(outcome.stderr.contains(why), "{}", outcome.stderr);
    };
    let lock = fs::read_to_string(directory.join("uv.lock")).expect("a file");
    let project = fs::read_to_string(directory.join("pyproject.toml")).expect("a file");
    // Archives with other hashes than those of the lock file are not installed.
    let other = HASHES_OF_SOCKSIO
        .iter()
        .fold(lock.clone(), |lock, hash| lock.replace(hash, "sha256:00000000"));
    assert_ne!(other, lock);
    fs::write(directory.join("uv.lock"), other).expect("a file");
    refused("DO NOT MATCH THE HASHES");
    fs::write(directory.join("uv.lock"), &lock).expect("a file");
    let other = project.replace("click~=8.1", "click~=8.2");
    fs::write(directory.join("pyproject.toml"), other).expect("a file");
    refused("it was not made for click~=8.2, which pyproject.toml wants; run `uv lock`");
    fs::write(directory.join("pyproject.toml"), &project).expect("a file");
    let other = lock.replace("https://pypi.org/simple", "https://index.example/simple");
    fs::write(directory.join("uv.lock"), other).expect("a file");
    refused(
        "write `egress = [\"files.pythonhosted.org:443\", \"index.example:443\"]` below [build]",
    );
    fs::write(directory.join("uv.lock"), &lock).expect("a file");
    // What an earlier version needed is gone.
    assert_eq!(place.answer(&directory, "/?httpx,sniffio"), "0.27.2 1.3.1");
    let without = lock.replace("    { name = \"sniffio\" },\n", "");
    fs::write(directory.join("uv.lock"), without).expect("a file");
    fs::write(directory.join("sniffio.py"), "def current_async_library(): pass\n").expect("a file");
    assert_eq!(place.answer(&directory, "/?httpx,sniffio"), "0.27.2 none");
}

#[test]
fn modules_of_go_are_fetched() {
    if !has("go") || !reaches("proxy.golang.org") {
        return;
    }
    let place = Place::new();
    let main = "package main\n\nimport (\n\t\"net/http\"\n\n\t\"github.com/google/uuid\"\n)\n\n\
                func main() {\n\thttp.HandleFunc(\"/\", func(w http.ResponseWriter, r *http.Request) {\n\
                \t\tid := uuid.MustParse(r.URL.Query().Get(\"id\"))\n\t\tw.Write([]byte(id.URN()))\n\t})\n\
                \thttp.ListenAndServe(\":8080\", nil)\n}\n";
    let module = "module x\n\ngo 1.21\n\nrequire github.com/google/uuid v1.6.0\n";
    let sums = "github.com/google/uuid v1.6.0 h1:NIvaJDMOsjHA8n1jAhLSgzrAzy1Hgr+hNrb57e+94F0=\n\
                github.com/google/uuid v1.6.0/go.mod h1:TIyPZe4MgqvfeYDBFedMoGGpEw/LqOeaOT+nhxU+yHo=\n";
    let files = [("main.go", main), ("go.mod", module), ("go.sum", sums)];
    let directory = place.directory("uuid", &files);
    place.init(&directory, &[]);
    let id = "7d444840-9dc0-11d1-b245-5ffdce74fad2";
    assert_eq!(place.answer(&directory, &format!("/?id={id}")), format!("urn:uuid:{id}"));
}

#[test]
fn gems_of_a_gemfile_are_installed() {
    if !has("gem") || !reaches("rubygems.org") {
        return;
    }
    let place = Place::new();
    let config = "run ->(env) { [200, {}, [\"rack \" + Rack::Request.new(env).params['q']]] }\n";
    let gemfile = "source 'https://rubygems.org'\ngem 'rack', '3.1.8'\ngem 'puma', '6.5.0'\n";
    let files = [("config.ru", config), ("Gemfile", gemfile)];
    let directory = place.directory("rack", &files);
    place.init(&directory, &[]);
    assert_eq!(place.answer(&directory, "/?q=1"), "rack 1");
}

#[test]
fn dependencies_of_a_pom_are_fetched() {
    if !has("mvn") || !reaches("repo.maven.apache.org") {
        return;
    }
    let place = Place::new();
    let pom = "<project xmlns=\"http://maven.apache.org/POM/4.0.0\"><modelVersion>4.0.0</modelVersion>\
        <groupId>x</groupId><artifactId>gson</artifactId><version>1</version>\
        <properties><maven.compiler.source>17</maven.compiler.source><maven.compiler.target>17</maven.compiler.target>\
        <project.build.sourceEncoding>UTF-8</project.build.sourceEncoding></properties>\
        <dependencies><dependency><groupId>com.google.code.gson</groupId><artifactId>gson</artifactId>\
        <version>2.11.0</version></dependency></dependencies></project>";
    let files = [("pom.xml", pom), ("src/main/java/app/Main.java", GSON)];
    let directory = place.directory("gson", &files);
    let report = place.init(&directory, &[]);
    assert_eq!(report["project"]["command"][3], "app.Main");
    assert_eq!(place.answer(&directory, "/"), "[1,2]");
}

#[test]
fn gradle_makes_the_archives_of_a_project() {
    if !has("gradle") || !reaches("repo.maven.apache.org") {
        return;
    }
    let place = Place::new();
    // `compile` is what versions before 7 know, such as that of Debian.
    let wish = match is_gradle_before_7() {
        true => "compile",
        false => "implementation",
    };
    let build = format!(
        "plugins {{ id 'application' }}\nrepositories {{ mavenCentral() }}\n\
         dependencies {{ {wish} 'com.google.code.gson:gson:2.11.0' }}\n\
         version = '1'\nmainClassName = 'app.Main'\n"
    );
    let source = ("src/main/java/app/Main.java", GSON);
    let own = place.directory("own", &[("build.gradle", &build), source]);
    let report = place.init(&own, &[]);
    assert_eq!(report["project"]["command"][3], "app.Main");
    assert_eq!(place.answer(&own, "/"), "[1,2]");
    let below = place.directory(
        "below",
        &[
            ("settings.gradle", "include 'app', 'lib'\n"),
            ("app/build.gradle", &build),
            ("app/src/main/java/app/Main.java", GSON),
            ("lib/build.gradle", "apply plugin: 'java'\n"),
            // In the place of a wrapper, which would download Gradle.
            ("gradlew", "exec gradle \"$@\"\n"),
        ],
    );
    place.init(&below, &[]);
    assert_eq!(place.answer(&below, "/"), "[1,2]");
}

#[test]
fn gradle_makes_one_archive() {
    if !has("gradle") {
        return;
    }
    let place = Place::new();
    let main = GSON.replace("import com.google.gson.Gson;\n", "");
    let main = main.replace(
        "new Gson().toJson(java.util.List.of(1, 2))",
        "java.util.List.of(1, 2).toString()",
    );
    let source = ("src/main/java/app/Main.java", main.as_str());
    let files = [("build.gradle", "apply plugin: 'java'\nversion = '1'\n"), source];
    let directory = place.directory("plain", &files);
    place.init(&directory, &[]);
    assert_eq!(place.answer(&directory, "/"), "[1, 2]");
    // The archive of another version takes its place.
    fs::write(directory.join("build.gradle"), "apply plugin: 'java'\nversion = '2'\n")
        .expect("a file");
    assert_eq!(place.answer(&directory, "/"), "[1, 2]");
}

/// Whether Gradle does not know `compile` any more: it went with version 7.
fn is_gradle_before_7() -> bool {
    let output = Command::new("gradle").arg("--version").output().expect("gradle");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.lines().find_map(|line| line.strip_prefix("Gradle "));
    let major = version.and_then(|version| version.split('.').next()?.parse::<u32>().ok());
    major.is_some_and(|major| major < 7)
}

#[test]
fn an_application_of_plack_is_served() {
    if !has("starman") {
        return;
    }
    let place = Place::new();
    let app = "use lib 'lib'; use Shop; my $app = sub { [200, [], [Shop::hello($_[0]{QUERY_STRING})]] };\n";
    let library = "package Shop; sub hello { \"plack $_[0]\" } 1;\n";
    let directory = place.directory("plack", &[("app.psgi", app), ("lib/Shop.pm", library)]);
    let report = place.init(&directory, &[]);
    assert_eq!(report["project"]["language"], "perl");
    assert_eq!(place.answer(&directory, "/?q=1"), "plack q=1");
}

#[test]
fn a_configuration_of_nginx_is_served() {
    if !Path::new("/usr/sbin/nginx").exists() {
        return skip("there is no nginx");
    }
    let place = Place::new();
    // As Debian has it, but for the sites.
    let conf = "user www-data;\nworker_processes auto;\npid /run/nginx.pid;\n\
                error_log /var/log/nginx/error.log;\nevents { worker_connections 64; }\n\
                http {\n include /etc/nginx/mime.types;\n access_log /var/log/nginx/access.log;\n \
                server {\n listen 80 default_server;\n listen [::]:80;\n root /app/public;\n }\n}\n";
    let files = [("nginx.conf", conf), ("public/index.html", "from nginx\n")];
    let directory = place.directory("web", &files);
    let report = place.init(&directory, &[]);
    assert_eq!(
        (&report["project"]["language"], &report["project"]["port"]),
        (&"nginx".into(), &80.into())
    );
    assert_eq!(place.answer(&directory, "/"), "from nginx\n");
}

#[test]
fn a_program_of_deno_is_served() {
    if !has("deno") {
        return;
    }
    let place = Place::new();
    let manifest = "{ // as `deno init` makes it\n \"tasks\": { \"start\": \"deno run --watch -A main.ts\" }, }";
    let main = "Deno.serve((r: Request) => new Response('deno ' + new URL(r.url).search));\n";
    let directory = place.directory("deno", &[("deno.json", manifest), ("main.ts", main)]);
    let report = place.init(&directory, &[]);
    assert_eq!(report["project"]["port"], 8000);
    assert_eq!(place.answer(&directory, "/?q=1"), "deno ?q=1");
}

#[test]
fn a_project_of_mix_is_released() {
    if !has("mix") {
        return;
    }
    let place = Place::new();
    let mix = "defmodule Shop.MixProject do\n  use Mix.Project\n  def project, do: [app: :shop, version: \"0.1.0\"]\n  \
               def application, do: [extra_applications: [:logger], mod: {Shop, []}]\nend\n";
    let shop = "defmodule Shop do\n  use Application\n  def start(_, _), do: \
        Supervisor.start_link([{Task, &listen/0}], strategy: :one_for_one)\n  def listen do\n    \
        {:ok, socket} = :gen_tcp.listen(4000, [:binary, packet: :http_bin, active: false])\n    accept(socket)\n  end\n  \
        defp accept(socket) do\n    {:ok, client} = :gen_tcp.accept(socket)\n    \
        {:ok, {:http_request, _, {:abs_path, path}, _}} = :gen_tcp.recv(client, 0)\n    \
        body = \"elixir #{path}\"\n    :gen_tcp.send(client, \"HTTP/1.1 200 OK\\r\\nContent-Length: \
        #{byte_size(body)}\\r\\nConnection: close\\r\\n\\r\\n#{body}\")\n    :gen_tcp.shutdown(client, :write)\n    \
        accept(socket)\n  end\nend\n";
    let directory = place.directory("shop", &[("mix.exs", mix), ("lib/shop.ex", shop)]);
    let report = place.init(&directory, &[]);
    assert_eq!(report["project"]["command"][0], "/app/bin/shop");
    assert_eq!(report["project"]["port"], 4000);
    assert_eq!(place.answer(&directory, "/hello"), "elixir /hello");
}

#[test]
fn what_is_there_is_kept_and_what_is_unknown_is_said() {
    let place = Place::new();
    let directory = place.directory("shop", &[("app.js", ""), ("thaw.toml", "mine")]);
    let path = directory.to_str().expect("text");
    let refused = place.thaw(&["init", path]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("--force replaces it"), "{}", refused.stderr);
    assert_eq!(fs::read_to_string(directory.join("thaw.toml")).expect("a file"), "mine");
    let done = place.thaw(&["init", "--force", path]);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert!(done.stdout.contains("next: `thaw dev "), "{}", done.stdout);
    let empty = place.directory("empty", &[("README", "")]);
    let refused = place.thaw(&["init", empty.to_str().expect("text")]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("--template LANGUAGE NAME"), "{}", refused.stderr);
    let misused = place.thaw(&["init", "--template", "cobol", "x"]);
    assert_eq!(misused.code, Some(2));
    assert!(
        misused.stderr.contains("python, node, go, java, ruby, php, perl, rust, c"),
        "{}",
        misused.stderr
    );
    // A name that no function can have leaves nothing behind.
    let unnamed = empty.with_file_name("+++");
    let refused = place.thaw(&["init", "--template", "python", unnamed.to_str().expect("text")]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("--name"), "{}", refused.stderr);
    assert!(!unnamed.exists());
}
