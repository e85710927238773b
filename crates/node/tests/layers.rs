//! Dependencies between modules that must point one way.

use std::fs;
use std::path::{Path, PathBuf};

/// Modules below the gateway.
const BELOW: &[&str] = &[
    "admission.rs",
    "boots.rs",
    "crashes.rs",
    "edge",
    "far.rs",
    "health.rs",
    "inject",
    "instance",
    "logs",
    "metrics",
    "metrics.rs",
    "node",
    "node.rs",
    "rollout.rs",
    "service",
    "tenants",
    "upstream",
];

/// The source files of a module.
fn files(path: &Path) -> Vec<PathBuf> {
    if path.is_file() {
        return vec![path.to_owned()];
    }
    let entries = fs::read_dir(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    entries.flat_map(|entry| files(&entry.unwrap().path())).collect()
}

/// Lines of code that name a module; comments may.
fn lines_that_name(text: &str, module: &str) -> Vec<String> {
    let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let names = |line: &&str| {
        let in_a_path = format!("{module}::");
        let in_a_group = ["{", " "].map(|before| format!("{before}{module},"));
        line.contains(&in_a_path)
            || line.contains("crate::{") && in_a_group.iter().any(|name| line.contains(name))
            || line.trim() == format!("use crate::{module};")
    };
    code.filter(names).map(str::to_owned).collect()
}

#[test]
fn a_name_is_found_in_code_only() {
    for code in
        ["use crate::gateway::Gateway;", "use crate::{gateway, node};", "use crate::gateway;"]
    {
        assert_eq!(lines_that_name(code, "gateway").len(), 1, "{code}");
    }
    for other in
        ["// see crate::gateway::accept", "let gateway = 1;", "use crate::node::NodeState;"]
    {
        assert!(lines_that_name(other, "gateway").is_empty(), "{other}");
    }
}

#[test]
fn nothing_below_the_gateway_names_it() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for module in BELOW {
        for file in files(&source.join(module)) {
            let found = lines_that_name(&fs::read_to_string(&file).unwrap(), "gateway");
            assert!(found.is_empty(), "{} names the gateway: {found:?}", file.display());
        }
    }
}
