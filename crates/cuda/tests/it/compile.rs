//! Compiles every kernel for every supported architecture, without a card, and checks that none spills registers or
//! uses local memory.

use plimsoll_cuda::{Compiler, Kernel, Libraries, every_kernel};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

#[test]
fn every_kernel_compiles_without_spills() {
    if Libraries::get().missing().iter().any(|error| error.to_string().contains("NVRTC")) {
        println!("skipped: no NVRTC");
        return;
    }
    for capability in [(8, 0), (8, 9), (9, 0)] {
        let compiler = Compiler::new(capability).expect("NVRTC").without_cache();
        let kernels: Vec<Kernel> =
            every_kernel().into_iter().filter(|kernel| kernel.runs_on(capability) && named(kernel)).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(kernel) = kernels.get(next.fetch_add(1, Relaxed)) {
                check(&compiler, kernel);
            }
        };
        let threads = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
        println!("{} kernels for sm_{}{}", kernels.len(), capability.0, capability.1);
    }
}

/// Whether the name of a kernel contains the text in `PLIMSOLL_KERNELS`, which selects kernels while one works on them.
fn named(kernel: &Kernel) -> bool {
    std::env::var("PLIMSOLL_KERNELS").map_or(true, |part| kernel.to_string().contains(&part))
}

fn check(compiler: &Compiler, kernel: &Kernel) {
    let found = compiler.resources(kernel).unwrap_or_else(|error| panic!("{error}"));
    assert!(found.registers > 0, "{kernel}: no report in {:?}", compiler.log(kernel));
    assert_eq!((found.stack, found.spills), (0, (0, 0)), "{kernel}, {:?}: {found:?}", compiler.version());
}
