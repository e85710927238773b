//! Programs of the machine itself: made by Cargo, or there already.

use super::look::Look;
use super::{InitError, Project};

/// The index of crates, and where they lie.
const CRATES: [&str; 2] = ["index.crates.io:443", "static.crates.io:443"];
/// The first bytes of an executable file; elf(5).
const ELF: [u8; 4] = *b"\x7fELF";

pub(super) fn read_rust(look: &Look, project: &mut Project) -> Result<(), InitError> {
    let text = look.text("Cargo.toml")?.unwrap_or_default();
    let wrong = |reason: &str| look.unusable("Cargo.toml", reason);
    let table: toml::Table = text.parse().map_err(|error| wrong(&format!("{error}")))?;
    let named =
        |value: Option<&toml::Value>| Some(value?.as_table()?.get("name")?.as_str()?.to_owned());
    let bins = table.get("bin").and_then(toml::Value::as_array);
    let own = bins.and_then(|bins| named(bins.first()));
    let Some(name) = own.or_else(|| named(table.get("package"))) else {
        return Err(wrong("it has no [package]; go to the directory of the member that serves"));
    };
    let is_library =
        !look.has("src/main.rs") && bins.is_none() && look.directories("src/bin").is_empty();
    if is_library && !look.has(&format!("src/bin/{name}.rs")) {
        return Err(wrong("it has no program: no src/main.rs and no [[bin]]"));
    }
    project.found.push("Cargo.toml".to_owned());
    let main = look.source("src/main.rs").map(|text| ("src/main.rs".to_owned(), text));
    project.listens_as(main.as_slice());
    project.command(&["/app/server"]);
    project.file(&format!("build/release/{name}"), "/app/server");
    let needs = table.get("dependencies").and_then(toml::Value::as_table);
    let egress: &[&str] = if needs.is_some_and(|all| !all.is_empty()) { &CRATES } else { &[] };
    let command = ["cargo", "build", "--release", "--target-dir", "build", "--bin", &name];
    project.builds("Compiles the program.", &command, egress);
    if super::look::interpreter("cargo").is_some()
        || !std::path::Path::new("/usr/bin/cargo").is_file()
    {
        project.notes.push(
            "a sandbox sees a toolchain in a home directory if you show it: `thaw build --tools ~/.cargo \
             --tools ~/.rustup`"
                .to_owned(),
        );
    }
    Ok(())
}

/// The only executable file that is a program of the machine.
pub(super) fn executable(look: &Look) -> Option<String> {
    let mut all = look.executables().filter(|(_, magic)| *magic == ELF);
    match (all.next(), all.next()) {
        (Some((only, _)), None) => Some(only.to_owned()),
        _ => None,
    }
}

pub(super) fn read_binary(look: &Look, project: &mut Project) -> Result<(), InitError> {
    let Some(name) = executable(look) else {
        return Err(look.unusable("", "there is not exactly one executable program in it"));
    };
    project.found.push(name.clone());
    let place = format!("/app/{name}");
    project.command(&[&place]);
    project.notes.push(format!(
        "the port of a program is not written in it: set `port` in thaw.toml if {name} does not listen on \
         the one that PORT says"
    ));
    Ok(())
}
