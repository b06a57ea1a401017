"""Gives `multirole train` and `evaluate` some hundred bad inputs in turn and counts what becomes of them.

    python benchmarks/bad_inputs.py

`tests/bad_inputs.py` has the inputs; `tests/test_bad_input_is_refused.py` tries the same. Writes results/bench/bad_inputs.json
and its table in docs/reliability.md.
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import bad_inputs
from bad_inputs import END, ENDS, START, table

from multirole_study.experiment.storage import write_text

ROOT = Path(__file__).parents[1]


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as scratch, bad_inputs.on_a_bare_machine(Path(scratch, "cache")):
        classes = bad_inputs.CLASSES | {"records of runs": bad_inputs.records(bad_inputs.whole_run(Path(scratch)))}
        for name, cases in classes.items():
            other = bad_inputs.problems(cases, Path(scratch, name))
            counts = Counter(case.outcome for one, case in cases.items() if one not in other)
            found[name] = {end: counts[end] for end in ENDS} | {"tried": len(cases), "otherwise": len(other)}
            print(name, found[name], *map(": ".join, other.items()), sep="\n    ", flush=True)
    write_text(ROOT / "results" / "bench" / "bad_inputs.json", json.dumps(found, indent=2) + "\n")
    page = ROOT / "docs" / "reliability.md"
    before, rest = page.read_text().split(START)
    write_text(page, before + START + table(found) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
