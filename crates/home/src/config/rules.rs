//! Rules between keys of a `thaw.toml`, which no type can carry.

use super::{
    ByteSize, Connections, EntryKind, FreezeAt, FunctionConfig, Isolation, ProbeKind, Protocol,
    RuntimeKind,
};
use std::time::Duration;
use thaw_sandbox::Processes;
use thaw_sandbox::limits::PROCESSES_MAX;

/// Longest working directory (`PATH_MAX`, limits.h).
const WORKDIR_MAX: usize = 4096;
/// Longest time that an instance may go on after SIGTERM.
const GRACE_MAX: Duration = Duration::from_secs(60);

/// Shortest time until an idle instance gives pages back, which the next request copies again.
const TRIM_AFTER_MIN: Duration = Duration::from_secs(1);

/// Most rules of `[egress]`, each of which every connection is held against.
const EGRESS_MAX: usize = 1024;

/// The keys that lead to the wrong value, and what is wrong with it.
type Contradiction = (&'static [&'static str], String);

impl FunctionConfig {
    /// The first rule between keys that does not hold: where, and what to do.
    pub(super) fn contradiction(&self) -> Option<Contradiction> {
        self.wrong_files()
            .or_else(|| self.wrong_image())
            .or_else(|| self.wrong_command())
            .or_else(|| self.wrong_limits())
            .or_else(|| self.wrong_processes())
            .or_else(|| self.wrong_rewind())
            .or_else(|| self.wrong_trimming())
            .or_else(|| self.wrong_hibernation())
            .or_else(|| self.wrong_sleep())
            .or_else(|| self.wrong_grace())
            .or_else(|| self.wrong_entry())
            .or_else(|| self.wrong_protocol())
            .or_else(|| self.wrong_training())
            .or_else(|| self.wrong_build())
            .or_else(|| self.wrong_rollback())
            .or_else(|| self.wrong_liveness())
            .or_else(|| self.wrong_triggers())
            .or_else(|| self.wrong_egress())
            .or_else(|| self.wrong_injection())
            .or_else(|| {
                super::volumes::wrong_volumes(&self.volumes).map(|why| (&["volumes"] as _, why))
            })
    }

    /// Checks the rules between keys of a configuration that was in no `thaw.toml`.
    ///
    /// # Errors
    /// One sentence: which one does not hold.
    pub fn check(&self) -> Result<(), String> {
        match self.contradiction() {
            None => Ok(()),
            Some((_, message)) => Err(format!("the function's configuration is wrong: {message}")),
        }
    }

    fn wrong_egress(&self) -> Option<Contradiction> {
        let count = self.egress.allow.len() + self.egress.reconnect.len();
        (count > EGRESS_MAX).then(|| {
            let why = format!(
                "[egress] has {count} rules, and at most {EGRESS_MAX} are kept; write networks or \
                 *.domain in place of several"
            );
            (&["egress"] as _, why)
        })
    }

    fn wrong_injection(&self) -> Option<Contradiction> {
        let checked = super::inject::check(&self.egress.inject, &self.secrets.names);
        checked.err().map(|why| (&["egress", "inject"] as _, why))
    }

    fn wrong_rollback(&self) -> Option<Contradiction> {
        let (key, why) = self.rollback?.contradiction()?;
        let keys: &[&str] = match key {
            "window" => &["rollback", "window"],
            _ => &["rollback", "percent"],
        };
        Some((keys, why))
    }

    /// Only an instance that waits for a second request lives long enough to be asked, and only
    /// one that answers HTTP can be.
    fn wrong_liveness(&self) -> Option<Contradiction> {
        let liveness = self.liveness.as_ref()?;
        let is_answered = match liveness.kind {
            ProbeKind::Http => self.entry.kind == EntryKind::Http,
            ProbeKind::Tcp => matches!(self.entry.kind, EntryKind::Http | EntryKind::Tcp),
            ProbeKind::Grpc => self.entry.kind == EntryKind::Http && self.protocol == Protocol::H2c,
        };
        if !is_answered {
            let why = match (self.entry.kind, liveness.kind) {
                (EntryKind::Http, _) => "[liveness] asks by gRPC, which needs HTTP/2; set \
                                         `protocol = \"h2c\"`, or ask for another `kind`"
                    .to_owned(),
                (EntryKind::Tcp, _) => "[liveness] sends HTTP requests, which kind = \"tcp\" does not \
                                        answer; ask for connections, by `kind = \"tcp\"` in [liveness]"
                    .to_owned(),
                (kind, _) => format!(
                    "[liveness] asks over TCP, which kind = \"{}\" does not answer; remove it",
                    kind.name()
                ),
            };
            return Some((&["liveness"], why));
        }
        if self.isolation == Isolation::Request {
            let why = "[liveness] is for isolation = \"instance\"; other instances end with their \
                       request, so change one of them";
            return Some((&["liveness"], why.to_owned()));
        }
        let (key, why) = liveness.contradiction()?;
        let keys: &[&str] = match key {
            "kind" => &["liveness"],
            "path" => &["liveness", "path"],
            "service" => &["liveness", "service"],
            "period" => &["liveness", "period"],
            "timeout" => &["liveness", "timeout"],
            _ => &["liveness", "failures"],
        };
        Some((keys, why))
    }

    fn wrong_rewind(&self) -> Option<Contradiction> {
        let why = self.no_rewind().filter(|_| self.rewind == Some(true))?;
        Some((&["rewind"], format!("{why}; remove one of them")))
    }

    /// Why instances cannot be put back, if so: one that is must not owe anything to its earlier
    /// life, nor be owed.
    pub fn no_rewind(&self) -> Option<&'static str> {
        if self.isolation != Isolation::Request {
            Some("`rewind` is for isolation = \"request\", under which no instance serves twice")
        } else if matches!(self.entry.kind, EntryKind::Stdin | EntryKind::Udp | EntryKind::Sandbox)
        {
            Some("`rewind` is for kind = \"http\" and \"tcp\"")
        } else if !self.egress.is_closed() {
            Some("`rewind` is not for functions with [egress]: their connections outlive a request")
        } else if !self.volumes.is_empty() {
            Some(
                "`rewind` is not for functions with [[volumes]]: files that are open outlive a request",
            )
        } else if self.limits.cpu_time.is_some() {
            Some(
                "`rewind` is not for functions with `cpu_time`, which bounds the whole life of an instance",
            )
        } else if self.template.fork {
            Some(
                "`rewind` and `template` exclude each other: instances that were put back are ready sooner than a fork",
            )
        } else {
            None
        }
    }

    /// Not between two requests that follow each other.
    fn wrong_trimming(&self) -> Option<Contradiction> {
        let why = "`trim_after` is shorter than 1s; use a longer time, or one as long as `keep_alive` to keep all pages";
        let is_short = self.limits.trim_after.0 < TRIM_AFTER_MIN;
        is_short.then(|| (&["limits", "trim_after"] as _, why.to_owned()))
    }

    /// Only an instance that waits for a second request is ever idle.
    fn wrong_hibernation(&self) -> Option<Contradiction> {
        let after = self.limits.hibernate_after?;
        let why = if self.isolation == Isolation::Request {
            "`hibernate_after` is for isolation = \"instance\", under which instances wait for a second request"
        } else if after.0 >= self.limits.keep_alive.0 {
            "`hibernate_after` is not shorter than `keep_alive`, after which the instance ends"
        } else {
            return None;
        };
        let keys: &[&str] = &["limits", "hibernate_after"];
        Some((keys, format!("{why}; change one of them")))
    }

    /// The same for sleep, and a state that a request alone would reach is no state to persist.
    fn wrong_sleep(&self) -> Option<Contradiction> {
        let stays = self.isolation == Isolation::Instance;
        if self.persist && !stays {
            let why = "`persist` is for isolation = \"instance\", under which instances outlive a request";
            return Some((&["persist"], format!("{why}; change one of them")));
        }
        if self.persist && self.hibernate.encrypt {
            let why =
                "`persist` is not for `hibernate.encrypt = true`, whose keys end with the daemon";
            return Some((&["persist"], format!("{why}; change one of them")));
        }
        let limits = &self.limits;
        let after = limits.sleep_after?;
        let why = if !stays {
            "`sleep_after` is for isolation = \"instance\", under which instances wait for a second request"
        } else if after.0 >= limits.keep_alive.0 {
            "`sleep_after` is not shorter than `keep_alive`, after which the instance ends"
        } else if limits.hibernate_after.is_some_and(|hibernate| hibernate.0 >= after.0) {
            "`sleep_after` is not longer than `hibernate_after`, which would never come"
        } else {
            return None;
        };
        Some((&["limits", "sleep_after"], format!("{why}; change one of them")))
    }

    /// Only an instance that waits for a second request can be told to end.
    fn wrong_grace(&self) -> Option<Contradiction> {
        let grace = self.limits.grace.0;
        let why = if grace > GRACE_MAX {
            "`grace` is longer than 1m"
        } else if !grace.is_zero() && self.isolation == Isolation::Request {
            "`grace` is for isolation = \"instance\"; other instances end with their request"
        } else {
            return None;
        };
        Some((&["limits", "grace"], format!("{why}; change one of them")))
    }

    fn wrong_build(&self) -> Option<Contradiction> {
        let build = self.build.as_ref()?;
        let requirements = self.runtime.as_ref().and_then(|r| r.requirements.as_ref());
        let nul = |text: &String| text.contains('\0');
        if build.command.is_empty() && requirements.is_none() {
            return Some((
                &["build"],
                "[build] has nothing to do; set `command`, or remove it".to_owned(),
            ));
        }
        if build.command.iter().any(nul) {
            return Some((
                &["build", "command"],
                "an argument contains a NUL byte; remove it".to_owned(),
            ));
        }
        if build.timeout.0.is_zero() {
            return Some((
                &["build", "timeout"],
                "no build is done in no time; give some".to_owned(),
            ));
        }
        if build.memory < ByteSize::mebibytes(64) {
            return Some((
                &["build", "memory"],
                format!("{} is too little memory for a build; give at least 64MiB", build.memory),
            ));
        }
        None
    }

    fn wrong_files(&self) -> Option<Contradiction> {
        let python_only = |key| {
            format!("`{key}` is for kind = \"python3\"; remove it or change the runtime's kind")
        };
        match (&self.rootfs, &self.runtime) {
            (None, None) => {
                return Some((
                    &[],
                    "the function has no root file system; set `rootfs` to a directory or a \
                     stored name, or add a [runtime] section such as kind = \"python3\""
                        .to_owned(),
                ));
            }
            (Some(_), Some(_)) => {
                return Some((
                    &["rootfs"],
                    "`rootfs` and [runtime] exclude each other; keep one of them".to_owned(),
                ));
            }
            (None, Some(runtime)) if runtime.kind != RuntimeKind::Python3 => {
                if runtime.interpreter.is_some() && runtime.kind == RuntimeKind::Binary {
                    return Some((
                        &["runtime", "interpreter"],
                        "`interpreter` is for languages; remove it or change the runtime's kind"
                            .to_owned(),
                    ));
                }
                if runtime.requirements.is_some() {
                    return Some((&["runtime", "requirements"], python_only("requirements")));
                }
                if runtime.packages.is_some() {
                    return Some((&["runtime", "packages"], python_only("packages")));
                }
            }
            _ => {}
        }
        None
    }

    /// A runtime is collected from this host, or is a container image.
    fn wrong_image(&self) -> Option<Contradiction> {
        let runtime = self.runtime.as_ref()?;
        let is_image = runtime.kind == RuntimeKind::Image;
        let of_host =
            [(!runtime.include.is_empty(), "include"), (!runtime.programs.is_empty(), "programs")];
        if is_image && runtime.image.is_none() {
            let message = "[runtime] says neither what to collect nor which image to take; set `kind`, such \
                           as \"python3\", or `image`";
            return Some((&["runtime"], message.to_owned()));
        }
        if !is_image && runtime.image.is_some() {
            let message = "`image` and `kind` exclude each other; keep one of them";
            return Some((&["runtime", "image"], message.to_owned()));
        }
        let (_, key) = of_host.into_iter().find(|(is_set, _)| is_image && *is_set)?;
        let message = format!("`{key}` is for files of this host, not for images; remove it");
        Some((&["runtime", "image"], message))
    }

    fn wrong_command(&self) -> Option<Contradiction> {
        if self.command.is_empty()
            && self.image().is_none()
            && self.entry.kind != EntryKind::Sandbox
        {
            let message = "missing `command`, the program and its arguments; set it, such as \
                           [\"python3\", \"server.py\"]";
            return Some((&[], message.to_owned()));
        }
        if self.workdir.len() > WORKDIR_MAX {
            let message = format!("it is longer than {WORKDIR_MAX} bytes; shorten it");
            return Some((&["workdir"], message));
        }
        if let Some(user) = &self.user
            && (user.is_empty() || user.contains(['\0', '\n']))
        {
            let message = "`user` is a user and perhaps a group, as in \"app:staff\" or \"1000\"";
            return Some((&["user"], message.to_owned()));
        }
        let is_the_images = self.workdir.is_empty() && self.image().is_some();
        if !is_the_images && !self.workdir.starts_with('/') {
            return Some((
                &["workdir"],
                format!("`{}` is not absolute; begin the path with a slash", self.workdir),
            ));
        }
        if let Some(key) = self.env.keys().find(|key| key.is_empty() || key.contains(['=', '\0'])) {
            return Some((
                &["env"],
                format!("`{key}` cannot name an environment variable; use letters, digits and _"),
            ));
        }
        let nul = |text: &String| text.contains('\0');
        if self.command.iter().any(nul) {
            return Some((&["command"], "an argument contains a NUL byte; remove it".to_owned()));
        }
        if self.env.values().any(nul) {
            return Some((&["env"], "a value contains a NUL byte; remove it".to_owned()));
        }
        None
    }

    fn wrong_limits(&self) -> Option<Contradiction> {
        if let Err(too_little) = self.limits.memory.check_memory() {
            return Some((&["limits", "memory"], too_little));
        }
        if let Some(most) = self.limits.memory_max.filter(|most| *most < self.limits.memory) {
            return Some((
                &["limits", "memory_max"],
                format!(
                    "{most} is less than `memory`, {}; sandboxes begin with that, so give at \
                     least as much",
                    self.limits.memory
                ),
            ));
        }
        if let Some(most) = self.limits.cpu_max.filter(|most| *most < self.limits.cpu) {
            return Some((
                &["limits", "cpu_max"],
                format!(
                    "{most} is less than `cpu`, {}; sandboxes begin with that, so give at least \
                     as many",
                    self.limits.cpu
                ),
            ));
        }
        if self.limits.processes.get() > PROCESSES_MAX {
            return Some((
                &["limits", "processes"],
                format!(
                    "no sandbox can have {} processes; give at most {PROCESSES_MAX}",
                    self.limits.processes
                ),
            ));
        }
        if self.limits.processes < self.limits.cpu {
            return Some((
                &["limits", "processes"],
                format!(
                    "{} processes leave no room for {} virtual CPUs, each of which counts as one; \
                     raise `processes` or lower `cpu`",
                    self.limits.processes, self.limits.cpu
                ),
            ));
        }
        if u32::from(self.ready) > self.limits.instances.get() {
            return Some((
                &["ready"],
                format!(
                    "{} instances cannot be kept ready where [limits] allows {}; lower `ready` \
                     or raise `instances`",
                    self.ready, self.limits.instances
                ),
            ));
        }
        const SHORTEST_REFRESH: Duration = Duration::from_secs(60);
        if self.refresh.is_some_and(|refresh| refresh.0 < SHORTEST_REFRESH) {
            return Some((
                &["refresh"],
                "freezing a function anew takes as long as it takes to start; give a `refresh` \
                 of at least \"1m\""
                    .to_owned(),
            ));
        }
        if self.limits.timeout.0.is_zero() {
            return Some((
                &["limits", "timeout"],
                "a timeout of 0 answers nobody; give some time".to_owned(),
            ));
        }
        if self.isolation == Isolation::Request && self.limits.concurrency.get() > 1 {
            return Some((
                &["limits", "concurrency"],
                "isolation = \"request\" gives every request its own instance; remove \
                 `concurrency` or set isolation = \"instance\""
                    .to_owned(),
            ));
        }
        None
    }

    fn wrong_processes(&self) -> Option<Contradiction> {
        if self.processes() == Processes::Several || !self.template.fork {
            return None;
        }
        Some((
            &["template"],
            "copies of a template have a longer list of host calls than processes = 1 \
             promises; remove `template`, or raise `processes`"
                .to_owned(),
        ))
    }

    fn wrong_entry(&self) -> Option<Contradiction> {
        let kind = self.entry.kind;
        if kind == EntryKind::Sandbox {
            return self.wrong_sandbox();
        }
        if self.port.is_none() && kind != EntryKind::Stdin && self.image().is_none() {
            return Some((
                &[],
                "missing `port`, on which the program listens; set it, or [entry] kind = \"stdin\" \
                 for a program that reads its request from standard input"
                    .to_owned(),
            ));
        }
        if self.entry.connections == Connections::Handover
            && let Some(message) = self.wrong_handover()
        {
            return Some((&["entry", "connections"], message));
        }
        match kind {
            EntryKind::Http => None,
            EntryKind::Tcp | EntryKind::Udp if self.listen.is_none() => Some((
                &["entry", "kind"],
                format!(
                    "clients of kind = \"{}\" find the function by an address of its own; set \
                     `listen`, such as \"127.0.0.1:9000\"",
                    kind.name()
                ),
            )),
            EntryKind::Tcp | EntryKind::Udp => None,
            EntryKind::Stdin if self.port.is_some() => Some((
                &["port"],
                "a program that reads its request from standard input has no port; remove `port` \
                 or [entry] kind = \"stdin\""
                    .to_owned(),
            )),
            EntryKind::Stdin if self.isolation == Isolation::Instance => Some((
                &["isolation"],
                "a program reads one request from its standard input; remove `isolation`"
                    .to_owned(),
            )),
            EntryKind::Stdin | EntryKind::Sandbox => None,
        }
    }

    /// A sandbox has no program, so nobody comes to it.
    fn wrong_sandbox(&self) -> Option<Contradiction> {
        let (keys, what): (&[&str], _) = if !self.command.is_empty() {
            (&["command"], "has no program of its own; remove `command`")
        } else if self.port.is_some() {
            (&["port"], "listens nowhere; remove `port`")
        } else if self.listen.is_some() {
            (&["listen"], "listens nowhere; remove `listen`")
        } else if self.entry.freeze != FreezeAt::Wait {
            (&["entry", "freeze"], "is frozen at once; remove `freeze`")
        } else if self.isolation != Isolation::Instance {
            (&["isolation"], "stays until it is ended; set isolation = \"instance\"")
        } else if self.runtime.as_ref().is_some_and(|runtime| runtime.kind == RuntimeKind::Binary) {
            (
                &["runtime", "kind"],
                "has no program whose files could be collected; give another `kind`, or `rootfs`",
            )
        } else if self.processes() == Processes::One {
            (&["limits", "processes"], "needs more than one process; raise `processes`")
        } else {
            return None;
        };
        Some((keys, format!("a function of kind = \"sandbox\" {what}")))
    }

    fn wrong_handover(&self) -> Option<String> {
        match self.entry.kind {
            EntryKind::Http if self.listen.is_none() => Some(
                "connections = \"handover\" is for clients that can mean no other function; set \
                 `listen`, such as \"127.0.0.1:9000\", or remove `connections`"
                    .to_owned(),
            ),
            EntryKind::Http => None,
            kind => Some(format!(
                "`connections` is for HTTP; remove it, kind = \"{}\" leaves no choice",
                kind.name()
            )),
        }
    }

    /// HTTP/2 is spoken where the gateway routes requests.
    fn wrong_protocol(&self) -> Option<Contradiction> {
        let why = if self.protocol.is_http1() {
            return None;
        } else if self.entry.kind != EntryKind::Http {
            format!(
                "`protocol` is for HTTP, which kind = \"{}\" does not speak; remove it",
                self.entry.kind.name()
            )
        } else if self.entry.connections == Connections::Handover {
            "with protocol = \"h2c\" the gateway routes each request, and hands no connection over; \
             remove one of `protocol` and [entry] `connections`"
                .to_owned()
        } else {
            return None;
        };
        Some((&["protocol"], why))
    }

    fn wrong_training(&self) -> Option<Contradiction> {
        let train = self.train.as_ref()?;
        if self.entry.kind != EntryKind::Http {
            return Some((
                &["train"],
                format!(
                    "[train] sends HTTP requests, which kind = \"{}\" does not answer; remove it",
                    self.entry.kind.name()
                ),
            ));
        }
        if self.entry.freeze != FreezeAt::Wait {
            return Some((
                &["train"],
                "[train] begins when the program waits for a client; remove it or `freeze`"
                    .to_owned(),
            ));
        }
        let message = train.requests.iter().find_map(|request| request.contradiction())?;
        Some((&["train", "requests"], message))
    }
}
