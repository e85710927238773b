//! Lets the test binary become the processes that this library starts.
#![allow(unsafe_code)]

/// A test binary has no `main` of its own in which to become one, so it does so before the
/// test harness starts.
extern "C" fn before_main() {
    crate::zygote_parent_main();
}

#[used]
// SAFETY: the section holds pointers to functions that the C library calls before `main`,
// with the signature of `before_main`.
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = before_main;
