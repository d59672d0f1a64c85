"""Manifests: one encoding and digest for a tree, and a refusal in one line for every other list."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpulayer_broker.errors import HostileTree
from gpulayer_broker.store import tree
from gpulayer_broker.store.tree import (
    Entry,
    Manifest,
    check_tree,
    file_entry,
    folder_entry,
    link_entry,
)

SHA = "ab" * 32


def encoded(*entries: dict[str, Any], **changes: Any) -> bytes:
    total_bytes = sum(entry["size"] for entry in entries if isinstance(entry.get("size"), int))
    record = {"version": 1, "total_bytes": total_bytes, "entries": entries} | changes
    return orjson.dumps(record, option=orjson.OPT_SORT_KEYS)


def raw(path: object = "a", kind: object = "file", **changes: object) -> dict[str, Any]:
    plain: dict[str, dict[str, object]] = {
        "file": {"size": 1, "sha256": SHA, "mode": 0o644, "target": ""},
        "dir": {"size": 0, "sha256": "", "mode": 0o755, "target": ""},
        "link": {"size": 0, "sha256": "", "mode": 0o777, "target": "b"},
    }
    return {"path": path, "kind": kind} | plain.get(str(kind), plain["file"]) | changes


def refusal(*entries: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(HostileTree) as caught:
        Manifest.decode(encoded(*entries, **changes))
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_manifest_survives_its_encoding() -> None:
    manifest = Manifest.of(
        [
            file_entry("run.sh", SHA, 3, executable=True),
            file_entry("data/ü b\nc.txt", SHA, 7),
            folder_entry("empty"),
            link_entry("data/latest", "../run.sh"),
        ]
    )

    assert Manifest.decode(manifest.encoded) == manifest
    assert manifest.total_bytes == 10


def test_the_digest_does_not_depend_on_the_order_of_finding() -> None:
    entries = [file_entry(name, SHA, 1) for name in ("b", "a/c", "a-b", "a") if name != "a"]

    assert Manifest.of(entries).digest == Manifest.of(reversed(entries)).digest


@pytest.mark.parametrize(
    "other",
    [file_entry("b", SHA, 1), file_entry("a", "cd" * 32, 1), file_entry("a", SHA, 1, executable=True)],
    ids=["name", "content", "execute bit"],
)
def test_the_digest_tells_trees_apart(other: Entry) -> None:
    assert Manifest.of([file_entry("a", SHA, 1)]).digest != Manifest.of([other]).digest


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/etc/passwd", "an absolute path"),
        ("../up", "'..' in the path"),
        ("a/../../up", "'..' in the path"),
        ("a/..", "'..' in the path"),
        ("./a", "'.' in the path"),
        ("a//b", "an empty name"),
        ("a/", "an empty name"),
        ("", "an empty path"),
        ("..\\up", "a backslash"),
        ("a\0b", "a NUL"),
        ("/".join("a" * 65), "deeper than 64"),
        ("n" * 256, "longer than 255 bytes"),
        ("ü" * 128, "longer than 255 bytes"),
        ("/".join(["n" * 200] * 25), "longer than 4096 bytes"),
    ],
)
def test_a_path_that_is_not_below_the_folder_is_refused(path: str, words: str) -> None:
    line = refusal(raw(path))

    assert words in line
    assert line.startswith(("'", '"'))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (raw(size=-1), "a size of -1 bytes"),
        (raw(size=1 << 41), "a size of"),
        (raw(size=True), "its size is not of type int"),
        (raw(size=1.0), "its size is not of type int"),
        (raw(size=None), "its size is not of type int"),
        (raw(mode=0o4755), "a mode of 4755"),
        (raw(mode=0o600), "a mode of 600"),
        (raw(sha256=SHA.upper()), "its sha256 is not"),
        (raw(sha256="../../../etc/passwd"), "its sha256 is not"),
        (raw(target="b"), "a file with a target"),
        (raw(kind="device"), "of the unknown kind 'device'"),
        (raw(kind="fifo"), "of the unknown kind 'fifo'"),
        (raw(kind="dir", size=1), "a folder with a size"),
        (raw(kind="link", sha256=SHA), "a link with a size, a hash"),
        (raw(path=7), "its path is not of type str"),
        ({"path": "a"}, "not an entry with exactly the fields"),
        (raw() | {"uid": 0}, "not an entry with exactly the fields"),
    ],
)
def test_an_entry_with_senseless_fields_is_refused(entry: dict[str, Any], words: str) -> None:
    assert words in refusal(entry)


@pytest.mark.parametrize(
    ("path", "target", "words"),
    [
        ("l", "/etc/passwd", "a link to the absolute path '/etc/passwd'"),
        ("l", "..", "a link that leaves the tree"),
        ("a/l", "../../x", "a link that leaves the tree"),
        ("a/b/l", "../../../x", "a link that leaves the tree"),
        ("l", "./../x", "a link that leaves the tree"),
        ("l", "a/../../x", "a link that goes down and up again"),
        ("l", "a/b/..", "a link that goes down and up again"),
        ("l", "", "an empty path"),
        ("l", "a\0b", "a NUL"),
        ("l", "..\\x", "a backslash"),
    ],
)
def test_a_link_that_may_leave_the_tree_is_refused(path: str, target: str, words: str) -> None:
    line = refusal(raw(path, "link", target=target))

    assert words in line
    assert repr(path) in line


@pytest.mark.parametrize(
    ("path", "target"), [("l", "a"), ("l", "."), ("a/l", ".."), ("a/b/l", "../../c/d"), ("l", "gone/./x")]
)
def test_a_link_within_the_tree_is_kept(path: str, target: str) -> None:
    manifest = Manifest.decode(encoded(raw(path, "link", target=target)))

    assert [entry.target for entry in manifest.of_kind("link")] == [target]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([raw("a"), raw("a")], "'a': stands twice"),
        ([raw("b"), raw("a")], "'a': is out of order"),
        ([raw("a"), raw("a/b")], "'a/b': below 'a', which is not a folder"),
        ([raw("a", "link"), raw("a/b/c")], "'a/b/c': below 'a', which is not a folder"),
        ([raw("a", "link"), raw("a/b", "dir")], "'a/b': below 'a', which is not a folder"),
        ([raw("a"), raw("a-b"), raw("a/b")], "'a/b': below 'a', which is not a folder"),
    ],
)
def test_entries_that_contradict_each_other_are_refused(entries: list[dict[str, Any]], words: str) -> None:
    assert words in refusal(*entries)


def test_more_entries_than_the_limit_are_refused() -> None:
    line = refusal(*[raw(f"{number:07}") for number in range(tree.MAX_ENTRIES + 1)])

    assert "100,001 entries, over the limit of 100,000" in line


@pytest.mark.parametrize(
    ("head", "tiny"),
    [
        (b'{"entries":[', b"{},"),
        (b'{"entries":[', b"[],"),
        (b'{"entries":[', b'"",'),
        (b'{"entries":["\\\\",', b'"\\"",'),
        (b'{"a":[', b"0.5,"),
    ],
)
def test_many_tiny_values_are_refused_before_they_take_memory(head: bytes, tiny: bytes) -> None:
    data = head + tiny * ((tree.MAX_MANIFEST_BYTES - len(head)) // len(tiny))
    with pytest.raises(HostileTree, match="more values than those of 100,000 entries, the limit"):
        Manifest.decode(data)


def test_a_manifest_at_the_limit_is_read_whatever_its_names_hold() -> None:
    odd = ',"{[\n' * 10
    entries = [file_entry(f"{number:06}{odd}", SHA, number) for number in range(tree.MAX_ENTRIES)]
    manifest = Manifest.of(entries)

    assert Manifest.decode(manifest.encoded) == manifest


def test_more_folders_than_the_limit_are_refused() -> None:
    below = "/".join("d" * 62)

    assert "more than 100,000 folders" in refusal(*[raw(f"{number:05}/{below}/f") for number in range(1700)])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"entries":[],"total_bytes":0,"version":2}', "not a record of version 1"),
        (b"[]", "not a record of version 1"),
        (b'{"entries":{},"total_bytes":0,"version":1}', "entries are not a list"),
        (b'{"entries":[], "total_bytes":0,"version":1}', "not in its canonical encoding"),
        (b'{"entries":[],"total_bytes":5,"version":1}', "not in its canonical encoding"),
        (b'{"entries":[],"entries":[],"total_bytes":0,"version":1}', "not in its canonical encoding"),
    ],
)
def test_bytes_that_are_no_manifest_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(HostileTree, match=words):
        Manifest.decode(data)


@pytest.mark.parametrize(("first", "second"), [("README", "readme"), ("D/a", "d/b"), ("ü", "u\u0308")])
def test_names_that_differ_by_case_alone_clash_only_where_case_does_not_count(
    first: str, second: str
) -> None:
    entries = tuple(sorted((file_entry(first, SHA, 1), file_entry(second, SHA, 1)), key=lambda e: e.path))

    check_tree(entries, case_insensitive=False)
    with pytest.raises(HostileTree, match="where case does not count"):
        check_tree(entries, case_insensitive=True)


names = st.sampled_from(["a", "b", "..", ".", "", "c\\d", "/x", "n\0", "ü", "A"])
paths = st.lists(names, max_size=5).map("/".join)
any_entry = st.builds(
    raw,
    path=paths,
    kind=st.sampled_from(["file", "dir", "link", "socket"]),
    target=paths,
    size=st.integers(-1, 2),
    sha256=st.sampled_from(["", SHA]),
    mode=st.sampled_from([0o644, 0o755, 0o777]),
)
likely_entry = st.one_of(
    any_entry,
    st.builds(raw, path=paths),
    st.builds(raw, path=paths, kind=st.just("dir")),
    st.builds(raw, path=paths, kind=st.just("link"), target=paths),
)


def leads_outside(links: dict[str, str], path: str) -> bool:
    """Walk `path` as a kernel would, name by name through the links; whether it gets above the root."""
    standing: list[str] = []
    ahead = path.split("/")
    for _ in range(200):
        if not ahead:
            return False
        name = ahead.pop(0)
        if name == "..":
            if not standing:
                return True
            standing.pop()
        elif name not in ("", "."):
            link = links.get("/".join([*standing, name]))
            if link is None:
                standing.append(name)
            elif link.startswith("/"):
                return True
            else:
                ahead = link.split("/") + ahead
    return False


@given(st.lists(likely_entry, max_size=6))
@example([raw("a/b/l", "link", target="../../c"), raw("m", "link", target="a/b/l/../..")])
def test_no_decoded_manifest_reaches_outside_its_folder(entries: list[dict[str, Any]]) -> None:
    try:
        manifest = Manifest.decode(encoded(*sorted(entries, key=lambda entry: str(entry["path"]))))
    except HostileTree:
        return

    links = {entry.path: entry.target for entry in manifest.of_kind("link")}
    assert not any(leads_outside(links, entry.path) for entry in manifest.entries)
    assert not any({"", ".", ".."} & set(entry.path.split("/")) for entry in manifest.entries)
    assert not any(entry.path.startswith(f"{link}/") for link in links for entry in manifest.entries)
