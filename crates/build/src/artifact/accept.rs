//! The configuration of a function that comes from elsewhere: what is believed of it, and what
//! whoever pulls it decides.

use super::pull::PullOptions;
use std::path::PathBuf;
use thaw_home::config::{Sharing, TrainingRequest};
use thaw_home::function::StoredFunction;
use thaw_oci::Offer;

/// Longest name or value of a variable (`MAX_ARG_STRLEN`, linux/binfmts.h).
const VARIABLE_MAX: usize = 128 << 10;

/// A function as it will be stored, and what was changed of it.
#[derive(Clone, Debug)]
pub(super) struct Accepted {
    pub function: StoredFunction,
    /// Sentences for whoever pulls it.
    pub notes: Vec<String>,
}

/// Checks what a document says of its function, as `thaw build` checks a `thaw.toml`.
///
/// # Errors
/// One sentence: it makes no sense, or wants what it may not have.
pub(super) fn accept(offer: &Offer<'_>, options: &PullOptions) -> Result<Accepted, String> {
    let parsed = serde_json::from_value::<StoredFunction>(offer.document.function.clone());
    let mut function = parsed.map_err(|error| {
        format!("the configuration of the function makes no sense here ({error}); have it pushed by the same version of Thaw")
    })?;
    let mut notes = Vec::new();
    let config = &mut function.config;
    if let Some(name) = &options.name {
        let chosen = name.as_str().parse();
        config.name = chosen.map_err(|error: thaw_home::config::NameError| error.to_string())?;
    }
    // Another tenant's name must not make it that tenant's.
    let private = std::mem::take(&mut config.sharing).private;
    config.sharing = Sharing { domain: options.domain.clone(), private };
    if let Some(address) = config.listen.take() {
        notes.push(format!("it does not listen at {address}, which is for this machine to decide"));
    }
    config.check()?;
    check_user(config.user.as_deref())?;
    check_environment(&function)?;
    let config = &function.config;
    let may_connect = offer.is_signed || options.allow_egress;
    if !config.egress.is_closed() && !may_connect {
        let rules = config.egress.allow.iter().chain(&config.egress.reconnect);
        let injected = config.egress.inject.iter().map(ToString::to_string);
        let rules = rules.map(ToString::to_string).chain(injected).collect::<Vec<_>>().join(", ");
        return Err(format!(
            "the function wants to connect to {rules}; if it may, give --allow-egress"
        ));
    }
    if has_files(&function) {
        notes.push(
            "bodies of its training requests are files, which do not come along: it cannot be frozen anew here"
                .to_owned(),
        );
    }
    // Nothing of this host is to be read on its behalf when it is frozen anew.
    function.source = PathBuf::new();
    Ok(Accepted { function, notes })
}

/// Whether it is trained with files of the directory that it was built from.
pub(super) fn has_files(function: &StoredFunction) -> bool {
    let requests = function.config.train.iter().flat_map(|train| &train.requests);
    requests.into_iter().any(|TrainingRequest { file, .. }| file.is_some())
}

/// A build has made numbers of names.
fn check_user(user: Option<&str>) -> Result<(), String> {
    let Some(text) = user else { return Ok(()) };
    let is_number = |text: &str| text.parse::<u32>().is_ok();
    match text.split_once(':') {
        Some((uid, gid)) if is_number(uid) && is_number(gid) => Ok(()),
        _ => Err(format!("the function's user {text:?} is no pair of numbers")),
    }
}

fn check_environment(function: &StoredFunction) -> Result<(), String> {
    let is_possible = |(name, value): (&String, &String)| {
        let is_name = !name.is_empty() && !name.contains(['=', '\0']);
        is_name && !value.contains('\0') && name.len().max(value.len()) <= VARIABLE_MAX
    };
    match function.environment.iter().all(is_possible) {
        true => Ok(()),
        false => Err("the function's environment has a variable that none can have".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use thaw_oci::artifact::{DOCUMENT_VERSION, FunctionDocument, ImagePart, IndexPart};
    use thaw_store::{ImageId, IndexId, KernelId, Name};

    fn document(function: Value) -> FunctionDocument {
        FunctionDocument {
            version: DOCUMENT_VERSION,
            name: Name::new("shop").unwrap(),
            function,
            index: IndexPart { id: IndexId([1; 32]), size: 1, contents: 0, naming: Vec::new() },
            image: ImagePart {
                id: ImageId([2; 32]),
                size: 1,
                kernel: KernelId([3; 32]),
                cpu_features: [0; 8],
            },
            kernel: None,
            run: None,
            pieces: None,
        }
    }

    fn function() -> Value {
        json!({
            "config": {
                "name": "shop", "command": ["/srv/shop"], "port": 80, "listen": "0.0.0.0:22",
                "runtime": { "kind": "binary" },
                "sharing": { "domain": "customer-7", "private": ["keys/*"] },
            },
            "environment": { "PATH": "/bin" },
            "source": "/root/.ssh",
        })
    }

    fn accepted(
        function: Value,
        options: &PullOptions,
        is_signed: bool,
    ) -> Result<Accepted, String> {
        accept(&Offer { document: &document(function), is_signed }, options)
    }

    fn with(pointer: &str, key: &str, value: Value) -> Value {
        let mut function = function();
        function.pointer_mut(pointer).unwrap()[key] = value;
        function
    }

    #[test]
    fn places_of_this_machine_are_decided_here() {
        let options = PullOptions::default();
        let Accepted { function, notes } =
            accepted(super::tests::function(), &options, false).unwrap();
        let config = &function.config;
        assert_eq!(config.sharing.domain, None, "not the tenant that it names");
        assert_eq!(config.sharing.private.len(), 1);
        assert_eq!(config.listen, None);
        assert!(notes[0].contains("0.0.0.0:22"), "{notes:?}");
        assert_eq!(function.source, PathBuf::new());
        let name = Some(Name::new("mine").unwrap());
        let options = PullOptions { name, domain: Some("own".parse().unwrap()), ..options };
        let config = accepted(super::tests::function(), &options, false).unwrap().function.config;
        assert_eq!(config.name.as_str(), "mine");
        assert_eq!(config.sharing.domain, options.domain);
    }

    #[test]
    fn destinations_are_allowed_by_whoever_pulls_or_whom_he_trusts() {
        let open = with("/config", "egress", json!({ "allow": ["10.0.0.0/8:5432"] }));
        let options = PullOptions::default();
        let refused = accepted(open.clone(), &options, false).unwrap_err();
        assert!(refused.contains("10.0.0.0/8:5432") && refused.contains("--allow-egress"));
        accepted(open.clone(), &options, true).unwrap();
        accepted(open, &PullOptions { allow_egress: true, ..options }, false).unwrap();
    }

    #[test]
    fn configurations_that_no_build_makes_are_refused() {
        let refused = |function| accepted(function, &PullOptions::default(), true).unwrap_err();
        refused(json!({}));
        refused(with("/config", "unknown", json!(1)));
        refused(with("/config", "name", json!("../x")));
        refused(with("/config", "persist", json!(true)));
        refused(with("/config", "command", json!([])));
        refused(with("/config", "user", json!("root")));
        refused(with("/config", "user", json!("-1:0")));
        refused(with("/environment", "A=B", json!("")));
        refused(with("/environment", "A", json!("\0")));
        refused(with("/environment", "A", json!("x".repeat(VARIABLE_MAX + 1))));
        accepted(with("/config", "user", json!("5:6")), &PullOptions::default(), true).unwrap();
    }

    #[test]
    fn functions_of_container_images_are_accepted() {
        let image = json!({ "kind": "image", "image": "registry.example/shop:3" });
        let mut function = with("/config", "runtime", image);
        function["config"]["files"] = json!([]);
        function["config"]["workdir"] = json!("/srv");
        accepted(function, &PullOptions::default(), false).unwrap();
    }

    #[test]
    fn files_of_training_are_missed() {
        let requests = json!({ "requests": [{ "path": "/", "file": "body" }] });
        let trained = with("/config", "train", requests);
        let notes = accepted(trained, &PullOptions::default(), false).unwrap().notes;
        assert!(notes.iter().any(|note| note.contains("cannot be frozen anew")), "{notes:?}");
    }
}
