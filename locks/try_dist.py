"""Tries what `make dist` has built: the wheel alone, with what the lock has, in an empty environment and directory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = (
    ["--version"],
    ["methods"],
    ["doctor", "--json"],
    ["demo", "max_steps=2", "warm_start.max_steps=20", "env.train_size=64", "eval_steps=2", "-o", "demo"],
    ["verify", "demo/run"],
    ["report", "demo/run", "-o", "page.html"],
)


def contents(wheel: Path) -> dict[str, int]:
    """CRC of every file of a wheel but its list of files."""
    with zipfile.ZipFile(wheel) as archive:
        return {i.filename: i.CRC for i in archive.infolist() if not i.filename.endswith("/RECORD")}


def check_contents(wheel: Path) -> None:
    """The wheel has the package's tracked files, no more and no less."""
    listed = subprocess.run(["git", "ls-files", "src/winnow"], cwd=ROOT, check=True, capture_output=True, text=True)
    tracked = {line.removeprefix("src/") for line in listed.stdout.splitlines()}
    packed = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert packed == tracked, f"missing: {sorted(tracked - packed)}; too many: {sorted(packed - tracked)}"


def check_sdist(sdist: Path, wheel: Path, scratch: Path) -> None:
    """The sdist builds the same wheel."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(scratch), str(sdist)]
    subprocess.run(command, check=True)
    assert contents(scratch / wheel.name) == contents(wheel), "the sdist builds another wheel"


def check_use(wheel: Path, scratch: Path) -> None:
    """Install it and run the main commands, seeing nothing of this checkout."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "WINNOW_"))}
    venv.create(scratch / "venv", with_pip=True)
    pip = [str(scratch / "venv" / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    locked = ["--no-deps", "--require-hashes", "-r", str(ROOT / "locks" / "winnow.txt")]
    for command in ([*pip, "torch==2.13.0"], [*pip, *locked], [*pip, "--no-deps", str(wheel)], [*pip[:3], "check"]):
        subprocess.run(command, env=environment, check=True)
    (scratch / "empty").mkdir()
    for command in COMMANDS:
        print("winnow", *command, flush=True)
        subprocess.run(
            [str(scratch / "venv" / "bin" / "winnow"), *command],
            cwd=scratch / "empty",
            env=environment | {"HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL,
            check=True,
        )


def main(directory: Path) -> None:
    (wheel,), (sdist,) = directory.glob("*.whl"), directory.glob("*.tar.gz")
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as scratch:
        check_sdist(sdist, wheel, Path(scratch))
        check_use(wheel, Path(scratch))
    print(f"{wheel.name} ({wheel.stat().st_size / 1024:.0f} KiB) and {sdist.name} are good")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
