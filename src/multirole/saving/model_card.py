"""Write the model card of several adapters.

TRL's card loads one whole model, and PEFT's is an empty template; both name the base model by its local path. This one keeps TRL's sections on
training, versions and citations.
"""

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trl.trainer.utils import generate_model_card, get_comet_experiment_url, get_trackio_space_url

QUICK_START = """
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base}"){comment}
model = PeftModel.from_pretrained(base, "{source}"{subfolder})
```
"""


def base_of(source: str) -> tuple[str, bool]:
    """Return the name of the base model that was loaded from `source`, and whether it is an id on the Hub.

    A folder in the Hub's cache has its id; of another folder only the name is told.
    """
    if cached := re.search(r"models--([^/]+)/snapshots/", source):
        return cached[1].replace("--", "/"), True
    is_id = not Path(source).exists() and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source) is not None
    return (source, True) if is_id else (Path(source).name, False)


def write_card(
    folder: str | Path, source: str, policy: dict[str, str], adapter: str, workflow: str, name: str, trainer: dict[str, Any],
    hub_id: str | None = None, dataset: str | None = None, tags: Iterable[str] = (), keeps: bool = False,
) -> None:  # fmt: skip
    """Write `README.md` for adapters that are saved in a folder.

    Args:
        source: where the base model was loaded from: an id on the Hub, a folder, or "" if it was built in memory.
        policy: role -> adapter, or what plays it instead.
        adapter: the one that the quick start loads.
        name: title of the card.
        trainer: TRL's fields `trainer_name`, `trainer_citation`, `paper_title` and `paper_id`.
        hub_id: where the adapters are pushed to.
        dataset: id of the training rows on the Hub.
        keeps: leave a `README.md` that is there as it is.
    """
    path = Path(folder) / "README.md"
    if keeps and path.exists():
        return
    base, is_id = base_of(source)
    tracked, trackio = sys.modules.get("wandb"), get_trackio_space_url()
    job = ["hf_jobs"] if "JOB_ID" in os.environ else []
    card = generate_model_card(
        base_model=base if is_id else None, model_name=name, hub_model_id=hub_id or "", dataset_name=dataset,
        tags=sorted({*tags, *job, *([f"trackio:{trackio}"] if trackio else [])}),
        wandb_url=tracked.run.url if tracked is not None and tracked.run is not None else None, trackio_url=trackio,
        comet_url=get_comet_experiment_url(), **trainer,
    )  # fmt: skip
    card.data.library_name, card.data.pipeline_tag = "peft", "text-generation"
    del card.data.licence  # a placeholder of TRL
    link = (
        f"[{base}](https://huggingface.co/{base})" if is_id else f"the base model {base or 'that was built in memory'}"
    )
    rows = f" on [{dataset}](https://huggingface.co/datasets/{dataset})" if dataset else ""
    start = QUICK_START.format(
        base=base or "BASE", comment="" if is_id else "  # the folder of this base", source=hub_id or ".",
        subfolder="" if adapter == "default" else f', subfolder="{adapter}"',
    )  # fmt: skip
    table = [f"| {role} | `{adapter}` |" for role, adapter in policy.items()]
    about = f"PEFT adapters of {link} for the roles of the workflow {workflow}, trained together{rows}."
    training = card.text.partition("## Training procedure")[2]
    card.text = "\n".join(
        [f"# {name}", "", about, "", "| role | adapter |", "|---|---|", *table, "", "## Quick start", start]
    )
    card.text += f"\n## Training procedure{training}\n"
    card.save(path)
