//! Work that whoever has asked for it does not take back by going away.

use std::future::Future;

/// Does something to its end, also if the client goes away meanwhile: half of it would leave what
/// nobody knows.
pub async fn to_its_end<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    tokio::spawn(work).await.expect("it does not panic")
}
