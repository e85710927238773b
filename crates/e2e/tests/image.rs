//! Images are ELF core files that the usual tools read, and damaged ones are
//! refused.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Outcome, built_home, copy_home, get, repository, request, run,
    thaw, wait_until,
};

fn home() -> &'static Path {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    HOME.get_or_init(|| {
        built_home("image", &[Function::Example("hello-c"), Function::Example("hello-c-dynamic")])
    })
}

/// The image file of a function.
fn image(home: &Path, function: &str) -> PathBuf {
    let outcome = run(thaw().env("THAW_HOME", home).args(["inspect", function, "--json"]));
    let report: serde_json::Value = serde_json::from_str(&outcome.success()).expect("JSON");
    let text = report["image"].to_string();
    let images = fs::read_dir(home.join("store/images")).expect("images");
    images
        .map(|entry| entry.expect("an entry").path())
        .find(|path| text.contains(path.file_name().expect("a name").to_str().expect("text")))
        .unwrap_or_else(|| panic!("no image file is named in {text}"))
}

/// Makes an image writable and gives it to `damage`.
fn damaged(label: &str, damage: impl FnOnce(&File, u64)) -> PathBuf {
    let copy = copy_home(home(), label);
    let path = image(&copy, "hello-c");
    let mut mode = fs::metadata(&path).expect("attributes").permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut mode, 0o600);
    fs::set_permissions(&path, mode).expect("its mode");
    let file = File::options().read(true).write(true).open(&path).expect("the image");
    damage(&file, file.metadata().expect("attributes").len());
    copy
}

/// The image must be refused with a reason and never run, its neighbour served
/// all the time; the daemon freezes the function anew.
fn assert_refused(home: &Path) {
    let daemon = Daemon::start(home, &DaemonOptions::default());
    assert_eq!(get(daemon.gateway(), "hello-c-dynamic", "/").status, 200);
    wait_until("the daemon complains", || {
        let says =
            |line: &str| ["hello-c", "ERROR", "image"].iter().all(|text| line.contains(text));
        daemon.log().lines().any(says)
    });
    wait_until("the function is served again", || {
        let response = request(daemon.gateway(), "hello-c", "/", None).expect("an answer");
        if response.status != 200 {
            assert!(response.status >= 500, "{} {}", response.status, response.text());
            let reason = daemon.explain(&response);
            assert!(reason.contains("image"), "{reason}");
        }
        response.status == 200
    });
    // Building it by hand works just as well.
    let outcome: Outcome = Function::Example("hello-c").build(home);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert_eq!(get(daemon.gateway(), "hello-c", "/").status, 200);
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn readelf_finds_nothing_to_complain_about() {
    for function in ["hello-c", "hello-c-dynamic"] {
        let mut command = Command::new("readelf");
        let outcome = run(command.arg("-lnW").arg(image(home(), function)));
        assert_eq!(outcome.stderr, "");
        let text = outcome.success();
        assert!(!text.to_lowercase().contains("warning"), "{text}");
        for part in ["CORE (Core file)", "LOAD", "NT_PRSTATUS", "NT_FILE", "NT_AUXV"] {
            assert!(text.contains(part), "no {part} in\n{text}");
        }
    }
}

#[test]
fn gdb_shows_where_the_program_was_frozen() {
    // What the sandbox had as its root: gdb finds the mapped files below it.
    let root = tempfile::tempdir().expect("a directory");
    fs::create_dir(root.path().join("app")).expect("a directory");
    for directory in ["lib", "lib64", "usr"] {
        std::os::unix::fs::symlink(Path::new("/").join(directory), root.path().join(directory))
            .expect("a link");
    }
    for function in ["hello-c", "hello-c-dynamic"] {
        let program = repository().join("examples").join(function).join("build/hello");
        fs::copy(&program, root.path().join("app/hello")).expect("a copy");
        let mut command = Command::new("gdb");
        command.args(["-nx", "-batch", "-ex", "bt"]).arg(program).arg(image(home(), function));
        if function == "hello-c-dynamic" {
            command.arg(format!("-iex=set sysroot {}", root.path().display()));
        }
        let outcome = run(&mut command);
        for name in ["accept", "main"] {
            let found =
                outcome.stdout.lines().any(|line| line.starts_with('#') && line.contains(name));
            assert!(found, "no {name} in\n{}\n{}", outcome.stdout, outcome.stderr);
        }
    }
}

#[test]
fn a_flipped_bit_is_refused() {
    // Places all over the file: header, notes, and memory.
    for (i, part) in [3, 500, 7_000, 60_000].into_iter().enumerate() {
        let home = damaged(&format!("image-flipped-{i}"), |file, len| {
            let at = if part < 100 { part } else { part * len / 100_000 };
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).expect("a byte");
            file.write_all_at(&[byte[0] ^ 0x10], at).expect("a byte");
        });
        assert_refused(&home);
    }
}

#[test]
fn a_truncated_image_is_refused() {
    let home = damaged("image-truncated", |file, len| file.set_len(len / 2).expect("a cut"));
    assert_refused(&home);
    let home = damaged("image-empty", |file, _| file.set_len(0).expect("a cut"));
    assert_refused(&home);
}

#[test]
fn a_foreign_file_is_refused() {
    let home = damaged("image-foreign", |file, _| {
        file.set_len(0).expect("a cut");
        let other = fs::read("/proc/self/exe").expect("an ELF file");
        file.write_all_at(&other, 0).expect("a foreign file");
    });
    assert_refused(&home);
}

#[test]
fn a_missing_image_is_refused() {
    let home = copy_home(self::home(), "image-missing");
    fs::remove_file(image(&home, "hello-c")).expect("removable");
    assert_refused(&home);
}
