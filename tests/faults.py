"""Ways to train wrongly: each changes the library in this process, and names the check of the doctor that must see it."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import torch
from peft import PeftModel
from pytest import MonkeyPatch

from multirole.core import distributed, logprobs, rollout, trainer
from multirole.core.engine import Sampling
from multirole.core.inputs import INDEX
from multirole.core.rows import left_aligned
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.core.types import Reward
from multirole.diagnostics.gradients import weights_of
from multirole.engines import transformers_engine
from multirole.engines.transformers_engine import TransformersEngine
from multirole.tasks.tiny_chain import TinyChain
from multirole.workflows import Voting

Fault = Callable[[MonkeyPatch], None]
FAULTS: dict[str, tuple[str, Fault]] = {}
"""name -> (check, what injects it). All act on Voting with two adapters, on tiny_chain at temperature 0.7."""


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


def change_rows(patch: MonkeyPatch, change: Callable[[list], list]) -> None:
    """Change the rows that are trained, after the callbacks have seen them."""
    around(patch, trainer, "optimizer_steps", lambda cut, rows, *rest: cut(change(rows), *rest))


# ---- which tokens and rows


@sees("masks")
def train_on_pads(patch):
    change_batch(patch, lambda batch: {"completion_mask": torch.ones_like(batch["completion_mask"])})
    around(
        patch, trainer, "score",
        lambda score, model, ids, mask, n_completion: score(model, ids, torch.ones_like(mask), n_completion),
    )  # fmt: skip


@sees("masks")
def train_on_prompts(patch):
    def score(model, input_ids, attention_mask, n_completion):
        ids, labels, at, inside = left_aligned(input_ids, attention_mask, n_completion)
        everything = ids.masked_fill((labels == -100) & (labels.ne(-100).cumsum(1) > 0), -100)  # but pads
        out = model(input_ids=ids, labels=everything, fused_lm_head=True)
        prompts = (out.log_probs * (labels == -100)[:, 1:]).sum(1, keepdim=True)  # (N, 1)
        logps = out.log_probs.gather(1, at) + prompts - prompts.detach()  # the values stay as they are
        return logps.masked_fill(~inside, 0.0), out.entropy.gather(1, at).masked_fill(~inside, 0.0)

    patch.setattr(trainer, "score", score)


@sees("masks")
def masks_shifted_by_one(patch):
    def shifted(left_aligned, *args):
        ids, labels, at, inside = left_aligned(*args)
        return ids, labels, (at + 1).clamp(max=ids.size(1) - 2), inside

    around(patch, logprobs, "left_aligned", shifted)


@sees("masks")
def end_of_turn_not_trained(patch):
    def shorter(batch):
        mask = batch["completion_mask"]
        ends = mask.cumsum(1) == mask.sum(1, keepdim=True)
        return {"completion_mask": mask.masked_fill(ends & (mask.sum(1, keepdim=True) > 1), 0)}

    change_batch(patch, shorter)


@sees("masks")
def doubled_rows(patch):
    change_rows(patch, lambda rows: [*rows, rows[0]])


@sees("masks")
def lost_rows(patch):
    change_rows(patch, lambda rows: rows[1:])


@sees("masks")
def doubled_micro_batches(patch):
    around(patch, distributed, "micro_batches", lambda cut, *args: cut(*args) + cut(*args)[:1])


# ---- which adapter


@sees("adapters")
def wrong_adapter_at_update(patch):
    def moved(accumulate, self, model, adapter, *rest):
        params, loss = accumulate(self, model, adapter, *rest)
        theirs = weights_of(self.peft_model, other(adapter))
        for mine, its in zip(params, theirs, strict=True):
            its.grad, mine.grad = mine.grad, None
        return theirs, loss

    around(patch, MultiRoleGRPOTrainer, "accumulate", moved)


@sees("adapters")
def optimizer_steps_all_adapters(patch):
    def filled(accumulate, self, *args):
        found = accumulate(self, *args)
        for name, parameter in self.model.named_parameters():
            if "lora_" in name and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return found

    around(patch, MultiRoleGRPOTrainer, "accumulate", filled)


@sees("adapters")
def base_is_trained(patch):
    def moved(step, self, *args):
        with torch.no_grad():
            self.peft_model.get_base_model().model.norm.weight.mul_(1.01)
        return step(self, *args)

    around(patch, MultiRoleGRPOTrainer, "optimizer_step", moved)


# ---- what the engine serves


@sees("engine")
def wrong_adapter_at_sampling(patch):
    around(
        patch, TransformersEngine, "add",
        lambda add, self, key, request: add(self, key, replace(request, adapter=other(request.adapter))),
    )  # fmt: skip


@sees("engine")
def adapter_not_published(patch):
    def publish(original, self, *args):
        original(self, *args)
        self.weights["aggregator"] = self.weights[None]

    around(patch, TransformersEngine, "publish", publish)


@sees("engine")
def pads_attended(patch):
    def score(model, input_ids, attention_mask, n_completion):
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        out = model(input_ids=input_ids, labels=labels, fused_lm_head=True)
        return out.log_probs[:, -n_completion:], out.entropy[:, -n_completion:]

    patch.setattr(trainer, "score", score)


@sees("engine")
def trainer_forgets_the_temperature(patch):
    def init(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        logprobs.add_fused_lm_head(self.peft_model.get_base_model(), 1.0, outputs=("log_probs", "entropy"))

    around(patch, MultiRoleGRPOTrainer, "__init__", init)


@sees("published weights")
def engine_keeps_its_first_weights(patch):
    held = {}

    def publish(original, self, *args):
        original(self, *args)
        held.update(held or self.weights)
        self.weights = dict(held)

    around(patch, TransformersEngine, "publish", publish)


@sees("published weights")
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


@sees("temperature")
def sampled_at_another_temperature(patch):
    sampling = property(lambda self: Sampling(self.args.max_completion_length, 1.0))
    patch.setattr(MultiRoleGRPOTrainer, "sampling", sampling)


@sees("temperature")
def log_probs_before_temperature(patch):
    def sample(original, logits, *rest):
        tokens, _ = original(logits, *rest)
        return tokens, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    around(patch, transformers_engine, "sample", sample)


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
    def set_advantages(original, rows, *rest):
        original(rows, *rest)
        for row in rows:
            if row.turn is not row.episode.turns[-1]:
                row.advantage = 0.0

    around(patch, trainer, "set_advantages", set_advantages)


@sees("advantages")
def rewards_of_other_episodes(patch):
    def rewards(original, self, *args):
        found = original(self, *args).flip(0)
        for row, value in zip(args[0], found[:, 0].tolist(), strict=True):
            row["episodes"].reward = Reward(value, "", False)
        return found

    around(patch, MultiRoleGRPOTrainer, "_calculate_rewards", rewards)


@sees("rewards")
def everything_is_correct(patch):
    patch.setattr(TinyChain, "score", lambda self, problems, texts: [Reward(1.0, "correct", True) for _ in texts])


@sees("rewards")
def reward_depends_on_the_batch(patch):
    def score(original, self, problems, texts):
        return [replace(reward, value=reward.value + i) for i, reward in enumerate(original(self, problems, texts))]

    around(patch, TinyChain, "score", score)


# ---- the loss and the optimizer


def of_the_loss(patch: MonkeyPatch, **changes: object) -> None:
    """TRL's loss under other attributes or arguments than the trainer's."""

    def compute(original, self, *args, **kwargs):
        held = {name: getattr(self, name) for name in changes}
        self.__dict__.update({name: change(held[name]) for name, change in changes.items()})
        try:
            return original(self, *args, **kwargs)
        finally:
            self.__dict__.update(held)

    around(patch, MultiRoleGRPOTrainer, "compute_loss", compute)


@sees("loss")
def nothing_is_clipped(patch):
    of_the_loss(patch, epsilon_low=lambda _: 1e6, epsilon_high=lambda _: 1e6)


@sees("loss")
def clipped_at_half_the_range(patch):
    of_the_loss(patch, epsilon_low=lambda e: e / 2, epsilon_high=lambda e: e / 2)


@sees("loss")
def upper_side_clipped_as_the_lower(patch):
    of_the_loss(patch, epsilon_high=lambda _: 0.02)


@sees("loss")
def kl_with_the_wrong_sign(patch):
    of_the_loss(patch, beta=lambda beta: -beta)


@sees("loss")
def kl_to_the_adapter_itself(patch):
    around(
        patch, MultiRoleGRPOTrainer, "logprobs_of",
        lambda original, self, rows, base=False: original(self, rows),
    )  # fmt: skip


@sees("loss")
def advantages_with_the_wrong_sign(patch):
    change_batch(patch, lambda batch: {"advantages": -batch["advantages"]})


@sees("loss")
def ratios_to_the_present_weights(patch):
    change_batch(patch, lambda batch: {"old_per_token_logps": None})


@sees("loss")
def divided_by_another_number_of_rows(patch):
    def accumulate(original, self, model, adapter, rows, divisor):
        return original(self, model, adapter, rows, 2 * divisor)

    around(patch, MultiRoleGRPOTrainer, "accumulate", accumulate)


@sees("optimizer")
def gradients_are_not_clipped(patch):
    around(patch, trainer, "clip", lambda original, parameters, _: original(parameters, 1e9))


@sees("optimizer")
def weight_decay_times_100(patch):
    def create(original, self, *args):
        found = original(self, *args)
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= 100
        return found

    around(patch, MultiRoleGRPOTrainer, "create_optimizer", create)


@sees("optimizer")
def no_weight_decay(patch):
    def create(original, self, *args):
        found = original(self, *args)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.0
        return found

    around(patch, MultiRoleGRPOTrainer, "create_optimizer", create)


@sees("optimizer")
def moments_are_reset_each_step(patch):
    def step(original, self, *args):
        self.optimizer.state.clear()
        return original(self, *args)

    around(patch, MultiRoleGRPOTrainer, "optimizer_step", step)


@sees("optimizer")
def schedule_off_by_one(patch):
    def rate(original, self, call):
        self.lr_scheduler.step()
        found = original(self, call)
        self.lr_scheduler.last_epoch -= 2
        self.lr_scheduler.step()
        return found

    around(patch, MultiRoleGRPOTrainer, "learning_rate_of", rate)


# ---- data and seeds


@sees("evaluation")
def evaluation_on_the_base(patch):
    def evaluate(original, self, *args, **kwargs):
        policy, self.rollout.policy = self.rollout.policy, dict.fromkeys(self.policy)
        found = original(self, *args, **kwargs)
        self.rollout.policy = policy
        return found

    around(patch, MultiRoleGRPOTrainer, "evaluate", evaluate)


@sees("seeds")
def the_runs_seed_is_ignored(patch):
    around(patch, rollout, "turn_seed", lambda original, seed, *rest: original(0, *rest))


@sees("seeds")
def the_iteration_is_not_in_the_seed(patch):
    around(patch, rollout, "turn_seed", lambda original, seed, iteration, *rest: original(seed, 0, *rest))


@sees("seeds")
def the_episode_is_not_in_the_seed(patch):
    around(
        patch, rollout, "turn_seed",
        lambda original, seed, iteration, problem, episode, *rest: original(seed, iteration, problem, 0, *rest),
    )  # fmt: skip


@sees("problems")
def the_same_problems_every_pass(patch):
    def first_pass(original, n_rows, n_episodes, length, *rest):
        return list(itertools.islice(itertools.cycle(original(n_rows, n_episodes, n_rows * n_episodes, *rest)), length))

    around(patch, trainer, "problem_order", first_pass)


@sees("problems")
def the_same_problems_every_iteration(patch):
    def first_two(original, n_rows, n_episodes, length, *rest):
        return list(itertools.islice(itertools.cycle(original(n_rows, n_episodes, 2 * n_episodes, *rest)), length))

    around(patch, trainer, "problem_order", first_two)


@sees("problems")
def other_problems_than_drawn(patch):
    def generate(original, self, inputs):
        return original(self, [row | {INDEX: (row[INDEX] + 1) % len(self.problems)} for row in inputs])

    around(patch, MultiRoleGRPOTrainer, "_generate_and_score_completions", generate)


@sees("prompts")
def the_reference_is_in_the_prompts(patch):
    run = Voting.run

    async def told(self, problem, call):
        return await run(self, replace(problem, question=f"{problem.question} ({problem.reference})"), call)

    patch.setattr(Voting, "run", told)


@sees("prompts")
def the_reference_is_in_the_questions(patch):
    def problems(original, self, *args):
        return [replace(p, question=f"{p.question} (answer: {p.reference})") for p in original(self, *args)]

    around(patch, TinyChain, "problems", problems)


# ---- checkpoints


@sees("resume")
def adapter_not_saved(patch):
    def save(original, *args, **kwargs):
        original(*args, **kwargs | {"selected_adapters": ["generator"]})

    around(patch, PeftModel, "save_pretrained", save)


@sees("resume")
def moments_not_saved(patch):
    patch.setattr(MultiRoleGRPOTrainer, "_save_optimizer_and_scheduler", lambda *_: None)
