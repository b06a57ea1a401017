"""Import TRL's `GRPOTrainer` without importing vLLM.

TRL imports all of vLLM if it is installed (3 CPU-seconds and 200 MB in every process), for an engine that is not used here;
`multirole.engines.vllm_engine` imports vLLM on demand. So while TRL is imported, vLLM's modules are replaced by stand-ins
whose names import the real ones at first use. TRL itself is not changed: its own `use_vllm=True` works later in the same
process.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class DeferredName:
    """A stand-in for a name of a vLLM module. Calling it or reading an attribute imports vLLM."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(self._module), self._name)(*args, **kwargs)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(getattr(import_module(self._module), self._name), attribute)


class DeferredModules(MetaPathFinder, Loader):
    """Import hook that supplies a stand-in for every module of vLLM."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == "vllm" else None

    def exec_module(self, module: ModuleType) -> None:
        def deferred(name: str) -> DeferredName:
            if name.startswith("__"):
                raise AttributeError(name)
            return DeferredName(module.__name__, name)

        module.__dict__["__getattr__"] = deferred


@contextmanager
def deferred_vllm() -> Iterator[None]:
    """Context manager: imports of vLLM get stand-ins, unless vLLM is already imported; afterwards they get vLLM."""
    if "vllm" in sys.modules:
        yield
        return
    finder = DeferredModules()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]


with deferred_vllm():
    from trl import GRPOTrainer

__all__ = ["GRPOTrainer"]
