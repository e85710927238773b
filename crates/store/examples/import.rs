//! Imports a directory into a store twice and says how long each step took:
//! `cargo run --release -p thaw-store --example import -- STORE DIRECTORY`.

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use thaw_store::{Store, Tree};

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [home, directory] = &arguments[..] else {
        eprintln!("usage: import STORE DIRECTORY");
        return ExitCode::from(2);
    };
    match import_twice(Path::new(home), Path::new(directory)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn import_twice(home: &Path, directory: &Path) -> thaw_store::Result<()> {
    let store = Store::open(home)?;
    for round in ["first", "again"] {
        let mut session = store.session()?;
        let mut tree = Tree::new();
        let options = Default::default();
        let start = Instant::now();
        let report = session.import_directory(
            &mut tree,
            directory,
            Path::new("/"),
            &options,
            &mut |_| {},
        )?;
        let read = start.elapsed();
        let index = session.put_index(&tree)?;
        let published = start.elapsed() - read;
        let start = Instant::now();
        let open = store.open_index(index)?;
        println!(
            "{round}: {} files, {} MiB: read and stored in {read:.2?}, made durable and indexed \
             in {published:.2?}, index of {} KiB opened in {:.2?}",
            report.files,
            report.bytes >> 20,
            open.file_len() >> 10,
            start.elapsed(),
        );
    }
    Ok(())
}
