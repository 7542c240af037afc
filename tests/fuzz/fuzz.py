"""Coverage-guided search for inputs that break a parser: `python -m tests.fuzz.fuzz LOG --seconds 3600`; by atheris.

Each target is searched in a process of its own, which libFuzzer ends at the first input that breaks it; the input is
kept under `--found`, and the search goes on with what it had learned. LOG has one JSON line a session: target, inputs,
seconds, finding. Time that the log has is not spent again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from winnow.base.machine import processor

from .targets import HANG_S, MEMORY_MIB, TARGETS

_RUNS = re.compile(r"#(\d+)\s")
_SUMS = ("inputs", "seconds", "cpu_seconds")
_WRITTEN = re.compile(r"Test unit written to (\S+)")


def session(name: str, seconds: int, corpus: Path, found: Path) -> dict[str, Any]:
    """One process, until its time is over or something is found."""
    learned = corpus / name
    learned.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(TARGETS[name].seeds()):
        (learned / f"seed-{number}").write_bytes(data)
    words = learned.with_suffix(".dict")
    escaped = (
        "".join(f"\\x{byte:02x}" for byte in word.encode("utf-8", "replace")[:60]) for word in TARGETS[name].words
    )
    words.write_text("".join(f'"{word}"\n' for word in escaped))
    (found / name).mkdir(parents=True, exist_ok=True)
    limits = [f"-max_total_time={seconds}", f"-timeout={HANG_S}", f"-report_slow_units={HANG_S}"]
    limits += [f"-rss_limit_mb={MEMORY_MIB}", "-max_len=32768"]
    if TARGETS[name].words:
        limits.append(f"-dict={words}")
    options = [*limits, f"-artifact_prefix={found / name}/", "-print_final_stats=1", str(learned)]
    started, cpu = time.monotonic(), _cpu()
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.search", name, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        text=True,
        errors="replace",
        timeout=seconds + 600,
    )
    runs = [int(number) for number in _RUNS.findall(done.stdout)]
    line: dict[str, Any] = {
        "target": name,
        "seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(_cpu() - cpu, 1),
        "inputs": max(runs, default=0),
    }
    if written := _WRITTEN.search(done.stdout):
        line |= {"finding": written[1], "said": done.stdout[-3000:]}
    elif done.returncode:
        line |= {"finding": f"exit code {done.returncode}", "said": done.stdout[-3000:]}
    return line


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def totals(log: Path) -> dict[str, dict[str, float]]:
    """By target: inputs, seconds by the clock and of the processor, findings."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys((*_SUMS, "findings"), 0))
    for line in map(json.loads, log.read_text().splitlines() if log.exists() else ()):
        of_target = found[line["target"]]
        for key in _SUMS:
            of_target[key] = round(of_target[key] + line[key], 1)
        of_target["findings"] += "finding" in line
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("--seconds", type=int, default=3600, help="for each target")
    parser.add_argument("--targets", nargs="*", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument(
        "--corpus", type=Path, default=Path("fuzz-corpus"), help="what was learned, kept between sessions"
    )
    parser.add_argument("--found", type=Path, default=Path("fuzz-found"))
    parser.add_argument("--most", type=int, default=5, help="findings of a target after which it is given up")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    for name in arguments.targets:
        findings = 0
        while (left := arguments.seconds - totals(arguments.log).get(name, {"seconds": 0})["seconds"]) > 1:
            line = session(name, int(left), arguments.corpus, arguments.found)
            with arguments.log.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(name, line["inputs"], "inputs", line["seconds"], "s", line.get("finding", ""), flush=True)
            findings += "finding" in line
            if findings >= arguments.most:
                break
    if arguments.out:
        machine = {"cpu": processor(), "cores": len(os.sched_getaffinity(0))}
        found = {"machine": machine, "targets": totals(arguments.log)}
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
