//! Images at rest: a function whose image is packed is served as before, whatever happens while it
//! is unpacked.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use thaw_e2e::wait_until;
use thaw_e2e::{Daemon, DaemonOptions, Function, built_home, copy_home, get, run, skip, thaw};

const NAME: &str = "hello-c";

fn command(home: &Path, arguments: &[&str]) -> String {
    run(thaw().env("THAW_HOME", home).args(arguments)).success()
}

/// The image of the function, as `thaw images` shows it.
fn image(home: &Path) -> Value {
    let all: Value = serde_json::from_str(&command(home, &["images", "--json"])).expect("JSON");
    let is_its = |image: &&Value| image["functions"] == serde_json::json!([NAME]);
    all.as_array().expect("a list").iter().find(is_its).expect("an image").clone()
}

fn form(home: &Path) -> String {
    image(home)["form"].as_str().expect("a word").to_owned()
}

/// A store with a function whose image is packed.
fn packed_home(label: &str) -> PathBuf {
    let home = built_home(label, &[Function::Example(NAME)]);
    let before = image(&home)["allocated"].as_u64().expect("bytes");
    assert_eq!(form(&home), "whole");
    let said: Value = serde_json::from_str(&command(&home, &["pack", "--json"])).expect("JSON");
    assert_eq!((&said["packed"], &said["left"]), (&1.into(), &0.into()), "{said}");
    assert_eq!(form(&home), "packed");
    assert!(image(&home)["allocated"].as_u64().expect("bytes") < before / 2);
    home
}

fn packed_file(home: &Path) -> PathBuf {
    let name = image(home)["image"].as_str().expect("a name").to_owned();
    home.join("store/images").join(format!("{name}.packed"))
}

fn serve(home: &Path, unpacked: &str) -> Daemon {
    let arguments = vec!["--unpacked".to_owned(), unpacked.to_owned()];
    Daemon::start(home, &DaemonOptions { arguments })
}

#[test]
fn packed_booted_packed_again_and_booted_again() {
    let home = packed_home("pack-again");
    // Room for nothing: what nobody uses is packed.
    let daemon = serve(&home, "1B");
    assert_eq!(form(&home), "packed", "the image was opened before somebody needed it");
    for turn in 0..2 {
        let answer = get(daemon.gateway(), NAME, "/");
        assert_eq!(answer.status, 200, "turn {turn}: {}", answer.text());
        wait_until("the image is packed again", || form(&home) == "packed");
    }
    daemon.stop();
    let daemon = serve(&home, "1GiB");
    assert_eq!(get(daemon.gateway(), NAME, "/").status, 200);
    assert_eq!(form(&home), "both");
    // It is in use: that a daemon has it open is enough.
    let said: Value = serde_json::from_str(&command(&home, &["pack", "--json"])).expect("JSON");
    assert_eq!((&said["packed"], &said["in_use"]), (&0.into(), &1.into()), "{said}");
    assert_eq!(get(daemon.gateway(), NAME, "/").status, 200);
}

#[test]
fn many_who_ask_at_once_are_all_answered() {
    let home = packed_home("pack-many");
    let daemon = serve(&home, "1GiB");
    std::thread::scope(|scope| {
        let ask = || scope.spawn(|| get(daemon.gateway(), NAME, "/").status);
        let all: Vec<_> = (0..8).map(|_| ask()).collect();
        all.into_iter().for_each(|one| assert_eq!(one.join().expect("an answer"), 200));
    });
    assert_eq!(form(&home), "both");
}

#[test]
fn a_daemon_that_is_killed_while_it_unpacks_loses_nothing() {
    let home = packed_home("pack-killed");
    for turn in 0..6 {
        let daemon = serve(&home, "1GiB");
        let gateway = daemon.gateway();
        let asker = std::thread::spawn(move || {
            let mut raw = thaw_e2e::Raw::connect(gateway);
            raw.send("GET / HTTP/1.1\r\nHost: hello-c\r\nConnection: close\r\n\r\n");
            std::thread::sleep(std::time::Duration::from_millis(20));
        });
        std::thread::sleep(std::time::Duration::from_millis(turn * 3));
        daemon.kill();
        let _ = asker.join();
        drop(daemon);
        let daemon = serve(&home, "1GiB");
        let answer = get(daemon.gateway(), NAME, "/");
        assert_eq!(answer.status, 200, "{}", answer.text());
        daemon.stop();
        // What the daemon has started may have the image open a moment longer.
        wait_until("the image is packed", || {
            command(&home, &["pack"]);
            form(&home) == "packed"
        });
    }
    let left = fs::read_dir(home.join("store/tmp")).expect("a directory").count();
    assert_eq!(left, 0);
}

#[test]
fn a_damaged_one_is_told_and_frozen_anew() {
    let home = packed_home("pack-damaged");
    let path = packed_file(&home);
    let mut bytes = fs::read(&path).expect("a packed image");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 16;
    fs::remove_file(&path).expect("it is removable");
    fs::write(&path, bytes).expect("it is writable");
    let owner = fs::metadata(home.join("store")).expect("a store");
    use std::os::unix::fs::{MetadataExt, chown};
    chown(&path, Some(owner.uid()), Some(owner.gid())).expect("an owner");
    let daemon = serve(&home, "1GiB");
    let refused = get(daemon.gateway(), NAME, "/");
    assert_eq!(refused.status, 502, "{}", refused.text());
    let why = daemon.explain(&refused);
    assert!(why.contains("is damaged"), "{why}");
    wait_until("it is frozen anew", || get(daemon.gateway(), NAME, "/").status == 200);
    daemon.stop();
    command(&home, &["pack"]);
    let daemon = serve(&home, "1GiB");
    assert_eq!(get(daemon.gateway(), NAME, "/").status, 200);
}

/// A small file system that is unmounted when dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(path: &Path, size: &str) -> Self {
        fs::create_dir_all(path).expect("a directory");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(path);
        run(&mut mount).success();
        Self(path.to_owned())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let unmounted = run(Command::new("umount").arg("-l").arg(&self.0));
        if unmounted.code != Some(0) {
            eprintln!("{} stays mounted", self.0.display());
        }
    }
}

#[test]
fn on_a_full_disk_the_request_hears_why_and_the_next_is_served() {
    if !rustix::process::geteuid().is_root() {
        return skip("mounting a small file system needs root");
    }
    let home = packed_home("pack-full");
    let place = copy_home(&home, "pack-full-disk");
    fs::remove_dir_all(&place).expect("the copy is removable");
    let _disk = SmallDisk::mount(&place, "256m");
    run(Command::new("cp").arg("-a").arg(home.join(".")).arg(&place)).success();
    let daemon = serve(&place, "1GiB");
    let filler = place.join("filler");
    let mut full = fs::File::create(&filler).expect("a file");
    use std::io::Write;
    while full.write_all(&[1; 1 << 16]).is_ok() {}
    let refused = get(daemon.gateway(), NAME, "/");
    assert_eq!(refused.status, 502, "{}", refused.text());
    let why = daemon.explain(&refused);
    assert!(why.contains("is full"), "{why}");
    drop(full);
    fs::remove_file(&filler).expect("it is removable");
    wait_until("it is served", || get(daemon.gateway(), NAME, "/").status == 200);
    daemon.stop();
}
