"""Errors that a user can cause or should see; the command prints them without a traceback."""

from ..env.workers.bubblewrap import SandboxError
from ..learner import LearnerLostError
from ..record.ledger import LedgerError
from ..record.records import RunDirectoryError
from ..record.stop_conditions import RunStoppedError
from ..rollout.evaluate import RolloutsFailedError
from ..run.checkpoint import CheckpointError

EXPECTED = (
    ValueError,  # ConfigError and the tasks' own
    OSError,
    FloatingPointError,
    CheckpointError,
    LearnerLostError,
    LedgerError,
    RunDirectoryError,
    RunStoppedError,
    RolloutsFailedError,
    SandboxError,
)
