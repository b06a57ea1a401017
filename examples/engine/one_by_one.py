"""An engine that samples one reply after the other, without a cache: the least that training needs.

    pip install examples/engine                   # then: MultiRoleGRPOConfig(engine="one_by_one")
"""

import torch

from multirole.engines.generate import computing
from multirole.engines.protocol import Completion
from multirole.engines.sampling import sample, signed, uniform


class OneByOne:
    """Computes with the trainer's own model, whose weights change between `publish` and the next `publish` only."""

    def __init__(self, eos_token_ids):
        self.eos_token_ids, self.requests, self.model = set(eos_token_ids), {}, None

    @classmethod
    def from_trainer(cls, trainer):
        return cls(trainer.eos_token_ids)

    def publish(self, model, version):
        self.model = model

    def add(self, key, request):
        self.requests[key] = request

    def step(self):
        key = next(iter(self.requests))
        return [(key, self._reply(self.requests.pop(key)))]

    @torch.no_grad()
    def _reply(self, request):
        ids, logprobs, seed = [], [], torch.tensor([signed(request.seed)])
        with computing(self.model, request.adapter):
            while len(ids) < request.max_tokens and not self.eos_token_ids & set(ids[-1:]):
                logits = self.model(torch.tensor([request.prompt_ids + ids])).logits[:, -1].float()  # (1, V)
                random = uniform(seed, torch.tensor([len(ids)]))  # (1,): so only the seed decides the token
                token, logprob = sample(logits, torch.tensor([request.temperature]), random)
                ids, logprobs = [*ids, token.item()], [*logprobs, logprob.item()]
        return Completion(ids, logprobs, "stop" if ids[-1] in self.eos_token_ids else "length")

    def sleep(self):
        self.model = None

    def close(self):
        self.model = None
