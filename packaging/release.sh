#!/usr/bin/env bash
# Builds the release archive for x86-64 Linux: one static binary that runs on any distribution, with its manual,
# completions and licences. Checks that the binary is static and runs alone. usage: release.sh [FOLDER]
#
# Needs Rust, binutils and a C compiler for musl (Debian's musl-tools), since the TLS library contains C code. The archive
# contains nothing of the machine that builds it: no paths, and no owners or times of files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(realpath -m "${1:-dist}")
target=x86_64-unknown-linux-musl
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
name=plimsoll-$version-x86_64-linux

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

build() {
    if ! command -v musl-gcc x86_64-linux-musl-gcc >/dev/null; then
        echo "no C compiler for musl was found; install musl-tools" >&2
        return 1
    fi
    if command -v rustup >/dev/null; then
        rustup target add "$target"
    fi
    # Replace the paths of this machine, which would make the bytes of the binary differ between machines.
    local flags="--remap-path-prefix=$PWD=plimsoll"
    flags+=" --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo"
    RUSTFLAGS=$flags CARGO_PROFILE_RELEASE_STRIP=symbols \
        cargo build --release --locked --target "$target" --package plimsoll-cli
    binary=${CARGO_TARGET_DIR:-target}/$target/release/plimsoll
}

# check_static BINARY: fails if the binary has an interpreter, needs a shared library or a versioned symbol of glibc. Any of
# these would tie it to certain distributions.
check_static() {
    local tied
    tied=$(
        readelf --program-headers "$1" | grep INTERP
        readelf --dynamic "$1" | grep NEEDED
        objdump --dynamic-syms "$1" 2>/dev/null | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -1
    ) || true
    if [ -n "$tied" ]; then
        printf '%s is not static:\n%s\n' "$1" "$tied" >&2
        return 1
    fi
}

# check_runs BINARY: fails if the binary does not run in an empty environment and an empty folder.
check_runs() {
    (
        cd "$work"
        env -i "$1" --version | grep -qx "plimsoll $version"
        env -i "$1" predict "$OLDPWD/examples/reads.fa" --quiet -o "$work/results"
        [ -s results/predictions.tsv ]
    )
}

# Adds the manual and completions, and writes the archive and its checksum.
pack() {
    local content=$work/$name shell
    mkdir -p "$content/completions" "$folder"
    cp "$binary" README.md CHANGELOG.md LICENSE-APACHE LICENSE-MIT "$content"
    "$binary" man -o "$content/man/man1"
    for shell in bash elvish fish powershell zsh; do
        "$binary" completions "$shell" >"$content/completions/plimsoll.$shell"
    done
    tar --create --directory "$work" --sort=name --owner=0 --group=0 --numeric-owner \
        --mtime="@$(git log -1 --format=%ct)" --mode=u+rw,go+rX,go-w "$name" |
        gzip --no-name --best >"$folder/$name.tar.gz"
    (cd "$folder" && sha256sum "$name.tar.gz" >"$name.tar.gz.sha256")
}

build
check_static "$binary"
check_runs "$(realpath "$binary")"
pack
printf 'static, runs alone: %s\n' "$folder/$name.tar.gz"
cat "$folder/$name.tar.gz.sha256"
