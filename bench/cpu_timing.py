"""Shared by the CPU peers: element types, options, timing, and the output line of a measurement."""

import argparse
import json
import statistics
import time

import torch

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def options(description, batch, length):
    """Parser of the shared options, with the default values of batch and length."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--dtype", action="append", choices=sorted(DTYPES), help="repeatable; f32 by default")
    parser.add_argument("--batch", type=int, default=batch, help="sequences")
    parser.add_argument("--length", type=int, default=length, help="tokens of each, special ones included")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    return parser


def timed(forward, warmup, repeats):
    """Seconds of each timed forward pass, without the warm-up passes."""
    seconds = []
    with torch.inference_mode():
        for _ in range(warmup + repeats):
            start = time.perf_counter()
            forward()
            seconds.append(time.perf_counter() - start)
    return seconds[warmup:]


def say(side, model, dtype, args, seconds, **versions):
    """Prints a measurement as a line of JSON."""
    line = {
        "side": side,
        "model": model,
        "dtype": dtype,
        "batch": args.batch,
        "length": args.length,
        "threads": args.threads,
        "tokens_per_s": args.batch * args.length / statistics.median(seconds),
        "seconds": seconds,
        "torch": torch.__version__,
        **versions,
    }
    print(json.dumps(line), flush=True)
