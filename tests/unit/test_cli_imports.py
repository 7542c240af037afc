"""Commands that only read import no learner: that takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from winnow.record.ledger import Ledger


def test_a_command_that_succeeds_imports_no_learner(tmp_path: Path) -> None:
    Ledger.open(tmp_path / "ledger.sqlite").close()
    code = (
        "import sys; from typer.testing import CliRunner; from winnow.cli.main import app; "
        f"done = CliRunner().invoke(app, ['verify', {str(tmp_path)!r}]); assert done.exit_code == 0, done.output; "
        "print([name for name in sys.modules if name.startswith('winnow.learner')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert found.stdout.strip() == "[]"
