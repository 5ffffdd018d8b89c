"""How fast, how big: the same traffic through baseline and candidate, interleaved, and the ratio with its interval.

`workload` says what traffic, `plan` fixes every prompt and arrival, `drive` runs a block of it through one engine,
`worker` does that in a process of its own, `metrics` and `bootstrap` turn records into numbers, `run` joins them.
"""
