//! `thaw run`: any program in a sandbox, as if it were started directly.

mod advice;
mod denials;
mod held;
mod rights;

use super::download::ProgressLine;
use super::limits::WeakLimitsArgument;
use super::publish::{Publish, Published};
use super::relay::Relay;
use super::{mounts, terminal};
use crate::failure::{Failure, Outcome};
use crate::output::command_line;
use crate::verbs::numbers::count;
use advice::Advice;
use clap::Args;
use denials::Denials;
use libc::{SIGTSTP, SIGWINCH};
use rustix::termios::{isatty, tcgetwinsize};
use std::ffi::OsString;
use std::io::{self, Write};
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;
use thaw_abi::control::{
    FLAG_SAY_DENIALS, FLAG_STDERR_TTY, FLAG_STDIN_TTY, FLAG_STDOUT_TTY, WindowSize,
};
use thaw_build::container::{self, Account, StoredImage};
use thaw_home::config::{ByteSize, Egress, EgressRule, TimeSpan};
use thaw_home::home::Home;
use thaw_home::rootfs::{self, StoredRootfs};
use thaw_node::reactor::watch_sandbox;
use thaw_oci::{Limits, Reference, Settings};
use thaw_sandbox::limits::{self, Controller, Missing, PROCESSES_MAX};
use thaw_sandbox::{
    Console, ConsoleOutput, ConsoleRate, Event, FileRights, FuseAccess, GuestExit, HostPolicy,
    Mount, MountKind, Progress, Rootfs, Sandbox, StartSpec, WeakLimits, ZygoteConfig, ZygoteParent,
};
use thaw_store::Store;
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Run a program in a sandbox.
///
/// Standard input, output and error, signals and the exit code are those of the
/// program; death by signal N is exit code 128+N; 127 if there is no such program, 126 if it cannot
/// be executed. Nothing is left of the sandbox.
///
/// With --name the running daemon holds the sandbox: while the program runs, `thaw exec`, `thaw ps` and
/// `thaw sandbox` work on it by its name. The sandbox and its files end with the program, and when this
/// command ends before it (a second SIGINT, SIGKILL); with --detach with the program alone. Copies (`thaw
/// sandbox fork`) stay. It is made of a container image: the first one of an image and of so much --memory
/// builds a function of it. Directories of this host, --tmpfs and some limits are not for it.
#[derive(Debug, Args)]
#[command(override_usage = "thaw run [OPTIONS] IMAGE [PROGRAM [ARGUMENT]...]\n       \
    thaw run [OPTIONS] --rootfs DIR|NAME -- PROGRAM [ARGUMENT]...")]
#[command(after_help = "Examples:\n  \
    thaw run python:3.12-slim -- python3 -c 'print(\"hello\")'\n  \
    thaw run -it -v .:/work -w /work debian:12 -- bash\n  \
    thaw run -v data:/var/lib/data debian:12 -- ls /var/lib/data\n  \
    thaw run -p 8080:80 nginx\n  \
    thaw run --name web -p 8080:80 nginx\n  \
    thaw run -dit --name box debian:12 -- bash; thaw sandbox attach box\n  \
    thaw run --rootfs / -- python3 -c 'print(\"hello\")'\n  \
    thaw run --rootfs / --allow-egress '*:443' -- curl https://example.com/\n  \
    thaw run --rootfs / --bind .:/work:rw --workdir /work -- make\n  \
    THAW_TRACE=syscalls thaw run --rootfs ./alpine --memory 64MiB -- /bin/busybox ls -l\n\n\
    Environment:\n  \
    THAW_TRACE=syscalls   print every system call of the program to standard error\n  \
    THAW_NO_PATCHING=1    let every system call take the slow door")]
pub struct Arguments {
    /// Root file system: a directory of this host (with a slash in its name),
    /// served read-only, or the name of a stored one.
    ///
    /// Files are opened under your rights, for root under those of `nobody` (see
    /// --as-root). Thaw's own state ($THAW_HOME) and file systems that show the
    /// host's state (such as /proc) look empty.
    #[arg(long, value_name = "DIR|NAME")]
    rootfs: Option<String>,
    /// Mount a directory of this host in the sandbox, read-only; with :rw,
    /// the program's changes are made on this host.
    ///
    /// Files are opened and made under your rights, for root under those of
    /// `nobody` (see --as-root). What belongs to that user appears as the
    /// program's own.
    #[arg(long, value_name = "HOST:GUEST[:rw]")]
    bind: Vec<String>,
    /// Open and change files of this host with all rights that you have, also if
    /// you are root: the program may read what only root may read.
    #[arg(long)]
    as_root: bool,
    /// Let the program see FUSE file systems, which look empty otherwise: the
    /// process behind one may let every access wait, even past SIGKILL.
    #[arg(long)]
    allow_fuse: bool,
    /// Mount an empty file system in memory.
    #[arg(long, value_name = "GUEST")]
    tmpfs: Vec<String>,
    /// Set an environment variable; without =VALUE take it from here.
    #[arg(long, short, value_name = "NAME[=VALUE]")]
    env: Vec<String>,
    /// Mount a volume (`thaw volume`), or a directory of this host, whose name has a slash or is
    /// `.`, to be written; with :ro, read-only. A directory is mounted as by --bind.
    #[arg(long, short, value_name = "NAME|HOST:GUEST[:ro]")]
    volume: Vec<String>,
    /// Pass clients of a port of this host on to a port that the program listens on. They come from
    /// this host only, unless an address is given: 0.0.0.0 lets everybody in.
    #[arg(long, short, value_name = "[ADDRESS:]PORT:PORT")]
    publish: Vec<Publish>,
    /// Working directory in the sandbox [default: that of the image, or /]
    #[arg(long, short, value_name = "DIR")]
    workdir: Option<OsString>,
    /// Host name that the program sees.
    #[arg(long, value_name = "NAME", default_value = HOSTNAME)]
    hostname: OsString,
    /// Most memory that the sandbox may use, such as 256MiB; 0B: no limit [default: 1GiB]
    #[arg(long, value_name = "SIZE")]
    memory: Option<ByteSize>,
    /// Virtual CPUs, and processors' worth of CPU time for all processes together [default:
    /// 1]
    #[arg(long, value_name = "N", value_parser = count::<NonZeroU32>)]
    cpus: Option<NonZeroU32>,
    /// Most processes; each further virtual CPU of a process counts as one [default: 1024]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(PROCESSES_MAX)))]
    processes: Option<u32>,
    /// Most CPU time, such as 30s, of all processes together.
    #[arg(long, value_name = "DURATION")]
    cpu_time: Option<TimeSpan>,
    #[command(flatten)]
    weak_limits: WeakLimitsArgument,
    /// User and group that the program sees itself as; names are those of the image [default: those
    /// of the image, or 0:0]
    #[arg(long, short, value_name = "USER[:GROUP]")]
    user: Option<String>,
    /// Run the program in a sandbox of that name that the daemon holds, so that it can be paused, copied
    /// and reached from outside. It ends with the program, and with this command.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Do not stay with the program: print the sandbox' name, with which `thaw sandbox attach` finds the
    /// program. The sandbox ends with the program.
    #[arg(long, short)]
    detach: bool,
    /// Program to run instead of the image's entry point.
    #[arg(long, value_name = "PROGRAM", requires = "image")]
    entrypoint: Option<String>,
    #[command(flatten)]
    docker: DockerArguments,
    /// Port on which the program serves; needed only to try a function by hand.
    #[arg(long, value_name = "PORT", default_value = "0")]
    port: u16,
    /// Allow connections to a destination, such as api.example.com:443,
    /// private:db.internal:5432 (private addresses, too), 10.0.0.0/8:5432,
    /// 192.0.2.1:53/udp, host.thaw.internal:8000 (this host's loopback) or * (all
    /// public addresses); may be given several times.
    #[arg(long, visible_alias = "egress", value_name = "TARGET:PORTS")]
    allow_egress: Vec<EgressRule>,
    /// A container image: a name that `thaw import` gave, or one of a registry, such as
    /// python:3.12-slim, which is pulled if it is not here.
    #[arg(value_name = "IMAGE")]
    image: Option<String>,
    /// The program and its arguments without `--` before them, as docker(1) takes them behind an image.
    #[arg(num_args = 0.., allow_hyphen_values = true, hide = true)]
    words: Vec<OsString>,
    /// The program and its arguments; for an image, what its entry point gets instead of the
    /// image's arguments.
    #[arg(last = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// What people are used to write. Standard input is always the program's, its terminal is yours if
/// you have one, and nothing of it is left afterwards.
#[derive(Debug, Args)]
struct DockerArguments {
    /// Accepted as by docker(1): standard input is always the program's; with --detach, that of those
    /// who attach.
    #[arg(long, short, hide = true)]
    interactive: bool,
    /// Accepted as by docker(1): a terminal is passed on if there is one; with --name or --detach the
    /// program gets one of the sandbox in any case.
    #[arg(long, short, hide = true)]
    tty: bool,
    /// Accepted as by docker(1): nothing is left of a sandbox.
    #[arg(long, hide = true)]
    rm: bool,
}

/// The host name if nobody has asked for one.
const HOSTNAME: &str = "thaw";
/// Limits that nobody has asked for, which the host need not enforce.
const DEFAULT_MEMORY: ByteSize = ByteSize::mebibytes(1024);
const DEFAULT_PROCESSES: u32 = 1024;

impl Arguments {
    /// The name of the sandbox if the daemon is to hold it; empty: one is made up.
    fn held_name(&self) -> Option<&str> {
        self.name.as_deref().or(self.detach.then_some(""))
    }

    /// Has the program and its arguments in one place, however they were given.
    fn join_words(&mut self) {
        if self.words.is_empty() {
            return;
        }
        // Behind the program `--` is an argument like any other.
        let rest = std::mem::take(&mut self.command);
        let dashes = (!rest.is_empty()).then(|| "--".into());
        let words = std::mem::take(&mut self.words);
        self.command = words.into_iter().chain(dashes).chain(rest).collect();
    }

    /// Refuses what names no files or no program, and says where a program belongs.
    fn check_program(&self) -> Result<(), Failure> {
        let shown = |text: &str| thaw_sandbox::escape(text.as_bytes());
        let words = self.words.iter().map(|word| word.to_string_lossy());
        let words: Vec<_> = words.collect();
        let why = match (&self.image, &self.rootfs) {
            (None, None) => {
                "name a container image, as in `thaw run debian:12 -- ls`, or files of this host, as in \
                 `thaw run --rootfs / -- ls`; see thaw run --help"
                    .to_owned()
            }
            (Some(_), Some(_)) if !self.command.is_empty() => {
                "there is an image or a --rootfs, not both".to_owned()
            }
            // Options of the program could not be told from those of this command.
            (Some(program), Some(rootfs)) => {
                let begin = ["thaw", "run", "--rootfs", rootfs, "--", program];
                let line: Vec<&str> =
                    begin.into_iter().chain(words.iter().map(AsRef::as_ref)).collect();
                format!(
                    "there is an image or a --rootfs, not both; a program has `--` before it, as in `{}`",
                    command_line(&line)
                )
            }
            (None, Some(rootfs)) if self.command.is_empty() => format!(
                "name a program, as in `thaw run --rootfs {} -- ls`; see thaw run --help",
                shown(rootfs)
            ),
            (Some(image), None) if words.first().is_some_and(|word| word.starts_with('-')) => {
                no_option(image, &words[0])
            }
            _ => return Ok(()),
        };
        Err(Failure::misused(why))
    }

    /// Refuses so little memory that no sandbox can do with it.
    fn check_memory(&self) -> Result<(), Failure> {
        match self.memory.filter(|memory| memory.bytes() > 0) {
            Some(memory) => memory.check_memory().map_err(Failure::misused),
            None => Ok(()),
        }
    }

    /// The limits that were asked for, each by what enforces it and its option.
    fn asked_limits(&self) -> Vec<(Controller, &'static str)> {
        // No limit needs no control group.
        let memory = self.memory.is_some_and(|memory| memory.bytes() > 0);
        [
            (memory, Controller::Memory, "--memory"),
            (self.cpus.is_some(), Controller::Cpu, "--cpus"),
            (self.processes.is_some(), Controller::Pids, "--processes"),
            (self.cpu_time.is_some(), Controller::CpuAccounting, "--cpu-time"),
        ]
        .into_iter()
        .filter_map(|(asked, controller, option)| asked.then_some((controller, option)))
        .collect()
    }
}

/// What to write instead of a word behind an image that looks like an option.
fn no_option(image: &str, word: &str) -> String {
    /// Short options with a value.
    const WITH_VALUE: [char; 5] = ['e', 'v', 'p', 'w', 'u'];
    if let Some((name, value)) = word.strip_prefix('-').and_then(|rest| rest.split_at_checked(1))
        && WITH_VALUE.iter().any(|known| name.starts_with(*known))
        && !value.is_empty()
    {
        let (word, split) = (command_line(&[word]), command_line(&[&format!("-{name}"), value]));
        return format!("put `{word}` before the image, or write `{split}`");
    }
    format!(
        "`{}` is no option and no program; see thaw run --help. To pass it to the image's entry point: `{}`",
        thaw_sandbox::escape(word.as_bytes()),
        command_line(&["thaw", "run", image, "--", word])
    )
}

/// Refuses limits that were asked for and that the host does not enforce, unless the
/// user accepts that. Of others it says so.
fn check_limits(
    asked: &[(Controller, &'static str)],
    missing: &[Missing],
    accepted: WeakLimits,
) -> Result<(), Failure> {
    if missing.is_empty() || accepted == WeakLimits::Accept {
        return Ok(());
    }
    for Missing { controller, reason } in missing {
        if let Some((_, option)) = asked.iter().find(|(asked, _)| asked == controller) {
            return Err(Failure::failed(format!(
                "this host does not enforce {option} ({reason}); {}, or accept a weaker limit with \
                 --weak-limits",
                limits::way_out()
            )));
        }
    }
    let (limits, _) = limits::describe(missing);
    eprintln!(
        "thaw: this host does not enforce the default limits of {limits} for you; `thaw doctor` \
         says why, --weak-limits goes on without this line"
    );
    Ok(())
}

pub fn run(mut arguments: Arguments) -> Outcome {
    arguments.check_memory()?;
    arguments.check_program()?;
    arguments.join_words();
    if let Some(name) = arguments.held_name() {
        return held::run(&arguments, name);
    }
    let mut relay = Relay::default();
    let outcome = run_with(arguments, &mut relay);
    let written = relay.finish();
    let code = outcome?;
    written.map(|()| code).map_err(|error| {
        Failure::failed(format!("what the program wrote could not be written to its file: {error}"))
    })
}

fn run_with(arguments: Arguments, relay: &mut Relay) -> Outcome {
    let asked_limits = arguments.asked_limits();
    let policy = host_policy(&arguments);
    let Program { rootfs, argv, env, cwd, account } = program(&arguments, &policy)?;
    let advice = Advice::of(&arguments, &argv, &env, &cwd);
    let stdio = [io::stdin().as_fd(), io::stdout().as_fd(), io::stderr().as_fd()]
        .map(|fd| fd.try_clone_to_owned());
    let mounts = mounts(&arguments, &policy)?;
    let [stdin, stdout, stderr] = stdio;
    let mut stdio = [stdin?, stdout?, stderr?];
    if mounts.iter().any(|mount| matches!(mount.kind, MountKind::Volume(_))) {
        let [stdin, stdout, stderr] = stdio;
        stdio = [stdin, relay.of(stdout)?, relay.of(stderr)?];
    }
    let stdio = [stdio[0].as_fd(), stdio[1].as_fd(), stdio[2].as_fd()];
    let spec = StartSpec {
        program: None,
        argv,
        env,
        cwd,
        hostname: arguments.hostname.clone(),
        uid: account.uid,
        gid: account.gid,
        port: arguments.port,
        entry_signal: 0,
        cpus: arguments.cpus.map_or(1, NonZeroU32::get),
        memory_limit: arguments.memory.unwrap_or(DEFAULT_MEMORY).bytes(),
        process_limit: arguments.processes.unwrap_or(DEFAULT_PROCESSES),
        cpu_time_limit: arguments.cpu_time.map(|span| span.0),
        flags: flags(stdio),
        rootfs,
        egress: Egress { allow: arguments.allow_egress.clone(), ..Egress::default() }.policy(),
        mounts,
        stdio,
        window: window(stdio),
    };
    let _terminal = terminal::restore_at_the_end(stdio)?;
    let console = Console::lines(thaw_home::debug::console_rate(), print_console)?;
    let parent = ZygoteParent::start(ZygoteConfig {
        // Limits that nobody has asked for may be weak, and are judged below.
        weak_limits: WeakLimits::Accept,
        ..ZygoteConfig::for_few(thaw_home::debug::kernel()?, console.clone())
    })?;
    check_limits(&asked_limits, parent.missing_controllers(), arguments.weak_limits.chosen())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // Signals that arrive from here on are the program's.
        let mut signals = Signals::listen()?;
        let published = Published::open(&arguments.publish)?;
        let outcome = match parent.create() {
            Ok(zygote) => {
                let sandbox = zygote.start(&spec)?;
                sandbox.enable_oom_killer(spec.limits());
                attend(sandbox, &mut signals, published, &advice).await
            }
            Err(error) => Err(error.into()),
        };
        last_words(&console, &mut signals).await;
        outcome
    })
}

/// What is started, and over which files.
struct Program {
    rootfs: Rootfs,
    argv: Vec<OsString>,
    env: Vec<OsString>,
    cwd: OsString,
    account: Account,
}

fn program(arguments: &Arguments, policy: &HostPolicy) -> Result<Program, Failure> {
    let Some(image) = &arguments.image else {
        let rootfs = arguments.rootfs.as_deref().expect("one of them is given");
        return Ok(Program {
            rootfs: rootfs::open(rootfs, policy, Home::from_environment)?,
            argv: arguments.command.clone(),
            env: environment(&[], &arguments.env),
            cwd: arguments.workdir.clone().unwrap_or_else(|| "/".into()),
            account: numbers(arguments.user.as_deref().unwrap_or("0:0"))?,
        });
    };
    let home = Home::from_environment()?;
    let store = Store::open(&home.store())?;
    let StoredImage { index, settings, .. } = match container::find(&store, image)? {
        Some(found) => found,
        None => pull(&home, &store, image)?,
    };
    let stored = StoredRootfs::open(&store, index)?;
    let user = arguments.user.as_ref().unwrap_or(&settings.user);
    let account = container::account(&stored, user)?;
    let home_directory = account.home.iter().map(|home| format!("HOME={home}"));
    // One without a value would be taken from here, where it is none of the image's business.
    let set = settings.env.iter().filter(|variable| variable.contains('='));
    let of_image: Vec<String> = home_directory.chain(set.cloned()).collect();
    let workdir = Some(settings.workdir.as_str()).filter(|workdir| !workdir.is_empty());
    let cwd = arguments.workdir.clone().or_else(|| workdir.map(Into::into));
    Ok(Program {
        rootfs: stored.rootfs(),
        argv: image_command(arguments, &settings, image)?,
        env: environment(&of_image, &arguments.env),
        cwd: cwd.unwrap_or_else(|| "/".into()),
        account,
    })
}

/// Pulls an image that is not in the store.
fn pull(home: &Home, store: &Store, image: &str) -> Result<StoredImage, Failure> {
    let hint = program_hint(image);
    let reference: Reference = image.parse().map_err(|error| {
        Failure::failed(format!("there is no image `{image}` in the store, and {error}{hint}"))
    })?;
    eprintln!("thaw: pulling {reference}");
    let mut line = ProgressLine::new();
    let show = &mut |progress| line.show(&progress);
    let name = reference.store_name();
    let pulled = container::pull(home, store, &reference, &name, Limits::default(), show);
    line.finish();
    Ok(pulled.map_err(|error| Failure::failed(format!("{error}{hint}")))?.0)
}

/// What to do if a program of this host was named in the place of an image.
fn program_hint(image: &str) -> String {
    let program = match image.contains('/') {
        // The working directory is another one in the sandbox.
        true => std::path::absolute(image).ok().filter(|path| path.is_file()),
        false => std::env::var_os("PATH").and_then(|path| {
            let is_there = |directory: PathBuf| directory.join(image).is_file();
            std::env::split_paths(&path).any(is_there).then(|| image.into())
        }),
    };
    program.map_or_else(String::new, |program| {
        let line = ["thaw", "run", "--rootfs", "/", "--", &program.to_string_lossy()];
        format!("; to run the program of this host: `{} …`", command_line(&line))
    })
}

/// The entry point and its arguments.
fn image_command(
    arguments: &Arguments,
    settings: &Settings,
    image: &str,
) -> Result<Vec<OsString>, Failure> {
    let entrypoint = match &arguments.entrypoint {
        Some(program) => std::slice::from_ref(program),
        None => &settings.entrypoint,
    };
    // The image's arguments are for its own entry point.
    let has_own = !arguments.command.is_empty() || arguments.entrypoint.is_some();
    let image_arguments = if has_own { &[][..] } else { &settings.command };
    let parts = entrypoint.iter().chain(image_arguments).map(OsString::from);
    let command: Vec<OsString> = parts.chain(arguments.command.iter().cloned()).collect();
    if command.is_empty() {
        let advice = format!("give one, as in `thaw run {image} -- /bin/sh`");
        return Err(Failure::misused(format!("image {image} names no program; {advice}")));
    }
    Ok(command)
}

/// A user and a group by number, where there is no image that could name them.
fn numbers(text: &str) -> Result<Account, Failure> {
    let (uid, gid) = text.split_once(':').unwrap_or((text, text));
    match (uid.parse(), gid.parse()) {
        (Ok(uid), Ok(gid)) => Ok(Account { uid, gid, home: None }),
        _ => Err(Failure::misused(format!("--user {text}: give numbers, as in 1000 or 1000:1000"))),
    }
}

/// What is mounted. What `--volume` names may be written unless it says otherwise.
fn mounts(arguments: &Arguments, policy: &HostPolicy) -> Result<Vec<Mount>, Failure> {
    let volumes = arguments.volume.iter().map(|text| mounts::writable(text));
    let (volumes, binds): (Vec<String>, Vec<String>) =
        volumes.partition(|text| mounts::names_volume(text));
    let binds: Vec<String> = arguments.bind.iter().cloned().chain(binds).collect();
    let mut all = mounts::open(&binds, &[], policy)?;
    all.extend(mounts::open_volumes(&volumes, Home::from_environment)?);
    all.extend(mounts::open(&[], &arguments.tmpfs, policy)?);
    Ok(all)
}

/// How directories of this host are served.
fn host_policy(arguments: &Arguments) -> HostPolicy {
    HostPolicy {
        rights: match arguments.as_root {
            true => FileRights::Caller,
            false => FileRights::Unprivileged,
        },
        fuse: match arguments.allow_fuse {
            true => FuseAccess::Seen,
            false => FuseAccess::Hidden,
        },
        hidden: Home::candidates(),
        ..HostPolicy::default()
    }
}

/// Prints what comes from the console of the sandbox: a trace as it is, the kernel's
/// last words with a word on whose they are.
fn print_console(output: &ConsoleOutput<'_>) {
    let trace = thaw_home::debug::console_rate() == ConsoleRate::Lossless;
    // Without a standard error there is nobody to tell.
    let _ = match output {
        ConsoleOutput::Line { text, .. } if trace => writeln!(io::stderr(), "{text}"),
        output => writeln!(io::stderr(), "thaw: {output}"),
    };
}

/// Waits until what the ended sandbox wrote on its console is printed, or the user
/// has enough of it.
async fn last_words(console: &Console, signals: &mut Signals) {
    const LOOK: Duration = Duration::from_millis(50);
    while !console.wait_ended(LOOK) {
        let signal = tokio::time::timeout(Duration::from_millis(1), signals.next()).await;
        if matches!(signal, Ok(number) if number != SIGWINCH) {
            return;
        }
    }
}

/// Serves the sandbox and passes signals on until the program has ended.
async fn attend(
    sandbox: Sandbox,
    signals: &mut Signals,
    mut published: Published,
    advice: &Advice,
) -> Outcome {
    let mut sandbox = watch_sandbox(sandbox)?;
    let (mut exit, mut failed, mut denials) = (None, None, Denials::default());
    loop {
        let progress = sandbox.get_mut().poll_event();
        match progress {
            Progress::Event(Event::Exit(guest)) => exit = Some(guest),
            Progress::Event(Event::Failed(reason)) => {
                failed = Some(format!("the program could not be started: {}", advice.on(&reason)));
            }
            Progress::Event(Event::Violation(violation)) => {
                return Err(Failure::failed(format!("the sandbox was ended because {violation}")));
            }
            Progress::Event(Event::Hangup) => break,
            Progress::Event(Event::Denied(events)) => denials.add(events),
            Progress::Event(Event::OomKilled(killed)) => {
                let _ = writeln!(io::stderr(), "thaw: {killed}; see --memory");
            }
            // Without FLAG_FREEZE_AT_ENTRY nothing waits for an answer.
            Progress::Event(
                Event::Prepared
                | Event::Booted(_)
                | Event::EntryPoint(_)
                | Event::Resting(_)
                | Event::Hibernated
                | Event::Unseal
                | Event::Awake(_)
                | Event::Described(_)
                | Event::Activity(_)
                | Event::Losses(_)
                | Event::Written(_)
                | Event::Lacks(_)
                | Event::Remote(_)
                | Event::ConnectionClosed { .. },
            ) => {}
            Progress::Busy => tokio::task::yield_now().await,
            Progress::Idle => wait(&mut sandbox, signals, &mut published).await?,
        }
    }
    denials.add(sandbox.get_ref().take_egress_events());
    if let Some(told) = denials.told() {
        // Standard output is the program's alone. Without a standard error there is nobody to tell.
        let _ = writeln!(io::stderr(), "thaw: {told}");
    }
    if let Some(reason) = failed {
        return Err(match exit {
            Some(GuestExit::Code(code)) if code != 0 => Failure::NotRun(reason, code),
            _ => Failure::failed(reason),
        });
    }
    // Version 1 of control groups kills one process of several, and the program that
    // waits for it may say something else.
    let is_success = matches!(exit, Some(GuestExit::Code(0)));
    if let Some(limit) = sandbox.get_ref().limit_reached().filter(|_| !is_success) {
        eprintln!("thaw: the sandbox was ended because {limit}; see --memory and --cpu-time");
        return Ok(ExitCode::from(128 + libc::SIGKILL as u8));
    }
    match exit {
        Some(GuestExit::Code(code)) => {
            if let Some(note) = advice.on_failure().filter(|_| code != 0) {
                let _ = writeln!(io::stderr(), "thaw: note: {note}");
            }
            Ok(ExitCode::from(code))
        }
        Some(GuestExit::Signal(signal)) => Ok(ExitCode::from(128 + signal)),
        None => died(sandbox.get_ref().wait()),
    }
}

/// Waits until the sandbox has something to say, passing signals on meanwhile.
async fn wait(
    sandbox: &mut AsyncFd<Sandbox>,
    signals: &mut Signals,
    published: &mut Published,
) -> io::Result<()> {
    let wants_write = sandbox.get_ref().wants_write();
    tokio::select! {
        ready = sandbox.readable() => ready?.clear_ready(),
        ready = sandbox.writable(), if wants_write => ready?.clear_ready(),
        wanted = published.wanted() => ignore_end(published.serve(sandbox.get_ref(), wanted))?,
        number = signals.next() => {
            let sandbox = sandbox.get_mut();
            let terminal = window([io::stdin().as_fd(), io::stdout().as_fd(), io::stderr().as_fd()]);
            match (number, terminal) {
                // The signal to the program comes with it.
                (SIGWINCH, Some(size)) => ignore_end(sandbox.send_window_size(size))?,
                _ => ignore_end(sandbox.send_signal(number as u32))?,
            }
        }
    }
    Ok(())
}

/// The sandbox may end while a signal is on its way to it.
fn ignore_end(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::BrokenPipe
                    | io::ErrorKind::ConnectionReset
                    | io::ErrorKind::NotConnected
            ) =>
        {
            Ok(())
        }
        other => other,
    }
}

/// The sandbox's process has ended and the program did not say how.
fn died(status: ExitStatus) -> Outcome {
    match status.signal() {
        Some(signal) => {
            let why = match signal {
                libc::SIGKILL => " (somebody or the host killed it)",
                libc::SIGSYS => " (it made a host system call that its filter forbids)",
                _ => "",
            };
            eprintln!("thaw: the sandbox was ended by signal {signal}{why}");
            Ok(ExitCode::from(128 + signal as u8))
        }
        None => Err(Failure::failed(format!(
            "the sandbox ended without a word ({status}); look for a panic of its kernel above"
        ))),
    }
}

/// The signals that are passed on to the program.
struct Signals {
    all: Vec<(i32, Signal)>,
}

impl Signals {
    fn listen() -> io::Result<Self> {
        let kinds = [
            SignalKind::interrupt(),
            SignalKind::terminate(),
            SignalKind::hangup(),
            SignalKind::quit(),
            SignalKind::user_defined1(),
            SignalKind::user_defined2(),
            SignalKind::window_change(),
        ];
        // Ctrl-Z stops the program that a shell in the sandbox runs, not the
        // sandbox: only then is there somebody to continue it.
        let stop = isatty(io::stdin()).then(|| SignalKind::from_raw(SIGTSTP));
        let listen = |kind: SignalKind| Ok((kind.as_raw_value(), signal(kind)?));
        Ok(Self { all: kinds.into_iter().chain(stop).map(listen).collect::<io::Result<_>>()? })
    }

    /// The number of the next signal.
    async fn next(&mut self) -> i32 {
        std::future::poll_fn(|context| {
            for (number, signal) in &mut self.all {
                if signal.poll_recv(context).is_ready() {
                    return std::task::Poll::Ready(*number);
                }
            }
            std::task::Poll::Pending
        })
        .await
    }
}

/// The program's environment: a minimal one, then what the image says, then what the user adds.
fn environment(of_image: &[String], additions: &[String]) -> Vec<OsString> {
    let term = std::env::var_os("TERM").unwrap_or_else(|| "dumb".into());
    let mut variables: Vec<(OsString, OsString)> = vec![
        ("PATH".into(), thaw_build::DEFAULT_PATH.into()),
        ("HOME".into(), "/root".into()),
        ("TERM".into(), term),
        ("LANG".into(), "C.UTF-8".into()),
    ];
    for addition in of_image.iter().chain(additions) {
        let (name, value) = match addition.split_once('=') {
            Some((name, value)) => (name, Some(value.into())),
            None => (addition.as_str(), std::env::var_os(addition)),
        };
        variables.retain(|(known, _)| known != name);
        if let Some(value) = value {
            variables.push((name.into(), value));
        }
    }
    let join = |(name, value): (OsString, OsString)| {
        let mut text = name;
        text.push("=");
        text.push(value);
        text
    };
    variables.into_iter().map(join).collect()
}

fn flags(stdio: [BorrowedFd<'_>; 3]) -> u32 {
    let tty = [FLAG_STDIN_TTY, FLAG_STDOUT_TTY, FLAG_STDERR_TTY];
    let ttys = stdio.iter().zip(tty).filter(|(fd, _)| isatty(fd)).fold(0, |all, (_, f)| all | f);
    ttys | FLAG_SAY_DENIALS | thaw_home::debug::flags()
}

fn window(stdio: [BorrowedFd<'_>; 3]) -> Option<WindowSize> {
    let size = stdio.iter().find_map(|fd| tcgetwinsize(fd).ok())?;
    Some(WindowSize { rows: size.ws_row, columns: size.ws_col, reserved: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn behind_an_image_a_program_needs_no_dashes() {
        let command = |line: &str| {
            let words = ["run"].into_iter().chain(line.split(' '));
            let mut arguments = <Line as clap::Parser>::try_parse_from(words).unwrap().arguments;
            arguments.check_program().map_err(|failure| failure.message().unwrap().to_owned())?;
            arguments.join_words();
            let words = arguments.command.iter().map(|word| word.to_str().unwrap());
            Ok::<_, String>((arguments.image.clone(), words.collect::<Vec<_>>().join(" ")))
        };
        let of_image = |words: &str| Ok((Some("debian:12".to_owned()), words.to_owned()));
        for (line, program) in [
            ("debian:12", ""),
            ("-it debian:12 bash", "bash"),
            ("debian:12 python3 -u 1 --memory x", "python3 -u 1 --memory x"),
            ("debian:12 -- ls -l", "ls -l"),
            ("debian:12 --memory 1GiB -- ls -l", "ls -l"),
            ("debian:12 sh -c x -- y", "sh -c x -- y"),
        ] {
            assert_eq!(command(line), of_image(program), "{line}");
        }
        assert_eq!(command("--rootfs / -- ls -l -- x"), Ok((None, "ls -l -- x".to_owned())));
        for (line, why) in [
            ("--rootfs / ls", "`thaw run --rootfs / -- ls`"),
            ("--rootfs / sh -c a&&rm *", "`thaw run --rootfs / -- sh -c 'a&&rm' '*'`"),
            ("nginx -p8080:80", "put `-p8080:80` before the image, or write `-p 8080:80`"),
            ("curl -sS", "`thaw run curl -- -sS`"),
            ("--rootfs /", "name a program"),
            ("debian:12 --memry 1GiB -- ls", "`--memry` is no option and no program"),
            ("-- ls", "name a container image"),
            ("--rootfs / debian:12 -- ls", "not both"),
        ] {
            let said = command(line).unwrap_err();
            assert!(said.contains(why), "{line}: {said}");
        }
    }

    #[test]
    fn users_are_numbers() {
        let ids = |text| numbers(text).map(|account| (account.uid, account.gid));
        assert_eq!((ids("5"), ids("5:6")), (Ok((5, 5)), Ok((5, 6))));
        assert!(ids("root").is_err());
    }

    #[test]
    fn added_variables_replace_the_usual_ones() {
        let environment = environment(
            &["HOME=/y".into(), "OF=image".into()],
            &["HOME=/x".into(), "A=b=c".into(), "THAW_TEST_UNSET".into()],
        );
        assert!(environment.contains(&"HOME=/x".into()));
        assert!(!environment.contains(&"HOME=/root".into()));
        assert!(environment.contains(&"A=b=c".into()) && environment.contains(&"OF=image".into()));
        assert!(!environment.iter().any(|v| v.to_string_lossy().contains("THAW_TEST_UNSET")));
    }
}
