"""How much may travel; the error of what is too large names the few paths that make it so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from gpulayer_broker.errors import GpulayerError, SourceTooLarge
from gpulayer_broker.store.blobstore import BlobStore
from gpulayer_broker.units import format_size

_COUNT = 5
_DOMINANT_SHARE = 0.8

Weighed = tuple[str, int]


@dataclass(frozen=True)
class Limits:
    """How much may travel, whose words an error about it uses, and how to get below."""

    total_bytes: int
    files: int
    what: str
    cure: str
    error: type[GpulayerError] = SourceTooLarge

    def for_store(self, store: BlobStore) -> Limits:
        """These limits, or the store's own where it takes less."""
        if store.limit_bytes is None or store.limit_bytes >= self.total_bytes:
            return self
        return replace(self, total_bytes=store.limit_bytes)

    def check(self, sizes: Iterable[Weighed], *, complete: bool = True) -> None:
        """The error, naming the largest paths, if these paths and sizes in bytes are over a limit."""
        sizes = list(sizes)
        total_bytes = sum(size_bytes for _, size_bytes in sizes)
        more = "" if complete else "more than "
        if total_bytes > self.total_bytes:
            total, limit = f"{more}{format_size(total_bytes)}", format_size(self.total_bytes)
            self._refuse(total, limit, sizes, format_size)
        if len(sizes) > self.files:
            total, limit = f"{more}{len(sizes):,} files", f"{self.files:,}"
            self._refuse(total, limit, [(path, 1) for path, _ in sizes], "{:,}".format)

    def _refuse(self, total: str, limit: str, weighed: list[Weighed], show: Callable[[int], str]) -> None:
        largest = ", ".join(f"{_printable(path)} {show(weight)}" for path, weight in largest_paths(weighed))
        raise self.error(f"{self.what}: {total}, over the limit of {limit}; largest: {largest}; {self.cure}")


def _printable(path: str) -> str:
    return path if path.isprintable() else repr(path)


def largest_paths(weighed: Iterable[Weighed]) -> list[Weighed]:
    """The five heaviest paths with their weights; a folder stands for its content, with a slash at its end.

    A folder gives way to one thing in it that makes up most of its weight.
    """
    groups = _grouped(weighed, "")
    heaviest = sorted(groups, key=lambda path: (-_weight(groups[path]), path))[:_COUNT]
    return [_narrowed(path, groups[path]) for path in heaviest]


def _grouped(weighed: Iterable[Weighed], prefix: str) -> Mapping[str, list[Weighed]]:
    groups: defaultdict[str, list[Weighed]] = defaultdict(list)
    for path, weight in weighed:
        at = path.find("/", len(prefix))
        groups[path if at < 0 else path[: at + 1]].append((path, weight))
    return groups


def _weight(members: Iterable[Weighed]) -> int:
    return sum(weight for _, weight in members)


def _narrowed(path: str, members: list[Weighed]) -> Weighed:
    while path.endswith("/"):
        groups = _grouped(members, path)
        heaviest = max(groups, key=lambda below: _weight(groups[below]))
        if _weight(groups[heaviest]) < _DOMINANT_SHARE * _weight(members):
            break
        path, members = heaviest, groups[heaviest]
    return path, _weight(members)
