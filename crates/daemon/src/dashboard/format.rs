//! Numbers for people.

/// Bytes with a unit of 1024, three digits.
pub(super) fn bytes(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1000.0 {
            return format!("{} {unit}", short(value));
        }
        value /= 1024.0;
    }
    format!("{} TiB", short(value))
}

/// A rate or another number with three digits.
pub(super) fn short(value: f64) -> String {
    let digits = match value.abs() {
        0.0 => 0,
        value if value >= 100.0 => 0,
        value if value >= 10.0 => 1,
        _ => 2,
    };
    let text = format!("{value:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// Milliseconds with a fitting unit.
pub(super) fn millis(ms: f64) -> String {
    match ms {
        ms if ms < 1.0 => format!("{} µs", short(ms * 1000.0)),
        ms if ms < 1000.0 => format!("{} ms", short(ms)),
        ms => format!("{} s", short(ms / 1000.0)),
    }
}

/// The same, or a dash.
pub(super) fn millis_if_any(ms: Option<f64>) -> String {
    ms.map_or_else(|| "–".to_owned(), millis)
}

/// Seconds, as days, hours, minutes: the two largest of them.
pub(super) fn age(seconds: u64) -> String {
    let (days, hours) = (seconds / 86_400, seconds / 3600 % 24);
    let (minutes, rest) = (seconds / 60 % 60, seconds % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{rest} s"),
        (0, 0, _) => format!("{minutes} min {rest} s"),
        (0, ..) => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

/// The beginning of a hash.
pub(super) fn beginning(hash: &str) -> &str {
    hash.get(..12).unwrap_or(hash)
}

/// Permissions as `ls` shows them.
pub(super) fn permissions(mode: u32) -> String {
    let bit = |shift: u32, letter| if mode >> shift & 1 == 1 { letter } else { '-' };
    (0..9).rev().map(|shift| bit(shift, ['x', 'w', 'r'][shift as usize % 3])).collect()
}

/// A time of day in UTC.
pub(super) fn time(ms: u64) -> String {
    // Beyond that a year has five digits (humantime refuses to write it); guests choose times.
    const LAST: u64 = 253_402_300_799_999;
    let at = std::time::UNIX_EPOCH + std::time::Duration::from_millis(ms.min(LAST));
    humantime::format_rfc3339_millis(at).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_and_a_unit() {
        let cases = [(0, "0 B"), (999, "999 B"), (1024, "1 KiB"), (1536 << 20, "1.5 GiB")];
        for (value, text) in cases {
            assert_eq!(bytes(value), text);
        }
        assert_eq!(millis(0.2345), "234 µs");
        assert_eq!(millis(12.34), "12.3 ms");
        assert_eq!(millis(65_000.0), "65 s");
        assert_eq!(short(100.0), "100");
        assert_eq!(short(0.104), "0.1");
        assert_eq!(age(3 * 86_400 + 3600), "3 d 1 h");
        assert_eq!(age(61), "1 min 1 s");
        assert_eq!(permissions(0o755), "rwxr-xr-x");
        assert_eq!(beginning("ä"), "ä");
    }
}
