"""Kinds of faults that users of other trainers have reported: each test names the report that it is like."""

import functools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from toy_qwen3 import toy_base
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainerState
from trl.rewards import think_format_reward

from multirole import Answer, MultiRoleCallback, MultiRoleGRPOConfig, MultiRoleGRPOTrainer, Reward, Single, user
from multirole.chat.messages import normalised
from multirole.engines import vllm_colocate as vllm_engine
from multirole.engines.protocol import Completion
from multirole.engines.vllm_colocate import base_source
from multirole.inputs.epochs import EpochCount
from multirole.rollout.errors import WorkflowError
from multirole.rollout.replies import reply_text
from multirole.saving.checkpoints import check_checkpoint, resume_argument
from multirole.types import check_workflow

FOLDER = toy_base()
ROWS = [{"prompt": f"{i}+1"} for i in range(12)]
LORA = LoraConfig(r=4, target_modules="all-linear")


def length(completions, **_):
    return [len(text) % 7.0 for text in completions]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture
def build(tokenizer, tmp_path):
    """build(**options) -> a trainer of one role on the toy model: 2 problems of 4 short replies per iteration."""

    def trainer(
        reward=length, rows=ROWS, workflow=None, model=FOLDER, lora=LORA, callbacks=None, eval_rows=None, engine=None, **options
    ):  # fmt: skip
        if isinstance(engine, str):
            options, engine = options | {"engine": engine}, None
        settings = {
            "num_generations": 4, "per_device_train_batch_size": 8, "max_steps": 2, "max_completion_length": 8, "logging_steps": 1,
            "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        } | options  # fmt: skip
        args = MultiRoleGRPOConfig(str(tmp_path), **settings)
        return MultiRoleGRPOTrainer(
            model, workflow or Single(), reward, args, Dataset.from_list(rows), eval_rows and Dataset.from_list(eval_rows),
            tokenizer, callbacks=callbacks, peft_config=lora, engine=engine,
        )  # fmt: skip

    return trainer


class Play:
    """A workflow of one role whose `run` is the function that it is made with."""

    name, roles = "play", {"writer": 1}

    def __init__(self, play):
        self.play = play

    async def run(self, problem, call):
        return await self.play(problem, call)


class Says:
    """An engine whose every reply is one text."""

    def __init__(self, tokenizer, reply):
        self.ids, self.keys = [*tokenizer(reply, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id], []

    def publish(self, model, version):
        pass

    def add(self, key, request):
        self.keys.append(key)

    def step(self):
        keys, self.keys = self.keys, []
        return [(key, Completion(self.ids, [-1.0] * len(self.ids), "stop")) for key in keys]

    def sleep(self):
        pass

    close = sleep


def test_episodes_do_not_share_the_lists_of_their_problem(build):
    """AReaL#432: a chat loop appends to the history, and the next episode of the problem starts from it."""
    lengths = []

    async def chat(problem, call):
        messages = problem.history
        messages.append(user(problem.question))
        problem.reference["tries"].append(1)
        lengths.append((len(messages), len(problem.reference["tries"])))
        return Answer((await call("writer", messages)).text)

    rows = [{"prompt": [{"role": "system", "content": "Be brief."}, user(f"{i}+1")], "tries": []} for i in range(2)]
    build(rows=rows, workflow=Play(chat)).train()
    assert set(lengths) == {(2, 1)} and len(lengths) == 16


def test_epochs_count_passes_over_the_rows(build, tmp_path):
    """trl#3668: rewards that follow `trainer_state.epoch`. Six iterations of two problems are a pass over twelve rows."""
    seen = []

    def reward(completions, trainer_state, **_):
        seen.append((round(trainer_state.epoch, 3), trainer_state.num_train_epochs))
        return length(completions)

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            assert state.epoch == pytest.approx(state.global_step / 6)

    options = {"max_steps": -1, "num_train_epochs": 2, "logging_steps": 5, "save_strategy": "steps", "save_steps": 4}
    build(reward, callbacks=[Watch()], **options).train()
    assert seen == [(round(i / 6, 3), 2) for i in range(12)]
    assert json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["epoch"] == pytest.approx(4 / 6)


def test_epochs_follow_rows_that_are_replaced(build):
    """Two problems per iteration: of 12 rows, of 24, of 4, and of a stream, for which HF's fraction of the run stays."""
    trainer = build(max_steps=3)
    ends = []
    for rows in (None, ROWS * 2, ROWS[:4]):
        if rows is not None:
            trainer.train_dataset = Dataset.from_list(rows)
        trainer.train()
        ends.append((trainer.state.epoch, trainer.state.num_train_epochs))
    assert ends == [(0.5, 1), (0.25, 1), (1.5, 2)]
    trainer.train_dataset = Dataset.from_list(ROWS).to_iterable_dataset()
    trainer.train()
    assert trainer.state.epoch == 1.0


def test_a_number_of_whole_epochs_is_not_rounded_up():
    """27 iterations of 7 problems over 3 rows: 27 * (7 / 3) is more than 63 in floating point."""
    trainer = SimpleNamespace(args=SimpleNamespace(n_problems=7), train_rows=range(3))
    state = TrainerState(max_steps=27, global_step=27)
    EpochCount(trainer).on_train_begin(None, state, None)
    assert (state.num_train_epochs, state.epoch) == (63, 63.0)


def test_an_evaluation_delay_counts_epochs_as_its_strategy_does(build):
    """transformers#16356."""
    trainer = build(eval_rows=ROWS[:1], eval_strategy="epoch", eval_delay=2, max_steps=-1, num_train_epochs=3)
    trainer.train()
    assert [row["step"] for row in trainer.state.log_history if "eval_reward" in row] == [12, 18]


REPLY = "<think>\n2 and 2\n</think>\n\\boxed{4}"


def test_rewards_of_thoughts_need_the_thoughts(build, tokenizer):
    """open-r1#560: a format reward that is always 0."""
    rows = [{"prompt": [user("2+2")]}]
    for reward in (think_format_reward, functools.partial(think_format_reward)):
        with pytest.raises(ValueError, match="`strip_thoughts=False`"):
            build(reward, rows)
    texts = []

    def seen(completions, **_):
        texts.append(completions[0][0]["content"])
        return think_format_reward(completions)

    for strips, text, reward in ((False, REPLY, 1.0), (True, "\\boxed{4}", 0.0)):
        trainer = build(
            seen, rows, engine=Says(tokenizer, REPLY), max_steps=1, max_completion_length=64, strip_thoughts=strips
        )
        trainer.train()
        assert texts[-1] == text and trainer.state.log_history[0]["reward"] == reward


@pytest.mark.parametrize("is_special", [False, True])
def test_tags_of_thoughts_may_be_special_tokens(is_special):
    """koboldcpp#1745: Magistral's [THINK] is a special token, which decoding leaves out."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    tokenizer.add_tokens(["[THINK]", "[/THINK]"], special_tokens=is_special)
    ids = [*tokenizer("[THINK]7 - 2[/THINK]5", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert reply_text(tokenizer, ids) == "5"
    assert reply_text(tokenizer, ids[: ids.index(tokenizer.convert_tokens_to_ids("[/THINK]"))]) == ""
    tokenizer.add_tokens(["<|call|>"], special_tokens=True)  # after the first reply
    assert reply_text(tokenizer, [*ids, tokenizer.convert_tokens_to_ids("<|call|>")]) == "5"


def test_vllm_serves_the_base_that_is_trained_and_not_that_of_an_adapters_training(build, tmp_path, monkeypatch):
    """trl#2698: an adapter trained on one base, loaded onto another."""
    for name in "AB":
        AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(tmp_path / name)
    trained = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "A"), LORA, "shared")
    trained.save_pretrained(tmp_path / "lora")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "B")
    model = PeftModel.from_pretrained(base, tmp_path / "lora" / "shared", "shared", is_trainable=True)
    assert model.peft_config["shared"].base_model_name_or_path == str(tmp_path / "A")
    assert base_source(model) == str(tmp_path / "B")
    base.hf_quantizer = SimpleNamespace(pre_quantized=True)  # its folder has the quantised weights
    assert base_source(model) == str(tmp_path / "B")
    base.hf_quantizer = SimpleNamespace(pre_quantized=False)  # as from `model_init_kwargs={"quantization_config": ...}`
    with pytest.raises(ValueError, match="quantised while it was loaded.*engine='generate'"):
        base_source(model)
    del base.hf_quantizer
    loaded = []
    monkeypatch.setattr(vllm_engine, "build_llm", lambda path, options: loaded.append(path))
    build(model=model, lora=None, engine="vllm")
    assert loaded == [str(tmp_path / "B")]


def test_an_adapter_loaded_by_transformers_is_not_replaced(build, tmp_path):
    """peft#2390. And the folder of an adapter is no model."""
    get_peft_model(AutoModelForCausalLM.from_pretrained(FOLDER), LORA).save_pretrained(tmp_path / "lora")
    with pytest.raises(ValueError, match=r"loaded by transformers.*PeftModel\.from_pretrained"):
        build(model=AutoModelForCausalLM.from_pretrained(tmp_path / "lora"))
    with pytest.raises(ValueError, match="is the folder of an adapter"):
        build(model=str(tmp_path / "lora"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.5),
        ("fp16_full_eval", True),
        ("use_vllm", True),
        ("generation_batch_size", 16),
        ("per_device_train_batch_size", 4),
        ("gradient_accumulation_steps", 2),
        ("steps_per_generation", 2),
        ("num_generations", 3),
        ("num_generations", 1),
        ("pad_to_multiple_of", 0),
        ("max_turns", 0),
    ],
)
def test_options_set_later_are_checked_too(build, tokenizer, tmp_path, name, value):
    args = MultiRoleGRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, num_generations=4, per_device_train_batch_size=8, report_to="none"
    )
    setattr(args, name, value)
    with pytest.raises(ValueError, match=name):
        MultiRoleGRPOTrainer(
            FOLDER, Single(), length, args, Dataset.from_list(ROWS), processing_class=tokenizer, peft_config=LORA
        )


def test_batches_are_not_split_once_more(tmp_path):
    with pytest.raises(ValueError, match="split_batches"):
        MultiRoleGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, accelerator_config={"split_batches": True})


def test_what_a_prompt_needs_of_the_template_cannot_be_set(tmp_path):
    with pytest.raises(ValueError, match=r"sets \['add_generation_prompt'\]"):
        MultiRoleGRPOConfig(
            str(tmp_path), use_cpu=True, bf16=False, chat_template_kwargs={"add_generation_prompt": False}
        )


def test_a_role_may_have_the_name_of_trls_metrics(build):
    async def write(problem, call):
        return Answer((await call("completions", [user(problem.question)])).text)

    workflow = Play(write)
    workflow.roles = {"completions": 1}
    trainer = build(workflow=workflow, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["completions/length_mean"] > 0


def test_numbers_of_numpy_reach_logs_and_checkpoints(build, tmp_path):
    """transformers#10299: float32 is not JSON serializable, at the first save after an evaluation."""

    def reward(completions, episodes, log_metric, **_):
        log_metric("mine", np.mean([0.5], dtype=np.float32))
        for episode in episodes:
            episode.reward = Reward(np.float32(1), is_correct=np.bool_(True))
            assert json.dumps(vars(episode.reward))
        return [1.0] * len(completions)

    class Adds(MultiRoleCallback):
        def on_iteration_end(self, trainer, iteration):
            iteration.roles.setdefault("generator", {})["number"] = torch.tensor(0.25)

        def on_episodes_evaluated(self, trainer, episodes, metrics, prefix):
            metrics[f"{prefix}_more"] = np.float64(0.75)

    build(
        reward, callbacks=[Adds()], eval_rows=ROWS[:1], eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1
    ).train()  # fmt: skip
    trained, evaluated = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())["log_history"][:2]
    assert trained["generator/number"] == 0.25
    assert (evaluated["eval_mine"], evaluated["eval_more"], evaluated["eval_accuracy"]) == (0.5, 0.75, 1.0)


async def half_a_character(problem, call):
    await call("writer", [user("1")])
    return Answer(json.loads('"\\ud83d"'))


async def a_round_with_a_name(problem, call):
    return Answer((await call("writer", [user("2")], round="final")).text)


async def a_cap_that_is_no_integer(problem, call):
    return Answer((await call("writer", [user("1")], max_tokens=4.0)).text)


@pytest.mark.parametrize(
    ("play", "message"),
    [
        (half_a_character, "lone surrogate"),
        (a_round_with_a_name, "Pass an integer"),
        (a_cap_that_is_no_integer, "Pass an integer of 1 or more"),
    ],
)
def test_mistakes_of_a_workflow_are_the_workflows(build, play, message, caplog):
    """inspect_ai#3802 and others. They count as failed episodes where those are allowed."""
    with pytest.raises(WorkflowError, match=message):
        build(workflow=Play(play)).train()
    build(workflow=Play(play), max_failed_episodes=8).train()
    assert re.search(f"No episode of iteration 1 has a turn.*{message}", caplog.text)


def test_a_token_without_an_embedding_is_named(build, tmp_path):
    """transformers#12763: tokens were added, and the embeddings not resized."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    tokenizer.add_tokens(["<new>"])
    trainer = MultiRoleGRPOTrainer(
        FOLDER, Single(), length, build().args, Dataset.from_list([{"prompt": "1<new>"}]), processing_class=tokenizer,
        peft_config=LORA,
    )  # fmt: skip
    with pytest.raises(WorkflowError, match=r"token '<new>' with id \d+.*resize_token_embeddings"):
        trainer.train()


@pytest.mark.parametrize("event", ["on_rows", "on_learning_rate"])
def test_a_callback_that_forgets_to_return_is_named(build, event):
    forgets = type("Forgets", (MultiRoleCallback,), {event: lambda self, *arguments: None})()
    with pytest.raises(TypeError, match=rf"`Forgets\.{event}` returned None"):
        build(callbacks=[forgets]).train()


def test_a_checkpoint_that_does_not_exist_is_said_not_to(tmp_path):
    """axolotl#2424."""
    policy = {"generator": "shared"}
    with pytest.raises(ValueError, match="There is no checkpoint"):
        check_checkpoint(tmp_path / "nowhere", policy, {"shared"}, is_sharded=False)
    (tmp_path / "checkpoint-20").mkdir()
    with pytest.raises(ValueError, match=r"Resume from .*checkpoint-20"):
        check_checkpoint(tmp_path, policy, {"shared"}, is_sharded=False)
    assert [resume_argument(None, value) for value in (None, "true", "false", "x")] == [None, True, None, "x"]


def test_run_may_be_static_or_decorated():
    def logged(run):
        @functools.wraps(run)
        def call(*arguments):
            return run(*arguments)

        return call

    async def run(problem, call):
        return Answer("")

    async def method(self, problem, call):
        return Answer("")

    for member in (staticmethod(run), logged(method), method):
        check_workflow(type("Flow", (), {"name": "flow", "roles": {"a": 1}, "run": member})())
    with pytest.raises(ValueError, match="async def run"):
        check_workflow(type("Flow", (), {"name": "flow", "roles": {"a": 1}, "run": lambda self, problem, call: None})())


def test_the_endpoint_keeps_names_and_thoughts_of_messages():
    """stdapi.ai#258: group chats send `name`."""
    sent = [
        {"role": "user", "name": "Alice", "content": "hi"},
        {"role": "assistant", "content": "x", "reasoning_content": "y"},
    ]
    assert normalised(sent) == sent
    with pytest.raises(ValueError, match="tool_calls"):
        normalised([{"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}])
