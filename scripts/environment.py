"""Makes `.venv` and installs GPUlayer into it, editable, with the named extras and the pinned versions.

Runs on a bare Python: standard library only. Two at once make one: a lock is held while installing. What is already
installed from the same files is left alone.

    python3 scripts/environment.py dev,examples
"""

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
INPUTS = ("pyproject.toml", "constraints.txt")


def wanted_stamp(extras: str) -> str:
    """Changes when the files that decide what is installed change, or the Python, or the place of the clone."""
    digest = hashlib.sha256(f"{sys.version}{ROOT}".encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest() + " " + ",".join(sorted(extras.split(",")))


def is_current(stamp: str) -> bool:
    """Whether what is installed covers what is wanted."""
    try:
        digest, extras = (VENV / "installed").read_text().split(" ")
    except (OSError, ValueError):
        return False
    wanted_digest, wanted_extras = stamp.split(" ")
    return digest == wanted_digest and set(wanted_extras.split(",")) <= set(extras.split(","))


def install(extras: str) -> None:
    """A fresh environment if there is none, then the editable install."""
    python = VENV / "bin" / "python"
    if not python.exists():
        print("making .venv", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    print(f"installing gpulayer[{extras}]", flush=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    target = f"{ROOT}[{extras}]"
    subprocess.run(
        [*pip, "-c", str(ROOT / "constraints.txt"), "-e", target], check=True, stdin=subprocess.DEVNULL
    )


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - this file runs on whatever `python3` is here
        print("GPUlayer needs Python 3.11 or newer; this is " + sys.version.split()[0], file=sys.stderr)
        return 1
    extras = sys.argv[1] if len(sys.argv) > 1 else "dev"
    stamp = wanted_stamp(extras)
    if is_current(stamp):
        return 0
    with open(ROOT / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_current(stamp):
            try:
                install(extras)
            except subprocess.CalledProcessError as error:
                print(f"the install failed (exit {error.returncode}): see above", file=sys.stderr)
                return 1
            (VENV / "installed").write_text(stamp)
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
