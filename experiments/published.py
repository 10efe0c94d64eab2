"""What papers printed, as data. Figures are theirs, digit for digit; see each constant for the place."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LeviathanRow:
  """A line of tables 2 and 4: α, and the speedup that was predicted from it and measured."""

  task: str
  draft: str
  temperature: float
  window: int
  alpha: float
  predicted: float
  measured: float


LEVIATHAN_SOURCE = "Leviathan, Kalman, Matias 2023, arXiv:2211.17192v2, tables 2 and 4"
LEVIATHAN_DEVICE = "TPU v4"
LEVIATHAN_TARGET = "T5-XXL 11B"
# One draft step over one plain step, by draft model.
LEVIATHAN_C = {"S": 0.02, "B": 0.04, "L": 0.11}
LEVIATHAN_PARAMETERS = {"XXL": 11e9, "S": 77e6, "B": 250e6, "L": 800e6}
LEVIATHAN = (
  LeviathanRow("EnDe", "S", 0, 7, 0.75, 3.2, 3.4),
  LeviathanRow("EnDe", "B", 0, 7, 0.80, 3.3, 2.8),
  LeviathanRow("EnDe", "L", 0, 7, 0.82, 2.5, 1.7),
  LeviathanRow("EnDe", "S", 1, 7, 0.62, 2.3, 2.6),
  LeviathanRow("EnDe", "B", 1, 5, 0.68, 2.4, 2.4),
  LeviathanRow("EnDe", "L", 1, 3, 0.71, 2.0, 1.4),
  LeviathanRow("CNN/DM", "S", 0, 5, 0.65, 2.4, 3.1),
  LeviathanRow("CNN/DM", "B", 0, 5, 0.73, 2.6, 3.0),
  LeviathanRow("CNN/DM", "L", 0, 3, 0.74, 2.0, 2.2),
  LeviathanRow("CNN/DM", "S", 1, 5, 0.53, 1.9, 2.3),
  LeviathanRow("CNN/DM", "B", 1, 3, 0.55, 1.8, 2.2),
  LeviathanRow("CNN/DM", "L", 1, 3, 0.56, 1.6, 1.7),
)


@dataclasses.dataclass(frozen=True)
class LenienceRow:
  """α and measured speedup at a lenience l, T5-small drafting for T5-XXL, English to German."""

  lenience: float
  alpha: float
  measured: float


LENIENCE_SOURCE = "Leviathan, Kalman, Matias 2023, arXiv:2211.17192v2, appendix (lenience)"
LENIENCE_TASK, LENIENCE_DRAFT = "EnDe", "S"
LENIENCE = (
  LenienceRow(1.0, 0.62, 2.5),
  LenienceRow(0.5, 0.71, 3.1),
  LenienceRow(0.3, 0.76, 3.6),
  LenienceRow(0.1, 0.84, 5.0),
)


@dataclasses.dataclass(frozen=True)
class ChenRow:
  """A line of table 1: milliseconds a token, and the speedup printed beside them."""

  task: str
  ms: float
  speedup: float


CHEN_SOURCE = "Chen, Borgeaud, Irving et al. 2023, arXiv:2302.01318, table 1"
CHEN_DEVICE = "16 TPU v4"
CHEN_TARGET, CHEN_DRAFT = "Chinchilla 70B", "Chinchilla 4B"
CHEN_WINDOW = 4
CHEN_DRAFT_MS, CHEN_TARGET_MS = 1.8, 14.1
CHEN = (
  ChenRow("XSum, nucleus", 7.52, 1.92),
  ChenRow("XSum, greedy", 7.00, 2.01),
  ChenRow("HumanEval", 5.73, 2.46),
)
