"""Line counts of each room, without docstrings, comments and blank lines: `python docs/lines.py`."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """Return the number of lines that contain code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def main() -> None:
    """Print a table for each package, largest room first."""
    for package in ("mpitrain", "benchmarks"):
        lines, files = Counter[str](), Counter[str]()
        for path in (ROOT / package).rglob("*.py"):
            room = path.relative_to(ROOT / package).parts[0]
            lines[room] += code_lines(path.read_text(encoding="utf-8"))
            files[room] += 1
        print(f"{package:14} {lines.total():7,} lines {files.total():5} files")
        for room, count in lines.most_common():
            print(f"  {room:12} {count:7,} lines {files[room]:5} files")


if __name__ == "__main__":
    main()
