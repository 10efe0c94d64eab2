"""Searches the sublayers that the target drafts best without, for ``--drafter=self_speculation[skips=FILE]``.

  python -m experiments.search_skips --output=RUN [--data=DATA] [--evaluations=240]

Draft & Verify (Zhang et al. 2023) chooses attention and feed-forward sublayers apart, by Bayesian
optimisation of the time a token takes. Here a set is judged by the speedup that is predicted for it,

  max over G of  (1 + α + … + α^G) / (G c + v(G + 1)),

where α is how often the thinned target's first draft is what the whole one says next (measured, greedy, on
text of the target's own; later drafts are taken to be as good), c is a draft step's share of the target's
bytes, output head included, and v(N) what a round of N nodes costs in plain rounds: from the calibration of
this device, without one as `control.assumed` has it.

The search is simple and seeded. It skips each sublayer alone; then the k least harmful ones together, for
several k; then it changes up to --most_changes sublayers of the best set so far at random, keeping what is
better, until --evaluations sets were judged. Which set comes next follows from the rows so far: a killed run
goes on as if it had not been. RUN/skips.json is the best set so far.

Text is what the target writes behind --questions (default: the shipped prompts), or a data set of
experiments.distill_data.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import flags

from experiments import calibration, questions, results, runtime
from experiments import flags as shared
from specjax import analysis, control, decode, text
from specjax.checkpoints import save_skips
from specjax.models import Decoder, SkipSet
from specjax.training.agreement import Known, agreed, known_of
from specjax.training.batches import Batch, Packed
from specjax.training.data import Dataset, Sample
from specjax.tree import TokenTree

DATA = flags.DEFINE_list(
  "data", [], "Folders of data sets, to judge on their first answers instead.", allow_override=True
)
TOKENS = flags.DEFINE_integer("judged_tokens", 2048, "Tokens of answers to judge on, at most.", 1)
EVALUATIONS = flags.DEFINE_integer("evaluations", 240, "Skip sets to judge.", 1)
CHANGES = flags.DEFINE_integer("most_changes", 3, "Sublayers that a random step changes, at most.", 1)
WINDOW = flags.DEFINE_integer("longest_window", 8, "Drafts a round to think of, at most.", 1, 64)
QUICK = flags.DEFINE_bool("quick", False, "A few sets on little text.", allow_override=True)

SKIPS = "skips.json"
USED = (
  "model",
  "dtype",
  "seed",
  "output",
  "compilation_cache",
  "calibration",
  "max_new_tokens",
  "chat",
  "attention",
)
# Sizes of nested sets that are tried, and tokens of a row of text.
_SIZES, _ROW = 24, 512
# Tokens of a text in the middle of its answer, for which costs are looked up.
_LIVE = 256
_QUICK_EVALUATIONS, _QUICK_TOKENS, _QUICK_QUESTIONS = 12, 256, 2


@dataclasses.dataclass(frozen=True)
class Plan:
  """The flags, checked."""

  evaluations: int
  tokens: int
  changes: int
  window: int
  seed: int


def plan_from_flags() -> Plan:
  """Raises ValueError for what can be known to be wrong before a model is there."""
  defined = {flag.name for flag in flags.FLAGS.flags_by_module_dict()[shared.__name__]}
  shared.refuse(sorted(defined - set(USED)), "search_skips", "its own flags")
  if not shared.OUTPUT.value:
    raise ValueError("--output is empty; see --help")
  for folder in DATA.value:
    if not os.path.isdir(folder):
      raise ValueError(f"--data: {folder!r} is not a folder")
  if DATA.value and questions.QUESTIONS.value:
    raise ValueError(f"--data and --questions = {questions.QUESTIONS.value!r}: one is enough")
  quick = QUICK.value
  return Plan(
    evaluations=min(EVALUATIONS.value, _QUICK_EVALUATIONS) if quick else EVALUATIONS.value,
    tokens=min(TOKENS.value, _QUICK_TOKENS) if quick else TOKENS.value,
    changes=CHANGES.value,
    window=WINDOW.value,
    seed=shared.SEED.value,
  )


# --- the search ------------------------------------------------------------------------------------


def next_set(rows: Sequence[Mapping[str, Any]], num_layers: int, plan: Plan) -> tuple[int, ...] | None:
  """The set to judge after those of ``rows``: numbers of skipped sublayers, ascending; None at the end.

  Sublayer 2 i is the attention of layer i, 2 i + 1 its feed-forward.
  """
  number, count = len(rows), 2 * num_layers
  if number >= plan.evaluations:
    return None
  if number < count:
    return (number,)
  seen = {tuple(row["skipped"]) for row in rows}
  least_harmful = sorted(range(count), key=lambda i: -rows[i]["agreement"])  # of equals the first
  # All sublayers skipped, the embedding says the next token: that is a draft, too.
  sizes = np.unique(np.linspace(2, count, _SIZES).astype(int)).tolist()
  if number < count + len(sizes):
    return tuple(sorted(least_harmful[: sizes[number - count]]))
  best = set(max(rows, key=lambda row: row["speedup"])["skipped"])
  random = np.random.default_rng([plan.seed, number])
  for _ in range(100 * count):
    changed = random.choice(count, size=random.integers(1, min(plan.changes, count) + 1), replace=False)
    candidate = tuple(sorted(best ^ set(changed.tolist())))
    if candidate and candidate not in seen:
      return candidate
  return None  # all that is near was judged


def skip_set(skipped: Sequence[int], num_layers: int) -> SkipSet:
  """Numbers of sublayers as a `SkipSet`."""
  attention, ff = (tuple(i // 2 for i in skipped if i % 2 == part) for part in (0, 1))
  return SkipSet(num_layers, attention, ff)


class Costs:
  """Predicted speedups.

  Attributes:
    shares: float ``[2 L]``, each sublayer's share of the bytes that a plain round reads.
    verify: float ``[G + 1]``, cost of rounds of 1 … G + 1 nodes in plain rounds.
  """

  def __init__(self, model: Decoder, verify: Sequence[float]):
    size = lambda *parts: sum(leaf.nbytes for leaf in jax.tree.leaves(parts))
    sublayers = [
      size(*part)
      for layer in model.layers
      for part in ((layer.attention_norm, layer.attention), (layer.ff_norm, layer.ff))
    ]
    head = size(model.embed if model.head is None else model.head)
    self.shares = np.array(sublayers) / (sum(sublayers) + head)
    self.verify = np.asarray(verify, np.float64)

  def step(self, skipped: Sequence[int]) -> float:
    """c, a draft step in plain rounds."""
    return float(1 - self.shares[list(skipped)].sum())

  def best(self, agreement: float, skipped: Sequence[int]) -> tuple[int, float]:
    """The window that is fastest, at least 1, and the speedup over plain decoding there."""
    c = self.step(skipped)
    windows = range(1, len(self.verify))
    speeds = [analysis.iid_tokens(agreement, g) / (g * c + self.verify[g]) for g in windows]
    at = int(np.argmax(speeds))
    return windows[at], float(speeds[at])


def verify_costs(job: runtime.Job, most: int) -> tuple[list[float], str]:
  """What rounds of 1 … most + 1 nodes cost in plain rounds, and where that is from."""
  table = calibration.load(runtime.calibration_key(job))
  if table is not None:
    at = lambda nodes: float(table.round_ms_at(nodes, live=_LIVE) / table.round_ms_at(1, live=_LIVE))
    return [at(nodes) for nodes in range(1, most + 2)], f"calibration of {table.made}"
  beliefs = control.assumed(tuple(TokenTree.chain(g) for g in range(1, most + 1)), draft_step=0.0)
  return np.asarray(beliefs.verify)[:, 0].tolist(), "assumed: no calibration"


# --- the text --------------------------------------------------------------------------------------


class Written:
  """Samples that were made here, as `Packed` wants them."""

  def __init__(self, samples: Sequence[Sample]):
    self._samples = samples

  def __len__(self) -> int:
    return len(self._samples)

  def __getitem__(self, i: int) -> Sample:
    return self._samples[i]

  def features(self, i: int) -> None:
    return None


def written(job: runtime.Job, asked: Sequence[questions.Question], most: int) -> Written:
  """What the target writes behind the questions, greedily, until there are ``most`` tokens."""
  encode = lambda question: text.encode_prompt(job.target.tokenizer, question.turns[0], chat=job.chat)
  prompts, budget = [encode(question) for question in asked], shared.MAX_NEW_TOKENS.value
  method = runtime.make_method(job, "none", runtime.length_limit(job, max(map(len, prompts)) + budget))
  samples, left = [], most
  for prompt in tqdm.tqdm(prompts, desc="writing", unit="prompt", file=sys.stderr):
    if left <= 0:
      break
    state = decode.prefill(
      method.weights, method.config, [prompt], max_new_tokens=min(budget, left), stop_ids=job.stop_ids
    )
    (row,) = decode.results(decode.generate(method.weights, state, method.config))
    tokens = np.array([*prompt, *row.tokens], np.int32)
    samples.append(Sample(tokens, np.arange(len(tokens)) >= len(prompt)))
    left -= len(row.tokens)
  return Written(samples)


def text_of(job: runtime.Job, plan: Plan) -> Batch:
  """All the text in packed rows."""
  if not DATA.value:
    asked = questions.from_flags().questions[: _QUICK_QUESTIONS if QUICK.value else None]
    source = written(job, asked, plan.tokens)
    chosen = list(range(len(source)))
  else:
    source, chosen, found = Dataset.open(*DATA.value), [], 0
    for i in range(len(source)):
      if found >= plan.tokens:
        break
      chosen.append(i)
      found += int(source[i].mask.sum())
  longest = max(len(source[i].tokens) for i in chosen)
  packed = Packed(source, chosen, row_length=max(_ROW, longest), seed=plan.seed)
  return jax.tree.map(jnp.asarray, packed.read(range(packed.num_rows)))


# --- the run ---------------------------------------------------------------------------------------


def judge(model: Decoder, batch: Batch, known: Known) -> Callable[[Sequence[int]], float]:
  """``skipped → agreement``."""
  learned = int((batch.counted >= 0).sum())

  def agreement(skipped: Sequence[int]) -> float:
    kept = np.ones(2 * model.config.num_layers, bool)
    kept[list(skipped)] = False
    return int(agreed(model, batch, known, jnp.asarray(kept.reshape(-1, 2)))) / learned

  return agreement


def search(
  plan: Plan, directory: results.RunDirectory, num_layers: int, costs: Costs, agreement: Callable
) -> None:
  """Judges what is missing; after each set the best so far is on the disk."""
  with tqdm.tqdm(total=plan.evaluations, initial=len(directory.rows), unit="set", file=sys.stderr) as bar:
    while (skipped := next_set(directory.rows, num_layers, plan)) is not None:
      found = agreement(skipped)
      window, speedup = costs.best(found, skipped)
      row = dict(
        skipped=list(skipped), agreement=found, c=costs.step(skipped), window=window, speedup=speedup
      )
      directory.append(row)
      best = max(directory.rows, key=lambda row: row["speedup"])
      if best is row:
        save_skips(os.path.join(directory.path, SKIPS), skip_set(skipped, num_layers), row)
      bar.set_postfix(best=f"{best['speedup']:.2f} x")
      bar.update()


def show(directory: results.RunDirectory, num_layers: int) -> None:
  """The best sets of several sizes, and how to run the best one."""
  ranked = sorted(directory.rows, key=lambda row: -row["speedup"])
  lines = []
  for row in ranked[:8]:
    skips = skip_set(row["skipped"], num_layers)
    of = lambda layers: ",".join(map(str, layers)) or "-"
    figures = [f"{row['agreement']:.3f}", f"{row['c']:.2f}", row["window"], f"{row['speedup']:.2f} x"]
    lines.append([of(skips.attention), of(skips.ff), *figures])
  results.table(["attention", "feed-forward", "agreement", "c", "window", "predicted"], lines)
  path = os.path.join(directory.path, SKIPS)
  print(f'\n--drafter="self_speculation[skips={path},window={ranked[0]["window"]}]"')


def main(_: Sequence[str]) -> None:
  plan = plan_from_flags()
  job = runtime.load_job(["none"])
  model = job.target.model
  directory = results.RunDirectory(
    shared.OUTPUT.value, "search_skips", [shared, questions, sys.modules[__name__]]
  )
  verify, source = verify_costs(job, plan.window)
  batch = text_of(job, plan)
  directory.update(verify=verify, costs=source, tokens=int((batch.counted >= 0).sum()))
  num_layers = job.target.config.num_layers
  search(plan, directory, num_layers, Costs(model, verify), judge(model, batch, known_of(model, batch)))
  directory.finish(rows=len(directory.rows))
  show(directory, num_layers)


if __name__ == "__main__":
  shared.run(main)
