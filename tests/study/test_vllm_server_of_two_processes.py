"""Two processes of a run share vLLM's servers: the first publishes, both sample, and both stop if publishing fails or the servers are lost."""

from pathlib import Path

import processes
import pytest
import torch
from fake_vllm_server import BASE, FakeServer, running_servers
from safetensors.torch import load_file

from multirole_study import __main__ as command_line

CELL = {
    "workflow": "voting", "policy": "ip", "max_steps": 2, "n_problems": 4, "num_generations": 2, "n_validation": 4, "n_train": 8,
    "eval_steps": 2, "warmup_steps": 0, "max_completion_length": 8, "engine": "vllm_server", "vllm_server_model": BASE,
}  # fmt: skip


@pytest.fixture
def servers():
    with running_servers(2) as servers:
        yield servers


def words(servers: list[FakeServer], results: Path, **more: object) -> list[str]:
    parameters = CELL | {
        "vllm_server_base_url": ",".join(server.url for server in servers),
        "results_dir": str(results),
    } | more  # fmt: skip
    return [word for name, value in parameters.items() for word in ("-p", name, str(value))]


@pytest.mark.slow
def test_two_processes_publish_once_and_train_what_one_trains(servers, tmp_path):
    seeds, adapters = [], []
    for n in (1, 2):
        codes = processes.run_together(n, tmp_path / f"log{n}", command_line.train, words(servers, tmp_path / str(n)))
        assert set(codes) == {0}, (tmp_path / f"log{n}.0").read_text()[-3000:]
        answered = [body for server in servers for body in server.answered]
        seeds.append(sorted(body["seed"] for body in answered))
        assert servers[0].loaded == servers[1].loaded and len(set(servers[0].loaded)) == len(servers[0].loaded) > 4
        assert not servers[0].adapters and not servers[1].adapters
        assert all(server.answered for server in servers)
        adapters.append({path.parent.name: load_file(path) for path in (tmp_path / str(n)).glob("tiny-r/*/adapters/step_00002/*/*.safetensors")})  # fmt: skip
        for server in servers:
            server.answered.clear()
            server.loaded.clear()
    assert seeds[0] == seeds[1]  # each turn was answered once
    assert adapters[0].keys() == adapters[1].keys() == {"generator", "aggregator"}
    for name, tensors in adapters[0].items():
        for key, tensor in tensors.items():
            assert (tensor - adapters[1][name][key]).abs().max().item() < 1e-4


@pytest.mark.slow
def test_both_processes_stop_if_the_first_cannot_publish(servers, tmp_path):
    servers[1].max_rank = 8
    codes = processes.run_together(2, tmp_path / "log", command_line.train, words(servers, tmp_path / "runs"))
    assert 0 not in codes
    assert "LoRA rank 16 is greater than max_lora_rank 8" in (tmp_path / "log.0").read_text()


@pytest.mark.slow
def test_two_processes_that_play_ahead_lose_no_iteration_with_their_server(servers, tmp_path):
    """It dies while the third iteration is played, which is during the update of the second. A run on a server that stays ends with the same weights."""
    server = servers[0]
    more = {"max_steps": 4, "eval_steps": 4, "save_steps": 100, "max_staleness": 1, "vllm_server_timeout": 0.5}
    n_calls = 4 * 4 + 2 * (4 * 2 * 4) + 8  # of the validation, two iterations, and a part of the third
    adapters = []
    for kill_after in (None, n_calls):
        command = words([server], tmp_path / str(kill_after), **more)
        server.kill_after = kill_after
        server.answered.clear()
        codes = processes.run_together(2, tmp_path / "log", command_line.train, command)
        if kill_after is not None:
            assert 0 not in codes and "vllm_server_timeout" in (tmp_path / "log.0").read_text()
            server.start()
            codes = processes.run_together(2, tmp_path / "log", command_line.train, command)
            printed = (tmp_path / "log.0").read_text()
            assert "continues from checkpoint-2" in printed, printed
        assert codes == [0, 0], (tmp_path / "log.0").read_text()[-3000:]
        adapters.append({path.parent.name: load_file(path) for path in (tmp_path / str(kill_after)).glob("tiny-r/*/adapters/step_00004/*/*.safetensors")})  # fmt: skip
    assert adapters[0].keys() == adapters[1].keys() == {"generator", "aggregator"}
    for name, tensors in adapters[0].items():
        assert all(torch.equal(tensor, adapters[1][name][key]) for key, tensor in tensors.items())
