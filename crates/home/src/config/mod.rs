//! `thaw.toml`: what a function is, as its author writes it.
//!
//! Types carry the rules: a value that parsed is a valid value. What needs two
//! keys to judge is in [`FunctionConfig::parse`].

mod address;
mod baseline;
mod build;
mod egress;
mod entry;
mod error;
mod files;
mod inject;
mod liveness;
mod name;
mod quantity;
mod quotas;
mod rollback;
mod rules;
mod secrets;
mod stop_signal;
mod tables;
mod template;
mod train;
mod triggers;
mod volumes;

pub use address::parse_address;
pub use baseline::{BaselineError, CpuBaseline, UnknownBaseline};
pub use build::{BuildConfig, DomainName, PrivateFiles, Sharing};
pub use egress::{Egress, EgressRule, EgressRuleError};
pub use entry::{Connections, Entry, EntryKind, FreezeAt, FreezeSignal, Protocol};
pub use error::ConfigError;
pub use files::FileEntry;
pub use inject::{INJECT_MAX, Inject};
pub use inject::{check as check_inject, check_header};
pub use liveness::{Liveness, ProbeKind};
pub use name::{FunctionName, NameError};
pub use quantity::{ByteSize, QuantityError, TimeSpan};
use quantity::{positive, positive_if_any};
pub use quotas::{CpuQuota, QUOTAS_FILE, Quota, Quotas, QuotasError};
pub use rollback::Rollback;
pub use secrets::SecretsConfig;
pub use stop_signal::{StopSignal, UnknownSignal};
pub use tables::from_toml;
pub use template::{TemplateConfig, TemplateLanguage};
pub use train::{Train, TrainingRequest};
pub use triggers::{AsyncConfig, CatchUp, Overlap, SCHEDULES_MAX, Schedule, TimeZone};
pub use volumes::wrong_volumes;
pub use volumes::{VolumeConfig, check_mount_point};

use crate::beneath;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::num::{NonZeroU16, NonZeroU32};
use std::path::{Path, PathBuf};
use thaw_abi::control::FLAG_SECRETS;
use thaw_sandbox::{Processes, ResourceLimits};

/// Name of the file in a function's directory.
pub const CONFIG_FILE: &str = "thaw.toml";
/// Bytes of that file.
const CONFIG_MAX: u64 = 1 << 20;

/// A function as its author describes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FunctionConfig {
    /// Name, by which clients ask for the function in the `Host` header.
    pub name: FunctionName,
    /// Program and arguments. The program is looked up in the function's root
    /// file system, in `PATH` if it has no slash.
    #[serde(default, deserialize_with = "non_empty", skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// Port on which the program listens; none for one that reads its requests
    /// from standard input.
    #[serde(
        default,
        deserialize_with = "positive_if_any",
        skip_serializing_if = "Option::is_none"
    )]
    pub port: Option<NonZeroU16>,
    /// The version of HTTP that the program speaks there.
    #[serde(default, skip_serializing_if = "Protocol::is_http1")]
    pub protocol: Protocol,
    /// How requests reach the program, and what freezes it.
    #[serde(default)]
    pub entry: Entry,
    /// A gateway address of the function's own, besides the shared one.
    #[serde(
        default,
        deserialize_with = "address::address_if_any",
        skip_serializing_if = "Option::is_none"
    )]
    pub listen: Option<SocketAddr>,
    /// Root file system: a directory (with a slash in its name, relative to the
    /// function's directory) or the name of a stored one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rootfs: Option<String>,
    /// Root file system collected from this host instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime: Option<RuntimeConfig>,
    /// Which of the function's own files go where.
    #[serde(default = "whole_directory")]
    pub files: Vec<FileEntry>,
    /// Working directory in the sandbox.
    #[serde(default = "default_workdir")]
    pub workdir: String,
    /// User and group that the program sees itself as, by number or by a name of the function's
    /// files, as in `app:staff`; `None`: root, or that of the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Environment, added to `PATH`, `HOME` and `LANG`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Secrets, which are in no image: each copy gets the values of the moment as files.
    #[serde(default, skip_serializing_if = "SecretsConfig::is_default")]
    pub secrets: SecretsConfig,
    /// Directories whose files outlive the copies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VolumeConfig>,
    /// What an instance may use, and how many there may be.
    #[serde(default)]
    pub limits: Limits,
    /// When an instance may serve a second request.
    #[serde(default)]
    pub isolation: Isolation,
    /// Instances that are booted ahead and kept for the next requests; more in
    /// times of demand.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub ready: u16,
    /// Whether an instance that has served its request is put back into the state before it, and
    /// serves the next one, instead of being ended; `None`: where that is possible, and a
    /// measurement says that it takes less processor time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rewind: Option<bool>,
    /// Whether copies are forked from a live template, and which runtime template the
    /// function is built from.
    #[serde(default, skip_serializing_if = "TemplateConfig::is_default")]
    pub template: TemplateConfig,
    /// Whether instances are put to sleep when the daemon stops, and are asleep in the next one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub persist: bool,
    /// The age at which the image is frozen anew, which gives it other addresses; none: it
    /// is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refresh: Option<TimeSpan>,
    /// Outgoing connections.
    #[serde(default, skip_serializing_if = "Egress::is_closed")]
    pub egress: Egress,
    /// What hibernated instances do.
    #[serde(default, skip_serializing_if = "Hibernation::is_default")]
    pub hibernate: Hibernation,
    /// Requests to send before the program is frozen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub train: Option<Train>,
    /// A command to run in the function's directory before its files are imported,
    /// in a sandbox of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build: Option<BuildConfig>,
    /// Who shares equal files.
    #[serde(default, skip_serializing_if = "Sharing::is_default")]
    pub sharing: Sharing,
    /// When a new version is taken out of service by itself; none: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollback: Option<Rollback>,
    /// When an instance is ended because its program is not well; none: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub liveness: Option<Liveness>,
    /// Whether clients may have their requests queued, and how these are then made; none: they
    /// may not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub r#async: Option<AsyncConfig>,
    /// When the node itself calls the function.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub schedules: Vec<Schedule>,
    /// Whether requests that are CloudEvents are checked, and reach the function in binary mode.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cloudevents: bool,
}

/// `[runtime]`: a root file system made of files of this host, or of a container image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuntimeConfig {
    /// What to collect.
    #[serde(default)]
    pub kind: RuntimeKind,
    /// `image`: the container image, by its name in the store or in a registry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Further host files and directories, imported at their own paths.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub include: Vec<PathBuf>,
    /// Further programs of the host with their shared libraries: names to be
    /// looked up in `PATH`, or paths.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub programs: Vec<String>,
    /// Languages: the interpreter on the host; default: the one in `PATH`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interpreter: Option<PathBuf>,
    /// `python3`: a pip requirements file in the function's directory, whose
    /// packages are installed and imported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requirements: Option<PathBuf>,
    /// `python3`: a directory with installed packages (a virtual environment's
    /// `site-packages`, or a target of `pip install --target`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packages: Option<PathBuf>,
}

/// What is collected from the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RuntimeKind {
    /// Nothing of the host: the files of a container image.
    #[default]
    Image,
    /// The Python interpreter, its standard library and their shared libraries.
    Python3,
    /// Node.js.
    Node,
    /// The Java virtual machine with its class library.
    Java,
    /// The Ruby interpreter, its library and installed gems.
    Ruby,
    /// PHP's command-line interpreter, its extensions and settings.
    Php,
    /// The Perl interpreter and its library.
    Perl,
    /// The command's own program and its shared libraries, if it has any.
    Binary,
}

impl RuntimeKind {
    /// The name by which the store knows a language's files; none for
    /// [`RuntimeKind::Binary`] and [`RuntimeKind::Image`], which are no languages.
    pub fn language(self) -> Option<&'static str> {
        match self {
            Self::Python3 => Some("python3"),
            Self::Node => Some("node"),
            Self::Java => Some("java"),
            Self::Ruby => Some("ruby"),
            Self::Php => Some("php"),
            Self::Perl => Some("perl"),
            Self::Binary | Self::Image => None,
        }
    }
}

/// `[limits]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Memory of one instance.
    pub memory: ByteSize,
    /// Most memory that a sandbox may be given while it runs; none: `memory`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_max: Option<ByteSize>,
    /// Virtual CPUs of one instance, and the processors' worth of CPU time that the host
    /// gives it.
    #[serde(deserialize_with = "positive")]
    pub cpu: NonZeroU32,
    /// Most processors' worth of CPU time that a sandbox may be given while it runs; none: `cpu`.
    #[serde(deserialize_with = "positive_if_any", skip_serializing_if = "Option::is_none")]
    pub cpu_max: Option<NonZeroU32>,
    /// Host processes of one instance, with each further virtual CPU of a process counted
    /// as one. With 1, the host lets it have one process with one virtual CPU, by a shorter
    /// list of host calls.
    #[serde(deserialize_with = "positive")]
    pub processes: NonZeroU32,
    /// CPU time that one instance may use in its life, with all its processes; none: no
    /// limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_time: Option<TimeSpan>,
    /// Crashes of instances within a minute after which the function backs off and its
    /// image is frozen anew, which gives it other addresses; 0: never.
    pub crashes: u32,
    /// How long a client waits for the first byte of a response, and how long either side
    /// of a routed request may stop in the middle.
    pub timeout: TimeSpan,
    /// Connections, or routed requests, that one instance serves at a time.
    #[serde(deserialize_with = "positive")]
    pub concurrency: NonZeroU32,
    /// How long an idle instance, or an idle connection, is kept.
    pub keep_alive: TimeSpan,
    /// How long an instance is idle before it gives back the pages that are equal to those of its image
    /// again; as long as `keep_alive` or longer: it never does.
    pub trim_after: TimeSpan,
    /// How long an instance is idle before it gives up its memory; none: it never does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hibernate_after: Option<TimeSpan>,
    /// How long an instance is idle before its process ends and a file is left of it; none: it
    /// never sleeps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sleep_after: Option<TimeSpan>,
    /// How long an instance may go on after `stop_signal` when it is to end and nobody waits for
    /// its room; 0: it ends at once, without a signal.
    pub grace: TimeSpan,
    /// What asks its program to end; none: what the container image says, or SIGTERM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_signal: Option<StopSignal>,
    /// Instances of the function at a time, those that are asleep included.
    #[serde(deserialize_with = "positive")]
    pub instances: NonZeroU32,
    /// How long a connection waits for an instance when all are busy.
    pub queue: TimeSpan,
    /// How long what an instance serves may go on after its version has been replaced or
    /// removed.
    pub drain: TimeSpan,
}

impl Default for Limits {
    fn default() -> Self {
        const fn count(n: u32) -> NonZeroU32 {
            NonZeroU32::new(n).expect("a positive constant")
        }
        Self {
            memory: ByteSize::mebibytes(256),
            memory_max: None,
            cpu: count(1),
            cpu_max: None,
            processes: count(512),
            cpu_time: None,
            crashes: 64,
            timeout: TimeSpan::seconds(30),
            concurrency: count(1),
            keep_alive: TimeSpan::seconds(60),
            trim_after: TimeSpan::seconds(10),
            hibernate_after: None,
            sleep_after: None,
            grace: TimeSpan::seconds(0),
            stop_signal: None,
            instances: count(64),
            queue: TimeSpan::seconds(5),
            drain: TimeSpan::seconds(30),
        }
    }
}

impl Limits {
    /// How much one instance may have at a time.
    pub fn of_an_instance(&self) -> ResourceLimits {
        ResourceLimits {
            memory: self.memory.bytes(),
            cpus: self.cpu.get(),
            processes: self.processes.get(),
        }
    }
}

/// `[hibernate]`: how instances hibernate that do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Hibernation {
    /// Whether a due timer of the program wakes its instance. Otherwise timers expire when
    /// something else wakes it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub timers: bool,
    /// Whether the memory of hibernated and sleeping instances is encrypted on disk, with keys that
    /// the daemon alone has, in memory.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub encrypt: bool,
    /// Whether the swap file of a hibernated instance is compared with its checksum before the
    /// instance wakes.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub verify: bool,
}

impl Hibernation {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Who may meet whom in one instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Isolation {
    /// A fresh instance for every request, or for every connection that is handed over,
    /// ended with it.
    #[default]
    Request,
    /// An instance serves one after the other.
    Instance,
}

/// Stands for the value of an environment variable wherever one is shown.
pub const HIDDEN: &str = "***";

impl FunctionConfig {
    /// The same to be shown: without the values of environment variables, which are
    /// where secrets are.
    pub fn without_secrets(&self) -> Self {
        let env = self.env.keys().map(|name| (name.clone(), HIDDEN.to_owned())).collect();
        Self { env, ..self.clone() }
    }

    /// Reads the `thaw.toml` of a function's directory.
    ///
    /// # Errors
    /// The file is missing, or is not valid: see [`ConfigError`].
    pub fn load(directory: &Path) -> Result<Self, ConfigError> {
        let path = directory.join(CONFIG_FILE);
        let read = beneath::open_directory(directory)
            .and_then(|directory| beneath::read(directory, CONFIG_FILE.as_ref(), CONFIG_MAX))
            .and_then(|bytes| {
                String::from_utf8(bytes).map_err(|_| io::Error::other("it is not UTF-8 text"))
            });
        match read {
            Ok(text) => Self::parse(&path, &text),
            Err(error) => Err(ConfigError::Read { path, error }),
        }
    }

    /// Parses the text of a `thaw.toml`; `path` is for error messages.
    ///
    /// # Errors
    /// Unknown keys, wrong values and keys that contradict each other, each
    /// with its line and column.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let mut config: Self = from_toml(path, text)?;
        if config.image().is_some() {
            // The image says what the file leaves out.
            let present: Present = from_toml(path, text)?;
            if present.files.is_none() {
                config.files.clear();
            }
            if present.workdir.is_none() {
                config.workdir.clear();
            }
        }
        match config.contradiction() {
            None => Ok(config),
            Some((keys, message)) => {
                Err(ConfigError::at(path, text, offset_of(text, keys), message))
            }
        }
    }

    /// The container image that its files are from.
    pub fn image(&self) -> Option<&str> {
        self.runtime.as_ref()?.image.as_deref()
    }

    /// Whether nobody has said which of the function's own files it needs.
    pub fn takes_all_files(&self) -> bool {
        self.files == whole_directory()
    }

    /// User and group id of the program. Names were replaced when the function was built.
    pub fn ids(&self) -> (u32, u32) {
        let text = self.user.as_deref().unwrap_or("0:0");
        let (uid, gid) = text.split_once(':').unwrap_or((text, "0"));
        (uid.parse().unwrap_or(0), gid.parse().unwrap_or(0))
    }

    /// With whom the function's files are shared.
    pub fn domain(&self) -> thaw_store::Domain {
        let domain = self.sharing.domain.as_ref();
        domain.map_or_else(thaw_store::Domain::shared, |name| thaw_store::Domain::own(name.name()))
    }

    /// The domain of files that are shared with no other function.
    pub fn private_domain(&self) -> thaw_store::Domain {
        let name = thaw_store::Name::new(self.name.as_str());
        thaw_store::Domain::private(&name.expect("a function's name is a name of the store"))
    }

    /// The port on which the program listens; 0 if it listens on none.
    pub fn port_number(&self) -> u16 {
        self.port.map_or(0, NonZeroU16::get)
    }

    /// Which filter the function's zygotes have.
    pub fn processes(&self) -> Processes {
        Processes::of(self.limits.of_an_instance())
    }

    /// `FLAG_*` of the control protocol by which a sandbox knows how requests come, and whether
    /// there are secrets.
    pub fn entry_flags(&self) -> u32 {
        self.entry.kind.flags() | if self.secrets.is_default() { 0 } else { FLAG_SECRETS }
    }
}

/// Byte offset of the value at `keys`, or of the deepest table that exists.
fn offset_of(text: &str, keys: &[&str]) -> usize {
    let Ok(root) = toml::de::DeTable::parse(text) else { return 0 };
    let mut offset = 0;
    let mut table = root.get_ref();
    for key in keys {
        let Some((name, value)) = table.get_key_value(*key) else { break };
        offset = name.span().start;
        match value.get_ref() {
            toml::de::DeValue::Table(inner) => table = inner,
            _ => break,
        }
    }
    offset
}

fn non_empty<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let command = Vec::<String>::deserialize(deserializer)?;
    match command.first() {
        Some(program) if !program.is_empty() => Ok(command),
        _ => Err(serde::de::Error::custom(
            "a command needs a program; write [\"program\", \"argument\"]",
        )),
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &u16) -> bool {
    *count == 0
}

/// Which of the keys with defaults a file has.
#[derive(Deserialize)]
struct Present {
    files: Option<serde::de::IgnoredAny>,
    workdir: Option<serde::de::IgnoredAny>,
}

fn whole_directory() -> Vec<FileEntry> {
    vec![FileEntry { from: PathBuf::from("."), to: Some(default_workdir()) }]
}

fn default_workdir() -> String {
    "/app".to_owned()
}

#[cfg(test)]
mod reference_tests;
#[cfg(test)]
mod tests;
