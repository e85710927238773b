//! What requests carry, with a refusal in JSON of what makes no sense.

use super::routes::problem;
use axum::extract::{self, FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use axum::response::Response;
use serde::de::DeserializeOwned;

/// Parts of the path, as [`extract::Path`].
pub(super) struct Path<T>(pub T);

/// The query, as [`extract::Query`].
pub(super) struct Query<T>(pub T);

/// A body of JSON, as [`axum::Json`].
pub(super) struct JsonBody<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Response> {
        match extract::Path::from_request_parts(parts, state).await {
            Ok(extract::Path(value)) => Ok(Self(value)),
            Err(wrong) => Err(problem(wrong.status(), "bad_path", wrong.body_text())),
        }
    }
}

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Response> {
        match extract::Query::from_request_parts(parts, state).await {
            Ok(extract::Query(value)) => Ok(Self(value)),
            Err(wrong) => Err(problem(wrong.status(), "bad_query", wrong.body_text())),
        }
    }
}

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        match axum::Json::from_request(request, state).await {
            Ok(axum::Json(value)) => Ok(Self(value)),
            Err(wrong) => Err(problem(wrong.status(), "bad_body", wrong.body_text())),
        }
    }
}
