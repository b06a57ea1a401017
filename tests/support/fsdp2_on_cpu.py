"""FSDP2 on CPU processes.

accelerate shards models on GPUs only. Here its gloo processes pretend to be GPU processes. Everything else (sharding, collectives,
checkpoints) is the code that runs on a GPU node, on CPU tensors.
"""

from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from multirole.trainer import MultiRoleGRPOTrainer

plain_init = PartialState.__init__
plain_step = MultiRoleGRPOTrainer.optimizer_step


def init(self, *args, **kwargs):
    plain_init(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


def step(self, *args, **kwargs):
    assert self.model.is_gradient_checkpointing == self.args.gradient_checkpointing
    layers = [p for name, p in self.model.named_parameters() if ".layers." in name]  # embeddings stay gathered
    assert layers and all(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in layers), "not sharded"
    return plain_step(self, *args, **kwargs)


def be_a_gpus_process() -> None:
    """Make accelerate shard the models of this process."""
    PartialState.__init__, MultiRoleGRPOTrainer.optimizer_step = init, step
