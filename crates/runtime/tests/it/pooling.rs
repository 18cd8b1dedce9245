//! Test of the example `max_pooling`: the pooled rows of the golden proteins equal the column maxima of their
//! reference hidden states.

use crate::max_pooling::max_pooled;
use plimsoll_data::weights::{HubEnv, Weights};
use plimsoll_runtime::{EncoderModel, Precision, Settings, Silent};
use plimsoll_testing::fixture;

/// Hidden size of the golden model.
const WIDTH: usize = 40;

#[test]
fn rows_are_maxima_of_the_reference_states() {
    let folder = fixture("goldens/esm2");
    let model = EncoderModel::open(&folder.display().to_string(), &HubEnv::from_process(), &mut Silent);
    let model = model.expect("a golden model");
    let settings = |threads, tokens| Settings {
        threads,
        tokens: Some(tokens),
        precision: Some(Precision::F32),
        ..Settings::default()
    };
    let pooled = |settings: &Settings| {
        let mut rows: Vec<(String, Vec<f32>)> = vec![];
        let keep = |id: &str, row: &[f32]| rows.push((id.to_owned(), row.to_vec()));
        max_pooled(&model, &[folder.join("proteins.faa")], settings, keep).expect("pooled");
        rows
    };
    let rows = pooled(&settings(1, 1024));
    let golden = Weights::open(&folder.join("golden.safetensors")).expect("golden values");
    let mut compared = 0;
    for (i, (id, row)) in rows.iter().enumerate() {
        let name = format!("p{i}.hidden");
        let Ok(tensor) = golden.tensor(&name) else { continue };
        let mut states = vec![0.0; tensor.elements() as usize];
        golden.read_f32(&name, 0..states.len() as u64, &mut states).expect("read");
        let residues = &states[WIDTH..states.len() - WIDTH];
        for (column, found) in row.iter().enumerate() {
            let most = residues.iter().skip(column).step_by(WIDTH).copied().fold(f32::NEG_INFINITY, f32::max);
            assert!((found - most).abs() < 1e-5, "{id}, column {column}: {found}, not {most}");
        }
        compared += 1;
    }
    assert!(compared > 5, "{compared} proteins have reference states");
    // Another number of threads and tokens per step gives identical bits in the same order.
    assert_eq!(rows, pooled(&settings(4, 2048)));
}
