//! Frozen functions in a real registry: pushed, signed, pulled, served, and refused.

#[path = "push/crafted.rs"]
mod crafted;

use crafted::Crafted;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tempfile::TempDir;
use thaw_e2e::{
    Cut, Daemon, DaemonOptions, Outcome, Registry, built_home, changed_kernel, cutting_proxy, get,
    run, run_within, thaw,
};
use thaw_store::{Domain, Name, Repair, Store};

const PROGRAM: &str = r#"
import http.server
secret = open("secret.txt").read()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"{NAME} {secret}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("", 8080), Handler).serve_forever()
"#;

/// How long a command may take that makes a thousand files durable while others do, too.
const PATIENCE: Duration = Duration::from_secs(300);

fn in_home(home: &Path, arguments: &[&str]) -> Outcome {
    let mut command = thaw();
    command.env("THAW_HOME", home).env_remove("DOCKER_CONFIG").args(arguments);
    run_within(PATIENCE, &mut command, b"")
}

#[track_caller]
fn json_of(home: &Path, arguments: &[&str]) -> Value {
    let arguments = [arguments, &["--json"]].concat();
    serde_json::from_str(&in_home(home, &arguments).success()).expect("JSON")
}

/// Builds a Python server with a file that nobody shares, and `keys` in its thaw.toml.
fn build(home: &Path, name: &str, keys: &str, kernel: Option<&Path>) {
    let directory = tempfile::tempdir().expect("a directory");
    let write = |file: &str, text: &str| fs::write(directory.path().join(file), text).expect(file);
    write("app.py", &format!("NAME = \"{name}\"\n{PROGRAM}"));
    write("secret.txt", &format!("of {name}"));
    write(
        "thaw.toml",
        &format!(
            "name = \"{name}\"\ncommand = [\"python3\", \"app.py\"]\nport = 8080\n{keys}\n\
             [sharing]\nprivate = [\"secret.txt\"]\n\
             [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n"
        ),
    );
    let mut building = thaw();
    building.env("THAW_HOME", home).arg("build").arg(directory.path());
    if let Some(kernel) = kernel {
        building.env("THAW_KERNEL", kernel);
    }
    run_within(PATIENCE, &mut building, b"").success();
}

/// The same with a C program, which is built at once.
fn build_small(home: &Path, name: &str) {
    let directory = tempfile::tempdir().expect("a directory");
    let source = thaw_e2e::repository().join("examples/hello-c/hello.c");
    let program = directory.path().join("hello");
    run(Command::new("cc").args(["-static", "-O1", "-o"]).arg(&program).arg(source)).success();
    let text = format!(
        "name = \"{name}\"\ncommand = [\"./hello\"]\nport = 8080\n[runtime]\nkind = \"binary\"\n"
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    in_home(home, &["build", directory.path().to_str().expect("UTF-8")]).success();
}

/// All that is in a store but what sessions are at work on, and the room that it holds for them.
fn content_of(home: &Path) -> BTreeSet<PathBuf> {
    fn walk(directory: &Path, found: &mut BTreeSet<PathBuf>) {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            match entry.path() {
                path if path.is_dir() => walk(&path, found),
                path if path.ends_with("lock") || path.ends_with("reserve") => {}
                path => drop(found.insert(path)),
            }
        }
    }
    let mut found = BTreeSet::new();
    for part in ["store", "pieces"] {
        walk(&home.join(part), &mut found);
    }
    found
}

#[track_caller]
fn verify(home: &Path) {
    let store = Store::open(&home.join("store")).expect("a store");
    let report = store.verify(Repair::Report, &mut |_| {}).expect("a check");
    assert!(report.problems.is_empty(), "{:?}", report.problems);
}

/// A pair of keys: the private and the public one.
fn keys(directory: &TempDir, name: &str) -> (String, String) {
    let path = |end: &str| directory.path().join(format!("{name}.{end}")).display().to_string();
    let (private, public) = (path("key"), path("pub"));
    let openssl = |arguments: &[&str]| run(Command::new("openssl").args(arguments)).success();
    let curve = "ec_paramgen_curve:P-256";
    openssl(&["genpkey", "-algorithm", "EC", "-pkeyopt", curve, "-out", &private]);
    openssl(&["pkey", "-in", &private, "-pubout", "-out", &public]);
    (private, public)
}

fn trust(home: &Path, registry: &Registry, key: &str) {
    let host = format!("localhost:{}", registry.port());
    let text = format!("[[registry]]\nhost = \"{host}\"\nhttp = true\nverify_key = \"{key}\"\n");
    fs::write(home.join("registries.toml"), text).expect("registries.toml");
}

fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("{key} of {value}"))
}

#[test]
fn a_second_function_moves_what_differs_and_is_served_elsewhere() {
    let directory = tempfile::tempdir().expect("a directory");
    let registry = Registry::start(directory.path(), false);
    let home = built_home("push", &[]);
    for name in ["first", "second"] {
        build(&home, name, "", None);
    }
    let [first, second] = ["first", "second"].map(|name| registry.image(&format!("team/{name}:1")));
    let one = json_of(&home, &["push", "first", &first]);
    assert_eq!(number(&one, "sent"), number(&one, "bytes"), "{one}");
    let two = json_of(&home, &["push", "second", &second]);
    assert!(number(&two, "sent") * 2 < number(&one, "sent"), "{one} {two}");
    assert!(number(&two, "mounted") > number(&two, "sent"), "{two}");
    let again = json_of(&home, &["push", "first", &first]);
    assert_eq!((number(&again, "sent"), &again["digest"]), (0, &one["digest"]));

    let other = built_home("push-other", &[]);
    let one = json_of(&other, &["pull", &first]);
    assert_eq!(number(&one, "moved"), number(&one, "bytes"));
    assert_eq!((&one["refrozen"], &one["signed"]), (&Value::Null, &json!(false)));
    let two = json_of(&other, &["pull", &second]);
    assert!(number(&two, "moved") * 2 < number(&one, "moved"), "{one} {two}");
    let again = json_of(&other, &["pull", &first]);
    assert_eq!(number(&again, "moved"), 0);
    // Whoever pushes a function has chosen its name: it does not take another one's place.
    let elsewhere = registry.image("other/first:1");
    in_home(&home, &["push", "first", &elsewhere]).success();
    let refused = in_home(&other, &["pull", &elsewhere]);
    assert_eq!(refused.code, Some(1), "{}", refused.stdout);
    assert!(refused.stderr.contains("there is a function `first` already"), "{}", refused.stderr);
    in_home(&other, &["pull", &elsewhere, "--name", "first"]).success();
    in_home(&other, &["pull", &first, "--name", "first"]).success();
    let record = |home: &Path, name: &str| {
        let store = Store::open(&home.join("store")).expect("a store");
        store.get_function(&Name::new(name).expect("a name")).expect("a function")
    };
    // Images are byte by byte what they were.
    assert_eq!(record(&other, "second").image, record(&home, "second").image);
    verify(&other);
    let daemon = Daemon::start(&other, &DaemonOptions::default());
    for name in ["first", "second"] {
        let answer = get(daemon.gateway(), name, "/");
        assert_eq!(answer.text(), format!("{name} of {name}"));
    }
    // A running daemon serves what is pulled at once.
    in_home(&other, &["pull", &first, "--name", "third"]).success();
    assert_eq!(get(daemon.gateway(), "third", "/").text(), "first of first");
    // Unless it is to wait.
    let later = json_of(&other, &["pull", &second, "--name", "third", "--no-activate"]);
    assert_eq!((&later["version"], &later["active"]), (&json!(2), &json!(false)), "{later}");
    assert_eq!(get(daemon.gateway(), "third", "/").text(), "first of first");
    in_home(&other, &["activate", "third", "2"]).success();
    assert_eq!(get(daemon.gateway(), "third", "/").text(), "second of second");
}

#[test]
fn whoever_pulls_decides_who_shares_its_files() {
    let directory = tempfile::tempdir().expect("a directory");
    let registry = Registry::start(directory.path(), false);
    let home = built_home("push-domain", &[]);
    build(&home, "first", "", None);
    let (shared, own) = (registry.image("f:shared"), registry.image("f:own"));
    in_home(&home, &["push", "first", &shared]).success();
    let tenant = built_home("push-tenant", &[]);
    in_home(&tenant, &["pull", &shared, "--name", "mine", "--domain", "customer-7"]).success();
    verify(&tenant);
    let names_of = |home: &Path, name: &str| -> BTreeSet<_> {
        let store = Store::open(&home.join("store")).expect("a store");
        let record = store.get_function(&Name::new(name).expect("a name")).expect("a function");
        let index = store.open_index(record.index).expect("an index");
        index.index().blobs().iter().map(|blob| blob.hash).collect()
    };
    assert!(names_of(&tenant, "mine").is_disjoint(&names_of(&home, "first")));
    // What a domain has comes back as it was, its own name for it or not.
    in_home(&tenant, &["push", "mine", &own]).success();
    let back = built_home("push-back", &[]);
    in_home(&back, &["pull", &own, "--name", "first"]).success();
    verify(&back);
    assert_eq!(names_of(&back, "first"), names_of(&home, "first"));
    for (home, name) in [(&tenant, "mine"), (&back, "first")] {
        let daemon = Daemon::start(home, &DaemonOptions::default());
        assert_eq!(get(daemon.gateway(), name, "/").text(), "first of first");
        let store = Store::open(&home.join("store")).expect("a store");
        let private = Domain::private(&Name::new(name).expect("a name"));
        let private = private.name().expect("it has one");
        assert!(store.root().join("domains").join(private.as_str()).exists());
    }
}

#[test]
fn signatures_are_made_and_verified() {
    let directory = tempfile::tempdir().expect("a directory");
    let registry = Registry::start(directory.path(), false);
    let (private, public) = keys(&directory, "ours");
    let (_, other) = keys(&directory, "theirs");
    let home = built_home("push-signed", &[]);
    build_small(&home, "small");
    let reference = registry.image("small:1");
    in_home(&home, &["push", "small", &reference]).success();
    let elsewhere = built_home("push-verifying", &[]);
    let _ = in_home(&elsewhere, &["pull", &registry.image("none:1")]);
    let before = content_of(&elsewhere);
    trust(&elsewhere, &registry, &public);
    let unsigned = in_home(&elsewhere, &["pull", &reference]);
    assert!(unsigned.stderr.contains("it has no signature"), "{}", unsigned.stderr);
    let pushed = json_of(&home, &["push", "small", &reference, "--sign", &private]);
    assert_eq!((number(&pushed, "sent"), &pushed["signed"]), (0, &json!(true)));
    trust(&elsewhere, &registry, &other);
    let wrong = in_home(&elsewhere, &["pull", &reference]);
    assert!(wrong.stderr.contains("another key's"), "{}", wrong.stderr);
    assert!(wrong.stderr.contains("verify_key"), "{}", wrong.stderr);
    assert_eq!(content_of(&elsewhere), before);
    trust(&elsewhere, &registry, &public);
    let pulled = json_of(&elsewhere, &["pull", &reference]);
    assert_eq!((&pulled["signed"], &pulled["digest"]), (&json!(true), &pushed["digest"]));

    // Others find and accept the signature where they look for it.
    let digest = pushed["digest"].as_str().expect("a digest");
    let signatures = Crafted::read_manifest(&registry, "small", &digest.replace(':', "-"));
    let layer = &signatures["layers"][0];
    let payload = signatures_payload(&registry, layer);
    assert!(String::from_utf8_lossy(&payload).contains(digest));
    let path = |name: &str| directory.path().join(name);
    fs::write(path("payload"), &payload).expect("a payload");
    let signature = layer["annotations"]["dev.cosignproject.cosign/signature"].as_str();
    fs::write(path("base64"), signature.expect("a signature")).expect("a signature");
    let decode = format!("base64 -d {} > {}", path("base64").display(), path("raw").display());
    run(Command::new("sh").args(["-c", &decode])).success();
    let mut openssl = Command::new("openssl");
    openssl.args(["dgst", "-sha256", "-verify", &public, "-signature"]);
    run(openssl.arg(path("raw")).arg(path("payload"))).success();
    // A second signature does not take the first one's place.
    let (second, second_public) = keys(&directory, "second");
    in_home(&home, &["push", "small", &reference, "--sign", &second]).success();
    for key in [&public, &second_public] {
        trust(&elsewhere, &registry, key);
        in_home(&elsewhere, &["pull", &reference]).success();
    }
}

fn signatures_payload(registry: &Registry, layer: &Value) -> Vec<u8> {
    let digest = layer["digest"].as_str().expect("a digest");
    Crafted::blob_of(registry, "small", digest)
}

/// A kernel build that only `home` knows, in a place where its sandboxes can read it.
fn other_kernel(home: &Path) -> PathBuf {
    const BUILD_ID: u32 = 3;
    let elf = changed_kernel(BUILD_ID, b"GNU\0", |id| id[..6].copy_from_slice(b"pushed"));
    let path = home.join("kernel.elf");
    fs::write(&path, elf).expect("a kernel");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("a mode");
    path
}

#[test]
fn an_unknown_kernel_build_is_taken_from_a_trusted_signer_only() {
    let directory = tempfile::tempdir().expect("a directory");
    let registry = Registry::start(directory.path(), false);
    let (private, public) = keys(&directory, "ours");
    let home = built_home("push-kernel", &[]);
    let kernel = other_kernel(&home);
    build(&home, "first", "", Some(&kernel));
    let reference = registry.image("first:1");
    in_home(&home, &["push", "first", &reference, "--sign", &private]).success();
    let kernels = |home: &Path| fs::read_dir(home.join("store/kernels")).expect("kernels").count();

    let careful = built_home("push-careful", &[]);
    let never = in_home(&careful, &["pull", &reference, "--refreeze", "never"]);
    assert!(never.stderr.contains("--refreeze auto"), "{}", never.stderr);
    assert_eq!(kernels(&careful), 0);
    let pulled = json_of(&careful, &["pull", &reference]);
    let why = pulled["refrozen"].as_str().expect("a reason");
    assert!(why.contains("taken from nobody but a signer"), "{why}");
    // The image and the kernel were not even moved.
    let whole = json_of(&home, &["push", "first", &reference]);
    assert!(number(&pulled, "moved") < number(&whole, "bytes"));
    assert_eq!(kernels(&careful), 1, "its own");
    let own = fs::read_dir(home.join("store/kernels")).expect("kernels").flatten().next();
    let foreign = own.expect("a kernel").file_name();
    assert!(!careful.join("store/kernels").join(&foreign).exists());
    verify(&careful);
    let daemon = Daemon::start(&careful, &DaemonOptions::default());
    assert_eq!(get(daemon.gateway(), "first", "/").text(), "first of first");
    drop(daemon);

    let trusting = built_home("push-trusting", &[]);
    trust(&trusting, &registry, &public);
    let pulled = json_of(&trusting, &["pull", &reference]);
    assert_eq!((&pulled["refrozen"], &pulled["signed"]), (&Value::Null, &json!(true)));
    assert!(trusting.join("store/kernels").join(&foreign).exists());
    verify(&trusting);
    let daemon = Daemon::start(&trusting, &DaemonOptions::default());
    assert_eq!(get(daemon.gateway(), "first", "/").text(), "first of first");
}

#[test]
fn a_machine_that_lacks_what_an_image_needs_freezes_anew() {
    let directory = tempfile::tempdir().expect("a directory");
    let registry = Registry::start(directory.path(), false);
    let home = built_home("push-cpu", &[]);
    build_small(&home, "small");
    in_home(&home, &["push", "small", &registry.image("small:1")]).success();
    let mut crafted = Crafted::read(&registry, "small", "1");
    crafted.document["image"]["cpu_features"][3] = json!(u32::MAX);
    let reference = crafted.push("future");
    let elsewhere = built_home("push-lesser", &[]);
    let never = in_home(&elsewhere, &["pull", &reference, "--refreeze", "never"]);
    assert!(never.stderr.contains("CPU features that this machine lacks"), "{}", never.stderr);
    let pulled = json_of(&elsewhere, &["pull", &reference]);
    assert!(pulled["refrozen"].as_str().expect("a reason").contains("CPU features"), "{pulled}");
    // What it was trained with is not there.
    crafted.document["function"]["config"]["train"] =
        json!({ "requests": [{ "path": "/", "file": "body" }] });
    let trained = in_home(&elsewhere, &["pull", &crafted.push("trained")]);
    assert!(trained.stderr.contains("build it here"), "{}", trained.stderr);
    let always = json_of(&elsewhere, &["pull", &registry.image("small:1"), "--refreeze", "always"]);
    assert!(always["refrozen"].as_str().expect("a reason").contains("always"), "{always}");
    let daemon = Daemon::start(&elsewhere, &DaemonOptions::default());
    assert_eq!(get(daemon.gateway(), "small", "/").status, 200);
}

/// A change of a good artifact, and what is said of it.
type Change = (&'static str, Box<dyn Fn(&mut Crafted<'_>)>, &'static str);

fn changes() -> Vec<Change> {
    fn set(pointer: &'static str, value: Value) -> Box<dyn Fn(&mut Crafted<'_>)> {
        Box::new(move |crafted| {
            *crafted.document.pointer_mut(pointer).expect(pointer) = value.clone();
        })
    }
    fn more(pointer: &'static str, by: i64) -> Box<dyn Fn(&mut Crafted<'_>)> {
        Box::new(move |crafted| {
            let value = crafted.document.pointer_mut(pointer).expect(pointer);
            *value = json!(value.as_i64().expect("a number") + by);
        })
    }
    let zeros = "0".repeat(64);
    vec![
        ("version", set("/version", json!(7)), "version 7"),
        ("index-id", set("/index/id", json!(zeros.clone())), "another one than its document says"),
        ("index-size", more("/index/size", 8), "of its index"),
        ("index-huge", set("/index/size", json!(1_u64 << 60)), "bytes"),
        ("contents", more("/index/contents", 1), "larger or smaller"),
        ("count", more("/index/naming/0/count", 1), "counts its contents wrong"),
        (
            "naming",
            set("/index/naming/0/naming", json!({ "domain": "x" })),
            "not what its name says",
        ),
        ("image-id", set("/image/id", json!(zeros)), "another one than its document says"),
        ("image-longer", more("/image/size", 4096), "shorter than its document says"),
        ("image-shorter", more("/image/size", -4096), "longer than its document says"),
        ("cpu", set("/image/cpu_features/0", json!(0)), "processor than its document says"),
        ("config", set("/function/config/command", json!([])), "makes no sense"),
        ("flood", set("/function/config/limits", json!({ "memory": "x" })), "makes no sense"),
        (
            "more-pieces",
            Box::new(|crafted| {
                let last = crafted.pieces("function.files").pop().expect("a piece");
                let piece = crafted.layers()[last].clone();
                crafted.layers().insert(last, piece);
            }),
            "longer than its document says",
        ),
        (
            "fewer-pieces",
            Box::new(|crafted| {
                let last = crafted.pieces("function.files").pop().expect("a piece");
                crafted.layers().remove(last);
            }),
            "not what its name says",
        ),
        (
            "bomb",
            Box::new(|crafted| {
                let piece = crafted.pieces("function.files")[0];
                let bomb = zstd::encode_all(std::io::Read::take(std::io::repeat(0), 1 << 30), 1);
                crafted.replace_packed(piece, &bomb.expect("a bomb"));
            }),
            "a piece is longer than 4 MiB",
        ),
        (
            "flipped-file",
            Box::new(|crafted| {
                let piece = *crafted.pieces("function.files").last().expect("a piece");
                let mut bytes = crafted.piece(piece);
                *bytes.last_mut().expect("a byte") ^= 1;
                crafted.replace(piece, &bytes);
            }),
            "not what its name says",
        ),
        (
            "flipped-image",
            Box::new(|crafted| {
                let piece = crafted.pieces("function.image")[0];
                let mut bytes = crafted.piece(piece);
                let middle = bytes.len() / 2;
                bytes[middle] ^= 1;
                crafted.replace(piece, &bytes);
            }),
            "another one than its document says",
        ),
        (
            "no-piece",
            Box::new(|crafted| {
                let piece = crafted.pieces("function.files")[0];
                crafted.replace_packed(piece, b"no zstd");
            }),
            "of the index",
        ),
        (
            "unknown-kind",
            Box::new(|crafted| {
                crafted.layers()[0]["mediaType"] = json!("text/plain");
            }),
            "unknown kind",
        ),
        (
            "huge-piece",
            Box::new(|crafted| {
                crafted.replace_packed(0, &vec![7; 5 << 20]);
            }),
            "impossible size",
        ),
    ]
}

#[test]
fn hostile_artifacts_are_refused_and_leave_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let registry = Registry::start(directory.path(), false);
    let home = built_home("push-hostile", &[]);
    build_small(&home, "small");
    in_home(&home, &["push", "small", &registry.image("small:1")]).success();
    let good = Crafted::read(&registry, "small", "1");
    let victim = built_home("push-victim", &[]);
    // Nothing of the good one is there, and so nothing of it hides what is left.
    in_home(&victim, &["images"]).success();
    let _ = in_home(&victim, &["pull", &registry.image("none:1")]);
    let before = content_of(&victim);
    for (name, change, expected) in changes() {
        let mut crafted = good.clone();
        change(&mut crafted);
        let refused = in_home(&victim, &["pull", &crafted.push(name)]);
        assert_eq!(refused.code, Some(1), "{name}: {}", refused.stdout);
        assert!(refused.stderr.contains(expected), "{name}: {}", refused.stderr);
        assert_eq!(refused.stderr.trim().lines().count(), 1, "{name}: {}", refused.stderr);
        assert_eq!(content_of(&victim), before, "{name}");
    }
    let large = in_home(&victim, &["pull", &registry.image("small:1"), "--max-size", "64KiB"]);
    assert!(large.stderr.contains("65536 bytes") && large.stderr.contains("--max-size"));
    let run_it = in_home(&victim, &["run", &registry.image("small:1"), "--", "x"]);
    assert!(run_it.stderr.contains("frozen function and no container image"), "{}", run_it.stderr);
    assert_eq!(content_of(&victim), before);
    in_home(&victim, &["pull", &registry.image("small:1")]).success();
    verify(&victim);
}

/// A change of an image's header, and what is said of it.
type Lie = (&'static str, fn(&mut [u8]), &'static str);

/// An image whose own words are changed so that its checksum and its name are right.
#[test]
fn images_that_lie_are_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let registry = Registry::start(directory.path(), false);
    let home = built_home("push-lying", &[]);
    build_small(&home, "small");
    in_home(&home, &["push", "small", &registry.image("small:1")]).success();
    let good = Crafted::read(&registry, "small", "1");
    let victim = built_home("push-lied-to", &[]);
    let _ = in_home(&victim, &["pull", &registry.image("none:1")]);
    let before = content_of(&victim);
    let piece = good.pieces("function.image")[0];
    assert_eq!(good.pieces("function.image").len(), 1, "a small image");
    // Fields of the header (thaw_abi::image::ImageHeader).
    let changes: [Lie; 6] = [
        ("length", |header| header[8 + 2] ^= 0x55, "truncated"),
        (
            "depth",
            |header| header[..8].copy_from_slice(b"\x02\0\0\0\x01\0\0\0"),
            "stands on others",
        ),
        (
            "chain",
            |header| header[..8].copy_from_slice(b"\x02\0\0\0\xff\0\0\0"),
            "depth is impossible",
        ),
        ("kernel", |header| header[16] ^= 0x55, "another kernel build"),
        ("index", |header| header[48] ^= 0x55, "other files"),
        ("checksum", |header| header[112] ^= 0x55, "checksum"),
    ];
    for (name, change, expected) in changes {
        let mut crafted = good.clone();
        let mut image = crafted.piece(piece);
        let header = header_of(&image);
        change(&mut image[header..]);
        if name != "checksum" {
            mend(&mut image, header + 112);
        }
        crafted.replace(piece, &image);
        crafted.document["image"]["id"] = json!(image_id(&image));
        let refused = in_home(&victim, &["pull", &crafted.push(name)]);
        assert!(refused.stderr.contains(expected), "{name}: {}", refused.stderr);
        assert_eq!(content_of(&victim), before, "{name}");
    }
}

/// Where the header of an image lies: behind the head of its note.
fn header_of(image: &[u8]) -> usize {
    const NOTE: [u8; 20] = *b"\x05\0\0\0\x90\0\0\0\x01\0\x68\x74THAW\0\0\0\0";
    image.windows(NOTE.len()).position(|window| window == NOTE).expect("a header") + NOTE.len()
}

/// Makes the checksum at `at` that of the image.
fn mend(image: &mut [u8], at: usize) {
    image[at..at + 32].fill(0);
    let sum = blake3::hash(image);
    image[at..at + 32].copy_from_slice(sum.as_bytes());
}

fn image_id(image: &[u8]) -> String {
    let file = tempfile::NamedTempFile::new().expect("a file");
    fs::write(file.path(), image).expect("an image");
    thaw_store::image_id(file.as_file()).expect("a name").to_string()
}

#[test]
fn interrupted_pulls_go_on_and_leave_a_good_store() {
    let directory = tempfile::tempdir().expect("a directory");
    let registry = Registry::start(directory.path(), false);
    let home = built_home("push-cut", &[]);
    build(&home, "first", "", None);
    let whole = json_of(&home, &["push", "first", &registry.image("first:1")]);
    let cut = Cut::Some { times: 12, after: 700 << 10 };
    let (proxy, passed) = cutting_proxy(registry.address(), cut);
    let through = format!("localhost:{}/first:1", proxy.port());
    let elsewhere = built_home("push-killed", &[]);
    // Killed at several moments, also while the store is written.
    for after in [100, 300, 500, 800, 1100, 1500, 2000] {
        let mut pulling = thaw();
        pulling.env("THAW_HOME", &elsewhere).env_remove("DOCKER_CONFIG");
        let mut child = pulling.args(["pull", &through]).spawn().expect("thaw");
        std::thread::sleep(Duration::from_millis(after));
        // It may have ended.
        let _ = child.kill();
        child.wait().expect("its end");
        verify(&elsewhere);
    }
    in_home(&elsewhere, &["pull", &through]).success();
    verify(&elsewhere);
    // Interruptions cost what was on its way, not what was here.
    let passed = passed.load(Ordering::Relaxed) as u64;
    let bytes = number(&whole, "bytes");
    assert!(passed < bytes * 2, "{passed} bytes for {bytes}");
    let daemon = Daemon::start(&elsewhere, &DaemonOptions::default());
    assert_eq!(get(daemon.gateway(), "first", "/").text(), "first of first");
}

#[test]
fn what_cannot_be_pushed_is_said_in_a_sentence() {
    let directory = tempfile::tempdir().expect("a directory");
    let registry = Registry::start(directory.path(), true);
    let home = built_home("push-refused", &[]);
    build_small(&home, "small");
    let refused = |arguments: &[&str]| {
        let outcome = in_home(&home, arguments);
        assert_eq!(outcome.code, Some(1), "{}", outcome.stdout);
        outcome.stderr
    };
    let reference = registry.image("small:1");
    assert!(refused(&["push", "small", &reference]).contains("docker login"));
    assert!(refused(&["push", "none", &reference]).contains("no function none"));
    let digest = format!("{}@sha256:{}", registry.image("small"), "0".repeat(64));
    assert!(refused(&["push", "small", &digest]).contains("give a tag"));
    let (_, public) = keys(&directory, "ours");
    assert!(refused(&["push", "small", &reference, "--sign", &public]).contains("no private key"));
    assert!(refused(&["push", "small", "localhost:1/small:1"]).contains("cannot be reached"));
}
