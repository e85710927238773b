//! `thaw invoke`: one request to a function through the daemon.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::{Failure, Outcome};
use crate::input::{self, Input, WhenSilent};
use crate::output::{self, escape};
use crate::verbs::near;
use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io::{self, Write};
use std::process::ExitCode;
use std::str::FromStr;
use thaw_daemon::admin::{BOOT_HEADER, FunctionDetail, FunctionInfo, PHASES_HEADER};
use thaw_home::config::EntryKind;
use thaw_node::boots::Phases;
use thaw_node::gateway::{EXIT_CODE_HEADER, SIGNAL_HEADER};
use ureq::Body;
use ureq::http::Response;

/// Call a function through the daemon and print its response.
///
/// Without --data and --method, a file that is redirected into it or what is piped into it is the
/// body of a POST. A pipe to which nobody writes for a second, such as one that ssh or a CI runner
/// keeps open, is left alone, with a remark; a function that reads standard input (kind = "stdin")
/// waits for it.
///
/// Exit code 1 means that the response's status is 400 or more. A function that
/// reads standard input (kind = "stdin") gets the data there. `thaw invoke` prints its
/// output, and ends with the exit code of the program.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw invoke hello-python --timings\n  \
    thaw invoke shop '/orders?since=yesterday'\n  \
    thaw invoke words-perl --data 'b a b'\n  \
    echo b a b | thaw invoke words-perl\n  \
    jq .order today.json | thaw invoke shop --path /orders\n  \
    thaw invoke mailer --data @letter.json --async --idempotency-key letter-17\n  \
    thaw invoke thumbnail-python --data @photo.jpg --header content-type:image/jpeg > small.jpg")]
pub struct Arguments {
    /// The function.
    name: String,
    /// Path and query, as with --path.
    #[arg(value_name = "PATH", conflicts_with = "path")]
    place: Option<String>,
    /// Body of the request; @FILE for a file's content, @- for standard input.
    #[arg(long, short, value_name = "TEXT|@FILE")]
    data: Option<String>,
    /// Method; default: POST with a body, GET without.
    #[arg(long, short = 'X')]
    method: Option<String>,
    /// Path and query; default: /.
    #[arg(long, short)]
    path: Option<String>,
    /// A header of the request; may be given several times.
    #[arg(long, short = 'H', value_name = "NAME:VALUE")]
    header: Vec<Header>,
    /// The instance that is to answer, by its number in `thaw ps`; default: any.
    #[arg(long, value_name = "ID", conflicts_with = "timings")]
    instance: Option<u64>,
    /// Queue the request and do not wait for the function: prints the name of the invocation alone
    /// (see `thaw queue`). For functions with [async] in their thaw.toml.
    #[arg(long = "async", conflicts_with_all = ["instance", "timings"])]
    is_async: bool,
    /// With --async: another invocation with the same key is not queued.
    #[arg(long, value_name = "KEY", requires = "is_async")]
    idempotency_key: Option<String>,
    /// Print the phases of the boot to standard error.
    #[arg(long)]
    timings: bool,
    /// Print JSON: status, headers, body as text, and the phases; with --async the invocation.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArguments,
}

/// Most bytes of the path of a request to the daemon, which has the path for the function in it.
const URL_MAX: usize = 60 << 10;

/// An invocation that was queued, as the daemon answers.
#[derive(Debug, Serialize, Deserialize)]
struct Queued {
    id: String,
    /// Whether the same one was queued before.
    duplicate: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Header(String, String);

impl FromStr for Header {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some((name, value)) if !name.trim().is_empty() => {
                Ok(Self(name.trim().to_owned(), value.trim().to_owned()))
            }
            _ => Err("write NAME:VALUE, as in content-type:text/plain".to_owned()),
        }
    }
}

pub fn run(arguments: &Arguments) -> Outcome {
    let daemon = Daemon::find(&arguments.daemon)?;
    let body = match &arguments.data {
        Some(data) => Some(read_data(data)?),
        None if arguments.method.is_none() => redirected(&daemon, &arguments.name)?,
        None => None,
    };
    let mut headers: Vec<_> =
        arguments.header.iter().map(|Header(name, value)| (name.clone(), value.clone())).collect();
    let key = arguments.idempotency_key.iter();
    headers.extend(key.map(|key| ("Idempotency-Key".to_owned(), key.clone())));
    let method = arguments
        .method
        .clone()
        .unwrap_or_else(|| if body.is_some() { "POST" } else { "GET" }.to_owned());
    let timings = (arguments.timings || arguments.json) && !arguments.is_async;
    let queued = if arguments.is_async { "&async=true" } else { "" };
    let instance = arguments.instance.map(|id| format!("&instance={id}")).unwrap_or_default();
    let path = arguments.path.as_ref().or(arguments.place.as_ref()).map_or("/", String::as_str);
    let url = format!(
        "/functions/{}/invoke?method={}&path={}&timings={timings}{instance}{queued}",
        escape(&arguments.name),
        escape(&method),
        escape(path)
    );
    if url.len() > URL_MAX {
        return Err(Failure::failed(format!(
            "the path is too long: a request has room for {URL_MAX} bytes, and this one takes {}; \
             send a part of it with --data",
            url.len()
        )));
    }
    let mut response = daemon.post_raw(&url, &headers, &body.unwrap_or_default())?;
    let status = response.status();
    if arguments.is_async && status == 202 {
        return print_invocation(&mut response, arguments.json);
    }
    if status == 404 && !arguments.json {
        check_name(&daemon, &arguments.name)?;
    }
    if arguments.json {
        let value = as_json(&mut response)?;
        output::print_json(&value)?;
    } else {
        let mut reader = response.body_mut().as_reader();
        let mut out = io::stdout().lock();
        io::copy(&mut reader, &mut out).and_then(|_| out.flush()).map_err(|error| {
            Failure::failed(format!(
                "the response ended early ({error}); see `thaw logs {}`",
                arguments.name
            ))
        })?;
        if arguments.timings {
            eprint!("{}", describe(&response));
        }
    }
    if let Some(code) = header(&response, EXIT_CODE_HEADER).and_then(|code| code.parse::<u8>().ok())
    {
        return Ok(ExitCode::from(code));
    }
    if let Some(signal) = header(&response, SIGNAL_HEADER) {
        return Err(Failure::failed(format!("{} was ended by signal {signal}", arguments.name)));
    }
    if status.as_u16() >= 400 {
        return Err(Failure::failed(format!("{} answered {status}", arguments.name)));
    }
    Ok(ExitCode::SUCCESS)
}

/// An error if there is no such function, of which an answer with 404 may come, too.
fn check_name(daemon: &Daemon, name: &str) -> Result<(), Failure> {
    if daemon.has(&format!("/functions/{}", escape(name))) != Some(false) {
        return Ok(());
    }
    let functions: Vec<FunctionInfo> = daemon.get("/functions")?;
    let close = near::closest(name, functions.iter().map(|known| known.name.as_str()));
    let meant = close.map_or(String::new(), |close| format!(" (is `{close}` meant?)"));
    Err(Failure::failed(format!(
        "no function is named `{name}`{meant}; `thaw list` shows those there are"
    )))
}

/// Prints the name of an invocation that was queued.
fn print_invocation(response: &mut Response<Body>, json: bool) -> Outcome {
    let queued: Queued = response.body_mut().read_json().map_err(|error| {
        Failure::failed(format!(
            "the daemon's answer cannot be read ({error}); is it the same version?"
        ))
    })?;
    if queued.duplicate && !json {
        eprintln!("thaw: the same invocation was queued before, and is not queued again");
    }
    output::print_done(json, &queued, |queued| queued.id.clone())?;
    Ok(ExitCode::SUCCESS)
}

/// What comes from a file or a pipe that is standard input. A pipe may belong to somebody who never
/// writes to it, so it is waited for only for a function that wants to read.
fn redirected(daemon: &Daemon, function: &str) -> Result<Option<Vec<u8>>, Failure> {
    let when_silent = || {
        let detail: Option<FunctionDetail> =
            daemon.get(&format!("/functions/{}", escape(function))).ok();
        match detail.is_some_and(|detail| detail.info.kind == EntryKind::Stdin) {
            true => WhenSilent::Wait,
            false => WhenSilent::GoOn,
        }
    };
    match input::read(io::stdin().lock(), when_silent)? {
        Input::Bytes(bytes) => Ok(Some(bytes)),
        Input::Nothing => Ok(None),
        Input::Silent => {
            eprintln!(
                "thaw: standard input is a pipe to which nobody has written yet, so the request \
                 has no body; `--data @-` waits for one, and `< /dev/null` says that there is none"
            );
            Ok(None)
        }
    }
}

fn read_data(data: &str) -> Result<Vec<u8>, Failure> {
    match data.strip_prefix('@') {
        None => Ok(data.as_bytes().to_vec()),
        Some("-") => Ok(input::read_all(io::stdin().lock())?),
        Some(path) => std::fs::read(path).map_err(|error| {
            Failure::failed(format!("cannot read {path} ({error}); name another file after @"))
        }),
    }
}

fn header<'a>(response: &'a Response<Body>, name: &str) -> Option<&'a str> {
    response.headers().get(name)?.to_str().ok()
}

fn phases(response: &Response<Body>) -> Option<Phases> {
    serde_json::from_str(header(response, PHASES_HEADER)?).ok()
}

fn as_json(response: &mut Response<Body>) -> Result<Value, Failure> {
    let headers: serde_json::Map<_, _> = response
        .headers()
        .iter()
        .filter(|(name, _)| *name != PHASES_HEADER && *name != BOOT_HEADER)
        .map(|(name, value)| (name.to_string(), json!(String::from_utf8_lossy(value.as_bytes()))))
        .collect();
    let boot = header(response, BOOT_HEADER).map(str::to_owned);
    let (status, phases) = (response.status().as_u16(), phases(response));
    let body = response.body_mut().read_to_vec()?;
    Ok(json!({
        "status": status,
        "headers": headers,
        "body": String::from_utf8_lossy(&body),
        "boot": boot,
        "phases_ns": phases,
    }))
}

/// The phases of the boot, for people.
fn describe(response: &Response<Body>) -> String {
    let Some(phases) = phases(response) else {
        let why = match header(response, BOOT_HEADER) {
            Some(_) => "the instance was booted before this request",
            None => "the sandbox did not report how its boot went",
        };
        return format!("{why}\n");
    };
    let kind = header(response, BOOT_HEADER).unwrap_or_default();
    let mut text = format!("a {kind} boot; since the connection was accepted:\n");
    for (name, ns) in [
        ("origin taken", Some(phases.zygote)),
        ("boot command received", phases.received),
        ("memory mapped", phases.mapped),
        ("first instruction", phases.first_instruction),
        ("first response byte", phases.first_byte),
    ] {
        match ns {
            Some(ns) => text += &format!("  {name:<22} {:>9.1} µs\n", ns as f64 / 1e3),
            None => text += &format!("  {name:<22}  not reported\n"),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_have_a_name() {
        assert_eq!("A: b:c".parse(), Ok(Header("A".into(), "b:c".into())));
        assert!("nothing".parse::<Header>().is_err());
        assert!(": x".parse::<Header>().is_err());
    }
}
