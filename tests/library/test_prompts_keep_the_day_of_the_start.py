"""Chat templates that write the date write that of the run's start, also in a run that is resumed on another day."""

import json
from datetime import datetime

import pytest
import torch
from datasets import Dataset
from transformers.utils import chat_template_utils

from multirole import Single, user
from multirole.chat.templates import StartClock, chat_template

DATED = {
    "Llama 3.2": '{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}{{ date_string }}',
    "gpt-oss": '{%- macro date() %}{{ strftime_now("%Y-%m-%d") }}{%- endmacro %}{{ date() }}',
    "Granite": "{%- set now = strftime_now('%B %d, %Y') %}{{ now }}",
    "SmolLM3": '{%- set today = strftime_now("%d %B %Y") %}{{ today }}',
}
"""How templates write the date."""


class Tomorrow(datetime):
    day_shift = 0

    @classmethod
    def now(cls, tz=None):
        return cls(2026, 11, 29 + cls.day_shift, 12)


@pytest.fixture
def calendar(monkeypatch):
    """calendar(n): it is n days after 29 November 2026 now, for transformers and for the trainer."""
    monkeypatch.setattr(chat_template_utils, "datetime", Tomorrow)
    monkeypatch.setattr("multirole.chat.templates.datetime", Tomorrow)
    monkeypatch.setattr(Tomorrow, "day_shift", 0)
    return lambda days: monkeypatch.setattr(Tomorrow, "day_shift", days)


@pytest.fixture
def dated(tokenizer):
    """The tokenizer with a template that writes the date first."""
    before = tokenizer.chat_template
    tokenizer.chat_template = DATED["Llama 3.2"] + before
    yield tokenizer
    tokenizer.chat_template = before


@pytest.mark.parametrize("name", DATED)
def test_every_form_is_frozen(tokenizer, calendar, name):
    clock = StartClock()
    frozen = clock.bind(chat_template)
    first, plain = (render(tokenizer, [user("1+1")], chat_template=DATED[name]) for render in (frozen, chat_template))
    assert first == plain
    calendar(1)
    assert frozen(tokenizer, [user("1+1")], chat_template=DATED[name]) == first
    assert chat_template(tokenizer, [user("1+1")], chat_template=DATED[name]) != first


@pytest.mark.parametrize("own", [False, True])
def test_a_resume_on_another_day_ends_as_an_unbroken_run(make_library_trainer, dated, tmp_path, calendar, own):
    def by_tokens(completions, completion_ids, **_):
        return [float(sum(ids) % 7) for ids in completion_ids]

    def train(resume=None):
        options = {
            "generation_batch_size": 4, "num_generations": 4, "max_steps": 3, "max_completion_length": 8, "save_strategy": "steps",
            "save_steps": 1, "disable_tqdm": True,
        }  # fmt: skip
        trainer = make_library_trainer(Single(), None, by_tokens, 8, **options)
        if own:
            trainer.rollout.render = trainer.clock.bind(
                lambda tokenizer, messages, **kw: chat_template(tokenizer, messages, **kw)
            )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    unbroken = train()
    calendar(1)
    resumed = train(str(tmp_path / "library" / "checkpoint-1"))
    for name, value in unbroken.peft_model.named_parameters():
        assert torch.equal(value, dict(resumed.peft_model.named_parameters())[name]), name
    saved = json.loads((tmp_path / "library" / "checkpoint-3" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["PolicyMap"]["args"]["started"] == "2026-11-29T12:00:00"
    prompt = dated.decode(resumed.rollout.render(dated, [user("1+1")]))
    assert prompt.startswith(dated.decode(dated("29 Nov 2026", add_special_tokens=False)["input_ids"]))


def test_a_date_of_the_users_is_kept(make_library_trainer, dated, calendar):
    trainer = make_library_trainer(Single(), chat_template_kwargs={"date_string": "1 Jan 2025"})
    assert trainer.rollout.render(dated, [user("1+1")]) == chat_template(dated, [user("1+1")], date_string="1 Jan 2025")


def test_reward_models_read_the_same_clock(make_library_trainer):
    trainer = make_library_trainer(Single())
    assert trainer.chat_template_kwargs["strftime_now"] is trainer.clock and isinstance(trainer.train_dataset, Dataset)
