"""The teachers of a run's roles: whose log-probs of a role's own tokens are part of its loss (on-policy distillation).

A teacher is the base (`"frozen"`), a saved adapter on it (`"frozen:FOLDER"`), another model in this process (`"base:NAME"`, on the Hub also
`"base:NAME@REVISION"`), or a model behind a vLLM server (`{"url": ..., "model": ...}`). Those in this process are scored like rows of an adapter, once per
iteration, before the update. What is kept of them are hidden states, from which `multirole.update.distillation` computes distributions: with 1024 numbers per
token instead of 152k.
"""

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl.trainer.utils import add_fused_lm_head, create_model_from_path

from multirole.bases.gguf_folder import local_base, split_revision
from multirole.engines.endpoint import AT_ONCE, RETRIES, SECONDS, Endpoint, check_endpoint
from multirole.engines.protocol import EngineError
from multirole.extras import needed_by
from multirole.inputs.adapters import check_base_alone, check_frozen, load_frozen
from multirole.options import MultiRoleGRPOConfig
from multirole.policy import FROZEN, FROZEN_ADAPTER, OTHER_BASE, frozen_folders, frozen_name, role_pairs
from multirole.update.distillation import Distillation
from multirole.update.passes.logprobs import Head, HeadWatch, score
from multirole.update.passes.model_passes import ModelPasses
from multirole.update.processes import gather_results, own_share
from multirole.update.reference import Reference
from multirole.update.rows import Row
from multirole.update.scoring import score_rows

SAME_VOCABULARY = "Use a teacher with the student's tokenizer, such as a larger model of its family."
UNUSED = "unused"
"""Name of the adapter of another base, which has one so that it is scored as the student's is. It is always off."""
PART_OF_CHARACTER = "\ufffd"
"""What tokenizers decode the bytes of a part of a character to. vLLM's text of such a token depends on the tokens before it."""
N_PROBED = 256
"""Token ids, spread over the vocabulary, whose texts a server is asked for."""


def parse_teachers(option: Mapping[str, Any] | str | None) -> dict[str, str]:
    """Return role -> teacher as text; ValueError for what is no teacher."""
    teachers = {} if option is None else dict(role_pairs(option, "teacher"))
    for role, value in teachers.items():
        if not (value == FROZEN or value.startswith((FROZEN_ADAPTER, OTHER_BASE, "{"))):
            raise ValueError(
                f"`teacher` gives the role {role!r} the teacher {value!r}. A teacher is 'frozen' (the base), 'frozen:FOLDER' (a saved adapter), "
                "'base:NAME' (another model, by its folder or its name on the Hub), or a server, {'url': ..., 'model': ...}."
            )
    return teachers


class Teacher(Protocol):
    """Scores rows. Sets their `teacher_states`, which belong to its `head`, or their `teacher_logps`, and has none."""

    @property
    def head(self) -> Head | None: ...

    def score(self, rows: list[Row], pad_id: int) -> None: ...


@dataclass(frozen=True)
class LocalTeacher:
    """A teacher in this process.

    Args:
        passes: of the model that it is the base of, or an adapter of.
        adapter: the adapter; where the base teaches, any one of its model.
        reference: the base; None where the adapter teaches.
        head: of the teacher.
    """

    passes: ModelPasses
    adapter: str
    reference: Reference | None
    head: Head

    @classmethod
    def from_passes(cls, passes: ModelPasses, adapter: str, is_base: bool) -> "LocalTeacher":
        """Return the teacher with its head, which a pass over a few tokens shows."""
        reference = Reference(passes.model, []) if is_base else None
        ids, watch = torch.arange(4, device=passes.model.device)[None], HeadWatch()  # (1, 4)
        passes.set_active_adapter(adapter)
        with (
            torch.no_grad(),
            passes.accelerator.autocast(),
            nullcontext() if reference is None else reference.applied(),
        ):
            score(passes.model, ids, torch.ones_like(ids), 3, watch=watch)
        return cls(passes, adapter, reference, watch.head)

    def score(self, rows: list[Row], pad_id: int) -> None:
        """Set `teacher_states` of the rows. Each process computes a share and gets them all."""
        scored = [replace(row, adapter=self.adapter) for row in rows]
        states = score_rows(self.passes, scored, pad_id, "states", self.reference)
        for row, of_row in zip(rows, states, strict=True):
            row.teacher_states = of_row


@dataclass(frozen=True)
class ServerTeacher:
    """A model behind a server that tells the log-probs of given tokens, as vLLM does with `prompt_logprobs`."""

    endpoint: Endpoint
    head: None = None

    def score(self, rows: list[Row], pad_id: int) -> None:
        """Set `teacher_logps` of the rows. Each process asks for a share and gets them all; an EngineError of one is raised in all."""
        shares = gather_results(lambda: self.logprobs_of(own_share(rows)), EngineError)
        for row, logps in zip(rows, itertools.chain.from_iterable(shares), strict=True):
            row.teacher_logps = logps

    def logprobs_of(self, rows: Sequence[Row]) -> list[Tensor]:
        """Return the log-probs (C,) of the rows' completions."""
        asked = [row.turn.prompt_ids + row.turn.completion_ids for row in rows]
        return [
            torch.tensor([logprob for logprob, _ in scored[-len(row.turn.completion_ids) :]])
            for row, scored in zip(rows, self.ask(asked), strict=True)
        ]

    def ask(self, sequences: Sequence[list[int]]) -> list[list[tuple[float, str | None]]]:
        """Return the log-prob and the text of each token but the first of token sequences. EngineError where there is no answer."""
        with needed_by("A teacher behind a server"):
            import openai
        client = openai.OpenAI(
            base_url=self.endpoint.url, api_key=self.endpoint.key, max_retries=RETRIES, timeout=SECONDS
        )

        def of_one(ids: list[int]) -> list[tuple[float, str | None]]:
            try:
                answer = client.completions.create(
                    model=self.endpoint.model, prompt=ids, max_tokens=1, extra_body={"prompt_logprobs": 0}
                )
            except openai.OpenAIError as error:
                raise EngineError(
                    f"The teacher {self.endpoint.model!r} at {self.endpoint.url} gave no log-probs of {len(ids)} tokens: "
                    f"{type(error).__name__}: {error}"
                ) from None
            entries = (answer.choices[0].model_extra or {}).get("prompt_logprobs") if answer.choices else None
            if not entries or len(entries) != len(ids):
                raise EngineError(
                    f"The server at {self.endpoint.url} answered without `prompt_logprobs`, the log-probs of given token ids, which a teacher must "
                    "give. Use a server that does, such as vLLM's, or load the teacher here, with 'base:NAME'."
                )
            of_tokens = [entry[str(token)] for entry, token in zip(entries[1:], ids[1:], strict=True)]
            return [(entry["logprob"], entry.get("decoded_token")) for entry in of_tokens]

        with client, ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(of_one, sequences))

    def check_vocabulary(self, tokenizer: PreTrainedTokenizerBase, n_tokens: int) -> None:
        """Raise ValueError if the server gives no log-probs of given tokens, or if its tokens have other texts than those of this tokenizer."""
        ids = sorted({i * (n_tokens - 1) // (N_PROBED - 1) for i in range(N_PROBED)})
        try:
            (scored,) = self.ask([[ids[0], *ids]])
        except EngineError as error:
            raise ValueError(
                f"{error} It was asked for token ids up to {ids[-1]}, the last of the student's vocabulary."
            ) from None
        texts = {token: text for token, (_, text) in zip(ids, scored, strict=True)}
        expected = {token: text for token in ids if PART_OF_CHARACTER not in (text := tokenizer.decode([token]))}
        other = [token for token in expected if texts[token] is not None and texts[token] != expected[token]]
        if other:
            raise ValueError(
                f"The teacher {self.endpoint.model!r} at {self.endpoint.url} has another vocabulary than the student: the token {other[0]} is "
                f"{texts[other[0]]!r} there and {expected[other[0]]!r} here, and {len(other)} of {len(expected)} tokens that were compared differ. {SAME_VOCABULARY}"
            )


class Teachers:
    """Loads the teachers of a run, and scores rows by them.

    Attributes:
        by_role: role -> teacher as text, of the roles whose weight is not 0.
        loss: the distillation loss, once `set_up` was called.
        facts: those of `multirole.option_rules`.
    """

    loss: Distillation

    def __init__(self, args: MultiRoleGRPOConfig) -> None:
        parsed, changed = parse_teachers(args.teacher), args.distillation_weight
        weights = dict.fromkeys(parsed, 1.0) | (changed if isinstance(changed, dict) else {})
        self.weights = {role: weights[role] for role in parsed if weights[role]}
        self.by_role = {role: parsed[role] for role in self.weights}
        self.facts: dict[str, Any] = {
            "teachers": parsed,
            "loaded_teachers": self.by_role,
            "local_teachers": [r for r, value in self.by_role.items() if value.startswith(FROZEN)],
            "server_teachers": [r for r, value in self.by_role.items() if value.startswith("{")],
        }
        self._teachers: dict[str, Teacher] = {}

    def check(self) -> None:
        """Refuse teachers that cannot teach, before a model is loaded (ValueError): a folder without an adapter, a server that does not answer."""
        check_frozen(frozen_folders(self.by_role), "teacher")
        for role in self.facts["server_teachers"]:
            check_endpoint(role, Endpoint.from_text(self.by_role[role]))

    def add_to(self, model: PeftModel) -> None:
        """Add the saved adapters to the model that is trained."""
        if self.facts["local_teachers"]:
            check_base_alone(model, "Let another model teach it.")
        load_frozen(model, frozen_folders(self.by_role))

    def set_up(self, passes: ModelPasses, args: MultiRoleGRPOConfig, tokenizer: PreTrainedTokenizerBase, clip: tuple[float, float]) -> None:  # fmt: skip
        """Load other bases, and ask servers whether they can teach. ValueError for a teacher of another vocabulary."""
        for role, value in self.by_role.items():
            if value in self._teachers:
                continue
            if value.startswith("{"):
                server = ServerTeacher(Endpoint.from_text(value))
                server.check_vocabulary(tokenizer, len(tokenizer))
                self._teachers[value] = server
            elif value.startswith(OTHER_BASE):
                self._teachers[value] = load_other(role, value.removeprefix(OTHER_BASE), passes, args, tokenizer)
            else:
                adapter = passes.adapters[0] if value == FROZEN else frozen_name(value)
                self._teachers[value] = LocalTeacher.from_passes(passes, adapter, value == FROZEN)
        if passes.adapters and self._teachers:
            passes.set_active_adapter(passes.adapters[0])
        heads = {role: head for role, value in self.by_role.items() if (head := self._teachers[value].head) is not None}
        self.loss = Distillation(self.weights, args.temperature, clip, heads)

    def score(self, rows: list[Row], pad_id: int) -> None:
        """Score the rows of the roles that have a teacher; for all processes to call, with the same rows."""
        for value, teacher in self._teachers.items():
            if taught := [row for row in rows if self.by_role.get(row.turn.role) == value]:
                teacher.score(taught, pad_id)


def load_other(
    role: str, name: str, passes: ModelPasses, args: MultiRoleGRPOConfig, tokenizer: PreTrainedTokenizerBase
) -> LocalTeacher:
    """Load another model as the teacher of a role. ValueError if it cannot be loaded, or if its vocabulary is not that of `tokenizer`."""
    folder, revision = split_revision(local_base(name))
    options = {"trust_remote_code": args.trust_remote_code} | ({"revision": revision} if revision else {})
    try:
        of_teacher = AutoTokenizer.from_pretrained(folder, **options).get_vocab()
    except OSError as error:
        raise ValueError(f"The teacher 'base:{name}' of the role {role!r} cannot be loaded: {error}") from error
    of_student = tokenizer.get_vocab()
    if other := sorted(of_student.items() ^ of_teacher.items()):
        raise ValueError(
            f"The teacher 'base:{name}' of the role {role!r} has another vocabulary than the student: {len(of_teacher)} and {len(of_student)} tokens, and "
            f"{len({token for token, _ in other})} of them are not the same, such as {other[0][0]!r}. {SAME_VOCABULARY}"
        )
    model = create_model_from_path(folder, dtype=passes.base.dtype, device_map=None, **options)
    sizes = [len(part.get_output_embeddings().weight) for part in (model, passes.base)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"The teacher 'base:{name}' of the role {role!r} has a head of {sizes[0]} tokens, padding included, and the student one of {sizes[1]}, so their "
            f"distributions cannot be compared. {SAME_VOCABULARY}"
        )
    add_fused_lm_head(model, args.temperature, args.cast_lm_head_to_fp32, ("log_probs", "entropy"))
    unused = LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model.to(passes.accelerator.device), unused, UNUSED).eval()
    return LocalTeacher.from_passes(ModelPasses(model, [], passes.accelerator, args, False), UNUSED, is_base=True)
