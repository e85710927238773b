//! Templates and builds as the API shows them.

use super::known::{Build, State, Template};
use super::log::BuildLog;
use crate::ENVD_VERSION;
use crate::control::time_text;
use serde_json::{Value, json};

/// Lines of its step that the reason of a failure has.
const REASON_LINES: usize = 20;

fn state(build: &Build) -> &'static str {
    match build.state {
        State::Waiting => "waiting",
        State::Building => "building",
        State::Ready => "ready",
        State::Failed(_) => "error",
    }
}

/// How far a build is, and so many lines of its log, from a number on.
pub fn status(
    (template, id): (&str, &str),
    build: &Build,
    log: Option<&BuildLog>,
    (offset, limit): (usize, usize),
) -> Value {
    let lines = log.map(|log| log.page(offset, limit)).unwrap_or_default();
    let mut shown = json!({
        "templateID": template,
        "buildID": id,
        "status": state(build),
        "logs": [],
        "logEntries": lines,
    });
    if let State::Failed(failure) = &build.state {
        let last = log.map(|log| log.last_of(&failure.step, REASON_LINES)).unwrap_or_default();
        shown["reason"] =
            json!({"message": failure.message, "step": failure.step, "logEntries": last});
    }
    shown
}

/// Processors, and MiB of memory.
fn limits(build: Option<&Build>) -> (u32, u64) {
    let (cpus, bytes) = build.and_then(|build| build.had).unwrap_or_default();
    (cpus, bytes >> 20)
}

/// A template in a list.
pub fn summary(id: &str, template: &Template) -> Value {
    let latest = template.latest();
    let ready = template.ready(super::names::DEFAULT_TAG).or(latest);
    let build = ready.map(|(_, build)| build);
    let (cpus, memory_mb) = limits(build);
    let updated_ms = latest
        .map_or(template.created_ms, |(_, build)| build.finished_ms.unwrap_or(build.created_ms));
    json!({
        "templateID": id,
        "buildID": ready.map_or("", |(id, _)| id),
        "cpuCount": cpus,
        "memoryMB": memory_mb,
        // Files take memory here.
        "diskSizeMB": memory_mb,
        "public": false,
        "names": [template.name],
        "aliases": [template.name],
        "createdAt": time_text(template.created_ms),
        "updatedAt": time_text(updated_ms),
        "createdBy": null,
        "lastSpawnedAt": template.spawned_ms.map(time_text),
        "spawnCount": template.spawned,
        "buildCount": template.builds.len(),
        "envdVersion": ENVD_VERSION,
        "buildStatus": build.map_or("waiting", state),
    })
}

/// A template with its builds, the latest first.
pub fn with_builds(id: &str, template: &Template) -> Value {
    let mut builds: Vec<_> = template.builds.iter().collect();
    builds.sort_by_key(|(_, build)| std::cmp::Reverse(build.created_ms));
    let builds = builds.into_iter().map(|(id, build)| {
        let (cpus, memory_mb) = limits(Some(build));
        json!({
            "buildID": id,
            "status": state(build),
            "createdAt": time_text(build.created_ms),
            "updatedAt": time_text(build.finished_ms.unwrap_or(build.created_ms)),
            "finishedAt": build.finished_ms.map(time_text),
            "cpuCount": cpus,
            "memoryMB": memory_mb,
            "diskSizeMB": memory_mb,
            "envdVersion": ENVD_VERSION,
        })
    });
    let mut shown = summary(id, template);
    shown["builds"] = builds.collect();
    shown
}
