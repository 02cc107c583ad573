"""The steps of the pipeline, each a program that ships to other machines.

OpenMP, under torch's CPU kernels, makes waiting threads spin for milliseconds at the end of every kernel. While another
process wants the same cores that is fatal: beside one busy process on two cores a decode step took 1,200 ms, not 14.
A short spin, then sleep, costs a fifth on an idle machine and keeps a busy one within a factor of two or three. libgomp
reads this once, when torch loads it, so it has to be here, before any stage's own imports.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # iterations; the default is 300,000
