#!/bin/sh
# Draws the video, with OpenCV, when that is installed.
set -eu
cd "$(dirname "$0")"
[ -f build/video.avi ] || PYTHONPATH=build/site /usr/bin/python3 make_video.py build/video.avi
