//! Gradle: `build.gradle` or `build.gradle.kts`, in Groovy or Kotlin, of the directory itself or of
//! one project below it.
//!
//! The files are programs, so they are not run here but searched for what people write in them:
//! which plugins, which class with `main`, which repositories. The command of the build asks Gradle
//! for the rest: it copies what Gradle has made, whatever the names are.

use super::java::main_class;
use super::look::Look;
use super::{InitError, Project};
use regex::Regex;
use std::collections::BTreeSet;

/// Files of a project.
pub(super) const BUILD_FILES: [&str; 2] = ["build.gradle", "build.gradle.kts"];
/// Files that name the projects below a directory.
pub(super) const SETTINGS_FILES: [&str; 2] = ["settings.gradle", "settings.gradle.kts"];

/// The list of plugins and libraries that build files name by `libs.`
/// (<https://docs.gradle.org/current/userguide/version_catalogs.html>).
const CATALOG: &str = "gradle/libs.versions.toml";
/// What the wrapper downloads.
const WRAPPER: &str = "gradle/wrapper/gradle-wrapper.properties";

const CENTRAL: &str = "repo.maven.apache.org:443";
/// Where plugins with a version are from.
const PLUGINS: [&str; 2] = ["plugins.gradle.org:443", "plugins-artifacts.gradle.org:443"];
/// `google()`.
const GOOGLE: [&str; 2] = ["dl.google.com:443", "maven.google.com:443"];
/// Where services.gradle.org sends a wrapper that downloads Gradle.
const DISTRIBUTIONS: [&str; 4] = [
    "services.gradle.org:443",
    "downloads.gradle.org:443",
    "github.com:443",
    "release-assets.githubusercontent.com:443",
];

/// Plugins that compile, that of Java first.
const LANGUAGES: [&str; 3] = ["java", "groovy", "org.jetbrains.kotlin.jvm"];

/// What makes the archives of a project.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Spring Boot: one archive with all that it needs.
    Boot,
    /// The plugin `application`: archives in a directory.
    Application,
    /// One archive, without dependencies.
    Plain,
}

/// A project of Gradle.
struct Build {
    /// Its directory, relative to the function's; empty: that itself.
    directory: String,
    /// The name of its file, and the text without comments.
    file: String,
    text: String,
    plugins: BTreeSet<String>,
}

pub(super) fn read(look: &Look, project: &mut Project) -> Result<(), InitError> {
    let build = Build::find(look)?;
    project.found.push(build.file.clone());
    let named = build.main_class();
    let (main, sources) = main_class(look, &build.path("src/main/java"), named);
    let kind = build.kind().ok_or_else(|| {
        look.unusable(
            &build.file,
            "it applies none of the plugins `application`, `org.springframework.boot` and `java`; \
             go to the project that serves",
        )
    })?;
    let needs_main = || {
        main.clone().ok_or_else(|| {
            look.unusable(&build.file, "it names no main class, and no class below src/main/java has a `static void main`; \
                 name it, such as `application { mainClass = 'app.Main' }`")
        })
    };
    match kind {
        Kind::Boot => {
            project.found.push("Spring Boot".to_owned());
            let settings = build.path("src/main/resources/application.properties");
            let text = look.source(&settings);
            project.listens_as(text.map(|text| (settings, text)).as_slice());
            let port = format!("--server.port={}", project.port);
            project.command(&["java", "-jar", "/app/app.jar", &port]);
            project.limits[0].1 = "\"768MiB\"".to_owned();
            project.file("build/app.jar", "/app/app.jar");
        }
        Kind::Application => {
            let main = needs_main()?;
            project.found.push(main.clone());
            project.listens_as(&sources);
            project.command(&["java", "-cp", "/app/lib/*", &main]);
            project.file("build/app-lib", "/app/lib");
            if build.text.contains("applicationDefaultJvmArgs") {
                project.notes.push(format!(
                    "{} sets applicationDefaultJvmArgs; add them to `command` in thaw.toml behind \"java\"",
                    build.file
                ));
            }
        }
        Kind::Plain => {
            if build.has_dependencies() {
                return Err(look.unusable(
                    &build.file,
                    "it has dependencies, and nothing that puts them beside the program; add the plugin \
                     `application` to it, with its mainClass",
                ));
            }
            let main = needs_main()?;
            project.found.push(main.clone());
            project.listens_as(&sources);
            project.command(&["java", "-cp", "/app/app.jar", &main]);
            project.file("build/app.jar", "/app/app.jar");
        }
    }
    let line = build.line(kind, look.has("gradlew"));
    let egress = build.egress(look);
    let egress: Vec<&str> = egress.iter().map(String::as_str).collect();
    project.builds("Compiles with Gradle.", &["sh", "-c", &line], &egress);
    Ok(())
}

impl Build {
    /// The project that serves: that of the directory, or the only one below it that makes a program.
    fn find(look: &Look) -> Result<Self, InitError> {
        let own = Self::at(look, "")?;
        let settings = SETTINGS_FILES.into_iter().find(|name| look.has(name));
        let Some(settings) = settings.filter(|_| own.as_ref().is_none_or(|own| !own.serves()))
        else {
            return own.ok_or_else(|| look.unusable(BUILD_FILES[0], "it is not there"));
        };
        let text = without_comments(&look.text(settings)?.unwrap_or_default());
        let mut found = Vec::new();
        for directory in included(&text) {
            found.extend(Self::at(look, &directory)?.filter(Self::serves));
        }
        match (found.pop(), found.len(), own) {
            (Some(only), 0, _) => Ok(only),
            (None, _, Some(own)) => Ok(own),
            (None, _, None) => Err(look.unusable(
                settings,
                "none of the projects that it includes applies the plugin `application` or `org.springframework.boot`; \
                 add it to the one that serves",
            )),
            (Some(_), several, _) => Err(look.unusable(
                settings,
                &format!(
                    "{} of the projects that it includes make a program; write thaw.toml by hand (docs/thaw-toml.md)",
                    several + 1
                ),
            )),
        }
    }

    /// The project of a directory, if it has one.
    fn at(look: &Look, directory: &str) -> Result<Option<Self>, InitError> {
        let below = |name: &str| match directory {
            "" => name.to_owned(),
            directory => format!("{directory}/{name}"),
        };
        let Some(file) = BUILD_FILES.map(below).into_iter().find(|file| look.has(file)) else {
            return Ok(None);
        };
        let text = without_comments(&look.text(&file)?.unwrap_or_default());
        let catalog = look.source(CATALOG).and_then(|text| text.parse().ok()).unwrap_or_default();
        let plugins = plugins(&text, &catalog);
        Ok(Some(Self { directory: directory.to_owned(), file, text, plugins }))
    }

    fn path(&self, below: &str) -> String {
        match self.directory.as_str() {
            "" => below.to_owned(),
            directory => format!("{directory}/{below}"),
        }
    }

    fn has(&self, plugin: &str) -> bool {
        self.plugins.contains(plugin)
    }

    fn serves(&self) -> bool {
        matches!(self.kind(), Some(Kind::Boot | Kind::Application))
    }

    fn kind(&self) -> Option<Kind> {
        match () {
            () if self.has("org.springframework.boot") => Some(Kind::Boot),
            () if self.has("application") => Some(Kind::Application),
            () if LANGUAGES.iter().any(|plugin| self.has(plugin)) => Some(Kind::Plain),
            () => None,
        }
    }

    /// The class with `main` that it names.
    fn main_class(&self) -> Option<String> {
        let named = regex(r#"\bmainClass(?:Name)?\s*(?:=|\.set\s*\(|\s)\s*["']([\w.$]+)["']"#);
        let in_manifest = regex(r#"["']?Main-Class["']?\s*(?::|to)\s*["']([\w.$]+)["']"#);
        let found = named.captures(&self.text).or_else(|| in_manifest.captures(&self.text))?;
        Some(found[1].to_owned())
    }

    /// Whether it names something that its program needs to run. Kotlin and Groovy have libraries.
    fn has_dependencies(&self) -> bool {
        if LANGUAGES[1..].iter().any(|plugin| self.has(plugin)) {
            return true;
        }
        regex(r"(?m)^\s*(?:implementation|api|compile|runtimeOnly|runtime)[\s(]")
            .is_match(&self.text)
    }

    /// The command line that makes the archives and puts them where `files` has them. Those of an
    /// earlier version are removed before, since their names differ.
    fn line(&self, kind: Kind, has_wrapper: bool) -> String {
        let gradle = if has_wrapper { "sh ./gradlew" } else { "gradle" };
        let (task, made, to) = match kind {
            Kind::Boot => ("bootJar", "libs", "build/app.jar"),
            Kind::Plain => ("jar", "libs", "build/app.jar"),
            Kind::Application => ("installDist", "install", "build/app-lib"),
        };
        let made = self.path(&format!("build/{made}"));
        let path = self.directory.replace('/', ":");
        let task = if path.is_empty() { task.to_owned() } else { format!(":{path}:{task}") };
        let what = if kind == Kind::Application { "*/lib" } else { "*.jar" };
        format!(
            "rm -rf {made} {to} && GRADLE_USER_HOME=\"$HOME/.gradle\" {gradle} --no-daemon --quiet {task} && \
             mkdir -p build && cp -r {made}/{what} {to}"
        )
    }

    /// Where it gets plugins and libraries from, and the wrapper Gradle.
    fn egress(&self, look: &Look) -> Vec<String> {
        let mut all = vec![CENTRAL.to_owned()];
        let mut add = |destinations: &[&str]| {
            for destination in destinations {
                if !all.iter().any(|known| known == destination) {
                    all.push((*destination).to_owned());
                }
            }
        };
        if look.has("gradlew") {
            let properties = look.source(WRAPPER).unwrap_or_default();
            match hosts(&properties.replace("\\:", ":")).as_slice() {
                [host] if *host != DISTRIBUTIONS[0] => add(&[host]),
                _ => add(&DISTRIBUTIONS),
            }
        }
        let settings = SETTINGS_FILES.iter().filter_map(|name| look.source(name));
        let texts: Vec<String> = settings.map(|text| without_comments(&text)).collect();
        for text in texts.iter().chain([&self.text]) {
            let with_version = regex(r#"["'][ \t]*\)?[ \t]+version\b[ \t(]*["']|\balias\s*\("#);
            if with_version.is_match(text) || text.contains("gradlePluginPortal") {
                add(&PLUGINS);
            }
            if text.contains("google()") {
                add(&GOOGLE);
            }
            let hosts = hosts(text);
            add(&hosts.iter().map(String::as_str).collect::<Vec<_>>());
        }
        all
    }
}

fn regex(pattern: &str) -> Regex {
    Regex::new(pattern).expect("it is one")
}

/// A text without its comments. One in a string literal is no comment, such as the `//` of an address.
fn without_comments(text: &str) -> String {
    let tokens = regex(r#"(?s)"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|//[^\n]*|/\*.*?\*/"#);
    let kept = |found: &regex::Captures<'_>| match found[0].starts_with('/') {
        true => " ".to_owned(),
        false => found[0].to_owned(),
    };
    tokens.replace_all(text, kept).into_owned()
}

/// The identifiers of plugins that a build file applies.
fn plugins(text: &str, catalog: &toml::Table) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let by_id = regex(r#"\b(?:id|plugin)\s*[:=(]?\s*(?:=\s*)?["']([\w.-]+)["']([^\n;}]*)"#);
    for captures in by_id.captures_iter(text) {
        // What is applied elsewhere is not applied here.
        if !regex(r"\bapply[\s(]+false\b").is_match(&captures[2]) {
            found.insert(captures[1].to_owned());
        }
    }
    let by_alias = regex(r"\balias\s*\(\s*libs\.plugins\.([\w.]+)\s*\)([^\n;}]*)");
    for captures in by_alias.captures_iter(text) {
        if !captures[2].contains("false") {
            found.extend(in_catalog(&captures[1], catalog));
        }
    }
    // `kotlin("jvm")`, `application`, `` `java-library` `` in Kotlin.
    let block = regex(r"\bplugins\s*\{([^}]*)\}");
    let plain = regex(r"(?m)(?:^|;)\s*`?([a-z-]+)`?\s*(?:;|$)");
    for block in block.captures_iter(text) {
        found.extend(plain.captures_iter(&block[1]).map(|captures| captures[1].to_owned()));
        if regex(r#"\bkotlin\s*\(\s*"jvm"\s*\)"#).is_match(&block[1]) {
            found.insert("org.jetbrains.kotlin.jvm".to_owned());
        }
    }
    if found.contains("java-library") {
        found.insert("java".to_owned());
    }
    found.iter().map(|plugin| plugin.trim_start_matches("org.gradle.").to_owned()).collect()
}

/// The plugin that `libs.plugins.NAME` means.
fn in_catalog(name: &str, catalog: &toml::Table) -> Option<String> {
    let plugins = catalog.get("plugins")?.as_table()?;
    let of_name = |key: &str| key.replace(['-', '_'], ".") == name;
    let (_, plugin) = plugins.iter().find(|(key, _)| of_name(key))?;
    let text = plugin.as_str().or_else(|| plugin.get("id")?.as_str())?;
    Some(text.split(':').next().unwrap_or_default().to_owned())
}

/// The directories of the projects that a settings file includes.
fn included(text: &str) -> Vec<String> {
    let statement = regex(r#"\binclude\b\s*\(?((?:\s*["'][\w:./-]+["']\s*,?)+)"#);
    let one = regex(r#"["']([\w:./-]+)["']"#);
    let all = statement.captures_iter(text);
    let paths = all.flat_map(|found| {
        let names = one.captures_iter(found.get(1).map_or("", |found| found.as_str()));
        names.map(|name| name[1].trim_matches(':').replace(':', "/")).collect::<Vec<_>>()
    });
    let is_below = |path: &String| {
        !path.starts_with('-') && !path.split('/').any(|part| ["", ".."].contains(&part))
    };
    paths.filter(is_below).collect()
}

/// `HOST:PORT` of the addresses in a text.
fn hosts(text: &str) -> Vec<String> {
    let address = regex(r"\bhttps://([A-Za-z0-9.-]+)(?::(\d{1,5}))?/");
    let mut all: Vec<String> = Vec::new();
    for found in address.captures_iter(text) {
        let port = found.get(2).map_or("443", |port| port.as_str());
        let host = format!("{}:{port}", &found[1]);
        if !all.contains(&host) && port.parse::<u16>().is_ok() {
            all.push(host);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Vec<String> {
        let catalog = "[plugins]\nspring-boot = { id = \"org.springframework.boot\", version = \"3\" }\n\
                       kt_jvm = \"org.jetbrains.kotlin.jvm:2.0\"\n";
        let text = without_comments(text);
        plugins(&text, &catalog.parse().unwrap()).into_iter().collect()
    }

    #[test]
    fn plugins_are_found_as_people_write_them() {
        for (text, expected) in [
            ("plugins { id 'application' }", vec!["application"]),
            ("plugins {\n    id(\"application\")\n}", vec!["application"]),
            (
                "plugins {\n  application // runs\n  `java-library`\n}",
                vec!["application", "java", "java-library"],
            ),
            ("plugins { application }", vec!["application"]),
            ("apply plugin: 'java'\napply(plugin = \"application\")", vec!["application", "java"]),
            ("// id 'application'\n/* id 'java' */", vec![]),
            (
                "plugins { id 'org.springframework.boot' version '3.1' apply false\n id 'java' }",
                vec!["java"],
            ),
            (
                "plugins { id 'org.springframework.boot' version '3.1'\n}",
                vec!["org.springframework.boot"],
            ),
            (
                "plugins { alias(libs.plugins.spring.boot)\n alias(libs.plugins.kt.jvm) apply false\n}",
                vec!["org.springframework.boot"],
            ),
            ("plugins { kotlin(\"jvm\") version \"2.0\"\n}", vec!["org.jetbrains.kotlin.jvm"]),
        ] {
            assert_eq!(of(text), expected, "{text}");
        }
    }

    #[test]
    fn projects_and_hosts_are_found() {
        let text =
            "include 'app', ':lib:core'\ninclude(\"web\")\ninclude '../out'\nincludeBuild 'x'";
        assert_eq!(included(text), ["app", "lib/core", "web"]);
        let text =
            "maven { url 'https://repo.example/m2/' }\nmaven(\"https://repo.example:8443/\")";
        assert_eq!(hosts(&without_comments(text)), ["repo.example:443", "repo.example:8443"]);
    }

    #[test]
    fn the_main_class_is_named_in_many_ways() {
        let class = |text: &str| {
            let (directory, file, text) = (String::new(), String::new(), text.to_owned());
            Build { directory, file, text, plugins: BTreeSet::new() }.main_class()
        };
        for text in [
            "application { mainClass = 'a.B' }",
            "application {\n    mainClass.set(\"a.B\")\n}",
            "mainClassName = \"a.B\"",
            "application { mainClass 'a.B' }",
            "manifest { attributes 'Main-Class': 'a.B' }",
            "attributes(\"Main-Class\" to \"a.B\")",
            "attributes[\"Main-Class\"] = 'x'; mainClassName 'a.B'",
        ] {
            assert_eq!(class(text).as_deref(), Some("a.B"), "{text}");
        }
        assert_eq!(class("mainClass = project.main"), None);
    }
}
