"""One named test per public bug of other data-parallel engines that can be observed on CPU, grouped by theme.

Every docstring names the public thread and what went wrong there. Helpers: `slow_link` (a link between supernodes that
is late, or closed until the test opens it), `probes` (what a step dispatches, sends and keeps alive), `towers` (models
whose gradients are known in closed form).
"""
