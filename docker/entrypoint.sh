#!/usr/bin/env bash
# Started by tini. Says early what would otherwise fail late, then becomes the command.
set -euo pipefail

if [[ ! -w /results ]]; then
  echo "/results is not writable for user $(id -u). Write: mkdir -p runs, and docker run --user \$(id -u):\$(id -g) ..." >&2
  exit 1
fi
if [[ ${1:-} == papermill ]]; then
  exec "$@" < /dev/null # papermill takes a piped stdin for a notebook
fi
exec "$@"
