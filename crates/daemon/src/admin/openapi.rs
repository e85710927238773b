//! The admin API as OpenAPI 3.1 describes it.
//!
//! Paths stand in [`OPERATIONS`], and a test compares them with the routes that are served. Schemas
//! come from the types that handlers take and give.

use super::types::{
    CheckpointInfo, FellAsleep, Frozen, FunctionDetail, FunctionInfo, Hibernated, ImageSummary,
    Problem, SnapshotMade, Woken,
};
use crate::deploy::Deployment;
use schemars::generate::SchemaSettings;
use schemars::{Schema, SchemaGenerator};
use serde_json::{Map, Value, json};
use thaw_node::catalog::Reload;
use thaw_node::history::{SeriesView, Stats};
use thaw_node::metrics::Event;
use thaw_node::metrics::QueueInfo;
use thaw_node::pulls::{NewPull, PullInfo};
use thaw_node::remote::files::FileInfo;
use thaw_node::remote::tree::TREE_TYPE;
use thaw_node::remote::untree::TreeReport;
use thaw_node::remote::{
    EgressInfo, ExecInfo, ExecRequest, LimitsChange, LimitsInfo, Listener, SandboxEgress,
    SandboxInject,
};
use thaw_node::sandboxes::{NewSandbox, SandboxInfo};
use thaw_node::service::{CheckpointTaken, Forked, InstanceInfo, Restored};
use thaw_node::tenants::TenantReport;
use thaw_node::triggers::ScheduleInfo;
use thaw_node::usage::UsageReport;

/// What a body is.
#[derive(Clone, Copy)]
enum Content {
    /// None.
    Nothing,
    /// JSON of a type.
    Json(fn(&mut SchemaGenerator) -> Schema),
    /// Bytes of this media type.
    Bytes(&'static str),
    /// The connection carries streams from then on.
    Upgrade(fn(&mut SchemaGenerator) -> Schema),
}

use Content::{Bytes, Json, Nothing, Upgrade};

fn of<T: schemars::JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<T>()
}

/// A request.
struct Operation {
    method: &'static str,
    path: &'static str,
    says: &'static str,
    /// Parameters of the query; those that begin with `!` must be there.
    query: &'static [&'static str],
    takes: Content,
    gives: Content,
}

const fn operation(
    method: &'static str,
    path: &'static str,
    says: &'static str,
    query: &'static [&'static str],
    takes: Content,
    gives: Content,
) -> Operation {
    Operation { method, path, says, query, takes, gives }
}

const OCTETS: &str = "application/octet-stream";
const FILE: &[&str] = &["!path", "user"];

#[rustfmt::skip]
const OPERATIONS: &[Operation] = &[
    operation("get", "/healthz", "Whether the node serves; 503 while it drains", &[], Nothing, Json(of::<Value>)),
    operation("get", "/metrics", "Metrics as OpenMetrics", &[], Nothing, Bytes("application/openmetrics-text")),
    operation("get", "/stats", "Rates and states of the last seconds", &[], Nothing, Json(of::<Stats>)),
    operation("get", "/stats/series", "The last hour of the node, or of a function", &["function"], Nothing, Json(of::<SeriesView>)),
    operation("get", "/events", "The latest events, newest first", &[], Nothing, Json(of::<Vec<Event>>)),
    operation("get", "/openapi.json", "This description", &[], Nothing, Json(of::<Value>)),
    operation("get", "/functions", "The functions", &[], Nothing, Json(of::<Vec<FunctionInfo>>)),
    operation("get", "/functions/{name}", "A function with its instances and last boots", &[], Nothing, Json(of::<FunctionDetail>)),
    operation("get", "/functions/{name}/logs", "Lines of its log, a JSON object each", &["follow", "instance"], Nothing, Bytes("application/x-ndjson")),
    operation("post", "/functions/{name}/invoke", "Calls it; the function's own response", &["method", "path", "timings", "instance", "async"], Bytes(OCTETS), Bytes(OCTETS)),
    operation("post", "/functions/{name}/freeze", "Makes an idle instance the image of a new version", &["instance"], Nothing, Json(of::<Frozen>)),
    operation("post", "/functions/{name}/hibernate", "Has an idle instance give up its memory", &["instance"], Nothing, Json(of::<Hibernated>)),
    operation("post", "/functions/{name}/sleep", "Puts an idle instance to sleep", &["instance"], Nothing, Json(of::<FellAsleep>)),
    operation("post", "/functions/{name}/wake", "Wakes an instance", &["instance"], Nothing, Json(of::<Woken>)),
    operation("get", "/functions/{name}/versions", "Its versions, and which get requests", &[], Nothing, Json(of::<Deployment>)),
    operation("post", "/functions/{name}/activate", "Sends all requests to a version", &["!version"], Nothing, Json(of::<Deployment>)),
    operation("post", "/functions/{name}/restart", "Serves the same versions by new instances", &[], Nothing, Json(of::<thaw_node::catalog::Restarted>)),
    operation("post", "/functions/{name}/rollback", "Takes the last change back", &[], Nothing, Json(of::<Deployment>)),
    operation("post", "/functions/{name}/split", "Gives a version a share of the requests", &["!version", "percent", "header"], Nothing, Json(of::<Deployment>)),
    operation("get", "/pulls", "Pulls that this daemon has begun, the oldest first", &[], Nothing, Json(of::<Vec<PullInfo>>)),
    operation("post", "/pulls", "Begins a pull", &[], Json(of::<NewPull>), Json(of::<PullInfo>)),
    operation("get", "/pulls/{id}", "How far a pull is", &[], Nothing, Json(of::<PullInfo>)),
    operation("delete", "/pulls/{id}", "Ends a pull; what is here of its function stays, and is left alone", &[], Nothing, Json(of::<PullInfo>)),
    operation("get", "/queues", "Queues of triggers in numbers", &[], Nothing, Json(of::<Vec<QueueInfo>>)),
    operation("get", "/functions/{name}/queue", "Invocations of its queue, a thousand at most", &[], Nothing, Json(of::<Vec<Value>>)),
    operation("get", "/functions/{name}/queue/{id}", "One of them, with its request", &[], Nothing, Json(of::<Value>)),
    operation("post", "/functions/{name}/queue/retry", "Queues dead letters, or one, again", &["id"], Nothing, Json(of::<Value>)),
    operation("post", "/functions/{name}/queue/purge", "Removes one invocation, or those that are `dead` or `queued`", &["id", "state"], Nothing, Json(of::<Value>)),
    operation("get", "/schedules", "Schedules of all functions", &[], Nothing, Json(of::<Vec<ScheduleInfo>>)),
    operation("get", "/functions/{name}/schedules", "Its schedules", &[], Nothing, Json(of::<Vec<ScheduleInfo>>)),
    operation("get", "/instances", "Live instances, and those that are asleep", &[], Nothing, Json(of::<Vec<InstanceInfo>>)),
    operation("post", "/instances/{id}/fork", "Makes copies of a live instance", &["copies"], Nothing, Json(of::<Forked>)),
    operation("post", "/instances/{id}/checkpoint", "Writes a live instance to the store, encrypted with the key in the body, if there is one; with `volumes=true` the files of its volumes, too", &["!name", "volumes"], Bytes(OCTETS), Json(of::<CheckpointTaken>)),
    operation("post", "/instances/{id}/exec", "Starts a process; with `Upgrade: thaw-exec` the connection carries its streams", &[], Json(of::<ExecRequest>), Upgrade(of::<ExecInfo>)),
    operation("get", "/instances/{id}/execs", "Processes that were started so", &[], Nothing, Json(of::<Vec<ExecInfo>>)),
    operation("get", "/instances/{id}/execs/{exec}", "One of them", &[], Nothing, Json(of::<ExecInfo>)),
    operation("get", "/instances/{id}/execs/{exec}/output", "What it has printed, as far as it is kept", &[], Nothing, Bytes(OCTETS)),
    operation("post", "/instances/{id}/execs/{exec}/attach", "Its streams, on the upgraded connection", &[], Nothing, Upgrade(of::<ExecInfo>)),
    operation("post", "/instances/{id}/execs/{exec}/signal", "Sends its process group a signal", &["!number"], Nothing, Json(of::<ExecInfo>)),
    operation("get", "/instances/{id}/files", "Contents of a file", FILE, Nothing, Bytes(OCTETS)),
    operation("put", "/instances/{id}/files", "Writes a file", &["!path", "user", "mode", "mtime"], Bytes(OCTETS), Json(of::<FileInfo>)),
    operation("delete", "/instances/{id}/files", "Removes a file, or with `all` a directory", &["!path", "user", "all"], Nothing, Json(of::<()>)),
    operation("get", "/instances/{id}/files/stat", "What a file is", &["!path", "user", "no_follow"], Nothing, Json(of::<FileInfo>)),
    operation("get", "/instances/{id}/files/list", "Entries of a directory", FILE, Nothing, Json(of::<Vec<FileInfo>>)),
    operation("post", "/instances/{id}/files/directory", "Makes a directory, and those above it", &["!path", "user", "mode"], Nothing, Json(of::<()>)),
    operation("post", "/instances/{id}/files/rename", "Renames a file", &["!path", "!to", "user"], Nothing, Json(of::<()>)),
    operation("get", "/instances/{id}/files/link", "Where a symbolic link leads", FILE, Nothing, Json(of::<String>)),
    operation("post", "/instances/{id}/files/link", "Makes a symbolic link", &["!path", "!to", "user"], Nothing, Json(of::<()>)),
    operation("get", "/instances/{id}/files/tree", "A directory with all in it, as a stream of tar", FILE, Nothing, Bytes(TREE_TYPE)),
    operation("put", "/instances/{id}/files/tree", "Makes what a stream of tar has, below a directory", FILE, Bytes(TREE_TYPE), Json(of::<TreeReport>)),
    operation("get", "/sandboxes", "The sandboxes", &[], Nothing, Json(of::<Vec<SandboxInfo>>)),
    operation("post", "/sandboxes", "Makes a sandbox", &[], Json(of::<NewSandbox>), Json(of::<SandboxInfo>)),
    operation("get", "/sandboxes/{name}", "A sandbox", &[], Nothing, Json(of::<SandboxInfo>)),
    operation("delete", "/sandboxes/{name}", "Ends it", &[], Nothing, Json(of::<SandboxInfo>)),
    operation("post", "/sandboxes/{name}/pause", "Has it give up its memory", &[], Nothing, Json(of::<SandboxInfo>)),
    operation("post", "/sandboxes/{name}/resume", "Has it run again", &[], Nothing, Json(of::<SandboxInfo>)),
    operation("post", "/sandboxes/{name}/fork", "Makes a copy of it", &["name"], Nothing, Json(of::<SandboxInfo>)),
    operation("get", "/sandboxes/{name}/limits", "What it may use", &[], Nothing, Json(of::<LimitsInfo>)),
    operation("put", "/sandboxes/{name}/limits", "Changes what it may use while it runs", &[], Json(of::<LimitsChange>), Json(of::<LimitsInfo>)),
    operation("get", "/sandboxes/{name}/egress", "Where it may connect to, and what it has reached", &[], Nothing, Json(of::<EgressInfo>)),
    operation("put", "/sandboxes/{name}/egress", "Replaces the rules by which it connects", &[], Json(of::<SandboxEgress>), Json(of::<EgressInfo>)),
    operation("put", "/sandboxes/{name}/inject", "Replaces the headers that are added to its requests besides its function's", &[], Json(of::<SandboxInject>), Json(of::<EgressInfo>)),
    operation("get", "/sandboxes/{name}/ports", "The ports on which something in it listens", &[], Nothing, Json(of::<Vec<Listener>>)),
    operation("post", "/sandboxes/{name}/ports/{port}", "The bytes of a port on which something in it listens, on the upgraded connection", &[], Nothing, Upgrade(of::<()>)),
    operation("post", "/sandboxes/{name}/timeout", "Changes when its time has come", &["seconds"], Nothing, Json(of::<SandboxInfo>)),
    operation("get", "/checkpoints", "Checkpoints in the store", &[], Nothing, Json(of::<Vec<CheckpointInfo>>)),
    operation("delete", "/checkpoints/{name}", "Removes one", &[], Nothing, Nothing),
    operation("post", "/checkpoints/{name}/restore", "Makes instances of one; the body is the key of one that is encrypted. With `volumes=true` the files of its volumes are put back", &["copies", "volumes"], Bytes(OCTETS), Json(of::<Restored>)),
    operation("post", "/volumes/{name}/snapshots", "Makes a snapshot of a volume, whose users rest meanwhile", &["!label"], Nothing, Json(of::<SnapshotMade>)),
    operation("get", "/df", "What is stored and shared", &[], Nothing, Json(of::<UsageReport>)),
    operation("get", "/tenants", "What tenants use and may use", &[], Nothing, Json(of::<Vec<TenantReport>>)),
    operation("get", "/images", "Images in the store", &[], Nothing, Json(of::<Vec<ImageSummary>>)),
    operation("post", "/reload", "Serves what is new in the store", &[], Nothing, Json(of::<Reload>)),
];

/// The description.
pub(crate) fn document() -> Value {
    let settings =
        SchemaSettings::draft2020_12().with(|s| s.definitions_path = "/components/schemas".into());
    let mut generator = settings.into_generator();
    let mut paths: Map<String, Value> = Map::new();
    for operation in OPERATIONS {
        let described = describe(operation, &mut generator);
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        path[operation.method] = described;
    }
    let schemas = generator.take_definitions(true);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Thaw's admin API",
            "version": env!("CARGO_PKG_VERSION"),
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
        },
        "servers": [{ "url": "http://127.0.0.1:8081" }],
        "security": [{ "token": [] }],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } },
        },
    })
}

fn describe(operation: &Operation, generator: &mut SchemaGenerator) -> Value {
    let in_path =
        operation.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    let mut parameters: Vec<_> = in_path
        .map(|name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}))
        .collect();
    parameters.extend(operation.query.iter().map(|name| {
        let (name, is_required) =
            name.strip_prefix('!').map_or((*name, false), |name| (name, true));
        json!({"name": name, "in": "query", "required": is_required, "schema": {"type": "string"}})
    }));
    let problem = Json(of::<Problem>);
    let mut responses = json!({
        "default": { "description": "Why it was not done", "content": content(problem, generator) },
    });
    let status = if matches!(operation.gives, Nothing) { "204" } else { "200" };
    responses[status] =
        json!({ "description": operation.says, "content": content(operation.gives, generator) });
    if matches!(operation.gives, Upgrade(_)) {
        responses["101"] = json!({ "description": "The connection carries streams" });
    }
    let mut described = json!({
        "operationId": id_of(operation),
        "summary": operation.says,
        "parameters": parameters,
        "responses": responses,
    });
    if !matches!(operation.takes, Nothing) {
        described["requestBody"] = json!({ "content": content(operation.takes, generator) });
    }
    described
}

fn content(content: Content, generator: &mut SchemaGenerator) -> Value {
    match content {
        Nothing => json!({}),
        Json(schema) | Upgrade(schema) => {
            json!({ "application/json": { "schema": schema(generator) } })
        }
        Bytes(kind) => json!({ kind: { "schema": { "type": "string", "format": "binary" } } }),
    }
}

/// A name for generated clients: `post_sandboxes_name_pause`.
fn id_of(operation: &Operation) -> String {
    let path = operation.path.replace(['{', '}'], "").replace(['/', '.'], "_");
    format!("{}{path}", operation.method)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    /// What stands in parentheses that have just been opened.
    fn arguments(text: &str) -> &str {
        let mut depth = 1;
        for (at, letter) in text.char_indices() {
            match letter {
                '(' => depth += 1,
                ')' => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return &text[..at];
            }
        }
        text
    }

    /// The calls `.route("PATH", get(…).post(…))` of the sources of this API, with their methods.
    fn served() -> BTreeSet<(String, String)> {
        let mut served = BTreeSet::new();
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/admin");
        for file in std::fs::read_dir(sources).unwrap() {
            let path = file.unwrap().path();
            let text = std::fs::read_to_string(&path).unwrap();
            if path.ends_with("openapi.rs") {
                continue;
            }
            for call in text.split(".route(").skip(1).map(arguments) {
                let Some((path, handlers)) =
                    call.trim_start().strip_prefix('"').and_then(|call| call.split_once('"'))
                else {
                    continue;
                };
                for method in ["get", "post", "put", "delete", "patch"] {
                    let is_there = |before| handlers.contains(&format!("{before}{method}("));
                    if [" ", "."].into_iter().any(is_there) {
                        served.insert((method.to_owned(), path.to_owned()));
                    }
                }
            }
        }
        served
    }

    #[test]
    fn every_route_is_described_and_nothing_else() {
        let described: BTreeSet<_> = OPERATIONS
            .iter()
            .map(|operation| (operation.method.to_owned(), operation.path.to_owned()))
            .collect();
        assert_eq!(described.len(), OPERATIONS.len(), "one stands there twice");
        let served = served();
        assert!(served.len() > 40, "{served:?}");
        assert_eq!(described, served, "OPERATIONS and the routes differ");
    }

    #[test]
    fn references_lead_to_schemas_and_names_are_used_once() {
        let document = document();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        assert!(schemas.contains_key("FunctionDetail") && schemas.contains_key("Stats"));
        let text = document.to_string();
        for reference in text.split("\"$ref\":\"").skip(1) {
            let reference = reference.split('"').next().unwrap();
            let name = reference.strip_prefix("#/components/schemas/");
            assert!(name.is_some_and(|name| schemas.contains_key(name)), "{reference}");
        }
        let ids: BTreeSet<_> = OPERATIONS.iter().map(id_of).collect();
        assert_eq!(ids.len(), OPERATIONS.len());
    }
}
