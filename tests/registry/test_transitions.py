"""The release state machine's table, as claims."""

import pytest

from registry.errors import IllegalTransition
from registry.transitions import FINAL, STATES, TRANSITIONS, next_state


def test_the_way_to_promotion_is_the_designs() -> None:
    state = "draft"
    for action in ("evaluate", "approve", "shadow", "canary", "canary", "promote"):
        state = next_state(state, action)
    assert state == "promoted"


@pytest.mark.parametrize("state", ["approved", "shadow", "canary", "promoted"])
def test_rolling_back_is_legal_wherever_a_candidate_is_near_traffic(state: str) -> None:
    assert next_state(state, "rollback") == "rolled_back"


@pytest.mark.parametrize("state", FINAL)
@pytest.mark.parametrize("action", TRANSITIONS)
def test_final_states_are_final(state: str, action: str) -> None:
    with pytest.raises(IllegalTransition):
        next_state(state, action)


def test_nothing_reaches_traffic_without_approval() -> None:
    entering = {before for act in ("shadow", "canary", "promote") for before in TRANSITIONS[act]}
    assert entering == {"approved", "shadow", "canary"}
    assert {act for act, table in TRANSITIONS.items() if "approved" in table.values()} == {"approve"}


def test_every_state_of_the_table_is_known_and_reachable() -> None:
    reached = {"draft"} | {after for table in TRANSITIONS.values() for after in table.values()}
    assert reached == set(STATES)


def test_an_illegal_act_names_the_states_it_is_possible_from() -> None:
    with pytest.raises(IllegalTransition, match="promote is not possible from draft, only from canary"):
        next_state("draft", "promote")
