//! Why a request is not answered as it wants, in the two ways in which E2B's SDKs read it: a status
//! with `{"code": STATUS, "message": …}`, and a Connect error with `{"code": "not_found", …}`.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// The kinds of problems that the SDKs tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The request makes no sense.
    Invalid,
    /// The key or the token is missing or wrong.
    Unauthenticated,
    /// Whoever asks may not do that.
    Forbidden,
    /// There is no such thing.
    NotFound,
    /// It is there already, or is so already.
    Exists,
    /// A bound is reached.
    Exhausted,
    /// The sandbox has no room for it.
    NoSpace,
    /// The request is larger than is taken.
    TooLarge,
    /// Thaw does not do that.
    Unsupported,
    /// It cannot be done now.
    Busy,
    /// The sandbox is not there, or is paused.
    Gone,
    /// Output was not kept.
    DataLoss,
    /// The time that the client gave is over.
    Late,
}

/// Why there is no answer: a kind, and one sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Problem {
    /// What it is.
    pub kind: Kind,
    /// One sentence.
    pub message: String,
}

impl Problem {
    /// A problem of this kind.
    pub fn new(kind: Kind, message: impl ToString) -> Self {
        Self { kind, message: message.to_string() }
    }

    /// The request makes no sense.
    pub fn invalid(message: impl ToString) -> Self {
        Self::new(Kind::Invalid, message)
    }

    /// Thaw does not do that.
    pub fn unsupported(message: impl ToString) -> Self {
        Self::new(Kind::Unsupported, message)
    }

    /// There is no sandbox of that id, for this client.
    pub fn no_sandbox(id: &str) -> Self {
        Self::new(Kind::NotFound, format!("sandbox \"{id}\" was not found"))
    }

    /// The sandbox that a request is for does not run. The SDKs know this by its status and by
    /// the words "was not found".
    pub fn gone(id: &str) -> Self {
        let message = format!("the sandbox \"{id}\" was not found, or is paused");
        Self::new(Kind::Gone, message)
    }

    /// The status of the answer.
    pub fn status(&self) -> StatusCode {
        match self.kind {
            Kind::Invalid => StatusCode::BAD_REQUEST,
            Kind::Unauthenticated => StatusCode::UNAUTHORIZED,
            Kind::Forbidden => StatusCode::FORBIDDEN,
            Kind::NotFound => StatusCode::NOT_FOUND,
            Kind::Exists => StatusCode::CONFLICT,
            Kind::Exhausted => StatusCode::TOO_MANY_REQUESTS,
            Kind::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
            Kind::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Kind::Unsupported => StatusCode::NOT_IMPLEMENTED,
            Kind::Busy => StatusCode::SERVICE_UNAVAILABLE,
            Kind::Gone => StatusCode::BAD_GATEWAY,
            Kind::DataLoss => StatusCode::INTERNAL_SERVER_ERROR,
            Kind::Late => StatusCode::GATEWAY_TIMEOUT,
        }
    }

    /// The name of the Connect protocol for it (connectrpc.com/docs/protocol#error-codes).
    pub fn code(&self) -> &'static str {
        match self.kind {
            Kind::Invalid => "invalid_argument",
            Kind::Unauthenticated => "unauthenticated",
            Kind::Forbidden => "permission_denied",
            Kind::NotFound => "not_found",
            Kind::Exists => "already_exists",
            Kind::Exhausted | Kind::NoSpace | Kind::TooLarge => "resource_exhausted",
            Kind::Unsupported => "unimplemented",
            Kind::Busy | Kind::Gone => "unavailable",
            Kind::DataLoss => "data_loss",
            Kind::Late => "deadline_exceeded",
        }
    }

    /// The Connect error.
    pub fn connect_json(&self) -> Value {
        json!({"code": self.code(), "message": self.message})
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = self.status();
        (status, Json(json!({"code": status.as_u16(), "message": self.message}))).into_response()
    }
}
