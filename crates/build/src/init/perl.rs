//! Perl: programs that serve by themselves.

use super::look::Look;
use super::{InitError, Project};

/// The file that holds the program.
pub(super) fn program(look: &Look) -> Option<String> {
    if let Some(usual) = look.first_of(&["app.pl", "server.pl", "main.pl"]) {
        return Some(usual.to_owned());
    }
    let mut all = look.ending(".pl");
    match (all.next(), all.next()) {
        (Some(only), None) => Some(only.to_owned()),
        _ => None,
    }
}

pub(super) fn read(look: &Look, project: &mut Project) -> Result<(), InitError> {
    project.kind = "perl";
    project.names_interpreter("perl");
    if look.has("cpanfile") {
        project.notes.push(
            "there is a cpanfile: Thaw installs nothing of it; let a `command` in [build] of thaw.toml do that"
                .to_owned(),
        );
    }
    let Some(program) = program(look) else {
        return Err(look.unusable(
            "",
            "there is no app.pl or server.pl, and not a single file in Perl; go to the program's directory, or \
             write thaw.toml by hand (docs/thaw-toml.md)",
        ));
    };
    project.found.push(program.clone());
    project.command(&["perl", &program]);
    if let Some(text) = look.source(&program) {
        project.listens_as(&[(program, text)]);
    }
    Ok(())
}
