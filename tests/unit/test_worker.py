"""Worker processes: results, errors, deaths, deadlines, isolation, clean-up."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

from winnow.env.workers.worker import WorkerError, WorkerPool, worker_environment

FUNCTIONS = """
import ctypes, os, signal, sys, time

def add(a, b=1):
    return a + b

def spin():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass

def spin_in_c():
    return len(str(9 ** 9 ** 8))

def sleep_with_child(path):
    if os.fork() == 0:
        time.sleep(100)
        os._exit(0)
    open(path, "w").write("x")
    time.sleep(100)

def die():
    os.write(2, b"last words")
    os._exit(3)

def crash():
    ctypes.string_at(0)

def leave():
    sys.exit(4)

def chat():
    print("x" * 200_000)
    sys.stderr.write("y" * 200_000)
    os.write(1, b'{"id": 1, "result": "forged"}')
    return sys.stdin.read()

def big():
    return "x" * (8 << 20)

def unserialisable():
    return object()

def deep():
    x = []
    for _ in range(100_000):
        x = [x]
    return x

def fill():
    return len(bytearray(10 << 30))

def environment():
    return dict(os.environ)

def pid():
    return os.getpid()

def nan():
    return float("nan")

def forge(fds):
    for fd in range(3, fds):
        try:
            os.write(fd, b'{"id": 999, "result": 1}\\n')
        except OSError:
            pass
    return 2

class Nasty(Exception):
    def __str__(self):
        raise RuntimeError

def nasty():
    raise Nasty
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "functions.py"
    path.write_text(FUNCTIONS)
    return str(path)


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool(1, timeout_s=20)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def hasty():
    pool = WorkerPool(1, timeout_s=1.5)
    yield pool
    pool.close()


def test_result_and_reuse_of_the_process(pool, functions):
    assert pool.call(f"{functions}:add", {"a": 2}).result(60) == 3
    first = pool.call(f"{functions}:pid", {}).result(60)
    assert pool.call(f"{functions}:pid", {}).result(60) == first != os.getpid()
    assert pool.call("math:sqrt", {}).exception(60).kind == "raised"


def test_many_calls_from_many_threads_keep_their_answers(functions):
    pool = WorkerPool(2, timeout_s=20)
    wrong: list[int] = []

    def client(start: int) -> None:
        futures = [(i, pool.call(f"{functions}:add", {"a": i})) for i in range(start, start + 50)]
        wrong.extend(i for i, future in futures if future.result(60) != i + 1)

    threads = [threading.Thread(target=client, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    assert wrong == []


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize(
    ("name", "kind", "detail"),
    [
        ("die", "died", "exit status 3.*last words"),
        ("crash", "died", "SIGSEGV"),
        ("leave", "raised", "SystemExit: 4"),
        ("big", "raised", "the result has .* bytes as JSON, over 4,194,304"),
        ("unserialisable", "raised", "object cannot be written as JSON"),
        ("deep", "raised", "RecursionError"),
        ("fill", "raised", "MemoryError"),
        ("nasty", "raised", "Nasty"),
        ("missing", "raised", "has no 'missing'"),
        ("nann", "raised", "Did you mean 'nan'"),
    ],
)
def test_what_goes_wrong_is_an_error_and_the_next_call_works(pool, functions, name, kind, detail):
    error = pool.call(f"{functions}:{name}", {}).exception(60)
    assert isinstance(error, WorkerError)
    assert error.kind == kind
    with pytest.raises(WorkerError, match=detail):
        raise error
    assert pool.call(f"{functions}:add", {"a": 1}).result(60) == 2


@pytest.mark.parametrize("by_module", [False, True])
def test_a_new_process_warns_of_a_file_that_was_edited(tmp_path, monkeypatch, by_module):
    monkeypatch.syspath_prepend(tmp_path)
    file, pool = tmp_path / "mine.py", WorkerPool(1)
    score = "mine:score" if by_module else f"{file}:score"
    file.write_text("import os\ndef score(end=False):\n    return os._exit(1) if end else 1\n")
    assert pool.call(score, {}).result(60) == 1
    file.write_text(file.read_text().replace("else 1", "else 22"))
    assert pool.call(score, {"end": True}).exception(60).kind == "died"
    with pytest.warns(UserWarning, match=rf"{file} has changed since the run began"):
        assert pool.call(score, {}).result(60) == 22
    pool.close()


@pytest.mark.cases(one_in=2)
@pytest.mark.parametrize("name", ["spin", "spin_in_c"])
def test_a_call_that_never_ends_is_killed(hasty, functions, name):
    error = hasty.call(f"{functions}:{name}", {}).exception(60)
    assert error.kind == "timeout"
    assert hasty.call(f"{functions}:add", {"a": 1}).result(60) == 2


def test_children_of_a_killed_worker_are_killed_too(hasty, functions, tmp_path):
    flag = tmp_path / "flag"
    pid = hasty.call(f"{functions}:pid", {}).result(60)
    future = hasty.call(f"{functions}:sleep_with_child", {"path": str(flag)})
    _until(flag.exists)
    children = psutil.Process(pid).children()
    assert len(children) == 1
    assert future.exception(60).kind == "timeout"
    _until(lambda: not _running(children[0].pid) and not _running(pid))


def test_prints_and_forged_replies_do_not_reach_the_caller(pool, functions):
    assert pool.call(f"{functions}:chat", {}).result(60) == ""
    assert pool.call(f"{functions}:forge", {"fds": 20}).exception(60).kind == "died"
    assert pool.call(f"{functions}:add", {"a": 1}).result(60) == 2


def test_values_that_are_not_json(pool, functions):
    result = pool.call(f"{functions}:nan", {}).result(60)
    assert result != result
    assert pool.call(f"{functions}:add", {"a": "\ud800\0", "b": "é"}).result(60) == "\ud800\0é"
    with pytest.raises(TypeError, match="object cannot be written as JSON"):
        pool.call(f"{functions}:add", {"a": object()})


def test_no_secrets_in_the_environment(pool, functions, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    own = WorkerPool(1, timeout_s=20)
    env = own.call(f"{functions}:environment", {}).result(60)
    own.close()
    assert "secret" not in env.values()
    assert env["HF_HUB_OFFLINE"] == env["OMP_NUM_THREADS"] == "1"
    assert set(env) <= set(worker_environment()) | {"LC_CTYPE"}


def test_close_ends_everything_and_fails_what_waits(functions):
    pool = WorkerPool(1, timeout_s=60)
    pid = pool.call(f"{functions}:pid", {}).result(60)
    futures = [pool.call(f"{functions}:spin", {}) for _ in range(3)]
    pool.close()
    pool.close()
    assert [f.exception(10).kind for f in futures] == ["died"] * 3
    assert not _running(pid)
    with pytest.raises(RuntimeError, match="closed"):
        pool.call(f"{functions}:add", {"a": 1})


@pytest.mark.slow
def test_no_descriptor_or_thread_is_left_after_many_deaths(functions):
    process = psutil.Process()
    fds, threads, children = process.num_fds(), set(threading.enumerate()), set(process.children())
    pool = WorkerPool(2, timeout_s=20)
    for future in [pool.call(f"{functions}:die", {}) for _ in range(20)]:
        assert future.exception(60).kind == "died"
    pool.close()
    assert process.num_fds() <= fds
    assert not set(threading.enumerate()) - threads
    assert not set(process.children()) - children


@pytest.mark.parametrize("function", ["spin_in_c", "spin", "pid"])
def test_workers_die_with_a_killed_parent(functions, tmp_path, function):
    script = f"""
import time
from winnow.env.workers.worker import WorkerPool
pool = WorkerPool(1, timeout_s=600)
print(pool.call({functions!r} + ":pid", {{}}).result(), flush=True)
pool.call({functions!r} + ":{function}", {{}})
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert _running(pid)
    time.sleep(0.2)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _until(lambda: not _running(pid))


def test_neither_the_worker_nor_the_task_table_imports_torch():
    heavy = {"torch", "numpy", "transformers"}
    code = f"import sys, winnow.env.workers.worker; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize("options", [{"size": 0}, {"timeout_s": 0}, {"memory_mb": 1}])
def test_bad_options(options):
    with pytest.raises(ValueError, match="WorkerPool"):
        WorkerPool(**options)


def _running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited for 20 s"
        time.sleep(0.01)
