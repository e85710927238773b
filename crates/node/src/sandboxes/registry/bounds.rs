//! How much sandboxes may use, where they may connect to, and with which headers.

use super::{SandboxProblem, Sandboxes};
use crate::inject::OwnHeaders;
use crate::remote::egress::{ClientEgress, EgressInfo, SandboxEgress, SandboxInject};
use crate::remote::limits::of_host;
use crate::remote::{LimitsChange, LimitsInfo};

impl Sandboxes {
    /// What one may use, and how much memory it has. Wakes nobody.
    ///
    /// # Errors
    /// There is none.
    pub async fn limits(&self, name: &str) -> Result<LimitsInfo, SandboxProblem> {
        let info = self.find(name)?;
        let service = self.service(&info);
        let service = service.ok_or_else(|| SandboxProblem::Unknown(name.to_owned()))?;
        let held = service.use_of(info.instance).await.unwrap_or_default().memory;
        let (now, function) = (service.limits_of(info.instance), &service.config().limits);
        Ok(LimitsInfo::new(now, held, function, of_host()))
    }

    /// Changes what one may use while it runs.
    ///
    /// # Errors
    /// It may not have so much, or has more than that; there is none.
    pub async fn set_limits(
        &self,
        name: &str,
        change: LimitsChange,
    ) -> Result<LimitsInfo, SandboxProblem> {
        let info = self.find(name)?;
        let service = self.service(&info);
        let service = service.ok_or_else(|| SandboxProblem::Unknown(name.to_owned()))?;
        service.change_limits(info.instance, change).await.map_err(SandboxProblem::Refused)?;
        self.limits(name).await
    }

    /// Where one may connect to, and what it has reached.
    ///
    /// # Errors
    /// There is none.
    pub fn egress(&self, name: &str) -> Result<EgressInfo, SandboxProblem> {
        let info = self.find(name)?;
        let egress = self.services.shared().egress().info(info.instance);
        egress.ok_or_else(|| {
            SandboxProblem::Refused(format!(
                "sandbox `{name}` connects as its function does: it was made by an older Thaw"
            ))
        })
    }

    /// Replaces the rules by which one connects; connections that it has stay.
    ///
    /// # Errors
    /// The rules make no sense, or there is none.
    pub async fn set_egress(
        &self,
        name: &str,
        egress: &SandboxEgress,
    ) -> Result<EgressInfo, SandboxProblem> {
        let rules = egress.rules().map_err(SandboxProblem::Wrong)?;
        let instance = self.find(name)?.instance;
        let changed = self.services.shared().egress().change(instance, rules).await;
        changed.map_err(SandboxProblem::Refused)?;
        self.egress(name)
    }

    /// The same for a client that may not have more than others allow.
    ///
    /// # Errors
    /// There is none.
    pub async fn set_client_egress(
        &self,
        name: &str,
        asked: ClientEgress,
    ) -> Result<(), SandboxProblem> {
        let info = self.find(name)?;
        let service = self.service(&info);
        let service = service.ok_or_else(|| SandboxProblem::Unknown(name.to_owned()))?;
        asked.headers.check_trust(service.config())?;
        let changed = self.services.shared().egress().change_within(info.instance, asked).await;
        changed.map_err(SandboxProblem::Refused)
    }

    /// Replaces the headers that the node adds to the requests of one, besides those of its
    /// function.
    ///
    /// # Errors
    /// They make no sense, its programs would not trust the node, or there is none.
    pub async fn set_inject(
        &self,
        name: &str,
        inject: SandboxInject,
    ) -> Result<EgressInfo, SandboxProblem> {
        let info = self.find(name)?;
        let service = self.service(&info);
        let service = service.ok_or_else(|| SandboxProblem::Unknown(name.to_owned()))?;
        let headers = OwnHeaders::of_secrets(inject.rules, service.config())?;
        let changed = self.services.shared().egress().change_headers(info.instance, headers).await;
        changed.map_err(SandboxProblem::Refused)?;
        self.egress(name)
    }
}
