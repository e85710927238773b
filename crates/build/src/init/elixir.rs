//! Elixir: a release of the project that `mix.exs` describes.

use super::look::Look;
use super::{InitError, Project, toml_text};
use regex::Regex;

/// Where Hex and its packages are.
const HEX: [&str; 2] = ["builds.hex.pm:443", "repo.hex.pm:443"];
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
        project.builds("Installs what mix.exs names, and makes a release.", &command, &HEX);
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
    let directories = look.directories("lib").into_iter().map(|name| format!("lib/{name}"));
    for directory in ["lib".to_owned()].into_iter().chain(directories) {
        if let Ok(below) = Look::at(&look.directory().join(&directory)) {
            let of_it = below.sources(".ex").into_iter();
            all.extend(of_it.map(|(name, text)| (format!("{directory}/{name}"), text)));
        }
    }
    all
}

fn has(text: &str, dependency: &str) -> bool {
    Regex::new(&format!(r"\{{\s*:{dependency}\b")).expect("it is one").is_match(text)
}

fn without_comments(text: &str) -> String {
    let line = |line: &str| line.split('#').next().unwrap_or_default().to_owned();
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}
