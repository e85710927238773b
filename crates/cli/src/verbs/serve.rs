//! `thaw serve`: the daemon.

use super::limits::WeakLimitsArgument;
use super::listen::ListenArguments;
use crate::failure::Outcome;
use crate::output;
use clap::{Args, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use thaw_daemon::activation;
use thaw_daemon::daemon::{CoreSharing, Prepared, ServeError, ServeOptions, Successor, serve};
use thaw_daemon::monitor::{self, Inherited};
use thaw_home::config::parse_address;
use thaw_home::config::{ByteSize, TimeSpan};
use thaw_home::home::{DaemonAddress, Home};
use thaw_home::user::DaemonUser;
use thaw_node::catalog::Catalog;
use thaw_node::gateway::GatewayConfig;
use thaw_node::inject;
use thaw_node::instance::WorkingSetUse;
use thaw_node::logs::{FILES_MAX, LogLimits};
use thaw_node::packing::ROOM_DEFAULT;
use thaw_node::traces::TraceSettings;
use thaw_sandbox::{PopulatePolicy, WeakLimits};

/// Serve the built functions over HTTP.
///
/// Runs in the foreground. SIGTERM and SIGINT end it after the requests that
/// are being served. With --monitor, SIGTERM leaves live instances to the next daemon, and SIGINT
/// ends them. SIGHUP looks for new builds, for
/// new quotas of tenants (thaw tenants --help) and for new routes, certificates and rules of
/// clients in $THAW_HOME/gateway.toml (docs/gateway.md). THAW_LOG_FORMAT=json makes the
/// daemon's log lines of JSON.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw serve --listen 127.0.0.1:8080\n  \
    curl http://127.0.0.1:8080/ -H 'Host: hello-python'\n  \
    thaw serve --e2b 127.0.0.1:8082\n  \
    thaw serve --dashboard 127.0.0.1:8083\n  \
    thaw serve --otlp http://127.0.0.1:4318\n  \
    thaw serve --monitor /run/thaw/monitor.sock")]
pub struct Arguments {
    #[command(flatten)]
    listening: ListenArguments,
    /// Serve without any of root's rights, which stay with `thaw monitor` on this socket
    /// (thaw monitor --help). The monitor says which home to serve, and listens.
    #[arg(
        long = "monitor", value_name = "SOCKET",
        conflicts_with_all = ["listen", "admin", "dashboard", "admin_token_file", "admin_name", "weak_limits"]
    )]
    monitor_socket: Option<PathBuf>,
    /// Zygotes kept ready.
    #[arg(long, value_name = "N", default_value = "16")]
    zygotes: usize,
    /// Most instances of all functions together.
    #[arg(long, value_name = "N", default_value = "1024")]
    max_instances: usize,
    /// How long a client may take to send the head of its request.
    #[arg(long, value_name = "DURATION", default_value = "10s")]
    head_timeout: TimeSpan,
    /// How long busy instances may go on after SIGTERM.
    #[arg(long, value_name = "DURATION", default_value = "30s")]
    drain: TimeSpan,
    /// Room on disk for images as they are booted. Beyond that, those that were not used for
    /// longest are packed (thaw pack --help).
    #[arg(long, value_name = "SIZE", default_value_t = ROOM_DEFAULT)]
    unpacked: ByteSize,
    #[command(flatten)]
    working_set: WorkingSetArguments,
    #[command(flatten)]
    weak_limits: WeakLimitsArgument,
    /// Let sandboxes of two tenants (sharing domains) never run on one core at a time,
    /// where cores have several hardware threads (docs/hardening.md).
    #[arg(long)]
    core_scheduling: bool,
    #[command(flatten)]
    logs: LogArguments,
    /// Serve E2B's API at this address, for its SDKs. Who may use it says e2b.toml in THAW_HOME
    /// (docs/e2b.md).
    #[arg(long, value_name = "[IP:]PORT", value_parser = parse_address)]
    e2b: Option<SocketAddr>,
    /// Send traces to this collector: OTLP over HTTP, without TLS. The variables OTEL_* say
    /// more (docs/production.md#traces); OTEL_EXPORTER_OTLP_ENDPOINT does the same as this option.
    #[arg(long, value_name = "URL")]
    otlp: Option<String>,
    /// This process was started by a monitor.
    #[arg(long = "monitored", hide = true)]
    is_monitored: bool,
}

/// How much is kept of what functions log.
#[derive(Clone, Copy, Debug, Args)]
pub struct LogArguments {
    /// Bytes of a function's log file, and of the access log's, before it is rotated.
    #[arg(long, value_name = "SIZE", default_value = "8MiB", value_parser = parse_file_max)]
    log_file_max: ByteSize,
    /// Older log files that are kept beside it: 0 to 99.
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(..=i64::from(FILES_MAX)))]
    log_files: u32,
    /// Bytes a second that a function may log for long, and four times as many at once; further
    /// lines are dropped and counted. A line takes its JSON and 128 bytes.
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = parse_log_rate)]
    log_rate: ByteSize,
}

impl LogArguments {
    /// What was asked for.
    pub fn chosen(self) -> LogLimits {
        let (file_max, rate) = (self.log_file_max.bytes(), self.log_rate.bytes());
        LogLimits { file_max, files: self.log_files, rate }
    }
}

fn parse_file_max(text: &str) -> Result<ByteSize, String> {
    bounded(text, "64KiB", "64GiB")
}

/// More would wait in the pipes of instances: they are read at 8 MiB a second.
fn parse_log_rate(text: &str) -> Result<ByteSize, String> {
    bounded(text, "1KiB", "8MiB")
}

fn bounded(text: &str, least: &str, most: &str) -> Result<ByteSize, String> {
    let parse = |text: &str| text.parse::<ByteSize>().map_err(|error| error.to_string());
    let size = parse(text)?;
    match (parse(least)?.bytes()..=parse(most)?.bytes()).contains(&size.bytes()) {
        true => Ok(size),
        false => Err(format!("it must be {least} to {most}")),
    }
}

/// Whether and how boots use recorded working sets.
#[derive(Clone, Copy, Debug, Args)]
pub struct WorkingSetArguments {
    /// Pages of the recorded working set that a boot populates.
    #[arg(long, value_enum, value_name = "PAGES", default_value = "write")]
    populate: Populate,
    /// Neither record working sets nor use them.
    #[arg(long, conflicts_with = "populate")]
    no_working_set: bool,
}

/// `--populate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Populate {
    /// None of them: mappings only.
    None,
    /// Those that were read.
    Read,
    /// Those that were written.
    Write,
    /// All of them.
    Both,
}

impl WorkingSetArguments {
    /// What was asked for.
    pub fn chosen(self) -> WorkingSetUse {
        if self.no_working_set {
            return WorkingSetUse::Off;
        }
        WorkingSetUse::Populate(match self.populate {
            Populate::None => PopulatePolicy::None,
            Populate::Read => PopulatePolicy::Read,
            Populate::Write => PopulatePolicy::Write,
            Populate::Both => PopulatePolicy::Both,
        })
    }
}

impl Arguments {
    fn options(&self) -> Result<ServeOptions, ServeError> {
        Ok(ServeOptions {
            zygotes: self.zygotes,
            max_instances: self.max_instances,
            gateway: GatewayConfig { head_timeout: self.head_timeout.0 },
            drain: self.drain.0,
            unpacked: self.unpacked,
            working_set: self.working_set.chosen(),
            weak_limits: self.weak_limits.chosen(),
            successor: Successor::None,
            cores: if self.core_scheduling { CoreSharing::Tenant } else { CoreSharing::All },
            logs: self.logs.chosen(),
            e2b: self.e2b,
            traces: TraceSettings::from_environment(self.otlp.as_deref())
                .map_err(ServeError::Traces)?,
        })
    }
}

pub fn run(arguments: &Arguments) -> Outcome {
    // Before the process loses sight of what names are looked up with.
    let options = arguments.options()?;
    inject::read_roots();
    if arguments.is_monitored {
        let Inherited { home, prepared } = monitor::become_daemon()?;
        return serve_functions(&home, &options, prepared);
    }
    if let Some(socket) = &arguments.monitor_socket {
        let Inherited { home, prepared } = monitor::connect_daemon(socket)?;
        // The monitor has already refused a host that lacks what it was told to keep.
        let options = ServeOptions {
            weak_limits: WeakLimits::Accept,
            successor: Successor::Comes,
            ..options
        };
        return serve_functions(&home, &options, prepared);
    }
    activation::take_from_environment().map_err(ServeError::from)?;
    let home = Home::from_environment()?;
    let listening = arguments.listening.chosen(&home);
    if let Some(user) = DaemonUser::for_home(&home).or_else(DaemonUser::caller)
        && let Some(code) = monitor::run(&home, &listening, options.weak_limits, user)?
    {
        return Ok(ExitCode::from(code));
    }
    if rustix::process::geteuid().is_root() {
        tracing::warn!(
            "this host has no user namespaces, or too few user ids: the daemon keeps all of root's rights"
        );
    }
    let prepared = Prepared::make(&home, &listening)?;
    serve_functions(&home, &options, prepared)
}

fn serve_functions(home: &Home, options: &ServeOptions, prepared: Prepared) -> Outcome {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(serve(home, options, prepared, announce))?;
    // Whatever still waits for a client must not keep the process for long.
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(ExitCode::SUCCESS)
}

fn announce(address: &DaemonAddress, catalog: &Catalog) {
    let count = catalog.store().list_functions().map_or(0, |list| list.records.len());
    let mut text = format!(
        "serving {count} functions on http://{}, admin API on {}",
        address.gateway, address.admin
    );
    if let Some(tcp) = address.admin_tcp {
        text += &format!(" and http://{tcp}");
    }
    if let Some(e2b) = address.e2b {
        text += &format!(", E2B's API on http://{e2b}");
    }
    if let Some(dashboard) = address.dashboard {
        text += &format!(", the dashboard on http://{dashboard}");
    }
    text.push('\n');
    // Nobody needs to read it.
    let _ = output::print(&text);
}
