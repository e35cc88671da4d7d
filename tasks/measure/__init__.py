"""What measures: benchmarks of a served pair, the demonstration, comparisons of methods.

A benchmark is one file with `QUESTION` and `measure(run, **options) -> Report`; `redraft bench NAME` runs it.
It works in a home of its own with copies of what is served, so it changes nothing that is in use. What it has measured
is kept cell by cell; a run that was interrupted goes on with the cells that are missing.
"""
