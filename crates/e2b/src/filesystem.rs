//! envd's service `filesystem.Filesystem`: files in a sandbox. Paths are resolved by the sandbox's
//! kernel, with the rights of the user that the client names.

use super::E2b;
use super::backend::{FileKind, FileView, Files, Links};
use super::connect::{answer_unary, read_unary};
use super::messages::{FileRequest, Names, entry};
use super::problem::{Kind, Problem};
use super::process::user;
use super::serve::Target;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use axum::routing::post;
use axum::{Extension, Router};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Most entries of one list.
pub(super) const ENTRIES_MAX: usize = 10_000;
/// Most bytes of a file of names that are looked at.
const NAMES_MAX: usize = 256 << 10;

type Asked = (State<Arc<E2b>>, Extension<Target>, HeaderMap, Body);
type Outcome<T> = Result<T, Problem>;

/// Its paths.
pub(super) fn routes() -> Router<Arc<E2b>> {
    Router::new()
        .route("/filesystem.Filesystem/Stat", post(stat))
        .route("/filesystem.Filesystem/MakeDir", post(make_dir))
        .route("/filesystem.Filesystem/Move", post(rename))
        .route("/filesystem.Filesystem/ListDir", post(list_dir))
        .route("/filesystem.Filesystem/Remove", post(remove))
        .merge(super::watch::routes())
}

/// An absolute path, without a slash at its end. A relative one begins at the directory.
pub(super) fn absolute(directory: &str, path: &str) -> Outcome<String> {
    if path.contains('\0') {
        return Err(Problem::invalid("a path has no NUL byte in it"));
    }
    let all = match path {
        "" | "." => directory.to_owned(),
        path if path.starts_with('/') => path.to_owned(),
        path => format!("{directory}/{}", path.trim_start_matches("./")),
    };
    let parts = all.split('/').filter(|part| !part.is_empty() && *part != ".");
    Ok(parts.fold(String::new(), |path, part| path + "/" + part)).map(|path| match path.as_str() {
        "" => "/".to_owned(),
        _ => path,
    })
}

/// The directory that a path is in.
fn parent(path: &str) -> &str {
    match path.rfind('/') {
        Some(0) | None => "/",
        Some(at) => &path[..at],
    }
}

/// A session over files, and what a request wants of it.
struct Session {
    files: Box<dyn Files>,
    directory: String,
    request: FileRequest,
}

impl Session {
    async fn open((State(e2b), Extension(target), headers, body): Asked) -> Outcome<Self> {
        let request = read_unary(&headers, body).await?;
        let user = target.user(user(&headers)?);
        let files = e2b.backend.files(&target.id, user.as_deref()).await?;
        Ok(Self { files, directory: target.directory, request })
    }

    fn path(&self) -> Outcome<String> {
        absolute(&self.directory, &self.request.path)
    }

    /// The answer that shows one file.
    async fn shown(&mut self, path: &str) -> Outcome<Value> {
        let file = self.files.stat(path, Links::Kept).await?;
        let shown = self.entries(vec![(path.to_owned(), file)]).await?;
        Ok(json!({"entry": shown.into_iter().next()}))
    }

    /// Files as the API shows them.
    async fn entries(&mut self, found: Vec<(String, FileView)>) -> Outcome<Vec<Value>> {
        let names = self.names(&found).await?;
        let mut shown = Vec::new();
        for (path, file) in found {
            let target = match file.kind {
                FileKind::Link => self.target(&path).await?,
                _ => None,
            };
            shown.push(entry(&path, &file, target, &names));
        }
        Ok(shown)
    }

    /// What a link leads to, and what that is; a link that leads nowhere is a link. None if it is
    /// gone meanwhile.
    async fn target(&mut self, path: &str) -> Outcome<Option<(String, FileKind)>> {
        let Some(target) = if_there(self.files.read_link(path).await)? else { return Ok(None) };
        let leads_to = self.files.stat(path, Links::Followed).await;
        let kind = leads_to.map_or(FileKind::Link, |file| file.kind);
        Ok(Some((absolute(parent(path), &target)?, kind)))
    }

    /// Names of the owners and groups of files, as the sandbox has them. Files of root alone need
    /// none of that.
    async fn names(&mut self, found: &[(String, FileView)]) -> Outcome<Names> {
        let root = BTreeMap::from([(0, "root".to_owned())]);
        let mut names = Names { users: root.clone(), groups: root };
        if found.iter().any(|(_, file)| file.uid != 0) {
            names.users.extend(self.names_in("/etc/passwd").await);
        }
        if found.iter().any(|(_, file)| file.gid != 0) {
            names.groups.extend(self.names_in("/etc/group").await);
        }
        Ok(names)
    }

    /// Names by number, as /etc/passwd and /etc/group have them: what there is of them.
    async fn names_in(&mut self, path: &str) -> BTreeMap<u32, String> {
        let text = self.contents(path).await.unwrap_or_default();
        let named = text.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let (name, number) = (fields.next()?, fields.nth(1)?);
            Some((number.parse().ok()?, name.to_owned()))
        });
        named.collect()
    }

    async fn contents(&mut self, path: &str) -> Outcome<String> {
        self.files.read(path, NAMES_MAX as u64).await?;
        let mut bytes = Vec::new();
        while let Some(piece) = self.files.next_piece(path).await? {
            bytes.extend_from_slice(&piece);
            if bytes.len() > NAMES_MAX {
                return Err(Problem::new(Kind::Busy, format!("{path} has no end")));
            }
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// None where the file does not exist.
fn if_there<T>(outcome: Outcome<T>) -> Outcome<Option<T>> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(problem) if problem.kind == Kind::NotFound => Ok(None),
        Err(problem) => Err(problem),
    }
}

async fn stat(asked: Asked) -> Response {
    let shown = async {
        let mut session = Session::open(asked).await?;
        let path = session.path()?;
        session.shown(&path).await
    };
    answer_unary(shown.await)
}

async fn make_dir(asked: Asked) -> Response {
    let made = async {
        let mut session = Session::open(asked).await?;
        let path = session.path()?;
        match if_there(session.files.stat(&path, Links::Followed).await)? {
            Some(file) if file.kind == FileKind::Directory => {
                return Err(Problem::new(Kind::Exists, format!("directory {path} exists already")));
            }
            Some(_) => return Err(Problem::invalid(format!("{path} is there, and no directory"))),
            None => session.files.make_directory(&path).await?,
        }
        session.shown(&path).await
    };
    answer_unary(made.await)
}

async fn rename(asked: Asked) -> Response {
    let moved = async {
        let mut session = Session::open(asked).await?;
        let from = absolute(&session.directory, &session.request.source)?;
        let to = absolute(&session.directory, &session.request.destination)?;
        session.files.stat(&from, Links::Kept).await?;
        session.files.make_directory(parent(&to)).await?;
        session.files.rename(&from, &to).await?;
        session.shown(&to).await
    };
    answer_unary(moved.await)
}

/// Removing what is not there is no fault, as with E2B.
async fn remove(asked: Asked) -> Response {
    let removed = async {
        let mut session = Session::open(asked).await?;
        let path = session.path()?;
        if_there(session.files.remove(&path).await)?;
        Ok(json!({}))
    };
    answer_unary(removed.await)
}

async fn list_dir(asked: Asked) -> Response {
    let listed = async {
        let mut session = Session::open(asked).await?;
        let path = session.path()?;
        let depth = session.request.depth.max(1);
        let directory = session.files.stat(&path, Links::Followed).await?;
        if directory.kind != FileKind::Directory {
            return Err(Problem::invalid(format!("{path} is no directory")));
        }
        let found = walk(&mut *session.files, path, depth).await?;
        Ok(json!({"entries": session.entries(found).await?}))
    };
    answer_unary(listed.await)
}

/// All in a directory, so deep; each directory comes before what is in it.
async fn walk(files: &mut dyn Files, path: String, depth: u32) -> Outcome<Vec<(String, FileView)>> {
    let mut found = Vec::new();
    // What is still to be shown, the next one last.
    let mut waiting = entries_of(files, &path).await?;
    waiting.iter_mut().for_each(|(level, ..)| *level = 1);
    while let Some((level, path, file)) = waiting.pop() {
        if found.len() + waiting.len() >= ENTRIES_MAX {
            return Err(Problem::new(
                Kind::Exhausted,
                format!("there are more than {ENTRIES_MAX} entries; list less at once"),
            ));
        }
        if file.kind == FileKind::Directory && level < depth {
            // It may be gone, or not be the user's.
            if let Some(inner) = if_there(entries_of(files, &path).await)? {
                waiting.extend(inner.into_iter().map(|(_, path, file)| (level + 1, path, file)));
            }
        }
        found.push((path, file));
    }
    Ok(found)
}

/// The entries of a directory, the first one last.
async fn entries_of(files: &mut dyn Files, path: &str) -> Outcome<Vec<(u32, String, FileView)>> {
    let entries = files.list(path).await?;
    let within =
        |file: FileView| (0, format!("{}/{}", path.trim_end_matches('/'), file.name), file);
    Ok(entries.into_iter().rev().map(within).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_paths_begin_at_the_directory() {
        for (path, expected) in [
            ("/a/b", "/a/b"),
            ("/a//b/", "/a/b"),
            ("/", "/"),
            ("", "/work"),
            (".", "/work"),
            ("a", "/work/a"),
            ("./a/./b", "/work/a/b"),
            ("../a", "/work/../a"),
        ] {
            assert_eq!(absolute("/work", path).unwrap(), expected, "{path}");
        }
        assert!(absolute("/", "a\0b").is_err());
        assert_eq!((parent("/a"), parent("/a/b"), parent("/")), ("/", "/a", "/"));
    }
}
