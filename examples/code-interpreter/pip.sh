#!/bin/sh
exec /usr/bin/python3 -m pip "$@"
