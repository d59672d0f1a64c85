"""What the Python that runs jobs has: `python -I inventory.py` prints it as JSON.

Metadata is read, nothing is imported. Stdlib only, for Python 3.8 or newer.
"""

import json
import os
import platform
import sys
import sysconfig
from importlib import metadata


def distributions():
    # type: () -> dict[str, str]
    """Every distribution with its version, the first of a name on the path, as an import would find it."""
    found = {}  # type: dict[str, str]
    for distribution in metadata.distributions():
        try:
            name, version = distribution.metadata["Name"], distribution.version
        except Exception:  # noqa: BLE001 - a damaged record of one distribution hides no other
            continue
        if name and version:
            found.setdefault(name, version)
    return found


def torch_version_file():
    # type: () -> str
    """The text of torch's own version file, which names the backend that it was built for."""
    for folder in sys.path:
        try:
            with open(os.path.join(folder, "torch", "version.py"), encoding="utf-8") as file:
                return file.read(4096)
        except (OSError, UnicodeDecodeError):
            continue
    return ""


def main():
    # type: () -> None
    record = {
        "version": platform.python_version(),
        "executable": sys.executable,
        "scripts": sysconfig.get_path("scripts"),
        "path": [folder for folder in sys.path if os.path.isdir(folder)],
        "distributions": distributions(),
        "torch": torch_version_file(),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
