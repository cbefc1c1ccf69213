"""Tests of the DeepSpeed adapter, against stock ZeRO-3 on the same ranks."""
