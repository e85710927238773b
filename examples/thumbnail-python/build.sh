#!/bin/sh
# Installs what requirements.txt names into build/site, unless it is there, and
# makes an image to train with.
# Uses the system's Python, which is the one that Thaw puts into the sandbox.
set -eu
cd "$(dirname "$0")"

python=/usr/bin/python3
[ -x "$python" ] || python=python3

if ! [ -f build/installed ] || ! cmp -s requirements.txt build/installed; then
    rm -rf build
    mkdir -p build
    "$python" -m venv build/venv
    build/venv/bin/pip install --quiet --disable-pip-version-check --no-compile \
        --target build/site --requirement requirements.txt
    "$python" -m compileall -q build/site
    rm -rf build/venv
    cp requirements.txt build/installed
fi

# What the function is trained with.
[ -f build/sample.jpg ] || PYTHONPATH=build/site "$python" - <<'END'
from PIL import Image

wide = Image.linear_gradient("L").resize((640, 480))
Image.merge("RGB", (wide, wide.rotate(180), wide)).save("build/sample.jpg")
END
