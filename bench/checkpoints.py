"""Opens checkpoints of `plimsoll train` with transformers and peft, and checks that no tensor is missing or unexpected and
that the loss on equal tokens is equal. Trains every kind of model for two steps, prints a table, and fails on a difference.

    python bench/checkpoints.py [PLIMSOLL]        # target/release/plimsoll
"""

import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench/fixtures"))
import encoders  # noqa: E402  (DNABERT-S in plain torch: its own code needs a GPU library)

GOLDENS = ROOT / "fixtures/goldens"
PLIMSOLL = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/release/plimsoll").resolve()
MOST = 1e-5
logging.disable(logging.WARNING)
transformers.utils.logging.disable_progress_bar()

COMMON = {
    "schedule.kind": "constant",
    "schedule.warmup": 0,
    "run.steps": 2,
    "run.evaluate_every": 2,
    "run.threads": 2,
    "data.workers": 1,
}
DECODER = {
    "model.hidden": 64,
    "model.layers": 2,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.intermediate": 128,
    "model.norm": "rms_norm",
    "model.activation": "swiglu",
    "model.bias": "false",
    "model.experts.count": 4,
    "data.train": f"[{ROOT}/examples/corpus.txt]",
    "data.document": "file",
    "data.longest": 2048,
    "batch.tokens": 2048,
    "optimizer.lr": 1e-2,
}
# All residues are targets and none is replaced, so that both sides compute the loss of equal tokens.
ENCODER = {
    "data.longest": 1024,
    "batch.tokens": 2048,
    "batch.micro_tokens": 1024,
    "data.masking.fraction": 1,
    "data.masking.mask": 0,
    "data.masking.random": 0,
    "optimizer.lr": 1e-3,
}
ESM = ENCODER | {
    "model.kind": "esm2",
    "model.from": GOLDENS / "esm2",
    "data.train": f"[{GOLDENS}/pipeline/expected_500/protein.faa]",
    "data.validation": f"[{GOLDENS}/esm2/proteins.faa]",
}
DNA = ENCODER | {
    "model.kind": "dnabert_s",
    "model.from": GOLDENS / "dnabert_s",
    "data.train": f"[{GOLDENS}/pipeline/reads.fa]",
    "data.validation": f"[{GOLDENS}/dnabert_s/reads.fa]",
}


def train(folder, keys):
    """Trains a model; returns the newest checkpoint and its validation loss."""
    (folder / "run.yaml").write_text("")
    flags = [f"--set={key}={value}" for key, value in (COMMON | keys).items()]
    command = [PLIMSOLL, "train", folder / "run.yaml", "-o", folder / "run", "--quiet", *flags]
    subprocess.run(command, check=True)
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "validation_loss" in line][-1]
    return sorted((folder / "run/checkpoints").glob("step-*"))[-1], found


def records(path):
    """Names and sequences of a FASTA file."""
    parts = [part.split("\n", 1) for part in Path(path).read_text().split(">")[1:]]
    return [(head.split()[0], body.replace("\n", "")) for head, body in parts]


def opened(kind, folder, **more):
    """Opens a model and asserts that no tensor is missing or unexpected."""
    model, info = kind.from_pretrained(folder, output_loading_info=True, **more)
    bad = {key: value for key, value in info.items() if value}
    assert not bad, f"{folder}: {bad}"
    return model.eval()


def cross_entropy(logits, targets):
    """Sum of the cross-entropy over targets, and the number of targets."""
    rows = torch.log_softmax(logits.double(), -1)
    return -rows.gather(1, targets[:, None]).sum().item(), len(targets)


def mean(pairs):
    losses, counts = zip(*pairs)
    return sum(losses) / sum(counts), sum(counts)


def decoder(folder, text, **keys):
    path, found = train(folder, DECODER | {"data.validation": f"[{text}]"} | keys)
    model = opened(AutoModelForCausalLM, path)
    ids = torch.tensor([list(text.read_bytes().strip())])
    logits = model(input_ids=ids).logits[0]
    return type(model).__name__, mean([cross_entropy(logits[:-1], ids[0, 1:])]), found


def masked(model, tokenizer, sequences):
    for _, sequence in sequences:
        ids = tokenizer(sequence, return_tensors="pt")["input_ids"]
        yield cross_entropy(model(input_ids=ids).logits[0, 1:-1], ids[0, 1:-1])


def esm2(folder):
    path, found = train(folder, ESM)
    model = opened(AutoModelForMaskedLM, path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    return type(model).__name__, mean(masked(model, tokenizer, records(GOLDENS / "esm2/proteins.faa"))), found


def dnabert_s(folder):
    """transformers has no class for DNABERT-S, so tensor names are compared with the hub's bert_layers.py."""
    path, found = train(folder, DNA)
    config = json.loads((path / "config.json").read_text())
    w = load_file(path / "model.safetensors")
    shapes = encoders.dnabert_s_shapes(config)
    assert {name: tuple(t.shape) for name, t in w.items()} == shapes
    tokenizer = AutoTokenizer.from_pretrained(path)
    pairs = []
    for _, sequence in records(GOLDENS / "dnabert_s/reads.fa"):
        ids = torch.tensor(tokenizer(sequence)["input_ids"])
        logits = encoders.dnabert_s(config, w, ids, [(0, len(ids))])
        letters = ids >= 5  # no special token, [UNK] included, is a target
        pairs.append(cross_entropy(logits[letters], ids[letters]))
    return "not opened: the model in plain torch", mean(pairs), found


def labels(folder):
    """Writes a label table with arbitrary classes."""
    names = []
    for fasta in ("pipeline/expected_500/protein.faa", "esm2/proteins.faa"):
        names += [name for name, _ in records(GOLDENS / fasta)]
    table = folder / "labels.tsv"
    table.write_text("".join(f"{name}\t{i % 3}\n" for i, name in enumerate(dict.fromkeys(names))))
    return table


def pooled(model, tokenizer, table):
    """Losses of the logits of a token classifier, averaged over the residues of each sequence."""
    classes = dict(line.split("\t") for line in table.read_text().splitlines())
    for name, sequence in records(GOLDENS / "esm2/proteins.faa"):
        ids = tokenizer(sequence, return_tensors="pt")["input_ids"]
        logits = model(input_ids=ids).logits[0, 1:-1].mean(0, keepdim=True)
        yield cross_entropy(logits, torch.tensor([int(classes[name])]))


def classifier(folder):
    table = labels(folder)
    path, found = train(folder, ESM | {"model.classes": 3, "data.labels": table})
    model = opened(AutoModelForTokenClassification, path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    return type(model).__name__, mean(pooled(model, tokenizer, table)), found


LORA = {"model.lora.rank": 4, "model.lora.alpha": 6, "optimizer.lr": 1e-2}


def adapted(base, path):
    """Opens the base model with the adapter and asserts that no tensor of the adapter is missing or unexpected."""
    model = PeftModel.from_pretrained(base, path).eval()
    assert set(get_peft_model_state_dict(model)) == set(load_file(path / "adapter_model.safetensors"))
    return model


def merged(folder, path):
    subprocess.run([PLIMSOLL, "merge", path, "-o", folder / "merged", "--quiet"], check=True)
    return folder / "merged"


def lora(folder):
    path, found = train(folder, ESM | LORA)
    model = adapted(AutoModelForMaskedLM.from_pretrained(GOLDENS / "esm2"), path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    sequences = records(GOLDENS / "esm2/proteins.faa")
    yield "PeftModel over EsmForMaskedLM", mean(masked(model, tokenizer, sequences)), found
    model = AutoModelForMaskedLM.from_pretrained(merged(folder, path))
    yield "EsmForMaskedLM, merged", mean(masked(model.eval(), tokenizer, sequences)), found


def lora_classifier(folder):
    table = labels(folder)
    keys = ESM | LORA | {"model.classes": 3, "data.labels": table, "model.lora.targets": "[dense]"}
    path, found = train(folder, keys)
    model = adapted(AutoModelForTokenClassification.from_pretrained(GOLDENS / "esm2", num_labels=3), path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    yield "PeftModelForTokenClassification", mean(pooled(model, tokenizer, table)), found
    model = AutoModelForTokenClassification.from_pretrained(merged(folder, path))
    yield "EsmForTokenClassification, merged", mean(pooled(model.eval(), tokenizer, table)), found


def main():
    text = ROOT / "examples/corpus.txt"
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        (scratch / "val.txt").write_bytes(text.read_bytes()[:1500])
        val = scratch / "val.txt"

        def runs():
            for name, keys in [("dense_lm", {}), ("dense_lm, window", {"model.attention.mask": "window", "model.attention.window": 64}),
                               ("dense_lm, tied", {"model.tied_head": "true"}), ("moe_lm", {})]:
                kind = {"model.kind": name.split(",")[0]}
                yield name, [decoder(place(name), val, **(kind | keys))]
            for name, run in [("esm2", esm2), ("dnabert_s", dnabert_s), ("esm2 classifier", classifier)]:
                yield name, [run(place(name))]
            for name, run in [("esm2 adapters", lora), ("esm2 classifier, adapters", lora_classifier)]:
                yield name, run(place(name))

        def place(name):
            folder = scratch / name.replace(" ", "_").replace(",", "")
            folder.mkdir()
            return folder

        print(f"{'trained':28} {'opened as':36} {'targets':>7} {'plimsoll':>12} {'torch':>12} {'relative':>9}")
        worst = 0.0
        for name, rows in runs():
            for opens, (loss, targets), found in rows:
                ours = found["validation_loss"]
                assert targets == found["validation_targets"], (name, targets, found)
                difference = abs(ours / loss - 1)
                worst = max(worst, difference)
                print(f"{name:28} {opens:36} {targets:7} {ours:12.7f} {loss:12.7f} {difference:9.1e}", flush=True)
    assert worst < MOST, worst


with torch.no_grad():
    main()
