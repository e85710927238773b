//! The worker that makes the calls, once on the host and once in a sandbox.
//!
//! It reads lines of a measure's name and a number of samples, and answers each
//! with the samples, in nanoseconds for one call.

use super::calls::{self, Workplace};
use std::io::{self, BufRead, Write};

/// Takes samples until standard input ends.
pub(crate) fn serve_calls() -> io::Result<()> {
    let workplace = Workplace::prepare()?;
    let mut output = io::stdout().lock();
    writeln!(output, "ready")?;
    for order in io::stdin().lock().lines() {
        let order = order?;
        let parsed = order.split_once(' ').and_then(|(name, samples)| {
            let measure = calls::MEASURES.iter().find(|measure| measure.name == name)?;
            Some((measure, samples.parse::<usize>().ok()?))
        });
        let Some((measure, samples)) = parsed else {
            return Err(io::Error::other(format!("no such measure: {order}")));
        };
        let samples = measure.take(&workplace, samples)?;
        let samples: Vec<String> = samples.iter().map(f64::to_string).collect();
        writeln!(output, "{}", samples.join(" "))?;
    }
    Ok(())
}
