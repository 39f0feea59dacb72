"""Runs Python that a model wrote, and says which tests it passes.

The verdict is formed here, in the judge, which never runs a program under test. Each program has a process of
its own (`eval/jail.py`), joined to the judge by one socket. For ``assert add(2, 3) == 5`` that process is
asked for the value of ``add(2, 3)``, under a token drawn for this one question, and the plain value that
comes back is compared here (`eval/asserts.py`). The expected value never enters the sandbox, so there is no
verdict in there to forge: leaving early, printing "passed", equality that is always true, patched builtins,
and reading frames, the environment or other processes all end as a wrong value or none. A program can still
hold a table of answers that it saw in its prompt; only hidden tests can tell.

Isolated, with "namespaces" (user, mount, pid, network, ipc, host name and cgroup namespaces, made
unprivileged or as root) and, where those are denied, with "bubblewrap" if it is installed:
- files: read-only view of the interpreter's own directories and system libraries, and nothing else of the
  machine, no /proc, no /sys; home, working and temporary directory are one empty tmpfs that goes with the
  process;
- network: a network namespace without any device, loopback down too; sockets of other families are refused;
- processes: a pid namespace that the kernel kills as a whole at the end, detached children included;
- rights: no capabilities, no_new_privs, a user of its own (root) or a mapped one, and a system-call filter
  (seccomp, x86_64 and aarch64) that refuses ptrace, mounts, namespaces, keys, bpf, io_uring and the like;
- nothing inherited: an environment of a few fixed variables, no file descriptor but the socket;
- limits: wall clock a test and in all, CPU seconds, address space of a process, resident memory of all its
  processes together (looked at every 0.1 s), processes, open files, file and directory size, length of an
  answer; input is empty, output dropped.

Not isolated: the kernel itself (a hole in it is a way out), CPU time and memory bandwidth shared with the
machine, and what the interpreter's directories hold. The limit on processes does not bind where root has no
right to make namespaces and takes a user namespace or bubblewrap (which has a loopback of its own).

On a machine that grants neither, `judge` refuses. With ``unsafe_exec`` the program runs with the caller's
rights and sees the caller's files; the limits, the empty directory and environment, and, where the kernel has
seccomp, a filter that refuses all new processes and all sockets, still hold.
"""

import functools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from eval.asserts import holds, parse_test

JAIL = Path(__file__).with_name("jail.py")
BOX = "/box"  # as in jail.py
START_SECONDS = 30.0  # for the interpreter and its namespaces, on a crowded machine


class SandboxError(RuntimeError):
    """The sandbox itself failed; no word on the program."""


class _Ended(Exception):
    """The program's process left, overran a limit, or broke the protocol: no further test can pass."""


class _Raised(Exception):
    """The program raised, or answered with no plain value."""


@dataclass(frozen=True)
class Program:
    code: str
    tests: tuple[str, ...]  # one assert statement each
    setup: str = ""  # run after the code, before the tests


@dataclass(frozen=True)
class Limits:
    test_seconds: float = 5.0  # wall clock: loading the code, and each test
    total_seconds: float = 10.0  # wall clock of the whole program; CPU seconds of each of its processes
    memory: int = 2**30  # bytes of address space of each process, and of resident memory of all
    disk: int = 2**26  # bytes in its directory
    processes: int = 64  # threads count
    files: int = 64  # open at once
    answer: int = 2**18  # bytes of one answer


@dataclass(frozen=True)
class Verdict:
    passed: tuple[bool, ...]  # per test
    error: str | None  # the first thing that went wrong, for people to read

    @property
    def rate(self) -> float:
        """Share of tests passed, 0..1; 0 without tests."""
        return sum(self.passed) / max(1, len(self.passed))


def judge(
    programs: list[Program],
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    unsafe_exec: bool = False,
    workers: int | None = None,
) -> list[Verdict]:
    """A verdict for each program, ``workers`` at a time (default: the processors of this rank, 8 at most).

    All tests of a program run in one process, in order; when that ends early or overruns a limit, the tests
    left have failed. Raises ValueError for a test that `parse_test` refuses and where there is no isolation
    (`require`), SandboxError when a sandbox cannot be started.
    """
    conditions = [[parse_test(test) for test in program.tests] for program in programs]
    isolation = require(unsafe_exec)
    if workers is None:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        workers = max(1, min(8, (os.cpu_count() or 1) // ranks))
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda p, c: _judge_one(p, c, limits, isolation), programs, conditions))


def require(unsafe_exec: bool = False) -> str:
    """The isolation that `judge` will use; raises ValueError, one sentence, where there is none to be had."""
    if unsafe_exec:
        return "unsafe"
    found, reasons = isolation()
    if found is None:
        raise ValueError(
            f"this machine gives no isolation for code that a model wrote ({reasons}); allow user namespaces "
            "or install bubblewrap, or accept that such code runs with your rights: --unsafe-exec"
        )
    return found


@functools.cache
def isolation() -> tuple[str | None, str]:
    """("namespaces" | "bubblewrap" | None, why others failed), found by running a small program in each."""
    trial = Program("def f():\n    return 1", ("assert f() == 1",))
    reasons = []
    for kind in "namespaces", "bubblewrap":
        try:
            verdict = _judge_one(trial, [parse_test(trial.tests[0])], Limits(), kind)
            if verdict.passed == (True,):
                return kind, "; ".join(reasons)
            reasons.append(f"{kind}: {verdict.error}")
        except SandboxError as error:
            reasons.append(f"{kind}: {error}")
    return None, "; ".join(reasons)


def _judge_one(program: Program, conditions: list, limits: Limits, isolation: str) -> Verdict:
    passed, error = [False] * len(conditions), None
    with _Sandbox(limits, isolation) as sandbox:
        try:
            sandbox.ask(run=program.code)
            sandbox.ask(run=program.setup)
            for i, condition in enumerate(conditions):
                sandbox.begin_test()
                try:
                    passed[i] = holds(condition, lambda source: sandbox.ask(value=source))
                    if not passed[i]:
                        error = error or f"does not hold: {program.tests[i]}"
                except _Raised as raised:
                    error = error or str(raised)
        except (_Ended, _Raised) as ended:
            error = error or str(ended)
    return Verdict(tuple(passed), error)


class _Sandbox:
    """One jailed process and the socket to it; a context manager that leaves no process and no file."""

    def __init__(self, limits: Limits, isolation: str):
        self.limits, self.isolation = limits, isolation
        self.directory = tempfile.mkdtemp(prefix="sandbox-") if isolation == "unsafe" else None
        self.channel, theirs = socket.socketpair()
        self.unread = bytearray()
        try:
            with theirs:
                self.process = subprocess.Popen(
                    self._command(),
                    stdin=theirs,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=self._environment(),
                    cwd="/",
                    start_new_session=True,
                )
        except OSError as error:
            self.channel.close()
            raise SandboxError(f"{error.strerror}: {error.filename}") from None
        try:
            self.end = self.test_end = time.monotonic() + START_SECONDS
            self._send(self._config())
            ready = self._receive()
            if not ready.get("ready"):
                raise SandboxError(ready.get("error"))
        except (_Ended, SandboxError) as error:
            self.__exit__()
            raise SandboxError(f"could not start: {error}") from None
        self.end = time.monotonic() + limits.total_seconds
        self.begin_test()

    def begin_test(self):
        self.test_end = min(self.end, time.monotonic() + self.limits.test_seconds)

    def ask(self, **question: str):
        """Runs statements (``run=``) or evaluates an expression (``value=``) inside; the plain value, or
        None.

        Raises _Raised for what the program raised, _Ended when it is over.
        """
        token = secrets.token_hex(8)
        self._send(question | {"token": token})
        answer = self._receive()
        if answer.get("token") != token:
            raise _Ended("answered to no question")
        if "error" in answer:
            raise _Raised(str(answer["error"]))
        try:
            return decode(answer.get("value"))
        except (ValueError, TypeError, RecursionError):
            raise _Ended("answered with no plain value") from None

    def _send(self, message: dict):
        try:
            self.channel.settimeout(max(0.001, self.test_end - time.monotonic()))
            self.channel.sendall(json.dumps(message).encode() + b"\n")
        except TimeoutError:
            raise _Ended("time limit") from None
        except OSError:
            raise _Ended("its process ended") from None

    def _receive(self) -> dict:
        """One line, bounded in length and time; meanwhile an eye on the memory of all its processes."""
        while b"\n" not in self.unread:
            left = self.test_end - time.monotonic()
            if left <= 0:
                raise _Ended("time limit")
            self.channel.settimeout(min(left, 0.1))
            try:
                data = self.channel.recv(65536)
            except TimeoutError:
                if resident_memory(self.process.pid) > self.limits.memory:
                    raise _Ended("memory limit") from None
                continue
            except OSError:
                data = b""
            if not data:
                raise _Ended("its process ended")
            self.unread += data
            if len(self.unread) > self.limits.answer:
                raise _Ended("answer too long")
        line, _, self.unread = self.unread.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise _Ended("answered with no JSON object")
        return message

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.channel.close()
        if self.isolation == "namespaces":
            self.process.terminate()  # jail.py then kills its namespace, and waits until that is gone
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        else:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _config(self) -> dict:
        limits = self.limits
        cpu = int(limits.total_seconds) + 1
        return {
            "isolation": self.isolation,
            "cwd": self.directory or BOX,
            "path": _site_packages(),
            "base": tempfile.gettempdir(),
            "binds": _binds(),
            "disk": limits.disk,
            "limits": {
                "RLIMIT_AS": limits.memory,
                "RLIMIT_CPU": cpu,
                "RLIMIT_FSIZE": limits.disk,
                "RLIMIT_NOFILE": limits.files,
                "RLIMIT_NPROC": limits.processes,
                "RLIMIT_CORE": 0,
            },
        }

    def _environment(self) -> dict[str, str]:
        home = self.directory or BOX
        fixed = {"HOME": home, "TMPDIR": home, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
        fixed |= {"PYTHONHASHSEED": "0"}  # the order of a set, and so the verdict, is the same each time
        fixed |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        libraries = os.environ.get("LD_LIBRARY_PATH")  # some interpreters do not start without
        return fixed | ({"LD_LIBRARY_PATH": libraries} if libraries else {})

    def _command(self) -> list[str]:
        # -S: no .pth file of the caller's environment runs; -P: the directory of jail.py is not on the path
        python = [sys.executable, "-s", "-S", "-P", "-B"]
        if self.isolation != "bubblewrap":
            return [*python, str(JAIL)]
        command = [
            "bwrap",
            "--unshare-user",
            "--unshare-all",
            "--uid",
            "65534",
            "--gid",
            "65534",
            "--cap-drop",
            "ALL",
        ]
        command += ["--die-with-parent", "--new-session", "--tmpfs", "/"]
        for source, target in _binds():
            command += ["--dev-bind" if target.startswith("/dev/") else "--ro-bind", source, target]
        command += ["--ro-bind", str(JAIL), "/jail.py", "--size", str(self.limits.disk), "--tmpfs", BOX]
        return [*command, "--remount-ro", "/", "--chdir", BOX, *python, "/jail.py"]


def decode(value):
    """The plain value that `jail.encode` wrote; every type exactly the builtin one."""
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise ValueError("no plain value")
        return value
    kind, content = value
    if kind == "int":
        return int(content, 16)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content}
    kinds = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    if kind not in kinds:
        raise ValueError("no plain value")
    return kinds[kind](decode(item) for item in content)


def resident_memory(pid: int) -> int:
    """Bytes resident in a process and all its descendants, shared pages counted each time (Linux)."""
    pages, waiting = 0, [pid]
    while waiting:
        process = Path(f"/proc/{waiting.pop()}")
        try:
            pages += int((process / "statm").read_text().split()[1])
            for thread in (process / "task").iterdir():
                waiting += (thread / "children").read_text().split()
        except (OSError, IndexError):
            continue  # gone meanwhile
    return pages * os.sysconf("SC_PAGE_SIZE")


def _site_packages() -> list[str]:
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return [path for path in dict.fromkeys(paths) if os.path.isdir(path)]


@functools.cache
def _binds() -> list[tuple[str, str]]:
    """(real path, path as the sandbox sees it): what an interpreter needs to run and import."""
    paths = {sys.base_prefix, sys.base_exec_prefix, sys.prefix, *_site_packages()}
    paths |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/nix/store"}
    paths |= {"/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"}
    paths = sorted(path for path in paths if os.path.exists(path))
    outermost = [p for p in paths if not any(p.startswith(other.rstrip("/") + "/") for other in paths)]
    return [(os.path.realpath(path), path) for path in outermost]
