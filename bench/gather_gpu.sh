#!/usr/bin/env bash
# Gathers the files for measuring on a GPU machine without Rust: the binary, the tests, the goldens, and the scripts of the
# PyTorch peers.
#
#   bench/gather_gpu.sh FOLDER        then, on the GPU machine: cd FOLDER && ./run.sh [tests | SECTION...]
#
# This machine needs cargo. The GPU machine needs an NVIDIA driver, NVRTC and cuBLASLt (`plimsoll doctor` lists the libraries
# found), python3 with PyTorch for the peers, and safetensors for `predict`. SECTION is a section of gpu.sh; without arguments
# the tests and all sections run.
set -euo pipefail
to=$(realpath -m "${1:?the folder to gather into}")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
profile=${PROFILE:-release}
folder=${CARGO_TARGET_DIR:-$root/target}/$([ "$profile" = dev ] && echo debug || echo "$profile")
mkdir -p "$to/bin" "$to/bench/peers" "$to/fixtures"

# built PATTERN ARGUMENT...: runs cargo with the arguments and prints the path of the built file from the line that
# contains PATTERN.
built() {
    local pattern=$1
    shift
    cargo "$@" 2>&1 | tee /dev/stderr | sed -n "s/.*Executable.*$pattern.*(\(.*\))/\1/p"
}

cargo build --profile "$profile" -p plimsoll-cli
strip -o "$to/bin/plimsoll" "$folder/plimsoll"
cargo build --profile "$profile" -p plimsoll-cuda --example attention
strip -o "$to/bin/attention" "$folder/examples/attention"
for crate in exec cuda; do
    strip -o "$to/bin/test-$crate" "$(built tests/it test -p "plimsoll-$crate" --test it --no-run)"
done
cp bench/gpu.sh bench/gpu_summary.py bench/predict_gpu.py "$to/bench/"
cp bench/peers/*.py "$to/bench/peers/"
cp -r fixtures/goldens fixtures/training "$to/fixtures/"
# The test binaries contain the path of this checkout, in which they look for fixtures.
printf '%s\n' "$root" >"$to/checkout"
cat >"$to/run.sh" <<'RUN'
#!/usr/bin/env bash
# Runs the gathered tests and measurements; see bench/gather_gpu.sh.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")"
here=$(pwd)
export PLIMSOLL=$here/bin/plimsoll
tests() {
    local checkout
    checkout=$(cat checkout)
    if [ ! -e "$checkout" ]; then
        mkdir -p "$checkout/crates/exec" "$checkout/crates/cuda"
        ln -s "$here/fixtures" "$checkout/fixtures"
    fi
    bin/test-exec cuda --nocapture --test-threads=1
    bin/test-cuda --nocapture --test-threads=1
}
case ${1:-} in
'') tests; bench/gpu.sh ;;
tests) tests ;;
*) bench/gpu.sh "$@" ;;
esac
RUN
chmod +x "$to/run.sh"
du -sh "$to"
