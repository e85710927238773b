//! Programs in C and C++: made by CMake or `make`, or of one file.

use super::look::Look;
use super::{InitError, Language, Project};
use regex::Regex;

/// Names of what `make` reads, as it looks for them.
const MAKEFILES: [&str; 3] = ["GNUmakefile", "makefile", "Makefile"];
/// What CMake reads.
const CMAKE: &str = "CMakeLists.txt";
/// Directories with sources.
const PLACES: [&str; 2] = ["", "src"];

/// How a program is made.
enum Way {
    /// By CMake: the directory below the project's that says so, and what it says.
    Cmake(&'static str, String),
    /// By `make`: the file's name, and its text.
    Make(&'static str, String),
    /// By the compiler, of this file.
    Compiler(String),
}

/// Whether there is a program in C or C++ that can be made.
pub(super) fn is_there(look: &Look, language: Language) -> bool {
    way(look, language).is_some()
}

/// Finds out how it is made.
pub(super) fn read(
    look: &Look,
    project: &mut Project,
    language: Language,
) -> Result<(), InitError> {
    let Some(way) = way(look, language) else {
        let title = language.title();
        let reason = format!(
            "there is no {CMAKE} with an `add_executable`, no Makefile beside sources in {title}, and not \
             exactly one file in {title} with a `main`; write thaw.toml by hand (examples/hello-c)"
        );
        return Err(look.unusable("", &reason));
    };
    project.listens_as(&sources(look, language));
    project.command(&["/app/server"]);
    match way {
        Way::Cmake(place, text) => read_cmake(project, place, &text),
        Way::Make(file, text) => read_make(project, file, &text),
        Way::Compiler(file) => {
            let compiler = if language == Language::C { "cc" } else { "c++" };
            project.found.push(file.clone());
            project.file("server", "/app/server");
            let command = [compiler, "-O2", "-static", "-o", "server", &file];
            project.builds("Compiles the program.", &command, &[]);
        }
    }
    Ok(())
}

fn way(look: &Look, language: Language) -> Option<Way> {
    let has = |language| !sources(look, language).is_empty();
    // Projects in C++ often have files in C, too.
    if !has(language) || language == Language::C && has(Language::Cpp) {
        return None;
    }
    let cmake = PLACES.into_iter().filter(|_| look.has(CMAKE)).find_map(|place| {
        let text = look.source(&below(place, CMAKE))?;
        (!executables(&text).is_empty()).then_some(Way::Cmake(place, text))
    });
    let make =
        || look.first_of(&MAKEFILES).and_then(|name| Some(Way::Make(name, look.source(name)?)));
    cmake.or_else(make).or_else(|| only_file(look, language).map(Way::Compiler))
}

/// The only source beside it, which has a `main`.
fn only_file(look: &Look, language: Language) -> Option<String> {
    let mut all = endings(language).iter().flat_map(|ending| look.sources(ending));
    let (Some((name, text)), None) = (all.next(), all.next()) else { return None };
    text.contains("main(").then_some(name)
}

fn endings(language: Language) -> &'static [&'static str] {
    match language {
        Language::Cpp => &[".cpp", ".cc", ".cxx"],
        _ => &[".c"],
    }
}

/// Names and texts of all sources.
fn sources(look: &Look, language: Language) -> Vec<(String, String)> {
    let places = PLACES
        .into_iter()
        .filter_map(|place| Some((place, Look::at(&look.directory().join(place)).ok()?)));
    let of_place = |(place, look): (&str, Look)| {
        let all = endings(language).iter().flat_map(move |ending| look.sources(ending));
        all.map(|(name, text)| (below(place, &name), text)).collect::<Vec<_>>()
    };
    places.flat_map(of_place).collect()
}

/// A path in one of the places.
fn below(place: &str, name: &str) -> String {
    if place.is_empty() { name.to_owned() } else { format!("{place}/{name}") }
}

fn read_cmake(project: &mut Project, place: &str, text: &str) {
    let names = executables(text);
    let is_test = |name: &&String| name.to_lowercase().contains("test");
    let name = names.iter().find(|name| !is_test(name)).unwrap_or(&names[0]).clone();
    project.found.push(below(place, CMAKE));
    project.file(&below("build", &below(place, &name)), "/app/server");
    let command = "cmake -S . -B build -DCMAKE_BUILD_TYPE=Release && cmake --build build";
    project.builds("Compiles the program.", &["sh", "-c", command], &[]);
    if names.len() > 1 || text.contains("RUNTIME_OUTPUT_DIRECTORY") {
        project.notes.push(format!(
            "{name} is taken for the server, in `build`; set `from` in `files` of thaw.toml if it is another \
             program, or lies elsewhere"
        ));
    }
}

/// The programs that a `CMakeLists.txt` makes.
fn executables(text: &str) -> Vec<String> {
    let find = |pattern: &str| Regex::new(pattern).expect("it is one");
    let own =
        find(r"(?im)^\s*project\s*\(\s*([\w.+-]+)").captures(text).map(|found| found[1].to_owned());
    let all = find(r"(?im)^\s*add_executable\s*\(\s*([\w.+${}-]+)");
    let names = all.captures_iter(text).filter_map(|found| match &found[1] {
        "${PROJECT_NAME}" | "${CMAKE_PROJECT_NAME}" => own.clone(),
        name if name.contains('$') => None,
        name => Some(name.to_owned()),
    });
    names.collect()
}

fn read_make(project: &mut Project, file: &str, text: &str) {
    let made = program_of(text);
    let name = made.clone().unwrap_or_else(|| project.name.clone());
    project.found.push(file.to_owned());
    project.file(&name, "/app/server");
    project.builds("Compiles the program.", &["make"], &[]);
    let how = if made.is_some() { "taken for" } else { "guessed to be" };
    project.notes.push(format!(
        "{name} is {how} the server that `make` makes; set `from` in `files` of thaw.toml if it is another file"
    ));
}

/// The program that a makefile makes, if it names one: what `all` needs first, a variable of a usual name,
/// an output of the compiler, or else its first target.
fn program_of(text: &str) -> Option<String> {
    let names = [
        r"(?m)^all[ \t]*:[ \t]*([\w./-]+)",
        r"(?m)^(?:TARGET|PROGRAM|PROG|BINARY|BIN|EXECUTABLE|EXEC|EXE|APP|NAME|OUT)[ \t]*[:?]?=[ \t]*([\w./-]+)[ \t]*$",
        r"(?m)^\t.*-o[ \t]+([\w./-]+)",
        r"(?m)^([\w/-][\w./-]*)[ \t]*:(?:[^=]|$)",
    ];
    let is_program = |name: &String| {
        let is_other = ["all", "clean", "install", "test"].contains(&name.as_str());
        // Below the directory, as `make` is run in it.
        let is_inside = !name.starts_with('/') && !name.split('/').any(|part| part == "..");
        is_inside
            && !is_other
            && ![".o", ".a", ".so", ".c", ".h"].iter().any(|end| name.ends_with(end))
    };
    names.into_iter().find_map(|pattern| {
        let pattern = Regex::new(pattern).expect("it is one");
        let all = pattern.captures_iter(text).map(|found| found[1].to_owned());
        let trimmed = all.map(|name| name.trim_start_matches("./").to_owned());
        trimmed.filter(|name| !name.is_empty()).find(is_program)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn makefiles_name_their_program() {
        for (text, expected) in [
            ("all: server client\n\nserver: a.o\n\tcc -o server a.o\n", Some("server")),
            (
                "TARGET := bin/web\nall: $(TARGET)\n$(TARGET): a.c\n\t$(CC) -o $@ $^\n",
                Some("bin/web"),
            ),
            ("CC=gcc\nweb: a.c\n\t$(CC) a.c -o web\n", Some("web")),
            (".PHONY: all\nall:\n\tcc -o ./out/web main.c\n", Some("out/web")),
            ("a.o: a.c\n\tcc -c -o a.o a.c\nserve: a.o\n\t$(CC) $^\n", Some("serve")),
            ("CFLAGS = -O2\nclean:\n\trm -f *.o\n", None),
            ("PROG = /usr/bin/x\nBIN = ../x\nX := y\n", None),
            ("", None),
        ] {
            assert_eq!(program_of(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn programs_of_cmake_are_found() {
        let text = "project(web LANGUAGES CXX)\nadd_executable( ${PROJECT_NAME} main.cpp)\n\
                    # add_executable(no x.c)\nadd_library(l l.c)\n  ADD_EXECUTABLE(more m.c)\nadd_executable(${X} x.c)\n";
        assert_eq!(executables(text), ["web", "more"]);
        assert!(executables("project(x)\nadd_subdirectory(src)\n").is_empty());
    }
}
