//! Quantities with units, as people write them: `"256MiB"`, `"1.5s"`.

use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::{Serialize, Serializer};
use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::time::Duration;

/// Why a text is not a quantity; the message names the forms that are.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// Not a size.
    #[error("`{0}` is not a size; write a number with B, KiB, MiB or GiB, such as \"256MiB\"")]
    Size(String),
    /// Not a duration.
    #[error("`{0}` is not a duration; write a number with ms, s, m or h, such as \"30s\"")]
    Duration(String),
}

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// `count` mebibytes.
    pub const fn mebibytes(count: u64) -> Self {
        Self(count << 20)
    }

    /// The number of bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// Least memory of a sandbox.
    const SANDBOX_MIN: Self = Self::mebibytes(8);

    /// Whether a sandbox can do with so much memory.
    ///
    /// # Errors
    /// One sentence: it is too little.
    pub fn check_memory(self) -> Result<(), String> {
        match self < Self::SANDBOX_MIN {
            true => Err(format!(
                "{self} is too little memory for a sandbox; give at least {}",
                Self::SANDBOX_MIN
            )),
            false => Ok(()),
        }
    }

    /// About this size, for people: in mebibytes.
    pub fn approximate(self) -> String {
        format!("{:.1}MiB", self.0 as f64 / f64::from(1 << 20))
    }
}

const SIZE_UNITS: [(&str, u64); 8] = [
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
];

impl FromStr for ByteSize {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let wrong = || QuantityError::Size(text.to_owned());
        let (number, unit) = split_number(text).ok_or_else(wrong)?;
        let scale = SIZE_UNITS
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(unit))
            .map(|(_, scale)| *scale)
            .ok_or_else(wrong)?;
        let bytes = number * scale as f64;
        if bytes < u64::MAX as f64 { Ok(Self(bytes.round() as u64)) } else { Err(wrong()) }
    }
}

impl fmt::Display for ByteSize {
    /// Exact: the largest binary unit that divides the size.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, scale) = SIZE_UNITS[..5]
            .iter()
            .rev()
            .find(|(_, scale)| self.0 >= *scale && self.0.is_multiple_of(*scale))
            .unwrap_or(&SIZE_UNITS[0]);
        write!(f, "{}{name}", self.0 / scale)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer
            .deserialize_str(FromText("a size such as \"256MiB\"", std::marker::PhantomData))
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A length of time, written with its unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct TimeSpan(pub Duration);

const TIME_UNITS: [(&str, u64); 4] = [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000)];

impl TimeSpan {
    /// `count` seconds.
    pub const fn seconds(count: u64) -> Self {
        Self(Duration::from_secs(count))
    }
}

impl FromStr for TimeSpan {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let wrong = || QuantityError::Duration(text.to_owned());
        let (number, unit) = split_number(text).ok_or_else(wrong)?;
        let scale = TIME_UNITS
            .iter()
            .find(|(name, _)| *name == unit)
            .map(|(_, scale)| *scale)
            .ok_or_else(wrong)?;
        let millis = number * scale as f64;
        // A century is certainly a typing error, and keeps the arithmetic exact.
        if millis > 3.2e12 {
            return Err(wrong());
        }
        Ok(Self(Duration::from_micros((millis * 1000.0).round() as u64)))
    }
}

impl fmt::Display for TimeSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.0.as_micros() as u64;
        if !micros.is_multiple_of(1000) {
            return write!(f, "{}ms", micros as f64 / 1000.0);
        }
        let millis = micros / 1000;
        let (name, scale) = TIME_UNITS
            .iter()
            .rev()
            .find(|(_, scale)| millis >= *scale && millis.is_multiple_of(*scale))
            .unwrap_or(&TIME_UNITS[1]);
        write!(f, "{}{name}", millis / scale)
    }
}

impl<'de> Deserialize<'de> for TimeSpan {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer
            .deserialize_str(FromText("a duration such as \"30s\"", std::marker::PhantomData))
    }
}

impl Serialize for TimeSpan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Deserializes any type that is written as text, so that the message of its
/// `FromStr` is the message the user sees.
pub(super) struct FromText<T>(pub &'static str, pub std::marker::PhantomData<T>);

impl<T> Visitor<'_> for FromText<T>
where
    T: FromStr,
    T::Err: fmt::Display,
{
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }
}

/// Reads a whole number that is not 0.
///
/// # Errors
/// It is 0, too large, or no number: says which ones fit.
pub(super) fn positive<'de, D: Deserializer<'de>, T: TryFrom<NonZeroU32>>(
    deserializer: D,
) -> Result<T, D::Error> {
    let number = i64::deserialize(deserializer)?;
    let fitting = u32::try_from(number).ok().and_then(NonZeroU32::new);
    fitting.and_then(|number| T::try_from(number).ok()).ok_or_else(|| {
        // All that are used here are unsigned.
        let most = (1u64 << (8 * size_of::<T>())) - 1;
        de::Error::custom(format!("{number} is not a number from 1 to {most}"))
    })
}

/// The same for one that may be missing.
pub(super) fn positive_if_any<'de, D: Deserializer<'de>, T: TryFrom<NonZeroU32>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    positive(deserializer).map(Some)
}

/// Splits `"1.5 MiB"` into 1.5 and `"MiB"`; `None` without a finite,
/// non-negative number in front.
fn split_number(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let number: f64 = text[..end].parse().ok()?;
    number.is_finite().then(|| (number, text[end..].trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_back_as_written() {
        for text in ["0B", "1B", "1023B", "1KiB", "256MiB", "3GiB", "1TiB"] {
            assert_eq!(text.parse::<ByteSize>().unwrap().to_string(), text);
        }
        assert_eq!("1.5 kib".parse(), Ok(ByteSize(1536)));
        assert_eq!("2MB".parse(), Ok(ByteSize(2_000_000)));
    }

    #[test]
    fn durations_read_back_as_written() {
        for text in ["0s", "1ms", "250ms", "30s", "5m", "2h"] {
            assert_eq!(text.parse::<TimeSpan>().unwrap().to_string(), text);
        }
        assert_eq!("1.5s".parse::<TimeSpan>().unwrap().0, Duration::from_millis(1500));
        assert_eq!("0.25ms".parse::<TimeSpan>().unwrap().to_string(), "0.25ms");
    }

    #[test]
    fn a_number_without_a_unit_is_refused() {
        for text in ["", "256", "MiB", "-1MiB", "1e400KiB", "256 M", "1..2s"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
        for text in ["", "30", "s", "-1s", "1 week", "99999999999h"] {
            assert!(text.parse::<TimeSpan>().is_err(), "{text}");
        }
    }
}
