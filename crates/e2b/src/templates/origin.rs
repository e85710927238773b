//! What sandboxes and templates begin with: a template, a snapshot, or a function of the node.

use super::names::{TemplateName, shortened};
use super::steps::StartRequest;
use crate::E2b;
use crate::problem::{Kind, Problem};
use crate::records::{Defaults, Snapshot};
use thaw_node::remote::LimitsChange;

/// The template of E2B that has an MCP gateway.
const MCP_TEMPLATE: &str = "mcp-gateway";

/// What something begins with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// As its owner knows it.
    pub shown: String,
    /// The function, if it is one.
    pub function: String,
    /// The checkpoint, if it is one.
    pub snapshot: Option<String>,
    /// The template, if it is one of the owner.
    pub template: Option<String>,
    /// What commands begin with.
    pub defaults: Defaults,
    /// What sandboxes may use.
    pub limits: LimitsChange,
}

impl E2b {
    /// What an owner means by the name of a template: a template or a snapshot of its own, or
    /// otherwise a function.
    pub(crate) fn origin(&self, owner: &str, name: &str) -> Origin {
        let shown = format!("the template {:?}", shortened(name));
        let own = TemplateName::parse(name, owner).ok();
        if let Some(found) = own.and_then(|name| self.templates.records.find(owner, &name)) {
            return Origin {
                shown,
                function: String::new(),
                snapshot: Some(found.checkpoint),
                template: Some(found.template),
                defaults: found.defaults,
                limits: found.limits,
            };
        }
        if let Some((id, snapshot)) = self.snapshot_named(owner, name) {
            let Snapshot { defaults, limits, .. } = snapshot;
            return Origin { shown, snapshot: Some(id), defaults, limits, ..Origin::default() };
        }
        let function = self.settings.now().function(name).to_owned();
        Origin { shown, function, ..Origin::default() }
    }

    /// What a build begins with.
    ///
    /// # Errors
    /// The node has no such image, or the request names nothing.
    pub(super) fn base(&self, owner: &str, request: &StartRequest) -> Result<Origin, Problem> {
        match (&request.from_template, &request.from_image) {
            (Some(template), _) => {
                let origin = self.origin(owner, template);
                let is_gateway = origin.snapshot.is_none() && template == MCP_TEMPLATE;
                match is_gateway && origin.function == MCP_TEMPLATE {
                    true => Err(Problem::unsupported("there is no MCP gateway here; leave it out")),
                    false => Ok(origin),
                }
            }
            (None, Some(image)) => {
                let function = self.settings.now().image(image).map(str::to_owned);
                let function = function.ok_or_else(|| no_image(image))?;
                let shown = format!("the image {:?}", shortened(image));
                Ok(Origin { shown, function, ..Origin::default() })
            }
            (None, None) => Err(Problem::invalid(
                "say what the template begins with: `fromTemplate` or `fromImage`",
            )),
        }
    }
}

fn no_image(image: &str) -> Problem {
    let image = shortened(image);
    Problem::new(
        Kind::NotFound,
        format!(
            "this node has no function of the image {image:?}, and pulls none for a client; its \
             operator builds one (`thaw build`, with `image = {image:?}` in [runtime]) and names it \
             in [images] of e2b.toml: {image:?} = \"FUNCTION\""
        ),
    )
}
