"""Kills and signals at random moments of randomly composed runs, by the hundred: `python -m tests.faults.soak LOG`.

Each trial draws a composition of settings (those of the pair test), runs it undisturbed, then again under `FAULTS`
faults: it is killed, signalled or killed at a failpoint, and resumed. At the end it must be the undisturbed run, bit
by bit. Trials with sampler processes, or with rollouts that share places, promise no bits; they must end with a clean
account, every step made and no token over the bound of lag. LOG has one JSON line a trial; trials that it has are not
run again. Totals go to `--out`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from winnow.base.machine import processor
from winnow.rollout import answers
from winnow.run.serve import PROCESS_NAME

from ..builders.runs import assert_clean, fingerprint
from ..pairs.compose import PROCESSES, Acceptance, make_place, tuples
from ..pairs.harness import Place, has_agents
from ..pairs.variants import Settings, together
from .harness import DEADLINE_S

STEPS, FAULTS = 6, 8
PROCESS_SHARE = 0.1
"""Share of trials with sampler processes, which take seconds to start."""
SHARING_SHARE = 0.15
"""Share of trials whose rollouts wait for each other."""
ORPHAN_S = 5.0
MARK = "WINNOW_SOAK_TRIAL"
IDLE = ("ended before the fault", "failpoint not reached")
BLOWS = {"SIGKILL": 8, "SIGTERM": 2, "SIGINT": 2, "SIGHUP": 1, "SIGTERM, SIGKILL": 2, "SIGINT twice": 1, "SIGSTOP": 1}
"""What befalls a run, and how often in proportion."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["winnow.run.trainer", "tests.pairs.compose", "tests.faults.harness"])


def child(config: Settings, environment: dict[str, str]) -> None:
    """Train, or go on with what is there; exit code 130 when interrupted, as that of the command."""
    import torch

    from winnow import Trainer

    torch.set_num_threads(1)
    os.environ.update(environment)
    answers.PATIENCE_S = 0.1
    tempfile.tempdir = None  # as the variable now says
    sys.stderr = open(Path(environment["TMPDIR"]).parent / "stderr", "a")  # noqa: SIM115  (lives as long as the process)
    run = Path(config["output_dir"])
    trainer = Trainer.resume(run) if (run / "config.json").exists() else Trainer(config=config)
    try:
        trainer.train()
    except KeyboardInterrupt:
        os._exit(130)


class Trial:
    """One composition, undisturbed and under faults."""

    def __init__(self, number: int, settings: Settings, place: Place) -> None:
        self.rng = random.Random(f"soak {number}")
        self.processes = settings.get("sync") == "processes"
        self.sharing = settings["env"]["sharing"]
        self.folder, self.number = place.folder / f"trial {number}", number
        # Two runs are compared, and each would measure how many threads are fastest here, and sum in another order.
        own = {"max_steps": STEPS, "save_steps": self.rng.randint(1, 3), "threads": 1}
        self.settings = place.config(settings) | own
        self.counts: Counter[str] = Counter()
        self.seconds = 1.0
        (self.folder / "tmp").mkdir(parents=True)

    def run(self) -> dict[str, Any]:
        """What happened. Raises AssertionError where a promise is broken."""
        whole, part = self.folder / "whole", self.folder / "part"
        started = time.monotonic()
        code = self.launch(whole).wait()
        if code == 1 and self.processes and "ConfigError" in self.stderr() and not whole.exists():
            return {"refused": self.stderr().strip().splitlines()[-1]}  # the others were asked before
        assert code == 0, f"the undisturbed run failed: {self.stderr()}"
        self.seconds = time.monotonic() - started
        hits = (self.folder / "hits").read_text().split()
        assert not self.leftovers(), f"an undisturbed run left {self.leftovers()}"
        ended = False
        while sum(self.counts.values()) < FAULTS and not ended:
            ended = self.strike(part, hits) == 0
        code = 0 if ended else self.launch(part).wait()
        assert code == 0, f"the last resume ended with {code}: {self.stderr()}"
        assert_clean(part)
        if self.processes or self.sharing:
            assert_bound(part, self.settings.get("max_lag", 0))
        else:
            one, other = fingerprint(whole), fingerprint(part)
            assert one == other, f"differs in {[key for key in one if one[key] != other[key]]}"
        strange = {name for name in names(part) ^ names(whole) if not re.match(r"checkpoints/step-\d{6}(/|$)", name)}
        assert not strange, f"files that only one of the runs has: {strange}"  # an interrupt saves a checkpoint more
        self.wait_for_orphans()
        kinds = {"processes": self.processes, "sharing": self.sharing}
        return {"faults": dict(self.counts), "leftovers": len(self.leftovers()), **kinds}

    def strike(self, run: Path, hits: list[str]) -> int:
        """One fault, by a failpoint or at a random moment. Returns the exit code, which is one that it may lead to."""
        if not self.processes and self.rng.random() < 0.3:
            hit = self.rng.choice(hits)
            process = self.launch(run, WINNOW_FAILPOINT=f"{hit}:kill")
            code = process.wait()
            assert code in (-signal.SIGKILL, 0), f"{hit}: exit code {code}: {self.stderr()}"
            self.counts["failpoint" if code else "failpoint not reached"] += 1
            return code
        process = self.launch(run)
        wait = self.rng.uniform(0, 1.1 * self.seconds)
        if self.processes and self.rng.random() < 0.5:
            return self.kill_a_sampler(process, self.rng.uniform(0, 0.5))
        blow = self.rng.choices([*BLOWS], [*BLOWS.values()])[0]
        process.join(wait)
        if not process.alive():
            assert process.wait() == 0, f"exit code {process.wait()} before {blow}: {self.stderr()}"
            self.counts["ended before the fault"] += 1
            return 0
        process.send(blow, self.rng)
        code = process.wait()
        allowed = {0, -signal.SIGKILL} if blow in ("SIGKILL", "SIGSTOP", "SIGTERM, SIGKILL") else {0}
        if blow not in ("SIGKILL", "SIGSTOP"):  # before a run listens, signals have their usual effect: 1 is SIGINT's
            allowed |= {130, 1, -signal.SIGTERM, -signal.SIGHUP}
        assert code in allowed, f"{blow}: exit code {code}: {self.stderr()}"
        self.counts[blow] += 1
        self.wait_for_orphans()
        return code

    def kill_a_sampler(self, process: Process, wait: float) -> int:
        """`wait` seconds after the first is there. The run must go on to its end by itself."""
        samplers: list[psutil.Process] = []
        while process.alive() and not (samplers := [p for p in self.alive() if p.name() == PROCESS_NAME]):
            process.join(0.02)
        process.join(wait)
        if samplers and process.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                self.rng.choice(samplers).kill()
            self.counts["sampler killed"] += 1
        else:
            self.counts["ended before the fault"] += 1
        code = process.wait()
        assert code == 0, f"after a sampler's death: exit code {code}: {self.stderr()}"
        return code

    def launch(self, run: Path, **environment: str) -> Process:
        environment |= {"TMPDIR": str(self.folder / "tmp"), MARK: str(self.number)}
        if run.name == "whole":
            environment["WINNOW_FAILPOINT_LOG"] = str(self.folder / "hits")
        return Process(self.settings | {"output_dir": str(run)}, environment)

    def stderr(self) -> str:
        file = self.folder / "stderr"
        return file.read_text()[-1500:] if file.exists() else ""

    def leftovers(self) -> list[str]:
        """Temporary files that nobody took away."""
        return sorted(p.relative_to(self.folder).as_posix() for p in (self.folder / "tmp").rglob("*"))

    def alive(self) -> list[psutil.Process]:
        """Processes of this trial, by their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get(MARK) == str(self.number) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_for_orphans(self) -> None:
        deadline = time.monotonic() + ORPHAN_S
        while self.processes and self.alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not (self.processes and self.alive()), f"outlived the run by {ORPHAN_S} s: {self.alive()}"


class Process:
    """A child that can be struck."""

    def __init__(self, config: Settings, environment: dict[str, str]) -> None:
        self._process = _CONTEXT.Process(target=child, args=(config, environment))
        self._process.start()

    def alive(self) -> bool:
        return self._process.is_alive()

    def join(self, seconds: float) -> None:
        self._process.join(seconds)

    def wait(self) -> int:
        """Exit code. A child over the deadline is a hang."""
        self._process.join(DEADLINE_S)
        if self._process.is_alive():
            self._process.kill()
            raise AssertionError(f"a run took over {DEADLINE_S} s")
        assert self._process.exitcode is not None
        return self._process.exitcode

    def send(self, blow: str, rng: random.Random) -> None:
        pid = self._process.pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            if blow == "SIGSTOP":  # stopped for good, then killed, as by a watchdog
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.1)
                os.kill(pid, signal.SIGKILL)
            elif blow == "SIGTERM, SIGKILL":
                os.kill(pid, signal.SIGTERM)
                time.sleep(rng.uniform(0, 0.1))
                os.kill(pid, signal.SIGKILL)
            elif blow == "SIGINT twice":
                os.kill(pid, signal.SIGINT)
                time.sleep(rng.uniform(0, 0.1))
                os.kill(pid, signal.SIGINT)
            else:
                os.kill(pid, signal.Signals[blow])


def names(run: Path) -> set[str]:
    """Of everything in a directory."""
    return {path.relative_to(run).as_posix() for path in run.rglob("*")}


def assert_bound(run: Path, max_lag: int) -> None:
    """Every step made, none of its tokens over the bound."""
    import sqlite3

    with contextlib.closing(sqlite3.connect(run / "ledger.sqlite")) as db:
        query = (
            "SELECT MAX(version - first_version) FROM rollouts JOIN steps USING (step)"
            " WHERE fate = 'trained' AND rollouts.void = 0 AND steps.void = 0"
        )
        (lag,) = db.execute(query).fetchone()
        (steps,) = db.execute("SELECT COUNT(*) FROM steps WHERE void = 0").fetchone()
    assert steps == STEPS, f"{steps} steps"
    assert lag is None or lag <= max_lag, f"a token of lag {lag}"


def draws(accepts: Acceptance) -> Iterator[Settings]:
    """Settings of trial 0, 1, ...: one to four that are accepted together."""
    for number in range(10**9):
        rng = random.Random(f"composition {number}")
        base: Settings = PROCESSES if rng.random() < PROCESS_SHARE else {"env": PROCESSES["env"], "reward_funcs": []}
        for attempt in range(10**6):
            chosen = tuples(rng.randint(1, 2 if base is PROCESSES else 4), 1, rng.randrange(2**32) + attempt)[0]
            settings = together(*chosen)
            if base is PROCESSES and (settings.keys() & base.keys() or "num_iterations" in settings):
                continue
            if not accepts.refused(*chosen):
                world = {"sharing": rng.random() < SHARING_SHARE, "agents": has_agents(settings)}
                yield settings | base | {"env": {"name": base["env"]} | world}
                break


def here() -> dict[str, int]:
    """What this machine and the two long-lived processes of the soak hold: what leaks would show in."""
    myself = psutil.Process()
    server = max(myself.children(recursive=True), key=lambda p: p.memory_info().rss, default=myself)
    return {
        "processes": len(myself.children(recursive=True)),
        "descriptors": myself.num_fds(),
        "server descriptors": server.num_fds(),
        "memory MiB": myself.memory_info().rss >> 20,
        "server memory MiB": server.memory_info().rss >> 20,
        "shared memory files": len(list(Path("/dev/shm").iterdir())),
    }


def count(faults: Mapping[str, int]) -> int:
    """Without those that came too late."""
    return sum(n for name, n in faults.items() if name not in IDLE)


def totals(log: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    faults: Counter[str] = Counter()
    for line in lines:
        faults.update(line.get("faults", {}))
    held = [line["held"] for line in lines]
    leaks = {key: {"first": held[0][key], "last": held[-1][key], "max": max(h[key] for h in held)} for key in held[0]}
    return {
        "machine": {"cpu": processor(), "cores": len(os.sched_getaffinity(0))},
        "trials": len(lines),
        "faults": count(faults),
        "by kind": dict(faults.most_common()),
        "compared bit by bit": sum(line.get("processes") is False and not line.get("sharing") for line in lines),
        "with sampler processes": sum(line.get("processes", False) for line in lines),
        "with rollouts that share places": sum(line.get("sharing", False) for line in lines),
        "refused": sum("refused" in line for line in lines),
        "problems": [line for line in lines if "problem" in line],
        "temporary files left": sum(line.get("leftovers", 0) for line in lines),
        "held": leaks,
        "seconds": round(sum(line["seconds"] for line in lines)),
        "seconds a trial (median)": statistics.median(line["seconds"] for line in lines),
    }


def soak(log: Path, faults: int, hours: float) -> Iterator[dict[str, Any]]:
    """Trials until there were so many faults, or the time is over."""
    deadline = time.monotonic() + hours * 3600
    lines = map(json.loads, log.read_text().splitlines() if log.exists() else ())
    seen = {line["trial"]: line for line in lines}
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        place = make_place(Path(folder))
        made = 0
        for number, settings in enumerate(draws(Acceptance(place))):
            if number in seen:
                made += count(seen[number].get("faults", {}))
                continue
            if made >= faults or time.monotonic() > deadline:
                return
            line = _line(Trial(number, settings, place), settings)
            made += count(line.get("faults", {}))
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")
            yield line


def _line(trial: Trial, settings: Settings) -> dict[str, Any]:
    started = time.monotonic()
    line: dict[str, Any] = {"trial": trial.number, "settings": settings}
    try:
        line |= trial.run()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        line |= {"problem": text[:3000], "traceback": traceback.format_exc()[-2000:], "faults": dict(trial.counts)}
        keep = Path(tempfile.gettempdir()) / f"soak-failed-{trial.number}"
        shutil.rmtree(keep, ignore_errors=True)
        shutil.copytree(trial.folder, keep)
    shutil.rmtree(trial.folder)
    return line | {"held": here(), "seconds": round(time.monotonic() - started, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    for line in soak(arguments.log, arguments.faults, arguments.hours):
        print(line["trial"], f"{line['seconds']} s", line.get("problem") or line.get("faults"), flush=True)
    found = totals(arguments.log)
    text = json.dumps(found, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    print(text)
    sys.exit(bool(found["problems"]))


if __name__ == "__main__":
    main()
