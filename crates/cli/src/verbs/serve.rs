//! `thaw serve`: the daemon.

use super::limits::WeakLimitsArgument;
use crate::failure::Outcome;
use crate::output;
use clap::{Args, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use thaw_node::catalog::Catalog;
use thaw_node::config::TimeSpan;
use thaw_node::daemon::{AdminOptions, Prepared, ServeOptions, serve};
use thaw_node::gateway::GatewayConfig;
use thaw_node::home::{DaemonAddress, Home};
use thaw_node::instance::WorkingSetUse;
use thaw_node::monitor::{self, DaemonUser, Inherited};
use thaw_sandbox::PopulatePolicy;

/// Serve the built functions over HTTP.
///
/// Runs in the foreground. SIGTERM and SIGINT end it after the requests that
/// are being served; SIGHUP looks for new builds and for
/// new quotas of tenants (thaw tenants --help).
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw serve --listen 127.0.0.1:8080\n  \
    curl http://127.0.0.1:8080/ -H 'Host: hello-python'")]
pub struct Arguments {
    /// Address of the gateway, which finds the function by the Host header.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// Serve the admin API over TCP, too, to clients that show the token in
    /// --admin-token-file as `Authorization: Bearer TOKEN`. Without this it is served
    /// on $THAW_HOME/admin.sock only, to this user and root.
    #[arg(long, value_name = "ADDR")]
    admin: Option<SocketAddr>,
    /// File with the token of the admin API over TCP, made if missing; default:
    /// $THAW_HOME/admin.token.
    #[arg(long, value_name = "FILE", requires = "admin")]
    admin_token_file: Option<PathBuf>,
    /// A host name under which clients know the admin API over TCP, beside addresses and
    /// localhost; may be given several times.
    #[arg(long, value_name = "NAME", requires = "admin")]
    admin_name: Vec<String>,
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
    #[command(flatten)]
    working_set: WorkingSetArguments,
    #[command(flatten)]
    weak_limits: WeakLimitsArgument,
    /// This process was started by a monitor.
    #[arg(long = "monitored", hide = true)]
    is_monitored: bool,
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
    fn admin_options(&self, address: SocketAddr, home: &Home) -> AdminOptions {
        AdminOptions {
            address,
            token_file: self.admin_token_file.clone().unwrap_or_else(|| home.admin_token()),
            names: self.admin_name.clone(),
        }
    }
}

impl Arguments {
    fn options(&self, home: &Home) -> ServeOptions {
        ServeOptions {
            listen: self.listen,
            admin: self.admin.map(|address| self.admin_options(address, home)),
            zygotes: self.zygotes,
            max_instances: self.max_instances,
            gateway: GatewayConfig { head_timeout: self.head_timeout.0 },
            drain: self.drain.0,
            working_set: self.working_set.chosen(),
            weak_limits: self.weak_limits.chosen(),
        }
    }
}

pub fn run(arguments: &Arguments) -> Outcome {
    if arguments.is_monitored {
        let Inherited { home, prepared } = monitor::become_daemon()?;
        return serve_functions(&home, &arguments.options(&home), prepared);
    }
    let home = Home::from_environment()?;
    let options = arguments.options(&home);
    if let Some(user) = DaemonUser::for_home(&home).or_else(DaemonUser::caller)
        && let Some(code) = monitor::run(&home, &options, user)?
    {
        return Ok(ExitCode::from(code));
    }
    if rustix::process::geteuid().is_root() {
        tracing::warn!(
            "this host has no user namespaces, or too few user ids: the daemon keeps all of root's rights"
        );
    }
    let prepared = Prepared::make(&home, &options)?;
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
    text.push('\n');
    // Nobody needs to read it.
    let _ = output::print(&text);
}
