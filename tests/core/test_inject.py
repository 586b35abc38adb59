"""Faults on demand: what a SPEC says, and what is said about each mistake in one."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.core.inject import (
    AFTER_COMMIT,
    KINDS,
    NODELESS_KINDS,
    RECOVERY_STEPS,
    STEPS,
    Injection,
    Place,
    check_injections,
    check_on_one_machine,
    parse_injection,
)
from planaria.errors import ConfigError

SPECS = {
    "kill:2@5": Injection("kill", (2,), Place(5, "start")),
    "kill:4,2,4@5.reduce": Injection("kill", (2, 4), Place(5, "reduce")),
    "hang=8:1@3": Injection("hang", (1,), Place(3, "start"), 8.0),
    "hang=0.5:1@3.forward": Injection("hang", (1,), Place(3, "forward"), 0.5),
    "hang:1@3": Injection("hang", (1,), Place(3, "start")),
    "leader:@4.commit": Injection("leader", (), Place(4, "commit")),
    "kill:0@5.transfer": Injection("kill", (0,), Place(5, "transfer")),
    "kill:0@~2.5": Injection("kill", (0,), Place(0, "start", 2.5)),
    "leader:@~0": Injection("leader", (), Place(0, "start", 0.0)),
    "head:@4.regroup": Injection("head", (), Place(4, "regroup")),
    "preempt:1@3": Injection("preempt", (1,), Place(3, "start"), 30.0),
    "preempt=5:1@3.commit": Injection("preempt", (1,), Place(3, "commit"), 5.0),
    "join:2@5": Injection("join", (), Place(5, "start"), num_nodes=2),
    "cut:3,2@5": Injection("cut", (2, 3), Place(5, "start")),
    "cut=4:2,3@~1": Injection("cut", (2, 3), Place(0, "start", 1.0), 4.0),
    " crash:0@0 ": Injection("crash", (0,), Place(0, "start")),
    "slow=2:3@4": Injection("slow", (3,), Place(4, "start"), 2.0),
    "slow=1:3@9.forward": Injection("slow", (3,), Place(9, "forward"), 1.0),
    "flip:2,0@5": Injection("flip", (0, 2), Place(5, AFTER_COMMIT)),
}


@pytest.mark.parametrize("text", SPECS)
def test_a_spec_says_who_what_and_when(text: str) -> None:
    """Nodes ascending and each once; without a step the iteration's start, without a value 0."""
    assert parse_injection(text) == SPECS[text]
    assert parse_injection(SPECS[text].spec) == SPECS[text]


@given(
    st.sampled_from([kind for kind in KINDS if kind in ("kill", "stall", "crash")]),
    st.frozensets(st.integers(0, 99), min_size=1),
    st.integers(0, 10**6),
    st.sampled_from(STEPS),
)
def test_every_kind_goes_with_every_step(
    kind: str, nodes: frozenset[int], iteration: int, step: str
) -> None:
    """A soak draws them all."""
    listed = ",".join(map(str, nodes))
    injection = parse_injection(f"{kind}:{listed}@{iteration}.{step}")

    assert injection == Injection(kind, tuple(sorted(nodes)), Place(iteration, step))
    assert injection.place.is_in_recovery == (step in RECOVERY_STEPS)


FORM = "write KIND[=VALUE]:NODES@ITERATION[.STEP]"
MISTAKES = {
    "": FORM,
    "kill": FORM,
    "kill:2": FORM,
    "kill@5": FORM,
    "kill:2@": FORM,
    "kill:two@5": FORM,
    "kill:-1@5": FORM,
    "kill:2@-5": FORM,
    "kill:2@5.": FORM,
    "kill:2@5 reduce": FORM,
    "kill:2@5.reduce.commit": FORM,
    "kill:2@~": FORM,
    "kill:2@~1.2.3": FORM,
    "kill:2@~2.5.reduce": FORM,
    "hang=:2@5": FORM,
    "hang=1.2.3:2@5": FORM,
    "hang=soon:2@5": FORM,
    "KILL:2@5": FORM,
    "explode:2@5": "KIND is one of kill, hang, stall, crash, leader, flip",
    "kill:2@5.lunch": "STEP is one of start, forward, backward, reduce, commit, optimizer, detect",
    "kill=8:2@5": "kill takes no value",
    "leader=8:@5": "leader takes no value",
    "kill:@5": "say which nodes, as in kill:2@5",
    "hang=8:,@5": "say which nodes, as in hang:2@5",
    "cut=4:@5": "say which nodes, as in cut:2@5",
    "leader:2@5": "leader names no nodes",
    "head:2@5": "head names no nodes",
    "flip=3:2@5": "flip takes no value",
    "flip:2@5.commit": "name only the iteration, as in flip:2@5",
    "flip:2@5.applied": "STEP is one of",
    "flip:2@~3": "name only the iteration, as in flip:2@5",
    "flip:@5": "say which nodes, as in flip:2@5",
    "slow:2@5": "from which iteration on, as in slow=2:3@4",
    "slow=0.5:2@5": "how many times as long",
    "slow=2:2@~5": "from which iteration on",
    "slow=2:@5": "say which nodes, as in slow:2@5",
    "join:@5": "say how many nodes join, as in join:2@5",
    "join:0@5": "say how many nodes join",
    "join:1,2@5": "say how many nodes join",
    "kill:2@99999999999999999999": FORM,
    f"kill:2@{'9' * 5000}": FORM,
    f"kill:2@~{'9' * 400}": FORM,
    f"hang={'9' * 400}:2@5": FORM,
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text[:30])
def test_each_kind_of_mistake_is_told_with_what_would_do(text: str) -> None:
    """The field is the option, the value is the whole SPEC; numbers fit in 64 bits."""
    with pytest.raises(ConfigError) as caught:
        parse_injection(text)

    assert (caught.value.field, caught.value.value) == ("--inject", text)
    assert MISTAKES[text] in caught.value.remedy


@given(st.text(alphabet="kilhangedrfp:=@~.,0123456789 ", max_size=20))
def test_nothing_but_a_config_error_comes_of_nonsense(text: str) -> None:
    """A typing mistake never ends in a traceback."""
    with suppress(ConfigError):
        injection = parse_injection(text)

        assert injection.kind in KINDS
        assert injection.place.step in (*STEPS, AFTER_COMMIT)
        assert bool(injection.nodes) == (injection.kind not in NODELESS_KINDS)
        assert parse_injection(injection.spec).nodes == injection.nodes


def test_the_head_of_nodes_of_this_machine_cannot_be_killed_alone() -> None:
    """They end with it, and so does the user's own process."""
    injections = [parse_injection("kill:0@4"), parse_injection("head:@4.commit")]
    check_on_one_machine(injections[:1])
    with pytest.raises(ConfigError, match=r"--listen, or kill its coordinator: leader:@4\.commit"):
        check_on_one_machine(injections)


def test_a_node_that_the_job_does_not_have_is_told() -> None:
    """Before anything starts, with the numbers that would do."""
    injections = [parse_injection("kill:0,2@5.reduce"), parse_injection("leader:@4")]
    check_injections(injections, num_nodes=3)
    with pytest.raises(ConfigError) as caught:
        check_injections(injections, num_nodes=2)

    assert caught.value.field == "--inject"
    assert caught.value.value == "kill:0,2@5.reduce"
    assert "nodes 0 to 1" in caught.value.remedy
