"""`MultiRoleGRPOConfig`: what it takes from TRL's, what it refuses and why, and how batch sizes translate."""

import ast
import copy
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
from trl import GRPOConfig, TrlParser

from multirole.option_rules import CHOICES, FACTS, REFUSED, RULES, broken_rules
from multirole.options import MultiRoleGRPOConfig
from multirole.trl_parts import GRPOTrainer
from multirole.workflows import Single

OTHER = {  # a value of each refused option that is not the one allowed
    "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "generation_kwargs": {"do_sample": True},
    "cache_implementation": "static", "use_transformers_continuous_batching": True, "use_transformers_paged": True,
    "vllm_tensor_parallel_size": 2, "transformers_continuous_batching_config": {"x": 1}, "vllm_max_model_length": 99,
    "vllm_model_impl": "transformers", "vllm_group_port": 5000, "ds3_gather_for_generation": False, "auto_find_batch_size": True,
    "bf16_full_eval": True, "fp16_full_eval": True,
    "vllm_structured_outputs_regex": "a+", "sync_ref_model": True, "ref_model_mixup_alpha": 0.5, "ref_model_sync_steps": 9,
    "deepspeed": "ds.json",
    "torch_compile": True, "fp16": True, "remove_unused_columns": True, "torch_empty_cache_steps": 10,
    "router_aux_loss_coef": 0.1, "max_tool_calling_iterations": 3,
}  # fmt: skip


def accepted(name: str) -> tuple:
    only, _ = REFUSED[name]
    return only if isinstance(only, tuple) else (only,)


def config(**options) -> MultiRoleGRPOConfig:
    return MultiRoleGRPOConfig("unused", use_cpu=True, report_to="none", bf16=False, **options)


def test_the_refused_options_exist_and_trls_defaults_are_accepted():
    defaults = {option.name: option.default for option in fields(GRPOConfig)}
    assert OTHER.keys() == REFUSED.keys() <= defaults.keys()
    plain = config()
    for name in REFUSED:
        assert getattr(plain, name) in (*accepted(name), None)
        for value in accepted(name):
            config(**{name: value})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}}, "sets `num_steps=4`.*generation_batch_size"),
        ({"optim": "lomo"}, "`optim='lomo'` steps in the backward pass"),
        ({"optim": "galore_adamw_layerwise"}, "steps in the backward pass"),
    ],
    ids=str,
)  # fmt: skip
def test_options_that_take_steps_inside_an_iteration_are_refused(options, why):
    with pytest.raises(ValueError, match=why):
        config(**options)


@pytest.mark.parametrize("name", REFUSED)
def test_each_refused_option_says_why(name):
    _, why = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(f"`{name}={OTHER[name]!r}`")) as error:
        config(**{name: OTHER[name]})
    assert why in str(error.value) and repr(accepted(name)[0]) in str(error.value)


def test_the_docs_show_the_table_of_refused_options():
    """One line per reason: the options that share it, in the table's order."""
    text = (Path(__file__).parents[2] / "docs" / "trl_options.md").read_text(encoding="utf-8")
    table = text.partition("## Options that are refused")[2].partition("\n## ")[0]
    names_of: dict[str, list[str]] = {}
    for name, (_, why) in REFUSED.items():
        names_of.setdefault(why, []).append(f"`{name}`")
    expected = [f"| {', '.join(names)} | {why} |" for why, names in names_of.items()]
    assert [line for line in table.splitlines() if line.startswith("| `")] == expected


def test_the_docs_show_the_table_of_options_that_trl_lacks():
    """The names, defaults and first sentences of `MultiRoleGRPOConfig`'s docstring."""
    arguments = inspect.getdoc(MultiRoleGRPOConfig).partition("Args:\n")[2]
    expected, shown = [], []
    for head, text in re.findall(r"^    (\w.*):\n((?:        .*(?:\n|$))+)", arguments, re.MULTILINE):
        options = re.findall(r"(\w+) \(`[^`]*`(?: or `[^`]*`)?, (?:defaults to (`[^`]*`)|\*optional\*)\)", head)
        names = [name for name, _ in options]
        sentence = re.split(r"(?<=[^.]\.)\s+", " ".join(text.split()), maxsplit=1)[0]
        sentence = re.sub(r"\[(`\w+`)\]", r"\1", sentence).replace("|", r"\|")
        expected.append(
            f"| {', '.join(f'`{name}`' for name in names)} | {', '.join(d or 'none' for _, d in options)} | {sentence} |"
        )
        shown += [(name, ast.literal_eval(default.strip("`")) if default else None) for name, default in options]
    inherited = {option.name for option in fields(GRPOConfig)}
    assert shown == [(o.name, o.default) for o in fields(MultiRoleGRPOConfig) if o.name not in inherited]
    page = (Path(__file__).parents[2] / "docs" / "scripts.md").read_text(encoding="utf-8")
    table = page.partition("## The options that TRL lacks")[2].partition("\n## ")[0]
    assert [line for line in table.splitlines() if line.startswith("| `")] == expected


def test_the_docs_name_each_option_of_trl_that_a_rule_reads_beside_another():
    text = (Path(__file__).parents[2] / "docs" / "trl_options.md").read_text(encoding="utf-8")
    section = text.partition("Others are refused in combination")[2].partition("\n## ")[0]
    options = {name for rule in RULES for name in rule.reads if len(rule.reads) > 1} & {
        o.name for o in fields(GRPOConfig)
    }
    named = set(re.findall(r"`(\w+)", section))
    families = ("vllm_server_", "vllm_importance_sampling_")
    assert {name for name in options if not name.startswith(families)} <= named


def test_rules_read_fields_and_facts_that_exist():
    """A rule that reads an unknown name would never be applied."""
    known = {option.name for option in fields(MultiRoleGRPOConfig)} | FACTS.keys()
    assert {name for rule in RULES for name in rule.reads} <= known
    assert FACTS.keys() <= {name for rule in RULES for name in rule.reads}  # and no fact is for nothing


def test_each_rule_of_refused_options_is_applied_to_its_own_option():
    """The rules of a table are made in a loop, in which a late binding would test the last entry for all."""
    assert not list(broken_rules({"top_p": 1.0, "top_k": -1}))
    (message,) = broken_rules({"top_p": 1.0, "top_k": 5, "min_p": None})
    assert message.startswith("`top_k=5` is not supported") and message.endswith("Leave it at 0.")
    (message,) = broken_rules({"max_turns": None, "step_rows": None})
    assert message == "`max_turns` must be a positive integer, got None."


def test_rules_that_need_a_fact_wait_for_it():
    args = config(max_staleness=1)
    args.check()
    with pytest.raises(ValueError, match="but Engine cannot: it shares weights or memory"):
        args.check(is_sharded=False, engine_class="Engine", plays_during_update=False)
    args.check(is_sharded=False, engine_class="Engine", plays_during_update=True)
    with pytest.raises(ValueError, match="FSDP2 shards it"):
        args.check(is_sharded=True, engine_class="Engine", plays_during_update=True)


def test_rules_read_facts_of_several_calls():
    args = config()
    args.check(past_roles=["judge"], frozen_adapter_roles=[])
    with pytest.raises(ValueError, match="FSDP2"):
        copy.copy(args).check(is_sharded=True)
    args.check()  # forgets them
    args.check(is_sharded=True)


def test_a_trainer_gives_every_fact(make_library_trainer):
    """A rule that reads a fact that nobody gives would never be applied."""
    known = make_library_trainer(Single(), num_generations=4, generation_batch_size=8).args.__dict__["_facts"]
    assert FACTS.keys() - known.keys() == {
        "changed",
        "asked_steps",
        "is_stream",
    }  # of every call, of some options, of streams


@pytest.mark.parametrize(
    ("options", "facts", "message"),
    [
        ({"role_beta": {"judge": 0.1}}, {"roles": ["solver"]}, r"`role_beta` names \['judge'\], but the roles are \['solver'\]"),
        ({"max_steps": 3, "save_strategy": "epoch"}, {"is_stream": True}, "so `save_strategy='epoch'` cannot be counted"),
        ({}, {"is_stream": True}, "so `num_train_epochs` cannot be counted. Set `max_steps`"),
        ({"eval_strategy": "steps"}, {"has_eval_dataset": False}, "`eval_strategy='steps'` evaluates, and there is no `eval_dataset`"),
        ({}, {"has_stream": True, "dispatch_batches": True}, "Iterable datasets require `dispatch_batches=False`"),
        ({"num_generations": 4, "generation_batch_size": 12}, {"world_size": 2}, "The 3 problems .* shared evenly by 2 processes"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_do_not_fit_the_run_are_refused(options, facts, message):
    args = config(**options)
    with pytest.raises(ValueError, match=message):
        args.check(**facts)


@pytest.mark.parametrize(
    "options", [{"vllm_enable_sleep_mode": True}, {"min_p": 0.0}, {"top_k": -1}, {"generation_kwargs": {}}], ids=str
)
def test_options_that_change_nothing_are_accepted(options):
    config(**options)


def test_bfloat16_is_off_without_a_gpu_unless_it_is_asked_for(monkeypatch):
    for has_gpu, use_cpu, bf16, result in (
        (False, False, None, False), (True, True, None, False), (True, False, None, True), (True, False, False, False),
    ):  # fmt: skip
        monkeypatch.setattr("multirole.options.is_torch_bf16_gpu_available", lambda has_gpu=has_gpu: has_gpu)
        monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
        args = MultiRoleGRPOConfig("unused", use_cpu=use_cpu, report_to="none", bf16=bf16)
        assert args.bf16 is result, (has_gpu, use_cpu, bf16)


@pytest.mark.parametrize(
    ("n_rows", "epochs", "max_steps", "per_epoch"),
    [(12, 2, 4, 2), (15, 2, 6, 3), (12, 0.5, 1, 2), (3, 2, 2, 1), (3, 10, 6, 1), (17, 1, 3, 3)],
)
def test_epochs_are_as_many_iterations_as_in_trl(n_rows, epochs, max_steps, per_epoch):
    """An iteration has five problems. TRL drops the remaining rows of an epoch and cannot train on fewer than five; here an
    iteration over fewer rows draws some of them again."""
    args = config(
        generation_batch_size=20,
        num_generations=4,
        num_train_epochs=epochs,
        save_strategy="epoch",
        logging_strategy="epoch",
    )
    args.set_epochs(n_rows)
    assert (args.max_steps, args.save_steps, args.logging_steps) == (max_steps, per_epoch, per_epoch)
    assert args.save_strategy == args.logging_strategy == "steps"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"updates": "often"}, r"`updates` must be one of \['per_batch', 'one', 'tokens'\], got 'often'"),
        ({"old_logprobs": "none"}, "`old_logprobs` must be one of"),
        (
            {"vllm_importance_sampling_mode": "tokens", "old_logprobs": "recomputed"},
            r"`vllm_importance_sampling_mode` must be one of \['token_truncate', .*got 'tokens'",
        ),
        (
            {"vllm_importance_sampling_clip_max": 0.0, "old_logprobs": "recomputed"},
            "`vllm_importance_sampling_clip_max` must be positive, got 0.0",
        ),
        (
            {"loss_type": "vespo", "old_logprobs": "recomputed"},  # TRL refuses it, too, with `use_vllm=True`
            "`loss_type='vespo'` multiplies.*mode='sequence_mask'.*set it to 'token_truncate' or 'token_mask'",
        ),
        ({"learning_rate": "1e-5"}, "`learning_rate` must be a number, got the text '1e-5'. YAML .* write 1.0e-5"),
        ({"num_generations": "8"}, "`num_generations` must be a number, got the text '8'"),
        ({"vllm_importance_sampling_mode": "token_mask"}, "has no effect.*Write old_logprobs='recomputed' too"),
        ({"vllm_importance_sampling_clip_max": 2.0}, "has no effect with `old_logprobs='sampled'`.*leave it at 3.0"),
        ({"vllm_importance_sampling_clip_min": 0.5}, "has no effect with `old_logprobs='sampled'`.*leave it at None"),
        ({"max_staleness": 1, "ignore_data_skip": True}, "`ignore_data_skip=True` would restart that order"),
        ({"max_failed_episodes": -1}, "`max_failed_episodes` must be 0 or more, got -1"),
        ({"torch_compile_backend": "eager"}, "`torch_compile=True` is not supported"),
        ({"micro_batch_tokens": 0}, "`micro_batch_tokens` must be a positive integer, got 0"),
        ({"max_prompt_tokens": -1}, "`max_prompt_tokens` must be a positive integer, got -1"),
        ({"num_iterations": 0}, "`num_iterations` must be a positive integer, got 0"),
        ({"pad_to_multiple_of": 0}, "`pad_to_multiple_of` must be a positive number of tokens, got 0"),
        (
            {"top_entropy_quantile": 1.5},
            "`top_entropy_quantile` must be a fraction of the tokens between 0 and 1, got 1.5",
        ),
        ({"max_turns": 0}, "`max_turns` must be a positive integer, got 0"),
        ({"updates": "tokens"}, "`updates='tokens'` needs `step_tokens`"),
        ({"step_tokens": 100}, "nothing else uses it"),
        ({"beta": -0.5}, "`beta` must not be negative, got -0.5"),
        ({"role_beta": {"judge": -1.0}}, "`judge` must not be negative"),
        ({"role_beta": 0.1}, "`role_beta` must map roles to numbers, such as {'judge': 0.1}, got 0.1"),
        ({"role_beta": "judge"}, "`role_beta` must map roles to numbers, such as 'judge=0.1', got 'judge'"),
        ({"role_beta": '{"judge"'}, "`role_beta` must map roles to numbers, such as 'judge=0.1'"),
        ({"optim": "schedule_free_adamw"}, "counts steps in which an adapter has no gradient"),
        ({"role_beta": {"judge": "0.1"}}, "`role_beta` must map roles to numbers"),
        ({"updates": "tokens", "step_tokens": 0}, "`step_tokens` must be a positive integer, got 0"),
        ({"loss_type": "gspo"}, r"`loss_type` must be one of \['grpo', .*'vespo'\], got 'gspo'"),
        ({"importance_sampling_level": "turn"}, r"`importance_sampling_level` must be one of .*got 'turn'"),
        ({"scale_rewards": "std"}, "`scale_rewards` must be one of .*got 'std'"),
        ({"multi_objective_aggregation": "sum"}, "`multi_objective_aggregation` must be one of .*got 'sum'"),
        ({"max_completion_length": None}, "`max_completion_length` must be a positive integer, got None"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_every_loss_of_trl_is_accepted():
    compared = re.findall(r'loss_type (?:==|in) (\[[^]]*]|"\w+")', inspect.getsource(GRPOTrainer))
    named = {name for values in compared for name in re.findall(r"\w+", values)}
    assert named == set(CHOICES["loss_type"])
    for name, values in CHOICES.items():
        used_with = {"old_logprobs": "recomputed"} if name == "vllm_importance_sampling_mode" else {}
        for value in values:
            config(**{name: value}, **used_with)


def test_role_beta_is_text_like_a_policy_or_json():
    for text in ("judge=0.1, solver=0", '{"judge": 0.1, "solver": 0}'):
        assert config(role_beta=text).role_betas == {"judge": 0.1, "solver": 0}


def test_without_a_ratio_to_correct_no_correction_is_no_change():
    assert config(vllm_importance_sampling_correction=False).old_logprobs == "sampled"
    vespo = {"loss_type": "vespo", "old_logprobs": "recomputed"}
    assert config(**vespo, vllm_importance_sampling_correction=False).loss_type == "vespo"
    assert config(**vespo, vllm_importance_sampling_mode="token_mask").loss_type == "vespo"


def test_batch_sizes_only_determine_the_episodes_of_an_iteration():
    """Whatever batch sizes are set, HF sees one batch with all of a process's episodes, and steps once per iteration."""
    for sizes, n_episodes in (
        ({"generation_batch_size": 64}, 64),
        ({"generation_batch_size": 12, "num_generations": 4}, 12),  # not a multiple of TRL's default of 8 per device
        ({"per_device_train_batch_size": 24}, 24),
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}, 32),
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 2}, 16),
    ):
        args = config(**sizes)
        assert args.generation_batch_size == args.per_device_train_batch_size == n_episodes
        assert args.gradient_accumulation_steps == args.steps_per_generation == 1
        assert args.n_problems == n_episodes // sizes.get("num_generations", 8)


def test_steps_per_generation_set_the_rows_of_an_optimizer_step():
    for accumulated, per_generation, step_rows in ((1, 1, None), (1, 4, 8), (2, 4, 16), (2, 2, None), (2, 8, 16)):
        args = config(per_device_train_batch_size=8, gradient_accumulation_steps=accumulated, steps_per_generation=per_generation)  # fmt: skip
        assert (args.generation_batch_size, args.step_rows) == (8 * per_generation, step_rows)
    assert (
        config(generation_batch_size=64, per_device_train_batch_size=8, gradient_accumulation_steps=2).step_rows == 16
    )
    for accumulated, per_generation in ((3, 4), (4, 2)):
        with pytest.raises(
            ValueError, match=rf"`steps_per_generation` \({per_generation}\) is no multiple of .* \({accumulated}\)"
        ):
            config(
                per_device_train_batch_size=8,
                gradient_accumulation_steps=accumulated,
                steps_per_generation=per_generation,
            )
    for options in ({"updates": "one"}, {"step_rows": 3}):
        with pytest.raises(ValueError, match="asks for 4 optimizer steps per rollout"):
            config(per_device_train_batch_size=8, steps_per_generation=4, **options)
    with pytest.raises(ValueError, match="`step_rows=3` needs `updates='per_batch'`"):
        config(updates="one", step_rows=3)
    with pytest.raises(ValueError, match="divisible by num_generations"):
        config(generation_batch_size=12)


def test_trls_parser_reads_our_options(tmp_path):
    (parsed,) = TrlParser((MultiRoleGRPOConfig,)).parse_args_and_config(
        [
            "--output_dir",
            str(tmp_path),
            "--policy",
            "ip",
            "--role_beta",
            '{"judge": 0.5}',
            "--use_cpu",
            "--bf16",
            "False",
        ]
    )
    assert (parsed.policy, parsed.role_beta) == ("ip", {"judge": 0.5})


def test_what_differs_from_trl_by_default():
    args = config()
    assert (args.loss_type, args.use_bias_correction_kl, args.num_generations_eval) == ("grpo", False, 1)
    assert config(num_generations_eval=4).num_generations_eval == 4
    assert (config(use_vllm=True).engine, config(use_vllm=True).use_vllm) == ("vllm", False)
    assert config(role_beta='{"judge": 0.5}').role_beta == {"judge": 0.5}  # as a command line gives it
