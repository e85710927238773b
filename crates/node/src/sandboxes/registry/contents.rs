//! Programs and files in sandboxes.

use super::{SandboxProblem, Sandboxes};
use crate::remote::exec::{Attached, Exec};
use crate::remote::files::{FileProblem, FileSession};
use crate::remote::{ExecRequest, ExecState, Next, Reader};
use std::sync::Arc;

/// A program in a sandbox that goes on when this is dropped.
pub struct Started(Arc<Exec>);

impl Started {
    /// What has become of it.
    pub fn state(&self) -> ExecState {
        self.0.state()
    }
}

impl Sandboxes {
    /// Runs a program in one to its end, and drops what it prints; how it has ended.
    ///
    /// # Errors
    /// There is no such sandbox, or the program is not started.
    pub async fn run(
        &self,
        name: &str,
        request: &ExecRequest,
    ) -> Result<ExecState, SandboxProblem> {
        let (exec, mut output) = self.exec(name, request).await?;
        while output.next().await != Next::End {}
        Ok(exec.ended().await)
    }

    /// Starts a program in one that goes on, and waits until it has printed something; what.
    ///
    /// # Errors
    /// There is no such sandbox, or the program is not started, or ends before that.
    pub async fn start(
        &self,
        name: &str,
        request: &ExecRequest,
    ) -> Result<(Started, Vec<u8>), SandboxProblem> {
        let (exec, mut output) = self.exec(name, request).await?;
        loop {
            match output.next().await {
                Next::Bytes(_, printed) => return Ok((Started(Arc::clone(&exec)), printed)),
                Next::Lost(_) => {}
                Next::End => {
                    let why = format!("`{}` ended without a word", request.argv.join(" "));
                    return Err(SandboxProblem::Refused(why));
                }
            }
        }
    }

    async fn exec(
        &self,
        name: &str,
        request: &ExecRequest,
    ) -> Result<(Attached, Reader), SandboxProblem> {
        let info = self.find(name)?;
        let service = self.service(&info);
        let service = service.ok_or_else(|| SandboxProblem::Unknown(name.to_owned()))?;
        let started = service.exec(info.instance, request).await;
        started.map_err(|error| SandboxProblem::Refused(error.to_string()))
    }

    /// Writes a file in one, with the rights of its first process.
    ///
    /// # Errors
    /// There is no such sandbox, or its kernel refuses.
    pub async fn write_file(
        &self,
        name: &str,
        path: &str,
        bytes: &[u8],
    ) -> Result<(), SandboxProblem> {
        let mut session = self.files(name).await?;
        session.write(path, None, None).await.map_err(refused)?;
        session.put(bytes).await.map_err(refused)?;
        session.finish(path).await.map(drop).map_err(refused)
    }

    /// The first `most` bytes of a file in one, with the rights of its first process.
    ///
    /// # Errors
    /// There is no such sandbox, or its kernel refuses.
    pub async fn read_file(
        &self,
        name: &str,
        path: &str,
        most: u32,
    ) -> Result<Vec<u8>, SandboxProblem> {
        let mut session = self.files(name).await?;
        session.read_up_to(path, most.into()).await.map_err(refused)?;
        let mut contents = Vec::new();
        while let Some(piece) = session.next_piece(path).await.map_err(refused)? {
            if contents.len() + piece.len() > most as usize {
                return Err(SandboxProblem::Refused(format!("more came than {most} bytes")));
            }
            contents.extend(piece);
        }
        Ok(contents)
    }

    /// Opens a session over the files of one, with the rights of its first process.
    ///
    /// # Errors
    /// There is no such sandbox, or too many have a session.
    pub async fn files(&self, name: &str) -> Result<FileSession, SandboxProblem> {
        let info = self.find(name)?;
        let service = self.service(&info);
        let service = service.ok_or_else(|| SandboxProblem::Unknown(name.to_owned()))?;
        service.files(info.instance, "").await.map_err(SandboxProblem::Refused)
    }
}

fn refused(error: FileProblem) -> SandboxProblem {
    SandboxProblem::Refused(error.to_string())
}
