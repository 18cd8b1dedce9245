//! Every kernel compiles for every architecture that is supported, without a card: no spills, no local memory.

use plimsoll_cuda::{Compiler, Libraries, every_kernel};

#[test]
fn every_kernel_compiles_without_spills() {
    if Libraries::get().missing().iter().any(|error| error.to_string().contains("NVRTC")) {
        println!("skipped: no NVRTC");
        return;
    }
    for capability in [(8, 0), (8, 9), (9, 0)] {
        let compiler = Compiler::new(capability).expect("NVRTC").without_cache();
        for kernel in every_kernel().into_iter().filter(|kernel| kernel.runs_on(capability)) {
            let found = compiler.resources(&kernel).unwrap_or_else(|error| panic!("{error}"));
            assert!(found.registers > 0, "{kernel}: no report in {:?}", compiler.log(&kernel));
            assert_eq!((found.stack, found.spills), (0, (0, 0)), "{kernel} on {capability:?}: {found:?}");
        }
    }
}
