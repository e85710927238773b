//! The worker that makes the calls, once on the host and once in a sandbox.
//!
//! It reads lines of a measure's name and a number of samples, and answers each
//! with the samples, in nanoseconds for one call.

use super::calls::{self, Workplace};
use std::io::{self, BufRead, Write};

/// Takes samples until standard input ends.
pub(crate) fn serve_calls() -> io::Result<()> {
    let workplace = Workplace::prepare()?;
    serve_orders(|name, samples| {
        let measure = calls::MEASURES.iter().find(|measure| measure.name == name)?;
        Some(measure.take(&workplace, samples))
    })
}

/// Takes samples until standard input ends; `take` does so by the name of a measure, and knows none
/// of another name.
pub(crate) fn serve_orders(
    mut take: impl FnMut(&str, usize) -> Option<io::Result<Vec<f64>>>,
) -> io::Result<()> {
    let mut output = io::stdout().lock();
    writeln!(output, "ready")?;
    for order in io::stdin().lock().lines() {
        let order = order?;
        let parsed = order.split_once(' ');
        let taken = parsed.and_then(|(name, samples)| take(name, samples.parse().ok()?));
        let Some(samples) = taken else {
            return Err(io::Error::other(format!("no such measure: {order}")));
        };
        let samples = samples?;
        let samples: Vec<String> = samples.iter().map(f64::to_string).collect();
        writeln!(output, "{}", samples.join(" "))?;
    }
    Ok(())
}
