"""What was installed is what the locks say, under known licences; known holes are asked for where a network answers.

    python locks/audit.py            # of the environment that it runs in, against locks/dev.txt

Offline: versions and hashes of the lock, licences, files that are vendored. `pip-audit`, which asks for known
vulnerabilities of the lock's versions, needs a network: where there is none, the last line says that it was not done.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import Distribution, distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINE = re.compile(r"([a-z0-9.\-]+)==(\S+) --hash=sha256:([0-9a-f]{64})")
VENDORED = {
    "src/winnow/study/assets/uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "src/winnow/study/assets/uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 of files that others wrote; their licences stand beside them."""
STRONG = re.compile(r"(?<!L)(?<!Lesser )\b(A?GPL|GNU (Affero )?General Public)", re.IGNORECASE)
"""Licences that would bind Winnow itself."""


ACCEPTED = {"jericho", "fast-downward-textworld"}
"""GPL: what TextWorld asks for, in an extra that nothing else needs; it is installed beside Winnow, never with it."""


SILENT = {"zss": "BSD, as its repository says"}
"""Packages that some builds install without their licence."""


def locked(name: str) -> dict[str, str]:
    """Package -> version. Raises ValueError naming a line without version and hash."""
    found = {}
    for number, line in enumerate((ROOT / "locks" / f"{name}.txt").read_text().splitlines(), 1):
        if line.startswith("#"):
            continue
        if (match := LINE.fullmatch(line)) is None:
            raise ValueError(f"locks/{name}.txt:{number}: no name==version --hash=sha256:...: {line!r}")
        found[match[1]] = match[2]
    return found


def licence(found: Distribution) -> str:
    """As its metadata say it; empty if they do not."""
    said = found.metadata.get_all("License-Expression") or []
    classes = (text.split(" :: ") for text in found.metadata.get_all("Classifier") or [])
    classified = [parts[-1] for parts in classes if parts[0] == "License"]
    own = [text.strip().splitlines()[0] for text in found.metadata.get_all("License") or [] if text.strip()]
    files = [str(file) for file in found.files or [] if re.search(r"(?i)licen[cs]e|copying", file.name)]
    found_there = ", ".join(said or classified or own) or (f"see {files[0]}" if files else "")
    return found_there or SILENT.get(found.metadata["Name"], "")


def installed() -> dict[str, Distribution]:
    return {re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d for d in distributions() if d.metadata["Name"]}


def problems(lock: str) -> list[str]:
    """What is not as it should be; empty if all is."""
    there, wanted = installed(), locked(lock)
    found = []
    for name, version in wanted.items():
        own = there.get(re.sub(r"[-_.]+", "-", name))
        if own is None:
            found.append(f"{name} {version} is in the lock, and not installed")
        elif own.version != version:
            found.append(f"{name} is {own.version}, the lock says {version}")
        elif not (terms := licence(own)):
            found.append(f"{name} {version} does not say its licence")
        elif STRONG.search(terms) and " OR " not in terms and name not in ACCEPTED:
            found.append(f"{name} {version} is under {terms}")
    for file, digest in VENDORED.items():
        if hashlib.sha256((ROOT / file).read_bytes()).hexdigest() != digest:
            found.append(f"{file} is not the file that was vendored")
    return found


def main() -> None:
    lock = sys.argv[1] if len(sys.argv) > 1 else "dev"
    there = installed()
    names = [re.sub(r"[-_.]+", "-", name) for name in locked(lock)]
    terms = Counter(licence(there[name]) for name in names if name in there)
    for licence_, count in terms.most_common():
        print(f"{count:4} {licence_[:100]}")
    found = problems(lock)
    for problem in found:
        print(problem)
    print(f"{len(locked(lock))} packages: {len(found)} problems")
    command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "-r", f"{ROOT}/locks/{lock}.txt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    unreachable = "No module named" in done.stderr or "Connection" in done.stderr or "resolve" in done.stderr
    print("known vulnerabilities: not asked, nobody answers" if unreachable else done.stdout + done.stderr)
    sys.exit(bool(found) or (done.returncode != 0 and not unreachable))


if __name__ == "__main__":
    main()
