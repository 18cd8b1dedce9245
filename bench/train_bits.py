#!/usr/bin/env python3
"""Checks that a training run ends with the same bits however it is computed.

    python3 bench/train_bits.py target/release/plimsoll --device cuda:0 --work /tmp/train_bits [--steps 60]

For each model and number format, the run is repeated: in a second process, stopped half way and resumed, killed with
SIGKILL at random moments and resumed, and with other recomputation (memory.remat full, every_n, selective). The SHA-256
of the files of the last checkpoint must be those of the first run. Prints a line for each repetition; exit code 1 if
one differs. Needs torch and safetensors.
"""

import argparse
import hashlib
import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import torch
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
CORPUS = ROOT / "examples/corpus.txt"

# Small models of every family: causal, sliding-window and block-sparse masks, grouped key heads, experts, odd widths.
MODELS = {
    "moe": f"""
model: {{kind: moe_lm, hidden: 128, layers: 3, heads: 4, intermediate: 256, dropout: 0.1, experts: {{count: 4, top_k: 2}}}}
data: {{train: [{CORPUS}], document: paragraph, tokenizer: bytes, longest: 256}}
batch: {{tokens: 2048, micro_tokens: 1024}}
""",
    "dense": f"""
model: {{kind: dense_lm, hidden: 192, layers: 3, heads: 6, kv_heads: 2, intermediate: 512, dropout: 0.1, attention: {{mask: window, window: 64}}}}
data: {{train: [{CORPUS}], document: paragraph, tokenizer: bytes, longest: 256}}
batch: {{tokens: 2048}}
""",
    "esm2": f"""
model: {{kind: esm2, from: CONFIG, dropout: 0.1}}
data: {{train: [PROTEINS], longest: 128, validation_fraction: 0}}
batch: {{tokens: 1024}}
""",
    "odd": f"""
model: {{kind: esm2, from: CONFIG}}
data: {{train: [PROTEINS], longest: 128, validation_fraction: 0}}
batch: {{tokens: 512}}
""",
}

# Encoders start from weights in the layout of the Hugging Face Hub: (width, heads, width of the MLP), of two layers.
ENCODERS = {"esm2": (320, 20, 1280), "odd": (66, 3, 101)}


def encoder(name, folder):
    """Writes an ESM-2 with random weights."""
    folder.mkdir()
    width, heads, inner = ENCODERS[name]
    golden = json.loads((ROOT / "fixtures/goldens/esm2/config.json").read_text())
    sizes = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": inner}
    (folder / "config.json").write_text(json.dumps(golden | sizes))
    torch.manual_seed(7)
    tensors = {}

    def linear(at, columns, rows):
        tensors[f"{at}.weight"], tensors[f"{at}.bias"] = 0.02 * torch.randn(rows, columns), torch.zeros(rows)

    def norm(at):
        tensors[f"{at}.weight"], tensors[f"{at}.bias"] = torch.ones(width), torch.zeros(width)

    tensors["esm.embeddings.word_embeddings.weight"] = 0.02 * torch.randn(33, width)
    for i in range(golden["num_hidden_layers"]):
        layer = f"esm.encoder.layer.{i}."
        norm(f"{layer}attention.LayerNorm"), norm(f"{layer}LayerNorm")
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            linear(f"{layer}attention.{part}", width, width)
        linear(f"{layer}intermediate.dense", width, inner), linear(f"{layer}output.dense", inner, width)
    norm("esm.encoder.emb_layer_norm_after"), linear("lm_head.dense", width, width), norm("lm_head.layer_norm")
    tensors["lm_head.bias"] = torch.zeros(33)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def digest(folder, steps):
    """SHA-256 over the tensors of the last checkpoint."""
    last = folder / f"checkpoints/step-{steps:08}"
    files = sorted(path for path in last.iterdir() if path.suffix == ".safetensors")
    if not files:
        sys.exit(f"{last}: no tensors")
    whole = hashlib.sha256()
    for path in files:
        whole.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()[:16]


class Bench:
    def __init__(self, args):
        self.args, self.failures = args, 0

    def command(self, config, output, *settings):
        words = [self.args.binary, "train", str(config), "-o", str(output), "--quiet"]
        for setting in (f"run.device={self.args.device}", *settings):
            words += ["--set", setting]
        return words

    def run(self, words):
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(words)}\n{done.stderr}")

    def killed(self, words, longest):
        """Runs the command to its end, killing it up to three times at random moments."""
        kills, tries = 0, 0
        while True:
            started = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            limit = random.uniform(0.3, 0.95) * longest if tries < 3 else None
            tries += 1
            try:
                _, errors = started.communicate(timeout=limit)
                if started.returncode != 0:
                    sys.exit(f"{' '.join(words)}\n{errors}")
                return kills
            except subprocess.TimeoutExpired:
                started.send_signal(signal.SIGKILL)
                started.communicate()
                kills += 1

    def model(self, name, precision):
        steps, work = self.args.steps, self.args.work / f"{name}-{precision}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        config = work / "run.yaml"
        proteins = work / "proteins.faa"
        draw = random.Random(11)
        with open(proteins, "w") as file:
            for i in range(300):
                file.write(f">p{i}\n{''.join(draw.choices('ACDEFGHIKLMNPQRSTVWY', k=draw.randint(20, 200)))}\n")
        model = MODELS[name].replace("PROTEINS", str(proteins))
        if name in ENCODERS:
            model = model.replace("CONFIG", str(encoder(name, work / "model")))
        config.write_text(
            model
            + f"optimizer: {{lr: 1e-3}}\nschedule: {{kind: cosine, warmup: 2, steps: {steps}}}\n"
            + f"precision: {{kind: {precision}}}\nmemory: {{remat: none}}\n"
            + f"run: {{steps: {steps}, save_every: 3}}\n"
        )
        self.run(self.command(config, work / "first"))
        wanted = digest(work / "first", steps)

        def check(what, output):
            found = digest(output, steps)
            self.failures += found != wanted
            print(f"{name:6} {precision:4} {what:24} {found} {'same' if found == wanted else 'DIFFERS'}", flush=True)

        print(f"{name:6} {precision:4} {'first':24} {wanted}", flush=True)
        start = time.monotonic()
        self.run(self.command(config, work / "again"))
        longest = time.monotonic() - start
        check("second process", work / "again")
        self.run(self.command(config, work / "half", f"run.steps={steps // 2}"))
        self.run(self.command(config, work / "half"))
        check("stopped and resumed", work / "half")
        kills = self.killed(self.command(config, work / "killed"), longest)
        check(f"killed {kills} times", work / "killed")
        for remat in ["full", "every_n", "selective"]:
            self.run(self.command(config, work / remat, f"memory.remat={remat}"))
            check(f"memory.remat {remat}", work / remat)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--precisions", nargs="*", default=["f32", "tf32", "bf16", "fp16"])
    bench = Bench(parser.parse_args())
    for name in bench.args.models:
        for precision in bench.args.precisions:
            bench.model(name, precision)
    sys.exit(1 if bench.failures else 0)


if __name__ == "__main__":
    main()
