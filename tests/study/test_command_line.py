"""What the command line says to someone who writes a command wrongly, or whose terminal lacks a character."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from multirole_study import __main__ as command_line

ROOT = Path(__file__).parents[2]


def said(monkeypatch, capsys, *words: str) -> str:
    """Run a command that is refused, and return what it printed to stderr after its usage."""
    monkeypatch.setattr(sys, "argv", ["multirole", *words])
    try:
        code = command_line.main()
    except SystemExit as error:
        code = error.code
    assert code == 2
    return capsys.readouterr().err.split("error: ")[-1].strip()


def test_no_command_is_answered_with_the_commands(monkeypatch, capsys):
    assert said(monkeypatch, capsys).startswith("write a command, one of plan, doctor, fetch, train, evaluate")


@pytest.mark.parametrize(
    "words", [["-p", "seed=1"], ["-p", "seed=1", "-p", "task", "math"], ["seed", "1"], ["--seed", "1"]]
)
def test_a_parameter_that_is_written_wrongly_is_answered_with_how_it_is_written(monkeypatch, capsys, words):
    for command in ("train", "evaluate", "plan", "doctor", "role_value"):
        assert said(monkeypatch, capsys, command, *words).endswith(
            "Write each parameter as -p NAME VALUE, such as -p seed 1."
        )
    assert "-p NAME" not in said(monkeypatch, capsys, "inspect", "runs", "extra")  # it has no parameters


def test_a_missing_file_of_parameters_is_named_with_the_folder(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = said(monkeypatch, capsys, "train", "--parameters", "no-such.json")
    where = f"got 'no-such.json', which is looked for in {tmp_path}: No such file or directory."
    assert text == f"--parameters must name a JSON file, {where}"


def test_a_character_that_the_terminal_lacks_is_escaped_and_nothing_is_lost(monkeypatch):
    def measure(argv: list[str]) -> int:
        sys.stdout.write("−2.5 points\n")
        return 0

    monkeypatch.setitem(command_line.COMMANDS, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["multirole", "measure"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    assert command_line.main() == 0
    sys.stdout.flush()
    assert sys.stdout.buffer.getvalue() == b"\\u22122.5 points\n"


def test_a_scale_without_a_gguf_file_of_its_own_is_answered_with_what_to_use(monkeypatch, capsys):
    text = said(monkeypatch, capsys, "fetch", "tiny-r", "--gguf", "some.gguf")
    assert text.endswith("has no GGUF file that stands in for it. Use `-p model FILE` instead.")


def test_launch_options_of_an_evaluation_are_refused_in_a_sentence(monkeypatch, capsys, tmp_path):
    words = ("-p", "adapters", "base", "-p", "vllm_server_evict", "true", "-p", "results_dir", str(tmp_path))
    assert said(monkeypatch, capsys, "evaluate", *words).startswith(
        "`vllm_server_evict=True` is for rollouts on vLLM's"
    )


@pytest.mark.parametrize(
    ("variables", "offline"),
    [
        ([], "1"),
        (["SCALE=tiny-r"], "1"),
        (["ARGS=-p learning_rate 1e-3"], "1"),
        (["SCALE=smollm2"], "0"),
        (["ARGS=-p scale smollm2"], "0"),
        (["ARGS=-p model owner/name"], "0"),
    ],
)
def test_make_is_online_if_the_base_may_be_on_the_hub(variables, offline, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    command = ["make", "--eval=show:;@echo $$HF_HUB_OFFLINE", "show", *variables]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == f"{offline}\n"
