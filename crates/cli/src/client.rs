//! Talking to the daemon's admin API.

use crate::exec_client::{self, Stream};
use crate::failure::Failure;
use crate::unix_transport::UnixConnector;
use clap::Args;
use serde::de::DeserializeOwned;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;
use thaw_daemon::admin::Problem;
use thaw_home::admin::{AdminAddress, AdminToken, connect_unix};
use thaw_home::home::Home;
use ureq::http::{Response, StatusCode};
use ureq::unversioned::resolver::DefaultResolver;
use ureq::{Agent, Body, RequestBuilder};

/// Which daemon is meant.
#[derive(Clone, Debug, Args)]
pub struct DaemonArguments {
    /// Admin API of the daemon, unix:PATH or IP:PORT; default: the daemon that serves
    /// $THAW_HOME.
    #[arg(long, value_name = "ADDR")]
    admin: Option<AdminAddress>,
    /// File with the token of an admin API over TCP; default: $THAW_HOME/admin.token.
    #[arg(long, value_name = "FILE", requires = "admin")]
    token_file: Option<PathBuf>,
}

impl DaemonArguments {
    /// Whether one is named.
    pub fn is_named(&self) -> bool {
        self.admin.is_some()
    }
}

/// A client of the daemon's admin API.
#[derive(Clone)]
pub struct Daemon {
    agent: Agent,
    admin: AdminAddress,
    /// Value of the `Authorization` header, if one is wanted.
    authorization: Option<String>,
}

impl Daemon {
    /// The daemon that is meant.
    ///
    /// # Errors
    /// No daemon is running, or there is no token for it.
    pub fn find(arguments: &DaemonArguments) -> Result<Self, Failure> {
        if let Some(admin) = &arguments.admin {
            let token = match (admin, &arguments.token_file) {
                (AdminAddress::Unix(_), None) => None,
                (_, Some(file)) => Some(AdminToken::read(file, "--token-file")?),
                (AdminAddress::Tcp(_), None) => {
                    let file = Home::from_environment()?.admin_token();
                    Some(AdminToken::read(&file, "--token-file")?)
                }
            };
            return Ok(Self::at(admin.clone(), token));
        }
        Self::of_home(&Home::from_environment()?, "or name one with --admin")
    }

    /// The daemon that serves `home`.
    ///
    /// # Errors
    /// None does; what to do `otherwise` ends the sentence.
    pub fn of_home(home: &Home, otherwise: &str) -> Result<Self, Failure> {
        Self::running(home).ok_or_else(|| {
            Failure::failed(match home.hidden_daemon() {
                Some((path, owner)) => format!(
                    "permission denied on {}, which belongs to user {owner}; run this as the user \
                     who runs the daemon or as root, {otherwise}",
                    path.display()
                ),
                None => format!(
                    "no daemon serves {}; start one with `thaw serve`, {otherwise}",
                    home.root().display()
                ),
            })
        })
    }

    /// The daemon that serves `home`, if one does.
    pub fn running(home: &Home) -> Option<Self> {
        home.daemon().map(|daemon| Self::at(daemon.admin, None))
    }

    fn at(admin: AdminAddress, token: Option<AdminToken>) -> Self {
        let config = Agent::config_builder()
            // Errors carry a reason in their body.
            .http_status_as_error(false)
            .timeout_connect(Some(Duration::from_secs(5)))
            // A proxy has no business with the token.
            .proxy(None)
            .build();
        let agent = match &admin {
            AdminAddress::Tcp(_) => config.into(),
            AdminAddress::Unix(path) => {
                let connector = UnixConnector { path: path.clone() };
                Agent::with_parts(config, connector, DefaultResolver::default())
            }
        };
        Self { agent, admin, authorization: token.map(|token| token.header()) }
    }

    /// A request builder's URL for `path`, which begins with a slash.
    fn url(&self, path: &str) -> String {
        match &self.admin {
            AdminAddress::Tcp(address) => format!("http://{address}{path}"),
            // The connector knows better; an address needs no name server.
            AdminAddress::Unix(_) => format!("http://127.0.0.1{path}"),
        }
    }

    /// Adds what the daemon wants to see.
    fn authorized<B>(&self, request: RequestBuilder<B>) -> RequestBuilder<B> {
        match &self.authorization {
            Some(authorization) => request.header("Authorization", authorization),
            None => request,
        }
    }

    /// Reads a JSON answer.
    ///
    /// # Errors
    /// The daemon does not answer, or says why not.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        read_json(self.stream(path)?)
    }

    /// Whether the daemon has something at a path; `None`: it does not answer, or cannot say.
    pub fn has(&self, path: &str) -> Option<bool> {
        const PATIENCE: Duration = Duration::from_secs(5);
        let request = self.authorized(self.agent.get(self.url(path))).config();
        let answer = request.timeout_global(Some(PATIENCE)).build().call().ok()?;
        match answer.status() {
            status if status.is_success() => Some(true),
            StatusCode::NOT_FOUND => Some(false),
            _ => None,
        }
    }

    /// An answer whose body is still to be read.
    ///
    /// # Errors
    /// The daemon does not answer, or says why not.
    pub fn stream(&self, path: &str) -> Result<Response<Body>, Failure> {
        self.check(self.authorized(self.agent.get(self.url(path))).call())
    }

    /// Posts nothing and reads a JSON answer.
    ///
    /// # Errors
    /// The daemon does not answer, or says why not.
    pub fn post<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        let request = self.authorized(self.agent.post(self.url(path)));
        read_json(self.check(request.send_empty())?)
    }

    /// Posts bytes, which may be none, and reads a JSON answer.
    ///
    /// # Errors
    /// The daemon does not answer, or says why not.
    pub fn post_bytes<T: DeserializeOwned>(&self, path: &str, body: &[u8]) -> Result<T, Failure> {
        read_json(self.check(self.authorized(self.agent.post(self.url(path))).send(body))?)
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
        let mut request = self.authorized(self.agent.post(self.url(path)));
        for (name, value) in headers {
            request = request.header(name, value);
        }
        request.send(body).map_err(|error| self.unreachable(&error))
    }

    /// Sends JSON and reads a JSON answer.
    ///
    /// # Errors
    /// The daemon does not answer, or says why not.
    pub fn send_json<T: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        body: &impl serde::Serialize,
    ) -> Result<T, Failure> {
        let text = serde_json::to_vec(body)?;
        let url = self.url(path);
        let request = if method == "PUT" { self.agent.put(url) } else { self.agent.post(url) };
        let request = self.authorized(request).header("Content-Type", "application/json");
        read_json(self.check(request.send(&text[..]))?)
    }

    /// Sends a request without a body and reads a JSON answer.
    ///
    /// # Errors
    /// The daemon does not answer, or says why not.
    pub fn send_empty<T: DeserializeOwned>(&self, method: &str, path: &str) -> Result<T, Failure> {
        debug_assert_eq!(method, "DELETE");
        read_json(self.check(self.authorized(self.agent.delete(self.url(path))).call())?)
    }

    /// Sends a file and reads a JSON answer.
    ///
    /// # Errors
    /// The daemon does not answer, or says why not.
    pub fn put_file<T: DeserializeOwned>(
        &self,
        path: &str,
        file: std::fs::File,
    ) -> Result<T, Failure> {
        let request = self.authorized(self.agent.put(self.url(path)));
        read_json(self.check(request.send(file))?)
    }

    /// Sends what a reader gives, and reads a JSON answer.
    ///
    /// # Errors
    /// The daemon does not answer, or says why not; or the reader fails.
    pub fn put_stream<T: DeserializeOwned>(
        &self,
        path: &str,
        reader: &mut dyn std::io::Read,
    ) -> Result<T, Failure> {
        let request = self.authorized(self.agent.put(self.url(path)));
        let mut reader = reader;
        read_json(self.check(request.send(ureq::SendBody::from_reader(&mut reader)))?)
    }

    /// A connection that carries the streams of a process, which `path` starts or finds.
    ///
    /// # Errors
    /// The daemon does not answer, or says why not.
    pub fn upgraded(
        &self,
        path: &str,
        protocol: &str,
        body: &[u8],
    ) -> Result<Box<dyn Stream>, Failure> {
        let unreachable = |error: std::io::Error| {
            Failure::failed(format!(
                "the daemon at {} does not answer ({error}); is `thaw serve` running?",
                self.admin
            ))
        };
        let (stream, host): (Box<dyn Stream>, String) = match &self.admin {
            AdminAddress::Unix(path) => {
                (Box::new(connect_unix(path).map_err(unreachable)?), "127.0.0.1".to_owned())
            }
            AdminAddress::Tcp(address) => {
                let stream = std::net::TcpStream::connect(address).map_err(unreachable)?;
                stream.set_nodelay(true)?;
                (Box::new(stream), address.to_string())
            }
        };
        exec_client::upgrade(stream, protocol, (&host, path), self.authorization.as_deref(), body)
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
            Ok(problem) => Err(Failure::of(&problem)),
            Err(_) => Err(Failure::failed(format!("the daemon answered {}", response.status()))),
        }
    }

    /// Why a request has no answer.
    fn unreachable(&self, error: &ureq::Error) -> Failure {
        let admin = &self.admin;
        Failure::failed(match error {
            ureq::Error::Io(error) if error.kind() == ErrorKind::PermissionDenied => {
                format!(
                    "permission denied on {admin}; run this as the user who runs the daemon, or as \
                     root"
                )
            }
            error if is_unconnected(error) => {
                format!("the daemon at {admin} does not answer ({error}); is `thaw serve` running?")
            }
            ureq::Error::Http(error) => {
                format!("the request cannot be sent ({error}); give it a shorter or another path")
            }
            error => format!(
                "the connection to the daemon at {admin} has ended before its answer ({error}); \
                 the daemon's log may say why"
            ),
        })
    }
}

/// Whether nobody was there to take the request.
fn is_unconnected(error: &ureq::Error) -> bool {
    match error {
        ureq::Error::Io(error) => matches!(
            error.kind(),
            ErrorKind::NotFound
                | ErrorKind::ConnectionRefused
                | ErrorKind::AddrNotAvailable
                | ErrorKind::HostUnreachable
                | ErrorKind::NetworkUnreachable
                | ErrorKind::TimedOut
        ),
        ureq::Error::ConnectionFailed | ureq::Error::HostNotFound => true,
        ureq::Error::Timeout(timeout) => *timeout == ureq::Timeout::Connect,
        _ => false,
    }
}

fn read_json<T: DeserializeOwned>(mut response: Response<Body>) -> Result<T, Failure> {
    response.body_mut().read_json().map_err(|error| {
        Failure::failed(format!(
            "the daemon's answer cannot be read ({error}); is it the same version?"
        ))
    })
}
