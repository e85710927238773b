//! Connections that change their protocol (RFC 9110 §7.8), such as to WebSocket: after
//! the answer `101`, the gateway copies bytes in both directions.

use super::exchange::Lease;
use super::joined::{Joint, Pair, Place};
use super::routed::AnswerBody;
use super::wire::ClientIo;
use crate::upstream::Tap;
use http_body_util::Full;
use hyper::Response;
use hyper::body::Incoming;
use hyper::upgrade::{OnUpgrade, Parts};
use hyper_util::rt::TokioIo;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use thaw_http::message;

/// Passes on an instance's answer `101`, and joins both connections.
pub(super) fn switch(
    mut response: Response<Incoming>,
    mut lease: Lease,
    client: OnUpgrade,
) -> Response<AnswerBody> {
    let instance = hyper::upgrade::on(&mut response);
    lease.upstream().is_last();
    tokio::spawn(async move {
        if let Err(error) = join(lease, client, instance).await {
            tracing::debug!("a connection of another protocol has ended: {error}");
        }
    });
    let (mut head, _) = response.into_parts();
    let upgrade = head.headers.get(hyper::header::UPGRADE).cloned();
    message::to_client(&mut head);
    if let Some(upgrade) = upgrade {
        head.headers.insert(hyper::header::UPGRADE, upgrade);
    }
    head.headers
        .insert(hyper::header::CONNECTION, hyper::header::HeaderValue::from_static("upgrade"));
    Response::from_parts(head, AnswerBody::Own(Full::default()))
}

async fn join(mut lease: Lease, client: OnUpgrade, mut instance: OnUpgrade) -> io::Result<()> {
    let instance = poll_fn(|context| {
        lease.drive(context);
        Pin::new(&mut instance).poll(context)
    });
    let instance = instance.await.map_err(io::Error::other)?;
    let client = client.await.map_err(io::Error::other)?;
    let other = |_| io::Error::other("it is no connection of the gateway");
    let Parts { io: client, read_buf: from_client, .. } =
        client.downcast::<TokioIo<ClientIo>>().map_err(other)?;
    let Parts { io: instance, read_buf: from_instance, .. } =
        instance.downcast::<TokioIo<Tap>>().map_err(other)?;
    let (mut client, instance) = (client.into_inner(), instance.into_inner());
    client.join();
    let Some((service, number, connection)) = lease.place() else { return Ok(()) };
    let place = Place {
        service: service.clone(),
        instance: number,
        connection,
        addresses: client.addresses(),
    };
    let pair = Pair::new(client, instance, &from_client, &from_instance);
    Joint::begin(place, pair).run(move || lease.finish()).await
}
