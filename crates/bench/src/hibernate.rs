//! `thaw bench hibernate`: requests to instances in every state, and the memory that they take
//! there (Hibernate Container, Figures 6 and 7).

use super::client::{PATIENCE, eventually, get};
use super::figure::{Bars, FigureError, Series};
use super::memory::{HostMemory, ProcessMemory};
use super::native::{NativeError, NativeProgram};
use super::rig::{Rig, RigOptions};
use super::without_image::memory_without_image;
use super::{BenchError, OnProgress, Percentiles};
use serde::Serialize;
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::num::NonZeroU32;
use std::time::Instant;
use thaw_daemon::daemon::ServeError;
use thaw_home::config::Isolation;
use thaw_home::home::Home;
use thaw_node::asleep::AsleepSpace;
use thaw_node::boots::BootKind;
use thaw_node::service::InstanceInfo;
use thaw_node::swap::SwapSpace;
use thaw_store::Store;

/// Requests that make an instance warm.
const WARMING: usize = 5;
/// Instances, one after the other, that are woken by page faults; each shows that once.
const FAULTING: usize = 20;
/// Native starts; each takes as long as the program does to start.
const COLD: usize = 5;
/// Copies of an instance that are made and put to sleep at a time.
const COPIES: usize = 8;
/// Requests of each instance before its memory is measured.
const REQUESTS: usize = 2;

/// What is measured.
#[derive(Clone, Debug)]
pub struct HibernateOptions {
    /// Requests in each state.
    pub count: usize,
    /// Instances whose memory is measured, at the same time.
    pub instances: usize,
    /// Instances that are asleep at the same time when their memory is measured.
    pub asleep: usize,
    /// Path of the requests.
    pub path: String,
}

/// What was measured. A state that this build does not have is `None`.
#[derive(Clone, Debug, Serialize)]
pub struct HibernateReport {
    /// The function.
    pub function: String,
    /// From connecting to the first byte of the response.
    pub first_byte_us: StateLatency,
    /// Memory of one instance: its own pages and page tables, and its share of what the host's
    /// kernel has for all of them.
    pub memory_kib: StateMemory,
    /// What of that the host's kernel has, of one instance: objects, stacks, counters.
    pub kernel_kib: f64,
    /// Instances whose memory was measured.
    pub instances: usize,
    /// Bytes of memory in a swap file.
    pub stored: u64,
    /// How long it took to write one, in milliseconds.
    pub write_ms: f64,
}

/// Latency by the state that an instance is in when the request comes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StateLatency {
    /// There is none: the program is started on the host, without a sandbox.
    pub cold: Option<Percentiles>,
    /// Thawed from its image, and has answered.
    pub warm: Percentiles,
    /// Hibernated for the first time: pages come back when they are touched.
    pub hibernated_faults: Percentiles,
    /// Hibernated again: recorded pages come back at once.
    pub hibernated_reap: Percentiles,
    /// Asleep.
    pub asleep: Option<Percentiles>,
    /// Has answered since it was hibernated.
    pub woken_up: Percentiles,
}

/// Memory of one instance by its state, in KiB.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StateMemory {
    /// Started in a sandbox without an image, and has answered: what the paper calls warm. `None`:
    /// its files are not this host's.
    pub without_image: Option<f64>,
    /// Thawed from its image, and has answered.
    pub warm: f64,
    /// Hibernated.
    pub hibernated: f64,
    /// Asleep.
    pub asleep: Option<f64>,
    /// Has answered since it was hibernated.
    pub woken_up: f64,
}

/// Measures a function's instances in every state.
///
/// # Errors
/// It cannot be served, or not be hibernated.
pub fn hibernate(
    home: &Home,
    name: &str,
    options: &HibernateOptions,
    progress: &mut OnProgress<'_>,
) -> Result<HibernateReport, BenchError> {
    thaw_daemon::daemon::raise_file_limit();
    let store = Store::open(&home.store())?;
    let function = super::http_server(&store, name)?;
    let request = get(name, &options.path);
    progress(&format!("{name}, cold"));
    let cold = cold(home, &function, &request);
    let asleep_in = home.work("bench-asleep").map_err(ServeError::from)?;
    let subject = |instances: usize| -> Result<Subject, BenchError> {
        let instances = u32::try_from(instances).unwrap_or(u32::MAX).max(1);
        let single = RigOptions::single(BootKind::Warm);
        let rig_options = RigOptions { isolation: Isolation::Instance, instances, ..single };
        let rig = Rig::start(home, &store, &function, rig_options)?;
        rig.services.shared().hibernate_in(SwapSpace::begin(home.swap()?)?);
        rig.services.shared().sleep_in(AsleepSpace::at(asleep_in.clone()));
        Ok(Subject { rig, request: request.clone() })
    };
    let (first_byte_us, stored, write_ms) = latency(&subject(1)?, options, cold, name, progress)?;
    let instances = options.instances;
    progress(&format!("{name}, memory without an image"));
    let without_image = match memory_without_image(&function, &request, WARMING) {
        Err(NativeError::OwnRootfs(_)) => None,
        measured => Some(measured?),
    };
    let (mut memory_kib, kernel_kib) = memory(&subject(instances)?, instances, name, progress)?;
    memory_kib.without_image = without_image.map(|own| own as f64 + kernel_kib);
    progress(&format!("{name}, memory of {} that are asleep", options.asleep));
    let subject = subject(options.asleep + COPIES + WARMING)?;
    memory_kib.asleep = Some(memory_asleep(&subject, options.asleep, name, progress)?);
    let function = name.to_owned();
    Ok(HibernateReport {
        function,
        first_byte_us,
        memory_kib,
        kernel_kib,
        instances,
        stored,
        write_ms,
    })
}

impl HibernateReport {
    /// States, with latency and memory.
    pub fn rows(&self) -> [(&'static str, Option<Percentiles>, Option<f64>); 7] {
        let (latency, memory) = (&self.first_byte_us, &self.memory_kib);
        let hibernated = Some(memory.hibernated);
        [
            ("cold", latency.cold, None),
            ("without an image", None, memory.without_image),
            ("warm", Some(latency.warm), Some(memory.warm)),
            ("hibernated, by page faults", Some(latency.hibernated_faults), hibernated),
            ("hibernated, by batch", Some(latency.hibernated_reap), hibernated),
            ("asleep", latency.asleep, memory.asleep),
            ("woken up", Some(latency.woken_up), Some(memory.woken_up)),
        ]
    }

    /// A figure of the medians.
    ///
    /// # Errors
    /// It cannot be drawn.
    pub fn svg(&self) -> Result<String, FigureError> {
        let measured = self.rows().into_iter().filter_map(|(state, latency, _)| {
            latency.map(|latency| (state.to_owned(), Some(latency.p50)))
        });
        let (categories, values) = measured.unzip();
        let name = "from connecting to the first byte".to_owned();
        let title = format!("{}, median latency by state", self.function);
        let bars = Bars {
            title: &title,
            axis: "µs",
            categories,
            series: vec![Series { name, values, marks: Vec::new() }],
            logarithmic: true,
        };
        bars.svg()
    }
}

/// Native starts, where the program's files are those of this host.
fn cold(
    home: &Home,
    function: &thaw_home::function::BuiltFunction,
    request: &[u8],
) -> Option<Percentiles> {
    let mut program = NativeProgram::prepare(home, function, request).ok()?;
    let samples: Result<Vec<u64>, _> = (0..COLD).map(|_| program.sample()).collect();
    Some(Percentiles::of_ns(&mut samples.ok()?))
}

/// A function that is served, and what it is asked.
struct Subject {
    rig: Rig,
    request: Vec<u8>,
}

impl Subject {
    /// One request; nanoseconds until the first byte of the response.
    fn ask(&self) -> Result<u64, BenchError> {
        first_byte(self.rig.address, &self.request)
    }

    fn instances(&self) -> Vec<InstanceInfo> {
        self.rig.service.instances()
    }

    /// The only instance, once it is idle.
    fn idle(&self) -> Result<InstanceInfo, BenchError> {
        let idle = || {
            let [only] = <[InstanceInfo; 1]>::try_from(self.instances()).ok()?;
            only.state.may_hibernate().then_some(only)
        };
        eventually(idle).ok_or(BenchError::NoPhase("that it is idle"))
    }

    /// The only instance besides those that are held, once it is idle.
    fn idle_besides(&self, held: &BTreeSet<u64>) -> Result<u64, BenchError> {
        let idle = || {
            let mut all = self.instances().into_iter();
            all.find(|it| !held.contains(&it.id) && it.state.may_hibernate()).map(|it| it.id)
        };
        eventually(idle).ok_or(BenchError::NoPhase("that it is idle"))
    }

    /// Has an instance give up its memory; bytes written, and milliseconds that took.
    fn hibernate(&self, id: u64) -> Result<(u64, f64), BenchError> {
        let done = self.rig.block_on(self.rig.service.hibernate(Some(id)));
        let (_, done) = done.map_err(|why| BenchError::NotHibernated { why })?;
        Ok((done.stored, done.write_ms))
    }

    /// Puts an instance to sleep.
    fn put_to_sleep(&self, id: u64) -> Result<(), BenchError> {
        let done = self.rig.block_on(self.rig.service.put_to_sleep(Some(id)));
        done.map(drop).map_err(|why| BenchError::NotHibernated { why })
    }

    /// A new instance, warm; its number.
    fn begin(&self) -> Result<u64, BenchError> {
        self.rig.service.end_all_asleep();
        self.rig.service.kill_all();
        self.rig.wait_empty()?;
        for _ in 0..WARMING {
            self.ask()?;
            // Another one would be booted beside one that is still busy.
            self.idle()?;
        }
        Ok(self.idle()?.id)
    }
}

fn latency(
    subject: &Subject,
    options: &HibernateOptions,
    cold: Option<Percentiles>,
    name: &str,
    progress: &mut OnProgress<'_>,
) -> Result<(StateLatency, u64, f64), BenchError> {
    let (mut warm, mut faults, mut reap, mut woken) = (vec![], vec![], vec![], vec![]);
    let (mut stored, mut write_ms) = (0, 0.0);
    for number in 0..FAULTING.min(options.count) {
        progress(&format!("{name}, woken by page faults: {number} of {FAULTING}"));
        let id = subject.begin()?;
        warm.push(subject.ask()?);
        subject.idle()?;
        (stored, write_ms) = subject.hibernate(id)?;
        faults.push(subject.ask()?);
    }
    for number in 0..options.count {
        progress(&format!("{name}, woken by batch: {number} of {}", options.count));
        let id = subject.idle()?.id;
        subject.hibernate(id)?;
        reap.push(subject.ask()?);
        subject.idle()?;
        woken.push(subject.ask()?);
        subject.idle()?;
    }
    let mut asleep = vec![];
    for number in 0..options.count {
        progress(&format!("{name}, woken from sleep: {number} of {}", options.count));
        let id = subject.idle()?.id;
        subject.put_to_sleep(id)?;
        asleep.push(subject.ask()?);
    }
    subject.begin()?;
    for _ in warm.len()..options.count {
        warm.push(subject.ask()?);
        subject.idle()?;
    }
    let latency = StateLatency {
        cold,
        warm: Percentiles::of_ns(&mut warm),
        hibernated_faults: Percentiles::of_ns(&mut faults),
        hibernated_reap: Percentiles::of_ns(&mut reap),
        asleep: Some(Percentiles::of_ns(&mut asleep)),
        woken_up: Percentiles::of_ns(&mut woken),
    };
    Ok((latency, stored, write_ms))
}

/// Memory of so many instances that are all in the same state.
fn memory(
    subject: &Subject,
    wanted: usize,
    name: &str,
    progress: &mut OnProgress<'_>,
) -> Result<(StateMemory, f64), BenchError> {
    let service = &subject.rig.service;
    // The first request makes what the others use again.
    subject.begin()?;
    service.kill_all();
    subject.rig.wait_empty()?;
    let before = HostMemory::now()?;
    let mut held = BTreeSet::new();
    for number in 0..wanted {
        progress(&format!("{name}, warm: {number} of {wanted}"));
        for _ in 0..REQUESTS {
            subject.ask()?;
            subject.idle_besides(&held)?;
        }
        let id = subject.idle_besides(&held)?;
        // The next request boots another one.
        service.hold(id);
        held.insert(id);
    }
    let host = HostMemory::now()?.since(before);
    let of_kernel = host.slab_kib + host.kernel_stacks_kib + host.per_cpu_kib;
    let kernel_kib = (of_kernel as f64 / wanted.max(1) as f64).max(0.0).round();
    let warm = own_memory(&subject.instances())? + kernel_kib;
    for (number, id) in held.iter().enumerate() {
        progress(&format!("{name}, hibernated: {number} of {wanted}"));
        subject.hibernate(*id)?;
    }
    let hibernated = own_memory(&subject.instances())? + kernel_kib;
    for (number, id) in held.clone().into_iter().enumerate() {
        progress(&format!("{name}, woken up: {number} of {wanted}"));
        service.release(id);
        held.remove(&id);
        subject.ask()?;
        if subject.idle_besides(&held)? != id {
            return Err(BenchError::NoPhase("the instance that was to wake"));
        }
        service.hold(id);
        held.insert(id);
    }
    let woken_up = own_memory(&subject.instances())? + kernel_kib;
    let (asleep, without_image) = (None, None);
    Ok((StateMemory { without_image, warm, hibernated, asleep, woken_up }, kernel_kib))
}

/// What one of so many instances that are asleep takes, in KiB: of this process, which stands for
/// the daemon, and of the host's kernel. Pages of its file in the page cache do not count: they are
/// clean, and the host takes them when it wants them.
fn memory_asleep(
    subject: &Subject,
    wanted: usize,
    name: &str,
    progress: &mut OnProgress<'_>,
) -> Result<f64, BenchError> {
    let original = subject.begin()?;
    let service = &subject.rig.service;
    let awake = service.instance_count();
    let mut before = None;
    let mut asleep = 0;
    while asleep < wanted {
        progress(&format!("{name}, asleep: {asleep} of {wanted}"));
        let copies = NonZeroU32::MIN.saturating_add(COPIES as u32 - 1);
        let forked = subject.rig.block_on(service.fork(original, copies));
        let forked = forked.map_err(|why| BenchError::NotHibernated { why })?;
        for id in forked.ids {
            subject.put_to_sleep(id)?;
        }
        // The first round makes what the others use again.
        match before {
            None => {
                service.end_all_asleep();
                eventually(|| (service.instance_count() == awake).then_some(()))
                    .ok_or(BenchError::NoPhase("their end"))?;
                before = Some((HostMemory::now()?, ProcessMemory::of(std::process::id())?));
            }
            Some(_) => asleep += COPIES,
        }
    }
    let Some((host, own)) = before else { return Ok(0.0) };
    eventually(|| (service.instance_count() == awake).then_some(()))
        .ok_or(BenchError::NoPhase("that they are asleep"))?;
    let host = HostMemory::now()?.since(host);
    let own_kib = ProcessMemory::of(std::process::id())?.pss_kib as f64 - own.pss_kib as f64;
    let of_kernel = host.slab_kib + host.kernel_stacks_kib + host.per_cpu_kib;
    Ok(((own_kib + of_kernel as f64) / asleep as f64 * 10.0).round() / 10.0)
}

/// Own pages and page tables of the mean instance, in KiB.
fn own_memory(instances: &[InstanceInfo]) -> Result<f64, BenchError> {
    let mut sum = 0;
    for instance in instances {
        let own = ProcessMemory::of(instance.pid)?;
        sum += own.pss_kib + own.page_tables_kib;
    }
    Ok((sum as f64 / instances.len().max(1) as f64).round())
}

/// One request over a new connection; nanoseconds until the first byte of the response.
fn first_byte(address: SocketAddr, request: &[u8]) -> Result<u64, BenchError> {
    let begun = Instant::now();
    let mut client = TcpStream::connect(address)?;
    client.set_nodelay(true)?;
    client.set_read_timeout(Some(PATIENCE))?;
    client.write_all(request)?;
    let mut response = vec![0; 4096];
    let len = client.read(&mut response)?;
    let passed = begun.elapsed();
    let head = String::from_utf8_lossy(&response[..len.min(200)]).into_owned();
    client.read_to_end(&mut response)?;
    let status = head.split(' ').nth(1).and_then(|code| code.parse::<u16>().ok());
    match status {
        Some(200..=399) => Ok(passed.as_nanos() as u64),
        _ => Err(BenchError::Response(head)),
    }
}
