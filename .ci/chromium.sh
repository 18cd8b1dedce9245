#!/usr/bin/env bash
# Prints the command of Chromium, which the tests of HTML pages drive. Installs the Debian package where there is none and
# the system allows it; fails otherwise.
set -euo pipefail
for name in "${PLIMSOLL_CHROMIUM:-}" chromium chromium-browser google-chrome; do
    if [ -n "$name" ] && command -v "$name"; then
        exit 0
    fi
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
{ timeout 300 apt-get update -qq && timeout 300 apt-get install -y -qq --no-install-recommends chromium; } >&2
command -v chromium
