"""A server that is lost and does not come back ends the run with two sentences. What was trained is saved, and the same command finishes it."""

import pandas as pd
import pytest
from fake_vllm_server import BASE, running_servers

from multirole_study import __main__ as command_line

CELL = {
    "workflow": "voting", "policy": "ip", "max_steps": 2, "n_problems": 2, "num_generations": 2, "n_validation": 2, "n_train": 8,
    "eval_steps": 2, "save_steps": 100, "warmup_steps": 0, "max_completion_length": 8, "engine": "vllm_server",
    "vllm_server_model": BASE, "vllm_server_timeout": 0.3,
}  # fmt: skip
IN_THE_SECOND_ROLLOUT = 2 * 4 + 4 * 4 + 5
"""Number of calls before the server is lost: those of the validation and the first rollout, and a few more."""
IN_THE_LAST_VALIDATION = 2 * 4 + 2 * 4 * 4 + 3


@pytest.mark.parametrize(
    ("max_staleness", "kill_after", "trained"),
    [
        pytest.param(0, IN_THE_SECOND_ROLLOUT, 1, marks=pytest.mark.slow),
        (1, IN_THE_SECOND_ROLLOUT, 1),
        pytest.param(0, IN_THE_LAST_VALIDATION, 2, marks=pytest.mark.slow),
    ],
)
def test_a_lost_server_ends_a_run_that_the_same_command_finishes(
    tmp_path, capsys, monkeypatch, max_staleness, kill_after, trained
):
    with running_servers(1) as (server,):
        server.kill_after = kill_after
        parameters = CELL | {
            "vllm_server_base_url": server.url, "results_dir": str(tmp_path), "max_staleness": max_staleness,
        }  # fmt: skip
        words = [word for name, value in parameters.items() for word in ("-p", name, str(value))]
        monkeypatch.setattr("sys.argv", ["multirole", "train", *words])
        assert command_line.main() == 2
        (said,) = [
            line for line in capsys.readouterr().err.splitlines() if "vllm_server_timeout" in line and "Waited" in line
        ]
        assert said.startswith(f"The vLLM server at {server.url} does not answer (")
        assert said.endswith("The run is not finished. The same command continues from its newest checkpoint.")

        server.start()
        assert command_line.main() == 0
        assert f"continues from checkpoint-{trained}" in capsys.readouterr().out
    (evaluations,) = tmp_path.glob("tiny-r/*/eval.parquet")
    assert pd.read_parquet(evaluations)["step"].tolist() == [0, 0, 2, 2]
