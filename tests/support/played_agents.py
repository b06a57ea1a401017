"""Play agents of `from_openai` over an engine without a model."""

import random

from scripted_engine import ScriptedEngine

from multirole.engines.protocol import Sampling
from multirole.rollout.rollout import Rollout
from multirole.types import Episode, Problem


def play(tokenizer, workflow, n: int = 1, engine: ScriptedEngine | None = None, **limits) -> list[Episode]:
    """Play `n` episodes whose replies are four letters of the request's seed, after one to three steps of the usual engine."""

    def reply(key, request):
        rng = random.Random(request.seed)
        return [rng.randrange(5, 20) for _ in range(4)] + [tokenizer.eos_token_id], rng.randrange(1, 4)

    engine = engine or ScriptedEngine(reply, tokenizer.eos_token_id)
    policy = dict.fromkeys(workflow.roles, "a")
    rollout = Rollout(workflow, engine, tokenizer, policy, bool, 0, **{"max_prompt_tokens": 500} | limits)
    attempts = [(Problem(str(i), "t", f"{i}+1", None), 0) for i in range(n)]
    return rollout.run(attempts, 0, Sampling(10, 1.0))


async def ask(client, text: str, role: str = "solver", **options) -> str:
    """Ask an asynchronous client for the reply to one message."""
    reply = await client.chat.completions.create(model=role, messages=[{"role": "user", "content": text}], **options)
    return reply.choices[0].message.content
