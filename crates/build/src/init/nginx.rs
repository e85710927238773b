//! nginx: an `nginx.conf` that says what is served.

use super::look::{Look, in_path, without_comments};
use super::{InitError, Project, toml_text};
use regex::Regex;
use std::path::Path;

/// The file that says what is served.
pub(super) const CONF: &str = "nginx.conf";
/// Where a configuration without `listen` listens.
const PORT: u16 = 80;
/// What nginx of this host looks for: further settings, users, and directories for what it writes.
const NEEDED: [&str; 6] = [
    "/etc/nginx",
    "/etc/passwd",
    "/etc/group",
    "/usr/lib/nginx/modules",
    "/var/lib/nginx",
    "/var/log/nginx",
];

pub(super) fn read(look: &Look, project: &mut Project) -> Result<(), InitError> {
    let Some(text) = look.text(CONF)? else {
        return Err(look.unusable(CONF, "there is none; write one, with `events` and `http`"));
    };
    project.found.push(CONF.to_owned());
    let text = without_comments(&text);
    if !has(&text, "events") {
        return Err(look.unusable(
            CONF,
            "it has no block `events`, so nginx does not start with it; name a whole configuration nginx.conf, which \
             includes this one",
        ));
    }
    let nginx =
        ["/usr/sbin/nginx".into()].into_iter().find(|path: &std::path::PathBuf| path.is_file());
    let nginx = in_path("nginx").or(nginx);
    if nginx.is_none() {
        project.notes.push("there is no nginx on this host; install it".to_owned());
    }
    let nginx = nginx.map_or("/usr/sbin/nginx".to_owned(), |path| path.display().to_string());
    // Settings that may be given once: those that the file has stay.
    let settings = [("daemon", "daemon off;"), ("pid", "pid /tmp/nginx.pid;")];
    let settings = settings.iter().filter(|(name, _)| !has(&text, name)).map(|(_, text)| *text);
    let settings = settings.collect::<Vec<_>>().join(" ");
    project.command(&[&nginx, "-p", "/app/", "-e", "stderr", "-c", "/app/nginx.conf"]);
    if !settings.is_empty() {
        project.command.extend(["-g".to_owned(), settings]);
    }
    sets_port(&text, project);
    let mut include: Vec<String> = NEEDED
        .iter()
        .filter(|path| Path::new(path).exists())
        .map(|path| (*path).to_owned())
        .collect();
    for root in roots(&text) {
        if Path::new(&root).is_dir() {
            include.push(root);
        } else {
            project.notes.push(format!(
                "{CONF} serves {root}, which this host does not have; put files there by `files` in thaw.toml"
            ));
        }
    }
    project.runtime.push(("include", toml_text::list(&include)));
    Ok(())
}

/// The port of the first server without TLS.
fn sets_port(text: &str, project: &mut Project) {
    let all = listens(text);
    if all.is_empty() && has(text, "listen") {
        project.notes.push(format!(
            "requests come without TLS, and {CONF} names no port for such; add `listen {PORT};` to its server"
        ));
    }
    project.port = all.first().copied().unwrap_or(PORT);
    project.port_from = match all.is_empty() {
        true => "that of nginx if `listen` names none".to_owned(),
        false => format!("found in {CONF}"),
    };
    if all.len() > 1 {
        let others: Vec<_> = all.iter().skip(1).map(u16::to_string).collect();
        project.notes.push(format!(
            "requests go to port {}; {CONF} listens on {}, too",
            project.port,
            others.join(", ")
        ));
    }
}

/// Ports on which servers listen for HTTP without TLS, each once.
fn listens(text: &str) -> Vec<u16> {
    let listen = Regex::new(r"\blisten\s+(?:(?:\[[^\]]*\]|[\w.*-]+):)?(\d+)(\s[^;]*)?;");
    let listen = listen.expect("it is one");
    let mut all = Vec::new();
    for found in listen.captures_iter(text) {
        let options = found.get(2).map_or("", |options| options.as_str());
        let is_plain =
            !options.split_whitespace().any(|word| ["ssl", "quic", "udp"].contains(&word));
        if let Ok(port) = found[1].parse::<u16>()
            && is_plain
            && port != 0
            && !all.contains(&port)
        {
            all.push(port);
        }
    }
    all
}

/// Absolute directories from which files are served, each once, but for those of the function.
fn roots(text: &str) -> Vec<String> {
    let root = Regex::new(r#"\broot\s+["']?(/[^\s;"'$]+)["']?\s*;"#).expect("it is one");
    let mut all: Vec<String> = root.captures_iter(text).map(|found| found[1].to_owned()).collect();
    all.retain(|path| !Path::new(path).starts_with("/app"));
    all.sort();
    all.dedup();
    all
}

/// Whether it has this setting.
fn has(text: &str, name: &str) -> bool {
    let setting = Regex::new(&format!(r"(?m)(?:^|[;{{}}])\s*{name}\b")).expect("it is one");
    setting.is_match(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_those_of_servers_without_tls() {
        let all = "listen 8080 default_server; listen [::]:8080; listen 127.0.0.1:81; listen 443 ssl http2;\n\
                   listen unix:/run/x; listen 8443 quic;";
        assert_eq!(listens(all), [8080, 81]);
        for none in ["# nothing", "listen 127.0.0.1;", "listen [::1];", "listen 443 ssl;"] {
            assert!(listens(none).is_empty(), "{none}");
        }
    }

    #[test]
    fn settings_are_told_from_what_is_named_like_them() {
        let text = without_comments(
            "# daemon off;\nevents {}\nhttp { root /srv/www; root /app/x; root html; }\n",
        );
        assert!(has(&text, "events") && has(&text, "http"));
        assert!(!has(&text, "daemon") && !has(&text, "pid"));
        assert_eq!(roots(&text), ["/srv/www"]);
        assert!(has("worker_processes 1; pid /x;", "pid"));
    }
}
