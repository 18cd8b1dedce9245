//! Tests of crops of genomes: packs, resuming, validation, sampling, refused settings and tables, memory.

use std::collections::HashSet;
use std::path::Path;

use plimsoll_data::codons;
use plimsoll_data::train::crops::{
    CropObjective, CropPack, CropPosition, CropSet, CropSettings, CropTask, CropTokenizer, Mutations,
    SamplingLevel, ShuffledCrops, ValidationCrops,
};
use plimsoll_data::train::{MaskRates, PackLimits, Split};
use proptest::prelude::*;

use super::file;
use crate::support::folder;

/// Length and columns of the records of the tests: split, virus, family.
const RECORDS: [(usize, &str, &str, &str); 8] = [
    (2000, "train", "virus", "a"),
    (500, "train", "virus", "b"),
    (30, "train", "virus", "b"),
    (4000, "train", "other", "c"),
    (700, "train", "other", "?"),
    (900, "validation", "virus", "a"),
    (300, "validation", "other", ""),
    (800, "-", "unnamed", "x"),
];

/// Bases of record `number`: pseudo-random, with lower case, U, and a run of N in record 3.
fn letters(number: usize) -> String {
    let mut state = number as u64 + 1;
    let letter = |at: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        match at {
            1000..1040 if number == 3 => 'N',
            _ => ['A', 'C', 'G', 'T', 'a', 'c', 'g', 'U'][(state >> 61) as usize],
        }
    };
    (0..RECORDS[number].0).map(letter).collect()
}

fn task(name: &str, classes: &[&str]) -> CropTask {
    CropTask { name: name.into(), classes: classes.iter().map(|&class| class.into()).collect() }
}

/// Writes the records into two files, the second one compressed, and a table, and returns settings for them.
fn settings(folder: &Path) -> CropSettings {
    let fasta = |numbers: &[usize]| {
        let record = |&number: &usize| format!(">r{number} a title\n{}\n", letters(number));
        numbers.iter().map(record).collect::<String>()
    };
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut packed, fasta(&[5, 3, 7, 4]).as_bytes()).unwrap();
    let rows = RECORDS.iter().enumerate();
    let rows: String =
        rows.map(|(i, (_, split, virus, family))| format!("r{i}\t{virus}\t{split}\t{family}\tx\n")).collect();
    CropSettings {
        files: vec![
            file(folder, "a.fa", fasta(&[0, 1, 2, 6])),
            file(folder, "b.fa.gz", packed.finish().unwrap()),
        ],
        table: file(folder, "records.tsv", format!("id\tvirus\tsplit\tfamily\tnote\n{rows}")),
        tasks: vec![task("virus", &["other", "virus"]), task("family", &["a", "b", "c"])],
        tokens: CropTokenizer::Codons,
        objective: CropObjective::Classify,
        shortest: 40,
        longest: 400,
        mutations: Mutations { substitutions: 0.08, indels: 0.02 },
        shuffled: ShuffledCrops { share: 0.1, targets: vec![("virus".into(), "other".into())] },
        levels: vec![
            SamplingLevel { column: "virus".into(), power: 0.0 },
            SamplingLevel { column: "family".into(), power: 0.5 },
        ],
        unlabelled: false,
        strict: false,
        validation: Some(ValidationCrops { crops: 20, lengths: vec![100, 300, 50] }),
        seed: 3,
        bounds: PackLimits { tokens: 2400, sequences: 8, longest: 140 },
        workers: 2,
        prefetch: 1,
    }
}

fn masked(settings: CropSettings) -> CropSettings {
    let tasks = Vec::new();
    let shuffled = ShuffledCrops::default();
    CropSettings { tasks, shuffled, objective: CropObjective::Masked(MaskRates::BERT), ..settings }
}

fn masked_bases(settings: CropSettings) -> CropSettings {
    let objective = CropObjective::MaskedBases { rates: MaskRates::BERT, span: 4 };
    CropSettings { objective, ..masked(settings) }
}

/// The next `count` packs of a split; fewer at the end of the validation crops.
fn packs(set: &CropSet, split: Split, from: &CropPosition, count: usize) -> Vec<CropPack> {
    let mut stream = set.stream(split, from).expect("opened");
    let mut packs = Vec::new();
    for _ in 0..count {
        let mut pack = set.pack();
        if stream.fill(&mut pack).expect("filled") { packs.push(pack) } else { break }
    }
    packs
}

/// The letters of a crop, read from its frames +1, +2 and +3.
fn decoded(tokens: &[i32], bases: usize) -> Vec<u8> {
    let length = tokens.len() / 6;
    // The first base of codon i of frame +k is base 3 i + k - 1.
    let letter = |at: usize| match tokens[(at % 3) * length + at / 3] {
        codons::UNKNOWN => b'N',
        codon => b"ACGT"[codon as usize / 16],
    };
    (0..(3 * length).min(bases)).map(letter).collect()
}

#[test]
fn packs_hold_whole_crops_within_their_bounds() {
    let folder = folder("crops_bounds");
    let base = settings(&folder);
    for base in [base.clone(), masked(base.clone()), masked_bases(base)] {
        let set = CropSet::open(base.clone()).unwrap();
        let mut crops = 0;
        let mut full = 0;
        let all = packs(&set, Split::Train, &set.start(), 60);
        for (i, pack) in all.iter().enumerate() {
            assert!(pack.ids.len() <= 2400 && (1..=8).contains(&pack.spans.len()));
            assert_eq!((pack.number, pack.bases.len()), (i as u64, pack.spans.len()));
            let mut at = 0;
            for (&[start, end], &bases) in pack.spans.iter().zip(&pack.bases) {
                assert_eq!((start, (end - start) as usize), (at, codons::tokens_of(bases as usize)));
                assert!((40..=400).contains(&bases) && (end - start) as usize / 6 <= base.bounds.longest);
                at = end;
            }
            assert_eq!(at as usize, pack.ids.len());
            crops += pack.spans.len();
            // A pack ends because its next crop, the first of the next pack, does not fit.
            if let Some(next) = all.get(i + 1) {
                let first = next.spans[0][1] as usize;
                full += usize::from(pack.spans.len() == 8);
                assert!(pack.spans.len() == 8 || pack.ids.len() + first > 2400);
            }
            match base.objective {
                CropObjective::Classify => {
                    assert_eq!(pack.targets.len(), 2);
                    for (vector, &count) in pack.targets.iter().zip(&pack.target_counts) {
                        assert_eq!(vector.len(), pack.spans.len());
                        assert_eq!(vector.iter().filter(|&&target| target >= 0).count() as u64, count);
                    }
                    // Crops of record 4 and shuffled crops have no family.
                    assert!(pack.targets[0].iter().all(|target| (0..2).contains(target)));
                    assert!(pack.targets[1].iter().all(|target| (-1..3).contains(target)));
                    assert!(pack.ids.iter().all(|&id| (0..=codons::UNKNOWN).contains(&id)));
                }
                CropObjective::Masked(_) | CropObjective::MaskedBases { .. } => {
                    assert_eq!((pack.targets.len(), pack.targets[0].len()), (1, pack.ids.len()));
                    for (&id, &target) in pack.ids.iter().zip(&pack.targets[0]) {
                        assert!(target == -100 || (0..64).contains(&target));
                        assert!(id != codons::MASK || target != -100);
                        assert!(id != codons::UNKNOWN || target == -100);
                    }
                    let count = pack.targets[0].iter().filter(|&&target| target != -100).count();
                    assert_eq!(pack.target_counts, [count as u64]);
                }
            }
        }
        assert!(full > 0 && full < 59, "both bounds are met: {full}");
        assert!(all[59].position_after.as_ref().unwrap().crop >= crops as u64);
        let mut stream = set.stream(Split::Train, &set.start()).unwrap();
        let mut pack = CropPack::default();
        (0..60).for_each(|_| assert!(stream.fill(&mut pack).unwrap()));
        let counts = stream.counts();
        assert_eq!((counts.packs, counts.crops, counts.skipped), (60, crops as u64, 0));
        assert_eq!(counts.tokens, all.iter().map(|b| b.ids.len() as u64).sum::<u64>());
        assert_eq!(counts.targets, all.iter().flat_map(|b| &b.target_counts).sum::<u64>());
        assert_eq!(pack, all[59]);
    }
}

#[test]
fn masks_have_their_rates() {
    let set = CropSet::open(masked(settings(&folder("crops_masks")))).unwrap();
    let mut known = 0;
    let mut chosen = 0;
    let mut mask = 0;
    let mut random = 0;
    for pack in packs(&set, Split::Train, &set.start(), 100) {
        for (&id, &target) in pack.ids.iter().zip(&pack.targets[0]) {
            known += u32::from(id != codons::UNKNOWN);
            chosen += u32::from(target != -100);
            mask += u32::from(id == codons::MASK);
            random += u32::from(target != -100 && id != codons::MASK && id != target);
        }
    }
    let of = |part: u32, whole: u32| f64::from(part) / f64::from(whole);
    assert!((of(chosen, known) - 0.15).abs() < 0.005, "{chosen} of {known}");
    assert!((of(mask, chosen) - 0.8).abs() < 0.01, "{mask} of {chosen}");
    // One random codon of 64 is the codon itself.
    assert!((of(random, chosen) - 0.1 * 63.0 / 64.0).abs() < 0.01, "{random} of {chosen}");
}

#[test]
fn packs_do_not_depend_on_the_workers() {
    let folder = folder("crops_workers");
    let base = settings(&folder);
    for base in [base.clone(), masked(base.clone()), masked_bases(base)] {
        let read = |workers, prefetch| {
            let set = CropSet::open(CropSettings { workers, prefetch, ..base.clone() }).unwrap();
            let train = packs(&set, Split::Train, &set.start(), 80);
            (train, packs(&set, Split::Validation, &set.start(), 80))
        };
        let one = read(1, 1);
        assert!(one.0.len() == 80 && !one.1.is_empty());
        assert!(read(2, 1) == one && read(5, 3) == one);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20, failure_persistence: None, ..Default::default() })]

    #[test]
    fn cut_anywhere_and_continue(
        cut in 0_usize..39,
        seed in 0_u64..100,
        tokens in 800_usize..4000,
        sequences in 1_usize..20,
        workers in 1_usize..4,
    ) {
        let folder = folder("crops_resume");
        let bounds = PackLimits { tokens, sequences, longest: 133 };
        let base = CropSettings { seed, bounds, ..settings(&folder) };
        for base in [base.clone(), masked(base.clone()), masked_bases(base)] {
            let set = CropSet::open(base.clone()).unwrap();
            let whole = packs(&set, Split::Train, &set.start(), 40);
            // A checkpoint stores the position as JSON.
            let text = serde_json::to_string(&whole[cut].position_after).unwrap();
            let position: CropPosition = serde_json::from_str(&text).unwrap();
            let other = CropSet::open(CropSettings { workers, ..base }).unwrap();
            prop_assert!(packs(&other, Split::Train, &position, 39 - cut) == whole[cut + 1..]);
        }
    }
}

#[test]
fn validation_crops_are_pieces_of_their_records() {
    let folder = folder("crops_validation");
    let base = settings(&folder);
    let set = CropSet::open(base.clone()).unwrap();
    let all = packs(&set, Split::Validation, &set.start(), 1000);
    let read = |number: usize| letters(number).to_uppercase().replace('U', "T");
    let records = [read(5), read(6)];
    let mut lengths = Vec::new();
    let mut starts = HashSet::new();
    let mut seen = [0; 2];
    for pack in &all {
        for (i, &[start, end]) in pack.spans.iter().enumerate() {
            let bases = pack.bases[i] as usize;
            lengths.push(bases);
            let crop = decoded(&pack.ids[start as usize..end as usize], bases);
            let reversed: Vec<u8> =
                crop.iter().rev().map(|b| b"TGCA"[b"ACGT".iter().position(|x| x == b).unwrap()]).collect();
            // Virus (class 1 of the first task) is record 5, other is record 6.
            let record = usize::from(pack.targets[0][i] == 0);
            assert_eq!(pack.targets[1][i], [0, -1][record]);
            let find = |crop: &[u8]| records[record].find(std::str::from_utf8(crop).unwrap());
            starts.insert(find(&crop).or_else(|| find(&reversed)).expect("neither mutated nor shuffled"));
            seen[record] += 1;
        }
    }
    assert_eq!(lengths, [[100; 20], [300; 20], [50; 20]].concat());
    assert!(starts.len() > 20 && seen[0] > 10 && seen[1] > 10, "{} {seen:?}", starts.len());
    // Other training settings and bounds of packs leave the crops as they are; another seed does not.
    let changed = CropSettings {
        mutations: Mutations::default(),
        shuffled: ShuffledCrops::default(),
        bounds: PackLimits { tokens: 5000, ..base.bounds },
        ..base.clone()
    };
    let ids = |set: &CropSet| {
        let all = packs(set, Split::Validation, &set.start(), 1000);
        all.into_iter().flat_map(|pack| pack.ids).collect::<Vec<i32>>()
    };
    assert_eq!(ids(&CropSet::open(changed).unwrap()), ids(&set));
    assert_ne!(ids(&CropSet::open(CropSettings { seed: 4, ..base.clone() }).unwrap()), ids(&set));
    // Only records with the length give a crop of the length.
    let validation = Some(ValidationCrops { crops: 30, lengths: vec![400] });
    let set = CropSet::open(CropSettings { validation, ..base }).unwrap();
    let all = packs(&set, Split::Validation, &set.start(), 100);
    assert!(all.iter().flat_map(|pack| &pack.targets[0]).all(|&target| target == 1));
    let mut stream = set.stream(Split::Validation, &set.start()).unwrap();
    let mut pack = CropPack::default();
    while stream.fill(&mut pack).unwrap() {}
    assert!(!stream.fill(&mut pack).unwrap() && pack.spans.is_empty(), "validation ends");
}

#[test]
fn crops_are_drawn_as_the_levels_say() {
    let folder = folder("crops_levels");
    let base = CropSettings { shuffled: ShuffledCrops::default(), ..settings(&folder) };
    let set = CropSet::open(base.clone()).unwrap();
    let stats = *set.stats();
    assert_eq!((stats.train.records, stats.train.bases, stats.train.unknown), (4, 7200, 40));
    assert_eq!((stats.train.short, stats.validation.short, stats.left_out), (1, 0, 1));
    assert_eq!((stats.validation.records, stats.validation.bases), (2, 1200));
    let bounds = PackLimits { tokens: 20_000, sequences: 100, longest: 140 };
    // Frequencies of (virus, family): with levels, and in proportion to the bases without.
    let roots = |a: f64, b: f64| a.sqrt() / (a.sqrt() + b.sqrt());
    let virus = 0.5 * roots(2000.0, 500.0);
    let other = 0.5 * roots(4000.0, 700.0);
    let cells = [(1, 0), (1, 1), (0, 2), (0, -1)];
    for (levels, expected) in [
        (base.levels.clone(), [virus, 0.5 - virus, other, 0.5 - other]),
        (Vec::new(), [2000.0, 500.0, 4000.0, 700.0].map(|bases| bases / 7200.0)),
    ] {
        let set = CropSet::open(CropSettings { levels, bounds, ..base.clone() }).unwrap();
        let mut counts = [0.0; 4];
        let mut total = 0.0;
        for pack in packs(&set, Split::Train, &set.start(), 150) {
            for (&virus, &family) in pack.targets[0].iter().zip(&pack.targets[1]) {
                counts[cells.iter().position(|&cell| cell == (virus, family)).unwrap()] += 1.0;
                total += 1.0;
            }
        }
        let term = |(n, p): (&f64, &f64)| (n - p * total).powi(2) / (p * total);
        let chi_square: f64 = counts.iter().zip(&expected).map(term).sum();
        // The 99.9 % quantile for three degrees of freedom.
        assert!(total > 5000.0 && chi_square < 16.27, "{chi_square}: {counts:?} of {total}");
    }
}

#[test]
fn crops_end_with_their_records() {
    let folder = folder("crops_ends");
    let base = settings(&folder);
    let set = CropSet::open(CropSettings {
        longest: 2500,
        shortest: 30,
        mutations: Mutations::default(),
        shuffled: ShuffledCrops::default(),
        validation: None,
        bounds: PackLimits { tokens: 20_000, sequences: 100, longest: 900 },
        ..base
    })
    .unwrap();
    // Family a is record 0; family b is the records 1 and 2, of 500 and 30 bases.
    let mut whole = [0; 3];
    let mut short = 0;
    let mut all = 0;
    for pack in packs(&set, Split::Train, &set.start(), 500) {
        for (&bases, &family) in pack.bases.iter().zip(&pack.targets[1]) {
            let longest = [700, 2000, 500, 2500][(family + 1) as usize];
            assert!(bases <= longest);
            all += u32::from(family == 1);
            short += u32::from(family == 1 && bases == 30);
            (0..2).for_each(|at| whole[at] += u32::from(family == at as i32 && bases == longest));
        }
    }
    // A drawn length is at least 500 with this probability, and the record is record 1 in 500 of 530 draws.
    let expected = (2501.0_f64 / 500.0).ln() / (2501.0_f64 / 30.0).ln() * 500.0 / 530.0;
    let share = f64::from(whole[1]) / f64::from(all);
    assert!(all > 1000 && (share - expected).abs() < 0.04, "{share} of {all}, {expected} expected");
    assert!(whole[0] > 0 && short > 0);
}

#[test]
fn shuffled_crops_have_their_own_targets() {
    let folder = folder("crops_shuffled");
    let base = settings(&folder);
    let shuffled = ShuffledCrops { share: 0.3, targets: vec![("family".into(), "c".into())] };
    // Without shuffling, family c occurs with the class other only; the others are record 4's.
    let set = CropSet::open(CropSettings { shuffled, mutations: Mutations::default(), ..base }).unwrap();
    let sources: Vec<String> = (0..5).map(|number| letters(number).to_uppercase().replace('U', "T")).collect();
    let mut crops = 0;
    let mut found = 0;
    for pack in packs(&set, Split::Train, &set.start(), 200) {
        for (i, &[start, end]) in pack.spans.iter().enumerate() {
            crops += 1;
            if (pack.targets[0][i], pack.targets[1][i]) != (-1, 2) {
                continue;
            }
            found += 1;
            let crop = decoded(&pack.ids[start as usize..end as usize], pack.bases[i] as usize);
            let crop = String::from_utf8(crop).unwrap();
            assert!(crop.contains('N') || !sources.iter().any(|source| source.contains(&crop)));
        }
    }
    let share = f64::from(found) / f64::from(crops);
    assert!((share - 0.3).abs() < 0.04, "{found} of {crops}");
}

#[test]
fn crops_without_a_target_are_skipped() {
    let folder = folder("crops_skipped");
    let base = settings(&folder);
    // The only task has no target for record 4, which half of the crops of class other come from.
    let tasks = vec![task("family", &["a", "b", "c"])];
    let level = SamplingLevel { column: "family".into(), power: 0.0 };
    let shuffled = ShuffledCrops::default();
    let base = CropSettings { tasks, shuffled, levels: vec![level], ..base };
    let set = CropSet::open(base.clone()).unwrap();
    let mut stream = set.stream(Split::Train, &set.start()).unwrap();
    let mut pack = set.pack();
    for _ in 0..100 {
        stream.fill(&mut pack).unwrap();
        assert!(pack.targets[0].iter().all(|&target| target >= 0));
    }
    let counts = stream.counts();
    let share = counts.skipped as f64 / (counts.skipped + counts.crops) as f64;
    // One of the four values of the level.
    assert!((share - 0.25).abs() < 0.04, "{share}");
    assert_eq!(stream.position().crop, counts.skipped + counts.crops);
    // They are not skipped where they are wanted, except in validation.
    let all = CropSet::open(CropSettings { unlabelled: true, ..base.clone() }).unwrap();
    let drawn = packs(&all, Split::Train, &all.start(), 100);
    let targets: Vec<i32> = drawn.iter().flat_map(|pack| pack.targets[0].clone()).collect();
    let share = targets.iter().filter(|&&target| target < 0).count() as f64 / targets.len() as f64;
    assert!((share - 0.25).abs() < 0.04, "{share}");
    let counted: u64 = drawn.iter().map(|pack| pack.target_counts[0]).sum();
    assert_eq!(counted as usize, targets.iter().filter(|&&target| target >= 0).count());
    let validated = |set: &CropSet| {
        let packs = packs(set, Split::Validation, &set.start(), 80);
        packs.into_iter().map(|pack| (pack.ids, pack.targets)).collect::<Vec<_>>()
    };
    assert_eq!(validated(&all), validated(&set));
    assert_ne!(all.digest(), set.digest());
    // A stream of data without any target ends with an error.
    let rows = "id\tsplit\tfamily\nr0\ttrain\t\nr1\t-\t\nr2\t-\t\nr6\t-\t\n";
    let set = CropSet::open(CropSettings {
        table: file(&folder, "none.tsv", rows),
        files: vec![folder.join("a.fa")],
        validation: None,
        ..base.clone()
    })
    .unwrap();
    let mut stream = set.stream(Split::Train, &set.start()).unwrap();
    let error = stream.fill(&mut pack).unwrap_err().to_string();
    assert!(
        error.ends_with(
            "none.tsv: 65536 crops in succession have no target: its records have ? in every task; \
        give classes, or sample other records"
        ),
        "{error}"
    );
    assert!(!stream.fill(&mut pack).unwrap());
}

/// The message with which a crop set is refused.
fn refusal(settings: CropSettings) -> String {
    CropSet::open(settings).err().expect("refused").to_string()
}

#[test]
fn tables_and_records_must_agree() {
    let folder = folder("crops_tables");
    let base = settings(&folder);
    let check = |table: &str, fasta: &str, expected: &str| {
        let table = file(&folder, "t.tsv", table);
        let files = vec![file(&folder, "t.fa", fasta)];
        let found = refusal(CropSettings { table, files, validation: None, ..base.clone() });
        let at = format!("{}/", folder.display());
        assert_eq!(found.replace(&at, ""), expected);
    };
    let fasta = format!(">r0\n{}\n", "ACGT".repeat(20));
    let header = "id\tsplit\tvirus\tfamily\n";
    let row = |rest: &str| format!("{header}{rest}");
    check("", &fasta, "t.tsv, line 1: no header; the first line names the columns, at least id and split");
    check("id\tvirus\n", &fasta, "t.tsv, line 1: no column 'split'; the columns are id, virus");
    check(
        "id\tsplit\tvirus\tfamily\tvirus\n",
        &fasta,
        "t.tsv, line 1: two columns are called 'virus'; rename one",
    );
    check(&row("\nr0\ttrain\tvirus\n"), &fasta, "t.tsv, line 3: 3 cells for the 4 columns of the header");
    check(
        &row("r0\ttrain\tvirus\ta\tb\tc\n"),
        &fasta,
        "t.tsv, line 2: 6 cells for the 4 columns of the header",
    );
    check(&row("\ttrain\tvirus\ta\n"), &fasta, "t.tsv, line 2: column 'id': the name of a record is missing");
    check(
        &row("r0\ttest\tvirus\ta\n"),
        &fasta,
        "t.tsv, line 2: column 'split': 'test' is not train, validation or -",
    );
    check(
        &row("r0\ttrain\tvirus\ta\nr0\t-\tvirus\ta\n"),
        &fasta,
        "t.tsv, line 3: column 'id': 'r0' has a row before, in line 2",
    );
    check(
        &row("r0\ttrain\tvirus\tz\u{1b}\n"),
        &fasta,
        "t.tsv, line 2: column 'family': 'z\\u{1b}' is not one of a, b, c; give one of them, or ? for no target",
    );
    check(
        &row("r0\ttrain\tvirus\ta\r\nr9\t-\tx\ty\r\nr1\ttrain\tvirus\t?\r\n"),
        &fasta,
        "t.tsv, line 4: no record 'r1' in the files; give its file, remove the row, or put - in the column 'split'",
    );
    check(
        &row("r1\ttrain\tvirus\ta\n"),
        &format!(">r1\nACGT\n{fasta}"),
        &format!(
            "t.fa, line 3, 'r0': no row in the table {}; add one, with - in the column 'split' to leave the record out",
            "t.tsv"
        ),
    );
    check(
        &row("r0\ttrain\tvirus\ta\n"),
        &fasta.repeat(2),
        "t.fa, line 3, 'r0': a second record of this name; rename or remove one",
    );
    check(
        &row("r0\ttrain\tvirus\ta\n"),
        ">r0\nACGT\n",
        "t.tsv: no record to train on: 1 records of the split train have fewer than 40 bases, 0 are left out",
    );
    let found = refusal(CropSettings { files: vec![file(&folder, "p.fa", ">r0\nMKVLAEQ\n")], ..base.clone() });
    assert!(found.contains("p.fa, line 1, 'r0': no nucleotide sequence"), "{found}");
    assert!(
        refusal(CropSettings { table: folder.join("absent"), ..base.clone() })
            .contains("there is no such file")
    );
    let long = Some(ValidationCrops { crops: 1, lengths: vec![100, 901] });
    let bounds = PackLimits { longest: 400, ..base.bounds };
    let found = refusal(CropSettings { validation: long, bounds, ..base.clone() });
    assert!(
        found.ends_with(
            "records.tsv: no record of the split validation has the 901 bases of a validation crop; \
        remove the length, or give longer records"
        ),
        "{found}"
    );
}

#[test]
fn settings_that_contradict_themselves() {
    let folder = folder("crops_settings");
    let base = settings(&folder);
    let shuffled = |share, task: &str, class: &str| CropSettings {
        shuffled: ShuffledCrops { share, targets: vec![(task.into(), class.into())] },
        ..base.clone()
    };
    let tasks = |tasks: Vec<CropTask>| CropSettings { tasks, ..base.clone() };
    let bounds = |tokens, sequences, longest| CropSettings {
        bounds: PackLimits { tokens, sequences, longest },
        ..base.clone()
    };
    let virus = task("virus", &["other", "virus"]);
    let rates = MaskRates { select: 0.0, ..MaskRates::BERT };
    for (settings, expected) in [
        (CropSettings { files: Vec::new(), ..base.clone() }, "no file of sequences is named"),
        (CropSettings { shortest: 4, ..base.clone() }, "the shortest crop must have at least 5 bases"),
        (CropSettings { longest: 39, ..base.clone() }, "the shortest crop must have at least 5 bases"),
        (
            CropSettings { mutations: Mutations { substitutions: 1.0, indels: 0.0 }, ..base.clone() },
            "the rate of substitutions must be at least 0 and below 1",
        ),
        (
            CropSettings { mutations: Mutations { substitutions: 0.0, indels: f64::NAN }, ..base.clone() },
            "and that of indels 0 to 0.2",
        ),
        (shuffled(1.0, "virus", "other"), "the share of shuffled crops must be at least 0 and below 1"),
        (shuffled(0.0, "virus", "other"), "give both or neither"),
        (shuffled(0.1, "host", "other"), "a target in the task 'host', and there is no such task"),
        (shuffled(0.1, "virus", "?"), "the class '?' in the task 'virus'; its classes are other, virus"),
        (tasks(Vec::new()), "classification needs a task"),
        (tasks(vec![virus.clone(), virus.clone()]), "two tasks are called 'virus'"),
        (tasks(vec![virus.clone(), task("family", &[])]), "the task 'family' has no classes"),
        (tasks(vec![virus.clone(), task("family", &["a", "?"])]), "is called '?', which means no target"),
        (tasks(vec![virus, task("family", &["a", "a"])]), "the task 'family' has the class 'a' twice"),
        (
            CropSettings { objective: CropObjective::Masked(MaskRates::BERT), ..base.clone() },
            "masked tokens have no tasks",
        ),
        (
            CropSettings { objective: CropObjective::Masked(rates), ..masked(base.clone()) },
            "the masked part must be above 0, at most 1",
        ),
        (
            CropSettings { objective: CropObjective::MaskedBases { rates, span: 1 }, ..masked(base.clone()) },
            "the masked part must be above 0, at most 1",
        ),
        (
            CropSettings {
                objective: CropObjective::MaskedBases { rates: MaskRates::BERT, span: 0 },
                ..masked(base.clone())
            },
            "a masked span has 1 to 1000 bases, not 0",
        ),
        (
            CropSettings { levels: vec![SamplingLevel { column: "x".into(), power: -1.0 }], ..base.clone() },
            "the power of a sampling level must be a number of at least 0",
        ),
        (
            CropSettings { levels: vec![SamplingLevel { column: "x".into(), power: 1.0 }], ..base.clone() },
            "records.tsv, line 1: no column 'x'; the columns are id, virus, split, family, note",
        ),
        (
            CropSettings { validation: Some(ValidationCrops { crops: 0, lengths: vec![100] }), ..base.clone() },
            "validation needs at least one crop",
        ),
        (
            CropSettings { validation: Some(ValidationCrops { crops: 1, lengths: vec![4] }), ..base.clone() },
            "a validation crop must have 5 to",
        ),
        (CropSettings { workers: 0, ..base.clone() }, "at least one worker"),
        (bounds(2400, 0, 140), "a pack must hold a crop"),
        (bounds(2400, 1, 131), "a crop of 400 bases has frames of 132 tokens, at most 131 fit"),
        (bounds(791, 1, 140), "a crop of 400 bases has 792 tokens, a pack at most 791"),
    ] {
        let found = refusal(settings);
        assert!(found.contains(expected), "{found}");
    }
    assert_eq!(CropSet::open(bounds(792, 1, 132)).unwrap().stats().train.records, 4);
}

#[test]
fn a_position_is_one_in_its_data() {
    let folder = folder("crops_other_data");
    let base = settings(&folder);
    let set = CropSet::open(base.clone()).unwrap();
    let refused = |settings: CropSettings, position: &CropPosition| {
        let set = CropSet::open(settings).unwrap();
        set.stream(Split::Train, position).err().map(|e| e.to_string()).unwrap_or_default()
    };
    let start = set.start();
    let bounds = PackLimits { tokens: 3000, ..base.bounds };
    assert_eq!(refused(CropSettings { workers: 1, validation: None, ..base.clone() }, &start), "");
    let other = "the saved position belongs to other data";
    for changed in [
        CropSettings { seed: 4, ..base.clone() },
        CropSettings { bounds, ..base.clone() },
        CropSettings { longest: 399, ..base.clone() },
        CropSettings { mutations: Mutations::default(), ..base.clone() },
        CropSettings { levels: Vec::new(), ..base.clone() },
        masked(base.clone()),
        masked_bases(base.clone()),
        CropSettings {
            objective: CropObjective::MaskedBases { rates: MaskRates::BERT, span: 5 },
            ..masked(base.clone())
        },
    ] {
        assert!(refused(changed, &start).starts_with(other));
    }
    // The order of the rows does not matter; a class, a value of a level and a base do.
    let text = std::fs::read_to_string(&base.table).unwrap();
    let mut rows: Vec<&str> = text.lines().collect();
    rows[1..].reverse();
    let with = |text: &str| CropSettings { table: file(&folder, "other.tsv", text), ..base.clone() };
    let reversed = CropSet::open(with(&rows.join("\n"))).unwrap();
    assert_eq!(packs(&reversed, Split::Train, &start, 5), packs(&set, Split::Train, &start, 5));
    assert!(refused(with(&text.replace("train\tb", "train\tc")), &start).starts_with(other));
    let fasta = std::fs::read_to_string(&base.files[0]).unwrap();
    let with = |fasta: String| CropSettings {
        files: vec![file(&folder, "c.fa", fasta), base.files[1].clone()],
        ..base.clone()
    };
    assert!(
        refused(with(fasta.replace(">r1", "A\n>r1")), &start).starts_with(other),
        "a base of a training record"
    );
    assert_eq!(refused(with(fasta + "A\n"), &start), "", "a base of a validation record");
    let damaged = CropPosition { crop: u64::MAX, ..start.clone() };
    assert!(refused(base.clone(), &damaged).contains("after the last crop, so it is damaged"));
    let damaged = CropPosition { crop: 3, pack: 4, ..start.clone() };
    assert!(refused(base.clone(), &damaged).contains("after the last pack, so it is damaged"));
    let validate = |settings: CropSettings, crop| {
        let set = CropSet::open(settings).unwrap();
        set.stream(Split::Validation, &CropPosition { crop, ..start.clone() }).err().unwrap().to_string()
    };
    assert_eq!(validate(base.clone(), 1), "validation begins at the start");
    assert!(
        validate(CropSettings { validation: None, ..base.clone() }, 0).contains("there is no validation data")
    );
}

#[test]
fn a_set_holds_at_most_what_its_figures_say() {
    let folder = folder("crops_memory");
    let rows: String = (0..3000).map(|i| format!("record{i}\ttrain\tvirus\tfamily{}\n", i % 700)).collect();
    let fasta: String =
        (0..3000).map(|i| format!(">record{i}\n{}\n", "ACGTTGCANN".repeat(10 + i * 7 % 400))).collect();
    let base = settings(&folder);
    let classify = CropSettings { tasks: vec![task("virus", &["virus"])], ..base.clone() };
    for base in [classify, masked(base.clone()), masked_bases(base)] {
        let settings = CropSettings {
            files: vec![file(&folder, "many.fa", &fasta)],
            table: file(&folder, "many.tsv", format!("id\tsplit\tvirus\tfamily\n{rows}")),
            shuffled: ShuffledCrops::default(),
            validation: None,
            longest: 4000,
            bounds: PackLimits { tokens: 50_000, sequences: 40, longest: 1400 },
            ..base
        };
        let mut opened = None;
        let opening = allocation_counter::measure(|| opened = Some(CropSet::open(settings).unwrap()));
        let set = opened.unwrap();
        let of = |names: &[&str]| -> u64 {
            set.host_bytes().iter().filter(|held| names.contains(&held.what)).map(|held| held.bytes).sum()
        };
        let bound = of(&["records", "sampling of records", "table of records", "reader", "decompression"]);
        println!("open: {} of {bound}: {:?}", opening.bytes_max, set.host_bytes());
        assert!(opening.bytes_max <= bound && opening.bytes_max >= bound / 4);
        // What remains is a quarter byte a base and the lists.
        let remaining = of(&["records", "sampling of records"]);
        let held = opening.bytes_current as u64;
        assert!(held <= remaining && held >= remaining / 2, "{held} of {remaining}");
        // All buffers of a stream are allocated by the thread that opens it.
        let mut stream = None;
        let streaming = allocation_counter::measure(|| {
            stream = Some(set.stream(Split::Train, &set.start()).unwrap());
        });
        let bound = of(&["parcels", "makers of crops"]);
        println!("stream: {} of {bound}", streaming.bytes_max);
        assert!(streaming.bytes_max <= bound && streaming.bytes_max >= bound / 2);
        let mut pack = None;
        let made = allocation_counter::measure(|| pack = Some(set.pack()));
        assert!(made.bytes_max <= set.pack_bytes() && made.bytes_max >= set.pack_bytes() / 2);
        let mut stream = stream.unwrap();
        let mut pack = pack.unwrap();
        stream.fill(&mut pack).unwrap();
        let filling = allocation_counter::measure(|| {
            (0..50).for_each(|_| assert!(stream.fill(&mut pack).unwrap()));
        });
        // The channels of the two workers allocate their lists of waiting threads; a pack must not allocate.
        assert!(filling.count_total < 16, "{} allocations in 50 packs", filling.count_total);
    }
}
