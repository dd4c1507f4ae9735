"""Loops of a script, whose iterations are the positions at which its run can be saved and continued.

The code of the script is compiled with three calls added; lines and names stay as they are:

    for x in batches:            enter("train.py:7:4")
        ...                      for x in loop(batches, "train.py:7:4"):
                                     ...
    while step < 10:             while mark("train.py:9:4") and (step < 10):
        ...                          ...

The head of a loop is a position: the iterations of the `for` loops around it, in each function that is being called,
say where the script is. To continue there, the script runs from its start; these loops pass over the iterations that
were done, and the variables get their values at the head of the innermost loop.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Protocol

_ENTER, _LOOP, _MARK = "__mpitrain_enter__", "__mpitrain_loop__", "__mpitrain_mark__"
_INSIDE = "*"  # suffix of the place of a comprehension, which is no position
_MOST_MARKS = 10_000


class Follower(Protocol):
    """Receiver of the calls that a script makes at its loops; `mpitrain.run.resume.Resume` is one."""

    steps: int

    @property
    def replaying(self) -> bool: ...

    def is_script(self, filename: str) -> bool: ...

    def enter(self, place: str, frame: FrameType) -> Any: ...

    def begin(self, loop: Loop, frame: FrameType) -> None: ...

    def reach(self, place: str, loop: Loop | None, frame: FrameType) -> None: ...


class Loop:
    """Iterator of a `for` statement or of a comprehension.

    Attributes:
        place: File, line and column of the loop.
        frame: Identity of the frame that runs it.
        count: Number of items that it has returned or passed over.
        item: Last item.
        entry: Value that `Follower.enter` returned before the loop.
        continues: True until a run continues at the head of this loop.
        advance: Function that returns the next item.
    """

    __slots__ = (
        "__weakref__",
        "_follower",
        "_seen",
        "advance",
        "continues",
        "count",
        "entry",
        "frame",
        "item",
        "place",
    )

    def __init__(self, follower: Follower, iterable: Any, place: str, frame: FrameType, entry: Any) -> None:
        self.place, self.frame, self.count, self.item, self.entry = place, id(frame), 0, None, entry
        self.continues = False
        self._follower, self._seen = follower, follower.steps
        self.advance: Callable[[], Any] = iter(iterable).__next__

    def __iter__(self) -> Loop:
        return self

    def __next__(self) -> Any:
        follower = self._follower
        if (follower.steps != self._seen or self.continues) and not self.is_comprehension:
            follower.reach(self.place, self, sys._getframe(1))
            self._seen = follower.steps
        item = self.advance()
        self.count += 1
        self.item = item
        return item

    @property
    def is_comprehension(self) -> bool:
        """True if this is the loop of a comprehension, at which no run can continue."""
        return self.place.endswith(_INSIDE)

    def begin_again(self) -> None:
        """Take the steps so far as seen."""
        self._seen = self._follower.steps


class Loops:
    """All loops of a script; `install` compiles its files with the added calls from then on.

    Args:
        follower: Receives the calls that the script makes at its loops.
        folder: Folder of the script, with a separator at its end.
    """

    def __init__(self, follower: Follower, folder: str) -> None:
        self._follower, self._folder = follower, folder
        self._loops: list[weakref.ref[Loop]] = []
        self._entries: dict[tuple[int, str], Any] = {}
        self._marks: dict[tuple[int, str], int] = {}

    def install(self) -> None:
        """Define the added functions, and compile modules of the script with them when they are imported."""
        for name, function in ((_ENTER, self._enter), (_LOOP, self._loop), (_MARK, self._mark)):
            setattr(builtins, name, function)
        original = importlib.machinery.SourceFileLoader.get_code
        loops = self

        def get_code(self: Any, name: str) -> CodeType | None:
            path = self.get_filename(name)
            return loops.compile(path) if loops._follower.is_script(path) else original(self, name)

        importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[assignment]

    def compile(self, path: str) -> CodeType:
        """Return the code of a file with the added calls.

        Args:
            path: Path of the file.
        """
        path = os.path.abspath(path)  # by which files of the script are recognised
        tree = ast.parse(Path(path).read_bytes(), path)
        tree = _Rewriter(path.removeprefix(self._folder)).visit(tree)
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def execute(self, words: list[str]) -> None:
        """Run the script as `__main__`.

        Args:
            words: Path of the script, and its arguments.
        """
        sys.argv = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        module = ModuleType("__main__")
        vars(module).update(__file__=words[0], __builtins__=builtins, __spec__=None)
        sys.modules["__main__"] = module
        exec(self.compile(words[0]), vars(module))

    def active(self) -> list[Loop]:
        """Return the loops that are running, in the order in which they began.

        A loop that has ended, by whatever means, is referred to by nobody.
        """
        loops = [(reference, loop) for reference in self._loops if (loop := reference()) is not None]
        self._loops = [reference for reference, _ in loops]
        return [loop for _, loop in loops]

    def is_inside(self, frames: list[FrameType]) -> bool:
        """Return whether any of these frames runs a loop."""
        running = {loop.frame for loop in self.active() if not loop.is_comprehension} | {
            frame for frame, _ in self._marks
        }
        return any(id(frame) in running for frame in frames)

    # -- the added functions

    def _enter(self, place: str) -> None:
        frame = sys._getframe(1)
        entry = self._follower.enter(place, frame)
        if entry is not None:
            self._entries[id(frame), place] = entry

    def _loop(self, iterable: Any, place: str) -> Loop:
        frame = sys._getframe(1)
        loop = Loop(self._follower, iterable, place, frame, self._entries.pop((id(frame), place), None))
        while self._loops and self._loops[-1]() is None:
            self._loops.pop()
        if not loop.is_comprehension:
            self._follower.begin(loop, frame)
        self._loops.append(weakref.ref(loop))
        return loop

    def _mark(self, place: str) -> bool:
        frame = sys._getframe(1)
        key = (id(frame), place)
        steps = self._marks.setdefault(key, self._follower.steps)
        if self._follower.replaying or steps != self._follower.steps:
            self._follower.reach(place, None, frame)
            if len(self._marks) > _MOST_MARKS:
                self._marks.clear()
            self._marks[key] = self._follower.steps
        return True


class _Rewriter(ast.NodeTransformer):
    """Adds the calls to a syntax tree. file: name of the file in places."""

    def __init__(self, file: str) -> None:
        self._file = file

    def _call(self, name: str, node: ast.AST, *arguments: ast.expr, suffix: str = "") -> ast.Call:
        place = ast.Constant(f"{self._file}:{node.lineno}:{node.col_offset}{suffix}")  # type: ignore[attr-defined]
        call = ast.Call(ast.Name(name, ast.Load()), [*arguments, place], [])
        for part in ast.walk(call):
            if not hasattr(part, "lineno"):
                ast.copy_location(part, node)
        return call

    def visit_For(self, node: ast.For) -> Any:
        """Return the two statements of a `for` loop."""
        self.generic_visit(node)
        node.iter = self._call(_LOOP, node, node.iter)
        return [ast.copy_location(ast.Expr(self._call(_ENTER, node)), node), node]

    def visit_While(self, node: ast.While) -> Any:
        """Return a `while` loop that begins with a mark."""
        self.generic_visit(node)
        node.test = ast.copy_location(ast.BoolOp(ast.And(), [self._call(_MARK, node), node.test]), node.test)
        return node

    def _visit_comprehension(self, node: Any) -> Any:
        self.generic_visit(node)
        if any(isinstance(part, ast.Call) for part in _parts_of(node)):
            first = node.generators[0]
            first.iter = self._call(_LOOP, node, first.iter, suffix=_INSIDE)
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = _visit_comprehension


def _parts_of(node: Any) -> Iterator[ast.AST]:
    """Yield the nodes that a comprehension computes for each item."""
    first = node.generators[0].iter
    for child in ast.walk(node):
        if child is not first:
            yield child
