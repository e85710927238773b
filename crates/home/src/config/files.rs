//! `files`: what of a function's directory goes where.

use serde::de::{
    self, Deserialize, Deserializer, MapAccess, Visitor, value::MapAccessDeserializer,
};
use serde::{Deserialize as DeserializeDerive, Serialize};
use std::fmt;
use std::path::{Component, Path, PathBuf};

/// A file or directory of the function, and its place in the sandbox. In
/// `thaw.toml` either `"server.py"` or `{ from = "static", to = "/srv/www" }`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileEntry {
    /// Path below the function's directory.
    pub from: PathBuf,
    /// Absolute path in the sandbox; none: the same path below `/app`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
}

#[derive(DeserializeDerive)]
#[serde(deny_unknown_fields)]
struct Table {
    from: PathBuf,
    to: Option<String>,
}

impl FileEntry {
    /// Where the entry lies in the sandbox.
    pub fn destination(&self) -> String {
        match &self.to {
            Some(to) => to.clone(),
            None => Path::new("/app").join(&self.from).to_string_lossy().into_owned(),
        }
    }

    fn checked(from: PathBuf, to: Option<String>) -> Result<Self, String> {
        if !is_inside(&from) {
            return Err(format!(
                "`{}` does not lie in the function's directory; give a relative path without ..",
                from.display()
            ));
        }
        match &to {
            Some(to) if !to.starts_with('/') || to.split('/').any(|part| part == "..") => Err(
                format!("`{to}` is not a place in the sandbox; give an absolute path without .."),
            ),
            _ => Ok(Self { from, to }),
        }
    }
}

/// Whether a path leads to something below the directory that it starts from.
pub(super) fn is_inside(path: &Path) -> bool {
    let inside = |c: Component| matches!(c, Component::Normal(_) | Component::CurDir);
    !path.as_os_str().is_empty() && path.components().all(inside)
}

impl<'de> Deserialize<'de> for FileEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        impl<'de> Visitor<'de> for Either {
            type Value = FileEntry;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a path or a table with `from` and `to`")
            }

            fn visit_str<E: de::Error>(self, path: &str) -> Result<FileEntry, E> {
                FileEntry::checked(path.into(), None).map_err(E::custom)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<FileEntry, A::Error> {
                let table = Table::deserialize(MapAccessDeserializer::new(map))?;
                FileEntry::checked(table.from, table.to).map_err(de::Error::custom)
            }
        }

        deserializer.deserialize_any(Either)
    }
}
