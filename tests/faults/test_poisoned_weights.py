"""A learner whose weights have become NaN: nobody samples with them, nothing is saved, and the run ends by the name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer
from winnow.run import checkpoint

from .. import parity
from ..builders.poisoned import WEIGHT, poisoned
from ..builders.runs import assert_clean


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize(
    "options",
    [{}, {"max_lag": 2}, {"max_lag": 1, "sync": "processes"}],
    ids=["in process", "lagged", "processes"],
)
def test_poisoned_weights_end_the_run_by_their_name(tiny_config: dict[str, Any], options: dict[str, Any]) -> None:
    options = options | {"reward_funcs": [f"{parity.__file__}:parity_reward"], "eval_steps": None}
    trainer = poisoned(Trainer(config=tiny_config | options), at_update=3)
    with pytest.raises(
        FloatingPointError, match=f"the learner's weight '{WEIGHT}' is not finite; it was not published"
    ):
        trainer.train()
    run = Path(tiny_config["output_dir"])
    assert checkpoint.steps(run) == [1, 2]
    Trainer.resume(run).train()
    assert_clean(run)
    assert checkpoint.steps(run) == [1, 2, 3, 4]
