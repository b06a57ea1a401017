"""Normalise tests from the formats that datasets publish. Nothing is unpickled or evaluated.

The normalised form of a test (DeepCoder, LiveCodeBench):
`{"input", "output", "testtype": "stdin" | "functional", "metadata": {"func_name"}}`.
  * stdin: both are text. A list of lines is joined.
  * functional: `input` holds one JSON value per line, one per argument (empty: no arguments); `output` is the JSON of
    the expected value. `func_name` is a method of `class Solution` if the program has one of that name, else a function;
    it may be written `Solution().name`.
Other published forms are converted to it:
  * `type` for `testtype`, with "function_call" and `fn_name` for a call whose arguments are a list and whose output is
    a value (PrimeIntellect), or JSON of both;
  * a dict `{"inputs", "outputs", "fn_name"?}` (APPS, TACO, and LiveCodeBench's evaluation samples);
  * JSON text of any of them, or the text of a Python literal, as rllm and AReaL read it;
  * base64 of compressed, pickled JSON text (LiveCodeBench's private tests). The pickle is parsed operation by operation and
    rejected unless it holds a single string, because unpickling can run code.
If arguments are a list, some data wraps every expected value in a one-element list (APPS): if all outputs of a problem are
one-element lists, the tests are marked `is_wrapped` in their metadata and the bare value is correct as well.

Integers of any length are exact. Python converts at most 4300 digits, so longer integers go through Decimal.
"""

import ast
import base64
import binascii
import json
import pickletools
import re
import zlib
from decimal import Decimal

from multirole_sandbox.inside.limits import MAX_OUTPUT_BYTES

MAX_UNPACKED_BYTES = 1 << 30
LONGEST_INT = 4000  # digits, below Python's own limit
_FUNCTION = re.compile(r"(?:Solution(?:\(\))?\.)?(\w+)(?:\(\))?")
_TEXT_OF_PICKLE = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"}
_FRAME_OF_PICKLE = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"}


class MalformedTests(ValueError):
    """Tests in an unknown or invalid format."""


def normalise_tests(tests: list[dict] | dict | str, func_name: str | None = None) -> list[dict]:
    """Convert tests from any of the forms above to the normalised form. Raises MalformedTests, a ValueError.

    `func_name` is used for functional tests that do not name their function, such as LiveCodeBench's.
    """
    try:
        parsed = _read(tests) if isinstance(tests, str) else tests
        parsed = _list_of_tests(parsed) if isinstance(parsed, dict) else parsed
        if not isinstance(parsed, (list, tuple)) or not parsed:
            raise MalformedTests(f"they are {_kind(parsed)}, and a program cannot pass or fail without tests")
        read = [_numbered(number, len(parsed), test, func_name) for number, test in enumerate(parsed)]
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise MalformedTests(
            f"Got tests {str(tests)[:200]!r}, which cannot be read: {error or type(error).__name__}. Write a non-empty list of "
            '{"input": str, "output": str, "testtype": "stdin" or "functional", "metadata": {"func_name": str}}, or a dict '
            '{"inputs": list, "outputs": list, "fn_name": str}.'
        ) from error
    if all(is_listed and _is_list_of_one(test["output"]) for test, is_listed in read):
        for test, _ in read:
            test["metadata"]["is_wrapped"] = True
    return [test for test, _ in read]


def read_json(text: str | bytes) -> object:
    """Parse JSON with integers of any length. Raises ValueError or RecursionError."""
    return json.loads(text, parse_int=parse_integer)


def write_json(value: object) -> str:
    """Serialise to JSON with integers of any length; tuples become lists."""
    try:
        return json.dumps(value)
    except ValueError:  # more than 4300 digits somewhere
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(write_json, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{json.dumps(str(key))}: {write_json(item)}' for key, item in value.items())}}}"
        if isinstance(value, int):
            return str(Decimal(value))
        raise


def parse_integer(digits: str) -> int:
    """Convert any number of digits to an integer."""
    return int(digits) if len(digits) <= LONGEST_INT else int(Decimal(digits))


def _kind(value: object) -> str:
    return f"{'an empty' if value in ('', [], {}, ()) else 'a'} {type(value).__name__}"


def _read(text: str) -> object:
    """Parse a text as JSON, packed JSON, or a Python literal."""
    if not text.strip():
        raise MalformedTests("they are an empty text")
    try:
        parsed = read_json(text)
    except ValueError as error:
        packed = _unpack(text)
        try:
            parsed = ast.literal_eval(text.strip()) if packed is None else read_json(packed)
        except (ValueError, SyntaxError):
            raise MalformedTests(f"they are a text that is not JSON ({error})") from error
    if isinstance(parsed, str):
        raise MalformedTests(
            "their JSON holds a text instead of a list: it was encoded twice, so apply json.loads once before"
        )
    return parsed


def _unpack(text: str) -> str | None:
    """Decode base64 of zlib of JSON text, pickled or plain; None for any other text."""
    try:
        packed = base64.b64decode("".join(text.split()), validate=True)
        stream = zlib.decompressobj()
        data = stream.decompress(packed, MAX_UNPACKED_BYTES)
    except (binascii.Error, zlib.error, ValueError):
        return None
    if stream.unconsumed_tail:
        raise MalformedTests(f"they unpack to more than {MAX_UNPACKED_BYTES} bytes")
    if data[:1] != b"\x80":
        return data.decode()
    texts = []
    for operation, value, _ in pickletools.genops(data):
        if operation.name in _TEXT_OF_PICKLE:
            texts.append(value)
        elif operation.name not in _FRAME_OF_PICKLE:
            raise MalformedTests(
                f"they are a pickle of more than one text (it has the operation {operation.name}), and unpickling runs code"
            )
    if len(texts) != 1:
        raise MalformedTests(f"they are a pickle of {len(texts)} texts")
    return texts[0]


def _list_of_tests(tests: dict) -> list[dict]:
    """Convert `{"inputs", "outputs", "fn_name"?}` to a list of tests."""
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, (list, tuple)) or not isinstance(outputs, (list, tuple)):
        inside = ", of which 'test_cases' is the list to pass" if "test_cases" in tests else ""
        raise MalformedTests(
            f"a dict must have the lists 'inputs' and 'outputs', and this one has {sorted(map(str, tests))}{inside}"
        )
    if len(inputs) != len(outputs):
        raise MalformedTests(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
    pairs = zip(inputs, outputs, strict=True)
    name = tests.get("fn_name")
    if not name:
        return [{"input": arguments, "output": expected} for arguments, expected in pairs]
    kinds = {True: "functional", False: "function_call"}  # LiveCodeBench's samples have text
    return [{"type": kinds[isinstance(i, str)], "fn_name": name, "input": i, "output": o} for i, o in pairs]


def _numbered(number: int, count: int, test: object, func_name: str | None) -> tuple[dict, bool]:
    try:
        return _normalise(test, func_name)
    except (ValueError, TypeError) as error:
        raise MalformedTests(f"test {number} of {count} {error}") from error


def _normalise(test: object, func_name: str | None) -> tuple[dict, bool]:
    """Normalise one test; also return whether it is a call whose arguments are a list."""
    test = read_json(test) if isinstance(test, str) else test
    if not isinstance(test, dict):
        raise MalformedTests(f"is {_kind(test)}, not a dict")
    for key in ("input", "output"):
        if key not in test:
            raise MalformedTests(f"has no {key!r}; its keys are {sorted(map(str, test))}")
    metadata = test.get("metadata") or {}
    metadata = read_json(metadata) if isinstance(metadata, str) else metadata
    if not isinstance(metadata, dict):
        raise MalformedTests(f"has metadata that are {_kind(metadata)}, not a dict")
    name = test.get("fn_name") or metadata.get("func_name")
    kind = test.get("testtype") or test.get("type") or ("function_call" if name else "stdin")
    if kind in ("stdin", "stdin_stdout"):
        texts = {key: _text(key, test[key]) for key in ("input", "output")}
        _check_length(texts["output"])
        return texts | {"testtype": "stdin"}, False
    if kind not in ("functional", "function_call"):
        raise MalformedTests(f"has the testtype {kind!r}, which is unknown")
    arguments, expected, is_listed = _call(kind, test["input"], test["output"])
    _check_length(expected)
    names = {"func_name": _function_name(name or func_name)}
    names |= {"is_wrapped": True} if metadata.get("is_wrapped") is True else {}
    return {"input": arguments, "output": expected, "testtype": "functional", "metadata": names}, is_listed


def _check_length(expected: str) -> None:
    if len(expected) > MAX_OUTPUT_BYTES:
        raise MalformedTests(
            f"expects an output of {len(expected)} characters, and no program may write more than {MAX_OUTPUT_BYTES} bytes"
        )


def _text(key: str, value: object) -> str:
    if isinstance(value, (list, tuple)) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise MalformedTests(f"has {_kind(value)} as {key!r}, which must be text or a list of lines")
    return value


def _function_name(name: object) -> str:
    match = _FUNCTION.fullmatch(name.strip()) if isinstance(name, str) else None
    if match is None or not match[1].isidentifier():
        raise MalformedTests(f"needs metadata.func_name or fn_name, and {name!r} cannot be the name of a function")
    return match[1]


def _call(kind: str, raw_input: object, expected: object) -> tuple[str, str, bool]:
    """Return a call's argument lines, its expected value as JSON, and whether the arguments were a list."""
    if isinstance(raw_input, (list, tuple)):
        return "\n".join(map(write_json, raw_input)), write_json(expected), True
    if not isinstance(raw_input, str):
        raise MalformedTests(
            f"calls a function with {_kind(raw_input)} as 'input', which must be a list of arguments, or text with one JSON value a line"
        )
    output = expected.strip() if isinstance(expected, str) else write_json(expected)
    try:
        read_json(output)  # keep the text, which shows to how many decimals a number is rounded
    except ValueError:
        output = write_json(_literal("output", output))
    if kind == "function_call":
        arguments = _one_value(raw_input)
        if isinstance(arguments, list):
            return "\n".join(map(write_json, arguments)), output, True
    return "\n".join(_argument_lines(raw_input)), output, False


def _one_value(text: str) -> object:
    try:
        return read_json(text)
    except ValueError:
        return None


def _argument_lines(text: str) -> list[str]:
    """Return one JSON value per argument; the text may hold Python literals or multi-line JSON."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    try:
        for line in lines:
            read_json(line)
        return lines
    except ValueError:
        values = _json_values(text)
    return [
        write_json(value) for value in (values if values is not None else [_literal("input", line) for line in lines])
    ]


def _json_values(text: str) -> list[object] | None:
    """Parse concatenated JSON values; None if the text holds anything else."""
    decoder, values, at = json.JSONDecoder(parse_int=parse_integer), [], 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError:
            return None
        values.append(value)
    return values


def _literal(key: str, text: str) -> object:
    """Parse a Python literal made of JSON types. Raises MalformedTests."""
    try:
        value = ast.literal_eval(text)
        json.dumps(value)
    except (ValueError, SyntaxError, TypeError) as error:
        raise MalformedTests(
            f"calls a function, and its {key!r} {text[:80]!r} is neither JSON nor a Python value"
        ) from error
    return value


def _is_list_of_one(output: str) -> bool:
    value = read_json(output)
    return isinstance(value, list) and len(value) == 1
