//! The command line interpreter of PHP, 8.2 and later: its built-in web server, and scripts.
//!
//! There is no bootstrap. The interpreter is frozen when it looks for its program, which is the first
//! time that it looks at what the program is, and goes on with what is written over the
//! placeholders that it was started with.

use super::Files;
use super::fit::Unfit;
use super::language::{BootstrapFile, Language, is_versioned};
use super::placeholders::{Replacement, WORD_MAX, check_room, room, start_path, word};
use super::settings;
use std::collections::BTreeMap;
use std::path::PathBuf;
use thaw_store::{Session, StoreError};

/// Arguments of a template at most, beside options.
const ARGUMENTS_MAX: usize = 32;
/// Variables that name files of settings.
const OPTIONS: [&str; 2] = ["PHPRC", "PHP_INI_SCAN_DIR"];

pub(super) struct Php;

/// What PHP is to run.
#[derive(Debug, PartialEq, Eq)]
enum Program<'a> {
    /// The web server (`-S`), its directory of documents (`-t`) and the script that gets all
    /// requests.
    Server { address: &'a str, documents: Option<&'a str>, router: Option<&'a str> },
    /// A script and its arguments.
    Script(Vec<&'a str>),
}

/// A command line of PHP.
struct Command<'a> {
    /// What the interpreter is started with: these are the template's, too.
    options: Vec<&'a str>,
    program: Program<'a>,
}

impl<'a> Command<'a> {
    fn parse(arguments: &'a [String]) -> Result<Self, Unfit> {
        let mut words = arguments.iter().map(String::as_str).peekable();
        let mut options = Vec::new();
        let (mut address, mut documents) = (None, None);
        while let Some(option) = words.next_if(|word| word.starts_with('-')) {
            if ["-n", "-q"].contains(&option) {
                options.push(option);
                continue;
            }
            let (letter, joined) = option.split_at_checked(2).unwrap_or((option, ""));
            if !["-d", "-S", "-t"].contains(&letter) {
                return Err(Unfit::option(option));
            }
            let value = match joined {
                "" => words.next().ok_or_else(|| Unfit::option(option))?,
                // As php_getopt() has it.
                joined => joined.strip_prefix('=').unwrap_or(joined),
            };
            let before = match letter {
                "-S" => address.replace(value),
                "-t" => documents.replace(value),
                _ => {
                    settings::check(value)?;
                    options.extend(["-d", value]);
                    None
                }
            };
            if before.is_some() {
                return Err(Unfit(format!("its interpreter gets {letter} twice")));
            }
        }
        let program: Vec<_> = words.collect();
        let program = match (address, program.as_slice()) {
            (Some(address), []) => Program::Server { address, documents, router: None },
            (Some(address), [router]) => {
                Program::Server { address, documents, router: Some(*router) }
            }
            (Some(_), _) => {
                return Err(Unfit("its web server gets more than one script".to_owned()));
            }
            (None, _) if documents.is_some() => return Err(Unfit::option("-t")),
            (None, []) => return Err(Unfit::no_program()),
            (None, _) => Program::Script(program),
        };
        Ok(Self { options, program })
    }

    /// What a copy has in the place of each placeholder, of which the one at which the interpreter
    /// is frozen comes first.
    fn replacements(&self, workdir: &str) -> Vec<Replacement> {
        let texts = match &self.program {
            Program::Server { address, documents, router } => {
                let mut texts = vec![documents.map_or_else(|| tidy(workdir), str::to_owned)];
                texts.push((*address).to_owned());
                texts.extend(router.map(str::to_owned));
                texts
            }
            Program::Script(words) => words.iter().map(|&word| word.to_owned()).collect(),
        };
        let placeholder = |number| if number == 0 { start_path() } else { word(number) };
        let numbered = texts.into_iter().enumerate();
        numbered
            .map(|(number, text)| Replacement { placeholder: placeholder(number), text })
            .collect()
    }
}

/// A path without what stands for nothing.
pub(super) fn tidy(path: &str) -> String {
    let parts: Vec<_> = path.split('/').filter(|part| !["", "."].contains(part)).collect();
    format!("/{}", parts.join("/"))
}

impl Language for Php {
    fn name(&self) -> &'static str {
        "php"
    }

    fn bootstrap(&self) -> &'static [BootstrapFile] {
        &[]
    }

    fn usual_modules(&self) -> &'static [&'static str] {
        &[]
    }

    fn is_interpreter(&self, file_name: &str) -> bool {
        is_versioned(file_name, "php")
    }

    fn check(
        &self,
        arguments: &[String],
        environment: &BTreeMap<String, String>,
    ) -> Result<(), Unfit> {
        if let Some(name) = OPTIONS.iter().find(|&&name| environment.contains_key(name)) {
            return Err(Unfit(format!("its environment has {name}")));
        }
        let command = Command::parse(arguments)?;
        let words = command.replacements("/");
        if words.len() > ARGUMENTS_MAX || words.iter().any(|word| word.text.len() > WORD_MAX) {
            let why = format!(
                "it has more than {} arguments, or one of more than {WORD_MAX} bytes",
                ARGUMENTS_MAX - 1
            );
            return Err(Unfit(why));
        }
        if words[0].text.is_empty() {
            return Err(Unfit::no_program());
        }
        check_room(environment)
    }

    fn check_files(
        &self,
        session: &Session,
        workdir: &str,
        files: &Files<'_>,
    ) -> Result<Result<(), Unfit>, StoreError> {
        let runtime = files.runtime.expect("a fitting function has such files");
        // Without a directory of documents, PHP asks for the working directory.
        if workdir.len() > WORD_MAX {
            return Ok(Err(Unfit(format!("its working directory has more than {WORD_MAX} bytes"))));
        }
        settings::check_files(session, files.tree, runtime, workdir)
    }

    /// The end of what extensions are compared with. A build with threads (ZTS) notes the working
    /// directory when it starts.
    fn mark(&self) -> Option<&'static [u8]> {
        Some(b",NTS\0")
    }

    /// What PHP 8.2 and Debian's modules ask for, and some other modules.
    fn reads_variable(&self, name: &str, _loads_packages: bool) -> bool {
        const BEGINNINGS: [&str; 15] = [
            "DD_",
            "GNUTLS_",
            "GOMP_",
            "ICU_",
            "MAGICK_",
            "MIB",
            "OMP_",
            "OPENSSL_",
            "SNMP",
            "SSLEAY_",
            "SSLKEYLOGFILE",
            "USE_",
            "XDEBUG_",
            "XML_",
            "ZEND_",
        ];
        BEGINNINGS.iter().any(|beginning| name.starts_with(beginning))
    }

    fn command(&self, function: &[String], _directory: &str, _modules: &[String]) -> Vec<String> {
        let parsed = Command::parse(&function[1..]).expect("it was checked");
        let mut words = parsed.replacements("/").into_iter().map(|word| word.placeholder);
        let mut command = vec![function[0].clone()];
        command.extend(parsed.options.iter().map(|&option| option.to_owned()));
        if let Program::Server { .. } = parsed.program {
            for option in ["-t", "-S"] {
                command.push(option.to_owned());
                command.extend(words.next());
            }
        }
        command.extend(words);
        command
    }

    /// Makes room for the environment of programs.
    fn load_bootstrap(&self, _directory: &str, environment: &mut BTreeMap<String, String>) {
        environment.extend(room());
    }

    fn replacements(&self, function: &[String], workdir: &str) -> Option<Vec<Replacement>> {
        let parsed = Command::parse(&function[1..]).expect("it was checked");
        Some(parsed.replacements(workdir))
    }

    fn package_directories(&self, _: &str, _: &BTreeMap<String, String>) -> Vec<PathBuf> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    fn check(line: &str) -> Result<(), String> {
        Php.check(&words(line), &BTreeMap::new()).map_err(|Unfit(why)| why)
    }

    fn texts(line: &str) -> Vec<String> {
        let words = words(&format!("php {line}"));
        let replacements = Php.replacements(&words, "/app/").unwrap();
        replacements.into_iter().map(|word| word.text).collect()
    }

    #[test]
    fn a_template_of_the_server_always_has_a_directory() {
        let command = |line: &str| Php.command(&words(line), "/", &[]);
        let (start, address, router) = (start_path(), word(1), word(2));
        let with_router = ["php", "-t", &start, "-S", &address, &router];
        for line in ["php -S 0.0.0.0:80 a.php", "php -t=web -S:80 b.php"] {
            assert_eq!(command(line), with_router, "{line}");
        }
        assert_eq!(command("php -S 0.0.0.0:80"), with_router[..5]);
        let options = command("php8.2 -d a=1 -S [::]:80 -n -db -q");
        assert_eq!(options[..6], ["php8.2", "-d", "a=1", "-n", "-d", "b"]);
        assert_eq!(options[6..], ["-q", "-t", &start, "-S", &address]);
    }

    #[test]
    fn a_copy_has_the_servers_own_words() {
        assert_eq!(texts("-S 0.0.0.0:80 a.php"), ["/app", "0.0.0.0:80", "a.php"]);
        assert_eq!(texts("-t web -S=:80"), ["web", ":80"]);
    }

    #[test]
    fn a_template_of_a_script_has_as_many_arguments() {
        let command = Php.command(&words("php -n app.php -v -- x"), "/", &[]);
        assert_eq!(command, ["php", "-n", &start_path(), &word(1), &word(2), &word(3)]);
        assert_eq!(texts("-n app.php -v -- x"), ["app.php", "-v", "--", "x"]);
    }

    #[test]
    fn commands_that_php_looks_at_first_do_not_fit() {
        for (line, word) in [
            ("-r 1;", "-r"),
            ("-a", "-a"),
            ("-v", "-v"),
            ("-c /app/php.ini app.php", "-c"),
            ("-f app.php", "-f"),
            ("-- app.php", "--"),
            ("--server :80", "--server"),
            ("-nq app.php", "-nq"),
            ("-", "-"),
            ("-n", "no program"),
            ("-S", "-S"),
            ("-t web app.php", "-t"),
            ("-S :80 -S :81", "-S twice"),
            ("-S :80 a.php b.php", "more than one script"),
            ("-d extension=a.so app.php", "setting extension"),
            ("-dopcache.preload=a.php -S :80", "setting opcache.preload"),
        ] {
            assert!(check(line).unwrap_err().contains(word), "{line}");
        }
        let variable = BTreeMap::from([("PHPRC".to_owned(), "/app".to_owned())]);
        let Unfit(why) = Php.check(&words("app.php"), &variable).unwrap_err();
        assert!(why.contains("PHPRC"), "{why}");
    }

    #[test]
    fn more_than_there_is_room_for_does_not_fit() {
        let many = vec!["a"; ARGUMENTS_MAX + 1].join(" ");
        assert!(check(&many).unwrap_err().contains("31 arguments"));
        assert_eq!(check(&many[2..]), Ok(()));
        let long = "a".repeat(WORD_MAX + 1);
        assert!(check(&format!("-S :80 {long}")).unwrap_err().contains("1023 bytes"));
        assert_eq!(check(&long[1..]), Ok(()));
    }

    #[test]
    fn the_directory_of_documents_is_the_working_directory() {
        assert_eq!(tidy("//srv/./web/"), "/srv/web");
    }
}
