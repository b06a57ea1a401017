"""The parent methods we override, and those whose inner workings we rely on, are the ones we read. Names the one that moved.

When a pin moves: read the method's diff, adapt `trainer.py` if need be, then run this file with `--print` to renew.
"""

import hashlib
import inspect
import sys

import pytest
import transformers
from trl import GRPOTrainer

RELIED_ON = {
    (GRPOTrainer, "_generate_and_score_completions"): "1fa48922792dcd5c",
    (GRPOTrainer, "_generate"): "2a27fdf8f5e6f356",
    (GRPOTrainer, "_compute_loss"): "80295546bbdbf6f7",
    (GRPOTrainer, "_get_per_token_logps_and_entropies"): "ea73c3909275851d",
    (GRPOTrainer, "_get_train_sampler"): "36497afb4d311dc9",
    (GRPOTrainer, "_prepare_inputs"): "f824e7fb07147956",
    (GRPOTrainer, "_save_checkpoint"): "ec91bde123649111",
    (GRPOTrainer, "training_step"): "9e18632f7dd8e8d8",
    (transformers.Trainer, "_run_epoch"): "ebe374933064ecd6",
    (transformers.Trainer, "_clip_grad_norm"): "ebfa9dc91d3088ab",
    (transformers.Trainer, "create_optimizer"): "daff86cde6ccc56d",
    (transformers.Trainer, "create_scheduler"): "a9edec70a59bffa5",
    (transformers.Trainer, "_maybe_log_save_evaluate"): "af101534f0f7b2d7",
}


def digest(cls: type, name: str) -> str:
    return hashlib.sha256(inspect.getsource(vars(cls)[name]).encode()).hexdigest()[:16]


@pytest.mark.parametrize(("cls", "name"), RELIED_ON, ids=lambda value: value if isinstance(value, str) else "")
def test_the_method_is_the_one_we_read(cls, name):
    assert digest(cls, name) == RELIED_ON[cls, name], f"{cls.__name__}.{name} changed: read it, then renew its digest"


if __name__ == "__main__" and "--print" in sys.argv:
    for cls, name in RELIED_ON:
        print(f"{cls.__name__}.{name}: {digest(cls, name)}")
