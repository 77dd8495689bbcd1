"""What a scoring policy is: a frozen dataclass that turns a `ScoreContext` into one score an entry.

Policies are data: they hash and compare by value, so that a compiled program can be specialised on one, and they nest
(`Blend(Pool(GlobalScore(Attention())), Redundancy())`). What a policy needs beyond the context's cheap fields it declares in
`needs`; a policy that contains others needs what they need.
"""

import abc
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from jaxtyping import Array, Float

if TYPE_CHECKING:
    from zipage_jax.scoring.context import ScoreContext

NEEDS = frozenset({"history", "entries"})


class Scored(NamedTuple):
    """Scores (higher is kept first), and the history to store with the kept entries (None: nothing is stored).

    Values past `num_entries` are ignored. NaN counts as the lowest score; +inf is reserved for the window and the sinks.
    """

    scores: Float[Array, "rows kv_heads entries"]
    history: Float[Array, "rows kv_heads entries"] | None = None


@dataclass(frozen=True)
class ScoringPolicy(abc.ABC):
    """Base of all policies. A subclass is a frozen dataclass with a `score` method; its fields are its parameters.

    Attributes:
        needs: "history" stores a float32 number an entry from one compression to the next (`context.history`); "entries"
            reads keys, values or attention logits of single entries (`context.keys`, `.values`, `.group_logits`): then the
            layers of a slice are scored one after the other, so that those arrays exist for one layer at a time.
        evicts: False only for `Full`.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    evicts: ClassVar[bool] = True

    @abc.abstractmethod
    def score(self, context: "ScoreContext") -> Scored:
        """One float32 score an entry, per row and kv head."""

    @property
    def parts(self) -> tuple["ScoringPolicy", ...]:
        """Policies among the fields."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return tuple(value for value in values if isinstance(value, ScoringPolicy))

    @property
    def all_needs(self) -> frozenset[str]:
        """`needs` of this policy and of all its parts."""
        return self.needs.union(*(part.all_needs for part in self.parts))

    @property
    def keeps_history(self) -> bool:
        """Whether the paged score F must exist."""
        return "history" in self.all_needs

    @property
    def reads_entries(self) -> bool:
        """Whether keys, values or logits of single entries are read outside the kernels."""
        return "entries" in self.all_needs


def check_range(owner: object, name: str, least: float, most: float, fix: str, *, open_least: bool = False) -> None:
    """Raise ValueError unless the number `owner.name` lies in [least, most] (or (least, most])."""
    value = getattr(owner, name)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (least < value if open_least else least <= value) or not value <= most:
        left = "(" if open_least else "["
        raise ValueError(f"{type(owner).__name__}: {name}={value!r} must be in {left}{least}, {most}]; {fix}")


def check_choice(owner: object, name: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `owner.name` is one of `choices`."""
    value = getattr(owner, name)
    if value not in choices:
        raise ValueError(f"{type(owner).__name__}: {name}={value!r} must be one of {list(choices)}")
