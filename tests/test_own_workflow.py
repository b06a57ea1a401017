"""The README's own-workflow example, as printed there, trains: a workflow is registered by passing the object."""

import re
from pathlib import Path

from multirole.experiment.run import run_cell
from multirole.inspector.report import load

README = Path(__file__).parents[1] / "README.md"


def example():
    """The README's Python block that defines a workflow, up to the line that trains it."""
    block = next(b for b in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if "class Debate" in b)
    definition = block.split("run_cell(")[0]
    assert len(definition.splitlines()) <= 40
    scope = {}
    exec(compile(definition, "README.md", "exec"), scope)  # noqa: S102 (our own README)
    return scope


def test_the_debate_of_the_readme_trains(tmp_path):
    scope = example()
    cell = scope["Cell"](
        scope["Debate"](), "debater=a,judge=b", "math", iterations=3, n_problems=4, n_validation=16, eval_every=3,
        warmup_iterations=1,
    )  # fmt: skip
    folder = run_cell(cell, tmp_path)
    roles = load(folder, "roles")
    assert set(roles["role"]) == {"debater", "judge"}
    assert set(roles[roles["role"] == "debater"]["rows"]) == {4 * 8 * 4}  # two debaters, two rounds
    ledger = load(folder, "ledger")
    assert (ledger[ledger["iteration"] == 1]["adapter"].value_counts()).to_dict() == {"adapter_a": 4, "adapter_b": 1}
