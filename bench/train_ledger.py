#!/usr/bin/env python3
"""Compares the planned memory of training runs on a GPU with the memory that NVML counts for them.

    python3 bench/train_ledger.py target/release/plimsoll --work /tmp/train_ledger [--only WORD]

Trains about twenty small and large models for some steps, alone on GPU 0, and reads the used memory of the card every
10 ms. Prints for each run the planned peak, the memory of the card during the last steps less that before the run, their
difference, and the largest difference at any time (the start included). Exit code 1 if a difference of the last steps is
more than 2 MiB. Needs torch and safetensors.
"""

import argparse
import ctypes
import json
import pathlib
import random
import shutil
import subprocess
import sys
import time

import train_bits
import train_gpu

# name: (model, settings). A model is (width, heads, layers) of an ESM-2, or a block of YAML.
MOE = "{kind: moe_lm, hidden: 512, layers: 4, heads: 8, kv_heads: 4, intermediate: 1024, experts: {count: 8, top_k: 2}}"
DENSE = "{kind: dense_lm, hidden: 768, layers: 6, heads: 12, kv_heads: 4, intermediate: 2048, attention: {mask: window, window: 256}}"
ESM2 = {"8m": (320, 20, 6), "35m": (480, 20, 12), "150m": (640, 20, 30), "650m": (1280, 20, 33)}
RUNS = [
    *[(model, precision, {}) for model in ("8m", "150m", "650m", "moe", "dense") for precision in ("bf16", "f32")],
    ("8m", "fp16", {}),
    ("35m", "bf16", {"memory.remat": "full"}),
    ("35m", "bf16", {"optimizer.kind": "adamw8bit"}),
    ("35m", "f32", {"optimizer.kind": "adafactor"}),
    ("35m", "bf16", {"optimizer.kind": "sgd"}),
    ("150m", "bf16", {"memory.remat": "selective", "batch.tokens": 32768}),
    ("650m", "bf16", {"batch.micro_tokens": 2048}),
    ("650m", "bf16", {"model.lora.rank": 16}),
    ("moe", "fp16", {"optimizer.kind": "adamw8bit"}),
    ("moe", "bf16", {"memory.remat": "full", "batch.tokens": 32768}),
    ("dense", "fp16", {"memory.remat": "every_n"}),
    ("dense", "bf16", {"batch.tokens": 32768}),
]


class Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Card:
    """The used memory of GPU 0, of all processes, by NVML."""

    def __init__(self):
        self.nvml, self.handle, self.memory = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), Memory()
        self.nvml.nvmlInit_v2()
        if self.nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.handle)):
            sys.exit("NVML finds no GPU 0")

    def used(self):
        self.nvml.nvmlDeviceGetMemoryInfo(self.handle, ctypes.byref(self.memory))
        return self.memory.used


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    card, proteins, draw = Card(), args.work / "proteins.faa", random.Random(11)
    with open(proteins, "w") as file:
        for i in range(4000):
            file.write(f">p{i}\n{''.join(draw.choices('ACDEFGHIKLMNPQRSTVWY', k=draw.randint(60, 900)))}\n")
    worst = 0
    for model, precision, settings in RUNS:
        name = f"{model}-{precision}-" + "-".join(f"{key.split('.')[-1]}={value}" for key, value in settings.items())
        if args.only not in name:
            continue
        if model in ESM2:
            train_gpu.weights(args.work / model, *ESM2[model])
            text = f"model: {{kind: esm2, from: {args.work / model}}}\ndata: {{train: [{proteins}], longest: 1024, validation_fraction: 0}}\n"
        else:
            text = f"model: {MOE if model == 'moe' else DENSE}\n"
            text += f"data: {{train: [{train_bits.CORPUS}], document: paragraph, tokenizer: bytes, longest: 512}}\n"
        config, output = args.work / "run.yaml", args.work / "run"
        shutil.rmtree(output, ignore_errors=True)
        config.write_text(f"{text}batch: {{tokens: 8192}}\noptimizer: {{lr: 1e-4}}\nschedule: {{warmup: 2}}\nprecision: {{kind: {precision}}}\n"
                          f"memory: {{remat: none}}\nrun: {{steps: 12, device: cuda}}\n")
        words = [args.binary, "train", str(config), "-o", str(output), "--quiet"]
        for pair in settings.items():
            words += ["--set", "=".join(map(str, pair))]
        before, start = card.used(), time.monotonic()
        # (time, used memory) while the run lasts.
        samples, steps = [], []
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        metrics = output / "metrics.jsonl"
        while process.poll() is None:
            samples.append((time.monotonic(), card.used()))
            # Lines without a loss are of stages.
            lines = metrics.read_text().count('"loss":') if metrics.exists() else 0
            if lines > len(steps):
                steps += [len(samples) - 1] * (lines - len(steps))
            time.sleep(0.01)
        if process.returncode != 0:
            print(name, "FAILED", process.stderr.read().strip()[-600:], flush=True)
            worst = max(worst, 99 << 20)
            continue
        planned = json.loads((output / "run.json").read_text())["peak_bytes"]
        middle = samples[steps[len(steps) // 2]][1] if steps else max(used for _, used in samples)
        held, most = middle - before, max(used for _, used in samples) - before
        worst = max(worst, abs(held - planned))
        first = samples[steps[0]][0] - start if steps else float("nan")
        print(f"{name:44} planned {planned / 2**20:9.2f} MiB  card {held / 2**20:9.2f}  difference {(held - planned) / 2**20:6.2f}"
              f"  at most {(most - planned) / 2**20:6.2f}  first step after {first:.1f} s", flush=True)
    sys.exit(1 if worst > 2 << 20 else 0)


if __name__ == "__main__":
    main()
