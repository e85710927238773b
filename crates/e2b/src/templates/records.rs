//! What is kept of templates and their builds, in a file of mode 0600, so that the next daemon knows
//! it, too.
//!
//! A build is noted with the names of its sandbox and of its checkpoint before either is there.
//! So nothing is left of one that was cut off: the next daemon removes both.

use super::known::{Build, FINALIZE, Failure, Found, NewBuild, State, Tag, Template};
use super::names::{DEFAULT_TAG, TemplateName};
use crate::control::now_ms;
use crate::problem::{Kind, Problem};
use crate::records::{Defaults, random_text};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use thaw_home::state_file::{self, StateFile};
use thaw_node::remote::LimitsChange;

/// Name of the file in the node's home.
const FILE: &str = "e2b-templates.json";
/// Letters and digits of a template's id.
const ID_LEN: usize = 20;
/// Checkpoints that a key's name may have for each template: with those that were replaced, and on
/// which other templates stand.
const CHECKPOINTS_PER_TEMPLATE: usize = 4;
/// Most tags of a template.
const TAGS_MAX: usize = 64;

#[derive(Clone, Default, Serialize, Deserialize)]
struct Contents {
    templates: BTreeMap<String, Template>,
    /// Checkpoints that nobody wants any more, and whose they are.
    leftovers: BTreeMap<String, String>,
    /// Builds that nobody wants any more, by their ids, whose sandboxes may be there yet: those
    /// whose templates were deleted meanwhile, or that a daemon did not end.
    #[serde(default)]
    given_up: BTreeMap<String, GivenUp>,
}

impl state_file::State for Contents {
    const LOST: &'static str = "the next daemon does not know all templates of E2B's API";

    fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("plain data")
    }
}

/// What a build makes that nobody wants any more.
#[derive(Clone, Serialize, Deserialize)]
struct GivenUp {
    owner: String,
    sandbox: String,
    checkpoint: String,
}

impl GivenUp {
    fn of(build: &Build, owner: &str) -> Self {
        let (sandbox, checkpoint) = (build.sandbox.clone(), build.checkpoint.clone());
        Self { owner: owner.to_owned(), sandbox, checkpoint }
    }
}

/// What is known of all of them.
pub struct TemplateRecords {
    contents: StateFile<Contents>,
}

impl Contents {
    fn of<'a>(&'a self, owner: &'a str) -> impl Iterator<Item = (&'a String, &'a Template)> {
        self.templates.iter().filter(move |(_, template)| template.owner == owner)
    }

    fn id_of(&self, owner: &str, name: &str) -> Option<String> {
        let is_meant = |(id, template): &(&String, &Template)| *id == name || template.name == name;
        self.of(owner).find(is_meant).map(|(id, _)| id.clone())
    }

    fn checkpoints_of(&self, owner: &str) -> usize {
        let is_kept = |build: &&Build| matches!(build.state, State::Ready | State::Building);
        let builds = self.of(owner).flat_map(|(_, template)| template.builds.values());
        let left = self.leftovers.values().filter(|one| *one == owner);
        let given_up = self.given_up.values().filter(|one| one.owner == owner);
        builds.filter(is_kept).count() + left.count() + given_up.count()
    }

    /// Refuses one more checkpoint of an owner who may have `most` templates.
    fn check_room(&self, owner: &str, most: usize) -> Result<(), Problem> {
        let checkpoints = most.saturating_mul(CHECKPOINTS_PER_TEMPLATE);
        match self.checkpoints_of(owner) >= checkpoints {
            true => Err(full(owner, format!("{checkpoints} builds of templates"))),
            false => Ok(()),
        }
    }

    /// Of builds that no tag means any more the checkpoints go.
    fn retire(&mut self, id: &str) {
        let Some(template) = self.templates.get_mut(id) else { return };
        let tagged: BTreeSet<_> = template.tags.values().map(|tag| &tag.build).collect();
        let gone = template
            .builds
            .iter()
            .filter(|(id, build)| build.state == State::Ready && !tagged.contains(id));
        let gone: Vec<_> = gone.map(|(id, build)| (id.clone(), build.checkpoint.clone())).collect();
        for (build, checkpoint) in gone {
            template.builds.remove(&build);
            self.leftovers.insert(checkpoint, template.owner.clone());
        }
    }
}

impl TemplateRecords {
    /// Those in a directory. Builds that the daemon before this one has not ended have failed.
    ///
    /// # Errors
    /// The file is there and of no use, or cannot be written.
    pub fn load(directory: &Path) -> io::Result<Self> {
        let file = directory.join(FILE);
        let contents = match std::fs::read(&file) {
            Ok(bytes) => serde_json::from_slice(&bytes)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Contents::default(),
            Err(error) => return Err(error),
        };
        let contents = StateFile::new(file, contents);
        contents.write_first()?;
        Ok(Self { contents })
    }

    /// Has builds fail that were under way when the daemon before this one ended. Those of which
    /// something may be left, with their sandboxes; [`Self::leave_over`] follows for each.
    pub fn fail_cut_off(&self) -> Vec<(String, String)> {
        let mut contents = self.contents.lock();
        let Contents { templates, given_up, .. } = &mut *contents;
        for Template { owner, builds, .. } in templates.values_mut() {
            for (id, build) in builds.iter_mut().filter(|(_, one)| one.state == State::Building) {
                let message = "the node's daemon ended before the build had; build it again";
                build.state = State::Failed(Failure::new(FINALIZE, message));
                build.finished_ms = Some(now_ms());
                given_up.insert(id.clone(), GivenUp::of(build, owner));
            }
        }
        let all = contents.given_up.iter();
        let all = all.map(|(build, left)| (build.clone(), left.sandbox.clone())).collect();
        drop(contents);
        self.contents.write_soon();
        all
    }

    /// Notes a build that is going to be made, of a new template or of one that is there, of an
    /// owner who may have `most`. The ids of template and build.
    ///
    /// # Errors
    /// The owner has as many already.
    pub fn request(
        &self,
        owner: &str,
        wanted: NewBuild,
        most: u32,
    ) -> Result<(String, String), Problem> {
        let internal = |error: io::Error| Problem::new(Kind::Busy, error);
        let mut contents = self.contents.lock();
        let most = most as usize;
        let known = contents.id_of(owner, &wanted.name);
        if known.is_none() && contents.of(owner).count() >= most {
            forget_an_empty_one(&mut contents, owner)
                .ok_or_else(|| full(owner, format!("{most} templates")))?;
        }
        contents.check_room(owner, most)?;
        // Those that it gets when builds have ended count, too.
        let has_room = |template: &Template| {
            let is_coming =
                |build: &&Build| matches!(build.state, State::Waiting | State::Building);
            let coming = template.builds.values().filter(is_coming).flat_map(|build| &build.tags);
            let all: BTreeSet<_> = template.tags.keys().chain(coming).chain(&wanted.tags).collect();
            all.len() <= TAGS_MAX
        };
        if !known.as_ref().and_then(|id| contents.templates.get(id)).is_none_or(has_room) {
            return Err(too_many_tags());
        }
        let id = match known {
            Some(id) => id,
            None => random_text(ID_LEN).map_err(internal)?,
        };
        let build_id = random_uuid().map_err(internal)?;
        let random = random_text(ID_LEN).map_err(internal)?;
        let template = contents.templates.entry(id.clone()).or_insert_with(|| Template {
            owner: owner.to_owned(),
            name: wanted.name,
            created_ms: now_ms(),
            ..Template::default()
        });
        let build = Build {
            created_ms: now_ms(),
            finished_ms: None,
            tags: wanted.tags,
            state: State::Waiting,
            limits: wanted.limits,
            had: None,
            defaults: Defaults::default(),
            sandbox: format!("e2b-build-{random}"),
            checkpoint: format!("e2b-template-{random}"),
        };
        template.builds.insert(build_id.clone(), build);
        template.forget_old_builds(&build_id);
        drop(contents);
        self.contents.write_soon();
        Ok((id, build_id))
    }

    /// A template of an owner, by its id or its name.
    ///
    /// # Errors
    /// The owner has none.
    pub fn named(&self, owner: &str, name: &str) -> Result<(String, Template), Problem> {
        let contents = self.contents.lock();
        let id = contents.id_of(owner, name).ok_or_else(|| no_template(name))?;
        let template = contents.templates[&id].clone();
        Ok((id, template))
    }

    /// Whose a template is, by its id.
    pub fn owner(&self, id: &str) -> Option<String> {
        self.contents.lock().templates.get(id).map(|template| template.owner.clone())
    }

    /// The templates of an owner, by id.
    pub fn of(&self, owner: &str) -> Vec<(String, Template)> {
        let contents = self.contents.lock();
        contents.of(owner).map(|(id, template)| (id.clone(), template.clone())).collect()
    }

    /// What sandboxes are made of that an owner means; none: there is no such template.
    pub fn find(&self, owner: &str, wanted: &TemplateName) -> Option<Found> {
        let (template, found) = self.named(owner, &wanted.name).ok()?;
        let (_, build) = match (found.ready(wanted.tag()), wanted.tag.as_deref()) {
            (Some(ready), _) => ready,
            // As images have it.
            (None, Some("latest")) => found.ready(DEFAULT_TAG)?,
            (None, _) => return None,
        };
        Some(Found {
            template,
            checkpoint: build.checkpoint.clone(),
            defaults: build.defaults.clone(),
            limits: build.limits,
        })
    }

    /// Whether a checkpoint is what sandboxes of a template are made of.
    pub fn has_checkpoint(&self, name: &str) -> bool {
        let contents = self.contents.lock();
        let mut builds = contents.templates.values().flat_map(|template| template.builds.values());
        builds.any(|build| build.state == State::Ready && build.checkpoint == name)
    }

    /// A sandbox was made of a template.
    pub fn spawned(&self, id: &str) {
        if let Some(template) = self.contents.lock().templates.get_mut(id) {
            template.spawned += 1;
            template.spawned_ms = Some(now_ms());
        }
    }

    /// A build begins, whose sandboxes may use so much, of an owner who may have `most` templates.
    /// Nothing is made for it before that is written: nobody would remove what it leaves if it is cut
    /// off.
    ///
    /// # Errors
    /// It has begun already, or is not there; or the owner has as many as may be.
    pub fn begin(
        &self,
        (template, build): (&str, &str),
        limits: LimitsChange,
        most: u32,
    ) -> Result<(), Problem> {
        let mut contents = self.contents.lock();
        let owner = contents.templates.get(template).map(|one| one.owner.clone());
        // Others may have begun since this one was asked for.
        contents.check_room(&owner.ok_or_else(|| no_build(build))?, most as usize)?;
        let found = contents.templates.get_mut(template).and_then(|one| one.builds.get_mut(build));
        let found = found.ok_or_else(|| no_build(build))?;
        if found.state != State::Waiting {
            let text = format!("the build {build:?} has begun already; ask for another one");
            return Err(Problem::new(Kind::Exists, text));
        }
        found.state = State::Building;
        found.limits = limits;
        drop(contents);
        self.contents.write_soon();
        Ok(())
    }

    /// A build has not begun after all.
    pub fn has_not_begun(&self, template: &str, build: &str) {
        let mut contents = self.contents.lock();
        let found = contents.templates.get_mut(template).and_then(|one| one.builds.get_mut(build));
        match found {
            Some(found) => found.state = State::Waiting,
            // Its template was deleted meanwhile, and it has left nothing.
            None => drop(contents.given_up.remove(build)),
        }
        drop(contents);
        self.contents.write_soon();
    }

    /// A build has ended so; `change` notes what else is known of it. Whether it is known still: its
    /// template may be gone.
    pub fn finish(
        &self,
        template: &str,
        build: &str,
        state: State,
        change: impl FnOnce(&mut Build),
    ) -> bool {
        let mut contents = self.contents.lock();
        let Some(found) = contents.templates.get_mut(template) else { return false };
        let Some(one) = found.builds.get_mut(build) else { return false };
        one.finished_ms = Some(now_ms());
        one.state = state;
        change(one);
        if one.state == State::Ready {
            let (tags, created_ms) = (one.tags.clone(), now_ms());
            let tag = Tag { build: build.to_owned(), created_ms };
            found.tags.extend(tags.into_iter().map(|name| (name, tag.clone())));
        } else {
            let (checkpoint, owner) = (one.checkpoint.clone(), found.owner.clone());
            contents.leftovers.insert(checkpoint, owner);
        }
        contents.retire(template);
        drop(contents);
        self.contents.write_soon();
        true
    }

    /// Has tags mean the build that another one means, which is named.
    ///
    /// # Errors
    /// There is no such template or tag, or there are too many tags.
    pub fn tag(
        &self,
        owner: &str,
        target: &TemplateName,
        tags: &[String],
    ) -> Result<String, Problem> {
        let mut contents = self.contents.lock();
        let id = contents.id_of(owner, &target.name).ok_or_else(|| no_template(&target.name))?;
        let template = contents.templates.get_mut(&id).expect("it was found");
        let ready = template.ready(target.tag()).map(|(build, _)| build.clone());
        let build =
            ready.ok_or_else(|| no_template(&format!("{}:{}", target.name, target.tag())))?;
        let new = tags.iter().filter(|tag| !template.tags.contains_key(*tag)).count();
        if template.tags.len() + new > TAGS_MAX {
            return Err(too_many_tags());
        }
        let tag = Tag { build: build.clone(), created_ms: now_ms() };
        template.tags.extend(tags.iter().map(|name| (name.clone(), tag.clone())));
        contents.retire(&id);
        drop(contents);
        self.contents.write_soon();
        Ok(build)
    }

    /// Takes tags away. A build without any goes.
    ///
    /// # Errors
    /// There is no such template.
    pub fn untag(&self, owner: &str, name: &str, tags: &[String]) -> Result<(), Problem> {
        let mut contents = self.contents.lock();
        let id = contents.id_of(owner, name).ok_or_else(|| no_template(name))?;
        let template = contents.templates.get_mut(&id).expect("it was found");
        template.tags.retain(|tag, _| !tags.contains(tag));
        contents.retire(&id);
        drop(contents);
        self.contents.write_soon();
        Ok(())
    }

    /// Forgets a template; its builds. Their checkpoints are left over.
    ///
    /// # Errors
    /// There is no such template.
    pub fn remove(&self, owner: &str, name: &str) -> Result<Vec<String>, Problem> {
        let mut contents = self.contents.lock();
        let id = contents.id_of(owner, name).ok_or_else(|| no_template(name))?;
        let template = contents.templates.remove(&id).expect("it was found");
        for (id, build) in &template.builds {
            match build.state {
                State::Ready => {
                    contents.leftovers.insert(build.checkpoint.clone(), owner.to_owned());
                }
                State::Building => {
                    contents.given_up.insert(id.clone(), GivenUp::of(build, owner));
                }
                State::Waiting | State::Failed(_) => {}
            }
        }
        drop(contents);
        self.contents.write_soon();
        Ok(template.builds.into_keys().collect())
    }

    /// The sandbox of a build is gone that nobody wants any more. Its checkpoint is left over.
    pub fn leave_over(&self, build: &str) {
        let mut contents = self.contents.lock();
        if let Some(GivenUp { owner, checkpoint, .. }) = contents.given_up.remove(build) {
            contents.leftovers.insert(checkpoint, owner);
            drop(contents);
            self.contents.write_soon();
        }
    }

    /// Checkpoints that are wanted no more.
    pub fn leftovers(&self) -> Vec<String> {
        self.contents.lock().leftovers.keys().cloned().collect()
    }

    /// One of them is gone.
    pub fn forget_leftover(&self, checkpoint: &str) {
        let mut contents = self.contents.lock();
        contents.leftovers.remove(checkpoint);
        drop(contents);
        self.contents.write_soon();
    }

    /// Waits until what has changed so far is in the file.
    ///
    /// # Errors
    /// The host does not keep it.
    pub async fn written(&self) -> Result<(), Problem> {
        self.contents.written().await.map_err(|error| {
            Problem::new(Kind::NoSpace, format!("the node cannot note it: {error}"))
        })
    }
}

/// Forgets the oldest template of an owner of which nothing was ever built, if there is one.
fn forget_an_empty_one(contents: &mut Contents, owner: &str) -> Option<()> {
    let empty = contents.of(owner).filter(|(_, template)| template.is_idle_and_empty());
    let (id, _) = empty.min_by_key(|(_, template)| template.created_ms)?;
    let id = id.clone();
    contents.templates.remove(&id).map(drop)
}

fn full(owner: &str, what: String) -> Problem {
    Problem::new(
        Kind::Exhausted,
        format!(
            "`{owner}` has {what} already; delete some templates, or raise `templates` of the key \
             in {}",
            crate::settings::FILE
        ),
    )
}

fn too_many_tags() -> Problem {
    let text = format!("a template has at most {TAGS_MAX} tags; remove some");
    Problem::new(Kind::Exhausted, text)
}

/// There is no such template, for this client.
pub fn no_template(name: &str) -> Problem {
    let name = super::names::shortened(name);
    Problem::new(Kind::NotFound, format!("template \"{name}\" was not found"))
}

/// There is no such build.
pub fn no_build(id: &str) -> Problem {
    let id = super::names::shortened(id);
    Problem::new(Kind::NotFound, format!("build \"{id}\" was not found"))
}

/// A random UUID (RFC 9562, version 4): the SDKs take nothing else for the id of a build.
fn random_uuid() -> io::Result<String> {
    use rustix::rand::{GetRandomFlags, getrandom};
    let mut bytes = [0_u8; 16];
    if getrandom(&mut bytes, GetRandomFlags::empty())? < bytes.len() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]];
    Ok(parts.join("-"))
}

#[cfg(test)]
#[path = "records_tests.rs"]
mod tests;
