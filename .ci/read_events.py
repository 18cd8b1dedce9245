"""Compares the scalars that TensorBoard reads from a run with its metrics.jsonl: read_events.py RUN."""

import json
import struct
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

run = sys.argv[1]
wanted = {}
with open(f"{run}/metrics.jsonl") as file:
    for line in map(json.loads, file):
        # Lines of stages and events are no values of a step.
        if "stage" in line or "event" in line:
            continue
        for key, value in line.items():
            if key in ("step", "seconds") or value is None or isinstance(value, (bool, str)):
                continue
            tag = "validation/" + key.removeprefix("validation_") if key.startswith("validation_") else "train/" + key
            # Scalars are f32.
            wanted.setdefault(tag, []).append((line["step"], struct.unpack("f", struct.pack("f", value))[0]))
events = EventAccumulator(f"{run}/tensorboard", size_guidance={"scalars": 0, "tensors": 0})
events.Reload()
found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
assert found == wanted, f"TensorBoard reads {found}, metrics.jsonl has {wanted}"
print(f"TensorBoard reads {len(found)} series, {sum(map(len, found.values()))} scalars, as in metrics.jsonl")
