//! Unmodified tools that trace programs (ptrace(2)) work in a sandbox.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use thaw_e2e::{Linking, Outcome, compile, run, thaw};

fn sandboxed(command: &[&str]) -> Outcome {
    run(thaw().args(["run", "--as-root", "--rootfs", "/", "--"]).args(command))
}

/// Whether the machine has a tool; says so if not.
fn has(tool: &str) -> bool {
    let found = Command::new(tool).arg("--version").output().is_ok();
    if !found {
        thaw_skip::skip(&format!("there is no {tool} on this machine"));
    }
    found
}

fn path(program: &Path) -> &str {
    program.to_str().expect("a path")
}

#[test]
fn strace_shows_the_calls_of_all_processes() {
    if !has("strace") {
        return;
    }
    let outcome = sandboxed(&["strace", "-f", "sh", "-c", "/bin/true; /bin/echo hi; exit 3"]);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(3), "hi\n"), "{outcome:?}");
    let calls = ["execve(\"/bin/echo\"", "write(1, \"hi\\n\", 3", "exit_group(3)", "SIGCHLD"];
    for call in calls {
        assert!(outcome.stderr.contains(call), "no {call} in\n{}", outcome.stderr);
    }
    assert_eq!(outcome.stderr.matches("+++ exited with").count(), 3, "{}", outcome.stderr);
}

/// The filter of strace has the tracee stop at the calls that are to be seen, and at no others (seccomp(2)).
#[test]
fn strace_chooses_calls_by_a_filter() {
    if !has("strace") {
        return;
    }
    let mut command = vec!["strace", "-f", "--seccomp-bpf", "-e", "trace=openat"];
    command.extend(["grep", "Seccomp_filters", "/proc/self/status"]);
    let outcome = sandboxed(&command);
    assert_eq!(outcome.stdout, "Seccomp_filters:\t1\n", "{outcome:?}");
    assert!(outcome.stderr.contains("\"/proc/self/status\""), "{}", outcome.stderr);
}

#[test]
fn gdb_stops_at_a_breakpoint_in_a_system_call() {
    if !has("gdb") {
        return;
    }
    let program = compile("c/hello", Linking::Dynamic);
    // The code of write(2) is one of those whose system call is replaced in programs that nobody traces.
    let commands =
        ["break main", "run", "break write", "continue", "bt", "stepi", "delete", "continue"];
    let mut arguments = vec!["gdb", "-nx", "-q", "-batch"];
    commands.iter().for_each(|command| arguments.extend(["-ex", command]));
    arguments.push(path(&program));
    let outcome = sandboxed(&arguments);
    let text = &outcome.stdout;
    for line in
        ["Breakpoint 1, ", "Breakpoint 2, ", " in __libc_start", "hello, world", "exited normally"]
    {
        assert!(text.contains(line), "no {line} in\n{text}\n{}", outcome.stderr);
    }
}

#[test]
fn gdb_attaches_to_a_process() {
    if !has("gdb") {
        return;
    }
    let script = "sleep 100 & pid=$!; sleep 0.2\n\
        gdb -nx -q -batch -p $pid -ex 'print $rip != 0' -ex detach\n\
        grep TracerPid /proc/$pid/status; kill $pid; wait $pid; echo ended with $?";
    let outcome = sandboxed(&["bash", "-c", script]);
    for line in ["$1 = 1", "TracerPid:\t0", "ended with 143"] {
        assert!(outcome.stdout.contains(line), "no {line} in {outcome:?}");
    }
}

/// gdbserver asks for the data of a thread by `PTRACE_ARCH_PRCTL`.
#[test]
fn gdb_debugs_a_program_of_gdbserver() {
    let program = compile("c/hello", Linking::Dynamic);
    if !has("gdb") || !has("gdbserver") {
        return;
    }
    let script = format!(
        "gdbserver --once 127.0.0.1:2345 {0} > /tmp/log 2>&1 & \
         for i in {{1..300}}; do grep -q Listening /tmp/log && break; sleep 0.1; done; \
         gdb -nx -q -batch -ex 'target remote 127.0.0.1:2345' -ex 'break main' -ex continue -ex bt -ex continue {0}; \
         wait $!; cat /tmp/log",
        path(&program)
    );
    let outcome = sandboxed(&["bash", "-c", &script]);
    for line in ["Breakpoint 1, ", "exited normally", "hello, world"] {
        assert!(outcome.stdout.contains(line), "no {line} in {outcome:?}");
    }
}

#[test]
fn gdb_watches_a_value_at_the_same_addresses_each_time() {
    let directory = tempfile::tempdir().expect("a directory");
    let (source, program) = (directory.path().join("watch.c"), directory.path().join("watch"));
    fs::write(
        &source,
        "int value;\nint main(void) {\n    value = 7;\n    value = 9;\n    return 0;\n}\n",
    )
    .expect("a source");
    let mut compiler = Command::new("gcc");
    compiler.args(["-g", "-O0", "-o"]).arg(&program).arg(&source);
    let is_compiled = compiler.output().is_ok_and(|output| output.status.success());
    if !is_compiled || !has("gdb") {
        return;
    }
    let commands = ["break main", "run", "watch value", "continue", "continue", "print &value"];
    let mut arguments = vec!["gdb", "-nx", "-q", "-batch"];
    commands.iter().for_each(|command| arguments.extend(["-ex", command]));
    arguments.push(path(&program));
    let outcome = sandboxed(&arguments);
    for line in ["Hardware watchpoint 2: value", "Old value = 0", "New value = 7", "New value = 9"]
    {
        assert!(outcome.stdout.contains(line), "no {line} in {outcome:?}");
    }
    // Where Linux puts position-independent programs without random addresses.
    assert!(outcome.stdout.contains("0x55555555"), "{outcome:?}");
    assert!(!outcome.stderr.contains("randomization"), "{outcome:?}");
}

/// The leak checker stops all threads by a process that shares their memory.
#[test]
fn the_leak_checker_finds_a_leak() {
    let directory = tempfile::tempdir().expect("a directory");
    let Some(program) = leaking(directory.path()) else { return };
    let outcome = sandboxed(&[path(&program)]);
    assert!(outcome.stderr.contains("123 byte(s) leaked in 1 allocation"), "{}", outcome.stderr);
}

/// A program of two threads that leaks 123 bytes; `None` where it cannot be compiled.
fn leaking(directory: &Path) -> Option<PathBuf> {
    let (source, program) = (directory.join("leak.c"), directory.join("leak"));
    let text = "#include <pthread.h>\n#include <stdlib.h>\n#include <unistd.h>\n\
        static void *wait(void *unused) { for (;;) pause(); return unused; }\n\
        int main(void) {\n    pthread_t thread;\n    pthread_create(&thread, NULL, wait, NULL);\n    \
        volatile char *leaked = malloc(123);\n    leaked = NULL;\n    (void)leaked;\n    \
        return 0;\n}\n";
    fs::write(&source, text).expect("a source");
    let mut compiler = Command::new("gcc");
    compiler.args(["-g", "-fsanitize=address", "-pthread", "-o"]).arg(&program).arg(&source);
    let is_compiled = compiler.output().is_ok_and(|output| output.status.success());
    if !is_compiled {
        thaw_skip::skip("gcc has no AddressSanitizer on this machine");
    }
    is_compiled.then_some(program)
}
