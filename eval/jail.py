"""The inside of the sandbox: a process that shuts itself in, runs one program, and answers with plain values.

`eval/sandbox.py` starts it as a script, with one socket for all it hears and says; it imports only the
standard library. It never learns what a test expects: it is asked for the value of ``add(2, 3)`` and answers
``5``, and the comparison is made outside. So whatever the program does to this process (patched builtins,
forged answers, frames read through the stack), all it can bring about is another value, and a wrong value
fails.

Three processes, for the kind of isolation called "namespaces":
- the first leaves for new namespaces (mount, pid, network, ipc, host name, cgroup; user too, unless it is
  root), stays the parent of the next one, and kills it at SIGTERM;
- the second is process 1 in there: it builds the private file system and waits; when it ends the kernel kills
  all that the program started, in whatever session;
- the third gives up its user, capabilities and limits, installs the system-call filter, and runs the program.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
import types
from collections import Counter, OrderedDict
from collections.abc import ItemsView, KeysView
from numbers import Number

BOX = "/box"  # the only writable directory inside: home, working and temporary directory

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
CLONE_NEW_OTHERS = 0x40000000 | 0x20000000 | 0x8000000 | 0x4000000 | 0x2000000  # net, pid, ipc, uts, cgroup
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

# System calls that no solution of a programming task needs: (x86_64, aarch64).
DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
}
SOCKET, CLONE, CLONE3 = (41, 198), (56, 220), (435, 435)
FORKS = ((57, 58), ())  # fork and vfork, which aarch64 lacks

libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, *values: int) -> int:
    return libc.prctl(option, *(ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]))


def _check(result: int, what: str):
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None):
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _check(libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]), f"mount {target}")


def enter_namespaces(config: dict):
    """Returns in the third process only; raises OSError where the kernel refuses."""
    signals = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    uid, gid = os.geteuid(), os.getegid()
    with open("/proc/self/uid_map") as file:
        all_users = file.read().split() == ["0", "0", str(2**32 - 1)]
    root = uid == 0 and all_users and libc.unshare(CLONE_NEWNS | CLONE_NEW_OTHERS) == 0
    if not root:
        _check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEW_OTHERS), "unshare")
        for name, text in ("setgroups", "deny"), ("uid_map", f"65534 {uid} 1"), ("gid_map", f"65534 {gid} 1"):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    # As root, a user of its own for each sandbox: the process limit counts by user, and nothing else has this
    # one.
    sandbox_user = 2**30 + os.getpid()
    second = os.fork()
    if second:
        os.close(config["channel"])
        signal.sigwait(signals)
        os.kill(second, signal.SIGKILL)
        os.waitpid(second, 0)  # returns when every process of the namespace is gone
        os._exit(0)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # and that of the first the second, and so all
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    build_root(config)
    if root:
        os.chown(BOX, sandbox_user, sandbox_user)
    third = os.fork()
    if third:
        os.close(config["channel"])
        while os.wait()[0] != third:
            pass
        os._exit(0)
    os.setsid()
    if root:
        os.setgroups([])
        os.setresgid(sandbox_user, sandbox_user, sandbox_user)
        os.setresuid(sandbox_user, sandbox_user, sandbox_user)
    else:  # version 3 of the header, then effective, permitted, inheritable: none
        _check(libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")


def build_root(config: dict):
    """A read-only file system that holds the interpreter's directories, four devices and the empty BOX."""
    base = config["base"]
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.mkdir(f"{base}/old")
    number = PIVOT_ROOT[platform.machine()]
    _check(libc.syscall(number, os.fsencode(base), os.fsencode(f"{base}/old")), "pivot_root")
    os.chdir("/")
    for source, target in config["binds"]:
        source = "/old" + source
        if os.path.isdir(source):
            os.makedirs(target, exist_ok=True)
            flags = MS_NOSUID | MS_NODEV
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            open(target, "a").close()
            flags = MS_NOSUID
        _mount(source, target, None, MS_BIND | MS_REC)
        # Flags that the source has (ST_ and MS_ bits are the same) may not be taken away in a user namespace.
        flags |= os.statvfs(target).f_flag & 15
        _mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)
    _check(libc.umount2(b"/old", MNT_DETACH), "umount")
    os.rmdir("/old")
    os.mkdir(BOX)
    _mount("tmpfs", BOX, "tmpfs", MS_NOSUID | MS_NODEV, f"size={config['disk']},mode=700")
    _mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def set_limits(config: dict):
    for name, value in config["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))


def filter_system_calls(alone: bool) -> bool:
    """Seccomp: denied calls fail with EPERM, inherited by all children; False where this machine has no
    filter.

    ``alone`` also forbids new processes and every socket: for --unsafe-exec, where no namespace holds them.
    """
    machines = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
    if sys.platform != "linux" or platform.machine() not in machines:
        return False
    column, arch = machines[platform.machine()]
    load, equal, greater, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF operations
    allow, kill, eperm, enosys = 0x7FFF0000, 0x80000000, 0x50001, 0x50026
    number, first_argument = 0, 16  # offsets in struct seccomp_data

    steps = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, kill), (load, 0, 0, number)]
    steps += [(greater, 0, 1, 0x40000000), (give, 0, 0, eperm)]  # the x32 calls
    denied = [numbers[column] for numbers in DENIED.values()]
    denied += [*FORKS[column], SOCKET[column]] if alone else []
    for call in denied:
        steps += [(equal, 0, 1, call), (give, 0, 0, eperm)]
    steps += [(equal, 0, 1, CLONE3[column]), (give, 0, 0, enosys)]  # libc then takes clone, whose flags show
    # socket(family): unix and internet (of a network with no device), no other; vsock would leave the
    # namespace
    families = [(equal, left, 0, family) for left, family in ((3, 1), (2, 2), (1, 10))]
    steps += [(equal, 0, 6, SOCKET[column]), (load, 0, 0, first_argument), *families]
    steps += [(give, 0, 0, eperm), (give, 0, 0, allow)]
    # clone(flags): no new namespace; alone: a thread only
    new_namespace, thread = CLONE_NEWNS | CLONE_NEWUSER | CLONE_NEW_OTHERS, 0x10000
    steps += [(equal, 0, 3, CLONE[column]), (load, 0, 0, first_argument)]
    steps += [(any_bit, 1, 0, thread) if alone else (any_bit, 0, 1, new_namespace), (give, 0, 0, eperm)]
    steps += [(give, 0, 0, allow)]

    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
    return _prctl(PR_SET_SECCOMP, 2, ctypes.addressof(program)) == 0


PLAIN = (int, float, str, list, tuple, dict, frozenset, set, bytes, bytearray, complex)
OWN_EQUALITY = (Counter, OrderedDict)  # the two of the library that a solution may well return


def encode(value):
    """A plain value as JSON; an instance of a subclass as the plain value that it stands on.

    Raises TypeError for anything else, such as an object or a subclass with an equality of its own.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, Number) and type(value).__eq__ not in (int.__eq__, float.__eq__, complex.__eq__):
        for kind in int, float:  # Decimal, Fraction, numpy's scalars
            plain = kind(value)
            if type(value).__module__ in ("decimal", "fractions", "numpy") and plain == value:
                return encode(plain)
    elif isinstance(value, KeysView | ItemsView):
        return ["set", [encode(item) for item in value]]
    for plain in PLAIN:
        if isinstance(value, plain) and (type(value).__eq__ is plain.__eq__ or type(value) in OWN_EQUALITY):
            break
    else:
        raise TypeError(f"a {type(value).__name__} is no plain value")
    if plain is int:
        value = int.__index__(value)
        return value if value.bit_length() < 64 else ["int", hex(value)]
    if plain is complex:
        return ["complex", [value.real, value.imag]]
    if plain in (bytes, bytearray):
        return ["bytes", bytes(value).hex()]
    if plain is dict:
        return ["dict", [[encode(key), encode(item)] for key, item in dict.items(value)]]
    if plain in (float, str):
        return value
    return [plain.__name__, [encode(item) for item in plain.__iter__(value)]]


def serve(channel: int):
    """Answers one JSON line for each: ``run`` executes statements, ``value`` evaluates an expression."""
    solution = types.ModuleType("solution")
    sys.modules["solution"] = solution
    requests = os.fdopen(os.dup(channel), encoding="ascii")
    for line in requests:
        request = json.loads(line)
        answer = {"token": request["token"]}
        try:
            if "run" in request:
                exec(compile(request["run"], "solution", "exec"), solution.__dict__)
            else:
                value = eval(compile(request["value"], "test", "eval"), solution.__dict__)
                answer["value"] = encode(value)
        except BaseException as error:  # the program's own fault, SystemExit included: told, not hidden
            answer["error"] = f"{type(error).__name__}: {error}"[:200]
        data = json.dumps(answer).encode() + b"\n"
        while data:
            data = data[os.write(channel, data) :]


def main():
    first = b""
    while not first.endswith(b"\n"):
        first += os.read(0, 1)
    config = json.loads(first)
    config["channel"] = channel = os.dup(0)
    if sys.platform == "linux":
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the judge's death ends the first process,
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in 0, 1, 2:  # no input; what the program prints is dropped
        os.dup2(nothing, fd)
    os.close(nothing)
    try:
        if config["isolation"] == "namespaces":
            enter_namespaces(config)
        os.chdir(config["cwd"])
        sys.path += config["path"]
        if sys.platform == "linux":
            _prctl(PR_SET_NO_NEW_PRIVS, 1)
        set_limits(config)
        filtered = filter_system_calls(alone=config["isolation"] == "unsafe")
        ready = {"ready": True, "seccomp": filtered}
    except (OSError, ValueError, KeyError) as error:
        ready = {"ready": False, "error": str(error)}
    os.write(channel, json.dumps(ready).encode() + b"\n")
    if ready["ready"]:
        serve(channel)
    os._exit(0)


if __name__ == "__main__":
    main()
