//! A copy of a probed program: it is thawed, asked what it draws and keeps, and ended.

use super::super::program::{is_wanted, start_parent};
use super::super::{BuildOptions, FreezeFailure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio, read};
use rustix::pipe::{PipeFlags, pipe_with};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};
use thaw_home::config::Egress;
use thaw_home::function::StoredFunction;
use thaw_sandbox::{BootPlan, Event, Sandbox, ThawOptions};

/// Names, and the value of each.
pub(super) type Named = Vec<(String, String)>;

/// What a copy has said.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Answer {
    /// Generators, and what they drew.
    pub drawn: Named,
    /// Where the program keeps times that it has read since it began.
    pub times: Named,
    /// Servers that keep the `Date` of their answers.
    pub dates: Named,
}

/// How long a copy may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often its end is looked for.
const TICK: Duration = Duration::from_millis(20);
/// Most bytes of what it prints that are read.
const OUTPUT_MAX: usize = 256 << 10;
/// CPU time that it may use.
const CPU_TIME: Duration = Duration::from_secs(10);
/// What begins a line of the probe's.
const MARK: &str = "thaw-probe ";
/// What begins the rest of it if the line is about a time.
const TIME: &str = "time ";
/// The same if it is about a server and the `Date` of its answers.
const DATE: &str = "date ";
/// Most characters of a name.
const NAME_MAX: usize = 80;

/// Thaws a copy and asks it.
///
/// # Errors
/// It cannot be thawed, ends, or does not answer.
pub(super) fn ask(
    function: &StoredFunction,
    plan: &BootPlan,
    options: &BuildOptions,
) -> Result<Answer, FreezeFailure> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).map_err(io::Error::from)?;
    let console = writer.try_clone()?;
    ioctl_fionbio(&reader, true).map_err(io::Error::from)?;
    let config = &function.config;
    let parent = start_parent(console, options.weak_limits)?;
    let zygote = parent.create_with(config.processes())?;
    zygote.join(options.cores.as_ref())?;
    let thaw = ThawOptions {
        streams: Some([writer.as_fd(), writer.as_fd()]),
        limits: config.limits.of_an_instance(),
        cpu_time_limit: Some(CPU_TIME),
        flags: thaw_home::debug::flags() | config.entry_flags(),
        hostname: "",
        secrets: None,
        volumes: &[],
        egress: &Egress::default().policy(),
        resumed: &[],
        cores: None,
    };
    let mut sandbox = zygote.thaw(plan, None, &thaw)?;
    drop(writer);
    sandbox.send_signal(libc::SIGPWR as u32)?;
    answer(&mut sandbox, &reader, options)
}

/// Waits for what the probe says.
fn answer(
    sandbox: &mut Sandbox,
    reader: &OwnedFd,
    options: &BuildOptions,
) -> Result<Answer, FreezeFailure> {
    let died = |reason: String| FreezeFailure::Died { reason, output: Vec::new() };
    let deadline = Instant::now() + PATIENCE;
    let mut output = Vec::new();
    while Instant::now() < deadline && output.len() < OUTPUT_MAX {
        match sandbox.wait_event(Some(Duration::ZERO))? {
            Some(Event::Exit(_) | Event::Hangup) => {
                return Err(died("a copy ended when it was to draw".to_owned()));
            }
            Some(Event::Failed(reason)) => return Err(died(reason)),
            Some(Event::Violation(violation)) => return Err(died(violation.to_string())),
            _ => {}
        }
        if !is_wanted(options.wanted.as_ref()) {
            return Err(FreezeFailure::Unwanted);
        }
        take(reader, &mut output)?;
        if let Some(answer) = parse(&String::from_utf8_lossy(&output)) {
            return Ok(answer);
        }
    }
    Err(died("a copy did not say what it draws".to_owned()))
}

/// Takes what there is, after a while at most.
fn take(reader: &OwnedFd, output: &mut Vec<u8>) -> io::Result<()> {
    let mut polled = [PollFd::new(reader, PollFlags::IN)];
    let patience = Timespec { tv_sec: 0, tv_nsec: TICK.as_nanos() as i64 };
    match poll(&mut polled, Some(&patience)) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let mut bytes = [0; 4096];
    match read(reader, &mut bytes) {
        Ok(count) => output.extend_from_slice(&bytes[..count]),
        Err(Errno::AGAIN | Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// What the probe has said, if that is all of it.
fn parse(output: &str) -> Option<Answer> {
    let said = || output.split_inclusive('\n').filter_map(|line| line.strip_prefix(MARK));
    if !said().any(|line| line == ".\n") {
        return None;
    }
    let about = |what: &str| said().filter_map(|line| named(line.strip_prefix(what)?)).collect();
    let is_drawn = |line: &&str| ![TIME, DATE].iter().any(|what| line.starts_with(what));
    let drawn = said().filter(is_drawn).filter_map(named).collect();
    Some(Answer { drawn, times: about(TIME), dates: about(DATE) })
}

fn named(line: &str) -> Option<(String, String)> {
    let (name, value) = line.trim_end().split_once('=')?;
    let name: String = name.chars().take(NAME_MAX).collect();
    Some((thaw_sandbox::escape(name.as_bytes()), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_has_said_all_when_it_says_so() {
        assert_eq!(parse("hello\nthaw-probe a=1\n"), None);
        assert_eq!(parse("thaw-probe a=1\nthaw-probe ."), None);
        let all = "x\nthaw-probe a=1\nnoise\nthaw-probe b c=2=3\nthaw-probe time t=5\nthaw-probe date d=6\n\
             thaw-probe .\n";
        let all = parse(all).unwrap();
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(all.drawn, [pair("a", "1"), pair("b c", "2=3")]);
        assert_eq!(all.times, [pair("t", "5")]);
        assert_eq!(all.dates, [pair("d", "6")]);
    }
}
