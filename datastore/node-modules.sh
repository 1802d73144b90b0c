#!/bin/sh
# Index the JavaScript packages of the working directory.
set -eu
exec rest-local index build node_modules --include "*.js" --include "*.mjs" --include "*.ts" -o node-modules "$@"
