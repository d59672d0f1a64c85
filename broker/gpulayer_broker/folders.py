"""Where a user's private set-up keeps its data and its sockets, out of everybody else's reach.

`<state>/<machine>/` holds what survives: the queue's data, the store, locks, logs. `<state>` is
GPULAYER_STATE_DIR, else XDG_STATE_HOME/gpulayer, else ~/.local/state/gpulayer (macOS: ~/Library/Application
Support/gpulayer); `<machine>` keeps the machines apart that share a home. Sockets are in
XDG_RUNTIME_DIR/gpulayer, else /tmp/gpulayer-<uid>, named by a hash of the state folder, for a socket's path
ends at 104 bytes.

Every folder is made 0700 and must be this user's own, without write access for others, not reached through
another user's link: anything else is a BadStateFolder.
"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpulayer_broker.errors import BadStateFolder
from gpulayer_broker.units import shown

# sun_path holds 104 bytes on macOS and the BSDs, 108 on Linux, its closing zero included.
SOCKET_PATH_BYTES = 103


@dataclass(frozen=True, slots=True)
class Folders:
    """The paths of one user's private set-up on this machine."""

    state: Path
    runtime: Path

    @property
    def queue(self) -> Path:
        """The queue server's data."""
        return self.state / "queue"

    @property
    def store(self) -> Path:
        """The content-addressed store."""
        return self.state / "store"

    @property
    def socket(self) -> Path:
        """Where a queue server that is started now listens."""
        return self.runtime / f"{_short_hash(str(self.state))}.sock"

    @property
    def server_lock(self) -> Path:
        """Held by the queue server's process for life."""
        return self.state / "server.lock"

    @property
    def supervisor_lock(self) -> Path:
        """Held by the supervisor for life."""
        return self.state / "supervisor.lock"

    @property
    def supervisor_log(self) -> Path:
        """What the supervisor writes."""
        return self.state / "supervisor.log"

    @property
    def supervisor_failure(self) -> Path:
        """Why the last supervisor gave up, for the client that waits for it."""
        return self.state / "supervisor.failed"

    @property
    def supervisor_origin(self) -> Path:
        """Of which installation the supervisor is, as `origin` tells it."""
        return self.state / "supervisor.origin"

    @property
    def in_use_lock(self) -> Path:
        """Shared by every connected client."""
        return self.state / "in-use.lock"

    def worker_lock(self, name: str) -> Path:
        """Held by the worker of this name for life."""
        return self.state / f"worker-{_short_hash(name)}.lock"

    def create(self) -> Folders:
        """Make what is missing and refuse what is not safe."""
        for folder in (self.state.parent, self.state, self.queue, self.store, self.runtime):
            make_private_folder(folder)
        return self


def locate_folders(environ: Mapping[str, str] = os.environ) -> Folders:
    """This user's folders; the state folder is made if need be, to keep the machine's name in."""
    base = state_base(environ)
    make_private_folder(base)
    state = base / machine_name(base)
    return Folders(state, _runtime_folder(state, environ))


def state_base(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder that all machines of a shared home have in common."""
    if given := environ.get("GPULAYER_STATE_DIR"):
        if not os.path.isabs(given):
            raise BadStateFolder(f"GPULAYER_STATE_DIR is {shown(given)}: give an absolute path", value=given)
        return Path(given)
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    if platform.system() == "Darwin":
        return home / "Library" / "Application Support" / "gpulayer"
    # The specification of these variables has a relative path ignored.
    given = environ.get("XDG_STATE_HOME", "")
    return Path(given if os.path.isabs(given) else home / ".local" / "state") / "gpulayer"


def make_private_folder(path: Path) -> None:
    """A folder that is this user's alone; BadStateFolder where that cannot be had."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        link, folder = path.lstat(), path.stat()
    except OSError as error:
        raise BadStateFolder(
            f"folder {path} cannot be made: {error.strerror}: set GPULAYER_STATE_DIR and XDG_RUNTIME_DIR to folders "
            "that you can write",
            value=str(path),
        ) from None
    if stat.S_ISLNK(link.st_mode) and link.st_uid != os.geteuid():
        raise BadStateFolder(
            f"{path} is a link of another user (uid {link.st_uid}): remove it", value=str(path)
        )
    if folder.st_uid != os.geteuid():
        raise BadStateFolder(
            f"folder {path} belongs to another user (uid {folder.st_uid}): remove it, or set GPULAYER_STATE_DIR "
            "and XDG_RUNTIME_DIR to folders of your own",
            value=str(path),
        )
    if folder.st_mode & 0o022:
        raise BadStateFolder(f"folder {path}: others can write it: chmod go-w '{path}'", value=str(path))


def machine_name(base: Path) -> str:
    """Sixteen characters that stay the same on this machine and differ on the next one that shares the home."""
    return _short_hash(_linux_machine_id() or _kept_machine_id(base))


def _linux_machine_id() -> str | None:
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if len(text) == 32:
            return text
    return None


def _kept_machine_id(base: Path) -> str:
    """An id made once and kept in the state folder, a file for each host name."""
    path = base / f"machine-{_short_hash(socket.gethostname())}"
    try:
        return path.read_text()
    except FileNotFoundError:
        made = path.with_suffix(f".{secrets.token_hex(8)}")
        made.write_text(_apple_platform_id() or secrets.token_hex(16))
    try:
        os.link(made, path)
    except FileExistsError:
        pass  # another process was first, and its id is the machine's
    finally:
        made.unlink()
    return path.read_text()


def _apple_platform_id() -> str | None:
    if platform.system() != "Darwin":
        return None
    import re
    import subprocess

    try:
        command = ["/usr/sbin/ioreg", "-rd1", "-c", "IOPlatformExpertDevice"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'"IOPlatformUUID" = "([0-9A-F-]+)"', text)
    return found[1] if found else None


def _runtime_folder(state: Path, environ: Mapping[str, str]) -> Path:
    """The session's own folder if it exists and is short enough for a socket's path, else one below /tmp."""
    base = environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isabs(base) and os.path.isdir(base) and os.stat(base).st_uid == os.geteuid():
        folders = Folders(state, Path(base, "gpulayer"))
        if len(os.fsencode(folders.socket)) <= SOCKET_PATH_BYTES:
            return folders.runtime
    return Path("/tmp", f"gpulayer-{os.geteuid()}")


def _short_hash(text: str) -> str:
    return hashlib.sha256(f"gpulayer:{text}".encode()).hexdigest()[:16]
