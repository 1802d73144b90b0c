#!/bin/sh
# Index the standard library of python3, without tests.
set -eu
folder=$(python3 -c "import sysconfig; print(sysconfig.get_paths()[\"stdlib\"])")
exec rest-local index build "$folder" --include "*.py" --exclude "test*/" --exclude site-packages/ -o python "$@"
