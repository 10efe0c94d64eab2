"""What speculation gains at several batch sizes, beside EAGLE's in a batching server."""

from __future__ import annotations

from experiments import published
from experiments.render import Table
from experiments.run_files import figures
from experiments.tables.inputs import SPEEDS, WHERE, Inputs, number


def batch(inputs: Inputs) -> Table:
  """Batch size against gain."""
  header = (
    *WHERE,
    "method",
    "batch",
    "ours plain tokens/s",
    "ours tokens/s",
    *SPEEDS,
    "ours τ",
  )
  rows: list[list[str | None]] = [
    [
      *["published", published.BATCH_DEVICE, None, None],
      *[f"{name}, {published.BATCH_DRAFT}", str(size), None, None],
      *[number(gain), None, None, None],
    ]
    for name, gains in published.BATCH_GAINS.items()
    for size, gain in zip(published.BATCHES, gains, strict=True)
  ]
  order = lambda found: (found.run.target, found.temperature, found.method, found.batch, found.run.number)
  for found in sorted(figures(inputs.runs, by_category=False), key=order):
    place = [found.run.name, found.run.device, found.run.target, f"{found.temperature:g}"]
    speeds = [None, number(inputs.predicted(found)), number(found.speedup), number(found.tau)]
    rates = [number(found.plain_rate, ".1f"), number(found.rate, ".1f")]
    rows.append([*place, found.method, str(found.batch), *rates, *speeds])
  notes = [
    f"Published: {published.BATCH_SOURCE} on an {published.BATCH_DEVICE}: throughput over plain decoding's.",
    "ours: all rows of a batch in one compiled loop; tokens a second are those of the whole batch, × is over "
    "plain decoding of the same batch. predicted ×: by the calibration, which knows costs by batch, and the "
    "rounds that were run.",
    "The more rows a round has, the less of it is waiting for weights, in which drafts are verified for "
    "nothing: the gain falls with the batch. Not reproduced at this scale: on a device that is at its limit "
    "from a few rows on, as a CPU is, it falls sooner than on an H100; and rows of a batch here start "
    "together, while a server's come and go.",
  ]
  return Table("batch", "Batch size against gain", header, rows, notes + inputs.notes())
