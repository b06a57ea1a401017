"""The command line. Exit codes: 0 success, 1 failed check or error, 2 usage, 75 stopped by a signal (rerun to continue).

Slow modules are imported only after the arguments are validated.
"""

import argparse
import json
import logging
import math
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from inspect import cleandoc
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

from multirole import __version__
from multirole.extras import install_advice
from multirole_study.experiment.old_names import merged
from multirole_study.experiment.settings import Parameter, UserError, did_you_mean, looked_in, user_errors, value

LOCAL_MODEL = "the base model's folder, if the run used a local model"


class _Parser(ArgumentParser):
    """A command's parser, whose errors say how a parameter is written."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with code 2."""
        if message.startswith(("argument -p:", "unrecognized")) and "-p NAME VALUE" in self.format_usage():
            message += ". Write each parameter as -p NAME VALUE, such as -p seed 1."
        super().error(message)


def _parser(command: Callable[[list[str]], int], parameters: Iterable[Parameter] = ()) -> ArgumentParser:
    """Build a command's parser, with its docstring and its parameters as help."""
    lines = []
    for parameter in parameters:
        default = "" if parameter.default is None else f" ({parameter.default})"
        lines.append(f"  {parameter.name:<31}{parameter.help}{default}")
    return _Parser(
        prog=f"multirole {command.__name__}",
        description=cleandoc(command.__doc__ or ""),
        epilog="\n".join(["parameters:", *lines]) if lines else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


@user_errors()
def _read(parser: ArgumentParser, argv: list[str]) -> tuple[Namespace, dict[str, object]]:
    """Parse a command's options and the cell's parameters, from a file and then from `-p` pairs."""
    parser.add_argument("-p", dest="pair", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"),
                        help="a parameter of the notebook, as for papermill")  # fmt: skip
    parser.add_argument("--parameters", type=Path, metavar="FILE", help="a JSON file of parameters")
    # argparse reads -1e-3 as an option, but not a word with a space
    argv = [f" {word}" if word[:1] == "-" and isinstance(value(word), int | float) else word for word in argv]
    options = parser.parse_args(argv)
    from_file = _parameters_of(options.parameters) if options.parameters else {}
    return options, merged(from_file, {name: value(text) for name, text in options.pair})


def _parameters_of(path: Path) -> dict[str, object]:
    """Read a JSON file of parameters; UserError if it holds anything else."""
    try:
        parameters = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"--parameters must name a JSON file, got {str(path)!r}{looked_in(path)}: {error.strerror}."
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is not a valid JSON file: {error}.") from error
    if not isinstance(parameters, dict):
        raise UserError(f'{path} must hold an object of parameters, such as {{"seed": 1}}, got {parameters!r}.')
    return parameters


def train(argv: list[str]) -> int:
    """Train one cell, in this process or as one of several (torchrun)."""
    from multirole_study.experiment.cell import Cell, cell_parameters
    from multirole_study.experiment.launch import is_launched

    cell, launch = Cell.from_parameters(_read(_parser(train, cell_parameters()), argv)[1])
    from multirole.update.processes import processes  # this imports torch
    from multirole_study import plan as planner
    from multirole_study.experiment.run import run_cell
    from multirole_study.experiment.storage import NotWritten
    from multirole_study.inspector import inspect_run
    from multirole_study.inspector.live_page import LivePage

    with user_errors():
        n = processes().num_processes  # under a launcher the user plans memory and disk
        launch = planner.settled(cell, launch.by_launcher(n)) if is_launched() else planner.check(cell, launch)
    try:
        folder = run_cell(cell, launch, [LivePage()])
    except NotWritten as error:  # its text says what to do
        raise UserError(str(error)) from error
    if processes().is_main_process and (
        is_launched() or launch.n_processes == 1
    ):  # otherwise another process prints it
        sys.stdout.write(f"  inspector   {inspect_run(folder)}\n")
    return 0


def evaluate(argv: list[str]) -> int:
    """Evaluate a trained cell's checkpoints, the base model, or a transfer."""
    from multirole_study.experiment.evaluation import Evaluation, evaluation_parameters, steps_of

    evaluation, launch = Evaluation.from_parameters(_read(_parser(evaluate, evaluation_parameters()), argv)[1])
    with user_errors():
        steps_of(evaluation, launch.results_dir)
    from multirole_study import plan as planner
    from multirole_study.experiment.run import run_evaluation

    with user_errors():
        launch = planner.settled(evaluation.cell, launch)
    run_evaluation(evaluation, launch)
    return 0


def plan(argv: list[str]) -> int:
    """Report whether a cell fits memory and disk, and estimate its time. The exit code is 1 if it does not fit."""
    from multirole_study import hours
    from multirole_study import plan as planner
    from multirole_study.experiment.cell import Cell
    from multirole_study.experiment.presets import is_tiny
    from multirole_study.paper.grid import Grid

    parser = _parser(plan)
    parser.add_argument("--devices", type=int, help="number of processes, one per GPU")
    parser.add_argument("--gpu", choices=hours.GPUS, help="GPU that memory and time are planned for")
    parser.add_argument(
        "--memory-gib", type=float, help="memory of one GPU in GiB (default: --gpu's, or this machine's)"
    )
    parser.add_argument("--reply-tokens", type=float, help="mean length of a reply, on which the time depends most")
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="constants that benchmarks/bench_gpu.py measured, instead of assumed ones",
    )
    options, parameters = _read(parser, argv)
    for name, unit in (("memory_gib", "of GiB"), ("reply_tokens", "of tokens above 0")):
        size = getattr(options, name)
        if size is not None and not (math.isfinite(size) and (size > 0 or name == "memory_gib")):
            raise UserError(f"--{name.replace('_', '-')} must be a number {unit}, got {size}.")
    gpu = hours.GPUS[options.gpu] if options.gpu else None
    gib = options.memory_gib if options.memory_gib is not None or gpu is None else gpu.gib
    gpu_bytes = None if gib is None else round(gib * planner.GIB)
    with user_errors():
        constants = hours.Constants.from_file(options.measured) if options.measured else hours.ASSUMED
        cell, launch = Cell.from_parameters(parameters)
        planner.check_device(cell, gpu_bytes)
        planned = launch.replace(n_processes=launch.n_processes if options.devices is None else options.devices)
        launch = planner.settled(cell, planned, gpu_bytes)
        memory_plan = planner.plan(cell, launch, gpu_bytes)
        lines = [planner.report(memory_plan, launch)]
        if memory_plan.kind == "GPU" and memory_plan.fits and planner.has_estimate(cell):
            assumed = planner.Assumptions(gpu, options.reply_tokens, constants)
            grid = Grid(cell.scale).cells()
            lines.append("\n" + planner.time_report(cell, planned, memory_plan.size, grid, assumed))
        elif memory_plan.kind == "GPU" and memory_plan.fits and not is_tiny(cell.scale):
            lines.append(
                "Time is estimated only for the paper's models with vLLM in the trainer's process, and for credit without replays."
            )
    sys.stdout.write("\n".join([*lines, ""]))
    return 0 if memory_plan.fits else 1


def doctor(argv: list[str]) -> int:
    """Train two iterations of a cell on this machine to check it and measure time and memory. The exit code is 1 if a check fails.

    For several processes, write torchrun --nproc_per_node 2 -m multirole_study doctor -p workflow voting -p policy ip
    """
    from multirole_study.experiment.cell import Cell

    cell, launch = Cell.from_parameters(_read(_parser(doctor), argv)[1])
    from multirole.update.processes import processes
    from multirole_study import doctor as smoke_run  # this imports torch
    from multirole_study import plan as planner

    n = processes().num_processes
    with user_errors():
        if launch.n_processes not in (1, n):
            raise ValueError(
                f"`n_processes` is {launch.n_processes}, but the doctor checks the processes that a launcher started, here {n}. "
                f"Write: torchrun --nproc_per_node {launch.n_processes} -m multirole_study doctor ..."
            )
        settled = planner.settled(cell, launch.replace(n_processes=n))
        return smoke_run.run(cell, settled, planner.plan(cell, settled).per_process)


def _check_run(folder: Path) -> None:
    """Refuse a folder that is not a run's before torch is imported, which takes seconds."""
    from multirole_study.experiment.run_folder import read_config

    with user_errors():
        read_config(folder)


def serve(argv: list[str]) -> int:
    """Serve the roles of a run, or of a saved model, as models of OpenAI's API, until Ctrl-C. Without a folder, the base `--model` alone."""
    from multirole.access import check_host
    from multirole.openai_api.arguments import add_serving_arguments

    parser = _parser(serve)
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        metavar="FOLDER",
        help="a run, or what `trainer.save_model` or a checkpoint wrote",
    )
    parser.add_argument(
        "--step", type=int, help="the evaluated step of a run whose adapters are served (default: the last)"
    )
    add_serving_arguments(parser)
    options = parser.parse_args(argv)
    from multirole.saving.layout import saved_adapters

    if options.folder and not saved_adapters(options.folder) and not any(options.folder.glob("checkpoint-*")):
        _check_run(options.folder)
    with user_errors():
        check_host(options.host)
        from multirole_study.serve import serve_folder

        where = options.host, options.port
        serve_folder(options.folder, options.step, *where, options.model, options.ignore, options.trust_remote_code)
    return 0


def vllm_server(argv: list[str]) -> int:
    """Start a vLLM server on this machine for the rollouts of a cell (engine vllm_server).

    The cell's parameters decide on model, lengths, rank and LoRA slots. Words after -- go to vLLM, such as -- --tensor-parallel-size 2.
    """
    from multirole_study.experiment.cell import Cell

    parser = _parser(vllm_server)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="port (default: 8000)")
    parser.add_argument("--print", action="store_true", help="print the command and start nothing")
    split = argv.index("--") if "--" in argv else len(argv)
    options, parameters = _read(parser, argv[:split])
    cell, launch = Cell.from_parameters({"engine": "vllm_server"} | parameters)
    from multirole_study import vllm_server as server  # this imports torch

    with user_errors():
        if not 0 < options.port < 2**16:
            raise ValueError(f"--port must be from 1 to 65535, got {options.port}.")
        share = (
            launch.vllm_gpu_memory_utilization if "vllm_gpu_memory_utilization" in parameters else server.MEMORY_SHARE
        )
        command = server.command_of(cell, launch, options.host, options.port, argv[split + 1 :], share)
        if not options.print:
            server.check_installed()
    sys.stdout.write(f"{server.as_text(command)}\n")
    sys.stdout.flush()
    if not options.print:
        server.start(command)
    return 0


def role_value(argv: list[str]) -> int:
    """Measure what each role of a trained cell is worth: replay episodes with it resampled, played by the base, or replaced by its trivial twin."""
    from multirole_study.experiment.evaluation import Evaluation, evaluation_parameters, steps_of

    parser = _parser(role_value, evaluation_parameters())
    parser.add_argument("--problems", type=int, default=128, help="validation problems (default: 128)")
    parser.add_argument("--draws", type=int, default=1, help="replays of each episode and intervention (default: 1)")
    turns = "number of problems whose turns are also changed one by one, so that the inspector shows which turns decided (default: 0)"
    parser.add_argument("--turns", type=int, default=0, metavar="PROBLEMS", help=turns)
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the table as CSV, in fractions")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="also draw it, as PNG, PDF or SVG")
    parser.epilog = (
        f"The parameter checkpoints is best,terminal by default, and adapters must be own.\n\n{parser.epilog}"
    )
    options, parameters = _read(parser, argv)
    evaluation, launch = Evaluation.from_parameters({"checkpoints": "best,terminal"} | parameters)
    with user_errors():
        steps_of(evaluation, launch.results_dir)
        for path in filter(None, (options.out, options.figure)):
            if not path.absolute().parent.is_dir():
                raise ValueError(f"The folder of {path} does not exist. Make it first: mkdir -p {path.parent}")
        if options.figure is not None and options.figure.suffix not in (".png", ".pdf", ".svg"):
            raise ValueError(f"--figure must end in .png, .pdf or .svg, got {options.figure}.")
        from multirole_study import plan as planner
        from multirole_study.measurements.role_value_of_run import measure_roles
        from multirole_study.paper.role_value_table import as_text, plot

        settled = planner.settled(evaluation.cell, launch)
        table = measure_roles(evaluation, settled, options.problems, options.draws, options.turns)
        sys.stdout.write(f"{as_text(table)}\n")
        if options.out is not None:
            table.to_csv(options.out, index=False)
        if options.figure is not None:
            plot(table).savefig(options.figure, dpi=100)
    return 0


def inspect(argv: list[str]) -> int:
    """Write an HTML page for one run, for two side by side, or for every finished run below a folder, with an index."""
    parser = _parser(inspect)
    parser.add_argument("results_dir", type=Path, metavar="RESULTS_DIR", help="a run's folder, or a folder of runs")
    parser.add_argument("other", type=Path, nargs="?", metavar="RUN", help="a second run, to be shown side by side")
    out = "output file for one run or two (default: inspector.html, or against_RUN.html, in the first folder)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out)
    options = parser.parse_args(argv)
    from multirole_study.inspector import inspect_all, inspect_run
    from multirole_study.inspector.side_by_side import inspect_pair

    if options.out is not None and options.out.is_dir():
        raise UserError(
            f"--out {options.out} is a folder. Write the name of a file in it, such as {options.out / 'inspector.html'}."
        )
    is_one = options.out is not None or (options.results_dir / "config.json").exists()
    with user_errors():
        if options.other is not None:
            written = [inspect_pair(options.results_dir, options.other, options.out)]
        else:
            written = [inspect_run(options.results_dir, options.out)] if is_one else inspect_all(options.results_dir)
    sys.stdout.writelines(f"{path}  {path.stat().st_size / 1e6:.2f} MB\n" for path in written)
    return 0


def signal(argv: list[str]) -> int:
    """Measure signal and noise of a run's gradients, role by role, at its checkpoints."""
    parser = _parser(signal)
    parser.add_argument(
        "folder", type=Path, metavar="RUN", help="a run's folder, which receives gradient_signal.parquet"
    )
    parser.add_argument("--at", type=int, nargs="+", metavar="ITERATION", help="evaluated iterations (default: all)")
    batches = "independent batches of episodes per checkpoint, each as large as an iteration's (default: 16)"
    parser.add_argument("--batches", type=int, default=16, help=batches)
    parser.add_argument("--model", help=LOCAL_MODEL)
    options = parser.parse_args(argv)
    if options.batches < 2:
        parser.error(f"--batches must be 2 or more, got {options.batches}: noise is what differs between batches.")
    _check_run(options.folder)
    from multirole_study.measurements.signal_of_run import measure_run

    with user_errors():
        sys.stdout.write(f"{measure_run(options.folder, options.at, options.batches, options.model)} is written\n")
    return 0


def credit(argv: list[str]) -> int:
    """Measure bias and variance of credit estimators at a run's checkpoints, against the exact effect of each turn."""
    parser = _parser(credit)
    parser.add_argument(
        "folder", type=Path, metavar="RUN", help="a run's folder, which receives credit_accuracy.parquet"
    )
    parser.add_argument("--at", type=int, nargs="+", metavar="ITERATION", help="evaluated iterations (default: all)")
    problems = "number of training problems; the turns of one episode of each are measured (default: 128)"
    parser.add_argument("--problems", type=int, default=128, help=problems)
    parser.add_argument("--model", help=LOCAL_MODEL)
    options = parser.parse_args(argv)
    _check_run(options.folder)
    from multirole_study.measurements.credit_of_run import measure_run

    with user_errors():
        path = measure_run(options.folder, options.at, options.problems, model=options.model)
        sys.stdout.write(f"{path} is written\n")
    return 0


def pack(argv: list[str]) -> int:
    """Pack finished runs into one file per table."""
    parser = _parser(pack)
    parser.add_argument("folder", type=Path, help="<results_dir>/<scale>, which receives the packed tables")
    runs_help = "folder that contains the runs (default: the same folder)"
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help=runs_help)
    only = "add what `multirole signal`, `credit` and `role_value` measured, and no runs; without this option only runs are added"
    parser.add_argument("--measurements", action="store_true", help=only)
    options = parser.parse_args(argv)
    folder = options.folder
    from multirole_study.paper import pack as packing
    from multirole_study.paper.declarations import copy_declaration, differing_records
    from multirole_study.paper.grid import detailed

    if options.measurements:
        written = packing.add_measurements(folder, options.runs or folder)
        if not written:
            raise UserError(
                f"{options.runs or folder} holds no measurements of `multirole signal`, `credit` or `role_value`."
            )
        sys.stdout.writelines(f"{path}\n" for path in written)
        return 0
    with user_errors():
        if options.runs is not None and not (folder / "grid.json").exists():
            copy_declaration(options.runs, folder)
        added, packed = packing.pack(folder, options.runs, detailed(folder)), packing.index(folder)
    if packed.empty:
        raise UserError(f"{folder} holds no finished run. Give the folder of a scale, such as runs/tiny-r.")
    lines = [*added, f"packed {len(added)} runs and evaluations; {folder} holds {len(packed)}"]
    if measured := [name for name in packing.MEASUREMENTS if any((options.runs or folder).glob(f"*/{name}.parquet"))]:
        lines.append(f"The runs' {', '.join(measured)} are packed with --measurements.")
    for name in differing_records(options.runs, folder) if options.runs is not None else []:
        lines.append(
            f"{folder / name} declares other runs than {options.runs / name}, and tables are made by the former. If the study has changed, copy it there."
        )
    sys.stdout.write("\n".join([*lines, ""]))
    return 0


def paper(argv: list[str]) -> int:
    """Compute every table and figure from packed results, by running the notebooks of the folder's grid or study."""
    parser = _parser(paper)
    parser.add_argument("folder", type=Path, help="<results_dir>/<scale>, which holds the grid's grid.json")
    only = "run only these notebooks, such as tables, or only the cells of these tables and figures, such as table_1"
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=only)
    page = "write only the results pages, from existing tables and figures"
    parser.add_argument("--page", action="store_true", help=page)
    options, parameters = _read(parser, argv)
    folder = options.folder
    from multirole_study.paper.grid import Grid
    from multirole_study.paper.notebooks import notebooks_of, run_notebooks
    from multirole_study.paper.pages import publish
    from multirole_study.paper.results import Results

    lines = []
    with user_errors():
        grid = Grid.read(folder)
        if not options.page:
            if "tables" in notebooks_of(folder):  # the others read no run of the grid
                lines += [f"missing: {name}" for name in Results(folder).missing()]
                if unshown := grid.unshown:
                    lines.append(
                        f"no table or figure has {', '.join(unshown)}: they show the paper's workflows and policies. `multirole inspect` shows each run, "
                        "and a study with `arms` compares them (docs/extending.md)"
                    )
            lines += [f"{path} is written" for path in run_notebooks(folder, options.only, parameters)]
            lines.append(f"{folder}/tables and {folder}/figures are written")
        page_of = (
            folder / "page.yaml",
            folder.absolute().parents[1] / "README.md",
        )  # contents; the README has the findings
        if not options.only and all(path.exists() for path in page_of):
            lines.append(f"{publish(folder)} is written")
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


def fetch(argv: list[str]) -> int:
    """Print the folder of a scale's base model; download it if it is neither embedded nor on this machine."""
    from multirole_study.experiment.cell import Cell
    from multirole_study.experiment.presets import MODELS, QWEN, SMOLLM2, TINY

    parser = _parser(fetch)
    parser.add_argument("scale", choices=[TINY, *MODELS], help="the scale")
    wheel = f"use the wheel from the package index without asking the Hub; {SMOLLM2} only"
    parser.add_argument("--wheel", action="store_true", help=wheel)
    parser.add_argument(
        "--gguf", type=Path, metavar="FILE", help=f"a GGUF file that stands in for the Hub's model; {QWEN} only"
    )
    options = parser.parse_args(argv)
    if options.wheel and options.scale != SMOLLM2:
        parser.error(f"--wheel is for {SMOLLM2}; the base of {options.scale} is on the Hub only.")
    from multirole_study.experiment import smollm2
    from multirole_study.experiment.base_models import convert_pinned, locate

    with user_errors():
        if options.gguf is not None:
            folder = convert_pinned(options.scale, options.gguf)
        else:
            folder = smollm2.fetch() if options.wheel else locate(Cell("single", "sp", scale=options.scale))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    sys.stdout.write(f"  {options.scale}     {folder} ({size / 1e6:.0f} MB)\n")
    return 0


GROUPS: dict[str, tuple[Callable[[list[str]], int], ...]] = {
    "prepare and train": (plan, doctor, fetch, train, evaluate),
    "look into a run": (inspect, role_value, signal, credit),
    "serve models": (serve, vllm_server),
    "build results of many runs": (pack, paper),
}
"""Heading of `multirole --help` -> its commands."""
COMMANDS = {command.__name__: command for group in GROUPS.values() for command in group}


def main() -> int:
    """Run the command named by the first argument."""
    lines: list[str] = []
    for heading, group in GROUPS.items():
        lines.append(f"{heading}:")
        lines += [f"  {command.__name__:<12}{str(command.__doc__).splitlines()[0]}" for command in group] + [""]
    parser = ArgumentParser(
        prog="multirole", epilog="\n".join([*lines, "`multirole COMMAND --help` shows its options."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"multirole {__version__}")
    parser.add_argument("command", metavar="COMMAND", nargs="?")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.command is None:
        parser.error(f"write a command, one of {', '.join(COMMANDS)}. `multirole --help` says what each does.")
    if options.command not in COMMANDS:
        known = did_you_mean(options.command, COMMANDS) or f" Commands are {', '.join(COMMANDS)}."
        parser.error(f"there is no command {options.command!r}.{known}")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a minus sign must not end a measurement in a terminal that lacks it
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for package in ("multirole", "multirole_sandbox", "multirole_study"):
        level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
        logging.getLogger(package).setLevel(level)
    try:
        return COMMANDS[options.command](options.arguments)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except ModuleNotFoundError as error:
        advice = install_advice(error, f"`multirole {options.command}`")
        if advice is None:
            raise
        sys.stderr.write(f"{advice}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
