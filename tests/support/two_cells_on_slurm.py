"""Train two cells of the grid through profiles/slurm and requeue the first one's job half way: see `test_slurm`.

python two_cells_on_slurm.py FOLDER_OF_A_CHECKOUT CELL_ID CELL_ID -- SNAKEMAKE_OPTIONS. Prints how often SLURM started each job.
"""

import subprocess
import sys
import time
from pathlib import Path

checkout, (first, second), options = Path(sys.argv[1]), sys.argv[2:4], sys.argv[5:]
done = [f"runs/tiny-r/{cell}/DONE" for cell in (first, second)]
small = ["--set-resources", "train:mem_mb=4000", "train:cpus_per_task=1", "train:runtime=30"]
head = subprocess.Popen(
    [sys.executable, "-m", "snakemake", *done, "--workflow-profile", "profiles/slurm", *small,
     "--slurm-init-seconds-before-status-checks", "5", "--seconds-between-status-checks", "5", *options],
    cwd=checkout, stdin=subprocess.DEVNULL,
)  # fmt: skip


def ask(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


while not list((checkout / f"runs/tiny-r/{first}").glob("checkpoints/checkpoint-*/checksums.json")):
    assert head.poll() is None, "Snakemake has ended before the first checkpoint"
    time.sleep(0.2)
jobs = {job: ask("scontrol", "show", "job", job) for job in ask("squeue", "--noheader", "--format=%i").split()}
(preempted,) = [job for job, about in jobs.items() if first in about]
subprocess.run(["scontrol", "requeue", preempted], check=True)
while head.poll() is None:
    if f"JobId={preempted}" in (about := ask("scontrol", "show", "job", preempted)) and "Reason=BeginTime" in about:
        # SLURM holds a requeued job back for two minutes
        subprocess.run(["scontrol", "update", f"JobId={preempted}", "StartTime=now"], check=True)
    time.sleep(1)
for job in jobs:
    about = dict(word.partition("=")[::2] for word in ask("scontrol", "show", "job", job).split())
    print(f"job {job}: {about['JobState']}, restarts {about['Restarts']}")
sys.exit(head.returncode)
