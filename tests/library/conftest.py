"""Fixtures of the library's tests. Nothing in this folder imports the study: the model, its tokenizer and the task are toys."""

import pytest


@pytest.fixture(scope="session")
def tokenizer():
    """One token per byte, with the special tokens and the chat format of Qwen3."""
    from toy_qwen3 import toy_tokenizer

    return toy_tokenizer()


@pytest.fixture(scope="session")
def base() -> str:
    """The folder of a random Qwen3 and its tokenizer."""
    from toy_qwen3 import toy_base

    return toy_base()


@pytest.fixture
def make_diagnosed_trainer(make_library_trainer):
    """make_diagnosed_trainer(workflow, **config) -> a trainer with `RoleDiagnostics` before its other callbacks."""
    from multirole import RoleDiagnostics

    return lambda workflow, *args, callbacks=(), **config: make_library_trainer(
        workflow, *args, callbacks=[RoleDiagnostics(), *callbacks], **config
    )
