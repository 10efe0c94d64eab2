"""--plot: where a script draws its figure. Run directories do not keep it, so a run may be drawn anew."""

from __future__ import annotations

import importlib.util
import os

from absl import flags

PLOT = flags.DEFINE_string("plot", "", "Where to draw the figure (PNG). Default: in the run directory.")


def can_draw() -> bool:
  """Whether matplotlib is there."""
  return importlib.util.find_spec("matplotlib") is not None


def check() -> None:
  """Raises ValueError for a --plot that cannot be drawn."""
  if PLOT.value and not os.path.isdir(os.path.dirname(PLOT.value) or "."):
    raise ValueError(f"--plot = {PLOT.value!r}: no such folder")
  if PLOT.value and not can_draw():
    raise ValueError("--plot needs matplotlib (pip install 'specjax[plot]')")
