"""The built-in GPT with other norms, positions, MLPs and heads, and with separated documents."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from mpitrain.errors import InputError
from mpitrain.models.gpt import GPT, Form
from mpitrain.pipe.partition import check_slices, listed_blocks

MODERN = {
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "kv_heads": 2,
    "bias": False,
    "qkv_bias": True,
    "qk_norm": True,
    "rope_base": 500.0,
}
LEARNED = {"positions": "learned"}
FORMS = [{}, MODERN, LEARNED, MODERN | LEARNED | {"bias": True, "kv_heads": 1, "hidden": 24}]
END = 5


def make_gpt(form: dict, apart: int | None = None, tied: bool = False, dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    model = GPT(23, 3, 16, 4, dropout, tied=tied, max_positions=12, form=Form(**form), apart=apart)
    with torch.no_grad():
        for parameter in model.parameters():  # so that nothing hides what attention does
            parameter.normal_(std=0.3)
    return model.eval()


def make_tokens() -> torch.Tensor:
    """Return samples with documents of different lengths; the last one of the first sample has no end."""
    return torch.tensor([[1, 2, END, 4, END, END, 7, 8, 9, 10, 11, 12], [END, 3, 3, 3, 3, 3, 1, END, 2, 2, 6, END]])


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("apart", [None, END])
def test_slices_and_blocks_give_the_scores_of_the_whole_model(form, apart):
    model, tokens = make_gpt(form, apart), make_tokens()
    expected = model(tokens)
    x = tokens
    for name, block in listed_blocks(model):
        assert model.get_submodule(name) is block
        x = block(x)
    torch.testing.assert_close(x, expected, rtol=0, atol=0)
    check_slices(listed_blocks(model), tokens, tokens, 3)
    states: dict[str, list[tuple[torch.Tensor, ...]]] = {}
    scores = []
    for lo, hi in ((0, 5), (5, 6), (6, 7), (7, 12)):  # as a cache of generated text grows: states merged into one
        x = tokens[:, lo:hi]
        for name, block in listed_blocks(model):
            if hasattr(block, "forward_slice"):
                past = states.setdefault(name, [])
                x, state = block.forward_slice(x, past)
                states[name] = [tuple(torch.cat(each, 2) for each in zip(*past, state, strict=True))]
            else:
                x = block(x)
        scores.append(x)
    torch.testing.assert_close(torch.cat(scores, 1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_separated_documents_are_scored_independently(form):
    separate, joined, tokens = make_gpt(form, END), make_gpt(form), make_tokens()
    assert separate.state_dict().keys() == joined.state_dict().keys()
    scores = separate(tokens)
    for row, bounds in zip(range(2), ((0, 3, 5, 6, 12), (0, 1, 8, 12)), strict=True):
        for lo, hi in pairwise(bounds):
            alone = joined(tokens[row : row + 1, lo:hi])[0]
            torch.testing.assert_close(scores[row, lo:hi], alone, rtol=1e-5, atol=1e-5)
    assert (scores - joined(tokens)).abs().max() > 1e-2


def test_grouped_queries_equal_attention_with_repeated_keys_and_values():
    grouped = make_gpt({"kv_heads": 2})
    whole = make_gpt({})
    state = grouped.state_dict()
    for name in [name for name in state if ".qkv." in name]:
        q, k, v = state[name].split([16, 8, 8])
        k, v = (t.unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1) for t in (k, v))
        state[name] = torch.cat([q, k, v])
    whole.load_state_dict(state)
    torch.testing.assert_close(grouped(make_tokens()), whole(make_tokens()))
    _, (k, v) = grouped.blocks[0].forward_slice(torch.randn(2, 3, 16), [])
    assert k.shape == v.shape == (2, 2, 3, 4)  # kept as they are, not repeated


def test_a_sequence_beyond_the_table_of_learned_positions_is_refused():
    model = make_gpt(LEARNED)
    with pytest.raises(InputError, match=r"sequence has 13 tokens, .* 12 learned positions; set model.sequence"):
        model(torch.zeros(1, 13, dtype=torch.int64))


def test_gated_layers_have_about_as_many_parameters_as_plain_ones():
    assert Form(mlp="swiglu").hidden_features(128) == 384
    assert Form(mlp="swiglu").hidden_features(4096) == 10944
    assert Form().hidden_features(128) == 512 and Form(mlp="swiglu", hidden=100).hidden_features(128) == 100
