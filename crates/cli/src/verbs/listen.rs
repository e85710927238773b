//! Where a node is reached, which several verbs are told.

use clap::Args;
use std::net::SocketAddr;
use std::path::PathBuf;
use thaw_node::daemon::{AdminOptions, ListenOptions};
use thaw_node::home::Home;

/// The addresses of a node.
#[derive(Clone, Debug, Args)]
pub struct ListenArguments {
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
}

impl ListenArguments {
    /// What was asked for.
    pub fn chosen(&self, home: &Home) -> ListenOptions {
        let admin = self.admin.map(|address| AdminOptions {
            address,
            token_file: self.admin_token_file.clone().unwrap_or_else(|| home.admin_token()),
            names: self.admin_name.clone(),
        });
        ListenOptions { gateway: self.listen, admin }
    }
}
