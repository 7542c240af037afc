"""What a model might write, run for real: contained, ended in time, and nothing of it left behind."""

from __future__ import annotations

import gc
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from winnow.env.workers import bubblewrap as module
from winnow.env.workers.bubblewrap import SandboxError
from winnow.env.workers.sandbox import ENVIRONMENT, Outcome, Sandbox, SandboxOptions
from winnow.env.workers.seccomp import DENIED, program

from ..builders.sandboxes import FORK_BOMB, OPTIONS, OWN_UID, inside

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FIRST_UID", OWN_UID)
        sandbox = Sandbox(OPTIONS)
        yield sandbox
        sandbox.close()


@pytest.fixture(autouse=True)
def nothing_is_left_behind(
    sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    own = tmp_path_factory.mktemp("temporary")  # others write to the machine's meanwhile
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    gc.collect()  # descriptors of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    yield
    deadline = time.monotonic() + 10
    while inside() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert inside() == []
    assert (len(os.listdir("/proc/self/fd")), os.listdir(own)) == (before, [])


def test_an_ordinary_program(sandbox: Sandbox) -> None:
    assert sandbox.run("import math\nprint(math.comb(10, 3))") == Outcome("120\n", "", 0)
    assert sandbox.run("input()").exit_code == 1, "no input"
    failed = sandbox.run("1 / 0")
    assert failed.exit_code == 1
    assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert sandbox.run("print('ü' * 3, '\\udcff'.encode('utf-8', 'replace'))").stdout == "üüü b'?'\n"
    assert sandbox.run("x = '\ud800'").exit_code == 1, "a lone surrogate is no Python, and no crash of ours"


# ---- resources --------------------------------------------------------------------------------------------------


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import signal\nfor n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "import os; os.close(1); os.close(2)\nwhile True: pass",
        "import threading\ndef f():\n  while True: pass\nfor _ in range(4): threading.Thread(target=f).start()",
    ],
)
def test_what_does_not_end_is_ended(sandbox: Sandbox, code: str) -> None:
    started = time.monotonic()
    outcome = sandbox.run(code)
    assert (outcome.exit_code, outcome.timed_out) == (None, True) or outcome.exit_code == 128 + 24, "SIGXCPU at best"
    assert time.monotonic() - started < OPTIONS.timeout_s + 10


@pytest.mark.slow
def test_a_fork_bomb_stays_small_and_dies(sandbox: Sandbox) -> None:
    most = 0

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, len(inside()))
            time.sleep(0.05)

    done = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    outcome = sandbox.run(FORK_BOMB)
    done.set()
    watcher.join()
    assert outcome.timed_out
    assert 2 < most <= OPTIONS.processes + 4, "bubblewrap's own included"


def test_a_daemon_dies_with_the_program(sandbox: Sandbox) -> None:
    code = (
        "import os, sys, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
        "    while True: time.sleep(0.1)\n  os._exit(0)\nprint('gone')"
    )
    assert sandbox.run(code) == Outcome("gone\n", "", 0)


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "MemoryError"),
        ("f = open('/tmp/x', 'wb')\nwhile True: f.write(bytes(1 << 20))", "OSError"),
        ("for i in range(10**9): open(f'/tmp/{i}', 'wb').write(bytes(1 << 16))", "No space left"),
        ("open('/x', 'w')", "Read-only file system"),
        ("open('/dev/shm/x', 'w')", "Read-only file system"),
        ("import os; os.truncate(os.open('/tmp/x', os.O_CREAT | os.O_RDWR), 1 << 40)", "Error"),
        ("import os; os.memfd_create('x')", "PermissionError"),
        (
            "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\n"
            "if libc.shmget(0, 1 << 20, 0o1600) < 0: exit(os.strerror(ctypes.get_errno()))",
            "Operation not permitted",
        ),
        ("x = [open('/dev/null') for _ in range(10_000)]", "Too many open files"),
        ("def f(): f()\nf()", "RecursionError"),
    ],
)
def test_memory_and_disk_are_bounded(sandbox: Sandbox, code: str, error: str) -> None:
    outcome = sandbox.run(code)
    assert outcome.exit_code not in (0, None) or outcome.truncated
    assert error in outcome.stderr or outcome.exit_code == 128 + 25, "SIGXFSZ at best"


@pytest.mark.cases(one_in=2)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut_off(sandbox: Sandbox, stream: str) -> None:
    outcome = sandbox.run(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
    assert (outcome.exit_code, outcome.truncated, outcome.timed_out) == (None, True, False)
    assert getattr(outcome, stream) == "x" * OPTIONS.max_output


# ---- files, secrets, other processes, the network ---------------------------------------------------------------


def test_no_file_of_this_machine_can_be_read_or_written(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    secret.chmod(0o666)
    tmp_path.chmod(0o777)
    code = f"""
import os
for path in {[str(secret), "/etc/passwd", "/etc/shadow", "/root", "/home", "/var", "/work", str(Path.cwd())]!r}:
    print(os.path.exists(path))
os.symlink({str(secret)!r}, '/tmp/link')
print(os.path.exists('/tmp/link'), os.path.exists('/proc/1/root' + {str(secret)!r}))
for path in ['/usr/x', '/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', {str(secret)!r}]:
    try: open(path, 'w'); print('WROTE', path)
    except OSError: print('no')
"""
    assert sandbox.run(code).stdout.split() == ["False"] * 10 + ["no"] * 4
    assert secret.read_text() == "hunter2"


def test_the_environment_and_open_files_of_the_parent_stay_outside(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("API_TOKEN", "hunter2")
    (tmp_path / "open").write_text("hunter2")
    with (tmp_path / "open").open() as file:
        os.set_inheritable(file.fileno(), True)
        code = """
import os
print(sorted(k for k in os.environ if k not in ('LC_CTYPE', 'PWD')))
here = [os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if os.path.islink(f'/proc/self/fd/{n}')]
print(sorted(set(link.split(':')[0] for link in here)))
for pid in filter(str.isdigit, os.listdir('/proc')):
    print(pid, b'hunter2' in open(f'/proc/{pid}/environ', 'rb').read())
"""
        said = sandbox.run(code)
    assert said.stdout.splitlines() == [str(sorted(ENVIRONMENT)), "['/dev/null', 'pipe']", "1 False"], said


def test_other_processes_cannot_be_seen_or_signalled(sandbox: Sandbox) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        code = f"""
import os, signal
print([p for p in os.listdir('/proc') if p.isdigit()])
for pid in ({os.getpid()}, {victim.pid}):
    try: os.kill(pid, signal.SIGKILL); print('KILLED')
    except OSError: print('no')
try: os.kill(-1, signal.SIGKILL)
except ProcessLookupError: print(os.getuid(), os.getppid())
"""
        assert sandbox.run(code).stdout.splitlines() == ["['1']", "no", "no", "65534 0"]
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_there_is_no_network(sandbox: Sandbox) -> None:
    name = f"\0winnow-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(name)
        abstract.listen()
        code = f"""
import socket
def attempt(family, address):
    try: socket.socket(family).connect(address); print('CONNECTED')
    except OSError: print('no')
attempt(socket.AF_INET, ('127.0.0.1', {tcp.getsockname()[1]}))
attempt(socket.AF_INET, ('10.0.0.1', 80))
attempt(socket.AF_INET6, ('::1', {tcp.getsockname()[1]}))
attempt(socket.AF_UNIX, {name!r})
for family in (16, 17, 38, 40):
    try: socket.socket(family, socket.SOCK_RAW if family in (16, 17) else socket.SOCK_STREAM); print('OPENED', family)
    except OSError: print('no')
"""
        assert sandbox.run(code).stdout.split() == ["no"] * 8


def test_privileges_cannot_be_got(sandbox: Sandbox) -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
wanted = ('CapEff', 'CapBnd', 'NoNewPrivs', 'Seccomp:')
print([line.split()[1] for line in open('/proc/self/status') if line.startswith(wanted)])
def tried(call, *args): print(call(*args) == -1)
tried(libc.setuid, 0)
tried(libc.unshare, 0x10000000)
tried(libc.mount, b'none', b'/tmp', b'tmpfs', 0, None)
tried(libc.chroot, b'/tmp')
tried(libc.ptrace, 0, 0, 0, 0)
tried(libc.clone, None, None, 0x10000000 | 17, None)
"""
    lines = sandbox.run(code).stdout.splitlines()
    assert lines == ["['0000000000000000', '0000000000000000', '1', '2']", *["True"] * 6]


def test_denied_system_calls_fail_with_eperm() -> None:
    """The filter itself, on a child of this process without any other wall: so it is the filter that says no."""
    here = platform.machine() != "x86_64"
    denied = {name: numbers[here] for name, numbers in DENIED.items() if numbers[here]}
    code = f"""
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
program = bytes.fromhex({program().hex()!r})
buffer = ctypes.create_string_buffer(program, len(program))
class Fprog(ctypes.Structure):
    _fields_ = [('len', ctypes.c_ushort), ('filter', ctypes.c_void_p)]
fprog = Fprog(len(program) // 8, ctypes.addressof(buffer))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(fprog)) == 0
for name, number in {denied!r}.items():
    print(name, libc.syscall(number, -1, 0, 0, 0, 0, 0), ctypes.get_errno(), flush=True)
print(open('/proc/self/comm').read().strip())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    *answers, last = done.stdout.splitlines()
    assert answers == [f"{name} -1 1" for name in denied], done
    assert last, "ordinary calls still work"


def test_the_filter_is_for_two_machines_and_each_jump_lands() -> None:
    for machine in ("x86_64", "aarch64"):
        lines = [struct.unpack("=HBBI", program(machine)[i : i + 8]) for i in range(0, len(program(machine)), 8)]
        for i, (code, yes, no, _) in enumerate(lines):
            if code in (0x15, 0x35):
                assert max(i + 1 + yes, i + 1 + no) < len(lines)
        assert lines[-1][3] == 0x7FFF0000
        assert lines[-2][3] == 0x00050001
    with pytest.raises(KeyError, match="riscv64"):
        program("riscv64")


# ---- forged verdicts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["raise SystemExit(0)", "import os; os._exit(0)", "print('PASSED 100/100')", ""])
def test_what_a_program_says_of_itself_is_only_what_it_says(sandbox: Sandbox, code: str) -> None:
    outcome = sandbox.run(code)
    assert outcome.exit_code == 0
    assert outcome.stdout == ("PASSED 100/100\n" if "PASSED" in code else "")


def test_a_program_that_speaks_like_bubblewrap_is_no_failure_of_the_sandbox(sandbox: Sandbox) -> None:
    code = "import sys; sys.stderr.write('bwrap: Creating new namespace failed\\n'); sys.exit(1)"
    assert sandbox.run(code) == Outcome("", "bwrap: Creating new namespace failed\n", 1)


def test_one_program_cannot_leave_anything_to_the_next(sandbox: Sandbox) -> None:
    assert sandbox.run("open('/tmp/left', 'w').write('x')").exit_code == 0
    assert sandbox.run("import os; print(os.listdir('/tmp'))").stdout == "['main.py']\n"
    assert sandbox.run("open('/tmp/main.py', 'w')").exit_code in (0, 1)
    assert sandbox.run("print(1)").stdout == "1\n"


# ---- many, and none ---------------------------------------------------------------------------------------------


def test_many_at_once_each_with_its_own_answer(sandbox: Sandbox) -> None:
    futures = [sandbox.start(f"print({i} ** 2)") for i in range(12)]
    assert [f.result(60).stdout for f in futures] == [f"{i**2}\n" for i in range(12)]


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0, 0.5])
def test_closing_ends_what_runs(pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pause, bubblewrap tells how its child ended before it is killed itself."""
    own, killpg = Sandbox(OPTIONS), os.killpg
    monkeypatch.setattr(os, "killpg", lambda *group: (time.sleep(pause), killpg(*group)))
    futures = [own.start("import time; time.sleep(60)") for _ in range(4)]
    time.sleep(0.3)
    own.close()
    own.close()
    assert all(f.cancelled() or isinstance(f.exception(10), SandboxError) for f in futures)
    with pytest.raises(SandboxError, match="closed"):
        own.run("print(1)")


def test_a_killed_sandbox_is_a_failure_and_no_outcome(sandbox: Sandbox) -> None:
    future = sandbox.start("import time; time.sleep(60)")
    deadline = time.monotonic() + 10
    while not inside() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    for p in inside():
        if p.name() == "bwrap":
            p.kill()
    with pytest.raises(SandboxError, match=r"could not be started"):
        future.result(30)


def test_without_bubblewrap_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.which
    monkeypatch.setattr(module.shutil, "which", lambda name, **kw: None if name == "bwrap" else real(name, **kw))
    with pytest.raises(SandboxError, match=r"bubblewrap is not installed.*apt-get install bubblewrap.*unsafe: true"):
        Sandbox(OPTIONS)


def test_where_namespaces_are_forbidden_it_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    fake.chmod(0o755)
    folder = tmp_path
    while not folder.stat().st_mode & 0o001:  # up to the first that anybody may enter
        folder.chmod(0o755)
        folder = folder.parent
    real = shutil.which
    monkeypatch.setattr(module.shutil, "which", lambda name, **kw: str(fake) if name == "bwrap" else real(name, **kw))
    with pytest.raises(SandboxError, match=r"uid map: Permission denied.*kernel\.unprivileged_userns_clone"):
        Sandbox(OPTIONS)


def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(SandboxError, match="no interpreter /usr/bin/python9"):
        Sandbox(SandboxOptions(python="/usr/bin/python9"))


def test_unsafe_must_be_asked_for_and_then_runs_with_limits_only() -> None:
    unsafe = Sandbox(SandboxOptions(unsafe=True, timeout_s=2.0))
    try:
        assert unsafe.run("import os; print(os.path.exists('/etc'), os.getenv('OMP_NUM_THREADS'))").stdout == "True 1\n"
        assert unsafe.run("while True: pass").timed_out
        assert "MemoryError" in unsafe.run("x = bytearray(1 << 30)").stderr
        left = unsafe.run(
            "import subprocess\nquiet = subprocess.DEVNULL\n"
            "print(subprocess.Popen(['sleep', '100'], stdin=quiet, stdout=quiet, stderr=quiet).pid)"
        )
        deadline = time.monotonic() + 10
        while psutil.pid_exists(pid := int(left.stdout)) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        unsafe.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout_s": float("inf")}, r"timeout_s must lie in \(0, 1,000,000\], not inf"),
        ({"timeout_s": float("nan")}, "timeout_s must lie"),
        ({"memory_mb": 0}, "memory_mb must lie"),
        ({"unsafe": True, "python": "/usr/bin/python9"}, "own interpreter; remove python"),
    ],
)
def test_options_that_cannot_be_kept_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SandboxOptions(**options)
