//! The Python programs of `tests/guest/python` print the same on the host and in
//! a sandbox.

use thaw_e2e::{compare_python, programs};

macro_rules! same {
    ($($name:ident),* $(,)?) => {
        const LISTED: &[&str] = &[$(stringify!($name)),*];
        $(#[test] fn $name() { compare_python(stringify!($name), true); })*
        mod without_patching {
            use super::*;
            $(#[test] fn $name() { compare_python(stringify!($name), false); })*
        }
    };
}

same!(
    event_loop,
    exit_exception,
    files,
    imports,
    language,
    libraries,
    network,
    socket_states,
    system
);

#[test]
fn no_program_is_forgotten() {
    assert_eq!(programs("python", "py"), LISTED);
}
