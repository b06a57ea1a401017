"""`multirole doctor`: examine a cell before it costs a GPU day.

multirole doctor -p workflow voting -p policy ip -p task math -p scale tiny-s
"""

import argparse
import sys
import tempfile
import time

from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.doctor import Finding, examine
from multirole.doctor.bench import N_EPISODES, N_PROBLEMS, N_TOKENS
from multirole.experiment.cell import Cell
from multirole.experiment.launch import ONE_PROCESS, Launch, add_parameters, read_parameters
from multirole.experiment.run import load_model, load_problems, make_engine, preflight

DEFAULT = {"workflow": "voting", "policy": "ip", "task": "math", "scale": "tiny-s"}


def run_doctor(cell: Cell, launch: Launch = ONE_PROCESS, trainer: MultiRoleGRPOTrainer | None = None) -> list[Finding]:
    """Examine the trainer that is about to train a cell, or one built for it."""
    if trainer is not None:
        return examine(trainer)
    preflight(cell, launch)
    model, tokenizer = load_model(cell)
    engine = make_engine(cell, tokenizer, launch)
    try:
        problems, validation, _ = load_problems(cell, tokenizer)
        with tempfile.TemporaryDirectory() as folder:
            built = MultiRoleGRPOTrainer(cell, model, tokenizer, engine, problems, validation, folder, launch=launch)
            return examine(built)
    finally:
        engine.close()


def main(argv: list[str]) -> int:
    """Check that a cell trains what it says: 0 if every check holds, 1 if one fails, 2 for a cell that cannot run."""
    parser = argparse.ArgumentParser(prog="multirole doctor", description=main.__doc__)
    add_parameters(parser)
    given, started = read_parameters(parser.parse_args(argv)), time.process_time()
    try:
        cell, launch = Cell.from_parameters(DEFAULT | given)
        assumed = ", ".join(f"{name}={value}" for name, value in DEFAULT.items() if name not in given)
        sys.stdout.write(
            f"{cell.id} at {cell.scale}{f' ({assumed} by default)' if assumed else ''}, on at most {N_PROBLEMS} problems x "
            f"{N_EPISODES} episodes, replies of at most {N_TOKENS} tokens\n"
        )
        findings = run_doctor(cell, launch)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for finding in findings:
        sys.stdout.write(f"{finding.line()}\n")
    n_good, seconds = sum(finding.holds for finding in findings), time.process_time() - started
    sys.stdout.write(f"{n_good} of {len(findings)} checks hold ({seconds:.0f} s of CPU after the imports)\n")
    return 0 if n_good == len(findings) else 1
