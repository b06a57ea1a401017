#!/usr/bin/env bash
# Run a command under SLURM on this machine: controller, node and accounting are started for it and end with it.
#
#     docker/slurm.sh make grid ARGS="--workflow-profile profiles/slurm"
#
# For trying profiles/slurm and batch scripts without a cluster. Needs root, and on Debian
#     apt-get install --no-install-recommends slurm-wlm slurmdbd munge mariadb-server
# CPUS (2) and MEMORY (16000, in MB) are the resources of the only node. The database is needed because Snakemake's plugin
# learns only from the accounting that a job has ended.
set -euo pipefail
[[ $# -gt 0 ]] || { echo "usage: docker/slurm.sh COMMAND ..." >&2; exit 2; }
for program in slurmctld slurmd slurmdbd munged mariadbd; do
  command -v "$program" > /dev/null || { echo "$program is not installed; see the first lines of $0." >&2; exit 2; }
done
[[ $(id -u) == 0 ]] || { echo "$0 starts SLURM's daemons, which needs root." >&2; exit 2; }

at=$(mktemp -d) host=$(hostname)
chmod 755 "$at"
mkdir "$at"/{state,spool,log,munge,db}
daemons=()
finish() {
  for ((i = ${#daemons[@]} - 1; i >= 0; i--)); do
    kill "${daemons[i]}" 2> /dev/null && wait "${daemons[i]}" 2> /dev/null || true
  done
  if [[ -n ${KEEP_LOGS:-} ]]; then cp -r "$at/log" "$KEEP_LOGS"; fi
  rm -rf "$at"
}
trap finish EXIT
start() { # LOG COMMAND ...: in the background, in a session of its own so that Ctrl-C reaches the command first
  local log=$1
  shift
  setsid "$@" > "$at/log/$log" 2>&1 < /dev/null &
  daemons+=($!)
}
await() { # SECONDS COMMAND ...
  local left=$1
  shift
  until "$@" > /dev/null 2>&1; do
    ((left-- > 0)) || { echo "gave up waiting for: $*" >&2; tail -n 5 "$at"/log/* >&2; exit 1; }
    sleep 1
  done
}

dd if=/dev/urandom of="$at/munge/key" bs=128 count=1 status=none
chmod 400 "$at/munge/key"
chown -R munge: "$at/munge"
chmod 711 "$at/munge" # clients reach the socket
export SLURM_CONF=$at/slurm.conf
socket=$at/munge/socket
start munged setpriv --reuid munge --regid munge --init-groups munged --foreground --force --socket "$socket" \
  --key-file "$at/munge/key" --pid-file "$at/munge/pid" --seed-file "$at/munge/seed" --log-file "$at/munge/log"

chown mysql: "$at/db"
mariadb-install-db --user=mysql --datadir="$at/db" --auth-root-authentication-method=normal > "$at/log/install-db" 2>&1
start mariadbd mariadbd --no-defaults --user=mysql --datadir="$at/db" --socket="$at/db/socket" --skip-networking \
  --pid-file="$at/db/pid" --innodb-buffer-pool-size=64M
await 30 mariadb-admin --no-defaults --socket="$at/db/socket" --user=root ping

cat > "$at/slurmdbd.conf" << CONF
AuthType=auth/munge
AuthInfo=socket=$socket
DbdHost=localhost
DbdPort=16819
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
LogFile=$at/log/slurmdbd.log
PidFile=$at/slurmdbd.pid
CONF
chmod 600 "$at/slurmdbd.conf"
cat > "$SLURM_CONF" << CONF
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket=$socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$at/state
SlurmdSpoolDir=$at/spool
SlurmctldPidFile=$at/slurmctld.pid
SlurmdPidFile=$at/slurmd.pid
SlurmctldLogFile=$at/log/slurmctld.log
SlurmdLogFile=$at/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
MpiDefault=none
KillWait=30
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort=16819
AccountingStoragePass=$socket
NodeName=$host NodeAddr=127.0.0.1 CPUs=${CPUS:-2} RealMemory=${MEMORY:-16000} State=UNKNOWN
PartitionName=main Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
MYSQL_UNIX_PORT=$at/db/socket start slurmdbd slurmdbd -D
await 60 sacctmgr --noheader show cluster
sacctmgr --immediate add cluster one > /dev/null 2>&1 || true
sacctmgr --immediate add account one > /dev/null
sacctmgr --immediate add user root account=one > /dev/null
start slurmctld slurmctld -D
await 30 scontrol ping
start slurmd slurmd -D
await 30 bash -c 'sinfo --noheader --format=%T | grep -q idle'

USER=$(id -un) "$@" # the plugin reads USER, which a container does not set
