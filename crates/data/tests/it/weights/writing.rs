//! Tests of written safetensors files: this crate and the safetensors crate read them back, and equal input gives equal
//! bytes.

use std::collections::BTreeMap;
use std::fs;

use plimsoll_data::weights::{FileDType, StoredAs, TensorData, Weights, safetensors_bytes, write_safetensors};

use super::{all, folder, message};

const VALUES: [f32; 6] = [0.0, -1.5, 3.140_625, 65_504.0, f32::INFINITY, 1e-7];

fn tensors() -> [TensorData<'static>; 2] {
    [
        TensorData { name: "z \"quoted\" é", shape: &[2, 3], data: &VALUES },
        TensorData { name: "a", shape: &[], data: &VALUES[1..2] },
    ]
}

fn metadata() -> BTreeMap<String, String> {
    [("b", "2"), ("a", "1"), ("quote", "\"")].map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

#[test]
fn files_round_trip() {
    let path = folder("round").join("w.safetensors");
    for (stored, dtype) in [(StoredAs::F32, FileDType::F32), (StoredAs::F16, FileDType::F16)] {
        write_safetensors(&path, &tensors(), &metadata(), stored).expect("it writes");
        let bytes = fs::read(&path).expect("it is there");
        assert_eq!(bytes, safetensors_bytes(&tensors(), &metadata(), stored).expect("it writes"));
        let oracle = safetensors::SafeTensors::deserialize(&bytes).expect("the crate reads it");
        assert_eq!(oracle.tensor("z \"quoted\" é").expect("it is there").shape(), [2, 3]);
        let weights = Weights::open(&path).expect("we read it");
        assert_eq!(weights.metadata(), &metadata());
        assert_eq!(weights.tensor("a").map(|a| (a.dtype(), a.shape().len())).ok(), Some((dtype, 0)));
        let values = all(&weights, "z \"quoted\" é");
        match stored {
            StoredAs::F32 => assert_eq!(values, VALUES),
            StoredAs::F16 => {
                assert_eq!(values, [0.0, -1.5, 3.140_625, 65_504.0, f32::INFINITY, 2f32.powi(-23)])
            }
        }
    }
    let left: Vec<_> = fs::read_dir(path.parent().expect("a folder")).expect("it lists").collect();
    assert_eq!(left.len(), 1, "no temporary stays");
}

#[test]
fn what_cannot_be_written_is_refused() {
    let check = |tensor: TensorData<'_>, expected: &str| {
        let twice = [tensors()[1], tensor];
        let error = safetensors_bytes(&twice, &BTreeMap::new(), StoredAs::F16).expect_err("it must not write");
        assert_eq!(message(&error), expected);
    };
    check(tensors()[1], "cannot write tensor `a`: the name is given twice or is reserved");
    check(
        TensorData { name: "__metadata__", ..tensors()[1] },
        "cannot write tensor `__metadata__`: the name is given twice or is reserved",
    );
    check(
        TensorData { name: "b", shape: &[2], data: &VALUES },
        "cannot write tensor `b`: shape [2] does not hold 6 values",
    );
    check(
        TensorData { name: "b", shape: &[1], data: &[65_520.0] },
        "cannot write tensor `b`: 65520 is too large for F16; write it as F32",
    );
    let path = folder("refused").join("no/such/folder/w.safetensors");
    let error = write_safetensors(&path, &tensors(), &BTreeMap::new(), StoredAs::F32).expect_err("no folder");
    assert_eq!(
        message(&error),
        "cannot write `refused/no/such/folder/w.safetensors`: No such file or directory (os error 2)"
    );
}
