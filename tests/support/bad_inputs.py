"""Bad inputs by class, and `attempt`, which gives one to the command line in this process and returns the outcome.

Each parameter gets values of a wrong type, out of its bounds, of an absurd size, and unknown words, and its name is misspelt;
these cases are generated from its declaration. User-supplied files, models, records and code are damaged by hand.
"""

import contextlib
import io
import json
import logging
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin
from unittest import mock

import annotated_types
from paper_rows import DAPO, many, write
from test_checkpoints import HARMS

from multirole_study.__main__ import main
from multirole_study.experiment import run, user_files
from multirole_study.experiment.base_models import locate
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.evaluation import Evaluation
from multirole_study.experiment.launch import Launch
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.run_folder import claim

TINY = locate(Cell("voting", "sp"))
SMALL = {"n_train": 64, "n_validation": 8, "n_problems": 2, "num_generations": 2, "max_steps": 2, "warmup_steps": 0}
PAPER = {"scale": "0.6b", "model": str(TINY), "data": str(DAPO)} | SMALL
PAPER |= {"n_train": None, "n_validation": 2, "max_prompt_tokens": 3000, "max_completion_length": 24}


ENDS = ("tried", "refused", "accepted", "continued", "finished", "otherwise")
START, END = "<!-- bad inputs: benchmarks/bad_inputs.py writes this table -->\n", "<!-- end -->"
"""Marks around the table in docs/reliability.md."""


class Case(NamedTuple):
    """Parameters, a preparation of a scratch folder (`spoil`, which may return more parameters), and the expected outcome.

    words: texts that the refusal must contain; outcome: "refused", "accepted" (it would be trained), "continued" (a damaged run
    would be trained on) or "finished" (it is left as it is).
    """

    given: dict[str, object]
    words: tuple[str, ...] = ()
    outcome: str = "refused"
    spoil: Callable[[Path], dict[str, object] | None] = lambda folder: None
    command: str = "train"
    patched: dict[str, object] = {}  # noqa: RUF012


class Trained(Exception):
    """The command got as far as building a trainer."""


def attempt(case: Case, folder: Path) -> tuple[str, str]:
    """Run a case; return its outcome and what was printed. A refusal is an exit with code 2, a short text, and no changed file."""
    parameters = {"results_dir": str(folder / "results")} | case.given
    parameters |= case.spoil(folder) or {}
    before = files_of(folder)
    pairs = [word for name, value in parameters.items() for word in ("-p", name, _text(value))]
    printed, code = io.StringIO(), None
    patches = {"multirole_study.experiment.run.make_trainer": mock.Mock(side_effect=Trained)} | case.patched
    with contextlib.ExitStack() as patched:
        for target, value in patches.items():
            patched.enter_context(mock.patch(target, value))
        patched.enter_context(mock.patch.object(sys, "argv", ["multirole", case.command, *pairs]))
        patched.enter_context(contextlib.redirect_stdout(printed))
        patched.enter_context(contextlib.redirect_stderr(printed))
        try:
            code = main()
        except Trained:
            outcome = "continued" if "checkpoints" in str(before) else "accepted"
            return outcome, printed.getvalue()
        except SystemExit as error:
            code = error.code
        except Exception as error:  # noqa: BLE001 (a user would see its traceback)
            return f"{type(error).__name__}: {error}", printed.getvalue()
        finally:
            for package in ("multirole", "multirole_sandbox", "multirole_study"):
                logging.getLogger(package).setLevel(logging.NOTSET)
    if code == 0:
        return "finished", printed.getvalue()
    text = printed.getvalue().strip()
    changed = {name for name, content in files_of(folder).items() if before.get(name) != content}
    is_clear = code == 2 and len(text) < 2500 and "Traceback" not in text and not changed
    return ("refused" if is_clear else f"code {code}, {len(text)} characters, files {sorted(changed)}"), text


def problems(cases: dict[str, Case], scratch: Path) -> dict[str, str]:
    """Return the cases of a class that end differently from their expected outcome, and how."""
    differences = {}
    for number, (name, case) in enumerate(cases.items()):
        folder = scratch / str(number)
        folder.mkdir(parents=True)
        outcome, text = attempt(case, folder)
        if missing := [words for words in case.words if words not in text]:
            outcome += f", and it does not say {missing}"
        if outcome != case.outcome:
            differences[name] = f"{outcome}: {text[-600:]}"
        shutil.rmtree(folder)
    return differences


def table(by_kind: dict[str, dict[str, int]]) -> str:
    """Format the counts as a Markdown table."""
    total = {end: sum(counts[end] for counts in by_kind.values()) for end in ENDS}
    rows = [[name, *map(str, counts.values())] for name, counts in {**by_kind, "all": total}.items()]
    lines = [["", *ENDS], ["---"] * (1 + len(ENDS)), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _text(value: object) -> str:
    return value if isinstance(value, str) else "1e999" if value == math.inf else str(value)


# ---- parameters


def _declared() -> Iterator[tuple[str, str, Any, list[object]]]:
    """Yield (command, parameter, its types, its bounds) for all parameters except those that take several kinds of names."""
    for command, group in (("train", Cell), ("train", Launch), ("evaluate", Evaluation)):
        for name, field in group.model_fields.items():
            if name not in ("cell", "workflow", "policy", "task", "role_beta"):
                union = get_origin(field.annotation) in (Union, UnionType)
                yield command, name, get_args(field.annotation) if union else (field.annotation,), field.metadata


def _parameters() -> dict[str, dict[str, Case]]:
    classes: dict[str, dict[str, Case]] = {
        name: {} for name in ("wrong type", "out of range", "absurd size", "unknown word", "misspelt name")
    }

    def add(kind: str, command: str, name: str, value: object, *words: str, outcome: str = "refused") -> None:
        base = {} if command == "evaluate" else SMALL
        shown = value if isinstance(value, str) else repr(value)
        words = words or ((f"`{name}`", f"got {value!r}") if outcome == "refused" else ())
        classes[kind][f"{name} = {shown[:40]}"] = Case(base | {name: value}, words, outcome, command=command)

    for command, name, types, bounds in _declared():
        wrong = {
            int: ["many", 1.5, [1], True],
            float: ["much", [0.5], True, "nan"],
            bool: ["maybe", 2, [True]],
            str: [3, [1]],
        }
        words = [word for one in types if get_origin(one) is Literal for word in get_args(one)]
        for value in [3, ["x"]] if words else wrong[types[0]]:
            if (name, value) != ("checkpoints", 3):  # the number of an iteration
                add("wrong type", command, name, value)
        for word in words:
            add("unknown word", command, name, word + "x", f"`{name}`", f"Did you mean '{word}'?")
        step = 1 if int in types else 1e-3
        for bound in bounds:
            if isinstance(bound, annotated_types.Ge):
                add("out of range", command, name, bound.ge - step)
            elif isinstance(bound, annotated_types.Gt):
                add("out of range", command, name, bound.gt)
            elif isinstance(bound, annotated_types.Le):
                add("out of range", command, name, bound.le + step if int in types else bound.le * 1.01)
            elif isinstance(bound, annotated_types.Lt):
                add("out of range", command, name, bound.lt)
            elif isinstance(bound, annotated_types.MinLen):
                add("out of range", command, name, "")
        for value in (
            [10**9, 10**30, -(10**9)] if int in types else [1e300, -(10**9), math.inf] if float in types else []
        ):
            if (name, value) not in (("seed", 10**9), ("max_sampled_tokens", 10**9)):  # a run may need them
                add("absurd size", command, name, value, "processes" if value > 0 and name == "n_processes" else name)
        add("misspelt name", command, name + "x", 1, f"`{name}x` is not a known parameter. Did you mean '{name}'?")
    return classes


NAMES = {
    "a workflow's name misspelt": Case({"workflow": "votin"}, ("`workflow` must be", "got 'votin'. Did you mean 'voting'?")),
    "a workflow that is a number": Case({"workflow": 3}, ("3 must have a coroutine method",)),
    "no workflow": Case({"workflow": ""}, ("`workflow` must be one of", "got ''")),
    "a file of workflows that is missing": Case({"workflow": "no-such.py:Debate"}, ("'no-such.py:Debate'",)),
    "a policy misspelt": Case({"policy": "spp"}, ("`policy` must be", "'spp'")),
    "a policy that is a number": Case({"policy": 3}, ("`policy` must be", "3")),
    "an empty policy": Case({"policy": ""}, ("`policy` must be", "''")),
    "an empty map": Case({"policy": {}}, ("aggregator",)),
    "a map without a role": Case({"policy": "generator=a"}, ("['aggregator']",)),
    "a map with a role too many": Case({"policy": "generator=a,aggregator=b,judge=c"}, ("['judge']",)),
    "a map with a role twice": Case({"policy": "generator=a,aggregator=b,generator=c"}, ("twice",)),
    "an adapter that is no name": Case({"policy": "generator=a.b,aggregator=c"}, ("'a.b'",)),
    "an adapter that is a path": Case({"policy": "generator=../a,aggregator=c"}, ("'../a'",)),
    "a task misspelt": Case({"task": "maths"}, ("`task` must be", "got 'maths'. Did you mean 'math'?")),
    "a task that is a list": Case({"task": ["math"]}, ("has no `problems`",)),
    "no task": Case({"task": ""}, ("`task` must be one of", "got ''")),
    "a capital workflow": Case({"workflow": "Voting"}, ("got 'Voting'. Did you mean 'voting'?",)),
    "a negative anchor": Case({"role_beta": {"generator": -1}}, ("The KL weight of `generator` must not be negative, got -1.0",)),
    "an anchor of a role that is not there": Case({"role_beta": {"judge": 1.0}}, ("`role_beta` names ['judge'], but the roles are ['generator', 'aggregator']",)),
    "an anchor that is a word": Case({"role_beta": "strong"}, ("`role_beta`", "got 'strong'")),
    "a private name": Case({"_seed": 1}, ("`_seed` is not a known parameter",)),
    "a name with a dash": Case({"n-voters": 1}, ("`n-voters` is not a known parameter. Did you mean 'n_voters'?",)),
    "a capital name": Case({"SEED": 1}, ("`SEED` is not a known parameter. Did you mean 'seed'?",)),
}  # fmt: skip
TOGETHER = {
    "fewer rows than problems": Case({"n_train": 4}, ("`n_train` must be at least `n_problems` (8), got 4",)),
    "a warm-up beyond the end": Case({"warmup_steps": 61}, ("at most the 60 ticks of `max_steps`, got 61",)),
    "steps by tokens without their number": Case({"updates": "tokens"}, ("`step_tokens` must be set",)),
    "a number of tokens for nothing": Case({"step_tokens": 100}, ("`step_tokens` must be set", "got 100")),
    "partial steps by tokens": Case(
        {"updates": "tokens", "step_tokens": 9, "minibatch_split": "sequential"}, ("minibatch_split='even'",)
    ),
    "a missing model at a tiny scale": Case({"model": "m"}, ("`model` must be an existing folder or GGUF file", "'m'")),
    "rows at a tiny scale": Case({"data": "d"}, ("`data` replaces the rows", "cannot be used here", "Write scale='0.6b'")),
    "a model that is missing": Case({"scale": "0.6b", "model": "no-such"}, ("`model` must be an existing folder or GGUF file",)),
    "rows that are missing": Case({"scale": "0.6b", "data": "no-such"}, ("`data` must be an existing local path",)),
    "processes that share no batch": Case({"n_processes": 3}, ("a multiple of the 3 processes", "got 8")),
    "an evaluation by several": Case({"n_processes": 2}, ("`n_processes` must be 1",), command="evaluate"),
    "checkpoints that are no steps": Case({"checkpoints": "ten"}, ("'all', or steps and names",), command="evaluate"),
    "a transfer to the source": Case(
        {"workflow": "single", "adapters": "transfer"}, ("plays another workflow with the single agent's adapter",), command="evaluate"
    ),
    "an evaluation before the run": Case({}, ("which is not finished. Train it first",), command="evaluate"),
    "a tracker that is unknown": Case(SMALL | {"report_to": "nosuch"}, ("nosuch is not supported, only",)),
    "a tracker that is not installed": Case(SMALL | {"report_to": "comet_ml"}, ("requires comet-ml",)),
    "an evaluation's parameter for a training": Case({"num_generations_eval": 2}, ("`num_generations_eval` is not a known parameter",)),
}  # fmt: skip


# ---- models, rows, machines


def edit(name: str, **values: object) -> Callable[[Path], None]:
    """Return a function that changes entries of a JSON file; None removes one."""

    def change(folder: Path) -> None:
        held = json.loads((folder / name).read_text()) | values
        (folder / name).write_text(json.dumps({key: value for key, value in held.items() if value is not None}))

    return change


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-50])


def absent(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def nothing(folder: Path) -> None:
    pass


def _model(change: Callable[[Path], object], *words: str, **fields: object) -> Case:
    def spoil(folder: Path) -> dict[str, object]:
        shutil.copytree(TINY, folder / "bad")
        change(folder / "bad")
        return {"model": str(folder / "bad")}

    return Case(PAPER | fields, words, spoil=spoil)


MODELS = {
    "no chat template": _model(absent("chat_template.jinja"), "chat template that cannot write"),
    "template that refuses users": _model(text("chat_template.jinja", "{{ raise_exception('no users') }}"), "no users"),
    "template that drops the user": _model(text("chat_template.jinja", "Hello."), "leaves out message 1 of a conversation of 3"),
    "no end of sequence": _model(edit("tokenizer_config.json", eos_token=None), "without an end-of-sequence token"),
    "tokenizer of another model": _model(edit("config.json", vocab_size=100), "ids up to 543, but", "ids up to 99"),
    "turn marks unknown": _model(nothing, "renderer='released_code' writes", renderer="released_code"),
    "encoder and decoder": _model(
        edit("config.json", model_type="t5", architectures=["T5ForConditionalGeneration"]), "T5ForConditionalGeneration", "causal"
    ),
    "masked language model": _model(
        edit("config.json", model_type="bert", architectures=["BertForMaskedLM"]), "BertForMaskedLM", "causal"
    ),
    "unknown architecture": _model(edit("config.json", model_type="qwen9", architectures=None), "incomplete or damaged", "qwen9"),
    "no dense decoder": _model(edit("config.json", intermediate_size=None), "no ['intermediate_size']"),
    "weights cut off": _model(cut("model.safetensors"), "incomplete or damaged"),
    "weights emptied": _model(text("model.safetensors", ""), "incomplete or damaged"),
    "no weights": _model(absent("model.safetensors"), "save_pretrained"),
    "config cut off": _model(cut("config.json"), "config.json is not a valid JSON"),
    "tokenizer cut off": _model(cut("tokenizer.json"), "incomplete or damaged"),
    "no tokenizer": _model(absent("tokenizer_config.json"), "no ['tokenizer_config.json']"),
}  # fmt: skip


def _rows(file: str, rows: str | list[dict], *words: str, **fields: object) -> Case:
    def spoil(folder: Path) -> dict[str, object]:
        path = folder / file
        path.write_text(rows) if isinstance(rows, str) else write(path, rows)
        return {"data": str(path)}

    return Case(PAPER | fields, words, spoil=spoil)


ROWS = {
    "missing columns": _rows("a.jsonl", [{"question": "1+1?"}], "a.jsonl", "write the columns"),
    "empty": _rows("a.jsonl", "", "a.jsonl"),
    "duplicate ids": _rows("a.jsonl", many(1) * 20, "19"),
    "broken rows": _rows("a.jsonl", many(20, solution={3: ""}), "row 3", "At most 1%"),
    "cut off": _rows("a.jsonl", '{"prompt": "1+1?", "sol', "a.jsonl"),
    "cut off parquet": _rows("a.parquet", "PAR1 and no more", "a.parquet cannot be read"),
    "unknown kind": _rows("a.txt", "prompt,solution", "a.txt"),
    "no text but bytes": _rows("a.jsonl", "\0\0\0", "a.jsonl"),
    "a list of numbers": _rows("a.jsonl", "[1, 2]", "a.jsonl"),
    "code rows for math": _rows("a.jsonl", [{"problem": "x", "tests": "[]"}] * 20, "a.jsonl"),
    "math rows for code": _rows("a.jsonl", many(20), "a.jsonl", task="code"),
    "fewer than validation needs": _rows("a.jsonl", many(10), "got count=2. Write 1 <= count <= 1"),
    "over-long prompts": Case(PAPER | {"max_prompt_tokens": 5}, ("`max_prompt_tokens` (5) leaves 0 of 21",)),
    "fewer than n_problems": Case(PAPER | {"n_problems": 22}, ("`n_problems` must be at most the 21 training problems",)),
    "fewer than n_train": Case(PAPER | {"n_train": 500}, ("holds 21 problems, got count=500",)),
}  # fmt: skip
MACHINES = {
    "nothing": Case(PAPER, (), "accepted"),
    "no GPU": Case(PAPER | {"model": None}, ("scale='0.6b' needs one", "Use scale='tiny-r'")),
    "vLLM too old": Case(PAPER | {"engine": "vllm"}, ("0.11.0",), patched={"multirole_study.experiment.hardware.version": lambda name: "0.11.0"}),
    "vLLM too new": Case(PAPER | {"engine": "vllm"}, ("1.0.0",), patched={"multirole_study.experiment.hardware.version": lambda name: "1.0.0+cu130"}),
    "no vLLM": Case(
        PAPER | {"engine": "vllm"}, ("found none. engine='vllm' needs", "0.31.0 or 0.32.0 or 0.33.0 here, the accepted versions. Install one"),
        patched={"multirole_study.experiment.hardware.installed": lambda *names: {}},
    ),
    "too little memory": Case(PAPER, ("does not fit", "0.25 GiB"), patched={"multirole_study.plan.this_device": lambda: ("CPU", 2**28)}),
    "too little disk": Case(
        PAPER, ("1 MiB free", "larger disk"), patched={"shutil.disk_usage": lambda folder: SimpleNamespace(free=2**20)}
    ),
    "results in a file": Case(SMALL, ("`results_dir` must be a folder that can be written to",),
                              spoil=lambda folder: text("results", "kept")(folder) and None),
    "results in a device": Case(SMALL | {"results_dir": "/dev/null"}, ("`results_dir` must be a folder",)),
    "results in the kernel's files": Case(SMALL | {"results_dir": "/proc/1/x"}, ("a results_dir on a larger disk",)),
}  # fmt: skip


# ---- code of one's own

WORKFLOW = """
import asyncio, sys, time
from multirole import Answer, user
class Own:
    name, roles = {name!r}, {roles!r}
    async def run(self, problem, call):
        {body}
"""


def _workflow(
    *words: str, body: str = "return Answer('')", name: str = "own", roles: object = None, file: str = ""
) -> Case:
    content = file or WORKFLOW.format(name=name, roles={"speaker": 1} if roles is None else roles, body=body)
    spec = {"policy": "sp"} | SMALL
    return Case(
        spec,
        words,
        spoil=lambda folder: _written(folder, content),
        patched={"multirole_study.experiment.preflight.DRY_SECONDS": 0.3, "multirole.watched_thread.POLL": 0.1},
    )


def _written(folder: Path, content: str) -> dict[str, object]:
    (folder / "user_files.py").write_text(content)
    return {"workflow": f"{folder}/user_files.py:Own"}


def _task(*words: str, file: str) -> Case:
    def spoil(folder: Path) -> dict[str, object]:
        (folder / "user_files.py").write_text(file.replace("FOLDER", str(folder)))
        return {"task": f"{folder}/user_files.py:task"}

    return Case(SMALL | {"n_train": None, "n_validation": None}, words, spoil=spoil)


TASK = "from multirole_study.tasks import Task\nrows = [{{'prompt': f'{{i}}?'}} for i in range(4)]\n"
TASK += "task = Task({name!r}, {train}, rows, lambda completions, **_: [0.0] * len(completions){more})\n"
OWN = {
    "not Python": _workflow("user_files.py cannot be imported: SyntaxError", file="class Own(:"),
    "an import that fails": _workflow("cannot be imported: ModuleNotFoundError", file="import no_such_module"),
    "an exit at import": _workflow("cannot be imported: SystemExit", file="import sys\nsys.exit(0)"),
    "no such class": _workflow("defines no 'Own'", file="class Oen: pass"),
    "a class with arguments": _workflow("cannot be called without arguments", file="class Own:\n    def __init__(self, n): pass"),
    "no run": _workflow("must have a coroutine method", file="class Own:\n    name, roles = 'own', {'a': 1}"),
    "a run that is no coroutine": _workflow(
        "must have a coroutine method", file="class Own:\n    name, roles = 'own', {'a': 1}\n    def run(self, problem, call): pass"
    ),
    "no name": _workflow("`workflow.name` must be", "got None", file="class Own:\n    roles = {'a': 1}\n    async def run(self, problem, call): pass"),
    "a name that is a path": _workflow("plain identifier", "'../../../x'", name="../../../x"),
    "a name of two words": _workflow("plain identifier", name="two words"),
    "a built-in's name": _workflow("no built-in", name="voting"),
    "no roles": _workflow("`workflow.roles` must map", roles={}),
    "roles in a list": _workflow("`workflow.roles` must map", roles=["speaker"]),
    "a role without slots": _workflow("the role 'speaker' the number of slots 0, which must be 1 or more", roles={"speaker": 0}),
    "a role that is a path": _workflow("has the role '../x'. A role's name must begin with a letter", roles={"../x": 1}),
    "endless calls": _workflow("at most `max_turns` (256) calls", body="i = 0\n        while True: i = (await call('speaker', [user('?')], round=i)).round + 1"),
    "a busy loop": _workflow("for 0.3 s no episode has made a call", body="end = time.monotonic() + 1\n        while time.monotonic() < end: pass"),
    "a sleep": _workflow("for 0.3 s no episode has made a call", "time.sleep", body="time.sleep(60)"),
    "a wait": _workflow("for 0.3 s no episode has made a call", body="await asyncio.sleep(60)"),
    "an exit": _workflow("SystemExit", body="sys.exit(0)"),
    "a slot that is not declared": _workflow("slot=1)`", body="await call('speaker', [user('?')], slot=1)"),
    "a role that is not declared": _workflow("call('judge'", body="await call('judge', [user('?')])"),
    "text for an answer": _workflow("returned a str", body="return '42'"),
    "no answer": _workflow("returned a NoneType", body="pass"),
    "an exception": _workflow("ZeroDivisionError: division by zero", "in run", body="1 / 0"),
    "a number for messages": _workflow("must be a list of at least one message", "got 3", body="await call('speaker', 3)"),
    "a task of no kind": _task("has no `problems`", file="task = 3"),
    "a task with a path for a name": _task("plain identifier", "'../x'", file=TASK.format(name="../x", train="rows", more="")),
    "a task without rows": _task("needs at least one row", file=TASK.format(name="own", train="[]", more="")),
    "a task whose rows have no prompt": _task("column 'prompt'", file=TASK.format(name="own", train="[{'q': 1}]", more="")),
    "a task whose rows are missing": _task("must be a file", file=TASK.format(name="own", train="'FOLDER/no.jsonl'", more="")),
    "a task whose rows are broken": _task("must be a file", file=TASK.format(name="own", train="'FOLDER/own.py'", more="")),
    "a task whose rows fail": _task("no rows today", file="class Own:\n    name = 'own'\n    def problems(self, split, count=None): raise ValueError('no rows today')\n"
                                    "    def extract(self, text): pass\n    def score(self, problems, texts): pass\n    def describe(self): return {}\ntask = Own()"),
}  # fmt: skip


# ---- records of runs

RUN = {"workflow": "voting", "policy": "ip"} | SMALL | {"n_validation": 4, "eval_steps": 1, "save_steps": 1, "max_steps": 3,
                                                       "max_completion_length": 24}  # fmt: skip


def records(whole: Path) -> dict[str, Case]:
    """Return damages to a killed run and to a finished one; `whole` is the results folder of a finished run."""
    cases = {}

    def add(name: str, outcome: str, harm: Callable[[Path], object], *words: str, is_done: bool = False) -> None:
        def spoil(folder: Path) -> None:
            shutil.copytree(whole, folder / "results")
            (run,) = (folder / "results").glob("tiny-r/*")
            if not is_done:
                (run / "DONE").unlink()
            harm(run)

        cases[name] = Case(RUN, words, outcome, spoil)

    adapter = "generator/adapter_model.safetensors"
    files = (
        "optimizer.pt",
        "trainer_state.json",
        "checksums.json",
        adapter,
        "record/eval.parquet",
        "record/turns/step_00001.parquet",
    )
    for name, harm in HARMS.items():
        for file in files:
            add(
                f"{file} of the newest checkpoint {name}",
                "continued",
                lambda run, f=file, h=harm: h(run / "checkpoints/checkpoint-3" / f),
            )
            add(f"{file} of both checkpoints {name}", "refused",
                lambda run, f=file, h=harm: [h(one / f) for one in run.glob("checkpoints/checkpoint-*")], "all of them are damaged")  # fmt: skip
        for file in ("metrics.parquet", "turns/step_00002.parquet", f"adapters/step_00003/{adapter}"):
            add(f"{file} {name}", "continued", lambda run, f=file, h=harm: h(run / f))
            add(f"{file} of a finished run {name}", "continued", lambda run, f=file, h=harm: h(run / f), is_done=True)
        add(f"the adapter of a step without a checkpoint {name}", "refused", lambda run, h=harm: h(run / "adapters/step_00001" / adapter),
            "all of them are damaged")  # fmt: skip
        add(f"config.json {name}", "continued" if name == "deleted" else "refused", lambda run, h=harm: h(run / "config.json"),
            *([] if name == "deleted" else ["another configuration"]))  # fmt: skip
        add(
            f"DONE {name}",
            "continued",
            lambda run, h=harm: h(run / "DONE"),
            is_done=True,
        )
    add("an empty list in DONE", "continued", text("DONE", "{}"), is_done=True)
    add("nothing", "finished", nothing, is_done=True)
    add(
        "no checkpoints and tables",
        "refused",
        lambda run: shutil.rmtree(run / "checkpoints"),
        "holds tables and no checkpoints",
    )
    add("results of another seed", "refused", edit("config.json", seed=7), "another configuration")
    add("a stale LOCK", "continued", text("LOCK", ""))
    return cases


def in_use(scratch: Path) -> tuple[str, str]:
    """Return the outcome of a run whose folder another process holds."""
    run = scratch / "results" / "tiny-r" / Cell(**RUN).id
    run.mkdir(parents=True)
    with claim(run), mock.patch("multirole_study.experiment.run_folder.LOCK_SECONDS", 0.1):
        return attempt(Case(RUN), scratch)


def whole_run(scratch: Path) -> Path:
    """Train a small run to its end and return its results folder."""
    with contextlib.redirect_stdout(io.StringIO()):
        run_cell(Cell(**RUN), scratch / "whole")
    return scratch / "whole"


def on_a_bare_machine(folder: Path) -> contextlib.ExitStack:
    """Simulate a machine without GPU, network or cached models."""
    held = contextlib.ExitStack()
    held.enter_context(mock.patch("torch.cuda.is_available", lambda: False))
    held.enter_context(mock.patch("huggingface_hub.constants.HF_HUB_CACHE", str(folder)))
    held.enter_context(mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True))
    return held


CLASSES = {
    **_parameters(), "names": NAMES, "impossible together": TOGETHER, "models": MODELS, "rows": ROWS, "machines": MACHINES,
    "own workflows and tasks": OWN,
}  # fmt: skip
assert run and user_files  # patched by name
