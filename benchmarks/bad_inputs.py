"""Give `multirole train` and `evaluate` several hundred bad inputs, one by one, and count the outcomes.

    python benchmarks/bad_inputs.py

`tests/support/bad_inputs.py` has the inputs; `tests/study/test_bad_input_is_refused.py` tries the same. Writes results/bench/bad_inputs.json
and its table in docs/reliability.md.
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "study")]  # of which test_checkpoints has some inputs
import bad_inputs
from bad_inputs import END, ENDS, START, table

from multirole_study.experiment.storage import write_text

ROOT = Path(__file__).parents[1]


def main() -> None:
    results = {}
    with tempfile.TemporaryDirectory() as scratch, bad_inputs.on_a_bare_machine(Path(scratch, "cache")):
        classes = bad_inputs.CLASSES | {"records of runs": bad_inputs.records(bad_inputs.whole_run(Path(scratch)))}
        for name, cases in classes.items():
            unexpected = bad_inputs.problems(cases, Path(scratch, name))
            counts = Counter(case.outcome for name_of_case, case in cases.items() if name_of_case not in unexpected)
            results[name] = {end: counts[end] for end in ENDS} | {"tried": len(cases), "otherwise": len(unexpected)}
            print(name, results[name], *map(": ".join, unexpected.items()), sep="\n    ", flush=True)
    write_text(ROOT / "results" / "bench" / "bad_inputs.json", json.dumps(results, indent=2) + "\n")
    page = ROOT / "docs" / "reliability.md"
    before, rest = page.read_text().split(START)
    write_text(page, before + START + table(results) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
