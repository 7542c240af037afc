"""Asks pip's resolver, and uv's, what a user's install lines get today on Linux with a GPU; downloads no package.

    python locks/resolves.py --docs docs/install.md     # needs pip 23.2 or newer, uv, and a network

Builds the wheel of this checkout. Writes the table, or exits where a resolver finds no set.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INDEX = "https://pypi.org/simple"
EXTRAS = ("", "trl", "peft,math,hub", "vllm", "vllm,trl", "ray,vllm", "verifiers")
SHOWN = ("torch", "transformers", "vllm", "trl", "ray")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
ENVIRONMENT["PIP_CONFIG_FILE"] = os.devnull


def build_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def by_pip(requirement: str, folder: Path) -> dict[str, str]:
    report = folder / "report.json"
    command = [sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--ignore-installed", "-q"]
    command += ["--report", str(report), "--index-url", INDEX, requirement]
    subprocess.run(command, check=True, env=ENVIRONMENT)
    found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {each["metadata"]["name"].lower(): each["metadata"]["version"] for each in found}


def by_uv(requirement: str, folder: Path) -> dict[str, str]:
    asked, answer = folder / "asked.in", folder / "answer.txt"
    asked.write_text(requirement + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "uv", "pip", "compile", "-q", "--no-config", "--default-index", INDEX]
    command += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
    subprocess.run([*command, str(asked), "-o", str(answer)], check=True, env=ENVIRONMENT)
    lines = answer.read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if re.fullmatch(r"[\w.-]+==\S+", line))


def cell(pip: str, uv: str) -> str:
    return pip if pip == uv else f"{pip} (uv: {uv})"


def table(wheel: Path, folder: Path) -> str:
    rows = []
    for extras in EXTRAS:
        bracket = f"[{extras}]" if extras else ""
        requirement = f"winnow-rl{bracket} @ file://{wheel}"
        pip, uv = by_pip(requirement, folder), by_uv(requirement, folder)
        cells = [
            f"`{bracket}`" if extras else "none",
            *(cell(pip.get(name, ""), uv.get(name, "")) for name in SHOWN),
            str(len(pip)),
        ]
        rows.append(f"| {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    head = f"| extras | {' | '.join(SHOWN)} | packages |\n|{'---|' * (len(SHOWN) + 2)}"
    return "\n".join([head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = table(build_wheel(folder), folder)
    if options.docs:
        page = options.docs.read_text(encoding="utf-8")
        before, _, rest = page.partition("<!-- resolves -->\n")
        options.docs.write_text(
            before + "<!-- resolves -->\n" + found + "\n<!-- end -->" + rest.partition("<!-- end -->")[2]
        )


if __name__ == "__main__":
    main()
