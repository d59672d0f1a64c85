"""Writes what the documentation says of speed: its tables, and the charts in `docs/get-started/performance/`.

    python scripts/make_perf_charts.py            of the newest run in benchmarks/results/
    python scripts/make_perf_charts.py --check    says which pages' tables are not what that run says, and ends with 1

Charts are drawn by matplotlib, in the environment that `benchmarks/peers/charts.txt` pins: nothing else needs it. They
are SVG with text as text, readable on light and on dark, and the same figures give the same file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.environments import environment
from scripts.perf_tables import PAGES, ROADS, ROOT, Figures, filled, load, middle, newest, number, stale

CHARTS = ROOT / "docs" / "get-started" / "performance"
GREY, OURS, THEIRS = "#808080", "#2a9d8f", "#9aa5b1"
FAR_APART = 30
DRAWN = "GPULAYER_CHARTS_ENVIRONMENT"

Bar = tuple[str, Sequence[float], bool]


def throughput(figures: Figures) -> list[Bar]:
    return [
        (f"{each['title']} {_road(system, road)}", run["per_s"], system == "gpulayer")
        for system, each in figures["burst"]["results"]["systems"].items()
        for road, run in each["roads"].items()
    ]


def submit(figures: Figures) -> list[Bar]:
    return [
        (f"{each['title']} {_road(system, road)}", run["submit_us"], system == "gpulayer")
        for system, each in figures["burst"]["results"]["systems"].items()
        for road, run in each["roads"].items()
    ]


def latency(figures: Figures) -> list[Bar]:
    found = figures["latency"]["results"]
    bars = [
        (f"{each['title']} {_road(system, road)}", times, system == "gpulayer")
        for system, each in found["systems"].items()
        for road, times in each["roads"].items()
    ]
    return [*bars[:2], ("GPUlayer a command", found["command_ms"], True), *bars[2:]]


def _road(system: str, road: str) -> str:
    return ROADS[system][road].replace("`", "").replace('isolation="warm"', "warm")


def draw(name: str, title: str, bars: list[Bar], *, most_first: bool) -> None:
    """Bars of medians with whiskers from the least to the most, on a logarithmic scale where they are far apart."""
    import matplotlib  # type: ignore[import-not-found]

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "gpulayer", "svg.fonttype": "none", "font.size": 9, "text.color": GREY}
        | {f"{part}.color": GREY for part in ("xtick", "ytick")}
        | {"axes.labelcolor": GREY, "axes.edgecolor": GREY}
    )
    from matplotlib import pyplot

    bars = sorted(bars, key=lambda bar: middle(bar[1]), reverse=not most_first)
    figure, axes = pyplot.subplots(figsize=(7.5, 0.32 * len(bars) + 0.9))
    _bars(axes, bars)
    axes.set_title(title, loc="left", fontsize=10)
    figure.tight_layout()
    CHARTS.mkdir(parents=True, exist_ok=True)
    path = CHARTS / f"{name}.svg"
    figure.savefig(path, transparent=True, metadata={"Date": None, "Title": title})
    pyplot.close(figure)
    path.write_text("".join(line.rstrip() + "\n" for line in path.read_text().splitlines()))


def _bars(axes: Any, bars: list[Bar]) -> None:
    places = range(len(bars))
    middles = [middle(values) for _, values, _ in bars]
    below = [found - min(values) for found, (_, values, _) in zip(middles, bars, strict=True)]
    above = [max(values) - found for found, (_, values, _) in zip(middles, bars, strict=True)]
    colours = [OURS if own else THEIRS for _, _, own in bars]
    axes.barh(places, middles, xerr=[below, above], color=colours, ecolor=GREY, error_kw={"elinewidth": 0.8})
    axes.set_yticks(places, [label for label, _, _ in bars])
    wide = max(middles) > FAR_APART * min(middles)
    most = max(max(values) for _, values, _ in bars)
    axes.set_xscale("log" if wide else "linear")
    axes.set_xlim(right=most * (3 if wide else 1.12))
    for place, (found, up) in enumerate(zip(middles, above, strict=True)):
        at = (found + up) * 1.12 if wide else found + up + most * 0.012
        axes.text(at, place, number(found), va="center", color=GREY)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def in_environment() -> None:
    """Begins anew in the environment that has matplotlib."""
    if DRAWN not in os.environ:
        python = environment("charts") / "python"
        os.execve(python, [str(python), *sys.argv], {**os.environ, DRAWN: "1"})


def main() -> int:
    figures = load(newest())
    if sys.argv[1:] == ["--check"]:
        for name in (found := stale(figures)):
            print(f"{name} is not what the figures say: python scripts/make_perf_charts.py", file=sys.stderr)
        return 1 if found else 0
    in_environment()
    draw("throughput", "No-op jobs a second, results awaited", throughput(figures), most_first=True)
    draw(
        "latency", "Milliseconds from submit to result, one job at a time", latency(figures), most_first=False
    )
    draw("submit", "Microseconds to submit one job", submit(figures), most_first=False)
    for page in PAGES:
        page.write_text(filled(page.read_text(), figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
