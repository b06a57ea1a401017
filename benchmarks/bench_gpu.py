"""Measure what needs a GPU, with random weights and no network: each step in a separate process with a time limit.

    python benchmarks/bench_gpu.py --list                                    the steps, which of them can run here, and what is carried
    python benchmarks/bench_gpu.py --resume                                  all that can run, in order, into out/gpu.json
    python benchmarks/bench_gpu.py --resume --budget 540 --copy "$OUT"       what fits in 540 seconds; repeat it until none is left
    python benchmarks/bench_gpu.py update-1.7b --resume --again              these steps, even if they have been measured
    python benchmarks/bench_gpu.py --wheels wheels --resume                  first unpack wheels (TRL, ...) that the machine lacks
    python benchmarks/bench_gpu.py --rehearse --out /tmp/gpu.json            toy shapes on this CPU, through the same code

docs/gpu_half_hour.md says what to type on a GPU that one has for half an hour. The order begins with what needs no vLLM. A step whose
packages are missing is skipped, with the reason, and tried again by `--resume`. Every finished step is written to OUT at once; beside it
lie the table (.md) and the constants that were measured (.measured.json), which `multirole plan --measured` reads. A step that exceeds its
time limit is killed with its children; the parts that it had measured are kept. The exit code is the number of steps that failed.

`gpu_steps.py` has the measurements. This file uses the standard library only, and `packaging` for `--wheels`.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
OUT_OF_MEMORY = 3
"""Exit code of a step that ran out of memory."""
FINAL = ("done", "time limit", "out of memory", "failed")
"""Outcomes that `--resume` does not try again; "skipped" is not among them."""
BASE = ("torch", "transformers")
LIBRARY = (*BASE, "peft", "trl", "accelerate", "datasets", "pyarrow", "pandas", "xxhash", "dill", "multiprocess")
STUDY = (*LIBRARY, "pydantic", "psutil", "tabulate", "latex2sympy2_extended")
VLLM = (*LIBRARY, "vllm")
TRAIN = (*STUDY, "statsmodels")
SMOLLM2 = (*TRAIN, "gguf")
LIMITS = {
    "machine": (60, BASE), "passes": (120, BASE), "doctor": (400, STUDY), "packed": (240, LIBRARY), "update": (180, LIBRARY),
    "lengths": (240, LIBRARY), "wakeup": (120, LIBRARY), "row": (150, LIBRARY), "update-recomputed": (180, LIBRARY),
    "update-peft": (180, LIBRARY), "update-casts": (180, LIBRARY), "padded": (180, LIBRARY), "publish": (120, LIBRARY),
    "plan": (60, STUDY), "tiny": (240, TRAIN), "smollm2": (540, SMOLLM2), "vllm": (540, VLLM), "doctor-vllm": (540, (*STUDY, "vllm")),
}  # fmt: skip
"""Kind of step -> its time limit in seconds and the modules that it needs. With `--budget` no limit is longer than the budget."""
FIRST = ("doctor", "packed", "update", "lengths", "wakeup", "passes", "row")
"""Kinds that need no vLLM, the most informative first, for every scale."""
VARIANTS = ("update-recomputed", "update-peft", "update-casts", "padded")
WITH_VLLM = ("vllm", "doctor-vllm")
PHASES = ("rollout", "sleep", "update", "publish")


@dataclass(frozen=True)
class Step:
    """One measurement: a command that writes its result as JSON to the file named by its last argument."""

    name: str
    needs: tuple[str, ...]
    limit: float
    command: tuple[str, ...]


def order(scales: Sequence[str]) -> list[str]:
    """Return the names of all steps: without vLLM first, and in each part the scales in the order given."""
    first, variants, with_vllm = (
        [f"{kind}-{scale}" for scale in scales for kind in kinds] for kinds in (FIRST, VARIANTS, WITH_VLLM)
    )
    return ["machine", *first, "smollm2", *variants, "tiny", "publish", "plan", *with_vllm]


def kind_of(name: str) -> str:
    """Return the kind of a step: its name without the scale."""
    return name if name in LIMITS else name.rpartition("-")[0]


def make_step(name: str, options: Sequence[str] = ()) -> Step:
    """Build a step of `order` that runs `gpu_steps.py` with some options."""
    limit, needs = LIMITS[kind_of(name)]
    return Step(name, needs, limit, (sys.executable, str(HERE / "gpu_steps.py"), name, *options, "--result"))


def missing(needs: Sequence[str]) -> list[str]:
    """Return the modules of a step that cannot be imported here."""
    return [module for module in needs if importlib.util.find_spec(module) is None]


# ---- one step


def run_step(step: Step, limit: float, environment: dict[str, str]) -> dict[str, Any]:
    """Run a step and return its record: `status`, `seconds`, the `result` (also a partial one), and `error` if it failed.

    The process group is killed at the limit, so that no engine keeps memory that the next step needs.
    """
    with tempfile.TemporaryDirectory() as place:
        result, log, started = Path(place, "result.json"), Path(place, "log"), time.monotonic()
        with log.open("w") as out, subprocess.Popen(
            [*step.command, str(result)], stdout=out, stderr=out, env=environment, start_new_session=True
        ) as process:  # fmt: skip
            try:
                status = {0: "done", OUT_OF_MEMORY: "out of memory"}.get(process.wait(limit), "failed")
                error = "" if status == "done" else last_line(log)
                if process.returncode == -signal.SIGKILL:
                    status, error = "out of memory", "The system killed the process, usually for want of host memory."
            except subprocess.TimeoutExpired:
                status, error = "time limit", f"killed after {limit:.0f} s; its last line was: {last_line(log)}"
            finally:
                end_group(process)
        record = {"status": status, "seconds": round(time.monotonic() - started, 1)}
        record["result"] = json.loads(result.read_text()) if result.exists() else {}
        return record | ({"error": error, "log": log.read_text(errors="replace")[-3000:]} if error else {})


def end_group(process: subprocess.Popen) -> None:
    """Kill what is left of a step's process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def last_line(log: Path) -> str:
    """Return the last line of a log that names an exception, or else the last that is not blank, shortened."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"(\[\w+\]: *)?[\w.]+(Error|Exception): ", line)]
    return (raised or lines or ["(no output)"])[-1][-300:]


# ---- all steps


def run_steps(
    steps: Sequence[Step], out: Path, record: dict[str, Any], environment: dict[str, str], budget: float | None = None,
    copy: Path | None = None,
) -> list[str]:  # fmt: skip
    """Run the steps that `record` does not have, and `save` it after each; return the names of those that did not fit in the budget.

    Except for the first, a step starts only if its whole time limit is left, so that a limit never depends on the steps before it.
    A later step with a shorter limit may still start.
    """
    started, left, is_first = time.monotonic(), [], True
    for step in steps:
        if record["steps"].get(step.name, {}).get("status") in FINAL:
            continue
        if absent := missing(step.needs):
            reason = f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed"
            record["steps"][step.name] = {"status": "skipped", "seconds": 0.0, "result": {}, "error": reason}
        else:
            limit = step.limit if budget is None else min(step.limit, budget)
            if budget is not None and not is_first and time.monotonic() - started + limit > budget:
                left.append(step.name)
                continue
            is_first = False
            print(f"{step.name} (at most {limit:.0f} s) ...", flush=True)
            record["steps"][step.name] = run_step(step, limit, environment)
        outcome = record["steps"][step.name]
        print(f"{step.name}: {outcome['status']}, {outcome['seconds']} s {outcome.get('error', '')}", flush=True)
        save(out, record, copy)
    return left


def save(out: Path, record: dict[str, Any], copy: Path | None = None) -> None:
    """Write the record, its table and the measured constants, also into the folder `copy`; a reader sees the old files or the new ones."""
    texts = {
        out: json.dumps(record, indent=1) + "\n",
        out.with_suffix(".md"): table(record),
        out.with_suffix(".measured.json"): json.dumps(measured_constants(record), indent=1) + "\n",
    }
    for path, text in texts.items():
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text)
        os.replace(temporary, path)
        if copy is not None:
            shutil.copy(path, copy / path.name)


def measured_constants(record: dict[str, Any]) -> dict[str, Any]:
    """Return what `multirole_study.hours.Constants.from_file` reads: the constants that the first scale's steps have measured.

    A later step, with vLLM, replaces what an earlier one has measured in its stead.
    """
    scales, is_toy = record["settings"]["scales"], record["settings"]["rehearse"]
    devices, constants = [], {}
    for name in order(scales[:1]):
        result = record["steps"].get(name, {}).get("result", {})
        devices += [result["device"]] if "device" in result else []
        for row in result.get("rows", []):
            values = {key: value for key, value in row.get("constants", {}).items() if value is not None}
            constants.update({key: {"value": value, "step": name} for key, value in values.items()})
    device = devices[0] if devices else "nothing yet"
    return {"device": f"{device}, a rehearsal with toy shapes" if is_toy else device, "constants": constants}


def load(out: Path, settings: dict[str, Any], resumes: bool) -> dict[str, Any]:
    """Return the record to continue. Raises SystemExit if there is one and it may not be continued."""
    if not out.exists():
        return {"settings": settings, "steps": {}}
    if not resumes:
        raise SystemExit(f"{out} exists. Write --resume to continue it, or name another file.")
    record = json.loads(out.read_text())
    if record["settings"] != settings:
        raise SystemExit(f"{out} was measured with {record['settings']}, not with {settings}. Name another file.")
    return record


# ---- the table


def table(record: dict[str, Any]) -> str:
    """Format all steps as a Markdown table: one line per measured part, with peak memory by phase."""
    names = order(record["settings"]["scales"])
    recorded = [name for name in names if name in record["steps"]]
    devices = {step["result"]["device"]: None for step in record["steps"].values() if "device" in step["result"]}
    lines = [
        f"Measured on: {', '.join(devices) or 'nothing yet'}{' (a rehearsal with toy shapes)' if record['settings']['rehearse'] else ''}.",
        "Peaks are all memory in use on the device, in GiB; on a CPU, the resident size of the process.", "",
        f"| step | measured | seconds | tokens/s | TFLOP/s | MFU | {' | '.join(f'peak, {phase}' for phase in PHASES)} | notes |",
        "|---" * (7 + len(PHASES)) + "|",
    ]  # fmt: skip
    for name in recorded:
        step = record["steps"][name]
        rows = step["result"].get("rows", [])
        lines += [line_of(name, row) for row in rows]
        if step["status"] != "done" or not rows:
            lines.append(line_of(name, {"measured": f"**{step['status']}**", "notes": step.get("error", "")}))
    return "\n".join(lines) + "\n"


def line_of(name: str, row: dict[str, Any]) -> str:
    """Format one measured part; what a part does not have is left blank."""
    shown = {"seconds": ".3g", "tokens_per_second": ",.0f", "tflops": ".3g", "mfu": ".1%"}
    cells = [name, row["measured"], *(format(row[key], how) if row.get(key) else "" for key, how in shown.items())]
    peaks = row.get("peaks_gib", {})
    cells += [f"{peaks[phase]:.2f}" if phase in peaks else "" for phase in PHASES]
    return f"| {' | '.join([*cells, row.get('notes', '').replace('|', '/')])} |"


# ---- the command


def fitting_wheels(folder: Path, python: tuple[int, int]) -> tuple[list[Path], list[str]]:
    """Return the wheels of a folder that fit a version of Python on this platform, and a sentence about each that is left out.

    Two versions of one package would stop pip; the older one is left out. Raises SystemExit if the folder has no wheel.
    """
    from packaging.tags import compatible_tags, cpython_tags
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    supported = {*cpython_tags(python), *compatible_tags(python, f"cp{python[0]}{python[1]}")}
    chosen: dict[str, tuple[Any, Path]] = {}
    left_out, files = [], sorted(folder.glob("*.whl"))
    if not files:
        raise SystemExit(f"--wheels {folder} has no file *.whl.")
    for path in files:
        try:
            name, version, _, tags = parse_wheel_filename(path.name)
        except InvalidWheelFilename as error:
            left_out.append(f"{path.name}: {error}.")
            continue
        if not tags & supported:
            left_out.append(f"{path.name} is not for Python {python[0]}.{python[1]} on this platform.")
            continue
        older = sorted([*([chosen[name]] if name in chosen else []), (version, path)])
        left_out += [f"{old.name} is left out for {older[-1][1].name}." for _, old in older[:-1]]
        chosen[name] = older[-1]
    return [path for _, path in chosen.values()], left_out


def carried(wheels: Sequence[Path]) -> str:
    """Say how large this checkout's tracked files and the wheels are, for a machine to which only so much can be carried."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=False, text=True
    ).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    tracked, results, of_wheels = (
        sum(path.stat().st_size for path in group if path.is_file()) / 2**20
        for group in (paths, [path for path in paths if ROOT / "results" in path.parents], wheels)
    )
    return f"The checkout's files take {tracked:.1f} MiB, of which results/ is {results:.1f}, and the wheels {of_wheels:.1f}."


def declare_entry_points(target: Path) -> None:
    """Write the metadata by which this checkout's engine "transformers" and its fast passes are found: nothing of it is installed."""
    project = tomllib.loads((ROOT / "src" / "multirole_cpu" / "pyproject.toml").read_text())["project"]
    folder = target / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir(parents=True)
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (folder / "METADATA").write_text(head)
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in points.items()) for group, points in groups]
    (folder / "entry_points.txt").write_text("\n".join(lines))


def environment_of(wheels: Sequence[Path], target: Path) -> dict[str, str]:
    """Return the environment of the steps. Wheels are unpacked into a folder in front of the installed packages."""
    declare_entry_points(target)
    paths = [str(target), str(ROOT / "src")]
    if wheels:
        options = ("--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(target))
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *map(str, wheels)], check=True)
        sys.path.insert(0, str(target))  # for `missing`
    former = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([*paths, *([former] if former else [])]), "HF_HUB_OFFLINE": "1"}


def has_gpu() -> bool:
    """Return whether torch sees a GPU, asked in another process."""
    ask = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", ask], check=False, stderr=subprocess.DEVNULL).returncode == 0


def describe(steps: Sequence[Step]) -> str:
    """List the steps with their limits, and for each whether its packages are here."""
    lines = []
    for step in steps:
        absent = missing(step.needs)
        lines.append(f"{step.name:24}{step.limit:5.0f} s   {'needs ' + ', '.join(absent) if absent else 'can run'}")
    return "\n".join(lines)


def version_of(text: str) -> tuple[int, int]:
    """Read a version of Python such as "3.12"."""
    major, minor = text.split(".")
    return int(major), int(minor)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="names from --list; all by default")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "out" / "gpu.json",
        help="file of the results (out/gpu.json, which git ignores)",
    )
    parser.add_argument("--copy", type=Path, metavar="FOLDER", help="copy the results here too, after each step")
    parser.add_argument("--scales", nargs="+", default=["1.7b", "4b"], choices=["0.6b", "1.7b", "4b"])
    parser.add_argument(
        "--problems", type=int, default=8, help="problems per iteration, 8 episodes each (the paper: 64)"
    )
    parser.add_argument(
        "--budget", type=float, help="seconds of this call; steps that do not fit are left for the next"
    )
    parser.add_argument("--resume", action="store_true", help="continue OUT")
    parser.add_argument("--again", action="store_true", help="with --resume: run the named steps even if OUT has them")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that are used in front of the installed packages")
    parser.add_argument(
        "--python",
        type=version_of,
        default=sys.version_info[:2],
        help="with --list: the GPU machine's Python, such as 3.12",
    )
    parser.add_argument("--smollm2", type=Path, metavar="FOLDER", help="folder of the parts of SmolLM2's wheel")
    parser.add_argument(
        "--rehearse", action="store_true", help="toy shapes, also on a CPU, to see that everything runs"
    )
    parser.add_argument("--list", action="store_true", help="print the steps and run none")
    args = parser.parse_args()
    # a step has a process group of its own, and must end too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = order(args.scales)
    if unknown := [name for name in args.steps if name not in names]:
        parser.error(f"{', '.join(unknown)} is no step with --scales {' '.join(args.scales)}: see --list.")
    wheels, left_out = fitting_wheels(args.wheels, args.python) if args.wheels else ([], [])
    for sentence in left_out:
        print(sentence, flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as scratch:
        is_here = args.python == sys.version_info[:2]
        environment = environment_of(wheels if is_here else [], Path(scratch, "packages"))
        options = ["--problems", str(args.problems), "--scratch", scratch, *(["--rehearse"] if args.rehearse else [])]
        options += ["--smollm2", str(args.smollm2.resolve())] if args.smollm2 else []
        chosen = args.steps or [name for name in names if name != "smollm2" or args.smollm2]
        steps = [make_step(name, options) for name in names if name in chosen]
        if args.list:
            print(f"{describe(steps)}\n{carried(wheels)}")
            return 0
        if not is_here:
            parser.error("--python is for --list; the steps run with the Python that runs this script.")
        if not args.rehearse and not has_gpu():
            parser.error("torch sees no GPU, and these shapes take hours on a CPU. Write --rehearse for toy shapes.")
        settings = {"scales": args.scales, "problems": args.problems, "rehearse": args.rehearse}
        for folder in filter(None, (args.out.parent, args.copy)):
            folder.mkdir(parents=True, exist_ok=True)
        record = load(args.out, settings, args.resume)
        if args.again:
            record["steps"] = {name: step for name, step in record["steps"].items() if name not in args.steps}
        left = run_steps(steps, args.out, record, environment, args.budget, args.copy)
    print(table(record))
    if left:
        print(
            f"{len(left)} steps did not fit in {args.budget:.0f} s: {', '.join(left)}. Repeat the command with --resume."
        )
    return sum(record["steps"].get(step.name, {}).get("status") in FINAL[1:] for step in steps)


if __name__ == "__main__":
    sys.exit(main())
