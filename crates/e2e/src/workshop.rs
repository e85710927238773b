//! Container images, made by `buildah`.

use crate::binary::thaw;
use crate::outcome::run;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A place for images, with `buildah`'s state.
pub struct Workshop {
    directory: TempDir,
}

impl Workshop {
    /// An empty one.
    #[expect(clippy::new_without_default, reason = "it makes a directory")]
    pub fn new() -> Self {
        Self { directory: tempfile::tempdir().expect("a directory") }
    }

    /// Its directory.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The path of something in its directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Runs `buildah`; what it prints.
    pub fn buildah(&self, arguments: &[&str]) -> String {
        let mut command = Command::new("buildah");
        command.arg("--root").arg(self.path("root")).arg("--runroot").arg(self.path("run"));
        command.args(["--storage-driver", "vfs"]).args(arguments);
        command.env("BUILDAH_ISOLATION", "chroot").env("HOME", self.directory.path());
        run(&mut command).success().trim().to_owned()
    }

    /// Builds `image`: busybox, users, a large file, and how it is run.
    pub fn build(&self, image: &str) {
        let container = self.buildah(&["from", "scratch"]);
        let files = self.path("files");
        fs::create_dir_all(files.join("etc")).expect("a directory");
        fs::write(
            files.join("etc/passwd"),
            "root:x:0:0::/root:/bin/sh\napp:x:1000:50::/srv:/bin/sh\n",
        )
        .expect("users");
        fs::write(files.join("gone"), "gone").expect("a file");
        let noise: Vec<u8> =
            (0..4_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        fs::write(files.join("large"), noise).expect("a large file");
        let files = files.to_str().expect("UTF-8").to_owned();
        self.buildah(&["copy", &container, "/bin/busybox", "/bin/busybox"]);
        self.buildah(&["copy", &container, &files, "/"]);
        self.buildah(&[
            "config",
            "--workingdir",
            "/srv",
            "--user",
            "app",
            "--env",
            "COLOUR=blue",
            "--entrypoint",
            "[\"/bin/busybox\"]",
            "--cmd",
            "id",
            &container,
        ]);
        self.buildah(&["commit", &container, "lower"]);
        let upper = self.buildah(&["from", "--pull-never", "lower"]);
        // A layer of its own that takes something away.
        let root = self.buildah(&["mount", &upper]);
        fs::remove_file(Path::new(&root).join("gone")).expect("it is there");
        self.buildah(&["umount", &upper]);
        self.buildah(&["commit", "--format", "docker", &upper, image]);
    }

    /// Puts `image` into the store of a home, under a name.
    pub fn import(&self, image: &str, home: &Path, name: &str) {
        let layout = self.path(name);
        self.buildah(&["push", image, &format!("oci:{}:{name}", layout.display())]);
        run(thaw().arg("import").arg(layout).arg(name).env("THAW_HOME", home)).success();
    }
}
