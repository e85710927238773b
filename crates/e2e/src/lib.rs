#![doc = include_str!("../README.md")]

mod apart;
mod binary;
mod browser;
mod calls;
mod daemon;
mod function;
mod groups;
mod guest;
mod http;
mod lasting;
mod lines;
pub mod mirror;
mod openssl;
mod outcome;
mod ports;
mod processes;
mod registry;
mod rights;
mod runtime;
mod sdk;
mod skip;
mod user;
mod volume_function;
mod workshop;

pub use apart::{Apart, Background, setting, unit};
pub use binary::{build_directory, changed_kernel, kernel_symbol, repository, thaw, thaw_binary};
pub use browser::{Browser, Screen};
pub use calls::{ask, begin, command};
pub use daemon::{
    Daemon, DaemonOptions, call, ending_once_it_serves, ok, pause_until_hibernated, wait_until,
};
pub use function::{Function, Language, built_home, copy_home, home_with_box, prefetch_file};
pub use groups::{limit_of, memory_limit_of};
pub use guest::{Fixture, Linking, compare_c, compare_python, compile, programs, python};
pub use http::{Heard, Raw, Response, get, post, request, request_local};
pub use lasting::{LASTING_KEYS, count, lasting, lasting_lines};
pub use lines::Lines;
pub use openssl::{TlsClient, certify};
pub use outcome::{Outcome, run, run_with_input, run_within};
pub use ports::{free_port, free_privileged_port, listening_ports};
pub use processes::{
    Descriptor, Process, children, descendants, descriptors, exists, kill, process, resident_bytes,
    state_helper_at_work,
};
pub use registry::{Cut, Registry, cutting_proxy};
pub use rights::{
    check_has_no_rights, check_sees_its_home_only, ids_of, names_in_root, namespace, status,
};
pub use runtime::{RuntimeProgram, compare_runtime};
pub use sdk::{
    E2B_JS_SDK, E2B_KEY, E2B_SDK, announced, example_without, js_module, python_site, python_with,
    start_with_e2b, use_e2b, write_e2b_settings,
};
pub use skip::{has_controller, skip};
pub use user::User;
pub use volume_function::{VolumeFunction, ask_volume};
pub use workshop::Workshop;
