"""Greedy decoding here and in Hugging Face transformers, with the same weights: identity and speed.

  python -m experiments.parity --questions=FILE.jsonl --limit=20 --max_new_tokens=64

Needs the extra ``parity``. The loaded weights are saved in the Hugging Face layout, into a temporary
folder, and read by transformers: nothing is downloaded and both sides have the same numbers. The two
alternate question by question, with the same prompt ids, stop ids and budgets.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from absl import flags

from experiments import flags as shared
from experiments import measure, questions, results, runtime, summary
from specjax import text
from specjax.checkpoints import save_hf

TORCH_THREADS = flags.DEFINE_integer("torch_threads", 2, "Threads of torch.", 1)


class Transformers:
  """The target's weights in transformers on the CPU, decoding greedily."""

  def __init__(self, job: runtime.Job):
    """
    Raises:
      ValueError: torch or transformers is not installed.
    """
    try:
      import torch
      import transformers
    except ImportError as error:
      raise ValueError(f"{error.name} is not installed; it comes with the extra: specjax[parity]") from None
    self._torch = torch
    torch.set_num_threads(TORCH_THREADS.value)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
    self._stop_ids = list(job.stop_ids)
    with tempfile.TemporaryDirectory() as folder:
      path = os.path.join(folder, "model")
      save_hf(path, job.target.model)
      dtype = getattr(torch, shared.DTYPE.value)
      self._model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

  def run(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[list[int], float, float]:
    """New token ids, seconds in all, and seconds of decoding: from the first new token to the last."""
    ids = self._torch.tensor([list(prompt)])
    clock = _Clock()
    start = time.perf_counter()
    with self._torch.inference_mode():
      output = self._model.generate(
        ids,
        attention_mask=self._torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=self._stop_ids or None,
        pad_token_id=(self._stop_ids or [0])[0],
        streamer=clock,
      )
    return output[0, len(prompt) :].tolist(), time.perf_counter() - start, clock.times[-1] - clock.times[1]


class _Clock:
  """A transformers streamer that notes when tokens arrive; the prompt comes first."""

  def __init__(self):
    self.times: list[float] = []

  def put(self, value: Any) -> None:
    self.times.append(time.perf_counter())

  def end(self) -> None:
    pass


def main(_: list[str]) -> None:
  if shared.BATCH_SIZE.value != 1 or not runtime.greedy():
    raise ValueError("parity compares one greedy row at a time; leave --batch_size and --temperature alone")
  asked = questions.from_flags()
  budget = shared.MAX_NEW_TOKENS.value
  job = runtime.load_job([summary.BASELINE])
  with runtime.progress("handing the weights to transformers"):
    theirs = Transformers(job)
  prompts = [text.encode_prompt(job.target.tokenizer, question.turns[0], chat=job.chat) for question in asked]
  lengths = [len(prompt) for prompt in prompts]
  method = runtime.make_method(job, summary.BASELINE, runtime.length_limit(job, max(lengths) + budget))
  if max(lengths) + budget > method.config.length_limit:
    raise ValueError(
      f"a prompt of {max(lengths)} tokens does not fit {method.config.length_limit} with its answer"
    )
  with runtime.progress("compiling"):
    measure.compile_method(job, method, lengths, 1)
  for _ in range(shared.WARMUP.value):
    measure.run_timed(job, method, prompts[:1], budget)
    theirs.run(prompts[0], budget)

  sums = {name: 0.0 for name in ("tokens", "ours", "ours_decode", "steps", "theirs", "theirs_decode")}
  same = 0
  for number, (question, prompt) in enumerate(zip(asked, prompts, strict=True)):
    ours: list[measure.Timed] = []
    others: list[tuple[list[int], float, float]] = []
    for repeat in range(shared.REPEATS.value):
      # Who goes first changes.
      for turn in (0, 1) if (number + repeat) % 2 else (1, 0):
        if turn:
          ours.append(measure.run_timed(job, method, [prompt], budget))
        else:
          others.append(theirs.run(prompt, budget))
    tokens = ours[0].rows[0].tokens
    sums["tokens"] += len(tokens)
    sums["steps"] += max(len(others[0][0]) - 1, 0)
    sums["ours"] += results.median(run.prefill_s + run.decode_s for run in ours)
    sums["ours_decode"] += results.median(run.decode_s for run in ours)
    sums["theirs"] += results.median(run[1] for run in others)
    sums["theirs_decode"] += results.median(run[2] for run in others)
    difference = measure.compare(job.target.model, prompt, tokens, others[0][0], margins=True)
    same += difference is None
    if difference is not None:
      print(f"question {question.question_id}: {difference}")
  # Tokens of one are the tokens of the other wherever they are identical.
  rate = {
    "with prefill": (
      results.ratio(sums["tokens"], sums["ours"]),
      results.ratio(sums["tokens"], sums["theirs"]),
    ),
    "decode only": (
      results.ratio(sums["tokens"], sums["ours_decode"]),
      results.ratio(sums["steps"], sums["theirs_decode"]),
    ),
  }
  lines = [[k, f"{a:.1f}", f"{b:.1f}", f"{results.ratio(a, b):.2f} x"] for k, (a, b) in rate.items()]
  results.table(["tokens/s", "specjax, plain", "transformers", "ratio"], lines)
  print(
    f"\nidentical: {same} of {len(asked)}; {theirs.version}, {TORCH_THREADS.value} threads, "
    f"{shared.DTYPE.value}, at most {budget} new tokens"
  )


if __name__ == "__main__":
  shared.run(main)
