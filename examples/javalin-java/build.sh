#!/bin/sh
# Builds build/app.jar with Maven, unless it is newer than its sources.
set -eu
cd "$(dirname "$0")"
if [ -f build/app.jar ] && [ -z "$(find pom.xml src -newer build/app.jar)" ]; then
    exit 0
fi
mvn --batch-mode --quiet package
