"""Tables of papers beside ours, a module a family; `experiments.paper_tables` makes them.

A table is a function of `inputs.Inputs`, which are result files: no table runs or loads a model. Columns are
what was published, what a formula or the calibration predicts, and ours.
"""
