#!/bin/sh
# Installs what requirements.txt names into build/site, unless it is there.
# Uses the system's Python, which is the one that Thaw puts into the sandbox.
set -eu
cd "$(dirname "$0")"

python=/usr/bin/python3
[ -x "$python" ] || python=python3

if [ -f build/installed ] && cmp -s requirements.txt build/installed; then
    exit 0
fi
rm -rf build
mkdir -p build
"$python" -m venv build/venv
build/venv/bin/pip install --quiet --disable-pip-version-check --no-compile \
    --target build/site --requirement requirements.txt
"$python" -m compileall -q build/site
rm -rf build/venv
cp requirements.txt build/installed
