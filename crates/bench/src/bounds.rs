//! Bounds that a release has to keep, and reports that are compared with them.
//!
//! The bounds are a file of their own (`bench/bounds.toml`). All but memory are relative to
//! native runs on the same machine. Reports are read from the JSON that `--json` and
//! `--output` write.

use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use thaw_node::boots::BootKind;

/// The contents of a file of bounds.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Bounds {
    boot: Vec<BootBound>,
    call: Vec<CallBound>,
    http: Vec<HttpBound>,
    compute: Vec<ComputeBound>,
    sandbox: Vec<SandboxBound>,
    file: Vec<FileBound>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct BootBound {
    function: String,
    boot: BootKind,
    first_instruction: Option<f64>,
    first_byte: Option<f64>,
    tail: Option<f64>,
    pss_kib: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct CallBound {
    name: String,
    ratio: f64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct HttpBound {
    function: String,
    ratio: f64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct ComputeBound {
    language: String,
    speed: f64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct SandboxBound {
    function: String,
    name: String,
    ratio: f64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileBound {
    function: String,
    write_speed: Option<f64>,
    read_speed: Option<f64>,
}

/// Why nothing could be compared.
#[derive(Debug, thiserror::Error)]
pub enum BoundsError {
    /// The bounds are not valid.
    #[error("{path} is not a file of bounds: {}", message.trim())]
    Bounds {
        /// The file.
        path: String,
        /// What is wrong, and where.
        message: String,
    },
    /// There is nothing to compare with.
    #[error("{path} has no bound")]
    Empty {
        /// The file.
        path: String,
    },
    /// A file is no report.
    #[error("{path} is not a report of `thaw bench` ({error}); measure again")]
    Report {
        /// The file.
        path: String,
        /// What is wrong.
        error: serde_json::Error,
    },
}

/// What was measured, as far as bounds look at it.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    boots: Vec<Boot>,
    failures: Vec<BootFailure>,
    calls: Vec<Call>,
    http: Vec<Server>,
    compute: Vec<Program>,
    sandboxes: Vec<Sandbox>,
}

/// The part of [`crate::BootsReport`], of [`crate::syscalls::SyscallReport`] and of
/// [`crate::SandboxReport`] that counts.
#[derive(Deserialize)]
struct Report {
    #[serde(flatten)]
    sandbox: Option<Sandbox>,
    #[serde(default)]
    boots: Vec<Boot>,
    #[serde(default)]
    failures: Vec<BootFailure>,
    #[serde(default)]
    calls: Vec<Call>,
    #[serde(default)]
    http: Vec<Server>,
    #[serde(default)]
    compute: Vec<Program>,
}

#[derive(Clone, Debug, Deserialize)]
struct Boot {
    function: String,
    boot: BootKind,
    phases_us: Phases,
    native_us: Option<Native>,
    pss_kib: u64,
}

#[derive(Clone, Debug, Deserialize)]
struct Phases {
    first_instruction: Percentiles,
    first_byte: Percentiles,
}

#[derive(Clone, Debug, Deserialize)]
struct Native {
    first_byte: Percentiles,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Percentiles {
    p50: f64,
    p99: f64,
}

#[derive(Clone, Debug, Deserialize)]
struct BootFailure {
    function: String,
    boot: Option<BootKind>,
    reason: String,
}

#[derive(Clone, Debug, Deserialize)]
struct Call {
    name: String,
    ratio_p50: f64,
}

#[derive(Clone, Debug, Deserialize)]
struct Server {
    function: String,
    ratio: f64,
}

#[derive(Clone, Debug, Deserialize)]
struct Program {
    language: String,
    speed: f64,
}

#[derive(Clone, Debug, Deserialize)]
struct Sandbox {
    function: String,
    create_ready_us: Percentiles,
    native_us: Option<Percentiles>,
    large_file: Option<LargeFile>,
    missing: Vec<String>,
    #[serde(flatten)]
    uses: BTreeMap<String, Value>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct LargeFile {
    write_speed: f64,
    read_speed: f64,
}

impl Sandbox {
    /// Median of one use by that of the command on the host.
    fn ratio(&self, name: &str) -> Result<f64, String> {
        let native = self.native_us.filter(|native| native.p50 > 0.0);
        let native = native.ok_or_else(|| self.why_not("the command was not run on the host"))?;
        let of_use = match name {
            "create_ready" => Some(self.create_ready_us.p50),
            name => self.uses.get(&format!("{name}_us")).and_then(|of| of["p50"].as_f64()),
        };
        Ok(of_use.ok_or_else(|| format!("the report has no {name}_us"))? / native.p50)
    }

    fn large_file(&self) -> Result<LargeFile, String> {
        self.large_file.ok_or_else(|| self.why_not("no large file was moved"))
    }

    fn why_not(&self, what: &str) -> String {
        [&[what.to_owned()], &self.missing[..]].concat().join("; ")
    }
}

impl Measured {
    /// The report about sandboxes of a function.
    fn sandbox(&self, function: &str) -> Result<&Sandbox, String> {
        let found = self.sandboxes.iter().find(|sandbox| sandbox.function == function);
        found.ok_or_else(|| "no report has it".to_owned())
    }

    /// Adds the report in `json`; `path` is for error messages.
    ///
    /// # Errors
    /// The text is no report.
    pub fn add(&mut self, path: &Path, json: &str) -> Result<(), BoundsError> {
        let report: Report = serde_json::from_str(json)
            .map_err(|error| BoundsError::Report { path: path.display().to_string(), error })?;
        self.boots.extend(report.boots);
        self.failures.extend(report.failures);
        self.calls.extend(report.calls);
        self.http.extend(report.http);
        self.compute.extend(report.compute);
        self.sandboxes.extend(report.sandbox);
        Ok(())
    }

    /// Why boots of a function are not in the reports.
    fn why_not(&self, function: &str, boot: BootKind) -> &str {
        let of_it = |failure: &&BootFailure| {
            failure.function == function && failure.boot.is_none_or(|kind| kind == boot)
        };
        self.failures.iter().find(of_it).map_or("no report has it", |failure| &failure.reason)
    }
}

/// What became of one bound.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// What is bounded, such as "first byte of warm boots of hello-c by a native start".
    pub what: String,
    /// The figure and the bound, or why there is no figure.
    pub outcome: Result<Comparison, String>,
}

/// A figure and its bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// What was measured.
    pub figure: f64,
    /// What is allowed.
    pub bound: Bound,
}

/// What a figure may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// The figure or less.
    AtMost(f64),
    /// The figure or more.
    AtLeast(f64),
}

impl Comparison {
    fn is_kept(&self) -> bool {
        match self.bound {
            Bound::AtMost(bound) => self.figure <= bound,
            Bound::AtLeast(bound) => self.figure >= bound,
        }
    }
}

impl Verdict {
    /// One sentence about a bound that is not kept.
    pub fn complaint(&self) -> Option<String> {
        let what = &self.what;
        match &self.outcome {
            Err(reason) => Some(format!("{what} was not measured: {reason}")),
            Ok(comparison) if comparison.is_kept() => None,
            Ok(Comparison { figure, bound: Bound::AtMost(bound) }) => {
                Some(format!("{what} is {figure:.3}, and at most {bound} is allowed"))
            }
            Ok(Comparison { figure, bound: Bound::AtLeast(bound) }) => {
                Some(format!("{what} is {figure:.3}, and at least {bound} is wanted"))
            }
        }
    }
}

impl Bounds {
    /// Reads the text of a file of bounds; `path` is for error messages.
    ///
    /// # Errors
    /// The text is not valid, has unknown keys, or has no bound.
    pub fn parse(path: &Path, text: &str) -> Result<Self, BoundsError> {
        let path = path.display().to_string();
        let bounds: Self = toml::from_str(text).map_err(|error| BoundsError::Bounds {
            path: path.clone(),
            message: error.to_string(),
        })?;
        match bounds.verdicts(&Measured::default()).is_empty() {
            true => Err(BoundsError::Empty { path }),
            false => Ok(bounds),
        }
    }

    /// Compares each bound with what was measured, in the order of the file. A bound
    /// without a figure is not kept.
    pub fn verdicts(&self, measured: &Measured) -> Vec<Verdict> {
        let boots = self.boot.iter().flat_map(|bound| bound.verdicts(measured));
        let calls = self.call.iter().map(|bound| {
            let call = measured.calls.iter().find(|call| call.name == bound.name);
            let what = format!("time of the system call `{}` by the native one", bound.name);
            verdict(what, call.map(|call| call.ratio_p50), Bound::AtMost(bound.ratio))
        });
        let http = self.http.iter().map(|bound| {
            let server = measured.http.iter().find(|server| server.function == bound.function);
            let what = format!("throughput of {} by the native one", bound.function);
            verdict(what, server.map(|server| server.ratio), Bound::AtLeast(bound.ratio))
        });
        let compute = self.compute.iter().map(|bound| {
            let program = measured.compute.iter().find(|p| p.language == bound.language);
            let what = format!("speed of a computation in {} by the native one", bound.language);
            verdict(what, program.map(|program| program.speed), Bound::AtLeast(bound.speed))
        });
        let sandboxes = self.sandbox.iter().map(|bound| bound.verdict(measured));
        let files = self.file.iter().flat_map(|bound| bound.verdicts(measured));
        boots.chain(calls).chain(http).chain(compute).chain(sandboxes).chain(files).collect()
    }
}

fn verdict(what: String, figure: Option<f64>, bound: Bound) -> Verdict {
    let outcome = figure
        .map(|figure| Comparison { figure, bound })
        .ok_or_else(|| "no report has it".to_owned());
    Verdict { what, outcome }
}

impl SandboxBound {
    fn verdict(&self, measured: &Measured) -> Verdict {
        let figure = measured.sandbox(&self.function).and_then(|of| of.ratio(&self.name));
        let bound = Bound::AtMost(self.ratio);
        Verdict {
            what: format!(
                "{} of sandboxes of {} by the command on the host",
                self.name, self.function
            ),
            outcome: figure.map(|figure| Comparison { figure, bound }),
        }
    }
}

impl FileBound {
    fn verdicts(&self, measured: &Measured) -> Vec<Verdict> {
        let file = measured.sandbox(&self.function).and_then(Sandbox::large_file);
        let one = |what: &str, bound: Option<f64>, speed: fn(&LargeFile) -> f64| {
            let bound = Bound::AtLeast(bound?);
            let outcome = file.as_ref().map(|file| Comparison { figure: speed(file), bound });
            let of = &self.function;
            Some(Verdict {
                what: format!("speed of {what} a large file of sandboxes of {of} by a copy"),
                outcome: outcome.map_err(Clone::clone),
            })
        };
        let write = one("writing", self.write_speed, |file| file.write_speed);
        let read = one("reading", self.read_speed, |file| file.read_speed);
        write.into_iter().chain(read).collect()
    }
}

impl BootBound {
    fn verdicts(&self, measured: &Measured) -> Vec<Verdict> {
        let boot = measured
            .boots
            .iter()
            .find(|boot| boot.function == self.function && boot.boot == self.boot)
            .ok_or_else(|| measured.why_not(&self.function, self.boot).to_owned());
        let of = format!("of {} boots of {}", self.boot.name(), self.function);
        let native = |boot: &Boot| match &boot.native_us {
            Some(native) if native.first_byte.p50 > 0.0 => Ok(native.first_byte.p50),
            _ => Err("the program was not started natively".to_owned()),
        };
        let one = |what: String, bound: f64, figure: &dyn Fn(&Boot) -> Result<f64, String>| {
            let figure = boot.as_ref().map_err(Clone::clone).and_then(|boot| figure(boot));
            let outcome = figure.map(|figure| Comparison { figure, bound: Bound::AtMost(bound) });
            Verdict { what, outcome }
        };
        let mut verdicts = Vec::new();
        if let Some(bound) = self.first_instruction {
            verdicts.push(one(
                format!("first instruction {of} by a native start"),
                bound,
                &|boot| Ok(boot.phases_us.first_instruction.p50 / native(boot)?),
            ));
        }
        if let Some(bound) = self.first_byte {
            verdicts.push(one(format!("first byte {of} by a native start"), bound, &|boot| {
                Ok(boot.phases_us.first_byte.p50 / native(boot)?)
            }));
        }
        if let Some(bound) = self.tail {
            verdicts.push(one(
                format!("p99 by p50 of the first instruction {of}"),
                bound,
                &|boot| {
                    let first = boot.phases_us.first_instruction;
                    if first.p50 > 0.0 {
                        Ok(first.p99 / first.p50)
                    } else {
                        Err("p50 is 0".to_owned())
                    }
                },
            ));
        }
        if let Some(bound) = self.pss_kib {
            let what = format!("memory of an idle instance {of}, in KiB,");
            verdicts.push(one(what, bound as f64, &|boot| Ok(boot.pss_kib as f64)));
        }
        verdicts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: &str = r#"
        [[boot]]
        function = "hello-c"
        boot = "warm"
        first_instruction = 0.2
        first_byte = 0.4
        tail = 3.0
        pss_kib = 512

        [[call]]
        name = "getppid"
        ratio = 0.5

        [[http]]
        function = "hello-go"
        ratio = 0.8

        [[compute]]
        language = "Python"
        speed = 0.95

        [[sandbox]]
        function = "box"
        name = "create_ready"
        ratio = 1.0

        [[sandbox]]
        function = "box"
        name = "next_command"
        ratio = 2.0

        [[file]]
        function = "box"
        write_speed = 0.7
        read_speed = 0.8
    "#;

    fn bounds() -> Bounds {
        Bounds::parse(Path::new("bounds.toml"), BOUNDS).unwrap()
    }

    /// Figures that keep each bound by nothing, with `from` replaced by `to`.
    fn complaints(from: &str, to: &str) -> Vec<String> {
        let boots = r#"{ "boots": [{
            "function": "hello-c", "boot": "warm", "n": 30,
            "phases_us": {
                "zygote": { "p50": 20.0, "p90": 22.0, "p99": 25.0 },
                "mapped": { "p50": 90.0, "p90": 95.0, "p99": 99.0 },
                "first_instruction": { "p50": 200.0, "p90": 250.0, "p99": 600.0 },
                "first_byte": { "p50": 400.0, "p90": 450.0, "p99": 500.0 }
            },
            "execution_us": { "p50": 200.0, "p90": 200.0, "p99": 200.0 },
            "native_us": { "first_byte": { "p50": 1000.0, "p90": 1100.0, "p99": 1200.0 }, "n": 30 },
            "pss_kib": 512
        }], "failures": [] }"#;
        let others = r#"{ "rounds": 10,
            "calls": [{ "name": "getppid", "ratio_p50": 0.5 }],
            "http": [{ "function": "hello-go", "ratio": 0.8 }],
            "compute": [{ "language": "Python", "speed": 0.95 }], "missing": [] }"#;
        let sandboxes = r#"{ "function": "box", "n": 5,
            "create_ready_us": { "min": 1.0, "p50": 500.0, "p90": 600.0, "p99": 700.0 },
            "next_command_us": { "min": 1.0, "p50": 1000.0, "p90": 1500.0, "p99": 1700.0 },
            "native_us" : { "min": 1.0, "p50": 500.0, "p90": 600.0, "p99": 700.0 },
            "large_file" : { "bytes": 1000, "write_speed": 0.7, "read_speed": 0.8 },
            "missing": ["nobody knows"] }"#;
        assert!([boots, others, sandboxes].iter().any(|one| one.contains(from)), "{from}");
        let mut measured = Measured::default();
        for json in [boots, others, sandboxes] {
            measured.add(Path::new("report.json"), &json.replacen(from, to, 1)).unwrap();
        }
        let verdicts = bounds().verdicts(&measured);
        assert_eq!(verdicts.len(), 11);
        verdicts.iter().filter_map(Verdict::complaint).collect()
    }

    #[test]
    fn figures_at_their_bounds_keep_them() {
        assert_eq!(complaints("hello-c", "hello-c"), [""; 0]);
    }

    #[test]
    fn each_figure_beyond_its_bound_is_one_sentence() {
        let warm = "of warm boots of hello-c";
        let cases = [
            (
                r#""first_instruction": { "p50": 200.0"#,
                r#""first_instruction": { "p50": 210.0"#,
                format!("first instruction {warm} by a native start is 0.210, and at most 0.2 is allowed"),
            ),
            (
                r#""first_byte": { "p50": 400.0"#,
                r#""first_byte": { "p50": 500.0"#,
                format!("first byte {warm} by a native start is 0.500, and at most 0.4 is allowed"),
            ),
            (
                r#""p99": 600.0"#,
                r#""p99": 1000.0"#,
                format!("p99 by p50 of the first instruction {warm} is 5.000, and at most 3 is allowed"),
            ),
            (
                r#""pss_kib": 512"#,
                r#""pss_kib": 513"#,
                format!("memory of an idle instance {warm}, in KiB, is 513.000, and at most 512 is allowed"),
            ),
            (
                r#""ratio_p50": 0.5"#,
                r#""ratio_p50": 0.6"#,
                "time of the system call `getppid` by the native one is 0.600, and at most 0.5 is allowed"
                    .to_owned(),
            ),
            (
                r#""ratio": 0.8"#,
                r#""ratio": 0.7"#,
                "throughput of hello-go by the native one is 0.700, and at least 0.8 is wanted"
                    .to_owned(),
            ),
            (
                r#""speed": 0.95"#,
                r#""speed": 0.9"#,
                "speed of a computation in Python by the native one is 0.900, and at least 0.95 is wanted"
                    .to_owned(),
            ),
        ];
        for (from, to, complaint) in cases {
            assert_eq!(complaints(from, to), [complaint]);
        }
    }

    #[test]
    fn a_bound_without_a_figure_is_not_kept() {
        let missing = complaints(r#""function": "hello-c""#, r#""function": "other""#);
        assert_eq!(missing.len(), 4);
        assert!(missing[0].ends_with("was not measured: no report has it"), "{}", missing[0]);
        assert_eq!(complaints(r#""name": "getppid""#, r#""name": "other""#).len(), 1);
        // The native start failed, so its two ratios cannot be had.
        let natively = complaints(r#""native_us": {"#, r#""native_us": null, "ignored": {"#);
        assert_eq!(natively.len(), 2);
        assert!(natively[1].ends_with("the program was not started natively"), "{}", natively[1]);
    }

    #[test]
    fn uses_of_sandboxes_are_compared_with_the_command_on_the_host() {
        let slower =
            complaints(r#""p50": 1000.0, "p90": 1500.0"#, r#""p50": 1100.0, "p90": 1500.0"#);
        let what = "next_command of sandboxes of box by the command on the host";
        assert_eq!(slower, [format!("{what} is 2.200, and at most 2 is allowed")]);
        let files = complaints(r#""write_speed": 0.7"#, r#""write_speed": 0.6"#);
        let what = "speed of writing a large file of sandboxes of box by a copy";
        assert_eq!(files, [format!("{what} is 0.600, and at least 0.7 is wanted")]);
        for from in ["\"native_us\" :", "\"large_file\" :"] {
            let missing = complaints(from, "\"other\":");
            let told = |complaint: &String| complaint.ends_with("; nobody knows");
            assert!(missing.len() == 2 && missing.iter().all(told), "{missing:?}");
        }
        let without = complaints(r#""next_command_us""#, r#""other""#);
        assert!(without[0].ends_with("the report has no next_command_us"), "{without:?}");
        // What is no report of sandboxes has none.
        assert_eq!(complaints(r#""create_ready_us""#, r#""other""#).len(), 4);
    }

    #[test]
    fn the_reason_of_a_boot_that_failed_is_told() {
        let failed = complaints(
            r#""failures": []"#,
            r#""failures": [{ "function": "hello-c", "boot": null, "reason": "it is gone" }]"#,
        );
        assert!(failed.is_empty(), "the boot is there: {failed:?}");
        let mut measured = Measured::default();
        let json =
            r#"{ "failures": [{ "function": "hello-c", "boot": "warm", "reason": "gone" }] }"#;
        measured.add(Path::new("boot.json"), json).unwrap();
        let complaint = bounds().verdicts(&measured)[0].complaint().unwrap();
        assert!(complaint.ends_with("was not measured: gone"), "{complaint}");
    }

    #[test]
    fn files_that_hold_no_bounds_or_no_report_are_refused() {
        let refused = |text: &str| Bounds::parse(Path::new("b"), text).unwrap_err().to_string();
        assert_eq!(refused(""), "b has no bound");
        assert_eq!(refused("[[boot]]\nfunction = \"f\"\nboot = \"warm\""), "b has no bound");
        assert!(refused("[[call]]\nname = \"x\"\nratoi = 1.0").contains("ratoi"));
        let error = Measured::default().add(Path::new("r"), "[").unwrap_err().to_string();
        assert!(error.starts_with("r is not a report of `thaw bench` ("), "{error}");
    }

    #[test]
    fn the_bounds_of_the_repository_are_valid() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/bounds.toml");
        Bounds::parse(&path, &std::fs::read_to_string(&path).unwrap()).unwrap();
    }
}
