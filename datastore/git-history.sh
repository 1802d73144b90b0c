#!/bin/sh
# Index what the newest 1 000 commits of the working directory wrote.
set -eu
git log -p -1000 --format= | sed -n "s/^+\([^+]\)/\1/p" | rest-local index build - -o git-history "$@"
