//! Embeddings with a custom pooling: the maximum of each hidden unit over the residues of a protein, computed by a
//! [`Session`] within the memory budget.
//!
//! ```sh
//! cargo run --release -p plimsoll-runtime --example max_pooling -- facebook/esm2_t6_8M_UR50D proteins.fa > rows.tsv
//! ```

use plimsoll_data::sequence::{Reader, Record};
use plimsoll_models::Output;
use plimsoll_runtime::session::{Next, Push, Session, SessionModel, SessionRequest, SessionRow};
use plimsoll_runtime::{Model, RuntimeError, Settings};
use std::collections::VecDeque;
use std::path::PathBuf;

/// Number of tokens of the longest accepted protein, including BOS and EOS.
const LONGEST: u64 = 1024;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(model), Some(input)) = (arguments.next(), arguments.next()) else {
        return Err("usage: max_pooling MODEL PROTEINS.fa".into());
    };
    max_pooled(&Model::open(&model)?, &[input.into()], &Settings::default(), |id, row| {
        let columns: Vec<String> = row.iter().map(f32::to_string).collect();
        println!("{id}\t{}", columns.join("\t"));
    })?;
    Ok(())
}

/// Calls `take` with the id and the pooled row of each protein, in the order of the input.
///
/// # Errors
/// An input file cannot be read, a protein has more than [`LONGEST`] tokens, or the model does not fit in memory.
pub fn max_pooled(
    model: &dyn SessionModel,
    inputs: &[PathBuf],
    settings: &Settings,
    mut take: impl FnMut(&str, &[f32]),
) -> Result<(), RuntimeError> {
    let outputs = vec![Output::Hidden];
    let request = SessionRequest {
        outputs,
        longest: Some(LONGEST),
        settings: settings.clone(),
        ..SessionRequest::default()
    };
    let planned = Session::plan(&[model], &request)?;
    eprintln!("{}", planned.ledger());
    let mut session = planned.start()?;
    let mut ids: VecDeque<String> = VecDeque::new();
    let mut emit = |row: SessionRow<'_>, ids: &mut VecDeque<String>| {
        let id = ids.pop_front().unwrap_or_default();
        take(&id, &maximum(&row));
    };
    let mut reader = Reader::open(inputs)?;
    let mut record = Record::default();
    while reader.read_into(&mut record)? {
        // A full session accepts nothing until a row is taken from it.
        while session.push(&record.seq)? == Push::Full {
            if let Next::Ready(row) = session.next()? {
                emit(row, &mut ids);
            }
        }
        ids.push_back(record.id.clone());
    }
    session.finish(|row| {
        emit(row, &mut ids);
        Ok::<(), RuntimeError>(())
    })
}

/// The maximum of each column over the residues of a protein, i.e. over all tokens except the first (BOS) and the last (EOS).
fn maximum(row: &SessionRow<'_>) -> Vec<f32> {
    let width = row.values(0).len() / row.tokens();
    let mut most = vec![f32::NEG_INFINITY; width];
    for state in row.values(0).chunks_exact(width).take(row.tokens() - 1).skip(1) {
        most.iter_mut().zip(state).for_each(|(most, x)| *most = most.max(*x));
    }
    most
}
