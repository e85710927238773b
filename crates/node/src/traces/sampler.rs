//! Which traces are recorded: the samplers that the OpenTelemetry specification names
//! ("SDK Environment Variables", `OTEL_TRACES_SAMPLER`).

/// A sampler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sampler {
    /// A trace that somebody else has begun is recorded if he records it.
    heeds_parent: bool,
    root: Root,
}

/// What holds for traces that begin here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Root {
    Always,
    Never,
    /// Those whose number, as its last 63 bits, is below this.
    Below(u64),
}

impl Default for Sampler {
    fn default() -> Self {
        Self { heeds_parent: true, root: Root::Always }
    }
}

impl Sampler {
    /// The sampler of this name, with what `OTEL_TRACES_SAMPLER_ARG` says.
    ///
    /// # Errors
    /// One sentence: there is none, or the ratio is not one.
    pub fn named(name: &str, argument: Option<&str>) -> Result<Self, String> {
        let (heeds_parent, root) = match name.strip_prefix("parentbased_") {
            Some(root) => (true, root),
            None => (false, name),
        };
        let root = match root {
            "always_on" => Root::Always,
            "always_off" => Root::Never,
            "traceidratio" => Root::Below(threshold(argument)?),
            _ => {
                return Err(format!(
                    "OTEL_TRACES_SAMPLER is `{name}`; give always_on, always_off or traceidratio, \
                     each with or without parentbased_ before it"
                ));
            }
        };
        Ok(Self { heeds_parent, root })
    }

    /// Whether a trace is recorded, where `parent` says whether the part before is.
    pub fn records(self, trace: u128, parent: Option<bool>) -> bool {
        if let Some(is_recorded) = parent.filter(|_| self.heeds_parent) {
            return is_recorded;
        }
        match self.root {
            Root::Always => true,
            Root::Never => false,
            Root::Below(most) => (trace as u64) >> 1 < most,
        }
    }
}

/// A share of all numbers of 63 bits.
fn threshold(argument: Option<&str>) -> Result<u64, String> {
    let Some(text) = argument else { return Ok(1 << 63) };
    match text.parse::<f64>() {
        Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok((ratio * (1u64 << 63) as f64) as u64),
        _ => Err(format!("OTEL_TRACES_SAMPLER_ARG is `{text}`; give a number from 0 to 1")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_decides_for_samplers_that_heed_it_only() {
        let heeding = Sampler::named("parentbased_always_off", None).unwrap();
        assert!(heeding.records(1, Some(true)) && !heeding.records(1, None));
        let own = Sampler::named("always_off", None).unwrap();
        assert!(!own.records(1, Some(true)));
        assert!(Sampler::default().records(1, None) && !Sampler::default().records(1, Some(false)));
    }

    #[test]
    fn a_ratio_is_a_share_of_all_traces() {
        let quarter = Sampler::named("traceidratio", Some("0.25")).unwrap();
        let step = u64::MAX / 1000;
        let count = (0..1000).filter(|n| quarter.records(u128::from(n * step), None)).count();
        assert!((249..=252).contains(&count), "{count}");
        for (ratio, is_recorded) in [("0", false), ("1", true)] {
            let sampler = Sampler::named("traceidratio", Some(ratio)).unwrap();
            assert_eq!(sampler.records(u128::MAX, None), is_recorded);
        }
        for wrong in ["2", "-1", "NaN", "x"] {
            assert!(Sampler::named("traceidratio", Some(wrong)).unwrap_err().contains("0 to 1"));
        }
        assert!(Sampler::named("xray", None).unwrap_err().contains("traceidratio"));
    }
}
