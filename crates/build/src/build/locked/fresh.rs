//! Whether a `poetry.lock` fits its pyproject.toml: Poetry keeps a hash of what it was made for.

use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write;
use toml::{Table, Value};

/// Keys of `[project]` that count.
const PROJECT: [&str; 3] = ["requires-python", "dependencies", "optional-dependencies"];
/// Keys of `[tool.poetry]` that count, and stand in the hash even without a value.
const LEGACY: [&str; 4] = ["dependencies", "source", "extras", "dev-dependencies"];

/// Deepest nesting of tables and lists.
const DEPTH_MAX: usize = 16;

/// A value of JSON, as Poetry hashes it.
enum Json<'a> {
    Null,
    Toml(&'a Value),
    Table(BTreeMap<&'a str, Json<'a>>),
}

/// Whether `hash` is of this pyproject.toml. Poetry 2.3 and later count `[dependency-groups]`,
/// those before do not.
pub(super) fn is_of(hash: &str, project: &Table) -> bool {
    [true, false].into_iter().any(|groups| content_hash(project, groups) == hash)
}

/// What Poetry calls the content hash (`poetry/packages/locker.py`).
fn content_hash(project: &Table, counts_groups: bool) -> String {
    let tables = |name: &str| project.get(name).and_then(Value::as_table);
    let own = tables("project");
    let poetry = tables("tool").and_then(|tool| tool.get("poetry")).and_then(Value::as_table);
    let has_groups = tables("dependency-groups").is_some_and(|groups| !groups.is_empty());
    let groups = project.get("dependency-groups").filter(|_| counts_groups && has_groups);
    let of_project: BTreeMap<&str, Json<'_>> =
        PROJECT.into_iter().filter_map(|key| Some((key, Json::Toml(own?.get(key)?)))).collect();
    let is_plain = of_project.is_empty() && groups.is_none();
    let mut of_poetry = BTreeMap::new();
    for key in LEGACY.into_iter().chain(["group"]) {
        match poetry.and_then(|poetry| poetry.get(key)) {
            Some(value) => drop(of_poetry.insert(key, Json::Toml(value))),
            None if is_plain && key != "group" => drop(of_poetry.insert(key, Json::Null)),
            None => {}
        }
    }
    let mut all = BTreeMap::new();
    if is_plain {
        all = of_poetry;
    } else {
        if !of_project.is_empty() {
            all.insert("project", Json::Table(of_project));
        }
        if let Some(groups) = groups {
            all.insert("dependency-groups", Json::Toml(groups));
        }
        all.insert("tool", Json::Table(BTreeMap::from([("poetry", Json::Table(of_poetry))])));
    }
    let mut text = String::new();
    write(&mut text, &Json::Table(all));
    Sha256::digest(text).iter().fold(String::new(), |mut hash, byte| {
        let _ = write!(hash, "{byte:02x}");
        hash
    })
}

/// Writes JSON as Python's `json.dumps(value, sort_keys=True)` does.
fn write(text: &mut String, value: &Json<'_>) {
    match value {
        Json::Null => text.push_str("null"),
        Json::Toml(value) => write_toml(text, value, 0),
        Json::Table(table) => {
            let items = table.iter().map(|(key, value)| (*key, value));
            write_items(text, items, |text, value| write(text, value));
        }
    }
}

fn write_toml(text: &mut String, value: &Value, depth: usize) {
    match value {
        // No hash is of such a thing.
        _ if depth > DEPTH_MAX => text.push_str("..."),
        Value::String(string) => write_string(text, string),
        Value::Boolean(_) | Value::Integer(_) | Value::Float(_) | Value::Datetime(_) => {
            let _ = write!(text, "{value}");
        }
        Value::Array(all) => {
            text.push('[');
            for (number, item) in all.iter().enumerate() {
                text.push_str(if number == 0 { "" } else { ", " });
                write_toml(text, item, depth + 1);
            }
            text.push(']');
        }
        Value::Table(table) => {
            let sorted: BTreeMap<&str, &Value> =
                table.iter().map(|(key, value)| (key.as_str(), value)).collect();
            write_items(text, sorted.into_iter(), |text, value| write_toml(text, value, depth + 1));
        }
    }
}

fn write_items<'a, T>(
    text: &mut String,
    items: impl Iterator<Item = (&'a str, T)>,
    each: impl Fn(&mut String, T),
) {
    text.push('{');
    for (number, (key, value)) in items.enumerate() {
        text.push_str(if number == 0 { "" } else { ", " });
        write_string(text, key);
        text.push_str(": ");
        each(text, value);
    }
    text.push('}');
}

/// A text with `\u` for everything that is not ASCII.
fn write_string(text: &mut String, string: &str) {
    text.push('"');
    for c in string.chars() {
        match c {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\u{8}' => text.push_str("\\b"),
            '\u{c}' => text.push_str("\\f"),
            ' '..='~' => text.push(c),
            c => c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| {
                let _ = write!(text, "\\u{unit:04x}");
            }),
        }
    }
    text.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Projects with the hashes that Poetry itself has made of them: 1.8.5 and 2.5.1.
    const HASHED: [(&str, &str); 3] = [
        (
            "[tool.poetry.dependencies]\npython = \"^3.9\"\n\
             flask = [{version = \"1\", python = \"<3.10\"}, {version = \"2\", python = \">=3.10\"}]\n\
             [tool.poetry.dev-dependencies]\na = \"*\"\n",
            "989958c0c48d84a058943c925845362e02d1455c4a1c61a531a791eae33e1b2f",
        ),
        (
            "[project]\nname = \"x\"\nrequires-python = \">=3.9\"\ndependencies = [\"flask\"]\n\
             [dependency-groups]\ndev = [\"pytest\", {include-group = \"a\"}]\na = []\n\
             [tool.poetry.dependencies]\n\
             flask = {source = \"größe\\t\\\"x\\\" 😀\", optional = false}\n",
            "a803ac28b615533bdc7c6a1b1eec6b90ce8c56ab7cba78678aa43acf3ba0ba16",
        ),
        (
            "[project]\ndependencies = []\n[tool.poetry.group.x]\noptional = true\n\
             [tool.poetry.group.x.dependencies]\nflask = \"*\"\n",
            "05ecebee25b46852bbef9f27334a77f2c7eb4454dae539f8910c9307094732b2",
        ),
    ];

    #[test]
    fn hashes_are_those_of_poetry() {
        for (text, expected) in HASHED {
            assert!(is_of(expected, &text.parse().unwrap()), "{text}");
            let other = text.replace("flask", "flusk");
            assert!(!is_of(expected, &other.parse().unwrap()), "{text}");
        }
    }

    #[test]
    fn a_deep_table_ends() {
        let text = format!("[project]\ndependencies = {}{}\n", "[".repeat(60), "]".repeat(60));
        assert!(!is_of("", &text.parse().unwrap()));
    }
}
