"""`make demo` and `make test` where they are hard to run: `python -m tests.anywhere --pythons python3.12 ...`.

For each Python a copy of the last commit in a folder whose name has spaces and letters that are not ASCII, set up by
make, then read-only; an ordinary user without a home (if this is started as root), one core, 4 GB of memory, no
bubblewrap on the PATH and no variable of the caller's but those of pip. One JSON line for each command and Python.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "ein Ordner für 模型"
MEMORY = 4 << 30
HIDDEN = ("bwrap", "chromium")
DEMO = ("max_steps=3", "warm_start.max_steps=40", "env.train_size=200", "eval_steps=3")
"""What makes the demo short; without `--whole`."""


def path_without(hidden: Sequence[str], folder: Path) -> str:
    """A PATH of links to every program of this one's but some."""
    folder.mkdir(exist_ok=True)
    for place in map(Path, ("/usr/local/bin", "/usr/bin", "/bin")):
        for program in place.iterdir():
            if program.name not in hidden and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program)
    return str(folder)


@contextmanager
def folder_for(python: str, kept_in: Path | None) -> Iterator[Path]:
    if kept_in is not None:
        (folder := kept_in / Path(python).name).mkdir(parents=True, exist_ok=True)
        yield folder.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="anywhere-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def bounded_memory() -> Iterator[Path | None]:
    """A control group of `MEMORY`, which all that run in it share; None where this process may not make one."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"winnow-anywhere-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(MEMORY))
        except OSError:
            continue
        yield group
        for pid in (group / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.5)
        group.rmdir()
        return
    yield None


def restricted(user: pwd.struct_passwd | None, group: Path | None) -> Any:
    """What a child does to itself before it begins."""

    def confine() -> None:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        if user is not None:
            os.setgroups([])
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
        os.umask(0o022)

    return confine


def try_python(python: str, folder: Path, group: Path | None, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    user = pwd.getpwnam("nobody") if os.getuid() == 0 else None
    tree, out = folder / FOLDER / "winnow", folder / FOLDER / "out"
    tree.mkdir(parents=True, exist_ok=True)
    out.mkdir(exist_ok=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "x", "-C", str(tree)], input=archive, check=True)
    (scratch := folder / "tmp").mkdir(exist_ok=True)
    if user is not None:
        folder.chmod(0o755)
        subprocess.run(["chown", "-hR", f"{user.pw_uid}:{user.pw_gid}", str(folder)], check=True)
    kept = {k: v for k, v in os.environ.items() if k.startswith("PIP_") or k == "LANG"}
    environment = kept | {"PATH": path_without(HIDDEN, folder / "bin"), "TMPDIR": str(scratch), "PIP_NO_CACHE_DIR": "1"}
    found = []

    def run(what: str, *command: str) -> bool:
        started = time.monotonic()
        log = folder / f"{what}.log"
        with log.open("w") as file:
            code = subprocess.run(
                command, cwd=tree, env=environment, stdout=file, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, preexec_fn=restricted(user, group), timeout=arguments.timeout, check=False,
            ).returncode  # fmt: skip
        shutil.copy(log, arguments.logs / f"{what}-{Path(python).name}.log")
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        last = [line for line in lines if " passed" in line and " in " in line][-1:] or lines[-1:]
        seconds = round(time.monotonic() - started)
        found.append({"python": python, "what": what, "code": code, "seconds": seconds, "said": " ".join(last)[:300]})
        print(json.dumps(found[-1]), flush=True)
        return code == 0

    if run("install", "make", "install", f"PYTHON={python}"):
        subprocess.run(["chmod", "-R", "a-w", str(tree)], check=True)
        short = () if arguments.whole else (f"SETTINGS={' '.join(DEMO)}",)
        run("demo", "make", "demo", f"OUT={out / 'demo'}", *short)
        if not arguments.no_tests:
            run("test", "make", "test", "JOBS=0")  # in one process
        subprocess.run(["chmod", "-R", "u+w", str(tree)], check=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pythons", nargs="+", default=["python3.11", "python3.12", "python3.13"])
    parser.add_argument("--whole", action="store_true", help="the demo as it is, not a short one")
    parser.add_argument("--no-tests", action="store_true", help="the demo alone")
    parser.add_argument("--timeout", type=int, default=3600)
    parser.add_argument("--logs", type=Path, default=Path("build/anywhere"))
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--folder", type=Path, help="keep what is set up, for another call")
    arguments = parser.parse_args()
    arguments.logs.mkdir(parents=True, exist_ok=True)
    found, bounded = [], False
    for python in arguments.pythons:
        with folder_for(python, arguments.folder) as folder, bounded_memory() as group:
            found += try_python(python, folder, group, arguments)
            bounded = group is not None
    if arguments.out:
        model = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
        machine = {
            "cpu": model.partition(":")[2].strip(),
            "platform": platform.platform(),
            "memory_bytes": MEMORY if bounded else None,
            "cores": 1,
        }
        arguments.out.write_text(json.dumps({"machine": machine, "commands": found}, indent=1) + "\n")
    sys.exit(any(line["code"] for line in found))


if __name__ == "__main__":
    main()
