"""One target, searched in this process until libFuzzer ends it: `python -m tests.fuzz.search NAME ...`."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["winnow"]):
    from .targets import TARGETS, one_input

    for seed in TARGETS[sys.argv[1]].seeds():
        one_input(sys.argv[1], seed)

if __name__ == "__main__":
    name = sys.argv.pop(1)
    atheris.Setup(sys.argv, lambda data: one_input(name, data))
    atheris.Fuzz()
