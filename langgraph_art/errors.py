"""Every error this package raises by itself, all under `ArtError`.

Invariant: a message says what was wrong, where (which node, run or file) and what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from langgraph_art.runs import RunGroup


class ArtError(Exception):
    """Base of all errors of langgraph-art."""


class CarriesGroups(ArtError):
    """Base of errors that end a rollout.

    Attributes:
        groups: the runs that had ended and been scored by then, by group; empty if the error is of no rollout. A group
            may be short of runs. `client.train(error.groups)` trains on them, `save_runs` keeps them.
    """

    def __init__(self, message: str, *, groups: Sequence[RunGroup] = ()) -> None:
        super().__init__(message)
        self.groups = list(groups)


class ServerUnreachable(ArtError):
    """No answer from the server: it is down, still starting, or the URL is wrong."""


class ServerStartFailed(ArtError):
    """An embedded server did not become ready; the message ends with the last lines of its log."""


class ServerRefused(CarriesGroups):
    """The server answered with an error.

    Attributes:
        status: HTTP status of the answer, such as 404; ``None`` if the answer itself could not be understood.
        code: machine-readable code, such as ``model_not_found``, if the server gave one.
        groups: if it ended a rollout, the runs that had ended and been scored by then; some groups may be short.
    """

    def __init__(
        self, message: str, *, status: int | None, code: str | None = None, groups: Sequence[RunGroup] = ()
    ) -> None:
        super().__init__(message, groups=groups)
        self.status = status
        self.code = code


class RewardError(CarriesGroups):
    """The reward callback raised, or returned something that is not a finite number.

    Attributes:
        groups: everything that was rolled out, with the rewards that could be computed. Mend the callback and call
            `score(error.groups, reward)`, or save them with `save_runs`.
    """


class RolloutFailed(CarriesGroups):
    """Every run of a rollout failed for reasons that no policy can cause, such as a server that is down.

    Attributes:
        groups: the failed runs, with their calls up to the failure.
    """


class NothingToTrain(ArtError):
    """A submission would hold no run: the groups are empty, or all of their runs failed."""


class EmptyDataset(ArtError):
    """There are no inputs to roll out."""


class NoCallsRecorded(CarriesGroups):
    """No run made a call with `ChatART`, or none with a policy to train, so there is nothing to train on.

    Attributes:
        groups: everything that was rolled out.
    """


class TrainingFailed(ArtError):
    """The server accepted a submission, and then no new version serves; the message says why, and how to go on."""


class RunFileError(ArtError):
    """A file of graph runs is broken, or was written by a newer version."""
