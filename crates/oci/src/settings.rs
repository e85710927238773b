//! How an image wants its program to be run.

use crate::error::OciError;
use oci_spec::image::{Arch, ImageConfiguration, Os};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// What the configuration of an image says of its program (OCI image configuration, "config").
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// What comes before the arguments.
    pub entrypoint: Vec<String>,
    /// Arguments if nobody gives others.
    pub command: Vec<String>,
    /// Environment, as `NAME=VALUE`.
    pub env: Vec<String>,
    /// Working directory; empty: the root.
    pub workdir: String,
    /// User and group, by name or number, as in `app:staff`; empty: root.
    pub user: String,
    /// TCP ports that it exposes, the lowest first.
    pub ports: Vec<u16>,
    /// Signal that asks it to end, as in `SIGQUIT`.
    pub stop_signal: Option<String>,
}

/// Longest working directory (`PATH_MAX`, limits.h).
const WORKDIR_MAX: usize = 4096;

/// A configuration that was read: settings, and the digests of the layers when unpacked.
pub(crate) struct Configuration {
    pub settings: Settings,
    pub diff_ids: Vec<String>,
}

impl Configuration {
    /// Reads the JSON of a configuration.
    pub fn parse(bytes: &[u8]) -> Result<Self, OciError> {
        let parsed: ImageConfiguration = serde_json::from_slice(bytes)
            .map_err(|error| OciError::document("the image's configuration", error))?;
        if *parsed.os() != Os::Linux || *parsed.architecture() != Arch::Amd64 {
            let has = format!("{}/{}", parsed.os(), parsed.architecture());
            return Err(OciError::Platform { has });
        }
        let diff_ids = parsed.rootfs().diff_ids().clone();
        let settings = parsed.config().as_ref().map(settings).unwrap_or_default();
        if [&settings.entrypoint, &settings.command, &settings.env]
            .into_iter()
            .flatten()
            .chain([&settings.workdir, &settings.user])
            .any(|text| text.contains('\0'))
        {
            return Err(OciError::document("the image's configuration", "it has a NUL byte"));
        }
        if settings.workdir.len() > WORKDIR_MAX {
            return Err(OciError::document(
                "the image's configuration",
                "its directory is too long",
            ));
        }
        Ok(Self { settings, diff_ids })
    }
}

fn settings(config: &oci_spec::image::Config) -> Settings {
    let ports = config.exposed_ports().iter().flatten();
    Settings {
        entrypoint: config.entrypoint().clone().unwrap_or_default(),
        command: config.cmd().clone().unwrap_or_default(),
        env: config.env().clone().unwrap_or_default(),
        workdir: config.working_dir().clone().unwrap_or_default(),
        user: config.user().clone().unwrap_or_default(),
        // In no order in the configuration.
        ports: ports
            .filter_map(|port| tcp_port(port))
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect(),
        stop_signal: config.stop_signal().clone(),
    }
}

/// `8080/tcp` and `8080` are TCP ports.
fn tcp_port(text: &str) -> Option<u16> {
    text.strip_suffix("/tcp").unwrap_or(text).parse().ok()
}

impl Settings {
    /// The whole command: the entry point with these arguments, or else with the image's.
    pub fn command_with(&self, arguments: &[String]) -> Vec<String> {
        let arguments = if arguments.is_empty() { &self.command[..] } else { arguments };
        [&self.entrypoint, arguments].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"architecture":"amd64","os":"linux","config":{"Entrypoint":["/run"],
        "Cmd":["-v"],"Env":["A=b"],"WorkingDir":"/srv","User":"app","ExposedPorts":{"80/tcp":{},
        "53/udp":{}},"StopSignal":"SIGQUIT"},"rootfs":{"type":"layers","diff_ids":["sha256:00"]}}"#;

    #[test]
    fn a_configuration_is_read() {
        let Configuration { settings, diff_ids } = Configuration::parse(TEXT.as_bytes()).unwrap();
        assert_eq!(diff_ids, ["sha256:00"]);
        assert_eq!(settings.command_with(&[]), ["/run", "-v"]);
        assert_eq!(settings.command_with(&["x".to_owned()]), ["/run", "x"]);
        assert_eq!((settings.ports.as_slice(), settings.user.as_str()), (&[80][..], "app"));
        assert_eq!(settings.stop_signal.as_deref(), Some("SIGQUIT"));
    }

    #[test]
    fn images_of_other_machines_and_nonsense_are_refused() {
        let other = TEXT.replace("amd64", "arm64");
        let error = Configuration::parse(other.as_bytes()).err().unwrap().to_string();
        assert!(error.contains("linux/arm64"), "{error}");
        assert!(Configuration::parse(b"{").is_err());
        assert!(Configuration::parse(TEXT.replace("A=b", "A=\\u0000").as_bytes()).is_err());
    }
}
