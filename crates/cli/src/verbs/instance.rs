//! What the verbs have in common that change the state of one instance.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::{Failure, Outcome};
use crate::key_file::KeyFile;
use crate::output;
use clap::Args;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// An instance of a function, and how to tell what was done with it.
#[derive(Debug, Args)]
pub struct InstanceOf {
    /// The function.
    name: String,
    /// The instance, by its number in `thaw ps`; default: see above.
    #[arg(long, value_name = "ID")]
    instance: Option<u64>,
    #[command(flatten)]
    telling: Telling,
}

/// Whom to ask, and how to tell what was done.
#[derive(Debug, Args)]
pub struct Telling {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArguments,
}

impl InstanceOf {
    /// Asks the daemon for `action`, a part of the path below the function's, and tells what was
    /// done: a line for people, or all of it as JSON.
    ///
    /// # Errors
    /// The daemon refuses, or cannot be asked.
    pub fn post<T: DeserializeOwned + Serialize>(
        &self,
        action: &str,
        line: impl FnOnce(&T) -> String,
    ) -> Outcome {
        let query = self.instance.map(|id| format!("?instance={id}")).unwrap_or_default();
        let name = output::escape(&self.name);
        self.telling.post(&format!("/functions/{name}/{action}{query}"), line)
    }
}

impl Telling {
    /// The same with a whole path.
    ///
    /// # Errors
    /// As above.
    pub fn post<T: DeserializeOwned + Serialize>(
        &self,
        path: &str,
        line: impl FnOnce(&T) -> String,
    ) -> Outcome {
        let done: T = self.daemon()?.post(path)?;
        self.print(&done, line)
    }

    /// The same with a key in the body, if one is given.
    ///
    /// # Errors
    /// As above, or the key cannot be read.
    pub fn post_with<T: DeserializeOwned + Serialize>(
        &self,
        path: &str,
        key: &KeyFile,
        line: impl FnOnce(&T) -> String,
    ) -> Outcome {
        let key = key.read()?;
        let done: T = self.daemon()?.post_bytes(path, &key)?;
        self.print(&done, line)
    }

    /// The daemon to ask.
    ///
    /// # Errors
    /// There is none.
    pub fn daemon(&self) -> Result<Daemon, Failure> {
        Daemon::find(&self.daemon)
    }

    /// Tells what was done.
    ///
    /// # Errors
    /// It cannot be printed.
    pub fn print<T: Serialize>(&self, done: &T, line: impl FnOnce(&T) -> String) -> Outcome {
        output::print_done(self.json, done, line)
    }
}

/// Bytes in MiB.
pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
