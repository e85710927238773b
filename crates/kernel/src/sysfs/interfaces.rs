//! `/sys/class/net` (sysfs-class-net of the kernel's ABI documents): the network interfaces. Nothing is counted:
//! packets do not exist here.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;

use crate::errno::Result;
use crate::fs::inode::{FileType, Inode};
use crate::fs::pseudo::{Directory, Fixed, Generated, Item, Names, Place, directory, text};
use crate::net::interfaces::{Interface, all};

/// The directory with one for each interface.
pub struct Interfaces;

impl Names for Interfaces {
    fn lookup(&self, name: &[u8], place: &Place) -> Result<Option<Arc<dyn Inode>>> {
        let found = all().into_iter().find(|interface| interface.name.as_bytes() == name);
        Ok(found.map(|Interface { name, .. }| {
            Directory::new(place.below(name.as_bytes()), Files { name }) as Arc<dyn Inode>
        }))
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
        all().iter().for_each(|found| emit(found.name.as_bytes(), FileType::Directory));
        Ok(())
    }
}

/// What is the same of all interfaces.
const FIXED: &[Item] = &[
    text("addr_len", "6\n"),
    text("carrier", "1\n"),
    text("carrier_changes", "0\n"),
    text("dev_id", "0x0\n"),
    text("dormant", "0\n"),
    text("link_mode", "0\n"),
    directory("statistics", STATISTICS),
    text("tx_queue_len", "1000\n"),
];

const STATISTICS: &[Item] = &[
    text("collisions", "0\n"),
    text("multicast", "0\n"),
    text("rx_bytes", "0\n"),
    text("rx_dropped", "0\n"),
    text("rx_errors", "0\n"),
    text("rx_packets", "0\n"),
    text("tx_bytes", "0\n"),
    text("tx_dropped", "0\n"),
    text("tx_errors", "0\n"),
    text("tx_packets", "0\n"),
];

/// What is the interface's own, and what it says.
type Line = fn(&Interface) -> String;
const OWN: &[(&str, Line)] = &[
    ("address", |interface| hardware(interface.hardware)),
    ("broadcast", |interface| hardware(interface.hardware_broadcast)),
    ("flags", |interface| format!("{:#x}", interface.flags & !STATE_FLAGS)),
    ("ifindex", |interface| interface.index.to_string()),
    ("iflink", |interface| interface.index.to_string()),
    ("mtu", |interface| interface.mtu.to_string()),
    ("operstate", |interface| state(interface.state).to_string()),
    ("type", |interface| interface.kind.to_string()),
    ("uevent", |interface| format!("INTERFACE={}\nIFINDEX={}", interface.name, interface.index)),
];

/// `IFF_RUNNING`, `IFF_LOWER_UP` and `IFF_DORMANT` (linux/if.h), which are no settings.
const STATE_FLAGS: u32 = 0x40 | 0x10000 | 0x20000;

fn hardware(address: [u8; 6]) -> String {
    address.map(|byte| format!("{byte:02x}")).join(":")
}

/// `IF_OPER_*` (linux/if.h), as sysfs has it.
fn state(state: u8) -> &'static str {
    match state {
        6 => "up",
        2 => "down",
        _ => "unknown",
    }
}

/// The files of one interface.
struct Files {
    name: &'static str,
}

impl Names for Files {
    fn lookup(&self, name: &[u8], place: &Place) -> Result<Option<Arc<dyn Inode>>> {
        let Some((_, line)) = OWN.iter().find(|(own, _)| own.as_bytes() == name) else {
            return Fixed(FIXED).lookup(name, place);
        };
        let (interface, line) = (self.name, *line);
        Ok(Some(Generated::read_only(place.below(name), move || {
            // One that has gone meanwhile says nothing.
            let found = all().into_iter().find(|found| found.name == interface);
            Ok(found.map_or_else(String::new, |found| line(&found) + "\n").into_bytes())
        })))
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
        OWN.iter().for_each(|(name, _)| emit(name.as_bytes(), FileType::Regular));
        Fixed(FIXED).list(emit)
    }
}
