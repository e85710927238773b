//! Commands in the sandbox of a build, with the user, the directory and the environment that the
//! steps before have set. What they print goes to the log.

use super::log::{BuildLog, Cutter, Level, Tail};
use super::steps::too_large;
use crate::backend::{Backend, Ended, Output, Piece, WantedProcess};
use crate::problem::Problem;
use crate::records::{Defaults, ENVS_MAX};
use std::sync::Arc;

/// The shell that runs all commands, as that of the SDK's `commands.run` does.
const SHELL: &str = "/bin/bash";
/// Whoever prepares what steps need.
const SUPERUSER: &str = "0";
/// Most bytes of a text that a shell expands.
const EXPANDED_MAX: usize = ENVS_MAX;
/// Most bytes of a user, perhaps with a group: each sandbox of a template keeps it.
const USER_MAX: usize = 256;
/// Most bytes of a working directory (path_resolution(7)).
const DIRECTORY_MAX: usize = 4096;

/// Makes a user that is missing.
const MAKE_USER: &str = include_str!("user.sh");
/// Makes a directory that is missing.
const MAKE_DIRECTORY: &str = include_str!("workdir.sh");

/// Why something of a build was not done: one sentence, perhaps with output behind it.
pub type Why = String;

/// The sandbox of a build, and what its commands begin with.
pub struct Shell {
    /// The sandboxes.
    pub backend: Arc<dyn Backend>,
    /// The sandbox.
    pub id: String,
    /// Where relative paths begin at first.
    pub directory: String,
    /// What the steps have set.
    pub defaults: Defaults,
    /// Where lines go.
    pub log: Arc<BuildLog>,
    /// The step that is done now.
    pub step: String,
}

/// How a command has ended.
pub struct Done {
    /// Its exit code or signal.
    pub ended: Ended,
    /// What it has printed last.
    pub tail: String,
}

impl Shell {
    /// Adds a line to the log.
    pub fn say(&self, text: &str) {
        self.log.add(&self.step, Level::Info, text);
    }

    /// A command of a client.
    pub fn command(&self, command: &str) -> WantedProcess {
        let words = [SHELL, "-l", "-c", command];
        WantedProcess {
            argv: words.map(str::to_owned).into(),
            envs: self.defaults.envs.clone(),
            cwd: self.defaults.directory.clone(),
            user: self.defaults.user.clone(),
            ..WantedProcess::default()
        }
    }

    /// A script of this node, with arguments.
    fn script(&self, script: &str, arguments: &[&str]) -> WantedProcess {
        let words = [SHELL, "-c", script, "thaw"].into_iter().chain(arguments.iter().copied());
        WantedProcess {
            argv: words.map(str::to_owned).collect(),
            envs: self.defaults.envs.clone(),
            // That of a step before may be gone.
            cwd: Some("/".to_owned()),
            user: Some(SUPERUSER.to_owned()),
            ..WantedProcess::default()
        }
    }

    /// Runs a process to its end; each line goes to the log.
    pub async fn run(&self, wanted: WantedProcess) -> Result<Done, Why> {
        let (_, output) = self.backend.start(&self.id, wanted).await.map_err(why)?;
        let mut printed = Printed::new(output);
        loop {
            if let Some(ended) =
                printed.next(|level, line| self.log.add(&self.step, level, line)).await?
            {
                return Ok(Done { ended, tail: printed.tail() });
            }
        }
    }

    /// Runs a command of a client, which is to end with 0.
    pub async fn must(&self, command: &str, wanted: WantedProcess) -> Result<(), Why> {
        let done = self.run(wanted).await?;
        match done.ended {
            Ended::Code(0) => Ok(()),
            ended => Err(failed(command, ended, &done.tail)),
        }
    }

    /// Runs a script of this node; what it prints to standard output is the answer.
    pub async fn ask(&self, script: &str, arguments: &[&str]) -> Result<String, Why> {
        self.answer(self.script(script, arguments)).await
    }

    async fn answer(&self, wanted: WantedProcess) -> Result<String, Why> {
        let (_, mut output) = self.backend.start(&self.id, wanted).await.map_err(why)?;
        let (mut answer, mut errors) = (Vec::new(), Tail::default());
        loop {
            match output.next().await {
                Piece::Stdout(bytes) => answer.extend_from_slice(&bytes),
                Piece::Stderr(bytes) => errors.take(&bytes),
                Piece::Lost(_) => {}
                Piece::Gone => return Err(gone()),
                Piece::End(Ended::Code(0)) => break,
                Piece::End(_) => return Err(errors.text()),
            }
            if answer.len() > EXPANDED_MAX {
                return Err(format!("a text becomes longer than {EXPANDED_MAX} bytes"));
            }
        }
        String::from_utf8(answer).map_err(|_| "a text becomes what is not UTF-8".to_owned())
    }

    /// A text in which `$NAME` and its like mean variables, as in a Dockerfile, and `$(…)` means itself.
    pub async fn expand(&self, text: &str) -> Result<String, Why> {
        if !text.contains('$') {
            return Ok(text.to_owned());
        }
        let mut quoted = text.replace('\\', "\\\\").replace('"', "\\\"").replace('`', "\\`");
        quoted = quoted.replace("$(", "\\$(");
        let user = self.defaults.user.clone().unwrap_or_else(|| SUPERUSER.to_owned());
        let script = format!("printf %s \"{quoted}\"");
        let wanted = WantedProcess { user: Some(user), ..self.script(&script, &[]) };
        let expanded = self.answer(wanted).await;
        expanded.map_err(|why| format!("{text:?} is no text with variables: {why}"))
    }

    /// Sets variables for what follows.
    pub async fn set_envs(&mut self, envs: &[(String, String)]) -> Result<(), Why> {
        for (name, value) in envs {
            let value = self.expand(value).await?;
            self.defaults.envs.insert(name.clone(), value);
        }
        let bytes: usize =
            self.defaults.envs.iter().map(|(name, value)| name.len() + value.len()).sum();
        match bytes > ENVS_MAX {
            true => Err(too_large().message),
            false => Ok(()),
        }
    }

    /// Sets the working directory for what follows, and makes it if it is missing.
    pub async fn set_directory(&mut self, path: &str) -> Result<(), Why> {
        let path = self.absolute(&self.expand(path).await?);
        let made = self.ask(MAKE_DIRECTORY, &[&path, &self.owner().await?]).await;
        let made = made.map_err(|why| format!("cannot make the directory {path}: {why}"))?;
        if made.len() > DIRECTORY_MAX {
            return Err(format!("a working directory has at most {DIRECTORY_MAX} bytes"));
        }
        self.defaults.directory = Some(made.trim_end_matches('\n').to_owned());
        Ok(())
    }

    /// Sets the user for what follows, and makes it if it is missing. Numbers need not be known.
    pub async fn set_user(&mut self, user: &str) -> Result<(), Why> {
        let user = self.expand(user).await?;
        if user.len() > USER_MAX {
            return Err(format!("a user has at most {USER_MAX} bytes, with its group"));
        }
        let name = user.split(':').next().unwrap_or_default();
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_digit()) {
            let made = self.ask(MAKE_USER, &[name]).await;
            made.map_err(|why| format!("cannot make the user {name}: {why}"))?;
        }
        self.defaults.user = Some(user);
        Ok(())
    }

    /// A path as one that begins at the root. A slash at its end stays.
    pub fn absolute(&self, path: &str) -> String {
        let directory = self.defaults.directory.as_ref().unwrap_or(&self.directory);
        match path.starts_with('/') {
            true => path.to_owned(),
            false => format!("{}/{path}", directory.trim_end_matches('/')),
        }
    }

    /// The user of the build as `chown` takes it; without one, that of the function, by numbers.
    pub async fn owner(&self) -> Result<String, Why> {
        match &self.defaults.user {
            Some(user) => Ok(with_group(user)),
            None => {
                let script = self.script("printf %s \"$UID:$GROUPS\"", &[]);
                self.answer(WantedProcess { user: None, ..script }).await
            }
        }
    }
}

/// A user with the group of its entry, as `chown` takes it, unless a group is named.
pub fn with_group(user: &str) -> String {
    let is_number = user.bytes().all(|byte| byte.is_ascii_digit());
    match user.contains(':') || is_number {
        true => user.to_owned(),
        false => format!("{user}:"),
    }
}

/// What a process prints, line by line.
pub struct Printed {
    output: Box<dyn Output>,
    stdout: Cutter,
    stderr: Cutter,
    tail: Tail,
}

impl Printed {
    /// What comes from now on.
    pub fn new(output: Box<dyn Output>) -> Self {
        let (stdout, stderr, tail) = Default::default();
        Self { output, stdout, stderr, tail }
    }

    /// Takes the next piece, and gives its lines; how the process has ended, if it has. May be given
    /// up while it waits.
    pub async fn next(&mut self, mut line: impl FnMut(Level, &str)) -> Result<Option<Ended>, Why> {
        match self.output.next().await {
            Piece::Stdout(bytes) => {
                self.tail.take(&bytes);
                self.stdout.take(&bytes, |text| line(Level::Info, text));
            }
            Piece::Stderr(bytes) => {
                self.tail.take(&bytes);
                self.stderr.take(&bytes, |text| line(Level::Warn, text));
            }
            Piece::Lost(bytes) => line(Level::Warn, &format!("({bytes} bytes are lost)")),
            Piece::Gone => return Err(gone()),
            Piece::End(ended) => {
                self.stdout.finish(|text| line(Level::Info, text));
                self.stderr.finish(|text| line(Level::Warn, text));
                return Ok(Some(ended));
            }
        }
        Ok(None)
    }

    /// What was printed last.
    pub fn tail(&self) -> String {
        self.tail.text()
    }
}

/// The sentence of a problem.
pub fn why(problem: Problem) -> Why {
    problem.message
}

fn gone() -> Why {
    "the sandbox of the build has ended: it had perhaps too little memory (files take memory, too)"
        .to_owned()
}

/// Why a command has failed, with what it has printed last.
pub fn failed(command: &str, ended: Ended, tail: &str) -> Why {
    let how = match ended {
        Ended::Code(code) => format!("exit code {code}"),
        Ended::Signal(signal) => format!("signal {signal}"),
    };
    let mut shown: String = command.chars().take(200).collect();
    if shown.len() < command.len() {
        shown.push('…');
    }
    match tail {
        "" => format!("the command {shown:?} has ended with {how}, and has printed nothing"),
        tail => format!("the command {shown:?} has ended with {how}: {tail}"),
    }
}
