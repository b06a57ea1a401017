"""Behaviours that TRL's tests of its GRPO trainer require, with one role: each works as in TRL or is refused with a clear message."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import IA3Config, LoraConfig, MontecloraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from toy_qwen3 import toy_base
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from multirole import Answer, MultiRoleCallback, MultiRoleGRPOConfig, MultiRoleGRPOTrainer, Single, user
from multirole.inputs import streams
from multirole.inputs.adapters import changes_base, with_adapters
from multirole.rollout.errors import WorkflowError
from multirole.trl_parts import GRPOTrainer

MODEL = toy_base()
ROWS = Dataset.from_list([{"prompt": f"{i}+1"} for i in range(6)])
LORA = LoraConfig(r=4, target_modules="all-linear")


def size(completions, **_):
    return [float(len(str(completion))) for completion in completions]


def config(folder, kind=MultiRoleGRPOConfig, **options):
    usual = {
        "use_cpu": True, "bf16": False, "generation_batch_size": 8, "num_generations": 4, "max_steps": 2, "max_completion_length": 6,
        "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "gradient_checkpointing": False, "lr_scheduler_type": "constant",
    }  # fmt: skip
    return kind(str(folder), **usual | options)


@pytest.fixture
def make(tmp_path):
    """make(**options) -> a trainer of one role on the toy model. Options of the trainer itself are `reward`, `rows` and so on."""

    def build(
        reward=size, rows=ROWS, model=MODEL, workflow=None, peft_config=LORA, eval_dataset=None, folder=None, args=None, **options
    ):  # fmt: skip
        tokenizer = None if isinstance(model, str) else AutoTokenizer.from_pretrained(MODEL)
        args = args or config(folder or tmp_path / "out", **options)
        return MultiRoleGRPOTrainer(
            model, workflow or Single(), reward, args, rows, eval_dataset, tokenizer, peft_config=peft_config
        )

    return build


def weights(trainer):
    return {n: p.detach().clone() for n, p in trainer.peft_model.named_parameters() if "lora" in n}


def assert_equal(one, other):
    assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


# ---- arguments. The model does not exist, so every refusal comes before it would be loaded.


class Pair:
    name, roles = "pair", {"writer": 1, "judge": 1}

    async def run(self, problem, call):
        draft = await call("writer", [user(problem.question)])
        return Answer((await call("judge", [user(draft.text)])).text)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"workflow": size, "reward_funcs": "args", "args": None}, TypeError, "`size` is in its place. TRL's trainer takes the reward functions second"),
        ({"workflow": "reward-model"}, TypeError, "a `str` is in its place"),
        ({"workflow": None}, TypeError, "none was given.*`multirole.Single\\(\\)` plays one role"),
        ({"reward_funcs": None}, ValueError, "No reward source provided"),
        ({"reward_funcs": []}, ValueError, "No reward source provided"),
        ({"reward_funcs": [3]}, TypeError, "`reward_funcs` must be functions, reward models or their names, got 3"),
        ({"args": "stock"}, TypeError, "got a `GRPOConfig`. It takes every field"),
        ({"args": {"max_steps": 2}}, TypeError, "got a `dict`"),
        ({"peft_config": {"r": 4}}, TypeError, "`peft_config` must be a `peft.LoraConfig`, got a `dict`"),
        ({"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)}, ValueError, "got a `PromptTuningConfig`: the rollout"),
        ({"peft_config": IA3Config()}, ValueError, "got a `IA3Config`: the rollout"),
        ({"peft_config": LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[1, 2])}, ValueError, r"`peft_config` has `alora_invocation_tokens=\[1, 2\]`"),
        ({"peft_config": LoraConfig(monteclora_config=MontecloraConfig())}, ValueError, "`peft_config` has a `monteclora_config`, but MonteCLoRA adds noise"),
        ({"peft_config": LoraConfig(bias="lora_only")}, ValueError, "`peft_config` has `bias='lora_only'`, with which PEFT trains biases of the base"),
        ({"peft_config": LoraConfig(bias="all")}, ValueError, "`peft_config` has `bias='all'`.*Write `bias='none'`"),
        ({"peft_config": LoraConfig(init_lora_weights="pissa"), "workflow": Pair(), "args": "ip"}, ValueError, "so 2 adapters cannot share it"),
        ({"args": "no epoch"}, ValueError, "`num_train_epochs=0` and `max_steps=-1` train nothing"),
        ({"tools": [size]}, ValueError, "`tools` is not supported by multi-role training: which role has which tools"),
        ({"environment_factory": dict}, ValueError, "`environment_factory` is not supported.*`Workflow.run`"),
        ({"rollout_func": size}, ValueError, "`rollout_func` is not supported.*the workflow is the rollout"),
        ({"quantization_config": object()}, ValueError, "`quantization_config` is not supported.*bfloat16"),
        ({"train_dataset": [{"prompt": "1"}]}, TypeError, "`train_dataset` must be a `Dataset` or `IterableDataset`, got `list`"),
        ({"train_dataset": None}, ValueError, "`train_dataset` is required"),
        ({"train_dataset": DatasetDict({"train": ROWS})}, TypeError, r"got `DatasetDict`. Pass one of its splits, \['train'\]"),
        ({"train_dataset": ROWS.to_iterable_dataset(), "args": "dispatched"}, ValueError, "Iterable datasets require `dispatch_batches=False`"),
        ({"eval_dataset": {"a": ROWS.to_iterable_dataset()}, "args": "dispatched"}, ValueError, "Iterable datasets require `dispatch_batches=False`"),
        ({"train_dataset": ROWS.select([])}, ValueError, "`train_dataset` is empty"),
        ({"eval_dataset": {"a": ROWS.rename_column("prompt", "q")}}, ValueError, r"`eval_dataset\['a'\]` needs a \"prompt\" column"),
        ({"train_dataset": ROWS.to_iterable_dataset(), "args": "epochs"}, ValueError, "is a stream.*`num_train_epochs` cannot be counted. Set `max_steps`"),
        ({"train_dataset": ROWS.to_iterable_dataset(), "args": "save per epoch"}, ValueError, "`save_strategy='epoch'` cannot be counted"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_work_are_refused_before_anything_is_loaded(tmp_path, changes, error, message):
    named = {
        "stock": lambda: config(tmp_path, GRPOConfig, per_device_train_batch_size=8),
        "epochs": lambda: config(tmp_path, max_steps=-1),
        "save per epoch": lambda: config(tmp_path, save_strategy="epoch"),
        "dispatched": lambda: config(tmp_path, accelerator_config={"dispatch_batches": True}),
        "no epoch": lambda: config(tmp_path, max_steps=-1, num_train_epochs=0),
        "ip": lambda: config(tmp_path, policy="ip"),
        "args": lambda: config(tmp_path),
    }
    usual = {"workflow": Single(), "reward_funcs": size, "args": "args", "train_dataset": ROWS, "peft_config": LORA}
    valid = {
        name: named[value]() if isinstance(value, str) and value in named else value
        for name, value in (usual | changes).items()
    }
    with pytest.raises(error, match=message):
        MultiRoleGRPOTrainer("no such model", **valid)


@pytest.mark.parametrize(
    ("model", "message"), [(None, "got None.$"), (Path("/models/base"), r"got PosixPath\(.*Write '/models/base'.$")]
)
def test_a_model_is_text_or_a_module(tmp_path, model, message):
    with pytest.raises(TypeError, match=f"`model` must be a model, or the name or folder of one as text, {message}"):
        MultiRoleGRPOTrainer(model, Single(), size, config(tmp_path), ROWS, peft_config=LORA)


@pytest.mark.parametrize("name", ["episodes", "prompts", "completions", "trainer_state", "log_metric", "_index"])
def test_columns_with_a_reserved_name_are_refused(make, name):
    with pytest.raises(
        ValueError,
        match=f"has (a|the) column '{name}', (where the trainer stores|but the trainer passes another argument)",
    ):
        make(model="no such model", rows=ROWS.add_column(name, list(range(6))))


def test_arguments_of_trl_that_are_none_are_accepted(tmp_path):
    nothing = dict.fromkeys(("tools", "environment_factory", "rollout_func", "quantization_config"))
    MultiRoleGRPOTrainer(MODEL, Single(), size, config(tmp_path), ROWS, peft_config=LORA, **nothing)


# ---- streams


def test_a_stream_trains_as_the_dataset_does(make, tmp_path):
    """Rows come in the stream's order, over two passes."""
    options = {"shuffle_dataset": False, "max_steps": 6}
    rows, stream = make(**options), make(rows=ROWS.to_iterable_dataset(), folder=tmp_path / "stream", **options)
    assert [stream.problems[i].question for i in range(8)] == [f"{i % 6}+1" for i in range(8)]
    rows.train()
    stream.train()
    rewards = [[row["reward"] for row in t.state.log_history if "reward" in row][:3] for t in (rows, stream)]
    assert rewards[0] == rewards[1]  # only the first pass: later problems have other ids and therefore other seeds


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_run_on_a_stream_resumes_as_if_unbroken(make, tmp_path, shuffle):
    options = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "shuffle_dataset": shuffle}
    whole = make(rows=ROWS.to_iterable_dataset(), **options)
    whole.train()
    resumed = make(rows=ROWS.to_iterable_dataset(), folder=tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert_equal(weights(whole), weights(resumed))


def test_a_streams_rows_are_read_as_they_are_needed():
    read = []

    def generate():
        for i in range(1000):
            read.append(i)
            yield {"prompt": str(i)}

    from datasets import IterableDataset

    rows = streams.StreamedRows(IterableDataset.from_generator(generate), length=2000, n_kept=4, index_column="place")
    assert [rows[i] for i in (0, 0, 1)] == [{"prompt": p, "place": int(p)} for p in ("0", "0", "1")] and len(read) <= 2
    assert rows[1500] == {"prompt": "500", "place": 1500}
    assert rows[3]["prompt"] == "3"  # read again from the front


def test_an_evaluation_set_may_be_a_stream(make, monkeypatch):
    stream = ROWS.select(range(3)).to_iterable_dataset()
    trainer = make(eval_dataset={"a": stream, "b": ROWS.select(range(2))})
    metrics = trainer.evaluate()
    assert {"eval_a_reward", "eval_a_loss", "eval_b_reward"} <= metrics.keys()
    assert trainer.evaluate(stream)["eval_reward"] == metrics["eval_a_reward"]
    monkeypatch.setattr(streams, "MAX_EVALUATION_ROWS", 2)
    with pytest.raises(ValueError, match=r"`eval_dataset` is a stream of more than 2 rows.*`eval_dataset.take\(500\)`"):
        trainer.evaluate(stream)


def test_the_trainer_keeps_the_datasets_that_it_was_given(make):
    stream = ROWS.select(range(3)).to_iterable_dataset()
    trainer = make(eval_dataset=stream)
    assert trainer.train_dataset is ROWS and trainer.eval_dataset is stream
    trainer.train()
    assert trainer.train_dataset is ROWS and trainer.eval_dataset is stream
    streamed = make(rows=stream, folder=trainer.args.output_dir + "2")
    assert streamed.train_dataset is stream


@pytest.mark.parametrize("form", ["torch", "numpy", "transform"])
def test_rows_may_be_formatted_or_transformed(make, form):
    """As in TRL, rows are read one by one, so a transform may create the prompts."""
    answers = []

    def reward(completions, answer, **_):
        answers.extend(int(a) for a in answer)
        return size(completions)

    rows = Dataset.from_dict({"prompt": ["1+1", "2+2"], "answer": [2, 4]})
    if form == "transform":
        rows = rows.rename_column("prompt", "sum").with_transform(
            lambda batch: {"prompt": [f"What is {s}?" for s in batch["sum"]], "answer": batch["answer"]}
        )
    trainer = make(
        reward, rows if form == "transform" else rows.with_format(form), eval_dataset=rows, shuffle_dataset=False
    )
    trainer.train()
    trainer.evaluate()
    assert answers == ([2] * 4 + [4] * 4) * 2 + [2, 4]
    assert trainer.problems[1].question == ("What is 2+2?" if form == "transform" else "2+2")


def test_workflow_and_reward_see_the_same_row_of_a_random_transform(make):
    versions = itertools.count()

    def reward(completions, version, episodes, **_):
        seen.extend(zip(version, [episode.problem.reference["version"] for episode in episodes], strict=True))
        return size(completions)

    seen = []
    drawn = Dataset.from_dict({"prompt": ["1+1", "2+2"]}).with_transform(
        lambda batch: {"prompt": batch["prompt"], "version": [next(versions) for _ in batch["prompt"]]}
    )
    trainer = make(reward, drawn, eval_dataset=drawn)
    trainer.train()
    trainer.evaluate()
    assert len(seen) == 2 * 8 + 2 and all(version == played for version, played in seen)


def test_the_length_of_a_run_follows_a_dataset_that_is_replaced(make):
    """Two rows make one iteration per epoch, twenty make ten. A number that the user set stays."""
    trainer = make(rows=ROWS.select(range(2)), num_train_epochs=1, max_steps=-1, save_strategy="epoch")
    assert (trainer.args.max_steps, trainer.args.save_steps) == (1, 1)
    trainer.train_dataset = Dataset.from_list([{"prompt": f"{i}-1"} for i in range(20)])
    trainer.get_train_dataloader()
    assert (trainer.args.max_steps, trainer.args.save_steps) == (10, 10)
    trainer.args.max_steps, trainer.train_dataset = 3, ROWS
    trainer.get_train_dataloader()
    assert trainer.args.max_steps == 3


def test_datasets_that_are_replaced_are_used_and_checked(make):
    """As in transformers, where a curriculum sets `trainer.train_dataset` between two calls of `train`."""

    def reward(prompts, completions, **_):
        seen.append(set(prompts))
        return size(completions)

    seen = []
    trainer = make(reward, max_steps=1, eval_dataset=ROWS)
    other = Dataset.from_list([{"prompt": f"{i}-1"} for i in range(20)])
    trainer.train_dataset, trainer.eval_dataset = other, other.select(range(2))
    trainer.train()
    trainer.evaluate()
    assert seen[0] <= set(other["prompt"]) and seen[1] == {"0-1", "1-1"}
    trainer.train_dataset = trainer.eval_dataset = Dataset.from_list([{"question": "1"}])
    for call, name in ((trainer.train, "train_dataset"), (trainer.evaluate, "eval_dataset")):
        with pytest.raises(ValueError, match=f'`{name}` needs a "prompt" column'):
            call()


def test_each_evaluation_set_is_played_with_persistent_workers_too(make):
    trainer = make(
        lambda prompts, **_: [float(len(prompts))] * len(prompts), dataloader_num_workers=1, dataloader_persistent_workers=True,
        eval_dataset={"a": ROWS.select(range(2)), "b": ROWS.select(range(3))},
    )  # fmt: skip
    metrics = trainer.evaluate()
    assert (metrics["eval_a_reward"], metrics["eval_b_reward"]) == (2.0, 3.0)
    assert trainer.evaluate(ROWS.select(range(4)))["eval_reward"] == 4.0


def test_a_dataset_given_to_evaluate_is_checked(make):
    trainer = make()
    with pytest.raises(ValueError, match='`eval_dataset` needs a "prompt" column'):
        trainer.evaluate(ROWS.rename_column("prompt", "q"))
    with pytest.raises(ValueError, match="`eval_dataset` is empty"):
        trainer.evaluate(ROWS.select([]))


def test_rows_of_a_stream_may_lack_columns(make):
    """TRL passes the columns of a batch's first row, but the dicts of a stream may have different keys."""
    from datasets import IterableDataset

    seen = []

    def reward(completions, answer=None, **_):
        seen.append(answer)
        return [0.0 if a is None else 1.0 for a in answer]

    rows = [{"prompt": "say hello"}, {"prompt": "1+1", "answer": "2"}]
    trainer = make(reward, IterableDataset.from_generator(lambda: iter(rows)), max_steps=1, shuffle_dataset=False)
    trainer.train()
    assert seen == [[None] * 4 + ["2"] * 4]


# ---- adapters, checkpoints and the reference of `beta`


def peft_model(**options):
    return get_peft_model(
        AutoModelForCausalLM.from_pretrained(MODEL), LoraConfig(r=4, target_modules="all-linear", **options)
    )


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_peft_model_with_the_adapter_default_is_trained_as_it_is(make, tmp_path, beta):
    """It is also resumed. With `beta`, stock TRL 1.16 resumes without the trained adapter, because of its adapter "ref"."""
    trainer = make(model=peft_model(), peft_config=None, max_steps=3, save_strategy="steps", save_steps=1, beta=beta)
    before = weights(trainer)
    trainer.train()
    assert trainer.adapters == ["default"] and any(not torch.equal(v, before[n]) for n, v in weights(trainer).items())
    folder = tmp_path / "out" / "checkpoint-1"
    assert (folder / "adapter_model.safetensors").exists()  # where TRL stores it
    resumed = make(model=peft_model(), peft_config=None, max_steps=3, folder=tmp_path / "resumed", beta=beta)
    resumed.train(resume_from_checkpoint=str(folder))
    assert_equal(weights(trainer), weights(resumed))
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(MODEL), tmp_path / "out" / "checkpoint-3")
    assert all(torch.equal(p, weights(trainer)[n]) for n, p in loaded.named_parameters() if "lora" in n)


def test_new_adapters_are_drawn_by_the_runs_seed():
    def drawn(seed):
        base = AutoModelForCausalLM.from_pretrained(MODEL)
        model = with_adapters(base, LORA, ["one", "two"], SimpleNamespace(seed=seed))
        return {name: p for name, p in model.named_parameters() if "lora_A" in name}

    first, other = drawn(0), drawn(1)
    assert_equal(first, drawn(0))
    assert all(not torch.equal(p, other[name]) for name, p in first.items())


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"])
def test_an_initialisation_that_takes_over_a_part_of_the_base_is_known(start):
    lora = LoraConfig()
    lora.init_lora_weights = start  # PEFT's constructor wants further options for some of them
    assert changes_base(lora)


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal"])
def test_other_initialisations_leave_the_base_as_it_is(start):
    assert not changes_base(LoraConfig(init_lora_weights=start)) and not changes_base(None)


def test_an_adapter_of_a_model_must_be_lora_too(make):
    base = AutoModelForCausalLM.from_pretrained(MODEL)
    model = get_peft_model(base, IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]))
    with pytest.raises(
        ValueError, match=r"`model.peft_config\['default'\]` must be a `peft.LoraConfig`, got a `IA3Config`"
    ):
        make(model=model, peft_config=None)


def test_trained_tokens_of_a_shared_head_are_refused(make):
    """TRL's head fails on them with an AttributeError."""
    with pytest.raises(ValueError, match="`trainable_token_indices` changes the embedding of tokens"):
        make(peft_config=LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[1, 2]))


def test_an_episode_has_at_most_max_turns_calls(make):
    make(workflow=Pair(), max_turns=2).evaluate(ROWS.select(range(1)))
    with pytest.raises(WorkflowError, match=r"at most `max_turns` \(1\) calls"):
        make(workflow=Pair(), max_turns=1).evaluate(ROWS.select(range(1)))


def test_several_roles_on_one_policy_train_it_too(make):
    assert set(make(model=peft_model(), peft_config=None, workflow=Pair()).policy.values()) == {"default"}
    with pytest.raises(ValueError, match=r"needs adapters \['adapter_writer', 'adapter_judge'\].*holds \['default'\]"):
        make(model=peft_model(), peft_config=None, workflow=Pair(), policy="ip")


@pytest.mark.parametrize("save_only_model", [True, False])
def test_a_checkpoint_of_trl_is_not_taken_for_isolated_adapters(make, tmp_path, save_only_model):
    args = config(tmp_path / "stock", GRPOConfig, per_device_train_batch_size=8, save_strategy="steps", save_steps=1,
                  save_only_model=save_only_model, max_steps=1)  # fmt: skip
    GRPOTrainer(MODEL, size, args, ROWS, peft_config=LORA).train()
    trainer = make(workflow=Pair(), policy="ip")
    before = weights(trainer)
    with pytest.raises(ValueError, match=r"holds the adapters \['default'\] and none for .*PeftModel.from_pretrained"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "stock" / "checkpoint-1"))
    assert_equal(before, weights(trainer))


def test_a_checkpoint_of_another_map_over_the_same_adapters_is_refused(make, tmp_path):
    one = {"workflow": Pair(), "save_strategy": "steps", "save_steps": 1}
    make(policy="writer=a,judge=b", max_steps=1, **one).train()
    folder = str(tmp_path / "out" / "checkpoint-1")
    with pytest.raises(ValueError, match="was trained with the policy map.*but this run has"):
        make(policy="writer=b,judge=a", folder=tmp_path / "b", **one).train(resume_from_checkpoint=folder)
    with pytest.raises(ValueError, match=r"also holds the adapters \['adapter_b'\], which this run does not have"):
        make(policy="writer=a,judge=a", folder=tmp_path / "c", **one).train(resume_from_checkpoint=folder)
    make(policy="writer=a,judge=b", folder=tmp_path / "d", **one).train(resume_from_checkpoint=folder)


@pytest.mark.parametrize("named", ["last", "path"])
def test_resume_from_checkpoint_in_the_configuration_resumes(make, tmp_path, named):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole = make(**options)
    whole.train()
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "checkpoint-2").rglob("*")}
    last = tmp_path / "out" / "checkpoint-3"
    last.rename(tmp_path / "elsewhere")
    again = make(resume_from_checkpoint=True if named == "last" else str(tmp_path / "out" / "checkpoint-2"), **options)
    again.train()
    assert_equal(weights(whole), weights(again))
    assert written == {path: path.stat().st_mtime_ns for path in written}


def test_kl_is_measured_from_an_adapter_as_it_was_given(make):
    torch.manual_seed(0)
    model = peft_model(init_lora_weights=False)
    trainer = make(model=model, peft_config=None, beta=0.5, max_steps=3, learning_rate=0.05)
    initial = weights(trainer)
    trainer.train()
    kl = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[2] > 1e-4
    with trainer.reference.applied():
        assert_equal(initial, weights(trainer))
    assert any(not torch.equal(v, initial[n]) for n, v in weights(trainer).items())


def test_kl_of_fresh_adapters_is_measured_from_the_base(make):
    trainer = make(model=peft_model(), peft_config=None, beta=0.5)
    assert trainer.reference.is_base


# ---- epochs, evaluations and what they log


def test_epochs_are_those_of_trl(make):
    trainer = make(max_steps=-1, num_train_epochs=2, eval_dataset=ROWS.select(range(2)), eval_strategy="epoch", save_strategy="epoch",
                   generation_batch_size=16)  # fmt: skip
    trainer.train()  # four problems in an iteration of six rows: TRL makes one iteration per epoch
    history = trainer.state.log_history
    assert trainer.state.global_step == 2 and sum("eval_reward" in row for row in history) == 2
    assert [row["epoch"] for row in history if "reward" in row] == pytest.approx([4 / 6, 8 / 6])


def test_an_evaluation_shows_and_saves_its_own_episodes(make, tmp_path, capsys):
    evaluated = Dataset.from_list([{"prompt": "7+2"}, {"prompt": "8+2"}])
    trainer = make(log_completions=True, eval_dataset=evaluated, eval_strategy="steps", eval_steps=1, max_steps=1)
    trainer.train()
    folder = tmp_path / "out" / "completions"
    table = pd.read_parquet(folder / "eval_completions_00001.parquet")
    assert list(table["prompt"]) == ["7+2", "8+2"] and all(table["completion"].str.startswith("[generator 0.0]"))
    assert list(table["size"]) and list(table["advantage"]) == [0.0, 0.0]
    assert set(pd.read_parquet(folder / "completions_00001.parquet")["prompt"]) <= set(ROWS["prompt"])
    assert "7+2" in capsys.readouterr().out


def test_the_table_of_an_evaluation_has_a_prompts_episodes_one_after_another(make, tmp_path):
    asked = []

    def reward(prompts, completions, **_):
        asked.extend(prompts)
        return size(completions)

    evaluated = Dataset.from_list([{"prompt": "7+2"}, {"prompt": "8+2"}])
    make(reward, log_completions=True, num_generations_eval=2).evaluate(evaluated)
    table = pd.read_parquet(tmp_path / "out" / "completions" / "eval_completions_00000.parquet")
    assert list(table["prompt"]) == asked == ["7+2", "7+2", "8+2", "8+2"]


def test_an_evaluation_reports_a_loss(make):
    """It is the objective at a ratio of 1: minus the mean advantage, over rows or over tokens."""
    episodes = []

    def reward(completions, episodes: list, **_):
        evaluated.extend(episodes)
        return [float(e.index) for e in episodes]

    evaluated = episodes
    by_rows = make(reward, eval_dataset=ROWS, num_generations_eval=2).evaluate()
    assert by_rows["eval_loss"] == pytest.approx(0, abs=1e-12)
    episodes.clear()
    by_tokens = make(reward, eval_dataset=ROWS, num_generations_eval=2, loss_type="bnpo").evaluate()
    lengths = [sum(len(turn.completion_ids) for turn in e.turns) for e in episodes]
    signs = [(-1) ** (e.index + 1) for e in episodes]  # of two, the second has the advantage 1 / sqrt(2)
    expected = -sum(n * s for n, s in zip(lengths, signs, strict=True)) / sum(lengths) / 2**0.5
    assert by_tokens["eval_loss"] == pytest.approx(expected)


def test_the_best_checkpoint_may_be_chosen_by_loss(make):
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = make(eval_dataset=ROWS.select(range(2)), metric_for_best_model="loss", **options)
    trainer.train()
    losses = {row["step"]: row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row}
    best = min(losses, key=losses.__getitem__)
    assert len(losses) > 1 and trainer.state.best_metric == losses[best]
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")


def adapter_in(folder, name):
    return {
        key.replace(".weight", f".{name}.weight"): value
        for key, value in load_file(folder / name / "adapter_model.safetensors").items()
    }


def test_the_best_adapters_are_loaded_at_the_end(make, tmp_path):
    """This holds for every role, and the engine samples from these adapters."""
    rewards = iter([3.0, 5.0, 1.0, 4.0, 5.0])

    def reward(completions, episodes, **_):
        if len(completions) == 2:  # an evaluation
            return [next(rewards)] * 2
        return size(completions)

    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    trainer = make(reward, workflow=Pair(), policy="ip", eval_dataset=ROWS.select(range(2)), load_best_model_at_end=True,
                   metric_for_best_model="reward", **options)  # fmt: skip
    played = []
    trainer.add_callback(EvaluatedTexts(played))
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    saved = {}
    for name in trainer.adapters:
        saved |= adapter_in(tmp_path / "out" / "checkpoint-2", name)
    assert_equal(saved, weights(trainer))
    last = adapter_in(tmp_path / "out" / "checkpoint-4", trainer.adapters[0])
    assert any(not torch.equal(value, saved[name]) for name, value in last.items())
    trainer.evaluate()
    assert played[4] == played[1] != played[3]


class EvaluatedTexts(MultiRoleCallback):
    def __init__(self, played):
        self.played = played

    def on_episodes_evaluated(self, trainer, episodes, metrics, prefix):
        self.played.append([turn.logprobs for episode in episodes for turn in episode.turns])


def test_comparing_checkpoints_by_their_loss_is_warned_of(make, caplog):
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    for metric in (None, "reward"):
        make(eval_dataset=ROWS, load_best_model_at_end=True, metric_for_best_model=metric, **options)
    assert caplog.text.count("does not say which is best") == 1 and "metric_for_best_model='loss'" in caplog.text


def test_functions_of_one_name_are_averaged_in_evaluations_too(make):
    trainer = make(
        [lambda completions, **_: [1.0] * len(completions), lambda completions, **_: [3.0] * len(completions)]
    )
    trainer.train()
    assert trainer.state.log_history[0]["rewards/<lambda>/mean"] == 2.0
    assert trainer.evaluate(ROWS)["eval_rewards/<lambda>/mean"] == 2.0


def test_predict_is_an_evaluation(make):
    trainer = make()
    assert (
        trainer.predict(ROWS.select(range(2))).metrics["test_reward"]
        == trainer.evaluate(ROWS.select(range(2)))["eval_reward"]
    )
    assert "test_loss" in trainer.predict(ROWS.select(range(2)).to_iterable_dataset()).metrics
    with pytest.raises(ValueError, match='`test_dataset` needs a "prompt" column'):
        trainer.predict(ROWS.rename_column("prompt", "q"))


def test_the_first_log_after_predict_is_that_of_an_iteration(make, tmp_path):
    trainer = make(log_completions=True, max_steps=1)
    trainer.predict(ROWS)
    trainer.train()
    (table,) = (tmp_path / "out" / "completions").iterdir()
    assert table.name == "completions_00001.parquet" and len(pd.read_parquet(table)) == 8


def test_metrics_of_callbacks_carry_the_evaluations_prefix(make):
    class Sees(MultiRoleCallback):
        def on_episodes_evaluated(self, trainer, episodes, metrics, prefix):
            metrics[f"{prefix}_turns"] = sum(len(episode.turns) for episode in episodes)

    trainer = make(eval_dataset={"a": ROWS, "b": ROWS.select(range(2))})
    trainer.add_callback(Sees())
    metrics = trainer.evaluate() | trainer.predict(ROWS).metrics
    assert (metrics["eval_a_turns"], metrics["eval_b_turns"], metrics["test_turns"]) == (6, 2, 6)


class ScheduleFree(torch.optim.SGD):
    """An optimizer that steps in its training mode alone, as those of the package schedulefree do."""

    is_training = False

    def train(self):
        self.is_training = True

    def eval(self):
        self.is_training = False

    def step(self, closure=None):
        assert self.is_training
        return super().step(closure)


def test_an_optimizer_with_modes_is_switched_between_them(tmp_path):
    modes = []

    def reward(completions, **_):
        modes.append((len(completions), optimizer.is_training))
        return size(completions)

    model = peft_model()
    optimizer = ScheduleFree([p for name, p in model.named_parameters() if "lora" in name], lr=0.1)
    args = config(tmp_path, eval_strategy="steps", eval_steps=1)
    MultiRoleGRPOTrainer(
        model, Single(), reward, args, ROWS, ROWS.select(range(2)), AutoTokenizer.from_pretrained(MODEL), optimizers=(optimizer, None)
    ).train()  # fmt: skip
    assert modes == [(8, True), (2, False)] * 2


def test_a_schedule_free_optimizer_is_refused():
    """It weighs the average of the weights by steps that it counts for all adapters at once."""
    optimizer = ScheduleFree([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.param_groups[0] |= {"k": 0, "weight_sum": 0.0}
    with pytest.raises(ValueError, match="`optimizers` has a `ScheduleFree`, a schedule-free optimizer"):
        MultiRoleGRPOTrainer(peft_model(), Single(), size, optimizers=(optimizer, None))


def test_the_entropy_coefficient_of_one_adapter_is_a_number(make, tmp_path):
    """As in TRL, in the trainer and in its checkpoints."""
    options = {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 15.0, "entropy_coef_delta": 0.005}
    trainer = make(save_strategy="steps", save_steps=1, **options)
    trainer.train()
    assert trainer.entropy_coef == pytest.approx(0.02)
    saved = json.loads((tmp_path / "out" / "checkpoint-1" / "entropy_ctrl_state.json").read_text())
    assert saved["entropy_coef"] == pytest.approx(0.015) and 0 < saved["last_world_entropy"] < 15


def test_the_entropy_mask_outside_a_loss_is_trls():
    """TRL's tests call it on a stand-in for a trainer. A threshold of 0.8 keeps two of ten tokens."""
    trainer = Mock(spec=MultiRoleGRPOTrainer)
    trainer.accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, pad_across_processes=lambda x, **_: x)
    entropies, mask = torch.arange(12.0).view(2, 6), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    selected = MultiRoleGRPOTrainer.get_high_entropy_mask(trainer, entropies, mask, 0.8)
    assert selected.nonzero().tolist() == [[1, 2], [1, 3]]


@pytest.mark.parametrize("strategy", ["epoch", "steps"])
def test_an_evaluation_without_a_dataset_is_refused_in_the_words_of_the_user(tmp_path, strategy):
    with pytest.raises(ValueError, match=f"^`eval_strategy='{strategy}'` evaluates, and there is no `eval_dataset`"):
        MultiRoleGRPOTrainer(
            "no/such/model", Single(), size, config(tmp_path, eval_strategy=strategy), ROWS, peft_config=LORA
        )
