"""Exit code, notebook and files of papermill when a training run is interrupted (docker/README.md)."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from multirole_study.experiment.run_folder import checkpoints, newest_intact

ROOT = Path(__file__).parents[2]
FIELDS = {
    "workflow": "voting", "policy": "ip", "max_steps": 9000, "n_problems": 2, "num_generations": 2, "n_validation": 4, "n_train": 8,
    "save_steps": 2, "eval_steps": 9000, "max_completion_length": 24,
}  # fmt: skip
CONTAINER = "SIGTERM to the container"  # to its process group, as `tini -g` passes on the signal of `docker stop`
ENDS = {  # event -> papermill's exit code, the errors in its notebook, whether a checkpoint is saved at the end
    CONTAINER: (1, ["Stopped"], True),
    "SIGTERM": (-15, [], False),
    "SIGKILL": (-9, [], False),
    "SIGKILL to the kernel": (138, [], False),
    "SIGINT": (1, None, False),  # papermill may end its kernel before it reports KeyboardInterrupt
}
PATIENCE = 900  # seconds, on a busy machine


@pytest.fixture
def processes():
    """Collect the processes that a test starts, and kill them and their kernels even if it fails."""
    started: list[subprocess.Popen] = []
    yield started
    for process in started:
        if process.poll() is None:
            for process_ in [*psutil.Process(process.pid).children(recursive=True), process]:
                process_.kill()
            process.wait()


def start(folder: Path, *options: str, in_container: bool = False) -> subprocess.Popen:
    folder.mkdir()
    command = [sys.executable, "-m", "papermill", "-k", "python3", "--start-timeout", str(PATIENCE), *options]
    command += [str(ROOT / "notebooks" / "train_cell.ipynb"), "out.ipynb", "-p", "results_dir", str(folder)]
    for name, value in FIELDS.items():
        command += ["-p", name, str(value)]
    if in_container:
        entrypoint = folder / "entrypoint.sh"
        entrypoint.write_text((ROOT / "docker" / "entrypoint.sh").read_text().replace("/results", str(folder)))
        command = ["bash", str(entrypoint), *[word.replace(sys.executable, "python") for word in command]]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder), "PATH": path}
    # a shell's background job ignores it, and so would its children
    command = ["env", "--default-signal=INT", *command]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
        env=os.environ | env, start_new_session=True,
    )  # fmt: skip


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.05)


def folder_of(parent: Path, name: str) -> Path:
    return parent / name.replace(" ", "-")  # the entry point's folders have no spaces in their names


def run_of(folder: Path) -> Path | None:
    return next(folder.glob("tiny-r/voting-ip-*"), None)


def kernel_of(process: subprocess.Popen) -> psutil.Process:
    (kernel,) = (p for p in psutil.Process(process.pid).children(recursive=True) if "ipykernel_launcher" in p.cmdline())
    return kernel


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def errors_in(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text())["cells"]
    return [o["ename"] for cell in cells for o in cell.get("outputs", []) if o["output_type"] == "error"]


@pytest.mark.slow
def test_every_end_leaves_a_run_that_the_same_command_continues(tmp_path, processes):
    names = list(ENDS)
    processes += [start(folder_of(tmp_path, name), in_container=name == CONTAINER) for name in names]
    for process, name in zip(processes, names, strict=True):
        (code, errors, saves), folder = ENDS[name], folder_of(tmp_path, name)
        until(lambda f=folder, p=process: p.poll() is not None or (run_of(f) and checkpoints(run_of(f))))
        assert process.poll() is None, name
        kernel, run = kernel_of(process), run_of(folder)
        signum = getattr(signal, name.split()[0])
        before = checkpoints(run)[0]
        if name == CONTAINER:
            os.killpg(process.pid, signum)
        else:
            (kernel if "kernel" in name else process).send_signal(signum)
        assert process.wait(PATIENCE) == code, name
        until(lambda kernel=kernel: has_ended(kernel))
        assert errors is None or errors_in(folder / "out.ipynb") == errors, name
        assert not (run / "DONE").exists(), name
        assert newest_intact(run) == checkpoints(run)[0], name
        if saves:  # it has every finished iteration and the current one
            assert not list((run / "checkpoints").glob("staging/checkpoint-*")), name
            assert int(newest_intact(run).name.split("-")[1]) > int(before.name.split("-")[1]), name


@pytest.mark.slow
def test_a_cell_out_of_time(tmp_path, processes):
    processes.append(start(tmp_path / "run", "--execution-timeout", "60"))
    assert processes[0].wait(PATIENCE) == 1
    run = run_of(tmp_path / "run")
    assert newest_intact(run) and not (run / "DONE").exists()


@pytest.mark.parametrize("command", ["serve", "signal", "credit"])
def test_a_wrong_folder_is_refused_before_torch_is_imported(command):
    script = "import sys; sys.modules['torch'] = None; from multirole_study.__main__ import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, command, "nowhere"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "nowhere is not the folder of a run" in done.stdout + done.stderr
