//! The same command as an ordinary process of the host: it is started, what it prints is read to
//! its end, and it is waited for, as the node does it in a sandbox.

use std::io;
use std::process::{Command, Output, Stdio};
use std::time::Instant;

/// Nanoseconds that a command takes on the host, or one sentence that says why it does not end well.
pub(super) fn run(argv: &[String]) -> Result<u64, String> {
    let mut command = Command::new(&argv[0]);
    command.args(&argv[1..]);
    let (output, took) = timed(&mut command).map_err(|error| format!("{}: {error}", argv[0]))?;
    match output.status.success() {
        true => Ok(took),
        false => Err(format!("`{}` has not ended well", argv.join(" "))),
    }
}

/// Runs a command to its end; what it printed, and nanoseconds.
pub(super) fn timed(command: &mut Command) -> io::Result<(Output, u64)> {
    command.stdin(Stdio::null());
    let began = Instant::now();
    let output = command.output()?;
    Ok((output, began.elapsed().as_nanos() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_does_not_end_well_has_no_time() {
        let run = |argv: &[&str]| run(&argv.iter().map(|&part| part.into()).collect::<Vec<_>>());
        assert!(run(&["true"]).unwrap() > 0);
        assert_eq!(run(&["sh", "-c", "exit 3"]).unwrap_err(), "`sh -c exit 3` has not ended well");
        let missing = run(&["/no/such/program"]).unwrap_err();
        assert!(missing.starts_with("/no/such/program: "), "{missing}");
    }
}
