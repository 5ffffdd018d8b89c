"""When requests arrive in an open workload: a renewal process with exponential or gamma gaps, from a seed.

Both sides of a measurement replay the same list, so a slow side meets the same bursts and not merely the same rate.
"""

import numpy as np


def arrival_times(rng: np.random.Generator, count: int, rate: float, burstiness: float = 1.0) -> list[float]:
    """`count` arrival times in seconds from 0, rising.

    Args:
        rng: the seeded source.
        count: how many requests.
        rate: mean requests per second.
        burstiness: the shape of the gamma-distributed gaps: 1 is Poisson, below 1 clusters, above 1 evens out
            (the mean gap stays 1 / rate; its coefficient of variation is 1 / sqrt(burstiness)).
    """
    gaps = rng.gamma(shape=burstiness, scale=1.0 / (rate * burstiness), size=count)
    return [float(time) for time in np.cumsum(gaps)]
