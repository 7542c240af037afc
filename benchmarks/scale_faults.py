"""What a fault costs on a cluster of three nodes: seconds until it is noticed, until the work is launched once more,
and until the replacement has weights.

    .venv-scale/bin/python benchmarks/scale_faults.py --out benchmarks/results/scale_faults.json

Three nodes of `ray.cluster_utils.Cluster` on one machine, the head without actors; two samplers, ARRoL, lag 2. Faults
of samplers come one after the other in one run. Ranks and drivers that are killed end the run: it is resumed at once,
and seconds until then are in the figures; the driver is a process of its own, and noticed is when its actors are gone.
Frozen samplers are noticed by their silence of `timeout_s`. A removed node's processes are killed, and connections end
with them: a machine without power would be noticed by `timeout_s`. The accounts of every run are verified.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
from arms import write_json
from machine import machine
from ray.cluster_utils import Cluster

from winnow import Trainer
from winnow.record.ledger import Ledger
from winnow.record.stop_conditions import RunStoppedError

TIMEOUT_S = 10.0
NODE_CPUS = 4
DEADLINE_S = 300.0
PHASES = ("noticed", "launched once more", "weights")
Seconds = dict[str, float]
"""Of one fault, by phase."""
Report = Callable[[Seconds], None]


def configuration(work: Path, address: str, name: str) -> dict[str, Any]:
    return {
        "model": str(work / "model"),
        "env": {"name": "countdown", "train_size": 64, "test_size": 16},
        "output_dir": str(work / name),
        "max_steps": 100_000,
        "prompts_per_step": 8,
        "num_generations": 8,
        "max_lag": 2,
        "gates": [{"name": "arrol", "at": 4, "cold_start": 1}],
        "correction": "truncate",
        "max_skipped_steps": 100_000,
        "eval_steps": None,
        "save_steps": 2,
        "save_total_limit": 2,
        "reward_timeout_s": 5.0,
        "sync": {"name": "ray", "samplers": 2, "timeout_s": TIMEOUT_S, "max_restarts": 10, "ray_address": address},
    }


def make_model(path: Path) -> None:
    from winnow.study.warm_start import WarmStartConfig, warm_start
    from winnow.tasks.countdown import CountdownConfig

    task = CountdownConfig(train_size=64, test_size=16).build()
    warm_start(task, path, config=WarmStartConfig(max_steps=100, batch_size=32, hidden_size=64, num_layers=2))


class Watched:
    """A trainer, and when its samplers were replaced, got work and loaded their first weights."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.pool: Any = trainer.sampler
        self.events: list[tuple[str, float]] = []
        replace, send, understood = self.pool._replace, self.pool._send, self.pool._understood

        def replaced(*args: Any) -> Any:
            self._note("noticed")
            return replace(*args)

        def sent(member: Any, what: Any) -> None:
            send(member, what)
            if what.job.purpose == "train":
                self._note("launched once more" if what.again else "launched")

        def heard(member: Any, content: Any) -> Any:
            first = "loaded" in content and not member.ready
            found = understood(member, content)
            if first:
                self._note("weights")
            return found

        self.pool._replace, self.pool._send, self.pool._understood = replaced, sent, heard

    def _note(self, what: str) -> None:
        self.events.append((what, time.time()))

    def first(self, what: str, since: float) -> float | None:
        return next((at for event, at in list(self.events) if event == what and at >= since), None)


def steps(config: dict[str, Any]) -> int:
    path = Path(config["output_dir"], "metrics.jsonl")
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(what: str, condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {DEADLINE_S:g} s")
        time.sleep(0.01)


def actors() -> list[int]:
    """Samplers' processes on all nodes of this process's cluster."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ray::SamplerActor" in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def verify(config: dict[str, Any]) -> None:
    with Ledger.open(Path(config["output_dir"]) / "ledger.sqlite", read_only=True) as ledger:
        proof = ledger.verify()
    assert proof.ok, proof.problems


# ---- faults of samplers ------------------------------------------------------------------------------------------


def where(member: Any) -> tuple[int, str]:
    """Process and node of a sampler."""
    actor = member.channel._actor
    found = ray.get(
        actor.__ray_call__.remote(lambda _: (os.getpid(), ray.get_runtime_context().get_node_id())), timeout=60
    )
    return int(found[0]), str(found[1])


def kill(pid: int, node: str, cluster: Cluster) -> None:
    os.kill(pid, signal.SIGKILL)


def freeze(pid: int, node: str, cluster: Cluster) -> None:
    os.kill(pid, signal.SIGSTOP)


def remove(pid: int, node: str, cluster: Cluster) -> None:
    """Its processes are killed; nobody is told."""
    [found] = [worker for worker in cluster.worker_nodes if worker.node_id == node]
    cluster.remove_node(found, allow_graceful=False)


OF_SAMPLERS = {"sampler killed": kill, "sampler frozen": freeze, "node removed": remove}


def of_samplers(config: dict[str, Any], cluster: Cluster, fault: Any, repeats: int, report: Report) -> None:
    """In one run, each when the last is over and all samplers work."""
    watched = Watched(Trainer(config=config))
    failures: list[BaseException] = []

    def once() -> Seconds:
        before = steps(config)
        wait_for("peace", lambda: steps(config) >= before + 3 and all(m.ready for m in watched.pool._members))
        victim = watched.pool._members[0]
        pid, node = where(victim)
        wait_for("work", lambda: len(victim.flights) > 2)
        since = time.time()
        fault(pid, node, cluster)
        wait_for("a replacement", lambda: watched.first("weights", since))
        return {phase: at - since for phase in PHASES if (at := watched.first(phase, since))}

    def act() -> None:
        try:
            for _ in range(repeats):
                report(once())
        except BaseException as error:
            failures.append(error)
        watched.trainer.stop()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    with contextlib.suppress(KeyboardInterrupt):
        watched.trainer.train()
    thread.join()
    if failures:
        raise failures[0]
    verify(config)


# ---- faults that end the run ---------------------------------------------------------------------------------------


def of_ranks(config: dict[str, Any], repeats: int, report: Report) -> None:
    """Each time the second rank of the run that was resumed after the time before."""
    learner = {"name": "fsdp", "ranks": 2, "timeout_s": 120, "ray_address": config["sync"]["ray_address"]}
    config = config | {"learner": learner}
    trainer, since, noticed = Trainer(config=config), 0.0, 0.0
    for repeat in range(repeats + 1):
        watched, before = Watched(trainer), steps(config)
        rank = trainer.learner._ranks._actors[1]  # type: ignore[attr-defined]
        pid = ray.get(rank.__ray_call__.remote(lambda _: os.getpid()), timeout=60)
        killed: list[float] = []

        def act(pid: int = pid, before: int = before, killed: list[float] = killed) -> None:
            wait_for("steps", lambda: steps(config) >= before + 4)
            killed.append(time.time())
            os.kill(pid, signal.SIGKILL)

        threading.Thread(target=act, daemon=True).start()
        with contextlib.suppress(RunStoppedError):
            trainer.train()
        ended = time.time()
        if repeat:
            report(after(since, noticed, watched))
        since, noticed = killed[0], ended
        trainer = Trainer.resume(config["output_dir"], {})
    trainer.stop()
    with contextlib.suppress(KeyboardInterrupt):
        trainer.train()
    verify(config)


def after(since: float, noticed: float, resumed: Watched) -> Seconds:
    """Seconds from the fault to what the resumed run did first."""
    firsts = {"launched once more": resumed.first("launched", since), "weights": resumed.first("weights", since)}
    return {"noticed": noticed - since} | {phase: at - since for phase, at in firsts.items() if at}


def of_drivers(config: dict[str, Any], repeats: int, report: Report) -> None:
    """Each time the driver that went on after the time before."""
    driver, _ = start_driver(config)
    for _ in range(repeats):
        before = steps(config)
        wait_for("steps", lambda before=before: steps(config) >= before + 4 and actors())  # type: ignore[misc]
        since = time.time()
        driver.kill()
        driver.wait()
        wait_for("the end of its actors", lambda: not actors())
        noticed = time.time()
        driver, events = start_driver(config)
        firsts = {"launched once more": events["launched"], "weights": events["weights"]}
        report({"noticed": noticed - since} | {phase: at - since for phase, at in firsts.items()})
    driver.send_signal(signal.SIGINT)
    driver.wait(timeout=DEADLINE_S)
    verify(config)


def start_driver(config: dict[str, Any]) -> tuple[subprocess.Popen[str], dict[str, float]]:
    """A driver that goes on with the run, when it has launched the first group with weights; and when that was."""
    command = [sys.executable, __file__, "--drive", json.dumps(config)]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    events: dict[str, float] = {}
    for line in driver.stdout:
        what, at = json.loads(line)
        events.setdefault(what, at)
        if {"launched", "weights"} <= events.keys():
            return driver, events
    raise RuntimeError(f"the driver ended with {driver.wait()}")


def drive(config: dict[str, Any]) -> None:
    """A driver: train, or go on with what is there; says once what it does first."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    directory = Path(config["output_dir"])
    there = (directory / "config.json").exists()
    watched = Watched(Trainer.resume(directory) if there else Trainer(config=config))
    watched.events = ModelTurn(said)
    with contextlib.suppress(KeyboardInterrupt):
        watched.trainer.train()


class ModelTurn(list[Any]):
    """Events that are said when they happen, the first of each kind."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def append(self, event: tuple[str, float]) -> None:
        if event[0] not in [what for what, _ in self]:
            super().append(event)
            print(json.dumps(event), file=self._stream, flush=True)


# ---- the table -------------------------------------------------------------------------------------------------------

FAULTS = (*OF_SAMPLERS, "rank killed", "driver killed")


def measure(name: str, work: Path, repeats: int, report: Report) -> None:
    """A lost node takes a cluster each time; the others happen on one."""
    again = repeats if name == "node removed" else 1
    for n in range(again):
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=NODE_CPUS)
            config = configuration(work, cluster.address, f"{name.replace(' ', '-')}-{n}")
            if name in OF_SAMPLERS:
                of_samplers(config, cluster, OF_SAMPLERS[name], repeats // again, report)
            else:
                (of_ranks if name == "rank killed" else of_drivers)(config, repeats, report)
        finally:
            ray.shutdown()
            cluster.shutdown()


def summary(runs: list[Seconds]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for phase in PHASES:
        if values := [run[phase] for run in runs if phase in run]:
            spread = {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}
            found[phase] = {key: round(value, 2) for key, value in spread.items()}
    return found | {"runs": runs, "load_average_at_end": round(os.getloadavg()[0], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        drive(json.loads(options.drive))
        return
    found = json.loads(options.out.read_text(encoding="utf-8")) if options.out and options.out.exists() else {}
    found |= {"what": __doc__, "machine": machine("cpu", "ray"), "timeout_s": TIMEOUT_S}
    faults = found.setdefault("seconds from the fault", {})
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory) / "model")
        for name in options.only:
            runs: list[Seconds] = []

            def report(seconds: Seconds, name: str = name, runs: list[Seconds] = runs) -> None:
                runs.append(seconds)
                print(name, {phase: round(at, 2) for phase, at in seconds.items()}, flush=True)
                faults[name] = summary(runs)
                if options.out:
                    write_json(options.out, found)

            measure(name, Path(directory), options.repeats, report)


if __name__ == "__main__":
    main()
