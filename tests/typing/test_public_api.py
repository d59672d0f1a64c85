"""The public API's types: what must type-check does, and what must not does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def checked(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_public_api_is_typed_as_its_uses_say() -> None:
    found = checked(HERE / "public_api.py")

    assert found.returncode == 0, found.stdout + found.stderr


def test_a_wrong_argument_of_delay_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(
        "import gpulayer as gl\n\n@gl.remote\ndef f(n: int) -> int:\n    return n\n\nf.delay('x')\n"
    )

    found = checked(path)
    assert found.returncode == 1
    assert "wrong.py:7: error:" in found.stdout, found.stdout + found.stderr
    assert "[arg-type]" in found.stdout
