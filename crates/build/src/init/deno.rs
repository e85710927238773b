//! Deno: `deno.json` or `deno.jsonc`.

use super::look::{Look, in_path};
use super::{InitError, Project};
use regex::Regex;
use serde_json::Value;
use std::path::{Component, Path};

/// Files that say how a program of Deno is run.
pub(super) const MANIFESTS: [&str; 2] = ["deno.json", "deno.jsonc"];
/// Files that usually hold the server, the likeliest first.
const PROGRAMS: [&str; 10] = [
    "main.ts",
    "server.ts",
    "mod.ts",
    "index.ts",
    "app.ts",
    "main.js",
    "server.js",
    "src/main.ts",
    "src/server.ts",
    "src/index.ts",
];
/// Has packages lie in the function's directory: those of npm in `node_modules`, others in `vendor`.
const HERE: [&str; 2] = ["--node-modules-dir=auto", "--vendor=true"];
/// Where `Deno.serve` listens if it is not told.
const PORT: u16 = 8000;

pub(super) fn read(look: &Look, project: &mut Project) -> Result<(), InitError> {
    let manifest = look.first_of(&MANIFESTS).unwrap_or(MANIFESTS[0]);
    let json: Value = match look.text(manifest)? {
        None => Value::Null,
        Some(text) => {
            project.found.push(manifest.to_owned());
            serde_json::from_str(&without_comments(&text))
                .map_err(|error| look.unusable(manifest, &error.to_string()))?
        }
    };
    let (words, main) = started(look, &json, project, manifest)?;
    let source = look.source(&main).unwrap_or_default();
    project.command = words;
    names_deno(project);
    let sources = [(main.clone(), source.clone())];
    if project.command.get(1).is_some_and(|word| word == "serve") {
        serves(project);
    } else {
        project.listens_as(&sources);
        let is_default = project.port_from.starts_with("Thaw sets");
        if is_default && source.contains("Deno.serve(") && !source.contains("PORT") {
            project.port = PORT;
            project.port_from = "that of Deno.serve".to_owned();
        }
    }
    let from = origins(&json, &source);
    if !from.is_empty() {
        let deno = project.command[0].clone();
        let command = [&deno, "install", HERE[0], HERE[1], "--entrypoint", &main];
        let from: Vec<&str> = from.iter().map(String::as_str).collect();
        project.builds("Fetches what the program imports.", &command, &from);
        let options = [HERE[0], HERE[1], "--cached-only"].map(str::to_owned);
        project.command.splice(2..2, options);
    }
    project.env.push(("DENO_NO_UPDATE_CHECK".to_owned(), "1".to_owned()));
    // V8 has threads of its own, and files of a large program in memory.
    project.limits.push(("memory", "\"512MiB\"".to_owned()));
    project.limits.push(("cpu", "2".to_owned()));
    Ok(())
}

/// Whether the server is rather that of a `package.json`: that says how it starts, and no file of Deno does.
pub(super) fn is_beside_node(look: &Look) -> bool {
    let json = |name: &str| -> Option<Value> {
        serde_json::from_str(&without_comments(&look.source(name)?)).ok()
    };
    let of_node = json("package.json").unwrap_or_default();
    let of_deno = look.first_of(&MANIFESTS).and_then(json).unwrap_or_default();
    let starts_node = !of_node["scripts"]["start"].is_null() || !of_node["main"].is_null();
    starts_node && of_deno["tasks"]["start"].is_null() && of_deno["imports"].is_null()
}

/// The words that start the server, and the file that holds it: those of the task `start`, if it is a plain
/// `deno run` or `deno serve`.
fn started(
    look: &Look,
    json: &Value,
    project: &mut Project,
    manifest: &str,
) -> Result<(Vec<String>, String), InitError> {
    let task = &json["tasks"]["start"];
    if let Some(task) = task.as_str().or_else(|| task["command"].as_str()) {
        if let Some((words, main)) = plain_task(look, task) {
            project.found.push(format!("task `{task}`"));
            return Ok((words, main));
        }
        project.notes.push(format!(
            "the task `{task}` is no plain `deno run` or `deno serve` of a file, and is not run; set `command` in \
             thaw.toml to what it starts"
        ));
    }
    let Some(main) = look.first_of(&PROGRAMS) else {
        return Err(look.unusable(
            manifest,
            "it has no task `start` that runs a file, and there is no main.ts, server.ts or index.ts; add such a task, \
             as in \"start\": \"deno run --allow-net main.ts\"",
        ));
    };
    project.found.push(main.to_owned());
    let source = look.source(main).unwrap_or_default();
    let is_served = Regex::new(r"export\s+default\s*\{").expect("it is one").is_match(&source);
    let words: &[&str] = match is_served {
        true => &["deno", "serve", "--allow-net", "--allow-env", "--allow-read", main],
        false => &["deno", "run", "--allow-net", "--allow-env", "--allow-read", main],
    };
    Ok((words.iter().map(|word| (*word).to_owned()).collect(), main.to_owned()))
}

/// The words of a task that no shell need read, without what watches files, and the file that it runs.
fn plain_task(look: &Look, task: &str) -> Option<(Vec<String>, String)> {
    if task.contains(|c: char| "&|;$`\"'\\<>*?()".contains(c) || c.is_control()) {
        return None;
    }
    let is_watch = |word: &str| {
        let option = word.split('=').next().unwrap_or_default();
        ["--watch", "--watch-hmr", "--hmr"].contains(&option)
    };
    let words = task.split_whitespace().filter(|word| !is_watch(word)).map(str::to_owned);
    let words: Vec<String> = words.collect();
    let is_known = words.len() > 2 && words[0] == "deno" && ["run", "serve"].contains(&&*words[1]);
    let main = words.iter().skip(2).find(|word| !word.starts_with('-'))?;
    let main = main.strip_prefix("./").unwrap_or(main).to_owned();
    let is_below = |part| matches!(part, Component::Normal(_) | Component::CurDir);
    let is_own = Path::new(&main).components().all(is_below) && look.has(&main);
    (is_known && is_own).then_some((words, main))
}

/// `deno serve` listens where its options say.
fn serves(project: &mut Project) {
    let port = |word: &String| word.strip_prefix("--port=")?.parse::<u16>().ok();
    if let Some(port) = project.command.iter().find_map(port) {
        project.port = port;
        project.port_from = "found in the task".to_owned();
        return;
    }
    let port = format!("--port={}", project.port);
    project.command.splice(2..2, ["--host=0.0.0.0".to_owned(), port]);
}

/// Deno is a program like any other: the command has its path.
fn names_deno(project: &mut Project) {
    match in_path("deno").and_then(|path| path.canonicalize().ok()) {
        Some(path) => project.command[0] = path.display().to_string(),
        None => project.notes.push(
            "deno is not in PATH: install it, and write its path in `command` of thaw.toml"
                .to_owned(),
        ),
    }
}

/// Where what the program imports comes from.
fn origins(json: &Value, source: &str) -> Vec<String> {
    let mut names: Vec<&str> = Vec::new();
    if let Some(imports) = json["imports"].as_object() {
        names.extend(imports.values().filter_map(Value::as_str));
    }
    let import = Regex::new(r#"(?:from|import)\s*\(?\s*["']((?:npm|jsr|https):[^"'\s]+)["']"#);
    let import = import.expect("it is one");
    let direct = import.captures_iter(source).filter_map(|all| Some(all.get(1)?.as_str()));
    names.extend(direct);
    let mut all: Vec<String> = names.into_iter().flat_map(origin).collect();
    all.sort();
    all.dedup();
    all
}

/// The destinations of one import.
fn origin(name: &str) -> Vec<String> {
    if name.starts_with("npm:") {
        return vec!["registry.npmjs.org:443".to_owned()];
    }
    if name.starts_with("jsr:") {
        // Packages of JSR may want some of npm.
        return ["jsr.io:443", "npm.jsr.io:443", "registry.npmjs.org:443"]
            .map(str::to_owned)
            .into();
    }
    let host = name.strip_prefix("https://").and_then(|rest| rest.split('/').next());
    let is_host = |host: &&str| {
        !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || ".-".contains(c))
    };
    host.filter(is_host).map(|host| vec![format!("{host}:443")]).unwrap_or_default()
}

/// JSON of JSON with comments and with commas behind the last item.
fn without_comments(text: &str) -> String {
    // A string, a comment, or a comma before a bracket.
    let pattern = r#""(?:\\.|[^"\\])*"|//[^\n]*|(?s:/\*.*?\*/)"#;
    let comments = Regex::new(pattern).expect("it is one");
    let kept = |all: &regex::Captures<'_>| match all[0].starts_with('"') {
        true => all[0].to_owned(),
        false => " ".to_owned(),
    };
    let text = comments.replace_all(text, kept);
    let commas = Regex::new(r#""(?:\\.|[^"\\])*"|,\s*([}\]])"#).expect("it is one");
    let kept =
        |all: &regex::Captures<'_>| all.get(1).map_or(&all[0], |end| end.as_str()).to_owned();
    commas.replace_all(&text, kept).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_are_no_part_of_a_manifest() {
        let text = "{ // one\n \"a\": \"x // y, ]\", /* two\n */ \"b\": [1, 2, ],\n}";
        let json: Value = serde_json::from_str(&without_comments(text)).unwrap();
        assert_eq!(json, serde_json::json!({ "a": "x // y, ]", "b": [1, 2] }));
    }

    #[test]
    fn a_task_is_run_if_no_shell_need_read_it() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("main.ts"), "").unwrap();
        let look = Look::at(directory.path()).unwrap();
        let plain =
            |task: &str| plain_task(&look, task).map(|(words, main)| (words.join(" "), main));
        let main = || "main.ts".to_owned();
        assert_eq!(
            plain("deno run --watch -A ./main.ts"),
            Some(("deno run -A ./main.ts".to_owned(), main()))
        );
        assert_eq!(plain("deno serve main.ts"), Some(("deno serve main.ts".to_owned(), main())));
        std::fs::create_dir(directory.path().join("sub")).unwrap();
        for task in [
            "deno task x",
            "deno run other.ts",
            "deno run sub/../main.ts",
            "deno run $MAIN",
            "node main.ts",
            "",
        ] {
            assert_eq!(plain(task), None, "{task}");
        }
    }

    #[test]
    fn imports_say_where_they_come_from() {
        let json = serde_json::json!({ "imports": { "a": "npm:hono@4", "b": "./b.ts" } });
        assert_eq!(origins(&json, ""), ["registry.npmjs.org:443"]);
        let source =
            "import { x } from 'https://deno.land/std/x.ts';\nawait import(\"jsr:@std/http\")";
        let all = ["deno.land:443", "jsr.io:443", "npm.jsr.io:443", "registry.npmjs.org:443"];
        assert_eq!(origins(&Value::Null, source), all);
        assert!(origins(&Value::Null, "import x from './x.ts'").is_empty());
    }
}
