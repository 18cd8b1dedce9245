#!/usr/bin/env python3
"""Training speed and memory on a GPU: ESM-2 masked LM and LoRA, Plimsoll and compiled PyTorch in one run.

    python3 bench/train_gpu.py target/release/plimsoll --work /tmp/train_gpu [--rows 650m lora 3b 8m] [--steps 12]

Writes random weights in the Hub's layout and random proteins with log-normal lengths (exp N(5.6, 0.75), 30 to 1022), and
trains them in bf16 with AdamW, clipping, nothing recomputed, and one micro-batch a step. The peer is bench/peers/training.py.
Prints tokens/s (median of the steps after the third) and the largest memory of the card (NVML, every 0.3 s) of both sides.
Needs torch and safetensors.
"""

import argparse
import json
import math
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time

import torch
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).resolve().parent.parent

# (width, heads, layers, tokens of a step, LoRA)
ROWS = {
    "650m": (1280, 20, 33, 65536, False),
    "650m-small": (1280, 20, 33, 16384, False),
    "lora": (1280, 20, 33, 65536, True),
    "3b": (2560, 40, 36, 16384, False),
    "8m": (320, 20, 6, 65536, False),
}


def weights(folder, width, heads, layers):
    """An ESM-2 with random weights: normal with standard deviation 0.02, gains 1, biases 0."""
    if (folder / "model.safetensors").exists():
        return
    folder.mkdir(parents=True)
    config = json.loads((ROOT / "fixtures/goldens/esm2/config.json").read_text())
    config |= {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(7)
    tensors = {"esm.embeddings.word_embeddings.weight": 0.02 * torch.randn(33, width), "lm_head.bias": torch.zeros(33)}

    def linear(at, columns, rows):
        tensors[f"{at}.weight"], tensors[f"{at}.bias"] = 0.02 * torch.randn(rows, columns), torch.zeros(rows)

    def norm(at):
        tensors[f"{at}.weight"], tensors[f"{at}.bias"] = torch.ones(width), torch.zeros(width)

    for i in range(layers):
        layer = f"esm.encoder.layer.{i}."
        norm(f"{layer}attention.LayerNorm")
        norm(f"{layer}LayerNorm")
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            linear(f"{layer}attention.{part}", width, width)
        linear(f"{layer}intermediate.dense", width, 4 * width)
        linear(f"{layer}output.dense", 4 * width, width)
    norm("esm.encoder.emb_layer_norm_after")
    linear("lm_head.dense", width, width)
    norm("lm_head.layer_norm")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def proteins(path, count):
    draw = random.Random(7)
    with open(path, "w") as file:
        for i in range(count):
            length = int(min(1022, max(30, math.exp(draw.gauss(5.6, 0.75)))))
            file.write(f">p{i}\n{''.join(draw.choices('LAGVSERTIDPKQNFYMHWC', k=length))}\n")


class Memory:
    """The largest memory in use on the first card, in MiB, while the block runs."""

    def __enter__(self):
        self.most, self.ended = 0, False
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self.ended:
            self.most = max(self.most, int(subprocess.run(query, capture_output=True, text=True).stdout or 0))
            time.sleep(0.3)

    def __exit__(self, *_):
        self.ended = True
        self.thread.join()


def ours(args, name):
    width, heads, layers, tokens, lora = ROWS[name]
    model, output = args.work / f"esm2-{width}", args.work / f"run-{name}"
    weights(model, width, heads, layers)
    shutil.rmtree(output, ignore_errors=True)
    adapters = ", lora: {rank: 16, targets: [query, key, value, attention.output.dense]}" if lora else ""
    config = args.work / f"{name}.yaml"
    config.write_text(
        f"model: {{kind: esm2, from: {model}{adapters}}}\n"
        f"data: {{train: [{args.work / 'proteins.faa'}], longest: 1024, validation_fraction: 0}}\n"
        "optimizer: {kind: adamw, lr: 1e-4}\nprecision: {kind: bf16}\nmemory: {remat: none, budget: 97%}\n"
        f"batch: {{tokens: {tokens}, micro_tokens: {tokens}}}\nrun: {{steps: {args.steps + 10}, save_every: null, device: cuda}}\n"
    )
    metrics = output / "metrics.jsonl"
    with Memory() as memory:
        run = subprocess.Popen([args.binary, "train", config, "-o", output], stderr=subprocess.PIPE, text=True)
        # Ended before its last step: the checkpoint at the end is not measured.
        while run.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < args.steps):
            time.sleep(0.2)
        run.kill()
        errors = run.communicate()[1]
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    rates = [line["tokens_per_second"] for line in lines if "loss" in line][3:]
    if not rates:
        sys.exit(f"{name}: {errors}")
    print(f"{name:12} plimsoll {statistics.median(rates):12.0f} tokens/s {memory.most:8} MiB", flush=True)


def peer(args, name):
    width, heads, layers, tokens, lora = ROWS[name]
    sizes = [str(number) for number in (width, heads, layers, tokens, 16 if lora else 0)]
    with Memory() as memory:
        run = subprocess.run([sys.executable, ROOT / "bench/peers/training.py", *sizes], capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{name}: {run.stderr}")
    print(f"{name:12} PyTorch  {float(run.stdout):12.0f} tokens/s {memory.most:8} MiB", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    proteins(args.work / "proteins.faa", 60000)
    for name in args.rows:
        peer(args, name)
        ours(args, name)


if __name__ == "__main__":
    main()
