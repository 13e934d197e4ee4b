"""Metrics that flows declare as data and read from the database for all of their records at once. The API shows them
under their dotted names, Prometheus with underscores and the prefix `ecluse_`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from ecluse.db.query import Row

Type = Literal["counter", "gauge", "histogram"]


class Sample(NamedTuple):
    """The value of a metric for one record; None if the record has none. For a histogram, `value` is the number of
    observations, `sum` their sum, and `buckets` maps each bound to the number of observations up to it."""

    metric: Metric
    labels: Mapping[str, str]  # of the record and of the metric
    value: float | None
    sum: float | None = None
    buckets: Mapping[str, int] | None = None


class Metric(NamedTuple):
    """A metric that a flow declares. `column` names its value in the row of a record's figures. Several metrics may
    have the same name, with different `labels`."""

    name: str
    type: Type
    meaning: str
    column: str
    labels: Mapping[str, str] = {}

    def sample(self, figures: Row, of: Mapping[str, str], total: str, bounds: Sequence[int]) -> Sample:
        """Return the sample of the record with these figures and the labels `of`. For a histogram, `total` names the
        column of the sum, and each of `bounds` is the name of a column."""
        found = Sample(self, {**of, **self.labels}, figures[self.column])
        if self.type != "histogram":
            return found
        return found._replace(sum=figures[total], buckets={str(one): figures[str(one)] for one in bounds})
