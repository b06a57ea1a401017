"""Find the models that are part of this package."""

from importlib.resources import files
from pathlib import Path


def embedded_model(name: str = "tiny-r") -> str:
    """Return the folder of an embedded model and its tokenizer, for `model=` of the trainer or `from_pretrained`.

    The models have 0.45M parameters. "tiny-r" computes from left to right, "tiny-r-code" writes list programs. Raises ValueError
    for another name.
    """
    models = Path(str(files("multirole_study"))) / "models"
    if not (models / name / "config.json").is_file():
        names = sorted(path.parent.name for path in models.glob("*/config.json"))
        raise ValueError(f"There is no embedded model {name!r}. Write one of {names}.")
    return str(models / name)
