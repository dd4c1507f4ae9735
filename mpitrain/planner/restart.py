"""How often to write checkpoints: the interval that costs least, of the time that saves take and that failures undo.

    work     save work     save work   X restart work     save ...
    |--------|##|--------|##|-----xxxxx|~~~~~~~|--------|##|
    interval           interval  lost            again

Failures come at random, as often at any time as at any other (a Poisson process): of n nodes that fail independently,
each once in `node_mtbf` seconds on average, one fails once in node_mtbf / n seconds. In what follows

    tau      seconds of training between the end of a save and the beginning of the next: the interval
    delta    seconds that a save holds training up
    R        seconds from a failure until training goes on from the last checkpoint
    M        mean seconds between failures of the job
    T        seconds that the training takes without saves and failures

J. W. Young: A first order approximation to the optimum checkpoint interval. Communications of the ACM 17 (9), 1974,
pages 530-531.
J. T. Daly: A higher order estimate of the optimum checkpoint interval for restart dumps. Future Generation Computer
Systems 22 (3), 2006, pages 303-312.
"""

from __future__ import annotations

import math


def young(save_seconds: float, mtbf_seconds: float) -> float:
    """The best interval to first order: tau = sqrt(2 delta M) (Young 1974).

    A save costs delta / tau of the time, and a failure half an interval, tau / 2 in every M; the sum is least there.
    Good for delta far below M.

    Args:
        save_seconds: delta.
        mtbf_seconds: M.

    Returns:
        tau, in seconds.
    """
    return math.sqrt(2.0 * save_seconds * mtbf_seconds)


def daly(save_seconds: float, mtbf_seconds: float) -> float:
    """The best interval to higher order (Daly 2006).

        tau = sqrt(2 delta M) (1 + 1/3 sqrt(delta / (2 M)) + 1/9 delta / (2 M)) - delta    where delta < 2 M
        tau = M                                                                           otherwise

    The training takes M exp(R / M) (exp((tau + delta) / M) - 1) T / tau on average, as an interval and its save have to
    come to their end without a failure, or else are begun anew after a restart. This is a perturbation solution for the
    least of that; the exact one is, with Lambert's W, tau = M (1 + W(-exp(-1 - delta / M))). R and T do not matter.

    Args:
        save_seconds: delta.
        mtbf_seconds: M.

    Returns:
        tau, in seconds.
    """
    if save_seconds >= 2.0 * mtbf_seconds:
        return mtbf_seconds
    share = save_seconds / (2.0 * mtbf_seconds)
    return young(save_seconds, mtbf_seconds) * (1.0 + math.sqrt(share) / 3.0 + share / 9.0) - save_seconds


def steps_between(save_seconds: float, step_seconds: float, mtbf_seconds: float, least_seconds: float = 0.0) -> int:
    """The best interval in whole steps of training (`daly`).

    Args:
        save_seconds: delta: that a save holds training up; not those that it goes on being written beside training.
        step_seconds: Of a step, without saves; more than 0.
        mtbf_seconds: M.
        least_seconds: The interval is at least so long: writing a checkpoint in the background takes that.

    Returns:
        Steps from one save to the next; at least 1.
    """
    interval = daly(save_seconds, mtbf_seconds) / step_seconds
    return max(1, round(interval), math.ceil(least_seconds / step_seconds))
