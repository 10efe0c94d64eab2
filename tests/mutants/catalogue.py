"""All faults, in the order in which they are tried."""

from tests.mutants import (
  Mutant,
  around,
  block,
  control,
  core,
  drafting,
  engine,
  heads,
  http,
  own_layers,
  peers,
  processing,
  rules,
  serving,
  tables,
  training,
)

MUTANTS: tuple[Mutant, ...] = (
  *core.MUTANTS,
  *processing.MUTANTS,
  *rules.MUTANTS,
  *drafting.MUTANTS,
  *heads.MUTANTS,
  *block.MUTANTS,
  *own_layers.MUTANTS,
  *around.MUTANTS,
  *control.MUTANTS,
  *training.MUTANTS,
  *serving.MUTANTS,
  *engine.MUTANTS,
  *tables.MUTANTS,
  *http.MUTANTS,
  *peers.MUTANTS,
)
