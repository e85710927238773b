//! `docs/thaw-toml.md` lists exactly the keys that the parser knows, with their defaults.

use super::FunctionConfig;
use serde::de::value::StrDeserializer;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, forward_to_deserialize_any};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display};
use std::path::Path;

const REFERENCE: &str = include_str!("../../../../docs/thaw-toml.md");

/// A key that no table has: the refusal names the keys that the table has.
const UNKNOWN: &str = "\0";

/// The keys of the table at `path`; none if there is a value instead.
fn keys_of_table(path: &[&'static str]) -> Option<&'static [&'static str]> {
    match FunctionConfig::deserialize(Probe { path }) {
        Err(Refusal::UnknownKey(keys)) => Some(keys),
        _ => None,
    }
}

/// All keys below `path` with the names of their tables before them, as in `limits.memory`.
/// A key whose value can only be a table counts by the keys of that table.
fn keys_below(path: &mut Vec<&'static str>, found: &mut BTreeSet<String>) {
    for key in keys_of_table(path).unwrap_or_default() {
        path.push(key);
        found.insert(path.join("."));
        keys_below(path, found);
        path.pop();
    }
}

/// Stands for a document that has one value: a table at `path` with an unknown key.
#[derive(Clone, Copy)]
struct Probe<'a> {
    path: &'a [&'static str],
}

/// Why a probe was not taken.
#[derive(Debug)]
enum Refusal {
    /// The table at the path has these keys.
    UnknownKey(&'static [&'static str]),
    /// There is no table at the path.
    Other,
}

impl Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

impl std::error::Error for Refusal {}

impl Error for Refusal {
    fn custom<T: Display>(_message: T) -> Self {
        Self::Other
    }

    fn unknown_field(_field: &str, expected: &'static [&'static str]) -> Self {
        Self::UnknownKey(expected)
    }
}

impl<'de> Deserializer<'de> for Probe<'_> {
    type Error = Refusal;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refusal> {
        visitor.visit_map(self)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refusal> {
        visitor.visit_some(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refusal> {
        visitor.visit_seq(self)
    }

    /// The author of a function chooses the keys of such a table.
    fn deserialize_map<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, Refusal> {
        Err(Refusal::custom("a table with any keys"))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct newtype_struct tuple tuple_struct struct enum identifier ignored_any
    }
}

impl<'de> SeqAccess<'de> for Probe<'_> {
    type Error = Refusal;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Refusal> {
        seed.deserialize(*self).map(Some)
    }
}

impl<'de> MapAccess<'de> for Probe<'_> {
    type Error = Refusal;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Refusal> {
        let key = self.path.first().copied().unwrap_or(UNKNOWN);
        seed.deserialize(StrDeserializer::new(key)).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Refusal> {
        seed.deserialize(Probe { path: &self.path[1..] })
    }
}

/// The cells of each row of the reference that describes a key.
fn rows() -> Vec<Vec<&'static str>> {
    let rows = REFERENCE.lines().filter(|line| line.starts_with("| `"));
    rows.map(|line| line.trim_matches('|').split('|').map(str::trim).collect()).collect()
}

fn key_of(row: &[&'static str]) -> &'static str {
    row[0].trim_matches('`')
}

/// The documents in the reference, as they stand between the marks of Markdown.
fn examples() -> impl Iterator<Item = &'static str> {
    REFERENCE.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap())
}

#[test]
fn the_reference_lists_the_keys_that_the_parser_knows() {
    let mut known = BTreeSet::new();
    keys_below(&mut Vec::new(), &mut known);
    // Sections have a heading each instead of a row.
    known.retain(|key| !REFERENCE.contains(&format!("\n## `[{key}]`")));
    let listed: BTreeSet<String> = rows().iter().map(|row| key_of(row).to_owned()).collect();
    let missing: Vec<_> = known.difference(&listed).collect();
    let unknown: Vec<_> = listed.difference(&known).collect();
    assert!(missing.is_empty(), "docs/thaw-toml.md lacks {missing:?}");
    assert!(unknown.is_empty(), "docs/thaw-toml.md lists {unknown:?}, which the parser refuses");
    // The probe reached tables in lists and tables that stand for a text.
    for deep in ["train.requests.path", "files.from", "entry.freeze.signal", "limits.memory"] {
        assert!(known.contains(deep), "{deep}");
    }
}

#[test]
fn every_row_of_the_reference_has_all_cells_once() {
    let mut rows_of: BTreeMap<&str, usize> = BTreeMap::new();
    for row in rows() {
        assert_eq!(row.len(), 5, "{row:?}");
        *rows_of.entry(key_of(&row)).or_default() += 1;
        assert!([0, 1, 2, 4].iter().all(|cell| !row[*cell].is_empty()), "{row:?}");
    }
    assert!(rows_of.values().all(|count| *count == 1), "{rows_of:?}");
}

#[test]
fn the_reference_names_the_defaults() {
    let minimal = format!("{}\n[build]\ncommand = [\"make\"]", examples().next().unwrap());
    let config = FunctionConfig::parse(Path::new("thaw.toml"), &minimal).unwrap();
    let values = toml::Value::try_from(&config).unwrap();
    let mut compared = 0;
    for row in rows() {
        let mut names = key_of(&row).split('.');
        let value = names.try_fold(&values, |table, name| table.get(name));
        let default = row[2].trim_matches('`');
        let chosen_above = default == "required" || key_of(&row) == "build.command";
        if let Some(value) = value.filter(|_| !chosen_above) {
            assert_eq!(value.to_string(), default, "{row:?}");
            compared += 1;
        }
    }
    assert!(compared > 12, "only {compared} defaults were compared");
}

/// An example as a document of its own: what it leaves out is the first one's.
fn completed(example: &str) -> toml::Table {
    let mut document: toml::Table = examples().next().unwrap().parse().unwrap();
    document.extend(example.parse::<toml::Table>().unwrap());
    document
}

/// All keys of a document, with the names of their tables before them.
fn keys_of(prefix: &str, value: &toml::Value, found: &mut BTreeSet<String>) {
    let tables: Vec<&toml::Table> = match value {
        toml::Value::Table(table) => vec![table],
        toml::Value::Array(list) => list.iter().filter_map(toml::Value::as_table).collect(),
        _ => Vec::new(),
    };
    for (key, value) in tables.into_iter().flatten() {
        let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        keys_of(&path, value, found);
        found.insert(path);
    }
}

#[test]
fn every_key_of_the_reference_is_in_an_example() {
    let mut shown = BTreeSet::new();
    examples().for_each(|text| keys_of("", &completed(text).into(), &mut shown));
    // Each stands in place of others.
    let others = ["rootfs", "rewind", "runtime.image"];
    let missing: Vec<_> =
        rows().iter().map(|row| key_of(row)).filter(|key| !shown.contains(*key)).collect();
    assert_eq!(missing, others, "docs/thaw-toml.md has no example of them");
}

#[test]
fn the_examples_of_the_reference_are_valid() {
    for example in examples() {
        let document = completed(example).to_string();
        let parsed = FunctionConfig::parse(Path::new("thaw.toml"), &document);
        parsed.unwrap_or_else(|error| panic!("{error}\n{document}"));
    }
}

/// The table that a key is in, in a document that has it.
fn table_of<'a>(document: &'a mut toml::Table, key: &str) -> Option<(&'a mut toml::Table, String)> {
    let (tables, name) = key.rsplit_once('.').unwrap_or(("", key));
    let mut table = document;
    for part in tables.split('.').filter(|part| !part.is_empty()) {
        table = match table.get_mut(part)? {
            toml::Value::Table(below) => below,
            // Those that are texts stand beside tables.
            toml::Value::Array(all) => all.iter_mut().find_map(toml::Value::as_table_mut)?,
            _ => return None,
        };
    }
    table.contains_key(name).then(|| (table, name.to_owned()))
}

/// The first example that has a key, as a document of its own.
fn document_with(key: &str) -> Option<toml::Table> {
    examples().map(completed).find(|document| table_of(&mut document.clone(), key).is_some())
}

/// Whether a document is valid with another value in place of the one that a key has.
fn accepts(key: &str, value: toml::Value) -> bool {
    let mut document = document_with(key).unwrap_or_else(|| panic!("no example has {key}"));
    let (table, name) = table_of(&mut document, key).unwrap();
    table.insert(name, value);
    FunctionConfig::parse(Path::new("thaw.toml"), &document.to_string()).is_ok()
}

#[test]
fn the_reference_names_the_defaults_of_sections_that_are_there() {
    let mut compared = BTreeSet::new();
    for row in rows() {
        let (key, default) = (key_of(&row), row[2]);
        let is_literal = default.starts_with('`') && default.matches('`').count() == 2;
        let Some(mut document) = document_with(key).filter(|_| is_literal) else { continue };
        let (table, name) = table_of(&mut document, key).unwrap();
        table.remove(&name);
        let text = document.to_string();
        let Ok(config) = FunctionConfig::parse(Path::new("thaw.toml"), &text) else { continue };
        let mut values = toml::Table::try_from(&config).unwrap();
        if let Some((table, name)) = table_of(&mut values, key) {
            assert_eq!(table[&name].to_string(), default.trim_matches('`'), "{row:?}");
            compared.insert(key);
        }
    }
    for key in ["async.attempts", "rollback.window", "liveness.timeout", "limits.queue"] {
        assert!(compared.contains(key), "{key} is not in {compared:?}");
    }
    assert!(compared.len() > 35, "only {compared:?}");
}

#[test]
fn the_reference_names_the_types() {
    let mut compared = 0;
    for row in rows().into_iter().filter(|row| document_with(key_of(row)).is_some()) {
        let text = || toml::Value::String("\u{1}".to_owned());
        let wrong = match row[1] {
            "integer" => vec![text(), toml::Value::Boolean(true), toml::Value::Integer(-1)],
            "count" => vec![text(), toml::Value::Integer(0), toml::Value::Integer(-1)],
            "boolean" | "true or false" => vec![text(), toml::Value::Integer(1)],
            "duration" | "size" => vec![text(), toml::Value::Boolean(true)],
            "text" | "path" | "absolute path" | "path of the directory" | "function" => {
                vec![toml::Value::Integer(1), toml::Value::Array(Vec::new())]
            }
            kind if kind.starts_with("list of") => vec![toml::Value::Integer(1)],
            "table of texts" => vec![toml::Value::Integer(1), text()],
            kind if kind.starts_with('`') => vec![text(), toml::Value::Integer(1)],
            _ => continue,
        };
        for value in wrong {
            assert!(!accepts(key_of(&row), value.clone()), "{value} is no error: {row:?}");
        }
        compared += 1;
    }
    assert!(compared > 80, "only {compared}");
}

/// A bound of the reference: `4096`, `"1m"` or `"64MiB"`, and values just below and above.
fn around(bound: &str) -> Option<[toml::Value; 3]> {
    if let Ok(number) = bound.parse::<i64>() {
        return Some([number - 1, number, number + 1].map(toml::Value::Integer));
    }
    let text = bound.strip_prefix('"')?.strip_suffix('"')?;
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = (text[..digits].parse::<i64>().ok()?, &text[digits..]);
    let (smaller, factor) = match unit {
        "h" => ("s", 3600),
        "m" => ("s", 60),
        "s" => ("ms", 1000),
        "ms" => ("us", 1000),
        "GiB" => ("MiB", 1024),
        "MiB" => ("KiB", 1024),
        _ => return None,
    };
    let near = |by: i64| toml::Value::String(format!("{}{smaller}", number * factor + by));
    Some([near(-1), toml::Value::String(text.to_owned()), near(1)])
}

#[test]
fn the_reference_names_the_bounds() {
    // With these values, another key of the example would have to change, too.
    let depend = [
        "limits.cpu",
        "limits.processes",
        "liveness.period",
        "liveness.timeout",
        "async.backoff",
        "async.body_max",
        "refresh",
        "ready",
    ];
    let (mut compared, mut wrong) = (0, Vec::new());
    for row in rows() {
        let (key, text) = (key_of(&row), row[3].replace('`', ""));
        if !["integer", "count", "duration", "size"].contains(&row[1])
            || document_with(key).is_none()
        {
            continue;
        }
        let first = text.split([';', ',']).next().unwrap_or_default();
        let (least, most) = match first.split_once(" to ") {
            Some((least, most)) => (Some(least), Some(most)),
            None => (
                first.strip_prefix("at least "),
                first.strip_prefix("at most ").or_else(|| first.strip_suffix(" at most")),
            ),
        };
        let least = least.and_then(around).map(|[below, at, _]| (below, at));
        let most = most.and_then(around).map(|[_, at, above]| (above, at));
        for (beyond, at) in least.into_iter().chain(most) {
            if accepts(key, beyond.clone()) {
                wrong.push(format!("{beyond} is no error: {row:?}"));
            }
            if !accepts(key, at.clone()) && !depend.contains(&key) {
                wrong.push(format!("{at} is an error: {row:?}"));
            }
            compared += 1;
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(compared > 30, "only {compared}");
}
