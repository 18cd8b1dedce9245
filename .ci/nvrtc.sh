#!/usr/bin/env bash
# Prints the folder of the pinned version of NVRTC, which compiles CUDA kernels without a GPU. Installs it with pip, once,
# into a cache outside the repository.
set -euo pipefail
pins=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/nvrtc.txt
folder=${XDG_CACHE_HOME:-$HOME/.cache}/plimsoll/nvrtc-$(sha256sum "$pins" | cut -c1-12)
if [ ! -e "$folder/complete" ]; then
    rm -rf "$folder"
    python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --target "$folder" --requirement "$pins" >&2
    touch "$folder/complete"
fi
library=$(find "$folder" -name 'libnvrtc.so.*' | head -1)
dirname "$library"
