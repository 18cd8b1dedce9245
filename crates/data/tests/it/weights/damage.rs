//! Tests of damaged weight files: truncated, with false sizes, and mutated at random. Invariant: the result is an
//! error, never a panic, and memory stays in proportion to the file.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use plimsoll_data::weights::Weights;

use super::{file, folder, golden, refusal};

#[test]
fn truncated_safetensors_say_how_much_is_missing() {
    let bytes = fs::read(golden("esm2/model.safetensors")).expect("the golden is there");
    let check = |cut: &[u8], expected: &str| {
        assert_eq!(refusal(&file("cut", "w.safetensors", cut)), expected, "{} bytes", cut.len());
    };
    let again = "copy or download it again";
    check(
        &bytes[..300_000],
        &format!("`cut/w.safetensors` is truncated: expected 347420 bytes, found 300000; {again}"),
    );
    check(
        &bytes[..100],
        &format!("`cut/w.safetensors` is truncated: expected {} bytes, found 100; {again}", header_end(&bytes)),
    );
    check(&bytes[..5], &format!("`cut/w.safetensors` is truncated: expected 8 bytes, found 5; {again}"));
    let longer = [&bytes[..], b"xyz"].concat();
    check(&longer, &format!("`cut/w.safetensors` is damaged: 3 bytes follow its last tensor; {again}"));
}

fn header_end(bytes: &[u8]) -> u64 {
    let len = bytes.first_chunk().map(|len| u64::from_le_bytes(*len));
    8 + len.expect("a file has a header")
}

#[test]
fn lying_safetensors_headers() {
    let whole =
        |header: &str, data: &[u8]| [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat();
    let check = |bytes: &[u8], expected: &str| {
        let text = refusal(&file("lying", "w.safetensors", bytes));
        assert!(text.contains(expected), "{text}");
    };
    let mut huge = whole("{}", b"");
    huge[..8].copy_from_slice(&(1u64 << 60).to_le_bytes());
    check(&huge, "is damaged: a header of 1152921504606846976 bytes; at most 100000000 are accepted");
    huge[..8].copy_from_slice(&9_000_000u64.to_le_bytes());
    check(&huge, "is truncated: expected 9000008 bytes, found 10");
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    check(&huge, "is damaged: a header of 18446744073709551615 bytes");
    check(&whole("[]", b""), "the JSON in `lying/w.safetensors` is invalid");
    let overlap = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}"#;
    check(&whole(overlap, &[0; 6]), "invalid offset for tensor `b`");
    let short = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#;
    check(&whole(short, &[0; 4]), "invalid shape, data type, or offset for tensor");
    let overflow = r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}"#;
    check(&whole(overflow, &[0; 4]), "overflow");
    let strange = r#"{"a":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}}"#;
    check(
        &whole(strange, &[0; 1]),
        "tensor `a` in `lying/w.safetensors`: its element type F8_E4M3 is not supported",
    );
}

#[test]
fn truncated_zips_are_told() {
    let bytes = fs::read(golden("head.pth")).expect("the golden is there");
    let expected = "`zip/head.pth` is damaged: the zip directory at its end is missing, so the file is cut short or no \
                    zip file; copy or download it again";
    for cut in [bytes.len() - 1, bytes.len() / 2, 100, 10] {
        assert_eq!(refusal(&file("zip", "head.pth", &bytes[..cut])), expected, "{cut} bytes");
    }
    // Bytes are missing in the middle: the zip directory at the end is complete, but its offsets are wrong.
    let hole = [&bytes[..8_000], &bytes[12_000..]].concat();
    let text = refusal(&file("zip", "head.pth", &hole));
    assert!(text.contains("is damaged") || text.contains("is truncated"), "{text}");
}

/// Environment variable of the child process that mutates files. In a separate process, peak resident memory counts
/// this test only.
const CHILD: &str = "PLIMSOLL_TEST_MUTATES";

#[test]
fn mutated_files_never_panic() {
    if std::env::var_os(CHILD).is_some() {
        return mutate_files();
    }
    let test = std::env::current_exe().expect("the test has a path");
    let mut child = Command::new(test);
    child.args(["--exact", "weights::damage::mutated_files_never_panic", "--nocapture"]).env(CHILD, "1");
    let output = child.output().expect("the test can start itself");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn mutate_files() {
    let folder = folder("mutated");
    let small = small_safetensors(&folder);
    let before = peak_resident_kib();
    for (name, bytes) in [
        ("head.pth", fs::read(golden("head.pth")).expect("the golden is there")),
        ("w.safetensors", fs::read(&small).expect("it was written")),
    ] {
        let path = folder.join(name);
        let mut random = Random(0x5eed);
        let mut opened = 0;
        for _ in 0..3_000 {
            overwrite(&path, &random.mutate(&bytes)).expect("it writes");
            opened += usize::from(read_everything(&path));
        }
        // Both outcomes must occur: most bytes are tensor values, and changing them leaves a valid file.
        assert!((100..2_900).contains(&opened), "{name}: {opened} opened");
    }
    // The files are smaller than 24 kB, so an allocation of an unchecked size from a header would exceed the limit.
    let grown = peak_resident_kib() - before;
    assert!(grown < 16 * 1024, "peak resident memory grew by {grown} KiB");
}

/// Replaces the contents of a file without truncating it to zero first. After such a truncation ext4 writes the file to
/// disk when it is closed, which makes thousands of cases slow.
fn overwrite(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let file = fs::File::options().write(true).create(true).truncate(false).open(path)?;
    file.write_all_at(bytes, 0)?;
    file.set_len(bytes.len() as u64)
}

fn small_safetensors(folder: &Path) -> std::path::PathBuf {
    use plimsoll_data::weights::{StoredAs, TensorData, write_safetensors};
    let data: Vec<f32> = (0..64).map(|value| value as f32).collect();
    let names: Vec<String> = (0..8).map(|number| format!("layer.{number}.weight")).collect();
    let tensors: Vec<_> =
        names.iter().map(|name| TensorData { name, shape: &[4, 2], data: &data[..8] }).collect();
    let path = folder.join("small.safetensors");
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    write_safetensors(&path, &tensors, &metadata, StoredAs::F32).expect("it writes");
    path
}

/// Opens a file and reads every tensor; returns whether it could be opened.
fn read_everything(path: &Path) -> bool {
    let Ok(weights) = Weights::open(path) else { return false };
    let len = fs::metadata(path).expect("the file is there").len();
    for tensor in weights.tensors() {
        assert!(tensor.offset() <= len && tensor.bytes() <= len, "{tensor:?}");
        let name = tensor.name();
        let count = tensor.elements();
        if tensor.dtype().is_float() {
            weights.read_f32(name, 0..count, &mut vec![0.0; count as usize]).expect("it lies inside the file");
        } else {
            weights.read_i64(name, 0..count, &mut vec![0; count as usize]).expect("it lies inside the file");
        }
    }
    true
}

/// A SplitMix64 generator, so that the mutations are equal on every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// A copy with one to four changed bytes, sometimes truncated. Three of four changes are in the first or last 3 kB,
    /// where pickle, header and directory are.
    fn mutate(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut out = bytes.to_vec();
        for _ in 0..=self.below(4) {
            let near = bytes.len().min(3_000);
            let at = match self.below(4) {
                0 => self.below(bytes.len()),
                1 => bytes.len() - 1 - self.below(near),
                _ => self.below(near),
            };
            out[at] = match self.below(3) {
                0 => 0xff,
                1 => out[at] ^ (1 << self.below(8)),
                _ => self.next() as u8,
            };
        }
        if self.below(16) == 0 {
            out.truncate(self.below(bytes.len()));
        }
        out
    }
}

/// Peak resident memory of the process in KiB; 0 on systems without `/proc/self/status`.
fn peak_resident_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0)
}
