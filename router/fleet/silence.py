"""A pod that accepts connections and answers nothing: stopped, partitioned, or only busy? Pure.

A wrong guess either way costs: requests sent to a dead pod hang, and a busy pod taken out sends its load to the others.
May import: the standard library.
"""

from collections.abc import Iterable

SLOW_PROBES_ALLOWED = 3  # an API server under load answers /health late: by itself no reason to drop the pod
SILENT_AFTER_S = 4.0  # below the usual limit of a probe (5 s), above the usual time between two scrapes (1 s)


def may_stay(*, slow_probes: int, silent_s: float, others_silent_s: Iterable[float]) -> bool:
    """May a serving pod keep getting requests after `slow_probes` unanswered probes in a row?

    Not if nothing at all was heard of it lately, neither a probe nor metrics nor the head of a reply, while most of the
    others were heard: then it is the pod. If the others are silent too, it is the network or ourselves. `silent_s`: for
    how long, the pod and each other one that serves the same.
    """
    if slow_probes >= SLOW_PROBES_ALLOWED:
        return False
    if silent_s < SILENT_AFTER_S:
        return True
    others = [s < SILENT_AFTER_S for s in others_silent_s]
    return 2 * sum(others) <= len(others)
