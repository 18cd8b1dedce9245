//! A persistent thread pool that runs numbered tasks and allocates nothing per run.
//!
//! Invariant: `run` returns when every task has been done exactly once and no worker can access the closure any more.
//! Which worker does which task depends on timing, so a kernel must compute the bits of each task independently of
//! the other tasks.
//!
//! One atomic word, `gate`, holds the state: the epoch (number of the run), an open bit, and the number of workers
//! inside. A worker enters a run at most once, and only while the run is open. The caller works too, closes the run
//! when no task is left, and waits only for workers that entered. A worker that was asleep or descheduled during the
//! whole run costs nothing.

use std::any::Any;
use std::cell::UnsafeCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

/// The function of one run: `(task index, worker index)`.
type RunFn<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// Iterations of the spin wait before a thread parks: some tens of microseconds, the gap between two kernels of one
/// step.
const SPINS: u32 = 1500;

/// Bit of `gate` that is set while workers may enter the run.
const OPEN: u64 = 1 << 31;
/// Bits of `gate` that count the workers inside the run.
const INSIDE: u64 = OPEN - 1;

/// A pool of threads. The thread that calls `run` is worker 0.
pub struct ThreadPool {
    shared: Arc<PoolState>,
    workers: Vec<JoinHandle<()>>,
    caller: Mutex<()>,
}

/// State shared by the caller and the workers.
struct PoolState {
    /// epoch << 32 | open bit | number of workers inside
    gate: AtomicU64,
    /// Index of the next task to take.
    next: AtomicUsize,
    /// Number of tasks of the current run.
    tasks: AtomicUsize,
    /// Function of the current run; valid while the gate is open or a worker is inside.
    work: UnsafeCell<Option<RunFn<'static>>>,
    /// Set once, to end the workers.
    stop: AtomicBool,
    /// Number of workers that are parked on `start`, or about to be.
    asleep: AtomicUsize,
    /// Whether the caller is parked on `done`, or about to be.
    caller_waits: AtomicBool,
    /// Mutex of both condition variables.
    lock: Mutex<()>,
    start: Condvar,
    done: Condvar,
    /// Payload of the first panic of the current run.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: the caller writes `work` only while the gate is closed and no worker is inside; workers read it only after
// they entered through the open gate.
unsafe impl Sync for PoolState {}
// SAFETY: the closure behind `work` is `Sync` and outlives its run.
unsafe impl Send for PoolState {}

impl ThreadPool {
    /// Starts a pool of `threads` workers, the caller included; at least one. Panics if the operating system refuses
    /// a thread; meant for tests and measurements, other code uses [`ThreadPool::start`].
    pub fn new(threads: usize) -> ThreadPool {
        ThreadPool::start(threads).expect("the system starts a thread")
    }

    /// As [`ThreadPool::new`], but returns an error if the operating system refuses a thread.
    pub fn start(threads: usize) -> io::Result<ThreadPool> {
        let shared = Arc::new(PoolState {
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
        // If a thread fails to start, dropping `pool` ends the workers that were already started.
        let mut pool = ThreadPool { shared, workers: vec![], caller: Mutex::new(()) };
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

    /// Calls `work(task, worker)` once for every task in `0..tasks`, in any order, from up to `threads()` threads. No
    /// two concurrent calls have the same worker index. Concurrent runs from several threads wait for each other;
    /// calling `run` inside a task deadlocks.
    ///
    /// Panics with the payload of the first task that panicked; tasks that have not begun by then are skipped.
    pub fn run(&self, tasks: usize, work: RunFn<'_>) {
        if tasks <= 1 || self.workers.is_empty() {
            (0..tasks).for_each(|task| work(task, 0));
            return;
        }
        let only_caller = ignore_poison(self.caller.lock());
        let shared = &*self.shared;
        shared.open(tasks, work);
        shared.drain(work, 0);
        shared.close();
        let panic = ignore_poison(shared.panic.lock()).take();
        drop(only_caller);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        drop(ignore_poison(self.shared.lock.lock()));
        self.shared.start.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its tasks, so `join` reports no other error.
            let _ = worker.join();
        }
    }
}

impl PoolState {
    /// Publishes a run. Called by the caller only, with the gate closed and no worker inside.
    fn open(&self, tasks: usize, work: RunFn<'_>) {
        // SAFETY: `close` returns only when no worker is inside, before the lifetime of `work` ends.
        let work = unsafe { core::mem::transmute::<RunFn<'_>, RunFn<'static>>(work) };
        // SAFETY: the gate is closed and no worker is inside, so no thread reads `work`.
        unsafe { *self.work.get() = Some(work) };
        self.next.store(0, SeqCst);
        self.tasks.store(tasks, SeqCst);
        let epoch = (self.gate.load(SeqCst) >> 32).wrapping_add(1) & 0xffff_ffff;
        // The gate opens last: a worker that enters must see this run's `next`, `tasks` and `work`.
        self.gate.store(epoch << 32 | OPEN, SeqCst);
        if self.asleep.load(SeqCst) > 0 {
            // Taking the lock once orders this notification after a worker that has checked the gate but not yet
            // begun to wait; without it the worker could miss the wakeup.
            drop(ignore_poison(self.lock.lock()));
            self.start.notify_all();
        }
    }

    /// Does tasks until none is left; records the first panic.
    fn drain(&self, work: RunFn<'_>, worker: usize) {
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
            // Skip the remaining tasks.
            self.next.store(tasks, SeqCst);
            ignore_poison(self.panic.lock()).get_or_insert(payload);
        }
    }

    /// Closes the gate and waits until no worker is inside.
    fn close(&self) {
        self.gate.fetch_and(!OPEN, SeqCst);
        for _ in 0..SPINS {
            if !self.has_workers_inside() {
                return;
            }
            core::hint::spin_loop();
        }
        // Set before the gate is read, while a worker leaves the gate before it reads the flag. Both are
        // sequentially consistent, so the caller sees that the worker has left, or the worker sees the flag;
        // with weaker orderings neither might, and the caller would wait forever.
        self.caller_waits.store(true, SeqCst);
        let mut guard = ignore_poison(self.lock.lock());
        while self.has_workers_inside() {
            guard = ignore_poison(self.done.wait(guard));
        }
        self.caller_waits.store(false, SeqCst);
    }

    /// Whether a worker is inside the run.
    fn has_workers_inside(&self) -> bool {
        self.gate.load(SeqCst) & INSIDE > 0
    }

    /// Main loop of a worker thread: enters each run at most once, until the pool stops.
    fn serve(&self, worker: usize) {
        let mut seen = 0;
        while let Some(gate) = self.await_run(seen) {
            // Entering is a compare-exchange on the whole gate: it fails if the run was closed or replaced since
            // `await_run` read it.
            if self.gate.compare_exchange(gate, gate + 1, SeqCst, SeqCst).is_err() {
                continue;
            }
            seen = gate >> 32;
            // SAFETY: `work` is not written while a worker is inside an open run.
            if let Some(work) = unsafe { *self.work.get() } {
                self.drain(work, worker);
            }
            let left = self.gate.fetch_sub(1, SeqCst) - 1;
            // The last worker to leave a closed run wakes the caller.
            if left & (OPEN | INSIDE) == 0 && self.caller_waits.load(SeqCst) {
                drop(ignore_poison(self.lock.lock()));
                self.done.notify_all();
            }
        }
    }

    /// Waits for an open run with an epoch other than `seen` and returns the gate's value; `None` when the pool
    /// stops.
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
        // As in `close`: counted before the gate is read, while `open` opens the gate before it reads the
        // count. Otherwise this thread could see a closed gate and `open` no sleeper, and the thread would
        // sleep through the run.
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

    /// The gate's value if it is open for an epoch other than `seen`.
    fn entrance(&self, seen: u64) -> Option<u64> {
        let gate = self.gate.load(SeqCst);
        (gate & OPEN > 0 && gate >> 32 != seen).then_some(gate)
    }
}

/// Ignores the poison of a mutex after a panic elsewhere: the mutexes here protect no invariant of their own.
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
        let pool = ThreadPool::new(4);
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
        let pool = ThreadPool::new(3);
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
        let pool = ThreadPool::new(2);
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
        let pool = ThreadPool::new(3);
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
