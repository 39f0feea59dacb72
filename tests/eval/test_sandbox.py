"""Isolation and proof of a pass: `must_not` of the golden programs, and K8 of the reports."""

import builtins
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

from eval import sandbox
from eval.jail import encode
from eval.mbpp import extract_code
from eval.sandbox import Limits, Program, SandboxError, Verdict, decode, isolation, judge

CASES = json.loads((ROOT / "tests/golden/mbpp_programs.json").read_text())["cases"]
QUICK = Limits(test_seconds=2, total_seconds=4, memory=2**28)
KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(missing, reason=f"{kind} not to be had here"))
    for kind, missing in (
        ("namespaces", isolation()[0] != "namespaces"),
        ("bubblewrap", shutil.which("bwrap") is None),
    )
]


@pytest.fixture(autouse=True)
def isolated():
    if isolation()[0] is None:
        pytest.skip(f"no isolation on this machine: {isolation()[1]}")


@pytest.fixture
def listener():
    """A port of the caller's loopback; .hits counts the connections that came in."""
    server = socket.create_server(("127.0.0.1", 0))
    seen = SimpleNamespace(port=server.getsockname()[1], hits=0)

    def accept():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            seen.hits += 1
            connection.sendall(b"5")
            connection.close()

    threading.Thread(target=accept, daemon=True).start()
    yield seen
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def verdict(code: str, *tests: str, limits: Limits = QUICK, setup: str = "") -> Verdict:
    return judge([Program(textwrap.dedent(code), tests, setup)], limits)[0]


def ask(kind: str, code: str, expression: str, limits: Limits = QUICK):
    """What an expression is worth inside; an error as text."""
    with sandbox._Sandbox(limits, kind) as inside:
        inside.ask(run=textwrap.dedent(code))
        try:
            return inside.ask(value=expression)
        except sandbox._Raised as error:
            return str(error)


def test_golden_programs_get_the_right_verdict_and_leave_no_trace(tmp_path, monkeypatch, listener):
    """All 70 programs, the ambiguous ones too, at a rate of 100 in less than 60 seconds on two processors."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "golden_victim.txt").write_text("here")
    before = dict(os.environ), dict(vars(builtins))
    port = str(listener.port)
    programs = []
    for case in CASES:
        completion = case["completion"].replace("47811", port)
        programs.append(Program(extract_code(completion, case["tests"])[0], tuple(case["tests"])))
    start = time.monotonic()
    verdicts = judge(programs, QUICK, workers=2)
    seconds = time.monotonic() - start

    for case, found in zip(CASES, verdicts, strict=True):
        right = case["right"]
        assert (all(found.passed), round(found.rate, 6)) == (right["pass"], right["pass_rate"]), case["id"]
    assert seconds < 60 * len(CASES) / 100
    assert os.listdir(tmp_path) == ["golden_victim.txt"]
    assert Path.cwd() == tmp_path
    assert (dict(os.environ), dict(vars(builtins))) == before
    assert listener.hits == 0


def test_a_busy_loop_ends_at_its_limit():
    """K8"""
    start = time.monotonic()
    found = verdict("while True: pass", "assert f() == 1", limits=Limits(test_seconds=1))
    assert not any(found.passed) and found.error == "time limit"
    assert time.monotonic() - start < 2


def test_a_memory_blow_up_fails_and_is_not_felt():
    """K8"""
    assert not any(verdict("x = 'a' * 10**11\ndef f(): return 1", "assert f() == 1").passed)


def test_children_together_keep_to_the_memory_limit():
    code = """
    import os, time
    def f():
        for _ in range(8):
            if os.fork() == 0:
                block = b'x' * 2**27
                time.sleep(30)
        time.sleep(30)
    """
    start = time.monotonic()
    found = verdict(
        code, "assert f() is None", limits=Limits(test_seconds=20, total_seconds=20, memory=2**28)
    )
    assert found.error == "memory limit" and time.monotonic() - start < 10


def test_leaving_before_the_asserts_is_no_pass():
    """K8"""
    assert not any(verdict("import sys; sys.exit(0)", "assert f() == 1").passed)
    assert verdict("import os\ndef f(): os._exit(0)", "assert f() == 1", "assert 1 == 1").rate == 0


@pytest.mark.parametrize("kind", KINDS)
def test_children_are_gone_afterwards(kind):
    """K8: forked, in a session of their own, ignoring signals, or started as a command."""
    mark = uuid.uuid4().hex
    code = f"""
    import os, signal, subprocess, sys, time
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    command = [sys.executable, '-c', 'import time; time.sleep(60)', '{mark}']
    subprocess.Popen(command, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        os.execv(sys.executable, command)
    time.sleep(0.1)
    """

    def marked():
        return [p for p in Path("/proc").glob("[0-9]*/cmdline") if mark in p.read_text(errors="ignore")]

    with sandbox._Sandbox(QUICK, kind) as inside:
        inside.ask(run=textwrap.dedent(code))
        assert marked()
    deadline = time.monotonic() + (0 if kind == "namespaces" else 1)
    while (left := marked()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_the_machine_are_out_of_sight_and_nothing_but_the_box_is_writable(kind, tmp_path):
    (tmp_path / "secret").write_text("secret")
    code = """
    import os
    def read(path): return open(path).read()
    def writable():
        found = []
        for top, directories, _ in os.walk('/'):
            try:
                open(os.path.join(top, 'probe'), 'w').close()
                found.append(top)
            except OSError:
                pass
            if top.count('/') > 2:
                directories.clear()
        return found
    """
    assert "FileNotFoundError" in ask(kind, code, f"read({str(tmp_path / 'secret')!r})")
    assert "FileNotFoundError" in ask(kind, code, "read('/etc/passwd')")
    assert "FileNotFoundError" in ask(kind, code, f"read({str(ROOT / 'eval/mbpp.py')!r})")
    assert ask(kind, code, "os.listdir('.'), os.getcwd()") == ([], "/box")
    assert ask(kind, code, "os.path.exists('/proc/self'), os.path.exists('/sys/kernel')") == (False, False)
    assert ask(kind, code, "writable()") == ["/box"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_box_is_bounded(kind):
    code = "def f():\n    for i in range(9):\n        open(f'{i}', 'wb').write(bytes(2**20))"
    assert "No space left" in ask(kind, code, "f()", Limits(disk=2**22))
    assert "File too large" in ask(kind, "", "open('x', 'wb').write(bytes(2**23))", Limits(disk=2**22))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_inherited(kind, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = """
    import os, stat
    def open_files():
        found = []
        for fd in range(64):
            try:
                found.append((fd, stat.S_ISSOCK(os.fstat(fd).st_mode)))
            except OSError:
                pass
        return found
    """
    with open(os.devnull) as file:
        os.set_inheritable(file.fileno(), True)
        sockets = [fd for fd, is_socket in ask(kind, code, "open_files()") if is_socket]
        others = [fd for fd, is_socket in ask(kind, code, "open_files()") if not is_socket]
    assert others == [0, 1, 2] and len(sockets) == 2  # /dev/null, and the one channel twice
    environment = ask(kind, code, "dict(os.environ)")
    assert "secret" not in environment.values() and environment["HOME"] == "/box"


@pytest.mark.parametrize("kind", KINDS)
def test_no_network_and_no_odd_socket(kind, listener):
    port = listener.port
    code = "import socket\ndef f(family): return socket.socket(family).close()"
    connect = f"socket.create_connection(('127.0.0.1', {port}), 1)"
    assert "Error" in ask(kind, code, connect)
    assert listener.hits == 0
    assert ask(kind, code, "f(socket.AF_INET)") is None
    for family in socket.AF_NETLINK, socket.AF_VSOCK, socket.AF_PACKET:
        assert "PermissionError" in ask(kind, code, f"f({int(family)})")


@pytest.mark.parametrize("kind", KINDS)
def test_rights_and_dangerous_calls_are_given_up(kind):
    code = """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    def denied(name, *arguments):
        return getattr(libc, name)(*arguments) == -1 and ctypes.get_errno() == 1
    def capabilities():
        sets = ctypes.create_string_buffer(24)
        libc.capget(ctypes.create_string_buffer((0x20080522).to_bytes(4, 'little') + bytes(4)), sets)
        return sets.raw
    """
    calls = "denied('ptrace', 0, 0, 0, 0), denied('unshare', 0x10000000), denied('syscall', 425, 8, 0)"
    assert ask(kind, code, f"({calls})") == (True, True, True)
    assert ask(kind, code, "os.getuid() != 0 and os.getgid() != 0 and os.getgroups()") in ([], [65534])
    assert ask(kind, code, "capabilities()") == bytes(24)


FORKS = """
import os, time
def f():
    made = 0
    try:
        while made < 100:
            if os.fork() == 0:
                time.sleep(30)
            made += 1
    except BlockingIOError:
        pass
    return made
"""


@pytest.mark.skipif(isolation()[0] != "namespaces", reason="bubblewrap as root does not hold this limit")
def test_processes_are_limited():
    assert ask("namespaces", FORKS, "f()", Limits(processes=16)) == 15


@pytest.mark.skipif(isolation()[0] != "namespaces" or os.geteuid() != 0, reason="gives up a right of root")
def test_without_the_right_to_make_namespaces_a_user_namespace_gives_it():
    """The way that an ordinary user takes: here root, whose children may not have CAP_SYS_ADMIN."""
    script = """
    import ctypes
    from eval.sandbox import Program, judge
    ctypes.CDLL(None).prctl(24, 21, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_SYS_ADMIN
    code = 'import os; f = lambda: (os.getuid(), os.getcwd(), os.path.exists("/etc/passwd"))'
    print(judge([Program(code, ("assert f() == (65534, '/box', False)", "assert f() is None"))])[0].passed)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "(True, False)\n", done.stderr


def test_a_program_cannot_find_the_expected_value():
    """Neither frames, nor the garbage collector, the environment, the command line or files hold it."""
    code = """
    import gc, os, sys
    def strings(value, depth=0):
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict) and depth < 4:
            for pair in list(value.items()):
                yield from strings(pair, depth + 1)
        elif isinstance(value, (list, tuple, set)) and depth < 4:
            for item in list(value):
                yield from strings(item, depth + 1)
    def f():
        places = [dict(os.environ), sys.argv, *gc.get_objects()]
        frame = sys._getframe()
        while frame:
            places += [frame.f_locals, frame.f_globals]
            frame = frame.f_back
        for place in places:
            for text in strings(place):
                if 'needle' in text and text != 'needle' and len(text) < 20:
                    return text
    """
    expected = "need" + "le-93"
    assert verdict(code, f"assert f() == {expected!r}", "assert f() is None").passed == (False, True)


def test_forged_answers_are_not_taken():
    """Right values, but given to no question: each question has a token of its own."""
    code = """
    import os
    def f(): return None
    for fd in range(3, 64):
        for forged in b'{"token": "0", "value": 5}', b'{"value": 5}', b'5', b'[]', b'{"ready": true}':
            try:
                os.write(fd, forged + b'\\n')
            except OSError:
                pass
    """
    assert not any(verdict(code, "assert f() == 5", "assert f() == 5").passed)
    patched = """
    import __main__, json
    __main__.encode = lambda value: True
    json.dumps = lambda *a, **k: '{"value": true}'
    def f(): return None
    """
    assert not any(verdict(patched, "assert f() == 5").passed)


@pytest.mark.parametrize("base, plain", [("int", "0"), ("str", "''"), ("dict", "{}"), ("object", "0")])
def test_an_equality_of_its_own_is_no_answer(base, plain):
    code = f"class L({base}):\n    def __eq__(self, other): return True\ndef f(): return L()"
    assert not any(verdict(code, f"assert f() == {plain}").passed)


def test_usual_kinds_of_the_library_answer_as_the_plain_value_that_they_equal():
    code = """
    from collections import Counter, OrderedDict, defaultdict, namedtuple
    from decimal import Decimal
    from enum import IntEnum
    from fractions import Fraction
    Colour = IntEnum('Colour', {'RED': 3})
    Point = namedtuple('Point', 'x y')
    """
    pairs = {
        "Counter('aab')": "{'a': 2, 'b': 1}",
        "OrderedDict(a=1)": "{'a': 1}",
        "defaultdict(int, a=1)": "{'a': 1}",
        "Point(1, 2)": "(1, 2)",
        "Decimal('.5')": "0.5",
        "Fraction(4, 2)": "2",
        "Colour.RED": "3",
        "float('inf')": "math.inf",
        "{1: 2}.keys()": "{1}",
    }
    code = textwrap.dedent(code) + f"def f(i): return [{', '.join(pairs)}][i]"
    found = verdict(code, *(f"assert f({i}) == {plain}" for i, plain in enumerate(pairs.values())))
    assert all(found.passed), found


def test_plain_values_come_through_as_they_are():
    values = [None, True, -1, 2**70, 0.1, float("-inf"), "\ud800\n", b"\0", [1, [2]], (1,), {1: {"a": ()}}]
    values += [{1, 2}, frozenset({(1,)}), 1 + 2j, {frozenset({1}): 2}]
    for value in values:
        back = decode(json.loads(json.dumps(encode(value))))
        assert back == value and type(back) is type(value)


def test_an_endless_answer_is_cut():
    start = time.monotonic()
    assert not any(verdict("def f(): return 'x' * 10**7", "assert len(f()) == 10**7").passed)
    assert not any(verdict("def f():\n    x = []\n    x.append(x)\n    return x", "assert f() == []").passed)
    assert time.monotonic() - start < 4


def test_setup_runs_after_the_code_and_tests_go_on_after_an_exception():
    code = "class Node:\n    def __init__(self, v): self.v = v\ndef f(n): return 1 / n.v"
    tests = ("assert f(zero) == 1", "assert f(two) == 0.5")
    assert verdict(code, *tests, setup="zero = Node(0)\r\ntwo = Node(2)").passed == (False, True)


def test_a_verdict_does_not_change_from_run_to_run():
    code = "def f(words): return list(set(words))"
    order = ask(isolation()[0], code, "f(['a', 'b', 'c', 'd', 'e'])")
    assert all(ask(isolation()[0], code, "f(['a', 'b', 'c', 'd', 'e'])") == order for _ in range(3))


def test_without_isolation_the_judge_refuses_unless_told(monkeypatch):
    program = Program("def f(): return 1", ("assert f() == 1",))
    monkeypatch.setattr(sandbox, "isolation", lambda: (None, "namespaces: unshare: not permitted"))
    with pytest.raises(ValueError, match="no isolation .* --unsafe-exec"):
        judge([program])
    assert judge([program], unsafe_exec=True)[0].passed == (True,)


def test_unsafe_execution_still_has_limits_and_no_children(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert ask("unsafe", "import os", "os.listdir('.')") == []
    assert "PermissionError" in ask("unsafe", "import os", "os.fork()")
    assert "PermissionError" in ask("unsafe", "import socket", "socket.socket()")
    assert "MemoryError" in ask("unsafe", "", "len('a' * 10**11)")
    assert os.listdir(tmp_path) == []


def test_a_sandbox_that_does_not_start_is_an_error_and_no_verdict(monkeypatch):
    """K10: a fault of ours is not scored as a fault of the program."""
    isolation()
    monkeypatch.setattr(sandbox, "JAIL", ROOT / "no_such_file.py")
    with pytest.raises(SandboxError, match="could not start"):
        judge([Program("def f(): return 1", ("assert f() == 1",))])
