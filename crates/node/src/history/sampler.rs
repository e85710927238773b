//! Takes the samples.

use super::series::{COLUMNS, Column, Sample, Series, SeriesView};
use super::stats::{FunctionStats, NodeStats, Stats};
use crate::boots::BootKind;
use crate::instance::InstanceState;
use crate::metrics::{FUNCTIONS_MAX, OTHERS, Reading, TimesReading, now_ms};
use crate::service::Services;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use thaw_sandbox::{EgressBytes, ZygotePool};
use tokio::time::{MissedTickBehavior, interval};

/// How often a sample is taken.
pub const INTERVAL: Duration = Duration::from_secs(5);

/// The last hour of a node.
pub struct History {
    services: Arc<Services>,
    pool: Arc<ZygotePool>,
    began: Instant,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    before: HashMap<String, Reading>,
    before_cpu: Option<(Instant, Duration)>,
    before_bytes: Option<EgressBytes>,
    node: Series,
    functions: HashMap<String, Series>,
    stats: Stats,
}

/// What is there at one moment.
#[derive(Default)]
struct Present {
    instances: BTreeMap<String, BTreeMap<String, usize>>,
    memory: u64,
    cpu: Duration,
    egress: usize,
    /// What all outgoing connections have carried; none if nobody counts that.
    bytes: Option<EgressBytes>,
    zygotes: usize,
    zygotes_target: usize,
}

impl History {
    /// One without a past.
    pub fn new(services: Arc<Services>, pool: Arc<ZygotePool>) -> Arc<Self> {
        let history = Self { services, pool, began: Instant::now(), kept: Mutex::default() };
        history.sample(INTERVAL);
        Arc::new(history)
    }

    /// Takes samples for as long as the node lives.
    pub async fn watch(self: Arc<Self>) {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        let mut last = Instant::now();
        loop {
            ticks.tick().await;
            let elapsed = last.elapsed();
            last = Instant::now();
            let history = self.clone();
            // Memory is in a file for each instance.
            if tokio::task::spawn_blocking(move || history.sample(elapsed)).await.is_err() {
                return;
            }
        }
    }

    /// What happened in the last interval.
    pub fn stats(&self) -> Stats {
        let mut stats = self.kept().stats.clone();
        stats.uptime_s = self.began.elapsed().as_secs();
        stats
    }

    /// The last hour of the node.
    pub fn node(&self) -> SeriesView {
        let kept = self.kept();
        kept.node.view(kept.stats.time_ms, INTERVAL.as_millis() as u64)
    }

    /// The last hour of a function; `None`: nothing happened.
    pub fn function(&self, name: &str) -> Option<SeriesView> {
        let kept = self.kept();
        let series = kept.functions.get(name)?;
        Some(series.view(kept.stats.time_ms, INTERVAL.as_millis() as u64))
    }

    /// Requests per second of a function over the last samples, the oldest first.
    pub fn requests_of(&self, name: &str, samples: usize) -> Vec<f32> {
        let kept = self.kept();
        let Some(series) = kept.functions.get(name) else { return Vec::new() };
        let mut values: Vec<_> =
            series.column(Column::Requests).rev().take(samples).map(|v| v.max(0.0)).collect();
        values.reverse();
        values
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().expect("no holder panics")
    }

    fn present(&self) -> Present {
        let mut present = Present::default();
        for service in self.services.everything() {
            let of = present.instances.entry(service.name().to_string()).or_default();
            for instance in service.instances() {
                *of.entry(instance.state.name().to_owned()).or_default() += 1;
            }
            *of.entry("ready".to_owned()).or_default() += service.launcher().standby().ready.len();
        }
        for tenant in self.services.shared().tenants().all() {
            let meter = tenant.cpu().meter();
            present.memory += meter.memory();
            present.cpu += meter.cpu_time();
            present.egress += tenant.egress().connections();
        }
        present.bytes = thaw_sandbox::egress_bytes_of_functions()
            .map(|all| all.iter().fold(EgressBytes::default(), |sum, one| sum + one.bytes));
        let pool = self.pool.stats();
        (present.zygotes, present.zygotes_target) = (pool.ready, pool.target);
        present
    }

    fn sample(&self, elapsed: Duration) {
        let present = self.present();
        let tallies = self.services.shared().metrics().tallies();
        tallies.keep_only(|name| present.instances.contains_key(name));
        let now = tallies.read();
        let free = self.services.shared().capacity().available_permits();
        self.kept().take(&present, now, elapsed, free);
    }
}

impl Kept {
    fn take(
        &mut self,
        present: &Present,
        now: HashMap<String, Reading>,
        elapsed: Duration,
        free: usize,
    ) {
        let seconds = elapsed.as_secs_f64().max(0.001);
        let mut total = Reading::default();
        let (mut all, mut functions) = (BTreeMap::new(), BTreeMap::new());
        for (name, reading) in &now {
            let window = self.before.get(name).map_or(reading.clone(), |old| reading.since(old));
            total.add(&window);
            functions.insert(name.clone(), window);
        }
        for (name, states) in &present.instances {
            functions.entry(name.clone()).or_default();
            for (state, count) in states {
                *all.entry(state.clone()).or_default() += count;
            }
        }
        let none = BTreeMap::new();
        let mut stats = Vec::new();
        for (name, window) in functions.iter().filter(|(name, _)| !name.is_empty()) {
            let states = present.instances.get(name).unwrap_or(&none);
            self.push(name, sample_of(window, states, seconds));
            stats.push(stats_of(name, window, states, seconds));
        }
        let is_there = |name: &str| name == OTHERS || present.instances.contains_key(name);
        self.functions.retain(|name, series| is_there(name) && !series.is_silent());
        let cpus = self.cpus(present.cpu);
        let before = std::mem::replace(&mut self.before_bytes, present.bytes);
        let bytes = present.bytes.zip(before).map(|(now, before)| now - before);
        let mut sample = sample_of(&total, &all, seconds);
        sample[Column::Memory as usize] = present.memory as f32;
        sample[Column::Cpu as usize] = cpus as f32;
        sample[Column::Zygotes as usize] = present.zygotes as f32;
        self.node.push(sample);
        self.stats = Stats {
            time_ms: now_ms(),
            interval_ms: elapsed.as_millis() as u64,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_s: 0,
            node: NodeStats {
                all: stats_of("", &total, &all, seconds),
                instances_free: free,
                zygotes: present.zygotes,
                zygotes_target: present.zygotes_target,
                memory_bytes: present.memory,
                cpus,
                egress_connections: present.egress,
                egress_sent: bytes.map(|bytes| bytes.sent as f64 / seconds),
                egress_received: bytes.map(|bytes| bytes.received as f64 / seconds),
            },
            functions: stats,
        };
        self.before = now;
    }

    fn push(&mut self, name: &str, sample: Sample) {
        // Functions that have done nothing have no history, so that a thousand cost nothing.
        let is_silent = sample.iter().all(|value| value.is_nan() || *value == 0.0);
        let has_room = self.functions.len() <= FUNCTIONS_MAX;
        match self.functions.get_mut(name) {
            Some(series) => series.push(sample),
            None if is_silent || !has_room => {}
            None => self.functions.entry(name.to_owned()).or_default().push(sample),
        }
    }

    /// Processors' worth of CPU time since the last sample.
    fn cpus(&mut self, total: Duration) -> f64 {
        let now = Instant::now();
        let before = self.before_cpu.replace((now, total));
        before.map_or(0.0, |(at, before)| {
            let passed = now.duration_since(at).as_secs_f64().max(0.001);
            total.saturating_sub(before).as_secs_f64() / passed
        })
    }
}

fn sum_of(states: &BTreeMap<String, usize>, wanted: &[InstanceState]) -> f32 {
    wanted.iter().map(|state| states.get(state.name()).copied().unwrap_or(0) as f32).sum()
}

fn sample_of(window: &Reading, states: &BTreeMap<String, usize>, seconds: f64) -> Sample {
    use InstanceState::{
        Asleep, Booting, Busy, HibernateRunning, Hibernated, Idle, Paused, WokenUp,
    };
    let mut sample = [f32::NAN; COLUMNS.len()];
    let mut set = |column: Column, value: f32| sample[column as usize] = value;
    let rate = |count: u64| (count as f64 / seconds) as f32;
    set(Column::Requests, rate(window.queue.count()));
    set(Column::Ok, rate(window.responses[2] + window.responses[3]));
    set(Column::ClientErrors, rate(window.responses[4]));
    set(Column::ServerErrors, rate(window.responses[5]));
    set(Column::Refusals, rate(window.refusals));
    let quantile =
        |times: &TimesReading, share| times.quantile_ms(share).map_or(f32::NAN, |v| v as f32);
    let mean = |times: &TimesReading| times.mean_ms().map_or(f32::NAN, |v| v as f32);
    set(Column::RequestP50, quantile(&window.request, 0.5));
    set(Column::RequestP95, quantile(&window.request, 0.95));
    set(Column::Queue, mean(&window.queue));
    set(Column::QueueP95, quantile(&window.queue, 0.95));
    set(Column::Boot, mean(&window.boot));
    set(Column::BootP95, quantile(&window.boot, 0.95));
    set(Column::Run, mean(&window.run));
    let kinds = [Column::Cold, Column::Warm, Column::Fork, Column::Ready, Column::Woken];
    for (column, count) in kinds.into_iter().zip(window.boots) {
        set(column, rate(count));
    }
    set(Column::Busy, sum_of(states, &[Booting, Busy, HibernateRunning]));
    set(Column::Idle, sum_of(states, &[Idle, Paused, WokenUp]));
    set(Column::Hibernated, sum_of(states, &[Hibernated]));
    set(Column::Asleep, sum_of(states, &[Asleep]));
    set(Column::Ahead, states.get("ready").copied().unwrap_or(0) as f32);
    sample
}

fn stats_of(
    name: &str,
    window: &Reading,
    states: &BTreeMap<String, usize>,
    seconds: f64,
) -> FunctionStats {
    let rate = |count: u64| count as f64 / seconds;
    let boots = BootKind::ALL.iter().zip(window.boots);
    FunctionStats {
        name: name.to_owned(),
        requests: rate(window.queue.count()),
        server_errors: rate(window.responses[5]),
        refusals: rate(window.refusals),
        request_p50_ms: window.request.quantile_ms(0.5),
        request_p95_ms: window.request.quantile_ms(0.95),
        queue_p95_ms: window.queue.quantile_ms(0.95),
        boot_ms: window.boot.mean_ms(),
        boots: boots.map(|(kind, count)| (kind.name().to_owned(), rate(count))).collect(),
        instances: states.iter().filter(|(_, n)| **n > 0).map(|(s, n)| (s.clone(), *n)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(requests: u32) -> HashMap<String, Reading> {
        let tallies = crate::metrics::Tallies::default();
        for _ in 0..requests {
            tallies.placed("f", Duration::from_millis(2));
            tallies.responded(Some("f"), 200, Duration::from_millis(8));
        }
        tallies.read()
    }

    #[test]
    fn rates_are_of_the_last_interval() {
        let mut kept = Kept::default();
        let states = BTreeMap::from([("idle".to_owned(), 3), ("busy".to_owned(), 1)]);
        let instances =
            BTreeMap::from([("f".to_owned(), states), ("g".to_owned(), BTreeMap::new())]);
        let present = Present { instances, memory: 7, ..Present::default() };
        kept.take(&present, reading(10), Duration::from_secs(5), 1);
        kept.take(&present, reading(30), Duration::from_secs(10), 1);
        let stats = &kept.stats;
        assert_eq!(stats.node.all.requests, 2.0);
        assert_eq!(stats.node.memory_bytes, 7);
        assert_eq!(stats.node.egress_sent, None);
        let [f, g] = &stats.functions[..] else { panic!("{stats:?}") };
        assert_eq!((f.requests, f.instances["idle"]), (2.0, 3));
        assert_eq!((g.requests, g.request_p50_ms), (0.0, None));
        assert!(f.request_p50_ms.is_some_and(|ms| (6.0..10.0).contains(&ms)), "{f:?}");
        let bytes = |sent, received| Present {
            instances: present.instances.clone(),
            bytes: Some(EgressBytes { sent, received }),
            ..Present::default()
        };
        kept.take(&bytes(100, 5), reading(30), Duration::from_secs(5), 1);
        assert_eq!(kept.stats.node.egress_sent, None, "there was nothing before");
        kept.take(&bytes(1100, 5), reading(30), Duration::from_secs(10), 1);
        let node = &kept.stats.node;
        assert_eq!((node.egress_sent, node.egress_received), (Some(100.0), Some(0.0)));
        // A function that has done nothing has no history.
        assert_eq!(kept.functions.keys().collect::<Vec<_>>(), ["f"]);
        // One that is removed has none any more.
        kept.take(&Present::default(), reading(30), Duration::from_secs(5), 1);
        assert!(kept.functions.is_empty());
    }
}
