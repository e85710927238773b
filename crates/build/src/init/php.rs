//! PHP: served by its built-in server.

use super::look::Look;
use super::{InitError, Project};

/// The registry of packages, and where most of them lie.
const REGISTRY: [&str; 3] =
    ["repo.packagist.org:443", "api.github.com:443", "codeload.github.com:443"];

/// The script that answers requests.
pub(super) fn front(look: &Look) -> Option<&'static str> {
    look.first_of(&["public/index.php", "web/index.php", "index.php"])
}

pub(super) fn read(look: &Look, project: &mut Project) -> Result<(), InitError> {
    project.kind = "php";
    project.names_interpreter("php");
    if let Some(text) = look.text("composer.json")? {
        project.found.push("composer.json".to_owned());
        let json: serde_json::Value = serde_json::from_str(&text)
            .map_err(|error| look.unusable("composer.json", &error.to_string()))?;
        let requires = json["require"].as_object();
        // `php` and extensions are not packages.
        if requires.is_some_and(|all| all.keys().any(|name| name.contains('/'))) {
            let command = ["composer", "install", "--no-dev", "--no-interaction", "--no-progress"];
            project.builds("Installs what composer.json names.", &command, &REGISTRY);
        }
    }
    let Some(front) = front(look) else {
        return Err(look.unusable(
            "composer.json",
            "there is no index.php or public/index.php; go to the program's directory, or write thaw.toml by \
             hand (docs/thaw-toml.md)",
        ));
    };
    project.found.push(front.to_owned());
    let address = format!("0.0.0.0:{}", project.port);
    match front.split_once('/') {
        Some((root, _)) => project.command(&["php", "-S", &address, "-t", root, front]),
        // As a word it would answer for every file; without one it answers where there is none.
        None => project.command(&["php", "-S", &address]),
    }
    Ok(())
}
