//! Go: a static program made of the module.

use super::look::Look;
use super::{InitError, Project};

/// Go's proxy of modules and its database of check sums.
const PROXY: [&str; 2] = ["proxy.golang.org:443", "sum.golang.org:443"];

pub(super) fn read(look: &Look, project: &mut Project) -> Result<(), InitError> {
    let Some(module) = look.text("go.mod")? else {
        return Err(look.unusable("go.mod", "there is none; `go mod init NAME` makes it"));
    };
    project.found.push("go.mod".to_owned());
    let (package, sources) = main_package(look, project)?;
    project.listens_as(&sources);
    project.command(&["/app/server"]);
    project.file("build/server", "/app/server");
    let needs = module.lines().any(|line| line.trim_start().starts_with("require"));
    let egress: &[&str] = if needs { &PROXY } else { &[] };
    let command = ["env", "CGO_ENABLED=0", "go", "build", "-o", "build/server", &package];
    project.builds("Compiles the module.", &command, egress);
    // A collector of garbage of its own wants a second processor.
    project.limits.push(("cpu", "2".to_owned()));
    Ok(())
}

type Sources = Vec<(String, String)>;

/// The package with the program, and its sources.
fn main_package(look: &Look, project: &mut Project) -> Result<(String, Sources), InitError> {
    let is_main = |sources: &Sources| {
        sources.iter().any(|(name, text)| {
            !name.ends_with("_test.go") && text.lines().any(|line| line.trim() == "package main")
        })
    };
    let here = look.sources(".go");
    if is_main(&here) {
        return Ok((".".to_owned(), here));
    }
    let mut all = look.directories("cmd").into_iter().filter_map(|name| {
        let below = Look::at(&look.directory().join("cmd").join(&name)).ok()?;
        let sources = below.sources(".go");
        is_main(&sources).then_some((format!("./cmd/{name}"), sources))
    });
    let Some((package, sources)) = all.next() else {
        return Err(look.unusable(
            "go.mod",
            "no `package main` is in its directory or below cmd/; go to the directory of the program",
        ));
    };
    let others: Vec<_> = all.map(|(package, _)| package).collect();
    if !others.is_empty() {
        project.notes.push(format!(
            "{package} is built; others are {}: change `command` in [build] of thaw.toml for one of them",
            others.join(", ")
        ));
    }
    project.found.push(package.clone());
    Ok((package, sources))
}
