//! Templates: builds, files for them, names, and what is left of them.

use super::super::keys::KEYS_FILE;
use super::*;
use axum::http::header::HOST;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

mod reuse;

/// SHA-256 of files, as the SDK names them.
const HASH: &str = "abababababababababababababababababababababababababababababababab";

/// A build that was asked for.
#[derive(Clone)]
struct Asked {
    template: String,
    build: String,
}

impl Asked {
    fn status_line(&self) -> String {
        format!("GET /templates/{}/builds/{}/status", self.template, self.build)
    }

    fn begin_line(&self) -> String {
        format!("POST /v2/templates/{}/builds/{}", self.template, self.build)
    }
}

impl Place {
    async fn ask(&self, key: &str, body: Value) -> Result<Asked, (StatusCode, Value)> {
        let (status, made, _) = self.control(key, "POST /v3/templates", body).await;
        if status != StatusCode::ACCEPTED {
            return Err((status, made));
        }
        let text = |name: &str| made[name].as_str().unwrap().to_owned();
        Ok(Asked { template: text("templateID"), build: text("buildID") })
    }

    async fn begin(&self, asked: &Asked, body: Value) -> (StatusCode, Value) {
        let (status, answer, _) = self.control("secret", &asked.begin_line(), body).await;
        (status, answer)
    }

    async fn status(&self, asked: &Asked) -> Value {
        self.control("secret", &asked.status_line(), Value::Null).await.1
    }

    /// Waits for the end of a build.
    async fn ended(&self, asked: &Asked) -> Value {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let status = self.status(asked).await;
            if ["ready", "error"].contains(&status["status"].as_str().unwrap()) {
                return status;
            }
            assert!(Instant::now() < until, "{status}");
            tokio::task::yield_now().await;
        }
    }

    /// Builds a template of the base with these steps.
    async fn build(&self, name: &str, steps: Value) -> Value {
        let asked = self.ask("secret", json!({"name": name})).await.unwrap();
        let (status, answer) =
            self.begin(&asked, json!({"fromTemplate": "base", "steps": steps})).await;
        assert_eq!(status, StatusCode::ACCEPTED, "{answer}");
        self.ended(&asked).await
    }

    async fn put(&self, url: &str, length: Option<usize>, body: &[u8]) -> StatusCode {
        let path = url.strip_prefix("http://here:1").unwrap();
        let mut request = Request::put(path);
        if let Some(length) = length {
            request = request.header("content-length", length);
        }
        self.send(request.body(Body::from(body.to_vec())).unwrap()).await.status()
    }

    /// Where files go.
    async fn link(&self, key: &str, template: &str) -> (StatusCode, Value) {
        let request = Request::get(format!("/templates/{template}/files/{HASH}"));
        let request = request.header("X-API-KEY", key).header(HOST, "here:1");
        let answered = self.send(request.body(Body::empty()).unwrap()).await;
        (answered.status(), json_of(answered).await)
    }
}

/// The only file of an archive is `app.py`.
fn archive() -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(5);
    header.set_mode(0o644);
    archive.append_data(&mut header, "app.py", &b"print"[..]).unwrap();
    archive.into_inner().unwrap()
}

fn run(command: &str) -> Value {
    json!([{"type": "RUN", "args": [command], "force": false}])
}

#[tokio::test]
async fn a_template_is_built_of_steps_and_sandboxes_are_made_of_it() {
    let place = Place::new();
    let asked = place.ask("secret", json!({"name": "app:v1", "tags": ["stable"]})).await.unwrap();
    let (status, link) = place.link("secret", &asked.template).await;
    assert_eq!((status, &link["present"]), (StatusCode::CREATED, &json!(false)));
    let url = link["url"].as_str().unwrap();
    assert_eq!(place.put(url, Some(archive().len()), &archive()).await, StatusCode::OK);
    assert_eq!(place.link("secret", &asked.template).await.1["present"], true);
    let steps = json!([
        {"type": "USER", "args": ["worker"]},
        {"type": "WORKDIR", "args": ["/app"]},
        {"type": "ENV", "args": ["A", "b"]},
        {"type": "COPY", "args": ["app.py", ".", "", ""], "filesHash": HASH},
        {"type": "RUN", "args": ["make"]},
        {"type": "RUN", "args": ["whoami", "root"]},
    ]);
    let request = json!({
        "fromTemplate": "base", "steps": steps, "startCmd": "hang",
        "readyCmd": "[ -n \"$(ss -Htuln sport = :8080)\" ]",
    });
    assert_eq!(place.begin(&asked, request.clone()).await.0, StatusCode::ACCEPTED);
    let ended = place.ended(&asked).await;
    assert_eq!((&ended["status"], ended.get("reason")), (&json!("ready"), None), "{ended}");
    let lines = ended["logEntries"].as_array().unwrap();
    let step_of = |text: &str| {
        let is_it = |line: &&Value| line["message"].as_str().unwrap().contains(text);
        lines.iter().find(is_it).map(|line| line["step"].clone())
    };
    assert_eq!(step_of("[5/6] RUN make"), Some(json!("5")), "{lines:?}");
    assert_eq!(step_of("make"), Some(json!("5")));
    assert_eq!(step_of("Starting hang"), Some(json!("finalize")));
    // It has begun once, and its sandbox is gone.
    assert_eq!(place.begin(&asked, request).await.0, StatusCode::CONFLICT);
    assert_eq!(place.fake.counts(), (0, 1));
    for name in ["app:v1", "app:stable", "a/app:v1", &format!("{}:v1", asked.template)] {
        let made = place.make(json!({"templateID": name, "envVars": {"C": "d"}})).await;
        assert_eq!(place.fake.file(&made.id, "/.thaw-copy/app.py").unwrap(), b"print");
        let start = [json!({"process": {"cmd": "sh"}, "stdin": false})];
        messages_of(place.stream(&made, "/process.Process/Start", &start).await).await;
        let wanted = place.fake.wanted(&made.id).pop().unwrap();
        assert_eq!(wanted.user.as_deref(), Some("worker"));
        assert_eq!(wanted.cwd.as_deref(), Some("/app"));
        assert_eq!((&wanted.envs["A"][..], &wanted.envs["C"][..]), ("b", "d"));
        place.fake.kill(&made.id).unwrap();
    }
    for name in ["app", "app:v2", "b/app:v1"] {
        let (status, ..) =
            place.control("secret", "POST /v2/sandboxes", json!({"templateID": name})).await;
        assert_eq!(status, StatusCode::NOT_FOUND, "{name}");
    }
}

#[tokio::test]
async fn commands_run_with_what_the_steps_before_have_set() {
    let place = Place::new();
    let steps = json!([
        {"type": "RUN", "args": ["one"]},
        {"type": "USER", "args": ["1000:1000"]},
        {"type": "WORKDIR", "args": ["work"]},
        {"type": "ENV", "args": ["A", "b"]},
        {"type": "RUN", "args": ["two"]},
        {"type": "RUN", "args": ["three", "root"]},
    ]);
    assert_eq!(place.build("steps", steps).await["status"], "ready");
    let made = place.make(json!({"templateID": "steps"})).await;
    let of = |command: &str| {
        let all = place.fake.wanted(&made.id);
        let found = all.into_iter().find(|one| one.argv.last().unwrap() == command).unwrap();
        (found.user, found.cwd, found.envs)
    };
    let text = |text: &str| Some(text.to_owned());
    assert_eq!(of("one"), (None, None, BTreeMap::new()));
    let envs = BTreeMap::from([("A".to_owned(), "b".to_owned())]);
    assert_eq!(of("two"), (text("1000:1000"), text("/work/work"), envs.clone()));
    assert_eq!(of("three"), (text("root"), text("/work/work"), envs));
}

#[tokio::test]
async fn a_failed_build_says_why_and_leaves_nothing() {
    let place = Place::new();
    let ended = place.build("failing", run("exit 3")).await;
    let reason = &ended["reason"];
    assert_eq!((&ended["status"], &reason["step"]), (&json!("error"), &json!("1")), "{ended}");
    let message = reason["message"].as_str().unwrap();
    assert!(message.contains("\"exit 3\"") && message.contains("exit code 3"), "{message}");
    assert!(reason["logEntries"].as_array().unwrap().iter().any(|line| line["level"] == "error"));
    assert_eq!(place.fake.counts(), (0, 0));
    assert!(place.api.templates_left().is_empty());
    // A start command that fails, too; and files that were never uploaded.
    let asked = place.ask("secret", json!({"name": "failing"})).await.unwrap();
    let start =
        json!({"fromTemplate": "base", "steps": [], "startCmd": "exit 9", "readyCmd": "exit 1"});
    place.begin(&asked, start).await;
    let ended = place.ended(&asked).await;
    assert_eq!(ended["reason"]["step"], "finalize", "{ended}");
    let copy = json!([{"type": "COPY", "args": ["a", "b"], "filesHash": HASH}]);
    let ended = place.build("failing", copy).await;
    assert!(ended["reason"]["message"].as_str().unwrap().contains("not here"), "{ended}");
    let (status, ..) =
        place.control("secret", "POST /v2/sandboxes", json!({"templateID": "failing"})).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert_eq!(place.fake.counts(), (0, 0));
}

#[tokio::test]
async fn builds_that_fail_at_their_base_take_no_room() {
    let place = Place::new();
    // The key may have eight.
    for n in 0..10 {
        let asked = place.ask("secret", json!({"name": "app"})).await.expect("room for one more");
        let (status, answer) = place.begin(&asked, json!({"fromTemplate": "none"})).await;
        assert_eq!(status, StatusCode::ACCEPTED, "{n} {answer}");
    }
    assert!(place.api.templates_left().is_empty());
}

#[tokio::test]
async fn what_is_kept_of_a_user_and_a_directory_has_bounds() {
    let place = Place::new();
    for (kind, text, word) in [
        ("USER", format!("0:{}", "1".repeat(1000)), "256 bytes"),
        ("WORKDIR", format!("/{}", "d".repeat(5000)), "4096 bytes"),
    ] {
        let ended = place.build("app", json!([{"type": kind, "args": [text]}])).await;
        let message = ended["reason"]["message"].as_str().expect("it has failed");
        assert!(message.contains(word), "{message}");
    }
}

#[tokio::test]
async fn sandboxes_of_snapshots_have_the_limits_of_the_template_too() {
    let place = Place::new();
    let asked = place.ask("secret", json!({"name": "large", "memoryMB": 1024})).await.unwrap();
    place.begin(&asked, json!({"fromTemplate": "base", "steps": []})).await;
    place.ended(&asked).await;
    let memory = async |id: &str| {
        let line = format!("GET /sandboxes/{id}");
        place.control("secret", &line, Value::Null).await.1["memoryMB"].clone()
    };
    let made = place.make(json!({"templateID": "large"})).await;
    assert_eq!(memory(&made.id).await, 1024);
    let line = format!("POST /sandboxes/{}/snapshots", made.id);
    let (status, taken, _) = place.control("secret", &line, json!({})).await;
    assert_eq!(status, StatusCode::CREATED, "{taken}");
    let copy = place.make(json!({"templateID": taken["snapshotID"]})).await;
    assert_eq!(memory(&copy.id).await, 1024);
}

#[tokio::test]
async fn nothing_is_left_of_a_checkpoint_that_comes_after_its_build_has_failed() {
    let mut place = Place::new();
    let (short, long) = (Duration::from_millis(300), Duration::from_secs(60));
    Arc::get_mut(&mut place.api).unwrap().hurry(long, short);
    place.fake.is_slow.store(true, Ordering::SeqCst);
    let ended = place.build("app", run("one")).await;
    assert!(ended["reason"]["message"].as_str().unwrap().contains("in time"), "{ended}");
    while place.fake.counts().0 > 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(place.api.templates_left().len(), 1, "it may come yet");
    place.fake.write_late();
    assert_eq!(place.fake.counts(), (0, 1));
    while Arc::strong_count(&place.api) > 1 {
        tokio::task::yield_now().await;
    }
    assert_eq!((place.fake.counts(), place.api.templates_left().len()), ((0, 0), 0));
}

#[tokio::test]
async fn what_cannot_be_noted_does_not_begin() {
    let place = Place::new();
    let made = place.make(json!({"templateID": "base"})).await;
    let asked = place.ask("secret", json!({"name": "app"})).await.unwrap();
    // As on a full disk.
    let in_the_way =
        ["e2b-templates.new", "e2b-sandboxes.new"].map(|name| place.directory.path().join(name));
    in_the_way.iter().for_each(|path| std::fs::create_dir(path).unwrap());
    // Changes would be added to the file that is there.
    std::fs::remove_file(place.directory.path().join("e2b-sandboxes.json")).unwrap();
    let step = json!({"fromTemplate": "base", "steps": []});
    let (status, why) = place.begin(&asked, step.clone()).await;
    assert_eq!(status, StatusCode::INSUFFICIENT_STORAGE, "{why}");
    let take = format!("POST /sandboxes/{}/snapshots", made.id);
    let (status, ..) = place.control("secret", &take, json!({})).await;
    assert_eq!(status, StatusCode::INSUFFICIENT_STORAGE);
    assert_eq!(place.fake.counts(), (1, 0));
    in_the_way.iter().for_each(|path| std::fs::remove_dir(path).unwrap());
    place.begin(&asked, step).await;
    assert_eq!(place.ended(&asked).await["status"], "ready");
    let (status, ..) = place.control("secret", &take, json!({})).await;
    assert_eq!((status, place.fake.counts()), (StatusCode::CREATED, (1, 2)));
}

#[tokio::test]
async fn what_a_deleted_template_stood_on_goes_with_it() {
    let place = Place::new();
    // Which of both is looked at first is up to their ids.
    for _ in 0..8 {
        place.build("parent", json!([])).await;
        let asked = place.ask("secret", json!({"name": "child"})).await.unwrap();
        place.begin(&asked, json!({"fromTemplate": "parent", "steps": []})).await;
        place.ended(&asked).await;
        let delete = async |name: &str| {
            let line = format!("DELETE /templates/{name}");
            place.control("secret", &line, Value::Null).await.0
        };
        assert_eq!(delete("parent").await, StatusCode::NO_CONTENT);
        assert_eq!((place.fake.counts().1, place.api.templates_left().len()), (2, 1));
        assert_eq!(delete("child").await, StatusCode::NO_CONTENT);
        assert_eq!((place.fake.counts().1, place.api.templates_left().len()), (0, 0));
    }
}

#[tokio::test]
async fn nothing_is_left_of_a_snapshot_that_comes_after_nobody_waits_for_it() {
    let mut place = Place::new();
    let short = Duration::from_millis(300);
    Arc::get_mut(&mut place.api).unwrap().hurry(short, short);
    let made = place.make(json!({"templateID": "base"})).await;
    place.fake.is_slow.store(true, Ordering::SeqCst);
    let line = format!("POST /sandboxes/{}/snapshots", made.id);
    let (status, refused, _) = place.control("secret", &line, json!({})).await;
    assert_eq!(status, StatusCode::GATEWAY_TIMEOUT, "{refused}");
    // It may come yet. Its name is free, and its place is not.
    let (_, listed, _) = place.control("secret", "GET /snapshots", Value::Null).await;
    assert_eq!(listed, json!([]));
    assert_eq!(place.api.records.snapshots_counted("a"), 1);
    place.fake.write_late();
    assert_eq!(place.fake.counts(), (1, 1));
    while Arc::strong_count(&place.api) > 1 {
        tokio::task::yield_now().await;
    }
    assert_eq!((place.fake.counts(), place.api.records.snapshots_counted("a")), ((1, 0), 0));
}

#[tokio::test]
async fn building_a_name_again_replaces_it_and_deleting_it_leaves_nothing() {
    let place = Place::new();
    place.build("app", run("one")).await;
    let old = place.make(json!({"templateID": "app"})).await;
    assert_eq!(place.build("app", run("exit 1")).await["status"], "error");
    assert_eq!(place.fake.counts(), (1, 1), "what was there stays");
    place.build("app", run("two")).await;
    assert_eq!(place.fake.counts(), (1, 1));
    let new = place.make(json!({"templateID": "app"})).await;
    let ran = |made: &Made, command: &str| {
        place.fake.wanted(&made.id).iter().any(|one| one.argv.last().unwrap() == command)
    };
    assert!(ran(&old, "one") && ran(&new, "two") && !ran(&new, "one"));
    let (_, listed, _) = place.control("secret", "GET /templates", Value::Null).await;
    let shown = &listed[0];
    assert_eq!((&shown["names"], &shown["spawnCount"]), (&json!(["app"]), &json!(2)));
    assert_eq!((&shown["cpuCount"], &shown["memoryMB"]), (&json!(2), &json!(512)));
    let (_, one, _) = place.control("secret", "GET /templates/app", Value::Null).await;
    assert_eq!(one["builds"].as_array().unwrap().len(), 2, "{one}");
    let (status, ..) = place.control("secret", "DELETE /templates/app", Value::Null).await;
    assert_eq!((status, place.fake.counts()), (StatusCode::NO_CONTENT, (2, 0)));
    let (status, ..) = place.control("secret", "DELETE /templates/app", Value::Null).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_build_of_a_deleted_template_is_given_up() {
    let place = Place::new();
    let asked = place.ask("secret", json!({"name": "app"})).await.unwrap();
    place.begin(&asked, json!({"fromTemplate": "base", "steps": run("hang")})).await;
    while place.fake.counts() != (1, 0) {
        tokio::task::yield_now().await;
    }
    place.control("secret", "DELETE /templates/app", Value::Null).await;
    while place.fake.counts() != (0, 0) || !place.api.templates_left().is_empty() {
        tokio::task::yield_now().await;
    }
    let (status, ..) = place.control("secret", &asked.status_line(), Value::Null).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_build_that_was_cut_off_has_failed_for_the_next_daemon() {
    let place = Place::new();
    place.build("app", run("one")).await;
    let asked = place.ask("secret", json!({"name": "app"})).await.unwrap();
    place.begin(&asked, json!({"fromTemplate": "base", "steps": run("hang")})).await;
    while place.fake.counts() != (1, 1) {
        tokio::task::yield_now().await;
    }
    let Place { api, fake, directory } = place;
    drop(api);
    let place = Place::with(directory, fake);
    place.api.clone().clean_up().await;
    assert_eq!(place.fake.counts(), (0, 1), "its sandbox is gone, and what was there stays");
    let status = place.status(&asked).await;
    assert_eq!(status["status"], "error");
    assert!(status["reason"]["message"].as_str().unwrap().contains("daemon ended"), "{status}");
    assert!(place.api.templates_left().is_empty());
    place.make(json!({"templateID": "app"})).await;
}

#[tokio::test]
async fn builds_and_start_commands_have_so_much_time() {
    let mut place = Place::new();
    // Enough to come to the step that hangs.
    let (short, long) = (Duration::from_secs(3), Duration::from_secs(60));
    let started = |ready: Value| json!({"fromTemplate": "base", "steps": [], "startCmd": "hang", "readyCmd": ready});
    for (all, ready, request, step, word) in [
        (
            short,
            long,
            json!({"fromTemplate": "base", "steps": run("hang")}),
            "1",
            "the build has taken",
        ),
        (long, short, started(json!("exit 1")), "finalize", "ready command"),
        (long, short, started(json!("hang")), "finalize", "ready command"),
    ] {
        Arc::get_mut(&mut place.api).unwrap().hurry(all, ready);
        let asked = place.ask("secret", json!({"name": "app"})).await.unwrap();
        place.begin(&asked, request).await;
        let reason = place.ended(&asked).await["reason"].clone();
        assert_eq!(reason["step"], step, "{reason}");
        assert!(reason["message"].as_str().unwrap().contains(word), "{reason}");
        while Arc::strong_count(&place.api) > 1 {
            tokio::task::yield_now().await;
        }
        assert_eq!(place.fake.counts(), (0, 0));
    }
    // Without a ready command it has so much time, and is ready then.
    let asked = place.ask("secret", json!({"name": "app"})).await.unwrap();
    place.begin(&asked, started(Value::Null)).await;
    assert_eq!(place.ended(&asked).await["status"], "ready");
}

#[tokio::test]
async fn templates_are_their_owners() {
    let place = Place::new();
    place.build("app", run("one")).await;
    let asked = place.ask("secret", json!({"name": "app"})).await.unwrap();
    let id = &asked.template;
    for (line, body) in [
        (asked.status_line(), Value::Null),
        (asked.begin_line(), json!({"fromTemplate": "base"})),
        (format!("GET /templates/{id}"), Value::Null),
        (format!("GET /templates/{id}/tags"), Value::Null),
        (format!("GET /templates/{id}/files/{HASH}"), Value::Null),
        (format!("DELETE /templates/{id}"), Value::Null),
        ("GET /templates/aliases/app".to_owned(), Value::Null),
        ("POST /templates/tags".to_owned(), json!({"target": "app", "tags": ["x"]})),
        ("DELETE /templates/tags".to_owned(), json!({"name": "app", "tags": ["default"]})),
        ("POST /v2/sandboxes".to_owned(), json!({"templateID": id})),
        ("POST /v2/sandboxes".to_owned(), json!({"templateID": "app"})),
    ] {
        let (status, answer, _) = place.control("other", &line, body).await;
        assert_eq!(status, StatusCode::NOT_FOUND, "{line} {answer}");
    }
    let (_, listed, _) = place.control("other", "GET /v2/templates", Value::Null).await;
    assert_eq!(listed, json!([]));
    // A name that somebody else has is free, and names another one.
    let others = place.ask("other", json!({"name": "app"})).await.unwrap();
    assert_ne!(&others.template, id);
    let (status, found, _) =
        place.control("secret", "GET /templates/aliases/app", Value::Null).await;
    assert_eq!((status, &found["templateID"]), (StatusCode::OK, &json!(id)));
    let (_, base, _) = place.control("secret", "GET /templates/aliases/base", Value::Null).await;
    assert_eq!(base["public"], true);
}

#[tokio::test]
async fn whoever_may_only_look_builds_nothing() {
    let place = Place::new();
    let text = "[[keys]]\nname = \"a\"\nrole = \"read-only\"\nsha256 = \
                \"d133efd9800e396abbeb9de0cc7a6f873d58159121a0fc587f8a2ec1208ad50a\"\n";
    std::fs::write(place.directory.path().join(KEYS_FILE), text).unwrap();
    let asked = place.ask("secret", json!({"name": "app"})).await.unwrap();
    let (status, _) = place.link("looker", &asked.template).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    for line in [
        "POST /v3/templates".to_owned(),
        asked.begin_line(),
        "POST /templates/tags".to_owned(),
        "DELETE /templates/tags".to_owned(),
        "DELETE /templates/app".to_owned(),
        "PATCH /templates/app".to_owned(),
    ] {
        let (status, ..) = place.control("looker", &line, json!({})).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{line}");
    }
    let (status, ..) = place.control("looker", &asked.status_line(), Value::Null).await;
    assert_eq!(status, StatusCode::OK);
}

#[tokio::test]
async fn tags_name_builds_and_a_build_without_any_goes() {
    let place = Place::new();
    place.build("app", run("one")).await;
    place.build("app:v2", run("two")).await;
    assert_eq!(place.fake.counts(), (0, 2));
    let assign = |target: &str| json!({"target": target, "tags": ["default", "latest"]});
    let (status, assigned, _) =
        place.control("secret", "POST /templates/tags", assign("app:v2")).await;
    assert_eq!((status, &assigned["tags"]), (StatusCode::CREATED, &json!(["default", "latest"])));
    assert_eq!(place.fake.counts(), (0, 1), "nothing means the first one any more");
    let (_, tags, _) = place.control("secret", "GET /templates/app/tags", Value::Null).await;
    let names: Vec<_> = tags.as_array().unwrap().iter().map(|tag| &tag["tag"]).collect();
    assert_eq!(names, ["default", "latest", "v2"]);
    assert!(tags.as_array().unwrap().iter().all(|tag| tag["buildID"] == assigned["buildID"]));
    for (target, expected) in [
        ("app:none", StatusCode::NOT_FOUND),
        ("none", StatusCode::NOT_FOUND),
        ("a b", StatusCode::BAD_REQUEST),
    ] {
        let (status, ..) = place.control("secret", "POST /templates/tags", assign(target)).await;
        assert_eq!(status, expected, "{target}");
    }
    for (line, expected) in [
        ("GET /templates/aliases/app:v2", StatusCode::OK),
        ("GET /templates/aliases/app:v3", StatusCode::NOT_FOUND),
        ("DELETE /templates/app:v2", StatusCode::NOT_FOUND),
    ] {
        assert_eq!(place.control("secret", line, Value::Null).await.0, expected, "{line}");
    }
    let remove = json!({"name": "app", "tags": ["default", "latest", "v2"]});
    let (status, ..) = place.control("secret", "DELETE /templates/tags", remove).await;
    assert_eq!((status, place.fake.counts()), (StatusCode::NO_CONTENT, (0, 0)));
}

#[tokio::test]
async fn what_is_not_done_is_said_and_so_is_what_makes_no_sense() {
    let place = Place::new();
    for wrong in [json!({}), json!({"name": "a b"}), json!({"name": "x", "tags": ["a b"]})] {
        let (status, answer) = place.ask("secret", wrong).await.err().unwrap();
        assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
    }
    let asked = place.ask("secret", json!({"name": "app", "cpuCount": 3})).await.unwrap();
    let base = |extra: Value| {
        let mut request = json!({"fromTemplate": "base", "steps": []});
        request.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        request
    };
    for (request, expected, word) in [
        (base(json!({})), StatusCode::BAD_REQUEST, "processors"),
        (json!({}), StatusCode::BAD_REQUEST, "fromTemplate"),
        (json!({"fromTemplate": "mcp-gateway"}), StatusCode::NOT_IMPLEMENTED, "MCP"),
        (base(json!({"fromImageRegistry": {}})), StatusCode::NOT_IMPLEMENTED, "credentials"),
        (base(json!({"steps": [{"type": "ADD"}]})), StatusCode::NOT_IMPLEMENTED, "ADD"),
    ] {
        let (status, answer) = place.begin(&asked, request.clone()).await;
        assert_eq!(status, expected, "{request} {answer}");
        assert!(answer["message"].as_str().unwrap().contains(word), "{answer}");
    }
    // None of that has begun it.
    assert_eq!(place.status(&asked).await["status"], "waiting");
    // The SDKs show the line that names a base which is not there.
    for (request, word) in [
        (json!({"fromTemplate": "none"}), "function"),
        (json!({"fromImage": "python:3.12"}), "[images]"),
    ] {
        let asked = place.ask("secret", json!({"name": "app"})).await.unwrap();
        assert_eq!(place.begin(&asked, request).await.0, StatusCode::ACCEPTED);
        let reason = place.ended(&asked).await["reason"].clone();
        assert!(reason["message"].as_str().unwrap().contains(word), "{reason}");
        assert_eq!(reason["step"], "base");
    }
    let public = json!({"public": true});
    let (status, ..) = place.control("secret", "PATCH /templates/app", public).await;
    assert_eq!(status, StatusCode::NOT_IMPLEMENTED);
}

#[tokio::test]
async fn uploads_want_an_address_that_was_given_for_them() {
    let place = Place::new();
    let asked = place.ask("secret", json!({"name": "app"})).await.unwrap();
    let (_, link) = place.link("secret", &asked.template).await;
    let url = link["url"].as_str().unwrap().to_owned();
    let other = url.replace(HASH, &"cd".repeat(32));
    let later = url.replace("until=", "until=9");
    let (start, _) = url.split_once("signature=").unwrap();
    for wrong in [other, later, format!("{start}signature=")] {
        assert_eq!(place.put(&wrong, Some(1), b"x").await, StatusCode::FORBIDDEN, "{wrong}");
    }
    let until = place.api.records.upload_token(&asked.template, HASH, 5);
    let late = format!("http://here:1/uploads/{}/{HASH}?until=5&signature={until}", asked.template);
    assert_eq!(place.put(&late, Some(1), b"x").await, StatusCode::FORBIDDEN);
    for (length, expected) in [
        (None, StatusCode::BAD_REQUEST),
        (Some(2), StatusCode::BAD_REQUEST),
        (Some(0), StatusCode::BAD_REQUEST),
        (Some(2 << 30), StatusCode::PAYLOAD_TOO_LARGE),
    ] {
        assert_eq!(place.put(&url, length, b"x").await, expected, "{length:?}");
    }
    // One whose client goes away in the middle.
    let pieces = [Ok(b"x".to_vec()), Err(std::io::Error::other("the client has gone"))];
    let request = Request::put(url.strip_prefix("http://here:1").unwrap());
    let body = Body::from_stream(tokio_stream::iter(pieces));
    let cut = place.send(request.header("content-length", 2).body(body).unwrap()).await;
    assert_eq!(cut.status(), StatusCode::BAD_REQUEST);
    // Nothing is left of those.
    assert_eq!(place.link("secret", &asked.template).await.1["present"], false);
    let uploads = place.directory.path().join("e2b-uploads");
    let shelves = std::fs::read_dir(uploads).unwrap();
    let left: usize =
        shelves.map(|shelf| std::fs::read_dir(shelf.unwrap().path()).unwrap().count()).sum();
    assert_eq!(left, 0);
    assert_eq!(place.put(&url, Some(1), b"x").await, StatusCode::OK);
}

#[tokio::test]
async fn builds_wait_for_their_turn_and_so_many_do() {
    let place = Place::new();
    let begin = async || {
        let asked = place.ask("other", json!({"name": "one"})).await.unwrap();
        let request = json!({"fromTemplate": "base", "steps": run("hang")});
        place.control("other", &asked.begin_line(), request).await.0
    };
    for _ in 0..12 {
        assert_eq!(begin().await, StatusCode::ACCEPTED);
    }
    assert_eq!(begin().await, StatusCode::TOO_MANY_REQUESTS);
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    assert_eq!(place.fake.counts().0, 2, "two are under way, and the others wait");
    // Another owner waits for none of them.
    assert_eq!(place.build("app", run("one")).await["status"], "ready");
    place.control("other", "DELETE /templates/one", Value::Null).await;
    while place.fake.counts().0 > 0 || !place.api.templates_left().is_empty() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn templates_and_builds_have_bounds() {
    let place = Place::new();
    place.build("one", run("one")).await;
    let two = place.ask("secret", json!({"name": "two"})).await.unwrap();
    // The key may have two. One of which nothing was ever built makes room.
    place.ask("secret", json!({"name": "three"})).await.unwrap();
    let (status, ..) = place.control("secret", &two.status_line(), Value::Null).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    place.build("three", run("three")).await;
    let (status, answer) = place.ask("secret", json!({"name": "four"})).await.err().unwrap();
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS, "{answer}");
    // Builds that have ended are forgotten, the oldest first.
    for _ in 0..20 {
        place.ask("secret", json!({"name": "one"})).await.unwrap();
    }
    let (_, one, _) = place.control("secret", "GET /templates/one", Value::Null).await;
    assert_eq!(one["builds"].as_array().unwrap().len(), 11, "those with tags stay besides");
    // Builds of tags count, so that a name cannot have any number.
    for name in ["one", "three"] {
        place.control("secret", &format!("DELETE /templates/{name}"), Value::Null).await;
    }
    while place.fake.counts() != (0, 0) || !place.api.templates_left().is_empty() {
        tokio::task::yield_now().await;
    }
    for n in 0..8 {
        assert_eq!(place.build(&format!("one:{n}"), run("one")).await["status"], "ready", "{n}");
    }
    let (status, _) = place.ask("secret", json!({"name": "one:8"})).await.err().unwrap();
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
}
