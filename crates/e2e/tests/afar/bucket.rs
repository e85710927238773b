//! Functions in a bucket of an object store.

use super::{PATIENCE, Rig, source};
use serde_json::Value;
use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use thaw_e2e::{
    Daemon, DaemonOptions, Outcome, built_home, free_port, get, repository, run_within, skip, thaw,
    wait_until,
};

/// `moto`, as `scripts/setup` installs it.
struct ObjectStore {
    child: Child,
    address: SocketAddr,
}

fn moto() -> Option<PathBuf> {
    let installed = repository().join("target/moto/bin/moto_server");
    let named = std::env::var_os("THAW_MOTO").map(PathBuf::from);
    [named, Some(installed)].into_iter().flatten().find(|path| path.is_file())
}

impl ObjectStore {
    /// One with a bucket `functions`; `None`: there is no such program here.
    fn start() -> Option<Self> {
        let program = moto()?;
        let port = free_port();
        let mut command = Command::new(program);
        command.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("moto");
        let store = Self { child, address: ([127, 0, 0, 1], port).into() };
        wait_until("the object store listens", || TcpStream::connect(store.address).is_ok());
        let made = ureq::put(format!("http://{}/functions", store.address)).send_empty();
        assert!(made.expect("a bucket").status().is_success());
        Some(store)
    }

    fn command(&self, home: &Path, arguments: &[&str]) -> Command {
        let mut command = thaw();
        command.env("THAW_HOME", home).args(arguments);
        command.env("AWS_ENDPOINT_URL", format!("http://{}", self.address));
        command.env("AWS_ACCESS_KEY_ID", "thaw").env("AWS_SECRET_ACCESS_KEY", "secret");
        command
    }

    fn run(&self, home: &Path, arguments: &[&str]) -> Outcome {
        run_within(PATIENCE, &mut self.command(home, arguments), b"")
    }
}

impl Drop for ObjectStore {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn json(outcome: Outcome) -> Value {
    serde_json::from_str(&outcome.success()).expect("JSON")
}

#[test]
fn a_bucket_takes_the_place_of_a_registry() {
    let Some(store) = ObjectStore::start() else {
        return skip("there is no moto_server; scripts/setup installs it");
    };
    let image = "s3://functions/team/far:1";
    let pushed = json(store.run(source(), &["push", "far", image, "--json"]));
    assert_eq!(pushed["sent"], pushed["bytes"]);
    let again = json(store.run(source(), &["push", "far", image, "--json"]));
    assert_eq!((&again["sent"], &again["digest"]), (&0.into(), &pushed["digest"]));

    let home = built_home("afar-bucket", &[]);
    let missing = store.run(&home, &["pull", "s3://functions/team/near:1"]);
    assert_eq!(missing.code, Some(1));
    assert!(missing.stderr.contains("s3://functions has no such image"), "{}", missing.stderr);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let pulled = json(store.run(&home, &["pull", image, "--lazy", "--json"]));
    assert_eq!((&pulled["digest"], &pulled["refrozen"]), (&pushed["digest"], &Value::Null));
    Rig::is_whole_in(&home, &|path| get(daemon.gateway(), "far", path));
    // By its digest, too.
    let digest = pushed["digest"].as_str().expect("a digest");
    let by_digest = format!("s3://functions/team/far@{digest}");
    let other = built_home("afar-bucket-other", &[]);
    assert_eq!(json(store.run(&other, &["pull", &by_digest, "--json"]))["digest"], digest);
    // Nothing is asked of a bucket that is nowhere.
    let nowhere = "[[registry]]\nhost = \"s3://functions\"\nendpoint = \"nowhere\"\n";
    fs::write(other.join("registries.toml"), nowhere).expect("registries.toml");
    let refused = store.run(&other, &["pull", image]);
    assert!(refused.stderr.contains("is no address"), "{}", refused.stderr);
}
