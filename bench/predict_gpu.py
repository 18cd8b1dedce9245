"""Open reading frames per second of `plimsoll predict` with models of random weights, on a GPU.

    python3 bench/predict_gpu.py [PLIMSOLL] [--orfs 200000] [--precision bf16 fp8] [--protein 3B] [--goldens FOLDER]
        [--work FOLDER] [--more FLAG...]

and without a GPU, to try it: --protein tiny --precision f32 --orfs 1000 --more --device cpu

Creates DNABERT-S, ESM-2 and a head with random weights in the published layouts (with the tokenizer of the goldens, which has
1 024 tokens and gives shorter tokens than the real one) and reads of 150 coding bases, so that an open reading frame has about 51 residue
tokens. Every precision is run twice, on few reads and on all. `orfs_per_s` is computed from the difference and excludes the
time that both runs need (reading, hashing and uploading weights); `orfs_per_s_with_load` includes it. Prints a line of JSON
for each precision. Needs torch and safetensors.
"""

import argparse
import json
import random
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
DNA = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 4096}
TINY_DNA = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 12, "intermediate_size": 384, "vocab_size": 1024}
PROTEIN = {  # width, heads, layers
    "tiny": (40, 5, 2),  # with a tiny DNABERT-S: to try this script without a GPU
    "8M": (320, 20, 6),
    "650M": (1280, 20, 33),
    "3B": (2560, 40, 36),
}
FEW = 4000


def dnabert_s(shape):
    d, inner = shape["hidden_size"], shape["intermediate_size"]
    yield "embeddings.word_embeddings.weight", (shape["vocab_size"], d)
    yield "embeddings.token_type_embeddings.weight", (2, d)
    yield from norm("embeddings.LayerNorm", d)
    for i in range(shape["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        yield from linear(f"{layer}attention.self.Wqkv", d, 3 * d)
        yield from linear(f"{layer}attention.output.dense", d, d)
        yield from norm(f"{layer}attention.output.LayerNorm", d)
        yield f"{layer}mlp.gated_layers.weight", (2 * inner, d)
        yield from linear(f"{layer}mlp.wo", inner, d)
        yield from norm(f"{layer}mlp.layernorm", d)


def esm2(shape):
    d, inner = shape["hidden_size"], shape["intermediate_size"]
    yield "esm.embeddings.word_embeddings.weight", (33, d)
    for i in range(shape["num_hidden_layers"]):
        layer = f"esm.encoder.layer.{i}."
        yield from norm(f"{layer}attention.LayerNorm", d)
        for part in ("query", "key", "value"):
            yield from linear(f"{layer}attention.self.{part}", d, d)
        yield from linear(f"{layer}attention.output.dense", d, d)
        yield from norm(f"{layer}LayerNorm", d)
        yield from linear(f"{layer}intermediate.dense", d, inner)
        yield from linear(f"{layer}output.dense", inner, d)
    yield from norm("esm.encoder.emb_layer_norm_after", d)


def head(columns, hidden=512):
    yield from linear("hidden_layer", columns, hidden)
    for name in ("weight", "bias", "running_mean", "running_var"):
        yield f"bn1.{name}", (hidden,)
    yield from linear("output_layer", hidden, 2)


def linear(name, k, n):
    yield f"{name}.weight", (n, k)
    yield f"{name}.bias", (n,)


def norm(name, d):
    yield f"{name}.weight", (d,)
    yield f"{name}.bias", (d,)


def save(shapes, path, dtype):
    """Weights: normal with standard deviation 0.02; gains of norms and variances are one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(7)

    def values(name, shape):
        one = name.lower().endswith(("norm.weight", "layer_norm_after.weight", "bn1.weight", "running_var"))
        made = torch.ones(shape) if one else 0.02 * torch.randn(shape, device=device)
        return made.to(dtype).cpu()

    save_file({name: values(name, shape) for name, shape in shapes}, path, metadata={"format": "pt"})


def models(work, goldens, protein):
    folders = work / "weights/dnabert_s", work / "weights/esm2"
    made = work / "weights/made"
    if made.exists() and made.read_text() == protein:
        return
    width, heads, layers = PROTEIN[protein]
    dna = TINY_DNA if protein == "tiny" else DNA
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * width}
    for folder, name, shape, shapes in zip(folders, ("dnabert_s", "esm2"), (dna, sizes), (dnabert_s, esm2)):
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((goldens / name / "config.json").read_text()) | shape
        (folder / "config.json").write_text(json.dumps(config))
        save(shapes(shape), folder / "model.safetensors", torch.bfloat16)
    shutil.copy(goldens / "dnabert_s/tokenizer.json", folders[0])
    save(head(dna["hidden_size"] + width), work / "weights/head.safetensors", torch.float32)
    made.write_text(protein)


def reads(path, count):
    """Writes reads of 50 codons without stop codons."""
    codons = [a + b + c for a in "ACGT" for b in "ACGT" for c in "ACGT"]
    codons = [codon for codon in codons if codon not in ("TAA", "TAG", "TGA")]
    draw = random.Random(7)
    with open(path, "w") as file:
        for i in range(count):
            file.write(f">read_{i}\n{''.join(draw.choices(codons, k=50))}\n")


def predict(plimsoll, work, fasta, precision, more):
    """(seconds of the process, run.json)"""
    out = work / f"out-{fasta.stem}-{precision}"
    shutil.rmtree(out, ignore_errors=True)
    command = [plimsoll, "predict", fasta, "-o", out, "--weights", work / "weights", "--length", "150"]
    command += ["--precision", precision, "--no-progress", "--json", *more]
    start = time.perf_counter()
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode not in (0, 2):
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.returncode}: {done.stderr[-2000:]}")
    return seconds, json.loads((out / "run.json").read_text()), done.stderr


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("plimsoll", nargs="?", default=ROOT / "target/release/plimsoll", type=Path)
    parser.add_argument("--orfs", type=int, default=200_000)
    parser.add_argument("--precision", nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--protein", choices=PROTEIN, default="3B")
    parser.add_argument("--goldens", type=Path, default=ROOT / "fixtures/goldens")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "plimsoll-predict")
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=["--device", "cuda"], help="flags of predict")
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    models(a.work, a.goldens, a.protein)
    # By chance, such a read has about 0.45 open reading frames in the other five frames.
    files = [(a.work / "few.fa", min(FEW, a.orfs // 10)), (a.work / "all.fa", int(a.orfs / 1.45))]
    for path, count in files:
        reads(path, count)
    print(json.dumps({"made_in_s": round(time.perf_counter() - start, 1)}), flush=True)
    for precision in a.precision:
        try:
            few, all_ = (predict(a.plimsoll, a.work, path, precision, a.more) for path, _ in files)
        except RuntimeError as error:
            print(json.dumps({"precision": precision, "failed": str(error)}), flush=True)
            continue
        n = [record["sequences"]["orfs"] for _, record, _ in (few, all_)]
        seconds, record, said = all_
        row = {
            "protein": a.protein,
            "precision": precision,
            "orfs": n[1],
            "failed": record["sequences"]["failed"],
            "tokens": record["tokens"],
            "orfs_per_s": round((n[1] - n[0]) / (seconds - few[0])),
            "orfs_per_s_with_load": round(n[1] / seconds),
            "seconds": round(seconds, 2),
            "seconds_of_few": round(few[0], 2),
            "inside": record["seconds"],
            "planned_peak_bytes": record["plan"]["peak_bytes"],
            "device": record["device"],
        }
        print(json.dumps(row), flush=True)
        print(said[-1500:], flush=True)


if __name__ == "__main__":
    main()
