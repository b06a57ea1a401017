
"""Ordinary uses of the standard library that need no files, for `test_sandbox_honest`: each prints what Python prints."""

USES = {
    "argparse": (
        "import argparse\np = argparse.ArgumentParser(prog='p')\np.add_argument('--n', type=int, default=3, help='how many')\n"
        "print(p.parse_args([]).n, p.parse_args(['--n', '4']).n)\nprint(p.format_help())"
    ),
    "ast": "import ast\nprint(ast.literal_eval('[1, {2: (3,)}]'), ast.unparse(ast.parse('x=1')))",
    "asyncio": "import asyncio\nasync def f(n):\n    await asyncio.sleep(0)\n    return n\nasync def main(): return await asyncio.gather(f(1), f(2))\nprint(asyncio.run(main()))",
    "base64 and binascii": "import base64, binascii\nprint(base64.b64encode(b'abc'), base64.b85decode(base64.b85encode(b'x')), binascii.hexlify(b'a'))",
    "bz2": "import bz2\nprint(bz2.decompress(bz2.compress(b'abc' * 99))[:5])",
    "calendar": "import calendar\nprint(calendar.month(2024, 2), calendar.isleap(1900))",
    "cProfile": "import cProfile, pstats, io\np = cProfile.Profile()\np.enable()\nsum(range(9))\np.disable()\npstats.Stats(p, stream=io.StringIO()).print_stats()\nprint('done')",
    "codecs": (
        "import codecs, io\nprint(codecs.encode('abc', 'rot13'), codecs.encode(b'a', 'hex'), codecs.lookup('utf8').name)\n"
        "print(codecs.getreader('utf-8')(io.BytesIO(b'\\xc3\\xa9')).read(), 'é'.encode('cp437'), b'\\x80'.decode('cp1252'), 'ß'.encode('iso-8859-15'))"
    ),
    "colorsys": "import colorsys\nprint(colorsys.rgb_to_hls(1, 0, 0))",
    "concurrent.futures": "import concurrent.futures\nwith concurrent.futures.ThreadPoolExecutor(2) as pool: print(list(pool.map(abs, [-1, 2])))",
    "configparser": "import configparser\nc = configparser.ConfigParser()\nc.read_string('[a]\\nb = 1')\nprint(c['a']['b'])",
    "contextvars": "import contextvars\nv = contextvars.ContextVar('v', default=3)\nprint(v.get())",
    "csv": "import csv, io\nprint(list(csv.reader(io.StringIO('a,\"b,c\"\\n'))), csv.Sniffer().sniff('a;b\\nc;d\\n').delimiter)",
    "ctypes": "import ctypes\nprint(ctypes.c_uint8(300).value, ctypes.sizeof(ctypes.c_int64))",
    "datetime": "from datetime import *\nprint(datetime.strptime('2024-03-01', '%Y-%m-%d') - timedelta(days=1), date(2020, 1, 1).strftime('%A'))",
    "decimal and fractions": "from decimal import *\nfrom fractions import Fraction\nprint(Decimal('1.1') ** 30, Fraction('0.25'), Fraction(Decimal('0.5')), Decimal(2).sqrt())",
    "difflib": "import difflib\nprint(difflib.get_close_matches('appel', ['ape', 'apple']), *difflib.ndiff(['a'], ['b']))",
    "dis": "import dis\nprint(len(list(dis.get_instructions('a + b'))) > 2)",
    "doctest": "import doctest\ndef f():\n    '''\n    >>> 1 + 1\n    2\n    '''\ndoctest.run_docstring_examples(f, {})\nprint('done')",
    "email": "from email.message import EmailMessage\nm = EmailMessage()\nm['Subject'] = 'x'\nm.set_content('body')\nprint(m.as_string())",
    "expanduser": "import os\nprint(os.path.expanduser('a~b'), os.path.expanduser('~nobody-by-this-name/x'))",
    "fnmatch and glob": "import fnmatch, glob\nprint(fnmatch.filter(['a.py', 'b.c'], '*.py'), glob.glob('none*'))",
    "functools": "from functools import *\n@singledispatch\ndef f(x): return 'any'\n@f.register\ndef _(x: int): return 'int'\nprint(f(1), f('a'), reduce(lambda a, b: a * b, [1, 2, 3]))",
    "gettext and locale": "import gettext, locale\nprint(gettext.gettext('x'), locale.format_string('%d', 3))",
    "gzip": "import gzip\nprint(gzip.decompress(gzip.compress(b'abc')))",
    "hashlib and hmac": "import hashlib, hmac\nprint(hashlib.sha256(b'a').hexdigest(), hashlib.md5(b'a').hexdigest(), hashlib.blake2b(b'a').hexdigest()[:9], hmac.new(b'k', b'm', 'sha1').hexdigest())",
    "heapq and graphlib": "import heapq, graphlib\nprint(heapq.nlargest(2, [1, 3, 2]), list(heapq.merge([1, 3], [2])), [*graphlib.TopologicalSorter({1: [2]}).static_order()])",
    "html": "import html\nfrom html.parser import HTMLParser\nprint(html.unescape('&lt;&eacute;'), html.escape('<'))",
    "inspect": "import inspect\ndef f(a, *, b=1): pass\nprint(inspect.signature(f))",
    "io and struct": "import io, struct\nprint(struct.unpack('<I', io.BytesIO(b'abcd').read()), io.TextIOWrapper(io.BytesIO(b'a\\nb')).readlines())",
    "ipaddress": "import ipaddress\nprint(ipaddress.ip_network('10.0.0.0/30').num_addresses)",
    "json": "import json\nprint(json.dumps({'a': [1.5, None]}, indent=1, sort_keys=True), json.loads('[1e3]'))",
    "logging": "import logging, sys\nlogging.basicConfig(stream=sys.stdout, level='INFO', format='%(levelname)s %(message)s')\nlogging.info('hello %d', 3)",
    "lzma": "import lzma\nprint(lzma.decompress(lzma.compress(b'abc' * 99))[:5])",
    "operator and itertools": "from operator import *\nfrom itertools import *\nprint(list(accumulate([1, 2, 3], mul)), itemgetter(1)([5, 6]), [*batched] if 'batched' in () else 0)",
    "optparse and getopt": "import optparse, getopt\np = optparse.OptionParser()\np.add_option('-n')\nprint(p.parse_args(['-n', '3'])[0].n, getopt.getopt(['-a'], 'a'))",
    "pathlib": "from pathlib import Path\nprint(Path('a/b.txt').stem, Path('a').exists(), Path('/a/../b').parts)",
    "pickle and copy": "import pickle, copy\nclass A:\n    x = [1]\na = copy.deepcopy(A())\nprint(pickle.loads(pickle.dumps({'a': {1, 2}})), a.x)",
    "platform": "import platform\nprint(platform.system(), platform.python_implementation())",
    "pprint and reprlib": "import pprint, reprlib\npprint.pprint({i: 'x' * 30 for i in range(5)})\nprint(reprlib.repr('x' * 99))",
    "queue and sched": "import queue, sched, time\nq = queue.PriorityQueue()\nq.put(2), q.put(1)\nprint(q.get())\ns = sched.scheduler()\ns.enter(0, 1, print, ('ran',))\ns.run()",
    "random": "import random\nrandom.seed(3)\nprint(random.sample(range(99), 3), random.gauss(0, 1), random.choices('abc', k=3), random.SystemRandom().random() < 1)",
    "re": "import re\nprint(re.findall(r'\\b\\w', 'ab cd', re.I | re.U), re.compile(r'(?P<n>\\d)').sub(r'<\\g<n>>', 'a1'), re.search('\\\\N{DIGIT ONE}', '1'))",
    "secrets": "import secrets\nprint(len(secrets.token_hex(4)), secrets.compare_digest('a', 'a'))",
    "shlex and string": "import shlex, string\nprint(shlex.split('a \"b c\"'), string.Template('$a').substitute(a=1), string.capwords('a b'))",
    "signal": "import signal, time\ndef f(*a): raise TimeoutError\nsignal.signal(signal.SIGALRM, f)\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\ntry: time.sleep(9)\nexcept TimeoutError: print('timed out')",
    "sqlite3": "import sqlite3\nc = sqlite3.connect(':memory:')\nc.execute('create table t(a, b)')\nc.executemany('insert into t values (?, ?)', [(i, str(i)) for i in range(99)])\nprint(c.execute('select sum(a), max(b) from t where a > 3 order by b').fetchall(), len(list(c.iterdump())))",
    "statistics": "import statistics\nprint(statistics.median([1, 2, 4]), statistics.stdev([1, 2, 4]), statistics.NormalDist(0, 1).cdf(1), statistics.quantiles([1, 2, 3, 4]))",
    "sysconfig and site": "import sysconfig, site\nprint(sysconfig.get_python_version())",
    "textwrap and unicodedata": "import textwrap, unicodedata\nprint(textwrap.fill('a ' * 50, 20), unicodedata.normalize('NFD', 'é').encode(), unicodedata.name('é'))",
    "threading": "import threading\nb = threading.Barrier(2)\nt = threading.Thread(target=b.wait)\nt.start()\nb.wait()\nt.join()\nprint(threading.main_thread() is threading.current_thread(), threading.active_count())",
    "timeit": "import timeit\nprint(timeit.timeit('1 + 1', number=9) < 1)",
    "tokenize": "import tokenize, io\nprint(len(list(tokenize.generate_tokens(io.StringIO('a = 1').readline))))",
    "traceback": "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: print(traceback.format_exc().splitlines()[-1])",
    "types and typing": "import types\nfrom typing import *\nclass P(NamedTuple):\n    x: int\ndef f(a: Optional[int]) -> 'P': ...\nprint(P(3), get_type_hints(f), types.SimpleNamespace(a=1))",
    "unittest": "import unittest, io\nfrom unittest import mock\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(mock.Mock(return_value=3)(), 3)\nr = unittest.TextTestRunner(stream=io.StringIO()).run(unittest.defaultTestLoader.loadTestsFromTestCase(T))\nprint(r.wasSuccessful())",
    "urllib.parse": "from urllib.parse import urlparse, quote, parse_qs\nprint(urlparse('http://a/b?c=1').query, quote('é /'), parse_qs('a=1&a=2'))",
    "uuid": "import uuid\nprint(uuid.uuid5(uuid.NAMESPACE_DNS, 'a'), uuid.uuid3(uuid.NAMESPACE_DNS, 'a'), len(str(uuid.uuid4())))",
    "warnings": "import warnings\nwith warnings.catch_warnings(record=True) as w:\n    warnings.simplefilter('always')\n    warnings.warn('x')\nprint(len(w))",
    "weakref": "import weakref\nclass A: pass\na = A()\nprint(weakref.ref(a)() is a, len(weakref.WeakSet([a])))",
    "xml": "import xml.etree.ElementTree as E\nfrom xml.dom import minidom\nprint(E.fromstring('<a><b c=\"1\"/></a>').find('b').get('c'), minidom.parseString('<a>x</a>').toxml())",
    "zipfile and tarfile": (
        "import io, zipfile, tarfile\nb = io.BytesIO()\nwith zipfile.ZipFile(b, 'w', zipfile.ZIP_DEFLATED) as z: z.writestr('a', 'text')\n"
        "print(zipfile.ZipFile(b).read('a'))\nb = io.BytesIO()\nwith tarfile.open(fileobj=b, mode='w:gz') as t: t.addfile(tarfile.TarInfo('a'))\n"
        "b.seek(0)\nprint(tarfile.open(fileobj=b).getnames())"
    ),
    "zlib and crc": "import zlib, binascii\nprint(zlib.decompress(zlib.compress(b'abc')), binascii.crc32(b'a'), zlib.adler32(b'a'))",
    "zoneinfo": "from zoneinfo import ZoneInfo, ZoneInfoNotFoundError\ntry: ZoneInfo('Europe/Nowhere')\nexcept ZoneInfoNotFoundError: print('unknown')",
}  # fmt: skip
