//! Talking to the daemon's admin API.

use crate::failure::Failure;
use serde::de::DeserializeOwned;
use std::net::SocketAddr;
use std::time::Duration;
use thaw_node::admin::Problem;
use thaw_node::home::Home;
use ureq::http::Response;
use ureq::{Agent, Body};

/// A client of the daemon's admin API.
pub struct Daemon {
    agent: Agent,
    admin: SocketAddr,
}

impl Daemon {
    /// The daemon at `address`, or the one that serves `$THAW_HOME`.
    ///
    /// # Errors
    /// No daemon is running.
    pub fn find(address: Option<SocketAddr>) -> Result<Self, Failure> {
        if let Some(admin) = address {
            return Ok(Self::at(admin));
        }
        let home = Home::from_environment()?;
        Self::running(&home).ok_or_else(|| {
            Failure::failed(format!(
                "no daemon serves {}; start one with `thaw serve`, or name one with --admin",
                home.root().display()
            ))
        })
    }

    /// The daemon that serves `home`, if one does.
    pub fn running(home: &Home) -> Option<Self> {
        home.daemon().map(|daemon| Self::at(daemon.admin))
    }

    fn at(admin: SocketAddr) -> Self {
        let config = Agent::config_builder()
            // Errors carry a reason in their body.
            .http_status_as_error(false)
            .timeout_connect(Some(Duration::from_secs(5)))
            .build();
        Self { agent: config.into(), admin }
    }

    /// A request builder's URL for `path`, which begins with a slash.
    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.admin)
    }

    /// Reads a JSON answer.
    ///
    /// # Errors
    /// The daemon does not answer, or says why not.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        read_json(self.stream(path)?)
    }

    /// An answer whose body is still to be read.
    ///
    /// # Errors
    /// The daemon does not answer, or says why not.
    pub fn stream(&self, path: &str) -> Result<Response<Body>, Failure> {
        self.check(self.agent.get(self.url(path)).call())
    }

    /// Posts nothing and reads a JSON answer.
    ///
    /// # Errors
    /// The daemon does not answer, or says why not.
    pub fn post<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        read_json(self.check(self.agent.post(self.url(path)).send_empty())?)
    }

    /// Posts a body and gives the answer whatever its status.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub fn post_raw(
        &self,
        path: &str,
        headers: &[(String, String)],
        body: &[u8],
    ) -> Result<Response<Body>, Failure> {
        let mut request = self.agent.post(self.url(path));
        for (name, value) in headers {
            request = request.header(name, value);
        }
        request.send(body).map_err(|error| self.unreachable(&error))
    }

    fn check(
        &self,
        result: Result<Response<Body>, ureq::Error>,
    ) -> Result<Response<Body>, Failure> {
        let mut response = result.map_err(|error| self.unreachable(&error))?;
        if response.status().is_success() {
            return Ok(response);
        }
        match response.body_mut().read_json::<Problem>() {
            Ok(problem) => Err(Failure::failed(problem.reason)),
            Err(_) => Err(Failure::failed(format!("the daemon answered {}", response.status()))),
        }
    }

    fn unreachable(&self, error: &ureq::Error) -> Failure {
        Failure::failed(format!(
            "the daemon at {} does not answer ({error}); is `thaw serve` running?",
            self.admin
        ))
    }
}

fn read_json<T: DeserializeOwned>(mut response: Response<Body>) -> Result<T, Failure> {
    response.body_mut().read_json().map_err(|error| {
        Failure::failed(format!(
            "the daemon's answer cannot be read ({error}); is it the same version?"
        ))
    })
}
