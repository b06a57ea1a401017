"""Run a trained workflow on one problem, with your own `call`. Run it after `examples/debate.py`, in the same folder:

    python examples/play.py "Compute left to right: 3+2-5+2"
"""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

from debate import HERE, Debate
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from multirole import Problem
from multirole.update.threads import use_fitting_threads

BASE, TRAINED = str(HERE / "../src/multirole_study/models/tiny-r"), Path("out/debate")
ADAPTER = {"debater": "adapter_a", "judge": "adapter_b"}  # role -> folder, as in the policy map of debate.py

tokenizer = AutoTokenizer.from_pretrained(BASE)
base = AutoModelForCausalLM.from_pretrained(BASE)
model = PeftModel.from_pretrained(base, TRAINED / "adapter_a", adapter_name="adapter_a")
model.load_adapter(TRAINED / "adapter_b", adapter_name="adapter_b")
use_fitting_threads(model.num_parameters())  # as the trainer does; torch would take every core


async def call(role, messages, slot=0, round=0):
    """Sample one reply of a role. A workflow reads its `text`, and may set its `outcome`."""
    model.set_adapter(ADAPTER[role])
    # as in training: the chat template without thinking, temperature 1, and no option that the model's generation_config.json sets
    template = {"add_generation_prompt": True, "enable_thinking": False, "return_dict": True, "return_tensors": "pt"}
    prompt = tokenizer.apply_chat_template(messages, **template)
    ids = model.generate(**prompt, max_new_tokens=272, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0)
    text = tokenizer.decode(ids[0, prompt["input_ids"].size(1) :], skip_special_tokens=True)
    print(f"{role} {slot}, round {round}: {text}")
    return SimpleNamespace(text=text)


question = sys.argv[1] if len(sys.argv) > 1 else "Compute left to right: 3+2-5+2"
answer = asyncio.run(Debate().run(Problem("0", "sums", question, None), call))
print("answer:", answer.text)
