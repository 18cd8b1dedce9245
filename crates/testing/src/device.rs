//! A device that passes its calls on to another device, with hooks before and after them. Invariant: without a hook, every
//! call has the result of the other device.

use plimsoll_exec::{Device, DeviceError, Launch, OnStart, Recorder, Ticket, Tracer};
use plimsoll_graph::Bytes;
use plimsoll_plan::Kernels;

/// A call of a device that hooks can observe and refuse.
#[derive(Clone, Copy, Debug)]
pub enum Call<'a> {
    /// [`Device::alloc_arena`] with the size of the arena.
    AllocArena(Bytes),
    /// [`Device::set_mapped`] with the size of the part that has memory.
    SetMapped(Bytes),
    /// [`Device::upload`] or [`Device::feed`].
    Upload,
    /// [`Device::download`].
    Download,
    /// [`Device::fill`].
    Fill,
    /// [`Device::copy`].
    Copy,
    /// [`Device::launch`].
    Launch(&'a Launch<'a>),
    /// [`Device::wait`].
    Wait,
    /// [`Device::fetch`].
    Fetch,
    /// [`Device::collect`] of this ticket.
    Collect(Ticket),
}

/// How a [`HookedDevice`] differs from `inner`, the device that it wraps. By default no method changes anything.
pub trait Hooks: Send {
    /// Called before a call is passed on. An error is the result of the call, which then does not reach `inner`.
    fn before(&mut self, _call: Call<'_>, _inner: &mut dyn Device) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Called when `inner` has completed a call. An error is the result of the call.
    fn after(&mut self, _call: Call<'_>, _inner: &mut dyn Device) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Whether a step is being captured: its launches that [`Hooks::before`] does not refuse succeed without reaching `inner`.
    fn is_capturing(&self) -> bool {
        false
    }

    /// Replaces [`Device::name`].
    fn name(&self, inner: &dyn Device) -> String {
        inner.name()
    }

    /// Replaces [`Device::depth`].
    fn depth(&self, inner: &dyn Device) -> usize {
        inner.depth()
    }

    /// Replaces [`Device::recorder`].
    fn recorder<'a>(&'a mut self, inner: &'a mut dyn Device) -> Option<&'a mut dyn Recorder> {
        inner.recorder()
    }

    /// Replaces [`Device::clear_interval`].
    fn clear_interval(&self, inner: &dyn Device) -> u64 {
        inner.clear_interval()
    }

    /// Replaces [`Device::trim`].
    fn trim(&mut self, inner: &mut dyn Device) -> Result<Bytes, DeviceError> {
        inner.trim()
    }
}

/// A device that passes its calls on to another device, apart from the differences of its [`Hooks`].
pub struct HookedDevice<H> {
    inner: Box<dyn Device>,
    hooks: H,
}

impl<H: Hooks> HookedDevice<H> {
    /// Wraps `inner`.
    pub fn new(inner: Box<dyn Device>, hooks: H) -> Self {
        Self { inner, hooks }
    }

    /// Passes `call` on by `pass`, between its two hooks.
    fn call<T>(
        &mut self,
        call: Call<'_>,
        pass: impl FnOnce(&mut dyn Device) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        self.hooks.before(call, &mut *self.inner)?;
        let result = pass(&mut *self.inner)?;
        self.hooks.after(call, &mut *self.inner)?;
        Ok(result)
    }
}

impl<H: Hooks> Device for HookedDevice<H> {
    fn name(&self) -> String {
        self.hooks.name(&*self.inner)
    }

    fn kernels(&self) -> Kernels {
        self.inner.kernels()
    }

    fn workers(&self) -> u64 {
        self.inner.workers()
    }

    fn alloc_arena(&mut self, bytes: Bytes) -> Result<(), DeviceError> {
        self.call(Call::AllocArena(bytes), |inner| inner.alloc_arena(bytes))
    }

    fn set_borders(&mut self, borders: &[Bytes]) -> Result<(), DeviceError> {
        self.inner.set_borders(borders)
    }

    fn set_mapped(&mut self, bytes: Bytes) -> Result<(), DeviceError> {
        self.call(Call::SetMapped(bytes), |inner| inner.set_mapped(bytes))
    }

    fn persistent(&mut self, bytes: Bytes) {
        self.inner.persistent(bytes);
    }

    fn takes_weights(&self) -> bool {
        self.inner.takes_weights()
    }

    fn prepare(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.inner.prepare(launch)
    }

    fn prepare_all(&mut self, launches: &[Launch<'_>], report: OnStart<'_>) -> Result<(), DeviceError> {
        self.inner.prepare_all(launches, report)
    }

    fn upload(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.call(Call::Upload, |inner| inner.upload(at, bytes))
    }

    fn download(&mut self, at: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        self.call(Call::Download, |inner| inner.download(at, out))
    }

    fn fill(&mut self, at: u64, bytes: Bytes, byte: u8) -> Result<(), DeviceError> {
        self.call(Call::Fill, |inner| inner.fill(at, bytes, byte))
    }

    fn copy(&mut self, from: u64, to: u64, bytes: Bytes) -> Result<(), DeviceError> {
        self.call(Call::Copy, |inner| inner.copy(from, to, bytes))
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let call = Call::Launch(launch);
        if self.hooks.is_capturing() {
            return self.hooks.before(call, &mut *self.inner);
        }
        self.call(call, |inner| inner.launch(launch))
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        self.call(Call::Wait, |inner| inner.wait())
    }

    fn stage(&mut self, ways: [Bytes; 2]) -> Result<(), DeviceError> {
        self.inner.stage(ways)
    }

    fn feed(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.call(Call::Upload, |inner| inner.feed(at, bytes))
    }

    fn fetch(&mut self, at: u64, bytes: Bytes) -> Result<Ticket, DeviceError> {
        self.call(Call::Fetch, |inner| inner.fetch(at, bytes))
    }

    fn collect(&mut self, ticket: Ticket, out: &mut [u8]) -> Result<(), DeviceError> {
        self.call(Call::Collect(ticket), |inner| inner.collect(ticket, out))
    }

    fn depth(&self) -> usize {
        self.hooks.depth(&*self.inner)
    }

    fn recorder(&mut self) -> Option<&mut dyn Recorder> {
        self.hooks.recorder(&mut *self.inner)
    }

    fn tracer(&mut self) -> &mut dyn Tracer {
        self.inner.tracer()
    }

    fn arithmetic(&self) -> String {
        self.inner.arithmetic()
    }

    fn matmul_provider(&self) -> Option<String> {
        self.inner.matmul_provider()
    }

    fn clear_interval(&self) -> u64 {
        self.hooks.clear_interval(&*self.inner)
    }

    fn trim(&mut self) -> Result<Bytes, DeviceError> {
        self.hooks.trim(&mut *self.inner)
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
        fn before(&mut self, call: Call<'_>, _: &mut dyn Device) -> Result<(), DeviceError> {
            self.fills += u64::from(matches!(call, Call::Fill));
            match matches!(call, Call::Fill) && self.fills == self.refused {
                true => Err(DeviceError::Machine { source: "refused".into() }),
                false => Ok(()),
            }
        }

        fn after(&mut self, _: Call<'_>, _: &mut dyn Device) -> Result<(), DeviceError> {
            self.completed += 1;
            Ok(())
        }
    }

    #[test]
    fn a_refused_call_does_not_reach_the_device() {
        let hooks = Counting { refused: 2, fills: 0, completed: 0 };
        let mut device = HookedDevice::new(Box::new(CpuDevice::new(1)), hooks);
        device.alloc_arena(Bytes(64)).expect("memory");
        device.fill(0, Bytes(64), 1).expect("not refused");
        device.fill(0, Bytes(64), 2).expect_err("refused");
        let mut bytes = [0; 64];
        device.download(0, &mut bytes).expect("copied");
        assert_eq!((bytes, device.hooks.completed), ([1; 64], 3));
        // An error of the device itself is passed on, and is no completed call.
        device.download(1, &mut bytes).expect_err("outside of the arena");
        assert_eq!(device.hooks.completed, 3);
    }
}
