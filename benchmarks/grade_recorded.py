"""Grade the recorded turns of packed runs from before role skill was recorded, and add them to skills.parquet.

python benchmarks/grade_recorded.py results/tiny-s
"""

import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa

from multirole.diagnostics.judging import UNGRADED
from multirole.diagnostics.skills import role_skills
from multirole.experiment.presets import TASKS
from multirole.paper import pack
from multirole.paper.results import Results


def grade_recorded(folder: Path) -> int:
    """Grade the recorded turns of packed runs without skills, write skills.parquet anew, and return how many runs were added."""
    results, columns = Results(folder), ["run", "step", "problem", "correct", "role", "slot", "round", "outcome",
                                         "completion_tokens", "text"]  # fmt: skip
    done, turns = pack.read(folder, "skills"), pack.read(folder, "turns", columns=columns)
    turns = turns[~turns["run"].isin(done["run"].unique())]
    turns["turn_correct"] = False
    for task in TASKS:
        grader = results.grid.cell("single", "sp", task, results.grid.seeds[0]).make_task()
        problems = {problem.id: problem for problem in grader.problems("validation", 512)}
        mine = turns["problem"].isin(list(problems)) & ~turns["role"].isin(UNGRADED)
        unique = turns[mine].drop_duplicates(["problem", "text"])[["problem", "text"]]
        rewards = grader.score([problems[name] for name in unique["problem"]], list(unique["text"]))
        right = pd.Series([reward.is_correct for reward in rewards], pd.MultiIndex.from_frame(unique))
        asked = pd.MultiIndex.from_frame(turns.loc[mine, ["problem", "text"]])
        turns.loc[mine, "turn_correct"] = right.reindex(asked).to_numpy()
    rows = [
        {"run": str(run), "step": step} | row
        for (run, step), part in turns.groupby(["run", "step"], observed=True)
        for row in role_skills(part)
    ]
    if rows:
        table = pd.concat([done.astype({"run": str}), pd.DataFrame(rows)]).sort_values(["run", "step"], kind="stable")
        pack._write(folder / "skills.parquet", [pack._as_packed(pa.Table.from_pandas(table, preserve_index=False))])
    return turns["run"].nunique()


if __name__ == "__main__":
    print(grade_recorded(Path(sys.argv[1])), "runs added to skills.parquet")
