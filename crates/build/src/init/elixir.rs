//! Elixir: a release of the project that `mix.exs` describes.

use super::look::{Look, without_comments};
use super::{InitError, Project, toml_text};
use regex::Regex;
use std::path::Path;

/// Where Hex and its packages are.
const HEX: [&str; 2] = ["builds.hex.pm:443", "repo.hex.pm:443"];
/// Most sources that are searched.
const SOURCES_MAX: usize = 64;
/// What the start script of a release calls.
const PROGRAMS: [&str; 10] =
    ["sh", "basename", "cat", "cut", "dirname", "grep", "mkdir", "readlink", "sed", "tr"];

pub(super) fn read(look: &Look, project: &mut Project) -> Result<(), InitError> {
    let Some(text) = look.text("mix.exs")? else {
        return Err(look.unusable("mix.exs", "there is none; `mix new NAME --sup` makes it"));
    };
    project.found.push("mix.exs".to_owned());
    let text = without_comments(&text);
    let app = Regex::new(r"\bapp:\s*:(\w+)").expect("it is one").captures(&text);
    let Some(app) = app.map(|found| found[1].to_owned()) else {
        let why = "it names no `app:`; go to the directory of the application that serves";
        return Err(look.unusable("mix.exs", why));
    };
    if has(&text, "phoenix") {
        project.found.push("Phoenix".to_owned());
        project.env.push(("PHX_SERVER".to_owned(), "true".to_owned()));
    }
    let release = "mix release --overwrite";
    // A dependency is a tuple with its name and more.
    let needs =
        Regex::new(r"\{\s*:\w+\s*,\s*(?:[\x22~]|git:|github:)").expect("it is one").is_match(&text);
    if needs {
        let command = format!(
            "mix local.hex --force --if-missing && mix local.rebar --force --if-missing && mix deps.get \
             --only prod && {release}"
        );
        let command = ["env", "MIX_ENV=prod", "sh", "-c", &command];
        let hosts = git_hosts(&text);
        let from: Vec<&str> = HEX.into_iter().chain(hosts.iter().map(String::as_str)).collect();
        project.builds("Installs what mix.exs names, and makes a release.", &command, &from);
    } else {
        let command = ["env", "MIX_ENV=prod", "mix", "release", "--overwrite"];
        project.builds("Makes a release.", &command, &[]);
    }
    project.command(&[&format!("/app/bin/{app}"), "start"]);
    project.file(&format!("_build/prod/rel/{app}"), "/app");
    project.runtime.push(("programs", toml_text::list(&PROGRAMS.map(str::to_owned))));
    // A copy would count the time of the day from the freeze on, and no other node is to find it.
    project.env.push(("ERL_FLAGS".to_owned(), "+c false".to_owned()));
    project.env.push(("RELEASE_DISTRIBUTION".to_owned(), "none".to_owned()));
    project.limits.push(("memory", "\"512MiB\"".to_owned()));
    notes_variables(look, project);
    let sources = sources(look);
    project.listens_as(&sources);
    Ok(())
}

/// The settings of the project, and what lies in `lib`.
fn sources(look: &Look) -> Vec<(String, String)> {
    let settings = ["config/config.exs", "config/prod.exs", "config/runtime.exs"];
    let settings =
        settings.into_iter().filter_map(|name| Some((name.to_owned(), look.source(name)?)));
    let mut all: Vec<_> = settings.collect();
    let directories = look.directories("lib");
    let directories = directories.iter().map(String::as_str).chain([""]);
    let names = directories.flat_map(|below| names(look, below)).take(SOURCES_MAX);
    all.extend(names.filter_map(|name| Some((name.clone(), look.source(&name)?))));
    all
}

/// Sources in a directory of `lib`, which may be a link that leads elsewhere: they are opened below the project's.
fn names(look: &Look, below: &str) -> Vec<String> {
    let directory = format!("lib/{below}");
    let mut names = look.names(&directory);
    names.retain(|name| name.ends_with(".ex"));
    names.into_iter().map(|name| Path::new(&directory).join(name).display().to_string()).collect()
}

/// Hosts of what is fetched by git, each once.
fn git_hosts(text: &str) -> Vec<String> {
    let git = Regex::new(r#"\bgit:\s*"https://([A-Za-z0-9.-]+)/"#).expect("it is one");
    let mut all: Vec<String> =
        git.captures_iter(text).map(|found| format!("{}:443", &found[1])).collect();
    if Regex::new(r#"\bgithub:\s*""#).expect("it is one").is_match(text) {
        all.push("github.com:443".to_owned());
    }
    all.sort();
    all.dedup();
    all
}

/// Says which variables of Phoenix' the settings ask for.
fn notes_variables(look: &Look, project: &mut Project) {
    let text = without_comments(&look.source("config/runtime.exs").unwrap_or_default());
    let mut names = vec!["SECRET_KEY_BASE", "DATABASE_URL"];
    names.retain(|name| text.contains(name));
    if !names.is_empty() {
        project.notes.push(format!(
            "config/runtime.exs asks for {}: give it as a secret (`thaw secret`, `secrets` of thaw.toml)",
            names.join(" and ")
        ));
    }
}

fn has(text: &str, dependency: &str) -> bool {
    Regex::new(&format!(r"\{{\s*:{dependency}\b")).expect("it is one").is_match(text)
}
