"""Counts the words of a text and writes them, most frequent first: the input and the output of the first job."""

import collections
import os
import pathlib
import sys


def table(text: str) -> str:
    """One line a word: the word, a tab, how often; ties in the order of the alphabet."""
    counts = collections.Counter(text.lower().split())
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return "".join(f"{word}\t{count}\n" for word, count in ordered)


if __name__ == "__main__":
    source = pathlib.Path(sys.argv[1])
    target = pathlib.Path(os.environ["GPULAYER_OUTPUTS"]) / "words.tsv"
    target.write_text(table(source.read_text()))
    print(f"counted {source} into {target.name}")
