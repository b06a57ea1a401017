#!/usr/bin/env bash
# Started by tini. Check the mounts, then exec the command; for papermill, stay and forward signals to its kernel.
set -euo pipefail

for folder in /results "${XDG_CACHE_HOME:-/cache}"; do
  if [[ ! -w $folder ]]; then
    echo "$folder is not writable for user $(id -u). Create a folder, mount it there and run as its owner:" >&2
    echo "  docker run --user \$(id -u):\$(id -g) -v \"\$PWD/runs:/results\" -v \"\$PWD/cache:/cache\" ..." >&2
    echo "  apptainer run --bind \"\$PWD/runs:/results,\$PWD/cache:/cache\" ..." >&2
    exit 1
  fi
done
if [[ " $* " != *" papermill "* ]]; then
  exec "$@"
fi
# On SIGTERM papermill exits at once, and so does the container, before the kernel has saved a checkpoint. So signal the kernel,
# papermill's child: papermill then ends after it, with an error and the executed notebook.
set -m                # its own process group, which tini does not signal
"$@" < /dev/null &    # papermill reads a notebook from a piped stdin
papermill=$!
trap 'kernel=$(cat /proc/$papermill/task/*/children); kill -TERM ${kernel:-$papermill}' TERM USR1
trap 'kill -INT $papermill' INT
while kill -0 "$papermill" 2> /dev/null; do
  wait "$papermill" || true # a trap interrupts it
done
wait "$papermill" # for its exit code
