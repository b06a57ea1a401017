# ruff: noqa: ISC004 (programs over several lines are written as adjacent strings)
"""Legal programs, for `test_sandbox_honest`: name -> (the program, [(input, expected, whether it should pass)])."""

import sys

CACHE_DEPTH = 20_000 if sys.version_info < (3, 12) else 400  # later Pythons limit recursion through C by themselves
SUM = [("1 2\n", "3", True), ("40 2\n", "42", True), ("5 5\n", "11", False)]
ECHO = [("abc\n", "abc", True), ("x y\n", "x y", True), ("1\n", "2", False)]

STDIN = {
    "input and print": ("a, b = map(int, input().split())\nprint(a + b)", SUM),
    "sys.stdin.read": ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", SUM),
    "sys.stdin.readline": ("import sys\ninput = sys.stdin.readline\na, b = input().split()\nprint(int(a) + int(b))", SUM),
    "sys.stdin.buffer": ("import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))", SUM),
    "sys.stdin.buffer.readline": ("import sys\ninput = sys.stdin.buffer.readline\nprint(sum(map(int, input().split())))", SUM),
    "iterates over stdin": ("import sys\nfor line in sys.stdin: print(sum(map(int, line.split())))", SUM),
    "open(0)": ("print(sum(map(int, open(0).read().split())))", SUM),
    "open(0) unpacked": ("a, b = map(int, [*open(0)][0].split())\nprint(a + b)", SUM),
    "open by the name of stdin": ("print(sum(map(int, open('/dev/stdin').read().split())))", SUM),
    "open by the path of stdin": ("from pathlib import Path\nprint(sum(map(int, Path('/dev/stdin').read_text().split())))", SUM),
    "io.open by the name of stdin": ("import io\nprint(sum(map(int, io.open('/dev/stdin').read().split())))", SUM),
    "os.read": ("import os\nprint(sum(map(int, os.read(0, 10**6).split())))", SUM),
    "fileinput": ("import fileinput\nfor line in fileinput.input(): print(sum(map(int, line.split())))", SUM),
    "input until its end": (
        "total = 0\ntry:\n    while True: total += sum(map(int, input().split()))\nexcept EOFError:\n    print(total)",
        SUM,
    ),
    "sys.stdout.buffer": ("import sys\nsys.stdout.buffer.write(input().encode() + b'\\n')", ECHO),
    "sys.stdout.write": ("import sys\nsys.stdout.write(input())", ECHO),
    "os.write": ("import os\nos.write(1, input().encode())", ECHO),
    "print without line ends": ("for c in input(): print(c, end='')", ECHO),
    "print to a file object": ("import sys\nprint(input(), file=sys.stdout, flush=True)", ECHO),
    "an unflushed file of its own": ("out = open(1, 'w')\nout.write(input())", ECHO),
    "os._exit after a flush": ("import os, sys\nprint(input())\nsys.stdout.flush()\nos._exit(0)", ECHO),
    "quit": ("print(input())\nquit()\nprint('no')", ECHO),
    "exit": ("print(input())\nexit()", ECHO),
    "sys.exit of zero": ("import sys\nprint(input())\nsys.exit(0)", ECHO),
    "raise SystemExit": ("print(input())\nraise SystemExit", ECHO),
    "an exit hook that prints": ("import atexit\natexit.register(lambda: print(input()))", ECHO),
    "stdout replaced": (
        "import io, sys\nsys.stdout = buffer = io.StringIO()\nprint(input(), end='')\n"
        "sys.__stdout__.write(buffer.getvalue())",
        ECHO,
    ),
    "stdout detached and wrapped": (
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding='utf-8')\nprint(input())",
        ECHO,
    ),
    "stdout detached and encoded": (
        "import codecs, sys\nsys.stdout = codecs.getwriter('utf-8')(sys.stdout.detach())\nprint(input())",
        ECHO,
    ),
    "fast input of a template": (
        "import os, sys\nfrom io import BytesIO, IOBase\n"
        "class FastIO(IOBase):\n"
        "    def __init__(self, file):\n"
        "        self._fd = file.fileno()\n        self.buffer = BytesIO()\n        self.writable = 'x' in file.mode or 'r' not in file.mode\n"
        "        self.write = self.buffer.write if self.writable else None\n"
        "    def readline(self):\n        b = os.read(self._fd, max(os.fstat(self._fd).st_size, 8192))\n        return b.split(b'\\n')[0]\n"
        "    def flush(self):\n"
        "        if self.writable:\n            os.write(self._fd, self.buffer.getvalue())\n            self.buffer.truncate(0), self.buffer.seek(0)\n"
        "sys.stdin, sys.stdout = FastIO(sys.stdin), FastIO(sys.stdout)\n"
        "sys.stdout.write(sys.stdin.readline())\nsys.stdout.flush()",
        ECHO,
    ),
    "global": ("n = 0\ndef f():\n    global n\n    n = sum(map(int, input().split()))\nf()\nprint(n)", SUM),
    "nonlocal": (
        "def f():\n    n = 0\n    def g():\n        nonlocal n\n        n = sum(map(int, input().split()))\n    g()\n    return n\nprint(f())",
        SUM,
    ),
    "from __future__": ("from __future__ import annotations\ndef f(a: Nothing): return a\nprint(f(input()))", ECHO),
    "main guard in the middle": (
        "def main(): print(f(input()))\nif __name__ == '__main__':\n    f = lambda x: x\n    main()\nlast = 1",
        ECHO,
    ),
    "a doc string and a comment": ("'''Text.'''\n# -*- coding: utf-8 -*-\nprint(input())", ECHO),
    "a byte order mark": ("\ufeffprint(input())", ECHO),
    "windows line ends": ("a = input()\r\nprint(a)\r\n", ECHO),
    "other letters": ("größe = input()\nprint(größe)", [("äöü 漢字\n", "äöü 漢字", True), ("é\n", "e", False)]),
    "thread with a big stack": (
        "import sys, threading\nsys.setrecursionlimit(1 << 25)\nthreading.stack_size(1 << 29)\n"
        "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)\n"
        "def main(): print(depth(int(input())))\n"
        "thread = threading.Thread(target=main)\nthread.start()\nthread.join()",
        [("100000\n", "100000", True), ("10\n", "11", False)],
    ),
    "a thread that nobody joins": (
        "import threading, time\ndef main():\n    time.sleep(0.05)\n    print(input())\nthreading.Thread(target=main).start()",
        ECHO,
    ),
    "many threads": (
        "import threading\nfound = []\nthreads = [threading.Thread(target=found.append, args=(i,)) for i in range(20)]\n"
        "for t in threads: t.start()\nfor t in threads: t.join()\nprint(sum(found) and input())",
        ECHO,
    ),
    "a thread pool": (
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool: print(*pool.map(str, [input()]))",
        ECHO,
    ),
    "an event loop": (
        "import asyncio\nasync def main():\n    await asyncio.sleep(0.001)\n    print(input())\nasyncio.run(main())",
        ECHO,
    ),
    "a thread of an event loop": (
        "import asyncio, sys\nasync def main():\n    line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)\n"
        "    print(line)\nasyncio.run(main())",
        ECHO,
    ),
    "a raised limit of the stack": (
        "import resource, sys\nhard = resource.getrlimit(resource.RLIMIT_STACK)[1]\nresource.setrlimit(resource.RLIMIT_STACK, (hard, hard))\n"
        "sys.setrecursionlimit(10**6)\nprint(input())",
        ECHO,
    ),
    "deep recursion through a cache": (
        "import sys\nfrom functools import lru_cache\nsys.setrecursionlimit(10**6)\n@lru_cache(maxsize=None)\n"
        "def f(n): return n if n < 2 else f(n - 1) + 1\nprint(f(int(input())))",
        [(f"{CACHE_DEPTH}\n", f"{CACHE_DEPTH}", True), ("300\n", "1", False)],
    ),
    "recursion deeper than Python's own limit": (
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(int(input())))",
        [("9000\n", "9000", True), ("5\n", "4", False)],
    ),
    "catches its recursion error": (
        "def f(n): return f(n + 1)\ntry: f(0)\nexcept RecursionError: print(input())",
        ECHO,
    ),
    "catches every error": ("try: print(int(input()))\nexcept Exception: print('no number')", [("7", "7", True), ("x", "no number", True)]),
    "names of the prelude": ("print(*sorted(Counter(input().split()), key=lambda x: gcd(2, 4))[:9])", [("b a b", "b a", True)]),
    "its own names before the prelude's": ("count = input()\ndef comb(x): return x\nprint(comb(count))", ECHO),
    "a module imported late": ("def f():\n    import bisect\n    return bisect.bisect([1, 3], int(input()))\nprint(f())", [("2", "1", True)]),
    "import by name": ("m = __import__('colorsys')\nimport importlib\nc = importlib.import_module('base64')\nprint(input(), end='' if m and c else 'x')", ECHO),
    "numpy is absent": (
        "try:\n    import numpy as np\nexcept ImportError:\n    np = None\nprint(sum(map(int, input().split())) if np is None else 0)",
        SUM,
    ),
    "the locale of its environment": ("import locale\nlocale.setlocale(locale.LC_ALL, '')\nprint(input())", ECHO),
    "the path of its file": ("import os\nprint(input() if os.path.isabs(__file__) else '')", ECHO),
    "no input file": (
        "import os, sys\nif os.path.exists('input.txt'): sys.stdin = open('input.txt')\n"
        "try: sys.stdin = open('in.txt')\nexcept FileNotFoundError: pass\nprint(input())",
        ECHO,
    ),
    "seeded random": (
        "import random\nrandom.seed(int(input()))\nprint(random.randint(1, 10**6))",
        [("1", "140892", True), ("2", "905036", True), ("2", "905037", False)],
    ),
    "sets and hashes": ("print(len({hash(c) for c in input()}), *sorted(set('banana')))", [("aab", "2 a b n", True)]),
    "heapq, bisect, collections, itertools": (
        "import heapq, bisect, itertools\nfrom collections import *\nn = [*map(int, input().split())]\nheapq.heapify(n)\n"
        "d = deque(heapq.heappop(n) for _ in range(len(n)))\nprint(bisect.bisect_left(d, 2), *itertools.accumulate(d))",
        [("3 1 2", "1 1 3 6", True), ("1", "1 1", True), ("1", "0 1", False)],
    ),
    "decimal and fractions": (
        "from decimal import Decimal, getcontext\nfrom fractions import Fraction\ngetcontext().prec = 30\n"
        "n = int(input())\nprint(Decimal(1) / n, Fraction(2, 2 * n))",
        [("3", "0." + "3" * 30 + " 1/3", True), ("4", "0.25 1/4", True)],
    ),
    "re, string, math, datetime, statistics": (
        "import re, string, math, datetime, statistics\nw = re.findall(r'[a-z]+', input())\n"
        "print(len(w), string.digits[3], math.isqrt(17), statistics.median([1, 2, 9]), datetime.date(2024, 2, 29).isoweekday())\n"
        "print(datetime.datetime.strptime('2024-01-02', '%Y-%m-%d').day)",
        [("ab 1 c", "2 3 4 2 4\n2", True)],
    ),
    "dataclasses, enum, typing, abc": (
        "from dataclasses import dataclass, field\nfrom enum import Enum\nfrom typing import *\nfrom abc import ABC, abstractmethod\n"
        "class C(Enum):\n    A = 1\n@dataclass(order=True)\nclass P:\n    x: int\n    y: List[int] = field(default_factory=list)\n"
        "class B(ABC):\n    @abstractmethod\n    def f(self): ...\nclass D(B):\n    def f(self): return P(1)\nprint(D().f().x + C.A.value, input())",
        [("q", "2 q", True)],
    ),
    "a class with operators": (
        "class V:\n    __slots__ = ('x',)\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
        "    def __repr__(self): return f'{self.x}'\na, b = map(int, input().split())\nprint(V(a) + V(b))",
        SUM,
    ),
    "generators and closures": (
        "def gen(n):\n    for i in range(n):\n        yield i\ndef add(x): return lambda y: x + y\na, b = map(int, input().split())\n"
        "print(sum(1 for _ in gen(a)) + add(b)(0))",
        SUM,
    ),
    "match and walrus": (
        "match input().split():\n    case [a, b] if (s := int(a) + int(b)) > 0: print(s)\n    case _: print('none')",
        SUM,
    ),
    "eval and exec": ("exec('a, b = map(int, input().split())')\nprint(eval('a + b'))", SUM),
    "a decorator that counts": (
        "import functools\ndef d(f):\n    @functools.wraps(f)\n    def g(*a):\n        g.calls += 1\n        return f(*a)\n    g.calls = 0\n    return g\n"
        "@d\ndef f(x): return x\nprint(f(input()), end='')\nassert f.calls == 1",
        ECHO,
    ),
    "prints to stderr": ("import sys\nprint('debug' * 999, file=sys.stderr)\nprint(input())", ECHO),
    "measures time": ("import time\nt = time.perf_counter()\nwhile time.perf_counter() - t < 0.01: pass\nprint(input())", ECHO),
    "an alarm that is not due": ("import signal\nsignal.alarm(100)\nprint(input())\nsignal.alarm(0)", ECHO),
    "a hundred thousand lines": (
        "import sys\nn = int(sys.stdin.readline())\nprint('\\n'.join(map(str, range(n))))",
        [("100000", "\n".join(map(str, range(100_000))), True)],
    ),
    "reads a large input": (
        "import sys\nprint(sum(map(int, sys.stdin.buffer)))",
        [("7\n" * 200_000, "1400000", True)],
    ),
    "half a gigabyte": ("x = bytearray(400 << 20)\nprint(input())", [("a", "a", True)]),
    "big integers": ("print(pow(3, int(input())) % 10**9)", [("1000", str(pow(3, 1000) % 10**9), True)]),
    "fails on some tests": ("n = int(input())\nprint(10 // n)", [("5", "2", True), ("0", "0", False), ("1", "10", True)]),
    "exits with an error on some tests": ("import sys\nn = int(input())\nprint(n)\nsys.exit(n)", [("0", "0", True), ("1", "1", False)]),
    "too slow on some tests": ("n = int(input())\nwhile n == 2: pass\nprint(n)", [("1", "1", True), ("2", "2", False), ("3", "3", True)]),
}  # fmt: skip

FUNCTIONS = {  # name -> (program, function, [(input, expected as JSON, whether it should pass)])
    "a function": ("def f(a, b): return a + b", "f", [("1\n2", "3", True), ('"a"\n"b"', '"ab"', True), ("1\n2", "4", False)]),
    "a method of Solution": (
        "class Solution:\n    def f(self, xs: List[int]) -> int:\n        self.seen = Counter(xs)\n        return max(self.seen.values())",
        "f",
        [("[1, 1, 2]", "2", True), ("[3]", "1", True), ("[3]", "2", False)],
    ),
    "a Solution beside a function": (
        "def f(x): return -1\nclass Solution:\n    def f(self, x): return x",
        "f",
        [("1", "1", True), ("1", "-1", False)],
    ),
    "a static method": ("class Solution:\n    @staticmethod\n    def f(x): return x", "f", [("1", "1", True)]),
    "no arguments": ("def f(): return 'x'", "f", [("", '"x"', True)]),
    "a decorated function": ("@cache\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)", "f", [("50", "12586269025", True)]),
    "keeps state in its module": ("seen = []\ndef f(x):\n    seen.append(x)\n    return len(seen)", "f", [("1", "1", True), ("2", "1", True), ("3", "3", False)]),
    "returns a tuple": ("def f(x): return (x, [x, (x,)])", "f", [("1", "[1, [1, [1]]]", True)]),
    "returns a dict": ("def f(x): return {x: Counter(x)}", "f", [('"ab"', '{"ab": {"a": 1, "b": 1}}', True)]),
    "returns None": ("def f(x): pass", "f", [("1", "null", True), ("1", "0", False)]),
    "returns a truth value": ("def f(x): return x > 1", "f", [("2", "true", True), ("1", "false", True), ("1", "0", False)]),
    "returns a float": ("def f(x): return x + 0.2", "f", [("0.1", "0.3", True), ("0.1", "0.30001", False)]),
    "prints besides": ("def f(x):\n    print('debug', flush=True)\n    return x", "f", [("1", "1", True)]),
    "a main guard that reads": ("def f(x): return x\nif __name__ == '__main__':\n    print(f(int(input())))", "f", [("1", "1", True)]),
    "big and negative numbers": ("def f(x): return -(2**x)", "f", [("200", str(-(2**200)), True)]),
    "changes its argument": ("def f(xs):\n    xs.sort()\n    return xs", "f", [("[2, 1]", "[1, 2]", True)]),
    "a predefined name that it imports": ("from math import gcd", "gcd", [("12\n18", "6", True)]),
    "a predefined name that it imports by a star": ("from math import *\ngcd", "gcd", [("12\n18", "6", True)]),
    "a predefined name that it sets in a function": ("def f():\n    global gcd\n    gcd = gcd\nf()", "gcd", [("12\n18", "6", True)]),
    "a predefined name that it calls": ("print(gcd(4, 6))", "gcd", [("12\n18", "6", False)]),
    "a predefined name that it calls in a function": ("def f(x): return median(x)", "median", [("[1, 2, 3]", "2", False)]),
    "a predefined name beside other imports": ("from typing import *\nimport math\nadd", "add", [("1\n2", "3", False)]),
    "a method that calls a predefined name": ("class Solution:\n    def gcd(self, a, b): return gcd(a, b)", "gcd", [("12\n18", "6", True)]),
    "a method before a predefined name": ("class A:\n    def add(self, a, b): return a - b\nA().add(1, 2)", "add", [("3\n2", "1", True)]),
    "text with line ends": ("def f(s): return s.splitlines()", "f", [('"a\\nb"', '["a", "b"]', True)]),
}  # fmt: skip
