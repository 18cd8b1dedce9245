//! A device that passes its calls on to another device, with hooks before and after them. Invariant: without a hook, every
//! call has the result of the other device.

use plimsoll_exec::{Allocation, Device, DeviceError, DeviceInfo, Launch, OnStart, Recorder, Tracer, Transfer};
use plimsoll_graph::{Bytes, Space};
use plimsoll_plan::{Location, Queue};

/// A call of a device that hooks can observe and refuse.
#[derive(Clone, Copy, Debug)]
pub enum DeviceCall<'a> {
    /// [`Device::allocate`].
    Allocate(&'a Allocation<'a>),
    /// [`Device::set_mapped`] with the size of the part that has memory.
    SetMapped(Bytes),
    /// [`Device::upload`].
    Upload,
    /// [`Device::download`] from this position.
    Download(Location),
    /// [`Device::fill`].
    Fill,
    /// [`Device::launch`].
    Launch(&'a Launch<'a>),
    /// [`Device::start`] of this transfer.
    Start(&'a Transfer),
    /// [`Device::complete`] of this transfer.
    Complete(&'a Transfer),
    /// [`Device::synchronize`].
    Synchronize,
}

/// Differences of a [`HookedDevice`] from `inner`, the device that it wraps. By default no method changes anything.
pub trait Hooks: Send {
    /// Called before a call is passed on. An error is the result of the call, which then does not reach `inner`.
    fn before(&mut self, _call: DeviceCall<'_>, _inner: &mut dyn Device) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Called when `inner` has completed a call. An error is the result of the call.
    fn after(&mut self, _call: DeviceCall<'_>, _inner: &mut dyn Device) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Whether a step is being captured: its launches that [`Hooks::before`] does not refuse succeed without reaching `inner`.
    fn is_capturing(&self) -> bool {
        false
    }

    /// Changes the result of [`Device::info`].
    fn info(&self, inner: DeviceInfo) -> DeviceInfo {
        inner
    }

    /// Replaces [`Device::recorder`].
    fn recorder<'a>(&'a mut self, inner: &'a mut dyn Device) -> Option<&'a mut dyn Recorder> {
        inner.recorder()
    }

    /// Replaces [`Device::begin_step`].
    fn begin_step(&mut self, inner: &mut dyn Device) -> Result<Bytes, DeviceError> {
        inner.begin_step()
    }
}

/// A device that passes its calls on to another device, apart from the differences of its [`Hooks`]. Where `inner` has its
/// arena in host memory, this device has the host's space of a GPU too: bytes that transfers copy when they are started.
pub struct HookedDevice<H> {
    inner: Box<dyn Device>,
    host: Vec<u8>,
    hooks: H,
}

impl<H: Hooks> HookedDevice<H> {
    /// Wraps `inner`.
    pub fn new(inner: Box<dyn Device>, hooks: H) -> Self {
        Self { inner, host: vec![], hooks }
    }

    /// Passes `call` on by `pass`, between its two hooks.
    fn call<T>(
        &mut self,
        call: DeviceCall<'_>,
        pass: impl FnOnce(&mut dyn Device, &mut [u8]) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        self.hooks.before(call, &mut *self.inner)?;
        let result = pass(&mut *self.inner, &mut self.host)?;
        self.hooks.after(call, &mut *self.inner)?;
        Ok(result)
    }
}

/// A range of the host's space.
fn range(host: &mut [u8], at: u64, bytes: Bytes) -> Result<&mut [u8], DeviceError> {
    let end = at.checked_add(bytes.0).filter(|&end| end <= host.len() as u64);
    let end = end.ok_or(DeviceError::OutsideArena { at, bytes })?;
    Ok(&mut host[at as usize..end as usize])
}

impl<H: Hooks> Device for HookedDevice<H> {
    fn info(&self) -> DeviceInfo {
        self.hooks.info(self.inner.info())
    }

    fn allocate(&mut self, memory: &Allocation<'_>) -> Result<(), DeviceError> {
        self.hooks.before(DeviceCall::Allocate(memory), &mut *self.inner)?;
        self.inner.allocate(&Allocation { host: Bytes::ZERO, ..*memory })?;
        self.host = vec![0; memory.host.0 as usize];
        self.hooks.after(DeviceCall::Allocate(memory), &mut *self.inner)
    }

    fn set_mapped(&mut self, bytes: Bytes) -> Result<(), DeviceError> {
        self.call(DeviceCall::SetMapped(bytes), |inner, _| inner.set_mapped(bytes))
    }

    fn prepare(&mut self, launches: &[Launch<'_>], report: OnStart<'_>) -> Result<(), DeviceError> {
        self.inner.prepare(launches, report)
    }

    fn upload(&mut self, to: Location, bytes: &[u8]) -> Result<(), DeviceError> {
        self.call(DeviceCall::Upload, |inner, host| match to.space {
            Space::Host => {
                range(host, to.at, Bytes(bytes.len() as u64))?.copy_from_slice(bytes);
                Ok(())
            }
            Space::Device | Space::File => inner.upload(to, bytes),
        })
    }

    fn download(&mut self, from: Location, out: &mut [u8]) -> Result<(), DeviceError> {
        self.call(DeviceCall::Download(from), |inner, host| match from.space {
            Space::Host => {
                out.copy_from_slice(range(host, from.at, Bytes(out.len() as u64))?);
                Ok(())
            }
            Space::Device | Space::File => inner.download(from, out),
        })
    }

    fn fill(&mut self, at: Location, bytes: Bytes, byte: u8) -> Result<(), DeviceError> {
        self.call(DeviceCall::Fill, |inner, host| match at.space {
            Space::Host => {
                range(host, at.at, bytes)?.fill(byte);
                Ok(())
            }
            Space::Device | Space::File => inner.fill(at, bytes, byte),
        })
    }

    fn begin_step(&mut self) -> Result<Bytes, DeviceError> {
        self.hooks.begin_step(&mut *self.inner)
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let call = DeviceCall::Launch(launch);
        // A captured launch must not compute: a GPU computes it when the graph is replayed.
        if self.hooks.is_capturing() {
            return self.hooks.before(call, &mut *self.inner);
        }
        self.call(call, |inner, _| inner.launch(launch))
    }

    fn start(&mut self, transfer: &Transfer) -> Result<(), DeviceError> {
        let Transfer { from, to, bytes, .. } = *transfer;
        self.call(DeviceCall::Start(transfer), |inner, host| match transfer.queue() {
            Queue::In => inner.upload(to, range(host, from.at, bytes)?),
            Queue::Out => inner.download(from, range(host, to.at, bytes)?),
            Queue::Compute | Queue::Read | Queue::Write => inner.start(transfer),
        })
    }

    fn wait_for(&mut self, transfer: &Transfer) -> Result<(), DeviceError> {
        match transfer.queue() {
            Queue::In | Queue::Out => Ok(()),
            Queue::Compute | Queue::Read | Queue::Write => self.inner.wait_for(transfer),
        }
    }

    fn complete(&mut self, transfer: &Transfer) -> Result<(), DeviceError> {
        self.call(DeviceCall::Complete(transfer), |inner, _| match transfer.queue() {
            Queue::In | Queue::Out => Ok(()),
            Queue::Compute | Queue::Read | Queue::Write => inner.complete(transfer),
        })
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.call(DeviceCall::Synchronize, |inner, _| inner.synchronize())
    }

    fn recorder(&mut self) -> Option<&mut dyn Recorder> {
        self.hooks.recorder(&mut *self.inner)
    }

    fn tracer(&mut self) -> &mut dyn Tracer {
        self.inner.tracer()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_cpu::CpuDevice;

    /// Refuses fill number `refused`, and counts the fills and the calls that the CPU completed.
    struct Counting {
        refused: u64,
        fills: u64,
        completed: u64,
    }

    impl Hooks for Counting {
        fn before(&mut self, call: DeviceCall<'_>, _: &mut dyn Device) -> Result<(), DeviceError> {
            self.fills += u64::from(matches!(call, DeviceCall::Fill));
            if matches!(call, DeviceCall::Fill) && self.fills == self.refused {
                Err(DeviceError::Machine { source: "refused".into() })
            } else {
                Ok(())
            }
        }

        fn after(&mut self, _: DeviceCall<'_>, _: &mut dyn Device) -> Result<(), DeviceError> {
            self.completed += 1;
            Ok(())
        }
    }

    #[test]
    fn a_refused_call_does_not_reach_the_device() {
        let hooks = Counting { refused: 2, fills: 0, completed: 0 };
        let mut device = HookedDevice::new(Box::new(CpuDevice::new(1)), hooks);
        device.allocate(&Allocation::arena(Bytes(64))).expect("memory");
        let [start, second] = [0, 1].map(Location::in_arena);
        device.fill(start, Bytes(64), 1).expect("not refused");
        device.fill(start, Bytes(64), 2).expect_err("refused");
        let mut bytes = [0; 64];
        device.download(start, &mut bytes).expect("copied");
        assert_eq!((bytes, device.hooks.completed), ([1; 64], 3));
        // An error of the device itself is passed on, and is no completed call.
        device.download(second, &mut bytes).expect_err("outside of the arena");
        assert_eq!(device.hooks.completed, 3);
    }
}
