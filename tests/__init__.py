import os
import sys

sys.dont_write_bytecode = False  # otherwise every process that the tests start compiles the package again: 1 to 2 s
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
