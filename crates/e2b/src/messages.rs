//! The messages of envd's two services, `process.Process` and `filesystem.Filesystem`, as JSON.
//!
//! They are written from the descriptors in E2B's SDKs, by the rules of Protobuf's JSON mapping
//! (protobuf.dev/programming-guides/json): names in lowerCamelCase, bytes in base64, 64-bit numbers
//! as text, a `oneof` as whichever of its fields is there. The SDKs speak no binary Protobuf, so
//! there is none here.

use super::backend::{Ended, FileKind, FileView, Happened, WantedProcess};
use super::problem::Problem;
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, UNIX_EPOCH};

/// Which process is meant.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Selector {
    /// By its number.
    pub pid: Option<u32>,
    /// By the name that whoever started it has given.
    pub tag: Option<String>,
}

/// Program, arguments, environment and directory.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessConfig {
    /// The program.
    pub cmd: String,
    /// Its arguments.
    pub args: Vec<String>,
    /// Environment.
    pub envs: BTreeMap<String, String>,
    /// Working directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

/// Size of a terminal.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Size {
    /// Columns.
    pub cols: u32,
    /// Rows.
    pub rows: u32,
}

/// A terminal.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Pty {
    /// Its size.
    pub size: Size,
}

impl Pty {
    /// Rows and columns.
    pub fn rows_and_columns(self) -> (u16, u16) {
        let bounded = |count: u32| u16::try_from(count).unwrap_or(u16::MAX);
        (bounded(self.size.rows), bounded(self.size.cols))
    }
}

/// `Start`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct StartRequest {
    /// What is wanted.
    pub process: ProcessConfig,
    /// Its terminal.
    pub pty: Option<Pty>,
    /// A name for it.
    pub tag: Option<String>,
    /// Whether its standard input is open; it is if that is not said.
    pub stdin: Option<bool>,
}

/// `Connect`, `SendSignal`, `CloseStdin`, `Update`, `SendInput`: all fields of them.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ProcessRequest {
    /// Which process.
    pub process: Selector,
    /// A signal: its name or its number.
    pub signal: Value,
    /// A terminal's new size.
    pub pty: Option<Pty>,
    /// Bytes for it.
    pub input: Input,
}

/// Bytes for standard input or a terminal.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Input {
    /// For standard input.
    pub stdin: Option<String>,
    /// For the terminal.
    pub pty: Option<String>,
}

impl Input {
    /// The bytes.
    ///
    /// # Errors
    /// They are no base64.
    pub fn bytes(&self) -> Result<Vec<u8>, Problem> {
        let text = self.stdin.as_deref().or(self.pty.as_deref()).unwrap_or_default();
        let bare = text.trim_end_matches('=');
        let decoded = STANDARD_NO_PAD.decode(bare).or_else(|_| URL_SAFE_NO_PAD.decode(bare));
        decoded.map_err(|error| Problem::invalid(format!("`input` is no base64: {error}")))
    }
}

/// `StreamInput`: one of its fields is there.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct StreamInputRequest {
    /// The first message: which process.
    pub start: Option<ProcessRequest>,
    /// The others: bytes for it.
    pub data: Option<ProcessRequest>,
}

/// The number of a signal.
///
/// # Errors
/// It is none that the API knows.
pub fn signal(value: &Value) -> Result<u32, Problem> {
    match (value.as_str(), value.as_u64()) {
        (Some("SIGNAL_SIGKILL"), _) | (_, Some(9)) => Ok(9),
        (Some("SIGNAL_SIGTERM"), _) | (_, Some(15)) => Ok(15),
        _ => Err(Problem::invalid(format!(
            "{value} is no signal of this API; send SIGNAL_SIGTERM or SIGNAL_SIGKILL"
        ))),
    }
}

fn event(name: &str, value: Value) -> Value {
    json!({"event": {name: value}})
}

/// The first event of a process.
pub fn started(pid: u32) -> Value {
    event("start", json!({"pid": pid}))
}

/// Bytes that it has printed to `stdout`, `stderr` or its `pty`.
pub fn printed(stream: &str, bytes: &[u8]) -> Value {
    event("data", json!({stream: STANDARD.encode(bytes)}))
}

/// Nothing has happened for a while.
pub fn keep_alive() -> Value {
    event("keepalive", json!({}))
}

/// The last event of a process. Codes and texts are those of Go's `os.ProcessState`, which envd
/// shows.
pub fn ended(ended: Ended) -> Value {
    let (code, status) = match ended {
        Ended::Code(code) => (i32::from(code), format!("exit status {code}")),
        Ended::Signal(number) => (-1, format!("signal: {}", signal_name(number))),
    };
    let exited = matches!(ended, Ended::Code(_));
    let mut end = json!({"exitCode": code, "exited": exited, "status": status});
    if code != 0 {
        end["error"] = json!(status);
    }
    event("end", end)
}

fn signal_name(number: u8) -> String {
    match i32::from(number) {
        libc::SIGHUP => "hangup".to_owned(),
        libc::SIGINT => "interrupt".to_owned(),
        libc::SIGABRT => "aborted".to_owned(),
        libc::SIGKILL => "killed".to_owned(),
        libc::SIGSEGV => "segmentation fault".to_owned(),
        libc::SIGPIPE => "broken pipe".to_owned(),
        libc::SIGTERM => "terminated".to_owned(),
        _ => format!("signal {number}"),
    }
}

/// A process in a list.
pub fn process_info(pid: u32, wanted: &WantedProcess) -> Value {
    let (cmd, args) = wanted.argv.split_first().map_or(("", &[][..]), |(a, b)| (a.as_str(), b));
    let config = ProcessConfig {
        cmd: cmd.to_owned(),
        args: args.to_vec(),
        envs: wanted.envs.clone(),
        cwd: wanted.cwd.clone(),
    };
    let mut info = json!({"config": config, "pid": pid});
    if let Some(tag) = &wanted.tag {
        info["tag"] = json!(tag);
    }
    info
}

/// `Stat`, `MakeDir`, `Remove`, `ListDir`, `Move`: all fields of them.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct FileRequest {
    /// The file.
    pub path: String,
    /// How deep a list goes; 0 is 1.
    pub depth: u32,
    /// What is moved.
    pub source: String,
    /// Where to.
    pub destination: String,
    /// Whether directories in the one that is watched are watched, too.
    pub recursive: bool,
    /// What is told beside an event.
    pub include_entry: bool,
    /// The watcher.
    pub watcher_id: String,
}

/// Something that has happened in a directory.
pub fn file_event(what: Happened, name: &str) -> Value {
    let kind = match what {
        Happened::Created => "EVENT_TYPE_CREATE",
        Happened::Written => "EVENT_TYPE_WRITE",
        Happened::Removed => "EVENT_TYPE_REMOVE",
        Happened::Renamed => "EVENT_TYPE_RENAME",
        Happened::Changed => "EVENT_TYPE_CHMOD",
    };
    json!({"name": name, "type": kind})
}

/// Names of users and groups.
#[derive(Clone, Debug, Default)]
pub struct Names {
    /// By the number of a user.
    pub users: BTreeMap<u32, String>,
    /// By the number of a group.
    pub groups: BTreeMap<u32, String>,
}

/// The last second of the year 9999, since 1970: RFC 3339 ends there.
const LAST_SECOND: u64 = 253_402_300_799;

/// `EntryInfo`: a file. `target` is what a link leads to, and what that is.
pub fn entry(
    path: &str,
    file: &FileView,
    target: Option<(String, FileKind)>,
    names: &Names,
) -> Value {
    let kind = target.as_ref().map_or(file.kind, |(_, kind)| *kind);
    let number = |names: &BTreeMap<u32, String>, id: u32| {
        names.get(&id).cloned().unwrap_or_else(|| id.to_string())
    };
    // Programs set any time; those beyond the year 9999 cannot be written.
    let mtime = u64::try_from(file.mtime).ok().filter(|seconds| *seconds <= LAST_SECOND);
    let seconds = Duration::from_secs(mtime.unwrap_or(0));
    let mut entry = json!({
        "name": path.rsplit('/').next().unwrap_or_default(),
        "type": kind_name(kind),
        "path": path,
        "size": file.size.to_string(),
        "mode": file.mode & 0o777,
        "permissions": permissions(file),
        "owner": number(&names.users, file.uid),
        "group": number(&names.groups, file.gid),
        "modifiedTime": humantime::format_rfc3339_seconds(UNIX_EPOCH + seconds).to_string(),
    });
    if let Some((target, _)) = target {
        entry["symlinkTarget"] = json!(target);
        entry["isSymlink"] = json!(true);
    }
    entry
}

fn kind_name(kind: FileKind) -> &'static str {
    match kind {
        FileKind::File => "FILE_TYPE_FILE",
        FileKind::Directory => "FILE_TYPE_DIRECTORY",
        FileKind::Link => "FILE_TYPE_SYMLINK",
        FileKind::Other => "FILE_TYPE_UNSPECIFIED",
    }
}

/// As Go's `fs.FileMode` writes them, which envd shows.
fn permissions(file: &FileView) -> String {
    let mut text = match file.kind {
        FileKind::Directory => "d",
        FileKind::Link => "L",
        FileKind::File | FileKind::Other => "-",
    }
    .to_owned();
    for shift in [6, 3, 0] {
        for (bit, letter) in [(4, 'r'), (2, 'w'), (1, 'x')] {
            text.push(if file.mode >> shift & bit != 0 { letter } else { '-' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<T: for<'de> Deserialize<'de>>(value: Value) -> T {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn files_may_have_any_time() {
        let names = Names { users: BTreeMap::new(), groups: BTreeMap::new() };
        let file = FileView {
            name: "x".to_owned(),
            kind: FileKind::File,
            size: 0,
            mode: 0o644,
            uid: 0,
            gid: 0,
            mtime: 0,
        };
        for (mtime, shown) in [
            (253_402_300_799, "9999-12-31T23:59:59Z"),
            (253_402_300_800, "1970-01-01T00:00:00Z"),
            (i64::MAX, "1970-01-01T00:00:00Z"),
            (i64::MIN, "1970-01-01T00:00:00Z"),
        ] {
            let file = FileView { mtime, ..file.clone() };
            assert_eq!(entry("/x", &file, None, &names)["modifiedTime"], shown);
        }
    }

    #[test]
    fn requests_are_read_as_the_sdks_write_them() {
        // As `connectrpc` of E2B's Python SDK 2.63 writes them.
        let start: StartRequest = read(json!({
            "process": {"cmd": "/bin/bash", "args": ["-l", "-c", "id"], "envs": {"A": "b"}, "cwd": "/"},
            "pty": {"size": {"cols": 80, "rows": 24}}, "stdin": false,
        }));
        assert_eq!(start.process.args, ["-l", "-c", "id"]);
        assert_eq!(start.pty.unwrap().rows_and_columns(), (24, 80));
        let input: ProcessRequest =
            read(json!({"process": {"pid": 7}, "input": {"stdin": "aGk="}}));
        assert_eq!(input.process.pid, Some(7));
        assert_eq!(input.input.bytes().unwrap(), b"hi");
        let input = Input { pty: Some("_-8".to_owned()), ..Input::default() };
        assert_eq!(input.bytes().unwrap(), [0xff, 0xef]);
        assert!(Input { pty: Some("%".to_owned()), stdin: None }.bytes().is_err());
        let many = Pty { size: Size { cols: 1 << 20, rows: 1 } };
        assert_eq!(many.rows_and_columns(), (1, u16::MAX));
    }

    #[test]
    fn signals_are_those_of_the_api() {
        for (value, number) in [
            (json!("SIGNAL_SIGKILL"), Some(9)),
            (json!(9), Some(9)),
            (json!("SIGNAL_SIGTERM"), Some(15)),
            (json!(11), None),
            (json!("SIGNAL_UNSPECIFIED"), None),
            (Value::Null, None),
        ] {
            assert_eq!(signal(&value).ok(), number, "{value}");
        }
    }

    #[test]
    fn ends_are_shown_as_envd_shows_them() {
        let end = |ended_so| ended(ended_so)["event"]["end"].clone();
        assert_eq!(
            end(Ended::Code(0)),
            json!({"exitCode": 0, "exited": true, "status": "exit status 0"})
        );
        let failed = end(Ended::Code(3));
        assert_eq!((&failed["exitCode"], &failed["error"]), (&json!(3), &json!("exit status 3")));
        let killed = end(Ended::Signal(9));
        assert_eq!(killed["exitCode"], -1);
        assert_eq!(
            (&killed["exited"], &killed["error"]),
            (&json!(false), &json!("signal: killed"))
        );
    }

    #[test]
    fn files_are_shown_as_envd_shows_them() {
        let file = FileView {
            name: "x".to_owned(),
            kind: FileKind::File,
            size: 1 << 40,
            mode: 0o4751,
            uid: 0,
            gid: 5,
            mtime: 1_700_000_000,
        };
        let names = Names { users: [(0, "root".to_owned())].into(), groups: BTreeMap::new() };
        let shown = entry("/a/x", &file, None, &names);
        assert_eq!(shown["name"], "x");
        assert_eq!(shown["size"], "1099511627776");
        assert_eq!((&shown["mode"], &shown["permissions"]), (&json!(0o751), &json!("-rwxr-x--x")));
        assert_eq!((&shown["owner"], &shown["group"]), (&json!("root"), &json!("5")));
        assert_eq!(shown["modifiedTime"], "2023-11-14T22:13:20Z");
        let link = FileView { kind: FileKind::Link, ..file };
        let target = Some(("/b".to_owned(), FileKind::Directory));
        let shown = entry("/a/x", &link, target, &names);
        assert_eq!(
            (&shown["type"], &shown["isSymlink"]),
            (&json!("FILE_TYPE_DIRECTORY"), &json!(true))
        );
        assert_eq!(shown["symlinkTarget"], "/b");
    }
}
