//! Tests of the device arena: it grows and shrinks, in place and returning memory to the card where it is expandable.

use plimsoll_cuda::{CudaDevice, Options};
use plimsoll_exec::{Allocation, Device};
use plimsoll_graph::Bytes;
use plimsoll_plan::Location;

const MIB: u64 = 1 << 20;

/// Opens the first CUDA device, or returns `None` if the machine has none.
fn device(expandable: bool) -> Option<CudaDevice> {
    match CudaDevice::with(0, Options { expandable, ..Options::default() }) {
        Ok(device) => Some(device),
        Err(error) if error.is_absent() => {
            println!("skipped: no CUDA device");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// MiB of free device memory less than `before`; allocations of other processes count too.
fn taken(device: &CudaDevice, before: Bytes) -> i64 {
    (before.0 as i64 - device.memory().expect("asked").0.0 as i64) / MIB as i64
}

fn alloc(device: &mut CudaDevice, mib: u64) {
    device.allocate(&Allocation::arena(Bytes(mib * MIB))).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn an_expandable_arena_grows_in_place_and_gives_back_what_it_does_not_use() {
    let Some(mut device) = device(true) else { return };
    let before = device.memory().expect("asked").0;
    alloc(&mut device, 64);
    assert_eq!(taken(&device, before), 64);
    device.upload(Location::in_arena(8), b"it stays where it was").expect("inside");

    alloc(&mut device, 2048);
    assert_eq!(taken(&device, before), 2048, "what was missing is added, nothing is there twice");
    let mut found = [0; 21];
    device.download(Location::in_arena(8), &mut found).expect("inside");
    assert_eq!(&found, b"it stays where it was", "no address changed");
    device.fill(Location::in_arena(2047 * MIB), Bytes(MIB), 1).expect("the new part is there");

    alloc(&mut device, 100);
    assert_eq!(taken(&device, before), 2048, "pages stay until they are asked for");
    assert!(device.fill(Location::in_arena(100 * MIB), Bytes(1), 0).is_err(), "but are not used");
    assert_eq!(device.trim().expect("trimmed"), Bytes(1948 * MIB));
    assert_eq!(taken(&device, before), 100);
    assert_eq!(device.trim().expect("trimmed"), Bytes::ZERO);
    device.fill(Location::in_arena(0), Bytes(100 * MIB), 2).expect("what is left can be used");
    device.synchronize().expect("waited");
    drop(device);
}

#[test]
fn a_plain_arena_is_replaced_as_a_whole() {
    let Some(mut device) = device(false) else { return };
    let before = device.memory().expect("asked").0;
    for mib in [64, 2048, 128] {
        alloc(&mut device, mib);
        assert_eq!(taken(&device, before), mib as i64);
        assert_eq!(device.trim().expect("trimmed"), Bytes::ZERO);
        device.fill(Location::in_arena(0), Bytes(mib * MIB), 1).expect("inside");
        device.synchronize().expect("waited");
    }
}

/// An allocation larger than the free memory fails with an error that names its size; the device is then without an
/// arena and accepts a smaller one.
#[test]
fn too_much_is_refused() {
    for expandable in [true, false] {
        let Some(mut device) = device(expandable) else { return };
        alloc(&mut device, 32);
        // More than the free memory together with the present arena, which a reallocation may return.
        for bytes in [Bytes(device.memory().expect("asked").0.0 + 64 * MIB), Bytes(1 << 50)] {
            let error =
                device.allocate(&Allocation::arena(bytes)).expect_err("there is no such memory").to_string();
            assert!(error.contains(&bytes.to_string()), "{error}");
            assert!(
                device.fill(Location::in_arena(0), Bytes(1), 0).is_err(),
                "what was there is not used any more"
            );
            device.trim().expect("trimmed");
        }
        alloc(&mut device, 64);
        device.fill(Location::in_arena(0), Bytes(64 * MIB), 1).expect("inside");
        device.synchronize().expect("waited");
    }
}
