"""Scripts: one per job or table, run as ``python -m experiments.NAME``."""

import time

# Taken before anything heavy is imported: times "since the start" count the imports.
STARTED = time.perf_counter()
