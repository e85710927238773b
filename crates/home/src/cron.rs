//! Cron expressions with five fields.
//!
//! The `croner` library reads and evaluates them; Thaw forbids seconds and years, and what a time
//! zone makes of a time is as in Vixie cron (docs/triggers.md).

use croner::parser::{CronParser, Seconds, Year};
use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// Years on one day of which an expression must fire. There are 29 Februaries among them.
const YEARS: std::ops::Range<i16> = 2024..2033;

/// When a schedule fires.
#[derive(Clone, Debug)]
pub struct Cron {
    text: String,
    cron: croner::Cron,
}

impl Cron {
    /// Reads `minute hour day-of-month month day-of-week`, or a short name such as `@daily`.
    ///
    /// # Errors
    /// One sentence: the text is no such expression.
    pub fn parse(text: &str) -> Result<Self, String> {
        let parser = CronParser::builder().seconds(Seconds::Disallowed).year(Year::Disallowed);
        let parser = parser.build();
        match parser.parse(text) {
            Ok(_) if !has_day(&parser, text) => Err(format!(
                "`{text}` fires on no day of the nine years from 2024 on; give days that its months have"
            )),
            Ok(cron) => Ok(Self { text: text.to_owned(), cron }),
            Err(error) => Err(format!(
                "`{text}` is no cron expression ({error}); write minute, hour, day of month, month \
                 and day of week, such as \"30 6 * * mon-fri\""
            )),
        }
    }

    /// The first time after `after_ms` (milliseconds since 1970); none within the calendar.
    pub fn next_after(&self, after_ms: u64, zone: &TimeZone) -> Option<u64> {
        let after = zoned(after_ms, zone)?;
        milliseconds(&self.cron.find_next_occurrence(&after, false).ok()?)
    }

    /// The last time at or before `at_ms`; none within the calendar.
    pub fn last_until(&self, at_ms: u64, zone: &TimeZone) -> Option<u64> {
        let at = zoned(at_ms, zone)?;
        milliseconds(&self.cron.find_previous_occurrence(&at, true).ok()?)
    }
}

/// Whether an expression that was read fires on a day of [`YEARS`]. Looking for a time of one that
/// does not would go through all of the calendar. The years are fixed, so that what a build has
/// accepted is accepted for ever.
fn has_day(parser: &CronParser, text: &str) -> bool {
    let fields: Vec<&str> = text.split_whitespace().collect();
    let [_, _, day, month, weekday] = fields[..] else {
        // A short name: all of these fire.
        return true;
    };
    let Ok(days) = parser.parse(&format!("* * {day} {month} {weekday}")) else { return false };
    let noon = |year| jiff::civil::date(year, 1, 1).at(12, 0, 0, 0).to_zoned(TimeZone::UTC);
    let (Ok(mut at), Ok(end)) = (noon(YEARS.start), noon(YEARS.end)) else { return false };
    while at < end {
        if days.is_time_matching(&at).unwrap_or(false) {
            return true;
        }
        let Ok(next) = at.tomorrow() else { return false };
        at = next;
    }
    false
}

/// A time with whole seconds: expressions know no smaller ones.
fn zoned(ms: u64, zone: &TimeZone) -> Option<Zoned> {
    let second = i64::try_from(ms / 1000).ok()?;
    Some(Timestamp::from_second(second).ok()?.to_zoned(zone.clone()))
}

fn milliseconds(time: &Zoned) -> Option<u64> {
    u64::try_from(time.timestamp().as_millisecond()).ok()
}

impl PartialEq for Cron {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl fmt::Display for Cron {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Serialize for Cron {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for Cron {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(time: &str) -> u64 {
        time.parse::<Timestamp>().unwrap().as_millisecond() as u64
    }

    fn times(cron: &str, zone: &str, from: &str, count: usize) -> Vec<String> {
        let (cron, zone) = (Cron::parse(cron).unwrap(), TimeZone::get(zone).unwrap());
        let mut at = ms(from);
        let mut next = || {
            at = cron.next_after(at, &zone).unwrap();
            Timestamp::from_millisecond(at as i64).unwrap().to_string()
        };
        (0..count).map(|_| next()).collect()
    }

    #[test]
    fn times_are_those_of_the_zone() {
        assert_eq!(
            times("30 6 * * mon-fri", "Europe/Berlin", "2026-11-20T06:00:00Z", 2),
            ["2026-11-23T05:30:00Z", "2026-11-24T05:30:00Z"]
        );
    }

    #[test]
    fn a_day_of_the_month_or_of_the_week_will_do() {
        assert_eq!(
            times("0 0 1 * mon", "UTC", "2026-11-24T00:00:00Z", 2),
            ["2026-11-30T00:00:00Z", "2026-12-01T00:00:00Z"]
        );
    }

    #[test]
    fn a_time_that_does_not_exist_comes_when_the_gap_ends() {
        // 2026-03-29, 02:00 CET is 03:00 CEST.
        assert_eq!(
            times("30 2 * * *", "Europe/Berlin", "2026-03-28T02:00:00Z", 2),
            ["2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"]
        );
    }

    #[test]
    fn a_time_that_comes_twice_counts_once_and_steps_go_on() {
        // 2026-10-25, 03:00 CEST is 02:00 CET.
        assert_eq!(
            times("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00Z", 2),
            ["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"]
        );
        assert_eq!(
            times("*/30 * * * *", "Europe/Berlin", "2026-10-25T00:00:00Z", 4),
            [
                "2026-10-25T00:30:00Z",
                "2026-10-25T01:00:00Z",
                "2026-10-25T01:30:00Z",
                "2026-10-25T02:00:00Z"
            ]
        );
    }

    #[test]
    fn the_last_time_is_found_and_includes_now() {
        let cron = Cron::parse("0 * * * *").unwrap();
        let last = |at: &str| cron.last_until(ms(at), &TimeZone::UTC).unwrap();
        assert_eq!(last("2026-11-23T21:00:00.900Z"), ms("2026-11-23T21:00:00Z"));
        assert_eq!(last("2026-11-23T20:59:59Z"), ms("2026-11-23T20:00:00Z"));
    }

    #[test]
    fn what_is_no_expression_is_refused_with_the_way_out() {
        for wrong in ["", "* * * *", "* * * * * *", "61 * * * *", "x * * * *", "0 0 0 0 0"] {
            let error = Cron::parse(wrong).expect_err(wrong);
            assert!(error.contains("day of month"), "{error}");
        }
    }

    #[test]
    fn an_expression_that_never_fires_is_refused() {
        for never in ["0 0 30 2 *", "0 0 31 2,4,6,9,11 *", "*/5 * 31 nov *"] {
            let error = Cron::parse(never).expect_err(never);
            assert!(error.contains("no day"), "{error}");
        }
        for rare in
            ["0 0 29 2 *", "0 0 30 2 mon", "0 0 31 12 *", "0 0 L 2 *", "@yearly", "0 0 * * 5L"]
        {
            let cron = Cron::parse(rare).expect(rare);
            let at = ms("2097-03-01T00:00:00Z");
            assert!(cron.next_after(at, &TimeZone::UTC).is_some(), "{rare}");
            assert!(cron.last_until(at, &TimeZone::UTC).is_some(), "{rare}");
        }
    }
}
