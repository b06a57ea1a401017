# Train every cell of the paper's matrix at one scale, run every evaluation, pack the results, then run the notebooks.
# grid.yaml defines the grid, profiles/ how it is run; `make grid` runs it. Each job is a papermill command that can also be run by hand.
#
# A job is done if its DONE exists or its results are packed. File times and code do not count, so that an edit or a fresh clone
# trains nothing again. DONE is written last and atomically.
import os, sys
from pathlib import Path
from shlex import quote
from multirole_study.experiment.run_folder import folder_of
from multirole_study.experiment.settings import UserError
from multirole_study.paper import pack
from multirole_study.paper.declarations import declaration_of
from snakemake.scheduling.job_scheduler import JobScheduler

configfile: "grid.yaml"

def counting_cores(job_selector):
    """Return Snakemake's choice of jobs, which also counts the cores of a job that alone was ready.

    Version 9.15 does not, and frees them when the job ends, so that after each seed one more job runs at once than `--cores` allows (its issue 3815). Versions
    in which that is mended refuse packaging 26.
    """
    def selected(self, jobs):
        chosen = job_selector(self, jobs)
        if len(jobs) == 1:
            self.update_available_resources(chosen)
        return chosen
    return selected

JobScheduler.job_selector = counting_cores(JobScheduler.job_selector)

try:
    DECLARATION, GPUS = declaration_of(config)
    if workflow.is_main_process:
        DECLARATION.check_rows()
except UserError as error:
    sys.exit(str(error))  # without Snakemake's traceback
RESULTS = os.path.normpath(os.path.expanduser(config["results_dir"]))
FOLDER = f"{RESULTS}/{DECLARATION.grid.scale}"
PACKED = set(pack.index(FOLDER)["run"]) | DECLARATION.packed_elsewhere()
CELLS = {cell.id: cell for cell in DECLARATION.cells()}
EVALUATIONS = {f"{job.name}/{job.cell.id}": job for job in DECLARATION.evaluations()}
LEFT_OUT = [id for id, job in EVALUATIONS.items()  # their run is packed without adapters, and would have to be trained again
            if id not in PACKED and job.source and job.source.id in PACKED and not Path(folder_of(job.source, RESULTS), "DONE").exists()]
if LEFT_OUT and workflow.is_main_process:
    print(f"{len(LEFT_OUT)} evaluations are left out: their runs are packed in {FOLDER}, without adapters. To make them, train the "
          "runs again with another RESULTS_DIR.", file=sys.stderr)
TRAINED = [f"{FOLDER}/{id}/DONE" for id in CELLS if id not in PACKED]
EVALUATED = [f"{FOLDER}/evaluations/{id}/DONE" for id in EVALUATIONS if id not in {*PACKED, *LEFT_OUT}]
STAGES = [[id for id in stage if id not in PACKED] for stage in DECLARATION.stages()]
BEFORE = {id: [f"{FOLDER}/{before}/DONE" for stage in STAGES[:i] for before in stage] for i, stage in enumerate(STAGES) for id in stage}
PAPERMILL = f"{quote(sys.executable)} -m papermill -k python3 --no-progress-bar --report-mode --start-timeout 600"  # seconds, on a busy machine

def papermill(notebook, executed, job, gpus, **launch):
    """Return the command of one job, which sees `gpus` GPUs. Parameters are text (-r), maps as YAML (-y) or Python constants (-p)."""
    parameters = DECLARATION.parameters_of(job) | {"results_dir": RESULTS} | launch
    arguments = " ".join(
        f"-y {quote(str({k: v}))}" if isinstance(v, dict) else f"-{'r' if isinstance(v, str) else 'p'} {k} {quote(str(v))}"
        for k, v in parameters.items()
    )
    # No two processes may train one cell. So papermill dies with a Snakemake that is killed. Under SLURM it runs on another machine
    # and goes on, so it also locks the executed notebook. That file is no output of the rule, because Snakemake deletes the
    # outputs of a failed job.
    prefix = f"exec profiles/gpus.sh {gpus}" if gpus else "exec"
    locked = f"{prefix} flock --nonblock --no-fork --verbose {quote(executed)} setpriv --pdeathsig KILL"
    # JPY_SESSION_NAME: where the notebook's links begin (multirole_study.notebook)
    return f"JPY_SESSION_NAME={quote(executed)} {locked} {PAPERMILL} notebooks/{notebook} {quote(executed)} {arguments} < /dev/null"

def for_slurm(gpus):
    """Return SLURM options for a job: one task that starts its own processes and sees all GPUs (the plugin's default is a task per GPU)."""
    return f"--gpus={gpus} --gpu-bind=none" if gpus else ""

onstart:
    DECLARATION.write(RESULTS)  # lists the runs that the tables are built from

localrules: paper, trained, evaluated

rule paper:  # packs the results, then runs the command of `make paper`
    input: TRAINED, EVALUATED
    shell:
        "{sys.executable:q} -m multirole_study pack {FOLDER:q}\n"
        "{sys.executable:q} -m multirole_study paper {FOLDER:q}"

rule trained:
    input: TRAINED

rule evaluated:
    input: EVALUATED

rule train:
    input: lambda w: [ancient(done) for done in BEFORE.get(w.id, ())]
    output: f"{FOLDER}/{{id,[^/]+}}/DONE"
    params: lambda w: papermill("train_cell.ipynb", f"{FOLDER}/{w.id}/train.ipynb", CELLS[w.id], GPUS, n_processes=max(1, GPUS))
    resources: gpus=GPUS, slurm_extra=for_slurm(GPUS)
    shell: "{params}"

rule evaluate:
    input: lambda w: [ancient(f"{folder_of(cell, RESULTS)}/DONE") for cell in [EVALUATIONS[w.id].source] if cell]
    output: f"{FOLDER}/evaluations/{{id,[^/]+/[^/]+}}/DONE"
    params: lambda w: papermill("eval_cell.ipynb", f"{FOLDER}/evaluations/{w.id}/eval.ipynb", EVALUATIONS[w.id], min(GPUS, 1))
    resources: gpus=min(GPUS, 1), slurm_extra=for_slurm(min(GPUS, 1))
    shell: "{params}"
