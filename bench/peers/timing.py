"""Shared by the GPU peers: sequences, packs, padded batches and timing. Padding is not counted as tokens."""

import json
import math
import statistics
import time

import torch

TURN = 0.1  # seconds: as long as `plimsoll bench` repeats short work


def lognormal(count, seed=7):
    """Lengths exp N(5.6, 0.75) from 30 to 1 022, and the two special tokens."""
    normal = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return ((normal * 0.75 + 5.6).exp().clamp(30, 1022).long() + 2).tolist()


def packs(lengths, size):
    """Lengths cut into packs of at most `size` tokens, in order."""
    pack, filled = [], 0
    for n in lengths:
        if pack and filled + n > size:
            yield pack
            pack, filled = [], 0
        pack.append(n)
        filled += n
    if pack:
        yield pack


def padded(lengths, size, step=1):
    """Lengths sorted and cut into batches that hold at most `size` tokens when they are padded to a multiple of `step`."""
    batch = []
    for n in sorted(lengths):
        width = -(-n // step) * step
        if batch and (len(batch) + 1) * width > size:
            yield batch
            batch = []
        batch.append(n)
    if batch:
        yield batch


def timed(run, batches, seconds, warm=2):
    """Seconds of a pass over `batches`, measured in turns of at least TURN seconds with consecutive passes, as in
    `plimsoll bench`; compilation happens before."""
    with torch.no_grad():
        for _ in range(warm):
            for b in batches:
                run(b)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

        def turn(passes):
            begin = time.perf_counter()
            for _ in range(passes):
                for b in batches:
                    run(b)
            torch.cuda.synchronize()
            return (time.perf_counter() - begin) / passes

        times, passes, start = [], max(1, math.ceil(TURN / turn(1))), time.perf_counter()
        while len(times) < 5 or time.perf_counter() - start < seconds:
            times.append(turn(passes))
    return times


def say(**row):
    """One line of JSON."""
    print(json.dumps({"torch": torch.__version__, **row}), flush=True)


def measured(side, make, seconds, **row):
    """Times the result (run, batches, real tokens) of `make` and prints a line; if the side fails, the line has the error."""
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    start = time.perf_counter()
    try:
        run, batches, tokens = make()
        times = timed(run, batches, seconds)
        median = statistics.median(times)
        rates = {"tokens_per_s": round(tokens / median), "fastest": round(tokens / min(times)), "slowest": round(tokens / max(times))}
        peak = torch.cuda.max_memory_allocated()
        say(side=side, **row, **rates, turns=len(times), peak_bytes=peak, seconds_in_all=round(time.perf_counter() - start, 1))
    except Exception as error:  # noqa: BLE001  (the other sides are still wanted)
        say(side=side, **row, failed=f"{type(error).__name__}: {error}"[:400])
