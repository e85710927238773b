//! Ruby: Rack applications (`config.ru`) under Puma, and programs that serve by themselves.

use super::look::Look;
use super::{InitError, Project};
use regex::Regex;

/// Where the gems lie below the function's directory.
const GEMS: &str = "vendor/gems";
/// The registry of gems.
const REGISTRY: [&str; 2] = ["rubygems.org:443", "index.rubygems.org:443"];

/// The file that holds the program.
pub(super) fn program(look: &Look) -> Option<String> {
    if let Some(usual) = look.first_of(&["app.rb", "server.rb", "main.rb"]) {
        return Some(usual.to_owned());
    }
    let mut all = look.ending(".rb");
    match (all.next(), all.next()) {
        (Some(only), None) => Some(only.to_owned()),
        _ => None,
    }
}

pub(super) fn read(look: &Look, project: &mut Project) -> Result<(), InitError> {
    project.kind = "ruby";
    project.names_interpreter("ruby");
    let gems = gems(look, project)?;
    let has = |name: &str| gems.iter().any(|gem| gem == name);
    if look.has("config.ru") {
        project.found.push("config.ru".to_owned());
        if !has("puma") {
            return Err(look.unusable(
                "config.ru",
                "it needs a server, and the Gemfile names no puma; add `gem \"puma\"` to it",
            ));
        }
        project.found.push("puma".to_owned());
        let address = format!("tcp://0.0.0.0:{}", project.port);
        let puma = format!("{GEMS}/bin/puma");
        project.command(&["ruby", &puma, "--bind", &address, "--threads", "2:2"]);
        project.env.push(("RACK_ENV".to_owned(), "production".to_owned()));
        return Ok(());
    }
    let Some(program) = program(look) else {
        return Err(look.unusable(
            "Gemfile",
            "there is no config.ru, app.rb or server.rb beside it, and not a single file in Ruby; go to the \
             program's directory, or write thaw.toml by hand (docs/thaw-toml.md)",
        ));
    };
    project.found.push(program.clone());
    project.command(&["ruby", &program]);
    if let Some(text) = look.source(&program) {
        let text = (program, text);
        let is_sinatra = text.1.contains("sinatra");
        project.listens_as(std::slice::from_ref(&text));
        if is_sinatra && !text.1.contains(":port") {
            // Sinatra's own default is 4567.
            let port = project.port.to_string();
            project.command.extend(["-o", "0.0.0.0", "-p", &port].map(str::to_owned));
        }
    }
    Ok(())
}

/// The names of the gems that a Gemfile asks for, which the build installs.
fn gems(look: &Look, project: &mut Project) -> Result<Vec<String>, InitError> {
    let Some(text) = look.text("Gemfile")? else { return Ok(Vec::new()) };
    project.found.push("Gemfile".to_owned());
    let pattern =
        Regex::new(r#"(?m)^\s*gem\s*\(?\s*["']([\w.-]+)["']([^\n]*)"#).expect("it is one");
    let mut names = Vec::new();
    for captures in pattern.captures_iter(&text) {
        names.push(captures[1].to_owned());
        if ["git:", "github:", "path:", ":git", ":path"].iter().any(|key| captures[2].contains(key))
        {
            project.notes.push(format!(
                "the gem {} is not from a registry; `gem install` does not install it: let Bundler do \
                 that, by `command` in [build] of thaw.toml",
                &captures[1]
            ));
        }
    }
    if !names.is_empty() {
        // What every Ruby has, unlike a program `bundle`.
        let command = [
            "gem",
            "install",
            "--no-document",
            "--install-dir",
            GEMS,
            "--without",
            "development,test",
            "--file",
            "Gemfile",
        ];
        project.builds("Installs what the Gemfile names.", &command, &REGISTRY);
        project.env.push(("GEM_HOME".to_owned(), format!("/app/{GEMS}")));
        // `Bundler.require` must not want what is not installed.
        project.env.push(("BUNDLE_WITHOUT".to_owned(), "development:test".to_owned()));
    }
    Ok(names)
}
