"""Writes what a run found: JSON results and Chrome traces."""

import json
from collections.abc import Mapping
from pathlib import Path

from ep_overlap.commands.world import World
from ep_overlap.report.whole_file import write_whole
from ep_overlap.run.trace import ChromeTrace


def write_json(path: Path | None, result: Mapping[str, object]) -> None:
    """Write a result; None: nowhere.

    Raises:
        CannotWriteError: it cannot be written.
    """
    if path is not None:
        write_whole(path, json.dumps(result, indent=2) + "\n")


def write_trace(path: Path | None, chrome: ChromeTrace | None, world: World) -> None:
    """Write all ranks' traces into one file, on rank 0. Collective; nothing without a path.

    Raises:
        CannotWriteError: it cannot be written.
    """
    if path is None or chrome is None:
        return
    events = [e for part in world.gathered(chrome.as_json()) for e in part["traceEvents"]]
    if world.rank == 0:
        spans = [event["ts"] for event in events if event["ph"] == "X"]
        start_us = min(spans, default=0.0)
        for event in events:
            if event["ph"] == "X":
                event["ts"] -= start_us
        write_whole(path, json.dumps({"traceEvents": events}))
