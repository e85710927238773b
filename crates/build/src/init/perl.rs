//! Perl: applications of Plack (`app.psgi`), and programs that serve by themselves.

use super::look::{Look, in_path};
use super::{InitError, Project, toml_text};

/// The file of a Plack application.
pub(super) const PSGI: &str = "app.psgi";

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
    if look.has(PSGI) {
        psgi(look, project);
        return Ok(());
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

/// Has a server of Plack serve the application: Starman if it is here, else `plackup` with Plack's own.
fn psgi(look: &Look, project: &mut Project) {
    project.found.push(PSGI.to_owned());
    let address = format!("0.0.0.0:{}", project.port);
    let program = |name: &str| {
        let path = in_path(name)?.canonicalize().ok()?;
        Some(path.display().to_string())
    };
    if let Some(starman) = program("starman") {
        project.found.push("Starman".to_owned());
        project.command(&["perl", &starman, "--listen", &address, "--workers", "1", PSGI]);
        project.runtime.push(("programs", toml_text::list(&[starman])));
    } else {
        let plackup = program("plackup");
        project.notes.push(match plackup {
            Some(_) => "it is served by Plack's server for development; install Starman and run `thaw init \
                        --force` for one made for use"
                .to_owned(),
            None => "there is no starman and no plackup in PATH; install Starman on this host".to_owned(),
        });
        let plackup = plackup.unwrap_or_else(|| "/usr/bin/plackup".to_owned());
        let port = project.port.to_string();
        project.command(&["perl", &plackup, "--host", "0.0.0.0", "--port", &port, PSGI]);
        project.runtime.push(("programs", toml_text::list(&[plackup])));
    }
    project.env.push(("PLACK_ENV".to_owned(), "deployment".to_owned()));
    if look.directories("").iter().any(|name| name == "lib") {
        project.env.push(("PERL5LIB".to_owned(), "/app/lib".to_owned()));
    }
}
