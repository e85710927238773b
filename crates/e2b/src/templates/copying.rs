//! The step `COPY`: an archive that was uploaded is unpacked in the sandbox, and what it has goes to
//! its place with owner and permissions.

use super::archive::Reader;
use super::shell::{Shell, Why, why, with_group};
use super::steps::Copy;
use super::uploads::Uploads;

/// Moves what was unpacked.
const MOVE: &str = include_str!("copy.sh");
/// Where archives are unpacked, which is removed after each.
const PLACE: &str = "/.thaw-copy";

/// Puts files there that were uploaded.
pub async fn copy(shell: &Shell, copy: &Copy, uploads: &Uploads, owner: &str) -> Result<(), Why> {
    let source = inner_path(&copy.source)?;
    let target = shell.absolute(&shell.expand(&copy.target).await?);
    let user = match &copy.owner {
        Some(user) => with_group(&shell.expand(user).await?),
        None => shell.owner().await?,
    };
    let file = uploads.open(owner, &copy.hash).map_err(why)?;
    // A build that is given up drops it.
    let reader = Reader::default();
    let stream = reader.stream(file).map_err(|error| error.to_string())?;
    let unpacked = shell.backend.unpack(&shell.id, PLACE, stream).await;
    let moved = match unpacked {
        Ok(()) => {
            let from = format!("{PLACE}/{source}");
            let mode = copy.mode.as_deref().unwrap_or_default();
            shell.ask(MOVE, &[from.trim_end_matches('/'), &target, &user, mode]).await
        }
        Err(problem) => Err(problem.message),
    };
    // What is left of it must not be in the template.
    let removed = shell.ask("rm -rf \"$1\"", &[PLACE]).await;
    let (from, to) = (&copy.source, &copy.target);
    moved.and(removed).map(drop).map_err(|why| format!("cannot copy {from:?} to {to:?}: {why}"))
}

/// The path in the archive that a source means: of a pattern, the directory above its first part
/// with a wildcard. The client has looked for what matches it.
fn inner_path(source: &str) -> Result<String, Why> {
    let is_wild = |part: &str| part.contains(['*', '?', '[', '{', '\\']);
    let mut parts = Vec::new();
    for part in source.split('/').take_while(|part| !is_wild(part)) {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop().ok_or_else(|| format!("{source:?} leads out of the uploaded files"))?;
            }
            part => parts.push(part),
        }
    }
    Ok(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_paths_in_the_archive() {
        for (source, path) in [
            ("app.py", "app.py"),
            ("./src/", "src"),
            ("a/../b", "b"),
            (".", ""),
            ("*.txt", ""),
            ("src/*.txt", "src"),
            ("src/**/a.txt", "src"),
            ("a/b[1]/c", "a"),
        ] {
            assert_eq!(inner_path(source).as_deref(), Ok(path), "{source}");
        }
        assert!(inner_path("../a").is_err());
        for (user, with) in [("me", "me:"), ("me:staff", "me:staff"), ("1000", "1000")] {
            assert_eq!(with_group(user), with);
        }
    }
}
