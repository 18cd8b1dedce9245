//! Weight files: safetensors, torch zip files and pickles, and indexes of shards. Invariant: tensors of
//! accepted files lie within the file and are readable, the safetensors crate agrees, no file outside of the
//! folder is opened, and no instruction of a pickle is executed.

use super::{CaseResult, FuzzFormat, Seeds, check_error, measured};
use plimsoll_data::weights::{
    ObjectKind, PickleValue, PtObject, StoredTensor, Weights, WeightsError, read_pt_object,
};
use safetensors::SafeTensors;
use std::fs;
use std::path::Path;

/// Number of elements that are read at a time.
const PART: u64 = 4096;
/// Constant part of the memory limit in bytes. A header may have 16 MiB, but the cases have at most 1 MiB.
const PLUS: u64 = 2 << 20;
/// Memory limit per byte of input: an opcode of one byte makes a node, a stack slot and a memo entry, in tables
/// that grow by doubling.
const TIMES: u64 = 192;
/// The file that an executed payload would create.
const MARKER: &str = "it-was-run";

/// The formats of this file.
pub fn formats(root: &Path, folder: &Path) -> Vec<FuzzFormat> {
    let head = fs::read(root.join("fixtures/goldens/head.pth")).unwrap_or_default();
    let zips = vec![head, torch(&state_dict()), torch(b"}."), zip(&[("a/x", b"y"), ("a/data.pkl", b"}.")])];
    let outside = folder.join("outside.safetensors").display().to_string();
    let shards = vec![
        ("s1.safetensors", shard("a", 1.0)),
        ("s2.safetensors", shard("b", 2.0)),
        // This file is one folder up, where an index must not lead.
        ("../outside.safetensors", shard("a", 1.0)),
    ];
    let headers = Seeds { corpus: headers(), words: header_words() };
    let zips = Seeds { corpus: zips, words: zip_words() };
    let pickles = Seeds { corpus: pickles(), words: opcodes() };
    let indexes = Seeds { corpus: indexes(), words: index_words(&outside) };
    let header = FuzzFormat::new("safetensors", "w.safetensors", headers, check_safetensors);
    let torch_pickle = FuzzFormat::new("torch pickle", "w.pt", pickles.clone(), check_torch);
    let index = FuzzFormat::new("index.json", "w.index.json", indexes, check_index);
    vec![
        FuzzFormat { encode: safetensors, ..header },
        FuzzFormat::new("torch zip", "w.pt", zips, check_torch),
        FuzzFormat { encode: torch, ..torch_pickle },
        FuzzFormat::new("bare pickle", "w.bin", pickles, check_torch),
        FuzzFormat { other_files: shards, ..index },
    ]
}

/// A safetensors file with one tensor of one element.
fn shard(name: &str, value: f32) -> Vec<u8> {
    let header = format!(r#"{{"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#);
    safetensors(&[header.as_bytes(), &value.to_le_bytes()].concat())
}

/// Headers with values; [`safetensors()`] prepends the length of the header.
fn headers() -> Vec<Vec<u8>> {
    let members: [(&str, usize); 5] = [
        ("{}", 0),
        (r#"{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}"#, 16),
        (
            r#"{"__metadata__":{"format":"pt","x":"\u001b"},"b":{"dtype":"F16","shape":[3],"data_offsets":[0,6]},"c":{"dtype":"I64","shape":[],"data_offsets":[6,14]}}"#,
            14,
        ),
        (
            r#"{"e":{"dtype":"F64","shape":[0,4],"data_offsets":[0,0]},"f":{"dtype":"BOOL","shape":[1,1,3],"data_offsets":[0,3]}}"#,
            3,
        ),
        (
            r#"{"g":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"h":{"dtype":"I8","shape":[2],"data_offsets":[4,6]},"i":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[6,7]}}"#,
            7,
        ),
    ];
    members.map(|(header, bytes)| [header.as_bytes(), &vec![0x3f; bytes]].concat()).to_vec()
}

fn header_words() -> Vec<Vec<u8>> {
    let words = [
        "\"dtype\":",
        "\"F4\"",
        "\"F6_E2M3\"",
        "\"U64\"",
        "\"C64\"",
        "\"shape\":[0,9223372036854775807,9223372036854775807]",
        "\"shape\":[9223372036854775807,2]",
        "\"data_offsets\":[16,0]",
        "\"data_offsets\":[0,18446744073709551615]",
        ",",
        ":",
        "{",
        "}",
        "[",
        "]",
        "\"__metadata__\":{\"a\":1},",
        "\"__metadata__\":{},",
        "\"../../x\"",
        "\"\\u0000\"",
        "\"\\u001b[2J\\nerror: none\":{\"dtype\":\"F8_E5M2\",\"shape\":[0],\"data_offsets\":[0,0]},",
        "\\ud800",
        "\"\u{1b}\"",
        "\"a\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},",
        "[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]",
        "    ",
    ];
    words.map(|word| word.as_bytes().to_vec()).to_vec()
}

/// Prepends the length of the header, which ends with the last brace.
fn safetensors(header_and_values: &[u8]) -> Vec<u8> {
    let len = header_and_values.iter().rposition(|&b| b == b'}').map_or(0, |at| at as u64 + 1);
    [&len.to_le_bytes(), header_and_values].concat()
}

/// Pickles of state dicts, a module, plain values, and a call of `os.system`.
fn pickles() -> Vec<Vec<u8>> {
    let module =
        b"\x80\x02c__main__\nM\nq\0)\x81}(X\x0b\0\0\0_parameters}X\x01\0\0\0wNsX\x08\0\0\0_modules}ub.";
    let values = b"\x80\x04\x95\0\0\0\0\0\0\0\0}\x94(\x8c\x01a\x94]\x94(K\x01M\x01\x02G?\xf0\0\0\0\0\0\0e\x8c\x01b\x94N\x88\x86\x94u.";
    let payload = [&b"\x80\x02"[..], &call("os", "system"), b"."].concat();
    vec![state_dict(), state_dict(), module.to_vec(), values.to_vec(), payload]
}

/// Pickle of a state dict: `w` of shape (2, 2) and `v` of shape (3), in one storage.
fn state_dict() -> Vec<u8> {
    [&b"\x80\x02}("[..], &text("w"), &tensor(0, &[2, 2], &[2, 1]), &text("v"), &tensor(1, &[3], &[1]), b"u."]
        .concat()
}

/// Instructions that rebuild a tensor from the storage `0`.
fn tensor(offset: u8, shape: &[u8], stride: &[u8]) -> Vec<u8> {
    [
        &b"ctorch._utils\n_rebuild_tensor_v2\n(("[..],
        &text("storage"),
        b"ctorch\nFloatStorage\n",
        &text("0"),
        &text("cpu"),
        b"K\x04tQK",
        &[offset],
        &size_tuple(shape),
        &size_tuple(stride),
        b"\x89ccollections\nOrderedDict\n)RtR",
    ]
    .concat()
}

/// Instructions that push a tuple of sizes.
fn size_tuple(sizes: &[u8]) -> Vec<u8> {
    let pushes: Vec<u8> = sizes.iter().flat_map(|&size| [b'K', size]).collect();
    [b"(", &pushes[..], b"t"].concat()
}

/// Instruction that pushes a string.
fn text(text: &str) -> Vec<u8> {
    [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

/// Instructions that call `module.name("touch MARKER")`.
fn call(module: &str, name: &str) -> Vec<u8> {
    [format!("c{module}\n{name}\n(").as_bytes(), &text(&format!("touch {MARKER}")), b"tR"].concat()
}

/// Instructions with their arguments, valid and invalid.
const OPCODES: &[&[u8]] = &[
    b"N",
    b"\x88",
    b"\x89",
    b"K\x05",
    b"M\xff\xff",
    b"J\xff\xff\xff\xff",
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x8a\0",
    b"\x8b\xff\xff\xff\x7f",
    b"G\x7f\xf8\0\0\0\0\0\0",
    b"X\xff\xff\xff\xff",
    b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff",
    b"]",
    b"}",
    b")",
    b"\x8f",
    b"(",
    b"t",
    b"l",
    b"d",
    b"\x85",
    b"\x86",
    b"\x87",
    b"\x91",
    b"a",
    b"e",
    b"s",
    b"u",
    b"\x90",
    b"0",
    b"1",
    b"2",
    b"q\0",
    b"h\0",
    b"r\0\0\0\0",
    b"j\xff\xff\xff\xff",
    b"\x94",
    b"\x93",
    b"Q",
    b"R",
    b"\x81",
    b"b",
    b".",
    b"\x82\x01",
    b"P0\n",
    b"I1\n",
    b"\x92",
    b"o",
    b"i",
    b"\x80\x05",
    b"ctorch\nload\n",
    b"ctorch\nSize\n",
    b"cbuiltins\nset\n",
    b"ctorch._utils\n_rebuild_parameter\n",
    b"c__main__\nM\n",
    b"c\x1b[2J\nx\n",
    b"cos\nsystem\n",
    b"X\x06\0\0\0../../x",
    b"X\x05\0\0\0\x1b[2J\n",
    b"(ios\nsystem\n",
    b"ccopyreg\n_reconstructor\n",
];

fn opcodes() -> Vec<Vec<u8>> {
    let mut words: Vec<Vec<u8>> = OPCODES.iter().map(|word| word.to_vec()).collect();
    for (module, name) in [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("subprocess", "Popen"),
        ("__main__", "f"),
    ] {
        words.push(call(module, name));
    }
    let huge = [0x8a, 8, 0, 0, 0, 0, 0, 0, 0, 0x40];
    words.push([b"(K\0", &huge[..], &huge, b"t"].concat());
    words.push(tensor(0, &[0, 2], &[1, 1]));
    // An empty tensor whose other sizes have a product that overflows.
    words.push(replaced(&state_dict(), &size_tuple(&[2, 2]), &[b"(K\0", &huge[..], &huge, b"t"].concat()));
    words.push(tensor(0, &[2, 2], &[1, 2]));
    words
}

/// `bytes` with the first occurrence of `old` replaced by `new`.
fn replaced(bytes: &[u8], old: &[u8], new: &[u8]) -> Vec<u8> {
    match bytes.windows(old.len()).position(|window| window == old) {
        Some(at) => [&bytes[..at], new, &bytes[at + old.len()..]].concat(),
        None => bytes.to_vec(),
    }
}

/// A torch zip file with this pickle and a storage of four floats.
fn torch(pickle: &[u8]) -> Vec<u8> {
    zip(&[("archive/data.pkl", pickle), ("archive/byteorder", b"little"), ("archive/data/0", &[0x3f; 16])])
}

/// A zip file with uncompressed entries.
fn zip(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let mut file = vec![];
    let mut directory = vec![];
    for (name, bytes) in entries {
        let at = file.len() as u32;
        let size = bytes.len() as u32;
        let name_len = name.len() as u16;
        // Version, flags, method, time, date; CRC and sizes; lengths of the name and the extra field.
        let common = [le16(&[20, 0, 0, 0, 0]), le32(&[0, size, size]), le16(&[name_len, 0])].concat();
        file.extend([b"PK\x03\x04", &common[..], name.as_bytes(), bytes].concat());
        let place = [le16(&[0, 0, 0]), le32(&[0, at])].concat();
        directory.extend([b"PK\x01\x02", &le16(&[20])[..], &common, &place, name.as_bytes()].concat());
    }
    let count = entries.len() as u16;
    let end =
        [le16(&[0, 0, count, count]), le32(&[directory.len() as u32, file.len() as u32]), le16(&[0])].concat();
    [&file[..], &directory, b"PK\x05\x06", &end].concat()
}

/// Little-endian bytes of 16-bit numbers.
fn le16(values: &[u16]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Little-endian bytes of 32-bit numbers.
fn le32(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn zip_words() -> Vec<Vec<u8>> {
    let words: [&[u8]; 12] = [
        b"PK\x03\x04",
        b"PK\x01\x02",
        b"PK\x05\x06",
        b"PK\x06\x06",
        b"PK\x06\x07",
        b"\xff\xff\xff\xff",
        b"\xff\xff",
        b"../",
        b"/data.pkl",
        b"/constants.pkl",
        b"\x01\0\x18\0\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x1b[2J\n",
    ];
    words.map(<[u8]>::to_vec).to_vec()
}

fn indexes() -> Vec<Vec<u8>> {
    let both = br#"{"metadata":{"total_size":8},"weight_map":{"a":"s1.safetensors","b":"s2.safetensors"}}"#;
    vec![both.to_vec(), br#"{"weight_map":{"a":"s1.safetensors"}}"#.to_vec(), br#"{"weight_map":{}}"#.to_vec()]
}

fn index_words(outside: &str) -> Vec<Vec<u8>> {
    let words = [
        "../outside.safetensors",
        outside,
        "./s1.safetensors",
        "x/../../outside.safetensors",
        "s2.safetensors",
        "..",
        ".",
        "/",
        "\\u0000",
        "\\u001b[2J\\n",
        "w.index.json",
        "\"a\":\"../outside.safetensors\",",
        "\"weight_map\":",
        ",",
        ":",
        "\"",
        "{",
        "}",
        "\\\\",
        "\\u002e./outside.safetensors",
        "\"c\":\"s1.safetensors\",",
    ];
    words.iter().map(|word| word.as_bytes().to_vec()).collect()
}

/// Reads a case, and compares its tensors with those of the safetensors crate.
fn check_safetensors(path: &Path, bytes: &[u8]) -> Result<CaseResult, String> {
    let (read, peak) = measured(|| read_all(path, bytes.len() as u64));
    let theirs = SafeTensors::deserialize(bytes);
    let accepted = match (read, theirs) {
        (Ok(tensors), Ok(theirs)) => {
            let mut wanted: Vec<_> = theirs
                .iter()
                .map(|(n, t)| (n.to_owned(), t.shape().iter().map(|&s| s as u64).collect::<Vec<u64>>()))
                .collect();
            wanted.sort();
            let found: Vec<_> = tensors?.iter().map(|t| (t.name().to_owned(), t.shape().to_vec())).collect();
            if found != wanted {
                return Err(format!("tensors {found:?}, of the reference {wanted:?}"));
            }
            true
        }
        (Ok(_), Err(error)) => return Err(format!("it is read, and the reference says {error}")),
        (Err(error), theirs) => {
            check_error(&error, path)?;
            // The reader supports fewer element types than the reference.
            if theirs.is_ok() && !matches!(error, WeightsError::Unsupported { .. }) {
                return Err(format!("the reference reads it; ours says {error}"));
            }
            false
        }
    };
    Ok(CaseResult { accepted, peak, allowed: PLUS + TIMES * bytes.len() as u64 })
}

/// Reads a case as weights and as an object; the payload must not have been executed.
fn check_torch(path: &Path, bytes: &[u8]) -> Result<CaseResult, String> {
    let (read, first) = measured(|| read_all(path, bytes.len() as u64));
    let (object, second) = measured(|| read_pt_object(path).map(|object| walk(&object)));
    if Path::new(MARKER).exists() {
        return Err("it was run".to_owned());
    }
    let accepted = match read {
        Ok(tensors) => tensors.map(|_| true)?,
        Err(error) => check_error(&error, path).map(|()| false)?,
    };
    if let Err(error) = object {
        check_error(&error, path)?;
    }
    Ok(CaseResult { accepted, peak: first.max(second), allowed: PLUS + TIMES * bytes.len() as u64 })
}

/// Opens an index; all its files must be in its folder.
fn check_index(path: &Path, bytes: &[u8]) -> Result<CaseResult, String> {
    let (read, peak) = measured(|| Weights::open(path));
    let accepted = match read {
        Ok(weights) => {
            let folder = path.parent().and_then(|folder| folder.canonicalize().ok()).unwrap_or_default();
            for file in weights.files() {
                if !file.canonicalize().is_ok_and(|file| file.starts_with(&folder)) {
                    return Err(format!("it opened {}", file.display()));
                }
            }
            true
        }
        // A shard can be at fault, and the error then names the shard.
        Err(error) if error.to_string().contains("s1.safetensors") => false,
        Err(error) if error.to_string().contains("s2.safetensors") => false,
        Err(error) => check_error(&error, path).map(|()| false)?,
    };
    Ok(CaseResult { accepted, peak, allowed: PLUS + TIMES * bytes.len() as u64 })
}

/// Opens a file and reads every tensor completely. The inner error is a finding.
fn read_all(path: &Path, len: u64) -> Result<Result<Vec<StoredTensor>, String>, WeightsError> {
    let weights = Weights::open(path)?;
    let tensors: Vec<StoredTensor> = weights.tensors().cloned().collect();
    for tensor in &tensors {
        if tensor.offset() > len || tensor.bytes() > len {
            return Ok(Err(format!("{tensor:?} in a file of {len} bytes")));
        }
        let mut floats = [0.0; PART as usize];
        let mut integers = [0; PART as usize];
        for start in (0..tensor.elements()).step_by(PART as usize) {
            let part = start..tensor.elements().min(start + PART);
            let count = (part.end - part.start) as usize;
            let done = if tensor.dtype().is_float() {
                weights.read_f32(tensor.name(), part, &mut floats[..count])
            } else {
                weights.read_i64(tensor.name(), part, &mut integers[..count])
            };
            if let Err(error) = done {
                return Ok(Err(format!("a tensor of an open file does not read: {error}")));
            }
        }
    }
    Ok(Ok(tensors))
}

/// Visits up to 1000 values of an object and reads its tensors.
fn walk(object: &PtObject) -> usize {
    let mut waiting: Vec<PickleValue<'_>> = vec![object.root()];
    let mut seen = 0;
    while let Some(value) = waiting.pop() {
        seen += 1;
        if seen > 1000 {
            break;
        }
        match value.kind() {
            ObjectKind::Tensor => drop(object.read_f32(value)),
            ObjectKind::Dict(_) => {
                waiting.extend(value.entries().take(8).flat_map(|(key, value)| [key, value]))
            }
            ObjectKind::List(_) | ObjectKind::Tuple(_) | ObjectKind::Set(_) => {
                waiting.extend(value.items().take(8))
            }
            ObjectKind::None
            | ObjectKind::Bool(_)
            | ObjectKind::Int(_)
            | ObjectKind::BigInt
            | ObjectKind::Float(_)
            | ObjectKind::Str(_)
            | ObjectKind::Bytes(_)
            | ObjectKind::Storage
            | ObjectKind::Object(_)
            | ObjectKind::Global(_) => {}
        }
    }
    seen
}
