//! `thaw init`: a `thaw.toml` for a program that is there, or a new program with one.

use crate::failure::{Failure, Outcome};
use crate::output::{self, command_line};
use clap::Args;
use serde_json::json;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use thaw_build::init::{Language, Project, Replace, Starter, detect, make_starter, name_of, write};
use thaw_home::config::FunctionName;
use thaw_sandbox::escape;

/// Write a thaw.toml for the program in a directory, or a new program with one.
///
/// The language and what it depends on are known by its files: requirements.txt or
/// pyproject.toml, package.json, deno.json, go.mod, pom.xml or build.gradle, Gemfile or config.ru,
/// composer.json, mix.exs, app.psgi, Cargo.toml, CMakeLists.txt or Makefile, nginx.conf; or a server in a file of its own, or an executable
/// file. The thaw.toml says visibly what `thaw build` will do, such as the command that installs dependencies; change
/// it as you like. docs/quickstart.md goes on from there.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw init\n  \
    thaw init ./my-shop --name shop\n  \
    thaw init --template python hello && thaw dev hello")]
pub struct Arguments {
    /// The directory; with --template the one to make.
    #[arg(value_name = "DIR", default_value = ".")]
    directory: PathBuf,
    /// Write a hello in this language: python, node, go, java, ruby, php, perl, rust or c.
    #[arg(
        long,
        value_name = "LANGUAGE",
        ignore_case = true,
        conflicts_with_all = ["language", "force"],
        requires = "directory"
    )]
    template: Option<Starter>,
    /// The language, if the directory has files of several: python, deno, node, go, java, ruby,
    /// php, perl, elixir, rust, c, cpp, nginx or binary.
    #[arg(long, value_name = "LANGUAGE")]
    language: Option<Language>,
    /// The function's name; default: that of the directory.
    #[arg(long, value_name = "NAME")]
    name: Option<FunctionName>,
    /// Replace a thaw.toml that is there.
    #[arg(long)]
    force: bool,
    /// Print JSON: what was found, and what was written.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let directory = &arguments.directory;
    let mut written = Vec::new();
    if let Some(starter) = arguments.template {
        let is_named = |path: &Path| path.file_name().is_some();
        if !is_named(directory) {
            return Err(Failure::misused("--template needs the NAME of a new directory"));
        }
        // Nothing is written for a name that no function can have.
        if arguments.name.is_none() {
            name_of(directory)?;
        }
        let files = make_starter(directory, starter)?;
        written.extend(files.into_iter().map(|name| directory.join(name)));
    }
    let language = arguments.template.map(Starter::language).or(arguments.language);
    let replace = if arguments.force { Replace::Yes } else { Replace::No };
    let project = detect(directory, language, arguments.name.as_ref())?;
    written.push(write(directory, &project, replace)?);
    match arguments.json {
        true => output::print_json(&json!({ "written": written, "project": project }))?,
        false => output::print(&told(directory, &written, &project))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// What was found and written, and what comes next.
fn told(directory: &Path, written: &[PathBuf], project: &Project) -> String {
    let mut text = format!("found {}\n", escape(project.evidence().as_bytes()));
    let command = command_line(&project.command);
    let _ = writeln!(text, "it is started by `{command}` and listens on port {}", project.port);
    if let Some(build) = project.build.as_ref().filter(|build| !build.command.is_empty()) {
        let command = command_line(&build.command);
        let _ = writeln!(text, "`thaw build` runs `{command}` before, in a sandbox");
    }
    for note in &project.notes {
        let _ = writeln!(text, "note: {}", escape(note.as_bytes()));
    }
    for path in written {
        let _ = writeln!(text, "wrote {}", path.display());
    }
    let place = match directory == Path::new(".") {
        true => String::new(),
        false => format!(" {}", directory.display()),
    };
    let _ = writeln!(
        text,
        "next: `thaw dev{place}` builds and serves it while you change it; `thaw build {}` and \
         `thaw serve` do so for good",
        directory.display()
    );
    text
}
