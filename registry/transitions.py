"""The release state machine, as a table: which act leads from which state to which.

Nothing here knows of databases or people. `held` is where inconclusive evidence waits; rolling back is legal from every
state in which a candidate may be near traffic; rejected and rolled back are final.
"""

from __future__ import annotations

from registry.errors import IllegalTransition

DRAFT, EVALUATED, HELD = "draft", "evaluated", "held"
APPROVED, REJECTED = "approved", "rejected"
SHADOW, CANARY, PROMOTED, ROLLED_BACK = "shadow", "canary", "promoted", "rolled_back"
STATES = (DRAFT, EVALUATED, HELD, APPROVED, REJECTED, SHADOW, CANARY, PROMOTED, ROLLED_BACK)
FINAL = (REJECTED, ROLLED_BACK)

# act -> {state before: state after}. `canary` repeats: every raise of the weight is an act.
TRANSITIONS: dict[str, dict[str, str]] = {
    "evaluate": {DRAFT: EVALUATED, EVALUATED: EVALUATED, HELD: EVALUATED},
    "hold": {EVALUATED: HELD},
    "approve": {EVALUATED: APPROVED, HELD: APPROVED},
    "reject": {DRAFT: REJECTED, EVALUATED: REJECTED, HELD: REJECTED, APPROVED: REJECTED},
    "shadow": {APPROVED: SHADOW},
    "canary": {SHADOW: CANARY, CANARY: CANARY},
    "promote": {CANARY: PROMOTED},
    "rollback": {APPROVED: ROLLED_BACK, SHADOW: ROLLED_BACK, CANARY: ROLLED_BACK, PROMOTED: ROLLED_BACK},
}


def next_state(state: str, act: str) -> str:
    """The state after `act`; IllegalTransition, naming the states it is possible from, if there is none."""
    if act not in TRANSITIONS:
        raise IllegalTransition(f"no act '{act}'; there are {', '.join(TRANSITIONS)}")
    after = TRANSITIONS[act].get(state)
    if after is None:
        raise IllegalTransition(f"{act} is not possible from {state}, only from {', '.join(TRANSITIONS[act])}")
    return after
