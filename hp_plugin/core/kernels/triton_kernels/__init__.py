"""Kernels in Triton: one source for CUDA and Ascend. `docs/kernels.md` says what has run where.

`elementwise.py` and `products.py` hold the sources and import Triton alone, `variants.py` says with which tiles and
options they run and imports nothing: both are also loaded by `tools/compile_kernels.py` in an environment without
torch. `launch.py` runs them on tensors. Importing this package imports none of them, since Triton may be absent.
"""
