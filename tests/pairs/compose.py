"""Which compositions there are, and one of them run; `python -m tests.pairs.compose LOG` runs all, and can be stopped.

LOG has one JSON line a composition: names, `refused` or `problem` if there is one, and what became of the rollouts.
With `LOG SIZE` every accepted pair runs within one of fewer compositions of up to SIZE settings.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
import traceback
from itertools import combinations
from pathlib import Path
from typing import Any

from winnow import ConfigError, Trainer

from .harness import STEPS, Outcome, Place, check
from .variants import Settings, Variant, compatible, together, variants
from .world import World, WorldConfig, load_model, make_model, write_profile

PROCESSES: Settings = {
    "env": f"{WorldConfig.__module__}:{WorldConfig.__name__}",
    "reward_funcs": [],
    "sync": "processes",
    "max_lag": 2,
}
"""What compositions with sampler processes start from. They build everything by name."""

Chosen = tuple[Variant, ...]


def pairs() -> list[Chosen]:
    """Every pair of settings that can be said together."""
    return [pair for pair in combinations(_known(), 2) if compatible(*pair)]


class Acceptance:
    """Whether compositions are accepted, by building their trainers; each is asked once."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._model, self._tokenizer = load_model(place.model)
        self._refused: dict[frozenset[str], str] = {}

    def refused(self, *chosen: Variant) -> str:
        """Why it is refused; empty if it is accepted. AssertionError if the message names none of the settings."""
        key = frozenset(v.name for v in chosen)
        if key not in self._refused:
            settings, message = together(*chosen), ""
            try:
                Trainer(self._model(), World(), None, self._place.config(settings), self._tokenizer)
            except ConfigError as error:
                message = str(error)
            assert not message or any(name in message for name in settings), f"{[*chosen]}: names no key: {message}"
            self._refused[key] = message
        return self._refused[key]


def covering(accepts: Acceptance, size: int, seed: int) -> list[Chosen]:
    """Accepted compositions of at most `size` settings in which every accepted pair occurs."""
    rng, known = random.Random(seed), _known()
    open_pairs = {pair for pair in pairs() if not accepts.refused(*pair)}
    fits = open_pairs | {(b, a) for a, b in open_pairs}
    found: list[Chosen] = []
    for first in sorted(open_pairs, key=lambda pair: (pair[0].name, pair[1].name)):
        if first not in open_pairs:
            continue
        chosen = [*first]
        others = rng.sample(known, len(known))
        while len(chosen) < size:
            gains = {v: sum((a, v) in open_pairs or (v, a) in open_pairs for a in chosen) for v in others}
            best = max((v for v in others if all((a, v) in fits for a in chosen)), key=gains.__getitem__, default=None)
            if best is None or not gains[best]:
                break
            others.remove(best)
            if not accepts.refused(*chosen, best):
                chosen.append(best)
        open_pairs -= set(combinations(sorted(chosen, key=known.index), 2))
        found.append(tuple(chosen))
    return found


def tuples(size: int, count: int, seed: int) -> list[Chosen]:
    """Random compositions of `size` settings that can be said together."""
    rng, known = random.Random(seed), _known()
    found: list[Chosen] = []
    while len(found) < count:
        chosen = tuple(sorted(rng.sample(known, size), key=known.index))
        if all(compatible(a, b) for a, b in combinations(chosen, 2)):
            found.append(chosen)
    return found


def _known() -> list[Variant]:
    return [v for v in variants() if not in_processes(v)]


def in_processes(variant: Variant) -> bool:
    """Whether it starts processes, which takes seconds."""
    sync = variant.settings.get("sync")
    return sync is not None and sync["name"] != "in_process"


def make_place(folder: Path) -> Place:
    place = Place(folder, folder / "model", folder / "profile.jsonl")
    make_model(place.model)
    write_profile(place.profile)
    return place


def compose(place: Place, chosen: Chosen) -> Outcome:
    """See `check`. An error says what was run."""
    settings, kill_after = together(*chosen), 1 + sum(len(v.name) for v in chosen) % (STEPS - 1)
    try:
        return check(place, settings, kill_after)
    except Exception as error:
        error.add_note(f"in {chosen}, killed after step {kill_after}: {settings}")
        raise


def _line(place: Place, chosen: Chosen) -> dict[str, Any]:
    """One line of the log."""
    line: dict[str, Any] = {"names": [v.name for v in chosen]}
    started = time.monotonic()
    try:
        outcome = compose(place, chosen)
        line |= (
            {"refused": outcome.refused} if outcome.refused else {"fates": outcome.fates, "updates": outcome.updates}
        )
    except Exception as error:
        line |= {"problem": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()[-3000:]}
    place.clear()
    return line | {"seconds": round(time.monotonic() - started, 2)}


def main() -> None:
    os.fsync = lambda fd: None  # type: ignore[assignment]
    log = Path(sys.argv[1])
    done = {tuple(json.loads(line)["names"]) for line in log.read_text().splitlines()} if log.exists() else set()
    with tempfile.TemporaryDirectory() as folder:
        place = make_place(Path(folder))
        wanted = pairs() if len(sys.argv) < 3 else covering(Acceptance(place), int(sys.argv[2]), seed=0)
        random.Random(0).shuffle(wanted)
        for chosen in wanted:
            if tuple(v.name for v in chosen) not in done:
                with log.open("a") as file:
                    file.write(json.dumps(_line(place, chosen)) + "\n")


if __name__ == "__main__":
    main()
