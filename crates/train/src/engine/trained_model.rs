//! The model to train: its graphs, the parameter groups and the initial values of the parameters. Invariant: determined
//! by the configuration and the vocabulary alone; no training data is read here.

use crate::TrainConfigError;
use crate::TrainError;
use crate::config::{
    ActivationChoice, Decay, LoraSection, MaskKind, ModelKind, ModelSection, NormChoice, PositionChoice,
    TrainConfig,
};
use crate::tokenizer;
use crate::{StatePart, StoredTensor};
use plimsoll_data::hex::hex;
use plimsoll_data::weights::{HubEnv, Weights};
use plimsoll_exec::ReadError;
use plimsoll_graph::ops::Mask;
use plimsoll_graph::{Bounds, Graph, Param, ParamPiece, VerifyError};
use plimsoll_models::{
    Biases, CALLER_LM_HEAD, CallerConfig, CallerObjective, CallerTask, CarriedTensor, DecoderConfig,
    Distillation, Encoder, Experts, HeadConfig, Init, Lora, Mlp, Positions, RopeScaling, SequenceModel,
    Training, TrainingTask, TunedPart, Tuning, group, init, init_param, mlp_head, tensor_of_teacher, trains,
};
use plimsoll_plan::{ParameterGroup, PlanError};
use plimsoll_runtime::adapter::{self, Adapter};
use plimsoll_runtime::hub::{CONFIG, Need, trainable};
use plimsoll_runtime::model::read_config;
use plimsoll_runtime::session::WeightSource;
use plimsoll_runtime::{
    CallerModel, EncoderModel, Observer, RuntimeError, check_decoder, find_in_decoder, leftovers,
};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Maximum number of decoder layers: planning time grows with the layers, and no published model has a quarter as many.
pub(super) const MAX_LAYERS: u64 = 1024;

/// The model to train, with the weights and files it starts from.
#[derive(Clone)]
pub(super) struct TrainedModel {
    kind: ModelFamily,
    loss: Training,
    /// Weights to start from; `None` for random initialisation.
    from: Option<Arc<InitialWeights>>,
    name: String,
    /// Contents of the initial model's config.json, with the names of the classes; empty if there is none.
    config: String,
    /// Names and contents of the tokenizer's files.
    tokenizer: Vec<(String, Vec<u8>)>,
    /// Whether the tokens of a language model are the bytes of a text.
    reads_bytes: bool,
}

/// Model family, with its configuration.
#[derive(Clone)]
enum ModelFamily {
    Decoder(DecoderConfig),
    Encoder { encoder: Encoder, task: TrainingTask, lora: Option<Lora> },
    Head(HeadConfig),
    Caller { caller: CallerConfig, objective: CallerObjective, teachers: Arc<[CallerModel]> },
}

/// Values of a classifier's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClassifierOutput {
    /// The output `scores`: the softmax of the logits.
    Probabilities,
    /// The output `logits`: the logits of all tasks, one task after another.
    Logits,
}

/// Initial weights.
enum InitialWeights {
    Encoder(EncoderModel),
    Decoder { folder: PathBuf, weights: Weights },
    Head(Weights),
    Caller { folder: PathBuf, weights: Weights },
}

impl TrainedModel {
    /// Builds the model of a configuration. `vocabulary` is the number of tokens; `widths` are the widths of a head's
    /// two inputs.
    pub fn open(
        config: &TrainConfig,
        vocabulary: u64,
        widths: &[u64],
        observer: &mut dyn Observer,
    ) -> Result<Self, TrainError> {
        let model = &config.model;
        // `TrainConfig::parse` has already checked this. A configuration that was changed since then would silently be
        // trained as a different model.
        if let Some(why) = config.contradiction(observer)? {
            return Err(TrainConfigError::Contradiction { keys: vec![why] }.into());
        }
        let loss = Training { chunk: 1, z_loss: config.loss.z as f32, dropout: model.dropout as f32 };
        let (kind, from) = match model.kind {
            ModelKind::MoeLm | ModelKind::DenseLm => decoder(config, vocabulary, observer)?,
            ModelKind::Esm2 | ModelKind::DnabertS => encoder(model, observer)?,
            ModelKind::Head => (ModelFamily::Head(head(model, widths)?), file(model)?),
            ModelKind::Caller => caller(config, vocabulary, observer)?,
        };
        if let ModelFamily::Decoder(c) = &kind
            && c.layers > MAX_LAYERS
        {
            return Err(TrainError::TooManyLayers { layers: c.layers, most: MAX_LAYERS });
        }
        let folder = match (&from, &model.from) {
            (Some(InitialWeights::Encoder(model)), _) => model.folder.clone(),
            (Some(InitialWeights::Decoder { folder, .. } | InitialWeights::Caller { folder, .. }), _) => {
                Some(folder.clone())
            }
            (Some(InitialWeights::Head(_)), Some(from)) => Some(PathBuf::from(from)),
            (_, _) => None,
        };
        let tokenizer = tokenizer::files(config, folder.as_deref())?;
        let reads_bytes = tokenizer::reads_bytes(config, folder.as_deref())?;
        let initial_config = match (&kind, &folder) {
            (ModelFamily::Encoder { .. } | ModelFamily::Decoder(_), Some(folder)) => {
                read_config(&folder.join("config.json"))?
            }
            // The config.json of a head or a caller is written from the run's configuration alone.
            (ModelFamily::Encoder { .. } | ModelFamily::Decoder(_), None)
            | (ModelFamily::Head(_) | ModelFamily::Caller { .. }, _) => String::new(),
        };
        Ok(Self {
            tokenizer,
            reads_bytes,
            config: with_classes(initial_config, &model.class_names),
            name: model.from.clone().unwrap_or_default(),
            from: from.map(Arc::new),
            kind,
            loss,
        })
    }

    /// Returns the same model with the adapters of another configuration, the only part of the model that a remedy
    /// changes.
    pub fn like(&self, model: &ModelSection) -> Self {
        let kind = match self.kind.clone() {
            ModelFamily::Encoder { encoder, task, .. } => {
                let lora = model.lora.as_ref().map(|l| adapters(l, &encoder));
                ModelFamily::Encoder { encoder, task, lora }
            }
            kind @ (ModelFamily::Decoder(_) | ModelFamily::Head(_) | ModelFamily::Caller { .. }) => kind,
        };
        Self { kind, ..self.clone() }
    }

    /// Number of layers; 0 for a head.
    pub fn layers(&self) -> u32 {
        let layers = match &self.kind {
            ModelFamily::Decoder(c) => c.layers,
            ModelFamily::Encoder { encoder, .. } => encoder.layers(),
            ModelFamily::Head(_) => 0,
            ModelFamily::Caller { caller, .. } => caller.layers,
        };
        u32::try_from(layers).unwrap_or(u32::MAX)
    }

    /// Returns the model family with another number of layers.
    fn with_layers(&self, layers: u32) -> ModelFamily {
        let layers = u64::from(layers);
        match self.kind.clone() {
            ModelFamily::Decoder(c) => ModelFamily::Decoder(DecoderConfig { layers, ..c }),
            ModelFamily::Encoder { encoder, task, lora } => {
                ModelFamily::Encoder { encoder: encoder.with_layers(layers), task, lora }
            }
            ModelFamily::Caller { caller, objective, teachers } => {
                ModelFamily::Caller { caller: CallerConfig { layers, ..caller }, objective, teachers }
            }
            kind @ ModelFamily::Head(_) => kind,
        }
    }

    /// Builds the graphs of a training micro-batch and of an evaluation batch, with `layers` layers and `chunk` rows of
    /// logits at a time.
    pub fn graphs(&self, bounds: Bounds, chunk: u32, layers: u32) -> Result<(Graph, Graph), PlanError> {
        let training = Training { chunk, ..self.loss };
        let still = Training { dropout: 0.0, ..training };
        Ok(match &self.with_layers(layers) {
            ModelFamily::Decoder(c) => (
                c.train_graph(bounds, &training).map_err(graph_error)?,
                c.train_graph(bounds, &still).map_err(graph_error)?,
            ),
            ModelFamily::Encoder { encoder, task, lora } => {
                let lora = lora.as_ref();
                (
                    encoder.train_graph(bounds, *task, &training, lora).map_err(bad_model)?,
                    encoder.train_graph(bounds, *task, &still, lora).map_err(bad_model)?,
                )
            }
            ModelFamily::Head(c) => (
                c.train_graph(bounds, &training).map_err(graph_error)?,
                c.evaluation_graph(bounds, &still).map_err(graph_error)?,
            ),
            ModelFamily::Caller { caller, objective, .. } => (
                caller.train_graph(bounds, objective, &training).map_err(graph_error)?,
                caller.evaluation_graph(bounds, objective, &still).map_err(graph_error)?,
            ),
        })
    }

    /// Builds the inference graph of a classifier, and returns it with the name of its output, which has a row of values
    /// for each sequence; `None` for a language model.
    pub fn classifier(&self, bounds: Bounds) -> Option<(Result<Graph, VerifyError>, ClassifierOutput)> {
        match &self.kind {
            ModelFamily::Encoder { encoder, task: TrainingTask::Classes(classes), .. } => {
                Some((encoder.classifier_graph(bounds, *classes), ClassifierOutput::Probabilities))
            }
            ModelFamily::Head(c) => Some((mlp_head(c, bounds), ClassifierOutput::Probabilities)),
            ModelFamily::Caller { caller, objective: CallerObjective::Tasks { .. }, .. } => {
                Some((caller.graph(bounds), ClassifierOutput::Logits))
            }
            ModelFamily::Caller { objective: CallerObjective::MaskedCodons, .. }
            | ModelFamily::Encoder { task: TrainingTask::MaskedLm, .. }
            | ModelFamily::Decoder(_) => None,
        }
    }

    /// Returns the parameter group: frozen, trained with weight decay, or trained without.
    pub fn group(&self, config: &TrainConfig, param: &Param) -> ParameterGroup {
        let tuning = match &self.kind {
            ModelFamily::Encoder { lora: Some(_), .. } => Tuning::Adapters,
            ModelFamily::Encoder { .. } if config.model.freeze_encoder => Tuning::Head,
            ModelFamily::Encoder { .. }
            | ModelFamily::Decoder(_)
            | ModelFamily::Head(_)
            | ModelFamily::Caller { .. } => Tuning::Full,
        };
        if !trains(tuning, param) || tensor_of_teacher(&param.name).is_some() {
            return ParameterGroup::Frozen;
        }
        let decays = match (group(param), config.optimizer.decay) {
            (plimsoll_models::Group::Matrix, _) | (_, Decay::All) => true,
            (
                plimsoll_models::Group::Embedding
                | plimsoll_models::Group::Vector
                | plimsoll_models::Group::Buffer,
                Decay::Matrices,
            ) => false,
        };
        if decays && !config.optimizer.no_decay.iter().any(|pattern| is_like(&param.name, pattern)) {
            ParameterGroup::Decay
        } else {
            ParameterGroup::NoDecay
        }
    }

    /// Returns the source of the initial parameter values: the weights of `from`, and random values drawn from `seed`
    /// for parameters that `from` does not have. Any number of threads may call it.
    pub fn source(&self, seed: u64) -> impl Fn(&Param, Range<u64>, &mut [f32]) -> Result<(), ReadError> + Sync {
        let kind = &self.kind;
        let from = self.from.as_deref();
        move |param, range, out| {
            if let Some((teacher, param)) = kind.of_teacher(param) {
                return Ok(teacher.read(&param, range, out)?);
            }
            let file = param.pieces.iter().map(|piece| Some((from?, kind.found(from?, piece)?)));
            let Some(found) = file.collect::<Option<Vec<_>>>() else {
                init_param(|piece| kind.init(piece), seed, param, range, out);
                return Ok(());
            };
            // The range may span several pieces, each of which is a tensor of its own in the file.
            let mut rest = out;
            for (i, first, count) in param.split_by_piece(range) {
                let (part, after) = std::mem::take(&mut rest).split_at_mut(count);
                rest = after;
                let (from, name) = &found[i];
                from.weights().read_f32(name, first..first + count as u64, part)?;
            }
            Ok(())
        }
    }

    /// Reads initial values of a whole tensor from element `first` on; a parameter may hold only some of the tensor's
    /// rows.
    pub fn tensor(&self, seed: u64, piece: &ParamPiece, first: u64, out: &mut [f32]) -> Result<(), TrainError> {
        match self.from.as_deref().and_then(|from| Some((from, self.kind.found(from, piece)?))) {
            Some((from, name)) => Ok(from.weights().read_f32(&name, first..first + out.len() as u64, out)?),
            None => {
                init(&self.kind.init(piece), seed, &piece.tensor, first, out);
                Ok(())
            }
        }
    }

    /// Returns the name of a tensor in weight files; `None` if the file does not contain the tensor, because it is
    /// derived from the configuration, or because it belongs to the base model of an adapter or to a teacher.
    pub fn hub_name(&self, tensor: &str) -> Option<String> {
        match &self.kind {
            ModelFamily::Decoder(c) => c.derived(tensor).is_none().then(|| tensor.to_owned()),
            ModelFamily::Encoder { encoder, lora, .. } => match lora {
                None => Some(encoder.hub_name(tensor)),
                Some(_) => {
                    let is_own = TunedPart::of(tensor) != TunedPart::Base;
                    is_own.then(|| format!("{}{}", adapter::PREFIX, encoder.hub_name(tensor)))
                }
            },
            ModelFamily::Caller { caller, .. } => {
                let is_own = tensor_of_teacher(tensor).is_none() && caller.derived(tensor).is_none();
                is_own.then(|| tensor.to_owned())
            }
            ModelFamily::Head(_) => Some(tensor.to_owned()),
        }
    }

    /// The digests of the files of each teacher, by name.
    pub fn teachers(&self) -> Result<Vec<BTreeMap<String, String>>, TrainError> {
        let ModelFamily::Caller { teachers, .. } = &self.kind else { return Ok(vec![]) };
        teachers.iter().map(file_digests).collect()
    }

    /// Tensors of the weight file that no graph uses; they are copied into checkpoints.
    pub fn carried_tensors(&self) -> Vec<CarriedTensor> {
        match &self.kind {
            ModelFamily::Encoder { encoder, lora: None, .. } => encoder.carried_tensors(),
            ModelFamily::Encoder { lora: Some(_), .. }
            | ModelFamily::Decoder(_)
            | ModelFamily::Head(_)
            | ModelFamily::Caller { .. } => vec![],
        }
    }

    /// Returns the file name of a part of the checkpoint.
    pub fn file(&self, part: StatePart) -> &'static str {
        match (part, &self.kind) {
            (StatePart::Model, ModelFamily::Encoder { lora: Some(_), .. }) => adapter::WEIGHTS,
            (StatePart::Average, ModelFamily::Encoder { lora: Some(_), .. }) => "ema/adapter_model.safetensors",
            (StatePart::Model | StatePart::State | StatePart::Average, _) => part.file(),
        }
    }

    /// Returns the files stored next to the tensors named `tensors`: the configuration and the tokenizer.
    pub fn extra_files(&self, tensors: &[StoredTensor]) -> Vec<(String, Vec<u8>)> {
        let (name, text) = match &self.kind {
            ModelFamily::Decoder(c) => (CONFIG, c.to_json(&self.config, self.reads_bytes)),
            ModelFamily::Encoder { encoder, task, lora: None } => {
                (CONFIG, encoder.to_json(*task, &self.config))
            }
            ModelFamily::Encoder { task, lora: Some(lora), .. } => {
                (adapter::CONFIG, self.adapter(*task, lora, tensors))
            }
            ModelFamily::Caller { caller, .. } => (CONFIG, caller.to_json()),
            ModelFamily::Head(_) => return vec![],
        };
        std::iter::once((name.to_owned(), text.into_bytes())).chain(self.tokenizer.clone()).collect()
    }

    fn adapter(&self, task: TrainingTask, lora: &Lora, tensors: &[StoredTensor]) -> String {
        // Each adapted module has one tensor A.
        let modules =
            tensors.iter().filter_map(|t| match TunedPart::of(t.name.strip_prefix(adapter::PREFIX)?) {
                TunedPart::AdapterA { module } => Some(module.to_owned()),
                TunedPart::AdapterB { .. } | TunedPart::Classifier | TunedPart::Base => None,
            });
        let adapter = Adapter {
            base: self.name.clone(),
            rank: lora.rank,
            alpha: f64::from(lora.alpha),
            modules: modules.collect(),
            classifier: task != TrainingTask::MaskedLm,
        };
        adapter.to_json()
    }
}

/// The error of a graph that was built wrongly, or is too large.
fn graph_error(source: VerifyError) -> PlanError {
    PlanError::of_graph("build", source)
}

/// The error of a model that the configuration cannot have.
fn bad_model(error: impl std::fmt::Display) -> PlanError {
    PlanError::BadPolicy { field: "model", why: error.to_string() }
}

/// The digests of a teacher's files, by name.
fn file_digests(teacher: &CallerModel) -> Result<BTreeMap<String, String>, TrainError> {
    let config = (CONFIG.to_owned(), hex(&Sha256::digest(teacher.config_text.as_bytes())));
    Ok(teacher.weights.sha256()?.into_iter().chain([config]).collect())
}

impl InitialWeights {
    fn weights(&self) -> &Weights {
        match self {
            Self::Encoder(model) => &model.weights,
            Self::Decoder { weights, .. } | Self::Head(weights) | Self::Caller { weights, .. } => weights,
        }
    }
}

impl ModelFamily {
    fn init(&self, piece: &ParamPiece) -> Init {
        match self {
            Self::Decoder(c) => c.init(piece),
            Self::Encoder { encoder, .. } => encoder.init(piece),
            Self::Head(c) => c.init(piece),
            Self::Caller { caller, .. } => caller.init(piece),
        }
    }

    /// The teacher that has a parameter of a training graph, and the parameter with the names that it has there; `None` for
    /// a parameter of the model that is trained.
    fn of_teacher(&self, param: &Param) -> Option<(&CallerModel, Param)> {
        let Self::Caller { teachers, .. } = self else { return None };
        let (number, name) = tensor_of_teacher(&param.name)?;
        let pieces = param.pieces.iter().map(|piece| {
            let tensor = tensor_of_teacher(&piece.tensor)?.1.to_owned();
            Some(ParamPiece { tensor, ..piece.clone() })
        });
        let pieces = pieces.collect::<Option<_>>()?;
        Some((teachers.get(number)?, Param { name: name.to_owned(), pieces }))
    }

    /// Returns the tensor's name in the initial weights; `None` if they do not have the tensor.
    fn found(&self, from: &InitialWeights, piece: &ParamPiece) -> Option<String> {
        match from {
            InitialWeights::Encoder(model) => model.find(&piece.tensor),
            // A head of the initial model belongs to a task of the same name and classes.
            InitialWeights::Caller { weights, .. } => weights
                .get(&piece.tensor)
                .is_some_and(|found| found.shape() == piece.shape)
                .then(|| piece.tensor.clone()),
            // Rotary frequencies are those of the configuration, whatever a file says.
            InitialWeights::Decoder { .. } if piece.tensor.ends_with("inv_freq") => None,
            InitialWeights::Decoder { weights, .. } => find_in_decoder(weights, &piece.tensor),
            InitialWeights::Head(weights) => weights.get(&piece.tensor).is_some().then(|| piece.tensor.clone()),
        }
    }
}

/// Sets the names of the classes in the text of a config.json. Without names the text is returned as it is.
fn with_classes(config: String, names: &[String]) -> String {
    let Ok(serde_json::Value::Object(mut value)) = serde_json::from_str(&config) else { return config };
    if names.is_empty() {
        return config;
    }
    let numbered = names.iter().enumerate().map(|(number, name)| (number.to_string(), name.as_str().into()));
    value.insert("id2label".to_owned(), serde_json::Value::Object(numbered.collect()));
    serde_json::Value::Object(value).to_string()
}

/// Whether `name` matches `pattern`, in which `*` stands for any text.
fn is_like(name: &str, pattern: &str) -> bool {
    match pattern.split_once('*') {
        None => name == pattern,
        Some((start, rest)) => name.strip_prefix(start).is_some_and(|tail| {
            (0..=tail.len()).filter(|&i| tail.is_char_boundary(i)).any(|i| is_like(&tail[i..], rest))
        }),
    }
}

fn decoder(
    config: &TrainConfig,
    vocabulary: u64,
    observer: &mut dyn Observer,
) -> Result<(ModelFamily, Option<InitialWeights>), TrainError> {
    let m = &config.model;
    let experts = (m.kind == ModelKind::MoeLm).then(|| Experts {
        experts: m.experts.count,
        top_k: m.experts.top_k,
        shared: m.experts.shared,
        renormalise: m.experts.renormalise,
        capacity: (m.experts.capacity.unwrap_or(0.0) * 1000.0).round() as u32,
        balance: config.loss.balance as f32,
        z: config.loss.router_z as f32,
    });
    if let Some(from) = &m.from {
        let place = trainable(from, Need::Weights, &HubEnv::from_process(), observer)?;
        let path = place.config();
        let folder = path.parent().unwrap_or(Path::new(".")).to_owned();
        let text = read_config(&path)?;
        let c = DecoderConfig::from_json(&text).map_err(|source| RuntimeError::Config { path, source })?;
        let weights = place.weights().ok_or_else(|| TrainError::WithoutWeights { from: from.clone() })?;
        let weights = Weights::open(weights)?;
        check_decoder(from, &c, &weights)?;
        leftovers::note(from, &SequenceModel::Decoder(c.clone()), &weights, observer)?;
        if !c.tied && find_in_decoder(&weights, "lm_head.weight").is_none() {
            return Err(TrainError::WithoutOutputProjection { from: from.clone() });
        }
        // The weights of the auxiliary losses come from the run's configuration, not from the model's file.
        let experts = c
            .experts
            .clone()
            .map(|own| experts.map_or(own.clone(), |e| Experts { balance: e.balance, z: e.z, ..own }));
        let kind = ModelFamily::Decoder(DecoderConfig { experts, ..c });
        return Ok((kind, Some(InitialWeights::Decoder { folder, weights })));
    }
    let mlp = match m.activation {
        ActivationChoice::Gelu => Mlp::Gelu,
        ActivationChoice::Swiglu => Mlp::SwiGlu,
    };
    let a = m.attention;
    let mask = match a.mask {
        MaskKind::Full => Mask::Full,
        MaskKind::Causal => Mask::Causal,
        MaskKind::Window => Mask::Window(a.window as u32),
        MaskKind::BlockSparse => {
            Mask::BlockSparse { block: a.block as u32, local: a.local as u32, global: a.global as u32 }
        }
    };
    let decoder = DecoderConfig {
        vocab_size: m.vocabulary.unwrap_or(vocabulary),
        hidden_size: m.hidden,
        layers: m.layers,
        heads: m.heads,
        kv_heads: m.kv_heads.unwrap_or(m.heads),
        head_dim: m.hidden / m.heads,
        intermediate_size: m.intermediate,
        norm: if m.norm == NormChoice::RmsNorm {
            plimsoll_models::Norm::Rms
        } else {
            plimsoll_models::Norm::Layer
        },
        eps: m.norm_eps as f32,
        positions: match m.position {
            PositionChoice::Rotary => Positions::Rotary(m.rope_theta as f32),
            PositionChoice::Alibi => Positions::Alibi,
        },
        mask,
        mlp,
        bias: Biases::all(m.bias),
        qk_norm: false,
        scaling: RopeScaling::None,
        tied: m.tied_head,
        experts,
    };
    if decoder.vocab_size < vocabulary {
        return Err(TrainError::Vocabulary { entries: decoder.vocab_size, tokens: vocabulary });
    }
    Ok((ModelFamily::Decoder(decoder), None))
}

fn encoder(
    m: &ModelSection,
    observer: &mut dyn Observer,
) -> Result<(ModelFamily, Option<InitialWeights>), TrainError> {
    let task = m.classes.map_or(TrainingTask::MaskedLm, TrainingTask::Classes);
    let Some(from) = &m.from else {
        return Err(TrainError::NoModel { kind: m.kind.name() });
    };
    let model = EncoderModel::open(from, &HubEnv::from_process(), observer)?;
    let encoder = model.encoder.clone();
    let from = InitialWeights::Encoder(model);
    let right = match &encoder {
        Encoder::Esm2(_) => m.kind == ModelKind::Esm2,
        Encoder::DnabertS(_) => m.kind == ModelKind::DnabertS,
    };
    if !right {
        return Err(TrainError::OtherFamily { kind: m.kind.name(), family: encoder.family() });
    }
    let lora = m.lora.as_ref().map(|l| adapters(l, &encoder));
    if let (InitialWeights::Encoder(model), Some(_), TrainingTask::MaskedLm) = (&from, &lora, task) {
        check_adapts_whole(model)?;
    }
    Ok((ModelFamily::Encoder { encoder, task, lora }, Some(from)))
}

/// Rejects adapters for a model without its language-model head: adapters leave all other tensors unchanged, so the
/// missing head would stay at random values that no user of the base model could reproduce.
fn check_adapts_whole(model: &EncoderModel) -> Result<(), TrainError> {
    let bounds = Bounds { tokens: 4, sequences: 1, longest: 4, packs: 1 };
    let graph = model.encoder.train_graph(bounds, TrainingTask::MaskedLm, &Training::default(), None);
    let graph = graph.map_err(|e| RuntimeError::bug(e.to_string()))?;
    for piece in graph.params.iter().flat_map(|param| &param.pieces) {
        let tensor = &piece.tensor;
        if model.find(tensor).is_none() && plimsoll_models::derived(&model.encoder, tensor).is_none() {
            return Err(TrainError::LoraWithoutHead { model: model.name.clone(), tensor: tensor.clone() });
        }
    }
    Ok(())
}

/// Adapters for the named projections; by default for queries and values, as in Hu et al. 2021 (section 7.1).
fn adapters(section: &LoraSection, encoder: &Encoder) -> Lora {
    let usual: &[&str] = match encoder {
        Encoder::Esm2(_) => &["query", "value"],
        // DNABERT-S computes queries, keys and values with a single matrix.
        Encoder::DnabertS(_) => &["Wqkv"],
    };
    let named = section.targets.iter().map(|t| t.trim_matches('*').to_owned());
    let targets = if section.targets.is_empty() {
        usual.iter().map(|&t| t.to_owned()).collect()
    } else {
        named.collect()
    };
    Lora { rank: section.rank, alpha: section.alpha as f32, targets }
}

fn caller(
    config: &TrainConfig,
    vocabulary: u64,
    observer: &mut dyn Observer,
) -> Result<(ModelFamily, Option<InitialWeights>), TrainError> {
    let m = &config.model;
    let tasks =
        m.tasks.iter().map(|task| CallerTask { name: task.name.clone(), classes: task.classes.clone() });
    let caller = CallerConfig {
        vocab_size: m.vocabulary.unwrap_or(vocabulary),
        hidden_size: m.hidden,
        layers: m.layers,
        heads: m.heads,
        intermediate_size: m.intermediate,
        eps: m.norm_eps as f32,
        rope_theta: m.rope_theta as f32,
        tasks: tasks.collect(),
    };
    let d = &config.distillation;
    let teachers = d.teacher.iter().map(|folder| teacher(Path::new(folder), &caller));
    let teachers: Arc<[CallerModel]> = teachers.collect::<Result<_, _>>()?;
    let distillation = (!teachers.is_empty()).then(|| Distillation {
        teachers: teachers.iter().map(|teacher| teacher.config.clone()).collect(),
        weight: d.weight as f32,
        temperature: d.temperature as f32,
    });
    let weights = m.tasks.iter().map(|task| task.weight as f32).collect();
    let objective = if m.tasks.is_empty() {
        CallerObjective::MaskedCodons
    } else {
        CallerObjective::Tasks { weights, distillation }
    };
    let Some(from) = &m.from else { return Ok((ModelFamily::Caller { caller, objective, teachers }, None)) };
    let place = trainable(from, Need::Model, &HubEnv::from_process(), observer)?;
    let path = place.config();
    let folder = path.parent().unwrap_or(Path::new(".")).to_owned();
    let text = read_config(&path)?;
    let initial = CallerConfig::from_json(&text).map_err(|source| RuntimeError::Config { path, source })?;
    let weights =
        Weights::open(place.weights().ok_or_else(|| TrainError::WithoutWeights { from: from.clone() })?)?;
    // The encoder must be there as a whole. A head is taken if its task has the same classes, else initialised.
    let bounds = Bounds { tokens: 6, sequences: 1, longest: 1, packs: 1 };
    let graph = caller.train_graph(bounds, &CallerObjective::MaskedCodons, &Training::default())?;
    for piece in graph.params.iter().flat_map(|param| &param.pieces) {
        if caller.derived(&piece.tensor).is_none() && piece.tensor != CALLER_LM_HEAD {
            weights.expect(&piece.tensor, &piece.shape)?;
        }
    }
    for task in &caller.tasks {
        if let Some(other) = initial.tasks.iter().find(|other| other.name == task.name && *other != task) {
            return Err(TrainError::OtherClasses {
                from: from.clone(),
                task: task.name.clone(),
                classes: other.classes.join(", "),
            });
        }
    }
    Ok((ModelFamily::Caller { caller, objective, teachers }, Some(InitialWeights::Caller { folder, weights })))
}

/// Opens the teacher in `folder`, which must have the tokens and all tasks of `caller`.
fn teacher(folder: &Path, caller: &CallerConfig) -> Result<CallerModel, TrainError> {
    let teacher = CallerModel::open(folder)?;
    let found = teacher.config.vocab_size;
    let wanted = caller.vocab_size;
    if found != wanted {
        return Err(TrainError::TeacherVocabulary { teacher: folder.to_owned(), found, wanted });
    }
    match caller.tasks.iter().find(|task| !teacher.config.tasks.contains(task)) {
        None => Ok(teacher),
        Some(task) => {
            let of_teacher = teacher.config.tasks.iter();
            let found = match of_teacher.clone().find(|other| other.name == task.name) {
                Some(other) => format!("there its classes are {}", other.classes.join(", ")),
                None => {
                    let names: Vec<&str> = of_teacher.map(|task| task.name.as_str()).collect();
                    format!("its tasks are {}", names.join(", "))
                }
            };
            Err(TrainError::TeacherTask {
                teacher: folder.to_owned(),
                task: task.name.clone(),
                classes: task.classes.join(", "),
                found,
            })
        }
    }
}

fn head(m: &ModelSection, widths: &[u64]) -> Result<HeadConfig, TrainError> {
    let [dna, protein] = *widths else {
        return Err(TrainError::HeadParts { given: widths.len() });
    };
    Ok(HeadConfig { dna, protein, hidden: m.hidden, classes: m.classes.unwrap_or(2) })
}

fn file(m: &ModelSection) -> Result<Option<InitialWeights>, TrainError> {
    let Some(from) = &m.from else { return Ok(None) };
    Ok(Some(InitialWeights::Head(Weights::open(Path::new(from))?)))
}

#[cfg(test)]
mod tests {
    use super::is_like;

    #[test]
    fn patterns() {
        for (name, pattern, like) in [
            ("a.b", "a.b", true),
            ("a.b", "a", false),
            ("a.b", "a*", true),
            ("a.b", "*b", true),
            ("a.b", "*", true),
            ("layers.10.query", "layers.1.*", false),
            ("layers.1.query.weight", "*.1.*weight", true),
            ("ä", "*ä*", true),
        ] {
            assert_eq!(is_like(name, pattern), like, "{name} {pattern}");
        }
    }
}
