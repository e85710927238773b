//! Steps that are not done again.

use super::*;
use crate::backend::Backend;

/// Names of steps, as `RUN`.
fn steps(commands: &[&str]) -> Value {
    commands.iter().map(|command| json!({"type": "RUN", "args": [command]})).collect()
}

/// A place in which each build that does some steps leaves a checkpoint of them.
fn place() -> Place {
    let mut place = Place::new();
    Arc::get_mut(&mut place.api).unwrap().keep_steps_after(Duration::ZERO);
    place
}

impl Place {
    /// Which steps of a build were done before.
    async fn reused(&self, name: &str, request: Value) -> Vec<String> {
        let asked = self.ask("secret", json!({"name": name})).await.unwrap();
        let (status, answer) = self.begin(&asked, request).await;
        assert_eq!(status, StatusCode::ACCEPTED, "{answer}");
        let ended = self.ended(&asked).await;
        assert_eq!(ended["status"], "ready", "{ended}");
        let lines = ended["logEntries"].as_array().unwrap().iter();
        let text = lines.map(|line| line["message"].as_str().unwrap());
        let reused = text.filter_map(|text| text.strip_suffix(" (CACHED)"));
        reused.map(|text| text.rsplit(' ').next().unwrap().to_owned()).collect()
    }

    async fn reused_of(&self, name: &str, commands: &[&str]) -> Vec<String> {
        self.reused(name, json!({"fromTemplate": "base", "steps": steps(commands)})).await
    }

    /// What has run in sandboxes of a template, in order.
    async fn ran(&self, name: &str) -> Vec<String> {
        let made = self.make(json!({"templateID": name})).await;
        let all = self.fake.wanted(&made.id).into_iter();
        let ran = all.map(|one| one.argv.last().unwrap().clone()).collect();
        self.fake.kill(&made.id).unwrap();
        ran
    }
}

#[tokio::test]
async fn a_build_goes_on_where_one_with_the_same_steps_was() {
    let place = place();
    assert_eq!(place.reused_of("app", &["one", "two"]).await, [""; 0]);
    assert_eq!(place.reused_of("app", &["one", "two", "three"]).await, ["one", "two"]);
    assert_eq!(place.ran("app").await, ["one", "two", "three"]);
    // Of another template, too, and of the next daemon.
    let Place { api, fake, directory } = place;
    drop(api);
    let place = Place::with(directory, fake);
    assert_eq!(place.reused_of("other", &["one", "two", "three"]).await, ["one", "two", "three"]);
    assert_eq!(place.reused_of("other", &["two", "one"]).await, [""; 0]);
    assert_eq!(place.ran("other").await, ["two", "one"]);
}

#[tokio::test]
async fn steps_set_what_follows_also_if_they_were_done_before() {
    let place = place();
    let all = |last: &str| {
        json!([
            {"type": "USER", "args": ["1000"]},
            {"type": "ENV", "args": ["A", "b"]},
            {"type": "WORKDIR", "args": ["/app"]},
            {"type": "RUN", "args": ["one"]},
            {"type": "RUN", "args": [last]},
        ])
    };
    let request = |last| json!({"fromTemplate": "base", "steps": all(last)});
    place.reused("app", request("two")).await;
    assert!(!place.reused("app", request("two")).await.is_empty());
    let made = place.make(json!({"templateID": "app"})).await;
    let last = place.fake.wanted(&made.id).pop().unwrap();
    assert_eq!((last.user.as_deref(), last.cwd.as_deref()), (Some("1000"), Some("/app")));
    assert_eq!(last.envs["A"], "b");
}

#[tokio::test]
async fn what_is_forced_or_begins_with_something_else_is_done() {
    let place = place();
    let one = steps(&["one", "two"]);
    place.reused("app", json!({"fromTemplate": "base", "steps": one})).await;
    let forced =
        json!([{"type": "RUN", "args": ["one"]}, {"type": "RUN", "args": ["two"], "force": true}]);
    let reused = place.reused("app", json!({"fromTemplate": "base", "steps": forced})).await;
    assert!(!reused.contains(&"two".to_owned()), "{reused:?}");
    let all = json!({"fromTemplate": "base", "steps": one, "force": true});
    assert_eq!(place.reused("app", all).await, [""; 0]);
    assert_eq!(place.reused_of("app", &["one", "two"]).await, ["one", "two"]);
    // Another key's name, other limits, another version of the function.
    let asked = place.ask("other", json!({"name": "app"})).await.unwrap();
    let request = json!({"fromTemplate": "base", "steps": one});
    place.control("other", &asked.begin_line(), request).await;
    let large = place.ask("secret", json!({"name": "large", "memoryMB": 1024})).await.unwrap();
    place.begin(&large, json!({"fromTemplate": "base", "steps": one})).await;
    place.ended(&large).await;
    for (key, asked) in [("other", &asked), ("secret", &large)] {
        let status = loop {
            let status = place.control(key, &asked.status_line(), Value::Null).await.1;
            if status["status"] == "ready" {
                break status;
            }
            tokio::task::yield_now().await;
        };
        assert!(!status.to_string().contains("CACHED"), "{status}");
    }
    place.fake.version.store(2, Ordering::SeqCst);
    assert_eq!(place.reused_of("app", &["one", "two"]).await, [""; 0]);
}

#[tokio::test]
async fn files_that_were_uploaded_anew_are_copied_anew() {
    let place = place();
    let asked = place.ask("secret", json!({"name": "app"})).await.unwrap();
    let (_, link) = place.link("secret", &asked.template).await;
    let url = link["url"].as_str().unwrap().to_owned();
    let upload = async || {
        assert_eq!(place.put(&url, Some(archive().len()), &archive()).await, StatusCode::OK);
    };
    upload().await;
    let copy = json!([{"type": "COPY", "args": ["app.py", "."], "filesHash": HASH}]);
    let request = json!({"fromTemplate": "base", "steps": copy});
    assert_eq!(place.reused("app", request.clone()).await, [""; 0]);
    assert_eq!(place.reused("app", request.clone()).await, ["."]);
    upload().await;
    assert_eq!(place.reused("app", request).await, [""; 0]);
}

#[tokio::test]
async fn a_checkpoint_that_is_gone_is_made_again() {
    let place = place();
    place.reused_of("app", &["one"]).await;
    let kept = place.fake.snapshot_names();
    let kept = kept.iter().find(|name| name.starts_with("e2b-step-")).unwrap();
    assert!(place.fake.remove_snapshot(kept).await.unwrap());
    assert_eq!(place.reused_of("app", &["one"]).await, [""; 0]);
    assert_eq!(place.reused_of("app", &["one"]).await, ["one"]);
}

#[tokio::test]
async fn what_stands_on_a_deleted_template_goes_with_it() {
    let place = place();
    place.reused_of("parent", &[]).await;
    let request = json!({"fromTemplate": "parent", "steps": steps(&["one"])});
    assert_eq!(place.reused("child", request.clone()).await, [""; 0]);
    assert_eq!(place.reused("child", request).await, ["one"]);
    for name in ["parent", "child"] {
        let line = format!("DELETE /templates/{name}");
        assert_eq!(place.control("secret", &line, Value::Null).await.0, StatusCode::NO_CONTENT);
    }
    assert_eq!((place.fake.counts(), place.api.templates_left().len()), ((0, 0), 0));
}

#[tokio::test]
async fn nothing_is_left_of_an_owner_without_templates() {
    let place = place();
    place.reused_of("app", &["one"]).await;
    place.reused_of("other", &["one", "two"]).await;
    let delete = async |name: &str| {
        let line = format!("DELETE /templates/{name}");
        assert_eq!(place.control("secret", &line, Value::Null).await.0, StatusCode::NO_CONTENT);
    };
    delete("app").await;
    assert_eq!(place.reused_of("other", &["one", "two"]).await, ["one", "two"]);
    delete("other").await;
    assert_eq!((place.fake.counts(), place.api.templates_left().len()), ((0, 0), 0));
    // Nor of one without keys, once somebody looks.
    place.reused_of("app", &["one"]).await;
    assert_eq!(place.fake.counts().1, 2);
    let settings = format!(
        "[templates]\nbase = \"python\"\n[[keys]]\nname = \"b\"\nsha256 = \"{}\"\n",
        HASHES[1]
    );
    std::fs::write(place.directory.path().join(FILE), settings).unwrap();
    place.api.clone().clean_up().await;
    assert_eq!(place.fake.snapshot_names().iter().filter(|name| name.contains("step")).count(), 0);
}

#[tokio::test]
async fn a_snapshot_goes_with_what_builds_have_left_on_it() {
    let place = place();
    let made = place.make(json!({"templateID": "base"})).await;
    let line = format!("POST /sandboxes/{}/snapshots", made.id);
    let (_, taken, _) = place.control("secret", &line, json!({})).await;
    let snapshot = taken["snapshotID"].as_str().unwrap();
    place.reused_of("app", &["zero"]).await;
    let request = json!({"fromTemplate": snapshot, "steps": steps(&["one"])});
    place.reused("child", request.clone()).await;
    let delete = async |name: &str| {
        let line = format!("DELETE /templates/{name}");
        place.control("secret", &line, Value::Null).await.0
    };
    assert_eq!(delete(snapshot).await, StatusCode::CONFLICT, "a template stands on it");
    assert_eq!(delete("child").await, StatusCode::NO_CONTENT);
    assert_eq!(delete(snapshot).await, StatusCode::NO_CONTENT);
    assert!(place.api.templates_left().is_empty());
}

#[tokio::test]
async fn a_build_goes_on_if_its_steps_cannot_be_kept() {
    let mut place = place();
    let (short, long) = (Duration::from_millis(300), Duration::from_secs(60));
    Arc::get_mut(&mut place.api).unwrap().hurry(long, short);
    Arc::get_mut(&mut place.api).unwrap().keep_steps_after(Duration::ZERO);
    place.fake.is_slow.store(true, Ordering::SeqCst);
    let asked = place.ask("secret", json!({"name": "app"})).await.unwrap();
    place.begin(&asked, json!({"fromTemplate": "base", "steps": steps(&["one", "hang"])})).await;
    let kept_not = "not kept for later builds";
    while !place.status(&asked).await.to_string().contains(kept_not) {
        tokio::task::yield_now().await;
    }
    place.fake.write_late();
    place.fake.is_slow.store(false, Ordering::SeqCst);
    place.control("secret", "DELETE /templates/app", Value::Null).await;
    while Arc::strong_count(&place.api) > 1 {
        tokio::task::yield_now().await;
    }
    assert_eq!((place.fake.counts(), place.api.templates_left().len()), ((0, 0), 0));
}
