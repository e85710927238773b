//! Where a node is reached, which several verbs are told.

use clap::{ArgGroup, Args};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use thaw_daemon::activation;
use thaw_daemon::daemon::{AdminOptions, ListenOptions};
use thaw_home::config::parse_address;
use thaw_home::home::Home;

/// Where the gateway listens if nobody says.
const GATEWAY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080);

/// The addresses of a node.
#[derive(Clone, Debug, Args)]
#[command(group(ArgGroup::new("over_tcp").args(["admin", "dashboard"]).multiple(true)))]
pub struct ListenArguments {
    /// Address of the gateway, which finds the function by the Host header [default: that of
    /// the first socket of the service manager, or 127.0.0.1:8080]. A port alone is one of 127.0.0.1.
    #[arg(long, value_name = "[IP:]PORT", value_parser = parse_address)]
    listen: Option<SocketAddr>,
    /// Serve the admin API over TCP, too, to clients that show the token in
    /// --admin-token-file as `Authorization: Bearer TOKEN`. Without this it is served
    /// on $THAW_HOME/admin.sock only, to this user and root.
    #[arg(long, value_name = "[IP:]PORT", value_parser = parse_address)]
    admin: Option<SocketAddr>,
    /// Serve the dashboard, a page for browsers, at this address; who knows the token in
    /// --admin-token-file may log in (docs/dashboard.md).
    #[arg(long, value_name = "[IP:]PORT", value_parser = parse_address)]
    dashboard: Option<SocketAddr>,
    /// File with the token of the admin API over TCP and of the dashboard, made if missing; default:
    /// $THAW_HOME/admin.token.
    #[arg(long, value_name = "FILE", requires = "over_tcp")]
    admin_token_file: Option<PathBuf>,
    /// A host name under which clients know the admin API over TCP or the dashboard, beside
    /// addresses and localhost; may be given several times.
    #[arg(long, value_name = "NAME", requires = "over_tcp")]
    admin_name: Vec<String>,
}

impl ListenArguments {
    /// What was asked for.
    pub fn chosen(&self, home: &Home) -> ListenOptions {
        let at = |address| AdminOptions {
            address,
            token_file: self.admin_token_file.clone().unwrap_or_else(|| home.admin_token()),
            names: self.admin_name.clone(),
        };
        ListenOptions {
            gateway: self.listen.or_else(activation::first_address).unwrap_or(GATEWAY),
            admin: self.admin.map(at),
            dashboard: self.dashboard.map(at),
        }
    }
}
