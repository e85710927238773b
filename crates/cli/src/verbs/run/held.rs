//! `thaw run --name` and `--detach`: a program in a sandbox that the daemon holds, and that ends with
//! the program.

use super::super::build::Display;
use super::super::mounts;
use super::super::sandbox::{create, port};
use super::{Arguments, DEFAULT_MEMORY, Program, host_policy, program};
use crate::client::Daemon;
use crate::exec_client;
use crate::failure::{Failure, Outcome};
use crate::output;
use rustix::termios::isatty;
use std::ffi::OsString;
use std::io::{stdin, stdout};
use std::net::TcpListener;
use std::num::NonZeroU32;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use thaw_build::container;
use thaw_home::home::Home;
use thaw_node::remote::{ExecRequest, LimitsChange, LimitsInfo, SandboxEgress};
use thaw_node::sandboxes::{NewSandbox, OnTimeout, SandboxInfo};
use thaw_sandbox::WeakLimits;
use thaw_store::Store;

/// How long a sandbox waits for its program: nobody ends one whose client has died before that.
const START_PATIENCE_S: u64 = 60;

/// Runs the program in a sandbox of that name; one is made up if it is empty.
pub fn run(arguments: &Arguments, name: &str) -> Outcome {
    let image = image(arguments, name)?;
    refuse_what_it_cannot_have(arguments)?;
    let volumes = mounts::of_sandbox(&arguments.volume)?;
    let home = Home::from_environment()?;
    let daemon = Daemon::of_home(&home, "or run the program without --name and --detach")?;
    refuse_function(&daemon, &home, image, name)?;
    let request = request(arguments)?;
    let ports = listen(arguments)?;
    let memory = arguments.memory.unwrap_or(DEFAULT_MEMORY);
    let new = NewSandbox {
        name: name.to_owned(),
        function: create::function_of_image(&daemon, image, memory, Display::new(false))?,
        timeout_s: Some(START_PATIENCE_S),
        on_timeout: OnTimeout::Kill,
        egress: Some(SandboxEgress {
            allow: arguments.allow_egress.clone(),
            ..SandboxEgress::default()
        }),
        volumes,
        ..NewSandbox::default()
    };
    let sandbox: SandboxInfo = daemon.send_json("POST", "/sandboxes", &new)?;
    if let Some(cpus) = arguments.cpus {
        give_cpus(&daemon, &sandbox, cpus)?;
    }
    if arguments.detach {
        exec_client::begin(&daemon, sandbox.instance, &request)?;
        output::print(&format!("{}\n", sandbox.name))?;
        return Ok(ExitCode::SUCCESS);
    }
    pass_clients(&daemon, &sandbox, ports);
    exec_client::run(&daemon, sandbox.instance, &request)
}

/// Gives a sandbox processors, or ends it if they cannot be had.
fn give_cpus(daemon: &Daemon, sandbox: &SandboxInfo, cpus: NonZeroU32) -> Result<(), Failure> {
    let change = LimitsChange { cpus: Some(cpus.get()), ..LimitsChange::default() };
    let path = format!("/sandboxes/{}", sandbox.instance);
    let given = daemon.send_json::<LimitsInfo>("PUT", &format!("{path}/limits"), &change);
    given.map(drop).inspect_err(|_| {
        // One that has ended needs no end.
        drop(daemon.send_empty::<SandboxInfo>("DELETE", &path));
    })
}

/// Passes clients of ports of this host on, for as long as this process lives.
fn pass_clients(daemon: &Daemon, sandbox: &SandboxInfo, ports: Vec<(TcpListener, u16)>) {
    let daemon = Arc::new(daemon.clone());
    for (listener, guest) in ports {
        let path = format!("/sandboxes/{}/ports/{guest}", sandbox.instance);
        let daemon = daemon.clone();
        thread::spawn(move || port::pass_all(&listener, &daemon, &path));
    }
}

/// The program as the image and the options say, as without a name.
fn request(arguments: &Arguments) -> Result<ExecRequest, Failure> {
    let Program { argv, env, cwd, account, .. } = program(arguments, &host_policy(arguments))?;
    let is_attached = !arguments.detach;
    let has_terminal = arguments.docker.tty || (is_attached && isatty(stdin()) && isatty(stdout()));
    let request = ExecRequest {
        argv: argv.into_iter().map(text).collect::<Result<_, _>>()?,
        env: env.into_iter().map(text).collect::<Result<_, _>>()?,
        workdir: text(cwd)?,
        user: format!("{}:{}", account.uid, account.gid),
        terminal: has_terminal.then(|| exec_client::window().unwrap_or((24, 80))),
        stdin: is_attached || arguments.docker.interactive,
        ends_sandbox: true,
    };
    request.check().map_err(Failure::failed)?;
    Ok(request)
}

fn text(bytes: OsString) -> Result<String, Failure> {
    bytes.into_string().map_err(|bytes| {
        Failure::misused(format!(
            "{} is not UTF-8, as all is in requests to the daemon",
            bytes.display()
        ))
    })
}

/// The image that the sandbox is made of.
fn image<'a>(arguments: &'a Arguments, name: &str) -> Result<&'a str, Failure> {
    let is_path = |image: &&str| ["/", "./", "../"].iter().any(|start| image.starts_with(start));
    arguments.image.as_deref().filter(|image| !is_path(image)).ok_or_else(|| {
        let named = if name.is_empty() { "--detach".to_owned() } else { format!("--name {name}") };
        Failure::misused(format!(
            "a sandbox of the daemon has the files of a container image, as in `thaw run {named} \
             debian:12 -- PROGRAM`; of files of this host make a function with `[entry] kind = \
             \"sandbox\"` and `thaw build`, and a sandbox of it with `thaw sandbox create`"
        ))
    })
}

/// Refuses a function where an image is meant: somebody else's image could have its name.
fn refuse_function(daemon: &Daemon, home: &Home, image: &str, name: &str) -> Result<(), Failure> {
    let store = Store::open(&home.store())?;
    if container::find(&store, image)?.is_some() || !create::serves(daemon, image)? {
        return Ok(());
    }
    let named = if name.is_empty() { "box" } else { name };
    Err(Failure::misused(format!(
        "{image} is a function and no image; `thaw sandbox create {image} --name {named}` makes a \
         sandbox of it, and `thaw exec {named} -- PROGRAM` runs a program there"
    )))
}

/// Refuses options that only a sandbox of this command's own can have.
fn refuse_what_it_cannot_have(arguments: &Arguments) -> Result<(), Failure> {
    const FILES: &str = "copy files to it and from it with `thaw sandbox cp`";
    const FUNCTION: &str = "make a function with such [limits], and a sandbox of it with `thaw \
                            sandbox create`";
    const OWN: &str = "leave it out";
    let refused = [
        (!arguments.bind.is_empty(), "--bind", FILES),
        (!arguments.tmpfs.is_empty(), "--tmpfs", "all of its files are in memory"),
        (arguments.as_root, "--as-root", FILES),
        (arguments.allow_fuse, "--allow-fuse", FILES),
        (arguments.hostname != super::HOSTNAME, "--hostname", OWN),
        (arguments.memory.is_some_and(|memory| memory.bytes() == 0), "--memory 0B", OWN),
        (arguments.processes.is_some(), "--processes", FUNCTION),
        (arguments.cpu_time.is_some(), "--cpu-time", FUNCTION),
        (
            arguments.weak_limits.chosen() == WeakLimits::Accept,
            "--weak-limits",
            "give it to `thaw serve`",
        ),
        (arguments.port != 0, "--port", OWN),
        (
            arguments.detach && !arguments.publish.is_empty(),
            "--publish without a client that stays",
            "reach its ports with `thaw sandbox port`",
        ),
    ];
    match refused.iter().find(|(is_given, ..)| *is_given) {
        None => Ok(()),
        Some((_, option, way)) => Err(Failure::misused(format!(
            "a sandbox of the daemon (--name, --detach) cannot have {option}; {way}, or run the \
             program without a name"
        ))),
    }
}

/// Listens on the ports of this host that are passed on.
fn listen(arguments: &Arguments) -> Result<Vec<(TcpListener, u16)>, Failure> {
    arguments.publish.iter().map(|publish| Ok((publish.listen()?, publish.guest))).collect()
}
