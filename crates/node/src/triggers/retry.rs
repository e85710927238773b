//! When an invocation is attempted again.

use super::record::Outcome;
use thaw_home::config::AsyncConfig;

/// The wait after the `failures`-th failure in a row, in milliseconds: `backoff`, doubled each
/// time up to `backoff_max`, of which `chance` (0 to 1) takes up to a quarter away or adds it.
pub(super) fn wait_ms(config: &AsyncConfig, failures: u32, chance: f64) -> u64 {
    let (first, most) = (config.backoff.0.as_secs_f64(), config.backoff_max.0.as_secs_f64());
    let doubled = first * 2f64.powi(failures.saturating_sub(1).min(40) as i32);
    let jitter = 0.75 + chance.clamp(0.0, 1.0) / 2.0;
    ((doubled.min(most) * jitter).min(most) * 1000.0).round() as u64
}

/// A random number from 0 to 1.
pub(super) fn chance() -> f64 {
    super::record::random() as u32 as f64 / f64::from(u32::MAX)
}

/// Errors of the gateway under which the function has not seen the request.
const UNSEEN: [&str; 9] = [
    "no_capacity",
    "quota_reached",
    "backing_off",
    "node_full",
    "shutting_down",
    "not_set_up",
    "not_fetched",
    "cannot_wake",
    "unknown_function",
];

/// Those of them under which the function lacks something, not the gateway.
const NOT_BEGUN: [&str; 3] = ["not_set_up", "not_fetched", "cannot_wake"];

/// The other errors of the gateway.
const OTHERS: [&str; 17] = [
    "bad_event",
    "bad_request",
    "bad_response",
    "body_too_large",
    "body_too_slow",
    "head_too_large",
    "head_too_slow",
    "instance_died",
    "key_reused",
    "not_http",
    "other_certificate",
    "queue_full",
    "queue_unavailable",
    "timeout",
    "deadline_passed",
    "too_many_requests",
    "unauthorized",
];

/// The error of the gateway that a text names.
pub(crate) fn gateway_error(text: &str) -> Option<&'static str> {
    UNSEEN.iter().chain(&OTHERS).find(|error| **error == text).copied()
}

/// What a status says; `refusal` is the error of an answer that the gateway has given in the
/// function's place.
pub(super) fn judge(status: u16, refusal: Option<&str>, retry_after_ms: Option<u64>) -> Outcome {
    let refusal = refusal.and_then(gateway_error);
    if let Some(error) = refusal.filter(|error| UNSEEN.contains(error)) {
        let why = match NOT_BEGUN.contains(&error) {
            true => "the function could not be begun",
            false => "the gateway had no room for it",
        };
        return Outcome::Deferred(format!("{why} (`{error}`)"));
    }
    let by = match refusal {
        Some(error) => format!("status {status} (`{error}`)"),
        None => format!("status {status}"),
    };
    match status {
        0..400 => Outcome::Done(status),
        408 | 425 | 429 | 500.. => Outcome::Failed { reason: by, retry_after_ms },
        _ => Outcome::Refused(by),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_longest_one_with_jitter() {
        let config = AsyncConfig::default();
        let waits: Vec<u64> = (1..=12).map(|n| wait_ms(&config, n, 0.5)).collect();
        assert_eq!(waits[..4], [1000, 2000, 4000, 8000]);
        assert_eq!(waits[9..], [300_000, 300_000, 300_000]);
        assert_eq!((wait_ms(&config, 1, 0.0), wait_ms(&config, 1, 1.0)), (750, 1250));
        assert!(wait_ms(&config, u32::MAX, 1.0) <= 300_000);
        assert!((0.0..=1.0).contains(&chance()));
    }

    #[test]
    fn what_would_fail_again_is_not_repeated() {
        for status in [200, 204, 302] {
            assert_eq!(judge(status, None, None), Outcome::Done(status));
        }
        for status in [400, 401, 404, 409, 413, 422] {
            assert!(matches!(judge(status, None, None), Outcome::Refused(_)), "{status}");
        }
        for status in [408, 425, 429, 500, 502, 503, 504, 599] {
            assert!(matches!(
                judge(status, None, Some(7)),
                Outcome::Failed { retry_after_ms: Some(7), .. }
            ));
        }
        for error in UNSEEN {
            assert!(matches!(judge(503, Some(error), None), Outcome::Deferred(_)), "{error}");
        }
        let lacking =
            Outcome::Deferred("the function could not be begun (`not_set_up`)".to_owned());
        assert_eq!(judge(503, Some("not_set_up"), None), lacking);
        assert!(matches!(judge(504, Some("timeout"), None), Outcome::Failed { .. }));
        // What the gateway never says is not repeated.
        let forged = judge(404, Some("x\n2026-11-23 INFO forged"), None);
        assert_eq!(forged, Outcome::Refused("status 404".to_owned()));
        assert!(matches!(judge(502, Some("instance_died"), None), Outcome::Failed { .. }));
    }
}
