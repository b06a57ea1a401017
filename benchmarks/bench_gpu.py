"""Measure what needs a GPU, with random weights and no network: each step in a separate process with a time limit.

    python benchmarks/bench_gpu.py --list                                          the steps, and which of them this machine can run
    python benchmarks/bench_gpu.py --out results/bench/gpu.json                    all that it can run, in order
    python benchmarks/bench_gpu.py --out gpu.json --budget 540 --resume            what fits in 540 seconds; repeat it until none is left
    python benchmarks/bench_gpu.py update-1.7b --out gpu.json --resume --again     these steps, even if they have been measured
    python benchmarks/bench_gpu.py --wheels wheels --out gpu.json                  first unpack wheels (TRL, PEFT, ...) that the machine lacks
    python benchmarks/bench_gpu.py --rehearse --out /tmp/gpu.json                  toy shapes on this CPU, through the same code

The order begins with what needs no vLLM. The first two steps need torch and transformers only. A step whose packages are
missing is skipped, with the reason, and tried again by `--resume`. Every finished step is written to OUT at once, and OUT with the suffix .md
has the table. A step that exceeds its time limit is killed with its children; the parts that it had measured are kept. The exit code
is the number of steps that failed.

`gpu_steps.py` has the measurements. This file uses the standard library only.
"""

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
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
LIMITS = {
    "machine": (60, BASE), "passes": (120, BASE), "update": (180, LIBRARY), "update-recomputed": (180, LIBRARY),
    "update-peft": (180, LIBRARY), "update-casts": (180, LIBRARY), "row": (150, LIBRARY), "padded": (180, LIBRARY),
    "publish": (120, LIBRARY), "plan": (60, STUDY), "tiny": (240, STUDY), "vllm": (540, VLLM),
    "doctor": (540, (*STUDY, "vllm")),
}  # fmt: skip
"""Kind of step -> its time limit in seconds and the modules that it needs. With `--budget` no limit is longer than the budget."""
WITHOUT_VLLM = ("passes", "update", "update-recomputed", "update-peft", "update-casts", "row", "padded")
WITH_VLLM = ("vllm", "doctor")
PHASES = ("rollout", "sleep", "update", "publish")


@dataclass(frozen=True)
class Step:
    """One measurement: a command that writes its result as JSON to the file named by its last argument."""

    name: str
    needs: tuple[str, ...]
    limit: float
    command: tuple[str, ...]


def order(scales: Sequence[str]) -> list[str]:
    """Return the names of all steps: without vLLM first, and in both parts the scales in the order given."""
    names = ["machine", *(f"{kind}-{scale}" for scale in scales for kind in WITHOUT_VLLM), "tiny", "publish", "plan"]
    return names + [f"{kind}-{scale}" for scale in scales for kind in WITH_VLLM]


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
    steps: Sequence[Step], out: Path, record: dict[str, Any], environment: dict[str, str], budget: float | None = None
) -> list[str]:
    """Run the steps that `record` does not have, and write `out` after each; return the names of those that did not fit in the budget.

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
        save(out, record)
    return left


def save(out: Path, record: dict[str, Any]) -> None:
    """Write the record and its table; a reader sees the old files or the new ones."""
    for path, text in ((out, json.dumps(record, indent=1) + "\n"), (out.with_suffix(".md"), table(record))):
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text)
        os.replace(temporary, path)


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


def environment_of(wheels: Path | None, target: Path) -> dict[str, str]:
    """Return the environment of the steps. Wheels are unpacked into a folder in front of the installed packages."""
    paths = [str(ROOT / "src")]
    if wheels is not None:
        files = sorted(map(str, wheels.glob("*.whl")))
        if not files:
            raise SystemExit(f"--wheels {wheels} has no file *.whl.")
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--target",
            str(target),
        ]
        subprocess.run([*install, *files], check=True)
        sys.path.insert(0, str(target))  # for `missing`
        paths.insert(0, str(target))
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="names from --list; all by default")
    parser.add_argument("--out", type=Path, help="file of the results; the table is beside it, with the suffix .md")
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
        "--rehearse", action="store_true", help="toy shapes, also on a CPU, to see that everything runs"
    )
    parser.add_argument("--list", action="store_true", help="print the steps and run none")
    args = parser.parse_args()
    # a step has a process group of its own, and must end too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = order(args.scales)
    if unknown := [name for name in args.steps if name not in names]:
        parser.error(f"{', '.join(unknown)} is no step with --scales {' '.join(args.scales)}: see --list.")
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as scratch:
        environment = environment_of(args.wheels, Path(scratch, "packages"))
        options = ["--problems", str(args.problems), "--scratch", scratch, *(["--rehearse"] if args.rehearse else [])]
        steps = [make_step(name, options) for name in names if not args.steps or name in args.steps]
        if args.list:
            print(describe(steps))
            return 0
        if args.out is None:
            parser.error("--out is missing: the file of the results, such as results/bench/gpu.json.")
        if not args.rehearse and not has_gpu():
            parser.error("torch sees no GPU, and these shapes take hours on a CPU. Write --rehearse for toy shapes.")
        settings = {"scales": args.scales, "problems": args.problems, "rehearse": args.rehearse}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        record = load(args.out, settings, args.resume)
        if args.again:
            record["steps"] = {name: step for name, step in record["steps"].items() if name not in args.steps}
        left = run_steps(steps, args.out, record, environment, args.budget)
    print(table(record))
    if left:
        print(
            f"{len(left)} steps did not fit in {args.budget:.0f} s: {', '.join(left)}. Repeat the command with --resume."
        )
    return sum(record["steps"].get(step.name, {}).get("status") in FINAL[1:] for step in steps)


if __name__ == "__main__":
    sys.exit(main())
