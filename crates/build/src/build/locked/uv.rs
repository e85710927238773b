//! `uv.lock`: a graph of packages with the project itself among them.

use super::ways::{self, Edge};
use super::{Asked, Origin, PACKAGES_MAX, Pin, elsewhere, normal};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use toml::{Table, Value};

#[derive(Deserialize)]
struct Lock {
    version: u32,
    #[serde(default, rename = "package")]
    packages: Vec<Package>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Package {
    name: String,
    #[serde(default)]
    version: String,
    source: Source,
    #[serde(default)]
    dependencies: Vec<Dependency>,
    #[serde(default)]
    optional_dependencies: BTreeMap<String, Vec<Dependency>>,
    sdist: Option<Archive>,
    #[serde(default)]
    wheels: Vec<Archive>,
    #[serde(default)]
    metadata: Metadata,
}

/// Where a package is from: one of these.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct Source {
    registry: Option<String>,
    url: Option<String>,
    subdirectory: Option<String>,
    git: Option<String>,
    path: Option<String>,
    directory: Option<String>,
    editable: Option<String>,
    r#virtual: Option<String>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    version: Option<String>,
    source: Option<Source>,
    #[serde(default)]
    extra: Vec<String>,
    #[serde(default)]
    marker: String,
}

#[derive(Deserialize)]
struct Archive {
    url: Option<String>,
    hash: Option<String>,
}

/// What the project asked for when it was locked.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct Metadata {
    requires_dist: Vec<Requirement>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Requirement {
    name: String,
    extras: Vec<String>,
    specifier: Option<String>,
    marker: String,
}

/// The packages that the project needs to run, without its extras and its groups.
pub(super) fn pins(text: &str, project: &Table) -> Result<Vec<Pin>, String> {
    let lock: Lock = toml::from_str(text).map_err(|error| error.to_string())?;
    if lock.version != 1 {
        return Err(format!(
            "its version is {}, and only 1 is known; export it with `uv export --frozen --no-dev \
             --no-emit-project -o requirements.txt`, and name that as `requirements`",
            lock.version
        ));
    }
    if lock.packages.len() > PACKAGES_MAX {
        return Err(format!("it has more than {PACKAGES_MAX} packages"));
    }
    let root = lock.packages.iter().position(|package| package.source.is_project());
    let Some(root) = root else {
        return Err("it has no package for this directory; name the uv.lock of a project, and not one of a \
                    workspace alone"
            .to_owned());
    };
    check_fits(&lock.packages[root], project)?;
    let graph = Graph::new(&lock.packages);
    let wanted =
        ways::wanted(graph.edges(root, None)?, &|number, extra| graph.edges(number, extra))?;
    // The project's own files are the function's anyhow.
    let wanted = wanted.into_iter().filter(|(number, _)| *number != root);
    wanted.map(|(number, marker)| lock.packages[number].pin(marker)).collect()
}

impl Source {
    /// Whether it is the directory that the lock file lies in.
    fn is_project(&self) -> bool {
        let own = [&self.r#virtual, &self.editable, &self.directory];
        own.into_iter().flatten().any(|path| path == ".")
    }
}

impl Package {
    fn pin(&self, marker: String) -> Result<Pin, String> {
        let archives = || self.sdist.iter().chain(&self.wheels);
        let mut elsewhere_of_index = Vec::new();
        let origin = match &self.source {
            Source { registry: Some(url), .. } => {
                if url.trim_end_matches('/') != super::PYPI {
                    let urls = archives().filter_map(|archive| archive.url.clone());
                    elsewhere_of_index.extend(urls.filter(|url| url.contains("://")));
                }
                Origin::Index(url.clone())
            }
            Source { url: Some(url), subdirectory: None, .. } => Origin::Archive(url.clone()),
            Source { url: Some(url), subdirectory: Some(below), .. } => {
                Origin::Archive(format!("{url}#subdirectory={below}"))
            }
            Source { git: Some(_), .. } => return Err(elsewhere(&self.name, "git")),
            Source { path: Some(path), .. } => {
                return Err(elsewhere(&self.name, &format!("the file {path}")));
            }
            Source { directory, editable, r#virtual, .. } => {
                let path = directory.as_ref().or(editable.as_ref()).or(r#virtual.as_ref());
                let from =
                    path.map_or("nowhere".to_owned(), |path| format!("the directory {path}"));
                return Err(elsewhere(&self.name, &from));
            }
        };
        Ok(Pin {
            name: normal(&self.name),
            version: self.version.clone(),
            origin,
            archives: elsewhere_of_index,
            hashes: archives().filter_map(|archive| archive.hash.clone()).collect(),
            marker,
        })
    }
}

/// Packages by their names.
struct Graph<'a> {
    packages: &'a [Package],
    numbers: BTreeMap<&'a str, Vec<usize>>,
}

impl<'a> Graph<'a> {
    fn new(packages: &'a [Package]) -> Self {
        let mut numbers: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (number, package) in packages.iter().enumerate() {
            numbers.entry(&package.name).or_default().push(number);
        }
        Self { packages, numbers }
    }

    /// What a package needs, or one of its extras besides.
    fn edges(&self, number: usize, extra: Option<&str>) -> Result<Vec<Edge>, String> {
        let package = &self.packages[number];
        let extras = package.optional_dependencies.iter();
        let all = match extra {
            None => package.dependencies.as_slice(),
            Some(extra) => extras
                .filter(|(name, _)| normal(name) == extra)
                .map(|(_, all)| all.as_slice())
                .next()
                .unwrap_or_default(),
        };
        all.iter().map(|dependency| self.edge(package, dependency)).collect()
    }

    fn edge(&self, from: &Package, dependency: &Dependency) -> Result<Edge, String> {
        let Dependency { name, version, source, extra, marker } = dependency;
        let is_meant = |number: &usize| {
            let package = &self.packages[*number];
            version.as_ref().is_none_or(|version| *version == package.version)
                && source.as_ref().is_none_or(|source| *source == package.source)
        };
        let all = self.numbers.get(name.as_str()).into_iter().flatten().copied();
        let found: Vec<usize> = all.filter(is_meant).collect();
        match found.as_slice() {
            [to] => Ok(Edge { to: *to, extras: extra.clone(), marker: marker.clone() }),
            _ => Err(format!(
                "it has {} packages {name} that {} may mean, not one; run `uv lock`",
                found.len(),
                from.name
            )),
        }
    }
}

/// Refuses a lock file that was made for other dependencies than those of the pyproject.toml.
fn check_fits(root: &Package, project: &Table) -> Result<(), String> {
    let Some(table) = project.get("project").and_then(Value::as_table) else { return Ok(()) };
    let dynamic = table.get("dynamic").and_then(Value::as_array).into_iter().flatten();
    if dynamic.into_iter().any(|key| key.as_str() == Some("dependencies")) {
        return Ok(());
    }
    let list = table.get("dependencies").and_then(Value::as_array).into_iter().flatten();
    let mut asked: Vec<Asked> = list.filter_map(|item| Asked::parse(item.as_str()?)).collect();
    let locked = root.metadata.requires_dist.iter();
    let mut locked: Vec<Asked> =
        locked.filter(|one| !one.marker.contains("extra ==")).map(Requirement::asked).collect();
    // A source of [tool.uv.sources] takes the place of a version.
    let is_elsewhere = |one: &&Asked| one.versions.is_empty() || one.versions.starts_with('@');
    let loose: BTreeSet<String> =
        locked.iter().chain(&asked).filter(is_elsewhere).map(|one| one.name.clone()).collect();
    for one in asked.iter_mut().chain(&mut locked) {
        if loose.contains(&one.name) {
            one.versions.clear();
        }
    }
    let asked: BTreeSet<String> = asked.iter().map(Asked::comparable).collect();
    let locked: BTreeSet<String> = locked.iter().map(Asked::comparable).collect();
    if let Some(new) = asked.difference(&locked).next() {
        return Err(format!(
            "it was not made for {new}, which pyproject.toml wants; run `uv lock`"
        ));
    }
    match locked.difference(&asked).next() {
        Some(old) => {
            Err(format!("it was made for {old}, which pyproject.toml does not want; run `uv lock`"))
        }
        None => Ok(()),
    }
}

impl Requirement {
    fn asked(&self) -> Asked {
        Asked {
            name: normal(&self.name),
            extras: self.extras.iter().map(|extra| normal(extra)).collect(),
            versions: self.specifier.clone().unwrap_or_default(),
            marker: String::new(),
        }
    }
}

impl Asked {
    /// A text that is equal for equal wishes. Versions that uv may write another way, such as
    /// `1.0-rc.1`, are left out.
    fn comparable(&self) -> String {
        let is_plain = |c: char| c.is_ascii_digit() || ".*".contains(c);
        let clause = |text: &str| {
            let text: String = text.split_whitespace().collect();
            let version = text.trim_start_matches(|c: char| "<>=!~".contains(c));
            version.chars().all(is_plain).then(|| text.clone())
        };
        let clauses: BTreeSet<String> = self.versions.split(',').filter_map(clause).collect();
        let join = |all: &BTreeSet<String>| all.iter().cloned().collect::<Vec<_>>().join(",");
        let extras = match self.extras.is_empty() {
            true => String::new(),
            false => format!("[{}]", join(&self.extras)),
        };
        format!("{}{extras}{}", self.name, join(&clauses))
    }
}
