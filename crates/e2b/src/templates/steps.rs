//! The steps of a build, as the SDKs send them.

use super::names::shortened;
use crate::problem::Problem;
use crate::records::ENVS_MAX;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Most steps of a build.
pub const STEPS_MAX: usize = 500;
/// Hexadecimal digits of the hash that names files which were uploaded.
const HASH_LEN: usize = 64;

/// A build that is to begin.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StartRequest {
    /// The container image that it begins with.
    pub from_image: Option<String>,
    /// The template that it begins with.
    pub from_template: Option<String>,
    from_image_registry: Option<Value>,
    start_cmd: Option<String>,
    ready_cmd: Option<String>,
    /// All steps are done.
    force: Option<bool>,
    #[serde(default)]
    steps: Vec<StepRequest>,
}

/// `forceUpload` of a step is of no effect: the SDK uploads by itself what it is told to.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct StepRequest {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    args: Vec<String>,
    files_hash: Option<String>,
    /// This step is done, and all after it, whatever was done before.
    force: Option<bool>,
}

/// What a build does, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The steps.
    pub steps: Vec<Step>,
    /// So many of the first steps need not be done if they were before.
    pub reusable: usize,
    /// The command that is left running.
    pub start: Option<String>,
    /// The command that ends with 0 when that is ready.
    pub ready: Option<String>,
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Step {
    /// Puts files there that were uploaded.
    Copy(Copy),
    /// Runs a command by a shell.
    Run {
        /// The command.
        command: String,
        /// As whom, if not as the user of the build.
        user: Option<String>,
    },
    /// Sets variables for what follows.
    Env(Vec<(String, String)>),
    /// Sets the working directory for what follows, and makes it.
    Workdir(String),
    /// Sets the user for what follows, and makes it.
    User(String),
}

/// Files that were uploaded, and where they go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Copy {
    /// The path in the archive.
    pub source: String,
    /// The path in the sandbox.
    pub target: String,
    /// User, and perhaps `:` and a group.
    pub owner: Option<String>,
    /// Permissions, in octal digits.
    pub mode: Option<String>,
    /// The name of the archive.
    pub hash: String,
}

impl Step {
    /// As a Dockerfile has it.
    pub fn text(&self) -> String {
        match self {
            Self::Copy(Copy { source, target, .. }) => format!("COPY {source} {target}"),
            Self::Run { command, .. } => format!("RUN {command}"),
            Self::Env(all) => {
                let names: Vec<_> = all.iter().map(|(name, _)| name.as_str()).collect();
                format!("ENV {}", names.join(" "))
            }
            Self::Workdir(path) => format!("WORKDIR {path}"),
            Self::User(user) => format!("USER {user}"),
        }
    }
}

impl StartRequest {
    /// What is to be done.
    ///
    /// # Errors
    /// It makes no sense, or Thaw does not do that.
    pub fn plan(self) -> Result<Plan, Problem> {
        if self.from_image_registry.is_some() {
            return Err(Problem::unsupported(
                "`fromImageRegistry`: this node pulls no image for a client, so it takes no \
                 credentials; name an image that `[images]` of its e2b.toml has",
            ));
        }
        if self.steps.len() > STEPS_MAX {
            return Err(Problem::invalid(format!(
                "a build has at most {STEPS_MAX} steps; join some with &&"
            )));
        }
        let is_forced = |step: &StepRequest| step.force == Some(true);
        let reusable = match self.force {
            Some(true) => 0,
            _ => self.steps.iter().position(is_forced).unwrap_or(self.steps.len()),
        };
        let steps = self.steps.into_iter().map(StepRequest::step).collect::<Result<_, _>>()?;
        let has_text = |command: &String| !command.trim().is_empty();
        Ok(Plan {
            steps,
            reusable,
            start: self.start_cmd.filter(has_text),
            ready: self.ready_cmd.filter(has_text),
        })
    }
}

impl StepRequest {
    fn step(self) -> Result<Step, Problem> {
        if self.args.iter().any(|arg| arg.contains('\0')) {
            return Err(Problem::invalid("an argument of a step has a NUL byte; take it out"));
        }
        let mut args = self.args.into_iter();
        let mut next = || args.next().filter(|arg| !arg.is_empty());
        match self.kind.as_str() {
            "RUN" => {
                let command = next().ok_or_else(|| lacks("RUN", "a command"))?;
                Ok(Step::Run { command, user: next() })
            }
            "WORKDIR" => Ok(Step::Workdir(next().ok_or_else(|| lacks("WORKDIR", "a path"))?)),
            "USER" => user(next(), next()),
            "ENV" => envs(args.collect()),
            "COPY" => {
                let source = next().ok_or_else(|| lacks("COPY", "a source"))?;
                let target = next().ok_or_else(|| lacks("COPY", "a target"))?;
                let (owner, mode) = (next(), next());
                let hash = self.files_hash.filter(|hash| is_hash(hash));
                let hash = hash.ok_or_else(|| lacks("COPY", "`filesHash`"))?;
                let is_octal =
                    |mode: &String| mode.bytes().all(|byte| (b'0'..b'8').contains(&byte));
                if !mode.as_ref().is_none_or(is_octal) {
                    return Err(Problem::invalid(
                        "the mode of COPY is no octal number, such as 0755",
                    ));
                }
                Ok(Step::Copy(Copy { source, target, owner, mode, hash }))
            }
            other => Err(Problem::unsupported(format!(
                "a step {:?} is nothing that this node does; it does COPY, ENV, RUN, USER and \
                 WORKDIR",
                shortened(other)
            ))),
        }
    }
}

fn lacks(kind: &str, what: &str) -> Problem {
    Problem::invalid(format!("a step {kind} lacks {what}"))
}

fn user(name: Option<String>, sudo: Option<String>) -> Result<Step, Problem> {
    match sudo.as_deref() {
        Some("true") => Err(Problem::unsupported(
            "USER: no user is given the rights of sudo; run commands as `root`",
        )),
        _ => Ok(Step::User(name.ok_or_else(|| lacks("USER", "a name"))?)),
    }
}

fn envs(args: Vec<String>) -> Result<Step, Problem> {
    let bytes: usize = args.iter().map(String::len).sum();
    if bytes > ENVS_MAX {
        return Err(too_large());
    }
    let (pairs, rest) = args.as_chunks();
    let is_name = |name: &String| !name.is_empty() && !name.contains('=');
    if pairs.is_empty() || !rest.is_empty() || !pairs.iter().all(|[name, _]| is_name(name)) {
        return Err(Problem::invalid("a step ENV has names without `=`, each with a value"));
    }
    Ok(Step::Env(pairs.iter().map(|[name, value]| (name.clone(), value.clone())).collect()))
}

/// The environment of a template is too large.
pub fn too_large() -> Problem {
    Problem::invalid(format!(
        "the environment of a template has at most {ENVS_MAX} bytes; set less"
    ))
}

/// Whether files that are uploaded may have this name.
pub fn is_hash(text: &str) -> bool {
    text.len() == HASH_LEN
        && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Kind;
    use serde_json::json;

    fn plan(request: Value) -> Result<Plan, Problem> {
        serde_json::from_value::<StartRequest>(request).unwrap().plan()
    }

    fn step(kind: &str, args: Value) -> Result<Step, Problem> {
        let hash = "ab".repeat(32);
        let step = json!({"type": kind, "args": args, "force": false, "filesHash": hash});
        plan(json!({"steps": [step]})).map(|plan| plan.steps[0].clone())
    }

    #[test]
    fn steps_are_those_of_the_sdk() {
        let text = |text: &str| text.to_owned();
        let run = |user| Ok(Step::Run { command: text("make"), user });
        assert_eq!(step("RUN", json!(["make"])), run(None));
        assert_eq!(step("RUN", json!(["make", "root"])), run(Some(text("root"))));
        assert_eq!(step("WORKDIR", json!(["/app"])), Ok(Step::Workdir(text("/app"))));
        assert_eq!(step("USER", json!(["me"])), Ok(Step::User(text("me"))));
        let env = Step::Env(vec![(text("A"), text("1")), (text("B"), text(""))]);
        assert_eq!(step("ENV", json!(["A", "1", "B", ""])), Ok(env));
        let copied = step("COPY", json!(["a", "/b/", "", "0755"])).unwrap();
        assert_eq!(copied.text(), "COPY a /b/");
        let Step::Copy(copy) = copied else { panic!("{copied:?}") };
        assert_eq!((copy.owner, copy.mode.as_deref()), (None, Some("0755")));
        let commands = plan(json!({"startCmd": "serve", "readyCmd": " ", "steps": []})).unwrap();
        assert_eq!((commands.start.as_deref(), commands.ready), (Some("serve"), None));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (kind, args) in [
            ("RUN", json!([])),
            ("RUN", json!(["a\0b"])),
            ("WORKDIR", json!([""])),
            ("USER", json!([])),
            ("ENV", json!(["A"])),
            ("ENV", json!([])),
            ("ENV", json!(["A=", "1"])),
            ("ENV", json!(["A", "x".repeat(ENVS_MAX)])),
            ("COPY", json!(["a"])),
            ("COPY", json!(["a", "b", "", "rwx"])),
        ] {
            assert_eq!(step(kind, args.clone()).unwrap_err().kind, Kind::Invalid, "{kind} {args}");
        }
        let without_hash = json!({"steps": [{"type": "COPY", "args": ["a", "b"]}]});
        assert_eq!(plan(without_hash).unwrap_err().kind, Kind::Invalid);
        let many = vec![json!({"type": "RUN", "args": ["true"]}); STEPS_MAX + 1];
        assert!(plan(json!({"steps": many[1..]})).is_ok());
        assert_eq!(plan(json!({"steps": many})).unwrap_err().kind, Kind::Invalid);
    }

    #[test]
    fn what_thaw_does_not_do_is_said() {
        let registry = json!({"fromImage": "a", "fromImageRegistry": {"type": "aws"}, "steps": []});
        assert_eq!(plan(registry).unwrap_err().kind, Kind::Unsupported);
        assert_eq!(step("HEALTHCHECK", json!([])).unwrap_err().kind, Kind::Unsupported);
        assert_eq!(step("USER", json!(["me", "true"])).unwrap_err().kind, Kind::Unsupported);
        for wrong in ["", "../../etc", &"AB".repeat(32), &"a".repeat(63)] {
            assert!(!is_hash(wrong), "{wrong}");
        }
    }
}
