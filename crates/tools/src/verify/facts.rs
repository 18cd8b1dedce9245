//! Published values about released weights. Invariant: every number has a source and the digits that its source
//! prints; tolerances come from the sources.

/// Published values for the weights of a hub id.
pub(super) struct Released {
    pub(super) id: &'static str,
    /// First and last hexadecimal digits of the SHA-256 of the hub's `model.safetensors`.
    pub(super) sha256: (&'static str, &'static str),
    pub(super) corners: &'static [PublishedCorner],
}

/// Published corner of an output: the first three columns of the first three tokens.
pub(super) struct PublishedCorner {
    pub(super) ids: &'static [i32],
    pub(super) is_logits: bool,
    pub(super) values: [[f32; 3]; 3],
}

/// Tolerance of [`PublishedCorner`], as in the source's tests, which print four digits.
pub(super) const CORNER_BOUND: f32 = 1e-4;

/// Released models; the corners are those of transformers' own tests (`tests/models/esm/test_modeling_esm.py`).
pub(super) const RELEASED: &[Released] = &[
    Released {
        id: "facebook/esm2_t6_8M_UR50D",
        sha256: ("24c5fa47", "34189"),
        corners: &[
            PublishedCorner {
                ids: &[0, 1, 2, 3, 4, 5],
                is_logits: true,
                values: [
                    [8.9215, -10.5898, -6.4671],
                    [-6.3967, -13.9114, -1.1212],
                    [-7.7812, -13.9516, -3.7406],
                ],
            },
            PublishedCorner {
                ids: &[0, 6, 4, 13, 5, 4, 16, 12, 11, 7, 2],
                is_logits: false,
                values: [[0.1444, 0.5413, 0.3248], [0.3034, 0.0053, 0.3108], [0.3228, -0.2499, 0.3415]],
            },
        ],
    },
    Released { id: "facebook/esm2_t33_650M_UR50D", sha256: ("a08adabb", "f4db0"), corners: &[] },
];

/// Embeddings of a sequence of VirNucPro's own test files, for each encoder: the first three values of the
/// mean, the sum of all values, and their L2 norm.
pub(super) struct PublishedAnchor {
    pub(super) id: &'static str,
    pub(super) dna: ([f32; 3], f32, f32),
    pub(super) protein: ([f32; 3], f32, f32),
    /// Scores of the released head for windows of 500 bases.
    pub(super) scores: [f32; 2],
}

/// Tolerance of a value of a mean embedding.
pub(super) const MEAN_BOUND: f32 = 1e-4;
/// Tolerance of a score computed from given embeddings.
pub(super) const SCORE_BOUND: f32 = 1e-5;
/// Tolerance of a sum of up to 2560 values and of their norm: the errors of the values are independent, so the
/// error of the sum grows with the square root of their number.
pub(super) const SUM_BOUND: f32 = 5e-3;

/// Widths of DNABERT-S and ESM-2 3B, the encoders of the anchors.
pub(super) const DNA_WIDTH: u64 = 768;
pub(super) const PROTEIN_WIDTH: u64 = 2560;

/// Computed from the files of the Broad Institute's port (f32); the scores are copied from its output.
pub(super) const ANCHORS: &[PublishedAnchor] = &[
    PublishedAnchor {
        id: "synthetic_seq_1_chunk_1R1",
        dna: ([-0.070582, 0.067121, 0.028160], 2.22611, 3.6605),
        protein: ([0.069515, -0.126093, -0.053609], 3.28492, 14.3417),
        scores: [0.12100612, 0.8789939],
    },
    PublishedAnchor {
        id: "synthetic_seq_1_chunk_1R2",
        dna: ([-0.006739, 0.097588, 0.076918], 2.33863, 3.7403),
        protein: ([0.011022, -0.039212, 0.026927], 2.74873, 13.6633),
        scores: [0.0011595711, 0.9988405],
    },
    PublishedAnchor {
        id: "synthetic_seq_2_chunk_1R1",
        dna: ([0.071082, 0.116325, 0.050132], 2.35640, 3.9043),
        protein: ([0.084354, -0.142179, -0.044464], 3.22882, 14.2911),
        scores: [0.5501341, 0.4498659],
    },
    PublishedAnchor {
        id: "synthetic_seq_2_chunk_1R2",
        dna: ([0.062328, 0.094365, 0.110617], 2.83331, 4.1077),
        protein: ([0.008760, -0.020596, -0.009615], 3.03733, 13.8132),
        scores: [0.06045397, 0.93954605],
    },
    PublishedAnchor {
        id: "fixed_500bp_seq1_chunk_1R1",
        dna: ([0.032685, 0.132155, 0.074398], 3.28691, 2.6138),
        protein: ([-0.107728, 0.059348, -0.163319], 1.99489, 13.5608),
        scores: [0.002076708, 0.9979233],
    },
    PublishedAnchor {
        id: "fixed_500bp_seq1_chunk_1R3",
        dna: ([0.028522, 0.127133, 0.065703], 3.28096, 2.5871),
        protein: ([-0.004658, -0.008916, -0.151964], 2.43070, 13.9195),
        scores: [0.21817714, 0.7818229],
    },
    PublishedAnchor {
        id: "fixed_500bp_seq2_chunk_1R1",
        dna: ([0.019197, 0.199020, 0.100668], 3.42668, 2.9029),
        protein: ([-0.092372, 0.031458, -0.116617], 2.27104, 13.9057),
        scores: [0.08007622, 0.9199237],
    },
    PublishedAnchor {
        id: "fixed_500bp_seq2_chunk_1R3",
        dna: ([0.017669, 0.206638, 0.098460], 3.35399, 2.9305),
        protein: ([0.000736, 0.005461, -0.145040], 2.45383, 13.9245),
        scores: [0.22702886, 0.7729711],
    },
];

/// Well-known proteins that every trained protein model predicts well: human ubiquitin, hen egg-white lysozyme,
/// and the green fluorescent protein of Aequorea victoria (UniProt P0CG48, P00698, P42212).
pub(super) const PROTEINS: [(&str, &str); 3] = [
    ("ubiquitin", "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG"),
    (
        "lysozyme",
        "KVFGRCELAAAMKRHGLDNYRGYSLGNWVCAAKFESNFNTQATNRNTDGSTDYGILQINSRWWCNDGRTPGSRNLCNIPCSALLSSDITASVNCAKKIVSDGNGMNAWVAWRNRCKGTDVQAWIRGCRL",
    ),
    (
        "GFP",
        "MSKGEELFTGVVPILVELDGDVNGHKFSVSGEGEGDATYGKLTLKFICTTGKLPVPWPTLVTTFSYGVQCFSRYPDHMKQHDFFKSAMPEGYVQERTIFFKDDGNYKTRAEVKFEGDTLVNRIELKGIDFKEDGNILGHKLEYNYNSHNVYIMADKQKNGIKVNFKIRHNIEDGSVQLADHYQQNTPIGDGPVLLPDNHYLSTQSALSKDPNEKRDHMVLLEFVTAAGITHGMDELYK",
    ),
];

/// Unusual proteins: a single residue, and every letter of the alphabet.
pub(super) const ODD_PROTEINS: [(&str, &str); 2] = [("M", "M"), ("alphabet", "LAGVSERTIDPKQNFYMHWCXBUZO")];

/// Minimum share of unmasked residues that a trained language model must predict correctly.
pub(super) const MIN_UNMASKED_ACCURACY: f64 = 0.5;
