//! Table of the kernels chosen for a GPU, in memory and on disk. Invariant: all devices of a process with the same GPU
//! model share one table; a file is used only if it is undamaged and was made with this GPU model, driver and library.

use super::hopper::WgmmaTile;
use super::mma::MmaTile;
use super::normed::Normed;
use super::{GemmForm, GemmKernel};
use crate::compile::{cache, digest, keep};
use crate::context::Card;
use cudarc::cublaslt::sys as lt;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// A shared handle of a table.
pub(super) struct ChoiceTable(Arc<Mutex<LockedChoices>>);

impl ChoiceTable {
    /// Returns the table of a GPU model and version of the library; its file is in the user's cache folder.
    pub(super) fn of(card: &Card, library: usize) -> Self {
        type Tables = Mutex<BTreeMap<String, Arc<Mutex<LockedChoices>>>>;
        static TABLES: OnceLock<Tables> = OnceLock::new();
        let identity =
            format!("plimsoll products 6, {}, driver {}, cuBLASLt {library}", card.name, card.driver);
        let mut tables = TABLES.get_or_init(Tables::default).lock().unwrap_or_else(PoisonError::into_inner);
        let entries = tables.entry(identity.clone()).or_insert_with(|| {
            let name = format!("products-{}.txt", &digest(&identity)[..16]);
            let file = cache().map(|folder| folder.join(name));
            Arc::new(Mutex::new(LockedChoices::open(identity.clone(), file)))
        });
        Self(Arc::clone(entries))
    }

    /// Locks the table.
    pub(super) fn lock(&self) -> MutexGuard<'_, LockedChoices> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The choice of each form and number of rows.
pub(super) struct LockedChoices {
    identity: String,
    file: Option<PathBuf>,
    choices: BTreeMap<String, GemmKernel>,
}

impl LockedChoices {
    fn open(identity: String, file: Option<PathBuf>) -> Self {
        let choices = file.as_deref().and_then(|file| read(file, &identity)).unwrap_or_default();
        Self { identity, file, choices }
    }

    /// Whether the table has no choices.
    pub(super) fn is_empty(&self) -> bool {
        self.choices.is_empty()
    }

    /// Returns the choice for a form at about this number of rows.
    pub(super) fn get(&self, form: &GemmForm, rows: u64) -> Option<GemmKernel> {
        self.choices.get(&key(form, rows)).copied()
    }

    /// Adds a choice and writes the table. A table that cannot be written only costs time in later processes.
    pub(super) fn insert(&mut self, form: &GemmForm, rows: u64, choice: GemmKernel) {
        self.choices.insert(key(form, rows), choice);
        let Some(file) = &self.file else { return };
        // Merge choices that other processes wrote since; where both have timed the same form, our choice stays.
        for (key, choice) in read(file, &self.identity).unwrap_or_default() {
            self.choices.entry(key).or_insert(choice);
        }
        let _ = keep(file, write(&self.choices, &self.identity).as_bytes());
    }
}

/// Key of a form and a number of rows, which is rounded up to a power of two: within a factor of two of the rows, the
/// fastest algorithm differs little.
fn key(form: &GemmForm, rows: u64) -> String {
    format!("{form} {}", rows.next_power_of_two())
}

/// Prefix of the names of Hopper kernels.
const HOPPER: &str = "wgmma ";

/// Returns the name of a choice: the name of our kernel, or the library's opaque algorithm as hexadecimal words.
pub(super) fn text(choice: &GemmKernel) -> String {
    match choice {
        GemmKernel::Own => "own".to_owned(),
        GemmKernel::Mma(tile) => tile.name.to_owned(),
        GemmKernel::Hopper(tile) => format!("{HOPPER}{}", tile.name),
        GemmKernel::Normed(normed) => format!("{HOPPER}{}", normed.name),
        GemmKernel::Library(algorithm) => algorithm.data.map(|word| format!("{word:016x}")).join("."),
    }
}

/// Parses a name written by [`text`].
pub(super) fn parse(text: &str) -> Option<GemmKernel> {
    if text == "own" {
        return Some(GemmKernel::Own);
    }
    if let Some(tile) = MmaTile::named(text) {
        return Some(GemmKernel::Mma(tile));
    }
    if let Some(name) = text.strip_prefix(HOPPER) {
        if let Some(tile) = WgmmaTile::named(name) {
            return Some(GemmKernel::Hopper(tile));
        }
        return Normed::named(name).map(GemmKernel::Normed);
    }
    let words: Option<Vec<u64>> = text.split('.').map(|word| u64::from_str_radix(word, 16).ok()).collect();
    Some(GemmKernel::Library(lt::cublasLtMatmulAlgo_t { data: words?.try_into().ok()? }))
}

/// Serializes a table: the identity, a line for each choice, and the SHA-256 of these lines.
fn write(choices: &BTreeMap<String, GemmKernel>, identity: &str) -> String {
    let lines = choices.iter().map(|(key, choice)| format!("{key}\t{}\n", text(choice)));
    let body = format!("{identity}\n{}", lines.collect::<String>());
    format!("{body}sha256 {}\n", digest(&body))
}

/// Reads a table; `None` if the file is missing, damaged or of another identity.
fn read(file: &Path, identity: &str) -> Option<BTreeMap<String, GemmKernel>> {
    let all = fs::read_to_string(file).ok()?;
    let (body, sum) = all.split_at(all.rfind("sha256 ")?);
    if sum != format!("sha256 {}\n", digest(body)) {
        return None;
    }
    let lines = body.strip_prefix(identity)?.strip_prefix('\n')?.lines();
    lines
        .map(|line| line.split_once('\t').and_then(|(key, choice)| Some((key.to_owned(), parse(choice)?))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::hopper::TILES;
    use super::*;
    use plimsoll_graph::DType;
    use plimsoll_graph::ops::Epilogue;
    use plimsoll_testing::Folder;

    const FORM: GemmForm = GemmForm { bias: true, ..GemmForm::new(10240, 2560, DType::F32) };
    const OTHER: GemmForm = GemmForm { epilogue: Epilogue::Residual, ..FORM };
    const THIRD: GemmForm = GemmForm { epilogue: Epilogue::Gelu, ..FORM };
    const CUT: GemmForm = GemmForm { tf32: true, ..FORM };
    const BY_K: GemmForm = GemmForm { by_k: true, ..FORM };

    fn words(choice: Option<GemmKernel>) -> Option<String> {
        choice.as_ref().map(text)
    }

    #[test]
    fn choices_survive_on_disk_and_damage_does_not() {
        let folder = Folder::new("matmuls");
        let file = folder.path("cache/table.txt");
        let algorithm = GemmKernel::Library(lt::cublasLtMatmulAlgo_t { data: [1, u64::MAX, 3, 4, 5, 6, 7, 0] });
        let open = |identity: &str| LockedChoices::open(identity.to_owned(), Some(file.clone()));
        let (mut one, mut two) = (open("card"), open("card"));
        one.insert(&FORM, 16_384, algorithm);
        two.insert(&OTHER, 1, GemmKernel::Own);
        two.insert(&THIRD, 1, GemmKernel::Hopper(TILES[1]));

        let again = open("card");
        let [library, own, hopper] =
            [(FORM, 10_000), (OTHER, 1), (THIRD, 1)].map(|(form, rows)| words(again.get(&form, rows)));
        assert_eq!(library, Some(text(&algorithm)), "the same power of two");
        assert_eq!(own.as_deref(), Some("own"));
        assert_eq!(hopper, Some(format!("wgmma {}", TILES[1].name)));
        assert_eq!(words(again.get(&FORM, 16_385)), None, "other rows");
        assert_eq!(words(again.get(&CUT, 16_384)), None, "f32 and TF32 are timed apart");
        assert_eq!(words(again.get(&BY_K, 16_384)), None, "and so are both layouts of w");
        assert_eq!(words(open("other card").get(&FORM, 16_384)), None, "another card");

        let text = fs::read_to_string(&file).expect("it was written");
        for damaged in
            [text.replacen("ffffffff", "fffffffe", 1), text[..text.len() - 1].to_owned(), String::new()]
        {
            fs::write(&file, damaged).expect("writable");
            assert_eq!(words(open("card").get(&FORM, 16_384)), None);
        }
    }
}
