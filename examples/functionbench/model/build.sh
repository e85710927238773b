#!/bin/sh
# Installs scikit-learn and trains the model.
set -eu
cd "$(dirname "$0")"
../../../scripts/install python
[ -f build/model.pickle ] || PYTHONPATH=build/site /usr/bin/python3 train.py build/model.pickle
