//! Programs of the mainstream runtimes, and everyday tools, do in a sandbox what
//! they do on the host. What takes long, or needs more than `make test` installs,
//! is ignored there and run by `make runtimes`.

use thaw_e2e::RuntimeProgram::{
    Go, Java, Node, Perl, Php, Python, PythonWithPackages, Ruby, Shell,
};
use thaw_e2e::compare_runtime;

/// Tests that run a program with one and, by `make runtimes`, with two virtual CPUs.
macro_rules! same {
    ($($(#[$attribute:meta])* $name:ident: $program:expr;)*) => {
        $(
            mod $name {
                use super::*;
                $(#[$attribute])* #[test] fn one_cpu() { compare_runtime($program, 1); }
                #[ignore = "make runtimes"] #[test] fn two_cpus() { compare_runtime($program, 2); }
            }
        )*
    };
}

same! {
    python_threads: Python("threads");
    python_futures: Python("futures");
    node_threads: Node("threads");
    node_servers: Node("servers");
    java_threads: Java("Threads", &[]);
    go_threads: Go("threads");
    ruby_threads: Ruby("threads");
    php_work: Php("work");
    perl_work: Perl("work");

    #[ignore = "needs packages; make runtimes"]
    python_packages: PythonWithPackages("packages");
    #[ignore = "takes long; make runtimes"]
    java_serial_collector: Java("Threads", &["-XX:+UseSerialGC"]);
    #[ignore = "takes long; make runtimes"]
    java_parallel_collector: Java("Threads", &["-XX:+UseParallelGC"]);
    #[ignore = "takes long; make runtimes"]
    java_g1_collector: Java("Threads", &["-XX:+UseG1GC", "-XX:ParallelGCThreads=4"]);
    #[ignore = "needs gcc for cgo; make runtimes"]
    go_with_c: Go("cgo");
    python_processes: Python("processes");
    #[ignore = "takes long; make runtimes"]
    python_multiprocessing: Python("multiprocess");
    #[ignore = "takes long; make runtimes"]
    node_processes: Node("processes");
    #[ignore = "takes long; make runtimes"]
    java_processes: Java("Processes", &[]);
    #[ignore = "takes long; make runtimes"]
    go_processes: Go("processes");
    #[ignore = "takes long; make runtimes"]
    ruby_processes: Ruby("processes");
    #[ignore = "takes long; make runtimes"]
    php_processes: Php("processes");
    perl_processes: Perl("processes");
    #[ignore = "needs tools; make runtimes"]
    shell_pipes: Shell("pipes");
    shell_jobs: Shell("jobs");
    #[ignore = "needs tools; make runtimes"]
    tools: Shell("tools");
    #[ignore = "needs tools; make runtimes"]
    git: Shell("git");
    #[ignore = "needs tools; make runtimes"]
    compile: Shell("compile");
    #[ignore = "needs tools; make runtimes"]
    sqlite: Shell("sqlite");
    #[ignore = "needs tools; make runtimes"]
    ffmpeg: Shell("ffmpeg");
    #[ignore = "needs interpreters; make runtimes"]
    languages: Shell("languages");
}

/// Servers on fixed ports: not at the same time.
static PORTS: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn one_at_a_time(program: thaw_e2e::RuntimeProgram) {
    let _guard = PORTS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for cpus in [1, 2] {
        compare_runtime(program, cpus);
    }
}

#[test]
#[ignore = "needs nginx; make runtimes"]
fn nginx() {
    one_at_a_time(Shell("nginx"));
}

#[test]
#[ignore = "needs Redis; make runtimes"]
fn redis() {
    one_at_a_time(Shell("redis"));
}

#[test]
#[ignore = "needs PostgreSQL; make runtimes"]
fn postgresql() {
    one_at_a_time(Shell("postgresql"));
}

#[test]
#[ignore = "needs servers; make runtimes"]
fn services() {
    one_at_a_time(Shell("services"));
}

#[test]
#[ignore = "needs Chromium; make runtimes"]
fn chromium() {
    one_at_a_time(Shell("chromium"));
}
