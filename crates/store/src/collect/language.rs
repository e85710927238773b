//! Languages whose interpreter can be asked where its files are: what to ask
//! each, and what of the answer a server does not need.

use std::path::{Path, PathBuf};

use super::collector::Collector;
use super::runtime::RuntimeRequest;
use super::{CollectError, Question};
use crate::error::Result;
use crate::import::Exclude;

/// A language: its interpreter and a question to it.
struct Language {
    /// Name of the interpreter, in `PATH` and beside the real executable.
    program: &'static str,
    /// Arguments that make the interpreter print its own path and then files and
    /// directories that programs in its language may open, one a line. Lines that
    /// are no absolute path of something that exists are passed over.
    question: &'static [&'static str],
    /// What is left out of the directories, relative to each.
    unused: &'static [&'static str],
}

/// Node has its library inside of the executable, except for what Debian builds
/// it to read from files, and the settings of OpenSSL.
const NODE: Language = Language {
    program: "node",
    question: &[
        "-e",
        "console.log([process.execPath, '/usr/lib/ssl/openssl.cnf',
            ...['acorn', 'acorn-walk', 'cjs-module-lexer', 'minimatch', 'undici']
                .map(name => '/usr/share/nodejs/' + name)].join('\\n'))",
    ],
    unused: &[],
};

/// A whole Java home except for what only compilers, debuggers and readers use.
const JAVA: Language = Language {
    program: "java",
    // A runtime without a compiler cannot be asked in its own language, but it
    // prints its settings; `java_home` reads them.
    question: &["-XshowSettings:properties", "-version"],
    unused: &[
        "demo",
        "docs",
        "include",
        "jmods",
        "legal",
        "lib/ct.sym",
        "lib/src.zip",
        "man",
        "src.zip",
    ],
};

/// Ruby's library, and gems except those that a user has installed for himself.
const RUBY: Language = Language {
    program: "ruby",
    question: &["-e", "puts RbConfig.ruby, $LOAD_PATH, Gem.path - [Gem.user_dir]"],
    unused: &["cache", "doc", "rdoc"],
};

/// PHP's extensions and settings; Debian's reads the system's time zones.
const PHP: Language = Language {
    program: "php",
    question: &[
        "-r",
        "echo implode(\"\\n\", [PHP_BINARY, ini_get('extension_dir'), PHP_CONFIG_FILE_PATH,
            PHP_CONFIG_FILE_SCAN_DIR, '/usr/share/zoneinfo']);",
    ],
    unused: &[],
};

/// All directories of Perl's library.
const PERL: Language = Language {
    program: "perl",
    question: &["-e", "print join(\"\\n\", $^X, @INC)"],
    unused: &["unicore/TestNorm.pl"],
};

pub(super) fn collect_node(to: &mut Collector<'_>, request: &RuntimeRequest) -> Result<()> {
    NODE.collect(to, request)
}

pub(super) fn collect_java(to: &mut Collector<'_>, request: &RuntimeRequest) -> Result<()> {
    JAVA.collect(to, request)
}

pub(super) fn collect_ruby(to: &mut Collector<'_>, request: &RuntimeRequest) -> Result<()> {
    RUBY.collect(to, request)
}

pub(super) fn collect_php(to: &mut Collector<'_>, request: &RuntimeRequest) -> Result<()> {
    PHP.collect(to, request)
}

pub(super) fn collect_perl(to: &mut Collector<'_>, request: &RuntimeRequest) -> Result<()> {
    PERL.collect(to, request)
}

impl Language {
    fn collect(&self, collector: &mut Collector<'_>, request: &RuntimeRequest) -> Result<()> {
        let asked = match &request.interpreter {
            Some(path) => collector.find_program(path.as_os_str())?,
            None => collector.find_program(self.program.as_ref())?,
        };
        let named = collector.is_authors_choice(&asked, request, self.program);
        let answer = self.ask(collector, &asked, named)?;
        let mut answer = answer.into_iter();
        let executable = answer.next().unwrap_or_else(|| asked.clone());
        collector.program(&executable)?;
        let commands = executable.parent().unwrap_or(Path::new("/")).to_owned();
        let usual = commands.join(self.program);
        if collector.exists(&usual) {
            collector.program(&usual)?;
        }
        for path in answer.filter(|path| path.is_absolute()) {
            if !collector.exists(&path) {
                continue;
            }
            if collector.on_host(&path).is_dir() {
                collector.place_tree(&path, self.unused())?;
            } else {
                collector.anything(&path)?;
            }
        }
        if !collector.collected.search_path.contains(&commands) {
            collector.collected.search_path.push(commands);
        }
        Ok(())
    }

    fn unused(&self) -> Vec<Exclude> {
        self.unused.iter().map(|path| Exclude::Path(PathBuf::from(path))).collect()
    }

    /// Runs the interpreter once. The first path is that of the executable, where
    /// a shim of a version manager has led to it.
    fn ask(
        &self,
        collector: &mut Collector<'_>,
        interpreter: &Path,
        named: bool,
    ) -> Result<Vec<PathBuf>> {
        let bad = |why: String| CollectError::BadInterpreter {
            runtime: self.program,
            interpreter: interpreter.to_owned(),
            why,
        };
        let question = Question { interpreter, arguments: self.question, named };
        let output = collector.ask(&question).map_err(|error| bad(error.to_string()))?;
        let errors = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            let last = errors.lines().last().unwrap_or("it prints no error");
            return Err(bad(format!("{} ({last})", output.status)).into());
        }
        let answer = match self.program {
            "java" => java_home(&errors),
            _ => String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).collect(),
        };
        match answer.first() {
            Some(first) if first.is_absolute() => {
                if !named {
                    answer.iter().for_each(|path| collector.grant(path));
                }
                Ok(answer)
            }
            _ => Err(bad("it does not say where it lies".to_owned()).into()),
        }
    }
}

/// The executable and the home of a Java installation, from the settings that it
/// prints.
fn java_home(settings: &str) -> Vec<PathBuf> {
    let home = settings.lines().find_map(|line| line.trim().strip_prefix("java.home = "));
    home.map_or(Vec::new(), |home| vec![Path::new(home).join("bin/java"), home.into()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_home_is_found_among_javas_settings() {
        let settings = "Property settings:\n    java.home = /opt/jdk 17\n    java.vm.name = x\n";
        assert_eq!(java_home(settings), ["/opt/jdk 17/bin/java", "/opt/jdk 17"].map(PathBuf::from));
        assert!(java_home("openjdk version 17").is_empty());
    }
}
