//! Compiles every kernel for every supported architecture, without a card, and checks that none spills registers or
//! uses local memory. Results are cached under a hash of source, options and compiler, so that only changed kernels
//! are compiled again.

use plimsoll_cuda::Libraries;
use plimsoll_cuda::internals::{Compiler, Kernel, Resources, every_kernel};
use plimsoll_exec::{StartProgress, StartStage};
use plimsoll_testing::Folder;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

#[test]
fn every_kernel_compiles_without_spills() {
    if Libraries::get().missing().iter().any(|error| error.to_string().contains("NVRTC")) {
        println!("skipped: no NVRTC");
        return;
    }
    for capability in [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)] {
        let compiler = Compiler::new(capability).expect("NVRTC");
        // CUDA 12.8 is the first version that compiles for Blackwell.
        if capability >= (10, 0) && compiler.version() < (12, 8) {
            println!("NVRTC {:?} does not compile for {capability:?}", compiler.version());
            continue;
        }
        let kernels: Vec<Kernel> =
            every_kernel().into_iter().filter(|kernel| kernel.runs_on(capability) && named(kernel)).collect();
        let (next, wrong) = (AtomicUsize::new(0), Mutex::new(vec![]));
        let work = || {
            while let Some(kernel) = kernels.get(next.fetch_add(1, Relaxed)) {
                if let Err(why) = check(&compiler, kernel) {
                    wrong.lock().expect("no thread panics").push(why);
                }
            }
        };
        let threads = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
        println!("{} kernels for sm_{}{}", kernels.len(), capability.0, capability.1);
        let (spilled, mut wrong): (Vec<_>, Vec<_>) =
            wrong.into_inner().expect("no thread panics").into_iter().partition(|why| why.spills);
        // The shapes of kernels were chosen for 8.0 to 9.0. Blackwell is compiled, was never run, and may spill.
        match capability < (10, 0) {
            true => wrong.extend(spilled),
            false => spilled.iter().for_each(|why| println!("    {}", why.text)),
        }
        let text = wrong.iter().map(|why| why.text.as_str()).collect::<Vec<_>>().join("\n");
        assert!(wrong.is_empty(), "{capability:?}, NVRTC {:?}:\n{text}", compiler.version());
    }
}

/// Several threads compile the kernels that the cache does not have, to the machine code that one thread makes; a cache
/// that cannot be written only loses them.
#[test]
fn missing_kernels_are_compiled_by_several_threads() {
    if Libraries::get().missing().iter().any(|error| error.to_string().contains("NVRTC")) {
        println!("skipped: no NVRTC");
        return;
    }
    let folder = Folder::new("compile");
    let cache = folder.path("cache");
    let compiler = |folder: &Path| Compiler::new((8, 0)).expect("NVRTC").with_cache(folder.to_owned());
    let kernels: Vec<Kernel> =
        every_kernel().into_iter().filter(|kernel| kernel.file.name() == "sums.cu").take(3).collect();
    let missing = |compiler: &Compiler, threads: usize| {
        let mut reported = vec![];
        let found = compiler.compile_missing(&kernels, threads, &mut |progress| reported.push(progress));
        (found, reported)
    };
    let progress = |done| StartProgress { stage: StartStage::Compile, done, total: 3 };

    let cached = compiler(&cache);
    let (found, reported) = missing(&cached, 2);
    assert_eq!(reported, [0, 1, 2, 3].map(progress));
    assert!(kernels.iter().all(|kernel| found[kernel].starts_with(b"\x7fELF")), "{} kernels", found.len());
    let (again, reported) = missing(&cached, 2);
    assert!(again.is_empty() && reported.is_empty(), "all kernels are in the cache");

    // A file in the place of the folder makes every write to the cache fail.
    let file = folder.write("file", "");
    let unwritable = compiler(&file.join("cache"));
    for threads in [1, 2] {
        let (alone, reported) = missing(&unwritable, threads);
        assert_eq!(reported.len(), 4);
        assert!(alone == found, "{threads} threads");
    }
}

/// Whether the name of a kernel contains the text in `PLIMSOLL_KERNELS`, which selects kernels while one works on them.
fn named(kernel: &Kernel) -> bool {
    std::env::var("PLIMSOLL_KERNELS").map_or(true, |part| kernel.to_string().contains(&part))
}

/// What is wrong with the machine code of a kernel.
struct Fault {
    /// Whether it compiles but spills registers or uses local memory.
    spills: bool,
    text: String,
}

/// `Err` if a kernel does not compile, spills registers or uses local memory.
fn check(compiler: &Compiler, kernel: &Kernel) -> Result<(), Fault> {
    let fault = |spills, text| Err(Fault { spills, text });
    match compiler.resources(kernel) {
        Err(error) => fault(false, error.to_string()),
        Ok(Resources { registers: 0, .. }) => {
            fault(false, format!("{kernel}: no report in {:?}", compiler.log(kernel)))
        }
        Ok(Resources { stack: 0, spills: (0, 0), .. }) => Ok(()),
        Ok(found) => fault(true, format!("{kernel}: {found:?}")),
    }
}
