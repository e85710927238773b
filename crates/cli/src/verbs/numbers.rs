//! Numbers, as people write them.

use std::num::{NonZeroU16, NonZeroU64};

/// A count: a whole number from 1.
///
/// # Errors
/// It is none, or more than the count can be: what to write.
pub fn count<T: TryFrom<NonZeroU64>>(text: &str) -> Result<T, String> {
    let from_one = || "write a whole number from 1, such as 4".to_owned();
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse::<NonZeroU64>() {
        Ok(number) => number.try_into().map_err(|_| too_large()),
        // It has more digits than any count.
        Err(_) if is_number && text.bytes().any(|byte| byte != b'0') => Err(too_large()),
        Err(_) => Err(from_one()),
    }
}

fn too_large() -> String {
    "that is more than there can be; write a smaller number".to_owned()
}

/// A port: a whole number from 1 to 65535.
///
/// # Errors
/// It is none: what to write.
pub fn port(text: &str) -> Result<NonZeroU16, String> {
    text.parse().map_err(|_| "a port is a whole number from 1 to 65535, such as 8080".to_owned())
}

/// The number of an instance, for verbs that take no name.
///
/// # Errors
/// It is none: what to write.
pub fn instance(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| {
        "write the number of an instance, as `thaw ps` shows it; the verbs of `thaw sandbox`, such as `thaw sandbox \
         fork` and `thaw sandbox checkpoint`, take a sandbox by its name"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU32;

    #[test]
    fn what_is_no_count_is_explained() {
        assert_eq!(count::<NonZeroU32>("12").map(NonZeroU32::get), Ok(12));
        for text in ["0", "00", "", "1.5", "-1", "two"] {
            let why = count::<NonZeroU32>(text).unwrap_err();
            assert!(why.starts_with("write a whole number from 1"), "{text}: {why}");
        }
        for text in ["4294967296", "99999999999999999999999"] {
            let why = count::<NonZeroU32>(text).unwrap_err();
            assert!(why.ends_with("write a smaller number"), "{text}: {why}");
        }
    }

    #[test]
    fn what_is_no_port_is_explained() {
        assert_eq!(port("65535").map(NonZeroU16::get), Ok(65535));
        for text in ["0", "65536", "", "http", "-1", "8.0"] {
            assert!(port(text).unwrap_err().contains("from 1 to 65535"), "{text}");
        }
    }

    #[test]
    fn a_sandbox_in_the_place_of_an_instance_has_verbs_of_its_own() {
        assert_eq!(instance("17"), Ok(17));
        for text in ["box", "", "-1", "1.5"] {
            assert!(instance(text).unwrap_err().contains("`thaw sandbox fork`"), "{text}");
        }
    }
}
