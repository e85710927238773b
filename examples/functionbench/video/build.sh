#!/bin/sh
# Installs OpenCV and draws the video.
set -eu
cd "$(dirname "$0")"
../../../scripts/install python
[ -f build/video.avi ] || PYTHONPATH=build/site /usr/bin/python3 make_video.py build/video.avi
