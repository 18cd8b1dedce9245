"""Checks that `embed` and `predict` on a GPU give files of equal sha256 for any --tokens and any cache, with models of random weights.

    python3 bench/same_bits.py [PLIMSOLL] [--device cuda:0 cuda] [--precision bf16 fp16 tf32 f32 fp8] [--jobs 4] [--goldens FOLDER]

Runs every model and precision on each device named (`cuda` is every GPU of the machine) with five values of --tokens and with a
warm and an empty cache of matmul choices, and `predict` also as two shards that are computed with two caches and merged. Prints a line for each model and
precision; exit code 1 if bits differ.
Needs torch and safetensors.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from predict_gpu import ROOT, dnabert_s, esm2, head, reads, save

# Width, heads and layers: heads of 8, 16, 24, 32 and 64 columns, widths below 128 and published widths.
PROTEIN = [(40, 5, 2), (64, 4, 2), (72, 3, 2), (96, 3, 3), (320, 20, 6), (480, 20, 2), (640, 20, 2), (1280, 20, 2)]
DNA = {"hidden_size": 768, "num_hidden_layers": 2, "num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 4096}
TOKENS = ["1100", "2048", "3000", "8192", None]


def model(folder, goldens, name, sizes, shapes):
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((goldens / name / "config.json").read_text()) | sizes
    (folder / "config.json").write_text(json.dumps(config))
    save(shapes(sizes), folder / "model.safetensors", torch.float32)
    tokenizer = goldens / name / "tokenizer.json"
    if tokenizer.exists():
        shutil.copy(tokenizer, folder)


def protein(width, heads, layers):
    return {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * width}


def proteins(path, count):
    draw = random.Random(11)
    with open(path, "w") as file:
        for i in range(count):
            length = min(1000, int(draw.lognormvariate(5.4, 0.7)) + 20)
            file.write(f">protein_{i}\n{''.join(draw.choices('ACDEFGHIKLMNPQRSTVWY', k=length))}\n")


def sha(path):
    """Digest of a file, or of the names and bytes of all files of a folder except run.json and files that end in .log, .html or .json."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    whole = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.name != "run.json" and not file.name.endswith((".log", ".html", ".json")):
            whole.update(file.name.encode() + file.read_bytes())
    return whole.hexdigest()[:16]


class Runs:
    def __init__(self, a, work):
        self.a, self.work = a, work
        self.warm = work / "cache-warm"

    def run(self, device, command, out, cache, tokens):
        command = [self.a.plimsoll, *command, "-o", out, "--device", device, "--force"]
        command += ["--tokens", tokens] if tokens else []
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=os.environ | {"XDG_CACHE_HOME": str(cache)})
        if done.returncode not in (0, 2):
            raise RuntimeError(f"{' '.join(map(str, command))}: {done.returncode}: {done.stderr[-1500:]}")
        return sha(Path(out))

    def embed(self, folder, fasta, precision):
        command = ["embed", fasta, "--model", folder, "--precision", precision]
        found = []
        for device in self.a.device:
            at = self.work / f"{folder.name}-{precision}-{device.replace(':', '')}"
            found += [self.run(device, command, f"{at}-{tokens}.npy", self.warm, tokens) for tokens in TOKENS]
            # An empty cache: matmul algorithms are timed and chosen again, for full steps and for steps of 2048 tokens.
            found += [self.run(device, command, f"{at}-cold-{tokens}.npy", f"{at}-cache-{tokens}", tokens) for tokens in (None, "2048")]
        return found

    def predict(self, fasta, precision):
        command = ["predict", fasta, "--weights", self.work / "weights", "--length", "150", "--precision", precision]
        found = []
        for device in self.a.device:
            at = self.work / f"predict-{precision}-{device.replace(':', '')}"
            found += [self.run(device, command, f"{at}-{tokens}", self.warm, tokens) for tokens in TOKENS]
            found.append(self.run(device, command, f"{at}-cold", f"{at}-cache", None))
            for shard, tokens in (("1/2", "1100"), ("2/2", None)):
                self.run(device, [*command, "--shard", shard], f"{at}-shard-{shard[0]}", f"{at}-cache-{shard[0]}", tokens)
            merge = [part for number in "12" for part in ("--merge", f"{at}-shard-{number}")]
            found.append(self.run(device, [*command, *merge], f"{at}-merged", self.warm, None))
        return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("plimsoll", nargs="?", default=ROOT / "target/release/plimsoll", type=Path)
    parser.add_argument("--device", nargs="+", default=["cuda:0"])
    parser.add_argument("--precision", nargs="+", default=["bf16", "fp16", "tf32", "f32", "fp8"])
    parser.add_argument("--jobs", type=int, default=4, help="runs beside each other")
    parser.add_argument("--goldens", type=Path, default=ROOT / "fixtures/goldens")
    a = parser.parse_args()
    differ = 0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        runs = Runs(a, work)
        sizes = [protein(*shape) for shape in PROTEIN]
        folders = [work / f"esm2-{size['hidden_size']}" for size in sizes]
        for one, size in zip(folders, sizes):
            model(one, a.goldens, "esm2", size, esm2)
        model(work / "weights/dnabert_s", a.goldens, "dnabert_s", DNA, dnabert_s)
        model(work / "weights/esm2", a.goldens, "esm2", protein(320, 20, 6), esm2)
        save(head(768 + 320), work / "weights/head.safetensors", torch.float32)
        proteins(work / "proteins.fa", 300)
        reads(work / "reads.fa", 800)
        with ThreadPoolExecutor(a.jobs) as pool:
            jobs = []
            for precision in a.precision:
                jobs.append(("predict", precision, pool.submit(runs.predict, work / "reads.fa", precision)))
                jobs += [(one.name, precision, pool.submit(runs.embed, one, work / "proteins.fa", precision)) for one in folders]
            for name, precision, job in jobs:
                try:
                    found = job.result()
                    same = len(set(found)) == 1
                    print(json.dumps({"model": name, "precision": precision, "runs": len(found), "same": same, "sha256": sorted(set(found))}), flush=True)
                except RuntimeError as error:
                    same = False
                    print(json.dumps({"model": name, "precision": precision, "failed": str(error)}), flush=True)
                differ += not same
    sys.exit(differ > 0)


if __name__ == "__main__":
    main()
