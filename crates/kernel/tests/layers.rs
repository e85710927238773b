//! The order of the kernel's modules, as its README states it: a module uses those below it
//! only.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// From the lowest to the highest. Below all of them is the crate `thaw-platform`.
const ORDER: [&str; 18] = [
    "args", "host", "time", "mm", "task", "fs", "ipc", "net", "exec", "procfs", "sysfs", "secrets",
    "freeze", "syscall", "remote", "messages", "upcalls", "boot",
];

/// The root of all saved state: it has a part of every module, and every module uses it.
const ROOT: &str = "state";

#[test]
fn modules_use_those_below_them() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut upward = BTreeSet::new();
    for file in source_files(&source) {
        let module = module_of(&source, &file);
        if module == ROOT || ["lib", "main"].contains(&module.as_str()) {
            continue;
        }
        let level = |name: &str| ORDER.iter().position(|known| *known == name);
        let own = level(&module).unwrap_or_else(|| panic!("{module} is not in the order"));
        for used in modules_used(&product_code(&file)) {
            if level(&used).is_some_and(|used| used > own) {
                upward.insert((module.clone(), used));
            }
        }
    }
    assert!(upward.is_empty(), "uses of a higher module, as (user, used): {upward:#?}");
}

/// A leaked handle of the running thread would outlive the thread
/// (`thaw_platform::thread::Running`).
#[test]
fn nothing_is_leaked() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let files =
        [source.clone(), source.join("../../platform/src")].map(|folder| source_files(&folder));
    let leaks = |file: &PathBuf| product_code(file).contains("leak(");
    let leaking: Vec<_> = files.into_iter().flatten().filter(leaks).collect();
    assert!(leaking.is_empty(), "{leaking:?}");
}

/// Images hold the heap, so what hangs off a static would lie in them and belong to nobody. A
/// `StaticCell` holds nothing of the heap, as the compiler checks (`thaw_platform::sync`).
#[test]
fn statics_own_no_memory_of_the_heap() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let files =
        [source.clone(), source.join("../../platform/src")].map(|folder| source_files(&folder));
    let mut owning = BTreeSet::new();
    for file in files.into_iter().flatten() {
        let names = owning_statics(&product_code(&file)).into_iter();
        owning.extend(names.map(|name| (file.file_name().unwrap().to_owned(), name)));
    }
    // Messages of the host may come before there is a root. There are none when a sandbox is frozen.
    owning.remove(&("control.rs".into(), "KEPT".to_owned()));
    assert!(
        owning.is_empty(),
        "to be fields of `state::Kernel`, or each a `StaticCell`: {owning:?}"
    );
}

#[test]
fn a_static_that_owns_memory_is_found() {
    let found = |text: &str| owning_statics(text);
    assert_eq!(found("static A: KernelCell<Names> = KernelCell::new(Names::new());"), ["A"]);
    assert_eq!(found("    pub(super) static mut B:\n        Late<Arc<Name>> = x;"), ["B"]);
    assert_eq!(found("static C: StaticCell<Option<Given>> = StaticCell::new(None);"), [""; 0]);
    assert_eq!(found("static D: Late<&'static dyn Hooks> = Late::empty();"), [""; 0]);
    assert_eq!(found("let text: &'static str = String::new();\n// static E: Vec<u8> = x"), [""; 0]);
}

#[test]
fn a_use_is_found_in_every_form() {
    let used = |text: &str| modules_used(text).into_iter().collect::<Vec<_>>();
    assert_eq!(used("use crate::fs::file::Events;"), ["fs"]);
    assert_eq!(used("let x = crate::net::look();"), ["net"]);
    assert_eq!(used("use crate::{mm, task::Thread};"), ["mm", "task"]);
    assert_eq!(used("// as crate::boot does"), [""; 0]);
}

fn source_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(source_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files.retain(|path| !is_for_tests(path));
    files
}

fn is_for_tests(path: &Path) -> bool {
    path.to_string_lossy().contains("tests") || path.ends_with("src/testing.rs")
}

/// The top-level module to which a file belongs.
fn module_of(source: &Path, file: &Path) -> String {
    let first = file.strip_prefix(source).unwrap().components().next().unwrap();
    first.as_os_str().to_string_lossy().trim_end_matches(".rs").to_owned()
}

/// A file without its unit tests.
fn product_code(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    let end = text.find("#[cfg(test)]\nmod tests").unwrap_or(text.len());
    text[..end].to_owned()
}

/// The statics of a text whose type may own memory of the heap.
fn owning_statics(text: &str) -> Vec<String> {
    const OWNERS: [&str; 11] = [
        "KernelCell",
        "OnceCell",
        "LazyLock",
        "Mutex",
        "Vec",
        "VecDeque",
        "BTreeMap",
        "BTreeSet",
        "String",
        "Box",
        "Arc",
    ];
    let code: Vec<&str> = text.lines().map(|line| line.split("//").next().unwrap()).collect();
    let mut found = Vec::new();
    for at in 0..code.len() {
        let Some((before, _)) = code[at].split_once("static ") else { continue };
        // An item, not a lifetime.
        let is_item = ["", "pub", "pub(super)", "pub(crate)"].contains(&before.trim());
        let rest = code[at..].join(" ").split_off(before.len() + "static ".len());
        let Some((name, rest)) = rest.split_once(':').filter(|_| is_item) else { continue };
        let declared = rest.split(['=', ';']).next().unwrap();
        let mut words = declared.split(|c: char| !c.is_alphanumeric());
        if words.any(|word| OWNERS.contains(&word)) {
            found.push(name.trim_start_matches("mut ").to_owned());
        }
    }
    found
}

/// The modules of the crate that a text names.
fn modules_used(text: &str) -> BTreeSet<String> {
    let code: String = text.lines().map(|line| line.split("//").next().unwrap()).collect();
    let mut found = BTreeSet::new();
    for (at, path) in code.match_indices("crate::") {
        let is_own = !code[..at].ends_with(|before: char| before.is_alphanumeric());
        let rest = &code[at + path.len()..];
        let names = match rest.strip_prefix('{') {
            Some(group) => group.split('}').next().unwrap().split(',').collect(),
            None => vec![rest],
        };
        let first = |name: &str| {
            let name = name.trim_start();
            let end = name.find(|c: char| !c.is_alphanumeric() && c != '_');
            name[..end.unwrap_or(name.len())].to_owned()
        };
        found.extend(names.into_iter().filter(|_| is_own).map(first));
    }
    found
}
