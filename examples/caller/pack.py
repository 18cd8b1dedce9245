#!/usr/bin/env python3
"""Copies a caller with its weights rounded to bf16, half the size. Standard library only.

    python3 pack.py MODEL OUT     both folders hold config.json, model.safetensors and calibration.json

Weights are rounded to the nearest, ties to even.
"""

import argparse
import array
import json
import os
import shutil
import struct
import sys


def rounded(values):
    """bf16 of f32 numbers, both as their bits."""
    return array.array("H", ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 for bits in values))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out")
    args = parser.parse_args()
    if os.path.realpath(args.model) == os.path.realpath(args.out):
        parser.error("OUT must be another folder than MODEL")
    if sys.byteorder != "little":
        sys.exit("this script needs a little-endian machine")
    with open(os.path.join(args.model, "model.safetensors"), "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = file.read()
    packed, out = {}, bytearray()
    for name, tensor in sorted(header.items()):
        if name == "__metadata__":
            continue
        if tensor["dtype"] != "F32":
            sys.exit(f"{name} is {tensor['dtype']}, not F32")
        first, last = tensor["data_offsets"]
        words = array.array("I")
        words.frombytes(data[first:last])
        start = len(out)
        out += rounded(words).tobytes()
        packed[name] = {"dtype": "BF16", "shape": tensor["shape"], "data_offsets": [start, len(out)]}
    text = json.dumps(packed, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    os.makedirs(args.out, exist_ok=True)
    with open(os.path.join(args.out, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + out)
    for name in ("config.json", "calibration.json"):
        shutil.copy(os.path.join(args.model, name), os.path.join(args.out, name))


main()
