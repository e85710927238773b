//! What sandboxes have used lately: a sample of each that is awake every few seconds, in memory.
//!
//! Nothing is woken for a sample, and one that is paused, hibernated or asleep has none. The next
//! daemon begins without a past.

use super::E2b;
use super::backend::{Count, Sandbox};
use super::control::now_ms;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};
use tokio::time::{MissedTickBehavior, interval};

/// How often a sample is taken, as in E2B's cloud.
pub const INTERVAL: Duration = Duration::from_secs(5);
/// Most samples that are kept of one sandbox: those of an hour.
const EACH_MAX: usize = 720;
/// Most samples that are kept of all sandboxes; each has some 40 bytes.
const ALL_MAX: usize = 1 << 18;
/// Most sandboxes that are looked at at a time. Where there are more, the others are next.
const AT_A_TIME: usize = 1024;

/// What a sandbox has used at a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// When, in milliseconds since 1970.
    pub time_ms: u64,
    /// CPU time since the sample before, in percent of one processor.
    pub cpu_percent: f32,
    /// Bytes of memory that it had.
    pub memory_bytes: u64,
    /// Processors that it might use.
    pub cpus: u32,
    /// Bytes of memory that it might have.
    pub memory_max_bytes: u64,
}

/// The past of one sandbox, and what it had used when it was last looked at.
#[derive(Default)]
struct Past {
    before: Option<(Instant, Count)>,
    samples: VecDeque<Sample>,
}

impl Past {
    fn take(&mut self, at: Instant, count: Count, sandbox: &Sandbox) {
        let before = self.before.replace((at, count));
        let Some((was, before)) = before else { return };
        // CPU time begins anew when a sandbox has another host process.
        let used = count.cpu_time.zip(before.cpu_time);
        let Some(used) = used.and_then(|(now, before)| now.checked_sub(before)) else { return };
        let passed = at.duration_since(was).as_secs_f64().max(0.001);
        self.samples.push_back(Sample {
            time_ms: now_ms(),
            cpu_percent: (100.0 * used.as_secs_f64() / passed) as f32,
            memory_bytes: count.memory_bytes,
            cpus: sandbox.cpus,
            memory_max_bytes: sandbox.memory_bytes,
        });
    }

    fn keep(&mut self, most: usize) {
        let surplus = self.samples.len().saturating_sub(most);
        if surplus > 0 {
            self.samples.drain(..surplus);
            self.samples.shrink_to(most);
        }
    }
}

/// What is kept of all sandboxes.
#[derive(Default)]
pub struct Samples {
    past: Mutex<BTreeMap<String, Past>>,
}

impl Samples {
    /// Samples of a sandbox between two times in milliseconds since 1970, both included; the oldest
    /// first.
    pub fn between(&self, id: &str, start_ms: u64, end_ms: u64) -> Vec<Sample> {
        let past = self.past();
        let all = past.get(id).map(|past| &past.samples).into_iter().flatten();
        all.filter(|one| (start_ms..=end_ms).contains(&one.time_ms)).copied().collect()
    }

    /// Notes what a sandbox has used; `None`: it has nothing to count, and the next sample begins anew.
    fn note(&self, sandbox: &Sandbox, at: Instant, count: Option<Count>) {
        let mut past = self.past();
        match count {
            Some(count) => {
                past.entry(sandbox.id.clone()).or_default().take(at, count, sandbox);
            }
            None => {
                if let Some(past) = past.get_mut(&sandbox.id) {
                    past.before = None;
                }
            }
        }
    }

    /// Keeps as much as there is room for of these sandboxes, and nothing of others.
    fn keep_only(&self, ids: &BTreeSet<String>) {
        let mut past = self.past();
        past.retain(|id, _| ids.contains(id));
        let each = (ALL_MAX / past.len().max(1)).clamp(1, EACH_MAX);
        past.values_mut().for_each(|past| past.keep(each));
    }

    fn past(&self) -> MutexGuard<'_, BTreeMap<String, Past>> {
        self.past.lock().expect("no holder panics")
    }
}

impl E2b {
    /// Takes samples for as long as the API is there.
    pub(super) async fn take_samples(this: Weak<Self>) {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last = String::new();
        loop {
            ticks.tick().await;
            let Some(this) = this.upgrade() else { return };
            last = this.sample_after(&last).await;
        }
    }

    /// Takes a sample of the sandboxes whose ids come after `last`, and then of the first ones, as far as
    /// there is time; the id of the last one.
    pub(super) async fn sample_after(self: &Arc<Self>, last: &str) -> String {
        let ids: BTreeSet<String> = self.records.all().into_iter().collect();
        self.samples.keep_only(&ids);
        let (first, then): (Vec<&String>, _) = ids.iter().partition(|id| id.as_str() > last);
        let (mut last, mut looked_at) = (last.to_owned(), 0);
        for id in first.into_iter().chain(then) {
            let Some(sandbox) = self.backend.find(id) else { continue };
            let count = match sandbox.is_paused() {
                true => None,
                false => self.backend.count(id).await.ok().flatten(),
            };
            self.samples.note(&sandbox, Instant::now(), count);
            last.clone_from(id);
            looked_at += usize::from(count.is_some());
            if looked_at == AT_A_TIME {
                break;
            }
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox(id: &str) -> Sandbox {
        Sandbox { id: id.to_owned(), cpus: 2, memory_bytes: 1 << 30, ..Sandbox::default() }
    }

    fn count(cpu_ms: u64) -> Option<Count> {
        Some(Count { cpu_time: Some(Duration::from_millis(cpu_ms)), memory_bytes: 7 })
    }

    #[test]
    fn cpu_time_is_that_since_the_sample_before_and_of_one_host_process() {
        let (samples, one, begin) = (Samples::default(), sandbox("one"), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        let shown = || {
            let all = samples.between("one", 0, u64::MAX);
            all.iter().map(|one| one.cpu_percent).collect::<Vec<_>>()
        };
        samples.note(&one, at(0), count(1000));
        assert_eq!(shown(), [0.0; 0], "nothing is known of the time before");
        samples.note(&one, at(5), count(3500));
        assert_eq!(shown(), [50.0]);
        // It has slept, so that it has another host process, and its time was not measured.
        samples.note(&one, at(10), count(5));
        assert_eq!(shown(), [50.0]);
        samples.note(&one, at(15), count(5005));
        assert_eq!(shown(), [50.0, 100.0]);
        samples.note(&one, at(20), None);
        samples.note(&one, at(500), count(5005));
        assert_eq!(shown(), [50.0, 100.0], "it was paused");
        let sample = samples.between("one", 0, u64::MAX)[0];
        assert_eq!((sample.memory_bytes, sample.cpus, sample.memory_max_bytes), (7, 2, 1 << 30));
        assert!(samples.between("one", 0, sample.time_ms - 1).is_empty());
        assert_eq!(samples.between("one", sample.time_ms, sample.time_ms)[0], sample);
        assert!(samples.between("two", 0, u64::MAX).is_empty());
    }

    #[test]
    fn an_hour_is_kept_and_less_where_there_are_many() {
        let (samples, begin) = (Samples::default(), Instant::now());
        let fill = |id: &str, many: u64| {
            for n in 0..many {
                samples.note(&sandbox(id), begin + INTERVAL * n as u32, count(n));
            }
        };
        let kept = |id: &str| samples.between(id, 0, u64::MAX).len();
        fill("one", 1000);
        samples.keep_only(&BTreeSet::from(["one".to_owned()]));
        assert_eq!(kept("one"), EACH_MAX);
        let many: BTreeSet<String> = (0..4096).map(|n| format!("box{n}")).collect();
        many.iter().for_each(|id| fill(id, 70));
        samples.keep_only(&many);
        assert_eq!((kept("one"), kept("box7")), (0, ALL_MAX / 4096));
    }
}
