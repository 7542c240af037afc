"""Commands that run a program in bubblewrap: new namespaces, no capabilities, no network, only named files.

The order matters. Started as root, a process first gets its own user id (bubblewrap run as root is unsafe). A mount
namespace with a bounded /tmp follows, then bubblewrap with a system-call filter. Exploits of the kernel itself are not
contained; the kernel's version is visible.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from ...base.errors import ExpectedError
from .seccomp import program

FIRST_UID = 61_184
"""First user id of the slots when started as root; unused by others, in the range left to containers."""
_SCRATCH = "/sys"
"""Mount point of the bounded file system before bubblewrap shows it as /tmp. It exists on every machine, every user may
enter it, and nothing inside needs it."""
_MOUNT = f'mount -t tmpfs -o "size=$1,nr_inodes=$2,mode=0755" tmpfs {_SCRATCH} && shift 2 && exec "$@"'


class SandboxError(ExpectedError):
    """No sandbox is available, or one failed to start. Nothing ran outside it."""


def slot_user(slot: int) -> dict[str, Any]:
    """Return options of `Popen` that start a process as the slot's own user, if this one is root."""
    uid = FIRST_UID + slot
    return {"user": uid, "group": uid, "extra_groups": ()} if os.geteuid() == 0 else {}


def temporary(files: ExitStack, content: bytes = b"") -> IO[bytes]:
    """Return a file without a name that closes with `files`, to be read from its beginning."""
    file = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    file.write(content)
    file.seek(0)
    return file


def bubblewrapped(python: str, disk_mb: int, files: int, shown: Sequence[str] = ()) -> list[str]:
    """Return the command in front of the program; append more options of bubblewrap, `--` and the program.

    Inside are /usr without /usr/local, the installation of `python`, the directories `shown`, all read-only, and /tmp
    for `disk_mb` megabytes of memory in up to `files` files and directories. Raises SandboxError where that is
    unavailable.
    """
    if sys.platform != "linux":
        raise SandboxError(f"sandbox: needs Linux, this is {sys.platform}; use a Linux machine, or pass unsafe: true")
    bwrap = shutil.which("bwrap", path="/usr/bin:/bin:/usr/local/bin")
    if bwrap is None:
        raise SandboxError(
            "sandbox: bubblewrap is not installed; install it (Debian, Ubuntu: apt-get install bubblewrap), or pass "
            "unsafe: true if this machine may run what a model writes"
        )
    try:
        program()
    except KeyError as error:
        raise SandboxError(f"sandbox: no system-call filter for the machine {error}; use x86_64 or aarch64") from None
    # The owner is root of its own user namespace, where it may mount; bubblewrap cannot limit the number of files.
    mounted = [util_linux("unshare"), "--user", "--map-root-user", "--mount", "--", "/bin/sh", "-c", _MOUNT, "sh"]
    command = [*mounted, str(disk_mb << 20), str(files + 1), bwrap, "--unshare-all", "--unshare-user"]
    command += ["--uid", "65534", "--gid", "65534", "--disable-userns", "--hostname", "sandbox"]
    command += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--ro-bind", "/usr", "/usr"]
    installation = _installation(python)
    if not any(Path(path).is_relative_to("/usr/local") for path in (*installation, *shown, os.path.realpath(python))):
        command += ["--tmpfs", "/usr/local", "--remount-ro", "/usr/local"]
    for path in ("/bin", "/lib", "/lib64"):
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            command += ["--ro-bind", path, path]
    # bubblewrap's own writable / and /dev are memory without a bound: the caller remounts / read-only.
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--bind", _SCRATCH, "/tmp"]
    for path in dict.fromkeys([*installation, *shown]):
        command += ["--ro-bind", path, path]
    return command


def util_linux(name: str) -> str:
    """Return the path of a program of util-linux. Raises SandboxError if it is missing."""
    path = shutil.which(name, path="/usr/bin:/bin")
    if path is None:
        raise SandboxError(f"sandbox: {name} is missing; install util-linux")
    return path


def _installation(python: str) -> list[str]:
    """Return the directories outside /usr that an interpreter needs."""
    if not os.access(python, os.X_OK):
        raise SandboxError(f"sandbox: there is no interpreter {python}; set python to one that everybody may read")
    if Path(os.path.realpath(python)).is_relative_to("/usr") and Path(python).is_relative_to("/usr"):
        return []
    paths = subprocess.run(
        [python, "-I", "-c", "import sys; print(sys.prefix); print(sys.base_prefix)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [path for path in dict.fromkeys(paths.stdout.split("\n")) if path and not f"{path}/".startswith("/usr/")]
