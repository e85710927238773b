//! OpenJDK, 17 and later. `java/thaw_template/Bootstrap.java` is the bootstrap; `scripts/java-classes template`
//! compiles it.

use super::fit::Unfit;
use super::language::{BootstrapFile, Language};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Bytes of the longest name of a main class, and of the longest argument.
const WORD_MAX: usize = 1024;
/// Most arguments of a program. There is a template for each number of them.
const ARGUMENTS_MAX: usize = 32;
/// How many variables, and of how many bytes each on average, an environment has at most.
const VARIABLES_MAX: usize = 256;
const VARIABLE_BYTES: usize = 128;
/// Variables from which the launcher or the virtual machine takes more options.
const OPTIONS: [&str; 3] = ["JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS"];
/// Options with the class path as their value.
const CLASS_PATH: [&str; 3] = ["-cp", "-classpath", "--class-path"];
/// Options that may have a value in the next word, `WITH_VALUE` of the bootstrap.
const WITH_VALUE: [&str; 5] =
    ["--add-modules", "--add-exports", "--add-opens", "--add-reads", "--enable-native-access"];
/// Beginnings of the other options that a template may be started with.
const ALLOWED: [&str; 13] = [
    "-D",
    "-XX:",
    "-Xm",
    "-Xs",
    "-Xint",
    "-Xcomp",
    "-Xnoclassgc",
    "-ea",
    "-esa",
    "-da",
    "-dsa",
    "-enable",
    "-disable",
];
/// Beginnings of those that bring other code, say where files are looked for, or print.
const REFUSED: [&str; 19] = [
    "-Djava.class.path",
    "-Djava.nio.file.spi.DefaultFileSystemProvider",
    "-Djava.security.manager",
    "-Djava.system.class.loader",
    "-Duser.dir",
    "-XX:+Log",
    "-XX:+Print",
    "-XX:AOT",
    "-XX:ArchiveClassesAtExit",
    "-XX:CRaC",
    "-XX:CompileCommandFile",
    "-XX:CompilerDirectivesFile",
    "-XX:DumpLoadedClassList",
    "-XX:Flags",
    "-XX:LogFile",
    "-XX:ReplayDataFile",
    "-XX:SharedArchiveFile",
    "-XX:StartFlightRecording",
    "-XX:VMOptionsFile",
];
/// Those that name files which the virtual machine writes later.
const LATER: [&str; 4] = ["-XX:ErrorFile=", "-XX:HeapDumpPath=", "-XX:OnError=", "-XX:OnOutOf"];

pub(super) struct Java;

/// A command line of Java, as far as templates have to know it.
struct Command<'a> {
    /// What the virtual machine is started with, without a class path.
    options: Vec<&'a str>,
    /// The archive or the main class, with its arguments.
    program: Vec<&'a str>,
}

impl<'a> Command<'a> {
    fn parse(arguments: &'a [String]) -> Result<Self, Unfit> {
        let mut words = arguments.iter().map(String::as_str);
        let mut options = Vec::new();
        loop {
            let word = words.next().ok_or_else(Unfit::no_program)?;
            let mut value = None;
            if CLASS_PATH.contains(&word) {
                value = words.next();
            } else if WITH_VALUE.contains(&word) {
                value = words.next();
                options.push(word);
                options.extend(value);
            } else if may_start_template(word) {
                options.push(word);
            } else if !word.starts_with('-') {
                // Files of options, and of source code.
                if word.starts_with('@') || word.ends_with(".java") {
                    return Err(Unfit::option(word));
                }
                let program = [word].into_iter().chain(words).collect();
                return Ok(Self { options, program });
            } else if word != "-jar" && !word.starts_with("--class-path=") {
                return Err(Unfit::option(word));
            }
            if let Some(file) = value.filter(|value| value.starts_with('@')) {
                return Err(Unfit::option(file));
            }
        }
    }
}

fn may_start_template(option: &str) -> bool {
    let begins = |beginnings: &[&str]| beginnings.iter().any(|it| option.starts_with(it));
    let has_value = WITH_VALUE
        .iter()
        .any(|it| option.strip_prefix(it).is_some_and(|rest| rest.starts_with('=')));
    let names_file = option.starts_with("-XX:") && option.contains('/') && !begins(&LATER);
    has_value || begins(&ALLOWED) && !begins(&REFUSED) && !names_file
}

/// A word that is like no other, in the place of the main class or of an argument.
fn placeholder(number: usize) -> String {
    format!("{:-<WORD_MAX$}", format!("thaw-template-{number}-"))
}

impl Language for Java {
    fn name(&self) -> &'static str {
        "java"
    }

    fn bootstrap(&self) -> &'static [BootstrapFile] {
        macro_rules! class {
            ($name:literal) => {
                (
                    concat!("thaw_template/", $name),
                    include_bytes!(concat!("java/thaw_template/", $name)),
                )
            };
        }
        &[
            class!("Bootstrap.class"),
            class!("Bootstrap$Environment.class"),
            class!("Bootstrap$Fields.class"),
            class!("Bootstrap$Launcher.class"),
            class!("Bootstrap$Program.class"),
            class!("Bootstrap$Words.class"),
        ]
    }

    /// They are in the bootstrap.
    fn usual_modules(&self) -> &'static [&'static str] {
        &[]
    }

    fn is_interpreter(&self, file_name: &str) -> bool {
        file_name == "java"
    }

    fn check(
        &self,
        arguments: &[String],
        environment: &BTreeMap<String, String>,
    ) -> Result<(), Unfit> {
        if let Some(name) = OPTIONS.iter().find(|&&name| environment.contains_key(name)) {
            return Err(Unfit(format!("its environment has {name}")));
        }
        let program = Command::parse(arguments)?.program;
        if program.len() > ARGUMENTS_MAX || program.iter().any(|word| word.len() > WORD_MAX) {
            let why = format!(
                "it has more than {} arguments, or one of more than {WORD_MAX} bytes",
                ARGUMENTS_MAX - 1
            );
            return Err(Unfit(why));
        }
        let bytes: usize =
            environment.iter().map(|(name, value)| name.len() + value.len() + 2).sum();
        if environment.len() > VARIABLES_MAX || bytes > VARIABLES_MAX * VARIABLE_BYTES {
            let why = format!(
                "its environment has more than {VARIABLES_MAX} variables, or more than {} bytes",
                VARIABLES_MAX * VARIABLE_BYTES
            );
            return Err(Unfit(why));
        }
        Ok(())
    }

    fn reads_variable(&self, name: &str, _loads_packages: bool) -> bool {
        name.starts_with("_JAVA_")
    }

    /// The launcher has looked at the number of arguments before the template is frozen. It asks
    /// for a main class, also where an archive names it.
    fn command(&self, function: &[String], directory: &str, _modules: &[String]) -> Vec<String> {
        let parsed = Command::parse(&function[1..]).expect("it was checked");
        let mut command = vec![function[0].clone()];
        command.extend(parsed.options.into_iter().map(str::to_owned));
        command.push("-Djava.system.class.loader=thaw_template.Bootstrap".to_owned());
        command.extend(["-cp".to_owned(), directory.to_owned()]);
        command.extend((0..parsed.program.len()).map(placeholder));
        command
    }

    /// Makes room for the environment of programs.
    fn load_bootstrap(&self, _directory: &str, environment: &mut BTreeMap<String, String>) {
        environment.extend(
            (0..VARIABLES_MAX)
                .map(|number| (format!("THAW_TEMPLATE_{number:03}"), "-".repeat(VARIABLE_BYTES))),
        );
    }

    fn package_directories(&self, _: &str, _: &BTreeMap<String, String>) -> Vec<PathBuf> {
        Vec::new()
    }

    /// The virtual machine chooses the sizes of its heap and the numbers of its threads by them.
    fn starts_by_limits(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::java_classes::compiled;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    fn check(line: &str, environment: &[(&str, &str)]) -> Result<(), String> {
        let environment =
            environment.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        Java.check(&words(line), &environment).map_err(|Unfit(why)| why)
    }

    #[test]
    fn a_template_is_started_with_the_options_and_as_many_arguments() {
        let line = "java -Xmx64m -cp a.jar:b.jar -Da=b --add-opens java.base/java.lang=ALL-UNNAMED Main x y";
        let command = Java.command(&words(line), "/", &[]);
        let options = "java -Xmx64m -Da=b --add-opens java.base/java.lang=ALL-UNNAMED \
             -Djava.system.class.loader=thaw_template.Bootstrap -cp /";
        let options = words(options);
        assert_eq!(command[..options.len()], options);
        assert_eq!(command.len(), options.len() + 3);
        assert!(command[options.len()..].iter().all(|word| word.len() == WORD_MAX));
        let archive = Java.command(&words("java -jar -ea app.jar x y"), "/", &[]);
        assert_eq!(archive[..2], ["java", "-ea"]);
        assert_eq!(archive.len(), 5 + 3);
    }

    #[test]
    fn commands_that_java_looks_at_first_do_not_fit() {
        for line in ["-jar app.jar", "-cp . a.Main -x", "-XX:+UseSerialGC --class-path=a -ea Main"]
        {
            check(line, &[("CLASSPATH", "a.jar")]).unwrap();
        }
        for (line, word) in [
            ("-cp a", "no program"),
            ("-jar", "no program"),
            ("-javaagent:a.jar Main", "-javaagent"),
            ("-m a/b.Main", "-m"),
            ("-XX:SharedArchiveFile=a Main", "-XX:Shared"),
            ("-Djava.system.class.loader=A Main", "-Djava.system"),
            ("-Duser.dir=/tmp Main", "-Duser.dir"),
            ("-XX:CompileCommandFile=a Main", "-XX:CompileCommandFile"),
            ("-XX:AllocateHeapAt=/mnt Main", "-XX:AllocateHeapAt"),
            ("-cp @path Main", "@path"),
            ("--add-opens @opens Main", "@opens"),
            ("-jar @archive", "@archive"),
            ("@options Main", "@options"),
            ("Main.java", "Main.java"),
        ] {
            assert!(check(line, &[]).unwrap_err().contains(word), "{line}");
        }
        assert!(check("Main", &[("_JAVA_OPTIONS", "")]).unwrap_err().contains("_JAVA_OPTIONS"));
    }

    #[test]
    fn more_than_there_is_room_for_does_not_fit() {
        let many = vec!["a"; ARGUMENTS_MAX + 1].join(" ");
        assert!(check(&many, &[]).unwrap_err().contains("31 arguments"));
        assert!(check(&many[2..], &[]).is_ok());
        let long = "a".repeat(WORD_MAX + 1);
        assert!(check(&long, &[]).unwrap_err().contains("1024 bytes"));
        assert!(check(&long[1..], &[]).is_ok());
        let names: Vec<String> = (0..=VARIABLES_MAX).map(|number| number.to_string()).collect();
        let variables: Vec<_> = names.iter().map(|name| (name.as_str(), "")).collect();
        assert!(check("Main", &variables).unwrap_err().contains("256 variables"));
        assert!(check("Main", &variables[1..]).is_ok());
        let value = "a".repeat(VARIABLES_MAX * VARIABLE_BYTES - 3);
        assert!(check("Main", &[("ab", &value)]).unwrap_err().contains("32768 bytes"));
        assert!(check("Main", &[("a", &value)]).is_ok());
    }

    #[test]
    fn the_classes_are_those_of_the_source() {
        let Some(directory) = compiled("template") else { return };
        let made = std::fs::read_dir(directory.path().join("thaw_template")).unwrap().count();
        assert_eq!(made, Java.bootstrap().len());
        for (path, bytes) in Java.bootstrap() {
            let made = std::fs::read(directory.path().join(path)).unwrap();
            assert!(made == *bytes, "run scripts/java-classes template and commit what it writes");
        }
    }
}
