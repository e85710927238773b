//! A project as the text of a `thaw.toml`, with comments for somebody who has never seen one.

use super::{BuildStep, Project, ProjectFile};
use std::fmt::Write;

/// Columns of a line that is not wrapped.
const WIDTH: usize = 96;

/// A text as TOML.
pub(super) fn string(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// A list of texts as TOML.
pub(super) fn list(items: &[String]) -> String {
    format!("[{}]", items.iter().map(|item| string(item)).collect::<Vec<_>>().join(", "))
}

impl Project {
    /// The text of the project's `thaw.toml`.
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        comment(&mut text, &format!("Written by `thaw init` for {}.", self.evidence()));
        comment(
            &mut text,
            "docs/thaw-toml.md describes every key; `thaw build` makes the function of this.",
        );
        line(&mut text, "name", &string(&self.name));
        blank(&mut text);
        comment(&mut text, "The server. A request reaches it on this port.");
        line(&mut text, "command", &list(&self.command));
        let _ = writeln!(text, "port = {}  # {}", self.port, in_line(&self.port_from));
        self.write_files(&mut text);
        self.write_runtime(&mut text);
        if let Some(build) = &self.build {
            write_build(&mut text, build);
        }
        if !self.env.is_empty() {
            let _ = write!(text, "\n[env]\n");
            for (name, value) in &self.env {
                line(&mut text, &key(name), &string(value));
            }
        }
        if !self.limits.is_empty() {
            let _ = write!(text, "\n[limits]\n");
            for (name, value) in &self.limits {
                line(&mut text, name, value);
            }
        }
        text.push_str(HINTS);
        text
    }

    /// What was found, in a line.
    pub fn evidence(&self) -> String {
        match self.found.is_empty() {
            true => self.language.title().to_owned(),
            false => format!("{} ({})", self.language.title(), self.found.join(", ")),
        }
    }

    fn write_files(&self, text: &mut String) {
        if self.files.is_empty() {
            comment(
                text,
                "All files of this directory are in /app, without what .thawignore names.",
            );
            return;
        }
        let one = |file: &ProjectFile| {
            format!("{{ from = {}, to = {} }}", string(&file.from), string(&file.to))
        };
        let files: Vec<String> = self.files.iter().map(one).collect();
        let short = format!("[{}]", files.join(", "));
        match short.len() < WIDTH {
            true => line(text, "files", &short),
            false => line(text, "files", &format!("[\n  {},\n]", files.join(",\n  "))),
        }
    }

    fn write_runtime(&self, text: &mut String) {
        blank(text);
        comment(
            text,
            match self.kind {
                "binary" => "The program and the shared libraries that it needs.",
                _ => "The interpreter and its library, from this host.",
            },
        );
        let _ = writeln!(text, "[runtime]");
        line(text, "kind", &string(self.kind));
        for (name, value) in &self.runtime {
            line(text, name, value);
        }
    }
}

/// What most people want next.
const HINTS: &str = "\n\
    # Requests that the program answers before it is frozen, so that every copy has done so\n\
    # (docs/functions.md#training-train):\n\
    # [train]\n\
    # requests = [{ path = \"/\", repeat = 20 }]\n\
    \n\
    # Where the program may connect to; nowhere without this (docs/egress.md):\n\
    # [egress]\n\
    # allow = [\"api.example.com:443\"]\n";

fn write_build(text: &mut String, build: &BuildStep) {
    blank(text);
    let does = match build.command.is_empty() {
        true => "See",
        false => "`thaw build` runs this in a sandbox:",
    };
    comment(text, &format!("{} {does} docs/building.md.", build.why));
    let _ = writeln!(text, "[build]");
    if !build.command.is_empty() {
        line(text, "command", &list(&build.command));
    }
    if !build.egress.is_empty() {
        line(text, "egress", &list(&build.egress));
    }
}

fn blank(text: &mut String) {
    text.push('\n');
}

/// A comment, without what would end its line.
fn comment(text: &mut String, words: &str) {
    let _ = writeln!(text, "# {}", in_line(words));
}

/// Words without what would end their line: they may be a file's name.
fn in_line(words: &str) -> String {
    words.replace(|c: char| c.is_control(), " ")
}

fn line(text: &mut String, key: &str, value: &str) {
    let _ = writeln!(text, "{key} = {value}");
}

/// A key, in quotes if it needs them.
fn key(name: &str) -> String {
    let is_bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    match !name.is_empty() && name.chars().all(is_bare) {
        true => name.to_owned(),
        false => string(name),
    }
}
