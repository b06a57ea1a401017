"""The parent methods that the trainer overrides or relies on are the ones that were read. A failure names those that changed.

When a pin moves: read the method's diff, adapt `trainer.py` if need be, then run this file with `--print` to renew. A method that
differs between the oldest and the newest version that pyproject.toml admits has a digest of each.
"""

import hashlib
import inspect
import subprocess
import sys

import pytest
import transformers
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from transformers import trainer_utils
from trl import GRPOConfig
from trl.kernels import chunked_logprob
from trl.trainer import utils
from trl.trainer.base_trainer import _BaseTrainer

from multirole.trainer import MultiRoleGRPOTrainer
from multirole.trl_parts import GRPOTrainer

READ = {
    (GRPOTrainer, "__init__"): "18f01b7a46c9544b",
    (GRPOTrainer, "get_train_dataloader"): "2bffe5a57c539e17",
    (GRPOTrainer, "_get_train_sampler"): "36497afb4d311dc9",
    (GRPOTrainer, "_calculate_rewards"): "736ae29b083840b5",
    (GRPOTrainer, "_generate_and_score_completions"): "1fa48922792dcd5c",
    (GRPOTrainer, "training_step"): "9e18632f7dd8e8d8",
    (GRPOTrainer, "_get_per_token_logps_and_entropies"): "ea73c3909275851d",
    (GRPOTrainer, "get_high_entropy_mask"): "ce6e86287bac23d6",
    (transformers.Trainer, "create_optimizer"): "daff86cde6ccc56d c798977d9dca3601",
    (transformers.Trainer, "_clip_grad_norm"): "ebfa9dc91d3088ab",
    (transformers.Trainer, "_get_grad_norm"): "913ba6f52f074d10",
    (transformers.Trainer, "_get_learning_rate"): "158d12f9b9501acb",
    (transformers.Trainer, "evaluation_loop"): "35a11f83d269fdca a0fe4d6536f8a84a",
    (transformers.Trainer, "train"): "f2ab74639cb0528d 9a3c2bcd066d8f99",
    (transformers.Trainer, "_load_from_checkpoint"): "4711d0506786db15 a2804e8d93a297e3",
    (transformers.Trainer, "_load_best_model"): "0e183d55a9db7414",
    (transformers.Trainer, "predict"): "7220207e2dd42725",
    (GRPOTrainer, "log"): "1e7772819cc8cf09",
    (transformers.Trainer, "evaluate"): "47001f3acc991bc4",
    (transformers.Trainer, "_push_from_checkpoint"): "b336b2f27274f0a5 2523da925347bd9a",
    (transformers.Trainer, "_save"): "bf720120f407bab3 b136889e87928376",
    (GRPOTrainer, "_save_checkpoint"): "ec91bde123649111",
    # not overridden
    (trainer_utils, "rotate_checkpoints"): "4aac03e039844595",
    (GRPOTrainer, "_generate"): "2a27fdf8f5e6f356",
    (GRPOTrainer, "_compute_loss"): "80295546bbdbf6f7",
    (GRPOConfig, "__post_init__"): "e833cd8d6b4619ad",
    (transformers.Trainer, "_run_epoch"): "ebe374933064ecd6 31aff00f34c302a2",
    (transformers.Trainer, "create_scheduler"): "a9edec70a59bffa5",
    (transformers.Trainer, "_maybe_log_save_evaluate"): "af101534f0f7b2d7",
    (transformers.Trainer, "_save_checkpoint"): "a9111e30faa99339",
    (utils, "add_fused_lm_head"): "422d009f04b66659",
    (GRPOTrainer, "_load_optimizer_and_scheduler"): "5c1772becdfd7fdb",
    (GRPOTrainer, "compute_loss"): "a2d6ef8bd29c3e26",
    (GRPOTrainer, "get_eval_dataloader"): "301561e842dd5fbe",
    (chunked_logprob.ChunkedLogProbFunction, "forward"): "1d8220b44273cdf3",
    # of PEFT, whose layers are computed merged
    (LoraLinear, "forward"): "ec0a80f5c5ce05f5",
    (BaseTuner, "set_adapter"): "6bc3435dcb256f28",
    (BaseTunerLayer, "set_adapter"): "428fe38e3c1100d9",
    (PeftModel, "set_requires_grad"): "2a4eaff3142ddfd7",
    (_BaseTrainer, "create_model_card"): "4f8a407fd9fd3f6e",
    (PeftModel, "create_or_update_model_card"): "188582665d331da0",
    (utils, "generate_model_card"): "ae772451da9a7a3d",
}


def digest(owner: object, name: str) -> str:
    return hashlib.sha256(inspect.getsource(vars(owner)[name]).encode()).hexdigest()[:16]


def test_the_methods_are_the_ones_we_read():
    changed = [
        f"{owner.__name__}.{name}" for owner, name in READ if digest(owner, name) not in READ[owner, name].split()
    ]
    assert not changed, "read what changed in these, then renew their digests"


def test_every_override_is_among_them():
    """Checks the method of the nearest parent class that defines it."""
    for name, value in vars(MultiRoleGRPOTrainer).items():
        parents = [parent for parent in MultiRoleGRPOTrainer.__mro__[1:-1] if name in vars(parent)]
        if inspect.isfunction(value) and parents:
            assert (parents[0], name) in READ, f"{parents[0].__name__}.{name}"
            assert name == "__init__" or f"`{name}`" in MultiRoleGRPOTrainer.__doc__, (
                f"the docstring does not list {name}"
            )


def test_trl_itself_is_left_as_it_was():
    """TRL's kernel is replaced only while rows are scored."""
    assert utils._use_triton is chunked_logprob._use_triton


USE_OF_VLLM = """
import sys
import multirole.trl_parts
assert "vllm" not in sys.modules
from trl import import_utils
from trl.generation import vllm_generation
assert vllm_generation.is_vllm_available is import_utils.is_vllm_available
from trl.trainer import grpo_trainer
assert grpo_trainer.VLLMGeneration is multirole.trl_parts.vllm_generation
assert isinstance(vllm_generation.VLLMGeneration, type)
if import_utils.is_vllm_available():
    assert vllm_generation.SamplingParams(temperature=0.5).temperature == 0.5
    assert sys.modules["vllm"].SamplingParams is type(vllm_generation.SamplingParams(temperature=0.5))
"""


@pytest.mark.slow
def test_importing_trl_neither_imports_vllm_nor_keeps_trl_from_it():
    subprocess.run([sys.executable, "-c", USE_OF_VLLM], check=True)


if __name__ == "__main__" and "--print" in sys.argv:
    for owner, name in READ:
        print(f"{owner.__name__}.{name}: {digest(owner, name)}")
