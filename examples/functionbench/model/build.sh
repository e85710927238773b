#!/bin/sh
# Trains the model, with scikit-learn, when that is installed.
set -eu
cd "$(dirname "$0")"
[ -f build/model.pickle ] || PYTHONPATH=build/site /usr/bin/python3 train.py build/model.pickle
