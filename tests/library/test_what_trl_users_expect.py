"""Features of TRL that work unchanged: saving and loading, trackers, model cards, epochs, resume."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import ParallelismConfig
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PeftModel
from toy_qwen3 import toy_base
from trainers import SUMS
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer, RoleDiagnostics, Voting, user
from multirole.callbacks import MultiRoleCallback
from multirole.chat.templates import chat_template
from multirole.inputs.adapters import add_adapters
from multirole.inputs.arguments import facts_before_loading
from multirole.inputs.problems import check_dataset, to_problems
from multirole.inputs.streams import read_whole
from multirole.saving.model_card import base_of
from multirole.update.processes import check_launch

ROWS = Dataset.from_list([{"prompt": f"{a}+{b}-3", "answer": a + b - 3} for a in range(4, 10) for b in range(1, 5)])


def parity(prompts, completions, answer, **kwargs):
    """Stands in for a grade: a random model gets both values."""
    return [float((len(text) + right) % 2) for text, right in zip(completions, answer, strict=True)]


@pytest.fixture(scope="module")
def model_folder():
    return Path(toy_base())


@pytest.fixture(scope="module")
def train(model_folder):
    """train(folder, **options) -> a finished trainer of Voting-IP on the toy model: two iterations of eight episodes."""

    def run(folder, resume=None, processing_class=None, callbacks=(), **options):
        settings = {
            "policy": "ip", "generation_batch_size": 8, "num_generations": 4, "max_steps": 2,
            "max_completion_length": 8, "learning_rate": 1e-3, "logging_steps": 1, "save_steps": 1, "bf16": False,
            "per_device_train_batch_size": 8, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True,
        } | options  # fmt: skip
        trainer = MultiRoleGRPOTrainer(
            str(model_folder), Voting(2, prompts=SUMS), parity, MultiRoleGRPOConfig(str(folder), **settings), ROWS,
            ROWS.select(range(4)), processing_class, peft_config=LoraConfig(r=4, target_modules="all-linear"),
            callbacks=[RoleDiagnostics(), *callbacks],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run


@pytest.fixture(scope="module")
def trained(train, tmp_path_factory) -> MultiRoleGRPOTrainer:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("trained")
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "log"))
        return train(folder, report_to="tensorboard")


def adapters(trainer):
    return {n: p.detach().clone() for n, p in trainer.peft_model.named_parameters() if "lora" in n}


def test_a_saved_adapter_loads_in_three_lines(trained, model_folder, tmp_path):
    trained.save_model(tmp_path / "saved")

    base = AutoModelForCausalLM.from_pretrained(model_folder)
    model = PeftModel.from_pretrained(base, tmp_path / "saved" / "aggregator")
    ids = torch.arange(5, 25)[None]

    trained.peft_model.set_adapter("aggregator")
    trained.peft_model.eval()
    assert torch.equal(model(ids).logits, trained.peft_model(ids).logits)


def test_adapters_of_user_defined_roles_are_saved_under_the_documented_name(train, tmp_path):
    trainer = train(tmp_path, policy="generator=writer,aggregator=editor", max_steps=1)
    trainer.save_model(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir() if path.is_dir()} == {
        "adapter_writer",
        "adapter_editor",
    }


def test_template_options_reach_the_prompts(train, tmp_path, model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = tokenizer.chat_template + "{{ suffix }}"
    options = {"max_steps": 1, "chat_template_kwargs": {"suffix": "7"}, "processing_class": tokenizer}
    trainer = train(tmp_path, **options)
    prompt = trainer.rollout.render(tokenizer, [user("1+1")])
    assert tokenizer.decode(prompt).endswith("7") and prompt[:-1] == chat_template(tokenizer, [user("1+1")], suffix="")


def test_a_dataset_without_prompts_is_refused_before_training(train, tmp_path, model_folder):
    for name, rows in (("train_dataset", [{"prompt": "1"}]), ("eval_dataset", Dataset.from_list([{"question": "1"}]))):
        with pytest.raises((TypeError, ValueError), match=name):
            MultiRoleGRPOTrainer(
                str(model_folder), Voting(2), parity, MultiRoleGRPOConfig(str(tmp_path), bf16=False),
                **({"train_dataset": ROWS} | {name: rows}), peft_config=LoraConfig(),
            )  # fmt: skip


def test_a_resumed_run_ends_as_an_unbroken_one(train, tmp_path):
    unbroken = train(tmp_path / "a", max_steps=3)
    resumed = train(tmp_path / "b", max_steps=3, resume=str(tmp_path / "a" / "checkpoint-1"))
    assert all(torch.equal(value, adapters(resumed)[name]) for name, value in adapters(unbroken).items())


def test_trackers_and_cards_get_role_metrics(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = Path(trained.args.output_dir)
    events = EventAccumulator(str(next(folder.rglob("events.out*")).parent)).Reload()
    assert {"train/generator/entropy", "train/aggregator/chi2", "train/reward"} <= set(events.Tags()["scalars"])


def test_model_cards_name_the_roles_and_no_local_path(trained, model_folder, tmp_path):
    """PEFT's template had "[More Information Needed]" 40 times, and both its card and TRL's named the base by its path, or "None"."""
    folder = Path(trained.args.output_dir)
    trained.save_model(tmp_path / "saved")
    trained.peft_model.save_pretrained(tmp_path / "also")
    trained.create_model_card(model_name="voting", dataset_name="me/sums")
    cards = [path / "README.md" for path in (folder, folder / "checkpoint-2", tmp_path / "saved", tmp_path / "also")]
    for text in (card.read_text() for card in cards):
        assert not re.search(rf"{model_folder.parent}|More Information|None|: license", text)
        assert (
            "| aggregator | `aggregator` |" in text
            and f"the base model {model_folder.name}" in text
            and "\n- multi-role\n" in text
        )
        assert 'PeftModel.from_pretrained(base, ".", subfolder="generator")' in text and "- TRL: 1.16.0" in text
    assert cards[0].read_text().count("me/sums") == 3 and "# voting\n" in cards[0].read_text()
    cards[0].write_text("mine")
    trained.save_model(folder)
    assert cards[0].read_text() == "mine"  # of the user


def test_the_base_in_a_model_card_is_an_id_of_the_hub_or_a_plain_name(tmp_path):
    cached = "/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de"
    assert base_of("Qwen/Qwen3-0.6B") == base_of(cached) == ("Qwen/Qwen3-0.6B", True)
    assert base_of("gpt2") == ("gpt2", True) and base_of("") == ("", False)
    assert base_of(str(tmp_path)) == base_of(f"{tmp_path}/") == (tmp_path.name, False)
    assert base_of("/gone/base") == base_of("./gone/base") == ("base", False)


def test_epochs_become_iterations(train, tmp_path):
    trainer = train(tmp_path, max_steps=-1, num_train_epochs=0.2)
    assert trainer.state.global_step == math.ceil(0.2 * len(ROWS) / 2) == 3  # two problems per iteration


def test_evaluation_reports_the_reward(trained):
    metrics = trained.evaluate()
    assert 0 <= metrics["eval_reward"] <= 1
    both = trained.evaluate({"a": ROWS.select(range(2)), "b": ROWS.select(range(3))})
    assert {"eval_a_reward", "eval_b_reward", "eval_b_runtime"} <= set(both)


def test_the_logged_loss_metrics_do_not_depend_on_micro_batches(train, tmp_path):
    """They are means over completion tokens; TRL's own are means over micro-batches, whose sizes differ."""
    names = (
        "entropy",
        "reward",
        "clip_ratio/region_mean",
        "clip_ratio/high_max",
        "generator/length_mean",
        "generator/truncated_rate",
    )
    logs = [
        train(tmp_path / str(size), micro_batch_tokens=size, max_steps=1).state.log_history[0] for size in (16384, 200)
    ]
    assert logs[0]["step_time"] > 0 and [logs[0][n] for n in names] == pytest.approx(
        [logs[1][n] for n in names], abs=1e-6
    )


def test_the_configuration_keeps_what_was_given(train, tmp_path):
    assert train(tmp_path, beta=0.04, max_steps=1).args.beta == 0.04


def test_a_norm_of_zero_turns_clipping_off(train, tmp_path):
    """Zero, as in HF; a norm that is never reached gives the same weights."""
    free, wide = (adapters(train(tmp_path / str(norm), max_grad_norm=norm, max_steps=1)) for norm in (0.0, 1e9))
    assert all(torch.equal(value, wide[name]) for name, value in free.items())
    assert any(value.abs().max() > 0 for name, value in free.items() if "lora_B" in name)


def test_every_checkpoint_that_is_pushed_has_the_adapters(train, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", lambda self, folder: None)
    trainer = train(tmp_path, max_steps=1)
    trainer._push_from_checkpoint(str(tmp_path / "checkpoint-1"))
    for name in ("generator", "aggregator"):
        pushed = (tmp_path / name / "adapter_model.safetensors").read_bytes()
        assert pushed == (tmp_path / "checkpoint-1" / name / "adapter_model.safetensors").read_bytes()


class Evaluates(MultiRoleCallback):
    """Evaluates between the rollout and the update."""

    def on_rollout_end(self, trainer, episodes):
        trainer.evaluate()


def test_an_evaluation_within_an_iteration_leaves_the_update_as_it_is(train, tmp_path):
    plain, evaluated = train(tmp_path / "plain"), train(tmp_path / "evaluated", callbacks=[Evaluates()])
    logs = [
        [log for log in trainer.state.log_history if "entropy" in log and "eval_reward" not in log]
        for trainer in (plain, evaluated)
    ]
    assert len(logs[0]) == len(logs[1]) == 2 and [log["entropy"] for log in logs[0]] == [
        log["entropy"] for log in logs[1]
    ]
    assert not any("eval_entropy" in log for log in evaluated.state.log_history)


def test_a_resumed_run_compares_the_gap_to_the_sampler_with_its_first_iteration(train, tmp_path):
    whole = train(tmp_path, old_logprobs="recomputed")
    resumed = train(tmp_path, resume=str(tmp_path / "checkpoint-1"), old_logprobs="recomputed")
    gaps = resumed.run_state.sampler_gaps
    assert set(gaps) == {"aggregator", "generator"} and gaps == whole.run_state.sampler_gaps


def two_groups(rate_a, rate_b):
    """Return a `create_optimizer` with a group for the matrices A, at rate a, and one for the matrices B."""

    def create(self, model=None):
        self.peft_model.set_requires_grad(self.adapters, True)
        named = [(name, p) for name, p in self.peft_model.named_parameters() if p.requires_grad]
        parts = [[p for name, p in named if ("lora_B" in name) is is_b] for is_b in (False, True)]
        self.optimizer = torch.optim.AdamW([{"params": parts[0], "lr": rate_a}, {"params": parts[1], "lr": rate_b}])
        return self.optimizer

    return create


def test_an_optimizers_groups_keep_their_own_rates(train, tmp_path, monkeypatch):
    """The ratios of the groups' rates are kept, as `peft.optimizers.create_loraplus_optimizer` needs."""

    monkeypatch.setattr(MultiRoleGRPOTrainer, "create_optimizer", two_groups(1e-4, 16e-4))
    trainer = train(tmp_path, max_steps=2, lr_scheduler_type="constant")
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    assert rates[1] == pytest.approx(16 * rates[0]) and rates[0] > 0


def test_a_head_in_float32_is_refused_where_it_is_the_embeddings(train, tmp_path):
    with pytest.raises(
        ValueError, match="`cast_lm_head_to_fp32=True` does not work with this model.*Leave it at False"
    ):
        train(tmp_path, cast_lm_head_to_fp32=True)


def test_adapters_that_change_the_base_cannot_share_it(model_folder):
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa")
    args = MultiRoleGRPOConfig("unused", use_cpu=True)
    with pytest.raises(ValueError, match="`init_lora_weights='pissa'` changes the base model, so 2 adapters"):
        args.check(**facts_before_loading(args, {"x": "a", "y": "b"}, base, config, [len], None, base))
    args.check(**facts_before_loading(args, {"x": "a"}, base, config, [len], None, base))
    assert list(add_adapters(base, config, ["a"]).peft_config) == ["a"]


def test_the_logged_kl_is_a_mean_over_the_tokens_that_have_one(train, tmp_path):
    """TRL logs it for the micro-batches with a KL term alone, here the aggregator's."""
    kl = []
    for size in (150, 16384):
        trainer = train(
            tmp_path / str(size), micro_batch_tokens=size, role_beta={"aggregator": 0.1}, learning_rate=0.05
        )
        kl.append(trainer.state.log_history[1]["kl"])
    assert kl[0] == pytest.approx(kl[1], rel=1e-3) and kl[0] > 1e-4


class SlowAggregator(MultiRoleCallback):
    """Halves the rate of one adapter, as a user who wants a rate per role may do."""

    def __init__(self):
        self.rates = []

    def on_learning_rate(self, trainer, adapter, lr):
        return lr / 2 if adapter == "aggregator" else lr

    def on_adapter_step(self, trainer, step):
        self.rates.append((step.adapter, step.lr))


def test_a_callback_sets_the_rate_of_an_adapter_and_the_log_has_it(train, tmp_path):
    watcher = SlowAggregator()
    trainer = train(tmp_path, learning_rate=0.01, max_steps=4, lr_scheduler_type="linear", callbacks=[watcher])
    rates = dict.fromkeys(watcher.rates)
    expected = [(0.01, 0.005), (0.0075, 0.00375), (0.005, 0.0025), (0.0025, 0.00125)]
    assert [lr for name, lr in rates if name == "generator"] == pytest.approx([whole for whole, _ in expected])
    assert [lr for name, lr in rates if name == "aggregator"] == pytest.approx([half for _, half in expected])
    assert [row["learning_rate"] for row in trainer.state.log_history[:4]] == pytest.approx(
        [half for _, half in expected]
    )


class FreezeAggregator(MultiRoleCallback):
    def on_rows(self, trainer, rows):
        return [row for row in rows if row.turn.role != "aggregator"]


def test_a_role_whose_rows_are_left_out_keeps_its_weights(train, tmp_path):
    whole = train(tmp_path / "whole", weight_decay=0.1, callbacks=[FreezeAggregator()])
    frozen = train(tmp_path / "still", weight_decay=0.1, learning_rate=0.0)
    weights, start = adapters(whole), adapters(frozen)
    assert all(torch.equal(weights[name], start[name]) for name in weights if "aggregator" in name)
    assert any(not torch.equal(weights[name], start[name]) for name in weights if "generator" in name)
    resumed = train(
        tmp_path / "resumed", tmp_path / "whole" / "checkpoint-1", weight_decay=0.1, callbacks=[FreezeAggregator()]
    )
    assert all(torch.equal(value, weights[name]) for name, value in adapters(resumed).items())


def test_one_process_uses_one_of_a_nodes_gpus(model_folder, tmp_path):
    """HF counts all that are visible, and TRL refuses more than one in a process."""
    args = MultiRoleGRPOConfig(str(tmp_path), generation_batch_size=8, num_generations=4, bf16=False, report_to="none")
    args._n_gpu = 8
    trainer = MultiRoleGRPOTrainer(
        str(model_folder), Voting(2, prompts=SUMS), parity, args, ROWS, peft_config=LoraConfig(r=4)
    )
    assert trainer.args.n_gpu == 1 and trainer.args.train_batch_size == 8 and args.n_gpu == 8


@pytest.mark.parametrize("kind", ["tp_size", "cp_size", "sp_size"])
def test_processes_that_share_a_row_are_refused(kind):
    """Every process computes micro-batches of its own, which tensor and context parallelism do not allow."""
    accelerator = SimpleNamespace(parallelism_config=ParallelismConfig(**{kind: 2}), scaler=None)
    with pytest.raises(ValueError, match="several processes compute one row"):
        check_launch(accelerator, is_sharded=False, is_deepspeed=False)
    accelerator.parallelism_config = ParallelismConfig(dp_replicate_size=2)
    check_launch(accelerator, is_sharded=False, is_deepspeed=False)


def test_a_streamed_evaluation_set_keeps_columns_that_its_first_row_lacks():
    rows = [{"prompt": "1+1"}, {"prompt": "2+2", "answer": 4}]
    assert list(read_whole("eval_dataset", IterableDataset.from_generator(lambda: iter(rows)))) == [
        {"prompt": "1+1", "answer": None}, rows[1]
    ]  # fmt: skip


def test_a_column_of_images_is_refused():
    with pytest.raises(ValueError, match="has a column 'image', but only text prompts are supported"):
        check_dataset("train_dataset", Dataset.from_list([{"prompt": "1+1", "image": "a.png"}]))


def test_ids_that_name_two_rows_are_refused():
    with pytest.raises(ValueError, match="names 2 rows '7'"):
        to_problems(Dataset.from_list([{"prompt": "1+1", "id": 7}, {"prompt": "2+2", "id": 7}]))
    for rows in (
        [{"prompt": "1+1"}, {"prompt": "1+1"}],
        [{"prompt": "1+1", "id": None}, {"prompt": "1+1", "id": None}],
    ):
        assert [p.id for p in to_problems(Dataset.from_list(rows))] == ["0", "1"]


def test_evaluation_leaves_nothing_in_the_next_training_log(model_folder, tmp_path):
    seen = []

    def logged(prompts, completions, log_metric, log_extra, **columns):
        log_metric("n", float(len(completions)))
        log_extra("length", [len(text) for text in completions])
        seen.append(len(completions))
        return [0.5 if len(text) % 2 else 0.0 for text in completions]

    args = MultiRoleGRPOConfig(
        str(tmp_path), generation_batch_size=8, num_generations=4, max_steps=2, max_completion_length=8, logging_steps=1, bf16=False,
        gradient_checkpointing=False, report_to="none", disable_tqdm=True, eval_strategy="steps", eval_steps=1, save_strategy="no",
    )  # fmt: skip
    trainer = MultiRoleGRPOTrainer(
        str(model_folder), Voting(2, prompts=SUMS), logged, args, ROWS, ROWS.select(range(20)),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    assert not trainer._pending_extra_logs, "TRL would put them into the next iteration's table of completions"
    assert [row["n"] for row in trainer.state.log_history if "n" in row] == [8.0, 8.0] and 20 in seen
    evaluated = [row for row in trainer.state.log_history if "eval_reward" in row]
    assert [row["eval_n"] for row in evaluated] == [20.0] * len(evaluated)
    assert all(row["eval_rewards/logged/mean"] == pytest.approx(row["eval_reward"]) for row in evaluated) and evaluated


def test_resuming_with_other_adapters_is_refused(train, tmp_path):
    """Otherwise the trained weights would be dropped silently and fresh ones trained."""
    train(tmp_path, max_steps=1)
    with pytest.raises(
        ValueError, match=r"holds the adapters \['aggregator', 'generator'\] and none for \['adapter_a'"
    ):
        train(tmp_path, max_steps=2, policy="generator=a,aggregator=b", resume=str(tmp_path / "checkpoint-1"))


class Rates(MultiRoleCallback):
    """Doubles the schedule's learning rate and notes the groups' rates of each optimizer step."""

    def __init__(self):
        self.factor, self.seen = 2.0, []

    def on_learning_rate(self, trainer, adapter, lr):
        return self.factor * lr

    def on_gradient_parts(self, trainer, adapter, parts, values):
        step = trainer.optimizer.step

        def noted(*args):
            self.seen.append([group["lr"] for group in trainer.optimizer.param_groups])
            trainer.optimizer.step = step
            return step(*args)

        trainer.optimizer.step = noted


def test_each_group_of_an_optimizer_keeps_its_schedule(train, tmp_path, monkeypatch):
    """Groups at 1e-4 and 3e-4, the second decaying by half per iteration; a callback's factor of 2 scales both."""

    def schedule(self, num_training_steps, optimizer=None):
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, [lambda t: 1.0, lambda t: 0.5**t])
        return self.lr_scheduler

    monkeypatch.setattr(MultiRoleGRPOTrainer, "create_optimizer", two_groups(1e-4, 3e-4))
    monkeypatch.setattr(MultiRoleGRPOTrainer, "create_scheduler", schedule)
    rates = Rates()
    trainer = train(tmp_path, callbacks=[rates], policy="sp", updates="one", max_steps=2)
    assert rates.seen == [pytest.approx([2e-4, 6e-4]), pytest.approx([2e-4, 3e-4])]
    assert [group["lr"] for group in trainer.optimizer.param_groups] == pytest.approx([1e-4, 0.75e-4])


def test_a_group_at_rate_0_stands_still(train, tmp_path, monkeypatch):
    monkeypatch.setattr(MultiRoleGRPOTrainer, "create_optimizer", two_groups(0.0, 1e-2))
    trainer = train(tmp_path, max_steps=1, lr_scheduler_type="constant", max_grad_norm=0.0)
    moved = {name for name, p in adapters(trainer).items() if "lora_B" in name and p.any()}
    assert moved and trainer.optimizer.param_groups[0]["lr"] == 0.0
    assert trainer.state.log_history[0]["grad_norm"] > 0  # reported without clipping as well


def test_a_gradient_that_is_not_finite_is_never_applied(train, tmp_path):
    class Broken(MultiRoleCallback):
        def on_gradient_parts(self, trainer, adapter, parts, values):
            if trainer.state.global_step == 1:
                values[0].fill_(math.nan)

    with pytest.raises(FloatingPointError, match="gradient of adapter 'generator' has the norm nan at iteration 2"):
        train(tmp_path, callbacks=[Broken()])
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def test_kl_is_0_at_the_start_also_if_the_adapter_took_over_a_part_of_the_base(model_folder, tmp_path):
    """PiSSA moves the base's principal components into the adapter; the reference is the policy that training begins with."""
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights="pissa")
    settings = {
        "policy": "sp",
        "generation_batch_size": 8,
        "num_generations": 4,
        "max_steps": 1,
        "beta": 0.1,
        "bf16": False,
    }
    settings |= {"max_completion_length": 24, "report_to": "none", "per_device_train_batch_size": 8}
    args = MultiRoleGRPOConfig(str(tmp_path), **settings)
    trainer = MultiRoleGRPOTrainer(str(model_folder), Voting(2, prompts=SUMS), parity, args, ROWS, peft_config=config)
    rows = trainer.prepare_rows(
        trainer._generate_and_score_completions([dict(trainer.train_rows[0]) for _ in range(8)])
    )
    for row, logps in zip(rows, trainer.logprobs_of(rows), strict=True):
        assert torch.allclose(row.ref_logps, logps, atol=1e-4)


def test_more_iterations_may_be_set_before_training(train, model_folder, tmp_path):
    """The rows of a stream and the order of rollouts that are played ahead follow `max_steps` of the present arguments."""
    for name, data in (("stream", ROWS.to_iterable_dataset()), ("ahead", ROWS)):
        played = []

        class Note(MultiRoleCallback):
            def on_rollout_end(self, trainer, episodes):
                played.append({episode.problem.id for episode in episodes})  # noqa: B023

        settings = {"policy": "sp", "generation_batch_size": 8, "num_generations": 4, "max_steps": 1, "bf16": False}
        settings |= {"max_completion_length": 8, "report_to": "none", "per_device_train_batch_size": 8}
        args = MultiRoleGRPOConfig(str(tmp_path / name), max_staleness=int(name == "ahead"), **settings)
        trainer = MultiRoleGRPOTrainer(
            str(model_folder), Voting(2, prompts=SUMS), parity, args, data, callbacks=[Note()],
            peft_config=LoraConfig(r=4, target_modules="all-linear"),
        )  # fmt: skip
        trainer.args.max_steps = 3
        trainer.train()
        assert len(played) == 3 and len(set.union(*played)) == 6  # two new problems each


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_config": None}, "no `peft_config` was given"),
        ({"engine": "no_module:Engine"}, "`engine='no_module:Engine'` cannot be loaded: ModuleNotFoundError"),
        ({"engine": "json:Engine"}, "`engine='json:Engine'` cannot be loaded: AttributeError"),
        ({"policy": {"generator": "a", "aggregator": None}}, r"has None for \['aggregator'\], but .* needs an adapter.*write 'frozen'"),
        ({"eval_dataset": Dataset.from_list([{"prompt": "1+1", "id": "a"}] * 2)}, 'The "id" column of `eval_dataset` names 2 rows'),
    ],
)  # fmt: skip
def test_mistakes_are_reported_before_the_model_is_loaded(tmp_path, change, message):
    options = {name: change.pop(name) for name in ("engine", "policy") if name in change}
    config = MultiRoleGRPOConfig(str(tmp_path), bf16=False, report_to="none", **options)
    arguments = {"peft_config": LoraConfig(r=4), "eval_dataset": None} | change
    with pytest.raises(ValueError, match=message):
        MultiRoleGRPOTrainer("no/such-model", Voting(2), parity, config, ROWS, **arguments)
