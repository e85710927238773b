//! Which paths of a sandbox are looked at at all.

/// Longest path, in bytes (`PATH_MAX` with its terminator).
const PATH_MAX: usize = 4095;
/// Longest component, in bytes (`NAME_MAX`).
const NAME_MAX: usize = 255;

/// Whether a path is relative, stays below its start by its text alone, and is
/// fit for a host call. The empty path is the start itself. That links lead
/// nowhere else is up to `openat2`.
pub(crate) fn is_harmless(path: &[u8]) -> bool {
    if path.is_empty() {
        return true;
    }
    path.len() <= PATH_MAX
        && !path.contains(&0)
        && path.split(|&byte| byte == b'/').all(|component| {
            !matches!(component, b"" | b"." | b"..") && component.len() <= NAME_MAX
        })
}

#[cfg(test)]
mod tests {
    use super::is_harmless;

    #[test]
    fn ordinary_paths_pass() {
        for path in ["", "usr", "usr/lib/x.so", "...", "a/..b/c..", "\u{e4}/\u{1f9ca}"] {
            assert!(is_harmless(path.as_bytes()), "{path:?}");
        }
    }

    #[test]
    fn paths_that_could_lead_elsewhere_do_not() {
        let long = "x".repeat(256);
        let deep = "x/".repeat(2100) + "x";
        for path in [
            "/",
            "/etc",
            "..",
            "../x",
            "a/..",
            "a/../b",
            "a/../../b",
            ".",
            "a/./b",
            "a//b",
            "a/",
            "a\0b",
            "\0",
            &long,
            &deep,
        ] {
            assert!(!is_harmless(path.as_bytes()), "{path:?}");
        }
    }
}
