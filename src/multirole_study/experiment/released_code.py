"""Row order, mini-batch split, advantages and prompt rendering of the authors' released code, for `preset="released_code"`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from multirole.callbacks import MultiRoleCallback, Trainer
from multirole.chat.templates import Renderer, chat_template, control_tokens
from multirole.credit.advantages import compared_outcomes
from multirole.credit.estimator import CreditEstimator
from multirole.types import Message
from multirole.update.rows import MiniBatch, Row, Steps, optimizer_steps

SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
ASSISTANT = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def qwen_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    """Return the prompt's token ids as rllm's Qwen parser builds them with `disable_thinking`.

    Every prompt starts with a system turn (Qwen2.5's default sentence). Every past assistant turn starts with an empty think
    block; Qwen3's own template writes that block only before the reply.
    """
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": SYSTEM}, *messages]
    control = control_tokens(tokenizer)
    masked = control.mask(messages)
    parts = []
    for message in messages if masked is None else masked:
        is_assistant = message["role"] == "assistant"
        head = ASSISTANT if is_assistant else f"<|im_start|>{message['role']}\n"
        parts.append(f"{head}{message['content'].strip() if is_assistant else message['content']}<|im_end|>\n")
    text = "".join(parts) + ASSISTANT
    return tokenizer.encode(text, add_special_tokens=False) if masked is None else control.encode(text)


RENDERERS: dict[str, Renderer] = {"chat_template": chat_template, "released_code": qwen_prompt}


class SlotCredit(CreditEstimator):
    """A = (R - mean) / (std + 1e-6) over the problem's rows of one role and slot, as the released code has it for Voting on math.

    Its other comparison, over the rows of one role, is the library's `credit="agent"`. An episode in which a slot speaks twice counts
    twice, and a row that is alone keeps its reward. Needs no grades and no replays, costs nothing, and allows older weights.
    """

    def advantages(self, trainer: Trainer, rows: Sequence[Row]) -> list[float]:
        n = trainer.args.num_generations
        keys = [(*row.episode.group(n), row.turn.role, row.turn.slot) for row in rows]
        return compared_outcomes(rows, keys, keeps_lone=True)


@dataclass
class RowCuts(MultiRoleCallback):
    """Splits rows into optimizer steps as the released code does.

    Args:
        row_order: "mountain" orders each iteration's rows short, long, short (its batch balancing) before the split and
            updates the adapter of the shortest row first, which matters to a clock per update call. "shuffled" changes nothing.
        minibatch_split: "sequential" fills steps of `generation_batch_size` rows. The last, partial step is also divided by
            that size, so that its gradient is smaller. "even" changes nothing.
    """

    row_order: str = "shuffled"
    minibatch_split: str = "even"
    rows: list[Row] = field(default_factory=list)

    def on_rows(self, trainer: Trainer, rows: list[Row]) -> list[Row]:
        self.rows = rows  # in the order of the episodes
        return rows

    def on_update_begin(self, trainer: Trainer, rows: list[Row], steps: Steps) -> None:
        rows_by_adapter: dict[str, list[Row]] = {} if self.row_order == "mountain" else {name: [] for name in steps}
        for row in mountain(self.rows) if self.row_order == "mountain" else rows:
            rows_by_adapter.setdefault(row.adapter, []).append(row)
        steps.clear()
        size = trainer.args.generation_batch_size
        for adapter, adapter_rows in rows_by_adapter.items():
            cut = trainer.args.updates == "per_batch" and self.minibatch_split == "sequential"
            steps[adapter] = sequential(adapter_rows, size) if cut else optimizer_steps(adapter_rows, trainer.args)


def mountain(rows: list[Row]) -> list[Row]:
    """Order rows by length as short, long, short."""
    by_length = sorted(rows, key=lambda row: row.length)
    return by_length[::2] + by_length[1::2][::-1]


def sequential(rows: list[Row], size: int) -> list[MiniBatch]:
    """Split rows into full steps of `size` rows and a partial step; every step is divided by `size`."""
    return [MiniBatch(rows[i : i + size], size) for i in range(0, len(rows), size)]
