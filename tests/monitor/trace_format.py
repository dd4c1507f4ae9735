"""Strict parser of the part of the Trace Event Format that our traces use."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

_OF_ALL = {"name", "ph", "ts", "pid", "tid"}
_MAY = {"X": {"cat", "dur", "args"}, "M": {"args"}, "C": {"cat", "args"}}
_MUST = {"X": {"cat", "dur"}, "M": {"args"}, "C": {"args"}}
_METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}


def parse(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace; raise AssertionError if one violates the format."""
    trace = json.loads(path.read_text(), parse_constant=_refuse)
    assert set(trace) <= {"traceEvents", "displayTimeUnit", "otherData"} and trace["displayTimeUnit"] in ("ms", "ns")
    threads: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    named = set()
    for event in trace["traceEvents"]:
        phase = event["ph"]
        assert phase in _MAY and set(event) >= _OF_ALL | _MUST[phase], event
        assert set(event) <= _OF_ALL | _MAY[phase], event
        assert type(event["pid"]) is int and type(event["tid"]) is int and isinstance(event["name"], str), event
        assert isinstance(event["ts"], (int, float)) and math.isfinite(event["ts"]) and event["ts"] >= 0, event
        if phase == "X":
            assert isinstance(event["dur"], (int, float)) and event["dur"] >= 0, event
            begin = round(event["ts"] * 1e3)
            threads[event["pid"], event["tid"]].append((begin, begin + round(event["dur"] * 1e3), event["name"]))
        elif phase == "M":
            assert set(event["args"]) == {_METADATA[event["name"]]}, event
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
        else:
            assert event["args"] and all(type(v) in (int, float) for v in event["args"].values()), event
    assert set(threads) <= named, "a thread has no name"
    for spans in threads.values():
        _check_nesting(spans)
    return trace["traceEvents"]


def _check_nesting(spans: list[tuple[float, float, str]]) -> None:
    """Check that complete events of a thread are nested or follow one another."""
    around: list[tuple[float, float, str]] = []
    for begin, end, name in sorted(spans, key=lambda s: (s[0], -s[1])):
        while around and around[-1][1] <= begin:
            around.pop()
        assert not around or end <= around[-1][1], (around[-1], (begin, end, name))
        around.append((begin, end, name))


def _refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is no JSON")
