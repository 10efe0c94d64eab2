"""The search for a skip set: what it measures, which set comes next, a killed run, its flags."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import flags as shared
from experiments import questions, runtime, search_skips
from specjax.checkpoints import load_model, load_skips
from specjax.models import SkipSet
from specjax.testing import tiny_config, tiny_model
from specjax.training.agreement import agreed, known_of
from specjax.training.batches import Packed
from tests import by_hand
from tests.experiments.tiny import parsed, run_script
from tests.training.texts import random_texts

LENGTHS = [9, 12, 7]
PLAN = search_skips.Plan(evaluations=60, tokens=64, changes=3, window=4, seed=1)


def said_by_hand(model, text, place, skips):
  """What the draft says at ``place`` of a text: the target's rows before, its own at the token before it."""
  rows, states = by_hand.text_rows(model, text[: place - 1])
  x = by_hand.through(model, by_hand.embedded(model, text[place - 1]), rows, 0, len(model.layers), skips)
  assert len(states) == place - 1
  return by_hand.logits(model, x).argmax()


def test_agreement_is_that_of_the_draft_behind_the_targets_rows():
  """Packed texts, counted place by place in numpy, for a few sets; the whole model agrees with itself.

  Fails when a place sees the target's row of itself, another sample, or rows of the draft at other places.
  """
  model, texts = tiny_model(4, num_layers=3), random_texts(5, LENGTHS)
  packed = Packed(texts, range(len(LENGTHS)), row_length=24)
  assert packed.num_rows < len(LENGTHS)
  batch = jax.tree.map(jnp.asarray, packed.read(range(packed.num_rows)))
  known = known_of(model, batch)
  places = [(s, u) for s in texts.samples for u in range(1, len(s.tokens)) if s.mask[u]]
  assert int(agreed(model, batch, known, jnp.ones((3, 2), bool))) == len(places)
  counts = set()
  for skips in (SkipSet(3, (1,), (0,)), SkipSet(3, (), (2,)), SkipSet(3, (0, 2), (1,))):
    kept = np.ones((3, 2), bool)
    kept[list(skips.attention), 0] = kept[list(skips.ff), 1] = False
    best = [said_by_hand(model, s.tokens, u, None) for s, u in places]
    expected = sum(said_by_hand(model, s.tokens, u, skips) == b for (s, u), b in zip(places, best))
    assert int(agreed(model, batch, known, jnp.asarray(kept))) == expected
    counts.add(expected)
  assert len(counts) > 1


def judged(skipped):
  """A made-up law: sublayers of higher numbers do less harm, both of a layer more than each."""
  both = len(skipped) - len({i // 2 for i in skipped})
  return max(0.0, 1 - sum(0.3 / (1 + i) for i in skipped) - 0.2 * both)


def rows_until(count, plan=PLAN, layers=5):
  costs = search_skips.Costs(tiny_model(0, num_layers=layers), [1.0, 1.1, 1.2, 1.3, 1.4])
  rows = []
  while len(rows) < count and (skipped := search_skips.next_set(rows, layers, plan)) is not None:
    window, speedup = costs.best(judged(skipped), skipped)
    rows.append(dict(skipped=list(skipped), agreement=judged(skipped), window=window, speedup=speedup))
  return rows


def test_sets_come_in_order_and_get_better():
  """Each alone, then the least harmful together, then changes of the best, none twice; the rows decide."""
  rows = rows_until(99)
  assert len(rows) == PLAN.evaluations
  assert [row["skipped"] for row in rows[:10]] == [[i] for i in range(10)]
  assert rows[10]["skipped"] == [8, 9] and rows[11]["skipped"] == [7, 8, 9]
  assert rows[18]["skipped"] == list(range(10))
  for number in range(19, len(rows)):
    best = max(rows[:number], key=lambda row: row["speedup"])["skipped"]
    assert 1 <= len(set(best) ^ set(rows[number]["skipped"])) <= PLAN.changes
    assert rows[number]["skipped"] not in [row["skipped"] for row in rows[:number]]
  assert max(row["speedup"] for row in rows[19:]) > 1.03 * max(row["speedup"] for row in rows[:19])
  assert rows == [*rows_until(25), *rows[25:]]  # the same from wherever it goes on
  assert rows != rows_until(99, search_skips.Plan(60, 64, 3, 4, seed=2))


def test_speedups_follow_from_bytes_and_acceptance():
  """Against the formula, and bytes counted from the config."""
  model = tiny_model(0)
  c = tiny_config()
  attention = 2 * c.d_model * (c.num_heads + c.num_kv_heads) * c.head_dim + c.d_model  # q and o, k and v
  ff = 3 * c.d_model * c.d_ff + c.d_model
  whole = c.num_layers * (attention + ff) + c.vocab_size * c.d_model
  costs = search_skips.Costs(model, [1.0, 1.2, 1.3, 1.4])
  step = 1 - (attention + ff) / whole
  assert costs.step((1, 2)) == pytest.approx(step)
  speeds = [1.8 / (step + 1.2), 2.44 / (2 * step + 1.3), 2.952 / (3 * step + 1.4)]
  window, speedup = costs.best(0.8, (1, 2))
  assert window == int(np.argmax(speeds)) + 1 and speedup == pytest.approx(max(speeds))


@pytest.mark.slow
def test_the_script_goes_on_and_its_set_drafts(models, tmp_path, capsys, monkeypatch):
  """A killed run ends with the rows of an uninterrupted one; the best set is a drafter of the scripts."""
  asked = [f"--model={models[0]}", "--evaluations=6", "--judged_tokens=6", "--max_new_tokens=6", "--limit=1"]
  monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))  # nothing is calibrated there
  whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
  assert run_script(search_skips, *asked, f"--output={whole}") == 0
  said = capsys.readouterr().out
  agreement = search_skips.judge

  def killed(*args):
    inner, calls = agreement(*args), []

    def once(skipped):
      calls.append(skipped)
      if len(calls) > 3:
        raise KeyboardInterrupt
      return inner(skipped)

    return once

  monkeypatch.setattr(search_skips, "judge", killed)
  assert run_script(search_skips, *asked, f"--output={cut}") == 130
  monkeypatch.setattr(search_skips, "judge", agreement)
  assert run_script(search_skips, *asked, f"--output={cut}") == 0
  read = lambda folder, name: open(os.path.join(folder, name), encoding="utf-8").read()
  assert read(whole, "rows.jsonl") == read(cut, "rows.jsonl")
  assert read(whole, "skips.json") == read(cut, "skips.json")
  best = max(map(json.loads, read(whole, "rows.jsonl").splitlines()), key=lambda row: row["speedup"])
  skips = load_skips(os.path.join(whole, "skips.json"), tiny_config())
  assert skips == search_skips.skip_set(best["skipped"], 2)
  name = f"self_speculation[skips={whole}/skips.json,window={best['window']}]"
  assert f'--drafter="{name}"' in said
  job = runtime.Job(load_model(models[0]), None, None, True, {})
  with parsed():
    method = runtime.make_method(job, name, 128)
    assert runtime.head_digest(job, name) is not None
  assert method.config.drafter.exit == skips.prefix and method.window == best["window"]


BAD = {
  "data": ("nowhere|--data: 'nowhere' is not a folder", "/|--data and --questions"),
  "judged_tokens": ("0",),
  "evaluations": ("0", "many"),
  "most_changes": ("0",),
  "longest_window": ("0", "65"),
  "quick": ("maybe",),
  "output": ("|--output is empty",),
  "drafter": ("none|--drafter is not used by search_skips",),
}
CASES = [(flag, *value.partition("|")[::2]) for flag, values in BAD.items() for value in values]


@pytest.mark.parametrize(("flag", "value", "words"), CASES)
def test_a_bad_value_is_one_line(monkeypatch, capsys, tmp_path, flag, value, words):
  monkeypatch.setattr(runtime, "_load", lambda *_: pytest.fail("a model was loaded"))
  good = {"output": str(tmp_path / "run"), "questions": questions.DEFAULT_FILE}
  arguments = [f"--{name}={text}" for name, text in (good | {flag: value}).items()]
  assert run_script(search_skips, *arguments) == 2
  (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
  assert (words or flag) in line


def test_every_flag_is_here():
  defined = {flag.name for flag in search_skips.flags.FLAGS.get_flags_for_module(search_skips)}
  assert defined - set(BAD) == set()
  assert {flag.name for flag in search_skips.flags.FLAGS.get_flags_for_module(shared)} >= set(
    search_skips.USED
  )
