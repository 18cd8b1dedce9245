#!/usr/bin/env python3
"""Checks memory.dynamic on a GPU: a training run shrinks its micro-steps while another process holds memory, grows again
when that process ends, and has the losses of an undisturbed run within rounding around both changes.

    bench/dynamic_batch.py PLIMSOLL --device cuda:0 --work DIR

The other process takes memory with cuMemAlloc of libcuda; no PyTorch is needed. Takes less than a minute on an H100.
"""

import argparse
import ctypes
import json
import pathlib
import subprocess
import sys
import time

STEPS = 240
CONFIG = """
model: {{kind: dense_lm, hidden: 512, layers: 8, heads: 8, intermediate: 1536}}
data: {{train: ["{corpus}"], document: paragraph, tokenizer: bytes, longest: 1024}}
optimizer: {{kind: adamw, lr: 1e-4}}
schedule: {{kind: constant, warmup: 4}}
precision: {{kind: tf32}}
memory:
  budget: 60%
  remat: none
  loss_chunk: 1024
  dynamic: {{min_batch: 8192, max_batch: 65536, adjustment_frequency: 1}}
batch: {{tokens: 65536}}
run: {{steps: {steps}, device: "{device}", save_every: {steps}}}
"""


def check(cuda, function, *arguments):
    code = getattr(cuda, function)(*arguments)
    if code != 0:
        sys.exit(f"{function} failed with {code}")


def hold(ordinal, target):
    """Takes memory until the share `target` of the GPU is in use; prints the bytes, and gives them back when stdin ends."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    check(cuda, "cuInit", 0)
    check(cuda, "cuDeviceGet", ctypes.byref(device), ordinal)
    check(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    check(cuda, "cuCtxSetCurrent", context)
    free, total, at = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint64()
    check(cuda, "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    want = int(free.value - (1 - target) * total.value)
    if want <= 0:
        sys.exit(f"{free.value} bytes are free, so {target} of {total.value} is in use already")
    check(cuda, "cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(want))
    print(want, flush=True)
    sys.stdin.read()


def lines(folder):
    path = folder / "metrics.jsonl"
    # The last line may be incomplete while the run writes it.
    text = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def start(arguments, name):
    folder = arguments.work / name
    corpus = pathlib.Path(__file__).resolve().parent.parent / "examples" / "corpus.txt"
    config = arguments.work / f"{name}.yaml"
    config.write_text(CONFIG.format(corpus=corpus, steps=STEPS, device=arguments.device))
    log = open(arguments.work / f"{name}.log", "w")
    command = [arguments.plimsoll, "train", str(config), "-o", str(folder), "--resume", "never"]
    return folder, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def wait_for(run, folder, what, found):
    """Waits until `found` returns something for the lines of metrics.jsonl."""
    for _ in range(600):
        if result := found(lines(folder)):
            return result
        if run.poll() is not None:
            sys.exit(f"{folder}: the run ended before {what}; see {folder}.log")
        time.sleep(0.05)
    sys.exit(f"{folder}: no {what} in 30 s")


def reasons(found, wanted):
    return [line for line in found if line.get("event") == "dynamic_batch" and line["reason"] in wanted]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plimsoll", nargs="?")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--work", type=pathlib.Path)
    parser.add_argument("--hold", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    ordinal = int(arguments.device.partition(":")[2] or 0)
    if arguments.hold is not None:
        return hold(ordinal, arguments.hold)
    arguments.work.mkdir(parents=True, exist_ok=True)

    calm, run = start(arguments, "calm")
    if run.wait() != 0:
        sys.exit(f"the undisturbed run failed; see {calm}.log")
    busy, run = start(arguments, "busy")
    wait_for(run, busy, "step 20", lambda found: any(line["step"] >= 20 for line in found))
    other = [sys.executable, __file__, "--device", arguments.device, "--hold", "0.93"]
    holder = subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    taken = holder.stdout.readline().strip()
    if not taken:
        sys.exit("the other process could not take memory")
    shrunk = wait_for(run, busy, "a smaller micro-step", lambda f: reasons(f, ["warning", "critical", "emergency"]))
    holder.stdin.close()
    holder.wait()
    grown = wait_for(run, busy, "a larger micro-step", lambda found: reasons(found, ["grow"]))
    if run.wait() != 0:
        sys.exit(f"the disturbed run failed; see {busy}.log")

    losses = [[line["loss"] for line in lines(folder) if "loss" in line] for folder in (calm, busy)]
    if [len(of) for of in losses] != [STEPS, STEPS]:
        sys.exit(f"{len(losses[0])} and {len(losses[1])} steps instead of {STEPS}")
    apart = [abs(a - b) / a for a, b in zip(*losses)]
    print(f"another process took {taken} bytes: {json.dumps(shrunk[0])}")
    print(f"it gave them back: {json.dumps(grown[0])}")
    # Samples that are lost or doubled show at once. Rounding is amplified by training itself: on this small corpus differences
    # of 1e-7 grow a thousandfold within fifty steps, so that only the steps after the changes are compared.
    first = shrunk[0]["step"]
    compared = max(grown[0]["step"], first) + 5
    worst = max(apart[:compared])
    print(f"losses of the first {compared} steps differ by at most {worst:.1e} of the loss")
    for step in (first - 1, first, first + 1, first + 2, first + 5, first + 15, first + 50, STEPS):
        if step <= len(apart):
            print(f"    step {step}: loss {losses[0][step - 1]:.4f}, difference {apart[step - 1]:.1e}")
    if worst > 1e-5:
        sys.exit("the losses are not those of the undisturbed run")


if __name__ == "__main__":
    main()
