//! Programs that make namespaces other than those of mounts: util-linux, iproute2 and bubblewrap, as root of
//! a sandbox and as one of its users.

use thaw_e2e::{
    Daemon, DaemonOptions, Outcome, home_with_box, ok, pause_until_hibernated, run, thaw,
};

/// Runs a script in a sandbox that sees the files of the host, as root.
fn as_root(text: &str) -> Outcome {
    let mut thaw = thaw();
    thaw.args(["run", "--as-root", "--rootfs", "/", "--", "sh", "-ec", text]);
    run(&mut thaw)
}

/// The same as an ordinary user.
fn as_user(text: &str) -> Outcome {
    as_root(&format!("exec setpriv --reuid 1000 --regid 1000 --clear-groups sh -ec '{text}'"))
}

#[test]
fn a_user_is_root_of_a_namespace_and_of_nothing_else() {
    let said = as_user(
        "unshare -Ur sh -c \"id -u; id -g; cat /proc/self/uid_map; stat -c %u /etc/passwd
         cat /etc/shadow 2>/dev/null || echo no shadow
         hostname other 2>/dev/null || echo no name
         mount -t tmpfs none /mnt 2>/dev/null || echo no mount\"
         unshare -U id -u; id -u",
    );
    let map = "         0       1000          1";
    let expected = ["0", "0", map, "65534", "no shadow", "no name", "no mount", "65534", "1000"];
    assert_eq!(said.success().lines().collect::<Vec<_>>(), expected);
}

#[test]
fn names_of_the_machine_are_those_of_the_namespace() {
    let said = as_user(
        "unshare -Ur --uts sh -c \"hostname inside; hostname; cat /proc/sys/kernel/hostname\"
         test $(hostname) != inside && echo outside",
    );
    assert_eq!(said.success(), "inside\ninside\noutside\n");
}

#[test]
fn objects_are_found_in_their_namespace_only() {
    let said = as_root(
        "ipcmk -Q > /dev/null; ipcs -q | grep -c ^0x
         unshare -i sh -c 'ipcs -q | grep -c ^0x || true; ipcmk -Q > /dev/null; ipcmk -Q > /dev/null
         ipcs -q | grep -c ^0x'; ipcs -q | grep -c ^0x",
    );
    assert_eq!(said.success(), "1\n0\n2\n1\n");
}

#[test]
fn a_network_has_a_loopback_interface_alone() {
    let said = as_user(
        "unshare -Urn sh -c \"ip -o link | cut -d: -f2; ip -o addr | wc -l
         ip link set lo up; ip -o addr | wc -l
         ip -o -4 addr | grep -o 127.0.0.1/8; ip link add a type dummy 2>/dev/null || echo no more\"
         ip link set lo down 2>/dev/null || echo stays",
    );
    assert_eq!(said.success(), " lo\n0\n2\n127.0.0.1/8\nno more\nstays\n");
}

#[test]
fn namespaces_of_a_process_are_entered() {
    let said = as_root(
        "mkfifo /tmp/go; unshare -u -i -n -C sh -c 'hostname inside; echo > /tmp/go; read x < /tmp/go' &
         read x < /tmp/go
         nsenter -t $! -u -i -n -C sh -c 'hostname; ip -o link | wc -l'
         for kind in uts ipc net cgroup; do
             test $(readlink /proc/$!/ns/$kind) != $(readlink /proc/self/ns/$kind) || echo same $kind
         done
         readlink /proc/self/ns/uts /proc/self/ns/user
         echo > /tmp/go; wait; rm /tmp/go",
    );
    assert_eq!(said.success(), "inside\n1\nuts:[4026531838]\nuser:[4026531837]\n");
}

#[test]
fn what_users_inherit_of_mounts_stays() {
    let said = as_user(
        "unshare -Urm sh -c \"umount /sys 2>/dev/null || echo locked
         mount -o remount,bind,rw,suid,dev,exec /sys 2>/dev/null || echo kept
         mount -t proc none /mnt 2>/dev/null || echo no proc; mount -t tmpfs none /mnt; stat -c %u /mnt
         touch /mnt/file; mount --bind /mnt/file /etc/passwd; wc -c < /etc/passwd; umount /etc/passwd
         mount --bind / /mnt 2>/dev/null || echo covers; mount --rbind / /mnt; ls /mnt/usr | grep -cx bin
         mknod /tmp/device c 1 3 2>/dev/null || echo no device\"",
    );
    let expected = ["locked", "kept", "no proc", "0", "0", "covers", "1", "no device"];
    assert_eq!(said.success().lines().collect::<Vec<_>>(), expected);
}

#[test]
fn what_mounts_hide_stays_hidden() {
    let said = as_root(
        "mkdir -p /srv/low/secret /srv/low/open /srv/to; echo hidden > /srv/low/secret/file
         mount -t tmpfs none /srv/low/secret
         unshare -Urm sh -c 'mount --make-unbindable /srv/low/secret
             mount --rbind /srv/low /srv/to 2>/dev/null || echo refused
             mount --bind /srv/low /srv/to 2>/dev/null || echo covers
             cat /srv/to/secret/file 2>/dev/null || echo nothing
             mount --bind /srv/low/open /srv/to && echo bound
             mount --bind /etc/hostname /etc/issue && cmp /etc/hostname /etc/issue && echo same'",
    );
    assert_eq!(said.success(), "refused\ncovers\nnothing\nbound\nsame\n");
}

#[test]
fn namespaces_below_can_be_forbidden() {
    let said = as_user(
        "unshare -Ur sh -c \"echo 1 > /proc/sys/user/max_user_namespaces; cat /proc/sys/user/max_user_namespaces
         unshare -Ur unshare -Ur true 2>/dev/null || echo one alone; unshare -Ur true && echo again\"
         unshare -Ur unshare -Ur true && echo outside
         echo 1 2>/dev/null > /proc/sys/user/max_user_namespaces || echo root alone
         bwrap --unshare-user --disable-userns --ro-bind / / --proc /proc --dev /dev \\
             sh -c \"unshare -U true 2>/dev/null || echo disabled\"",
    );
    let expected = ["1", "one alone", "again", "outside", "root alone", "disabled"];
    assert_eq!(said.success().lines().collect::<Vec<_>>(), expected);
}

#[test]
fn bubblewrap_makes_a_sandbox_for_a_user() {
    let said = as_user(
        "bwrap --unshare-user --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup --ro-bind / / \\
             --tmpfs /tmp --dev-bind /dev /dev --bind /proc /proc --hostname box sh -c \"id -u; hostname
         ip -o -4 addr | wc -l; touch /etc/file 2>/dev/null || echo read-only; echo x > /tmp/file; cat /tmp/file\"",
    );
    let expected = ["1000", "box", "1", "read-only", "x"];
    assert_eq!(said.success().lines().collect::<Vec<_>>(), expected);
}

#[test]
fn namespaces_are_part_of_what_is_frozen() {
    let programs = ["sh", "cat", "wc", "setsid", "unshare", "nsenter", "hostname", "sleep", "id"];
    let home = home_with_box("namespaces", &[], &programs, "");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    let sh = |sandbox: &str, text: &str| {
        ok(&home, &["exec", sandbox, "--user", "0", "--", "sh", "-ec", text])
    };
    let enter = "nsenter -t $(cat /pid) -U -u -n --preserve-credentials";
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    let begin = "setsid unshare -Urun sh -c 'hostname inside; exec sleep 10000' > /dev/null 2>&1 < /dev/null &
         echo $! > /pid";
    sh("one", &format!("{begin}; until [ \"$({enter} hostname)\" = inside ]; do sleep 0.1; done"));
    ok(&home, &["sandbox", "fork", "one", "--name", "copy"]);
    ok(&home, &["sandbox", "checkpoint", "one", "point"]);
    ok(&home, &["sandbox", "create", "--checkpoint", "point", "--name", "again"]);
    pause_until_hibernated(&home, "one");
    for sandbox in ["copy", "again", "one"] {
        let inside =
            format!("{enter} sh -c 'hostname; cat /proc/self/uid_map; wc -l < /proc/net/if_inet6'");
        let said = sh(sandbox, &format!("{inside}; test $(hostname) != inside && echo outside"));
        assert_eq!(said, "inside\n         0          0          1\n0\noutside\n", "{sandbox}");
    }
}
