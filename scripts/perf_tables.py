"""What the documentation says of speed, as tables made of the raw figures in `benchmarks/results/`.

A page has `<!-- name:begin -->` and `<!-- name:end -->` around a table; the text around it is its author's and holds no
figures. `make_perf_charts.py` writes the pages, a test holds them to what is written here.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    ROOT / "benchmarks" / "README.md",
    ROOT / "docs" / "get-started" / "performance-and-comparison.md",
)
# Above it, something else had a part of the machine.
QUIET_LOAD = 0.7

Figures = dict[str, dict[str, Any]]

ROADS = {
    "gpulayer": {
        "fresh delay": "`.delay`, a fresh process each",
        "fresh map": "`.map`, a fresh process each",
        "warm delay": '`.delay`, `isolation="warm"`',
        "warm map": '`.map`, `isolation="warm"`',
    },
    "dramatiq": {"send": "`send`", "group": "`group`"},
    "celery": {"delay": "`delay`", "group": "`group`"},
    "rq": {"enqueue": "`enqueue`", "enqueue_many": "`enqueue_many`"},
    "ray": {"remote": "tasks, `ray.get`", "pool": "`Pool.map`"},
}


def newest() -> Path:
    """The folder of the last run that was recorded."""
    return max(path.parent for path in RESULTS.glob("*/burst.json"))


def load(folder: Path) -> Figures:
    """All raw figures of a run, by benchmark."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


# --- figures ---


def middle(values: Sequence[float]) -> float:
    return statistics.median(values)


def speed(figures: Figures, system: str, *roads: str) -> float:
    """Jobs a second by the fastest of these roads, or of all."""
    known = figures["burst"]["results"]["systems"][system]["roads"]
    return max(middle(known[road]["per_s"]) for road in roads or known)


def delay_ms(figures: Figures, road: str) -> float:
    return middle(figures["latency"]["results"]["systems"]["gpulayer"]["roads"][road])


# --- tables ---


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns are numbers, the first two apart."""
    marks = ["---", "---", *["---:"] * (len(columns) - 2)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [columns, marks, *rows])


def number(value: float) -> str:
    """Three digits are as many as any of these figures is good for."""
    if value >= 100:
        digits = 10 ** max(0, len(str(int(value))) - 3)
        return f"{round(value / digits) * digits:,}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(values: Sequence[float]) -> str:
    return f"{number(min(values))} to {number(max(values))}"


def machine(figures: Figures) -> str:
    """Where and when it was measured, and whether that was a quiet moment."""
    facts = figures["burst"]["machine"]
    systems = figures["burst"]["results"]["systems"].values()
    versions = ", ".join(f"{each['title']} {each['version']}" for each in systems)
    text = (
        f"Measured on {facts['day']}: {facts['cpus']} cores, {facts['system']}, Python {facts['python']}; {versions}. "
        f"Load of the machine before the run: {facts['load']:.1f}."
    )
    if facts["load"] > QUIET_LOAD:
        text += " **It was not quiet: these figures are provisional.**"
    return text


def burst(figures: Figures) -> str:
    rows = []
    found = figures["burst"]["results"]
    base = speed(figures, "dramatiq")
    for system, each in found["systems"].items():
        for road, run in each["roads"].items():
            waiting = run["waiting_bytes"]
            rows.append(
                (
                    each["title"],
                    ROADS[system][road],
                    f"{run['jobs']:,}",
                    f"**{number(middle(run['per_s']))}**",
                    spread(run["per_s"]),
                    f"{middle(run['per_s']) / base:.2f}",
                    number(middle(run["submit_us"])),
                    "-" if waiting is None else f"{waiting:,.0f}",
                )
            )
    columns = (
        "system",
        "road",
        "jobs",
        "jobs/s",
        "from, to",
        "to Dramatiq's best",
        "µs to submit",
        "bytes waiting",
    )
    return table(columns, rows)


def latency(figures: Figures) -> str:
    found = figures["latency"]["results"]
    rows = [
        (each["title"], ROADS[system][road], "result", number(middle(times)), spread(times))
        for system, each in found["systems"].items()
        for road, times in each["roads"].items()
    ]
    ours = [("a command", "result", found["command_ms"])]
    ours += [(kind, "first byte of output", times) for kind, times in found["output_ms"].items()]
    rows[2:2] = [
        ("GPUlayer", _kind(kind), until, number(middle(times)), spread(times)) for kind, until, times in ours
    ]
    marked = table(("system", "road", "until", "ms", "from, to"), rows)
    return marked.replace("| --- | --- | ---: |", "| --- | --- | --- |", 1)


def _kind(kind: str) -> str:
    return {"fresh": "a function, a fresh process", "warm": "a function, warm", "command": "a command"}.get(
        kind, kind
    )


def memory(figures: Figures) -> str:
    rows = [
        (what, "", *(f"{size[share]:.1f}" for share in ("rss", "pss", "uss")))
        for what, size in figures["latency"]["results"]["memory_mb"].items()
    ]
    columns = ("process", "", "MB resident", "MB, shared pages split", "MB of its own")
    return table(columns, rows).replace(" |  |", " |").replace("| --- | --- |", "| --- |", 1)


def scale(figures: Figures) -> str:
    found = figures["scale_test"]["results"]
    shares = found["runs_of_a_worker"]
    return (
        f"{found['runs']} runs on {found['workers']} workers took **{found['whole_s']:.1f} s** "
        f"({found['runs'] / found['whole_s']:.0f} runs a second), submit to last result; the runs alone need "
        f"{found['own_s']:.1f} s on this machine's cores. {len(shares)} workers took part, with {shares[0]} to "
        f"{shares[-1]} runs each."
    )


def submit(figures: Figures) -> str:
    rows = [
        (
            f"{row['queued']:,}",
            f"{row['signatures']:,}",
            f"{row['ping_us']:.0f}",
            f"{row['redis_py_ping_us']:.0f}" if "redis_py_ping_us" in row else "-",
            f"{row['submit_us']:.0f}",
            f"{row['ratio_to_ping']:.1f}",
            f"{row['submit_server_us']:.0f}",
            f"{row['pipelined_us']:.0f}",
        )
        for row in figures["submit_queue"]["results"]["rows"]
    ]
    peer_us = figures["submit_queue"]["results"]["dramatiq_send_us"]
    columns = (
        "queued",
        "signatures",
        "PING µs",
        "by redis-py",
        "submit µs",
        "ratio",
        "server µs",
        "pipelined µs",
    )
    beside = f"Dramatiq's Redis broker on the same server, in the same run: {peer_us:.0f} µs a send."
    return f"{table(columns, rows)}\n\n{beside}"


def idle(figures: Figures) -> str:
    rows = [
        (
            f"{row['workers']:,}",
            "",
            f"{row['commands_per_worker_s']:.2f}",
            f"{row['server_cpu_percent']:.1f} %",
        )
        for row in figures["idle_traffic"]["results"]["rows"]
    ]
    columns = ("workers", "", "commands a worker and second", "server's share of a core")
    return table(columns, rows).replace(" |  |", " |").replace("| --- | --- |", "| --- |", 1)


def dramatiq(figures: Figures) -> str:
    runs = figures["dramatiq_throughput"]["results"]["runs"]
    rows = [
        (
            title,
            "",
            number(middle([run["per_s"] for run in runs[kind]])),
            spread([run["per_s"] for run in runs[kind]]),
            number(middle([run["send_us"] for run in runs[kind]])),
        )
        for kind, title in (("ours", "`CapabilityBroker`"), ("stock", "Dramatiq's Redis broker"))
    ]
    columns = ("broker", "", "messages/s", "from, to", "µs a send")
    return table(columns, rows).replace(" |  |", " |").replace("| --- | --- |", "| --- |", 1)


# --- targets ---


def _targets(figures: Figures) -> Iterable[tuple[str, str, str, bool]]:
    """What was promised, the bound, what was measured, whether it holds."""
    warm, best = speed(figures, "gpulayer", "warm map"), speed(figures, "dramatiq")
    yield "warm `.map` to Dramatiq's fastest road", "≥ 5 times", f"{warm / best:.1f} times", warm >= 5 * best
    yield "one item of a warm `.map`", "≤ 0.1 ms", f"{1000 / warm:.3f} ms", 1000 / warm <= 0.1
    single = speed(figures, "gpulayer", "warm delay") / best
    yield "warm `.delay`, one by one, to the same", "≥ 1.2 times", f"{single:.2f} times", single >= 1.2
    fresh = speed(figures, "gpulayer", "fresh delay", "fresh map")
    ratio = fresh / speed(figures, "rq")
    yield "a fresh process each", "≥ 250/s", f"{fresh:.0f}/s", fresh >= 250
    yield "the same to RQ, which forks too", "≥ 3 times", f"{ratio:.1f} times", ratio >= 3
    for road, most_ms in (("fresh delay", 8.0), ("warm delay", 2.0)):
        took_ms = delay_ms(figures, road)
        what = f"submit → result on an idle worker, {road.partition(' ')[0]}"
        yield what, f"≤ {most_ms:.0f} ms", f"{took_ms:.1f} ms", took_ms <= most_ms
    waiting = figures["burst"]["results"]["systems"]["gpulayer"]["roads"]["fresh delay"]["waiting_bytes"]
    yield "a queued call", "≤ 1.2 kB", f"{waiting / 1000:.2f} kB", waiting <= 1200
    size_mb = figures["latency"]["results"]["memory_mb"]["worker, nothing run yet"]["rss"]
    yield "an idle worker", "≤ 60 MB", f"{size_mb:.0f} MB", size_mb <= 60
    yield from _queue_targets(figures)


def _queue_targets(figures: Figures) -> Iterable[tuple[str, str, str, bool]]:
    rows = figures["submit_queue"]["results"]["rows"]
    ratio = rows[0]["ratio_to_ping"]
    yield "one submit to a PING of its connection", "≤ 1.5 times", f"{ratio:.1f} times", ratio <= 1.5
    if (stock := rows[0].get("ratio_to_redis_py_ping")) is not None:
        yield "one submit to a PING by redis-py", "≤ 1.5 times", f"{stock:.1f} times", stock <= 1.5
    yield (
        "a submit of many at once",
        "≤ 40 µs",
        f"{rows[0]['pipelined_us']:.0f} µs",
        rows[0]["pipelined_us"] <= 40,
    )
    longest = max(rows, key=lambda row: row["queued"])
    growth = longest["submit_us"] / rows[0]["submit_us"]
    yield (
        f"a submit at {longest['queued']:,} queued to one at none",
        "≤ 1.1 times",
        f"{growth:.2f} times",
        growth <= 1.1,
    )
    yield from _long_queue_targets(longest)
    few, many = figures["idle_traffic"]["results"]["rows"]
    rate = few["commands_per_worker_s"]
    yield "commands a second of an idle worker", "≤ 0.3", f"{rate:.2f}", round(rate, 2) <= 0.3
    share = many["server_cpu_percent"]
    yield f"{many['workers']:,} idle workers, of a server's core", "< 3 %", f"{share:.1f} %", share < 3


def _long_queue_targets(row: dict[str, Any]) -> Iterable[tuple[str, str, str, bool]]:
    """Of runs that have measured them."""
    if "claim_p99_ms" not in row:
        return
    p99_ms, back_s = row["claim_p99_ms"], row["restart"]["claims_s"]
    yield f"a claim at {row['queued']:,} queued, p99", "≤ 20 ms", f"{p99_ms:.2f} ms", p99_ms <= 20
    yield (
        f"a killed server with {row['queued']:,} queued serves again",
        "≤ 30 s",
        f"{back_s:.1f} s",
        back_s <= 30,
    )


def targets(figures: Figures) -> str:
    rows = [(what, bound, found, "yes" if met else "**no**") for what, bound, found, met in _targets(figures)]
    return table(("", "target", "measured", "met"), rows)


TABLES: dict[str, Callable[[Figures], str]] = {
    "machine": machine,
    "targets": targets,
    "burst": burst,
    "latency": latency,
    "memory": memory,
    "scale": scale,
    "submit": submit,
    "idle": idle,
    "dramatiq": dramatiq,
}


def filled(text: str, figures: Figures) -> str:
    """A page with its tables, where it has markers for them."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if begin in text:
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}\n{make(figures)}\n\n{end}{rest.partition(end)[2]}"
    return text


def stale(figures: Figures) -> list[str]:
    """The pages whose tables are not what the figures say."""
    return [
        str(page.relative_to(ROOT)) for page in PAGES if page.read_text() != filled(page.read_text(), figures)
    ]
