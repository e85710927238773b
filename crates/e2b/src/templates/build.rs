//! A build: a sandbox of its base, in which the steps are done; the start command, which is left
//! running; and a checkpoint, of which sandboxes are made then.

use super::copying::copy;
use super::known::{BASE, Build, FINALIZE, Failure, State};
use super::log::{BuildLog, Level};
use super::origin::Origin;
use super::reusing::Reuse;
use super::running::Begun;
use super::shell::{Printed, Shell, Why, failed, why};
use super::steps::{Plan, Step};
use crate::E2b;
use crate::backend::{Ended, Sandbox, Wanted};
use crate::problem::Kind;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use thaw_node::remote::EgressWish;
use thaw_node::remote::egress::ClientEgress;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

/// How long the checkpoint may take, after which the sandbox ends by itself.
const WRITING_MAX: Duration = Duration::from_secs(900);

/// How long builds may take.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// Steps, start command and ready command together.
    pub all: Duration,
    /// A start command until it is ready.
    pub ready: Duration,
    /// Between two questions whether it is.
    pub ready_every: Duration,
    /// A start command if nothing says when it is ready.
    pub ready_untold: Duration,
    /// The writing of a checkpoint after nobody waits for it any more.
    pub late: Duration,
    /// Steps at least, for a checkpoint to be taken after them.
    pub kept_after: Duration,
}

impl Default for Times {
    /// `ready_untold` is that of E2B.
    fn default() -> Self {
        Self {
            all: Duration::from_secs(3600),
            ready: Duration::from_secs(300),
            ready_every: Duration::from_millis(200),
            ready_untold: Duration::from_secs(20),
            late: WRITING_MAX,
            kept_after: Duration::from_secs(2),
        }
    }
}

/// A build that begins.
pub struct Job {
    /// The name of the key that wants it.
    pub owner: String,
    /// The template.
    pub template: String,
    /// The build.
    pub build: String,
    /// What is known of it.
    pub known: Build,
    /// What it begins with.
    pub origin: Origin,
    /// What is to be done.
    pub plan: Plan,
    /// How many templates the owner may have.
    pub most_templates: u32,
    /// How long it may take.
    pub times: Times,
}

impl Job {
    /// The sandbox that it is made in.
    pub fn wanted(&self, most: Option<thaw_sandbox::EgressRules>) -> Wanted {
        Wanted {
            id: self.known.sandbox.clone(),
            function: self.origin.function.clone(),
            snapshot: self.origin.snapshot.clone(),
            timeout_s: (self.times.all + WRITING_MAX).as_secs(),
            pauses: false,
            metadata: BTreeMap::new(),
            egress: EgressWish::Within { most, asked: ClientEgress::all() },
            limits: self.known.limits,
            volumes: Vec::new(),
            granted_volumes: BTreeSet::new(),
        }
    }
}

/// What a build has come to.
struct Made {
    shell: Shell,
    sandbox: Sandbox,
}

impl E2b {
    /// Does a build to its end when its turn comes, and notes what has become of it. Nothing of its
    /// sandbox is left.
    pub(super) async fn build(self: Arc<Self>, job: Job, begun: Begun) {
        let job = Arc::new(job);
        let Begun { log, cancelled, turn } = begun;
        if !turn.is_free() {
            log.add(BASE, Level::Info, "Waiting for other builds");
        }
        let turn = while_wanted(cancelled.clone(), async { Ok(turn.come().await) }).await;
        let made = match &turn {
            Ok(_) => {
                let (e2b, job, log) = (self.clone(), job.clone(), log.clone());
                let made = tokio::spawn(async move { e2b.make(&job, &log, cancelled).await });
                // A panic is this node's fault, and ends nothing but this build.
                made.await.unwrap_or_else(|error| Err(Failure::new(FINALIZE, &error.to_string())))
            }
            Err(why) => Err(Failure::new(BASE, why)),
        };
        // One that was never made, or has ended by itself, is gone.
        let _ = self.backend.kill(&job.known.sandbox);
        if let Err(Failure { message, step }) = &made {
            log.add(step, Level::Error, message);
        }
        // Whoever sees that it has ended may begin the next one.
        self.templates.running.end(&job.build);
        self.note(&job, made);
        drop(turn);
        if let Ok(base) = self.backend.base(&job.wanted(None)) {
            self.templates.cache.leave_over_replaced(&job.owner, &base);
        }
        self.remove_leftovers().await;
        if self.templates.may_come().contains(&job.known.checkpoint) {
            sleep(job.times.late).await;
            self.templates.may_come().remove(&job.known.checkpoint);
            self.remove_leftovers().await;
        }
    }

    /// Notes what has become of a build.
    fn note(&self, job: &Job, made: Result<Made, Failure>) {
        let records = &self.templates.records;
        let (state, made) = match made {
            Ok(made) => (State::Ready, Some(made)),
            Err(failure) => (State::Failed(failure), None),
        };
        let is_known = records.finish(&job.template, &job.build, state, |build| {
            if let Some(Made { shell, sandbox }) = made {
                build.defaults = shell.defaults;
                build.had = Some((sandbox.cpus, sandbox.memory_bytes));
            }
        });
        if !is_known {
            records.leave_over(&job.build);
        }
    }

    /// Makes the sandbox, does the steps in it, and writes the checkpoint.
    async fn make(
        self: &Arc<Self>,
        job: &Job,
        log: &Arc<BuildLog>,
        cancelled: watch::Receiver<bool>,
    ) -> Result<Made, Failure> {
        let mut shell = Shell {
            backend: self.backend.clone(),
            id: job.known.sandbox.clone(),
            directory: String::new(),
            defaults: job.origin.defaults.clone(),
            log: log.clone(),
            step: BASE.to_owned(),
        };
        // It is not given up: nobody would know the sandbox.
        let made = self.begin_sandbox(job, &mut shell).await;
        let (sandbox, reuse) = made.map_err(|problem| Failure::new(BASE, &problem.message))?;
        shell.directory.clone_from(&sandbox.directory);
        let most = job.times.all;
        let steps = timeout(most, self.follow(job, &mut shell, reuse));
        let done =
            while_wanted(cancelled, async { steps.await.unwrap_or_else(|_| Err(too_long(most))) });
        let done = done.await;
        done.map_err(|why| Failure::new(&shell.step, &why))?;
        // Nor is this: half of a checkpoint would be nobody's.
        shell.say("Writing the template");
        // The disk may be so slow that nobody waits for it to its end.
        self.templates.may_come().insert(job.known.checkpoint.clone());
        let write = || self.backend.snapshot(&job.known.sandbox, &job.known.checkpoint);
        let written = match write().await {
            // Perhaps there is room without what is kept of steps.
            Err(problem)
                if problem.kind != Kind::Late && self.remove_steps_of(&job.owner).await =>
            {
                write().await
            }
            written => written,
        };
        written.map_err(|problem| {
            if problem.kind != Kind::Late {
                self.templates.may_come().remove(&job.known.checkpoint);
            }
            let message = format!("the template cannot be written: {}", problem.message);
            Failure::new(FINALIZE, &message)
        })?;
        self.templates.may_come().remove(&job.known.checkpoint);
        shell.say("The template is ready");
        Ok(Made { shell, sandbox })
    }

    /// Does the steps that were not done before, and has the start command run.
    async fn follow(
        self: &Arc<Self>,
        job: &Job,
        shell: &mut Shell,
        mut reuse: Reuse,
    ) -> Result<(), Why> {
        let count = job.plan.steps.len();
        for (n, step) in (1..).zip(&job.plan.steps) {
            let is_done = n <= reuse.done;
            shell.step = n.to_string();
            let cached = if is_done { " (CACHED)" } else { "" };
            shell.say(&format!("[{n}/{count}] {}{cached}", step.text()));
            if !is_done {
                self.do_step(shell, step, &job.owner).await?;
                self.keep_step(job, shell, &mut reuse, n).await;
            }
        }
        FINALIZE.clone_into(&mut shell.step);
        start(shell, &job.plan, &job.times).await
    }

    async fn do_step(&self, shell: &mut Shell, step: &Step, owner: &str) -> Result<(), Why> {
        match step {
            Step::Run { command, user } => {
                let mut wanted = shell.command(command);
                wanted.user = user.clone().or(wanted.user);
                shell.must(command, wanted).await
            }
            Step::Env(envs) => shell.set_envs(envs).await,
            Step::Workdir(path) => shell.set_directory(path).await,
            Step::User(user) => shell.set_user(user).await,
            Step::Copy(step) => copy(shell, step, &self.templates.uploads, owner).await,
        }
    }
}

/// Does something, unless the build is not wanted any more before it is done.
async fn while_wanted<T>(
    mut cancelled: watch::Receiver<bool>,
    work: impl Future<Output = Result<T, Why>>,
) -> Result<T, Why> {
    tokio::select! {
        done = work => done,
        // Whoever could say so is gone with the build.
        _ = cancelled.wait_for(|is_cancelled| *is_cancelled) => {
            Err("the template was deleted while it was built".to_owned())
        }
    }
}

fn too_long(most: Duration) -> Why {
    format!("the build has taken {} s, which is as long as it may", most.as_secs())
}

/// Starts the start command, if there is one, and waits until it is ready.
async fn start(shell: &Shell, plan: &Plan, times: &Times) -> Result<(), Why> {
    let Some(command) = &plan.start else {
        return match &plan.ready {
            Some(ready) => until_ready(shell, ready, times).await,
            None => Ok(()),
        };
    };
    shell.say(&format!("Starting {command}"));
    let started = shell.backend.start(&shell.id, shell.command(command)).await;
    let (_, output) = started.map_err(why)?;
    let mut printed = Printed::new(output);
    let mut has_ended = false;
    let ready = async {
        match &plan.ready {
            Some(ready) => until_ready(shell, ready, times).await,
            None => {
                sleep(times.ready_untold).await;
                Ok(())
            }
        }
    };
    tokio::pin!(ready);
    loop {
        let line = |level, line: &str| shell.log.add(&shell.step, level, line);
        tokio::select! {
            is_ready = &mut ready => return is_ready,
            next = printed.next(line), if !has_ended => match next? {
                // Some only start what goes on.
                Some(Ended::Code(0)) => has_ended = true,
                Some(ended) => return Err(failed(command, ended, &printed.tail())),
                None => {}
            },
        }
    }
}

/// Waits until a command ends with 0.
async fn until_ready(shell: &Shell, command: &str, times: &Times) -> Result<(), Why> {
    let mut last = String::new();
    let asking = async {
        while let Some(tail) = is_ready(shell, command).await? {
            last = tail;
            sleep(times.ready_every).await;
        }
        Ok(())
    };
    let asked = timeout(times.ready, asking).await;
    asked.unwrap_or_else(|_| {
        let seconds = times.ready.as_secs();
        Err(format!("the ready command {command:?} has not ended with 0 for {seconds} s: {last}"))
    })
}

/// `None` if so, and otherwise what the command has printed.
async fn is_ready(shell: &Shell, command: &str) -> Result<Option<String>, Why> {
    if let Some(port) = port_of(command) {
        let connected = shell.backend.port(&shell.id, port).await;
        return Ok(connected.err().map(why));
    }
    let (_, output) = shell.backend.start(&shell.id, shell.command(command)).await.map_err(why)?;
    let mut printed = Printed::new(output);
    loop {
        match printed.next(|_, _| {}).await? {
            Some(Ended::Code(0)) => return Ok(None),
            Some(_) => return Ok(Some(printed.tail())),
            None => {}
        }
    }
}

/// The port that the SDK's `wait_for_port` waits for. It asks the program `ss`, which few images have, and
/// to which the sandbox' kernel says nothing: so this node looks itself whether somebody listens.
fn port_of(command: &str) -> Option<u16> {
    let rest = command.trim().strip_prefix("[ -n \"$(ss -Htuln sport = :")?;
    rest.strip_suffix(")\" ]")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ready_command_of_the_sdk_for_ports_is_known() {
        // As `wait_for_port` of E2B's Python SDK 2.63 and `waitForPort` of that for JavaScript have it.
        assert_eq!(port_of("[ -n \"$(ss -Htuln sport = :8000)\" ]"), Some(8000));
        for other in [
            "",
            "ss",
            "[ -n \"$(ss -Htuln sport = :x)\" ]",
            "[ -n \"$(ss -Htuln sport = :1)\" ]; true",
        ] {
            assert_eq!(port_of(other), None, "{other}");
        }
    }
}
