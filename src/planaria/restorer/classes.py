"""Who takes which place, where hundreds of nodes and of places are alike.

Nodes that hold the same make a class, and so do places that need the same. How many of which class
go to which is a transportation problem: a linear program whose corners are whole numbers, as large
as the number of pairs of classes, however many nodes there are.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def cheapest_numbers(
    costs: NDArray[np.float64], supplies: Sequence[int], demands: Sequence[int]
) -> NDArray[np.int64]:
    """How many of each class of nodes go to each class of places, such that the sum is least.

    Exact where costs that differ do so by a ten-millionth of the highest.

    Args:
        costs: finite or infinite; shape [classes of nodes, classes of places], as is the result.
        supplies, demands: how many nodes and places a class has; all demands are to be met.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # As in assignment.py.
    from scipy.sparse import eye_array, kron

    num_supplies, num_demands = costs.shape
    is_possible = np.isfinite(costs)
    highest = max(1.0, float(costs[is_possible].max(initial=0.0)))
    by_supply = kron(eye_array(num_supplies), np.ones((1, num_demands)))
    by_demand = kron(np.ones((1, num_supplies)), eye_array(num_demands))
    found = milp(
        np.where(is_possible, costs / highest, 0.0).reshape(-1),
        bounds=Bounds(0, np.where(is_possible, np.inf, 0.0).reshape(-1)),
        constraints=[
            LinearConstraint(by_supply, ub=supplies),
            LinearConstraint(by_demand, lb=demands, ub=demands),
        ],
        integrality=np.ones(costs.size, dtype=np.int64),
        options={"mip_rel_gap": 0.0},
    )
    assert found.success, found.message
    numbers: NDArray[np.int64] = np.rint(found.x).astype(np.int64).reshape(costs.shape)
    return numbers
