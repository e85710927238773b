//! Container images, made by `buildah`: imported, pulled from a real registry, run, and frozen as
//! functions.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use thaw_e2e::{
    Cut, Daemon, DaemonOptions, Linking, Outcome, Registry, Workshop, built_home, compile,
    cutting_proxy, get, repository, run, thaw,
};

/// What a client of `docker login` notes of that: base64 of `thaw:thaw-test`.
const LOGIN: &str = "dGhhdzp0aGF3LXRlc3Q=";

fn in_home(home: &Path, arguments: &[&str]) -> Outcome {
    run(thaw().env("THAW_HOME", home).env_remove("DOCKER_CONFIG").args(arguments))
}

#[test]
fn images_are_imported_pulled_and_run() {
    let workshop = Workshop::new();
    workshop.build("app:1");
    let home = built_home("containers", &[]);
    let archive = workshop.path("app.tar");
    let archive = archive.to_str().expect("UTF-8");
    workshop.buildah(&["push", "app:1", &format!("docker-archive:{archive}:app:1")]);
    let layout = workshop.path("layout");
    let layout = layout.to_str().expect("UTF-8");
    workshop.buildah(&["push", "app:1", &format!("oci:{layout}:app")]);
    let registry = Registry::start(workshop.directory(), false);
    let image = registry.image("team/app:1");
    workshop.buildah(&["push", "--tls-verify=false", "app:1", &format!("docker://{image}")]);

    in_home(&home, &["import", archive, "from-archive"]).success();
    in_home(&home, &["import", layout, "from-layout"]).success();
    // By a name with a tag it is found as if it had been pulled.
    in_home(&home, &["import", archive, "team/app:3"]).success();
    let ran = in_home(&home, &["run", "docker.io/team/app:3"]);
    assert!(!ran.stderr.contains("pulling"), "{}", ran.stderr);
    assert_eq!(ran.success(), "uid=1000(app) gid=50\n");
    let directory = workshop.directory().to_str().expect("UTF-8");
    let refused = in_home(&home, &["import", directory, "files:1"]);
    assert!(refused.stderr.contains("name it `files-1`"), "{}", refused.stderr);
    let ran = in_home(&home, &["run", &image]);
    assert!(ran.stderr.contains("pulling"), "{}", ran.stderr);
    assert_eq!(ran.success(), "uid=1000(app) gid=50\n");
    // It is in the store now, under each way to write its name.
    drop(registry);
    for name in ["from-archive", "from-layout", &image] {
        let busybox = |arguments: &[&str]| {
            let start = ["run", "-it", "--rm", "-e", "SIZE=large", name, "--"];
            in_home(&home, &[&start[..], arguments].concat())
        };
        let env = busybox(&["env"]).success();
        for variable in ["COLOUR=blue", "SIZE=large", "HOME=/srv"] {
            assert!(env.lines().any(|line| line == variable), "{name}: {env}");
        }
        assert_eq!(busybox(&["pwd"]).success(), "/srv\n");
        assert_eq!(busybox(&["wc", "-c", "/large"]).success(), "4000000 /large\n");
        // As docker(1) takes a program and its options.
        let bare = in_home(&home, &["run", "--rm", name, "wc", "-c", "/large"]);
        assert_eq!(bare.success(), "4000000 /large\n");
        let gone = busybox(&["cat", "/gone"]);
        assert!(gone.code == Some(1) && gone.stderr.contains("No such file"), "{}", gone.stderr);
    }
    let other = in_home(
        &home,
        &[
            "run",
            "-u",
            "5:6",
            "-w",
            "/",
            "--entrypoint",
            "/bin/busybox",
            "from-layout",
            "--",
            "id",
            "-g",
        ],
    );
    assert_eq!(other.success(), "6\n");
    let nobody = in_home(&home, &["run", "-u", "stranger", "from-layout"]);
    assert!(nobody.stderr.contains("no user or group `stranger`"), "{}", nobody.stderr);
    let missing = in_home(&home, &["run", &image.replace(":1", ":2")]);
    assert_eq!(missing.code, Some(1));
    assert!(missing.stderr.contains("cannot be reached"), "{}", missing.stderr);
}

#[test]
fn a_function_may_be_a_container_image() {
    let workshop = Workshop::new();
    let program = workshop.path("hello");
    let source = repository().join("examples/hello-c/hello.c");
    run(Command::new("cc").args(["-static", "-O1", "-o"]).arg(&program).arg(source)).success();
    let container = workshop.buildah(&["from", "scratch"]);
    workshop.buildah(&["copy", &container, program.to_str().expect("UTF-8"), "/srv/hello"]);
    workshop.buildah(&[
        "config",
        "--workingdir",
        "/srv",
        "--cmd",
        "./hello",
        "--port",
        "8080",
        &container,
    ]);
    workshop.buildah(&["commit", &container, "hello"]);
    let layout = workshop.path("layout");
    workshop.buildah(&["push", "hello", &format!("oci:{}:hello", layout.display())]);
    let home = built_home("containers-function", &[]);
    in_home(&home, &["import", layout.to_str().expect("UTF-8"), "hello"]).success();
    let directory = workshop.path("function");
    fs::create_dir(&directory).expect("a directory");
    let build = |text: &str| {
        fs::write(directory.join("thaw.toml"), text).expect("thaw.toml");
        in_home(&home, &["build", directory.to_str().expect("UTF-8")])
    };
    build("name = \"contained\"\n[runtime]\nimage = \"hello\"\n").success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(get(daemon.gateway(), "contained", "/").status, 200);
    let elsewhere = build("name = \"other\"\n[runtime]\nimage = \"registry.invalid/x\"\n");
    assert!(elsewhere.stderr.contains("is not in the store"), "{}", elsewhere.stderr);
    let both = build("name = \"other\"\n[runtime]\nkind = \"python3\"\nimage = \"hello\"\n");
    assert!(both.stderr.contains("exclude each other"), "{}", both.stderr);
}

/// `cap_kill+ep`.
const KILL: [u8; 20] = [1, 0, 0, 2, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// An image with a program that has capabilities, and with other extended attributes.
fn build_capable(workshop: &Workshop, image: &str) {
    let program = compile("c/file_capabilities", Linking::Static);
    let server = workshop.path("hello");
    let source = repository().join("examples/hello-c/hello.c");
    run(Command::new("cc").args(["-static", "-O1", "-o"]).arg(&server).arg(source)).success();
    let container = workshop.buildah(&["from", "scratch"]);
    for (from, to) in [
        (program.as_path(), "/bin/show"),
        (&program, "/bin/show-as-root"),
        (Path::new("/bin/busybox"), "/bin/busybox"),
        (&server, "/srv/hello"),
    ] {
        workshop.buildah(&["copy", &container, from.to_str().expect("UTF-8"), to]);
    }
    let root = PathBuf::from(workshop.buildah(&["mount", &container]));
    let set = |path: &str, name: &str, value: &[u8]| {
        rustix::fs::lsetxattr(root.join(path), name, value, rustix::fs::XattrFlags::empty())
            .unwrap_or_else(|error| panic!("{name} of {path}: {error}"));
    };
    set("bin/show", "security.capability", &KILL);
    set("bin/show", "user.lines", b"1\n2\n3");
    set("srv", "user.directory", b"yes");
    let of_root = fs::Permissions::from_mode(0o4755);
    fs::set_permissions(root.join("bin/show-as-root"), of_root).expect("set-user-ID");
    workshop.buildah(&["umount", &container]);
    workshop.buildah(&["config", "--port", "8080", "--cmd", "/srv/hello", &container]);
    workshop.buildah(&["commit", &container, image]);
}

#[test]
fn files_of_images_have_capabilities_and_other_attributes() {
    let workshop = Workshop::new();
    build_capable(&workshop, "capable:1");
    let home = built_home("containers-capable", &[]);
    workshop.import("capable:1", &home, "capable");
    let archive = workshop.path("capable.tar");
    let archive = archive.to_str().expect("UTF-8");
    workshop.buildah(&["push", "capable:1", &format!("docker-archive:{archive}:capable:1")]);
    let imported = in_home(&home, &["import", archive, "from-archive"]);
    assert!(!imported.stderr.contains("left out"), "{}", imported.stderr);
    let registry = Registry::start(workshop.directory(), false);
    let pushed = registry.image("capable:1");
    workshop.buildah(&["push", "--tls-verify=false", "capable:1", &format!("docker://{pushed}")]);
    in_home(&home, &["pull", &pushed, "--name", "pulled"]).success();

    for name in ["capable", "from-archive", "pulled"] {
        check_capable(|user, arguments| {
            in_home(&home, &[&["run", "-u", user, name, "--"], arguments].concat()).success()
        });
    }
    // A function has them, and so has its copy on another machine.
    let directory = workshop.path("function");
    fs::create_dir(&directory).expect("a directory");
    fs::write(directory.join("thaw.toml"), "name = \"able\"\n[runtime]\nimage = \"capable\"\n")
        .expect("thaw.toml");
    in_home(&home, &["build", directory.to_str().expect("UTF-8")]).success();
    let artifact = registry.image("able:1");
    in_home(&home, &["push", "able", &artifact]).success();
    let elsewhere = built_home("containers-capable-elsewhere", &[]);
    in_home(&elsewhere, &["pull", &artifact]).success();
    for home in [&home, &elsewhere] {
        check_capable(|user, arguments| {
            let start = ["run", "--rootfs", "able", "-u", user, "--"];
            in_home(home, &[&start[..], arguments].concat()).success()
        });
    }
}

/// Runs programs of the image of [`build_capable`] by users.
fn check_capable(run: impl Fn(&str, &[&str]) -> String) {
    let held = |sets: &str| format!("Inh 0, Prm {sets}, Eff {sets}, Amb 0");
    let first = run("1000:1000", &["/bin/show", "show", "first"]);
    assert!(first.contains(&held("20")) && first.contains("secure 1"), "{first}");
    let of_root = run("1000:1000", &["/bin/show-as-root", "show", "first"]);
    assert!(of_root.contains("user 1000, effective 0, secure 1"), "{of_root}");
    let shell = |user: &str, script: &str| run(user, &["/bin/busybox", "sh", "-c", script]);
    let child = shell("1000:1000", "/bin/show show child");
    assert!(child.contains(&held("20")), "{child}");
    let copy =
        shell("1000:1000", "cat /bin/show > /tmp/show; chmod +x /tmp/show; /tmp/show show copy");
    assert!(copy.contains(&held("0")) && copy.contains("secure 0"), "{copy}");
    let listed =
        run("1000:1000", &["/bin/show", "attributes", "/bin/show", "/srv", "/bin/busybox"]);
    let expected = "/bin/show: security.capability(20) user.lines=1\n2\n3\n\
                    /srv: user.directory=yes\n/bin/busybox:\n";
    assert_eq!(listed, expected);
    let changed = shell(
        "0:0",
        "chown 0:0 /bin/show; touch /bin/show; echo x >> /srv/hello; /bin/show attributes /bin/show",
    );
    assert_eq!(changed, "/bin/show: user.lines=1\n2\n3\n");
}

#[test]
fn an_interrupted_pull_goes_on_where_it_ended() {
    let workshop = Workshop::new();
    workshop.build("app:1");
    let registry = Registry::start(workshop.directory(), false);
    let image = registry.image("app:1");
    workshop.buildah(&["push", "--tls-verify=false", "app:1", &format!("docker://{image}")]);
    let home = built_home("containers-cut", &[]);
    let (proxy, passed) =
        cutting_proxy(registry.address(), Cut::Some { times: 6, after: 300 << 10 });
    let through = format!("localhost:{}/app:1", proxy.port());
    in_home(&home, &["pull", &through, "--name", "cut"]).success();
    assert_eq!(
        in_home(&home, &["run", "cut", "--", "wc", "-c", "/large"]).success(),
        "4000000 /large\n"
    );
    // Two megabytes or so: each of six interruptions would have cost what came before it.
    let whole: u64 = walk(&workshop.path("registry"));
    let passed = passed.load(Ordering::Relaxed) as u64;
    assert!(passed < whole + (2 << 20), "{passed} bytes for {whole}");
    // One that never sends a byte of a blob is not asked for ever.
    let (hopeless, _) = cutting_proxy(registry.address(), Cut::Blobs);
    let refused = in_home(&home, &["pull", &format!("localhost:{}/app:1", hopeless.port())]);
    assert!(refused.stderr.contains("cannot pull"), "{}", refused.stderr);
}

/// Bytes of all files below a directory.
fn walk(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).expect("a directory").flatten();
    entries
        .map(|entry| match entry.path().is_dir() {
            true => walk(&entry.path()),
            false => entry.metadata().expect("a file").len(),
        })
        .sum()
}

#[test]
fn mirrors_and_logins_are_as_configured() {
    let workshop = Workshop::new();
    workshop.build("app:1");
    let closed = Registry::start(workshop.directory(), true);
    let image = closed.image("app:1");
    let to = format!("docker://{image}");
    workshop.buildah(&["push", "--tls-verify=false", "--creds", "thaw:thaw-test", "app:1", &to]);
    let home = built_home("containers-login", &[]);
    let refused = in_home(&home, &["pull", &image]);
    assert!(refused.stderr.contains("docker login"), "{}", refused.stderr);
    let login =
        format!("{{\"auths\": {{\"localhost:{}\": {{\"auth\": \"{LOGIN}\"}}}}}}", closed.port());
    fs::write(workshop.path("config.json"), login).expect("a login");
    let mut pulling = thaw();
    pulling.env("THAW_HOME", &home).env("DOCKER_CONFIG", workshop.directory());
    run(pulling.args(["pull", &image, "--json"])).success();

    let open = Registry::start(workshop.directory(), false);
    let rules = format!(
        "[[registry]]\nhost = \"registry.invalid\"\nmirrors = [\"localhost:1\", \"localhost:{}\"]\n",
        open.port()
    );
    fs::write(home.join("registries.toml"), rules).expect("a configuration");
    in_home(&home, &["pull", "registry.invalid/app:1", "--name", "mirrored"]).success();
    let all = in_home(&home, &["pull", "registry.invalid/none"]);
    assert!(all.stderr.contains("cannot pull registry.invalid/none"), "{}", all.stderr);
    fs::write(home.join("registries.toml"), "[[registry]]\nhots = 1\n").expect("a configuration");
    let wrong = in_home(&home, &["pull", "registry.invalid/app:1"]);
    assert!(wrong.stderr.contains("registries.toml makes no sense"), "{}", wrong.stderr);
}
