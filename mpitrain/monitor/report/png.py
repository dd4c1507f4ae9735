"""One PNG file a chart, made without a browser from the charts of the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vl_convert

from mpitrain.errors import InputError
from mpitrain.monitor.report import style
from mpitrain.monitor.report.compare import Named
from mpitrain.monitor.report.page import sections
from mpitrain.storage.disk import reason, write_whole

SCALE = 1.5  # pixels of the file for one of the chart


def write_pictures(runs: Sequence[Named], folder: Path, colours: dict[str, str] = style.LIGHT) -> list[Path]:
    """Write every chart of a report as a PNG file.

    Args:
        runs: One run, or several to lay over each other.
        folder: Where the files go, which is made if it is not there. Files of the same names are written again.
        colours: The theme.

    Returns:
        The files' paths.

    Raises:
        InputError: A file cannot be written.
    """
    paths = []
    for section in sections(runs):
        for drawing in section.drawings:
            if drawing.chart is None:
                continue
            spec: dict[str, Any] = style.painted(style.spec_of(drawing.chart), colours)
            if spec.get("width") == "container":
                spec["width"] = style.WIDTH
            config = style.painted(style.theme(colours), colours)
            data = vl_convert.vegalite_to_png(spec, config=config, scale=SCALE)
            path = folder / f"{drawing.name}.png"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_whole(path, data)
            except OSError as error:
                raise InputError(f"picture {path} cannot be written ({reason(error)}); choose another --png") from None
            paths.append(path)
    return paths
