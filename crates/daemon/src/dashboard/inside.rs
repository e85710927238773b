//! What a sandbox says of itself: processes and listening ports, from the files of its `/proc`.
//!
//! The sandbox is not trusted: what it says is bounded here, and escaped by the page.

use std::sync::Arc;
use std::time::Duration;
use thaw_node::remote::files::FileSession;
use thaw_node::service::Service;
use tokio::time::timeout;

/// Processes that are looked at.
const PROCESSES_MAX: usize = 64;
/// Ports that are shown.
const PORTS_MAX: usize = 64;
/// Bytes of a file of `/proc`.
const FILE_MAX: usize = 64 << 10;
/// Characters of a command line.
const COMMAND_MAX: usize = 200;
/// How long all of it may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// A process in a sandbox.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Process {
    pub pid: u32,
    pub parent: String,
    pub state: String,
    pub threads: String,
    pub command: String,
}

/// What a sandbox says.
#[derive(Debug, Default)]
pub(super) struct Inside {
    pub processes: Vec<Process>,
    /// Port, and address.
    pub ports: Vec<(u16, String)>,
    /// Why there is nothing.
    pub problem: Option<String>,
}

/// Looks into a sandbox. It must not be asleep or hibernated: looking would wake it.
pub(super) async fn look(service: &Arc<Service>, id: u64) -> Inside {
    match timeout(PATIENCE, read(service, id)).await {
        Ok(Ok(inside)) => inside,
        Ok(Err(problem)) => Inside { problem: Some(problem), ..Inside::default() },
        Err(_) => {
            let problem = "it did not say within two seconds what is in it".to_owned();
            Inside { problem: Some(problem), ..Inside::default() }
        }
    }
}

async fn read(service: &Arc<Service>, id: u64) -> Result<Inside, String> {
    let mut session = service.files(id, "").await?;
    let entries = session.list("/proc").await.map_err(|error| error.to_string())?;
    let mut pids: Vec<u32> = entries.iter().filter_map(|entry| entry.name.parse().ok()).collect();
    pids.sort_unstable();
    let mut inside = Inside::default();
    for pid in pids.into_iter().take(PROCESSES_MAX) {
        // One that has ended meanwhile is left out.
        let Some(status) = contents(&mut session, &format!("/proc/{pid}/status")).await else {
            continue;
        };
        let line = contents(&mut session, &format!("/proc/{pid}/cmdline")).await;
        inside.processes.push(process(pid, &status, &line.unwrap_or_default()));
    }
    for file in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let text = contents(&mut session, file).await.unwrap_or_default();
        inside.ports.extend(listening(&text));
    }
    inside.ports.sort();
    inside.ports.dedup();
    inside.ports.truncate(PORTS_MAX);
    Ok(inside)
}

/// The beginning of a file.
async fn contents(session: &mut FileSession, path: &str) -> Option<String> {
    session.read_up_to(path, FILE_MAX as u64).await.ok()?;
    let mut bytes = Vec::new();
    while let Some(piece) = session.next_piece(path).await.ok()? {
        if bytes.len() < FILE_MAX {
            bytes.extend_from_slice(&piece);
        }
    }
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// A process from its `status` and `cmdline` (proc(5)).
fn process(pid: u32, status: &str, line: &str) -> Process {
    let field = |name: &str| {
        let found = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        found.unwrap_or_default().trim().chars().take(32).collect::<String>()
    };
    let command = match line.trim_end_matches('\0') {
        "" => format!("[{}]", field("Name")),
        line => line.replace('\0', " "),
    };
    Process {
        pid,
        parent: field("PPid"),
        state: field("State"),
        threads: field("Threads"),
        command: command.chars().take(COMMAND_MAX).collect(),
    }
}

/// Ports that are listened on, of `/proc/net/tcp` (proc(5)): state 0A.
fn listening(text: &str) -> Vec<(u16, String)> {
    let of_line = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        let (address, port) = fields.next()?.split_once(':')?;
        let state = fields.nth(1)?;
        let port = u16::from_str_radix(port, 16).ok()?;
        (state == "0A").then(|| (port, shown(address)))
    };
    text.lines().skip(1).filter_map(of_line).take(PORTS_MAX).collect()
}

/// An address of `/proc/net/tcp`: words of 32 bits in the order of this machine.
fn shown(hex: &str) -> String {
    let bytes: Option<Vec<u8>> = (0..hex.len() / 2)
        .map(|index| u8::from_str_radix(hex.get(index * 2..index * 2 + 2)?, 16).ok())
        .collect();
    let bytes = bytes.unwrap_or_default();
    let swapped: Vec<u8> = bytes.chunks(4).flat_map(|word| word.iter().rev().copied()).collect();
    if let Ok(four) = <[u8; 4]>::try_from(&swapped[..]) {
        return std::net::Ipv4Addr::from(four).to_string();
    }
    <[u8; 16]>::try_from(&swapped[..])
        .map_or_else(|_| "?".to_owned(), |six| std::net::Ipv6Addr::from(six).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_those_that_are_listened_on() {
        let text = "  sl  local_address rem_address   st\n\
                    0: 0100007F:1F90 00000000:0000 0A 0\n\
                    1: 0100007F:1F91 0100007F:0001 01 0\n\
                    2: 00000000000000000000000001000000:0050 0:0 0A\n\
                    nonsense\n3: zz:zz 0:0 0A\n";
        let found = listening(text);
        assert_eq!(found, [(8080, "127.0.0.1".to_owned()), (80, "::1".to_owned())]);
    }

    #[test]
    fn processes_are_read_whatever_the_sandbox_writes() {
        let status = "Name:\tsh\nState:\tS (sleeping)\nPPid:\t1\nThreads:\t1\n";
        let found = process(7, status, "sh\0-c\0x\0");
        assert_eq!((found.command.as_str(), found.parent.as_str()), ("sh -c x", "1"));
        assert_eq!(process(1, status, "").command, "[sh]");
        let long = process(1, "", &"x".repeat(1 << 20));
        assert_eq!((long.command.len(), long.state.as_str()), (COMMAND_MAX, ""));
    }
}
