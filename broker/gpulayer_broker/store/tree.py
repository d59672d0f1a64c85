"""The manifest of a tree: files by SHA-256, links and empty folders, with one encoding and one digest.

What it guarantees: a Manifest that exists is safe to lay out below a folder. Whoever wrote it, no path is
absolute or climbs, no entry lies below a file or a link, no name stands twice, no link leads out of the
tree, and every number is within bounds. Anything else is HostileTree, in one line that names the path, and
takes no more memory to read than `MAX_ENTRIES` do.
Equal trees have equal encodings, so the digest names the tree. Unpacking still goes by directory handles
(`unpack.py`): the folder may be as hostile as the list.

A folder with something in it is implied by what is in it; an entry of its own is needed only where it is
empty.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Literal, cast
from unicodedata import normalize

import orjson

from gpulayer_broker.errors import HostileTree
from gpulayer_broker.store.files import is_sha256

VERSION = 1
MAX_ENTRIES = 100_000
MAX_FOLDERS = 100_000
MAX_DEPTH = 64
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4096
MAX_FILE_BYTES = 1 << 40
MAX_MANIFEST_BYTES = 64 << 20
# Twice what the texts of so many entries are, and the marks before their values.
MAX_TEXTS = 2 * 10 * MAX_ENTRIES
MAX_MARKS = 2 * 7 * MAX_ENTRIES

PLAIN_MODE, EXECUTABLE_MODE, FOLDER_MODE, LINK_MODE = 0o644, 0o755, 0o755, 0o777

Kind = Literal["file", "dir", "link"]
_FIELDS = {"path", "kind", "size", "sha256", "mode", "target"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, link or empty folder. `path` is relative, with `/` between names.

    A link's `target` counts from its folder.
    """

    path: str
    kind: Kind
    size: int = 0
    sha256: str = ""
    mode: int = PLAIN_MODE
    target: str = ""


def file_entry(path: str, sha: str, size_bytes: int, *, executable: bool = False) -> Entry:
    """A regular file."""
    return Entry(path, "file", size_bytes, sha, EXECUTABLE_MODE if executable else PLAIN_MODE)


def folder_entry(path: str) -> Entry:
    """An empty folder."""
    return Entry(path, "dir", mode=FOLDER_MODE)


def link_entry(path: str, target: str) -> Entry:
    """A symbolic link."""
    return Entry(path, "link", mode=LINK_MODE, target=target)


@dataclass(frozen=True)
class Manifest:
    """A tree as sorted entries, checked when it is made. `Manifest.of` sorts.

    `decode` reads what others wrote.
    """

    entries: tuple[Entry, ...]
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise HostileTree(
                f"manifest: version {self.version!r:.20} is not known; this GPUlayer reads {VERSION}"
            )
        check_tree(self.entries, case_insensitive=sys.platform == "darwin")

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Manifest:
        """The manifest of entries in any order."""
        return cls(tuple(sorted(entries, key=lambda entry: entry.path)))

    @property
    def total_bytes(self) -> int:
        """The size of all files."""
        return sum(entry.size for entry in self.entries)

    def of_kind(self, kind: Kind) -> Iterator[Entry]:
        """The entries of one kind, in order."""
        return (entry for entry in self.entries if entry.kind == kind)

    @cached_property
    def encoded(self) -> bytes:
        """The one encoding of this tree: JSON with sorted keys, no spaces and sorted entries."""
        entries = [{name: getattr(entry, name) for name in _FIELDS} for entry in self.entries]
        record = {"version": self.version, "total_bytes": self.total_bytes, "entries": entries}
        return orjson.dumps(record, option=orjson.OPT_SORT_KEYS)

    @property
    def digest(self) -> str:
        """SHA-256 of the encoding; it names the tree, and the manifest as a blob."""
        return sha256(self.encoded).hexdigest()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """The manifest in `data`, which may come from anybody.

        HostileTree unless it is exactly what `encoded` gives.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise HostileTree(f"manifest: {len(data):,} bytes, over the limit of {MAX_MANIFEST_BYTES:,}")
        _check_values(data)
        manifest = cls(tuple(_entries_in(_record_in(data))))
        if manifest.encoded != data:
            raise HostileTree("manifest: not in its canonical encoding (keys, spaces or the total differ)")
        return manifest


def _check_values(data: bytes) -> None:
    """HostileTree for many more values than a manifest has: one of two bytes may take a hundred bytes of memory."""
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') <= 2 * MAX_TEXTS:
        outside = b"".join(plain.split(b'"')[::2])
        if sum(map(outside.count, (b"{", b"[", b","))) <= MAX_MARKS:
            return
    raise HostileTree(f"manifest: more values than those of {MAX_ENTRIES:,} entries, the limit")


def _record_in(data: bytes) -> Mapping[str, object]:
    try:
        record = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise HostileTree(f"manifest: not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("version") != VERSION:
        raise HostileTree(f"manifest: not a record of version {VERSION}")
    return record


def _entries_in(record: Mapping[str, object]) -> Iterator[Entry]:
    items = record.get("entries")
    if not isinstance(items, list):
        raise HostileTree("manifest: its entries are not a list")
    _check_count(len(items))
    return (_entry_in(item) for item in items)


def _entry_in(item: object) -> Entry:
    if not isinstance(item, dict) or item.keys() != _FIELDS:
        raise HostileTree(f"manifest: {item!r:.120}: not an entry with exactly the fields {sorted(_FIELDS)}")
    fields = cast(dict[str, object], item)
    for name, value in fields.items():
        expected = int if name in ("size", "mode") else str
        # Exactly: True would pass for an int and come back as 1.
        if type(value) is not expected:
            raise HostileTree(f"{fields['path']!r:.120}: its {name} is not of type {expected.__name__}")
    return Entry(**item)


def check_tree(entries: tuple[Entry, ...], *, case_insensitive: bool) -> None:
    """HostileTree unless the entries, in sorted order, are a tree that stays below its folder."""
    _check_count(len(entries))
    names = _Names(case_insensitive)
    previous = ""
    for entry in entries:
        check_entry(entry)
        if entry.path <= previous:
            what = "stands twice" if entry.path == previous else "is out of order"
            raise HostileTree(f"{shown(entry.path)}: {what} in the manifest")
        previous = entry.path
        names.add(entry)


def check_entry(entry: Entry) -> None:
    """HostileTree unless the entry is in order by itself."""
    if problem := path_problem(entry.path) or _KIND_PROBLEMS.get(entry.kind, _unknown_kind)(entry):
        raise HostileTree(f"{shown(entry.path)}: {problem}")


def shown(path: str) -> str:
    """A path for a line of text: quoted, on one line, and shortened in the middle."""
    text = repr(path)
    return text if len(text) <= 200 else f"{text[:120]}…{text[-60:]}"


def path_problem(path: str) -> str | None:
    """Why `path` cannot be a relative path of a tree, None if it can."""
    if problem := _text_problem(path):
        return problem
    if path.startswith("/"):
        return "an absolute path"
    names = path.split("/")
    if len(names) > MAX_DEPTH:
        return f"deeper than {MAX_DEPTH} folders"
    return next(filter(None, map(_name_problem, names)), None)


def _text_problem(text: str) -> str | None:
    if not text:
        return "an empty path"
    if "\0" in text:
        return "a NUL in the path"
    if "\\" in text:
        return "a backslash in the path, which is a separator elsewhere"
    try:
        too_long = len(text.encode()) > MAX_PATH_BYTES
    except UnicodeEncodeError:
        return "a name that is not UTF-8"
    return f"longer than {MAX_PATH_BYTES} bytes" if too_long else None


def _name_problem(name: str) -> str | None:
    if not name:
        return "an empty name in the path"
    if name in (".", ".."):
        return f"'{name}' in the path"
    too_long = len(name.encode()) > MAX_NAME_BYTES
    return f"a name longer than {MAX_NAME_BYTES} bytes" if too_long else None


def link_problem(path: str, target: str) -> str | None:
    """Why a link at `path` may lead out of its tree, None if it cannot.

    `..` is taken only at the start of a target, where it climbs from the link's own folder, which is no
    link. After a name it would climb from wherever that name leads, and a list of links that look harmless
    could climb out together.
    """
    if problem := _text_problem(target):
        return f"a link whose target has {problem}"
    if target.startswith("/"):
        return f"a link to the absolute path {shown(target)}"
    names = [name for name in target.split("/") if name not in ("", ".")]
    climbs = next((at for at, name in enumerate(names) if name != ".."), len(names))
    if climbs > path.count("/"):
        return f"a link that leaves the tree, to {shown(target)}"
    if ".." in names[climbs:]:
        return f"a link that goes down and up again, to {shown(target)}"
    return next(filter(None, map(_name_problem, names[climbs:])), None)


def _file_problem(entry: Entry) -> str | None:
    if not 0 <= entry.size <= MAX_FILE_BYTES:
        return f"a size of {entry.size:,} bytes"
    if not is_sha256(entry.sha256):
        return "its sha256 is not a SHA-256 in lower-case hex"
    if entry.mode not in (PLAIN_MODE, EXECUTABLE_MODE):
        return f"a mode of {entry.mode:o}; a file has 644 or 755"
    return "a file with a target" if entry.target else None


def _folder_problem(entry: Entry) -> str | None:
    plain = folder_entry(entry.path)
    return None if entry == plain else "a folder with a size, a hash, a target or a mode other than 755"


def _link_problem(entry: Entry) -> str | None:
    if entry != link_entry(entry.path, entry.target):
        return "a link with a size, a hash or a mode other than 777"
    return link_problem(entry.path, entry.target)


def _unknown_kind(entry: Entry) -> str:
    return f"of the unknown kind {entry.kind!r:.40}"


_KIND_PROBLEMS = {"file": _file_problem, "dir": _folder_problem, "link": _link_problem}


def _check_count(count: int) -> None:
    if count > MAX_ENTRIES:
        raise HostileTree(f"manifest: {count:,} entries, over the limit of {MAX_ENTRIES:,}")


class _Names:
    """The folders and leaves met so far; finds entries below a file and two names for one place."""

    def __init__(self, case_insensitive: bool) -> None:
        self._case_insensitive = case_insensitive
        self._folders: set[str] = set()
        self._leaves: set[str] = set()
        self._spellings: dict[str, str] = {}

    def add(self, entry: Entry) -> None:
        at = entry.path.rfind("/")
        if at > 0:
            self._add_folder(entry.path[:at], entry.path)
        if entry.kind == "dir":
            self._add_folder(entry.path, entry.path)
        elif entry.path in self._folders:
            raise HostileTree(f"{shown(entry.path)}: both a folder and a {entry.kind}")
        else:
            self._leaves.add(entry.path)
            self._check_spelling(entry.path)

    def _add_folder(self, folder: str, path: str) -> None:
        while folder and folder not in self._folders:
            if folder in self._leaves:
                raise HostileTree(f"{shown(path)}: below {shown(folder)}, which is not a folder")
            self._check_spelling(folder)
            self._folders.add(folder)
            folder = folder[: max(folder.rfind("/"), 0)]
        if len(self._folders) > MAX_FOLDERS:
            raise HostileTree(f"{shown(path)}: the manifest has more than {MAX_FOLDERS:,} folders")

    def _check_spelling(self, path: str) -> None:
        if not self._case_insensitive:
            return
        first = self._spellings.setdefault(normalize("NFC", path).casefold(), path)
        if first != path:
            raise HostileTree(f"{shown(path)}: the same name as {shown(first)} where case does not count")
