"""Ways to train wrongly: each changes the product in this process, and names the check of the doctor that must see it."""

import random
from collections.abc import Callable
from dataclasses import replace

import torch
from pytest import MonkeyPatch

from multirole.core import logprobs, rollout, trainer
from multirole.core.gradients import weights_of
from multirole.core.rows import left_aligned
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.core.types import Reward
from multirole.diagnostics import judging
from multirole.engines import transformers_engine as engine_torch
from multirole.engines.transformers_engine import TransformersEngine
from multirole.experiment.cell import Cell
from multirole.sandbox import selftest
from multirole.tasks import tiny_math

Fault = Callable[[MonkeyPatch], None]
FAULTS: dict[str, tuple[str, Fault]] = {}
"""name -> (check, what injects it). All act on a cell with two adapters, on math at temperature 0.7."""


def sees(check: str) -> Callable[[Fault], Fault]:
    """Which check must fail under the fault."""

    def add(fault: Fault) -> Fault:
        FAULTS[fault.__name__] = (check, fault)
        return fault

    return add


def around(patch: MonkeyPatch, owner: object, name: str, wrapper: Callable) -> None:
    """Replace `owner.name` by a function that gets the original first."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def other(adapter: str) -> str:
    return {"generator": "aggregator", "aggregator": "generator"}[adapter]


def change_batch(patch: MonkeyPatch, change: Callable[[dict], dict]) -> None:
    def changed(collate, *args):
        batch = collate(*args)
        return batch | change(batch)

    around(patch, trainer, "collate", changed)


# ---- which tokens


@sees("mask ownership")
def train_on_pads(patch):
    change_batch(patch, lambda batch: {"completion_mask": torch.ones_like(batch["completion_mask"])})


@sees("mask ownership")
def train_on_prompts(patch):
    def score(model, input_ids, attention_mask, n_completion):
        ids, labels, at, inside = left_aligned(input_ids, attention_mask, n_completion)
        everything = ids.masked_fill((labels == -100) & (labels.ne(-100).cumsum(1) > 0), -100)  # but pads
        out = model(input_ids=ids, labels=everything, fused_lm_head=True)
        prompts = (out.log_probs * (labels == -100)[:, 1:]).sum(1, keepdim=True)  # (N, 1)
        logps = out.log_probs.gather(1, at) + prompts - prompts.detach()  # the values stay as they are
        return logps.masked_fill(~inside, 0.0), out.entropy.gather(1, at).masked_fill(~inside, 0.0)

    patch.setattr(trainer, "score", score)


@sees("mask ownership")
def masks_shifted_by_one(patch):
    def shifted(left_aligned, *args):
        ids, labels, at, inside = left_aligned(*args)
        return ids, labels, (at + 1).clamp(max=ids.size(1) - 2), inside

    around(patch, logprobs, "left_aligned", shifted)


@sees("mask ownership")
def end_of_turn_not_trained(patch):
    def shorter(batch):
        mask = batch["completion_mask"]
        ends = mask.cumsum(1) == mask.sum(1, keepdim=True)
        return {"completion_mask": mask.masked_fill(ends & (mask.sum(1, keepdim=True) > 1), 0)}

    change_batch(patch, shorter)


@sees("padding invariance")
def pads_attended(patch):
    def score(model, input_ids, attention_mask, n_completion):
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        out = model(input_ids=input_ids, labels=labels, fused_lm_head=True)
        return out.log_probs[:, -n_completion:], out.entropy[:, -n_completion:]

    patch.setattr(trainer, "score", score)


@sees("padding invariance")
def micro_batch_weights_wrong(patch):
    around(patch, trainer, "deal", lambda deal, *args: [(micro, 1 / len(micro)) for micro, _ in deal(*args)])


@sees("loss formula")
def advantage_sign_flipped(patch):
    change_batch(patch, lambda batch: {"advantages": -batch["advantages"]})


# ---- which rows


@sees("episodes")
def doubled_rows(patch):
    around(patch, MultiRoleGRPOTrainer, "_rows", lambda rows, *args: [*rows(*args), rows(*args)[0]])


@sees("episodes")
def lost_rows(patch):
    around(patch, MultiRoleGRPOTrainer, "_rows", lambda rows, *args: rows(*args)[1:])


@sees("episodes")
def doubled_micro_batches(patch):
    around(patch, trainer, "micro_batches", lambda cut, *args: cut(*args) + cut(*args)[:1])


@sees("ledger")
def one_step_in_place_of_three(patch):
    patch.setattr(Cell, "step_rows", lambda cell, n_rows: n_rows)


# ---- which adapter


@sees("adapter isolation")
def wrong_adapter_at_update(patch):
    def moved(accumulate, self, model, adapter, *rest):
        params, loss = accumulate(self, model, adapter, *rest)
        theirs = weights_of(self.model, other(adapter))
        for mine, its in zip(params, theirs, strict=True):
            its.grad, mine.grad = mine.grad, None
        return theirs, loss

    around(patch, MultiRoleGRPOTrainer, "accumulate", moved)


@sees("adapter isolation")
def optimizer_steps_all_adapters(patch):
    def filled(accumulate, self, *args):
        found = accumulate(self, *args)
        for name, parameter in self.model.named_parameters():
            if "lora_" in name and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return found

    around(patch, MultiRoleGRPOTrainer, "accumulate", filled)


@sees("frozen base")
def base_unfrozen(patch):
    def create(create_optimizer, self, *args):
        self.model.get_base_model().model.norm.weight.requires_grad_(True)
        return create_optimizer(self, *args)

    around(patch, MultiRoleGRPOTrainer, "create_optimizer", create)


@sees("engine = trainer")
def wrong_adapter_at_sampling(patch):
    around(
        patch, TransformersEngine, "add",
        lambda add, self, key, request: add(self, key, replace(request, adapter=other(request.adapter))),
    )  # fmt: skip


# ---- what the engine serves


@sees("engine = trainer")
def adapter_not_published(patch):
    def publish(original, self, *args):
        original(self, *args)
        self.weights["aggregator"] = self.weights[None]

    around(patch, TransformersEngine, "publish", publish)


@sees("update reaches engine")
def engine_keeps_its_first_weights(patch):
    held = {}

    def publish(original, self, *args):
        original(self, *args)
        held.update(held or self.weights)
        self.weights = dict(held)

    around(patch, TransformersEngine, "publish", publish)


@sees("update reaches engine")
def stale_prefix_cache(patch):
    held = {}

    def publish(original, self, *args):
        original(self, *args)
        held.update(held or self.weights)

    def prefill(original, self, *args):
        present, self.weights = self.weights, held
        original(self, *args)
        self.weights = present

    around(patch, TransformersEngine, "publish", publish)
    around(patch, TransformersEngine, "_prefill", prefill)


# ---- temperature and the old policy


@sees("engine = trainer")
def trainer_forgets_the_temperature(patch):
    around(
        patch, Cell, "grpo_config",
        lambda config, cell, *args: config(replace(cell, temperature=1.0), *args),
    )  # fmt: skip


@sees("temperature")
def sampled_at_another_temperature(patch):
    around(patch, Cell, "sampling", lambda sampling, *args, **named: replace(sampling(*args, **named), temperature=1.0))


@sees("temperature")
def log_probs_before_temperature(patch):
    def sample(original, logits, *rest):
        tokens, _ = original(logits, *rest)
        return tokens, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    around(patch, engine_torch, "sample", sample)


@sees("ratio at first step")
def old_policy_follows_every_step(patch):
    def step(optimizer_step, self, model, adapter, rows, *rest):
        self.cell, self._old_logprobs = replace(self.cell, old_logprobs="recomputed"), self._logprobs_of(model, rows)
        return optimizer_step(self, model, adapter, rows, *rest)

    around(patch, MultiRoleGRPOTrainer, "optimizer_step", step)


@sees("ratio at first step")
def old_log_probs_lost(patch):
    change_batch(patch, lambda batch: {"sampling_per_token_logps": 0 * batch["sampling_per_token_logps"]})


# ---- rewards and advantages


@sees("advantages")
def advantage_mixed_across_problems(patch):
    def scored(original, self, inputs):
        episodes = original(self, inputs)
        rewards = torch.tensor([episode.reward.value for episode in episodes])
        for episode, value in zip(episodes, ((rewards - rewards.mean()) / rewards.std()).tolist(), strict=True):
            episode.advantage = value
        return episodes

    around(patch, MultiRoleGRPOTrainer, "_generate_and_score_completions", scored)


@sees("advantages")
def advantage_on_the_last_turn_only(patch):
    around(
        patch, MultiRoleGRPOTrainer, "_rows",
        lambda rows, *args: [
            row if row.turn is row.episode.turns[-1] else replace(row, advantage=0.0) for row in rows(*args)
        ],
    )  # fmt: skip


@sees("reward")
def rewards_of_other_episodes(patch):
    def score(original, episodes, *rest):
        stats = original(episodes, *rest)
        for episode, reward in zip(episodes, [e.reward for e in episodes][::-1], strict=True):
            episode.reward = reward
        return stats

    around(patch, trainer, "score_episodes", score)
    around(patch, judging, "score_episodes", score)


@sees("reward")
def everything_is_correct(patch):
    patch.setattr(tiny_math, "score_batch", lambda problems, texts, **_: [Reward(1.0, "correct", True) for _ in texts])


# ---- seeds and steps


@sees("seeds")
def seeds_from_the_global_generator(patch):
    patch.setattr(rollout, "turn_seed", lambda *_: random.getrandbits(63))


@sees("seeds")
def one_seed_for_all_slots(patch):
    around(patch, rollout, "turn_seed", lambda seed, *key: seed(*key[:5], 0, key[6]))


@sees("optimizer")
def schedule_ignored(patch):
    patch.setattr(trainer, "lr_factor", lambda *_: 1.0)


@sees("optimizer")
def gradient_not_clipped(patch):
    around(patch, torch.nn.utils, "clip_grad_norm_", lambda clip, parameters, _: clip(parameters, float("inf")))


# ---- code


def sandbox_stops_nothing(patch):
    """Seen by "sandbox", on a code cell."""
    patch.setattr(selftest, "run_alone", lambda *_: "passed")
