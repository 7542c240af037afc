"""The failures that a user can cause or must be told of; the command prints them without a traceback."""

from .checkpoint import CheckpointError
from .env.sandbox import SandboxError
from .evaluate import RolloutsFailedError
from .ledger import LedgerError
from .loop import RunStoppedError
from .records import RunDirectoryError

EXPECTED = (
    ValueError,  # ConfigError and the tasks' own
    OSError,
    FloatingPointError,
    CheckpointError,
    LedgerError,
    RunDirectoryError,
    RunStoppedError,
    RolloutsFailedError,
    SandboxError,
)
