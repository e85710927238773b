//! Work that the runtime must not wait for.

use tokio::runtime::{Handle, RuntimeFlavor};

/// Does work that may wait for a disk, wherever this is called. On one of the runtime's
/// threads, its other tasks go on elsewhere meanwhile.
pub fn waiting<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        // Nobody else is on this thread, or nobody can go on elsewhere.
        _ => work(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn other_tasks_go_on_while_one_waits() {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).build().unwrap();
        let (sender, receiver) = mpsc::channel();
        let waits = runtime.spawn(async move {
            // Runs on the same thread, the only one, as soon as that is free.
            tokio::spawn(async move { sender.send(()).unwrap() });
            waiting(|| receiver.recv_timeout(Duration::from_secs(20)))
        });
        runtime.block_on(waits).unwrap().expect("the other task has run");
    }

    #[test]
    fn work_is_done_without_a_runtime_and_with_one_thread() {
        assert_eq!(waiting(|| 1), 1);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        assert_eq!(runtime.block_on(async { waiting(|| 2) }), 2);
    }
}
