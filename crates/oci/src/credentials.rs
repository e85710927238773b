//! Who one is to a registry: what `docker login` has noted.

use docker_credential::{CredentialRetrievalError, DockerCredential};
use oci_client::secrets::RegistryAuth;

/// Under which name Docker's clients note the credentials of docker.io.
const DOCKER_HUB: &str = "https://index.docker.io/v1/";

/// The credentials for a registry, from `$DOCKER_CONFIG/config.json` or
/// `~/.docker/config.json` and the helper programs that it names.
///
/// # Errors
/// One sentence: a helper fails, or an entry makes no sense. A file that cannot be read counts as
/// none.
pub(crate) fn find(registry: &str) -> Result<RegistryAuth, String> {
    let server = if registry == "docker.io" { DOCKER_HUB } else { registry };
    match docker_credential::get_credential(server) {
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
