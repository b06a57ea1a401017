"""Bad input is refused before any compute: what was given, why it cannot work, what to write instead."""

import os

import pytest
from refusals_in_three_parts import assert_in_three_parts

from multirole.experiment.cell import Cell
from multirole.experiment.folders import open_folder
from multirole.experiment.launch import Launch
from multirole.experiment.presets import CHOICES

CELLS = [
    ({"workflow": "votin"}, "'votin'", "voting"),
    ({"policy": "spp"}, "'spp'", "'sp'"),
    ({"policy": ""}, "''", "'sp'"),
    ({"policy": "generator=a"}, "missing ['aggregator']", "generator=a,aggregator=b"),
    ({"policy": "generator=a,aggregator=b,judge=c"}, "unknown ['judge']", "generator=a,aggregator=b"),
    ({"policy": "generator=a,aggregator=b,generator=c"}, "twice", "generator=a,aggregator=b"),
    ({"policy": "generator=a.b,aggregator=c"}, "'a.b'", "letters"),
    ({"task": "maths"}, "'maths'", "math"),
    ({"scale": "tiny"}, "'tiny'", "tiny-s"),
    ({"preset": "papre"}, "'papre'", "released_code"),
    ({"seed": "x"}, "'x'", "seed=3"),
    ({"seed": 1.5}, "1.5", "seed=3"),
    ({"seed": -1}, "-1", "at least 0"),
    ({"iterations": 0}, "0", "at least 1"),
    ({"iterations": True}, "True", "iterations=3"),
    ({"learning_rate": "fast"}, "'fast'", "0.5"),
    ({"learning_rate": float("nan")}, "nan", "finite"),
    ({"seed": 2**40}, "1099511627776", "4294967295"),
    ({"max_grad_norm": 0.0}, "0.0", "at least"),
    ({"workflow": 3}, "3", "async def run"),
    ({"workflow": object}, "object", "async def run"),
    ({"n_train": 8}, "8", "n_problems"),
    ({"engine": "cuda"}, "'cuda'", "transformers"),
    ({"code_reward": "some"}, "'some'", "fraction"),
    ({"scale": "8b"}, "'8b'", "1.7b"),
    ({"renderer": "released_code"}, "'released_code'", "chat_template"),
    ({"model": "a-model"}, "'a-model'", "0.6b"),
    ({"scale": "0.6b", "model": "no-such-folder"}, "'no-such-folder'", "local folder"),
    ({"scale": "0.6b", "data": "no-such-file"}, "'no-such-file'", "pinned download"),
    ({"n_voters": 0}, "0", "at least 1"),
    ({"dual_clip": 0.5}, "0.5", "at least 1"),
    ({"allow_unsafe_code": "yes"}, "'yes'", "allow_unsafe_code=False"),
    ({"dtype": "float16"}, "'float16'", "bfloat16"),
]
LAUNCHES = [
    ({"n_processes": 0}, "0", "n_processes=2"),
    ({"n_processes": 2.0}, "2.0", "n_processes=2"),
    ({"sharding": "zero3"}, "'zero3'", "fsdp2"),
    ({"vllm_memory": 40}, "40", "0.6"),
    ({"vllm_tensor_parallel": "two"}, "'two'", "vllm_tensor_parallel=2"),
    ({"results_dir": ""}, "''", "runs"),
]


@pytest.mark.parametrize(("fields", "given", "instead"), CELLS)
def test_cell_refuses(fields, given, instead):
    with pytest.raises(ValueError) as error:
        Cell(**{"workflow": "voting", "policy": "sp"} | fields)
    assert_in_three_parts(str(error.value), given, "", instead)


def test_a_misspelt_notebook_parameter_is_refused_and_never_ignored():
    good = {"workflow": "voting", "policy": "sp", "task": "math", "iterations": None, "results_dir": "runs"}
    cell, options = Cell.from_parameters(good | {"_dh": ["x"], "In": ["a"], "exit": object()})
    assert cell.id == "voting-sp-math-s0" and options == Launch(results_dir="runs")
    with pytest.raises(ValueError, match=r"worklow='single'.*'workflow'"):
        Cell.from_parameters(good | {"worklow": "single"})
    with pytest.raises(ValueError, match="no cell is trained by default"):
        Cell.from_parameters(good | {"workflow": ""})
    for name, value in (("seeed", [1, 2]), ("iteratons", None), ("seed", [1]), ("seed", ""), ("task", "")):
        with pytest.raises(ValueError, match=name):
            Cell.from_parameters(good | {name: value})


def test_a_folder_of_another_configuration_is_refused(tmp_path):
    open_folder(Cell("voting", "sp"), tmp_path)
    open_folder(Cell("voting", "sp"), tmp_path)
    config = tmp_path / "tiny-s" / "voting-sp-math-s0" / "config.json"
    config.write_text(config.read_text().replace("0.002", "0.004"))
    with pytest.raises(ValueError, match="another configuration"):
        open_folder(Cell("voting", "sp"), tmp_path)


def test_an_unwritable_results_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="results_dir="):
        open_folder(Cell("voting", "sp"), tmp_path / "file")
    if os.geteuid() != 0:  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(ValueError, match="results_dir="):
            open_folder(Cell("voting", "sp"), tmp_path / "locked")


def test_ids_tell_every_difference_apart():
    ids = [
        Cell("voting", "sp").id,
        Cell("voting", "ip").id,
        Cell("voting", "generator=a,aggregator=b").id,
        Cell("voting", "sp", seed=1).id,
        Cell("voting", "sp", "code").id,
        Cell("voting", "sp", learning_rate=5e-3).id,
        Cell("voting", "sp", preset="released_code").id,
    ]
    assert len(set(ids)) == len(ids)
    assert Cell("voting", {"generator": "shared", "aggregator": "shared"}).id == Cell("voting", "sp").id
    whole, decimal = (Cell("voting", "sp", kl_anchor=one, dual_clip=one, slot_scaling=one) for one in (1, 1.0))
    assert whole.id == decimal.id  # a run is not trained twice for how a number is written


def test_the_translation_to_trl_loses_nothing(tmp_path):
    cell = Cell("voting", "ip", "code", iterations=7, learning_rate=3e-3, clip_low=0.1, clip_high=0.3, temperature=0.9)
    args = cell.grpo_config(str(tmp_path))
    assert (args.epsilon, args.epsilon_high, args.beta, args.loss_type) == (0.1, 0.3, 0.0, "grpo")
    assert (args.learning_rate, args.weight_decay, args.max_grad_norm) == (3e-3, 0.01, 1.0)
    assert (args.max_steps, args.per_device_train_batch_size, args.num_generations) == (7, 16 * 8, 8)
    assert (args.temperature, args.max_completion_length, args.seed) == (0.9, 96, 0)
    assert (args.eval_steps, args.save_steps, args.gradient_accumulation_steps, args.num_iterations) == (10, 10, 1, 1)


def test_an_id_with_many_changed_fields_is_still_a_file_name(tmp_path):
    changed = {"iterations": 3, "n_problems": 3, "n_episodes": 3, "n_validation": 3, "n_train": 4, "eval_every": 3,
               "save_every": 3, "warmup_iterations": 1, "learning_rate": 5e-3, "old_logprobs": "recomputed", "weight_decay": 0.5}  # fmt: skip
    one, other = (Cell("voting", "sp", **changed, max_grad_norm=norm) for norm in (0.5, 0.25))
    assert one.id != other.id and one.id.startswith("voting-sp-math-s0-12-fields-")
    open_folder(one, tmp_path)


@pytest.mark.parametrize(("scale", "beyond"), [("tiny-s", set()), ("0.6b", {"renderer"})])
def test_presets_differ_in_every_documented_option(scale, beyond):
    paper, released = (Cell("voting", "sp", scale=scale, preset=preset) for preset in CHOICES["preset"])
    differ = {name for name, value in paper.to_dict().items() if value != released.to_dict()[name]}
    assert differ == beyond | {
        "preset", "code_reward", "malformed_reward", "advantage_group", "lr_clock", "lr_schedule", "minibatch_split",
        "row_order", "aggregator_fallback", "code_rows", "dual_clip",
    }  # fmt: skip
    assert (
        released.advantage_group == "slot"
        and Cell("voting", "sp", "code", preset="released_code").advantage_group == "role"
    )


@pytest.mark.parametrize(("fields", "given", "instead"), LAUNCHES)
def test_launch_refuses(fields, given, instead):
    with pytest.raises(ValueError) as error:
        Launch(**fields)
    assert_in_three_parts(str(error.value), given, "", instead)


def test_processes_that_do_not_fit_the_batch_are_refused():
    with pytest.raises(ValueError, match="3 processes cannot share the 16 problems"):
        Launch().check_processes(3, 16)
    with pytest.raises(ValueError, match="vllm_tensor_parallel=4 does not divide 2"):
        Launch(vllm_tensor_parallel=4).check_processes(2, 16)


def test_adapter_names_that_peft_mixes_up_get_a_prefix():
    cell = Cell("voting", "generator=a,aggregator=b")
    assert cell.policy == {"generator": "adapter_a", "aggregator": "adapter_b"}
    assert Cell("voting", cell.policy).id == cell.id
    assert Cell("voting", "generator=evaluator,aggregator=1").policy == {
        "generator": "evaluator",
        "aggregator": "adapter_1",
    }


class Echo:
    name, roles = "echo", {"speaker": 1}

    async def run(self, problem, call):
        return "one"


class Changed(Echo):
    async def run(self, problem, call):
        return "two"


def test_a_changed_workflow_of_the_same_name_is_another_configuration(tmp_path):
    assert Cell(Echo(), "sp").to_dict() == Cell(Echo(), "sp").to_dict()
    open_folder(Cell(Echo(), "sp"), tmp_path)
    with pytest.raises(ValueError, match="another configuration"):
        open_folder(Cell(Changed(), "sp"), tmp_path)
    Echo.name = "voting"
    with pytest.raises(ValueError, match="built-in"):
        Cell(Echo(), "sp")


@pytest.mark.parametrize("n_episodes", [2, 3, 16])
def test_any_group_size_is_accepted(tmp_path, n_episodes):
    assert Cell("voting", "sp", n_episodes=n_episodes).grpo_config(str(tmp_path)).num_generations == n_episodes
