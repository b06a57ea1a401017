"""Bad input is refused before any compute, in a sentence that names the parameter and what was given."""

import os
import re

import pytest

from multirole.experiment.cell import Cell
from multirole.experiment.evaluation import evaluation_parameters
from multirole.experiment.folders import open_folder
from multirole.experiment.launch import Launch
from multirole.experiment.settings import Refused

CELLS = [
    ({"workflow": "votin"}, "`workflow` must be .*, got 'votin'. Did you mean 'voting'"),
    ({"workflow": "no-such.py:Debate"}, "`workflow` .*'no-such.py:Debate'"),
    ({"workflow": 3}, "3 must have a coroutine method `async def run"),
    ({"workflow": object}, "object.* must have a coroutine method `async def run"),
    ({"policy": "spp"}, "`policy` must be .*'spp'"),
    ({"policy": ""}, "`policy` must be .*''"),
    ({"policy": "generator=a"}, r"\['aggregator'\]"),
    ({"policy": "generator=a,aggregator=b,judge=c"}, r"\['judge'\]"),
    ({"policy": "generator=a,aggregator=b,generator=c"}, "twice"),
    ({"policy": "generator=a.b,aggregator=c"}, "'a.b'"),
    ({"task": "maths"}, "`task` must be .*'maths'. Did you mean 'math'"),
    ({"scale": "tiny"}, "`scale` must be 'tiny-s', .*, got 'tiny'. Did you mean 'tiny-s'"),
    ({"scale": "8b"}, "`scale` must be .*, got '8b'"),
    ({"preset": "papre"}, "`preset` must be 'paper' or 'released_code', got 'papre'. Did you mean 'paper'"),
    ({"seed": "x"}, "`seed` must be a valid integer, got 'x'"),
    ({"seed": 1.5}, "`seed` must be a valid integer, got 1.5"),
    ({"seed": -1}, "`seed` must be greater than or equal to 0, got -1"),
    ({"seed": 2**40}, "`seed` must be less than or equal to 4294967295, got 1099511627776"),
    ({"iterations": 0}, "`iterations` must be greater than or equal to 1, got 0"),
    ({"iterations": True}, "`iterations` must be a valid integer, got True"),
    ({"n_voters": 0}, "`n_voters` must be greater than or equal to 1, got 0"),
    ({"n_episodes": 1}, "`n_episodes` must be greater than or equal to 2, got 1"),
    ({"learning_rate": "fast"}, "`learning_rate` must be a valid number, got 'fast'"),
    ({"learning_rate": float("nan")}, "`learning_rate` must be a finite number, got nan"),
    ({"max_grad_norm": 0.0}, "`max_grad_norm` must be greater than or equal to 0.000001, got 0.0"),
    ({"dual_clip": 0.5}, "`dual_clip` must be greater than or equal to 1, got 0.5"),
    ({"kl_anchor": -1}, "`kl_anchor` must be a number >= 0, or a dict .*, got -1"),
    ({"kl_anchor": {"judge": 1.0}}, r"`kl_anchor` must be .*\(generator, aggregator\), got {'judge': 1.0}"),
    ({"kl_anchor": "strong"}, "`kl_anchor` must be a valid dictionary, got 'strong'"),
    ({"coherence_penalty": 1.5}, "`coherence_penalty` must be less than or equal to 1, got 1.5"),
    ({"balance_roles": -1.0}, "`balance_roles` must be greater than or equal to 0, got -1.0"),
    ({"engine": "cuda"}, "`engine` must be 'auto', 'transformers' or 'vllm', got 'cuda'"),
    ({"code_reward": "some"}, "`code_reward` must be 'fraction' or 'all_pass', got 'some'"),
    ({"dtype": "float16"}, "`dtype` must be 'float32' or 'bfloat16', got 'float16'"),
    ({"allow_unsafe_code": "yes"}, "`allow_unsafe_code` must be a valid boolean, got 'yes'"),
    ({"n_votters": 3}, "`n_votters` is not a known parameter. Did you mean 'n_voters'"),
    ({"n_train": 8}, "`n_train` must be at least `n_problems` (.*), got 8"),
    ({"warmup_iterations": 61}, "`warmup_iterations` must be at most the 60 ticks of `iterations`, got 61"),
    ({"learning_rate": 1e300}, "`learning_rate` must be less than or equal to 10, got 1e\\+300"),
    ({"iterations": 10**9}, "`iterations` must be less than or equal to 1000000, got 1000000000"),
    ({"n_episodes": 10**9}, "`n_episodes` must be less than or equal to 10000, got 1000000000"),
    ({"lora_rank": 10**9}, "`lora_rank` must be less than or equal to 512, got 1000000000"),
    ({"updates": "tokens"}, "`updates=.tokens.` needs `step_tokens`"),
    ({"step_tokens": 100}, "`updates=.tokens.` needs `step_tokens`.*got 100"),
    ({"updates": "tokens", "step_tokens": 9, "minibatch_split": "sequential"}, "minibatch_split='even'"),
    ({"model": "a-model"}, "`model` replaces what is embedded at scale='tiny-s', got 'a-model'. Write scale='0.6b'"),
    ({"scale": "0.6b", "model": "no-such-folder"}, "`model` must be an existing local path, got 'no-such-folder'"),
    ({"scale": "0.6b", "data": "no-such-file"}, "`data` must be an existing local path, got 'no-such-file'"),
]
LAUNCHES = [
    ({"n_processes": 0}, "`n_processes` must be greater than or equal to 1, got 0"),
    ({"n_processes": 2.0}, "`n_processes` must be a valid integer, got 2.0"),
    ({"sharding": "zero3"}, "`sharding` must be 'none' or 'fsdp2', got 'zero3'"),
    ({"vllm_memory": 40}, "`vllm_memory` must be less than 1, got 40"),
    ({"vllm_tensor_parallel": "two"}, "`vllm_tensor_parallel` must be a valid integer, got 'two'"),
    ({"results_dir": ""}, "`results_dir` must have at least 1 character, got ''"),
]


@pytest.mark.parametrize(("fields", "message"), CELLS)
def test_cell_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        Cell(**{"workflow": "voting", "policy": "sp"} | fields)


@pytest.mark.parametrize(("fields", "message"), LAUNCHES)
def test_launch_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        Launch(**fields)


def test_every_mistake_is_named_at_once():
    with pytest.raises(ValueError, match=r"`n_problems` .*\n`temperature` .*"):
        Cell("voting", "sp", n_problems=0, temperature=0)


def test_a_misspelt_notebook_parameter_is_refused_and_never_ignored():
    good = {"workflow": "voting", "policy": "sp", "task": "math", "iterations": None, "results_dir": "runs"}
    cell, launch = Cell.from_parameters(good | {"_dh": ["x"], "In": ["a"], "exit": object()})
    assert cell.id == "voting-sp-math-s0" and launch == Launch(results_dir="runs")
    with pytest.raises(ValueError, match="`worklow` is not a known parameter. Did you mean 'workflow'"):
        Cell.from_parameters(good | {"worklow": "single"})
    for name, value in (("seeed", [1, 2]), ("iteratons", None), ("seed", [1]), ("seed", ""), ("task", ""), ("_seed", 1)):
        with pytest.raises(Refused, match=name):
            Cell.from_parameters(good | {name: value})
    assert Cell.from_parameters({}) == (Cell("voting", "sp"), Launch())  # Run All


def test_capitals_do_not_matter_where_they_cannot():
    cell = Cell("Voting", "IP", "MATH", "Tiny-S", preset="Paper", lr_schedule="Constant")
    assert cell.id == Cell("voting", "ip", lr_schedule="constant").id and cell.workflow == "voting"


def test_a_presets_warm_up_may_be_longer_than_a_trial():
    cell = Cell("voting", "sp", iterations=4)
    assert cell.warmup_iterations == 5 and Cell(**cell.parameters()) == cell  # as another process makes it


def test_a_refusal_is_one_sentence_in_a_notebook():
    with pytest.raises(Refused) as error:
        Cell.from_parameters({"iteration": 3})
    sentence = "`iteration` is not a known parameter. Did you mean 'iterations'?"
    assert error.value._render_traceback_() == [str(error.value)] == [sentence]


def test_a_folder_of_another_configuration_is_refused(tmp_path):
    open_folder(Cell("voting", "sp"), tmp_path)
    open_folder(Cell("voting", "sp"), tmp_path)
    config = tmp_path / "tiny-s" / "voting-sp-math-s0" / "config.json"
    config.write_text(config.read_text().replace("0.002", "0.004"))
    with pytest.raises(ValueError, match="another configuration"):
        open_folder(Cell("voting", "sp"), tmp_path)


def test_an_unwritable_results_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="`results_dir` must be"):
        open_folder(Cell("voting", "sp"), tmp_path / "file")
    if os.geteuid() != 0:  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(ValueError, match="`results_dir` must be"):
            open_folder(Cell("voting", "sp"), tmp_path / "locked")


def test_ids_tell_every_difference_apart_and_are_short():
    cells = [
        Cell("voting", "sp"),
        Cell("voting", "ip"),
        Cell("voting", "generator=a,aggregator=b"),
        Cell("voting", "generator=b,aggregator=a"),
        Cell("voting", "sp", seed=1),
        Cell("voting", "sp", "code"),
        Cell("voting", "sp", learning_rate=5e-3),
        Cell("voting", "sp", learning_rate=5e-3, iterations=7),
        Cell("voting", "sp", preset="released_code"),
        Cell("orch_workers", "orchestrator=a,worker=b,synthesizer=a", seed=2**32 - 1, preset="released_code"),
    ]
    assert len({cell.id for cell in cells}) == len(cells) and max(len(cell.id) for cell in cells) <= 60
    assert [cells[0].id, cells[5].id, cells[8].id] == [
        "voting-sp-math-s0", "voting-sp-code-s0", "voting-sp-math-s0-released_code"
    ]  # fmt: skip
    assert re.fullmatch("voting-map-math-s0-[0-9a-f]{8}", cells[2].id)
    assert cells[2].changed() == {"policy": {"generator": "adapter_a", "aggregator": "adapter_b"}}
    assert Cell("voting", {"generator": "shared", "aggregator": "shared"}).id == cells[0].id
    whole, decimal = (Cell("voting", "sp", kl_anchor=one, dual_clip=one, slot_scaling=one) for one in (1, 1.0))
    assert whole.id == decimal.id  # a run is not trained twice for how a number is written


def test_a_hash_is_of_the_settings_that_differ():
    assert Cell("voting", "sp", learning_rate=2e-3, n_problems=16, kl_anchor=0).changed() == {}
    cell = Cell("voting", "sp", learning_rate=5e-3, updates="one")
    assert cell.changed() == {"learning_rate": 5e-3, "updates": "one"}
    assert cell.sibling("single", "sp") == Cell("single", "sp", learning_rate=5e-3, updates="one")
    assert cell.replace(updates="per_batch").changed() == {"learning_rate": 5e-3}


def test_given_and_settled_values_have_different_types():
    cell = Cell("voting", "sp", learning_rate=1, n_problems=None)
    assert type(cell.learning_rate) is float and cell.n_problems == 16
    assert not [name for name, value in cell if value is None and name not in ("model", "data", "step_tokens", "dual_clip")]
    with pytest.raises(ValueError, match="frozen"):
        cell.n_problems = 3


def test_own_workflows_are_distinguished_by_their_code(tmp_path):
    source = "class {0}:\n    name, roles = 'echo', {{'speaker': 1}}\n    async def run(self, problem, call):\n        return '{1}'\n"
    file = tmp_path / "own.py"
    file.write_text(source.format("Echo", "one"))
    cell = Cell(f"{file}:Echo", "sp")
    assert re.fullmatch("echo-sp-math-s0-[0-9a-f]{8}", cell.id) and list(cell.changed()) == ["workflow_sha256"]
    assert Cell(**cell.parameters()) == cell  # so that other processes make the same one
    file.write_text(source.format("Echo", "two"))
    assert Cell(f"{file}:Echo", "sp").id != cell.id
    with pytest.raises(ValueError, match="defines no 'Ecco'.*Did you mean 'Echo'"):
        Cell(f"{file}:Ecco", "sp")


class Echo:
    name, roles = "echo", {"speaker": 1}

    async def run(self, problem, call):
        return "one"


class Changed(Echo):
    async def run(self, problem, call):
        return "two"


def test_a_changed_workflow_object_is_another_cell():
    assert Cell(Echo(), "sp") == Cell(Echo(), "sp") and Cell(Echo(), "sp").id != Cell(Changed(), "sp").id
    with pytest.raises(ValueError, match="path/to/file.py:Name"):
        Cell(Echo(), "sp").parameters()


@pytest.mark.parametrize("name", ["voting", "../up", "two words", ""])
def test_a_name_that_cannot_be_a_folders_is_refused(name):
    workflow = Echo()
    workflow.name = name
    with pytest.raises(ValueError, match="built-in" if name == "voting" else "plain identifier"):
        Cell(workflow, "sp")


@pytest.mark.parametrize(("scale", "beyond"), [("tiny-s", {"dual_clip"}), ("0.6b", {"renderer"})])
def test_presets_differ_in_every_documented_option(scale, beyond):
    paper, released = (Cell("voting", "sp", scale=scale, preset=preset) for preset in ("paper", "released_code"))
    differ = {name for name, value in paper.to_dict().items() if value != released.to_dict()[name]}
    assert differ == beyond | {
        "preset", "code_reward", "malformed_reward", "advantage_group", "lr_clock", "lr_schedule", "minibatch_split",
        "row_order", "aggregator_fallback", "code_rows",
    }  # fmt: skip
    code = Cell("voting", "sp", "code", preset="released_code")
    assert released.advantage_group == "slot" and code.advantage_group == "role"


def test_processes_that_do_not_fit_the_batch_are_refused():
    with pytest.raises(ValueError, match="`n_problems` must be a multiple of the 3 processes.*got 16"):
        Launch().check_processes(3, 16)
    with pytest.raises(ValueError, match="`vllm_tensor_parallel` must divide the 2 processes, got 4"):
        Launch(vllm_tensor_parallel=4).check_processes(2, 16)


def test_adapter_names_that_peft_mixes_up_get_a_prefix():
    cell = Cell("voting", "generator=a,aggregator=b")
    assert cell.policy == {"generator": "adapter_a", "aggregator": "adapter_b"}
    assert Cell("voting", cell.policy) == cell
    policy = Cell("voting", "generator=evaluator,aggregator=1").policy
    assert policy == {"generator": "evaluator", "aggregator": "adapter_1"}


def test_an_evaluation_has_no_parameters_of_training_only():
    names = [parameter.name for parameter in evaluation_parameters()]
    assert names[:3] == ["adapters", "checkpoints", "n_rollouts"] and not {"n_processes", "sharding"} & set(names)
