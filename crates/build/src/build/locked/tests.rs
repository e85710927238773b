//! Lock files that uv and Poetry have written, and some that nobody should have.

use super::*;

/// A project that was locked: its pyproject.toml and its lock file.
type Project = (&'static str, &'static str);

const UV: Project = (
    include_str!("../../../../../tests/lock-files/uv/pyproject.toml"),
    include_str!("../../../../../tests/lock-files/uv/uv.lock"),
);
const POETRY: Project = (
    include_str!("../../../../../tests/lock-files/poetry/pyproject.toml"),
    include_str!("../../../../../tests/lock-files/poetry/poetry.lock"),
);
const POETRY_1: Project = (
    include_str!("../../../../../tests/lock-files/poetry-1/pyproject.toml"),
    include_str!("../../../../../tests/lock-files/poetry-1/poetry.lock"),
);

/// The lines for a project, without their hashes.
fn lines(file: LockFile, (project, lock): Project) -> Vec<String> {
    let locked = Locked::read(file, lock, project).unwrap();
    assert_eq!(locked.destinations, PYPI_DESTINATIONS.map(str::to_owned).into());
    let bare = |line: &String| {
        let (bare, hashes) = line.split_once(" --hash=sha256:").expect("a hash");
        assert!(hashes.len() >= 64, "{line}");
        bare.to_owned()
    };
    locked.lines.iter().map(bare).collect()
}

/// Why a lock file is refused.
fn refused(file: LockFile, project: &str, lock: &str) -> String {
    Locked::read(file, lock, project).unwrap_err()
}

#[test]
fn uv_locks_for_several_interpreters() {
    let lines = lines(LockFile::Uv, UV);
    let has = |line: &str| assert!(lines.iter().any(|other| other == line), "{line}: {lines:#?}");
    has("httpx==0.27.2");
    has("click==8.1.7");
    // It is there by an extra of httpx.
    has("socksio==1.0.0");
    has("anyio==4.12.1 ; (python_full_version < '3.10')");
    has("colorama==0.4.6 ; (sys_platform == 'win32')");
    has(
        "exceptiongroup==1.3.2 ; (python_full_version < '3.10') or (python_full_version < '3.11') and (python_full_version >= '3.10')",
    );
    for name in ["shop", "bottle", "iniconfig"] {
        assert!(!lines.iter().any(|line| line.starts_with(name)), "{name}: {lines:#?}");
    }
}

#[test]
fn poetry_names_groups_or_leaves_a_graph() {
    // The second pyproject.toml wants click for Python before 4 only.
    let of_graph = "click==8.1.7 ; (python_full_version < '4')";
    let windows = "platform_system == \"Windows\"";
    let colorama = format!("colorama==0.4.6 ; ({windows}) and (python_full_version < '4')");
    let cases = [
        (POETRY, "click==8.1.7", format!("colorama==0.4.6 ; {windows}")),
        (POETRY_1, of_graph, colorama),
    ];
    for (project, click, colorama) in cases {
        let lines = lines(LockFile::Poetry, project);
        for expected in ["httpx==0.27.2", "socksio==1.0.0", click, &colorama] {
            let is_it = |line: &String| line.split(" ; (os_name").next() == Some(expected);
            assert!(lines.iter().any(is_it), "{expected}: {lines:#?}");
        }
        for name in ["bottle", "iniconfig"] {
            assert!(!lines.iter().any(|line| line.starts_with(name)), "{name}: {lines:#?}");
        }
    }
}

#[test]
fn a_lock_file_fits_its_project() {
    for (file, (project, lock)) in
        [(LockFile::Uv, UV), (LockFile::Poetry, POETRY), (LockFile::Poetry, POETRY_1)]
    {
        for (from, to) in [("0.29", "0.30"), ("click", "clock"), ("socks", "http2")] {
            let error = refused(file, &project.replace(from, to), lock);
            assert!(error.contains("was") && error.contains(file.renew()), "{from}: {error}");
        }
        // What is no dependency may change.
        let other = project.replace("version = \"1\"\n", "version = \"2\"\n");
        Locked::read(file, lock, &other).unwrap();
    }
    let (project, lock) = UV;
    let spaced = project.replace(">=0.27,<0.29", " <0.29, >=0.27 ; python_version > '3'");
    Locked::read(LockFile::Uv, lock, &spaced).unwrap();
}

/// A uv.lock of a project that needs `x`, with this about it.
fn with_x(about: &str) -> String {
    format!(
        "version = 1\n[[package]]\nname = \"shop\"\nversion = \"1\"\nsource = {{ virtual = \".\" }}\n\
         dependencies = [{{ name = \"x\" }}]\n[[package]]\nname = \"x\"\nversion = \"1\"\n{about}\n"
    )
}

#[test]
fn other_sources_are_named() {
    let hash = format!("hash = \"sha256:{}\"", "0".repeat(64));
    let lock = with_x(&format!(
        "source = {{ registry = \"https://index.example/simple\" }}\n\
         wheels = [{{ url = \"https://files.example:8443/x-1.whl\", {hash} }}]"
    ));
    let locked = Locked::read(LockFile::Uv, &lock, "").unwrap();
    let expected = ["files.example:8443", "index.example:443"].map(str::to_owned);
    assert_eq!(locked.destinations, expected.into());
    assert_eq!(locked.lines[0], "--index-url https://index.example/simple");
    let lock = with_x(&format!(
        "source = {{ url = \"https://example.org/x.zip\", subdirectory = \"a\" }}\nsdist = {{ {hash} }}"
    ));
    let locked = Locked::read(LockFile::Uv, &lock, "").unwrap();
    let line = "x @ https://example.org/x.zip#subdirectory=a --hash=sha256:0";
    assert!(locked.lines[0].starts_with(line), "{locked:?}");
    for (about, said) in [
        ("source = { git = \"https://example.org/x?rev=a#b\" }", "x is from git"),
        ("source = { editable = \"packages/x\" }", "x is from the directory packages/x"),
        ("source = { path = \"x.whl\" }", "x is from the file x.whl"),
        ("source = { registry = \"../wheels\" }\nsdist = { HASH }", "neither of https nor of http"),
        ("source = { registry = \"https://pypi.org/simple\" }", "x has no hash"),
        (
            "source = { registry = \"https://pypi.org/simple\" }\nsdist = { hash = \"md5:00\" }",
            "x has no hash",
        ),
        (
            "source = { url = \"https://me:secret@example.org/x.zip\" }\nsdist = { HASH }",
            "a password",
        ),
        ("source = { url = \"https://example.org/x -r y\" }\nsdist = { HASH }", "is none"),
    ] {
        let error = refused(LockFile::Uv, "", &with_x(&about.replace("HASH", &hash)));
        assert!(error.contains(said), "{about}: {error}");
        assert!(!error.contains("secret"), "{error}");
    }
}

#[test]
fn no_text_leaves_its_line() {
    let hash = format!("sdist = {{ hash = \"sha256:{}\" }}", "0".repeat(64));
    let about = format!("source = {{ registry = \"https://pypi.org/simple\" }}\n{hash}");
    let lock = with_x(&about);
    Locked::read(LockFile::Uv, &lock, "").unwrap();
    for (from, to) in [
        ("\"x\"", "\"x\\n-r y\""),
        ("version = \"1\"", "version = \"1\\n-r y\""),
        ("{ name = \"x\" }", "{ name = \"x\", marker = \"a\\n-r y\" }"),
        ("{ name = \"x\" }", "{ name = \"x\", marker = \"a == 'b' --hash=c\" }"),
    ] {
        let error = refused(LockFile::Uv, "", &lock.replace(from, to));
        assert!(error.contains("is no "), "{to}: {error}");
    }
    let weird = lock.replace("sha256:0", "sha256:g");
    assert!(refused(LockFile::Uv, "", &weird).contains("no hash"));
}

#[test]
fn lock_files_that_are_not_known_are_said() {
    let later = UV.1.replacen("version = 1", "version = 2", 1);
    let error = refused(LockFile::Uv, UV.0, &later);
    assert!(error.contains("uv export"), "{error}");
    let older = POETRY.1.replace("lock-version = \"2.1\"", "lock-version = \"1.1\"");
    let error = refused(LockFile::Poetry, POETRY.0, &older);
    assert!(error.contains("Poetry 1.5 or later"), "{error}");
    assert!(refused(LockFile::Uv, "", "version = 1\n").contains("no package for this directory"));
    let missing = UV.1.replace("name = \"socksio\"\nversion", "name = \"sox\"\nversion");
    assert!(refused(LockFile::Uv, UV.0, &missing).contains("0 packages socksio"));
    for (file, text) in [(LockFile::Uv, "["), (LockFile::Poetry, ""), (LockFile::Poetry, "x")] {
        assert!(!refused(file, "", text).is_empty());
    }
    let package = "[[package]]\nname = \"y\"\nsource = {}\n";
    let lock = format!("version = 1\n{}", package.repeat(PACKAGES_MAX + 1));
    assert!(refused(LockFile::Uv, "", &lock).contains("more than 10000 packages"));
}

#[test]
fn names_and_wishes_are_read() {
    assert_eq!(normal("Foo_.Bar--b"), "foo-bar-b");
    let asked = Asked::parse("Foo [B, a_c] (>=1, <2) ; x").unwrap();
    assert_eq!((asked.name.as_str(), asked.versions.as_str()), ("foo", ">=1, <2"));
    assert_eq!(asked.extras, ["a-c", "b"].map(str::to_owned).into());
    assert_eq!(asked.marker, "x");
    assert_eq!(Asked::parse(" # no"), None);
    assert_eq!(LockFile::of(Path::new("/a/uv.lock")), Some(LockFile::Uv));
    assert_eq!(LockFile::of(Path::new("uv.lock.txt")), None);
}
