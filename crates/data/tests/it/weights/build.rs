//! Builds zip files and pickles byte by byte. Invariant: the builders share no code with the readers under test.

/// Options of a zip file: the compression method in its headers (0: stored; the data is never compressed), and whether
/// all records are zip64.
pub(super) struct ZipFile {
    pub(super) method: u16,
    pub(super) wide: bool,
}

pub(super) const STORED: ZipFile = ZipFile { method: 0, wide: false };

impl ZipFile {
    /// Bytes of the file with these entries (name, data), in this order.
    pub(super) fn of(&self, entries: &[(&str, &[u8])]) -> Vec<u8> {
        let mut out = Vec::new();
        let mut directory = Vec::new();
        for (name, bytes) in entries {
            let header = out.len() as u64;
            let size = bytes.len() as u64;
            let sizes = if self.wide { [u32::MAX; 2] } else { [size as u32; 2] };
            let common = [20u16, 0, self.method, 0, 0]; // version, flags, method, time, date
            out.extend(0x0403_4b50u32.to_le_bytes());
            out.extend(common.iter().flat_map(|v| v.to_le_bytes()));
            out.extend([0u32, sizes[0], sizes[1]].iter().flat_map(|v| v.to_le_bytes()));
            // torch pads with an extra field. With it, the local header and the directory entry differ in length.
            out.extend([name.len() as u16, 6].iter().flat_map(|v| v.to_le_bytes()));
            out.extend(name.as_bytes());
            out.extend([0x46, 0x42, 2, 0, 0x5a, 0x5a]);
            out.extend(*bytes);
            let mut extra = Vec::new();
            if self.wide {
                extra.extend([1u16, 24].iter().flat_map(|v| v.to_le_bytes()));
                extra.extend([size, size, header].iter().flat_map(|v| v.to_le_bytes()));
            }
            let place = if self.wide { u32::MAX } else { header as u32 };
            directory.extend(0x0201_4b50u32.to_le_bytes());
            directory.extend(20u16.to_le_bytes());
            directory.extend(common.iter().flat_map(|v| v.to_le_bytes()));
            directory.extend([0u32, sizes[0], sizes[1]].iter().flat_map(|v| v.to_le_bytes()));
            let lengths = [name.len() as u16, extra.len() as u16, 0, 0, 0];
            directory.extend(lengths.iter().flat_map(|v| v.to_le_bytes()));
            directory.extend([0u32, place].iter().flat_map(|v| v.to_le_bytes()));
            directory.extend(name.as_bytes());
            directory.extend(extra);
        }
        self.finish(out, &directory, entries.len() as u64)
    }

    fn finish(&self, mut out: Vec<u8>, directory: &[u8], count: u64) -> Vec<u8> {
        let start = out.len() as u64;
        let size = directory.len() as u64;
        out.extend(directory);
        if self.wide {
            let end64 = out.len() as u64;
            out.extend(0x0606_4b50u32.to_le_bytes());
            out.extend(44u64.to_le_bytes());
            out.extend([45u16; 2].iter().flat_map(|v| v.to_le_bytes()));
            out.extend([0u32; 2].iter().flat_map(|v| v.to_le_bytes()));
            out.extend([count, count, size, start].iter().flat_map(|v| v.to_le_bytes()));
            out.extend(0x0706_4b50u32.to_le_bytes());
            out.extend(0u32.to_le_bytes());
            out.extend(end64.to_le_bytes());
            out.extend(1u32.to_le_bytes());
        }
        let (count, size, start) =
            if self.wide { (u16::MAX, u32::MAX, u32::MAX) } else { (count as u16, size as u32, start as u32) };
        out.extend(0x0605_4b50u32.to_le_bytes());
        out.extend([0, 0, count, count].iter().flat_map(|v: &u16| v.to_le_bytes()));
        out.extend([size, start].iter().flat_map(|v| v.to_le_bytes()));
        out.extend(0u16.to_le_bytes());
        out
    }
}

/// A pickle under construction, protocol 2 as torch writes it.
pub(super) struct Pickler(Vec<u8>);

impl Pickler {
    pub(super) fn new() -> Pickler {
        Pickler(vec![0x80, 2])
    }

    /// Appends opcodes unchanged.
    pub(super) fn raw(mut self, bytes: &[u8]) -> Pickler {
        self.0.extend(bytes);
        self
    }

    pub(super) fn global(self, module: &str, name: &str) -> Pickler {
        self.raw(format!("c{module}\n{name}\n").as_bytes())
    }

    pub(super) fn text(self, text: &str) -> Pickler {
        let len = (text.len() as u32).to_le_bytes();
        self.raw(b"X").raw(&len).raw(text.as_bytes())
    }

    /// Appends LONG1 with eight bytes, which any i64 fits.
    pub(super) fn int(self, value: i64) -> Pickler {
        self.raw(&[0x8a, 8]).raw(&value.to_le_bytes())
    }

    pub(super) fn tuple(self, sizes: &[u64]) -> Pickler {
        let pickler = sizes.iter().fold(self.raw(b"("), |pickler, &size| pickler.int(size as i64));
        pickler.raw(b"t")
    }

    /// Appends a call of `torch._utils._rebuild_tensor_v2` for a tensor in the storage `view.key`.
    pub(super) fn tensor(self, view: &View<'_>) -> Pickler {
        self.global("torch._utils", "_rebuild_tensor_v2")
            .raw(b"((")
            .text("storage")
            .global("torch", view.class)
            .text(view.key)
            .text("cpu")
            .int(view.elements)
            .raw(b"tQ")
            .int(view.offset)
            .tuple(view.shape)
            .tuple(view.stride)
            .raw(b"\x89")
            .global("collections", "OrderedDict")
            .raw(b")RtR")
    }

    /// Appends STOP and returns the pickle.
    pub(super) fn stop(self) -> Vec<u8> {
        self.raw(b".").0
    }
}

/// Storage, offset, shape and strides of a tensor.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) class: &'a str,
    pub(super) key: &'a str,
    pub(super) elements: i64,
    pub(super) offset: i64,
    pub(super) shape: &'a [u64],
    pub(super) stride: &'a [u64],
}

impl<'a> View<'a> {
    /// An (R, C) tensor that begins at the start of the f32 storage `key`, which has R * C elements.
    pub(super) fn rows(key: &'a str, shape: &'a [u64; 2], stride: &'a [u64; 2]) -> View<'a> {
        let elements = (shape[0] * shape[1]) as i64;
        View { class: "FloatStorage", key, elements, offset: 0, shape, stride }
    }
}

/// A torch file with a pickle and the storages `0`, `1`, ...
pub(super) fn torch_file(pickle: &[u8], storages: &[&[u8]]) -> Vec<u8> {
    let names: Vec<String> = (0..storages.len()).map(|key| format!("archive/data/{key}")).collect();
    let mut entries: Vec<(&str, &[u8])> = vec![("archive/data.pkl", pickle), ("archive/byteorder", b"little")];
    entries.extend(names.iter().map(String::as_str).zip(storages.iter().copied()));
    STORED.of(&entries)
}

/// A torch file with a state dict of one tensor `w`.
pub(super) fn one_tensor(view: &View<'_>, storage: &[u8]) -> Vec<u8> {
    let pickle = Pickler::new().raw(b"}").text("w").tensor(view).raw(b"s").stop();
    torch_file(&pickle, &[storage])
}

/// Little-endian f32 values 0, 1, 2, ...
pub(super) fn counting(count: usize) -> Vec<u8> {
    (0..count).flat_map(|value| (value as f32).to_le_bytes()).collect()
}
