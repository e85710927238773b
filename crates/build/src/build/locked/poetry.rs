//! `poetry.lock`: a list of packages. Poetry 2 writes which are for whom; what Poetry 1 has written
//! is a graph, whose roots are in the pyproject.toml.

use super::ways::{self, Edge};
use super::{Asked, Origin, PACKAGES_MAX, PYPI, Pin, elsewhere, fresh, normal};
use crate::build::poetry::dependencies;
use regex::{Captures, Regex};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use toml::{Table, Value};

/// The group of the packages that the program needs to run.
const MAIN: &str = "main";
/// A condition that always holds.
const ALWAYS: &str = "os_name != \"\"";

#[derive(Deserialize)]
struct Lock {
    #[serde(default, rename = "package")]
    packages: Vec<Package>,
    metadata: Metadata,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Metadata {
    lock_version: Option<String>,
    #[serde(default)]
    content_hash: String,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    #[serde(default)]
    optional: bool,
    #[serde(default)]
    files: Vec<Archive>,
    #[serde(default)]
    groups: Vec<String>,
    markers: Option<Markers>,
    #[serde(default)]
    dependencies: BTreeMap<String, OneOrMore>,
    #[serde(default)]
    extras: BTreeMap<String, Vec<String>>,
    source: Option<Source>,
}

#[derive(Deserialize)]
struct Archive {
    hash: String,
}

/// A condition for all groups, or one for each.
#[derive(Deserialize)]
#[serde(untagged)]
enum Markers {
    All(String),
    OfGroups(BTreeMap<String, String>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    More(Vec<Dependency>),
    One(Dependency),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Dependency {
    Version(#[allow(dead_code, reason = "the lock file has the version that counts")] String),
    Table(Wish),
}

#[derive(Clone, Default, Deserialize)]
#[serde(default)]
struct Wish {
    optional: bool,
    markers: String,
    extras: Vec<String>,
}

#[derive(Deserialize)]
struct Source {
    #[serde(default)]
    r#type: String,
    #[serde(default)]
    url: String,
}

/// The packages that the project needs to run, without its extras and other groups.
pub(super) fn pins(text: &str, project: &Table) -> Result<Vec<Pin>, String> {
    let lock: Lock = toml::from_str(text).map_err(|error| error.to_string())?;
    if lock.packages.len() > PACKAGES_MAX {
        return Err(format!("it has more than {PACKAGES_MAX} packages"));
    }
    let version = lock.metadata.lock_version.as_deref().unwrap_or("0");
    let numbers: Vec<u32> = version.split('.').filter_map(|number| number.parse().ok()).collect();
    let names_groups = match numbers.as_slice() {
        [2, 0, ..] => false,
        [2, _, ..] => true,
        _ => {
            return Err(format!(
                "its lock-version is {version}, and only 2 is known; run `poetry lock` with Poetry 1.5 or later"
            ));
        }
    };
    if !fresh::is_of(&lock.metadata.content_hash, project) {
        return Err(
            "it was made for other dependencies than those of pyproject.toml; run `poetry lock`"
                .to_owned(),
        );
    }
    match names_groups {
        true => lock.packages.iter().filter_map(Package::of_main).collect(),
        false => reached(&lock.packages, project),
    }
}

/// The packages that the graph leads to from what the project names.
fn reached(packages: &[Package], project: &Table) -> Result<Vec<Pin>, String> {
    let graph = Graph::new(packages);
    let poetry = project.get("tool").and_then(|tool| tool.get("poetry")).and_then(Value::as_table);
    let lines = poetry.map_or_else(|| Ok(Vec::new()), dependencies)?;
    let mut roots = Vec::new();
    for asked in lines.iter().filter_map(|line| Asked::parse(line)) {
        let extras = asked.extras.into_iter().collect();
        let wish = Wish { optional: false, markers: asked.marker, extras };
        roots.extend(graph.edge("pyproject.toml", &asked.name, &wish, None)?);
    }
    let wanted = ways::wanted(roots, &|number, extra| graph.edges(number, extra))?;
    wanted.into_iter().map(|(number, marker)| packages[number].pin(marker)).collect()
}

impl Package {
    /// If the program needs it to run. An extra of the project has optional ones.
    fn of_main(&self) -> Option<Result<Pin, String>> {
        if self.optional || !self.groups.iter().any(|group| group == MAIN) {
            return None;
        }
        let marker = match &self.markers {
            Some(Markers::All(marker)) => marker.as_str(),
            Some(Markers::OfGroups(all)) => all.get(MAIN).map_or("", String::as_str),
            None => "",
        };
        Some(super::check_marker(marker).and_then(|marker| self.pin(marker.to_owned())))
    }

    fn pin(&self, marker: String) -> Result<Pin, String> {
        let origin = match &self.source {
            None => Origin::Index(PYPI.to_owned()),
            Some(Source { r#type, url }) => match r#type.as_str() {
                "legacy" => Origin::Index(url.clone()),
                "url" => Origin::Archive(url.clone()),
                "git" => return Err(elsewhere(&self.name, "git")),
                kind => return Err(elsewhere(&self.name, &format!("a {kind}"))),
            },
        };
        Ok(Pin {
            name: normal(&self.name),
            version: self.version.clone(),
            origin,
            archives: Vec::new(),
            hashes: self.files.iter().map(|file| file.hash.clone()).collect(),
            marker,
        })
    }

    /// What it says about another package, in all entries.
    fn wishes(&self, name: &str) -> Vec<Wish> {
        let of_name = self.dependencies.iter().filter(|(other, _)| normal(other) == name);
        of_name.flat_map(|(_, wanted)| wanted.wishes()).collect()
    }
}

impl OneOrMore {
    fn wishes(&self) -> Vec<Wish> {
        let all = match self {
            Self::More(all) => all.as_slice(),
            Self::One(one) => std::slice::from_ref(one),
        };
        let wish = |one: &Dependency| match one {
            Dependency::Version(_) => Wish::default(),
            Dependency::Table(wish) => wish.clone(),
        };
        all.iter().map(wish).collect()
    }
}

/// Packages by their names.
struct Graph<'a> {
    packages: &'a [Package],
    numbers: HashMap<String, Vec<usize>>,
}

impl<'a> Graph<'a> {
    fn new(packages: &'a [Package]) -> Self {
        let mut numbers: HashMap<String, Vec<usize>> = HashMap::new();
        for (number, package) in packages.iter().enumerate() {
            numbers.entry(normal(&package.name)).or_default().push(number);
        }
        Self { packages, numbers }
    }

    /// What a package needs, or one of its extras besides.
    fn edges(&self, number: usize, extra: Option<&str>) -> Result<Vec<Edge>, String> {
        let package = &self.packages[number];
        let mut edges = Vec::new();
        let Some(extra) = extra else {
            for (name, wanted) in &package.dependencies {
                for wish in wanted.wishes().iter().filter(|wish| !wish.optional) {
                    edges.extend(self.edge(&package.name, &normal(name), wish, None)?);
                }
            }
            return Ok(edges);
        };
        let adds = package.extras.iter().filter(|(name, _)| normal(name) == extra);
        for asked in adds.flat_map(|(_, lines)| lines).filter_map(|line| Asked::parse(line)) {
            for wish in package.wishes(&asked.name).iter().filter(|wish| wish.optional) {
                edges.extend(self.edge(&package.name, &asked.name, wish, Some(extra))?);
            }
        }
        Ok(edges)
    }

    /// The way to a package. There is none to one that no machine has wanted which the project is for.
    fn edge(
        &self,
        from: &str,
        name: &str,
        wish: &Wish,
        extra: Option<&str>,
    ) -> Result<Option<Edge>, String> {
        let numbers = self.numbers.get(name).map(Vec::as_slice).unwrap_or_default();
        let marker = match extra {
            Some(extra) => within(extra, &wish.markers),
            None => wish.markers.clone(),
        };
        match numbers {
            [to] => Ok(Some(Edge { to: *to, extras: wish.extras.clone(), marker })),
            [] if !marker.is_empty() => Ok(None),
            [] => Err(format!("it does not have {name}, which {from} needs; run `poetry lock`")),
            _ => Err(format!(
                "it has several versions of {name}, and Poetry 1 did not write which is for whom; run \
                 `poetry lock` with Poetry 2"
            )),
        }
    }
}

/// A condition where an extra was asked for: that it was holds.
fn within(extra: &str, marker: &str) -> String {
    let asked = Regex::new(r#"\bextra\s*==\s*["']([^"']*)["']"#).expect("it is one");
    let holds = |found: &Captures<'_>| match normal(&found[1]) == extra {
        true => ALWAYS.to_owned(),
        false => found[0].to_owned(),
    };
    asked.replace_all(marker, holds).into_owned()
}

#[cfg(test)]
mod tests {
    use super::within;

    #[test]
    fn the_extra_that_was_asked_for_holds() {
        for (marker, expected) in [
            ("", ""),
            ("extra == \"standard\"", "os_name != \"\""),
            (
                "(os_name == \"nt\" and extra == \"standard\") or extra == \"all\"",
                "(os_name == \"nt\" and os_name != \"\") or extra == \"all\"",
            ),
            ("(extra == \"standard\")", "(os_name != \"\")"),
        ] {
            assert_eq!(within("standard", marker), expected, "{marker}");
        }
    }
}
