//! A persistent thread pool that runs numbered tasks and allocates nothing per run.
//!
//! Invariant: `run` returns when every task has been done exactly once and no worker can still
//! touch the closure. Which worker does which task is left to the clock; therefore a kernel
//! must make the bits of each task independent of the others.
//!
//! One word holds the state: epoch (which run), an open bit, and how many workers are inside.
//! A worker enters a run at most once, and only while it is open; the caller works too, closes
//! the run when the tasks are exhausted, and waits only for those that entered. A worker that
//! was asleep or descheduled the whole time costs nothing.

use std::any::Any;
use std::cell::UnsafeCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

/// What the tasks of one run do: `(task index, worker index)`.
type Work<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// Rounds of waiting in a spin before a thread parks: some tens of microseconds, the gap
/// between two kernels of one step.
const SPINS: u32 = 1500;

const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;

/// Threads that wait for work. The thread that calls `run` is worker 0.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    caller: Mutex<()>,
}

struct Shared {
    /// epoch << 32 | open bit | workers inside
    gate: AtomicU64,
    next: AtomicUsize,
    tasks: AtomicUsize,
    work: UnsafeCell<Option<Work<'static>>>,
    stop: AtomicBool,
    asleep: AtomicUsize,
    caller_waits: AtomicBool,
    lock: Mutex<()>,
    start: Condvar,
    done: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `work` is written only by the caller while no worker is inside and the gate is
// closed, and read only by workers that entered through the open gate.
unsafe impl Sync for Shared {}
// SAFETY: the closure behind `work` is `Sync`, and outlives its run.
unsafe impl Send for Shared {}

impl Pool {
    /// A pool of `threads` workers, the caller among them; at least one.
    /// Panics if the system refuses a thread: for tests and measurements, others take [`Pool::start`].
    pub fn new(threads: usize) -> Pool {
        Pool::start(threads).expect("the system starts a thread")
    }

    /// The same; an error if the system refuses a thread.
    pub fn start(threads: usize) -> io::Result<Pool> {
        let shared = Arc::new(Shared {
            gate: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            tasks: AtomicUsize::new(0),
            work: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            asleep: AtomicUsize::new(0),
            caller_waits: AtomicBool::new(false),
            lock: Mutex::new(()),
            start: Condvar::new(),
            done: Condvar::new(),
            panic: Mutex::new(None),
        });
        // Dropped on an error, it ends the workers that were started.
        let mut pool = Pool { shared, workers: vec![], caller: Mutex::new(()) };
        for worker in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let name = format!("plimsoll-{worker}");
            let started = std::thread::Builder::new().name(name).spawn(move || shared.serve(worker))?;
            pool.workers.push(started);
        }
        Ok(pool)
    }

    /// Number of workers, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work(task, worker)` once for every task in `0..tasks`, in any order, from up to
    /// `threads()` threads; no two calls at one time have the same worker index. Runs from
    /// several threads wait for each other; a run inside a task would wait for ever.
    ///
    /// Panics with the payload of the first task that panicked; the tasks not yet begun then
    /// are not run.
    pub fn run(&self, tasks: usize, work: Work<'_>) {
        if tasks <= 1 || self.workers.is_empty() {
            (0..tasks).for_each(|task| work(task, 0));
            return;
        }
        let alone = ignore_poison(self.caller.lock());
        let shared = &*self.shared;
        shared.open(tasks, work);
        shared.drain(work, 0);
        shared.close();
        let panic = ignore_poison(shared.panic.lock()).take();
        drop(alone);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        drop(ignore_poison(self.shared.lock.lock()));
        self.shared.start.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its tasks; it has nothing else to say.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Publishes a run. Called by the caller alone, with the gate closed and nobody inside.
    fn open(&self, tasks: usize, work: Work<'_>) {
        // SAFETY: `close` returns only when no worker is inside, before `work` ends its life.
        let work = unsafe { core::mem::transmute::<Work<'_>, Work<'static>>(work) };
        // SAFETY: the gate is closed and nobody is inside, so nobody reads it.
        unsafe { *self.work.get() = Some(work) };
        self.next.store(0, SeqCst);
        self.tasks.store(tasks, SeqCst);
        let epoch = (self.gate.load(SeqCst) >> 32).wrapping_add(1) & 0xffff_ffff;
        self.gate.store(epoch << 32 | OPEN, SeqCst);
        if self.asleep.load(SeqCst) > 0 {
            drop(ignore_poison(self.lock.lock()));
            self.start.notify_all();
        }
    }

    /// Does tasks until none is left, keeping the first panic.
    fn drain(&self, work: Work<'_>, worker: usize) {
        let tasks = self.tasks.load(SeqCst);
        let result = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let task = self.next.fetch_add(1, SeqCst);
                if task >= tasks {
                    break;
                }
                work(task, worker);
            }
        }));
        if let Err(payload) = result {
            self.next.store(tasks, SeqCst);
            ignore_poison(self.panic.lock()).get_or_insert(payload);
        }
    }

    /// Lets nobody in any more and waits for those inside.
    fn close(&self) {
        self.gate.fetch_and(!OPEN, SeqCst);
        let inside = || self.gate.load(SeqCst) & INSIDE > 0;
        for _ in 0..SPINS {
            if !inside() {
                return;
            }
            core::hint::spin_loop();
        }
        self.caller_waits.store(true, SeqCst);
        let mut guard = ignore_poison(self.lock.lock());
        while inside() {
            guard = ignore_poison(self.done.wait(guard));
        }
        self.caller_waits.store(false, SeqCst);
    }

    /// A worker's life: enter each run once, until told to stop.
    fn serve(&self, worker: usize) {
        let mut seen = 0;
        while let Some(gate) = self.await_run(seen) {
            if self.gate.compare_exchange(gate, gate + 1, SeqCst, SeqCst).is_err() {
                continue;
            }
            seen = gate >> 32;
            // SAFETY: inside an open run nobody writes `work`.
            if let Some(work) = unsafe { *self.work.get() } {
                self.drain(work, worker);
            }
            let left = self.gate.fetch_sub(1, SeqCst) - 1;
            if left & (OPEN | INSIDE) == 0 && self.caller_waits.load(SeqCst) {
                drop(ignore_poison(self.lock.lock()));
                self.done.notify_all();
            }
        }
    }

    /// The gate as it stands in an open run other than `seen`, or `None` at the end.
    fn await_run(&self, seen: u64) -> Option<u64> {
        for _ in 0..SPINS {
            if self.stop.load(SeqCst) {
                return None;
            }
            if let Some(gate) = self.entrance(seen) {
                return Some(gate);
            }
            core::hint::spin_loop();
        }
        let mut guard = ignore_poison(self.lock.lock());
        self.asleep.fetch_add(1, SeqCst);
        let found = loop {
            if self.stop.load(SeqCst) {
                break None;
            }
            if let Some(gate) = self.entrance(seen) {
                break Some(gate);
            }
            guard = ignore_poison(self.start.wait(guard));
        };
        self.asleep.fetch_sub(1, SeqCst);
        found
    }

    fn entrance(&self, seen: u64) -> Option<u64> {
        let gate = self.gate.load(SeqCst);
        (gate & OPEN > 0 && gate >> 32 != seen).then_some(gate)
    }
}

/// The guard also after a panic elsewhere: the mutexes here guard no invariant of their own.
fn ignore_poison<'a, T>(
    guard: Result<MutexGuard<'a, T>, std::sync::PoisonError<MutexGuard<'a, T>>>,
) -> MutexGuard<'a, T> {
    guard.unwrap_or_else(|poison| poison.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_and_workers_are_distinct() {
        let pool = Pool::new(4);
        for tasks in [0, 1, 2, 3, 100, 1000] {
            let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            let busy: Vec<AtomicBool> = (0..4).map(|_| AtomicBool::new(false)).collect();
            pool.run(tasks, &|task, worker| {
                assert!(!busy[worker].swap(true, SeqCst), "two tasks on one worker");
                counts[task].fetch_add(1, SeqCst);
                busy[worker].store(false, SeqCst);
            });
            assert!(counts.iter().all(|c| c.load(SeqCst) == 1));
        }
    }

    #[test]
    fn many_runs_from_several_threads() {
        let pool = Pool::new(3);
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        pool.run(5, &|task, _| {
                            sum.fetch_add(task, SeqCst);
                        });
                    }
                });
            }
        });
        assert_eq!(sum.load(SeqCst), 3 * 2000 * 10);
    }

    #[test]
    fn runs_after_the_workers_have_parked() {
        let pool = Pool::new(2);
        for _ in 0..5 {
            std::thread::sleep(std::time::Duration::from_millis(3));
            let ran = AtomicUsize::new(0);
            pool.run(8, &|_, _| {
                std::thread::sleep(std::time::Duration::from_micros(300));
                ran.fetch_add(1, SeqCst);
            });
            assert_eq!(ran.load(SeqCst), 8);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(3);
        for bad in [0, 7, 49] {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.run(50, &|task, _| assert!(task != bad, "task {bad}"));
            }));
            let text = *caught.unwrap_err().downcast::<String>().unwrap();
            assert!(text.contains(&format!("task {bad}")), "{text}");
        }
        let ran = AtomicUsize::new(0);
        pool.run(9, &|_, _| {
            ran.fetch_add(1, SeqCst);
        });
        assert_eq!(ran.load(SeqCst), 9);
    }
}
