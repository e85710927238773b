//! Python: Flask, FastAPI and Starlette, Django, and programs that serve by themselves.

use super::look::Look;
use super::python_app::{self, Application, Framework};
use super::{InitError, Project, toml_text};
use crate::build::{LOCK_MAX, LockFile, Locked, PYPI_DESTINATIONS, dependencies};

/// Files that usually hold the program, the likeliest first.
pub(super) const PROGRAMS: [&str; 9] = [
    "app.py",
    "main.py",
    "server.py",
    "wsgi.py",
    "asgi.py",
    "application.py",
    "api.py",
    "index.py",
    "run.py",
];

/// The file that holds the program.
pub(super) fn program(look: &Look) -> Option<String> {
    if let Some(usual) = look.first_of(&PROGRAMS) {
        return Some(usual.to_owned());
    }
    let mut all = look.ending(".py").filter(|name| !["setup.py", "conftest.py"].contains(name));
    match (all.next(), all.next()) {
        (Some(only), None) => Some(only.to_owned()),
        _ => None,
    }
}

pub(super) fn read(look: &Look, project: &mut Project) -> Result<(), InitError> {
    project.kind = "python3";
    project.names_interpreter("python3");
    let packages = packages(look, project)?;
    let has = |name: &str| packages.iter().any(|package| package == name);
    if look.has("manage.py") {
        return django(look, project, has("gunicorn"));
    }
    if let Some(application) = python_app::find(look, &packages) {
        serve(project, &application, &packages);
        return Ok(());
    }
    let Some(program) = program(look) else {
        let manifest = look.first_of(&["requirements.txt", "pyproject.toml"]);
        return Err(look.unusable(
            manifest.unwrap_or_default(),
            &format!(
                "no program is beside it: none of {}, not a single file in Python, and no package with an \
                 application of Flask, FastAPI or Starlette; go to the program's directory, or write thaw.toml \
                 by hand (docs/thaw-toml.md)",
                PROGRAMS.join(", ")
            ),
        ));
    };
    project.found.push(program.clone());
    project.command(&["python3", &program]);
    let own = look.sources(".py").into_iter().filter(|(name, _)| *name == program);
    project.listens_as(&own.collect::<Vec<_>>());
    Ok(())
}

/// Has a server for use, or that of the framework, serve an application.
fn serve(project: &mut Project, application: &Application, packages: &[String]) {
    let has = |name: &str| packages.iter().any(|package| package == name);
    let found = [application.from, application.framework.name()];
    project.found.extend(found.into_iter().filter(|name| !name.is_empty()).map(str::to_owned));
    if application.is_in_src {
        project.env.push(("PYTHONPATH".to_owned(), "/app/src".to_owned()));
    }
    match application.framework {
        Framework::FastApi | Framework::Starlette => {
            asgi(project, application, has("uvicorn") || has("fastapi[standard]"));
        }
        Framework::Flask | Framework::Other if has("gunicorn") => {
            gunicorn(project, &application.for_gunicorn(), &application.worker);
        }
        Framework::Flask | Framework::Other => {
            let port = project.port.to_string();
            let name = application.for_flask();
            project.command(&["python3", "-m", "flask", "--app", &name, "run"]);
            project.command.extend(["--host", "0.0.0.0", "--port", &port].map(str::to_owned));
            project.notes.push(
                "it is served by Flask's server for development; add gunicorn to the \
                 dependencies and run `thaw init --force` for one made for use"
                    .to_owned(),
            );
        }
    }
}

/// The names of the packages that the program depends on; `pip` installs them.
fn packages(look: &Look, project: &mut Project) -> Result<Vec<String>, InitError> {
    let (file, lines) = if let Some(text) = look.text("requirements.txt")? {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        for included in included(&lines) {
            // `pip` says if it is not there.
            let text = look.source(&included).unwrap_or_default();
            lines.extend(text.lines().map(str::to_owned));
        }
        ("requirements.txt", lines)
    } else if let Some(text) = look.text("pyproject.toml")? {
        if let Some(file) = LockFile::ALL.into_iter().find(|file| look.has(file.name())) {
            return locked(look, file, &text, project);
        }
        let file = "pyproject.toml";
        let lines = dependencies(&text).map_err(|reason| look.unusable(file, &reason))?;
        (file, lines)
    } else {
        return Ok(Vec::new());
    };
    project.found.push(file.to_owned());
    if file == "pyproject.toml" && look.has("pdm.lock") {
        project.notes.push(
            "the versions are those that pyproject.toml allows, not those of pdm.lock; run `pdm export \
             --prod -o requirements.txt` and `thaw init --force` to have these"
                .to_owned(),
        );
    }
    let names: Vec<String> = lines.iter().filter_map(|line| package(line)).collect();
    // Options such as `-r other.txt` name packages, too.
    let wants_pip =
        lines.iter().any(|line| !line.trim().is_empty() && !line.trim().starts_with('#'));
    if wants_pip {
        project.runtime.push(("requirements", toml_text::string(file)));
    }
    Ok(names)
}

/// The same for the packages of a lock file, and where `pip` gets them if that is not the usual
/// index.
fn locked(
    look: &Look,
    file: LockFile,
    pyproject: &str,
    project: &mut Project,
) -> Result<Vec<String>, InitError> {
    let name = file.name();
    let text = look.text_within(name, LOCK_MAX)?.unwrap_or_default();
    let read = Locked::read(file, &text, pyproject);
    let locked = read.map_err(|reason| look.unusable(name, &reason))?;
    project.found.push(name.to_owned());
    if !locked.names.is_empty() {
        project.runtime.push(("requirements", toml_text::string(name)));
    }
    let destinations: Vec<&str> = locked.destinations.iter().map(String::as_str).collect();
    if destinations.iter().any(|destination| !PYPI_DESTINATIONS.contains(destination)) {
        project.builds("Where pip gets the packages.", &[], &destinations);
    }
    Ok(locked.names.into_iter().collect())
}

/// The files that lines of a requirements file include, `-r base.txt`.
fn included(lines: &[String]) -> Vec<String> {
    let option = |line: &String| {
        let line = line.trim();
        let rest = line.strip_prefix("-r").or_else(|| line.strip_prefix("--requirement"))?;
        let name = rest.trim_start_matches(['=', ' ', '\t']).split_whitespace().next()?;
        Some(name.to_owned())
    };
    lines.iter().filter_map(option).collect()
}

/// The name of the package that a line of a requirements file asks for; PEP 508.
fn package(line: &str) -> Option<String> {
    let line = line.split('#').next().unwrap_or_default().trim();
    let is_name = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if !line.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return None;
    }
    let name = line.split(|c| !is_name(c)).next()?.to_lowercase().replace(['_', '.'], "-");
    // FastAPI's standard extra brings a server.
    let rest = &line[name.len()..];
    Some(if name == "fastapi" && rest.starts_with("[standard]") {
        name + "[standard]"
    } else {
        name
    })
}

fn gunicorn(project: &mut Project, application: &str, worker: &str) {
    project.found.push("gunicorn".to_owned());
    let address = format!("0.0.0.0:{}", project.port);
    project.command(&["python3", "-m", "gunicorn", "--bind", &address, "--workers", "1"]);
    if !worker.is_empty() {
        project.command.extend(["--worker-class".to_owned(), worker.to_owned()]);
    }
    project.command.push(application.to_owned());
}

fn asgi(project: &mut Project, application: &Application, has_server: bool) {
    let port = project.port.to_string();
    project.command(&["python3", "-m", "uvicorn", "--host", "0.0.0.0", "--port", &port]);
    project.command.extend(application.is_factory.then(|| "--factory".to_owned()));
    project.command.push(application.name());
    if !has_server {
        project.notes.push(
            "it is served by uvicorn, which is not among the dependencies; add it there".to_owned(),
        );
    }
}

fn django(look: &Look, project: &mut Project, has_gunicorn: bool) -> Result<(), InitError> {
    project.found.push("Django".to_owned());
    let directories = look.directories("");
    let site = directories.iter().find(|name| look.has(&format!("{name}/wsgi.py")));
    match site {
        Some(site) if has_gunicorn => gunicorn(project, &format!("{site}.wsgi:application"), ""),
        _ => {
            let address = format!("0.0.0.0:{}", project.port);
            project.command(&["python3", "manage.py", "runserver", "--noreload", &address]);
            project.notes.push(
                "it is served by Django's server for development; add gunicorn to the dependencies \
                 and run `thaw init --force` for one made for use"
                    .to_owned(),
            );
        }
    }
    Ok(())
}
