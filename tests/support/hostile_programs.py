# ruff: noqa: ISC004 (programs over several lines are written as adjacent strings)
"""Attacks, for `test_sandbox_hostile`: name -> (its allowed reasons, the program). None may pass or leave a trace.

CANARY, FOLDER, TRAINER, PORT, DATAGRAM_PORT and SOCKET are replaced by a writable file, its folder, the process id of
the test, ports that it listens on, and the path of a Unix socket that it listens on. The expected output is SECRET.
"""

ESCAPES = {
    "reads a file": ("error", "print(open('CANARY').read())"),
    "reads a file by os": ("error", "import os\nprint(os.read(os.open('CANARY', os.O_RDONLY), 99))"),
    "reads passwords": ("error", "print(open('/etc/passwd').read())"),
    "reads the trainer's memory map": ("error", "print(open('/proc/TRAINER/maps').read())"),
    "reads the trainer's environment": ("error", "print(open('/proc/TRAINER/environ', 'rb').read())"),
    "reads its parent's memory": ("error", "import os\nprint(open(f'/proc/{os.getppid()}/mem', 'rb').read(9))"),
    "reads its parent's descriptors": ("error", "import os\nprint(os.listdir(f'/proc/{os.getppid()}/fd'))"),
    "reads its own environment block": ("error", "print(open('/proc/self/environ').read())"),
    "lists the root": ("error", "import os\nprint(os.listdir('/'))"),
    "lists where it stands": ("error", "import os\nprint(os.listdir('.'))"),
    "walks the disk": ("wrong_answer", "import os\nfor found in os.walk('/'): print(found)"),
    "asks the size of a file": ("error", "import os\nprint(os.stat('CANARY').st_size)"),
    "asks whether a file exists": ("wrong_answer", "import os\nif os.path.exists('CANARY'): print('SECRET')"),
    "reads a link": ("error", "import os\nprint(os.readlink('/proc/self/exe'))"),
    "maps a file": ("violation", "import mmap, os\nf = os.open('CANARY', os.O_RDWR)\nprint(mmap.mmap(f, 0)[:])"),
    "loads a library": ("error", "import ctypes\nctypes.CDLL('CANARY')"),
    "imports from the disk": ("error", "import sys\nsys.path.insert(0, 'FOLDER')\nimport planted"),
    "reads Python's own source": ("error", "import os\nprint(open(os.__file__).read())"),
    "writes a file": ("violation", "open('CANARY', 'w').write('SECRET')"),
    "appends to a file": ("violation", "open('CANARY', 'a').write('SECRET')"),
    "writes where it stands": ("violation", "open('here.txt', 'w').write('SECRET')"),
    "writes to shared memory": ("violation", "open('/dev/shm/multirole-escaped', 'w').write('SECRET')"),
    "makes a nameless file": ("violation", "import os\nos.open('FOLDER', os.O_TMPFILE | os.O_RDWR)"),
    "removes a file": ("violation", "import os\nos.unlink('CANARY')"),
    "renames a file": ("violation", "import os\nos.rename('CANARY', 'CANARY.moved')"),
    "links a file": ("violation", "import os\nos.link('CANARY', 'CANARY.linked')"),
    "makes a symbolic link": ("violation", "import os\nos.symlink('/etc', 'FOLDER/etc')"),
    "makes a folder": ("violation", "import os\nos.mkdir('FOLDER/new')"),
    "makes a fifo": ("violation", "import os\nos.mkfifo('FOLDER/fifo')"),
    "changes a mode": ("violation", "import os\nos.chmod('CANARY', 0)"),
    "changes times": ("violation", "import os\nos.utime('CANARY', (1, 1))"),
    "truncates a file": ("violation", "import os\nos.truncate('CANARY', 0)"),
    "sets an attribute": ("violation", "import os\nos.setxattr('CANARY', 'user.x', b'SECRET')"),
    "writes a kernel setting": ("violation", "open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/sh')"),
    "scores itself down": ("violation", "open('/proc/self/oom_score_adj', 'w').write('-1000')"),
    "connects by TCP": ("violation", "import socket\nsocket.create_connection(('127.0.0.1', PORT)).send(b'SECRET')"),
    "opens a UDP socket": (
        "violation",
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'SECRET', ('127.0.0.1', DATAGRAM_PORT))",
    ),
    "opens a Unix socket": ("violation", "import socket\nsocket.socket(socket.AF_UNIX).connect('SOCKET')"),
    "a datagram pair sends elsewhere": (
        "violation",
        "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\na.sendto(b'SECRET', 'SOCKET')",
    ),
    "a stream pair sends elsewhere": ("violation", "import socket\na, b = socket.socketpair()\na.sendto(b'SECRET', 'SOCKET')"),
    "opens a netlink socket": ("violation", "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)"),
    "looks up a name": ("violation", "import socket\nprint(socket.gethostbyname('localhost'))"),
    "downloads": ("violation error", "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:PORT/').read()"),
    "forks": ("violation", "import os\nif os.fork() == 0:\n    print('SECRET')"),
    "forks for ever": ("violation", "import os\nwhile True: os.fork()"),
    "forks by raw call": ("violation", "import ctypes\nctypes.CDLL(None).syscall(57)\nprint('SECRET')"),
    "clones with namespaces": ("violation", "import ctypes\nctypes.CDLL(None).syscall(56, 0x10000011, 0, 0, 0, 0)\nprint('SECRET')"),
    "executes a program": ("violation", "import os\nos.execv('/bin/echo', ['echo', 'SECRET'])"),
    "starts a program": ("violation", "import subprocess\nprint(subprocess.check_output(['echo', 'SECRET']).decode())"),
    "starts a shell": ("violation wrong_answer", "import os\nos.system('echo SECRET')"),
    "spawns": ("violation", "import os\nos.posix_spawn('/bin/echo', ['echo', 'SECRET'], {})"),
    "starts a process pool": ("violation error", "import multiprocessing as m\nwith m.Pool(1) as p: print(p.map(abs, [1]))"),
    "a daemon": ("violation", "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)"),
    "kills the trainer": ("violation", "import os\nos.kill(TRAINER, 9)"),
    "kills its parent": ("violation", "import os\nos.kill(os.getppid(), 9)"),
    "kills everything": ("violation", "import os\nos.kill(-1, 9)"),
    "stops its group": ("violation", "import os, signal\nos.killpg(0, signal.SIGSTOP)"),
    "stops its parent": ("violation", "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)"),
    "signals through a thread id": ("violation error", "import ctypes, os\nctypes.CDLL(None).syscall(200, TRAINER, 9)\n1 / 0"),
    "signals through a descriptor": ("violation", "import os, signal\nsignal.pidfd_send_signal(os.pidfd_open(TRAINER), 9)"),
    "has a descriptor signal another": ("wrong_answer error violation", "import fcntl\nfcntl.fcntl(0, fcntl.F_SETOWN, TRAINER)"),
    "leaves its session": ("violation", "import os\nos.setsid()"),
    "becomes another user": ("violation", "import os\nos.setuid(0)"),
    "traces its parent": ("violation", "import ctypes, os\nctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)"),
    "reads the trainer's memory by call": ("violation", "import ctypes\nctypes.CDLL(None).process_vm_readv(TRAINER, 0, 0, 0, 0, 0)"),
    "outlives its parent": ("violation", "import ctypes\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)"),
    "takes new namespaces": ("violation", "import ctypes\nctypes.CDLL(None).unshare(0x10000000)"),
    "mounts": ("violation", "import ctypes\nctypes.CDLL(None).mount(b'x', b'/', b'tmpfs', 0, 0)"),
    "loads a kernel program": ("violation", "import ctypes\nctypes.CDLL(None).syscall(321, 0, 0, 0)"),
    "uses 32-bit call numbers": ("violation", "import ctypes\nctypes.CDLL(None).syscall(0x40000000 + 39)"),
    "makes a ring of calls": ("violation", "import ctypes\nctypes.CDLL(None).syscall(425, 8, 0)"),
    "makes shared memory": ("violation", "import ctypes\nctypes.CDLL(None).shmget(7319, 4096, 0o1666)"),
    "adds a key": ("violation", "import ctypes\nctypes.CDLL(None).syscall(248, b'user', b'k', b'v', 1, -3)"),
    "takes a processor": ("error violation", "import os\nos.sched_setaffinity(TRAINER, {0})"),
    "raises its limits": ("error violation", "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (999, 999))"),
    "limits the trainer": ("error violation", "import resource\nresource.prlimit(TRAINER, resource.RLIMIT_AS, (1, 1))"),
    "turns the walls off": ("error wrong_answer violation", "import ctypes\nctypes.CDLL(None).prctl(22, 0, 0, 0, 0)"),
}  # fmt: skip

BOMBS = {
    "infinite loop": ("timeout", "while True: pass"),
    "swallows everything": (
        "timeout",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    ),
    "disarms its alarm": ("timeout", "import signal\nsignal.alarm(0)\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile 1: 1"),
    "sleeps": ("timeout", "import time\ntime.sleep(60)"),
    "waits for a lock": ("timeout", "import threading\nthreading.Lock().acquire() and threading.Event().wait()"),
    "a thread that never ends": ("timeout", "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()"),
    "slow regular expression": ("timeout", "import re\nre.match('(a+)+$', 'a' * 40 + 'b')"),
    "tower of powers": ("timeout memory", "print(9 ** 9 ** 9)"),
    "folds constants": ("timeout memory error", "x = ((2 ** 9999) ** 9999) ** 9999"),
    "compiles for ever": ("error timeout memory", "exec('(' * 90 + '1' + ')' * 90 * 1000)"),
    "nested beyond the parser": ("error", "(" * 100_000),
    "nested operators": ("error memory", "x = " + "-" * 100_000 + "1"),
    "ends in a destructor": ("timeout", "class A:\n    def __del__(self):\n        while True: pass\na = A()\n# open"),
    "ends in an exit hook": ("timeout", "import atexit\n@atexit.register\ndef f():\n    while True: pass"),
    "memory at once": ("memory", "x = 'a' * 10**12"),
    "memory with an unlimited stack": (
        "memory",
        "import resource\nhard = resource.getrlimit(resource.RLIMIT_STACK)[1]\nresource.setrlimit(resource.RLIMIT_STACK, (hard, hard))\n"
        "assert resource.getrlimit(resource.RLIMIT_STACK)[0] == hard\nbytearray(1 << 30)",
    ),
    "memory step by step": ("memory timeout", "x = []\nwhile True: x.append(bytearray(10**8))"),
    "memory in threads": (
        "memory error timeout wrong_answer",
        "import threading\nfor _ in range(9999): threading.Thread(target=lambda: bytearray(10**8) and 1).start()",
    ),
    "memory it does not touch": ("error memory", "import mmap\nx = [mmap.mmap(-1, 1 << 30) for _ in range(99)]"),
    "memory in files": ("error violation", "import os\nx = [os.memfd_create('x') for _ in range(999)]"),
    "threads without end": (
        "error timeout memory",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
    ),
    "descriptors without end": ("error", "import os\nx = [os.dup(0) for _ in range(10**6)]"),
    "output without end": ("output_limit", "while True: print('x' * 10000)"),
    "output past its error": (
        "output_limit timeout",
        "import os, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "while True:\n    try: os.write(1, b'x' * 99999)\n    except OSError: pass",
    ),
    "a hole as output": ("output_limit", "import os\nos.lseek(1, 1 << 40, 0)\nos.write(1, b'SECRET')"),
    "grows its input": ("error output_limit", "import os\nwhile True: os.write(0, b'x' * 10**6) or 1 / 0"),
    "recursion": ("error timeout", "def f(n): return f(n + 1)\nf(0)"),
    "recursion past the stack": ("error memory timeout", "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return [*map(f, [n])]\nf(0)"),
    "recursion past an unlimited stack": (
        "error memory timeout",
        "import resource, sys\nhard = resource.getrlimit(resource.RLIMIT_STACK)[1]\nresource.setrlimit(resource.RLIMIT_STACK, (hard, hard))\n"
        "sys.setrecursionlimit(10**9)\ndef f(n): return [*map(f, [n])]\nf(0)",
    ),
    "breaks the interpreter": ("error wrong_answer", "import ctypes\nctypes.memset(id(None), 0, 64)"),
    "reads address zero": ("error", "import ctypes\nctypes.string_at(0)"),
    "aborts": ("error violation", "import os\nos.abort()"),
}  # fmt: skip

HACKS = {
    "exits well": ("wrong_answer", "import sys\nsys.exit(0)"),
    "exits hard": ("wrong_answer", "import os\nos._exit(0)"),
    "says passed": ("wrong_answer", "print('passed')\nprint('{\"reward\": 1.0}')"),
    "raises for the grader": ("error", "class E(BaseException):\n    def __str__(self): return 1 / 0\nraise E"),
    "closes what it has": ("error wrong_answer", "import os\nos.closerange(0, 256)"),
    "closes its streams": ("error wrong_answer", "import sys\nsys.stdout.close()\nsys.stdin.close()"),
    "writes everywhere": (
        "error wrong_answer",
        "import os\nfor d in range(1, 256):\n    try: os.write(d, b'test' + bytes(30) + b'SECRE')\n    except OSError: pass",
    ),
    "replaces the comparison": ("error wrong_answer", "import builtins\nbuiltins.all = builtins.len = lambda *a: 1\nstr.__eq__ = 1"),
    "patches json and os": (
        "wrong_answer error violation",
        "import json, os\njson.dumps = lambda *a, **k: 'SECRE'\nos._exit = lambda c: None\nraise SystemExit",
    ),
    "searches the frames": (
        "wrong_answer error",
        "import sys\nf = sys._getframe()\nwhile f:\n    for v in f.f_locals.values(): print(repr(v))\n    f = f.f_back",
    ),
    "searches the heap": (
        "wrong_answer",
        "import gc\nfor o in gc.get_objects():\n    if isinstance(o, (dict, list)):\n        try: found = 'SECRE' + 'T' in map(str, o)\n        except Exception: continue\n        if found: print('SECRE' + 'T')",
    ),
    "sets what a next test would see": (
        "wrong_answer",
        "import builtins, sys\nif 'left' in vars(builtins): print('SECRE' + 'T')\nbuiltins.left = sys.modules['left'] = 1",
    ),
    "leaves a hook": ("wrong_answer", "import atexit\natexit.register(print, 'passed')"),
    "not Python": ("error", "def f(:"),
    "a zero byte": ("error", "print(1)\0"),
    "a surrogate": ("error", "print('\ud800')"),
    "only a comment": ("wrong_answer", "# SECRE" + "T is not known"),
}  # fmt: skip

FUNCTION_HACKS = {  # each defines f; the expected value of f(1) is 7319
    "always equal": ("error", "class E:\n    def __eq__(self, o): return True\ndef f(n): return E()"),
    "always equal integer": ("wrong_answer", "class E(int):\n    def __eq__(self, o): return True\ndef f(n): return E(3)"),
    "always equal list": ("wrong_answer", "class E(list):\n    def __eq__(self, o): return True\ndef f(n): return E()"),
    "not a number": ("wrong_answer", "def f(n): return float('nan')"),
    "infinity": ("wrong_answer", "def f(n): return float('inf')"),
    "a forged result": ("wrong_answer", "import os\ndef f(n):\n    os.write(3, b'73190')\n    os._exit(0)"),
    "a deep forged result": ("wrong_answer", "import os\ndef f(n):\n    os.write(3, b'[' * 99999)\n    os._exit(0)"),
    "a pickled result": (
        "wrong_answer",
        "import os\ndef f(n):\n    os.write(3, b\"cos\\nsystem\\n(S'touch CANARY.pickled'\\ntR.\")\n    os._exit(0)",
    ),
    "a huge forged integer": ("wrong_answer", "import os\ndef f(n):\n    os.write(3, b'9' * 10**6)\n    os._exit(0)"),
    "a second forged result": ("wrong_answer", "import os\ndef f(n):\n    os.write(3, b'7319, ')\n    return 1"),
    "a giant result": ("output_limit", "def f(n): return 'x' * 5 * 10**6"),
    "a cyclic result": ("output_limit error", "def f(n):\n    x = []\n    x.append(x)\n    return x"),
    "a lazy endless result": ("error", "def f(n):\n    while True: yield n"),
    "prints the result": ("wrong_answer", "def f(n): print(7319)"),
    "true for one": ("wrong_answer", "def f(n): return True"),
    "exits in the function": ("error", "import sys\ndef f(n): sys.exit(0)"),
    "no such function": ("error", "def g(n): return 7319"),
    "not a function": ("error", "f = 7319"),
    "lies about its class": ("error", "class E:\n    __class__ = int\n    def __index__(self): return 7319\ndef f(n): return E()"),
}  # fmt: skip

CARRIERS = {  # each reads n and prints n + 1, or another number if something of an earlier test is still there
    "a name in builtins": "import builtins as b\nprint(int(input()) + 1 + getattr(b, 'left', 0))\nb.left = 1",
    "a module in sys.modules": "import sys\nprint(int(input()) + 1 + ('left' in sys.modules))\nsys.modules['left'] = sys",
    "an attribute of a module": "import math\nprint(int(input()) + 1 + getattr(math, 'left', 0))\nmath.left = 1",
    "an attribute of a class": "from collections import Counter as C\nprint(int(input()) + 1 + getattr(C, 'left', 0))\nC.left = 1",
    "an attribute of a function": "from heapq import merge\nprint(int(input()) + 1 + getattr(merge, 'left', 0))\nmerge.left = 1",
    "a subclass made by type": (
        "print(int(input()) + 1 + any(c.__name__ == 'Left' for c in Exception.__subclasses__()))\n"
        "import builtins\nbuiltins.left = type('Left', (Exception,), {})"
    ),
    "a class that is changed by type": (
        "import collections\nprint(int(input()) + 1 + issubclass(int, collections.abc.Sized))\ncollections.abc.Sized.register(int)"
    ),
    "a compiled expression": "import re\nprint(int(input()) + 1 + any('left' in str(key) for key in re._cache))\nre.compile('left')",
    "the state of random": "import random\nr = random.random()\nprint(int(input()) + 1 + (r != random.Random(0).random()))",
    "the recursion limit": "import sys\nprint(int(input()) + 1 + (sys.getrecursionlimit() == 777))\nsys.setrecursionlimit(777)",
    "the decimal context": "from decimal import getcontext as c\nprint(int(input()) + 1 + (c().prec == 7))\nc().prec = 7",
    "a replaced stdin": "import io, sys\nprint(int(input()) + 1)\nsys.stdin = io.StringIO('99')",
    "a replaced print": "import builtins\nprint(int(input()) + 1)\nbuiltins.print = lambda *a: None",
    "a replaced json": "import json, os\nprint(int(input()) + 1)\njson.dumps = os._exit = os.dup2 = lambda *a: None",
    "a signal handler": (
        "import signal as s\nprint(int(input()) + 1 + (s.getsignal(s.SIGUSR1) == s.SIG_IGN))\ns.signal(s.SIGUSR1, s.SIG_IGN)"
    ),
    "an open descriptor": "import os\nd = os.dup(0)\nprint(int(input()) + 1 + (d != 3))\nos.closerange(1, 256) if d != 3 else 0",
    "the flags of the error output": "import os\nprint(int(input()) + 1 + (not os.get_blocking(2)))\nos.set_blocking(2, False)",
    "a thread": (
        "import threading, time\nprint(int(input()) + 1 + threading.active_count() - 1)\n"
        "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
    ),
    "an exit hook": "import atexit\nprint(int(input()) + 1 + atexit._ncallbacks())\natexit.register(int)",
    "bytes in its input file": "import os\nprint(int(os.pread(0, 8, 0)) + 1)\nos.pwrite(0, b'9', 0)",
    "a mapping of its input": "import mmap\nprint(int(input()) + 1)\nmmap.mmap(0, 4)[:] = b'9999'",
    "a table that takes time": (
        "import builtins, time\nn, t = int(input()), time.process_time()\nif not hasattr(builtins, 'left'):\n"
        "    while time.process_time() - t < 0.02: pass\nbuiltins.left = 1\nprint(n + 1 + (time.process_time() - t < 0.02))"
    ),
}  # fmt: skip

FINDERS = {  # each prints n + 1, and what it finds of the other tests
    "readers behind stdin": (
        "import sys\nprint(int(input()) + 1)\nRaw = type(sys.stdin.buffer.raw)\nfor d in range(3, 256):\n"
        "    try: print(Raw(d, closefd=False).read())\n    except (OSError, ValueError): pass"
    ),
    "writers behind stdin": (
        "import sys\nprint(int(input()) + 1, flush=True)\nRaw = type(sys.stdin.buffer.raw)\nfor d in range(3, 256):\n"
        "    try: Raw(d, 'w', closefd=False).write(b'junk!')\n    except (OSError, ValueError): pass"
    ),
    "descriptors": (
        "import os\nprint(int(input()) + 1)\nfor d in range(3, 1100):\n"
        "    for look in (lambda: os.pread(d, 99, 0), lambda: os.read(d, 99), lambda: os.fstat(d), lambda: os.write(d, b'junk!')):\n"
        "        try: print(look())\n        except OSError: pass"
    ),
    "the heap": (
        "import gc\nn = int(input())\nprint(n + 1)\nothers = {f'7319{i}{i}{i}{i}' for i in range(5)} - {str(n)}\nfor o in gc.get_objects():\n"
        "    if isinstance(o, (list, tuple, dict)) and o is not others and any(type(x) is str and x.strip() in others for x in o): print(o)"
    ),
    "the memory": (  # around a small object, up to 16 MiB each way; a page that write(2) accepts can be read
        "import ctypes\nn = int(input())\nlibc = ctypes.CDLL(None)\n"
        "def is_there(page): return libc.pwrite(1, ctypes.c_void_p(page), ctypes.c_size_t(1), ctypes.c_long(0)) == 1\n"
        "start = end = id(n) >> 12 << 12\n"
        "while is_there(start - 4096) and id(n) - start < 1 << 24: start -= 4096\n"
        "while is_there(end) and end - id(n) < 1 << 24: end += 4096\n"
        "text = ctypes.string_at(start, end - start)\nprint(n + 1)\n"
        "for i in range(5):\n    if n % 10 != i and b'7319' + b'%d' % i * 4 in text: print(i)"
    ),
}  # fmt: skip
FORGED_TIME = (
    "import os, struct, time\nn = int(input())\nwhile time.process_time() < 1.2: pass\nfor d in range(3, 256):\n"
    "    for record in (struct.pack('=Bdd', 0, 0.0, 0.0), struct.pack('!4sIBidQ', b'test', 0, 0, 0, 0.0, 0)):\n"
    "        try: os.write(d, record)\n        except OSError: pass\nprint(n + 1)"
)
