"""Tables of docs/scale.md from the JSON files of scale_driver.py, scale_channels.py and scale_learner.py.

python benchmarks/scale_tables.py --docs docs/scale.md
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from arms import fill, table

RESULTS = Path(__file__).parent / "results"
PARTS = ("transport", "decode", "pool", "ledger", "loop")


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def spread(values: dict[str, float], digits: int = 2, scale: float = 1.0) -> str:
    low, middle, high = (f"{scale * values[k]:,.{digits}f}" for k in ("min", "median", "max"))
    return f"{middle} ({low} to {high})"


def of_cell(cell: dict[str, Any], kind: str, part: str) -> float:
    return statistics.median(turn["us_a_group"][part] for turn in cell[kind])


def driver() -> str:
    rows = []
    for cell in sorted(read("scale_driver")["cells"], key=lambda c: (c["polled"], c["in_flight"], c["samplers"])):
        for kind in ("pipe", "ray"):
            if turns := [turn["us_a_group"]["total"] / 1000 for turn in cell[kind]]:
                total = f"{statistics.median(turns):.1f} ({min(turns):.1f} to {max(turns):.1f})"
                parts = [f"{of_cell(cell, kind, part) / 1000:.2f}" for part in PARTS]
                rows.append([f"{cell['in_flight']:,}", str(cell["samplers"]), str(cell["polled"]), kind, total, *parts])
    return table(["in flight", "samplers", "groups a poll", "messages", "ms a group", *PARTS], rows)


def channels() -> str:
    rows = []
    for size, found in read("scale_channels")["sizes"].items():
        for side in ("pipe", "ray", "ray_over_pipe") if "sampling" in found else ():
            s = found["sampling"][side]
            scale, digits = (1.0, 2) if side == "ray_over_pipe" else (1e-3, 2)
            name = {"pipe": "pipes", "ray": "Ray", "ray_over_pipe": "Ray over pipes"}[side]
            own = spread(s["ray"], 2, 1e-3) if side == "ray" else ""
            cpu = [spread(s[who], digits, scale) for who in ("driver", "samplers")]
            rows.append([size, name, spread(s["groups_per_s"], 1 if scale < 1 else 2), *cpu, own])
    head = ["model", "", "groups/s", "driver, CPU ms a group", "samplers, CPU ms a group", "Ray's own processes"]
    return table(head, rows)


def publishing() -> str:
    rows = []
    for size, found in read("scale_channels")["sizes"].items():
        if p := found.get("publishing"):
            cells = [spread(p[side][key]) for key in ("held", "loaded") for side in ("pipe", "ray")]
            rows.append([f"{size}, {found['bytes'] / 1e6:,.0f} MB", *cells])
    head = ["model", "learner held, s: pipes", "Ray", "loaded by both, s: pipes", "Ray"]
    return table(head, rows)


def learner() -> str:
    rows = []
    for size, found in read("scale_learner")["sizes"].items():
        for side, s in found["sides"].items():
            cpu, over = spread(s["cpu_seconds"]), spread(found["cpu_over_one_thread"][side])
            memory = ", ".join(f"{mib:,.0f}" for mib in found["peak_mib"][side])
            rows.append([size, side, spread(s["seconds"]), cpu, over, memory])
    return table(["model", "", "s", "CPU s", "CPU over one thread's", "peak MiB of each process"], rows)


def sizing() -> str:
    """Reading is measured at each length; the rest of a group, and what Ray's calls add, at one."""
    simulated, real = read("scale_driver"), read("scale_channels")["sizes"].values()
    cells = [cell for cell in simulated["cells"] if cell["pipe"]]
    rest = statistics.median(sum(of_cell(c, "pipe", part) for part in PARTS[2:]) for c in cells)
    sampling = [found["sampling"] for found in real if "sampling" in found]
    calls = statistics.mean(s["ray"]["driver"]["median"] - s["pipe"]["driver"]["median"] for s in sampling)
    rows = []
    for m in simulated["messages"]:
        for kind, more in (("pipe", 0.0), ("ray", calls)):
            ms = (m[kind]["us"] + rest + more) / 1000
            size = m[kind]["bytes"]
            network = f"{100 * size / 1e6:,.1f} MB/s"
            most = [f"{share * 1000 / ms:,.0f}" for share in (0.1, 1.0)]
            rows.append([f"8 x {m['tokens']:,}", kind, f"{size / 1000:,.1f} kB", network, f"{ms:.1f}", *most])
    head = [
        "group",
        "messages",
        "bytes",
        "at 100 groups/s",
        "driver, CPU ms",
        "groups/s at 10% of a core",
        "at a whole core",
    ]
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", type=Path, required=True)
    options = parser.parse_args()
    tables = {f"scale-{make.__name__}": make() for make in (driver, channels, publishing, learner, sizing)}
    fill(options.docs, tables)


if __name__ == "__main__":
    main()
