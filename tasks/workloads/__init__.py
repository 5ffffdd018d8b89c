"""Ready traffic for `quantgate speed --workload NAME`; the keys are described in `eval/speed/workload.py`."""
