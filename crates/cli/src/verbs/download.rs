//! What `thaw import`, `thaw pull` and `thaw run` have in common: container images.

use crate::failure::Failure;
use crate::output;
use clap::Args;
use serde_json::json;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};
use thaw_build::container::{ImageProgress, StoredImage};
use thaw_home::config::ByteSize;
use thaw_oci::{Limits, UnpackReport};

/// How often the line on a terminal is written anew.
const INTERVAL: Duration = Duration::from_millis(100);

/// What an image may take.
#[derive(Clone, Copy, Debug, Args)]
pub struct SizeArguments {
    /// Refuse what has more bytes than this, compressed or uncompressed [default: 64GiB]
    #[arg(long, value_name = "SIZE")]
    max_size: Option<ByteSize>,
}

impl SizeArguments {
    /// As limits of an import.
    pub fn limits(self) -> Limits {
        let default = Limits::default();
        Limits { bytes: self.max_size.map_or(default.bytes, ByteSize::bytes), ..default }
    }
}

/// A line on a terminal that says how far it is.
pub struct ProgressLine {
    shown: bool,
    last: Option<Instant>,
}

impl ProgressLine {
    pub fn new() -> Self {
        Self { shown: io::stderr().is_terminal(), last: None }
    }

    /// Shows it, if the last time was long enough ago.
    pub fn show(&mut self, progress: &ImageProgress) {
        if let ImageProgress::Waiting(awaited) = progress {
            // Also where no terminal is: it may take long.
            self.finish();
            eprintln!("thaw: note: {}", awaited.sentence());
            return;
        }
        if !self.shown || self.last.is_some_and(|last| last.elapsed() < INTERVAL) {
            return;
        }
        self.last = Some(Instant::now());
        let text = match progress {
            ImageProgress::Pulling(done) => {
                format!("pulling: {} of {}", output::size(done.bytes), output::size(done.of))
            }
            ImageProgress::Unpacking(done) => format!(
                "unpacking layer {}: {} entries, {}",
                done.layers,
                done.entries,
                output::size(done.bytes)
            ),
            ImageProgress::Waiting(_) => return,
        };
        // Without a standard error there is nobody to tell.
        let _ = write!(io::stderr(), "\r\x1b[K{text}");
    }

    /// Takes the line away.
    pub fn finish(&self) {
        if self.last.is_some() {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

/// Says what was stored.
pub fn report(image: &StoredImage, report: &UnpackReport, as_json: bool) -> Result<(), Failure> {
    if as_json {
        return output::print_json(&json!({
            "name": image.name,
            "rootfs": image.index.to_string(),
            "layers": report.layers,
            "files": report.entries,
            "bytes": report.bytes,
            "command": image.settings.command_with(&[]),
        }));
    }
    let UnpackReport { layers, entries, bytes, without_attributes } = *report;
    let size = output::size(bytes);
    output::print(&format!(
        "stored {layers} layers with {entries} entries, {size}, as {}\n",
        image.name
    ))?;
    if without_attributes > 0 {
        eprintln!(
            "thaw: extended attributes of {without_attributes} files were left out; only user.* and \
             security.capability are kept"
        );
    }
    Ok(())
}
