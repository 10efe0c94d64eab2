"""A loaded target, and a draft for it, in Hugging Face transformers on the CPU: its ways to generate, timed.

Weights are saved in the Hugging Face layout, into a temporary folder, and read by transformers: nothing is
downloaded and both sides have the same numbers. A distilled draft, whose logits are over a draft vocabulary,
becomes a transformers model with an output layer that says nothing of the other tokens. Needs the extra
``parity``.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax import options
from specjax.checkpoints import save_hf
from specjax.models import Decoder, DraftDecoder

# What transformers calls each option of a mode, and its own default for it.
_OPTIONS: dict[str, dict[str, tuple[str, Any]]] = {
  "plain": {},
  "prompt_lookup": {
    "tokens": ("prompt_lookup_num_tokens", 10),
    "max_ngram": ("max_matching_ngram_size", 2),
  },
  "assisted": {
    "tokens": ("num_assistant_tokens", 20),
    "confidence": ("assistant_confidence_threshold", 0.4),
    "schedule": ("num_assistant_tokens_schedule", "constant"),
  },
}
_SCHEDULES = ("constant", "heuristic", "heuristic_transient")


@dataclasses.dataclass(frozen=True)
class Mode:
  """A way of transformers to generate.

  Attributes:
    name: as it was written.
    kind: ``plain``, ``prompt_lookup`` or ``assisted``.
    settings: fields of transformers' generation config, of the draft's for ``assisted``.
  """

  name: str
  kind: str
  settings: dict[str, Any]


def parse_mode(text: str) -> Mode:
  """``plain``, ``prompt_lookup[tokens=10,max_ngram=2]`` or ``assisted[tokens=20,confidence=0.4]``.

  Options that are left out have transformers' own defaults; ``confidence=0`` drafts all tokens, and
  ``schedule`` is ``constant``, ``heuristic`` or ``heuristic_transient``.

  Raises:
    ValueError: another mode, or an option that it does not take or that is out of its range.
  """
  kind, given = options.parse("theirs", text)
  if kind not in _OPTIONS:
    raise ValueError(f"theirs = {text!r}; a mode is one of {', '.join(_OPTIONS)}")
  known = _OPTIONS[kind]
  for option, value in given.items():
    if option not in known:
      takes = ", ".join(known) or "no options"
      raise ValueError(f"theirs = {text!r}: {kind} does not take {option}; it takes {takes}")
    _check(text, option, value)
  settings = {name: given.get(option, default) for option, (name, default) in known.items()}
  return Mode(text, kind, settings)


def _check(text: str, option: str, value: Any) -> None:
  if option == "schedule":
    right, wanted = value in _SCHEDULES, f"one of {', '.join(_SCHEDULES)}"
  elif option == "confidence":
    right, wanted = type(value) in (int, float) and 0 <= value < 1, "a number in [0, 1)"
  else:
    right, wanted = type(value) is int and value >= 1, "an integer of at least 1"
  if not right:
    raise ValueError(f"theirs = {text!r}: {option} = {value!r}; it must be {wanted}")


@dataclasses.dataclass(frozen=True)
class Answer:
  """One answer and its times.

  Attributes:
    tokens: new ids, the stop included.
    rounds: forwards of the target; the one over the prompt is the first if it gave tokens.
    first_tokens: how many of the tokens came with the prompt's forward.
    prefill_s: seconds until those were there.
    decode_s: seconds from then to the last token.
  """

  tokens: list[int]
  rounds: int
  first_tokens: int
  prefill_s: float
  decode_s: float


class Transformers:
  """The target's weights in transformers, decoding greedily, one row at a time."""

  def __init__(
    self,
    target: Decoder,
    draft: Decoder | None,
    *,
    stop_ids: Sequence[int],
    dtype: str,
    threads: int,
  ):
    """
    Args:
      target: the model under test.
      draft: of the mode ``assisted``; a `DraftDecoder` reads the target's embedding there, too.
      stop_ids: ids that end an answer.
      dtype: ``float32`` or ``bfloat16``, of the parameters.
      threads: of torch.

    Raises:
      ValueError: torch or transformers is not installed.
    """
    try:
      import torch
      import transformers
    except ImportError as error:
      raise ValueError(f"{error.name} is not installed; it comes with the extra: specjax[parity]") from None
    self._torch, self._transformers = torch, transformers
    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    self._stop_ids = list(stop_ids)
    self._dtype = getattr(torch, dtype)
    self.target = self._load(target)
    self.draft = None if draft is None else self._draft(draft, target)

  def _load(self, model: Decoder) -> Any:
    with tempfile.TemporaryDirectory() as folder:
      path = os.path.join(folder, "model")
      save_hf(path, model)
      load = self._transformers.AutoModelForCausalLM.from_pretrained
      return load(path, dtype=self._dtype).eval()

  def _draft(self, draft: Decoder, target: Decoder) -> Any:
    """The draft as a transformers model over the target's whole vocabulary."""
    if not isinstance(draft, DraftDecoder):
      return self._load(draft)
    model = self._load(_on_embedding(draft, target))
    if draft.output is None:
      matrices = [draft.rows]
    elif draft.output.weight is not None:
      matrices = [draft.output.weight]
    else:
      matrices = [draft.output.down, draft.output.up]
    tensor = lambda array: self._torch.tensor(np.asarray(array[...], np.float32)).to(self._dtype)
    ids = None if draft.ids is None else self._torch.tensor(np.asarray(draft.ids, np.int64))
    model.lm_head = _output_layer(self._torch, [tensor(m) for m in matrices], ids, target.config.vocab_size)
    return model

  def run(self, mode: Mode, prompt: Sequence[int], max_new_tokens: int) -> Answer:
    """Answers one prompt of ids."""
    settings = dict(mode.settings)
    if mode.kind == "assisted":
      # transformers keeps what its schedule did in the draft's own config: each answer starts anew.
      for name, value in settings.items():
        setattr(self.draft.generation_config, name, value)
      settings = {"assistant_model": self.draft}
    ids = self._torch.tensor([list(prompt)])
    clock = _Clock()
    start = time.perf_counter()
    with self._torch.inference_mode():
      output = self.target.generate(
        ids,
        attention_mask=self._torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=self._stop_ids or None,
        pad_token_id=(self._stop_ids or [0])[0],
        streamer=clock,
        **settings,
      )
    (_, _), *rounds = clock.arrivals
    return Answer(
      tokens=output[0, len(prompt) :].tolist(),
      rounds=len(rounds),
      first_tokens=rounds[0][1],
      prefill_s=rounds[0][0] - start,
      decode_s=rounds[-1][0] - rounds[0][0],
    )


def _on_embedding(draft: DraftDecoder, target: Decoder) -> Decoder:
  """The draft's layers and norm on the target's embedding, as a decoder that `save_hf` takes."""
  whole = copy.copy(target)
  whole.config = draft.config.replace(tie_embeddings=True)
  whole.layers, whole.norm, whole.head = draft.layers, draft.norm, None
  return whole


def _output_layer(torch: Any, matrices: list[Any], ids: Any, vocab_size: int) -> Any:
  """A torch module: hidden states ``[..., D]`` → logits ``[..., V]``, -inf outside of the draft vocabulary.

  Args:
    matrices: ``[Vd, D]``, or two factors ``[r, D]`` and ``[Vd, r]``.
    ids: int64 ``[Vd]``, the draft vocabulary; None: Vd = V.
    vocab_size: V.
  """

  class OutputLayer(torch.nn.Module):
    def forward(self, x):
      for matrix in matrices:
        x = torch.nn.functional.linear(x, matrix)
      if ids is None:
        return x
      logits = x.new_full((*x.shape[:-1], vocab_size), -torch.inf)
      logits[..., ids] = x
      return logits

  return OutputLayer()


class _Clock:
  """A transformers streamer that notes when tokens arrive and how many; the prompt comes first."""

  def __init__(self):
    self.arrivals: list[tuple[float, int]] = []

  def put(self, value: Any) -> None:
    self.arrivals.append((time.perf_counter(), value.numel()))

  def end(self) -> None:
    pass
