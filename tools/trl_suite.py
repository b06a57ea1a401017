"""Run TRL's own tests of its GRPO trainer, bodies unchanged, with stock TRL and LoRA and with `MultiRoleGRPOTrainer` and one role.

    python tools/trl_suite.py TRL_CHECKOUT/tests/test_grpo_trainer.py [--only WORDS] [--table FILE]

The tests' models and data are on the Hub. Random models of the same architectures and names, a tokenizer with Qwen2.5's ids of the
special tokens, and the rows of the "zen" dataset are made in a folder, from which the tests run. So nothing is downloaded, and tests
of vision models or of tool calls fail with both trainers, which leaves them out of the table.

A test counts if stock TRL passes it here with LoRA. It is *refused* if the configuration or the trainer raises ValueError or TypeError
before a model is loaded. The module is also the pytest plugin that replaces `GRPOTrainer` and `GRPOConfig` in the test module.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

HUB = "trl-internal-testing"
ZEN = """Beautiful is better than| ugly.
Explicit is| better than implicit.
Simple is better| than complex.
Complex| is better than complicated.
Flat is better than| nested.
Sparse is better| than dense.
Readability| counts.
Special cases aren't special| enough to break the rules.
Although practicality beats| purity.
Errors should never| pass silently.
Unless explicitly| silenced.
In the face of ambiguity, refuse| the temptation to guess.
There should be one-- and preferably| only one --obvious way to do it.
Although that way may not be obvious at first unless you're| Dutch.
Now is| better than never.
Although never is often| better than *right* now.
If the implementation is hard to explain,| it's a bad idea.
If the implementation is easy| to explain, it may be a good idea.
Namespaces are one| honking great idea -- let's do more of those!"""
N_TEST = 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|finetune_right_pad_id|>")
SMALL_VOCABULARY, WHOLE_VOCABULARY = 1024, 151936
IDS = "mask_truncated"
"""Tests that name ids of Qwen2.5's tokenizer, or need an improbable end of turn. The others use a small vocabulary, which is ten times faster."""
SMALL = {
    "hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "bos_token_id": None,
}  # fmt: skip
EXPERTS = SMALL | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "output_router_logits": True,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2ForCausalLM", SMALL),
    "tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2ForSequenceClassification", SMALL | {"num_labels": 1}),
    "tiny-Qwen3ForCausalLM": ("Qwen3ForCausalLM", SMALL | {"head_dim": 4}),
    "tiny-Qwen3ForSequenceClassification": ("Qwen3ForSequenceClassification", SMALL | {"head_dim": 4, "num_labels": 1}),
    "tiny-LlamaForSequenceClassification-3.2": ("LlamaForSequenceClassification", SMALL | {"num_labels": 1}),
    "tiny-Cohere2ForCausalLM": ("Cohere2ForCausalLM", SMALL | {"logit_scale": 0.125}),
    "tiny-Gemma2ForCausalLM": ("Gemma2ForCausalLM", SMALL | {"head_dim": 4}),
    "tiny-Glm4MoeForCausalLM": (
        "Glm4MoeForCausalLM",
        SMALL | {"head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
                 "first_k_dense_replace": 1},
    ),
    "tiny-GptOssForCausalLM": (
        "GptOssForCausalLM", SMALL | {"head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "tiny-Qwen3MoeForCausalLM": ("Qwen3MoeForCausalLM", EXPERTS | {"head_dim": 4}),
    "tiny-NemotronHForCausalLM-nano": (
        "NemotronHForCausalLM",
        SMALL | {"num_hidden_layers": 4, "layers_block_type": ["mamba", "attention", "moe", "mlp"], "head_dim": 4, "mamba_num_heads": 4,
                 "mamba_head_dim": 4, "ssm_state_size": 4, "n_groups": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16, "n_shared_experts": 1},
    ),
    "tiny-RemoteForCausalLM": ("Qwen2ForCausalLM", SMALL),
}  # fmt: skip
REMOTE = """from transformers import Qwen2Config, Qwen2ForCausalLM


class RemoteConfig(Qwen2Config):
    model_type = "remote"


class RemoteForCausalLM(Qwen2ForCausalLM):
    config_class = RemoteConfig
"""


# ---- what the tests load


def build_hub(folder: Path, n_vocabulary: int) -> None:
    """Write the dataset and the models that the tests name, each under its name on the Hub."""
    build_zen(folder / HUB / "zen")
    import torch
    import transformers

    tokenizer = build_tokenizer(n_vocabulary)
    usual = {"vocab_size": n_vocabulary, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    for name, (architecture, options) in MODELS.items():
        torch.manual_seed(0)
        model_class = getattr(transformers, architecture)
        pad = {"pad_token_id": tokenizer.convert_tokens_to_ids("<|finetune_right_pad_id|>")} if "Llama" in name else {}
        model = model_class(model_class.config_class(**usual | pad | options))
        model.save_pretrained(folder / HUB / name)
        tokenizer.save_pretrained(folder / HUB / name)
    remote = folder / HUB / "tiny-RemoteForCausalLM"
    (remote / "modeling_remote.py").write_text(REMOTE)
    config = json.loads((remote / "config.json").read_text()) | {
        "model_type": "remote",
        "architectures": ["RemoteForCausalLM"],
        "auto_map": {"AutoConfig": "modeling_remote.RemoteConfig", "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM"},
    }  # fmt: skip
    (remote / "config.json").write_text(json.dumps(config))


def build_zen(folder: Path) -> None:
    """Write the two configurations of the "zen" dataset that have prompts alone."""
    prompts = [line.split("|")[0] for line in ZEN.splitlines()]
    configs = []
    for config in ("standard_prompt_only", "conversational_prompt_only"):
        (folder / config).mkdir(parents=True)
        rows = [{"prompt": p if "standard" in config else [{"role": "user", "content": p}]} for p in prompts]
        for split, part in (("train", rows[:-N_TEST]), ("test", rows[-N_TEST:])):
            (folder / config / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        files = "".join(f"  - split: {split}\n    path: {config}/{split}.jsonl\n" for split in ("train", "test"))
        configs.append(f"- config_name: {config}\n  data_files:\n{files}")
    (folder / "README.md").write_text("---\nconfigs:\n" + "".join(configs) + "---\n")


def build_tokenizer(n_vocabulary: int) -> Any:
    """Build a byte-level tokenizer with Qwen2.5's bytes, special tokens and chat template, and meaningless tokens for all other ids.

    In a vocabulary of Qwen2.5's size the special tokens have its ids.
    """
    import trl
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # GPT-2's order of bytes: printable ones first
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    first = n_vocabulary - (WHOLE_VOCABULARY - 151643 if n_vocabulary == WHOLE_VOCABULARY else len(SPECIAL))
    ids = dict(zip(letters, range(256), strict=True)) | {f"\u2038{i}\u2038": i for i in range(256, first)}
    ids |= {token: first + i for i, token in enumerate(SPECIAL)}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    return fast


# ---- the pytest plugin

IS_LOADED = False
"""Records whether a model was loaded for the trainer under test."""
REFUSALS: dict[str, str] = {}
"""Test -> the error that the configuration or the trainer raised in it before anything was loaded."""
CURRENT = ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--trl-trainer", choices=("stock", "multirole"))
    parser.addoption("--trl-results")
    parser.addoption("--trl-epochs", type=float)


def with_lora(trainer_class: type) -> type:
    """Return the trainer class with LoRA on all linear layers if a test trains the whole model; such a test then sees only the adapter's weights."""
    from peft import LoraConfig, PeftModel

    class WithLora(trainer_class):  # type: ignore[misc]
        def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, *rest: Any, **named: Any) -> None:
            is_ours = named.get("peft_config") is None and not isinstance(model, PeftModel)
            if is_ours:
                named["peft_config"] = LoraConfig(target_modules="all-linear")
            super().__init__(model, reward_funcs, args, *rest, **named)
            if is_ours:
                trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
                self.model.named_parameters = lambda *_, **__: iter(trained)

    WithLora.__name__ = trainer_class.__name__
    return WithLora


def importable(local_class: type) -> type:
    """Give a local class a name in this module, so that `torch.save` can store its objects."""
    local_class.__module__, local_class.__qualname__ = __name__, local_class.__name__
    globals()[local_class.__name__] = local_class
    return local_class


def replacements(name: str, epochs: float | None) -> tuple[type, type]:
    """Return the trainer and the configuration that a test gets under TRL's names.

    The stock configuration is without bf16, which a CPU does not have. Both train for `epochs`, if it is set.
    """
    from trl import GRPOConfig, GRPOTrainer

    if name == "stock":

        class Config(GRPOConfig):  # type: ignore[misc]
            def __post_init__(self) -> None:
                self.bf16 = False if self.bf16 is None else self.bf16
                self.num_train_epochs = epochs or self.num_train_epochs
                super().__post_init__()

        class Stock(GRPOTrainer):  # type: ignore[misc]
            def __init__(self, model: Any, reward_funcs: Any, args: Any, *rest: Any, **named: Any) -> None:
                super().__init__(model, reward_funcs, args or Config("multirole-grpo"), *rest, **named)

        return with_lora(Stock), importable(Config)

    from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer, Single
    from multirole import trainer as module

    load = module.with_adapters

    def loading(*args: Any) -> Any:
        global IS_LOADED
        IS_LOADED = True
        return load(*args)

    module.with_adapters = loading

    def recorded(call: Any, *args: Any, **named: Any) -> None:
        global IS_LOADED
        IS_LOADED = False
        try:
            call(*args, **named)
        except (ValueError, TypeError) as error:
            if not IS_LOADED:
                REFUSALS[CURRENT] = str(error)
            raise

    class OneRole(MultiRoleGRPOTrainer):
        def __init__(self, model: Any, reward_funcs: Any, args: Any, *rest: Any, **named: Any) -> None:
            recorded(super().__init__, model, Single(), reward_funcs, args, *rest, **named)

    class Recorded(MultiRoleGRPOConfig):
        def __post_init__(self) -> None:
            self.num_train_epochs = epochs or self.num_train_epochs
            recorded(super().__post_init__)

    return with_lora(OneRole), importable(Recorded)


@pytest.fixture(autouse=True)
def trainer_under_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test module the trainer and the configuration under test."""
    global CURRENT
    CURRENT = request.node.nodeid.split("::", 1)[1]
    config = request.config
    if not hasattr(config, "_replacements"):
        config._replacements = replacements(config.getoption("--trl-trainer"), config.getoption("--trl-epochs"))
    for name, value in zip(("GRPOTrainer", "GRPOConfig"), config._replacements, strict=True):
        monkeypatch.setattr(request.module, name, value)


OUTCOMES: dict[str, tuple[str, str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid.split("::", 1)[1]
    if report.when == "call" or report.outcome != "passed":
        message = report.longrepr.reprcrash.message if hasattr(report.longrepr, "reprcrash") else ""
        OUTCOMES[name] = (report.outcome, message)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if target := session.config.getoption("--trl-results"):
        Path(target).write_text(json.dumps({"outcomes": OUTCOMES, "refusals": REFUSALS}))


# ---- the command


def run(trainer: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the suite with one trainer, from the folders of models, and return its outcomes and refusals."""
    both: dict[str, Any] = {"outcomes": {}, "refusals": {}}
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    for n_vocabulary, tests in ((SMALL_VOCABULARY, f"not {IDS}"), (WHOLE_VOCABULARY, IDS)):
        hub = folder / str(n_vocabulary)
        if not hub.exists():
            build_hub(hub, n_vocabulary)
        results = hub / f"{trainer}.json"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "trl_suite", "-p", "no:cacheprovider", "--tb=short", "-W", "ignore", "--rootdir",
                   str(args.suite.parent.parent), f"--trl-trainer={trainer}", f"--trl-results={results}", str(args.suite),
                   "-k", f"{tests} and ({args.only})" if args.only else tests]  # fmt: skip
        command += [f"--trl-epochs={args.epochs}"] if args.epochs else []
        results.unlink(missing_ok=True)
        code = subprocess.run(command, check=False, cwd=hub, env=environment).returncode
        if code == pytest.ExitCode.NO_TESTS_COLLECTED and args.only:
            continue
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            sys.exit(
                f"pytest ended with exit code {code} for {trainer}, so its outcomes are not complete. Its output is above."
            )
        for kind, values in json.loads(results.read_text()).items():
            both[kind] |= values
    return both


def classify(stock: dict[str, Any], ours: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return test -> ("passed" | "refused" | "failed", message), for the tests that stock TRL passes."""
    table = {}
    for name, (outcome, _) in stock["outcomes"].items():
        if outcome == "passed":
            our_outcome, message = ours["outcomes"].get(name, ("failed", "did not run"))
            refusal = ours["refusals"].get(name)
            is_refused = our_outcome == "failed" and refusal is not None and refusal[:60] in message
            table[name] = ("refused", refusal) if is_refused else (our_outcome, message)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", type=Path, help="tests/test_grpo_trainer.py of a checkout of TRL")
    parser.add_argument("--only", help="expression of `pytest -k`")
    parser.add_argument("--epochs", type=float, help="epochs of every test; 1 takes a third of the time")
    parser.add_argument(
        "--hub", type=Path, help="folder of the models, which are made if they do not exist; by default a temporary one"
    )
    parser.add_argument("--stock", type=Path, help="outcomes of stock TRL: read if the file exists, else written")
    parser.add_argument("--table", type=Path, help="write every test's outcome to this JSON file")
    args = parser.parse_args()
    args.suite = args.suite.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.hub or Path(temporary)).resolve()
        if args.stock and args.stock.exists():
            stock = json.loads(args.stock.read_text())
        else:
            stock = run("stock", args, folder)
        ours = run("multirole", args, folder)
    if args.stock:
        args.stock.write_text(json.dumps(stock))
    if args.only:  # outcomes that --stock holds may be of more tests
        stock["outcomes"] = {name: value for name, value in stock["outcomes"].items() if name in ours["outcomes"]}
    table = classify(stock, ours)
    if not table:
        sys.exit(
            "No test passes with stock TRL, so there is nothing to compare. Check the path of the suite and --only."
        )
    print(f"stock TRL with LoRA: {dict(Counter(outcome for outcome, _ in stock['outcomes'].values()))}")
    print(f"of the {len(table)} that pass: {dict(Counter(outcome for outcome, _ in table.values()))}")
    for name, (outcome, message) in table.items():
        if outcome != "passed":
            print(f"{outcome}: {name}\n    {message}")
    if args.table:
        args.table.write_text(json.dumps(table, indent=1))
    sys.exit(any(outcome == "failed" for outcome, _ in table.values()))


if __name__ == "__main__":
    main()
