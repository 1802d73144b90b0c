#!/bin/sh
# Index what models answered in the saved sessions of rest-local chat.
set -eu
data=${REST_LOCAL_DATA:-${XDG_DATA_HOME:-$HOME/.local/share}/rest-local}
exec rest-local index build --chat "$data/sessions/*.json" -o chats "$@"
