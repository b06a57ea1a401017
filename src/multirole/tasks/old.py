"""The tasks by name, with the calls that other rooms still make. To be deleted once they have switched."""

from multirole.tasks.code import Code
from multirole.tasks.math import Math
from multirole.tasks.tiny_code import TinyCode
from multirole.tasks.tiny_math import TinyMath


class _Old:
    def __init__(self, kind):
        self.kind = kind

    def problems(self, split, count=None, **options):
        return self.kind(**options).problems(split, count)

    def describe(self, **options):
        return self.kind(**options).describe()

    def extract(self, text):
        return self.kind().extract(text)

    def score_batch(self, problems, texts, malformed=None, code_reward=None, limits=None):
        options = {} if malformed is None else {"malformed_reward": malformed}
        options |= {} if code_reward is None else {"reward": code_reward}
        return self.kind(**options).score(problems, texts)


EMBEDDED = {"tiny_math": _Old(TinyMath), "tiny_code": _Old(TinyCode)}
TASKS = EMBEDDED | {"math": _Old(Math), "code": _Old(Code)}
