"""The speedrun's GPU track within a few minutes of a card: a side at a time, results as they come.

    python benchmarks/gpu_speedrun.py --model smollm2-135m --minutes 5 --out build/gpu_speedrun

`--model`: a directory with SmolLM2-135M-Instruct. Each side is a call of `speedrun/run.py arithmetic --quick`, which
leaves a record; a side that fails or runs out of time costs its own minutes. Sides of TRL are left out without it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SIDES = ("fastest", "dapo", "trl", "trl-winnow")
"""The most telling first, in case the time is over."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--changes", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of all sides")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    ends = time.monotonic() + 60 * options.minutes
    for number, side in enumerate(options.sides):
        left = ends - time.monotonic()
        command = [sys.executable, str(HERE / "speedrun" / "run.py"), "arithmetic", "--quick", "--sides", side]
        command += ["--device", options.device, "--model", options.model, "--out", str(options.out)]
        command += ["--changes", *options.changes] if options.changes else []
        running = subprocess.Popen(command, start_new_session=True)
        try:
            print(f"{side}: {'failed' if running.wait(max(1.0, left)) else 'done'}", flush=True)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)  # with the run that it started
            print(f"{', '.join(options.sides[number:])}: the time is over", flush=True)
            break


if __name__ == "__main__":
    main()
