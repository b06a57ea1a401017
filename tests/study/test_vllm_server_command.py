"""Commands that start vLLM's servers: `multirole vllm_server`, the SLURM script of two nodes, and the Docker compose file."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from multirole.engines.vllm_colocate import llm_options
from multirole.engines.vllm_launch import serve_command
from multirole_study import vllm_server as server
from multirole_study.__main__ import COMMANDS
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.hardware import preflight_checks
from multirole_study.experiment.launch import ONE_PROCESS, Launch
from multirole_study.experiment.settings import UserError
from multirole_study.plan import plan

ROOT = Path(__file__).parents[2]
CELL = Cell("voting", "ip", engine="vllm_server")


def flag(command: list[str], name: str) -> str:
    return command[command.index(f"--{name}") + 1]


def test_the_command_has_the_sizes_of_the_cell_and_the_options_that_the_engine_needs():
    command = server.command_of(CELL, ONE_PROCESS, "127.0.0.1", 8001, ["--tensor-parallel-size", "2"])
    assert flag(command, "max-model-len") == str(CELL.max_prompt_tokens + CELL.max_completion_length)
    assert flag(command, "max-loras") == "4" and flag(command, "max-lora-rank") == "16"  # two adapters, old and new
    past = server.command_of(Cell("voting", "generator=a,aggregator=past:a"), ONE_PROCESS, "127.0.0.1", 8001)
    assert flag(past, "max-loras") == "10"  # the trained adapter and four copies, old and new
    assert flag(command, "dtype") == "float32" and flag(command, "port") == "8001"
    assert flag(command, "logprobs-mode") == "processed_logprobs" and flag(command, "generation-config") == "vllm"
    assert "--enable-lora" in command and command[-2:] == ["--tensor-parallel-size", "2"]
    assert not {"--disable-log-stats", "--enable-sleep-mode"} & set(command)


def test_the_server_is_started_with_the_options_of_the_engine_in_process():
    options = llm_options(3, 16, 512, torch.float32)
    command = serve_command("m", 2, 16, 512, torch.float32, "127.0.0.1", 8000)
    for name, value in options.items():
        if name != "disable_log_stats":
            word = f"--{name.replace('_', '-')}"
            assert (
                word in command
                if value is True
                else word.replace("--", "--no-", 1) in command
                if value is False
                else flag(command, word[2:]) == str(value)
            )


def test_printing_starts_nothing_and_shows_no_key(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    words = [
        "-p",
        "workflow",
        "voting",
        "-p",
        "policy",
        "sp",
        "--host",
        "0.0.0.0",
        "--print",
        "--",
        "--max-num-seqs",
        "8",
    ]
    assert COMMANDS["vllm_server"](words) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("VLLM_ALLOW_RUNTIME_LORA_UPDATING=True") and printed.endswith("--max-num-seqs 8\n")
    assert "sesame" not in printed and "--max-loras 2" in printed


@pytest.mark.parametrize(
    ("words", "share"),
    [
        ([], 0.9),
        (["-p", "vllm_gpu_memory_utilization", "0.6"], 0.6),
        (["-p", "vllm_gpu_memory_utilization", "0.5"], 0.5),
    ],
)
def test_the_server_takes_the_share_of_memory_that_is_asked_for(monkeypatch, words, share):
    """0.6 is the default of the engine in process, and 0.9 that of a server, which has the GPU to itself."""
    asked = []
    monkeypatch.setattr(server, "command_of", lambda *arguments: asked.append(arguments[-1]) or ["vllm"])
    assert COMMANDS["vllm_server"](["-p", "workflow", "voting", "-p", "policy", "sp", "--print", *words]) == 0
    assert asked == [share]
    with pytest.raises(UserError, match="--port must be from 1 to 65535, got 99999"):
        COMMANDS["vllm_server"](["-p", "workflow", "voting", "-p", "policy", "sp", "--print", "--port", "99999"])


def test_an_address_for_other_machines_needs_a_key(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ValueError, match=r"--host 0\.0\.0\.0 can be reached from other machines.*VLLM_API_KEY"):
        server.command_of(CELL, ONE_PROCESS, "0.0.0.0", 8000)


def test_the_preflight_asks_for_an_address_and_the_plan_has_no_engine():
    (check,) = [check for check in preflight_checks(CELL) if check.name == "vLLM servers"]
    assert "vllm_server_base_url" in check.advice
    (check,) = [
        check
        for check in preflight_checks(CELL, Launch(vllm_server_base_url="http://127.0.0.1:9", vllm_server_timeout=0.1))
        if check.name == "vLLM servers"
    ]
    assert "http://127.0.0.1:9 does not answer" in check.advice
    assert not [part for part in plan(CELL).parts if "engine" in part.name or "vLLM" in part.name]
    paper = Cell("voting", "ip", scale="1.7b", engine="vllm_server")
    assert not [
        part for part in plan(paper, ONE_PROCESS, 80 * 2**30).parts if "engine" in part.name or "vLLM" in part.name
    ]


def pairs(words: list[str]) -> dict[str, str]:
    """The parameters in a command line."""
    return {words[i + 1]: words[i + 2] for i, word in enumerate(words) if word == "-p"}


def test_the_compose_file_serves_and_trains_the_same_cell():
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    serving, training = (shlex.split(services[name]["command"]) for name in ("server", "trainer"))
    assert serving[:2] == ["multirole", "vllm_server"] and training[:2] == ["multirole", "train"]
    cell, launch = Cell.from_parameters(pairs(training))
    assert pairs(serving).items() <= pairs(training).items() and cell.engine == "vllm_server"
    assert launch.vllm_server_base_url == f"http://{services['server']['hostname']}:{flag(serving, 'port')}"
    assert launch.vllm_server_adapter_dir.startswith("/results/")
    assert services["server"]["volumes"] == services["trainer"]["volumes"]
    assert "VLLM_API_KEY" in services["server"]["environment"]


STANDINS = {
    "scontrol": 'if [ "$1" = show ]; then printf "node1\\nnode2\\n"; else echo "scontrol $*" >> "$NOTES"; fi\n',
    "srun": """while [[ $1 == --* ]]; do options+=" $1"; [[ $1 == --nodelist=* ]] && export NODE=${1#*=}; shift; done
echo "srun$options" >> "$NOTES"; exec "$@"
""",
    "multirole": """echo "$NODE ${CUDA_VISIBLE_DEVICES:-} ${#VLLM_API_KEY} $*" >> "$NOTES"
if [ "$1" = vllm_server ]; then exec -a "server of $VENV" sleep 60; fi
sleep 1; exit "$CODE"
""",
}


def test_the_batch_scripts_of_the_docs_pass_their_cores_on():
    text = (ROOT / "docker" / "README.md").read_text(encoding="utf-8")
    started = re.findall(r"^srun .*", text, re.MULTILINE)
    assert len(started) == 2 and all('--cpus-per-task="$SLURM_CPUS_PER_TASK" ' in line for line in started)


def run_on_two_nodes(tmp_path: Path, standins: dict[str, str], words: list[str], **more: str) -> int:
    """Run the SLURM script with stand-ins for the programs that it calls, and return its exit code; $NOTES is `tmp_path/notes`."""
    (tmp_path / "bin").mkdir()
    for name, text in standins.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "VENV": str(tmp_path), "NOTES": str(tmp_path / "notes"),
        "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_GPUS_PER_NODE": "h100:2", "SLURM_JOB_ID": "7", "RESULTS_DIR": str(tmp_path),
        "SLURM_CPUS_PER_TASK": "64",
    } | more  # fmt: skip
    command = ["bash", str(ROOT / "docker" / "two_nodes.slurm"), *words]
    return subprocess.run(command, env=environment, cwd=tmp_path, check=False).returncode


@pytest.mark.parametrize("code", [0, 75])
def test_the_slurm_script_serves_on_the_first_node_and_trains_on_the_second(tmp_path, code):
    words = ["-p", "workflow", "voting", "-p", "scale", "1.7b"]
    assert run_on_two_nodes(tmp_path, STANDINS, words, CODE=str(code)) == code
    lines = (tmp_path / "notes").read_text().splitlines()
    steps = sorted(
        line for line in lines if line.startswith("srun ")
    )  # srun has no cores of sbatch's, since SLURM 22.05
    assert steps == [f"srun --nodes=1 --ntasks=1 --cpus-per-task=64 --nodelist=node{node}" for node in (1, 2)]
    served = sorted(line for line in lines if line.startswith("node1 "))
    assert [re.sub(r" -p.*--host", " ... --host", line) for line in served] == [
        f"node1 {gpu} 32 vllm_server ... --host 0.0.0.0 --port {8000 + gpu}" for gpu in (0, 1)
    ]
    (trained,) = [line for line in lines if " train " in line]
    cell, launch = Cell.from_parameters(pairs(shlex.split(trained)))
    assert trained.startswith("node2  32 train") and (cell.scale, cell.engine) == ("1.7b", "vllm_server")
    assert launch.vllm_server_base_url == "http://node1:8000,http://node1:8001" and launch.vllm_server_evict
    assert ("scontrol requeue 7" in lines) == (code == 75)
    for _ in range(300):  # a busy machine takes a while to end what was killed
        left = subprocess.run(["pgrep", "-f", f"server of {tmp_path}"], capture_output=True, text=True, check=False)
        if not left.stdout:
            break
        time.sleep(0.1)
    assert not left.stdout


REPLACED = {
    "multirole": """if [ "$1" = vllm_server ]; then
  exec "$PYTHON" -m multirole.engines.process_group bash -c '
    if [[ -e $NOTES.first ]]; then kill -0 "$(< $NOTES.first)" && echo "still there" >> $NOTES; touch $NOTES.second; sleep 60; fi
    sleep 1000 & echo $! > $NOTES.new; mv $NOTES.new $NOTES.first; echo $$ > $NOTES.server; wait'
fi
until [[ -e $NOTES.server ]]; do sleep 0.1; done
kill -9 "$(< $NOTES.server)"
until [[ -e $NOTES.second ]]; do sleep 0.1; done
"""
}


def test_the_slurm_script_replaces_a_killed_server_when_its_engine_is_gone(tmp_path):
    notes = tmp_path / "notes"
    done = run_on_two_nodes(tmp_path, STANDINS | REPLACED, [], PYTHON=sys.executable, SLURM_GPUS_PER_NODE="1")
    assert done == 0 and "still there" not in notes.read_text()
    assert not psutil.pid_exists(int(Path(f"{notes}.first").read_text()))
