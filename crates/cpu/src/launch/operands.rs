//! Typed views of a launch's operands for the kernels. Invariant: every view lies inside the arena; token ids,
//! indices, spans and packs are checked before a kernel reads them.

use crate::packs::Packs;
use crate::{Element, QuantizedRows, QuantizedRowsMut, Rows, RowsMut, launch::widening};
use bytemuck::Pod;
use plimsoll_exec::arena::Arena;
use plimsoll_exec::{DeviceError, Launch, Operand};
use plimsoll_graph::{Bytes, DType};

/// The operands of one launch; its methods give the typed views that kernels take. `i` is the index of an input, `k`
/// of an output.
pub(crate) struct LaunchOperands<'a> {
    pub(crate) arena: &'a Arena,
    pub(crate) launch: &'a Launch<'a>,
    /// Whether 16-bit operands have f32 copies in the workspace, which the kernel then uses in place of the operands.
    pub(crate) widened: bool,
}

impl<'a> LaunchOperands<'a> {
    /// The error for a launch that no kernel can run, with the op's name and the reason.
    pub(crate) fn refuse(&self, why: String) -> DeviceError {
        DeviceError::Kernel { op: self.launch.op.name(), why }
    }

    /// Address of an operand's first element: bf16 in place if `E` is bf16, otherwise as [`LaunchOperands::start`].
    fn start_of<E: Element>(&self, o: &Operand) -> Result<*mut E, DeviceError> {
        if size_of::<E>() == size_of::<f32>() {
            return Ok(self.start(o)?.cast());
        }
        match o.spec.dtype {
            DType::Bf16 if !self.widened => self.address(o),
            DType::F32 | DType::Bf16 | DType::F16 | DType::F8 | DType::I8 | DType::I32 | DType::U8 => {
                Err(self.refuse(format!("no bf16 kernel for {}", o.spec)))
            }
        }
    }

    /// Address of an operand's first 32-bit element: in place, or in its f32 copy in the workspace for 16-bit types.
    pub(crate) fn start(&self, o: &Operand) -> Result<*mut f32, DeviceError> {
        match o.spec.dtype {
            DType::F32 | DType::I32 => self.address(o),
            DType::Bf16 | DType::F16 => Ok(self.copy_of(o)?.as_mut_ptr()),
            DType::F8 | DType::I8 | DType::U8 => Err(self.refuse(format!("no kernel for {}", o.spec))),
        }
    }

    /// The f32 copy of a 16-bit operand in the workspace. `Err` if the launch is not widened or the copy does not
    /// fit.
    pub(crate) fn copy_of(&self, o: &Operand) -> Result<&'a mut [f32], DeviceError> {
        let copy = widening::copies(self).find(|(x, _)| std::ptr::eq(*x, o));
        let (Some((_, from)), Some((at, space))) = (copy, self.launch.workspace) else {
            return Err(self.refuse(format!("no kernel for {}", o.spec)));
        };
        let len = o.spec.elements_at(self.launch.counts);
        let bytes = Bytes(len * DType::F32.size());
        if from + bytes.0 > space.0 {
            return Err(self.refuse(format!("no scratch for {}", o.spec)));
        }
        let start = self.arena.range(at + from, bytes)?.as_ptr().cast();
        // SAFETY: inside the workspace, which overlaps no operand; copies do not overlap each other.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, len as usize) })
    }

    /// The elements of an input, in its own type. Panics if `T` has another size.
    pub(crate) fn stored<T: Pod>(&self, o: &Operand) -> Result<&'a [T], DeviceError> {
        assert_eq!(size_of::<T>() as u64, o.spec.dtype.size(), "elements of {}", o.spec);
        let len = o.spec.elements_at(self.launch.counts) as usize;
        // SAFETY: inside the arena; `T` is `Pod`, so every bit pattern is a value.
        Ok(unsafe { std::slice::from_raw_parts(self.address(o)?, len) })
    }

    /// The elements of an output, in its own type. Panics if `T` has another size.
    pub(crate) fn stored_mut<T: Pod>(&self, o: &Operand) -> Result<&'a mut [T], DeviceError> {
        assert_eq!(size_of::<T>() as u64, o.spec.dtype.size(), "elements of {}", o.spec);
        let len = o.spec.elements_at(self.launch.counts) as usize;
        // SAFETY: inside the arena; an output overlaps only inputs that the op may overwrite.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.address(o)?, len) })
    }

    /// All bytes of an operand, including the scales of quantized operands.
    pub(crate) fn bytes(&self, o: &Operand) -> Result<&'a [u8], DeviceError> {
        let bytes = o.bytes(self.launch.counts).0 as usize;
        // SAFETY: inside the arena.
        Ok(unsafe { std::slice::from_raw_parts(self.address(o)?, bytes) })
    }

    /// Input `i` as int8 rows with their scales.
    pub(crate) fn quantized(&self, i: usize) -> Result<QuantizedRows<'a>, DeviceError> {
        let o = &self.launch.ins[i];
        let (rows, columns) = o.matrix(self.launch.counts);
        Ok(QuantizedRows::new(self.bytes(o)?, rows, columns))
    }

    /// Output `k` as int8 rows with their scales.
    pub(crate) fn quantized_out(&self, k: usize) -> Result<QuantizedRowsMut<'a>, DeviceError> {
        let o = self.wanted(k)?;
        if o.spec.dtype != DType::I8 {
            return Err(self.refuse(format!("the CPU has no codes of {}", o.spec.dtype.name())));
        }
        let (rows, columns) = o.matrix(self.launch.counts);
        let bytes = o.bytes(self.launch.counts).0 as usize;
        // SAFETY: inside the arena; the output overlaps no input, because inputs have another type.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.address(o)?, bytes) };
        Ok(QuantizedRowsMut::new(bytes, rows, columns))
    }

    /// Address of an operand's first byte. `Err` unless all its bytes lie inside the arena.
    fn address<T>(&self, o: &Operand) -> Result<*mut T, DeviceError> {
        Ok(self.arena.range(o.at, o.bytes(self.launch.counts))?.as_ptr().cast())
    }

    /// Input `i` as a matrix of the kernel's element type: f32 (possibly a widened copy), or bf16 in place.
    pub(crate) fn input<E: Element>(&self, i: usize) -> Result<Rows<'a, E>, DeviceError> {
        let o = &self.launch.ins[i];
        let (rows, columns) = o.matrix(self.launch.counts);
        // SAFETY: the bytes are inside the arena; only an output that may alias this input overlaps them.
        Ok(unsafe { Rows::from_raw(self.start_of(o)?, rows, columns, columns) })
    }

    /// Output `k`. `Err` if it is not requested and has no storage.
    pub(crate) fn wanted(&self, k: usize) -> Result<&'a Operand, DeviceError> {
        self.launch.outs[k].as_ref().ok_or_else(|| self.refuse(format!("output {k} has no storage")))
    }

    /// Output `k` as a matrix of the kernel's element type.
    pub(crate) fn output<E: Element>(&self, k: usize) -> Result<RowsMut<'a, E>, DeviceError> {
        let o = self.wanted(k)?;
        let (rows, columns) = o.matrix(self.launch.counts);
        // SAFETY: the bytes are inside the arena; only inputs that the op may overwrite overlap them.
        Ok(unsafe { RowsMut::from_raw(self.start_of(o)?, rows, columns, columns) })
    }

    /// Output `k` as a matrix; `None` if it is not requested.
    pub(crate) fn output_if<E: Element>(&self, k: usize) -> Result<Option<RowsMut<'a, E>>, DeviceError> {
        self.launch.outs[k].as_ref().map(|_| self.output(k)).transpose()
    }

    /// Input `i` as one contiguous slice.
    pub(crate) fn vector<E: Element>(&self, i: usize) -> Result<&'a [E], DeviceError> {
        let o = &self.launch.ins[i];
        let len = o.spec.elements_at(self.launch.counts) as usize;
        // SAFETY: inside the arena; the plan checker admits no writer of a parameter or table while it is read.
        Ok(unsafe { std::slice::from_raw_parts(self.start_of(o)?, len) })
    }

    /// Output `k` as one contiguous slice of f32.
    pub(crate) fn flat_out(&self, k: usize) -> Result<&'a mut [f32], DeviceError> {
        let o = self.wanted(k)?;
        let len = o.spec.elements_at(self.launch.counts) as usize;
        // SAFETY: inside the arena; an output overlaps only inputs that the op may overwrite.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start(o)?, len) })
    }

    /// Output `k` as one contiguous slice of f32; `None` if it is not requested.
    pub(crate) fn vector_out(&self, k: usize) -> Result<Option<&'a mut [f32]>, DeviceError> {
        self.launch.outs[k].as_ref().map(|_| self.flat_out(k)).transpose()
    }

    /// The kernel's own part of the workspace, behind the f32 copies of widened operands.
    pub(crate) fn workspace(&self) -> Result<&'a mut [f32], DeviceError> {
        let Some((at, bytes)) = self.launch.workspace else { return Ok(&mut []) };
        let copies = widening::end(self);
        let rest = bytes.saturating_sub(copies);
        let start = self.arena.range(at + copies.0, rest)?.as_ptr().cast();
        // SAFETY: inside the arena; a workspace overlaps no operand, and this part of it no widened copy.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, rest.0 as usize / 4) })
    }

    /// Input `i` as one contiguous slice of u32.
    pub(crate) fn words(&self, i: usize) -> Result<&'a [u32], DeviceError> {
        let o = &self.launch.ins[i];
        let len = o.spec.elements_at(self.launch.counts) as usize;
        // SAFETY: inside the arena; every bit pattern is a u32.
        Ok(unsafe { std::slice::from_raw_parts(self.start(o)?.cast(), len) })
    }

    /// Input `i` as row indices. `Err` unless all are below `rows`.
    pub(crate) fn ids(&self, i: usize, rows: usize) -> Result<&'a [u32], DeviceError> {
        let ids = self.words(i)?;
        match ids.iter().find(|&&id| id as usize >= rows) {
            Some(id) => Err(self.refuse(format!("row {} of a table of {rows}", *id as i32))),
            None => Ok(ids),
        }
    }

    /// Input `i` as indices into as many rows as there are indices; -1 means none. `Err` if an index is out of range.
    pub(crate) fn slots(&self, i: usize) -> Result<&'a [i32], DeviceError> {
        let o = &self.launch.ins[i];
        let len = o.spec.elements_at(self.launch.counts) as usize;
        // SAFETY: inside the arena; every bit pattern is an i32.
        let slots: &[i32] = unsafe { std::slice::from_raw_parts(self.start(o)?.cast(), len) };
        match slots.iter().find(|&&slot| slot < -1 || slot >= len as i32) {
            Some(slot) => Err(self.refuse(format!("index {slot} of {len} rows"))),
            None => Ok(slots),
        }
    }

    /// Output `k` as one contiguous slice of i32.
    pub(crate) fn integers_out(&self, k: usize) -> Result<&'a mut [i32], DeviceError> {
        Ok(bytemuck::cast_slice_mut(self.flat_out(k)?))
    }

    /// Output `k` as one contiguous slice of i32; `None` if it is not requested.
    pub(crate) fn integers_out_if(&self, k: usize) -> Result<Option<&'a mut [i32]>, DeviceError> {
        self.launch.outs[k].as_ref().map(|_| self.integers_out(k)).transpose()
    }

    /// Input `i` as (start, end) pairs. `Err` unless they ascend, do not overlap and end within `rows`.
    pub(crate) fn spans(&self, i: usize, rows: usize) -> Result<&'a [[u32; 2]], DeviceError> {
        let o = &self.launch.ins[i];
        let len = o.spec.rows(self.launch.counts) as usize;
        // SAFETY: inside the arena; (S, 2) elements in C order are S pairs.
        let spans: &[[u32; 2]] = unsafe { std::slice::from_raw_parts(self.start(o)?.cast(), len) };
        let mut before = 0;
        for &[start, end] in spans {
            if start < before || end < start || end as usize > rows {
                return Err(self.refuse(format!("span {start}..{end} of {rows} rows")));
            }
            before = end;
        }
        Ok(spans)
    }

    /// Input `i` as the packs of an operand with `rows` rows, where word `first` is the first row of a pack. `Err` unless
    /// the packs follow one another and cover all rows.
    pub(crate) fn packs(&self, i: usize, first: usize, rows: usize) -> Result<Packs<'a>, DeviceError> {
        let o = &self.launch.ins[i];
        let len = o.spec.rows(self.launch.counts) as usize;
        // SAFETY: inside the arena; (P, 6) elements in C order are P arrays of six words, and every bit pattern is a u32.
        let words = unsafe { std::slice::from_raw_parts(self.start(o)?.cast(), len) };
        Packs::new(words, first, rows).map_err(|error| self.refuse(error.to_string()))
    }
}
