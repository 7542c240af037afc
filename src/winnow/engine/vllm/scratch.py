"""What vLLM leaves outside its process: files, sockets and shared memory, removed however the process ends."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import cache_dir

REMOVE = 'exec 3<&0; (while read -r path; do set -- "$@" "$path"; done; rm -rf -- "$@") <&3 &'
"""Reads paths until the pipe closes, with this process or before, and removes all. A shell in the background is no
child of this process, whose children Ray kills with it."""
SHARED = "/dev/shm/psm_"
"""Beginning of the names that Python gives shared memory."""


class Scratch:
    """A temporary directory, removed by `close` or when this process ends, killed or not."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="winnow-")
        reader, self._writer = os.pipe()
        command = ["sh", "-c", REMOVE, "sh", self.path]
        quiet = subprocess.DEVNULL
        subprocess.run(command, stdin=reader, stdout=quiet, stderr=quiet, start_new_session=True, check=True)
        os.close(reader)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Temporary files of the body go into the directory; the shared memory that it makes is removed, too."""
        cache_dir()  # PyTorch keeps compiled kernels under the usual temporary directory
        before, shared = tempfile.tempdir, _shared_memory()
        tempfile.tempdir = self.path
        try:
            with environment({"TMPDIR": self.path}):
                yield
        finally:
            tempfile.tempdir = before
            for path in _shared_memory() - shared:
                os.write(self._writer, f"{path}\n".encode())

    def close(self) -> None:
        if self._writer >= 0:
            os.close(self._writer)
        self._writer = -1


@contextmanager
def environment(names: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the body."""
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _shared_memory() -> set[str]:
    """Segments that this process has mapped."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return {path for line in lines if (path := line.split(maxsplit=5)[-1]).startswith(SHARED)}
