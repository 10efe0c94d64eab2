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


@dataclasses.dataclass(frozen=True)
class Speed:
  """A method's line of a table: speedup over plain decoding and τ, each None where it is not printed.

  Attributes:
    method: with what it drafts, where that is not its usual shape.
    target: the model that is drafted for, None where the figure is over several.
    temperature: of it, likewise.
    speedup: over plain decoding.
    tau: tokens a round, bonus included.
    at_most: the speedup is the largest of several, as abstracts have it.
  """

  method: str
  target: str | None
  temperature: float | None
  speedup: float | None
  tau: float | None = None
  at_most: bool = False


# --- EAGLE-1 ---------------------------------------------------------------------------------------

EAGLE1_SOURCE = "Li, Wei, Zhang, Zhang 2024 (EAGLE), arXiv:2401.15077, MT-bench, batch 1"
# Drafts by depth of its static tree.
EAGLE1_TREE = (4, 8, 8, 3, 2)
EAGLE1 = (
  Speed("static tree", "Vicuna 7B", 0, 2.90, 3.94),
  Speed("static tree", "Vicuna 13B", 0, 3.07, 3.98),
  Speed("static tree", "LLaMA-2-chat 7B", 0, 2.78, 3.62),
  Speed("static tree", "LLaMA-2-chat 70B", 0, 3.01, 3.81),
  Speed("static tree", "Vicuna 7B", 1, 2.13, 3.17),
)
# A chain of the same head: τ beside the tree's 3.94, and acceptance by position.
EAGLE1_CHAIN = Speed("chain", "Vicuna 7B", 0, None, 3.20)
EAGLE1_POSITIONS = (0.79, 0.74, 0.72, 0.73, 0.67)
# Speedup at T = 0, Vicuna 7B, by what the head sees.
EAGLE1_INPUTS = {"token": 1.5, "feature": 1.9, "feature + shifted token": 2.8}

# --- EAGLE-2 ---------------------------------------------------------------------------------------

EAGLE2_SOURCE = "Li, Wei, Zhang, Zhang 2024 (EAGLE-2), arXiv:2406.16858, MT-bench, batch 1"
EAGLE2_NODES, EAGLE2_BEAM = 60, 10
EAGLE2_ABLATION = (
  Speed("neither", "Vicuna 7B", 0, 2.81, 3.92),
  Speed("no value", "Vicuna 7B", 0, 3.21, 4.39),
  Speed("no re-rank", "Vicuna 7B", 0, 3.48, 4.86),
  Speed("full", "Vicuna 7B", 0, 3.62, 4.98),
)
EAGLE2 = (
  Speed("full", "Vicuna 7B", 0, 3.62, 4.98),
  Speed("full", "Vicuna 13B", 0, 4.26, 4.83),
  Speed("full", "LLaMA-2-chat 7B", 0, 3.43, 4.70),
  Speed("full", "LLaMA-3 8B", 0, 3.46, 4.53),
  Speed("full", "Vicuna 7B", 1, 3.05, 4.28),
  Speed("full", "Vicuna 13B", 1, 3.80, 4.40),
)

# --- EAGLE-3 ---------------------------------------------------------------------------------------

EAGLE3_SOURCE = (
  "Li, Wei, Zhang, Zhang 2025 (EAGLE-3), arXiv:2503.01840, MT-bench (T = 1: means over tasks), batch 1"
)
EAGLE3_ABLATION = (
  Speed("EAGLE-2", "LLaMA-3.1 8B", 0, 3.16, 4.05),
  Speed("no feature loss", "LLaMA-3.1 8B", 0, 3.82, 5.37),
  Speed("+ fused features", "LLaMA-3.1 8B", 0, 4.40, 6.13),
)
EAGLE3 = (
  Speed("EAGLE-3", "Vicuna 13B", 0, 5.58, 6.65),
  Speed("EAGLE-3", "LLaMA-3.1 8B", 0, 4.40, 6.13),
  Speed("EAGLE-3", "LLaMA-3.3 70B", 0, 4.11, 5.63),
  Speed("EAGLE-3", "Vicuna 13B", 1, 4.65, 5.67),
  Speed("EAGLE-3", "LLaMA-3.1 8B", 1, 3.45, 4.92),
)
# Throughput over plain decoding in a batching server, by batch.
BATCH_SOURCE = "arXiv:2503.01840, a batching server"
BATCH_DEVICE, BATCH_DRAFT = "H100", "chain of 3"
BATCHES = (2, 4, 8, 16, 24, 32, 48, 56, 64)
BATCH_GAINS = {
  "EAGLE-3": (1.81, 1.82, 1.62, 1.48, 1.39, 1.32, 1.38, 1.34, 1.38),
  "EAGLE-1": (1.40, 1.38, 1.23, 1.02, 0.93, 0.94, 0.88, 0.99, 0.99),
}

# --- Medusa ----------------------------------------------------------------------------------------

MEDUSA_SOURCE = "Cai et al. 2024 (Medusa), arXiv:2401.10774, MT-bench, batch 1"
MEDUSA = (
  Speed("Medusa-1", "Vicuna 7B", 0, 2.18),
  Speed("Medusa-2", "Vicuna 7B", 0, 2.83, 3.47),
  Speed("Medusa-2", "Vicuna 13B", 0, 2.83, 3.51),
  Speed("Medusa-2", "Vicuna 33B", 0, 2.35, 3.01),
)
MEDUSA_TARGET = "Vicuna 7B"
# How often each head's first guess is right, and drafts by depth of the sparse tree of 63.
MEDUSA_TOP1 = (0.560, 0.316, 0.201, 0.147, 0.118)
MEDUSA_TREE = (10, 28, 23, 2)

# --- self-speculation ------------------------------------------------------------------------------

SELF_SOURCES = {
  "Kangaroo": "Liu et al. 2024 (Kangaroo), arXiv:2404.18911, abstract",
  "LayerSkip": "Elhoushi et al. 2024 (LayerSkip), arXiv:2404.16710, abstract",
  "Draft & Verify": "Zhang et al. 2023 (Draft & Verify), arXiv:2309.08168, abstract",
}
SELF = (
  Speed("Kangaroo", None, None, 1.68, at_most=True),
  Speed("LayerSkip", None, None, 2.16, at_most=True),
  Speed("Draft & Verify", None, None, 1.99, at_most=True),
)
# Layers before Kangaroo's adapter (7B), its second exit and its longest chain.
KANGAROO_EXIT, KANGAROO_CONFIDENCE, KANGAROO_WINDOW = 2, 0.6, 6

# --- Spec-Bench ------------------------------------------------------------------------------------

SPEC_BENCH_SOURCE = (
  "Spec-Bench's leaderboard (Xia et al. 2024, arXiv:2401.07851; Leaderboard.md of its repository), all "
  "categories, greedy, batch 1"
)
SPEC_BENCH_DEVICE = "A100"
SPEC_BENCH = (
  Speed("EAGLE-2", "Vicuna 7B", 0, 2.36, 4.34),
  Speed("EAGLE-1", "Vicuna 7B", 0, 2.10, 3.58),
  Speed("Hydra", "Vicuna 7B", 0, 2.07, 3.26),
  Speed("Medusa", "Vicuna 7B", 0, 1.71, 2.31),
  Speed("prompt lookup", "Vicuna 7B", 0, 1.66, 1.75),
  Speed("two-model", "Vicuna 7B", 0, 1.52, 2.28),
  Speed("REST", "Vicuna 7B", 0, 1.48, 1.82),
  Speed("Lookahead", "Vicuna 7B", 0, 1.34, 1.64),
  Speed("EAGLE-3", "Vicuna 13B", 0, 3.02, 5.71),
)
