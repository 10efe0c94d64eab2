"""Text is a function of the token run: not of rounds, slices, drafters or neighbours."""

import dataclasses

import numpy as np
import pytest

from specjax import decode
from specjax.decode import DecodeConfig, RowResult, Weights
from specjax.drafters import make_drafter
from specjax.testing import perturbed, tiny_model
from specjax.text import (
  Detokenizer,
  TextRow,
  encode_prompt,
  generate_text,
  stream_text,
  text_result,
)
from specjax.verify import make_rule
from tests.experiments.tiny import BOS, END, VOCAB, byte_tokenizer

TOKENIZER = byte_tokenizer()
TARGET = tiny_model(0, vocab_size=VOCAB)
PROMPTS = [list(b"the hen and the hen and"), list(b"abc"), list(b" t")]
BUDGET = 24


def setup(name):
  """Weights and config of a drafter; the draft model is often right."""
  options = {}
  if name == "two_model":
    options = dict(window=4, vocab_size=VOCAB, num_real_tokens=VOCAB, max_length=512, policy="top_k")
  config = DecodeConfig(
    drafter=make_drafter(name, **options),
    rule=make_rule("greedy"),
    num_real_tokens=VOCAB,
    length_limit=96,
    prefill_widths=(32,),
  )
  return Weights(TARGET, perturbed(TARGET, 0.02) if name == "two_model" else None), config


def drain(stream):
  """Pieces and return value of a generator."""
  pieces = []
  while True:
    try:
      pieces.append(next(stream))
    except StopIteration as end:
      return pieces, end.value


# --- detokenization --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_pieces_joined_are_the_decoded_run(seed):
  """Any bytes, whole characters, broken ones and special tokens between them: nothing lost or doubled."""
  noise = np.random.default_rng(seed)
  tokens = noise.integers(0, VOCAB, 60).tolist() + list("größer 漢字 🎈".encode())
  noise.shuffle(parts := [tokens[i : i + 7] for i in range(0, len(tokens), 7)])
  tokens = [token for part in parts for token in part]
  detokenizer = Detokenizer(TOKENIZER)
  text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
  assert text == TOKENIZER.decode(tokens)


def test_a_character_is_held_back_until_it_is_whole():
  detokenizer = Detokenizer(TOKENIZER)
  assert [detokenizer.push(token) for token in "é🎈".encode()] == ["", "é", "", "", "", "🎈"]
  assert detokenizer.push(0xC3) == "" and detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"


# --- stop strings (case H7) ------------------------------------------------------------------------


def cut(text, stops, tokens=None):
  """What a row gives out for a text and how many tokens it took."""
  row = TextRow(TOKENIZER, stops)
  pieces = [
    row.push([token]) for token in (TOKENIZER.encode(text, add_bos=False) if tokens is None else tokens)
  ]
  return "".join(pieces) + row.close(), row


def test_h7_stop_of_two_byte_tokens_and_stop_with_leading_space():
  assert cut("one é two é! three", ["é!"])[0] == "one é two "
  assert cut("at the then", [" the"])[0] == "at"
  assert cut("atthe then", [" the"])[0] == "atthe"


def test_text_that_may_become_a_stop_is_held_back():
  row = TextRow(TOKENIZER, ["##stop"])
  assert row.push(list(b"ab##st")) == "ab"
  assert row.push(list(b"ay ##")) == "##stay "
  assert row.close() == "##" and not row.stopped


def test_the_stop_that_is_complete_first_counts():
  """However many tokens arrive at once: "b" is complete before "abcd" is."""
  tokens = list(b"xabcd")
  for size in (1, 2, 5):
    row = TextRow(TOKENIZER, ["abcd", "b"])
    pieces = [row.push(tokens[i : i + size]) for i in range(0, len(tokens), size)]
    assert "".join(pieces) == "xa" and row.stopped and row.seen == 3


@pytest.mark.parametrize("seed", range(10))
def test_stops_do_not_depend_on_how_tokens_arrive(seed):
  noise = np.random.default_rng(seed)
  text = "".join(noise.choice(list("ab é")) for _ in range(40))
  stops = ["".join(noise.choice(list("ab é")) for _ in range(n)) for n in (3, 4)]
  expected, single = cut(text, stops)
  ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
  if ends:
    starts = [text.find(stop) for stop in stops if stop in text and text.find(stop) + len(stop) == min(ends)]
    assert expected == text[: min(starts)]
  else:
    assert expected == text
  row, tokens = TextRow(TOKENIZER, stops), TOKENIZER.encode(text, add_bos=False)
  while tokens:
    size = int(noise.integers(1, 6))
    row.push(tokens[:size])
    tokens = tokens[size:]
  row.close()
  assert (row.text, row.seen, row.stopped) == (expected, single.seen, single.stopped)


@pytest.mark.parametrize("bad", ["stop", [""], [3]])
def test_bad_stop_strings_are_refused(bad):
  with pytest.raises(ValueError, match="stop_strings"):
    TextRow(TOKENIZER, bad)


def test_rounds_are_cut_with_the_text():
  """Σ emitted stays the number of tokens (case P1); accepted counts stay what the target accepted."""
  tokens = list(b"abcdefgh")
  result = RowResult(
    tokens,
    3,
    "length",
    proposed=[5, 5, 5],
    depth=[5, 5, 5],
    reached=[3, 3, 2],
    accepted=[2, 2, 1],
    emitted=[3, 3, 2],
    nodes=[6, 6, 3],
    width=[2, 2, 1],
    overlap=0.5,
    logprobs=[0.0] * 8,
  )
  row = TextRow(TOKENIZER, ["e"])
  row.push(tokens)
  row.close()
  found = text_result(row, result)
  assert (found.text, found.finish, found.tokens) == ("abcd", "stop", list(b"abcde"))
  assert (found.emitted, found.accepted, found.overlap) == ([3, 2], [2, 2], None)
  assert (found.nodes, found.width) == ([6, 6], [2, 2])
  assert len(found.logprobs) == 5


def test_stop_strings_wait_for_the_least_length():
  """ "ab" ends the text only where it is complete behind the third token; the earlier one stays text.

  Fails when a stop string that was passed over is found again with the next token.
  """
  for cut in (1, 2, 5):
    row = TextRow(TOKENIZER, ["ab"], min_new_tokens=3)
    tokens = list(b"abcabd")
    for start in range(0, len(tokens), cut):
      row.push(tokens[start : start + cut])
    assert (row.text, row.seen, row.stopped) == ("abc", 5, True)


# --- whole runs ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain():
  return generate_text(*setup("none"), TOKENIZER, PROMPTS, max_new_tokens=BUDGET, stop_ids=())


def test_text_is_the_decoded_run_and_statistics_fit(plain):
  for row in plain:
    assert row.text == TOKENIZER.decode(row.tokens) and len(row.tokens) == BUDGET
    assert row.finish == "length" and sum(row.emitted) == BUDGET and row.tau == 1.0


@pytest.mark.parametrize("name", ["prompt_lookup", pytest.param("two_model", marks=pytest.mark.slow)])
def test_speculation_and_slices_change_nothing(plain, name):
  weights, config = setup(name)
  found = generate_text(weights, config, TOKENIZER, PROMPTS, max_new_tokens=BUDGET, stop_ids=())
  assert [(row.text, row.tokens, row.finish) for row in found] == [
    (row.text, row.tokens, row.finish) for row in plain
  ]
  for size in (1, 3):
    pieces, result = drain(
      stream_text(
        weights, config, TOKENIZER, PROMPTS[0], max_new_tokens=BUDGET, stop_ids=(), rounds_per_slice=size
      )
    )
    assert "".join(pieces) == result.text == plain[0].text and all(pieces)
    assert dataclasses.replace(result, overlap=None) == dataclasses.replace(found[0], overlap=None)


@pytest.mark.parametrize(
  "name", ["prompt_lookup", *(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "two_model"))]
)
def test_stop_strings_in_a_batch(plain, name):
  """Each row ends at its own place; nothing recompiles, and other rows are not disturbed."""
  weights, config = setup(name)
  stop = plain[0].text[4:7]
  expected = [row.text.split(stop)[0] for row in plain]
  sizes = []
  for size in (1, 5):
    found = generate_text(
      weights,
      config,
      TOKENIZER,
      PROMPTS,
      max_new_tokens=BUDGET,
      stop_ids=(),
      stop_strings=[stop],
      rounds_per_slice=size,
    )
    sizes.append(decode.run_rounds._cache_size())
    assert [row.text for row in found] == expected
    for row, whole in zip(found, plain, strict=True):
      assert row.finish == ("stop" if stop in whole.text else "length")
      assert row.tokens == whole.tokens[: len(row.tokens)] and sum(row.emitted) == len(row.tokens)
      assert stop not in TOKENIZER.decode(row.tokens[:-1])
  assert found[0].finish == "stop" and sizes[0] == sizes[1]


@pytest.mark.parametrize("index", [2, 3, 4, 5])
def test_text_ends_at_the_end_token(plain, index):
  """Case H2: the end may be any draft of a block, or the bonus."""
  end = plain[0].tokens[index]
  first = plain[0].tokens.index(end)
  config = setup("two_model")[1]
  (found,) = generate_text(
    Weights(TARGET, TARGET), config, TOKENIZER, PROMPTS[:1], max_new_tokens=BUDGET, stop_ids=[end]
  )
  assert (found.tokens, found.finish) == (plain[0].tokens[: first + 1], "stop")
  assert found.text == TOKENIZER.decode(found.tokens)


def test_stop_before_budget_in_one_block(plain):
  """Case H1: with the stop inside the budget the reason is stop, with the budget before it length."""
  end = plain[0].tokens[2]
  first = plain[0].tokens.index(end)
  weights, config = Weights(TARGET, TARGET), setup("two_model")[1]
  for budget, reason in ((first + 1, "stop"), (first + 3, "stop"), (first, "length")):
    if budget:
      (found,) = generate_text(weights, config, TOKENIZER, PROMPTS[:1], max_new_tokens=budget, stop_ids=[end])
      assert (found.finish, len(found.tokens)) == (reason, min(budget, first + 1))


# --- prompts (cases K6, K7) ------------------------------------------------------------------------


def test_prompts_are_built_in_one_way_with_bos_once():
  plain_ids = encode_prompt(TOKENIZER, "the end", chat=False)
  chat_ids = encode_prompt(TOKENIZER, "the end", chat=True)
  assert plain_ids[0] == BOS and plain_ids.count(BOS) == 1
  assert chat_ids[0] == BOS and chat_ids.count(BOS) == 1
  assert chat_ids == encode_prompt(TOKENIZER, [{"role": "user", "content": "the end"}], chat=True)
  assert encode_prompt(TOKENIZER, "<|bos|>the end", chat=False) == plain_ids
  assert END not in chat_ids


def test_empty_prompts():
  """One documented result: BOS alone where the tokenizer has it, else an error; no NaN in statistics."""
  assert encode_prompt(TOKENIZER, "", chat=False) == [BOS]
  bare = byte_tokenizer(None)
  bare.adds_bos = False
  with pytest.raises(ValueError, match="prompt is empty"):
    encode_prompt(bare, "", chat=False)
  with pytest.raises(ValueError, match="conversation"):
    encode_prompt(bare, [{"role": "user", "content": "a"}], chat=False)
  with pytest.raises(ValueError, match="prompt 0 is empty"):
    generate_text(*setup("none"), TOKENIZER, [[]])
  full = generate_text(*setup("none"), TOKENIZER, [[1] * 96])[0]
  assert (full.text, full.tokens, full.finish) == ("", [], "length")
  assert (full.tau, full.acceptance_rate, full.accept_counts) == (0.0, 0.0, [0])
