//! Who one is to a registry: what `docker login` has noted.

use docker_credential::{CredentialRetrievalError, DockerCredential};
use oci_client::secrets::RegistryAuth;
use serde_json::Value;
use std::env;
use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;

/// Under which name Docker's clients note the credentials of docker.io.
const DOCKER_HUB: &str = "https://index.docker.io/v1/";

/// The text of docker's config.json, read by a process that will not see it any more.
static READ_AHEAD: Mutex<Option<Vec<u8>>> = Mutex::new(None);

/// Reads docker's config.json for this process's only pull, which goes on without the rights and files
/// that it has now. The text is let go of by [`forget`]; helper programs that it names are not run then.
pub fn read_ahead() {
    let directory = env::var_os("DOCKER_CONFIG").map(PathBuf::from);
    let home = || env::var_os("HOME").map(|home| PathBuf::from(home).join(".docker"));
    let text = directory.or_else(home).and_then(|path| fs::read(path.join("config.json")).ok());
    let text = text.map_or_else(|| b"{}".to_vec(), |text| without_helpers(&text));
    *READ_AHEAD.lock().expect("no holder panics") = Some(text);
}

/// The same config.json without the helper programs that it names. What makes no sense stays as it is, and is
/// refused by whoever reads it.
fn without_helpers(text: &[u8]) -> Vec<u8> {
    let Ok(Value::Object(mut entries)) = serde_json::from_slice(text) else {
        return text.to_vec();
    };
    entries.retain(|name, _| !matches!(name.as_str(), "credsStore" | "credHelpers"));
    Value::Object(entries).to_string().into_bytes()
}

/// Lets go of what was read ahead.
pub fn forget() {
    if let Some(text) = &mut *READ_AHEAD.lock().expect("no holder panics") {
        text.fill(0);
        *text = b"{}".to_vec();
    }
}

fn get(server: &str) -> Result<DockerCredential, CredentialRetrievalError> {
    match &*READ_AHEAD.lock().expect("no holder panics") {
        Some(text) => docker_credential::get_credential_from_reader(&text[..], server),
        None => docker_credential::get_credential(server),
    }
}

/// The credentials for a registry, from `$DOCKER_CONFIG/config.json` or
/// `~/.docker/config.json` and the helper programs that it names.
///
/// # Errors
/// One sentence: a helper fails, or an entry makes no sense. A file that cannot be read counts as
/// none.
pub(crate) fn find(registry: &str) -> Result<RegistryAuth, String> {
    let server = if registry == "docker.io" { DOCKER_HUB } else { registry };
    match get(server) {
        Ok(DockerCredential::UsernamePassword(name, password)) => {
            Ok(RegistryAuth::Basic(name, password))
        }
        // A token of docker(1) is to be exchanged under this name.
        Ok(DockerCredential::IdentityToken(token)) => {
            Ok(RegistryAuth::Basic("<token>".to_owned(), token))
        }
        Err(
            CredentialRetrievalError::NoCredentialConfigured
            | CredentialRetrievalError::ConfigNotFound
            | CredentialRetrievalError::ConfigReadError,
        ) => Ok(RegistryAuth::Anonymous),
        // What the helpers of Docker say of a registry that nobody has logged in to.
        Err(CredentialRetrievalError::HelperFailure { stdout, stderr, .. })
            if [&stdout, &stderr].iter().any(|text| text.contains("credentials not found")) =>
        {
            Ok(RegistryAuth::Anonymous)
        }
        Err(error) => Err(format!(
            "the credentials for {registry} cannot be read from docker's config.json: {error}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn helper_programs_are_left_out() {
        let text = br#"{"auths":{"a.example":{"auth":"eDp5"}},"credsStore":"pass","credHelpers":{"b.example":"x"}}"#;
        let left = without_helpers(text);
        let find = |host| docker_credential::get_credential_from_reader(&left[..], host);
        let known = DockerCredential::UsernamePassword("x".to_owned(), "y".to_owned());
        assert_eq!(find("a.example").unwrap(), known);
        assert!(matches!(find("b.example"), Err(CredentialRetrievalError::NoCredentialConfigured)));
        assert_eq!(without_helpers(b"no JSON"), b"no JSON");
    }
}
