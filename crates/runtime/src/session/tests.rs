//! Steps distributed over several CPU devices: each step returns once with its own values; a step that no device can
//! compute ends the run.

use super::*;
use crate::session::weights::{WeightSource, load_all};
use plimsoll_cpu::{CpuDevice, Isa};
use plimsoll_exec::Param;
use plimsoll_graph::{Bounds, Builder, DType};
use plimsoll_plan::{PlanError, Policy, compile};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Columns of the rows that the test program doubles.
const WIDTH: usize = 4;

/// Weight source with twice the identity matrix, which counts its reads.
struct Twice {
    reads: AtomicUsize,
}

impl WeightSource for Twice {
    fn read(&self, _: &Param, elements: Range<u64>, out: &mut [f32]) -> Result<(), RuntimeError> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let twice = |at: u64| if at as usize / WIDTH == at as usize % WIDTH { 2.0 } else { 0.0 };
        elements.zip(out).for_each(|(at, x)| *x = twice(at));
        Ok(())
    }
}

/// Starts `count` CPU devices with a program that multiplies rows by twice the identity.
fn replicas(count: usize) -> ReplicaPool<usize> {
    let program = || {
        let mut g = Builder::new(Bounds { tokens: 8, sequences: 1, longest: 8, packs: 1 });
        let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(WIDTH as u64)], DType::F32);
        let y = g.linear(x, "twice", WIDTH as u64, false);
        g.output("y", y);
        let target = CpuDevice::target(1, Isa::detect())?;
        let graph = g.finish().map_err(|source| PlanError::of_graph("build", source))?;
        let plan = compile(&graph, &Policy::default(), &target)?;
        Ok::<Program, PlanError>(Program::new(target, vec![("twice".to_owned(), plan)], vec![]))
    };
    let start = |_| Executor::new(Box::new(CpuDevice::new(1)), program().expect("planned")).expect("started");
    let mut executors: Vec<Executor> = (0..count).map(start).collect();
    let twice = Twice { reads: AtomicUsize::new(0) };
    load_all(&mut executors, 0, &twice).expect("loaded");
    assert_eq!(twice.reads.into_inner(), 1, "a weight is read once for all devices");
    ReplicaPool::new(executors).expect("replicas")
}

fn step(replicas: &ReplicaPool<usize>, number: usize, rows: usize) -> StepWork<usize> {
    let program = replicas.program();
    StepWork {
        plan: 0,
        inputs: vec![(
            program.input(0, "x").expect("an input"),
            InputValues::F32(vec![number as f32; rows * WIDTH]),
        )],
        counts: Counts { tokens: rows as u64, sequences: 1, packs: 1 },
        outputs: StepOutput::of(program, 0).into(),
        values: vec![],
        tag: number,
    }
}

fn check(done: &CompletedWork<usize>) {
    let StepWork { tag, values, counts, .. } = &done.work;
    assert_eq!(values[0], vec![2.0 * *tag as f32; counts.tokens as usize * WIDTH]);
}

#[test]
fn every_step_comes_back_once() {
    for count in [1, 2, 5] {
        let mut replicas = replicas(count);
        let mut back = vec![0; 100];
        for number in 0..100 {
            while replicas.in_flight() >= replicas.in_flight_target() {
                let Some(Returned::Done(done)) = replicas.wait(&|| Ok(())).expect("no error") else {
                    panic!("a step")
                };
                check(&done);
                back[done.work.tag] += 1;
            }
            let work = step(&replicas, number, 1 + number % 8);
            replicas.send(work);
        }
        while let Some(Returned::Done(done)) = replicas.wait(&|| Ok(())).expect("no error") {
            check(&done);
            back[done.work.tag] += 1;
        }
        assert!(back.iter().all(|&n| n == 1), "{back:?}");
        let steps: u64 = replicas.usage().iter().map(|usage| usage.steps).sum();
        assert_eq!(steps, 100);
        assert_eq!(replicas.into_executors().len(), count);
    }
}

/// Nine rows for a plan of eight are an error of the step, not of a device, and the other steps complete.
#[test]
fn what_no_device_can_compute_is_the_runs_error() {
    let mut replicas = replicas(2);
    for (number, rows) in [3, 9, 3].into_iter().enumerate() {
        let work = step(&replicas, number, rows);
        replicas.send(work);
    }
    let (mut done, mut refused) = (0, 0);
    loop {
        match replicas.wait(&|| Ok(())) {
            Ok(Some(Returned::Done(step))) => {
                check(&step);
                done += 1;
            }
            Ok(Some(Returned::LacksMemory(error, _))) => panic!("{error}"),
            Ok(None) => break,
            Err(RuntimeError::Device(_)) => refused += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!((done, refused, replicas.working()), (2, 1, 2));
    let work = step(&replicas, 7, 2);
    replicas.send(work);
    let Some(Returned::Done(done)) = replicas.wait(&|| Ok(())).expect("no error") else { panic!("a step") };
    check(&done);
    assert!(replicas.warnings().is_empty());
}

#[test]
fn a_wait_ends_where_the_run_is_stopped() {
    let mut replicas = replicas(1);
    assert!(replicas.wait(&|| panic!("nothing is on its way")).expect("no error").is_none());
    let work = step(&replicas, 1, 1);
    replicas.send(work);
    replicas.cancel();
    // The step had either started, or was dropped.
    let left = std::iter::from_fn(|| replicas.wait(&|| Ok(())).expect("no error")).count();
    assert!(left <= 1 && replicas.in_flight() == 0);
}

/// When the last device has failed, the error names the devices and the first cause, on every later call too.
#[test]
fn without_a_device_the_error_is_that_of_the_devices() {
    for count in [1, 3] {
        let mut replicas = replicas(count);
        let mut retire = |lane: usize| {
            let source = format!("device {lane} fell off the bus").into();
            replicas.hear(ReplicaEvent::Retired {
                replica: lane,
                error: DeviceError::Machine { source },
                handed_back: 1,
            })
        };
        for lane in (1..count).rev() {
            assert!(retire(lane).expect("another device is left").is_none());
        }
        let first = if count == 1 { 0 } else { count - 1 };
        let check = |error: RuntimeError| {
            assert!(matches!(error, RuntimeError::Device(_)), "{error}");
            let text = told(&error);
            let named = if count == 1 { "failed, and there is no other" } else { "all 3 devices failed" };
            assert!(
                text.contains(named) && text.ends_with(&format!("device {first} fell off the bus")),
                "{text}"
            );
        };
        check(retire(0).map(drop).expect_err("none is left"));
        assert_eq!(replicas.warnings().len(), count - 1);
        // The threads of failed devices have ended.
        replicas.join();
        let work = step(&replicas, 1, 1);
        replicas.send(work);
        check(replicas.wait(&|| Ok(())).map(drop).expect_err("none is left"));
        let work = step(&replicas, 2, 1);
        replicas.send(work);
        check(replicas.poll().map(drop).expect_err("none is left"));
        assert_eq!(replicas.in_flight(), 0);
    }
}
