#!/usr/bin/env bash
# Started by tini. Says early what would otherwise fail late, then becomes the command, or watches over papermill.
set -euo pipefail

for folder in /results "${XDG_CACHE_HOME:-/cache}"; do
  if [[ ! -w $folder ]]; then
    echo "$folder is not writable for user $(id -u). Make a folder that is yours and mount it there, as that user:" >&2
    echo "  docker run --user \$(id -u):\$(id -g) -v \"\$PWD/runs:/results\" -v \"\$PWD/cache:/cache\" ..." >&2
    echo "  apptainer run --bind \"\$PWD/runs:/results,\$PWD/cache:/cache\" ..." >&2
    exit 1
  fi
done
if [[ " $* " != *" papermill "* ]]; then
  exec "$@"
fi
# papermill dies of SIGTERM at once, and the container with it, before its kernel has saved a checkpoint. So the kernel is
# told instead, its child, and papermill ends after it, with an error and its notebook.
set -m                # a process group of its own, which tini does not signal
"$@" < /dev/null &    # papermill takes a piped stdin for a notebook
papermill=$!
trap 'kernel=$(cat /proc/$papermill/task/*/children); kill -TERM ${kernel:-$papermill}' TERM USR1
trap 'kill -INT $papermill' INT
while kill -0 "$papermill" 2> /dev/null; do
  wait "$papermill" || true # a trap ends it early
done
wait "$papermill" # for its exit code
