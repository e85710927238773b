#![doc = include_str!("../README.md")]

mod ablation;
mod afar;
mod boot;
pub mod bounds;
mod client;
mod cold;
mod density;
mod figure;
mod handoff;
mod hibernate;
mod isolate;
mod link;
mod memory;
mod mix;
mod native;
mod paging;
mod rig;
mod sandbox;
mod scale;
mod stats;
pub mod syscalls;
mod throughput;
mod volume;
mod without_image;
pub mod worker;

pub use ablation::{AblationOptions, AblationReport, Technique, Variant, ablation};
pub use afar::{AfarOptions, AfarReport, afar};
pub use boot::{
    BenchOptions, BenchReport, BootsFailure, BootsReport, NativePercentiles, PhasePercentiles,
    boot, boots,
};
pub use density::{DensityReport, DensityStep, density};
pub use figure::FigureError;
pub use handoff::{Comparison, HandoffOptions, HandoffReport, Way, handoff};
pub use hibernate::{HibernateOptions, HibernateReport, StateLatency, StateMemory, hibernate};
pub use memory::{HostMemory, ProcessMemory, TreeMemory};
pub use mix::{MixOptions, MixReport, Mixed, Side, mix};
pub use native::NativeError;
pub use paging::{Paged, PagedFunction, PagingOptions, PagingReport, Strategy, paging};
pub use sandbox::{
    ContainerReport, LargeFileReport, PausedWith, PopulationMemory, PopulationOptions,
    PopulationReport, SandboxOptions, SandboxReport, population, sandbox,
};
pub use scale::{Group, Growth, ScaleMemory, ScaleOptions, ScaleReport, scale};
pub use stats::Percentiles;
pub use throughput::{BootCounts, Rate, Served, ThroughputOptions, ThroughputReport, throughput};
pub use volume::{UseResult, VolumeOptions, VolumeReport, volume};

use std::io;
use thaw_daemon::daemon::ServeError;
use thaw_home::config::EntryKind;
use thaw_home::function::{BuiltFunction, FunctionError};
use thaw_node::boots::BootKind;
use thaw_node::instance::LaunchError;
use thaw_store::{Store, StoreError};

/// Receives what is being measured, for people who wait.
pub type OnProgress<'a> = dyn FnMut(&str) + 'a;

/// A stored function that can be measured: an HTTP server.
fn http_server(store: &Store, name: &str) -> Result<BuiltFunction, BenchError> {
    let function = BuiltFunction::read(store, name)?;
    match function.function.config.entry.kind {
        EntryKind::Http => Ok(function),
        kind => Err(BenchError::Kind { function: name.to_owned(), kind: kind.name() }),
    }
}

/// The stored functions with these names, or all, that can be measured, and those that cannot.
fn http_servers(
    store: &Store,
    names: &[String],
) -> Result<(Vec<BuiltFunction>, Vec<BootsFailure>), BenchError> {
    let list = store.list_functions()?;
    let mut failures = Vec::new();
    let mut fail = |function: String, reason: String| {
        failures.push(BootsFailure { function, boot: None, reason });
    };
    let names = match names {
        [] => {
            list.damaged.iter().for_each(|(name, error)| fail(name.to_string(), error.to_string()));
            list.records.iter().map(|record| record.name.to_string()).collect()
        }
        names => names.to_vec(),
    };
    let mut functions = Vec::new();
    for name in names {
        match http_server(store, &name) {
            Ok(function) => functions.push(function),
            Err(error) => fail(name, error.to_string()),
        }
    }
    match functions.is_empty() && failures.is_empty() {
        true => Err(BenchError::NoFunctions),
        false => Ok((functions, failures)),
    }
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The function is not usable.
    #[error(transparent)]
    Function(#[from] FunctionError),
    /// The function's files are not usable.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The function cannot be served.
    #[error(transparent)]
    Load(#[from] thaw_node::catalog::LoadError),
    /// This host cannot run sandboxes.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The program cannot be started natively.
    #[error(transparent)]
    Native(#[from] NativeError),
    /// The state directory is not usable.
    #[error(transparent)]
    Home(#[from] thaw_home::home::HomeError),
    /// The function could not be frozen another way.
    #[error(transparent)]
    Build(#[from] thaw_build::build::BuildError),
    /// A side of a comparison does not run.
    #[error(transparent)]
    Side(#[from] syscalls::SideError),
    /// The function has clients of another kind.
    #[error("`{function}` has kind = \"{kind}\"; only HTTP servers can be measured")]
    Kind {
        /// The function.
        function: String,
        /// Its kind.
        kind: &'static str,
    },
    /// The volume could not be made.
    #[error(transparent)]
    Volume(#[from] thaw_home::volumes::VolumeError),
    /// A sandbox could not be made, or something not be done with it.
    #[error(transparent)]
    Sandbox(#[from] thaw_node::sandboxes::registry::SandboxProblem),
    /// A command in a sandbox has not ended as it should.
    #[error("`{command}` has not ended well in the sandbox; does the function have the program?")]
    Command {
        /// The command.
        command: String,
    },
    /// A response was not as it should be.
    #[error(
        "the function answered {0:?}; `--path` asks for another path, and `thaw invoke` shows the answer"
    )]
    Response(String),
    /// What a boot is to begin from could not be made.
    #[error(transparent)]
    Launch(LaunchError),
    /// A boot was not of the kind that is measured.
    #[error("a boot was {} where {} was asked for; `thaw -v bench boot` shows why", .found.name(), .asked.name())]
    OtherBoot {
        /// What was to be measured.
        asked: BootKind,
        /// What happened.
        found: BootKind,
    },
    /// An instance keeps its memory.
    #[error("an instance could not be hibernated: {why}")]
    NotHibernated {
        /// One sentence of the node's.
        why: String,
    },
    /// A sandbox did not report its phases.
    #[error("an instance did not report {0}; `thaw invoke --timings` shows more")]
    NoPhase(&'static str),
    /// There is nothing to measure.
    #[error("the store has no function; `thaw build` makes one")]
    NoFunctions,
    /// A verb of this program, or another program, failed.
    #[error("cannot measure: {0}")]
    Verb(String),
    /// The host refused something.
    #[error("cannot measure ({0})")]
    Io(#[from] io::Error),
}
