#!/bin/sh
# Index the C and C++ headers of the system.
set -eu
exec rest-local index build /usr/include --include "*.h" --include "*.hpp" -o c-headers "$@"
