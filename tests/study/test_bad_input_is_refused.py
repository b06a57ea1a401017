"""Bad input is refused before any compute, in a sentence that names the parameter and what was given."""

import json
import os
import re
from contextlib import AbstractContextManager
from pathlib import Path

import bad_inputs
import pytest
from bad_inputs import END, START, table
from trainers import slow_but

from multirole_study.experiment.cell import EVALUATION_NAMES, Cell
from multirole_study.experiment.cell_rules import RULES
from multirole_study.experiment.evaluation import Evaluation, evaluation_parameters
from multirole_study.experiment.launch import Launch
from multirole_study.experiment.run_folder import differing_options, folder_of, open_folder
from multirole_study.experiment.settings import UserError
from multirole_study.tasks import Task

ROOT = Path(__file__).parents[2]
QUICK = ("names", "impossible together", "own workflows and tasks", "rows")


@pytest.fixture(scope="module")
def finished_results(tmp_path_factory) -> Path:
    return bad_inputs.whole_run(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("name", slow_but(QUICK, bad_inputs.CLASSES))
def test_every_bad_input_is_refused_in_a_sentence_before_anything_is_written(name, tmp_path):
    with bad_inputs.on_a_bare_machine(tmp_path / "cache"):
        assert bad_inputs.problems(bad_inputs.CLASSES[name], tmp_path / "cases") == {}


@pytest.mark.slow
def test_damaged_records_are_continued_from_an_intact_checkpoint_or_refused(finished_results, tmp_path):
    assert bad_inputs.problems(bad_inputs.records(finished_results), tmp_path) == {}


def test_a_folder_in_use_is_refused(tmp_path):
    outcome, text = bad_inputs.in_use(tmp_path)
    assert outcome == "refused" and "two processes cannot write one run" in text


def test_the_table_of_bad_inputs_is_the_one_that_was_measured():
    measured = json.loads((ROOT / "results" / "bench" / "bad_inputs.json").read_text())
    assert bad_inputs.CLASSES.keys() < measured.keys() and sum(counts["tried"] for counts in measured.values()) > 600
    assert sum(counts["otherwise"] for counts in measured.values()) == 0
    assert f"{START}{table(measured)}{END}" in (ROOT / "docs" / "reliability.md").read_text()


def test_every_mistake_is_named_at_once():
    with pytest.raises(ValueError, match=r"`n_problems` .*\n`temperature` .*"):
        Cell("voting", "sp", n_problems=0, temperature=0)


def test_a_misspelt_notebook_parameter_is_refused_and_never_ignored():
    good = {"workflow": "voting", "policy": "sp", "task": "math", "max_steps": None, "results_dir": "runs"}
    cell, launch = Cell.from_parameters(good | {"_dh": ["x"], "In": ["a"], "exit": object()})
    assert cell.id == "voting-sp-math-s0" and launch == Launch(results_dir="runs")
    with pytest.raises(ValueError, match="`worklow` is not a known parameter. Did you mean 'workflow'"):
        Cell.from_parameters(good | {"worklow": "single"})
    for name, value in (
        ("seeed", [1, 2]),
        ("iteratons", None),
        ("seed", [1]),
        ("seed", ""),
        ("task", ""),
        ("_seed", 1),
    ):
        with pytest.raises(UserError, match=name):
            Cell.from_parameters(good | {name: value})
    assert Cell.from_parameters({}) == (Cell("voting", "sp"), Launch())  # Run All


def test_data_beside_rows_of_ones_own_is_refused_with_one_advice():
    with pytest.raises(ValueError, match="has its own rows. Leave `data` out.") as error:
        Cell("voting", "sp", f"{ROOT}/examples/debate.py:task", data="rows.jsonl")
    assert "scale=" not in str(error.value)


def test_a_parameter_of_evaluations_is_not_taken_for_a_misspelt_one_of_training():
    assert {*EVALUATION_NAMES, "cell"} == set(Evaluation.model_fields)
    for name in EVALUATION_NAMES:
        with pytest.raises(
            UserError, match=f"`{name}` is not a known parameter of a training, .* `multirole evaluate`"
        ):
            Cell.from_parameters({name: "base"})


def test_a_run_at_a_rate_that_nobody_tuned_says_so():
    (remark,) = Cell("voting", "sp", scale="qwen-0.5b").remarks()
    assert "learning_rate=0.0001" in remark and "Voting-SP rose at 5e-5" in remark
    assert Cell("voting", "sp", scale="qwen-0.5b", learning_rate=5e-5).remarks() == []


def test_a_presets_warm_up_may_be_longer_than_a_trial():
    cell = Cell("voting", "sp", max_steps=4)
    assert cell.warmup_steps == 5 and Cell(**cell.parameters()) == cell  # as another process makes it
    (remark,) = cell.remarks()
    assert remark.startswith(
        "The warm-up of 5 ticks does not end within the run's 4, so the learning rate stays below 0.002."
    )
    assert len(Cell("voting", "sp", max_steps=5).remarks()) == 1  # of the rates 0, 0.2 ... 0.8 none is 1
    for same in (
        {"max_steps": 6},
        {"max_steps": 4, "warmup_steps": 0},
        {"max_steps": 3, "lr_clock": "update_call"},
    ):
        assert Cell("voting", "ip", **same).remarks() == []


def test_a_setting_of_another_workflow_is_remarked_on():
    """It is no error: the parameters of a grid are those of all its workflows."""
    used = {"eval_opt": "rounds", "voting": "n_voters", "orch_workers": "n_workers"}
    for workflow in (*used, "single"):
        (remark,) = Cell(workflow, "sp", rounds=2, n_voters=2, n_workers=2, credit_branches=3).remarks()
        idle = [name for of, name in used.items() if of != workflow]
        unused = ", ".join([*idle, "credit_branches"])
        assert remark.startswith(f"Not used by workflow={workflow!r} and task='math' with credit='outcome': {unused}.")
    assert Cell("single", "sp", n_voters=3).remarks() == []  # the default
    assert Cell("voting", "sp", n_voters=5, credit="branches", credit_branches=3).remarks() == []


def test_a_setting_of_another_task_is_remarked_on():
    rows = [{"prompt": "1+1?"}]
    own = Task("sums", rows, rows, lambda completions, **_: [0.0] * len(completions))
    scored = {
        "malformed_reward": -0.5,
        "answer_fallback": "last_number",
        "unboxed_reward": 0.2,
        "code_reward": "all_pass",
    }
    idle = {
        ("math", "tiny-r"): ["answer_fallback", "unboxed_reward", "code_reward"],
        ("code", "tiny-r"): ["malformed_reward", "answer_fallback", "unboxed_reward"],
        ("gym:products", "tiny-r"): ["code_reward"],
        ("code", "smollm2"): ["malformed_reward", "unboxed_reward"],  # its answer_fallback is the preset's
        (own, "tiny-r"): [*scored],
    }
    for (task, scale), unused in idle.items():
        (remark,) = Cell("eval_opt", "sp", task, scale, **scored).remarks()
        assert f"with credit='outcome': {', '.join(unused)}. Only" in remark
    (remark,) = Cell(
        "voting", "sp", "gym:products", unboxed_reward=0.2
    ).remarks()  # without a fallback no answer is unboxed
    assert "'outcome': unboxed_reward. Only" in remark
    (remark,) = Cell("single", "sp", box_rule="last_box").remarks()
    assert "'outcome': box_rule. Only" in remark


def test_memory_of_vllm_is_refused_for_an_engine_without_it():
    with pytest.raises(
        ValueError, match="`vllm_max_num_seqs=8` is for rollouts with vLLM, but `engine` is 'transformers'"
    ):
        Launch(vllm_max_num_seqs=8).check(Cell("voting", "sp", engine="transformers"))
    Launch(vllm_max_num_seqs=8).check(Cell("voting", "sp"))


def test_a_refusal_is_one_sentence_in_a_notebook():
    with pytest.raises(UserError) as error:
        Cell.from_parameters({"iteration": 3})
    sentence = "`iteration` is not a known parameter. Did you mean 'max_steps'?"
    assert error.value._render_traceback_() == [str(error.value)] == [sentence]


def opened(results_dir: Path) -> AbstractContextManager:
    cell = Cell("voting", "sp")
    return open_folder(folder_of(cell, results_dir), cell.to_dict())


def test_a_folder_of_another_configuration_is_refused(tmp_path):
    config, held = folder_of(Cell("voting", "sp"), tmp_path) / "config.json", Cell("voting", "sp").to_dict()
    config.parent.mkdir(parents=True)
    updates = held.pop("updates")  # a run from before this option, with an option that was removed since
    config.write_text(json.dumps(held | {"on_alarm": "log"}))
    with opened(tmp_path):
        pass
    for other, named in ((held | {"updates": updates, "learning_rate": 0.004}, "learning_rate"), ([], "config.json")):
        config.write_text(json.dumps(other))
        with pytest.raises(ValueError, match=rf"another configuration \({named}\)"), opened(tmp_path):
            pass
    of_evaluation = {"num_generations_eval": 1, "cell": held | {"on_alarm": "log"}}
    assert not differing_options(of_evaluation, {"num_generations_eval": 1, "cell": held})
    assert differing_options(of_evaluation, {"num_generations_eval": 1, "cell": held | {"learning_rate": 0.004}}) == [
        "learning_rate"
    ]
    assert differing_options(of_evaluation, {"num_generations_eval": 2, "cell": held}) == ["num_generations_eval"]


def test_an_unwritable_results_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="`results_dir` must be"), opened(tmp_path / "file"):
        pass
    if os.geteuid() != 0:  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(ValueError, match="`results_dir` must be"), opened(tmp_path / "locked"):
            pass


class LongNamed:
    """A user-supplied workflow."""

    name, roles = "a_debate_of_two_with_a_judge_who_reads_both_of_them_twice", {"debater": 2}

    async def run(self, problem, call):
        raise NotImplementedError


def test_ids_tell_every_difference_apart_and_are_short():
    cells = [
        Cell("voting", "sp"),
        Cell("voting", "ip"),
        Cell("voting", "generator=a,aggregator=b"),
        Cell("voting", "generator=b,aggregator=a"),
        Cell("voting", "sp", seed=1),
        Cell("voting", "sp", "code"),
        Cell("voting", "sp", learning_rate=5e-3),
        Cell("voting", "sp", learning_rate=5e-3, max_steps=7),
        Cell("voting", "sp", preset="released_code"),
        Cell("orch_workers", "orchestrator=a,worker=b,synthesizer=a", seed=2**32 - 1, preset="released_code"),
        Cell(LongNamed(), "sp"),
    ]
    assert len({cell.id for cell in cells}) == len(cells) and max(len(cell.id) for cell in cells) <= 60
    assert [cells[0].id, cells[5].id, cells[8].id] == [
        "voting-sp-math-s0", "voting-sp-code-s0", "voting-sp-math-s0-released_code"
    ]  # fmt: skip
    assert re.fullmatch("voting-map-math-s0-[0-9a-f]{8}", cells[2].id)
    assert cells[2].changed() == {"policy": {"generator": "adapter_a", "aggregator": "adapter_b"}}
    assert Cell("voting", {"generator": "shared", "aggregator": "shared"}).id == cells[0].id
    whole, decimal = (Cell("voting", "sp", beta=one, delta=one, process_reward=one) for one in (1, 1.0))
    assert whole.id == decimal.id  # two spellings of a number are the same run


def test_the_id_hashes_the_settings_that_differ():
    assert Cell("voting", "sp", learning_rate=2e-3, n_problems=8, beta=0).changed() == {}
    cell = Cell("voting", "sp", learning_rate=5e-3, updates="one")
    assert cell.changed() == {"learning_rate": 5e-3, "updates": "one"}
    assert cell.sibling("single", "sp") == Cell("single", "sp", learning_rate=5e-3, updates="one")
    assert cell.replace(updates="per_batch").changed() == {"learning_rate": 5e-3}


def test_given_and_settled_values_have_different_types():
    cell = Cell("voting", "sp", learning_rate=1, n_problems=None)
    assert type(cell.learning_rate) is float and cell.n_problems == 8
    optional = {
        "model",
        "data",
        "step_tokens",
        "delta",
        "role_beta",
        "max_sampled_tokens",
        "lr_clock_ticks",
        "role_order",
        "target_kl",
    }
    assert {name for name, value in cell if value is None} <= optional
    with pytest.raises(ValueError, match="frozen"):
        cell.n_problems = 3


def test_user_supplied_workflows_are_distinguished_by_their_code(tmp_path):
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


@pytest.mark.parametrize(("scale", "beyond"), [("tiny-r", set()), ("0.6b", {"renderer", "box_rule"})])
def test_presets_differ_in_every_documented_option(scale, beyond):
    paper, released = (Cell("voting", "sp", scale=scale, preset=preset) for preset in ("paper", "released_code"))
    differ = {name for name, value in paper.to_dict().items() if value != released.to_dict()[name]}
    assert differ == beyond | {
        "preset", "code_reward", "malformed_reward", "advantage_group", "lr_clock", "lr_schedule", "minibatch_split",
        "row_order", "aggregator_fallback",
    }  # fmt: skip
    code = Cell("voting", "sp", "code", preset="released_code")
    assert released.advantage_group == "slot" and code.advantage_group == "role"


def test_processes_that_do_not_fit_the_batch_are_refused():
    with pytest.raises(ValueError, match="`n_problems` must be a multiple of the 3 processes.*got 16"):
        Launch(n_processes=3).check(Cell("voting", "sp", n_problems=16))


def test_adapter_names_that_peft_mixes_up_get_a_prefix():
    cell = Cell("voting", "generator=a,aggregator=b")
    assert cell.policy == {"generator": "adapter_a", "aggregator": "adapter_b"}
    assert Cell("voting", cell.policy) == cell
    policy = Cell("voting", "generator=evaluator,aggregator=1").policy
    assert policy == {"generator": "evaluator", "aggregator": "adapter_1"}


def test_an_evaluation_has_no_parameters_of_training_only():
    names = [parameter.name for parameter in evaluation_parameters()]
    assert names[:3] == ["adapters", "checkpoints", "num_generations_eval"] and not {"n_processes", "sharding"} & set(
        names
    )


def test_rules_of_cells_read_settings_and_facts_that_exist(monkeypatch):
    """A rule that reads an unknown name would never be applied."""
    given = {}
    monkeypatch.setattr("multirole_study.experiment.cell.broken_rules", lambda values, *_: given.update(values) or [])
    Cell("voting", "sp")
    assert {name for rule in RULES for name in rule.reads} <= given.keys()


def test_launch_options_are_checked_with_the_cell_by_the_librarys_rules():
    cell = Cell("voting", "sp", engine="vllm_server", max_staleness=1)
    Launch().check(cell)
    Launch(vllm_server_base_url="http://a:1", micro_batch_tokens=64).check(cell)
    Launch(n_processes=2).check(cell)
    with pytest.raises(ValueError, match="needs the whole model in one process, but FSDP2 shards it"):
        Launch(n_processes=2, sharding="fsdp2").check(cell)
    with pytest.raises(ValueError, match="Name both, as in"):
        Launch(vllm_server_copy_command="rsync {folder} {host}:").check(cell)
    with pytest.raises(ValueError, match="`n_processes` is 1. Write a larger n_processes"):
        Launch(sharding="fsdp2").check(Cell("voting", "sp"))
