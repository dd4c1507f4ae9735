"""The generation benchmark, which compares the same tokens from the same weights."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.generate import FAMILIES, PROMPTS, measure, report


@pytest.mark.ranks(1)
def test_a_quick_run_generates_the_tokens_of_transformers(world):
    pytest.importorskip("transformers")
    options = argparse.Namespace(quick=True, repeats=3, seconds=5.0)
    result = measure(world, options)
    summary = report({1: result}, options)
    assert [row[:2] for row in summary.tables[0].rows] == [(family, count) for family in FAMILIES for count in PROMPTS]
    for family, count, ours, theirs, ratio in summary.tables[0].rows:
        seconds = result["seconds"][family][str(count)]
        assert ours == pytest.approx(count * 16 / seconds["mpitrain"]["median"])
        assert ratio == pytest.approx(ours / theirs)
    assert "2 layers of width 128" in summary.tables[0].note
