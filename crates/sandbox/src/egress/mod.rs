//! Outgoing connections of sandboxes: the policy, and the sockets.
//!
//! A sandbox cannot make a socket, nor connect one. It asks; this module judges
//! the destination, connects a socket outside the sandbox and hands the
//! descriptor in. With it the sandbox can reach that destination and no other:
//! its filter has neither connect(2) nor an address for sendto(2).
//!
//! | module | what it decides |
//! | --- | --- |
//! | `rule`, `reach` | what a rule means, and who answers at an address |
//! | `rules` | what a list of rules leads to |
//! | `policy` | whether all lists that count lead to an address |
//! | `journal` | what is kept of what a sandbox has reached |
//! | `local` | whether it is the host's own, or a port of this process |
//! | `budget`, `rate` | how much the sandboxes of a function, and of a tenant, use together |
//! | `ledger` | what the next daemon is to know of them |
//! | `traffic`, `meter`, `sock_diag` | bytes: whose they are, when they are counted, how the host tells them |
//! | `names`, `dns` | what is looked up |
//! | `pool` | whose turn it is to have something done that may wait |
//! | `intercept` | which destinations a proxy on the host answers for |
//! | `socket` | all of that in order, and the connection |

mod budget;
pub(crate) mod dns;
mod events;
mod intercept;
mod journal;
mod ledger;
mod local;
mod meter;
mod names;
mod policy;
mod pool;
mod rate;
mod reach;
mod rule;
mod rules;
mod sock_diag;
mod socket;
mod traffic;

pub use budget::EgressQuota;
pub use events::{Denied, EgressEvents};
pub use intercept::{DialError, Dialer, Intercepted, Interceptor, NotTaken, Told};
pub use journal::{EgressEntry, EgressOutcome, EgressReport};
pub use local::{GuardedPort, PortGuard};
pub use meter::{
    FunctionEgressBytes, count_egress_bytes, egress_bytes_of_functions, look_at_egress_bytes,
};
pub use policy::EgressPolicy;
pub use rule::{EgressRule, EgressRuleError, Transport};
pub use rules::EgressRules;
pub(crate) use sock_diag::check as check_egress_bytes;
pub(crate) use socket::{Destination, LeftSockets, Opening, Sockets};
pub use traffic::EgressBytes;

use std::net::{Ipv6Addr, SocketAddr};

use thaw_abi::control::{FLAG_EGRESS, FLAG_EGRESS_V6};

use crate::boot::BootFlags;

impl EgressPolicy {
    /// What a sandbox is told of its network at boot.
    pub(crate) fn flags(&self) -> BootFlags {
        if self.is_closed() {
            // On the path of every boot: not even asked.
            return 0;
        }
        open_flags()
    }
}

/// What a sandbox is told that may have connections.
///
/// Its boot says so, or [`thaw_abi::control::MSG_OUTGOING`] later.
pub(crate) fn open_flags() -> BootFlags {
    if has_ipv6() { FLAG_EGRESS | FLAG_EGRESS_V6 } else { FLAG_EGRESS }
}

/// Whether the host has a route to IPv6 addresses. Asking sends nothing.
fn has_ipv6() -> bool {
    // 2001:db8::1, for documentation: as good as any global address.
    let somewhere = SocketAddr::from((Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 53));
    socket::connect(somewhere, Transport::Udp).is_ok()
}
