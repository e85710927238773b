//! Something to begin with: a server in each language that answers with a greeting.

use super::{InitError, Language};
use std::fs;
use std::io;
use std::path::Path;

/// A file of a starter: its name and text.
type StarterFile = (&'static str, &'static str);

/// A server to begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Starter {
    language: Language,
    files: &'static [StarterFile],
}

impl Starter {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self {
            language: Language::Python,
            files: &[
                ("app.py", include_str!("starters/app.py")),
                ("requirements.txt", include_str!("starters/requirements.txt")),
            ],
        },
        Self {
            language: Language::Node,
            files: &[
                ("app.js", include_str!("starters/app.js")),
                ("package.json", include_str!("starters/package.json")),
            ],
        },
        Self {
            language: Language::Go,
            files: &[
                ("main.go", include_str!("starters/main.go")),
                ("go.mod", include_str!("starters/go.mod")),
            ],
        },
        Self {
            language: Language::Java,
            files: &[("Hello.java", include_str!("starters/Hello.java"))],
        },
        Self { language: Language::Ruby, files: &[("app.rb", include_str!("starters/app.rb"))] },
        Self {
            language: Language::Php,
            files: &[("index.php", include_str!("starters/index.php"))],
        },
        Self { language: Language::Perl, files: &[("app.pl", include_str!("starters/app.pl"))] },
        Self {
            language: Language::Rust,
            files: &[
                // Cargo takes a directory with a file of this name for a package of its own.
                ("Cargo.toml", include_str!("starters/Cargo.toml.txt")),
                ("src/main.rs", include_str!("starters/main.rs")),
            ],
        },
        Self { language: Language::C, files: &[("hello.c", include_str!("starters/hello.c"))] },
    ];

    /// The language of it.
    pub fn language(self) -> Language {
        self.language
    }
}

impl std::str::FromStr for Starter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = Self::ALL.map(|starter| starter.language.name());
        Self::ALL.into_iter().find(|starter| starter.language.name() == text).ok_or_else(|| {
            format!("there is no template `{text}`; give one of {}", names.join(", "))
        })
    }
}

/// Writes the files of a starter into a new directory, or an empty one; their names.
///
/// # Errors
/// The directory has something in it, or cannot be written.
pub fn make_starter(directory: &Path, starter: Starter) -> Result<Vec<&'static str>, InitError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |error: io::Error| InitError::Write { path, error }
    };
    fs::create_dir_all(directory).map_err(failed(directory))?;
    let mut entries = directory.read_dir().map_err(failed(directory))?;
    if entries.next().is_some() {
        return Err(InitError::NotEmpty(directory.to_owned()));
    }
    for (name, text) in starter.files {
        let path = directory.join(name);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(failed(parent))?;
        }
        fs::write(&path, text).map_err(failed(&path))?;
    }
    Ok(starter.files.iter().map(|(name, _)| *name).collect())
}
