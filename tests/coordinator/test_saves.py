"""What is asked of a disk may be answered late, or never: who waits for it, and for how long."""

from collections.abc import Iterable

import msgspec
import pytest

from helpers.coordinated import (
    FIRST,
    HALVES,
    LOWER,
    NEXT,
    NOW_S,
    SOURCE,
    UPPER,
    after,
    iteration_report,
    node_loss,
    of_type,
    save_failure,
    save_report,
    small_rules,
    stop_report,
    training_halves,
    worker_failure,
)
from helpers.fake_cluster import FakeCluster
from planaria.coordinator.commands import (
    Command,
    DecisionRecorded,
    Discard,
    End,
    MembersRecorded,
    MustEnd,
    Publish,
    Published,
    RecordDecision,
    SavesListed,
    Tick,
)
from planaria.coordinator.frozen import replace
from planaria.coordinator.saves import SLOW_S
from planaria.coordinator.state import JobState, Phase
from planaria.coordinator.step import Event, step
from planaria.core.kinds import Ending
from planaria.core.messages import BY_PUBLISHER, Corrupted, Raised, SaveFailed, SaveLayers
from planaria.core.records import AwaitingSaves, Origin, Unsaved, Warned
from planaria.protocol.agent_state import AgentState, on_report

RULES = small_rules()
TIMEOUT_S = RULES.job.checkpoint.timeout_s


def whole(iteration: int) -> list[Event]:
    """Every layer of a save is on disk."""
    return [
        save_report(0, iteration, epoch=0, layers=LOWER),
        save_report(1, iteration, epoch=0, layers=UPPER),
    ]


def skipped(rank: int, iteration: int) -> SaveFailed:
    return SaveFailed(rank=rank, epoch=0, iteration=iteration, reason="busy", is_skipped=True)


def publishing() -> JobState:
    """The disk has not answered yet whether the newest save is complete."""
    state, commands = after(training_halves(RULES), whole(NEXT), RULES)
    assert [c.iteration for c in of_type(commands, Publish)] == [NEXT]
    return state


def lost(nodes: Iterable[int]) -> list[Event]:
    """Of four nodes these are lost; the others answer what they hold."""
    epoch = len(list(nodes))
    left = [rank for rank in HALVES.ranks if rank not in nodes]
    held = {0: LOWER, 1: UPPER, 2: LOWER, 3: UPPER}
    answers = [stop_report(r, epoch, layers=held[r], age=NEXT, last=NEXT - 1) for r in left]
    return [*map(node_loss, nodes), MembersRecorded(epoch), *answers]


def test_a_loss_is_answered_while_the_disk_does_not_answer() -> None:
    """What is live is all that it takes."""
    state, commands = after(publishing(), lost((3,)), RULES)

    (record,) = of_type(commands, RecordDecision)
    assert record.outcome.iteration == NEXT
    assert state.phase is Phase.DECIDING


@pytest.mark.parametrize("is_listing", [True, False])
def test_whoever_has_to_go_back_waits_for_the_disk_for_a_while(is_listing: bool) -> None:
    """The save that is being made complete, or listed, may be the one to go back to."""
    state = publishing()
    if is_listing:
        state = replace(state, saves=replace(state.saves, is_listing=True, publishing={}))
    state, commands = after(state, lost((0, 2)), RULES)
    assert state.phase is Phase.STOPPING
    assert not of_type(commands, RecordDecision)
    (notice,) = of_type(commands, AwaitingSaves)
    assert "checkpoints has not answered yet; the job waits for it, 600 s at most" in notice.text
    answered, _ = after(state, [Published(NEXT, 0), SavesListed()], RULES)
    unanswered, _ = step(RULES, state, Tick(), NOW_S + TIMEOUT_S - 1.0)
    assert unanswered == state
    unanswered, _ = step(RULES, state, Tick(), NOW_S + TIMEOUT_S)

    assert answered.commits.origin == Origin(iteration=NEXT, source=f"{NEXT}-0", epoch=2)
    assert unanswered.commits.origin == Origin(iteration=FIRST, source=SOURCE, epoch=2)


def test_a_job_that_goes_back_to_the_save_after_its_last_iteration_has_finished() -> None:
    """The coordinator had not heard that all were done; nodes began an epoch that never ended."""
    training = replace(RULES.job.training, iterations=NEXT)
    rules = replace(RULES, job=replace(RULES.job, training=training))
    state, _ = after(publishing(), [Published(NEXT, 0), SavesListed()], rules)
    state, commands = after(state, lost((0, 2)), rules)
    (record,) = of_type(commands, RecordDecision)
    assert isinstance(record.decision.order, SaveLayers)
    state, commands = after(state, [DecisionRecorded(2)], rules)

    (end,) = of_type(commands, End)
    assert end.ending is Ending.FINISHED


@pytest.mark.parametrize("is_published", [False, True])
def test_a_job_that_fails_and_has_lost_layers_goes_back_for_nothing(is_published: bool) -> None:
    """A save that it would go back to is there already."""
    state = publishing()
    if is_published:
        state, _ = after(state, [Published(NEXT, 0), SavesListed()], RULES)
    mistake = Raised(error="ValueError", first_layer=5, end_layer=10)
    state, _ = after(state, [worker_failure(1, mistake, epoch=0, blame="job")], RULES)
    left = [stop_report(rank, 3, layers=UPPER, age=NEXT, last=NEXT - 1) for rank in (1, 3)]
    state, commands = after(state, [node_loss(0), node_loss(2), MembersRecorded(3), *left], RULES)

    (end,) = of_type(commands, End)
    assert (end.ending, end.failure is not None) == (Ending.FAILED, True)
    assert end.reason == "no live node holds layer 0, so nothing was saved"


def test_a_job_that_must_end_and_has_lost_layers_says_that_it_saves_nothing() -> None:
    """It went back to the newest save, which was there, and said nothing of what was lost."""
    state, _ = after(publishing(), [Published(NEXT, 0), SavesListed(), MustEnd("the disk")], RULES)
    state, commands = after(state, lost((0, 2)), RULES)

    (end,) = of_type(commands, End)
    assert end.ending is Ending.LOST
    assert end.reason == "the disk; no live node holds layer 0, so nothing was saved"


def test_the_last_save_is_waited_for_as_long_as_it_gets_on() -> None:
    """It may take hours; but a disk that does not answer must not keep a job for ever."""
    state = training_halves(RULES)
    state, _ = after(
        state, [iteration_report(r, NEXT, epoch=0, ends=True) for r in HALVES.ranks], RULES
    )
    assert state.phase is Phase.SAVING
    told: list[Command] = []
    moments: list[tuple[float, Event]] = [
        (SLOW_S, Tick()),
        (SLOW_S + 1.0, Tick()),
        (TIMEOUT_S - 1.0, save_report(0, NEXT + 1, epoch=0, layers=LOWER[:1])),
        (2.0 * TIMEOUT_S - 2.0, Tick()),
    ]
    for moment_s, event in moments:
        state, commands = step(RULES, state, event, NOW_S + moment_s)
        told += commands
    assert state.phase is Phase.SAVING
    (slow,) = of_type(told, Warned)
    assert "nothing was written to checkpoints for 10 s; after 600 s" in slow.text
    late_s = NOW_S + 2.0 * TIMEOUT_S
    state, discards = step(RULES, state, Tick(), late_s)
    state, ends = step(RULES, state, Tick(), late_s)

    (discard,) = of_type(discards, Discard)
    assert discard.iteration == NEXT + 1
    assert ends == (End(Ending.UNSAVED, discard.reason),)
    assert "nothing was written to checkpoints for 601 s" in discard.reason
    assert state.phase is Phase.ENDED


def saving_last(before: JobState) -> JobState:
    """The last iteration is trained, and the last save is whole."""
    done = [iteration_report(r, NEXT, epoch=0, ends=True) for r in HALVES.ranks]
    state, _ = after(before, done, RULES)
    assert state.phase is Phase.SAVING
    state, commands = after(state, whole(NEXT + 1), RULES)
    assert [publish.iteration for publish in of_type(commands, Publish)] in ([NEXT + 1], [])
    return state


def test_the_layers_of_a_last_save_stay_when_its_manifest_is_refused() -> None:
    """They are all that is left of the run; a report that a new connection brings again changes
    nothing."""
    state = saving_last(training_halves(RULES))
    failed = SaveFailed(rank=BY_PUBLISHER, iteration=NEXT + 1, epoch=0, reason="503")
    state, commands = after(state, [failed, *whole(NEXT + 1)], RULES)

    assert not of_type(commands, Discard)
    (warned,) = of_type(commands, Warned)
    (end,) = of_type(commands, End)
    reason = f"503; all its layers stay in checkpoints/{NEXT + 1}-0; only its manifest is missing"
    assert warned.text == f"iteration {NEXT + 1} was not saved: {reason}"
    assert (end.ending, end.reason) == (Ending.UNSAVED, reason)


@pytest.mark.parametrize("is_refused_again", [False, True])
@pytest.mark.parametrize("is_early", [False, True])
def test_a_last_save_whose_manifest_is_refused_in_an_evaluation_is_tried_again_after_it(
    *, is_early: bool, is_refused_again: bool
) -> None:
    """Ranks tell of the last iteration once they have evaluated what it gave. Such a save was given
    up after 10 s, and its layers were removed where training ended before its last iteration."""
    training = replace(RULES.job.training, iterations=NEXT + 10 if is_early else NEXT + 1)
    rules = replace(RULES, job=replace(RULES.job, training=training))
    state, _ = after(training_halves(rules), whole(NEXT + 1), rules)
    failed = SaveFailed(rank=BY_PUBLISHER, iteration=NEXT + 1, epoch=0, reason="503")
    state, refused = after(state, [failed], rules)
    assert not refused
    done = [
        msgspec.structs.replace(iteration_report(r, NEXT, epoch=0, ends=True), early=is_early)
        for r in HALVES.ranks
    ]
    state, commands = after(state, done, rules)
    assert state.phase is Phase.SAVING
    (publish,) = of_type(commands, Publish)
    assert (publish.iteration, len(publish.files)) == (NEXT + 1, len((*LOWER, *UPPER)))
    assert not of_type(commands, Discard)
    answer = failed if is_refused_again else Published(NEXT + 1, 0)
    _, commands = after(state, [answer], rules)

    assert not of_type(commands, Discard)
    (end,) = of_type(commands, End)
    if is_refused_again:
        assert end.ending is Ending.UNSAVED
        assert f"503; all its layers stay in checkpoints/{NEXT + 1}-0" in end.reason
    else:
        assert end.ending is Ending.FINISHED


def test_a_loss_has_a_save_published_whose_manifest_was_refused_in_an_evaluation() -> None:
    """Nobody did, so that the recovery waited for no answer, took an older save, and dropped this
    one in silence."""
    refused = SaveFailed(rank=BY_PUBLISHER, iteration=NEXT + 1, epoch=0, reason="503")
    state, _ = after(training_halves(RULES), [*whole(NEXT + 1), refused], RULES)
    state, commands = after(state, lost((0, 2)), RULES)
    assert [publish.iteration for publish in of_type(commands, Publish)] == [NEXT + 1]
    assert of_type(commands, AwaitingSaves)
    published, _ = after(state, [Published(NEXT + 1, 0)], RULES)
    _, commands = after(state, [refused], RULES)

    assert published.commits.origin.source == f"{NEXT + 1}-0"
    assert [discard.reason for discard in of_type(commands, Discard)] == ["503"]


@pytest.mark.parametrize("is_behind", [False, True])
def test_the_layers_of_a_last_save_stay_when_its_manifest_is_given_up(is_behind: bool) -> None:
    """The disk does not answer for it, or not even for the save before it."""
    state = saving_last(publishing() if is_behind else training_halves(RULES))
    state, commands = step(RULES, state, Tick(), NOW_S + TIMEOUT_S)
    _, ends = step(RULES, state, Tick(), NOW_S + TIMEOUT_S)

    assert not of_type((*commands, *ends), Discard)
    (end,) = of_type((*commands, *ends), End)
    assert f"all its layers stay in checkpoints/{NEXT + 1}-0" in end.reason


def test_saves_are_made_complete_one_after_the_other_and_few_wait() -> None:
    """Ranks may write faster than one disk answers the coordinator: then newer saves count."""
    state = publishing()
    state, commands = after(state, [e for n in range(NEXT + 1, NEXT + 7) for e in whole(n)], RULES)
    assert not of_type(commands, Publish)
    assert of_type(commands, Discard) == [Discard(NEXT + 1, 0, ""), Discard(NEXT + 2, 0, "")]
    published = []
    last = NEXT
    while last < NEXT + 6:
        state, commands = after(state, [Published(last, 0)], RULES)
        (publish,) = of_type(commands, Publish)
        last = publish.iteration
        published.append(last)

    assert published == [NEXT + 3, NEXT + 4, NEXT + 5, NEXT + 6]


def test_that_saves_are_skipped_is_told_less_and_less_often() -> None:
    """The first, the second, the fourth: a disk may be slow for days."""
    state, told = training_halves(RULES), []
    for number in range(1, 101):
        events: list[Event] = [skipped(0, NEXT + number), skipped(1, NEXT + number)]
        state, commands = after(state, events, RULES)
        assert not of_type(commands, Discard)
        told += of_type(commands, Unsaved)

    assert [one.iteration - NEXT for one in told] == [1, 2, 4, 8, 16, 32, 64]
    assert "64 saves were skipped so far; the next message comes at 128" in told[-1].reason
    assert len(state.saves.unsaved) < 100


def test_what_others_wrote_of_a_skipped_save_is_removed() -> None:
    """Nobody will complete it."""
    events: list[Event] = [save_report(0, NEXT, epoch=0, layers=LOWER), skipped(1, NEXT)]
    state, commands = after(training_halves(RULES), events, RULES)

    assert of_type(commands, Discard) == [Discard(NEXT, 0, "")]
    assert not state.saves.files


def test_what_others_write_of_a_save_after_it_was_skipped_is_removed_each_time() -> None:
    """A rank that is still writing leaves more, and no newer save may ever be complete."""
    events: list[Event] = [
        skipped(1, NEXT),
        save_report(0, NEXT, epoch=0, layers=LOWER[:1]),
        save_report(0, NEXT, epoch=0, layers=LOWER),
    ]
    state, commands = after(training_halves(RULES), events, RULES)

    assert of_type(commands, Discard) == [Discard(NEXT, 0, ""), Discard(NEXT, 0, "")]
    assert not state.saves.files


def test_what_is_written_of_a_failed_save_whose_manifest_is_there_stays() -> None:
    """The store lost the answer to the request, and a coordinator that came later has listed it."""
    failed = SaveFailed(rank=BY_PUBLISHER, epoch=0, iteration=NEXT, reason="503")
    state, _ = after(publishing(), [failed, Published(NEXT, 0)], RULES)
    _, commands = after(state, [save_report(0, NEXT, epoch=0, layers=LOWER)], RULES)

    assert not of_type(commands, Discard)


def test_a_save_that_cannot_be_complete_lets_the_next_one_have_its_turn() -> None:
    """The disk has answered, if only with no."""
    state, _ = after(publishing(), whole(NEXT + 1), RULES)
    failed = SaveFailed(rank=BY_PUBLISHER, epoch=0, iteration=NEXT, reason="no")
    _, commands = after(state, [failed], RULES)

    assert of_type(commands, Discard) == [Discard(NEXT, 0, "no")]
    assert [publish.iteration for publish in of_type(commands, Publish)] == [NEXT + 1]


def test_a_save_that_fails_before_all_have_begun_its_epoch_is_removed() -> None:
    """A rank may save in the next epoch while the report of a slower one is on its way."""
    cluster = FakeCluster(RULES, HALVES)
    cluster.begin()
    cluster.join(4)
    assert cluster.state.switch is not None
    cluster.hear(save_failure(0, NEXT, epoch=1))
    cluster.hear(save_failure(1, NEXT, epoch=2))

    assert cluster.state.epoch == 0
    assert of_type(cluster.commands, Discard) == [Discard(NEXT, 1, "disk full")]


def test_versions_that_could_not_be_read_are_none_of_those_that_are_kept() -> None:
    """Whoever removes old ones is told."""
    state = training_halves(RULES)
    state = replace(state, saves=replace(state.saves, spoilt=frozenset({"9-0"})))
    _, commands = after(state, whole(NEXT), RULES)

    (publish,) = of_type(commands, Publish)
    assert publish.unused == {"9-0"}


def test_an_agent_forgets_no_save_for_those_that_were_skipped() -> None:
    """A new coordinator needs what was written before, and can do without these."""
    state = on_report(AgentState(node=0), save_report(0, NEXT, epoch=0, layers=LOWER), NOW_S)
    again = on_report(state, skipped(0, NEXT + 1), NOW_S)

    assert again == state


def test_holders_that_differ_in_the_first_epoch_wait_for_a_save() -> None:
    """That save may be all that is left; nothing was lost before."""
    state = publishing()
    assert state.facts.loss is None
    for rank in HALVES.ranks:
        hashes = {3: 7 + (rank == 0)} if rank % 2 == 0 else {}
        event = Corrupted(rank=rank, epoch=0, age=NEXT, hashes=hashes)
        state, commands = step(RULES, state, event, NOW_S)

    assert of_type(commands, AwaitingSaves)


def test_saves_that_are_whole_survive_a_loss() -> None:
    """One waits for its manifest behind another, which then cannot be published."""
    state, _ = after(training_halves(RULES), [*whole(NEXT), *whole(NEXT + 1)], RULES)
    state, _ = after(state, lost((0, 2)), RULES)
    refused = SaveFailed(rank=BY_PUBLISHER, iteration=NEXT, epoch=0, reason="503")
    state, commands = after(state, [refused, SavesListed()], RULES)

    (publish,) = of_type(commands, Publish)
    assert publish.iteration == NEXT + 1


def test_a_save_that_a_loss_breaks_off_is_told() -> None:
    """If losses come faster than a save is written, none is ever complete."""
    part = save_report(1, NEXT, epoch=0, layers=UPPER[:1])
    _, commands = after(training_halves(RULES), [part, *lost((3,))], RULES)

    (text,) = (warned.text for warned in of_type(commands, Warned) if "save" in warned.text)
    count = f"1 of {len(LOWER) + len(UPPER)} layers"
    assert (
        text == f"the save of iteration {NEXT} was broken off by a recovery, with {count} written"
    )


def test_a_save_that_is_dropped_for_a_newer_one_is_told() -> None:
    """A node that left did not write its part of it."""
    part = save_report(1, NEXT, epoch=0, layers=UPPER)
    _, commands = after(training_halves(RULES), [part, *whole(NEXT + 1)], RULES)

    assert [publish.iteration for publish in of_type(commands, Publish)] == [NEXT + 1]
    (warned,) = of_type(commands, Warned)
    assert f"the save of iteration {NEXT} was broken off by nodes that left" in warned.text


def test_saves_of_before_are_dropped_where_all_go_back() -> None:
    """What is trained anew is another history, and what they go back to is older than these."""
    events: list[Event] = [*whole(NEXT), *whole(NEXT + 1), *lost((0, 2))]
    state, _ = after(training_halves(RULES), events, RULES)
    assert list(state.saves.files) == [(NEXT + 1, 0)]
    state, _ = step(RULES, state, Tick(), NOW_S + TIMEOUT_S)

    assert state.commits.origin.epoch == 2
    assert not state.saves.files


def test_a_save_of_before_a_loss_that_cannot_be_published_is_told_and_removed() -> None:
    """Nobody else would hear of it."""
    refused = SaveFailed(rank=BY_PUBLISHER, iteration=NEXT, epoch=0, reason="503")
    _, commands = after(publishing(), [*lost((3,)), refused], RULES)

    assert of_type(commands, Discard) == [Discard(NEXT, 0, "503")]


def test_few_saves_of_before_a_loss_wait() -> None:
    """Those that are skipped do not wait any more."""
    state, _ = after(publishing(), [e for n in range(NEXT + 1, NEXT + 5) for e in whole(n)], RULES)
    state, _ = after(state, [node_loss(3), MembersRecorded(1)], RULES)
    late = [
        save_report(0, NEXT + 5, epoch=1, layers=LOWER),
        save_report(1, NEXT + 5, epoch=1, layers=UPPER),
    ]
    state, commands = after(state, late, RULES)

    assert of_type(commands, Discard) == [Discard(NEXT + 1, 0, "")]
    assert [iteration for iteration, _ in state.saves.files] == [NEXT + n for n in range(2, 6)]
