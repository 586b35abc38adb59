"""Which orders end what a worker does: a save that is under way is waited for until one comes."""

import pytest

from jobs import shaped_plan
from planaria.core.messages import AT_COMMIT, Abort, Order, SaveLayers, Shutdown, StartEpoch
from planaria.core.messages import ends_work as ends

EPOCH = 3


def start(epoch: int, *, iteration: int = 8) -> StartEpoch:
    return StartEpoch(
        epoch=epoch, plan=shaped_plan((2,), 4), addresses={0: ("h", 1)}, iteration=iteration
    )


def abort(epoch: int) -> Abort:
    return Abort(epoch=epoch, nodes=(0, 1))


def save(epoch: int) -> SaveLayers:
    return SaveLayers(epoch=epoch, iteration=8, layers={})


@pytest.mark.parametrize("order", [abort(4), start(4), save(4), save(3), Shutdown()])
def test_what_follows_on_an_epoch_ends_it(order: Order) -> None:
    """The next epoch, a save in its place, and the end of the job."""
    assert ends(order, epoch=EPOCH, saved_epoch=-1)


@pytest.mark.parametrize("order", [abort(3), abort(2), start(3), start(2), save(2)])
def test_what_is_said_again_ends_nothing(order: Order) -> None:
    """By a coordinator that was started again: the last save was called off for it, and the job
    waited ten minutes for a save that nobody made."""
    assert not ends(order, epoch=EPOCH, saved_epoch=-1)


def test_a_save_that_is_asked_for_again_does_not_call_itself_off() -> None:
    """The order to save is said again, too."""
    assert not ends(save(3), epoch=EPOCH, saved_epoch=3)
    assert ends(abort(4), epoch=EPOCH, saved_epoch=3)


def test_a_switch_that_does_not_come_any_more_ends_nothing() -> None:
    """Ranks that have done the last iteration switch no more, and have to save."""
    assert not ends(start(4, iteration=AT_COMMIT), epoch=EPOCH, saved_epoch=-1)
