"""One named test per public bug of other data-parallel engines that can be observed on CPU, grouped by theme.

Every docstring names the public thread and what went wrong there.

* `test_reduction`: buffers that alias under a slow link, compute that waits, ignored dtypes, missing operators.
* `test_accumulation`: rounded partial sums, axes of size 1, what no_sync keeps.
* `test_norms`: norms, scales and steps that depend on the mesh, a run of 100 steps.
* `test_recompute`: superfluous collectives, units left unsharded, prefetch beside frozen and replicated parameters.
* `test_memory`: reduction buffers that grow with the depth.
* `test_host`: dispatch through DTensor, launches of collectives.
* `tests.fsdp.test_kept`: memory of reshard_after_forward=N (pytorch #147179).

Helpers: `slow_link` (a link between supernodes that is late, or closed until the test opens it), `probes` (what a step
dispatches, sends and keeps alive), `towers` (models whose gradients are known in closed form), `sum_only` (a back end
like HCCL).
"""
