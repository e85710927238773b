//! `thaw push`: a frozen function goes to a registry.

use crate::failure::Outcome;
use crate::output;
use clap::Args;
use serde_json::json;
use std::env;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use thaw_build::artifact::{self, Pushed};
use thaw_home::home::Home;
use thaw_oci::{PushProgress, Reference, SigningKey};
use zeroize::Zeroizing;

/// How often the line on a terminal is written anew.
const INTERVAL: Duration = Duration::from_millis(100);
/// The variable that has the password of a key, as for `cosign`.
const PASSWORD_VARIABLE: &str = "COSIGN_PASSWORD";

/// Push a frozen function to a registry.
///
/// Its files, its image and the build of the Thaw kernel that this needs go there in compressed
/// pieces. What the registry has is not sent: a second function of the same language moves only
/// what differs, and an interrupted push goes on where it ended. Whoever can read the repository can
/// read all that the program held in memory when it was frozen, its environment included.
/// Credentials are those of `docker login`; docs/artifacts.md has all of it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw push hello-python registry.example/functions/hello-python:1\n  \
    thaw push shop localhost:5000/shop:3 --sign shop.key")]
pub struct Arguments {
    /// The function.
    #[arg(value_name = "FUNCTION")]
    function: String,
    /// Where it goes, as registry/repository:tag.
    #[arg(value_name = "REFERENCE")]
    reference: Reference,
    /// Sign it with this private key (ECDSA P-256), as `cosign sign --key` does: that of `cosign
    /// generate-key-pair`, whose password is in $COSIGN_PASSWORD or is asked for, or PKCS #8 in PEM.
    #[arg(long, value_name = "KEY")]
    sign: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let Arguments { function, reference, sign, json } = arguments;
    let home = Home::from_environment()?;
    let key = sign.as_deref().map(|path| SigningKey::read(path, &|| password(path))).transpose()?;
    let mut line = Line { shown: io::stderr().is_terminal(), last: None };
    let show = &mut |progress| line.show(progress);
    let pushed = artifact::push(&home, function, reference, key.as_ref(), show);
    line.finish();
    let Pushed { report, notes } = pushed?;
    for note in notes {
        eprintln!("thaw: note: {note}");
    }
    if *json {
        output::print_json(&json!({
            "function": function,
            "reference": reference.to_string(),
            "digest": report.digest,
            "pieces": report.total.pieces,
            "bytes": report.total.bytes,
            "sent": report.total.sent,
            "mounted": report.mounted,
            "signed": key.is_some(),
        }))?;
    } else {
        let PushProgress { pieces, bytes, sent } = report.total;
        output::print(&format!(
            "pushed {function} to {reference}: {pieces} pieces, {}, of which {} were sent\n{}\n",
            output::size(bytes),
            output::size(sent),
            report.digest
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The password of an encrypted key.
fn password(key: &Path) -> io::Result<Zeroizing<String>> {
    if let Some(password) = env::var_os(PASSWORD_VARIABLE) {
        let password = password.into_string();
        return password
            .map(Zeroizing::new)
            .map_err(|_| io::Error::other("its password is no text"));
    }
    let question = format!("Password of {}: ", key.display());
    let answer = rpassword::prompt_password(question).map(Zeroizing::new);
    answer.map_err(|error| {
        io::Error::other(format!(
            "there is no terminal to ask for its password ({error}); set {PASSWORD_VARIABLE}"
        ))
    })
}

/// A line on a terminal that says how far it is.
struct Line {
    shown: bool,
    last: Option<Instant>,
}

impl Line {
    fn show(&mut self, progress: PushProgress) {
        if !self.shown || self.last.is_some_and(|last| last.elapsed() < INTERVAL) {
            return;
        }
        self.last = Some(Instant::now());
        let PushProgress { pieces, bytes, sent } = progress;
        let (bytes, sent) = (output::size(bytes), output::size(sent));
        // Without a standard error there is nobody to tell.
        let _ = write!(io::stderr(), "\r\x1b[Kpushing: {pieces} pieces, {bytes}, {sent} sent");
    }

    fn finish(&self) {
        if self.last.is_some() {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}
