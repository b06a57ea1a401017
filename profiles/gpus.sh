#!/usr/bin/env bash
# Run a command with COUNT GPUs of this node, used by no other command: profiles/gpus.sh COUNT COMMAND ...
# Snakemake counts GPUs but does not assign them, so each GPU has a lock file that the command locks until it ends. A SLURM job of
# Snakemake's plugin sees only its own GPUs, all COUNT of them; in a larger allocation they are assigned here.
set -euo pipefail
count=$1
shift
if [[ $count == 0 ]]; then exec "$@"; fi
all=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)}
IFS=, read -ra gpus <<< "$all"
if [[ -n ${SLURM_JOB_ID:-} ]] && ((${#gpus[@]} == count)); then exec "$@"; fi
if ((${#gpus[@]} < count)); then
  echo "This job needs $count GPUs, and ${#gpus[@]} are visible. Start the grid with gpus=${#gpus[@]} at most." >&2
  exit 1
fi
folder=${TMPDIR:-/tmp}/multirole-gpus-$UID
mkdir -p "$folder"
while true; do
  held=() locks=()
  for gpu in "${gpus[@]}"; do
    exec {lock}> "$folder/${gpu// /}"
    if ((${#held[@]} < count)) && flock --nonblock "$lock"; then
      held+=("$gpu") locks+=("$lock")
    else
      exec {lock}>&-
    fi
  done
  if ((${#held[@]} == count)); then break; fi
  for lock in "${locks[@]}"; do exec {lock}>&-; done # all or none, so that no two jobs wait for each other
  sleep "0.$((RANDOM % 9 + 1))"
done
CUDA_VISIBLE_DEVICES=$(
  IFS=,
  echo "${held[*]}"
)
export CUDA_VISIBLE_DEVICES
exec "$@"
