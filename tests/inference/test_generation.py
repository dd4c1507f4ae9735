"""Generated text: independent of the cache and of other prompts; sampling; the end of a text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mpitrain.errors import InputError
from mpitrain.generate import main as generate
from mpitrain.inference.generation import BATCH, Draws, Generation, Sampling, StopSearch
from mpitrain.inference.placing import CachedBlocks, LanguageModel, RecomputedBlocks, Transformers, transformers_model
from mpitrain.inference.prompts import BytesCodec, TokenizerCodec, read_prompts
from mpitrain.models.gpt import GPT

VOCABULARY = 50
PROMPTS = [[7, 3, 3], [1], [9, 8, 7, 6, 5, 4, 3, 2, 1], [4, 4, 4], *([n, 2] for n in range(BATCH)), [7, 3, 3]]
SAMPLED = Sampling(0.9, top_k=20, top_p=0.95)


@pytest.fixture(scope="module")
def gpt() -> GPT:
    torch.manual_seed(3)
    model = GPT(VOCABULARY, layers=2, width=32, heads=4).eval()
    with torch.no_grad():  # new weights score all tokens alike
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    return model


def model_of(decoder, end=None, longest=None):
    class _Saved:
        class description:
            document_end = end

    return LanguageModel(_Saved, decoder, VOCABULARY, longest, torch.device("cpu"))


def cached_decoder(gpt):
    return CachedBlocks(gpt.pipeline_blocks(), "blocks.1")


def tokens_of(decoder, sampling, prompts, count=70, numbers=None, **options):
    texts = Generation(model_of(decoder, **options), sampling, count).run(prompts, Draws(5, prompts), numbers)
    return [one.tokens for one in texts]


@pytest.mark.parametrize("sampling", [Sampling(0), SAMPLED], ids=["greedy", "sampled"])
def test_the_cache_does_not_change_the_tokens(gpt, sampling):
    sequences = tokens_of(cached_decoder(gpt), sampling, PROMPTS[:4])
    assert sequences == tokens_of(RecomputedBlocks([("", gpt)]), sampling, PROMPTS[:4])
    assert all(len(tokens) == 70 for tokens in sequences)  # more than there is room for at first


def test_greedy_tokens_match_the_model(gpt):
    text = list(PROMPTS[2])
    with torch.no_grad():
        for _ in range(12):
            text.append(int(gpt(torch.tensor([text]))[0, -1].argmax()))
    assert tokens_of(cached_decoder(gpt), Sampling(0), PROMPTS, 12)[2] == text[9:]


@pytest.mark.parametrize("sampling", [Sampling(0), SAMPLED], ids=["greedy", "sampled"])
def test_a_continuation_does_not_depend_on_other_prompts_in_the_batch(gpt, sampling):
    sequences = tokens_of(cached_decoder(gpt), sampling, PROMPTS, 20)
    for number in range(4):
        assert sequences[number] == tokens_of(cached_decoder(gpt), sampling, [PROMPTS[number]], 20)[0]
    assert tokens_of(cached_decoder(gpt), sampling, PROMPTS, 20, numbers=[2, 0])[2] == sequences[2]
    again = tokens_of(cached_decoder(gpt), sampling, list(reversed(PROMPTS)), 20)
    assert again[1:-1] == sequences[-2:0:-1]
    assert (sequences[0] == sequences[-1]) == (sampling.temperature == 0)  # the same prompt again is drawn anew


def test_a_text_ends_at_the_end_token_and_at_the_last_position(gpt):
    free = tokens_of(cached_decoder(gpt), SAMPLED, PROMPTS, 30)
    end = free[1][4]
    model = model_of(cached_decoder(gpt), end=end)
    for text, one in zip(free, Generation(model, SAMPLED, 30).run(PROMPTS, Draws(5, PROMPTS)), strict=True):
        assert one.ended == (end in text)
        assert one.tokens == (text[: text.index(end)] if one.ended else text)
    short = tokens_of(cached_decoder(gpt), SAMPLED, PROMPTS, 30, longest=12)
    assert short == [text[: 12 - len(prompt)] for text, prompt in zip(free, PROMPTS, strict=True)]


def nucleus(scores, temperature, k, p):
    """Return the probabilities after top-k and top-p, by the formula, token by token."""
    weights = {token: float(torch.tensor(score / temperature, dtype=torch.float64).exp()) for token, score in scores}
    ranked = sorted(weights, key=lambda token: -weights[token])[: k or None]
    total, tokens, probability = sum(weights[token] for token in ranked), [], 0.0
    for token in ranked:
        if probability >= p:
            break
        tokens.append(token)
        probability += weights[token] / total
    total = sum(weights[token] for token in tokens)
    return {token: weights[token] / total for token in tokens}


@pytest.mark.parametrize(("temperature", "k", "p"), [(1, 0, 1), (0.7, 0, 1), (1.3, 5, 1), (1, 0, 0.6), (0.8, 9, 0.7)])
def test_top_k_and_top_p_match_their_formulas(temperature, k, p):
    torch.manual_seed(1)
    scores = torch.randn(3, 30) * 2
    probabilities = Sampling(temperature, k, p).probabilities(scores)
    for row, row_probabilities in zip(scores, probabilities, strict=True):
        expected = nucleus(list(enumerate(row.tolist())), temperature, k, p)
        assert {n: float(x) for n, x in enumerate(row_probabilities) if x > 0} == pytest.approx(expected, rel=1e-6)
    numbers = torch.arange(5000, dtype=torch.float64) / 5000  # evenly spread: tokens come as often as they are likely
    drawn = Sampling(temperature, k, p).choose(scores[:1].expand(5000, -1), numbers)
    assert torch.bincount(drawn, minlength=30) / 5000 == pytest.approx(probabilities[0].numpy(), abs=1e-3)


@pytest.mark.parametrize(("temperature", "k", "p", "least"), [(1, 0, 1, 0.3), (0.7, 12, 1, 0.05), (1.4, 9, 0.8, 0.2)])
def test_min_p_and_repetition_penalty_match_transformers(temperature, k, p, least):
    from transformers import generation

    torch.manual_seed(2)
    scores, texts = torch.randn(4, 30) * 3, torch.randint(30, (4, 7))
    chain = [generation.RepetitionPenaltyLogitsProcessor(1.7), generation.TemperatureLogitsWarper(float(temperature))]
    chain += [generation.TopKLogitsWarper(k)] if k else []
    chain += [generation.TopPLogitsWarper(float(p)), generation.MinPLogitsWarper(least)]
    expected = scores.double()
    for each in chain:
        expected = each(texts, expected)
    sampling = Sampling(temperature, k, p, min_p=least, repetition=1.7)
    probabilities = sampling.probabilities(sampling.penalize(scores, texts.tolist()))
    torch.testing.assert_close(probabilities, expected.softmax(1), rtol=1e-5, atol=1e-9)
    assert int((probabilities > 0).sum(1).max()) < 30


def test_a_repetition_penalty_prevents_loops(gpt):
    from transformers.generation import RepetitionPenaltyLogitsProcessor

    penalty, text = RepetitionPenaltyLogitsProcessor(2.5), list(PROMPTS[2])
    with torch.no_grad():
        for _ in range(20):
            text.append(int(penalty(torch.tensor([text]), gpt(torch.tensor([text]))[:, -1]).argmax()))
    tokens = tokens_of(cached_decoder(gpt), Sampling(0, repetition=2.5), PROMPTS[:4], 20)[2]
    assert (
        tokens == text[len(PROMPTS[2]) :] and tokens != tokens_of(cached_decoder(gpt), Sampling(0), PROMPTS[:4], 20)[2]
    )


def test_a_text_ends_before_a_stop_string_and_possible_beginnings_are_withheld(gpt):
    codec = BytesCodec()
    watch = StopSearch(codec.decoder(), ["END", "\n\n", "NDX"])
    assert [watch.add(byte) for byte in b"aE\nENe E"] == ["a", "", "E", "\n", "", "ENe", " ", ""]
    assert watch.finish() == "E" and not watch.stopped
    watch = StopSearch(codec.decoder(), ["END", "NDX"])
    assert [watch.add(byte) for byte in b"enENDX"] == ["e", "n", "", "", "", ""] and watch.stopped
    assert watch.finish() == ""
    whole = tokens_of(cached_decoder(gpt), SAMPLED, PROMPTS[:4], 40)
    stop = bytes(whole[0][10:12]).decode()  # its tokens are bytes of ASCII here
    generation = Generation(model_of(cached_decoder(gpt)), SAMPLED, 40, lambda: StopSearch(codec.decoder(), [stop]))
    texts = generation.run(PROMPTS[:4], Draws(5, PROMPTS[:4]))
    for tokens, one in zip(whole, texts, strict=True):
        at = bytes(tokens).find(stop.encode())
        assert one.tokens == (tokens if at < 0 else tokens[: at + 2]) and one.ended == (at >= 0)
    assert texts[0].ended


def test_an_empty_stop_string_is_refused(capsys):
    assert generate(["nowhere", "--prompt", "a", "--stop", ""]) == 2
    assert "--stop ''" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_p": 1.1},
        {"min_p": -0.1},
        {"repetition": 0},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0},
    ],
)
def test_invalid_sampling_options_are_refused(wrong):
    with pytest.raises(InputError, match="use"):
        Sampling(**wrong)


TEXT = "Größe, naïve café, 数字 and 🙂🙃, \n  spaces\tand tabs"


def test_text_decoded_token_by_token_equals_the_whole_text(tmp_path):
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([TEXT[:20], "spaces and tabs"], vocab_size=300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for codec in (BytesCodec(), TokenizerCodec(tmp_path / "tokenizer.json")):
        tokens, decoder = codec.encode(TEXT), codec.decoder()
        pieces = [decoder.add(token) for token in tokens]
        assert "".join(pieces) + decoder.finish() == TEXT
        assert len([piece for piece in pieces if piece]) > len(TEXT) / 2  # as it comes, not at the end
        half = tokens[:-1] + codec.encode("é")[:1]
        assert codec.decoder().decode(half).endswith("\ufffd")  # half a character is told


def test_prompts_are_lines_or_json_lines(tmp_path):
    lines, objects = tmp_path / "a.txt", tmp_path / "a.jsonl"
    lines.write_bytes(b"one\r\n\n two \n")
    objects.write_text('{"prompt": "one\\ntwo", "other": 1}\n\n{"prompt": ""}\n')
    assert (read_prompts(lines), read_prompts(objects)) == (["one", " two "], ["one\ntwo", ""])
    for content, message in (('{"text": "a"}', "line 1"), ("[]", "line 1"), ("", "no prompt")):
        objects.write_text(content)
        with pytest.raises(InputError, match=message):
            read_prompts(objects)
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(Path(tmp_path))


@pytest.mark.campaign
def test_a_transformers_model_uses_its_own_cache():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(2)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=128, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()

    class Scores(torch.nn.Module):
        def forward(self, x):
            return model(x, use_cache=False).logits

    assert transformers_model(model) is model
    for sampling in (Sampling(0), SAMPLED):
        sequences = tokens_of(Transformers(model), sampling, PROMPTS, 20)
        assert sequences == tokens_of(RecomputedBlocks([("", Scores())]), sampling, PROMPTS, 20)
