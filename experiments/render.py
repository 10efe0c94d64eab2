"""A table of text cells as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import re
from collections.abc import Sequence

from specjax.checkpoints.files import write_whole

DASH = "–"
_MARKDOWN = {"|": r"\|", "*": r"\*", "_": r"\_", "<": r"\<", "\n": " "}
_LATEX = {
  "\\": r"\textbackslash{}",
  "&": r"\&",
  "%": r"\%",
  "$": r"\$",
  "#": r"\#",
  "_": r"\_",
  "{": r"\{",
  "}": r"\}",
  "~": r"\textasciitilde{}",
  "^": r"\textasciicircum{}",
  "<": r"\textless{}",
  ">": r"\textgreater{}",
  "|": r"\textbar{}",
  "\n": " ",
  "[": "{[}",  # behind the end of a line it would be read as an option
  DASH: "--",
  "×": r"$\times$",
  "·": r"$\cdot$",
  "−": r"$-$",
  "±": r"$\pm$",
  "≥": r"$\ge$",
  "≤": r"$\le$",
  "∥": r"$\|$",
  "‖": r"$\|$",
  "Σ": r"$\sum$",
  "Π": r"$\prod$",
  "α": r"$\alpha$",
  "γ": r"$\gamma$",
  "τ": r"$\tau$",
  "ĉ": r"$\hat{c}$",
}


@dataclasses.dataclass(frozen=True)
class Table:
  """A table as text.

  Attributes:
    name: of its files.
    title: one line.
    header: a name a column.
    rows: a cell a column; None is a dash.
    notes: what its columns are, and where its rows come from; code stands in backticks.
  """

  name: str
  title: str
  header: tuple[str, ...]
  rows: Sequence[Sequence[str | None]]
  notes: Sequence[str] = ()

  def __post_init__(self):
    for row in self.rows:
      if len(row) != len(self.header):
        raise ValueError(f"table {self.name}: a row of {len(row)} cells; the header has {len(self.header)}")

  @property
  def cells(self) -> list[list[str]]:
    """Header and rows, dashes for what is not there."""
    return [list(self.header), *([DASH if cell is None else cell for cell in row] for row in self.rows)]


def _replaced(text: str, by: dict[str, str]) -> str:
  return "".join(by.get(character, character) for character in text)


def _markdown_note(note: str) -> str:
  """A note whose code, in backticks, stays as it is."""
  parts = note.split("`")
  return "`".join(part if i % 2 else _replaced(part, _MARKDOWN) for i, part in enumerate(parts))


def _latex_note(note: str) -> str:
  parts = map(_latex, note.split("`"))
  return "".join(rf"\texttt{{{part}}}" if i % 2 else part for i, part in enumerate(parts))


def markdown(table: Table) -> str:
  """Aligned, the first column to the left, the others to the right; notes as a list below."""
  cells = [[_replaced(cell, _MARKDOWN) for cell in row] for row in table.cells]
  widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(table.header))]
  rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
  lines = [f"## {table.title}", ""]
  for row in (cells[0], rule, *cells[1:]):
    padded = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
    lines.append(f"| {' | '.join(padded)} |")
  if table.notes:
    lines += ["", *(f"- {_markdown_note(note)}" for note in table.notes)]
  return "\n".join(lines) + "\n"


def comma_separated(table: Table) -> str:
  """Header and rows as the csv module writes them; notes are left to the other formats."""
  stream = io.StringIO()
  csv.writer(stream, lineterminator="\n").writerows(table.cells)
  return stream.getvalue()


def latex(table: Table) -> str:
  """A ``table`` with one ``tabular``, a line a row; needs no package."""
  lines = [
    r"\begin{table}",
    r"\centering",
    rf"\caption{{{_latex(table.title)}}}",
    rf"\begin{{tabular}}{{l{'r' * (len(table.header) - 1)}}}",
    r"\hline",
  ]
  for number, row in enumerate(table.cells):
    lines.append(" & ".join(map(_latex, row)) + r" \\")
    if number == 0:
      lines.append(r"\hline")
  lines += [r"\hline", r"\end{tabular}"]
  lines += [rf"\par{{\footnotesize {_latex_note(note)}}}" for note in table.notes]
  return "\n".join([*lines, r"\end{table}"]) + "\n"


def _latex(text: str) -> str:
  """Text with what LaTeX reads as commands written out; a signed number in mathematics."""
  return f"${text}$" if re.fullmatch(r"[-+][\d.]+", text) else _replaced(text, _LATEX)


FORMATS = {"md": markdown, "csv": comma_separated, "tex": latex}


def write(table: Table, folder: str) -> list[str]:
  """Writes a file a format, each whole or not at all; returns their paths."""
  os.makedirs(folder, exist_ok=True)
  paths = []
  for ending, form in FORMATS.items():
    paths.append(os.path.join(folder, f"{table.name}.{ending}"))
    write_whole(paths[-1], form(table))
  return paths
