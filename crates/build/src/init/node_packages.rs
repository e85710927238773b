//! Which program installs the packages of a `package.json`: the one whose lock file is there.

use super::look::Look;
use super::node::Package;

/// npm's registry.
const NPM: &str = "registry.npmjs.org:443";
/// That of yarn, which lock files of yarn name.
const YARN: &str = "registry.yarnpkg.com:443";
/// The last yarn of the first kind. Its lock files name no version.
const CLASSIC: &str = "1.22.22";

/// A program that installs packages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Installer {
    /// npm, and whether it goes by a lock file.
    Npm { is_locked: bool },
    /// pnpm of this version.
    Pnpm(String),
    /// yarn of version 1.
    Classic(String),
    /// yarn of a later version.
    Berry(String),
}

impl Installer {
    /// That of a project.
    pub fn of(look: &Look, package: &Package) -> Self {
        if look.has("package-lock.json") {
            return Self::Npm { is_locked: true };
        }
        if let Some(lock) = look.head("pnpm-lock.yaml") {
            return Self::Pnpm(package.version_of("pnpm").unwrap_or_else(|| pnpm_of(&lock)));
        }
        if let Some(lock) = look.head("yarn.lock") {
            let named = package.version_of("yarn");
            // Those of version 1 begin with `# yarn lockfile v1`.
            return match lock.contains("__metadata:") {
                true => Self::Berry(named.unwrap_or_else(|| berry_of(&lock))),
                false => Self::Classic(
                    named
                        .filter(|version| version.starts_with("1."))
                        .unwrap_or_else(|| CLASSIC.to_owned()),
                ),
            };
        }
        Self::Npm { is_locked: false }
    }

    /// Its lock file, if the project has one.
    pub fn lock_file(&self) -> Option<&'static str> {
        match self {
            Self::Npm { is_locked } => is_locked.then_some("package-lock.json"),
            Self::Pnpm(_) => Some("pnpm-lock.yaml"),
            Self::Classic(_) | Self::Berry(_) => Some("yarn.lock"),
        }
    }

    /// Program and arguments that install what the program needs when it runs, into `node_modules` without
    /// directories of links, as npm does.
    pub fn install(&self) -> Vec<String> {
        let words = match self {
            Self::Npm { .. } => format!("{} --omit=dev --no-audit --no-fund", self.all()),
            Self::Pnpm(_) => format!("{} --prod", self.all()),
            Self::Classic(_) => format!("{} --production", self.all()),
            // It has no such option for a single package.
            Self::Berry(_) => return self.by_shell(&self.all()),
        };
        words.split(' ').map(str::to_owned).collect()
    }

    /// The same with what is only needed for development.
    pub fn install_with_development(&self) -> Vec<String> {
        let words = match self {
            Self::Npm { .. } => format!("{} --no-audit --no-fund", self.all()),
            Self::Pnpm(_) | Self::Classic(_) => self.all(),
            Self::Berry(_) => return self.by_shell(&self.all()),
        };
        words.split(' ').map(str::to_owned).collect()
    }

    /// The same for what compiling needs, with the build script behind it.
    pub fn install_and_build(&self) -> Vec<String> {
        self.by_shell(&format!("{} && {} run build", self.all(), self.program()))
    }

    /// Destinations that it connects to.
    pub fn egress(&self) -> &'static [&'static str] {
        match self {
            Self::Npm { .. } | Self::Pnpm(_) => &[NPM],
            Self::Classic(_) | Self::Berry(_) => &[NPM, YARN],
        }
    }

    fn by_shell(&self, line: &str) -> Vec<String> {
        ["sh", "-c", line].map(str::to_owned).into()
    }

    /// Installs everything.
    fn all(&self) -> String {
        let arguments = match self {
            Self::Npm { is_locked: true } => "ci",
            Self::Npm { is_locked: false } => "install",
            Self::Pnpm(_) => "install --frozen-lockfile --config.node-linker=hoisted",
            Self::Classic(_) => "install --frozen-lockfile --non-interactive",
            Self::Berry(_) => "install --immutable",
        };
        format!("{} {arguments}", self.program())
    }

    fn program(&self) -> String {
        match self {
            Self::Npm { .. } => "npm".to_owned(),
            Self::Pnpm(version) => format!("npx --yes pnpm@{version}"),
            Self::Classic(version) => format!("npx --yes yarn@{version}"),
            Self::Berry(version) => {
                format!("YARN_NODE_LINKER=node-modules npx --yes @yarnpkg/cli-dist@{version}")
            }
        }
    }
}

/// The version of yarn that writes lock files of this kind, and changes none of them.
fn berry_of(lock: &str) -> String {
    let metadata = lock.lines().skip_while(|line| !line.starts_with("__metadata:"));
    let version = match metadata.filter_map(|line| line.strip_prefix("  version:")).next() {
        Some(version) => version.trim(),
        None => "",
    };
    let version = match version {
        "4" | "5" => "2.4.2",
        "6" | "7" => "3.8.7",
        "8" => "4.5.3",
        _ => "4",
    };
    version.to_owned()
}

/// The version of pnpm that writes lock files of this kind.
fn pnpm_of(lock: &str) -> String {
    let said = lock.lines().find_map(|line| line.strip_prefix("lockfileVersion:"));
    let kind = said.unwrap_or_default().trim().trim_matches(['\'', '"']);
    let version = match kind.split('.').next() {
        Some("5") => "7",
        Some("6") => "8",
        _ => "9",
    };
    version.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_files_of_yarn_say_which_yarn() {
        for (kind, version) in [("6", "3.8.7"), ("8", "4.5.3"), ("10", "4")] {
            let lock = format!("# generated\n\n__metadata:\n  version: {kind}\n  cacheKey: 10c0\n");
            assert_eq!(berry_of(&lock), version, "{kind}");
        }
    }

    #[test]
    fn lock_files_of_pnpm_say_which_pnpm() {
        for (line, version) in [
            ("lockfileVersion: 5.4", "7"),
            ("lockfileVersion: '6.0'", "8"),
            ("lockfileVersion: '9.0'", "9"),
            ("", "9"),
        ] {
            assert_eq!(pnpm_of(&format!("{line}\n\nsettings:\n")), version, "{line}");
        }
    }
}
