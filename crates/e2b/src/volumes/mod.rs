//! Volumes of E2B's API: directories that outlive sandboxes. Each is a volume of the node, of the size
//! that its key says, and belongs to the name of that key. `content` reads and writes files in them.

mod content;
mod open;
mod tree;

pub(super) use content::{OF_NODE_MAX as CONTENTS_MAX, routes as content_routes};
pub(super) use open::OpenVolumes;

use super::E2b;
use super::control::{Asked, Client, answer, parse};
use super::keys::Role;
use super::problem::{Kind, Problem};
use super::records::VolumeRecord;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::get;
use axum::{Extension, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use thaw_home::volumes::{CLIENTS_PREFIX, VolumeError, VolumeStore};
use thaw_node::remote::SandboxVolume;
use thaw_node::to_its_end::to_its_end;
use thaw_store::Name;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};

/// Most bytes of a volume's name.
const NAME_MAX: usize = 128;
/// Most volumes of a sandbox.
const MOUNTS_MAX: usize = 16;
/// For so long a volume is not removed that is in use: a sandbox may be just ending.
const END_PATIENCE: Duration = Duration::from_secs(3);
/// How long until it is tried again.
const AGAIN: Duration = Duration::from_millis(50);

/// Their paths in the control API.
pub(super) fn routes() -> Router<Arc<E2b>> {
    Router::new()
        .route("/volumes", get(list).post(create))
        .route("/volumes/{id}", get(show).delete(remove))
}

#[derive(Deserialize)]
struct CreateRequest {
    name: String,
}

/// A volume that a sandbox is to have, as E2B's API names it.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Mount {
    name: String,
    path: String,
}

/// What a volume is called on the node.
fn on_node(id: &str) -> Result<Name, Problem> {
    Name::new(&format!("{CLIENTS_PREFIX}{id}")).map_err(Problem::invalid)
}

fn no_volume(id: &str) -> Problem {
    Problem::new(Kind::NotFound, format!("volume \"{id}\" was not found"))
}

fn problem(error: VolumeError) -> Problem {
    let kind = match &error {
        VolumeError::Missing(_) => Kind::NotFound,
        VolumeError::Quota { .. } | VolumeError::TooMany(_) => Kind::Exhausted,
        VolumeError::InUse(_) | VolumeError::Needed { .. } => Kind::Exists,
        _ => Kind::Busy,
    };
    Problem::new(kind, error)
}

/// Does something with the volumes of the node that may block.
async fn with_store<T: Send + 'static>(
    store: VolumeStore,
    work: impl FnOnce(&VolumeStore) -> Result<T, VolumeError> + Send + 'static,
) -> Result<T, Problem> {
    let done = spawn_blocking(move || work(&store)).await;
    done.map_err(|error| Problem::new(Kind::Busy, error))?.map_err(problem)
}

impl E2b {
    /// Forgets volumes that an earlier daemon has begun to make, and that are not on the node.
    pub(super) fn forget_missing_volumes(&self) {
        let Ok(store) = self.backend.volumes() else { return };
        let is_missing = |id: &str| match on_node(id) {
            Ok(name) => store.is_missing(&name),
            Err(_) => true,
        };
        self.records.forget_volumes(is_missing);
    }

    async fn create_volume(&self, client: &Client, body: &[u8]) -> Result<Value, Problem> {
        let CreateRequest { name } = parse(body)?;
        let is_fine = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        if !(1..=NAME_MAX).contains(&name.len()) || !name.bytes().all(is_fine) {
            return Err(Problem::invalid(format!(
                "`name` has up to {NAME_MAX} letters, digits, dashes and underscores"
            )));
        }
        let store = self.backend.volumes()?;
        let (most, size) = client.most_volumes();
        let owner = client.owner().to_owned();
        let record = VolumeRecord { owner, name, is_being_made: true };
        let id = self.records.insert_volume(record.clone(), most)?;
        let made = async {
            let on_node = on_node(&id)?;
            // The next daemon has to know whose it is, wherever this one ends.
            self.records.written().await?;
            with_store(store, move |store| store.create(&on_node, size, &[], None)).await
        };
        made.await.inspect_err(|_| self.records.remove_volume(&id))?;
        self.records.made_volume(&id);
        Ok(self.shown_volume(client, &id, &record))
    }

    /// A volume with the token for its files, which whoever may only look does not get.
    fn shown_volume(&self, client: &Client, id: &str, record: &VolumeRecord) -> Value {
        let token = match client.role() {
            Role::ReadOnly => String::new(),
            Role::Admin | Role::User => self.records.volume_token(id),
        };
        json!({"volumeID": id, "name": record.name, "token": token})
    }

    /// A volume of a client, which may still be being made.
    fn own_volume(&self, client: &Client, id: &str) -> Result<VolumeRecord, Problem> {
        let found = self.records.volume(id);
        found.filter(|record| record.owner == client.owner()).ok_or_else(|| no_volume(id))
    }

    async fn remove_volume(&self, client: &Client, id: &str) -> Result<Value, Problem> {
        // Without its record nobody would own what comes.
        if self.own_volume(client, id)?.is_being_made {
            let text = format!("the volume \"{id}\" is still being made; try again later");
            return Err(Problem::new(Kind::Exists, text));
        }
        let (on_node, store) = (on_node(id)?, self.backend.volumes()?);
        let until = Instant::now() + END_PATIENCE;
        loop {
            let name = on_node.clone();
            self.open_volumes.close(&name);
            // Sandboxes that are asleep have some that nobody has open.
            let removed = match self.backend.has_volume(&name) {
                true => Err(problem(VolumeError::InUse(name))),
                false => with_store(store.clone(), move |store| store.remove(&name)).await,
            };
            match removed {
                Err(problem) if problem.kind == Kind::Exists && Instant::now() < until => {
                    sleep(AGAIN).await;
                }
                Err(problem) if problem.kind == Kind::Exists => {
                    return Err(Problem::new(
                        Kind::Exists,
                        format!(
                            "volume \"{id}\" is in use; end the sandboxes that have it, paused ones \
                             too, and try again"
                        ),
                    ));
                }
                // The operator has removed it.
                Err(problem) if problem.kind != Kind::NotFound => return Err(problem),
                _ => {
                    self.records.remove_volume(id);
                    return Ok(Value::Null);
                }
            }
        }
    }

    /// The volumes that a client's sandbox is to have, as the node names them.
    pub(super) fn mounts(
        &self,
        client: &Client,
        wanted: Vec<Mount>,
    ) -> Result<Vec<SandboxVolume>, Problem> {
        if wanted.len() > MOUNTS_MAX {
            return Err(Problem::invalid(format!(
                "a sandbox can have {MOUNTS_MAX} volumes at most"
            )));
        }
        let own = self.records.volumes_of(client.owner());
        let one = |Mount { name, path }: Mount| {
            let found = own.iter().find(|(_, record)| record.name == name);
            let (id, _) = found.ok_or_else(|| no_volume(&name))?;
            Ok(SandboxVolume { name: on_node(id)?.to_string(), path, read_only: false })
        };
        wanted.into_iter().map(one).collect()
    }

    /// The volumes on the node that sandboxes of an owner may have.
    pub(super) fn volumes_for(&self, owner: &str) -> BTreeSet<Name> {
        let own = self.records.volumes_of(owner).into_iter();
        own.filter_map(|(id, _)| on_node(&id).ok()).collect()
    }

    /// What a sandbox has mounted, as E2B's API names it.
    pub(super) fn shown_mounts(&self, volumes: &[SandboxVolume]) -> Value {
        let shown = |volume: &SandboxVolume| {
            let record = self.records.volume(volume.name.strip_prefix(CLIENTS_PREFIX)?)?;
            Some(json!({"name": record.name, "path": volume.path}))
        };
        Value::Array(volumes.iter().filter_map(shown).collect())
    }
}

async fn create(
    State(e2b): State<Arc<E2b>>,
    Extension(client): Extension<Client>,
    body: Bytes,
) -> Response {
    let made = to_its_end(async move { e2b.create_volume(&client, &body).await });
    answer(StatusCode::CREATED, made.await)
}

async fn list(State(e2b): State<Arc<E2b>>, Extension(client): Extension<Client>) -> Response {
    let own = e2b.records.volumes_of(client.owner());
    let shown = own.iter().map(|(id, record)| json!({"volumeID": id, "name": record.name}));
    answer(StatusCode::OK, Ok(Value::Array(shown.collect())))
}

async fn show((State(e2b), Extension(client), Path(id)): Asked<Path<String>>) -> Response {
    let shown = e2b.own_volume(&client, &id).and_then(|record| match record.is_being_made {
        true => Err(no_volume(&id)),
        false => Ok(e2b.shown_volume(&client, &id, &record)),
    });
    answer(StatusCode::OK, shown)
}

async fn remove((State(e2b), Extension(client), Path(id)): Asked<Path<String>>) -> Response {
    let removed = to_its_end(async move { e2b.remove_volume(&client, &id).await });
    answer(StatusCode::NO_CONTENT, removed.await)
}
