//! Node.js: `package.json`, or a server in a file of its own.

use super::look::{Look, in_path};
use super::node_packages::Installer;
use super::{InitError, Project};
use serde::Deserialize;
use std::collections::BTreeMap;

/// Files that usually hold the server, the likeliest first.
const PROGRAMS: [&str; 9] = [
    "server.js",
    "app.js",
    "index.js",
    "main.js",
    "server.mjs",
    "app.mjs",
    "index.mjs",
    "src/server.js",
    "src/index.js",
];
/// Where programs of packages are.
const BIN: &str = "node_modules/.bin/";
/// Programs of packages that have another name.
const OTHER_NAMES: [(&str, &str); 4] = [
    ("nest", "@nestjs/cli"),
    ("remix-serve", "@remix-run/serve"),
    ("babel-node", "@babel/node"),
    ("swc-node", "@swc-node/register"),
];
/// As much of a `package.json` as matters here.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Package {
    main: Option<String>,
    /// The program that installs the packages, with its version, and a hash of it: `pnpm@9.1.0+sha512.…`
    package_manager: Option<String>,
    #[serde(default)]
    scripts: BTreeMap<String, String>,
    #[serde(default)]
    dependencies: BTreeMap<String, serde_json::Value>,
    #[serde(default)]
    dev_dependencies: BTreeMap<String, serde_json::Value>,
}

impl Package {
    /// The first of the dependencies for development that a command runs by: `tsx`, or
    /// `node --import tsx`.
    fn needed_for_development(&self, command: &[String]) -> Option<&str> {
        let names = self.dev_dependencies.keys().map(String::as_str);
        let mut names = names.filter(|name| !self.dependencies.contains_key(*name));
        let is_of = |word: &str, name: &str| {
            let word = word.strip_prefix(BIN).unwrap_or(word);
            let word = word.split_once('=').map_or(word, |(_, value)| value);
            let rest = word.strip_prefix(name);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
                || OTHER_NAMES.contains(&(word, name))
        };
        names.find(|name| command.iter().skip(1).any(|word| is_of(word, name)))
    }

    /// The version of a program that installs packages, if this names it.
    pub fn version_of(&self, program: &str) -> Option<String> {
        let (name, version) = self.package_manager.as_ref()?.split_once('@')?;
        let version = version.split('+').next().unwrap_or_default();
        let is_plain = |c: char| c.is_ascii_alphanumeric() || ".-".contains(c);
        let is_it = name == program && version.starts_with(|c: char| c.is_ascii_digit());
        (is_it && version.chars().all(is_plain)).then(|| version.to_owned())
    }
}

/// The file that holds the server.
pub(super) fn program(look: &Look) -> Option<&'static str> {
    look.first_of(&PROGRAMS)
}

pub(super) fn read(look: &Look, project: &mut Project) -> Result<(), InitError> {
    let package = match look.text("package.json")? {
        None => Package::default(),
        Some(text) => {
            project.found.push("package.json".to_owned());
            serde_json::from_str(&text)
                .map_err(|error| look.unusable("package.json", &error.to_string()))?
        }
    };
    for framework in ["express", "fastify", "koa", "next", "@nestjs/core"] {
        if package.dependencies.contains_key(framework) {
            project.found.push(framework.to_owned());
        }
    }
    set_command(look, &package, project)?;
    match project.command[0].as_str() {
        "bun" => names_bun(project),
        _ => {
            project.kind = "node";
            project.names_interpreter("node");
        }
    }
    project.env.push(("NODE_ENV".to_owned(), "production".to_owned()));
    let mut names: Vec<&str> = project.command.iter().skip(1).map(String::as_str).collect();
    names.extend(PROGRAMS);
    let sources = names.into_iter().filter_map(|name| Some((name.to_owned(), look.source(name)?)));
    let sources = sources.collect::<Vec<_>>();
    if project.port_from != "found in the start script" {
        project.listens_as(&sources);
    }
    installs(look, &package, project);
    Ok(())
}

/// How the server is started: by the start script if that is `node FILE`, `bun FILE`, or the program
/// of a package; else by `main`, or a file of a usual name.
fn set_command(look: &Look, package: &Package, project: &mut Project) -> Result<(), InitError> {
    if let Some(start) = package.scripts.get("start") {
        if let Some((env, words)) = plain_words(look, start) {
            project.found.push(format!("start script `{start}`"));
            let port = env.iter().find(|(name, _)| name == "PORT");
            if let Some(port) = port.and_then(|(_, value)| value.parse().ok().filter(|p| *p != 0)) {
                project.port = port;
                project.port_from = "found in the start script".to_owned();
                project.env.extend(env.into_iter().filter(|(name, _)| name != "PORT"));
            } else {
                project.env.extend(env);
            }
            project.command = match words[0].as_str() {
                "node" | "bun" => words,
                // Programs of packages are files in JavaScript, by links.
                program => {
                    let link = format!("{BIN}{program}");
                    ["node".to_owned(), link].into_iter().chain(words[1..].to_vec()).collect()
                }
            };
            return Ok(());
        }
        project.notes.push(format!(
            "the start script `{start}` needs a shell or another tool, and is not run; set `command` in \
             thaw.toml to what it starts"
        ));
    }
    let main = package.main.clone().filter(|main| look.has(main));
    match main.or_else(|| program(look).map(str::to_owned)) {
        Some(main) => {
            project.found.push(main.clone());
            project.command(&["node", &main]);
            Ok(())
        }
        None => {
            let script = match package.scripts.get("start") {
                Some(start) => format!("its start script `{start}` needs a shell or another tool"),
                None => "it has no start script".to_owned(),
            };
            let why = format!(
                "{script}, it has no `main` that is there, and there is no server.js, app.js or index.js; \
                 add a start script such as `node server.js`"
            );
            Err(look.unusable("package.json", &why))
        }
    }
}

/// Bun is a program like any other: the command has its path.
fn names_bun(project: &mut Project) {
    match in_path("bun").and_then(|path| path.canonicalize().ok()) {
        Some(path) => project.command[0] = path.display().to_string(),
        None => project.notes.push(
            "bun is not in PATH: install it, and write its path in `command` of thaw.toml"
                .to_owned(),
        ),
    }
}

/// Variables with their values, and the words behind them.
type PlainWords = (Vec<(String, String)>, Vec<String>);

/// Variables and words of a command line that no shell need read.
fn plain_words(look: &Look, line: &str) -> Option<PlainWords> {
    if line.contains(|c: char| "&|;$`\"'\\<>*?()".contains(c) || c.is_control()) {
        return None;
    }
    let mut words = line.split_whitespace().peekable();
    let mut env = Vec::new();
    while let Some((name, value)) = words.peek().and_then(|word| word.split_once('=')) {
        if name != "NODE_ENV" {
            env.push((name.to_owned(), value.to_owned()));
        }
        words.next();
    }
    // What starts other programs is no program of a package.
    const STARTERS: [&str; 8] = ["npm", "npx", "yarn", "pnpm", "bunx", "deno", "sh", "bash"];
    if words.peek().is_some_and(|word| STARTERS.contains(word)) {
        return None;
    }
    let words: Vec<String> = words.map(str::to_owned).collect();
    let words = if words.first()? == "bun" { by_bun(look, words)? } else { words };
    Some((env, words))
}

/// `bun FILE`, for that and for `bun run FILE`, but not for a script or a tool.
fn by_bun(look: &Look, mut words: Vec<String>) -> Option<Vec<String>> {
    if words.get(1).is_some_and(|word| word == "run") {
        words.remove(1);
    }
    words.get(1).is_some_and(|file| look.has(file)).then_some(words)
}

/// How dependencies are installed, and what is compiled.
fn installs(look: &Look, package: &Package, project: &mut Project) {
    let installer = Installer::of(look, package);
    let (why, command) = if package.scripts.contains_key("build") {
        ("Installs what package.json names, and compiles.", installer.install_and_build())
    } else if let Some(name) = package.needed_for_development(&project.command) {
        project.notes.push(format!(
            "the program is started by {name}, which is one of devDependencies: all of these are \
             installed, too"
        ));
        ("Installs what package.json names.", installer.install_with_development())
    } else if !package.dependencies.is_empty() {
        ("Installs what package.json names.", installer.install())
    } else {
        return;
    };
    project.found.extend(installer.lock_file().map(str::to_owned));
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    project.builds(why, &command, installer.egress());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_start_script_need_no_shell() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("a.ts"), "").unwrap();
        let look = Look::at(directory.path()).unwrap();
        let (env, words) =
            plain_words(&look, "NODE_ENV=production A=b node  server.js --x").unwrap();
        assert_eq!(env, [("A".to_owned(), "b".to_owned())]);
        assert_eq!(words, ["node", "server.js", "--x"]);
        for line in ["bun a.ts", "bun run a.ts"] {
            assert_eq!(plain_words(&look, line).unwrap().1, ["bun", "a.ts"], "{line}");
        }
        for line in [
            "tsc && node a.js",
            "node \"a b.js\"",
            "node $MAIN",
            "A=b",
            "",
            "A=b npm run serve",
            "bun run serve",
            "bun",
            "bun run",
        ] {
            assert_eq!(plain_words(&look, line), None, "{line}");
        }
    }
}
